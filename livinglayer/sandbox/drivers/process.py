"""Tier process: an ordinary process of the host with limits, and nothing else between it and the host's files and network.

For code that is trusted. Its "/" in the API is a directory of its own; the code itself sees the whole host as its user may.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

from ...errors import Invalid
from ..agent import Agent
from ..blueprint import Tier
from ..driver import Capabilities, Guest, Spec
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

    async def probe(self) -> None:
        build(self._state)

    async def start(self, spec: Spec) -> Guest:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        root = spec.root.upper / "u"
        user = FIRST_USER + zlib.crc32(spec.id.encode()) % USERS if os.geteuid() == 0 else None
        for name in (".", "home", "home/user", "tmp"):
            (root / name).mkdir(exist_ok=True)
            if user is not None:
                os.chown(root / name, user, user)
        if user is not None:
            os.chown(spec.root.upper, user, user)
        os.chmod(spec.root.upper, 0o700)
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
            raise
        finally:
            theirs.close()
        agent = Agent(ours)
        guest = ProcessGuest(spec, agent, process)
        await agent.ready
        return guest

    async def resume(self, spec: Spec, directory: Path) -> Guest:
        return await self.start(spec)

    async def fork(self, guest: Guest, specs: list[Spec]) -> list[Guest]:
        raise Invalid("tier 'process' forks files, not memory")

    def clean(self, alive: set[str], say: Callable[[str], None]) -> None:
        return

    async def close(self) -> None:
        return
