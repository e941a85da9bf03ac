"""The one door: nothing changes the layer but code in a scoped execution, and every refusal is recorded."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
from law.conftest import define

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, LayerError, LimitExceeded
from livinglayer.law import verbs
from livinglayer.law.verbs import VERBS
from livinglayer.substrate.ledger import Execution, Scope, Tx
from livinglayer.substrate.schema import OWNER


def decisions(layer: Layer) -> list[dict[str, Any]]:
    layer.insert("item", {"name": "flush"})  # the next tx records what was refused before it
    return layer.query("select principal, action, resource, allowed, reason from decision order by id")


@pytest.fixture
def items(layer: Layer) -> Layer:
    layer.define("item", {"name": "text!", "qty": {"type": "int", "default": 0}})
    return layer


def submit(layer: Layer, execution: Any) -> Any:
    """What the package's own lower layers do with an execution."""

    def act(work: Any) -> Any:
        tx = Tx(work, execution)
        tx.insert("item", {"name": "forged"})
        return tx.finish()

    return layer.ledger.submit(act)


def ended(layer: Layer) -> Execution:
    with layer.execution({"entities": ["item"]}) as scoped:
        scoped.insert("item", {"name": "first"})
        return scoped.execution


def test_a_verb_that_is_one_tx_keeps_its_key_in_it(items: Layer) -> None:
    """So that no crash can come between the two."""
    done: dict[str, dict[str, Any]] = {
        "entity.define": {"name": "thing", "fields": {"n": "text"}},
        "entity.alter": {"name": "thing", "retype": {"n": "int"}},
        "entity.backfill": {"name": "thing", "field": "n"},
        "entity.drop": {"name": "thing"},
        "principal.define": {"name": "kim"},
        "permission.grant": {"principal": "kim", "action": "read", "resource": "item"},
        "permission.revoke": {"id": "permission.grant"},
        "secret.set": {"name": "PIN", "value": "four and more"},
        "secret.remove": {"name": "PIN"},
        "blueprint.define": {"name": "small"},
        "function.define": {"name": "f.act", "code": "pass"},
        "projection.define": {"name": "shown", "statement": "select name from item"},
        "projection.remove": {"name": "shown"},
        "trigger.define": {"name": "t", "function": "f.act", "on_entity": "item"},
        "trigger.enable": {"name": "t", "enabled": False},
        "trigger.remove": {"name": "t"},
        "contract.define": {"name": "c"},
        "contract.remove": {"name": "c"},
        "quota.set": {"resource": "requests", "amount": 1.0, "seconds": 60, "subject": "kim"},
        "quota.remove": {"id": "quota.set"},
        "token.create": {"name": "brief"},
        "token.revoke": {"id": "token.create"},
    }
    gave: dict[str, Any] = {}
    at = items.engine.schema_prefix

    def last() -> int:
        return int(items.query("select max(tx) as n from tx")[0]["n"])

    for name, given in done.items():
        if isinstance(given.get("id"), str):
            given["id"] = gave[given["id"]]
        before = last()
        gave[name] = items.call(name, given, key=f"key of {name}")
        if name == "quota.set":  # one that keeps it right after
            continue
        assert VERBS[name].sealed
        with items.engine.reading() as session:
            kept = session.all(f"select tx from {at}ledger_key where key = ?", (f"key of {name}",))
        assert kept == [(before + 1,)] and last() == before + 1, name
        if name == "token.create":
            with pytest.raises(Conflict, match="told once"):
                items.call(name, given, key=f"key of {name}")
            gave[name] = items.query("select id from token")[0]["id"]
        else:
            assert items.call(name, given, key=f"key of {name}") == gave[name]
        with pytest.raises(Conflict, match="used for another request"):
            items.call(name, {**given, next(iter(given)): 7 if "id" in given else "other"}, key=f"key of {name}")
        assert last() == before + 1, name
    assert {name for name, verb in VERBS.items() if verb.sealed} == done.keys() - {"quota.set"}
    again = items.call("entity.define", name="item", fields={"name": "text!"}, key="nothing to do")
    assert items.call("entity.define", name="item", fields={"name": "text!"}, key="nothing to do") == again is not None
    with pytest.raises(Invalid):
        items.call("entity.alter", name="item", drop=["no_field"], key="refused")
    items.call("entity.alter", name="item", add={"no_field": "text"}, key="refused")  # a refusal uses no key up


