"""Concurrent transactions from several processes are as if they ran one at a time, in real-time order."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reliability import appends, increments
from reliability.children import finish, start
from reliability.isolation import check

import livinglayer

torture = pytest.mark.torture
PROCESSES, THREADS = 2, 4


@pytest.mark.parametrize(
    ("engine", "transactions"),
    [
        ("sqlite", 30),
        ("postgres", 30),
        pytest.param("sqlite", 1500, marks=torture),
        pytest.param("postgres", 1500, marks=torture),
    ],
)
def test_list_append_transactions_are_strictly_serializable(
    engine: str,
    transactions: int,
    location: str,
    layer: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    log, keys = str(tmp_path / "history.jsonl"), appends.lists(transactions)
    appends.define(layer, keys)
    processes = [start(appends.run, location, log, n, THREADS, range(transactions)) for n in range(PROCESSES)]
    kills = 0
    if request.node.get_closest_marker("torture"):
        # One more writer is killed over and over: what it had under way happened wholly or not at all.
        while any(process.is_alive() for process in processes):
            victim = start(
                appends.run, location, log, PROCESSES + kills, 2, range(random.randrange(transactions), transactions)
            )
            victim.join(random.uniform(0.2, 1.0))
            victim.kill()
            victim.join()
            kills += 1
    finish(*processes, seconds=1800)
    txns, errors = appends.history(log)
    assert not errors
    outcomes = Counter(t.status for t in txns)
    assert outcomes["ok"] > len(txns) / 10, f"hardly anything was committed: {outcomes}"
    found = check([*txns, *appends.final(layer, keys)])
    assert not found, "\n".join(f"{a.name}: {a.text}" for a in found[:10])
    report = layer.verify()
    assert report, report.problems
    record_property("transactions", len(txns))
    record_property("committed", outcomes["ok"])
    record_property("kills", kills)


@pytest.mark.parametrize("how", ["expect", "seen", "transaction"])
@pytest.mark.parametrize("times", [15, pytest.param(500, marks=torture)])
def test_no_increment_is_lost(location: str, layer: Any, how: str, times: int) -> None:
    """Compare-and-set by row version: a stale writer is refused, so increments add up."""
    increments.define(layer)
    row = layer.insert("tally", {"n": 0})
    finish(*(start(increments.run, location, row, how, 3, times) for _ in range(PROCESSES)), seconds=1800)
    assert layer.query("select n from tally where id = :id", {"id": row}) == [{"n": PROCESSES * 3 * times}]
    versions = [r["n"] for r in layer.query("select n from tally__history where id = :id order by tx", {"id": row})]
    assert versions == list(range(PROCESSES * 3 * times + 1))
    assert layer.verify()


def test_what_was_seen_is_guarded_even_where_writes_do_not_meet(layer: Any) -> None:
    """Two doctors may each leave only while the other is seen on call: never do both."""
    increments.define(layer)
    for attempt in range(10):
        rows = layer.insert("tally", [{"n": 1}, {"n": 1}])
        barrier = threading.Barrier(2)
        left: list[int] = []

        def leave(mine: int, other: int, barrier: threading.Barrier = barrier, left: list[int] = left) -> None:
            _, version = increments.current(layer, other)
            barrier.wait(10)
            try:
                layer.update("tally", mine, {"n": 0}, seen=[("tally", other, version)])
                left.append(mine)
            except livinglayer.errors.Conflict:
                pass

        threads = [threading.Thread(target=leave, args=pair) for pair in (rows, rows[::-1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        on_call = layer.query("select sum(n) as n from tally where id in (:a, :b)", {"a": rows[0], "b": rows[1]})
        assert len(left) == 1 and on_call == [{"n": 1}], f"attempt {attempt}: {left} left"


def test_readers_are_not_held_up_by_an_open_transaction(layer: Any) -> None:
    increments.define(layer)
    row = layer.insert("tally", {"n": 1})
    with layer.transaction() as tx:
        tx.update("tally", row, {"n": 2})
        answer: list[Any] = []
        reader = threading.Thread(target=lambda: answer.extend(layer.query("select n from tally")))
        began = time.monotonic()
        reader.start()
        reader.join(5)
        assert answer == [{"n": 1}] and time.monotonic() - began < 2
    assert layer.query("select n from tally") == [{"n": 2}]
