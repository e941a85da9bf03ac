"""Virtual machines as boxes: booted once for each shape, then every start goes on from an image of that boot.

`microvm` and `vm` are this driver on two boards. An image is memory (drivers/memory.py), the state of the devices and the
box's disk at one moment; a template is an image of a machine in which nothing has run yet.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ...errors import Conflict, Corrupt, Invalid, LayerError, TimedOut, Unavailable
from .. import native
from ..agent import Agent
from ..blueprint import Blueprint, Tier
from ..cgroups import Cgroup
from ..commands import encode_exec
from ..disk import Disk
from ..driver import Capabilities, Guest, Spec
from ..layers import Layers
from ..store import HASH
from ..wire import HEAD, Kind, text
from . import memory, qemu
from .artefacts import Artefacts, LayerImage, copy_sparse, locked, new_disk
from .changes import receive
from .qemu import LAYERS, Board, Hardware, Jail, Process, Qemu

NETWORK = "network.pid"  # in the directory of a named box: the pid of its network, and the fds that it holds
DISK = "disk.img"  # in a box's upper directory: all that the box writes
GUEST_OWN = 112 << 20  # what the guest's kernel needs beside the box's memory
MEMORY_STEP = 128 << 20  # sizes of machines, so that many blueprints share one boot
QEMU_OWN = 320 << 20  # QEMU beside the guest's memory: translated code, buffers
QEMU_THREADS = 128  # of QEMU itself, which the host counts too
SPARE = 2  # machines of the shape used last that wait for a box
KEPT = 4  # images held in memory; 60 to 100 MB each
KEPT_ON_DISK = 8
BOOT_SECONDS, KVM_SECONDS, ANSWER_SECONDS = (45, 90, 180), 8, 30
SETTLE_SECONDS = 1.5  # a kernel just started has work left, which every machine made from its image would do again
LINE = "console=ttyS0 quiet loglevel=4 panic=-1 reboot=t nokaslr tsc=reliable no_timer_check random.trust_cpu=on 8250.nr_uarts=1 cryptomgr.notests rcupdate.rcu_expedited=1 net.ifnames=0"

# Without hardware a guest's guards against speculation guard nothing and flush at every system call, and a program that lies at
# another address each time is translated anew each time: without both a command takes a quarter of the time.
EMULATED = "mitigations=off norandmaps"

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Image:
    """A machine at one moment. Its parts are sealed: any number of machines may go on from it. It goes with its last user."""

    hardware: Hardware
    base: LayerImage
    memory: int
    state: int | None  # None: of a machine that runs
    disk: int | None  # None: the box's root is not made yet

    def __del__(self) -> None:
        for fd in (self.memory, self.state, self.disk):
            if fd is not None:
                os.close(fd)


class Parts(Protocol):
    """What this driver uses of a host."""

    @property
    def state(self) -> Path: ...
    @property
    def run(self) -> Path: ...
    @property
    def disk(self) -> Disk: ...
    @property
    def layers(self) -> Layers: ...


Make = Callable[[], Coroutine[Any, Any, Image]]


class Machines:
    """Boxes in virtual machines on one board. The base "host" can't be had: another kernel can't be shown the host's own files."""

    def __init__(self, tier: Tier, board: Board, isolation: str, parts: Parts, spare: int = SPARE) -> None:
        self.tier, self.board, self.parts, self.spare = tier, board, parts, spare
        self.run, self.native = parts.run, native.build(parts.state)
        self.capabilities = Capabilities(isolation=isolation, suspend_memory=True, fork_memory=True, live_fork=True)
        self.artefacts = Artefacts(say=self.say)
        self.name = f"livinglayer-{tier}-" + hashlib.sha256(str(self.run.resolve()).encode()).hexdigest()[:16]
        self._jail: Jail | None = None
        self._accelerator: str | None = None
        self._images: dict[str, Image] = {}  # least recently used first
        self._making: dict[str, asyncio.Task[Image]] = {}
        self._pool: list[Spare] = []
        self._refilling = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._seen: set[str] = set()  # roots of snapshots that were started once
        self._closed = False

    def say(self, line: str) -> None:
        """Tell whoever runs the host what takes long."""
        print(line, file=sys.stderr, flush=True)

    # ---- the driver's promises ----

    async def probe(self) -> None:
        """Boot a machine (once: its image is kept) and hear it; Unavailable when that can't be done here."""
        await asyncio.to_thread(self._prepare)
        await self._accelerate()

    async def start(self, spec: Spec) -> "MachineGuest":
        """A fresh box. The first of its shape takes seconds, every later one tens of milliseconds."""
        layers = await asyncio.to_thread(self._layers, spec)
        hardware = await self._hardware(spec.blueprint, spec.netns is not None)
        limits = (spec.blueprint.disk, spec.blueprint.pids, spec.blueprint.memory)
        key = _key("root", self._boot_key(hardware, layers[-1]), [layer.digest for layer in layers], limits)
        # The root of a snapshot may never be wanted again: its image is made at its second start. One with files of its own has none.
        own = (spec.root.upper / DISK).exists()
        plain = not own and (len(layers) == 1 or not HASH.fullmatch(spec.root.layers[0]))
        if not own and (plain or key in self._seen):
            image, root = await self._image(key, lambda: self._built(hardware, layers, limits)), None
        else:
            image, root = (
                await self._booted(hardware, layers[-1]),
                f"start layers={len(layers) - 1} pids={limits[1]} memory={limits[2]}",
            )
        self._seen.add(key)
        spare = next((spare for spare in self._pool if spare.key == key and not own), None)
        if spare:
            self._pool.remove(spare)
            guest = await self._give(spare, spec)
        else:
            guest = await self._greet(await self._begin(image, spec, layers), spec, image, root)
        if plain:
            self._background(self._refill(key, image, layers))
        return guest

    async def resume(self, spec: Spec, directory: Path) -> "MachineGuest":
        """The machine that `suspend` left in `directory`, with its processes; the directory may be used again."""
        layers = await asyncio.to_thread(self._layers, spec)
        try:
            kept = json.loads((directory / "machine.json").read_text())
            state = memory.of_bytes((directory / "state").read_bytes())
        except (OSError, ValueError) as error:
            raise Corrupt(f"{directory} holds no suspended machine: {error}") from None
        hardware = Hardware(self.board, kept["accelerator"], kept["memory"], kept["cpus"], kept["network"])
        if kept["qemu"] != qemu.version() or kept["layers"] != [layer.digest for layer in layers]:
            os.close(state)
            raise Conflict(
                f"box {spec.id!r} was suspended on another QEMU or other layers, which its memory can't go on with",
                hint="start it anew from its files",
            )
        ram = await asyncio.to_thread(memory.load, directory / "ram", hardware.memory)
        image = Image(hardware, layers[-1], ram, state, None)
        return (await self._revive(image, [spec], layers, kept["number"]))[0]

    async def fork(self, guest: Guest, specs: list[Spec]) -> list[Guest]:
        """Machines that go on from where this one is; it is stopped only while what it changed is copied."""
        if not isinstance(guest, MachineGuest):
            raise Invalid(f"a {type(guest).__name__} can't be forked by tier {self.tier!r}")
        if not specs:
            return []
        layers = await asyncio.to_thread(self._layers, guest.spec)
        first = specs[0].root.upper / DISK
        async with guest.captured(first) as image:
            for other in specs[1:]:
                await asyncio.to_thread(copy_disk, first, other.root.upper / DISK)
            return [*await self._revive(image, specs, layers, guest.agent._number)]

    def adopt(self, spec: Spec) -> "asyncio.Task[MachineGuest]":
        """A named box that outlived the host that started it; `spec.held` and `spec.netns` become copies of what that one gave it."""
        return asyncio.ensure_future(self._adopt(spec))

    def clean(self, alive: set[str], say: Callable[[str], None]) -> None:
        """End machines of an earlier host that no box of `alive` names."""
        keep = set()
        for record in (self.run / "boxes").glob("*/machine.pid"):
            with contextlib.suppress(OSError, ValueError):
                if record.parent.name in alive:
                    keep.add(int(record.read_text()))
                else:
                    for name in (*qemu.PORTS, NETWORK, record.name):
                        (record.parent / name).unlink(missing_ok=True)
        for pid in self.processes():
            if pid not in keep:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    say(f"ended QEMU {pid} of tier {self.tier}, which belonged to no box")
        shutil.rmtree(self.run / f"{self.tier}-pool", ignore_errors=True)

    def let_live(self, pid: int) -> None:
        """A machine of a named box: it stays when the host dies."""
        if self._jail:
            self._jail.let_live(pid)

    def processes(self) -> Iterator[int]:
        """Every QEMU of this driver and run directory, of whatever host."""
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                    if len(words) > 2 and words[1] == b"-name" and words[2] == self.name.encode():
                        yield int(entry)

    async def close(self) -> None:
        """End the machines that wait for boxes; boxes stay."""
        self._closed = True
        for task in [*self._tasks, *self._making.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._making.values(), return_exceptions=True)
        while self._pool:
            await self._discard(self._pool.pop())
        self._images.clear()
        if self._jail:
            self._jail.close()
            self._jail = None
        with contextlib.suppress(OSError):
            (self.run / f"{self.tier}-pool").rmdir()

    # ---- shapes ----

    def _prepare(self) -> None:
        qemu.version()
        self.artefacts.initrd(self.native / "init")
        self.artefacts.program("vmnet", "-lslirp")

    def _layers(self, spec: Spec) -> list[LayerImage]:
        names = spec.root.layers
        if spec.blueprint.mounts:
            raise Invalid(
                f"tier {self.tier!r} can't show directories of the host to another kernel",
                hint="upload them, or use tier namespace",
            )
        if not names or names[-1] == "host":
            raise Invalid(f"tier {self.tier!r} can't show the host's own files to another kernel", hint="base: debian")
        if len(names) - 1 > LAYERS:
            raise Invalid(
                f"box {spec.id!r} has {len(names)} layers, a machine takes {LAYERS + 1}", hint="flatten the snapshot"
            )
        return [self.artefacts.layer(name, self.parts.layers.path) for name in names]

    async def _hardware(self, blueprint: Blueprint, network: bool) -> Hardware:
        size = math.ceil((blueprint.memory + GUEST_OWN) / MEMORY_STEP) * MEMORY_STEP
        cpus = max(1, min(math.ceil(blueprint.cpu), os.cpu_count() or 1))
        return Hardware(self.board, await self._accelerate(), size, cpus, network)

    async def _accelerate(self) -> str:
        """kvm when a guest really boots with it, found once for each start of the host's kernel; else tcg."""
        if self._accelerator is None:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            note = self.artefacts.root / f"accelerator-{boot}"
            with contextlib.suppress(FileNotFoundError):
                self._accelerator = note.read_text()
            if self._accelerator not in ("tcg", "kvm"):
                self._accelerator = await self._try_kvm()
                for old in self.artefacts.root.glob("accelerator-*"):
                    old.unlink(missing_ok=True)
                note.write_text(self._accelerator)
        return self._accelerator

    async def _try_kvm(self) -> str:
        if not os.access("/dev/kvm", os.R_OK | os.W_OK):
            return "tcg"
        self.say("trying whether KVM works")
        hardware = Hardware(self.board, "kvm", 256 << 20, 1, False)
        blank = memory.seal(memory.blank(hardware.memory))
        nothing = self.artefacts.disk(1 << 20)
        try:
            # it has no base to mount: its console tells that it came so far
            machine = await self._boot(hardware, LayerImage(nothing, ""), blank)
        except LayerError:
            return "tcg"
        finally:
            os.close(blank)
        try:
            deadline = time.monotonic() + KVM_SECONDS
            while time.monotonic() < deadline:
                if "init:" in await machine.console() or machine.process.ended.done():
                    return "kvm"
                await asyncio.sleep(0.1)
            return "tcg"
        finally:
            await machine.kill()

    def _boot_key(self, hardware: Hardware, base: LayerImage) -> str:
        kernel = (self.artefacts.kernel() / "digest").read_text()
        init = hashlib.sha256((self.native / "init").read_bytes()).hexdigest()
        return _key("boot", asdict(hardware), base.digest, kernel, init, qemu.version(), _frequency(), LINE, EMULATED)

    # ---- images ----

    async def _image(self, key: str, make: Make) -> Image:
        """An image from memory, from disk, or made now; made once however many ask."""
        if key in self._images:
            self._images[key] = image = self._images.pop(key)
            return image
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.ensure_future(self._obtain(key, make))
            task.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(task)

    async def _obtain(self, key: str, make: Make) -> Image:
        place = self.artefacts.root / f"image-{key}"
        self.artefacts.root.mkdir(parents=True, exist_ok=True)
        lock = await asyncio.to_thread(_Lock, place.with_suffix(".lock"))
        try:
            image = await asyncio.to_thread(self._from_disk, place)
            if image is None:
                image = await make()
                await asyncio.to_thread(self._to_disk, image, place)
        finally:
            lock.release()
        self._images[key] = image
        while len(self._images) > KEPT:
            old = next(iter(self._images))
            self._background(self._forget(old))
            del self._images[old]
        return image

    async def _forget(self, key: str) -> None:
        for spare in [spare for spare in self._pool if spare.key == key]:
            self._pool.remove(spare)
            await self._discard(spare)

    def _from_disk(self, place: Path) -> Image | None:
        try:
            kept = json.loads((place / "image.json").read_text())
            hardware = Hardware(self.board, kept["accelerator"], kept["memory"], kept["cpus"], kept["network"])
            base = LayerImage(Path(kept["base"]), kept["digest"])
            if not base.path.exists():
                return None
            disk = None
            if kept["disk"]:
                source = os.open(place / "disk", os.O_RDONLY | os.O_CLOEXEC)
                disk = memory.blank(0, "disk")
                copy_sparse(source, disk)
                os.close(source)
                memory.seal(disk)
            os.utime(place)
            return Image(
                hardware,
                base,
                memory.load(place / "ram", hardware.memory),
                memory.of_bytes((place / "state").read_bytes()),
                disk,
            )
        except (OSError, ValueError, KeyError, Corrupt):
            return None

    def _to_disk(self, image: Image, place: Path) -> None:
        aside = place.with_suffix(f".{secrets.token_hex(4)}")
        aside.mkdir(mode=0o700)
        memory.save(image.memory, aside / "ram")
        assert image.state is not None
        memory.save(image.state, aside / "state")
        if image.disk is not None:
            memory.save(image.disk, aside / "disk")
        kept = _plain(image.hardware) | {
            "base": str(image.base.path),
            "digest": image.base.digest,
            "disk": image.disk is not None,
        }
        (aside / "image.json").write_text(json.dumps(kept))
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)
        kept_places = sorted(
            (path for path in place.parent.glob("image-*") if path.is_dir()), key=lambda path: path.stat().st_mtime
        )
        for old in kept_places[:-KEPT_ON_DISK]:
            shutil.rmtree(old, ignore_errors=True)

    async def _booted(self, hardware: Hardware, base: LayerImage) -> Image:
        """The image of a machine that has started and has no root yet."""
        key = self._boot_key(hardware, base)

        async def boot() -> Image:
            self.say(f"booting a {hardware.memory >> 20} MB {self.tier} once, to start from its image ever after")
            for seconds in BOOT_SECONDS[:-1]:  # an emulated processor hangs now and then while it measures time
                try:
                    return await self._boot_once(hardware, base, seconds)
                except TimedOut as error:
                    self.say(f"trying again: {error}")
            return await self._boot_once(hardware, base, BOOT_SECONDS[-1])

        return await self._image(key, boot)

    async def _boot_once(self, hardware: Hardware, base: LayerImage, seconds: float) -> Image:
        blank = memory.seal(memory.blank(hardware.memory))
        machine = await self._boot(hardware, base, blank)
        try:
            heard = await machine.hear(None, seconds)
            if heard != "ready":
                raise Unavailable(f"the guest did not come up: {heard}: {await machine.console()}")
            for _ in range(3):  # the ways a started box will go, walked once
                await machine.tell(f"refresh time={time.time_ns()}")
            await asyncio.sleep(SETTLE_SECONDS)
            return await self._capture(machine, blank, base, None)
        finally:
            await machine.kill()
            os.close(blank)

    async def _built(self, hardware: Hardware, layers: Sequence[LayerImage], limits: tuple[int, int, int]) -> Image:
        """The image of a machine whose root is made and limited, with nothing run in it."""
        booted = await self._booted(hardware, layers[-1])
        disk = memory.blank(0, "disk")
        source = os.open(await asyncio.to_thread(self.artefacts.disk, limits[0]), os.O_RDONLY | os.O_CLOEXEC)
        try:
            await asyncio.to_thread(copy_sparse, source, disk)
        finally:
            os.close(source)
        machine = await self._spawn(booted, None)
        try:
            await self._insert(machine, Path(f"/proc/self/fd/{disk}"), layers)
            assert booted.state is not None
            await machine.load(booted.state)
            await machine.tell(
                f"start layers={len(layers) - 1} pids={limits[1]} memory={limits[2]} time={time.time_ns()}",
                ANSWER_SECONDS,
            )
            for _ in range(3):
                await _introduce(machine.agent, "box")
            await asyncio.sleep(0.3)
            return await self._capture(machine, booted.memory, layers[-1], disk)
        finally:
            await machine.kill()

    async def _capture(self, machine: Qemu, begun: int, base: LayerImage, disk: int | None) -> Image:
        """The image of a machine of ours that nobody else talks to."""
        await machine.qmp.run("stop")
        ram, state = memory.blank(machine.hardware.memory), memory.blank(0, "state")
        await machine.save(state)
        fresh = disk is None  # it began with nothing

        def copy() -> None:
            if not fresh:
                copy_sparse(begun, ram)
            memory.capture(machine.process.pid, begun, ram, zeros=not fresh)

        await asyncio.to_thread(copy)
        return Image(
            machine.hardware, base, memory.seal(ram), memory.seal(state), None if disk is None else memory.seal(disk)
        )

    # ---- machines ----

    async def _boot(self, hardware: Hardware, base: LayerImage, blank: int) -> Qemu:
        kernel, initrd = await asyncio.to_thread(
            lambda: (self.artefacts.kernel(), self.artefacts.initrd(self.native / "init"))
        )
        line = f"{LINE} {_frequency()} {EMULATED if hardware.accelerator == 'tcg' else ''}"
        directory = self._place()
        return await Qemu.start(
            await self._jailed(),
            hardware,
            directory,
            self.name,
            blank,
            base.path,
            boot=(kernel / "vmlinux", initrd, line),
        )

    async def _jailed(self) -> Jail:
        if self._jail is None:
            jail = await asyncio.to_thread(Jail, self.artefacts)
            if self._jail is None:
                self._jail = jail
            else:
                jail.close()
        return self._jail

    def _place(self) -> Path:
        return self.run / f"{self.tier}-pool" / secrets.token_hex(6)

    async def _spawn(self, image: Image, spec: Spec | None) -> Qemu:
        directory = spec.directory if spec else self._place()
        cgroup = spec.cgroup if spec else None
        return await Qemu.start(
            await self._jailed(), image.hardware, directory, self.name, image.memory, image.base.path, cgroup=cgroup
        )

    async def _begin(self, image: Image, spec: Spec, layers: Sequence[LayerImage]) -> Qemu:
        """A machine that goes on from an image, as the box of `spec`."""
        self._admit(spec, image.hardware)
        disk = spec.root.upper / DISK
        if not disk.exists():
            if image.disk is not None:
                await asyncio.to_thread(new_disk, disk, image.disk)
            else:
                empty = await asyncio.to_thread(self.artefacts.disk, spec.blueprint.disk)
                await asyncio.to_thread(copy_disk, empty, disk)
        machine = await self._spawn(image, spec)
        try:
            await self._connect(machine, spec)
            await self._insert(machine, disk, layers)
            assert image.state is not None
            await machine.load(image.state)
        except BaseException:
            await machine.kill()
            raise
        return machine

    def _admit(self, spec: Spec, hardware: Hardware) -> None:
        """A box's limits bind inside its guest. On the host they leave room for QEMU, and for an image's empty pages, which may count once more."""
        blueprint = spec.blueprint
        spec.cgroup.limit(2 * hardware.memory + QEMU_OWN, blueprint.pids + QEMU_THREADS, blueprint.cpu)
        with contextlib.suppress(LayerError):
            self.parts.disk.limit(spec.root.upper, blueprint.disk + (blueprint.disk >> 3) + (16 << 20))

    async def _give(self, spare: "Spare", spec: Spec) -> "MachineGuest":
        """A machine that waited becomes the box of `spec`."""
        machine = spare.machine
        try:
            self._admit(spec, machine.hardware)
            machine.move(spec.directory)
            self._background(_join(spec.cgroup, machine.process.pid))
            await self._connect(machine, spec)
            await asyncio.to_thread(new_disk, spec.root.upper / DISK, spare.disk)
            await self._insert(machine, spec.root.upper / DISK, ())
            await machine.qmp.run("cont")
            await spare.agent.set_clock(time.time_ns(), spec.id[:63])
        except BaseException:
            spare.agent.close()
            await machine.kill()
            raise
        finally:
            os.close(spare.disk)
        return MachineGuest(self, spec, machine, spare.image, spare.agent)

    async def _insert(self, machine: Qemu, disk: Path, layers: Sequence[LayerImage]) -> None:
        for slot, path in enumerate([disk, *(layer.path for layer in layers[:-1])]):
            fd = os.open(path, (os.O_RDONLY if slot else os.O_RDWR) | os.O_CLOEXEC)
            try:
                await machine.attach(slot, fd, writable=not slot)
            finally:
                os.close(fd)

    async def _connect(self, machine: Qemu, spec: Spec) -> None:
        """Give the machine's network card the box's network namespace. It ends when the machine does."""
        if machine.wire is None or spec.netns is None:
            return
        wire, machine.wire = machine.wire, None
        program = self.artefacts.program("vmnet", "-lslirp")
        jail = await self._jailed()
        # A named box's listeners are held by its network, so that the next host finds them there.
        held = spec.held if spec.keep else []
        netns = os.dup(spec.netns)  # the launcher closes what it has joined, and that one may be held, too
        try:
            with wire:
                fds = [wire.fileno(), *held]
                process = await Process.start(jail, program, [str(fds[0])], fds, spec.cgroup, netns)
        finally:
            os.close(netns)
        if spec.keep:
            jail.let_live(process.pid)
            (spec.directory / NETWORK).write_text(" ".join(map(str, (process.pid, *held))))

    async def _revive(
        self, image: Image, specs: Sequence[Spec], layers: Sequence[LayerImage], number: int
    ) -> list["MachineGuest"]:
        """Machines whose agents already run: they are told who they are now, and asked where they were."""

        turns = asyncio.Semaphore(2 * (os.cpu_count() or 1))  # more at once only take each other's time

        async def one(spec: Spec) -> MachineGuest:
            async with turns:
                return await self._greet(await self._begin(image, spec, layers), spec, image, None, number)

        done = await asyncio.gather(*(one(spec) for spec in specs), return_exceptions=True)
        guests = [guest for guest in done if isinstance(guest, MachineGuest)]
        for failed in done:
            if isinstance(failed, BaseException):  # all or none
                for guest in guests:
                    await guest.kill()
                raise failed
        return guests

    async def _greet(
        self, machine: Qemu, spec: Spec, image: Image, root: str | None, number: int = 0
    ) -> "MachineGuest":
        """Have a machine's root made, if need be, and find its agent, which may be in the middle of a sentence to somebody else."""
        try:
            if root is not None:
                await machine.tell(root, ANSWER_SECONDS)
            await _introduce(machine.agent, spec.id)
        except BaseException:
            await machine.kill()
            raise
        agent = Agent(machine.agent)
        agent.ready.set_result(None)
        agent._number = number  # commands that run in it have numbers already
        return MachineGuest(self, spec, machine, image, agent)

    async def _adopt(self, spec: Spec) -> "MachineGuest":
        try:
            pid = int((spec.directory / "machine.pid").read_text())
        except (OSError, ValueError):
            raise Unavailable(f"box {spec.id!r} left no machine behind") from None
        if pid not in set(self.processes()):
            raise Unavailable(f"the machine of box {spec.id!r} has ended")
        network = spec.directory / NETWORK
        if network.exists() and not spec.held:  # the host has them, unless nobody kept them for it
            other, *held = map(int, network.read_text().split())
            spec.held = _borrow(other, held)
            spec.netns = spec.held[0] if spec.held else None
        hardware = await self._hardware(spec.blueprint, network.exists())
        machine = Qemu(hardware, spec.directory, Process(pid))
        await machine.connect()
        base = (await asyncio.to_thread(self._layers, spec))[-1]
        image = Image(hardware, base, _mapped(pid), None, None)
        return await self._greet(machine, spec, image, None, 1 << 30)  # above the numbers of an earlier host

    async def _refill(self, key: str, image: Image, layers: Sequence[LayerImage]) -> None:
        """Have machines of the shape that was used last wait for boxes: running, then stopped."""
        await asyncio.sleep(0.05)  # the box that was just started goes first
        async with self._refilling:
            while (
                not self._closed and key in self._images and sum(spare.key == key for spare in self._pool) < self.spare
            ):
                self._pool.append(await self._wait(key, image, layers))
                while len(self._pool) > self.spare + 1:
                    await self._discard(self._pool.pop(0))

    async def _wait(self, key: str, image: Image, layers: Sequence[LayerImage]) -> "Spare":
        machine = await self._spawn(image, None)
        agent: Agent | None = None
        try:
            assert image.disk is not None and image.state is not None
            disk = memory.blank(0, "disk")
            await asyncio.to_thread(copy_sparse, image.disk, disk)
            await self._insert(machine, Path(f"/proc/self/fd/{disk}"), layers)
            await machine.load(image.state)
            await _introduce(machine.agent, "box")
            agent = Agent(machine.agent)
            agent.ready.set_result(None)
            # What has run once is translated: under TCG a box's first command would take twenty times as long.
            await asyncio.wait_for(_try(agent, ["/bin/sh", "-c", ":"]), ANSWER_SECONDS)
            await machine.qmp.run("stop")
        except BaseException:
            if agent is not None:
                agent.close()
            await machine.kill()
            raise
        return Spare(key, machine, agent, image, disk)

    async def _discard(self, spare: "Spare") -> None:
        spare.agent.close()
        await spare.machine.kill()
        os.close(spare.disk)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a spare less is no failure


