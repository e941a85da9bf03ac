"""The host's socket: one connection does one thing at a time; commands, files and ports stream both ways over it."""

import asyncio
import base64
import functools
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import Conflict, Invalid, LayerError, LimitExceeded, NotFound, TimedOut, Unavailable
from . import exchanges
from .agent import Agent, Writing, batch, failure
from .blueprint import check_port, check_tier, check_variable
from .box import Box, environment
from .bridge import reach, relay
from .building import build
from .changes import Change
from .commands import GIVE_BACK, Command, Stream, encode_exec, exec_flags
from .gathering import EACH, Gathering
from .host import Host
from .images import SECONDS
from .runs import Run
from .trace import Trace, tail
from .trace import read as read_trace
from .wire import (
    CALL,
    DONE,
    ERROR,
    EXIT,
    HEAD,
    MORE,
    PROGRESS,
    REQUEST_MAX,
    RESULT,
    STARTED,
    STDERR,
    STDOUT,
    WINDOW_START,
    Frames,
    Kind,
    text,
)

RETAINED = 30.0  # seconds for which the end of a command can still be followed by its process
FLOOD = 64 << 20  # bytes that may wait for a client before it is hung up on
as_json = json.JSONEncoder(default=str).encode  # made once: json.dumps would make one for each answer
HIGH = 1 << 20  # bytes that may wait for a slow client before its command is held


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._frames = Frames()
        self._stream: Stream | None = None
        self._early: list[tuple[int, bytes]] = []  # what came before its request was under way
        self._batched: list[bytes] = []  # what one packet of a guest's says to the client
        self._pieces = bytearray()  # of a request that is larger than a frame
        self.session: str | None = None
        self.leases = False
        self.gone = False
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.get_ident()

    @property
    def stream(self) -> Stream | None:
        """Where input goes now."""
        return self._stream

    @stream.setter
    def stream(self, stream: Stream | None) -> None:
        self._stream = stream
        if stream is None and not self.gone:
            self.transport.resume_reading()  # an input that nobody wants any more is read away
        early, self._early = self._early, []
        for kind, payload in early if stream else ():
            self._pass_on(kind, payload)

    def _pass_on(self, kind: int, payload: bytes) -> None:
        if self._stream is None:
            if self._task and not self._task.done() and len(self._early) < 4096:
                self._early.append((kind, payload))
        elif kind == Kind.INPUT or kind == Kind.INPUT_END:
            self._stream.input(payload if kind == Kind.INPUT else None)
        else:
            self._stream.control(kind, payload)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH)
        peer: socket.socket = transport.get_extra_info("socket")
        self._raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, peer.fileno())  # the same: it can send fds
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.geteuid(), 0):
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        self._raw.detach()
        if self.stream:
            self.stream.gone()
        if self._task:
            self._task.cancel()
        if self.leases and self.session:
            held = self.host.sessions
            held[self.session] -= 1
            if not held[self.session]:  # threads of one client may have taken more than one
                del held[self.session]
                self.host.session_ended(self.session)

    def pause_writing(self) -> None:
        if self.stream:
            self.stream.hold(True)

    def resume_writing(self) -> None:
        if self.stream:
            self.stream.hold(False)

    def data_received(self, data: bytes) -> None:
        try:
            for _, kind, payload in self._frames.feed(data):
                if kind == CALL:
                    self._call(bytes(self._pieces) + payload if self._pieces else payload)
                    self._pieces.clear()
                elif kind == MORE:
                    if len(self._pieces) + len(payload) > REQUEST_MAX:
                        raise ValueError("a request without end")
                    self._pieces += payload
                else:
                    self._pass_on(kind, payload)
        except ValueError:
            self.transport.abort()

    # ---- answers ----

    def send(self, kind: int, payload: bytes = b"") -> None:
        """One frame to the client."""
        if batch.open:
            if not self._batched:
                batch.then(self._write_batched)
            self._batched.append(HEAD.pack(len(payload), 0, kind) + payload)
        elif not self.gone:
            self.transport.write(HEAD.pack(len(payload), 0, kind) + payload)
            # events of a watch have no window: a client that does not read loses them
            if self.transport.get_write_buffer_size() > FLOOD:
                self.transport.abort()

    def _write_batched(self) -> None:
        data, self._batched = b"".join(self._batched), []
        if not self.gone:
            self.transport.write(data)

    def send_fds(self, kind: int, payload: bytes, fds: list[int]) -> None:
        """One frame with file descriptors, to a client that waits for just that."""
        try:
            if not self.gone:
                socket.send_fds(self._raw, [HEAD.pack(len(payload), 0, kind) + payload], fds)
        except OSError:
            self.transport.abort()

    def result(self, value: Any) -> None:
        """The end of a request that went well; long answers come in parts."""
        self.stream = None
        data = as_json(value).encode()
        while len(data) > 65536:
            self.send(PROGRESS, b"+" + data[:65535])
            data = data[65535:]
        self.send(RESULT, data)

    def error(self, error: LayerError, **more: Any) -> None:
        """The end of a request that did not."""
        self.stream = None
        body = error.details | {"code": error.code, "message": error.message, "hint": error.hint} | more
        self.send(ERROR, json.dumps(body, default=str).encode()[:65536])

    def say(self, line: str) -> None:
        """Progress of long work; callable from threads."""
        frame = (PROGRESS, b"-" + line.encode()[:60000])
        if threading.get_ident() == self._thread:
            self.send(*frame)
        else:
            self.host.loop.call_soon_threadsafe(self.send, *frame)

    # ---- requests ----

    def _call(self, payload: bytes) -> None:
        try:
            request = json.loads(payload)
            verb = request.pop("do")
        except (ValueError, KeyError, AttributeError, TypeError):
            return self.error(Invalid("the request is not a JSON object with 'do'"))
        if isinstance(self.stream, Run) and self.stream.over:
            self.stream.release()
        if self.stream or (self._task and not self._task.done()):
            return self.error(Conflict("this connection is busy with another request"))
        self.host.used = time.monotonic()
        try:
            if verb == "exec":  # the hot path: no task, no future
                box = self.host.find(request["box"])
                if not box.asleep and box.state == "running":
                    return start_command(self, box, request)
            if verb == "once":
                run = Run(self, self.host, request)
                self.stream = run
                return run.begin()
            handler = VERBS.get(verb)
            if handler is None:
                raise Invalid(f"there is no request {verb!r}")
            self._task = self.host.loop.create_task(self._run(handler, request))
        except LayerError as error:
            self.error(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.error(Invalid(f"the request {verb!r} is not well formed: {error!r}"))

    async def _run(self, handler: "Handler", request: dict[str, Any]) -> None:
        self.host.busy += 1
        try:
            value = await handler(self, request)
            if value is not STREAMS:
                self.result(value)
        except LayerError as error:
            self.error(error)
        except asyncio.CancelledError:
            pass
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            import traceback

            traceback.print_exc()
            self.error(Invalid(f"the request is not well formed: {error!r}"))
        except OSError as error:
            import traceback

            traceback.print_exc()
            *_, place = traceback.extract_tb(error.__traceback__)  # an errno alone says nothing
            self.error(
                Unavailable(f"the host could not do that: {error} (in {Path(place.filename).stem}.{place.name})")
            )
        except Exception as error:  # a defect of ours: its caller must not wait for ever
            import traceback

            traceback.print_exc()
            self.error(Unavailable(f"the host failed: {error!r}"))
        finally:
            self.host.busy -= 1
            self._task = None

    async def box(self, request: dict[str, Any]) -> Box:
        """The box a request names, awake."""
        return await self.host.awake(self.host.find(request["box"]))


Handler = Callable[[Connection, dict[str, Any]], Awaitable[Any]]
STREAMS = object()  # a handler that answers later, by its stream
VERBS: dict[str, Handler] = {}


def verb(name: str) -> Callable[[Handler], Handler]:
    """Enter a handler into the table."""

    def add(handler: Handler) -> Handler:
        VERBS[name] = handler
        return handler

    return add


# ---- commands ----


class CommandStream(Stream):
    """A client that runs or follows a command."""

    def __init__(self, connection: Connection, command: Command, owns: bool) -> None:
        self._connection, self._command, self._owns = connection, command, owns
        command.on_room = connection.transport.resume_reading

    def input(self, data: bytes | None) -> None:
        if not self._command.write(data):
            self._connection.transport.pause_reading()

    def control(self, kind: int, payload: bytes) -> None:
        if kind == Kind.SIGNAL and len(payload) >= 8:
            number, tree = struct.unpack_from("<iI", payload)
            self._command.signal(number, bool(tree))
        elif kind == Kind.RESIZE and len(payload) >= 8:
            self._command.resize(*struct.unpack_from("<II", payload))
        elif kind == Kind.CANCEL:  # stop following; the command goes on
            self._command.leave(self.sink)
            self._connection.result(None)

    def hold(self, on: bool) -> None:
        self._command.hold(on, self)

    def sink(self, kind: int, data: bytes) -> None:
        """What the command prints, then how it ended."""
        connection = self._connection
        if kind == STDOUT or kind == STDERR:
            for at in range(0, len(data), 65536):
                connection.send(kind, data[at : at + 65536])
        elif kind == EXIT:
            connection.transport.resume_reading()
            finish(connection, self._command)
        else:
            connection.transport.resume_reading()
            assert self._command.error is not None
            connection.error(self._command.error)

    def gone(self) -> None:
        self._command.leave(self.sink)
        self._command.hold(False, self)
        if self._owns and not self._command.over:
            try:
                self._command.signal(9, tree=True)
            except LayerError:
                pass


def finish(connection: Connection, command: Command) -> None:
    """How a command ended, as its caller hears it."""
    if command.timed_out:
        connection.error(
            TimedOut(f"command {command.argv[0]!r} was killed: its time was up", hint="give it a larger timeout"),
            seconds=command.duration,
        )
    else:
        connection.result(
            {
                "exit_code": command.status,
                "duration": command.duration,
                "usage": command.usage,
                "truncated": command.truncated,
            }
        )


def start_command(connection: Connection, box: Box, request: dict[str, Any]) -> None:
    """Run a command in a box: followed to its end, or left running in the background."""
    argv = request["argv"]
    if isinstance(argv, str):
        argv = ["/bin/sh", "-c", argv]
    if not isinstance(argv, list) or not argv or not all(isinstance(part, str) and "\0" not in part for part in argv):
        raise Invalid("a command is a text for the shell, or a list of texts without NUL")
    given = request.get("env") or {}
    for key, value in given.items():
        check_variable(key, value)
    cwd, user, timeout = request.get("cwd") or "", request.get("user") or box.blueprint.user, request.get("timeout")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
        raise Invalid(f"timeout {timeout!r} is not a number of seconds")
    pty, background = request.get("pty"), bool(request.get("background"))
    if pty and not (isinstance(pty, list) and len(pty) == 2 and all(type(n) is int and 0 < n < 65536 for n in pty)):
        raise Invalid(f"a terminal has rows and columns, not {pty!r:.60}")
    variables = environment(box, given, [("TERM", "xterm-256color")] if pty and "TERM" not in given else [])
    stdin, follows, notes = bool(request.get("stdin")), bool(request.get("follow")), request.get("notes")
    flags = exec_flags(bool(pty), stdin, cork=follows and not stdin)
    payload = encode_exec(argv, user, cwd, variables, flags, *(pty or (24, 80)))
    box.touch()
    command = Command(
        box, argv, None, background=background, pty=bool(pty), timeout=timeout, stdin=stdin,
        forgets=follows, notes=notes if isinstance(notes, dict) else None,
    )  # fmt: skip
    if background and follows:
        _tell_start(connection, command)
        follow(connection, command, owns=False)
    elif background:
        _answer_when_started(connection, command)
    else:
        follow(connection, command, owns=True)
    command.start(payload)


def follow(connection: Connection, command: Command, owns: bool, replay: bool = True) -> None:
    """The connection hears the command until it ends."""
    stream = CommandStream(connection, command, owns)
    connection.stream = stream
    command.listen(stream.sink, replay)


def _tell_start(connection: Connection, command: Command) -> None:
    plain = command.on_frame

    def on_frame(kind: int, payload: bytes) -> None:
        if kind == STARTED:
            connection.send(STARTED, payload)
            command.on_frame = plain  # type: ignore[method-assign]
        plain(kind, payload)

    command.on_frame = on_frame  # type: ignore[method-assign]


def _answer_when_started(connection: Connection, command: Command) -> None:
    plain = command.on_frame

    answered = False  # once: a later end of the command is not for this request, which the connection has forgotten

    def on_frame(kind: int, payload: bytes) -> None:
        nonlocal answered
        plain(kind, payload)
        if answered:
            return
        if kind == STARTED:
            answered = True
            connection.result({"id": command.number, "pid": command.pid})
        elif kind == DONE and command.error:
            answered = True
            connection.error(command.error)

    command.on_frame = on_frame  # type: ignore[method-assign]


@verb("exec")
async def exec_(connection: Connection, request: dict[str, Any]) -> Any:
    start_command(connection, await connection.box(request), request)
    return STREAMS


@verb("python")
async def python(connection: Connection, request: dict[str, Any]) -> Any:
    """Python without an interpreter's start where the tier and base have a zygote, else an ordinary command."""
    box = await connection.box(request)
    host = connection.host
    user = request.get("user") or box.blueprint.user
    if (
        host.zygote
        and box.driver.capabilities.zygote
        and "host" in box.spec.root.layers
        and user in ("user", "root")
        and not request.get("fresh")
    ):
        command = host.zygote.run(
            box,
            request["code"],
            request.get("args") or [],
            environment(box, request.get("env") or {}),
            request.get("cwd") or "",
            user,
            request.get("timeout"),
        )
        follow(connection, command, owns=True)
        return STREAMS
    start_command(connection, box, request | {"argv": ["python3", "-c", request["code"], *(request.get("args") or [])]})
    return STREAMS


@verb("follow")
async def follow_(connection: Connection, request: dict[str, Any]) -> Any:
    command = _command(await connection.box(request), request, RETAINED)
    if request.get(
        "fresh"
    ):  # as one that comes late to what it did not start: the process, then what it prints from now on
        connection.send(STARTED, struct.pack("<II", command.pid, command.pty))
    follow(connection, command, owns=False, replay=not request.get("fresh"))
    return STREAMS


def _command(box: Box, request: dict[str, Any], since: float = 0.0) -> Command:
    """The command that a request names, by the number of `start`, its process or its tag."""
    if "id" in request:
        return box.command(request["id"])
    return box.command_by(request.get("pid"), request.get("tag"), since)


@verb("output")
async def output_(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """What a command in the background printed after so many bytes of each stream, and how it ended; wakes no box."""
    command = connection.host.find(request["box"]).command(request["id"])
    streams = {STDOUT: "stdout", STDERR: "stderr"}
    pieces, lost = command.printed({kind: int(request.get(name) or 0) for kind, name in streams.items()})
    for kind, data, _ in pieces:
        connection.send(kind, data)
    return {
        "over": command.over, "exit_code": command.status, "error": None if command.error is None else command.error.message,
        "times": [at for _, _, at in pieces], "lost": {streams[kind]: count for kind, count in lost.items()},
    }  # fmt: skip


@verb("signal")
async def signal_(connection: Connection, request: dict[str, Any]) -> None:
    _command(await connection.box(request), request).signal(int(request["signal"]), bool(request.get("tree")))


@verb("resize")
async def resize(connection: Connection, request: dict[str, Any]) -> None:
    command = _command(await connection.box(request), request)
    if not command.pty:
        raise Conflict("tty not assigned to process", hint="it was started without a terminal", of="process")
    command.resize(*(min(65535, max(1, int(request[key]))) for key in ("rows", "columns")))


@verb("input")
async def input_(connection: Connection, request: dict[str, Any]) -> None:
    """Input for a command that others may follow, as it takes it; with `close` the end of it."""
    stream = connection.stream = FileInput(connection)
    command = _command(await connection.box(request), request)
    while (data := await stream.next()) is not None:
        check_input(command, request.get("terminal"))
        command.write(data)
        await command.taken()
    if request.get("close") and command.pty:
        raise Conflict("cannot close stdin of a terminal", hint="send Ctrl-D (0x04) instead", of="process")
    if request.get("close") and command.stdin:
        command.stdin = False
        command.write(None)


def check_input(command: Command, terminal: bool | None) -> None:
    """Conflict when the command takes no input, or not there."""
    if terminal is not None and bool(terminal) != command.pty:
        kind = "a terminal, which is where its input goes" if command.pty else "no terminal"
        raise Conflict(f"process {command.pid} has {kind}", of="process")
    if command.over or not (command.stdin or command.pty):
        raise Conflict(
            f"stdin of process {command.pid} is not enabled or closed", hint="start it with stdin=True", of="process"
        )


@verb("processes")
async def processes(connection: Connection, request: dict[str, Any]) -> list[dict[str, Any]]:
    return [command.describe() for command in (await connection.box(request)).commands.values()]


# ---- files ----


class FileInput(Stream):
    """A file on its way into a box."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def input(self, data: bytes | None) -> None:
        self.pieces.put_nowait(data)
        if self.pieces.qsize() > 32:
            self._connection.transport.pause_reading()

    async def next(self) -> bytes | None:
        """The next piece."""
        data = await self.pieces.get()
        if self.pieces.qsize() < 8:
            self._connection.transport.resume_reading()
        return data


class Windowed(Stream):
    """What a guest sends to the client: its window is given back as the client takes it."""

    _agent: Agent
    _number: int
    _held, _owed = False, 0

    def took(self, size: int) -> None:
        """So much went to the client."""
        self._owed += size
        if self._owed >= GIVE_BACK and not self._held:
            self.hold(False)

    def hold(self, on: bool) -> None:
        self._held = on
        if not on and self._owed:
            self._agent.send(Kind.WINDOW, self._owed.to_bytes(4, "little"), self._number)
            self._owed = 0

    def gone(self) -> None:
        self._agent.drop(self._number)
        if not self._agent.closed:
            self._agent.send(Kind.CANCEL, b"", self._number)


class Reading(Windowed):
    """A file on its way to the client: the agent's window is given back as the client takes it."""

    def __init__(self, connection: Connection, box: Box, path: str, user: str, part: Any = None) -> None:
        self._connection, self._agent = connection, box.agent
        piece = b"" if part is None else struct.pack("<qq", *(int(number) for number in part))
        self.size = 0
        self._number = self._agent.open(self._on_frame)
        self._box, self._path = box, path
        connection.stream = self
        self._agent.send(Kind.READ, text(user) + text(path) + piece, self._number)

    def _on_frame(self, kind: int, payload: bytes) -> None:
        if kind == STDOUT:
            self._connection.send(STDOUT, payload)
            self.size += len(payload)
            self.took(len(payload))
        elif kind == DONE:
            self._agent.drop(self._number)
            if error := failure(payload):
                self._connection.error(error)
            else:
                self._box.trace.add("file", act="read", path=self._path, bytes=self.size)
                self._connection.result(self.size)


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value or len(value) > 4000:
        raise Invalid(f"path {value!r} is not an absolute path", hint="paths are the box's own, such as /home/user/a")
    return value


def _user(box: Box, request: dict[str, Any]) -> str:
    user = str(request.get("user") or box.blueprint.user)
    return f"{user}>{request['owner']}" if request.get("owner") else user


@verb("files.read")
async def files_read(connection: Connection, request: dict[str, Any]) -> Any:
    box = await connection.box(request)
    Reading(connection, box, _path(request["path"]), _user(box, request), request.get("part"))
    return STREAMS


@verb("files.write")
async def files_write(connection: Connection, request: dict[str, Any]) -> int:
    stream = connection.stream = FileInput(connection)
    box = await connection.box(request)
    path = _path(request["path"])
    prefix, marks = str(request.get("prefix") or ""), request.get("attributes")
    writing = Writing(
        box.agent,
        path,
        int(request.get("mode") or 0o644),
        _user(box, request),
        bool(request.get("append")),
        () if marks is None else (prefix, *(str(word) for pair in marks.items() for word in pair)),
    )
    size = 0
    try:
        while (data := await stream.next()) is not None:
            size += len(data)
            await writing.send(data)
        await writing.end()
    except asyncio.CancelledError:  # its client left midway
        writing.cancel()
        raise
    box.trace.add("file", act="write", path=path, bytes=size)
    return size


@verb("who")
async def who(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """A user of the box."""
    return await (await connection.box(request)).agent.who(str(request["user"]))


@verb("files.list")
async def files_list(connection: Connection, request: dict[str, Any]) -> list[dict[str, Any]]:
    box = await connection.box(request)
    depth = request.get("depth") or 1
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 100:
        raise Invalid(f"depth {depth!r} is not between 1 and 100")
    return [asdict(entry) for entry in await box.agent.list(_path(request["path"]), _user(box, request), depth)]


@verb("files.stat")
async def files_stat(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    box = await connection.box(request)
    return asdict(await box.agent.stat(_path(request["path"]), _user(box, request)))


@verb("files.move")
async def files_move(connection: Connection, request: dict[str, Any]) -> None:
    box = await connection.box(request)
    await box.agent.move(_path(request["path"]), _path(request["to"]), _user(box, request))
    box.trace.add("file", act="move", path=request["path"], to=request["to"])


@verb("files.remove")
async def files_remove(connection: Connection, request: dict[str, Any]) -> None:
    box = await connection.box(request)
    await box.agent.remove(_path(request["path"]), _user(box, request))
    box.trace.add("file", act="remove", path=request["path"])


@verb("files.mkdir")
async def files_mkdir(connection: Connection, request: dict[str, Any]) -> None:
    box = await connection.box(request)
    await box.agent.mkdir(_path(request["path"]), int(request.get("mode") or 0o755), _user(box, request))


@verb("files.link")
async def files_link(connection: Connection, request: dict[str, Any]) -> None:
    box = await connection.box(request)
    await box.agent.link(str(request["target"]), _path(request["path"]), _user(box, request))


@verb("files.chmod")
async def files_chmod(connection: Connection, request: dict[str, Any]) -> None:
    box = await connection.box(request)
    await box.agent.chmod(_path(request["path"]), int(request["mode"]), _user(box, request))


class Conversation(Windowed):
    """A watch or a connection to a port: frames both ways until either side ends it."""

    def __init__(self, connection: Connection, box: Box, kind: int, payload: bytes) -> None:
        self._connection, self._agent = connection, box.agent
        self._credit, self._input = WINDOW_START, deque[bytes | None]()
        self._number = self._agent.open(self._on_frame)
        connection.stream = self
        self._agent.send(kind, payload, self._number)

    def _on_frame(self, kind: int, payload: bytes) -> None:
        if kind == STDOUT:
            self._connection.send(STDOUT, payload)
            self.took(len(payload))
        elif kind == Kind.CREDIT:
            self._credit = min(WINDOW_START, self._credit + int.from_bytes(payload[:4], "little"))
            self._flush()
        elif kind in (STARTED, Kind.EVENT):
            self._connection.send(kind, payload)
        elif kind == DONE:
            self._agent.drop(self._number)
            error = failure(payload)
            self._connection.error(error) if error else self._connection.result(None)

    def input(self, data: bytes | None) -> None:
        self._input.append(data)
        self._flush()
        if self._input:
            self._connection.transport.pause_reading()

    def _flush(self) -> None:
        """Give the agent what it has room for."""
        while self._input:
            data = self._input[0]
            if len(data or b"") > self._credit:
                return
            self._credit -= len(data or b"")
            self._agent.send(Kind.INPUT_END if data is None else Kind.INPUT, data or b"", self._number)
            self._input.popleft()
        self._connection.transport.resume_reading()

    def control(self, kind: int, payload: bytes) -> None:
        if kind == Kind.CANCEL:
            self.gone()
            self._connection.result(None)


@verb("files.watch")
async def files_watch(connection: Connection, request: dict[str, Any]) -> Any:
    box = await connection.box(request)
    recursive = int(bool(request.get("recursive")))
    Conversation(
        connection,
        box,
        Kind.WATCH,
        recursive.to_bytes(4, "little") + text(_user(box, request)) + text(_path(request["path"])),
    )
    return STREAMS


@verb("files.gather")
async def files_gather(connection: Connection, request: dict[str, Any]) -> str:
    """Begin to gather what happens below a directory; by which name it is asked for."""
    box = await connection.box(request)
    if len(box.gatherings) >= EACH:
        raise LimitExceeded(f"box {box.id!r} has {EACH} watches already", of="path")
    notes = request.get("notes")
    made = Gathering(
        box.agent, _path(request["path"]), bool(request.get("recursive")), _user(box, request), notes if isinstance(notes, dict) else {}
    )  # fmt: skip
    await made.started
    name = "w" + secrets.token_hex(8)
    box.gatherings[name] = made
    return name


@verb("files.gathered")
async def files_gathered(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """What happened since this was asked last."""
    made = _gathering(await connection.box(request), request)
    return {"path": made.path, "notes": made.notes, "events": await made.take()}


@verb("files.gather_no_more")
async def files_gather_no_more(connection: Connection, request: dict[str, Any]) -> None:
    box = await connection.box(request)
    _gathering(box, request).close()
    del box.gatherings[request["name"]]


def _gathering(box: Box, request: dict[str, Any]) -> Gathering:
    if (found := box.gatherings.get(str(request["name"]))) is None:
        raise NotFound(f"watcher with id {request['name']} not found", of="watch")
    return found


# ---- ports ----


@verb("connect")
async def connect(connection: Connection, request: dict[str, Any]) -> Any:
    box = await connection.box(request)
    Conversation(connection, box, Kind.CONNECT, check_port(request["port"]).to_bytes(4, "little"))
    return STREAMS


@verb("channel")
async def channel(connection: Connection, request: dict[str, Any]) -> Any:
    """The listener behind a box's LAYER_URL."""
    fd, address = connection.host.channel(connection.host.find(request["box"]))
    connection.send_fds(RESULT, json.dumps({"address": address}).encode(), [fd])
    return STREAMS


@verb("reach")
async def reach_(connection: Connection, request: dict[str, Any]) -> None:
    """Which boxes a box of a layer may connect to, by the names that its rules use."""
    box = connection.host.find(request["box"])
    reach(box, request["boxes"])
    box.save(connection.host.records)


@verb("expose")
async def expose(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """A port of the box at an address of the host's loopback."""
    box = await connection.box(request)
    port = check_port(request["port"])
    if port not in box.listeners:
        box.listeners[port] = await asyncio.start_server(
            lambda reader, writer: relay(connection.host, box, port, reader, writer), "127.0.0.1", 0
        )
        box.trace.add("expose", port=port)
    return {"host": "127.0.0.1", "port": box.listeners[port].sockets[0].getsockname()[1]}


# ---- boxes ----


@verb("hello")
async def hello(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    if connection.session is None and request.get("lease"):
        connection.leases = True
        connection.host.sessions[str(request["session"])] += 1
    elif connection.session not in (None, request["session"]):
        raise Conflict("this connection belongs to another session")
    connection.session = str(request["session"])
    return {"pid": os.getpid(), "started": connection.host.started}


@verb("create")
async def create(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    host = connection.host
    box = await host.create(
        request.get("blueprint") or {},
        owner=request.get("session"),
        name=request.get("name"),
        snapshot=request.get("snapshot"),
        secret_values=request.get("secrets"),
        warm=request.get("warm", True),
        record=request.get("record"),
        replay=request.get("replay"),
        labels=request.get("labels"),
        token=request.get("token"),
        wait=request.get("wait"),
        life=request.get("life"),
        say=connection.say,
    )
    if box.name is None and (
        connection.gone or not host.sessions[str(request.get("session"))]
    ):  # its client left meanwhile
        await host.kill(box)
    return box.describe()


@verb("capabilities")
async def capabilities(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """What a tier can do here; Unavailable when it does not work."""
    check_tier(request["tier"])
    found = asdict((await connection.host.driver(request["tier"])).capabilities)
    return found | {"limits": sorted(found["limits"])}


@verb("get")
async def get(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    box = connection.host.find(request["box"])
    return box.describe() | ({"environment": dict(box.blueprint.env)} if request.get("environment") else {})


@verb("list")
async def list_(connection: Connection, request: dict[str, Any]) -> list[dict[str, Any]]:
    host, wanted = connection.host, (request.get("labels") or {}).items()
    return [
        box.describe()
        for box in host.boxes.values()
        if box.state != "starting"
        and wanted <= box.labels.items()
        and (
            not request.get("bridges")
            or any(isinstance(rule, Mapping) and "box" in rule for rule in box.blueprint.egress)
        )
        and box not in host.waiting
        and box not in host.keeping
    ]


@verb("news")
async def news(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """The boxes with these labels of which there is something new since a mark of this host, and those that ended since."""
    host, wanted = connection.host, (request.get("labels") or {}).items()
    since = int(request.get("since") or 0) if request.get("host") == host.started else 0
    changed = [
        {"id": box.id, "labels": dict(box.labels), "secrets": sorted(box.secrets)}
        for box in host.boxes.values()
        if box.trace.mark > since and box.state != "starting" and wanted <= box.labels.items()
    ]
    ended = [
        {"id": id, "labels": labels} for mark, id, labels in host.endings if mark > since and wanted <= labels.items()
    ]
    return {"host": host.started, "mark": Trace.count, "changed": changed, "ended": ended}


@verb("kill")
async def kill(connection: Connection, request: dict[str, Any]) -> None:
    await connection.host.kill(connection.host.find(request["box"]))


@verb("pause")
async def pause(connection: Connection, request: dict[str, Any]) -> None:
    await connection.host.pause(connection.host.find(request["box"]))


@verb("resume")
async def resume(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """Let it go on; what it is then, and whether it stood still before."""
    box = connection.host.find(request["box"])
    stood = await connection.host.resume(box, request.get("life"))
    return box.describe() | {"stood": stood}


@verb("rest")
async def rest(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    return await connection.host.rest(connection.host.find(request["box"]), bool(request.get("memory", True)))


@verb("change")
async def change(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """Another life or other labels for a box."""
    box = connection.host.find(request["box"])
    await connection.host.change(box, request.get("life"), request.get("labels"))
    return box.describe()


@verb("suspend")
async def suspend(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    return await connection.host.suspend(connection.host.find(request["box"]), bool(request.get("memory", True)))


@verb("snapshot")
async def snapshot(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    box, holder = connection.host.find(request["box"]), _holder(request.get("holder", ""))
    return await connection.host.snapshot(box, bool(request.get("memory")), holder)


def _holder(given: object) -> str:
    if not isinstance(given, str) or len(given) > 200:
        raise Invalid(f"{given!r:.80} can't be the holder of a snapshot", hint="a text of 200 characters at most")
    return given


@verb("fork")
async def fork(connection: Connection, request: dict[str, Any]) -> list[dict[str, Any]]:
    host = connection.host
    box = host.find(request["box"])
    if box.asleep:
        await host.awake(box)
    more = (request.get("names") or (), request.get("labels"), request.get("token"), request.get("life"))
    forks = await host.fork(box, request.get("count", 1), request.get("session"), *more)
    return [child.describe() for child in forks]


@verb("metrics")
async def metrics(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    box = connection.host.find(request["box"])
    return box.metrics() | {"disk": connection.host.disk.used(box.spec.root.upper)}


@verb("trace")
async def trace(connection: Connection, request: dict[str, Any]) -> list[dict[str, Any]]:
    host = connection.host
    try:
        return host.find(request["box"]).trace.events()
    except LayerError:
        if ended := host.ended.get(request["box"]):
            return ended.events()
        path = host.traces / f"{Path(str(request['box'])).name}.jsonl"
        if not path.exists():
            raise
        return list(read_trace(path))


@verb("trace.more")
async def trace_more(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """What a trace holds after `offset`; waits a while for something when there is nothing."""
    host, id, offset = connection.host, request["box"], int(request.get("offset") or 0)
    deadline = time.monotonic() + min(10.0, float(request.get("wait", 10)))
    while True:
        box = host.boxes.get(id)
        if found := box.trace if box else host.ended.get(id):
            found.flush()
        events, offset = tail(host.traces / f"{Path(str(id)).name}.jsonl", offset)
        if events or box is None or time.monotonic() > deadline:
            return {"events": events, "offset": offset, "ended": box is None}
        await asyncio.sleep(0.1)


@verb("exchange")
async def exchange(connection: Connection, request: dict[str, Any]) -> str:
    """A piece of what was said to a model or by it, base64; also after the end of the box."""
    offset = int(request.get("offset") or 0)
    data = exchanges.read(connection.host.state, str(request["box"]), request.get("name"), request.get("part"), offset)
    return base64.b64encode(data).decode()


def _absolute(change: Change) -> dict[str, Any]:
    """A change with its path as the files API takes it."""
    return asdict(change) | {"path": f"/{change.path}"}


@verb("changes")
async def changes(connection: Connection, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The files a box has changed."""
    return [_absolute(change) for change in await connection.host.changes(connection.host.find(request["box"]))]


@verb("lend")
async def lend(connection: Connection, request: dict[str, Any]) -> None:
    """Values of secrets, for a box whose host has started again."""
    values = request.get("secrets")
    if not isinstance(values, dict):
        raise Invalid("secrets are texts by name")
    await connection.host.lend(connection.host.find(request["box"]), values)


@verb("egress")
async def egress(connection: Connection, request: dict[str, Any]) -> None:
    await connection.host.set_egress(connection.host.find(request["box"]), request["rules"])


@verb("snapshots")
async def snapshots(connection: Connection, request: dict[str, Any]) -> list[dict[str, Any]]:
    return [asdict(found) for found in await asyncio.to_thread(connection.host.snapshots.list_snapshots)]


@verb("snapshot.diff")
async def snapshot_diff(connection: Connection, request: dict[str, Any]) -> Any:
    found = await asyncio.to_thread(connection.host.snapshots.diff, request["a"], request["b"])
    return [_absolute(change) for change in found]


@verb("snapshot.remove")
async def snapshot_remove(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    holder = None if request.get("all") else _holder(request.get("holder", ""))
    held = await asyncio.to_thread(connection.host.snapshots.remove, request["snapshot"], holder)
    if not held:
        await asyncio.to_thread(connection.host.collect)
    return {"held": list(held)}


@verb("images")
async def images(connection: Connection, request: dict[str, Any]) -> list[dict[str, Any]]:
    return [asdict(found) for found in await asyncio.to_thread(connection.host.images.list_images)]


@verb("image.import")
async def image_import(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    path = Path(request["path"])
    return asdict(await asyncio.to_thread(connection.host.images.import_archive, path, request["name"], connection.say))


@verb("image.pull")
async def image_pull(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    tls, seconds = request.get("tls", True), float(request.get("seconds") or SECONDS)
    login = None if (given := request.get("login")) is None else (str(given[0]), str(given[1]))
    pull = functools.partial(connection.host.images.pull, request["reference"], request.get("name"), tls)
    return asdict(await asyncio.to_thread(pull, connection.say, seconds, login))


@verb("image.build")
async def image_build(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    egress, cache = request.get("egress") or [], request.get("cache", True)
    seconds, name = request.get("seconds"), request["name"]
    hear = (lambda line: connection.say(f"> {line}")) if request.get("output") else None
    try:
        async with asyncio.timeout(None if seconds is None else float(seconds)):
            return asdict(
                await build(
                    connection.host, name, request["base"], request["steps"], egress, connection.say, cache, hear
                )
            )
    except TimeoutError:
        raise TimedOut(f"the build of {name!r} took longer than {seconds:g} seconds") from None


@verb("image.of")
async def image_of(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    return asdict(await asyncio.to_thread(connection.host.images.of, request["snapshot"], request["name"]))


@verb("image.export")
async def image_export(connection: Connection, request: dict[str, Any]) -> str:
    """A snapshot as an OCI image in an archive of the host's, written with the rights of whoever may talk to this host."""

    def write() -> str:
        with open(request["path"], "wb") as file:
            name, changes = request.get("name") or "latest", bool(request.get("changes_only"))
            return connection.host.images.export(request["snapshot"], file, name, changes)

    return await asyncio.to_thread(write)


@verb("image.remove")
async def image_remove(connection: Connection, request: dict[str, Any]) -> None:
    await asyncio.to_thread(connection.host.images.remove, request["name"])


@verb("volume.create")
async def volume_create(connection: Connection, request: dict[str, Any]) -> None:
    await asyncio.to_thread(connection.host.volumes.create, request["volume"], request["bytes"])


@verb("volume.remove")
async def volume_remove(connection: Connection, request: dict[str, Any]) -> None:
    shapes = [box.blueprint for box in connection.host.boxes.values()]
    await asyncio.to_thread(connection.host.volumes.remove, request["volume"], shapes)


@verb("volume.open")
async def volume_open(connection: Connection, request: dict[str, Any]) -> Any:
    """A volume's directory, for a client that looks at its files."""
    fd = os.open(connection.host.volumes.path(request["volume"]), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.send_fds(RESULT, b"null", [fd])
    finally:
        os.close(fd)
    return STREAMS


@verb("collect")
async def collect(connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """Remove what no snapshot, image or box needs any more."""
    return asdict(await asyncio.to_thread(connection.host.collect, bool(request.get("drop_caches"))))


@verb("doctor")
async def doctor(connection: Connection, request: dict[str, Any]) -> Any:
    from .doctor import examine

    return await examine(connection.host, connection.say, request.get("tiers"))


@verb("shutdown")
async def shutdown(connection: Connection, request: dict[str, Any]) -> None:
    connection.host.stopping.set()


async def listen(host: Host, path: Path) -> asyncio.AbstractServer:
    """Accept clients at `path`, which only this user may open."""
    path.unlink(missing_ok=True)
    server = await host.loop.create_unix_server(lambda: Connection(host), str(path), backlog=1024)
    os.chmod(path, 0o600)
    return server