def test_a_key_that_another_process_used_meanwhile_does_nothing(items: Layer) -> None:
    """What looked for the key before it was there finds it in its own tx."""
    late = verbs.opened(items, "entity.define", {}, verbs.Asking(OWNER, "main"))
    late.brief, late.once = True, ("shared key", "digest", None)
    items.call("entity.define", name="first", fields={"n": "int"}, key="shared key")
    with pytest.raises(Conflict, match="was answered meanwhile"):
        items.ledger.write(late, "main", lambda tx: tx.insert("item", {"name": "twice"}))
    assert items.query("select name from item") == []


def test_a_key_is_one_servers_while_it_answers(items: Layer, location: str) -> None:
    """Of verbs that are more than one tx: what is asked of two servers at once is done once."""
    began, go = threading.Event(), threading.Event()
    done: list[Any] = []

    def slow(call: Any, *, name: str, **_: Any) -> str:
        done.append(name)
        began.set()
        assert go.wait(20)
        return name

    found = dataclasses.replace(VERBS["branch.fork"], run=slow)
    with livinglayer.open(location) as other, pytest.MonkeyPatch.context() as patched:
        patched.setitem(VERBS, "branch.fork", found)
        patched.setattr(verbs, "_alone", lambda _: contextlib.nullcontext())  # as in another process
        first = threading.Thread(target=lambda: items.call("branch.fork", name="a", key="one"))
        first.start()
        assert began.wait(20)
        with pytest.raises(Conflict, match="is being answered"):
            other.call("branch.fork", name="a", key="one")
        go.set()
        first.join()
        assert other.call("branch.fork", name="a", key="one") == "a" and done == ["a"]


class Unread(list[Any]):
    """A list that nobody may go through."""

    def __iter__(self) -> Any:
        raise AssertionError("it was gone through")


def test_a_huge_list_is_refused_before_anything_goes_through_it(items: Layer) -> None:
    huge = Unread([{}]) * 800_000
    for key in (None, "huge"):
        for verb, given in (
            ("row.change", {"changes": Unread(huge)}),
            ("row.upsert", {"entity": "item", "values": {"name": "x"}, "on": Unread(huge)}),
            ("row.insert", {"entity": "item", "values": {"name": "x"}, "seen": Unread(huge)}),
            ("secret.set", {"name": "PIN", "value": "four and more", "description": "x" * 20_000_000}),
        ):
            with pytest.raises(LayerError) as met:
                items.call(verb, given, key=key)
            assert isinstance(met.value, Invalid if verb == "secret.set" else LimitExceeded)
    with pytest.raises(Invalid, match="is no change"):
        items.call("row.change", {"changes": [[{}] * 800_000]})
    kept = items.query(
        "select verb, arguments from execution where verb in ('row.change', 'row.upsert', 'secret.set') order by id"
    )
    assert [each["verb"] for each in kept] == ["row.change", "row.upsert", "secret.set"] * 2 + ["row.change"]
    assert [each["arguments"] for each in kept if each["verb"] == "row.change"] == [{}, {}, None]
    assert items.query("select count(*) as n from item") == [{"n": 0}]


FORGERIES: dict[str, Callable[[Layer], Any]] = {
    "none": lambda layer: None,
    "a made-up one": lambda layer: Execution(OWNER, Scope(), "forged"),
    "a made-up one with an id": lambda layer: Execution(OWNER, Scope(), "forged", id=2000),
    "a copy of an open one": lambda layer: copy.copy(layer.execution_by(None)),
    "a wider copy": lambda layer: dataclasses.replace(layer.execution_by(None), scope=Scope()),
    "one that looks like it": lambda layer: type("Execution", (), {"principal": OWNER, "scope": Scope(), "open": True, "id": None})(),
    "a finished one": ended,
    "a finished one opened again": lambda layer: _opened_again(ended(layer)),
    "of another layer's ledger": lambda layer: None,
}  # fmt: skip


