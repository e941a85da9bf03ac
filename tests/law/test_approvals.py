"""Approvals: what a rule speaks of waits for somebody's yes, with the box frozen; the act is done once, whoever answers for the box."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from law.conftest import define as define_function
from law.test_contracts import ask, outcome, refusal
from sandbox.hosts import Host, wait_until

from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, NotFound
from livinglayer.law import approvals, tending
from livinglayer.law.bound import Bound
from livinglayer.sandbox.sandbox import Sandbox

RULES: list[dict[str, Any]] = [
    {"action": "update", "resource": "ticket", "fields": ["priority"], "where": "priority > 5", "reason": "urgent is dear"},
    {"action": "delete", "resource": "ticket", "by": ["lead"]},
    {"action": "call", "resource": "function:ticket.pay", "where": "amount > 50"},
]  # fmt: skip
CLERK: dict[str, Any] = {
    "name": "clerk", "reads": ["ticket"], "scope": ["ticket"], "functions": ["ticket.pay"], "approvals": RULES, "budget": {"seconds": 600},
}  # fmt: skip
PAY = """
import layer

def pay(id, amount):
    layer.update("ticket", id, note=f"paid {amount}")
    return amount * 2
"""


@pytest.fixture
def office(desk: Layer) -> Iterator[Layer]:
    """A help desk whose clerk must ask for some things; ann has the boxes, lee may say yes."""
    define_function(desk, "ticket.pay", PAY, signature={"arguments": {"id": "int!", "amount": "int!"}})
    for name, roles in (("lead", None), ("ann", None), ("lee", ["lead"]), ("max", None)):
        desk.principal(name, roles=roles)
    desk.call("blueprint.define", name="thin", tier="process")
    desk.call("contract.define", CLERK)
    desk.call("contract.define", {**CLERK, "name": "thin", "blueprint": "thin"})
    for name in ("clerk", "thin"):
        desk.grant("ann", "call", f"contract:{name}")
        desk.grant("lee", "approve", f"contract:{name}")
        desk.grant("max", "approve", f"contract:{name}")
    for action, resource in (("call", "function:ticket.pay"), ("read", "ticket"), ("write", "ticket")):
        desk.grant("ann", action, resource)
    desk.insert("ticket", [{"title": f"t{n}", "priority": n} for n in range(3)])
    tending.of(desk).look()
    yield desk
    for box in Sandbox.list(labels={"layer": desk.id}):
        box.kill()
    tending.of(desk).close()


def make(layer: Layer, contract: str = "clerk") -> tuple[Any, dict[str, Any]]:
    told = layer.call("box.create", contract=contract, principal="ann")
    return Sandbox.connect(told["id"]), told


def begin(box: Any, code: str) -> Any:
    """A program in the box that has begun."""
    return box.start(["python3", "-c", f"import layer\n{code}"])


def ended(box: Any, process: Any) -> str:
    """What a program printed; waits until it is over."""
    wait_until(lambda: box.printed(process.id).over, "the program is over", 60)
    result = process.wait()
    return str((result.stdout.text + result.stderr.text).strip())


def pending(layer: Layer, count: int = 1) -> list[dict[str, Any]]:
    """What waits for an answer; waits for that."""
    sql = "select * from approval where status = 'pending' order by id"
    wait_until(lambda: len(layer.query(sql)) == count, f"{count} wait for a yes", 30)
    return layer.query(sql)


def first(layer: Layer) -> int:
    return int(layer.query("select min(id) as id from ticket")[0]["id"])


@pytest.mark.parametrize("contract", ["clerk", "thin"])
def test_a_box_waits_frozen_and_goes_on_with_the_answer(office: Layer, contract: str) -> None:
    box, told = make(office, contract)
    number = first(office)
    program = begin(
        box, f"layer.timeout = 1\nlayer.update('ticket', {number}, priority=9)\nprint('done', layer.query('select 1 as n'))"
    )  # fmt: skip
    [row] = pending(office)
    wait_until(lambda: box.info()["state"] == "paused", "the box is frozen", 10)
    assert {key: row[key] for key in ("execution", "contract", "branch", "action", "resource", "status", "reason")} == {
        "execution": told["execution"], "contract": contract, "branch": "main", "action": "update", "resource": "ticket",
        "status": "pending", "reason": "urgent is dear",
    }  # fmt: skip
    assert row["request"] == {"do": "update", "given": {"entity": "ticket", "id": number, "values": {"priority": 9}}}
    time.sleep(3)  # longer than the program would wait
    assert office.query("select priority from ticket where id = :id", {"id": number}) == [{"priority": 0}]
    assert box.info()["state"] == "paused"
    assert (
        office.call("approval.answer", id=row["id"], approve=True, reason="fine", principal="max")["status"]
        == "approved"
    )
    assert ended(box, program) == "done [{'n': 1}]"
    assert box.info()["state"] == "running"
    assert office.query("select priority from ticket where id = :id", {"id": number}) == [{"priority": 9}]
    (after,) = office.query("select status, result, answer, answered_by from approval")
    assert after["status"] == "done" and after["result"] == {"ok": True} and after["answer"] == "fine"
    tx = office.query("select principal, execution from tx where tx = (select max(tx) from ticket__history where id = :id)", {"id": number})  # fmt: skip
    assert tx == [{"principal": "ann", "execution": told["execution"]}]
    assert refusal(box, f"layer.update('ticket', {number}, priority=9)") == "None"  # the same again: the same answer
    assert len(office.query("select 1 as n from approval")) == 1
    assert office.verify().ok


def test_a_refusal_and_its_reason_come_back_as_denied_and_are_recorded(office: Layer) -> None:
    box, told = make(office)
    number = first(office)
    code = f"try: layer.delete('ticket', {number})\nexcept layer.Denied as e: print(e)"
    program = begin(box, code)
    [row] = pending(office)
    with pytest.raises(NotFound, match="no approval"):  # whoever may not read them does not learn that there is one
        office.call("approval.answer", id=row["id"], approve=True, principal="ann")
    office.grant("ann", "read", "approval")
    with pytest.raises(Denied, match="ann may not approve contract:clerk"):
        office.call("approval.answer", id=row["id"], approve=True, principal="ann")
    office.grant("max", "read", "approval")
    with pytest.raises(Denied, match=rf"max may not answer approval {row['id']}: lead may"):
        office.call("approval.answer", id=row["id"], approve=True, principal="max")
    with pytest.raises(Denied, match="lead may"):  # a rule that names somebody binds owners too
        office.call("approval.answer", id=row["id"], approve=False)
    office.call("approval.answer", {"id": row["id"], "approve": False, "reason": "we need it"}, principal="lee")
    assert ended(box, program) == "lee has refused to delete ticket: we need it"
    assert ask(box, code) == "lee has refused to delete ticket: we need it"  # nobody is asked again
    assert len(office.query("select 1 as n from approval")) == 1 and len(office.query("select 1 as n from ticket")) == 3
    with pytest.raises(Conflict, match="is refused already"):
        office.call("approval.answer", id=row["id"], approve=True, principal="lee")
    box.kill()
    outcome(office, told["execution"])
    refusals = office.query(
        "select detail from step where execution = :e and kind = 'refusal'", {"e": told["execution"]}
    )
    assert [(each["detail"]["do"], each["detail"]["code"]) for each in refusals] == [("delete", "denied")] * 2
    decisions = office.query(
        "select action, resource, reason from decision where execution = :e", {"e": told["execution"]}
    )
    assert (
        decisions
        == [{"action": "delete", "resource": "ticket", "reason": "lee has refused to delete ticket: we need it"}] * 2
    )
    answers = office.query(
        "select p.name, x.status from execution x join principal p on p.name = x.principal where x.verb = 'approval.answer' order by x.id"
    )
    assert [(each["name"], each["status"]) for each in answers] == [
        ("ann", "failed"), ("ann", "denied"), ("max", "denied"), ("owner", "denied"), ("lee", "done"), ("lee", "failed"),
    ]  # fmt: skip


def test_rules_speak_of_calls_by_their_arguments_and_of_rows_as_they_were_and_as_they_would_be(office: Layer) -> None:
    box, _ = make(office)
    number = first(office)
    assert ask(box, f"print(layer.call('ticket.pay', id={number}, amount=5))") == "10"
    assert ask(box, f"layer.update('ticket', {number}, priority=3)") == ""
    assert ask(box, f"layer.update('ticket', {number}, note='x')") == ""
    assert office.query("select 1 as n from approval") == []
    program = begin(box, f"print(layer.call('ticket.pay', id={number}, amount=51))")
    [row] = pending(office)
    assert (row["action"], row["resource"]) == ("call", "function:ticket.pay")
    assert office.query("select 1 as n from execution where function = 'ticket.pay' and status = 'running'") == []
    office.call("approval.answer", id=row["id"], approve=True)
    assert ended(box, program) == "102"
    assert office.query("select note from ticket where id = :id", {"id": number}) == [{"note": "paid 51"}]
    office.update("ticket", number, {"priority": 9})
    program = begin(box, "layer.upsert('ticket', {'title': 't0', 'priority': 1}, on=['title'])\nprint('down')")
    [row] = pending(office)  # it was urgent, and an upsert of it is an update
    assert (row["action"], row["resource"]) == ("upsert", "ticket")
    office.call("approval.answer", id=row["id"], approve=True)
    assert ended(box, program) == "down"
    assert office.query("select priority from ticket where id = :id", {"id": number}) == [{"priority": 1}]


def test_what_would_be_refused_anyway_is_refused_before_anybody_is_asked(office: Layer) -> None:
    box, _ = make(office)
    number = first(office)
    office.grant("ann", "call", "function:ticket.pay", effect="deny")
    assert refusal(box, f"layer.call('ticket.pay', id={number}, amount=99)").startswith("NotFound")
    assert refusal(box, "layer.delete('ticket', 999999)").startswith("NotFound")
    assert refusal(box, f"layer.update('ticket', {number}, priority='much')").startswith("Invalid")
    office.grant("ann", "delete", "ticket", effect="deny")
    assert refusal(box, f"layer.delete('ticket', {number})").startswith("Denied")
    assert office.query("select 1 as n from approval") == []


def test_what_was_approved_and_can_not_be_done_any_more_fails_and_says_so(office: Layer) -> None:
    box, told = make(office)
    number = first(office)
    program = begin(
        box, f"try: layer.delete('ticket', {number})\nexcept layer.LayerError as e: print(type(e).__name__)"
    )
    [row] = pending(office)
    denial = office.grant("ann", "delete", "ticket", effect="deny")
    office.call("approval.answer", id=row["id"], approve=True, principal="lee")
    assert ended(box, program) == "Denied"
    [after] = office.query("select status, result from approval")
    assert after["status"] == "failed" and after["result"]["error"]["code"] == "denied"
    [decision] = office.query(
        "select action, resource, permissions from decision where execution = :e", {"e": told["execution"]}
    )
    assert (
        decision == {"action": "delete", "resource": "ticket", "permissions": [denial]}
        or denial in decision["permissions"]
    )


def test_nobody_who_answers_in_time_is_a_no(office: Layer) -> None:
    office.call("contract.define", {**CLERK, "approvals": [{"action": "write", "resource": "ticket", "expires": 1.5}]})
    box, _ = make(office)
    assert refusal(box, "layer.insert('ticket', title='new')").startswith(
        "Denied nobody has answered in time to insert"
    )
    [row] = office.query("select * from approval")
    assert row["status"] == "expired" and row["answered_by"] is None
    with pytest.raises(Conflict, match="is expired already"):
        office.call("approval.answer", id=row["id"], approve=True)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)  # the other engine makes no difference to it
def test_waiting_costs_nothing_of_the_seconds_of_a_budget(office: Layer) -> None:
    office.call("contract.define", {**CLERK, "budget": {"seconds": 8}})
    box, told = make(office)
    number = first(office)
    program = begin(box, f"layer.delete('ticket', {number})\nprint(layer.projection('me.budget'))")
    [row] = pending(office)
    time.sleep(10)
    assert office.query("select status from execution where id = :e", {"e": told["execution"]}) == [
        {"status": "running"}
    ]
    office.call("approval.answer", id=row["id"], approve=True, principal="lee")
    budget = {each["resource"]: each for each in eval(ended(box, program))}
    assert budget["seconds"]["amount"] == 8 and budget["seconds"]["used"] < 8
    begin(box, "import time; time.sleep(60)")
    end = outcome(office, told["execution"])
    assert end["status"] == "failed" and "budget of 8 seconds" in end["result"]["error"]["message"]


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)  # the other engine makes no difference to it
def test_a_box_that_asks_a_thousand_times_is_bounded(office: Layer) -> None:
    office.call("contract.define", {**CLERK, "approvals": [{"action": "insert", "resource": "ticket", "expires": 0.01}], "stops": [{"denials": 1000}]})  # fmt: skip
    box, told = make(office)
    code = """
