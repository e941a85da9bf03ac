"""Native: the layer over HTTP: every verb and function at POST /api/…, and what a handle reads."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ... import typed
from ...bundle import verbs  # noqa: F401  (its verbs are in the table too)
from ...errors import Conflict, Invalid, LayerError, LimitExceeded, NotFound, TimedOut
from ...law.tokens import PARTS
from ...law.verbs import VERBS, moment
from ...projection import query as projections
from ...substrate.reads import Attention, clock
from ...substrate.schema import NAME, OWNER, Schema
from ...typed import JSON
from . import app, auth, contents, layers, live, openapi, query
from .asked import (
    PAGES,
    READING,
    WRITING,
    NotAllowed,
    Stale,
    aside,
    document,
    flag,
    form,
    json,
    number,
    pairs,
    parameters,
    text,
    whole,
)
from .limits import limits
from .serving import ARRIVED, BODY, Caller, Serving, address_of, body
from .veil import veiled

if TYPE_CHECKING:
    from ...layer import Layer

CONTENT = 256 << 20  # bytes of a file that is sent
LONG = 64  # executions that may run for clients at once, beside what is brief
EACH = 8  # things one principal may have done at once; the rest of its requests wait for these
ID = re.compile(r"\d{1,18}")

Handler = Callable[[Serving, Request, Caller, str], Awaitable[Response]]


async def handle(serving: Serving, request: Request) -> Response:
    """Answer a request to /api/… or /openapi.json."""
    path = request.scope["path"]
    if path == "/openapi.json":
        return await described(serving, request)
    first, _, rest = path.removeprefix("/api").lstrip("/").partition("/")
    method = "GET" if request.method == "HEAD" else request.method
    allowed, act = _route(first, rest)
    caller = await _who(serving, request)
    await limits(serving).take(serving, caller)
    if act is None:
        raise nowhere(path)
    if method not in allowed:
        shown = ", ".join((*allowed, "HEAD") if "GET" in allowed else allowed)
        raise NotAllowed(f"{request.method} is not answered at {path!r:.120}", hint=shown, allow=shown)
    if caller.kind != "layer":
        return await act(serving, request, caller, rest)
    try:
        answer = await act(serving, request, caller, rest)
    except LayerError as error:  # signed as well, so that a layer without a grant does not take us for somebody else
        answer = app.told(error)
    return await layers.countersigned(serving, request, answer)


def nowhere(path: str) -> NotFound:
    return NotFound(f"there is nothing at {path!r:.120}", hint="/openapi.json lists what there is")


async def _who(serving: Serving, request: Request) -> Caller:
    path, payload = request.scope["path"], None
    if (found := auth.given(request.headers)) is not None and auth.signed(found[0]):
        path += f"?{request.url.query}" if request.url.query else ""
        if await layers.plausible(serving, found[0]):
            payload = request.scope[ARRIVED] = await body(request)  # another layer signs what it sends
    return await auth.authenticate(serving, request.headers, address_of(request), request.method, path, payload)


class Turn(asyncio.Semaphore):
    """What one principal may have done at once, while somebody waits for it or has it."""

    users = 0


class Turns:
    """Who may have something done now: a few at once for each principal, so that none has all threads."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], Turn] = {}
        self.long = ThreadPoolExecutor(LONG, "layer-long")

    @asynccontextmanager
    async def turn(self, principal: int, most: int = EACH) -> AsyncIterator[None]:
        """Wait for it, and have it."""
        turn = self.of.get((principal, most))
        if turn is None:
            turn = self.of[principal, most] = Turn(most)
        turn.users += 1
        try:
            async with turn:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self.of[principal, most]


def turns(serving: Serving) -> Turns:
    found: Turns | None = serving.more.get("turns")
    if found is None:
        found = serving.more["turns"] = Turns()
    return found


async def do(serving: Serving, caller: Caller, act: Callable[[], Any]) -> Any:
    """Run something brief on a thread, when it is its principal's turn."""
    async with turns(serving).turn(caller.principal):
        return await serving.do(act)


