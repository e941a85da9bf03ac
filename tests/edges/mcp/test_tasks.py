"""Tasks: long work is an execution that any server knows, also after a restart; others' are not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from edges.mcp.clients import NEW, ask, asked, over_http, post, refused, run, use
from edges.serving import Server

from livinglayer.edges.http.serving import Caller
from livinglayer.edges.mcp.tasks import Lasting
from livinglayer.edges.mcp.tools import Use
from livinglayer.law import verbs
from livinglayer.substrate.schema import OWNER

TASKS = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
SLOW = "import time\ndef main(seconds, fail=False):\n    time.sleep(seconds)\n    assert not fail, 'as asked'\n    return {'slept': seconds}\n"


@pytest.fixture(scope="module")
def desk(server: Server) -> Server:
    signature = {"arguments": {"seconds": "float!", "fail": "bool"}}
    server.layer.call("function.define", name="nap.take", code=SLOW, signature=signature, timeout=60)
    for name in ("ann", "ben"):
        server.principal(name)
        server.layer.grant(name, "call", "function:nap.take")
    return server


def nap(desk: Server, principal: str = "ann", **arguments: Any) -> dict[str, Any]:
    params = {"name": "call_nap_take", "arguments": arguments}
    found: dict[str, Any] = ask(desk, "tools/call", params, principal, capabilities=TASKS)["result"]
    return found


def task(
    desk: Server, method: str, id: str, principal: str = "ann", capabilities: Any = TASKS, **more: Any
) -> dict[str, Any]:
    return ask(desk, f"tasks/{method}", {"taskId": id, **more}, principal, capabilities=capabilities)


def ended(desk: Server, id: str) -> dict[str, Any]:
    until = time.monotonic() + 40
    while (found := task(desk, "get", id)["result"])["status"] == "working" and time.monotonic() < until:
        time.sleep(0.1)
    return found


def test_short_work_is_answered_at_once_and_long_work_is_a_task(desk: Server) -> None:
    short = nap(desk, seconds=0)
    if "taskId" in short:  # a busy machine makes it long
        short = ended(desk, short["taskId"])["result"]
    assert short["structuredContent"]["value"] == {"slept": 0}
    made = nap(desk, seconds=4)
    assert made["resultType"] == "task" and made["status"] == "working" and made["ttlMs"] is None
    assert task(desk, "get", made["taskId"])["result"]["resultType"] == "complete"
    for wrong in (task(desk, "get", made["taskId"], "ben"), task(desk, "get", "99999999"), task(desk, "get", "x"), task(desk, "cancel", made["taskId"], "ben")):  # fmt: skip
        assert wrong["error"]["code"] == -32602 and "there is no" in wrong["error"]["message"]
    found = ended(desk, made["taskId"])
    assert found["status"] == "completed"
    told = found["result"]["structuredContent"]
    assert told == {"value": {"slept": 4}, "execution": int(made["taskId"])}
    assert (
        task(desk, "update", made["taskId"], inputResponses={"approval-1": {"action": "accept"}})["result"][
            "resultType"
        ]
        == "complete"
    )


def test_work_that_fails_is_completed_with_its_error(desk: Server) -> None:
    found = ended(desk, nap(desk, seconds=3, fail=True)["taskId"])
    assert found["status"] == "completed" and found["result"]["isError"]
    assert "as asked" in found["result"]["structuredContent"]["error"]["message"]


def test_cancelled_work_ends(desk: Server) -> None:
    made = nap(desk, seconds=50)
    began = time.monotonic()
    assert "result" in task(desk, "cancel", made["taskId"])
    found = ended(desk, made["taskId"])
    assert found["status"] == "completed" and found["result"]["isError"]
    assert time.monotonic() - began < 40
    assert "result" in task(desk, "cancel", made["taskId"])  # asking again is fine


def test_a_command_that_ends_as_it_becomes_a_task_is_none_and_nobody_is_denied(desk: Server) -> None:
    layer = desk.layer
    using = Use(Caller(OWNER, layer.me, layer), {}, "key")
    denied = layer.query("select count(*) as n from decision")
    for end in (False, True):
        lasting, execution = Lasting(), verbs.opened(layer, "late", {}, verbs.Asking(OWNER, "main"))
        assert lasting.kept(using) is None, "it has not begun"
        lasting.begun(execution)
        if end:
            layer.ledger.conclude(execution, "done")
        number = lasting.kept(using)
        assert (number is None) == end
        if not end:
            assert number == execution.id and lasting.kept(using) is None, "it is one task"
            layer.ledger.conclude(execution, "done")
        lasting.over(None)
    layer.principal("later")  # the next tx records what was denied
    assert layer.query("select count(*) as n from decision") == denied


def test_a_long_command_in_a_box_is_a_task(desk: Server) -> None:
    desk.layer.grant("ann", "call", "box:base")

    def tool(name: str, principal: str = "ann", **arguments: Any) -> dict[str, Any]:
        params = {"name": name, "arguments": arguments}
        found: dict[str, Any] = ask(desk, "tools/call", params, principal, capabilities=TASKS)["result"]
        return found

    box = tool("box_create")["structuredContent"]["box"]
    short = tool("box_exec", box=box, command="echo short")
    if "taskId" not in short:  # a busy machine makes it long
        assert short["structuredContent"]["stdout"] == "short\n"
    made = tool("box_exec", box=box, command="echo $WORD; seq 100000; sleep 3; exit 3", environment={"WORD": "hidden"})
    assert made["resultType"] == "task" and made["status"] == "working"
    row = desk.layer.query("select arguments from execution where id = :e", {"e": int(made["taskId"])})[0]
    assert row["arguments"]["box"] == box and "hidden" not in str(row["arguments"])
    for principal, id in (("ben", made["taskId"]), ("ann", "99999999")):
        assert "there is no" in task(desk, "get", id, principal)["error"]["message"]
    found = ended(desk, made["taskId"])
    told = found["result"]["structuredContent"]
    assert found["status"] == "completed" and told["exit_code"] == 3 and told["stdout"].startswith("hidden\n1\n2\n")
    assert told["truncated"] and "box_read" in told["hint"], "an execution keeps the beginnings"
    rows = desk.layer.query("select id, status, arguments from execution where verb = 'box.run' order by id")
    ran = [(row["id"], row["status"]) for row in rows if row["arguments"]["box"] == box]
    assert len(ran) == 2 and ran[-1] == (int(made["taskId"]), "done"), "one for each command"
    # a token for boxes alone begins and follows it, one for reading does not end it
    long = tool("box_exec", box=box, command="sleep 4711")["taskId"]
    for scope, act, fine in (
        (["boxes"], "get", True),
        (["read"], "cancel", False),
        (["write"], "cancel", False),
        (["boxes"], "cancel", True),
    ):
        body, headers = asked(f"tasks/{act}", {"taskId": long}, capabilities=TASKS)
        token = desk.token("ann", scope=scope)
        said = post(desk, body, headers={**headers, "authorization": f"Bearer {token}"}).json()
        assert ("result" in said) == fine, (scope, act, said)
    assert ended(desk, long)["result"]["structuredContent"]["exit_code"] != 0
    processes = tool("box_exec", box=box, command="pgrep -c sleep || true")
    assert processes["structuredContent"]["stdout"] == "0\n", "it was ended, the box was not"
    wrong = ended(desk, tool("box_exec", box=box, command="sleep 4711", timeout=3)["taskId"])["result"]
    assert wrong["isError"] and wrong["structuredContent"]["error"]["code"] == "timed_out"
    tool("box_destroy", box=box, confirm=True)


def test_clients_that_know_no_tasks_wait(desk: Server) -> None:
    async def act() -> None:
        async with over_http(desk, "ann", NEW) as client:
            assert (await use(client, "call_nap_take", seconds=2.5))["value"] == {"slept": 2.5}
            assert (await refused(client, "call_nap_take", seconds=0, fail=True))["code"] == "failed"

    run(act())
    answer = task(desk, "get", "2000", capabilities={})
    assert answer["error"]["code"] == -32021


def test_an_agent_is_a_task_that_waits_for_a_yes(desk: Server) -> None:
    layer = desk.layer
    layer.define("ticket", {"title": "text!", "priority": "int"})
    number = layer.insert("ticket", {"title": "one", "priority": 1})
    rule = {"action": "update", "resource": "ticket"}
    layer.call(
        "contract.define", name="clerk", reads=["ticket"], scope=["ticket"], approvals=[rule], program=f"layer update ticket {number} priority=9"
    )  # fmt: skip
    given = {"name": "run_agent", "arguments": {"contract": "clerk", "task": "raise it"}}
    made = ask(desk, "tools/call", given, capabilities=TASKS)["result"]
    assert made["resultType"] == "task"

    def now(*status: str) -> dict[str, Any]:
        until = time.monotonic() + 50
        while (found := task(desk, "get", made["taskId"], "owner")["result"])["status"] not in status:
            assert time.monotonic() < until, found
            time.sleep(0.1)
        return found

    [(key, asked)] = now("input_required")["inputRequests"].items()
    assert asked["method"] == "elicitation/create" and "update ticket" in asked["params"]["message"]
    ignored = {"approval-1": {"action": "accept", "content": {"confirm": True}}, key: {"action": "cancel"}}
    assert "result" in task(desk, "update", made["taskId"], "owner", inputResponses=ignored)
    assert task(desk, "get", made["taskId"], "owner")["result"]["status"] == "input_required"
    yes = {key: {"action": "accept", "content": {"confirm": True}}}
    assert "result" in task(desk, "update", made["taskId"], "owner", inputResponses=yes)
    assert now("completed")["result"]["isError"] is False
    [row] = layer.query("select branch from execution where id = :e", {"e": int(made["taskId"])})
    assert layer.query("select priority from ticket where id = :i", {"i": number}, branch=row["branch"]) == [
        {"priority": 9}
    ]


def test_another_server_of_the_layer_answers_for_a_task_and_a_question(
    desk: Server, serve: Callable[..., Server]
) -> None:
    other = serve(desk.directory)
    other._keys = desk._keys
    made = nap(desk, seconds=3)
    assert task(other, "get", made["taskId"])["result"]["status"] == "working"
    desk.layer.fork("two_servers")
    params: dict[str, Any] = {"name": "discard", "arguments": {"branch": "two_servers"}}
    can: dict[str, Any] = {"elicitation": {}}
    asked = ask(desk, "tools/call", params, capabilities=can)["result"]
    yes = {"confirm": {"action": "accept", "content": {"confirm": True}}}
    again = params | {"inputResponses": yes, "requestState": asked["requestState"]}
    assert ask(other, "tools/call", again, capabilities=can)["result"]["isError"] is False
