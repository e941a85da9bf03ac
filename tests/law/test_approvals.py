"""Approvals: what a rule speaks of waits for somebody's yes, with the box frozen; the act is done once, whoever answers for the box."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from law.conftest import define as define_function
from law.test_contracts import ask, outcome, refusal
from sandbox.hosts import Host, wait_until

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, NotFound
from livinglayer.law import approvals, tending
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
