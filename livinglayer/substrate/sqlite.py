"""SQLite: the embedded engine, through apsw.

Everything that only SQLite needs is here: connections and durability, column types, the decimal collation and sum,
TEMP views, and the authorizer that keeps raw SQL inside them.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal, InvalidOperation, localcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import apsw

from ..errors import Corrupt, Invalid, LayerError, LimitExceeded, NotFound, TimedOut, Unavailable
from ..settings import Settings
from .engine import LEDGER, PASSING, SWEEP_SECONDS, Lease, Session, Stale, marks
from .narrow import Narrow
from .reads import Answer, Source, as_dicts, shaped
from .values import DECIMAL_DIGITS, convert, decimal_text, parameter

SCHEMA_FILE = "layer.db"
SPARE = 4  # connections kept for readers to come
_COLUMN = {
    "int": "INTEGER", "ref": "INTEGER", "float": "REAL", "bool": "BOOL_INT", "decimal": "DECIMAL_TEXT COLLATE exact",
    "date": "DATE_TEXT", "datetime": "DATETIME_TEXT", "json": "JSON_TEXT", "blob": "BLOB",
}  # fmt: skip
DECLARED = {
    "DECIMAL_TEXT": "decimal",
    "DATE_TEXT": "date",
    "DATETIME_TEXT": "datetime",
    "JSON_TEXT": "json",
    "BOOL_INT": "bool",
}
# Read once the statement has the file: no wait before that counts.
_NOW = "strftime('%Y-%m-%dT%H:%M:%f', 'now'{}) || '000Z'"

# What raw SQL may call: no files, no state, no randomness that allocates.
FUNCTIONS = frozenset(
    """abs acos asin atan atan2 avg ceil ceiling char coalesce concat concat_ws cos count cume_dist date datetime
    degrees dense_rank exp first_value floor format glob group_concat hex iif if ifnull instr json json_array
    json_array_length json_extract json_group_array json_group_object json_insert json_object json_patch json_quote
    json_remove json_replace json_set json_type json_valid julianday lag last_value lead length like ln log log10 log2
    lower ltrim max median min mod nth_value ntile nullif octet_length percent_rank percentile percentile_cont pi pow
    power printf quote radians random rank replace round row_number rtrim sign sin sqrt strftime string_agg substr
    substring sum tan time timediff total trim trunc typeof unhex unicode unixepoch upper -> ->>""".split()
)
_CTE = re.compile(r"""(\w+)["`\]]?\s*(?:\([^()]*\)\s*)?as\s*(?:not\s+)?(?:materialized\s*)?\(""")
TABLE_FUNCTIONS = frozenset({"json_each", "json_tree"})
_LIMITS = {
    apsw.SQLITE_LIMIT_LENGTH: 32 << 20, apsw.SQLITE_LIMIT_SQL_LENGTH: 100_000, apsw.SQLITE_LIMIT_EXPR_DEPTH: 300,
    apsw.SQLITE_LIMIT_COMPOUND_SELECT: 200, apsw.SQLITE_LIMIT_VDBE_OP: 500_000, apsw.SQLITE_LIMIT_ATTACHED: 0,
    apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 500, apsw.SQLITE_LIMIT_TRIGGER_DEPTH: 0, apsw.SQLITE_LIMIT_WORKER_THREADS: 0,
    apsw.SQLITE_LIMIT_FUNCTION_ARG: 100, apsw.SQLITE_LIMIT_VARIABLE_NUMBER: 2000,
}  # fmt: skip

_WITHIN = {kind: _LIMITS[kind] for kind in (apsw.SQLITE_LIMIT_LENGTH, apsw.SQLITE_LIMIT_EXPR_DEPTH, apsw.SQLITE_LIMIT_COMPOUND_SELECT)}  # fmt: skip


def _stored(sql: str) -> str:
    """A statement as sqlite_schema keeps it: only its first words are made upper case."""
    words = {
        "create table": "CREATE TABLE",
        "create index if not exists": "CREATE INDEX",
        "create index": "CREATE INDEX",
        "create trigger": "CREATE TRIGGER",
    }
    for word, kept in words.items():
        if sql.startswith(word):
            return kept + sql[len(word) :]
    return sql


