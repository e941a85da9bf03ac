"""Image archives as others write and read them: OCI layouts and docker-archives in, OCI layers out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from livinglayer.errors import Corrupt, Invalid, LimitExceeded
from livinglayer.sandbox import manifest
from livinglayer.sandbox.store import CHUNK
from livinglayer.sandbox.unpack import WHITEOUT, WHITEOUT_OPAQUE, Caps, Packed

DOCUMENT = 4 << 20  # most bytes of an index, manifest or configuration
MEMBERS = 10_000  # most files of an archive
MACHINES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "riscv64": "riscv64",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
}

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")


@dataclass(frozen=True)
class Blob:
    """A layer as it lies in an archive."""

    name: str  # in the source
    digest: str | None  # of it as it lies there


class Source(Protocol):
    """Where an image's files are read from."""

    def open(self, name: str) -> IO[bytes]: ...
    def has(self, name: str) -> bool: ...


class Directory:
    """An OCI layout as a directory; its files are opened one name at a time, so a link in it leads nowhere."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, name: str) -> IO[bytes]:
        try:
            fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for part in name.split("/")[:-1]:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                os.close(fd)
                fd = below
            file = os.open(name.split("/")[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            return os.fdopen(file, "rb")
        except OSError as error:
            raise Invalid(f"the image has no readable {name[:100]!r}: {error.strerror}") from None

    def has(self, name: str) -> bool:
        return (self.root / name).is_file() and not (self.root / name).is_symlink()


class Archive:
    """A tar of an image, its members read where they lie."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self.archive = archive
        self.members: dict[str, tarfile.TarInfo] = {}
        for count, member in enumerate(archive):
            if count > MEMBERS:
                raise LimitExceeded(f"the archive has more than {MEMBERS} members")
            self.members[os.path.normpath(member.name)] = member

    @classmethod
    @contextlib.contextmanager
    def at(cls, path: Path, tmp: Path) -> Iterator[Archive]:
        with path.open("rb") as file, contextlib.ExitStack() as held:
            head = file.read(4)
            file.seek(0)
            plain: IO[bytes] = file
            if head[:2] == b"\x1f\x8b" or head == b"\x28\xb5\x2f\xfd":
                plain = held.enter_context(tempfile.TemporaryFile(dir=tmp))
                caps = Caps()
                unpacked = Packed(file, "the archive", caps, lambda count: None)
                while piece := unpacked.read(1 << 20):
                    if unpacked.unpacked > caps.bytes:
                        raise LimitExceeded(f"the archive unpacks to more than {caps.bytes} bytes")
                    plain.write(piece)
                plain.seek(0)
            try:
                yield cls(held.enter_context(tarfile.open(fileobj=cast(IO[bytes], _Capped(plain)), mode="r:")))
            except (tarfile.TarError, EOFError, OverflowError, ValueError) as error:
                raise Invalid(f"{str(path)!r} is no image archive: {error}") from None

    def open(self, name: str) -> IO[bytes]:
        member, hops = self.members.get(os.path.normpath(name)), 0
        while (
            member is not None and (member.issym() or member.islnk()) and hops < 5
        ):  # docker-archives name equal layers so
            base = os.path.dirname(member.name) if member.issym() else ""
            member, hops = self.members.get(os.path.normpath(os.path.join(base, member.linkname))), hops + 1
        if member is None or not member.isreg() or member.issparse():
            raise Invalid(f"the archive has no file {name[:100]!r}")
        file = self.archive.extractfile(member)
        assert file is not None
        return file

    def has(self, name: str) -> bool:
        return os.path.normpath(name) in self.members


