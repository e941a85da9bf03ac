"""The supervisor of a host's boxes: `python -m livinglayer.sandbox.host`, started on demand, one for each state directory.

It owns the disk, the spawner, the gateway and every box; clients talk to it over a Unix socket (server.py). Ephemeral boxes end with
their creator. When the host itself dies, egress is closed, ephemeral boxes end, and named ones are adopted when it returns.
"""

import asyncio
import base64
import contextlib
import fcntl
import gc
import hashlib
import json
import os
import resource
import secrets
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import Conflict, Invalid, LayerError, LimitExceeded, NotFound, Unavailable
from ..settings import state_directory
from . import exchanges, inside
from .admission import Admission
from .adoption import adopt
from .blueprint import NAME, VIRTUAL, Blueprint, Tier
from .box import Box, Life
from .bridge import meant, open_bridge
from .building import build
from .cgroups import Cgroup, Cgroups
from .cgroups import remove as remove_cgroup
from .changes import Change, of_upper
from .disk import Disk
from .driver import Driver, Guest, Root, Spec
from .drivers.namespace import NamespaceDriver, NamespaceGuest, Spawner
from .drivers.process import ProcessDriver
from .egress.netns import CHANNEL_PORT, GATEWAY
from .egress.rules import shown
from .egress.secrets import Secrets
from .egress.tls import Authority
from .images import Images
from .keeping import Keeping
from .layers import Layers, chain_of
from .networks import Event, Gateway
from .snapshots import Snapshots
from .store import Collected
from .trace import KEPT, Trace, prune
from .volumes import Volumes
from .waiting import WARM, Waiting
from .zygote import Zygotes

T = TypeVar("T")
IDLE_SECONDS = float(os.environ.get("LAYER_HOST_IDLE", "60"))  # a host that nobody uses ends
CROWD = 512  # boxes, beyond which a host saves file descriptors rather than microseconds


def new_id() -> str:
    """Short, DNS-safe and not to be guessed."""
    return "b" + base64.b32encode(os.urandom(7)).decode().lower()[:11]


