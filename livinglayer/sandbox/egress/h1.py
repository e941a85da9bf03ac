"""HTTP/1.1 on the wire, both ways, by h11."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import h11

from livinglayer.errors import LayerError
from livinglayer.sandbox.egress.http import Exchange, Gone, Request, Response, Site
from livinglayer.sandbox.egress.limits import Limits
from livinglayer.sandbox.egress.record import Headers
from livinglayer.sandbox.egress.streams import CHUNK, Streams, cut


class Wire:
    """An h11 connection over streams."""

    def __init__(self, streams: Streams, role: type[h11.CLIENT] | type[h11.SERVER], limits: Limits) -> None:
        self.reader, self.writer = streams
        self.limits = limits
        self.h11 = h11.Connection(role, max_incomplete_event_size=limits.header_bytes)

    async def send(self, event: Any) -> None:
        data = self.h11.send(event)
        if data:
            self.writer.write(data)
            await self.writer.drain()

    async def receive(self) -> Any:
        """The next event; Gone when the other side ended within a message or said nothing for too long."""
        while True:
            try:
                event = self.h11.next_event()
            except h11.RemoteProtocolError:
                if self.h11.trailing_data[1]:
                    raise Gone from None
                raise
            if event is not h11.NEED_DATA:
                return event
            if self.h11.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
            try:
                async with asyncio.timeout(self.limits.idle_seconds):
                    data = await self.reader.read(CHUNK)
            except TimeoutError:
                raise Gone from None
            self.h11.receive_data(data)


class H1Reply:
    """The response to one request of a box."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.started = wire, False

    async def head(self, status: int, headers: Headers) -> None:
        self.started = True
        if self.wire.h11.their_state is h11.SEND_BODY and status >= 400:
            headers = [*headers, (b"connection", b"close")]  # the rest of the body will not be read
        await self.wire.send(h11.Response(status_code=status, headers=headers, reason=b""))

    async def data(self, data: bytes) -> None:
        await self.wire.send(h11.Data(data=data))

    async def end(self, trailers: Headers) -> None:
        chunked = self.wire.h11.their_http_version != b"1.0" and trailers
        with contextlib.suppress(h11.LocalProtocolError):  # trailers of a body with a length have no place
            await self.wire.send(h11.EndOfMessage(headers=trailers if chunked else []))
            return
        await self.wire.send(h11.EndOfMessage())

    async def switch(self, headers: Headers) -> tuple[Streams, bytes]:
        self.started = True
        said = [*headers, (b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
        await self.wire.send(h11.InformationalResponse(status_code=101, headers=said, reason=b"Switching Protocols"))
        return (self.wire.reader, self.wire.writer), self.wire.h11.trailing_data[0]

    def abort(self) -> None:
        cut(self.wire.writer)


async def serve(site: Site, streams: Streams) -> None:
    """Answer the requests of one connection, one after the other."""
    wire = Wire(streams, h11.SERVER, site.box.limits)
    try:
        while True:
            reply = H1Reply(wire)
            try:
                event = await wire.receive()
                if not isinstance(event, h11.Request):
                    return
                request = _request(site, wire, event)
            except h11.RemoteProtocolError as error:
                if wire.h11.our_state in (h11.IDLE, h11.SEND_RESPONSE, h11.ERROR):
                    request = Request(site.scheme, "-", b"/", [], [], 0, _body(wire), problem=f"not HTTP/1.1: {error}")
                    await Exchange(site, request, reply).run()
                return
            await Exchange(site, request, reply).run()
            if wire.h11.our_state is h11.SWITCHED_PROTOCOL or wire.writer.is_closing():
                return
            if not await _rest(wire):
                return
            wire.h11.start_next_cycle()
    except (Gone, OSError, ssl.SSLError, h11.ProtocolError):
        pass
    finally:
        site.close()
        wire.writer.close()


async def _rest(wire: Wire) -> bool:
    """Whether a next request can follow; reads what is left of the body, as far as it is little."""
    left = 1 << 20
    with contextlib.suppress(TimeoutError, h11.ProtocolError):
        async with asyncio.timeout(2):
            while wire.h11.their_state is h11.SEND_BODY and left > 0:
                event = await wire.receive()
                left -= len(event.data) if isinstance(event, h11.Data) else 0
    if wire.h11.our_state is h11.DONE and wire.h11.their_state is h11.DONE:
        return True
    if wire.h11.our_state is h11.MUST_CLOSE or wire.h11.their_state is h11.SEND_BODY:
        # closing on unread bytes would take the response with it: say the end first, then wait for the other's
        if wire.writer.can_write_eof():
            with contextlib.suppress(OSError, TimeoutError):
                wire.writer.write_eof()
                async with asyncio.timeout(1):
                    while await wire.reader.read(CHUNK):
                        pass
    return False


def _request(site: Site, wire: Wire, event: h11.Request) -> Request:
    headers: Headers = [(bytes(name), bytes(value)) for name, value in event.headers]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    lengths = [value for name, value in headers if name == b"content-length"]
    problem = None
    if event.http_version not in (b"1.1", b"1.0"):
        problem = "the only versions on this connection are HTTP/1.1 and HTTP/1.0"
    elif codings and lengths:
        problem = "a request has either a Content-Length or a Transfer-Encoding"
    elif codings and (event.http_version != b"1.1" or codings != [b"chunked"]):
        problem = "the only Transfer-Encoding is chunked, on HTTP/1.1"
    length = None if codings else int(lengths[0]) if lengths else 0
    request = Request(
        site.scheme,
        event.method.decode("ascii"),
        event.target,
        [value for name, value in headers if name == b"host"],
        headers,
        length,
        _nothing(),
        problem=problem,
    )
    request.body = _body(wire, request)
    return request


async def _nothing() -> AsyncGenerator[bytes, None]:
    return
    yield b""


async def _body(wire: Wire, message: Request | Response | None = None) -> AsyncIterator[bytes]:
    """Chunks to the end of a message, whose trailers are then known."""
    while True:
        try:
            event = await wire.receive()
        except h11.RemoteProtocolError:
            raise Gone from None
        if isinstance(event, h11.Data):
            if event.data:
                yield bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            if message is not None:
                message.trailers.extend((bytes(name), bytes(value)) for name, value in event.headers)
            return
        else:
            raise Gone


class H1Upstream:
    """A connection to a server that takes one request at a time."""

    def __init__(self, streams: Streams, limits: Limits, generation: int) -> None:
        self.wire = Wire(streams, h11.CLIENT, limits)
        self.generation = generation
        self._sending: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        wire = self.wire
        if self._sending is not None and not self._sending.done():
            return False
        if wire.h11.our_state is h11.DONE and wire.h11.their_state is h11.DONE:
            wire.h11.start_next_cycle()
        return wire.h11.our_state is h11.IDLE and not wire.writer.is_closing() and not wire.reader.at_eof()

    async def ask(
        self, method: str, scheme: str, authority: bytes, target: bytes, headers: Headers, length: int | None,
        body: AsyncIterator[bytes], trailers: Headers, upgrade: bool,
    ) -> Response:  # fmt: skip
        """Send a request; the response's head is there when this returns, while the body may still be on its way up."""
        said: Headers = [(b"host", authority), *headers]
        if length is None:
            said.append((b"transfer-encoding", b"chunked"))
        elif length or method in ("POST", "PUT", "PATCH"):
            said.append((b"content-length", str(length).encode()))
        if upgrade:
            said += [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
        try:
            await self.wire.send(h11.Request(method=method, target=target, headers=said))
        except h11.LocalProtocolError:
            raise Gone from None
        self._sending = asyncio.create_task(self._send(body, trailers if length is None else []))
        receiving = asyncio.create_task(self._head())
        try:
            await asyncio.wait({self._sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if self._sending.done() and not receiving.done():
                failed = self._sending.exception()
                if failed is not None and not isinstance(failed, OSError | ssl.SSLError):
                    raise failed  # of the box's side: the budget, or it went away; a server may well stop listening
            event = await receiving
        finally:
            receiving.cancel()
        received: Headers = [(bytes(name), bytes(value)) for name, value in event.headers]
        response = Response(event.status_code, received, _nothing())
        if isinstance(event, h11.InformationalResponse):
            response.streams, response.early = (self.wire.reader, self.wire.writer), self.wire.h11.trailing_data[0]
        else:
            response.body = self._rest(response)
        return response

    async def _send(self, body: AsyncIterator[bytes], trailers: Headers) -> None:
        try:
            async for data in body:
                await self.wire.send(h11.Data(data=data))
            await self.wire.send(h11.EndOfMessage(headers=trailers))
        except h11.LocalProtocolError:
            raise Gone from None

    async def _head(self) -> h11.Response | h11.InformationalResponse:
        while True:
            try:
                event = await self.wire.receive()
            except h11.RemoteProtocolError:
                raise Gone from None
            if isinstance(event, h11.Response):
                return event
            if isinstance(event, h11.InformationalResponse):
                if event.status_code == 101:
                    return event
            else:
                raise Gone

    async def _rest(self, response: Response) -> AsyncGenerator[bytes, None]:
        async for data in _body(self.wire, response):
            failed = self._sending.exception() if self._sending is not None and self._sending.done() else None
            if isinstance(failed, LayerError):
                raise failed
            yield data

    def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self.wire.writer.close()

    async def settled(self) -> None:
        """Wait until nothing reads the box's body any more: what comes next on its connection is the next request."""
        if self._sending is not None and not self._sending.done():
            await asyncio.wait({self._sending})
