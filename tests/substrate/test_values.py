"""Values keep their exact type through both engines; what can't be kept is refused by name."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from hashlib import sha256
from typing import Any

import pytest

from livinglayer import Layer
from livinglayer.errors import Conflict, Invalid, LimitExceeded
from livinglayer.substrate.values import DECIMAL_DIGITS, ENCODE, JSON_DEPTH, convert, decode

LIMIT = 1 << 20
EVERY = {
    "t": "text",
    "i": "int",
    "f": "float",
    "d": "decimal",
    "b": "bool",
    "day": "date",
    "moment": "datetime",
    "j": "json",
    "e": {"type": "enum", "values": ["a", "b"]},
    "r": "ref principal",
    "s": {"type": "state", "transitions": {"new": ["old"], "old": []}},
    "c": "file",
}


def test_a_row_of_every_type_comes_back_as_it_was_given(shared: Layer) -> None:
    shared.define("every", EVERY)
    content = b"\0\xff not text"
    given = {
        "t": "it's “ünïcode” 😀\n",
        "i": -(2**63),
        "f": 0.1,
        "d": Decimal("12345678901234567890.0120"),
        "b": False,
        "day": date(1, 1, 1),
        "moment": datetime(2026, 1, 31, 12, 30, 0, 1, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        "j": {"b": [1, 2.5, None, 2**70], "a": ""},
        "e": "b",
        "r": shared.principal("reference"),
        "s": "new",
        "c": content,
    }
    row = shared.insert("every", given)
    expected = {"id": row, **given, "c": sha256(content).hexdigest()}
    found = shared.query("select * from every")
    assert found == [expected]
    assert [type(v) for v in found[0].values()] == [type(v) for v in expected.values()]
    assert str(found[0]["d"]) == "12345678901234567890.0120"
    assert found[0]["moment"].tzinfo == UTC
    assert shared.blob(found[0]["c"]) == content
    shared.principal("nobody_special")
    shared.grant("nobody_special", "read", "every")
    assert shared.query("select * from every", principal="nobody_special") == [expected]


def test_nothing_given_is_null_and_empty_is_not(shared: Layer) -> None:
    shared.define("blank", {"t": "text", "j": "json"})
    shared.insert("blank", [{"t": "", "j": []}, {"t": None, "j": None}, {}])
    assert shared.query("select t, j from blank order by id") == [
        {"t": "", "j": []},
        {"t": None, "j": None},
        {"t": None, "j": None},
    ]
    assert shared.query("select count(*) as n from blank where t is null") == [{"n": 2}]


def test_decimals_are_compared_sorted_and_summed_exactly(shared: Layer) -> None:
    shared.define("money", {"d": "decimal"})
    for text in ("10", "9.5", "-2", "0.1", "0.2", "100000000000000000000.01"):
        shared.insert("money", {"d": text})
    assert [str(r["d"]) for r in shared.query("select d from money order by d")] == [
        "-2", "0.1", "0.2", "9.5", "10", "100000000000000000000.01",
    ]  # fmt: skip
    assert shared.query("select sum(d) as s, max(d) as m from money") == [
        {"s": Decimal("100000000000000000017.81"), "m": Decimal("100000000000000000000.01")}
    ]
    assert shared.query("select d from money where d = :d", {"d": Decimal("10.000")}) == [{"d": Decimal(10)}]
    assert shared.query("select count(*) as n from money where d > :d", {"d": Decimal("9.50")}) == [{"n": 2}]


def test_a_unique_decimal_is_unique_by_value(shared: Layer) -> None:
    shared.define("rate", {"d": {"type": "decimal", "unique": True}})
    shared.insert("rate", {"d": "1.50"})
    with pytest.raises(Conflict, match="is there already"):
        shared.insert("rate", {"d": Decimal("1.5")})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("t", "x"),
        ("i", 2**63 - 1),
        ("f", 1.5),
        ("d", Decimal("2.50")),
        ("b", True),
        ("day", date(2026, 2, 28)),
        ("moment", datetime(2026, 2, 28, 23, 0, tzinfo=timezone(timedelta(hours=-3)))),
    ],
)
def test_a_parameter_of_a_type_finds_the_row_with_it(shared: Layer, field: str, value: Any) -> None:
    shared.define(f"param_{field}", {field: EVERY[field]})
    shared.insert(f"param_{field}", [{field: value}, {}])
    assert shared.query(f"select {field} from param_{field} where {field} = :v", {"v": value}) == [{field: value}]


@pytest.mark.parametrize(
    ("kind", "given", "stored"),
    [
        ("decimal", "1.50", "1.50"),
        ("decimal", 7, "7"),
        ("decimal", Decimal("1E+3"), "1000"),
        ("decimal", Decimal("-0.00"), "0.00"),
        ("float", -0.0, 0.0),
        ("float", 3, 3.0),
        ("date", "2026-01-31", "2026-01-31"),
        ("datetime", "2026-01-31T12:00:00+02:00", "2026-01-31T10:00:00.000000Z"),
        ("bool", True, 1),
        ("json", {"b": 1.0, "a": (True, None)}, '{"a":[true,null],"b":1.0}'),
        ("json", 1e22, "10000000000000000000000.0"),
        ("file", "ab" * 32, "ab" * 32),
    ],
)
def test_what_is_given_has_one_stored_form(kind: str, given: Any, stored: Any) -> None:
    found = ENCODE[kind]("x", given, LIMIT)
    assert (found, type(found)) == (stored, type(stored))
    assert ENCODE[kind]("x", decode(kind, found), LIMIT) == found


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("text", 5), ("text", b"x"), ("text", "a\0b"), ("text", "\ud800"), ("int", True), ("int", 1.0), ("int", "1"),
        ("int", 2**63), ("int", -(2**63) - 1), ("float", float("nan")), ("float", float("-inf")), ("float", "1"),
        ("float", 10**400), ("decimal", 0.1), ("decimal", True), ("decimal", "one"), ("decimal", Decimal("sNaN")),
        ("decimal", Decimal("Infinity")), ("bool", 1), ("bool", "true"), ("date", datetime(2026, 1, 1, tzinfo=UTC)),
        ("date", "2026-02-30"), ("datetime", datetime(2026, 1, 1)), ("datetime", "2026-01-01"), ("datetime", date(2026, 1, 1)),
        ("datetime", datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))), ("json", {1: 2}), ("json", {"a": float("nan")}),
        ("json", {"a": "\0"}), ("json", {"\0": 1}), ("json", {1, 2}), ("json", Decimal(1)), ("file", "abc"), ("file", "AB" * 32), ("ref", "7"),
    ],
)  # fmt: skip
def test_what_is_not_of_the_type_is_invalid(kind: str, value: Any) -> None:
    with pytest.raises(Invalid, match=r"item\.field"):
        ENCODE[kind]("item.field", value, LIMIT)


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("kind", "most", "more"),
    [
        ("text", "ü" * (LIMIT // 2), "ü" * (LIMIT // 2) + "x"),
        ("json", "x" * (LIMIT - 2), "x" * (LIMIT - 1)),
        ("json", _nested(JSON_DEPTH), _nested(JSON_DEPTH + 1)),
        ("json", 10**DECIMAL_DIGITS, 10**DECIMAL_DIGITS + 1),
        ("decimal", Decimal("9" * DECIMAL_DIGITS), Decimal("9" * (DECIMAL_DIGITS + 1))),
        ("decimal", Decimal(f"1E-{DECIMAL_DIGITS}"), Decimal(f"1E-{DECIMAL_DIGITS + 1}")),
    ],
)
def test_sizes_have_an_end(kind: str, most: Any, more: Any) -> None:
    ENCODE[kind]("x", most, LIMIT)
    with pytest.raises(LimitExceeded):
        ENCODE[kind]("x", more, LIMIT)


def test_the_largest_values_are_kept_by_both_engines(shared: Layer) -> None:
    shared.define("large", {"t": "text", "d": "decimal", "j": "json"})
    most = {"t": "😀" * (LIMIT // 4), "d": Decimal("9" * DECIMAL_DIGITS), "j": _nested(JSON_DEPTH)}
    shared.insert("large", most)
    assert shared.query("select t, d, j from large") == [most]


def test_an_indexed_text_is_at_most_what_an_index_of_either_engine_holds(shared: Layer) -> None:
    shared.define("indexed", {"name": {"type": "text", "indexed": True}})
    shared.insert("indexed", {"name": "x" * 2000})
    with pytest.raises(LimitExceeded, match="at most 2000 bytes") as caught:
        shared.insert("indexed", {"name": "x" * 2001})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("old", "new", "stored", "becomes"),
    [
        ("int", "float", 2, 2.0), ("int", "decimal", -5, "-5"), ("int", "text", 5, "5"), ("bool", "int", 1, 1), ("bool", "text", 0, "false"),
        ("decimal", "text", "1.50", "1.50"), ("date", "datetime", "2026-01-31", "2026-01-31T00:00:00.000000Z"),
        ("datetime", "date", "2026-01-31T23:59:59.999999Z", "2026-01-31"), ("text", "int", "-12", -12), ("text", "int", "12x", None),
        ("text", "decimal", "1.50", "1.50"), ("text", "decimal", "1e5", None), ("text", "json", "{}", None), ("int", "text", None, None),
    ],
)  # fmt: skip
def test_what_converts_keeps_its_meaning_and_the_rest_becomes_null(
    old: str, new: str, stored: Any, becomes: Any
) -> None:
    found = convert(old, new, stored)
    assert (found, type(found)) == (becomes, type(becomes))
