"""Trees that a box has shaped, read and written from outside: one name at a time, following nothing, never leaving the tree."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from livinglayer.errors import Conflict, Corrupt, Invalid, LimitExceeded, NotFound
from livinglayer.sandbox.disk import clone_file
from livinglayer.sandbox.manifest import INLINE, Entry, Getter, keeps, of_stat
from livinglayer.sandbox.store import CHUNK, Writer

OPENAT2 = 437
NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH = 1, 2, 4, 8
OPAQUE = "trusted.overlay.opaque"
ENTRIES, BYTES, DEPTH, PATH = (
    2_000_000,
    1 << 40,
    256,
    3500,
)  # most that a tree may have: names, bytes, levels, bytes of one path
WORKERS, AHEAD = 4, 64  # hashing and zstd run outside the interpreter's lock; so many files are open ahead of them

_ZEROS = bytes(CHUNK)
_LOST = ("trusted.overlay.metacopy", "trusted.overlay.redirect")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass
class Scan:
    """A tree as read: its entries in order, what could not be kept, and where each large file's content went."""

    entries: list[Entry]
    skipped: list[str] = field(default_factory=list)
    contents: dict[int, tuple[int, tuple[str | int, ...]]] = field(default_factory=dict)  # inode → size, chunks
    reused: int = 0  # files not read again


def scan(
    tree: Path,
    writer: Writer,
    known: Callable[[int, int], tuple[str | int, ...] | None] = lambda inode, size: None,
    entries: int = ENTRIES,
    size: int = BYTES,
) -> Scan:
    """Read a sealed tree into a store; `known` gives the chunks of a file that need not be read again. LimitExceeded beyond the caps."""
    result = Scan([])
    first: dict[int, str] = {}  # inode of a file with several names → the first of them
    total = 0
    top = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    device = os.fstat(top).st_dev
    stack: list[tuple[int, str, list[str]]] = []

    with contextlib.ExitStack() as cleanup:
        cleanup.callback(lambda: _close(fd for fd, _, _ in stack))

        def enter(fd: int, path: str) -> None:
            stack.append((fd, path, sorted(os.listdir(fd), key=os.fsencode, reverse=True)))
            entry = of_stat(path, "d", os.fstat(fd))
            xattrs = _xattrs(fd, path)
            result.entries.append(replace(entry, xattrs=xattrs, opaque=is_opaque(fd)))

        enter(top, "")
        while stack:
            at, above, names = stack[-1]
            if not names:
                os.close(stack.pop()[0])
                continue
            name = names.pop()
            path = f"{above}/{name}" if above else name
            if len(result.entries) >= entries:
                raise LimitExceeded(f"the tree has more than {entries} names")
            if len(os.fsencode(path)) > PATH or len(stack) >= DEPTH:
                raise LimitExceeded(
                    f"{path[:80]!r}… is nested too deep",
                    hint=f"at most {DEPTH} levels and {PATH} bytes of path are kept",
                )
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
            if found.st_dev != device:
                raise Invalid(f"{path!r} lies on another filesystem")
            here = f"/proc/self/fd/{at}/{name}"  # one name below an open directory, for calls that take no directory
            kind = stat.S_IFMT(found.st_mode)
            if kind == stat.S_IFDIR:
                enter(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at), path)
            elif kind == stat.S_IFREG:
                if found.st_nlink > 1:
                    holder = first.setdefault(found.st_ino, path)
                    if holder != path:
                        result.entries.append(replace(of_stat(path, "h", found), target=holder))
                        continue
                total += min(found.st_size, found.st_blocks * 512 + 4096)  # holes cost nothing
                if total > size:
                    raise LimitExceeded(f"the tree holds more than {size} bytes")
                chunks = known(found.st_ino, found.st_size) if found.st_size > INLINE else None
                if chunks is not None:
                    result.reused += 1
                    xattrs, inline = _xattrs(here, path), b""
                else:
                    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
                    try:
                        xattrs = _xattrs(fd, path)
                        inline, chunks = read_content(fd, found.st_size, path, writer.put)
                    finally:
                        os.close(fd)
                if chunks:
                    result.contents[found.st_ino] = (found.st_size, chunks)
                entry = of_stat(path, "f", found)
                result.entries.append(replace(entry, xattrs=xattrs, size=found.st_size, inline=inline, chunks=chunks))
            elif kind == stat.S_IFLNK:
                entry = replace(of_stat(path, "l", found), target=os.readlink(name, dir_fd=at))
                result.entries.append(replace(entry, mode=0o777, xattrs=_xattrs(here, path)))
            elif is_whiteout(found):
                result.entries.append(Entry(path, "w"))
            elif kind in (stat.S_IFIFO, stat.S_IFSOCK):
                result.entries.append(of_stat(path, "p" if kind == stat.S_IFIFO else "s", found))
            else:
                # A device: not kept, and what a lower layer has under its name stays hidden as it was.
                result.skipped.append(path)
                result.entries.append(Entry(path, "w"))
    return result


