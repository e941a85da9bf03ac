"""Prune: forget closed versions nobody can ask for any more. Hashes stay, so the chain goes on verifying."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from .ledger import Execution, Ledger
from .schema import SYSTEM
from .verify import _stores


def prune(ledger: Ledger, execution: Execution, before: int | datetime, reason: str | None) -> int:
    """Delete main's versions that ended at or before a moment, and before every open branch's fork."""
    with ledger.work() as work:
        work.catalog.policy(work.session, execution.principal, work.version).require("*", "*")
        horizon = work.catalog.moment(work.session, before, work.clock.tx)
        branch = SYSTEM.by_name["branch"]
        at, status, fork = work.engine.schema_prefix, branch.by_name["status"].store, branch.by_name["fork_tx"].store
        parent = branch.by_name["parent"].store
        row = work.session.one(
            f"select min({fork}) from {at}{branch.store} where {status} = 'open' and {parent} is not null"
        )
        if row is not None and row[0] is not None:
            horizon = min(horizon, row[0])
        count = 0
        governing = {e.id for e in SYSTEM.entities}
        for number, store in _stores(work.catalog, work.session).items():
            if number in governing:  # how the layer was governed stays answerable
                continue
            found: Any = work.session.one(f"select count(*) from {at}{store}__h where tx_to <= ?", (horizon,))
            count += found[0]
            work.session.run(f"delete from {at}{store}__h where tx_to <= ?", (horizon,))
        tx = work.tx(execution, reason=reason or f"prune before tx {horizon}")
        tx.fact("ledger_prune", tx.number, horizon)
        tx.finish()
        return count
