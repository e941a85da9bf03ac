"""What people hold: `Sandbox`, and `AsyncSandbox` for event loops. Both are one piece of code; the first is made of the second."""

import base64
import functools
import inspect
import io
import os
import posixpath
import signal as signals
import socket
import struct
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from ..errors import Conflict, Invalid, LayerError, NotFound, TimedOut
from .archive import Content, as_file, members
from .blueprint import Blueprint
from .client import Client, Connection, async_client, blocking_client, run_blocking, to_error
from .once import channel as channel_of
from .wire import ERROR, PAYLOAD_MAX, RESULT, STARTED, STDERR, STDOUT, Kind

List = list  # inside the classes `list` is a method
SHAPE = {entry.name for entry in fields(Blueprint)}


class Output(bytes):
    """What a command printed: bytes that also compare with text."""

    @property
    def text(self) -> str:
        """Decoded; what is not UTF-8 is replaced."""
        return self.decode("utf-8", "replace")

    def __eq__(self, other: object) -> bool:
        return (
            self.text == other
            if isinstance(other, str)
            else bytes.__eq__(self, other)
            if isinstance(other, bytes)
            else NotImplemented
        )

    __hash__ = bytes.__hash__

    def __contains__(self, item: object) -> bool:
        return item in self.text if isinstance(item, str) else bytes.__contains__(self, item)  # type: ignore[operator]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Result:
    """How a command ended. A negative exit code is the signal that killed it."""

    exit_code: int
    stdout: Output
    stderr: Output
    duration: float
    truncated: bool = False
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_code == 0


@dataclass(frozen=True)
class Printed:
    """What a command in the background printed lately, and how it ended if it has."""

    pieces: tuple[tuple[str, bytes, float], ...]  # stdout or stderr, what, when
    lost: Mapping[str, int]  # bytes of each stream that came before and are not remembered
    over: bool
    exit_code: int | None
    error: str | None


@dataclass(frozen=True)
class Entry:
    """One file of a box."""

    name: str
    path: str
    type: str  # file, directory, link, other
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None
    leads: str | None = None  # of a link that leads somewhere: the path there, and its mode
    leads_mode: int | None = None
    owner: str = ""
    group: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)  # those named `user.`


@dataclass(frozen=True)
class Snapshot:
    """What was kept of a box; `Sandbox.create(snapshot=snapshot.id)` begins there."""

    id: str
    size: int = 0
    created: float = 0
    parent: str | None = None
    memory: bool = False


@dataclass(frozen=True)
class FileEvent:
    """A change below a watched directory."""

    type: str  # create, modify, remove, move, attributes
    path: str
    mask: int = 0  # as inotify says it


def _pieces(data: bytes, kind: int = Kind.INPUT) -> list[tuple[int, bytes]]:
    return [(kind, data[at : at + PAYLOAD_MAX]) for at in range(0, len(data), PAYLOAD_MAX)]


class AsyncProcess:
    """A command that runs in the background; it goes on when nobody follows it."""

    def __init__(self, client: Client, box: str, id: int, pid: int, attached: Connection | None = None) -> None:
        self._client, self._box, self.id, self.pid = client, box, id, pid
        self._connection, self._attached = attached, attached is not None
        self._result: Result | None = None
        self._parts: dict[int, list[bytes]] = {STDOUT: [], STDERR: []}

    async def _follow(self) -> Connection:
        if self._connection is None:
            self._connection = await self._client.take()
            await self._connection.begin({"do": "follow", "box": self._box, "id": self.id})
        return self._connection

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """("stdout" or "stderr", bytes) as it comes, until the command ends."""
        connection = await self._follow()
        while self._result is None:
            kind, payload = await connection.receive()
            if kind in self._parts:
                if not self._attached:
                    self._parts[kind].append(payload)
                yield ("stdout" if kind == STDOUT else "stderr"), payload
            elif kind == RESULT or kind == ERROR:
                self._finish(kind, payload)

    def _finish(self, kind: int, payload: bytes) -> None:
        import json

        assert self._connection is not None
        self._client.give(self._connection)
        if kind == ERROR:
            raise to_error(payload)
        self._result = _result(json.loads(payload), self._parts)

    async def wait(self) -> Result:
        """How it ended; the output is what was printed since it was followed, and a little of before."""
        async for _ in self.output():
            pass
        assert self._result is not None
        return self._result

    async def write(self, data: bytes) -> None:
        """To its stdin, or its terminal."""
        await (await self._follow()).send(*_pieces(data))

    async def close_stdin(self) -> None:
        """No more input."""
        await (await self._follow()).send((Kind.INPUT_END, b""))

    async def resize(self, rows: int, columns: int) -> None:
        """The size of its terminal."""
        await (await self._follow()).send((Kind.RESIZE, struct.pack("<II", rows, columns)))

    async def signal(self, number: int = signals.SIGTERM) -> None:
        """Send a signal to it and its group."""
        await self._signal(number, False)

    async def kill(self) -> None:
        """End it and all that came of it."""
        await self._signal(signals.SIGKILL, True)

    async def _signal(self, number: int, tree: bool) -> None:
        if self._attached and self._connection is not None:
            await self._connection.send((Kind.SIGNAL, struct.pack("<iI", number, tree)))
        else:
            request = {"do": "signal", "box": self._box, "id": self.id, "signal": int(number), "tree": tree}
            await self._client.call(request)


