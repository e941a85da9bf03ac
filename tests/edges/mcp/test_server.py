"""The server: who asks is decided first, every protocol is spoken, and no bytes make it fail."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from edges.mcp.clients import HEADERS, MODES, NEW, ask, asked, names, over_http, over_stdio, post, run, use
from edges.serving import Server

from livinglayer.edges.http.auth import Gate
from livinglayer.edges.http.metrics import Metrics
from livinglayer.edges.http.serving import Serving
from livinglayer.edges.mcp import server as speaking

OLD = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")


def hello(version: str) -> dict[str, Any]:
    info = {"name": "t", "version": "1"}
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": info}
    return {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}


def told(answer: httpx.Response) -> Any:
    """The message in an answer, which may be a stream."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        return json.loads(next(line[6:] for line in answer.text.splitlines() if line.startswith("data: {")))
    return answer.json()


@pytest.mark.parametrize("version", OLD)
def test_every_older_protocol_is_spoken(server: Server, version: str) -> None:
    first = post(server, hello(version))
    result = told(first)["result"]
    assert result["protocolVersion"] == version and result["serverInfo"]["name"] == "livinglayer"
    assert result["capabilities"]["tools"]["listChanged"] and result["capabilities"]["resources"]["subscribe"]
    session = {"mcp-session-id": first.headers["mcp-session-id"], "mcp-protocol-version": version}
    assert post(server, {"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session).status_code == 202
    listed = told(post(server, {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}, headers=session))["result"]
    assert "query" in [tool["name"] for tool in listed["tools"]]
    call = {"name": "query", "arguments": {"sql": "select 1 as n"}}
    given = told(post(server, {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": call}, headers=session))
    assert json.loads(given["result"]["content"][0]["text"])["rows"] == [{"n": 1}]
    other = post(server, {"jsonrpc": "2.0", "id": 4, "method": "tools/list"}, server.principal("eve"), session)
    assert other.status_code == 404  # another's session is not there
    gone = httpx.delete(
        f"{server.url}/mcp", headers={**HEADERS, **session, "authorization": f"Bearer {server.token()}"}
    )
    assert gone.status_code == 200
    assert post(server, {"jsonrpc": "2.0", "id": 5, "method": "tools/list"}, headers=session).status_code == 404


def test_the_newest_says_what_it_can(server: Server) -> None:
    result = ask(server, "server/discover")["result"]
    assert result["supportedVersions"] == [NEW]
    assert set(result["capabilities"]["extensions"]) == {"io.modelcontextprotocol/tasks", "io.modelcontextprotocol/ui"}
    assert result["capabilities"]["resources"] == {"subscribe": True, "listChanged": True}


def test_nobody_gets_in_without_a_token(server: Server) -> None:
    body, headers = asked("tools/list")
    for given in (
        {},
        {"authorization": "Bearer nobody"},
        {"authorization": "Basic eDp5"},
        {"cookie": "layer_session=x"},
    ):
        answer = post(server, body, None, headers | given)
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Bearer")
    token = server.token("ann", seconds=3600)
    assert post(server, body, None, headers | {"authorization": f"Bearer {token}"}).status_code == 200
    [row] = server.layer.query("select max(id) as id from token")
    server.layer.call("token.revoke", id=row["id"])
    time.sleep(1.2)  # as long as a proof is believed
    assert post(server, body, None, headers | {"authorization": f"Bearer {token}"}).status_code == 401


def test_pages_and_names_of_strangers_are_refused(server: Server) -> None:
    body, headers = asked("tools/list")
    assert post(server, body, headers=headers | {"origin": "https://evil.example"}).status_code == 403
    assert post(server, body, headers=headers | {"origin": "null"}).status_code == 403
    assert post(server, body, headers=headers | {"host": "evil.example"}).status_code == 421
    assert post(server, body, headers=headers | {"origin": server.url}).status_code == 200


WRONG: list[Any] = [
    b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe\x00", b'{"jsonrpc":"2.0"}', b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000, b'{"id":' + b"9" * 5000 + b"}",
    [{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}], {"jsonrpc": "1.0", "id": 1, "method": "tools/list"}, {"jsonrpc": "2.0", "id": None, "method": "tools/list"},
    {"jsonrpc": "2.0", "id": {}, "method": "tools/list"}, {"jsonrpc": "2.0", "id": 1, "method": 5}, {"jsonrpc": "2.0", "id": 1, "method": "no/such"},
    {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}, {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": []},
    {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": 5}}, {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "query", "arguments": [1]}},
    {"jsonrpc": "2.0", "id": 1, "result": {}}, {"jsonrpc": "2.0", "id": 1, "method": "resources/read", "params": {"uri": {}}}, {"jsonrpc": "2.0", "method": "notifications/none"},
    {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "\ud800", "arguments": {"\ud800": "\udfff"}}},
]  # fmt: skip


def test_no_bytes_make_it_fail(server: Server) -> None:
    first = post(server, hello(OLD[-1]))
    session = {"mcp-session-id": first.headers["mcp-session-id"], "mcp-protocol-version": OLD[-1]}
    new = {"mcp-protocol-version": NEW, "mcp-method": "tools/list"}
    for body in WRONG:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        for headers in ({}, session, new, {"mcp-protocol-version": "1999-01-01"}, {"mcp-session-id": "forged"}, {"accept": "text/plain"}, {"content-type": "text/plain"}):  # fmt: skip
            answer = post(server, data, headers=headers)
            assert answer.status_code < 500, (body, headers, answer.text)
    for method, params in (
        ("tools/call", {"name": "query", "arguments": {"sql": "select '\x00'"}}), ("tools/call", {"name": "query", "arguments": {"sql": "x" * 100_000}}),
        ("tools/call", {"name": "nobody's"}), ("tools/list", {"cursor": "-1"}), ("tools/list", {"cursor": "9" * 5000}), ("tasks/get", {"taskId": "1" * 5000}),
        ("tasks/get", {}), ("tasks/update", {"taskId": "1"}), ("subscriptions/listen", {}), ("resources/read", {"uri": "layer://row/x/" + "9" * 5000}),
        ("tools/call", {"name": "apply_change", "arguments": {"changes": [{"do": "insert", "entity": "x" * 5000, "values": {}}]}}),
        ("tools/call", {"name": "query", "arguments": {"sql": "select 1", "params": {"a": {"b": [None] * 1000}}}}),
        ("tools/call", {"name": "query", "arguments": {"sql": "select 1"}, "_meta": {"traceparent": ["x"]}}),
        ("tools/call", {"name": "query", "arguments": {"sql": "select 1"}, "requestState": "forged"}),
    ):  # fmt: skip
        body, headers = asked(method, params)
        answer = post(server, body, headers={key: value[:200] for key, value in headers.items()})
        assert answer.status_code < 500, (method, params, answer.text)
    assert post(server, b"{" + b" " * (9 << 20)).status_code == 413
    for method in ("PUT", "PATCH", "OPTIONS", "HEAD"):
        answer = httpx.request(method, f"{server.url}/mcp", headers={"authorization": f"Bearer {server.token()}"})
        assert answer.status_code == 405, method
    assert (
        httpx.get(f"{server.url}/mcp/elsewhere", headers={"authorization": f"Bearer {server.token()}"}).status_code
        == 404
    )
    assert "Traceback" not in server.log, server.log


def test_clients_that_hang_up_are_let_go(server: Server) -> None:
    body, headers = asked("tools/call", {"name": "query", "arguments": {"sql": "select 1 as n"}})
    data = json.dumps(body).encode()
    lines = {**HEADERS, **headers, "authorization": f"Bearer {server.token()}", "host": f"127.0.0.1:{server.port}", "content-length": str(len(data))}  # fmt: skip
    head = "POST /mcp HTTP/1.1\r\n" + "".join(f"{key}: {value}\r\n" for key, value in lines.items()) + "\r\n"
    for part in (head.encode()[:40], head.encode(), head.encode() + data[:20], head.encode() + data):
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(part)
    assert (
        ask(server, "tools/call", {"name": "query", "arguments": {"sql": "select 1 as n"}})["result"]["isError"]
        is False
    )
    assert "Traceback" not in server.log, server.log


def test_a_body_that_drips_is_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaking, "PATIENCE", 0.5)
    serving = Serving(server.layer, "", "", frozenset(), Gate(), Metrics())

    async def drip() -> dict[str, Any]:
        await asyncio.sleep(0.05)  # each drop soon enough
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def whole() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def act() -> None:
        receive = speaking._patient(serving, drip)
        drops = [await receive()]
        while drops[-1]["type"] == "http.request" and len(drops) < 100:
            drops.append(await receive())
        assert drops[-1] == {"type": "http.disconnect"} and len(drops) > 1
        receive = speaking._patient(serving, whole)
        assert (await receive())["body"] == b"{}"
        await asyncio.sleep(0.6)  # an answer may take as long as it likes
        assert (await receive())["type"] == "http.request"

    asyncio.run(act())


@pytest.mark.parametrize("mode", MODES)
def test_a_client_starts_it_itself(server: Server, mode: str) -> None:
    async def act() -> None:
        async with over_stdio(server, "--as", server.principal("dora"), mode=mode) as client:
            assert await names(client) == ["can"]
            assert (await use(client, "can", action="read", resource="principal"))["allowed"] is False
        async with over_http(server, mode=mode) as client:
            assert "query" in await names(client)

    run(act())


@pytest.mark.parametrize("end", ["input", "both, while it answers", "SIGINT", "SIGTERM"])
def test_it_ends_with_its_client_and_complains_of_nothing(server: Server, end: str) -> None:
    words = [sys.executable, "-m", "livinglayer.edges.cli.main", "mcp", "--dir", server.directory]
    pipe, line = subprocess.PIPE, json.dumps(asked("tools/list")[0]).encode() + b"\n"
    with subprocess.Popen(words, env=os.environ | server.environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(line)
        process.stdin.flush()
        assert b'"query"' in process.stdout.readline()
        if end.startswith("SIG"):
            process.send_signal(getattr(signal, end))
        else:
            if end != "input":
                process.stdin.write(line * 50)
                process.stdin.flush()
                process.stdout.close()
            process.stdin.close()
        assert process.wait(30) == {"SIGINT": -2, "SIGTERM": -15}.get(end, 0)
        assert process.stderr.read() == b""


def test_the_programs_of_the_page_work(server: Server) -> None:
    page = (Path(__file__).parents[3] / "docs/mcp.md").read_text()
    [code] = re.findall(r"^```python client\n(.*?)^```", page, re.M | re.S)
    environment = os.environ | {"LAYER_URL": server.url, "LAYER_TOKEN": server.token()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[{'n': 42}]\n", done.stderr


def test_scopes_hold_for_tasks_and_contents(server: Server) -> None:
    layer = server.layer
    layer.define("paper", {"name": "text", "doc": "file"})
    layer.define("secret_paper", {"name": "text", "doc": "file"})
    layer.insert("secret_paper", {"name": "s", "doc": b"nobody else's"})
    (digest,) = (row["doc"] for row in layer.query("select doc from secret_paper"))
    server.principal("clerk")
    layer.grant("clerk", "*", "paper")
    change = {"do": "insert", "entity": "paper", "values": {"name": "stolen", "doc": digest}}
    said = ask(server, "tools/call", {"name": "apply_change", "arguments": {"changes": [change]}}, "clerk")["result"]
    assert said["isError"] and said["structuredContent"]["error"]["code"] == "not_found"
    assert "error" in ask(server, "resources/read", {"uri": f"layer://file/{digest}"}, "clerk")
    number = str(layer.query("select max(id) as id from execution")[0]["id"])
    capabilities = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
    for scope, refused in ((["read"], ["update", "cancel"]), (["boxes"], ["get", "update", "cancel"]), (["write"], [])):
        token = server.token("owner", scope=scope)
        for act in ("get", "update", "cancel"):
            more = {"inputResponses": {}} if act == "update" else {}
            body, headers = asked(f"tasks/{act}", {"taskId": number, **more}, capabilities=capabilities)
            found = post(server, body, headers={**headers, "authorization": f"Bearer {token}"}).json()
            assert ("error" in found) == (act in refused), (scope, act, found)
