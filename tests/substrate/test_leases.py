"""Leases: one holder at a time, on both engines, across processes; nothing of the ledger is touched."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from livinglayer import Layer
from livinglayer.errors import Unavailable
from livinglayer.layer import engine_for
from livinglayer.settings import Settings
from livinglayer.substrate.engine import Engine

OPEN = """
import json, sys
from livinglayer.layer import engine_for
from livinglayer.settings import Settings
engine = engine_for(sys.argv[1], Settings())
"""


@pytest.fixture
def other(shared: Layer, shared_location: str) -> Iterator[Engine]:
    """A second engine over the layer of `shared`, as another process would have."""
    engine = engine_for(shared_location, Settings(busy_seconds=30.0))
    yield engine
    engine.close()


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN + code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def word(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_holder_has_a_lease_until_it_gives_it_back(shared: Layer, other: Engine) -> None:
    here = shared.engine
    assert here.lease("one/a", "here", 60, "7")
    assert not other.lease("one/a", "there", 60)
    assert here.lease("one/a", "here", 600)  # renewed; the value stays
    [(name, holder, until, value)] = other.leases("one/")
    assert (name, holder, value) == ("one/a", "here", "7")
    assert timedelta(seconds=500) < until - datetime.now(UTC) <= timedelta(seconds=601)
    assert here.lease("one/a", "here", 600, "8") and here.leases("one/")[0][3] == "8"
    other.release("one/a", "there")  # not its to give
    assert not other.lease("one/a", "there", 60)
    here.release("one/a", "here")
    assert here.leases("one/") == []
    assert other.lease("one/a", "there", 60) and other.leases("one/")[0][1:4:2] == ("there", None)


def test_a_lease_that_ran_out_moves_on(shared: Layer, other: Engine) -> None:
    assert shared.engine.lease("out/a", "here", 0, "mine")
    assert shared.engine.leases("out/") == []
    assert other.lease("out/a", "there", 60)
    assert other.leases("out/")[0][1:4:2] == ("there", None)
    assert not shared.engine.lease("out/a", "here", 60)
    shared.engine.release("out/a", "here")
    assert [lease[1] for lease in other.leases("out/")] == ["there"]


def test_prefixes_are_plain_text(shared: Layer) -> None:
    for name in ("plain/%", "plain/_", "plain/é", "plain'"):
        assert shared.engine.lease(name, "h", 60)
    assert [lease[0] for lease in shared.engine.leases("plain/")] == ["plain/%", "plain/_", "plain/é"]
    assert [lease[0] for lease in shared.engine.leases("plain/%")] == ["plain/%"]


def test_the_lease_of_a_process_that_was_killed_moves_on(shared: Layer, shared_location: str) -> None:
    process = child(
        "assert engine.lease('killed/a', 'child', 2); print('held', flush=True); sys.stdin.read()", shared_location
    )
    assert word(process) == "held"
    assert not shared.engine.lease("killed/a", "here", 60)
    process.kill()
    process.wait()
    while not shared.engine.claim(["killed/a"], "here", 60):
        time.sleep(0.05)
    assert [lease[1] for lease in shared.engine.leases("killed/")] == ["here"]


def test_a_claim_takes_what_is_free_or_over_and_nothing_else(shared: Layer, other: Engine) -> None:
    assert shared.engine.lease("claim/held", "here", 60)
    assert shared.engine.lease("claim/over", "here", 0, "old")
    assert other.lease("claim/own", "there", 60, "kept")
    names = ["claim/over", "claim/new", "claim/held", "claim/own", "claim/new", "claim/a'b"]
    assert other.claim(names, "there", 60) == ["claim/over", "claim/new", "claim/a'b"]
    assert other.claim(names, "there", 60) == []
    assert [(name, holder, value) for name, holder, _, value in other.leases("claim/")] == [
        ("claim/a'b", "there", None),
        ("claim/held", "here", None),
        ("claim/new", "there", None),
        ("claim/over", "there", None),
        ("claim/own", "there", "kept"),
    ]
    assert other.claim([], "there", 60) == []


def test_processes_that_claim_the_same_names_share_them(shared: Layer, shared_location: str) -> None:
    names = [f"share/{n:03}" for n in range(200)]
    for name in names[::3]:
        assert shared.engine.lease(name, "gone", 0)
    code = """
