"""Chunks by content: kept once, verified, written whole or not at all, collected only when nobody names them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3

from livinglayer.errors import Corrupt, Invalid, LimitExceeded, NotFound
from livinglayer.sandbox import manifest
from livinglayer.sandbox.manifest import Entry
from livinglayer.sandbox.store import CHUNK, Store
from livinglayer.sandbox.tree import scan, write


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store", durable=False)
    yield store
    store.close()


def put(store: Store, *contents: bytes) -> list[str]:
    with store.writing() as writer:
        digests = [writer.put(content) for content in contents]
        writer.commit()
    return digests


def flip(store: Store, digest: str, at: int = -1) -> None:
    """Change one byte of a chunk where it lies."""
    place = store.locate(digest)
    path = store.path / "packs" / f"{place.pack}.pack"
    with open(path, "r+b") as file:
        offset = place.offset + (at if at >= 0 else place.length + at)
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_what_was_put_is_got(store: Store) -> None:
    contents = [b"", b"x", b"text " * 5000, os.urandom(CHUNK), bytes(CHUNK)]
    digests = put(store, *contents)
    assert [store.get(digest) for digest in digests] == contents
    assert digests == [blake3(content).hexdigest() for content in contents]


def test_the_same_is_kept_once(store: Store) -> None:
    put(store, b"a" * 10000, b"a" * 10000)
    before = store.usage()
    put(store, b"a" * 10000)
    assert store.usage() == before
    assert before.chunks == 1


def test_text_is_compressed_and_noise_is_not(store: Store) -> None:
    put(store, b"hello world " * 10000)
    assert store.usage().stored < 1000
    put(store, os.urandom(CHUNK))
    assert store.usage().stored < CHUNK + 2000


@pytest.mark.parametrize("content", [b"".join(b"some text %d " % number for number in range(300)), os.urandom(5000)])
@pytest.mark.parametrize("at", [*range(30), -1])
def test_a_flipped_byte_is_corrupt_and_names_the_chunk(store: Store, content: bytes, at: int) -> None:
    (digest,) = put(store, content)
    flip(store, digest, at)
    with pytest.raises(Corrupt, match=digest) as caught:
        store.get(digest)
    assert caught.value.details["chunk"] == digest


def test_a_missing_chunk_is_corrupt(store: Store) -> None:
    with pytest.raises(Corrupt, match="is missing"):
        store.get("0" * 64)
    with pytest.raises(Corrupt, match="can't be a chunk"):
        store.get("../../etc/passwd")


def test_a_pack_cut_short_is_corrupt(store: Store) -> None:
    (digest,) = put(store, os.urandom(1000))
    place = store.locate(digest)
    os.truncate(store.path / "packs" / f"{place.pack}.pack", place.offset + 10)
    with pytest.raises(Corrupt, match="cut short"):
        store.get(digest)


def test_a_chunk_that_claims_too_much_is_not_unpacked(store: Store) -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    bomb = b"z" + struct.pack("<I", zlib.crc32(packed)) + packed
    with store.writing() as writer, pytest.raises(Corrupt, match="claims"):
        writer.put_packed(blake3(b"x").hexdigest(), bomb)


def test_an_index_is_made_again(store: Store) -> None:
    digests = put(store, b"one" * 1000, b"two" * 1000)
    (index,) = (store.path / "packs").glob("*.idx")
    for damage in (
        index.unlink,
        lambda: index.write_bytes(b"rubbish"),
        lambda: index.write_bytes(bytes([index.read_bytes()[0] ^ 1]) + index.read_bytes()[1:]),
    ):
        damage()
        again = Store(store.path)
        assert [again.get(digest) for digest in digests] == [b"one" * 1000, b"two" * 1000]
        again.close()


def test_a_batch_that_is_not_committed_leaves_nothing(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.writing() as writer:
        writer.put(b"x" * 5000)
        raise ZeroDivisionError
    assert store.usage().chunks == 0
    assert os.listdir(store.path / "staging") == []


def test_a_killed_writer_leaves_nothing_that_counts(store: Store) -> None:
    code = f"""
import os
from pathlib import Path
from livinglayer.sandbox.store import Store
with Store(Path({str(store.path)!r})).writing() as writer:
    writer.append(b"k" * 32, b"rhalf")
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(os.listdir(store.path / "staging")) == 1
    assert store.usage().chunks == 0
    store.collect(list)
    assert os.listdir(store.path / "staging") == []


