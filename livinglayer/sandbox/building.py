"""Images built by steps, each run in a namespace box of its own."""

import asyncio
import collections
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .blueprint import Blueprint
from .box import environment
from .commands import Command, encode_exec
from .images import Image, Ran
from .wire import DONE, EXIT

if TYPE_CHECKING:
    from .host import Host


HEARD = 1 << 20  # bytes that a step prints and whoever listens is told of


class Lines:
    """What a step prints, in lines; a flood of them is cut."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self._hear, self._left, self._begun = hear, HEARD, b""

    def feed(self, data: bytes) -> None:
        """More of it."""
        if self._left <= 0:
            return
        *whole, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > 4096:
            whole, self._begun = [*whole, self._begun], b""
        for line in whole:
            self._left -= len(line) + 16
            self._hear(line[-4096:].decode("utf-8", "replace") if self._left > 0 else "… (it prints more)")
            if self._left <= 0:
                return

    def end(self) -> None:
        """The last of it."""
        if self._begun and self._left > 0:
            self._hear(self._begun.decode("utf-8", "replace"))


async def build(
    host: "Host",
    name: str,
    base: str,
    steps: Sequence[Any],
    egress: Sequence[Any] = (),
    say: Callable[[str], None] = lambda line: None,
    cache: bool = True,
    hear: Callable[[str], None] | None = None,
) -> Image:
    """An image from a base and steps, each run in a namespace box of its own that may reach what `egress` allows, and kept by content.

    `hear` is told what they print, line by line.
    """
    await host.driver("namespace")
    # Who builds is nobody's box: what a box may reach of others is not for it.
    rules = tuple(rule for rule in egress if not (isinstance(rule, Mapping) and "box" in rule))

    async def run_in_box(
        layers: tuple[str, ...], argv: Sequence[str], *, upper: Path, user: str, env: Mapping[str, str], cwd: str
    ) -> Ran:
        return await _run_step(host, rules, layers, argv, upper, user, env, cwd, hear)

    return await host.images.build(name, base, steps, run_in_box, say, cache)


async def _run_step(
    host: "Host",
    egress: tuple[Any, ...],
    layers: tuple[str, ...],
    argv: Sequence[str],
    upper: Path,
    user: str,
    env: Mapping[str, str],
    cwd: str,
    hear: Callable[[str], None] | None,
) -> Ran:
    blueprint = Blueprint(memory=2 << 30, pids=1024, cpu=float(os.cpu_count() or 1), disk=16 << 30, egress=egress)
    box = await host.start(blueprint, await host.driver("namespace"), layers, upper=upper)
    box.keeps_files = True
    try:
        if box.network and host.gateway:
            await host.gateway.serve(box.id, box.network, egress, {})
        over: asyncio.Future[None] = host.loop.create_future()
        said: collections.deque[bytes] = collections.deque(maxlen=64)
        lines = Lines(hear) if hear is not None else None

        def sink(kind: int, data: bytes) -> None:
            if kind in (EXIT, DONE):
                if not over.done():
                    over.set_result(None)
            else:
                said.append(data)
                if lines is not None:
                    lines.feed(data)

        command = Command(box, argv, sink)
        command.start(encode_exec(argv, user, cwd, environment(box, dict(env)), 0))
        await over
        if lines is not None:
            lines.end()
        if command.error:
            raise command.error
        return Ran(command.status or 0, b"".join(said))
    finally:
        await host.kill(box)
