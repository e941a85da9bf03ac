"""What was done to and by a box: one line of JSON an event, kept after the box is gone."""

import collections
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KEPT = 512  # traces of boxes that have ended
LATEST = 2000  # events of a living box that are at hand without reading its file
LARGEST = 64 << 20  # bytes of one trace; what comes after is counted, not kept


class Trace:
    """The events of one box; written behind, so that a command does not wait for a disk."""

    count = 0  # events of all boxes

    def __init__(self, directory: Path, box: str) -> None:
        self.path = directory / f"{box}.jsonl"
        self._latest: collections.deque[dict[str, Any]] = collections.deque(maxlen=LATEST)
        self._pending: list[dict[str, Any]] = []
        self._size, self.dropped = 0, 0
        self.mark = 0  # how many events there were of all boxes when the last of this one was added
        self.also: Callable[[dict[str, Any]], None] | None = None  # hears of every event at once

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        """Record one event with the time."""
        entry = {"at": time.time(), "event": event, **fields}
        Trace.count += 1
        self.mark = Trace.count
        self._latest.append(entry)
        self._pending.append(entry)
        if self.also:
            self.also(entry)
        if len(self._pending) >= 1000:
            self.flush()
        return entry

    def flush(self) -> None:
        """Write what is pending."""
        if not self._pending:
            return
        lines = "".join(json.dumps(entry, ensure_ascii=True, default=str) + "\n" for entry in self._pending)
        if self._size + len(lines) > LARGEST:
            self.dropped += len(self._pending)
        else:
            self._size += len(lines)
            with open(self.path, "a") as file:
                file.write(lines)
        self._pending.clear()

    def events(self) -> list[dict[str, Any]]:
        """All of them, oldest first."""
        self.flush()
        return list(read(self.path))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a trace file; half a line at its end, left by a crash, is passed over."""
    try:
        with open(path) as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    return
    except FileNotFoundError:
        return


def tail(path: Path, offset: int, most: int = 1 << 20) -> tuple[list[dict[str, Any]], int]:
    """The events after `offset`, about `most` bytes of them, and the offset after those."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(most)
            if b"\n" not in data:
                data += file.readline()
    except FileNotFoundError:
        return [], offset
    data = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in data.splitlines()], offset + len(data)


def prune(directory: Path, alive: set[str]) -> None:
    """Keep the newest traces of boxes that have ended."""
    ended = [path for path in directory.glob("*.jsonl") if path.stem not in alive]
    ended.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in ended[KEPT:]:
        path.unlink(missing_ok=True)
