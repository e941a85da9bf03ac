"""DNS for a box, answered here: allowed names get an address of the box's own, all others do not exist.

No question ever leaves the host, so none can carry data out. A question is twelve bytes and one name: read here in
a few lines, a DNS library would bring a hundred record types that are never spoken.
"""

from __future__ import annotations

import hashlib
import ipaddress
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from livinglayer.errors import Invalid
from livinglayer.sandbox.egress import names

FAKE = ipaddress.ip_network("198.18.0.0/15")
RESOLVER = "198.18.0.1"  # what /etc/resolv.conf of a box names
_FIRST, _COUNT = int(FAKE.network_address) + 256, FAKE.num_addresses - 512
_TTL = 60
A, IN = 1, 1
NO_ERROR, NO_NAME = 0, 3


@dataclass(frozen=True)
class Question:
    """The one question of a query; `raw` is how it was asked, to be repeated in the answer."""

    id: int
    recursion: bool
    name: str | None  # None: no host name, though well formed DNS
    kind: int
    raw: bytes


def question(packet: bytes) -> Question | None:
    """The question of a well-formed query; None for all that is not one, which gets no answer."""
    if not 17 <= len(packet) <= 4096:
        return None
    ident, flags, questions = struct.unpack_from(">HHH", packet)
    if flags & 0xF800 or questions != 1:  # a response, or another operation than a query
        return None
    at, labels = 12, []
    while True:
        if at >= len(packet):
            return None
        length = packet[at]
        at += 1
        if length == 0:
            break
        if length > 63 or at + length > len(packet) or at - 12 > 254:  # pointers have no place in a question
            return None
        labels.append(packet[at : at + length])
        at += length
    if at + 4 > len(packet):
        return None
    kind, space = struct.unpack_from(">HH", packet, at)
    if space != IN:
        return None
    name = None
    if labels and not any(b"." in label for label in labels):
        try:
            name = names.host(b".".join(labels))
        except Invalid:
            pass
    return Question(ident, bool(flags & 0x0100), name, kind, packet[12 : at + 4])


def answer(asked: Question, address: str | None, code: int = NO_ERROR) -> bytes:
    """A response with one address, or with none."""
    flags = 0x8480 | (0x0100 if asked.recursion else 0) | code
    packet = struct.pack(">HHHHHH", asked.id, flags, 1, 1 if address else 0, 0, 0) + asked.raw
    if address:
        packet += struct.pack(">HHHIH", 0xC00C, A, IN, _TTL, 4) + ipaddress.IPv4Address(address).packed
    return packet


def respond(packet: bytes, allowed: Callable[[str], bool], book: Book) -> tuple[Question, bytes, bool] | None:
    """The response to a packet and whether the name is allowed; None if the packet deserves no answer."""
    asked = question(packet)
    if asked is None:
        return None
    if asked.name is None or names.is_address(asked.name) or not allowed(asked.name):
        return asked, answer(asked, None, NO_NAME), False
    # No AAAA: a box has no IPv6. The other kinds are empty too, so that no client learns of other ports or keys.
    return asked, answer(asked, book.address(asked.name) if asked.kind == A else None), True


class Book:
    """Which address of 198.18.0.0/15 stands for which name in one box.

    An address follows from the name, so that a program which kept one across a restart of the gateway is still understood.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._names: OrderedDict[str, str] = OrderedDict()
        self._addresses: dict[str, str] = {}

    @staticmethod
    def natural(name: str) -> int:
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) % _COUNT

    def address(self, name: str) -> str:
        """The address of a name, given on first use."""
        if name in self._addresses:
            self._names.move_to_end(self._addresses[name])
            return self._addresses[name]
        if len(self._names) >= self.size:
            _, forgotten = self._names.popitem(last=False)
            del self._addresses[forgotten]
        slot = self.natural(name)
        while (address := str(ipaddress.IPv4Address(_FIRST + slot))) in self._names:
            slot = (slot + 1) % _COUNT
        self._names[address], self._addresses[name] = name, address
        return address

    def adopt(self, name: str, address: str) -> bool:
        """Take an address met before it was asked for, if it is the one the name would get."""
        if name not in self._addresses and address == str(ipaddress.IPv4Address(_FIRST + self.natural(name))):
            return self.address(name) == address
        return False

    def name(self, address: str) -> str | None:
        """The name an address stands for."""
        return self._names.get(address)
