"""One command in a box: what it prints goes to whoever listens, up to its limit; it ends by itself, by its deadline or with its caller."""

import asyncio
import collections
import os
import signal
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Invalid, LayerError, LimitExceeded, TimedOut
from .agent import EXIT_STATUS, failure
from .wire import (
    CORK,
    CREDIT,
    DONE,
    EXIT,
    PTY,
    REQUEST_MAX,
    STARTED,
    STDERR,
    STDIN,
    STDOUT,
    WINDOW_START,
    Kind,
    pieces,
    text,
)

if TYPE_CHECKING:
    from .box import Box

GRACE = 10.0  # seconds from a deadline until the caller hears of it even if the box says nothing
REMEMBERED = 256 << 10  # output of a background command that a later caller may still read
UNLIMITED = 1 << 62
GIVE_BACK = WINDOW_START // 8  # bytes that were taken before the agent hears of it
Sink = Callable[[int, bytes], None]  # gets (STDOUT or STDERR, bytes), then (EXIT, b"") or (DONE, b"")


def encode_exec(
    argv: Sequence[str], user: str, cwd: str, environment: dict[str, str], flags: int, rows: int = 24, columns: int = 80
) -> bytes:
    """What EXEC says; LimitExceeded when arguments and environment are larger than a request may be."""
    payload = b"".join(
        [
            struct.pack("<III", flags, rows, columns),
            text(user),
            text(cwd),
            len(argv).to_bytes(4, "little"),
            *(text(argument) for argument in argv),
            len(environment).to_bytes(4, "little"),
            *(text(f"{key}={value}") for key, value in environment.items()),
        ]
    )
    if len(payload) > REQUEST_MAX:
        raise LimitExceeded(
            f"arguments and environment take {len(payload)} bytes, more than {REQUEST_MAX}",
            hint="write a file into the box instead",
        )
    return payload


class Stream:
    """Where the input of a connection goes while it streams, and what to do when its client keeps up again or leaves."""

    def input(self, data: bytes | None) -> None:
        """Bytes of the client's, None at their end."""

    def control(self, kind: int, payload: bytes) -> None:
        """SIGNAL, RESIZE, CANCEL."""

    def hold(self, on: bool) -> None:
        """The client can't keep up, or can again."""

    def gone(self) -> None:
        """The client has left."""


