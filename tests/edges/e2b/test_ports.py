"""Exposed ports: HTTP and WebSocket to servers in boxes, by name and by header; nothing of ours goes in, nothing of theirs acts on us."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from edges.serving import Server
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

DOCS = Path(__file__).parents[3] / "docs"
SERVER = Path(__file__).with_name("port_server.py").read_text()


@pytest.fixture(scope="module")
def box(server: Server) -> Iterator[Sandbox]:
    box = Sandbox.create(timeout=300, **options(server))
    start(box)
    yield box
    box.kill()


def options(server: Server) -> dict[str, str]:
    given = server.e2b()
    return {"api_url": given["E2B_API_URL"], "sandbox_url": given["E2B_SANDBOX_URL"], "api_key": given["E2B_API_KEY"]}


def start(box: Sandbox, port: int = 8000, *more: str) -> None:
    """A server in the box that tells what it was asked."""
    box.files.write("server.py", SERVER)
    box.commands.run(f"python3 -u server.py {port} {' '.join(more)} > log{port} 2>&1", background=True)
    box.commands.run(
        f"for i in $(seq 100); do grep -q ready log{port} && exit; sleep 0.05; done; cat log{port}; exit 1"
    )


def client(server: Server, box: Sandbox, port: int = 8000, **more: object) -> httpx.Client:
    """A client of a port by its name, which leads here."""
    headers = {"Host": f"{port}-{box.sandbox_id}.{server.told['domain']}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=30, **more)  # type: ignore[arg-type]


def raw(server: Server, box: Sandbox, data: bytes) -> bytes:
    """What the server says to bytes that no client would send."""
    host = f"8000-{box.sandbox_id}.{server.told['domain']}".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data.replace(b"HOST", host))
        found = b""
        while not found.endswith(b"}") and (more := connection.recv(65536)):
            found += more
        return found


def test_a_request_by_name_reaches_the_port_and_tells_where_it_came_from(server: Server, box: Sandbox) -> None:
    with client(server, box) as http:
        told = http.post("/a%2Fb/c?x=1&y=%20", content=b"hello", headers={"X-Mine": "1"}).json()
    domain = server.told["domain"]
    assert (told["method"], told["target"], told["body"]) == ("POST", "/a%2Fb/c?x=1&y=%20", "hello")
    headers = told["headers"]
    assert headers["host"] == f"8000-{box.sandbox_id}.{domain}" == box.get_host(8000)
    assert (headers["x-mine"], headers["x-forwarded-proto"], headers["x-forwarded-for"]) == ("1", "http", "127.0.0.1")
    assert headers["x-forwarded-host"] == box.get_host(8000)


def test_a_request_by_headers_reaches_it_too(server: Server, box: Sandbox) -> None:
    asked = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "8000"}
    told = httpx.get(f"{server.url}/here", headers=asked).json()
    assert told["target"] == "/here"
    assert told["headers"]["host"] == box.get_host(8000)
    assert not {"e2b-sandbox-id", "e2b-sandbox-port"} & set(told["headers"])


def test_what_proves_somebody_to_us_does_not_go_in(server: Server, box: Sandbox) -> None:
    given = {
        "Authorization": f"Bearer {server.token()}",
        "X-API-Key": server.key(),
        "X-Access-Token": box._envd_access_token or "",
        "Cookie": "layer_session=session_abc; theirs=1; __Host-layer_session=x",
        "Forwarded": "for=1.2.3.4",
        "X-Forwarded-For": "1.2.3.4",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
    }
    with client(server, box) as http:
        told = http.get("/", headers=given).json()["headers"]
        theirs = http.get("/", headers={"Authorization": "Bearer of-the-app", "X-API-Key": "k"}).json()["headers"]
    assert told["cookie"] == "theirs=1"
    assert told["x-forwarded-for"] == "127.0.0.1"
    assert not {"authorization", "x-api-key", "x-access-token", "forwarded", "x-hop", "te"} & set(told)
    assert (theirs["authorization"], theirs["x-api-key"]) == ("Bearer of-the-app", "k")


def test_answers_act_on_the_box_alone(server: Server, box: Sandbox) -> None:
    with client(server, box) as http:
        headers = http.get("/cookies").headers
    assert headers.get_list("set-cookie") == ["a=1; Path=/; HttpOnly", "b=2"]
    assert not {"clear-site-data", "alt-svc", "keep-alive", "x-hop"} & set(headers)
    assert (headers["x-app"], len(headers.get_list("date"))) == ("yes", 1)


@pytest.mark.parametrize("size", [0, 1, 8 << 20])
def test_bodies_go_both_ways_with_a_length_and_in_chunks(server: Server, box: Sandbox, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    digest = hashlib.sha256(content).hexdigest()
    with client(server, box) as http:
        assert http.post("/digest", content=content).text == digest
        pieces = (content[at : at + 70_000] for at in range(0, size, 70_000))
        assert http.post("/digest", content=pieces).text == digest
        for how in ("length", "chunked", "close"):
            assert hashlib.sha256(http.post(f"/echo?{how}", content=content).content).hexdigest() == digest, how


def test_head_errors_and_early_answers_are_the_boxs_own(server: Server, box: Sandbox) -> None:
    with client(server, box) as http:
        head = http.head("/echo")
        assert (head.status_code, head.headers["content-length"], head.content) == (200, "7", b"")
        assert http.get("/status?418").status_code == 418
        assert http.get("/status?204").content == b""
        assert http.get("/status?304").status_code == 304
        assert http.post("/early", content=(b"x" * 65536 for _ in range(64))).status_code == 413


def test_events_come_as_they_happen_and_hanging_up_is_told(server: Server, box: Sandbox) -> None:
    with client(server, box) as http:
        with http.stream("GET", "/events") as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            lines = answer.iter_lines()
            assert next(lines) == "data: 0"
            assert http.get("/release").text == "ok"  # only now the second event is sent
            assert [next(lines), next(lines)] == ["", "data: 1"]
        for _ in range(100):
            if http.get("/left").text == "1":
                break
            time.sleep(0.05)
        else:
            pytest.fail("the server in the box was not told that its reader had left")


def test_what_could_be_read_in_two_ways_is_refused(server: Server, box: Sandbox) -> None:
    both = b"POST /digest HTTP/1.1\r\nHost: HOST\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: HOST\r\n\r\n"
    odd = b"POST /digest HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"
    twice = b"POST /digest HTTP/1.1\r\nHost: HOST\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde"
    chunk = b"POST /digest HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n"
    with client(server, box) as http:
        for request in (both, odd, twice, chunk):
            said = raw(server, box, request)
            assert said == b"" or said.startswith(b"HTTP/1.1 400"), (request, said)
            assert b"smuggled" not in said
        assert "smuggled" not in http.get("/seen").text


def test_a_server_that_speaks_no_http_is_a_502(server: Server, box: Sandbox) -> None:
    with client(server, box) as http:
        for how in ("nonsense", "nothing", "both", "status"):
            answer = http.get(f"/broken?{how}")
            assert (answer.status_code, answer.json()["code"]) == (502, 502), how
        with pytest.raises(httpx.RemoteProtocolError):
            http.get("/broken?half")


def test_a_closed_port_and_a_box_that_is_not_there_are_a_502(server: Server, box: Sandbox) -> None:
    with client(server, box, 9999) as http:
        answer = http.get("/")
    assert answer.status_code == 502
    assert answer.json() == {
        "code": 502,
        "message": "The sandbox is running but port is not open",
        "port": 9999,
        "sandboxId": box.sandbox_id,
    }
    for host in ("8000-nobody", "0-" + box.sandbox_id, "70000-" + box.sandbox_id):
        answer = httpx.get(server.url, headers={"Host": f"{host}.{server.told['domain']}"})
        assert answer.status_code in (400, 502), host
        assert answer.json()["code"] == answer.status_code


def test_private_ports_are_asked_with_the_traffic_token_and_hosts_are_masked(server: Server) -> None:
    network = {"allow_public_traffic": False, "mask_request_host": "localhost:${PORT}", "https_ports": [8443]}
    box = Sandbox.create(timeout=120, network=network, **options(server))  # type: ignore[arg-type]
    try:
        start(box)
        start(box, 8443, "tls")
        token = {"e2b-traffic-access-token": box.traffic_access_token or ""}
        with client(server, box) as http:
            assert http.get("/").status_code == 403
            assert http.get("/", headers={"e2b-traffic-access-token": "wrong"}).json()["code"] == 403
            told = http.get("/", headers=token).json()["headers"]
            assert (told["host"], told["x-forwarded-host"]) == ("localhost:8000", box.get_host(8000))
            assert "e2b-traffic-access-token" not in told
        with client(server, box, 8443) as http:
            assert http.get("/", headers=token).json()["headers"]["host"] == "localhost:8443"
            assert http.post("/echo?length", content=b"y" * 300_000, headers=token).content == b"y" * 300_000
        with pytest.raises(InvalidStatus, match="403"):
            websocket(server, box, "/ws")
    finally:
        box.kill()


def websocket(server: Server, box: Sandbox, path: str, **more: object):  # type: ignore[no-untyped-def]
    host = f"8000-{box.sandbox_id}.{server.told['domain']}"
    place = socket.create_connection(("127.0.0.1", server.port))
    return connect(f"ws://{host}{path}", sock=place, max_size=None, compression=None, **more)  # type: ignore[arg-type]


def test_websockets_carry_text_bytes_pings_and_closes(server: Server, box: Sandbox) -> None:
    with websocket(server, box, "/ws?q=1", subprotocols=["other", "mine"]) as found:
        assert found.subprotocol == "mine"
        told = json.loads(found.recv())
        assert (told["target"], told["headers"]["host"]) == ("/ws?q=1", box.get_host(8000))
        for message in ("hé", b"\0\xff", "", "x" * 300_000, b"y" * 2_000_000):
            found.send(message)
            assert found.recv() == message
        found.send("parts")  # thousands of which hold nothing
        assert found.recv() == "ab"
        found.send("close 4321")
        with pytest.raises(ConnectionClosed) as closed:
            found.recv()
        assert closed.value.rcvd is not None and (closed.value.rcvd.code, closed.value.rcvd.reason) == (4321, "bye")
    with websocket(server, box, "/ws") as found:
        found.recv()
        found.close(4001)
    with client(server, box) as http:
        for _ in range(100):
            if "4001" in http.get("/closed").text:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the server in the box was not told of the close")
    with pytest.raises(InvalidStatus) as refused:
        websocket(server, box, "/none")
    assert refused.value.response.status_code == 404


def test_a_request_wakes_a_box_that_resumes_by_itself(server: Server) -> None:
    given = {"lifecycle": {"on_timeout": "pause", "auto_resume": True}}
    box = Sandbox.create(timeout=120, **given, **options(server))  # type: ignore[arg-type]
    try:
        start(box)
        with client(server, box) as http:
            assert http.get("/release").text == "ok"
            box.pause()
            assert http.get("/release").text == "ok"  # the same server: its memory was kept
        assert box.get_info().state.value == "running"
    finally:
        box.kill()


def test_what_is_open_ends_with_the_box(server: Server) -> None:
    box = Sandbox.create(timeout=120, **options(server))  # type: ignore[arg-type]
    start(box)
    with client(server, box) as http, http.stream("GET", "/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: 0"
        box.kill()
        with pytest.raises(httpx.HTTPError):
            list(lines)
        gone = http.get("/")
    assert gone.status_code == 502
    assert "was not found" in gone.json()["message"]


@pytest.mark.parametrize("page", ["ports.md", "e2b.md"])
def test_what_the_pages_show_works(server: Server, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.e2b().items():
        monkeypatch.setenv(name, value)
    blocks = re.findall(r"^```python e2b\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert blocks
    for code in blocks:
        exec(compile(code, page, "exec"), {})


def test_a_page_of_a_box_cannot_ask_us(server: Server, box: Sandbox) -> None:
    origin = {"Origin": f"http://{box.get_host(8000)}", "Cookie": "layer_session=whatever"}
    for path in ("/api/query", "/sandboxes", "/"):
        assert httpx.post(server.url + path, headers=origin).status_code == 403, path
    asked = {**origin, "E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "8000"}
    assert httpx.get(server.url, headers=asked).status_code == 403


BROKEN = """
import socket, sys
answers = {
    b"/short": b"HTTP/1.1 200 OK\\r\\nContent-Length: 100\\r\\n\\r\\nhalf",
    b"/chunks": b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n5\\r\\nha",
    b"/unchanged": b"HTTP/1.1 304 Not Modified\\r\\nContent-Length: 100\\r\\n\\r\\n",
    b"/nothing": b"HTTP/1.1 204 No Content\\r\\nContent-Length: 100\\r\\n\\r\\n",
    b"/signs": b"HTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\nX-Odd: a\\x01b\\x7f\\r\\n\\r\\nwell",
}
with socket.create_server(("0.0.0.0", 8123)) as server:
    while True:
        line = server.accept()[0]
        path = line.recv(65536).split()[1]
        line.sendall(answers[path])
        line.close()
"""


def test_an_answer_that_ends_too_early_is_a_line_in_the_log_once_in_a_while(server: Server) -> None:
    box = Sandbox.create(timeout=120, **options(server))  # of which nothing was told yet
    box.files.write("/tmp/broken.py", BROKEN)
    box.commands.run("python3 /tmp/broken.py", background=True)
    with client(server, box, 8123) as asking:
        deadline = time.monotonic() + 20
        while asking.get("/unchanged").status_code == 502 and time.monotonic() < deadline:
            time.sleep(0.1)
        before = len(server.log)
        for path in ("/short", "/chunks"):
            for _ in range(3):
                with pytest.raises(httpx.RemoteProtocolError):
                    asking.get(path)
        answers = [asking.get(path).status_code for path in ("/unchanged", "/nothing", "/signs")]
        said = server.log[before:]
    assert answers == [304, 204, 502]
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1 and f"an answer of box {box.sandbox_id} broke off" in said
    box.kill()
