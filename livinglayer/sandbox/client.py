"""Talking to the host: a connection does one request at a time, blocking or not, and a host that is not there is started.

Everything above this file is written once, as coroutines. On a `BlockingWire` none of them ever waits for the event loop, so that
`run_blocking` can drive them to their end without one.
"""

import asyncio
import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .. import errors
from ..errors import LayerError, LimitExceeded, Unavailable
from ..settings import state_directory
from .wire import CALL, ERROR, HEAD, PROGRESS, REQUEST_MAX, RESULT, Frames, pieces

T = TypeVar("T")
MOST_EARLY = 256 << 10  # bytes that are read before somebody wants them
MOST_IDLE = 64  # connections that are kept for the next request
ERRORS: dict[str, type[LayerError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LayerError)
}


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that never really waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("a blocking call waited for an event loop")


class Wire(Protocol):
    """Bytes to and from the host."""

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes:
        """What has come; b"" when the host has hung up."""

    def stale(self) -> bool:
        """Whether an idle wire has been hung up on."""

    def close(self) -> None: ...


class BlockingWire:
    """A plain socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._early: deque[bytes] = deque()  # what came while we were sending
        self._reading = threading.Lock()

    async def send(self, data: bytes) -> None:
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT) if len(data) < 65536 else 0
        except BlockingIOError:  # the host has not taken all of what went before
            sent = 0
        if sent == len(data):
            return
        # A command may answer while it is fed: who only sends and never reads would wait for it, and it for them.
        left, poll = memoryview(data)[sent:], select.poll()
        while left:
            reads = self._reading.acquire(blocking=False)
            try:
                poll.register(self._socket, select.POLLOUT | (select.POLLIN if reads else 0))
                ((_, events),) = poll.poll()
                if reads and events & (select.POLLIN | select.POLLHUP):
                    if not (came := self._socket.recv(262144, socket.MSG_DONTWAIT)):
                        raise ConnectionResetError
                    self._early.append(came)
                if events & (select.POLLOUT | select.POLLERR):
                    left = left[self._socket.send(left[: 1 << 20], socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            finally:
                if reads:
                    self._reading.release()

    async def receive(self) -> bytes:
        with self._reading:
            return self._early.popleft() if self._early else self._socket.recv(262144)

    def stale(self) -> bool:
        return _has_ended(self._socket)

    def close(self) -> None:
        self._socket.close()


class AsyncWire(asyncio.Protocol):
    """The same on an event loop. What nobody takes is not read, so that the host holds what it comes from."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._loop = connection, asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._early: deque[bytes] = deque()
        self._size = 0
        self._paused = self._ended = self._full = False
        self._senders = 0
        self._reader: asyncio.Future[None] | None = None
        self._room: list[asyncio.Future[None]] = []

    def data_received(self, data: bytes) -> None:
        self._early.append(data)
        self._size += len(data)
        # A command may answer while it is fed: who only sends and never reads would wait for it, and it for them.
        if self._size > MOST_EARLY and not self._senders and not self._paused and self._transport:
            self._transport.pause_reading()
            self._paused = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._wake()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        for waiting in self._room:
            if not waiting.done():
                waiting.set_result(None)
        self._room.clear()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def send(self, data: bytes) -> None:
        if self._transport is None:
            self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=self._socket)
        if self._ended:
            raise ConnectionResetError
        self._transport.write(data)
        if self._full:
            self._senders += 1
            try:
                self._resume()
                while self._full and not self._ended:
                    self._room.append(self._loop.create_future())
                    await self._room[-1]
            finally:
                self._senders -= 1

    def _resume(self) -> None:
        if self._paused and self._transport and not self._ended:
            self._paused = False
            self._transport.resume_reading()

    async def receive(self) -> bytes:
        while not self._early:
            if self._ended:
                return b""
            self._reader = self._loop.create_future()
            await self._reader
        data = self._early.popleft()
        self._size -= len(data)
        if self._paused and self._size < MOST_EARLY:
            self._resume()
        return data

    def stale(self) -> bool:
        return self._ended or bool(self._early)

    def close(self) -> None:
        if self._transport and not self._loop.is_closed():
            self._transport.abort()
        else:  # with its loop a transport has lost the way to say anything
            self._socket.close()


