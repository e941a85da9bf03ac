"""Whoever runs a program and serves its channel: one thread, one poll, as the law does."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Any

from livinglayer.sandbox import Blueprint
from livinglayer.sandbox.once import Ended, Once

Answer = Callable[[bytes], bytes]

ASK = "import os, urllib.request\nprint(urllib.request.urlopen(os.environ['LAYER_URL'] + '/hello', timeout=20).read().decode(), end='')\n"


def echo(request: bytes) -> bytes:
    """The path that was asked for."""
    return request.split()[1]


def answer(listener: socket.socket, how: Answer = echo) -> bool:
    """Accept one connection and answer it; False when none waits."""
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return False
    with connection:
        connection.settimeout(20)
        if request := connection.recv(65536):
            body = how(request)
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode() + body)
            connection.recv(1)  # whoever asked hangs up first
    return True


def serve(once: Once, how: Answer = echo) -> Ended:
    """How the program ended, its channel served until then."""
    waits = select.poll()
    waits.register(once, select.POLLIN)
    if once.channel:
        waits.register(once.channel, select.POLLIN)
    while True:
        for fd, _ in waits.poll(60_000):
            if fd == once.fileno():
                if ended := once.receive():
                    return ended
            elif once.channel:
                answer(once.channel, how)


def run(how: Answer = echo, **given: Any) -> Ended:
    """One program from its start to its end."""
    with Once.start(**{"blueprint": Blueprint(), "tenant": "tests"} | given) as once:
        return serve(once, how)


def waiting(listener: socket.socket, seconds: float = 0) -> bool:
    """Whether somebody has connected."""
    waits = select.poll()
    waits.register(listener, select.POLLIN)
    return bool(waits.poll(seconds * 1000))
