"""Server: MCP over HTTP and stdio, for clients of every protocol since 2024-11. Who asks is decided before anything else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import mcp_types as types
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.caching import CacheHint
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import Denied, Invalid, LayerError, LimitExceeded, NotFound
from ...law.contracts import token
from ..http.auth import authenticate
from ..http.limits import limits
from ..http.native import do
from ..http.serving import PATIENCE, Caller, Serving
from . import acts, apps, prompts, resources, tasks, tools
from .asking import Context, ask
from .tools import TOOLS, Tool, Use
from .watching import Listener, Watcher, event_sender

BODY = 8 << 20  # bytes of a request
ALL, EACH = 128, 16  # tools at work at once: of all, of one principal
LEAVING = 5.0  # seconds that tools at work have when the server ends
SESSIONS, OWN = 5000, 200  # of the older protocols that may be open: of all, of one principal
LISTENS = 50  # streams of one principal
PATIENT = 2.0  # seconds before work goes on as a task
NOWHERE = -32002  # what the older protocols call a resource that is not there
CALLER = "livinglayer.caller"
ABOUT = """A Living Layer: a versioned, forkable, governed database, with boxes to run code in. Read `schema` first, then `query` with SQL.
Change things with `propose_change` (a fork and its diff; then `merge` or `discard`) or `apply_change`. `why` tells what led to something.
Everything you do is recorded as the principal whose token you hold; what it may not do is not listed."""
HINTS = {
    "tools/list": CacheHint(5000),
    "prompts/list": CacheHint(5000),
    "resources/list": CacheHint(5000),
    "resources/templates/list": CacheHint(3_600_000),
}
log = logging.getLogger("livinglayer.mcp")
T = TypeVar("T")


class _Server(Server[Any]):
    """The package's server, which tells clients of the older protocols that its lists may change."""

    def create_initialization_options(self, notification_options: Any = None, *more: Any, **given: Any) -> Any:
        options = notification_options or NotificationOptions(resources_changed=True, tools_changed=True)
        return super().create_initialization_options(options, *more, **given)


