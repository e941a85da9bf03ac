"""Changes: what differs between a bundle and rows, one by one, as people read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from .definitions import Key, Spec, shorter

MARKS = {"add": "+", "change": "~", "remove": "-", "adopt": "=", "run": ">", "keep": " ", "conflict": "x"}


@dataclass(frozen=True)
class Change:
    """One difference: what is made, changed, removed, taken over, run, left alone or in the way."""

    bundle: str
    kind: str
    name: str
    action: str
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    widens: bool = False
    why: str | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.name

    @property
    def detail(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after}

    def json(self) -> dict[str, Any]:
        return {"bundle": self.bundle, "kind": self.kind, "name": self.name, "action": self.action, **self.detail,
                "widens": self.widens, "why": self.why}  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For people: `!` before what widens, then what happens to what, and how it differs."""
        yield f"{'!' if self.widens else ' '} {MARKS[self.action]} {self.kind} {self.name}" + (
            f"   ({self.why})" if self.why else ""
        )
        if self.action in ("change", "adopt"):
            was, now = shorter(self.before or {}, self.after or {})
            for label in now:
                yield from _difference(label, was[label], now[label])


def _difference(label: str, was: Any, now: Any) -> Iterator[str]:
    """How a value differs, down to where it does."""
    if isinstance(was, Mapping) and isinstance(now, Mapping) and was and now:
        for key in [*was, *(key for key in now if key not in was)]:
            if was.get(key) != now.get(key):
                yield from _difference(f"{label}.{key}", was.get(key), now.get(key))
    elif isinstance(was, list) and isinstance(now, list) and was and now:
        gone, come = more(now, was), more(was, now)
        said = [*(f"- {_short(each)}" for each in gone), *(f"+ {_short(each)}" for each in come)]
        yield f"        {label}: {', '.join(said) or 'another order'}"
    elif isinstance(was, str) and isinstance(now, str) and ("\n" in was or "\n" in now):
        gone, come = was.removesuffix("\n").split("\n"), now.removesuffix("\n").split("\n")
        yield f"        {label}: {len(gone)} → {len(come)} lines"
        for do, i, j, k, m in _edits(gone, come):
            yield from (f"          - {line}" for line in gone[i:j] if do != "equal")
            yield from (f"          + {line}" for line in come[k:m] if do != "equal")
    else:
        yield f"        {label}: {_short(was)} → {_short(now)}"


def _edits(was: list[str], now: list[str]) -> Sequence[tuple[str, int, int, int, int]]:
    """Which lines take the place of which; of long texts all together, since comparing those takes too long."""
    if max(len(was), len(now)) > 2000:
        return [("replace", 0, len(was), 0, len(now))]
    return SequenceMatcher(None, was, now, autojunk=False).get_opcodes()


def _short(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 4000 else text[:3999] + "…"


@dataclass
class Step:
    """One bundle of a plan: it, or one that it needs."""

    bundle: Any
    before: str | None  # the version that is applied now
    wanted: dict[Key, Spec]
    owned: dict[Key, int | None]
    migrations: list[tuple[str, Mapping[str, Any]]]
    changes: list[Change] = field(default_factory=list)
    digest: str | None = None  # of the files that are applied now


def more(was: Any, now: Any) -> list[Any]:
    """What one list has and the other has not."""
    had = [json.dumps(each, sort_keys=True) for each in was or ()]
    return [each for each in now or () if json.dumps(each, sort_keys=True) not in had]
