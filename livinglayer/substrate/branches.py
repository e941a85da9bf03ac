"""Branches: fork (one row), diff (what changed), three-way merge by field, conflicts as rows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..errors import Conflict, Denied, Invalid, LayerError, NotFound
from .catalog import Branch, Catalog
from .engine import Engine, Session
from .evolve import ensure_indexes, revalidate
from .ledger import MAIN_CHAIN, Execution, Ledger, Tx, Work
from .permissions import Policy
from .predicates import compile_predicate, same
from .schema import MAIN, SYSTEM, Entity, Field, Schema, check_name, dumps
from .tables import Row, Table
from .values import Stored, convert, decode
from .views import Chain

DEPTH = 64
SCHEMA_ENTITIES = ("entity", "field")
SECRET = SYSTEM.by_name["secret"].id


@dataclass(frozen=True)
class Merge:
    """What a merge did, or would do; truthy when it was applied."""

    applied: bool
    tx: int | None
    changes: list[dict[str, Any]]
    conflicts: list[dict[str, Any]]

    def __bool__(self) -> bool:
        return self.applied


def fork(
    ledger: Ledger,
    execution: Execution,
    name: str,
    source: str,
    slice: Mapping[str, str | None] | None,
    as_of: Any,
    reason: str | None,
) -> int:
    """A new branch that begins as `source` is (or was); costs one row."""
    with ledger.work() as work:
        return forked(work, execution, name, source, slice, as_of, reason)


def forked(
    work: Work,
    execution: Execution,
    name: str,
    source: str,
    slice: Mapping[str, str | None] | None,
    as_of: Any,
    reason: str | None,
) -> int:
    """`fork` within a transaction that is open already."""
    check_name(name, "a branch", frozenset())  # it never stands in SQL
    parent = work.catalog.branch(work.session, source, open_only=True)
    policy = work.catalog.policy(work.session, execution.principal, work.version)
    policy.require("fork", f"branch:{source}")
    at = work.clock.tx if as_of is None else work.catalog.moment(work.session, as_of, work.clock.tx)
    if len(work.catalog.chain(work.session, parent)) >= DEPTH:
        raise Invalid(f"branch {source!r} is {DEPTH} forks deep", hint="merge or fork from an ancestor")
    if slice is not None:
        chain = work.catalog.chain(work.session, parent, at)
        schema = work.catalog.schema(work.session, chain, work.version)
        _check_slice(schema, slice)
    tx = work.tx(execution, reason=reason or f"fork {name} from {source}")
    number = tx.record(
        SYSTEM.by_name["branch"],
        tx._encoded(
            SYSTEM.by_name["branch"],
            {
                "name": name,
                "parent": parent.id,
                "fork_tx": at,
                "base_own": at,
                "base_parent": at,
                "slice": slice,
                "status": "open",
            },
        ),
    )
    tx.finish()
    return number


def _check_slice(schema: Schema, slice: Mapping[str, str | None]) -> None:
    if not isinstance(slice, Mapping):
        raise Invalid("a slice is a dict: entity -> predicate, or None for all its rows")
    for name, text in slice.items():
        entity = schema.get(name)
        if text is not None:
            compile_predicate(text, schema, entity)


def discard(ledger: Ledger, execution: Execution, name: str, reason: str | None) -> None:
    """Close a branch and free its name; its history stays readable under its name and number. Whoever forked it may."""
    with ledger.work() as work:
        branch = work.catalog.branch(work.session, name, open_only=True)
        if branch.id == MAIN:
            raise Invalid("main can't be discarded")
        policy = work.catalog.policy(work.session, execution.principal, work.version)
        allowed, grants = policy.decide("fork", f"branch:{name}")
        if not allowed and (grants or not _made(work, branch, execution.principal)):  # grants of a refusal deny it
            raise policy.refusal("fork", f"branch:{name}", grants)
        _discarded(work, execution, branch, reason)


def _made(work: Work, branch: Branch, principal: int) -> bool:
    """Whether a principal has forked a branch."""
    at, entity = work.engine.schema_prefix, SYSTEM.by_name["branch"].id
    row = work.session.one(
        f"select min(tx) from {at}ledger_change where branch = {MAIN} and entity = {entity} and entity < 2000 and tx > ? and id = ?",
        (branch.fork_tx, branch.id),
    )
    found = work.session.one(f"select principal from {at}ledger_tx where tx = ?", (row[0],)) if row else None
    return found is not None and found[0] == principal


def withdraw(ledger: Ledger, execution: Execution, name: str) -> None:
    """Discard what whoever asks has forked this moment, because of an error: it needs no permission, and raises nothing in its place."""
    with contextlib.suppress(LayerError), ledger.work() as work:
        _discarded(work, execution, work.catalog.branch(work.session, name, open_only=True), None)


def _discarded(work: Work, execution: Execution, branch: Branch, reason: str | None) -> None:
    tx = work.tx(execution, reason=reason or f"discard {branch.name}")
    renamed = f"{branch.name}_{branch.id}"[-48:]
    tx.record(SYSTEM.by_name["branch"], {"status": "discarded", "name": renamed}, branch.id)
    work.changed_governing(tx.number)
    tx.finish()


# Diff


@dataclass
class _Side:
    """One state of the rows that differ: a chain and the schema it has."""

    chain: Chain
    schema: Schema


def _changed(work_or: Any, session: Session, branch: int, since: int) -> list[tuple[int, int]]:
    at = work_or.engine.schema_prefix
    rows = session.all(
        f"select distinct entity, id from {at}ledger_change where branch = ? and tx > ? order by entity, id",
        (branch, since),
    )
    return [(row[0], row[1]) for row in rows]


def head(engine: Engine, session: Session, branch: Branch) -> int | None:
    """The last tx that changed a branch since it was forked or merged."""
    row = session.one(
        f"select max(tx) from {engine.schema_prefix}ledger_change where branch = ? and tx > ?",
        (branch.id, branch.base_own),
    )
    return None if row is None or row[0] is None else int(row[0])


def diff(catalog: Catalog, session: Session, version: Any, branch: Branch, policy: Policy) -> list[dict[str, Any]]:
    """What a branch changed since its fork or last merge, by row and field."""
    before = _side(catalog, session, catalog.chain(session, branch, branch.base_own), version)
    after = _side(catalog, session, catalog.chain(session, branch), version)
    found = []
    for number, group in groupby(_changed(catalog, session, branch.id, branch.base_own), key=lambda c: c[0]):
        entity = after.schema.by_id.get(number) or before.schema.by_id.get(number)
        if entity is None:
            continue
        ids = [row_id for _, row_id in group]
        table = catalog.table(session, entity.store, version)
        olds, news = table.get_many(session, before.chain, ids), table.get_many(session, after.chain, ids)
        found += _differences(
            table, entity, before.schema.by_id.get(number), ids, olds, news, policy, after.schema, branch.name
        )
    return found


def _differences(
    table: Table,
    entity: Entity,
    past: Entity | None,
    ids: Sequence[int],
    olds: Mapping[int, Row],
    news: Mapping[int, Row],
    policy: Policy,
    schema: Schema,
    branch: str,
) -> list[dict[str, Any]]:
    found = []
    for row_id in ids:
        old, new = olds.get(row_id), news.get(row_id)
        if old is None and new is None:
            continue
        one = _difference(table, entity, past, row_id, old, new)
        if one is not None and _readable(one, policy, schema, entity, branch, table, row_id, old, new):
            found.append(one)
    return found


def _side(catalog: Catalog, session: Session, chain: Chain, version: Any) -> _Side:
    return _Side(chain, catalog.schema(session, chain, version))


def _difference(
    table: Table, entity: Entity, past: Entity | None, row_id: int, old: Row | None, new: Row | None
) -> dict[str, Any] | None:
    fields: dict[str, tuple[Any, Any]] = {}
    for f in entity.fields:
        g = past.by_id.get(f.id) if past else None
        a = None if old is None or g is None else table.value(g, old.values)
        b = None if new is None else table.value(f, new.values)
        if not same(a, b) or (g is not None and g.type != f.type and a is not None):
            fields[f.name] = (None if g is None else decode(g.type, a), decode(f.type, b))
    op = "insert" if old is None else "delete" if new is None else "update"
    if op == "update" and not fields:
        return None
    return {"entity": entity.name, "id": row_id, "op": op, "fields": fields}


def _readable(
    one: dict[str, Any],
    policy: Policy,
    schema: Schema,
    entity: Entity,
    branch: str,
    table: Table,
    row_id: int,
    old: Row | None,
    new: Row | None,
) -> bool:
    """Whether a principal may see a difference; takes out the fields it may not."""
    rules = policy.rules("read", schema, entity, branch)
    if rules.everything:
        return True
    states = [table.named(entity, row.values, row_id) for row in (old, new) if row is not None]
    nowhere = lambda name, number: None  # noqa: E731  # references are not followed here: what needs them is not shown
    for name in list(one["fields"]):
        if any(rules.refusal(frozenset({name}), state, nowhere) for state in states):
            del one["fields"][name]
    return not any(rules.refusal(frozenset(), state, nowhere) for state in states)


# Merge


class _Stop(Exception):
    """Ends a merge that must leave nothing behind."""


@dataclass
class _Plan:
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    removed: list[tuple[Entity, int]] = field(default_factory=list)


def merge(
    ledger: Ledger, execution: Execution, name: str, target: str | None, preview: bool, reason: str | None, expect: int | None = None
) -> Merge:  # fmt: skip
    """Bring a branch's changes to its parent, field by field; with conflicts nothing is applied and they become rows.

    With `expect`, the tx that was its last: Conflict when it has changed since.
    """
    plan = _Plan()
    try:
        with ledger.work() as work:
            branch = work.catalog.branch(work.session, name, open_only=True)
            if branch.parent is None:
                raise Invalid("main has no parent to merge into")
            parent = work.catalog.branch_by_id(work.session, branch.parent)
            if target is not None and target != parent.name:
                raise Invalid(f"branch {name!r} merges into its parent {parent.name!r}, not {target!r}")
            if parent.status != "open":
                raise Invalid(f"the parent {parent.name!r} is {parent.status}")
            work.catalog.policy(work.session, execution.principal, work.version).require(
                "merge", f"branch:{parent.name}"
            )
            last = head(ledger.engine, work.session, branch)
            if last is None:
                return Merge(not preview, None, [], [])
            if expect is not None and last != expect:
                raise Conflict(
                    f"branch {name!r} has changed since it was proposed",
                    hint=f"layer diff {name} shows it; layer merge {name} merges what is there now",
                )
            tx = work.tx(
                execution,
                "main" if parent.id == MAIN else parent,
                reason=reason or f"merge {name}",
                merged_from=branch.id,
            )
            _apply(work, tx, branch, plan, _resolutions(work, name, parent.name))
            if not plan.conflicts:
                tx.check()
            if plan.conflicts or preview:
                raise _Stop
            main = tx
            if parent.id != MAIN:  # branches and conflicts are rows of main
                tx.finish()
                main = work.tx(execution, reason=f"merged {name}")
            main.record(SYSTEM.by_name["branch"], {"base_own": main.number, "base_parent": tx.number}, branch.id)
            for conflict in _open(work, name, parent.name):
                main.record(SYSTEM.by_name["conflict"], {"status": "closed"}, conflict["id"])
            main.finish()
    except _Stop:
        if plan.conflicts and not preview:
            _record(ledger, execution, name, parent.name, plan.conflicts)
            return Merge(False, None, [], conflicts(ledger.catalog, ledger, name))
        return Merge(False, None, plan.changes, plan.conflicts)
    return Merge(True, tx.number, plan.changes, [])


def _apply(work: Work, tx: Tx, branch: Branch, plan: _Plan, resolutions: dict[Any, dict[str, Any]]) -> None:
    session, catalog = work.session, work.catalog
    base = _side(catalog, session, catalog.chain(session, branch, branch.base_own), work.version)
    ours = _side(catalog, session, catalog.chain(session, branch), work.version)
    theirs = _Side(tx.chain, tx.schema)
    changed = _changed(work, session, branch.id, branch.base_own)
    first = [SYSTEM.by_name[n].id for n in SCHEMA_ENTITIES]
    schema_rows = [c for c in changed if c[0] in first]
    _merge_rows(work, tx, schema_rows, base, ours, theirs, plan, resolutions)
    if schema_rows and not plan.conflicts:
        work.changed_governing(tx.number)
        _retarget(tx, base.schema, theirs.schema)
        for entity in tx.schema.entities:
            if not entity.system:
                ensure_indexes(work.engine, work.session, entity)
    _merge_rows(work, tx, [c for c in changed if c[0] not in first], base, ours, theirs, plan, resolutions)
    for entity, row_id in plan.removed:  # what still refers to a removed row, as in a delete
        for other, f in tx.schema.referring.get(entity.name, ()):
            for child in tx._all_having(other, f, row_id):
                if f.on_delete == "cascade":
                    tx.remove(other, child, cascading=True)
                elif f.on_delete == "null":
                    tx._nullify(other, f, child)
                else:
                    raise Conflict(
                        f"{entity.name}/{row_id} was deleted on {branch.name!r} but {other.name}/{child}.{f.name} refers to it"
                    )
    if schema_rows and not plan.conflicts:  # rows the target had must meet what the branch newly asks of them
        for entity in tx.schema.entities:
            before = theirs.schema.by_id.get(entity.id)
            if before is not None and not entity.system:
                revalidate(tx, before, entity)


def _retarget(tx: Tx, *before: Schema) -> None:
    """References to an entity that one side renamed follow it."""
    moved = {
        e.name: tx.schema.by_id[e.id].name
        for schema in before
        for e in schema.entities
        if e.id in tx.schema.by_id and tx.schema.by_id[e.id].name != e.name
    }
    for entity in tx.schema.entities:
        for f in entity.references:
            if f.target not in tx.schema.by_name and f.target in moved:
                tx.record(SYSTEM.by_name["field"], {"target": moved[f.target]}, f.id)


def _merge_rows(
    work: Work,
    tx: Tx,
    changed: Sequence[tuple[int, int]],
    base: _Side,
    ours: _Side,
    theirs: _Side,
    plan: _Plan,
    resolutions: dict[Any, dict[str, Any]],
) -> None:
    """Decide rows, entity by entity; each side of them is read with a few statements."""
    for number, group in groupby(changed, key=lambda c: c[0]):
        known = ours.schema.by_id.get(number)
        if known is None:
            continue  # the branch dropped the entity after it changed the rows
        entity = tx.schema.by_id.get(number)
        ids = [row_id for _, row_id in group]
        table = work.table(entity or known)
        past = [side.schema.by_id.get(number) for side in (base, ours, theirs)]
        rows = [table.get_many(work.session, side.chain, ids) for side in (base, ours, theirs)]
        alike = (
            entity is not None
            and entity.name != "field"
            and all(p is not None and p.fields == entity.fields for p in past)
        )
        for row_id in ids:
            three = [side.get(row_id) for side in rows]
            if three[0] is None and three[1] is None:
                continue
            if not (alike and entity is not None and _take_plain(tx, entity, table, row_id, three, plan)):
                _merge_row(work, tx, entity, known, table, row_id, three, past, plan, resolutions)


def _take_plain(tx: Tx, entity: Entity, table: Table, row_id: int, rows: Sequence[Row | None], plan: _Plan) -> bool:
    """The common case: only the branch changed the row, and all sides have the same fields. False when it is not that."""
    b, o, t = rows
    if o is None or (b is None) != (t is None) or (b is not None and t is not None and b.values != t.values):
        return False
    if t is None:
        places = tuple(i for i, v in enumerate(o.values) if v is not None)
    else:
        places = tuple(i for i, (v, w) in enumerate(zip(o.values, t.values, strict=True)) if v != w)
        if not places:
            return True
    at = {table.index[f.store]: f for f in entity.fields}
    fields = {
        at[i].name: (None if t is None else decode(at[i].type, t.values[i]), decode(at[i].type, o.values[i]))
        for i in places
        if i in at
    }
    tx.overwrite(entity, table, row_id, t, o.values, places, set(fields), merging=True)
    plan.changes.append(
        {"entity": entity.name, "id": row_id, "op": "insert" if t is None else "update", "fields": fields}
    )
    return True


def _merge_row(work: Work, tx: Tx, entity: Entity | None, known: Entity, table: Table, row_id: int, rows: Sequence[Row | None], past: Sequence[Entity | None], plan: _Plan,
               resolutions: dict[Any, dict[str, Any]]) -> None:  # fmt: skip
    """Decide one row: take, leave, mix by field, or note a conflict."""

    def states(fields: Entity) -> list[dict[str, Stored] | None]:
        found: list[dict[str, Stored] | None] = []
        for row, then in zip(rows, past, strict=True):
            if row is None:
                found.append(None)
                continue
            one = {}
            for f in fields.fields:
                g = then.by_id.get(f.id) if then else None
                one[f.name] = None if g is None else convert(g.type, f.type, table.value(g, row.values))
            found.append(one)
        return found

    b, o, t = states(entity or known)
    if known.id == SECRET:
        b, o = _same_keys(b, o, t)
    if _equal(o, b) or (_equal(o, t) and entity is not None):
        return
    if entity is None:  # the target dropped the entity whose rows the branch changed
        _conflict(plan, resolutions, known, row_id, None, b, o, None)
        return
    if _equal(t, b):
        _take(tx, entity, table, row_id, t, o, plan)
        return
    if b is None or o is None or t is None:
        found = _conflict(plan, resolutions, entity, row_id, None, b, o, t)
        if found is not None and not _equal(wanted := _resolved_row(entity, found, b, o, t, work), t):
            _take(tx, entity, table, row_id, t, wanted, plan)
        return
    wanted = dict(t)
    for name in t:
        if same(o[name], b[name]) or same(o[name], t[name]):
            continue
        if same(t[name], b[name]):
            wanted[name] = o[name]
            continue
        found = _conflict(plan, resolutions, entity, row_id, name, b[name], o[name], t[name])
        if found is not None:
            if "take" in found:
                wanted[name] = o[name] if found["take"] == "ours" else t[name]
            else:
                value = _revive(entity.by_name[name].type, found["value"])
                wanted[name] = _settled(entity, name, value, (b[name], o[name], t[name]), work)
    if not _equal(wanted, t):
        _take(tx, entity, table, row_id, t, wanted, plan)


def _same_keys(b: Any, o: Any, t: Any) -> tuple[Any, Any]:
    """Base and ours of a secret as if no side had wrapped its data key anew: only another value is a change."""

    def value(row: Any) -> Any:
        return None if row is None else str(row["sealed"]).rpartition(".")[2]

    kept = value(o) == value(b)
    if b is not None and t is not None and value(t) == value(b):
        b = {**b, "sealed": t["sealed"]}
    return b, {**o, "sealed": b["sealed"]} if kept and o is not None else o


def _equal(a: Mapping[str, Stored] | None, b: Mapping[str, Stored] | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(same(a[name], b[name]) for name in a)


def _take(
    tx: Tx,
    entity: Entity,
    table: Table,
    row_id: int,
    now: dict[str, Stored] | None,
    wanted: dict[str, Stored] | None,
    plan: _Plan,
) -> None:
    if entity.name == "field" and now is not None and wanted is not None and wanted["store"] != now["store"]:
        # Retyped on the branch: rows of the target are still in the column it had.
        if now["was"] is not None:
            raise Conflict(f"field {now['name']!r} was retyped on both sides", hint="backfill it on the target first")
        wanted = {**wanted, "was": dumps({"store": now["store"], "type": now["type"]})}
    elif entity.name == "field" and now is not None and wanted is not None and now["was"] is not None:
        wanted = {**wanted, "was": now["was"]}  # backfilled on the branch only: the target's other rows are not
        if _equal(wanted, now):
            return
    if wanted is None:
        row = tx._current(entity, table, row_id)
        tx._authorize("delete", entity, table, row_id, row, row.values, frozenset())
        tx._write(entity, table, row_id, row, None, ())
        plan.removed.append((entity, row_id))
        op, fields = "delete", {f.name: (decode(f.type, (now or {}).get(f.name)), None) for f in entity.fields}
    elif now is None:
        tx.add(entity, {k: v for k, v in wanted.items() if v is not None}, row_id, merging=True)
        op, fields = (
            "insert",
            {k: (None, decode(entity.by_name[k].type, v)) for k, v in wanted.items() if v is not None},
        )
    else:
        changed = {k: v for k, v in wanted.items() if not same(v, now[k])}
        tx.change(entity, row_id, changed, merging=True)
        op, fields = (
            "update",
            {
                k: (decode(entity.by_name[k].type, now[k]), decode(entity.by_name[k].type, v))
                for k, v in changed.items()
            },
        )
    plan.changes.append({"entity": entity.name, "id": row_id, "op": op, "fields": fields})


# Conflicts


def _conflict(
    plan: _Plan,
    resolutions: dict[Any, dict[str, Any]],
    entity: Entity,
    row_id: int,
    name: str | None,
    b: Any,
    o: Any,
    t: Any,
) -> dict[str, Any] | None:
    """The resolution of this very conflict; None when it is open, and then it is noted."""
    key = _key(entity.name, row_id, name, b, o, t)
    found = resolutions.get(key)
    if found is None:
        plan.conflicts.append({"entity": entity.name, "row": row_id, "field": name, "base": b, "ours": o, "theirs": t})
    return found


def _key(entity: str, row_id: int, name: str | None, b: Any, o: Any, t: Any) -> tuple[Any, ...]:
    return (entity, row_id, name, *(json.dumps(v, sort_keys=True) for v in (b, o, t)))


def _rows(work: Any, session: Session, where: str, params: Sequence[Any]) -> list[dict[str, Any]]:
    entity = SYSTEM.by_name["conflict"]
    names = {f.name: f.store for f in entity.fields}
    for name, store in names.items():
        where = where.replace(f"{{{name}}}", f"x.{store}")
    return work.catalog.rows(session, entity, MAIN_CHAIN, where, tuple(params))


def _open(work: Work, name: str, target: str) -> list[dict[str, Any]]:
    return _rows(work, work.session, "where {branch} = ? and {target} = ? and {status} <> 'closed'", (name, target))


def _resolutions(work: Work, name: str, target: str) -> dict[Any, dict[str, Any]]:
    found = {}
    for row in _open(work, name, target):
        if row["status"] == "resolved":
            found[_key(row["entity"], row["row_id"], row["field"], row["base"], row["ours"], row["theirs"])] = row[
                "resolution"
            ]
    return found


def _record(ledger: Ledger, execution: Execution, name: str, target: str, found: list[dict[str, Any]]) -> None:
    entity = SYSTEM.by_name["conflict"]
    with ledger.work() as work:
        tx = work.tx(execution, reason=f"conflicts of merging {name} into {target}")
        standing = {
            _key(r["entity"], r["row_id"], r["field"], r["base"], r["ours"], r["theirs"]): r
            for r in _open(work, name, target)
        }
        for one in found:
            key = _key(one["entity"], one["row"], one["field"], one["base"], one["ours"], one["theirs"])
            if standing.pop(key, None) is None:
                values = {
                    "branch": name,
                    "target": target,
                    "entity": one["entity"],
                    "row_id": one["row"],
                    "field": one["field"],
                    "base": one["base"],
                    "ours": one["ours"],
                    "theirs": one["theirs"],
                    "status": "open",
                }
                tx.record(entity, tx._encoded(entity, values))
        for row in standing.values():
            if row["status"] == "open":
                tx.record(entity, {"status": "closed"}, row["id"])
        if tx.dirty:
            tx.finish()


def conflicts(catalog: Catalog, ledger: Ledger, branch: str | None = None) -> list[dict[str, Any]]:
    """The open conflicts, values as their field's type has them."""
    with ledger.engine.reading() as session:
        where, params = (
            ("where {status} = 'open' order by x.id", [])
            if branch is None
            else ("where {status} = 'open' and {branch} = ? order by x.id", [branch])
        )
        rows = _rows(ledger, session, where, params)
        found = []
        for row in rows:
            f = _conflict_field(catalog, session, clock_epoch(ledger, session), row)
            kind = None if f is None else f[1].type
            shown = {k: _shown(kind, row[k]) for k in ("base", "ours", "theirs")}
            found.append(
                {
                    "id": row["id"],
                    "branch": row["branch"],
                    "target": row["target"],
                    "entity": row["entity"],
                    "row": row["row_id"],
                    "field": row["field"],
                    **shown,
                }
            )
        return found


