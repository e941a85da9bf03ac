"""Measure boxes: our tiers through the public Python API, side by side with bwrap, runc, crun, podman and runsc in one run.

Everything takes turns, round by round, and the median of the rounds' own ratios counts. bwrap and the OCI runtimes get the same limits
(memory, processes, cpu) as a box has. `python -m bench.boxes [--quick] [--only NAME]`; `make bench` runs it after the substrate's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.report import Failed, Line, keep_part, table

HERE = Path(__file__).parent
MARK = "# Benchmark of boxes"
HEAD = ["operation", "peer", "ours", "figure", "bar", "met"]
SHAPE: dict[str, Any] = {"memory": "256M", "pids": 64, "cpu": 1.0}
CONTROLLERS = {
    "memory": ("memory.limit_in_bytes", "268435456"),
    "pids": ("pids.max", "64"),
    "cpu": ("cpu.cfs_quota_us", "100000"),
}
BWRAP = (
    "bwrap --unshare-all --die-with-parent --new-session --clearenv --setenv PATH /usr/bin:/bin --ro-bind /usr /usr --symlink usr/lib /lib "
    "--symlink usr/lib64 /lib64 --symlink usr/bin /bin --proc /proc --dev /dev --tmpfs /tmp --cap-drop ALL"
).split()


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Limits:
    """A fresh cgroup for each run of a peer, as a box has one: v1 or v2, made, entered and removed inside the time measured."""

    def __init__(self) -> None:
        self.count = 0
        roots = {name: Path("/sys/fs/cgroup") / name for name in CONTROLLERS}
        self.roots = {name: root for name, root in roots.items() if root.is_dir()}
        self.v2 = None if self.roots else Path("/sys/fs/cgroup")

    @contextlib.contextmanager
    def group(self) -> Iterator[Callable[[], None]]:
        self.count += 1
        name = f"layer-bench-{os.getpid()}-{self.count}"
        if self.v2:
            made = [self.v2 / name]
            made[0].mkdir()
            for file, text in (("memory.max", "268435456"), ("pids.max", "64"), ("cpu.max", "100000 100000")):
                (made[0] / file).write_text(text)
        else:
            made = [root / name for root in self.roots.values()]
            for directory, (file, text) in zip(made, (CONTROLLERS[key] for key in self.roots), strict=True):
                directory.mkdir()
                (directory / file).write_text(text)
        tasks = [os.open(directory / ("cgroup.procs" if self.v2 else "tasks"), os.O_WRONLY) for directory in made]

        def enter() -> None:
            for fd in tasks:
                os.write(fd, b"0")

        try:
            yield enter
        finally:
            for fd in tasks:
                os.close(fd)
            for directory in made:
                for _ in range(2000):
                    try:
                        directory.rmdir()
                        break
                    except OSError:
                        time.sleep(0.0001)


def run(command: list[str], enter: Callable[[], None] | None = None) -> None:
    subprocess.run(
        command,
        preexec_fn=enter,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


LIMITS = Limits()


def bwrap(command: list[str]) -> None:
    with LIMITS.group() as enter:
        run([*BWRAP, *command], enter)


def cold() -> None:
    from livinglayer.sandbox import Sandbox

    box = Sandbox.create(warm=False, **SHAPE)
    box.run(["true"])
    box.kill()


class Bundle:
    """A directory that an OCI runtime runs `true` from: Debian's files, its default spec, the same limits."""

    def __init__(self, home: Path, root: Path) -> None:
        self.home, self.count = home, 0
        (home / "rootfs").mkdir(parents=True)
        run(["mount", "--bind", "-o", "ro", str(root), str(home / "rootfs")])
        subprocess.run(["runc", "spec"], cwd=home, check=True)
        spec = json.loads((home / "config.json").read_text())
        spec["process"] |= {"terminal": False, "args": ["true"]}
        spec["root"]["readonly"] = True
        spec["linux"]["resources"] = {
            "memory": {"limit": 256 << 20},
            "pids": {"limit": 64},
            "cpu": {"quota": 100000, "period": 100000},
        }
        (home / "config.json").write_text(json.dumps(spec))

    def run(self, runtime: list[str]) -> None:
        self.count += 1
        run([*runtime, "run", "--bundle", str(self.home), f"bench-{os.getpid()}-{self.count}"])

    def close(self) -> None:
        subprocess.run(["umount", str(self.home / "rootfs")], check=False)