@contextmanager
def translated() -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except (apsw.BusyError, apsw.LockedError):
        raise Unavailable(
            "another writer holds the layer", hint="try again; a long transaction may be open elsewhere"
        ) from None
    except apsw.FullError:
        raise Unavailable("the disk is full", hint="free some space; nothing was written, reads go on") from None
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise Corrupt(f"the layer's file is damaged: {error}", hint="restore a backup") from None
    except apsw.IOError as error:
        raise Unavailable(
            f"the layer's file can't be read or written: {error}", hint="is the disk full or gone?"
        ) from None
    except (apsw.CantOpenError, apsw.ReadOnlyError, apsw.PermissionsError) as error:
        raise Unavailable(
            f"the layer's file can't be opened for writing: {error}", hint="check the permissions of .layer/"
        ) from None
    except apsw.NoMemError:
        raise LimitExceeded("the statement needs more memory than it may have") from None


def _exact(a: str, b: str) -> int:
    """Order decimals by value; what is no number sorts as text, after numbers."""
    try:
        x, y = Decimal(a), Decimal(b)
        return (x > y) - (x < y)
    except InvalidOperation:
        return (a > b) - (a < b)


class _Sum:
    """sum() that is exact for decimals and otherwise as SQLite's own."""

    def __init__(self) -> None:
        self.count: int = 0
        self.total: Any = 0

    def step(self, value: Any) -> None:
        self._add(value, 1)

    def inverse(self, value: Any) -> None:
        self._add(value, -1)

    def _add(self, value: Any, sign: int) -> None:
        if value is None:
            return
        if isinstance(value, str):
            try:
                value = Decimal(value)
            except InvalidOperation:
                value = 0
            if isinstance(value, Decimal) and (not value.is_finite() or abs(value.adjusted()) > DECIMAL_DIGITS):
                value = 0  # no decimal of ours; SQLite counts text that is no number as 0 too
        elif isinstance(value, bytes):
            value = 0
        if isinstance(value, float) and isinstance(self.total, Decimal):
            self.total = float(self.total)
        elif isinstance(value, Decimal) and isinstance(self.total, float):
            value = float(value)
        self.count += sign
        with localcontext(prec=3 * DECIMAL_DIGITS):  # wide enough for every digit of both
            self.total += sign * value

    def value(self) -> Any:
        if self.count == 0:
            return None
        if isinstance(self.total, Decimal):
            return decimal_text(self.total)
        if isinstance(self.total, int) and not -(2**63) <= self.total < 2**63:
            raise Invalid("sum: integer overflow")
        return self.total

    final = value


def connect(path: str | Path, settings: Settings, flags: int = apsw.SQLITE_OPEN_READWRITE) -> apsw.Connection:
    with translated():
        connection = apsw.Connection(str(path), flags=flags, statementcachesize=300)
        connection.set_busy_timeout(int(settings.busy_seconds * 1000))
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)  # else STAT4 re-prepares on each new binding
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        connection.create_collation("exact", _exact)
        connection.create_scalar_function("layer_convert", _convert, 3, deterministic=True)
        connection.pragma("cache_size", -16000)
        connection.pragma("temp_store", 2)
    return connection


def _convert(*given: Any) -> Any:
    return convert(*given)


if TYPE_CHECKING:
    from .ledger import Tx


