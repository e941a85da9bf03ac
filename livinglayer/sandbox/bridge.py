"""Bridges: connections to ports of boxes, from the host's loopback and from other boxes, which wake a box that sleeps."""

import asyncio
import contextlib
import json
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import Conflict, Denied, Invalid, LayerError, NotFound
from .agent import failure
from .blueprint import check_port
from .box import Box
from .wire import DONE, STARTED, STDOUT, WINDOW_START, Kind

if TYPE_CHECKING:
    from .host import Host

TENANT = "layer"  # the label that says whose a box is: names of others' boxes do not exist
REACHES = "reaches"  # the label that says which it may connect to


async def relay(host: "Host", box: Box, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry one connection from the host's loopback to a port of a box, waking the box if it sleeps or is suspended."""
    try:
        if box.state == "suspended":
            await host.resume(box)
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

    def cut(self) -> None:
        """Let `run` end."""
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


def meant(host: "Host", asking: Box, name: str) -> str | None:
    """The id of the box that a name means for a box: as its layer's law has decided, or just the one of that name."""
    if TENANT in asking.labels:
        return reaches(asking).get(name)
    return host.names.get(name) or name


def reaches(box: Box) -> dict[str, str]:
    """The boxes that a box of a layer may connect to: ids by the names that its rules use."""
    found = json.loads(box.labels.get(REACHES) or "{}")
    return found if isinstance(found, dict) else {}


def reach(box: Box, boxes: Mapping[str, str]) -> None:
    """Let a box of a layer connect to these from now on; what is open to others is cut."""
    if not all(isinstance(name, str) and isinstance(id, str) for name, id in boxes.items()):
        raise Invalid(f"boxes to reach are ids by name, not {boxes!r:.100}")
    box.labels[REACHES] = json.dumps(dict(boxes))
    for bridge in list(box.bridges):
        if boxes.get(bridge.name) != bridge.carried.box.id:
            bridge.carried.cut()


@dataclass(frozen=True, eq=False)
class Bridge:
    """One connection from a box to another."""

    name: str
    carried: Carried


async def open_bridge(host: "Host", event: dict[str, Any]) -> socket.socket:
    """A socket to the port of another box that the gateway asks for, carried until either side ends it."""
    asking, name, port = host.boxes.get(str(event["box"])), str(event["to"]), check_port(event["port"])
    if asking is None:
        raise NotFound("the box that asked has ended")
    id = meant(host, asking, name)
    if id is None:
        raise Denied(f"no permission lets this box connect to box {name!r}")
    box = host.boxes.get(id)
    if box is None or box.state == "ended" or box.labels.get(TENANT) != asking.labels.get(TENANT):
        raise NotFound(f"there is no box {name!r}")
    if box.state == "paused" and box.token is not None and not box.asleep:
        raise Conflict(f"box {name!r} waits for somebody")  # under a contract: for a yes, which no connection is
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
    bridge = Bridge(name, carried)
    asking.bridges.add(bridge)
    if meant(host, asking, name) != id:  # it was decided otherwise meanwhile
        carried.cut()
    host.spawn_task(_carry(asking, bridge, port, *streams))
    return theirs


async def _carry(
    asking: Box, bridge: Bridge, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One connection until its end, of which the box it came to tells as the one it came from does."""
    carried, began = bridge.carried, time.time()
    try:
        await carried.run(reader, writer)
    finally:
        asking.bridges.discard(bridge)
        carried.box.trace.add(
            "network", began=began, protocol="bridge", origin=asking.id, name=asking.name, port=port, verdict="allow",
            received=carried.received, sent=carried.sent,
        )  # fmt: skip
