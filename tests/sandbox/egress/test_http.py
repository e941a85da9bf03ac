"""HTTP out of a box, by clients people use: what arrives, what comes back, what the host is told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox.egress.boxes import Box, local, until
from sandbox.egress.servers import Servers

MakeBox = Callable[..., Box]


def test_curl(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.http, protocol="http"), local("index.test", servers.https)])
    assert box.curl("http://index.test/a?b=1") == (200, "GET /a?b=1")
    assert box.curl("--http1.1", "https://index.test/b") == (200, "GET /b")
    assert box.curl("-X", "POST", "--data-binary", "hello", "https://index.test/length") == (200, "5")
    assert box.curl("-I", "http://index.test/x")[0] == 200
    [event] = box.events(protocol="http", method="GET")
    assert {key: event[key] for key in ("host", "port", "path", "status", "verdict", "reason", "secrets")} == {
        "host": "index.test", "port": 80, "path": "/a", "status": 200, "verdict": "allow", "reason": None, "secrets": [],
    }  # fmt: skip
    assert event["up"] > 20 and event["down"] > 10 and event["at"] <= time.time() and "index.test" in event["rule"]
    assert box.events(protocol="dns", host="index.test")[0]["verdict"] == "allow"


def test_http2_both_ways(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("api.test", servers.h2)])
    status, body = box.curl("--http2", "-H", "x-one: 1", "-d", "q=1", "https://api.test/echo?x=1")
    said = json.loads(body)
    assert (
        status == 200
        and said["body"] == "q=1"
        and [":authority", "api.test"] in said["headers"]
        and ["x-one", "1"] in said["headers"]
    )
    assert servers.seen[-1]["version"] == "2"
    assert box.events(protocol="h2")[0]["status"] == 200


def test_http2_from_the_box_http1_to_the_server(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("api.test", servers.https)])
    assert box.curl("--http2", "-d", "hello", "https://api.test/length") == (200, "5")
    assert servers.seen[-1]["version"] == "1.1"


def test_http2_without_tls(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("api.test", servers.http, path="/ok")])
    assert box.curl("--http2-prior-knowledge", "http://api.test/ok") == (200, "GET /ok")
    assert box.curl("--http2-prior-knowledge", "http://api.test/no")[0] == 403


def test_trailers_and_both_ways_at_once(make_box: MakeBox, servers: Servers) -> None:
    """What gRPC needs: the response begins before the request ends, and ends with trailers."""
    box = make_box([local("api.test", servers.h2)])
    code = """
import socket, ssl, h2.connection, h2.config, h2.events
c = ssl.create_default_context(); c.set_alpn_protocols(["h2"])
s = c.wrap_socket(socket.create_connection(("api.test", 443), 5), server_hostname="api.test")
conn = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True)); conn.initiate_connection()
conn.send_headers(1, [(":method", "POST"), (":scheme", "https"), (":authority", "api.test"), (":path", "/duplex"), ("content-type", "application/grpc"), ("te", "trailers")])
conn.send_data(1, b"one"); s.sendall(conn.data_to_send()); got = b""; trailers = None
while trailers is None:
    for e in conn.receive_data(s.recv(65536)):
        if isinstance(e, h2.events.DataReceived):
            got += e.data
            if got == b"one": conn.send_data(1, b"two", end_stream=True)
        if isinstance(e, h2.events.TrailersReceived): trailers = dict(e.headers)
    s.sendall(conn.data_to_send())
print(got, trailers)"""
    assert box.python(code) == "b'onetwo' {b'grpc-status': b'0'}"


HTTPX = """
import asyncio, httpx, sys
async def main():
    async with httpx.AsyncClient(http2=True, timeout=60) as client:
        answers = await asyncio.gather(*(client.post("https://api.test/length", content=b"x" * (i * 10000)) for i in range(20)))
        print([int(a.text) for a in answers] == [i * 10000 for i in range(20)], {a.http_version for a in answers})
        big = await client.get("https://api.test/bytes/3000000")
        print(len(big.content))
asyncio.run(main())
"""


@pytest.mark.parametrize("upstream", ["h2", "https"])
def test_httpx_many_at_once(make_box: MakeBox, servers: Servers, upstream: str) -> None:
    box = make_box([local("api.test", getattr(servers, upstream))])
    assert box.python(HTTPX) == "True {'HTTP/2'}\n3000000"
    assert len(box.events(21, protocol="h2")) == 21


UPLOADS = """
import socket, ssl, h2.connection, h2.config, h2.events
c = ssl.create_default_context(); c.set_alpn_protocols(["h2"])
s = c.wrap_socket(socket.create_connection(("api.test", 443), 5), server_hostname="api.test"); s.settimeout(15)
conn = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True)); conn.initiate_connection()
left, over, got = {id: 1_000_000 for id in range(1, 49, 2)}, 0, b""
for id in left:
    conn.send_headers(id, [(":method", "POST"), (":scheme", "https"), (":authority", "api.test"), (":path", "/length"), ("content-length", "1000000")])
