"""Timing: sides take turns inside each round, so that a busy machine slows all of them alike."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

Side = Callable[[int], object]  # takes a running number, so that it can pick another row each time
Timed = Callable[[int], float]  # the same, and says how many seconds it took


def per_call(side: Side, start: int, calls: int = 1) -> float:
    begin = time.perf_counter()
    for number in range(start, start + calls):
        side(number)
    return (time.perf_counter() - begin) / calls


def turns(
    *sides: Side, seconds: float, prepare: Side | None = None, least: int = 9, most: int = 2000
) -> list[tuple[float, ...]]:
    """Time the sides in turns for about `seconds` each: the seconds of one call, per round and side.

    `prepare` runs untimed before each round, whose single call then gets the same number.
    """
    calls, first = 1, 0
    if not prepare:
        for first in range(12):  # statement caches fill, PostgreSQL moves on to its generic plan
            for side in sides:
                side(first)
        quickest = min(per_call(sides[0], first + extra) for extra in (1, 2, 3))
        # Half a millisecond at a time: short enough that most rounds pass without anyone being put off the processor.
        calls = max(1, min(200, int(0.0005 / max(quickest, 1e-7))))
        first += 4

    def timed(side: Side) -> Timed:
        return lambda turn: per_call(side, first + turn * calls, calls)

    ready = (lambda turn: prepare(first + turn)) if prepare else None
    return alternate(*map(timed, sides), budget=seconds * len(sides) / calls, prepare=ready, least=least, most=most)


def alternate(
    *sides: Timed, budget: float, prepare: Side | None = None, least: int = 9, most: int = 2000
) -> list[tuple[float, ...]]:
    """Let sides that time themselves take turns until they have used up their budget of seconds."""
    rounds: list[tuple[float, ...]] = []
    spent = 0.0
    # At least `least` rounds, unless a round is so slow that three must do.
    while len(rounds) < 3 or (spent < budget * 20 and len(rounds) < least) or (spent < budget and len(rounds) < most):
        if prepare:
            prepare(len(rounds))
        taken = [0.0] * len(sides)
        for turn in range(len(sides)):
            which = (turn + len(rounds)) % len(sides)  # nobody always goes first
            taken[which] = sides[which](len(rounds))
        rounds.append(tuple(taken))
        spent += sum(taken)
    return rounds


def middle(rounds: list[tuple[float, ...]], side: int) -> float:
    return median(taken[side] for taken in rounds)


def ratio(rounds: list[tuple[float, ...]]) -> float:
    """How often longer the last side takes than the first: the median of the rounds' own ratios."""
    return median(taken[-1] / taken[0] for taken in rounds)


def fsync_seconds(directory: Path, times: int = 50) -> float:
    """The median time of a 4 KiB append with fdatasync: what every durable commit pays at least once."""
    with tempfile.TemporaryFile(dir=directory) as file:

        def append(number: int) -> None:
            os.write(file.fileno(), b"x" * 4096)
            os.fdatasync(file.fileno())

        return median(per_call(append, number) for number in range(times))
