"""Agents: a contract with a task, as a program in a box on a branch of its own; what it did is proposed, reviewed and merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from law.models import APIS, HOST, KEY, model_of, rule_of, scripted
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


TRACED = ("model", "query", "mutation", "refusal", "tool", "approval", "call", "artifact", "answer", "exit")


@pytest.mark.parametrize("api", APIS)
def test_an_agent_from_end_to_end(office: Layer, api: Any) -> None:
    first, second, _ = (row["id"] for row in office.query("select id from ticket order by id"))
    script = [
        {"text": "I look.", "calls": [("query", {"sql": "select id, title, priority from ticket order by id"})], "usage": (100, 10)},
        {"text": "It is urgent.", "calls": [("update_ticket", {"id": first, "priority": 7})], "usage": (200, 20)},
        {"calls": [("shell", {"command": f"env; layer update ticket {first} note=mine"})], "usage": (300, 30)},
        {"text": "It must be bumped.", "calls": [("call_ticket_bump", {"id": second})], "usage": (400, 40)},
        {
            "calls": [("write_file", {"path": "/home/user/report.md", "content": "all is well"}), ("artifact", {"name": "report.md", "content": "all is well"})],
            "usage": (500, 50),
        },
        {"calls": [("finish", {"answer": "two tickets are done"})], "usage": (600, 60)},
    ]  # fmt: skip
    with scripted(script) as model:
        office.call("secret.set", name="MODEL_KEY", value=KEY)
        office.call(
            "blueprint.define", name="asking", limits={"memory": "256M"}, egress=[rule_of(model)], secrets=["MODEL_KEY"]
        )
        office.call("contract.define", {
            **CLERK, "program": None, "blueprint": "asking", "model": model_of(api, prices={"input": 3, "output": 15}),
            "instructions": "You sort tickets.", "budget": {"seconds": 600, "tokens": 100_000, "money": 1}, "artifacts": ["*.md"],
            "approvals": [{"action": "call", "resource": "function:ticket.bump", "reason": "bumping is felt by everybody"}],
        })  # fmt: skip
        for resource in ("secret:MODEL_KEY",):
            office.grant("ann", "use", resource)
        office.principal("lead")
        for action, resource in (
            ("approve", "contract:clerk"),
            ("read", "approval"),
            ("merge", "branch:main"),
            ("write", "ticket"),
            ("read", "ticket"),
        ):
            office.grant("lead", action, resource)
        told = run(office, task="Sort the tickets.")
        wait_until(lambda: office.query("select 1 as n from approval where status = 'pending'"), "it asks", 60)
        box = Sandbox.connect(told["id"])
        wait_until(lambda: box.info()["state"] == "paused", "the box is suspended", 10)
        (asked,) = office.query("select id, action, resource, reason, branch, request from approval")
        assert asked | {"id": 0} == {
            "id": 0, "action": "call", "resource": "function:ticket.bump", "reason": "bumping is felt by everybody", "branch": told["branch"],
            "request": {"do": "call", "given": {"function": "ticket.bump", "arguments": {"id": second}}},
        }  # fmt: skip
        assert titles(office, told["branch"]) == titles(office)
        granted = office.grant(
            "ann", "read", "customer", on=told["branch"]
        )  # somebody else's change is reviewed as well
        with pytest.raises(NotFound, match="no approval"):
            office.call("approval.answer", id=asked["id"], approve=True, principal="ann")
        office.call("approval.answer", id=asked["id"], approve=True, principal="lead", reason="fine")
        ended = outcome(office, told)
        assert ended["status"] == "done", (ended, printed(office, told))
        # The key was with the server and never in the box
        assert {request.headers.get("x-api-key") or request.headers["authorization"] for request in model.requests} <= {
            KEY,
            f"Bearer {KEY}",
        }
        whole = str(office.query("select detail from step where execution = :id", {"id": told["execution"]}))
        assert KEY not in whole and "LAYER_SECRET_MODEL_KEY" in whole
        assert all(KEY not in str(request.body) for request in model.requests)
    assert (ended["result"]["answer"], ended["result"]["exit_code"]) == ("two tickets are done", 0)

    # What it did, by SQL
    kinds = [step["kind"] for step in steps(office, told, *TRACED)]
    assert kinds == [
        "model", "query", "tool", "model", "mutation", "tool", "model", "refusal", "tool", "model", "approval", "approval", "call", "tool",
        "model", "tool", "artifact", "tool", "model", "answer", "exit",
    ]  # fmt: skip
    (refused,) = office.query(
        "select principal, action, resource, allowed, reason from decision where execution = :id",
        {"id": told["execution"]},
    )
    assert not refused["allowed"]
    (used,) = office.query(
        "select principal, contract, received from usage where execution = :id", {"id": told["execution"]}
    )
    assert (used["principal"], used["contract"]) == ("ann", "clerk") and used["received"] > 0
    asked_model = [step["detail"] for step in steps(office, told, "model")]
    assert [(one["api"], one["input"], one["output"], one["status"]) for one in asked_model] == [
        (api, n * 100, n * 10, 200) for n in range(1, 7)
    ]
    assert sum(one["money"] for one in asked_model) == pytest.approx((2100 * 3 + 210 * 15) / 1e6)
    tools = [step["detail"] for step in steps(office, told, "tool")]
    assert [(one["name"], one["where"], one["error"]) for one in tools] == [
        ("query", "layer", False), ("update_ticket", "layer", False), ("shell", "box", False), ("call_ticket_bump", "layer", False),
        ("write_file", "box", False), ("artifact", "layer", False),
    ]  # fmt: skip

    # What it proposes, and what comes of that
    proposal = ended["result"]["proposal"]
    seen = agents.review(office, proposal)
    assert sorted((row["entity"], row["id"], row["op"]) for row in seen["rows"]) == [
        ("ticket", first, "update"),
        ("ticket", second, "update"),
    ]
    assert [(row["entity"], row["id"], row["op"]) for row in seen["policy"]] == [("permission", granted, "insert")]
    assert [one["path"] for one in seen["files"]] == ["/home/user/report.md"]
    assert [one["name"] for one in seen["artifacts"]] == ["report.md"]
    assert office.query("select priority from ticket where id = :id", {"id": first}) == [{"priority": 0}]
    office.call("approval.answer", id=proposal, approve=True)
    assert office.query("select id, priority from ticket where id in (:a, :b) order by id", {"a": first, "b": second}) == [
        {"id": first, "priority": 7}, {"id": second, "priority": 4},
    ]  # fmt: skip
    assert office.query("select action, status from approval order by id") == [
        {"action": "call", "status": "done"}, {"action": "merge", "status": "done"},
    ]  # fmt: skip
    assert office.verify().ok
