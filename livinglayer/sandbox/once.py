"""One program in a box of its own: one request to the host, driven by one thread that waits on file descriptors, without an event loop."""

import json
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Invalid, LimitExceeded, Unavailable
from ..settings import state_directory
from .blueprint import Blueprint
from .client import connect, handed, to_error
from .wire import CALL, ERROR, HEAD, PAYLOAD_MAX, PROGRESS, RESULT, STARTED, STDERR, STDOUT, Frames, Kind

BODY_MAX = 256 << 20  # bytes of code, files and input together
HEAD_MAX = 60000  # of a request that fits into one frame
KEPT = 64  # connections at rest, for each host
BEGUN = 25  # bytes of the frame that says that a program has started
INPUT = int(Kind.INPUT)
_idle: dict[Path, list[socket.socket]] = {}
_lock = threading.Lock()
_pid = os.getpid()
_shapes: dict[int, tuple[Blueprint, str]] = {}  # blueprints as text, the last ones that were used


@dataclass(frozen=True)
class Ended:
    """How a program ended. `reason` says what killed it when that was a limit: "timed out", "out of memory", "too many processes", "disk full"."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    duration: float
    usage: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] | None = None
    reason: str | None = None
    base: str | None = None  # the same for the same files below the box


class Once:
    """One program in a box of its own, from its start to its end: one request to the host."""

    def __init__(self, connection: socket.socket, state: Path) -> None:
        self._socket, self._state = connection, state
        self._frames = Frames()
        self._ready: list[tuple[int, bytes]] = []
        self._parts: dict[int, list[bytes]] = {STDOUT: [], STDERR: [], PROGRESS: []}
        self._ended: Ended | None = None
        self._fds: list[int] = []
        self.box, self.reused = "", False
        self.channel: socket.socket | None = None

    @classmethod
    def start(
        cls,
        *,
        blueprint: Blueprint,
        tenant: str,
        argv: Sequence[str] | None = None,
        python: str | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] = {},
        timeout: float | None = None,
        token: str | None = None,
        secrets: Mapping[str, str] | None = None,
        record: str | None = None,
        replay: str | None = None,
        snapshot: str | None = None,
        labels: Mapping[str, str] = {},
        files: Mapping[str, bytes] = {},
        reuse: bool = True,
        state: Path | None = None,
    ) -> "Once":
        """Run a command, or Python code as `python3 -c` would; returns when it has started.

        With a `token` the program finds LAYER_URL in its environment, and what it sends there comes to `channel`, which it alone can reach.
        A box in which a program left no trace may serve the next one of the same `tenant`, never another's; `reuse=False`: a new box.
        """
        if (argv is None) == (python is None):
            raise Invalid("a program is either argv or python")
        code = b"" if python is None else python.encode("utf-8", "surrogatepass")
        request: dict[str, Any] = {"do": "once", "blueprint": _shape(blueprint), "tenant": tenant}
        given = {
            "argv": None if argv is None else list(argv),
            "python": None if python is None else len(code),
            "stdin": len(stdin),
            "env": dict(env),
            "timeout": timeout,
            "token": token,
            "secrets": dict(secrets) if secrets else None,
            "record": record,
            "replay": replay,
            "snapshot": snapshot,
            "labels": dict(labels),
            "files": [[path, len(content)] for path, content in files.items()],
            "reuse": None if reuse else False,
        }
        request |= {key: value for key, value in given.items() if value is not None and value != {} and value != []}
        head, body = json.dumps(request).encode(), b"".join((code, *files.values(), stdin))
        if len(body) > BODY_MAX:
            raise LimitExceeded(f"code, files and input take {len(body)} bytes, more than {BODY_MAX}")
        if len(head) > HEAD_MAX:  # the request itself comes first in what follows
            head, body = json.dumps({"do": "once", "head": len(head)}).encode(), head + body
        pieces = [HEAD.pack(len(head), 0, CALL), head]
        for at in range(0, len(body), PAYLOAD_MAX):
            piece = body[at : at + PAYLOAD_MAX]
            pieces += (HEAD.pack(len(piece), 0, INPUT), piece)
        place = state or state_directory()
        once = cls(_send(place, b"".join(pieces)), place)
        try:
            once._begun(token is not None)
        except BaseException:
            once.close()
            raise
        return once

    def _begun(self, channel: bool) -> None:
        """Wait until the host has said that the program runs, and read no byte more: who polls must hear of what comes next."""
        data = b""
        while True:
            while len(data) < (need := 12 + HEAD.unpack_from(data)[0] if len(data) >= 12 else BEGUN):
                try:
                    more, fds, _, _ = socket.recv_fds(self._socket, need - len(data), 1, socket.MSG_CMSG_CLOEXEC)
                except OSError:
                    more, fds = b"", []
                self._fds += fds
                if not more:
                    raise Unavailable("the sandbox host has hung up", hint="try again: it is started on demand")
                data += more
            kind, payload, data = HEAD.unpack_from(data)[2], data[12:need], data[need:]
            if kind == ERROR:
                raise self._failed(payload)
            if kind == STARTED:
                self.reused, self.box = payload[:1] == b"1", payload[1:].decode()
                break
        if channel:
            if not self._fds:
                raise Unavailable("the channel of the box did not come", hint="ulimit -n")
            self.channel = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, self._fds.pop(0))
            self.channel.setblocking(False)

    def _receive(self, flags: int) -> list[tuple[int, bytes]]:
        """Frames that have come; BlockingIOError when none has and `flags` say not to wait."""
        try:
            data = self._socket.recv(262144, flags)
        except BlockingIOError:
            raise
        except OSError:
            data = b""
        if not data:
            raise Unavailable("the sandbox host has hung up", hint="try again: it is started on demand")
        return [(kind, payload) for _, kind, payload in self._frames.feed(data)]

    def _failed(self, payload: bytes) -> Exception:
        """The request is over: the connection can serve another."""
        connection, self._socket = self._socket, _CLOSED
        _give(self._state, connection)
        return to_error(payload)

    def fileno(self) -> int:
        """Readable when frames have come: then call `receive`."""
        return self._socket.fileno()

    def receive(self) -> Ended | None:
        """How the program ended, or None while it has not; never waits."""
        while self._ended is None:
            ready, self._ready = self._ready, []
            if not ready:
                try:
                    ready = self._receive(socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
            for kind, payload in ready:
                if kind == PROGRESS:  # a long answer comes in parts; what the host says of long work is for others
                    if payload[:1] == b"+":
                        self._parts[kind].append(payload[1:])
                elif kind in self._parts:
                    self._parts[kind].append(payload)
                elif kind == RESULT:
                    end = json.loads(b"".join(self._parts[PROGRESS]) + payload)
                    stdout, stderr = (b"".join(self._parts[kind]) for kind in (STDOUT, STDERR))
                    self._ended = Ended(stdout=stdout, stderr=stderr, **end)
                elif kind == ERROR:
                    raise self._failed(payload)
        return self._ended

    def wait(self) -> Ended:
        """How the program ended; waits for that. Whoever serves `channel` waits for both with a poll of its own."""
        while (ended := self.receive()) is None:
            self._ready += self._receive(0)
        return ended

    def kill(self) -> None:
        """End the program, with all that it started; `receive` tells when it has ended."""
        if self._ended is None:
            self._put(int(Kind.SIGNAL), struct.pack("<iI", 9, 1))

    def _put(self, kind: int, payload: bytes = b"") -> None:
        try:
            self._socket.sendall(HEAD.pack(len(payload), 0, kind) + payload)
        except OSError:
            raise Unavailable("the sandbox host has hung up", hint="try again: it is started on demand") from None

    def close(self) -> None:
        """Let go of the box and of `channel`, which must not be used after; a program that still runs is killed. Asking twice is fine."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        connection, self._socket = self._socket, _CLOSED
        if connection is _CLOSED:
            return
        if self._ended is not None:
            try:
                connection.send(HEAD.pack(0, 0, Kind.CANCEL))  # from here on the box may serve another program
                return _give(self._state, connection)
            except OSError:
                pass
        connection.close()

    def __enter__(self) -> "Once":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def channel(state: Path, box: str) -> socket.socket:
    """The listener behind a box's LAYER_URL. Whoever has it must close it before somebody else serves the box."""
    given = handed(state, {"do": "channel", "box": box}, "the channel of the box")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, given)
    listener.setblocking(False)
    return listener