def _has_ended(connection: socket.socket) -> bool:
    """Whether the host has hung up on a connection that waits for nothing."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Connection:
    """One connection: a request, frames until its end, then the next."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._frames = wire, Frames()
        self._ready: list[tuple[int, bytes]] = []
        self.broken = False

    async def send(self, *frames: tuple[int, bytes]) -> None:
        """Frames in one go."""
        try:
            await self._wire.send(b"".join(HEAD.pack(len(payload), 0, kind) + payload for kind, payload in frames))
        except OSError:
            self.broken = True
            raise Unavailable("the sandbox host has hung up", hint="try again: it is started on demand") from None

    async def receive(self) -> tuple[int, bytes]:
        """The next frame."""
        while not self._ready:
            try:
                data = await self._wire.receive()
            except OSError:
                data = b""
            if not data:
                self.broken = True
                raise Unavailable("the sandbox host has hung up", hint="try again: it is started on demand")
            self._ready = [(kind, payload) for _, kind, payload in self._frames.feed(data)]
        return self._ready.pop(0)

    async def some(self) -> list[tuple[int, bytes]]:
        """The next frame, and those that came with it."""
        first = await self.receive()
        frames, self._ready = [first, *self._ready], []
        return frames

    async def begin(self, request: dict[str, Any], *more: tuple[int, bytes]) -> None:
        """Send a request."""
        payload = json.dumps(request).encode()
        if len(payload) > REQUEST_MAX:
            raise LimitExceeded(
                f"the request takes {len(payload)} bytes, more than {REQUEST_MAX}",
                hint="write large arguments, code or environment into a file of the box, or send them as its input",
            )
        await self.send(*pieces(CALL, payload), *more)

    async def end(
        self,
        on_frame: Callable[[int, bytes], Any] = lambda kind, payload: None,
        say: Callable[[str], Any] = lambda line: None,
    ) -> Any:
        """Take frames until the request has ended; its result, or its error raised."""
        parts: list[bytes] = []
        while True:
            kind, payload = await self.receive()
            if kind == RESULT:
                return json.loads(b"".join(parts) + payload)
            if kind == ERROR:
                raise to_error(payload)
            if kind == PROGRESS:
                parts.append(payload[1:]) if payload[:1] == b"+" else say(payload[1:].decode())
            else:
                on_frame(kind, payload)

    def stale(self) -> bool:
        """Whether the host has hung up: it may have ended since."""
        return self._wire.stale()

    def close(self) -> None:
        self.broken = True
        self._wire.close()


def to_error(payload: bytes) -> LayerError:
    """The error the host sent."""
    body = json.loads(payload)
    details = {key: value for key, value in body.items() if key not in ("code", "message", "hint")}
    return ERRORS.get(body["code"], LayerError)(body["message"], body["hint"], **details)