def read_content(fd: int, size: int, path: str, put: Callable[[bytes], str]) -> tuple[bytes, tuple[str | int, ...]]:
    """What an open file holds: itself when small, else its chunks; holes and zeros are counted."""
    if size <= INLINE:
        inline = os.read(fd, INLINE + 1) if size else b""
        if len(inline) != size:
            raise _moving(path)
        return inline, ()
    chunks: list[str | int] = []
    at = 0
    data = 0 if size > CHUNK else size  # up to here there is no hole
    while at < size:
        if at >= data:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: no data up to the end
                start = size
            holes = -(-(size - at) // CHUNK) if start >= size else (start - at) // CHUNK
            if holes:
                _zeros(chunks, holes)
                at += holes * CHUNK
            if at >= size:
                break
            data = os.lseek(fd, max(start, at), os.SEEK_HOLE)
        piece = os.pread(fd, min(CHUNK, size - at), at)
        if len(piece) != min(CHUNK, size - at):
            raise _moving(path)
        if piece == (_ZEROS if len(piece) == CHUNK else bytes(len(piece))):
            _zeros(chunks, 1)
        else:
            chunks.append(put(piece))
        at += len(piece)
    return b"", tuple(chunks)


def _zeros(chunks: list[str | int], count: int) -> None:
    if chunks and isinstance(chunks[-1], int):
        chunks[-1] += count
    else:
        chunks.append(count)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _moving(path: str) -> Conflict:
    return Conflict(f"{path!r} changed while it was read", hint="seal the tree first")


def _xattrs(of: int | str, path: str) -> tuple[tuple[str, bytes], ...]:
    follow = isinstance(of, int)
    try:
        names = os.listxattr(of, follow_symlinks=follow)
    except OSError:
        return ()
    for name in names:
        if name in _LOST:
            raise Invalid(
                f"{path!r} is known to overlay by reference only ({name})",
                hint="mount with metacopy=off,redirect_dir=off",
            )
    return tuple(sorted((name, os.getxattr(of, name, follow_symlinks=follow)) for name in names if keeps(name)))


def write(
    entries: Iterable[Entry], get: Getter, target: Path, like: Callable[[Entry], str | None] = lambda entry: None
) -> None:
    """Write entries into an empty directory that nobody else can reach. Corrupt when a parent is no directory among them.

    `like` names a sealed file that holds the same as an entry: its blocks are shared rather than written again.
    """
    root = os.geteuid() == 0
    directories: list[Entry] = []
    known: set[str] = set()
    links: list[Entry] = []
    files: set[str] = set()
    base = str(target)

    def dress(entry: Entry, path: str) -> None:
        if root:
            os.chown(path, entry.uid, entry.gid, follow_symlinks=False)
        if entry.type != "l":
            os.chmod(path, entry.mode)  # after chown, which takes the setuid bit away
        for name, value in entry.xattrs:
            os.setxattr(path, name, value, follow_symlinks=False)
        os.utime(path, ns=(entry.mtime, entry.mtime), follow_symlinks=False)

    def fill(entry: Entry, path: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            twin = like(entry) if entry.chunks else None
            at = 0
            for piece in () if twin is not None and _clone(twin, fd, entry.size) else entry.content(get):
                if isinstance(piece, int):
                    at += piece
                    continue
                view = memoryview(piece)
                while view:
                    done = os.pwrite(fd, view, at)
                    view, at = view[done:], at + done
            if entry.chunks and isinstance(entry.chunks[-1], int):
                os.ftruncate(fd, entry.size)  # ends in a hole
        finally:
            os.close(fd)
        dress(entry, path)

    with ThreadPoolExecutor(WORKERS) as pool:
        pending: list[Future[None]] = []
        try:
            for entry in entries:
                parent, _, _ = entry.path.rpartition("/")
                if entry.path and parent not in known:
                    raise Corrupt(f"{entry.path!r} has no directory to lie in")
                path = f"{base}/{entry.path}" if entry.path else base
                if entry.type == "d":
                    if entry.path:
                        os.mkdir(path, 0o700)
                    known.add(entry.path)
                    directories.append(entry)
                elif entry.type == "f":
                    files.add(entry.path)
                    if len(pending) >= 4 * AHEAD:
                        pending[-4 * AHEAD].result()
                    pending.append(pool.submit(fill, entry, path))
                elif entry.type == "h":
                    links.append(entry)
                elif entry.type == "l":
                    os.symlink(entry.target, path)
                    dress(entry, path)
                elif entry.type == "w":
                    os.mknod(path, stat.S_IFCHR, 0)
                else:
                    os.mknod(path, (stat.S_IFIFO if entry.type == "p" else stat.S_IFSOCK) | 0o600)
                    dress(entry, path)
            for future in pending:
                future.result()
        except BaseException:
            for future in pending:
                future.cancel()
            raise
    for entry in links:
        if entry.target not in files:
            raise Corrupt(f"the hard link {entry.path!r} leads to {entry.target!r}, which is no file")
        os.link(f"{base}/{entry.target}", f"{base}/{entry.path}", follow_symlinks=False)
    for entry in reversed(directories):  # times last, when nothing is put into them any more
        path = f"{base}/{entry.path}" if entry.path else base
        dress(entry, path)
        if entry.opaque:
            os.setxattr(path, OPAQUE, b"y")


def _clone(source: str, target: int, size: int) -> bool:
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_size == size and clone_file(fd, target)
    finally:
        os.close(fd)


def open_beneath(directory: int, path: str, flags: int = os.O_RDONLY) -> int:
    """Open `path` below an open directory; a symlink on the way, a way out or another filesystem is an OSError."""
    how = struct.pack("<QQQ", flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0, NO_XDEV | NO_MAGICLINKS | NO_SYMLINKS | BENEATH)
    fd = _libc.syscall(
        ctypes.c_long(OPENAT2),
        ctypes.c_int(directory),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_char_p(how),
        ctypes.c_size_t(len(how)),
    )
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return int(fd)


def is_whiteout(found: os.stat_result) -> bool:
    """Overlay's mark that a name of a lower layer is gone."""
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def is_opaque(directory: int | Path) -> bool:
    """Overlay's mark that a directory hides the lower ones of its name; nothing in a box can set it."""
    try:
        return os.getxattr(directory, OPAQUE) == b"y"
    except OSError:
        return False


def stacked(layers: Sequence[Path], path: str) -> tuple[Path, os.stat_result]:
    """The topmost layer that has a name, and what it is there; NotFound when it is nowhere or hidden."""
    names = PurePosixPath(path.lstrip("/")).parts
    for layer in layers:
        fds = [os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        try:
            hidden = False
            for depth, name in enumerate(names):
                try:
                    found = os.stat(name, dir_fd=fds[-1], follow_symlinks=False)
                except FileNotFoundError:
                    break
                if is_whiteout(found):
                    raise NotFound(f"{path!r} is not there")
                if depth == len(names) - 1:
                    return layer, found
                if not stat.S_ISDIR(found.st_mode):
                    raise NotFound(f"{path!r} is not there: {name!r} is no directory")
                fds.append(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fds[-1]))
                hidden = hidden or is_opaque(fds[-1])
            if hidden:
                break
        finally:
            for fd in fds:
                os.close(fd)
    raise NotFound(f"{path!r} is not there")


def read_stacked(layers: Sequence[Path], path: str, limit: int = 1 << 20) -> bytes:
    """What a regular file holds, seen through stacked layers (topmost first); NotFound when it is no regular file."""
    layer, found = stacked(layers, path)
    if not stat.S_ISREG(found.st_mode):
        raise NotFound(f"{path!r} is not a regular file")
    if found.st_size > limit:
        raise LimitExceeded(f"{path!r} holds {found.st_size} bytes, more than {limit}")
    top = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = open_beneath(top, path.lstrip("/"), os.O_RDONLY | os.O_NONBLOCK)
    finally:
        os.close(top)
    with open(fd, "rb") as file:
        return file.read(limit)