def test_other_processes_chunks_are_seen(store: Store) -> None:
    other = Store(store.path, durable=False)
    (digest,) = put(other, b"from elsewhere")
    assert store.get(digest) == b"from elsewhere"
    other.collect(list)
    with store.writing() as writer:
        assert not writer.has(digest)  # so it would be written again, not believed
    other.close()


def test_refs(store: Store) -> None:
    store.write_ref("image", "registry.test:5000/a/b:1", {"layers": []})
    assert store.refs("image") == ["registry.test:5000/a/b:1"]
    assert store.ref("image", "registry.test:5000/a/b:1") == {"layers": []}
    assert store.find_ref("image", "other") is None
    with pytest.raises(NotFound, match="no image 'other'"):
        store.ref("image", "other")
    assert store.remove_ref("image", "registry.test:5000/a/b:1")
    assert not store.remove_ref("image", "registry.test:5000/a/b:1")


@pytest.mark.parametrize(("kind", "name"), [("image", ""), ("image", ".."), ("../x", "a"), ("image", "x" * 300)])
def test_refs_that_are_no_names(store: Store, kind: str, name: str) -> None:
    with pytest.raises(Invalid):
        store.write_ref(kind, name, {})


def test_a_damaged_ref_is_corrupt(store: Store) -> None:
    store.write_ref("image", "a", {"layers": []})
    (store.path / "refs/image/a").write_text('{"layers": [')
    with pytest.raises(Corrupt, match="can't be read"):
        store.ref("image", "a")


# collection


def test_collect_keeps_what_is_named(store: Store) -> None:
    kept, dropped = put(store, os.urandom(50000), os.urandom(100000))
    found = store.collect(lambda: [kept])
    assert (found.removed, found.kept) == (1, 1)
    assert found.freed > 90000
    assert len(store.get(kept)) == 50000
    with pytest.raises(Corrupt):
        store.get(dropped)


def test_collect_joins_small_packs(store: Store) -> None:
    digests = [put(store, os.urandom(100))[0] for _ in range(40)]
    assert len(list((store.path / "packs").glob("*.pack"))) == 40
    store.collect(lambda: digests)
    assert len(list((store.path / "packs").glob("*.pack"))) == 1
    assert all(len(store.get(digest)) == 100 for digest in digests)


def test_collect_removes_nothing_when_it_can_not_tell_what_lives(store: Store) -> None:
    (digest,) = put(store, b"x" * 1000)

    def broken() -> Iterator[str]:
        yield digest
        raise Corrupt("a manifest")

    with pytest.raises(Corrupt):
        store.collect(broken)
    assert store.get(digest) == b"x" * 1000


def test_collect_waits_for_a_writer(store: Store) -> None:
    """A chunk that is there already when a snapshot is taken must still be there when the snapshot is done."""
    (digest,) = put(store, b"shared" * 1000)
    named: list[str] = []
    done: list[float] = []

    def collect() -> None:
        store.collect(lambda: list(named))
        done.append(time.monotonic())

    with store.writing() as writer:
        assert writer.put(b"shared" * 1000) == digest  # found, not written
        thread = threading.Thread(target=collect)
        thread.start()
        time.sleep(0.2)
        assert not done
        named.append(digest)  # the snapshot's ref
        finished = time.monotonic()
    thread.join()
    assert done[0] > finished
    assert store.get(digest) == b"shared" * 1000


