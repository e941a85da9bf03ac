"""Questions are answered here or not at all."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livinglayer.sandbox.egress import dns


def query(name: str, kind: int = 1, *, flags: int = 0x0100, count: int = 1, space: int = 1) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode("latin-1") for part in name.split(".") if part)
    return struct.pack(">HHHHHH", 7, flags, count, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, space)


def answered(packet: bytes) -> tuple[int, list[str]]:
    """Response code and addresses."""
    _, flags, _, count, _, _ = struct.unpack_from(">HHHHHH", packet)
    return flags & 15, [".".join(map(str, packet[-4:]))] if count else []


def test_an_allowed_name_gets_an_address_of_its_own() -> None:
    book = dns.Book(100)
    found = dns.respond(query("Good.Test"), lambda name: name == "good.test", book)
    assert found is not None
    code, [address] = answered(found[1])
    assert (code, book.name(address), found[2]) == (0, "good.test", True)
    assert address.startswith(("198.18.", "198.19."))


@pytest.mark.parametrize("kind", [28, 65, 64, 16, 15, 12, 255])
def test_other_kinds_are_empty(kind: int) -> None:
    found = dns.respond(query("good.test", kind), lambda _: True, dns.Book(10))
    assert found is not None and answered(found[1]) == (0, [])


@pytest.mark.parametrize(
    "name", ["evil.test", "good.test.evil.test", "1.2.3.4", "0x7f.1", "a b.test", "a\0b.test", "", "x.test\n"]
)
def test_what_no_rule_names_does_not_exist(name: str) -> None:
    found = dns.respond(query(name), lambda name: name == "good.test", dns.Book(10))
    assert found is not None and answered(found[1]) == (3, []) and found[2] is False


def test_a_dot_within_a_label_makes_no_other_name() -> None:
    packet = struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0) + b"\x09good.test\0" + struct.pack(">HH", 1, 1)
    found = dns.respond(packet, lambda _: True, dns.Book(10))
    assert found is not None and answered(found[1]) == (3, [])


@pytest.mark.parametrize(
    "packet",
    [
        b"", b"x", query("a.test")[:-1], query("a.test", flags=0x8100), query("a.test", flags=0x2800), query("a.test", count=2), query("a.test", count=0),
        query("a.test", space=3), query("a.test")[:12] + b"\xc0\x0c\0\x01\0\x01", query("a.test")[:12] + b"\x3fa", query("a.test") + b"x" * 5000,
        query("a.test")[:12] + b"\x01a" * 140 + b"\0\0\x01\0\x01",
    ],
)  # fmt: skip
def test_what_is_no_question_gets_no_answer(packet: bytes) -> None:
    assert dns.respond(packet, lambda _: True, dns.Book(10)) is None


@given(st.binary(max_size=80))
def test_no_packet_breaks_it(packet: bytes) -> None:
    dns.respond(packet, lambda _: True, dns.Book(3))
    dns.respond(query("a.test")[:12] + packet, lambda _: True, dns.Book(3))


def test_addresses_follow_from_names_and_the_oldest_are_forgotten() -> None:
    book, later = dns.Book(3), dns.Book(3)
    addresses = [book.address(f"h{i}.test") for i in range(4)]
    assert [book.name(one) for one in addresses] == [None, "h1.test", "h2.test", "h3.test"]
    assert later.address("h3.test") == addresses[3]
    assert dns.Book(3).adopt("h3.test", addresses[3]) and not dns.Book(3).adopt("h2.test", addresses[3])
    assert len(set(addresses)) == 4
