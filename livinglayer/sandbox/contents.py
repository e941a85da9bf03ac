"""The files of a volume, from outside of any box: every path is looked up within its directory, as if that were the root.

A box may write anything into a volume, links and pipes included. Here a link leads nowhere but inside, nothing but files is read or
written, and nothing is waited for.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import Conflict, Invalid, LimitExceeded, NotFound, Unavailable
from .client import handed
from .layers import USER_ID

_libc = ctypes.CDLL(None, use_errno=True)
_OPENAT2 = 437  # the same on every architecture
_NO_MAGICLINKS, _NO_XDEV, _IN_ROOT = 0x02, 0x01, 0x10
MANY = 10_000  # entries of one listing
DEEP = 100  # levels of one listing
LONGEST = 4096  # bytes of a path
PATIENCE = 60.0  # seconds to remove a directory
List = list  # inside the class `list` is a method
Type = Literal["file", "directory", "symlink", "unknown"]


@dataclass(frozen=True)
class Entry:
    """One file of a volume; `path` begins with a slash."""

    name: str
    path: str
    type: Type
    size: int
    mode: int
    uid: int
    gid: int
    atime: float
    mtime: float
    ctime: float
    target: str | None = None


def opened(state: Path, id: str) -> int:
    """A volume's directory, as a file descriptor from the host of `state`. Whoever has it must close it."""
    return handed(state, {"do": "volume.open", "volume": id}, f"volume {id!r}")


