"""Schedules: cron's five fields (minute hour day month weekday), in UTC."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from ..errors import Invalid

FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 7))
NAMES = {
    "month": dict(zip("jan feb mar apr may jun jul aug sep oct nov dec".split(), range(1, 13), strict=True)),
    "weekday": dict(zip("sun mon tue wed thu fri sat".split(), range(7), strict=True)),
}
SHORT = {
    "@hourly": "0 * * * *", "@daily": "0 0 * * *", "@weekly": "0 0 * * 0", "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *",
}  # fmt: skip
FAR = 366 * 41  # days; the longest from one 29th of February on a given weekday to the next
HINT = "minute hour day month weekday: */5 * * * *, or 0 9 * * mon-fri"


@dataclass(frozen=True)
class Schedule:
    """The times a cron expression names."""

    text: str
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # 0 is Sunday
    either: bool  # both days and weekdays are given: one of them is enough, as cron has it

    def on(self, day: datetime) -> bool:
        if day.month not in self.months:
            return False
        a, b = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return a or b if self.either else a and b

    def previous(self, moment: datetime) -> datetime | None:
        """The last time at or before a moment; None when there is none in years."""
        return self._nearest(moment.astimezone(UTC).replace(second=0, microsecond=0), -1)

    def following(self, moment: datetime) -> datetime | None:
        """The next time after a moment."""
        return self._nearest(moment.astimezone(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1), 1)

    def _nearest(self, moment: datetime, step: int) -> datetime | None:
        first = moment.replace(hour=0, minute=0)
        for distance in range(FAR):
            day = first + timedelta(days=step * distance)
            if not self.on(day):
                continue
            for hour in self.hours[::step]:
                for minute in self.minutes[::step]:
                    time = day.replace(hour=hour, minute=minute)
                    if time <= moment if step < 0 else time >= moment:
                        return time
        return None


@lru_cache(256)
def parse(text: str) -> Schedule:
    """A schedule from its text; Invalid says what is wrong with it."""
    parts = SHORT.get(text.strip().lower(), text).lower().split() if isinstance(text, str) else []
    if len(parts) != 5:
        raise Invalid(f"schedule {text!r} has not the five fields of cron", hint=HINT)
    minutes, hours, days, months, weekdays = (
        _field(text, part, *field) for part, field in zip(parts, FIELDS, strict=True)
    )
    found = Schedule(
        text, tuple(sorted(minutes)), tuple(sorted(hours)), days, months, frozenset(day % 7 for day in weekdays),
        not parts[2].startswith("*") and not parts[4].startswith("*"),
    )  # fmt: skip
    if found.following(datetime(2000, 1, 1, tzinfo=UTC)) is None:
        raise Invalid(f"schedule {text!r} names no time there is", hint=HINT)
    return found


def _field(text: str, part: str, name: str, low: int, high: int) -> frozenset[int]:
    found: set[int] = set()
    for piece in part.split(","):
        match = re.fullmatch(r"(\*|\w+)(?:-(\w+))?(?:/(\d{1,3}))?", piece, re.ASCII)
        if match is None:
            raise _wrong(text, name, piece)
        first, last, step = match.groups()
        if first == "*":
            start, end = low, high if name != "weekday" else 6
            if last is not None:
                raise _wrong(text, name, piece)
        else:
            start = _number(text, name, piece, first)
            end = _number(text, name, piece, last) if last else high if step else start
        every = int(step or 1)
        if not low <= start <= end <= high or every < 1:
            raise _wrong(text, name, piece)
        found |= set(range(start, end + 1, every))
    return frozenset(found)


def _number(text: str, name: str, piece: str, word: str) -> int:
    known = NAMES.get(name, {}).get(word)
    if known is not None:
        return known
    if not word.isdecimal() or len(word) > 2:
        raise _wrong(text, name, piece)
    return int(word)


def _wrong(text: str, name: str, piece: str) -> Invalid:
    return Invalid(f"schedule {text!r}: {piece!r} is no {name}", hint=HINT)
