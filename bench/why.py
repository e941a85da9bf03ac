"""Measure `why`: what led to a fact that a function wrote after a trigger saw a person's edit, in a layer with a million executions.

`python -m bench.why [--quick]`; `make bench` runs it after the law's. The million is put into the tables directly, each with its call, box,
steps, usage, outcome, two txs and a version of a row; the chains asked about are made by a person's edit, a worker and functions in boxes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg

import livinglayer
from bench.boxes import stop
from bench.report import TITLES, Line, keep_part, table
from livinglayer.law.worker import Worker

HERE = Path(__file__).parent
MARK = "# Benchmark of why"
HEAD = ["operation", "plain", "ours", "figure", "bar", "met"]
TICKETS = 100_000  # rows that the million executions changed, in turns
CODE = """
import layer

def triage(id):
    row = layer.one("select priority from ticket where id = :id", id=id)
    layer.update("ticket", id, status="urgent" if row["priority"] > 2 else "normal")
"""
AT = "2026-01-01T00:00:00.000000Z"


def prepare(place: str) -> Any:
    layer = livinglayer.open(place, create=True)
    layer.define("ticket", {"title": "text!", "status": "text", "priority": "int", "owner": "ref principal"})
    layer.principal("anna")
    layer.grant("anna", "write", "ticket", where="owner = :me", reason="their own tickets")
    layer.grant("anna", "read", "ticket")
    layer.call(
        "function.define", name="ticket.triage", code=CODE, reads=["ticket"], writes=["ticket"], signature={"arguments": {"id": "int!"}}
    )  # fmt: skip
    return layer


class Bulk:
    """Statements on a database of a layer that nobody else has open."""

    def __init__(self, place: str) -> None:
        self.sqlite = not place.startswith("postgres")
        if self.sqlite:
            self.connection: Any = apsw.Connection(str(Path(place) / ".layer" / "layer.db"))
            for name, value in (("synchronous", 0), ("cache_size", -400_000)):
                self.connection.pragma(name, value)
        else:
            self.connection = psycopg.connect(place, autocommit=True, options="-c search_path=livinglayer")
            self.connection.execute("set synchronous_commit = off")

    def fill(self, into: str, count: int, values: str) -> None:
        """A row for each k from 0."""
        if self.sqlite:
            numbers = f"with recursive n(k) as (select 0 union all select k + 1 from n where k < {count - 1})"
            self.connection.execute(f"insert into {into} {numbers} select {values} from n")
        else:
            self.connection.execute(f"insert into {into} select {values} from generate_series(0, {count - 1}) n(k)")

    def one(self, sql: str) -> Any:
        return self.connection.execute(sql).fetchone()

    def close(self) -> None:
        if not self.sqlite:
            self.connection.execute("vacuum (analyze)")
        self.connection.close()


def fill(place: str, executions: int) -> None:
    """Put executions of one function into the ledger: one in two caused by the tx of the one before it."""
    layer = livinglayer.open(place)
    ticket, owner, main = layer.schema().get("ticket"), 1501, 1500
    function = layer.query("select id from function")[0]["id"]
    store = {f.name: f.store for f in ticket.fields}
    layer.close()
    bulk = Bulk(place)
    tx, number = bulk.one("select tx, next_id from ledger_clock")
    rows = min(TICKETS, executions)
    first, own = number, number + rows  # ids of tickets, of executions
    random = "lower(hex(randomblob(16)))" if bulk.sqlite else "md5(k::text)"
    empty, at = ("x'00'", f"'{AT}'") if bulk.sqlite else ("'\\x00'::bytea", f"'{AT}'::timestamptz")
    begun, ended = f"{tx + 1} + 2 * k", f"{tx + 2} + 2 * k"
    caused = f"case when k % 2 = 1 then {tx} + 2 * k end"
    with contextlib.ExitStack() as whole:
        if bulk.sqlite:
            bulk.connection.execute("begin")
            whole.callback(lambda: bulk.connection.execute("commit"))
        bulk.fill("ledger_execution", executions, f"{own} + k, {owner}, null, 'b' || ({own} + k), 'function', '{{}}', 'a call', '00-' || {random} || '-00f067aa0ba902b7-01', {at}, {begun}")  # fmt: skip
        bulk.fill("ledger_box", executions, f"'b' || ({own} + k), 'namespace', {owner}, null, {at}, {begun}")
        bulk.fill("ledger_call", executions, f"{own} + k, 'function.call', {function}, 5, '{{\"id\":7}}', {main}, {tx} + 2 * k, null, null, {caused}, 1, null, null, 'seed', null, '[1502]', null, {begun}")  # fmt: skip
        bulk.fill("ledger_outcome", executions, f"{own} + k, 'done', {at}, '{{}}', {ended}")
        bulk.fill("ledger_usage", executions, f"{own} + k, {owner}, null, {function}, 0.01, 0.01, 1.0, 0, 0, 0, {at}, {ended}")  # fmt: skip
        bulk.fill("ledger_step", 2 * executions, f"{own} + k / 2, 1 + k % 2, case k % 2 when 0 then 'box' else 'query' end, '{{\"id\":\"bx\"}}', {at}, {tx + 2} + 2 * (k / 2)")  # fmt: skip
        bulk.fill("ledger_tx", 2 * executions, f"{tx + 1} + k, {main}, {at}, {owner}, {own} + k / 2, null, null, null, {empty}")  # fmt: skip
        bulk.fill("ledger_change", executions, f"{main}, {ended}, {ticket.id}, {first} + k % {rows}, 'u', {empty}")
        columns = f"{store['title']}, {store['status']}, {store['priority']}"
        bulk.fill(f"{ticket.store}(id, _tx, {columns})", rows, f"{first} + ({executions - rows} + k) % {rows}, {tx + 2} + 2 * ({executions - rows} + k), 'a ticket', 's' || k, k")  # fmt: skip
        if executions > rows:
            bulk.fill(f"{ticket.store}__h(id, tx_from, tx_to, {columns})", executions - rows, f"{first} + k % {rows}, {ended}, {tx + 2} + 2 * (k + {rows}), 'a ticket', 's' || k, k")  # fmt: skip
        bulk.connection.execute(f"update ledger_clock set tx = {tx + 2 * executions}, next_id = {own + executions}")
    bulk.close()


def chains(place: str, count: int) -> tuple[Any, list[int]]:
    """Edits of a person, and what a worker made of them."""
    layer = livinglayer.open(place)
    layer.call("ticket.triage", id=layer.query("select min(id) as id from ticket")[0]["id"])  # the host is up
    layer.call("trigger.define", name="on_new", function="ticket.triage", on_entity="ticket", on_actions=["insert"])
    anna = layer.query("select id from principal where name = 'anna'")[0]["id"]
    rows = [
        layer.call("row.insert", {"entity": "ticket", "values": {"title": f"It burns {n}", "priority": 3, "owner": anna}}, principal="anna")
        for n in range(count)
    ]  # fmt: skip
    Worker(layer, 4).run(once=True)
    return layer, rows


def check(layer: Any, row: int) -> None:
    """All of it is there: the fact, the function, the trigger, the edit, the person, and the permissions of both."""
    tree = layer.why(f"ticket/{row}.status")
    kinds = [node.kind for node in tree.walk()]
    told = "\n".join(tree.lines())
    assert tree.data["fields"] == {"status": "urgent"} and kinds.count("execution") == 2 and "trigger" in kinds, told
    assert kinds.count("permission") == 3 and told.endswith("anna, a person"), told


def times(act: Callable[[int], Any], rows: list[int]) -> list[float]:
    found = []
    for row in rows:
        start = time.perf_counter()
        act(row)
        found.append(time.perf_counter() - start)
    return found


def measure(place: str, executions: int, count: int, say: Callable[[str], None]) -> list[Line]:
    prepare(place).close()
    say(f"{executions:,} executions into the ledger")
    fill(place, executions)
    say(f"{count} chains by a person, a worker and functions in boxes")
    layer, rows = chains(place, count)
    try:
        check(layer, rows[0])
        say("asking why")
        ran = {r["id"]: r["execution"] for r in layer.query(f"select id, execution from ticket__history where id >= {rows[0]} and op = 'update'")}  # fmt: skip
        old = [r["id"] for r in layer.query(f"select id from ticket where id < {rows[0]} order by id limit {count}")]
        lines = []
        for name, act, asked in (
            ("why ticket/N.status: function, trigger, edit, person", lambda n: layer.why(f"ticket/{n}.status"), rows),
            ("why ticket/N, all its fields", lambda n: layer.why(f"ticket/{n}"), rows),
            ("why --execution E", lambda n: layer.why(ran[n]), rows),
            ("why of a row with ten versions", lambda n: layer.why(f"ticket/{n}"), old),
            ("why ticket/N --impact", lambda n: layer.why(f"ticket/{n}", impact=True), rows),
            ("the same as lines for people", lambda n: layer.why(f"ticket/{n}").lines(), rows),
        ):
            times(act, asked[:10])
            found = [t for _ in range(5) for t in times(act, asked)]
            middle, slow = statistics.median(found), statistics.quantiles(found, n=20)[18]
            lines.append(Line(f"{name}, p50", middle * 1000, "ms", low=10, ours=middle))
            lines.append(Line("… 95th percentile", slow * 1000, "ms", ours=slow))
        return lines
    finally:
        layer.close()


@contextlib.contextmanager
def location(engine: str, home: Path) -> Iterator[str]:
    if engine == "sqlite":
        yield str(home / "layer")
        return
    from cluster import Cluster

    cluster = Cluster(home, shared_buffers="512MB")
    try:
        with cluster.database() as url:
            yield url
    finally:
        cluster.remove()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.why", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20,000 executions: a look, not a measurement")
    parser.add_argument("--executions", type=int, help="how many (default: 1,000,000; quick: 20,000)")
    parser.add_argument("--engines", default=",".join(TITLES), help="default: %(default)s")
    options = parser.parse_args()
    executions = options.executions or (20_000 if options.quick else 1_000_000)
    sys.path.append(str(HERE.parent / "tests"))  # the PostgreSQL that the tests start serves here too
    start, parts = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="lb-", dir="/var/tmp") as place:
        home = Path(place)
        home.chmod(0o711)  # PostgreSQL, under its own account, passes through
        os.environ |= {"LAYER_STATE": place + "/state", "XDG_CONFIG_HOME": place + "/config"}
        try:
            for engine in options.engines.split(","):

                def say(text: str, engine: str = engine) -> None:
                    print(f"{time.perf_counter() - start:6.1f} s  {TITLES[engine]}: {text}", file=sys.stderr, flush=True)  # fmt: skip

                with location(engine, home) as where:
                    lines = measure(where, executions, 10 if options.quick else 40, say)
                parts.append((f"{TITLES[engine]}, {executions:,} executions", lines))
        finally:
            stop(home / "state")
    text = "\n".join(
        [
            MARK,
            "",
            f"Python {platform.python_version()}, {os.cpu_count()} cores. The run took {time.perf_counter() - start:.0f} s.",
            "",
            "Each figure is the median over forty chains, each made by a person's edit, a trigger that a worker saw, and a function in a box.",
            *(f"\n## {title}\n\n{table(HEAD, [line.cells() for line in lines])}" for title, lines in parts),
        ]
    )
    print(text)
    if not options.quick and executions >= 1_000_000:
        keep_part(HERE / "results.md", MARK, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
