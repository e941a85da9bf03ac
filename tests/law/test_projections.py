"""Projections: a SELECT under a name shows what its definer may see, to those who may read it, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from livinglayer import Layer
from livinglayer.errors import Denied, Invalid, LimitExceeded, NotFound
from livinglayer.law import verbs  # noqa: F401


@pytest.fixture
def tickets(layer: Layer) -> Layer:
    layer.define(
        "ticket",
        {"title": "text!", "status": "text!", "cost": "decimal", "opened": "datetime", "owner": "ref principal"},
    )
    ann, bob = layer.principal("ann"), layer.principal("bob")
    for n, who in enumerate((ann, ann, bob)):
        layer.insert("ticket", {"title": f"t{n}", "status": "open" if n else "shut", "cost": "1.50", "owner": who})
    return layer


def define(layer: Layer, name: str = "open", **more: Any) -> Any:
    given = {
        "statement": "select title from ticket where status = :status order by id",
        "parameters": {"status": "text!"},
    }
    return layer.call("projection.define", {"name": name, **given, **more})


def test_a_projection_is_read_by_name(tickets: Layer) -> None:
    number = define(tickets)
    assert tickets.projection("open", status="open") == [{"title": "t1"}, {"title": "t2"}]
    assert tickets.projection("open", {"status": "shut"}) == [{"title": "t0"}]
    assert tickets.query("select id from projection") == [{"id": number}]


def test_it_says_the_tx_it_shows_and_moves_in_time_and_to_branches(tickets: Layer) -> None:
    from livinglayer.projection.query import read

    define(tickets)
    rows, tx = read(tickets, "open", {"status": "open"}, principal=tickets.my_id)
    assert len(rows) == 2 and tx == tickets.query("select max(tx) as n from tx")[0]["n"]
    tickets.fork("idea")
    tickets.insert("ticket", {"title": "new", "status": "open"}, branch="idea")
    assert len(tickets.projection("open", status="open", branch="idea")) == 3
    assert len(tickets.projection("open", status="open")) == 2
    tickets.insert("ticket", {"title": "later", "status": "open"})
    assert len(tickets.projection("open", status="open", as_of=tx)) == 2
    tickets.call("projection.define", name="open", statement="select 1 as n", branch="idea")
    assert tickets.projection("open", branch="idea") == [{"n": 1}]
    assert len(tickets.projection("open", status="open")) == 3


def test_an_aggregate_shows_what_its_reader_may_not_see_row_by_row(tickets: Layer) -> None:
    define(tickets, "totals", statement="select count(*) as n, sum(cost) as cost from ticket", parameters=None)
    tickets.grant("bob", "read", "ticket", where="owner = :me")
    with pytest.raises(NotFound, match="no projection 'totals'"):
        tickets.projection("totals", principal="bob")
    permission = tickets.grant("bob", "read", "projection:totals")
    (row,) = tickets.projection("totals", principal="bob")
    assert row["n"] == 3 and str(row["cost"]) == "4.50"
    assert len(tickets.query("select * from ticket", principal="bob")) == 1
    tickets.revoke(permission)
    with pytest.raises(NotFound):
        tickets.projection("totals", principal="bob")


def test_it_has_the_rights_of_its_definer_as_they_are_now(tickets: Layer) -> None:
    for entity in ("projection",):
        tickets.grant("ann", "write", entity)
    seen = tickets.grant("ann", "read", "ticket", where="owner = :me")
    tickets.call("projection.define", name="anns", statement="select title from ticket order by id", principal="ann")
    assert [row["title"] for row in tickets.projection("anns")] == ["t0", "t1"]  # the owner reads it with ann's eyes
    tickets.revoke(seen)
    with pytest.raises((NotFound, Invalid)):
        tickets.projection("anns")


def test_me_is_whoever_reads(tickets: Layer) -> None:
    tickets.call("projection.define", name="mine", statement="select title from ticket where owner = :me order by id")
    for name in ("ann", "bob"):
        tickets.grant(name, "read", "projection:mine")
    assert [row["title"] for row in tickets.projection("mine", principal="bob")] == ["t2"]
    assert [row["title"] for row in tickets.projection("mine", principal="ann")] == ["t0", "t1"]
    with pytest.raises(Invalid, match="no parameter 'me'"):
        tickets.projection("mine", {"me": 1}, principal="bob")
    with pytest.raises(Invalid, match="'me' can't be the name"):
        define(tickets, "x", statement="select :me as n", parameters={"me": "int"})


def test_a_permission_with_a_condition_opens_no_projection(tickets: Layer) -> None:
    define(tickets, "totals", statement="select count(*) as n from ticket", parameters=None)
    tickets.grant("bob", "read", "*", where="owner = :me")
    with pytest.raises(NotFound):
        tickets.projection("totals", principal="bob")
    tickets.grant("bob", "read", "projection:totals", branch="idea")
    with pytest.raises(NotFound):
        tickets.projection("totals", principal="bob")
    tickets.fork("idea")
    tickets.grant("bob", "read", "ticket", branch="idea")
    assert tickets.projection("totals", principal="bob", branch="idea") == [{"n": 3}]
    tickets.grant("bob", "read", "projection:totals", effect="deny")
    with pytest.raises(NotFound):
        tickets.projection("totals", principal="bob", branch="idea")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "needs the parameter 'status'"),
        ({"status": 3}, "text"),
        ({"status": "open", "more": 1}, "no parameter 'more'"),
        ({"status": "x" * (2 << 20)}, "bytes|large"),
    ],
)
def test_arguments_are_checked(tickets: Layer, given: dict[str, Any], said: str) -> None:
    define(tickets)
    with pytest.raises((Invalid, LimitExceeded), match=said):
        tickets.projection("open", given)


def test_arguments_have_types_and_defaults(tickets: Layer) -> None:
    define(
        tickets,
        statement="select title from ticket where cost >= :least and (opened is null or opened > :since) and status <> :not_in",
        parameters={"least": "decimal!", "since": "datetime", "not_in": {"type": "text", "default": "shut"}},
    )
    assert len(tickets.projection("open", least="1.5", since="2026-01-01T00:00:00Z")) == 2
    assert tickets.projection("open", least="1.51") == []
    assert len(tickets.projection("open", least=1, not_in="open")) == 1


def test_an_argument_is_a_value_and_never_sql(tickets: Layer) -> None:
    define(tickets)
    assert tickets.projection("open", status="' or 1 = 1 --") == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"statement": "select nothing from ticket", "parameters": None}, "nothing"),
        ({"statement": "select * from nowhere", "parameters": None}, "nowhere"),
        ({"statement": "selec t", "parameters": None}, "SELECT"),
        ({"statement": "delete from ticket", "parameters": None}, "one SELECT"),
        ({"statement": "select 1; select 2", "parameters": None}, "one SELECT"),
        ({"statement": "select :a as a", "parameters": None}, "uses :a"),
        ({"statement": "select 1 as n", "parameters": {"a": "int"}}, "does not use"),
        ({"statement": "select :a as a", "parameters": {"a": "number"}}, "no type 'number'"),
        ({"statement": "select :a as a", "parameters": ["a"]}, "is an object"),
        ({"name": "no spaces"}, "can't be the name"),
        ({"name": "a" * 200}, "can't be the name"),
        ({"freshness": "yesterday"}, "no freshness"),
    ],
)
def test_a_projection_that_could_not_be_read_is_not_defined(tickets: Layer, given: dict[str, Any], said: str) -> None:
    with pytest.raises((Invalid, NotFound), match=said):
        define(tickets, **given)
    assert tickets.query("select * from projection") == []


def test_defining_needs_the_right_and_shows_no_more_than_the_definer_may_see(tickets: Layer) -> None:
    with pytest.raises(Denied):
        tickets.call("projection.define", name="x", statement="select 1 as n", principal="bob")
    tickets.grant("bob", "write", "projection")
    with pytest.raises((Invalid, NotFound), match="ticket"):
        tickets.call("projection.define", name="x", statement="select * from ticket", principal="bob")
    tickets.call("projection.define", name="x", statement="select 1 as n", principal="bob")
    with pytest.raises(NotFound):  # defining is not reading
        tickets.projection("x", principal="bob")


def test_a_removed_projection_is_gone(tickets: Layer) -> None:
    define(tickets)
    tickets.call("projection.remove", name="open")
    with pytest.raises(NotFound):
        tickets.projection("open", status="open")
    with pytest.raises(NotFound):
        tickets.call("projection.remove", name="open")


def test_whoever_may_read_some_sees_those_in_the_list(tickets: Layer) -> None:
    from livinglayer.projection.query import readable

    define(tickets)
    define(tickets, "other")
    tickets.grant("bob", "read", "projection:open")
    with tickets.engine.reading() as session:
        bob = tickets.catalog.principal(session, "bob")["id"]
    assert [row["name"] for row in readable(tickets, bob)] == ["open"]
    assert [row["name"] for row in readable(tickets, tickets.my_id)] == ["open", "other"]
