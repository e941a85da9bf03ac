"""The substrate's behaviour as a naive model: every transaction and every fork copies the whole state.

It is a specification to read, not an implementation to run fast: no deltas, no views, no history tables. A branch is a list
of full copies, `as_of` picks one, a merge compares three of them. Ids and times are the model's own (rows and steps are
counted from 1); the test maps them to the ids and tx numbers of a layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

Value = Any
Values = dict[str, Value]


class Refused(Exception):
    """The layer must refuse this and change nothing. `kind` names the error class."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind


class Unclear(Exception):
    """The specification does not say: nobody asks."""


# ---- values


def same(a: Value, b: Value) -> bool:
    """Equal as a stored value: type included, so 1, 1.0, True and Decimal("1.0") are four values."""
    return canonical(a) == canonical(b)


def canonical(value: Value) -> Value:
    """A comparable image of a value: datetimes as instants, decimals with their zeros, json by content."""
    if isinstance(value, datetime):
        return ("datetime", value.astimezone(UTC).isoformat())
    if isinstance(value, Decimal):
        return ("decimal", format(value, "f"))
    if isinstance(value, Row):
        return canonical_row(value)
    if isinstance(value, dict | list):
        return ("json", json.dumps(value, sort_keys=True, ensure_ascii=False))
    return (type(value).__name__, value)


class Ref(int):
    """A reference: the model's id of a row."""

    def __repr__(self) -> str:
        return f"Ref({int(self)})"


KINDS: dict[str, type] = {
    "text": str,
    "enum": str,
    "state": str,
    "int": int,
    "ref": Ref,
    "float": float,
    "decimal": Decimal,
    "bool": bool,
    "date": date,
    "datetime": datetime,
}


def convert(value: Value, old: str, new: str) -> Value:
    """A value seen through a retyped field."""
    if value is None or old == new:
        return value
    return {"decimal": Decimal, "text": str}[new](value)


# ---- predicates: ("field", "op", constant), ("and" | "or", p, q), ("not", p)


def sql(p: tuple[Any, ...]) -> str:
    if p[0] in ("and", "or") and len(p) == 3 and isinstance(p[1], tuple):
        return f"({sql(p[1])} {p[0]} {sql(p[2])})"
    if p[0] == "not" and len(p) == 2:
        return f"(not {sql(p[1])})"
    name, op, constant = p
    if op == "is null":
        return f"{name} is null"
    if op == "length >":
        return f"length({name}) > {constant}"
    return f"{name} {op} " + ("'" + constant.replace("'", "''") + "'" if isinstance(constant, str) else str(constant))


def holds(p: tuple[Any, ...], get: Callable[[str], Value]) -> bool | None:
    """Three-valued like SQL: None when a null decides."""
    if p[0] in ("and", "or") and len(p) == 3 and isinstance(p[1], tuple):
        a, b = holds(p[1], get), holds(p[2], get)
        decided = p[0] == "or"
        if a is decided or b is decided:
            return decided
        return None if a is None or b is None else not decided
    if p[0] == "not" and len(p) == 2:
        a = holds(p[1], get)
        return None if a is None else not a
    name, op, constant = p
    value = get(name)
    if op == "is null":
        return value is None
    if value is None:
        return None
    compare: dict[str, Callable[[Value, Value], bool]] = {
        "=": lambda a, b: a == b,
        "<>": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
        "length >": lambda a, b: len(a) > b,
    }
    return compare[op](value, constant)


def names_in(p: tuple[Any, ...] | None) -> set[str]:
    if p is None:
        return set()
    if p[0] == "not" and len(p) == 2:
        return names_in(p[1])
    return names_in(p[1]) | names_in(p[2]) if isinstance(p[1], tuple) else {p[0]}


# ---- schema and rows


