"""Bridging: a box reaches the port of another by name where a rule says so, through the gateway, and nothing else of it."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.hosts import Host, wait_until

from livinglayer.errors import Invalid
from livinglayer.sandbox.client import blocking_client, run_blocking
from livinglayer.sandbox.egress.rules import Ask, decide, names_allowed, parse
from livinglayer.sandbox.sandbox import Sandbox

SERVER = """
import http.server, threading, socketserver, sys
class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = (sys.argv[1] + " " + self.path + " " + self.headers["host"]).encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(b"hello\\n")
        while data := self.request.recv(65536): self.request.sendall(data)
socketserver.ThreadingTCPServer.allow_reuse_address = True
echo = socketserver.ThreadingTCPServer(("127.0.0.1", 5432), Echo)
threading.Thread(target=echo.serve_forever, daemon=True).start()
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Page).serve_forever()
"""
CONNECT = (
    "import socket, sys\ns = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)\nf = s.makefile('rwb')\n"
)
HOLD = CONNECT + (
    "f.readline(); print('open', flush=True)\ntry: print('end', s.recv(1))\nexcept OSError as e: print('cut', e)"
)


@pytest.fixture
def boxes(host: Host, use: Callable[[Host], Host]) -> Iterator[Callable[..., Any]]:
    """Boxes of a test; `serves=True`: with a page on 8080 and an echo on 5432."""
    use(host)
    made: list[Any] = []

    def make(serves: bool = False, **more: Any) -> Any:
        box = Sandbox.create(memory="128M", disk="64M", **more)
        made.append(box)
        if serves:
            box.files.write("/tmp/serve.py", SERVER)
            box.start(["python3", "/tmp/serve.py", box.name or box.id])
            wait_until(lambda: listens(box, 8080), "it serves")
        return box

    yield make
    for box in made:
        box.kill()


def sockets(box: Any, port: int, state: str) -> int:
    """How many of a port there are in the box: 0A of those that listen, 01 of connections."""
    lines = [line.split() for line in box.run(["cat", "/proc/net/tcp"]).stdout.text.splitlines()[1:]]
    return sum(1 for line in lines if line[1].endswith(f":{port:04X}") and line[3] == state)


def listens(box: Any, port: int) -> bool:
    return sockets(box, port, "0A") > 0


def get(box: Any, url: str, *more: str) -> tuple[int, str]:
    """Status and body; 0 and what curl says when there is no answer."""
    done = box.run(["curl", "-sS", "-m", "20", "-w", "\n%{http_code}", *more, url])
    body, _, status = done.stdout.text.rpartition("\n")
    return int(status or 0), body or done.stderr.text


def network(box: Any, **fields: Any) -> list[dict[str, Any]]:
    return [e for e in box.trace() if e["event"] == "network" and all(e.get(k) == v for k, v in fields.items())]


def test_a_rule_for_a_box_is_read_and_nothing_else_speaks_of_boxes() -> None:
    rules = parse([{"box": "db", "port": 5432, "protocol": "tcp"}, {"box": "ben/web", "port": [80, 8080]}, "*"])
    for ask, allowed in (
        (Ask("tcp", "db.box.internal", 5432), True),
        (Ask("tcp", "db.box.internal", 5433), False),
        (Ask("http", "web.ben.box.internal", 8080, "GET", "/"), True),
        (Ask("http", "web.box.internal", 8080, "GET", "/"), False),
        (Ask("http", "other.box.internal", 80, "GET", "/"), False),  # whatever `*` is, it is no box
        (Ask("https", "example.test", 443, "GET", "/"), True),
    ):
        assert (decide(rules, ask) is not None) is allowed, ask
    assert not names_allowed(rules, "other.box.internal") and names_allowed(rules, "db.box.internal")
    for wrong in (
        {"box": "db"}, {"box": "DB", "port": 1}, {"box": "a.b", "port": 1}, {"box": "../db", "port": 1}, {"box": 7, "port": 1}, {"box": "db", "port": 1, "at": "b1"},
        {"box": "db", "port": 1, "host": "x.test"}, {"box": "db", "port": 1, "resolve": "10.0.0.1"}, {"box": "db", "port": 1, "private": True},
        {"box": "db", "port": 1, "secrets": ["K"]}, {"box": "db", "port": 443, "protocol": "https"}, {"box": "db", "port": 0},
        "http://db.box.internal:80", "*.box.internal", {"host": "DB.Box.Internal.", "port": 80},
    ):  # fmt: skip
        with pytest.raises(Invalid):
            parse([wrong])


def test_a_box_reaches_the_page_and_the_port_of_another(boxes: Callable[..., Any]) -> None:
    web = boxes(serves=True, name="web")
    rules = [{"box": "web", "port": 8080}, {"box": "web", "port": 5432, "protocol": "tcp"}]
    box = boxes(name="asks", egress=rules)
    assert get(box, "http://web.box.internal:8080/hello?x=1") == (200, "web /hello?x=1 web.box.internal:8080")
    said = CONNECT + "print(f.readline())\nf.write(b'x' * 300000 + b'\\n'); f.flush()\nprint(len(f.readline()))"
    assert box.run(["python3", "-c", said, "web.box.internal", "5432"]).stdout.text == "b'hello\\n'\n300001\n"
    half = CONNECT + "f.readline(); s.sendall(b'abc'); s.shutdown(socket.SHUT_WR); print(f.read())"
    assert box.run(["python3", "-c", half, "web.box.internal", "5432"]).stdout.text == "b'abc'\n"
    # Both know of it: who asked by request, who was asked by connection.
    [asked] = network(box, host="web.box.internal", protocol="http")
    assert (asked["path"], asked["status"], asked["verdict"], asked["to"]) == ("/hello", 200, "allow", "web")
    assert [e["down"] for e in network(box, protocol="tcp", host="web.box.internal")] == [300007, 9]
    wait_until(lambda: len(network(web, protocol="bridge", origin=box.id)) == 3, "all are told")
    counts = {(e["port"], e["received"]): e["sent"] for e in network(web, protocol="bridge", name="asks")}
    assert counts[5432, 300001] == 300007 and counts[5432, 3] == 9 and len(counts) == 3


def test_what_is_not_granted_is_not_reached(boxes: Callable[..., Any]) -> None:
    boxes(serves=True, name="web")
    boxes(serves=True, name="other", labels={"layer": "another"})
    box = boxes(name="asks", egress=["*", {"box": "web", "port": 8080, "path": "/a*"}, {"box": "other", "port": 8080}, {"box": "none", "port": 8080}])  # fmt: skip
    assert get(box, "http://web.box.internal:8080/a")[0] == 200
    assert get(box, "http://web.box.internal:8080/b")[0] == 403
    assert get(box, "http://web.box.internal:5432/a")[0] == 403  # another port of it
    assert get(box, "http://other.box.internal:8080/") == (502, "there is no box 'other'\n")  # another tenant's
    assert get(box, "http://none.box.internal:8080/") == (502, "there is no box 'none'\n")
    assert "resolve" in get(box, "http://asks.box.internal:8080/")[1]  # no rule: no name
    assert "resolve" in get(box, "http://web.box/")[1]
    # A Host header does not lead elsewhere, nor does a name that was resolved for another.
    status, said = get(box, "http://web.box.internal:8080/a", "-H", "Host: other.box.internal:8080")
    assert status == 403 and "the connection goes to web.box.internal:8080" in said
    status, said = get(box, "http://other.box.internal:8080/a", "--connect-to", "::web.box.internal:8080")
    assert status == 403 and "the connection goes to web" in said
    status, _ = get(box, "http://web.box.internal:8080/a", "--resolve", "web.box.internal:8080:127.0.0.1")
    assert status == 0  # its own loopback is its own
    # Addresses of the gateway are none of its ports, in whichever box.
    for port in (7700, 7701, 7702):
        box.set_egress([{"box": "web", "port": port, "protocol": "tcp"}])
        done = box.run(["python3", "-c", CONNECT + "print(f.read(1))", "web.box.internal", str(port)])
        assert "reset" in done.stderr.text, done
        assert network(box, port=port, protocol="tcp")[-1]["reason"] == "'connect': Connection refused"


def test_a_box_of_a_layer_reaches_only_what_its_law_has_decided(boxes: Callable[..., Any]) -> None:
    mine = {"layer": "one"}
    web = boxes(serves=True, name="web", labels=mine)
    foreign = boxes(serves=True, name="foreign", labels={"layer": "two"})
    free = boxes(serves=True, name="free")
    rules = [{"box": "web", "port": 8080}, {"box": "web", "port": 5432, "protocol": "tcp"}]
    box = boxes(name="asks", labels=mine, egress=rules)
    status, said = get(box, "http://web.box.internal:8080/")
    assert status == 403 and "no permission lets this box connect to box 'web'" in said

    def reach(boxes: dict[str, str]) -> None:
        run_blocking(blocking_client().call({"do": "reach", "box": box.id, "boxes": boxes}))

    for id, status in ((web.id, 200), (foreign.id, 502), (free.id, 502), ("web", 502), ("", 502), ("b-none", 502)):
        reach({"web": id})
        assert get(box, "http://web.box.internal:8080/")[0] == status, id
    reach({"web": web.id})
    held = box.start(["python3", "-c", HOLD, "web.box.internal", "5432"])
    wait_until(lambda: sockets(web, 5432, "01") == 1, "it is open")
    reach({"web": foreign.id})  # decided otherwise: what is open ends
    assert "open\n" in held.wait().stdout.text
    wait_until(lambda: sockets(web, 5432, "01") == 0, "its program was told")
    [asked] = network(box, protocol="http", status=200)
    assert (asked["to"], asked["peer"]) == ("web", web.id)


def test_other_rules_cut_what_is_open_and_an_end_of_either_box_does(boxes: Callable[..., Any]) -> None:
    web = boxes(serves=True, name="web")
    rule = {"box": "web", "port": 5432, "protocol": "tcp"}
    box = boxes(name="asks", egress=[rule])

    def open_one() -> Any:
        command = box.start(["python3", "-c", HOLD, "web.box.internal", "5432"])
        wait_until(lambda: sockets(web, 5432, "01") == 1, "it is open")
        return command

    first = open_one()
    box.set_egress([])
    assert "cut" in first.wait().stdout.text
    wait_until(lambda: sockets(web, 5432, "01") == 0, "its program was told")
    box.set_egress([rule])
    second = open_one()
    web.kill()
    assert second.wait().exit_code == 0
    assert get(box, "http://web.box.internal:5432/")[0] == 0


@pytest.mark.parametrize("rest", ["pause", "suspend"])
def test_a_connection_wakes_a_box_that_stands_still(boxes: Callable[..., Any], rest: str) -> None:
    web = boxes(serves=True, name="web")
    box = boxes(name="asks", egress=[{"box": "web", "port": 8080}])
    getattr(web, rest)()
    status, said = get(box, "http://web.box.internal:8080/up")
    if rest == "pause":
        assert (status, said) == (200, "web /up web.box.internal:8080")
    else:  # at this tier its programs ended: it is awake, and nothing listens
        assert status == 502 and "refused" in said
    assert web.info()["state"] == "running"


def test_a_loop_of_boxes_ends_at_the_limit_of_connections(boxes: Callable[..., Any]) -> None:
    forward = """
