"""One QEMU process: jailed, driven over QMP, its ports as sockets in one directory."""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import TimedOut, Unavailable
from ..cgroups import Cgroup
from .artefacts import INSTALL, Artefacts

BINARY = "qemu-system-x86_64"
FIRST_UID = 0x7A000000  # each process has this plus its pid
LAYERS = 10  # disks for layers above the base; native/init.c has the same number
PORTS = ("qmp", "agent", "control")
_HUGE = 1 << 40  # what a guest is told of a disk's size: what lies on it says where it ends
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


@dataclass(frozen=True)
class Board:
    """What the two tiers differ in."""

    machine: str
    bus: str  # suffix of the names of virtio devices


MICROVM = Board("microvm,x-option-roms=off,rtc=on", "device")
Q35 = Board("q35,smm=off,vmport=off,hpet=off,sata=off,smbus=off", "pci")


@dataclass(frozen=True)
class Hardware:
    """What a machine is made of; it must be the same where its memory goes on."""

    board: Board
    accelerator: str  # tcg or kvm
    memory: int  # bytes
    cpus: int
    network: bool


def version() -> str:
    """Of the QEMU installed; Unavailable when there is none."""
    path = shutil.which(BINARY)
    if path is None:
        raise Unavailable(f"{BINARY} is not installed", hint=INSTALL)
    found = os.stat(path)
    return f"{path} {found.st_size} {found.st_mtime_ns}"


