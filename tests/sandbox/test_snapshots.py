"""Snapshots of real uppers: written through overlay on btrfs, kept by content, loaded into new boxes."""

from __future__ import annotations

import ctypes
import io
import json
import os
import random
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from livinglayer.errors import Corrupt, Invalid, LimitExceeded, NotFound
from livinglayer.sandbox.disk import Disk
from livinglayer.sandbox.layers import Layers
from livinglayer.sandbox.snapshots import Change, Snapshot, Snapshots, identify
from livinglayer.sandbox.store import CHUNK, Store

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a btrfs, which needs root")

libc = ctypes.CDLL(None, use_errno=True)


class Place:
    """A state directory with all that snapshots need, and boxes that are no more than a mounted overlay."""

    def __init__(self, state: Path) -> None:
        self.disk = Disk.open(state, 8 << 30)
        self.store = Store(state / "store", durable=False)
        self.layers = Layers(self.disk, store=self.store)
        self.snapshots = Snapshots(self.disk, self.layers)
        self.state = state
        self.count = 0

    def base(self, files: dict[str, str]) -> tuple[str, ...]:
        tree = self.disk.subvolume(self.disk.tmp / f"base{os.urandom(4).hex()}")
        for name, text in files.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)
        return (self.layers.add(tree),)

    def box(self) -> Path:
        self.count += 1
        return self.disk.create(f"box{self.count}")

    @contextmanager
    def mounted(self, box: Path, layers: tuple[str, ...]) -> Iterator[Path]:
        root = self.state / "root" / box.name
        root.mkdir(parents=True, exist_ok=True)
        lower = ":".join(str(self.layers.path(name)) for name in layers)
        options = f"lowerdir={lower},upperdir={box}/u,workdir={box}/w,metacopy=off,redirect_dir=off"
        if libc.mount(b"overlay", os.fsencode(root), b"overlay", 0, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), options)
        try:
            yield root
        finally:
            libc.umount2(os.fsencode(root), 2)

    def take(self, box: Path, layers: tuple[str, ...], **options: object) -> Snapshot:
        return self.snapshots.snapshot(self.disk.seal(box), layers, **options)  # type: ignore[arg-type]

    def close(self) -> None:
        self.store.close()
        self.disk.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "state")
    yield place
    place.close()


