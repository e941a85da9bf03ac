"""Forks: many from a snapshot for almost nothing, from a live box at one moment of it, and nothing written is ever lost."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sandbox.homes import Home, home, wait_for

from livinglayer.sandbox import Sandbox

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and namespaces need root")

PLANT = """
import os, sys
files, size = int(sys.argv[1]), int(sys.argv[2])
for number in range(files):
    directory = f"/home/user/tree/{number // 100:03}"
    if number % 100 == 0:
        os.makedirs(directory)
    with open(f"{directory}/{number:05}", "wb") as file:
        file.write(number.to_bytes(4, "big") + os.urandom(min(size, 4096)) * (size // 4096 or 1))
"""
DIGEST = """
import hashlib, os
total, count = hashlib.sha256(), 0
for at, directories, names in os.walk("/home/user/tree"):
    directories.sort()
    for name in sorted(names):
        path = os.path.join(at, name)
        total.update(path.encode() + open(path, "rb").read())
        count += 1
print(count, total.hexdigest())
"""
WRITER = """
import os
line = 0
file = os.open("/home/user/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    os.write(file, b"%08d\\n" % line)
    os.fsync(file)
    aside = os.open("/home/user/last.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(aside, b"%08d" % line)
    os.close(aside)
    os.rename("/home/user/last.new", "/home/user/last")
    line += 1
"""


@pytest.fixture(scope="module")
def own() -> Iterator[Home]:
    with home() as made:
        yield made


def disk_used(own: Home) -> int:
    """Bytes in use on the disk, once everything written is on it."""
    os.sync()
    here = os.statvfs(own.state / "disk")
    return (here.f_blocks - here.f_bfree) * here.f_frsize


def from_a_snapshot(own: Home, files: int, size: int) -> dict[str, float]:
    """Ten boxes of one snapshot: what it took, and that each is whole and its own."""
    with Sandbox.create(memory="1G", disk="4G", cpu=2) as parent:
        done = parent.run(["python3", "-c", PLANT, str(files), str(size)], timeout=300)
        assert done.exit_code == 0, done.stderr.text
        began = time.monotonic()
        snapshot = parent.snapshot()
        seconds = time.monotonic() - began
        expected = parent.run(["python3", "-c", DIGEST], timeout=300).stdout
    assert expected.text.split()[0] == str(files)
    Sandbox.create(snapshot=snapshot.id, memory="1G", disk="4G").kill()  # its layers are at hand from here on
    time.sleep(0.5)
    before = disk_used(own)
    rounds: list[float] = []
    for turn in range(3):
        began = time.monotonic()
        forks = [Sandbox.create(snapshot=snapshot.id, memory="1G", disk="4G") for _ in range(10)]
        rounds.append((time.monotonic() - began) * 1000)
        if turn < 2:
            for fork in forks:
                fork.kill()
            time.sleep(0.3)
    grown = disk_used(own) - before
    first = forks[0]
    began = time.monotonic()
    of_one = first.fork(10)
    of_box = (time.monotonic() - began) * 1000
    for number, fork in enumerate(forks):  # each writes where the others do, and sees only its own
        fork.run(
            f"echo {number} > /home/user/tree/000/00000; rm /home/user/tree/000/0000{1 + number % 9}; echo new > /home/user/tree/n{number}"
        )
    for number, fork in enumerate(forks):
        assert fork.files.read("/home/user/tree/000/00000") == b"%d\n" % number
        names = {entry.name for entry in fork.files.list("/home/user/tree")}
        assert {name for name in names if name.startswith("n")} == {f"n{number}"}
        missing = {f"0000{one}" for one in range(1, 10)} - {e.name for e in fork.files.list("/home/user/tree/000")}
        assert missing == {f"0000{1 + number % 9}"}
    checked = of_one if files <= 1000 else of_one[:2]
    for fork in checked:  # forked before those wrote: the whole tree, byte by byte
        assert fork.run(["python3", "-c", DIGEST], timeout=300).stdout == expected
    for fork in (*forks, *of_one):
        fork.kill()
    with Sandbox.create(snapshot=snapshot.id, memory="1G", disk="4G") as last:
        assert last.run(["python3", "-c", DIGEST], timeout=300).stdout == expected  # the snapshot itself is what it was
    return {
        "snapshot (ms)": round(seconds * 1000, 1),
        "10 forks from the snapshot (ms), best": round(min(rounds), 1),
        "10 forks from the snapshot (ms), median": round(statistics.median(rounds), 1),
        "10 forks of such a box (ms)": round(of_box, 1),
        "disk for 10 (KB)": grown >> 10,
    }


def test_ten_forks_of_a_tree_from_a_snapshot(own: Home) -> None:
    figures = from_a_snapshot(own, files=1000, size=4096)
    print("\n1,000 files, 4 MB:", figures)
    assert figures["disk for 10 (KB)"] <= 10 << 10


@pytest.mark.torture
def test_ten_forks_of_a_gigabyte_from_a_snapshot(own: Home) -> None:
    figures = from_a_snapshot(own, files=10_000, size=107_374)
    print("\n10,000 files, 1 GB:", figures)
    assert figures["disk for 10 (KB)"] <= 10 << 10


def prefix(box: Any) -> int:
    """How many lines a box's log has, which must be the first so many, whole, and no fewer than what was renamed after them."""
    log = box.files.read("/home/user/log")
    lines = log.splitlines()
    assert log.endswith(b"\n") or not log, log[-20:]
    assert lines == [b"%08d" % number for number in range(len(lines))]
    last = int(box.files.read("/home/user/last"))
    assert len(lines) - 2 <= last < len(lines), (last, len(lines))  # one moment of both files
    return len(lines)


def test_forks_of_a_live_writing_box_hold_one_moment_of_it(own: Home) -> None:
    took: list[float] = []
    with Sandbox.create(memory="512M", disk="1G") as parent:
        for number in range(4):  # files of some size that are being written, too
            parent.start(["sh", "-c", f"while :; do head -c 2000000 /dev/urandom > /home/user/big{number}; done"])
        writer = parent.start(["python3", "-c", WRITER])
        wait_for(lambda: parent.files.exists("/home/user/last"))
        counts: list[int] = []
        for _ in range(3):
            time.sleep(0.3)
            began = time.monotonic()
            children = parent.fork(10)
            took.append((time.monotonic() - began) * 1000)
            after = int(parent.files.read("/home/user/last"))
            seen = {prefix(child) for child in children}
            assert len(seen) == 1 and seen.pop() <= after + 1  # all ten the same moment, none of what came later
            count = prefix(children[0])
            time.sleep(0.2)
            wait_for(lambda: int(parent.files.read("/home/user/last")) > after)  # noqa: B023  it goes on
            assert all(prefix(child) == count for child in children)  # and its later lines are seen by none
            assert not any(child.processes() for child in children)
            for number, child in enumerate(children):
                child.run(f"echo child {number} >> /home/user/log")
            assert not any(b"child" in line for line in parent.files.read("/home/user/log").splitlines())
            for child in children:
                child.kill()
            counts.append(count)
        assert counts == sorted(set(counts))
        assert [found["id"] for found in parent.processes() if found["id"] == writer.id]
        writer.kill()
        prefix(parent)
    print("\n10 forks of a live, writing box, ms:", [round(one, 1) for one in took])


def test_a_snapshot_of_a_live_box_is_one_moment_of_it(own: Home) -> None:
    with Sandbox.create(disk="1G") as parent:
        writer = parent.start(["python3", "-c", WRITER])
        wait_for(lambda: parent.files.exists("/home/user/last"))
        counts = []
        for _ in range(5):
            time.sleep(0.1)
            snapshot = parent.snapshot()
            with Sandbox.create(snapshot=snapshot.id) as child:
                counts.append(prefix(child))
        assert counts == sorted(set(counts))
        writer.kill()


def test_what_was_written_before_and_after_each_of_ten_resumes_is_never_lost(own: Home) -> None:
    with Sandbox.create(name="resumed", disk="1G") as box:
        written: dict[str, bytes] = {}

        def write(name: str) -> None:
            content = hashlib.sha256(name.encode()).digest() * 1000
            box.files.write(f"/home/user/{name}", content)
            box.files.write("/home/user/same", content)
            written[name], written["same"] = content, content
            box.run(
                f"echo {name} >> /home/user/lines; rm -f /home/user/gone; mkdir -p /home/user/dir-{name}; ln -s x /home/user/link-{name}"
            )
            removed.append(name)

        removed: list[str] = []
        write("before")
        snapshots = [box.snapshot()]
        for turn in range(10):
            box.suspend()
            box.resume()
            write(f"after-{turn}")
            if turn % 3 == 0:
                snapshots.append(box.snapshot())
            for name, content in written.items():
                assert box.files.read(f"/home/user/{name}") == content, (turn, name)
            assert box.files.read("/home/user/lines").decode().split() == removed
            assert all(box.files.stat(f"/home/user/link-{name}").target == "x" for name in removed)
        for turn, snapshot in enumerate(snapshots):  # and none of the snapshots taken on the way has changed
            with Sandbox.create(snapshot=snapshot.id) as then:
                lines = then.files.read("/home/user/lines").decode().split()
                assert lines == removed[: 1 if turn == 0 else 2 + 3 * (turn - 1)]


def test_ten_generations_from_snapshot_to_snapshot_lose_nothing(own: Home) -> None:
    """A file changed before a snapshot and after each of ten resumes from it, by whoever began there."""
    snapshot = None
    for turn in range(12):
        with Sandbox.create(disk="1G", snapshot=snapshot and snapshot.id) as box:
            if turn:
                assert box.files.read("/home/user/lines").decode().split() == [str(number) for number in range(turn)]
                assert box.files.read(f"/home/user/file-{turn - 1}") == b"%d" % (turn - 1)
                assert not box.files.exists(f"/home/user/temporary-{turn - 1}")
            box.run(
                f"echo {turn} >> /home/user/lines; printf {turn} > /home/user/file-{turn}; touch /home/user/temporary-{turn}"
            )
            box.snapshot()
            box.run(f"rm /home/user/temporary-{turn}")
            snapshot = box.snapshot()
    with Sandbox.create(snapshot=snapshot.id) as box:
        names = {entry.name for entry in box.files.list("/home/user")}
        assert names == {"lines", *(f"file-{number}" for number in range(12))}
