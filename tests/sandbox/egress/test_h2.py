"""What HTTP/2 connections keep of what was sent to them: little, whatever it comes in, and nothing once nobody reads it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings

from livinglayer.sandbox.egress.box import Box
from livinglayer.sandbox.egress.h2 import H2Upstream, Stream, Wire, serve
from livinglayer.sandbox.egress.http import Site
from livinglayer.sandbox.egress.limits import Limits
from livinglayer.sandbox.egress.streams import Streams

POST = [(":method", "POST"), (":scheme", "https"), (":authority", "api.test"), (":path", "/")]
Talk = Callable[[Box, Streams, Streams, Any], Coroutine[Any, Any, None]]


def talk(act: Talk) -> None:
    """A box's client, which has said hello and asks for something, and the gateway's side of its connection."""

    async def main() -> None:
        async def tell(event: dict[str, Any], told: Callable[[], None]) -> None:
            told()

        box, pair = Box("b", [], {}, Limits(), tell), socket.socketpair()
        ours, theirs = [await asyncio.open_connection(sock=each) for each in pair]
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        client.send_headers(1, POST)
        async with asyncio.timeout(30):
            await act(box, ours, theirs, client)
        theirs[1].close()

    asyncio.run(main())


def test_small_frames_that_nobody_reads_take_little_memory() -> None:
    async def act(box: Box, streams: Streams, theirs: Streams, client: Any) -> None:
        wire = Wire(streams, False, box)
        await wire.start()
        for n in range(3000):
            client.send_data(1, b"%d" % (n % 10))
            client.send_data(1, b"")
        client.end_stream(1)
        theirs[1].write(client.data_to_send())
        async for event in wire.events():
            if isinstance(event, h2.events.RequestReceived):
                stream = wire.streams[1] = Stream(wire, 1)
            if isinstance(event, h2.events.StreamEnded):
                break
        assert box.unread == 3000
        chunks = [chunk async for chunk in stream.body()]
        assert len(chunks) < 5 and b"".join(chunks) == b"0123456789" * 300
        assert box.unread == 0

    talk(act)


def test_a_goodbye_right_after_much_data_is_no_defect() -> None:
    async def act(box: Box, streams: Streams, theirs: Streams, client: Any) -> None:
        wire = Wire(streams, False, box)
        await wire.start()
        for _ in range(4):
            client.send_data(1, bytes(10_000))
        theirs[1].write(client.data_to_send())
        got = 0
        async for event in wire.events():
            if isinstance(event, h2.events.RequestReceived):
                stream = wire.streams[1] = Stream(wire, 1)
            got += isinstance(event, h2.events.DataReceived)
            if got == 4:  # all is read; what comes next comes at once
                got = 5
                client.outbound_flow_control_window = client.streams[1].outbound_flow_control_window = 1 << 18
                for _ in range(4):
                    client.send_data(1, bytes(10_000))
                client.end_stream(1)
                client.close_connection()
                theirs[1].write(client.data_to_send())
        assert wire.ended and sum([len(chunk) async for chunk in stream.body()]) == 80_000
        assert box.unread == 0

    talk(act)


def test_a_request_that_is_given_up_at_once_leaves_nothing() -> None:
    async def act(box: Box, streams: Streams, theirs: Streams, client: Any) -> None:
        client.send_data(1, bytes(9000))
        client.reset_stream(1)
        theirs[1].write(client.data_to_send())
        serving = asyncio.create_task(serve(Site(box, "https", "api.test", "127.0.0.1", 443, "api.test"), streams))
        await asyncio.sleep(0.1)
        theirs[1].close()
        await serving
        assert box.unread == 0

    talk(act)


def test_requests_wait_while_a_server_takes_no_more() -> None:
    async def act(box: Box, streams: Streams, theirs: Streams, _: Any) -> None:
        async def ask() -> int:
            answer = await upstream.ask("GET", "https", b"api.test", b"/", [], 0, nothing(), [], False)
            return answer.status

        async def nothing() -> AsyncIterator[bytes]:
            return
            yield b""

        upstream = await H2Upstream.start(streams, box, 0)
        server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        server.initiate_connection()
        server.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 0})
        theirs[1].write(server.data_to_send())
        while upstream.wire.h2.remote_settings.max_concurrent_streams:
            await asyncio.sleep(0.01)
        asking = [asyncio.create_task(ask()) for _ in range(5)]
        await asyncio.sleep(0.2)
        assert upstream.wire.streams == {}
        server.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 2})
        theirs[1].write(server.data_to_send())
        most = answered = 0
        while answered < 5:
            await asyncio.sleep(0.1)  # whoever could ask has
            asked = [
                event.stream_id
                for event in server.receive_data(await theirs[0].read(65536))
                if isinstance(event, h2.events.RequestReceived)
            ]
            for ident in asked:
                server.send_headers(ident, [(":status", "200")], end_stream=True)
            theirs[1].write(server.data_to_send())
            most, answered = max(most, len(asked)), answered + len(asked)
        assert await asyncio.gather(*asking) == [200] * 5 and most <= 2
        upstream.close()

    talk(act)
