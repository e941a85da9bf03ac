"""Reality: state and box, forked in one operation and brought back together. Neither is ever forked alone by it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ..errors import Invalid, LayerError, NotFound
from ..sandbox.blueprint import NAME as BOX_NAME
from ..sandbox.client import blocking_client, run_blocking
from ..sandbox.sandbox import Sandbox
from ..substrate import branches
from ..substrate.ledger import Execution, now
from ..substrate.reads import clock
from ..substrate.values import datetime_text, json_text
from . import contracts, held, tending
from .executions import STEPS, digest, traceparent
from .kept import PASSING
from .verbs import Call, Object, verb

LARGEST = 64 << 20  # bytes of one file that is brought back


@verb("reality.fork", brief=False)
def fork(
    call: Call, *, name: str, box: str, source: str = "main", slice: Object | None = None, box_name: str | None = None
) -> Any:
    """Fork state and a box together: a branch, and a box that begins where this one is and acts on it; both or neither."""
    layer, asking = call.layer, call.asking
    parent = Sandbox.connect(box)
    info = parent.info()
    number, contract = whose(layer, info)
    _may_fork(layer, asking.principal, info, number)
    child_name = box_name or f"{(info['name'] or 'box')[:30]}-{secrets.token_hex(3)}"
    if not BOX_NAME.fullmatch(child_name):
        raise Invalid(f"{child_name!r:.120} can't be the name of a box", hint="lower-case letters, digits and hyphens")
    making: contracts.Making | None = None
    if contract is not None:
        permissions = contracts.decide(layer, asking.principal, contract, name)
        making = contracts.Making(layer, contract, asking.principal, source, None, child_name, permissions)
        if number is not None and (cut := _arguments(layer, number).get("slice")) is not None:
            making.slice, making.reads = cut, contracts.view(layer, contract, cut, source)
    layer.ledger.intend(call.execution)
    key = secrets.token_hex(8) if making is None else making.key
    token = None if making is None else contracts.token(layer.id, key)
    holder = f"{layer.id}/{key}"
    snapshot, child = parent.snapshot(holder=holder), None
    try:
        (child,) = parent.fork(1, names=[child_name], labels=contracts.labels(layer.id, key), token=token)
        execution = _execution(call, making, name, child, key)
        with layer.ledger.work() as work:
            number_of_branch = branches.forked(work, call.execution, name, source, slice, None, call.reason)
            execution.call = {**(execution.call or {}), "branch": number_of_branch}
            tx = work.tx(execution, bare=True, reason=f"fork box {info['name'] or info['id']} with branch {name}")
            came = info["id"] if number is None else f"b{number}"
            contracts.record(tx, execution, came, snapshot.id)
            if not work.session.one(
                f"select 1 from {layer.engine.schema_prefix}ledger_snapshot where id = ?", (snapshot.id,)
            ):
                at = datetime_text(datetime.fromtimestamp(snapshot.created, UTC))
                tx.fact("ledger_snapshot", snapshot.id, came, snapshot.parent, at)
            step = {
                "id": child.id,
                "name": child_name,
                "tier": child.tier,
                "parent": info["id"],
                "snapshot": snapshot.id,
            }
            tx.fact("ledger_step", execution.id, 1, "box", json_text("step", step), now())
            tx.finish()
    except BaseException:
        if child is not None:
            child.kill()  # without the branch there is no box
        held.let_go(snapshot.id, holder)
        raise
    layer.ledger.let_go(execution)
    if making is not None and making.sliced:
        contracts.put_slice(layer, child, making.reads, asking.principal, name)
    return {
        "branch": name, "box": child_name, "id": child.id, "execution": execution.id, "parent": info["id"], "snapshot": snapshot.id,
        "tier": child.tier, "kept": tending.ensure(layer),
    }  # fmt: skip


def _execution(call: Call, making: contracts.Making | None, branch: str, child: Any, key: str) -> Execution:
    """The execution that a forked box is; one that no contract speaks of is known, and nothing is answered to it."""
    layer = call.layer
    scope = {"branch": branch, "entities": {} if making is None else making.contract.scope}
    kind = "box" if making is None else "contract"
    made: Execution = layer.ledger.open(
        call.asking.principal, scope, kind, call.reason, call.execution.id, traceparent(call.asking.trace)
    )
    made.tier = child.tier
    with layer.engine.reading() as session:
        state = clock(layer.engine, session)[0]
    if making is not None:
        blueprint = making.contract.blueprint
        made.blueprint = None if blueprint is None else blueprint["name"]
        made.call = {**making.called(None, state), "verb": "reality.fork"}
    else:
        given = {"contract": None, "name": child.name, "key": key, "host": contracts.home(), "slice": None}
        made.call = {"verb": "reality.fork", "arguments": json_text("arguments", given), "state": state, "attempt": 1}
    return made


def whose(layer: Any, info: Mapping[str, Any]) -> tuple[int | None, contracts.Contract | None]:
    """The open execution that a box is in this layer, and its contract."""
    labels = info["labels"]
    if labels.get("layer") != layer.id:
        return None, None
    for number, key, _ in tending.open_boxes(layer):
        if key == labels.get("box") and tending.was_made(layer, number) == info["id"]:
            with layer.engine.reading() as session:
                at = layer.engine.schema_prefix
                row = session.one(f"select contract from {at}ledger_call where execution = ?", (number,))
            contract = None if row is None or row[0] is None else contracts.by_id(layer, row[0])
            return number, contract
    return None, None


def _arguments(layer: Any, number: int) -> dict[str, Any]:
    at, given = layer.engine.schema_prefix, layer.engine.portable("arguments", "json")
    with layer.engine.reading() as session:
        row = session.one(f"select {given} from {at}ledger_call where execution = ?", (number,))
    return {} if row is None or row[0] is None else dict(json.loads(row[0]))


def _may_fork(layer: Any, principal: int, info: Mapping[str, Any], number: int | None) -> None:
    """One's own box, or one that a permission speaks of."""
    at, resource = layer.engine.schema_prefix, f"box:{info['name'] or info['id']}"
    with layer.engine.reading() as session:
        if number is not None:
            row = session.one(f"select principal from {at}ledger_execution where id = ?", (number,))
            if row is not None and row[0] == principal:
                return
        policy = layer.catalog.policy(session, principal, clock(layer.engine, session)[1])
    allowed, grants = policy.outright("fork", resource)
    if not allowed:
        raise policy.refusal("fork", resource, grants, "grant", named=True)


