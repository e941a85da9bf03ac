"""Why: what led to a fact, back to a person, a schedule, an import or the beginning, with the permissions as they were; and what came of it.

Every lookup goes by a key or an index, so an answer costs what its chain costs, however much the layer has done. What
the asking principal may not read is not there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from ..errors import Invalid, NotFound
from ..substrate.catalog import Branch, no_branch
from ..substrate.engine import LEDGER, Session
from ..substrate.past import Past, Version, definer
from ..substrate.permissions import Policy, load_policy
from ..substrate.predicates import Env, same
from ..substrate.reads import clock
from ..substrate.schema import MAIN, SYSTEM, Entity, Field, Schema
from ..substrate.values import decode
from ..substrate.views import Chain, Level
from .tree import Node, note

DEPTH = 32  # executions one behind the other
NODES = 1000  # parts of one answer
WALKED = 2000, 200_000  # versions looked at: for all fields of a row, for one field
ROWS = 5  # changed rows told of a tx that is a cause
EFFECTS = 50  # executions, txs or rows told at each turn, forward
SUBJECT = re.compile(r"([a-z][a-z0-9_]*)/([0-9]{1,18})(?:\.([a-z][a-z0-9_]*))?")
FIRED = re.compile(r"trigger/[0-9]+/[0-9]+/([a-z0-9_]+)/([0-9]{1,18})")  # the key of an execution that a change fired
TELLING = ("contract", "prompt", "model", "message", "approval")  # steps that are causes themselves
SEALED = {"principal": ("token",), "secret": ("sealed",)}  # not for trees
GOVERNED, SHAPING = ("principal", "membership", "permission"), ("entity", "field")
OPS = {"i": "insert", "u": "update", "d": "delete"}
PEOPLE = {"human": "person", "pending": "person"}
_PERMISSION, _TRIGGER, _FUNCTION, _CONTRACT = (
    SYSTEM.by_name[n] for n in ("permission", "trigger", "function", "contract")
)
_CONFLICT, _BRANCH = SYSTEM.by_name["conflict"], SYSTEM.by_name["branch"]
_CALL = [(name, kind) for name, kind in LEDGER["ledger_call"][0] if name not in ("execution", "tx")]
_MAIN = Branch(MAIN, "main", None, 0, 0, 0, None, "open")
_KINDS = {f.name: f.type for f in SYSTEM.by_name["execution"].fields}


def why(
    layer: Any,
    subject: str | int,
    *,
    principal: int | None = None,
    branch: str = "main",
    as_of: int | datetime | None = None,
    depth: int = DEPTH,
) -> Node:
    """What led to `ticket/7`, `ticket/7.status`, `tx/41`, or an execution by its number; NotFound when it may not be read."""
    with layer.engine.reading() as session:
        ask = Ask(layer, session, layer.my_id if principal is None else principal, branch, as_of)
        return ask.back(*parse(subject), depth)


def impact(
    layer: Any,
    subject: str | int,
    *,
    principal: int | None = None,
    branch: str = "main",
    as_of: int | datetime | None = None,
    depth: int = DEPTH,
) -> Node:
    """What came of `ticket/7`, `ticket/7.status`, `tx/41` or an execution: what it started, what that changed, what merges carried on."""
    with layer.engine.reading() as session:
        ask = Ask(layer, session, layer.my_id if principal is None else principal, branch, as_of)
        return ask.forward(*parse(subject), depth)


def parse(subject: str | int) -> tuple[str, int, str | None]:
    """The entity, id and field a subject names."""
    if type(subject) is int or (isinstance(subject, str) and subject.isascii() and subject.isdigit()):
        subject = f"execution/{subject}"
    found = SUBJECT.fullmatch(subject) if isinstance(subject, str) else None
    if found is None:
        raise Invalid(f"{subject!r} is nothing to ask why of", hint="ticket/7, ticket/7.status, tx/41, execution/2031")
    return found[1], int(found[2]), found[3]


@dataclass(frozen=True)
class _Change:
    """One row as a tx left it, and as it was before."""

    entity: Entity
    number: int
    version: Version
    before: Version | None
    fields: tuple[Field, ...]
    op: str | None
    note: str | None = None  # why nothing older is told


class Ask:
    """One question, in one snapshot, by one principal."""

    def __init__(self, layer: Any, session: Session, principal: int, branch: str, as_of: Any) -> None:
        self.engine, self.catalog, self.session = layer.engine, layer.catalog, session
        self.at = self.engine.schema_prefix
        last, self.epoch = clock(self.engine, session)
        self.moment = None if as_of is None else self.catalog.moment(session, as_of, last)
        self.policy: Policy = self.catalog.policy(session, principal, self.epoch)
        self.branch = _MAIN if branch == "main" else self.catalog.branch(session, branch)
        if not self._sees(branch):
            raise no_branch(branch)
        self.chain: Chain = self.catalog.chain(session, self.branch, self.moment)
        self.schema: Schema = self.catalog.schema(session, self.chain, self.epoch)
        self.past = Past(self.catalog, session, self.epoch)
        self._told: set[tuple[str, int]] = set()
        self._people: dict[int, tuple[str, str]] = {}
        self._room = NODES

    # What may be read

    def _sees(self, branch: str) -> bool:
        return branch == "main" or any(
            g.effect == "allow" and g.action in ("read", "*") and g.branch in (None, branch) for g in self.policy.grants
        )

    def _follow(self, name: str, number: int) -> Mapping[str, Any] | None:
        entity = self.schema.get(name)
        table = self.past.table(entity)
        row = table.get(self.session, self.chain, number)
        return None if row is None else table.named(entity, row.values, number)

    def shown(self, entity: Entity, row: Mapping[str, Any], branch: str | None = None) -> dict[str, Any] | None:
        """Of a row in stored form the fields this principal may read; None when it may not read the row."""
        rules = self.policy.rules("read", self.schema, entity, branch or self.branch.name)
        if rules.everything:
            return dict(row)
        if not rules.allows or rules.refusal(frozenset(), row, self._follow) is not None:
            return None
        return {k: v for k, v in row.items() if k == "id" or not rules.refusal(frozenset({k}), row, self._follow)}

    def readable(
        self, entity: Entity, number: int, version: Version | None, branch: str | None = None
    ) -> dict[str, Any] | None:
        """A version's values by field name, decoded, as far as this principal may read them."""
        if version is None or version.values is None:
            return None
        named = self.past.table(entity).named(entity, version.values, number)
        name = branch or self.branch.name
        here = self.branch if name == self.branch.name else self.catalog.branch(self.session, name)
        slices = self.catalog.slices(self.session, here) if here.parent is not None else []
        if slices:
            within = self.catalog.slice_predicates(slices, self.schema, entity)
            if within is None or any(p.test(Env(named, {}, self._follow)) is not True for p in within):
                return None
        found = self.shown(entity, named, name)
        if found is None:
            return None
        kept = {f.name: decode(f.type, found[f.name]) for f in entity.fields if f.name in found}
        return kept | {n: "…" for n in SEALED.get(entity.name, ()) if kept.get(n) is not None}

    # Rows of the ledger

    def _named(self, name: str, key: str) -> str:
        entity = SYSTEM.by_name[name]
        return f"(select n.{entity.by_name['name'].store} from {self.at}{entity.store} n where n.id = {key})"

    def transaction(self, number: int) -> dict[str, Any] | None:
        """A tx as its view has it, and the ids behind the names."""
        row = self.session.one(
            f"select t.branch, {self._named('branch', 't.branch')}, {self.engine.portable('t.at', 'datetime')}, t.principal,"
            f" {self._named('principal', 't.principal')}, t.execution, t.cause, t.reason, t.merged_from,"
            f" {self._named('branch', 't.merged_from')} from {self.at}ledger_tx t where t.tx = ?",
            (number,),
        )
        if row is None:
            return None
        branch, branch_name, at, principal, name, execution, cause, reason, merged, merged_name = row
        return {
            "tx": number, "branch": branch_name, "at": at, "principal": name, "execution": execution, "cause": cause, "reason": reason,
            "merged_from": merged_name, "hash": None, "_branch": branch, "_principal": principal, "_merged": merged,
        }  # fmt: skip

    def recorded(self, number: int) -> dict[str, Any] | None:
        """An execution as its view has it, and the ids behind the names."""
        shown = [self.engine.portable(f"c.{name}", kind) for name, kind in _CALL]
        person = SYSTEM.by_name["principal"]
        row = self.session.one(
            f"select x.principal, p.{person.by_name['name'].store}, p.{person.by_name['kind'].store}, x.parent, x.box, x.kind,"
            f" {self.engine.portable('x.scope', 'json')}, x.reason, x.trace, {self.engine.portable('x.started', 'datetime')},"
            f" o.status, {self.engine.portable('o.finished', 'datetime')}, {self.engine.portable('o.result', 'json')}, b.tier, b.blueprint,"
            f" {self._named('branch', 'c.branch')}, (select max(s.n) from {self.at}ledger_step s where s.execution = x.id), {', '.join(shown)}"
            f" from {self.at}ledger_execution x left join {self.at}ledger_outcome o on o.execution = x.id"
            f" left join {self.at}ledger_call c on c.execution = x.id left join {self.at}ledger_box b on b.id = x.box"
            f" left join {self.at}{person.store} p on p.id = x.principal where x.id = ?",
            (number,),
        )
        if row is None:
            return None
        (
            principal,
            name,
            kind,
            parent,
            box,
            how,
            scope,
            reason,
            trace,
            started,
            status,
            finished,
            result,
            tier,
            blueprint,
            branch,
            steps,
        ) = row[:17]
        call = dict(zip([name for name, _ in _CALL], row[17:], strict=True))
        self._people[principal] = (name, kind)
        due = call["due"] is not None
        chain = (Level(MAIN, call["state"]),)
        if call["branch"] not in (None, MAIN):
            chain = self.catalog.chain(self.session, call["branch"], call["state"])
        rows = {}
        for label, entity in (("function", _FUNCTION), ("contract", _CONTRACT), ("trigger", _TRIGGER)):
            if call[label] is not None:
                rows[label] = self._row_then(entity, call[label], chain)
        return {
            **call, "id": number, "principal": name, "parent": parent, "box": box, "kind": how, "scope": scope, "reason": reason, "trace": trace,
            "started": started, "status": status or ("queued" if due and steps is None else "running"), "finished": finished, "result": result,
            "branch": branch, **{label: (rows.get(label) or {}).get("name") for label in ("function", "contract", "trigger")},
            "_principal": principal, "_kind": kind, "_tier": tier, "_blueprint": blueprint, "_steps": steps, "_call": call, "_rows": rows,
        }  # fmt: skip

    def _row_then(self, entity: Entity, number: int, chain: Chain) -> dict[str, Any] | None:
        """A row of the system's as a chain saw it, in stored form, with its version in `_tx`."""
        found = self.past.version(entity, number, chain)
        if (found is None or found.values is None) and len(chain) > 1:
            found = self.past.version(entity, number, (Level(MAIN, chain[0].cut),))
        if found is None or found.values is None:
            return None
        return {**self.past.table(entity).named(entity, found.values, number), "_tx": found.tx}

    def _person(self, number: int | None) -> str | None:
        if number is None:
            return None
        if number not in self._people:
            entity = SYSTEM.by_name["principal"]
            row = self.session.one(
                f"select {entity.by_name['name'].store}, {entity.by_name['kind'].store} from {self.at}{entity.store} where id = ?",
                (number,),
            )
            self._people[number] = ("", "") if row is None else (row[0], row[1])
        return self._people[number][0] or None

    # Back

    def back(self, name: str, number: int, label: str | None, depth: int) -> Node:
        missing = NotFound(f"there is no {name}/{number}{'' if label is None else f'.{label}'}")
        if name == "execution" and label is None:
            found = self.execution(number, depth)
            if found is None:
                raise missing
            return found
        if name == "tx" and label is None:
            if self._visible_tx(number) is None:
                raise missing
            return self.tx(number, depth, changes=True)
        entity = self._entity(name, missing)
        now, values = self._now(entity, number, missing)
        if now.values is None:
            return Node("row", self._about(entity, number, deleted=True), self._facts(entity, number, values, depth, 1))
        if label is None:
            nodes = self._facts(entity, number, values, depth, WALKED[0])
            return Node("row", self._about(entity, number), nodes)
        if label not in values:
            raise missing
        return self._facts(entity, number, {label: values[label]}, depth, WALKED[1])[0]

    def _about(self, entity: Entity, number: int, **more: Any) -> dict[str, Any]:
        return {"entity": entity.name, "id": number, "branch": self.branch.name, **more}

    def _entity(self, name: str, missing: NotFound) -> Entity:
        entity = self.schema.by_name.get(name)
        if entity is None:
            raise missing
        if entity.kind == "ledger":
            raise Invalid(f"{name!r} is recorded, not caused", hint="ask of an entity's row, tx/N or execution/N")
        return entity

    def _now(self, entity: Entity, number: int, missing: NotFound) -> tuple[Version, dict[str, Any]]:
        """The row as it is, or its deletion, and what may be read of it (of a deleted one: as it was last)."""
        versions = self.past.versions(entity, number, self.chain)
        now = next(versions, None)
        last = now if now is None or now.values is not None else next(versions, None)
        values = self.readable(entity, number, last)
        if now is None or values is None:
            raise missing
        return now, values

    def _facts(self, entity: Entity, number: int, values: Mapping[str, Any], depth: int, most: int) -> tuple[Node, ...]:
        """The fields a row has, by the tx that set them; the latest first."""
        fields = [entity.by_name[name] for name in values]
        found = self._changes(entity, number, self.chain, fields, most)
        return tuple(self._fact(change, values, depth) for change in found)

    def _changes(self, entity: Entity, number: int, chain: Chain, fields: Sequence[Field], most: int) -> list[_Change]:
        """Which txs gave a row the values it has in these fields, the latest first."""
        table, found = self.past.table(entity), []
        versions = self.past.versions(entity, number, chain)
        now = next(versions, None)
        if now is None:
            return []
        values = now.values
        if values is None:
            return [_Change(entity, number, now, next(versions, None), (), "d")]
        left = list(fields)
        for count, before in enumerate(versions, start=1):
            if before.values is None:
                break
            changed = [f for f in left if not same(table.value(f, values), table.value(f, before.values))]
            if changed:
                found.append(_Change(entity, number, now, before, tuple(changed), "u"))
                left = [f for f in left if f not in changed]
            if not left:
                return found
            now, values = before, before.values
            if count >= most:
                cut = f"no change of it in {most:,} versions; older ones are not looked at"
                return [*found, _Change(entity, number, now, None, tuple(left), None, cut)]
        op = self.past.op(entity, number, now)
        pruned = None if op != "u" else "older versions were pruned: it may be older than this"
        return [*found, _Change(entity, number, now, None, tuple(left), op, pruned)]

    def _fact(self, change: _Change, values: Mapping[str, Any], depth: int, branch: str | None = None) -> Node:
        """A fact and the tx that made it; `values` are those this principal may read."""
        row = self.transaction(change.version.tx)
        where = branch or (row or {}).get("branch")
        data = {
            "entity": change.entity.name, "id": change.number, "branch": where, "op": OPS.get(change.op or "", None),
            "fields": {f.name: values[f.name] for f in change.fields if f.name in values}, "tx": change.version.tx,
            "since": None if row is None else decode("datetime", row["at"]),
        }  # fmt: skip
        made = self.tx(change.version.tx, depth, (change,), row)
        return Node("fact", data, (made, note(change.note)) if change.note else (made,))

    def _visible_tx(self, number: int, row: dict[str, Any] | None = None) -> dict[str, Any] | None:
        row = row or self.transaction(number)
        if row is None:
            return None
        return self.shown(SYSTEM.by_name["tx"], {k: v for k, v in row.items() if k[0] != "_"})

    def tx(
        self, number: int, depth: int, about: Sequence[_Change] = (), row: dict[str, Any] | None = None, changes: bool = False,
        only: tuple[Entity | None, Any] = (None, None),
    ) -> Node:  # fmt: skip
        """A tx and what led to it: its execution, what a merge carried, the file that was imported."""
        row = row or self.transaction(number)
        seen = None if row is None else self._visible_tx(number, row)
        if row is None or seen is None:
            known = {"tx": number} if row is None else {"tx": number, "at": decode("datetime", row["at"])}
            return Node("tx", known, (note("the rest may not be read"),))
        data = {k: v for k, v in seen.items() if k != "hash"} | {"at": decode("datetime", seen.get("at"))}
        if changes:
            listed, more = self._written(row, ROWS, *only)
            about = about or listed
            data |= {"changes": [told for c in listed if (told := self._told_of(c, row["branch"]))], "more": more}
        key = ("tx", number)
        if key in self._told:
            return Node("tx", {**data, "above": True})
        self._told.add(key)
        links: list[Node] = []
        if seen.get("execution") is not None and (ran := self.recorded(row["execution"])) is not None:
            links += self._covered(ran, row, about)
            links.append(self.execution(row["execution"], depth, ran) or note("its execution may not be read"))
        if row["_merged"] is not None:
            for change in about:
                links += self._carried(change, row, depth)
        if str(row["cause"] or "").startswith("import "):
            links.append(Node("origin", {"origin": "import", "name": str(row["cause"]).removeprefix("import ")}))
        return Node("tx", data, tuple(links))

    def _told_of(self, change: _Change, branch: str) -> dict[str, Any] | None:
        """A changed row for people: what was set, as far as it may be read."""
        last = change.before if change.version.values is None else change.version
        values = self.readable(change.entity, change.number, last, branch) if self._sees(branch) else None
        if values is None:
            return None
        fields = {f.name: values[f.name] for f in change.fields if f.name in values}
        return {
            "entity": change.entity.name,
            "id": change.number,
            "op": OPS.get(change.op or "", None),
            "fields": {name: value for name, value in fields.items() if value is not None or change.op != "i"},
        }

    def _written(
        self, row: Mapping[str, Any], most: int, entity: Entity | None = None, number: Any = None
    ) -> tuple[list[_Change], bool]:
        """Rows a tx wrote (of one entity; one row), with what they were before, and whether there are more."""
        rows = self._listed(row["_branch"], row["tx"], most, entity, number)
        chain = self.catalog.chain(self.session, row["_branch"], row["tx"])
        found = []
        for kind, row_id, op in rows[:most]:
            known = self.schema.by_id.get(kind)
            if known is not None:
                found.append(self._change(known, row_id, op, chain))
        return found, len(rows) > most

    def _listed(
        self, branch: int, tx: int, most: int, entity: Entity | None, number: int | None
    ) -> list[tuple[Any, ...]]:
        where, params = "", [branch, tx]
        if entity is not None:
            where, params = " and entity = ?", [*params, entity.id]
            if number is not None:
                where, params = where + " and id = ?", [*params, number]
        return self.session.all(
            f"select entity, id, op from {self.at}ledger_change where branch = ? and tx = ?{where} order by entity, id limit {most + 1}",
            params,
        )

    def _change(self, entity: Entity, number: int, op: str, chain: Chain) -> _Change:
        versions = self.past.versions(entity, number, chain)
        now = next(versions, None) or Version(chain[0].branch, int(chain[0].cut or 0), None)
        before = None if op == "i" else next(versions, None)
        table, fields = self.past.table(entity), list(entity.fields)
        if now.values is None:
            fields = []
        elif before is not None and before.values is not None:
            old, new = before.values, now.values
            fields = [f for f in fields if not same(table.value(f, old), table.value(f, new))]
        return _Change(entity, number, now, before, tuple(fields), op)

    def _carried(self, change: _Change, row: Mapping[str, Any], depth: int) -> list[Node]:
        """What a merge brought over: the branch's own txs that made it, and who decided where both sides had."""
        found = [self._resolution(change, row, depth)]
        branch = self.catalog.branch_by_id(self.session, row["_merged"])
        if not self._sees(branch.name):
            return [node for node in found if node is not None]
        chain = self.catalog.chain(self.session, branch, row["tx"] - 1)
        fields = change.fields if change.version.values is not None else change.entity.fields
        for made in self._changes(change.entity, change.number, chain, fields, WALKED[0]):
            last = made.before if made.version.values is None else made.version
            values = self.readable(change.entity, change.number, last, branch.name)
            if made.version.branch == branch.id and values is not None:
                found.append(self._fact(made, values, depth, branch.name))
        return [node for node in found if node is not None]

    def _resolution(self, change: _Change, row: Mapping[str, Any], depth: int) -> Node | None:
        """The conflict over this row that was resolved before the merge, and the tx that did it."""
        closed = self.session.all(
            f"select id, tx from {self.at}ledger_change where branch = ? and tx in (?, ?) and entity = ? order by id limit 1000",
            (MAIN, row["tx"], row["tx"] + 1, _CONFLICT.id),
        )
        names = {f.name for f in change.fields} | {None}
        for number, tx in closed:
            for version in self.past.versions(_CONFLICT, number, (Level(MAIN, tx),)):
                if version.values is None:
                    break
                stored = self.past.table(_CONFLICT).named(_CONFLICT, version.values, number)
                mine = stored["entity"] == change.entity.name and stored["row_id"] == change.number
                if not mine or stored["field"] not in names:
                    break
                if stored["status"] == "resolved":
                    shown = self.shown(_CONFLICT, stored)
                    if shown is None:
                        return None
                    data = {f.name: decode(f.type, shown[f.name]) for f in _CONFLICT.fields if f.name in shown}
                    return Node("conflict", {**data, "id": number}, (self.tx(version.tx, depth),))
        return None

    # Executions

    def execution(self, number: int, depth: int, row: dict[str, Any] | None = None) -> Node | None:
        """An execution, the permissions that allowed it and what led to it; None when it may not be read."""
        row = row or self.recorded(number)
        seen = self.visible_execution(row)
        if row is None or seen is None:
            return None
        key = ("execution", number)
        if key in self._told:
            return Node("execution", {**self.described(row, seen, brief=True), "above": True})
        self._told.add(key)
        data = self.described(row, seen)
        if depth <= 0:
            return Node("execution", data, (note(f"deeper: layer why --execution {number}"),))
        links = [*self._called(row, seen), *self._steps(number, row, data)]
        causes = self._causes(row, seen, depth - 1)
        return Node("execution", data, (*links, *causes))

    def visible_execution(self, row: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if row is None:
            return None
        return self.shown(SYSTEM.by_name["execution"], {k: v for k, v in row.items() if k[0] != "_"})

    def described(self, row: Mapping[str, Any], seen: Mapping[str, Any], brief: bool = False) -> dict[str, Any]:
        if brief:
            return {k: seen.get(k) for k in ("id", "kind", "verb", "function", "principal", "status")}
        data = {
            k: decode(_KINDS[k], v)
            for k, v in seen.items()
            if k in _KINDS and k not in ("scope", "seed", "permissions")
        }
        if self.policy.rules("read", self.schema, SYSTEM.by_name["box"], self.branch.name).allows and row["_tier"]:
            data["tier"], data["blueprint"] = row["_tier"], row["_blueprint"]
        if self.policy.rules("read", self.schema, SYSTEM.by_name["step"], self.branch.name).allows:
            data["steps"] = row["_steps"] or 0
        function = row["_rows"].get("function")
        if function is not None and (
            known := self.shown(_FUNCTION, {k: v for k, v in function.items() if k[0] != "_"})
        ):
            data["language"] = known.get("language")
            if known.get("rights") == "definer":
                data["authority"] = self._person(self._authority(row))
        return data

    def _authority(self, row: Mapping[str, Any]) -> int:
        """Whose permissions decided: the principal's own, or with definer's rights those of whoever wrote the function."""
        function = row["_rows"].get("function")
        if function is not None and function.get("rights") == "definer":
            return definer(self.catalog, self.session, self.epoch, _FUNCTION, function) or int(row["_principal"])
        return int(row["_principal"])

    def _steps(self, number: int, row: Mapping[str, Any], data: dict[str, Any]) -> Iterator[Node]:
        """The steps that are causes themselves; the box it ran in goes to its data."""
        if not row["_steps"]:
            return
        entity = SYSTEM.by_name["step"]
        for n, kind, stored, when in self._telling(number):
            seen = self.shown(entity, {"execution": number, "n": n, "kind": kind, "detail": stored, "at": when})
            if seen is None or "detail" not in seen:
                continue
            told = json.loads(stored or "null")
            if kind == "query":
                if isinstance(told, dict) and isinstance(told.get("remote"), dict):
                    yield Node("step", {"n": n, "step": kind, "detail": told["remote"], "at": decode("datetime", when)})
            elif kind == "box":
                data.setdefault("ran_in", {name: told.get(name) for name in ("id", "tier", "reused", "snapshot")})
            else:
                yield Node("step", {"n": n, "step": kind, "detail": told, "at": decode("datetime", when)})

    def _telling(self, number: int) -> list[tuple[Any, ...]]:
        detail, at = self.engine.portable("s.detail", "json"), self.engine.portable("s.at", "datetime")
        kinds = ", ".join(f"'{kind}'" for kind in ("box", *TELLING))
        return self.session.all(
            f"select s.n, s.kind, {detail}, {at} from {self.at}ledger_step s where s.execution = ? and s.n <= 1000"
            f" and (s.kind in ({kinds}) or (s.kind = 'query' and {detail} like ?)) order by s.n limit 8",
            (number, '%"remote":%'),  # what it read of another layer: this one has no tx that says so
        )

    def _causes(self, row: Mapping[str, Any], seen: Mapping[str, Any], depth: int) -> list[Node]:
        """The trigger and the change that fired it, the execution it was part of; else whoever began it."""
        call, links = row["_call"], []
        if seen.get("trigger") is not None or (call["trigger"] is not None and "trigger" in seen):
            links.append(self._trigger(row, depth))
        elif call["cause_tx"] is not None and "cause_tx" in seen:
            links.append(self.tx(call["cause_tx"], depth, changes=True))
        if row["parent"] is not None and "parent" in seen:
            links.append(self.execution(row["parent"], depth) or note("the execution it was part of may not be read"))
        if links or call["trigger"] is not None or call["cause_tx"] is not None or row["parent"] is not None:
            return links
        if row["kind"] == "genesis":
            return [Node("origin", {"origin": "genesis", "name": None})]
        if "principal" not in seen:
            return []
        kind = row["_kind"] or ""
        return [Node("origin", {"origin": PEOPLE.get(kind, kind), "name": row["principal"]})]

    def _trigger(self, row: Mapping[str, Any], depth: int) -> Node:
        call, stored = row["_call"], row["_rows"].get("trigger")
        seen = None if stored is None else self.shown(_TRIGGER, {k: v for k, v in stored.items() if k[0] != "_"})
        if seen is None or stored is None:
            data: dict[str, Any] = {"id": call["trigger"], "name": row["trigger"]}
        else:
            data = {f.name: decode(f.type, seen[f.name]) for f in _TRIGGER.fields if f.name in seen}
            data |= {"id": call["trigger"], "version": stored["_tx"]}
        links: list[Node] = []
        if call["cause_tx"] is not None:
            entity = self.schema.by_name.get(str((stored or {}).get("on_entity")))
            links.append(self.tx(call["cause_tx"], depth, changes=True, only=(entity, _row_of(call["key"]))))
        elif (stored or {}).get("schedule"):
            due = decode("datetime", call["due"])
            links.append(Node("origin", {"origin": "schedule", "name": (stored or {})["schedule"], "due": due}))
        return Node("trigger", data, tuple(links))

    # Permissions, as they were

    def _called(self, row: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Node]:
        """The permissions to call, as they were when it was called."""
        if row["_call"]["permissions"] and "permissions" in seen:
            for number in json.loads(row["_call"]["permissions"]):
                yield from self._permission(number, row["_call"]["state"], "call")

    def _covered(self, row: Mapping[str, Any], tx: Mapping[str, Any], wrote: Sequence[_Change]) -> Iterator[Node]:
        """The permissions to write what a tx wrote, as they were before it."""
        if tx["tx"] > 1 and self.visible_execution(row) is not None:
            for number in self._covering(self._authority(row), tx, wrote):
                yield from self._permission(number, tx["tx"] - 1, "write")

    def _permission(self, number: int, moment: int | None, use: str) -> Iterator[Node]:
        stored = self._row_then(_PERMISSION, number, (Level(MAIN, moment),))
        seen = None if stored is None else self.shown(_PERMISSION, {k: v for k, v in stored.items() if k[0] != "_"})
        if seen is not None:
            data = {f.name: decode(f.type, seen[f.name]) for f in _PERMISSION.fields if f.name in seen}
            data |= {name: self._person(data[name]) for name in ("subject", "granted_by") if name in data}
            yield Node("permission", {"id": number, "for": use, "as_of": moment, **data})

    def _covering(self, principal: int, tx: Mapping[str, Any], wrote: Sequence[_Change]) -> list[int]:
        """The permissions, as they were before a tx, that allowed what it wrote."""
        if not wrote:
            return []
        found = dict[int, None]()
        governed, reshaped = self._governed(tx)
        policy = self._policy_then(principal, governed, tx)
        chain = self.catalog.chain(self.session, tx["_branch"], tx["tx"] if reshaped else None)
        schema: Schema = self.catalog.schema(self.session, chain, self.epoch)
        for change in wrote:
            entity = schema.by_id.get(change.entity.id)
            if entity is None:
                continue
            if entity.name in ("entity", "field"):
                found |= dict.fromkeys(g.id for g in policy.decide("define", "*")[1])
                continue
            table, names = self.past.table(entity), frozenset(f.name for f in change.fields)
            states = [
                table.named(entity, version.values, change.number)
                for version in (change.before if change.op != "i" else None, change.version)
                if version is not None and version.values is not None
            ]
            for grant, where in policy.rules(OPS.get(change.op or "u", "update"), schema, entity, tx["branch"]).allows:
                if grant.fields is not None and names and not grant.fields & names:
                    continue
                if all(p.test(Env(state, me, self._follow)) is True for p, me in where for state in states):
                    found[grant.id] = None
        return list(found)

    def _governed(self, tx: Mapping[str, Any]) -> tuple[int, bool]:
        """The tx that last changed a permission or role before this one, and whether the schema has changed since."""
        of = f"from {self.at}ledger_change where branch = ? and entity = {{}} and entity < 2000 and tx"
        last = [f"(select max(tx) {of.format(SYSTEM.by_name[name].id)} < ?)" for name in GOVERNED]
        since = [f"exists (select 1 {of.format(SYSTEM.by_name[name].id)} >= ?)" for name in SHAPING]
        params = [
            *(MAIN, tx["tx"]) * len(last),
            *(MAIN, tx["tx"]) * len(since),
            *(tx["_branch"], tx["tx"]) * len(since),
        ]
        row = self.session.one(f"select {', '.join(last)}, {' or '.join(since + since)}", params) or ()
        return max((moment or 1 for moment in row[: len(last)]), default=1), bool(row[-1])

    def _policy_then(self, principal: int, governed: int, tx: Mapping[str, Any]) -> Policy:
        """The permissions of a principal as a tx met them; the past does not change, so they are kept."""
        key = ("policy then", principal, governed)
        found: Policy | None = self.catalog._kept.get(key)
        if found is None:
            when: datetime = decode("datetime", tx["at"])
            found = load_policy(self.catalog, self.session, principal, tx["tx"] - 1, when)
            if not found.timed:
                found = self.catalog._cached(key, lambda: found)
        assert found is not None
        return found

    # Forward

    def forward(self, name: str, number: int, label: str | None, depth: int) -> Node:
        missing = NotFound(f"there is no {name}/{number}{'' if label is None else f'.{label}'}")
        if name == "execution" and label is None:
            found = self.effects_of(number, depth)
            if found is None:
                raise missing
            return found
        if name == "tx" and label is None:
            row = self.transaction(number)
            if row is None or self._visible_tx(number, row) is None:
                raise missing
            return self._after(row, depth)
        entity = self._entity(name, missing)
        _, values = self._now(entity, number, missing)
        if label is not None:
            if label not in values:
                raise missing
            found_changes = self._changes(entity, number, self.chain, (entity.by_name[label],), WALKED[1])
            return self._fact_after(found_changes[0], values, depth)
        versions = list(islice(self.past.versions(entity, number, self.chain), EFFECTS + 1))
        nodes = [note(f"earlier changes are left out: these are the last {EFFECTS}")] if len(versions) > EFFECTS else []
        for version in reversed(versions[:EFFECTS]):
            row = self.transaction(version.tx)
            if ("tx", version.tx) in self._told or row is None or self._visible_tx(version.tx, row) is None:
                continue  # told already, as what came of an earlier one
            nodes.append(self._after(row, depth, (entity, number)))
        return Node("row", self._about(entity, number), tuple(nodes))

    def _fact_after(self, change: _Change, values: Mapping[str, Any], depth: int) -> Node:
        row = self.transaction(change.version.tx)
        data = {
            "entity": change.entity.name, "id": change.number, "branch": self.branch.name, "op": OPS.get(change.op or "", None),
            "fields": {f.name: values[f.name] for f in change.fields if f.name in values}, "tx": change.version.tx,
            "since": None if row is None else decode("datetime", row["at"]),
        }  # fmt: skip
        seen = row is not None and self._visible_tx(change.version.tx, row) is not None
        return Node("fact", data, (self._after(row, depth, (change.entity, change.number)),) if row and seen else ())

    def _after(self, row: Mapping[str, Any], depth: int, of: tuple[Entity, int] | None = None) -> Node:
        """A tx: the rows it changed, the executions that it caused, the merges that carried it on."""
        seen = self._visible_tx(row["tx"], dict(row)) or {}
        data = {k: v for k, v in seen.items() if k != "hash"} | {"at": decode("datetime", row["at"])}
        if ("tx", row["tx"]) in self._told:
            return Node("tx", {**data, "above": True})
        self._told.add(("tx", row["tx"]))
        listed, more = self._written(row, EFFECTS if of is None else 1, *(of or (None, None)))
        data |= {"changes": [t for c in listed if (t := self._told_of(c, row["branch"]))], "more": more and of is None}
        links: list[Node] = []
        if depth > 0:
            links += self._some(
                f"select execution, key from {self.at}ledger_call where cause_tx = ? order by execution",
                (row["tx"],),
                depth,
                "executions",
                None if of is None else of[1],
            )
            if row["_branch"] != MAIN:
                links += self._merged(row, depth, of)
        return Node("tx", data, tuple(links))

    def _merged(self, row: Mapping[str, Any], depth: int, of: tuple[Entity, int] | None) -> list[Node]:
        """The merge that carried a branch's tx to its parent: the first one after it."""
        branch = self.catalog.branch_by_id(self.session, row["_branch"])
        carried = None
        for version in self.past.versions(_BRANCH, branch.id, (Level(MAIN),)):
            if version.values is None:
                continue
            stored = self.past.table(_BRANCH).named(_BRANCH, version.values, branch.id)
            if int(stored["base_own"] or 0) <= row["tx"] or stored["base_own"] == stored["fork_tx"]:
                break
            carried = int(stored["base_parent"] or 0)
        merge = None if carried is None else self.transaction(carried)
        if merge is None or not self._sees(merge["branch"]) or self._visible_tx(merge["tx"], merge) is None:
            return []
        if of is not None and not self._written(merge, 1, *of)[0]:
            return []  # the parent had it already, or another value was taken
        return [self._after(merge, depth - 1, of)]

    def _some(self, sql: str, params: Sequence[Any], depth: int, what: str, of: int | None = None) -> list[Node]:
        """Executions by number and key, those that another row fired left out; says when there are more."""
        found = self.session.all(f"{sql} limit {EFFECTS + 1}", params)
        nodes = []
        for number, key in found[:EFFECTS]:
            if of is None or _row_of(key) in (None, of):
                nodes.append(self.effects_of(number, depth - 1))
        nodes += [note(f"only the first {EFFECTS} {what} are told")] if len(found) > EFFECTS else []
        return [node for node in nodes if node is not None]

    def effects_of(self, number: int, depth: int) -> Node | None:
        """An execution, what it wrote, what it started; None when it may not be read."""
        row = self.recorded(number)
        seen = self.visible_execution(row)
        if row is None or seen is None:
            return None
        self._room -= 1
        if ("execution", number) in self._told or self._room < 0:
            return Node("execution", {**self.described(row, seen, brief=True), "above": True})
        self._told.add(("execution", number))
        data = self.described(row, seen)
        if depth <= 0:
            return Node("execution", data, (note(f"further: layer why --execution {number} --impact"),))
        links: list[Node] = []
        txs = self.session.all(
            f"select tx from {self.at}ledger_tx where execution = ? order by tx limit {EFFECTS + 1}", (number,)
        )
        for (tx,) in txs[:EFFECTS]:
            known = self.transaction(tx)
            if known is not None and self._visible_tx(tx, known) is not None:
                node = self._after(known, depth - 1)
                if node.links or any(node.data.get(key) for key in ("changes", "more", "above")):
                    links.append(node)
        if len(txs) > EFFECTS:
            links.append(note(f"only its first {EFFECTS} txs are told"))
        children = f"select id, null from {self.at}ledger_execution where parent = ? order by id"
        return Node("execution", data, (*links, *self._some(children, (number,), depth, "executions it started")))


def _row_of(key: Any) -> int | None:
    """The row whose change fired a trigger, which the key of the execution tells."""
    found = FIRED.fullmatch(str(key))
    return int(found[2]) if found else None
