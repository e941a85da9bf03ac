"""Migrations: the steps from one version of a bundle to the next, foreseen by a plan and run by an apply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any

from ..errors import Conflict, Invalid, LayerError
from ..substrate import evolve
from ..substrate.ledger import Tx
from ..substrate.predicates import Env, compile_predicate
from ..substrate.schema import Entity, Field, field_values
from ..substrate.tables import Row, Table
from ..substrate.values import Stored, convert, convertible
from .definitions import LIMIT, Key, Spec, field_spec
from .load import newer

STEPS = ("rename", "rename_entity", "retype", "drop", "backfill", "set", "add")
Items = dict[Key, tuple[int | None, Spec]]


def steps(bundle: Any, before: str | None) -> list[tuple[str, Mapping[str, Any]]]:
    """What is to be run when coming from a version, in order: each step with its name."""
    if before is None:
        return []
    due = [
        each for each in bundle.migrations if newer(each.version, before) and not newer(each.version, bundle.version)
    ]
    return [(f"{each.version}/{place}", step) for each in due for place, step in enumerate(each.steps, 1)]


def parts(step: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """A step's kind and what it is about."""
    if not isinstance(step, Mapping) or len(step) != 1 or (kind := next(iter(step))) not in STEPS:
        raise Invalid(f"a step of a migration is one of {', '.join(STEPS)}, not {step!r:.80}")
    if not isinstance(step[kind], Mapping) or not isinstance(step[kind].get("entity"), str):
        raise Invalid(f"the step {kind} names no entity")
    return kind, step[kind]


def told(step: Mapping[str, Any]) -> str:
    """A step in one line."""
    kind, given = parts(step)
    of = given["entity"] + (f".{given['field']}" if given.get("field") else "")
    if kind in ("rename", "rename_entity", "retype"):
        return f"{kind.replace('_', ' ')} {of} → {given['to'] if isinstance(given['to'], str) else given['to']['type']}"
    if kind == "set":
        where = f" where {given['where']}" if given.get("where") else ""
        given_values = given["values"].items()
        return f"set {', '.join(f'{of}.{name} = {_said(value)}' for name, value in given_values)}{where}"
    return f"add {', '.join(f'{of}.{name}' for name in given['fields'])}" if kind == "add" else f"{kind} {of}"


def _said(value: Any) -> str:
    if isinstance(value, Mapping) and set(value) == {"$field"}:
        return str(value["$field"])
    return json.dumps(value, ensure_ascii=False, default=str)


def renamed(due: Sequence[tuple[str, Mapping[str, Any]]], entity: str) -> tuple[str, Callable[[str], str]]:
    """What an entity, and each of its fields, is called after these steps."""
    labels: dict[str, str] = {}
    for _, step in due:
        kind, given = parts(step)
        if given["entity"] == entity and kind == "rename_entity":
            entity = given["to"]
        elif given["entity"] == entity and kind == "rename":
            first = next((old for old, new in labels.items() if new == given["field"]), given["field"])
            labels[first] = given["to"]
    return entity, lambda label: labels.get(label, label)


# What a plan expects of it


