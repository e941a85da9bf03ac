"""The host's side of the egress gateway: networks taken ahead, rules opened and changed, requests heard of; restarted when it dies."""

import asyncio
import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Denied, Invalid, LayerError, LimitExceeded, Unavailable
from .exchanges import directory

MESSAGE = 65536
REUSED = 64  # networks kept for the next box
Event = dict[str, Any]


@dataclass
class Network:
    """A network namespace without a device, and what the gateway listens on in it."""

    netns: int
    tcp: int
    dns: int
    channel: int
    used: bool = False  # the gateway has served it: not to be given to another box
    lent: bool = False  # nor one whose channel somebody outside has had
    _counts: int = -1
    _before: tuple[bytes, ...] = ()

    def watch(self, pid: int) -> None:
        """See what is in it now, by a process that is: before anything runs there."""
        if self._counts < 0:
            self._counts = os.open(f"/proc/{pid}/net/sockstat", os.O_RDONLY | os.O_CLOEXEC)
            self._before = self._sockets()

    def calm(self) -> bool:
        """Whether nothing is in it that was not when it was new: no socket, no connection that is over and lingers."""
        return self._counts >= 0 and self._before == self._sockets()

    def _sockets(self) -> tuple[bytes, ...]:
        words = os.pread(self._counts, 4096, 0).split()
        return words[2], words[5], words[9]  # sockets: used N / TCP: inuse N orphan … tw N

    @property
    def fds(self) -> list[int]:
        return [self.netns, self.tcp, self.dns, self.channel]

    def close(self) -> None:
        """Drop our fds; the namespace goes with its last process."""
        for fd in self.fds:
            os.close(fd)
        if self._counts >= 0:
            os.close(self._counts)
            self._counts = -1


