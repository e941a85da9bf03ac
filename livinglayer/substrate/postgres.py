"""PostgreSQL: the engine at scale, through psycopg.

Everything that only PostgreSQL needs is here: connections, column types, trigger functions, a login role for each
principal that reads, schemas of views for them, and the grammar a query must keep to.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

import psycopg
import psycopg.conninfo
import sqlglot
from psycopg import errors as pg
from psycopg.types.json import Jsonb
from psycopg.types.numeric import Int8Dumper
from psycopg.types.string import StrDumperUnknown
from sqlglot import exp

from ..errors import Conflict, Corrupt, Invalid, LayerError, LimitExceeded, NotFound, TimedOut, Unavailable
from ..settings import Settings
from .engine import LEDGER, SWEEP_SECONDS, Lease, Session, Stale
from .narrow import Narrow
from .reads import Answer, Source, as_dicts, clock, distinct
from .schema import MAIN, OWNER
from .values import INT_MAX, INT_MIN

if TYPE_CHECKING:
    from .ledger import Tx
    from .tables import Table

Swift = Callable[..., int]

SCHEMA = "livinglayer"
_COLUMN = {
    "int": "bigint", "ref": "bigint", "float": "double precision", "bool": "boolean", "decimal": "numeric", "date": "date",
    "datetime": "timestamptz", "json": f"{SCHEMA}.json_text", "blob": "bytea",
}  # fmt: skip
_KIND = {
    "bigint": "int", "double precision": "float", "boolean": "bool", "numeric": "decimal", "date": "date",
    "timestamp with time zone": "datetime", "bytea": "blob",
}  # fmt: skip
_ISO = '\'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\''
REPEATED = 10_000
LINES = 12  # connections kept for readers to come
NARROWED = 1000  # schemas of narrowed views
PREPARED = 200  # statements of one connection
INSERTED = 50  # rows sent as one statement
FILLED = 5000  # the same, of many


@contextmanager
def translated() -> Iterator[None]:
    """PostgreSQL's errors as ours."""
    try:
        yield
    except psycopg.Error as error:
        raise _ours(error) from None


def _ours(error: psycopg.Error) -> LayerError:
    text = str(error).strip().split("\n")[0]
    if isinstance(error, pg.LockNotAvailable | pg.DeadlockDetected):
        return Unavailable("another writer holds the layer", hint="try again; a long transaction may be open elsewhere")
    if isinstance(error, pg.ProgramLimitExceeded):
        return LimitExceeded(f"the database can't hold it: {text}")
    if isinstance(error, pg.DiskFull | pg.OutOfMemory):
        return Unavailable(f"the database server is out of room: {text}", hint="nothing was written")
    if isinstance(error, pg.QueryCanceled):
        return TimedOut("the query took too long", hint="ask for less, or give a longer timeout")
    if isinstance(error, pg.SerializationFailure):
        return Conflict("the layer changed meanwhile", hint="read again and decide anew")
    if isinstance(
        error, pg.UndefinedTable | pg.UndefinedColumn | pg.UndefinedFunction | pg.DatatypeMismatch | pg.SyntaxError
    ):
        return Corrupt(f"the database is not as the layer left it: {text}", hint="layer verify; restore a backup")
    if isinstance(error, pg.DataCorrupted | pg.IndexCorrupted):
        return Corrupt(f"the database says its files are damaged: {text}")
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or error.sqlstate in (
        "57P01",
        "57P02",
        "57P03",
    ):
        return Unavailable(f"the database can't be reached: {text}", hint="it is tried again with the next call")
    return Unavailable(f"the database refused: {text}")


CLOCK = f"select tx, next_id, epoch, to_char(at at time zone 'UTC', {_ISO}), hash from {SCHEMA}.ledger_clock where one = 1 for update"


@lru_cache(4096)
def numbered(sql: str) -> str:
    """? as $1, $2 …"""
    parts = sql.split("?")
    return "".join(f"{part}${place}" if place < len(parts) else part for place, part in enumerate(parts, start=1))


def connect(conninfo: str, **more: Any) -> psycopg.Connection[Any]:
    with translated():
        connection = psycopg.connect(
            conninfo, autocommit=True, cursor_factory=psycopg.RawCursor, connect_timeout=10, **more
        )
        connection.adapters.register_dumper(int, Int8Dumper)
        connection.adapters.register_dumper(str, StrDumperUnknown)
        connection.prepare_threshold = 2
        connection.execute("set timezone = 'UTC'")
    return connection


def _unnested(columns: Sequence[tuple[str, str]]) -> str:
    kinds = enumerate((kind.split(" collate")[0] for _, kind in columns), start=1)
    return f"unnest({', '.join(f'${place}::{kind}[]' for place, kind in kinds)})"


def _array(values: Sequence[Any]) -> str:
    """Values as the text of an array: psycopg's own takes many times as long."""
    if set(map(type, values)) == {int}:
        return "{" + ",".join(map(str, values)) + "}"
    return "{" + ",".join([_element(value) for value in values]) + "}"


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


