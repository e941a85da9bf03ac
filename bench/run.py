"""One run over engines and table sizes: builds the beds, takes the figures, writes them up."""

from __future__ import annotations

import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import apsw
from cluster import Cluster

from bench.bed import Bed
from bench.measure import fsync_seconds
from bench.operations import FLAT, STEPS, beside, flat
from bench.peer import peer
from bench.report import HEAD, TITLES, Failed, Line, amount, duration, table

NOTES = f"""
A figure with × is the time through the layer over the time of the same thing on a plain table, same engine, same
driver and settings (on PostgreSQL those of the layer's own reading connection: no parallel workers, generic plans), same
run: both take turns, and the median of the rounds' own ratios counts. It is held against its bar at the
bar's own precision. "noise" is the plain table against itself: what lies within it says nothing. A flat operation may
take up to {FLAT}× of its time on the smaller table. Figures without a bar are for information."""


class Run:
    def __init__(self, home: Path, counts: list[int], seconds: float, peer: bool) -> None:
        self.home, self.counts, self.seconds, self.with_peer = home, sorted(counts), seconds, peer
        self.sections: list[str] = []
        self.lines: list[tuple[str, Line | Failed]] = []  # with where they belong
        self.versions = {
            "Python": platform.python_version(),
            "SQLite": apsw.sqlite_lib_version(),
            "apsw": apsw.apsw_version(),
            "psycopg": version("psycopg"),
        }
        self.began, self.fsync = time.monotonic(), fsync_seconds(home)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def take(self, where: str, name: str, step: Callable[[], Iterator[Line]]) -> list[Line | Failed]:
        """All lines of a step; what breaks is a line too, and the rest of the run goes on."""
        self.say(f"{where}: {name}")
        before = len(self.lines)
        with self.forgiving(where, name):
            self.lines.extend((where, line) for line in step())
        return [line for _, line in self.lines[before:]]

    @contextmanager
    def forgiving(self, where: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.lines.append((where, Failed(name or "the rest", f"{type(error).__name__}: {error}")))

    def engine(self, engine: str) -> None:
        """Every figure of one engine at every size."""
        with ExitStack() as opened, self.forgiving(TITLES[engine]):
            places = self.places(engine, opened)
            beds = []
            for count in self.counts:
                self.say(f"{TITLES[engine]}: {count:,} rows into a layer and a plain table")
                beds.append(Bed(engine, count, *next(places)))
                opened.callback(beds[-1].close)
            for bed in beds:
                where = f"{TITLES[engine]}, {bed.count:,} rows"
                lines = []
                for step in STEPS:
                    lines += self.take(where, step.__name__, lambda step=step, bed=bed: step(bed, self.seconds))
                self.sections.append(f"## {where}\n\n" + table(HEAD, [line.cells() for line in lines]))
                if self.with_peer:
                    self.peer(where, bed, next((line for line in lines if line.key == "bytes"), None))
            self.flat(engine, beds)

    def places(self, engine: str, opened: ExitStack) -> Iterator[tuple[str, str]]:
        """Where to put a layer and a plain table: two paths or two URLs."""
        if engine == "sqlite":
            for count in self.counts:
                yield str(self.home / f"layer{count}"), str(self.home / f"plain{count}.db")
            return
        # Large enough that a layer and its plain table do not push each other out of the cache.
        cluster = Cluster(self.home, shared_buffers="512MB")
        opened.callback(cluster.remove)
        self.versions["PostgreSQL"] = cluster.bin.parent.name
        while True:
            yield opened.enter_context(cluster.database()), opened.enter_context(cluster.database())

    def flat(self, engine: str, beds: list[Bed]) -> None:
        """Fork and diff on all sizes in turns: they must not grow with the table."""
        where = f"{TITLES[engine]}, fork and diff"
        rows = []

        def step() -> Iterator[Line]:
            for name, times, ratio in flat(beds, self.seconds):
                line = Line(name, ratio, "×", FLAT if len(beds) > 1 else None)
                operation, _, _, figure, bar, met = line.cells()
                rows.append([operation, *map(duration, times), figure, bar, met])
                yield line

        failed = [line for line in self.take(where, "flat in table size", step) if isinstance(line, Failed)]
        head = ["operation", *(f"{bed.count:,} rows" for bed in beds), "growth", "bar", "met"]
        rows += [[line.operation, *[""] * len(beds), line.error, "", "✗"] for line in failed]
        self.sections.append(f"## {where}\n\n" + table(head, rows))

    def peer(self, where: str, bed: Bed, size: Line | Failed | None) -> None:
        """What both do, on a DoltLite with as many rows."""
        home = self.home / f"peer-{bed.engine}-{bed.count}"
        home.mkdir()
        rows = []

        def step() -> Iterator[Line]:
            with peer(bed.count, home) as other:
                self.versions["DoltLite"] = other.version
                yield from beside(bed, other, self.seconds)
                if isinstance(size, Line):
                    for key, name in (
                        ("bytes", "bytes per such change"),
                        ("bytes collected", "the same after DoltLite's garbage collection"),
                    ):
                        theirs = other.ask(key)
                        rows.append(
                            [name, amount(theirs, "B"), amount(size.figure, "B"), f"{size.figure / theirs:.3f}×"]
                        )

        lines = self.take(where, "beside DoltLite", step)
        rows[:0] = [line.cells()[:4] for line in lines]
        head = ["operation", "DoltLite", "layer", "layer over DoltLite"]
        self.sections.append(f"## {where}, beside DoltLite\n\n" + table(head, rows))

    def text(self) -> str:
        """The whole report."""
        judged = [(where, line) for where, line in self.lines if line.met is not None]
        missed = [f"- {where}: {line.operation}" for where, line in judged if not line.met]
        context = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        syncs = f"An append of 4 KiB with fdatasync took {duration(self.fsync)} before the run and {duration(fsync_seconds(self.home))} after it."
        return "\n\n".join(
            [
                "# Benchmark of the substrate",
                f"{context}. {syncs} The run took {time.monotonic() - self.began:.0f} s.",
                f"{len(judged) - len(missed)} of {len(judged)} figures meet their bar"
                + ("; these do not:" if missed else "."),
                *(["\n".join(missed)] if missed else []),
                NOTES.strip(),
                *self.sections,
            ]
        )

    @property
    def failed(self) -> bool:
        return any(isinstance(line, Failed) for _, line in self.lines)
