"""Evolve: changes of the schema. Each is a mutation of `entity` and `field` rows; no table is rewritten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from ..errors import Conflict, Invalid
from .engine import Engine, Session, marks
from .ledger import Tx, Work
from .predicates import compile_predicate
from .schema import SYSTEM, Entity, Field, Schema, check_entity_name, check_name, field_of, field_values, with_field
from .tables import Row
from .values import Stored, convert, convertible
from .views import arm_count, arms, field_sql

ENTITY, FIELD = SYSTEM.by_name["entity"], SYSTEM.by_name["field"]
FIELDS = 500


def _authorized(tx: Tx) -> None:
    if not tx.policy.sovereign():
        tx.policy.require("define", "*", tx.name)


def define(
    tx: Tx,
    name: str,
    fields: Mapping[str, Any],
    unique: Sequence[Sequence[str]],
    description: str | None,
    annotations: Any,
) -> int:
    """Make an entity, or add to one what it lacks; a field that is there already must be the same."""
    check_entity_name(name)
    _authorized(tx)
    if not isinstance(fields, Mapping):
        raise Invalid(f"fields of {name!r} are a dict: name -> type")
    there = tx.schema.by_name.get(name)
    limit = tx.work.settings.value_bytes
    rows = {label: field_values(name, label, spec, limit) for label, spec in fields.items()}
    if there is None:
        number = _begin(tx, name, description, annotations)
    else:
        number = there.id
        for label in set(rows) & set(there.by_name):
            _same(there.by_name[label], rows[label])
    missing = {label: row for label, row in rows.items() if there is None or label not in there.by_name}
    _add(tx, number, missing, fresh=there is None)
    entity = tx.schema.by_id[number]
    if not all(isinstance(names, list | tuple) and names for names in unique):
        raise Invalid("unique is a list of lists of fields", hint='[["first", "last"]]')
    sets = [[entity.get(n).id for n in names] for names in unique]
    fresh = [s for s in sets if tuple(s) not in entity.uniques]
    if fresh:
        tx.record(ENTITY, tx._encoded(ENTITY, {"uniques": [*map(list, entity.uniques), *fresh]}, partial=True), number)
    if there is not None:
        revalidate(tx, there, tx.schema.by_id[number])
    _settle(tx, number)
    return number


def define_all(tx: Tx, entities: Mapping[str, tuple[Mapping[str, Any], str | None]]) -> None:
    """Make entities, fields and description each, that are not there yet and may refer to each other."""
    _authorized(tx)
    limit, numbers = tx.work.settings.value_bytes, {}
    for name, (_, description) in entities.items():
        check_entity_name(name)
        numbers[name] = _begin(tx, name, description, None)
    for name, (fields, _) in entities.items():
        rows = {label: field_values(name, label, spec, limit) for label, spec in fields.items()}
        _add(tx, numbers[name], rows, fresh=True)
        _settle(tx, numbers[name])


def _begin(tx: Tx, name: str, description: str | None, annotations: Any) -> int:
    """The row of a new entity; its tables are made with its first fields."""
    number = tx.work.new_id()
    store = f"{name[:30]}_{number}"
    values = {
        "name": name, "store": store, "kind": "entity", "system": False, "uniques": None, "description": description,
        "annotations": annotations,
    }  # fmt: skip
    made = Entity(number, name, store, description=description, annotations=annotations)
    schema = Schema((*tx.schema.entities, made))
    tx.record(ENTITY, tx._encoded(ENTITY, values), None, number)
    tx.foretell(schema)
    return number


def _same(there: Field, row: Mapping[str, Any]) -> None:
    now = {"type": there.type, "required": there.required, "uniq": there.uniq, "target": there.target}
    for key, value in now.items():
        if row[key] != value:
            raise Conflict(
                f"field {there.name!r} is there with {key} {value!r}, not {row[key]!r}",
                hint="change it with layer.alter(...)",
            )


def _add(tx: Tx, entity: int, rows: Mapping[str, dict[str, Any]], fresh: bool = False) -> None:
    """New fields of an entity; the tables of a fresh one are made with them."""
    schema, made = tx.schema, list[tuple[int, dict[str, Any]]]()
    for label, row in rows.items():
        found = schema.by_id[entity]
        if label in found.by_name:
            raise Conflict(f"{found.name!r} has a field {label!r} already")
        if len(found.fields) >= FIELDS:
            raise Invalid(f"an entity has at most {FIELDS} fields")
        if row["target"] is not None and row["target"] not in schema.by_name:
            raise Invalid(f"{found.name}.{label}: there is no entity {row['target']!r} to refer to")
        if row["target"] is not None and schema.get(row["target"]).kind == "ledger":
            raise Invalid(f"{found.name}.{label}: {row['target']!r} is a ledger; refer to an entity")
        number = tx.work.new_id()
        values = {**row, "entity": entity, "store": f"{label[:30]}_{number}"}
        schema = with_field(schema, found, field_of({**values, "id": number, "was": None}))
        if row["rule"]:
            compile_predicate(row["rule"], schema, schema.by_id[entity])
        made.append((number, values))
    store, columns = schema.by_id[entity].store, [(values["store"], values["type"]) for _, values in made]
    if fresh:
        for sql in tx.engine.tables(store, columns):
            tx.session.run(sql)
    elif columns:
        new_columns(tx.work, store, columns)
    for number, values in made:
        tx.record(FIELD, tx._encoded(FIELD, values), None, number)
    tx.foretell(schema)


def new_columns(work: Work, store: str, columns: Sequence[tuple[str, str]]) -> None:
    """Columns (name, type of field) of all three tables of an entity, and their triggers anew."""
    at = work.engine.schema_prefix
    for suffix in ("", "__h", "__d"):
        for column, kind in columns:
            work.session.run(f"alter table {at}{store}{suffix} add column {column} {work.engine.column(kind)}")
    names = [name for name, _ in work.engine.columns(work.session, store) if name not in ("id", "_tx")]
    for sql in work.engine.triggers(store, names):
        work.session.run(sql)


def ensure_indexes(engine: Engine, session: Session, entity: Entity) -> None:
    """An index for each field that asks for one, is unique, or refers; where people search, in the past and on branches too."""
    at = engine.index_prefix
    searched = [*entity.unique_sets, *((f,) for f in entity.fields if f.indexed)]
    wanted = {
        tuple(f.number for f in fields): (fields, depth)
        for depth, sets in ((1, [(f,) for f in entity.references]), (3, searched))
        for fields in sets
    }
    for numbers, (fields, depth) in sorted(wanted.items()):
        listed = ", ".join(f.store for f in fields)
        for suffix, first in (("", ""), ("__h", ""), ("__d", "branch, "))[:depth]:
            name = f"{entity.store}{suffix}_i_{'_'.join(map(str, numbers))}"
            session.run(f"create index if not exists {name} on {at}{entity.store}{suffix}({first}{listed})")


def _settle(tx: Tx, number: int) -> None:
    if number in tx.schema.by_id:
        ensure_indexes(tx.engine, tx.session, tx.schema.by_id[number])


def alter(
    tx: Tx, name: str, add: Mapping[str, Any], rename: Mapping[str, str], retype: Mapping[str, Any], drop: Sequence[str],
    change: Mapping[str, Mapping[str, Any]], new_name: str | None, description: str | None,
) -> None:  # fmt: skip
    """Change an entity: new, renamed, retyped, dropped fields, other options, another name."""
    _authorized(tx)
    if not all(isinstance(part, Mapping) for part in (add, rename, retype, change)):
        raise Invalid("add, rename, retype and change are dicts by field name")
    entity = _own(tx, name)
    limit = tx.work.settings.value_bytes
    number = entity.id
    for old, new in rename.items():
        check_name(new, f"a field of {name}")
        f = tx.schema.by_id[number].get(old)
        if new in tx.schema.by_id[number].by_name:
            raise Conflict(f"{name!r} has a field {new!r} already")
        if new in ("id", "tx", "tx_end", "op"):
            raise Invalid(f"{new!r} is a column every entity has already")
        tx.record(FIELD, {"name": new}, f.id)
    for label, spec in retype.items():
        _retype(tx, number, label, spec, limit)
    for label, options in change.items():
        _change(tx, number, label, options, limit)
    for label in [drop] if isinstance(drop, str) else drop:
        f = tx.schema.by_id[number].get(label)
        tx.erase(FIELD, f.id)
    _add(tx, number, {label: field_values(name, label, spec, limit) for label, spec in add.items()})
    if description is not None:
        tx.record(ENTITY, {"description": description}, number)
    if new_name is not None and new_name != name:
        check_entity_name(new_name)
        if new_name in tx.schema.by_name:
            raise Conflict(f"there is an entity {new_name!r} already")
        for _, f in tx.schema.referring.get(name, ()):
            tx.record(FIELD, {"target": new_name}, f.id)
        tx.record(ENTITY, {"name": new_name}, number)
    for f in tx.schema.by_id[number].fields:
        if f.rule:
            compile_predicate(f.rule, tx.schema, tx.schema.by_id[number])
    _keep_slices(tx, name, new_name)
    revalidate(tx, entity, tx.schema.by_id[number])
    _settle(tx, number)


def _keep_slices(tx: Tx, name: str, new_name: str | None) -> None:
    """The slices a branch lies in go on naming what is there."""
    for _, part in tx.slices:
        if new_name is not None and name in part:
            raise Invalid(f"{name!r} is named by the slice of branch {tx.name!r} and can't be renamed there")
    for entity in tx.schema.entities:
        try:
            tx.work.catalog.slice_predicates(tx.slices, tx.schema, entity)
        except Invalid as error:
            raise Invalid(f"the slice of branch {tx.name!r} needs what this changes: {error.message}") from None


def _own(tx: Tx, name: str) -> Entity:
    entity = tx.schema.get(name)
    if entity.system:
        raise Invalid(f"{name!r} is an entity of the system's own and can't be changed")
    return entity


def _retype(tx: Tx, number: int, label: str, spec: Any, limit: int) -> None:
    entity = tx.schema.by_id[number]
    f = entity.get(label)
    row = field_values(entity.name, label, spec, limit)
    if row["initial"] is None and f.initial not in (None, "now()") and convertible(f.type, row["type"]):
        row["initial"] = convert(f.type, row["type"], f.encode(entity.name, f.initial, limit))
    if f.was:
        raise Conflict(
            f"{entity.name}.{label} is being retyped already", hint=f"layer.backfill({entity.name!r}, {label!r}) first"
        )
    if not convertible(f.type, row["type"]):
        raise Invalid(
            f"{entity.name}.{label}: {f.type} can't become {row['type']}", hint="add a field and fill it instead"
        )
    if f.type == row["type"]:
        return
    if any(f in fields for fields in entity.unique_sets):
        raise Invalid(f"{entity.name}.{label} is unique; take that off before retyping it")
    column = f"{label[:30]}_{tx.work.new_id()}"
    new_columns(tx.work, entity.store, [(column, row["type"])])
    values = {
        "type": row["type"],
        "store": column,
        "was": {"store": f.store, "type": f.type},
        "options": row["options"],
        "initial": row["initial"],
        "target": row["target"],
    }
    tx.record(FIELD, tx._encoded(FIELD, values, partial=True), f.id)


def _change(tx: Tx, number: int, label: str, options: Mapping[str, Any], limit: int) -> None:
    entity = tx.schema.by_id[number]
    f = entity.get(label)
    if "type" in options:
        raise Invalid("a type is changed with retype=")
    spec: dict[str, Any] = {
        "type": f.type, "required": f.required, "unique": f.uniq, "indexed": f.indexed, "default": f.initial, "check": f.rule, "to": f.target,
        "on_delete": f.on_delete, "description": f.description, "annotations": f.annotations, **dict(f.options), **options,
    }  # fmt: skip
    row = field_values(entity.name, label, spec, limit)
    if row["target"] is not None and row["target"] not in tx.schema.by_name:
        raise Invalid(f"{entity.name}.{label}: there is no entity {row['target']!r} to refer to")
    after = replace(f, **{k: v for k, v in row.items() if k not in ("options",)}, options=row["options"] or {})
    if row["rule"]:
        schema = with_field(tx.schema, entity, after)
        compile_predicate(row["rule"], schema, schema.by_id[number])
    tx.record(FIELD, tx._encoded(FIELD, {k: v for k, v in row.items() if k != "name"}, partial=True), f.id)


def _stricter(before: Field | None, after: Field) -> bool:
    """Whether a field asks for something that rows written before may not give."""
    if before is None:
        return after.required
    return bool(
        (after.required and not before.required)
        or (after.rule and after.rule != before.rule)
        or (after.type in ("enum", "state") and after.type == before.type and not before.values <= after.values)
    )


def revalidate(tx: Tx, before: Entity, after: Entity) -> None:
    """Rows that are there must meet what is newly asked of them; costs nothing when nothing is."""
    stricter = [f for f in after.fields if _stricter(before.by_id.get(f.id), f)]
    known = {tuple(f.id for f in fields) for fields in before.unique_sets}
    unique = [fields for fields in after.unique_sets if tuple(f.id for f in fields) not in known]
    for f in stricter:
        _filled(tx, after, f)
    if any(f.rule for f in stricter):
        table = tx.work.table(after)
        for number, row in table.scan(tx.session, tx.chain):
            if tx._in_slice(after, table, number, row.values):
                tx._constrain(after, table, number, list(row.values), set())
    for fields in unique:
        _differs(tx, after, fields)


def _filled(tx: Tx, entity: Entity, f: Field) -> None:
    """No row lacks a value, or has one that would not be allowed any more."""
    column = field_sql(tx.engine, f, tx.engine.portable)
    bad = [f"{column} is null"] if f.required else []
    if f.type in ("enum", "state"):
        bad.append(f"{column} not in ({marks(len(f.values))})")
    if not bad:
        return
    params = sorted(f.values) if f.type in ("enum", "state") else []
    sql = arms(tx.engine, entity.store, tx.chain, [column], where=f" and ({' or '.join(bad)})")
    for number, value in tx.session.all(sql, params * arm_count(tx.chain)):
        if tx._exists(entity.name, number):
            if value is None:
                raise Conflict(f"{entity.name}/{number} has no {f.name}", hint="fill it before requiring it")
            raise Conflict(f"{entity.name}/{number}.{f.name} is {value!r}, which would not be allowed any more")


def _differs(tx: Tx, entity: Entity, fields: Sequence[Field]) -> None:
    """No two rows have the same values in these fields."""
    seen: dict[tuple[Any, ...], int] = {}
    columns = [field_sql(tx.engine, f, tx.engine.portable) for f in fields]
    for number, *values in tx.session.all(arms(tx.engine, entity.store, tx.chain, columns)):
        if None in values or (tx.slices and not tx._exists(entity.name, number)):
            continue
        key = tuple(Decimal(str(v)) if f.type == "decimal" else v for f, v in zip(fields, values, strict=True))
        other = seen.setdefault(key, number)
        if other != number:
            shown = ", ".join(f"{f.name} {v!r}" for f, v in zip(fields, values, strict=True))
            first, last = sorted((other, number))
            raise Conflict(
                f"{entity.name} with {shown} is there already: {entity.name}/{first} and {last}",
                hint="make them differ first",
            )


def backfill(tx: Tx, name: str, label: str) -> tuple[int, int]:
    """Finish a retype: convert every row that still has its old value; returns how many, and how many could not be."""
    _authorized(tx)
    entity = _own(tx, name)
    f = entity.get(label)
    if not f.was:
        raise Invalid(f"{name}.{label} is not being retyped")
    table = tx.work.table(entity)
    former, lost = f.was["store"], 0

    def converted() -> Iterator[tuple[int, Row, list[Stored]]]:
        nonlocal lost
        for number, row in table.scan(tx.session, tx.chain, f" and x.{former} is not null"):
            values = list(row.values)
            stored = table.value(f, values)
            lost += stored is None
            table.set(f, values, stored)
            yield number, row, values

    done = tx.rewrite(entity, converted(), tuple(sorted((table.index[f.store], table.index[former]))), set())
    retyped(tx, f)
    return done, lost


def retyped(tx: Tx, f: Field) -> None:
    """No row has a field's former column any more."""
    tx.record(FIELD, {"was": None}, f.id)


