"""A host for a whole module, with an eye on each of its processes and a count of everything that boxes could leave in them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from sandbox.hosts import Host

from livinglayer.sandbox import client

T = TypeVar("T")


class Home(Host):
    """A host that runs from the beginning, and its servants."""

    def __init__(self, environment: Mapping[str, str] = {}) -> None:
        super().__init__()
        with variables(self.environment() | dict(environment)):
            client.connect(self.state).close()
        wait_for(lambda: read(self.state / "run/host.pid"))

    @property
    def spawner(self) -> int:
        return int(read(self.state / "run/spawner.pid"))

    @property
    def gateway(self) -> int:
        """The gateway that runs now."""
        return wait_for(lambda: self._child(b"livinglayer.sandbox.egress", children(self.pid)))

    @property
    def zygote(self) -> int:
        """The zygote, 0 before its first use."""
        return self._child(b"python3\0\0")

    def _child(self, word: bytes, among: Collection[int] | None = None) -> int:
        return next((pid for pid in among or descendants(self.pid) if word in read_bytes(f"/proc/{pid}/cmdline")), 0)

    @property
    def servants(self) -> dict[str, int]:
        """The processes that outlive boxes, by name."""
        found = {"host": self.pid, "spawner": self.spawner, "gateway": self.gateway, "zygote": self.zygote}
        return {name: pid for name, pid in found.items() if pid}

    def census(self) -> Counter[str]:
        """Everything a box consists of that could be left behind."""
        ours = {self.pid, self.spawner, *descendants(self.pid), *descendants(self.spawner)}
        states = Counter(state_of(pid) for pid in ours)
        found: Counter[str] = Counter()
        found["processes"] = len(ours) - states["Z"] - states[""]
        found["zombies"] = states["Z"]
        found["mounts"] = sum(str(self.state) in line for line in read("/proc/self/mountinfo").splitlines())
        found["cgroups"] = len(self._cgroups())
        found["loop devices"] = len(self._loops())
        for name, pid in self.servants.items():
            found[f"fds of {name}"] = len(list_directory(f"/proc/{pid}/fd"))
            if os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):
                found[f"mounts of {name}"] = len(read(f"/proc/{pid}/mountinfo").splitlines())
            found[f"threads of {name}"] = len(list_directory(f"/proc/{pid}/task"))
        for kind in ("net", "pid", "mnt", "user", "ipc", "uts", "cgroup"):
            found[f"{kind} namespaces"] = len(namespaces(kind, ours))
        for place in ("disk/boxes", "disk/tmp", "run/boxes", "suspended", "boxes"):
            found[place] = len(list_directory(self.state / place))
        found["quota groups"] = len(list_directory(self._quota_groups()))
        return found

    def _quota_groups(self) -> Path:
        """Where the kernel shows those of the btrfs at disk/."""
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            if read(backing).strip() == str(self.state / "disk.img"):
                for device in Path("/sys/fs/btrfs").glob(f"*/devices/{backing.parts[3]}"):
                    return device.parent.parent / "qgroups"
        return Path("/nonexistent")

    def left_since(self, before: Counter[str], seconds: float = 20) -> dict[str, int]:
        """What is more than before once all had time to go: nothing, it is hoped."""
        deadline = time.monotonic() + seconds
        while (left := dict(self.census() - before)) and time.monotonic() < deadline:
            self.commit()
            time.sleep(0.2)
        return left

    def commit(self) -> None:
        """Have the disk's cleaner do now what it does every half minute."""
        fd = os.open(self.state / "disk", os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, 0x9408)  # BTRFS_IOC_SYNC
        finally:
            os.close(fd)


@contextlib.contextmanager
def home(environment: Mapping[str, str] = {}) -> Iterator[Home]:
    """A host for the block, of which `Sandbox` makes its boxes. Nothing of it may be left afterwards."""
    made = Home(environment)
    try:
        with variables(made.environment()):
            yield made
            made.hang_up()
            made.stop()
            with contextlib.suppress(AssertionError):  # another test's mount namespace may hold our disk for a moment
                wait_for(lambda: not made.remains())
            left = made.remains()
    finally:
        made.remove()
    assert not left, "the host left behind:\n" + "\n".join(left)


@contextlib.contextmanager
def variables(given: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the block."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def wait_for(find: Callable[[], T], seconds: float = 10) -> T:
    """What `find()` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.01)
    return found


def read(path: Path | str) -> str:
    return read_bytes(path).decode("utf-8", "replace")


def read_bytes(path: Path | str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def list_directory(path: Path | str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def state_of(pid: int) -> str:
    """R, S, Z, … or nothing when there is no such process."""
    return read(f"/proc/{pid}/stat").rpartition(") ")[2][:1]


def children(pid: int) -> list[int]:
    return [
        int(child)
        for thread in list_directory(f"/proc/{pid}/task")
        for child in read(f"/proc/{pid}/task/{thread}/children").split()
    ]


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in children(todo.pop()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def namespaces(kind: str, pids: set[int]) -> set[str]:
    """Namespaces that these processes are in or hold open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
        for fd in list_directory(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if (leads := os.readlink(f"/proc/{pid}/fd/{fd}")).startswith(f"{kind}:["):
                    found.add(leads)
    return found
