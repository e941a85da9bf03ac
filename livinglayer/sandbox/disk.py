"""Where the files of boxes lie: a btrfs with one limited subvolume a box, made and dropped in microseconds.

Natively when the state directory already is a btrfs with quotas on, else in a sparse image mounted through a loop device. Where neither
can be had, plain directories: `kind` says so, and then disk limits are not enforced (`quota` is "none").
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from livinglayer.errors import Conflict, Corrupt, Invalid, LimitExceeded, NotFound, Unavailable

Kind = Literal["btrfs", "loop", "reflink", "copy"]
Quota = Literal["simple", "full", "none"]

IMAGE_BYTES = 64 << 30  # sparse: what is not written takes no space
SMALLEST = 512 << 20  # mkfs.btrfs wants about 110 MB; below this a box is of no use

# linux/btrfs.h, linux/fs.h, linux/loop.h
SUBVOL_CREATE, SNAP_DESTROY, SNAP_CREATE_V2 = 0x5000940E, 0x5000940F, 0x50009417
SUBVOL_GETFLAGS, SUBVOL_SETFLAGS, READONLY = 0x80089419, 0x4008941A, 2
INO_LOOKUP, FS_INFO, GET_SUBVOL_INFO, TREE_SEARCH_V2 = 0xD0009412, 0x8400941F, 0x81F8943C, 0xC0709411
QUOTA_CTL, QGROUP_LIMIT, QUOTA_ENABLE, QUOTA_ENABLE_SIMPLE, LIMIT_REFERENCED = 0xC0109428, 0x8030942B, 1, 4, 1
FICLONE = 0x40049409
LOOP_CTL_GET_FREE, LOOP_CONFIGURE, LOOP_CLR_FD, LOOP_GET_STATUS64 = 0x4C82, 0x4C0A, 0x4C01, 0x4C05
LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO = 4, 16
MS_NOSUID, MS_NOATIME, MS_PRIVATE, MNT_DETACH = 2, 1024, 1 << 18, 2
BTRFS_MAGIC = 0x9123683E
SPARE = 16  # directories of boxes that wrote nothing, kept for others
OPAQUE = "trusted.overlay.opaque"
FIRST_INODE = 256  # the root directory of every subvolume

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Lineage:
    """A snapshot's origin: the subvolume it was taken of, and the transaction that took it."""

    id: str
    parent: str
    taken: int


