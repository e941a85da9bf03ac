"""Every tool with arguments that nobody would think of: an answer or a clear refusal, never a fault of the server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from edges.mcp.clients import ask, asked, post
from edges.serving import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.torture
WORDS = st.one_of(
    st.sampled_from(["main", "ticket", "ticket/1", "tx/1", "owner", "base", "sum.add", "..", "", "\x00", "select 1", "'", '"', "\ud800", "%s", "{}", "0", "-1", "tx/" + "9" * 30]),
    st.text(max_size=30),
)  # fmt: skip
NUMBERS = st.one_of(st.integers(), st.sampled_from([0, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 1, 2, 2000]))
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(allow_nan=False, allow_infinity=False), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=8,
)


def fitting(schema: Any) -> st.SearchStrategy[Any]:
    """Values that a schema takes, mostly."""
    if not isinstance(schema, dict) or not schema:
        return ANYTHING
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type", "any")
    if isinstance(kinds, list):
        return st.one_of(*(fitting({**schema, "type": kind}) for kind in kinds))
    if kinds == "object":
        properties = schema.get("properties")
        if properties is None:
            return st.dictionaries(WORDS, ANYTHING, max_size=4)
        needed = {key: fitting(properties[key]) for key in schema.get("required", ())}
        rest = {key: fitting(value) for key, value in properties.items() if key not in needed}
        return st.fixed_dictionaries(needed, optional=rest)
    simple: dict[str, st.SearchStrategy[Any]] = {
        "string": WORDS, "integer": NUMBERS, "number": st.one_of(NUMBERS, st.floats(0, 5)), "boolean": st.booleans(), "null": st.none(),
    }  # fmt: skip
    if kinds == "array":
        return st.lists(fitting(schema.get("items")), max_size=3)
    return simple.get(kinds, ANYTHING)


@pytest.fixture(scope="module")
def desk(own: Server) -> Iterator[Server]:
    own.layer.define("ticket", {"title": "text!", "n": "int"})
    own.layer.insert("ticket", {"title": "one"})
    own.layer.call(
        "function.define", name="sum.add", code="def main(a):\n    return a\n", signature={"arguments": {"a": "int!"}}
    )
    own.layer.call(
        "projection.define", name="titles", statement="select title from ticket where n = :n", parameters={"n": "int"}
    )
    own.layer.grant(own.principal("ann"), "read", "ticket")
    yield own
    for box in own.layer.call("box.list"):
        own.layer.call("box.kill", box=box["box"])


@pytest.mark.parametrize("principal", ["owner", "ann"])
def test_every_tool_with_anything(desk: Server, principal: str) -> None:
    tools = ask(desk, "tools/list")["result"]["tools"]
    long = {
        "box_create",
        "box_fork",
        "box_snapshot",
        "box_exec",
        "replay_again",
        "call_sum_add",
        "call_function",
        "run_agent",
    }

    def attempt(name: str, arguments: Any) -> None:
        if isinstance(arguments, dict) and name == "box_exec":
            arguments.pop("timeout", None)
        body, headers = asked("tools/call", {"name": name, "arguments": arguments})
        answer = post(desk, json.dumps(body).encode(), principal, headers)
        assert answer.status_code < 500, (name, arguments, answer.text)
        assert "something went wrong" not in answer.text, (name, arguments, desk.log[-3000:])

    for tool in tools:
        wild = st.one_of(fitting(tool["inputSchema"]), fitting(tool["inputSchema"]), ANYTHING)
        few = settings(
            max_examples=10 if tool["name"] in long else 50, deadline=None, suppress_health_check=list(HealthCheck), database=None
        )  # fmt: skip
        few(given(name=st.just(tool["name"]), arguments=wild)(attempt))()
    assert "Traceback" not in desk.log, desk.log[-3000:]


@pytest.mark.parametrize("principal", ["owner", "ann"])
def test_every_address_with_anything(desk: Server, principal: str) -> None:
    kinds = st.sampled_from(["schema", "entity", "row", "projection", "execution", "box", "file", "x"])
    uris = st.builds(
        lambda kind, words, query: f"layer://{kind}/{'/'.join(words)}{query}", kinds, st.lists(st.one_of(WORDS, NUMBERS.map(str)), max_size=3),
        st.one_of(st.just(""), st.text(max_size=10).map("?".__add__), st.sampled_from(["?n=1", "?limit=5", "?limit=99999999999", "?n=x", "?offset=-1"])),
    )  # fmt: skip

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(uri=st.one_of(uris, WORDS))
    def attempt(uri: str) -> None:
        body, headers = asked("resources/read", {"uri": uri})
        headers["mcp-name"] = "=?base64?" + base64.b64encode(uri.encode("utf-8", "surrogatepass")).decode() + "?="
        answer = post(desk, json.dumps(body).encode(), principal, headers)
        assert answer.status_code < 500, (uri, answer.text, desk.log[-3000:])

    attempt()
    assert "Traceback" not in desk.log, desk.log[-3000:]