@dataclass(frozen=True)
class Spare:
    """A machine that waits, stopped, for a box; it differs from a new one only in being quicker."""

    key: str
    machine: Qemu
    agent: Agent
    image: Image
    disk: int


class MachineGuest:
    """One running machine. `image` is the memory it began with."""

    def __init__(self, driver: Machines, spec: Spec, machine: Qemu, image: Image, agent: Agent) -> None:
        self.driver, self.spec, self.machine, self.agent = driver, spec, machine, agent
        self.pid = machine.process.pid
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._suspended = False
        self.image: Image | None = image
        self.paused = False
        self._lock = asyncio.Lock()
        machine.process.ended.add_done_callback(self._gone)
        (spec.directory / "machine.pid").write_text(str(self.pid))
        if spec.keep:
            driver.let_live(self.pid)

    def _gone(self, done: "asyncio.Future[str]") -> None:
        self.agent.close()
        self.image = None
        if not self._suspended:
            self.ended.set_result(done.result())

    async def pause(self) -> None:
        """Stop its processors; memory stays."""
        async with self._lock:
            await self.machine.qmp.run("stop")
            self.paused = True

    async def resume(self) -> None:
        """Let it go on; its clock is set."""
        async with self._lock:
            if self.paused:
                await self.machine.qmp.run("cont")
                self.paused = False
                await self.agent.set_clock(time.time_ns(), "")

    async def suspend(self, directory: Path) -> None:
        """Memory and devices into `directory`; the disk stays in the box's upper directory. Then the machine is gone."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        layers = await asyncio.to_thread(self.driver._layers, self.spec)
        await self._going(self.machine.tell("sync", 120))  # memory may be thrown away and the files kept
        async with self.captured(None, goes_on=False) as image:
            await self._write_down(image, layers, directory)
            self._suspended = True
            await self.kill("suspended")
            # after our caller has taken note: nobody should think that it died
            asyncio.get_running_loop().call_soon(self.ended.set_result, "suspended")

    async def keep(self, directory: Path) -> None:
        """Memory, devices and disk into `directory`, all of one moment; the machine goes on."""
        layers = await asyncio.to_thread(self.driver._layers, self.spec)
        async with self.captured(directory / DISK) as image:
            await self._write_down(image, layers, directory)

    async def _write_down(self, image: Image, layers: Sequence[LayerImage], directory: Path) -> None:
        assert image.state is not None
        await asyncio.to_thread(memory.save, image.memory, directory / "ram")
        await asyncio.to_thread(memory.save, image.state, directory / "state")
        kept = _plain(self.machine.hardware) | {
            "qemu": qemu.version(),
            "layers": [layer.digest for layer in layers],
            "number": self.agent._number,
        }
        (directory / "machine.json").write_text(json.dumps(kept))

    async def kill(self, reason: str = "killed") -> None:
        """The process is gone when this returns; asking twice is fine."""
        await self.machine.kill(reason)
        for name in ("machine.pid", NETWORK):
            (self.spec.directory / name).unlink(missing_ok=True)

    async def changes(self, target: Path) -> None:
        """Write what the box changed into `target`, an empty directory, as the upper layer of an overlay: for a snapshot of files."""
        await self._going(self._export(target))

    async def _export(self, target: Path) -> None:
        await self.machine.tell("export", ANSWER_SECONDS)
        await receive(self.machine.receive, target, self.spec.blueprint.disk * 2)

    async def _going(self, work: Coroutine[Any, Any, None]) -> None:
        """Have the guest do something, paused or not."""
        async with self._lock:
            if self.paused:
                await self.machine.qmp.run("cont")
            try:
                await work
            finally:
                if self.paused and not self.ended.done():
                    await self.machine.qmp.run("stop")

    @contextlib.asynccontextmanager
    async def captured(self, disk: Path | None, goes_on: bool = True) -> AsyncIterator[Image]:
        """An image of it as it runs; its disk is copied to `disk` at the same moment. It goes on before the image is used."""
        async with self._lock:
            machine, begun = self.machine, self.image
            if begun is None:
                raise Unavailable(f"box {self.spec.id!r} has ended")
            ram, state = memory.blank(machine.hardware.memory), memory.blank(0, "state")
            try:
                await asyncio.to_thread(copy_sparse, begun.memory, ram)  # while it runs: this part never changes
                if self.paused:
                    await machine.qmp.run("cont")
                try:
                    await self._quiet()
                    await machine.qmp.run("stop")
                    await machine.save(state)
                    await asyncio.to_thread(memory.capture, self.pid, begun.memory, ram)
                    if disk is not None:
                        await asyncio.to_thread(copy_disk, self.spec.root.upper / DISK, disk)
                finally:
                    if goes_on and not self.paused and not self.ended.done():
                        await machine.qmp.run("cont")
                    machine.agent.held = False
            except BaseException:
                os.close(ram)
                os.close(state)
                if not goes_on and not self.paused and not self.ended.done():
                    await machine.qmp.run("cont")
                raise
        yield Image(machine.hardware, begun.base, memory.seal(ram), memory.seal(state), None)

    async def _quiet(self) -> None:
        """Return between two frames to the agent, with nothing on the way to it and more held back."""
        line = self.machine.agent
        for _ in range(5000):
            if not self.agent.backlog and not _unread(line):
                line.held = True
                return
            await asyncio.sleep(0.001)
        raise Conflict(
            f"box {self.spec.id!r} takes no input, so it can't be captured", hint="try again when it is less busy"
        )


class _Lock:
    """A lock file held across awaits."""

    def __init__(self, path: Path) -> None:
        self._context = locked(path)
        self._context.__enter__()

    def release(self) -> None:
        self._context.__exit__(None, None, None)


async def _join(cgroup: Cgroup, pid: int) -> None:
    """Move a running process into a box's cgroups. It stalls for milliseconds on cgroup v1, so nobody waits for it."""

    def write() -> None:
        for directory in dict.fromkeys(cgroup.directories.values()):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                (directory / "cgroup.procs").write_text(str(pid))

    await asyncio.to_thread(write)


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _plain(hardware: Hardware) -> dict[str, object]:
    return {
        "accelerator": hardware.accelerator,
        "memory": hardware.memory,
        "cpus": hardware.cpus,
        "network": hardware.network,
    }