class PostgresSession:
    """Statements on one connection, inside its transaction."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.ahead: dict[Any, Any] = {}  # rows asked for with the begin, not yet looked at
        self.clock: tuple[Any, ...] | None = None
        self._sql = ""
        self._rows: list[Sequence[Any]] = []  # inserts that wait to be sent as one statement

    def execute(self, sql: str, params: Sequence[Any] = ()) -> Any:
        if self._rows:
            self.flush()
        return self.connection.execute(sql, params)

    def all(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self.execute(numbered(sql), params).fetchall()

    def one(self, sql: str, params: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        if self.ahead and (cursor := self.ahead.pop((sql, tuple(params)), None)) is not None:
            return cursor.fetchone()
        return self.execute(numbered(sql), params).fetchone()

    def run(self, sql: str, params: Sequence[Any] = ()) -> None:
        if sql.startswith("insert into"):
            if sql != self._sql and self._rows:
                self.flush()
            self._sql = sql
            self._rows.append(params)
            if len(self._rows) >= INSERTED:
                self.flush()
            return
        self.execute(numbered(sql), params)

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        for row in rows:
            self.run(sql, row)

    def fill(self, table: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> None:
        names = ", ".join(name for name, _ in columns)
        for start in range(0, len(rows), FILLED):
            self.execute(
                f"insert into {table}({names}) select * from {_unnested(columns)}",
                [_array(column) for column in zip(*rows[start : start + FILLED], strict=True)],
            )

    def rewrite(self, table: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> None:
        named = [*columns, ("id", "bigint")]
        sets = ", ".join(f"{name} = v.{name}" for name, _ in columns)
        self.execute(
            f"update {table} t set {sets} from {_unnested(named)} v({', '.join(name for name, _ in named)}) where t.id = v.id",
            [_array(column) for column in zip(*rows, strict=True)],
        )

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        if len(rows) == INSERTED:
            head, tuples = self._sql.rsplit(" values ", 1)
            self.connection.execute(
                numbered(f"{head} values {', '.join([tuples] * INSERTED)}"), [v for row in rows for v in row]
            )
            return
        for row in rows:
            self.connection.execute(numbered(self._sql), row)

    def forget(self, store: str, number: int) -> None:
        """A row was written: what was asked for ahead is not so any more."""
        for key in [k for k in self.ahead if number in k[1] and f".{store} " in k[0]]:
            del self.ahead[key]

    def stream(self, sql: str, params: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        with psycopg.RawServerCursor(self.connection, f"s_{secrets.token_hex(6)}") as cursor:
            cursor.itersize = 2000
            cursor.execute(numbered(sql), params)
            yield from cursor


@dataclass
class Line:
    """A connection of a reader's role, with what was set and prepared on it; the role's next reader takes it over."""

    connection: psycopg.Connection[Any]
    settings: dict[str, str] = field(default_factory=dict)
    prepared: dict[Any, bytes] = field(default_factory=dict)

    def set(self, name: str, value: str) -> None:
        if self.settings.get(name) != value:
            self.connection.execute("select set_config($1, $2, false)", (name, value)).fetchone()
            self.settings[name] = value


class Stream(psycopg.RawCursor[Any]):
    """A cursor whose `stream` prepares a statement that comes again; psycopg's own plans it each time."""

    line: Line

    def _execute_send(self, query: Any, *, force_extended: bool = False, binary: bool | None = None) -> None:
        prepared, key = self.line.prepared, (query.query, query.types)
        name = prepared.get(key)
        if name == b"" and len(query.query) < 100_000:  # it ran once
            name = prepared[key] = f"s_{secrets.token_hex(8)}".encode()
            done = self._pgconn.prepare(name, query.query, query.types)
            if done.status != psycopg.pq.ExecStatus.COMMAND_OK:
                del prepared[key]
                name = None
        if name:
            self._query = query
            self._pgconn.send_query_prepared(name, query.params, query.formats, result_format=self.format)
            return
        if len(prepared) >= PREPARED:
            for old, known in [*prepared.items()][: PREPARED // 2]:
                del prepared[old]
                if known:
                    self._pgconn.exec_(b"deallocate " + known)
        prepared.setdefault(key, b"")
        super()._execute_send(query, force_extended=force_extended, binary=binary)


class PostgresEngine:
    """A layer in a database, in a schema of its own."""

    dialect: Literal["postgres"] = "postgres"
    schema_prefix = f"{SCHEMA}."
    index_prefix = f"{SCHEMA}."
    null_tx = "null::bigint"
    reads_ahead = True
    barrier = ""  # views are made with security_barrier instead

    def __init__(self, url: str, settings: Settings) -> None:
        self.settings, self._url = settings, url
        try:
            known = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            raise Invalid(f"the database URL can't be read: {error}") from None
        self.location = f"postgresql://{known.get('host', '')}:{known.get('port', 5432)}/{known.get('dbname', '')}"
        self._writer: psycopg.Connection[Any] | None = None
        self._pipeline: Any = None
        self._pool: list[psycopg.Connection[Any]] = []
        self._thread = threading.local()  # the snapshot its thread holds
        self._lock = threading.Lock()
        self._roles: dict[int, tuple[str, str]] = {}
        self._lines: OrderedDict[str, list[Line]] = OrderedDict()  # idle ones by role
        self._views: set[tuple[str, str]] = set()
        self._narrowed: OrderedDict[str, None] = OrderedDict()
        self._swept = -1
        self._swift: dict[Any, str] = {}
        self._short: str | None = None
        self._leasing: psycopg.Connection[Any] | None = None
        self._lease_lock = threading.Lock()
        self._leases_swept = time.monotonic()

    # Connections

    @property
    def address(self) -> str:
        """What opens it again, a password included: not for people's eyes."""
        return self._url

    def exists(self) -> bool:
        with self._borrowed() as connection:
            return connection.execute("select to_regnamespace($1) is not null", (SCHEMA,)).fetchone() == (True,)

    def has_table(self, session: Session, name: str) -> bool:
        return session.one("select to_regclass(?) is not null", (f"{SCHEMA}.{name}",)) == (True,)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Keep others from making the same layer at the same time."""
        with self._borrowed() as connection:
            connection.execute("select pg_advisory_lock(hashtext($1))", (SCHEMA,))
            try:
                yield
            finally:
                connection.execute("select pg_advisory_unlock(hashtext($1))", (SCHEMA,))

    def create(self) -> bool:
        with self.starting(), self._borrowed() as connection:
            if connection.execute("select to_regnamespace($1) is not null", (SCHEMA,)).fetchone() == (True,):
                return False
            with connection.transaction():
                connection.execute(f"create schema {SCHEMA}")
                connection.execute(f'create domain {SCHEMA}.json_text as text collate "C"')
        return True

    @contextmanager
    def _borrowed(self, begin: str = "select 1") -> Iterator[psycopg.Connection[Any]]:
        """A connection of the owner's, from the pool; its first statement tells whether it is still alive."""
        with self._lock:
            connection = self._pool.pop() if self._pool else None
        if connection is not None:
            try:
                connection.execute(begin)
            except psycopg.Error:
                connection.close()
                connection = None
        if connection is None:
            connection = connect(self._url)
            with translated():
                connection.execute(begin)
        try:
            with translated():
                yield connection
        finally:
            if (
                connection.closed
                or connection.broken
                or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
            ):
                connection.close()
            else:
                with self._lock:
                    self._pool.append(connection)

    def begin(self, reads: Sequence[tuple[str, tuple[Any, ...]]] = (), new: bool = False) -> Session:
        """Start the write transaction, lock the clock and ask for rows that will be needed: one round trip."""
        for attempt in (1, 2):
            if self._writer is None or self._writer.closed or self._writer.broken:
                self._writer = connect(self._url)
                with translated():
                    self._writer.execute(f"set lock_timeout = {int(self.settings.busy_seconds * 1000)}")
                    self._writer.execute("set idle_in_transaction_session_timeout = '300s'")
                    self._writer.execute("set synchronous_commit = on")
            try:
                self._pipeline = self._writer.pipeline()
                self._pipeline.__enter__()
                self._writer.execute("begin")
                session = PostgresSession(self._writer)
                clock = self._writer.execute("select 1" if new else CLOCK)
                session.ahead = {(sql, params): self._writer.execute(numbered(sql), params) for sql, params in reads}
                # A connection that died while idle is found out here, before anything is lost.
                session.clock = clock.fetchone()
                return session
            except psycopg.Error as error:
                self._drop_writer()
                if attempt == 2:
                    raise _ours(error) from None
        raise AssertionError

    def _leave(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.__exit__(None, None, None)

    def _drop_writer(self) -> None:
        with suppress(Exception):
            self._leave()
        self._pipeline = None
        if self._writer is not None:
            with suppress(Exception):
                self._writer.close()
        self._writer = None

    def commit(self, session: Session) -> None:
        assert self._writer is not None
        try:
            if isinstance(session, PostgresSession) and session._rows:
                session.flush()
            self._writer.execute("commit")
            self._leave()
            if self._writer.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                raise psycopg.OperationalError("the commit did not go through")
        except psycopg.Error as error:
            self._drop_writer()
            raise _ours(error) from None

    def rollback(self) -> None:
        if self._writer is None:
            return
        try:
            with suppress(psycopg.Error):
                self._leave()
            self._writer.execute("rollback")
        except psycopg.Error:
            self._drop_writer()

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        with self.reading() as session:
            self._thread.session = session
            try:
                yield session
            finally:
                self._thread.session = None

    @contextmanager
    def reading(self) -> Iterator[Session]:
        held: Session | None = getattr(self._thread, "session", None)
        if held is not None:
            yield held
            return
        with self._borrowed("begin isolation level repeatable read read only") as connection:
            try:
                yield PostgresSession(connection)
            finally:
                if not connection.closed:
                    with suppress(psycopg.Error):
                        connection.execute("commit")  # after a rollback psycopg prepares its statements anew

    def translating(self) -> Any:
        return translated()

    def close(self) -> None:
        self._drop_writer()
        with self._lock:
            pool = [*self._pool, *(line.connection for idle in self._lines.values() for line in idle)]
            self._pool = []
            self._lines.clear()
        for connection in pool:
            connection.close()
        with self._lease_lock:
            if self._leasing is not None:
                self._leasing.close()
            self._leasing = None

    # Types and tables

    def column(self, kind: str) -> str:
        return _COLUMN.get(kind, 'text collate "C"')

    def collate(self, kind: str) -> str:
        return ""

    def portable(self, expression: str, kind: str) -> str:
        if kind == "datetime":
            return f"to_char({expression} at time zone 'UTC', {_ISO})"
        if kind == "date":
            return f"to_char({expression}, 'YYYY-MM-DD')"
        return (
            f"{expression}::text"
            if kind in ("decimal", "json")
            else f"{expression}::int"
            if kind == "bool"
            else expression
        )

    def native(self, kind: str, stored: Any) -> Any:
        return bool(stored) if kind == "bool" and stored is not None else stored

    def shown(self, expression: str, kind: str) -> str:
        return f"{expression}::text::jsonb" if kind == "json" else expression

    def hex(self, expression: str) -> str:
        return f"encode({expression}, 'hex')"

    def converted(self, expression: str, old: str, new: str) -> str:
        e = f"({expression})"
        turned = {
            ("int", "float"): f"{e}::double precision",
            ("int", "decimal"): f"{e}::numeric",
            ("int", "text"): f"{e}::text",
            ("bool", "int"): f"{e}::bigint",
            ("bool", "text"): f"case {e} when 1 then 'true' when 0 then 'false' end",
            ("date", "datetime"): f"({e} || 'T00:00:00Z')::timestamptz",
            ("datetime", "date"): f"left({e}, 10)::date",
            ("text", "int"): f"case when {e} ~ '^-{{0,1}}[0-9]{{1,18}}$' then {e}::bigint end",
            (
                "text",
                "decimal",
            ): f"case when {e} ~ '^-{{0,1}}[0-9]{{1,255}}(\\.[0-9]{{1,255}}){{0,1}}$' then {e}::numeric end",
        }
        return turned.get((old, new), expression)

    def ledger_tables(self) -> list[str]:
        made = []
        for name, (columns, key, indexes) in LEDGER.items():
            listed = ", ".join(f"{column} {self.column(kind)}" for column, kind in columns)
            made.append(f"create table {SCHEMA}.{name}({listed}, primary key({', '.join(key)}))")
            made += [f"create index {name}_{'_'.join(on)} on {SCHEMA}.{name}({', '.join(on)})" for on in indexes]
        made.append(
            f"create index ledger_change_system on {SCHEMA}.ledger_change(branch, entity, tx) where entity < 2000"
        )
        made.append(f"create table {SCHEMA}.blob(digest text primary key, data bytea not null)")
        return made

    def tables(self, store: str, columns: Sequence[tuple[str, str]]) -> list[str]:
        listed = "".join(f", {name} {self.column(kind)}" for name, kind in columns)
        return [
            f"create table {SCHEMA}.{store}(id bigint primary key, _tx bigint not null{listed}) with (fillfactor = 90)",
            f"create table {SCHEMA}.{store}__h(id bigint not null, tx_from bigint not null, tx_to bigint not null{listed}, primary key(tx_to, id))",
            f"create index {store}__h_id on {SCHEMA}.{store}__h(id)",
            f"create table {SCHEMA}.{store}__d(branch bigint not null, id bigint not null, tx_from bigint not null, tx_to bigint not null, del int not null{listed}, primary key(branch, id, tx_from))",
            *self.triggers(store, [name for name, _ in columns]),
        ]

    def triggers(self, store: str, columns: Sequence[str]) -> list[str]:
        names, old = "".join(f", {c}" for c in columns), "".join(f", old.{c}" for c in columns)
        into = f"insert into {SCHEMA}.{store}__h(id, tx_from, tx_to{names})"
        return [
            f"drop trigger if exists {store}__u on {SCHEMA}.{store}",
            f"drop trigger if exists {store}__x on {SCHEMA}.{store}",
            f"drop function if exists {SCHEMA}.{store}__u()",
            f"drop function if exists {SCHEMA}.{store}__x()",
            f"create function {SCHEMA}.{store}__u() returns trigger language plpgsql as $$ begin"
            f" if new._tx < old._tx then raise exception 'a version can not be older than the one it replaces'; end if;"
            f" {into} values (old.id, old._tx, new._tx{old}); return new; end $$",
            f"create function {SCHEMA}.{store}__x() returns trigger language plpgsql as $$ begin"
            f" {into} select old.id, old._tx, c.tx{old} from {SCHEMA}.ledger_clock c where c.tx > old._tx; return old; end $$",
            f"create trigger {store}__u before update on {SCHEMA}.{store} for each row when (new._tx <> old._tx) execute function {SCHEMA}.{store}__u()",
            f"create trigger {store}__x before delete on {SCHEMA}.{store} for each row execute function {SCHEMA}.{store}__x()",
        ]

    def columns(self, session: Session, table: str) -> list[tuple[str, str]]:
        rows = session.all(
            "select column_name, data_type, domain_name from information_schema.columns where table_schema = ? and table_name = ? order by ordinal_position",
            (SCHEMA, table),
        )
        return [(name, "json" if domain == "json_text" else _KIND.get(kind, "text")) for name, kind, domain in rows]

    def statements(self, session: Session) -> dict[str, str]:
        """What there is by name; of trigger functions also what they do."""
        found = {
            name: ""
            for (name,) in session.all("select relname from pg_class where relnamespace = ?::regnamespace", (SCHEMA,))
        }
        found |= {
            name: ""
            for (name,) in session.all(
                "select tgname from pg_trigger t join pg_class c on c.oid = t.tgrelid where c.relnamespace = ?::regnamespace and tgenabled = 'O'",
                (SCHEMA,),
            )
        }
        functions = session.all("select proname, prosrc from pg_proc where pronamespace = ?::regnamespace", (SCHEMA,))
        triggers = {name for name in found if name.endswith(("__u", "__x"))}
        return found | {name: source for name, source in functions if name in triggers}

    def same_statement(self, there: str, wanted: str) -> bool:
        return not there or wanted.startswith("create trigger") or there.strip() in wanted

    def structure(self, there: Mapping[str, str], store: str, columns: Sequence[tuple[str, str]]) -> Iterator[str]:
        """What is wrong with how an entity's tables are made."""
        for suffix in ("", "__h", "__d"):
            if store + suffix not in there:
                yield f"table {store}{suffix} is missing"

    def strays(self, session: Session, known: set[str], stores: Sequence[str]) -> Iterator[str]:
        """The catalogue is PostgreSQL's own to keep."""
        return iter(())

    # Leases: one statement each, on a connection of their own, outside of any transaction

    def _lease(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._lease_lock:
            for attempt in (1, 2):
                try:
                    if self._leasing is None or self._leasing.closed or self._leasing.broken:
                        self._leasing = connect(self._url)
                        self._leasing.execute(f"set lock_timeout = {int(self.settings.busy_seconds * 1000)}")
                        self._leasing.execute("set synchronous_commit = off")  # leases may be lost; the ledger decides
                    return self._leasing.execute(sql, params).fetchall()
                except psycopg.Error as error:
                    lost = self._leasing is None or self._leasing.closed or self._leasing.broken
                    if attempt == 2 or not lost:  # a connection that died while idle is made anew
                        raise _ours(error) from None
        raise AssertionError

    def lease(self, name: str, holder: str, seconds: float, value: str | None = None) -> bool:
        return bool(
            self._lease(
                f"insert into {SCHEMA}.ledger_lease as l(name, holder, until, value) values ($1, $2, clock_timestamp() + make_interval(secs => $3), $4)"
                " on conflict (name) do update set holder = excluded.holder, until = clock_timestamp() + make_interval(secs => $3),"
                " value = case when l.holder = excluded.holder then coalesce(excluded.value, l.value) else excluded.value end"
                " where l.holder = excluded.holder or l.until <= clock_timestamp() returning 1",
                (name, holder, float(seconds), value),
            )
        )

    def release(self, name: str, holder: str) -> None:
        self._lease(f"delete from {SCHEMA}.ledger_lease where name = $1 and holder = $2 returning 1", (name, holder))

    def leases(self, prefix: str = "") -> list[Lease]:
        rows = self._lease(
            f"select name, holder, until, value from {SCHEMA}.ledger_lease where starts_with(name, $1) and until > clock_timestamp() order by name",
            (prefix,),
        )
        return [(name, holder, until, value) for name, holder, until, value in rows]

    def claim(self, names: Sequence[str], holder: str, seconds: float) -> list[str]:
        if time.monotonic() - self._leases_swept > SWEEP_SECONDS:
            self._leases_swept = time.monotonic()
            self._lease(
                f"delete from {SCHEMA}.ledger_lease where until < clock_timestamp() - interval '1 day' returning 1", ()
            )
        # Rows that are there are never waited for; new ones are made in the order of their names, so no two claims wait for each other.
        got = {
            name
            for (name,) in self._lease(
                f"with free as (select name from {SCHEMA}.ledger_lease where name = any($1::text[]) and until <= clock_timestamp() for update skip locked),"
                f" taken as (update {SCHEMA}.ledger_lease l set holder = $2, until = clock_timestamp() + make_interval(secs => $3), value = null"
                " from free where l.name = free.name returning l.name),"
                f" made as (insert into {SCHEMA}.ledger_lease(name, holder, until) select n, $2, clock_timestamp() + make_interval(secs => $3)"
                " from unnest($1::text[]) n order by n on conflict (name) do nothing returning name)"
                " select name from taken union all select name from made",
                (sorted(set(names)), holder, float(seconds)),
            )
        }
        return [name for name in dict.fromkeys(names) if name in got]

    # Blobs

    def put_blob(self, digest: str, data: bytes) -> None:
        with self._borrowed() as connection:
            connection.execute(f"insert into {SCHEMA}.blob values ($1, $2) on conflict do nothing", (digest, data))

    def get_blob(self, digest: str) -> bytes | None:
        with self._borrowed() as connection:
            row = connection.execute(f"select data from {SCHEMA}.blob where digest = $1", (digest,)).fetchone()
        return None if row is None else bytes(row[0])

    def has_blob(self, digest: str) -> bool:
        with self._borrowed() as connection:
            found = connection.execute(f"select 1 from {SCHEMA}.blob where digest = $1", (digest,)).fetchone()
        return found is not None

    def check(self) -> list[str]:
        return []

    # The most frequent write, an update of one row that nothing else depends on, in one round trip

    def swift(self, epoch: int, table: Table, changed: Sequence[tuple[str, str]]) -> Swift:
        """A function of the database that updates these columns, hashes and records the tx, as `ledger.Tx` would."""
        key = (epoch, table.store, tuple(changed))
        found = self._swift.get(key)
        if found is None:
            if any(k[0] != epoch for k in self._swift):
                self._swift.clear()
            name = f"{SCHEMA}.{table.store}__s{epoch}_{'_'.join(column.rsplit('_', 1)[1] for column, _ in changed)}"
            with self._borrowed() as connection, connection.transaction():
                connection.execute("select pg_advisory_xact_lock(hashtext($1))", (name,))
                if connection.execute("select to_regproc($1)", (name,)).fetchone() == (None,):
                    self._drop_swift(connection, table.store, epoch)
                    connection.execute(_swift_function(name, self, table, changed))
            arguments = ", ".join(f"${n}" for n in range(1, 10 + len(changed)))
            found = self._swift[key] = f"select {name}({arguments})"

        def run(*given: Any) -> int:
            if self._writer is None or self._writer.closed or self._writer.broken:
                return 0  # the ordinary way connects
            try:
                row = self._writer.execute(found, given).fetchone()
            except psycopg.Error as error:
                if self._writer.closed or self._writer.broken:
                    self._drop_writer()
                raise _ours(error) from None
            return int(row[0]) if row else 0

        return run

    def _drop_swift(self, connection: psycopg.Connection[Any], store: str, epoch: int) -> None:
        rows = connection.execute(
            "select oid::regprocedure::text, proname from pg_proc where pronamespace = $1::regnamespace and starts_with(proname, $2)",
            (SCHEMA, f"{store}__s"),
        ).fetchall()
        for signature, name in rows:
            if not name.startswith(f"{store}__s{epoch}_"):
                connection.execute(f"drop function {signature}")

    # Readers

    def short(self) -> str:
        """A prefix of this layer in this database: roles are shared by all databases of a server."""
        if self._short is None:
            with self._borrowed() as connection:
                row = connection.execute(
                    f"select value || current_database() from {SCHEMA}.meta where key = 'layer'"
                ).fetchone()
            assert row is not None
            self._short = f"ll_{sha256(row[0].encode()).hexdigest()[:12]}"
        return self._short

    def role(self, principal: int) -> tuple[str, str]:
        """The login role a principal's queries run as, and its password; it may use its own views and nothing else."""
        found = self._roles.get(principal)
        if found is not None:
            return found
        name = f"{self.short()}_{principal}"
        with self._borrowed() as connection, connection.transaction():
            connection.execute("select pg_advisory_xact_lock(hashtext($1))", (name,))
            connection.execute(
                f"insert into {SCHEMA}.meta values ('reader_key', $1) on conflict do nothing", (secrets.token_hex(32),)
            )
            key = connection.execute(f"select value from {SCHEMA}.meta where key = 'reader_key'").fetchone()
            assert key is not None
            password = sha256(f"{key[0]}:{name}".encode()).hexdigest()
            if connection.execute("select 1 from pg_roles where rolname = $1", (name,)).fetchone() is not None:
                # It may be left from a database of the same name that is gone, with another key.
                connection.execute(f"alter role {name} password '{password}'")
                self._roles[principal] = (name, password)
                return name, password
            try:
                connection.execute(
                    f"create role {name} login nosuperuser nocreatedb nocreaterole noinherit connection limit 64 password '{password}'"
                )
                for setting in (
                    "default_transaction_read_only = on",
                    "work_mem = '16MB'",
                    "plan_cache_mode = force_generic_plan",
                    "jit = off",
                    "max_parallel_workers_per_gather = 0",
                ):
                    connection.execute(f"alter role {name} set {setting}")
            except pg.InsufficientPrivilege:
                raise Unavailable(
                    "this database user can't make roles for readers", hint="grant it CREATEROLE"
                ) from None
            with suppress(pg.InsufficientPrivilege), connection.transaction():  # only a superuser may
                connection.execute(f"alter role {name} set temp_file_limit = '1GB'")
        self._roles[principal] = (name, password)
        return name, password

    def reader(self, source: Source) -> Reader:
        name, password = self.role(source.policy.principal)
        while (line := self._line(name)) is not None:
            with suppress(psycopg.Error):
                line.connection.execute("select 1")
                return Reader(self, line, source, name)
            line.connection.close()
        connection = connect(psycopg.conninfo.make_conninfo(self._url, user=name, password=password))
        return Reader(self, Line(connection), source, name)

    def _line(self, role: str) -> Line | None:
        with self._lock:
            idle = self._lines.get(role)
            if not idle:
                return None
            line = idle.pop()
            if not idle:
                del self._lines[role]
            return line

    def keep(self, role: str, line: Line) -> None:
        """A closed reader's line for the next reader of its role."""
        connection, dropped = line.connection, []
        if (
            connection.closed
            or connection.broken
            or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
        ):
            connection.close()
            return
        with self._lock:
            self._lines.setdefault(role, []).append(line)
            self._lines.move_to_end(role)
            while sum(map(len, self._lines.values())) > LINES:
                oldest = next(iter(self._lines))
                dropped.append(self._lines[oldest].pop(0))
                if not self._lines[oldest]:
                    del self._lines[oldest]
        for each in dropped:
            each.connection.close()

    def inside(
        self, tx: Tx, sql: str, params: Any, deadline: float, limit: int, narrow: Narrow | None = None, branch: str | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """A guarded query within the write transaction, which sees what it has written."""
        assert self._writer is not None
        found = tx.work.catalog.branch(tx.session, branch or tx.name)
        source = Source(tx.work.catalog, tx.session, found, None, tx.policy, tx.work.version, narrow)
        name, _ = self.role(tx.policy.principal)
        return Reader(self, Line(self._writer), source, name).inside(sql, params, deadline, limit)

    def view_schema(self, connection: psycopg.Connection[Any], name: str, role: str, epoch: Any) -> None:
        """Make a schema for views; those of past epochs are swept away."""
        if type(epoch) is int and self._swept != epoch:
            self._swept = epoch
            self._views.clear()
            self._narrowed.clear()
            self._sweep(epoch)
        connection.execute(f"create schema if not exists {name}")
        connection.execute(f"grant usage on schema {name} to {role}")

    def narrowed(self, schema: str) -> None:
        """Of the schemas of narrowed views this handle made, only the last ones stay; who needs one makes it again."""
        with self._lock:
            self._narrowed[schema] = None
            self._narrowed.move_to_end(schema)
            old = self._narrowed.popitem(last=False)[0] if len(self._narrowed) > NARROWED else None
            if old is not None:
                self._views = {view for view in self._views if view[0] != old}
        if old is not None:
            with suppress(LayerError), self._borrowed() as connection:
                with suppress(psycopg.Error):
                    connection.execute("set lock_timeout = '50ms'")
                    connection.execute(f"drop schema if exists {old} cascade")
                connection.execute("set lock_timeout = 0")

    def _sweep(self, epoch: int) -> None:
        with suppress(LayerError), self._borrowed() as connection:
            prefix = f"{self.short()}_v"
            for (name,) in connection.execute(
                "select nspname from pg_namespace where starts_with(nspname, $1)", (prefix,)
            ).fetchall():
                parts = name.removeprefix(prefix).split("_")
                if parts[0].isdigit() and int(parts[0]) < epoch:
                    with suppress(psycopg.Error):
                        connection.execute("set lock_timeout = '50ms'")
                        connection.execute(f"drop schema {name} cascade")
            connection.execute("set lock_timeout = 0")


def _canonical(column: str, kind: str, engine: PostgresEngine) -> str:
    """A column's text in an image: `values.canonical`, in SQL."""
    if kind == "float":
        return f"encode(float8send({column}), 'hex')"
    return f"({engine.portable(column, kind)})::text"


def _swift_function(name: str, engine: PostgresEngine, table: Table, changed: Sequence[tuple[str, str]]) -> str:
    """0: it must go the ordinary way (the epoch, the execution or the row is not as thought); else the tx."""
    image = " || ".join(
        f"coalesce('{prefix}' || octet_length({text}) || ':' || {text}, '')"
        for prefix, (column, kind) in zip(table.prefixes, table.columns, strict=True)
        for text in (_canonical(f"x.{column}", kind, engine),)
    )
    parameters = "".join(f", p_{column} {engine.column(kind).split(' collate')[0]}" for column, kind in changed)
    sets = ", ".join(f"{column} = p_{column}" for column, _ in changed)

    def lengthed(text: str) -> str:
        return f"octet_length({text}) || ':' || {text} || ';'"

    own = " || ".join(map(lengthed, ("st", f"'{MAIN}'", "sa", "p_principal::text", "p_execution::text")))
    said = " || ".join(f"coalesce({lengthed(text)}, '-;')" for text in ("p_cause", "p_reason"))
    change = " || ".join(map(lengthed, ("p_entity::text", "p_id::text", "'u'", "si")))
    seal = " || ".join(map(lengthed, ("st", "k.next_id::text", "k.epoch::text", "sa", "sh")))
    return f"""create function {name}(p_epoch bigint, p_entity bigint, p_execution bigint, p_principal bigint, p_at timestamptz, p_cause text, p_reason text, p_id bigint, p_expect bigint{parameters})
returns bigint language plpgsql as $$
declare k {SCHEMA}.ledger_clock%rowtype; t bigint; a timestamptz; image bytea; h bytea; st text; sa text; si text; sh text;
begin
  select * into k from {SCHEMA}.ledger_clock where one = 1 for update;
  if k.epoch <> p_epoch or exists (select 1 from {SCHEMA}.ledger_outcome where execution = p_execution) then return 0; end if;
  t := k.tx + 1; a := greatest(p_at, k.at); st := t::text; sa := to_char(a at time zone 'UTC', {_ISO});
  update {SCHEMA}.{table.store} x set {sets}, _tx = t where x.id = p_id and (p_expect is null or x._tx = p_expect)
    returning substring(sha256(convert_to({image}, 'UTF8')) from 1 for 16) into image;
  if not found then return 0; end if;
  si := encode(image, 'hex');
  h := sha256(k.hash || convert_to({own} || {said} || '-;-;' || {change}, 'UTF8')); sh := encode(h, 'hex');
  insert into {SCHEMA}.ledger_tx values (t, {MAIN}, a, p_principal, p_execution, p_cause, p_reason, null, h);
  insert into {SCHEMA}.ledger_change values ({MAIN}, t, p_entity, p_id, 'u', image);
  update {SCHEMA}.ledger_clock set tx = t, at = a, hash = h, seal = substring(sha256(convert_to({seal}, 'UTF8')) from 1 for 8) where one = 1;
  return t;
end $$"""


# The grammar of a query. What is executed is written from the tree that was checked, not the text that was given.

_NODES = frozenset(
    """Add Alias Aliases All And Any AtTimeZone Between BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BitwiseLeftShift BitwiseRightShift
    Boolean Bracket CTE Column ColumnDef Cube DPipe DataType DataTypeParam Distinct Div EQ Except Fetch Filter From GT GTE Group GroupingSets Having
    ILike Identifier In Intersect Interval Is Join JSONPath JSONPathKey JSONPathRoot JSONPathSubscript Lateral LT LTE Like Limit LimitOptions Literal
    Mod Mul NEQ Neg Not Null NullSafeEQ NullSafeNEQ Offset Or Order Ordered Paren Placeholder Rollup Select SimilarTo Slice Star Sub
    Subquery Table TableAlias Tuple Union Values Var Where Window WindowSpec With WithinGroup Escape IntDiv
    Abs Array ArrayAgg ArrayContainsAll ArrayContainedBy ArraySize Ascii Avg Case Cast Ceil Chr Coalesce Collate Concat ConcatWs Cos Count CountIf CumeDist
    CurrentDate CurrentTimestamp CurrentTime DateTrunc DenseRank Exists Exp ExplodingGenerateSeries GenerateSeries Extract FirstValue Floor Greatest GroupConcat
    Grouping If Initcap JSONArrayAgg JSONBContains JSONBContainsTopKey JSONBContainsAnyTopKeys JSONBContainsAllTopKeys JSONBExtract JSONBExtractScalar JSONExtract JSONExtractScalar
    JSONObjectAgg JSONBObjectAgg Lag LastValue Lead Least Left Length Ln Localtimestamp Log LogicalAnd LogicalOr Lower MD5 Max Min Mode NthValue Ntile
    Nullif Overlay Pad PercentRank PercentileCont PercentileDisc Pi Pow Rand Rank RegexpLike RegexpILike RegexpReplace Repeat Replace Reverse Right Round
    RowNumber Sign Sin Tan SplitPart Sqrt StartsWith Stddev StddevPop StddevSamp StrPosition StrToDate StrToTime Substring Sum TimeToStr TimestampTrunc
    Translate Trim Trunc UnixToTime Unnest Upper Variance VariancePop WidthBucket Xor Anonymous Extract Sqrt Cbrt Degrees Radians Explode TsOrDsToDate""".split()
)
_FUNCTIONS = frozenset(
    """age json_build_array json_build_object jsonb_agg jsonb_array_elements jsonb_array_elements_text jsonb_array_length jsonb_build_array
    jsonb_build_object jsonb_each jsonb_each_text jsonb_extract_path jsonb_extract_path_text jsonb_object_keys jsonb_typeof json_typeof jsonb_object_agg
    make_date regexp_match regexp_matches regexp_split_to_array row to_json to_jsonb btrim char_length character_length octet_length jsonb_strip_nulls
    jsonb_pretty array_length cardinality scale trim_scale div log10 gcd lcm num_nulls num_nonnulls every date_part isfinite now ceiling quote_literal""".split()
)
_TYPES = frozenset(
    """BOOLEAN TINYINT SMALLINT INT BIGINT FLOAT DOUBLE DECIMAL TEXT VARCHAR CHAR DATE TIME TIMESTAMP TIMESTAMPTZ TIMETZ INTERVAL JSON JSONB UUID ARRAY""".split()
)


@lru_cache(1024)
def checked(sql: str) -> tuple[str, tuple[str, ...], frozenset[str], frozenset[str]]:
    """The statement to run, its parameters' names in order, the relations it names, and those it makes itself."""
    refused = Invalid("the query can't be read", hint="one SELECT over entity names")
    if len(sql) > 100_000:
        raise LimitExceeded("a query has at most 100000 characters")
    try:
        trees = [t for t in sqlglot.parse(sql, read="postgres") if t is not None]
    except (sqlglot.errors.SqlglotError, RecursionError, ValueError, AttributeError, TypeError) as error:
        detail = re.sub(r"\x1b\[[0-9;]*m", "", str(error).split("\n")[0])[:200]
        raise Invalid(f"the query can't be read: {detail}", hint="one SELECT over entity names") from None
    if len(trees) != 1:
        if not trees:
            raise refused
        writes = any(isinstance(t, exp.DML | exp.DDL | exp.Command) for t in trees)
        raise Invalid("a query is one statement", hint="send the second one on its own", writes=writes)
    tree = trees[0]
    if not isinstance(tree, exp.Select | exp.SetOperation | exp.Values | exp.Subquery):
        raise Invalid(
            "a query can't change anything" if isinstance(tree, exp.DML | exp.DDL) else "a query is a SELECT",
            hint="write with insert, update and delete",
            writes=isinstance(tree, exp.DML | exp.DDL),
        )
    names: list[str] = []
    entities: set[str] = set()
    try:
        nodes = list(tree.walk())
    except RecursionError:
        raise Invalid("the query is nested too deeply") from None
    for node in nodes:
        kind = type(node).__name__
        if kind not in _NODES:
            if isinstance(node, exp.DML | exp.DDL | exp.Into | exp.Lock):
                raise Invalid("a query can't change anything", hint="write with insert, update and delete", writes=True)
            raise Invalid(f"{kind.lower()} is not part of a query's language")
        if isinstance(node, exp.Anonymous) and (not isinstance(node.this, str) or node.this.lower() not in _FUNCTIONS):
            raise NotFound(f"there is no function {str(node.this)!r}")
        if isinstance(node, exp.Repeat | exp.Pad):  # PostgreSQL fills a gigabyte without looking at the clock
            count = node.args.get("times") or node.args.get("expression")
            if (
                not isinstance(count, exp.Literal)
                or count.is_string
                or not count.this.isdigit()
                or int(count.this) > REPEATED
            ):
                raise Invalid(f"{kind.lower()} takes a plain number up to {REPEATED}")
        if isinstance(node, exp.Func) and isinstance(node.parent, exp.Dot):
            raise NotFound("functions have no schema here")
        if (
            isinstance(node, exp.DataType)
            and (node.this.name if hasattr(node.this, "name") else str(node.this)) not in _TYPES
        ):
            raise NotFound(f"there is no type {node.sql(dialect='postgres')!r}")
        if isinstance(node, exp.Table):
            if node.args.get("db") or node.args.get("catalog"):
                raise NotFound("entities have no schema", hint="query them by their names")
            if isinstance(node.this, exp.Identifier):
                entities.add(node.name if node.this.quoted else node.name.lower())
        if isinstance(node, exp.Placeholder):
            label = node.this if isinstance(node.this, str) else None
            if not label:
                raise Invalid("parameters are named, as in :name")
            if label not in names:
                names.append(label)
        if isinstance(node, exp.Identifier) and not node.quoted:
            node.set("this", node.this.lower())
            node.set("quoted", True)
    for node in nodes:
        if isinstance(node, exp.Placeholder):
            node.replace(exp.Var(this=f"${names.index(node.this) + 1}"))
    shadows = {cte.alias for cte in tree.find_all(exp.CTE)}
    if any(name.startswith(("pg_", "_")) for name in shadows):
        raise Invalid(
            "a name of a query can't begin with pg_"
        )  # where it does not reach, PostgreSQL's own would be read
    try:
        text = tree.sql(dialect="postgres", comments=False)
    except RecursionError:
        raise Invalid("the query is nested too deeply") from None
    return text, tuple(names), frozenset(entities), frozenset(shadows)


class Reader:
    """A connection of a role that may use the views of one branch, moment and policy, and nothing else."""

    def __init__(self, engine: PostgresEngine, line: Line, source: Source, role: str) -> None:
        self.engine, self.line, self.source, self.role = engine, line, source, role
        self.connection = line.connection
        past = source.as_of is not None
        # Which tx is read is a setting of the session, so that every moment shares its views; only data moves with it.
        moment = "(select current_setting('livinglayer.as_of')::bigint)" if past else None
        if past:
            first = source.chain[0]
            source.chain = (type(first)(first.branch, moment), *source.chain[1:])
        schema_key = [(f.store, f.name, f.type, repr(f.was)) for e in source.schema.entities for f in e.fields]
        digest = sha256(
            repr((source.chain, source.policy.key, source.branch.id, schema_key, source.slices, source.narrow)).encode()
        ).hexdigest()[:32]  # whoever writes what is narrowed to could look for two of one digest
        self.draft = type(source.epoch) is not int
        self.schema = f"{engine.short()}_v{secrets.token_hex(6) if self.draft else source.epoch}_{digest}"

    def close(self) -> None:
        self.engine.keep(self.role, self.line)

    def interrupt(self) -> None:
        """End what it is doing, from another thread."""
        with suppress(psycopg.Error):
            self.connection.cancel_safe(timeout=5)

    def raw_connection(self) -> psycopg.Connection[Any]:
        """The connection with every name bound."""
        for entity in self.source.schema.entities:
            self.bind(entity.name)
        self.line.set("search_path", self.schema)
        if self.source.as_of is not None:
            self.line.set("livinglayer.as_of", str(self.source.as_of))
        return self.connection

    def bind(self, name: str, again: bool = False, using: psycopg.Connection[Any] | None = None) -> bool:
        """Make a public name; False when there is none (for this principal)."""
        if (self.schema, name) in self.engine._views and not again:
            return True
        if not self.source.visible(name):
            return False
        made: set[str] = set()

        def make(connection: psycopg.Connection[Any]) -> bool:
            def relation(entity: str) -> str:
                inner = f"{self.schema}._b_{entity}"
                if inner not in made:
                    build(inner, f"create view {inner} as {self.source.base(entity)}")
                    made.add(inner)
                return inner

            def seen(entity: str) -> str:
                sql = self.source.seen(entity, relation)
                if sql is None:
                    return relation(entity)
                inner = f"{self.schema}._p_{entity}"
                if inner not in made:
                    build(inner, f"create view {inner} with (security_barrier) as {sql}")
                    made.add(inner)
                return inner

            def build(name: str, sql: str) -> None:  # replacing a view would lock out those who read it
                if connection.execute("select to_regclass($1)", (name,)).fetchone() == (None,):
                    connection.execute(sql)

            self.engine.view_schema(connection, self.schema, self.role, self.source.epoch)
            moment = f"{self.schema}._clock"
            build(
                moment,
                f"create view {moment} as select epoch || ' ' || tx as now from {SCHEMA}.ledger_clock where one = 1",
            )
            connection.execute(f"grant select on {moment} to {self.role}")
            sql = self.source.governed(name, relation, seen)
            assert sql is not None
            barrier = "" if self.source.open(name) else " with (security_barrier)"
            build(f"{self.schema}.{name}", f"create view {self.schema}.{name}{barrier} as {sql}")
            connection.execute(f"grant select on {self.schema}.{name} to {self.role}")
            return True

        try:
            if using is not None:
                return make(using)
            with self.engine._borrowed() as connection, connection.transaction():
                connection.execute("select pg_advisory_xact_lock(hashtext($1))", (self.schema,))
                found = make(connection)
        except psycopg.Error as error:
            raise _ours(error) from None
        if found:
            self.engine._views.add((self.schema, name))
            if self.source.narrow is not None:
                self.engine.narrowed(self.schema)
        return found

    def _prepared(self, sql: str, params: Any, using: psycopg.Connection[Any] | None = None) -> tuple[str, list[Any]]:
        text, names, entities, own = checked(sql)
        for entity in entities:
            if not self.bind(entity, using=using) and entity not in own:
                raise NotFound(
                    f"there is no entity {entity.removesuffix('__history')!r} to read",
                    hint="layer schema lists what there is",
                )
        if params is not None and not isinstance(params, Mapping):
            raise Invalid("parameters are named, as in :name with a dict")
        given = params or {}
        missing = [n for n in names if n not in given]
        if missing:
            raise Invalid(f"the parameters do not fit the statement: {missing[0]!r} is missing")
        return text, [_parameter(given[n]) for n in names]

    def answer(self, sql: str, params: Any, deadline: float, limit: int) -> Answer:
        """Names and rows of one SELECT."""
        text, values = self._prepared(sql, params)
        entities = [entity for entity in checked(sql)[2] if self.source.visible(entity)]
        for attempt in (1, 2):
            try:
                self.line.set("search_path", self.schema)
                if self.source.as_of is not None:
                    self.line.set("livinglayer.as_of", str(self.source.as_of))
                self.line.set("statement_timeout", str(max(1, round((deadline - time.monotonic()) * 10) * 100)))
                trusted = self.source.policy.principal == OWNER and self.source.narrow is None
                room = None if trusted else self.engine.settings.query_bytes // 4
                answer = self._run(text, values, limit, room, told=bool(entities))
                tx = answer[3]
                if self.source.as_of is not None:
                    tx = self.source.as_of
                elif not entities:  # it reads nothing of the layer, so any tx will do
                    with self.engine.reading() as session:
                        tx = clock(self.engine, session)[0]
                return *answer[:3], tx
            except pg.UndefinedTable as error:
                if attempt == 2:
                    raise self._refusal(error) from None
                for entity in entities:  # swept away
                    self.bind(entity, again=True)
            except psycopg.Error as error:
                raise self._refusal(error) from None
        raise AssertionError

    def _run(self, text: str, values: list[Any], limit: int, room: int | None = None, told: bool = False) -> Answer:
        """Run a checked statement; when `told` every row, or one in the place of none, says at which moment it was read.

        Views older than the last change of schema or policy are noticed so, and the answer knows the last tx it shows.
        """
        cursor: psycopg.Cursor[Any] | Stream = self.connection.cursor()
        sql = f"select q.* from ({text}) q limit {limit + 1}"
        if told:
            sql = f"select q.*, c.now from {self.schema}._clock c left join (select q.*, 1 from ({text}) q) q on true limit {limit + 1}"
        rows: list[tuple[Any, ...]] = []
        if room is None:
            cursor.execute(sql, values)
            rows = cursor.fetchall()
        else:
            cursor = stream = Stream(self.connection)
            stream.line = self.line
            for row in stream.stream(sql, values):  # an answer too large is never held
                room -= sum(map(_size, row))
                if room < 0:
                    raise LimitExceeded("the answer is larger than it may be", hint="ask for less at a time")
                rows.append(row)
        tx = 0
        if told:
            epoch, tx = map(int, rows[0][-1].split())
            if epoch != self.source.epoch:
                raise Stale
            if rows[0][-2] is None:
                rows = []
        if len(rows) > limit:
            raise LimitExceeded(
                f"the answer has more than {limit} rows", hint="add a limit clause, or ask for more with limit="
            )
        if not rows or cursor.description is None:
            return [], [], [], tx
        names = [c.name for c in cursor.description]
        return (distinct(names[:-2]), [], [row[:-2] for row in rows], tx) if told else (distinct(names), [], rows, tx)

    def inside(self, sql: str, params: Any, deadline: float, limit: int) -> list[dict[str, Any]]:
        """On the writer's connection, within its transaction: as the role, then as the owner again."""
        run = self.connection.execute
        text, values = self._prepared(sql, params, self.connection if self.draft else None)
        try:
            run("savepoint inside")
            run(
                "select set_config('search_path', $1, true), set_config('statement_timeout', $2, true)",
                (self.schema, str(max(1, int((deadline - time.monotonic()) * 1000)))),
            )
            run(f"set local role {self.role}")
            answer = self._run(text, values, limit)
            run("reset role")
            run("select set_config('search_path', 'public', true), set_config('statement_timeout', '0', true)")
            if self.draft:
                run(f"drop schema {self.schema} cascade")
            run("release savepoint inside")
            return as_dicts(*answer)
        except psycopg.Error as error:
            raise self._undo(error) from None
        except LayerError:
            self._undo(None)
            raise

    def _undo(self, error: psycopg.Error | None) -> LayerError:
        with suppress(psycopg.Error):
            self.engine._leave()
        with suppress(psycopg.Error):
            self.connection.execute("rollback to savepoint inside")
        if self.engine._pipeline is None:
            self.engine._pipeline = self.connection.pipeline()
            self.engine._pipeline.__enter__()
        return self._refusal(error) if error is not None else Invalid("")

    def _refusal(self, error: psycopg.Error) -> LayerError:
        """PostgreSQL's complaint without our inner names."""
        text = (error.diag.message_primary or str(error).split("\n")[0]) if error.diag else str(error)
        if isinstance(error, pg.UndefinedTable):
            found = re.search(r'relation "([^"]*)" does not exist', text)
            return NotFound(
                f"there is no entity {found.group(1) if found else ''!r} to read",
                hint="layer schema lists what there is",
            )
        if isinstance(error, pg.InsufficientPrivilege):
            return NotFound(
                "the statement reaches for something that is not there",
                hint="query entities by their names; layer schema lists them",
            )
        if isinstance(error, pg.QueryCanceled):
            return TimedOut("the query took too long", hint="ask for less, or give a longer timeout")
        if isinstance(
            error, pg.OutOfMemory | pg.ProgramLimitExceeded | pg.ConfigurationLimitExceeded | pg.StatementTooComplex
        ) or error.sqlstate in ("53400", "54000", "53200"):
            return LimitExceeded("the query needs more than it may have", hint="ask for less at a time")
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return _ours(error)
        if "_b_" in text or "ll_" in text or SCHEMA in text:
            return Invalid("the query can't be run")
        return Invalid(f"the query can't be run: {text}", hint="layer schema lists entities and fields")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else len(repr(value)) if isinstance(value, dict | list) else 16


def _parameter(value: Any) -> Any:
    if isinstance(value, dict | list | tuple):
        return Jsonb(value)
    if isinstance(value, int) and not isinstance(value, bool) and not INT_MIN <= value <= INT_MAX:
        raise Invalid("an int parameter has 64 bits", hint="give a Decimal")
    if isinstance(value, str) and "\0" in value:
        raise Invalid("a parameter can't contain a NUL character")
    return value
