"""Approvals: acts that wait for somebody's yes, as rows. Nobody is asked twice, and what is approved is done once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ..errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound
from ..substrate.ledger import MAIN_CHAIN, Execution, Tx, now
from ..substrate.predicates import Env, compile_predicate
from ..substrate.reads import clock
from ..substrate.schema import SYSTEM, Entity
from ..substrate.values import datetime_text
from . import functions, usage
from .executions import Run, digest
from .functions import Asking
from .signature import Signature, dumps
from .verbs import Call, opened, verb

if TYPE_CHECKING:
    from ..substrate.engine import Session

APPROVAL = SYSTEM.by_name["approval"]
PENDING, ALL = 8, 50  # of one execution
EXPIRES = 86_400.0  # seconds that somebody has to answer
LONGEST = 366 * 86_400
LARGE = 256 << 10  # bytes of a request that somebody shall judge
LOOK = 0.1  # seconds between two looks for an answer
WRITES = ("insert", "update", "delete", "upsert")
KEYS = {"action", "resource", "fields", "where", "by", "expires", "reason"}
HINT = '{"action": "call", "resource": "function:order.refund", "where": "amount > 50", "by": ["lead"]}'
_KINDS = {kind.code: kind for kind in (Invalid, Denied, NotFound, Conflict, LimitExceeded, functions.Raised)}


class Needed(LayerError):
    """Rules speak of this change: it is undone, and somebody is asked who may answer for all of them."""

    def __init__(self, rules: Iterable[Mapping[str, Any]]) -> None:
        super().__init__("this needs somebody's yes")
        first, *more = rules
        self.rule = {**first, "also": more} if more else first


def raised(told: Mapping[str, Any] | None) -> LayerError | None:
    """An error as it was recorded."""
    return None if told is None else _KINDS.get(told["code"], LayerError)(told["message"], hint=told["hint"])


class Halted(BaseException):
    """Whoever waits here stops; another goes on."""


# Rules


def check(layer: Any, what: str, rules: Any, branch: str = "main") -> None:
    """Refuses rules that could never hold."""
    if rules is None:
        return
    if not isinstance(rules, list) or len(rules) > 100:
        raise Invalid(f"approvals of {what} are a list of rules", hint=HINT)
    schema = layer.schema(branch)
    for rule in rules:
        if not isinstance(rule, Mapping) or set(rule) - KEYS or not {"action", "resource"} <= set(rule):
            raise Invalid(f"an approval of {what} has {', '.join(sorted(KEYS))}, not {rule!r:.120}", hint=HINT)
        action, resource, fields, where = rule["action"], rule["resource"], rule.get("fields"), rule.get("where")
        if action not in ("call", "write", *WRITES) or not isinstance(resource, str):
            raise Invalid(f"an approval of {what} can't be for {action!r:.60} of {resource!r:.60}", hint=HINT)
        if action == "call":
            noun, _, name = resource.partition(":")
            if noun != "function":
                raise Invalid(f"what is called is function:NAME, not {resource!r:.120}", hint=HINT)
            function = None if name == "*" else functions.load(layer, name, branch)
            entity = None if function is None else _arguments(function.name, function.signature)
        else:
            entity = None if resource == "*" else schema.get(resource)
        if entity is None and (fields is not None or where is not None):
            raise Invalid(f"an approval of {what} for {resource!r} has no fields and no where", hint="name one")
        if fields is not None and not (isinstance(fields, list) and action != "call"):
            raise Invalid(f"fields of an approval of {what} are a list of names of {resource!r:.60}")
        for label in fields or ():
            entity.get(label)  # type: ignore[union-attr]
        if where is not None:
            compile_predicate(where, schema, entity)  # type: ignore[arg-type]
        _check_who(layer, what, rule)


def _check_who(layer: Any, what: str, rule: Mapping[str, Any]) -> None:
    by, expires, reason = rule.get("by"), rule.get("expires"), rule.get("reason")
    if by is not None and not (isinstance(by, list) and by and all(isinstance(one, str) for one in by)):
        raise Invalid(f"by whom {what} is approved is a list of principals or roles", hint=HINT)
    with layer.engine.reading() as session:
        for one in by or ():
            layer.catalog.principal(session, one)
    if expires is not None and (
        isinstance(expires, bool) or not isinstance(expires, int | float) or not 0 < expires <= LONGEST
    ):
        raise Invalid(f"an approval of {what} expires after so many seconds, not {expires!r:.60}")
    if reason is not None and not (isinstance(reason, str) and len(reason) <= 10_000):
        raise Invalid(f"the reason of an approval of {what} is a text")


def _arguments(name: str, signature: Signature) -> Entity:
    """The arguments of a function as a predicate sees them."""
    return Entity(0, name, "", fields=tuple((signature.arguments or {}).values()))


def guarded(rules: Iterable[Mapping[str, Any]]) -> tuple[Callable[[Tx], None], Callable[[Tx], None]]:
    """What goes before and after changes in their tx: the second raises Needed when a rule speaks of one of them."""

    def before(tx: Tx) -> None:
        tx.before = {}

    def after(tx: Tx) -> None:
        needed: list[Mapping[str, Any]] = []
        for (number_of, row), (op, _) in tx.changes.items():
            entity = tx.schema.by_id[number_of]
            if not any(rule["resource"] in (entity.name, "*") for rule in rules):
                continue
            table, was = tx.work.table(entity), (tx.before or {}).get((number_of, row))
            found = None if op == "d" else table.get(tx.session, tx.chain, row)
            states = [table.named(entity, each.values, row) for each in (was, found) if each is not None]
            old, new = (table.named(entity, each.values, row) if each is not None else {} for each in (was, found))
            if op == "i":  # what a default says is nobody's change
                old = {f.name: new[f.name] if f.initial == "now()" else tx._default(entity, f) for f in entity.defaults}
            changed = {label for label in {*old, *new} if old.get(label) != new.get(label)}
            action = {"i": "insert", "u": "update", "d": "delete"}[op]
            speaking = [
                rule
                for rule in rules
                if _speaks(rule, action, entity.name, changed) and any(_holds(rule, tx, entity, state) for state in states)
            ]  # fmt: skip
            needed += [rule for rule in _first(speaking) if rule not in needed]
        if needed:
            raise Needed(needed)

    return before, after


def _first(speaking: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of those that speak of one act the first, of its own contract and of each that delegated."""
    found: dict[str | None, Mapping[str, Any]] = {}
    for rule in speaking:
        found.setdefault(rule.get("of"), rule)
    return list(found.values())


