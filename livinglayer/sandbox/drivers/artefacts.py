"""What a virtual machine boots from: a kernel, an initial RAM disk, images of layers, empty disks; made on demand, deletable at any time.

Two processes may want the same artefact at once: one makes it aside under a lock, the other waits and finds it.
"""

import contextlib
import fcntl
import gzip
import hashlib
import lzma
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import Unavailable
from .. import native

PACKAGES = ("linux-image-cloud-amd64", "linux-image-amd64")
MODULES = ("virtio_mmio", "virtio_pci", "virtio_blk", "virtio_console", "virtio_net", "erofs", "overlay", "ext4")
INSTALL = "apt-get install qemu-system-x86 erofs-utils e2fsprogs libslirp-dev gcc libc6-dev"
BLOCK = 4096
LAYERS_KEPT = 32  # images; a base takes 200 MB
JOURNAL_FROM = 16 << 20  # bytes of a disk; a smaller one has no room for a journal
_FLAGS = (0x80086601, 0x40086602)  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
_NOCOW = 0x00800000
_FICLONE = 0x40049409


@dataclass(frozen=True)
class LayerImage:
    """A layer as a read-only filesystem image."""

    path: Path
    digest: str


class Artefacts:
    """The cache of one host, `LAYER_CACHE` or /var/cache/livinglayer unless given; `say` hears of what takes long."""

    def __init__(self, cache: Path | None = None, say: Callable[[str], None] = lambda line: None) -> None:
        self.root = (cache or default_cache()) / "vm"
        self.say = say

    def kernel(self) -> Path:
        """The directory with `vmlinux`, `modules/` in the order of `modules/list`, and `digest`."""
        return self._make("kernel", self._kernel)

    def initrd(self, init: Path) -> Path:
        """The first files of a machine: our init and the modules it loads."""
        kernel = self.kernel()
        name = f"initrd-{_digest((kernel / 'digest').read_bytes(), init.read_bytes())}"

        def build(aside: Path) -> None:
            names = (kernel / "modules/list").read_text().split()
            files = [("dev", 0o40755, b""), ("modules", 0o40755, b""), ("init", 0o100755, init.read_bytes())]
            files += [
                (f"modules/{name}", 0o100644, (kernel / "modules" / name).read_bytes()) for name in ("list", *names)
            ]
            aside.write_bytes(cpio(files))

        return self._make(name, build)

    def layer(self, name: str, find: Callable[[str], Path]) -> LayerImage:
        """The image of a sealed layer. Its name says what it holds; `find` gives its directory when there is no image yet."""

        def build(aside: Path) -> None:
            self.say(f"making an image of layer {name!r}")
            aside.mkdir()
            # Uncompressed: a guest without KVM would spend more on unpacking than a disk on reading. The fixed id makes it reproducible.
            _run(["mkfs.erofs", "-U", "c1f2b9a4-6a5e-4d0f-9d39-2f5d8c1e7b60", str(aside / "image"), str(find(name))])
            self._prune("layer-*", LAYERS_KEPT)
            with open(aside / "image", "rb") as image:
                (aside / "digest").write_text(hashlib.file_digest(image, "sha256").hexdigest())

        place = self._make(f"layer-{name}", build)
        os.utime(place)
        return LayerImage(place / "image", (place / "digest").read_text())

    def disk(self, size: int) -> Path:
        """An empty ext4 filesystem of `size` bytes, sparse."""
        size = size // BLOCK * BLOCK

        def build(aside: Path) -> None:
            with open(aside, "wb") as file:
                file.truncate(size)
            features = [] if size >= JOURNAL_FROM else ["-O", "^has_journal"]
            lazy = "lazy_itable_init=1,lazy_journal_init=1,nodiscard,hash_seed=c1f2b9a4-6a5e-4d0f-9d39-2f5d8c1e7b61"
            _run(["mkfs.ext4", "-q", "-F", "-m", "0", "-b", str(BLOCK), "-E", lazy, *features, str(aside)])

        return self._make(f"disk-{size}", build)

    def program(self, name: str, *libraries: str) -> Path:
        """One of our C programs that the machine itself needs on the host."""
        source = native.SOURCE / f"{name}.c"
        flags = [*native.HARDENED, *([] if libraries else native.STATIC)]

        def build(aside: Path) -> None:
            _run(["cc", *flags, str(source), "-o", str(aside), *libraries])
            aside.chmod(0o755)

        return self._make(f"{name}-{_digest(source.read_bytes(), repr(flags).encode())}", build)

    def _make(self, name: str, build: Callable[[Path], None]) -> Path:
        place = self.root / name
        if place.exists():
            return place
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        with locked(self.root / f"{name}.lock"):
            if not place.exists():
                with tempfile.TemporaryDirectory(prefix="making-", dir=self.root) as scratch:
                    build(Path(scratch) / "made")
                    (Path(scratch) / "made").rename(place)
        return place

    def _prune(self, pattern: str, kept: int) -> None:
        """Remove what was not used for longest; whoever has it open keeps it, and it can be made again."""
        found = [path for path in self.root.glob(pattern) if path.is_dir()]
        with contextlib.suppress(FileNotFoundError):
            for old in sorted(found, key=lambda path: path.stat().st_mtime)[:-kept]:
                shutil.rmtree(old, ignore_errors=True)

    def _kernel(self, aside: Path) -> None:
        if platform.machine() != "x86_64":
            raise Unavailable(f"virtual machines are not known on {platform.machine()!r}", hint="x86_64 is")
        package = self._package()
        self.say(f"fetching the guests' kernel, {package}")
        aside.mkdir()
        tree = aside / "tree"
        _run(["apt-get", "download", "-q", package], cwd=aside)
        archive = next(aside.glob("*.deb"))
        _run(["dpkg-deb", "-x", str(archive), str(tree)])
        found = {path.stem.replace("-", "_"): path for path in tree.glob("lib/modules/*/kernel/**/*.ko")}
        order: list[str] = []
        for name in MODULES:
            _closure(name, found, order)
        (aside / "modules").mkdir()
        for name in order:
            shutil.copyfile(found[name], aside / "modules" / name)
        (aside / "modules/list").write_text("".join(f"{name}\n" for name in order))
        image = unpacked(next(tree.glob("boot/vmlinuz-*")).read_bytes())
        (aside / "vmlinux").write_bytes(image)
        (aside / "digest").write_text(_digest(image))
        (aside / "version").write_text(archive.name)
        shutil.rmtree(tree)
        archive.unlink()

    def _package(self) -> str:
        for name in PACKAGES:
            listed = _run(["apt-cache", "depends", name], check=False)
            if found := re.search(r"Depends: (linux-image-\d\S+)", listed):
                return found[1]
        raise Unavailable("no kernel for virtual machines is known to apt-get", hint="apt-get update")


