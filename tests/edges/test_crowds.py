"""Many clients at once: idle ones, slow ones, and those that vanish cost the others nothing and leave nothing behind."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from edges.serving import Server


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def threads(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/task"))


def connected(server: Server, stack: ExitStack, data: bytes = b"") -> socket.socket:
    made = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
    if data:
        made.sendall(data)
    return made


def query(server: Server, sql: str) -> bytes:
    body = json.dumps({"sql": sql}).encode()
    head = f"POST /api/query HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.token()}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextmanager
def many_files(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], count), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def works(server: Server) -> None:
    headers = {"authorization": f"Bearer {server.token()}"}
    answer = httpx.post(f"{server.url}/api/query", json={"sql": "select 1 as n"}, headers=headers, timeout=30)
    assert answer.json()["rows"] == [{"n": 1}]


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.torture)])
def test_idle_connections_cost_no_thread_and_are_let_go(server: Server, count: int) -> None:
    works(server)
    files, running = descriptors(server), threads(server)
    with many_files(count + 1000), ExitStack() as stack:
        for n in range(count):
            connected(
                server, stack, b"" if n % 2 else b"GET /healthz HTTP/1.1\r\nHost: loc"
            )  # half of them in mid-header
        works(server)
        assert descriptors(server) >= files + count * 0.9
        assert threads(server) <= running + 4
    _until(lambda: descriptors(server) <= files + 5)
    works(server)


def test_slow_senders_and_readers_do_not_hold_the_others_up(server: Server) -> None:
    server.layer.define("wide", {"text": "text"})
    server.layer.insert("wide", [{"text": "x" * 1000} for _ in range(500)])
    running = threads(server)
    with ExitStack() as stack:
        whole = query(server, "select * from wide")
        readers = [connected(server, stack, whole) for _ in range(100)]  # half a megabyte each that nobody reads
        senders = [connected(server, stack, whole[:-10]) for _ in range(100)]
        for _ in range(20):
            works(server)
        assert threads(server) <= running + 32
        for one in senders:
            one.sendall(whole[-10:])
        for one in senders[:3] + readers[:3]:
            assert one.recv(15).startswith(b"HTTP/1.1 200")
    works(server)


def test_clients_that_vanish_leave_nothing(server: Server) -> None:
    works(server)
    files = descriptors(server)
    for n in range(100):
        with ExitStack() as stack:
            one = connected(server, stack, query(server, "select 1 as n")[: 20 + 3 * n])
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # cut off, not closed
    _until(lambda: descriptors(server) <= files + 5)
    works(server)
    assert "Traceback" not in server.log, Path(server.home, "server.log").read_text()[-2000:]


def _until(done: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)
