"""kill -9 while two processes write: no acknowledged write is lost, no other one is there twice, the chain holds."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest
from cluster import Cluster
from reliability import marks, together
from reliability.children import CONTEXT, start
from reliability.marks import Acks

import livinglayer

torture = pytest.mark.torture


@pytest.mark.parametrize(
    ("engine", "kills"),
    [
        ("sqlite", 15),
        ("postgres", 5),
        pytest.param("sqlite", 1000, marks=torture),
        pytest.param("postgres", 200, marks=torture),
    ],
)
def test_a_kill_loses_nothing_acknowledged(
    engine: str,
    kills: int,
    location: str,
    postgres_cluster: Callable[..., Cluster],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    seed = int(os.environ.get("LAYER_TEST_SEED", random.randrange(1 << 32)))
    rng = random.Random(seed)
    fsync = {"fsync": True} if request.node.get_closest_marker("torture") else {}
    server = postgres_cluster(**fsync) if engine == "postgres" else None
    with closing(livinglayer.open(location, create=True)) as layer:
        marks.define(layer)
    campaign = Campaign(location)
    for round in range(kills):
        # Every fifth round on PostgreSQL the server crashes under the writers too.
        acks = kill_one_round(location, round, rng, server if round % 5 == 4 else None)
        if server:
            wait_until_alone(location)
        try:
            campaign.check(round, acks, whole=round % max(kills // 20, 5) == 0 or round == kills - 1)
        except AssertionError as error:
            raise AssertionError(f"round {round}, LAYER_TEST_SEED={seed}: {error}") from error
    record_property("kills", kills)
    for name, value in campaign.figures.items():
        record_property(name, value)


@pytest.mark.parametrize(
    ("engine", "kills"),
    [
        ("sqlite", 4),
        ("postgres", 4),
        pytest.param("sqlite", 200, marks=torture),
        pytest.param("postgres", 50, marks=torture),
    ],
)
def test_a_layer_whose_making_was_killed_can_be_made(engine: str, kills: int, make_location: Callable[[], str]) -> None:
    """Whether the kill came before or after: asked again, there is a layer, and it works."""
    for n in range(kills):
        location = make_location()
        child = start(together.create, location)
        child.join(random.random() * 0.5 * (n > 0) or 30)  # the first one in peace
        child.kill()
        child.join()
        with closing(livinglayer.open(location, create=True)) as layer:
            layer.define("note", {"text": "text"})
            layer.insert("note", {"text": "first"})
            assert layer.verify()


def kill_one_round(location: str, round: int, rng: random.Random, server: Cluster | None) -> Acks:
    """Start both writers, kill them at a random acknowledgement, and return what they had acknowledged."""
    read_end, write_end = CONTEXT.Pipe(duplex=False)
    children = {process: start(marks.write, location, round, process, write_end) for process in marks.THREADS}
    write_end.close()
    acks = Acks(read_end)
    if rng.random() < 0.1:
        time.sleep(rng.random() * 0.1)  # while opening
    else:
        acks.wait(rng.randint(1, 40))
        time.sleep(rng.random() * 0.004)  # anywhere between two acknowledgements
    first, second = rng.sample(list(children), 2)
    if server:
        assert server.process
        server.process.send_signal(signal.SIGQUIT)  # pg_ctl stop -m immediate
    children[first].kill()
    if not server and rng.random() < 0.5:
        # A killed process leaves no lock behind: the other one goes on.
        children[first].join()
        acks.drain()
        acks.wait(sum(len(acks.done[w]) for w in marks.WRITERS if w.startswith(second)) + 1, second)
    children[second].kill()
    for child in children.values():
        child.join()
    acks.drain()
    read_end.close()
    if server:
        server.stop()  # it is going down already: wait for it
        server.start()
        acks.errors = [error for error in acks.errors if " Unavailable:" not in error]
    return acks


class Campaign:
    """One layer over all rounds, and what it must hold."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.rows: Counter[str] = Counter()  # of `mark`, all rounds
        self.values: set[str] = set()  # acknowledged updates of `counter`
        self.current = dict.fromkeys(marks.WRITERS, "")
        self.figures = Counter({"acknowledged": 0, "under way, kept": 0, "under way, gone": 0, "keys retried": 0})

    def check(self, round: int, acks: Acks, whole: bool) -> None:
        assert not acks.errors
        with closing(livinglayer.open(self.location)) as layer:
            self.check_rows(layer, round, acks)
            self.check_counters(layer, round, acks)
            self.retry_keys(layer, round, acks)
            self.figures["acknowledged"] += len(acks)
            if whole:
                self.check_all(layer)

    def check_rows(self, layer: Any, round: int, acks: Acks) -> None:
        found = self.found(layer, round)
        must = acks.must(round)
        assert not must - found, f"acknowledged and lost: {sorted(must - found)}"
        assert max(found.values(), default=1) == 1, f"there twice: {[n for n in found if found[n] > 1]}"
        extra = set(found - must)
        for group in acks.may(round):
            assert extra.issuperset(group) or extra.isdisjoint(group), f"half of a transaction: {group}"
            self.figures["under way, kept" if extra & set(group) else "under way, gone"] += bool(group)
            extra -= set(group)
        assert not extra, f"never written, or refused: {extra}"

    def check_counters(self, layer: Any, round: int, acks: Acks) -> None:
        for row in layer.query("select name, value from counter"):
            writer = row["name"]
            updates = [f"{round}/{writer}/{n}" for n in sorted(acks.done[writer]) if n % 5 == 2]
            self.values.update(updates)
            last = updates[-1] if updates else self.current[writer]
            under_way = acks.next(writer)
            allowed = {last, f"{round}/{writer}/{under_way}"} if under_way % 5 == 2 else {last}
            assert row["value"] in allowed, f"counter {writer} is {row['value']!r}, not one of {allowed}"
            self.current[writer] = row["value"]

    def retry_keys(self, layer: Any, round: int, acks: Acks) -> None:
        """A write that is tried again with its key happens once, whether it was acknowledged or not."""
        for writer in marks.WRITERS:
            under_way, acked = acks.next(writer), [n for n in acks.done[writer] if marks.has_key(n)]
            for n in [*acked[-1:], *([under_way] if marks.has_key(under_way) else [])]:
                again = marks.act(layer, round, writer, n, 0)
                assert str(again) == acks.done[writer].get(n, str(again)), (
                    f"{writer} {n}: another answer to the same key"
                )
                self.figures["keys retried"] += 1
        retried = {
            name for w in marks.WRITERS if marks.has_key(acks.next(w)) for name in marks.names(round, w, acks.next(w))
        }
        found = self.found(layer, round)
        assert max(found.values(), default=1) == 1, "a retried key wrote again"
        assert retried <= set(found), "a retried key wrote nothing"
        self.rows += found

    def found(self, layer: Any, round: int) -> Counter[str]:
        rows = layer.query("select name from mark where round = :round", {"round": round})
        return Counter(row["name"] for row in rows)

    def check_all(self, layer: Any) -> None:
        """All rounds so far, each version of each counter, and the chain."""
        assert layer.query("select count(*) as n from mark")[0]["n"] == self.rows.total()
        names = Counter(row["name"] for row in layer.query("select name from mark", limit=10_000_000, timeout=60))
        assert names == self.rows
        history = layer.query("select value from counter__history where value <> ''", limit=10_000_000, timeout=60)
        versions = Counter(row["value"] for row in history)
        assert not self.values - set(versions), "an acknowledged version is not in the history"
        assert max(versions.values(), default=1) == 1, "a version is in the history twice"
        report = layer.verify()
        assert report, report.problems


def wait_until_alone(url: str) -> None:
    """A killed client's backend may still be committing: until it is gone, nothing can be said of its write."""
    with psycopg.connect(url, autocommit=True) as connection:
        others = """select count(*) from pg_stat_activity where datname = current_database()
                    and backend_type = 'client backend' and pid <> pg_backend_pid()"""
        for _ in range(3000):
            if connection.execute(others).fetchone() == (0,):
                return
            time.sleep(0.01)
    raise AssertionError("a killed client's connection is still open after 30 s")
