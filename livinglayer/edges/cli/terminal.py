"""A command in a box, joined to where `layer` was typed: its input, output, signals and, if asked, the terminal itself."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent import futures
from typing import IO, Any

from livinglayer.edges.cli.table import escape
from livinglayer.errors import LayerError
from livinglayer.sandbox.sandbox import AsyncProcess, AsyncSandbox, Result

CUT = 32768  # bytes read of the input at once
GRACE = 2.0  # seconds to clean up when we were told to end


class Shown:
    """A stream of a command's, on ours. On a terminal that it does not own it can print, but not drive it."""

    def __init__(self, stream: IO[str], raw: bool) -> None:
        self._stream, self._raw = stream.buffer if hasattr(stream, "buffer") else None, raw or not stream.isatty()
        self._text = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> None:
        """Print at once."""
        if self._raw and self._stream is not None:
            self._stream.write(data)
            self._stream.flush()
        else:
            self._text.write(data.decode("utf-8", "replace") if self._raw else visible(self._decoder.decode(data)))
            self._text.flush()


def visible(text: str) -> str:
    """The text with everything but line ends and tabs spelled out that a terminal would act on."""
    return "".join(char if char in "\n\t\r" else escape(char) for char in text)


@contextlib.contextmanager
def raw_mode(on: bool) -> Iterator[None]:
    """Every key goes to the box; the terminal is as it was afterwards."""
    if not on:
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def window() -> tuple[int, int]:
    """(rows, columns) of the terminal."""
    try:
        size = os.get_terminal_size(sys.stdin.fileno())  # the terminal itself: LINES and COLUMNS may be of another one
    except OSError:
        size = shutil.get_terminal_size()
    return size.lines, size.columns


class Joined:
    """One running command and us."""

    def __init__(self, process: AsyncProcess, pty: bool) -> None:
        self._process, self._pty = process, pty
        self._loop = asyncio.get_running_loop()
        self._order = asyncio.Lock()  # frames of two senders must not mix
        self._interrupts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, stdin: bool) -> Result:
        """Carry everything both ways until the command ends."""
        numbers: dict[int, Any] = {signal.SIGTERM: self._interrupt, signal.SIGHUP: self._interrupt}
        numbers |= {signal.SIGWINCH: self._resize} if self._pty else {signal.SIGINT: self._interrupt}
        for number, act in numbers.items():
            self._loop.add_signal_handler(number, act, *([number] if act == self._interrupt else []))
        if stdin:
            # A thread, since a file can't be waited for; a daemon, since it may wait for a key for ever.
            threading.Thread(target=self._read, daemon=True).start()
        shown = {"stdout": Shown(sys.stdout, self._pty), "stderr": Shown(sys.stderr, self._pty)}
        try:
            async for name, data in self._process.output():
                shown[name].write(data)
            return await self._process.wait()
        finally:
            for number in numbers:
                self._loop.remove_signal_handler(number)

    def _read(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, futures.CancelledError):  # it has all ended meanwhile
            while data := os.read(0, CUT):
                asyncio.run_coroutine_threadsafe(self._send(self._process.write, data), self._loop).result()
            asyncio.run_coroutine_threadsafe(self._send(self._process.close_stdin), self._loop).result()

    async def _send(self, act: Callable[..., Awaitable[None]], *given: Any) -> None:
        async with self._order:
            with contextlib.suppress(LayerError):  # whoever reads the output hears why
                await act(*given)

    def _later(self, act: Callable[..., Awaitable[None]], *given: Any) -> None:
        task = self._loop.create_task(self._send(act, *given))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _resize(self) -> None:
        self._later(self._process.resize, *window())

    def _interrupt(self, number: int) -> None:
        """The first one is passed on, so that the command can clean up; the second ends it, and so does time unless it was Ctrl-C."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._later(self._process.signal, number)
            if number != signal.SIGINT:
                self._loop.call_later(GRACE, self._later, self._process.kill)
        else:
            self._later(self._process.kill)


async def execute(
    box: str, command: str | Sequence[str], *, pty: bool = False, stdin: bool = False, **more: Any
) -> Result:
    """Run a command in a box with our input and output, and its terminal ours if `pty`; it ends when we do."""
    found = await AsyncSandbox.connect(box)
    process = await found.start(command, pty=window() if pty else None, stdin=stdin, attached=True, **more)
    with raw_mode(pty and sys.stdin.isatty()):
        return await Joined(process, pty).run(stdin)


def exit_code(result: Result) -> int:
    """As a shell says it: a command that was killed by signal N exits with 128 + N."""
    return result.exit_code if result.exit_code >= 0 else 128 - result.exit_code