codes = {}
for n in range(1000):
    try:
        layer.insert('ticket', title=f'wish {n}')
    except layer.LayerError as error:
        codes[error.code] = codes.get(error.code, 0) + 1
print(codes)
"""
    program = begin(box, code)
    assert ended(box, program) == "{'denied': 50, 'limit_exceeded': 950}"
    assert len(office.query("select 1 as n from approval")) == approvals.ALL == 50
    assert {row["status"] for row in office.query("select status from approval")} == {"expired"}
    assert len(office.query("select 1 as n from ticket")) == 3
    box.kill()
    outcome(office, told["execution"])
    steps = office.query("select detail from step where execution = :e and kind = 'refusal'", {"e": told["execution"]})
    assert sum(each["detail"]["code"] == "limit_exceeded" for each in steps) == 950
    assert len(office.query("select 1 as n from decision where execution = :e", {"e": told["execution"]})) == 50


def test_a_box_that_is_killed_while_it_waits_asks_no_more(office: Layer) -> None:
    box, told = make(office)
    begin(box, f"layer.delete('ticket', {first(office)})")
    [row] = pending(office)
    box.kill()
    assert outcome(office, told["execution"])["status"] == "done"
    wait_until(lambda: office.query("select status from approval")[0]["status"] == "withdrawn", "it is withdrawn", 10)
    with pytest.raises(Conflict, match="is withdrawn already"):
        office.call("approval.answer", id=row["id"], approve=True, principal="lee")
    assert len(office.query("select 1 as n from ticket")) == 3


def test_on_a_branch_the_act_is_on_the_branch_and_the_asking_on_main(office: Layer) -> None:
    office.fork("idea")
    told = office.call("box.create", contract="clerk", principal="ann", branch="idea")
    box = Sandbox.connect(told["id"])
    number = first(office)
    program = begin(box, f"layer.delete('ticket', {number})\nprint('gone')")
    [row] = pending(office)
    assert row["branch"] == "idea"
    office.call("approval.answer", id=row["id"], approve=True, principal="lee")
    assert ended(box, program) == "gone"
    assert len(office.query("select 1 as n from ticket")) == 3
    assert len(office.query("select 1 as n from ticket", branch="idea")) == 2


@pytest.mark.parametrize("moment", ["pending", "approved"])
def test_a_keeper_killed_while_a_box_waits_is_followed_by_one_who_goes_on(
    layer: Layer, location: str, own_host: Host, moment: str
) -> None:
    layer.define("ticket", {"title": "text!"})
    rule = {"action": "insert", "resource": "ticket"}
    layer.call("contract.define", name="clerk", reads=["ticket"], scope=["ticket"], approvals=[rule])
    told = layer.call("box.create", contract="clerk")
    keeper = tending._started[-1]
    try:
        box = Sandbox.connect(told["id"])
        program = begin(box, "print(layer.insert('ticket', title='once'))")
        [row] = pending(layer)
        wait_until(lambda: box.info()["state"] == "paused", "the box is frozen", 10)
        os.kill(keeper.pid, signal.SIGKILL)
        keeper.wait(10)
        assert box.info()["state"] == "paused"
        if moment == "approved":  # while nobody looks after it: the answer starts somebody
            layer.call("approval.answer", id=row["id"], approve=True)
        else:
            assert tending.ensure(layer) == "started"
        assert tending._started[-1] is not keeper
        keeper = tending._started[-1]
        if moment == "pending":
            time.sleep(2)
            assert box.info()["state"] == "paused" and layer.query("select * from ticket") == []
            layer.call("approval.answer", id=row["id"], approve=True)
        said = ended(box, program)
        [found] = layer.query("select id from ticket where title = 'once'")
        assert said == str(found["id"])  # the program got its answer, of the one act
        [after] = layer.query("select status, result from approval")
        assert after == {"status": "done", "result": {"id": found["id"]}}
        box.kill()
        assert outcome(layer, told["execution"])["status"] == "done"
    finally:
        keeper.terminate()
        keeper.wait(20)
    assert layer.verify().ok


def test_what_was_done_and_not_recorded_as_done_is_not_done_again(office: Layer) -> None:
    """A keeper that ends between the act and its record: the key of the act is in the same tx."""
    box, told = make(office)
    begin(box, f"layer.delete('ticket', {first(office)})")
    [row] = pending(office)
    tending.of(office).close()
    execution = office.ledger.resume(told["execution"])
    run = Bound(office, execution, "main", json.loads((execution.call or {})["arguments"]), box)
    given = row["request"]["given"]
    assert [run.asks._act("delete", given, row["id"]) for _ in range(2)] == [{"ok": True}] * 2
    assert len(office.query("select 1 as n from ticket")) == 2
    office.ledger.let_go(execution)
    office.call("approval.answer", id=row["id"], approve=True, principal="lee")
    keeper = tending._started[-1]  # the answer has started one
    try:
        wait_until(lambda: office.query("select status from approval")[0]["status"] == "done", "it is done", 30)
        assert len(office.query("select 1 as n from ticket")) == 2
        wait_until(lambda: box.info()["state"] == "running", "the box goes on", 30)
        box.kill()
        outcome(office, told["execution"])
    finally:
        keeper.terminate()
        keeper.wait(20)


def test_a_default_is_nobody_s_change(office: Layer) -> None:
    rule = {"action": "insert", "resource": "ticket", "fields": ["priority"], "expires": 0.1}
    office.call("contract.define", {**CLERK, "approvals": [rule]})
    box, _ = make(office)
    assert ask(box, "print(layer.insert('ticket', title='plain') > 0)") == "True"
    assert refusal(box, "layer.insert('ticket', title='urgent', priority=9)").startswith("Denied")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"action": "fly", "resource": "ticket"}, "can't be for 'fly'"),
        ({"action": "insert", "resource": "nothing"}, "nothing"),
        ({"action": "insert"}, "an approval of contract 'x' has"),
        ({"action": "insert", "resource": "ticket", "whree": "1 = 1"}, "has action, by"),
        ({"action": "update", "resource": "ticket", "where": "colour = 3"}, "no field 'colour'"),
        ({"action": "update", "resource": "ticket", "fields": ["colour"]}, "colour"),
        ({"action": "call", "resource": "ticket.pay"}, "function:NAME"),
        ({"action": "call", "resource": "function:ticket.fly"}, "no function 'ticket.fly'"),
        ({"action": "call", "resource": "function:ticket.pay", "where": "colour = 3"}, "no field 'colour'"),
        ({"action": "write", "resource": "*", "where": "id = 3"}, "has no fields and no where"),
        ({"action": "insert", "resource": "ticket", "by": ["nobody"]}, "no principal 'nobody'"),
        ({"action": "insert", "resource": "ticket", "by": []}, "list of principals"),
        ({"action": "insert", "resource": "ticket", "expires": -1}, "expires after"),
        ("insert", "an approval of"),
    ],
)
def test_rules_that_could_not_hold_are_refused(desk: Layer, rule: Any, said: str) -> None:
    define_function(desk, "ticket.pay", PAY, signature={"arguments": {"id": "int!", "amount": "int!"}})
    with pytest.raises((Invalid, NotFound), match=said):
        desk.call("contract.define", {"name": "x", "reads": ["ticket"], "approvals": [rule]})
