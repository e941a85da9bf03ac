"""Draft: the changes a running function has asked for. They become one tx with its outcome, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import LimitExceeded
from ..substrate.ledger import Tx

MOST = 100_000  # changes in one draft
SMALL = 32  # up to here each change is tried at once, beyond at every doubling and at the end

Change = Callable[[Tx], Any]


@dataclass
class Draft:
    """Changes in the order they were asked for, each a call of a tx."""

    changes: list[Change] = field(default_factory=list)
    first_read: int | None = None  # the tx of the first thing read: what changed since is a conflict
    _tried: int = 0

    def __len__(self) -> int:
        return len(self.changes)

    def add(self, changes: Sequence[Change], trying: Callable[[Callable[[Tx], Any]], Any]) -> None:
        """Take changes along; one that would be refused is refused now, while the draft is small."""
        if len(self) + len(changes) > MOST:
            raise LimitExceeded(f"one execution makes at most {MOST} changes", hint="do it in several calls")
        kept = len(self)
        self.changes += changes
        if len(self) <= SMALL or len(self) >= 2 * self._tried:
            try:
                trying(self.apply)
            except BaseException:
                del self.changes[kept:]
                raise
            self._tried = len(self)

    def apply(self, tx: Tx) -> None:
        """All of them, in order."""
        for change in self.changes:
            change(tx)
