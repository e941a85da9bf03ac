"""What happens below a directory of a box, gathered until somebody asks for it."""

from typing import Any

from ..errors import LayerError, LimitExceeded
from .agent import Agent, failure
from .wire import DONE, STARTED, Kind, text

MOST = 10_000  # events that may wait
EACH = 64  # of one box
TOLD = (
    0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
)  # of inotify's: not that a file was closed, or a watch ended


class Gathering:
    """One watch that nobody listens to all the time."""

    def __init__(self, agent: Agent, path: str, recursive: bool, user: str, notes: dict[str, Any]) -> None:
        self.agent, self.path, self.notes = agent, path, notes
        self.started = agent.future()
        self._events: list[tuple[int, str]] = []
        self._error: LayerError | None = None
        self._number = agent.open(self._on_frame)
        agent.send(Kind.WATCH, int(recursive).to_bytes(4, "little") + text(user) + text(path), self._number)

    def _on_frame(self, kind: int, payload: bytes) -> None:
        if kind == Kind.EVENT:
            mask = int.from_bytes(payload[:4], "little")
            event = (mask & TOLD, payload[4:].rstrip(b"\0").decode("utf-8", "surrogateescape"))
            if mask & TOLD and (not self._events or self._events[-1] != event):
                self._events.append(event)
            if len(self._events) > MOST:
                self._error = LimitExceeded(
                    f"more than {MOST} events of {self.path!r} waited to be asked for", of="path"
                )
                self.close()
        elif kind == STARTED and not self.started.done():
            self.started.set_result(None)
        elif kind == DONE:
            self.agent.drop(self._number)
            self._error = failure(payload)
            if not self.started.done():
                self.started.set_exception(self._error) if self._error else self.started.set_result(None)

    async def take(self) -> list[tuple[int, str]]:
        """What happened until now, which is then forgotten."""
        for _ in range(2):  # what the kernel has told the agent by the first answer is here by the second
            if self._error is None:
                await self.agent.ping()
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Watch no more."""
        self._events.clear()
        self.agent.drop(self._number)
        if not self.agent.closed:
            self.agent.send(Kind.CANCEL, b"", self._number)
