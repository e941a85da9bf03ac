"""Boxes that a program has left as new: each serves the next program of the same tenant and shape. What can't be shown to be as new is removed.

A program that may use such a box runs as its plain user, without capabilities, in an IPC namespace of its own that goes with it. What it
could leave is looked at from outside, by descriptors that were opened before any program ran.
"""

import contextlib
import os
import select
import socket
import time
from typing import TYPE_CHECKING

from .blueprint import Blueprint
from .box import Box
from .cgroups import Cgroup
from .drivers.namespace import NamespaceGuest

if TYPE_CHECKING:
    from .host import Host

MOST = 64  # boxes kept, of all tenants
IDLE = 15.0  # seconds that one waits for its next program
USES = 10_000  # programs of one box
Key = tuple[str, str]  # tenant, shape


def keepable(blueprint: Blueprint) -> bool:
    """Whether boxes of this shape can be shown to be as new: their user has no rights in them, and their way out leads nowhere."""
    return (
        blueprint.tier == "namespace"
        and blueprint.base == "host"
        and blueprint.user == "user"
        and not (blueprint.packages or blueprint.egress or blueprint.mounts or blueprint.secrets or blueprint.wall)
    )


class Looks:
    """What a new box looks like from outside, and whether it still does."""

    def __init__(self, box: Box) -> None:
        guest = box.guest
        assert isinstance(guest, NamespaceGuest)
        self._fds: list[int] = []
        try:
            if box.root_fd is None:
                box.root_fd = os.open(f"/proc/{guest.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._upper = self._open(f"{box.spec.root.upper}/u", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if os.listdir(self._upper):
                raise OSError
            self._shm = self._open("dev/shm", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, box.root_fd)
            group = box.spec.cgroup
            old = group.version == "v1"
            self._pids = self._open(_file(group, "pids", "pids.current"))
            self._limits = [
                self._open(_file(group, "pids", "pids.events")),
                self._open(_file(group, "memory", "memory.oom_control" if old else "memory.events")),
            ]
            self._cpu = self._open(_file(group, "cpuacct", "cpuacct.usage") if old else _file(group, "cpu", "cpu.stat"))
            self._peak = self._open(_file(group, "memory", "memory.max_usage_in_bytes"), os.O_WRONLY) if old else -1
            self._met = self._of_limits()
            self._files, self._shared = _of(self._upper), _of(self._shm)
        except OSError:
            self.close()
            raise

    def _open(self, path: str, flags: int = os.O_RDONLY, at: int | None = None) -> int:
        self._fds.append(os.open(path, flags | os.O_CLOEXEC, dir_fd=at))
        return self._fds[-1]

    def _of_limits(self) -> list[bytes]:
        """How often it met a limit."""
        return [os.pread(fd, 512, 0) for fd in self._limits]

    def begin(self) -> float:
        """Count anew what a program uses; the cpu seconds of those before it."""
        if self._peak >= 0:
            os.write(self._peak, b"0")
            return int(os.pread(self._cpu, 64, 0)) / 1e9
        return int(os.pread(self._cpu, 64, 0).split()[1]) / 1e6

    def alone(self) -> bool:
        """Whether none but the agent runs in it."""
        return os.pread(self._pids, 32, 0) == b"1\n"

    def untouched(self) -> bool:
        """Whether none of its files were changed."""
        return self._files == _of(self._upper)

    def same(self) -> bool:
        """Whether it is as it was."""
        return (
            self.alone()
            and self._met == self._of_limits()
            and self._files == _of(self._upper)
            and self._shared == _of(self._shm)
        )

    def close(self) -> None:
        """Let go of what was opened."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class Keeping:
    """The boxes of one host that wait for another program of their tenant."""

    def __init__(self, host: "Host") -> None:
        self._host = host
        self._boxes: dict[Key, list[tuple[Box, float]]] = {}
        self._count = 0

    def __contains__(self, box: Box) -> bool:
        return any(box is kept for boxes in self._boxes.values() for kept, _ in boxes)

    def take(self, tenant: str, shape: str, layers: tuple[str, ...]) -> Box | None:
        """A box that is as new, of this tenant and shape, on the files that a new one would have."""
        waiting = self._boxes.get((tenant, shape))
        while waiting:
            box, _ = waiting.pop()
            self._count -= 1
            if not waiting:
                del self._boxes[tenant, shape]
            if box.state == "running" and box.spec.root.layers == layers:
                return box
            self._drop(box)
        return None

    def look(self, box: Box) -> None:
        """A new box, before its first program."""
        if self._host.disk.btrfs:
            with contextlib.suppress(OSError, IndexError, KeyError):
                box.looks = Looks(box)

    def give(self, box: Box, tenant: str, shape: str) -> None:
        """A box whose program has ended and whose caller has let go: kept when it is as new, else removed."""
        try:
            clean = (
                box.looks is not None
                and box.state == "running"
                and not box.commands
                and not box.finished
                and not box.listeners
                and box.uses < USES
                and box.network is not None
                and not box.network.used
                and _drained(box.network.channel)
                and box.network.calm()
                and box.looks.same()
            )
        except (OSError, IndexError, ValueError):
            clean = False
        if not clean or self._host.stopping.is_set() or self._host.admission.crowded:
            return self._drop(box)
        box.uses += 1
        box.labels = {}
        box.trace.also = None
        self._boxes.setdefault((tenant, shape), []).append((box, time.monotonic()))
        self._count += 1
        while self._count > MOST:
            self._drop_oldest()

    def evict(self) -> None:
        """The one that has waited longest makes room."""
        if self._boxes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = min(self._boxes, key=lambda key: self._boxes[key][0][1])
        self._drop(self._boxes[oldest].pop(0)[0])
        self._count -= 1
        if not self._boxes[oldest]:
            del self._boxes[oldest]

    def tick(self) -> None:
        """Remove those that nobody wants any more."""
        late = time.monotonic() - IDLE
        for key, boxes in list(self._boxes.items()):
            stay = [entry for entry in boxes if entry[1] > late]
            for box, since in boxes:
                if since <= late:
                    self._count -= 1
                    self._drop(box)
            if stay:
                self._boxes[key] = stay
            else:
                del self._boxes[key]

    def _drop(self, box: Box) -> None:
        self._host.spawn_task(self._host.kill(box))


def _drained(listener: int) -> bool:
    """Nothing waits at a listener: what did was sent by a program that is gone, and nobody is to hear it in another's name."""
    waits = select.poll()
    waits.register(listener, select.POLLIN)
    if not waits.poll(0):
        return True
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, os.dup(listener))) as accepting:
        for _ in range(4096):
            try:
                accepting.accept()[0].close()
            except BlockingIOError:
                return True
    return False


def _file(group: Cgroup, controller: str, name: str) -> str:
    return f"{group.directories[controller]}/{name}"


def _of(fd: int) -> tuple[int, ...]:
    """A directory on btrfs or in memory: its size is that of the names in it, its ctime that of the last change of anything about it."""
    here = os.fstat(fd)
    return here.st_mode, here.st_uid, here.st_gid, here.st_nlink, here.st_size, here.st_mtime_ns, here.st_ctime_ns