def test_writers_and_collectors_at_once_lose_nothing(store: Store) -> None:
    contents = [os.urandom(3000) for _ in range(40)]
    stop = time.monotonic() + 2
    errors: list[BaseException] = []

    def write_some(number: int) -> None:
        mine = Store(store.path, durable=False)
        try:
            turn = 0
            while time.monotonic() < stop:
                picked = contents[(number * 7 + turn) % 40 :][:10]
                with mine.writing() as writer:
                    digests = [writer.put(content) for content in picked]
                    writer.commit()
                    mine.write_ref("keep", f"{number}", {"chunks": digests})
                for digest in json.loads((store.path / "refs/keep" / f"{number}").read_text())["chunks"]:
                    mine.get(digest)
                turn += 1
        except BaseException as error:
            errors.append(error)
        finally:
            mine.close()

    def live() -> Iterator[str]:
        for name in store.refs("keep"):
            yield from store.ref("keep", name)["chunks"]

    threads = [threading.Thread(target=write_some, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    collections = 0
    while time.monotonic() < stop:
        store.collect(live)
        collections += 1
    for thread in threads:
        thread.join()
    assert errors == []
    assert collections > 1


# manifests and trees


def grow(root: Path) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "d/small").write_text("small")
    (root / "d/empty").touch()
    (root / "d/e/large").write_bytes(os.urandom(CHUNK * 2 + 77))
    (root / "d-e").write_text("sorts between d and d/e as text, after both here")
    (root / "link").symlink_to("/etc/passwd")
    os.link(root / "d/e/large", root / "same")
    with open(root / "sparse", "wb") as file:
        file.truncate(10 << 20)
        file.seek(5 << 20)
        file.write(b"middle")
    with open(root / "ends in a hole", "wb") as file:
        file.write(b"x" * 5000)
        file.truncate(CHUNK * 3)
    os.mkfifo(root / "fifo")
    os.chmod(root / "d/small", 0o4750)
    os.setxattr(root / "d/small", "user.note", b"\x00\xff")
    (root / os.fsdecode(b"not utf-8 \xff")).write_text("x")
    for path in (root / "d/small", root / "d"):
        os.utime(path, ns=(5, 1_600_000_000_123_456_789))
    if os.geteuid() == 0:
        os.chown(root / "d/small", 1000, 1001)
        os.chmod(root / "d/small", 0o4750)
        os.mknod(root / "gone", 0o020000, 0)
        os.setxattr(root / "d", "trusted.overlay.opaque", b"y")


def keep(store: Store, tree: Path, **options: int) -> manifest.Manifest:
    with store.writing() as writer:
        kept = manifest.write(scan(tree, writer, **options).entries, writer)
        writer.commit()
    return kept


def describe(tree: Path) -> dict[str, tuple[object, ...]]:
    found = {}
    for path in sorted(tree.rglob("*")):
        what = os.lstat(path)
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        xattrs = {
            name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)
        }
        found[str(path.relative_to(tree))] = (
            what.st_mode,
            what.st_uid,
            what.st_gid,
            what.st_mtime_ns if what.st_mode & 0o170000 != 0o020000 else 0,  # a whiteout has no time
            what.st_nlink,
            what.st_rdev,
            content,
            xattrs,
        )
    return found


