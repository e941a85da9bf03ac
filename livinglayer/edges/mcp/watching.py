"""Watching: what changed is looked at once for all who listen. They are told of it when they may see that it did."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from mcp.server.subscriptions import ResourcesListChanged, ResourceUpdated, ServerEvent, ToolsListChanged

from ...errors import LayerError, LimitExceeded
from ...law.signature import dumps
from ...law.tokens import TOKEN
from ...substrate.ledger import MAIN_CHAIN
from ...substrate.reads import clock
from ..http import live
from ..http.serving import Caller, Serving
from . import resources, tools

Changed = set[tuple[str, int | None]]
REST = 0.2  # seconds after a look: of many changes one is told
THOROUGH = 5.0  # seconds after which it is also looked at what ends with time: tokens, permissions
NOBODY = 0  # no principal: this listens for all of them
PATIENCE = 5.0  # seconds
LISTENERS = 2000
URIS = 200  # that one may listen to
log = logging.getLogger("livinglayer.mcp")


@dataclass(eq=False)
class Listener:
    """Somebody who wants to hear of changes."""

    caller: Caller
    send: Callable[[ServerEvent], Awaitable[None]]
    lists: bool = False  # of tools and resources
    uris: dict[str, str | None] = field(default_factory=dict)  # and what each was
    offered: tuple[str, str] | None = None
    end: Callable[[], None] = lambda: None


class Watcher:
    """Goes by the server's one look at the clock, while there are listeners."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.listeners: set[Listener] = set()
        self._task: asyncio.Task[None] | None = None
        self._at = (0, 0)

    async def add(self, listener: Listener) -> None:
        """Have somebody told from now on."""
        if len(self.listeners) >= LISTENERS:
            raise LimitExceeded("too many listen already", hint="try again later")
        if len(listener.uris) > URIS:
            raise LimitExceeded(f"one may listen to {URIS} resources", hint="listen to an entity instead of its rows")
        if self._task is None or self._task.done():
            self._at = await self.serving.do(self._clock)
            self._task = asyncio.create_task(self._run())
        self.listeners.add(listener)
        await self.serving.do(self._learn, listener)

    async def follow(self, listener: Listener, uri: str, digest: str) -> None:
        """Have somebody who listens told of one more resource."""
        if len(listener.uris) >= URIS and uri not in listener.uris:
            raise LimitExceeded(f"one may listen to {URIS} resources", hint="listen to an entity instead of its rows")
        listener.uris[uri] = digest

    def remove(self, listener: Listener) -> None:
        """Tell somebody nothing more."""
        self.listeners.discard(listener)

    def close(self) -> None:
        """End all of it."""
        for listener in list(self.listeners):
            listener.end()
        self.listeners.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        looking, closing, thorough = live.watcher(self.serving), self.serving.closing, time.monotonic()
        with looking.listening(NOBODY):
            while self.listeners and not closing.is_set():
                await looking.after(self._at[0], THOROUGH)
                due = time.monotonic() - thorough > THOROUGH
                try:
                    await self._look(due)
                except LayerError as error:
                    log.warning("what changed could not be looked at: %s", error)
                except Exception:
                    log.exception("what changed could not be looked at")
                thorough = time.monotonic() if due else thorough
                await asyncio.sleep(REST)

    async def _look(self, thorough: bool) -> None:
        was, now = self._at, await self.serving.do(self._clock)
        if now == was and not thorough:
            return
        changed = await self.serving.do(self._changed, was[0], now[0])
        told = await self.serving.do(
            self._all, changed, thorough or now[1] != was[1], thorough or ("token", None) in changed
        )
        self._at = now
        for listener, events in told:
            if events is None:
                self.remove(listener)
                listener.end()
            for event in events or ():
                try:
                    await asyncio.wait_for(listener.send(event), PATIENCE)
                except TimeoutError:  # it does not read what it is told
                    self.remove(listener)
                    break

    # On threads

    def _clock(self) -> tuple[int, int]:
        with self.serving.layer.engine.reading() as session:
            return clock(self.serving.layer.engine, session)

    def _changed(self, after: int, upto: int) -> Changed:
        rows = self.serving.layer.query(
            "select distinct entity, row_id from change where tx > :a and tx <= :b and branch = 'main'", {"a": after, "b": upto}
        )  # fmt: skip
        found: Changed = {(row["entity"], row["row_id"]) for row in rows}
        return found | {(entity, None) for entity, _ in found}

    def _learn(self, listener: Listener) -> None:
        listener.uris = {uri: resources.digest(listener.caller, uri) for uri in listener.uris}
        listener.offered = self._offered(listener) if listener.lists else None

    def _offered(self, listener: Listener) -> tuple[str, str]:
        told = [each.told() for each in tools.offer(listener.caller).values()], resources.listed(listener.caller)
        first, second = (sha256(dumps([one.model_dump(mode="json") for one in part])).hexdigest() for part in told)
        return first, second

    def _all(self, changed: Changed, epoch: bool, tokens: bool) -> list[tuple[Listener, list[ServerEvent] | None]]:
        """What to tell each; None for those whose token has ended."""
        return [
            (listener, None if tokens and not self.holds(listener.caller) else self._events(listener, changed, epoch))
            for listener in list(self.listeners)
        ]

    def _events(self, listener: Listener, changed: Changed, epoch: bool) -> list[ServerEvent]:
        events: list[ServerEvent] = []
        if listener.lists and (epoch or listener.offered is None):
            now = self._offered(listener)
            if listener.offered is None or now[0] != listener.offered[0]:
                events.append(ToolsListChanged())
            if listener.offered is None or now[1] != listener.offered[1]:
                events.append(ResourcesListChanged())
            listener.offered = now
        for uri, was in list(listener.uris.items()):
            entity, row = resources.about(uri)
            if not epoch and entity is not None and (entity, row) not in changed:
                continue
            now_is = resources.digest(listener.caller, uri)
            if now_is != was:
                listener.uris[uri] = now_is
                events.append(ResourceUpdated(uri=uri))
        return events

    def holds(self, caller: Caller) -> bool:
        """Whether the token that somebody came with is still good."""
        if caller.token is None:
            return True
        layer = self.serving.layer
        with layer.engine.reading() as session:
            rows = layer.catalog.rows(session, TOKEN, MAIN_CHAIN, "where x.id = ?", (caller.token,))
        over = not rows or rows[0]["revoked"] is not None
        return not over and (rows[0]["expires"] is None or rows[0]["expires"] > datetime.now(UTC))


def event_sender(session: Any) -> Callable[[ServerEvent], Awaitable[None]]:
    """Sends events to a client of the older protocols, on its stream."""

    async def send(event: ServerEvent) -> None:
        if isinstance(event, ResourceUpdated):
            await session.send_resource_updated(event.uri)
        elif isinstance(event, ToolsListChanged):
            await session.send_tool_list_changed()
        elif isinstance(event, ResourcesListChanged):
            await session.send_resource_list_changed()

    return send
