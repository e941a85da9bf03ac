"""Tools: what a contract lets its agent do, as a model is told of it; nothing that the channel would not do, and all of it recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from law.conftest import define
from sandbox.hosts import wait_until

from livinglayer import Layer
from livinglayer.law import tending
from livinglayer.sandbox.sandbox import Sandbox

ASK = """
import json, layer, sys
for line in sys.stdin:
    verb, body = json.loads(line)
    try:
        print(json.dumps(layer._exchange("GET", verb, b"", safe=True) if body is None else layer._ask(verb, body)))
    except layer.LayerError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture
def office(desk: Layer) -> Iterator[Layer]:
    desk.define(
        "kind",
        {"label": "text!", "colour": {"type": "enum", "values": ["red", "blue"]}, "at": "datetime", "price": "decimal"},
    )
    define(desk, "ticket.close", "def close(id, why='', times=1): return [id, why, times]",
           signature={"arguments": {"id": "int!", "why": "text", "times": {"type": "int", "default": 1}}}, description="Close a ticket")  # fmt: skip
    define(desk, "a." + "very_long_name_" * 5 + "x", "def main(): return 1")
    desk.call("projection.define", name="urgent", statement="select count(*) as n from ticket where priority > 5")
    desk.call("contract.define", {
        "name": "clerk", "reads": {"ticket": {"fields": ["title", "priority"]}, "kind": {}}, "projections": ["urgent"], "program": "sleep 1000",
        "scope": {"ticket": {"actions": ["update"], "fields": ["priority", "title"], "where": "priority < 100"}, "kind": {}},
        "functions": ["ticket.bump", "ticket.close", "a." + "very_long_name_" * 5 + "x"], "instructions": "Be kind.", "budget": {"seconds": 500, "cpu": 100},
    })  # fmt: skip
    for n in range(3):
        desk.insert("ticket", {"title": f"t{n}", "priority": n * 3, "note": "secret"})
    tending.of(desk).look()
    yield desk
    for box in Sandbox.list(labels={"layer": desk.id}):
        box.kill()
    tending.of(desk).close()


