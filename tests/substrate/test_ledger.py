"""The one write path: checked before it is written, all or nothing, inside an open execution, attributed."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, LayerError, NotFound, TimedOut, Unavailable
from livinglayer.substrate.ledger import GUARDED, Execution, Scope
from livinglayer.substrate.schema import SYSTEM


def last(layer: Layer) -> int:
    return int(layer.query("select max(tx) as n from tx")[0]["n"])


# Writes


def test_a_row_names_content_that_its_writer_gave_sent_or_may_read(shared: Layer) -> None:
    """To know a hash is not to have the content, whichever way a row is to name it."""
    shared.define("paper", {"name": "text", "doc": "file", "draft": "file", "of": "ref principal", "words": "text"})
    anns = sha256(b"ann's").hexdigest()
    for who in ("ann_p", "ben_p"):
        number = shared.principal(who)
        shared.grant(who, "write", "paper")
        shared.grant(who, "read", "paper", where="of = :me.id", fields=["name", "doc", "of", "words"])
        shared.insert("paper", {"name": who, "of": number, "doc": f"{who[:3]}'s".encode(), "draft": b"of nobody"})
    shared.fork("paper_branch")
    (mine,) = shared.query("select id, of from paper", principal="ben_p")
    hidden = sha256(b"of nobody").hexdigest()
    for digest in (anns, hidden, "0" * 64):  # a hidden row's, a hidden field's, and nothing
        row: dict[str, Any] = {"name": "mine", "doc": digest, "of": mine["of"]}
        steals: list[Callable[[], Any]] = [
            lambda row=row: shared.insert("paper", row, principal="ben_p"),
            lambda row=row: shared.insert("paper", [{"name": "x"}, row], principal="ben_p"),
            lambda row=row: shared.insert("paper", row, principal="ben_p", branch="paper_branch"),
            lambda row=row: shared.update("paper", mine["id"], row, principal="ben_p"),
            lambda row=row: shared.upsert("paper", row, on=["of"], principal="ben_p"),
            lambda row=row: shared.call("row.insert", {"entity": "paper", "values": row}, principal="ben_p"),
        ]
        for steal in steals:
            with pytest.raises(NotFound, match=f"there is no content '{digest}'"):
                steal()
        with shared.transaction(principal="ben_p") as tx:
            with pytest.raises(NotFound, match="there is no content"):
                tx.update("paper", mine["id"], {"doc": digest})
    own = sha256(b"ben's").hexdigest()
    given = sha256(b"given").hexdigest()
    with shared.transaction(principal="ben_p") as tx:
        tx.insert("paper", {"doc": b"given"})
        tx.insert("paper", {"doc": given, "of": mine["of"]})  # what this very tx gave
    for branch in ("main", "paper_branch"):
        for digest in (own, given):
            shared.update("paper", mine["id"], {"doc": digest}, principal="ben_p", branch=branch)
    shared.update("paper", mine["id"], {"draft": hidden})  # an owner may,
    with pytest.raises(NotFound, match="there is no content"):  # where there is one: else the layer is not whole
        shared.update("paper", mine["id"], {"draft": "0" * 64})
    with pytest.raises(Invalid, match="text can't become file"):
        shared.alter("paper", retype={"words": "file"})


def test_many_contents_are_not_looked_for_longer_than_one(shared: Layer, shared_location: str) -> None:
    """Others wait for the writer meanwhile."""
    shared.define("sheet", {"doc": "file"})
    shared.principal("copyist")
    shared.grant("copyist", "*", "sheet")
    shared.insert("sheet", [{"doc": b"%d" % n} for n in range(300)])
    found = shared.query("select doc from sheet")
    shared.insert("sheet", found[:3], principal="copyist")
    with livinglayer.open(shared_location, query_seconds=0.1) as hasty:
        with pytest.raises(TimedOut):
            hasty.insert("sheet", found, principal="copyist")
        hasty.insert("sheet", found)


def test_a_write_is_attributed_and_its_tx_is_the_rows_version(shared: Layer) -> None:
    shared.define("note", {"text": "text"})
    row = shared.insert("note", {"text": "a"}, reason="why", cause="because")
    tx = shared.update("note", row, {"text": "b"}, reason="again")
    gone = shared.delete("note", row, expect=tx)
    assert shared.query("select tx, branch, principal, reason, cause from tx order by tx desc limit 3") == [
        {"tx": gone, "branch": "main", "principal": "owner", "reason": None, "cause": None},
        {"tx": tx, "branch": "main", "principal": "owner", "reason": "again", "cause": None},
        {"tx": tx - 1, "branch": "main", "principal": "owner", "reason": "why", "cause": "because"},
    ]
    assert shared.query(f"select tx, op from change where entity = 'note' and row_id = {row} order by tx") == [
        {"tx": tx - 1, "op": "insert"},
        {"tx": tx, "op": "update"},
        {"tx": gone, "op": "delete"},
    ]


def test_a_list_of_rows_is_one_tx_and_one_bad_row_leaves_none(shared: Layer) -> None:
    shared.define("many", {"n": "int!"})
    before = last(shared)
    rows = shared.insert("many", [{"n": n} for n in range(3)])
    assert shared.query("select id, n from many order by id") == [
        {"id": row, "n": n} for n, row in enumerate(sorted(rows))
    ]
    assert last(shared) == before + 1
    with pytest.raises(Invalid, match=r"many\.n is required"):
        shared.insert("many", [{"n": 7}, {}])
    assert (len(shared.query("select id from many")), last(shared)) == (3, before + 1)


def test_a_stale_expectation_changes_nothing(shared: Layer) -> None:
    shared.define("expected", {"n": "int"})
    row = shared.insert("expected", {"n": 1})
    first = last(shared)
    second = shared.update("expected", row, {"n": 2}, expect=first)
    for write in (
        lambda: shared.update("expected", row, {"n": 3}, expect=first),
        lambda: shared.delete("expected", row, expect=first),
    ):
        with pytest.raises(Conflict, match=f"is at version {second}, not {first}") as caught:
            write()
        assert caught.value.hint
    assert shared.query("select n from expected") == [{"n": 2}]


def test_what_was_seen_must_be_unchanged(shared: Layer) -> None:
    shared.define("seen_one", {"n": "int"})
    a, b = shared.insert("seen_one", [{"n": 1}, {"n": 1}])
    read = last(shared)
    shared.update("seen_one", a, {"n": 2}, seen=[("seen_one", b, read)])
    with pytest.raises(Conflict, match=f"seen_one/{a} has changed since tx {read}"):
        shared.update("seen_one", b, {"n": 2}, seen=[("seen_one", a, read)])
    shared.delete("seen_one", a)
    with pytest.raises(Conflict, match="has changed"), shared.transaction(seen=[("seen_one", a, last(shared))]) as tx:
        tx.update("seen_one", b, {"n": 3})
    assert shared.query("select n from seen_one") == [{"n": 1}]


def test_the_same_key_gives_the_same_answer_and_writes_once(shared: Layer) -> None:
    shared.define("keyed", {"n": "int"})
    row = shared.insert("keyed", {"n": 1}, key="k1")
    after = last(shared)
    assert shared.insert("keyed", {"n": 1}, key="k1") == row
    many = shared.insert("keyed", [{"n": 2}, {"n": 3}], key="k2")
    assert shared.insert("keyed", [{"n": 2}, {"n": 3}], key="k2") == many
    assert last(shared) == after + 1
    for other in ({"n": 5}, [{"n": 1}]):
        with pytest.raises(Conflict, match="used for another request"):
            shared.insert("keyed", other, key="k1")
    shared.principal("key_holder")
    shared.grant("key_holder", "write", "keyed")
    assert shared.insert("keyed", {"n": 9}, key="k1", principal="key_holder") != row
    assert [r["n"] for r in shared.query("select n from keyed order by n")] == [1, 2, 3, 9]


def test_a_refused_write_does_not_use_up_its_key(shared: Layer) -> None:
    shared.define("rekeyed", {"n": "int!"})
    with pytest.raises(Invalid):
        shared.insert("rekeyed", {}, key="once more")
    shared.insert("rekeyed", {"n": 1}, key="once more")
    assert shared.query("select n from rekeyed") == [{"n": 1}]


def test_upsert_changes_the_row_it_finds_and_adds_one_it_does_not(shared: Layer) -> None:
    shared.define(
        "stock", {"sku": {"type": "text", "unique": True}, "n": "int", "at": {"type": "text", "default": "here"}}
    )
    row = shared.upsert("stock", {"sku": "a", "n": 1}, on=["sku"])
    shared.update("stock", row, {"at": "there"})
    assert shared.upsert("stock", {"sku": "a", "n": 2}, on=["sku"]) == row
    other = shared.upsert("stock", {"sku": "b"}, on=["sku"])
    assert shared.query("select * from stock order by id") == [
        {"id": row, "sku": "a", "n": 2, "at": "there"},
        {"id": other, "sku": "b", "n": None, "at": "here"},
    ]
    for values, on in (({"n": 1}, ["sku"]), ({"sku": None}, ["sku"]), ({"sku": "a"}, []), ({"sku": "a"}, ["nothing"])):
        with pytest.raises(Invalid):
            shared.upsert("stock", values, on=on)


# Constraints


def test_required_check_enum_and_unique_hold(shared: Layer) -> None:
    shared.define(
        "strict",
        {
            "name": "text!",
            "sku": {"type": "text", "unique": True, "check": "length(sku) > 2"},
            "kind": {"type": "enum", "values": ["a", "b"]},
        },
    )
    row = shared.insert("strict", {"name": "x", "sku": "abc", "kind": "a"})
    other = shared.insert("strict", {"name": "y"})
    refused = [
        ({"name": None}, Invalid),
        ({"sku": "ab"}, Invalid),
        ({"kind": "c"}, Invalid),
        ({"sku": "abc"}, Conflict),
    ]
    for values, error in refused:
        with pytest.raises(error):
            shared.update("strict", other, values)
        with pytest.raises(error):
            shared.insert("strict", {"name": "z", **values})
    shared.update("strict", row, {"sku": "abc"})
    assert shared.query("select name, sku, kind from strict order by id") == [
        {"name": "x", "sku": "abc", "kind": "a"},
        {"name": "y", "sku": None, "kind": None},
    ]


def test_a_state_begins_at_its_first_and_moves_only_along_its_transitions(shared: Layer) -> None:
    moves = {"new": ["open"], "open": ["done", "new"], "done": []}
    shared.define("ticket", {"status": {"type": "state", "transitions": moves}, "title": "text"})
    row = shared.insert("ticket", {"title": "t"})
    with pytest.raises(Invalid, match="begins as 'new'"):
        shared.insert("ticket", {"status": "done"})
    with pytest.raises(Invalid, match="can't go from 'new' to 'done'") as caught:
        shared.update("ticket", row, {"status": "done"})
    assert caught.value.hint == "from 'new' it can go to open"
    shared.update("ticket", row, {"status": "new"})
    shared.update("ticket", row, {"status": "open"})
    shared.update("ticket", row, {"status": "done"})
    with pytest.raises(Invalid, match="is required"):
        shared.update("ticket", row, {"status": None})
    assert [r["status"] for r in shared.query("select status from ticket__history order by tx")] == [
        "new",
        "new",
        "open",
        "done",
    ]


def test_references_lead_somewhere_and_a_delete_does_what_they_say(shared: Layer) -> None:
    shared.define("parent", {"name": "text"})
    shared.define(
        "child",
        {
            "name": "text",
            "kept": "ref parent",
            "cascading": {"type": "ref", "to": "parent", "on_delete": "cascade"},
            "nulled": {"type": "ref", "to": "parent", "on_delete": "null"},
            "above": {"type": "ref", "to": "child", "on_delete": "cascade"},
        },
    )
    with pytest.raises(Invalid, match=f"there is no parent/{10**9}"):
        shared.insert("child", {"kept": 10**9})
    p, q = shared.insert("parent", [{"name": "p"}, {"name": "q"}])
    with pytest.raises(Invalid, match="there is no parent"):
        shared.insert("child", {"kept": shared.insert("child", {"name": "no parent"})})
    top = shared.insert("child", {"name": "cascades", "cascading": p})
    shared.insert("child", {"name": "below", "above": top})
    shared.insert("child", {"name": "nulled", "nulled": p})
    keeper = shared.insert("child", {"name": "keeps", "kept": q, "cascading": q})
    with pytest.raises(Conflict, match=f"child/{keeper}.kept"):
        shared.delete("parent", q)
    tx = shared.delete("parent", p)
    assert shared.query("select name, nulled from child where name is not null order by id") == [
        {"name": "no parent", "nulled": None},
        {"name": "nulled", "nulled": None},
        {"name": "keeps", "nulled": None},
    ]
    assert len(shared.query(f"select row_id from change where tx = {tx}")) == 4


def test_constraints_between_rows_are_looked_at_when_the_tx_ends(shared: Layer) -> None:
    shared.define("seat", {"n": {"type": "int", "unique": True}})
    a, b = shared.insert("seat", [{"n": 1}, {"n": 2}])
    with shared.transaction() as tx:
        tx.update("seat", a, {"n": 2})
        tx.update("seat", b, {"n": 1})
    assert shared.query("select id, n from seat order by n") == [{"id": b, "n": 1}, {"id": a, "n": 2}]
    with pytest.raises(Conflict, match="is there already"), shared.transaction() as tx:
        tx.update("seat", a, {"n": 1})
    assert shared.query("select n from seat order by n") == [{"n": 1}, {"n": 2}]


# Transactions


def test_a_transaction_reads_its_own_writes_and_is_one_tx(shared: Layer) -> None:
    shared.define("account", {"name": "text", "n": "int"})
    before = last(shared)
    with shared.transaction(reason="move", cause="test") as tx:
        a, b = tx.insert("account", [{"name": "a", "n": 5}, {"name": "b", "n": 0}])
        tx.update("account", a, {"n": 2})
        tx.upsert("account", {"name": "b", "n": 3}, on=["name"])
        gone = tx.insert("account", {"name": "gone"})
        tx.delete("account", gone)
        assert tx.query("select name, n from account order by name") == [{"name": "a", "n": 2}, {"name": "b", "n": 3}]
        assert tx.query("select sum(n) as s from account where n > :n", {"n": 2}) == [{"s": 3}]
        assert shared.query("select * from account") == []
    assert tx.number == before + 1 == last(shared)
    assert shared.query(f"select row_id, op from change where tx = {tx.number} order by row_id") == [
        {"row_id": a, "op": "insert"},
        {"row_id": b, "op": "insert"},
    ]


def test_a_transaction_that_fails_or_does_nothing_leaves_no_tx(shared: Layer) -> None:
    shared.define("empty_handed", {"n": "int!"})
    before = last(shared)
    with pytest.raises(ZeroDivisionError), shared.transaction() as tx:
        tx.insert("empty_handed", {"n": 1 // 0 if tx.insert("empty_handed", {"n": 1}) else 2})
    with pytest.raises(Invalid), shared.transaction() as tx:
        tx.insert("empty_handed", {"n": 1})
        tx.insert("empty_handed", {"n": "x"})
    with shared.transaction():
        pass
    assert (last(shared), shared.query("select * from empty_handed")) == (before, [])


def test_a_caught_error_inside_a_transaction_leaves_the_rest_of_it(shared: Layer) -> None:
    shared.define("caught", {"n": "int!"})
    with shared.transaction() as tx:
        tx.insert("caught", {"n": 1})
        with pytest.raises(Invalid):
            tx.insert("caught", {"n": None})
        with pytest.raises(LayerError):
            tx.query("select nothing from caught")
        tx.insert("caught", {"n": 2})
    assert shared.query("select n from caught order by n") == [{"n": 1}, {"n": 2}]


def test_a_transaction_that_is_open_too_long_is_timed_out_and_leaves_nothing(shared: Layer) -> None:
    shared.define("slow", {"n": "int"})
    with pytest.raises(TimedOut), shared.transaction(timeout=0.1) as tx:
        tx.insert("slow", {"n": 1})
        time.sleep(0.2)
        tx.insert("slow", {"n": 2})
    with pytest.raises(TimedOut), shared.transaction(timeout=0.1) as tx:
        tx.insert("slow", {"n": 1})
        time.sleep(0.2)
    shared.insert("slow", {"n": 3})
    assert shared.query("select n from slow") == [{"n": 3}]


def test_a_transaction_belongs_to_its_thread_and_ends_with_its_block(shared: Layer) -> None:
    shared.define("mine", {"n": "int"})
    found: list[BaseException] = []

    def write() -> None:
        try:
            tx.insert("mine", {"n": 1})
        except LayerError as error:
            found.append(error)

    with shared.transaction() as tx:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert [type(error) for error in found] == [Invalid]
    with pytest.raises(Denied, match="is over"):
        tx.insert("mine", {"n": 1})
    with pytest.raises(Denied, match="is over"):
        tx.query("select * from mine")


def test_who_waits_too_long_for_another_writer_is_told_so(shared: Layer, shared_location: str) -> None:
    shared.define("held", {"n": "int"})
    with livinglayer.open(shared_location, busy_seconds=0.2) as other, shared.transaction() as tx:
        tx.insert("held", {"n": 1})
        with pytest.raises(Unavailable) as caught:
            other.insert("held", {"n": 2})
        assert caught.value.hint
        assert other.query("select * from held") == []
    shared.insert("held", {"n": 3})
    assert shared.query("select n from held order by n") == [{"n": 1}, {"n": 3}]


# Executions


def test_an_execution_writes_within_its_scope_only(shared: Layer) -> None:
    shared.define("part", {"qty": "int", "name": "text"})
    small, large = shared.insert("part", [{"qty": 1, "name": "small"}, {"qty": 50, "name": "large"}])
    shared.fork("scoped_away")
    shared.define("elsewhere", {"n": "int"})
    scope = {
        "branch": "main",
        "entities": {"part": {"actions": ["insert", "update"], "fields": ["qty"], "where": "qty < 10"}},
    }
    with shared.execution(scope, reason="count") as ex:
        ex.update("part", small, {"qty": 2})
        new = ex.insert("part", {"qty": 3})
        for write in (
            lambda: ex.delete("part", small),
            lambda: ex.update("part", small, {"name": "x"}),
            lambda: ex.update("part", large, {"qty": 1}),
            lambda: ex.update("part", small, {"qty": 10}),
            lambda: ex.insert("part", {"qty": 11}),
            lambda: ex.insert("part", {"qty": None}),
            lambda: ex.insert("elsewhere", {"n": 1}),
            lambda: ex.update("part", small, {"qty": 1}, branch="scoped_away"),
        ):
            with pytest.raises(Denied, match="scope"):
                write()
        with pytest.raises(Denied, match="scope"), ex.transaction() as tx:
            tx.update("part", small, {"qty": 9})
            tx.delete("part", new)
        with pytest.raises(Invalid, match="opened for"):
            ex.insert("part", {"qty": 1}, principal="owner")
        number = ex.id
    assert shared.query("select id, qty from part order by id") == [
        {"id": small, "qty": 2},
        {"id": large, "qty": 50},
        {"id": new, "qty": 3},
    ]
    with pytest.raises(Denied, match="open execution"):
        ex.update("part", small, {"qty": 1})
    assert shared.query(f"select principal, kind, scope, reason, status from execution where id = {number}") == [
        {"principal": "owner", "kind": "program", "scope": scope, "reason": "count", "status": "done"}
    ]
    assert shared.query(
        f"select b.tier, b.owner from execution e join box b on b.id = e.box where e.id = {number}"
    ) == [{"tier": "process", "owner": "owner"}]


def test_a_scope_given_by_names_covers_those_entities(shared: Layer) -> None:
    shared.define("named_in_scope", {"n": "int"})
    shared.define("not_named", {"n": "int"})
    with shared.execution({"entities": ["named_in_scope"]}) as ex:
        ex.insert("named_in_scope", {"n": 1})
        with pytest.raises(Denied, match="'not_named'"):
            ex.insert("not_named", {"n": 1})
    for scope in (
        {"entity": "x"},
        {"entities": {"named_in_scope": {"verbs": []}}},
        {"entities": {"named_in_scope": "all"}},
    ):
        with pytest.raises(Invalid), shared.execution(scope):
            raise AssertionError("it was opened")


def test_an_execution_that_raises_is_failed_and_one_that_writes_nothing_is_not_recorded(shared: Layer) -> None:
    shared.define("raising", {"n": "int"})
    before = last(shared)
    with shared.execution() as ex:
        assert ex.query("select n from raising") == []
    assert (last(shared), ex.id) == (before, None)
    with pytest.raises(ZeroDivisionError), shared.execution() as ex:
        ex.insert("raising", {"n": 1})
        raise ZeroDivisionError
    assert shared.query(f"select status from execution where id = {ex.id}") == [{"status": "failed"}]
    assert shared.query("select n from raising") == [{"n": 1}]


def test_an_execution_acts_as_its_principal(shared: Layer) -> None:
    shared.define("acted", {"n": "int", "hidden": "text"})
    shared.principal("actor")
    shared.grant("actor", "insert", "acted", fields=["n"])
    shared.grant("actor", "read", "acted", fields=["n"])
    with shared.execution(principal="actor") as ex:
        row = ex.insert("acted", {"n": 1})
        with pytest.raises(Denied):
            ex.insert("acted", {"hidden": "x"})
        assert ex.query("select * from acted") == [{"id": row, "n": 1}]
    assert shared.query("select principal from tx where tx = (select max(tx) from change where entity = 'acted')") == [
        {"principal": "actor"}
    ]


def test_a_forged_copied_or_finished_execution_opens_nothing(shared: Layer) -> None:
    shared.define("forged", {"n": "int"})
    ledger = shared.ledger
    with shared.execution() as ex:
        ex.insert("forged", {"n": 1})
        genuine = ex.execution
        for fake in (Execution(genuine.principal, Scope(), "program"), copy.copy(genuine), object()):
            with pytest.raises(Denied, match="open execution"), ledger.work() as work:
                work.tx(fake)
    genuine.open = True
    with pytest.raises(Denied, match="open execution"):
        ex.insert("forged", {"n": 2})
    ledger.executions.add(genuine)  # even then: its end is recorded
    with pytest.raises(Denied, match="is over"):
        ex.insert("forged", {"n": 3})
    ledger.executions.discard(genuine)
    assert shared.query("select n from forged") == [{"n": 1}]


@pytest.mark.parametrize("name", sorted(GUARDED | {e.name for e in SYSTEM.entities if e.kind == "ledger"}))
def test_system_rows_are_changed_by_verbs_of_their_own_only(shared: Layer, name: str) -> None:
    before = last(shared)
    column = next(iter(SYSTEM.by_name[name].by_name))
    row: dict[str, Any] = {column: "x"}
    for write in (
        lambda: shared.insert(name, row),
        lambda: shared.insert(name, [row]),
        lambda: shared.update(name, 1502, row),
        lambda: shared.delete(name, 1502),
        lambda: shared.upsert(name, row, on=[column]),
    ):
        with pytest.raises(Denied, match=f"'{name}' is"):
            write()
    with pytest.raises(Denied), shared.transaction() as tx:
        tx.insert(name, row)
    assert last(shared) == before


def test_other_system_entities_are_rows_like_any(shared: Layer) -> None:
    row = shared.insert("blueprint", {"name": "small", "tier": "process", "limits": {"memory": "1G"}})
    shared.insert("function", {"name": "greet", "language": "python", "blueprint": row})
    with pytest.raises(Conflict, match="is there already"):
        shared.insert("blueprint", {"name": "small", "tier": "process"})
    with pytest.raises(Conflict, match="is referred to"):
        shared.delete("blueprint", row)
    assert shared.query("select f.name, b.limits from function f join blueprint b on b.id = f.blueprint") == [
        {"name": "greet", "limits": {"memory": "1G"}}
    ]


# Many at once


def test_of_many_threads_that_expect_one_version_one_wins_and_the_others_change_nothing(shared: Layer) -> None:
    shared.define("counter", {"n": "int"})
    row = shared.insert("counter", {"n": 0})
    start = last(shared)
    wins: list[int] = []
    losses: list[type] = []
    others: list[int] = []

    def race() -> None:
        try:
            wins.append(shared.update("counter", row, {"n": 1}, expect=start))
        except LayerError as error:
            losses.append(type(error))
        others.append(shared.insert("counter", {"n": 100}))

    threads = [threading.Thread(target=race) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(wins), losses) == (1, [Conflict] * 11)
    assert sorted(r["id"] for r in shared.query("select id from counter where n = 100")) == sorted(others)
    assert last(shared) == start + 13


PROCESS = """
import json, sys, livinglayer
with livinglayer.open(sys.argv[1]) as layer:
    row = layer.insert("together", {"by": "all"}, key="only once")
    own = layer.insert("together", {"by": sys.argv[2]})
    layer.alter("together", add={"f" + sys.argv[2]: "int"})
    print(json.dumps([row, own, layer.query("select by from together where id = :id", {"id": own})]))
