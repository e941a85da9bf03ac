"""Stops: when a box of a contract ends by itself. Some hold for every box, so that none loops or ignores refusals for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Denied, Invalid, LayerError, LimitExceeded

ALWAYS = {"denials": 100, "repeats": 100}  # where a contract says nothing else
COUNTED = ("denials", "refusals", "repeats")
MOST = 10_000
HINT = '{"denials": 5}, {"refusals": 20}, {"repeats": 10}, {"query": "select 1 from ticket where …"}'


def check(layer: Any, what: str, stops: Any, branch: str = "main") -> None:
    """Refuses stops that could never be."""
    if stops is None:
        return
    if not isinstance(stops, list) or len(stops) > 100:
        raise Invalid(f"stops of {what} are a list", hint=HINT)
    for stop in stops:
        if not isinstance(stop, Mapping) or len(stop) != 1:
            raise Invalid(f"a stop of {what} says one thing, not {stop!r:.120}", hint=HINT)
        [(name, said)] = stop.items()
        if name == "query" and isinstance(said, str):
            try:
                layer.query(said, limit=1, branch=branch)
            except LimitExceeded:
                pass  # more than one row
        elif name not in COUNTED or type(said) is not int or not 1 <= said <= MOST:
            raise Invalid(f"{what} can't stop at {name}={said!r:.60}", hint=HINT)


class Stops:
    """What one box was refused and asked again, counted against what ends it."""

    def __init__(self, stops: Sequence[Mapping[str, Any]]) -> None:
        self.queries = [stop["query"] for stop in stops if "query" in stop]
        said = [(name, most) for stop in stops for name, most in stop.items() if name != "query"]
        self.limits = ALWAYS | {name: min(most for each, most in said if each == name) for name, _ in said}
        self.counts = dict.fromkeys(COUNTED, 0)
        self.over: LayerError | None = None  # why the box ends, once it does
        self._last: tuple[str, str] | None = None

    def asked(self, name: str, digest: str) -> None:
        """A request, of which the next one may be the same."""
        again = self._last == (name, digest)
        self._last = (name, digest)
        self.counts["repeats"] = self.counts["repeats"] + 1 if again else 1
        self._look()

    def refused(self, code: str) -> None:
        """A request that was refused."""
        self.counts["refusals"] += 1
        self.counts["denials"] += code == Denied.code
        self._look()

    def _look(self) -> None:
        for name, most in self.limits.items():
            if self.over is None and self.counts[name] >= most:
                said = f"asking the same {most} times in a row" if name == "repeats" else f"{most} {name}"
                self.over = LimitExceeded(f"stopped after {said}", hint="the contract's stops say when a box ends")
