"""Random histories against the full-copy oracle: a layer and the model run the same operations and must agree on everything.

A failure prints its operations and saves them; `LAYER_TEST_ORACLE_REPLAY=FILE pytest tests/substrate/test_oracle.py -k replay`
runs them again and checks everything after each step. The long form takes `LAYER_TEST_ORACLE_OPS` and `LAYER_TEST_ORACLE_SEEDS`.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from substrate import oracle as model
from substrate.oracle import Field, Oracle, Ref, Refused, State, Unclear, Writer, canonical, names_in, sql

import livinglayer
from livinglayer.errors import Conflict, Denied, Invalid, LayerError, NotFound

Op = tuple[Any, ...]
Location = Callable[[], str]
Choose = Callable[[random.Random, Oracle], "Op | None"]
KINDS = {"invalid": Invalid, "conflict": Conflict, "notfound": NotFound, "denied": Denied}
INDIA = timezone(timedelta(hours=5, minutes=30))
POOL: dict[str, list[Any]] = {
    "text": [
        "",
        " ",
        "a",
        "A",
        "bolt",
        "it's",
        'quo"te',
        "a\nb",
        "%s :x \\",
        "Äöü",
        "e\u0301",
        "日本語",
        "😀",
        "\u202eabc",
        "null",
    ],
    "int": [-(2**63), -7, -1, 0, 1, 2, 3, 4, 5, 2**53 + 1, 2**63 - 1],
    "float": [0.0, -1.5, 0.1, 3.0, 1e300, 5e-324, 2.0**63],
    "decimal": [
        Decimal(t) for t in ("0", "0.00", "1", "1.0", "1.50", "-2.500", "100", "12345678901234567890.0123456789")
    ],
    "bool": [True, False],
    "date": [date(1, 1, 1), date(1969, 12, 31), date(2024, 2, 29), date(9999, 12, 31)],
    "datetime": [
        datetime(2024, 2, 29, 12, 0, tzinfo=UTC),
        datetime(2024, 2, 29, 17, 30, tzinfo=INDIA),  # the same instant
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=timezone(timedelta(hours=-11))),
        datetime(2100, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    ],
    "json": [
        {},
        [],
        "x",
        0,
        True,
        1.0,
        1e22,
        {"b": [1, 2.5, None], "a": {"ü": "\u2028"}},
        [2**63, -1],
        {"a": {"ü": 1}},
    ],
}
BAD: dict[str, list[Any]] = {
    "text": ["nul\0", "\ud800", 3, b"x", True],
    "int": [2**63, -(2**63) - 1, "3", 1.0, True],
    "float": [float("nan"), float("inf"), "1", True],
    "decimal": [Decimal("NaN"), Decimal("Infinity"), 1.5, True, "x"],
    "bool": [1, "true"],
    "date": ["never", 5, datetime(2024, 1, 1, tzinfo=UTC)],
    "datetime": [datetime(2024, 1, 1), "soon", date(2024, 1, 1)],
    "json": [float("nan"), {1, 2}, {"a": "nul\0"}],
    "enum": ["z", "", 1],
    "state": ["gone", "", 1],
    "ref": ["1", Ref(10**9), 1.0],
}

STOCK: list[Op] = [
    ("define", "main", "person", {"name": {"type": "text", "required": True, "unique": True},
     "boss": {"type": "ref", "to": "person", "on_delete": "null"}, "age": {"type": "int", "check": ("age", ">=", 0)}}, [], [1, 2, 3, 4]),
    ("define", "main", "item", {"name": {"type": "text", "required": True}, "qty": {"type": "int"}, "price": {"type": "decimal"},
     "sku": {"type": "text", "unique": True, "check": ("sku", "length >", 0)}, "seen": {"type": "datetime"}, "extra": {"type": "json"},
     "kind": {"type": "enum", "values": ["a", "b", "c"], "default": "a"}, "owner": {"type": "ref", "to": "person", "on_delete": "restrict"},
     "status": {"type": "state", "initial": "new", "transitions": {"new": ["open"], "open": ["done", "new"], "done": []}}},
     [], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]),
    ("define", "main", "part", {"item": {"type": "ref", "to": "item", "on_delete": "cascade", "required": True}, "label": {"type": "text"},
     "size": {"type": "int"}, "ok": {"type": "bool", "default": True}, "made": {"type": "date"}, "weight": {"type": "float"}},
     [["item", "label"]], [15, 16, 17, 18, 19, 20, 21]),
]  # fmt: skip
IDS = 21


# ---- one operation, chosen by `r` among those the model's state makes interesting


def write(r: random.Random, o: Oracle) -> Op:
    """One to five row operations on a branch; mostly acceptable ones, so that a transaction gets somewhere."""
    branch = r.choice(sorted(o.branches))
    b = o.branches[branch]
    scratch = Writer(b.head, o.now + 1, b.scope)
    operations: list[Op] = []
    for _ in range(1 if r.random() < 0.6 else r.randint(2, 5)):
        for _ in range(5):
            operation = row_operation(r, o, scratch.state)
            if operation is None:
                break
            attempt = Writer(scratch.state, o.now + 1, b.scope)
            try:
                getattr(attempt, operation[0])(*operation[1:])
                attempt.finish()
            except Refused:
                if r.random() < 0.8:
                    continue
            else:
                scratch = attempt
            operations.append(operation)
            break
    inserts = (
        len(operations) > 1
        and len({(verb, entity) for verb, entity, *_ in operations}) == 1
        and operations[0][0] == "insert"
    )
    style = "one" if len(operations) == 1 and r.random() < 0.7 else "many" if inserts else "tx"
    return ("write", branch, operations, style)


def row_operation(r: random.Random, o: Oracle, state: State) -> Op | None:
    if not state.entities:
        return None
    e = r.choice(sorted(state.entities))
    entity, rows = state.entities[e], state.rows[e]
    fields = list(entity.fields.values())
    chance = r.random()
    if not rows or (chance < 0.35 and len(rows) < 12):
        given = {f.name: some_value(r, f, state) for f in fields if f.required or r.random() < 0.7}
        return ("insert", entity.name, {k: v for k, v in given.items() if v is not MISSING}, o.id())
    row_id = r.choice(sorted(rows)) if r.random() < 0.97 else 10**9
    expect = None
    if r.random() < 0.15 and row_id in rows:
        version = rows[row_id].version
        if version is not None and version <= o.now:  # not what this very transaction wrote
            expect = "current" if r.random() < 0.7 else "stale"
    if chance < 0.8 and fields:
        some = r.sample(fields, min(len(fields), r.choice([1, 1, 1, 2, 3])))
        new = {f.name: some_value(r, f, state, rows.get(row_id)) for f in some}
        new = {k: v for k, v in new.items() if v is not MISSING}
        if r.random() < 0.02:
            new["no_such_field"] = 1
        return ("update", entity.name, row_id, new, expect)
    if chance < 0.9 and (keys := [f for f in fields if f.unique]):
        key = r.choice(keys)
        known = [value for i in rows if (value := state.named(e, i)[key.name]) is not None]
        given = {f.name: some_value(r, f, state) for f in fields if f.required or r.random() < 0.3}
        given = {k: v for k, v in given.items() if v is not MISSING}
        given[key.name] = r.choice(known) if known and r.random() < 0.6 else r.choice(POOL[key.type])
        return ("upsert", entity.name, given, [key.name], o.id())
    return ("delete", entity.name, row_id, expect)


MISSING = object()


def some_value(r: random.Random, f: Field, state: State, row: model.Row | None = None) -> Any:
    if r.random() < 0.02:
        return r.choice(BAD[f.type])
    if r.random() < (0.02 if f.required or f.type == "state" else 0.15):
        return None
    if f.type == "ref":
        rows = sorted(state.rows.get(f.to, {}))
        return Ref(r.choice(rows)) if rows else None
    if f.type == "enum":
        return r.choice(f.values)
    if f.type == "state":
        return r.choice([s for s, _ in f.transitions]) if row else MISSING
    return r.choice(POOL[f.type])


def define(r: random.Random, o: Oracle) -> Op | None:
    branch = r.choice(sorted(o.branches))
    state = o.head(branch)
    if len(state.entities) >= 6 or o.branches[branch].scope is not None:  # it would lie outside
        return None
    fields = {f"f{o.id()}": some_field(r, state) for _ in range(r.randint(1, 4))}
    unique = (
        [[r.choice(sorted(fields))]]
        if r.random() < 0.2 and all(f["type"] in ("int", "text") for f in fields.values())
        else []
    )
    return ("define", branch, f"e{o.id()}", fields, unique, [o.id() for _ in range(len(fields) + 1)])


def some_field(r: random.Random, state: State) -> dict[str, Any]:
    kind = r.choice([*POOL, "int", "int", "enum", "ref"])
    if kind == "enum":
        return {"type": "enum", "values": ["x", "y"]}
    if kind == "ref":
        if not state.entities:
            return {"type": "text"}
        to = state.entities[r.choice(sorted(state.entities))].name
        return {"type": "ref", "to": to, "on_delete": r.choice(["restrict", "cascade", "null"])}
    options: dict[str, Any] = {"unique": True} if kind in ("int", "text") and r.random() < 0.15 else {}
    if kind in ("int", "bool", "text") and not options and r.random() < 0.3:
        options = {"default": r.choice(POOL[kind])}
    if r.random() < 0.1:
        options["required"] = True  # refused where there are rows
    return {"type": kind, **options}


def alter(r: random.Random, o: Oracle) -> Op | None:
    """One change of one entity."""
    branch = r.choice(sorted(o.branches))
    state = o.head(branch)
    if not state.entities:
        return None
    e = r.choice(sorted(state.entities))
    entity = state.entities[e]
    free = [f for _, f in sorted(entity.fields.items())]
    if r.random() < 0.8:  # mostly fields that no check and no slice of this branch names
        scope = o.branches[branch].scope
        fixed = set().union(*(names_in(p) for p in [scope[e] if scope else None, *(f.check for f in free)]))
        free = [f for f in free if f.name not in fixed]
    kind = r.choice(["add", "add", "rename", "retype", "retype", "drop", "change", "name", "drop entity", "backfill"])
    if any(f.pending for f in free) and r.random() < 0.4:
        kind = "backfill"
    ids: list[int] = []
    change: dict[str, Any] = {}
    if kind == "add" and len(entity.fields) < 12:
        change, ids = {"add": {f"f{o.id()}": some_field(r, state)}}, [o.id()]
    elif kind == "rename" and free:
        change = {"rename": {r.choice(free).name: f"f{o.id()}"}}
    elif kind == "retype" and (ints := [f for f in free if f.type == "int"]):
        change, ids = {"retype": {r.choice(ints).name: r.choice(["decimal", "text"])}}, [o.id()]
    elif kind == "drop" and len(free) > 1:
        change = {"drop": [r.choice(free).name]}
    elif kind == "change" and (options := [f for f in free if f.type != "state"]):
        f = r.choice(options)
        option = "unique" if f.type in ("int", "text") and r.random() < 0.3 else "required"
        change = {"change": {f.name: {option: not getattr(f, option)}}}
    elif kind == "name":
        change = {"name": f"e{o.id()}"}
    elif kind == "backfill":
        pending = [f.name for f in entity.fields.values() if f.pending]
        if not pending and (not entity.fields or r.random() < 0.8):
            return None
        return ("backfill", branch, entity.name, r.choice(pending or [f.name for f in entity.fields.values()]))
    elif kind == "drop entity" and r.random() < 0.3 and o.branches[branch].scope is None:
        return ("drop", branch, entity.name)
    return ("alter", branch, entity.name, ids, change) if change else None


def fork(r: random.Random, o: Oracle) -> Op | None:
    if len(o.branches) >= 6:
        return None
    source = r.choice(sorted(o.branches))
    ago = r.randint(0, o.now - len(STOCK)) if r.random() < 0.3 else None
    try:
        state = o.at(source, o.now - (ago or 0))
    except Unclear:
        return None
    slice_: dict[str, Any] | None = None
    if r.random() < 0.35 and state.entities:
        slice_ = {}
        for e in sorted(state.entities):
            if r.random() < 0.8:
                slice_[state.entities[e].name] = some_predicate(r, state.entities[e]) if r.random() < 0.6 else None
        slice_ = slice_ or None
    return ("fork", f"b{o.id()}", source, slice_, ago)


def some_predicate(r: random.Random, entity: model.Entity) -> tuple[Any, ...] | None:
    tests: list[tuple[Any, ...]] = []
    for f in entity.fields.values():
        if f.type == "int":
            tests.append((f.name, r.choice([">", "<>"]), r.choice([-1, 0, 2, 3])))
        elif f.type == "decimal":
            tests.append((f.name, r.choice(["<", "<>"]), Decimal("1.00")))
        elif f.type == "text":
            tests.append((f.name, r.choice(["=", "<>"]), r.choice(["a", "it's", "", "😀"])))
        elif f.type in ("enum", "state"):
            tests.append((f.name, r.choice(["=", "<>"]), r.choice(f.values or [s for s, _ in f.transitions])))
        if f.type != "json":  # which predicates can't look into
            tests.append((f.name, "is null", None))
    if not tests:
        return None
    p = r.choice(tests)
    chance = r.random()
    return ("not", p) if chance < 0.3 else (r.choice(["and", "or"]), p, r.choice(tests)) if chance < 0.6 else p


def merge(r: random.Random, o: Oracle) -> Op | None:
    names = sorted(n for n, b in o.branches.items() if b.parent and (o.all[b.parent].open or r.random() < 0.05))
    return ("merge", r.choice(names), r.random() < 0.2) if names else None


def resolve(r: random.Random, o: Oracle) -> Op | None:
    found = [(name, c) for name, b in sorted(o.branches.items()) for c in b.conflicts if c.entity]
    if not found:
        return None
    name, clash = r.choice(found)
    take = r.choice(["ours", "theirs", "value"])
    value = None
    if take == "value" and clash.field is not None:
        ours, theirs = (
            b.head.entities[clash.entity].fields[clash.field] for b in (o.all[name], o.all[o.all[name].parent or ""])
        )
        if ours.type != theirs.type:
            take = "ours"
        else:
            value = some_value(r, ours, o.head(name), model.Row({}, 0))
    return ("resolve", name, (clash.entity, clash.row, clash.field), take, value)


def discard(r: random.Random, o: Oracle) -> Op | None:
    parents = {b.parent for b in o.branches.values()}
    names = sorted(n for n in o.branches if n not in parents or (n != "main" and r.random() < 0.1))
    return ("discard", r.choice(names)) if names else None


def reopen(r: random.Random, o: Oracle) -> Op | None:
    return ("reopen",)


# ---- both sides of one history


class Run:
    """A layer and the model, fed the same operations; ids and times of the model map to the layer's ids and tx numbers."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.layer = livinglayer.open(location, create=True)
        self.oracle = Oracle()
        self.oracle.ids = IDS
        self.log: list[Op] = []
        self.count: Counter[str] = Counter()
        self.ids: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.fresh: dict[int, int] = {}  # ids inside a transaction that may still fail
        self.tx = {0: self.last_tx()}
        self.version = dict(
            self.tx
        )  # the tx of a row written at a time: a merge into a branch is followed by one on main
        self.begin()

    def begin(self) -> None:
        for op in STOCK:
            self.step(op)

    def last_tx(self) -> int:
        return int(self.layer.query("select max(tx) as last from tx")[0]["last"])

    def step(self, op: Op) -> None:
        """Do it on both sides: both accept it with the same answer, or both refuse it."""
        self.log.append(op)
        kind, *args = op
        before = self.oracle.now
        self.rows_before = self.oracle.versions(args[0]) if kind == "write" else {}
        expected = got = None
        refused: Refused | None = None
        try:
            expected = getattr(self.oracle, kind)(*args) if kind != "reopen" else None
        except Refused as error:
            refused = error
        try:
            got = getattr(self, kind)(*args, expected=expected)
        except LayerError as error:
            if refused is None:
                raise AssertionError(
                    f"the layer refused what the model accepts: {type(error).__name__}: {error}"
                ) from error
            several = kind in ("merge", "alter")  # these may be wrong in more than one way
            kinds = tuple(KINDS.values()) if several else (KINDS[refused.kind],)
            assert isinstance(error, kinds), f"refused as {type(error).__name__} ({error}), not as {refused}"
        else:
            assert refused is None, f"the layer accepted ({got}) what the model refuses: {refused}"
        self.count[kind + (" refused" if refused else "")] += 1
        for time in range(before + 1, self.oracle.now + 1):
            self.tx[time] = self.last_tx()
            self.version[time] = got or self.tx[time]

    # ---- the layer's side of each operation; `expected` is the model's answer

    def write(self, branch: str, operations: list[Op], style: str, expected: Any) -> None:
        self.fresh = {}
        if style == "one":
            touched = [self.row_operation(self.layer, operations[0], {"branch": branch})]
        elif style == "many":
            entity = operations[0][1]
            touched = self.layer.insert(entity, [self.outward(values) for _, _, values, _ in operations], branch=branch)
        else:
            with self.layer.transaction(branch=branch) as tx:
                touched = [self.row_operation(tx, operation, {}) for operation in operations]
        for (verb, *_, last), mine, theirs in zip(operations, expected or (), touched, strict=bool(expected)):
            if verb == "insert" or (verb == "upsert" and mine == last):
                self.know(last, theirs)
            elif verb == "upsert":
                assert self.ids[mine] == theirs, f"upsert found {theirs} instead of {self.ids[mine]}"

    def row_operation(self, to: Any, operation: Op, options: dict[str, Any]) -> Any:
        verb, entity, *args = operation
        if verb == "insert":
            self.fresh[args[1]] = to.insert(entity, self.outward(args[0]), **options)
            return self.fresh[args[1]]
        if verb == "upsert":
            self.fresh[args[2]] = to.upsert(entity, self.outward(args[0]), on=args[1], **options)
            return self.fresh[args[2]]
        if args[-1] is not None:
            version = self.rows_before[entity, args[0]]
            options = options | {"expect": self.version[version] - (args[-1] == "stale")}
        if verb == "delete":
            return to.delete(entity, self.real(args[0]), **options)
        return to.update(entity, self.real(args[0]), self.outward(args[1]), **options)

    def define(
        self, branch: str, name: str, fields: dict[str, Any], unique: list[list[str]], ids: list[int], expected: None
    ) -> None:
        self.layer.define(name, {k: spec_out(spec) for k, spec in fields.items()}, unique=unique, branch=branch)

    def alter(self, branch: str, entity: str, ids: list[int], change: dict[str, Any], expected: None) -> None:
        change = (
            {**change, "add": {k: spec_out(spec) for k, spec in change["add"].items()}} if "add" in change else change
        )
        self.layer.alter(entity, branch=branch, **change)

    def backfill(self, branch: str, entity: str, name: str, expected: None) -> None:
        self.layer.backfill(entity, name, branch=branch)

    def drop(self, branch: str, entity: str, expected: None) -> None:
        self.layer.drop(entity, branch=branch)

    def fork(self, name: str, source: str, slice_: dict[str, Any] | None, ago: int | None, expected: None) -> None:
        text = None if slice_ is None else {k: p and sql(p) for k, p in slice_.items()}
        self.layer.fork(
            name, source=source, slice=text, as_of=None if ago is None else self.tx[max(0, self.oracle.now - 1 - ago)]
        )

    def discard(self, name: str, expected: None) -> None:
        self.layer.discard(name)

    def reopen(self, expected: None) -> None:
        self.layer.close()
        self.layer = livinglayer.open(self.location)

    def merge(self, name: str, preview: bool, expected: tuple[bool, list[model.Clash]] | None) -> int | None:
        result = self.layer.merge(name, preview=preview)
        if expected is None:
            return None
        applied, clashes = expected
        assert result.applied is applied, (
            f"applied: {result.applied}, the model has {clashes or 'no clash'}; conflicts {result.conflicts}"
        )
        if not preview:
            self.check_conflicts(name)
        return result.tx if applied else None  # nothing to merge is no tx

    def check_conflicts(self, name: str) -> None:
        found = self.layer.conflicts(branch=name)
        expected = self.oracle.branches[name].conflicts
        if any(clash.entity == 0 for clash in expected):
            assert any(c["entity"] in ("entity", "field") for c in found), f"no conflict of the schema in {found}"
            return
        got = {((c["entity"], self.back.get(c["row"]), c["field"])): c for c in found}
        want = {(c.names[0], c.row, c.names[1]): c for c in expected}
        assert set(got) == set(want), (
            f"conflicts of a merge: {sorted(map(str, got))} instead of {sorted(map(str, want))}"
        )
        for key, c in want.items():
            for side in ("base", "ours", "theirs"):
                a, b = got[key][side], getattr(c, side)
                if c.field is None:
                    a, b = a is None, b is None
                elif isinstance(b, Ref):
                    a = Ref(self.back[a])
                assert model.same(a, b), f"conflict {key} on {name}, {side}: layer {a!r}, model {b!r}"

    def resolve(self, name: str, key: tuple[int, int, int | None], take: str, value: Any, expected: None) -> None:
        b = self.oracle.branches[name]
        names = {
            (c.names[0], self.real(c.row), c.names[1])
            for c in [*b.conflicts, *b.resolved]
            if (c.entity, c.row, c.field) == key
        }
        found = [c for c in self.layer.conflicts(branch=name) if (c["entity"], c["row"], c["field"]) in names]
        if not found:
            raise NotFound("no such conflict")
        (conflict,) = found
        if take == "value":
            self.layer.resolve(conflict, self.outward({"": value})[""])
        else:
            self.layer.resolve(conflict, take=take)

    # ---- ids and values across the border

    def know(self, mine: int, theirs: int) -> None:
        assert theirs not in self.back, f"id {theirs} was given twice"
        self.ids[mine], self.back[theirs] = theirs, mine

    def real(self, mine: int) -> int:
        return self.ids.get(mine) or self.fresh.get(mine) or 2**62 + mine

    def outward(self, values: dict[str, Any]) -> dict[str, Any]:
        return {k: self.real(v) if isinstance(v, Ref) else v for k, v in values.items()}

    def inward(self, entity: model.Entity, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the layer in the model's terms."""
        types = {f.name: f.type for f in entity.fields.values()}
        return {k: Ref(self.back[v]) if types.get(k) == "ref" and v is not None else v for k, v in row.items()}

    # ---- comparisons

    def check_branch(self, branch: str, time: int | None = None) -> None:
        """Every entity of a branch, now or as of a time, row by row and value by value."""
        try:
            state = self.oracle.head(branch) if time is None else self.oracle.at(branch, time)
        except Unclear:
            return
        as_of = None if time is None else self.tx[time]
        for entity in state.entities.values():
            rows = self.layer.query(f"select * from {entity.name}", branch=branch, as_of=as_of)
            got = {
                self.back.get(row.pop("id"), "an id the model does not know"): self.inward(entity, row) for row in rows
            }
            assert len(got) == len(rows), f"{entity.name} on {branch} as of {time} ({as_of}): an id comes twice"
            compare(f"{entity.name} on {branch} as of {time} (tx {as_of})", got, state.table(entity.name))

    def check_diff(self, branch: str) -> None:
        """Rows of entities that are still there, fields that kept their type."""
        head, base = self.oracle.branches[branch].head, self.oracle.branches[branch].base
        entities = {entity.name: e for e, entity in head.entities.items()}
        got: dict[Any, Any] = {}
        for c in self.layer.diff(branch):
            if c["id"] not in self.back or c["entity"] not in entities:
                continue
            entity = head.entities[entities[c["entity"]]]
            cells = {k: [self.inward(entity, {k: v})[k] for v in pair] for k, pair in c["fields"].items()}
            got[c["entity"], self.back[c["id"]]] = (c["op"], cells)
        expected = dict(self.oracle.diff(branch))
        for found in (got, expected):
            for (name, i), (op, cells) in list(found.items()):
                entity, before = head.entities[entities[name]], base.entities.get(entities[name])
                for n, f in entity.fields.items():
                    if before and n in before.fields and before.fields[n].type != f.type:
                        cells.pop(f.name, None)
                if op == "update" and not cells:
                    del found[name, i]
        as_rows = [
            {
                key: {"op": op} | {k: [canonical(v) for v in pair] for k, pair in cells.items()}
                for key, (op, cells) in found.items()
            }
            for found in (got, expected)
        ]
        assert as_rows[0] == as_rows[1], f"diff of {branch}:\n layer {as_rows[0]}\n model {as_rows[1]}"

    def check_all(self) -> None:
        """Every branch, now and at times spread over all of history."""
        times = range(len(STOCK), self.oracle.now + 1)
        for n, branch in enumerate(self.oracle.branches):
            self.check_branch(branch)
            self.check_diff(branch)
            for time in times if len(times) < 20 else random.Random(n).sample(times, 20):
                self.check_branch(branch, time)

    def check_some(self, r: random.Random) -> None:
        branches = sorted(self.oracle.branches)
        touched = [name for name in self.log[-1][1:2] if name in self.oracle.branches]
        for branch in {*touched, r.choice(branches), "main"}:
            self.check_branch(branch)
        branch = r.choice(branches)
        self.check_branch(branch, r.randint(len(STOCK), self.oracle.now))
        self.check_diff(r.choice(branches))

    def check_end(self) -> None:
        self.check_all()
        report = self.layer.verify()
        assert report.ok, report.problems


def compare(what: str, got: dict[Any, dict[str, Any]], expected: dict[Any, dict[str, Any]]) -> None:
    if {i: {k: canonical(v) for k, v in row.items()} for i, row in got.items()} == {
        i: {k: canonical(v) for k, v in row.items()} for i, row in expected.items()
    }:
        return
    lines = [f"{what} differs:"]
    for i in sorted({*got, *expected}, key=str):
        a, b = got.get(i), expected.get(i)
        if a is None or b is None:
            lines.append(f"  row {i}: layer {a}, model {b}")
            continue
        for k in sorted({*a, *b}):
            x, y = a.get(k, "(no such field)"), b.get(k, "(no such field)")
            if canonical(x) != canonical(y):
                lines.append(f"  row {i} {k}: layer {x!r}, model {y!r}")
    raise AssertionError("\n".join(lines))


def spec_out(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "check": sql(spec["check"])} if "check" in spec else spec


# ---- the tests


def chosen(r: random.Random, o: Oracle) -> Op | None:
    """Any operation, in proportions that give long histories with several branches alive."""
    weights = {write: 60, define: 3, alter: 12, fork: 8, merge: 10, resolve: 8, discard: 3, reopen: 1}
    return r.choices(list(weights), list(weights.values()))[0](r, o)


class Machine(RuleBasedStateMachine):
    """Hypothesis chooses the kinds of operations and a seed for each, and shortens a failing history."""

    make_location: Location
    seed = st.integers(0, 2**32)

    @initialize()
    def begin(self) -> None:
        self.run = Run(self.make_location())

    def act(self, choose: Choose, seed: int) -> None:
        r = random.Random(seed)
        with repeatable(self.run):
            if op := choose(r, self.run.oracle):
                self.run.step(op)
                self.run.check_some(r)

    def branched(self) -> bool:
        return len(self.run.oracle.branches) > 1

    def clashes(self) -> bool:
        return any(b.conflicts for b in self.run.oracle.branches.values())

    @rule(seed=seed, times=st.integers(1, 4))
    def write(self, seed: int, times: int) -> None:
        for n in range(times):
            self.act(write, seed + n)

    @rule(seed=seed)
    def define(self, seed: int) -> None:
        self.act(define, seed)

    @rule(seed=seed)
    def alter(self, seed: int) -> None:
        self.act(alter, seed)

    @rule(seed=seed)
    def fork(self, seed: int) -> None:
        self.act(fork, seed)

    @precondition(branched)
    @rule(seed=seed)
    def merge(self, seed: int) -> None:
        self.act(merge, seed)

    @precondition(clashes)
    @rule(seed=seed)
    def resolve(self, seed: int) -> None:
        self.act(resolve, seed)

    @precondition(branched)
    @rule(seed=seed)
    def discard(self, seed: int) -> None:
        self.act(discard, seed)

    @rule(seed=seed)
    def reopen(self, seed: int) -> None:
        self.act(reopen, seed)

    def teardown(self) -> None:
        with repeatable(self.run):
            self.run.check_end()
        self.run.layer.close()


@contextmanager
def repeatable(run: Run, seed: int | None = None) -> Iterator[None]:
    """Attach to a failure what is needed to see it again."""
    try:
        yield
    except Exception as error:
        with tempfile.NamedTemporaryFile("w", prefix="oracle-", suffix=".log", delete=False) as file:
            file.writelines(f"{op!r}\n" for op in run.log)
        run.layer.close()
        error.add_note(f"{len(run.log)} operations, the last ones:\n" + "\n".join(map(repr, run.log[-20:])))
        error.add_note(f"again: LAYER_TEST_ORACLE_REPLAY={file.name} pytest tests/substrate/test_oracle.py -k replay")
        raise


def load(path: str) -> list[Op]:
    import datetime as module

    names = {"Decimal": Decimal, "Ref": Ref, "datetime": module, "nan": float("nan"), "inf": float("inf")}
    return [eval(line, names) for line in Path(path).read_text().splitlines()]


def test_a_layer_is_its_model(make_location: Location) -> None:
    machine = type("Machine", (Machine,), {"make_location": staticmethod(make_location)})
    machine.TestCase.settings = settings(
        max_examples=25,
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=machine.TestCase.settings)


@pytest.mark.torture
@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("LAYER_TEST_ORACLE_SEEDS", "1,2,3,4,5").split(",")])
def test_a_layer_is_its_model_for_long(make_location: Location, seed: int) -> None:
    r = random.Random(seed)
    run = Run(make_location())
    with repeatable(run):
        while len(run.log) < int(os.environ.get("LAYER_TEST_ORACLE_OPS", "2000")):
            if op := chosen(r, run.oracle):
                run.step(op)
                run.check_some(r)
        run.check_end()
    run.layer.close()
    print(f"seed {seed}: {len(run.log)} operations: {dict(run.count.most_common())}")


