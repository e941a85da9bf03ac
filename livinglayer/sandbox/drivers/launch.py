"""Start a box from a bundle that only its runtime sees, and keep it by its first process.

A runtime (crun, runc, runsc) is run detached from a private mount namespace and is gone when the box runs: no shim stays,
and no mount outlives the box. What a box leaves on disk is one directory, `RUN/oci`.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...errors import TimedOut, Unavailable
from .. import mounts
from ..blueprint import Blueprint
from ..cgroups import Cgroup
from ..disk import Disk
from ..driver import Guest, Root, Spec
from . import oci
from .namespace import Spawner, open_mount, source_of

T = TypeVar("T")

G = TypeVar("G", bound=Guest)

POINTS = "mount-points"  # a layer
AGENT_ENDED = "its agent ended"
SECONDS = 60  # of a runtime's own work; one that hangs is ended
# joins cgroups by itself, then becomes the runtime: all that it starts is in them, and their names can't be seen inside
_JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 71; shift; done; shift; exec "$@"'


class Process:
    """The first process of a box, seen from the host. It is nobody's child once its runtime is gone, so it is watched, not waited for.

    When it goes, by whatever hand, `clean_up` runs once, and then the box is said to have `ended`.
    """

    def __init__(self, pid: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.pid, self.reason = pid, AGENT_ENDED
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.gone = asyncio.Event()
        self.held = False  # it may go, but the box has not ended before `say`
        self.clean_up: Callable[[], Awaitable[None]] | None = None
        self._finishing: asyncio.Task[None] | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise Unavailable(f"the first process of the box, {pid}, ended at once") from None
        self._loop.add_reader(self._fd, self._on_gone)

    def _on_gone(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        with contextlib.suppress(ChildProcessError):  # ours after all when we are PID 1 or a subreaper: leave no zombie
            os.waitpid(self.pid, os.WNOHANG)
        self.gone.set()
        if not self.held:
            self._finish()

    def _finish(self) -> "asyncio.Task[None]":
        if self._finishing is None:
            self._finishing = self._loop.create_task(self._clean_and_say())
        return self._finishing

    async def _clean_and_say(self) -> None:
        try:
            if self.clean_up:
                await self.clean_up()
        finally:
            if not self.held:
                self.say()

    def say(self) -> None:
        """Tell whoever waits that the box has ended."""
        if not self.ended.done():
            self.ended.set_result(self.reason)

    def kill(self) -> None:
        """SIGKILL; with its pid namespace everything in the box goes."""
        if not self.gone.is_set():
            self.reason = "killed" if self.reason == AGENT_ENDED else self.reason
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    async def over(self) -> None:
        """Wait until it is gone and cleaned up after."""
        await self.gone.wait()
        await asyncio.shield(self._finish())


class Parts(Protocol):
    """What these drivers use of a host."""

    @property
    def state(self) -> Path: ...
    @property
    def run(self) -> Path: ...
    @property
    def disk(self) -> Disk: ...
    @property
    def spawner(self) -> Spawner | None: ...


def spawner_of(parts: Parts) -> Spawner:
    """The spawner, which makes the roots of boxes; Unavailable on a host that is not root."""
    if parts.spawner is None:
        raise Unavailable("a range of ids can't be mapped into a box without root", hint="run the host as root")
    return parts.spawner


@dataclass
class Made:
    """A box's root as the spawner made it: a detached mount, the user namespace it is mapped into, the first id of that."""

    root: int
    userns: int
    base: int

    def close(self) -> None:
        os.close(self.root)
        os.close(self.userns)


@contextlib.asynccontextmanager
async def made_root(spawner: Spawner, spec: Spec) -> AsyncIterator[Made]:
    """The root of a box; its ids stay the box's until `release`."""
    _make_points(spec.root.upper.parent.parent / "layers" / POINTS)
    # a volatile overlay leaves this and refuses to be mounted again, in case the machine went down; only the box did
    shutil.rmtree(spec.root.upper / "w/work/incompat", ignore_errors=True)
    layers = (POINTS, *spec.root.layers)
    asked = asyncio.ensure_future(spawner.root(dataclasses.replace(spec, root=Root(layers, spec.root.upper))))
    try:
        made = Made(*await whole(asked))
    except asyncio.CancelledError:
        if not asked.exception():
            Made(*asked.result()).close()
            await release(spawner, spec)
        raise
    try:
        yield made
    except BaseException:
        await release(spawner, spec)
        raise
    finally:
        made.close()