while over < 24:
    for id in reversed(left):  # the last first, which wait for those that came before
        while left[id] and (room := min(left[id], conn.local_flow_control_window(id), 16384)):
            left[id] -= room
            conn.send_data(id, bytes(room), end_stream=not left[id])
    s.sendall(conn.data_to_send())
    for e in conn.receive_data(s.recv(65536)):
        got += e.data if isinstance(e, h2.events.DataReceived) else b""
        over += isinstance(e, h2.events.StreamEnded)
print(got == b"1000000" * 24)
"""


@pytest.mark.parametrize("upstream", ["h2", "https"])
def test_many_uploads_at_once_do_not_wait_for_each_other(make_box: MakeBox, servers: Servers, upstream: str) -> None:
    box = make_box([local("api.test", getattr(servers, upstream))])
    assert box.python(UPLOADS) == "True"


ABANDONED = """
import socket, ssl, time, h2.connection, h2.config, h2.events
c = ssl.create_default_context(); c.set_alpn_protocols(["h2"])
s = c.wrap_socket(socket.create_connection(("api.test", 443), 5), server_hostname="api.test"); s.settimeout(15)
conn = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True)); conn.initiate_connection()
conn.increment_flow_control_window(1 << 30); s.sendall(conn.data_to_send())
def ask(id, **more):
    conn.send_headers(id, [(":method", "GET"), (":scheme", "https"), (":authority", "api.test"), (":path", "/bytes/3000000")], end_stream=True)
    s.sendall(conn.data_to_send())
for id in range(1, 60, 2):  # each given up after a little, of which the gateway has more by then
    ask(id); got = 0
    while got < 65535:
        for e in conn.receive_data(s.recv(65536)):
            got += len(e.data) if isinstance(e, h2.events.DataReceived) and e.stream_id == id else 0
    time.sleep(0.03)
    conn.reset_stream(id, 8); s.sendall(conn.data_to_send())
ask(61); got, over = 0, False
while not over:
    for e in conn.receive_data(s.recv(65536)):
        if isinstance(e, h2.events.DataReceived):
            if e.stream_id == 61: got += len(e.data)
            conn.acknowledge_received_data(e.flow_controlled_length, e.stream_id)
        over = over or (isinstance(e, h2.events.StreamEnded) and e.stream_id == 61)
    s.sendall(conn.data_to_send())
print(got)
"""


@pytest.mark.parametrize("upstream", ["h2", "https"])
def test_answers_that_were_given_up_leave_room_for_others(make_box: MakeBox, servers: Servers, upstream: str) -> None:
    box = make_box([local("api.test", getattr(servers, upstream))])
    assert box.python(ABANDONED) == "3000000"


def test_urllib(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.https)])
    assert (
        box.python("import urllib.request as u; print(u.urlopen('https://index.test/x').read().decode())") == "GET /x"
    )


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
def test_node_fetch(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.https)])
    code = "const r = await fetch('https://index.test/length', {method: 'POST', body: 'x'.repeat(100000)}); console.log(r.status, await r.text())"
    done = box.run("node", "--input-type=module", "-e", code)
    assert done.stdout.strip() == "200 100000", done.stderr


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_git_over_https(make_box: MakeBox, servers: Servers, tmp_path: Path) -> None:
    """A clone by the dumb protocol: many small requests on few connections."""
    work, bare = tmp_path / "work", tmp_path / "bare.git"
    for command in (
        ["git", "init", "-q", str(work)],
        [
            "git",
            "-C",
            str(work),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@a.test",
            "commit",
            "-q",
            "--allow-empty",
            "-m",
            "one",
        ],
        ["git", "clone", "-q", "--bare", str(work), str(bare)],
        ["git", "-C", str(bare), "update-server-info"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().split(" port ")[1].split(" ")[0])
        box = make_box([local("git.test", port)])
        done = box.run("git", "clone", "-q", "http://git.test/bare.git", str(tmp_path / "clone"))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "clone" / ".git" / "HEAD").exists()
    finally:
        server.kill()
        server.wait()


WEBSOCKET = """
import asyncio, sys, websockets
async def main():
    async with websockets.connect(sys.argv[1], max_size=None, additional_headers={"x-key": "LAYER_SECRET_KEY"}) as ws:
        await ws.send("hello"); print(await ws.recv())
        await ws.send("x" * 300000); print(len(await ws.recv()))
        await ws.send("headers?"); print(await ws.recv())
