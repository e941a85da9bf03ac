"""Agents: a contract with a task, as a program in a box on a branch of its own; what it did is proposed, reviewed and merged."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from law.models import APIS, KEY, model_of, rule_of, scripted
from sandbox.hosts import Host, wait_until

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


# Programs


PYTHON = """
import os, sys, layer
first = layer.one("select id, priority from ticket order by id")
layer.update("ticket", first["id"], priority=first["priority"] + 10)
print("task:", os.environ["LAYER_TASK"])
print("to stderr", file=sys.stderr)
layer.answer({"done": first["id"]})
"""


def test_any_command_can_be_an_agent(office: Layer) -> None:
    told = run(office, command=["python3", "-c", PYTHON])
    ended = outcome(office, told)
    first = office.query("select min(id) as id from ticket")[0]["id"]
    assert ended["status"] == "done" and ended["result"]["answer"] == {"done": first}
    texts = {step["detail"]["stream"]: step["detail"]["text"] for step in steps(office, told, "output")}
    assert texts == {"stdout": "task: be useful\n", "stderr": "to stderr\n"}
    assert office.query("select priority from ticket where id = :id", {"id": first}, branch=told["branch"]) == [
        {"priority": 10}
    ]
    assert office.query("select priority from ticket where id = :id", {"id": first}) == [{"priority": 0}]


@pytest.mark.parametrize(
    "command",
    [
        "layer answer 'all is done'",
        "echo all is done | layer answer -",
        ["node", "-e", "require('layer').answer('all is done')"],
    ],
)
def test_a_program_gives_its_answer(office: Layer, command: Any) -> None:
    ended = outcome(office, told := run(office, command=command))
    assert (ended["status"], ended["result"]["answer"]) == ("done", "all is done"), printed(office, told)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("exit 3", "the program exited with 3"),
        ("kill -9 $$", "the program was killed by signal 9"),
        (["/no/such"], "the program could not run: command '/no/such' was not found in the box"),
        ("""curl -s "$LAYER_URL/return" -d '{"error": {"message": "I give up"}}'; exit 1""", "I give up"),
    ],
)
def test_a_program_that_fails_fails_the_agent_and_is_not_proposed(office: Layer, command: Any, message: str) -> None:
    if isinstance(command, str):
        command = f"layer insert ticket title=half; {command}"
    told = run(office, command=command)
    ended = outcome(office, told)
    assert (ended["status"], ended["result"]["error"]["message"]) == ("failed", message)
    assert ended["result"]["proposal"] is None and office.query("select id from approval") == []
    assert ("half" in titles(office, told["branch"])) == isinstance(command, str)


def test_an_agent_that_ends_at_once_and_one_that_changes_nothing_propose_nothing(office: Layer) -> None:
    for command in ("true", "layer query 'select id from ticket'"):
        ended = outcome(office, run(office, command=command))
        assert (ended["status"], ended["result"]["proposal"]) == ("done", None)
    told = run(office, command='id=$(layer insert ticket title=x); layer query "select 1"')
    assert outcome(office, told)["result"]["proposal"] is not None
    assert outcome(office, run(office, propose=False))["result"]["proposal"] is None


def test_what_a_program_prints_is_kept_in_steps_and_beyond_a_measure_by_content(office: Layer) -> None:
    told = run(office, command=["python3", "-c", "for n in range(10000): print('line', n, '\u00e9')"])
    assert outcome(office, told)["status"] == "done"
    found = [step["detail"] for step in steps(office, told, "output") if "from" in step["detail"]]
    shown = "".join(one.get("text", "") for one in found)
    assert 60_000 < len(shown.encode()) <= 70_000
    at = 0
    for one in found:
        assert one["from"] == at
        at += one["bytes"]
    whole = b"".join(one["text"].encode() if "text" in one else office.blob(one["content"]) for one in found)
    assert whole.decode() == "".join(f"line {n} é\n" for n in range(10000))


def test_what_is_printed_faster_than_anybody_listens_is_lost_and_said_to_be(office: Layer) -> None:
    told = run(office, command=["python3", "-c", "print('x' * 1000000)"])
    assert outcome(office, told)["status"] == "done"
    found = [step["detail"] for step in steps(office, told, "output")]
    assert sum(one.get("bytes", 0) + one.get("lost", 0) for one in found) == 1_000_001
    assert sum(one.get("bytes", 0) for one in found) > 200_000


def test_what_a_program_must_keep_is_looked_for_at_its_end(office: Layer) -> None:
    office.call("contract.define", {**CLERK, "blueprint": "small", "artifacts": ["report.md", "*.png"]})
    told = run(office, command="echo hi > report.md; layer artifact report.md; layer insert ticket title=x")
    ended = outcome(office, told)
    assert (
        ended["status"] == "failed"
        and ended["result"]["error"]["message"] == "it has not kept *.png, which its contract requires"
    )
    assert office.query("select id from approval") == []
    told = run(
        office,
        command="echo hi > report.md; layer artifact report.md; cp report.md a.png; layer artifact a.png; layer insert ticket title=x",
    )
    assert outcome(office, told)["status"] == "done"


# How long it may


@pytest.mark.parametrize("budget", [{"seconds": 2}, {"steps": 20}])
def test_a_program_that_does_not_end_is_ended_by_its_budget(office: Layer, budget: dict[str, Any]) -> None:
    office.call("contract.define", {**CLERK, "blueprint": "small", "budget": budget})
    told = run(office, command="while true; do layer query 'select id from ticket' > /dev/null; done")
    ended = outcome(office, told)
    (name,) = budget
    assert (
        ended["status"] == "failed"
        and f"over its budget of {budget[name]} {name}" in ended["result"]["error"]["message"]
    )
    assert ended["result"]["proposal"] is None
    assert not Sandbox.list(labels={"layer": office.id})


def test_an_agent_is_stopped_by_its_principal_or_an_owner(office: Layer) -> None:
    office.principal("bob")
    told = run(office, command="layer insert ticket title=half; sleep 1000")
    wait_until(lambda: "half" in titles(office, told["branch"]), "it works", 30)
    with pytest.raises(Denied, match="may not stop agent"):
        office.call("agent.stop", agent=told["branch"], principal="bob")
    office.call("agent.stop", agent=told["box"], principal="ann")
    ended = outcome(office, told)
    assert (ended["status"], ended["result"]["error"]["message"]) == (
        "failed",
        "it was stopped before its program ended",
    )
    assert office.query("select id from approval") == [] and "half" in titles(office, told["branch"])
    with pytest.raises(Conflict, match="is over: failed"):
        office.call("agent.stop", agent=str(told["execution"]))
    with pytest.raises(NotFound, match="no agent 'nobody'"):
        office.call("agent.stop", agent="nobody")


def test_an_agent_that_waits_for_a_yes_can_be_stopped(office: Layer) -> None:
    approvals = [{"action": "insert", "resource": "ticket"}]
    office.call("contract.define", {**CLERK, "blueprint": "small", "approvals": approvals})
    told = run(office)
    wait_until(lambda: office.query("select id from approval"), "it asks", 30)
    office.call("agent.stop", agent=told["branch"])
    ended = outcome(office, told)
    assert (ended["status"], ended["result"]["error"]["message"]) == (
        "failed",
        "it was stopped before its program ended",
    )
    assert office.query("select status from approval") == [{"status": "withdrawn"}]
    assert titles(office, told["branch"]) == titles(office)


def test_an_agent_whose_branch_is_closed_meanwhile_ends_and_proposes_nothing(office: Layer) -> None:
    told = run(office, command="layer insert ticket title=half; sleep 2; layer insert ticket title=more")
    wait_until(lambda: "half" in titles(office, told["branch"]), "it works", 30)
    office.discard(told["branch"])
    ended = outcome(office, told)
    assert (ended["status"], ended["result"]["proposal"]) == ("failed", None)
    assert "no branch" in printed(office, told)
    told = run(office, command="layer insert ticket title=half; sleep 2")
    wait_until(lambda: "half" in titles(office, told["branch"]), "it works", 30)
    office.discard(told["branch"])
    ended = outcome(office, told)
    assert (ended["status"], ended["result"]["proposal"]) == ("done", None)
    assert not Sandbox.list(labels={"layer": office.id})


@pytest.mark.parametrize("name", ["Big Idea", "7", "!!", "x" * 80, "a__b"])
def test_an_agent_is_called_by_a_name_that_branches_and_boxes_can_have(office: Layer, name: str) -> None:
    told = run(office, name=name, command="true")
    assert outcome(office, told)["status"] == "done"
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", told["branch"]) and len(told["branch"]) <= 48


def test_an_agent_whose_box_dies_has_an_end_that_says_so(office: Layer) -> None:
    told = run(office, command="layer insert ticket title=half; sleep 1000")
    wait_until(lambda: "half" in titles(office, told["branch"]), "it works", 30)
    os.kill(Sandbox.connect(told["id"]).info()["pid"], signal.SIGKILL)
    ended = outcome(office, told)
    assert ended["status"] == "failed" and ended["result"]["proposal"] is None, ended
    assert ended["result"]["error"]["message"]


# Branches


def test_two_agents_at_once_work_on_two_branches(office: Layer) -> None:
    both = [run(office, task=f"task {n}", command='layer insert ticket title="$LAYER_TASK"; sleep 1') for n in (1, 2)]
    assert [outcome(office, told)["status"] for told in both] == ["done", "done"]
    assert [titles(office, told["branch"]) - {"t0", "t1", "t2"} for told in both] == [{"task 1"}, {"task 2"}]
    for (row,) in [office.query("select id from approval where branch = :b", {"b": told["branch"]}) for told in both]:
        office.call("approval.answer", id=row["id"], approve=True)
    assert titles(office) == {"t0", "t1", "t2", "task 1", "task 2"}


def test_an_agent_may_work_on_a_branch_that_is_there(office: Layer) -> None:
    told = run(office, on="main")
    ended = outcome(office, told)
    assert (told["branch"], ended["status"], ended["result"]["proposal"]) == ("main", "done", None)
    assert "be useful" in titles(office)
    office.fork("idea")
    office.grant("ann", "fork", "branch:idea")
    assert outcome(office, run(office, on="idea", task="only there"))["status"] == "done"
    assert "only there" in titles(office, "idea") - titles(office)
    with pytest.raises(NotFound, match="no branch 'nowhere'"):
        run(office, on="nowhere")
    with pytest.raises(NotFound, match="no branch 'nowhere'"):
        run(office, source="nowhere")
    told = run(office, source="idea", task="further")
    assert outcome(office, told)["status"] == "done" and "only there" in titles(office, told["branch"])


def test_who_may_not_fork_has_no_agent_and_nothing_is_left(office: Layer) -> None:
    office.principal("bob")
    for action, resource in (("call", "contract:clerk"), ("read", "ticket"), ("write", "ticket"), ("read", "contract")):
        office.grant("bob", action, resource)
    with pytest.raises(Denied, match="may not fork branch:main"):
        run(office, principal="bob")
    assert office.query("select name from branch") == [{"name": "main"}]
    assert not Sandbox.list(labels={"layer": office.id})
    assert outcome(office, run(office, principal="bob", on="main"))["status"] == "done"
    with pytest.raises(Denied, match="may not call contract:clerk"):
        office.principal("eve")
        office.grant("eve", "read", "contract")
        run(office, principal="eve")


def test_an_agent_whose_box_can_not_be_made_leaves_no_branch(office: Layer) -> None:
    office.call("blueprint.define", name="odd", base="no-such-image")
    office.call("contract.define", {**CLERK, "blueprint": "odd"})
    with pytest.raises(NotFound, match="no-such-image"):
        run(office)
    assert [row["status"] for row in office.query("select status from branch where name <> 'main'")] == ["discarded"]
    (row,) = office.query("select status, result from execution where verb = 'agent.run' and kind = 'contract'")
    assert row["status"] == "failed" and "no-such-image" in row["result"]["error"]["message"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "  "}, "an agent needs a task"),
        ({"task": "a\0b"}, "NUL"),
        ({"task": "x" * 40_000}, "a task is at most 32768 bytes"),
        ({"command": []}, "is a list of texts, or a text for the shell"),
        ({"command": ["a", 7]}, "is a list of texts, or a text for the shell"),
        ({"command": {"sh": 1}}, "is a list of texts, or a text for the shell"),
        ({"model": "other"}, "has no model"),
    ],
)
def test_what_makes_no_agent_is_refused(office: Layer, given: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        run(office, **given)
    assert office.query("select name from branch") == [{"name": "main"}]


def test_a_contract_without_model_and_program_makes_no_agent(office: Layer) -> None:
    office.call("contract.define", {**CLERK, "program": None})
    with pytest.raises(Invalid, match="neither a model nor a program") as found:
        run(office)
    assert "--program" in str(found.value.hint)
    assert outcome(office, run(office, command="true"))["status"] == "done"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"program": 7}, "is a list of texts"),
        ({"program": ["a", ""]}, "is a list of texts"),
        ({"model": {"api": "smoke", "url": "https://x.test", "model": "m"}}, "speaks 'smoke'"),
        ({"model": {"api": "openai", "url": "ftp://x.test", "model": "m"}}, "is not http"),
        ({"model": {"api": "openai", "url": "https://a:b@x.test", "model": "m"}}, "is not http"),
        ({"model": {"api": "openai", "url": "https://x.test"}}, "needs 'model'"),
        ({"model": {"api": "openai", "url": "https://x.test", "model": "m", "key": "sk"}}, "not 'key'"),
        ({"model": {"api": "openai", "url": "https://x.test", "model": "m", "max_tokens": 0}}, "max_tokens"),
        ({"model": {"api": "openai", "url": "https://x.test", "model": "m", "prices": {"input": "1"}}}, "prices"),
        ({"model": {"api": "openai", "url": "https://x.test", "model": "m"}}, "does not allow"),
    ],
)
def test_a_contract_with_a_model_or_program_that_can_not_be_is_refused(
    office: Layer, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        office.call("contract.define", {**CLERK, **given})


# Proposals


def proposed(layer: Layer, **more: Any) -> tuple[dict[str, Any], int]:
    told = run(layer, **more)
    return told, int(outcome(layer, told)["result"]["proposal"])


def test_a_proposal_whose_branch_has_moved_on_is_not_merged(office: Layer) -> None:
    told, number = proposed(office)
    office.insert("ticket", {"title": "slipped in"}, branch=told["branch"])
    assert agents.review(office, number)["moved"]
    with pytest.raises(Conflict, match="has changed since it was proposed"):
        office.call("approval.answer", id=number, approve=True)
    assert titles(office) == {"t0", "t1", "t2"}
    assert office.query("select status from approval") == [{"status": "pending"}]
    office.call("approval.answer", id=number, approve=False, reason="start again")
    assert office.query("select status, answer from approval") == [{"status": "refused", "answer": "start again"}]
    assert titles(office) == {"t0", "t1", "t2"}


def test_a_proposal_that_conflicts_becomes_conflicts_and_is_approved_again_once_they_are_resolved(
    office: Layer,
) -> None:
    first = office.query("select min(id) as id from ticket")[0]["id"]
    _, number = proposed(office, command=f"layer update ticket {first} priority=50; layer insert ticket title=new")
    office.update("ticket", first, {"priority": 70})
    with pytest.raises(Conflict, match="meets 1 conflict; nothing was merged") as found:
        office.call("approval.answer", id=number, approve=True)
    assert f"layer approve {number} again" in str(found.value.hint)
    assert office.query("select status from approval") == [{"status": "pending"}] and "new" not in titles(office)
    (conflict,) = office.conflicts()
    office.resolve(conflict["id"], take="ours")
    assert office.call("approval.answer", id=number, approve=True)["status"] == "done"
    assert office.query("select priority from ticket where id = :id", {"id": first}) == [{"priority": 50}]
    assert "new" in titles(office)
    with pytest.raises(Conflict, match="is done already"):
        office.call("approval.answer", id=number, approve=True)


def test_a_proposal_is_merged_as_whoever_approves_it(office: Layer) -> None:
    _, number = proposed(office)
    office.principal("lead")
    for action, resource in (("approve", "contract:clerk"), ("read", "approval")):
        office.grant("lead", action, resource)
    with pytest.raises(Denied, match="may not merge branch:main"):
        office.call("approval.answer", id=number, approve=True, principal="lead")
    for action, resource in (("merge", "branch:main"), ("write", "ticket")):
        office.grant("lead", action, resource)
    office.call("approval.answer", id=number, approve=True, principal="lead")
    merged = office.query("select principal from tx where merged_from is not null")
    assert merged == [{"principal": "lead"}]


def test_a_review_is_of_a_merge(office: Layer) -> None:
    with pytest.raises(NotFound, match="no proposal 1"):
        agents.review(office, 1)
    told, number = proposed(office)
    assert (
        agents.proposal(office, told["branch"])
        == agents.proposal(office, told["execution"])
        == agents.proposal(office, number)
        == number
    )
    nothing = run(office, command="true")
    outcome(office, nothing)
    with pytest.raises(NotFound, match="has proposed nothing"):
        agents.proposal(office, nothing["execution"])


# Whoever looks after it may die


SLOW = """
import layer, time
for n in range(6):
    layer.insert("ticket", title=f"row {n}")
    print("printed", n, flush=True)
    time.sleep(0.5)
