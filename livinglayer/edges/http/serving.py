"""Serving: what every part of the server shares: the layer, threads for what blocks, and who asks."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from starlette.requests import ClientDisconnect, Request

from ...errors import Denied, Invalid, LimitExceeded

if TYPE_CHECKING:
    from ...layer import Layer
    from .auth import Gate
    from .metrics import Metrics

T = TypeVar("T")
P = ParamSpec("P")
THREADS = 32  # that may wait for the database at once; more would only wait for each other
BODY = 16 << 20  # bytes of a request, where a part does not say otherwise
PATIENCE = 60.0  # seconds in which a request must have arrived
ARRIVED = "livinglayer.body"  # where the scope of a request keeps its body, once somebody has read it


@dataclass(frozen=True)
class Caller:
    """Who asks: a principal, with the layer as it is for them."""

    principal: int
    name: str
    layer: Layer
    scope: frozenset[str] | None = None  # None: everything its principal may
    token: int | None = None
    kind: str = "api"

    def may(self, part: str) -> bool:
        """Whether its token is for a part: read, write or boxes."""
        return self.scope is None or part in self.scope

    def require(self, part: str) -> None:
        """Denied when its token is not for a part."""
        if self.scope is not None and not self.may(part):
            raise Denied(
                f"this token is for {', '.join(sorted(self.scope))}, not for {part}",
                hint="layer token create NAME --scope …",
            )


@dataclass
class Serving:
    """The server's own state; `layer` acts as its owner: no request is answered with it."""

    layer: Layer
    url: str
    domain: str  # boxes' ports are at PORT-ID.domain
    hosts: frozenset[str]  # names under which the server may be asked
    gate: Gate
    metrics: Metrics
    tls: bool = False  # whether people reach it over HTTPS
    began: float = field(default_factory=time.time)
    closing: asyncio.Event = field(default_factory=asyncio.Event)  # streams end when it is set
    more: dict[str, Any] = field(default_factory=dict)  # what parts keep for themselves
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(THREADS, "layer-serving"))

    async def do(self, act: Callable[P, T], *args: P.args, **given: P.kwargs) -> T:
        """Run what blocks on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, functools.partial(act, *args, **given))

    def acting(self, principal: int) -> Layer:
        """The layer as a principal has it."""
        return self.layer.acting_as(principal)


def address_of(request: Request) -> str:
    """Where a request comes from."""
    return request.client.host if request.client else ""


async def body(request: Request, limit: int = BODY, seconds: float = PATIENCE) -> bytes:
    """All of a request's body; refused when it is too large or too slow."""
    arrived: bytes | None = request.scope.get(ARRIVED)
    if arrived is not None:
        if len(arrived) > limit:
            raise too_large(limit)
        return arrived
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise Invalid(f"the request did not arrive within {seconds:g} seconds", status=408) from None
    except ClientDisconnect:
        raise Invalid("the client has hung up", status=400) from None
    return b"".join(parts)


def too_large(limit: int) -> LimitExceeded:
    return LimitExceeded(f"the request is larger than {limit} bytes", status=413)
