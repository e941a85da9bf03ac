"""The worker: runs what is due, shares it with others, and concludes what died; effects happen exactly once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from law import kills
from sandbox.hosts import Host, wait_until

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, LayerError
from livinglayer.law import functions, runners, worker
from livinglayer.law.functions import Asking
from livinglayer.law.worker import Worker
from livinglayer.sandbox import Sandbox

SLOW = """
import layer, time

def slow(seconds, note="x"):
    layer.insert("effect", ticket=0, part=note)
    time.sleep(seconds)
    return note
"""
GATED = """
import layer

def gated(id):
    layer.insert("effect", ticket=id, part="gated")
    if layer.one("select marks from ticket where id = :id", id=id)["marks"] < 2:
        raise ValueError("not yet")
"""


@pytest.fixture
def desk(layer: Layer, boxes: Host) -> Layer:
    kills.prepare(layer)
    signature = {"arguments": {"seconds": "float!", "note": {"type": "text", "default": "x"}}}
    layer.call("function.define", name="work.slow", code=SLOW, signature=signature, writes=["effect"])
    return layer


def run(layer: Layer, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    said: list[tuple[str, dict[str, Any]]] = []
    Worker(layer, 4, say=lambda event, **details: said.append((event, details)), **more).run(once=True)
    return said


def ends(layer: Layer, function: str) -> list[tuple[str, int]]:
    sql = "select status, attempt from execution where function = :f order by id"
    return [(row["status"], row["attempt"]) for row in layer.query(sql, {"f": function})]


def test_only_an_owner_may_run_one(desk: Layer, location: str) -> None:
    desk.principal("ann")
    with livinglayer.open(location, token=desk.token("ann")) as hers, pytest.raises(Denied, match="only an owner"):
        Worker(hers)


def test_what_fails_is_tried_again_later_and_leaves_nothing_before(desk: Layer) -> None:
    desk.call("function.define", name="work.gated", code=GATED, signature={"arguments": {"id": "int!"}}, reads=["ticket"], writes=["effect"])  # fmt: skip
    desk.call("trigger.enable", name="marking", enabled=False)
    desk.call("trigger.define", name="gate", function="work.gated", on_entity="ticket", on_actions=["insert"])
    ticket = desk.insert("ticket", {"title": "a"})
    moment = datetime.now(UTC)
    run(desk, now=lambda: moment)
    assert ends(desk, "work.gated") == [("failed", 1), ("queued", 2)] and desk.query("select * from effect") == []
    failed = desk.query("select result from execution where status = 'failed'")[0]["result"]["error"]
    assert failed["message"] == "ValueError: not yet"
    desk.update("ticket", ticket, {"marks": 2})
    run(desk, now=lambda: moment + timedelta(seconds=5))
    assert ends(desk, "work.gated") == [("failed", 1), ("done", 2)]
    assert desk.query("select ticket, part from effect") == [{"ticket": ticket, "part": "gated"}]


def test_workers_share_the_work_and_none_is_done_twice(desk: Layer, location: str, boxes: Host) -> None:
    tickets = desk.insert("ticket", [{"title": str(n)} for n in range(12)])
    done: dict[str, list[int]] = {}

    def one(name: str) -> None:
        def say(event: str, **details: Any) -> None:
            if event == "done":
                done.setdefault(name, []).append(details["execution"])

        with livinglayer.open(location) as own:
            made = Worker(own, 2, say=say)
            threading.Thread(
                target=lambda: (wait_until(lambda: kills.states(desk)["done"] == 12, "all", 60), made.stop())
            ).start()
            made.run()

    threads = [threading.Thread(target=one, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == ["a", "b"] and len({*done["a"], *done["b"]}) == len(done["a"]) + len(done["b"]) == 12
    kills.check(desk, boxes, tickets)


def test_a_worker_that_is_killed_loses_nothing_and_does_nothing_twice(location: str, boxes: Host) -> None:
    found = kills.campaign(location, boxes, tickets=20, kills=1, workers=1, seed=1)
    assert found["done"] == 20


def test_a_call_whose_process_dies_is_lost_and_not_repeated_by_itself(desk: Layer, location: str) -> None:
    code = f"""
import livinglayer
layer = livinglayer.open({location!r})
layer.call("work.slow", seconds=30, key="k")
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    query = "select status, runner, result from execution where function = 'work.slow' order by id"
    wait_until(lambda: [row["status"] for row in desk.query(query)] == ["running"], "it runs", 60)
    run(desk)
    assert desk.query(query)[0]["status"] == "running"  # its process lives
    process.kill()
    process.wait()
    run(desk)
    (row,) = desk.query(query)
    assert row["status"] == "lost" and row["runner"] in row["result"]["error"]["message"]
    assert desk.query("select * from effect") == []
    assert [desk.call("work.slow", seconds=0, note="once", key="k") for _ in range(2)] == ["once", "once"]
    assert desk.query("select part from effect") == [{"part": "once"}]
    with pytest.raises(Conflict, match="another request"):
        desk.call("work.slow", seconds=0, note="other", key="k")


