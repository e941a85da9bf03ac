"""HTTP/2 on the wire, both ways, by h2: many requests of a box on one connection, and to the server likewise."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from livinglayer.sandbox.egress.box import Box
from livinglayer.sandbox.egress.complaint import complain
from livinglayer.sandbox.egress.http import Exchange, Gone, Request, Response, Site
from livinglayer.sandbox.egress.record import Headers
from livinglayer.sandbox.egress.streams import CHUNK, Streams

_STREAM_WINDOW, _WINDOW = 256 << 10, 1 << 20
_GRANT = 64 << 10  # bytes of room that are given at once
_SMALL = 4 << 10  # bytes up to which chunks are kept as one
_HELD = 64 << 20  # bytes of a box's streams that are unread and take no room of other streams on their connection
_UNREAD = 4 << 20  # bytes for a side that does not read
_RESETS = 200  # of streams a box may give up on one connection before it is ended


class Stream:
    """One request and its response on a connection."""

    def __init__(self, wire: Wire, ident: int) -> None:
        self.wire, self.id = wire, ident
        self.head: asyncio.Future[Headers] = asyncio.get_running_loop().create_future()
        self.trailers: Headers = []
        self.task: asyncio.Task[None] | None = None
        self.ended = self.broken = self.closed = False
        self._chunks: deque[tuple[bytes, int, bool]] = (
            deque()
        )  # with the room each took, and whether that is given back
        self._read = 0  # bytes of room that are not given back yet
        self._changed = asyncio.Event()

    def arrived(self, data: bytes, flow: int) -> None:
        if not flow:
            return  # it takes no room, so nothing would end a flood of it
        given = self.wire.let_in(flow)
        # Bytes that come one by one are kept together, else each would take a hundred; not with the first, which is being read.
        if len(self._chunks) > 1 and self._chunks[-1][2] == given and len(self._chunks[-1][0]) + len(data) <= _SMALL:
            before, taken, _ = self._chunks.pop()
            data, flow = before + data, taken + flow
        self._chunks.append((data, flow, given))
        self._changed.set()

    def _taken(self) -> bool:
        """Give back the room of the first chunk; whether there is something to be sent."""
        _, flow, given = self._chunks.popleft()
        if given:
            self.wire.box.unread -= flow
        if not flow or self.wire.ended:
            return False
        with contextlib.suppress(h2.exceptions.ProtocolError):
            if not given:
                self.wire.h2.acknowledge_received_data(flow, self.id)
            else:
                self._read += flow
                if self._read >= _GRANT and not (self.ended or self.broken):
                    read, self._read = self._read, 0
                    self.wire.h2.increment_flow_control_window(read, self.id)
        return True

    def leave(self) -> None:
        """Nobody reads on: the room that is taken is for other streams."""
        while self._chunks:
            self._taken()
        self.wire.streams.pop(self.id, None)
        if not self.wire.ended:
            self.wire.write()

    def end(self) -> None:
        self.ended = True
        self._changed.set()

    def fail(self) -> None:
        self.broken = True
        self._changed.set()
        if not self.head.done():
            self.head.set_exception(Gone())
            self.head.exception()  # seen: nobody may be waiting

    def moved(self) -> None:
        """There may be room to send."""
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(self.wire.limits.idle_seconds):
                await self._changed.wait()
        except TimeoutError:
            raise Gone from None

    async def body(self) -> AsyncIterator[bytes]:
        """Chunks to the end; room for more is given as they are taken."""
        while True:
            while self._chunks:
                if data := self._chunks[0][0]:
                    yield data
                if self._chunks and self._taken():
                    await self.wire.flush()
            if self.ended:
                return
            if self.broken:
                raise Gone
            await self._change()

    async def send(self, data: bytes) -> None:
        """Send as the other side gives room."""
        view = memoryview(data)
        while view:
            room = self._room()
            if room <= 0:
                await self._change()
                continue
            part, view = view[:room], view[room:]
            self._do(lambda part=part: self.wire.h2.send_data(self.id, bytes(part)))  # type: ignore[misc]
            await self.wire.flush()

    def _room(self) -> int:
        if self.broken or self.wire.ended:
            raise Gone
        try:
            return min(self.wire.h2.local_flow_control_window(self.id), self.wire.h2.max_outbound_frame_size)
        except h2.exceptions.ProtocolError:
            raise Gone from None

    def _do(self, act: Callable[[], None]) -> None:
        if self.broken or self.wire.ended:
            raise Gone
        try:
            act()
        except h2.exceptions.ProtocolError:
            raise Gone from None

    async def send_head(self, headers: Headers, end: bool = False) -> None:
        self._do(lambda: self.wire.h2.send_headers(self.id, headers, end_stream=end))
        await self.wire.flush()

    async def send_end(self, trailers: Headers) -> None:
        if trailers:
            self._do(lambda: self.wire.h2.send_headers(self.id, trailers, end_stream=True))
        else:
            self._do(lambda: self.wire.h2.end_stream(self.id))
        self.closed = True
        await self.wire.flush()

    def reset(self) -> None:
        """Give the stream up."""
        self.broken = True
        if not self.wire.ended:
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self.wire.h2.reset_stream(self.id, h2.errors.ErrorCodes.CANCEL)
            self.wire.write()


class Wire:
    """An HTTP/2 connection over streams."""

    def __init__(self, streams: Streams, client: bool, box: Box) -> None:
        self.reader, self.writer = streams
        self.box, self.limits, self.client = box, box.limits, client
        self._grant = 0  # bytes of room that are to be given
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=client, header_encoding=False, validate_outbound_headers=True)
        )
        codes = h2.settings.SettingCodes
        self.h2.local_settings = h2.settings.Settings(
            client=client,
            initial_values={
                codes.MAX_CONCURRENT_STREAMS: box.limits.streams,
                codes.MAX_HEADER_LIST_SIZE: box.limits.header_bytes,
                codes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
                codes.ENABLE_PUSH: 0,
            },
        )
        self.streams: dict[int, Stream] = {}
        self.ended = False
        self.resets = 0

    def let_in(self, flow: int) -> bool:
        """Give the room that data took on the connection to others at once, as far as that may be.

        Some streams wait for the end of others: what waits must not take the room of what is waited for.
        """
        if self.box.unread + flow > _HELD:
            return False
        self.box.unread += flow
        self._grant += flow
        if self._grant >= _GRANT:
            grant, self._grant = self._grant, 0
            with contextlib.suppress(h2.exceptions.ProtocolError):  # the other side said goodbye right after it
                self.h2.increment_flow_control_window(grant)
        return True

    def write(self) -> None:
        data = self.h2.data_to_send()
        if data and not self.writer.is_closing():
            self.writer.write(data)

    async def flush(self) -> None:
        self.write()
        try:
            await self.writer.drain()
        except (OSError, ssl.SSLError):
            raise Gone from None

    async def start(self) -> None:
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(_WINDOW - 65535)
        await self.flush()

    async def events(self) -> AsyncIterator[h2.events.Event]:
        """What comes in, with streams already brought up to date, to the end of the connection."""
        try:
            while not self.ended:
                try:
                    async with asyncio.timeout(self.limits.idle_seconds if not self.streams else None):
                        data = await self.reader.read(CHUNK)
                except TimeoutError:
                    break
                if not data:
                    break
                try:
                    happened = self.h2.receive_data(data)
                except h2.exceptions.ProtocolError:
                    self.write()  # says why
                    break
                for event in happened:
                    self._note(event)
                    yield event
                # Not waiting here, else two sides that both write would wait for each other; but a side that only asks ends.
                self.write()
                if self.writer.transport.get_write_buffer_size() > _UNREAD:
                    break
        except (OSError, ssl.SSLError, Gone):
            pass
        finally:
            self.ended = True
            for stream in list(self.streams.values()):
                stream.fail()

    def _note(self, event: h2.events.Event) -> None:
        ident = getattr(event, "stream_id", None)
        stream = self.streams.get(ident) if ident else None
        if isinstance(event, h2.events.DataReceived):
            if stream is not None:
                stream.arrived(event.data or b"", event.flow_controlled_length or 0)
            elif event.flow_controlled_length:
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            for each in [stream] if stream is not None else list(self.streams.values()):
                each.moved()
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.ended = True
        elif stream is None:
            return
        elif isinstance(event, h2.events.ResponseReceived):
            if not stream.head.done():
                stream.head.set_result([(bytes(name), bytes(value)) for name, value in event.headers or ()])
        elif isinstance(event, h2.events.TrailersReceived):
            stream.trailers.extend((bytes(name), bytes(value)) for name, value in event.headers or ())
        elif isinstance(event, h2.events.StreamEnded):
            stream.end()
        elif isinstance(event, h2.events.StreamReset):
            self.resets += 1
            stream.fail()


class H2Reply:
    """The response to one request of a box."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.started = stream, False

    async def head(self, status: int, headers: Headers) -> None:
        self.started = True
        await self.stream.send_head([(b":status", str(status).encode()), *headers])

    async def data(self, data: bytes) -> None:
        await self.stream.send(data)

    async def end(self, trailers: Headers) -> None:
        await self.stream.send_end(trailers)

    async def switch(self, headers: Headers) -> tuple[Streams, bytes]:
        raise Gone  # no upgrades within HTTP/2

    def abort(self) -> None:
        self.stream.reset()