def worker(kind: str, seconds: float, start: Any, counts: Any) -> None:
    """One of two processes that spawn as fast as they can."""
    if kind != "bwrap":
        cold()
    start.wait()
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        bwrap(["true"]) if kind == "bwrap" else cold()
        count += 1
    counts.put(count / seconds)


def spawns(kind: str, seconds: float) -> float:
    """Spawns a second of two workers."""
    context = multiprocessing.get_context("spawn")
    start, counts = context.Barrier(2), context.Queue()
    workers = [context.Process(target=worker, args=(kind, seconds, start, counts)) for _ in range(2)]
    for process in workers:
        process.start()
    total = sum(counts.get() for _ in workers)
    for process in workers:
        process.join()
    return float(total)


class Bench:
    """The figures, in the order they are taken."""

    def __init__(self, quick: bool, only: str | None) -> None:
        self.quick, self.only = quick, only
        self.rounds = 12 if quick else 60
        self.parts: list[tuple[str, list[Line | Failed]]] = []
        self.notes: list[str] = []

    def part(self, title: str, name: str, work: Callable[[], list[Line | Failed]]) -> None:
        if self.only and self.only != name:
            return
        print(f"bench: {title} …", file=sys.stderr, flush=True)
        try:
            lines = work()
        except Exception as error:
            lines = [Failed(title, f"{type(error).__name__}: {error}")]
        self.parts.append((title, lines))

    def turns(self, sides: dict[str, Callable[[], float | None]], rounds: int | None = None) -> dict[str, list[float]]:
        """Each side once a round; a side returns its own time, or None to be timed as a whole."""
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds or self.rounds):
            for name, work in sides.items():
                start = time.perf_counter()
                took = work()
                times[name].append(time.perf_counter() - start if took is None else took)
                time.sleep(0.01)  # what is refilled in the background is refilled outside of what is measured
        return times

    @staticmethod
    def ratio(ours: list[float], peer: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(ours, peer, strict=True))

    def against(
        self, label: str, times: dict[str, list[float]], ours: str, peer: str, low: float | None = None
    ) -> Line:
        return Line(
            label,
            self.ratio(times[ours], times[peer]),
            "×",
            low=low,
            plain=statistics.median(times[peer]),
            ours=statistics.median(times[ours]),
        )

    # ---- the parts ----

    def namespace(self) -> list[Line | Failed]:
        from livinglayer.sandbox import Sandbox

        def plain() -> None:
            run(["/bin/true"])

        def warm() -> float:
            start = time.perf_counter()
            box = Sandbox.create(**SHAPE)
            box.run(["true"])
            box.kill()
            return time.perf_counter() - start

        def first_statement() -> float:
            start = time.clock_gettime(time.CLOCK_MONOTONIC)
            box = Sandbox.create(**SHAPE)
            said = box.python("import time; print(time.clock_gettime(time.CLOCK_MONOTONIC))").stdout
            box.kill()
            return float(said) - start

        inside = Sandbox.create(**SHAPE)

        def again() -> None:
            inside.run(["true"])

        for prepare in (cold, warm, first_statement):
            prepare()
        time.sleep(0.1)
        times = self.turns(
            {
                "plain": plain,
                "bwrap": lambda: bwrap(["true"]),
                "cold": cold,
                "warm": warm,
                "bwrap python": lambda: bwrap(["python3", "-c", "pass"]),
                "first": first_statement,
                "again": again,
            }
        )
        inside.kill()
        return [
            self.against("true, cold, against bwrap with the same limits", times, "cold", "bwrap", 0.6),
            self.against("true, a box that waits in the pool, against bwrap", times, "warm", "bwrap", 0.25),
            self.against(
                "Python's first statement through the zygote, against bwrap python3 -c pass",
                times,
                "first",
                "bwrap python",
                0.3,
            ),
            self.against("true in a box that is there, against plain fork and exec", times, "again", "plain"),
            self.against("bwrap itself, against plain fork and exec", times, "bwrap", "plain"),
        ]

    def throughput(self) -> list[Line | Failed]:
        seconds, ratios, figures = (1.0, [], []) if self.quick else (3.0, [], [])
        for _ in range(2 if self.quick else 5):
            peer, ours = spawns("bwrap", seconds), spawns("ours", seconds)
            ratios.append(ours / peer)
            figures.append((peer, ours))
        peer, ours = (statistics.median(side) for side in zip(*figures, strict=True))
        return [
            Line(
                "spawns a second, 2 workers, against bwrap with the same limits",
                statistics.median(ratios),
                "×",
                high=2,
                plain=1 / peer,
                ours=1 / ours,
            ),
            Line("spawns a second of ours", ours, "/s"),
            Line("spawns a second of bwrap", peer, "/s"),
        ]

    def runtimes(self) -> list[Line | Failed]:
        """The peers that are not in the race for the bar, each against our cold box."""
        from livinglayer.sandbox.client import blocking_client

        root = next((blocking_client().state / "disk" / "layers").glob("*/usr/bin/dash"), None)
        lines: list[Line | Failed] = []
        with tempfile.TemporaryDirectory(prefix="layer-bundle-") as home:
            bundle = Bundle(Path(home) / "bundle", root.parents[2] if root else Path("/"))
            sides: dict[str, Callable[[], float | None]] = {"cold": cold}
            for name, command in (
                ("crun", ["crun"]),
                ("runc", ["runc"]),
                ("runsc", ["runsc", "--network=none", "--rootless=false", "--ignore-cgroups"]),
            ):
                if shutil.which(name):
                    sides[name] = lambda command=command: bundle.run(command)  # type: ignore[misc]
            if shutil.which("podman"):
                podman = [
                    "podman",
                    "run",
                    "--rm",
                    "--network=none",
                    "--cgroups=disabled",
                    "--pids-limit=-1",
                    "--rootfs",
                    str(bundle.home / "rootfs"),
                    "true",
                ]
                sides["podman"] = lambda: run(podman)
            try:
                for name in list(sides):
                    try:
                        sides[name]()
                    except (subprocess.CalledProcessError, OSError) as error:
                        lines.append(Failed(f"{name} run true", str(error)))
                        del sides[name]
                times = self.turns(sides, 5 if self.quick else 15)
            finally:
                bundle.close()
        return lines + [
            self.against(f"true, cold namespace box, against {name} run", times, "cold", name)
            for name in sides
            if name != "cold"
        ]

    def tiers(self) -> list[Line | Failed]:
        """Start, suspend, resume and fork on every tier that works here."""
        from livinglayer.errors import LayerError
        from livinglayer.sandbox import Sandbox

        lines: list[Line | Failed] = []
        for tier in ("process", "namespace", "container", "gvisor", "microvm", "vm"):
            rounds = 3 if self.quick else 5
            try:
                Sandbox.create(tier=tier).kill()
                took: dict[str, list[float]] = {}
                for _ in range(rounds):
                    self._life(tier, took)
            except LayerError as error:
                lines.append(Failed(f"{tier}", error.message))
                continue
            for what, times in took.items():
                low = {("microvm", "start"): 0.150, ("microvm", "fork ×10"): 1.0}.get((tier, what))
                median = statistics.median(times)
                lines.append(Line(f"{tier}: {what}", median * 1e3, "ms", low=low * 1e3 if low else None, ours=median))
        return lines

    def _life(self, tier: str, took: dict[str, list[float]]) -> None:
        from livinglayer.sandbox import Sandbox

        def note(what: str, work: Callable[[], Any]) -> Any:
            start = time.perf_counter()
            value = work()
            took.setdefault(what, []).append(time.perf_counter() - start)
            return value

        box = note("start", lambda: Sandbox.create(tier=tier, warm=False))
        try:
            note("first command", lambda: box.run(["true"]))
            note("next command", lambda: box.run(["true"]))
            note("pause", box.pause)
            note("resume", box.resume)
            note("suspend", box.suspend)
            note("resume from suspend", box.resume)
            for fork in note("fork ×10", lambda: box.fork(10)):
                fork.kill()
            note("snapshot", box.snapshot)
        finally:
            note("kill", box.kill)

    def trees(self) -> list[Line | Failed]:
        """Ten forks of a tree of 10,000 files, from a snapshot and of a live box that writes."""
        from livinglayer.sandbox import Sandbox

        size = 20_000 if self.quick else 100_000
        script = f"import os\nfor i in range(10000):\n d=f'/home/user/t/{{i//100}}'; os.makedirs(d,exist_ok=True); open(f'{{d}}/{{i}}','wb').write(os.urandom({size}))"
        with Sandbox.create(disk="4G", memory="2G") as box:
            box.python(script, timeout=300)
            snapshot = box.snapshot()
            before = box.metrics()["disk"]
            from_snapshot, live = [], []
            for _ in range(5):
                start = time.perf_counter()
                forks = [Sandbox.create(snapshot=snapshot.id, warm=False) for _ in range(10)]
                from_snapshot.append(time.perf_counter() - start)
                grown = sum(fork.metrics()["disk"] for fork in forks)
                for fork in forks:
                    fork.kill()
            writer = box.start("while :; do date >> /home/user/log; done")
            for _ in range(5):
                start = time.perf_counter()
                forks = box.fork(10)
                live.append(time.perf_counter() - start)
                for fork in forks:
                    fork.kill()
            writer.kill()
        self.notes.append(f"The tree of the forks held {before >> 20} MB.")
        return [
            Line(
                "10 forks of the tree from a snapshot",
                statistics.median(from_snapshot) * 1e3,
                "ms",
                low=50,
                ours=statistics.median(from_snapshot),
            ),
            Line("disk of those ten", grown / 1e6, "MB", low=10),
            Line(
                "10 forks of a live, writing box",
                statistics.median(live) * 1e3,
                "ms",
                low=300,
                ours=statistics.median(live),
            ),
        ]

    def density(self) -> list[Line | Failed]:
        """Idle namespace boxes at once."""
        from livinglayer.sandbox import Sandbox

        count = 200 if self.quick else 2000
        free = _available()
        boxes, times = [], []
        try:
            for _ in range(count):
                start = time.perf_counter()
                boxes.append(Sandbox.create(warm=False, **SHAPE))
                times.append(time.perf_counter() - start)
            used = free - _available()
            tenth = count // 10
            first, last = statistics.median(times[:tenth]), statistics.median(times[-tenth:])
        finally:
            for box in boxes:
                box.kill()
        return [
            Line(f"memory of each of {count} idle boxes", used / count / 1e6, "MB", low=2),
            Line("start of the last tenth against the first", last / first, "×", low=2, plain=first, ours=last),
        ]

    def text(self, seconds: float) -> str:
        lines = [line for _, part in self.parts for line in part]
        missed = [line.operation for line in lines if line.met is False]
        barred = sum(line.met is not None for line in lines)
        out = [
            MARK,
            "",
            f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores. The run took {seconds:.0f} s.",
            "",
        ]
        out.append(
            f"{barred - len(missed)} of {barred} figures meet their bar" + ("; these do not:" if missed else ".")
        )
        out += ["", *(f"- {name}" for name in missed), ""] if missed else [""]
        out.append(
            "A figure with × is ours over the peer's, both taking turns in one run; every box has all its protections and limits, made and removed"
        )
        out.append(
            "within the time, and is driven through the public Python API. bwrap and the OCI runtimes get the same limits. The median counts."
        )
        out += (self.notes and ["", *self.notes]) or []
        for title, part in self.parts:
            out += ["", f"## {title}", "", table(HEAD, [line.cells() for line in part])]
        return "\n".join(out)


