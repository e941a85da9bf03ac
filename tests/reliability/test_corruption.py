"""Content that is not what was written is noticed: any flipped bit, and any change made past the layer."""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from reliability import content
from reliability.children import CONTEXT, start

import livinglayer

torture = pytest.mark.torture


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedded layer at rest."""
    directory = tmp_path_factory.mktemp("sample") / "layer"
    with closing(livinglayer.open(directory, create=True)) as layer:
        content.populate(layer)
    content.settle(directory)
    return directory


def examine(directory: Path) -> tuple[str, Any]:
    """`content.judge` in another process: a crash or a hang there is an answer too."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    child = start(content.examine, str(directory), sender)
    sender.close()
    try:
        return receiver.recv() if receiver.poll(60) else ("broken", "no answer within 60 s")
    except EOFError:
        child.join()
        return "broken", f"the process died with {child.exitcode}"
    finally:
        child.kill()


@pytest.mark.parametrize("flips", [25, pytest.param(300, marks=torture)])
def test_a_flipped_bit_that_changes_content_is_noticed(
    sample: Path, tmp_path: Path, flips: int, record_property: Callable[[str, object], None]
) -> None:
    seed = int(os.environ.get("LAYER_TEST_SEED", random.randrange(1 << 32)))
    rng = random.Random(seed)
    path = content.database(sample)
    used = [n for n, byte in enumerate(path.read_bytes()) if byte]
    original = list(content.stored(path))
    verdict, truth = examine(sample)
    assert verdict == "fine", truth
    counts: Counter[str] = Counter()
    for flip in range(flips):
        # Most of a small file is empty space: every other flip goes where something is.
        byte = rng.choice(used) if flip % 2 else rng.randrange(path.stat().st_size)
        position = byte * 8 + rng.randrange(8)
        copy = tmp_path / str(flip)
        shutil.copytree(sample, copy)
        with open(content.database(copy), "r+b") as file:
            file.seek(position // 8)
            [before] = file.read(1)
            file.seek(position // 8)
            file.write(bytes([before ^ 1 << position % 8]))
        reread = tmp_path / "reread.db"  # a copy: the layer shall meet the file as the flip left it
        shutil.copy(content.database(copy), reread)
        try:
            changed = list(content.stored(reread)) != original
        except (apsw.Error, UnicodeDecodeError):
            changed = True
        verdict, detail = examine(copy)
        where = f"bit {position} of {path.stat().st_size * 8} (LAYER_TEST_SEED={seed}, flip {flip})"
        assert verdict != "broken", f"{where}: {detail}"
        if verdict == "fine":
            assert not changed, f"{where} changed content and nothing was noticed"
            assert detail == truth, f"{where} changed what the layer serves and nothing was noticed"
        counts["changed content" if changed else "changed nothing"] += 1
        counts[verdict] += 1
        shutil.rmtree(copy)
    record_property("flips", flips)
    for name, count in sorted(counts.items()):
        record_property(name, count)


def test_a_flipped_bit_in_a_stored_file_is_noticed(sample: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sample, copy)
    blobs = [
        p for p in (copy / ".layer").rglob("*") if p.is_file() and b"picture 3" in p.read_bytes() and p.suffix != ".db"
    ]
    assert blobs, "no file holds the picture"
    data = bytearray(blobs[0].read_bytes())
    data[10] ^= 4
    blobs[0].chmod(0o600)
    blobs[0].write_bytes(data)
    with closing(livinglayer.open(copy)) as layer:
        assert not layer.verify()


@pytest.mark.parametrize("damage", ["empty", "noise", "half", "a page of zeros", "not a database"])
def test_a_damaged_file_is_corrupt_by_name(sample: Path, tmp_path: Path, damage: str) -> None:
    """`open` or `verify` says so with a hint; the process lives."""
    copy = tmp_path / "copy"
    shutil.copytree(sample, copy)
    path = content.database(copy)
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "noise": random.Random(1).randbytes(len(data)),
            "half": data[: len(data) // 2],
            "a page of zeros": data[:4096] + bytes(4096) + data[8192:],
            "not a database": b"hello, world\n" * 1000,
        }[damage]
    )
    verdict, detail = examine(copy)
    # An empty file is also what is left of a layer whose making was interrupted: there is none.
    names = ("Corrupt", "NotFound") if damage == "empty" else ("Corrupt",)
    assert verdict == "problems" or (verdict == "refused" and detail.startswith(names)), (verdict, detail)
