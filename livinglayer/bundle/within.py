"""Within: a layer as an open tx sees it, for checks that otherwise read what is committed."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..substrate.catalog import Catalog
from ..substrate.engine import Session
from ..substrate.ledger import Tx


class _Engine:
    """An engine whose every reading is the open tx."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx.engine, name)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        yield self._tx.session

    snapshot = reading


class _Reads:
    """Queries of the open tx: guarded as any other."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def query_at(
        self, sql: str, params: Any, branch: str, as_of: None, principal: int
    ) -> tuple[list[dict[str, Any]], int]:
        tx, seconds = self._tx, self._tx.work.settings.query_seconds
        return tx.engine.inside(tx, sql, params, time.monotonic() + seconds, 1), tx.number

    def query(self, sql: str, params: Any, branch: str, as_of: None, principal: int, *_: Any) -> list[dict[str, Any]]:
        return self.query_at(sql, params, branch, as_of, principal)[0]


def within(layer: Any, tx: Tx) -> Any:
    """The layer as the tx sees it now; nothing that is found so is kept for others."""
    view = copy.copy(layer)
    view.my_id = tx.execution.principal
    view.engine = _Engine(tx)
    view.catalog = Catalog(view.engine)
    view.reads = _Reads(tx)
    return view