def foresee(step: Mapping[str, Any], there: Items, owned: dict[Key, int | None]) -> None:
    """Change what is there, and what is the bundle's own, as the step will."""
    kind, given = parts(step)
    entity = given["entity"]
    if ("entity", entity) not in owned:
        raise Invalid(
            f"the step {told(step)!r}: {entity!r} is not this bundle's", hint="a migration changes its own entities"
        )

    def move(old: Key, new: Key) -> None:
        if old in there:
            there[new] = there.pop(old)
        if old in owned:
            owned[new] = owned.pop(old)

    if kind == "rename":
        move(("field", f"{entity}.{given['field']}"), ("field", f"{entity}.{given['to']}"))
        if ("entity", entity) in there:
            number, spec = there["entity", entity]
            renamed = [
                sorted(given["to"] if n == given["field"] else n for n in each) for each in spec.get("unique", ())
            ]
            there["entity", entity] = (number, {**spec, **({"unique": sorted(renamed)} if renamed else {})})
    elif kind == "rename_entity":
        to = given["to"]
        for each in [*there, *owned]:
            if each == ("entity", entity):
                move(each, ("entity", to))
            elif each[0] == "field" and each[1].startswith(f"{entity}."):
                move(each, ("field", to + each[1].removeprefix(entity)))
        for each, (number, spec) in there.items():
            if each[0] == "field" and spec.get("target") == entity:
                there[each] = (number, {**spec, "target": to})
    elif kind == "retype":
        key = ("field", f"{entity}.{given['field']}")
        if key in there:
            number, spec = there[key]
            after = field_spec(entity, field_values(entity, given["field"], given["to"], LIMIT))
            kept = {k: v for k, v in spec.items() if k not in ("type", "options", "target", "on_delete")}
            there[key] = (
                number,
                {**kept, **{k: v for k, v in after.items() if k in ("type", "options", "target", "initial")}},
            )
    elif kind == "drop":
        for each in [*there, *owned]:
            whole = "field" not in given and each[1].split(".")[0] == entity and each[0] in ("entity", "field")
            if whole or each == ("field", f"{entity}.{given.get('field')}"):
                there.pop(each, None), owned.pop(each, None)
    elif kind == "add":
        for label, spec in given["fields"].items():
            key = ("field", f"{entity}.{label}")
            there[key] = (None, field_spec(entity, field_values(entity, label, spec, LIMIT)))
            owned[key] = None


# What it does


def run(
    tx: Tx,
    due: Sequence[tuple[str, Mapping[str, Any]]],
    wanted: Mapping[Key, Spec],
    naming: Callable[[str, str], AbstractContextManager[None]],
) -> None:
    """Do the steps in order. `wanted` are the definitions of the version that they lead to."""
    left = _lifted(due)
    while left:
        together = _together(left)
        if together:
            _rewrite(tx, together, wanted, naming)
        else:
            with naming("migration", left[0][0]):
                _alter(tx, left[0][1])
        left = left[len(together) or 1 :]