@dataclass(frozen=True)
class Field:
    name: str
    type: str
    required: bool = False
    unique: bool = False
    default: Value = None
    check: tuple[Any, ...] | None = None
    to: int = 0
    on_delete: str = "restrict"
    values: tuple[str, ...] = ()
    initial: str | None = None
    transitions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    retyped: int = 0  # which retype it is in; two sides that both retype it clash
    pending: bool = False  # retyped and not backfilled


@dataclass(frozen=True)
class Entity:
    name: str
    unique: tuple[tuple[int, ...], ...] = ()
    fields: dict[int, Field] = field(default_factory=dict)  # by field id: a rename keeps the values

    def find(self, name: str) -> int:
        for number, f in self.fields.items():
            if f.name == name:
                return number
        raise Refused("invalid", f"no field {name!r} in {self.name!r}")

    def shape(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.fields.values())

    def keys(self) -> list[tuple[int, ...]]:
        """Every set of fields that must differ from row to row; one that lost a field is none."""
        return [(n,) for n, f in self.fields.items() if f.unique] + [
            key for key in self.unique if set(key) <= self.fields.keys()
        ]


@dataclass(frozen=True)
class Row:
    values: dict[int, Value]
    version: int | None  # the time of the last write; None where a backfill leaves it open

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and canonical_row(self) == canonical_row(other)


def canonical_row(row: Row) -> dict[int, Value]:
    return {number: canonical(value) for number, value in row.values.items() if value is not None}


@dataclass
class State:
    """Everything a branch holds at one time."""

    entities: dict[int, Entity] = field(default_factory=dict)
    rows: dict[int, dict[int, Row]] = field(default_factory=dict)

    def copy(self) -> State:
        return State(
            {number: replace(e, fields=dict(e.fields)) for number, e in self.entities.items()},
            {number: dict(rows) for number, rows in self.rows.items()},
        )

    def find(self, name: str) -> int:
        for number, entity in self.entities.items():
            if entity.name == name:
                return number
        raise Refused("invalid", f"no entity {name!r}")

    def named(self, e: int, row_id: int) -> Values:
        """A row under its field names."""
        row = self.rows[e][row_id].values
        return {f.name: row.get(n) for n, f in self.entities[e].fields.items()}

    def table(self, name: str) -> dict[int, Values]:
        """What `select * from name` shows, by id."""
        e = self.find(name)
        return {i: self.named(e, i) for i in self.rows[e]}


Scope = dict[int, tuple[Any, ...] | None] | None  # a slice: what a branch sees of each entity; None = everything


