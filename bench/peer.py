"""DoltLite on the same rows, in a process of its own: its library takes the place of `sqlite3` there.

`python -m bench.peer ROWS DIRECTORY` reads the name of an operation per line, does it and prints what it took:
seconds, or bytes. Each operation is timed in there, so that the way between the processes does not count.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count as numbers
from pathlib import Path

from bench.measure import per_call
from bench.rows import INSERT, UPDATE, row


class Peer:
    """The other end: asks the process for an operation and gives what it took."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.version = process, ""

    def ask(self, operation: str) -> float:
        assert self.process.stdin and self.process.stdout
        print(operation, file=self.process.stdin, flush=True)
        return float(self.answer())

    def answer(self) -> str:
        assert self.process.stdout
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"DoltLite's process ended with {self.process.wait()}")
        return json.loads(line)


@contextmanager
def peer(count: int, directory: Path) -> Iterator[Peer]:
    """DoltLite with so many rows, ready to be asked."""
    command = [sys.executable, "-m", "bench.peer", str(count), str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        other = Peer(process)
        other.version = other.answer()
        yield other


def serve(count: int, directory: Path) -> None:
    import doltlite

    # isort: split
    import sqlite3  # only now: DoltLite's library must already be in SQLite's place

    connection = sqlite3.connect(directory / "peer.db", isolation_level=None)
    pick, number = random.Random(7), numbers()

    def call(sql: str, *params: object) -> list[tuple]:
        return connection.execute(sql, params).fetchall()

    def size() -> int:
        return sum(path.stat().st_size for path in directory.iterdir())

    def change(ids: Iterable[int]) -> None:
        # Inside a transaction DoltLite syncs once for change and commit together, its best case.
        call("begin")
        connection.executemany(UPDATE, [(pick.randrange(10**6), id) for id in ids])
        call("select dolt_commit('-a', '-m', 'change')")
        if connection.in_transaction:
            call("commit")

    def branch(name: str, ids: Iterable[int]) -> None:
        call("select dolt_branch(?)", name)
        call("select dolt_checkout(?)", name)
        change(ids)
        call("select dolt_checkout('main')")

    def some(rows: int) -> list[int]:
        return pick.sample(range(1, count), rows)

    def fork() -> float:
        return per_call(lambda number: call("select dolt_branch(?)", f"branch{number}"), next(number))

    def diff() -> float:
        return per_call(lambda _: call("select * from dolt_diff_item where from_ref = 'main' and to_ref = 'diff'"), 0)

    def write() -> float:
        return per_call(lambda _: change(some(1)), 0)

    def merge() -> float:
        name = f"merge{next(number)}"
        branch(name, some(1000))
        change([0])  # main moves on, so that the merge has three sides
        return per_call(lambda _: call("select dolt_merge(?)", name), 0)

    def grown(collect: bool) -> float:
        call("select dolt_gc()")
        before, writes = size(), 100
        for _ in range(writes):
            change(some(1))
        if collect:
            call("select dolt_gc()")
        return max(0, size() - before) / writes

    operations = {
        "fork": fork,
        "diff": diff,
        "write": write,
        "merge": merge,
        "bytes": lambda: grown(collect=False),
        "bytes collected": lambda: grown(collect=True),
    }
    call("create table item (id integer primary key, name text not null, grp integer, owner text, qty integer)")
    call("begin")
    connection.executemany(INSERT, ((id, *row(id, count).values()) for id in range(count)))
    call("commit")
    call("create index item_grp on item (grp)")
    call("select dolt_commit('-A', '-m', 'rows')")
    branch("diff", some(100))
    change([0])
    print(json.dumps(doltlite.__version__), flush=True)
    for line in sys.stdin:
        print(operations[line.strip()](), flush=True)
    connection.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