def _opened_again(execution: Execution) -> Execution:
    execution.open = True
    return execution


@pytest.mark.parametrize("forgery", FORGERIES)
def test_the_lower_layers_refuse_a_forged_execution_and_it_is_recorded(
    items: Layer, forgery: str, make_layer: Callable[[], Layer]
) -> None:
    if forgery == "of another layer's ledger":
        other = make_layer()
        execution: Any = other.execution_by(None)
    else:
        execution = FORGERIES[forgery](items)
    before = items.query("select count(*) as n from item")
    with pytest.raises((Denied, AttributeError)) as caught:
        submit(items, execution)
    with pytest.raises((Denied, AttributeError)):
        items.ledger.write(execution, "main", lambda tx: tx.insert("item", {"name": "forged"}))
    with pytest.raises((Denied, AttributeError)):
        items.ledger.conclude(execution, "done", writes=lambda tx: tx.insert("item", {"name": "forged"}))
    assert items.query("select count(*) as n from item") == before
    assert isinstance(caught.value, Denied)
    found = decisions(items)
    assert len(found) == 3 and all(not row["allowed"] and "execution" in row["reason"] for row in found)
    assert items.verify().ok


def test_an_execution_that_ended_in_another_process_is_over_here_too(items: Layer, location: str) -> None:
    execution = items.ledger.open(OWNER, {"entities": {"item": {}}}, "program")
    execution.call = {"verb": "program"}
    number = items.ledger.intend(execution)
    items.ledger.write(execution, "main", lambda tx: tx.insert("item", {"name": "first"}))
    with livinglayer.open(location) as elsewhere:
        taken = elsewhere.ledger.resume(number)
        elsewhere.ledger.conclude(taken, "done")
        with pytest.raises(Conflict, match="is over"):
            elsewhere.ledger.resume(number)
    with pytest.raises(Denied, match="is over"):
        items.ledger.write(execution, "main", lambda tx: tx.insert("item", {"name": "late"}))
    assert [row["name"] for row in items.query("select name from item")] == ["first"]


@pytest.mark.parametrize(
    "write",
    [
        lambda s: s.insert("other", {"name": "x"}),
        lambda s: s.update("item", s.made, {"qty": 2}),
        lambda s: s.delete("item", s.made),
        lambda s: s.insert("permission", {"subject": OWNER, "action": "*", "resource": "*"}),
        lambda s: s.insert("execution", {"id": 1}),
        lambda s: s.insert("item", {"name": "x"}, branch="idea"),
    ],
    ids=["entity", "field", "action", "permission", "ledger", "branch"],
)
def test_a_write_outside_the_scope_is_refused_and_recorded(items: Layer, write: Callable[[Any], Any]) -> None:
    items.define("other", {"name": "text!"})
    items.fork("idea")
    made = items.insert("item", {"name": "here"})
    scope = {"branch": "main", "entities": {"item": {"actions": ["insert", "update"], "fields": ["name"]}}}
    with items.execution(scope) as scoped:
        scoped.made = made  # type: ignore[attr-defined]
        with pytest.raises(Denied):
            write(scoped)
    assert len([row for row in decisions(items) if not row["allowed"]]) == 1
    assert items.query("select name, qty from item where id = :id", {"id": made}) == [{"name": "here", "qty": 0}]


@pytest.mark.parametrize(
    "sql",
    ["insert into item(name) values ('x')", "update item set name = 'x'", "delete from item", "drop table item",
     "with x as (select 1) delete from item", "select 1; delete from item", "create table t(a int)", "attach 'x' as y",
     "pragma writable_schema = 1", "set role postgres", "copy item to '/tmp/x'", "do $$ begin end $$"],
)  # fmt: skip
def test_sql_can_not_write_and_the_attempt_is_recorded(items: Layer, sql: str) -> None:
    items.insert("item", {"name": "here"})
    with pytest.raises(LayerError):
        items.query(sql)
    assert items.query("select name from item") == [{"name": "here"}]
    found = decisions(items)
    assert found and not found[0]["allowed"]