def _conflict_field(
    catalog: Catalog, session: Session, version: Any, row: Mapping[str, Any]
) -> tuple[Entity, Field] | None:
    """The field a conflict is about, under the name either side has for its entity."""
    for name in (row["target"], row["branch"]):
        try:
            schema = catalog.schema(session, catalog.chain(session, catalog.branch(session, name)), version)
        except NotFound:
            continue
        entity = schema.by_name.get(row["entity"])
        if entity is not None and row["field"] in entity.by_name:
            return entity, entity.by_name[row["field"]]
    return None


def clock_epoch(ledger: Ledger, session: Session) -> int:
    row = session.one(f"select epoch from {ledger.engine.schema_prefix}ledger_clock")
    assert row is not None
    return int(row[0])


def _shown(kind: str | None, stored: Any) -> Any:
    return decode(kind, stored) if kind is not None and not isinstance(stored, dict) else stored


def _revive(kind: str, value: Any) -> Any:
    """A resolution's value: it was stored in portable form inside json."""
    return (
        decode(kind, value)
        if kind in ("bool", "json") and isinstance(value, int | str) and not isinstance(value, bool)
        else value
    )


def _settled(entity: Entity, name: str, value: Any, sides: Sequence[Stored], work: Work) -> Stored:
    """What a resolution says a field shall be. A file is one that a side has: who resolves may name no other's content."""
    f = entity.get(name)
    stored = f.encode(entity.name, value, work.settings.value_bytes)
    if f.type == "file" and stored is not None and stored not in sides:
        raise Invalid(
            f"{entity.name}.{name} is a file that no side has", hint="put it into the branch's row, then take ours"
        )
    return stored


