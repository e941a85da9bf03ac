"""What is measured, in the order of the bar in the design, with the bar beside it."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.bed import Bed
from bench.measure import Side, alternate, middle, per_call, ratio, turns
from bench.peer import Peer
from bench.report import Line
from bench.rows import BYTES, POINT, RANGE, SCAN, UPDATE, groups, row

# (SQLite, PostgreSQL): the ratio to a plain table that must not be passed.
READS = {
    "main": {"point": (1.1, 1.15), "range": (1.0, 1.1), "scan": (1.1, 1.05)},
    "as of": {"point": (1.3, 1.1), "range": (1.7, 1.2), "scan": (3.2, 2.0)},
    "fork of depth 1": {"point": (1.4, 1.7), "range": (2.0, 1.6), "scan": (4.0, 3.2)},
    "fork of depth 4": {},
    "noise (plain against itself)": {},
}
QUERY, WRITE, MERGE = (2.0, 1.5), (2.0, 1.3), (4.0, 5.0)
WRITE_BYTES = (300, None)
CLIENTS, CLIENT_WRITES = 64, (5_000, None)
BULK, BULK_ROWS = 1_000, (30_000, None)
MEMORY = 200  # MB
FLAT = 1.3  # a figure that grows by less than this from the smaller to the larger table counts as flat


def bar(pair: tuple[Any, Any] | None, engine: str) -> Any:
    return pair[engine == "postgres"] if pair else None


def versus(operation: str, rounds: list[tuple[float, ...]], low: float | None) -> Line:
    return Line(operation, ratio(rounds), "×", low, None, middle(rounds, 0), middle(rounds, -1))


def reads(bed: Bed, seconds: float) -> Iterator[Line]:
    """Point, range and scan: the storage SQL itself, on connections that are already bound."""
    views: dict[str, dict[str, Any]] = {
        "main": {"branch": "main"},
        "as of": {"branch": "main", "as_of": bed.as_of},
        "fork of depth 1": {"branch": "fork1"},
        "fork of depth 4": {"branch": "fork4"},
    }
    for name, bars in READS.items():
        with bed.layer.reader(**views[name]) if name in views else bed.plain.second() as connection:
            if name == "main":
                bed.plain.follow(connection, bed.plain.connection)
            plain, ours = bed.plain.read(bed.plain.connection), bed.plain.read(connection)
            for shape, sql, params in (
                ("point", POINT, lambda number: (bed.any(number),)),
                ("range", RANGE, lambda number: (number * 7919 % groups(bed.count),)),
                ("scan", SCAN, lambda number: ()),
            ):
                yield versus(
                    f"{shape}, {name}",
                    turns(
                        lambda number, sql=sql, params=params, plain=plain: plain(sql, params(number)),
                        lambda number, sql=sql, params=params, ours=ours: ours(sql, params(number)),
                        seconds=seconds,
                    ),
                    bar(bars.get(shape), bed.engine),
                )


def query(bed: Bed, seconds: float) -> Iterator[Line]:
    """The whole way through the public API, for one row as a dict."""
    named = POINT.replace("?", ":id")
    yield versus(
        "layer.query of one row, against dicts from the driver",
        turns(
            lambda number: bed.plain.dicts(POINT, (bed.any(number),)),
            lambda number: bed.layer.query(named, {"id": bed.any(number)}),
            seconds=seconds,
        ),
        bar(QUERY, bed.engine),
    )
    why = "select tx, at, principal, reason, execution from item__history where id = :id and tx_end is null"
    yield versus(
        "who last changed a row and why, against dicts from the driver",
        turns(
            lambda number: bed.plain.dicts(POINT, (bed.any(number),)),
            lambda number: bed.layer.query(why, {"id": bed.any(number)}),
            seconds=seconds,
        ),
        None,
    )


def write(bed: Bed, seconds: float) -> Iterator[Line]:
    """One client, one row, one durable commit each."""
    yield versus(
        "governed write of one row, durable",
        turns(
            lambda number: bed.plain.write(UPDATE, (number, bed.any(number))),
            lambda number: bed.layer.update("item", bed.any(number), {"qty": number}, reason="recount"),
            seconds=seconds,
        ),
        bar(WRITE, bed.engine),
    )


def branch_to_merge(bed: Bed, name: str) -> list[int]:
    """Fork, change a thousand rows on the branch and another one on main; gives the thousand."""
    other, *ids = bed.some(1001)
    bed.layer.fork(name)
    bed.change(ids, name)
    bed.change([other])
    return ids


def merged(bed: Bed, name: str) -> None:
    if not (done := bed.layer.merge(name, "main")):
        raise RuntimeError(f"a merge without overlap was not applied: {done}")


def merge(bed: Bed, seconds: float) -> Iterator[Line]:
    """A branch with a thousand changed rows comes home, while main has moved on elsewhere."""
    changed: list[tuple[int, int]] = []

    def prepare(number: int) -> None:
        changed[:] = [(number, id) for id in branch_to_merge(bed, f"merge{number}")]

    yield versus(
        "merge of 1,000 rows, against a plain update of as many",
        turns(
            lambda number: bed.plain.write_many(UPDATE, changed),
            lambda number: merged(bed, f"merge{number}"),
            seconds=seconds,
            prepare=prepare,
            most=25,
        ),
        bar(MERGE, bed.engine),
    )


def size(bed: Bed, seconds: float) -> Iterator[Line]:
    """Disk per governed write, attribution, history and chain included."""
    writes = max(200, int(2000 * seconds))
    bed.settle()
    before = bed.bytes()
    for number in range(writes):
        bed.layer.update("item", bed.any(number), {"qty": number}, reason="recount")
    grown = (bed.bytes() - before) / writes
    yield Line(f"bytes per governed write of a {BYTES}-byte row", grown, "B", bar(WRITE_BYTES, bed.engine), key="bytes")


def throughput(bed: Bed, seconds: float) -> Iterator[Line]:
    """Durable single-row writes of many clients at once, and rows in large transactions."""
    seconds = max(0.3, seconds * 3)
    done = [0] * CLIENTS
    failed: list[BaseException] = []
    start = threading.Barrier(CLIENTS + 1)

    def client(which: int) -> None:
        pick = random.Random(which)
        start.wait()
        try:
            while time.perf_counter() < deadline:
                # Rows of its own: what is measured is the write path, not who waits for whose row.
                id = bed.ids[pick.randrange(which, bed.count, CLIENTS)]
                bed.layer.update("item", id, {"qty": pick.randrange(1000)}, reason="recount")
                done[which] += 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=(which,)) for which in range(CLIENTS)]
    for thread in threads:
        thread.start()
    begin = time.perf_counter()
    deadline = begin + seconds
    start.wait()
    for thread in threads:
        thread.join()
    rate = sum(done) / (time.perf_counter() - begin)
    if failed:
        raise failed[0]
    yield Line(f"durable governed writes, {CLIENTS} clients", rate, "/s", None, bar(CLIENT_WRITES, bed.engine))

    def one_by_one(number: int) -> None:
        with bed.layer.transaction(reason="delivery") as tx:
            for extra in range(BULK):
                tx.insert("item", row(number * BULK + extra, bed.count))

    def as_list(number: int) -> None:
        with bed.layer.transaction(reason="delivery") as tx:
            tx.insert("item", [row(number * BULK + extra, bed.count) for extra in range(BULK)])

    ways: list[tuple[str, Side]] = [("one insert each", one_by_one), ("one insert for all", as_list)]
    for way, side in ways:
        rounds = turns(side, seconds=seconds / 2, prepare=lambda number: None)
        yield Line(
            f"rows in transactions of {BULK:,}, {way}", BULK / middle(rounds, 0), "/s", None, bar(BULK_ROWS, bed.engine)
        )


def memory(bed: Bed, seconds: float) -> Iterator[Line]:
    """The peak of a process that opens the layer and uses it in every way."""
    command = [sys.executable, "-m", "bench.memory", bed.place, str(seconds * 5)]
    peak = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    yield Line("peak memory of a process reading and writing", peak / 1e6, "MB", MEMORY)


def branch_to_diff(bed: Bed, name: str) -> None:
    bed.layer.fork(name)
    bed.change(bed.some(100), name)
    if (found := len(bed.layer.diff(name, "main"))) != 100:
        raise RuntimeError(f"the diff of 100 changes has {found}")


def flat(beds: list[Bed], seconds: float) -> Iterator[tuple[str, list[float], float]]:
    """The name of an operation, its time on each bed, and that on the last over that on the first."""

    def fork(bed: Bed) -> Side:
        return lambda number: bed.layer.fork(f"flat{number}")

    def diff(bed: Bed) -> Side:
        branch_to_diff(bed, "changed")
        return lambda number: bed.layer.diff("changed", "main")

    for name, make in (("fork", fork), ("diff of 100 changes", diff)):
        rounds = turns(*map(make, beds), seconds=seconds)
        yield name, [middle(rounds, side) for side in range(len(beds))], ratio(rounds)


def beside(bed: Bed, peer: Peer, seconds: float) -> Iterator[Line]:
    """What both the layer and DoltLite do, in turns."""
    branch_to_diff(bed, "peer_diff")
    sides: list[tuple[str, str, Side, Side | None]] = [
        ("fork", "branch", lambda number: bed.layer.fork(f"peer{number}"), None),
        ("diff", "diff of 100 changes", lambda number: bed.layer.diff("peer_diff", "main"), None),
        (
            "write",
            "a change of one row, committed and attributed",
            lambda number: bed.layer.update("item", bed.any(number), {"qty": number}, reason="recount"),
            None,
        ),
        (
            "merge",
            "merge of 1,000 rows",
            lambda number: merged(bed, f"peer_merge{number}"),
            lambda number: branch_to_merge(bed, f"peer_merge{number}"),
        ),
    ]
    for key, name, side, prepare in sides:
        rounds = alternate(
            lambda number, key=key: peer.ask(key),
            lambda number, side=side: per_call(side, number),
            budget=seconds * 2,
            prepare=prepare,
            most=25 if prepare else 300,
        )
        yield versus(name, rounds, None)


STEPS: list[Callable[[Bed, float], Iterator[Line]]] = [reads, query, write, merge, size, throughput, memory]
