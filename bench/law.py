"""Measure the law: a governed function that reads a row and updates it, beside the same as a script in bwrap with sqlite3.

`python -m bench.law [--quick]`; `make bench` runs it after the boxes'. Every call is recorded (intent, steps, usage, outcome), durable,
decided by permissions, and runs in a box that nothing else has used since it was made or proven as new.
"""

from __future__ import annotations

import argparse
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import livinglayer
from bench.boxes import BWRAP, Limits, apart, timed
from bench.report import Line, keep_part, table
from livinglayer.sandbox.once import Once

HERE = Path(__file__).parent
MARK = "# Benchmark of the law"
HEAD = ["operation", "peer", "ours", "figure", "bar", "met"]
CODE = """
import layer

def bump(id):
    row = layer.one("select priority from ticket where id = :id", id=id)
    layer.update("ticket", id, priority=row["priority"] + 1)
    return row["priority"] + 1
"""
SCRIPT = """
import sqlite3, sys
db = sqlite3.connect("/data/plain.db", isolation_level=None)
db.execute("pragma synchronous = full")
(priority,) = db.execute("select priority from ticket where id = ?", (int(sys.argv[1]),)).fetchone()
db.execute("update ticket set priority = ? where id = ?", (priority + 1, int(sys.argv[1])))
print(priority + 1)
"""
CALLERS = 16


def prepare(place: Path, rows: int) -> tuple[Any, list[int]]:
    layer = livinglayer.open(place / "layer", create=True)
    layer.define("ticket", {"title": "text!", "priority": "int"})
    ids = layer.insert("ticket", [{"title": f"ticket {n}", "priority": 0} for n in range(rows)])
    layer.call(
        "function.define", name="ticket.bump", code=CODE, reads=["ticket"], writes=["ticket"],
        signature={"arguments": {"id": "int!"}, "result": "int"},
    )  # fmt: skip
    plain = sqlite3.connect(place / "plain.db")
    plain.execute("pragma journal_mode = wal")
    plain.execute("create table ticket(id integer primary key, title text, priority integer)")
    plain.executemany("insert into ticket values (?, ?, 0)", [(id, f"ticket {id}") for id in ids])
    plain.commit()
    plain.close()
    return layer, ids


def script(place: Path, limits: Limits, id: int) -> None:
    argv = [*BWRAP, "--bind", str(place), "/data", "/usr/bin/python3", "-c", SCRIPT, str(id)]
    with limits.group() as enter:
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, preexec_fn=enter)


def bare() -> None:
    from livinglayer.law.blueprints import FUNCTION

    once = Once.start(blueprint=FUNCTION, tenant="bench", python="pass", token="x")
    try:
        once.wait()
    finally:
        once.close()


def together(work: Callable[[int], Any], seconds: float, ids: list[int]) -> float:
    """Calls a second of several callers."""
    done = [0] * CALLERS
    until = time.perf_counter() + seconds

    def loop(caller: int) -> None:
        own = ids[caller::CALLERS]
        while time.perf_counter() < until:
            work(own[done[caller] % len(own)])
            done[caller] += 1

    threads = [threading.Thread(target=loop, args=(caller,)) for caller in range(CALLERS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - start)


def measure(place: Path, quick: bool) -> list[Line]:
    rounds, seconds = (30, 2.0) if quick else (300, 10.0)
    layer, ids = prepare(place, 2000)
    limits = Limits()
    try:
        for id in ids[:20]:
            layer.call("ticket.bump", id=id)
            bare()
        ours, peers, bares, through = [], [], [], []
        for n in range(rounds):
            id = ids[n % len(ids)]
            ours.append(timed(lambda id=id: layer.call("ticket.bump", id=id)))
            bares.append(timed(bare))
            through.append(timed(lambda id=id: layer.call("row.update", entity="ticket", id=id, values={"title": "x"})))
            if n % 3 == 0:
                peers.append(timed(lambda id=id: script(place, limits, id)))
        own, peer, box, write = map(statistics.median, (ours, peers, bares, through))
        rate = together(lambda id: layer.call("ticket.bump", id=id), seconds, ids)
        peer_rate = together(lambda id: script(place, limits, id), seconds, ids)
        assert layer.verify().ok
        return [
            Line("a governed function, warm, p50", own * 1000, "ms", low=10, plain=peer, ours=own),
            Line("the same, against bwrap python3 + sqlite3", own / peer, "×", plain=peer, ours=own),
            Line("the same, 95th percentile", statistics.quantiles(ours, n=20)[18] * 1000, "ms"),
            Line(f"calls a second, {CALLERS} callers", rate, "/s", high=300),
            Line(f"bwrap python3 + sqlite3, {CALLERS} callers", peer_rate, "/s"),
            Line("a bare run of Python in a box, p50", box * 1000, "ms", ours=box),
            Line("what the law adds to it", (own - box) * 1000, "ms", ours=own - box),
            Line("a verb of the door (row.update), p50", write * 1000, "ms", ours=write),
        ]
    finally:
        layer.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.law", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a measurement")
    options = parser.parse_args()
    start = time.perf_counter()
    with apart() as place:
        lines = measure(place, options.quick)
    version, cores = platform.python_version(), os.cpu_count()
    text = "\n".join(
        [
            MARK,
            "",
            f"Python {version}, Linux {platform.release()}, {cores} cores, SQLite, tier namespace. The run took {time.perf_counter() - start:.0f} s.",
            "",
            "Medians; ours and the peer take turns. A call is an intent, a box, a query and an update through the channel, the steps, the usage and",
            "the outcome, all durable. The script is what a person would write: bwrap with the same limits, python3, sqlite3 with synchronous full.",
            "",
            table(HEAD, [line.cells() for line in lines]),
        ]
    )
    print(text)
    if not options.quick:
        keep_part(HERE / "results.md", MARK, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
