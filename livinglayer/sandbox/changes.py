"""What became of the files between two chains of layers: added, changed, removed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from blake3 import blake3

from livinglayer.errors import NotFound
from livinglayer.sandbox.manifest import Entry, order
from livinglayer.sandbox.tree import is_opaque, is_whiteout, read_content, stacked

TYPES = {"f": "file", "d": "directory", "l": "link", "p": "fifo", "s": "socket"}
MODES = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l", stat.S_IFIFO: "p", stat.S_IFSOCK: "s"}


@dataclass(frozen=True)
class Change:
    """One path that differs between two snapshots."""

    path: str
    kind: Literal["added", "changed", "removed"]
    type: str  # of what is there now, or was: file, directory, link, fifo, socket
    before: int | None = None  # sizes in bytes, of files
    after: int | None = None
    attributes_only: bool = False  # the content is the same


@dataclass(frozen=True)
class Side:
    """A name as one of the two has it: in a manifest, or in a layer directory of the base they share."""

    type: str
    size: int | None
    owner: tuple[int, int, int]
    at: Entry | Path

    def content(self) -> object:
        """Something equal for equal content of one type and size."""
        if self.type == "l":
            return self.at.target if isinstance(self.at, Entry) else os.readlink(self.at)
        if self.type != "f":
            return None
        if isinstance(self.at, Entry):
            return self.at.inline, self.at.chunks
        fd = os.open(self.at, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return read_content(fd, os.fstat(fd).st_size, str(self.at), lambda piece: blake3(piece).hexdigest())
        finally:
            os.close(fd)


class View:
    """Names of a chain (its layers merged) above a base that is looked up on the disk only where it must be."""

    def __init__(self, entries: dict[str, Entry], base: list[Path]) -> None:
        self.entries, self.base = entries, base

    def paths(self) -> set[str]:
        """Every path that may differ from the base."""
        found = {path for path in self.entries if path}
        for entry in self.entries.values():
            if entry.opaque:  # what the base has there is gone
                found |= {f"{entry.path}/{name}" if entry.path else name for name in self._names(entry.path)}
        return found

    def find(self, path: str) -> Side | None:
        entry = self.entries.get(path)
        if entry is not None:
            if entry.type == "h":
                entry = replace(self.entries[entry.target], path=path)
            if entry.type == "w":
                return None
            return Side(
                entry.type, entry.size if entry.type == "f" else None, (entry.mode, entry.uid, entry.gid), entry
            )
        for parent in parents(path):
            above = self.entries.get(parent)
            if above is not None and (above.type != "d" or above.opaque):
                return None
        try:
            layer, found = stacked(self.base, path)
        except NotFound:
            return None
        kind = MODES.get(stat.S_IFMT(found.st_mode), "s")
        mode = 0o777 if kind == "l" else stat.S_IMODE(found.st_mode)
        return Side(kind, found.st_size if kind == "f" else None, (mode, found.st_uid, found.st_gid), layer / path)

    def _names(self, path: str) -> set[str]:
        names: set[str] = set()
        for layer in self.base:
            directory = layer / path
            if directory.is_dir() and not directory.is_symlink():
                names |= set(os.listdir(directory))
                if is_opaque(directory):
                    break
        return names


def compare(old: View, new: View) -> list[Change]:
    """The changes from one to the other, sorted by path; of a removed directory only itself is named."""
    changes = []
    for path in sorted(old.paths() | new.paths(), key=order):
        if change := _change(path, old.find(path), new.find(path)):
            changes.append(change)
    gone = {change.path for change in changes if change.kind == "removed"}
    return [
        change
        for change in changes
        if change.kind != "removed" or not any(parent in gone for parent in parents(change.path))
    ]


def _change(path: str, before: Side | None, after: Side | None) -> Change | None:
    if before is None:
        return None if after is None else Change(path, "added", TYPES[after.type], after=after.size)
    if after is None:
        return Change(path, "removed", TYPES[before.type], before=before.size)
    same = before.type == after.type and before.size == after.size and before.content() == after.content()
    if same and before.owner == after.owner:
        return None
    return Change(path, "changed", TYPES[after.type], before.size, after.size, attributes_only=same)


def parents(path: str) -> Iterator[str]:
    """The directories above a path, the root's empty name last."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def of_upper(upper: Path) -> list[Change]:
    """What a box has written or removed so far, as its overlay holds it; nothing is followed, the box may go on."""
    found: list[Change] = []
    for at, directories, names, fd in os.fwalk(upper, follow_symlinks=False):
        for name in sorted(names + directories):
            try:
                here = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            path = os.path.relpath(os.path.join(at, name), upper)
            if is_whiteout(here):
                found.append(Change(path, "removed", "file"))
            elif kind := MODES.get(stat.S_IFMT(here.st_mode)):
                found.append(Change(path, "changed", TYPES[kind], after=here.st_size if kind == "f" else None))
    return found