_CLOSED = socket.socket(socket.AF_UNIX)  # stands where a connection was: everything fails
_CLOSED.close()


def _shape(blueprint: Blueprint) -> str:
    """A blueprint as the host reads it; written once, since most programs of a caller have the same."""
    found = _shapes.get(id(blueprint))
    if found is None or found[0] is not blueprint:
        plain = {key: value for key, value in blueprint.plain().items() if key != "secrets"}
        if len(_shapes) > 256:
            _shapes.clear()
        found = _shapes[id(blueprint)] = (blueprint, json.dumps(plain))
    return found[1]


def _send(state: Path, data: bytes) -> socket.socket:
    """A connection on which `data` was sent: one at rest, else a new one."""
    global _pid
    with _lock:
        if _pid != os.getpid():  # a fork of ours must not speak on our connections
            for others in _idle.values():
                for other in others:
                    other.close()
            _idle.clear()
            _pid = os.getpid()
        resting = _idle.setdefault(state, [])
    while True:
        try:
            connection, fresh = resting.pop(), False
        except IndexError:
            connection, fresh = connect(state), True
        try:
            connection.sendall(data)
        except OSError:
            connection.close()
            if fresh:
                raise Unavailable("the sandbox host has hung up", hint="try again: it is started on demand") from None
            continue
        return connection


def _give(state: Path, connection: socket.socket) -> None:
    """A connection is free again."""
    with _lock:
        resting = _idle.setdefault(state, [])
        if len(resting) < KEPT and _pid == os.getpid():
            return resting.append(connection)
    connection.close()


def close_connections(state: Path | None = None) -> None:
    """Hang up on hosts that nobody asks any more."""
    with _lock:
        for place in [place for place in _idle if state in (None, place)]:
            for connection in _idle.pop(place):
                connection.close()
