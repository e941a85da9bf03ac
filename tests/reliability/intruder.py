"""A hand in the database past the layer: it changes rows as somebody with the engine's own tools would, and undoes it."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw
import psycopg
from reliability import content


class Intruder:
    """A raw connection with triggers, checks and foreign keys off."""

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        raise NotImplementedError

    def tables(self) -> dict[str, list[str]]:
        """Each table of the layer and its columns."""
        raise NotImplementedError

    def rows(self, table: str) -> list[str]:
        """A condition for each row that finds it alone."""
        raise NotImplementedError

    def other(self, table: str, column: str, where: str) -> str:
        """SQL for a value that is not the stored one."""
        raise NotImplementedError

    @contextmanager
    def changed(self, *statements: str) -> Iterator[None]:
        """Run the statements, and bring the tables they name back afterwards."""
        tables = [table for table in self.tables() if any(table in statement.split() for statement in statements)]
        for table in tables:
            self.execute(f"create temp table saved_{table} as select * from {table}")
        try:
            for statement in statements:
                self.execute(statement)
            yield
        finally:
            for table in tables:
                self.execute(f"delete from {table}")
                self.execute(f"insert into {table} select * from saved_{table}")
                self.execute(f"drop table saved_{table}")

    def acts(self, rng: random.Random) -> Iterator[tuple[str, str]]:
        """(what, statement): a random row of each table with one column changed, one emptied, and itself deleted."""
        for table, columns in self.tables().items():
            rows = self.rows(table)
            for column in columns if rows else []:
                where = rng.choice(rows)
                value = self.other(table, column, where)
                yield f"{table}.{column} changed", f"update {table} set {column} = {value} where {where}"
                if self.execute(f"select 1 from {table} where {where} and {column} is not null"):
                    yield f"{table}.{column} emptied", f"update {table} set {column} = null where {where}"
            if rows:
                yield f"{table}: row deleted", f"delete from {table} where {rng.choice(rows)}"


class SQLite(Intruder):
    def __init__(self, directory: str) -> None:
        self.connection = apsw.Connection(str(content.database(directory)))
        self.connection.set_busy_timeout(10_000)
        self.connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
        self.connection.pragma("ignore_check_constraints", 1)
        self.connection.collation_needed(content.collate)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        return list(self.connection.execute(statement))

    def tables(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for table, column in self.execute(
            "select t.name, c.name from main.sqlite_schema t join pragma_table_info(t.name, 'main') c "
            "where t.type = 'table' and t.name not like 'sqlite_%' order by t.name, c.cid"
        ):
            found.setdefault(table, []).append(column)
        return found

    def rows(self, table: str) -> list[str]:
        keys = self.execute(f"select name from pragma_table_info('{table}') where pk > 0 order by pk")
        names = [name for (name,) in keys] or ["rowid"]
        found = self.execute(f"select {', '.join(f'quote({name})' for name in names)} from {table}")
        return [" and ".join(f"{n} is {v}" for n, v in zip(names, row, strict=True)) for row in found]

    def other(self, table: str, column: str, where: str) -> str:
        [(kind, value)] = self.execute(f"select typeof({column}), {column} from {table} where {where}")
        [(declared,)] = self.execute(f"select type from pragma_table_info('{table}') where name = '{column}'")
        if kind == "null":
            return {"INTEGER": "7", "INT": "7", "REAL": "7.5", "BLOB": "x'07'"}.get(declared.upper(), "'7'")
        if kind in ("integer", "real"):
            return f"{column} - 1"
        if kind == "blob":
            return f"x'{bytes([value[0] ^ 1, *value[1:]]).hex()}'" if value else "x'07'"
        return other_text(column, value)


class Postgres(Intruder):
    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True, options="-c search_path=livinglayer")
        self.connection.execute("set session_replication_role = replica")

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []

    def tables(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for table, column in self.execute(
            "select relname, attname from pg_class c join pg_attribute a on attrelid = c.oid and attnum > 0 and not attisdropped "
            "where relkind = 'r' and relnamespace = 'livinglayer'::regnamespace order by relname, attnum"
        ):
            found.setdefault(table, []).append(column)
        return found

    def rows(self, table: str) -> list[str]:
        keys = self.execute(
            "select attname from pg_index join pg_attribute on attrelid = indrelid and attnum = any(indkey) "
            f"where indisprimary and indrelid = '{table}'::regclass"
        )
        names = [name for (name,) in keys]
        found = self.execute(f"select {', '.join(f'quote_literal({name}::text)' for name in names)} from {table}")
        return [" and ".join(f"{n} = {v}" for n, v in zip(names, row, strict=True)) for row in found]

    def other(self, table: str, column: str, where: str) -> str:
        [(kind, value)] = self.execute(f"select pg_typeof({column})::text, {column}::text from {table} where {where}")
        if kind in ("bigint", "integer", "smallint", "numeric", "double precision"):
            return "7" if value is None else f"{column} - 1"
        if kind == "boolean":
            return "true" if value is None else f"not {column}"
        if kind == "bytea":
            return f"'\\x07' || coalesce({column}, '')"
        if kind in ("json", "jsonb"):
            return "'[7]'"
        if kind.startswith(("timestamp", "date")):
            return "'2020-01-01'" if value is None else f"{column} + interval '1 day'"
        return "'7'" if value is None else other_text(column, value)


def other_text(column: str, value: str) -> str:
    """Text stays text and json stays json, so that only a hash can tell."""
    try:
        json.loads(value)
    except ValueError:
        return f"{column} || '7'"
    return "'[7]'" if value != "[7]" else "'[8]'"