class Speaking:
    """One MCP server over a layer: its handlers, and who listens."""

    def __init__(self, serving: Serving, who: Callable[[Context], Caller]) -> None:
        self.serving, self.who, self.watcher = serving, who, Watcher(serving)
        self.busy: Counter[int] = Counter()
        self.listening: Counter[int] = Counter()
        self.server = _Server(
            "livinglayer", version=version("livinglayer"), title="Living Layer", instructions=ABOUT, cache_hints=HINTS,  # type: ignore[arg-type]
            get_tool_input_schema=lambda name: None,  # no argument of ours is told in headers, too
            on_list_tools=self.list_tools, on_call_tool=self.call_tool, on_list_resources=self.list_resources,
            on_list_resource_templates=self.list_templates, on_read_resource=self.read_resource,
            on_list_prompts=self.list_prompts, on_get_prompt=self.get_prompt, on_completion=self.complete, on_subscribe_resource=self.subscribe, on_unsubscribe_resource=self.unsubscribe, on_subscriptions_listen=self.listen,
        )  # fmt: skip
        self.server.extensions = {tasks.EXTENSION: {}, apps.EXTENSION: {"mimeTypes": [apps.TYPE]}}
        self.server.add_request_handler("tasks/get", tasks.TaskParams, self.get_task)
        self.server.add_request_handler("tasks/update", tasks.UpdateParams, self.update_task)
        self.server.add_request_handler("tasks/cancel", tasks.TaskParams, self.cancel_task)
        self.server.add_notification_handler("notifications/initialized", types.NotificationParams, self.initialized)
        # The key is the same for all servers of a layer, so another one may be asked for the second round.
        state = RequestStateSecurity(
            keys=[token(serving.layer.id, "mcp")], bind_principal=lambda ctx: str(self.who(ctx).principal)
        )
        self.server.middleware.append(RequestStateBoundary(state, default_audience=serving.layer.id))

    async def close(self) -> None:
        """Let go of those who listen; what is at work may end by itself, if it does so soon."""
        self.watcher.close()
        until = time.monotonic() + LEAVING
        while self.busy.total() and time.monotonic() < until:
            await asyncio.sleep(0.05)

    # Tools

    async def list_tools(self, ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        caller = self.who(ctx)
        found = [each.told() for each in (await self.do(tools.offer, caller)).values()]
        part, following = _part(found, params)
        return types.ListToolsResult(tools=part, next_cursor=following)

    async def call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> Any:
        caller = self.who(ctx)
        tool = (await self.do(tools.offer, caller)).get(params.name)
        if tool is None:
            return await self._refuse(caller, params.name)
        trace = (ctx.meta or {}).get("traceparent")
        use = Use(
            caller, params.arguments or {}, f"mcp-{secrets.token_hex(12)}", trace if isinstance(trace, str) else None
        )
        try:
            await self.serving.do(tool.check, use.arguments)
            question = None if tool.ask is None else await do(self.serving, caller, partial(tool.ask, use))
            if question is not None:
                said = await ask(ctx, params, question, tool.person)
                if isinstance(said, types.InputRequiredResult):
                    return said
                if not await self.serving.do(self.watcher.holds, caller):
                    raise Denied("the token has ended while the person was asked, so nothing was done")
                use = Use(caller, use.arguments, use.key, use.trace, said)
            return await self._use(ctx, tool, use)
        except LayerError as error:
            return tools.failure(error)
        except MCPError:
            raise
        except Exception:
            log.exception("tool %s", tool.name)
            return tools.failure(LayerError("something went wrong in the server; its log says more"))

    async def _refuse(self, caller: Caller, name: str) -> types.CallToolResult:
        """What whoever may not use a tool is told; of a function that is not theirs, that there is none."""
        if name in TOOLS:
            try:
                caller.require(TOOLS[name].needs)
                raise Denied(
                    f"{caller.name} may not use {name}: no permission allows it", hint="can tells what you may"
                )
            except Denied as error:
                return tools.failure(error)
        await self.serving.do(self._recorded, caller, name)
        raise MCPError(code=types.INVALID_PARAMS, message=f"Unknown tool: {name[:128]}")

    def _recorded(self, caller: Caller, name: str) -> None:
        """Keep that somebody asked for a function that is there and not theirs."""
        layer = self.serving.layer
        found = tools.offer(Caller(layer.my_id, "", layer)).get(name)
        if found is None or found.function is None:
            return
        resource = f"function:{found.function}"
        refused = Denied(f"{caller.name} may not call {found.function}", action="call", resource=resource)
        layer.ledger.denied(caller.layer.execution_of(caller.principal), refused, "call", resource)

    async def _use(self, ctx: Context, tool: Tool, use: Use) -> Any:
        number = use.caller.principal
        if self.busy[number] >= EACH or self.busy.total() >= ALL:
            raise LimitExceeded("too many tools are at work already", hint="wait for one to end")
        lasting = tasks.Lasting()
        if tool.lasts:
            use = replace(use, begun=lasting.begun)
        since = await self.serving.do(acts.latest, use.layer) if tool.long else 0
        if tool.long or tool.needs == "boxes":
            future = self._begin(tool, use)
        else:
            future = asyncio.ensure_future(do(self.serving, use.caller, partial(tool.run, use)))
        self.busy[number] += 1
        future.add_done_callback(lasting.over)
        future.add_done_callback(lambda _: self.busy.subtract([number]))  # it goes on when the client has gone
        later = (
            (tool.long or tool.lasts)
            and ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
            and tasks.known(ctx.session.client_capabilities)
        )
        while True:
            done, _ = await asyncio.wait({future}, timeout=PATIENT if later else None)
            if done:
                break
            if tool.lasts:
                execution = await self.serving.do(lasting.kept, use)
            else:
                execution = await self.serving.do(acts.execution_of, use.layer, use.key, since)
            if execution is not None:
                future.add_done_callback(
                    lambda ended: ended.cancelled() or ended.exception()
                )  # it is told by tasks/get
                return await self.serving.do(tasks.handle, use.caller, execution)
        value = future.result()
        if later and tool.name == "run_agent":
            return await self.serving.do(tasks.handle, use.caller, value["execution"])
        return tools.answer(value)

    def _begin(self, tool: Tool, use: Use) -> asyncio.Future[Any]:
        """Run a tool on a thread of its own: what is quick never waits for it, nor does the server's end."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def tell(act: Callable[[Any], None], what: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(lambda: None if future.done() else act(what))

        def work() -> None:
            try:
                tell(future.set_result, tool.run(use))
            except BaseException as error:
                tell(future.set_exception, error)

        threading.Thread(target=work, name=f"layer-mcp-{tool.name}", daemon=True).start()
        return future

    # Resources

    async def list_resources(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        part, following = _part(await self.do(resources.listed, self.who(ctx)), params)
        return types.ListResourcesResult(resources=part, next_cursor=following)

    async def list_templates(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        self.who(ctx)
        part, following = _part(resources.templates(), params)
        return types.ListResourceTemplatesResult(resource_templates=part, next_cursor=following)

    async def read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        found = await self.do(resources.read, self.who(ctx), params.uri, about=(ctx, params.uri))
        return types.ReadResourceResult(contents=[found.told(params.uri)], ttl_ms=0, cache_scope="private")

    async def complete(self, ctx: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        found = await self.do(resources.complete, self.who(ctx), params.argument.name, params.argument.value)
        values = types.Completion(values=found[:100], total=len(found), has_more=len(found) > 100)
        return types.CompleteResult(completion=values)

    async def initialized(self, ctx: Context, params: types.NotificationParams) -> None:
        """A client of the older protocols hears of changed lists without asking."""
        with contextlib.suppress(LayerError):
            await self._listener(ctx)

    async def _listener(self, ctx: Context) -> Listener:
        connection = ctx.session._connection  # where the package lets one keep what belongs to a session
        if (known := connection.state.get("listener")) is None:
            known = connection.state["listener"] = Listener(self.who(ctx), event_sender(ctx.session), lists=True)
            await self.watcher.add(known)
            connection.exit_stack.callback(self.watcher.remove, known)
        return known

    async def subscribe(self, ctx: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        listener, caller = await self._telling(ctx, self._listener(ctx)), self.who(ctx)
        found = await self.do(resources.read, caller, params.uri, about=(ctx, params.uri))
        await self._telling(ctx, self.watcher.follow(listener, params.uri, found.digest))
        return types.EmptyResult()

    async def unsubscribe(self, ctx: Context, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        (await self._telling(ctx, self._listener(ctx))).uris.pop(params.uri, None)
        return types.EmptyResult()

    async def listen(
        self, ctx: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Of what was asked for, what this one may see."""
        caller, asked = self.who(ctx), params.notifications
        uris = list(dict.fromkeys(asked.resource_subscriptions or ()))
        if self.listening[caller.principal] >= LISTENS:
            raise MCPError(code=types.INVALID_REQUEST, message=f"{caller.name} has {LISTENS} streams open already")
        bus = InMemorySubscriptionBus()
        handler = ListenHandler(bus)
        lists = bool(asked.tools_list_changed or asked.resources_list_changed)
        listener = Listener(caller, bus.publish, lists, dict.fromkeys(uris), end=handler.close)
        self.listening[caller.principal] += 1
        try:
            await self._telling(ctx, self.watcher.add(listener))
            listener.uris = {uri: was for uri, was in listener.uris.items() if was is not None}
            honored = asked.model_copy(
                update={"resource_subscriptions": list(listener.uris), "prompts_list_changed": None}
            )
            return await handler(ctx, params.model_copy(update={"notifications": honored}))
        finally:
            self.listening[caller.principal] -= 1
            self.watcher.remove(listener)

    # Prompts

    async def list_prompts(self, ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListPromptsResult:
        part, following = _part(prompts.offered(await self.do(tools.offer, self.who(ctx))), params)
        return types.ListPromptsResult(prompts=part, next_cursor=following)

    async def get_prompt(self, ctx: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        offered = await self.do(tools.offer, self.who(ctx))
        return await self.do(prompts.get, params.name, params.arguments or {}, offered)

    # Tasks

    def _knows_tasks(self, ctx: Context, task: str) -> Caller:
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            raise MCPError(code=types.METHOD_NOT_FOUND, message="Method not found", data=ctx.method)
        if not tasks.known(ctx.session.client_capabilities):
            raise tasks.missing()
        if (
            ctx.request is not None and ctx.request.headers.get("mcp-name", task) != task
        ):  # what routes it must be what it is about
            raise MCPError(
                code=types.HEADER_MISMATCH, message="mcp-name header does not match the request body's 'taskId'"
            )
        return self.who(ctx)

    async def get_task(self, ctx: Context, params: tasks.TaskParams) -> dict[str, Any]:
        caller = self._knows_tasks(ctx, params.task_id)
        if not caller.may(
            await self.do(tasks.needs, caller, params.task_id)
        ):  # whoever may begin a task hears what it gave
            await self.do(caller.require, "read")
        return await self.do(tasks.get, caller, params.task_id)

    async def update_task(self, ctx: Context, params: tasks.UpdateParams) -> dict[str, Any]:
        caller = self._knows_tasks(ctx, params.task_id)
        await self.do(caller.require, await self.do(tasks.needs, caller, params.task_id))
        await self.do(tasks.update, caller, params.task_id, params.input_responses)
        return {}

    async def cancel_task(self, ctx: Context, params: tasks.TaskParams) -> dict[str, Any]:
        caller = self._knows_tasks(ctx, params.task_id)
        await self.do(caller.require, await self.do(tasks.needs, caller, params.task_id))
        await self.do(tasks.cancel, caller, params.task_id)
        return {}

    # Errors that are not of a tool

    async def do(self, act: Callable[..., T], *args: Any, about: tuple[Context, str] | None = None) -> T:
        """Run what blocks on a thread; what is refused is an error of the protocol."""
        asking = args[0] if args and isinstance(args[0], Caller) else None  # of one principal only so much at once
        doing = self.serving.do(act, *args) if asking is None else do(self.serving, asking, partial(act, *args))
        return await self._telling(None, doing, about)

    async def _telling(self, ctx: Context | None, doing: Awaitable[T], about: tuple[Context, str] | None = None) -> T:
        try:
            return await doing
        except LayerError as error:
            data: dict[str, Any] = {"code": error.code, "hint": error.hint}
            code = types.INVALID_PARAMS
            if about is not None:
                data["uri"] = about[1]
                if isinstance(error, NotFound) and about[0].protocol_version not in MODERN_PROTOCOL_VERSIONS:
                    code = NOWHERE
            raise MCPError(code=code, message=error.message, data=data) from None


def _part(found: list[T], params: types.PaginatedRequestParams | None) -> tuple[list[T], str | None]:
    """One page of a list, and the cursor of the next."""
    cursor = None if params is None else params.cursor
    if cursor is not None and (not cursor.isdecimal() or not 0 < int(cursor[:9]) < len(found)):
        raise MCPError(code=types.INVALID_PARAMS, message="Invalid cursor")
    at = int(cursor or 0)
    size = resources.LISTED
    return found[at : at + size], str(at + size) if at + size < len(found) else None


# HTTP


@contextlib.asynccontextmanager
async def running(serving: Serving) -> AsyncIterator[None]:
    """While this is open, `asgi` answers."""
    speaking = Speaking(serving, _who)
    manager = StreamableHTTPSessionManager(speaking.server, max_request_body_size=BODY, max_sessions=None)
    serving.more["mcp"] = manager
    async with manager.run():
        try:
            yield
        finally:
            await speaking.close()


def _who(ctx: Context) -> Caller:
    caller: Caller = ctx.request.scope[CALLER]  # type: ignore[union-attr]
    return caller


def asgi(serving: Serving) -> ASGIApp:
    """What answers at /mcp."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers, client, method = Headers(scope=scope), scope.get("client"), scope["method"]
        if scope["path"].rstrip("/") != "/mcp":
            raise NotFound(f"there is nothing at {scope['path']!r:.120}", hint="/mcp")
        caller = await authenticate(serving, headers, client[0] if client else "", method, scope["path"])
        await limits(serving).take(serving, caller)
        if method not in ("GET", "POST", "DELETE"):
            raise Invalid(f"MCP takes no {method}", hint="POST", status=405)
        manager: StreamableHTTPSessionManager = serving.more["mcp"]
        who = str(caller.principal)
        if method != "DELETE" and "mcp-session-id" not in headers:
            open_ = manager._session_owners
            if len(open_) >= SESSIONS or sum(owner["client_id"] == who for owner in open_.values()) >= OWN:
                raise LimitExceeded(
                    "too many sessions are open", hint="end those you don't use with DELETE", retry_after=60
                )
        user = AuthenticatedUser(AccessToken(token="", client_id=who, scopes=[], subject=who))
        try:
            plain = [
                (name, value.strip(b" \t")) for name, value in scope["headers"]
            ]  # what HTTP lets stand around a value
            inner = {**scope, "headers": plain, CALLER: caller, "user": user}
            await manager.handle_request(inner, _patient(serving, receive), send)
        except ClientDisconnect:
            raise Invalid(f"the request did not arrive within {PATIENCE:g} seconds", status=408) from None

    return app


def _patient(serving: Serving, receive: Receive) -> Receive:
    """What a client sends, if all of it comes in time; when the server closes, nobody is there any more."""
    whole, until = False, time.monotonic() + PATIENCE

    async def receiving() -> Message:
        nonlocal whole
        left = None if whole else max(0.0, until - time.monotonic())
        coming, closing = asyncio.ensure_future(receive()), asyncio.ensure_future(serving.closing.wait())
        try:
            await asyncio.wait({coming, closing}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return {"type": "http.disconnect"}
            message = coming.result()
            whole = whole or not message.get("more_body", False)
            return message
        finally:
            coming.cancel()
            closing.cancel()

    return receiving


# Stdio


async def speak(serving: Serving, caller: Caller) -> None:
    """Serve one client on standard input and output, as a principal, until it hangs up."""
    speaking = Speaking(serving, lambda ctx: caller)
    try:
        async with stdio_server() as (reading, writing):
            await speaking.server.run(reading, writing, speaking.server.create_initialization_options())
    except* BrokenPipeError:
        log.info("the client has gone before it had all answers")
    finally:
        await speaking.close()
