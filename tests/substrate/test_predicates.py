"""One predicate, two readings: the SQL of a view and the Python of the write path agree, nulls included, on both engines."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

import pytest

from livinglayer import Layer
from livinglayer.errors import Invalid, NotFound

FIELDS = {
    "name": "text", "label": "text", "qty": "int", "rate": "float", "price": "decimal", "ok": "bool", "day": "date", "moment": "datetime",
    "kind": {"type": "enum", "values": ["x", "y"]}, "up": "ref thing", "data": "json", "mark": "int",
}  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {"name": "a", "label": "Bolt", "qty": 1, "rate": 1.5, "price": "1.50", "ok": True, "day": date(2001, 1, 31),
     "moment": datetime(2001, 1, 31, 12, tzinfo=UTC), "kind": "x"},
    {"name": "b", "label": "50% öff😀", "qty": 5, "rate": -2.0, "price": "10", "ok": False, "day": date(2001, 6, 15),
     "moment": datetime(2001, 6, 15, tzinfo=UTC), "kind": "y"},
    {"name": "c", "label": "it's*[x]?", "qty": -7, "rate": 0.0, "price": "9.5", "ok": True, "day": date(2000, 12, 31),
     "moment": datetime(2000, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), "kind": "x"},
    {"name": "n"},
]  # fmt: skip
TRUTHS = {
    "qty = 1": "a", "qty <> 1": "bc", "qty != 1": "bc", "qty < 1": "c", "qty <= 1": "ac", "qty > 1": "b", "qty >= 1": "ab",
    "not qty = 1": "bc", "qty is null": "n", "qty is not null": "abc", "qty = null": "", "not (qty = null)": "",
    "qty in (1, 5)": "ab", "qty not in (1, 5)": "c", "qty in (1, null)": "a", "qty not in (1, null)": "",
    "qty between 0 and 5": "ab", "not qty between 0 and 5": "c", "qty not between 0 and 5": "c", "not (label not like 'B%')": "a", "qty = 1.0": "a", "qty < 99999999999999999999": "abc",
    "qty + 2 = 3": "a", "qty - 1 = 4": "b", "qty * 2 = -14": "c", "qty / 2 = -3": "c", "qty / 2 = 2": "b", "qty % 3 = -1": "c", "qty % -3 = 2": "b",
    "qty / 0 is null": "abcn", "qty % 0 is null": "abcn", "-qty = 7": "c", "abs(qty) = 7": "c", "qty / 2.0 = 2.5": "b", "qty = 1.5 - 0.5": "a",
    "qty * 9223372036854775807 > 0": "ab",
    "rate = 1.5": "a", "rate < 0": "b", "rate / 2 = -1": "b", "qty + rate = 2.5": "a", "rate / 0 is null": "abcn", "rate = 0": "c",
    "price = 1.5": "a", "price < 10": "ac", "price > 9": "bc", "price in (10, 9.50)": "bc", "price between 1.5 and 9.5": "ac", "price > -1": "abc", "price <> 10.00": "ac",
    "ok": "ac", "not ok": "b", "ok = true": "ac", "ok is true": "ac", "ok is not true": "bn", "ok is false": "b", "ok is null": "n",
    "ok and qty > 0": "a", "ok or qty > 0": "abc", "ok or name = 'n'": "acn", "not (ok and qty > 0)": "bc", "ok and name = 'n'": "", "not (ok and name <> 'n')": "bn",
    "day = '2001-01-31'": "a", "day > '2001-01-01'": "ab", "day between '2000-01-01' and '2001-01-31'": "ac",
    "moment < '2001-06-15'": "ac", "moment = '2001-01-31T13:00:00+01:00'": "a", "moment < now()": "abc", "moment > '2000-12-31T23:59:59.999998Z'": "abc",
    "kind = 'x'": "ac", "kind in ('x', 'y')": "abc", "kind = label": "",
    "label like 'B%'": "a", "label like 'b%'": "", "label like '_olt'": "a", "label not like 'B%'": "bc", "label like '%'": "abc",
    "label like '%*[x]?'": "c", "label like 'it''s%'": "c", "label like 'B*'": "", "label = 'it''s*[x]?'": "c", "label < 'a'": "ab",
    "length(label) = 8": "b", "length(name) = 1": "abcn", "coalesce(qty, 0) = 0": "n", "coalesce(label, 'none') = 'none'": "n", "coalesce(qty, 100) > 4": "bn",
    "coalesce(price, 0) < 2": "an",
    "up is null": "an", "up.qty = 1": "b", "up.name = 'b'": "c", "up.up.name = 'a'": "c", "up.up.qty + 1 = 2": "c", "up.price > 5": "c", "up.name is null": "an",
    "not up.ok": "c", "up.qty < qty": "b", "thing.qty = 1": "a", "up.id = up": "bc",
    "id = id": "abcn", "true": "abcn", "false": "", "null": "", "1 = 1 and not false": "abcn", "((qty)) = (1)": "a",
}  # fmt: skip


@pytest.fixture
def things(shared: Layer) -> dict[str, int]:
    """Rows a, b (above it a), c (above it b) and n, which is all nulls."""
    if "thing" not in shared.schema().by_name:
        shared.define("thing", FIELDS)
        a, b, c, _ = shared.insert("thing", ROWS)
        shared.update("thing", b, {"up": a})
        shared.update("thing", c, {"up": b})
    return {row["name"]: row["id"] for row in shared.query("select id, name from thing")}


@pytest.mark.parametrize("text", TRUTHS)
def test_a_view_and_the_write_path_find_the_same_rows_true(shared: Layer, things: dict[str, int], text: str) -> None:
    branch = f"p{list(TRUTHS).index(text)}"
    shared.fork(branch, slice={"thing": text})
    read = "".join(row["name"] for row in shared.query("select name from thing order by name", branch=branch))
    written = ""
    for name, number in sorted(things.items()):
        try:
            shared.update("thing", number, {"mark": 1}, branch=branch)
            written += name
        except NotFound:
            pass
    assert (read, written) == (TRUTHS[text], TRUTHS[text])


HOSTILE: list[Any] = [
    "", " ", "qty", "1", "'text'", "*", "thing.*", "not", "and", "qty =", "= 1", "(qty = 1", "qty = 1)", "qty = 1, true", "qty = 1 as x",
    "qty = 1; drop table thing", "qty = 1; select 1", "true union select true", "true from thing", "true where true", "true order by 1", "true limit 1",
    "true into x", "with x as (select 1) select true", "exists (select 1 from permission)", "qty in (select id from principal)", "(select true)",
    "qty = (select max(qty) from thing)", "qty = any(array[1])", "qty in ()", "row(1) = row(1)", "(qty, name) = (1, 'a')",
    "pg_sleep(10) is null", "pg_read_file('x') is null", "load_extension('x') is null", "random() > 0", "current_user = 'x'", "version() is null",
    "count(qty) = 1", "sum(qty) over () = 1", "upper(name) = 'A'", "qty::text = '1'", "cast(qty as text) = '1'", "case when ok then true else false end",
    "name = $1", "name = ?", "name = :you", ":me.a.b = 1", "name = 'a\\'", "name = E'a'", "name = $$a$$", "qty = 1\0", "name = U&'a'",
    "nothing = 1", "qty.name = 1", "up.nothing = 1", "other.qty = 1", "main.thing.qty = 1", "data = 1", "data.a = 1", "data is null and data = 'x'",
    "label like qty", "label like name", "label ilike 'b%'", "label ~ 'b'", "label similar to 'b'", "label || 'x' = 'y'", "label like 'a' escape '!'",
    "price + 1 = 2", "abs(price) = 1", "rate % 2 = 0", "price = rate", "qty = 'x'", "qty = '1'", "ok = 1", "ok + 1 = 2", "-name = 'a'", "length(qty) = 1",
    "day = 'never'", "moment > 'soon'", "day = 5", "day < moment", "qty is distinct from 1", "qty is 1", "coalesce(qty, name) = 1", "qty and ok", "not qty",
    "name = 'a' collate nocase", "qty & 1 = 1", "qty << 1 = 2", "interval '1 day' is null", "qty = " + "1" * 4000, 5, b"true", ["true"],
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text)[:40])
def test_what_is_not_of_the_language_is_invalid(shared: Layer, things: dict[str, int], text: Any) -> None:
    with pytest.raises(Invalid):
        shared.fork("hostile", slice={"thing": text})


@pytest.mark.parametrize(
    "text", ["(" * 1900 + "ok" + ")" * 1900, "not " * 990 + "ok", "- " * 1900 + "qty = 1", "ok or " * 660 + "ok"]
)
def test_depth_is_no_way_to_break_it(shared: Layer, things: dict[str, int], text: str) -> None:
    """Refused, or answered: never an error without a name."""
    branch = f"deep_{len(text)}"
    try:
        shared.fork(branch, slice={"thing": text})
    except Invalid:
        return
    assert [r["name"] for r in shared.query("select name from thing order by name", branch=branch)] == ["a", "c"]


@pytest.mark.parametrize(
    "use",
    [
        lambda layer, text: layer.grant("someone", "read", "thing", where=text),
        lambda layer, text: layer.define("with_check", {"qty": {"type": "int", "check": text}}),
        lambda layer, text: layer.alter("thing", change={"mark": {"check": text}}),
        lambda layer, text: layer.grant("someone", "read", "*", where=text),
    ],
    ids=["grant", "check", "changed check", "grant on everything"],
)
def test_everywhere_a_predicate_is_taken_a_hostile_one_is_refused(
    shared: Layer, things: dict[str, int], use: Callable[[Layer, Any], Any]
) -> None:
    for text in ("exists (select 1 from permission)", "true; drop table thing", "qty = (select 1)", "true,", 5):
        before = shared.query("select max(tx) as n from tx")
        with pytest.raises(Invalid):
            use(shared, text)
        assert shared.query("select max(tx) as n from tx") == before


def test_a_quote_in_an_attribute_or_a_name_stays_text(shared: Layer, things: dict[str, int]) -> None:
    for place, hostile in enumerate(("' or true --", "it's*[x]?", "x') or ('1'='1", "\\' or 1=1")):
        name = f"quoted{place}"
        shared.principal(name, attributes={"label": hostile})
        shared.grant(name, "read", "thing", where="label = :me.label")
        found = [row["name"] for row in shared.query("select name from thing", principal=name)]
        assert found == (["c"] if hostile == "it's*[x]?" else [])
