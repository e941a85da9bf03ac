"""Agents: a contract with a task, as a program in a box on a branch of its own; what it did there is proposed, reviewed and merged by a person."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Conflict, Denied, Invalid, NotFound, Unavailable
from ..sandbox.sandbox import Sandbox
from ..substrate import branches
from ..substrate.ledger import Execution
from ..substrate.reads import clock
from ..substrate.schema import MAIN, SYSTEM
from . import approvals, contracts, tending
from .blueprints import row_by_id
from .programs import LOOP
from .verbs import Call, verb

TASK = 32 << 10  # bytes; a program finds it in its environment
SHOWN = 1000  # rows and files that a review lists


@verb("agent.run", brief=False)
def run(
    call: Call, *, contract: str, task: str, source: str = "main", on: str | None = None, command: Any = None, model: str | None = None,
    name: str | None = None, propose: bool = True,
) -> Any:  # fmt: skip
    """Start an agent of a contract on a branch of its own (or `on` one), to do a task; what it changes is proposed for a merge."""
    branch = on or own_branch(name or contract)
    found, permissions = contracts.admitted(call, contract, branch)
    agent = {**of(found, task, command, model), "propose": propose and on is None}
    return begin(call, found, agent, permissions, branch, None if on else source, name)


def own_branch(name: str) -> str:
    """A name for the branch of an agent that nobody has yet."""
    plain = re.sub("[^a-z0-9]+", "_", name.lower())[:30].strip("_")
    return f"{plain if plain[:1].isalpha() else f'agent_{plain}'.strip('_')}_{secrets.token_hex(3)}"


def of(
    contract: contracts.Contract, task: str, command: Any = None, model: str | None = None, messages: str | None = None
) -> dict[str, Any]:
    """What is recorded of an agent that is to be: its task, program and model; Invalid when the contract has neither of these."""
    if not task.strip() or "\0" in task or any("\ud800" <= char <= "\udfff" for char in task):
        raise Invalid("an agent needs a task, a text", hint='layer agent run CONTRACT --task "…"')
    if len(task.encode("utf-8", "surrogatepass")) > TASK:
        raise Invalid(f"a task is at most {TASK} bytes", hint="put the rest into a row it can read")
    if command is not None:
        contracts.check_agent({"name": contract.name, "program": command})
    argv = contracts.argv(command) or contract.program
    if argv is None and contract.model is None:
        raise Invalid(
            f"contract {contract.name!r} has neither a model nor a program, so there is nothing to run",
            hint="layer contract define with model or program; or layer agent run … --program COMMAND",
        )
    if model is not None and contract.model is None:
        raise Invalid(f"contract {contract.name!r} has no model", hint="leave --model out")
    asked = None if contract.model is None else {**contract.model, **({} if model is None else {"model": model})}
    return {"task": task, "argv": list(argv or LOOP), "model": asked, "messages": messages}


def begin(
    call: Call, contract: contracts.Contract, agent: Mapping[str, Any], permissions: list[int], branch: str, source: str | None,
    name: str | None = None, as_of: Any = None, slice: Any = None, parent: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Make the branch (from `source`, if there is one), the execution and the box of an agent; the keeper starts its program."""
    layer, asking = call.layer, call.asking
    box = None if name is None else own_branch(name).replace("_", "-")
    making = contracts.Making(layer, contract, asking.principal, source or branch, slice, box, permissions)
    making.agent, making.branch = dict(agent), branch
    if call.execution.id is None:
        layer.ledger.intend(call.execution)
    execution = making.execution(asking, parent or call.execution.id, fresh=source is not None)
    if source is None:
        layer.ledger.intend(execution, lambda tx: contracts.record(tx, execution))
    else:
        try:
            with layer.ledger.work() as work:
                why = call.reason or f"agent of {contract.name}"
                number = branches.forked(work, call.execution, branch, source, None, as_of, why)
                execution.call = {**(execution.call or {}), "branch": number}
                tx = work.tx(execution, bare=True, reason=f"agent of {contract.name} on branch {branch}")
                contracts.record(tx, execution)
                tx.finish()
        except BaseException:
            layer.ledger.let_go(execution)  # it never was
            raise
    try:
        told = making.act(execution)
    except BaseException:
        if source is not None:
            branches.withdraw(layer.ledger, call.execution, branch)  # without the box there is no branch
        raise
    return {key: told[key] for key in ("execution", "box", "id", "branch", "contract", "tier", "kept")} | {
        "task": agent["task"], "program": agent["argv"], "source": source,
    }  # fmt: skip