def copy_disk(source: Path, target: Path) -> None:
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        new_disk(target, fd)
    finally:
        os.close(fd)


def _frequency() -> str:
    """Told to a guest, it need not measure: under TCG that hangs now and then."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            khz = round(float(line.split(":")[1]) * 1000)
            return f"tsc_early_khz={khz} lpj={khz * 4}"
    return ""


def _unread(line: socket.socket) -> int:
    """Bytes sent that QEMU has not read."""
    (count,) = struct.unpack("i", fcntl.ioctl(line, termios.TIOCOUTQ, b"\0\0\0\0"))
    return int(count)


def _mapped(pid: int) -> int:
    """The image that an adopted machine began with, through its own fd."""
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{entry}").startswith("/memfd:ram"):
                return os.open(f"/proc/{pid}/fd/{entry}", os.O_RDONLY | os.O_CLOEXEC)
    raise Unavailable(f"process {pid} has no memory image")


def _borrow(pid: int, numbers: Sequence[int]) -> list[int]:
    """Copies of another process's fds."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise Unavailable(f"the network of the box, process {pid}, has ended") from None
    try:
        found = [int(_libc.syscall(_PIDFD_GETFD, pidfd, number, 0)) for number in numbers]
    finally:
        os.close(pidfd)
    if -1 in found:
        raise Unavailable(f"process {pid} does not give its fds away")
    return found


