"""An image's layer, a tar that anybody may have written, becomes a layer directory; whatever it says, nothing outside is touched.

Names are placed by our own resolution inside the image (its lower layers included), one directory at a time; the kernel is never asked
to follow anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol, cast

import zstandard

from livinglayer.errors import Corrupt, Invalid, LimitExceeded, NotFound
from livinglayer.sandbox.disk import remove_tree
from livinglayer.sandbox.manifest import keeps
from livinglayer.sandbox.tree import DEPTH, ENTRIES, OPAQUE, is_whiteout, stacked

READ = 128 << 10
WHITEOUT, WHITEOUT_OPAQUE = ".wh.", ".wh..wh..opq"
IDS = 65536  # a box has so many; owners beyond become nobody
NOBODY = 65534


@dataclass(frozen=True)
class Caps:
    """What an image may cost."""

    bytes: int = 20 << 30  # unpacked, all layers together
    entries: int = ENTRIES
    ratio: int = 200  # unpacked to packed, once there is something to speak of
    header: int = 4 << 20  # of one entry's own description


@dataclass
class Unpacked:
    """What came of a layer."""

    bytes: int = 0
    entries: int = 0
    opaque: bool = False  # it hides all layers below
    skipped: list[str] = field(default_factory=list)  # devices


class _Input(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Packed:
    """A compressed stream read forward: counts, hashes both sides, and ends before a bomb does harm."""

    def __init__(self, source: _Input, what: str, caps: Caps, budget: Callable[[int], None]) -> None:
        self.what, self.caps, self.budget = what, caps, budget
        self.packed = self.unpacked = 0
        self.outer, self.inner = hashlib.sha256(), hashlib.sha256()
        self._source = source
        self._pieces = self._decompress()
        self._buffer = b""

    def _raw(self) -> bytes:
        piece = self._source.read(READ)
        self.packed += len(piece)
        self.outer.update(piece)
        return piece

    def _decompress(self) -> Iterator[bytes]:
        head = self._raw()
        try:
            if head[:2] == b"\x1f\x8b":
                yield from self._gunzip(head)
            elif head[:4] == b"\x28\xb5\x2f\xfd":
                yield from self._unzstd(head)
            else:
                while head:
                    yield head
                    head = self._raw()
        except (zlib.error, zstandard.ZstdError) as error:
            raise Invalid(f"{self.what} can't be decompressed: {error}") from None

    def _gunzip(self, piece: bytes) -> Iterator[bytes]:
        engine = zlib.decompressobj(31)
        while piece:
            yield engine.decompress(piece, READ)
            while engine.unconsumed_tail:
                yield engine.decompress(engine.unconsumed_tail, READ)
            if engine.eof:
                rest = engine.unused_data.lstrip(b"\0") or self._raw().lstrip(b"\0")
                if not rest:
                    while self._raw():  # the digest is of all of it
                        pass
                    return
                engine, piece = zlib.decompressobj(31), rest
                continue
            piece = self._raw()
        raise Invalid(f"{self.what} ends early")

    def _unzstd(self, piece: bytes) -> Iterator[bytes]:
        outer = self

        class Rest:
            def read(self, size: int = -1) -> bytes:
                nonlocal piece
                held, piece = piece, b""
                return held or outer._raw()

        reader = zstandard.ZstdDecompressor(max_window_size=128 << 20).stream_reader(
            cast(IO[bytes], Rest()), read_across_frames=True
        )
        while content := reader.read(READ):
            yield content

    def read(self, size: int, /) -> bytes:
        while len(self._buffer) < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self.unpacked += len(piece)
            self.inner.update(piece)
            self.budget(len(piece))
            if self.unpacked > 64 << 20 and self.unpacked > self.packed * self.caps.ratio:
                raise LimitExceeded(f"{self.what} unpacks to more than {self.caps.ratio} times its size")
            self._buffer += piece
        result, self._buffer = self._buffer[:size], self._buffer[size:]
        return result

    def finish(self) -> None:
        """Read to the end, so that the digests are of the whole."""
        while self.read(READ):
            pass


class Forward(io.RawIOBase):
    """A stream as tarfile wants a file: it can be skipped ahead, one byte back, and never asked for more at once than a header may have."""

    def __init__(self, source: _Input, what: str, caps: Caps) -> None:
        self.source, self.what, self.caps = source, what, caps
        self.at = 0
        self.last = b""
        self.again = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at - (1 if self.again else 0)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 0 or offset < self.at - 1 or (offset == self.at - 1 and not self.last):
            raise Invalid(f"{self.what} leads backwards")  # a negative size: tarfile would go round for ever
        self.again = offset == self.at - 1
        while self.at < offset:
            if not self._take(min(READ, offset - self.at)):
                break
        return self.tell()

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0 or size > self.caps.header + READ:
            raise Invalid(f"{self.what} has a header of {size} bytes")
        if size == 0:
            return b""
        if self.again:
            self.again = False
            return self.last + self._take(size - 1)
        return self._take(size)

    def _take(self, size: int) -> bytes:
        piece = self.source.read(size) if size else b""
        if piece:
            self.at, self.last = self.at + len(piece), piece[-1:]
        return piece


class Tree:
    """A layer directory being filled, above lower ones that are only looked at."""

    def __init__(self, root: Path, below: Sequence[Path] = ()) -> None:
        self.root, self.below = root, list(below)
        self.times: dict[str, int] = {}  # of directories, set when nothing is put into them any more
        self.hidden: set[str] = set()  # names this layer took away from the lower ones
        self.opaque = False

    def place(self, path: str, last: bool = False) -> list[str]:
        """Where a name lies once links on its way (its last part too, when `last`) are resolved inside the image; Invalid when it would leave."""
        waiting = self._names(path)
        done: list[str] = []
        hops = 0
        while waiting:
            name = waiting.pop(0)
            if name == "..":  # from a link: the root's parent is the root
                done = done[:-1]
                continue
            here = [*done, name]
            found = self._look(here) if waiting or last else None
            if found is not None and stat.S_ISLNK(found[1].st_mode):
                hops += 1
                if hops > 40:
                    raise Invalid(f"{path!r} goes through too many links")
                target = os.readlink("/".join((str(found[0]), *here)))
                waiting = [part for part in target.split("/") if part not in ("", ".")] + waiting
                done = [] if target.startswith("/") else done
            elif found is not None and waiting and not stat.S_ISDIR(found[1].st_mode):
                if found[0] != self.root:
                    done = here  # a file of a lower layer that becomes a directory
                else:
                    raise Invalid(f"{path!r} lies below {'/'.join(here)!r}, which is no directory")
            else:
                done = here
            if len(done) + len(waiting) > DEPTH:
                raise Invalid(f"{path[:100]!r} is nested too deep")
        return done

    def _names(self, path: str) -> list[str]:
        names = [name for name in path.split("/") if name not in ("", ".")]
        if path.startswith("/"):
            raise Invalid(f"{path[:200]!r} is an absolute path")
        if ".." in names:
            raise Invalid(f"{path[:200]!r} leads out of the image")
        if any(len(os.fsencode(name)) > 255 or "\0" in name for name in names):
            raise Invalid(f"{path[:100]!r}… can't be a name")
        return names

    def _look(self, names: list[str]) -> tuple[Path, os.stat_result] | None:
        """A name here, or in the lower layers where this one does not hide it."""
        with contextlib.suppress(NotFound):
            return stacked([self.root], "/".join(names))
        for depth in range(1, len(names) + 1):
            if "/".join(names[:depth]) in self.hidden:
                return None
        if self.opaque:
            return None
        with contextlib.suppress(NotFound):
            return stacked(self.below, "/".join(names))
        return None

    @contextlib.contextmanager
    def parent(self, names: list[str]) -> Iterator[int]:
        """The open directory that a placed name lies in, made where it is missing."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for depth, name in enumerate(names[:-1]):
                missing = False
                try:
                    if is_whiteout(os.stat(name, dir_fd=fd, follow_symlinks=False)):
                        os.unlink(name, dir_fd=fd)
                        missing = True
                except FileNotFoundError:
                    missing = True
                if missing:
                    like = self._below(names[: depth + 1])
                    os.mkdir(name, 0o755, dir_fd=fd)
                    self._dress_parent(fd, name, "/".join(names[: depth + 1]), like)
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _below(self, names: list[str]) -> os.stat_result | None:
        if self.opaque or any("/".join(names[:depth]) in self.hidden for depth in range(1, len(names) + 1)):
            return None
        with contextlib.suppress(NotFound):
            return stacked(self.below, "/".join(names))[1]
        return None

    def _dress_parent(self, fd: int, name: str, path: str, like: os.stat_result | None) -> None:
        """A directory that the layer does not describe is as the lower layer has it."""
        at = f"/proc/self/fd/{fd}/{name}"
        if like is not None and stat.S_ISDIR(like.st_mode):
            os.chown(at, like.st_uid, like.st_gid, follow_symlinks=False)
            os.chmod(name, stat.S_IMODE(like.st_mode), dir_fd=fd)
            self.times[path] = like.st_mtime_ns
        else:
            os.chmod(name, 0o755, dir_fd=fd)
            self.times[path] = 0
        if path in self.hidden:
            os.setxattr(at, OPAQUE, b"y")

    def clear(self, fd: int, names: list[str], keep_directory: bool) -> bool:
        """Take away what an earlier entry put under a name; True when a directory stays."""
        try:
            found = os.stat(names[-1], dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(found.st_mode):
            if keep_directory:
                return True
            remove_tree(self.root.joinpath(*names))
            prefix = "/".join(names)
            self.times = {
                path: time for path, time in self.times.items() if path != prefix and not path.startswith(prefix + "/")
            }
            return False
        if is_whiteout(found):
            self.hidden.add("/".join(names))
        os.unlink(names[-1], dir_fd=fd)
        return False

    def finish(self) -> None:
        for path in sorted(self.times, key=lambda path: -path.count("/")):
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.root / path, ns=(self.times[path], self.times[path]), follow_symlinks=False)