class Writer:
    """One transaction over a copy of a state: the caller drops it when anything is refused."""

    def __init__(self, state: State, now: int, scope: Scope = None) -> None:
        self.state, self.now, self.scope = state.copy(), now, scope
        self.touched: dict[tuple[int, int], set[int]] = {}  # row -> fields that were set

    def insert(self, entity: str, values: Values, row_id: int) -> None:
        e = self.state.find(entity)
        fields = self.state.entities[e].fields
        given = {self.state.entities[e].find(name): value for name, value in values.items()}
        row = {n: coerce(f, given[n]) if n in given else (f.initial or f.default) for n, f in fields.items()}
        for n, f in fields.items():
            if f.required and row[n] is None:
                raise Refused("invalid", f"{f.name} is required")
            if f.type == "state" and row[n] != f.initial:
                raise Refused("invalid", f"{f.name} begins as {f.initial}")
        self.put(e, row_id, row, set(fields))

    def update(self, entity: str, row_id: int, values: Values, expect: str | None = None) -> None:
        e = self.state.find(entity)
        fields = self.state.entities[e].fields
        given = {self.state.entities[e].find(name): value for name, value in values.items()}
        given = {n: coerce(fields[n], value) for n, value in given.items()}
        for n, value in given.items():
            if fields[n].required and value is None:
                raise Refused("invalid", f"{fields[n].name} is required")
        row = self._get(e, row_id, expect)
        for n, value in given.items():
            old = row.values.get(n)
            if fields[n].type == "state" and value != old and value not in dict(fields[n].transitions)[old]:
                raise Refused("invalid", f"{fields[n].name}: {old} -> {value}")
        self.put(e, row_id, row.values | given, set(given))

    def upsert(self, entity: str, values: Values, on: list[str], row_id: int) -> int:
        e = self.state.find(entity)
        key = {self.state.entities[e].find(name): values.get(name) for name in on}
        if None in key.values():
            raise Refused("invalid", "upsert needs a value for each field of `on`")
        wanted = {n: coerce(self.state.entities[e].fields[n], value) for n, value in key.items()}
        for i, row in self.state.rows[e].items():
            if all(row.values.get(n) == value for n, value in wanted.items()):
                self.update(entity, i, {name: value for name, value in values.items() if name not in on})
                return i
        self.insert(entity, values, row_id)
        return row_id

    def delete(self, entity: str, row_id: int, expect: str | None = None) -> None:
        e = self.state.find(entity)
        self._get(e, row_id, expect)
        self.remove({(e, row_id)})

    def put(self, e: int, row_id: int, values: dict[int, Value], names: set[int]) -> None:
        """Write a row; what concerns this row alone must hold at once."""
        self.state.rows[e][row_id] = Row(values, self.now)
        self.touched.setdefault((e, row_id), set()).update(names)
        by_name = self.state.named(e, row_id)
        if self.scope is not None and not (self.scope[e] is None or holds(self.scope[e] or (), by_name.__getitem__)):
            raise Refused("denied", "outside the branch's slice")
        for f in self.state.entities[e].fields.values():
            if f.check and holds(f.check, by_name.__getitem__) is False:
                raise Refused("invalid", f"{f.name}: check {sql(f.check)}")

    def remove(self, gone: set[tuple[int, int]]) -> None:
        """Delete rows. Those that refer to them decide: restrict refuses, cascade goes too, null lets go."""
        while more := {(e, i) for e, i, _, on_delete in self._referring(gone) if on_delete == "cascade"} - gone:
            gone = gone | more
        for e, i in gone:
            self.state.rows[e].pop(i, None)
            self.touched.pop((e, i), None)
        for e, i, n, on_delete in list(self._referring(gone)):
            if on_delete == "restrict":
                raise Refused("conflict", f"{self.state.entities[e].name} {i} refers to it")
            self.put(e, i, self.state.rows[e][i].values | {n: None}, {n})

    def finish(self) -> State:
        """What concerns several rows must hold when the transaction ends: references lead somewhere, unique values are."""
        for (e, i), names in self.touched.items():
            row, fields = self.state.rows[e][i].values, self.state.entities[e].fields
            for n in names & fields.keys():
                if (
                    fields[n].type == "ref"
                    and row.get(n) is not None
                    and row[n] not in self.state.rows.get(fields[n].to, {})
                ):
                    raise Refused("invalid", f"{fields[n].name}: there is no {row[n]}")
            for key in self.state.entities[e].keys():
                if names & set(key) and (other := self.twin(e, i, key)):
                    raise Refused("conflict", f"unique {[fields[n].name for n in key]}: row {other} has it")
        return self.state

    def twin(self, e: int, row_id: int, key: tuple[int, ...]) -> int | None:
        """Another row with the same values in these fields; nulls are never the same."""
        mine = [self.state.rows[e][row_id].values.get(n) for n in key]
        for other, row in self.state.rows[e].items():
            if other != row_id and None not in mine and [row.values.get(n) for n in key] == mine:
                return other
        return None

    def _referring(self, targets: set[tuple[int, int]]) -> Iterator[tuple[int, int, int, str]]:
        for e, entity in self.state.entities.items():
            for n, f in entity.fields.items():
                for i, row in self.state.rows[e].items():
                    if f.type == "ref" and (f.to, row.values.get(n)) in targets:
                        yield e, i, n, f.on_delete

    def _get(self, e: int, row_id: int, expect: str | None) -> Row:
        if row_id not in self.state.rows[e]:
            raise Refused("notfound", f"no {self.state.entities[e].name} {row_id}")
        if expect == "stale":
            raise Refused("conflict", f"{self.state.entities[e].name} {row_id} was written since")
        return self.state.rows[e][row_id]


