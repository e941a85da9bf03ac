"""Limits of boxes: cgroup v2 where its controllers can be had, else v1, else none (then only rlimits bind, and `doctor` says so)."""

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

LEFTOVER = 4 << 20  # bytes still charged to a cgroup that may serve again: page cache on its way out
PERIOD = 100_000  # µs in which a box may use cpu × PERIOD
Version = Literal["v2", "v1", "none"]


class Cgroups:
    """The cgroups of one host: found by doing, made ahead in a small pool, since making one takes longer than using it."""

    def __init__(self, state: Path, pool: int = 8) -> None:
        self.name = "livinglayer-" + hashlib.sha256(str(state).encode()).hexdigest()[:8]
        self.version, self.parents = _find(self.name)
        self._spare: list[Cgroup] = []
        self._size, self._count = pool, 0

    @property
    def limits(self) -> frozenset[str]:
        """Which limits bind here."""
        return (
            frozenset({"memory", "pids", "cpu"} & set(self.parents))
            if self.version == "v1"
            else frozenset({"memory", "pids", "cpu"} if self.version == "v2" else ())
        )

    @property
    def spare(self) -> list["Cgroup"]:
        """Those that wait for a box."""
        return list(self._spare)

    def take(self, memory: int, pids: int, cpu: float) -> "Cgroup":
        """A cgroup with these limits."""
        group = self._spare.pop() if self._spare else self._make()
        try:
            group.limit(memory, pids, cpu)
        except BaseException:
            group.remove()
            raise
        return group

    def put_back(self, group: "Cgroup") -> bool:
        """The cgroup of a box that has ended: kept for the next box if it is empty and can be made as new, else removed. False while busy."""
        if not group.directories:
            return True
        if self.version == "v1" and len(self._spare) < 4 * self._size and group.renew():
            self._spare.append(group)
            return True
        return group.remove()

    def refill(self) -> bool:
        """Make one more for the pool; False when it is full."""
        if self.version == "none" or len(self._spare) >= self._size:
            return False
        self._spare.append(self._make())
        return True

    def _make(self) -> "Cgroup":
        while True:
            self._count += 1
            name = f"{os.getpid()}-{self._count}"
            directories = {controller: parent / name for controller, parent in self.parents.items()}
            # A host before us may have had our pid, and its boxes live on: two in one would end together.
            if not any(directory.exists() for directory in directories.values()):
                return Cgroup(self.version, directories)

    def adopt(self, paths: dict[str, str]) -> "Cgroup":
        """The cgroup of a box that outlived an earlier host."""
        return Cgroup(self.version, {controller: Path(path) for controller, path in paths.items()})

    def leftovers(self, keep: set[str]) -> Iterator[Path]:
        """Cgroups of ours whose path is not in `keep`."""
        for parent in set(self.parents.values()):
            for path in sorted(parent.iterdir()):
                if path.is_dir() and str(path) not in keep:
                    yield path

    def close(self) -> None:
        """Remove the pool and, when no box is left, our own group."""
        for group in self._spare:
            group.remove()
        self._spare.clear()
        for parent in set(self.parents.values()):
            with contextlib.suppress(OSError):
                parent.rmdir()