names, got = json.loads(sys.argv[3]), []
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[2] == "1":
    names.reverse()
for start in range(0, len(names), 7):
    got += engine.claim(names[start : start + 20], sys.argv[2], 600)
print(json.dumps(got))
"""
    processes = [child(code, shared_location, str(n), json.dumps(names)) for n in range(3)]
    assert [word(process) for process in processes] == ["ready"] * 3
    got = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        got.append(json.loads(process.communicate(timeout=60)[0]))
        assert process.returncode == 0
    assert sorted(name for part in got for name in part) == names
    held = {name: holder for name, holder, _, _ in shared.engine.leases("share/")}
    assert held == {name: str(n) for n, part in enumerate(got) for name in part}


def test_a_lease_goes_on_while_another_process_writes(shared: Layer, shared_location: str, engine: str) -> None:
    """On SQLite it waits for the file, on PostgreSQL there is nothing to wait for; the writer's tx is not touched."""
    shared.define("slow", {"n": "int"})
    process = child(
        """
import livinglayer
layer = livinglayer.open(sys.argv[1])
with layer.transaction() as tx:
    tx.insert("slow", {"n": 1})
    print("held", flush=True)
    sys.stdin.readline()
    tx.insert("slow", {"n": 2})
layer.close()
print("done", flush=True)
""",
        shared_location,
    )
    assert word(process) == "held"
    other, got = engine_for(shared_location, Settings(busy_seconds=30.0)), []
    asking = threading.Thread(target=lambda: got.append(other.lease("slow/a", "here", 60)))
    asking.start()
    if engine == "postgres":
        asking.join(60)
        assert got == [True]
    else:
        impatient = engine_for(shared_location, Settings(busy_seconds=0.05))
        with pytest.raises(Unavailable, match="another writer holds the layer"):
            impatient.lease("slow/b", "here", 60)
        impatient.close()
        assert got == []
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    asking.join(60)
    assert got == [True]
    assert process.communicate(timeout=60)[0] == "done\n" and process.returncode == 0
    other.close()
    assert [row["n"] for row in shared.query("select n from slow order by n")] == [1, 2]
    report = shared.verify()
    assert report, report.problems


def test_leases_are_no_part_of_the_ledger(shared: Layer) -> None:
    def where() -> object:
        with shared.engine.reading() as session:
            return session.one(f"select tx, next_id, hash, seal from {shared.engine.schema_prefix}ledger_clock")

    before = where()
    assert shared.engine.lease("apart/a", "here", 60) and shared.engine.claim(["apart/b"], "here", 60)
    assert where() == before
    assert shared.verify()


def test_a_claim_does_not_wait_for_rows_that_others_look_at(shared: Layer, shared_location: str, engine: str) -> None:
    if engine == "sqlite":
        pytest.skip("SQLite has one lock for the whole file")
    for name in ("skip/a", "skip/b"):
        assert shared.engine.lease(name, "gone", 0)
    with psycopg.connect(shared_location) as connection:
        connection.execute("select 1 from livinglayer.ledger_lease where name = 'skip/a' for update")
        assert shared.engine.claim(["skip/a", "skip/b", "skip/c"], "here", 60) == ["skip/b", "skip/c"]
    assert shared.engine.claim(["skip/a"], "here", 60) == ["skip/a"]


def test_a_lease_survives_the_loss_of_its_connection(shared: Layer, shared_location: str, engine: str) -> None:
    if engine == "sqlite":
        pytest.skip("there is no connection to lose")
    assert shared.engine.lease("lost/a", "here", 60)
    with psycopg.connect(shared_location, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where query like '%ledger_lease%' and pid <> pg_backend_pid()"
        )
    assert shared.engine.lease("lost/a", "here", 60)
    assert not shared.engine.lease("lost/a", "there", 60)
