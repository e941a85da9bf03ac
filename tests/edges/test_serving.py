"""`layer up` as a process: what it says, how it ends, what it logs, and two of them over one layer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from edges.serving import Server

from livinglayer.edges.cli.serving import Text
from livinglayer.settings import config_directory


def layer_command(server: Server, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "livinglayer.edges.cli.main", *words, "--dir", server.directory]
    return subprocess.run(command, env=os.environ | server.environment | more, capture_output=True, text=True, timeout=60)  # fmt: skip


def lines(server: Server) -> list[dict[str, object]]:
    return [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]


def test_requests_are_logged_as_json_and_traced(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    server = serve(None, "--access-log")
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    headers = {"authorization": f"Bearer {server.token()}", "traceparent": parent}
    body = {"name": "note", "fields": {"text": "text"}}
    assert httpx.post(f"{server.url}/api/entity.define", json=body, headers=headers).status_code == 200
    [row] = server.layer.query("select trace from execution where verb = 'entity.define'")
    assert row["trace"].split("-")[1] == "a" * 32, "what a request leads to belongs to the trace it came with"
    asked = [line for line in lines(server) if line["part"] == "livinglayer.http"]
    assert asked and asked[-1]["message"] == "POST /api/entity.define 200" and asked[-1]["address"] == "127.0.0.1"
    server.stop()
    assert server.process.stdout is not None
    spans = server.process.stdout.read().decode()
    assert '"layer.part": "native"' in spans and "0x" + "a" * 32 in spans


def test_a_path_makes_no_line_of_its_own_in_the_log() -> None:
    said = logging.LogRecord(
        "livinglayer.http", logging.INFO, "", 0, "GET %s", ("/x\n2026 INFO all is well\x1b[2J\u2028",), None
    )
    assert Text("%(name)s %(message)s").format(said) == r"livinglayer.http GET /x\n2026 INFO all is well\x1b[2J\u2028"


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
        b"GET /",
        b"POST /api/query HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    ],
)
def test_a_head_without_end_is_cut_off_and_holds_up_nobody(server: Server, begun: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 30) as line:
        with contextlib.suppress(ConnectionError):
            line.sendall(begun)
            for _ in range(64):
                line.sendall(b"a" * (1 << 20))
            line.recv(1 << 16)
            assert not line.recv(1 << 16)
    assert httpx.get(f"{server.url}/healthz", timeout=5).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        b"Host: \xff", b"Host: 127.0.0.1\xc3\xa9", b"Host: xn--a-", b"Host: " + b"a" * 70, b"Host: ", b"Connection: Upgrade, \xff",
        b"Sec-WebSocket-Extensions: \xff", b"Sec-WebSocket-Protocol: a, \xff", b"Sec-WebSocket-Key: \xff", b"Sec-WebSocket-Version: \xff",
        b"Cookie: \xff", b"Origin: \xff", b"E2b-Sandbox-Id: \xff", b"E2b-Sandbox-Port: \xff",
    ],
)  # fmt: skip
def test_a_websocket_with_a_head_of_any_bytes_gets_an_answer(server: Server, wrong: bytes) -> None:
    head = {
        b"Host": b"127.0.0.1", b"Upgrade": b"websocket", b"Connection": b"Upgrade", b"Sec-WebSocket-Key": b"dGhlIHNhbXBsZSBub25jZQ==",
        b"Sec-WebSocket-Version": b"13",
    }  # fmt: skip
    name, _, value = wrong.partition(b": ")
    sent = b"".join(b"%s: %s\r\n" % pair for pair in (head | {name: value}).items())
    with socket.create_connection(("127.0.0.1", server.port), 10) as line:
        line.sendall(b"GET / HTTP/1.1\r\n" + sent + b"\r\n")
        assert re.match(rb"HTTP/1.1 (4\d\d|502) ", line.recv(1000))
    assert "Traceback" not in server.log


def test_numbers_that_are_none_are_no_failure(server: Server) -> None:
    for name, value in (("e2b-sandbox-port", b"\xb2"), ("e2b-sandbox-port", b"99999"), ("mcp-session-id", b"\xb2")):
        headers = {b"e2b-sandbox-id": b"x", name.encode(): value, b"x-api-key": server.key().encode()}
        assert httpx.get(f"{server.url}/api/me", headers=headers).status_code in (200, 400, 502)
    for number in ("%C2%B2", "9" * 5000):
        answer = httpx.put(
            f"{server.url}/templates/uploads/{number}/{'0' * 64}?until=1", headers={"x-api-key": server.key()}
        )
        assert answer.status_code == 401
    assert "Traceback" not in server.log


def test_it_ends_soon_while_streams_are_open_and_leaves_no_trace_of_itself(serve: Callable[..., Server]) -> None:
    server = serve()
    server.layer.define("note", {"text": "text"})
    headers = {"authorization": f"Bearer {server.token()}"}
    with httpx.stream("GET", f"{server.url}/api/live?entity=note", headers=headers, timeout=30) as live:
        assert live.status_code == 200
        began = time.monotonic()
        server.process.terminate()
        assert server.process.wait(30) == 0
        assert time.monotonic() - began < 20
    place = Path(os.environ["XDG_CONFIG_HOME"], "livinglayer", "servers", server.layer.id)
    assert not place.exists()
    told = layer_command(server, "env", "--e2b")
    assert told.returncode == 4 and "no server of this layer runs here" in told.stderr
    assert "Traceback" not in server.log


def test_commands_find_the_server(server: Server) -> None:
    found = layer_command(server, "env", "--e2b")
    values = dict(re.findall(r"^export (\w+)=(\S+)$", found.stdout, re.M))
    assert values["E2B_API_URL"] == values["E2B_SANDBOX_URL"] == server.url
    assert re.fullmatch("e2b_[0-9a-f]{40}", values["E2B_API_KEY"])
    assert layer_command(server, "env", "--e2b").stdout == found.stdout, "one key, made once"
    keys = "select id, expires from token where name = 'layer env' order by id"
    [key] = server.layer.query(keys)
    assert timedelta(days=29) < key["expires"] - datetime.now(UTC) < timedelta(days=30)
    [kept] = (config_directory() / "e2b").glob(f"{server.layer.id}.*")
    assert kept.stat().st_mode & 0o777 == 0o600
    for other in (server.token("owner", "e2b", seconds=3600), server.key("ann")):  # one that ends soon, one of another
        kept.write_text(other)
        assert other not in layer_command(server, "env", "--e2b").stdout
    short = server.token("bob", seconds=3600)  # what it makes ends with it, and is made once all the same
    first, second = (layer_command(server, "env", "--e2b", LAYER_TOKEN=short).stdout for _ in range(2))
    assert first == second != ""
    assert layer_command(server, "login").stdout.startswith(f"{server.url}/login?token=login_")
    made = layer_command(server, "token", "create", "--format", "e2b", "--scope", "boxes", "--expires", "1h")
    assert re.fullmatch("e2b_[0-9a-f]{40}\n", made.stdout)
    listed = json.loads(layer_command(server, "token", "list", "--json").stdout)
    assert any(one["ending"] == made.stdout[-5:-1] and one["scope"] == "boxes" for one in listed)
    wrong = layer_command(server, "token", "create", "--expires", "soon")
    assert wrong.returncode == 2 and "'soon' is not a time" in wrong.stderr


def test_a_taken_port_and_a_principal_who_is_no_owner_are_told(server: Server) -> None:
    told = layer_command(server, "up", "--port", str(server.port))
    assert told.returncode == 8 and "can't listen" in told.stderr and "Traceback" not in told.stderr
    denied = layer_command(server, "up", "--port", "0", LAYER_TOKEN=server.token("ann"))
    assert denied.returncode == 3 and "only an owner" in denied.stderr


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_two_servers_serve_one_layer(serve: Callable[..., Server], make_location: Callable[[], str]) -> None:
    location = make_location()
    first, second = serve(location), serve(location)
    headers = {"authorization": f"Bearer {first.token('ann')}"}
    owner = {"authorization": f"Bearer {first.token()}"}
    body = {"name": "note", "fields": {"text": "text"}}
    assert httpx.post(f"{first.url}/api/entity.define", json=body, headers=owner).status_code == 200
    sql = {"sql": "select count(*) as n from note"}
    assert httpx.post(f"{second.url}/api/query", json=sql, headers=owner).json()["rows"] == [{"n": 0}]
    assert httpx.post(f"{second.url}/api/query", json={"sql": "select 1 as n"}, headers=headers).status_code == 200
    number = first.layer.query("select t.id from token t join principal p on p.id = t.principal where p.name = 'ann'")[0]["id"]  # fmt: skip
    assert httpx.post(f"{first.url}/api/token.revoke", json={"id": number}, headers=owner).status_code == 200
    time.sleep(1.2)
    for server in (first, second):
        assert httpx.post(f"{server.url}/api/query", json=sql, headers=headers).status_code == 401
