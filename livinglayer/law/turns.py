"""Turns: who goes on when not all can, and everybody has one before anybody has a second."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator


class Turns:
    """Work of many: `first` may go on at once as long as each is its owner's only one, more of one's own while fewer than `most` do, `each` of one at most.

    So nobody's long work keeps others from their first; among those who wait, whoever has the fewest comes next, then who came first.
    """

    def __init__(self, first: int, most: int, each: int) -> None:
        self._first, self._most, self._each = first, most, each
        self._changed = threading.Condition()
        self._running: Counter[Hashable] = Counter()
        self._waiting: list[tuple[Hashable, object]] = []

    @contextlib.contextmanager
    def turn(self, who: Hashable, wait: Callable[[int], None]) -> Iterator[None]:
        """Go on when it is one's turn; `wait` is told how many go on meanwhile, if that is not now."""
        mine = (who, object())
        with self._changed:
            self._waiting.append(mine)
            taken, others = self._take(mine), self._running.total()
        try:
            if not taken:
                wait(others)
                with self._changed:
                    self._changed.wait_for(lambda: self._take(mine))
        except BaseException:
            with self._changed:
                self._waiting.remove(mine)
                self._changed.notify_all()
            raise
        try:
            yield
        finally:
            with self._changed:
                self._running[who] -= 1
                self._running += Counter()  # those that have none are forgotten
                self._changed.notify_all()

    def _take(self, mine: tuple[Hashable, object]) -> bool:
        free = [each for each in self._waiting if self._may(each[0])]
        if not free or min(free, key=lambda each: self._running[each[0]]) is not mine:
            return False
        self._waiting.remove(mine)
        self._running[mine[0]] += 1
        self._changed.notify_all()  # there may be room for another
        return True

    def _may(self, who: Hashable) -> bool:
        has, all_ = self._running[who], self._running.total()
        return all_ < self._most and has < self._each if has else all_ < self._first