class AsyncWriting:
    """A file on its way into a box, as fast as the box takes it."""

    def __init__(self, client: Client, connection: Connection) -> None:
        self._client, self._connection = client, connection

    async def send(self, data: bytes) -> None:
        """A piece of it."""
        await self._connection.send(*_pieces(data))

    async def end(self) -> int:
        """All of it was sent; its size, or what went wrong on the way."""
        try:
            await self._connection.send((Kind.INPUT_END, b""))
            size: int = await self._connection.end()
        except BaseException:
            self._connection.close()
            raise
        self._client.give(self._connection)
        return size

    async def cancel(self) -> None:
        """Leave it half written."""
        self._connection.close()


class AsyncInput:
    """Input for a command, piece by piece, as it takes it."""

    def __init__(self, client: Client, request: dict[str, Any]) -> None:
        self._client, self._request = client, request
        self._connection: Connection | None = None

    async def send(self, data: bytes) -> None:
        """A piece of it."""
        if self._connection is None:
            self._connection = await self._client.take()
            await self._connection.begin(self._request)
        await self._connection.send(*_pieces(data))

    async def end(self) -> None:
        """All of it was sent; returns when the command has taken it."""
        await self.send(b"")
        assert self._connection is not None
        try:
            await self._connection.send((Kind.INPUT_END, b""))
            await self._connection.end()
        except BaseException:
            self._connection.close()
            raise
        self._client.give(self._connection)

    async def cancel(self) -> None:
        """Send no more."""
        if self._connection is not None:
            self._connection.close()


class AsyncFollowing:
    """A command as one that came to it hears it: how it began, what it prints, how it ended. It goes on when this is left."""

    def __init__(self, client: Client, connection: Connection) -> None:
        self._client, self._connection = client, connection
        self._over = False

    async def next(self) -> list[tuple[int, bytes]]:
        """What came: (STARTED, its process), (STDOUT or STDERR, bytes), at last (RESULT, how it ended) or (ERROR, why), both JSON."""
        frames = await self._connection.some()
        if frames[-1][0] in (RESULT, ERROR):
            self._over = True
            self._client.give(self._connection)
        return frames

    async def leave(self) -> None:
        """Hear no more of it."""
        if not self._over:
            self._over = True
            self._connection.close()


class AsyncPort:
    """A connection to a TCP port of the box."""

    def __init__(self, client: Client, connection: Connection) -> None:
        self._client, self._connection = client, connection
        self._ended = False

    async def send(self, data: bytes) -> None:
        """Bytes to the server in the box."""
        await self._connection.send(*_pieces(data))

    async def end(self) -> None:
        """No more from us."""
        await self._connection.send((Kind.INPUT_END, b""))

    async def receive(self) -> bytes:
        """What the server sent; b"" at its end."""
        while not self._ended:
            kind, payload = await self._connection.receive()
            if kind == STDOUT:
                return payload
            if kind == ERROR:
                raise to_error(payload)
            self._ended = kind == RESULT
        return b""

    async def close(self) -> None:
        """Hang up."""
        self._connection.close()


