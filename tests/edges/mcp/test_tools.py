"""Tools: each does what its verb does; a principal is offered what it may and refused the rest."""

from __future__ import annotations

from typing import Any

import pytest
from edges.mcp.clients import MODES, ask, names, over_http, refused, run, use
from edges.serving import Server
from mcp.shared.exceptions import MCPError

ADD = "def main(a, b=1):\n    return a + b\n"
NOTE = "import layer\ndef main(title):\n    return layer.insert('ticket', {'title': title})\n"


@pytest.fixture(scope="module")
def desk(own: Server) -> Server:
    """A server with tickets, two functions and a projection; ann may use some of it, ben nothing."""
    layer = own.layer
    layer.define("ticket", {"title": "text!", "status": "text", "body": "text"}, description="what people ask for")
    layer.insert("ticket", [{"title": "first", "status": "open"}, {"title": "second", "status": "done"}])
    signature = {"arguments": {"a": "int!", "b": {"type": "int", "default": 1}}, "result": "int!"}
    layer.call("function.define", name="sum.add", code=ADD, signature=signature, description="Adds two numbers.")
    layer.call(
        "function.define", name="ticket.note", code=NOTE, signature={"arguments": {"title": "text!"}}, writes=["ticket"]
    )
    layer.call("projection.define", name="open_tickets", statement="select id, title from ticket where status = 'open'")
    for name in ("ann", "ben"):
        own.principal(name)
    layer.grant("ann", "read", "ticket")
    layer.grant("ann", "call", "function:sum.add")
    return own


@pytest.mark.parametrize("mode", MODES)
def test_changes_are_proposed_seen_merged_and_told(desk: Server, mode: str) -> None:
    async def act() -> None:
        async with over_http(desk, mode=mode) as client:
            title = f"new {mode}"
            change = {"do": "insert", "entity": "ticket", "values": {"title": title, "status": "open"}}
            proposed = await use(client, "propose_change", changes=[change], reason="asked for")
            assert [each["op"] for each in proposed["changes"]] == ["insert"]
            branch, sql = proposed["branch"], "select id from ticket where title = :t"
            assert (await use(client, "query", sql=sql, params={"t": title}))["rows"] == []
            assert len((await use(client, "query", sql=sql, params={"t": title}, branch=branch))["rows"]) == 1
            assert (await use(client, "diff", branch=branch))["changes"] == proposed["changes"]
            merged = await use(client, "merge", branch=branch)
            assert merged["applied"] and merged["conflicts"] == []
            [row] = (await use(client, "query", sql=sql, params={"t": title}))["rows"]
            done = await use(
                client, "apply_change", key=mode, changes=[{"do": "update", "entity": "ticket", "id": row["id"], "values": {"status": "done"}}]
            )  # fmt: skip
            assert done == {"ids": [row["id"]]}
            versions = (await use(client, "history", entity="ticket", id=row["id"]))["rows"]
            assert [each["status"] for each in versions] == ["done", "open"]
            told = await client.call_tool("why", {"subject": f"ticket/{row['id']}.status"})
            assert "row.change" in told.content[0].text and "owner" in told.content[0].text  # type: ignore[union-attr]

    run(act())


def test_a_proposal_that_fails_leaves_no_branch(desk: Server) -> None:
    async def act() -> None:
        async with over_http(desk) as client:
            wrong = [{"do": "update", "entity": "ticket", "id": 1, "values": {"nofield": 1}}]
            assert (await refused(client, "propose_change", changes=wrong, branch="idea"))["code"] in (
                "invalid",
                "not_found",
            )
            again = [{"do": "insert", "entity": "ticket", "values": {"title": "x"}}]
            assert (await use(client, "propose_change", changes=again, branch="idea"))["branch"] == "idea"
            more = await use(client, "propose_change", changes=again, branch="idea")  # on what was proposed before
            assert len(more["changes"]) == 2
            assert (await use(client, "discard", branch="idea", confirm=True)) == {"done": True}
        who = desk.principal("forker")  # may fork and no more: told of what it may not, and its fork is gone
        desk.layer.grant(who, "fork", "branch:main")
        desk.layer.grant(who, "read", "ticket")
        open_ones = "select name from branch where name like 'proposal%' and status = 'open' order by name"
        before = desk.layer.query(open_ones)  # of tests before this one
        async with over_http(desk, who) as client:
            assert "may not insert" in (await refused(client, "propose_change", changes=again))["message"]
            await use(client, "fork", name="forkers_own")
            assert (await use(client, "discard", branch="forkers_own", confirm=True)) == {"done": True}
        assert desk.layer.query(open_ones) == before

    run(act())


