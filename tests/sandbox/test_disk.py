"""The disk of boxes: real btrfs in a sparse image, mounted here and unmounted whatever happens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from livinglayer.errors import Conflict, Corrupt, Invalid, NotFound
from livinglayer.sandbox.disk import Disk

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a btrfs, which needs root")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with Disk.open(tmp_path / "state", 2 << 30) as disk:
        yield disk


def mounts(path: Path) -> int:
    return sum(str(path) in line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())


def loops(path: Path) -> list[str]:
    found = []
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if str(path) in entry.read_text():
                found.append(entry.parts[3])
        except OSError:
            continue
    return found


def gone(path: Path) -> bool:
    """Unmounted, and its loop device freed (which the kernel does in its own time)."""
    for _ in range(100):
        if not mounts(path) and not loops(path):
            return True
        time.sleep(0.02)
    return False


def test_a_fresh_disk_is_a_btrfs_with_simple_quotas(disk: Disk) -> None:
    assert (disk.kind, disk.note) == ("loop", "")
    assert disk.quota in ("simple", "full")
    assert sorted(os.listdir(disk.root)) == ["boxes", "layers", "tmp", "volumes"]
    assert disk.free() > 100 << 20


def test_nobody_else_passes_into_the_disk(disk: Disk) -> None:
    assert disk.root.stat().st_mode & 0o077 == 0
    options = next(
        line.split()[5]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if line.split()[4] == str(disk.root)
    )
    assert {"nosuid", "noatime"} <= set(options.split(","))


def test_a_box_directory_has_upper_and_work(disk: Disk) -> None:
    box = disk.create("a", 64 << 20)
    assert sorted(os.listdir(box)) == ["u", "w"]
    assert disk.is_subvolume(box)
    with pytest.raises(Conflict, match="already there"):
        disk.create("a")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\0b", "x" * 300])
def test_names_that_are_no_names(disk: Disk, name: str) -> None:
    with pytest.raises(Invalid):
        disk.create(name)


def test_the_limit_is_enforced_and_can_be_raised(disk: Disk) -> None:
    box = disk.create("a", 8 << 20)
    with pytest.raises(OSError, match="quota"), open(box / "u/big", "wb", buffering=0) as file:
        for _ in range(32):
            file.write(os.urandom(1 << 20))
    assert 4 << 20 < disk.used(box) <= 9 << 20
    disk.limit(box, 64 << 20)
    (box / "u/more").write_bytes(os.urandom(8 << 20))


def test_one_box_at_its_limit_leaves_the_others_alone(disk: Disk) -> None:
    full, other = disk.create("full", 4 << 20), disk.create("other", 32 << 20)
    with pytest.raises(OSError, match="quota"):
        (full / "u/x").write_bytes(os.urandom(16 << 20))
    (other / "u/x").write_bytes(os.urandom(8 << 20))


def test_a_snapshot_does_not_see_later_writes(disk: Disk) -> None:
    box = disk.create("a")
    (box / "u/file").write_text("before")
    copy = disk.snapshot(box, disk.tmp / "copy", readonly=True)
    (box / "u/file").write_text("after")
    assert (copy / "u/file").read_text() == "before"
    with pytest.raises(OSError, match="Read-only"):
        (copy / "u/file").write_text("no")
    with pytest.raises(Conflict):
        disk.snapshot(box, disk.tmp / "copy")
    with pytest.raises(NotFound):
        disk.snapshot(disk.boxes / "missing", disk.tmp / "other")


def test_seal_makes_a_layer_of_the_upper(disk: Disk) -> None:
    box = disk.create("a")
    (box / "u/u").mkdir()  # names that mean something one level up
    (box / "u/w").write_text("w")
    (box / "u/u/x").write_text("x")
    (box / "w/work").mkdir(mode=0)
    os.chmod(box / "u", 0o700)
    os.chown(box / "u", 5, 6)
    sealed = disk.seal(box, disk.tmp / "s")
    assert sorted(os.listdir(sealed)) == ["u", "w"]
    assert (sealed / "u/x").read_text() == "x"
    found = sealed.stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o700, 5, 6)
    assert disk.sealed(sealed)
    disk.move(sealed, disk.layers / "l")
    assert disk.sealed(disk.layers / "l")


def test_destroy_takes_whole_trees_and_nothing(disk: Disk) -> None:
    box = disk.create("a")
    (box / "u/d/e").mkdir(parents=True)
    (box / "u/d/e/f").write_text("x")
    (disk.tmp / "plain/x").mkdir(parents=True)
    for path in (box, disk.seal(disk.create("b")), disk.tmp / "plain", disk.boxes / "never"):
        disk.destroy(path)
        assert not path.exists()


def test_what_changed_since_a_snapshot_is_never_missed(disk: Disk) -> None:
    box = disk.create("a")
    (box / "u/d").mkdir()
    for number in range(500):
        (box / f"u/d/{number}").write_bytes(os.urandom(8192))
    first = disk.lineage(disk.seal(box))
    assert first is not None
    quiet = (box / "u/d/100").stat()
    descriptor = os.open(box / "u/d/100", os.O_RDWR)  # size, times and name as they were
    os.pwrite(descriptor, b"!", 4000)
    os.close(descriptor)
    os.utime(box / "u/d/100", ns=(quiet.st_atime_ns, quiet.st_mtime_ns))
    second = disk.seal(box)
    lineage = disk.lineage(second)
    assert lineage is not None and lineage.parent == first.parent and lineage.taken > first.taken
    touched = disk.touched(second, first.taken)
    assert quiet.st_ino in touched
    assert len(touched) < 250  # neighbours in one leaf, not all


def test_close_leaves_no_mount_and_no_loop_device(tmp_path: Path) -> None:
    with Disk.open(tmp_path, 1 << 30) as disk:
        disk.create("a")
        assert mounts(tmp_path) and loops(tmp_path)
    assert gone(tmp_path)


def test_a_second_opening_takes_the_first_ones_mount(disk: Disk) -> None:
    disk.create("a")
    other = Disk.open(disk.root.parent)
    assert (other.boxes / "a").is_dir()
    assert len(loops(disk.root.parent)) == 1 and mounts(disk.root.parent) == 1
    other.close(unmount=False)


def test_boxes_are_there_after_a_restart(tmp_path: Path) -> None:
    with Disk.open(tmp_path, 1 << 30) as disk:
        (disk.create("a", 4 << 20) / "u/x").write_text("x")
    with Disk.open(tmp_path) as disk:
        assert (disk.boxes / "a/u/x").read_text() == "x"
        with pytest.raises(OSError, match="quota"):  # the limit too
            (disk.boxes / "a/u/y").write_bytes(os.urandom(8 << 20))
    assert gone(tmp_path)


def test_a_killed_process_leaves_a_mount_that_the_next_one_takes(tmp_path: Path) -> None:
    code = f"import os; from pathlib import Path; from livinglayer.sandbox.disk import Disk; Disk.open(Path({str(tmp_path)!r}), 1 << 30).create('a'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    with Disk.open(tmp_path) as disk:
        assert os.listdir(disk.boxes) == ["a"]
        assert len(loops(tmp_path)) == 1
    assert gone(tmp_path)


def test_a_mount_still_used_elsewhere_is_joined_not_doubled(tmp_path: Path) -> None:
    disk = Disk.open(tmp_path, 1 << 30)
    disk.create("a")
    # A box of an earlier run, in a mount namespace of its own.
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", "echo ready; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline()
    disk.close()
    try:
        with Disk.open(tmp_path) as again:
            assert os.listdir(again.boxes) == ["a"]
            assert len(loops(tmp_path)) == 1
    finally:
        holder.communicate(b"\n")
    assert gone(tmp_path)


def test_the_mount_of_a_removed_image_is_cleared_away(tmp_path: Path) -> None:
    disk = Disk.open(tmp_path, 1 << 30)
    disk.create("old")
    (tmp_path / "disk.img").unlink()
    disk.close(unmount=False)
    with Disk.open(tmp_path, 1 << 30) as again:
        assert os.listdir(again.boxes) == []
    assert gone(tmp_path)


def test_two_state_directories_do_not_meet(tmp_path: Path) -> None:
    with Disk.open(tmp_path / "a", 1 << 30) as one, Disk.open(tmp_path / "b", 1 << 30) as two:
        one.create("x")
        assert os.listdir(two.boxes) == []
        two.close()
        assert os.listdir(one.boxes) == ["x"]
    assert gone(tmp_path)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "disk.img").write_bytes(os.urandom(1 << 20))
    with pytest.raises(Corrupt, match=r"disk\.img can't be mounted"):
        Disk.open(tmp_path)
    assert gone(tmp_path)


def test_without_btrfs_there_are_plain_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    with Disk.open(tmp_path) as disk:
        assert disk.kind in ("reflink", "copy") and disk.quota == "none"
        assert "mkfs.btrfs is missing" in disk.note and "not enforced" in disk.note
        box = disk.create("a", 1 << 20)
        (box / "u/x").write_text("x")
        sealed = disk.seal(box)
        (box / "u/x").write_text("later")
        assert (sealed / "x").read_text() == "x"
        assert disk.used(box) > 0
        disk.move(sealed, disk.layers / "l")
        disk.destroy(box)
        assert os.listdir(disk.boxes) == []
    assert not mounts(tmp_path)