def unpack(stream: _Input, what: str, tree: Tree, caps: Caps) -> Unpacked:
    """Fill a tree from a tar. Whiteouts become overlay's, devices are left out, later entries replace earlier ones."""
    result = Unpacked()
    os.chmod(tree.root, 0o755)
    try:
        with tarfile.open(fileobj=Forward(stream, what, caps), mode="r:", errorlevel=2) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
                result.entries += 1
                if result.entries > caps.entries:
                    raise LimitExceeded(f"{what} has more than {caps.entries} entries")
                if (
                    member.size < 0
                    or sum(len(key) + len(value) for key, value in member.pax_headers.items()) > caps.header
                ):
                    raise Invalid(f"{what}: {member.name[:100]!r} has a broken header")
                _put(archive, member, tree, result, what)
    except (tarfile.TarError, EOFError) as error:
        raise Invalid(f"{what} is not a whole tar: {error}") from None
    except (UnicodeError, OverflowError, ValueError, RecursionError) as error:
        raise Invalid(f"{what} is broken: {error}") from None
    except OSError as error:
        if error.errno == 28 or error.errno == 122:
            raise LimitExceeded(f"{what} does not fit on the disk") from None
        raise Invalid(f"{what} can't be unpacked: {error.strerror}") from error
    tree.finish()
    result.opaque = tree.opaque
    return result