def coerce(f: Field, value: Value) -> Value:
    """The value as it will be read back, or refused."""
    if value is None:
        return None
    if f.type == "json":
        return json_value(value)
    if f.type in ("float", "decimal") and type(value) is int:
        value = KINDS[f.type](value)
    if type(value) is not KINDS[f.type]:
        raise Refused("invalid", f"{f.name}: {value!r} is no {f.type}")
    wrong = {
        "text": lambda: "\0" in value or SURROGATE.search(value),
        "int": lambda: not -(2**63) <= value < 2**63,
        "float": lambda: value != value or abs(value) == float("inf"),
        "decimal": lambda: not value.is_finite(),
        "datetime": lambda: value.tzinfo is None,
        "enum": lambda: value not in f.values,
        "state": lambda: value not in dict(f.transitions),
    }
    if f.type in wrong and wrong[f.type]():
        raise Refused("invalid", f"{f.name}: {value!r}")
    return value


SURROGATE = re.compile("[\ud800-\udfff]")


def json_value(value: Value) -> Value:
    if isinstance(value, dict):
        return {coerce(TEXT, k): json_value(v) for k, v in value.items()}
    if isinstance(value, list):
        return [json_value(v) for v in value]
    if isinstance(value, float):
        return coerce(FLOAT, value)
    if isinstance(value, str):
        return coerce(TEXT, value)
    if value is None or isinstance(value, int):
        return value
    raise Refused("invalid", f"{value!r} is no json")


TEXT, FLOAT = Field("a text", "text"), Field("a float", "float")


# ---- branches


@dataclass
class Branch:
    name: str
    parent: str | None
    cut: int  # the time of the parent it starts from
    scope: Scope
    history: list[tuple[int, State]]
    base: State  # itself at the last sync with its parent
    open: bool = True
    conflicts: list[Clash] = field(default_factory=list)
    resolved: dict[Clash, tuple[str, Value]] = field(default_factory=dict)

    @property
    def head(self) -> State:
        return self.history[-1][1]


@dataclass(frozen=True, eq=False)
class Clash:
    """A conflict of a merge: one cell, or a whole row (`field` is None). Rows of the schema are of entity 0."""

    entity: int
    row: int
    field: int | None
    base: Value
    ours: Value
    theirs: Value
    names: tuple[str, str | None] = ("", None)  # entity and field, as the merged schema calls them
    shape: tuple[str, ...] = ()  # the fields a row had, so that one that looks different now is another clash

    def image(self) -> tuple[Any, ...]:
        return (
            self.entity,
            self.row,
            self.field,
            self.names,
            self.shape,
            *map(canonical, (self.base, self.ours, self.theirs)),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Clash) and self.image() == other.image()

    def __hash__(self) -> int:
        return hash(repr(self.image()))


