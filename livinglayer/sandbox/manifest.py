"""What a layer holds, entry by entry, in pages that unchanged parts of two layers share.

A layer's id is the hash of its root, the root names the pages, a page holds a run of entries sorted by path with the content of small files,
larger files name their chunks. Equal trees have equal ids; inode numbers, access and change times are no part of them.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from livinglayer.errors import Corrupt, LimitExceeded
from livinglayer.sandbox.store import CHUNK, HASH, Store, Writer

Type = Literal["f", "d", "l", "w", "h", "p", "s"]  # file, directory, link, whiteout, hard link, fifo, socket

INLINE = 4096  # files up to this size lie in the page itself: most of a source tree, and a chunk of their own would cost them a file
PAGE_ENTRIES, PAGE_BYTES, PAGE_CUT = (
    1024,
    512 << 10,
    128,
)  # most entries and bytes of a page; a page ends at one path in so many
FILE_CHUNKS = 800_000  # of one file: 100 GB, holes not counted
FORMAT = 1
MAGIC = b"LLP1"
Getter = Callable[[str], bytes]


@dataclass(frozen=True)
class Entry:
    """One name of a layer. The root directory of the layer is the entry with the empty path."""

    path: str
    type: Type
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime: int = 0  # ns
    xattrs: tuple[tuple[str, bytes], ...] = ()
    opaque: bool = False  # a directory that hides what lower layers have under its name
    size: int = 0
    target: str = ""  # of a link (as written) or a hard link (the path of the entry that holds the content)
    inline: bytes = b""
    chunks: tuple[str | int, ...] = ()  # CHUNK bytes each, the last one less; a number stands for so many of zeros

    def content(self, get: Getter) -> Iterator[bytes | int]:
        """The bytes of a file, piece by piece; a number stands for so many zeros, which need not be written."""
        if self.size <= INLINE:
            if self.size:
                yield self.inline
            return
        at = 0
        for chunk in self.chunks:
            if isinstance(chunk, int):
                zeros = min(chunk * CHUNK, self.size - at)
                at += zeros
                yield zeros
                continue
            piece = get(chunk)
            if len(piece) != min(CHUNK, self.size - at):
                raise Corrupt(f"the chunk {chunk} of {self.path!r} has another length", chunk=chunk)
            at += len(piece)
            yield piece


@dataclass(frozen=True)
class Manifest:
    """A layer's root: its id, how much it holds, and where its pages are."""

    id: str
    entries: int
    size: int
    pages: tuple[str, ...]


def order(path: str) -> bytes:
    """Sort key: a directory right before all that lies in it."""
    return os.fsencode(path).replace(b"/", b"\0")


def write(entries: Iterable[Entry], writer: Writer) -> Manifest:
    """Keep entries, which must come in order, as a manifest."""
    pages: list[str] = []
    rows: list[list[object]] = []
    blob: list[bytes] = []
    count = size = held = 0

    def turn() -> None:
        nonlocal held
        text = json.dumps(rows, separators=(",", ":")).encode()
        pages.append(writer.put(b"".join((MAGIC, struct.pack("<I", len(text)), text, *blob))))
        rows.clear()
        blob.clear()
        held = 0

    for entry in entries:
        if len(entry.chunks) > FILE_CHUNKS:
            raise LimitExceeded(f"{entry.path!r} holds more than {FILE_CHUNKS * CHUNK >> 30} GiB")
        rows.append(_row(entry))
        if entry.inline:
            blob.append(entry.inline)
            held += len(entry.inline)
        held += 100 + 67 * len(entry.chunks)
        count, size = count + 1, size + (entry.size if entry.type == "f" else 0)
        # Where a page ends depends on its last path alone: a name put in or taken out changes one page, not all that follow.
        if zlib.crc32(os.fsencode(entry.path)) % PAGE_CUT == 0 or len(rows) >= PAGE_ENTRIES or held >= PAGE_BYTES:
            turn()
    if rows:
        turn()
    root = json.dumps(
        {"format": FORMAT, "entries": count, "size": size, "pages": pages}, separators=(",", ":")
    ).encode()
    return Manifest(writer.put(root), count, size, tuple(pages))


def read(layer: str, get: Getter) -> Manifest:
    """The root of a layer, or Corrupt."""
    try:
        root = json.loads(get(layer))
        if root["format"] != FORMAT:
            raise Corrupt(f"the layer {layer} is of format {root['format']!r}")
        pages = tuple(root["pages"])
        if not all(isinstance(page, str) and HASH.fullmatch(page) for page in pages):
            raise ValueError("pages")
        return Manifest(layer, int(root["entries"]), int(root["size"]), pages)
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"the layer {layer} has no readable root: {error}", chunk=layer) from None


def entries(manifest: Manifest, get: Getter) -> Iterator[Entry]:
    """The entries of a layer in order, each checked: whoever wrote the manifest, no path leaves the tree."""
    last: bytes | None = None
    for page in manifest.pages:
        for entry in _page(page, get(page)):
            key = order(entry.path)
            if last is not None and key <= last:
                raise Corrupt(f"the layer {manifest.id} is not in order at {entry.path!r}", chunk=page)
            last = key
            yield entry


def chunks(layer: str, get: Getter) -> Iterator[str]:
    """Every chunk a layer needs, its root and pages included."""
    manifest = read(layer, get)
    yield layer
    for page in manifest.pages:
        yield page
        for entry in _page(page, get(page)):
            yield from (chunk for chunk in entry.chunks if isinstance(chunk, str))


