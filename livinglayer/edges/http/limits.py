"""Limits: how many requests a principal may make: buckets that fill again, one for each quota of `requests`."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import LimitExceeded
from ...law.usage import quotas

if TYPE_CHECKING:
    from .serving import Caller, Serving

RATE, BURST = 10_000.0, 20_000.0  # requests a second of one principal, where no quota says otherwise
FRESH = 1.0  # seconds that quotas are believed
KNOWN = 10_000  # principals that are remembered


@dataclass
class Bucket:
    """So many requests may be made at once, and it fills at a rate."""

    rate: float
    size: float
    level: float
    at: float
    quota: int | None = None

    def take(self, now: float) -> float:
        """Take one; else the seconds until there is one."""
        self.level = min(self.size, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level >= 1:
            self.level -= 1
            return 0.0
        return (1 - self.level) / self.rate if self.rate else 3600.0


class Limits:
    """The buckets of every principal that asks this server."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[float, list[Bucket]]] = OrderedDict()

    async def take(self, serving: Serving, caller: Caller) -> None:
        """Count a request; LimitExceeded says when to come back."""
        now = time.monotonic()
        read, buckets = self._known.get(caller.principal, (0.0, []))
        if now - read > FRESH:
            said = await serving.do(quotas, serving.layer, caller.principal, None)
            keys: list[tuple[float, float, int | None]] = [
                (q.amount / q.seconds, q.amount, q.id) for q in said if q.resource == "requests"
            ] or [(RATE, BURST, None)]
            before = {(b.rate, b.size, b.quota): b for b in buckets}
            buckets = [before.get(key) or Bucket(*key[:2], key[1], now, key[2]) for key in keys]
            self._known.pop(caller.principal, None)
            self._known[caller.principal] = (now, buckets)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        for bucket in buckets:
            if wait := bucket.take(now):
                which = f": quota {bucket.quota}" if bucket.quota else ""
                raise LimitExceeded(
                    f"{caller.name} makes more than {bucket.size:g} requests in {bucket.size / (bucket.rate or 1):g} s{which}",
                    hint=f"there is room again in {wait:.3g} s", retry_after=max(1, int(wait + 0.999)),
                )  # fmt: skip


def limits(serving: Serving) -> Limits:
    found: Limits = serving.more.setdefault("limits", Limits())
    return found
