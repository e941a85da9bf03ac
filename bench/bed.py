"""A layer and a plain table with the same rows and the same past, ready to be measured."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import psycopg

import livinglayer
from bench.plain import Plain, PlainPostgres, PlainSqlite
from bench.rows import FIELDS, INSERT, SCAN, UPDATE, row

BATCH = 10_000
DEPTH = 4


class Bed:
    """Rows, then a tenth of them changed, then branches: `fork1` changes a hundredth, `fork4` is forked four deep."""

    def __init__(self, engine: str, count: int, place: str, plain: str) -> None:
        self.engine, self.count, self.place = engine, count, place
        self.plain: Plain = PlainSqlite(Path(plain)) if engine == "sqlite" else PlainPostgres(plain)
        self.layer: Any = livinglayer.open(place, create=True)
        self.layer.define("item", FIELDS)
        self.pick = random.Random(7)
        self.ids = array("q")
        for start in range(0, count, BATCH):
            rows = [row(number, count) for number in range(start, min(start + BATCH, count))]
            ids = self.layer.insert("item", rows, reason="load")
            self.plain.write_many(INSERT, [(id, *values.values()) for id, values in zip(ids, rows, strict=True)])
            self.ids.extend(ids)
        self.serial = 10**6
        self.as_of: int = self.layer.update("item", self.ids[0], {"qty": 1}, reason="the moment to look back to")
        self.plain.write(UPDATE, (1, self.ids[0]))
        before = totals(self.plain.dicts(SCAN, ()))
        self.change(self.some(count // 10))
        parent = "main"
        for depth in range(1, DEPTH + 1):
            self.layer.fork(f"fork{depth}", source=parent)
            parent = f"fork{depth}"
            self.change(self.some(max(10, count // (100 if depth == 1 else 1000))), branch=parent)
        self.change(self.some(count // 100))  # main goes on after the fork, as it does in life
        self.settle()
        for view, expected in (({"as_of": self.as_of}, before), ({}, totals(self.plain.dicts(SCAN, ())))):
            if (found := totals(self.layer.query(SCAN, **view))) != expected:
                raise RuntimeError(f"the layer holds {found} where the plain table held {expected} ({view})")

    def some(self, rows: int) -> list[int]:
        return [self.ids[number] for number in self.pick.sample(range(self.count), rows)]

    def any(self, number: int) -> int:
        """The row of a running number: scattered, and the same one for every side."""
        return self.ids[number * 7919 % self.count]

    def change(self, ids: Sequence[int], branch: str = "main") -> None:
        """Give rows another quantity, a thousand to a transaction; on main the plain table follows."""
        for start in range(0, len(ids), 1000):
            values = [(self.serial + number, id) for number, id in enumerate(ids[start : start + 1000])]
            self.serial += 1000  # never the value that was there
            with self.layer.transaction(branch=branch, reason="recount") as tx:
                for qty, id in values:
                    tx.update("item", id, {"qty": qty})
            if branch == "main":
                self.plain.write_many(UPDATE, values)

    def bytes(self) -> int:
        """What the layer takes on disk, the write-ahead log folded in."""
        if isinstance(self.plain, PlainPostgres):
            with psycopg.connect(self.place, autocommit=True) as connection:
                return connection.execute("select pg_database_size(current_database())").fetchone()[0]
        home = Path(self.place)
        total = sum(
            path.stat().st_size for path in home.rglob("*") if path.is_file() and not path.suffix.startswith(".db")
        )
        for database in home.rglob("*.db"):
            connection = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)
            total += connection.pragma("page_count") * connection.pragma("page_size")
            connection.close()
        return total

    def settle(self) -> None:
        """On PostgreSQL do now what its autovacuum would do in the middle of a measurement."""
        if isinstance(self.plain, PlainPostgres):
            for url in (self.place, self.plain.url):
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute("vacuum (analyze)")
                    connection.execute("checkpoint")

    def close(self) -> None:
        self.layer.close()
        self.plain.close()


def totals(rows: list[dict[str, Any]]) -> list[int]:
    return [int(value) for value in rows[0].values()]