def _put(archive: tarfile.TarFile, member: tarfile.TarInfo, tree: Tree, result: Unpacked, what: str) -> None:
    raw = tree._names(member.name)
    if not raw:
        if not member.isdir():
            raise Invalid(f"{what}: {member.name[:200]!r} would replace the root")
        _dress(member, tree, [])
        return
    base = raw[-1]
    if base.startswith(WHITEOUT):
        _whiteout(raw, tree)
        return
    names = tree.place(member.name)
    if not names:
        raise Invalid(f"{what}: {member.name[:200]!r} would replace the root")
    with tree.parent(names) as fd:
        stays = tree.clear(fd, names, keep_directory=member.isdir())
        name = names[-1]
        if member.isdir():
            if not stays:
                os.mkdir(name, 0o755, dir_fd=fd)
                if "/".join(names) in tree.hidden:
                    os.setxattr(f"/proc/self/fd/{fd}/{name}", OPAQUE, b"y")
        elif member.issym():
            if "\0" in member.linkname or not member.linkname:
                raise Invalid(f"{what}: the link {member.name[:200]!r} leads nowhere")
            os.symlink(member.linkname, name, dir_fd=fd)
        elif member.islnk():
            _link(member, tree, fd, name, what)
            return
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=fd)
        elif member.isreg():
            source = archive.extractfile(member)
            assert source is not None
            result.bytes += _fill(source, member.size, fd, name, what, member.name, sparse=member.issparse())
        elif member.ischr() or member.isblk():
            result.skipped.append(member.name[:500])
            return
        else:
            raise Invalid(f"{what}: {member.name[:200]!r} is of an unknown kind")
    _dress(member, tree, names)


def _fill(source: IO[bytes], size: int, directory: int, name: str, what: str, shown: str, sparse: bool) -> int:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    done = 0
    try:
        if sparse:
            raise Invalid(f"{what}: {shown[:200]!r} is a sparse entry, which no image needs")
        while done < size:
            piece = source.read(min(READ, size - done))
            if not piece:
                raise Invalid(f"{what} ends in the middle of {shown[:200]!r}")
            view = memoryview(piece)
            while view:
                view = view[os.write(fd, view) :]
            done += len(piece)
    finally:
        os.close(fd)
    return done