async def _introduce(line: socket.socket, name: str) -> None:
    """Tell an agent the time, its box's name and fresh randomness; skip what it was saying to somebody else until it answers."""
    number = secrets.randbits(31) | 1 << 31  # no conversation has such a number
    payload = struct.pack("<q", time.time_ns()) + text(name[:63]) + secrets.token_bytes(64)
    wanted = HEAD.pack(5, number, Kind.DONE) + bytes(5)
    line.setblocking(False)

    async def talk() -> None:
        await asyncio.get_running_loop().sock_sendall(line, HEAD.pack(len(payload), number, Kind.CLOCK) + payload)
        while True:
            await _readable(line)
            seen = line.recv(65536, socket.MSG_PEEK)
            if not seen:
                raise Unavailable("the machine ended while it started")
            found = seen.find(wanted)
            if found >= 0:
                line.recv(found + len(wanted))
                return
            if len(seen) >= len(wanted):
                line.recv(len(seen) - len(wanted) + 1)  # the rest may be the answer's beginning
            await asyncio.sleep(0.0005)

    try:
        await asyncio.wait_for(talk(), ANSWER_SECONDS)
    except TimeoutError:
        raise TimedOut(f"the agent of box {name!r} did not answer in {ANSWER_SECONDS} seconds") from None
    except OSError as error:
        raise Unavailable(f"the machine ended while it started: {error}") from None


async def _readable(line: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(line, ready.set_result, None)
    try:
        await ready
    finally:
        loop.remove_reader(line)


async def _try(agent: Agent, command: list[str]) -> None:
    """Run a command to its end, whatever that is."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_frame(kind: int, payload: bytes) -> None:
        if kind in (Kind.EXIT, Kind.DONE) and not done.done():
            done.set_result(None)

    number = agent.open(on_frame)
    try:
        agent.send(Kind.EXEC, encode_exec(command, "", "/", {}, 0), number)
        await done
    finally:
        agent.drop(number)
