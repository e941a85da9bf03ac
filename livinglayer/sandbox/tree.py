"""Trees that a box has shaped, read from outside: one name at a time, following nothing, leaving the tree never."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from livinglayer.errors import LimitExceeded, NotFound

OPENAT2 = 437
NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH = 1, 2, 4, 8
OPAQUE = "trusted.overlay.opaque"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


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
    """Overlay's mark that a directory hides the lower ones of its name."""
    for name in (OPAQUE, "user.overlay.opaque"):
        try:
            if os.getxattr(directory, name) == b"y":
                return True
        except OSError:
            continue
    return False


def read_beneath(layers: Sequence[Path], path: str, limit: int = 1 << 20) -> bytes:
    """What a regular file holds, seen through stacked layers (topmost first); NotFound when it is not there or not regular."""
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
                if depth == len(names) - 1 and stat.S_ISREG(found.st_mode):
                    fds.append(open_beneath(fds[-1], name, os.O_RDONLY | os.O_NONBLOCK))
                    if found.st_size > limit:
                        raise LimitExceeded(f"{path!r} holds {found.st_size} bytes, more than {limit}")
                    return os.read(fds[-1], limit)
                if not stat.S_ISDIR(found.st_mode):
                    raise NotFound(f"{path!r} is not a regular file")
                fds.append(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fds[-1]))
                hidden = hidden or is_opaque(fds[-1])
            if hidden:
                break
        finally:
            for fd in fds:
                os.close(fd)
    raise NotFound(f"{path!r} is not there")


def is_safe_error(error: OSError) -> bool:
    """Whether an openat2 failed because a path would have left its tree."""
    return error.errno in (errno.ELOOP, errno.EXDEV)
