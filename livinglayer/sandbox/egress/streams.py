"""Sockets: looking at what comes first without taking it, turning sockets into streams, tunnels between two of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable

from livinglayer.errors import LayerError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CHUNK = 65536


async def peek(sock: socket.socket, enough: Callable[[bytes], bool], limit: int = 32768) -> bytes:
    """What a connection begins with, left in place: read until `enough` says so, the limit, or its end."""
    loop = asyncio.get_running_loop()
    wait, seen = 0.001, b""
    while True:
        waiting: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sock, lambda waiting=waiting: waiting.done() or waiting.set_result(None))  # type: ignore[misc]
        try:
            await waiting
        finally:
            loop.remove_reader(sock)
        try:
            data = sock.recv(limit, socket.MSG_PEEK)
        except BlockingIOError:
            continue
        if not data or len(data) >= limit or enough(data):
            return data
        # a part that does not suffice keeps the socket readable
        wait = min(wait * 2, 0.1) if data == seen else 0.001
        seen = data
        await asyncio.sleep(wait)


def reset(sock: socket.socket) -> None:
    """End a connection so that the other side sees it refused, not finished."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def cut(writer: asyncio.StreamWriter) -> None:
    """End a stream at once, whatever is on its way, so that the other side sees it was cut."""
    with contextlib.suppress(OSError, AttributeError):  # it may be closed already
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def accepted(sock: socket.socket, context: ssl.SSLContext | None, seconds: float) -> Streams:
    """Streams over a socket a box connected; with a context, after the TLS handshake."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=CHUNK, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, sock, ssl=context, ssl_handshake_timeout=seconds if context else None,
        ssl_shutdown_timeout=1 if context else None,
    )  # fmt: skip
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def dialed(sock: socket.socket, context: ssl.SSLContext | None, host: str, seconds: float) -> Streams:
    """Streams over a connected socket; with a context, after the server proved to be `host`."""
    if context is None:
        return await asyncio.open_connection(sock=sock, limit=CHUNK)
    return await asyncio.open_connection(
        sock=sock, ssl=context, server_hostname=host, limit=CHUNK, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=1
    )


async def tunnel(
    box: Streams,
    server: Streams,
    sent: Callable[[bytes], bytes],
    received: Callable[[bytes], bytes],
    idle: float,
) -> None:
    """Bytes both ways until both ends are done, one breaks, nothing moves, or `sent` or `received` refuse."""

    loop = asyncio.get_running_loop()
    moved = loop.time()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Callable[[bytes], bytes]) -> None:
        nonlocal moved
        while data := await reader.read(CHUNK):
            moved = loop.time()
            writer.write(seen(data))
            await writer.drain()
        if rest := seen(b""):
            writer.write(rest)
        if writer.can_write_eof():
            writer.write_eof()
        else:  # TLS has no half-close
            await writer.drain()
            writer.close()

    pumps = {
        asyncio.create_task(pump(box[0], server[1], sent)),
        asyncio.create_task(pump(server[0], box[1], received)),
    }
    try:
        waiting = set(pumps)
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=moved + idle - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            if loop.time() - moved >= idle:
                return
    except (OSError, ssl.SSLError, LayerError):
        for writer in (box[1], server[1]):
            cut(writer)
        raise
    finally:
        for task in pumps:
            task.cancel()
        for writer in (box[1], server[1]):
            writer.close()