class Agent:
    """An agent whose program waits, asked from outside as its loop would ask."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.told = layer, layer.call("agent.run", contract="clerk", task="Tidy up.")
        self.box = Sandbox.connect(self.told["id"])
        self.first = layer.query("select min(id) as id from ticket")[0]["id"]

    def ask(self, verb: str, body: Any = None) -> Any:
        found = self.box.run(["python3", "-c", ASK], stdin=json.dumps([verb, body]) + "\n", timeout=60)
        assert found.ok, found.stderr.text
        return json.loads(found.stdout)

    def use(self, name: str, arguments: Any, id: str = "c1") -> tuple[str, bool]:
        found = self.ask("/tool", {"id": id, "name": name, "arguments": arguments})
        return found["content"], found["is_error"]

    def steps(self, *kinds: str) -> list[dict[str, Any]]:
        """What is recorded, in full, once it is."""
        sql = "select kind, detail from step where execution = :id order by n"
        wait_until(lambda: self.layer.query(sql, {"id": self.told["execution"]}), "steps")
        return [row["detail"] for row in self.layer.query(sql, {"id": self.told["execution"]}) if row["kind"] in kinds]

    def waits(self, kind: str, count: int) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.steps(kind)) >= count, f"{count} steps of kind {kind}", 20)
        return self.steps(kind)


def test_an_agent_is_told_its_task_its_tools_and_what_is_left(office: Layer) -> None:
    agent = Agent(office)
    told = agent.ask("/agent")
    assert (told["task"], told["instructions"], told["model"], told["messages"]) == ("Tidy up.", "Be kind.", None, None)
    assert {row["resource"]: row["amount"] for row in told["budget"]} == {"steps": 10_000, "seconds": 500, "cpu": 100}
    assert all(row["left"] <= row["amount"] for row in told["budget"])
    tools = {tool["name"]: tool for tool in told["tools"]}
    [long] = [name for name in tools if name.startswith("call_a_very")]
    assert set(tools) == {
        "query", "projection", "update_ticket", "insert_kind", "update_kind", "upsert_kind", "delete_kind", "call_ticket_bump", "call_ticket_close",
        long, "artifact", "shell", "read_file", "write_file", "finish",
    }  # fmt: skip
    assert all(len(name) <= 64 and name.replace("_", "").isalnum() for name in tools)
    assert {name for name, tool in tools.items() if tool["where"] == "box"} == {
        "shell",
        "read_file",
        "write_file",
        "finish",
    }
    for tool in told["tools"]:
        Draft202012Validator.check_schema(tool["input_schema"])
        assert tool["input_schema"]["type"] == "object" and tool["description"]
    assert "ticket(id, title text, priority int)" in tools["query"]["description"] and "note" not in str(told)
    assert tools["update_ticket"]["input_schema"]["properties"].keys() == {"id", "title", "priority"}
    assert "priority < 100" in tools["update_ticket"]["description"]
    close = tools["call_ticket_close"]
    assert close["input_schema"]["required"] == ["id"] and "Close a ticket" in close["description"]
    kind = tools["insert_kind"]["input_schema"]
    assert kind["required"] == ["label"] and kind["properties"]["colour"]["enum"] == ["blue", "red", None]


def test_a_tool_does_what_the_channel_does_and_is_a_step(office: Layer) -> None:
    agent = Agent(office)
    content, wrong = agent.use(
        "query", {"sql": "select title from ticket where id = :id", "params": {"id": agent.first}}
    )
    assert json.loads(content)["rows"] == [{"title": "t0"}] and not wrong
    assert agent.use("update_ticket", {"id": agent.first, "priority": 42}) == ('{"ok":true}', False)
    content, wrong = agent.use("insert_kind", {"label": "new", "colour": "red", "price": "1.50"})
    number = json.loads(content)["id"]
    assert json.loads(agent.use("upsert_kind", {"values": {"label": "new", "colour": "blue"}, "on": ["label"]})[0]) == {
        "id": number
    }
    assert json.loads(agent.use("call_ticket_close", {"id": 7, "why": "done"})[0]) == {"result": [7, "done", 1]}
    assert json.loads(agent.use("projection", {"name": "urgent"})[0])["rows"] == [{"n": 2}]
    (mine,) = json.loads(agent.use("projection", {"name": "me.contract"})[0])["rows"]
    assert mine["name"] == "clerk"
    assert "digest" in json.loads(agent.use("artifact", {"name": "a/report.md", "content": "é"})[0])
    assert agent.use("delete_kind", {"id": number}) == ('{"ok":true}', False)
    branch = agent.told["branch"]
    assert office.query("select priority from ticket where id = :id", {"id": agent.first}, branch=branch) == [
        {"priority": 42}
    ]
    assert office.query("select id from kind", branch=branch) == []
    steps = agent.waits("tool", 9)
    assert [step["name"] for step in steps] == [
        "query", "update_ticket", "insert_kind", "upsert_kind", "call_ticket_close", "projection", "projection", "artifact", "delete_kind",
    ]  # fmt: skip
    assert all(
        step["where"] == "layer" and not step["error"] and step["ms"] > 0 and step["id"] == "c1" for step in steps
    )
    assert steps[1]["arguments"] == {"id": agent.first, "priority": 42} and steps[1]["result"] == '{"ok":true}'


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("nothing", {}, "NotFound: there is no tool 'nothing'"),
        ("shell", {"command": "id"}, "NotFound: there is no tool 'shell'"),
        ("insert_ticket", {"title": "x"}, "NotFound: there is no tool 'insert_ticket'"),
        ("query", {}, "Invalid: query: 'sql' is a required property"),
        ("query", {"sql": 7}, "Invalid: query: sql: 7 is not of type 'string'"),
        ("query", "select 1", "Invalid: query: 'select 1' is not of type 'object'"),
        ("query", None, "Invalid: query: 'sql' is a required property"),
        ("query", [1], "Invalid: query: [1] is not of type 'object'"),
        ("query", {"sql": "select note from ticket"}, "note"),
        ("query", {"sql": "delete from ticket"}, "Invalid: "),
        ("update_ticket", {"id": 1}, "Invalid: update_ticket: "),
        ("update_ticket", {"id": "1", "priority": 1}, "Invalid: update_ticket: id: '1' is not of type 'integer'"),
        ("update_ticket", {"id": 1, "note": "x"}, "Invalid: update_ticket: Additional properties"),
        ("insert_kind", {"label": "x", "colour": "green"}, "Invalid: insert_kind: colour: 'green' is not one of"),
        ("call_ticket_close", {"id": 1, "more": 2}, "Invalid: call_ticket_close: Additional properties"),
        ("projection", {"name": "salaries"}, "Invalid: projection: name: 'salaries' is not one of"),
        ("artifact", {"name": "../../etc/passwd", "content": ""}, "Invalid: '../../etc/passwd' is not a name for an artifact"),
        ("delegate", {"contract": "clerk", "task": "x"}, "NotFound: there is no tool 'delegate'"),
    ],
)  # fmt: skip
def test_what_is_not_a_call_of_a_tool_is_an_answer_that_says_so_and_a_refusal(
    office: Layer, name: str, arguments: Any, said: str
) -> None:
    agent = Agent(office)
    content, wrong = agent.use(name, arguments)
    assert wrong and said in content, content
    (step,) = agent.waits("tool", 1)
    assert step["error"] and step["result"] == content
    assert len(agent.steps("refusal")) == 1


def test_a_denial_is_an_answer_and_is_recorded_as_one(office: Layer) -> None:
    agent = Agent(office)
    high = office.insert("ticket", {"title": "high", "priority": 500}, branch=agent.told["branch"])
    content, wrong = agent.use("update_ticket", {"id": high, "priority": 1})
    assert wrong and content.startswith("Denied: ")
    agent.waits("tool", 1)
    (row,) = office.query("select allowed from decision where execution = :id", {"id": agent.told["execution"]})
    assert not row["allowed"]
    assert agent.use("projection", {"name": "me.denials"})[0].count('"action"') == 1


def test_a_long_answer_is_cut_for_the_model_and_kept_by_content(office: Layer) -> None:
    agent = Agent(office)
    office.insert("kind", [{"label": "x" * 1000} for _ in range(100)], branch=agent.told["branch"])
    content, wrong = agent.use("query", {"sql": "select label from kind"})
    assert not wrong and 65_536 <= len(content) < 66_000 and "cut here, of 101" in content
    (step,) = agent.waits("tool", 1)
    assert office.blob(step["result_content"]).decode() == content and "result" not in step


def test_what_the_loop_did_in_the_box_is_a_step(office: Layer) -> None:
    agent = Agent(office)
    done = {
        "id": "c9",
        "name": "shell",
        "arguments": {"command": "id"},
        "result": "uid=1000\n",
        "is_error": False,
        "ms": 1.5,
    }
    assert agent.ask("/said", {"tool": done}) == {"ok": True}
    assert agent.ask(
        "/said", {"tool": {**done, "result": "y" * 5000, "arguments": {"command": "z" * 5000}, "ms": "soon"}}
    ) == {"ok": True}
    for wrong in ({}, {"tool": 7}, {"tool": {"id": "x"}}):
        assert agent.ask("/said", wrong)[0] == "Invalid"
    first, second = agent.waits("tool", 2)
    assert first == {
        "id": "c9",
        "name": "shell",
        "where": "box",
        "error": False,
        "ms": 1.5,
        "arguments": {"command": "id"},
        "result": "uid=1000\n",
    }
    assert (
        office.blob(second["result_content"]) == b"y" * 5000
        and "zzz" in office.blob(second["arguments_content"]).decode()
    )
    assert second["ms"] is None


def test_an_answer_is_given_once_and_has_a_size(office: Layer) -> None:
    agent = Agent(office)
    assert agent.ask("/return", {"value": "x" * 70_000})[0] == "LimitExceeded"
    assert agent.ask("/return", {"value": {"a": 1}}) == {"ok": True}
    assert agent.ask("/return", {"value": 2})[0] == "Conflict"
    assert [step["value"] for step in agent.waits("answer", 1)] == [{"a": 1}]


def test_a_box_that_is_no_agents_has_no_task(office: Layer) -> None:
    told = office.call("box.create", contract="clerk")
    box = Sandbox.connect(told["id"])
    found = box.run(["python3", "-c", ASK], stdin='["/agent", null]\n', timeout=60)
    assert json.loads(found.stdout)[0] == "NotFound"
