"""Delegation: a box of one contract gives a task to an agent of another, which may do no more than both contracts let it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from ..errors import Conflict, Denied, LayerError, LimitExceeded
from ..sandbox.blueprint import TIERS
from ..sandbox.egress import rules
from ..substrate.predicates import both
from ..substrate.reads import clock
from ..substrate.schema import MAIN
from . import contracts, usage
from . import secrets as vault
from .contracts import Contract
from .executions import Run
from .functions import Asking
from .verbs import Call, opened

DEPTH = 4  # agents of agents
MOST = 50  # of one execution
LOOK = 0.2  # seconds between two looks at one that works


def within(parent: Contract, child: Contract) -> Contract:
    """What is left of a contract that acts for another one; Denied when it wants what that one has not."""
    for what, mine, theirs in (
        ("read", child.reads, parent.reads), ("write", child.scope, parent.scope), ("call", child.functions, parent.functions),
        ("mount", _mounts(child), _mounts(parent)),
    ):  # fmt: skip
        if beyond := sorted(set(mine) - set(theirs)):
            raise _beyond(parent, child, f"{what}s {beyond[0]!r}" if what != "write" else f"writes {beyond[0]!r}")
    allowed = rules.parse(list(parent.egress))
    for rule in rules.parse(list(child.egress)):
        if rule.action == "allow" and not any(contracts.rule_within(rule, one) for one in allowed):
            raise _beyond(parent, child, f"reaches {rule.text}")
    lent = vault.wanted(list(parent.secrets))
    for secret in vault.wanted(list(child.secrets)):
        if secret not in lent:
            raise _beyond(parent, child, f"uses the secret {secret.name!r} like that")
    least = [tier for tier in (parent.minimum, child.minimum) if tier is not None]
    return replace(
        child,
        reads=_narrowed(parent.reads, child.reads), scope=_narrowed(parent.scope, child.scope),
        projections=tuple(name for name in child.projections if name in parent.projections),
        tier=max(parent.tier, child.tier, key=TIERS.index), minimum=max(least, key=TIERS.index, default=None),
        egress=(*(said for said, rule in zip(parent.egress, allowed, strict=True) if rule.action == "deny"), *child.egress),
        approvals=(*({**rule, "of": None} for rule in child.approvals), *({**rule, "of": rule.get("of") or parent.name} for rule in parent.approvals)),
        stops=(*child.stops, *parent.stops), budget=_smaller(parent.budget, child.budget),
        terms=hashlib.sha256(f"{parent.terms}/{child.terms}".encode()).hexdigest()[:16],
    )  # fmt: skip


def _beyond(parent: Contract, child: Contract, what: str) -> Denied:
    return Denied(
        f"contract {parent.name!r} can't delegate to {child.name!r}: that {what}, which {parent.name!r} does not",
        hint="who delegates gives no more than it has", action="delegate", resource=f"contract:{child.name}",
    )  # fmt: skip


def _mounts(contract: Contract) -> set[str]:
    return {json.dumps(one, sort_keys=True) for one in (contract.blueprint or {}).get("mounts") or ()}


def _narrowed(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """Entities with the fields, actions and rows that both have."""
    found = {}
    for entity, part in child.items():
        theirs, mine = parent[entity], dict(part)
        if theirs.get("fields") is not None:
            fields = mine.get("fields")
            mine["fields"] = [name for name in theirs["fields"] if fields is None or name in fields]
        if theirs.get("actions"):
            mine["actions"] = [name for name in theirs["actions"] if name in (mine.get("actions") or theirs["actions"])]
            if not mine["actions"]:  # none would mean all
                continue
        if theirs.get("where"):
            mine["where"] = both(theirs["where"], mine["where"]) if mine.get("where") else theirs["where"]
        found[entity] = mine
    return found


def _smaller(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: min(each[name] for each in (one, other) if name in each) for name in {**one, **other}}


# Boxes


def effective(layer: Any, number: int, given: Mapping[str, Any]) -> Contract:
    """The contract that a box goes by, as it is now: its own, within those of all who delegated."""
    above = _above(given)
    if above is None:
        return contracts.by_id(layer, number)
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]

    def make() -> Contract:
        held, said, branch = _call_of(layer, above["parent"])
        parent = effective(layer, held, said)
        parent = replace(parent, reads=contracts.view(layer, parent, said["slice"], branch))
        return replace(within(parent, contracts.by_id(layer, number)), budget=above["budget"])

    found: Contract = layer.catalog._cached(("delegated", given["key"], epoch), make)
    return found


def _above(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the arguments of a box's execution: who delegated to it, and how much."""
    return (given.get("agent") or {}).get("delegated")


def stand(layer: Any, principal: int, given: Mapping[str, Any]) -> None:
    """Denied when an execution that delegated is over, or its principal may not act under its contract any more."""
    above = _above(given)
    while above is not None:
        number = above["parent"]
        held, said, branch = _call_of(layer, number)
        if _status(layer, number) is not None:
            raise Denied(
                f"execution {number}, which delegated this, is over", action="delegate", resource=f"execution/{number}"
            )
        contracts.decide(layer, principal, contracts.by_id(layer, held), branch)
        above = _above(said)


def _call_of(layer: Any, number: int) -> tuple[int, dict[str, Any], str]:
    """Contract, arguments and branch of a box's execution."""
    at, text = layer.engine.schema_prefix, layer.engine.portable("arguments", "json")
    with layer.engine.reading() as session:
        row = session.one(f"select contract, {text}, branch from {at}ledger_call where execution = ?", (number,))
        assert row is not None
        main = row[2] in (None, MAIN)
        return row[0], json.loads(row[1]), "main" if main else layer.catalog.branch_by_id(session, row[2]).name


