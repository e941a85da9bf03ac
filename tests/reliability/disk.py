"""python -m reliability.disk DIRECTORY: fill the small file system at DIRECTORY by writing, free space, go on."""

import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import livinglayer
from livinglayer.errors import LayerError, Unavailable

ROW = "x" * 100_000


def fill(directory: Path) -> str:
    ballast = directory / "ballast"
    ballast.write_bytes(bytes(8 << 20))
    layer = livinglayer.open(directory / "layer", create=True)
    layer.define("note", {"name": "text!", "data": "text"})
    acked, errors = write_until_full(layer)
    assert errors, "the disk never filled"
    for error in errors:
        assert isinstance(error, Unavailable) and error.hint, repr(error)

    # The last byte too: now not even a small row fits.
    with open(directory / "rest", "wb", buffering=0) as rest:
        for size in (1 << 20, 1 << 12, 1):
            while write(rest, bytes(size)):
                pass
    for n in range(200):
        try:
            layer.insert("note", {"name": f"small {n}", "data": ROW[:2000]})
            acked.add(f"small {n}")
        except LayerError as error:
            assert isinstance(error, Unavailable) and error.hint, repr(error)
            break
    else:
        raise AssertionError("200 rows fitted on a full disk")
    try:
        with layer.transaction() as tx:
            for n in range(20):
                tx.insert("note", {"name": f"in a transaction {n}", "data": ROW})
        raise AssertionError("a transaction fitted on a full disk")
    except Unavailable:
        pass

    # Reads are served, from this handle and from another, and show what was acknowledged and nothing else.
    assert names(layer) == acked
    assert layer.query("select count(*) as n from note__history") == [{"n": len(acked)}]
    try:
        with closing(livinglayer.open(directory / "layer")) as other:
            assert names(other) == acked
    except Unavailable as error:  # a file of its own may not fit: then it says so
        assert error.hint, repr(error)

    ballast.unlink()
    layer.insert("note", {"name": "after", "data": ROW})
    with layer.transaction() as tx:
        tx.insert("note", {"name": "after in a transaction", "data": ROW})
    acked |= {"after", "after in a transaction"}
    assert names(layer) == acked
    report = layer.verify()
    assert report, report.problems
    layer.close()
    with closing(livinglayer.open(directory / "layer")) as layer:
        assert names(layer) == acked
        report = layer.verify()
        assert report, report.problems
    return f"{len(acked)} rows kept, {len(errors)} refused"


def write_until_full(layer: Any) -> tuple[set[str], list[BaseException]]:
    """Four writers, each until it has been refused three times."""
    acked: set[str] = set()
    errors: list[BaseException] = []

    def work(writer: int) -> None:
        refused = n = 0
        while refused < 3:
            try:
                layer.insert("note", {"name": f"{writer}/{n}", "data": ROW})
                acked.add(f"{writer}/{n}")
            except BaseException as error:
                errors.append(error)
                refused += 1
            n += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return acked, errors


def names(layer: Any) -> set[str]:
    rows = [row["name"] for row in layer.query("select name from note")]
    assert len(rows) == len(set(rows)), "a row is there twice"
    return set(rows)


def write(file: Any, data: bytes) -> bool:
    try:
        return os.write(file.fileno(), data) > 0
    except OSError:
        return False


if __name__ == "__main__":
    print(fill(Path(sys.argv[1])))
