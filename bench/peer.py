"""DoltLite on the same rows, in a process of its own: its library takes the place of `sqlite3` there.

`python -m bench.peer ROWS DIRECTORY SECONDS` prints seconds and bytes as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import doltlite

# isort: split
import sqlite3  # only now: DoltLite's library must already be in SQLite's place

from bench.measure import Side, per_call
from bench.rows import INSERT, UPDATE, row


def main(count: int, directory: Path, seconds: float) -> dict[str, float | str]:
    connection = sqlite3.connect(directory / "peer.db", isolation_level=None)
    pick = random.Random(7)

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

    def timed(side: Side, prepare: Side | None = None, least: int = 7) -> float:
        taken: list[float] = []
        while len(taken) < least or (sum(taken) < seconds and len(taken) < 101):
            if prepare:
                prepare(len(taken))
            taken.append(per_call(side, len(taken), 1))
        return median(taken)

    def prepare_merge(number: int) -> None:
        branch(f"merge{number}", some(1000))
        change([0])  # main moves on, so that the merge has three sides

    def some(rows: int) -> list[int]:
        return pick.sample(range(1, count), rows)

    call("create table item (id integer primary key, name text not null, grp integer, owner text, qty integer)")
    call("begin")
    connection.executemany(INSERT, ((number, *row(number, count).values()) for number in range(count)))
    call("commit")
    call("create index item_grp on item (grp)")
    call("select dolt_commit('-A', '-m', 'rows')")
    branch("diff", some(100))
    change([0])
    found: dict[str, float | str] = {"version": doltlite.__version__}
    found["fork"] = timed(lambda number: call("select dolt_branch(?)", f"branch{number}"))
    found["diff"] = timed(lambda _: call("select * from dolt_diff_item where from_ref = 'main' and to_ref = 'diff'"))
    found["write"] = timed(lambda _: change(some(1)))
    found["merge"] = timed(lambda number: call("select dolt_merge(?)", f"merge{number}"), prepare_merge)
    call("select dolt_gc()")
    before, writes = size(), 200
    for _ in range(writes):
        change(some(1))
    found["bytes"] = (size() - before) / writes
    call("select dolt_gc()")
    found["bytes_collected"] = max(0, size() - before) / writes
    connection.close()
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))))
