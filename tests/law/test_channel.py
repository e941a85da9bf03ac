"""The channel: whatever a box sends, it gets an answer that says what is wrong, and nothing it may not have."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from livinglayer import Layer
from livinglayer.law.bound import Bound
from livinglayer.law.channel import CONNECTIONS, Channel
from livinglayer.law.executions import Run
from livinglayer.law.openapi import ASKED, document
from livinglayer.substrate.schema import OWNER


class Served:
    """A channel on a loopback listener, driven by a thread as an execution drives its own."""

    def __init__(self, layer: Layer, **more: Any) -> None:
        self.layer = layer
        execution = layer.ledger.open(OWNER, {"entities": {"item": {"actions": ["insert", "update"]}}}, "function")
        execution.call = {"verb": "function.call"}
        layer.ledger.intend(execution)
        self.run = Run(layer, execution, reads={"item": {}}, **more)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.failures: list[BaseException] = []
        self.channel = Channel(listener, self.failures.append)
        self.channel.executions[self.run.token] = self.run
        self.over = False
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while not self.over:
            for fd, event in self.channel.poll.poll(20):
                self.channel.turn(fd, event)

    def ask(
        self, path: str, body: Any = None, method: str = "POST", token: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, f"/{token or self.run.token}{path}", data, headers)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read())
        connection.close()
        return found

    def raw(self, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            parts = []
            with contextlib.suppress(ConnectionResetError):  # it may hang up on what it has not read to the end
                while part := sock.recv(65536):
                    parts.append(part)
            return b"".join(parts)

    def close(self) -> None:
        self.over = True
        self.thread.join()
        self.channel.close()


@pytest.fixture
def served(layer: Layer) -> Iterator[Served]:
    layer.define("item", {"name": "text!", "qty": {"type": "int", "default": 0}, "price": "decimal", "at": "datetime"})
    layer.define("hidden", {"name": "text!"})
    layer.insert("item", {"name": "bolt", "qty": 3})
    made = Served(layer)
    yield made
    made.close()


def test_everything_there_is_answers(served: Served) -> None:
    assert served.ask("/query", {"sql": "select name from item"})[1]["rows"] == [{"name": "bolt"}]
    assert served.ask("/query", b"select name from item")[1]["rows"] == [{"name": "bolt"}]
    assert served.ask("/query?sql=select%20qty%20from%20item", method="GET")[1]["rows"] == [{"qty": 3}]
    status, made = served.ask(
        "/insert", {"entity": "item", "values": {"name": "nut", "price": "1.50", "at": "2026-01-31T12:00:00Z"}}
    )
    assert status == 200
    assert served.ask("/update", {"entity": "item", "id": made["id"], "values": {"qty": 4}}) == (200, {"ok": True})
    assert served.ask("/query", {"sql": "select qty, price, at from item where id = :id", "params": made})[1][
        "rows"
    ] == [{"qty": 4, "price": "1.50", "at": "2026-01-31T12:00:00+00:00"}]
    assert len(served.ask("/insert", {"entity": "item", "values": [{"name": "a"}, {"name": "b"}]})[1]["ids"]) == 2
    assert served.ask("/emit", {"name": "seen", "data": {"n": 1}}) == (200, {"ok": True})
    assert served.ask("/artifact/out/report.txt", b"\0\1\2" * 1000, method="PUT")[1]["bytes"] == 3000
    assert served.ask("/me", method="GET")[1]["reads"] == ["item"]
    assert served.ask("/openapi.json", method="GET")[1] == document()
    assert served.layer.query("select count(*) as n from item") == [{"n": 1}]  # a draft is nobody else's


def test_the_document_names_what_answers() -> None:
    answers = {f"/{name.removeprefix('_on_')}" for name in dir(Bound) if name.startswith("_on_")}
    assert answers == set(ASKED) | {"/artifact", "/me", "/agent"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/query", {"sql": "select * from hidden"}, 404),
        ("/query", {"sql": "select * from execution"}, 404),
        ("/query", {"sql": "delete from item"}, (400, 403)),
        ("/query", {"sql": 7}, 400),
        ("/query", {}, 400),
        ("/query", {"sql": "select 1", "params": "text"}, 400),
        ("/query", b"\xff\xfe", 400),
        ("/insert", {"entity": "hidden", "values": {"name": "x"}}, 403),
        ("/insert", {"entity": "permission", "values": {}}, 403),
        ("/insert", {"entity": "item", "values": 7}, 400),
        ("/insert", {"entity": "item", "values": {"name": None}}, 400),
        ("/insert", {"entity": "item", "values": {"nope": 1}}, 400),
        ("/insert", b"{", 400),
        ("/insert", b"[]", 400),
        ("/insert", b"[" * 100_000, 400),
        ("/update", {"entity": "item", "id": "x", "values": {}}, 400),
        ("/update", {"entity": "item", "id": 10**30, "values": {"qty": 1}}, 400),
        ("/update", {"entity": "item", "id": 1, "values": {"qty": 1}}, 404),
        ("/delete", {"entity": "item", "id": 1}, (403, 404)),
        ("/upsert", {"entity": "item", "values": {"name": "x"}, "on": "name"}, 400),
        ("/call", {"function": "row.insert", "arguments": {}}, 403),
        ("/secret", {"name": "stripe"}, (403, 404)),
        ("/artifact/../../etc/passwd", b"x", 400),
        ("/slice", {}, 404),
        ("/projection", {"name": "x"}, 404),
        ("/nowhere", {}, 404),
        ("/__class__", {}, 404),
        ("/answer", {}, 404),
        ("/", {}, 404),
        ("", {}, 404),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_clearly(served: Served, path: str, body: Any, status: Any) -> None:
    found, answer = served.ask(path, body)
    assert found in (status if isinstance(status, tuple) else (status,)), answer
    assert answer["error"]["code"] and answer["error"]["message"]
    assert served.failures == []


@pytest.mark.parametrize("token", ["x", "", "%00", "a" * 5000, "é", "..", "*"])
def test_another_token_opens_nothing(served: Served, token: str) -> None:
    answer = served.raw(f"GET /{token}/me HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.split(b" ")[1] in (b"403", b"400")
    assert served.run.token.encode() not in answer


def test_a_token_ends_with_its_execution(served: Served) -> None:
    del served.channel.executions[served.run.token]
    assert served.ask("/me", method="GET")[0] == 403
    served.channel.executions[served.run.token] = served.run
    served.run.open = False
    assert served.ask("/insert", {"entity": "item", "values": {"name": "late"}})[0] == 403


@pytest.mark.parametrize(
    "data",
    [b"\0" * 1000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /x HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"\x16\x03\x01" + b"x" * 100,
     b"POST /x HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
     b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 50_000 + b"\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_request_hurts_nobody(served: Served, data: bytes) -> None:
    served.raw(data)
    assert served.ask("/me", method="GET")[0] == 200 and served.failures == []


def test_slow_halves_and_crowds_do_not_keep_others_waiting(served: Served) -> None:
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(CONNECTIONS - 4)]
    for sock in idle:
        sock.sendall(f"POST /{served.run.token}/query HTTP/1.1\r\nContent-Length: 100\r\n\r\nsel".encode())
    assert served.ask("/me", method="GET")[0] == 200
    more = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(50)]
    for sock in idle + more:
        sock.close()
    for _ in range(100):
        try:
            assert served.ask("/me", method="GET")[0] == 200
            break
        except (OSError, http.client.HTTPException):
            select.select([], [], [], 0.02)
    else:
        raise AssertionError("the channel did not come back")


def test_requests_one_after_the_other_on_one_connection(served: Served) -> None:
    one = f"GET /{served.run.token}/me HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    assert served.raw(one * 20).count(b"HTTP/1.1 200 OK") == 20


def test_large_bodies_and_answers(served: Served) -> None:
    big = "x" * 900_000
    assert served.ask("/insert", {"entity": "item", "values": {"name": big}})[0] == 200
    assert served.ask("/query", {"sql": "select name from item order by id desc limit 1"})[1]["rows"] == [{"name": big}]
    head = f"POST /{served.run.token}/insert HTTP/1.1\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
    served.raw(head + b"x" * 1000)
    assert served.ask("/me", method="GET")[0] == 200
