"""Usage: what executions cost, as rows, and the quotas that are decided by them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from ..errors import Denied, Invalid, LimitExceeded, NotFound
from ..substrate.ledger import MAIN_CHAIN, now
from ..substrate.reads import clock
from ..substrate.schema import SYSTEM
from ..substrate.values import datetime_text

# What a quota may speak of: a column of what is summed, and how its amounts read.
RESOURCES = {
    "executions": ("1", "executions"),
    "boxes": ("case when x.function is null then 1 else 0 end", "boxes"),
    "cpu": ("x.cpu", "seconds of CPU"),
    "memory": ("x.memory", "byte-seconds of memory"),
    "bytes": ("x.sent + x.received", "bytes of network"),
    "tokens": ("", "tokens of models"),
    "money": ("", "money for models"),
    "requests": ("", "requests to a server"),  # which each server counts for itself
}
MODELS = ("tokens", "money")  # which the outcome of a box says
LIVE = "box/"  # leases of boxes that live now, with what they have used so far


def fact(run: Any, function: Any, asking: Any, ended: Any, wall: float) -> tuple[str, tuple[Any, ...]]:
    """The row of what an execution used."""
    spent = dict(ended.usage) if ended is not None else {}
    cpu = float(spent.get("cpu") or (spent.get("user", 0.0) + spent.get("system", 0.0)))
    memory = float(spent.get("memory") or spent.get("max_resident") or 0) * wall
    sent, received = int(spent.get("sent") or 0), int(spent.get("received") or 0)
    return "ledger_usage", (
        run.execution.id, run.execution.principal, asking.contract, None if function is None else function.id, round(wall, 6), round(cpu, 6), memory,
        sent, received, int(spent.get("disk") or 0), now(),
    )  # fmt: skip


def totals(
    layer: Any, by: str = "principal", since: datetime | None = None, principal: str | None = None
) -> list[dict[str, Any]]:
    """What was used, by principal, contract or function, of what a principal may read of it; models too, where boxes asked any."""
    if by not in ("principal", "contract", "function"):
        raise Invalid(f"usage is told by principal, contract or function, not {by!r:.60}")
    where = "" if since is None else "where at > :since"
    sql = (
        f"select {by}, count(*) as executions, sum(wall) as wall, sum(cpu) as cpu, sum(memory) as memory, sum(sent) as sent,"
        f" sum(received) as received from usage {where} group by {by} order by sum(cpu) desc, {by}"
    )
    params = {} if since is None else {"since": since}
    rows = list(layer.query(sql, params, principal=principal))
    for row in rows:
        row |= {"tokens": 0, "money": 0.0}
    if by != "function":
        _models(layer, by, rows, where, params, principal)
    return rows


def _models(
    layer: Any, by: str, rows: list[dict[str, Any]], where: str, params: dict[str, Any], principal: str | None
) -> None:
    """Add what was used of models, which the outcome of a box says; nothing for who may not read executions."""
    sums = ", ".join(f"sum(cast(e.result ->> '{name}' as float)) as {name}" for name in MODELS)
    sql = (
        f"select e.{by}, {sums} from execution e join usage u on u.execution = e.id and e.kind = 'contract'"
        f" {where.replace('at >', 'u.at >')} group by e.{by}"
    )
    try:
        found = {row[by]: row for row in layer.query(sql, params, principal=principal)}
    except (Denied, Invalid, NotFound):
        return
    for row in rows:
        if used := found.get(row[by]):
            row |= {"tokens": int(used["tokens"] or 0), "money": round(used["money"] or 0.0, 6)}


# Quotas


@dataclass(frozen=True)
class Quota:
    """One quota as its row says."""

    id: int
    subject: int | None  # a principal, or a role: then each of its holders has this much
    contract: int | None
    resource: str
    amount: float
    seconds: int


def admit(layer: Any, principal: int, contract: int | None, resources: tuple[str, ...] = (), count: int = 1) -> None:
    """Refuses executions that would go over a quota; LimitExceeded names the row, what was used, and when it frees up.

    Quotas of boxes are asked for those alone, with `resources`; of several at once all must have room.
    """
    for quota in quotas(layer, principal, contract):
        if quota.resource == "requests" or (quota.resource == "boxes" and "boxes" not in resources):
            continue
        used = spent(layer, quota, principal)
        others = count - 1 if quota.resource in ("executions", "boxes") else 0
        if used + others >= quota.amount:
            raise _over(layer, quota, principal, used)


def quotas(layer: Any, principal: int, contract: int | None) -> tuple[Quota, ...]:
    """The quotas that speak of a principal, of a role it holds or of a contract; kept until one of them changes."""
    catalog = layer.catalog
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]

        def all_() -> tuple[Quota, ...]:
            rows = catalog.rows(session, SYSTEM.by_name["quota"], MAIN_CHAIN)
            names = ("id", "subject", "contract", "resource", "amount", "seconds")
            return tuple(Quota(*(row[name] for name in names)) for row in sorted(rows, key=lambda row: row["id"]))

        known: tuple[Quota, ...] = catalog._cached(("quotas", epoch), all_)
        if not known:
            return ()
        held: frozenset[int] = catalog._cached(("roles", principal, epoch), lambda: held_by(layer, session, principal))
    return tuple(
        quota
        for quota in known
        if quota.resource in RESOURCES
        and (quota.subject is None or quota.subject in held)
        and (quota.contract is None or quota.contract == contract)
    )


def held_by(layer: Any, session: Any, principal: int) -> frozenset[int]:
    """A principal and every role it holds, directly or through another."""
    rows = layer.catalog.rows(session, SYSTEM.by_name["membership"], MAIN_CHAIN)
    found, frontier = {principal}, [principal]
    while frontier:
        member = frontier.pop()
        for row in rows:
            if row["member"] == member and row["role"] not in found:
                found.add(row["role"])
                frontier.append(row["role"])
    return frozenset(found)


def spent(layer: Any, quota: Quota, principal: int) -> float:
    """What counts against a quota now: what ended within its window, and what runs."""
    if quota.resource == "requests":
        return 0.0
    if quota.resource in MODELS:
        ended = sum(amount for _, amount in _asked(layer, quota, principal))
        return ended + _running(layer, quota, principal)
    where, params = _window(layer, quota, principal)
    column, at = RESOURCES[quota.resource][0], layer.engine.schema_prefix
    with layer.engine.reading() as session:
        row = session.one(f"select sum({column}) from {at}ledger_usage x where {where}", params)
    ended = float(row[0]) if row is not None and row[0] is not None else 0.0
    return ended + _running(layer, quota, principal)


def _asked(layer: Any, quota: Quota, principal: int) -> Iterator[tuple[str, float]]:
    """When boxes ended within a quota's window, and what each had used of models; oldest first."""
    where, params = _window(layer, quota, principal)
    engine, at = layer.engine, layer.engine.schema_prefix
    with engine.reading() as session:
        rows = session.all(
            f"select {engine.portable('x.at', 'datetime')}, {engine.portable('o.result', 'json')} from {at}ledger_usage x"
            f" join {at}ledger_outcome o on o.execution = x.execution where x.function is null and {where} order by x.at",
            params,
        )
    for when, text in rows:
        found = json.loads(text or "{}")
        yield when, float((isinstance(found, dict) and found.get(quota.resource)) or 0)