"""


def test_whoever_looks_after_an_agent_may_be_killed_and_the_next_goes_on(layer: Layer, own_host: Host) -> None:
    layer.define("ticket", {"title": "text!"})
    layer.call("contract.define", name="clerk", reads=["ticket"], scope=["ticket"], program=["python3", "-c", SLOW])
    told = run(layer, principal=None)
    assert told["kept"] == "started"
    process = tending._started[-1]
    try:
        wait_until(lambda: len(layer.query("select id from ticket", branch=told["branch"])) >= 2, "it works", 60)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        assert tending.ensure(layer) == "started"
        process = tending._started[-1]
        ended = outcome(layer, told)
        assert ended["status"] in ("done", "failed"), ended
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(20)
    rows = sorted(row["title"] for row in layer.query("select title from ticket", branch=told["branch"]))
    assert len(set(rows)) == len(rows), "nothing is done twice"
    assert len(steps(layer, told, "program")) == 1 and len(steps(layer, told, "exit")) == 1
    if ended["status"] == "done":
        assert printed(layer, told) == "".join(f"printed {n}\n" for n in range(6)), (
            "nothing is heard twice, nothing is lost"
        )
        assert rows == [f"row {n}" for n in range(6)]
        assert [row["action"] for row in layer.query("select action from approval")] == ["merge"]
    numbers = [step["n"] for step in steps(layer, told)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert layer.verify().ok


def test_an_agent_that_ended_while_nobody_looked_is_concluded_by_the_next(layer: Layer, own_host: Host) -> None:
    layer.define("ticket", {"title": "text!"})
    layer.call(
        "contract.define", name="clerk", reads=["ticket"], scope=["ticket"], program="sleep 1; echo done; exit 4"
    )
    told = run(layer, principal=None)
    process = tending._started[-1]
    try:
        wait_until(lambda: steps(layer, told, "program"), "it is started", 60)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        box = Sandbox.connect(told["id"])
        wait_until(lambda: not box.processes(), "it is over", 30)
        assert tending.ensure(layer) == "started"
        process = tending._started[-1]
        ended = outcome(layer, told)
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(20)
    assert (ended["status"], ended["result"]["exit_code"]) == ("failed", 4)
    assert printed(layer, told) == "done\n"


def test_an_agent_whose_host_dies_has_an_end(layer: Layer, own_host: Host) -> None:
    layer.define("ticket", {"title": "text!"})
    layer.call(
        "contract.define",
        name="clerk",
        reads=["ticket"],
        scope=["ticket"],
        program="layer insert ticket title=x; sleep 1000",
    )
    tending.of(layer).look()
    try:
        told = run(layer, principal=None)
        wait_until(lambda: layer.query("select id from ticket", branch=told["branch"]), "it works", 60)
        own_host.crash()
        own_host.hang_up()
        ended = outcome(layer, told)
        assert ended["status"] == "failed", ended
        assert len(steps(layer, told, "program")) == 1
    finally:
        tending.of(layer).close()


# A coding agent of somebody else's: Claude Code, where `pip install claude-agent-sdk` has brought it


CLAUDE = importlib.util.find_spec("claude_agent_sdk")


@pytest.mark.skipif(CLAUDE is None, reason="claude-agent-sdk is not installed")
def test_claude_code_is_an_agent_whose_key_is_outside_and_whose_tokens_are_counted(office: Layer) -> None:
    assert CLAUDE is not None and CLAUDE.origin is not None
    first = office.query("select min(id) as id from ticket")[0]["id"]
    script = [
        {"text": "I look.", "calls": [("Bash", {"command": "layer query 'select id from ticket'", "description": "Look"})], "usage": (1000, 10)},
        {"calls": [("Bash", {"command": f"layer update ticket {first} priority=9; env", "description": "Set"})], "usage": (1100, 11)},
        {"text": "It has priority 9.", "usage": (1200, 12)},
    ]  # fmt: skip
    with scripted(script) as model:
        office.call("secret.set", name="MODEL_KEY", value=KEY)
        office.call(
            "blueprint.define", name="coding", limits={"memory": "2G", "pids": 256, "disk": "1G"}, egress=[rule_of(model)], secrets=["MODEL_KEY"],
            mounts=[{"source": str(Path(CLAUDE.origin).parent / "_bundled"), "target": "/opt/claude", "readonly": True}],
            environment={"ANTHROPIC_BASE_URL": "http://model.test", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        )  # fmt: skip
        program = (
            'ANTHROPIC_API_KEY="$MODEL_KEY" /opt/claude/claude --bare --model claude-sonnet-4-5 -p "$LAYER_TASK" '
            "--dangerously-skip-permissions < /dev/null | layer answer -"
        )
        office.call(
            "contract.define", {**CLERK, "blueprint": "coding", "model": model_of("anthropic"), "program": program}
        )
        told = run(office, principal=None)
        ended = outcome(office, told, 120)
        assert {request.headers["x-api-key"] for request in model.requests} == {KEY}
        assert all(KEY not in str(request.body) for request in model.requests)
    assert (ended["status"], ended["result"]["answer"]) == ("done", "It has priority 9."), printed(office, told)
    assert [(one["detail"]["input"], one["detail"]["output"]) for one in steps(office, told, "model")] == [
        (1000, 10),
        (1100, 11),
        (1200, 12),
    ]
    assert office.query("select priority from ticket where id = :id", {"id": first}, branch=told["branch"]) == [
        {"priority": 9}
    ]
