"""Tier namespace: all of Linux's namespaces, an idmapped overlay, seccomp and cgroups, by the C spawner, in about two milliseconds.

It shares the host's kernel: a hole in that is a hole in the box.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import Invalid, LimitExceeded, NotFound, Unavailable
from ..agent import Agent
from ..blueprint import VOLUME, Mount, Tier
from ..driver import Capabilities, Guest, Spec
from ..mounts import clone, make_read_only, map_ids
from ..native import build

HEAD = struct.Struct("<IIIIIIIIQ")
REPLY = struct.Struct("<IIiI")
SPAWN, KILL, RESIDENTS, ROOT, RELEASE, HOLD, EXITED, HELD = 1, 2, 3, 4, 5, 6, 32, 34
KEEP, BY_PATH = 1, 2
RANGES = 4096  # ids of this many boxes for one host
BLOCKS = 15  # hosts on one machine, each with a block of ranges of its own
FIRST_ID = 1 << 20
SHM = 64 << 20


class Spawner:
    """The C spawner of one state directory: started on demand, found again when an earlier host left it running."""

    def __init__(self, state: Path, disk: Path, run: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[tuple[int, int, list[int]]]] = {}
        self._held: dict[int, list[tuple[str, int, int, list[int]]]] = {}
        self._serial = 0
        self.on_exit: dict[str, Callable[[int], None]] = {}
        self.on_death: Callable[[], None] = lambda: None
        self.by_path = os.environ.get("LAYER_OVERLAY_BY_PATH") == "1"
        self.stays = False  # a named box keeps it
        self.stays = False  # a named box keeps it
        path = run / "spawner.sock"
        self._socket = _connect(path) or _start(path, state, disk)
        self._pid = int((run / "spawner.pid").read_text())
        self._pid = int((run / "spawner.pid").read_text())
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(4 * 64), socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            if not data:
                self._loop.remove_reader(self._socket.fileno())
                for pending in self._answers.values():
                    if not pending.done():
                        pending.set_exception(
                            Unavailable("the spawner has died", hint="the host starts anew; try again")
                        )
                self._answers.clear()
                for exited in list(self.on_exit.values()):
                    exited(9)  # its boxes die with it, and nobody is left to say so
                self.on_exit.clear()
                return self.on_death()
            fds = [fd for _, _, raw in ancillary for fd in struct.unpack(f"{len(raw) // 4}i", raw[: len(raw) // 4 * 4])]
            op, serial, value, base = REPLY.unpack_from(data)
            name = data[REPLY.size :].split(b"\0", 1)[0].decode("ascii", "replace")
            if op == EXITED:
                if gone := self.on_exit.pop(name, None):
                    gone(value)
            elif op == HELD and serial in self._answers:
                self._held.setdefault(serial, []).append((name, value, base, fds))
            elif (answer := self._answers.pop(serial, None)) is not None:
                if answer.done():  # whoever asked has left
                    for fd in fds:
                        os.close(fd)
                elif value < 0:
                    answer.set_exception(
                        Unavailable(f"the spawner refused: {name}: {os.strerror(-value)}", hint="layer doctor")
                    )
                else:
                    answer.set_result((value, base, fds))
            else:  # an answer to nobody
                for fd in fds:
                    os.close(fd)

    def request(
        self,
        op: int,
        strings: list[str],
        fds: list[int],
        flags: int = 0,
        tasks: int = 0,
        layers: int = 0,
        mounts: int = 0,
        hold: int = 0,
    ) -> "asyncio.Future[tuple[int, int, list[int]]]":
        """Send one request; the future holds (pid or 0, first id of the range, fds)."""
        self._serial += 1
        answer: asyncio.Future[tuple[int, int, list[int]]] = self._loop.create_future()
        self._answers[self._serial] = answer
        head = HEAD.pack(op, self._serial, flags, tasks, layers, mounts, hold, 0, SHM)
        try:
            socket.send_fds(self._socket, [head + b"".join(text.encode() + b"\0" for text in strings)], fds)
        except BlockingIOError:
            self._answers.pop(self._serial)
            raise Unavailable("the spawner has more requests than it can take", hint="try again in a moment") from None
        except OSError as error:
            self._answers.pop(self._serial)
            raise Unavailable(f"the spawner can't be reached: {error}") from None
        return answer

    async def residents(self) -> list[tuple[str, int, int, list[int]]]:
        """(name, pid, first id, held fds) of every box it has."""
        answer = self.request(RESIDENTS, [], [])
        serial = self._serial
        await answer
        return self._held.pop(serial, [])

    async def root(self, spec: Spec) -> tuple[int, int, int]:
        """A box's overlay as a detached mount, the user namespace it is mapped into, and the first id of that."""
        _, base, fds = await self.request(
            ROOT, [spec.id, *spec.root.layers], [], self._flags(spec), layers=len(spec.root.layers)
        )
        return fds[0], fds[1], base

    async def release(self, name: str) -> None:
        """Give back the ids that `root` took."""
        await self.request(RELEASE, [name], [])

    async def kill(self, name: str) -> None:
        """End a box that nobody here has a handle of."""
        await self.request(KILL, [name], [])

    async def hold(self, name: str, fds: list[int]) -> None:
        """Keep fds of a box that another driver runs, for the host that comes after us."""
        await self.request(HOLD, [name], fds)

    def _flags(self, spec: Spec) -> int:
        return (KEEP if spec.keep else 0) | (BY_PATH if self.by_path else 0)

    def spawn(
        self, spec: Spec, control: int, mounts: list[tuple[int, str]], held: list[int]
    ) -> "asyncio.Future[tuple[int, int, list[int]]]":
        """Start a box whose agent speaks on `control`."""
        if spec.netns is None:
            raise Invalid("a namespace box needs a network namespace")
        layers, tasks = spec.root.layers, spec.cgroup.task_fds
        strings = [spec.id, *layers, *(target for _, target in mounts)]
        fds = [control, spec.netns, *tasks, *(fd for fd, _ in mounts), *held]
        return self.request(SPAWN, strings, fds, self._flags(spec), len(tasks), len(layers), len(mounts), len(held))

    def close(self) -> None:
        """Hang up: ephemeral boxes end, named ones stay and the spawner with them, else it is waited for."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        deadline = time.monotonic() + 1
        with contextlib.suppress(ChildProcessError):  # it was started by an earlier host
            while not self.stays and not os.waitpid(self._pid, os.WNOHANG)[0] and time.monotonic() < deadline:
                time.sleep(0.001)


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


def _start(path: Path, state: Path, disk: Path) -> socket.socket:
    programs = build(state)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(4)
    block, lock = _claim_ids()
    command = [
        str(programs / "spawner"),
        str(disk),
        str(programs / "filter.bpf"),
        str(FIRST_ID + block * RANGES * 65536),
        str(RANGES),
    ]
    log = os.open(path.parent / "spawner.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    pid = os.posix_spawn(
        command[0],
        command,
        {"LANG": "C"},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, null, 0),
            (os.POSIX_SPAWN_DUP2, null, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
            (os.POSIX_SPAWN_DUP2, listener.fileno(), 3),
            (os.POSIX_SPAWN_DUP2, lock, 4),
        ],
        setsid=True,
    )
    for fd in (log, null, lock):
        os.close(fd)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(path))
    listener.close()
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise Unavailable(
                f"the spawner did not start: {(path.parent / 'spawner.log').read_text()[-500:]}", hint="layer doctor"
            )
    (path.parent / "spawner.pid").write_text(str(pid))
    return connection


def _claim_ids() -> tuple[int, int]:
    """A block of ids that no other host on this machine has, held by a lock that dies with whoever has its fd."""
    directory = Path("/run/livinglayer")
    directory.mkdir(mode=0o755, exist_ok=True)
    for block in range(BLOCKS):
        fd = os.open(directory / f"ids-{block}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return block, fd
    raise Unavailable(f"{BLOCKS} hosts run on this machine already: no user ids are left", hint="stop one of them")


class NamespaceGuest:
    """A box of the spawner's."""

    def __init__(self, driver: "NamespaceDriver", spec: Spec, agent: Agent, pid: int, pidfd: int, base: int) -> None:
        self._driver, self._spec = driver, spec
        self.agent, self.pid, self.pidfd, self.base = agent, pid, pidfd, base
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._frozen = True  # as far as we know, of a box that was adopted
        driver.spawner.on_exit[spec.id] = self._on_exit

    def _on_exit(self, status: int) -> None:
        self.agent.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if not self.ended.done():
            self.ended.set_result(
                "killed" if os.WIFSIGNALED(status) else f"the agent ended with {os.waitstatus_to_exitcode(status)}"
            )

    async def pause(self) -> None:
        self._frozen = True
        self._spec.cgroup.freeze()

    async def resume(self) -> None:
        self._spec.cgroup.thaw()
        self._frozen = False

    async def suspend(self, directory: Path) -> None:
        raise Invalid(
            "tier 'namespace' can't keep memory on disk",
            hint="pause keeps it in memory; suspend keeps the files; tiers gvisor, microvm and vm keep both",
        )

    async def kill(self) -> None:
        if self.ended.done():
            return
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        if self._frozen:
            self._spec.cgroup.thaw()  # a frozen process of cgroup v1 does not die
        await asyncio.shield(self.ended)


