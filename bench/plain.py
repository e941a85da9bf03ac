"""The yardstick: the same rows in an ordinary table, with the same driver and the same durability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import psycopg
from psycopg.rows import dict_row

Read = Callable[..., list[Any]]  # sql with `?`, params


class PlainSqlite:
    """One apsw connection, WAL with `synchronous=FULL` as the layer has it."""

    def __init__(self, path: Path) -> None:
        self.connection = self.connect(str(path))
        self.connection.pragma("journal_mode", "wal")
        self.connection.execute(
            "create table item (id integer primary key, name text not null, grp integer, owner text, qty integer)"
        )
        self.connection.execute("create index item_grp on item (grp)")

    @contextmanager
    def second(self) -> Iterator[Any]:
        with closing(self.connect(self.connection.filename)) as connection:
            self.follow(self.connection, connection)
            yield connection

    @staticmethod
    def follow(leader: Any, follower: Any) -> None:
        """Give a connection another one's settings, those that decide how fast a read is."""
        for name in ("cache_size", "mmap_size", "temp_store"):
            follower.pragma(name, leader.pragma(name))

    @staticmethod
    def connect(path: str) -> apsw.Connection:
        connection = apsw.Connection(path)
        connection.pragma("synchronous", "full")
        connection.pragma("wal_autocheckpoint", 2000)
        return connection

    @staticmethod
    def read(connection: Any) -> Read:
        return lambda sql, params=(): connection.execute(sql, params).fetchall()

    def dicts(self, sql: str, params: Sequence[object]) -> list[dict[str, Any]]:
        cursor = self.connection.execute(sql, params)
        names = [column[0] for column in cursor.get_description()]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def write(self, sql: str, params: Sequence[object]) -> None:
        self.connection.execute(sql, params)

    def write_many(self, sql: str, many: Iterable[Sequence[object]]) -> None:
        self.connection.execute("begin immediate")
        self.connection.executemany(sql, many)
        self.connection.execute("commit")

    def close(self) -> None:
        self.connection.close()


class PlainPostgres:
    """One psycopg connection in autocommit; statements are prepared as psycopg does by itself."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute(
            "create table item (id bigint primary key, name text not null, grp bigint, owner text, qty bigint)"
        )
        self.connection.execute("create index item_grp on item (grp)")
        # Cursors of their own, so that following the layer's choice of cursor for reads changes nothing here.
        self.cursor, self.dict_cursor = self.connection.cursor(), self.connection.cursor(row_factory=dict_row)

    @contextmanager
    def second(self) -> Iterator[Any]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            self.follow(self.connection, connection)
            yield connection

    @staticmethod
    def follow(leader: Any, follower: Any) -> None:
        """Give a connection another one's settings, those that decide how fast a read is."""
        follower.prepare_threshold, follower.cursor_factory = leader.prepare_threshold, leader.cursor_factory
        for name in ("jit", "plan_cache_mode", "work_mem", "max_parallel_workers_per_gather"):
            value = leader.execute(f"show {name}").fetchone()[0]
            follower.execute(f"set {name} = '{value}'")

    @staticmethod
    def read(connection: Any) -> Read:
        mark = "$1" if issubclass(connection.cursor_factory, psycopg.RawCursor) else "%s"
        return lambda sql, params=(): connection.execute(sql.replace("?", mark), params).fetchall()

    def dicts(self, sql: str, params: Sequence[object]) -> list[dict[str, Any]]:
        return self.dict_cursor.execute(sql.replace("?", "%s"), params).fetchall()

    def write(self, sql: str, params: Sequence[object]) -> None:
        self.cursor.execute(sql.replace("?", "%s"), params)

    def write_many(self, sql: str, many: Iterable[Sequence[object]]) -> None:
        with self.connection.transaction():
            self.cursor.executemany(sql.replace("?", "%s"), many)

    def close(self) -> None:
        self.connection.close()


Plain = PlainSqlite | PlainPostgres