def content(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(root.rglob("*")):
        found[str(path.relative_to(root))] = "/" if path.is_dir() else path.read_text()
    return found


BASE = {"etc/conf": "base", "etc/other": "other", "lib/a": "a", "lib/b": "b", "old/x": "x", "old/y": "y"}


def test_a_box_made_from_a_snapshot_sees_what_was_there(place: Place) -> None:
    base = place.base(BASE)
    box = place.box()
    with place.mounted(box, base) as root:
        (root / "etc/conf").write_text("changed")
        (root / "new").write_text("new")
        (root / "lib/a").unlink()
        shutil.rmtree(root / "old")
        (root / "old").mkdir()  # opaque: what the base has there stays hidden
        (root / "old/z").write_text("z")
        expected = content(root)
        found = place.take(box, base)
    with place.mounted(place.box(), place.snapshots.load(found.id)) as root:
        assert content(root) == expected
    assert found.layers[1:] == base
    assert (found.tier, found.parent, found.memory, found.skipped) == ("namespace", None, False, ())


def test_it_is_the_same_when_the_cache_was_deleted(place: Place) -> None:
    base = place.base(BASE)
    box = place.box()
    with place.mounted(box, base) as root:
        shutil.rmtree(root / "old")
        (root / "old").mkdir()
        (root / "lib/b").unlink()
        (root / "big").write_bytes(os.urandom(3 * CHUNK + 5))
        os.link(root / "big", root / "same")
        expected = (root / "big").read_bytes()
        found = place.take(box, base)
    for name in os.listdir(place.disk.layers):
        place.disk.destroy(place.disk.layers / name)
    with place.mounted(place.box(), place.snapshots.load(found.id)) as root:
        assert (root / "big").read_bytes() == (root / "same").read_bytes() == expected
        assert os.listdir(root / "old") == []
        assert sorted(os.listdir(root / "lib")) == ["a"]
    assert place.snapshots.verify(found.id) > 5


def test_equal_content_has_an_equal_id(place: Place) -> None:
    base = place.base(BASE)
    ids = set()
    for _ in range(2):
        box = place.box()
        (box / "u/file").write_text("x")
        os.utime(box / "u/file", ns=(0, 0))
        os.utime(box / "u", ns=(0, 0))
        ids.add(place.take(box, base).id)
    assert len(ids) == 1
    assert len(place.snapshots.list_snapshots()) == 1


def test_a_box_that_changed_nothing_is_its_base(place: Place) -> None:
    base = place.base(BASE)
    box = place.box()
    first = place.take(box, base)
    assert first.layers == base
    (box / "u/file").write_text("x")
    second = place.take(box, base)
    again = place.take(place.box(), place.snapshots.load(second.id))
    assert again.id == second.id


def test_a_change_is_never_lost_over_ten_resumes(place: Place) -> None:
    """Each turn changes a file before the snapshot, in ways that times and sizes do not show, and reads all of it after the resume."""
    layers = place.base({"f": "0" * 9000, "g": "g"})
    expected = {"f": "0" * 9000, "g": "g"}
    for turn in range(10):
        box = place.box()
        with place.mounted(box, layers) as root:
            assert content(root) == expected
            was = (root / "f").stat()
            text = str(turn) * 9000
            (root / "f").write_text(text)
            os.utime(root / "f", ns=(was.st_atime_ns, was.st_mtime_ns))
            (root / f"new{turn}").write_text(f"{turn}" * 5000)
            expected |= {"f": text, f"new{turn}": f"{turn}" * 5000}
            if turn > 2:
                (root / f"new{turn - 3}").unlink()
                del expected[f"new{turn - 3}"]
            found = place.take(box, layers)
            # The box goes on, and is snapshotted again: the second one must not be the first.
            os.pwrite(descriptor := os.open(root / "f", os.O_RDWR), b"!", 4500)
            os.close(descriptor)
            os.utime(root / "f", ns=(was.st_atime_ns, was.st_mtime_ns))
            expected["f"] = text[:4500] + "!" + text[4501:]
            later = place.take(box, layers, parent=found.id)
            assert later.id != found.id
        place.disk.destroy(box)
        if turn % 3 == 0:
            for name in os.listdir(place.disk.layers):
                place.disk.destroy(place.disk.layers / name)
        layers = place.snapshots.load(later.id)
    with place.mounted(place.box(), layers) as root:
        assert content(root) == expected


def test_random_changes_and_snapshots_agree_with_a_full_reading(place: Place) -> None:
    """The quick path (untouched files are not read) gives the very id that reading everything gives."""
    rng = random.Random(5)
    base = place.base({"x": "x"})
    box = place.box()
    (box / "u/d").mkdir()
    for number in range(600):  # more than one leaf of the filesystem's tree holds
        (box / f"u/d/{number}").write_bytes(rng.randbytes(5000))
    reused = 0
    for _ in range(12):
        for _ in range(rng.randrange(1, 12)):
            path = box / f"u/d/{rng.randrange(600)}"
            act = rng.randrange(6)
            if act <= 2 or not path.exists():
                path.write_bytes(rng.randbytes(rng.choice([10, 5000, CHUNK + 1])))
            elif act == 3:
                was = path.stat()
                with open(path, "r+b") as file:
                    file.seek(rng.randrange(was.st_size))
                    file.write(b"!")
                os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
            elif act == 4:
                path.unlink()
            else:
                os.rename(path, box / f"u/d/{rng.randrange(600)}")
        quick = place.take(box, base)
        memos = place.store.path / "cache"
        aside = place.store.path / "cache-aside"
        os.rename(memos, aside)
        memos.mkdir()
        full = place.take(box, base)
        shutil.rmtree(memos)
        os.rename(aside, memos)
        assert quick.id == full.id
        known = place.snapshots._known(place.disk.seal(box))
        reused += sum(known(path.stat().st_ino, path.stat().st_size) is not None for path in (box / "u/d").iterdir())
    assert reused > 1000  # the quick path was taken


def test_an_older_copy_of_the_disk_is_not_trusted(place: Place) -> None:
    """Transactions counted on a disk that was put back from a backup may repeat: then everything is read."""
    base, box = place.base({"x": "x"}), place.box()
    (box / "u/d").mkdir()
    for number in range(600):  # with a file in the middle that shares its leaf with nothing that is touched
        (box / f"u/d/{'f' if number == 300 else number}").write_bytes(os.urandom(9000 if number == 300 else 10))
    found = place.take(box, base)
    assert place.snapshots._known(place.disk.seal(box))((box / "u/d/f").stat().st_ino, 9000) is not None
    place.disk.destroy(place.disk.layers / found.layers[0])  # the witness is gone, or another
    assert place.snapshots._known(place.disk.seal(box))((box / "u/d/f").stat().st_ino, 9000) is None
    place.layers.materialise(found.layers[0])
    assert place.snapshots._known(place.disk.seal(box))((box / "u/d/f").stat().st_ino, 9000) is None


def test_a_live_box_goes_on_and_the_snapshot_stays(place: Place) -> None:
    base, box = place.base(BASE), place.box()
    with place.mounted(box, base) as root, open(root / "log", "w") as log:
        log.write("one\n")
        log.flush()
        found = place.take(box, base)
        log.write("two\n")
        log.flush()
        assert place.snapshots.read(found.id, "log") == b"one\n"
        assert (root / "log").read_text() == "one\ntwo\n"


def test_ten_forks_of_a_snapshot_share_and_stay_apart(place: Place) -> None:
    base, box = place.base(BASE), place.box()
    (box / "u/big").write_bytes(os.urandom(8 << 20))
    found = place.take(box, base)
    before = place.disk.free()
    started = time.perf_counter()
    layers = place.snapshots.load(found.id)
    boxes = [place.box() for _ in range(10)]
    assert time.perf_counter() - started < 0.05
    for number, fork in enumerate(boxes):
        with place.mounted(fork, layers) as root:
            (root / "mine").write_text(str(number))
            assert not (root / f"other{number}").exists()
    assert before - place.disk.free() < 10 << 20
    assert [(fork / "u/mine").read_text() for fork in boxes] == [str(number) for number in range(10)]


def test_a_hundred_snapshots_of_one_box_share_their_chunks(place: Place) -> None:
    base, box = place.base(BASE), place.box()
    (box / "u/src").mkdir()
    for number in range(400):
        (box / f"u/src/{number}").write_bytes(os.urandom(20000))
    place.take(box, base)
    first = place.store.usage().stored
    for turn in range(100):
        (box / f"u/src/{turn}").write_bytes(os.urandom(5000))
        place.take(box, base)
    grown = place.store.usage().stored - first
    assert len(place.snapshots.list_snapshots()) == 101
    assert first > 8_000_000
    assert grown < 100 * 5000 + 100 * 45_000  # a changed file and the pages that name it, not 8 MB a snapshot
    shared = place.store.usage().stored / (101 * first)
    assert shared < 0.02


def test_deep_chains_are_flattened_and_look_the_same(place: Place) -> None:
    layers = place.base(BASE)
    found: Snapshot | None = None
    for turn in range(14):
        box = place.box()
        with place.mounted(box, layers) as root:
            (root / f"f{turn}").write_bytes(os.urandom(6000) if turn % 2 else b"x" * turn)
            (root / "lib").mkdir(exist_ok=True)
            (root / "lib/b").write_text(str(turn))
            if turn == 3:
                shutil.rmtree(root / "old")
            if turn == 5:
                (root / "old").mkdir()
                (root / "old/n").write_text("n")
            if turn == 6:
                (root / "etc/conf").unlink()
            if turn > 7:
                (root / f"f{turn - 7}").unlink()
            expected = {
                path: (root / path).lstat().st_size
                for path in sorted(str(p.relative_to(root)) for p in root.rglob("*"))
                if (root / path).is_file()
            }
            found = place.take(box, layers, parent=found.id if found else None)
        layers = place.snapshots.load(found.id)
        assert len(layers) <= 10
        with place.mounted(place.box(), layers) as root:
            assert {
                path: (root / path).lstat().st_size
                for path in sorted(str(p.relative_to(root)) for p in root.rglob("*"))
                if (root / path).is_file()
            } == expected


# comparing


def test_diff(place: Place) -> None:
    base = place.base(BASE)
    box = place.box()
    with place.mounted(box, base) as root:
        (root / "kept").write_text("same")
        (root / "edited").write_text("one\ntwo\n")
        a = place.take(box, base)
        (root / "edited").write_text("one\n2\n")
        (root / "added").write_text("added")
        (root / "etc/conf").write_text("changed!")
        os.chmod(root / "etc/other", 0o600)
        (root / "lib/a").unlink()
        (root / "lib/b").write_text("b")  # written again as it was
        shutil.rmtree(root / "old")
        (root / "dir").mkdir()
        (root / "dir/link").symlink_to("/nowhere")
        b = place.take(box, base, parent=a.id)
    assert place.snapshots.diff(a.id, b.id) == [
        Change("added", "added", "file", after=5),
        Change("dir", "added", "directory"),
        Change("dir/link", "added", "link"),
        Change("edited", "changed", "file", 8, 6),
        Change("etc/conf", "changed", "file", 4, 8),
        Change("etc/other", "changed", "file", 5, 5, attributes_only=True),
        Change("lib/a", "removed", "file", before=1),
        Change("old", "removed", "directory"),
    ]
    back = {change.path: change.kind for change in place.snapshots.diff(b.id, a.id)}
    assert (back["added"], back["dir"], back["lib/a"], back["old"], back["edited"]) == (
        "removed",
        "removed",
        "added",
        "added",
        "changed",
    )
    assert "dir/link" not in back  # of a removed directory only itself is named
    assert place.snapshots.diff(a.id, a.id) == []
    assert place.snapshots.text_diff(a.id, b.id, "edited").splitlines()[2:] == ["@@ -1,2 +1,2 @@", " one", "-two", "+2"]
    assert place.snapshots.read(a.id, "etc/conf") == b"base"
    with pytest.raises(NotFound):
        place.snapshots.read(b.id, "lib/a")


def test_diff_of_a_directory_made_anew(place: Place) -> None:
    base, box = place.base(BASE), place.box()
    with place.mounted(box, base) as root:
        a = place.take(box, base)
        shutil.rmtree(root / "old")
        (root / "old").mkdir()
        (root / "old/x").write_text("x2")
        b = place.take(box, base)
    assert place.snapshots.diff(a.id, b.id) == [
        Change("old/x", "changed", "file", 1, 2),
        Change("old/y", "removed", "file", before=1),
    ]


def test_text_diff_refuses_what_is_not_text(place: Place) -> None:
    base, box = place.base(BASE), place.box()
    (box / "u/bin").write_bytes(b"\xff\xfe\x00")
    found = place.take(box, base)
    with pytest.raises(Invalid, match="not text"):
        place.snapshots.text_diff(found.id, found.id, "bin")


def test_a_planted_link_is_not_read_through(place: Place) -> None:
    base, box = place.base(BASE), place.box()
    (box / "u/shadow").symlink_to("/etc/shadow")
    (box / "u/dir").symlink_to("/etc")
    found = place.take(box, base)
    for path in ("shadow", "dir/shadow", "../../../etc/shadow", "/dir/shadow"):
        with pytest.raises((NotFound, OSError)):
            place.snapshots.read(found.id, path)


# refusals


def test_ids_that_are_not_there(place: Place) -> None:
    with pytest.raises(NotFound, match="no snapshot"):
        place.snapshots.load("0" * 40)
    with pytest.raises(NotFound):
        place.snapshots.get("")
    with pytest.raises(NotFound):
        place.snapshots.get("../../etc")


def test_a_prefix_is_enough(place: Place) -> None:
    box = place.box()
    (box / "u/x").write_text("x")
    found = place.take(box, place.base(BASE))
    assert place.snapshots.get(found.id[:8]) == found


def test_a_flipped_byte_is_found_when_it_is_loaded(place: Place) -> None:
    base, box = place.base(BASE), place.box()
    (box / "u/big").write_bytes(os.urandom(CHUNK * 3))
    found = place.take(box, base)
    place.disk.destroy(place.disk.layers / found.layers[0])
    chunk = max((place.store.locate(key.hex()).length, key.hex()) for key in place.store._index)[1]
    where = place.store.locate(chunk)
    with open(place.store.path / "packs" / f"{where.pack}.pack", "r+b") as file:
        file.seek(where.offset + 1000)
        byte = file.read(1)[0]
        file.seek(where.offset + 1000)
        file.write(bytes([byte ^ 0x10]))
    with pytest.raises(Corrupt, match=chunk):
        place.snapshots.load(found.id)
    with pytest.raises(Corrupt, match=chunk):
        place.snapshots.verify(found.id)
    assert os.listdir(place.disk.tmp) == []
    assert found.layers[0] not in os.listdir(place.disk.layers)


def test_a_record_that_was_changed_is_noticed(place: Place) -> None:
    box = place.box()
    (box / "u/x").write_text("x")
    found = place.take(box, place.base(BASE))
    record = place.store.path / "refs/snapshot" / found.id
    record.write_text(json.dumps(json.loads(record.read_text()) | {"layers": ["host"]}))
    with pytest.raises(Corrupt, match="does not hold what was written"):
        place.snapshots.load(found.id)


def test_a_tree_beyond_the_caps_leaves_nothing(place: Place) -> None:
    box = place.box()
    for number in range(30):
        (box / f"u/{number}").write_bytes(os.urandom(9000))
    base = place.base(BASE)
    before = place.store.usage()
    with pytest.raises(LimitExceeded):
        place.take(box, base, entries=10)
    assert place.store.usage() == before


# memory


def test_memory_comes_back(place: Place, tmp_path: Path) -> None:
    base, box = place.base(BASE), place.box()
    memory = tmp_path / "memory"
    memory.mkdir()
    with open(memory / "ram", "wb") as file:
        file.truncate(256 << 20)
        file.seek(100 << 20)
        file.write(os.urandom(1 << 20))
    (memory / "state").write_text("device state")
    found = place.take(box, base, memory=memory, tier="microvm")
    assert found.memory and found.tier == "microvm"
    (tmp_path / "back").mkdir()
    place.snapshots.load_memory(found.id, tmp_path / "back")
    assert (tmp_path / "back/ram").read_bytes() == (memory / "ram").read_bytes()
    assert (tmp_path / "back/ram").stat().st_blocks * 512 < 8 << 20
    with pytest.raises(Invalid, match="files only"):
        place.snapshots.load_memory(place.take(place.box(), base).id, tmp_path / "back")


# carrying


def carried(place: Place, id: str) -> bytes:
    file = io.BytesIO()
    place.snapshots.export(id, file)
    return file.getvalue()


def test_export_and_import(place: Place, tmp_path: Path) -> None:
    base, box = place.base(BASE), place.box()
    (box / "u/big").write_bytes(os.urandom(3 * CHUNK))
    (box / "u/text").write_text("text")
    found = place.take(box, base, labels={"name": "mine"})
    archive = carried(place, found.id)
    other = Place(tmp_path / "other")
    try:
        taken = other.snapshots.import_(io.BytesIO(archive))
        assert taken.id == found.id and taken.labels == (("name", "mine"),)
        with other.mounted(other.box(), other.snapshots.load(taken.id)) as root:
            assert (root / "text").read_text() == "text"
            assert (root / "big").read_bytes() == (box / "u/big").read_bytes()
            assert (root / "etc/conf").read_text() == "base"
        other.snapshots.import_(io.BytesIO(archive))  # twice is once
    finally:
        other.close()


def repack(archive: bytes, change: object) -> bytes:
    """An archive with its members changed: a mapping of names to contents goes in, and comes out."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as source:
        members = {member.name: source.extractfile(member).read() for member in source}  # type: ignore[union-attr]
    members = change(members)  # type: ignore[operator]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as target:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            target.addfile(member, io.BytesIO(data))
    return out.getvalue()


def test_hostile_archives_of_snapshots(place: Place, tmp_path: Path) -> None:
    box = place.box()
    (box / "u/big").write_bytes(os.urandom(3 * CHUNK))
    found = place.take(box, place.base(BASE))
    good = carried(place, found.id)
    record = json.loads(repack_json(good))
    chunks = [name for name in names(good) if name.startswith("chunks/")]

    def with_record(**fields: object) -> bytes:
        return repack(good, lambda m: m | {"snapshot.json": json.dumps(record | fields).encode()})

    foreign = identify(["../../etc"], None)
    cases = {
        "empty": b"",
        "rubbish": os.urandom(5000),
        "cut": good[: len(good) // 2],
        "no record": repack(good, lambda m: {k: v for k, v in m.items() if k != "snapshot.json"}),
        "another id": with_record(id="0" * 40),
        "layer out of the disk": with_record(layers=["../../etc"], id=foreign),
        "no layers": with_record(layers=[], id=identify([], None)),
        "another format": with_record(format=9),
        "missing chunk": repack(good, lambda m: {k: v for k, v in m.items() if k != chunks[-1]}),
        "damaged chunk": repack(good, lambda m: m | {chunks[-1]: m[chunks[-1]][:-1] + bytes([m[chunks[-1]][-1] ^ 1])}),
        "swapped chunks": repack(good, lambda m: m | {chunks[-1]: m[chunks[-2]]}),
        "another member": repack(good, lambda m: m | {"../../x": b"x"}),
        "record not JSON": repack(good, lambda m: m | {"snapshot.json": b"{"}),
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        link = tarfile.TarInfo("snapshot.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    cases["a link"] = out.getvalue()
    other = Place(tmp_path / "other")
    try:
        for name, archive_bytes in cases.items():
            with pytest.raises((Invalid, Corrupt)):
                other.snapshots.import_(io.BytesIO(archive_bytes))
                pytest.fail(name)
            assert other.store.usage().chunks == 0, name
            assert other.snapshots.list_snapshots() == []
        assert other.snapshots.import_(io.BytesIO(good)).id == found.id
    finally:
        other.close()


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as source:
        return source.getnames()


def repack_json(archive: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as source:
        return source.extractfile("snapshot.json").read()  # type: ignore[union-attr]


# collection


def test_collect_removes_what_was_forgotten_and_keeps_the_rest(place: Place) -> None:
    base, box = place.base(BASE), place.box()
    (box / "u/shared").write_bytes(os.urandom(CHUNK))
    one = place.take(box, base)
    (box / "u/mine").write_bytes(os.urandom(5 * CHUNK))
    two = place.take(box, base)
    place.snapshots.remove(two.id)
    found = place.snapshots.collect()
    assert found.freed > 5 * CHUNK
    assert place.snapshots.verify(one.id)
    assert two.layers[0] not in os.listdir(place.disk.layers)
    place.disk.destroy(place.disk.layers / one.layers[0])
    with place.mounted(place.box(), place.snapshots.load(one.id)) as root:
        assert (root / "shared").stat().st_size == CHUNK


def test_collect_keeps_the_layers_of_live_boxes(place: Place) -> None:
    base, box = place.base(BASE), place.box()
    (box / "u/x").write_bytes(os.urandom(CHUNK))
    found = place.take(box, base)
    live = place.snapshots.load(found.id)
    child = place.box()
    place.snapshots.remove(found.id)
    place.snapshots.collect(pins=live)
    with place.mounted(child, live) as root:
        assert (root / "x").stat().st_size == CHUNK
    (child / "u/y").write_text("y")
    later = place.take(child, live)  # and a snapshot of such a box is whole
    place.snapshots.collect()
    assert place.snapshots.verify(later.id)
    place.snapshots.remove(later.id)
    place.snapshots.collect()
    assert place.store.usage().chunks == 0


def test_equal_content_is_one_snapshot_and_goes_with_the_last_who_holds_it(place: Place, tmp_path: Path) -> None:
    base, box = place.base({"x": "x" * 5000}), place.box()
    (box / "u/y").write_text("y")
    first, second = (place.snapshots.snapshot(place.disk.seal(box), base, holder=who) for who in ("ann", "bob"))
    assert first.id == second.id and second.holders == ("ann", "bob")
    assert place.snapshots.remove(first.id, "ann") == place.snapshots.remove(first.id, "ann") == ("bob",)
    assert place.snapshots.remove(first.id) == ("bob",)  # whoever holds nothing takes nothing
    place.snapshots.collect()
    assert place.snapshots.verify(second.id)
    with open(tmp_path / "archive", "w+b") as file:
        place.snapshots.export(second.id, file)
        assert b"bob" not in (tmp_path / "archive").read_bytes()
        file.seek(0)
        assert place.snapshots.import_(file).holders == ("", "bob")
    assert place.snapshots.remove(second.id, "bob") == ("",)
    assert place.snapshots.remove(second.id) == ()
    with pytest.raises(NotFound):
        place.snapshots.get(second.id)
    old = place.snapshots.snapshot(place.disk.seal(box), base)
    place.store.write_ref("snapshot", old.id, {key: value for key, value in place.store.ref("snapshot", old.id).items() if key != "holders"})  # fmt: skip
    place.snapshots.snapshot(place.disk.seal(box), base, holder="ann")
    assert place.snapshots.remove(old.id, "ann") == ("",)  # one of before there were holders is not lost by this
    assert place.snapshots.remove(old.id, None) == ()


def test_who_holds_a_snapshot_has_it_however_others_come_and_go(place: Place) -> None:
    base, box = place.base({"x": "x" * 5000}), place.box()
    (box / "u/y").write_text("y")
    errors: list[BaseException] = []

    def work(who: str) -> None:
        try:
            for _ in range(15):
                found = place.snapshots.snapshot(place.disk.seal(box), base, holder=who)
                place.snapshots.verify(found.id)
                assert who in place.snapshots.get(found.id).holders
                place.snapshots.remove(found.id, who)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and place.snapshots.list_snapshots() == []


def test_collect_beside_snapshots_being_made(place: Place) -> None:
    base = place.base({"x": "x" * 5000})
    place.snapshots.snapshot(place.disk.seal(place.box()), base)
    boxes = [place.box() for _ in range(3)]
    stop, errors = time.monotonic() + 2.5, []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            while time.monotonic() < stop:
                (boxes[number] / f"u/{rng.randrange(5)}").write_bytes(
                    bytes([rng.randrange(3)]) * 9000
                )  # the same content comes and goes
                found = place.take(boxes[number], base)
                place.snapshots.verify(found.id)
                place.snapshots.load(found.id)
                if rng.random() < 0.7:
                    place.store.remove_ref("snapshot", found.id)
        except NotFound:
            work(number)  # another thread forgot the equal snapshot
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    turns = 0
    while time.monotonic() < stop:
        place.snapshots.collect(pins=base)
        turns += 1
    for thread in threads:
        thread.join()
    assert errors == []
    assert turns > 0
    for found in place.snapshots.list_snapshots():
        assert place.snapshots.verify(found.id)


def test_a_snapshot_is_no_slower_than_its_changes(place: Place) -> None:
    base, box = place.base(BASE), place.box()
    for number in range(2000):
        (box / f"u/d{number % 20}").mkdir(exist_ok=True)
        (box / f"u/d{number % 20}/{number}").write_bytes(os.urandom(20000))
    started = time.perf_counter()
    place.take(box, base)
    first = time.perf_counter() - started
    (box / "u/d3/3").write_text("changed")
    started = time.perf_counter()
    found = place.take(box, base)
    assert time.perf_counter() - started < max(1.0, first)
    assert place.snapshots.read(found.id, "d3/3") == b"changed"