asyncio.run(main())
"""


@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_websocket(make_box: MakeBox, servers: Servers, scheme: str) -> None:
    box = make_box([local("api.test", getattr(servers, scheme))])
    done = box.run(sys.executable, "-c", WEBSOCKET, f"{scheme}://api.test/socket")
    assert done.stdout.startswith("hello\n300000\n"), done.stderr
    [event] = box.events(protocol="ws")
    assert event["status"] == 101 and event["up"] > 300 and event["path"] == "/socket"


def test_a_websocket_no_rule_allows(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("api.test", servers.ws, path="/other")])
    done = box.run(sys.executable, "-c", WEBSOCKET, "ws://api.test/socket")
    assert "403" in done.stderr and box.events(protocol="http")[0]["verdict"] == "deny"


def test_responses_stream(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.http)])
    code = """
import time, urllib.request
r = urllib.request.urlopen("http://index.test/stream"); at = []
while line := r.readline(): at.append((line, time.monotonic()))
print([line for line, _ in at], at[-1][1] - at[0][1] > 0.05)"""
    assert box.python(code) == "[b'one\\n', b'two\\n', b'three\\n'] True"


def test_requests_stream_in_bounded_memory(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.https)])
    code = """
import http.client, ssl
c = http.client.HTTPSConnection("index.test")
c.request("POST", "/length", body=(b"x" * 65536 for _ in range(160)), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
print(c.getresponse().read().decode())"""
    process = Path(f"/proc/{box.gateway.process.pid}/status")

    def resident() -> int:
        return int(next(line for line in process.read_text().splitlines() if line.startswith("VmRSS")).split()[1])

    box.curl("https://index.test/")
    before = resident()
    assert box.python(code) == str(10 << 20)
    assert resident() - before < 6000  # kB, of 10 MB that passed


def test_an_early_answer_to_a_large_body(make_box: MakeBox, servers: Servers, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 3_000_000)
    box = make_box([local("index.test", servers.http)])
    assert box.curl("-H", "Expect:", "--data-binary", f"@{tmp_path}/big", "http://index.test/early") == (413, "large")


def test_expect_100(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.http)])
    assert box.curl("-H", "Expect: 100-continue", "-d", "hello", "http://index.test/length") == (200, "5")
    assert "expect" not in dict(servers.seen[-1]["headers"])


def test_keep_alive_uses_one_connection_each_way(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.https)])
    before = servers.accepted
    done = box.run("curl", "-sS", "--http1.1", *(["https://index.test/x", "-o", "/dev/null"] * 5))
    assert done.returncode == 0, done.stderr
    assert servers.accepted - before == 1


def test_a_refusal_says_what_no_rule_allows(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("api.test", servers.h2, path="/v1/*", method="GET")])
    assert box.curl("https://api.test/v2/x?key=1") == (403, "no egress rule allows GET https://api.test/v2/x\n")
    assert box.curl("--http1.1", "-X", "DELETE", "https://api.test/v1/x") == (
        403,
        "no egress rule allows DELETE https://api.test/v1/x\n",
    )
    assert box.curl("http://93.184.216.34/") == (403, "no egress rule allows GET http://93.184.216.34/\n")
    assert box.curl("https://93.184.216.34/") == (403, "no egress rule allows GET https://93.184.216.34/\n")
    assert box.curl("-d", "x" * 100000, "http://93.184.216.34/")[0] == 403
    assert len(box.events(5, verdict="deny")) == 5
    assert box.curl("https://other.test/")[1].startswith("curl: (6)")
    [event] = box.events(protocol="dns", host="other.test", verdict="deny")[:1]
    assert event["reason"] == "no egress rule names other.test"


def test_failures_of_the_server_are_told(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([
        local("bad.good.test", servers.untrusted), local("dead.good.test", 1), local("api.test", servers.banner),
        {"host": "gone.invalid"}, local("wrong.test", servers.https),
    ])  # fmt: skip
    status, text = box.curl("https://bad.good.test/")
    assert status == 502 and "certificate of bad.good.test is not trusted" in text
    assert box.curl("https://wrong.test/")[0] == 502
    assert box.curl("http://dead.good.test/") == (502, "dead.good.test:1 can't be reached: Connection refused\n")
    assert box.curl("http://api.test/") == (502, "api.test broke off before its response\n")
    assert box.curl("http://gone.invalid/")[0] == 502
    assert {event["verdict"] for event in box.events(5, status=502)} == {"allow"}


def test_a_budget_of_bytes(make_box: MakeBox, servers: Servers) -> None:
    rule = local("index.test", servers.http, bytes="100K")
    box = make_box([rule])
    assert box.curl("http://index.test/bytes/50000")[0] == 200
    assert box.run("curl", "-sS", "http://index.test/bytes/90000").returncode != 0  # cut off
    status, text = box.curl("http://index.test/x")
    assert status == 403 and "102400 bytes of egress rule" in text
    box.rules([rule, local("other.test", servers.http)])
    assert box.curl("http://index.test/x")[0] == 403  # spent stays spent
    assert box.close()["used"] == {json.dumps(rule, separators=(",", ":")): 102400}
    box.open([rule], used={json.dumps(rule, separators=(",", ":")): 102300})
    assert box.run("curl", "-sS", "-d", "x" * 5000, "http://index.test/length").returncode == 0
    assert box.events(
        reason="the 102400 bytes of egress rule " + json.dumps(rule, separators=(",", ":")) + " are spent"
    )


def test_a_budget_stops_an_upload(make_box: MakeBox, servers: Servers, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 3_000_000)
    box = make_box([local("index.test", servers.h2, bytes=100_000)])
    seen = len(servers.seen)
    for version in ("--http1.1", "--http2"):
        box.run("curl", "-sS", version, "--data-binary", f"@{tmp_path}/big", "https://index.test/length")
    assert len(servers.seen) == seen  # neither arrived whole
    assert sum(event["up"] for event in box.events(2, method="POST")) <= 100_000


def test_a_rate(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.http, rate="2/h")])
    done = box.run("curl", "-sS", "-w", "%{http_code} ", *(["http://index.test/x", "-o", "/dev/null"] * 3))
    assert done.stdout == "200 200 429 "
    assert box.events(status=429)[0]["verdict"] == "deny"


def test_rules_change_under_open_connections(make_box: MakeBox, servers: Servers) -> None:
    rule, tcp = local("api.test", servers.ws), local("db.test", servers.echo, protocol="tcp", port=5432)
    box = make_box([rule, tcp])
    code = """
import asyncio, socket, websockets
async def main():
    raw = socket.create_connection(("db.test", 5432)); raw.sendall(b"x"); raw.recv(1)
    async with websockets.connect("ws://api.test/") as ws:
        await ws.send("a"); await ws.recv(); print("open", flush=True)
        try: await asyncio.wait_for(ws.recv(), 8); print("data")
        except websockets.ConnectionClosed: print("closed", flush=True)
    raw.settimeout(8)
    try: print("raw", raw.recv(1))
    except ConnectionError: print("raw reset", flush=True)
asyncio.run(main())"""
    with box.popen(sys.executable, "-c", code) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        box.rules([rule, tcp, local("new.test", servers.http)])
        assert box.curl("http://new.test/x")[0] == 200
        box.rules([])
        assert process.stdout.read() == "closed\nraw reset\n"
    assert {event["protocol"] for event in box.events(2, reason="the rules changed")} == {"ws", "tcp"}
    assert box.curl("http://new.test/")[0] == 0


def test_a_stream_ends_when_its_rule_goes(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.h2)])
    code = "import httpx; c = httpx.Client(http2=True); print(c.get('https://index.test/x').status_code, flush=True); input(); print(c.get('https://index.test/x').status_code)"
    with box.popen(sys.executable, "-c", code, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "200\n"
        box.rules(["other.test"])
        assert process.communicate("\n", timeout=10)[0] == "403\n"


def test_many_boxes_do_not_see_each_other(make_box: MakeBox, servers: Servers) -> None:
    one, two = make_box([local("index.test", servers.http)]), make_box([local("other.test", servers.http)])
    assert one.curl("http://index.test/")[0] == 200 and two.curl("http://other.test/")[0] == 200
    assert one.curl("http://other.test/")[0] == 0 and two.curl("http://index.test/")[0] == 0


def test_an_address_known_before_a_restart_still_works(
    own_gateway: Callable[..., Any], servers: Servers, tmp_path: Path
) -> None:
    first = own_gateway()
    box = Box(first, [local("*.good.test", servers.http)])
    address = box.python("import socket; print(socket.gethostbyname('a.good.test'))")
    first.process.kill()
    first.process.wait()
    box.gateway = own_gateway()
    box.open([local("*.good.test", servers.http)])
    assert box.curl("--resolve", f"a.good.test:80:{address}", "http://a.good.test/x")[0] == 200
    assert box.curl("--resolve", f"b.good.test:80:{address}", "http://b.good.test/x")[0] == 403
    until(lambda: box.events(2, protocol="http"))
    box.drop()
