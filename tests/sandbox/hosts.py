"""A host of one's own for tests: a state directory with a short path, its process, and what is left of it on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from livinglayer.sandbox.client import _clients
from livinglayer.sandbox.native import build

PREFIX = "ll-"  # short: the path of a Unix socket has 107 bytes
PLACE = Path("/tmp")
OWN = (b"multiprocessing.", b"/bin/postgres")  # of the tests themselves: they only have the environment of a host
CACHE = os.environ.get("LAYER_CACHE", "/var/cache/livinglayer")


class Host:
    """One state directory; its host is started on demand by whoever asks for a box there."""

    def __init__(self) -> None:
        self.state = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=PLACE))
        compiled = build(Path(CACHE))  # once for all hosts of all test runs
        shutil.copytree(compiled, self.state / "native" / compiled.name)

    def environment(self) -> dict[str, str]:
        """What a process needs to use this host; the caches of bases and kernels are the machine's."""
        return {"LAYER_STATE": str(self.state), "LAYER_CACHE": CACHE, "LAYER_HOST_IDLE": "0"}  # it ends when we say so

    @property
    def pid(self) -> int:
        return int((self.state / "run/host.pid").read_text())

    def alive(self) -> bool:
        """Whether its process runs, if it was ever started."""
        try:
            return running(self.pid)
        except (OSError, ValueError):
            return not (self.state / "run").exists()

    @property
    def log(self) -> str:
        """What it complained of."""
        with contextlib.suppress(OSError):
            return (self.state / "run/host.log").read_text(errors="replace")
        return ""

    def python(self, code: str, *args: str, wait: bool = True) -> subprocess.Popen[str]:
        """Another client of this host: a Python process of its own, with `Sandbox` imported."""
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys\nfrom livinglayer.sandbox import Sandbox\n" + code, *args],
            env=os.environ | self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if wait:
            process.wait(60)
        return process

    def hang_up(self) -> None:
        """Close this process's own connections; its ephemeral boxes end."""
        for key in [key for key in _clients if self.state in (key if isinstance(key, tuple) else ())]:
            _clients.pop(key).close()

    def crash(self) -> None:
        """kill -9 of the host's process."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not running(pid), "the host is gone")

    def stop(self) -> None:
        """End it as a person would; returns when its process is gone."""
        with contextlib.suppress(OSError, ValueError):
            pid = self.pid
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: not running(pid), "the host has stopped", 30)

    def remains(self) -> list[str]:
        """Whatever on this machine belongs to this state directory and is no file of it: nothing, once the host has stopped."""
        found = [f"process {pid}: {words[:200]}" for pid, words in self._processes()]
        found += [f"mount {line.split()[4]}" for line in _mounts() if str(self.state) in line]
        found += [f"loop device {line}" for line in self._loops()]
        return found + [f"cgroup {path}" for path in self._cgroups()]

    def remove(self) -> None:
        """Remove all of it by force, the directory last."""
        self.hang_up()
        for _ in range(3):
            for path in self._cgroups():
                with contextlib.suppress(OSError):
                    (path / "freezer.state").write_text("THAWED")
            for pid, _ in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for line in reversed([line for line in _mounts() if str(self.state) in line]):
            subprocess.run(["umount", "-l", line.split()[4]], capture_output=True, check=False)
        for line in self._loops():
            subprocess.run(["losetup", "-d", line], capture_output=True, check=False)
        for path in self._cgroups():
            with contextlib.suppress(OSError):
                path.rmdir()
        shutil.rmtree(self.state, ignore_errors=True)

    def _processes(self) -> Iterator[tuple[int, str]]:
        mark, group = str(self.state).encode(), self._group().encode()
        for process in Path("/proc").iterdir():
            if not process.name.isdigit() or int(process.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes()
                if not running(int(process.name)) or any(own in words for own in OWN):
                    continue
                environment = (process / "environ").read_bytes()
                if mark in words or b"LAYER_STATE=" + mark in environment or group in (process / "cgroup").read_bytes():
                    yield int(process.name), words.replace(b"\0", b" ").decode("utf-8", "replace")

    def _group(self) -> str:
        return "livinglayer-" + hashlib.sha256(str(self.state).encode()).hexdigest()[:8]

    def _cgroups(self) -> list[Path]:
        """Deepest first."""
        found: list[Path] = []
        for root in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*")):
            if (top := root / self._group()).is_dir():
                found += [Path(at) for at, _, _ in os.walk(top, topdown=False)]
        return found

    def _loops(self) -> list[str]:
        listed = subprocess.run(
            ["losetup", "--list", "--noheadings", "--output", "NAME,AUTOCLEAR,BACK-FILE"],
            capture_output=True,
            text=True,
            check=False,
        )
        # One that clears itself is only waiting for a mount namespace of somebody else's that saw it.
        lines = [line.split() for line in listed.stdout.splitlines() if str(self.state) in line]
        return [name for name, clears, *_ in lines if clears == "0"]

    def census(self) -> Counter[str]:
        """What this host holds now, by kind: to be compared with what it holds after boxes have come and gone."""
        held: Counter[str] = Counter()
        processes = [pid for pid, _ in self._processes() if pid != os.getpid()]
        for pid in processes:
            with contextlib.suppress(OSError):
                held["process " + (Path(f"/proc/{pid}/comm").read_text().strip())] += 1
        spawner = int((self.state / "run/spawner.pid").read_text()) if (self.state / "run/spawner.pid").exists() else 0
        for pid in {self.pid, spawner} - {0}:
            with contextlib.suppress(OSError):
                held[f"fds of {Path(f'/proc/{pid}/comm').read_text().strip()}"] = len(os.listdir(f"/proc/{pid}/fd"))
        for kind in ("mnt", "pid", "net", "user", "ipc", "uts"):
            held[f"namespaces {kind}"] = len({_namespace(pid, kind) for pid in processes})
        held["mounts"] = sum(str(self.state) in line for line in _mounts())
        held["cgroups"] = len(self._cgroups())
        for name in ("run/boxes", "disk/boxes", "disk/tmp", "suspended", "boxes"):
            with contextlib.suppress(OSError):
                held[name] = len(os.listdir(self.state / name))
        return held


def _namespace(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(true: Callable[[], object], what: str, seconds: float = 10) -> None:
    """Returns when `true()` is; fails with `what` when it never becomes so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {what}"
        time.sleep(0.02)


def sweep() -> None:
    """Remove hosts of test runs that were killed before they could."""
    for place in PLACE.glob(f"{PREFIX}*-*"):
        owner = place.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            left = Host.__new__(Host)
            left.state = place
            left.remove()