class Jail:
    """Namespaces with nothing in them but /usr, made once; processes join them, and end when the host dies, unless they may live.

    Without root there are none: QEMU's own filter must do.
    """

    def __init__(self, artefacts: Artefacts) -> None:
        self.launcher = artefacts.program("vmjail")
        self.namespaces = [-1, -1, -1]
        self._maker: subprocess.Popen[bytes] | None = None
        if os.geteuid():
            return
        self._maker = subprocess.Popen(
            [self.launcher, "make"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self._maker.stdin and self._maker.stdout and self._maker.stderr
        with self._maker.stdout as said, self._maker.stderr as complained:
            if said.readline() != b"ready\n":
                raise Unavailable(f"no namespaces for QEMU: {complained.read().decode(errors='replace').strip()}")
        names = ("mnt", "net", "ipc")
        self.namespaces = [os.open(f"/proc/{self._maker.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names]

    def _note(self, sign: str, pid: int) -> None:
        if self._maker and self._maker.stdin and not self._maker.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._maker.stdin.write(f"{sign}{pid}\n".encode())
                self._maker.stdin.flush()

    def let_live(self, pid: int) -> None:
        """This process stays when we die (or it is gone already, and its number may be another's)."""
        self._note("-", pid)

    def start(
        self,
        program: Path,
        arguments: Sequence[str],
        fds: Sequence[int],
        cgroup: Cgroup | None = None,
        netns: int | None = None,
        stderr: int = subprocess.DEVNULL,
    ) -> int:
        """The pid of `program`, which inherits `fds` and nothing else."""
        mount, network, ipc = self.namespaces
        network = network if netns is None else netns
        tasks = list(cgroup.task_fds) if cgroup else []
        binary = os.open(program, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = [
                str(self.launcher),
                "run",
                str(0 if os.geteuid() else FIRST_UID),
                str(mount),
                str(network),
                str(ipc),
            ]
            command = [*head, ",".join(map(str, tasks)), str(binary), str(program), *arguments]
            passed = [fd for fd in (mount, network, ipc, binary, *tasks, *fds) if fd >= 0]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=passed,
                env={},
                cwd="/",
            )
            process.returncode = 0  # waited for by its pidfd: subprocess need not
            self._note("+", process.pid)
            return process.pid
        finally:
            os.close(binary)

    def close(self) -> None:
        """Let the namespaces go; those who are in them end unless they may live."""
        if self._maker and self._maker.stdin:
            self._maker.stdin.close()
            self._maker.wait()
        for fd in self.namespaces:
            if fd >= 0:
                os.close(fd)
        self.namespaces = [-1, -1, -1]


class Process:
    """A process watched by its pidfd, whether it is our child or was adopted."""

    def __init__(self, pid: int, jail: Jail | None = None) -> None:
        self.pid, self._jail = pid, jail
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reason = "the machine ended"
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise Unavailable(f"process {pid} is gone") from None
        forget(self._fd)
        asyncio.get_running_loop().add_reader(self._fd, self._gone)

    @classmethod
    async def start(
        cls,
        jail: Jail,
        program: Path,
        arguments: Sequence[str],
        fds: Sequence[int],
        cgroup: Cgroup | None = None,
        netns: int | None = None,
        stderr: int = subprocess.DEVNULL,
    ) -> "Process":
        """Start `program` in the jail; when whoever waits is cancelled meanwhile, it is ended."""
        starting = asyncio.ensure_future(asyncio.to_thread(jail.start, program, arguments, fds, cgroup, netns, stderr))
        try:
            return cls(await asyncio.shield(starting), jail)
        except asyncio.CancelledError:
            await cls(await starting, jail).kill()
            raise

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        if self._jail:
            self._jail.let_live(self.pid)  # before its number is free
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        if not self.ended.done():
            self.ended.set_result(self.reason)

    async def kill(self, reason: str = "killed") -> None:
        """SIGKILL, and wait until it is gone."""
        if not self.ended.done():
            self.reason = reason
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            await asyncio.shield(self.ended)


class Qmp:
    """QEMU's control socket. One question at a time; events are not needed and dropped."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._buffer, self._lock = connection, b"", asyncio.Lock()

    async def greet(self) -> None:
        """Read QEMU's greeting and begin."""
        await self._line()
        await self.run("qmp_capabilities")

    async def run(self, command: str, arguments: dict[str, Any] | None = None, fd: int | None = None) -> Any:
        """What the command returns; Unavailable with QEMU's words when it refuses."""
        message = json.dumps({"execute": command, "arguments": arguments or {}}).encode() + b"\n"
        async with self._lock:
            try:
                if fd is None:
                    await asyncio.get_running_loop().sock_sendall(self._socket, message)
                else:
                    socket.send_fds(self._socket, [message], [fd])
                while True:
                    answer = json.loads(await self._line())
                    if "return" in answer:
                        return answer["return"]
                    if "error" in answer:
                        raise Unavailable(f"QEMU refused {command}: {answer['error'].get('desc')}")
            except OSError as error:
                raise Unavailable(f"QEMU is gone: {error}") from None

    async def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            data = await asyncio.get_running_loop().sock_recv(self._socket, 65536)
            if not data:
                raise Unavailable("QEMU is gone")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def close(self) -> None:
        self._socket.close()


class Qemu:
    """A QEMU process with its ports connected. Its sockets lie in `directory`, so that a later host finds them."""

    def __init__(
        self,
        hardware: Hardware,
        directory: Path,
        process: Process,
        wire: socket.socket | None = None,
        log: int | None = None,
    ) -> None:
        self.hardware, self.directory, self.process, self._log = hardware, directory, process, log
        self.wire = wire  # the far end of its network card, until a network takes it
        self._disks = 0
        self._nodes: dict[int, str] = {}
        self._closed = False

    @classmethod
    async def start(
        cls, jail: Jail, hardware: Hardware, directory: Path, name: str, image: int, base: Path, *,
        boot: tuple[Path, Path, str] | None = None, cgroup: Cgroup | None = None,
    ) -> "Qemu":  # fmt: skip
        """A machine whose memory begins as `image`; it waits for a state to go on from, unless `boot` gives kernel, initrd and command line."""
        version()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.ExitStack() as stack:
            listeners = {port: stack.enter_context(listen(directory / port)) for port in PORTS}
            disk = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, disk)
            fds = [image, disk, *(listener.fileno() for listener in listeners.values())]
            wire: socket.socket | None = None
            card: socket.socket | None = None
            if hardware.network:
                wire, card = socket.socketpair()
                stack.enter_context(card)
                fds.append(card.fileno())
            started: list[str] = []
            if boot:
                for path in boot[:2]:
                    fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                    stack.callback(os.close, fds[-1])
                started = [
                    "-kernel",
                    f"/proc/self/fd/{fds[-2]}",
                    "-initrd",
                    f"/proc/self/fd/{fds[-1]}",
                    "-append",
                    boot[2],
                ]
            arguments = _arguments(
                hardware, name, image, disk, {port: s.fileno() for port, s in listeners.items()}, card
            )
            log = os.memfd_create("log", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
            os.ftruncate(log, 16384)
            fcntl.fcntl(log, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)  # what goes wrong in QEMU can't fill a disk
            binary = Path(shutil.which(BINARY) or BINARY)
            waits = [] if boot else ["-incoming", "defer"]
            process = await Process.start(jail, binary, [*arguments, *started, *waits], fds, cgroup, stderr=log)
            qemu = cls(hardware, directory, process, wire, log)
        try:
            await qemu.connect()
        except BaseException:
            await qemu.kill()
            raise
        return qemu

    async def connect(self) -> None:
        """Connect to its ports."""
        self._sockets = {port: await self._connect(port) for port in PORTS}
        self.qmp = Qmp(self._sockets["qmp"])
        self._control = self._sockets["control"]
        self._control.setblocking(False)
        try:
            await asyncio.wait_for(self.qmp.greet(), 20)
        except (Unavailable, TimeoutError):
            raise Unavailable(f"QEMU did not start: {self.said()}", hint="layer doctor") from None

    async def _connect(self, port: str) -> socket.socket:
        connection = Line(socket.AF_UNIX, socket.SOCK_STREAM)
        forget(connection.fileno())
        with at(self.directory / port) as address:
            connection.connect(address)
        return connection

    @property
    def agent(self) -> "Line":
        """The guest agent's port."""
        line = self._sockets["agent"]
        assert isinstance(line, Line)
        return line

    def said(self) -> str:
        """QEMU's last words."""
        words = b"" if self._log is None else os.pread(self._log, 16384, 0)
        return words.decode(errors="replace").strip("\0\n")[-500:] or "it said nothing"

    async def attach(self, slot: int, fd: int, writable: bool) -> None:
        """Put a disk into a slot: 0 is the box's own, 1… its layers."""
        self._disks += 1
        number = 100 + self._disks
        await self.qmp.run("add-fd", {"fdset-id": number}, fd)
        node = f"file{number}"
        file = {
            "driver": "file",
            "node-name": node,
            "filename": f"/dev/fdset/{number}",
            "read-only": not writable,
            "locking": "off",
        }
        await self.qmp.run("blockdev-add", file | {"cache": {"no-flush": True}})
        options = {"driver": "raw", "node-name": f"disk{slot}", "file": node, "read-only": not writable}
        await self.qmp.run("blockdev-reopen", {"options": [options]})
        if old := self._nodes.get(slot):
            await self.qmp.run("blockdev-del", {"node-name": old})
        self._nodes[slot] = node

    async def load(self, state: int) -> None:
        """Go on from a state that `save` gave."""
        own = os.open(f"/proc/self/fd/{state}", os.O_RDONLY | os.O_CLOEXEC)  # an offset of its own
        try:
            await self.qmp.run("getfd", {"fdname": "state"}, own)
            await self.qmp.run("migrate-incoming", {"uri": "fd:state"})
        finally:
            os.close(own)

    async def save(self, target: int) -> None:
        """The state of all devices, without memory, of a stopped machine into a file."""
        own = os.open(f"/proc/self/fd/{target}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            number = (await self.qmp.run("add-fd", {}, own))["fdset-id"]
            await self.qmp.run("xen-save-devices-state", {"filename": f"/dev/fdset/{number}"})
            await self.qmp.run("remove-fd", {"fdset-id": number})
        finally:
            os.close(own)

    async def tell(self, line: str, seconds: float = 30) -> None:
        """Ask our init on the control port; Unavailable with its words when it can't."""
        answer = await self.hear(line, seconds)
        if answer != "ok":
            raise Unavailable(f"the guest refused {line.split(' ')[0]!r}: {answer.removeprefix('error ')}")

    async def hear(self, line: str | None, seconds: float) -> str:
        """The next line on the control port, after asking."""
        loop = asyncio.get_running_loop()
        heard = b""

        async def talk() -> bytes:
            nonlocal heard
            if line is not None:
                await loop.sock_sendall(self._control, line.encode() + b"\n")
            while not heard.endswith(b"\n"):
                data = await loop.sock_recv(self._control, 1)
                if not data:
                    raise Unavailable(f"the machine ended: {self.said()}")
                heard += data
            return heard

        try:
            return (await asyncio.wait_for(talk(), seconds)).decode(errors="replace").strip()
        except TimeoutError:
            raise TimedOut(f"the guest did not answer in {seconds:.0f} seconds: {await self.console()}") from None
        except OSError as error:
            raise Unavailable(f"the machine ended: {error}") from None

    async def receive(self, count: int) -> bytes:
        """Exactly `count` bytes of the control port."""
        data = bytearray()
        while len(data) < count:
            piece = await asyncio.wait_for(
                asyncio.get_running_loop().sock_recv(self._control, min(count - len(data), 1 << 16)), 60
            )
            if not piece:
                raise Unavailable("the machine ended")
            data += piece
        return bytes(data)

    async def console(self) -> str:
        """What the guest's kernel said last."""
        with contextlib.suppress(Unavailable, TimeoutError):
            read = self.qmp.run("ringbuf-read", {"device": "console", "size": 4096})
            return str(await asyncio.wait_for(read, 2)).strip()[-500:] or "its console is empty"
        return "its console can't be read"

    def move(self, directory: Path) -> None:
        """Have the sockets in another directory: a machine of the pool becomes a box's."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in PORTS:
            (self.directory / name).rename(directory / name)
        self.directory.rmdir()
        self.directory = directory

    async def kill(self, reason: str = "killed") -> None:
        """End the process and remove its sockets; asking twice is fine."""
        await self.process.kill(reason)
        if self._closed:
            return
        self._closed = True
        for connection in (*getattr(self, "_sockets", {}).values(), self.wire):
            if connection is not None and connection.fileno() >= 0:
                forget(connection.fileno())
                connection.close()
        if self._log is not None:
            os.close(self._log)
            self._log = None
        for name in PORTS:
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()


class Line(socket.socket):
    """The socket of the agent's port. Held, it takes nothing: a machine is captured between two frames, never within one."""

    held = False

    def send(self, data: Any, flags: int = 0) -> int:
        if self.held:
            raise BlockingIOError
        return super().send(data, flags)


def _arguments(
    hardware: Hardware, name: str, image: int, base: int, ports: dict[str, int], card: socket.socket | None
) -> list[str]:
    bus = hardware.board.bus
    fast = "tcg,tb-size=128" if hardware.accelerator == "tcg" else "kvm"
    out = [
        *("-name", name, "-machine", f"{hardware.board.machine},memory-backend=ram", "-accel", fast),
        *("-cpu", "max" if hardware.accelerator == "tcg" else "host", "-smp", str(hardware.cpus), "-m", f"{hardware.memory >> 20}M"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", _SANDBOX),
        # a state of devices only, without the name of the machine, is what `save` gives
        *("-global", "migration.send-configuration=off"),
        *("-object", f"memory-backend-file,id=ram,size={hardware.memory},mem-path=/proc/self/fd/{image},share=off"),
        *("-chardev", "ringbuf,id=console,size=65536", "-serial", "chardev:console"),
        *("-device", f"virtio-serial-{bus}"),
    ]  # fmt: skip
    for port, fd in ports.items():
        out += ["-chardev", f"socket,id={port},fd={fd},server=on,wait=off"]
        out += (
            ["-mon", f"chardev={port},mode=control"]
            if port == "qmp"
            else ["-device", f"virtserialport,chardev={port},name={port}"]
        )
    out += [
        "-add-fd",
        f"fd={base},set=1",
        "-blockdev",
        "driver=file,node-name=base,filename=/dev/fdset/1,read-only=on,locking=off",
    ]
    out += ["-device", f"virtio-blk-{bus},drive=base"]
    for slot in range(LAYERS + 1):
        only = "off" if slot == 0 else "on"
        out += ["-blockdev", f"driver=null-co,node-name=null{slot},size={_HUGE},read-zeroes=on"]
        out += ["-blockdev", f"driver=raw,node-name=disk{slot},file=null{slot},read-only={only}"]
        out += ["-device", f"virtio-blk-{bus},drive=disk{slot},rerror=report,werror=report"]
    if card is not None:
        out += [
            "-netdev",
            f"socket,id=card,fd={card.fileno()}",
            "-device",
            f"virtio-net-{bus},netdev=card,mac=52:54:00:12:34:56",
        ]
        out[-1] += "" if bus == "device" else ",romfile="
    return out


def forget(fd: int) -> None:
    """Have the loop forget what it knows of an fd: one closed while it was watched would hide the next that has its number."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(fd)
    loop.remove_writer(fd)


@contextlib.contextmanager
def at(path: Path) -> Iterator[str]:
    """An address of a Unix socket for a path of any length."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(path: Path) -> socket.socket:
    """A listening Unix socket at `path`."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with at(path) as address:
        listener.bind(address)
    listener.listen(4)
    return listener