def _status(layer: Any, number: int) -> tuple[str, Any] | None:
    """How an execution ended, once it has."""
    at, text = layer.engine.schema_prefix, layer.engine.portable("result", "json")
    with layer.engine.reading() as session:
        row = session.one(f"select status, {text} from {at}ledger_outcome where execution = ?", (number,))
    return None if row is None else (row[0], json.loads(row[1] or "{}"))


def children(layer: Any, number: int) -> list[tuple[int, dict[str, Any], tuple[str, Any] | None]]:
    """Executions that one has delegated to: number, what was recorded of it, how it ended."""
    at, text = layer.engine.schema_prefix, layer.engine.portable("c.arguments", "json")
    with layer.engine.reading() as session:
        rows = session.all(
            f"select x.id, {text} from {at}ledger_execution x join {at}ledger_call c on c.execution = x.id"
            " where x.parent = ? and x.kind = 'contract' order by x.id",
            (number,),
        )
    found = [(id, json.loads(said or "{}")) for id, said in rows]
    return [(id, said, _status(layer, id)) for id, said in found if _above(said) is not None]


def spans(layer: Any, number: int) -> list[tuple[datetime, datetime | None]]:
    """When those that an execution has delegated to began and ended."""
    engine = layer.engine
    at, begun, over = (
        engine.schema_prefix,
        engine.portable("x.started", "datetime"),
        engine.portable("o.finished", "datetime"),
    )
    with engine.reading() as session:
        rows = session.all(
            f"select {begun}, {over} from {at}ledger_execution x left join {at}ledger_outcome o on o.execution = x.id"
            " where x.parent = ? and x.kind = 'contract'",
            (number,),
        )
    return [(datetime.fromisoformat(one), None if end is None else datetime.fromisoformat(end)) for one, end in rows]


def spent(layer: Any, number: int) -> dict[str, float]:
    """What those that an execution has delegated to have used, of what adds up."""
    total: dict[str, float] = {}
    for _, _, end in children(layer, number):
        for name, amount in ((end[1].get("used") or {}) if end is not None else {}).items():
            if name != "seconds":
                total[name] = total.get(name, 0) + amount
    return total


def delegate(
    run: Run, contract: Contract, used: Mapping[str, float], given: Any, hold: Callable[[], None]
) -> dict[str, Any]:
    """Have an agent of another contract do a task on the same branch, and wait for its end; the same asked again is the same agent."""
    name, task, slice = given.text("contract"), given.text("task"), given.get("slice")
    layer, number = run.layer, run.execution.id or 0
    asked = hashlib.sha256(json.dumps([name, task, slice], sort_keys=True).encode()).hexdigest()
    known = children(layer, number)
    found = next((id for id, said, _ in known if (_above(said) or {}).get("asked") == asked), None)
    if found is None:
        if any(end is None for _, _, end in known):
            raise Conflict("another agent works for this one already", hint="one at a time: wait for its answer")
        if len(known) >= MOST:
            raise LimitExceeded(f"an execution delegates at most {MOST} times")
        found = _begin(run, contract, used, name, task, slice, asked)
    while (end := _status(layer, found)) is None:
        hold()
        time.sleep(LOOK)
    status, told = end
    return {"execution": found, "status": status} | {key: told[key] for key in ("answer", "error") if key in told}


def _begin(
    run: Run, contract: Contract, used: Mapping[str, float], name: str, task: str, slice: Any, asked: str
) -> int:
    from . import agents

    layer, execution = run.layer, run.execution
    if name not in contract.contracts:
        raise Denied(
            f"contract {contract.name!r} does not delegate to {name!r:.120}",
            action="delegate",
            resource=f"contract:{name[:120]}",
        )
    depth, above = 1, _above(_call_of(layer, execution.id or 0)[1])
    while above is not None:
        depth, above = depth + 1, _above(_call_of(layer, above["parent"])[1])
    if depth > DEPTH:
        raise LimitExceeded(f"agents delegate to each other at most {DEPTH} deep")
    left = {key: amount - used.get(key, 0) for key, amount in contract.budget.items()}
    if gone := next((key for key, amount in left.items() if amount <= 0), None):
        raise LimitExceeded(f"nothing is left of its budget of {gone} to give")
    child = contracts.load(layer, name)
    narrowed = within(replace(contract, reads=run.reads or {}, budget=left), child)
    asking = Asking(execution.principal, run.branch, execution.id, contract=contract.id, trace=execution.trace)
    permissions = contracts.decide(layer, execution.principal, child, run.branch)
    usage.admit(layer, execution.principal, child.id, ("boxes",))
    made = opened(layer, "agent.delegate", {"contract": name, "task": task}, asking)
    call = Call(layer, made, asking)
    try:
        above = {"parent": execution.id, "budget": narrowed.budget, "asked": asked}
        agent = {**agents.of(narrowed, task), "propose": False, "delegated": above}
        told = agents.begin(call, narrowed, agent, permissions, run.branch, None, slice=slice, parent=execution.id)
    except LayerError as error:
        if made.id is not None:
            layer.ledger.conclude(made, "failed", {"error": {"code": error.code, "message": error.message}})
        layer.ledger.let_go(made)
        raise
    layer.ledger.conclude(made, "done", {"value": told["execution"]})
    return int(told["execution"])
