"""Connections that are not HTTP the gateway reads: raw TCP by rule, TLS passed through, and its hello."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox.egress.boxes import Box, local
from sandbox.egress.servers import Servers

from livinglayer.errors import Invalid
from livinglayer.sandbox.egress import tls

MakeBox = Callable[..., Box]


def test_raw_tcp_by_rule(make_box: MakeBox, servers: Servers) -> None:
    box = make_box(
        [
            local("db.test", servers.echo, protocol="tcp", port=5432),
            local("mail.test", servers.banner, protocol="tcp", port=25),
        ]
    )
    code = """
import socket
s = socket.create_connection(("db.test", 5432), 5)
sent = b"x" * 1000000
import threading; threading.Thread(target=lambda: (s.sendall(sent), s.shutdown(socket.SHUT_WR))).start()
got = 0
while data := s.recv(65536): got += len(data)
print(got, socket.create_connection(("mail.test", 25), 5).recv(99))
for host, port in (("db.test", 5433), ("mail.test", 5432)):
    try: print(socket.create_connection((host, port), 5).recv(9))
    except ConnectionResetError: print("reset")"""
    assert box.python(code) == "1000000 b'220 hello\\r\\n'\nreset\nreset"
    [event] = box.events(protocol="tcp", host="db.test", verdict="allow")
    assert (event["port"], event["up"], event["down"], event["method"]) == (5432, 1000000, 1000000, None)
    assert len(box.events(2, protocol="tcp", verdict="deny")) == 2


def test_raw_tcp_has_budgets_and_rates(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("db.test", servers.echo, protocol="tcp", port=5432, bytes=1000, rate="2/h")])
    code = """
import socket
for size in (400, 400, 400):
    got = 0
    try:
        s = socket.create_connection(("db.test", 5432), 5)
        s.sendall(b"x" * size); s.shutdown(socket.SHUT_WR)
        while data := s.recv(65536): got += len(data)
        print(got)
    except ConnectionResetError: print("reset")"""
    assert box.python(code) == "400\nreset\nreset"


def test_tls_passed_through(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("good.test", servers.https, tls="pass")])
    # the server's own certificate arrives, not one of the gateway's
    assert box.curl("--cacert", str(servers.ca), "https://good.test/x") == (200, "GET /x")
    assert box.curl("https://good.test/x")[0] == 0
    assert box.curl("http://good.test/")[0] == 403
    event = box.events(host="good.test", protocol="https", verdict="allow")[0]
    assert event["method"] is None and event["up"] > 100
    reached = servers.accepted
    for args in (
        ["--connect-to", "other.test:443:good.test:443", "https://other.test/"],
        ["--connect-to", "93.184.216.34:443:good.test:443", "https://93.184.216.34/"],
    ):
        assert box.curl("--cacert", str(servers.ca), *args)[0] == 0
    assert servers.accepted == reached
    reasons = {event["reason"] for event in box.events(2, verdict="deny", protocol="https")}
    assert reasons == {
        "the TLS connection to good.test names other.test",
        "the TLS connection to good.test names no host",
    }


def test_a_box_that_does_not_trust_the_gateway_is_told_apart(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("good.test", servers.https)])
    box.curl("--cacert", str(servers.ca), "https://good.test/")
    assert "does not trust" in box.events(protocol="https", verdict="deny")[0]["reason"]


def test_old_tls_is_refused(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("good.test", servers.https)])
    assert box.curl("--tls-max", "1.1", "--ciphers", "DEFAULT@SECLEVEL=0", "https://good.test/")[0] == 0


def hello(name: str | None) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


HELLO = hello("good.test")


def test_the_name_in_a_hello() -> None:
    whole = hello("Good.test")
    assert tls.server_name(whole) == (True, "good.test")
    assert tls.server_name(hello(None)) == (True, None)
    assert all(tls.server_name(whole[:size]) == (False, None) for size in range(len(whole)))
    body = whole[5:]
    spread = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2) + part for part in (body[:50], body[50:]))
    assert tls.server_name(spread) == (True, "good.test")


@given(st.data())
def test_no_hello_breaks_it(data: st.DataObject) -> None:
    whole = bytearray(HELLO)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, name = tls.server_name(bytes(whole))
    except Invalid:
        return
    assert name is None or isinstance(name, str)


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x00\x00", b"\x16\x03\x01\xff\xff" + b"x" * 70000]
)
def test_what_is_no_hello(junk: bytes) -> None:
    with pytest.raises(Invalid):
        tls.server_name(junk)


def test_the_authority(tmp_path: Any) -> None:
    first = tls.Authority(tmp_path / "egress")
    assert (tmp_path / "egress" / "ca.key").stat().st_mode & 0o777 == 0o600
    pem = first.certificate.read_text()
    assert tls.Authority(tmp_path / "egress").certificate.read_text() == pem  # boxes go on trusting it
    assert first.server("good.test") is first.server("good.test")
    assert [path.name for path in (tmp_path / "egress").iterdir() if path.name.startswith("leaf")] == []