@pytest.mark.skipif("LAYER_TEST_ORACLE_REPLAY" not in os.environ, reason="LAYER_TEST_ORACLE_REPLAY names no log")
def test_replay(make_location: Location) -> None:
    """A saved history again, in fewer operations where that fails in the same way."""
    log = load(os.environ["LAYER_TEST_ORACLE_REPLAY"])[len(STOCK) :]
    log, error = shortened(log, make_location)
    print(*log, sep="\n")
    if error:
        raise error


def replay(log: list[Op], location: str, checks: int = 2) -> Exception | None:
    """Run a history; `checks`: 0 only answers, 1 heads and diffs after each operation, 2 everything at the end too."""
    run = Run(location)
    try:
        for op in log:
            run.step(op)
            for branch in run.oracle.branches if checks else ():
                run.check_branch(branch)
                run.check_diff(branch)
        if checks > 1:
            run.check_end()
    except Exception as error:
        return error
    finally:
        run.layer.close()
    return None


def shortened(log: list[Op], make_location: Location) -> tuple[list[Op], Exception | None]:
    """Leave out operations, then parts of them, as long as it fails in the same way."""
    error = replay(log, make_location())
    if error is None:
        return log, None

    def fails(shorter: list[Op], checks: int | None = None) -> bool:
        again = replay(shorter, make_location(), enough if checks is None else checks)
        return again is not None and kind_of(again) == kind_of(error)

    enough = 0 if fails(log, 0) else 1 if fails(log, 1) else 2
    size = len(log)
    while size := size // 2:
        start = 0
        while start < len(log):
            shorter = log[:start] + log[start + size :]
            if fails(shorter):
                log = shorter
            else:
                start += size
    for n, op in enumerate(log):
        if op[0] == "fork":
            for simpler in ((*op[:3], None, op[4]), (*log[n][:4], None)):
                if fails(log[:n] + [simpler] + log[n + 1 :]):
                    log = log[:n] + [simpler] + log[n + 1 :]
        if op[0] == "write":
            for operation in list(op[2]):
                less = (*log[n][:2], [other for other in log[n][2] if other is not operation], "tx")
                if fails(log[:n] + [less] + log[n + 1 :]):
                    log = log[:n] + [less] + log[n + 1 :]
    return log, replay(log, make_location()) or error


def kind_of(error: Exception) -> tuple[type, list[str]]:
    return type(error), [re.sub(r"\d+", "", word) for word in str(error).split()[:4]]