class Client:
    """The connections of one process to one host. While it lives, so do the ephemeral boxes it made."""

    def __init__(self, state: Path, wire: Callable[[socket.socket], Wire]) -> None:
        self.state, self._wire = state, wire
        self.session = secrets.token_hex(8)
        self._idle: list[Connection] = []
        self._lease: Connection | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def _new(self) -> Connection:
        connection = Connection(self._wire(await self._connect()))
        await connection.begin({"do": "hello", "session": self.session})
        await connection.end()
        return connection

    async def _connect(self) -> socket.socket:
        if self.loop is None:
            return connect(self.state)
        try:
            return connect_once(self.state)
        except OSError:  # to start a host takes a while, in which the loop has other things to do
            return await asyncio.to_thread(connect, self.state)

    async def take(self) -> Connection:
        """A free connection."""
        if self._pid != os.getpid():  # a fork of ours must not speak on our connections
            self.__init__(self.state, self._wire)  # type: ignore[misc]
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if not connection.broken and not connection.stale():
                    return connection
                connection.close()
        if self._lease is None or self._lease.broken or self._lease.stale():
            lease = Connection(self._wire(await self._connect()))
            await lease.begin({"do": "hello", "session": self.session, "lease": True})
            await lease.end()
            if self._lease is None or self._lease.broken or self._lease.stale():
                self._lease = lease
            else:  # somebody else was first
                lease.close()
        return await self._new()

    def give(self, connection: Connection) -> None:
        """Done with it."""
        if not connection.broken:
            with self._lock:
                if len(self._idle) < MOST_IDLE:
                    return self._idle.append(connection)
            connection.close()

    async def call(
        self,
        request: dict[str, Any],
        *more: tuple[int, bytes],
        on_frame: Callable[[int, bytes], Any] = lambda kind, payload: None,
        say: Callable[[str], Any] = lambda line: None,
    ) -> Any:
        """One request from its begin to its end."""
        connection = await self.take()
        try:
            await connection.begin(request, *more)
            result = await connection.end(on_frame, say)
        except LayerError:
            self.give(connection)  # the request has ended, if not well
            raise
        except BaseException:
            connection.close()  # left in the middle: the host ends what it was doing for us
            raise
        self.give(connection)
        return result

    def close(self) -> None:
        """Hang up; ephemeral boxes of ours end."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()
        if self._lease:
            self._lease.close()
            self._lease = None


_clients: dict[tuple[Path, int], Client] = {}


def blocking_client(state: Path | None = None) -> Client:
    """The client of this process, for blocking callers; threads share it."""
    place = (state or state_directory(), 0)
    if place not in _clients:
        _clients[place] = Client(place[0], BlockingWire)
    return _clients[place]


def async_client(state: Path | None = None) -> Client:
    """The client of the running event loop."""
    loop = asyncio.get_running_loop()
    place = (state or state_directory(), id(loop))
    if place not in _clients:
        for other, client in list(_clients.items()):  # of loops that are over: an id may come again
            if client.loop is not None and client.loop.is_closed():
                _clients.pop(other).close()
        _clients[place] = Client(place[0], AsyncWire)
        _clients[place].loop = loop
    return _clients[place]


def connect_once(state: Path) -> socket.socket:
    """A socket to the host of `state`, if it runs."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(state / "run" / "host.sock"))
    except OSError:
        connection.close()
        raise
    return connection


def host_runs() -> bool:
    """Whether a host of boxes answers here; none is started for this."""
    try:
        connect_once(state_directory()).close()
    except OSError:
        return False
    return True


def handed(state: Path, request: dict[str, Any], what: str) -> int:
    """The file descriptor that the host gives for a request. Whoever has it must close it."""
    data = json.dumps(request).encode()
    with connect(state) as connection:
        connection.sendall(HEAD.pack(len(data), 0, CALL) + data)
        frames = Frames()
        while True:
            data, fds, _, _ = socket.recv_fds(connection, 65536, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                raise Unavailable("the sandbox host has hung up", hint="try again: it is started on demand")
            for _, kind, payload in frames.feed(data):
                if kind == ERROR:
                    raise to_error(payload)
                if not fds:
                    raise Unavailable(f"{what} did not come", hint="ulimit -n")
                return fds[0]


def connect(state: Path) -> socket.socket:
    """A socket to the host of `state`, which is started when it does not run."""
    path = state / "run" / "host.sock"
    deadline, process = time.monotonic() + 30, None
    while True:
        with contextlib.suppress(OSError):
            return connect_once(state)
        if process is None or process.poll() is not None:
            if process is not None and process.returncode not in (0, errors.Conflict.exit_code):
                raise Unavailable(f"the sandbox host did not start: {_last_words(state)}", hint="layer doctor")
            process = start_host(state)
        if time.monotonic() > deadline:
            raise Unavailable(f"the sandbox host does not answer at {path}", hint=f"see {state / 'run' / 'host.log'}")
        time.sleep(0.005)


def start_host(state: Path) -> "subprocess.Popen[bytes]":
    """Start a host that outlives us."""
    (state / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    keep = ("PATH", "HOME", "LANG", "PYTHONPATH", "XDG_STATE_HOME", "TMPDIR", "SSL_CERT_FILE")
    environment = {key: value for key, value in os.environ.items() if key in keep or key.startswith("LAYER_")}
    with open(state / "run" / "host.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "livinglayer.sandbox.host"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment | {"LAYER_STATE": str(state)},
            start_new_session=True,
            cwd="/",
        )


def _last_words(state: Path) -> str:
    with contextlib.suppress(OSError):
        lines = (state / "run" / "host.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
    return "it said nothing"