def describe(tx: Tx, name: str, description: str | None) -> None:
    """Say what an entity is, or nothing."""
    _authorized(tx)
    tx.record(ENTITY, tx._encoded(ENTITY, {"description": description}, partial=True), _own(tx, name).id)


def unique(tx: Tx, name: str, wanted: Sequence[Sequence[str]]) -> None:
    """Make these the sets of fields of an entity that are unique together, and no others."""
    _authorized(tx)
    entity = _own(tx, name)
    if not all(wanted):
        raise Invalid("a set of fields that are unique together has a field", hint='[["first", "last"]]')
    ids = [[entity.get(label).id for label in names] for names in wanted]
    tx.record(ENTITY, tx._encoded(ENTITY, {"uniques": ids or None}, partial=True), entity.id)
    revalidate(tx, entity, tx.schema.by_id[entity.id])
    _settle(tx, entity.id)


def drop(tx: Tx, name: str) -> None:
    """Take an entity out of the schema; its rows and history stay stored."""
    _authorized(tx)
    entity = _own(tx, name)
    referring = [(e, f) for e, f in tx.schema.referring.get(name, ()) if e.id != entity.id]
    if referring:
        other, f = referring[0]
        raise Conflict(f"{other.name}.{f.name} refers to {name!r}", hint="drop that field first")
    for f in entity.fields:
        tx.erase(FIELD, f.id)
    tx.erase(ENTITY, entity.id)