def _speaks(rule: Mapping[str, Any], action: str, resource: str, changed: set[str]) -> bool:
    """Whether a rule is about this kind of change; an upsert is an insert or an update."""
    actions = {"write": WRITES, "upsert": ("insert", "update")}.get(rule["action"], (rule["action"],))
    fields = rule.get("fields")
    return (
        action in actions
        and rule["resource"] in (resource, "*")
        and (fields is None or action == "delete" or bool(changed & set(fields)))
    )


def _holds(rule: Mapping[str, Any], tx: Tx, entity: Entity, state: Mapping[str, Any]) -> bool:
    """Whether the condition of a rule is met; what can't be known is."""
    if rule.get("where") is None:
        return True
    try:
        predicate = compile_predicate(rule["where"], tx.schema, entity)
    except Invalid:
        return True
    return predicate.test(Env(state, tx.policy.me, tx._follow)) is not False


def of_call(run: Run, rules: Iterable[Mapping[str, Any]], name: str, arguments: Any) -> list[Mapping[str, Any]]:
    """The rules that speak of a call. A call that would be refused is refused before anybody is asked."""
    speaking = [
        rule for rule in rules if rule["action"] == "call" and rule["resource"] in (f"function:{name}", "function:*")
    ]
    if not speaking:
        return []
    layer, asking = run.layer, Asking(run.execution.principal, run.branch)
    try:
        function = functions.load(layer, name, run.branch)
        functions.decide(layer, asking, function)
    except Denied as error:
        if functions.readable(layer, asking.principal):
            raise
        layer.ledger.denied(run.execution, error)
        raise functions.nowhere(name) from None
    bound = function.signature.bind(name, arguments)
    entity = _arguments(name, function.signature)
    stored = {
        label: None if bound.get(label) is None else each.encode(name, bound[label], LARGE)
        for label, each in entity.by_name.items()
    }

    def holding(tx: Tx) -> list[Mapping[str, Any]]:
        return _first(rule for rule in speaking if _holds(rule, tx, entity, stored))

    found: list[Mapping[str, Any]] = layer.ledger.rehearse(run.execution, run.branch, holding)
    return found


