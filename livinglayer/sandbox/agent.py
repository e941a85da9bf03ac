"""The host's side of a guest agent: frames out, frames in, each to the conversation it belongs to."""

import asyncio
import errno
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import Conflict, Corrupt, Denied, Invalid, LayerError, LimitExceeded, NotFound, Unavailable
from .wire import CREDIT, DONE, HEAD, PARENTS, READY, STARTED, STDERR, STDOUT, WINDOW_START, Frames, Kind, frame, text

ENTRY = struct.Struct("<IIIQq")
GATHERED, GATHERED_BYTES = 200_000, 64 << 20  # most that one answer of a guest's may have: frames, bytes
EXIT_STATUS = struct.Struct("<iQQQ")
WINDOW = 6  # Kind.WINDOW as a plain number, for the hot path
OnFrame = Callable[[int, bytes], None]

ERRORS: dict[int, type[LayerError]] = {
    errno.ENOENT: NotFound,
    errno.EACCES: Denied,
    errno.EPERM: Denied,
    errno.EROFS: Denied,
    errno.EEXIST: Conflict,
    errno.EDQUOT: LimitExceeded,
    errno.ENOSPC: LimitExceeded,
    errno.EMFILE: LimitExceeded,
    errno.ENFILE: LimitExceeded,
    errno.EAGAIN: LimitExceeded,
    errno.ENOMEM: LimitExceeded,
    errno.ECONNREFUSED: Unavailable,
}


def failure(payload: bytes) -> LayerError | None:
    """The error a DONE frame carries, or None when it says that all went well."""
    code = int.from_bytes(payload[:4], "little")
    number, where = code & 0xFFFF, code >> 16
    if not number:
        return None
    what = payload[4:].rstrip(b"\0").decode("utf-8", "replace")
    reason = os.strerror(number)
    if number == errno.ESHUTDOWN:
        return Conflict("the box has ended")
    if where == 2:
        if number == errno.ENOENT:
            hint = "check its name and PATH, or install it in the base"
            return NotFound(f"command {what!r} was not found in the box", hint, errno=number, of="command")
        kind = Denied if number == errno.EACCES else Invalid
        return kind(f"command {what!r} can't be run: {reason}", errno=number, of="command")
    if where == 1:
        return ERRORS.get(number, Invalid)(f"working directory {what!r}: {reason}", errno=number, of="directory")
    if where == 3:
        return NotFound(f"the box has no user {what!r}", hint="see its /etc/passwd", errno=number, of="user")
    return ERRORS.get(number, Invalid)(f"{what!r}: {reason}", errno=number, of="path")


@dataclass(frozen=True)
class Entry:
    """One file as the box has it."""

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
    attributes: dict[str, str] = field(default_factory=dict)  # those named `user.`


def parse_entry(payload: bytes) -> Entry:
    """An ENTRY frame; names are bytes to the kernel, so what is not UTF-8 is kept by surrogates."""
    if len(payload) < ENTRY.size:
        raise Corrupt("the box's agent broke its protocol: half an entry")
    mode, uid, gid, size, mtime = ENTRY.unpack_from(payload)
    path, _, rest = payload[ENTRY.size :].partition(b"\0")
    kind = {0o100000: "file", 0o040000: "directory", 0o120000: "link"}.get(mode & 0o170000, "other")
    target, _, rest = rest.partition(b"\0")
    leads_mode = int.from_bytes(rest[:4], "little")
    leads, owner, group, *marks = [part.decode("utf-8", "surrogateescape") for part in rest[4:].split(b"\0")] + [""] * 3
    return Entry(
        path.decode("utf-8", "surrogateescape"),
        kind,
        size,
        mode & 0o7777,
        uid,
        gid,
        mtime / 1e9,
        target.decode("utf-8", "surrogateescape") if kind == "link" else None,
        leads or None,
        leads_mode or None,
        owner or str(uid),
        group or str(gid),
        {name: value for name, value in zip(marks[::2], marks[1::2], strict=False) if name},
    )


