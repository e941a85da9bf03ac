"""A namespace leads nowhere but to the gateway, and leaves a box its own loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from sandbox.egress.boxes import Box, local, until
from sandbox.egress.servers import Servers

from livinglayer.errors import Unavailable
from livinglayer.sandbox.egress import netns

MakeBox = Callable[..., Box]

OWN = """
import http.server, socket, threading, urllib.request
for port in (80, 443):
    for host in ("127.0.0.1", "0.0.0.0"):
        server = http.server.ThreadingHTTPServer((host, port), http.server.BaseHTTPRequestHandler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        for name in ("127.0.0.1", "localhost", "127.9.9.9") if host == "0.0.0.0" else ("127.0.0.1",):
            try: urllib.request.urlopen(f"http://{name}:{port}/")
            except urllib.error.HTTPError as e: assert e.code == 501, e
        server.shutdown(); server.server_close()
six = socket.create_server(("::1", 9000), family=socket.AF_INET6)
socket.create_connection(("::1", 9000))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(("127.0.0.1", 9001))
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9001)); assert udp.recv(9) == b"x"
print("ok")
"""


def test_a_box_serves_itself(make_box: MakeBox) -> None:
    box = make_box([])
    assert box.python(OWN) == "ok"
    assert not [event for event in box.gateway.events if event["box"] == box.id]


def test_a_user_of_the_box_may_serve_low_ports(make_box: MakeBox) -> None:
    code = "import os, socket; os.setuid(65534); socket.create_server(('0.0.0.0', 80)); print('ok')"
    assert make_box([]).python(code) == "ok"


def test_the_channel_is_the_hosts(make_box: MakeBox) -> None:
    box = make_box([])
    listener = socket.socket(fileno=os.dup(box.channel))
    listener.setblocking(True)
    with (
        listener,
        box.popen(
            sys.executable, "-c", "import socket; print(socket.create_connection(('169.254.170.1', 7700)).recv(9))"
        ) as process,
    ):
        connection, _ = listener.accept()
        connection.sendall(b"hello")
        connection.close()
        assert process.communicate(timeout=10)[0] == "b'hello'\n"


@pytest.mark.parametrize("server", ["198.18.0.1", "8.8.8.8", "127.0.0.1", "127.0.0.53", "10.0.2.3"])
def test_dns_is_answered_at_any_address(make_box: MakeBox, servers: Servers, server: str) -> None:
    box = make_box([local("index.test", servers.http)])
    code = f"""
import socket, struct
def ask(name, kind=socket.SOCK_DGRAM):
    q = struct.pack(">HHHHHH", 9, 256, 1, 0, 0, 0) + b"".join(bytes([len(p)]) + p.encode() for p in name.split(".")) + b"\\0\\0\\1\\0\\1"
    s = socket.socket(socket.AF_INET, kind); s.settimeout(5); s.connect(("{server}", 53))
    if kind == socket.SOCK_DGRAM: s.send(q); r = s.recv(512)
    else: s.sendall(struct.pack(">H", len(q)) + q); r = s.recv(512)[2:]
    return r[3] & 15, r[-4:-2] if r[7] else b""
print(ask("index.test"), ask("evil.test"), {"ask('index.test', socket.SOCK_STREAM)" if not server.startswith("127") else "0"})"""
    answer = box.python(code)
    assert answer.startswith("(0, b'\\xc6\\x1") and "(3, b'')" in answer


def test_leaving_a_namespace_behind_leaks_nothing() -> None:
    def fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    home = os.readlink("/proc/thread-self/ns/net")
    netns.make().close()
    before = fds()
    for _ in range(20):
        netns.make().close()
    assert fds() == before and os.readlink("/proc/thread-self/ns/net") == home


def test_without_nftables_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise OSError("no such file")

    monkeypatch.setattr(netns.ctypes, "CDLL", missing)
    with pytest.raises(Unavailable, match="libnftables"):
        netns.make()


def test_without_the_right_it_is_unavailable() -> None:
    code = """
import os
from livinglayer.sandbox.egress import netns
from livinglayer.errors import Unavailable
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try: netns.make()
except Unavailable as e: print(e, e.hint)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stdout == "can't make a network namespace: Operation not permitted the gateway needs to be root\n", (
        done.stderr
    )


def test_a_pool_is_refilled(gateway: Any) -> None:
    took = []
    for _ in range(6):
        began = time.perf_counter()
        answer, fds = gateway.ask({"do": "network"})
        took.append(time.perf_counter() - began)
        assert answer["ok"] and len(fds) == 4
        for fd in fds:
            os.close(fd)
        time.sleep(0.05)
    assert min(took) < 0.01


def test_namespaces_go_when_nobody_holds_them(make_box: MakeBox) -> None:
    box = make_box([])
    inode = os.fstat(box.netns).st_ino
    process = box.popen("sleep", "30")
    until(lambda: os.stat(f"/proc/{process.pid}/ns/net").st_ino == inode)
    process.kill()
    process.communicate()
    box.drop()

    def held() -> bool:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{pid}/ns/net").st_ino == inode:
                    return True
            except OSError:
                pass
        return False

    assert not held()
    gateway_fds = f"/proc/{box.gateway.process.pid}/fd"
    until(lambda: not [fd for fd in os.listdir(gateway_fds) if os.stat(f"{gateway_fds}/{fd}").st_ino == inode])