class NamespaceDriver:
    """Boxes by the spawner."""

    tier: Tier = "namespace"
    capabilities = Capabilities("shares the host's kernel; everything else is its own", live_fork=True, zygote=True)

    def __init__(self, spawner: Spawner) -> None:
        self.spawner = spawner

    async def probe(self) -> None:
        if os.geteuid():
            raise Unavailable(
                "tier 'namespace' needs root: idmapped mounts and network namespaces with a gateway",
                hint="run the host as root; tier process works without",
            )

    async def start(self, spec: Spec) -> Guest:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        mounts: list[tuple[int, str]] = []
        try:
            for mount in spec.blueprint.mounts:
                mark = "+" if VOLUME.fullmatch(mount.source) else ""  # the spawner maps its ids
                mounts.append((open_mount(spec, mount), mark + mount.target))
            answer = self.spawner.spawn(spec, theirs.fileno(), mounts, [ours.fileno(), *spec.held] if spec.keep else [])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd, _ in mounts:
                os.close(fd)
        agent = Agent(ours)
        try:
            pid, base, fds = await answer
            if not fds:  # the kernel drops what finds no room
                raise LimitExceeded("the host has no file descriptors left", hint="raise its limit: ulimit -n")
            guest = NamespaceGuest(self, spec, agent, pid, fds[0], base)
            guest._frozen = False
            await agent.ready
        except BaseException:
            agent.close()
            if (
                not answer.done() or not answer.exception()
            ):  # it may be on its way, and must not outlive who asked for it
                with contextlib.suppress(Unavailable):
                    self.spawner.request(KILL, [spec.id], []).add_done_callback(_ignore)
            raise
        return guest

    def adopt(self, spec: Spec, pid: int, base: int, control: int) -> Guest:
        """A box that outlived the host that made it."""
        agent = Agent(socket.socket(fileno=control))
        agent.ready.set_result(None)
        return NamespaceGuest(self, spec, agent, pid, os.pidfd_open(pid), base)

    async def resume(self, spec: Spec, directory: Path) -> Guest:
        return await self.start(spec)

    async def fork(self, guest: Guest, specs: list[Spec]) -> list[Guest]:
        raise Invalid("tier 'namespace' forks files, not memory")

    def clean(self, alive: set[str], say: Callable[[str], None]) -> None:
        return

    async def close(self) -> None:
        self.spawner.close()


def _ignore(answer: "asyncio.Future[tuple[int, int, list[int]]]") -> None:
    if not answer.cancelled():
        answer.exception()


def open_mount(spec: Spec, mount: Mount, userns: int | None = None) -> int:
    """A detached clone of a directory of the host, as a blueprint names it; NotFound when it is not there.

    A volume's ids are mapped into `userns`, if that is there already.
    """
    volume = VOLUME.fullmatch(mount.source)
    try:
        tree = clone(source_of(spec, mount))
        if mount.readonly:
            make_read_only(tree)
        if volume and userns is not None:
            map_ids(tree, userns)
        return tree
    except FileNotFoundError:
        raise NotFound(f"mount source {mount.source!r} is not there") from None
    except OSError as error:
        raise Invalid(f"mount source {mount.source!r} can't be mounted: {error}") from None


def source_of(spec: Spec, mount: Mount) -> Path:
    """Where on the host a mount's files lie."""
    volume = VOLUME.fullmatch(mount.source)
    return spec.root.upper.parent.parent / "volumes" / volume[1] if volume else Path(mount.source)
