"""The messages between host and gateway."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
from sandbox.egress.boxes import Box, Gateway, local
from sandbox.egress.servers import Servers


def test_it_says_when_it_is_ready(gateway: Gateway) -> None:
    assert gateway.ready == {"event": "ready", "ca": str(gateway.state / "egress" / "ca.pem")}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"do": "fly"}, "invalid"), ({}, "invalid"), ({"do": "open"}, "invalid"), ({"do": "open", "box": "x", "rules": []}, "invalid"),
        ({"do": "rules", "box": "nobody", "rules": []}, "not_found"), ({"do": "close", "box": "nobody"}, "not_found"),
    ],
)  # fmt: skip
def test_what_it_can_not_do(gateway: Gateway, message: dict[str, Any], error: str) -> None:
    answer, _ = gateway.ask(message)
    assert (answer["ok"], answer["error"]) == (False, error)


@pytest.mark.parametrize("rules", [["http://"], "pypi.test", [{"host": "a.test", "x": 1}], 5, None])
def test_rules_that_make_no_sense(make_box: Callable[..., Box], rules: Any) -> None:
    box = make_box([])
    answer, _ = box.gateway.ask({"do": "rules", "box": box.id, "rules": rules})
    assert (answer["ok"], answer["error"]) == (False, "invalid")


def test_rules_that_are_refused_change_nothing(make_box: Callable[..., Box], servers: Servers) -> None:
    box = make_box([local("index.test", servers.http)])
    assert not box.gateway.ask({"do": "rules", "box": box.id, "rules": ["x y"]})[0]["ok"]
    assert box.curl("http://index.test/")[0] == 200


def test_open_twice_is_a_conflict(make_box: Callable[..., Box]) -> None:
    box = make_box([])
    answer, _ = box.gateway.ask({"do": "open", "box": box.id, "rules": []}, [box.tcp, box.dns])
    assert answer["error"] == "conflict"


def test_opening_says_what_stands_for_each_secret(make_box: Callable[..., Box]) -> None:
    box = make_box([])
    box.close()
    answer, _ = box.gateway.ask(
        {"do": "open", "box": box.id, "rules": [], "secrets": {"KEY": "value-1"}}, [box.tcp, box.dns]
    )
    assert answer["placeholders"] == {"KEY": "LAYER_SECRET_KEY"}


def test_close_counts(make_box: Callable[..., Box], servers: Servers) -> None:
    box = make_box([local("index.test", servers.http)])
    box.curl("http://index.test/bytes/1000")
    answer = box.close()
    assert answer["ok"] and answer["down"] > 1000 and 20 < answer["up"] < 500 and answer["used"] == {}
    assert box.curl("-m", "1", "http://index.test/")[0] == 0


def test_no_fd_is_lost(own_gateway: Callable[..., Gateway], servers: Servers) -> None:
    running = own_gateway()

    def round_() -> None:
        box = Box(
            running, [local("index.test", servers.https), local("db.test", servers.echo, protocol="tcp", port=5432)]
        )
        box.curl("https://index.test/")
        box.curl("https://93.184.216.34/")
        box.python("import socket; s = socket.create_connection(('db.test', 5432)); s.send(b'x'); s.recv(1)")
        running.ask({"do": "open", "box": box.id, "rules": []}, [box.tcp, box.dns])
        running.ask({"do": "fly"}, [box.tcp])
        box.drop()

    def fds() -> list[str]:
        running.ask({"do": "fly"})
        place = f"/proc/{running.process.pid}/fd"
        return sorted(os.readlink(f"{place}/{fd}").split(":")[0] for fd in os.listdir(place))

    round_()
    before = fds()
    for _ in range(3):
        round_()
    assert fds() == before


def test_garbage_does_not_stop_it(gateway: Gateway) -> None:
    for junk in (b"x", b"[]", b"null", b'{"do": []}', b'"x"', b"\xff"):
        gateway.control.send(junk)
    socket.send_fds(gateway.control, [b"{}"], [0])
    assert gateway.ask({"do": "close", "box": "nobody"})[0]["error"] == "not_found"