def _whiteout(raw: list[str], tree: Tree) -> None:
    base = raw[-1]
    if base == WHITEOUT_OPAQUE:
        if len(raw) == 1:
            tree.opaque = True
            return
        names = tree.place("/".join(raw[:-1]), last=True)
        if not names:
            tree.opaque = True
            return
        with tree.parent([*names, "."]) as fd:
            os.setxattr(fd, OPAQUE, b"y")
        tree.hidden.add("/".join(names))
        return
    if base.startswith(WHITEOUT + WHITEOUT):
        return  # aufs' own bookkeeping
    target = base.removeprefix(WHITEOUT)
    if target in ("", ".", ".."):
        raise Invalid(f"{'/'.join(raw)[:200]!r} takes away nothing that has a name")
    names = tree.place("/".join([*raw[:-1], target]))
    with tree.parent(names) as fd:
        tree.hidden.add("/".join(names))
        try:
            found = os.stat(names[-1], dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            os.mknod(names[-1], stat.S_IFCHR, 0, dir_fd=fd)
            return
        if stat.S_ISDIR(found.st_mode):  # what this layer has stays, what lower ones have goes
            os.setxattr(f"/proc/self/fd/{fd}/{names[-1]}", OPAQUE, b"y")


def _link(member: tarfile.TarInfo, tree: Tree, directory: int, name: str, what: str) -> None:
    goal = tree.place(member.linkname.removeprefix("/"))
    if not goal:
        raise Invalid(f"{what}: the hard link {member.name[:200]!r} leads to the root")
    found = tree._look(goal)
    if found is None or not (stat.S_ISREG(found[1].st_mode) or stat.S_ISLNK(found[1].st_mode)):
        raise Invalid(
            f"{what}: the hard link {member.name[:200]!r} leads to {member.linkname[:200]!r}, which is no file of the image"
        )
    with contextlib.ExitStack() as held:
        if found[0] == tree.root:
            with tree.parent(goal) as other:
                os.link(goal[-1], name, src_dir_fd=other, dst_dir_fd=directory, follow_symlinks=False)
            return
        if stat.S_ISLNK(found[1].st_mode):
            os.symlink(os.readlink(found[0].joinpath(*goal)), name, dir_fd=directory)
            return
        # In a lower layer: overlay has no links between layers, so this one gets the content.
        source = held.enter_context(
            open(os.open(found[0].joinpath(*goal), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
        )
        _fill(source, found[1].st_size, directory, name, what, member.name, sparse=False)
    at = f"/proc/self/fd/{directory}/{name}"
    os.chown(at, found[1].st_uid, found[1].st_gid)
    os.chmod(at, stat.S_IMODE(found[1].st_mode))
    os.utime(at, ns=(found[1].st_mtime_ns, found[1].st_mtime_ns))


def _dress(member: tarfile.TarInfo, tree: Tree, names: list[str]) -> None:
    path = tree.root.joinpath(*names)
    uid, gid = (number if 0 <= number < IDS else NOBODY for number in (member.uid, member.gid))
    os.chown(path, uid, gid, follow_symlinks=False)
    if not member.issym():
        os.chmod(path, member.mode & 0o7777)
    for key, value in member.pax_headers.items():
        if key.startswith("SCHILY.xattr."):
            name = key.removeprefix("SCHILY.xattr.")
            if keeps(name):
                with contextlib.suppress(OSError):  # an attribute the filesystem has no room for
                    os.setxattr(path, name, value.encode("utf-8", "surrogateescape"), follow_symlinks=False)
    time = min(max(int(member.mtime * 1_000_000_000), 0), 1 << 62) if member.mtime == member.mtime else 0
    if member.isdir():
        tree.times["/".join(names)] = time
    else:
        os.utime(path, ns=(time, time), follow_symlinks=False)


def check(stream: Packed, digest: str | None, diff: str | None) -> None:
    """Whether a stream that was read was the one its names promised; Corrupt when not."""
    stream.finish()
    for said, found in ((digest, stream.outer), (diff, stream.inner)):
        if said is not None and said != f"sha256:{found.hexdigest()}":
            raise Corrupt(f"{stream.what} is not what its digest {said[:19]}… says", hint="fetch the image again")
