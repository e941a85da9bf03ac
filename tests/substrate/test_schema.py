"""The schema is rows: defined, altered, retyped, backfilled and dropped by mutations, on each branch for itself."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, NotFound
from livinglayer.substrate import evolve
from livinglayer.substrate.schema import SYSTEM


def last(layer: Layer) -> int:
    return int(layer.query("select max(tx) as n from tx")[0]["n"])


def test_a_definition_is_rows_that_sql_reads(shared: Layer) -> None:
    number = shared.define(
        "gadget",
        {
            "name": "text!",
            "size": {"type": "int", "indexed": True, "description": "in mm", "annotations": {"unit": "mm"}},
        },
        description="A thing.",
        reason="first",
    )
    assert shared.query("select id, kind, system, description from entity where name = 'gadget'") == [
        {"id": number, "kind": "entity", "system": False, "description": "A thing."}
    ]
    assert shared.query(
        f"select name, type, required, indexed, description, annotations from field where entity = {number} order by id"
    ) == [
        {"name": "name", "type": "text", "required": True, "indexed": False, "description": None, "annotations": None},
        {"name": "size", "type": "int", "required": False, "indexed": True, "description": "in mm", "annotations": {"unit": "mm"}},
    ]  # fmt: skip
    assert shared.query("select reason, principal from tx order by tx desc limit 1") == [
        {"reason": "first", "principal": "owner"}
    ]


def test_defining_again_adds_what_is_missing_and_refuses_what_differs(shared: Layer) -> None:
    first = shared.define("twice", {"a": "text"})
    assert shared.define("twice", {"a": "text", "b": "int"}) == first
    assert list(shared.schema().get("twice").by_name) == ["a", "b"]
    before = last(shared)
    assert shared.define("twice", {"a": "text"}) == first
    for other in ("int", "text!", {"type": "text", "unique": True}):
        with pytest.raises(Conflict, match="'a' is there with"):
            shared.define("twice", {"a": other, "c": "int"})
    assert (list(shared.schema().get("twice").by_name), last(shared)) == (["a", "b"], before)


@pytest.mark.parametrize(
    "name",
    [*SYSTEM.by_name, "pg_thing", "sqlite_thing", "ledger_x", "meta", "blob", "a__b", "_a", "a_", "A", "1a", "a b", "ü", "", "x" * 49, "select", "user", 5, None],
)  # fmt: skip
def test_a_reserved_or_odd_name_of_an_entity_is_invalid(shared: Layer, name: Any) -> None:
    with pytest.raises(Invalid):
        shared.define(name, {"a": "text"})


@pytest.mark.parametrize("name", ["id", "tx", "tx_end", "op", "a__b", "A", "order", "", "x" * 49])
def test_a_reserved_or_odd_name_of_a_field_is_invalid(shared: Layer, name: str) -> None:
    with pytest.raises(Invalid):
        shared.define("odd", {name: "text"})
    with pytest.raises(Invalid):
        shared.schema().get("odd")


def test_every_system_name_and_column_works_unquoted(shared: Layer) -> None:
    for entity in SYSTEM.entities:
        columns = [*(() if entity.kind == "ledger" else ("id",)), *entity.by_name]
        shared.query(f"select {', '.join(columns)} from {entity.name} limit 1")
        shared.query(f"select {', '.join(f'{entity.name}.{c} as {c}' for c in columns)} from {entity.name} limit 1")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("string", "no type"), ("", "no type"), ({"required": True}, "no type"), (5, "a field is text"),
        ({"type": "text", "nullable": False}, "nullable"), ("ref", "where to"), ("ref nowhere_at_all", "nowhere_at_all"),
        ("ref tx", "is a ledger"), ({"type": "ref", "to": "principal", "on_delete": "explode"}, "on_delete"),
        ({"type": "ref", "to": "principal", "required": True, "on_delete": "null"}, "null on delete"),
        ({"type": "enum"}, "values"), ({"type": "enum", "values": []}, "values"), ({"type": "enum", "values": ["a", "a"]}, "different"),
        ({"type": "state"}, "transitions"), ({"type": "state", "transitions": {"a": ["b"]}}, "'a'"),
        ({"type": "state", "transitions": {"a": []}, "initial": "z"}, "'z'"), ({"type": "int", "default": "three"}, "not an int"),
        ({"type": "enum", "values": ["a"], "default": "b"}, "not one of"), ({"type": "file", "default": "ab" * 32}, "no default"), ({"type": "text", "check": "length(nothing) > 2"}, "nothing"),
        ({"type": "text", "check": "length(x)"}, "true or false"), ({"type": "text", "check": "x > 2"}, "compared"),
    ],
)  # fmt: skip
def test_a_field_that_makes_no_sense_is_invalid_and_leaves_nothing(shared: Layer, spec: Any, why: str) -> None:
    before = last(shared)
    with pytest.raises(Invalid, match=why):
        shared.define("senseless", {"good": "text", "x": spec})
    assert (last(shared), "senseless" in shared.schema().by_name) == (before, False)


def test_defaults_fill_what_is_not_given(shared: Layer) -> None:
    shared.define(
        "filled",
        {
            "n": {"type": "int", "default": 0},
            "d": {"type": "decimal", "default": Decimal("1.50")},
            "b": {"type": "bool", "default": False},
            "on_day": {"type": "date", "default": "2026-01-31"},
            "j": {"type": "json", "default": {"a": []}},
            "k": {"type": "enum", "values": ["x", "y"], "default": "y"},
            "made": {"type": "datetime", "default": "now()"},
        },
    )
    shared.insert("filled", {})
    shared.insert("filled", {"n": 5, "j": None, "made": None})
    first, second = shared.query("select n, d, b, on_day, j, k, made from filled order by id")
    made = first.pop("made")
    assert abs((datetime.now(UTC) - made).total_seconds()) < 60
    assert first == {"n": 0, "d": Decimal("1.50"), "b": False, "on_day": date(2026, 1, 31), "j": {"a": []}, "k": "y"}
    assert (str(first["d"]), second["n"], second["j"], second["made"]) == ("1.50", 5, None, None)


def test_a_renamed_field_keeps_its_values_and_the_past_its_name(shared: Layer) -> None:
    shared.define("renamed", {"qty": "int", "other": "text"})
    shared.insert("renamed", {"qty": 3})
    before = last(shared)
    shared.alter("renamed", rename={"qty": "amount"})
    assert shared.query("select amount from renamed") == [{"amount": 3}]
    assert shared.query("select qty from renamed", as_of=before) == [{"qty": 3}]
    assert shared.query("select amount from renamed__history") == [{"amount": 3}]
    with pytest.raises(Invalid, match="'qty'"):
        shared.insert("renamed", {"qty": 4})
    with pytest.raises(Conflict, match="already"):
        shared.alter("renamed", rename={"amount": "other"})
    with pytest.raises(Invalid, match="'nothing'"):
        shared.alter("renamed", rename={"nothing": "x"})


def test_a_rename_that_a_check_still_needs_is_refused(shared: Layer) -> None:
    shared.define("checked", {"sku": {"type": "text", "check": "length(sku) > 2"}})
    with pytest.raises(Invalid, match="sku"):
        shared.alter("checked", rename={"sku": "code"})
    assert list(shared.schema().get("checked").by_name) == ["sku"]


def test_references_follow_a_renamed_entity(shared: Layer) -> None:
    shared.define("maker", {"name": "text"})
    shared.define("product", {"maker": "ref maker"})
    maker = shared.insert("maker", {"name": "m"})
    shared.alter("maker", name="producer")
    product = shared.insert("product", {"maker": maker})
    assert shared.query("select p.name from product join producer p on p.id = product.maker") == [{"name": "m"}]
    assert shared.query("select name from producer__history") == [{"name": "m"}]
    with pytest.raises(Conflict, match=f"product/{product}"):
        shared.delete("producer", maker)
    with pytest.raises((Invalid, NotFound)):
        shared.query("select * from maker")
    with pytest.raises(Conflict, match="already"):
        shared.alter("producer", name="product")


@pytest.mark.parametrize(
    ("old", "new", "given", "shown", "lost"),
    [
        ("int", "decimal", [3, None], [Decimal(3), None], 0),
        ("int", "float", [3], [3.0], 0),
        ("int", "text", [-7], ["-7"], 0),
        ("text", "int", ["12", "twelve", ""], [12, None, None], 2),
        ("text", "decimal", ["1.50", "x"], [Decimal("1.50"), None], 1),
        ("bool", "int", [True, False], [1, 0], 0),
        ("bool", "text", [True, False], ["true", "false"], 0),
        ("decimal", "text", ["1.50"], ["1.50"], 0),
        ("date", "text", [date(2026, 1, 31)], ["2026-01-31"], 0),
        ("date", "datetime", [date(2026, 1, 31)], [datetime(2026, 1, 31, tzinfo=UTC)], 0),
        ("datetime", "date", [datetime(2026, 1, 31, 23, tzinfo=UTC)], [date(2026, 1, 31)], 0),
        ("datetime", "text", [datetime(2026, 1, 31, 23, tzinfo=UTC)], ["2026-01-31T23:00:00.000000Z"], 0),
        ("text", {"type": "enum", "values": ["a", "b"]}, ["a"], ["a"], 0),
    ],
)
def test_a_retyped_field_reads_the_same_before_and_after_its_backfill(
    shared: Layer, old: str, new: Any, given: list[Any], shown: list[Any], lost: int
) -> None:
    name = f"re_{old}_{new if isinstance(new, str) else 'enum'}"
    shared.define(name, {"x": old})
    shared.insert(name, [{"x": value} for value in given])
    before = last(shared)
    shared.alter(name, retype={"x": new})
    select = f"select x from {name} order by id"
    assert [row["x"] for row in shared.query(select)] == shown
    filled = sum(value is not None for value in given)
    assert shared.backfill(name, "x") == {"converted": filled - lost, "lost": lost}
    found = [row["x"] for row in shared.query(select)]
    assert (found, [type(x) for x in found]) == (shown, [type(x) for x in shown])
    past = [row["x"] for row in shared.query(select, as_of=before)]
    assert past == [Decimal(x) if old == "decimal" else x for x in given]


def test_writes_while_a_field_is_being_retyped_are_of_the_new_type(shared: Layer) -> None:
    shared.define("moving", {"n": "int", "t": "text"})
    rows = shared.insert("moving", [{"n": n} for n in (1, 2, 3)])
    shared.alter("moving", retype={"n": "decimal"})
    shared.update("moving", rows[0], {"n": "1.5"})
    shared.update("moving", rows[1], {"n": None})
    shared.update("moving", rows[2], {"t": "touched"})
    shared.insert("moving", {"n": Decimal("4.5")})
    expected = [Decimal("1.5"), None, Decimal(3), Decimal("4.5")]
    assert [row["n"] for row in shared.query("select n from moving order by id")] == expected
    assert shared.query("select sum(n) as s from moving") == [{"s": Decimal("9.0")}]
    with pytest.raises(Conflict, match="being retyped already"):
        shared.alter("moving", retype={"n": "text"})
    shared.backfill("moving", "n")
    assert [row["n"] for row in shared.query("select n from moving order by id")] == expected
    with pytest.raises(Invalid, match="is not being retyped"):
        shared.backfill("moving", "n")


def test_what_can_not_be_retyped_says_so(shared: Layer) -> None:
    shared.define("fixed", {"j": "json", "u": {"type": "int", "unique": True}})
    with pytest.raises(Invalid, match="json can't become int") as caught:
        shared.alter("fixed", retype={"j": "int"})
    assert caught.value.hint
    with pytest.raises(Invalid, match="is unique"):
        shared.alter("fixed", retype={"u": "text"})


def test_a_dropped_field_is_gone_now_and_there_in_the_past(shared: Layer) -> None:
    shared.define("shrinking", {"a": "text", "b": "text"})
    shared.insert("shrinking", {"a": "x", "b": "y"})
    before = last(shared)
    shared.alter("shrinking", drop=["b"])
    assert [set(row) for row in shared.query("select * from shrinking")] == [{"id", "a"}]
    assert shared.query("select a, b from shrinking", as_of=before) == [{"a": "x", "b": "y"}]
    shared.alter("shrinking", add={"b": "int"})
    assert shared.query("select a, b from shrinking") == [{"a": "x", "b": None}]


def test_a_dropped_entity_is_gone_now_and_there_in_the_past(shared: Layer) -> None:
    shared.define("dropped", {"a": "text"})
    shared.define("holding", {"to_it": "ref dropped"})
    shared.insert("dropped", {"a": "x"})
    before = last(shared)
    with pytest.raises(Conflict, match=r"holding\.to_it refers to"):
        shared.drop("dropped")
    shared.alter("holding", drop=["to_it"])
    shared.drop("dropped")
    with pytest.raises((Invalid, NotFound)):
        shared.query("select * from dropped")
    with pytest.raises(Invalid, match="no entity 'dropped'"):
        shared.insert("dropped", {"a": "y"})
    assert shared.query("select a from dropped", as_of=before) == [{"a": "x"}]
    shared.define("dropped", {"b": "int"})
    assert shared.query("select * from dropped") == []


@pytest.mark.parametrize(
    ("field", "change", "fix"),
    [
        ("a", {"required": True}, {"a": "filled"}),
        ("b", {"check": "b > 10"}, {"b": 11}),
        ("c", {"unique": True}, {"c": "other"}),
        ("d", {"values": ["x"]}, {"d": "x"}),
    ],
)
def test_rows_that_are_there_must_meet_what_is_newly_asked(
    shared: Layer, field: str, change: dict[str, Any], fix: dict[str, Any]
) -> None:
    name = f"stricter_{field}"
    shared.define(name, {"a": "text", "b": "int", "c": "text", "d": {"type": "enum", "values": ["x", "y"]}})
    shared.insert(name, {"a": "good", "b": 11, "c": "same", "d": "x"})
    bad = shared.insert(name, {"a": None, "b": 1, "c": "same", "d": "y"})
    with pytest.raises((Conflict, Invalid)):
        shared.alter(name, change={field: change})
    shared.update(name, bad, fix)
    shared.alter(name, change={field: change})
    with pytest.raises((Conflict, Invalid)):
        shared.update(name, bad, {"a": None, "b": 1, "c": "same", "d": "y"})


def test_a_required_field_can_not_be_added_to_rows_that_lack_it(shared: Layer) -> None:
    shared.define("lacking", {"a": "text"})
    shared.insert("lacking", {"a": "x"})
    with pytest.raises(Conflict, match="has no b"):
        shared.alter("lacking", add={"b": "text!"})
    assert shared.query("select a from lacking") == [{"a": "x"}]
    assert list(shared.schema().get("lacking").by_name) == ["a"]


def test_several_fields_are_unique_together(shared: Layer) -> None:
    shared.define("pair", {"a": "text", "b": "int"}, unique=[["a", "b"]])
    shared.insert("pair", [{"a": "x", "b": 1}, {"a": "x", "b": 2}, {"a": "y", "b": 1}, {"a": "x"}, {"a": "x"}])
    with pytest.raises(Conflict, match="a 'x', b 1"):
        shared.insert("pair", {"a": "x", "b": 1})
    with pytest.raises(Invalid, match="'c'"):
        shared.define("pair", {"a": "text"}, unique=[["a", "c"]])
    with pytest.raises(Invalid, match="unique is a list of lists of fields"):
        shared.define("pair", {"a": "text"}, unique=[[]])


def test_each_branch_has_its_own_schema(shared: Layer) -> None:
    shared.define("local", {"a": "text"})
    row = shared.insert("local", {"a": "x"})
    shared.fork("other_schema")
    shared.alter("local", rename={"a": "b"}, add={"c": "int"}, branch="other_schema")
    shared.define("only_there", {"x": "text"}, branch="other_schema")
    shared.alter("local", add={"d": "int"})
    shared.update("local", row, {"c": 5}, branch="other_schema")
    assert shared.query("select * from local") == [{"id": row, "a": "x", "d": None}]
    assert shared.query("select * from local", branch="other_schema") == [{"id": row, "b": "x", "c": 5}]
    with pytest.raises(Invalid, match="no entity 'only_there'"):
        shared.insert("only_there", {"x": "y"})
    shared.define("only_there", {"y": "int"})
    assert list(shared.schema("other_schema").get("only_there").by_name) == ["x"]
    shared.drop("local", branch="other_schema")
    assert shared.query("select a from local") == [{"a": "x"}]


def test_the_systems_own_entities_can_not_be_changed(shared: Layer) -> None:
    with pytest.raises(Invalid, match="system's own"):
        shared.alter("permission", add={"x": "text"})
    with pytest.raises(Invalid, match="system's own"):
        shared.drop("principal")
    with pytest.raises(Invalid, match="no entity 'nothing_here'"):
        shared.alter("nothing_here", add={"x": "text"})


def test_defining_needs_a_permission(shared: Layer) -> None:
    shared.principal("writer_only")
    shared.grant("writer_only", "write", "*")
    with pytest.raises(Denied, match="may not define"):
        shared.define("theirs", {"a": "text"}, principal="writer_only")
    shared.grant("writer_only", "define", "*")
    shared.define("theirs", {"a": "text"}, principal="writer_only")
    assert shared.query("select principal from tx order by tx desc limit 1") == [{"principal": "writer_only"}]


def test_a_schema_that_is_foretold_is_the_one_that_is_read(layer: Layer) -> None:
    """Within a tx the schema after new fields is computed, not read; it must be the same to the last option."""
    fields: dict[str, Any] = {
        "a": "text!",
        "b": {"type": "decimal", "default": "1.50", "check": "b > 0"},
        "c": {"type": "enum", "values": ["x", "y"], "default": "y", "indexed": True},
        "d": {"type": "state", "transitions": {"new": ["done"], "done": []}},
        "e": {"type": "ref", "to": "thing", "on_delete": "null"},
        "f": {"type": "json", "default": {"k": [1, 2.5, None]}},
        "g": {"type": "datetime", "default": "now()"},
        "h": {"type": "bool", "default": False, "description": "no", "annotations": {"unit": "€"}},
        "i": {"type": "date", "default": "2026-01-31"},
    }
    with layer.in_tx(None, "main", None) as tx:
        evolve.define(tx, "thing", fields, [["a", "c"]], "what there is", {"icon": "*"})
        evolve.define(tx, "thing", {"j": "int"}, [], None, None)
        evolve.alter(tx, "thing", {"k": {"type": "ref", "to": "principal"}}, {}, {}, [], {}, None, None)
        evolve.define(tx, "other", {"thing": "ref thing!"}, [], None, None)
        foretold = tx.schema
        tx._schema = None
        tx.work.catalog._kept.clear()
        assert tx.schema is not foretold and tx.schema == foretold
    assert layer.schema() == foretold