class Oracle:
    """A whole layer. Every method that changes something advances `now` by one or raises Refused."""

    def __init__(self) -> None:
        self.now = 0
        self.ids = 0
        self.all = {"main": Branch("main", None, 0, None, [(0, State())], State())}

    def id(self) -> int:
        self.ids += 1
        return self.ids

    @property
    def branches(self) -> dict[str, Branch]:
        return {name: b for name, b in self.all.items() if b.open}

    def branch(self, name: str) -> Branch:
        if name not in self.branches:
            raise Refused("notfound", f"no branch {name!r}")
        return self.all[name]

    def head(self, branch: str) -> State:
        return self.branch(branch).head

    def at(self, branch: str, time: int) -> State:
        """The branch as it was; before its fork that is its parent, seen through its slice."""
        b = self.all[branch]
        if time < b.cut and b.parent:
            before, first = self.at(b.parent, time), b.history[0][1]
            if any(
                e in before.entities and before.entities[e].name != entity.name
                for e, entity in first.entities.items()
                if b.scope
            ):
                raise Unclear("the slice calls an entity by a name it had not yet")
            return sliced(before, b.scope)
        return [state for t, state in b.history if t <= time][-1]

    def commit(self, branch: str, state: State) -> None:
        self.now += 1
        self.all[branch].history.append((self.now, state))

    def versions(self, branch: str) -> dict[tuple[str, int], int | None]:
        """When each row was written last."""
        if branch not in self.branches:
            return {}
        state = self.head(branch)
        return {
            (entity.name, i): row.version for e, entity in state.entities.items() for i, row in state.rows[e].items()
        }

    # ---- writes

    def write(self, branch: str, operations: list[tuple[Any, ...]], style: str = "tx") -> list[int | None]:
        """All of the operations or none: ("insert", entity, values, id) and so on. Returns the id an upsert found."""
        writer = Writer(self.head(branch), self.now + 1, self.branch(branch).scope)
        found = [getattr(writer, verb)(*args) for verb, *args in operations]
        self.commit(branch, writer.finish())
        return found

    # ---- schema

    def define(
        self, branch: str, name: str, fields: dict[str, dict[str, Any]], unique: list[list[str]], ids: list[int]
    ) -> None:
        state = self.head(branch).copy()
        numbers = dict(zip(fields, ids[1:], strict=True))
        state.entities[ids[0]] = Entity(name, tuple(tuple(numbers[k] for k in key) for key in unique))
        state.entities[ids[0]].fields.update({numbers[k]: make_field(state, k, spec) for k, spec in fields.items()})
        state.rows[ids[0]] = {}
        self.commit(branch, state)

    def alter(self, branch: str, entity: str, ids: list[int], changes: dict[str, Any]) -> None:
        """Rename, retype, change, drop, add fields, or rename the entity. Rows that are there keep what they have."""
        writer = Writer(self.head(branch), self.now + 1)
        state = writer.state
        e = state.find(entity)
        fields = state.entities[e].fields
        find = state.entities[e].find
        for name, new in changes.get("rename", {}).items():
            fields[find(name)] = replace(fields[find(name)], name=new)
        for name, kind in changes.get("retype", {}).items():
            n = find(name)
            if fields[n].pending:
                raise Refused("conflict", f"{name} is being retyped already")
            if any(n in key for key in state.entities[e].keys()):
                raise Refused("invalid", f"{name} is unique")
            for i, row in state.rows[e].items():
                value = convert(row.values.get(n), fields[n].type, kind)
                state.rows[e][i] = replace(row, values=row.values | {n: value})
            default = convert(fields[n].default, fields[n].type, kind)
            fields[n] = replace(fields[n], type=kind, default=default, retyped=ids[0], pending=True)
        for name, options in changes.get("change", {}).items():
            n = find(name)
            fields[n] = replace(fields[n], **options)
            if fields[n].required and fields[n].on_delete == "null" and fields[n].type == "ref":
                raise Refused("invalid", "a required reference can't become null")
        for name in changes.get("drop", ()):
            del fields[find(name)]
        for (name, spec), n in zip(changes.get("add", {}).items(), ids, strict=False):
            fields[n] = make_field(state, name, spec)
        state.entities[e] = replace(state.entities[e], name=changes.get("name", entity))
        scope = self.branch(branch).scope
        if scope is not None and "name" in changes:
            raise Refused("invalid", "the slice names it")
        fit(state.entities, scope)
        demand(writer, e)
        self.commit(branch, state)

    def backfill(self, branch: str, entity: str, name: str) -> None:
        """Writes the rows anew that still have the old type: nothing changes but their versions."""
        state = self.head(branch).copy()
        e = state.find(entity)
        n = state.entities[e].find(name)
        if not state.entities[e].fields[n].pending:
            raise Refused("invalid", f"{name} is not being retyped")
        state.entities[e].fields[n] = replace(state.entities[e].fields[n], pending=False)
        state.rows[e] = {i: replace(row, version=None) for i, row in state.rows[e].items()}
        self.commit(branch, state)

    def drop(self, branch: str, entity: str) -> None:
        state = self.head(branch).copy()
        e = state.find(entity)
        if any(f.to == e for x, other in state.entities.items() if x != e for f in other.fields.values()):
            raise Refused("conflict", "other entities refer to it")
        del state.entities[e], state.rows[e]
        self.commit(branch, state)

    # ---- fork and merge

    def fork(self, name: str, source: str, slice_: dict[str, tuple[Any, ...] | None] | None, ago: int | None) -> None:
        """A new branch that begins as its source is, or was so many steps ago."""
        outer = self.branch(source).scope
        cut = max(0, self.now - (ago or 0))
        state = self.at(source, cut)
        scope = None if slice_ is None else {state.find(k): p for k, p in slice_.items()}
        if outer is not None:
            scope = {e: both(p, outer[e]) for e, p in (outer if scope is None else scope).items() if e in outer}
        state = sliced(state, scope).copy()
        self.all[name] = Branch(name, source, cut, scope, [(cut, state)], state)
        self.now += 1

    def discard(self, name: str) -> None:
        if self.branch(name).parent is None:
            raise Refused("invalid", "main stays")
        self.all[name].open = False
        self.now += 1

    def merge(self, name: str, preview: bool) -> tuple[bool, list[Clash]]:
        """Three-way, per cell: take ours where the parent still has the base. With a clash nothing is applied."""
        b = self.branch(name)
        if b.parent is None or not self.all[b.parent].open:
            raise Refused("invalid", "no parent to merge into")
        target = self.all[b.parent]
        entities, clashes = merge_schema(b.base, b.head, target.head)
        if not clashes:
            base, ours, theirs = (retyped(s, entities) for s in (b.base, b.head, target.head))
            writer = Writer(theirs, self.now + 1, target.scope)
            clashes = merge_rows(writer, base, ours, theirs, b.resolved)
            lost = {e for e in b.base.entities.keys() & b.head.entities.keys() if e not in target.head.entities}
            clashes += lost_rows(b, lost)
        if not clashes:
            for e in lost:
                if b.head.entities[e].fields.keys() - b.base.entities[e].fields.keys():
                    raise Refused("invalid", "a new field of an entity the parent has dropped")
            fit(entities, target.scope)
            for e in entities:
                if e in target.head.entities and entities[e] != target.head.entities[e]:
                    demand(writer, e)
            state = writer.finish()
        if preview:
            return False, clashes
        b.conflicts = clashes
        if clashes:
            self.now += 1
            return False, clashes
        self.commit(b.parent, state)
        b.base, b.resolved = b.head, {}
        return True, []

    def resolve(self, name: str, key: tuple[int, int, int | None], take: str, value: Value) -> None:
        """Decide a clash; the next merge that meets the very same one takes it."""
        b = self.branch(name)
        for clash in b.conflicts:
            if (clash.entity, clash.row, clash.field) == key:
                if take == "value" and clash.field is not None:
                    value = coerce(b.head.entities[clash.entity].fields[clash.field], value)
                b.conflicts.remove(clash)
                b.resolved[clash] = (take, value)
                self.now += 1
                return
        raise Refused("notfound", "no such conflict")

    def diff(self, name: str) -> dict[tuple[str, int], tuple[str, dict[str, tuple[Value, Value]]]]:
        """What the branch changed since its fork or last merge, by row: the verb and each field's before and after."""
        b = self.branch(name)
        found: dict[tuple[str, int], tuple[str, dict[str, tuple[Value, Value]]]] = {}
        if b.parent is None:
            return found
        base = retyped(b.base, b.head.entities)
        head = retyped(b.head, b.head.entities)
        for e, i in changed(base, head):
            before, after = base.rows[e].get(i), head.rows[e].get(i)
            verb = "insert" if before is None else "delete" if after is None else "update"
            entity = b.head.entities[e]
            cells = {}
            for n, f in entity.fields.items():
                pair = (before and before.values.get(n), after and after.values.get(n))
                if not same(*pair):
                    cells[f.name] = pair
            found[entity.name, i] = (verb, cells)
        return found