class AsyncFiles:
    """The files of a box, with the rights of its user (or `user="root"`). Every path is the box's own."""

    def __init__(self, client: Client, box: str) -> None:
        self._client, self._box = client, box

    async def _call(self, verb: str, path: str | os.PathLike[str], **more: Any) -> Any:
        return await self._client.call({"do": f"files.{verb}", "box": self._box, "path": os.fspath(path), **more})

    async def read(self, path: str, *, user: str | None = None, limit: int | None = None) -> bytes:
        """A whole file; LimitExceeded when it is larger than `limit`."""
        buffer = io.BytesIO()
        await self.read_into(path, buffer, user=user, limit=limit)
        return buffer.getvalue()

    async def read_into(
        self, path: str, target: IO[bytes], *, user: str | None = None, limit: int | None = None
    ) -> int:
        """A file into a file object; its size."""
        from ..errors import LimitExceeded

        size = 0

        def take(kind: int, payload: bytes) -> None:
            nonlocal size
            size += len(payload)
            if limit is not None and size > limit:
                raise TooLarge
            target.write(payload)

        class TooLarge(Exception):
            pass

        try:
            await self._client.call({"do": "files.read", "box": self._box, "path": path, "user": user}, on_frame=take)
        except TooLarge:
            raise LimitExceeded(f"{path!r} is larger than {limit} bytes") from None
        return size

    async def write(
        self,
        path: str,
        data: bytes | str | IO[bytes] | Content,
        *,
        mode: int = 0o644,
        append: bool = False,
        user: str | None = None,
    ) -> int:
        """Write a file, its directories made; the bytes written."""
        request = {"do": "files.write", "box": self._box, "path": path, "mode": mode, "append": append, "user": user}
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes | bytearray | memoryview):
            return await self._client.call(request, *_pieces(bytes(data)), (Kind.INPUT_END, b""))
        connection = await self._client.take()
        try:
            await connection.begin(request)
            while piece := data.read(1 << 20):
                await connection.send(*_pieces(piece))
            await connection.send((Kind.INPUT_END, b""))
            size = await connection.end()
        except LayerError:
            connection.close()
            raise
        except BaseException:
            connection.close()
            raise
        self._client.give(connection)
        return size

    async def open(
        self,
        path: str,
        *,
        mode: int = 0o644,
        user: str | None = None,
        owner: str | None = None,
        attributes: Mapping[str, str] | None = None,
        prefix: str = "",
    ) -> "AsyncWriting":
        """Begin to write a file, its directories made; what is made belongs to `owner`.

        At its end it has these `attributes` (named `user.`…) and no other below `prefix`.
        """
        request = {
            "do": "files.write", "box": self._box, "path": path, "mode": mode, "user": user, "owner": owner,
            "attributes": None if attributes is None else dict(attributes), "prefix": prefix,
        }  # fmt: skip
        connection = await self._client.take()
        try:
            await connection.begin(request)
        except BaseException:
            connection.close()
            raise
        return AsyncWriting(self._client, connection)

    async def pieces(
        self, path: str, *, user: str | None = None, part: tuple[int, int] | None = None
    ) -> AsyncIterator[bytes]:
        """A file piece by piece, no faster than they are taken; or a `part` of it, (offset, bytes)."""
        connection = await self._client.take()
        over = False
        try:
            await connection.begin({"do": "files.read", "box": self._box, "path": path, "user": user, "part": part})
            while not over:
                kind, payload = await connection.receive()
                over = kind in (RESULT, ERROR)
                if kind == ERROR:
                    raise to_error(payload)
                if kind == STDOUT:
                    yield payload
        finally:
            self._client.give(connection) if over else connection.close()

    async def list(self, path: str = "/home/user", *, depth: int = 1, user: str | None = None) -> list[Entry]:
        """What is in a directory, `depth` levels deep."""
        return [_entry(found, path) for found in await self._call("list", path, depth=depth, user=user)]

    async def stat(self, path: str, *, user: str | None = None) -> Entry:
        """One entry; a link is not followed."""
        return _entry(await self._call("stat", path, user=user), "")

    async def exists(self, path: str) -> bool:
        """Whether there is something at `path`."""
        try:
            await self._call("stat", path)
        except NotFound:
            return False
        return True

    async def move(self, path: str, to: str, *, user: str | None = None, owner: str | None = None) -> None:
        """Rename; what was at `to` is replaced. Directories that are made for it belong to `owner`."""
        await self._call("move", path, to=to, user=user, owner=owner)

    async def remove(self, path: str, *, user: str | None = None) -> None:
        """Remove a file, or a directory with all in it."""
        await self._call("remove", path, user=user)

    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None, owner: str | None = None) -> None:
        """Make a directory, and those above it; they belong to `owner`."""
        await self._call("mkdir", path, mode=mode, user=user, owner=owner)

    async def link(self, target: str, path: str, *, user: str | None = None) -> None:
        """Make a symbolic link at `path`."""
        await self._call("link", path, target=target, user=user)

    async def chmod(self, path: str, mode: int, *, user: str | None = None) -> None:
        """Set the permissions."""
        await self._call("chmod", path, mode=mode, user=user)

    async def watch(self, path: str, *, recursive: bool = False, user: str | None = None) -> AsyncIterator[FileEvent]:
        """Changes below a directory, as they happen; the first step of the iteration returns when the watch stands."""
        connection = await self._client.take()
        try:
            await connection.begin(
                {"do": "files.watch", "box": self._box, "path": path, "recursive": recursive, "user": user}
            )
            while True:
                kind, payload = await connection.receive()
                if kind == ERROR:
                    raise to_error(payload)
                if kind == RESULT:
                    return
                if kind == STARTED:
                    yield FileEvent("ready", path)
                if kind == Kind.EVENT:
                    mask = int.from_bytes(payload[:4], "little")
                    name = payload[4:].rstrip(b"\0").decode("utf-8", "surrogateescape")
                    if found := next((label for bits, label in MASKS if mask & bits), None):
                        yield FileEvent(found, posixpath.join(path, name), mask)
        finally:
            connection.close()

    async def gather(
        self, path: str, *, recursive: bool = False, user: str | None = None, notes: Mapping[str, Any] | None = None
    ) -> str:
        """Let the host gather changes below a directory; the name under which they are asked for, whoever asks."""
        more = {"recursive": recursive, "user": user, "notes": dict(notes or {})}
        name: str = await self._call("gather", path, **more)
        return name

    async def gathered(self, name: str) -> dict[str, Any]:
        """What was gathered since this was asked last: `events`, pairs of inotify's mask and a path below `path`, with its `notes`."""
        found: dict[str, Any] = await self._client.call({"do": "files.gathered", "box": self._box, "name": name})
        return found

    async def gather_no_more(self, name: str) -> None:
        """End it."""
        await self._client.call({"do": "files.gather_no_more", "box": self._box, "name": name})

    async def upload(self, local: str | os.PathLike[str], path: str, *, user: str | None = None) -> int:
        """A file or a tree of the host's into the box; how many files."""
        source = Path(local)
        if source.is_file():
            with open(source, "rb") as file:
                await self.write(path, file, mode=source.stat().st_mode & 0o777, user=user)
            return 1
        if not source.is_dir():
            raise NotFound(f"{str(source)!r} is not a file or directory")
        count = 0
        for at, directories, names in os.walk(source):
            relative = Path(at).relative_to(source)
            for name in names + [name for name in directories if Path(at, name).is_symlink()]:
                here, there = (
                    Path(at, name),
                    posixpath.join(path, relative.as_posix(), name)
                    if str(relative) != "."
                    else posixpath.join(path, name),
                )
                if here.is_symlink():
                    await self.link(os.readlink(here), there, user=user)
                elif here.is_file():
                    with open(here, "rb") as file:
                        await self.write(there, file, mode=here.stat().st_mode & 0o777, user=user)
                    count += 1
            if not names and not directories and str(relative) != ".":
                await self._mkdirs(posixpath.join(path, relative.as_posix()), user)
        return count

    async def _mkdirs(self, path: str, user: str | None) -> None:
        try:
            await self.mkdir(path, user=user)
        except Conflict:
            pass

    async def download(
        self, path: str, local: str | os.PathLike[str], *, user: str | None = None, limit: int = 8 << 30
    ) -> int:
        """A file or a tree of the box's to the host; how many files. Links that lead out of the tree are left out."""
        target, found = Path(local), await self.stat(path, user=user)
        if found.type != "directory":
            with open(target, "wb") as file:
                await self.read_into(path, file, user=user, limit=limit)
            return 1
        target.mkdir(parents=True, exist_ok=True)
        count, links = 0, []
        for entry in await self.list(path, depth=100, user=user):
            relative = posixpath.relpath(entry.path, path)
            here = _inside(target, relative)
            if entry.type == "directory":
                here.mkdir(exist_ok=True)
            elif entry.type == "file":
                fd = os.open(here, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, entry.mode & 0o777)
                with os.fdopen(fd, "wb") as file:
                    limit -= await self.read_into(entry.path, file, user=user, limit=limit)
                count += 1
            elif entry.type == "link" and entry.target and not entry.target.startswith("/"):
                links.append((here, relative, entry.target))
        for here, relative, leads in links:  # last, so that nothing above was written through one
            if not posixpath.normpath(posixpath.join(posixpath.dirname(relative), leads)).startswith(".."):
                here.unlink(missing_ok=True)
                here.symlink_to(leads)
        return count

    async def upload_archive(self, archive: bytes | IO[bytes], path: str, *, user: str | None = None) -> int:
        """Unpack a tar or zip below `path`; how many files. A hostile archive is refused, and nothing it holds lands elsewhere."""
        source, size = as_file(archive)
        count = 0
        for member in members(source, size):
            there = posixpath.join(path, member.path)
            if member.type == "directory":
                await self._mkdirs(there, user)
            elif member.type == "link":
                await self.link(member.target, there, user=user)
            elif member.content is not None:
                await self.write(there, member.content, mode=member.mode, user=user)
                count += 1
        return count

    async def download_archive(self, path: str, *, user: str | None = None) -> bytes:
        """A directory as a gzipped tar."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for entry in await self.list(path, depth=100, user=user):
                info = tarfile.TarInfo(posixpath.relpath(entry.path, path))
                info.mode, info.mtime = entry.mode, int(entry.mtime)
                if entry.type == "directory":
                    info.type = tarfile.DIRTYPE
                    tar.addfile(info)
                elif entry.type == "link":
                    info.type, info.linkname = tarfile.SYMTYPE, entry.target or ""
                    tar.addfile(info)
                elif entry.type == "file":
                    content = await self.read(entry.path, user=user)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        return buffer.getvalue()


MASKS = (
    (0x100, "create"),
    (0x200, "remove"),
    (0x400, "remove"),
    (0x8, "modify"),
    (0x40, "move"),
    (0x80, "move"),
    (0x800, "move"),
    (0x2, "modify"),
    (0x4, "attributes"),
)


def _inside(target: Path, relative: str) -> Path:
    if relative.startswith(("/", "..")) or "\0" in relative or any(part in ("", "..") for part in relative.split("/")):
        raise Invalid(f"the box names a file {relative!r}")
    return target / relative


def _entry(found: dict[str, Any], directory: str) -> Entry:
    path = posixpath.join(directory, found["path"]) if directory else found["path"]
    return Entry(
        posixpath.basename(path),
        path,
        *(found[key] for key in ("type", "size", "mode", "uid", "gid", "mtime", "target")),
        *(found[key] for key in ("leads", "leads_mode", "owner", "group", "attributes")),
    )


def _result(end: dict[str, Any], parts: dict[int, list[bytes]]) -> Result:
    stdout, stderr = (Output(b"".join(parts[kind])) for kind in (STDOUT, STDERR))
    return Result(end["exit_code"], stdout, stderr, end["duration"], end["truncated"], end["usage"])


class AsyncSandbox:
    """A disposable computer. Ephemeral unless it has a name: an unnamed box ends with this process."""

    _client_of: Callable[[], Client] = staticmethod(async_client)

    def __init__(self, client: Client, described: Mapping[str, Any]) -> None:
        self._client = client
        self.id: str = described["id"]
        self.name: str | None = described["name"]
        self.tier: str = described["tier"]
        self.files = AsyncFiles(client, self.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.removeprefix('_')} {self.name or self.id} {self.tier}>"

    # ---- life ----

    @classmethod
    async def create(
        cls,
        tier: str | None = None,
        *,
        name: str | None = None,
        snapshot: "str | Snapshot | None" = None,
        blueprint: Mapping[str, Any] | Blueprint | None = None,
        secrets: Mapping[str, str] | None = None,
        record: str | None = None,
        replay: str | None = None,
        warm: bool = True,
        labels: Mapping[str, str] | None = None,
        token: str | None = None,
        wait: float | None = None,
        life: Mapping[str, Any] | None = None,
        progress: Callable[[str], Any] | None = None,
        **shape: Any,
    ) -> "AsyncSandbox":
        """Make a box and start it. `shape` is what a blueprint holds: memory="256M", pids=64, disk="1G", cpu=0.5, egress=[…], env={…}, …

        Its `life` is {"seconds": 300, "then": "kill" or "pause", "wakes": True}: the host sees to it, whoever else is there.
        """
        if unknown := sorted(set(shape) - SHAPE):
            raise Invalid(f"a box has no {unknown[0]!r}", hint="it has " + ", ".join(sorted(SHAPE)))
        given = blueprint.plain() if isinstance(blueprint, Blueprint) else dict(blueprint or {})
        given.pop("secrets", None)
        given |= {key: value for key, value in (shape | {"tier": tier}).items() if value is not None}
        Blueprint.of(given)  # what is wrong is said here, before anything is asked of the host
        client = cls._client_of()
        request = {
            "do": "create",
            "blueprint": given,
            "session": client.session,
            "name": name,
            "snapshot": snapshot.id if isinstance(snapshot, Snapshot) else snapshot,
            "secrets": dict(secrets) if secrets else None,
            "warm": warm,
            "labels": dict(labels) if labels else None,
            "token": token,
            "wait": wait,
            "life": dict(life) if life else None,
            "record": record,
            "replay": replay,
        }
        return cls(client, await client.call(request, say=progress or (lambda line: None)))

    @classmethod
    async def connect(cls, box: str) -> "AsyncSandbox":
        """A box by its id or name."""
        client = cls._client_of()
        return cls(client, await client.call({"do": "get", "box": box}))

    @classmethod
    async def list(cls, *, labels: Mapping[str, str] | None = None) -> "list[AsyncSandbox]":
        """Every box of this host, or those that have all of these labels."""
        client = cls._client_of()
        request = {"do": "list", "labels": dict(labels) if labels else None}
        return [cls(client, found) for found in await client.call(request)]

    @classmethod
    async def capabilities(cls, tier: str) -> dict[str, Any]:
        """What boxes of a tier can do on this host; Unavailable, with what to install, when it does not work here."""
        return await cls._client_of().call({"do": "capabilities", "tier": tier})

    async def _do(self, verb: str, **more: Any) -> Any:
        return await self._client.call({"do": verb, "box": self.id, **more})

    async def info(self) -> dict[str, Any]:
        """What it is and the state it is in."""
        return await self._do("get")

    async def kill(self) -> None:
        """End it, with all its processes and files; asking again is fine."""
        try:
            await self._do("kill")
        except NotFound:
            pass

    async def pause(self) -> None:
        """Freeze it; its memory stays."""
        await self._do("pause")

    async def resume(self, life: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Let a paused or suspended box go on, for as long as its life says; what it is then, with "stood": whether it stood still."""
        return await self._do("resume", life=dict(life) if life else None)

    async def rest(self, memory: bool = True) -> dict[str, Any]:
        """Let it stand still: its memory on disk where the tier can keep it there, else where it is; without `memory` only its files stay."""
        return await self._do("rest", memory=memory)

    async def change(
        self, life: Mapping[str, Any] | None = None, labels: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Give it another life (with "shorten": False it never ends earlier than it would have) or other labels."""
        return await self._do("change", life=None if life is None else dict(life), labels=labels and dict(labels))

    async def suspend(self, memory: bool = True) -> dict[str, Any]:
        """Let go of its memory: kept on disk where it is wanted and the tier can ({"memory": True}), else its processes end and its files stay."""
        return await self._do("suspend", memory=memory)

    async def snapshot(self, *, memory: bool = False, holder: str = "") -> Snapshot:
        """Keep what it holds, by content: its files, and with `memory` its processes too (tiers microvm and vm).

        Equal content is one snapshot; it stays until every `holder` has let go of it.
        """
        return Snapshot(**await self._do("snapshot", memory=memory, holder=holder))

    async def fork(
        self,
        count: int = 1,
        *,
        names: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        token: str | None = None,
    ) -> "List[AsyncSandbox]":
        """`count` boxes that begin where this one is; it goes on. Named ones stay, others end with this process.

        They have its labels and no channel, unless `labels` (and a `token`) of their own are given.
        """
        more = {} if labels is None else {"labels": dict(labels), "token": token}
        found = await self._do("fork", count=count, session=self._client.session, names=[*names], **more)
        return [type(self)(self._client, described) for described in found]

    async def __aenter__(self) -> "AsyncSandbox":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    # ---- commands ----

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | str | None = None,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tag: str | None = None,
        on_stdout: Callable[[bytes], Any] | None = None,
        on_stderr: Callable[[bytes], Any] | None = None,
    ) -> Result:
        """Run a command (a list, or a text for the shell) to its end. One that exits non-zero is a result; one that can't run is an error.

        By its `tag` others can `signal` it meanwhile.
        """
        request = {
            "do": "exec",
            "box": self.id,
            "argv": command if isinstance(command, str) else list(command),
            "stdin": bool(stdin),
            "timeout": timeout,
            "cwd": cwd,
            "env": dict(env) if env else None,
            "user": user,
            **({} if tag is None else {"notes": {"tag": tag}}),
        }
        return await self._collect(request, stdin, on_stdout, on_stderr)

    async def python(
        self,
        code: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes | str | None = None,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        on_stdout: Callable[[bytes], Any] | None = None,
        on_stderr: Callable[[bytes], Any] | None = None,
    ) -> Result:
        """Run Python code, as `python3 -c` would, through the zygote where the tier has one."""
        request = {
            "do": "python",
            "box": self.id,
            "code": code,
            "args": list(args),
            "stdin": bool(stdin),
            "timeout": timeout,
            "cwd": cwd,
            "env": dict(env) if env else None,
            "user": user,
        }
        return await self._collect(request, stdin, on_stdout, on_stderr)

    async def _collect(
        self,
        request: dict[str, Any],
        stdin: bytes | str | None,
        on_stdout: Callable[[bytes], Any] | None,
        on_stderr: Callable[[bytes], Any] | None,
    ) -> Result:
        parts: dict[int, list[bytes]] = {STDOUT: [], STDERR: []}
        callbacks = {STDOUT: on_stdout, STDERR: on_stderr}

        def on_frame(kind: int, payload: bytes) -> None:
            if kind in parts:
                parts[kind].append(payload)
                if callback := callbacks[kind]:
                    callback(payload)

        if isinstance(stdin, str):
            stdin = stdin.encode()
        more = (
            [*_pieces(stdin), (int(Kind.INPUT_END), b"")]
            if stdin
            else [(int(Kind.INPUT_END), b"")]
            if request["do"] == "python"
            else []
        )
        try:
            return _result(await self._client.call(request, *more, on_frame=on_frame), parts)
        except TimedOut as error:  # what it printed until then is often why
            error.details |= {"stdout": Output(b"".join(parts[STDOUT])), "stderr": Output(b"".join(parts[STDERR]))}
            raise

    async def start(
        self,
        command: str | Sequence[str],
        *,
        pty: tuple[int, int] | None = None,
        stdin: bool = False,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        attached: bool = False,
    ) -> AsyncProcess:
        """Start a command in the background, with a terminal of (rows, columns) if asked.

        It goes on when nobody follows it; one that is `attached` ends with its caller instead, and what it prints goes to `output` alone.
        """
        request = {
            "argv": command if isinstance(command, str) else list(command),
            "background": not attached,
            "pty": pty,
            "stdin": stdin or bool(pty),
            "timeout": timeout,
            "cwd": cwd,
            "env": dict(env) if env else None,
            "user": user,
        }
        if attached:
            connection = await self._client.take()
            await connection.begin({"do": "exec", "box": self.id, **request})
            return AsyncProcess(self._client, self.id, 0, 0, connection)
        started = await self._do("exec", **request)
        return AsyncProcess(self._client, self.id, started["id"], started["pid"])

    async def follow_start(self, argv: Sequence[str], **given: Any) -> AsyncFollowing:
        """Start a command that goes on when it is not followed, and follow it, in one request; nothing that it prints is remembered."""
        return await self._following({"do": "exec", "argv": list(argv), "background": True, "follow": True, **given})

    async def follow_process(self, pid: int | None = None, tag: str | None = None) -> AsyncFollowing:
        """Follow a command that runs, by its process or tag, from now on; of one that ended just now, how it ended."""
        return await self._following({"do": "follow", "pid": pid, "tag": tag, "fresh": True})

    async def _following(self, request: dict[str, Any]) -> AsyncFollowing:
        connection = await self._client.take()
        try:
            await connection.begin({**request, "box": self.id})
        except BaseException:
            connection.close()
            raise
        return AsyncFollowing(self._client, connection)

    async def input(
        self, pid: int | None = None, tag: str | None = None, *, terminal: bool | None = None, close: bool = False
    ) -> AsyncInput:
        """Input for a command that others may follow, by its process or tag; with `close`, the end of its input."""
        request = {"do": "input", "box": self.id, "pid": pid, "tag": tag, "terminal": terminal, "close": close}
        return AsyncInput(self._client, request)

    async def signal(self, number: int, pid: int | None = None, tag: str | None = None, *, tree: bool = False) -> None:
        """Send a signal to a command, by its process or tag; with `tree` to all that came of it."""
        await self._do("signal", signal=int(number), pid=pid, tag=tag, tree=tree)

    async def resize(self, rows: int, columns: int, pid: int | None = None, tag: str | None = None) -> None:
        """The size of a command's terminal."""
        await self._do("resize", rows=rows, columns=columns, pid=pid, tag=tag)

    async def who(self, user: str) -> dict[str, Any]:
        """A user of the box: uid, gid, name, home."""
        return await self._do("who", user=user)

    async def processes(self) -> "List[dict[str, Any]]":
        """The commands that run now."""
        return await self._do("processes")

    async def attach(self, id: int) -> AsyncProcess:
        """A running command by its id, from whichever process it was started."""
        for found in await self.processes():
            if found["id"] == id:
                return AsyncProcess(self._client, self.id, id, found["pid"])
        raise NotFound(f"box {self.id!r} runs no command {id}")

    async def printed(self, id: int, stdout: int = 0, stderr: int = 0) -> "Printed":
        """What a command in the background printed after so many bytes of each stream, and how it ended; never waits, wakes nothing."""
        parts: List[tuple[str, bytes]] = []
        request = {"do": "output", "box": self.id, "id": id, "stdout": stdout, "stderr": stderr}
        end = await self._client.call(
            request, on_frame=lambda kind, data: parts.append(("stdout" if kind == STDOUT else "stderr", data))
        )
        pieces = tuple((*part, at) for part, at in zip(parts, end["times"], strict=True))
        return Printed(pieces, end["lost"], end["over"], end["exit_code"], end["error"])

    # ---- ports and egress ----

    async def port(self, number: int) -> AsyncPort:
        """A connection to a TCP port that something in the box listens on."""
        connection = await self._client.take()
        await connection.begin({"do": "connect", "box": self.id, "port": number})
        kind, payload = await connection.receive()
        if kind == ERROR:
            self._client.give(connection)
            raise to_error(payload)
        return AsyncPort(self._client, connection)

    async def expose(self, number: int) -> tuple[str, int]:
        """An address of the host's loopback that leads to a port of the box; connecting wakes the box."""
        found = await self._do("expose", port=number)
        return found["host"], found["port"]

    async def channel(self) -> socket.socket:
        """The listener that programs of the box reach at LAYER_URL (set when it was created with a `token`), and nobody else can.

        Any process of the owner may ask for it, also after a restart; only one at a time should accept.
        """
        return channel_of(self._client.state, self.id)

    async def lend(self, secrets: Mapping[str, str]) -> None:
        """Say the values of its secrets again, after its host has started anew: a host keeps them nowhere. What it has open is cut."""
        await self._do("lend", secrets=dict(secrets))

    async def set_egress(self, rules: Sequence[str | Mapping[str, Any]]) -> None:
        """Other egress rules from now on."""
        await self._do("egress", rules=[rule if isinstance(rule, str) else dict(rule) for rule in rules])

    # ---- what happened ----

    async def metrics(self) -> dict[str, Any]:
        """CPU seconds, memory, processes, disk, network."""
        return await self._do("metrics")

    async def trace(self) -> "List[dict[str, Any]]":
        """Everything done to and by it, oldest first; also after its end."""
        return await self._do("trace")

    async def exchange(self, name: str, part: str) -> bytes:
        """What was said to a model, the `request`, or by it, the `answer`, in an exchange that the trace names; also after its end."""
        found = b""
        while piece := base64.b64decode(await self._do("exchange", name=name, part=part, offset=len(found))):
            found += piece
        return found

    async def trace_after(self, offset: int = 0) -> tuple["List[dict[str, Any]]", int]:
        """What its trace holds after an offset, also after its end, and the offset after that; never waits."""
        more = await self._do("trace.more", offset=offset, wait=0)
        return more["events"], more["offset"]

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Its trace as it grows, from the beginning until its end."""
        offset = 0
        while True:
            more = await self._do("trace.more", offset=offset)
            offset = more["offset"]
            for event in more["events"]:
                yield event
            if more["ended"] and not more["events"]:
                return

    async def changes(self) -> "List[dict[str, Any]]":
        """The files it has changed."""
        return await self._do("changes")


class AsyncImages:
    """The bases that boxes can be made of: OCI images, and what was built of steps. `Sandbox.create(base=NAME)` uses one."""

    _client_of: Callable[[], Client] = staticmethod(async_client)

    @classmethod
    async def _call(cls, verb: str, progress: Callable[[str], Any] | None = None, **request: Any) -> Any:
        return await cls._client_of().call({"do": verb, **request}, say=progress or (lambda line: None))

    @classmethod
    async def list(cls) -> "List[dict[str, Any]]":
        """Every image that is here."""
        return await cls._call("images")

    @classmethod
    async def import_archive(
        cls, path: str | os.PathLike[str], name: str, *, progress: Callable[[str], Any] | None = None
    ) -> dict[str, Any]:
        """An OCI or docker archive of the host's, known as `name` from now on."""
        return await cls._call("image.import", progress, path=os.path.abspath(path), name=name)

    @classmethod
    async def pull(
        cls, reference: str, *, name: str | None = None, tls: bool = True, progress: Callable[[str], Any] | None = None
    ) -> dict[str, Any]:
        """An image from a registry, by skopeo."""
        return await cls._call("image.pull", progress, reference=reference, name=name, tls=tls)

    @classmethod
    async def build(
        cls,
        name: str,
        steps: Sequence[Mapping[str, Any]],
        *,
        base: str = "debian",
        egress: Sequence[str | Mapping[str, Any]] = (),
        cache: bool = True,
        progress: Callable[[str], Any] | None = None,
    ) -> dict[str, Any]:
        """An image from a base and steps ({"apt": […]}, {"pip": […]}, {"npm": […]}, {"files": {…}}, {"run": …}), each run in a box."""
        rules = [rule if isinstance(rule, str) else dict(rule) for rule in egress]
        return await cls._call(
            "image.build",
            progress,
            name=name,
            base=base,
            steps=[dict(step) for step in steps],
            egress=rules,
            cache=cache,
        )

    @classmethod
    async def export(
        cls,
        snapshot: "str | Snapshot",
        path: str | os.PathLike[str],
        *,
        name: str = "latest",
        changes_only: bool = False,
    ) -> str:
        """A snapshot as an OCI image archive, or only what it changed of its base; its digest."""
        id = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        place = os.path.abspath(path)
        return await cls._call("image.export", snapshot=id, path=place, name=name, changes_only=changes_only)

    @classmethod
    async def remove(cls, name: str) -> None:
        """Forget an image; boxes made of it go on."""
        await cls._call("image.remove", name=name)


class _BlockingImages(AsyncImages):
    _client_of = staticmethod(blocking_client)


class _BlockingCore(AsyncSandbox):
    _client_of = staticmethod(blocking_client)


# ---- the bridge: blocking twins of the classes above ----

_twins: dict[type, type] = {}


def _twin(value: Any) -> Any:
    if isinstance(value, list):
        return [_twin(item) for item in value]
    if twin := _twins.get(type(value)):
        made: Any = object.__new__(twin)
        made._core = value
        return made
    return value


def _blocking(core: type, name: str) -> Any:
    """A class with the same methods as `core`, each of which blocks until it is done."""

    def method(function: Any, of_class: bool) -> Any:
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            def generate(self: Any, *args: Any, **given: Any) -> Iterator[Any]:
                steps = function(self._core, *args, **given)
                try:
                    while True:
                        try:
                            yield run_blocking(steps.__anext__())
                        except StopAsyncIteration:
                            return
                finally:
                    run_blocking(steps.aclose())

            return generate

        @functools.wraps(function)
        def call(self: Any, *args: Any, **given: Any) -> Any:
            return _twin(run_blocking(function(core if of_class else self._core, *args, **given)))

        return classmethod(call) if of_class else call

    body: dict[str, Any] = {
        "__doc__": core.__doc__,
        "__module__": __name__,
        "__repr__": lambda self: repr(self._core).replace("BlockingCore", name),
    }
    for key in dir(core):
        static = inspect.getattr_static(core, key)
        of_class = isinstance(static, classmethod)
        function = static.__func__ if of_class else static
        if not key.startswith("_") and (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            body[key] = method(function, of_class)
    body["__getattr__"] = lambda self, key: (
        _twin(getattr(object.__getattribute__(self, "_core"), key)) if key != "_core" else None
    )
    if hasattr(core, "__aenter__"):
        body["__enter__"] = lambda self: self
        body["__exit__"] = lambda self, *_: self.kill()
    twin = type(name, (), body)
    _twins[core] = twin
    return twin


Process = _blocking(AsyncProcess, "Process")
Port = _blocking(AsyncPort, "Port")
Writing = _blocking(AsyncWriting, "Writing")
Input = _blocking(AsyncInput, "Input")
Following = _blocking(AsyncFollowing, "Following")
Files = _blocking(AsyncFiles, "Files")
Sandbox = _blocking(_BlockingCore, "Sandbox")
Images = _blocking(_BlockingImages, "Images")
