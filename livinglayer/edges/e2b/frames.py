"""Frames: the Connect protocol as E2B's clients speak it: JSON, alone or in frames of a flag, a length and a message."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Receive, Send

from ...errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound, TimedOut, Unauthenticated

MESSAGE = 16 << 20  # bytes of one message
PATIENCE = 60.0  # seconds in which a request must have arrived
# What a code is told as where there is no stream; the body counts, so that none of what a caller did wrong is a 5xx.
STATUS = {
    "canceled": 499, "unknown": 500, "invalid_argument": 400, "deadline_exceeded": 408, "not_found": 404, "already_exists": 409,
    "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400, "unimplemented": 404, "internal": 500,
    "unavailable": 503, "unauthenticated": 401,
}  # fmt: skip
CODES: tuple[tuple[type[LayerError], str], ...] = (
    (Invalid, "invalid_argument"),
    (NotFound, "not_found"),
    (Denied, "permission_denied"),
    (Conflict, "failed_precondition"),
    (LimitExceeded, "resource_exhausted"),
    (TimedOut, "deadline_exceeded"),
    (Unauthenticated, "unauthenticated"),
)
JSON = [(b"content-type", b"application/json")]
STREAM = [(b"content-type", b"application/connect+json")]
OVER = b"\x02\x00\x00\x00\x02{}"


class Failure(Exception):
    """An error as Connect tells it; `status` is that of the answer where it is no stream."""

    def __init__(self, code: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status or STATUS[code]

    @property
    def body(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}


class Left(Exception):
    """The client has hung up: there is nobody to tell anything."""


def failure(error: LayerError) -> Failure:
    """An error of ours as Connect tells it."""
    code = next((code for kind, code in CODES if isinstance(error, kind)), "unavailable")
    return Failure(code, error.message)


def frame(message: bytes) -> bytes:
    """One message of a stream."""
    return b"\x00" + len(message).to_bytes(4, "big") + message


def over(failure: Failure | None = None) -> bytes:
    """The last frame of a stream."""
    if failure is None:
        return OVER
    message = json.dumps({"error": failure.body}).encode()
    return b"\x02" + len(message).to_bytes(4, "big") + message


def parse(message: bytes) -> dict[str, Any]:
    """A message, which is an object."""
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        raise Failure("invalid_argument", "the message is not JSON") from None
    if not isinstance(found, dict):
        raise Failure("invalid_argument", f"the message is {type(found).__name__}, not an object")
    return found


class Incoming:
    """What a client sends, as it comes: never more of it in memory than one message."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._buffer, self._more = receive, bytearray(), True

    async def piece(self, seconds: float | None = PATIENCE) -> bytes:
        """Some of the body, b"" at its end."""
        while self._more:
            try:
                if seconds is None:
                    message = await self._receive()
                else:
                    async with asyncio.timeout(seconds):
                        message = await self._receive()
            except TimeoutError:
                raise Failure("deadline_exceeded", f"nothing came for {seconds:g} seconds") from None
            if message["type"] == "http.disconnect":
                raise Left
            self._more = message.get("more_body", False)
            if piece := message.get("body", b""):
                return bytes(piece)
        return b""

    async def whole(self) -> bytes:
        """All of it."""
        while piece := await self.piece():
            self._buffer += piece
            if len(self._buffer) > MESSAGE:
                raise Failure("resource_exhausted", f"the message is larger than {MESSAGE} bytes", 413)
        return bytes(self._buffer)

    async def message(self, seconds: float | None = PATIENCE) -> dict[str, Any] | None:
        """The message of the next frame; None after the last."""
        buffer = self._buffer
        while len(buffer) < 5 or len(buffer) < 5 + int.from_bytes(buffer[1:5], "big"):
            if len(buffer) >= 5:
                check_head(buffer)
            if not (piece := await self.piece(seconds)):
                if buffer:
                    raise Failure("invalid_argument", f"the stream ends within a frame, after {len(buffer)} bytes")
                return None
            buffer += piece
        check_head(buffer)
        length = int.from_bytes(buffer[1:5], "big")
        flag, message = buffer[0], bytes(buffer[5 : 5 + length])
        del buffer[: 5 + length]
        return None if flag & 2 else parse(message)


def check_head(buffer: bytearray) -> None:
    """Refuse a frame by how it begins."""
    if buffer[0] & 1:
        raise Failure("unimplemented", "compressed frames are not taken", 415)
    if buffer[0] & ~3:
        raise Failure("invalid_argument", f"a frame can't have the flags {buffer[0]:#x}")
    if (length := int.from_bytes(buffer[1:5], "big")) > MESSAGE:
        raise Failure("resource_exhausted", f"a frame of {length} bytes is larger than {MESSAGE}", 413)


async def answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] = JSON) -> None:
    """A whole answer."""
    length = [] if status == 204 else [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers + length})
    await send({"type": "http.response.body", "body": body})


async def plain(send: Send, status: int, message: str) -> None:
    """An error of what is no procedure: `{"code": int, "message": str}`."""
    await answer(send, status, json.dumps({"code": status, "message": message}).encode())


def text(message: dict[str, Any], *names: str, default: str | None = None) -> str:
    """A text of a message, by its name in JSON or in the schema."""
    value = field(message, *names)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or "\0" in value:
        raise Failure("invalid_argument", f"{names[0]!r} is not a text")
    return value


def flag(message: dict[str, Any], *names: str) -> bool:
    """A truth of a message."""
    value = field(message, *names)
    if value is not None and not isinstance(value, bool):
        raise Failure("invalid_argument", f"{names[0]!r} is neither true nor false")
    return bool(value)


def number(message: dict[str, Any], name: str, most: int = 0xFFFFFFFF) -> int:
    """A whole number of a message, which JSON may have as a text."""
    value = message.get(name) or 0
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise Failure("invalid_argument", f"{name!r} is not a whole number up to {most}")
    return value


def part(message: dict[str, Any], name: str) -> dict[str, Any] | None:
    """A message in a message."""
    value = message.get(name)
    if value is not None and not isinstance(value, dict):
        raise Failure("invalid_argument", f"{name!r} is not an object")
    return value


def field(message: dict[str, Any], *names: str) -> Any:
    """The first of these that is there."""
    return next((value for name in names if (value := message.get(name)) is not None), None)
