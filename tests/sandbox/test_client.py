"""The client's wire: what is sent arrives, however full the way is."""

from __future__ import annotations

import contextlib
import socket
import threading

from livinglayer.sandbox.client import BlockingWire, Connection, run_blocking
from livinglayer.sandbox.wire import Kind


def test_a_small_frame_waits_for_room() -> None:
    """After much was sent the host may not have taken it yet: then even the word that it was all waits, and is not lost."""
    ours, host = socket.socketpair(socket.AF_UNIX)
    with ours, host:
        connection, full = Connection(BlockingWire(ours)), 0
        with contextlib.suppress(BlockingIOError):
            while True:
                full += ours.send(b"a" * 4096, socket.MSG_DONTWAIT)
        with contextlib.suppress(BlockingIOError):
            while True:
                full += ours.send(b"a", socket.MSG_DONTWAIT)
        sender = threading.Thread(target=lambda: run_blocking(connection.send((Kind.INPUT_END, b""))))
        sender.start()
        host.settimeout(10)
        came = b""
        while len(came) < full + 12:
            came += host.recv(65536)
        sender.join(10)
        assert came[full:] == b"\0\0\0\0\0\0\0\0" + int(Kind.INPUT_END).to_bytes(4, "little") and not connection.broken