class Host:
    """All boxes of one state directory."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.loop = asyncio.get_running_loop()
        self.run, self.records, self.traces = state / "run", state / "boxes", state / "traces"
        for directory, mode in ((state, 0o711), (self.run, 0o700), (self.records, 0o700), (self.traces, 0o700)):
            directory.mkdir(mode=mode, parents=True, exist_ok=True)
            os.chmod(directory, mode)
        self.boxes: dict[str, Box] = {}
        self.names: dict[str, str] = {}
        self.sessions: Counter[str] = Counter()  # leases held by clients
        self.started = time.time()
        self.used = time.monotonic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dead: dict[str, Box] = {}  # boxes that have ended and still hold something
        self.ended: dict[str, Trace] = {}  # traces of boxes that have ended, written behind
        self.endings: deque[tuple[int, str, dict[str, str]]] = deque(maxlen=4096)  # the latest: mark, id, labels
        self._mask: tuple[float, tuple[str, ...]] = (-9.0, ())
        self._free = (0.0, 0)  # when the disk was last looked at, and what was free
        self.waiting = Waiting(self)
        self.keeping = Keeping(self)
        self.admission = Admission(self)
        self._drivers: dict[str, Driver] = {}
        self._works: set[str] = set()  # tiers that were tried and work
        self.stopping = asyncio.Event()
        self.busy = 0  # requests under way
        self.root = os.geteuid() == 0

    async def open(self) -> None:
        """Bring up the parts, adopt what is ours, remove what is nobody's."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for most in (max(limit, 1 << 20), limit):  # a dozen for each box
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
                break
        self.disk = Disk.open(self.state)
        # Setuid files of a box's root lie here with uid 0, and only tier process passes through, each user into its own box.
        for directory, mode in ((self.disk.layers, 0o700), (self.disk.tmp, 0o700), (self.disk.boxes, 0o711)):
            os.chmod(directory, mode)
        os.chmod(self.disk.root, 0o711)
        self.cgroups = Cgroups(self.state)
        self.gateway: Gateway | None = None
        self.spawner: Spawner | None = None
        self.layers = Layers(self.disk, None)
        if self.root:
            self.layers.ca = Authority(self.state / "egress").certificate
            self.gateway = Gateway(self.state)
            self.gateway.on_event = self._on_request
            self.gateway.on_bridge = lambda event: self.spawn_task(self._bridge(event))
            self.spawner = Spawner(self.state, self.disk.root, self.run)
            self.spawner.on_death = self.stopping.set
            self.gateway.refill()
        self.snapshots = Snapshots(self.disk, self.layers)
        self.images = Images(self.layers, self.snapshots)
        self.volumes = Volumes(self.disk)
        self.zygote = Zygotes(self.state) if self.root else None
        await adopt(self)
        while self.cgroups.refill():
            pass
        self.spawn_task(self._tick())

    def spawn_task(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something beside; its errors are printed, not lost."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- tiers ----

    async def driver(self, tier: Tier) -> Driver:
        """The driver of a tier that works here; else Unavailable says what to install."""
        driver = self.driver_of(tier)
        if tier not in self._works:
            await driver.probe()
            self._works.add(tier)
        return driver

    def driver_of(self, tier: Tier) -> Driver:
        """The one driver of a tier, whether or not it works here."""
        if tier not in self._drivers:
            self._drivers[tier] = self._make_driver(tier)
        return self._drivers[tier]

    def _make_driver(self, tier: Tier) -> Driver:
        if tier == "process":
            return ProcessDriver(self.state)
        if self.spawner is None:
            raise Unavailable(f"tier {tier!r} needs root", hint="run the host as root; tier process works without")
        if tier == "namespace":
            return NamespaceDriver(self.spawner)
        if tier == "container":
            from .drivers.container import ContainerDriver

            return ContainerDriver(self)
        if tier == "gvisor":
            from .drivers.gvisor import GvisorDriver

            return GvisorDriver(self)
        if tier == "microvm":
            from .drivers.microvm import MicrovmDriver

            return MicrovmDriver(self)
        from .drivers.vm import VmDriver

        return VmDriver(self)

    # ---- life ----

    def find(self, box: str) -> Box:
        """A box by id or name, or NotFound."""
        found = self.boxes.get(box) or self.boxes.get(self.names.get(box, ""))
        if found is None or found.state == "ended":
            raise NotFound(f"there is no box {box!r}", hint="layer box list")
        return found

    async def create(
        self,
        given: dict[str, Any] | Blueprint,
        *,
        owner: str | None,
        name: str | None = None,
        snapshot: str | None = None,
        secret_values: dict[str, str] | None = None,
        warm: bool = True,
        record: str | None = None,
        replay: str | None = None,
        labels: Mapping[str, str] | None = None,
        token: str | None = None,
        wait: float | None = None,
        life: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> Box:
        """Make a box of this shape and start it; on a host that is full, wait for room so many seconds."""
        if wait is not None and (isinstance(wait, bool) or not isinstance(wait, int | float) or wait < 0):
            raise Invalid(f"wait {wait!r} is not a number of seconds")
        secret_values = secret_values or {}
        blueprint = given if isinstance(given, Blueprint) else Blueprint.of(given)
        if secret_values:
            blueprint = blueprint.changed(secrets=tuple(secret_values))
        check_labels(labels or {})
        Life().change(life or {})
        if blueprint.tier in VIRTUAL and blueprint.base == "host":  # another kernel can't be shown this machine's files
            blueprint = blueprint.changed(base="debian")
        self._check_name(name)
        if self.stopping.is_set():
            raise Unavailable("the host is stopping")
        driver = await self.driver(blueprint.tier)
        layers = await self._layers(blueprint, snapshot, say)
        quick = warm and name is None and not blueprint.mounts and self.admission.affords(blueprint.memory)
        if quick and (box := self.waiting.take(blueprint, layers)):
            box.owner = owner
        else:
            if name is not None:
                self.names[name] = ""  # taken from now on
            try:
                async with self.admission.room(blueprint.memory, wait):
                    box = (snapshot and await self._restore(blueprint, snapshot, name, owner)) or await self.start(
                        blueprint, driver, layers, name=name, owner=owner
                    )
            except BaseException:
                if name is not None:
                    self.names.pop(name, None)
                raise
        box.snapshot, box.labels, box.token = snapshot, dict(labels or {}), token
        self.name_channel(box)
        if box.network and self.gateway:
            box.secrets = secret_values
            try:
                placeholders = await self.gateway.serve(
                    box.id, box.network, blueprint.egress, secret_values, record, replay
                )
                box.environment.update(placeholders)
            except BaseException:
                await self.kill(box)
                raise
        elif blueprint.egress or secret_values:
            await self.kill(box)
            raise Invalid(
                f"tier {blueprint.tier!r} has no gateway, so egress rules and secrets can't be kept there",
                hint="use tier namespace or above",
            )
        if blueprint.wall:
            box.timers.append(self.loop.call_later(blueprint.wall, self._expire, box))
        box.since = time.time()
        if life:
            box.life.change(life)
            box.life.given = True
            self.arm(box)
        box.trace.add(
            "create",
            tier=blueprint.tier,
            base=blueprint.base,
            snapshot=snapshot,
            egress=len(blueprint.egress),
            secrets=list(blueprint.secrets),
        )
        box.save(self.records)
        if warm and WARM and name is None and blueprint.tier == "namespace" and not blueprint.mounts:
            self.waiting.prepare(blueprint, layers)
        return box

    def channel(self, box: Box) -> tuple[int, str]:
        """What programs of a box reach at their LAYER_URL: a listener, and the beginning of that address."""
        if box.network:
            box.network.lent = True
            return box.network.channel, f"http://{GATEWAY}:{CHANNEL_PORT}"
        if box.state == "ended":
            raise Conflict(f"box {box.id!r} has ended")
        if box.driver.capabilities.egress:  # suspended: it has a network again when it goes on
            raise Conflict(f"box {box.id!r} is {box.state}", hint=f"layer box resume {box.name or box.id}")
        if box.channel is None:
            box.channel = socket.create_server(("127.0.0.1", 0), backlog=1024)
            box.channel.setblocking(False)
        return box.channel.fileno(), f"http://127.0.0.1:{box.channel.getsockname()[1]}"

    def name_channel(self, box: Box) -> None:
        """Tell programs of a box that has a token where its channel is."""
        if box.token is not None:
            box.environment["LAYER_URL"] = f"{self.channel(box)[1]}/{box.token}"

    def _check_name(self, name: str | None) -> None:
        if name is not None and (not isinstance(name, str) or not NAME.fullmatch(name)):
            raise Invalid(f"name {name!r} is not lower-case letters, digits and hyphens, 41 at most")
        if name in self.names:
            raise Conflict(f"a box {name!r} exists already", hint=f"layer box kill {name}")

    async def _layers(self, blueprint: Blueprint, snapshot: str | None, say: Callable[[str], None]) -> tuple[str, ...]:
        if blueprint.tier == "process":
            return tuple(await asyncio.to_thread(self.snapshots.load, snapshot)) if snapshot else ()
        if snapshot:
            return tuple(await asyncio.to_thread(self.snapshots.load, snapshot))
        base = blueprint.base
        if base == "host" and not blueprint.packages:
            return self.masked()
        if blueprint.packages:
            steps = json.dumps([base, *blueprint.packages], sort_keys=True, default=str)
            name = f"built-{hashlib.sha256(steps.encode()).hexdigest()[:16]}"
            await build(self, name, base, blueprint.packages, blueprint.egress, say)
            base = name
        return tuple(await asyncio.to_thread(self.layers.resolve, base, say))

    def masked(self) -> tuple[str, ...]:
        """The layers of the base "host" as they are now."""
        if time.monotonic() - self._mask[0] > 1:  # a new name in / must not show in boxes for long
            self._mask = (time.monotonic(), self.layers.resolve("host"))
        return self._mask[1]

    async def start(
        self,
        blueprint: Blueprint,
        driver: Driver,
        layers: tuple[str, ...],
        *,
        name: str | None = None,
        owner: str | None = None,
        upper_from: Path | None = None,
        upper: Path | None = None,
        resume_from: Path | None = None,
    ) -> Box:
        box = self._prepare(blueprint, driver, layers, name, owner, upper_from, upper)
        try:
            await self._connect(box)
            if (
                resume_from and (resume_from / "disk.img").exists()
            ):  # a machine's own disk, of the same moment as its memory
                from .drivers.machine import copy_disk

                await asyncio.to_thread(copy_disk, resume_from / "disk.img", box.spec.root.upper / "disk.img")
            box.guest = await whole(driver.resume(box.spec, resume_from) if resume_from else driver.start(box.spec))
        except BaseException:
            box.state = "ended"
            self._release(box)
            raise
        self.live(box)
        await self._hold(box)
        return box

    async def _hold(self, box: Box) -> None:
        """A named machine outlives us; so must its way out, which is ours."""
        if box.name and box.network and self.spawner and box.blueprint.tier in VIRTUAL:
            await self.spawner.hold(box.id, box.network.fds)

    def _prepare(
        self,
        blueprint: Blueprint,
        driver: Driver,
        layers: tuple[str, ...],
        name: str | None,
        owner: str | None,
        upper_from: Path | None = None,
        upper: Path | None = None,
    ) -> Box:
        """The parts of a box that cost microseconds: a directory, a cgroup, a record."""
        id = upper.name if upper else new_id()
        if time.monotonic() - self._free[0] > 0.5:
            self._free = (time.monotonic(), self.disk.free())
        if self._free[1] < 64 << 20:
            raise LimitExceeded("the host's disk is full", hint="layer box list; kill what is not needed")
        try:
            if upper is not None:
                self.disk.limit(upper, blueprint.disk)
            elif upper_from is None:
                upper = self.disk.create(id, blueprint.disk)
            else:
                upper = self.disk.snapshot(upper_from, self.disk.boxes / id)
                self.disk.limit(upper, blueprint.disk)
            os.chmod(upper, 0o700)
            cgroup = self.cgroups.take(blueprint.memory, blueprint.pids, blueprint.cpu)
        except BaseException:
            self.disk.destroy(self.disk.boxes / id)
            raise
        directory = self.run / "boxes" / id
        spec = Spec(id, blueprint, Root(layers, upper), directory, cgroup, keep=name is not None)
        box = Box(id, blueprint, driver, spec, Trace(self.traces, id), name=name, owner=owner)
        self.boxes[id] = box
        return box

    async def _connect(self, box: Box) -> None:
        if box.driver.capabilities.egress and self.gateway:
            box.network = await self.gateway.take()
            box.spec.netns, box.spec.held = box.network.netns, box.network.fds

    def live(self, box: Box) -> None:
        assert box.guest is not None
        box.state = "running"
        if box.network and box.blueprint.tier in ("namespace", "container"):  # others have no process of theirs in it
            with contextlib.suppress(OSError, IndexError):
                box.network.watch(box.guest.pid)
        if len(self.boxes) > CROWD:
            box.spec.cgroup.rest()
        if box.name:
            self.names[box.name] = box.id
        ca = self.layers.ca is not None and box.blueprint.tier != "process"
        bundle = "/etc/ssl/certs/ca-certificates.crt"
        place = f"/{inside.PLACE}" if box.blueprint.tier != "process" else str(inside.on_host())
        box.environment = {
            "PATH": f"{place}/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
            "LC_CTYPE": "C.UTF-8",  # LANG would have each program open the files of twelve categories, to the same effect
            **({"SHELL": "/bin/bash"} if box.blueprint.tier == "namespace" else {}),  # else bash looks its user up
            **inside.variables(place),
            "LAYER_BOX": box.id,
            **box.spec.environment,
        }
        if ca:
            box.environment |= dict.fromkeys(
                (
                    "SSL_CERT_FILE",
                    "REQUESTS_CA_BUNDLE",
                    "PIP_CERT",
                    "CURL_CA_BUNDLE",
                    "GIT_SSL_CAINFO",
                    "NODE_EXTRA_CA_CERTS",
                ),
                bundle,
            )
        guest = box.guest
        guest.ended.add_done_callback(lambda done: self._on_end(box, guest, done))
        guest.agent.on_close = lambda: self.spawn_task(self._end_orphan(box, guest))

    async def _end_orphan(self, box: Box, guest: Guest) -> None:
        """A guest whose agent is gone is of no use to anybody: if it does not end by itself, it is ended."""
        await asyncio.wait([guest.ended], timeout=1)
        async with box.lock:
            if box.guest is guest and guest.agent.closed and not guest.ended.done():
                await guest.kill()

    def _on_end(self, box: Box, guest: Any, done: "asyncio.Future[str]") -> None:
        """A guest is gone: asked for, or by itself."""
        if box.guest is not guest:
            return
        box.guest = None
        box.end_commands()
        if box.state in ("suspended", "ended"):
            return
        reason = done.result() if not done.cancelled() and not done.exception() else "lost"
        box.trace.add("end", reason=reason, used=box.used())
        box.state = "ended"
        self._release(box)

    def _release(self, box: Box) -> None:
        """The box is no more: its name is free at once, what it held is given back a moment later, when whoever killed it has heard."""
        for timer in (*box.timers, box.alarm):
            if timer is not None:
                timer.cancel()
        for listener in box.listeners.values():
            listener.close()
        box.listeners.clear()
        if box.name:
            self.names.pop(box.name, None)
            box.forget(self.records)
        self.boxes.pop(box.id, None)
        self.admission.wake()
        self.ended[box.id] = box.trace
        self.endings.append((box.trace.mark, box.id, box.labels))
        while len(self.ended) > KEPT:
            self.ended.pop(next(iter(self.ended))).flush()
        self.used = time.monotonic()
        self._dead[box.id] = box
        self.loop.call_later(0.0005, self._bury)

    def _bury(self) -> None:
        """Give back what boxes that have ended held."""
        while self._dead:
            box = self._dead.pop(next(iter(self._dead)))
            self.drop_resources(box)
            if not box.keeps_files and not self.disk.recycle(box.spec.root.upper):
                self.disk.destroy(box.spec.root.upper)
            for directory in (box.spec.directory, self.state / "suspended" / box.id):
                if directory.exists():
                    shutil.rmtree(directory, ignore_errors=True)

    def drop_resources(self, box: Box) -> None:
        """The parts that a suspended box does without."""
        if self.gateway:
            self.gateway.forget(box.id)
        if box.network:
            self.gateway.put_back(box.network) if self.gateway else box.network.close()
            box.network, box.spec.netns, box.spec.held = None, None, []
        if box.root_fd is not None:
            os.close(box.root_fd)
            box.root_fd = None
        if box.channel is not None:
            box.channel.close()
            box.channel = None
        if box.looks is not None:
            box.looks.close()
            box.looks = None
        if box.name and self.spawner and box.blueprint.tier in VIRTUAL:
            self.spawn_task(self._let_go(self.spawner, box.id))
        # Once: by the time a suspended box is killed, the group it had may be another's.
        group, box.spec.cgroup = box.spec.cgroup, Cgroup("none", {})
        if not self.cgroups.put_back(group):
            self.spawn_task(self._remove_later(group.directories))

    async def _let_go(self, spawner: Spawner, id: str) -> None:
        with contextlib.suppress(Unavailable):  # it held nothing of this box
            await spawner.release(id)

    def collect(self, drop_caches: bool = False) -> Collected:
        """Remove what no snapshot, image or living box needs any more; with `drop_caches` the kept steps of builds too."""
        return self.snapshots.collect(
            lambda: {layer for box in list(self.boxes.values()) for layer in box.spec.root.layers}, not drop_caches
        )

    async def _remove_later(self, directories: dict[str, Path]) -> None:
        for delay in (0.001, 0.005, 0.02, 0.1, 0.5, 2):
            await asyncio.sleep(delay)
            if [remove_cgroup(directory) for directory in dict.fromkeys(directories.values())].count(False) == 0:
                return

    def _expire(self, box: Box) -> None:
        box.trace.add("limit", limit="wall", seconds=box.blueprint.wall)
        self.spawn_task(self.kill(box))

    # ---- how long it runs ----

    def arm(self, box: Box) -> None:
        """Look at a box again when its time is over; one that stands still has time."""
        if box.alarm is not None:
            box.alarm.cancel()
            box.alarm = None
        if box.life.until is not None and (box.state == "running" or box.asleep):
            left = min(box.life.until - time.time(), 86400.0)  # a loop's clock can't look further than some weeks
            box.alarm = self.loop.call_later(max(0.0, left), lambda: self.spawn_task(self._time_is_over(box)))

    async def _time_is_over(self, box: Box) -> None:
        life = box.life
        if box.state == "ended" or life.until is None:
            return
        if life.until > time.time() + 0.001:  # it was given more since
            return self.arm(box)
        box.trace.add("limit", limit="time", seconds=life.seconds, then=life.then)
        if life.then == "kill":
            return await self.kill(box)
        life.until, box.rested = None, True
        try:
            if box.state == "running":
                await self.rest(box, life.memory)
        except LayerError as error:  # better gone on than gone
            box.trace.add("limit", limit="time", error=error.message)
            box.rested = False
            life.begin()
            return self.arm(box)
        box.asleep = life.wakes
        box.save(self.records)

    async def rest(self, box: Box, memory: bool = True) -> dict[str, Any]:
        """Let a box stand still, its memory on disk where the tier can keep it there, else where it is; without `memory` only its files stay."""
        box.life.until = None
        if box.alarm is not None:
            box.alarm.cancel()
        if not memory or box.driver.capabilities.suspend_memory:
            found = await self.suspend(box, memory)
        else:
            await self.pause(box)
            found = {"memory": True}
        box.asleep, box.rested = box.life.wakes, True
        box.save(self.records)
        return found

    async def change(
        self, box: Box, life: Mapping[str, Any] | None = None, labels: Mapping[str, str] | None = None
    ) -> None:
        """Another end of its time; other labels."""
        if labels is not None:
            check_labels(labels)
            box.labels = dict(labels)
        if life is not None:
            box.life.change(life)
            if box.state in ("paused", "suspended") and not box.asleep:
                box.life.until = None
            self.arm(box)
        box.save(self.records)

    async def kill(self, box: Box) -> None:
        """End a box; two who ask at once both get what they asked for."""
        async with box.lock:
            if box.state == "ended":
                return
            guest, suspended = box.guest, box.state == "suspended"
            if guest is None or suspended:
                box.trace.add("end", reason="killed", used=box.used())
                box.state = "ended"
                self._release(box)
                return
            await guest.kill()  # _on_end does the rest

    # ---- pause, suspend, wake ----

    async def pause(self, box: Box) -> None:
        """Freeze a box; its memory stays."""
        async with box.lock:
            if box.state == "paused":
                return
            if box.guest is None or box.state != "running":
                raise Conflict(f"box {box.id!r} is {box.state}")
            await box.guest.pause()
            box.state = "paused"
            box.trace.add("pause")
            box.save(self.records)

    async def resume(self, box: Box, life: Mapping[str, Any] | None = None) -> bool:
        """Let a paused or suspended box go on, for so long; whether it stood still."""
        Life().change(life or {})
        async with box.lock:
            stood = box.state != "running"
            await self._resume(box)
            if life is not None:
                box.life.change(life)
                self.arm(box)
                box.save(self.records)
        return stood

    async def _resume(self, box: Box) -> None:
        box.asleep = box.rested = False
        if box.state == "paused" and box.guest is not None:
            await box.guest.resume()
        elif box.state == "suspended":
            keep = self.state / "suspended" / box.id
            box.fresh_work()
            await self.driver(box.blueprint.tier)
            box.spec.cgroup = self.cgroups.take(box.blueprint.memory, box.blueprint.pids, box.blueprint.cpu)
            await self._connect(box)
            try:
                if keep.exists():
                    box.guest = await whole(box.driver.resume(box.spec, keep))
                    shutil.rmtree(keep, ignore_errors=True)
                else:
                    box.guest = await whole(box.driver.start(box.spec))
            except BaseException:
                self.drop_resources(box)
                raise
            extra = {key: value for key, value in box.environment.items() if key in box.secrets}
            self.live(box)
            box.since = time.time()
            await self._hold(box)
            box.environment |= extra
            self.name_channel(box)
            if box.network and self.gateway:
                await self.gateway.serve(box.id, box.network, box.blueprint.egress, box.secrets)
        elif box.state == "running":
            return
        else:
            raise Conflict(f"box {box.id!r} is {box.state}")
        box.state = "running"
        if box.life.until is None:
            box.life.begin()
        self.arm(box)
        box.touch()
        box.trace.add("resume")
        box.save(self.records)

    async def suspend(self, box: Box, memory: bool = True) -> dict[str, Any]:
        """Let go of a box's memory: kept on disk where it is wanted and the tier can, else its processes end and its files stay."""
        async with box.lock:
            keep = self.state / "suspended" / box.id
            if box.state == "suspended":
                if not memory:
                    shutil.rmtree(keep, ignore_errors=True)
                return {"memory": keep.exists()}
            if box.guest is None or box.state not in ("running", "paused"):
                raise Conflict(f"box {box.id!r} is {box.state}")
            keeps = box.driver.capabilities.suspend_memory
            memory = memory and keeps
            guest = box.guest
            used = box.used()
            box.spent = {"cpu": used["cpu"], "seconds": box.spent["seconds"] + time.time() - box.since}
            if keeps:  # what a machine has on its disk is whole only with what it has in memory
                shutil.rmtree(keep, ignore_errors=True)
                keep.mkdir(parents=True, mode=0o700)
                if box.state == "paused":
                    await guest.resume()
                try:
                    await guest.suspend(keep)
                except BaseException:
                    shutil.rmtree(keep, ignore_errors=True)
                    raise
                box.state = "suspended"
                if not memory:
                    shutil.rmtree(keep, ignore_errors=True)
            else:
                box.state = "suspended"
                await guest.kill()
            box.guest = None
            box.end_commands()
            self.drop_resources(box)
            box.trace.add("suspend", memory=memory)
            box.save(self.records)
            return {"memory": memory}

    async def awake(self, box: Box) -> Box:
        """The box, running: one that sleeps for idleness is woken, one that a person paused is not."""
        box.touch()
        self.used = time.monotonic()
        if box.asleep:
            async with box.lock:
                if box.asleep:
                    await self._resume(box)
        if box.state != "running":
            box.agent  # noqa: B018  raises what is wrong
        return box

    async def _tick(self) -> None:
        """Once a second: the idle ladder, the pools, and the end of a host that nobody needs."""
        count = 0
        while True:
            await asyncio.sleep(1)
            count += 1
            for box in list(self.boxes.values()):
                if box.name is None and box.owner and box.owner not in self.sessions and box.state != "starting":
                    self.spawn_task(self.kill(box))  # its client left while it was made
                box.trace.flush()
                if count % 10 == 0 and box.state == "running" and box.commands:
                    box.trace.add("usage", **box.spec.cgroup.stats())
                with contextlib.suppress(LayerError):
                    await self._idle(box)
            self.keeping.tick()
            self.admission.wake()
            if count % 5 == 0:
                self.write_traces()
            if count % 300 == 0:
                prune(self.traces, set(self.boxes))
                exchanges.prune(self.state, set(self.boxes))
            if self.busy or any(box.name or box.owner for box in self.boxes.values()):
                self.used = time.monotonic()
            if IDLE_SECONDS and time.monotonic() - self.used > IDLE_SECONDS:
                self.stopping.set()

    def write_traces(self) -> None:
        """Write the traces of boxes that have ended."""
        for trace in self.ended.values():
            trace.flush()
        self.ended.clear()

    async def _idle(self, box: Box) -> None:
        idle, quiet = box.blueprint.idle, time.monotonic() - box.touched
        if box.commands or box.state == "ended":
            box.touch() if box.commands and not box.asleep else None
            return
        if idle.archive is not None and quiet > idle.archive and box.state in ("running", "paused", "suspended"):
            keep = self.state / "suspended" / box.id
            if box.state == "suspended" and not keep.exists():
                return
            if box.state != "suspended":
                await self.suspend(box)
            shutil.rmtree(keep, ignore_errors=True)  # memory goes, files stay
            box.asleep = True
            box.trace.add("idle", step="archive")
        elif idle.checkpoint is not None and quiet > idle.checkpoint and box.state in ("running", "paused"):
            if box.driver.capabilities.suspend_memory:
                await self.suspend(box)
                box.asleep = True
                box.trace.add("idle", step="checkpoint")
        elif idle.freeze is not None and quiet > idle.freeze and box.state == "running":
            await self.pause(box)
            box.asleep = True
            box.trace.add("idle", step="freeze")

    # ---- snapshots and forks ----

    async def snapshot(self, box: Box, memory: bool = False, holder: str = "") -> dict[str, Any]:
        """Keep the files of a box by content, and its memory where it is asked for and the tier can; it stands still for milliseconds.

        It stays until its `holder` lets go of it, and whoever else holds equal content.
        """
        layers, kept, labels = box.spec.root.layers, None, {}
        async with box.lock:
            if memory:
                keep = getattr(box.guest, "keep", None)
                if keep is None:
                    raise Invalid(
                        f"tier {box.blueprint.tier!r} can't keep memory in a snapshot",
                        hint="without memory=True its files are kept; tiers microvm and vm keep both",
                    )
                kept = self.disk.tmp / f"memory-{secrets.token_hex(8)}"
                kept.mkdir(mode=0o700)
                await keep(kept)
                shape = {key: getattr(box.blueprint, key) for key in ("memory", "pids", "cpu", "disk")}
                labels = {"layers": json.dumps(chain_of(layers)), "shape": json.dumps(shape)}
            sealed = await self._seal(box)
        try:
            taken = await asyncio.to_thread(
                self.snapshots.snapshot,
                sealed,
                layers,
                tier=box.blueprint.tier,
                parent=box.snapshot,
                memory=kept,
                labels=labels,
                holder=holder,
            )
        except BaseException:
            self.disk.destroy(sealed)
            raise
        finally:
            if kept:
                shutil.rmtree(kept, ignore_errors=True)
        box.trace.add("snapshot", snapshot=taken.id, memory=memory)
        return {"id": taken.id, "size": taken.size, "created": taken.created, "parent": taken.parent, "memory": memory}

    async def _restore(self, blueprint: Blueprint, id: str, name: str | None, owner: str | None) -> Box | None:
        """A box with the memory that a snapshot holds; None when it holds none for this tier."""
        found = await asyncio.to_thread(self.snapshots.get, id)
        labels = dict(found.labels)
        if not found.memory or found.tier != blueprint.tier or "layers" not in labels:
            return None
        blueprint = blueprint.changed(**json.loads(labels["shape"]))
        layers = await asyncio.to_thread(self.layers.expand, json.loads(labels["layers"]))
        kept = self.disk.tmp / f"memory-{secrets.token_hex(8)}"
        kept.mkdir(mode=0o700)
        try:
            await asyncio.to_thread(self.snapshots.load_memory, id, kept)
            driver = await self.driver(blueprint.tier)
            return await self.start(blueprint, driver, layers, name=name, owner=owner, resume_from=kept)
        finally:
            shutil.rmtree(kept, ignore_errors=True)

    async def _seal(self, box: Box) -> Path:
        """The changes of a box as they are at one moment."""
        if box.state == "ended":
            raise Conflict(f"box {box.id!r} has ended")
        if box.blueprint.tier in VIRTUAL:
            return await self._from_guest(box)
        with self._still(box):
            return self.disk.seal(box.spec.root.upper)

    async def _from_guest(self, box: Box) -> Path:
        """What a machine changed lies in its own filesystem: its guest writes it down for us."""
        if box.guest is None:
            raise Conflict(
                f"box {box.id!r} is {box.state}", hint="resume it: its files are on a disk that only it reads"
            )
        target = self.disk.subvolume(self.disk.tmp / f"sealed-{secrets.token_hex(8)}")
        try:
            await box.guest.changes(target)  # type: ignore[attr-defined]
        except BaseException:
            self.disk.destroy(target)
            raise
        return target

    async def changes(self, box: Box) -> list[Change]:
        """The files a box has changed so far."""
        return await self.look_at_changes(box, of_upper)

    async def look_at_changes(self, box: Box, look: Callable[[Path], T]) -> T:
        """What `look`, in a thread, finds in the directory that holds what a box has written."""
        if box.blueprint.tier not in VIRTUAL:
            return await asyncio.to_thread(look, box.spec.root.upper / "u")
        async with box.lock:
            target = await self._from_guest(box)
        try:
            return await asyncio.to_thread(look, target)
        finally:
            self.disk.destroy(target)

    @contextlib.contextmanager
    def _still(self, box: Box) -> Any:
        """While inside, nothing of the box runs, so that its files hold one moment."""
        moving = box.state == "running"
        if moving:
            box.spec.cgroup.freeze()
        try:
            yield
        finally:
            if moving:
                box.spec.cgroup.thaw()

    async def fork(
        self,
        box: Box,
        count: int,
        owner: str | None,
        names: Sequence[str | None] = (),
        labels: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        token: str | None = None,
        life: Mapping[str, Any] | None = None,
    ) -> list[Box]:
        """`count` boxes that begin where this one is; it goes on unharmed. With `labels` they have these (or each its own), not its."""
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1000:
            raise Invalid(f"fork count {count!r:.80} is not between 1 and 1000")
        given = [labels or {}] * count if not isinstance(labels, list) else labels
        for each in given:
            check_labels(each)
        Life().change(life or {})
        if names and len(names) != count:
            raise Invalid(f"{count} forks can't have {len(names)} names")
        names = names or [None] * count
        for name in names:
            self._check_name(name)
        if len({*names} - {None}) != sum(name is not None for name in names):
            raise Invalid("two forks can't have one name")
        taken = [name for name in names if name is not None]
        self.names.update(dict.fromkeys(taken, ""))  # from now on
        try:
            children = await self._fork(box, owner, names)
            for child, its in zip(children, given, strict=True) if labels is not None else ():
                child.labels, child.token = dict(its), token
                self.name_channel(child)
                child.life.change(life or {})
                child.life.given = life is not None
                self.arm(child)
                child.save(self.records)
            return children
        finally:
            for name in taken:
                if not self.names.get(name):
                    self.names.pop(name, None)

    async def _fork(self, box: Box, owner: str | None, names: Sequence[str | None]) -> list[Box]:
        driver = box.driver
        async with box.lock:
            if driver.capabilities.fork_memory and box.guest is not None and box.state == "running":
                return await self._fork_memory(box, owner, names)
            frozen = self.disk.tmp / f"fork-{secrets.token_hex(8)}"
            with self._still(box):
                self.disk.snapshot(box.spec.root.upper, frozen)
        try:
            shutil.rmtree(frozen / "w", ignore_errors=True)
            (frozen / "w").mkdir(mode=0o700)
            forks = await asyncio.gather(
                *(
                    self.start(box.blueprint, driver, box.spec.root.layers, name=name, owner=owner, upper_from=frozen)
                    for name in names
                ),
                return_exceptions=True,
            )
        finally:
            self.disk.destroy(frozen)
        return await self._forked(box, forks)

    async def _fork_memory(self, box: Box, owner: str | None, names: Sequence[str | None]) -> list[Box]:
        children = [self._prepare(box.blueprint, box.driver, box.spec.root.layers, name, owner) for name in names]
        try:
            for child in children:
                await self._connect(child)
            assert box.guest is not None
            for child, guest in zip(
                children, await box.driver.fork(box.guest, [child.spec for child in children]), strict=True
            ):
                child.guest = guest
                self.live(child)
        except BaseException:
            for child in children:
                if child.guest is not None:
                    await child.guest.kill()
                elif child.state != "ended":
                    child.state = "ended"
                    self._release(child)
            raise
        return await self._forked(box, children)

    async def _forked(self, box: Box, forks: Sequence[Box | BaseException]) -> list[Box]:
        children = [fork for fork in forks if isinstance(fork, Box)]
        if failed := [fork for fork in forks if isinstance(fork, BaseException)]:
            for child in children:
                await self.kill(child)
            raise failed[0]
        for child in children:
            child.parent, child.secrets, child.labels = box.id, box.secrets, dict(box.labels)
            if child.network and self.gateway:
                child.environment |= await self.gateway.serve(
                    child.id, child.network, box.blueprint.egress, box.secrets
                )
            child.trace.add("create", tier=child.blueprint.tier, parent=box.id)
            child.save(self.records)
        box.trace.add("fork", children=[child.id for child in children])
        return children

    # ---- egress ----

    def _on_request(self, event: Event) -> None:
        box = self.boxes.get(event.get("box", ""))
        fields = {key: value for key, value in event.items() if key not in ("event", "box", "at")}
        if box is None:
            if "model" in event and (trace := self.ended.get(event.get("box", ""))):
                trace.add("network", **fields)  # what its end broke off was paid for all the same
            return
        box.touch()
        verdict = event.get("verdict")
        if verdict in ("allow", "deny"):
            box.requests[verdict] += 1
        box.requests["up"] += event.get("up") or 0
        box.requests["down"] += event.get("down") or 0
        if "to" in event and verdict == "allow":
            fields["peer"] = meant(self, box, event["to"])
        box.trace.add("network", **fields)
        for used in event.get("secrets") or ():
            box.trace.add("secret", name=used, host=event.get("host"))

    async def _bridge(self, event: Event) -> None:
        """A box wants to reach another, as its rules allow."""
        assert self.gateway is not None
        try:
            opened = await open_bridge(self, event)
        except LayerError as error:
            return self.gateway.bridged(event, None, error)
        except BaseException:
            self.gateway.bridged(event, None, Unavailable("the host failed"))
            raise
        self.gateway.bridged(event, opened)

    async def lend(self, box: Box, values: Mapping[str, str] | None = None) -> None:
        """Secrets for a box that a host before this one made: it kept their values nowhere. Without any it goes on as it is, if it waits."""
        waits = self.gateway is not None and box.network is not None and not self.gateway.serves(box.id)
        if values is None and not (waits and box.state != "ended"):
            return
        if values is not None:
            box.secrets = dict(values)
            box.blueprint = box.spec.blueprint = box.blueprint.changed(secrets=tuple(values))
            box.environment |= Secrets(box.secrets).placeholders()
            box.save(self.records)
        if box.network and self.gateway:
            await self.gateway.finish(box.id)
            await self.gateway.serve(box.id, box.network, box.blueprint.egress, box.secrets)

    async def set_egress(self, box: Box, rules: Sequence[Any]) -> None:
        """Other rules from now on; connections that they do not allow are closed."""
        if not self.gateway or not box.network:
            raise Invalid(f"tier {box.blueprint.tier!r} has no gateway")
        changed = box.blueprint.changed(egress=tuple(rules))
        await self.gateway.change(box.id, rules)
        box.blueprint = box.spec.blueprint = changed
        box.trace.add("egress", rules=[shown(rule) for rule in rules])
        box.save(self.records)

    # ---- start and end of the host itself ----

    def session_ended(self, session: str) -> None:
        """A client is gone: its ephemeral boxes go too."""
        for box in list(self.boxes.values()):
            if box.owner == session and box.name is None and box.state != "starting":  # who starts it sees to that
                self.spawn_task(self.kill(box))

    async def close(self) -> None:
        """End: ephemeral boxes are killed, named ones stay with the spawner."""
        self.stopping.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        for box in list(self.boxes.values()):
            with _anyhow(f"box {box.id}"):
                if box.name is None:
                    await self.kill(box)
                elif not isinstance(box.guest, NamespaceGuest) and box.state in ("running", "paused"):
                    wakes = box.asleep or (box.state == "running" and box.life.given)
                    await self.suspend(box)
                    box.asleep = wakes  # it goes on when somebody wants something of it
        await asyncio.sleep(0)  # the end of each is told by a callback
        await asyncio.sleep(0)
        with _anyhow("boxes that have ended"):
            self._bury()
            self.write_traces()
        for box in self.boxes.values():
            with _anyhow(f"box {box.id}"):
                box.trace.flush()
                box.save(self.records)
                box.spec.cgroup.close()
        staying = [box for box in self.boxes.values() if box.state in ("running", "paused")]
        if self.spawner:
            self.spawner.stays = bool(staying)
        for tier, driver in self._drivers.items():
            with _anyhow(f"tier {tier}"):
                await driver.close()
        for part in (self.zygote, self.gateway, self.spawner):
            with _anyhow(type(part).__name__):
                if part:
                    part.close()
        with _anyhow("cgroups"):
            kept = {str(path) for box in staying for path in box.spec.cgroup.directories.values()}
            for _ in range(200):  # a process that is leaving holds its cgroup for a moment
                if [remove_cgroup(path) for path in self.cgroups.leftovers(kept)].count(False) == 0:
                    break
                await asyncio.sleep(0.005)
            self.cgroups.close()
        self.disk.close(unmount=not staying)


def check_labels(labels: object) -> None:
    """Refuses what is not texts by name."""
    if not isinstance(labels, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in labels.items()
    ):
        raise Invalid(f"labels {labels!r} are not texts by name")


@contextlib.contextmanager
def _anyhow(what: str) -> Iterator[None]:
    """What goes wrong at the end of one part is said, and does not keep the others from ending."""
    try:
        yield
    except (Exception, asyncio.CancelledError):
        print(f"the end of {what} went wrong:", file=sys.stderr)
        traceback.print_exc()


async def whole(start: Coroutine[Any, Any, Guest]) -> Guest:
    """A guest's start is never left halfway, where parts of it are nobody's: when its caller leaves, it is finished and ended."""
    task = asyncio.ensure_future(start)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            with contextlib.suppress(LayerError, OSError):
                await (await task).kill()
        raise


def _lock(run: Path) -> int:
    """Only one host for a state directory; Conflict when there is another."""
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(run / "host.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Conflict(f"a host for {run.parent} runs already") from None
    return fd


async def serve(state: Path) -> None:
    """Run the host until it is told to stop or nobody needs it."""
    from .server import listen

    lock = _lock(state / "run")
    host = Host(state)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, host.stopping.set)
    try:
        await host.open()
        server = await listen(host, host.run / "host.sock")
        (host.run / "host.pid").write_text(str(os.getpid()))
        gc.collect()
        gc.freeze()  # what a host begins with stays: it need not be looked at again and again
        gc.set_threshold(10_000, 20, 20)
        await host.stopping.wait()
        server.close()
    finally:
        with contextlib.suppress(FileNotFoundError):
            (host.run / "host.sock").unlink()
        await host.close()
        os.close(lock)


def main() -> None:
    """Entry of `layer host` and of a host that a client starts."""
    try:
        asyncio.run(serve(state_directory()))
    except LayerError as error:
        print(f"layer host: {error.message}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
