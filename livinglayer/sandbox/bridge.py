"""Bridges: connections to ports of boxes, from the host's loopback and from other boxes, which wake a box that sleeps."""

import asyncio
import contextlib
import select
import socket
from typing import TYPE_CHECKING, Any

from ..errors import Conflict, Denied, LayerError, NotFound
from .agent import failure
from .blueprint import check_port
from .box import Box
from .wire import DONE, STARTED, STDOUT, WINDOW_START, Kind

if TYPE_CHECKING:
    from .host import Host

TENANT = "layer"  # the label that says whose a box is: names of others' boxes do not exist
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def relay(host: "Host", box: Box, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry one connection from the host's loopback to a port of a box, waking the box if it sleeps."""
    try:
        await Carried((await host.awake(box)), port).run(reader, writer)
    except LayerError:
        writer.close()


class Carried:
    """One connection to a port of a running box, by its agent."""

    def __init__(self, box: Box, port: int) -> None:
        self.box, self.agent, self._loop = box, box.agent, asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.sent = self.received = 0
        self._credit, self._room = WINDOW_START, asyncio.Event()
        self._out: asyncio.Queue[bytes] = asyncio.Queue()  # what the window lets the box send, and no more
        self._number = self.agent.open(self._on_frame)
        self.agent.send(Kind.CONNECT, port.to_bytes(4, "little"), self._number)

    def _on_frame(self, kind: int, payload: bytes) -> None:
        if kind == STDOUT and payload:
            self._out.put_nowait(payload)
        elif kind == STARTED and not self.started.done():
            self.started.set_result(None)
        elif kind == Kind.CREDIT:
            self._credit = min(WINDOW_START, self._credit + int.from_bytes(payload[:4], "little"))
            self._room.set()
        elif kind == DONE and not self.over.done():
            if not self.started.done():
                self.started.set_exception(failure(payload) or Conflict("the connection ended at once"))
                self.started.exception()  # seen: not everybody awaits it
            self.over.set_result(None)
            self._room.set()
            self._out.put_nowait(b"")

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bytes both ways until the box's side is done or the other is gone."""
        inward = asyncio.ensure_future(self._inward(reader, writer))
        try:
            while data := await self._out.get():
                self.box.touch()
                self.sent += len(data)
                writer.write(data)
                await writer.drain()
                self.agent.send(Kind.WINDOW, len(data).to_bytes(4, "little"), self._number)
        except (OSError, LayerError):
            pass
        finally:
            inward.cancel()
            self.close()
            writer.close()

    async def _inward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, LayerError):
            while data := await reader.read(32768):
                while self._credit < len(data) and not self.over.done():
                    self._room.clear()
                    await self._room.wait()
                self.box.touch()
                self._credit -= len(data)
                self.received += len(data)
                self.agent.send(Kind.INPUT, data, self._number)
            self.agent.send(Kind.INPUT_END, b"", self._number)
            peer = writer.get_extra_info("socket")
            while not _hung_up(peer):  # it may have ended one direction alone
                await asyncio.sleep(0.5)
        self._out.put_nowait(b"")

    def close(self) -> None:
        """End it at once, whatever the program in the box thinks of that."""
        with contextlib.suppress(LayerError):
            if not self.over.done():
                self.agent.send(Kind.CANCEL, b"", self._number)
        self.agent.drop(self._number)


def _hung_up(peer: Any) -> bool:
    """Whether the other end of a socket is closed in both directions."""
    if peer is None or peer.fileno() < 0:
        return True
    looked = select.poll()
    looked.register(peer.fileno(), 0)  # hanging up is told without being asked for
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in looked.poll(0))


# From box to box


def find(host: "Host", asking: Box, name: str, at: str | None) -> Box:
    """The box that a name means for a box that asks: one of the same tenant, and if somebody decided which, that one.

    Boxes of a layer reach what its law has decided (`at`); those of nobody in particular go by their names.
    """
    tenant = asking.labels.get(TENANT)
    if at is None and tenant is not None:
        raise Denied(f"no permission lets this box connect to box {name!r}", hint=f"layer grant WHO connect box:{name}")
    found = host.boxes.get((host.names.get(name) or name) if at is None else at)
    if found is None or found.state == "ended" or found.labels.get(TENANT) != tenant:
        raise NotFound(f"there is no box {name!r}")
    return found


async def open_bridge(host: "Host", event: dict[str, Any]) -> socket.socket:
    """A socket to the port of another box that the gateway asks for, carried until either side ends it."""
    asking = host.boxes.get(str(event["box"]))
    if asking is None:
        raise NotFound("the box that asked has ended")
    box, port = find(host, asking, str(event["to"]), event.get("at")), check_port(event["port"])
    box.touch()
    if box.state in ("paused", "suspended"):
        await host.resume(box)
    carried = Carried(await host.awake(box), port)
    try:
        await carried.started
        ours, theirs = socket.socketpair()
        streams = await asyncio.open_connection(sock=ours)
    except BaseException:
        carried.close()
        raise
    host.spawn_task(_carry(box, asking, port, carried, streams))
    return theirs


async def _carry(box: Box, asking: Box, port: int, carried: Carried, streams: Streams) -> None:
    """One connection until its end, which the box it came to tells of as the one it came from does."""
    began = asyncio.get_running_loop().time()
    try:
        await carried.run(*streams)
    finally:
        box.trace.add(
            "network", protocol="bridge", origin=asking.id, name=asking.name, port=port, verdict="allow",
            received=carried.received, sent=carried.sent, seconds=round(asyncio.get_running_loop().time() - began, 6),
        )  # fmt: skip