class Gateway:
    """The gateway process. While it is down nothing leaves any box; it comes back with the same listeners and rules."""

    def __init__(self, state: Path, ahead: int = 4) -> None:
        self._state, self._ahead = state, ahead
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._tag = 0
        self._spare: list[Network] = []
        self._fetching = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._open: dict[str, tuple[Network, dict[str, Any]]] = {}
        self._closing = False
        self.on_event: Callable[[Event], None] = lambda event: None
        self.on_bridge: Callable[[Event], None] = lambda event: None
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.setblocking(False)
        kept = ("PATH", "LANG", "LAYER_STATE", "SSL_CERT_FILE", "SSL_CERT_DIR")  # whom to believe out there, too
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        log = open(self._state / "run" / "gateway.log", "ab")
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "livinglayer.sandbox.egress", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | {"LAYER_STATE": str(self._state)},
                start_new_session=True,
            )
        theirs.close()
        self._socket = ours
        self._loop.add_reader(ours.fileno(), self._readable)

    @property
    def pid(self) -> int:
        """Of the gateway process."""
        return self._process.pid

    def _readable(self) -> None:
        for _ in range(64):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    MESSAGE, socket.CMSG_SPACE(4 * 16), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            fds = [fd for _, _, raw in ancillary for fd in struct.unpack(f"{len(raw) // 4}i", raw[: len(raw) // 4 * 4])]
            if not data:
                return self._died()
            message = json.loads(data)
            if message.get("event") == "bridge":
                self.on_bridge(message)
            elif "event" in message:
                self.on_event(message)
            elif answer := self._answers.pop(message.get("tag", 0), None):
                if answer.done():
                    for fd in fds:
                        os.close(fd)
                elif message.get("ok"):
                    answer.set_result((message, fds))
                else:
                    answer.set_exception(Invalid(message.get("message") or "the gateway refused", message.get("hint")))

    def _died(self) -> None:
        """Start it again with the listeners that we still hold; connections it had are gone, none went anywhere meanwhile."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._process.kill()
        self._process.wait()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Unavailable("the egress gateway has died", hint="it starts again; try again"))
        self._answers.clear()
        self._fetching = 0
        if self._closing:
            return
        self._start()
        for network, message in [entry for entry in self._open.values() if entry[0].used]:
            self._request(message, [network.tcp, network.dns]).add_done_callback(_ignore)

    def _request(
        self, message: dict[str, Any], fds: Sequence[int] = ()
    ) -> "asyncio.Future[tuple[dict[str, Any], list[int]]]":
        self._tag += 1
        answer: asyncio.Future[tuple[dict[str, Any], list[int]]] = self._loop.create_future()
        self._answers[self._tag] = answer
        data = json.dumps(message | {"tag": self._tag}).encode()
        if len(data) > MESSAGE:
            raise Invalid(f"the rules of a box take {len(data)} bytes, more than {MESSAGE}")
        try:
            socket.send_fds(self._socket, [data], list(fds))
        except OSError as error:
            self._answers.pop(self._tag)
            raise Unavailable(f"the egress gateway can't be reached: {error}") from None
        return answer

    # ---- networks ----

    def refill(self) -> None:
        """Ask for networks until enough are at hand."""
        while len(self._spare) + self._fetching < self._ahead + len(self._waiters):
            self._fetching += 1
            self._request({"do": "network"}).add_done_callback(self._fetched)

    def _fetched(self, answer: "asyncio.Future[tuple[dict[str, Any], list[int]]]") -> None:
        self._fetching = max(0, self._fetching - 1)
        if answer.cancelled() or answer.exception():
            if self._waiters and not self._waiters[0].done():
                self._waiters.pop(0).set_exception(answer.exception() or Unavailable("no network"))
            return
        fds = answer.result()[1]
        if len(fds) != 4:  # the kernel drops what finds no room
            for fd in fds:
                os.close(fd)
            if self._waiters and not self._waiters[0].done():
                full = LimitExceeded("the host has no file descriptors left", hint="raise its limit: ulimit -n")
                self._waiters.pop(0).set_exception(full)
            return
        netns, tcp, dns, channel = fds
        self._spare.append(Network(netns, tcp, dns, channel))
        if self._waiters:
            waiter = self._waiters.pop(0)
            if not waiter.done():
                waiter.set_result(None)

    async def take(self) -> Network:
        """A network for a box."""
        while not self._spare:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            self.refill()
            await waiter
        return self._spare.pop()

    def put_back(self, network: Network) -> None:
        """A network of a box that has ended. One that was never touched serves the next box: nobody has accepted anything in it, nothing
        waits in its listeners or lingers, and all who could have asked are dead. Any other is dropped."""
        waits = select.poll()
        for fd in (network.tcp, network.dns, network.channel):
            waits.register(fd, select.POLLIN)
        kept = not (network.used or network.lent or self._closing) and len(self._spare) < REUSED
        if not kept or waits.poll(0) or not network.calm():
            network.close()
        else:
            self._spare.append(network)

    async def serve(
        self,
        box: str,
        network: Network,
        rules: Sequence[Any],
        secrets: Mapping[str, str],
        record: str | None = None,
        replay: str | None = None,
    ) -> dict[str, str]:
        """Let the gateway serve a box by these rules; the placeholders of its secrets.

        With nothing allowed the gateway hears of the box only when it tries: then it refuses and tells, like any refusal.
        """
        message = {
            "do": "open",
            "box": box,
            "rules": list(rules),
            "secrets": dict(secrets),
            "record": record,
            "replay": replay,
            "exchanges": str(directory(self._state, box)),
        }
        self._open[box] = (network, message)
        if network.used or rules or secrets or record or replay:
            network.used = True
            found: dict[str, str] = (await self._request(message, [network.tcp, network.dns]))[0].get(
                "placeholders", {}
            )
            return found
        for fd in (network.tcp, network.dns):
            self._loop.add_reader(fd, self._tried, box)
        return {}

    def _tried(self, box: str) -> None:
        """A box that may reach nothing tries to: from now on the gateway serves it."""
        network, message = self._open[box]
        self._unwatch(network)
        network.used = True
        self._request(message, [network.tcp, network.dns]).add_done_callback(_ignore)

    def _unwatch(self, network: Network) -> None:
        if not network.used:
            for fd in (network.tcp, network.dns):
                self._loop.remove_reader(fd)

    def serves(self, box: str) -> bool:
        """Whether it was told of a box."""
        return box in self._open

    async def change(self, box: str, rules: Sequence[Any]) -> None:
        """Other rules from now on."""
        network, message = self._open[box]
        if network.used:
            await self._request({"do": "rules", "box": box, "rules": list(rules)})
        else:
            self._unwatch(network)
            network.used = True
            await self._request(message | {"rules": list(rules)}, [network.tcp, network.dns])
        message["rules"] = list(rules)

    def bridged(self, event: Event, to: socket.socket | None, problem: LayerError | None = None) -> None:
        """Answer what it asked for by `on_bridge`: a socket, which is its own from now on, or why there is none."""
        said = {} if problem is None else {"denied": isinstance(problem, Denied), "message": problem.message}
        answer = {"do": "bridged", "bridge": event["bridge"], **said}
        with contextlib.suppress(OSError):  # it has died: so has who asked
            socket.send_fds(self._socket, [json.dumps(answer).encode()], [] if to is None else [to.fileno()])
        if to is not None:
            to.close()

    def forget(self, box: str) -> None:
        """The box has ended."""
        if found := self._open.pop(box, None):
            self._unwatch(found[0])
            if found[0].used:
                try:
                    self._request({"do": "close", "box": box}).add_done_callback(_ignore)
                except Unavailable:
                    pass

    async def finish(self, box: str) -> None:
        """Let the gateway end what the box has open; returns when it has told of all of it."""
        if (found := self._open.pop(box, None)) and found[0].used:
            await self._request({"do": "close", "box": box})

    def close(self) -> None:
        """End the gateway."""
        self._closing = True
        for network in self._spare:
            network.close()
        self._spare.clear()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _ignore(answer: "asyncio.Future[Any]") -> None:
    if not answer.cancelled():
        answer.exception()
