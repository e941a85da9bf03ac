"""Content under its own hash: what is the same is kept once, what is damaged is noticed, what nobody names is collected.

store/packs/NAME.pack   chunks one after the other, as one batch wrote them; NAME.idx beside it says where each lies and can be deleted
store/refs/KIND/NAME    a small JSON document under a name: the roots of garbage collection
store/staging/…         packs and refs on their way in; store/cache/… what may be deleted at any time; store/lock
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import json
import os
import re
import struct
import threading
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zstandard
from blake3 import blake3

from livinglayer.errors import Corrupt, Invalid, LimitExceeded, NotFound

# Fixed pieces: measured against content-defined ones of the same size they hash 3 times faster and keep a changed database in 20–30% fewer
# bytes; only text with an insertion in its middle is kept worse. 128 KiB: 64 saves more, at twice the chunks; zstd gains little above.
CHUNK = 128 << 10
LARGEST = 64 << 20  # of one chunk; manifests' roots are the largest
LEVEL = 1  # zstd: 366 MB/s a core, 3.3:1 on programs; level 3 is a third slower for 5% less
WORKERS, AHEAD = 2, 128  # packing runs outside the interpreter's lock; so many chunks may wait for it
SPARSE, SMALL, MANY = (
    0.7,
    4 << 20,
    32,
)  # a pack with less than this share alive is rewritten, and small ones when there are many

HASH = re.compile(r"[0-9a-f]{64}")
_KIND = re.compile(r"[a-z]+")
_HEAD = struct.Struct("<32sI")  # before each chunk in a pack: its hash, the length of what follows
_MARK = b"LLPACK1\n"
_libc = ctypes.CDLL(None, use_errno=True)
_local = threading.local()


class Place(NamedTuple):
    """Where a chunk lies."""

    pack: str
    offset: int
    length: int


@dataclass(frozen=True)
class Usage:
    """What a store holds: chunks, the bytes of its packs, the named documents."""

    chunks: int
    stored: int
    refs: int


@dataclass(frozen=True)
class Collected:
    """What a garbage collection removed, the bytes that gave back, and the chunks it left: a pack that is mostly alive stays as it is."""

    removed: int
    freed: int
    kept: int


class Store:
    """A directory of chunks and refs, shared by threads and processes."""

    def __init__(self, path: Path, durable: bool = True) -> None:
        """`durable`: what a commit or a ref promised survives a power cut."""
        self.path, self.durable = path, durable
        for name in ("packs", "refs", "staging", "cache"):
            (path / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(path, 0o700)  # whole boxes lie here
        self._index: dict[bytes, Place] = {}
        self._packs: dict[str, int] = {}  # pack → open file
        self._lock = threading.RLock()

    def close(self) -> None:
        with self._lock:
            for fd in self._packs.values():
                os.close(fd)
            self._packs.clear()
            self._index.clear()

    # chunks

    def has(self, digest: str) -> bool:
        return bytes.fromhex(digest) in self._index

    def get(self, digest: str, limit: int = LARGEST) -> bytes:
        """The content of a chunk, or Corrupt naming it."""
        return unpack(digest, self.get_packed(digest), limit)

    def get_packed(self, digest: str) -> bytes:
        """A chunk as it is stored, unchecked."""
        place = self.locate(digest)
        with self._lock:
            fd = self._packs.get(place.pack)
            if fd is None:
                raise Corrupt(f"the chunk {digest} is missing", chunk=digest)
            stored = os.pread(fd, place.length, place.offset)
        if len(stored) != place.length:
            raise Corrupt(f"the chunk {digest} is cut short", chunk=digest)
        return stored

    def locate(self, digest: str) -> Place:
        """Where a chunk lies, or Corrupt when it is missing."""
        if not HASH.fullmatch(digest):
            raise Corrupt(f"{digest!r} can't be a chunk", chunk=digest)
        key = bytes.fromhex(digest)
        if key not in self._index:
            self._refresh()
        try:
            return self._index[key]
        except KeyError:
            raise Corrupt(
                f"the chunk {digest} is missing", hint="load from a copy of the store", chunk=digest
            ) from None

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writer]:
        """A batch of new chunks: they appear together at `commit`, or not at all; no collection runs meanwhile."""
        with self.reading():
            writer = Writer(self)
            try:
                yield writer
            finally:
                writer.discard()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing is collected meanwhile, and what other processes wrote before is seen."""
        with self._held(fcntl.LOCK_SH):
            self._refresh()
            yield

    def _refresh(self) -> None:
        """Learn which packs other processes added or removed."""
        with self._lock:
            names = {name.removesuffix(".pack") for name in os.listdir(self.path / "packs") if name.endswith(".pack")}
            if gone := self._packs.keys() - names:
                for name in gone:
                    os.close(self._packs.pop(name))
                self._index = {key: place for key, place in self._index.items() if place.pack not in gone}
            for name in names - self._packs.keys():
                with contextlib.suppress(FileNotFoundError):
                    self._learn(name)

    def _learn(self, name: str) -> None:
        fd = os.open(self.path / "packs" / f"{name}.pack", os.O_RDONLY | os.O_CLOEXEC)
        self._packs[name] = fd
        for key, offset, length in self._read_index(name, fd):
            self._index.setdefault(key, Place(name, offset, length))

    def _read_index(self, name: str, fd: int) -> list[tuple[bytes, int, int]]:
        path = self.path / "packs" / f"{name}.idx"
        row = struct.Struct("<32sQI")
        with contextlib.suppress(FileNotFoundError):
            raw = path.read_bytes()
            if len(raw) % row.size == 32 and blake3(raw[:-32]).digest() == raw[-32:]:
                return list(row.iter_unpack(raw[:-32]))
        rows = []
        size, at = os.fstat(fd).st_size, len(_MARK)
        while at + _HEAD.size <= size:
            key, length = _HEAD.unpack(os.pread(fd, _HEAD.size, at))
            rows.append((key, at + _HEAD.size, length))
            at += _HEAD.size + length
        write_index(path, rows)
        return rows

    # refs

    def write_ref(self, kind: str, name: str, document: dict[str, Any]) -> None:
        """Keep a document under a name, whole or not at all; one that is there is replaced."""
        path = self._ref(kind, name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        aside = self.path / "staging" / f"ref-{os.urandom(8).hex()}"
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"), sort_keys=True)
            if self.durable:
                file.flush()
                os.fsync(file.fileno())
        os.rename(aside, path)
        if self.durable:
            _fsync(path.parent)

    def find_ref(self, kind: str, name: str) -> dict[str, Any] | None:
        try:
            with open(self._ref(kind, name), encoding="utf-8") as file:
                document = json.load(file)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise Corrupt(f"the {kind} {name!r} can't be read: {error}") from None
        if not isinstance(document, dict):
            raise Corrupt(f"the {kind} {name!r} is not a document")
        return document

    def ref(self, kind: str, name: str) -> dict[str, Any]:
        document = self.find_ref(kind, name)
        if document is None:
            raise NotFound(f"no {kind} {name!r}")
        return document

    def remove_ref(self, kind: str, name: str) -> bool:
        """Forget a name; its chunks go at the next collection. False when it was not there."""
        try:
            os.unlink(self._ref(kind, name))
        except FileNotFoundError:
            return False
        return True

    def refs(self, kind: str) -> list[str]:
        """The names of a kind, sorted."""
        try:
            return sorted(urllib.parse.unquote(name) for name in os.listdir(self.path / "refs" / kind))
        except FileNotFoundError:
            return []

    def kinds(self) -> list[str]:
        return sorted(os.listdir(self.path / "refs"))

    def _ref(self, kind: str, name: str) -> Path:
        quoted = urllib.parse.quote(name, safe="")
        if not _KIND.fullmatch(kind) or not quoted or quoted in (".", "..") or len(quoted) > 250:
            raise Invalid(f"{name!r} can't name a {kind}")
        return self.path / "refs" / kind / quoted

    # upkeep

    def collect(self, live: Callable[[], Iterable[str]]) -> Collected:
        """Remove every chunk that `live()` does not name; it is asked when nobody writes, and nobody writes until the end."""
        with self._held(fcntl.LOCK_EX), self._lock:
            self._refresh()
            named = {bytes.fromhex(digest) for digest in live()}  # complete, or an error before anything is removed
            for name in os.listdir(
                self.path / "staging"
            ):  # nobody writes: what lies here was left by a process that died
                (self.path / "staging" / name).unlink()
            alive: dict[str, list[tuple[bytes, Place]]] = {name: [] for name in self._packs}
            for key, place in self._index.items():
                if key in named:
                    alive[place.pack].append((key, place))
            before, sizes = len(self._index), {name: os.fstat(fd).st_size for name, fd in self._packs.items()}
            small = [name for name, size in sizes.items() if size < SMALL]
            rewrite = [
                name for name, size in sizes.items()
                if sum(place.length + _HEAD.size for _, place in alive[name]) < SPARSE * size or (len(small) > MANY and name in small)
            ]  # fmt: skip
            if any(alive[name] for name in rewrite):
                with contextlib.ExitStack() as cleanup:
                    writer = Writer(self)
                    cleanup.callback(writer.discard)
                    for name in rewrite:
                        for key, place in alive[name]:
                            writer.append(key, os.pread(self._packs[name], place.length, place.offset))
                    writer.commit()
            for name in rewrite:
                for ending in (".pack", ".idx"):
                    (self.path / "packs" / f"{name}{ending}").unlink(missing_ok=True)
            self._index.clear()
            for fd in self._packs.values():
                os.close(fd)
            self._packs.clear()
            self._refresh()
            freed = sum(sizes.values()) - sum(os.fstat(fd).st_size for fd in self._packs.values())
            return Collected(before - len(self._index), freed, len(self._index))

    def usage(self) -> Usage:
        with self._lock:
            self._refresh()
            stored = sum(os.fstat(fd).st_size for fd in self._packs.values())
            return Usage(len(self._index), stored, sum(len(self.refs(kind)) for kind in self.kinds()))

    @contextlib.contextmanager
    def _held(self, how: int) -> Iterator[None]:
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)