class Cgroup:
    """The cgroup of one box: a directory in v2, one in each hierarchy in v1."""

    def __init__(self, version: Version, directories: dict[str, Path]) -> None:
        self.version, self.directories = version, directories
        self._fds: list[int] = []
        self.closed = False
        for directory in dict.fromkeys(directories.values()):
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
        try:
            _ = self.task_fds
        except OSError:
            self.remove()
            raise
        self._written: dict[str, str] = {}
        self._places = {controller: f"{path}/" for controller, path in directories.items()}
        self._before: dict[str, int] = {}  # counts of the last box, which v1 can't reset

    @property
    def task_fds(self) -> list[int]:
        """Files into which a child writes b"0" to be in it; kept open until `rest`, none once it is closed."""
        if not self._fds and not self.closed:
            name = (
                "cgroup.procs" if self.version == "v2" else "tasks"
            )  # v1: writing cgroup.procs stalls for milliseconds
            for directory in dict.fromkeys(self.directories.values()):
                self._fds.append(os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC))
        return self._fds

    def rest(self) -> None:
        """Close what a box at rest does not need; it is opened again when something is started in it."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def renew(self) -> bool:
        """Make it as new for another box; False when something of the last one is left in it."""
        if self.pids() or _int(self._read("memory", "memory.usage_in_bytes")) > LEFTOVER:
            return False
        for controller, name in (("cpuacct", "cpuacct.usage"), ("memory", "memory.max_usage_in_bytes")):
            self._written.pop(name, None)
            self._write(controller, name, "0")
        self._before = {"oom_kills": self._oom_kills(), "pids_refused": self._pids_refused()}
        return True

    def _oom_kills(self) -> int:
        return _int(self._read("memory", "memory.oom_control").rpartition("oom_kill ")[2])

    def _pids_refused(self) -> int:
        return _int(self._read("pids", "pids.events").removeprefix("max "))

    def limit(self, memory: int, pids: int, cpu: float) -> None:
        """Set the limits; what is set already costs nothing."""
        quota = max(1000, int(cpu * PERIOD))
        if self.version == "v2":
            self._write("memory", "memory.max", str(memory))
            self._write("memory", "memory.swap.max", "0")
            self._write("memory", "memory.oom.group", "0")
            self._write("pids", "pids.max", str(pids))
            self._write("cpu", "cpu.max", f"{quota} {PERIOD}")
        elif self.version == "v1":
            # The first may never be above the second (EINVAL); one that was here before us, or was adopted, has limits that we did not write.
            names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
            shrinking = _int(self._written.get(names[0]) or self._read("memory", names[0])) > memory
            for name in names if shrinking else names[::-1]:
                self._write("memory", name, str(memory))
            # v1 counts what waits in sockets apart, and not at all unless it is limited: half a gigabyte through loopback otherwise
            self._write("memory", "memory.kmem.tcp.limit_in_bytes", str(max(memory // 4, 8 << 20)))
            self._write("pids", "pids.max", str(pids))
            self._write("cpu", "cpu.cfs_quota_us", str(quota))

    def _write(self, controller: str, name: str, text: str) -> None:
        directory = self._places.get(controller)
        if directory is None or self._written.get(name) == text:
            return
        try:
            fd = os.open(directory + name, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # no swap accounting
            return
        try:
            os.write(fd, text.encode())
        except OSError as error:
            raise OSError(error.errno, f"can't write {text!r}: {error.strerror}", directory + name) from None
        finally:
            os.close(fd)
        self._written[name] = text

    def _read(self, controller: str, name: str) -> str:
        directory = self._places.get(controller)
        if directory is None:
            return ""
        try:
            fd = os.open(directory + name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            return os.read(fd, 65536).decode()
        except OSError:
            return ""
        finally:
            os.close(fd)

    def freeze(self) -> None:
        """Stop every process of the box; memory stays. Returns when all have stopped."""
        self._freeze(True)

    def thaw(self) -> None:
        """Let them go on."""
        self._freeze(False)

    def _freeze(self, on: bool) -> None:
        if self.version == "v2":
            self._written.pop("cgroup.freeze", None)
            self._write("memory", "cgroup.freeze", "1" if on else "0")
        elif "freezer" in self.directories:
            self._written.pop("freezer.state", None)
            self._write("freezer", "freezer.state", "FROZEN" if on else "THAWED")
        else:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if on else signal.SIGCONT)
            return
        deadline = time.monotonic() + 2
        while on and not self.frozen() and time.monotonic() < deadline:
            time.sleep(0.0001)

    def frozen(self) -> bool:
        """Whether all of it stands still."""
        if self.version == "v2":
            return "frozen 1" in self._read("memory", "cgroup.events")
        return self._read("freezer", "freezer.state").strip() == "FROZEN"

    def pids(self) -> list[int]:
        """The processes in it."""
        for controller in self.directories:
            return [int(line) for line in self._read(controller, "cgroup.procs").split()]
        return []

    def kill(self) -> None:
        """End every process in it, frozen or not, until none is left (2 seconds at most)."""
        if not self.directories:
            return
        if self.version == "v2":
            with contextlib.suppress(OSError):
                (next(iter(self.directories.values())) / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + 2
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.version == "v1":
                self._freeze(False)
            time.sleep(0.0005)

    def stats(self) -> dict[str, Any]:
        """Use so far: cpu seconds, memory now and at its peak (bytes), processes, limits hit."""
        if self.version == "v2":
            cpu = dict(line.split() for line in self._read("cpu", "cpu.stat").splitlines())
            events = dict(line.split() for line in self._read("memory", "memory.events").splitlines())
            return {
                "cpu_seconds": int(cpu.get("usage_usec", 0)) / 1e6,
                "memory": _int(self._read("memory", "memory.current")),
                "memory_peak": _int(self._read("memory", "memory.peak")),
                "pids": _int(self._read("pids", "pids.current")),
                "oom_kills": int(events.get("oom_kill", 0)),
                "pids_refused": _int(self._read("pids", "pids.events").removeprefix("max ")),
            }
        return {
            "cpu_seconds": _int(self._read("cpuacct", "cpuacct.usage")) / 1e9,
            "memory": _int(self._read("memory", "memory.usage_in_bytes")),
            "memory_peak": _int(self._read("memory", "memory.max_usage_in_bytes")),
            "pids": _int(self._read("pids", "pids.current")),
            "oom_kills": self._oom_kills() - self._before.get("oom_kills", 0),
            "pids_refused": self._pids_refused() - self._before.get("pids_refused", 0),
        }

    def close(self) -> None:
        """Close our fds; the cgroup stays."""
        self.rest()
        self.closed = True

    def remove(self) -> bool:
        """Remove it; False while a process is still leaving."""
        self.close()
        return [remove(directory) for directory in dict.fromkeys(self.directories.values())].count(False) == 0


def remove(directory: Path) -> bool:
    """Remove one cgroup directory; False while it is busy."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _int(text: str) -> int:
    try:
        return int(text.strip() or 0)
    except ValueError:
        return 0


def _find(name: str) -> tuple[Version, dict[str, Path]]:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for _, where, kind, *_ in mounts:
        if kind == "cgroup2" and (found := _try_v2(Path(where), name)):
            return "v2", found
    parents: dict[str, Path] = {}
    for _, where, kind, options, *_ in mounts:
        if kind != "cgroup":
            continue
        for controller in ("memory", "pids", "cpu", "cpuacct", "freezer"):
            if controller in options.split(","):
                path = Path(where) / name
                with contextlib.suppress(OSError):
                    path.mkdir(exist_ok=True)
                    parents[controller] = path
    return ("v1", parents) if parents else ("none", {})


def _try_v2(root: Path, name: str) -> dict[str, Path] | None:
    """Controllers count only when they could be given to a child of ours: a mount may be there and empty."""
    own = Path("/proc/self/cgroup").read_text().strip().split("::")[-1].strip("/") if os.geteuid() else ""
    parent = root / own / name
    try:
        if not {"memory", "pids", "cpu"} <= set((parent.parent / "cgroup.controllers").read_text().split()):
            return None
        (parent.parent / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        parent.mkdir(exist_ok=True)
        (parent / "cgroup.subtree_control").write_text("+memory +pids +cpu")
    except OSError:
        return None
    return dict.fromkeys(("memory", "pids", "cpu"), parent)
