"""Reach: the way to a held box by its id, for everything that speaks E2B with it; no database is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ...errors import LayerError, NotFound
from ...law import held
from ...sandbox.client import async_client
from ...sandbox.sandbox import AsyncSandbox
from ..http.serving import Serving

FRESH = 1.0  # seconds that what the host said of a box is believed; what it does meanwhile tells by itself
MOST = 4096  # boxes that are remembered


class Gone(NotFound):
    """The box is not there, or stands still: nothing in it answers."""

    code, status = "gone", 502

    def __init__(self, message: str, hint: str | None = None, **details: object) -> None:
        super().__init__(message, hint, **details)


@dataclass
class Reached:
    """One box, as the data plane uses it."""

    id: str
    box: AsyncSandbox
    token: str  # what envd is asked with
    traffic: str | None  # what its ports are asked with, where they are not public
    public: bool
    info: dict[str, Any]  # as the host describes it
    held: dict[str, Any]  # as the layer knows it: principal, execution, blueprint, metadata, public, annotations, …
    environment: dict[str, str]  # of each command; the host sets it by itself
    user: str = "user"
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is killed or paused: what is open is cut
    seen: float = 0.0


def missing(id: str) -> Gone:
    """What is said of a box that does not answer, in words that E2B's clients look for."""
    return Gone(f"The sandbox {id} was not found")


async def reach(serving: Serving, id: str, wake: bool | Callable[[bool], bool] = True) -> Reached:
    """A box by its id; one that stands still is let go on if it does so by itself and `wake` is wanted, else it is Gone.

    Whether it is wanted may hang on whether the box's ports are public.
    """
    known = _known(serving)
    found = known.get(id)
    if found is not None and time.monotonic() - found.seen < FRESH:
        return found
    try:
        info = await async_client().call({"do": "get", "box": id, "environment": True})
    except NotFound:
        forget(serving, id)
        raise missing(id) from None
    told = held.told(info)
    if info["id"] != id or info["labels"].get("layer") != serving.layer.id or not told:
        raise missing(id)
    if held.resting(info):
        wanted = wake if isinstance(wake, bool) else wake(bool(told.get("public", True)))
        if not (wanted and info["life"]["wakes"]):
            forget(serving, id)
            raise missing(id)
        try:
            info |= await async_client().call({"do": "resume", "box": id})
        except LayerError:
            forget(serving, id)
            raise missing(id) from None
    environment = info.pop("environment", None) or {}
    if found is None:
        public = bool(told.get("public", True))
        traffic = held.token(serving.layer, id, "traffic")
        found = Reached(
            id,
            AsyncSandbox(async_client(), info),
            token(serving, id),
            None if public else traffic,
            public,
            info,
            told,
            environment,
            info.get("user") or "user",
        )
        if len(known) >= MOST:
            known.pop(next(iter(known)))
        known[id] = found
    found.info, found.held, found.environment, found.seen = info, told, environment, time.monotonic()
    return found


def forget(serving: Serving, id: str) -> None:
    """A box was killed, paused or changed: whoever has something open with it is told."""
    if (found := _known(serving).pop(id, None)) is not None:
        found.gone.set()


def stale(serving: Serving, id: str) -> None:
    """A box was changed: the next to reach it asks the host."""
    if (found := _known(serving).get(id)) is not None:
        found.seen = 0.0


async def ids(serving: Serving) -> list[str]:
    """Every held box of the layer that its host has: whose `token` it is may be tried out by whoever has no id."""
    found = await async_client().call({"do": "list", "labels": {"layer": serving.layer.id}})
    return [info["id"] for info in found if held.told(info)]


def token(serving: Serving, id: str) -> str:
    """What envd of a box is asked with."""
    return held.token(serving.layer, id, "envd")


def _known(serving: Serving) -> dict[str, Reached]:
    known: dict[str, Reached] = serving.more.setdefault("reached", {})
    return known


async def gone(error: Gone, scope: Scope, receive: Receive, send: Send) -> None:
    """502, as E2B's own edge answers for a box that is not there."""
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1011})
    id = error.message.split()[2] if error.message.startswith("The sandbox ") else ""
    body = {"code": 502, "message": error.message, "sandboxId": id}
    await JSONResponse(body, 502, {"Should-Retry": "false"})(scope, receive, send)