def test_a_tree_comes_back_as_it_was(store: Store, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    grow(tmp_path / "one")
    kept = keep(store, tmp_path / "one")
    (tmp_path / "two").mkdir()
    write(manifest.load(kept.id, store)[1], store.get, tmp_path / "two")
    assert describe(tmp_path / "two") == describe(tmp_path / "one")
    assert (tmp_path / "two/sparse").stat().st_blocks * 512 < 1 << 20
    assert keep(store, tmp_path / "two").id == kept.id


def test_equal_trees_have_equal_ids_and_every_difference_another(store: Store, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    grow(tmp_path / "t")
    seen = [keep(store, tmp_path / "t").id]
    assert keep(store, tmp_path / "t").id == seen[0]
    changes = [
        lambda: (tmp_path / "t/d/small").write_text("Small"),
        lambda: os.chmod(tmp_path / "t/d/e", 0o711),
        lambda: os.utime(tmp_path / "t/d/empty", ns=(1, 1)),
        lambda: os.setxattr(tmp_path / "t/d/empty", "user.a", b"b"),
        lambda: os.rename(tmp_path / "t/d/empty", tmp_path / "t/d/void"),
        lambda: (tmp_path / "t/link").unlink() or (tmp_path / "t/link").symlink_to("/etc/group"),
        lambda: (tmp_path / "t/same").unlink(),
    ]
    for change in changes:
        change()
        seen.append(keep(store, tmp_path / "t").id)
    assert len(set(seen)) == len(changes) + 1


def test_a_changed_file_costs_its_page_and_its_chunks(store: Store, tmp_path: Path) -> None:
    tree = tmp_path / "t"
    for number in range(3000):
        (tree / f"{number % 30}").mkdir(parents=True, exist_ok=True)
        (tree / f"{number % 30}/{number}").write_bytes(os.urandom(300))
    first = keep(store, tree)
    before = store.usage().stored
    (tree / "7/new").write_text("x")
    second = keep(store, tree)
    assert len(set(second.pages) - set(first.pages)) <= 2
    assert store.usage().stored - before < before / 5


def test_links_are_kept_not_followed(store: Store, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the host's own secret " * 10)
    tree = tmp_path / "t"
    (tree / "d").mkdir(parents=True)
    (tree / "file").symlink_to(secret)
    (tree / "dir").symlink_to(tmp_path)
    (tree / "up").symlink_to("../../../../../..")
    kept = keep(store, tree)
    assert kept.size == 0
    assert [(entry.path, entry.type) for entry in manifest.load(kept.id, store)[1]] == [
        ("", "d"),
        ("d", "d"),
        ("dir", "l"),
        ("file", "l"),
        ("up", "l"),
    ]


def test_a_fifo_does_not_hang_and_a_device_is_not_read(store: Store, tmp_path: Path) -> None:
    tree = tmp_path / "t"
    tree.mkdir()
    os.mkfifo(tree / "fifo")
    if os.geteuid() == 0:
        os.mknod(tree / "zero", 0o020666, os.makedev(1, 5))
    with store.writing() as writer:
        found = scan(tree, writer)
    assert [entry.type for entry in found.entries][1:] == ["p", "w"][: len(found.entries) - 1]
    assert found.skipped == (["zero"] if os.geteuid() == 0 else [])


def test_caps(store: Store, tmp_path: Path) -> None:
    tree = tmp_path / "t"
    tree.mkdir()
    for number in range(20):
        (tree / str(number)).write_bytes(b"x" * 100)
    with pytest.raises(LimitExceeded, match="more than 10 names"):
        keep(store, tree, entries=10)
    with pytest.raises(LimitExceeded, match="more than 1000 bytes"):
        keep(store, tree, size=1000)


def test_a_file_of_holes_costs_nothing(store: Store, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    with open(tmp_path / "t/huge", "wb") as file:
        file.truncate(1 << 42)
        file.seek(1 << 41)
        file.write(b"x" * 100)
    started = time.monotonic()
    kept = keep(store, tmp_path / "t")
    (tmp_path / "two").mkdir()
    write(manifest.load(kept.id, store)[1], store.get, tmp_path / "two")
    assert time.monotonic() - started < 1
    assert store.usage().stored < 5000
    with open(tmp_path / "two/huge", "rb") as file:
        file.seek((1 << 41) - 1)
        assert file.read(102) == b"\0" + b"x" * 100 + b"\0"


def test_nested_too_deep(store: Store, tmp_path: Path) -> None:
    at = tmp_path / "t"
    at.mkdir()
    fd = os.open(at, os.O_RDONLY)
    for _ in range(400):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LimitExceeded, match="nested too deep"):
        keep(store, at)
    assert len(os.listdir("/proc/self/fd")) == before


def test_content_that_overlay_keeps_elsewhere_is_refused(store: Store, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("sets a trusted attribute")
    (tmp_path / "t").mkdir()
    (tmp_path / "t/file").touch()
    os.setxattr(tmp_path / "t/file", "trusted.overlay.metacopy", b"")
    with pytest.raises(Invalid, match="by reference only"):
        keep(store, tmp_path / "t")


def page(rows: list[object], blob: bytes = b"") -> bytes:
    text = json.dumps(rows).encode()
    return b"LLP1" + struct.pack("<I", len(text)) + text + blob


D = ["", "d", 0o755, 0, 0, 0, [], 0]


@pytest.mark.parametrize(
    "rows",
    [
        [D, ["../x", "f", 0o644, 0, 0, 0, [], 0, []]],
        [D, ["/etc/x", "f", 0o644, 0, 0, 0, [], 0, []]],
        [D, ["a/./b", "d", 0o755, 0, 0, 0, [], 0]],
        [D, ["a//b", "d", 0o755, 0, 0, 0, [], 0]],
        [D, ["a\0b", "d", 0o755, 0, 0, 0, [], 0]],
        [D, ["a", "l", 0o777, 0, 0, 0, [], "/tmp"], ["a/x", "f", 0o644, 0, 0, 0, [], 0, []]],  # through a link
        [D, ["a/x", "f", 0o644, 0, 0, 0, [], 0, []]],  # no parent
        [D, ["a", "d", 0o755, 0, 0, 0, [], 0], ["a", "l", 0o777, 0, 0, 0, [], "/tmp"]],  # twice
        [D, ["a", "h", 0o644, 0, 0, 0, [], "../../etc/passwd"]],
        [D, ["a", "h", 0o644, 0, 0, 0, [], "nothing"]],
        [D, ["a", "l", 0o777, 0, 0, 0, [], "/etc/passwd"], ["b", "h", 0o644, 0, 0, 0, [], "a"]],  # hard link to a link
        [D, ["a", "b", 0o644, 0, 0, 0, [], "device"]],
        [D, ["a", "f", 0o644, 0, 0, 0, [], -1, []]],
        [D, ["a", "f", 0o644, 0, 0, 0, [], 10, []]],  # no content
        [D, ["a", "f", 0o644, 0, 0, 0, [], 1 << 20, ["0" * 64]]],  # too few chunks
        [D, ["a", "f", 0o644, 0, 0, 0, [], 1 << 20, [9, -1]]],
        [D, ["a", "f", 0o644, 0, 0, 0, [], 1 << 20, [True, 7]]],
        [D, ["a", "f", 0o644, 0, 0, 0, [["trusted.overlay.redirect", "2f"]], 0, []]],
        [D, ["a", "f", 0o1000000, 0, 0, 0, [], 0, []]],
        [D, ["a", "f", 0o644, -1, 0, 0, [], 0, []]],
        [D, "rubbish"],
        [["", "l", 0o777, 0, 0, 0, [], "/"]],  # the root itself a link
    ],
    ids=str,
)  # fmt: skip
def test_a_hostile_manifest_writes_nothing_outside(store: Store, tmp_path: Path, rows: list[object]) -> None:
    with store.writing() as writer:
        name = writer.put(page(rows))
        layer = writer.put(json.dumps({"format": 1, "entries": len(rows), "size": 0, "pages": [name]}).encode())
        writer.commit()
    (tmp_path / "in/target").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Corrupt):
        write(manifest.load(layer, store)[1], store.get, tmp_path / "in/target")
    outside = [path for path in sorted(tmp_path.rglob("*")) if tmp_path / "in/target" not in path.parents]
    assert outside == [path for path in before if tmp_path / "in/target" not in path.parents]


# merging


def e(path: str, kind: str = "f", **more: object) -> Entry:
    return Entry(path, kind, **more)  # type: ignore[arg-type]


def shown(entries: list[Entry]) -> list[str]:
    return [
        f"{entry.path}:{entry.type}{'o' if entry.opaque else ''}{entry.inline.decode()}{'>' + entry.target if entry.target else ''}"
        for entry in entries
    ]


def test_merge() -> None:
    lower = [
        e("", "d"), e("a", inline=b"1"), e("d", "d"), e("d/x"), e("d/y"), e("f"), e("g", "w"), e("o", "d", opaque=True), e("o/x"), e("r", "d"),
        e("r/x"), e("s", "d"), e("s/t", "d"), e("s/t/u"),
    ]  # fmt: skip
    upper = [
        e("", "d"), e("a", inline=b"2"), e("d", "d"), e("d/x", "w"), e("f", "d"), e("f/n"), e("g", "d"), e("g/n"), e("o", "d"), e("o/y"),
        e("r", "d", opaque=True), e("r/z"), e("s", "w"),
    ]  # fmt: skip
    assert shown(manifest.merge(lower, upper)) == [
        ":d", "a:f2", "d:d", "d/x:w", "d/y:f", "f:do", "f/n:f", "g:do", "g/n:f", "o:do", "o/x:f", "o/y:f", "r:do", "r/z:f", "s:w",
    ]  # fmt: skip


def test_merge_hands_the_content_of_hard_links_on() -> None:
    lower = [e("", "d"), e("a", inline=b"1", size=1), e("b", "h", target="a"), e("c", "h", target="a")]
    assert shown(manifest.merge(lower, [e("", "d"), e("a", "w")])) == [":d", "a:w", "b:f1", "c:h>b"]
    assert shown(manifest.merge(lower, [e("", "d"), e("a", inline=b"2")])) == [":d", "a:f2", "b:f1", "c:h>b"]
    assert shown(manifest.merge(lower, [e("", "d"), e("b", "w")])) == [":d", "a:f1", "b:w", "c:h>a"]
