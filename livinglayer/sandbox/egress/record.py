"""Recordings: every response a box got, in a file, and answers from it without dialing.

Lines of JSON: body chunks `{"id", "data"}` as they come, then one line for the exchange `{"id", "method", "url", "body",
"status", "headers", "trailers"}`; what has no such line was cut off and is not replayed. Values of secrets are in none
of it: requests are kept as the box wrote them, responses as the box saw them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from livinglayer.errors import Corrupt, NotFound, Unavailable

Headers = list[tuple[bytes, bytes]]
Key = tuple[str, str, str]  # method, url, sha256 of the body


def _text(headers: Headers) -> list[list[str]]:
    return [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]


def _bytes(headers: list[list[str]]) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


class Recorder:
    """Appends exchanges to a file."""

    def __init__(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable(f"can't record into {str(path)!r}: {error.strerror}") from None
        self._file = open(fd, "w", encoding="ascii")
        self._next = 0
        self._run = os.urandom(4).hex()  # ids of an earlier run in the same file are other ids

    def begin(self) -> str:
        """An id for an exchange; their order is the order in which requests began."""
        self._next += 1
        return f"{self._run}-{self._next}"

    def data(self, ident: str, data: bytes) -> None:
        self._line({"id": ident, "data": base64.b64encode(data).decode()})

    def end(self, ident: str, key: Key, status: int, headers: Headers, trailers: Headers) -> None:
        method, url, body = key
        self._line({
            "id": ident, "method": method, "url": url, "body": body,
            "status": status, "headers": _text(headers), "trailers": _text(trailers),
        })  # fmt: skip
        self._file.flush()

    def _line(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Recorded:
    """One response, its body still in the file."""

    status: int
    headers: Headers
    trailers: Headers
    chunks: tuple[int, ...]


class Replay:
    """Answers from a recording: the first request of a kind gets the first response of that kind, the second the second."""

    def __init__(self, path: Path) -> None:
        self._found: dict[Key, list[Recorded]] = defaultdict(list)
        self._asked: dict[Key, int] = defaultdict(int)
        try:
            self._file = open(path, "rb")
        except OSError as error:
            raise NotFound(f"no recording at {str(path)!r}: {error.strerror}") from None
        runs: dict[str, int] = {}
        chunks: dict[str, list[int]] = defaultdict(list)
        ended: list[tuple[int, int, Key, Recorded]] = []
        at = 0
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):
                break  # the recorder was stopped within a line
            try:
                line = json.loads(raw)
                run, _, order = line["id"].partition("-")
                if "data" in line:
                    chunks[line["id"]].append(at)
                else:
                    seen = Recorded(
                        line["status"],
                        _bytes(line["headers"]),
                        _bytes(line["trailers"]),
                        tuple(chunks.pop(line["id"], ())),
                    )
                    key = (line["method"], line["url"], line["body"])
                    ended.append((runs.setdefault(run, len(runs)), int(order), key, seen))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise Corrupt(f"line {number} of recording {str(path)!r} is not one of a recording") from None
            at += len(raw)
        for _, _, key, seen in sorted(ended, key=lambda one: one[:2]):
            self._found[key].append(seen)

    def has(self, key: Key) -> bool:
        """Whether there is a response to this request that was not given yet."""
        return self._asked[key] < len(self._found.get(key, ()))

    def find(self, key: Key) -> Recorded:
        """The next response to this request; NotFound if it was not recorded, or not so many times."""
        seen, count = self._found.get(key, []), self._asked[key]
        if count >= len(seen):
            method, url, body = key
            with_body = "" if body == EMPTY else f" with body sha256:{body[:12]}…"
            times = f"only {len(seen)} times" if seen else "not"
            raise NotFound(f"{method} {url}{with_body} is {times} in the recording")
        self._asked[key] += 1
        return seen[count]

    def body(self, seen: Recorded) -> Iterator[bytes]:
        """The chunks of a recorded body."""
        for at in seen.chunks:
            self._file.seek(at)
            yield base64.b64decode(json.loads(self._file.readline())["data"])

    def close(self) -> None:
        self._file.close()


EMPTY = hashlib.sha256().hexdigest()