class Command:
    """A command that runs or has run."""

    def __init__(
        self,
        box: "Box",
        argv: Sequence[str],
        sink: Sink | None,
        *,
        background: bool = False,
        pty: bool = False,
        timeout: float | None = None,
        stdin: bool = False,
        forgets: bool = False,
        notes: dict[str, Any] | None = None,
    ) -> None:
        self.box, self.argv, self.background = box, list(argv), background
        self.pty, self.stdin, self.notes = pty, stdin, notes
        self.ended = 0.0  # when, on the loop's clock
        self.number = self.pid = 0
        self.started, self.duration = time.monotonic(), 0.0
        self.status: int | None = None
        self.usage: dict[str, Any] = {}
        self.error: LayerError | None = None
        self.timed_out = False
        self._sinks: list[Sink] = [sink] if sink else []
        self._seen = {STDOUT: 0, STDERR: 0}
        # a terminal is a person's, who may sit at it for days; of what is kept nowhere there may be any amount
        self._limit = UNLIMITED if pty or forgets else box.blueprint.output
        self._memory: collections.deque[tuple[int, bytes, float]] | None = None
        if background and not forgets:
            self._memory = collections.deque()
        self._remembered = 0
        self._forgotten = {STDOUT: 0, STDERR: 0}  # bytes that came before what is remembered
        self._credit = WINDOW_START
        self._input: collections.deque[bytes | None] = collections.deque()
        self._held: set[object] = set()  # those that can't keep up
        self._owed = 0
        self._taken: list[asyncio.Future[None]] = []  # who waits until it has taken its input
        self.on_room: Callable[[], None] = lambda: None
        self._timer = box.loop.call_later(timeout, self._expire) if timeout else None

    # ---- started by the agent ----

    def start(self, payload: bytes) -> None:
        """Ask the agent to run it."""
        try:
            agent = self.box.agent
            self.number = agent.open(self.on_frame)
            self.box.commands[self.number] = self
            for kind, piece in pieces(Kind.EXEC, payload):
                agent.send(kind, piece, self.number)
        except BaseException:  # its caller is told by that; nothing more must come
            if self.box.commands.pop(self.number, None):
                agent.drop(self.number)
            self._sinks.clear()
            if self._timer:
                self._timer.cancel()
            raise
        self._flush()  # what its caller sent while the box was woken

    def on_frame(self, kind: int, payload: bytes) -> None:
        """A frame of the agent's."""
        if kind == STDOUT or kind == STDERR:
            self.output(kind, payload)
            self._owed += len(payload)
            if self._owed >= GIVE_BACK and not self._held:
                self.hold(False)
        elif kind == EXIT:
            status, user, system, resident = EXIT_STATUS.unpack_from(payload)
            self.end(
                os.waitstatus_to_exitcode(status),
                {"user": user / 1e6, "system": system / 1e6, "max_resident": resident},
            )
        elif kind == STARTED:
            self.pid = int.from_bytes(payload[:4], "little")
        elif kind == CREDIT:
            self._credit = min(WINDOW_START, self._credit + int.from_bytes(payload[:4], "little"))
            self._flush()
        elif kind == DONE:
            self.fail(failure(payload) or Invalid("the command did not start"))

    def hold(self, on: bool, who: object = None) -> None:
        """Stop (or go on) taking output: one of those that listen can't keep up."""
        (self._held.add if on else self._held.discard)(who)
        if not self._held and self._owed and self.status is None and not self.error:
            owed, self._owed = self._owed, 0
            self._send(Kind.WINDOW, owed.to_bytes(4, "little"))

    def _send(self, kind: int, payload: bytes) -> None:
        """To the agent, also of a box that is paused: it takes the frame when it goes on."""
        if self.box.guest is not None and not self.box.guest.agent.closed:
            self.box.guest.agent.send(kind, payload, self.number)

    # ---- what happens to it, whoever started it ----

    def output(self, kind: int, data: bytes) -> None:
        """Pass on what it printed, up to the limit."""
        seen = self._seen[kind]
        self._seen[kind] = seen + len(data)
        if seen + len(data) > self._limit:
            if seen <= self._limit:
                self.box.trace.add("limit", limit="output", command=self.argv[0], bytes=self._limit)
            data = data[: max(0, self._limit - seen)]
        if not data:
            return
        for sink in self._sinks:
            sink(kind, data)
        if self._memory is not None:
            self._memory.append((kind, data, time.time()))
            self._remembered += len(data)
            while self._remembered > REMEMBERED:
                old, lost, _ = self._memory.popleft()
                self._remembered -= len(lost)
                self._forgotten[old] += len(lost)

    @property
    def truncated(self) -> bool:
        """Whether it printed more than its limit."""
        return max(self._seen.values()) > self._limit

    def end(self, status: int, usage: dict[str, Any]) -> None:
        """It has exited."""
        self.status, self.usage = status, usage
        self._over(EXIT)

    def fail(self, error: LayerError) -> None:
        """It could not run, or its box ended under it."""
        self.error = error
        self._over(DONE)

    def _over(self, kind: int) -> None:
        self.ended = time.monotonic()
        self.duration = self.ended - self.started
        self._flush()
        if self._timer:
            self._timer.cancel()
        self.box.command_ended(self)
        for sink in self._sinks:
            sink(kind, b"")
        self._sinks.clear()

    def listen(self, sink: Sink, replay: bool = True) -> None:
        """Hear what it printed lately and what it prints from now on."""
        for kind, data, _ in (self._memory if replay else None) or ():
            sink(kind, data)
        if self.status is not None or self.error:
            sink(EXIT if self.error is None else DONE, b"")
        else:
            self._sinks.append(sink)

    def printed(self, after: dict[int, int]) -> tuple[list[tuple[int, bytes, float]], dict[int, int]]:
        """What is remembered of both streams after so many bytes of each, with its time; and how much of it is forgotten."""
        place, found = dict(self._forgotten), []
        for kind, data, at in self._memory or ():
            skip = max(0, after[kind] - place[kind])
            place[kind] += len(data)
            if skip < len(data):
                found.append((kind, data[skip:], at))
        return found, {kind: max(0, begins - after[kind]) for kind, begins in self._forgotten.items()}

    def leave(self, sink: Sink) -> None:
        """Stop listening."""
        if sink in self._sinks:
            self._sinks.remove(sink)

    @property
    def over(self) -> bool:
        return self.status is not None or self.error is not None

    def _expire(self) -> None:
        self.timed_out = True
        self.box.trace.add("limit", limit="time", command=self.argv[0])
        self._timer = self.box.loop.call_later(GRACE, self._give_up)
        self.signal(signal.SIGKILL, tree=True)

    def _give_up(self) -> None:
        """A box whose agent is held up, by its own code or by none, does not hold its caller up."""
        if not self.over:
            self.fail(TimedOut(f"command {self.argv[0]!r}: its time was up, and its box does not answer"))

    def signal(self, number: int, tree: bool = False) -> None:
        """Send a signal to the command, or with `tree` to all that came of it."""
        if not self.over:
            self._send(Kind.SIGNAL, struct.pack("<iI", number, tree))

    def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal the new size."""
        if not self.over:
            self._send(Kind.RESIZE, struct.pack("<II", rows, columns))

    # ---- input ----

    def write(self, data: bytes | None) -> bool:
        """Give it input, None for the end of it. False when it has not taken what it got: wait for `on_room`."""
        if self.over:
            return True
        self._input.append(data)
        self._flush()
        return not self._input

    def _flush(self) -> None:
        if self.over:
            self._input.clear()
            self._wake()
        if not self.number:
            return  # not started yet
        waited = bool(self._input)
        while self._input:
            data = self._input[0]
            if data is None:
                self._send(Kind.INPUT_END, b"")
            elif len(data) > self._credit:
                return
            else:
                self._credit -= len(data)
                self._send(Kind.INPUT, data)
            self._input.popleft()
        self._wake()
        if waited:
            self.on_room()

    def _wake(self) -> None:
        for waiting in self._taken:
            if not waiting.done():
                waiting.set_result(None)
        self._taken.clear()

    async def taken(self) -> None:
        """Returns when it has taken its input, or is over."""
        if self._input and not self.over:
            self._taken.append(self.box.loop.create_future())
            await self._taken[-1]

    def describe(self) -> dict[str, Any]:
        """As a caller sees it."""
        return {
            "id": self.number,
            "pid": self.pid,
            "argv": self.argv,
            "seconds": time.monotonic() - self.started,
            "background": self.background,
            "pty": self.pty,
            "stdin": self.stdin,
            "notes": self.notes,
        }


def exec_flags(pty: bool, stdin: bool, cork: bool = False) -> int:
    """The flags of an EXEC frame."""
    return (PTY if pty else 0) | (STDIN if stdin else 0) | (CORK if cork else 0)


__all__ = ["Command", "Stream", "encode_exec", "exec_flags"]
