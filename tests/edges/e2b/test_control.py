"""The control plane as the unmodified `e2b` package asks it."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2b import AsyncSandbox, Sandbox, SandboxException, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, SandboxNotFoundException
from edges.serving import Serve, Server
from sandbox.hosts import wait_until

from livinglayer.law.held import boxes


@pytest.fixture(autouse=True)
def environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in server.e2b().items():
        monkeypatch.setenv(name, value)
    yield
    for box in boxes(server.layer, server.layer.my_id):  # of a test that failed
        server.layer.call("box.kill", box=box["id"])


def ask(server: Server, method: str, path: str, principal: str = "owner", **more: Any) -> httpx.Response:
    headers = {"x-api-key": server.key(principal), **more.pop("headers", {})}
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=30, **more)


def test_a_box_is_made_found_and_ended(server: Server) -> None:
    box = Sandbox.create(timeout=120, metadata={"k": "v"}, envs={"FOO": "bar"})
    info = box.get_info()
    assert (info.sandbox_id, info.template_id, info.metadata, info.state) == (box.sandbox_id, "base", {"k": "v"}, SandboxState.RUNNING)  # fmt: skip
    assert 110 < (info.end_at - info.started_at).total_seconds() < 180
    assert (info.cpu_count, info.memory_mb, info.envd_version) == (1, 512, "0.6.13")
    assert box.kill() is True
    assert box.kill() is False
    with pytest.raises(SandboxNotFoundException):
        box.get_info()


def test_lists_filter_sort_and_page(server: Server) -> None:
    boxes = [Sandbox.create(timeout=60, metadata={"n": str(n), "of": "a list & more"}) for n in range(3)]
    try:
        query = SandboxQuery(metadata={"of": "a list & more"})
        pages = Sandbox.list(query=query, limit=2)
        first = pages.next_items()
        assert pages.has_next
        second = pages.next_items()
        assert not pages.has_next
        assert [box.metadata["n"] for box in first + second] == ["2", "1", "0"]
        oldest = Sandbox.list(query=query, order="asc", limit=1).next_items()
        assert [box.sandbox_id for box in oldest] == [boxes[0].sandbox_id]
        boxes[1].pause()
        for state, wanted in ((SandboxState.PAUSED, {"1"}), (SandboxState.RUNNING, {"0", "2"})):
            found = Sandbox.list(query=SandboxQuery(metadata={"of": "a list & more"}, state=[state])).next_items()
            assert {box.metadata["n"] for box in found} == wanted
        after = SandboxQuery(metadata=query.metadata, started_after=first[-1].started_at, template="base")
        assert [box.metadata["n"] for box in Sandbox.list(query=after).next_items()] == ["2"]
        assert Sandbox.list(query=SandboxQuery(template="other")).next_items() == []
        old = ask(server, "GET", "/sandboxes?metadata=n%3D0").json()
        assert [box["sandboxID"] for box in old] == [boxes[0].sandbox_id]
    finally:
        for box in boxes:
            box.kill()


def test_pause_keeps_what_runs_and_connect_never_shortens(server: Server) -> None:
    box = Sandbox.create(timeout=300)
    assert box.pause() is True
    assert box.pause() is False
    assert box.get_info().state == SandboxState.PAUSED
    assert not box.is_running()
    answer = ask(server, "POST", f"/v2/sandboxes/{box.sandbox_id}/connect", json={"timeout": 200})
    assert answer.status_code == 201 and answer.json()["envdAccessToken"] == box._envd_access_token
    end = box.get_info().end_at
    again = ask(server, "POST", f"/v2/sandboxes/{box.sandbox_id}/connect", json={"timeout": 5})
    assert again.status_code == 200 and box.get_info().end_at == end
    Sandbox.connect(box.sandbox_id, timeout=1000)
    assert box.get_info().end_at > end
    box.set_timeout(100)
    assert box.get_info().end_at < end
    assert ask(server, "POST", f"/sandboxes/{box.sandbox_id}/refreshes", json={"duration": 5}).status_code == 204
    assert ask(server, "POST", f"/sandboxes/{box.sandbox_id}/resume", json={"timeout": 5}).status_code == 409
    box.kill()


def test_its_time_over_a_box_is_killed_or_paused(server: Server) -> None:
    killed, paused = Sandbox.create(timeout=1), Sandbox.create(timeout=1, lifecycle={"on_timeout": "pause"})
    deadline = time.monotonic() + 60
    while killed.is_running() or paused.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(SandboxNotFoundException):
        killed.get_info()
    assert paused.get_info().state == SandboxState.PAUSED
    paused.connect(timeout=60)
    assert paused.is_running()
    paused.kill()


def test_one_that_resumes_by_itself_goes_on_when_it_is_asked(server: Server) -> None:
    box = Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.pause()
    assert box.get_info().state == SandboxState.PAUSED
    assert box.is_running()
    assert box.get_info().state == SandboxState.RUNNING
    box.kill()


def test_a_stranger_wakes_nothing_that_is_private(server: Server) -> None:
    network = {"allow_public_traffic": False}
    box = Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True}, network=network)  # type: ignore[arg-type]
    box.files.write("a", "kept")
    box.pause()
    for path, port, more in (
        ("/", "8000", {}),
        ("/", "8000", {"e2b-traffic-access-token": box._envd_access_token}),
        ("/health", "49983", {}),
        ("/envs", "49983", {"x-access-token": "wrong"}),
        ("/files?path=a&signature=v1_x", "49983", {}),
        ("/contexts", "49999", {}),
    ):
        headers = {"e2b-sandbox-id": box.sandbox_id, "e2b-sandbox-port": port, **more}
        assert httpx.get(server.url + path, headers=headers).status_code == 502, path
        assert box.get_info().state == SandboxState.PAUSED, path
    assert httpx.get(box.download_url("a")).text == "kept"
    box.pause()
    asking = {
        "e2b-sandbox-id": box.sandbox_id,
        "e2b-sandbox-port": "8000",
        "e2b-traffic-access-token": box.traffic_access_token,
    }
    assert "port is not open" in httpx.get(server.url, headers=asking).text
    assert box.get_info().state == SandboxState.RUNNING
    box.kill()


def test_an_idempotency_key_gives_one_box(server: Server) -> None:
    def create(key: str, **more: Any) -> httpx.Response:
        given = {"templateID": "base", "timeout": 60, "envVars": {"A": "b"}, **more}
        return ask(server, "POST", "/v2/sandboxes", headers={"Idempotency-Key": key}, json=given)

    first, second = create("one"), create("one")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert create("one", timeout=61).status_code == 409
    assert create("one", envVars={"A": "c"}).status_code == 409
    other = create("two")
    assert other.json()["sandboxID"] != first.json()["sandboxID"]
    for made in (first, other):
        assert ask(server, "DELETE", f"/sandboxes/{made.json()['sandboxID']}").status_code == 204


def test_snapshots_and_forks_begin_where_a_box_was(server: Server) -> None:
    box = Sandbox.create(timeout=60)
    host = server.layer
    host.call("box.write", box=box.sandbox_id, path="/home/user/a", content="kept")
    kept = box.create_snapshot("mysnap")
    named = [one.snapshot_id for one in Sandbox.list_snapshots(sandbox_id=box.sandbox_id).next_items()]
    assert named == [kept.snapshot_id] and kept.names == ["mysnap"]
    made = [Sandbox.create(template, timeout=60) for template in (kept.snapshot_id, "mysnap")]
    made += [fork for fork in box.fork(count=2, timeout=60) if isinstance(fork, Sandbox)]
    assert len(made) == 4
    for each in made:
        assert host.call("box.read", box=each.sandbox_id, path="/home/user/a")["content"] == "kept"
    lineage = {row["box"]: row for row in host.query("select box, parent, snapshot from lineage")}
    mine = held(server, box)["execution"]
    assert lineage[f"b{held(server, made[0])['execution']}"]["snapshot"] == kept.snapshot_id
    assert lineage[f"b{held(server, made[3])['execution']}"]["parent"] == f"b{mine}"
    assert Sandbox.delete_snapshot(kept.snapshot_id) is True
    assert Sandbox.delete_snapshot(kept.snapshot_id) is False
    for each in (box, *made):
        each.kill()


def held(server: Server, box: Sandbox) -> dict[str, Any]:
    found: list[dict[str, Any]] = server.layer.call("box.list")
    return next(one for one in found if one["box"] == box.sandbox_id)


def test_what_a_box_uses_and_did_is_told(server: Server) -> None:
    box = Sandbox.create(timeout=60)
    server.layer.call("box.run", box=box.sandbox_id, command="true")
    (metric,) = box.get_metrics()
    assert (metric.cpu_count, metric.mem_total, metric.disk_total) == (1, 512 << 20, 2 << 30)
    assert metric.mem_used > 0
    logs = ask(server, "GET", f"/sandboxes/{box.sandbox_id}/logs").json()
    assert any("true" in line["line"] for line in logs["logs"])
    every = ask(server, "GET", f"/sandboxes/metrics?sandbox_ids={box.sandbox_id},bnone").json()
    assert list(every["sandboxes"]) == [box.sandbox_id]
    box.kill()


def test_network_rules_are_replaced(server: Server) -> None:
    box = Sandbox.create(timeout=60, network={"allow_out": ["api.github.com"], "deny_out": ["0.0.0.0/0"], "allow_public_traffic": False})  # fmt: skip
    assert box.traffic_access_token
    assert held(server, box)["egress"]
    box.update_network({"deny_out": ["0.0.0.0/0"]})
    assert held(server, box)["egress"] == []
    detail = ask(server, "GET", f"/sandboxes/{box.sandbox_id}").json()
    assert detail["network"] == {"allowPublicTraffic": False, "denyOut": ["0.0.0.0/0"]}
    assert ask(server, "PUT", f"/sandboxes/{box.sandbox_id}/network", json={"allowOut": "all"}).status_code == 400
    box.kill()


async def async_life() -> None:
    box = await AsyncSandbox.create(timeout=60, metadata={"async": "yes"})
    assert await box.is_running()
    assert (await box.get_info()).metadata == {"async": "yes"}
    await box.pause()
    await box.connect(timeout=60)
    assert await box.kill() is True


def test_the_async_client_does_the_same(server: Server) -> None:
    import asyncio

    asyncio.run(async_life())


def test_others_boxes_are_not_there(server: Server) -> None:
    box = Sandbox.create(timeout=60)
    server.layer.principal("eve")
    server.layer.grant("eve", "call", "box:base")
    id = box.sandbox_id
    for method, path, body in (
        ("GET", f"/sandboxes/{id}", None), ("DELETE", f"/sandboxes/{id}", None), ("POST", f"/sandboxes/{id}/pause", {}),
        ("POST", f"/v2/sandboxes/{id}/connect", {}), ("POST", f"/sandboxes/{id}/timeout", {"timeout": 1}),
        ("POST", f"/sandboxes/{id}/snapshots", {}), ("POST", f"/sandboxes/{id}/fork", {}), ("PUT", f"/sandboxes/{id}/network", {}),
        ("GET", f"/sandboxes/{id}/metrics", None), ("GET", f"/sandboxes/{id}/logs", None), ("POST", f"/sandboxes/{id}/refreshes", {}),
    ):  # fmt: skip
        answer = ask(server, method, path, "eve", json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, 404), path
    assert ask(server, "GET", "/v2/sandboxes", "eve").json() == []
    own = ask(server, "POST", "/v2/sandboxes", "eve", json={"templateID": "base"})
    assert own.status_code == 201
    assert own.json()["sandboxID"] in {box.sandbox_id for box in Sandbox.list().next_items()}  # an owner sees all
    assert box.is_running()
    for each in (id, own.json()["sandboxID"]):
        ask(server, "DELETE", f"/sandboxes/{each}")
    assert ask(server, "POST", "/v2/sandboxes", "stranger", json={"templateID": "base"}).status_code in (403, 404)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b"{}", "'templateID' is required"),
        (b'{"templateID": 3}', "must be a text"),
        (rb'{"templateID": "\ud800"}', "nobody can keep"),
        (rb'{"templateID": "base", "metadata": {"a": "\u0000"}}', "nobody can keep"),
        (b'{"templateID": "base", "timeout": "1"}', "whole number"),
        (b'{"templateID": "base", "timeout": -1}', "from 0 on"),
        (b'{"templateID": "base", "timeout": true}', "whole number"),
        (b'{"templateID": "base", "metadata": {"a": 1}}', "texts by name"),
        (b'{"templateID": "base", "envVars": {"a b": "c"}}', "environment variable"),
        (b'{"templateID": "base", "network": {"denyOut": [1]}}', "denyOut"),
        (b'{"templateID": "base", "volumeMounts": [{}]}', "name and a path"),
        (b'{"templateID": "base", "autoPauseMemory": false, "autoResume": {"enabled": true}}', "autoResume"),
        (b'{"templateID": "base", "metadata": {"a": "' + b"x" * 30000 + b'"}}', "metadata"),
    ],
)
def test_what_is_wrong_is_400(server: Server, body: bytes, said: str) -> None:
    answer = ask(server, "POST", "/v2/sandboxes", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 413, 429), answer.text
    assert set(answer.json()) == {"code", "message"} and said in answer.json()["message"]


def test_what_is_not_there_and_who_is_not_known(server: Server) -> None:
    for method, path, status in (
        ("GET", "/sandboxes/bnone", 404), ("DELETE", "/sandboxes/bnone", 404), ("GET", "/sandboxes/..%2f", 404),
        ("POST", "/sandboxes/bnone/pause", 404), ("PATCH", "/sandboxes", 405), ("GET", "/sandboxes/bnone/what", 404),
        ("GET", "/v2/sandboxes?limit=0", 400), ("GET", "/v2/sandboxes?state=dead", 400), ("GET", "/v2/sandboxes?nextToken=x", 400),
        ("GET", "/v2/sandboxes?startedAfter=yesterday", 400), ("GET", "/v2/sandboxes?order=up", 400),
    ):  # fmt: skip
        answer = ask(server, method, path)
        assert (answer.status_code, answer.json()["code"]) == (status, status), (path, answer.text)
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("no-such-template")
    for headers in ({}, {"x-api-key": "e2b_" + "0" * 40}):
        answer = httpx.get(f"{server.url}/v2/sandboxes", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, 401)
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)


def test_boxes_survive_a_restart_of_the_server(server: Server) -> None:
    box = Sandbox.create(timeout=300)
    server.layer.call("box.run", box=box.sandbox_id, command="echo here > /home/user/a")
    server.restart()
    assert box.is_running()
    again = Sandbox.connect(box.sandbox_id)
    assert again._envd_access_token == box._envd_access_token
    assert server.layer.call("box.read", box=box.sandbox_id, path="/home/user/a")["content"] == "here\n"
    box.kill()


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_two_servers_of_one_layer_serve_the_same_boxes(
    serve: Serve, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = serve(location), serve(location)
    for name, value in one.e2b().items():
        monkeypatch.setenv(name, value)
    there = {"api_url": two.url, "sandbox_url": two.url, "api_key": one.key()}
    box = Sandbox.create(timeout=60)
    assert box.commands.run("echo hi > a; cat a").stdout == "hi\n"
    seen = Sandbox.connect(box.sandbox_id, **there)
    assert seen.commands.run("cat a").stdout == "hi\n"
    assert [found.sandbox_id for found in Sandbox.list(**there).next_items()] == [box.sandbox_id]
    seen.pause()
    assert box.get_info().state == SandboxState.PAUSED
    box.connect(timeout=60)
    assert seen.is_running()
    assert seen.kill() is True
    assert box.kill() is False
    number = one.layer.query("select id from execution where verb = 'box.open'")[0]["id"]
    wait_until(
        lambda: one.layer.query("select 1 as n from usage where execution = :id", {"id": number}), "it is over", 30
    )
    commands = one.layer.query("select count(*) as n from step where execution = :id and kind = 'command'", {"id": number})  # fmt: skip
    assert commands == [{"n": 2}]


def test_a_killed_box_cuts_off_what_is_open(server: Server) -> None:
    box = Sandbox.create(timeout=60)
    sleeping = box.commands.run("sleep 60", background=True)
    box.kill()
    with pytest.raises(SandboxException):
        sleeping.wait()
    assert not box.is_running()


def test_a_paused_counter_goes_on_counting(server: Server) -> None:
    box = Sandbox.create(timeout=60)
    box.commands.run("i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.01; done", background=True, timeout=0)
    before = 0
    for turn in range(3):
        box.files.write(f"file{turn}", str(turn))
        box.pause()
        box.connect(timeout=60)
        assert [box.files.read(f"file{n}") for n in range(turn + 1)] == [str(n) for n in range(turn + 1)]
        wait_until(lambda: int(box.files.read("count") or 0) > before, "it goes on counting", 30)  # noqa: B023
        before = int(box.files.read("count") or before)
    box.kill()


def test_an_mcp_gateway_is_a_template_like_any(server: Server) -> None:
    box = Sandbox.create(timeout=60)
    script = 'mcp-gateway() { echo "$1 $2 $GATEWAY_ACCESS_TOKEN" > /run/asked; }\n'
    box.files.write("/etc/profile.d/mcp-gateway.sh", script, user="root")
    box.create_snapshot("mcp-gateway")
    made = Sandbox.create(timeout=60, mcp={"exa": {"apiKey": "k"}})
    assert made.commands.run("cat /run/asked", user="root").stdout == f'--config {{"exa": {{"apiKey": "k"}}}} {made.get_mcp_token()}\n'  # fmt: skip
    assert Sandbox.delete_snapshot("mcp-gateway") is True
    box.files.write("/etc/profile.d/mcp-gateway.sh", "mcp-gateway() { return 3; }", user="root")
    box.create_snapshot("mcp-gateway")
    with pytest.raises(SandboxException):
        Sandbox.create(timeout=60, mcp={"exa": {"apiKey": "k"}}, metadata={"failed": "yes"})
    assert Sandbox.list(query=SandboxQuery(metadata={"failed": "yes"})).next_items() == []
    Sandbox.delete_snapshot("mcp-gateway")
    for each in (box, made):
        each.kill()


def test_older_clients_and_those_that_go_by_a_domain_find_the_same(server: Server) -> None:
    made = ask(server, "POST", "/sandboxes", json={"templateID": "base", "timeout": 60}).json()  # before 2.63
    id = made["sandboxID"]
    domain = {"host": f"api.{server.told['domain']}"}  # as E2B_DOMAIN makes them ask
    listed = ask(server, "GET", "/v2/sandboxes", headers=domain)
    assert listed.status_code == 200 and id in {box["sandboxID"] for box in listed.json()}
    assert ask(server, "GET", "/healthz", headers=domain).json()["code"] == 404  # nothing but the control plane
    assert ask(server, "POST", f"/sandboxes/{id}/connect", json={"timeout": 60}).status_code == 200
    envd = {"host": f"49983-{id}.{server.told['domain']}"}
    assert httpx.get(f"{server.url}/health", headers=envd).status_code == 204
    assert ask(server, "DELETE", f"/sandboxes/{id}").status_code == 204
    gone = httpx.get(f"{server.url}/health", headers=envd)
    assert gone.status_code == 502 and gone.json()["code"] == 502 and "was not found" in gone.json()["message"]
    assert gone.headers["should-retry"] == "false"


def test_without_memory_files_stay_and_processes_end(server: Server) -> None:
    box = Sandbox.create(timeout=60)
    box.files.write("kept", "kept")
    here = f"/sandboxes/{box.sandbox_id}"

    def begin() -> None:
        box.commands.run("sleep 4711", background=True, timeout=0)
        assert box.commands.run("pgrep -c sleep").stdout == "1\n"

    def begun_anew() -> bool:
        return box.commands.run("pgrep -c sleep || true").stdout == "0\n" and box.files.read("kept") == "kept"

    begin()
    assert ask(server, "POST", f"{here}/pause", json={"memory": False}).status_code == 204
    assert ask(server, "POST", f"{here}/pause", json={}).status_code == 409
    assert ask(server, "POST", f"/v2{here}/connect", json={"timeout": 60}).status_code == 201
    assert begun_anew()
    begin()
    assert ask(server, "POST", f"{here}/pause", json={"memory": True, "requireHealthyGuest": True}).status_code == 204
    assert ask(server, "POST", f"/v2{here}/connect", json={"timeout": 60, "memory": False}).status_code == 201
    assert begun_anew()
    box.kill()


def test_a_page_begins_nowhere_absurd(server: Server) -> None:
    for place in (b"[1" + b"0" * 400 + b', "a"]', b'[null, "a"]', b"[1]", b"\xff"):
        for path in ("/v2/sandboxes", "/snapshots"):
            token = base64.urlsafe_b64encode(place).decode()
            assert ask(server, "GET", f"{path}?nextToken={token}").status_code == 400
