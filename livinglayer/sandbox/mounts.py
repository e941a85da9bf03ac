"""Mounts that are nowhere in the host's tree: detached ones, and those of a thread with a mount namespace of its own.

Runtimes that take a directory (crun, runc, runsc) are started from a thread that has its own mount namespace. What is
mounted there lives exactly as long as the processes started from it: a supervisor that is killed leaks no mount.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from livinglayer.errors import Unavailable

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
# numbers of the newer calls are the same on every architecture
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH, _AT_EMPTY_PATH, _AT_FDCWD = 4, 0x1000, -100
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV, _MOUNT_ATTR_IDMAP = 1, 2, 4, 0x00100000


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: Path, kind: str | None, flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    done = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    _check(done, f"mount {kind or 'bind'} at {target}")


def unmount(target: Path) -> None:
    """Take the topmost mount off `target`, whoever still uses it."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def clone(directory: Path) -> int:
    """A detached copy of the one mount that holds `directory`, without what is mounted beneath it; an fd."""
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC)
    return _check(_libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(directory), flags), f"open_tree {directory}")


def attach(tree: int, target: Path) -> None:
    """Mount a detached tree at `target`."""
    done = _libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(done, f"move_mount to {target}")


def make_read_only(tree: int) -> None:
    """Nothing can be written through a detached tree; nothing in it is a device or gives rights."""
    attributes = _Attributes(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    done = _libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), size)
    _check(done, "mount_setattr")


def map_ids(tree: int, userns: int) -> None:
    """A detached tree's files belong to the ids of a user namespace; nothing in it is a device or gives rights."""
    attributes = _Attributes(_MOUNT_ATTR_IDMAP | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, userns)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    done = _libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), size)
    _check(done, "mount_setattr")


def bind(source: Path, target: Path, *, read_only: bool = True) -> None:
    """Show one file or directory at `target`."""
    mount(str(source), target, None, MS_BIND)
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0))


def in_private_namespace(work: Callable[[Path], T], *, avoid: Iterable[Path] = ()) -> T:
    """Run `work(stage)` in a thread with its own mount namespace; `stage` is an empty directory that only it sees.

    `avoid` names directories that `work` needs to reach by path. Blocks; call it through `asyncio.to_thread`.
    """
    avoided = [path.resolve() for path in avoid]
    # anyone may pass through it, unlike a state directory: runtimes look a root up as the box's own ids
    stage = next(
        (
            p
            for p in map(Path, ("/mnt", "/media", "/srv", "/opt"))
            if p.is_dir() and not any(a.is_relative_to(p) for a in avoided)
        ),
        None,
    )
    if stage is None:
        raise Unavailable("no directory to lay a root out in", hint="mkdir /mnt")
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _check(_libc.unshare(CLONE_NEWNS), "unshare")
            mount("none", Path("/"), None, MS_REC | MS_PRIVATE)
            mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=8m")
            results.append(work(stage))
        except BaseException as error:
            errors.append(error)

    # never a thread of a pool: it can't go back to the host's namespace
    thread = threading.Thread(target=run, name="private-mounts", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def new_network() -> int:
    """An fd of a network namespace with nothing in it."""

    def make(_: Path) -> int:
        _check(_libc.unshare(CLONE_NEWNET), "unshare")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return in_private_namespace(make)
