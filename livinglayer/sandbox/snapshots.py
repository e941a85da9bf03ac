"""A box's files at one moment, by content: loaded, compared, carried elsewhere, and sharing whatever is the same.

A snapshot is a chain of layers above a base. Its id is the hash of the chain, so equal content has an equal id; its record lies in the
store under refs/snapshot. Layer directories on the disk are a cache and may be deleted at any time.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from livinglayer.errors import Corrupt, Invalid, NotFound
from livinglayer.sandbox import manifest
from livinglayer.sandbox.changes import Change, View, compare
from livinglayer.sandbox.disk import Disk
from livinglayer.sandbox.layers import FIT, HOST, MASK, Layers, chain_of
from livinglayer.sandbox.manifest import Entry
from livinglayer.sandbox.store import HASH, LARGEST, Collected, Store, Writer
from livinglayer.sandbox.tree import read_stacked, scan
from livinglayer.sandbox.tree import write as write_tree

DEEPEST = 10  # layers of a chain before those of snapshots become one: a name that is nowhere is looked up in each
ROOTS = ("snapshot", "image")  # kinds of refs whose layers stay
CACHES = ("step", "diff")  # kinds whose layers stay until a collection is told to drop caches


@dataclass(frozen=True)
class Snapshot:
    """What is known of a snapshot; `layers` is its chain, topmost first, ending in its base."""

    id: str
    layers: tuple[str, ...]
    parent: str | None
    size: int  # bytes of the files in its own layers, the base not counted
    created: float
    tier: str
    memory: bool
    skipped: tuple[str, ...] = ()  # devices, which no snapshot holds
    labels: tuple[tuple[str, str], ...] = ()
    holders: tuple[str, ...] = ()  # who keeps it: equal content is one snapshot, and goes with the last of them


class Snapshots:
    """The snapshots of one state directory."""

    def __init__(self, disk: Disk, layers: Layers, store: Store | None = None) -> None:
        self.disk, self.layers, self.store = disk, layers, store or layers.store
        self._changing = threading.Lock()  # of who holds what

    # making

    def snapshot(
        self,
        sealed: Path,
        layers: Sequence[str],
        *,
        tier: str = "namespace",
        parent: str | None = None,
        memory: Path | None = None,
        labels: dict[str, str] | None = None,
        holder: str = "",
        keep: bool = False,
        entries: int | None = None,
        size: int | None = None,
    ) -> Snapshot:
        """Keep a sealed upper (`Disk.seal`, used up unless `keep`) above the layers it stood on, and a directory of memory with it.

        Every file is hashed, but for those of which btrfs itself says that they were not touched since the last snapshot of this box.
        """
        caps: dict[str, int] = {name: cap for name, cap in (("entries", entries), ("size", size)) if cap is not None}
        with self.store.writing() as writer:
            lineage = self.disk.lineage(sealed) if self.disk.root in sealed.parents else None
            found = scan(sealed, writer, self._known(sealed), **caps)
            chain = chain_of(layers)
            layer = None
            if len(found.entries) > 1:  # a box that changed nothing is what it stood on
                layer = manifest.write(found.entries, writer)
                chain = (layer.id, *chain)
            remembered = manifest.write(scan(memory, writer).entries, writer) if memory is not None else None
            if len(chain) > DEEPEST:
                chain = self._flatten(chain, writer)
            total = sum(manifest.read(name, writer.get).size for name in chain if HASH.fullmatch(name))
            writer.commit()
            if layer is not None and not keep and self.disk.root in sealed.parents:
                if self.layers.adopt(sealed, layer.id) and lineage is not None:
                    self._remember(layer.id, lineage.parent, found.contents)
            elif not keep:
                self.disk.destroy(sealed)
            record = {
                "layers": chain, "parent": parent, "size": total, "created": time.time(), "tier": tier,
                "memory": remembered.id if remembered else None, "skipped": found.skipped[:100], "labels": labels or {},
            }  # fmt: skip
            id = identify(chain, remembered.id if remembered else None)
            return self._hold(id, record, holder)

    def _hold(self, id: str, record: dict[str, Any], holder: str) -> Snapshot:
        """Keep a record for one holder more."""
        with self._changing:
            old = self.store.find_ref("snapshot", id)
            holders = set() if old is None else set(_holders(old))
            new = (old or record) | {"holders": sorted({*holders, holder})}
            if record["labels"]:
                new["labels"] = record["labels"]
            if new != old:
                self.store.write_ref("snapshot", id, new)
            return self.get(id)

    def _known(self, sealed: Path) -> Callable[[int, int], tuple[str | int, ...] | None]:
        """Where the content of an untouched file lies.

        The last snapshot of the same box must still be on this very disk, as the subvolume it was then: so no copy of the disk from an
        earlier day is taken for the one on which its transaction was counted.
        """
        lineage = self.disk.lineage(sealed) if self.disk.root in sealed.parents else None
        if lineage is None:
            return lambda inode, size: None
        try:
            check, _, text = self._memo(lineage.parent).read_text().partition("\n")
            if blake3(text.encode()).hexdigest() != check:
                return lambda inode, size: None
            memo = json.loads(text)
            last = self.disk.lineage(self.disk.layers / memo["layer"])
        except (OSError, ValueError):
            return lambda inode, size: None
        if last is None or last.id != memo["id"] or last.parent != lineage.parent or last.taken >= lineage.taken:
            return lambda inode, size: None
        touched = self.disk.touched(sealed, last.taken)
        contents: dict[str, list[Any]] = memo["contents"]

        def known(inode: int, size: int) -> tuple[str | int, ...] | None:
            held = contents.get(str(inode))
            if inode in touched or held is None or held[0] != size:
                return None
            chunks = held[1]
            return tuple(chunks) if all(isinstance(chunk, int) or self.store.has(chunk) for chunk in chunks) else None

        return known

    def _remember(self, layer: str, parent: str, contents: dict[int, tuple[int, tuple[str | int, ...]]]) -> None:
        lineage = self.disk.lineage(self.disk.layers / layer)
        if lineage is None:
            return
        text = json.dumps({"layer": layer, "id": lineage.id, "contents": contents}, separators=(",", ":"))
        aside = self._memo(f"{parent}.{os.urandom(4).hex()}")
        aside.write_text(f"{blake3(text.encode()).hexdigest()}\n{text}")
        os.rename(aside, self._memo(parent))

    def _memo(self, parent: str) -> Path:
        return self.store.path / "cache" / f"box-{parent}"

    def _flatten(self, chain: tuple[str, ...], writer: Writer) -> tuple[str, ...]:
        """Make the layers of snapshots, those above the base's own, one."""
        depth = next((at for at, name in enumerate(chain) if not HASH.fullmatch(name)), len(chain))
        if depth < 2:
            return chain
        merged = self._merged(chain[:depth], writer.get)
        return (manifest.write(merged, writer).id, *chain[depth:])

    def _merged(self, chain: Sequence[str], get: manifest.Getter) -> list[Entry]:
        merged: list[Entry] = []
        for name in reversed(chain):
            above = list(manifest.entries(manifest.read(name, get), get))
            merged = manifest.merge(merged, above) if merged else above
        return merged

    # using

    def get(self, id: str) -> Snapshot:
        """A snapshot by its id or a prefix of it that no other has, or NotFound."""
        if not re.fullmatch(r"[0-9a-f]{4,40}", id):
            raise NotFound(f"no snapshot {id!r}", hint="an id is 40 hexadecimal digits, or the first of them")
        document = self.store.find_ref("snapshot", id)
        if document is None:
            matches = [name for name in self.store.refs("snapshot") if name.startswith(id)]
            if len(matches) != 1:
                raise NotFound(f"no snapshot {id!r}", hint=f"{len(matches)} begin so" if matches else None)
            id, document = matches[0], self.store.ref("snapshot", matches[0])
        try:
            chain = tuple(document["layers"])
            if identify(chain, document["memory"]) != id:
                raise Corrupt(f"the record of snapshot {id} does not hold what was written")
            return Snapshot(
                id, chain, document["parent"], document["size"], document["created"], document["tier"], document["memory"] is not None,
                tuple(document["skipped"]), tuple(sorted(document["labels"].items())), _holders(document),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise Corrupt(f"the record of snapshot {id} can't be read: {error}") from None

    def list_snapshots(self) -> list[Snapshot]:
        """All of them, the youngest first."""
        return sorted((self.get(id) for id in self.store.refs("snapshot")), key=lambda found: -found.created)

    def load(self, id: str) -> tuple[str, ...]:
        """The layer names of a snapshot, ready to be stacked: what the disk lacks is written from the store and verified."""
        found = self.get(id)
        with self.store.reading():
            for name in found.layers:
                if HASH.fullmatch(name):
                    manifest.read(name, self.store.get)  # its root, verified, even where the directory is there
            self._from_parts(found)
            return self.layers.expand(found.layers)

    def _from_parts(self, found: Snapshot) -> None:
        """A flattened layer that the disk lacks shares the blocks of the layers it was made of, where they are still there."""
        top = found.layers[0]
        if not HASH.fullmatch(top) or (self.disk.layers / top).is_dir() or found.parent is None:
            return
        try:
            below = [self.disk.layers / name for name in self.get(found.parent).layers if HASH.fullmatch(name)]
        except NotFound:
            return
        parts = []
        for path in below:
            if path.is_dir():
                entries = manifest.entries(manifest.read(path.name, self.store.get), self.store.get)
                parts.append((path, {entry.path: entry.chunks for entry in entries if entry.chunks}))

        def like(entry: Entry) -> str | None:
            return next((f"{path}/{entry.path}" for path, held in parts if held.get(entry.path) == entry.chunks), None)

        self.layers.materialise(top, like)

    def load_memory(self, id: str, directory: Path) -> None:
        """Write the memory kept with a snapshot into an empty directory; Invalid when there is none."""
        memory = self.store.ref("snapshot", self.get(id).id)["memory"]
        if memory is None:
            raise Invalid(f"the snapshot {id!r} holds files only")
        with self.store.reading():
            write_tree(
                manifest.entries(manifest.read(memory, self.store.get), self.store.get), self.store.get, directory
            )

    def verify(self, id: str) -> int:
        """Read and check every chunk a snapshot needs; how many. Corrupt names the first that is damaged."""
        with self.store.reading():
            needed = set(self._needed(self.store.ref("snapshot", self.get(id).id)))
            for chunk in needed:
                self.store.get(chunk)
        return len(needed)

    def read(self, id: str, path: str, limit: int = 1 << 20) -> bytes:
        """What a regular file of a snapshot holds, the base's files included."""
        names = self.load(id)
        return read_stacked([self.layers.path(name) for name in names], path, limit)

    def remove(self, id: str, holder: str | None = "") -> tuple[str, ...]:
        """Let go of a snapshot for one holder, or with None for all; who still holds it. With the last of them it is forgotten.

        Boxes that stand on it keep their layers, and what nothing else needs goes at the next collection.
        """
        with self._changing:
            found = self.get(id)
            left = tuple(other for other in found.holders if holder not in (None, other))
            if not left:
                self.store.remove_ref("snapshot", found.id)
            elif left != found.holders:
                self.store.write_ref("snapshot", found.id, self.store.ref("snapshot", found.id) | {"holders": left})
            return left

    # comparing

    def diff(self, a: str, b: str) -> list[Change]:
        """What became of the files from snapshot `a` to snapshot `b`, sorted by path; a removed directory is one change."""
        one, two = self.get(a).layers, self.get(b).layers
        common = 0
        while common < min(len(one), len(two)) and one[-1 - common] == two[-1 - common]:
            common += 1
        with self.store.reading():
            base = [self.layers.path(name) for name in self.layers.expand(one[len(one) - common :])]
            left, right = (self._view(chain[: len(chain) - common]) for chain in (one, two))
            return compare(View(left, base), View(right, base))

    def _view(self, chain: Sequence[str]) -> dict[str, Entry]:
        expanded = [name for name in chain if HASH.fullmatch(name)]
        return {entry.path: entry for entry in self._merged(expanded, self.store.get)}

    def text_diff(self, a: str, b: str, path: str, limit: int = 1 << 20) -> str:
        """A unified diff of one text file; Invalid for what is not text."""
        texts = []
        for id in (a, b):
            try:
                texts.append(self.read(id, path, limit).decode())
            except NotFound:
                texts.append("")
            except UnicodeDecodeError:
                raise Invalid(f"{path!r} is not text in {id}") from None
        old, new = (text.splitlines(keepends=True) for text in texts)
        return "".join(difflib.unified_diff(old, new, fromfile=f"{a[:12]}/{path}", tofile=f"{b[:12]}/{path}"))

    # carrying

    def export(self, id: str, file: IO[bytes]) -> None:
        """Write a snapshot, with all it needs but the base, as a tar: its record, then its chunks as they are stored."""
        id = self.get(id).id
        with self.store.reading(), tarfile.open(fileobj=file, mode="w|") as archive:
            document = self.store.ref("snapshot", id)
            document.pop("holders", None)  # those are this machine's
            _member(archive, "snapshot.json", json.dumps({"format": 1, "id": id, **document}).encode())
            for chunk in dict.fromkeys(self._needed(document)):
                stored = self.store.get_packed(chunk)
                _member(archive, f"chunks/{chunk}", stored)

    def import_(self, file: IO[bytes], limit: int = 1 << 40) -> Snapshot:
        """Take in an exported snapshot. Nothing of it is believed: every chunk is hashed, every path checked, and all or nothing is kept."""
        total = 0
        document: dict[str, Any] | None = None
        with self.store.writing() as writer:
            try:
                with tarfile.open(fileobj=file, mode="r|") as archive:
                    for member in archive:
                        total += member.size
                        if not member.isreg() or member.size > LARGEST or total > limit:
                            raise Invalid(f"{member.name[:200]!r} does not belong in a snapshot")
                        content = archive.extractfile(member)
                        assert content is not None
                        if member.name == "snapshot.json" and document is None:
                            document = json.loads(content.read())
                        elif (match := re.fullmatch(r"chunks/([0-9a-f]{64})", member.name)) and document is not None:
                            writer.put_packed(match[1], content.read())
                        else:
                            raise Invalid(f"{member.name[:200]!r} does not belong in a snapshot")
            except (tarfile.TarError, ValueError, EOFError) as error:
                raise Invalid(f"this is not a snapshot's archive: {error}") from None
            record = _record(document)
            get = _remembering(writer.get)
            for chunk in self._needed(record, get):
                if not writer.has(chunk):
                    raise Corrupt(f"the archive lacks the chunk {chunk}", chunk=chunk)
            for layer in [*record["layers"], record["memory"]]:
                if layer is not None and HASH.fullmatch(layer):
                    for _ in manifest.entries(manifest.read(layer, get), get):
                        pass  # reading checks order and paths
            writer.commit()
            return self._hold(identify(tuple(record["layers"]), record["memory"]), record, "")

    # upkeep

    def collect(self, pins: Iterable[str] | Callable[[], Iterable[str]] = (), caches: bool = True) -> Collected:
        """Remove what no snapshot, image or pinned layer (those of live boxes) needs, on the disk too; without `caches`, build steps' as well.

        Safe beside snapshots being made: they finish first, or begin after. `pins` may be a function, asked at that moment.
        """

        def live() -> Iterator[str]:
            pinned = set(pins() if callable(pins) else pins)
            kinds = (*ROOTS, *CACHES) if caches else ROOTS
            if not caches:
                for kind in CACHES:
                    for name in self.store.refs(kind):
                        self.store.remove_ref(kind, name)
            layers: set[str] = set(pinned)
            chunks: set[str] = set()
            for kind in kinds:
                for name in self.store.refs(kind):
                    document = self.store.find_ref(kind, name)
                    try:
                        layers |= set(document["layers"]) if document else set()  # forgotten in between
                        if document and document.get("memory"):
                            chunks |= set(manifest.chunks(document["memory"], self.store.get))
                    except Corrupt as error:
                        raise Corrupt(
                            f"the {kind} {name!r} is damaged: {error}", hint=f"remove it, then collect: {name}"
                        ) from None
            for layer in layers:
                if HASH.fullmatch(layer) and (layer not in pinned or self._whole(layer)):
                    chunks |= set(manifest.chunks(layer, self.store.get))
            for name in os.listdir(self.disk.layers):
                # Others than snapshots put layers there too; masks and fitting layers are made again in milliseconds when one is missed.
                ours = HASH.fullmatch(name) or name.startswith((f"{MASK}-", f"{FIT}-"))
                if ours and name not in layers and name != self.layers.mask():
                    self.disk.destroy(self.disk.layers / name)
            yield from chunks

        found = self.store.collect(live)
        for memo in (self.store.path / "cache").glob("box-*"):
            if memo.stat().st_mtime < time.time() - 30 * 86400:
                memo.unlink(missing_ok=True)
        return found

    def _whole(self, layer: str) -> bool:
        """Whether the store has a layer at all: a live fork stands on layers that were never kept."""
        return self.store.has(layer)

    def _needed(self, document: dict[str, Any], get: manifest.Getter | None = None) -> Iterator[str]:
        for layer in [*document["layers"], document.get("memory")]:
            if layer is not None and HASH.fullmatch(layer):
                yield from manifest.chunks(layer, get or self.store.get)


def identify(chain: Sequence[str], memory: str | None) -> str:
    """The id of a snapshot: the hash of what it is made of."""
    return blake3(json.dumps([1, list(chain), memory], separators=(",", ":")).encode()).hexdigest()[:40]


def _holders(document: dict[str, Any]) -> tuple[str, ...]:
    return tuple(document.get("holders", ("",)))


def _member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    archive.addfile(member, io.BytesIO(content))


def _record(document: object) -> dict[str, Any]:
    """The fields of a record that came from outside, each checked."""
    if not isinstance(document, dict) or document.get("format") != 1:
        raise Invalid("the archive holds no snapshot.json of a format known here")
    layers, memory = document.get("layers"), document.get("memory")
    known = (HOST, MASK, FIT)
    if not isinstance(layers, list) or not layers or len(layers) > 500:
        raise Invalid("the snapshot has no chain of layers")
    if not all(isinstance(name, str) and (name in known or HASH.fullmatch(name)) for name in layers):
        raise Invalid("the snapshot names layers in no known form")
    if memory is not None and not (isinstance(memory, str) and HASH.fullmatch(memory)):
        raise Invalid("the snapshot names its memory in no known form")
    if document.get("id") != identify(layers, memory):
        raise Corrupt("the snapshot is not the one its id names")
    labels = document.get("labels") or {}
    size, created = document.get("size"), document.get("created")
    return {
        "layers": layers, "memory": memory, "parent": None, "size": size if isinstance(size, int) else 0,
        "created": float(created) if isinstance(created, int | float) else time.time(), "tier": str(document.get("tier"))[:50], "skipped": [],
        "labels": {str(name)[:100]: str(value)[:1000] for name, value in labels.items()} if isinstance(labels, dict) else {},
    }  # fmt: skip


def _remembering(get: manifest.Getter) -> manifest.Getter:
    held: dict[str, bytes] = {}

    def once(chunk: str) -> bytes:
        if chunk not in held:
            if len(held) > 256:
                held.clear()
            held[chunk] = get(chunk)
        return held[chunk]

    return once
