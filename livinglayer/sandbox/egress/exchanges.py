"""Exchanges: what was said to models and by them, kept beside a box as it passes.

Of each there are three files: NAME.request and NAME.answer, the bodies, and NAME.json, the event that told of it, once it
is over.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

KEPT = 1 << 30  # bytes of a box's exchanges
LARGEST = 16 << 20  # of one request or answer
HELD = 1 << 18  # of it in memory


class Exchanges:
    """A box's exchanges with models, in a directory that outlives gateway and host."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.room = KEPT
        try:
            self.room -= sum(entry.stat().st_size for entry in os.scandir(directory))
        except OSError:
            pass

    def begin(self) -> Kept:
        """One more; names sort by time."""
        return Kept(self, f"{time.time_ns():016x}-{os.urandom(3).hex()}")


class Kept:
    """The bodies of one exchange, as far as there is room; whatever goes wrong with them is noted, and hinders nothing."""

    def __init__(self, exchanges: Exchanges, name: str) -> None:
        self._exchanges, self.name = exchanges, name
        self._held: dict[str, bytearray] = {"request": bytearray(), "answer": bytearray()}
        self._sizes = {"request": 0, "answer": 0}
        self.cut: set[str] = set()  # what is not whole

    def add(self, part: str, data: bytes) -> None:
        """More of the `request` or the `answer`."""
        most = min(LARGEST - self._sizes[part], self._exchanges.room)
        if len(data) > most:
            self.cut.add(part)
            data = data[: max(most, 0)]
        self._sizes[part] += len(data)
        self._exchanges.room -= len(data)
        self._held[part] += data
        if len(self._held[part]) > HELD:
            self._write(part)

    def _write(self, part: str) -> None:
        try:
            self._exchanges.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._exchanges.directory / f"{self.name}.{part}"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(self._held[part])
        except OSError:
            self.cut.add(part)
        self._held[part] = bytearray()

    def close(self) -> None:
        """Write what is not written."""
        for part in self._held:
            self._write(part)

    def end(self, event: dict[str, Any]) -> None:
        """Write what was told of it, so that it is not lost with whoever is told."""
        path = self._exchanges.directory / f"{self.name}.json"
        try:
            path.with_suffix(".new").write_text(json.dumps(event))
            os.replace(path.with_suffix(".new"), path)
        except OSError:
            pass
