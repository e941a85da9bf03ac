"""Live: server-sent events: what a query, a projection or an entity shows, told again when a tx changes it.

One watcher looks at the layer's clock for all who listen. Listeners of the same question share its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ... import typed
from ...errors import Invalid, LayerError, LimitExceeded, NotFound
from ...projection import query as projections
from ...substrate.reads import clock
from ...substrate.schema import NAME, OWNER
from ...typed import TYPED
from .asked import Unacceptable, json, parameters, text, whole

if TYPE_CHECKING:
    from ...layer import Layer
    from .serving import Caller, Serving

TICK = 0.05  # seconds between two looks at the clock
HEARTBEAT = 15.0  # seconds after which something is sent anyway, and the token asked for again
LASTING = 300.0  # seconds of another layer's stream
MOST = 1000  # streams of one principal
ROWS = 10_000  # of one answer
BATCH = 1000  # changes read at once
T = TypeVar("T")
Read = Callable[["int | None"], tuple[list[dict[str, Any]], int]]


@dataclass
class Topic:
    """One question of one principal, and its latest answer."""

    read: Read
    seen: int = -1  # the tx it was last looked at
    tx: int = -1  # the tx of the answer
    digest: bytes = b""
    data: bytes = b""
    typed_data: bytes = b""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self, serving: Serving, caller: Caller, tx: int) -> None:
        """Ask again, unless somebody has since that tx."""
        async with self.lock:
            if self.seen >= tx:
                return
            rows, shown = await _do(serving, caller, self.read, None)
            digest = fingerprint(rows)
            if digest != self.digest:
                found = {"rows": rows, "tx": shown}
                self.digest, self.tx = digest, shown
                self.data, self.typed_data = typed.plain(found), typed.dumps(found)
            self.seen = max(tx, shown)


async def _do(serving: Serving, caller: Caller, act: Callable[..., T], *args: Any) -> T:
    """Run what a stream reads on a thread, when it is its principal's turn: a thousand streams have no more than it."""
    from .native import do

    found: T = await do(serving, caller, lambda: act(*args))
    return found


def fingerprint(rows: list[dict[str, Any]]) -> bytes:
    return sha256(typed.dumps(rows)).digest()


