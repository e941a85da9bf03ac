"""Agents shown and taken another way: what was said to a model and by it can be read, and goes on differently from any step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from law.models import APIS, KEY, model_of, rule_of, scripted
from sandbox.hosts import wait_until

from livinglayer import Layer
from livinglayer.edges.cli.main import main
from livinglayer.errors import Denied, Invalid, NotFound
from livinglayer.jobs.scripted_model import Api, Request, ScriptedModel
from livinglayer.law import replay, tending
from livinglayer.law import secrets as vault
from livinglayer.sandbox.sandbox import Sandbox

SCRIPT: list[Any] = [
    {"text": "I write it down.", "calls": [("shell", {"command": "mkdir -p ~/work && echo one > ~/work/notes; cat ~/work/notes"})], "usage": (100, 10)},
    {"text": "I look.", "calls": [("query", {"sql": "select title, priority from ticket"})], "usage": (200, 20)},
    {"text": "It is urgent.", "calls": [("update_ticket", {"id": 0, "priority": 7})], "usage": (300, 30)},
    {"calls": [("write_file", {"path": "/home/user/work/late", "content": "after"})], "usage": (400, 40)},
    {"calls": [("finish", {"answer": "it was urgent"})], "usage": (500, 50)},
]  # fmt: skip


@pytest.fixture
def office(desk: Layer) -> Iterator[Layer]:
    vault.set(desk, "MODEL_KEY", KEY)
    desk.insert("ticket", {"title": "the printer burns", "priority": 1})
    desk.principal("ann")
    for action, resource in (
        ("call", "contract:clerk"), ("use", "secret:MODEL_KEY"), ("read", "ticket"), ("write", "ticket"), ("fork", "*"),
    ):  # fmt: skip
        desk.grant("ann", action, resource)
    tending.of(desk).look()
    yield desk
    for box in Sandbox.list(labels={"layer": desk.id}):
        box.kill()
    tending.of(desk).close()


def script(layer: Layer) -> list[Any]:
    """What its model says, with the id of the ticket that there is."""
    [row] = layer.query("select id from ticket")
    return json.loads(json.dumps(SCRIPT).replace('"id": 0', f'"id": {row["id"]}'))


def contract(layer: Layer, model: ScriptedModel, api: Api = "anthropic", **more: Any) -> None:
    layer.call(
        "blueprint.define", name="asking", limits={"memory": "256M"}, egress=[rule_of(model)], secrets=["MODEL_KEY"]
    )
    layer.call("contract.define", {
        "name": "clerk", "blueprint": "asking", "model": model_of(api), "instructions": "You sort tickets.", "reads": ["ticket"],
        "scope": {"ticket": {"actions": ["update"], "fields": ["priority"]}}, **more,
    })  # fmt: skip


def over(layer: Layer, number: int) -> dict[str, Any]:
    sql = "select status, result from execution where id = :id"
    wait_until(lambda: layer.query(sql, {"id": number})[0]["status"] != "running", "the agent is over", 60)
    found = layer.query(sql, {"id": number})[0]
    assert found["status"] == "done", found
    return found


def asked(layer: Layer, number: int) -> list[dict[str, Any]]:
    return [
        row["detail"] | {"n": row["n"]}
        for row in layer.query("select n, detail from step where execution = :id and kind = 'model' order by at", {"id": number})
    ]  # fmt: skip


def begun(layer: Layer) -> int:
    told = layer.call("agent.run", contract="clerk", task="Sort the tickets.", principal="ann")
    over(layer, told["execution"])
    return int(told["execution"])


def texts(request: Request) -> str:
    return json.dumps(request.messages)


@pytest.mark.parametrize("api", APIS)
def test_an_agent_goes_on_differently_from_a_step(office: Layer, api: Api) -> None:
    with scripted(script(office)) as model:
        contract(office, model, api)
        first = begun(office)
    steps = asked(office, first)
    assert [step["prompt"] for step in steps if "prompt" in step] == ["Sort the tickets."]
    assert office.query("select priority from ticket", branch="main") == [{"priority": 1}]
    other = [
        {"text": "Then not.", "calls": [("shell", {"command": "cat ~/work/notes; ls ~/work"})], "usage": (7, 7)},
        {"calls": [("query", {"sql": "select priority from ticket"})]},
        {"calls": [("finish", {"answer": "left as it was"})]},
    ]
    with scripted(other) as model:
        contract(office, model, api)
        told = office.call("agent.fork", execution=first, at=steps[2]["n"], prompt="Leave it as it is.", model="scripted-2", principal="ann")  # fmt: skip
        ended = over(office, told["execution"])
    assert ended["result"]["answer"] == "left as it was" and ended["result"]["proposal"] is None
    # Its model was told what the first was told up to there, and the prompt; and had answered nothing yet.
    again = model.requests[0]
    assert again.body["model"] == "scripted-2" and again.system.startswith("You sort tickets.")
    assert "I write it down." in texts(again) and "I look." in texts(again) and "It is urgent." not in texts(again)
    assert texts(again).count("Leave it as it is.") == 1 and texts(again).count("Sort the tickets.") == 1
    # The box had done the same before, and no more; the branch was as it had been.
    assert [text.split() for _, text, _ in model.requests[1].results] == [["one", "notes"]]
    assert '"priority":1' in model.requests[2].results[0][1].replace(" ", "")
    [fork] = office.query("select detail from step where execution = :id and kind = 'fork'", {"id": told["execution"]})
    assert (fork["detail"]["execution"], fork["detail"]["model"], fork["detail"]["prompt"]) == (first, steps[2]["n"], "Leave it as it is.")  # fmt: skip
    parents = "select p.parent from execution x join execution p on p.id = x.parent where x.id = :id"
    assert office.query(parents, {"id": told["execution"]}) == [{"parent": first}]
    assert office.verify().ok


def test_it_goes_on_from_what_it_had_changed(office: Layer) -> None:
    with scripted(script(office)) as model:
        contract(office, model)
        first = begun(office)
    with scripted([{"calls": [("query", {"sql": "select priority from ticket"})]}, "done"]) as model:
        contract(office, model)
        told = office.call(
            "agent.fork", execution=first, at=asked(office, first)[-1]["n"], name="again", principal="ann"
        )
        assert told["branch"] == "again"
        over(office, told["execution"])
    assert '"priority":7' in model.requests[1].results[0][1].replace(" ", "")
    done = [
        (row["detail"]["name"], row["detail"]["where"])
        for row in office.query("select detail from step where execution = :id and kind = 'tool' order by n", {"id": told["execution"]})
    ]  # fmt: skip
    assert done == [("shell", "box"), ("write_file", "box"), ("query", "layer")]  # the first two again
    # A course of the other course
    with scripted(["done"]) as model:
        contract(office, model)
        [n] = [step["n"] for step in asked(office, told["execution"])][-1:]
        third = office.call("agent.fork", execution=told["execution"], at=n, prompt="And?", principal="ann")
        over(office, third["execution"])
    assert "It is urgent." in texts(model.requests[0]) and "And?" in texts(model.requests[0])


def test_from_its_beginning(office: Layer) -> None:
    with scripted(["done"]) as model:
        contract(office, model)
        first = begun(office)
        model.script, model._answered = ["again"], 0
        told = office.call("agent.fork", execution=first, at=1, prompt="Be brief.", principal="ann")
        assert over(office, told["execution"])["result"]["answer"] == "again"
    assert "Sort the tickets.\\n\\nBe brief." in texts(model.requests[1])


def test_who_may_not_is_refused(office: Layer) -> None:
    with scripted(["done"]) as model:
        contract(office, model)
        first = begun(office)
    office.principal("bob")
    for action, resource in (
        ("call", "contract:clerk"),
        ("read", "execution"),
        ("read", "step"),
        ("fork", "branch:main"),
    ):
        office.grant("bob", action, resource)
    with pytest.raises(NotFound, match="no agent"):
        office.call("agent.fork", execution=first, at=1, principal="bob")
    with pytest.raises(Invalid, match="has steps 1 to"):
        office.call("agent.fork", execution=first, at=10_000, principal="ann")
    [called] = office.query("select max(id) as id from execution where verb = 'contract.define'")
    with pytest.raises(Invalid, match="is no agent"):
        office.call("agent.fork", execution=called["id"], at=1)
    with pytest.raises(NotFound):
        office.call("agent.fork", execution=1 << 40, at=1)
    office.call("contract.remove", name="clerk")
    with pytest.raises((NotFound, Denied)):
        office.call("agent.fork", execution=first, at=1, principal="ann")
    contract(office, model, "openai")
    with pytest.raises((Invalid, Denied, NotFound)):
        office.call("agent.fork", execution=first, at=asked(office, first)[0]["n"])


def test_a_conversation_for_people(
    office: Layer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted(script(office)) as model:
        contract(office, model)
        first = begun(office)
        lines = "\n".join(replay.replay(office, first).lines())
        for part in (
            "« Sort the tickets.", "» I write it down.", "→ shell {", "← one", "scripted-1: 100 tokens in, 10 out", "→ update_ticket",
            "answer    it was urgent", "tool      query (layer)",
        ):  # fmt: skip
            assert part in lines, (part, lines)
        place = str(office.engine.address)
        monkeypatch.setenv("LAYER_DIR", place.removesuffix("/.layer"))
        monkeypatch.delenv("LAYER_AS", raising=False)
        assert main(["replay", str(first)]) == 0
        assert "» I look." in capsys.readouterr().out
        model.script, model._answered = ["as you say"], 0
        n = str(asked(office, first)[1]["n"])
        assert main(["replay", str(first), "--fork-at", n, "--prompt", "Stop.", "--json", "--detach"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert over(office, made["execution"])["result"]["answer"] == "as you say"
        assert main(["replay", str(first), "--fork-at", n, "--code", "x.py"]) != 0
        assert main(["replay", str(first), "--prompt", "x"]) != 0
        assert "go with --fork-at" in capsys.readouterr().err