def make_field(state: State, name: str, spec: dict[str, Any]) -> Field:
    spec = dict(spec)
    if "to" in spec:
        spec["to"] = state.find(spec["to"])
    spec["required"] = spec.get("required", False) or spec["type"] == "state"  # there is no state of no state
    spec["values"] = tuple(spec.get("values", ()))
    spec["transitions"] = tuple((k, tuple(v)) for k, v in spec.get("transitions", {}).items())
    return Field(name=name, **spec)


def fit(entities: dict[int, Entity], scope: Scope) -> None:
    """Checks and slices go on naming fields that are there, of a type they can compare."""
    for e, entity in entities.items():
        types = {f.name: f.type for f in entity.fields.values()}
        for p in [scope.get(e) if scope else None, *(f.check for f in entity.fields.values())]:
            if p and not typed(p, types):
                raise Refused("invalid", f"{sql(p)} does not fit {entity.name}")


def typed(p: tuple[Any, ...], types: dict[str, str]) -> bool:
    if p[0] == "not" and len(p) == 2:
        return typed(p[1], types)
    if isinstance(p[1], tuple):
        return typed(p[1], types) and typed(p[2], types)
    number = isinstance(p[2], int | Decimal) and p[1] != "length >"
    return p[0] in types and (p[1] == "is null" or (types[p[0]] in ("int", "decimal")) == number)