def _lifted(due: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The same with new fields made before rows are gone through that know nothing of them: that can be done at once then."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for label, step in due:
        kind, given = parts(step)
        place = len(found)
        while kind == "add" and place and _of_rows(found[place - 1][1]) == given["entity"]:
            place -= 1
        found.insert(place, (label, step))
    return found


def _of_rows(step: Mapping[str, Any]) -> str | None:
    """The entity whose rows a step changes one by one, each looking at nothing but itself."""
    kind, given = parts(step)
    alone = kind == "backfill" or (kind == "set" and "." not in (given.get("where") or ""))
    return given["entity"] if alone else None


def _together(left: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The first steps that go through the rows of one entity and can do so at once."""
    entity = _of_rows(left[0][1])
    if entity is None:
        return list(left[:1]) if parts(left[0][1])[0] == "set" else []
    return list(takewhile(lambda each: _of_rows(each[1]) == entity, left))


def _alter(tx: Tx, step: Mapping[str, Any]) -> None:
    """A step that changes the schema alone."""
    kind, given = parts(step)
    entity = given["entity"]
    if kind == "rename":
        evolve.alter(tx, entity, {}, {given["field"]: given["to"]}, {}, (), {}, None, None)
    elif kind == "rename_entity":
        evolve.alter(tx, entity, {}, {}, {}, (), {}, given["to"], None)
    elif kind == "retype":
        evolve.alter(tx, entity, {}, {}, {given["field"]: given["to"]}, (), {}, None, None)
    elif kind == "add":
        evolve.alter(tx, entity, given["fields"], {}, {}, (), {}, None, None)
    elif given.get("field"):
        evolve.alter(tx, entity, {}, {}, {}, (given["field"],), {}, None, None)
    else:
        evolve.drop(tx, entity)


def _rewrite(
    tx: Tx,
    due: Sequence[tuple[str, Mapping[str, Any]]],
    wanted: Mapping[Key, Spec],
    naming: Callable[[str, str], AbstractContextManager[None]],
) -> None:
    """Go through the rows of an entity once, for all of these steps."""
    entity = tx.schema.get(parts(due[0][1])[1]["entity"])
    table = tx.work.table(entity)
    acts: list[tuple[str, _Set | _Backfill]] = []
    for label, step in due:
        with naming("migration", label):
            kind, given = parts(step)
            acts.append(
                (label, _Set(tx, entity, table, given, wanted) if kind == "set" else _Backfill(entity, table, given))
            )

    def changed() -> Iterator[tuple[int, Row, list[Stored]]]:
        for number, row in table.scan(tx.session, tx.chain):
            if tx.slices and not tx._in_slice(entity, table, number, row.values):
                continue
            after = list(row.values)
            for label, act in acts:
                try:
                    act(number, after)
                except LayerError:
                    with naming("migration", label):
                        raise
            if after != row.values:
                yield number, row, after

    fields = [f for _, act in acts for f in act.fields]
    places = sorted({place for f in fields for place in table.set(f, [None] * len(table.columns), None)})
    names = {f.name for _, act in acts if isinstance(act, _Set) for f in act.fields}
    with naming("migration", acts[-1][0]) if len(acts) == 1 else nullcontext():
        tx.rewrite(entity, changed(), tuple(places), names)
    for label, act in acts:
        if isinstance(act, _Backfill):
            with naming("migration", label):
                act.end(tx)


class _Backfill:
    """A step that converts what still has its old type."""

    def __init__(self, entity: Entity, table: Table, given: Mapping[str, Any]) -> None:
        self.entity, self.table, self.field = entity, table, entity.get(given["field"])
        if not self.field.was:
            raise Invalid(f"{entity.name}.{self.field.name} is not being retyped")
        self.fields, self.old = [self.field], table.index[self.field.was["store"]]
        self.done = self.lost = 0

    def __call__(self, number: int, values: list[Stored]) -> None:
        if values[self.old] is not None:
            stored = self.table.value(self.field, values)
            self.done += 1
            self.lost += stored is None
            self.table.set(self.field, values, stored)

    def end(self, tx: Tx) -> None:
        if self.lost:
            raise Conflict(
                f"{self.lost} of {self.done} values of {self.entity.name}.{self.field.name} can't be converted",
                hint="set them to something that can be, in a step before the retype",
            )
        evolve.retyped(tx, self.field)


class _Set:
    """A step that gives fields of all rows, or of those that meet a condition, a value or that of another field."""

    def __init__(
        self, tx: Tx, entity: Entity, table: Table, given: Mapping[str, Any], wanted: Mapping[Key, Spec]
    ) -> None:
        self.tx, self.entity, self.table = tx, entity, table
        self.predicate = compile_predicate(given["where"], tx.schema, entity) if given.get("where") else None
        self.fields = [entity.get(label) for label in given["values"]]
        self.values = [(f, _value(tx, entity, f, given["values"][f.name], wanted)) for f in self.fields]

    def __call__(self, number: int, values: list[Stored]) -> None:
        table = self.table
        if self.predicate is not None:
            state = table.named(self.entity, values, number)
            if self.predicate.test(Env(state, self.tx.policy.me, self.tx._follow)) is not True:
                return
        for f, value in [(f, turn(table, values)) for f, turn in self.values]:
            if value is None and f.required:
                raise Conflict(f"{self.entity.name}/{number} would have no {f.name}, which is required")
            table.set(f, values, value)


Turn = Callable[[Table, Sequence[Stored]], Stored]


def _value(tx: Tx, entity: Entity, f: Field, value: Any, wanted: Mapping[Key, Spec]) -> Turn:
    """What makes the new value from a row."""
    coming = wanted.get(("field", f"{entity.name}.{f.name}"), {}).get("options") or {}
    chosen = f.type in ("enum", "state")
    known = {
        *f.values,
        *coming.get("values", ()),
        *coming.get("transitions", ()),
    }  # also what only the coming version knows
    if isinstance(value, Mapping) and set(value) == {"$field"}:
        other = entity.get(value["$field"])
        if not convertible(other.type, f.type):
            raise Invalid(
                f"{entity.name}.{f.name}: {other.type} can't become {f.type}", hint="set it to a value instead"
            )
        if not chosen:
            return lambda table, values: convert(other.type, f.type, table.value(other, values))

        def choose(table: Table, values: Sequence[Stored]) -> Stored:
            found = convert(other.type, f.type, table.value(other, values))
            if found is not None and found not in known:
                raise Conflict(f"{entity.name}.{f.name}: {found!r:.60} is not one of its values")
            return found

        return choose
    if chosen and value in known:
        return lambda table, values: value
    stored = tx._encoded(entity, {f.name: value}, partial=True)[f.name]
    return lambda table, values: stored
