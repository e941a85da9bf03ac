"""Reads: any moment of any branch, every version with who, when and why, values of their type, within limits."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Invalid, LimitExceeded, NotFound, TimedOut
from livinglayer.substrate.reads import Attention
from livinglayer.substrate.schema import OWNER


def last(layer: Layer) -> int:
    return int(layer.query("select max(tx) as n from tx")[0]["n"])


def test_the_past_is_read_by_tx_and_by_time(shared: Layer) -> None:
    shared.define("clocked", {"n": "int"})
    row = shared.insert("clocked", {"n": 0})
    moments: list[tuple[int, datetime]] = []
    for n in (1, 2):
        tx = shared.update("clocked", row, {"n": n})
        time.sleep(0.01)
        moments.append((tx, datetime.now(UTC)))
        time.sleep(0.01)
    shared.delete("clocked", row)
    select = "select n from clocked"
    assert [shared.query(select, as_of=tx) for tx, _ in moments] == [[{"n": 1}], [{"n": 2}]]
    assert [shared.query(select, as_of=at) for _, at in moments] == [[{"n": 1}], [{"n": 2}]]
    assert shared.query(select, as_of=datetime.now(UTC) + timedelta(days=1)) == []
    exact = shared.query(f"select at from tx where tx = {moments[0][0]}")[0]["at"]
    assert shared.query(select, as_of=exact) == [{"n": 1}]
    assert shared.query(select, as_of=exact - timedelta(microseconds=1)) == [{"n": 0}]


def test_a_moment_that_never_was_is_invalid(shared: Layer) -> None:
    for as_of in (0, -1, 10**9, True, "yesterday", 1.5, datetime(2026, 1, 1), datetime(1999, 1, 1, tzinfo=UTC)):
        with pytest.raises(Invalid):
            shared.query("select name from branch", as_of=as_of)
    with pytest.raises((Invalid, NotFound)):
        shared.query("select * from clocked", as_of=1)


def test_the_past_of_a_branch_before_its_fork_is_its_parents(shared: Layer) -> None:
    shared.define("ancestry", {"n": "int"})
    row = shared.insert("ancestry", {"n": 1})
    first = last(shared)
    shared.update("ancestry", row, {"n": 2})
    shared.fork("ancestry_branch")
    forked = last(shared)
    shared.update("ancestry", row, {"n": 3}, branch="ancestry_branch")
    shared.update("ancestry", row, {"n": 4})
    read = [
        shared.query("select n from ancestry", branch="ancestry_branch", as_of=tx)[0]["n"]
        for tx in (first, forked, last(shared))
    ]
    assert read == [1, 2, 3]


def test_history_has_every_version_with_who_when_and_why(shared: Layer) -> None:
    shared.define("told", {"n": "int"})
    shared.principal("hugo")
    shared.grant("hugo", "*", "told")
    row = shared.insert("told", {"n": 1}, reason="begin")
    first = last(shared)
    second = shared.update("told", row, {"n": 2}, reason="go on", principal="hugo")
    shared.fork("told_branch")
    third = shared.delete("told", row, reason="end")
    there = shared.update("told", row, {"n": 5}, branch="told_branch")
    found = shared.query("select * from told__history order by tx, op")
    assert [{k: r[k] for k in ("id", "n", "tx", "tx_end", "op", "principal", "reason", "branch")} for r in found] == [
        {"id": row, "n": 1, "tx": first, "tx_end": second, "op": "insert", "principal": "owner", "reason": "begin", "branch": "main"},
        {"id": row, "n": 2, "tx": second, "tx_end": third, "op": "update", "principal": "hugo", "reason": "go on", "branch": "main"},
        {"id": row, "n": 2, "tx": third, "tx_end": third, "op": "delete", "principal": "owner", "reason": "end", "branch": "main"},
    ]  # fmt: skip
    assert all(type(r["at"]) is datetime and r["at"].tzinfo and type(r["execution"]) is int for r in found)
    assert shared.query("select n, tx, tx_end, branch from told__history order by tx", branch="told_branch") == [
        {"n": 1, "tx": first, "tx_end": second, "branch": "main"},
        {"n": 2, "tx": second, "tx_end": there, "branch": "main"},
        {"n": 5, "tx": there, "tx_end": None, "branch": "told_branch"},
    ]
    assert shared.query("select n, tx_end from told__history order by tx", as_of=second) == [
        {"n": 1, "tx_end": second},
        {"n": 2, "tx_end": None},
    ]


def test_who_may_not_read_the_ledger_sees_versions_without_names(shared: Layer) -> None:
    shared.define("whispered", {"n": "int"})
    shared.insert("whispered", {"n": 1}, reason="secret reason")
    shared.grant("ines", "read", "whispered")
    (version,) = shared.query("select * from whispered__history", principal="ines")
    assert {k: version[k] for k in ("n", "op", "tx_end", "principal", "reason", "execution", "branch")} == {
        "n": 1, "op": "insert", "tx_end": None, "principal": None, "reason": None, "execution": None, "branch": None,
    }  # fmt: skip


def test_history_gives_way_to_fields_that_have_its_names(shared: Layer) -> None:
    names = ("at", "principal", "reason", "execution", "branch")
    shared.define("clashing", dict.fromkeys(names, "text"))
    row = shared.insert("clashing", {name: f"own {name}" for name in names}, reason="why")
    (version,) = shared.query("select * from clashing__history")
    assert {name: version[name] for name in names} == {name: f"own {name}" for name in names}
    assert {k: version[f"tx_{k}"] for k in ("principal", "reason", "branch")} == {
        "principal": "owner",
        "reason": "why",
        "branch": "main",
    }
    assert (version["id"], version["op"], type(version["tx_at"]), type(version["tx_execution"])) == (
        row,
        "insert",
        datetime,
        int,
    )


TYPED: list[tuple[str, Any]] = [
    ("select sum(price) as x from typed", Decimal("3.75")),
    ("select sum(price) from typed", Decimal("3.75")),
    ("select sum(distinct price) as x from typed", Decimal("3.75")),
    ("select min(price) as x from typed", Decimal("1.25")),
    ("select max(moment) as x from typed", datetime(2026, 1, 2, 3, tzinfo=UTC)),
    ("select min(day) as x from typed", date(2026, 1, 1)),
    ("select coalesce(price, price) as x from typed where name = 'a'", Decimal("1.25")),
    ("select case when n > 0 then price end as x from typed where name = 'a'", Decimal("1.25")),
    ("select case when n > 0 then day else null end as x from typed where name = 'b'", date(2026, 1, 2)),
    ("select (select max(day) from typed) as x", date(2026, 1, 2)),
    ("with t as (select price as p from typed) select sum(p) as x from t", Decimal("3.75")),
    ("select x from (select max(price) as x from typed) s", Decimal("2.50")),
    ("select sum(price) over (order by id) as x from typed order by id desc limit 1", Decimal("3.75")),
    ("select lag(price) over (order by id) as x from typed order by id desc limit 1", Decimal("1.25")),
    ("select ok as x from typed where name = 'a'", True),
    ("select n > 1 as x from typed where name = 'a'", False),
    ("select n is null as x from typed where name = 'a'", False),
    ("select t.data as x from typed t where t.name = 'a'", {"k": [1]}),
    ("select price as x from typed union all select price from typed order by 1 limit 1", Decimal("1.25")),
    ("select count(*) as x from typed", 2),
    ("select count(distinct price) as x from typed", 2),
    ("select name || '!' as x from typed where name = 'a'", "a!"),
    ("select n + 1 as x from typed where name = 'a'", 2),
    ("select name as price from typed where name = 'a'", "a"),
    ("select max(at) is not null as x from tx", True),
]


@pytest.mark.parametrize(("sql", "value"), TYPED, ids=[sql for sql, _ in TYPED])
def test_an_expression_has_the_type_of_what_it_is_made_of(shared: Layer, sql: str, value: Any) -> None:
    if "typed" not in shared.schema().by_name:
        shared.define(
            "typed",
            {
                "name": "text",
                "n": "int",
                "price": "decimal",
                "day": "date",
                "moment": "datetime",
                "ok": "bool",
                "data": "json",
            },
        )
        for place, (name, price) in enumerate((("a", "1.25"), ("b", "2.50")), start=1):
            shared.insert(
                "typed",
                {"name": name, "n": place, "price": price, "day": date(2026, 1, place), "moment": datetime(2026, 1, place, 3, tzinfo=UTC),
                 "ok": True, "data": {"k": [place]}},
            )  # fmt: skip
    (found,) = [next(iter(row.values())) for row in shared.query(sql)]
    assert (found, type(found)) == (value, type(value))


def test_columns_of_one_name_are_all_kept(shared: Layer) -> None:
    shared.define("doubled", {"n": "int"})
    row = shared.insert("doubled", {"n": 1})
    assert shared.query("select a.id, b.id, a.n, b.n + 1 as n from doubled a join doubled b on a.id = b.id") == [
        {"id": row, "id_2": row, "n": 1, "n_2": 2}
    ]


def test_more_rows_than_the_limit_are_refused_not_cut(shared: Layer, shared_location: str) -> None:
    shared.define("counted", {"n": "int"})
    shared.insert("counted", [{"n": n} for n in range(10)])
    assert len(shared.query("select n from counted", limit=10)) == 10
    with pytest.raises(LimitExceeded, match="more than 9 rows") as caught:
        shared.query("select n from counted", limit=9)
    assert caught.value.hint
    with livinglayer.open(shared_location, query_rows=3) as narrow:
        with pytest.raises(LimitExceeded):
            narrow.query("select n from counted")
        assert narrow.query("select n from counted order by n limit 1") == [{"n": 0}]
    with shared.transaction() as tx, pytest.raises(LimitExceeded):
        tx.query("select n from counted", limit=9)


ENDLESS = "with recursive r(n) as (select 1 union all select n + 1 from r) select count(*) as n from r"


def test_who_is_no_owner_names_no_long_deadline(shared: Layer, shared_location: str) -> None:
    shared.principal("patient")
    for seconds in (60.5, 86_400):
        with pytest.raises(Invalid, match="60 seconds at most"):
            shared.query("select 1 as n", principal="patient", timeout=seconds)
    assert shared.query("select 1 as n", principal="patient", timeout=60) == [{"n": 1}]
    assert shared.query("select 1 as n", timeout=86_400) == [{"n": 1}]
    with livinglayer.open(shared_location, longest_seconds=100) as lasting:
        assert lasting.query("select 1 as n", principal="patient", timeout=100) == [{"n": 1}]


@pytest.mark.parametrize("who", ["owner", "leaver"])
def test_a_query_ends_when_nobody_waits_for_it_any_more(shared: Layer, who: str) -> None:
    shared.principal("leaver")
    endless = "with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) as n from c"
    attention = Attention()
    leaving = threading.Timer(0.5, attention.lose)
    leaving.start()
    began = time.monotonic()
    with pytest.raises((TimedOut, LimitExceeded)):
        shared.query_at(endless, principal=who, timeout=60, trusted=who == "owner", attention=attention)
    assert time.monotonic() - began < 30
    with pytest.raises(TimedOut, match="has gone"):
        shared.query_at("select 1 as n", principal=who, attention=attention)
    assert shared.query("select 1 as n", principal=who) == [{"n": 1}]


class Late(Attention):
    """Of somebody who goes when the answer is there already."""

    @contextlib.contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        with super().ending(end):
            yield
            self.lose()


@pytest.mark.parametrize("who", ["owner", "goer"])
def test_what_was_ended_with_its_answer_in_hand_answers_nobody_else(shared: Layer, who: str) -> None:
    shared.principal("goer")
    for n in range(10):
        with pytest.raises(TimedOut, match="has gone"):
            shared.query_at("select 0 as n", principal=who, trusted=who == "owner", attention=Late())
        assert shared.query(f"select {n} as n", principal=who) == [{"n": n}]


def test_a_reader_whose_end_was_interrupted_leaves_no_old_moment_behind(shared: Layer) -> None:
    shared.define("moving", {"n": "int"})
    if shared.engine.dialect != "sqlite":
        return
    reader, _ = shared.reads.borrow("main", None, OWNER)
    reader.connection.execute("begin")
    assert list(reader.connection.execute("select count(*) from main.ledger_tx"))
    reader.close()
    assert not reader.connection.in_transaction


def test_a_process_with_many_files_open_asks_its_readers_too(location: str) -> None:
    with livinglayer.open(location, create=True) as layer, contextlib.ExitStack() as files:
        layer.principal("reader")
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
            pytest.skip("no more than 2048 files may be open")
        with open(os.devnull) as nothing:
            for _ in range(1100):
                files.callback(os.close, os.dup(nothing.fileno()))
        assert layer.query("select 1 as n", principal="reader") == [{"n": 1}]


def test_a_deadline_is_met_by_the_owners_queries_too_and_others_go_on(shared: Layer, shared_location: str) -> None:
    shared.define("quick", {"n": "int"})
    shared.insert("quick", {"n": 1})
    answers: list[Any] = []
    other = threading.Thread(target=lambda: answers.append(shared.query("select n from quick")))
    started = time.monotonic()
    other.start()
    with pytest.raises(TimedOut) as caught:
        shared.query(ENDLESS, timeout=0.5)
    assert caught.value.hint
    assert time.monotonic() - started < 3
    other.join()
    with livinglayer.open(shared_location, query_seconds=0.3) as hasty, pytest.raises(TimedOut):
        hasty.query(ENDLESS)
    with shared.transaction() as tx:
        tx.insert("quick", {"n": 2})
        with pytest.raises(TimedOut):
            tx.query(ENDLESS, timeout=0.3)
        assert tx.query("select count(*) as n from quick") == [{"n": 2}]
    assert answers == [[{"n": 1}]]
    assert shared.query("select count(*) as n from quick") == [{"n": 2}]


def test_what_is_no_request_is_invalid(shared: Layer) -> None:
    for more in ({"timeout": 0}, {"timeout": -1}, {"timeout": "1"}, {"timeout": float("inf")}, {"limit": -1}, {"limit": 1.5}, {"params": "x"}, {"params": 5},
                 {"params": {"n": object()}}, {"branch": 5}):  # fmt: skip
        with pytest.raises(Invalid):
            shared.query(
                "select name from branch where name = :n" if "params" in more else "select name from branch", **more
            )
    with pytest.raises(Invalid):
        shared.query("select name from branch where name = :n", {"other": 1})
    with pytest.raises(NotFound, match="nobody_there"):
        shared.query("select name from branch", principal="nobody_there")
    with pytest.raises(NotFound, match="no_branch"):
        shared.query("select name from branch", branch="no_branch")


def test_a_reader_sees_schema_and_grants_as_they_are_now(shared: Layer) -> None:
    """A name's meaning may change between two reads, also where neither shows a row of the other."""
    shared.define("changing", {"name": "text", "n": "int"})
    shared.insert("changing", [{"name": "one", "n": 1}, {"name": "two", "n": 2}])
    first = shared.grant("rea", "read", "changing", where="n = 1")
    select = "select n from changing where name = 'two'"
    assert shared.query(select, principal="rea") == []
    shared.grant("rea", "read", "changing", where="n = 2")
    assert shared.query(select, principal="rea") == [{"n": 2}]
    shared.revoke(first)
    assert shared.query("select n from changing order by n", principal="rea") == [{"n": 2}]
    other = "select count(*) as n from changing where name = 'three'"
    assert shared.query(other) == [{"n": 0}]
    shared.alter("changing", rename={"name": "old_name"}, add={"name": "text"})
    shared.insert("changing", {"name": "three"})
    assert shared.query(other) == [{"n": 1}]


def test_the_systems_entities_can_be_read_as_they_were(shared: Layer) -> None:
    before = last(shared)
    shared.fork("recent")
    assert shared.query("select name from branch where name = 'recent'") == [{"name": "recent"}]
    assert shared.query("select name from branch where name = 'recent'", as_of=before) == []
    assert shared.query("select name, op from branch__history where name = 'recent'") == [
        {"name": "recent", "op": "insert"}
    ]