# While it runs


def find(layer: Any, word: str | int) -> int:
    """The execution of an agent by its number, or by the name of its branch or box (the newest)."""
    engine = layer.engine
    at, given = engine.schema_prefix, engine.portable("c.arguments", "json")
    text = str(word)
    where, params = ("c.execution = ?", (int(text),)) if text.isdecimal() else ("true", ())
    with engine.reading() as session:
        rows = session.all(
            f"select c.execution, c.branch, {given} from {at}ledger_call c where c.verb = 'agent.run' and c.contract is not null and {where}"
            " order by c.execution desc",
            params,
        )
        for number, branch, arguments in rows:
            if text.isdecimal() or json.loads(arguments or "{}").get("name") == text:
                return int(number)
            if branch not in (None, MAIN) and layer.catalog.branch_by_id(session, branch).name == text:
                return int(number)
    raise NotFound(f"there is no agent {text!r:.120}", hint="layer agent list")


@verb("agent.stop", brief=False)
def stop(call: Call, *, agent: str) -> Any:
    """End an agent before it is done: its box is killed, what it changed stays on its branch and is not proposed."""
    layer = call.layer
    number = find(layer, agent)
    at, given = layer.engine.schema_prefix, layer.engine.portable("c.arguments", "json")
    with layer.engine.reading() as session:
        row = session.one(
            f"select x.principal, {given}, (select o.status from {at}ledger_outcome o where o.execution = x.id)"
            f" from {at}ledger_execution x join {at}ledger_call c on c.execution = x.id where x.id = ?",
            (number,),
        )
        policy = layer.catalog.policy(session, call.asking.principal, clock(layer.engine, session)[1])
    assert row is not None
    principal, arguments, status = row[0], json.loads(row[1]), row[2]
    if principal != call.asking.principal and not policy.sovereign():
        raise Denied(
            f"{policy.me['name']} may not stop agent {number}, which is another's", action="call", resource="agent.stop"
        )
    if status is not None:
        raise Conflict(f"agent {number} is over: {status}")
    if arguments["host"] != contracts.home():
        raise Unavailable(f"agent {number} runs on another machine", hint="stop it there")
    layer.ledger.intend(call.execution)
    if (box := tending.was_made(layer, number)) is not None:
        try:
            Sandbox.connect(box).kill()
        except NotFound:
            pass
    return {"stopped": number, "box": arguments["name"]}


# What it proposes


def propose(layer: Any, execution: Execution, contract: str, branch: str, files: int) -> int | None:
    """Ask a person to merge what an agent did on its branch; None when it changed nothing. Asking again gives the same."""
    if before := approvals.proposed(layer, execution.id or 0):
        return before
    with layer.engine.reading() as session:
        changes = list[dict[str, Any]]()
        try:
            found = layer.catalog.branch(session, branch)
        except NotFound:
            return None  # it was discarded meanwhile
        tx = branches.head(layer.engine, session, found)
        epoch = clock(layer.engine, session)[1]
        if tx is not None and found.parent is not None and found.status == "open":
            policy = layer.catalog.policy(session, layer.my_id, epoch)
            changes = branches.diff(layer.catalog, session, epoch, found, policy)
    if not changes:
        return None
    rows, policy_changes = _sorted(changes)
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row["entity"], Counter())[row["op"]] += 1
    request = {
        "rows": {entity: dict(by) for entity, by in counts.items()}, "files": files,
        "policy": [{"entity": row["entity"], "id": row["id"], "op": row["op"]} for row in policy_changes][:SHOWN], "tx": tx,
    }  # fmt: skip
    return int(approvals.request(
        layer, execution, contract=contract, branch=branch, action="merge", resource=f"branch:{branch}", request=request, expires=None,
    ))  # fmt: skip


