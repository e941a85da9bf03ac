"""Workers as processes of their own, which a test kills; and what must be true afterwards."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from sandbox.hosts import Host, wait_until

import livinglayer
from livinglayer import Layer
from livinglayer.law.worker import Worker
from livinglayer.sandbox import Sandbox

# What it changes (two rows and a counter) is one tx with its end; it dawdles so that a kill finds it under way.
MARK = """
import layer, time

def mark(id):
    layer.insert("effect", ticket=id, part="first")
    time.sleep(0.02 + id % 7 * 0.01)
    row = layer.one("select marks from ticket where id = :id", id=id)
    layer.update("ticket", id, marks=row["marks"] + 1)
    layer.insert("effect", ticket=id, part="second")
    return id
"""


def prepare(layer: Layer) -> None:
    """Tickets that are marked once each when they are made."""
    layer.define("ticket", {"title": "text!", "marks": {"type": "int", "default": 0}})
    layer.define("effect", {"ticket": "int!", "part": "text!"})
    layer.call(
        "function.define", name="work.mark", code=MARK, signature={"arguments": {"id": "int!"}}, reads=["ticket"], writes=["ticket", "effect"]
    )  # fmt: skip
    layer.call(
        "trigger.define", name="marking", function="work.mark", on_entity="ticket", on_actions=["insert"],
        retries={"attempts": 20, "backoff": 0.05, "factor": 1.0},
    )  # fmt: skip


def start(location: str, *more: str) -> subprocess.Popen[str]:
    """`layer worker` as a process."""
    kept = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would stop it
    process = subprocess.Popen(
        [sys.executable, "-m", "livinglayer.edges.cli.main", "--dir", location, "worker", "--json", *more],
        stdin=subprocess.DEVNULL,
        stdout=kept,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"LAYER_DIR": ""},
    )
    process.stdout = kept
    return process


def output(process: subprocess.Popen[str]) -> str:
    """What a worker that has ended said."""
    assert process.stdout is not None
    process.stdout.seek(0)
    return process.stdout.read()


def events(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What a worker that has ended said, by event."""
    return [json.loads(line) for line in output(process).splitlines() if line.startswith("{")]


def states(layer: Layer) -> Counter[str]:
    rows = layer.query("select status, count(*) as n from execution where function = 'work.mark' group by status")
    return Counter({row["status"]: row["n"] for row in rows})


def wait_for(layer: Layer, true: Callable[[Counter[str]], object], what: str, seconds: float = 120) -> None:
    wait_until(lambda: true(states(layer)), what, seconds)


def rest(layer: Layer) -> None:
    """Everything that is left to do, retries included."""
    deadline = time.monotonic() + 300
    while True:
        Worker(layer, 4, say=lambda event, **details: None).run(once=True)
        if not states(layer) & Counter(queued=1, running=1):
            return
        assert time.monotonic() < deadline, states(layer)
        time.sleep(0.05)


def check(layer: Layer, host: Host, tickets: list[int]) -> dict[str, int]:
    """Each execution has an explained end, each ticket its effects exactly once, nothing is left behind."""
    rows = layer.query(
        "select id, parent, status, attempt, arguments, result from execution where function = 'work.mark'"
    )
    by_ticket: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_ticket.setdefault(row["arguments"]["id"], []).append(row)
        assert row["status"] in ("done", "lost", "failed"), row
        if row["status"] != "done":
            assert row["result"]["error"]["message"], row
            assert sum(other["parent"] == row["id"] for other in rows) == 1, f"not tried again, or twice: {row}"
        if row["status"] == "lost":
            assert "is gone" in row["result"]["error"]["message"]
    assert sorted(by_ticket) == sorted(tickets)
    for ticket, own in by_ticket.items():
        assert [row["status"] for row in own].count("done") == 1, (ticket, own)
    effects = Counter((row["ticket"], row["part"]) for row in layer.query("select ticket, part from effect"))
    assert effects == Counter({(ticket, part): 1 for ticket in tickets for part in ("first", "second")})
    assert layer.query("select count(*) as n from ticket where marks <> 1") == [{"n": 0}]
    assert layer.engine.leases("execution/") == []
    wait_until(lambda: not Sandbox.list(labels={"layer": layer.id}), "no box is left", 20)
    assert layer.verify().ok
    counted = Counter(row["status"] for row in rows)
    return {"executions": len(rows), **counted}


def campaign(
    location: str, host: Host, tickets: int, kills: int, workers: int, seed: int, concurrency: str = "4"
) -> dict[str, int]:
    """Make tickets, kill workers at random while they mark them, let others finish, and look at everything."""
    rng = random.Random(seed)
    with livinglayer.open(location, create=True) as layer:
        prepare(layer)
        made = layer.insert("ticket", [{"title": str(n)} for n in range(tickets)])
        running = [start(location, "--concurrency", concurrency) for _ in range(workers)]
        try:
            for n in range(kills):
                floor = max(1, tickets * (n + 1) // (kills + 2))
                wait_for(
                    layer, lambda now, floor=floor: now["done"] >= floor and now["running"] > 0, f"{floor} are done"
                )
                victim = running.pop(rng.randrange(len(running)))
                time.sleep(rng.random() * 0.05)
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                running.append(start(location, "--concurrency", concurrency))
            wait_for(layer, lambda now: not now["queued"] and not now["running"], "everything is done", 300)
        finally:
            for process in running:
                process.send_signal(signal.SIGTERM)
            for process in running:
                code, said = process.wait(60), output(process)
                assert code == 0 or (code == -signal.SIGTERM and not said), said[-3000:]  # or it had not even begun
        return check(layer, host, made)