async def serve(site: Site, streams: Streams) -> None:
    """Answer the requests of one connection, side by side."""
    wire = Wire(streams, False, site.box)
    tasks: set[asyncio.Task[None]] = set()
    try:
        await wire.start()
        async for event in wire.events():
            if isinstance(event, h2.events.RequestReceived):
                assert event.stream_id is not None
                stream = wire.streams[event.stream_id] = Stream(wire, event.stream_id)
                headers = [(bytes(name), bytes(value)) for name, value in event.headers or ()]
                if event.stream_ended is not None:
                    stream.end()
                stream.task = asyncio.create_task(_answer(site, stream, headers))
                tasks.add(stream.task)
                stream.task.add_done_callback(tasks.discard)
                stream.task.add_done_callback(lambda _, stream=stream: stream.leave())  # type: ignore[misc]  # also if it never ran
            elif isinstance(event, h2.events.StreamReset):
                gone = wire.streams.get(event.stream_id or 0)
                if gone is not None and gone.task is not None:
                    gone.task.cancel()
                if wire.resets > _RESETS:
                    break
    except Gone:
        pass
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        site.close()
        streams[1].close()


async def _answer(site: Site, stream: Stream, headers: Headers) -> None:
    reply = H2Reply(stream)
    try:
        await Exchange(site, _request(site, stream, headers), reply).run()
        if not stream.ended and not stream.broken:  # answered before its body was whole
            with contextlib.suppress(h2.exceptions.ProtocolError):
                stream.wire.h2.reset_stream(stream.id, h2.errors.ErrorCodes.NO_ERROR)
            stream.wire.write()
    except (Gone, OSError, ssl.SSLError):
        stream.reset()
    except Exception as error:
        complain(error)
        stream.reset()