class Batch:
    """While a packet with several frames of a guest's is taken, what they say to a client goes out in one piece."""

    def __init__(self) -> None:
        self.open = False
        self._then: list[Callable[[], None]] = []

    def then(self, act: Callable[[], None]) -> None:
        """What to do when all of them were taken."""
        self._then.append(act)

    def __enter__(self) -> None:
        self.open = True

    def __exit__(self, *_: object) -> None:
        self.open = False
        acts, self._then = self._then, []
        for act in acts:
            act()


batch = Batch()  # of the host's one loop


class Agent:
    """One connection to a guest agent. Everything in a box is asked of it; what it answers is data, never trusted to be well formed."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._loop = connection, asyncio.get_running_loop()
        self._packets = connection.type == socket.SOCK_SEQPACKET
        self._frames = Frames()
        self._talks: dict[int, OnFrame] = {}
        self._room: dict[int, int] = {}  # bytes that each conversation may still send us
        # not from 1: a box that outlived its host may still have conversations of that one's
        self._number = secrets.randbelow(1 << 30)
        self._waiting: deque[bytes] = deque()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.closed = False
        self.on_close: Callable[[], None] = lambda: None
        self._loop.add_reader(connection.fileno(), self._readable)

    def future(self) -> "asyncio.Future[None]":
        """Of its loop."""
        return self._loop.create_future()

    def fileno(self) -> int:
        """Of the host's end."""
        return self._socket.fileno()

    # ---- frames ----

    def open(self, on_frame: OnFrame) -> int:
        """A new conversation; its frames go to `on_frame` until `drop`."""
        self._number = self._number % 0x7FFFFFFF + 1
        self._talks[self._number] = on_frame
        self._room[self._number] = WINDOW_START
        return self._number

    def drop(self, number: int) -> None:
        """Nobody listens to this conversation any more."""
        self._talks.pop(number, None)
        self._room.pop(number, None)

    def send(self, kind: int, payload: bytes = b"", number: int = 0) -> None:
        """Send one frame, at once or when the guest has room."""
        if self.closed:
            raise Unavailable("the box has ended")
        if kind == WINDOW and number in self._room:
            self._room[number] += int.from_bytes(payload, "little")
        data = HEAD.pack(len(payload), number, kind) + payload
        if not self._waiting:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:  # whoever waits for an answer hears of it, once
                self._loop.call_soon(self.close)
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._waiting.append(data)

    @property
    def conversations(self) -> int:
        """How many are open: commands, reads, watches, connections."""
        return len(self._talks)

    @property
    def backlog(self) -> int:
        """Frames that the guest has not taken yet."""
        return len(self._waiting)

    def _writable(self) -> None:
        while self._waiting:
            try:
                sent = self._socket.send(self._waiting[0])
            except BlockingIOError:
                return
            except OSError:
                return self.close()
            if sent < len(self._waiting[0]):
                self._waiting[0] = self._waiting[0][sent:]
                return
            self._waiting.popleft()
        self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        for _ in range(64):  # then let others have the loop
            try:
                data = self._socket.recv(65536 + 12)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                return self.close()
            if not data:
                return self.close()
            if self._packets and len(data) >= 12:
                length, number, kind = HEAD.unpack_from(data)
                if len(data) <= 12 + length:
                    self._dispatch(number, kind, data[12 : 12 + length])
                    continue
                with batch:
                    at = 0
                    while len(data) - at >= 12 and not self.closed:
                        length, number, kind = HEAD.unpack_from(data, at)
                        self._dispatch(number, kind, data[at + 12 : at + 12 + length])
                        at += 12 + length
                continue
            try:
                for number, kind, payload in self._frames.feed(data):
                    self._dispatch(number, kind, payload)
            except ValueError:
                return self.close()
            if self.closed:
                return

    def _dispatch(self, number: int, kind: int, payload: bytes) -> None:
        talk = self._talks.get(number)
        if talk:
            if kind == STDOUT or kind == STDERR:
                self._room[number] -= len(payload)
                if self._room[number] < 0:  # a guest that ignores the window would fill the host's memory
                    return self.close()
            try:
                talk(kind, payload)
            except (struct.error, ValueError, OverflowError):  # half a frame, a status that no process can have
                self.close()
        elif number == 0 and not self.ready.done():
            if kind == READY:
                self.ready.set_result(None)
            elif kind == DONE:
                code = int.from_bytes(payload[:4], "little") & 0xFFFF
                step = payload[4:].rstrip(b"\0").decode("utf-8", "replace")
                failed: LayerError = Unavailable(
                    f"the box could not be set up: {step}: {os.strerror(code)}", hint="layer doctor"
                )
                if step.startswith("/") and code in (errno.EEXIST, errno.ENOTDIR, errno.ELOOP):
                    failed = Invalid(
                        f"files of its base are in the way of the mount at {step!r:.200}", hint="another path"
                    )
                self.ready.set_exception(failed)

    def close(self) -> None:
        """Hang up; every open conversation hears of it."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        if not self.ready.done():
            self.ready.set_exception(Unavailable("the box ended before it was ready", hint="layer doctor"))
            self.ready.exception()  # seen: nobody need await it
        end = (errno.ESHUTDOWN).to_bytes(4, "little") + b"the box has ended\0"
        for talk in list(self._talks.values()):
            talk(DONE, end)
        self._talks.clear()
        self._room.clear()
        self.on_close()

    # ---- conversations that end by themselves ----

    async def ask(self, kind: int, payload: bytes = b"", gather: int | None = None) -> list[bytes]:
        """One request and its DONE; the payloads of the frames of kind `gather` before it."""
        done: asyncio.Future[None] = self._loop.create_future()
        seen: list[bytes] = []
        total = 0

        def on_frame(kind: int, payload: bytes) -> None:
            nonlocal total
            if done.done():
                return
            if kind == gather:
                seen.append(payload)
                total += len(payload)
                if len(seen) > GATHERED or total > GATHERED_BYTES:
                    done.set_exception(LimitExceeded(f"the box answered with more than {GATHERED} entries"))
            elif kind in (DONE, Kind.PONG) and not done.done():
                if kind == DONE and (error := failure(payload)):
                    done.set_exception(error)
                else:
                    seen.append(payload) if kind == Kind.PONG else None
                    done.set_result(None)

        number = self.open(on_frame)
        try:
            self.send(kind, payload, number)
            await done
            return seen
        finally:
            self.drop(number)

    async def ping(self) -> None:
        """Returns when the agent has answered."""
        await self.ask(Kind.PING, os.urandom(8))

    async def set_clock(self, nanoseconds: int, hostname: str) -> None:
        """Tell a restored VM the time and its name, and give it fresh randomness."""
        await self.ask(Kind.CLOCK, nanoseconds.to_bytes(8, "little", signed=True) + text(hostname) + os.urandom(64))

    async def list(self, path: str, user: str = "", depth: int = 1) -> list[Entry]:
        """The entries below a directory."""
        return [
            parse_entry(entry)
            for entry in await self.ask(Kind.LIST, depth.to_bytes(4, "little") + text(user) + text(path), Kind.ENTRY)
        ]

    async def stat(self, path: str, user: str = "") -> Entry:
        """One entry; a link is not followed."""
        found = await self.ask(Kind.STAT, text(user) + text(path), Kind.ENTRY)
        if not found:
            raise Corrupt("the box's agent broke its protocol: no entry")
        return parse_entry(found[0])

    async def who(self, user: str) -> dict[str, Any]:
        """A user of the box: uid, gid, name, home."""
        (found,) = await self.ask(Kind.WHO, text(user), Kind.PERSON)
        name, home, *_ = found[8:].split(b"\0") + [b""]
        uid, gid = struct.unpack_from("<II", found)
        return {
            "uid": uid,
            "gid": gid,
            "name": name.decode("utf-8", "replace"),
            "home": home.decode("utf-8", "replace"),
        }

    async def move(self, source: str, target: str, user: str = "") -> None:
        await self.ask(Kind.MOVE, text(user) + text(source) + text(target))

    async def remove(self, path: str, user: str = "") -> None:
        await self.ask(Kind.REMOVE, text(user) + text(path))

    async def mkdir(self, path: str, mode: int = 0o755, user: str = "") -> None:
        await self.ask(Kind.MKDIR, mode.to_bytes(4, "little") + text(user) + text(path))

    async def link(self, target: str, path: str, user: str = "") -> None:
        await self.ask(Kind.LINK, text(user) + text(target) + text(path))

    async def chmod(self, path: str, mode: int, user: str = "") -> None:
        await self.ask(Kind.CHMOD, mode.to_bytes(4, "little") + text(user) + text(path))

    async def read(self, path: str, user: str = "", limit: int | None = None) -> bytes:
        """A whole file; LimitExceeded when it is larger than `limit`."""
        chunks: list[bytes] = []
        await self.read_into(path, chunks.append, user, limit)
        return b"".join(chunks)

    async def read_into(
        self, path: str, take: Callable[[bytes], Any], user: str = "", limit: int | None = None
    ) -> None:
        """Give a file to `take`, piece by piece."""
        done: asyncio.Future[None] = self._loop.create_future()
        total = 0

        def on_frame(kind: int, payload: bytes) -> None:
            nonlocal total
            if done.done():
                return
            if kind == STDOUT:
                total += len(payload)
                if limit is not None and total > limit:
                    done.set_exception(LimitExceeded(f"{path!r} is larger than {limit} bytes"))
                    self.send(Kind.CANCEL, b"", number)
                    return
                take(payload)
                self.send(Kind.WINDOW, len(payload).to_bytes(4, "little"), number)
            elif kind == DONE:
                error = failure(payload)
                done.set_exception(error) if error else done.set_result(None)

        number = self.open(on_frame)
        try:
            self.send(Kind.READ, text(user) + text(path), number)
            await done
        finally:
            self.drop(number)

    async def write(self, path: str, data: bytes, mode: int = 0o644, user: str = "", append: bool = False) -> None:
        """Write a whole file; its directories are made."""
        writing = Writing(self, path, mode, user, append)
        for at in range(0, len(data), 65536):
            await writing.send(data[at : at + 65536])
        await writing.end()


class Writing:
    """A file on its way into a box, in pieces, never more of it in flight than the agent takes."""

    def __init__(
        self, agent: Agent, path: str, mode: int, user: str, append: bool, attributes: Sequence[str] = ()
    ) -> None:
        self._agent = agent
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._credit, self._room = WINDOW_START, asyncio.Event()
        self._number = agent.open(self._on_frame)
        flags = PARENTS | (1 if append else 0)
        agent.send(
            Kind.WRITE,
            mode.to_bytes(4, "little") + flags.to_bytes(4, "little") + b"".join(map(text, (user, path, *attributes))),
            self._number,
        )

    def _on_frame(self, kind: int, payload: bytes) -> None:
        if kind == CREDIT:
            self._credit = min(WINDOW_START, self._credit + int.from_bytes(payload[:4], "little"))
            self._room.set()
        elif kind == DONE and not self._done.done():
            error = failure(payload)
            self._done.set_exception(error) if error else self._done.set_result(None)
            self._room.set()

    async def send(self, data: bytes) -> None:
        """One piece of at most 64 KiB."""
        while self._credit < len(data) and not self._done.done():
            self._room.clear()
            await self._room.wait()
        if self._done.done():
            self._agent.drop(self._number)
            await self._done
        self._credit -= len(data)
        self._agent.send(Kind.INPUT, data, self._number)

    def cancel(self) -> None:
        """Leave it half written."""
        self._agent.drop(self._number)
        if not self._agent.closed:
            self._agent.send(Kind.CANCEL, b"", self._number)

    async def end(self) -> None:
        """Close the file; raises what went wrong on the way."""
        try:
            if not self._done.done():
                self._agent.send(Kind.INPUT_END, b"", self._number)
            await self._done
        finally:
            self._agent.drop(self._number)


__all__ = ["STARTED", "Agent", "Entry", "Writing", "failure", "frame"]
