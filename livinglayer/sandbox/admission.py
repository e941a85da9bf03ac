"""A host that is full lets no more boxes in: who asks for one waits in line, for a while."""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LimitExceeded
from .blueprint import parse_size

if TYPE_CHECKING:
    from .host import Host

BOXES = int(os.environ.get("LAYER_HOST_BOXES", "4000"))  # on one host
MEMORY = parse_size(
    os.environ.get("LAYER_HOST_MEMORY") or 1 << 62, "LAYER_HOST_MEMORY"
)  # that its boxes may have together
RESERVE = 128 << 20  # bytes of the machine's memory that stay free
WAIT = float(os.environ.get("LAYER_HOST_WAIT", "30"))  # seconds in line, unless the caller says otherwise


class Admission:
    """Who may make a box now; others wait in the order in which they came."""

    def __init__(self, host: "Host") -> None:
        self._host = host
        self._line: deque[tuple[asyncio.Future[None], int]] = deque()
        self._entering = 0  # let in, their boxes are being made
        self._free = (0.0, 0)

    def full(self, memory: int) -> str | None:
        """Why there is no room for a box with this much memory; None when there is."""
        boxes = self._host.boxes
        if len(boxes) + self._entering >= BOXES:
            return f"it has {len(boxes)} boxes, and may have {BOXES}"
        if not self.affords(memory):
            return f"its boxes may have {MEMORY} bytes of memory together, and a box of {memory} more is too much"
        if time.monotonic() - self._free[0] > 0.2:
            self._free = (time.monotonic(), _available())
        if self._free[1] < RESERVE:
            return f"the machine has {self._free[1]} bytes of memory left"
        return None

    @property
    def crowded(self) -> bool:
        """Whether somebody waits."""
        return bool(self._line)

    def affords(self, memory: int) -> bool:
        """Whether so much more may be promised."""
        if MEMORY >= 1 << 62:
            return True
        promised = sum(box.blueprint.memory for box in self._host.boxes.values() if box.state != "suspended")
        return promised + memory <= MEMORY

    @contextlib.asynccontextmanager
    async def room(self, memory: int, seconds: float | None) -> AsyncIterator[None]:
        """Room for one more box while it is made. LimitExceeded when there is none within `seconds`."""
        why = self.full(memory)
        if why is None and not self._line:
            self._entering += 1
        else:
            await self._stand_in_line(memory, WAIT if seconds is None else seconds, why)
        try:
            yield
        finally:
            self._entering -= 1
            self.wake()

    async def _stand_in_line(self, memory: int, seconds: float, why: str | None) -> None:
        waiter: asyncio.Future[None] = self._host.loop.create_future()
        place = (waiter, memory)
        self._line.append(place)
        self._host.keeping.evict()  # boxes that wait for nobody in particular go first
        self._host.waiting.evict()
        try:
            await asyncio.wait_for(asyncio.shield(waiter), seconds)
        except TimeoutError:
            raise LimitExceeded(
                f"the host is full: {self.full(memory) or why}, and for {seconds:g} s none has ended",
                hint="layer box list; kill what is not needed, or raise LAYER_HOST_BOXES or LAYER_HOST_MEMORY",
            ) from None
        except asyncio.CancelledError:
            if waiter.done():  # let in, and gone
                self._entering -= 1
                self._host.loop.call_soon(self.wake)
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._line.remove(place)
            waiter.cancel()

    def wake(self) -> None:
        """Something may have room now: whoever came first is let in first."""
        while self._line:
            waiter, memory = self._line[0]
            if not waiter.done():
                if self.full(memory):
                    return
                self._entering += 1
                waiter.set_result(None)
            self._line.popleft()


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62
