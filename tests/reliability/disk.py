"""python -m reliability.disk ENGINE DIRECTORY: fill the small file system at DIRECTORY by writing, free space, go on."""

import os
import random
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from cluster import Cluster

import livinglayer
from livinglayer.errors import LayerError, Unavailable

ROW = random.Random(1).randbytes(50_000).hex()  # does not compress


def fill(location: str, directory: Path) -> str:
    """Write to the layer at `location`, whose rows lie in `directory`, until nothing fits; then free space and go on."""
    ballast = directory / "ballast"
    ballast.write_bytes(bytes(8 << 20))
    layer = livinglayer.open(location, create=True)
    layer.define("note", {"name": "text!", "data": "text"})
    if location.startswith("postgresql:"):
        # The first read of a name makes its view, which takes space there; what was read before goes on being read.
        layer.query("select 1 as one from note, note__history where false")
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
        with closing(livinglayer.open(location)) as other:
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
    with closing(livinglayer.open(location)) as layer:
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


@contextmanager
def on_postgres(directory: Path) -> Iterator[str]:
    """The URL of a database on a server of its own, whose tables (not its log) are in `directory`."""
    server = Cluster(Path(os.environ["LAYER_TEST_HOME"]), fsync=False)
    try:
        tables = directory / "tables"
        tables.mkdir()
        shutil.chown(tables, server.user or os.getuid())
        server.execute(f"create tablespace small location '{tables}'")
        with server.database() as url:
            server.execute(f"alter database {url.rsplit('/', 1)[1]} set tablespace small")
            yield url
    finally:
        server.remove()


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "sqlite":
        print(fill(str(place / "layer"), place))
    else:
        with on_postgres(place) as url:
            print(fill(url, place))
