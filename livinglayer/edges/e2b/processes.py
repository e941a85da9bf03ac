"""Processes: commands and terminals of a box, as E2B's process.Process has them."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from typing import Any

from starlette.types import Receive, Send

from ...errors import LayerError, NotFound, TimedOut, Unavailable
from ...sandbox.client import to_error
from ...sandbox.sandbox import AsyncFollowing, AsyncInput
from ...sandbox.wire import ERROR, RESULT, STARTED, STDERR, STDOUT
from .asking import Asked, is_gone
from .frames import OVER, STREAM, Failure, Incoming, failure, field, flag, frame, number, over, part, text
from .tending import Tending

OUTPUT, TERMINAL = b'{"event":{"data":{"stdout":"', b'{"event":{"data":{"pty":"'
TRUE = (1).to_bytes(4, "little")
KEEPALIVE = b'{"event":{"keepalive":{}}}'
SIGNALS = {"SIGNAL_SIGKILL": signal.SIGKILL, "SIGNAL_SIGTERM": signal.SIGTERM, 9: signal.SIGKILL, 15: signal.SIGTERM}
IDLE = 3600.0  # seconds between two pieces of a stream of input
# As Go tells them, in whose words clients read how a process ended.
NAMES = {
    1: "hangup", 2: "interrupt", 3: "quit", 4: "illegal instruction", 5: "trace/breakpoint trap", 6: "aborted", 7: "bus error",
    8: "floating point exception", 9: "killed", 10: "user defined signal 1", 11: "segmentation fault", 12: "user defined signal 2",
    13: "broken pipe", 14: "alarm clock", 15: "terminated",
}  # fmt: skip


# ---- streams ----


async def start(asked: Asked, receive: Receive, send: Send) -> None:
    """Start a command; what it prints and how it ended, as it happens. It goes on when nobody listens, until its time is up."""
    message = await asked.first()
    config = part(message, "process") or {}
    args, envs, terminal = config.get("args") or [], config.get("envs") or {}, part(message, "pty")
    if not isinstance(args, list) or not all(isinstance(word, str) and "\0" not in word for word in args):
        raise Failure("invalid_argument", "'args' is not a list of texts")
    if not isinstance(envs, dict) or not all(isinstance(value, str) for value in envs.values()):
        raise Failure("invalid_argument", "'envs' is not an object of texts")
    command, cwd = text(config, "cmd"), text(config, "cwd", default="")
    if not command:
        raise Failure("invalid_argument", "'cmd' is empty")
    size = None
    if terminal is not None:
        given = part(terminal, "size") or {}
        size = [number(given, "rows", 65535) or 24, number(given, "cols", 65535) or 80]
    stdin = size is None and (message.get("stdin") is None or flag(message, "stdin"))
    notes = {"cmd": command, "args": args, "envs": envs}
    if cwd:
        notes["cwd"], cwd = cwd, await asked.path(cwd)
    elif (own := (asked.box.held.get("template") or {}).get("cwd")) != "/home/user":
        cwd = own or ""  # its template's WORKDIR
    if field(message, "tag") is not None:
        notes["tag"] = text(message, "tag")
    following = await asked.box.box.follow_start(
        [command, *args], env=envs or None, cwd=cwd or None, user=asked.user, pty=size, stdin=stdin, timeout=asked.seconds, notes=notes,
    )  # fmt: skip
    await stream(asked, receive, send, following, size is not None, None)


async def connect(asked: Asked, receive: Receive, send: Send) -> None:
    """What a command that runs prints from now on, and how it ended."""
    message = await asked.first()
    following = await asked.box.box.follow_process(*selected(part(message, "process")))
    await stream(asked, receive, send, following, False, asked.seconds)


async def stream(
    asked: Asked, receive: Receive, send: Send, following: AsyncFollowing, terminal: bool, seconds: float | None
) -> None:
    """A command's frames as events, no faster than the client takes them; what came together goes out together."""
    tending = Tending(asked.serving, asked.box, receive, send, following.leave, KEEPALIVE, asked.interval, seconds)
    begun, more, head = False, True, TERMINAL if terminal else OUTPUT
    try:
        while more:
            out: list[bytes] = []
            try:
                frames = await following.next()
            except Unavailable as cut:  # we left, or the host did
                if tending.left and tending.why is None:
                    return
                frames, more = [], False
                out.append(over(tending.why or failure(cut)))
            for kind, payload in frames:
                if kind == STDOUT:
                    out.append(frame(head + base64.b64encode(payload) + b'"}}}'))
                elif kind == STDERR:
                    out.append(frame(b'{"event":{"data":{"stderr":"' + base64.b64encode(payload) + b'"}}}'))
                elif kind == STARTED:
                    if payload[4:8] == TRUE:
                        head = TERMINAL
                    out.append(frame(b'{"event":{"start":{"pid":%d}}}' % int.from_bytes(payload[:4], "little")))
                elif kind == RESULT:
                    more = False
                    out.append(frame(ended(json.loads(payload)["exit_code"])) + OVER)
                elif kind == ERROR:
                    more = False
                    error = to_error(payload)
                    if is_gone(error):
                        await asked.lost()
                    out.append(over(refused(asked, error)))
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": STREAM})
            tending.sent = asked.loop.time()
            await send({"type": "http.response.body", "body": b"".join(out), "more_body": more})
    finally:
        await tending.end()
        await following.leave()


def ended(status: int) -> bytes:
    """How a process ended, as an event."""
    if status >= 0:
        end: dict[str, Any] = {"exitCode": status, "exited": True, "status": f"exit status {status}"}
    else:
        end = {"exitCode": -1, "exited": False, "status": f"signal: {NAMES.get(-status, f'signal {-status}')}"}
    if status:
        end["error"] = end["status"]
    return json.dumps({"event": {"end": end}}, separators=(",", ":")).encode()


