"""Asking: one request to a box's envd: as whom, until when, and where its paths lead."""

from __future__ import annotations

import asyncio
import base64
import binascii
import posixpath
import time
from typing import Any

from starlette.types import Scope

from ...errors import Conflict, LayerError, NotFound
from ..http.serving import Serving
from .frames import Failure, Incoming
from .reach import Reached, forget, reach

KNOWN = 10.0  # seconds for which a user of a box is believed to stay who it is
MOST = 4096  # users that are remembered
LONGEST = 10 * 365 * 86400.0


class Asked:
    """One request."""

    def __init__(self, serving: Serving, box: Reached, headers: dict[bytes, bytes], incoming: Incoming) -> None:
        self.serving, self.box, self.headers, self.incoming = serving, box, headers, incoming
        self.loop = asyncio.get_running_loop()
        self.user = username(headers.get(b"authorization", b"")) or box.user
        self.cwd = ""  # as it was last resolved

    @property
    def seconds(self) -> float | None:
        """Until when it must be over, from now; None: whenever."""
        given = self.headers.get(b"connect-timeout-ms", b"")
        if not given:
            return None
        if not given.isdigit() or len(given) > 10:
            raise Failure("invalid_argument", "connect-timeout-ms is not a whole number of milliseconds")
        return min(LONGEST, int(given) / 1000) or None

    @property
    def interval(self) -> float:
        """Seconds without a word after which a stream gives a sign of life."""
        given = self.headers.get(b"keepalive-ping-interval", b"")
        return max(1.0, float(given)) if given.isdigit() and len(given) < 6 else 90.0

    async def first(self) -> dict[str, Any]:
        """The one message of a request that streams."""
        message = await self.incoming.message()
        if message is None:
            raise Failure("invalid_argument", "the stream has no message")
        return message

    async def lost(self) -> None:
        """The box has ended: returns when whoever looks for it hears so, as clients do that are cut off."""
        forget(self.serving, self.box.id)
        for _ in range(40):
            try:
                await reach(self.serving, self.box.id, wake=False)
            except LayerError:
                return
            forget(self.serving, self.box.id)
            await asyncio.sleep(0.05)

    async def path(self, path: str) -> str:
        """Where a path leads: relative ones and ~ begin at the user's home."""
        self.cwd = resolve(path, "" if path.startswith("/") else await home(self.serving, self.box, self.user))
        return self.cwd


def username(authorization: bytes) -> str | None:
    """The user of Basic auth; its password says nothing."""
    scheme, _, given = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[0] or None
    except (binascii.Error, UnicodeDecodeError):
        return None


async def home(serving: Serving, box: Reached, user: str) -> str:
    """The home of a user of the box; Failure when there is no such user."""
    known: dict[tuple[str, str], tuple[float, str]] = serving.more.setdefault("homes", {})
    found = known.get((box.id, user))
    if found is None or found[0] < time.monotonic():
        if not user or "\0" in user or ">" in user or len(user) > 63:
            raise Failure("unauthenticated", f"invalid username: {user!r:.80}")
        try:
            told = await box.box.who(user)
        except LayerError as error:
            if is_gone(error):
                raise
            raise Failure("unauthenticated", f"invalid username: {user!r}") from None
        if len(known) >= MOST:
            known.clear()
        known[box.id, user] = found = (time.monotonic() + KNOWN, told["home"])
    return found[1]


def resolve(path: str, home: str) -> str:
    """An absolute path, without dots."""
    if "\0" in path:
        raise Failure("invalid_argument", "a path has no NUL")
    if path.startswith("~"):
        if len(path) > 1 and path[1] != "/":
            raise Failure("invalid_argument", "cannot expand user-specific home dir")
        path = "." + path[1:]
    path = "/" + posixpath.normpath(posixpath.join(home, path)).lstrip("/")
    try:
        if len(path.encode()) > 4000:
            raise Failure("invalid_argument", f"the path is longer than 4000 bytes: {path[:60]!r}…")
    except UnicodeEncodeError:
        raise Failure("invalid_argument", "the path is not text") from None
    return path


def is_gone(error: LayerError) -> bool:
    """Whether it is the box that is not there, rather than something in it."""
    return isinstance(error, NotFound | Conflict) and "of" not in error.details


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """What a request says of itself."""
    return dict(scope["headers"])
