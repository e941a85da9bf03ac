"""What HTTP/2 connections keep of what was sent to them: little, whatever it comes in, and nothing once nobody reads it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import h2.config
import h2.connection
import h2.events

from livinglayer.sandbox.egress.box import Box
from livinglayer.sandbox.egress.h2 import Stream, Wire, serve
from livinglayer.sandbox.egress.http import Site
from livinglayer.sandbox.egress.limits import Limits
from livinglayer.sandbox.egress.streams import Streams

POST = [(":method", "POST"), (":scheme", "https"), (":authority", "api.test"), (":path", "/")]
Talk = Callable[[Box, Streams, asyncio.StreamWriter, h2.connection.H2Connection], Coroutine[Any, Any, None]]


def talk(act: Talk) -> None:
    """A box's client, which has said hello and asks for something, and the gateway's side of its connection."""

    async def main() -> None:
        async def tell(event: dict[str, Any], told: Callable[[], None]) -> None:
            told()

        ours, theirs = socket.socketpair()
        box, streams = Box("b", [], {}, Limits(), tell), await asyncio.open_connection(sock=ours)
        _, writer = await asyncio.open_connection(sock=theirs)
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        client.send_headers(1, POST)
        async with asyncio.timeout(30):
            await act(box, streams, writer, client)
        writer.close()

    asyncio.run(main())


def test_small_frames_that_nobody_reads_take_little_memory() -> None:
    async def act(box: Box, streams: Streams, writer: asyncio.StreamWriter, client: Any) -> None:
        wire = Wire(streams, False, box)
        await wire.start()
        for n in range(3000):
            client.send_data(1, b"%d" % (n % 10))
            client.send_data(1, b"")
        client.end_stream(1)
        writer.write(client.data_to_send())
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
    async def act(box: Box, streams: Streams, writer: asyncio.StreamWriter, client: Any) -> None:
        wire = Wire(streams, False, box)
        await wire.start()
        for _ in range(4):
            client.send_data(1, bytes(10_000))
        writer.write(client.data_to_send())
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
                writer.write(client.data_to_send())
        assert wire.ended and sum([len(chunk) async for chunk in stream.body()]) == 80_000
        assert box.unread == 0

    talk(act)


def test_a_request_that_is_given_up_at_once_leaves_nothing() -> None:
    async def act(box: Box, streams: Streams, writer: asyncio.StreamWriter, client: Any) -> None:
        client.send_data(1, bytes(9000))
        client.reset_stream(1)
        writer.write(client.data_to_send())
        serving = asyncio.create_task(serve(Site(box, "https", "api.test", "127.0.0.1", 443, "api.test"), streams))
        await asyncio.sleep(0.1)
        writer.close()
        await serving
        assert box.unread == 0

    talk(act)
