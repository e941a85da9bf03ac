"""Heads: HTTP/1.1 whose request lines, headers and trailers come to an end: soon, and after so many bytes; those of WebSockets are text."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .serving import PATIENCE

LARGEST = 256 << 10  # bytes of a head, and a read more
# What is read as text when a connection becomes a WebSocket, where anything else would be a traceback and no answer.
TEXTS = {b"host": "idna"} | dict.fromkeys(
    (b"connection", b"sec-websocket-extensions", b"sec-websocket-protocol"), "ascii"
)


class Heads(HttpToolsProtocol):
    """Uvicorn's protocol, which would wait for the end of a head for ever and keep all of it."""

    _late: asyncio.TimerHandle | None = None
    _pending = 0  # bytes that came since the last thing they were a part of

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pending += len(data)
        super().data_received(data)
        if self._pending > LARGEST and not self.transport.is_closing():
            self._arrived()
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._arrived()
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        try:
            for name, value in self.headers:
                if (reading := TEXTS.get(name)) is not None:
                    value.decode(reading)
        except UnicodeError:
            self.send_400_response(f"The header {name.decode()} is no text.")
        else:
            super().handle_websocket_upgrade()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending = 0
        super().on_message_complete()

    def _wait(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(PATIENCE, self._close)

    def _arrived(self) -> None:
        self._pending = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