@contextlib.asynccontextmanager
async def undone(spec: Spec, ours: socket.socket) -> AsyncIterator[None]:
    """What the block started is ended if the block fails, before the ids are another box's."""
    try:
        yield
    except BaseException:
        ours.close()  # the agent goes when its host does
        await in_thread(spec.cgroup.kill)
        raise


async def release(spawner: Spawner, spec: Spec) -> None:
    """Give a box's ids back."""
    with contextlib.suppress(Unavailable):  # the spawner is gone, or the box was never there
        await spawner.release(spec.id)


def _make_points(layer: Path) -> None:
    """A layer of mount points on top, so that no runtime makes them in the box's own files."""
    if layer.exists():
        return
    tree = Path(tempfile.mkdtemp(dir=layer.parent, prefix=f".{POINTS}-"))
    # gVisor puts memory over a /tmp that is empty, out of sight of snapshots: it has a directory that is usual there
    for name, mode in ((".", 0o755), ("proc", 0o555), ("dev", 0o755), ("tmp", 0o1777), ("tmp/.X11-unix", 0o1777)):
        (tree / name).mkdir(exist_ok=True)
        (tree / name).chmod(mode)
    (tree / oci.AGENT.lstrip("/")).touch()
    try:
        tree.rename(layer)
    except OSError:  # another one was faster
        shutil.rmtree(tree)


@dataclass(frozen=True)
class Bundle:
    """Where the parts of a bundle lie in the private namespace; `mounts` as (source, target, readonly)."""

    stage: Path
    mounts: tuple[tuple[Path, str, bool], ...]

    @property
    def root(self) -> Path:
        return self.stage / "root"

    @property
    def agent(self) -> Path:
        return self.stage / "agent"


def lay_out(stage: Path, spec: Spec, made: Made, agent: Path) -> Bundle:
    """The root, the agent and the mounts of a box beneath `stage`, an empty directory in a private namespace."""
    (stage / "root").mkdir()
    mounts.attach(made.root, stage / "root")
    shutil.copyfile(agent, stage / "agent")  # not bound: a box sees where its mounts come from
    os.chmod(stage / "agent", 0o755)
    shown: list[tuple[Path, str, bool]] = []
    for number, wanted in enumerate(spec.blueprint.mounts):
        point = stage / f"mount{number}"
        point.mkdir() if source_of(spec, wanted).is_dir() else point.touch()
        tree = open_mount(spec, wanted, made.userns)
        try:
            mounts.attach(tree, point)
        finally:
            os.close(tree)
        shown.append((point, wanted.target, wanted.readonly))
    return Bundle(stage, tuple(shown))


def joined(spec: Spec, command: Sequence[str]) -> list[str]:
    """`command` inside the box's cgroups from its first instruction on."""
    # by name, since an inherited fd could reach the box; by this name, since the hierarchies may be out of sight
    files = [f"/proc/{os.getpid()}/fd/{fd}" for fd in spec.cgroup.task_fds]
    return ["sh", "-c", _JOIN, "sh", *files, "--", *command]


def run(command: Sequence[str], log: Path, box: str, stdio: int | None = None) -> None:
    """Run a runtime to its end; Unavailable with what it logged when it fails."""
    with _nothing() as nothing:
        stdio = nothing if stdio is None else stdio
        try:
            done = subprocess.run(
                command, stdin=stdio, stdout=stdio, stderr=nothing, timeout=SECONDS, env=_ENVIRONMENT, check=False
            )
        except subprocess.TimeoutExpired:
            raise TimedOut(f"the runtime of box {box!r} did not answer in {SECONDS} seconds") from None
    if done.returncode:
        said = log.read_text(errors="replace").strip() if log.exists() else ""
        last = said.splitlines()[-1][-500:] if said else f"exit code {done.returncode}, nothing logged"
        raise Unavailable(f"the runtime of box {box!r} failed: {last}")