def _window(layer: Any, quota: Quota, principal: int) -> tuple[str, tuple[Any, ...]]:
    since = datetime_text(datetime.now(UTC) - timedelta(seconds=quota.seconds))
    conditions, params = ["x.at > ?"], [layer.engine.native("datetime", since)]
    if quota.subject is not None:
        conditions, params = ["x.principal = ?", *conditions], [principal, *params]
    if quota.contract is not None:
        conditions, params = ["x.contract = ?", *conditions], [quota.contract, *params]
    return " and ".join(conditions), tuple(params)


def _running(layer: Any, quota: Quota, principal: int) -> float:
    """Of what has not ended: boxes as they were last seen, and functions that run in this process."""

    def counts(who: int | None, contract: int | None) -> bool:
        return (quota.subject is None or who == principal) and quota.contract in (None, contract)

    if quota.resource not in ("executions", "boxes"):
        return sum(_amount(quota.resource, box) for box in living(layer) if counts(box["principal"], box["contract"]))
    total = float(sum(counts(*each) for each in _open(layer)))
    if quota.resource == "executions":
        total += sum(
            execution.kind == "function" and execution.open
            for execution in list(layer.ledger.executions)
            if counts(execution.principal, (execution.call or {}).get("contract"))
        )
    return total


def _amount(resource: str, live: Mapping[str, Any]) -> float:
    return float(live["sent"] + live["received"] if resource == "bytes" else live[resource])


def _open(layer: Any) -> list[tuple[int, int | None]]:
    """Principal and contract of every box that is known and has not ended."""
    at = layer.engine.schema_prefix
    with layer.engine.reading() as session:
        rows = session.all(
            f"select x.principal, c.contract from {at}ledger_lineage l join {at}ledger_execution x on x.id = l.execution"
            f" join {at}ledger_call c on c.execution = l.execution"
            f" where not exists (select 1 from {at}ledger_outcome o where o.execution = l.execution)"
        )
    return [(row[0], row[1]) for row in rows]


def living(layer: Any) -> Iterator[dict[str, Any]]:
    """What boxes of contracts have used so far."""
    for _, _, _, value in layer.engine.leases(LIVE):
        try:
            found = json.loads(value or "")
        except ValueError:
            continue
        yield {
            "principal": None,
            "contract": None,
            "cpu": 0.0,
            "memory": 0.0,
            "sent": 0,
            "received": 0,
            "tokens": 0,
            "money": 0.0,
            **found,
        }


def _over(layer: Any, quota: Quota, principal: int, used: float) -> LimitExceeded:
    unit = RESOURCES[quota.resource][1]
    frees = _frees(layer, quota, principal, used)
    when = "when something that runs now has ended" if frees is None else f"at {frees.isoformat(timespec='seconds')}"
    return LimitExceeded(
        f"{_whose(layer, quota, principal)} {_figure(used)} of {_figure(quota.amount)} {unit} in {quota.seconds} s: quota {quota.id}",
        hint=f"there is room again {when}",
        rows=[quota.id],
        quota=quota.id,
        used=used,
        frees=None if frees is None else frees.isoformat(),
    )


def _whose(layer: Any, quota: Quota, principal: int) -> str:
    if quota.subject is not None:
        return f"{layer.name_of(principal)} has used"
    return "everybody together has used" if quota.contract is None else "the contract has used"


def _figure(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _frees(layer: Any, quota: Quota, principal: int, used: float) -> datetime | None:
    """When enough has left the window; None when what runs is too much by itself."""
    where, params = _window(layer, quota, principal)
    column, at = RESOURCES[quota.resource][0], layer.engine.schema_prefix
    moment = layer.engine.portable("x.at", "datetime")
    with layer.engine.reading() as session:
        rows = (
            _asked(layer, quota, principal)
            if quota.resource in MODELS
            else session.stream(
                f"select {moment}, {column} from {at}ledger_usage x where {where} order by x.at", params
            )
        )
        for when, amount in rows:
            used -= amount
            if used < quota.amount:
                return datetime.fromisoformat(when) + timedelta(seconds=quota.seconds)
    return None