def _request(site: Site, stream: Stream, headers: Headers) -> Request:
    pseudo = {name: value for name, value in headers if name.startswith(b":")}
    plain = [(name, value) for name, value in headers if not name.startswith(b":")]
    cookies = [value for name, value in plain if name == b"cookie"]
    if len(cookies) > 1:  # one header each in HTTP/2, one in all before it
        plain = [(name, value) for name, value in plain if name != b"cookie"] + [(b"cookie", b"; ".join(cookies))]
    lengths = [value for name, value in plain if name == b"content-length"]
    problem = None
    if pseudo.get(b":scheme", b"").decode("latin-1") != site.scheme:
        problem = f":scheme is not {site.scheme}"
    elif set(pseudo) - {b":method", b":scheme", b":authority", b":path"}:
        problem = "the request has pseudo-headers of another protocol"
    elif any(name in (b"connection", b"transfer-encoding", b"upgrade", b"keep-alive") for name, _ in plain):
        problem = "the request has headers of another protocol"
    elif len(lengths) > 1 or not all(one.isdigit() for one in lengths):
        problem = "the request has no clear length"
    length = int(lengths[0]) if lengths and not problem else None
    if stream.ended and not stream._chunks:
        problem = problem or ("the body is shorter than its length" if length else None)
        length = 0
    return Request(
        "h2",
        pseudo.get(b":method", b"-").decode("latin-1"),
        pseudo.get(b":path", b""),
        [value for name, value in headers if name in (b":authority", b"host")],
        plain,
        length,
        stream.body(),
        stream.trailers,
        problem,
    )