def _page(name: str, content: bytes) -> Iterator[Entry]:
    try:
        if content[:4] != MAGIC:
            raise ValueError("magic")
        (length,) = struct.unpack_from("<I", content, 4)
        at = 8 + length
        for row in json.loads(content[8:at]):
            entry = _entry(row)
            if entry.type == "f" and 0 < entry.size <= INLINE:
                inline = content[at : at + entry.size]
                if len(inline) != entry.size:
                    raise ValueError("inline content ends early")
                at += entry.size
                entry = replace(entry, inline=inline)
            yield entry
        if at != len(content):
            raise ValueError("content that belongs to nothing")
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise Corrupt(f"the page {name} of a manifest can't be read: {error}", chunk=name) from None


def _row(entry: Entry) -> list[object]:
    row: list[object] = [
        entry.path, entry.type, entry.mode, entry.uid, entry.gid, entry.mtime,
        [[name, value.hex()] for name, value in entry.xattrs],
    ]  # fmt: skip
    if entry.type == "f":
        row += [entry.size, list(entry.chunks)]
    elif entry.type in ("l", "h"):
        row.append(entry.target)
    elif entry.type == "d":
        row.append(int(entry.opaque))
    return row


def _entry(row: list[object]) -> Entry:
    path, kind, mode, uid, gid, mtime, xattrs, *rest = row
    if not isinstance(path, str) or not _safe(path):
        raise ValueError(f"the path {path!r}")
    if not path and kind != "d":
        raise ValueError("the root is no directory")
    numbers = (mode, uid, gid, mtime)
    if not all(isinstance(number, int) for number in numbers) or not isinstance(xattrs, list):
        raise ValueError(f"the attributes of {path!r}")
    if not 0 <= mode <= 0o7777 or not 0 <= uid < 2**32 or not 0 <= gid < 2**32 or not -(2**63) <= mtime < 2**63:  # type: ignore[operator]
        raise ValueError(f"the attributes of {path!r}")
    kept = tuple((str(name), bytes.fromhex(value)) for name, value in xattrs)
    if not all(keeps(name) for name, _ in kept):
        raise ValueError(f"the attributes of {path!r}")
    entry = Entry(path, kind, mode, uid, gid, mtime, kept)  # type: ignore[arg-type]
    if kind == "f":
        size, pieces = rest
        if not isinstance(size, int) or size < 0 or not isinstance(pieces, list):
            raise ValueError(f"the size of {path!r}")
        if not all(
            HASH.fullmatch(piece) if isinstance(piece, str) else type(piece) is int and piece > 0 for piece in pieces
        ):
            raise ValueError(f"the chunks of {path!r}")
        if sum(1 if isinstance(piece, str) else piece for piece in pieces) != (
            0 if size <= INLINE else -(-size // CHUNK)
        ):
            raise ValueError(f"the chunks of {path!r}")
        return replace(entry, size=size, chunks=tuple(pieces))
    if kind in ("l", "h"):
        (target,) = rest
        if not isinstance(target, str) or "\0" in target or (kind == "h" and not (target and _safe(target))):
            raise ValueError(f"the target of {path!r}")
        return replace(entry, target=target)
    if kind == "d":
        return replace(entry, opaque=bool(rest[0]))
    if kind in ("w", "p", "s") and not rest and path:
        return entry
    raise ValueError(f"the type {kind!r} of {path!r}")


def _safe(path: str) -> bool:
    if path == "":
        return True
    return (
        len(path) <= 65536
        and "\0" not in path
        and all(name not in ("", ".", "..") and len(name) <= 255 for name in path.split("/"))
    )


def keeps(xattr: str) -> bool:
    """Whether an extended attribute is content; overlay's own are not, but for opacity, which is a field."""
    return xattr.startswith(("user.", "system.posix_acl_")) or xattr == "security.capability"


def merge(lower: Iterable[Entry], upper: Iterable[Entry]) -> list[Entry]:
    """Two layers as the one that looks the same above any base: whiteouts stay, since the base may have what they hide."""
    below = {entry.path: entry for entry in lower}
    result = dict(below)
    gone: set[str] = set()  # subtrees of `lower` that are hidden
    for entry in upper:
        old = below.get(entry.path)
        if entry.type == "d":
            if entry.opaque or (old is not None and old.type != "d"):
                gone.add(entry.path)
            # Above a whiteout or a file of the lower layer, what the base has must stay hidden.
            hides = entry.opaque or (old is not None and (old.type != "d" or old.opaque))
            result[entry.path] = replace(entry, opaque=hides)
        else:
            gone.add(entry.path)
            result[entry.path] = entry
    if gone:
        above = {entry.path for entry in result.values() if below.get(entry.path) is not entry}
        hidden: dict[str, bool] = {}

        def is_hidden(path: str) -> bool:
            if path not in hidden:
                parent = path.rpartition("/")[0]
                hidden[path] = bool(path) and (parent in gone or is_hidden(parent))
            return hidden[path]

        # A hard link keeps the content it shares: when the entry that holds it is hidden, the first link that survives takes it over.
        heirs: dict[str, str] = {}
        for entry in sorted(result.values(), key=lambda entry: order(entry.path)):
            if entry.type != "h" or entry.path in above or is_hidden(entry.path):
                continue
            if entry.target in above or is_hidden(entry.target):
                heir = heirs.setdefault(entry.target, entry.path)
                holder = below[entry.target]
                result[entry.path] = replace(holder, path=heir) if heir == entry.path else replace(entry, target=heir)
        result = {path: entry for path, entry in result.items() if path in above or not is_hidden(path)}
    return sorted(result.values(), key=lambda entry: order(entry.path))


def of_stat(path: str, kind: Type, found: os.stat_result) -> Entry:
    return Entry(path, kind, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns)


def load(layer: str, store: Store) -> tuple[Manifest, Iterator[Entry]]:
    manifest = read(layer, store.get)
    return manifest, entries(manifest, store.get)
