"""Which addresses are dialed."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

import pytest

from livinglayer.errors import Denied, Unavailable
from livinglayer.sandbox.egress import dial, rules

REFUSED = (
    "127.0.0.1 127.255.0.1 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 169.254.170.1 100.64.0.1 0.0.0.0 0.1.2.3 "
    "192.0.0.8 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 168.63.129.16 ::1 :: fe80::1 "
    "fc00::1 fd00:ec2::254 fec0::1 ff02::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::ffff:10.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe "
    "2002:7f00:1:: 2001:0:7f00:1:: 2001:db8::1 100::1"
).split()


@pytest.mark.parametrize("address", REFUSED)
def test_what_is_not_public_is_refused(address: str) -> None:
    assert dial.refusal(ipaddress.ip_address(address), private=False)


@pytest.mark.parametrize("address", ["93.184.216.34", "1.1.1.1", "2606:2800:220:1::1", "::ffff:93.184.216.34"])
def test_what_is_public_is_dialed(address: str) -> None:
    assert dial.refusal(ipaddress.ip_address(address), private=False) is None


@pytest.mark.parametrize("address", ["224.0.0.1", "0.0.0.0", "255.255.255.255", "::", "ff02::1", "::ffff:0.0.0.0"])
def test_private_does_not_mean_everyone(address: str) -> None:
    assert dial.refusal(ipaddress.ip_address(address), private=True)
    assert dial.refusal(ipaddress.ip_address("10.0.0.1"), private=True) is None


def answers(monkeypatch: pytest.MonkeyPatch, *rounds: list[str]) -> list[str]:
    """A resolver that says something else each time; the list gets what it was asked."""
    asked: list[str] = []

    def resolver(name: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(name)
        return [(2, 1, 6, "", (address, 0)) for address in rounds[min(len(asked), len(rounds)) - 1]]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    return asked


def test_a_name_is_resolved_once_and_that_address_dialed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, ["93.184.216.34"], ["127.0.0.1"])
    dialed = []

    async def connected(self: Any, sock: socket.socket, address: Any) -> None:
        dialed.append(address)
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", connected)
    [rule] = rules.parse(["rebind.test"])
    with pytest.raises(Unavailable):
        asyncio.run(dial.connect("rebind.test", 80, rule, 5))
    assert (asked, dialed) == (["rebind.test"], [("93.184.216.34", 80)])


def test_of_mixed_answers_only_the_public_ones_are_dialed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ["169.254.169.254", "93.184.216.34", "10.0.0.1"])
    [rule] = rules.parse(["mixed.test"])
    assert asyncio.run(dial.addresses("mixed.test", rule, 5)) == [ipaddress.ip_address("93.184.216.34")]


def test_a_name_with_private_addresses_alone_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ["169.254.169.254"])
    [rule] = rules.parse(["metadata.test"])
    with pytest.raises(Denied, match="link-local"):
        asyncio.run(dial.addresses("metadata.test", rule, 5))


def test_the_machines_own_address_is_internal(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    answers(monkeypatch, ["127.0.0.1"])
    monkeypatch.setattr(dial, "refusal", lambda *_: None)  # as if 127.0.0.1 were this machine's public address
    [rule] = rules.parse(["own.test"])
    with server, pytest.raises(Denied, match="own address"):
        asyncio.run(dial.connect("own.test", server.getsockname()[1], rule, 5))