class H2Upstream:
    """A connection to a server that takes many requests at once."""

    def __init__(self, streams: Streams, box: Box, generation: int) -> None:
        self.wire = Wire(streams, True, box)
        self.generation = generation
        self._reading: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._asking = asyncio.Lock()

    @classmethod
    async def start(cls, streams: Streams, box: Box, generation: int) -> H2Upstream:
        upstream = cls(streams, box, generation)
        await upstream.wire.start()
        upstream._reading = asyncio.create_task(upstream._read())
        return upstream

    async def _read(self) -> None:
        async for _ in self.wire.events():
            pass
        self.wire.writer.close()

    @property
    def usable(self) -> bool:
        wire = self.wire
        return not wire.ended and not wire.writer.is_closing() and wire.h2.highest_outbound_stream_id < 1 << 30

    async def ask(
        self, method: str, scheme: str, authority: bytes, target: bytes, headers: Headers, length: int | None,
        body: AsyncIterator[bytes], trailers: Headers, upgrade: bool,
    ) -> Response:  # fmt: skip
        """Send a request; the response's head is there when this returns, while the body may still be on its way up."""
        wire = self.wire
        try:
            async with asyncio.timeout(wire.limits.idle_seconds):
                await self._room()
        except TimeoutError:
            raise Gone from None
        stream = Stream(wire, wire.h2.get_next_available_stream_id())
        wire.streams[stream.id] = stream
        said: Headers = [
            (b":method", method.encode()), (b":scheme", scheme.encode()), (b":authority", authority), (b":path", target),
            *headers,
        ]  # fmt: skip
        if any(
            value == b"application/grpc" or value.startswith(b"application/grpc+")
            for name, value in headers
            if name == b"content-type"
        ):
            said.append((b"te", b"trailers"))
        if length:
            said.append((b"content-length", str(length).encode()))
        sending = None
        try:
            await stream.send_head(said, end=length == 0)
            if length != 0:
                sending = asyncio.create_task(self._send(stream, body, trailers))
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)
                waiting: set[asyncio.Future[Any]] = {sending, stream.head}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and not stream.head.done() and (failed := sending.exception()):
                    raise failed
            async with asyncio.timeout(wire.limits.idle_seconds):
                received = await stream.head
            status = int(dict(received).get(b":status", b"502"))
        except (TimeoutError, ValueError):
            self._drop(stream, sending)
            raise Gone from None
        except BaseException:
            self._drop(stream, sending)
            raise
        plain = [(name, value) for name, value in received if not name.startswith(b":")]
        rest = self._rest(stream, sending)
        await anext(rest)  # begun, so that its end is seen to however it ends
        return Response(status, plain, rest, stream.trailers)

    async def _room(self) -> None:
        """Wait until the server takes one request more. One looks for all who wait: a server that never does costs little."""
        wire, pause = self.wire, 0.002
        async with self._asking:
            while wire.h2.open_outbound_streams >= wire.h2.remote_settings.max_concurrent_streams:
                await asyncio.sleep(pause := min(2 * pause, 0.1))
                if wire.ended:
                    raise Gone

    def _drop(self, stream: Stream, sending: asyncio.Task[None] | None) -> None:
        if sending is not None:
            sending.cancel()
        stream.reset()
        stream.leave()

    async def _send(self, stream: Stream, body: AsyncIterator[bytes], trailers: Headers) -> None:
        async for data in body:
            await stream.send(data)
        await stream.send_end(trailers)

    async def _rest(self, stream: Stream, sending: asyncio.Task[None] | None) -> AsyncGenerator[bytes, None]:
        whole = False
        try:
            yield b""
            async for data in stream.body():
                if (
                    sending is not None
                    and sending.done()
                    and not sending.cancelled()
                    and (failed := sending.exception())
                ):
                    raise failed
                yield data
            whole = True
        finally:
            if not whole or (sending is not None and not sending.done()):
                self._drop(stream, sending)
            stream.leave()

    def close(self) -> None:
        """End the connection and all that is on it."""
        self.wire.ended = True
        if self._reading is not None:
            self._reading.cancel()
        self.wire.writer.close()

    async def settled(self) -> None:
        """Nothing to wait for: bodies of HTTP/2 requests do not share what they are read from."""