class Writer:
    """Chunks on their way into a store. `put` hashes; packing and writing what is new goes on in the background."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.added = self.stored = 0  # new chunks and their bytes, as written
        self._mine: set[str] = set()
        self._rows: list[tuple[bytes, int, int]] = []
        self._name = os.urandom(8).hex()
        self._path = store.path / "staging" / f"{self._name}.pack"
        self._fd: int | None = None
        self._end = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None  # what is all there already needs none
        self._pending: collections.deque[Future[None]] = collections.deque()

    def put(self, content: bytes) -> str:
        """Keep a chunk; its hash. What is there already costs only the hashing."""
        digest = blake3(content).hexdigest()
        if self.has(digest):
            return digest
        self._mine.add(digest)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(WORKERS)
        if len(self._pending) >= AHEAD:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(lambda: self.append(bytes.fromhex(digest), pack(content))))
        return digest

    def put_packed(self, digest: str, stored: bytes) -> None:
        """Keep a chunk as another store packed it, or Corrupt when it is not what its name says."""
        unpack(digest, stored, LARGEST)
        if not self.has(digest):
            self._mine.add(digest)
            self.append(bytes.fromhex(digest), stored)

    def has(self, digest: str) -> bool:
        return digest in self._mine or self.store.has(digest)

    def get(self, digest: str) -> bytes:
        """As Store.get, for chunks of this batch too."""
        if digest not in self._mine:
            return self.store.get(digest)
        self._settle()
        key = bytes.fromhex(digest)
        offset, length = next((offset, length) for found, offset, length in self._rows if found == key)
        assert self._fd is not None
        return unpack(digest, os.pread(self._fd, length, offset), LARGEST)

    def append(self, key: bytes, stored: bytes) -> None:
        """Write a chunk, packed already, at the end of the batch's pack."""
        record = _HEAD.pack(key, len(stored)) + stored
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                self._end = os.write(self._fd, _MARK)
            try:
                done = os.pwrite(self._fd, record, self._end)
            except OSError as error:
                raise LimitExceeded(f"can't keep a chunk: {error.strerror}", hint="free some space") from error
            if done != len(record):
                raise LimitExceeded(
                    "the store's disk is full", hint="remove snapshots, then run the garbage collection"
                )
            self._rows.append((key, self._end + _HEAD.size, len(stored)))
            self._end += len(record)
            self.added, self.stored = self.added + 1, self.stored + len(record)

    def commit(self) -> None:
        """Make the chunks part of the store; their bytes are on disk before the pack has its name."""
        self._settle()
        if self._fd is None:
            return
        if self.store.durable:
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise LimitExceeded(f"the store's disk does not take more: {error.strerror}") from error
        packs = self.store.path / "packs"
        write_index(packs / f"{self._name}.idx", self._rows)
        with self.store._lock:
            os.rename(self._path, packs / f"{self._name}.pack")
            self.store._refresh()
        if self.store.durable:
            _fsync(packs)
        os.close(self._fd)
        self._fd, self._rows, self._name = None, [], os.urandom(8).hex()
        self._path = self.store.path / "staging" / f"{self._name}.pack"
        self._mine.clear()

    def discard(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._path.unlink(missing_ok=True)

    def _settle(self) -> None:
        while self._pending:
            self._pending.popleft().result()


def pack(content: bytes) -> bytes:
    """A chunk as it is stored: `z`, a CRC-32 and zstd where that helps, else `r` and the content itself."""
    if not hasattr(_local, "compressor"):  # one a thread: they are not shared
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL)
    packed: bytes = _local.compressor.compress(content)
    # The checksum notices damage that happens to unpack to the same content, and would not the next time.
    return (
        b"z" + struct.pack("<I", zlib.crc32(packed)) + packed
        if len(packed) < len(content) * 15 // 16
        else b"r" + content
    )