def test_refusals_of_the_door_are_executions(items: Layer) -> None:
    items.principal("ann")
    for name, arguments in (("row.insert", {"entity": "item", "values": {"name": "x"}}), ("permission.grant", {"principal": "ann", "action": "*", "resource": "*"}),
                            ("entity.define", {"name": "mine", "fields": {"a": "text"}}), ("branch.fork", {"name": "idea"})):  # fmt: skip
        with pytest.raises(LayerError):
            items.call(name, arguments, principal="ann")
        made = items.query("select verb, status, principal, arguments from execution order by id desc limit 1")[0]
        assert (made["verb"], made["principal"]) == (name, "ann") and made["status"] in ("denied", "failed")
        assert made["arguments"].items() >= arguments.items()
    assert items.query("select count(*) as n from item") == [{"n": 0}]


def test_a_denial_names_the_rows_that_decided(items: Layer) -> None:
    items.grant("ann", "insert", "item")
    deny = items.grant("ann", "insert", "item", effect="deny", reason="on leave")
    with pytest.raises(Denied) as caught:
        items.call("row.insert", entity="item", values={"name": "x"}, principal="ann")
    assert deny in caught.value.details["rows"]  # type: ignore[operator]


def test_a_verb_is_one_tx_with_its_outcome(items: Layer) -> None:
    id = items.call("row.insert", entity="item", values={"name": "x"}, reason="stock")
    made = items.query("select id, verb, status, arguments, reason from execution order by id desc limit 1")[0]
    assert made["status"] == "done" and made["verb"] == "row.insert" and made["reason"] == "stock"
    assert made["arguments"] == {"entity": "item", "values": {"name": "x"}}
    written = items.query("select tx from tx where execution = :e", {"e": made["id"]})
    assert len(written) == 1
    assert items.query("select execution from item__history where id = :id", {"id": id}) == [{"execution": made["id"]}]


def test_every_verb_says_what_it_does(items: Layer) -> None:
    for verb in VERBS.values():
        assert (
            verb.name.count(".") == 1 and verb.description.endswith((".", "?")) and verb.signature.arguments is not None
        )


def test_unknown_verbs_and_arguments_are_refused_and_recorded(items: Layer) -> None:
    for name, given in (
        ("no.such", {}),
        ("row.insert", {}),
        ("row.insert", {"entity": "item", "values": {}, "x": 1}),
        ("row.update", {"entity": "item", "id": "1", "values": {}}),
    ):
        with pytest.raises(LayerError):
            items.call(name, given)
        assert items.query("select verb, status from execution order by id desc limit 1") == [
            {"verb": name, "status": "failed"}
        ]


def test_a_finished_execution_can_not_be_used_through_its_channel(desk: Layer) -> None:
    """The capability dies with the execution, whatever the box has kept of it."""
    from livinglayer.law.executions import Run

    kept: list[Run] = []
    original = Run.__init__

    def keep(self: Run, *args: Any, **given: Any) -> None:
        original(self, *args, **given)
        kept.append(self)

    id = desk.insert("ticket", {"title": "t"})
    Run.__init__ = keep  # type: ignore[method-assign]
    try:
        desk.call("ticket.bump", id=id)
    finally:
        Run.__init__ = original  # type: ignore[method-assign]
    for name in ("query", "insert", "update", "me"):
        with pytest.raises(Denied, match="over"):
            kept[0].answer("POST", name, "", {"sql": "select 1", "entity": "ticket", "id": id, "values": {}}, b"")
    with pytest.raises(Denied):
        desk.ledger.write(kept[0].execution, "main", lambda tx: tx.delete("ticket", id))


def test_the_reserved_nouns_are_the_verbs_own(desk: Layer) -> None:
    for noun in {name.split(".")[0] for name in VERBS}:
        with pytest.raises(Invalid):
            define(desk, f"{noun}.mine", "def main(): pass")


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_list_without_end_is_refused_before_it_is_looked_at(layer: Layer) -> None:
    with pytest.raises(LimitExceeded, match="changes has more than 100000 items"):
        layer.call("row.change", changes=[{}] * 100_001)
    assert layer.query("select arguments, status from execution where verb = 'row.change'") == [
        {"arguments": {}, "status": "failed"}
    ]
