"""What a machine's guest says it changed, written down as the upper layer of an overlay. The guest is not trusted."""

import asyncio
import contextlib
import os
import stat
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

from ...errors import Corrupt, LimitExceeded

RECORD = struct.Struct("<IIIIQQqIIII")  # struct record of native/init.c
PIECE = 1 << 20
IDS = 65536
ATTRIBUTES = ("user.", "trusted.overlay.opaque")  # the only ones that mean the same on another kernel

Read = Callable[[int], Awaitable[bytes]]


async def receive(read: Read, target: Path, limit: int = 1 << 42) -> None:
    """Fill the empty directory `target`. Corrupt when the guest sends what is no tree; LimitExceeded when it sends more than `limit` bytes."""
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    linked: dict[int, str] = {}
    times: list[tuple[str, int]] = []
    try:
        while True:
            mode, uid, gid, device, size, inode, mtime, links, paths, targets, attributes = RECORD.unpack(
                await read(RECORD.size)
            )
            if not mode:
                break
            if paths > 4096 or targets > 4096 or attributes > 65536 or uid >= IDS or gid >= IDS:
                raise Corrupt("the guest sent a record that no file has")
            limit -= size + RECORD.size
            if limit < 0:
                raise LimitExceeded("the guest sent more changes than its disk holds")
            path = os.fsdecode(await read(paths))
            goal, extra = await read(targets), await read(attributes)
            parent, name = _parent(root, path)
            try:
                if stat.S_ISREG(mode) and inode in linked and links > 1:
                    for at in range(0, size, PIECE):
                        await read(min(PIECE, size - at))
                    os.link(linked[inode], name, src_dir_fd=root, dst_dir_fd=parent, follow_symlinks=False)
                    continue
                await _create(read, parent, name, mode, size, device, goal)
                if stat.S_ISREG(mode):
                    linked[inode] = path
                _dress(parent, name, mode, uid, gid, mtime, extra)
                if stat.S_ISDIR(mode):
                    times.append((path, mtime))
            except OSError as error:
                raise Corrupt(f"{path!r} of the guest can't be kept: {error}") from None
            finally:
                os.close(parent)
            await asyncio.sleep(0)
        for path, mtime in reversed(times):  # when nothing is put into them any more
            parent, name = _parent(root, path)
            with contextlib.suppress(OSError):
                os.utime(name, ns=(mtime, mtime), dir_fd=parent, follow_symlinks=False)
            os.close(parent)
    finally:
        os.close(root)


def _parent(root: int, path: str) -> tuple[int, str]:
    """The directory that holds `path`, reached step by step without following a link, and its last name."""
    if not path:
        return os.dup(root), "."
    *parts, name = path.split("/")
    here = os.dup(root)
    for part in [*parts, name]:
        if part in ("", ".", "..") or "\0" in part:
            os.close(here)
            raise Corrupt(f"the guest sent the path {path!r}")
    for part in parts:
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
        except OSError:
            raise Corrupt(f"the guest sent {path!r} before its directory") from None
        finally:
            os.close(here)
        here = below
    return here, name


async def _create(read: Read, parent: int, name: str, mode: int, size: int, device: int, goal: bytes) -> None:
    if name == ".":
        return
    if stat.S_ISREG(mode):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        try:
            for at in range(0, size, PIECE):
                data = await read(min(PIECE, size - at))
                if data.count(0) == len(data):
                    os.ftruncate(fd, at + len(data))
                else:
                    os.pwrite(fd, data, at)
        finally:
            os.close(fd)
    elif stat.S_ISDIR(mode):
        os.mkdir(name, 0o700, dir_fd=parent)
    elif stat.S_ISLNK(mode):
        os.symlink(goal, os.fsencode(name), dir_fd=parent)
    elif stat.S_ISCHR(mode) and device == 0:
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=parent)  # a whiteout: the name is hidden
    elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        os.mknod(name, stat.S_IFMT(mode) | 0o600, dir_fd=parent)
    # a device of the guest is none of ours: it is left out


def _dress(parent: int, name: str, mode: int, uid: int, gid: int, mtime: int, extra: bytes) -> None:
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        with contextlib.suppress(FileNotFoundError):
            os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)
            os.utime(name, ns=(mtime, mtime), dir_fd=parent, follow_symlinks=False)
        return
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fchown(fd, uid, gid)
        os.fchmod(fd, stat.S_IMODE(mode))
        while extra:
            key, _, extra = extra.partition(b"\0")
            (length,) = struct.unpack_from("<I", extra)
            value, extra = extra[4 : 4 + length], extra[4 + length :]
            if key.decode(errors="replace").startswith(ATTRIBUTES):
                os.setxattr(fd, key, value)
        os.utime(fd, ns=(mtime, mtime))
    finally:
        os.close(fd)