@pytest.mark.parametrize("mode", MODES)
def test_functions_are_tools_of_their_own(desk: Server, mode: str) -> None:
    async def act() -> None:
        async with over_http(desk, "ann", mode) as client:
            offered = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert "call_sum_add" in offered and "call_ticket_note" not in offered
            tool = offered["call_sum_add"]
            assert tool.input_schema["required"] == ["a"] and tool.input_schema["properties"]["a"]["type"] == "integer"
            assert tool.description is not None and tool.description.startswith("Adds two numbers.")
            assert tool.annotations is not None and tool.annotations.destructive_hint is False
            given = await use(client, "call_sum_add", a=2)
            assert given["value"] == 3
            [row] = desk.layer.query(
                "select function, principal from execution where id = :e", {"e": given["execution"]}
            )
            assert row == {"function": "sum.add", "principal": "ann"}
            assert (await refused(client, "call_sum_add", a="two"))["code"] == "invalid"
            with pytest.raises(MCPError, match="Unknown tool"):
                await client.call_tool("call_ticket_note", {"title": "x"})
            with pytest.raises(MCPError, match="Unknown tool"):
                await client.call_tool("call_no_such", {})
            assert (await refused(client, "call_function", name="ticket.note", arguments={"title": "x"}))[
                "code"
            ] == "not_found"
            assert (await refused(client, "call_function", name="row.delete", arguments={}))["code"] == "not_found"

    run(act())
    assert desk.layer.query("select 1 as n from decision where principal = 'ann' and resource = 'function:ticket.note'")


def test_everybody_is_offered_what_they_may_in_one_order(desk: Server) -> None:
    async def act() -> dict[str, list[str]]:
        found = {}
        for who in ("owner", "ann", "ben"):
            async with over_http(desk, who) as client:
                found[who] = await names(client)
                assert await names(client) == found[who]
        return found

    found = run(act())
    assert found["ben"] == ["can"]
    assert found["ann"] == ["schema", "query", "history", "why", "can", "diff", "call_function", "call_sum_add"]
    assert len(found["owner"]) > 25 and set(found["ann"]) < set(found["owner"])


def test_what_is_not_offered_is_refused(desk: Server) -> None:
    tried: list[tuple[str, dict[str, Any]]] = [
        ("query", {"sql": "select * from ticket"}), ("apply_change", {"changes": [{"do": "delete", "entity": "ticket", "id": 1}], "confirm": True}),
        ("fork", {"name": "mine"}), ("merge", {"branch": "idea"}), ("box_create", {}), ("box_exec", {"box": "x", "command": "id"}),
        ("replay", {"execution": 2000}), ("open_projection", {"name": "open_tickets"}), ("run_agent", {"contract": "c", "task": "t"}),
        ("answer_approval", {"id": 1}), ("call_function", {"name": "sum.add"}),
    ]  # fmt: skip

    async def act() -> None:
        async with over_http(desk, "ben") as client:
            for name, arguments in tried:
                assert (await refused(client, name, **arguments))["code"] == "denied", name
        async with over_http(desk, token=desk.token("owner", scope=["read"])) as client:
            assert "apply_change" not in await names(client) and "call_sum_add" not in await names(client)
            assert (await refused(client, "fork", name="x"))["message"].startswith("this token is for read")
            with pytest.raises(MCPError, match="Unknown tool"):
                await client.call_tool("call_sum_add", {"a": 1})

    run(act())


def test_a_revoked_permission_takes_the_tool_away(desk: Server) -> None:
    layer = desk.layer
    desk.principal("cleo")
    granted = layer.grant("cleo", "call", "function:sum.add")
    fork = layer.grant("cleo", "fork", "branch:main")
    box = layer.grant("cleo", "call", "box:base")

    async def act() -> None:
        async with over_http(desk, "cleo") as client:
            assert {"call_sum_add", "fork", "box_create"} <= set(await names(client))
            assert (await use(client, "call_sum_add", a=1))["value"] == 2
            for each in (granted, fork, box):
                layer.revoke(each)
            assert await names(client) == ["can"]
            with pytest.raises(MCPError, match="Unknown tool"):
                await client.call_tool("call_sum_add", {"a": 1})
            assert (await refused(client, "fork", name="cleo_1"))["code"] == "denied"
            assert (await refused(client, "box_create"))["code"] == "denied"

    run(act())


