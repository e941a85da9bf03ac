"""Agents: a contract with a task, as a program in a box on a branch of its own; what it did is proposed, reviewed and merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sandbox.hosts import wait_until

from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, NotFound
from livinglayer.law import agents, tending
from livinglayer.sandbox.sandbox import Sandbox

CLERK: dict[str, Any] = {
    "name": "clerk",
    "reads": {"ticket": {"fields": ["title", "priority"]}},
    "scope": {"ticket": {"actions": ["update", "insert"], "fields": ["priority", "title"]}},
    "functions": ["ticket.bump"],
    "program": 'layer insert ticket title="$LAYER_TASK" priority=5',
}


@pytest.fixture
def office(desk: Layer) -> Iterator[Layer]:
    """A help desk with a contract, whose agents this process looks after."""
    desk.call("blueprint.define", name="small", limits={"memory": "192M", "disk": "64M"})
    desk.call("contract.define", {**CLERK, "blueprint": "small"})
    desk.principal("ann")
    for action, resource in (
        ("call", "contract:clerk"), ("call", "function:ticket.bump"), ("read", "ticket"), ("write", "ticket"), ("fork", "branch:main"),
    ):  # fmt: skip
        desk.grant("ann", action, resource)
    for n in range(3):
        desk.insert("ticket", {"title": f"t{n}", "priority": n * 3, "note": "secret"})
    tending.of(desk).look()
    yield desk
    for box in Sandbox.list(labels={"layer": desk.id}):
        box.kill()
    tending.of(desk).close()


def run(layer: Layer, **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = layer.call(
        "agent.run", **{"contract": "clerk", "task": "be useful", "principal": "ann", **more}
    )
    return told


def outcome(layer: Layer, told: dict[str, Any], seconds: float = 60) -> dict[str, Any]:
    """How an agent ended; waits for that."""
    sql = "select status, result from execution where id = :id"
    wait_until(
        lambda: layer.query(sql, {"id": told["execution"]})[0]["status"] != "running", "the agent is over", seconds
    )
    return layer.query(sql, {"id": told["execution"]})[0]


def steps(layer: Layer, told: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    rows = layer.query("select n, kind, detail from step where execution = :id order by n", {"id": told["execution"]})
    return [row for row in rows if not kinds or row["kind"] in kinds]


def printed(layer: Layer, told: dict[str, Any]) -> str:
    return "".join(step["detail"].get("text", "") for step in steps(layer, told, "output"))


def titles(layer: Layer, branch: str = "main") -> set[str]:
    return {row["title"] for row in layer.query("select title from ticket", branch=branch)}


def test_an_agent_works_on_its_branch_and_proposes_a_merge(office: Layer) -> None:
    told = run(office)
    ended = outcome(office, told)
    assert ended["status"] == "done", ended
    assert titles(office) == {"t0", "t1", "t2"}
    assert titles(office, told["branch"]) == {"t0", "t1", "t2", "be useful"}
    proposal = ended["result"]["proposal"]
    (row,) = office.query("select status, action, resource, request, contract from approval")
    head = office.query("select max(tx) as tx from change where branch = :b", {"b": told["branch"]})[0]["tx"]
    assert row == {
        "status": "pending", "action": "merge", "resource": f"branch:{told['branch']}", "contract": "clerk",
        "request": {"rows": {"ticket": {"insert": 1}}, "files": 0, "policy": [], "tx": head},
    }  # fmt: skip
    seen = agents.review(office, proposal)
    assert [(change["entity"], change["op"], change["fields"]["title"]) for change in seen["rows"]] == [
        ("ticket", "insert", (None, "be useful"))
    ]
    assert not seen["moved"]
    answer = office.call("approval.answer", id=proposal, approve=True)
    assert answer["status"] == "done" and answer["merged"] == told["branch"]
    assert "be useful" in titles(office)
    assert office.query("select status from approval") == [{"status": "done"}]
    assert not Sandbox.list(labels={"layer": office.id})
    assert office.verify().ok