@dataclass
class Disk:
    """The disk of one state directory; every method is synchronous and, on btrfs, takes microseconds (a snapshot: milliseconds)."""

    root: Path
    kind: Kind
    quota: Quota
    note: str = ""  # why it is not better, for `doctor`
    image: Path | None = None
    _fds: dict[Path, int] = field(default_factory=dict, repr=False)
    _sysfs: Path | None = None
    _spare: list[Path] = field(default_factory=list, repr=False)

    @classmethod
    def open(cls, state: Path, size: int | None = None) -> Disk:
        """Mount the disk of `state`, made at first use; what an earlier run left mounted or attached is taken over or cleared away."""
        state = state.resolve()
        state.mkdir(mode=0o711, parents=True, exist_ok=True)
        root = state / "disk"
        root.mkdir(exist_ok=True)
        with _lock(state):
            kind, note, image = _mount(state, root, size)
            # Setuid files of a box's root lie here with uid 0: no other user of this machine may pass.
            root.chmod(0o700)
            for name in ("boxes", "layers", "tmp", "volumes"):
                (root / name).mkdir(exist_ok=True)
            disk = cls(root, kind, "none", note, image)
            if disk.btrfs:
                try:
                    disk._sysfs = Path("/sys/fs/btrfs", _fsid(disk._fd(root)))
                    disk.quota = _quota(disk._fd(root), disk._sysfs, own=kind == "loop")
                except BaseException:
                    disk.close()
                    raise
        return disk

    @property
    def btrfs(self) -> bool:
        return self.kind in ("btrfs", "loop")

    @property
    def boxes(self) -> Path:
        return self.root / "boxes"

    @property
    def layers(self) -> Path:
        return self.root / "layers"

    @property
    def volumes(self) -> Path:
        return self.root / "volumes"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    def create(self, name: str, limit_bytes: int | None = None) -> Path:
        """A fresh box directory `boxes/NAME` with the overlay's `u/` and `w/`, limited to so many bytes; Conflict when it exists."""
        path = self.boxes / _name(name)
        if self._spare and not path.exists():
            os.rename(self._spare.pop(), path)
        else:
            self.subvolume(path)
            os.mkdir(path / "u", 0o755)
            os.mkdir(path / "w", 0o700)
        if limit_bytes is not None:
            self.limit(path, limit_bytes)
        return path

    def recycle(self, path: Path) -> bool:
        """Keep the directory of a box that wrote nothing for the next one; False when there is the slightest trace of it.

        Removing a subvolume costs the kernel about two milliseconds of work in the background, more than the rest of a short box.
        """
        if not self.btrfs or len(self._spare) >= SPARE:
            return False
        upper, work = f"{path}/u", f"{path}/w/work"
        try:
            if sorted(os.listdir(path)) != ["u", "w"] or not set(os.listdir(f"{path}/w")) <= {"work"}:
                return False  # a machine keeps the box's disk beside them
            found = os.lstat(upper)
            marks = os.listxattr(upper, follow_symlinks=False)
            if (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) != (0o755, 0, 0) or os.listdir(upper):
                return False
            if not all(mark.startswith("trusted.overlay.") and mark != OPAQUE for mark in marks):
                return False
            for mark in marks:
                os.removexattr(upper, mark, follow_symlinks=False)
            os.utime(upper)
            if os.path.lexists(work):  # what overlay leaves of a volatile mount, and nothing else
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{work}/incompat/volatile/dirty")
                    os.rmdir(f"{work}/incompat/volatile")
                    os.rmdir(f"{work}/incompat")
                os.rmdir(work)
            spare = self.tmp / f"spare-{os.urandom(8).hex()}"
            os.rename(path, spare)
        except OSError:
            return False
        self._spare.append(spare)
        return True

    def subvolume(self, path: Path) -> Path:
        """An empty subvolume (a directory where there is no btrfs), or Conflict."""
        try:
            if self.btrfs:
                fcntl.ioctl(self._fd(path.parent), SUBVOL_CREATE, _volume(path.name))
            else:
                os.mkdir(path)
        except FileExistsError:
            raise Conflict(f"{path} is already there") from None
        except OSError as error:
            raise _unavailable(error, f"can't make {path}") from error
        return path

    def snapshot(self, src: Path, dst: Path, readonly: bool = False) -> Path:
        """A copy of the subvolume `src` at `dst` as of this moment, sharing its blocks; freeze who writes there first."""
        if not self.btrfs:
            _copy(src, dst)
            return dst
        source = _open_directory(src)
        try:
            name = os.fsencode(dst.name)
            argument = struct.pack("<qQQ", source, 0, READONLY if readonly else 0) + bytes(32) + name.ljust(4040, b"\0")
            fcntl.ioctl(self._fd(dst.parent), SNAP_CREATE_V2, bytearray(argument))
        except FileExistsError:
            raise Conflict(f"{dst} is already there") from None
        except OSError as error:
            raise _unavailable(error, f"can't snapshot {src}") from error
        finally:
            os.close(source)
        return dst

    def seal(self, box: Path, dst: Path | None = None) -> Path:
        """The changes of a box (its `u/`) as a layer directory of their own, read-only at `dst`; else private, under tmp/.

        The box may go on: freeze it for the call, since what it writes later is in no way part of the result. Marking it read-only
        commits a transaction of the filesystem, so what lies under tmp/, where only we write, is marked when it is moved to its place.
        """
        target = dst or self.tmp / f"sealed-{os.urandom(8).hex()}"
        self.snapshot(box, target)
        try:
            _hoist(target)
            if dst is not None:
                self.seal_tree(target)
        except BaseException:
            self.destroy(target)
            raise
        return target

    def seal_tree(self, path: Path, readonly: bool = True) -> None:
        """Make a subvolume read-only for everybody, root included (no effect where there is no btrfs)."""
        if not self.btrfs:
            return
        fd = _open_directory(path)
        try:
            flags = bytearray(8)
            fcntl.ioctl(fd, SUBVOL_GETFLAGS, flags)
            value = struct.unpack("<Q", flags)[0]
            fcntl.ioctl(fd, SUBVOL_SETFLAGS, struct.pack("<Q", value | READONLY if readonly else value & ~READONLY))
        finally:
            os.close(fd)

    def move(self, src: Path, dst: Path) -> None:
        """Rename a sealed subvolume; Conflict when `dst` is there."""
        sealed = self.sealed(src)
        if sealed:  # a directory that may not be written can't be told its new parent
            self.seal_tree(src, readonly=False)
        try:
            os.rename(src, dst)
        except OSError as error:
            if sealed:
                self.seal_tree(src)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise Conflict(f"{dst} is already there") from None
            raise
        if sealed:
            self.seal_tree(dst)

    def sealed(self, path: Path) -> bool:
        if not self.is_subvolume(path):
            return False
        fd = _open_directory(path)
        try:
            flags = bytearray(8)
            fcntl.ioctl(fd, SUBVOL_GETFLAGS, flags)
            return bool(struct.unpack("<Q", flags)[0] & READONLY)
        finally:
            os.close(fd)

    def is_subvolume(self, path: Path) -> bool:
        return self.btrfs and os.lstat(path).st_ino == FIRST_INODE

    def destroy(self, path: Path) -> None:
        """Remove a subvolume or directory with all in it; the kernel frees the space in the background. Nothing there is fine."""
        try:
            if self.is_subvolume(path):
                fcntl.ioctl(self._fd(path.parent), SNAP_DESTROY, _volume(path.name))
                return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise _unavailable(error, f"can't remove {path}") from error
        grave = path if path.parent == self.tmp else self.tmp / f"gone-{os.urandom(8).hex()}"
        with contextlib.suppress(FileNotFoundError):
            if grave != path:
                os.rename(path, grave)  # a name is free at once, and half a tree is never taken for a whole one
            remove_tree(grave)

    def limit(self, path: Path, limit_bytes: int) -> None:
        """Bytes that may be written into this subvolume; what it shares with a snapshot it came from is not counted on simple quotas."""
        if self.quota == "none":
            return
        fd = _open_directory(path)
        try:
            argument = struct.pack("<QQQQQQ", _subvolume_id(fd), LIMIT_REFERENCED, limit_bytes, 0, 0, 0)
            fcntl.ioctl(fd, QGROUP_LIMIT, argument)
        except OSError as error:
            raise _unavailable(error, f"can't limit {path}") from error
        finally:
            os.close(fd)

    def used(self, path: Path) -> int:
        """Bytes this subvolume holds by its quota group, reservations of writes under way included."""
        if self._sysfs is None or self.quota == "none":
            return sum(os.lstat(Path(at, name)).st_blocks * 512 for at, _, names in os.walk(path) for name in names)
        fd = _open_directory(path)
        try:
            group = self._sysfs / "qgroups" / f"0_{_subvolume_id(fd)}"
        finally:
            os.close(fd)
        try:
            # The tree on disk lags behind by a commit (30 s); what the kernel holds in memory does not.
            return sum(
                int((group / name).read_text())
                for name in ("referenced", "rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc")
            )
        except FileNotFoundError:
            raise NotFound(f"{path} has no quota group") from None

    def lineage(self, path: Path) -> Lineage | None:
        """Of which subvolume a snapshot was taken, and when; None for what is no snapshot."""
        if not self.is_subvolume(path):
            return None
        fd = _open_directory(path)
        try:
            info = bytearray(504)
            fcntl.ioctl(fd, GET_SUBVOL_INFO, info)
        except OSError:
            return None
        finally:
            os.close(fd)
        own, parent, taken = bytes(info[296:312]), bytes(info[312:328]), struct.unpack_from("<Q", info, 352)[0]
        return Lineage(own.hex(), parent.hex(), taken) if any(parent) else None

    def touched(self, path: Path, since: int) -> set[int]:
        """Inodes of a subvolume that may have changed after a transaction: never one too few, at times a neighbour too many.

        btrfs never writes a tree block in place, so a leaf older than `since` holds the very sizes, times and extents it held then;
        every item of every younger leaf counts as touched.
        """
        found: set[int] = set()
        fd = _open_directory(path)
        try:
            size = 1 << 20
            at = (0, 0, 0)
            while True:
                argument = bytearray(112 + size)
                everything = 2**64 - 1
                struct.pack_into(
                    "<7Q4I4QQ", argument, 0, 0, at[0], everything, at[2], everything, since + 1, everything, at[1], 255, 2**32 - 1, 0,
                    0, 0, 0, 0, size,
                )  # fmt: skip
                fcntl.ioctl(fd, TREE_SEARCH_V2, argument)
                (count,) = struct.unpack_from("<I", argument, 64)
                if not count:
                    return found
                place = 112
                for _ in range(count):
                    _, inode, offset, kind, length = struct.unpack_from("<QQQII", argument, place)
                    found.add(inode)
                    place += 32 + length
                if offset < everything:
                    at = (inode, kind, offset + 1)
                elif kind < 255:
                    at = (inode, kind + 1, 0)
                else:
                    at = (inode + 1, 0, 0)
        finally:
            os.close(fd)

    def free(self) -> int:
        """Bytes that can still be written; for an image no more than its own filesystem could take."""
        here = os.statvfs(self.root)
        free = here.f_bavail * here.f_frsize
        if self.image is not None:
            below = os.statvfs(self.image)
            free = min(free, below.f_bavail * below.f_frsize)
        return free

    def close(self, unmount: bool = True) -> None:
        """Let go; with `unmount`, an image is unmounted and its loop device freed (boxes still alive elsewhere keep theirs)."""
        while self._spare:
            self.destroy(self._spare.pop())
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        if unmount and self.kind == "loop" and os.path.ismount(self.root):
            if _libc.umount2(os.fsencode(self.root), 0) and ctypes.get_errno() == errno.EBUSY:
                _libc.umount2(os.fsencode(self.root), MNT_DETACH)

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fd(self, directory: Path) -> int:
        """A kept descriptor of one of the disk's own few directories."""
        fd = self._fds.get(directory)
        if fd is None:
            fd = self._fds[directory] = _open_directory(directory)
        return fd


