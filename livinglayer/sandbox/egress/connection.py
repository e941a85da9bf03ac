"""One connection of a box, from its first byte: where it wants to go, what it speaks, and who takes it from there."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import ssl
import struct

from livinglayer.errors import Denied, Invalid, LayerError
from livinglayer.sandbox.egress import dns, h1, h2, names, rules, tls
from livinglayer.sandbox.egress.box import Box, Passage
from livinglayer.sandbox.egress.complaint import complain
from livinglayer.sandbox.egress.http import Gone, Site
from livinglayer.sandbox.egress.rules import Ask, Rule
from livinglayer.sandbox.egress.streams import Streams, accepted, cut, dialed, peek, reset, tunnel

_SO_ORIGINAL_DST = 80
_METHOD = re.compile(rb"[A-Za-z-]{1,24} ")
_METHOD_BEGUN = re.compile(rb"[A-Za-z-]{0,24}\Z")
_PREFACE = b"PRI * HTTP/2.0\r\n"
_PATIENCE = 0.3  # seconds for the first byte where no rule could allow anything: to tell an HTTP client why


def destination(sock: socket.socket) -> tuple[str, int]:
    """Where the box wanted to connect to, before the redirect."""
    port, address = struct.unpack_from(">2xH4s", sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16))
    return socket.inet_ntoa(address), port


class Connection:
    """Takes an accepted socket to its end."""

    def __init__(self, box: Box, authority: tls.Authority, sock: socket.socket) -> None:
        self.box, self.authority, self.sock = box, authority, sock
        self._writer: asyncio.StreamWriter | None = None
        self._taken = False

    async def run(self) -> None:
        """Serve the connection; whatever goes wrong ends it."""
        try:
            self.sock.setblocking(False)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address, port = destination(self.sock)
            host: str | None = address
            if ipaddress.IPv4Address(address) in dns.FAKE:
                host = self.box.book.name(address)
            if address == dns.RESOLVER or (
                port == 53 and rules.first_at(self.box.rules, host or address, port) is None
            ):
                await self._own(address, port)
            else:
                await self._towards(host, address, port)
        except (OSError, ssl.SSLError, Gone, TimeoutError, LayerError):
            pass
        except Exception as error:
            complain(error)
            self._reset()
        finally:
            if not self._taken:
                reset(self.sock)

    def _reset(self) -> None:
        """End the connection as refused, whether it is still a socket or a stream by now."""
        if self._writer is not None:
            cut(self._writer)
        elif not self._taken:
            reset(self.sock)

    async def refuse(self, reason: str) -> None:
        """Reset the connection unread."""
        with contextlib.suppress(OSError):
            address, port = destination(self.sock)
            passage = Passage(self.box, "tcp", Ask("tcp", self.box.book.name(address) or address, port))
            passage.reason = reason
            reset(self.sock)
            await passage.end()

    async def _first(self, seconds: float) -> bytes:
        def enough(data: bytes) -> bool:
            return not _METHOD_BEGUN.match(data) and (not data.startswith(b"PRI ") or len(data) >= len(_PREFACE))

        try:
            async with asyncio.timeout(seconds):
                return await peek(self.sock, enough)
        except TimeoutError:
            return b""

    async def _towards(self, host: str | None, address: str, port: int) -> None:
        rule = rules.first_at(self.box.rules, host or address, port)
        if rule is not None and rule.protocols == {"tcp"}:
            await self._raw(Ask("tcp", host or address, port), "tcp")
            return
        known = rule is not None or host is None
        first = await self._first(self.box.limits.head_seconds if known else _PATIENCE)
        if first[:1] == b"\x16":
            await self._tls(rule, host, address, port)
        elif first.startswith(_PREFACE):
            site = Site(self.box, "http", host, address, port, None)
            await h2.serve(site, await self._stream(None))
        elif _METHOD.match(first):
            if first.startswith(b"CONNECT "):
                await self._refuse_proxy(host or address, port)
            else:
                await h1.serve(Site(self.box, "http", host, address, port, None), await self._stream(None))
        else:
            await self._deny("tcp", Ask("tcp", host or address, port))

    async def _stream(self, context: ssl.SSLContext | None) -> Streams:
        self._taken = True  # closed with the stream from here on
        reader, self._writer = await accepted(self.sock, context, self.box.limits.head_seconds)
        return reader, self._writer

    async def _deny(self, protocol: str, ask: Ask, reason: str | None = None) -> None:
        passage = Passage(self.box, protocol, ask)
        try:
            passage.allow(lambda: None)
            passage.verdict, passage.reason = "deny", reason or f"{ask} is none of the protocols its rules allow"
        except LayerError as error:
            found = error.details.get("rule")
            passage.rule = found if isinstance(found, Rule) else None
            passage.reason = reason or error.message
        self._reset()
        await passage.end()

    async def _tls(self, rule: Rule | None, host: str | None, address: str, port: int) -> None:
        if rule is not None and rule.tls == "pass" and rule.action == "allow":
            await self._pass(host or address, port)
            return
        try:
            reader, writer = await self._stream(self.authority.server(host or address))
        except (OSError, ssl.SSLError) as error:
            reason = "the box does not trust the gateway's certificate, or ended its TLS handshake"
            if isinstance(error, ssl.SSLError) and "ALERT" not in (error.reason or ""):
                reason = f"TLS handshake: {error.reason}"
            passage = Passage(self.box, "https", Ask("https", host or address, port))
            passage.reason = reason
            await passage.end()
            return
        secured = writer.get_extra_info("ssl_object")
        site = Site(self.box, "https", host, address, port, secured.context.host)
        if secured.selected_alpn_protocol() == "h2":
            await h2.serve(site, (reader, writer))
        else:
            await h1.serve(site, (reader, writer))

    async def _pass(self, host: str, port: int) -> None:
        """TLS the gateway does not open: the name in its hello must be the destination's."""
        ask = Ask("https", host, port)
        try:
            async with asyncio.timeout(self.box.limits.head_seconds):
                hello = await peek(self.sock, lambda data: tls.server_name(data)[0])
            whole, name = tls.server_name(hello)
            if not whole or (name or host) != host or (name is None and not names.is_address(host)):
                raise Denied(f"the TLS connection to {host} names {name or 'no host'}")
        except (Invalid, Denied, TimeoutError) as error:
            await self._deny("https", ask, str(error) or "no TLS hello came")
            return
        await self._raw(ask, "https")

    async def _raw(self, ask: Ask, protocol: str) -> None:
        """A connection whose bytes pass as they are, counted."""
        box, passage = self.box, Passage(self.box, protocol, ask)
        task = asyncio.current_task()
        assert task is not None
        try:
            if box.replay is not None:
                raise Denied(f"{ask} is not HTTP, so it can't be replayed")
            rule = passage.allow(lambda: _cancel(task))
            server = await dialed(await box.connect(ask.host, ask.port, rule), None, ask.host, 0)

            def sent(data: bytes) -> bytes:
                passage.sent(len(data))
                return data

            def received(data: bytes) -> bytes:
                passage.received(len(data))
                return data

            try:
                await tunnel(await self._stream(None), server, sent, received, box.limits.tunnel_seconds)
            except BaseException:
                cut(server[1])
                raise
        except LayerError as error:
            if isinstance(error, Denied) or passage.rule is None:
                passage.verdict = "deny"
            found = error.details.get("rule")
            passage.rule = found if isinstance(found, Rule) else passage.rule
            passage.reason = passage.reason or error.message
            self._reset()
        except OSError:
            passage.reason = "the connection broke"
        except asyncio.CancelledError:
            self._reset()
            raise
        finally:
            await passage.end()

    async def _own(self, address: str, port: int) -> None:
        """Connections to the gateway itself: DNS over TCP, and CONNECT from clients that insist on a proxy."""
        if port == 53:
            await self._dns()
            return
        first = await self._first(_PATIENCE)
        if not first.startswith(b"CONNECT ") or address != dns.RESOLVER:
            if _METHOD.match(first):
                await h1.serve(Site(self.box, "http", address, address, port, None), await self._stream(None))
            else:
                await self._deny("tcp", Ask("tcp", address, port))
            return
        async with asyncio.timeout(self.box.limits.head_seconds):
            head = await peek(self.sock, lambda data: b"\r\n\r\n" in data)
        end = head.find(b"\r\n\r\n") + 4
        try:
            if end < 4:
                raise Invalid("the CONNECT request has no end")
            line = head[:end].partition(b"\r\n")[0].split(b" ")
            if len(line) != 3 or not line[2].startswith(b"HTTP/1.") or b":" not in line[1]:
                raise Invalid("this is no CONNECT request")
            host, wanted = names.authority(line[1], 0)
        except Invalid as error:
            await self._answer(400, error.message)
            await self._deny("http", Ask("tcp", address, port, "CONNECT"), error.message)
            return
        self.sock.recv(end)  # peeked at, so it is there
        if rules.first_at(self.box.rules, host, wanted) is None:
            ask = Ask("https", host, wanted)
            await self._answer(403, f"no egress rule allows CONNECT {host}:{wanted}")
            await self._deny("http", ask, f"no egress rule allows CONNECT {host}:{wanted}")
            return
        self.sock.send(b"HTTP/1.1 200 Connected\r\n\r\n")
        await self._towards(host, address, wanted)

    async def _refuse_proxy(self, host: str, port: int) -> None:
        text = f"the gateway is no proxy at this address, and none is needed: connect to the host itself (or use {dns.RESOLVER})"
        await self._answer(403, text)
        await self._deny("http", Ask("http", host, port, "CONNECT"), text)

    async def _answer(self, status: int, text: str) -> None:
        body = text.encode() + b"\n"
        head = f"HTTP/1.1 {status} \r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        with contextlib.suppress(BlockingIOError):
            self.sock.recv(65536)  # unread bytes would turn the end into a reset before the answer is read
        with contextlib.suppress(OSError):
            self.sock.send(head.encode() + b"Connection: close\r\n\r\n" + body)
            self.sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await peek(self.sock, lambda data: False, limit=1)

    async def _dns(self) -> None:
        reader, writer = await self._stream(None)
        try:
            while True:
                async with asyncio.timeout(self.box.limits.head_seconds):
                    size = int.from_bytes(await reader.readexactly(2))
                    packet = await reader.readexactly(size)
                reply = await resolve(self.box, packet)
                if reply is None:
                    return
                writer.write(len(reply).to_bytes(2) + reply)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


async def resolve(box: Box, packet: bytes) -> bytes | None:
    """The answer to a DNS question of a box, and its event; None if there is nothing to answer."""
    found = dns.respond(packet, lambda name: rules.names_allowed(box.rules, name), box.book)
    if found is None:
        return None
    asked, reply, allowed = found
    name = asked.name or "?"
    await box.tell({
        "protocol": "dns", "host": name, "port": 53, "method": None, "path": None, "status": None,
        "up": 0, "down": 0, "verdict": "allow" if allowed else "deny", "rule": None,
        "reason": None if allowed else f"no egress rule names {name}", "secrets": [], "placeholders": [],
    })  # fmt: skip
    return reply


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
