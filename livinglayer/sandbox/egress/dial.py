"""Dialing out: a host is resolved once, its addresses are checked, and one of those very addresses is connected to."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import os
import socket
from typing import TYPE_CHECKING

from livinglayer.errors import Denied, LayerError, TimedOut, Unavailable

if TYPE_CHECKING:
    from livinglayer.sandbox.egress.rules import Rule

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# Beyond what `is_global` knows: addresses that carry another address, and a cloud's own agent on a public one.
_ALSO_PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8 100.64.0.0/10 168.63.129.16/32 192.0.0.0/24 192.88.99.0/24 198.18.0.0/15 "
        "64:ff9b::/96 64:ff9b:1::/48 100::/64 2001::/23 2002::/16 3fff::/20 5f00::/16 fc00::/7 fe80::/10 fec0::/10"
    ).split()
)
_resolvers = concurrent.futures.ThreadPoolExecutor(16, thread_name_prefix="resolve")


def literal(text: str) -> Address | None:
    """An address in its plain spelling; None for names and for octal, hexadecimal or short forms."""
    try:
        return ipaddress.ip_address(text) if "%" not in text else None
    except ValueError:
        return None


def refusal(address: Address, private: bool) -> str | None:
    """Why this address may not be dialed, or None."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_multicast or address.is_unspecified or address == ipaddress.IPv4Address("255.255.255.255"):
        return "no single host has it"
    if private:
        return None
    if address.is_loopback:
        return "it is a loopback address"
    if address.is_link_local:
        return "it is a link-local address"
    if not address.is_global or address.is_reserved:
        return "it is a private or reserved address"
    if any(address.version == net.version and address in net for net in _ALSO_PRIVATE):
        return "it is a private or reserved address"
    return None


def _excluded(address: Address, rule: Rule) -> str | None:
    """Why a rule that leaves networks out does not allow this address, or None."""
    if not rule.without:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:  # it may well be the same machine's
            return "the rule leaves networks out, and speaks of IPv4 only"
        address = address.ipv4_mapped
    return "the rule leaves it out" if any(address in net for net in rule.without) else None


async def addresses(host: str, rule: Rule, seconds: float) -> list[Address]:
    """What a host resolves to now, without what the rule does not permit; Denied when nothing is left."""
    if rule.resolve is not None:
        found: list[Address] = [ipaddress.ip_address(rule.resolve[0])]
    elif (plain := literal(host)) is not None:
        found = [plain]
    else:
        loop = asyncio.get_running_loop()
        asked = loop.run_in_executor(
            _resolvers, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        )
        try:
            answer = await asyncio.wait_for(asked, seconds)
        except TimeoutError:
            raise TimedOut(f"{host!r} was not resolved in {seconds:g} s") from None
        except (OSError, UnicodeError):
            raise Unavailable(f"{host!r} does not resolve") from None
        found = list(dict.fromkeys(ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in answer))
    reasons = {address: refusal(address, rule.private) or _excluded(address, rule) for address in found}
    allowed = [address for address, reason in reasons.items() if reason is None]
    if not allowed:
        address, reason = next(iter(reasons.items()), (None, "it has no address"))
        raise Denied(
            f"{host!r} is at {address}, which is refused: {reason}",
            hint='a rule with "private": true allows such addresses',
        )
    return allowed


async def connect(host: str, port: int, rule: Rule, seconds: float) -> socket.socket:
    """A connected socket to a host, by addresses checked under the rule."""
    if rule.resolve is not None and rule.resolve[1] is not None:
        port = rule.resolve[1]
    loop = asyncio.get_running_loop()
    failed: LayerError = Unavailable(f"{host!r} has no address")
    for address in (await addresses(host, rule, seconds))[:4]:
        sock = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(loop.sock_connect(sock, (str(address), port)), seconds)
            if not rule.private and sock.getsockname()[0] == sock.getpeername()[0]:
                # The host's own public address: what listens there is as internal as loopback.
                raise Denied(f"{host!r} is at {address}, which is this machine's own address")
            return sock
        except TimeoutError:
            failed = TimedOut(f"{host}:{port} did not answer in {seconds:g} s")
        except OSError as error:
            failed = Unavailable(f"{host}:{port} can't be reached: {os.strerror(error.errno or 0)}")
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise failed