def _sorted(differences: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """People's rows, and what changes how the layer is governed."""
    system = set(SYSTEM.by_name)
    return [d for d in differences if d["entity"] not in system], [d for d in differences if d["entity"] in system]


def review(layer: Any, approval: int, principal: str | None = None) -> dict[str, Any]:
    """All that a merge would bring: rows by field, changes of policy and schema, files; and whether the branch has moved on since."""
    row = _proposal(layer, approval, principal)
    name, asked = row["branch"], row["request"]
    changes = layer.diff(name, principal=principal) if row["status"] == "pending" else []
    rows, policy = _sorted(changes)
    proposed = sum(n for by in asked["rows"].values() for n in by.values()) + len(asked["policy"])
    with layer.engine.reading() as session:
        last = branches.head(layer.engine, session, layer.catalog.branch(session, name))
    moved = row["status"] == "pending" and last != asked["tx"]
    found = _kept(layer, row, principal)
    return {
        "approval": approval, "status": row["status"], "execution": row["execution"], "contract": row["contract"], "branch": name,
        "rows": rows[:SHOWN], "counts": asked["rows"], "policy": policy[:SHOWN],
        "files": [step["detail"] for step in found if step["kind"] == "file"][:SHOWN],
        "artifacts": [step["detail"] for step in found if step["kind"] == "artifact"][:SHOWN], "moved": moved,
        "unseen": max(0, proposed - len(rows[:SHOWN]) - len(policy[:SHOWN])) if row["status"] == "pending" else 0,
    }  # fmt: skip


def _kept(layer: Any, row: Mapping[str, Any], principal: str | None) -> list[dict[str, Any]]:
    """Files and artifacts of what is proposed, for whoever may approve it or read steps anyway."""
    engine, resource = layer.engine, f"contract:{row['contract']}"
    with engine.reading() as session:
        policy = layer.catalog.policy(session, layer.id_of(principal), clock(engine, session)[1])
        if policy.outright("approve", resource, "main")[0]:
            rows = session.all(
                f"select x.kind, {engine.portable('x.detail', 'json')} from {engine.schema_prefix}ledger_step x"
                " where x.execution = ? and x.kind in ('file', 'artifact') order by x.n",
                (row["execution"],),
            )
            return [{"kind": kind, "detail": json.loads(text)} for kind, text in rows]
    steps = "select kind, detail from step where execution = :id and kind in ('file', 'artifact') order by n"
    found: list[dict[str, Any]] = layer.query(steps, {"id": row["execution"]}, principal=principal)
    return found


def proposal(layer: Any, word: str | int) -> int:
    """The number of a proposal, from it or from the agent that made it."""
    text = str(word)
    if text.isdecimal():
        try:
            return int(row_by_id(layer, "approval", int(text))["id"])
        except NotFound:
            pass
    made = approvals.proposed(layer, find(layer, text))
    if made is None:
        raise NotFound(f"agent {text!r} has proposed nothing", hint=f"layer agent show {text}")
    return made


def _proposal(layer: Any, number: int, principal: str | None) -> dict[str, Any]:
    rows = layer.query("select * from approval where id = :id", {"id": number}, principal=principal)
    if not rows:
        raise NotFound(f"there is no proposal {number}", hint="layer approvals")
    row: dict[str, Any] = rows[0]
    if row["action"] != "merge":
        raise Invalid(f"approval {number} is not a merge: it asks to {row['action']}", hint="layer approvals")
    return row


def merge_approved(call: Call, row: Mapping[str, Any]) -> dict[str, Any]:
    """Merge what was proposed, as whoever approves it. Conflict, and nothing merged, when the branch is another since, or main has moved."""
    layer, name = call.layer, row["branch"]
    why, shown = call.reason or f"approval {row['id']}: merge {name}", row["request"]["tx"]
    done = branches.merge(layer.ledger, call.execution, name, None, False, why, expect=shown)
    if not done.applied:
        raise Conflict(
            f"merging branch {name!r} meets {len(done.conflicts)} conflict{'s' if len(done.conflicts) != 1 else ''}; nothing was merged",
            hint=f"layer conflicts {name}, layer resolve ID --take ours|theirs, then layer approve {row['id']} again",
        )
    return {"merged": name, "tx": done.tx, "changes": len(done.changes)}


def given(layer: Any, number: int) -> dict[str, Any]:
    """What was recorded of an agent when it was started."""
    at, text = layer.engine.schema_prefix, layer.engine.portable("arguments", "json")
    with layer.engine.reading() as session:
        row = session.one(f"select {text} from {at}ledger_call where execution = ? and verb = 'agent.run'", (number,))
    if row is None:
        raise NotFound(f"execution {number} is no agent", hint="layer agent list")
    return dict(json.loads(row[0]))