def unpack(digest: str, stored: bytes, limit: int = LARGEST) -> bytes:
    """The content of a stored chunk; Corrupt when it is not what its name says, and before a bomb is unpacked."""
    tag, body = stored[:1], memoryview(stored)[1:]
    try:
        if tag == b"z":
            (check,), body = struct.unpack_from("<I", body), body[4:]
            if zlib.crc32(body) != check:
                raise Corrupt(f"the chunk {digest} is damaged", hint="load from a copy of the store", chunk=digest)
            size = zstandard.frame_content_size(body)
            if not 0 <= size <= limit:
                raise Corrupt(f"the chunk {digest} claims {size} bytes", chunk=digest)
            if not hasattr(_local, "decompressor"):
                _local.decompressor = zstandard.ZstdDecompressor()
            content: bytes = _local.decompressor.decompress(body)
        elif tag == b"r" and len(body) <= limit:
            content = bytes(body)
        else:
            raise Corrupt(f"the chunk {digest} is in no known form", chunk=digest)
    except (zstandard.ZstdError, struct.error) as error:
        raise Corrupt(f"the chunk {digest} can't be unpacked: {error}", chunk=digest) from None
    if blake3(content).hexdigest() != digest:
        raise Corrupt(
            f"the chunk {digest} does not hold what was written", hint="load from a copy of the store", chunk=digest
        )
    return content


def write_index(path: Path, rows: list[tuple[bytes, int, int]]) -> None:
    """Where the chunks of a pack lie: a cache with a checksum of its own, made again from the pack when it is gone or wrong."""
    raw = b"".join(struct.pack("<32sQI", *row) for row in rows)
    aside = path.with_suffix(f".{os.urandom(4).hex()}.tmp")
    aside.write_bytes(raw + blake3(raw).digest())
    os.rename(aside, path)


def _fsync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