def test_long_answers_are_cut_and_say_how_to_go_on(desk: Server) -> None:
    rows = desk.layer.insert(
        "ticket", [{"title": f"many {n}", "status": "many", "body": "x" * 500} for n in range(300)]
    )

    async def act() -> None:
        async with over_http(desk) as client:
            sql, found, offset = "select id, body from ticket where status = 'many' order by id", list[int](), 0
            while offset is not None:
                part = await use(client, "query", sql=sql, limit=200, offset=offset)
                assert len(str(part)) < 100_000
                found += [row["id"] for row in part["rows"]]
                offset = part.get("next")
            assert found == rows
            big = desk.layer.insert("ticket", {"title": "big", "body": "y" * 100_000})
            [cell] = (await use(client, "query", sql="select body from ticket where id = :i", params={"i": big}))[
                "rows"
            ]
            assert len(cell["body"]) < 10_000 and "cut: 100000 characters" in cell["body"]
            desk.layer.call("function.define", name="sum.loud", code="def main():\n    return ['z' * 1000] * 200\n")
            loud = await use(client, "call_sum_loud")
            assert "value" not in loud and loud["cut"]["bytes"] > 200_000
            whole = await client.read_resource(f"layer://execution/{loud['execution']}/result")
            assert len(whole.contents[0].text) > 200_000  # type: ignore[union-attr]

    run(act())


def test_wrong_arguments_are_told_with_a_hint(desk: Server) -> None:
    tried: list[tuple[str, dict[str, Any], str]] = [
        ("query", {}, "'sql' is a required property"), ("query", {"sql": 5}, "5 is not of type"), ("query", {"sql": "select 1", "limit": 0}, "minimum"),
        ("query", {"sql": "drop table ticket"}, ""), ("query", {"sql": "select * from nothing"}, "nothing"), ("query", {"sql": "select 1", "x": 1}, "x"),
        ("apply_change", {"changes": []}, "non-empty"), ("apply_change", {"changes": [{"do": "burn", "entity": "ticket"}]}, "burn"),
        ("apply_change", {"changes": [{"do": "insert", "entity": "ticket"}]}, "values"), ("history", {"entity": "ticket; drop", "id": 1}, "ticket; drop"),
        ("history", {"entity": "ticket", "id": 99999999}, "99999999"), ("history", {"entity": "ticket", "id": 10**30}, "64 bits"), ("why", {"subject": "nonsense"}, ""), ("why", {"subject": "tx/999999"}, ""),
        ("query", {"sql": "select 1 as n", "as_of": "yesterday"}, "neither a tx nor a time"), ("diff", {"branch": "nowhere"}, "nowhere"),
        ("fork", {"name": "Not A Name"}, "Not A Name"), ("open_projection", {"name": "no"}, "no"), ("replay", {"execution": 10**17}, ""),
        ("box_exec", {"box": "none", "command": "true"}, "none"), ("box_create", {"blueprint": "nowhere"}, "nowhere"),
        ("resolve", {"conflict": 5, "take": "mine"}, "mine"), ("can", {"action": "fly", "resource": "ticket"}, "fly"),
    ]  # fmt: skip

    async def act() -> None:
        async with over_http(desk) as client:
            for name, arguments, part in tried:
                error = await refused(client, name, **arguments)
                assert error["code"] in ("invalid", "not_found", "denied"), (name, error)
                assert part in error["message"], (name, error)

    run(act())
    assert "Traceback" not in desk.log


def test_a_trace_goes_on_in_the_layer(desk: Server) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    params = {"name": "call_sum_add", "arguments": {"a": 1}, "_meta": {"traceparent": trace}}
    given = ask(desk, "tools/call", params)["result"]["structuredContent"]
    [row] = desk.layer.query("select trace from execution where id = :e", {"e": given["execution"]})
    assert row["trace"].startswith("00-0af7651916cd43dd8448eb211c80319c-") and row["trace"] != trace


def test_tools_say_what_they_may_do(desk: Server) -> None:
    tools = {tool["name"]: tool for tool in ask(desk, "tools/list")["result"]["tools"]}
    assert tools["query"]["annotations"] == {
        "readOnlyHint": True, "destructiveHint": False, "idempotentHint": True, "openWorldHint": False,
    }  # fmt: skip
    assert tools["discard"]["annotations"]["destructiveHint"] and not tools["discard"]["annotations"]["readOnlyHint"]
    assert tools["open_projection"]["_meta"]["ui"]["resourceUri"] == "ui://layer/projection"
    assert all(len(tool["description"]) > 20 and tool["inputSchema"]["type"] == "object" for tool in tools.values())