@contextlib.contextmanager
def _nothing() -> Iterator[int]:
    """A file of nobody's that stays empty. Runtimes give their stdio to the box: /dev/null would be the host's own, a log its disk."""
    fd = os.memfd_create("nothing", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        yield fd
    finally:
        os.close(fd)


_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}  # none of the host's own


def fresh_directory(spec: Spec, tier: str) -> Path:
    """`RUN/oci`, empty but for a file that names the tier."""
    directory = spec.directory / "oci"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
    (directory / tier).touch()
    return directory


def remembered(spec: Spec) -> list[int]:
    """The processes noted that still live; Unavailable when the first has gone."""
    noted = [line.split() for line in (spec.directory / "oci" / "pids").read_text().splitlines()]
    alive = [int(pid) for pid, started in noted if _started(int(pid)) == started]
    if not alive or alive[0] != int(noted[0][0]):
        raise Unavailable(f"box {spec.id!r} has ended")
    return alive


def socket_pair(kind: socket.SocketKind = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """The host's end and the agent's, which becomes its stdin and stdout."""
    ends = socket.socketpair(socket.AF_UNIX, kind)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return ends


def remember(directory: Path, *pids: int) -> None:
    """Note processes with their start times, so that a later host can't end a stranger with the same number."""
    (directory / "pids").write_text("".join(f"{pid} {_started(pid)}\n" for pid in pids))


async def whole(work: "asyncio.Future[T]") -> T:
    """The result of `work`; whoever is cancelled meanwhile waits for its end, so that what it made can be undone."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


async def in_thread(work: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """A blocking call beside the loop, never left half done."""
    return await whole(asyncio.ensure_future(asyncio.to_thread(work, *arguments, **more)))


async def privately(work: Callable[[Path], T], spec: Spec) -> T:
    """`work` in a private mount namespace; what the system refuses is Unavailable."""
    try:
        return await in_thread(mounts.in_private_namespace, work, avoid=[spec.directory, spec.root.upper])
    except OSError as error:
        raise Unavailable(f"box {spec.id!r} can't be set up: {error.strerror or error}", hint="layer doctor") from None


async def trial(tier: str, start: Callable[[Spec], Awaitable[Guest]], parts: Parts) -> None:
    """Start a box with no files and no limits, hear its agent, end it."""
    name = f"trial-{tier}-{os.getpid()}"
    upper, directory = parts.disk.create(name), parts.run / "boxes" / name
    netns = mounts.new_network()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        guest = await start(Spec(name, Blueprint(), Root((), upper), directory, Cgroup("none", {}), netns))
        await guest.kill()
    finally:
        os.close(netns)
        parts.disk.destroy(upper)
        shutil.rmtree(directory, ignore_errors=True)


async def heard(guest: G) -> G:
    """The guest, once its agent has spoken; ended when it does not."""
    try:
        await asyncio.wait_for(asyncio.shield(guest.agent.ready), SECONDS)
    except BaseException as error:
        await guest.kill()
        if isinstance(error, TimeoutError):
            raise TimedOut("the agent of the box did not speak") from None
        raise
    return guest


def clean(boxes: Path, tier: str, alive: set[str], say: Callable[[str], None]) -> None:
    """End and forget the boxes of this tier that an earlier host left and that are not `alive`."""
    for directory in sorted(boxes.glob("*/oci")):
        if not (directory / tier).exists() or directory.parent.name in alive:
            continue
        with contextlib.suppress(OSError, ValueError):
            for line in (directory / "pids").read_text().splitlines():
                pid, started = line.split()
                if _started(int(pid)) == started:
                    os.kill(int(pid), signal.SIGKILL)
                    say(f"ended process {pid} of {tier} box {directory.parent.name}")
        shutil.rmtree(directory, ignore_errors=True)
        say(f"removed {directory}")


def _started(pid: int) -> str:
    """When a process was started, in ticks since the machine was; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