class Contents:
    """A volume by its directory's file descriptor, which it closes."""

    def __init__(self, root: int) -> None:
        self._root = root

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    def stat(self, path: str) -> Entry:
        """One entry; a link is not followed."""
        parts = _parts(path)
        with self._place(parts) as (fd, name):
            return _entry(parts, fd, name)

    def list(self, path: str, depth: int = 1) -> List[Entry]:
        """What is in a directory, some levels deep; links are told, not followed."""
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= DEEP:
            raise Invalid(f"depth {depth!r} is not between 1 and {DEEP}")
        parts, found = _parts(path), List[Entry]()
        with self._opened(parts, os.O_RDONLY | os.O_DIRECTORY) as fd:
            self._walk(fd, parts, depth, found)
        return found

    def _walk(self, fd: int, above: tuple[str, ...], depth: int, found: List[Entry]) -> None:
        for name in sorted(_names(fd, MANY + 1)):
            if len(found) >= MANY:
                raise LimitExceeded(f"there are more than {MANY} entries", hint="list a directory below it")
            try:
                entry = _entry((*above, name), fd, name)
                found.append(entry)
                if entry.type == "directory" and depth > 1:
                    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    try:
                        self._walk(below, (*above, name), depth - 1, found)
                    finally:
                        os.close(below)
            except (NotFound, FileNotFoundError, NotADirectoryError):
                continue  # a box was faster

    def read(self, path: str) -> int:
        """A file to be read, as a file descriptor; Invalid for what is no file."""
        fd = self._open(_parts(path), os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Invalid(f"{path!r} is not a file")
        return fd

    def write(self, path: str, *, force: bool = True) -> Writing:
        """Where a file's new content goes; it has the name when all is there. Without `force` what is there stays: Conflict."""
        parts = _parts(path)
        if not parts:
            raise Invalid("the volume itself is a directory")
        self._above(parts[:-1])
        return Writing(self, path, parts, force)

    def mkdir(
        self,
        path: str,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        parents: bool = False,
    ) -> Entry:
        """A directory; with `parents` those above it too, and then one that is there is fine."""
        mode, uid, gid = (
            0o755 if mode is None else mode,
            USER_ID if uid is None else uid,
            USER_ID if gid is None else gid,
        )
        parts = _parts(path)
        if parents:
            self._above(parts[:-1], uid, gid)
        with self._place(parts) as (fd, name):
            try:
                with _told(path):
                    os.mkdir(name, 0o700, dir_fd=fd)
            except Conflict:
                if not parents or _entry(parts, fd, name).type != "directory":
                    raise
                return _entry(parts, fd, name)
            made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                os.fchown(made, uid, gid)
                os.fchmod(made, mode & 0o1777)
            finally:
                os.close(made)
            return _entry(parts, fd, name)

    def _above(self, parts: tuple[str, ...], uid: int = USER_ID, gid: int = USER_ID) -> None:
        for count in range(1, len(parts) + 1):
            with self._place(parts[:count]) as (fd, name):
                try:
                    os.mkdir(name, 0o755, dir_fd=fd)
                    os.chown(name, uid, gid, dir_fd=fd, follow_symlinks=False)
                except FileExistsError:
                    continue
                except OSError as error:
                    raise _failure(error, "/" + "/".join(parts[:count])) from None

    def change(self, path: str, *, mode: int | None = None, uid: int | None = None, gid: int | None = None) -> Entry:
        """Other permissions or owners of a file or directory; of a link, its owner."""
        parts = _parts(path)
        with self._place(parts) as (fd, name):
            found = _entry(parts, fd, name)
            with _told(path):
                if uid is not None or gid is not None:
                    os.chown(
                        name,
                        -1 if uid is None else uid,
                        -1 if gid is None else gid,
                        dir_fd=fd,
                        follow_symlinks=False,
                    )
                if mode is not None:
                    if found.type not in ("file", "directory"):
                        raise Invalid(f"{path!r} is neither a file nor a directory")
                    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
                    try:
                        os.fchmod(opened, mode & 0o1777)  # nothing that gives rights
                    finally:
                        os.close(opened)
            return _entry(parts, fd, name)

    def remove(self, path: str) -> None:
        """A file, or a directory with all in it; a link goes, what it leads to stays."""
        parts = _parts(path)
        if not parts:
            raise Invalid("the volume itself is removed as a volume")
        with self._place(parts) as (fd, name):
            found = _entry(parts, fd, name)
            with _told(path):
                _remove(fd, name) if found.type == "directory" else os.unlink(name, dir_fd=fd)

    # where a path leads

    @contextmanager
    def _place(self, parts: tuple[str, ...]) -> Iterator[tuple[int, str]]:
        """The directory that holds the last part of a path, and that part; of the volume itself, itself and a dot."""
        with self._opened(parts[:-1], os.O_RDONLY | os.O_DIRECTORY) as fd:
            yield fd, parts[-1] if parts else "."

    @contextmanager
    def _opened(self, parts: tuple[str, ...], flags: int) -> Iterator[int]:
        fd = self._open(parts, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open(self, parts: tuple[str, ...], flags: int) -> int:
        path = "/".join(parts) or "."
        how = (ctypes.c_uint64 * 3)(flags | os.O_CLOEXEC, 0, _IN_ROOT | _NO_MAGICLINKS | _NO_XDEV)
        for _ in range(8):  # it is told to try again when something is renamed meanwhile
            fd = _libc.syscall(_OPENAT2, self._root, os.fsencode(path), how, ctypes.c_size_t(24))
            if fd >= 0:
                return int(fd)
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.EINTR):
                break
        raise _failure(OSError(number, os.strerror(number)), f"/{path}")


class Writing:
    """A file that is being written beside its place, seen by nobody under its name before it is whole."""

    def __init__(self, contents: Contents, path: str, parts: tuple[str, ...], force: bool) -> None:
        self._path, self._parts, self._force = path, parts, force
        self._directory = contents._open(parts[:-1], os.O_RDONLY | os.O_DIRECTORY)
        try:
            with _told(path):
                self.fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        except BaseException:
            os.close(self._directory)
            raise

    def add(self, data: bytes) -> None:
        """More of it; LimitExceeded when the volume is full."""
        with _told(self._path):
            view = memoryview(data)
            while view:
                view = view[os.write(self.fd, view) :]

    def finish(self, *, mode: int | None = None, uid: int | None = None, gid: int | None = None) -> Entry:
        """Give it its name, with the owner and permissions of what was there before unless others are said."""
        name, before = self._parts[-1], None
        try:
            before = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            pass
        if before is not None and stat.S_ISDIR(before.st_mode):
            raise Invalid(f"{self._path!r} is a directory")
        if before is not None and not self._force:
            raise Conflict(f"{self._path!r} is already there", hint="force=true replaces it")
        known = before if before is not None and stat.S_ISREG(before.st_mode) else None
        with _told(self._path):
            kept = (known.st_uid, known.st_gid) if known else (USER_ID, USER_ID)
            os.fchown(self.fd, kept[0] if uid is None else uid, kept[1] if gid is None else gid)
            os.fchmod(self.fd, (known.st_mode if known else 0o644) & 0o777 if mode is None else mode & 0o777)
            beside = f".{os.urandom(8).hex()}.new"
            os.link(f"/proc/self/fd/{self.fd}", beside, dst_dir_fd=self._directory, follow_symlinks=True)
            try:
                os.rename(beside, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            except BaseException:
                os.unlink(beside, dir_fd=self._directory)
                raise
        return _entry(self._parts, self._directory, name)

    def close(self) -> None:
        """Let go; what was not finished is gone."""
        os.close(self.fd)
        os.close(self._directory)


def _parts(path: object) -> tuple[str, ...]:
    """The names of a path; `..` is taken off as text, so that it leads above nothing."""
    if not isinstance(path, str) or "\0" in path or len(path.encode("utf-8", "surrogateescape")) > LONGEST:
        raise Invalid("that is not a path in a volume", hint="text without NUL, at most 4096 bytes")
    found: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if not found:
                raise Invalid(f"{path!r} leads out of the volume")
            found.pop()
        elif part not in ("", "."):
            found.append(part)
    return tuple(found)


def _entry(parts: tuple[str, ...], fd: int, name: str) -> Entry:
    path = "/" + "/".join(parts)
    with _told(path):
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        link = stat.S_ISLNK(found.st_mode)
        target = os.readlink(name, dir_fd=fd) if link else None
    kind: Type = (
        "symlink"
        if link
        else "directory"
        if stat.S_ISDIR(found.st_mode)
        else "file"
        if stat.S_ISREG(found.st_mode)
        else "unknown"
    )
    return Entry(
        parts[-1] if parts else "/", path, kind, found.st_size, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid,
        found.st_atime, found.st_mtime, found.st_ctime, target,
    )  # fmt: skip


def _remove(fd: int, name: str) -> None:
    """Remove a directory with all in it, following nothing, however deep: what is below is brought up first."""
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    until = time.monotonic() + PATIENCE
    try:
        while names := _names(inside, MANY):
            if time.monotonic() > until:
                raise Conflict(
                    f"{name!r} is not empty after {PATIENCE:g} seconds", hint="try again, when no box writes there"
                )
            for one in names:
                if not stat.S_ISDIR(os.stat(one, dir_fd=inside, follow_symlinks=False).st_mode):
                    os.unlink(one, dir_fd=inside)
                    continue
                try:
                    os.rmdir(one, dir_fd=inside)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    _lift(inside, one)
    finally:
        os.close(inside)
    os.rmdir(name, dir_fd=fd)


def _names(fd: int, most: int) -> list[str]:
    """Names in a directory, not more than that: there may be millions."""
    with os.scandir(fd) as found:
        return [entry.name for entry in itertools.islice(found, most)]


def _lift(inside: int, name: str) -> None:
    """Move what is in a directory to beside it, under names of its own."""
    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        while names := _names(below, MANY):
            for one in names:
                os.rename(one, f".{os.urandom(12).hex()}.gone", src_dir_fd=below, dst_dir_fd=inside)
    finally:
        os.close(below)


@contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _failure(error, path) from None


def _failure(error: OSError, path: str) -> Exception:
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return NotFound(f"path {path!r} does not exist in the volume")
    if error.errno in (errno.EDQUOT, errno.ENOSPC):
        return LimitExceeded("the volume is full", hint="remove files of it")
    if error.errno == errno.EEXIST:
        return Conflict(f"{path!r} is already there")
    if error.errno in (
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EXDEV,
        errno.EINVAL,
        errno.ENXIO,
        errno.ENODEV,
    ):
        return Invalid(f"{path!r}: {os.strerror(error.errno).lower()}")
    return Unavailable(f"{path!r}: {error.strerror or error}")