def refused(asked: Asked, error: LayerError) -> Failure:
    """Why a command did not start or was cut off."""
    of = error.details.get("of")
    if of == "user":
        return Failure("unauthenticated", f"invalid username: {asked.user!r}")
    if of == "directory" and isinstance(error, NotFound):
        return Failure("invalid_argument", f"cwd {asked.cwd!r} does not exist")
    if of in ("command", "directory"):
        return Failure("invalid_argument", f"error starting process: {error.message}")
    if isinstance(error, TimedOut):
        return Failure("deadline_exceeded", "context deadline exceeded")
    if is_gone(error):
        return Failure("unavailable", f"the connection to sandbox {asked.box.id} ended before the stream completed")
    return failure(error)


# ---- answers ----


def selected(process: dict[str, Any] | None) -> tuple[int | None, str | None]:
    """Which process: its number or its tag."""
    if process and process.get("tag") is not None:
        return None, text(process, "tag")
    if not process or process.get("pid") is None:
        raise Failure("invalid_argument", "'process' names neither a pid nor a tag")
    return number(process, "pid"), None


async def list_(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """The commands that run."""
    return {"processes": [told(found) for found in await asked.box.box.processes() if found["pid"]]}


def told(found: dict[str, Any]) -> dict[str, Any]:
    notes = dict(found["notes"] or {})
    tag = notes.pop("tag", None)
    config = notes if "cmd" in notes else {"cmd": found["argv"][0], "args": found["argv"][1:]}
    return {"config": config, "pid": found["pid"]} | ({} if tag is None else {"tag": tag})


async def send_signal(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """End a process: at once with all that came of it, or by asking it."""
    pid, tag = selected(part(message, "process"))
    wanted = message.get("signal")
    if not isinstance(wanted, str | int) or (found := SIGNALS.get(wanted)) is None:
        raise Failure("invalid_argument", f"invalid signal: {wanted!r:.60}")
    await asked.box.box.signal(found, pid, tag, tree=found == signal.SIGKILL)
    return {}


async def update(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """Another size for a terminal."""
    pid, tag = selected(part(message, "process"))
    if (terminal := part(message, "pty")) is not None:
        size = part(terminal, "size") or {}
        await asked.box.box.resize(number(size, "rows", 65535) or 24, number(size, "cols", 65535) or 80, pid, tag)
    elif not any(told(found)["pid"] == pid for found in await asked.box.box.processes()):
        raise Failure("not_found", f"process with pid {pid} not found")
    return {}


def given(message: dict[str, Any] | None) -> tuple[bool, bytes]:
    """Input, and whether it is for a terminal."""
    for name in ("stdin", "pty"):
        if message and (value := message.get(name)) is not None:
            try:
                if isinstance(value, str):
                    padded = value.replace("-", "+").replace("_", "/") + "=" * (-len(value) % 4)
                    return name == "pty", base64.b64decode(padded, validate=True)
            except ValueError:
                pass
            raise Failure("invalid_argument", f"{name!r} is not base64")
    raise Failure("invalid_argument", "'input' has neither stdin nor pty")


async def send_input(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """Input for a process; answered when it was taken."""
    pid, tag = selected(part(message, "process"))
    terminal, data = given(part(message, "input"))
    into = await asked.box.box.input(pid, tag, terminal=terminal)
    try:
        await into.send(data)
        await into.end()
    except BaseException:
        await into.cancel()
        raise
    return {}


async def close_stdin(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """No more input for a process."""
    pid, tag = selected(part(message, "process"))
    await (await asked.box.box.input(pid, tag, close=True)).end()
    return {}


async def stream_input(asked: Asked, receive: Receive, send: Send) -> None:
    """Input for a process, piece by piece, no faster than it takes it; answered at its end."""
    incoming: Incoming = asked.incoming
    into: AsyncInput | None = None
    chosen: tuple[int | None, str | None] | None = None
    try:
        async with asyncio.timeout(asked.seconds):
            while (message := await incoming.message(IDLE)) is not None:
                if (begin := part(message, "start")) is not None:
                    chosen = selected(part(begin, "process"))
                    if not await exists(asked, *chosen):
                        raise Failure("not_found", f"process with pid {chosen[0]} not found")
                elif (data := part(message, "data")) is not None:
                    if chosen is None:
                        raise Failure("invalid_argument", "'data' came before 'start'")
                    terminal, piece = given(part(data, "input"))
                    if into is None:
                        into = await asked.box.box.input(*chosen, terminal=terminal)
                    await into.send(piece)
                elif "keepalive" not in message:
                    raise Failure("invalid_argument", "the message is neither start, data nor keepalive")
            if into is not None:
                await into.end()
                into = None
            out = frame(b"{}") + OVER
    except LayerError as error:
        if is_gone(error):
            raise
        out = over(failure(error))
    except TimeoutError:
        out = over(Failure("deadline_exceeded", "context deadline exceeded"))
    except Failure as wrong:
        if wrong.code != "not_found":
            raise
        out = over(wrong)
    finally:
        if into is not None:
            await into.cancel()
    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
    await send({"type": "http.response.body", "body": out})


async def exists(asked: Asked, pid: int | None, tag: str | None) -> bool:
    """Whether such a command runs."""
    return any(
        found["pid"] == pid if tag is None else (found["notes"] or {}).get("tag") == tag
        for found in await asked.box.box.processes()
    )


UNARY = {"List": list_, "SendSignal": send_signal, "Update": update, "SendInput": send_input, "CloseStdin": close_stdin}
STREAMS = {"Start": start, "Connect": connect, "StreamInput": stream_input}