def remove_tree(path: Path) -> None:
    """Remove a directory with all in it, following nothing; directories a box made unreadable included."""
    if os.geteuid() != 0:
        for at, names, _ in os.walk(path):
            for name in names:
                with contextlib.suppress(OSError):
                    os.chmod(Path(at, name), 0o700, follow_symlinks=False)
    shutil.rmtree(path)


def clone_file(source: int, target: int) -> bool:
    """Share the blocks of one open file with another; False where the filesystem can't."""
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:
        return False
    return True


def _name(name: str) -> str:
    if not name or "/" in name or "\0" in name or name in (".", "..") or len(os.fsencode(name)) > 255:
        raise Invalid(f"{name!r} can't name a box's directory")
    return name


def _volume(name: str) -> bytearray:
    return bytearray(struct.pack("<q4088s", 0, os.fsencode(name)))


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"{path} is not there") from None


def _unavailable(error: OSError, what: str) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LimitExceeded(
            f"{what}: the disk is full", hint="remove boxes or snapshots, then run the garbage collection"
        )
    return Unavailable(f"{what}: {error.strerror or error}")


def _subvolume_id(fd: int) -> int:
    argument = bytearray(4096)
    struct.pack_into("<QQ", argument, 0, 0, FIRST_INODE)
    fcntl.ioctl(fd, INO_LOOKUP, argument)
    return int(struct.unpack_from("<Q", argument)[0])