class _Capped:
    """A file that gives no more at once than a header may have, so that none fills the memory, and leads nowhere backwards for ever."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > 64 << 20:
            raise Invalid(f"the archive has a header of {size} bytes")
        return self.file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        if offset < 0:
            raise Invalid("the archive leads backwards")
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()


def read_image(source: Source) -> tuple[dict[str, Any], list[Blob]]:
    """The configuration of an image and where its layers lie, from the lowest."""
    if source.has("index.json"):
        described = _choose(source, _document(source, "index.json"), 0)
        if not isinstance(described.get("layers"), list) or not isinstance(described.get("config"), dict):
            raise Invalid("the image's manifest names no layers")
        config = _document(source, *_blob(described["config"]))
        return config, [Blob(*_blob(layer)) for layer in described["layers"]]
    if source.has("manifest.json"):
        listed = _document(source, "manifest.json", kind=list)
        if not listed or not isinstance(listed[0], dict):
            raise Invalid("the archive names no image")
        if len(listed) > 1:
            raise Invalid(f"the archive holds {len(listed)} images", hint="save one at a time")
        names = listed[0].get("Layers")
        if (
            not isinstance(names, list)
            or not all(isinstance(name, str) for name in names)
            or not isinstance(listed[0].get("Config"), str)
        ):
            raise Invalid("the archive names no layers")
        return _document(source, listed[0]["Config"]), [Blob(name, None) for name in names]
    raise Invalid("this is no image: neither index.json (OCI) nor manifest.json (docker-archive) is there")


def _choose(source: Source, index: dict[str, Any], depth: int) -> dict[str, Any]:
    """The manifest for this machine, through nested indexes."""
    found = index.get("manifests")
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found) or depth > 3:
        raise Invalid("the image's index names no manifest")
    machine = MACHINES.get(os.uname().machine, os.uname().machine)
    fitting = [one for one in found if (one.get("platform") or {}).get("architecture", machine) == machine]
    fitting = [one for one in fitting if (one.get("platform") or {}).get("os", "linux") == "linux"]
    if not fitting:
        raise Invalid(f"the image is not for {machine}")
    document = _document(source, *_blob(fitting[0]))
    if "manifests" in document or fitting[0].get("mediaType") in _INDEXES:
        return _choose(source, document, depth + 1)
    return document


def _blob(descriptor: object) -> tuple[str, str]:
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise Invalid(f"the image names content by {str(digest)[:100]!r}", hint="sha256 digests are understood")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}", digest


def _document(source: Source, name: str, digest: str | None = None, kind: type = dict) -> Any:
    with source.open(name) as file:
        raw = file.read(DOCUMENT + 1)
    if len(raw) > DOCUMENT:
        raise LimitExceeded(f"{name!r} of the image is larger than {DOCUMENT} bytes")
    if digest is not None and hashlib.sha256(raw).hexdigest() != digest.removeprefix("sha256:"):
        raise Corrupt(f"{name!r} of the image is not what its digest says")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{name!r} of the image can't be read: {error}") from None
    if not isinstance(document, kind):
        raise Invalid(f"{name!r} of the image is not a {kind.__name__}")
    return document


def diffs_of(config: dict[str, Any]) -> list[str]:
    machine = MACHINES.get(os.uname().machine, os.uname().machine)
    if config.get("os", "linux") != "linux" or config.get("architecture", machine) != machine:
        raise Invalid(f"the image is for {config.get('os')}/{config.get('architecture')}, this is linux/{machine}")
    rootfs = config.get("rootfs")
    diffs = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diffs, list) or not all(isinstance(diff, str) and _DIGEST.fullmatch(diff) for diff in diffs):
        raise Invalid("the image's configuration names no layers")
    if not 1 <= len(diffs) <= 500:
        raise Invalid(f"the image has {len(diffs)} layers")
    return diffs


def settings_of(config: object) -> dict[str, Any]:
    """Of a configuration, what a box can use, in the types it must have."""
    if not isinstance(config, dict):
        return {}
    kept: dict[str, Any] = {}
    for field in ("Env", "Entrypoint", "Cmd"):
        value = config.get(field)
        if isinstance(value, list) and all(isinstance(word, str) and "\0" not in word for word in value):
            kept[field] = value
    for field in ("User", "WorkingDir", "StopSignal"):
        if isinstance(config.get(field), str):
            kept[field] = config[field]
    for field in ("ExposedPorts", "Labels", "Volumes"):
        if isinstance(config.get(field), dict):
            kept[field] = config[field]
    return kept


class Tee:
    """Writes on, and hashes what it writes."""

    def __init__(self, file: Any, digest: Any) -> None:
        self.file, self.digest = file, digest

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return int(self.file.write(content))


def write_layer(entries: Iterator[manifest.Entry], get: manifest.Getter, file: Any) -> None:
    """A layer as a tar, whiteouts as images have them. Sockets, and names that would be read as whiteouts, have no place in one."""
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, bufsize=CHUNK) as archive:
        for entry in entries:
            base = entry.path.rpartition("/")[2]
            if entry.type == "s" or base.startswith(WHITEOUT):
                continue
            member = tarfile.TarInfo(entry.path or ".")
            member.mode, member.uid, member.gid, member.mtime = (
                entry.mode,
                entry.uid,
                entry.gid,
                entry.mtime // 1_000_000_000,
            )
            headers: dict[str, str] = {}
            for key, value in entry.xattrs:
                headers[f"SCHILY.xattr.{key}"] = value.decode("utf-8", "surrogateescape")
            member.pax_headers = headers
            if entry.type == "w":
                member.name = f"{entry.path.removesuffix(base)}{WHITEOUT}{base}"
                member.mode = 0o600
                archive.addfile(member)
            elif entry.type == "d":
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
                if entry.opaque:
                    hides = tarfile.TarInfo(f"{entry.path}/{WHITEOUT_OPAQUE}" if entry.path else WHITEOUT_OPAQUE)
                    archive.addfile(hides)
            elif entry.type in ("l", "h"):
                member.type, member.linkname = tarfile.SYMTYPE if entry.type == "l" else tarfile.LNKTYPE, entry.target
                archive.addfile(member)
            elif entry.type == "p":
                member.type = tarfile.FIFOTYPE
                archive.addfile(member)
            else:
                member.size = entry.size
                archive.addfile(member, _Content(entry, get))  # type: ignore[arg-type]


class _Content:
    """An entry's bytes as a file to read."""

    def __init__(self, entry: manifest.Entry, get: manifest.Getter) -> None:
        self.pieces, self.buffer, self.zeros = entry.content(get), b"", 0

    def read(self, size: int) -> bytes:
        while len(self.buffer) < size:
            if self.zeros:
                count = min(self.zeros, size - len(self.buffer))
                self.buffer, self.zeros = self.buffer + bytes(count), self.zeros - count
                continue
            piece = next(self.pieces, None)
            if piece is None:
                break
            if isinstance(piece, int):
                self.zeros = piece
            else:
                self.buffer += piece
        result, self.buffer = self.buffer[:size], self.buffer[size:]
        return result


def write_blob(blobs: Path, document: dict[str, Any], kind: str) -> dict[str, Any]:
    raw = json.dumps(document, separators=(",", ":")).encode()
    digest = hashlib.sha256(raw).hexdigest()
    (blobs / digest).write_bytes(raw)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(raw)}
