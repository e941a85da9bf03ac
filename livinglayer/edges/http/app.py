"""App: one ASGI application for everybody who asks: it checks the name it is asked by, finds the part, and tells errors."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...errors import Denied, LayerError, NotFound, Unauthenticated
from . import home, tracing
from .serving import Serving

Part = Callable[[Serving, Request], Awaitable[Response]]
PORT_HOST = re.compile(r"(\d{1,5})-([a-z0-9-]{1,64})")
PORT = re.compile(r"[0-9]{1,5}")
ENVD, INTERPRETER = 49983, 49999
# What E2B's clients ask of the control plane when they are not told another name for it than ours.
CONTROL = frozenset("sandboxes snapshots templates default-templates volumes volumecontent secrets teams".split())
VERSION = re.compile(r"v\d")
PAGES = {
    "": home.page,
    "login": home.login,
    "logout": home.logout,
    "healthz": home.healthz,
    "readyz": home.readyz,
    "metrics": home.metrics,
}
log = logging.getLogger("livinglayer.http")


def part(name: str) -> Any:
    """A module of the edges, loaded when it is first asked for."""
    return importlib.import_module(f"livinglayer.edges.{name}")


class App:
    """The server, as ASGI calls it."""

    def __init__(self, serving: Serving, access_log: bool = False) -> None:
        self.serving, self.access_log = serving, access_log
        self.span = tracing.spans()
        self._mcp: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        began, headers, status = time.perf_counter(), Headers(scope=scope), 0
        name, act = self._route(scope, headers)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.accept"):
                status = message.get("status", 101)
                self.serving.metrics.answered(name, status, time.perf_counter() - began)
            await send(message)

        self.serving.metrics.open[name] += 1
        try:
            with self.span(name, scope, headers):
                await act(scope, receive, sending)
        except LayerError as error:
            await self._tell(error, scope, sending, bool(status))
        except Exception:
            log.exception("%s %s", scope.get("method"), scope["path"])
            await self._tell(
                LayerError("something went wrong in the server; its log says more"), scope, sending, bool(status)
            )
        finally:
            self.serving.metrics.open[name] -= 1
            if self.access_log:
                client, ms = scope.get("client"), (time.perf_counter() - began) * 1000
                log.info(
                    "%s %s %s", scope.get("method", "WS"), scope["path"], status,
                    extra={"part": name, "address": client[0] if client else None, "ms": round(ms, 3)},
                )  # fmt: skip

    def _route(self, scope: Scope, headers: Headers) -> tuple[str, Callable[[Scope, Receive, Send], Awaitable[None]]]:
        """The part that answers, by the name the server was asked by and the path."""
        named = headers.getlist("host")
        host = hostname(named[0]) if len(named) == 1 else ""  # of two, what stands in front may mean the other
        suffix = "." + hostname(self.serving.domain)
        if host.endswith(suffix) and (found := PORT_HOST.fullmatch(host[: -len(suffix)])):
            return self._box(found[2], int(found[1]))
        if host not in self.serving.hosts and not host.endswith(suffix):
            return "refused", _stranger
        if (origin := headers.get("origin")) and hostname(origin.partition("://")[2]) not in self.serving.hosts:
            return "refused", _foreign  # a page of somebody else, or of a box
        if box := headers.get("e2b-sandbox-id"):
            port = headers.get("e2b-sandbox-port", "")
            return self._box(box, int(port) if PORT.fullmatch(port) else ENVD)
        first, _, rest = scope["path"].lstrip("/").partition("/")
        if scope["type"] != "http":
            return "refused", _nothing
        if first == "api" or scope["path"] == "/openapi.json":
            return "native", self._answer("http.native")
        if first == "mcp":
            return "mcp", self._mcp or _nothing
        if (
            first in CONTROL
            or (VERSION.fullmatch(first) and rest.partition("/")[0] in CONTROL)
            or host == "api" + suffix
        ):
            return "e2b", self._answer("e2b.control")
        if first == "files":  # a signed URL carries no box
            return "envd", self._signed
        if first == "login" and rest.startswith("oidc"):
            return "login", self._answer("http.oidc")
        if first in PAGES and not rest:
            return first or "home", self._answered(PAGES[first])
        return "refused", _nothing

    def _box(self, id: str, port: int) -> tuple[str, Callable[[Scope, Receive, Send], Awaitable[None]]]:
        name = {ENVD: "envd", INTERPRETER: "interpreter"}.get(port, "ports")

        async def act(scope: Scope, receive: Receive, send: Send) -> None:
            reach = part("e2b.reach")

            def wakes(public: bool) -> bool:  # a stranger who knows an id wakes nothing that is private
                if name == "envd":
                    return bool(part("e2b.envd").proves(self.serving, scope, id))
                return public or bool(part("e2b.ports").proves(self.serving, scope, id))

            try:
                found = await reach.reach(self.serving, id, wakes)
            except reach.Gone as gone:
                return await reach.gone(gone, scope, receive, send)
            given = (found,) if name != "ports" else (found, port)
            await part(f"e2b.{name}").handle(self.serving, scope, receive, send, *given)

        return name, act

    async def _signed(self, scope: Scope, receive: Receive, send: Send) -> None:
        await part("e2b.envd").signed(self.serving, scope, receive, send)

    def _answer(self, module: str) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        return self._answered(lambda serving, request: part(module).handle(serving, request))

    def _answered(self, handle: Part) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        async def act(scope: Scope, receive: Receive, send: Send) -> None:
            response = await handle(self.serving, Request(scope, receive))
            await response(scope, receive, send)

        return act

    async def _tell(self, error: LayerError, scope: Scope, send: Send, begun: bool) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008 if error.status < 500 else 1011})
        if begun:  # half an answer can only be cut off, which is what happens to one that is left unfinished
            return log.info("an answer was cut off: %s", error)
        await told(error)(scope, _deaf, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            server = part("mcp.server")
            await stack.enter_async_context(server.running(self.serving))
            self._mcp = server.asgi(self.serving)
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def hostname(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host.partition("]")[0][1:].lower()
    return host.partition(":")[0].lower()


def told(error: LayerError) -> Response:
    """An error as the native API tells it."""
    status = error.details.get("status", error.status)
    body: dict[str, Any] = {"code": error.code, "message": error.message, "hint": error.hint}
    body |= {name: error.details[name] for name in ("rows", "execution") if error.details.get(name)}
    headers = {}
    if (allowed := error.details.get("allow")) is not None:
        headers["allow"] = str(allowed)
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = 'Bearer realm="layer"'
    if (after := error.details.get("retry_after")) is not None:
        headers["retry-after"] = str(after)
    content = json.dumps({"error": body}).encode()
    return Response(content, int(str(status)), headers, "application/json")


async def _stranger(scope: Scope, receive: Receive, send: Send) -> None:
    # By whichever name a page of a stranger made a browser ask us (DNS rebinding), it is not one of ours.
    raise Denied(
        f"this server is not known as {hostname(Headers(scope=scope).get('host', ''))!r:.80}", hint="layer up --allow-host NAME", status=421
    )  # fmt: skip


async def _foreign(scope: Scope, receive: Receive, send: Send) -> None:
    raise Denied("pages of other origins may not ask this server", hint="layer up --allow-host NAME")


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(f"there is nothing at {scope['path']!r:.120}", hint="/ tells what is")


async def _deaf() -> Message:
    return {"type": "http.disconnect"}