def demand(writer: Writer, e: int) -> None:
    """Rows that are there must meet what their schema newly asks: a value, a unique one, a check."""
    entity = writer.state.entities[e]
    for i, row in writer.state.rows[e].items():
        for n, f in entity.fields.items():
            if f.required and row.values.get(n) is None:
                raise Refused("conflict", f"{entity.name} {i} has no {f.name}")
            if f.check and holds(f.check, writer.state.named(e, i).__getitem__) is False:
                raise Refused("invalid", f"{entity.name} {i}: check {sql(f.check)}")
        for key in entity.keys():
            if writer.twin(e, i, key):
                raise Refused("conflict", f"{entity.name} {i} is not unique")


def both(p: tuple[Any, ...] | None, q: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return p if q is None else q if p is None else ("and", p, q)


def sliced(state: State, scope: Scope) -> State:
    """The part of a state a slice shows."""
    if scope is None:
        return state
    result = State()
    for e, p in scope.items():
        if e in state.entities:
            if p and not typed(p, {f.name: f.type for f in state.entities[e].fields.values()}):
                raise Unclear("the slice names a field that was not there yet, or had another name or type")
            result.entities[e] = state.entities[e]
            result.rows[e] = {
                i: r for i, r in state.rows[e].items() if p is None or holds(p, state.named(e, i).__getitem__)
            }
    return result


def changed(before: State, after: State) -> list[tuple[int, int]]:
    """Rows that differ in content, in the order of their ids."""
    keys = {(e, i) for s in (before, after) for e, rows in s.rows.items() for i in rows}
    return sorted((e, i) for e, i in keys if before.rows.get(e, {}).get(i) != after.rows.get(e, {}).get(i))


def retyped(state: State, entities: dict[int, Entity]) -> State:
    """The state's rows as another schema sees them: its entities, its fields, its types."""
    rows: dict[int, dict[int, Row]] = {}
    for e, entity in entities.items():
        have = state.entities[e].fields if e in state.entities else {}
        rows[e] = {}
        for i, row in state.rows.get(e, {}).items():
            cells = {n: convert(row.values.get(n), have[n].type, f.type) for n, f in entity.fields.items() if n in have}
            rows[e][i] = replace(row, values=cells)
    return State(entities, rows)


def merge_rows(
    writer: Writer, base: State, ours: State, theirs: State, resolved: dict[Clash, tuple[str, Value]]
) -> list[Clash]:
    """Write into the target what the branch changed; all three states have the merged schema."""
    clashes: list[Clash] = []
    gone = set()

    def decided(clash: Clash) -> tuple[Value, Value]:
        """The resolution of this very clash, or the clash is noted and theirs stays."""
        if clash not in resolved:
            clashes.append(clash)
            return clash.theirs
        take, value = resolved[clash]
        return value if take == "value" else getattr(clash, take)

    for e, i in changed(base, ours):
        entity = writer.state.entities[e]
        b, o, t = (s.rows[e].get(i) for s in (base, ours, theirs))
        if o == t:
            continue
        if t == b:
            new = o
        elif b is None or o is None or t is None:
            new = decided(Clash(e, i, None, b, o, t, (entity.name, None), entity.shape()))
        else:
            cells = dict(t.values)
            for n, f in entity.fields.items():
                x, y, z = b.values.get(n), o.values.get(n), t.values.get(n)
                if same(x, y) or same(y, z):
                    continue
                cells[n] = y if same(x, z) else decided(Clash(e, i, n, x, y, z, (entity.name, f.name)))
            new = Row(cells, writer.now)
        if new == t:
            continue
        if new is None:
            gone.add((e, i))
            continue
        for n, f in entity.fields.items():
            if f.required and new.values.get(n) is None:
                raise Refused("invalid", f"{f.name} is required")
        old = t.values if t else {}
        writer.put(e, i, dict(new.values), {n for n in entity.fields if not same(new.values.get(n), old.get(n))})
    writer.remove(gone)
    return clashes


def lost_rows(b: Branch, dropped: set[int]) -> list[Clash]:
    """Rows the branch changed of entities its parent has dropped."""
    found = []
    for e, i in changed(b.base, b.head):
        if e in dropped:
            clash = Clash(
                e, i, None, b.base.rows[e].get(i), b.head.rows[e].get(i), None, (b.head.entities[e].name, None)
            )
            if clash not in b.resolved:
                found.append(clash)
    return found


def merge_schema(base: State, ours: State, theirs: State) -> tuple[dict[int, Entity], list[Clash]]:
    """The merged entities: rows of entities and fields merge like data, attribute by attribute."""
    b, o, t = schema_rows(base), schema_rows(ours), schema_rows(theirs)
    clashes = []
    for key in sorted(b.keys() | o.keys()):
        x, y, z = b.get(key), o.get(key), t.get(key)
        if x == y or y == z:
            continue
        if x == z:
            t.pop(key, None)
            if y is not None:
                t[key] = y
        elif x is None or y is None or z is None:
            clashes.append(Clash(0, key[1], None, x, y, z))
        else:
            for k in y:
                if x[k] != y[k] and y[k] != z[k] and x[k] != z[k]:
                    clashes.append(Clash(0, key[1], None, x, y, z))
            t[key] = {k: z[k] if x[k] == y[k] else y[k] for k in y}
    entities = {e: Entity(row["name"], row["unique"]) for (e, n), row in t.items() if n == 0}
    for (e, n), row in sorted(t.items()):
        if n and e in entities:
            entities[e].fields[n] = Field(**{k: v for k, v in row.items() if k != "target"})
    return entities, clashes


def schema_rows(state: State) -> dict[tuple[int, int], dict[str, Any]]:
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for e, entity in state.entities.items():
        rows[e, 0] = {"name": entity.name, "unique": entity.unique}
        for n, f in entity.fields.items():
            # A reference is stored with its target's name, so that a rename of the target is a change of the field.
            rows[e, n] = {**vars(f), "target": state.entities[f.to].name if f.to in state.entities else None}
    return rows