# Rows


def get(layer: Any, number: int) -> dict[str, Any]:
    """One approval, or NotFound."""
    rows = _rows(layer, "where x.id = ?", (number,))
    if not rows:
        raise NotFound(f"there is no approval {number}", hint="layer approvals lists them")
    return rows[0]


def of(layer: Any, execution: int) -> list[dict[str, Any]]:
    """What one execution has asked for, merges apart."""
    store, action = APPROVAL.by_name["execution"].store, APPROVAL.by_name["action"].store
    return _rows(layer, f"where x.{store} = ? and x.{action} <> 'merge' order by x.id", (execution,))


def proposed(layer: Any, execution: int) -> int | None:
    """The merge that one execution has proposed, if it has."""
    store, action = APPROVAL.by_name["execution"].store, APPROVAL.by_name["action"].store
    rows = _rows(layer, f"where x.{store} = ? and x.{action} = 'merge'", (execution,))
    return rows[0]["id"] if rows else None


def _rows(layer: Any, where: str, params: tuple[Any, ...]) -> list[dict[str, Any]]:
    with layer.engine.reading() as session:
        found: list[dict[str, Any]] = layer.catalog.rows(session, APPROVAL, MAIN_CHAIN, where, params)
    return found


def request(
    layer: Any, execution: Execution, *, contract: str | None, branch: str, action: str, resource: str, request: Any,
    rule: Mapping[str, Any] | None = None, reason: str | None = None, expires: float | None = EXPIRES, key: str | None = None,
) -> int:  # fmt: skip
    """Ask for somebody's yes: a pending row on main. Its id. `key` is what makes another request the same one."""
    until = None if expires is None else datetime_text(datetime.now(UTC) + timedelta(seconds=expires))
    row = {
        "execution": execution.id, "contract": contract, "principal": execution.principal, "branch": branch, "action": action,
        "resource": resource, "request": request, "digest": key or digest(dumps([action, resource, request])), "rule": rule,
        "reason": reason, "expires": until,
    }  # fmt: skip
    return _write(
        layer, execution, "approval.ask", lambda tx: tx.record(APPROVAL, tx._encoded(APPROVAL, row)), {"resource": resource}
    )  # fmt: skip


def mark(layer: Any, execution: Execution, number: int, status: str, was: str, **values: Any) -> None:
    """Move a row from one state to the next, or Conflict."""
    _write(layer, execution, f"approval.{status}", lambda tx: _move(tx, number, was, status, **values), {"id": number})


def _write(layer: Any, execution: Execution, name: str, act: Callable[[Tx], Any], shown: Mapping[str, Any]) -> Any:
    """A tx of its own on main, for an execution whose scope is another branch and other entities."""
    asking = Asking(
        execution.principal, parent=execution.id, contract=(execution.call or {}).get("contract"), trace=execution.trace
    )
    made = opened(layer, name, shown, asking)
    made.brief = True
    try:
        return layer.ledger.write(made, "main", act)
    finally:
        layer.ledger.let_go(made)