class SqliteSession:
    """Statements on one connection, inside its transaction."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.execute = connection.execute
        self.clock: tuple[Any, ...] | None = None

    def all(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self.execute(sql, params).fetchall()

    def one(self, sql: str, params: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        return self.execute(sql, params).fetchone()

    def run(self, sql: str, params: Sequence[Any] = ()) -> None:
        self.execute(sql, params)

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        self.connection.executemany(sql, rows)

    def fill(self, table: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> None:
        names = ", ".join(name for name, _ in columns)
        self.connection.executemany(f"insert into {table}({names}) values ({marks(len(columns))})", rows)

    def rewrite(self, table: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> None:
        sets = ", ".join(f"{name} = ?" for name, _ in columns)
        self.connection.executemany(f"update {table} set {sets} where id = ?", rows)

    def stream(self, sql: str, params: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        return iter(self.execute(sql, params))

    def forget(self, store: str, number: int) -> None:
        """Nothing is read ahead here."""


class SqliteEngine:
    """A layer in a directory."""

    dialect: Literal["sqlite"] = "sqlite"
    schema_prefix = "main."
    null_tx = "null"
    reads_ahead = False
    index_prefix = ""
    barrier = " limit -1"  # keeps SQLite from evaluating a caller's conditions on rows the view hides

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.directory, self.settings = directory, settings
        self.path = directory / SCHEMA_FILE
        self.location = str(directory)
        self._writer: apsw.Connection | None = None
        self._session: SqliteSession | None = None
        self._thread = threading.local()  # the snapshot its thread holds
        self._readers: list[apsw.Connection] = []
        self._spare: list[apsw.Connection] = []  # of readers that were closed: they have read the schema already
        self._pool = threading.Lock()
        self._leasing: apsw.Connection | None = None
        self._lease_lock = threading.Lock()
        self._swept = time.monotonic()

    # Connections

    @property
    def address(self) -> str:
        """What opens it again, a password included: not for people's eyes."""
        return self.location

    def exists(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def has_table(self, session: Session, name: str) -> bool:
        return session.one("select 1 from sqlite_schema where type = 'table' and name = ?", (name,)) is not None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Keep others from making the same layer at the same time."""
        with open(self.directory / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def create(self) -> bool:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.exists():
            return False
        connection = connect(self.path, self.settings, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
        os.chmod(self.path, 0o600)
        with translated():
            connection.pragma("journal_mode", "wal")
        connection.close()
        return True

    def begin(self, reads: Sequence[tuple[str, tuple[Any, ...]]] = (), new: bool = False) -> Session:
        if self._writer is None:
            self._writer = connect(self.path, self.settings)
            with translated():
                for name, value in (("synchronous", 2), ("wal_autocheckpoint", 2000), ("journal_size_limit", 64 << 20)):
                    self._writer.pragma(name, value)
            self._session = SqliteSession(self._writer)
        assert self._session is not None
        with translated():
            self._writer.execute("begin immediate")
            if not new:
                self._session.clock = self._session.one(
                    "select tx, next_id, epoch, at, hash from ledger_clock where one = 1"
                )
        return self._session

    def commit(self, session: Session) -> None:
        assert self._writer is not None
        with translated():
            self._writer.execute("commit")

    def rollback(self) -> None:
        if self._writer is not None and self._writer.in_transaction:
            try:
                self._writer.execute("rollback")
            except apsw.Error:
                self._writer.close(True)
                self._writer = None

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
        with self._pool:
            connection = self._readers.pop() if self._readers else None
        if connection is None:
            connection = connect(self.path, self.settings)
        try:
            with translated():
                connection.execute("begin")
                try:
                    yield SqliteSession(connection)
                finally:
                    if connection.in_transaction:
                        connection.execute("rollback")
        finally:
            with self._pool:
                self._readers.append(connection)

    def reader(self, source: Source) -> Reader:
        with self._pool:
            connection = self._spare.pop() if self._spare else None
        if connection is None:
            connection = connect(self.path, self.settings, apsw.SQLITE_OPEN_READONLY)
            for limit, value in _LIMITS.items():
                connection.limit(limit, value)
        return Reader(connection, source, self.keep)

    def keep(self, connection: apsw.Connection) -> None:
        """A reader's connection for the next reader; its views are gone."""
        with self._pool:
            if len(self._spare) < SPARE:
                self._spare.append(connection)
                return
        connection.close(True)

    def inside(
        self, tx: Tx, sql: str, params: Any, deadline: float, limit: int, narrow: Narrow | None = None, branch: str | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """A guarded query within the write transaction, which sees what it has written."""
        assert self._writer is not None
        found = tx.work.catalog.branch(tx.session, branch or tx.name)
        source = Source(tx.work.catalog, tx.session, found, None, tx.policy, tx.work.version, narrow)
        reader = Reader(self._writer, source)
        reader.most = self.settings.query_bytes // 4
        wide = {kind: self._writer.limit(kind, most) for kind, most in _WITHIN.items()}
        try:
            return as_dicts(*reader.answer(sql, params, deadline, limit))
        finally:
            for kind, before in wide.items():
                self._writer.limit(kind, before)
            reader.unbind()

    def close(self) -> None:
        with self._pool:
            connections, self._readers, self._spare = [*self._readers, *self._spare], [], []
        for connection in [*connections, *([self._writer] if self._writer else [])]:
            connection.close(True)
        self._writer = None
        with self._lease_lock:
            if self._leasing is not None:
                self._leasing.close(True)
            self._leasing = None

    def translating(self) -> Any:
        return translated()

    def swift(self, epoch: int, table: Any, changed: Sequence[tuple[str, str]]) -> None:
        return None  # there are no round trips to save

    # Types and tables

    def collate(self, kind: str) -> str:
        return "collate exact " if kind == "decimal" else ""

    def column(self, kind: str) -> str:
        return _COLUMN.get(kind, "TEXT")

    def portable(self, expression: str, kind: str) -> str:
        return expression

    def native(self, kind: str, stored: Any) -> Any:
        return stored

    def shown(self, expression: str, kind: str) -> str:
        return expression

    def hex(self, expression: str) -> str:
        return f"lower(hex({expression}))"

    def converted(self, expression: str, old: str, new: str) -> str:
        return f"layer_convert('{old}', '{new}', {expression})"

    def ledger_tables(self) -> list[str]:
        made = []
        for name, (columns, key, indexes) in LEDGER.items():
            listed = ", ".join(f"{column} {self.column(kind)}" for column, kind in columns)
            rowid = key == [columns[0][0]] and columns[0][1] == "int"
            if rowid:
                listed = listed.replace(f"{key[0]} INTEGER", f"{key[0]} INTEGER PRIMARY KEY", 1)
                made.append(f"create table {name}({listed})")
            else:
                made.append(f"create table {name}({listed}, primary key({', '.join(key)})) without rowid")
            made += [f"create index {name}_{'_'.join(on)} on {name}({', '.join(on)})" for on in indexes]
        made.append("create index ledger_change_system on ledger_change(branch, entity, tx) where entity < 2000")
        return made

    def tables(self, store: str, columns: Sequence[tuple[str, str]]) -> list[str]:
        listed = "".join(f", {name} {self.column(kind)}" for name, kind in columns)
        return [
            f"create table {store}(id INTEGER PRIMARY KEY, _tx INTEGER NOT NULL{listed})",
            f"create table {store}__h(id INTEGER NOT NULL, tx_from INTEGER NOT NULL, tx_to INTEGER NOT NULL{listed}, primary key(tx_to, id)) without rowid",
            f"create index {store}__h_id on {store}__h(id)",
            f"create table {store}__d(branch INTEGER NOT NULL, id INTEGER NOT NULL, tx_from INTEGER NOT NULL, tx_to INTEGER NOT NULL, del INTEGER NOT NULL{listed}, primary key(branch, id, tx_from)) without rowid",
            *self.triggers(store, [name for name, _ in columns]),
        ]

    def triggers(self, store: str, columns: Sequence[str]) -> list[str]:
        names, old = "".join(f", {c}" for c in columns), "".join(f", old.{c}" for c in columns)
        return [
            f"drop trigger if exists {store}__u",
            f"drop trigger if exists {store}__x",
            f"create trigger {store}__u before update on {store} when new._tx <> old._tx begin"
            f" select raise(abort, 'a version can not be older than the one it replaces') where new._tx < old._tx;"
            f" insert into {store}__h(id, tx_from, tx_to{names}) values (old.id, old._tx, new._tx{old}); end",
            f"create trigger {store}__x before delete on {store} begin"
            f" insert into {store}__h(id, tx_from, tx_to{names}) select old.id, old._tx, c.tx{old} from ledger_clock c where c.tx > old._tx; end",
        ]

    def columns(self, session: Session, table: str) -> list[tuple[str, str]]:
        rows = session.all("select name, type from pragma_table_info(?)", (table,))
        kinds = {"INTEGER": "int", "REAL": "float", "BLOB": "blob"}
        return [(name, kinds.get(kind) or DECLARED.get(kind, "text")) for name, kind in rows]

    def same_statement(self, there: str, wanted: str) -> bool:
        return there == _stored(wanted)

    def structure(self, there: Mapping[str, str], store: str, columns: Sequence[tuple[str, str]]) -> Iterator[str]:
        """What is wrong with how an entity's tables and indexes are made."""
        for suffix in ("", "__h", "__d"):
            made = there.get(store + suffix)
            if made is None:
                yield f"table {store}{suffix} is missing"
            elif not any(
                made == self._grown(store + suffix, columns, first) for first in {0, len(columns), *range(len(columns))}
            ):
                yield f"table {store}{suffix} is not made as it should be"
        for name, made in there.items():
            for suffix, first in (("", []), ("__h", []), ("__d", ["branch"])):
                on = name.removeprefix(f"{store}{suffix}_i_")
                if on == name and name != f"{store}{suffix}_id":
                    continue
                listed = ["id"] if on == name else [c for n in on.split("_") for c, _ in columns if c.endswith(f"_{n}")]
                if made != _stored(f"create index {name} on {store}{suffix}({', '.join([*first, *listed])})"):
                    yield f"index {name} is not made as it should be"

    def strays(self, session: Session, known: set[str], stores: Sequence[str]) -> Iterator[str]:
        """Objects under a name, kind or table that nothing asks for."""
        tables = {f"{store}{suffix}" for store in stores for suffix in ("", "__h", "__d")}
        for kind, name, table, sql in session.all(
            "select type, name, tbl_name, sql from sqlite_schema where sql is not null"
        ):
            parts = name.rsplit("_i_", 1)
            asked = (
                name in known
                or name in tables
                or (name.endswith("__h_id") and name[:-3] in tables)
                or (len(parts) == 2 and parts[0] in tables)
            )
            on = name if kind == "table" else table if f" on {table}" in sql else None
            if not asked or table != on or not sql.startswith(f"CREATE {str(kind).upper()} {name}"):
                yield f"{kind} {name} of {table} is not the layer's"

    def _grown(self, table: str, columns: Sequence[tuple[str, str]], first: int) -> str:
        """The text SQLite keeps of a table made with its first columns, the others added later."""
        store = table.removesuffix("__h").removesuffix("__d")
        made = next(s for s in self.tables(store, columns[:first]) if s.startswith(f"create table {table}("))
        added = "".join(f", {name} {self.column(kind)}" for name, kind in columns[first:])
        head, tail = made.removesuffix(" without rowid"), " without rowid" if made.endswith(" without rowid") else ""
        return _stored(f"{head[:-1]}{added}){tail}")

    def statements(self, session: Session) -> dict[str, str]:
        """What makes the tables, indexes and triggers as they are now, by name."""
        return dict(session.all("select name, sql from sqlite_schema where sql is not null order by name"))

    # Leases: one statement each, on a connection of their own that waits for the file as any writer does

    def _lease(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._lease_lock:
            if self._leasing is None:
                self._leasing = connect(self.path, self.settings)
                with translated():
                    self._leasing.pragma("synchronous", 1)  # one that is lost with the machine has no holder either
                    self._leasing.pragma("wal_autocheckpoint", 2000)
            with translated():
                return self._leasing.execute(sql, params).fetchall()

    def lease(self, name: str, holder: str, seconds: float, value: str | None = None) -> bool:
        kept = "case when ledger_lease.holder = excluded.holder then coalesce(excluded.value, ledger_lease.value) else excluded.value end"
        return bool(
            self._lease(
                f"insert into ledger_lease(name, holder, until, value) values (?, ?, {_NOW.format(', ?')}, ?) on conflict(name) do update"
                f" set holder = excluded.holder, until = excluded.until, value = {kept}"
                f" where ledger_lease.holder = excluded.holder or ledger_lease.until <= {_NOW.format('')} returning 1",
                (name, holder, f"{seconds:+.3f} seconds", value),
            )
        )

    def release(self, name: str, holder: str) -> None:
        self._lease("delete from ledger_lease where name = ? and holder = ?", (name, holder))

    def leases(self, prefix: str = "") -> list[Lease]:
        rows = self._lease(
            f"select name, holder, until, value from ledger_lease where substr(name, 1, length(?1)) = ?1 and until > {_NOW.format('')} order by name",
            (prefix,),
        )
        return [(name, holder, datetime.fromisoformat(until), value) for name, holder, until, value in rows]

    def claim(self, names: Sequence[str], holder: str, seconds: float) -> list[str]:
        if time.monotonic() - self._swept > SWEEP_SECONDS:
            self._swept = time.monotonic()
            self._lease("delete from ledger_lease where until < " + _NOW.format(", '-1 day'"), ())
        got = {
            name
            for (name,) in self._lease(
                f"insert into ledger_lease(name, holder, until) select distinct value, ?, {_NOW.format(', ?')} from json_each(?) where true"
                f" on conflict(name) do update set holder = excluded.holder, until = excluded.until, value = null"
                f" where ledger_lease.until <= {_NOW.format('')} returning name",
                (holder, f"{seconds:+.3f} seconds", json.dumps(list(names))),
            )
        }
        return [name for name in dict.fromkeys(names) if name in got]

    # Blobs

    def _blob(self, digest: str) -> Path:
        return self.directory / "blobs" / digest[:2] / digest[2:]

    def put_blob(self, digest: str, data: bytes) -> None:
        path = self._blob(digest)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise Unavailable(f"the file's content can't be stored: {error}") from None

    def get_blob(self, digest: str) -> bytes | None:
        try:
            return self._blob(digest).read_bytes()
        except FileNotFoundError:
            return None

    def has_blob(self, digest: str) -> bool:
        return self._blob(digest).exists()

    def check(self) -> list[str]:
        with self.reading() as session:
            try:
                found = [row[0] for row in session.all("pragma integrity_check(20)")]
            except apsw.Error as error:
                return [f"SQLite: {error}"]
        return [f"SQLite: {text}" for text in found if text != "ok"]

    def copy(self, target: Path) -> None:
        """A consistent copy of the database as it is now, while others write."""
        connection = connect(self.path, self.settings)
        try:
            with translated():
                connection.execute("vacuum main into ?", (str(target),))
        finally:
            connection.close(True)
        os.chmod(target, 0o600)
        copied = connect(target, self.settings)
        try:
            with translated():
                for table in PASSING:
                    if copied.table_exists("main", table):
                        copied.execute(f"delete from {table}")
        finally:
            copied.close(True)


class Missing(Exception):
    """A statement named an entity whose view is not made yet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Reader:
    """A connection on which entity names are views for one branch, moment and policy; raw SQL can't see past them.

    A base view may read tables, a governed view base views and other governed ones, the public name the governed one.
    Base and governed views carry a random name: the authorizer only hears the innermost name, which a caller could otherwise shadow with a CTE.
    """

    def __init__(
        self, connection: apsw.Connection, source: Source, keep: Callable[[apsw.Connection], None] | None = None
    ) -> None:
        self.source, self.connection, self.keep = source, connection, keep
        self.nonce = secrets.token_hex(8)
        # A statement that was prepared is run again without asking the authorizer: no text may be one of these.
        self._begin, self._end = f"begin --{self.nonce}", f"rollback --{self.nonce}"
        self._clock = f"select tx, epoch from main.ledger_clock --{self.nonce}"
        self.public: set[str] = set()
        self.base: set[str] = set()
        self.governed: set[str] = set()
        self.guarding, self.statements, self.deadline, self.text = False, 0, 0.0, ""
        self.denied: str | None = None  # the table a statement reached for
        self.changing = False  # whether it would have done more than read
        self.exact_sum = False
        self.most: int | None = None  # bytes of an answer, where no process of its own limits it
        self.shapes: dict[str, tuple[list[str], list[tuple[int, str]]]] = {}  # columns of statements that ran before
        self.tables = {name.lower() for (name,) in connection.execute("select name from main.sqlite_schema")}
        self.connection.authorizer = self._authorize
        self.connection.exec_trace = self._trace
        self.connection.set_progress_handler(self._late, 2000)

    def close(self) -> None:
        try:
            self.unbind()
            if self.connection.in_transaction:  # its end was interrupted: whoever is next would read this moment
                self.connection.execute("rollback")
            self.connection.pragma("shrink_memory")
        except apsw.Error:
            self.connection.close(True)
            return
        if self.keep is not None:
            self.keep(self.connection)

    def interrupt(self) -> None:
        """End what it is doing, from another thread."""
        self.connection.interrupt()

    def raw_connection(self) -> apsw.Connection:
        """The connection with every name bound, its guard off."""
        for entity in self.source.schema.entities:
            self.bind(entity.name)
        return self.connection

    def unbind(self) -> None:
        """Leave a borrowed connection as it was."""
        self.connection.exec_trace = None
        self.connection.set_progress_handler(None)
        self.connection.authorizer = None
        for name in (*self.public, *self.governed, *self.base):
            self.connection.execute(f"drop view if exists temp.{name}")

    def _late(self) -> bool:
        return self.guarding and time.monotonic() > self.deadline

    def _trace(self, cursor: apsw.Cursor, sql: str, bindings: Any) -> bool:
        if not self.guarding or not cursor.has_vdbe:  # a comment is no statement
            return True
        self.statements += 1
        if self.statements > 1:
            raise Invalid("a query is one statement", hint="send the second one on its own")
        if cursor.is_explain:
            raise Invalid("EXPLAIN is not part of a query")
        if not cursor.is_readonly:
            raise Invalid("a query can't change anything", hint="write with insert, update and delete", writes=True)
        return True

    def _authorize(self, op: int, first: str | None, second: str | None, database: str | None, view: str | None) -> int:
        if not self.guarding:
            return apsw.SQLITE_OK
        allowed = False
        if op in (apsw.SQLITE_SELECT, apsw.SQLITE_RECURSIVE):
            allowed = True
        elif op == apsw.SQLITE_FUNCTION:
            name = (second or "").lower()
            allowed = name in FUNCTIONS or (name == "layer_convert" and view in self.base)
        elif op == apsw.SQLITE_READ:
            if database == "main":
                allowed = view in self.base or (first or "").lower() in TABLE_FUNCTIONS
            elif database == "temp":
                allowed = (
                    first in self.public
                    or (first in self.governed and (view in self.public or view in self.governed))
                    or (first in self.base and (view in self.governed or view in self.base or view in self.public))
                )
            else:  # a common table expression or subquery of the statement itself
                allowed = database is None and bool(second)
            if not second and not allowed:
                allowed = self._counted((first or "").lower())
        if not allowed:
            self.denied = first if op == apsw.SQLITE_READ else None
            self.changing = op not in (apsw.SQLITE_READ, apsw.SQLITE_FUNCTION)
        return apsw.SQLITE_OK if allowed else apsw.SQLITE_DENY

    def _counted(self, name: str) -> bool:
        """Whether something of which no column is used may be read; SQLite does not say here through which view.

        A table under our own views does not stand in the statement; what stands in it must be one of the statement's
        own subqueries, or somebody counts past the views.
        """
        if name in self.public or name not in self.text:
            return True
        made = {match.group(1) for match in _CTE.finditer(self.text)}
        return name in made and name not in self.tables and not name.startswith("sqlite_")

    def _relation(self, name: str) -> str:
        """The base view of an entity, made when first needed."""
        inner = f"_b_{self.nonce}_{name}"
        if inner not in self.base:
            self.connection.execute(f"create temp view {inner} as {self.source.base(name)}")
            self.base.add(inner)
        return inner

    def _seen(self, name: str) -> str:
        """An entity as the principal sees it, made when first needed."""
        sql = self.source.seen(name, self._relation)
        if sql is None:
            return self._relation(name)
        inner = f"_p_{self.nonce}_{name}"
        if inner not in self.governed:
            self.connection.execute(f"create temp view {inner} as {sql}")
            self.governed.add(inner)
        return inner

    def bind(self, name: str) -> bool:
        """Make a public name; False when there is none (for this principal)."""
        if name in self.public or not self.source.visible(name):
            return False
        guarding, self.guarding = self.guarding, False
        try:
            sql = self.source.governed(name, self._relation, self._seen)
            assert sql is not None
            inner = f"_g_{self.nonce}_{name}"
            if self.source.has_decimals(name) and not self.exact_sum:
                self.connection.create_window_function("sum", _Sum)
                self.exact_sum = True
            self.connection.execute(f"create temp view {inner} as {sql}")
            self.governed.add(inner)
            self.connection.execute(f"create temp view {name} as select * from {inner}")
            self.public.add(name)
            return True
        finally:
            self.guarding = guarding

    def answer(self, sql: str, params: Any, deadline: float, limit: int) -> Answer:
        """Names, special columns and rows of one SELECT."""
        self.deadline = deadline
        if params:
            params = (
                {k: parameter(v) for k, v in params.items()}
                if isinstance(params, Mapping)
                else tuple(map(parameter, params))
            )
        self.text = sql.lower()
        while True:
            try:
                return self._snapshot(sql, params, limit)
            except Missing as missing:  # bound outside of the transaction, whose end would take it away again
                self.bind(missing.name)

    def _snapshot(self, sql: str, params: Any, limit: int) -> Answer:
        """The answer and, of the same snapshot, the clock."""
        run, own = self.connection.execute, not self.connection.in_transaction  # or within a write transaction
        if own:
            with translated():
                run(self._begin)
        self.guarding, self.denied, self.changing = True, None, False
        try:
            names, kinds, rows = self._answer(sql, params, limit)
            self.guarding = False
            tx, epoch = run(self._clock).fetchone() or (0, 0)
        finally:
            self.guarding = False
            if own and self.connection.in_transaction:
                run(self._end)
        if type(self.source.epoch) is int and epoch != self.source.epoch:  # a draft is its own
            raise Stale
        return names, kinds, rows, tx if self.source.as_of is None else self.source.as_of

    def _answer(self, sql: str, params: Any, limit: int) -> tuple[list[str], list[tuple[int, str]], list[Any]]:
        self.statements = 0
        try:
            cursor = self.connection.execute(sql, params)
            if not self.statements:
                raise Invalid("a query is a SELECT; there is none", hint="e.g. select * from item")
            shape = self.shapes.get(sql)
            if shape is None:
                try:
                    described = cursor.get_description()
                except apsw.ExecutionCompleteError:
                    return [], [], []
                shape = shaped(sql, [(d[0], d[1]) for d in described], self.source)
                if len(self.shapes) < 1000:
                    self.shapes[sql] = shape
            rows = list(islice(cursor, limit + 1)) if self.most is None else self._measured(islice(cursor, limit + 1))
            if len(rows) > limit:
                cursor.close(True)
                raise LimitExceeded(
                    f"the answer has more than {limit} rows", hint="add a limit clause, or ask for more with limit="
                )
            return *shape, rows
        except apsw.SQLError as error:
            text = str(error)
            name = text.removeprefix("no such table: ").lower()
            if name != text.lower() and "." not in name and name not in self.public and self.source.visible(name):
                raise Missing(name) from None
            raise self._refusal(text) from None
        except apsw.AuthError as error:
            raise self._refusal(str(error)) from None
        except UnicodeDecodeError:
            raise Invalid("a text of the answer is not valid UTF-8", hint="leave it a blob, or use hex()") from None
        except apsw.InterruptError:
            raise TimedOut("the query took too long", hint="ask for less, or give a longer timeout") from None
        except apsw.TooBigError:
            raise LimitExceeded("a value of the query is too big") from None
        except apsw.ReadOnlyError:
            raise Invalid(
                "a query can't change anything", hint="write with insert, update and delete", writes=True
            ) from None
        except (apsw.BindingsError, TypeError, KeyError) as error:
            raise Invalid(
                f"the parameters do not fit the statement: {str(error).splitlines()[0]}",
                hint="parameters are named, as in :name, and given in a dict",
            ) from None
        except (
            apsw.BusyError,
            apsw.LockedError,
            apsw.FullError,
            apsw.CorruptError,
            apsw.NotADBError,
            apsw.IOError,
            apsw.CantOpenError,
            apsw.NoMemError,
        ):
            with translated():
                raise
        except apsw.Error as error:
            raise self._refusal(str(error)) from None

    def _measured(self, rows: Iterator[Any]) -> list[Any]:
        """The rows, as long as they are no more bytes than an answer may have."""
        found, size = [], 0
        for row in rows:
            size += sum(len(v) if isinstance(v, str | bytes) else 8 for v in row)
            if self.most is not None and size > self.most:
                raise LimitExceeded(f"the answer is larger than {self.most} bytes", hint="ask for less at a time")
            found.append(row)
        return found

    def _refusal(self, text: str) -> LayerError:
        """SQLite's complaint without our inner names."""
        if self.changing or text.endswith("because it is a view"):
            return Invalid("a query can't change anything", hint="write with insert, update and delete", writes=True)
        name = text.removeprefix("no such table: ") if text.startswith("no such table: ") else self.denied
        if name is not None and self.nonce not in name:
            return NotFound(
                f"there is no entity {name.removeprefix('main.').removeprefix('temp.').removesuffix('__history')!r} to read",
                hint="layer schema lists what there is",
            )
        if self.nonce in text or "prohibited" in text or "not authorized" in text:
            return NotFound(
                "the statement reaches for something that is not there",
                hint="query entities by their names; layer schema lists them",
            )
        return Invalid(f"the query can't be run: {text}", hint="layer schema lists entities and fields")


@functools.cache
def version() -> str:
    return apsw.sqlite_lib_version()