def test_a_runner_elsewhere_is_given_up_when_its_lease_is_long_over(location: str) -> None:
    with livinglayer.open(location, create=True, runner_seconds=0.3) as layer:
        layer.call("function.define", name="note.bare", language="sql", code="select 1 as one")
        found = functions.load(layer, "note.bare")
        there = "0123456789ab.1.1.00000000"  # of another machine: nothing here can tell whether it lives
        layer.engine.lease(f"runner/{there}", there, 3600)
        execution = functions.intent(layer, found, {}, Asking(1, runner=there), [])
        number = layer.ledger.intend(execution)
        layer.ledger.let_go(execution)
        made = Worker(layer, say=lambda event, **details: None)
        for _ in range(3):
            made._looked.clear()
            made.turn()
            time.sleep(0.2)
        status = "select status from execution where id = :id"
        assert layer.query(status, {"id": number}) == [{"status": "running"}]
        layer.engine.release(f"runner/{there}", there)
        made._looked.clear()
        made.turn()
        assert layer.query(status, {"id": number}) == [{"status": "running"}]  # it may be only late
        time.sleep(0.4)
        made._looked.clear()
        made.turn()
        assert layer.query(status, {"id": number}) == [{"status": "lost"}]


def test_one_that_was_given_up_while_it_ran_changes_nothing_any_more(desk: Layer) -> None:
    found = functions.load(desk, "work.slow")
    asking = Asking(desk.my_id, due="2020-01-01T00:00:00.000000Z")
    execution = functions.intent(desk, found, {"seconds": 0, "note": "late"}, asking, [])
    desk.ledger.intend(execution)
    other = desk.ledger.resume(execution.id)
    desk.ledger.conclude(other, "lost", {"error": {"message": "its runner is gone"}})
    with pytest.raises(Denied):
        functions.perform(desk, found, {"seconds": 0, "note": "late"}, execution, asking)
    assert desk.query("select * from effect") == [] and ends(desk, "work.slow") == [("lost", 1)]


def test_it_stops_when_told_and_what_does_not_end_is_queued_again(desk: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GRACE", 0.2)
    desk.call("trigger.define", name="slow", function="work.slow", on_entity="effect", given={"seconds": 2.0})
    desk.insert("effect", {"ticket": 1, "part": "begin"})
    said: list[str] = []
    made = Worker(desk, 2, say=lambda event, **details: said.append(event))
    thread = threading.Thread(target=made.run)
    thread.start()
    wait_until(
        lambda: desk.query("select * from execution where status = 'running' and function = 'work.slow'"), "it runs", 60
    )
    made.stop()
    thread.join(30)
    assert ends(desk, "work.slow") == [("lost", 1), ("queued", 2)]
    assert desk.engine.leases("feed") == [each for each in desk.engine.leases("feed") if each[0] == "feed/place"]
    assert [each for each in desk.engine.leases("runner/") if each[1] == made.id] == []
    wait_until(lambda: "over" in said, "the thread has found it over", 30)
    assert len(desk.query("select * from effect")) == 1


def test_the_command_ends_well_on_sigterm(desk: Layer, location: str) -> None:
    process = kills.start(location)
    desk.insert("ticket", {"title": "a"})
    kills.wait_for(desk, lambda now: now["done"] == 1, "it is done")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    named = [event["event"] for event in kills.events(process)]
    assert named[:2] == ["start", "lead"] and named[-1] == "stop" and "done" in named
    assert desk.engine.leases("runner/") == []


def test_a_box_that_was_left_over_is_killed_and_no_other(desk: Layer, location: str) -> None:
    desk.call("work.slow", seconds=0)
    (over,) = desk.query("select id from execution where function = 'work.slow'")
    labels = {"layer": desk.id, "execution": str(over["id"])}
    left = [Sandbox.create(tier="namespace", name=f"left-{n}", labels=labels) for n in range(2)]
    unknown = Sandbox.create(tier="namespace", name="unknown", labels={"layer": desk.id, "execution": "999999999"})
    others = Sandbox.create(tier="namespace", name="others", labels={"layer": "another", "execution": str(over["id"])})
    try:
        made = Worker(desk, say=lambda event, **details: None)
        for expected in (3, 0):  # two looks must have found it
            made._looked.clear()
            made.turn()
            assert len(Sandbox.list(labels={"layer": desk.id})) == expected
        assert others.info()["state"] == "running"
    finally:
        for box in (*left, unknown, others):
            with contextlib.suppress(LayerError):
                box.kill()


def test_dead_is_only_said_of_processes_of_this_machine() -> None:
    mine = runners.Runner(None, 1.0).id
    place, pid, born, _ = mine.split(".")
    assert not runners.dead(mine) and int(pid) == os.getpid()
    assert runners.dead(f"{place}.{pid}.{int(born) - 1}.00")  # another process had the number
    assert runners.dead(f"{place}.4194305.1.00")
    assert not runners.dead(f"0123456789ab.{pid}.1.00") and not runners.dead("what")