def _move(tx: Tx, number: int, was: str, status: str, **values: Any) -> None:
    found = tx.work.table(APPROVAL).get(tx.session, tx.chain, number)
    state = None if found is None else tx.work.table(APPROVAL).value(APPROVAL.by_name["status"], found.values)
    if state != was:
        raise Conflict(f"approval {number} is {state or 'gone'}, not {was}", hint="layer approvals --all")
    tx.record(APPROVAL, tx._encoded(APPROVAL, {**values, "status": status}, partial=True), number)


def withdraw(layer: Any, execution: Execution, over: bool = True) -> None:
    """The execution is over, or about to be: what it waited for is not wanted any more; what was approved may be done until it is over."""
    for row in of(layer, execution.id or 0):
        if row["status"] == "pending" or (over and row["status"] == "approved"):
            status, gone = ("withdrawn", None) if row["status"] == "pending" else ("failed", {"error": _OVER})
            try:
                mark(layer, execution, row["id"], status, row["status"], result=gone)
            except Conflict:
                return withdraw(layer, execution, over)  # it was answered this moment


_OVER = {"code": "conflict", "message": "the box ended before it was done", "hint": None}


def waited(rows: Iterable[Mapping[str, Any]]) -> float:
    """Seconds in which at least one of these was pending."""
    total, last, present = 0.0, None, datetime.now(UTC)
    for begin, end in sorted(
        (row["asked"], row["answered"] or (present if row["status"] == "pending" else row["asked"])) for row in rows
    ):
        begin = begin if last is None else max(begin, last)
        total += max(0.0, (end - begin).total_seconds())
        last = end if last is None else max(last, end)
    return total


# One box


