"""Archives into and out of boxes: what a hostile one may do is bounded before any of it is written."""

import io
import lzma
import posixpath
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from ..errors import Invalid, LimitExceeded

MEMBERS = 100_000
BYTES = 8 << 30
RATIO = 200  # of what comes out to what went in, once it is more than RATIO_FROM bytes
RATIO_FROM = 64 << 20
BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError),
    *(KeyError, RecursionError, RuntimeError, NotImplementedError),
)


@dataclass(frozen=True)
class Member:
    """One entry of an archive, its path clean and relative."""

    path: str
    type: str  # file, directory, link
    mode: int
    content: "Content | None" = None
    target: str = ""


class Content:
    """The bytes of a member; Invalid when they can't be unpacked."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except BROKEN as error:
            raise Invalid(f"the archive is broken: {error}") from None


def clean(name: str) -> str:
    """A relative path without surprises, or Invalid: an archive may not name what lies outside the place it is unpacked to."""
    if not name or "\0" in name or name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise Invalid(f"the archive names {name!r}, which lies outside of it")
    path = posixpath.normpath(name)
    if len(path) > 3000 or any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in path.split("/")):
        raise Invalid(f"the archive has a name of {len(path)} characters")
    return path


def members(source: IO[bytes], size: int) -> Iterator[Member]:
    """The entries of a tar (plain, gz, bz2, xz) or zip: directories and files as they come, links at the end, so that nothing is
    written through one. Devices, pipes and the like are refused, and so is what grows beyond all measure."""
    count, total, links = 0, 0, []
    for member, length in _zip(source) if _is_zip(source) else _tar(source):
        count += 1
        total += length
        if count > MEMBERS:
            raise LimitExceeded(f"the archive has more than {MEMBERS} entries")
        if total > BYTES or (total > RATIO_FROM and total > RATIO * max(1, size)):
            raise LimitExceeded(f"the archive unpacks to more than {total} bytes")
        if member.type == "link":
            links.append(member)
        elif member.path != ".":
            yield member
    yield from links


def _is_zip(source: IO[bytes]) -> bool:
    start = source.read(4)
    source.seek(0)
    return start in (b"PK\3\4", b"PK\5\6")


def _tar(source: IO[bytes]) -> Iterator[tuple[Member, int]]:
    try:
        with tarfile.open(fileobj=source, mode="r:*") as tar:
            for info in tar:
                path = clean(info.name)
                mode = info.mode & 0o777
                if info.isdir():
                    yield Member(path, "directory", mode or 0o755), 0
                elif info.isreg():
                    content = tar.extractfile(info)
                    yield Member(path, "file", mode or 0o644, Content(content) if content else None), info.size
                elif info.issym():
                    yield Member(path, "link", 0o777, target=info.linkname), 0
                elif info.islnk():
                    clean(info.linkname)
                    original = tar.extractfile(info)  # a copy of what it links to, found in the archive itself
                    if original is None:
                        raise Invalid(f"the archive links {info.name!r} to what it does not hold")
                    yield Member(path, "file", mode or 0o644, Content(original)), tar.getmember(info.linkname).size
                else:
                    raise Invalid(f"the archive holds {info.name!r}, which is neither file, directory nor link")
    except BROKEN as error:
        raise Invalid(f"the archive is broken: {error}") from None


def _zip(source: IO[bytes]) -> Iterator[tuple[Member, int]]:
    try:
        with zipfile.ZipFile(source) as archive:
            for info in archive.infolist():
                path = clean(info.filename.rstrip("/"))
                mode = (info.external_attr >> 16) & 0o777
                kind = (info.external_attr >> 16) & 0o170000
                if info.is_dir():
                    yield Member(path, "directory", mode or 0o755), 0
                elif kind == 0o120000:
                    yield (
                        Member(
                            path, "link", 0o777, target=archive.read(info)[:4096].decode("utf-8", "surrogateescape")
                        ),
                        0,
                    )
                elif kind in (0, 0o100000):
                    yield Member(path, "file", mode or 0o644, Content(archive.open(info))), info.file_size
                else:
                    raise Invalid(f"the archive holds {info.filename!r}, which is neither file, directory nor link")
    except BROKEN as error:
        raise Invalid(f"the archive is broken: {error}") from None


def as_file(archive: bytes | IO[bytes]) -> tuple[IO[bytes], int]:
    """An archive as a file and its size."""
    if isinstance(archive, bytes):
        return io.BytesIO(archive), len(archive)
    archive.seek(0, 2)
    size = archive.tell()
    archive.seek(0)
    return archive, size