"""


def test_several_processes_write_one_layer_and_share_its_keys(shared: Layer, shared_location: str) -> None:
    shared.define("together", {"by": "text"})
    running = [
        subprocess.Popen([sys.executable, "-c", PROCESS, shared_location, str(n)], stdout=subprocess.PIPE)
        for n in range(3)
    ]
    shared.insert("together", {"by": "here"})
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    assert len({row for row, _, _ in answers}) == 1
    assert [rows for _, _, rows in answers] == [[{"by": str(n)}] for n in range(3)]
    found = shared.query("select * from together order by by")
    assert [r["by"] for r in found] == ["0", "1", "2", "all", "here"]
    assert set(found[0]) == {"id", "by", "f0", "f1", "f2"}
    report = shared.verify()
    assert report, report.problems


def test_a_closed_layer_writes_nothing_more(layer: Layer) -> None:
    layer.define("closed", {"n": "int"})
    layer.close()
    layer.close()
    with pytest.raises(LayerError):
        layer.insert("closed", {"n": 1})


def test_a_row_is_not_found_where_it_is_not(shared: Layer) -> None:
    shared.define("absent", {"n": "int"})
    for write in (lambda: shared.update("absent", 10**9, {"n": 1}), lambda: shared.delete("absent", 10**9)):
        with pytest.raises(NotFound, match=f"there is no absent/{10**9}"):
            write()
