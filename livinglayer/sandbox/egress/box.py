"""One box as the gateway sees it: its rules, what it has spent of them, its names, its secrets, what it has open."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from livinglayer.errors import Denied, LimitExceeded, TimedOut, Unavailable
from livinglayer.sandbox.egress import dial, names, rules
from livinglayer.sandbox.egress.dns import Book
from livinglayer.sandbox.egress.exchanges import Exchanges, Kept
from livinglayer.sandbox.egress.limits import Limits
from livinglayer.sandbox.egress.record import Recorder, Replay
from livinglayer.sandbox.egress.rules import Ask, Rule
from livinglayer.sandbox.egress.secrets import Secrets, Used

Bridge = Callable[[str, Rule, int], Awaitable[socket.socket]]
Tell = Callable[[dict[str, Any], Callable[[], None]], Awaitable[None]]


class Box:
    """Decides, counts and tells; identity is the listener it was opened with."""

    def __init__(
        self,
        ident: str,
        given: list[object],
        secrets: Mapping[str, str],
        limits: Limits,
        tell: Tell,
        record: str | None = None,
        replay: str | None = None,
        used: Mapping[str, int] | None = None,
        exchanges: str | None = None,
        bridge: Bridge | None = None,
    ) -> None:
        self.id, self.limits, self._tell, self._bridge = ident, limits, tell, bridge
        self.rules = rules.parse(given)
        self.secrets = Secrets(secrets)
        self.book = Book(limits.names)
        self.spent: dict[str, int] = dict(used or {})  # bytes by the text of a rule
        self.up = self.down = 0
        self.unread = 0  # bytes of HTTP/2 streams that are here and were not taken yet
        self.generation = 0  # of the rules; what was dialed under older ones is not used again
        self.open: set[Passage] = set()
        self.idle: set[Callable[[], None]] = set()  # what ends connections to servers that no request is on
        self._buckets: dict[tuple[str, tuple[int, int]], rules.Bucket] = {}
        self._untold = asyncio.Semaphore(limits.pending_events)
        self.replay = Replay(Path(replay)) if replay else None
        self.recorder = Recorder(Path(record)) if record else None
        self.exchanges = Exchanges(Path(exchanges)) if exchanges else None
        self._name_hosts()

    def _name_hosts(self) -> None:
        for rule in self.rules:
            self.secrets.also(rule.headers)
            if not rule.host.startswith("*") and "/" not in rule.host and not names.is_address(rule.host):
                self.book.address(rule.host)

    def change(self, given: list[object]) -> None:
        """New rules: what is open and no longer allowed ends at once, what a rule has spent stays spent."""
        self.rules = rules.parse(given)
        self.generation += 1
        kept = {(rule.account, rule.rate) for rule in self.rules}
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key in kept}
        self._name_hosts()
        for end in self.idle:
            end()
        for passage in list(self.open):
            rule = rules.decide(self.rules, passage.ask)
            if rule is None or rule.action == "deny" or passage.rule is None or not rule.dials_like(passage.rule):
                passage.reason = "the rules changed"
                passage.abort()
            elif not passage.used.swapped <= rule.secrets:
                passage.reason = "the rules changed"
                passage.abort()
            else:
                passage.rule = rule

    def decide(self, ask: Ask) -> Rule:
        """The rule that allows this, with one request taken from its rate; Denied or LimitExceeded say why not."""
        rule = rules.decide(self.rules, ask)
        if rule is None:
            raise Denied(f"no egress rule allows {ask}")
        if rule.action == "deny":
            raise Denied(f"egress rule {rule.text} denies {ask}", rule=rule)
        if rule.bytes is not None and self.spent.get(rule.account, 0) >= rule.bytes:
            raise Denied(f"the {rule.bytes} bytes of egress rule {rule.text} are spent: {ask}", rule=rule)
        if rule.rate is not None:
            bucket = self._buckets.setdefault((rule.account, rule.rate), rules.Bucket(rule.rate, time.monotonic()))
            if wait := bucket.take(time.monotonic()):
                raise LimitExceeded(f"the rate of egress rule {rule.text} is reached: {ask}", rule=rule, wait=wait)
        return rule

    async def connect(self, host: str, port: int, rule: Rule) -> socket.socket:
        """A connected socket to where a rule allows: dialed, or a port of another box, which the host opens."""
        if rule.box is None:
            return await dial.connect(host, port, rule, self.limits.connect_seconds)
        if self._bridge is None:
            raise Unavailable(f"{host} can't be reached from here")
        try:
            return await asyncio.wait_for(self._bridge(self.id, rule, port), self.limits.wake_seconds)
        except TimeoutError:
            raise TimedOut(f"{host}:{port} did not answer in {self.limits.wake_seconds:g} s") from None

    async def tell(self, event: dict[str, Any], kept: Kept | None = None) -> None:
        """An event for the host. Waits while the host has many of this box to take: a flood slows its sender, none is lost."""
        await self._untold.acquire()
        hidden = {key: self.secrets.hide_text(one) if isinstance(one, str) else one for key, one in event.items()}
        told = {"event": "request", "box": self.id, "at": time.time()} | hidden
        if kept is not None:
            kept.end(told)
        await self._tell(told, self._untold.release)

    def close(self) -> dict[str, Any]:
        """End everything; what it amounted to."""
        for passage in list(self.open):
            passage.reason = "the box closed"
            passage.abort()
        for file in (self.recorder, self.replay):
            if file is not None:
                file.close()
        return {"up": self.up, "down": self.down, "used": self.spent}


class Passage:
    """One request or connection of a box, from the first decision to the event that tells of it."""

    def __init__(self, box: Box, protocol: str, ask: Ask) -> None:
        self.box, self.protocol, self.ask = box, protocol, ask
        self.rule: Rule | None = None
        self.verdict = "deny"
        self.status: int | None = None
        self.reason: str | None = None
        self.up = self.down = 0
        self.used = Used()
        self.model: dict[str, Any] | None = None  # of an exchange with one: what it took and why it ended
        self.kept: Kept | None = None
        self.abort: Callable[[], None] = lambda: None
        self._told = False
        self._began = time.time()

    def allow(self, abort: Callable[[], None]) -> Rule:
        """Ask the rules; from here on a change of the rules can call `abort`."""
        self.rule = self.box.decide(self.ask)
        self.verdict, self.abort = "allow", abort
        self.box.open.add(self)
        return self.rule

    def sent(self, count: int) -> None:
        """Count bytes before they go out; Denied when the rule's budget does not cover them."""
        self._spend(count)
        self.up += count
        self.box.up += count

    def received(self, count: int) -> None:
        """Count bytes before they are passed into the box."""
        self._spend(count)
        self.down += count
        self.box.down += count

    def _spend(self, count: int) -> None:
        rule = self.rule
        if rule is not None and rule.bytes is not None:
            spent = self.box.spent.get(rule.account, 0) + count
            if spent > rule.bytes:
                self.box.spent[rule.account] = rule.bytes
                self.reason = f"the {rule.bytes} bytes of egress rule {rule.text} are spent"
                raise Denied(self.reason)
            self.box.spent[rule.account] = spent

    async def end(self) -> None:
        """Tell the host, once."""
        self.box.open.discard(self)
        if self._told:
            return
        self._told = True
        if self.used.kept and self.reason is None:
            self.reason = f"placeholder left as it is: {', '.join(sorted(self.used.kept))}"
        event = {
            "began": self._began,
            "protocol": self.protocol,
            "host": self.ask.host,
            "port": self.ask.port,
            "method": self.ask.method,
            "path": (self.ask.path or "")[:1024] or None,
            "status": self.status,
            "up": self.up,
            "down": self.down,
            "verdict": self.verdict,
            "rule": self.rule.text[:1024] if self.rule else None,
            "reason": self.reason[:2048] if self.reason else None,
            "secrets": sorted(self.used.swapped),
            "placeholders": sorted(self.used.kept),
        }  # fmt: skip
        if self.rule is not None and self.rule.box is not None:
            event["to"] = self.rule.box
        await self.box.tell(event if self.model is None else event | {"model": self.model}, self.kept)