def _available() -> int:
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.boxes", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a measurement")
    parser.add_argument("--only", help="one part: namespace, throughput, runtimes, tiers, trees, density")
    options = parser.parse_args()
    start = time.perf_counter()
    bench = Bench(options.quick, options.only)
    with tempfile.TemporaryDirectory(prefix="lb-", dir="/var/tmp") as state:
        os.environ["LAYER_STATE"] = state
        try:
            for title, name in (
                ("Tier namespace against bwrap", "namespace"),
                ("Spawns a second", "throughput"),
                ("Against other runtimes", "runtimes"),
                ("The life of a box on each tier", "tiers"),
                ("Forks of a large tree", "trees"),
                ("Density", "density"),
            ):
                bench.part(title, name, getattr(bench, name))
        finally:
            stop(Path(state))
    text = bench.text(time.perf_counter() - start)
    print(text)
    if not options.quick and not options.only:
        keep_part(HERE / "results.md", MARK, text)
    return int(any(isinstance(line, Failed) for _, part in bench.parts for line in part))


@contextlib.contextmanager
def apart() -> Iterator[Path]:
    """A place for one run with a host and a configuration of its own; all of it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="lb-", dir="/var/tmp") as place:
        os.environ["LAYER_STATE"] = place + "/state"
        os.environ["XDG_CONFIG_HOME"] = place + "/config"
        try:
            yield Path(place)
        finally:
            stop(Path(place) / "state")


def stop(state: Path) -> None:
    """End the host of this run and wait until its disk is unmounted."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((state / "run" / "host.pid").read_text())
        os.kill(pid, 15)
        for _ in range(6000):
            if (
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            ):  # a child of ours, if we started it
                return
            time.sleep(0.05)
        sys.exit(f"the host of {state} does not end: what is mounted there must not be removed")


if __name__ == "__main__":
    sys.exit(main())