class Asks:
    """What one box has asked for. `hold` is called again and again while it waits: it keeps the box frozen, or raises Halted."""

    def __init__(self, run: Run, contract: str, stand: Callable[[], None]) -> None:
        self.run, self.contract, self.stand = run, contract, stand
        self.layer, self.execution = run.layer, run.execution
        self.rows = {row["digest"]: row for row in of(run.layer, run.execution.id or 0)}
        self.hold: Callable[[], None] = lambda: None

    def answer(self, rule: Mapping[str, Any], do: str, given: Mapping[str, Any]) -> Any:
        """Ask, wait, and do it; or what came of it before. Denied when somebody refuses, or nobody answers in time."""
        key = digest(dumps([do, sorted(given.items())]))
        row = self.rows.get(key) or self._ask(rule, do, given, key)
        return self.outcome(self.settle(row))

    def _ask(self, rule: Mapping[str, Any], do: str, given: Mapping[str, Any], key: str) -> dict[str, Any]:
        if len(dumps(given)) > LARGE:
            raise LimitExceeded(f"what somebody must approve has at most {LARGE} bytes", hint="ask for less at a time")
        pending = sum(row["status"] == "pending" for row in self.rows.values())
        if pending >= PENDING or len(self.rows) >= ALL:
            most = f"{PENDING} times at once" if pending >= PENDING else f"{ALL} times"
            raise LimitExceeded(f"a box asks for approval at most {most}", hint="go on without what was refused")
        resource = f"function:{given['function']}" if do == "call" else str(given["entity"])
        number = request(
            self.layer, self.execution, contract=self.contract, branch=self.run.branch, action=do, resource=resource,
            request={"do": do, "given": given}, rule=rule, reason=rule.get("reason"), expires=rule.get("expires") or EXPIRES, key=key,
        )  # fmt: skip
        self.run.steps.append(
            ("approval", {"approval": number, "do": do, "resource": resource, "status": "pending"}, now())
        )
        self.rows[key] = get(self.layer, number)
        return self.rows[key]

    def settle(self, row: dict[str, Any]) -> dict[str, Any]:
        """Wait for the answer to one, and do what was approved: the row as it is at its end."""
        if row["status"] == "pending":
            row = self._wait(row["id"])
            told = {"approval": row["id"], "status": row["status"], "answer": row["answer"]}
            self.run.steps.append(("approval", told, now()))
        if row["status"] == "approved":
            row = self._done(row)
        self.rows[row["digest"]] = row
        return row

    def _wait(self, number: int) -> dict[str, Any]:
        seen = -1
        while True:
            with self.layer.engine.reading() as session:
                tx = clock(self.layer.engine, session)[0]
            if tx != seen:
                seen, row = tx, get(self.layer, number)
                if row["status"] != "pending":
                    return row
            if row["expires"] is not None and row["expires"] <= datetime.now(UTC):
                try:
                    mark(self.layer, self.execution, number, "expired", "pending", answered=now())
                except Conflict:
                    pass  # it was answered this moment
                continue
            self.hold()
            time.sleep(LOOK)

    def _done(self, row: dict[str, Any]) -> dict[str, Any]:
        """Do what was approved: a second try, by whoever, gives what the first one gave."""
        try:
            self.stand()
            status, result = "done", self._act(row["request"]["do"], row["request"]["given"], row["id"])
        except LayerError as error:
            status, result = "failed", {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
            if isinstance(error, Denied):
                self.layer.ledger.denied(self.execution, error, action=row["action"], resource=row["resource"])
        try:
            mark(self.layer, self.execution, row["id"], status, "approved", result=result)
        except Conflict:
            pass  # another was quicker, with the same
        return get(self.layer, row["id"])

    def _act(self, do: str, given: Mapping[str, Any], number: int) -> Any:
        key, run = f"approval/{number}", self.run
        if do == "call":
            return json.loads(run.called(given["function"], given.get("arguments") or {}, key))
        act, rows = _CHANGES[do], given.get("values")
        ids = self.layer.ledger.write(self.execution, run.branch, lambda tx: act(tx, given), key=key)
        for id, row in zip(ids, rows if isinstance(rows, list) else [rows], strict=True):
            run._mutated(do, given["entity"], id, row)
        return (
            {"ids": ids} if isinstance(rows, list) else {"id": ids[0]} if do in ("insert", "upsert") else {"ok": True}
        )

    def outcome(self, row: Mapping[str, Any]) -> Any:
        """What the box is told."""
        if row["status"] == "done":
            return row["result"]
        if row["status"] == "failed":
            raise raised(row["result"]["error"]) or LayerError("it failed")
        who = None if row["answered_by"] is None else self.layer.name_of(row["answered_by"])
        said = {"refused": f"{who} has refused to", "expired": "nobody has answered in time to"}.get(
            row["status"], "nobody is asked any more to"
        )
        why = f": {row['answer']}" if row["answer"] else ""
        raise Denied(
            f"{said} {row['action']} {row['resource']}{why}", hint="the same request gets the same answer",
            action=row["action"], resource=row["resource"],
        )  # fmt: skip

    def told(self) -> list[dict[str, Any]]:
        """Them as rows, as the box may see them."""
        shown = ("id", "action", "resource", "status", "reason", "answer", "asked", "answered", "expires")
        rows = sorted(of(self.layer, self.execution.id or 0), key=lambda row: row["id"])
        return [{name: row[name] for name in shown} for row in rows]


_CHANGES: dict[str, Callable[[Tx, Mapping[str, Any]], list[int]]] = {
    "insert": lambda tx, given: [tx.insert(given["entity"], row) for row in (given["values"] if isinstance(given["values"], list) else [given["values"]])],
    "update": lambda tx, given: [tx.update(given["entity"], given["id"], given["values"], given.get("expect")) and given["id"]],
    "delete": lambda tx, given: [tx.delete(given["entity"], given["id"], given.get("expect")) and given["id"]],
    "upsert": lambda tx, given: [tx.upsert(given["entity"], given["values"], given["on"])],
}  # fmt: skip


# Answers


@verb("approval.answer", brief=False)
def answer(call: Call, *, id: int, approve: bool, reason: str | None = None) -> Any:
    """Say yes or no to what a box asks, or to a merge; needs `approve` on its contract. Gives what becomes of it."""
    layer = call.layer
    row = get(layer, id)
    _may_answer(call, row)
    if row["status"] != "pending":
        raise Conflict(f"approval {id} is {row['status']} already", hint="layer approvals --all")
    if row["expires"] is not None and row["expires"] <= datetime.now(UTC):
        layer.ledger.write(call.execution, "main", lambda tx: _move(tx, id, "pending", "expired", answered=now()))
        raise Conflict(f"approval {id} has expired", hint="whoever asked must ask anew")
    if row["action"] != "merge" and _over(layer, row["execution"]):  # whoever looked after it ended before it said so
        layer.ledger.write(call.execution, "main", lambda tx: _move(tx, id, "pending", "withdrawn"))
        raise Conflict(f"approval {id} is withdrawn: the box that asked has ended", hint="layer approvals --all")
    values: dict[str, Any] = {"answered_by": call.asking.principal, "answered": now(), "answer": reason or call.reason}
    if not approve:
        layer.ledger.write(call.execution, "main", lambda tx: _move(tx, id, "pending", "refused", **values))
        return _told(layer, row, "refused")
    if row["action"] != "merge":
        layer.ledger.write(call.execution, "main", lambda tx: _move(tx, id, "pending", "approved", **values))
        return _told(layer, row, "approved")
    result = _merged(call, row)

    def both(tx: Tx) -> None:
        _move(tx, id, "pending", "approved", **values)
        _move(tx, id, "approved", "done", result=result)

    layer.ledger.write(call.execution, "main", both)
    return {"approval": id, "status": "done", **result}


def _over(layer: Any, execution: int) -> bool:
    with layer.engine.reading() as session:
        sql = f"select 1 from {layer.engine.schema_prefix}ledger_outcome where execution = ?"
        return session.one(sql, (execution,)) is not None


def _told(layer: Any, row: Mapping[str, Any], status: str) -> dict[str, Any]:
    """What becomes of it: somebody must hear of the answer, if the box that waits is here."""
    from . import tending

    if row["action"] != "merge" and any(number == row["execution"] for number, _, _ in tending.open_boxes(layer)):
        tending.ensure(layer)
    return {"approval": row["id"], "status": status}


def _may_answer(call: Call, row: Mapping[str, Any]) -> None:
    """Denied when this principal may not answer, for each contract that asks; NotFound where it may not even know."""
    rule = row["rule"] or {}
    for each in (rule, *rule.get("also", ())):
        _may_answer_for(call, row, f"contract:{each.get('of') or row['contract'] or '*'}", each.get("by"))


def _may_answer_for(call: Call, row: Mapping[str, Any], resource: str, by: list[str] | None) -> None:
    layer, who = call.layer, call.asking.principal
    with layer.engine.reading() as session:
        policy = layer.catalog.policy(session, who, clock(layer.engine, session)[1])
        allowed, grants = policy.outright("approve", resource, "main" if row["action"] == "merge" else row["branch"])
        names = _names(layer, session, who) if by else set()
    if allowed and (not by or names & set(by)):
        return
    error = (
        policy.refusal("approve", resource, grants, named=True)
        if not allowed
        else Denied(
            f"{policy.me['name']} may not answer approval {row['id']}: {', '.join(by or ())} may",
            action="approve",
            resource=resource,
            rows=[grant.id for grant in grants],
        )
    )
    layer.ledger.denied(call.execution, error)
    if "approval" in layer.schema().by_name:
        raise error
    raise NotFound(f"there is no approval {row['id']}", hint="layer approvals lists them")


def _names(layer: Any, session: Session, principal: int) -> set[str]:
    """The names of a principal and of all roles it holds."""
    found = usage.held_by(layer, session, principal)
    people = layer.catalog.rows(session, SYSTEM.by_name["principal"], MAIN_CHAIN)
    return {row["name"] for row in people if row["id"] in found}


def _merged(call: Call, row: Mapping[str, Any]) -> dict[str, Any]:
    """Merge what was proposed, as whoever answers; Conflict when it is not what was shown any more, or meets conflicts."""
    from .agents import merge_approved

    return merge_approved(call, row)