class Watcher:
    """The layer's clock, looked at while somebody listens."""

    def __init__(self, serving: Serving) -> None:
        self.serving, self.tx = serving, -1
        self.streams: Counter[int] = Counter()
        self.topics: WeakValueDictionary[Any, Topic] = WeakValueDictionary()  # those that somebody listens to
        self._pulse = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def _watch(self) -> None:
        while self.streams and not self.serving.closing.is_set():
            try:
                tx = await self.serving.do(last, self.serving.layer)
            except LayerError:
                tx = self.tx  # the database may come back
            if tx != self.tx:
                self.tx = tx
                self._beat()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.serving.closing.wait(), TICK)
        self._beat()

    def _beat(self) -> None:
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()

    async def after(self, tx: int, seconds: float) -> bool:
        """Wait for a tx after this one; False when the time is over first."""
        if self.tx > tx or self.serving.closing.is_set():
            return True
        try:
            await asyncio.wait_for(self._pulse.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @contextlib.contextmanager
    def listening(self, principal: int) -> Any:
        self.streams[principal] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        finally:
            self.streams[principal] -= 1
            if not self.streams[principal]:
                del self.streams[principal]


def last(layer: Layer) -> int:
    with layer.engine.reading() as session:
        return clock(layer.engine, session)[0]


def watcher(serving: Serving) -> Watcher:
    found: Watcher | None = serving.more.get("watcher")
    if found is None:
        found = serving.more["watcher"] = Watcher(serving)
    return found


async def handle(serving: Serving, request: Request, caller: Caller, rest: str) -> Response:
    """A stream of events about one query, projection or entity."""
    from . import layers

    caller.require("read")
    given = parameters(
        request, {"sql": text, "params": json, "projection": text, "arguments": json, "entity": text, "id": whole, "branch": text, "format": text},
    )  # fmt: skip
    asked = [name for name in ("sql", "projection", "entity") if name in given]
    if len(asked) != 1:
        raise Invalid("a stream is of one thing", hint="?sql=…, ?projection=NAME or ?entity=NAME")
    takes = {"sql": {"params"}, "projection": {"arguments"}, "entity": {"id"}}[asked[0]] | {
        asked[0],
        "branch",
        "format",
    }
    if strange := sorted(set(given) - takes):
        raise Invalid(f"{strange[0]} has no meaning with {asked[0]}")
    chosen = given.pop("format", "json")
    if chosen not in ("json", "typed"):
        raise Invalid(f"events are json or typed, not {chosen!r:.60}")
    accept = request.headers.get("accept", "*/*").lower()
    if "*/*" not in accept and "text/*" not in accept and "text/event-stream" not in accept:
        raise Unacceptable(f"a stream can't be {accept!r:.80}", hint="Accept: text/event-stream")
    watch = watcher(serving)
    if watch.streams[caller.principal] >= MOST:
        raise LimitExceeded(f"{caller.name} has {MOST} streams open", hint="close some", retry_after=1)
    since = resumed(request.headers.get("last-event-id"))
    kind = TYPED if chosen == "typed" else ""
    if asked[0] == "projection" and (found := await _do(serving, caller, theirs, caller, given)) is not None:
        events = layers.followed(
            serving, request, caller, found, given.get("arguments") or {}, kind, given.get("branch", "main")
        )
    elif asked[0] == "entity":
        start = await serving.do(last, caller.layer)
        since = start if since is None or since > start else since
        changes = Changes(caller.layer, given["entity"], given.get("id"), given.get("branch", "main"), since)
        first = await _do(serving, caller, changes.next)  # what it may not see is not there: before anything is sent
        events = changed(serving, request, caller, changes, first, kind)
    else:
        read = reading(caller.layer, asked[0], given)
        key = (caller.principal, typed.plain(sorted(given.items())))
        topic = watch.topics.get(key) or watch.topics.setdefault(key, Topic(read))
        await topic.look(serving, caller, max(watch.tx, 0))
        known = None if since is None else await _do(serving, caller, digest_at, read, since)
        events = answered(serving, request, caller, topic, known, kind)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    if request.method == "HEAD":
        return Response(None, 200, headers, "text/event-stream")
    return StreamingResponse(events, 200, headers, "text/event-stream")


def theirs(caller: Caller, given: dict[str, Any]) -> projections.Projection | None:
    """A projection that is another layer's, read once before anything is sent."""
    branch = given.get("branch", "main")
    found = projections.find(caller.layer, given["projection"], caller.principal, branch)
    if found.remote is None:
        return None
    reading(caller.layer, "projection", given)(None)
    return found


def resumed(given: str | None) -> int | None:
    """Last-Event-ID: the tx that a client has seen; one that is none is nothing."""
    return int(given) if given is not None and re.fullmatch(r"\d{1,15}", given) else None


def reading(layer: Layer, what: str, given: dict[str, Any]) -> Read:
    branch = given.get("branch", "main")
    if what == "sql":
        sql, params, trusted = given["sql"], given.get("params"), layer.my_id == OWNER
        return lambda as_of: layer.query_at(sql, params, branch=branch, as_of=as_of, limit=ROWS, trusted=trusted)
    name, arguments = given["projection"], given.get("arguments")
    if not isinstance(arguments, dict | None):
        raise Invalid("arguments are a JSON object")
    return lambda as_of: projections.read(layer, name, arguments, principal=layer.my_id, branch=branch, as_of=as_of)


def digest_at(read: Read, tx: int) -> bytes | None:
    """What a client that has seen a tx has; None when that can't be told any more."""
    try:
        return fingerprint(read(tx)[0])
    except LayerError:
        return None


def event(name: str, data: bytes, id: int | None = None) -> bytes:
    return (b"" if id is None else b"id: %d\n" % id) + b"event: %s\ndata: %s\n\n" % (name.encode(), data)


async def answered(
    serving: Serving, request: Request, caller: Caller, topic: Topic, known: bytes | None, kind: str
) -> AsyncIterator[bytes]:
    """`rows` whenever the answer is another one."""
    watch = watcher(serving)
    with watch.listening(caller.principal):
        yield b"retry: 1000\n\n"
        async for beat in beats(serving, request, caller, watch, lambda: topic.seen):
            try:
                await topic.look(serving, caller, watch.tx)
            except LayerError as error:
                yield failed(error)
                return
            if topic.digest != known:
                known = topic.digest
                yield event("rows", topic.typed_data if kind else topic.data, topic.tx)
            elif beat is None:
                yield b": still here\n\n"


async def changed(
    serving: Serving, request: Request, caller: Caller, changes: Changes, rows: list[dict[str, Any]], kind: str
) -> AsyncIterator[bytes]:
    """`change` for every version of a row; the last one of a tx has its number as id."""
    watch, encode = watcher(serving), typed.dumps if kind else typed.plain
    with watch.listening(caller.principal):
        yield b"retry: 1000\n\n"
        async for beat in beats(serving, request, caller, watch, lambda: changes.since):
            tx = watch.tx
            try:
                rows = rows or await _do(serving, caller, changes.next)
                while rows:
                    for place, row in enumerate(rows):
                        ends = place + 1 == len(rows) or rows[place + 1]["tx"] != row["tx"]
                        yield event("change", encode(row), row["tx"] if ends else None)
                    changes.since = rows[-1]["tx"]
                    rows = await _do(serving, caller, changes.next)
            except LayerError as error:
                yield failed(error)
                return
            changes.since = max(changes.since, tx)
            if beat is None:
                yield b": still here\n\n"


def failed(error: LayerError) -> bytes:
    told = {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
    return event("error", typed.plain(told))


async def beats(
    serving: Serving, request: Request, caller: Caller, watch: Watcher, seen: Callable[[], int]
) -> AsyncIterator[bool | None]:
    """True at once and after every tx, None when nothing was for a while; ends with the server and with the token."""
    from . import auth

    yield True
    proven = time.monotonic()
    while not serving.closing.is_set():
        beat = await watch.after(seen(), HEARTBEAT)
        if serving.closing.is_set():
            return
        if caller.kind == "layer":  # whose proof is good for one request: it comes again with another
            if time.monotonic() - proven >= LASTING:
                return
        elif time.monotonic() - proven >= HEARTBEAT:
            if not await auth.still(serving, request):
                return
            proven = time.monotonic()
        yield True if beat else None


@dataclass
class Changes:
    """The versions of an entity's rows, or of one row."""

    layer: Layer
    entity: str
    id: int | None
    branch: str
    since: int  # the tx after which they are looked for

    def next(self) -> list[dict[str, Any]]:
        """The next ones, oldest first; a tx is there whole or not at all."""
        if not NAME.fullmatch(self.entity):
            raise NotFound(f"there is no entity {self.entity!r:.120}")
        mine = "" if self.id is None else " and id = :id"
        params: dict[str, Any] = {"tx": self.since} | ({} if self.id is None else {"id": self.id})
        sql = f"select * from {self.entity}__history where tx > :tx{mine} order by tx, id"
        rows = self._read(f"{sql} limit {BATCH + 1}", params)
        if len(rows) <= BATCH:
            return rows
        if rows[0]["tx"] != rows[-1]["tx"]:
            return [row for row in rows if row["tx"] != rows[-1]["tx"]]
        return self._read(sql.replace("tx > :tx", "tx = :tx"), {**params, "tx": rows[0]["tx"]})

    def _read(self, sql: str, params: dict[str, Any]) -> list[dict[str, Any]]:
        return self.layer.query(sql, params, branch=self.branch)
