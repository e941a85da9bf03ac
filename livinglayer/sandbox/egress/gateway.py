"""The gateway process: makes networks, opens and closes boxes as the host says, tells the host what boxes ask for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from livinglayer.errors import Conflict, Denied, Invalid, LayerError, NotFound, Unavailable
from livinglayer.sandbox.egress.box import Box
from livinglayer.sandbox.egress.complaint import complain
from livinglayer.sandbox.egress.connection import Connection, resolve
from livinglayer.sandbox.egress.limits import Limits
from livinglayer.sandbox.egress.netns import Pool
from livinglayer.sandbox.egress.rules import Rule
from livinglayer.sandbox.egress.tls import Authority

MESSAGE = 262144


class Listening:
    """The sockets of one box and what came in by them."""

    def __init__(self, box: Box, authority: Authority, tcp: int, dns: int) -> None:
        self.box, self.authority = box, authority
        self.tcp, self.dns = socket.socket(fileno=tcp), socket.socket(fileno=dns)
        for sock in (self.tcp, self.dns):
            sock.setblocking(False)
        self.connections: set[asyncio.Task[None]] = set()
        self._tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._resolve())]

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self.tcp)
            except OSError as error:
                if error.errno == errno.EBADF:
                    return
                await asyncio.sleep(0.1)  # out of fds or memory: they wait in the backlog
                continue
            if len(self.connections) >= self.box.limits.connections:
                refusing = Connection(self.box, self.authority, sock)
                await refusing.refuse(f"more than {self.box.limits.connections} connections at once")
                continue
            task = asyncio.create_task(Connection(self.box, self.authority, sock).run())
            self.connections.add(task)
            task.add_done_callback(self.connections.discard)

    async def _resolve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                packet, sender = await loop.sock_recvfrom(self.dns, 4096)
                reply = await resolve(self.box, packet)
                if reply is not None:
                    await loop.sock_sendto(self.dns, reply, sender)
            except OSError as error:
                if error.errno == errno.EBADF:
                    return
                await asyncio.sleep(0.01)

    async def close(self) -> dict[str, Any]:
        """End all of it; the byte counts."""
        counts = self.box.close()
        tasks = [*self._tasks, *self.connections]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=5)
        self.tcp.close()
        self.dns.close()
        return counts


class Gateway:
    """Serves one host over a SEQPACKET socket until the host closes it."""

    def __init__(self, control: socket.socket, state: Path, limits: Limits) -> None:
        control.setblocking(False)
        self.control, self.limits = control, limits
        self.authority = Authority(state / "egress")
        self.pool = Pool(limits.pool)
        self.boxes: dict[str, Listening] = {}
        self._bridges: dict[int, asyncio.Future[socket.socket]] = {}
        self._bridged = 0
        self._outgoing: deque[tuple[bytes, list[int], Callable[[], None]]] = deque()
        self._more = asyncio.Event()

    async def run(self) -> None:
        """Serve until the host is gone."""
        asyncio.get_running_loop().set_exception_handler(
            lambda _, what: complain(what["exception"]) if what.get("exception") else None
        )
        self.pool.fill()
        self._send({"event": "ready", "ca": str(self.authority.certificate)})
        ended = asyncio.get_running_loop().create_future()
        tasks = [asyncio.create_task(self._receive(ended)), asyncio.create_task(self._transmit(ended))]
        try:
            await ended
        finally:
            for task in tasks:
                task.cancel()
            self.pool.close()

    # ── messages ──

    async def _receive(self, ended: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                waiting: asyncio.Future[None] = loop.create_future()
                loop.add_reader(self.control, lambda waiting=waiting: waiting.done() or waiting.set_result(None))  # type: ignore[misc]
                try:
                    await waiting
                finally:
                    loop.remove_reader(self.control)
                try:
                    data, fds, _, _ = socket.recv_fds(self.control, MESSAGE, 8, socket.MSG_CMSG_CLOEXEC)
                except BlockingIOError:
                    continue
                if not data:
                    break
                await self._handle(data, fds)
        except OSError:
            pass
        if not ended.done():
            ended.set_result(None)

    async def _transmit(self, ended: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._outgoing:
                self._more.clear()
                await self._more.wait()
            data, fds, done = self._outgoing[0]
            try:
                socket.send_fds(self.control, [data], fds)
            except BlockingIOError:
                waiting: asyncio.Future[None] = loop.create_future()
                loop.add_writer(self.control, lambda waiting=waiting: waiting.done() or waiting.set_result(None))  # type: ignore[misc]
                try:
                    await waiting
                finally:
                    loop.remove_writer(self.control)
                continue
            except OSError:
                if not ended.done():
                    ended.set_result(None)
                return
            self._outgoing.popleft()
            done()

    def _send(
        self, message: dict[str, Any], fds: list[int] | None = None, done: Callable[[], None] = lambda: None
    ) -> None:
        data = json.dumps(message).encode()
        if not self._outgoing:
            with contextlib.suppress(OSError):  # what does not go at once goes in its turn
                socket.send_fds(self.control, [data], fds or [])
                done()
                return
        self._outgoing.append((data, fds or [], done))
        self._more.set()

    async def _tell(self, event: dict[str, Any], done: Callable[[], None]) -> None:
        self._send(event, None, done)

    async def _bridge(self, box: str, rule: Rule, port: int) -> socket.socket:
        """A connection to a port of another box, by the host, which decides whose it is and wakes it."""
        self._bridged += 1
        number, opened = self._bridged, asyncio.get_running_loop().create_future()
        self._bridges[number] = opened
        self._send({"event": "bridge", "bridge": number, "box": box, "to": rule.box, "port": port})
        try:
            return await opened
        finally:
            del self._bridges[number]

    # ── what the host asks for ──

    async def _handle(self, data: bytes, fds: list[int]) -> None:
        tag = None
        try:
            message = json.loads(data)
            tag = message.get("tag")
            do = {
                "network": self._network, "open": self._open, "rules": self._rules, "close": self._close,
                "bridged": self._bridged_to,
            }.get(message.get("do"))  # fmt: skip
            if do is None:
                raise Invalid(f"the gateway can't do {message.get('do')!r}", hint="network, open, rules or close")
            await do(message, fds)
        except LayerError as error:
            self._send({"tag": tag, "ok": False, "error": error.code, "message": error.message, "hint": error.hint})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # the text of such an error may quote what was sent, secrets too
            self._send(
                {
                    "tag": tag,
                    "ok": False,
                    "error": "invalid",
                    "message": f"not a message ({type(error).__name__})",
                    "hint": None,
                }
            )
        finally:
            for fd in fds:  # those that found no owner
                with contextlib.suppress(OSError):
                    os.close(fd)

    async def _network(self, message: dict[str, Any], fds: list[int]) -> None:
        network = await self.pool.take()
        self._send({"tag": message["tag"], "ok": True}, network.fds, network.close)

    async def _open(self, message: dict[str, Any], fds: list[int]) -> None:
        ident = str(message["box"])
        if ident in self.boxes:
            raise Conflict(f"box {ident!r} is open already")
        if len(fds) != 2:
            raise Invalid(f"box {ident!r} came with {len(fds)} sockets", hint="the tcp listener and the dns socket")
        box = Box(
            ident,
            message["rules"],
            message.get("secrets") or {},
            self.limits,
            self._tell,
            message.get("record"),
            message.get("replay"),
            message.get("used"),
            message.get("exchanges"),
            self._bridge,
        )
        tcp, dns = fds
        fds.clear()
        self.boxes[ident] = Listening(box, self.authority, tcp, dns)
        self._send({"tag": message["tag"], "ok": True, "placeholders": box.secrets.placeholders()})

    def _box(self, message: dict[str, Any]) -> Listening:
        ident = str(message["box"])
        if ident not in self.boxes:
            raise NotFound(f"box {ident!r} is not open")
        return self.boxes[ident]

    async def _bridged_to(self, message: dict[str, Any], fds: list[int]) -> None:
        """The host's answer to a bridge that was asked for, and is perhaps not wanted any more."""
        opened = self._bridges.get(message["bridge"])
        if opened is None or opened.done():
            return
        if fds:
            connected = socket.socket(fileno=fds.pop())
            connected.setblocking(False)
            opened.set_result(connected)
        else:
            opened.set_exception((Denied if message["denied"] else Unavailable)(message["message"]))

    async def _rules(self, message: dict[str, Any], fds: list[int]) -> None:
        self._box(message).box.change(message["rules"])
        self._send({"tag": message["tag"], "ok": True})

    async def _close(self, message: dict[str, Any], fds: list[int]) -> None:
        listening = self._box(message)
        del self.boxes[listening.box.id]
        self._send({"tag": message["tag"], "ok": True, **await listening.close()})