async def do_long(serving: Serving, caller: Caller, act: Callable[[], Any]) -> Any:
    """Run what may take long on a thread that nothing brief waits for."""
    async with turns(serving).turn(caller.principal, LONG // 4):
        return await asyncio.get_running_loop().run_in_executor(turns(serving).long, act)


def told(value: Any, kind: str, tx: int | None = None, **headers: str) -> Response:
    """An answer in JSON."""
    if tx is not None:
        headers["layer-tx"] = str(tx)
    return Response(typed.plain(value) if kind == JSON else typed.dumps(value), 200, headers, kind)


def last(layer: Layer) -> int:
    with layer.engine.reading() as session:
        return clock(layer.engine, session)[0]


# What is done


async def _verb(serving: Serving, request: Request, caller: Caller, rest: str, name: str) -> Response:
    caller.require("boxes" if name.startswith("box.") else "write")
    given = parameters(request, WRITING)
    kind, arguments = form(request), await given_to(request)
    if (seen := request.headers.get("if-match")) is not None:
        arguments = expecting(name, arguments, seen)
    if name == "token.create":
        arguments = narrowed(caller, arguments)
    act = partial(_call, caller.layer, name, arguments, request, given, kind)
    try:
        return await (do(serving, caller, act) if VERBS[name].brief else do_long(serving, caller, act))
    except Conflict as error:
        if seen is not None and "idempotency" not in error.message:
            raise Stale(error.message, error.hint) from None
        raise


def _call(layer: Layer, name: str, arguments: Any, request: Request, given: dict[str, Any], kind: str) -> Response:
    key = request.headers.get("idempotency-key")
    trace = request.headers.get("traceparent")
    try:
        result = layer.call(name, arguments, key=key, trace=trace, **given)
    except LayerError as error:
        raise veiled(layer, name, arguments, given.get("branch", "main"), error) from None
    return told({"result": result}, kind, last(layer))


def expecting(name: str, arguments: dict[str, Any], seen: str) -> dict[str, Any]:
    """If-Match as the version that a row must still have."""
    if name not in ("row.update", "row.delete"):
        raise Invalid(f"If-Match has no meaning for {name}", hint="it is for row.update and row.delete")
    found = re.fullmatch(r'(?:W/)?"(\d{1,18})"', seen.strip())
    if found is None:
        raise Invalid(f"If-Match is the ETag of a row, not {seen!r:.60}", hint="GET /api/row/ENTITY/ID tells it")
    if arguments.get("expect") not in (None, int(found[1])):
        raise Invalid("If-Match and expect say different things")
    return {**arguments, "expect": int(found[1])}


def narrowed(caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a token makes has no wider scope than it: its own, if none is named."""
    if caller.scope is None:
        return arguments
    if arguments.get("scope") is None:
        return {**arguments, "scope": sorted(caller.scope)}
    for part in arguments["scope"] if isinstance(arguments["scope"], list) else ():
        if isinstance(part, str) and part in PARTS:  # whatever else is there is refused by the verb
            caller.require(part)
    return arguments


async def given_to(request: Request) -> dict[str, Any]:
    """The arguments of a verb or a function."""
    found = await document(request)
    size = request.headers.get("content-length", "")
    taken: dict[str, Any] = await aside(int(size) if size.isdecimal() else BODY, plain, found)
    return taken


def plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Typed values as verbs and functions take them: as texts."""

    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(item) for key, item in value.items()}
        if isinstance(value, list):
            return [turned(item) for item in value]
        return value if value is None or isinstance(value, str | int | float) else typed.text(value)

    return {key: turned(value) for key, value in arguments.items()}


async def functions(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """The functions this principal may call."""
    caller.require("read")
    given = parameters(request, {"branch": text})
    return told(
        {"functions": await do(serving, caller, lambda: openapi.callable(caller.layer, **given))}, form(request)
    )


async def function(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    caller.require("write")
    given = parameters(request, WRITING)
    kind, arguments = form(request), await given_to(request)
    if rest in VERBS:  # a verb is no function
        raise NotFound(f"there is no function {rest!r:.120}", hint=f"POST /api/{rest}")
    return await do_long(serving, caller, partial(_call, caller.layer, rest, arguments, request, given, kind))


# What is read

ASKED = {"sql", "params", "branch", "as_of", "principal", "timeout", "limit", "page", "cursor"}


async def select(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """Rows of one SELECT."""
    caller.require("read")
    if request.method == "POST":
        chosen = parameters(request, {"format": text}).get("format")
        given = await document(request)
        if strange := sorted(set(given) - ASKED):
            raise Invalid(f"a query has no {strange[0]!r:.60}", hint=", ".join(sorted(ASKED)))
        if given.get("as_of") is not None:
            given["as_of"] = moment("as_of", given["as_of"])
    else:
        known = {**READING, **PAGES, "sql": text, "params": json, "limit": whole, "timeout": number}
        given = parameters(request, known, ["sql"])
        chosen = given.pop("format", None)
    if "sql" not in given:
        raise Invalid("there is no query", hint='{"sql": "select …", "params": {…}}')
    kind = form(request, chosen, query.FORMS)
    seen = request.headers.get("if-none-match") if request.method != "POST" else None
    tagging = request.method != "POST"
    ask = partial(_select, caller.layer, given, kind, seen, tagging)
    if caller.principal == OWNER and not SLOW & given.keys() and (found := quick(caller.layer, given["sql"], ask)):
        return found
    attention = Attention()
    return await attended(request, do(serving, caller, partial(ask, attention=attention)), attention)


async def attended(request: Request, asked: Coroutine[Any, Any, Response], attention: Attention) -> Response:
    """What is answered; ended when whoever asks hangs up."""
    answer = asyncio.ensure_future(asked)
    await asyncio.wait([answer], timeout=1.0)
    if not answer.done():
        gone = asyncio.ensure_future(hung_up(request))
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():
            await asyncio.get_running_loop().run_in_executor(None, attention.lose)
    return await answer


async def hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


SLOW = {"page", "cursor", "as_of", "timeout", "limit", "principal"}
SOON = 0.003  # seconds that a read may hold up everybody else
FEW = 100  # rows likewise
READS = re.compile(r"\s*(select|values)\b", re.I)  # what tries to write is recorded, which takes its time
_slow: OrderedDict[str, None] = OrderedDict()  # statements that are not quick


def quick(layer: Layer, sql: Any, ask: Callable[..., Response]) -> Response | None:
    """The owner's query answered right here, which spares a thread; None when it takes longer, or might.

    Only an embedded database is asked so: it is in this process, and its readers wait for nobody.
    """
    if layer.engine.dialect != "sqlite" or not isinstance(sql, str) or sql in _slow or not READS.match(sql):
        return None
    try:
        return ask(timeout=SOON, limit=FEW)
    except (TimedOut, LimitExceeded):
        _slow[sql] = None
        if len(_slow) > 1000:
            _slow.popitem(last=False)
        return None


def _select(layer: Layer, asked: dict[str, Any], kind: str, seen: str | None, tagging: bool, **within: Any) -> Response:
    given = asked | within
    sql, params = given.pop("sql"), given.pop("params", None)
    size, cursor = given.pop("page", None), given.pop("cursor", None)
    if not isinstance(sql, str):
        raise Invalid(f"a query is text, not {sql!r:.60}")
    page, request = None, ""
    if size is not None or cursor is not None:
        request = query.fingerprint(sql, params, given.get("branch"), given.get("principal"))
        page = query.page_of(size, cursor, request)
        if page is not None and page.tx is not None:
            given["as_of"] = page.tx
    given = {key: value for key, value in given.items() if value is not None}
    tag = query.etag(layer, given.get("as_of"), sql) if tagging and "principal" not in given else None
    headers = query.CACHED if tag is None else {**query.CACHED, "etag": tag}
    if query.unchanged(tag, seen):
        return Response(None, 304, headers)
    trusted = layer.my_id == OWNER and "principal" not in given
    rows, tx = layer.query_at(query.paged(sql, page), params, trusted=trusted, **given)
    if tag is not None and "as_of" not in given:
        headers = {**headers, "etag": f'W/"{tx}"'}
    return query.answer(rows, tx, kind, page, request, headers)


async def listed(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """The projections this principal may read."""
    caller.require("read")
    given = parameters(request, {"branch": text})
    layer = caller.layer
    found = await do(serving, caller, lambda: projections.readable(layer, layer.my_id, **given))
    return told({"projections": found}, form(request))


async def projection(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """Rows of a projection: its arguments are parameters of a GET, or in the body of a POST."""
    caller.require("read")
    if request.method == "POST":
        given = parameters(request, {**READING, **PAGES})
        arguments = await document(request)
    else:
        words = pairs(request)
        known = {**READING, **PAGES}
        given = {name: known[name](name, word) for name, word in words.items() if name in known}
        arguments = {name: word for name, word in words.items() if name not in known}
    kind = form(request, given.pop("format", None), query.FORMS)
    words_only = request.method != "POST"
    seen = request.headers.get("if-none-match") if words_only else None
    return await do(serving, caller, partial(_projection, caller.layer, rest, arguments, words_only, given, kind, seen))


def _projection(
    layer: Layer, name: str, arguments: dict[str, Any], words: bool, given: dict[str, Any], kind: str, seen: str | None
) -> Response:
    who = layer.id_of(given.pop("principal", None))
    branch = given.get("branch", "main")
    if words:
        arguments = projections.parsed(layer, name, arguments, principal=who, branch=branch)
    request = query.fingerprint(name, arguments, branch, who)
    page = query.page_of(given.pop("page", None), given.pop("cursor", None), request)
    if page is not None and page.tx is not None:
        given["as_of"] = page.tx
    rows, tx = projections.read(layer, name, arguments, principal=who, **given)
    if page is not None:
        rows = rows[page.offset : page.offset + page.size + 1]
    return query.answer(rows, tx, kind, page, request, query.CACHED)


async def row(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """One row, whose version is the ETag."""
    caller.require("read")
    given, (entity, id) = parameters(request, READING), place(rest)
    kind, seen = form(request), request.headers.get("if-none-match")

    def read() -> Response:
        sql = f"select * from {entity}__history where id = :id and tx_end is null and op <> 'delete'"
        rows, _ = caller.layer.query_at(sql, {"id": id}, **given)
        if not rows:
            raise NotFound(f"there is no {entity} {id}")
        added = history_columns(caller.layer.schema(given.get("branch", "main"), given.get("as_of")), entity)
        tag = f'"{rows[0]["tx"]}"'
        headers = {**query.CACHED, "etag": tag}
        if query.unchanged(tag, seen):
            return Response(None, 304, headers)
        found = {name: value for name, value in rows[0].items() if name not in added}
        return told({"row": found, "tx": rows[0]["tx"]}, kind, None, **headers)

    return await do(serving, caller, read)


def history_columns(schema: Schema, entity: str) -> set[str]:
    from ...substrate.views import history_names

    found = schema.by_name.get(entity)
    return set() if found is None else set(history_names(found).values())


async def history(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """Every version of a row, oldest first."""
    caller.require("read")
    given, (entity, id) = parameters(request, {**READING, **PAGES}), place(rest)
    kind = form(request, given.pop("format", None), query.FORMS)
    size, cursor = given.pop("page", None), given.pop("cursor", None)

    def read() -> Response:
        asked = query.fingerprint(entity, id, given.get("branch"), given.get("principal"))
        page = query.page_of(size, cursor, asked)
        if page is not None and page.tx is not None:
            given["as_of"] = page.tx
        sql = f"select * from {entity}__history where id = :id order by tx"
        rows, tx = caller.layer.query_at(query.paged(sql, page), {"id": id}, **given)
        if not rows and (page is None or not page.offset):
            raise NotFound(f"there is no {entity} {id}, and never was")
        return query.answer(rows, tx, kind, page, asked, query.CACHED)

    return await do(serving, caller, read)


def place(rest: str) -> tuple[str, int]:
    """ENTITY/ID of a path."""
    entity, _, id = rest.partition("/")
    if not NAME.fullmatch(entity) or len(entity) > 48 or not ID.fullmatch(id):
        raise NotFound(f"there is no row {rest!r:.120}", hint="ENTITY/ID, as in ticket/7")
    return entity, int(id)


async def schema(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """The entities and fields that this principal may read something of."""
    caller.require("read")
    given = parameters(request, {"branch": text, "as_of": READING["as_of"]})
    found = await do(serving, caller, lambda: caller.layer.schema(**given))
    entities = [{**asdict(each), "fields": [asdict(f) for f in each.fields]} for each in found.entities]
    return told({"entities": entities}, form(request))


async def diff(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """What a branch changed since its fork or last merge."""
    caller.require("read")
    given = parameters(request, {"branch": text, "target": text, "principal": text}, ["branch"])
    return told({"changes": await do(serving, caller, lambda: caller.layer.diff(**given))}, form(request))


async def conflicts(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """What keeps branches from merging."""
    caller.require("read")
    given = parameters(request, {"branch": text})
    return told({"conflicts": await do(serving, caller, lambda: caller.layer.conflicts(**given))}, form(request))


async def why(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """What led to a row, a field, a tx or an execution; with impact what came of it."""
    caller.require("read")
    known = {**READING, "subject": text, "impact": flag, "depth": whole}
    given = parameters(request, known, ["subject"])
    return told({"tree": await do(serving, caller, lambda: told_tree(caller.layer, given))}, form(request))


def told_tree(layer: Layer, given: dict[str, Any]) -> Any:
    def shown(node: Any) -> dict[str, Any]:
        return {"kind": node.kind, "data": dict(node.data), "links": [shown(link) for link in node.links]}

    return shown(layer.why(**given))


async def can(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """Whether a principal may do something, with the permissions that decide."""
    caller.require("read")
    needed = ["action", "resource"]
    given = parameters(request, {**READING, "action": text, "resource": text}, needed)
    given.setdefault("principal", caller.name)
    return told(await do(serving, caller, lambda: decided(caller.layer, given)), form(request))


def decided(layer: Layer, given: dict[str, Any]) -> dict[str, Any]:
    try:
        return vars(layer.can(**given))
    except (Invalid, NotFound) as error:
        with layer.engine.reading() as session:
            if layer.my_policy(session).sovereign() or not error.message.startswith("there is no"):
                raise
        return {"allowed": False, "rows": [], "reason": "no permission allows it"}  # as of what it may not see


async def me(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """Who asks."""
    parameters(request, {})
    scope = None if caller.scope is None else sorted(caller.scope)
    found = {"id": caller.principal, "name": caller.name, "layer": serving.layer.id, "scope": scope}
    return told(found, form(request), await do(serving, caller, lambda: last(caller.layer)))


async def verify(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """Everything read again and every hash recomputed; for owners."""
    caller.require("read")
    parameters(request, {})

    def run() -> Any:
        caller.layer.only_owner("verify the layer over HTTP")
        return vars(caller.layer.verify())

    return told(await do_long(serving, caller, run), form(request))


async def content(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """The content of a file field."""
    caller.require("read")
    parameters(request, {})
    tag = f'"{rest}"'
    data = await do(serving, caller, lambda: caller.layer.blob(rest))
    headers = {"etag": tag, "cache-control": "private, max-age=31536000, immutable", "vary": query.CACHED["vary"]}
    # what somebody stored is never a page of ours
    headers |= {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
    if query.unchanged(tag, request.headers.get("if-none-match")):
        return Response(None, 304, headers)
    return Response(data, 200, headers, "application/octet-stream")


async def keep(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """Store content for a file field; gives its hash, which a row then names."""
    caller.require("write")
    parameters(request, {})
    kind = form(request)
    await do(serving, caller, lambda: contents.may_store(caller.layer))
    data = await body(request, CONTENT, 600.0)
    digest = await do(serving, caller, lambda: contents.store(caller.layer, data))
    return told({"digest": digest, "bytes": len(data)}, kind)


async def described(serving: Serving, request: Request) -> Response:
    """The OpenAPI document: for somebody known, with the functions they may call."""
    if request.method not in ("GET", "HEAD"):
        raise NotAllowed("/openapi.json is read", hint="GET, HEAD", allow="GET, HEAD")
    layer = None
    if auth.given(request.headers, serving.tls) is not None:
        caller = await _who(serving, request)
        await limits(serving).take(serving, caller)
        layer = caller.layer if caller.may("read") else None
    return told(await serving.do(openapi.document, serving.url, layer), JSON)


# path: (methods, without something after it, with)
PATHS: dict[str, tuple[dict[str, Handler], dict[str, Handler]]] = {
    "query": ({"GET": select, "POST": select}, {}),
    "projection": ({"GET": listed}, {"GET": projection, "POST": projection}),
    "function": ({"GET": functions}, {"POST": function}),
    "row": ({}, {"GET": row}),
    "history": ({}, {"GET": history}),
    "schema": ({"GET": schema}, {}),
    "diff": ({"GET": diff}, {}),
    "conflicts": ({"GET": conflicts}, {}),
    "why": ({"GET": why}, {}),
    "can": ({"GET": can}, {}),
    "me": ({"GET": me}, {}),
    "verify": ({"GET": verify}, {}),
    "blob": ({"POST": keep}, {"GET": content}),
    "live": ({"GET": live.handle}, {}),
}


def _route(first: str, rest: str) -> tuple[tuple[str, ...], Handler | None]:
    if first in VERBS and not rest:
        return ("POST",), partial(_verb, name=first)
    bare, named = PATHS.get(first, ({}, {}))
    found = named if rest else bare
    if not found:
        return (), None

    async def act(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
        return await found["GET" if request.method == "HEAD" else request.method](serving, request, caller, rest)

    return tuple(found), act
