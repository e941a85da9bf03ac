"""Measure what the layer adds to a tool call of an agent: the built-in loop in a box, beside the same loop without a layer.

`python -m bench.agents [--quick]`; `make bench` runs it after the law's. A scripted model asks for one call after another and
looks at the clock: from the moment it is asked to the moment it is asked again, with the result. In the layer, that is the
gateway twice, the contract's terms, a query or a change that is durable, and the steps of both, recorded. Without, it is
the same loop as a plain process that asks the model directly and sqlite3 (synchronous full) itself.
"""

from __future__ import annotations

import argparse
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import livinglayer
from bench.boxes import apart
from bench.report import Line, keep_part, table
from livinglayer.jobs.scripted_model import Request, ScriptedModel, Step
from livinglayer.sandbox.inside import SOURCE

HERE = Path(__file__).parent
MARK = "# Benchmark of agents"
HEAD = ["operation", "peer", "ours", "figure", "bar", "met"]
KEY = "sk-scripted-0123456789"
ROWS, CALLS = 2000, 50
PLAIN = """
import json, sqlite3, sys
import layer_agent

db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.row_factory = sqlite3.Row
db.execute("pragma synchronous = full")

class Plain(layer_agent.Agent):
    def there(self, call):
        if call.name == "query":
            return json.dumps([dict(row) for row in db.execute(call.arguments["sql"])]), False
        db.execute("update ticket set priority = :priority where id = :id", call.arguments)
        return json.dumps({"ok": True}), False

print(Plain(json.loads(sys.argv[2])).run())
"""


class Clock:
    """A script that asks for a query and an update in turn, and keeps how long each took to come back."""

    def __init__(self, calls: int) -> None:
        self.calls, self.last = calls, 0.0
        self.took: dict[str, list[float]] = {"query": [], "update_ticket": []}

    def __call__(self, request: Request) -> Step:
        at, number = time.perf_counter(), request.number
        if number > 4:  # the first are warming up
            self.took[("query", "update_ticket")[(number - 1) % 2]].append(at - self.last)
        if number == self.calls:
            return "done"
        self.last, id = time.perf_counter(), number % ROWS + 1
        if number % 2:
            return {"calls": [("update_ticket", {"id": self.ids[id - 1], "priority": number})]}
        return {"calls": [("query", {"sql": f"select id, title, priority from ticket where id = {self.ids[id - 1]}"})]}

    ids: list[int] = []


def model_of(url: str) -> dict[str, Any]:
    return {"api": "anthropic", "url": url, "model": "scripted-1", "secret": "MODEL_KEY", "max_tokens": 1024}


def prepare(place: Path) -> tuple[Any, list[int]]:
    layer = livinglayer.open(place / "layer", create=True)
    layer.define("ticket", {"title": "text!", "priority": "int"})
    ids = layer.insert("ticket", [{"title": f"ticket {n}", "priority": 0} for n in range(ROWS)])
    layer.call("secret.set", name="MODEL_KEY", value=KEY)
    plain = sqlite3.connect(place / "plain.db")
    plain.execute("pragma journal_mode = wal")
    plain.execute("create table ticket(id integer primary key, title text, priority integer)")
    plain.executemany("insert into ticket values (?, ?, 0)", [(id, f"ticket {id}") for id in ids])
    plain.commit()
    return layer, ids


def governed(layer: Any, model: ScriptedModel) -> int:
    """One agent in a box, to its end."""
    rule = {"host": "model.test", "protocol": "http", "resolve": f"127.0.0.1:{model.port}", "private": True}
    rule |= {"secrets": ["MODEL_KEY"], "swap": "header"}
    layer.call("blueprint.define", name="asking", limits={"memory": "256M"}, egress=[rule], secrets=["MODEL_KEY"])
    layer.call(
        "contract.define", name="clerk", blueprint="asking", model=model_of("http://model.test"), reads={"ticket": {}},
        scope={"ticket": {"actions": ["update"], "fields": ["priority"]}}, budget={"seconds": 600, "tokens": 10_000_000},
    )  # fmt: skip
    told = layer.call("agent.run", contract="clerk", task="count", propose=False)
    sql = "select status, result from execution where id = :id"
    while (row := layer.query(sql, {"id": told["execution"]})[0])["status"] == "running":
        time.sleep(0.05)
    assert row["status"] == "done", row
    layer.call("branch.discard", name=told["branch"])
    return int(told["execution"])


def alone(place: Path, model: ScriptedModel, tools: list[Any]) -> None:
    """The same loop as a process, with nothing around it."""
    import json

    given = {"task": "count", "model": model_of(model.url), "tools": tools, "messages": None}
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "MODEL_KEY": KEY}
    argv = [sys.executable, "-c", PLAIN, str(place / "plain.db"), json.dumps(given)]
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL)


def measure(place: Path, quick: bool) -> list[Line]:
    layer, ids = prepare(place)
    Clock.ids = ids
    ours: dict[str, list[float]] = {"query": [], "update_ticket": []}
    peer: dict[str, list[float]] = {"query": [], "update_ticket": []}
    inside: list[float] = []
    try:
        for _ in range(1 if quick else 4):
            clock = Clock(CALLS)
            with ScriptedModel(clock, KEY) as model:
                execution = governed(layer, model)
            tools = [
                {**tool, "input_schema": tool["input_schema"], "where": "layer"}
                for tool in model.requests[0].body["tools"]
            ]
            other = Clock(CALLS)
            with ScriptedModel(other, KEY) as model:
                alone(place, model, tools)
            for name in ours:
                ours[name] += clock.took[name]
                peer[name] += other.took[name]
            found = layer.query("select detail from step where execution = :id and kind = 'tool'", {"id": execution})
            assert len(found) == CALLS
            inside += [row["detail"]["ms"] / 1000 for row in found[4:]]
        assert layer.verify().ok
    finally:
        layer.close()
    lines = []
    for name, label in (("query", "a query"), ("update_ticket", "an update")):
        own, other_side = statistics.median(ours[name]), statistics.median(peer[name])
        lines.append(Line(f"{label}, from answer to answer, p50", own / other_side, "×", plain=other_side, ours=own))
        lines.append(Line(f"what the layer adds to {label}", (own - other_side) * 1000, "ms", ours=own - other_side))
        lines.append(Line(f"{label}, 95th percentile", statistics.quantiles(ours[name], n=20)[18] * 1000, "ms"))
    own = statistics.median(inside)
    lines.append(Line("a tool call, as its step has it, p50", own * 1000, "ms", ours=own))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.agents", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one agent: a look, not a measurement")
    options = parser.parse_args()
    start = time.perf_counter()
    with apart() as place:
        lines = measure(place, options.quick)
    version, cores = platform.python_version(), os.cpu_count()
    text = "\n".join(
        [
            MARK,
            "",
            f"Python {version}, {cores} cores, SQLite, tier namespace. The run took {time.perf_counter() - start:.0f} s.",
            "",
            f"Medians over agents of {CALLS} tool calls each, one call an answer; with and without a layer they take turns. Both run the same loop",
            "against the same scripted model, which takes the time between being asked and being asked again. The peer has no gateway, no box and no",
            "record: it asks the model directly and sqlite3 (synchronous full) in its own process.",
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