@verb("reality.merge", brief=False)
def merge(call: Call, *, name: str, target: str | None = None) -> Any:
    """Merge a branch, and bring back what the boxes forked with it have written, as artifacts of the merge."""
    layer = call.layer
    brought = [each for box, since in living(layer, name) for each in _work(layer, box, since)]
    if len(brought) > STEPS:
        raise Invalid(
            f"the boxes of branch {name!r} changed more than {STEPS} files", hint="layer merge without --artifacts"
        )
    done = layer.merge(name, target, reason=call.reason)
    if done.applied and brought:
        facts = [
            ("ledger_step", (call.execution.id, n, "artifact", json_text("step", each), now()))
            for n, each in enumerate(brought, 1)
        ]
        if call.execution.id is None:  # nothing was there to merge
            layer.ledger.intend(call.execution)
            facts = [(table, (call.execution.id, *row[1:])) for table, row in facts]
        layer.ledger.note(call.execution, facts)
    return {**vars(done), "artifacts": brought if done.applied else []}


def living(layer: Any, branch: str) -> list[tuple[Any, str | None]]:
    """The boxes that were forked with a branch and live, each with the snapshot it began as."""
    at = layer.engine.schema_prefix
    with layer.engine.reading() as session:
        number = layer.catalog.branch(session, branch).id
        rows = session.all(
            f"select l.execution, l.snapshot from {at}ledger_lineage l where l.branch = ? and l.snapshot is not null",
            (number,),
        )
    keys = {execution: key for execution, key, _ in tending.open_boxes(layer)}
    found = []
    for execution, snapshot in rows:
        id = tending.was_made(layer, execution) if execution in keys else None
        if id is not None:
            try:
                found.append((Sandbox.connect(id), snapshot))
            except NotFound:
                continue
    return found


def _work(layer: Any, box: Any, since: str | None) -> list[dict[str, Any]]:
    """What a box wrote since it was forked: contents are kept, by digest."""
    holder = f"{layer.id}/{secrets.token_hex(8)}"
    taken = box.snapshot(holder=holder)
    try:
        changes = run_blocking(blocking_client().call({"do": "snapshot.diff", "a": since, "b": taken.id}))
    except LayerError:  # the snapshot it began as is gone
        changes = box.changes()
    finally:
        held.let_go(taken.id, holder)
    found = []
    for change in changes:
        path = change["path"]
        if change["type"] != "file" or path.startswith(PASSING) or change.get("attributes_only"):
            continue
        told = {"name": path.lstrip("/"), "box": box.id, "kind": change["kind"]}
        if change["kind"] != "removed":
            data = box.files.read(path, user=None if box.tier == "process" else "root", limit=LARGEST)
            told |= {"digest": digest(data), "bytes": len(data)}
            layer.engine.put_blob(told["digest"], data)
        found.append(told)
    return found