def _resolved_row(
    entity: Entity,
    found: dict[str, Any],
    b: dict[str, Stored] | None,
    o: dict[str, Stored] | None,
    t: dict[str, Stored] | None,
    work: Work,
) -> dict[str, Stored] | None:
    if "take" in found:
        return o if found["take"] == "ours" else t
    if found["value"] is None:
        return None
    sides = [side for side in (b, o, t) if side is not None]
    given = {
        k: _settled(entity, k, v, [side.get(k) for side in sides], work) for k, v in found["value"].items() if k != "id"
    }
    return {**{f.name: None for f in entity.fields}, **(t or o or {}), **given}


def resolve(
    ledger: Ledger, execution: Execution, conflict: int, resolution: dict[str, Any], reason: str | None
) -> None:
    """Say what a conflict's value shall be; the next merge takes it."""
    with ledger.work() as work:
        rows = _rows(work, work.session, "where x.id = ?", (conflict,))
        if not rows:
            raise NotFound(f"there is no conflict {conflict}", hint="layer conflicts lists them")
        row = rows[0]
        if row["status"] == "closed":
            raise Conflict(f"conflict {conflict} is closed")
        work.catalog.policy(work.session, execution.principal, work.version).require("merge", f"branch:{row['target']}")
        if "value" in resolution and row["entity"] == "secret" and row["field"] != "description":
            raise Denied(
                "a secret's value is set, not resolved", hint="take ours or theirs; a value would be kept in clear"
            )
        if "value" in resolution and row["field"] is not None:
            known = _conflict_field(work.catalog, work.session, work.version, row)
            if known is not None:
                entity, f = known
                sides = (row["base"], row["ours"], row["theirs"])
                resolution = {"value": _settled(entity, f.name, resolution["value"], sides, work)}
        elif "value" in resolution and not isinstance(resolution["value"], dict | None):
            raise Invalid("a whole row is resolved with a dict of fields, None to delete it, or take='ours'|'theirs'")
        tx = work.tx(execution, reason=reason or f"resolve conflict {conflict}")
        entity = SYSTEM.by_name["conflict"]
        tx.record(entity, tx._encoded(entity, {"resolution": resolution, "status": "resolved"}, partial=True), conflict)
        tx.finish()
