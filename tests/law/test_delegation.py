"""Delegation: an agent of another contract does a part, within both contracts and what is left; it can only narrow."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from law.conftest import define as define_function
from law.test_approvals import begin, ended, pending
from law.test_contracts import ask, outcome, refusal
from sandbox.hosts import Host, wait_until

from livinglayer import Layer
from livinglayer.errors import Denied
from livinglayer.law import contracts, delegation, tending
from livinglayer.sandbox.sandbox import Sandbox

WORK = """
import layer, json
told, id = {}, layer.one("select id from ticket")["id"]
def tried(name, act):
    try:
        told[name] = act()
    except layer.LayerError as error:
        told[name] = type(error).__name__
tried("read", lambda: [row["title"] for row in layer.query("select title from ticket order by id")])
tried("note", lambda: layer.query("select note from ticket"))
tried("insert", lambda: layer.insert("ticket", title="child") > 0)
tried("update", lambda: layer.update("ticket", id, priority=1))
tried("call", lambda: layer.call("ticket.bump", id=id))
tried("me", lambda: layer.projection("me.contract")[0])
layer._ask("/return", {"value": told})
"""
HEAD: dict[str, Any] = {
    "name": "head", "reads": {"ticket": {"fields": ["title", "priority"], "where": "priority < 5"}},
    "scope": {"ticket": {"actions": ["insert"], "fields": ["title", "priority"]}}, "functions": ["ticket.bump"],
    "contracts": ["hand", "wide", "head"], "budget": {"seconds": 300, "steps": 200}, "program": ["sleep", "60"],
}  # fmt: skip
HAND: dict[str, Any] = {
    "name": "hand", "reads": {"ticket": {"fields": ["title", "note"], "where": "title <> 't1'"}},
    "scope": {"ticket": {"actions": ["insert", "update"]}}, "functions": [], "program": ["python3", "-c", WORK],
    "budget": {"seconds": 9999, "steps": 50, "cpu": 77},
}  # fmt: skip


@pytest.fixture
def office(desk: Layer) -> Iterator[Layer]:
    desk.principal("ann")
    desk.define("salary", {"amount": "int"})
    desk.call("contract.define", HAND)
    desk.call("contract.define", {**HAND, "name": "wide", "reads": ["ticket", "salary"]})
    desk.call("contract.define", HEAD)
    for action in ("call", "read", "write"):
        desk.grant("ann", action, "*")
    desk.insert("ticket", [{"title": f"t{n}", "priority": n * 3, "note": "secret"} for n in range(3)])
    tending.of(desk).look()
    yield desk
    for box in Sandbox.list(labels={"layer": desk.id}):
        box.kill()
    tending.of(desk).close()


def make(layer: Layer, **more: Any) -> tuple[Any, dict[str, Any]]:
    told = layer.call("box.create", **{"contract": "head", "principal": "ann", **more})
    return Sandbox.connect(told["id"]), told


def test_who_is_delegated_to_may_do_what_both_may(office: Layer) -> None:
    box, told = make(office)
    program = begin(box, "import json; print(json.dumps(layer.delegate('hand', 'look around')))")
    answer = json.loads(ended(box, program))
    assert answer["status"] == "done", answer
    said = answer["answer"]
    assert said["read"] == ["t0"]  # where of both: t1 is not the child's, t2 not the parent's
    assert said["note"] in ("NotFound", "Invalid") and said["insert"] is True
    assert (said["update"], said["call"]) == ("Denied", "Denied")
    me = said["me"]
    assert me["reads"] == {"ticket": {"fields": ["title"], "where": "(priority < 5) and (title <> 't1')"}}
    assert me["scope"] == {"ticket": {"actions": ["insert"], "fields": ["title", "priority"]}}
    assert me["functions"] == [] and me["budget"]["steps"] == 50 and me["budget"]["cpu"] == 77
    assert me["budget"]["seconds"] <= 300
    [child] = office.query(
        "select parent, principal, contract, status from execution where id = :e", {"e": answer["execution"]}
    )
    assert child == {"parent": told["execution"], "principal": "ann", "contract": "hand", "status": "done"}
    assert box.info()["state"] == "running"
    # The same again is the same agent; what it used is used.
    again = json.loads(ask(box, "import json; print(json.dumps(layer.delegate('hand', 'look around')))"))
    assert again["execution"] == answer["execution"]
    budget = {row["resource"]: row for row in eval(ask(box, "print(layer.projection('me.budget'))"))}
    [result] = office.query("select result from execution where id = :e", {"e": answer["execution"]})
    assert budget["steps"]["used"] >= result["result"]["used"]["steps"] > 0


def test_what_the_parent_has_not_is_denied_and_nothing_is_made(office: Layer) -> None:
    box, told = make(office)
    assert "'head' can't delegate to 'wide': that reads 'salary'" in refusal(box, "layer.delegate('wide', 'x')")
    assert "does not delegate to 'agent'" in refusal(box, "layer.delegate('agent', 'x')")
    office.grant("ann", "call", "contract:hand", effect="deny")
    assert "ann may not call contract:hand" in refusal(box, "layer.delegate('hand', 'x')")
    wait_until(
        lambda: len(office.query("select 1 as n from decision where execution = :e", {"e": told["execution"]})) == 3,
        "they are recorded",
    )
    decisions = office.query(
        "select action, resource from decision where execution = :e order by id", {"e": told["execution"]}
    )
    assert decisions == [
        {"action": "delegate", "resource": "contract:wide"},
        {"action": "delegate", "resource": "contract:agent"},
        {"action": "call", "resource": "contract:hand"},
    ]
    assert len(Sandbox.list(labels={"layer": office.id})) == 1
    assert office.query("select 1 as n from execution where contract in ('wide', 'hand')") == []


def test_within_only_narrows(office: Layer) -> None:
    head, hand = contracts.load(office, "head"), contracts.load(office, "hand")
    both = delegation.within(head, hand)
    assert both.scope == {"ticket": {"actions": ["insert"], "fields": ["title", "priority"]}}
    assert both.budget == {"seconds": 300, "steps": 50, "cpu": 77}
    assert both.terms not in (head.terms, hand.terms)
    rule, other = {"action": "insert", "resource": "ticket"}, {"action": "delete", "resource": "ticket"}
    both = delegation.within(
        replace(head, tier="microvm", approvals=(rule,), stops=({"denials": 3},), egress=({"host": "x.test", "action": "deny"}, "*.test")),
        replace(hand, approvals=(other,), egress=("a.test",), minimum="container"),
    )  # fmt: skip
    assert both.tier == "microvm" and both.minimum == "container"
    assert both.approvals == ({**other, "of": None}, {**rule, "of": "head"}) and both.stops == ({"denials": 3},)
    assert both.egress == ({"host": "x.test", "action": "deny"}, "a.test")
    assert delegation.within(replace(head, scope={"ticket": {"actions": ["delete"]}}), hand).scope == {}
    more: list[dict[str, Any]] = [
        {"reads": {"salary": {}}}, {"scope": {"salary": {}}}, {"functions": ("ticket.other",)}, {"egress": ("a.test",)},
        {"secrets": ("KEY",)}, {"blueprint": {"mounts": [{"source": "/etc", "target": "/mnt"}]}},
    ]  # fmt: skip
    for wider in more:
        with pytest.raises(Denied, match="can't delegate to 'hand'"):
            delegation.within(head, replace(hand, **wider))


def test_delegating_to_itself_gives_no_more_than_is_left(office: Layer) -> None:
    code = "import layer\nlayer._ask('/return', {'value': layer.projection('me.budget')})"
    office.call("contract.define", {**HEAD, "program": ["python3", "-c", code], "contracts": ["head"]})
    box, told = make(office)
    ask(box, "for n in range(20): layer.query(f'select {n} as n')")
    answer = eval(ask(box, "print(layer.delegate('head', 'again'))"))
    steps = next(row for row in answer["answer"] if row["resource"] == "steps")
    assert steps["amount"] <= 200 - 20
    ask(box, "for n in range(170):\n    layer.query(f'select {n} as n')")
    end = outcome(office, told["execution"])
    assert "budget of 200 steps" in end["result"]["error"]["message"]


def test_agents_of_agents_end_somewhere(office: Layer) -> None:
    code = "import layer, os\nlayer._ask('/return', {'value': layer.delegate('head', os.environ['LAYER_TASK'] + '+')})"
    office.call("contract.define", {**HEAD, "program": ["python3", "-c", code], "contracts": ["head"]})
    box, told = make(office)
    program = begin(box, "import json; print(json.dumps(layer.delegate('head', 'x')))")
    ended(box, program)
    deep = office.query("select id, parent, status from execution where verb = 'agent.run' order by id")
    assert len(deep) == 4 and [row["parent"] for row in deep] == [told["execution"], *(row["id"] for row in deep[:-1])]
    refused = office.query("select detail from step where execution = :e and kind = 'refusal'", {"e": deep[-1]["id"]})
    assert [step["detail"]["message"] for step in refused] == ["agents delegate to each other at most 4 deep"]


def test_the_rules_of_the_parent_hold_for_the_child_and_its_end_ends_it(office: Layer) -> None:
    office.call("contract.define", {**HEAD, "approvals": [{"action": "insert", "resource": "ticket"}]})
    box, told = make(office)
    begin(box, "layer.delegate('hand', 'look around')")
    [row] = pending(office)
    assert row["contract"] == "hand" and row["execution"] != told["execution"]
    assert box.info()["state"] == "paused"
    box.kill()
    outcome(office, told["execution"])
    end = outcome(office, row["execution"])
    assert end["status"] == "denied" and "which delegated this, is over" in end["result"]["error"]["message"]
    wait_until(lambda: office.query("select status from approval")[0]["status"] == "withdrawn", "it is withdrawn", 10)


def test_a_keeper_killed_while_a_child_works_is_followed_by_one_who_goes_on(layer: Layer, own_host: Host) -> None:
    layer.define("ticket", {"title": "text!"})
    code = "import layer, time\ntime.sleep(4)\nlayer._ask('/return', {'value': 'slept'})"
    layer.call("contract.define", name="hand", reads=["ticket"], program=["python3", "-c", code])
    layer.call("contract.define", name="head", reads=["ticket"], contracts=["hand"])
    told = layer.call("box.create", contract="head")
    keeper = tending._started[-1]
    try:
        box = Sandbox.connect(told["id"])
        program = begin(box, "print(layer.delegate('hand', 'sleep')['answer'])")
        wait_until(lambda: box.info()["state"] == "paused", "the parent waits", 20)
        os.kill(keeper.pid, signal.SIGKILL)
        keeper.wait(10)
        assert tending.ensure(layer) == "started"
        keeper = tending._started[-1]
        assert ended(box, program) == "slept"
        assert len(layer.query("select 1 as n from execution where contract = 'hand'")) == 1
        box.kill()
        assert outcome(layer, told["execution"])["status"] == "done"
    finally:
        keeper.terminate()
        keeper.wait(20)


def test_a_contract_that_delegates_to_nobody_there_is_refused(desk: Layer) -> None:
    from livinglayer.errors import NotFound

    with pytest.raises(NotFound, match="no contract 'nobody'"):
        desk.call("contract.define", name="x", contracts=["nobody"])
    define_function(desk, "ticket.other", "def other(): return 1")
    desk.call("contract.define", name="x", contracts=["x"])  # to itself it may
