"""The memory of a machine as an image: captured once, sealed by the kernel, mapped privately by any number of machines.

Nothing ever writes to an image again, neither the machine it was taken from nor those that begin with it: each has its own
copy of the pages it changes. So a parent goes on unharmed, and forks of forks need no bookkeeping.
"""

import array
import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from ...errors import Corrupt
from .artefacts import copy_sparse

PAGE = 4096
_CHUNK = 1 << 20
_ZEROS = bytes(PAGE)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_PAGEMAP_SCAN = 0xC0606610
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4


def blank(size: int, name: str = "ram") -> int:
    """Memory of zeros, not sealed yet."""
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def seal(fd: int) -> int:
    """From now on nobody can change it, whoever holds it."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def of_bytes(data: bytes, name: str = "state") -> int:
    """A sealed image of a few bytes."""
    fd = blank(0, name)
    os.write(fd, data)
    return seal(fd)


def load(path: Path, size: int) -> int:
    """A sealed image from a file that `save` wrote."""
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(source).st_size != size:
            raise Corrupt(f"{path} holds {os.fstat(source).st_size} bytes of memory, not {size}")
        fd = blank(size)
        copy_sparse(source, fd)
        return seal(fd)
    finally:
        os.close(source)


def save(fd: int, path: Path) -> None:
    """Write an image to disk, without its zeros."""
    target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        copy_sparse(fd, target)
    finally:
        os.close(target)


def capture(pid: int, image: int, target: int, zeros: bool = True) -> None:
    """Write the pages that a stopped machine has changed since it mapped `image` over a copy of it; `zeros`: those that are empty, too."""
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    view = memoryview(bytearray(_CHUNK))
    try:
        for start, end, offset in _mappings(pid, image):
            for low, high in _changed(pid, start, end):
                at = low
                while at < high:
                    got = os.preadv(memory, [view[: min(_CHUNK, high - at)]], at)
                    if got <= 0:
                        raise Corrupt(f"memory of process {pid} can't be read at {at:#x}")
                    _write(target, view[:got], offset + at - start, zeros)
                    at += got
    finally:
        os.close(memory)


def _write(target: int, data: memoryview, at: int, zeros: bool) -> None:
    if zeros:
        os.pwrite(target, data, at)
        return
    run: int | None = None  # where what is not empty began
    for here in range(0, len(data) + PAGE, PAGE):
        empty = here >= len(data) or data[here : here + PAGE] == _ZEROS
        if run is None and not empty:
            run = here
        elif run is not None and empty:
            os.pwrite(target, data[run:here], at + run)
            run = None


def _mappings(pid: int, image: int) -> Iterator[tuple[int, int, int]]:
    inode = os.fstat(image).st_ino
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            addresses, _, offset, _, number, *name = line.split()
            if int(number) == inode and name and name[0].startswith("/memfd:"):
                start, end = (int(part, 16) for part in addresses.split("-"))
                yield start, end, int(offset, 16)


def _changed(pid: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The address ranges that are the process's own: no longer the file's."""
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            yield from _scan(pagemap, start, end)
        except OSError:  # a kernel before 6.7
            yield from _walk(pagemap, start, end)
    finally:
        os.close(pagemap)


def _scan(pagemap: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    count = 4096
    found = (ctypes.c_uint64 * (3 * count))()
    while start < end:
        fields = (96, 0, start, end, 0, ctypes.addressof(found), count, 0, _FILE, _FILE, _PRESENT | _SWAPPED, _FILE)
        asked = bytearray(struct.pack("<12Q", *fields))
        for index in range(fcntl.ioctl(pagemap, _PAGEMAP_SCAN, asked)):
            yield found[3 * index], found[3 * index + 1]
        (reached,) = struct.unpack_from("<Q", asked, 32)
        if reached <= start:
            return
        start = reached


def _walk(pagemap: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    step = 8192 * PAGE
    for base in range(start, end, step):
        entries = array.array("Q", os.pread(pagemap, (min(end, base + step) - base) // PAGE * 8, base // PAGE * 8))
        run: int | None = None
        for index, entry in enumerate([*entries, 0]):
            own = entry >> 62 and not entry >> 61 & 1  # in memory or swapped out, and not a page of the file
            if own and run is None:
                run = index
            elif not own and run is not None:
                yield base + run * PAGE, base + index * PAGE
                run = None