import socketserver, socket, threading
class Hop(socketserver.BaseRequestHandler):
    def handle(self):
        on = socket.create_connection(("loop.box.internal", 9000), 20)
        on.sendall(self.request.recv(16)); self.request.sendall(on.recv(16))
socketserver.ThreadingTCPServer(("127.0.0.1", 9000), Hop).serve_forever()
"""
    box = boxes(name="loop", egress=[{"box": "loop", "port": 9000, "protocol": "tcp", "rate": "40/h"}])
    box.files.write("/tmp/hop.py", forward)
    box.start(["python3", "/tmp/hop.py"])
    wait_until(lambda: listens(box, 9000), "it serves")
    done = box.run(["python3", "-c", CONNECT + "s.sendall(b'x')\nprint(s.recv(9))", "loop.box.internal", "9000"])
    assert done.exit_code == 0 or "reset" in done.stderr.text
    wait_until(
        lambda: len(network(box, host="loop.box.internal", protocol="tcp", verdict="allow")) == 40, "all have ended"
    )
    assert network(box, host="loop.box.internal", protocol="tcp", verdict="deny")


def test_a_websocket_passes(boxes: Callable[..., Any]) -> None:
    web = boxes(name="web")
    serve = """
import socket, base64, hashlib
listener = socket.create_server(("127.0.0.1", 8080))
while True:
    s, _ = listener.accept(); head = b""
    while b"\\r\\n\\r\\n" not in head:
        more = s.recv(4096)
        if not more: break
        head += more
    if b"key: " not in head.lower(): s.close(); continue
    key = [l.split(b": ")[1] for l in head.split(b"\\r\\n") if l.lower().startswith(b"sec-websocket-key")][0]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    s.sendall(b"HTTP/1.1 101 Switching\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
    s.sendall(b"\\x81\\x02hi"); s.recv(100); s.close()
"""
    web.files.write("/tmp/ws.py", serve)
    web.start(["python3", "/tmp/ws.py"])
    wait_until(lambda: listens(web, 8080), "it serves")
    box = boxes(name="asks", egress=[{"box": "web", "port": 8080}])
    ask = CONNECT + (
        "s.sendall(b'GET /ws HTTP/1.1\\r\\nHost: web.box.internal:8080\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
        "Sec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\\r\\n\\r\\n')\n"
        "line = f.readline()\nwhile f.readline() != b'\\r\\n': pass\nprint(line, f.read(4))"
    )
    done = box.run(["python3", "-c", ask, "web.box.internal", "8080"])
    assert "101" in done.stdout.text and "hi" in done.stdout.text, done
    wait_until(lambda: network(box, protocol="ws"), "it is told")
    assert network(box, protocol="ws")[0]["path"] == "/ws"


def test_an_exposed_port_wakes_a_suspended_box(boxes: Callable[..., Any]) -> None:
    web = boxes(serves=True, name="web")
    address = web.expose(8080)
    web.suspend()
    with socket.create_connection(address, 20) as peer:
        assert peer.recv(1) == b""  # at this tier its programs ended: nothing listens
    assert web.info()["state"] == "running"


def test_what_builds_an_image_reaches_no_box(boxes: Callable[..., Any]) -> None:
    boxes(serves=True, name="web")
    ask = "curl -s -m 10 http://web.box.internal:8080/ && exit 1 || exit 0"
    made = boxes(packages=[{"run": ask}], egress=[{"box": "web", "port": 8080}], name="asks")
    assert get(made, "http://web.box.internal:8080/x")[0] == 200  # the box itself does


def test_bridges_are_there_again_after_the_host_or_the_gateway_died(own_host: Host) -> None:
    mine = {"layer": "one"}
    web = Sandbox.create(name="web", memory="128M", disk="64M", labels=mine)
    web.files.write("/tmp/serve.py", SERVER)
    web.start(["python3", "/tmp/serve.py", "web"])
    labels = {**mine, "reaches": json.dumps({"web": web.id})}
    box = Sandbox.create(name="asks", memory="128M", disk="64M", labels=labels, egress=[{"box": "web", "port": 8080}])
    wait_until(lambda: get(box, "http://web.box.internal:8080/")[0] == 200, "it serves")
    gateway = next(child for child in children(own_host.pid) if "livinglayer.sandbox.egress" in command_of(child))
    os.kill(gateway, signal.SIGKILL)
    wait_until(lambda: get(box, "http://web.box.internal:8080/")[0] == 200, "another gateway is there")
    own_host.crash()
    own_host.hang_up()
    box, web = Sandbox.connect("asks"), Sandbox.connect("web")
    wait_until(lambda: get(box, "http://web.box.internal:8080/")[0] == 200, "another host is there")
    box.kill()
    web.kill()


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.torture
@pytest.mark.parametrize("tier", ["container", "gvisor", "microvm"])
def test_at_every_tier_both_ways_and_out_of_sleep(host: Host, use: Callable[[Host], Host], tier: str) -> None:
    use(host)
    strong = Sandbox.create(
        tier=tier, name="strong", memory="256M", disk="256M", egress=[{"box": "plain", "port": 8080}]
    )
    plain = Sandbox.create(name="plain", memory="128M", disk="64M", egress=[{"box": "strong", "port": 8080}])
    for box in (strong, plain):
        box.files.write("/tmp/serve.py", SERVER)
        box.start(["python3", "/tmp/serve.py", str(box.name)])
    ask = "import urllib.request as u; print(u.urlopen('http://plain.box.internal:8080/x', timeout=30).read().decode())"
    wait_until(lambda: get(plain, "http://strong.box.internal:8080/")[0] == 200, "it serves", 60)
    assert strong.run(["python3", "-c", ask]).stdout.text == "plain /x plain.box.internal:8080\n"
    strong.pause()
    assert get(plain, "http://strong.box.internal:8080/")[0] == 200
    kept = strong.suspend()["memory"]
    assert get(plain, "http://strong.box.internal:8080/")[0] == (200 if kept else 502)
    for box in (strong, plain):
        box.kill()