def default_cache() -> Path:
    """LAYER_CACHE, else /var/cache/livinglayer for root, else the XDG cache directory."""
    if given := os.environ.get("LAYER_CACHE"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/cache/livinglayer")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "livinglayer"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file; it is removed by its last holder."""
    while True:
        with open(path, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(lock.fileno()).st_ino != path.stat().st_ino:
                    continue
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def _closure(name: str, found: dict[str, Path], order: list[str]) -> None:
    """Append a module after all that it needs; one that is built into the kernel has no file."""
    if name in order or name not in found:
        return
    needs = re.search(rb"\0depends=([^\0]*)\0", found[name].read_bytes())
    for other in needs[1].decode().split(",") if needs else ():
        _closure(other.replace("-", "_"), found, order)
    order.append(name)


def cpio(files: Iterable[tuple[str, int, bytes]]) -> bytes:
    """An archive in the format that the kernel unpacks at its start (newc)."""
    out = bytearray()
    for number, (name, mode, data) in enumerate([*files, ("TRAILER!!!", 0, b"")], 1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        out += b"\0" * (-len(out) % 4) + data
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


def unpacked(image: bytes) -> bytes:
    """The kernel inside a bzImage: a guest starts sooner when it need not unpack itself. What can't be unpacked boots as it is."""
    start = ((image[0x1F1] or 4) + 1) * 512
    offset, length = struct.unpack_from("<II", image, 0x248)
    payload = image[start + offset : start + offset + length - 4]  # the last four bytes are the size
    command: list[str]
    if payload.startswith(b"\x1f\x8b"):
        return gzip.decompress(payload)
    if payload.startswith(b"\xfd7zXZ"):
        return lzma.LZMADecompressor().decompress(payload)
    if payload.startswith(b"\x02\x21\x4c\x18"):
        command = ["lz4", "-dc"]
    elif payload.startswith(b"\x28\xb5\x2f\xfd"):
        command = ["zstd", "-dcq"]
    else:
        return image
    if not shutil.which(command[0]):
        return image
    done = subprocess.run(command, input=payload, capture_output=True, check=False)
    return done.stdout if done.stdout.startswith(b"\x7fELF") else image


def copy_sparse(source: int, target: int) -> None:
    """The content of one file into another, empty one: shared where the filesystem can, else copied without its holes."""
    size = os.fstat(source).st_size
    with contextlib.suppress(OSError):
        fcntl.ioctl(target, _FICLONE, source)
        return
    os.ftruncate(target, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        end = os.lseek(source, at, os.SEEK_HOLE)
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            done = os.sendfile(target, source, at, end - at)
            if not done:
                return
            at += done


def new_disk(path: Path, content: int) -> None:
    """A machine's disk at `path`. In place where the filesystem copies on write: a disk that is rewritten must not grow beyond its size."""
    aside = path.with_suffix(".new")
    aside.unlink(missing_ok=True)
    fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            flags = bytearray(8)
            fcntl.ioctl(fd, _FLAGS[0], flags)
            fcntl.ioctl(fd, _FLAGS[1], struct.pack("<Q", struct.unpack("<Q", flags)[0] | _NOCOW))
        copy_sparse(content, fd)
    finally:
        os.close(fd)
    aside.rename(path)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:24]


def _run(command: list[str], cwd: Path | None = None, check: bool = True) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        raise Unavailable(f"{command[0]!r} is not installed", hint=INSTALL) from None
    if check and done.returncode:
        raise Unavailable(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}", hint=INSTALL)
    return done.stdout
