"""Tier process: an ordinary process of the host with limits, and nothing else between it and the host's files and network.

For code that is trusted. Its "/" in the API is a directory of its own; the code itself sees the whole host as its user may.
"""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

from ...errors import Invalid, LimitExceeded, Unavailable
from ..agent import Agent
from ..blueprint import VOLUME, Tier
from ..driver import Capabilities, Guest, Root, Spec
from ..native import build

FIRST_USER, USERS = 61184, 4000  # ids that no account has: code of a root host still runs as nobody in particular


class ProcessGuest:
    """An agent that is a plain process."""

    def __init__(self, spec: Spec, agent: Agent, process: "subprocess.Popen[bytes]") -> None:
        self._spec, self._process = spec, process
        self.agent, self.pid = agent, process.pid
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self.agent.close()
        self._spec.cgroup.kill()  # what left the agent's reach is still in the cgroup
        if not self.ended.done():
            self.ended.set_result("killed")

    async def pause(self) -> None:
        self._spec.cgroup.freeze()

    async def resume(self) -> None:
        self._spec.cgroup.thaw()

    async def suspend(self, directory: Path) -> None:
        raise Invalid(
            "tier 'process' can't keep memory on disk", hint="pause keeps it in memory; suspend keeps the files"
        )

    async def kill(self) -> None:
        if self.ended.done():
            return
        self._spec.cgroup.kill()
        for pid in descendants(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.shield(self.ended)


def descendants(pid: int) -> list[int]:
    """A process and all below it, children first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            found += [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return found[::-1]


def copy_layers(root: Root) -> None:
    """Fill a box's directory with what a snapshot of this tier holds: nothing is mounted here, so it is copied (blocks are shared)."""
    directory = root.upper.parent.parent / "layers"
    if not all((directory / name).is_dir() and len(name) == 64 for name in root.layers):
        raise Invalid(
            "tier 'process' begins at snapshots of its own boxes only", hint="use the tier the snapshot was taken of"
        )
    for name in reversed(root.layers):
        command = [
            "cp",
            "--archive",
            "--reflink=auto",
            "--no-target-directory",
            str(directory / name),
            str(root.upper / "u"),
        ]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"a snapshot could not be copied: {done.stderr.strip()[-500:]}")


def hand_over(root: Path, user: int | None) -> None:
    """Make a box's directory ready for `user`. An earlier run of the box may have planted links in it: none is followed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as opened:

        def open_(name: str, at: int | None) -> int:
            if at is not None:
                if os.path.lexists(f"/proc/self/fd/{at}/{name}") and not stat.S_ISDIR(
                    os.lstat(name, dir_fd=at).st_mode
                ):
                    os.unlink(name, dir_fd=at)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=at)
                    if user is not None:
                        os.chown(name, user, user, dir_fd=at, follow_symlinks=False)
            fd = os.open(name, flags, dir_fd=at)
            opened.callback(os.close, fd)
            return fd

        top = open_(str(root), None)
        strange = user is not None and os.fstat(top).st_uid != user  # new, or the copy of another box
        open_("user", open_("home", top))
        open_("tmp", top)
        os.chmod(top, 0o700)
        if user is None or not strange:
            return
        for _, directories, files, at in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            os.chown(at, user, user)
            for name in [*directories, *files]:
                os.chown(name, user, user, dir_fd=at, follow_symlinks=False)
        os.chown(top, user, user)


class ProcessDriver:
    """Plain processes with limits."""

    tier: Tier = "process"
    capabilities = Capabilities(
        "no wall: the host's files and network are within its reach, as far as its user's rights go",
        live_fork=True,
        egress=False,
        limits=frozenset({"memory", "pids", "cpu"}),
    )

    def __init__(self, state: Path) -> None:
        self._state = state
        self._users: set[int | None] = set()

    async def probe(self) -> None:
        build(self._state)

    async def start(self, spec: Spec) -> Guest:
        if any(VOLUME.fullmatch(mount.source) for mount in spec.blueprint.mounts):
            raise Invalid("tier 'process' can't show volumes to a box", hint="use tier namespace, container or gvisor")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        root = spec.root.upper / "u"
        user = self._take_user(spec.id) if os.geteuid() == 0 else None
        os.chmod(spec.root.upper, 0o711)  # the host's own, or the box could put a link in the place of its root
        try:
            if spec.root.layers:
                await asyncio.to_thread(copy_layers, spec.root)
                spec.root = Root((), spec.root.upper)
            hand_over(root, user)
        except BaseException:
            self._users.discard(user)
            for end in (ours, theirs):
                end.close()
            raise
        spec.environment.update(HOME=str(root / "home/user"), TMPDIR=str(root / "tmp"), USER="user")
        tasks, number = list(spec.cgroup.task_fds), theirs.fileno()

        def attach() -> None:
            for fd in tasks:
                os.write(fd, b"0")

        try:
            process = subprocess.Popen(
                [str(build(self._state) / "agent"), str(number), str(number), str(root)],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[number],
                preexec_fn=attach,
                user=user,
                group=user,
                extra_groups=[] if user is not None else None,
                start_new_session=True,
                cwd=root,
            )
        except BaseException:
            ours.close()
            self._users.discard(user)
            raise
        finally:
            theirs.close()
        agent = Agent(ours)
        guest = ProcessGuest(spec, agent, process)
        guest.ended.add_done_callback(lambda _: self._users.discard(user))
        try:
            await agent.ready
        except BaseException:  # its caller left meanwhile: nobody else would end it
            await asyncio.shield(guest.kill())
            raise
        return guest

    def _take_user(self, box: str) -> int:
        """An id that no other box of this host has now: boxes of one user could end and read each other."""
        first = zlib.crc32(box.encode()) % USERS
        for at in range(USERS):
            user = FIRST_USER + (first + at) % USERS
            if user not in self._users:
                self._users.add(user)
                return user
        raise LimitExceeded(f"{USERS} boxes of tier 'process' run already")

    async def resume(self, spec: Spec, directory: Path) -> Guest:
        return await self.start(spec)

    async def fork(self, guest: Guest, specs: list[Spec]) -> list[Guest]:
        raise Invalid("tier 'process' forks files, not memory")

    def clean(self, alive: set[str], say: Callable[[str], None]) -> None:
        return

    async def close(self) -> None:
        return
