"""Usage: what executions cost, as rows, and the quotas that are decided by them."""

from __future__ import annotations

from typing import Any

from ..substrate.ledger import now


def fact(run: Any, function: Any, asking: Any, ended: Any, wall: float) -> tuple[str, tuple[Any, ...]]:
    """The row of what an execution used."""
    spent = dict(ended.usage) if ended is not None else {}
    cpu = float(spent.get("cpu") or (spent.get("user", 0.0) + spent.get("system", 0.0)))
    memory = float(spent.get("memory") or spent.get("max_resident") or 0) * wall
    events = ended.events if ended is not None else ()
    sent = sum(int(event.get("sent") or 0) for event in events)
    received = sum(int(event.get("received") or 0) for event in events)
    return "ledger_usage", (
        run.execution.id, run.execution.principal, asking.contract, None if function is None else function.id, round(wall, 6), round(cpu, 6), memory,
        sent, received, int(spent.get("disk") or 0), now(),
    )  # fmt: skip


def admit(layer: Any, principal: int, contract: int | None) -> None:
    """Refuses an execution that would go over a quota."""
