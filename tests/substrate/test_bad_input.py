"""Whatever is wrong with a request has a name and a hint, nothing is half-written, and the handle goes on serving.

A full disk, a locked or damaged file, a lost connection and a newer format are shown in tests/reliability.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound

Act = Callable[[Any, int], Any]
WRITES: dict[str, tuple[Act, type[LayerError]]] = {
    "unknown entity": (lambda w, row: w.insert("itme", {"name": "x"}), Invalid),
    "unknown field": (lambda w, row: w.insert("item", {"name": "x", "colour": "red"}), Invalid),
    "unknown field of an update": (lambda w, row: w.update("item", row, {"colour": "red"}), Invalid),
    "unknown row": (lambda w, row: w.update("item", 10**12, {"name": "x"}), NotFound),
    "text for an int": (lambda w, row: w.update("item", row, {"qty": "3"}), Invalid),
    "float for a decimal": (lambda w, row: w.update("item", row, {"price": 0.1}), Invalid),
    "int of 65 bits": (lambda w, row: w.update("item", row, {"qty": 2**64}), Invalid),
    "nan": (lambda w, row: w.update("item", row, {"rate": float("nan")}), Invalid),
    "required and missing": (lambda w, row: w.insert("item", {"qty": 1}), Invalid),
    "required and null": (lambda w, row: w.update("item", row, {"name": None}), Invalid),
    "unique and taken": (lambda w, row: w.insert("item", {"name": "x", "sku": "abc"}), Conflict),
    "broken check": (lambda w, row: w.update("item", row, {"sku": "ab"}), Invalid),
    "no such choice": (lambda w, row: w.update("item", row, {"kind": "c"}), Invalid),
    "reference to nothing": (lambda w, row: w.insert("item", {"name": "x", "up": 10**12}), Invalid),
    "referred to": (lambda w, row: w.delete("item", row), Conflict),
    "illegal transition": (lambda w, row: w.update("item", row, {"status": "done"}), Invalid),
    "no such state": (lambda w, row: w.update("item", row, {"status": "lost"}), Invalid),
    "stale expectation": (lambda w, row: w.update("item", row, {"qty": 1}, expect=1), Conflict),
    "stale expectation of a delete": (lambda w, row: w.delete("item", row, expect=1), Conflict),
    "10 MB of text": (lambda w, row: w.update("item", row, {"name": "x" * (10 << 20)}), LimitExceeded),
    "10 MB of json": (lambda w, row: w.update("item", row, {"data": ["x" * (10 << 20)]}), LimitExceeded),
    "nul": (lambda w, row: w.update("item", row, {"name": "a\0b"}), Invalid),
    "nul in json": (lambda w, row: w.update("item", row, {"data": {"a": "\0"}}), Invalid),
    "lone surrogate": (lambda w, row: w.update("item", row, {"name": "\ud800"}), Invalid),
    "system's own": (lambda w, row: w.insert("permission", {"action": "*"}), Denied),
    "upsert on null": (lambda w, row: w.upsert("item", {"name": "x"}, on=["sku"]), Invalid),
}  # fmt: skip
READS: dict[str, tuple[str, tuple[type[LayerError], ...]]] = {
    "unknown entity": ("select * from itme", (NotFound, Invalid)),
    "unknown field": ("select colour from item", (Invalid, NotFound)),
    "syntax": ("selec * from item", (Invalid,)),
    "insert": ("insert into item(name) values ('x')", (Invalid, Denied)),
    "update": ("update item set name = 'x'", (Invalid, Denied)),
    "delete": ("delete from item", (Invalid, Denied)),
    "drop": ("drop table item", (Invalid, Denied)),
    "two statements": ("select 1; select 2", (Invalid,)),
    "a second that writes": ("select 1; delete from item", (Invalid, Denied)),
    "past the views": ("select * from ledger_tx", (NotFound, Invalid, Denied)),
    "catalogue of sqlite": ("select * from sqlite_master", (NotFound, Invalid, Denied)),
    "catalogue of postgres": ("select * from pg_catalog.pg_class", (NotFound, Invalid, Denied)),
    "nothing": ("", (Invalid,)),
    "nul": ("select 1\0", (Invalid,)),
}


@pytest.fixture
def row(shared: Layer) -> int:
    """A row that another refers to."""
    if "item" not in shared.schema().by_name:
        shared.define(
            "item",
            {
                "name": "text!", "qty": "int", "price": "decimal", "rate": "float", "up": "ref item", "data": "json", "kind": {"type": "enum", "values": ["a", "b"]},
                "status": {"type": "state", "transitions": {"new": ["open"], "open": ["done"], "done": []}},
                "sku": {"type": "text", "unique": True, "check": "length(sku) > 2"},
            },
        )  # fmt: skip
        first = shared.insert("item", {"name": "first", "sku": "abc"})
        shared.insert("item", {"name": "second", "up": first})
    return int(shared.query("select min(id) as id from item")[0]["id"])


def state(layer: Layer) -> Any:
    return [
        layer.query("select max(tx) as tx from tx"),
        layer.query("select * from item order by id"),
        layer.query("select count(*) as n from item__history"),
        layer.query("select count(*) as n from change"),
    ]


@pytest.mark.parametrize("what", WRITES)
def test_a_bad_write_has_a_name_and_a_hint_and_leaves_nothing(shared: Layer, row: int, what: str) -> None:
    act, error = WRITES[what]
    before = state(shared)
    with pytest.raises(error) as caught:
        act(shared, row)
    assert type(caught.value) is error
    with pytest.raises(error), shared.transaction() as tx:
        tx.insert("item", {"name": "before it"})
        act(tx, row)
    assert state(shared) == before
    assert caught.value.hint, caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("who", ["owner", "reader"])
@pytest.mark.parametrize("what", READS)
def test_a_bad_query_has_a_name_and_a_hint_and_changes_nothing(shared: Layer, row: int, what: str, who: str) -> None:
    sql, errors = READS[what]
    if who == "reader" and not shared.can("reader", "read", "item"):
        shared.grant("reader", "read", "item")
    before = state(shared)
    with pytest.raises(errors) as caught:
        shared.query(sql, principal=who)
    assert state(shared) == before
    assert shared.query("select name from item order by id", principal=who)[0] == {"name": "first"}
    assert caught.value.hint, caught.value.message


def test_a_denied_row_and_what_was_seen_too_long_ago_leave_nothing(shared: Layer, row: int) -> None:
    shared.grant("limited", "read", "item")
    shared.grant("limited", "update", "item", where="name = 'second'")
    before = state(shared)
    for act, error in (
        (lambda: shared.update("item", row, {"qty": 1}, principal="limited"), Denied),
        (lambda: shared.insert("item", {"name": "x"}, principal="limited"), Denied),
        (lambda: shared.update("item", row, {"qty": 1}, seen=[("item", row, 1)]), Conflict),
        (lambda: shared.insert("item", {"name": "x"}, seen=[("item", 10**12, 10**6)]), Conflict),
    ):
        with pytest.raises(error) as caught:
            act()
        assert caught.value.hint
    assert state(shared) == before


ODD: dict[str, Callable[[Layer, int], Any]] = {
    "a number for an entity": lambda w, row: w.insert(5, {"name": "x"}),
    "nothing for an entity": lambda w, row: w.insert(None, {"name": "x"}),
    "empty for an entity": lambda w, row: w.insert("", {"name": "x"}),
    "a number for a row": lambda w, row: w.insert("item", 5),
    "text for a row": lambda w, row: w.insert("item", "name"),
    "numbers for rows": lambda w, row: w.insert("item", [5]),
    "a number for a field": lambda w, row: w.insert("item", {5: "x"}),
    "a list for values": lambda w, row: w.update("item", row, ["name"]),
    "text for an id": lambda w, row: w.update("item", str(row), {"qty": 1}),
    "true for an id": lambda w, row: w.delete("item", True),
    "an id of 70 bits": lambda w, row: w.update("item", 2**70, {"qty": 1}),
    "a reference of 70 bits": lambda w, row: w.update("item", row, {"up": 2**70}),
    "text for expect": lambda w, row: w.update("item", row, {"qty": 1}, expect="1"),
    "a number for seen": lambda w, row: w.update("item", row, {"qty": 1}, seen=5),
    "ids for seen": lambda w, row: w.update("item", row, {"qty": 1}, seen=[row]),
    "an unknown entity for seen": lambda w, row: w.update("item", row, {"qty": 1}, seen=[("nothing", 1, 1)]),
    "a number for a reason": lambda w, row: w.update("item", row, {"qty": 1}, reason=5),
    "nul in a reason": lambda w, row: w.update("item", row, {"qty": 1}, reason="\0"),
    "a number for a key": lambda w, row: w.update("item", row, {"qty": 1}, key=5),
    "a number for a branch": lambda w, row: w.update("item", row, {"qty": 1}, branch=5),
    "an unknown branch": lambda w, row: w.update("item", row, {"qty": 1}, branch="nowhere"),
    "a number for a principal": lambda w, row: w.update("item", row, {"qty": 1}, principal=5),
    "an unknown principal": lambda w, row: w.update("item", row, {"qty": 1}, principal="nobody"),
    "a number for on": lambda w, row: w.upsert("item", {"name": "x"}, on=5),
    "a list for an upsert": lambda w, row: w.upsert("item", ["name"], on=["name"]),
    "a list for fields": lambda w, row: w.define("odd", ["name"]),
    "text for unique": lambda w, row: w.define("odd", {"name": "text"}, unique="name"),
    "text for add": lambda w, row: w.alter("item", add="name"),
    "a number for a scope": lambda w, row: w.execution(5).__enter__(),
    "text for a scope's entities": lambda w, row: w.execution({"entities": "item"}).__enter__(),
    "text for a moment to prune": lambda w, row: w.prune("yesterday"),
    "text for a permission": lambda w, row: w.revoke("1"),
    "text for a conflict": lambda w, row: w.resolve("1", 5),
    "a list for attributes": lambda w, row: w.principal("odd_one", attributes=[1]),
    "a number for roles": lambda w, row: w.principal("odd_one", roles=5),
    "a number for a digest": lambda w, row: w.blob(5),
    "a path for a digest": lambda w, row: w.blob("../../etc/passwd"),
    "text for valid_to": lambda w, row: w.grant("odd_one", "read", "item", valid_to="soon"),
    "a number for a resource": lambda w, row: w.can("owner", "read", 5),
}


@pytest.mark.parametrize("what", ODD)
def test_an_argument_of_the_wrong_kind_is_an_error_with_a_name(shared: Layer, row: int, what: str) -> None:
    before = state(shared)
    with pytest.raises((Invalid, NotFound, Conflict)):
        ODD[what](shared, row)
    assert state(shared) == before


def test_a_timeout_of_the_wrong_kind_does_not_keep_the_layer_from_others(layer: Layer) -> None:
    layer.define("item", {"name": "text"})
    for timeout in ("1", None, float("nan"), -1):
        with pytest.raises(LayerError), layer.transaction(timeout=timeout) as tx:  # type: ignore[arg-type]
            tx.insert("item", {"name": "late"})
    layer.insert("item", {"name": "next"})
    assert layer.query("select name from item") == [{"name": "next"}]
