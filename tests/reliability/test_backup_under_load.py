"""A backup taken while others write restores, on either engine, to exactly what was committed up to one tx."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from reliability import streams
from reliability.children import CONTEXT, finish, start

import livinglayer

torture = pytest.mark.torture


@pytest.fixture
def progress(location: str, layer: Any) -> Iterator[streams.Progress]:
    """Writers at work on `layer`; what they have had acknowledged so far."""
    streams.define(layer)
    read_end, write_end = CONTEXT.Pipe(duplex=False)
    stop = CONTEXT.Event()
    writers = [start(streams.run, location, n, write_end, stop) for n in range(streams.PROCESSES)]
    write_end.close()
    progress = streams.Progress(read_end)
    wait_for(lambda: min(progress().values()) >= 5)
    yield progress
    stop.set()
    progress()
    finish(*writers)


# The long form is fifty backups of five layers: one layer that grew all the while would mostly measure `verify`.
@pytest.mark.parametrize("backups", [3, *(pytest.param(10, marks=torture, id=f"10-{part}") for part in range(1, 6))])
def test_a_backup_under_load_is_a_committed_prefix(
    engine: str,
    backups: int,
    layer: Any,
    progress: streams.Progress,
    tmp_path: Path,
    postgres_cluster: Callable[..., Cluster],
    record_property: Callable[[str, object], None],
) -> None:
    for n in range(backups):
        before = progress()
        layer.backup(tmp_path / f"backup{n}")
        after = progress()
        with contextlib.ExitStack() as places:
            copies = [str(tmp_path / f"backup{n}")]  # a backup is itself a layer
            if n % 2 == 0:
                copies.append(places.enter_context(postgres_cluster().database()))
            else:
                copies.append(str(tmp_path / f"restored{n}"))
            livinglayer.restore(tmp_path / f"backup{n}", copies[1]).close()
            held = [check(copy, layer, before, after) for copy in copies]
            assert held[0] == held[1]
        wait_for(lambda now=after: min(progress()[s] - now[s] for s in now) > 0)  # nobody was stopped by it
    record_property("backups", backups)
    record_property("txs in the last", layer.query("select max(tx) as n from tx")[0]["n"])


def check(copy: str, source: Any, before: dict[str, int], after: dict[str, int]) -> tuple[int, dict[str, list[int]]]:
    with closing(livinglayer.open(copy)) as layer:
        report = layer.verify()
        assert report, report.problems
        held = streams.found(layer)
        for stream, numbers in held.items():
            first = 1 if stream == streams.TICKETS else 0
            assert numbers == list(range(first, first + len(numbers))), f"{stream} has a gap"
            last = first + len(numbers) - 1
            assert before[stream] <= last, (
                f"{stream}: {before[stream]} was acknowledged before the backup; it ends at {last}"
            )
            # One number per writer may be committed and not yet acknowledged.
            slack = streams.PROCESSES if stream == streams.TICKETS else 1
            assert last <= after[stream] + slack, f"{stream}: {last} was written after the backup"
        assert layer.query("select n from total") == [{"n": len(held[streams.TICKETS])}]
        [cut] = layer.query("select max(tx) as tx from tx")
        assert held == streams.found(source, as_of=cut["tx"])
        chain = "select tx, hash from tx where tx <= :cut order by tx"
        everything = {"limit": 10_000_000, "timeout": 60}
        assert layer.query(chain, {"cut": cut["tx"]}, **everything) == source.query(
            chain, {"cut": cut["tx"]}, **everything
        )
        # It is a layer like any other: it goes on from there.
        layer.insert("beat", {"writer": "0.0", "n": len(held["0.0"])})
    return cut["tx"], held


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "the writers stand still"
        time.sleep(0.01)