def _fsid(fd: int) -> str:
    argument = bytearray(1024)
    fcntl.ioctl(fd, FS_INFO, argument)
    raw = argument[16:32].hex()
    return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))


def _root_fsid() -> str | None:
    if _magic(Path("/")) != BTRFS_MAGIC:
        return None
    fd = _open_directory(Path("/"))
    try:
        return _fsid(fd)
    finally:
        os.close(fd)


def _quota(fd: int, sysfs: Path, own: bool) -> Quota:
    """The quotas that are on; on a filesystem of our own they are turned on, on somebody else's never."""

    def now() -> Quota:
        with contextlib.suppress(OSError):
            if (sysfs / "qgroups" / "mode").read_text().strip() == "squota":
                return "simple"
            return "full"
        return "full" if (sysfs / "qgroups").exists() else "none"

    if (found := now()) != "none" or not own:
        return found
    for command in (QUOTA_ENABLE_SIMPLE, QUOTA_ENABLE):
        with contextlib.suppress(OSError):
            fcntl.ioctl(fd, QUOTA_CTL, bytearray(struct.pack("<QQ", command, 0)))
            return now()
    return "none"


@contextlib.contextmanager
def _lock(state: Path) -> Iterator[None]:
    fd = os.open(state / "disk.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _mount(state: Path, root: Path, size: int | None) -> tuple[Kind, str, Path | None]:
    """Mount what there is to mount at `root` and say what it became."""
    image = state / "disk.img"
    mounted = _mounted(root)
    if mounted and mounted[-1][0] == "btrfs" and image.exists() and _backing(mounted[-1][1]) == _identity(image):
        return "loop", "", image  # an earlier run of this state directory: its boxes may live on it
    for _ in mounted:
        _libc.umount2(os.fsencode(root), MNT_DETACH)
    if not image.exists() and _magic(root) == BTRFS_MAGIC and os.geteuid() == 0:
        fd = _open_directory(root)
        try:
            # The mask of a host's / may not lie in that very filesystem: overlay refuses layers that contain each other.
            if _fsid(fd) != _root_fsid() and _quota(fd, Path("/sys/fs/btrfs", _fsid(fd)), own=False) != "none":
                return "btrfs", "", None
        finally:
            os.close(fd)
    if os.geteuid() != 0:
        return *_plain(root, "a btrfs image needs root to be mounted"), None
    try:
        if not image.exists():
            _make(state, image, size)
        _attach_and_mount(image, root)
    except _NoBtrfs as error:
        return *_plain(root, str(error)), None
    return "loop", "", image


class _NoBtrfs(Exception):
    """This machine can't have a btrfs; plain directories serve."""


def _plain(root: Path, why: str) -> tuple[Kind, str]:
    with contextlib.ExitStack() as opened:
        a, b = (opened.enter_context(open(root / f".clone{number}", "w+b")) for number in (1, 2))
        a.write(b"x")
        a.flush()
        kind: Kind = "reflink" if clone_file(a.fileno(), b.fileno()) else "copy"
    for number in (1, 2):
        (root / f".clone{number}").unlink()
    return kind, f"{why}: plain directories, disk limits are not enforced"


def _make(state: Path, image: Path, size: int | None) -> None:
    """A sparse image with a fresh btrfs, renamed into place when whole."""
    if not shutil.which("mkfs.btrfs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"):
        raise _NoBtrfs("mkfs.btrfs is missing (apt-get install btrfs-progs)")
    if "btrfs" not in Path("/proc/filesystems").read_text():
        with contextlib.suppress(OSError):
            subprocess.run(["modprobe", "btrfs"], capture_output=True, check=False)
        if "btrfs" not in Path("/proc/filesystems").read_text():
            raise _NoBtrfs("the kernel has no btrfs")
    below = os.statvfs(state)
    size = size or min(IMAGE_BYTES, below.f_bavail * below.f_frsize * 8 // 10)
    if size < SMALLEST:
        raise LimitExceeded(
            f"{state} has room for a disk of {size >> 20} MiB; it takes {SMALLEST >> 20}", hint="free some space"
        )
    new = state / "disk.img.new"
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if _magic(state) == BTRFS_MAGIC:  # copy-on-write below copy-on-write only fragments
            with contextlib.suppress(OSError):
                fcntl.ioctl(fd, 0x40086602, struct.pack("<q", 0x00800000))  # FS_IOC_SETFLAGS, FS_NOCOW_FL
        os.ftruncate(fd, size - size % 4096)
    finally:
        os.close(fd)
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    made = subprocess.run(
        ["mkfs.btrfs", "--quiet", "--force", "--nodiscard", "--metadata", "single", "--data", "single", str(new)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if made.returncode:
        new.unlink()
        raise Unavailable(f"mkfs.btrfs failed: {made.stderr.strip()[-300:]}")
    os.rename(new, image)


def _attach_and_mount(image: Path, root: Path) -> None:
    for _ in range(5):
        with contextlib.ExitStack() as held:
            # Two loop devices on one image would be two caches of one filesystem: an attached one is always taken.
            device = _attached(image)
            if device is not None:
                try:
                    held.callback(os.close, os.open(device, os.O_RDWR | os.O_CLOEXEC))
                except OSError:
                    continue
                if _backing(device) != _identity(image):
                    continue  # it cleared itself in between
            else:
                device, fd = _attach(image)
                held.callback(os.close, fd)
            options = b""
            if _libc.mount(os.fsencode(device), os.fsencode(root), b"btrfs", MS_NOATIME | MS_NOSUID, options):
                number = ctypes.get_errno()
                if number in (errno.EPERM, errno.EACCES, errno.ENODEV):
                    raise _NoBtrfs(f"mounting btrfs is refused here ({os.strerror(number)})")
                if number == errno.EBUSY:
                    continue
                raise Corrupt(
                    f"{image} can't be mounted: {os.strerror(number)}",
                    hint="it holds boxes and caches; snapshots lie in store/ and survive when it is removed",
                )
            _libc.mount(None, os.fsencode(root), None, MS_PRIVATE, None)
            return
    raise Unavailable(f"{image} is being attached by another process", hint="try again")


def _attach(image: Path) -> tuple[str, int]:
    """A free loop device bound to the image, which frees itself when its last user goes."""
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _NoBtrfs(f"no loop devices here ({error.strerror})") from None
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(50):  # another process may take the free one first
            number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
            device = f"/dev/loop{number}"
            if not os.path.exists(device):
                os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(7, number))
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            for flags in (LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO, LO_FLAGS_AUTOCLEAR):
                # loop_info64: five u64 (device inode rdev offset sizelimit), number, two encryption words, flags, names and key, two u64
                info = struct.pack(
                    "<5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, flags, os.fsencode(image)[:63], b"", b"", 0, 0
                )
                try:
                    fcntl.ioctl(fd, LOOP_CONFIGURE, struct.pack("<II", backing, 4096) + info + bytes(64))
                    return device, fd
                except OSError as error:
                    if error.errno == errno.EBUSY:
                        break
                    failure = error
            else:
                os.close(fd)
                raise _NoBtrfs(f"a loop device can't be set up ({failure.strerror})")
            os.close(fd)
        raise Unavailable("no free loop device")
    except PermissionError:
        raise _NoBtrfs("loop devices are refused here") from None
    finally:
        os.close(backing)
        os.close(control)


def _attached(image: Path) -> str | None:
    """The loop device bound to this very file; those of a removed image at the same path are detached on the way."""
    wanted, found = _identity(image), None
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        device = f"/dev/{entry.parts[3]}"
        try:
            path = entry.read_text().strip()
            if path == f"{image} (deleted)":
                fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(fd, LOOP_CLR_FD)  # at once, or when its last user goes
                finally:
                    os.close(fd)
            elif _backing(device) == wanted:
                found = device
        except OSError:
            continue
    return found


def _backing(device: str) -> tuple[int, int] | None:
    """Device and inode of the file behind a loop device."""
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        info = bytearray(232)
        fcntl.ioctl(fd, LOOP_GET_STATUS64, info)
        encoded, inode = struct.unpack_from("<QQ", info)
        # huge_encode_dev is new_encode_dev: minor bits split around the major's
        return os.makedev((encoded >> 8) & 0xFFF, (encoded & 0xFF) | ((encoded >> 12) & 0xFFF00)), inode
    except OSError:
        return None
    finally:
        os.close(fd)


def _identity(image: Path) -> tuple[int, int]:
    found = os.stat(image)
    return found.st_dev, found.st_ino


def _mounted(root: Path) -> list[tuple[str, str]]:
    """Type and source of each mount at exactly this path, the topmost last."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        rest = fields[fields.index("-") + 1 :]
        if _unescape(fields[4]) == str(root):
            device = f"/dev/block/{fields[2]}"
            # btrfs shows an anonymous device number; its source is the device it was mounted from
            found.append((rest[0], _unescape(rest[1]) if rest[0] == "btrfs" else device))
    return found


def _unescape(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _magic(path: Path) -> int:
    buffer = (ctypes.c_long * 32)()
    if _libc.statfs(os.fsencode(path), buffer):
        return 0
    return int(buffer[0]) & 0xFFFFFFFF


def _hoist(tree: Path) -> None:
    """Turn a copy of a box's directory (`u/`, `w/`) into the layer that `u/` is."""
    upper, work = tree / "u", tree / "w"
    if work.is_dir():
        remove_tree(work)
    shelf = tree / f".hoist-{os.urandom(8).hex()}"  # what lies in u/ may be called u or w itself
    os.rename(upper, shelf)
    was = os.lstat(shelf)
    for name in os.listdir(shelf):
        os.rename(shelf / name, tree / name)
    os.chown(tree, was.st_uid, was.st_gid)
    os.chmod(tree, stat.S_IMODE(was.st_mode))
    for name in os.listxattr(shelf):
        if name.startswith(("user.", "security.", "system.posix_acl")) or name == "trusted.overlay.opaque":
            os.setxattr(tree, name, os.getxattr(shelf, name))
    os.utime(tree, ns=(was.st_atime_ns, was.st_mtime_ns))
    os.rmdir(shelf)
    os.utime(tree, ns=(was.st_atime_ns, was.st_mtime_ns))


def _copy(src: Path, dst: Path) -> None:
    if os.path.lexists(dst):
        raise Conflict(f"{dst} is already there")
    made = subprocess.run(
        ["cp", "--archive", "--reflink=auto", "--no-target-directory", "--", str(src), str(dst)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        with contextlib.suppress(OSError):
            remove_tree(dst)
        raise Unavailable(f"can't copy {src}: {made.stderr.strip()[-300:]}")
