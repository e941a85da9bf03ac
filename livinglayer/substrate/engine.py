"""What an engine is: the differences between SQLite and PostgreSQL live behind this, in sqlite.py and postgres.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any, Literal, Protocol

from ..settings import Settings

LIVE = 2**63 - 1  # tx_to of a version that still holds
SWEEP_SECONDS = 3600.0  # how often an engine that claims leases removes those that are over since a day
Lease = tuple[str, str, datetime, str | None]  # name, holder, until, value

# The tables every layer has beside those of its entities. Types are field types; `blob` is bytes.
LEDGER: dict[str, tuple[list[tuple[str, str]], list[str], list[list[str]]]] = {
    # name: (columns, primary key, indexes)
    "meta": ([("key", "text"), ("value", "text")], ["key"], []),
    "ledger_clock": (
        [("one", "int"), ("tx", "int"), ("next_id", "int"), ("epoch", "int"), ("at", "datetime"), ("hash", "blob"), ("seal", "blob")],
        ["one"], [],
    ),
    "ledger_tx": (
        [("tx", "int"), ("branch", "int"), ("at", "datetime"), ("principal", "int"), ("execution", "int"), ("cause", "text"),
         ("reason", "text"), ("merged_from", "int"), ("hash", "blob")],
        ["tx"], [["execution"]],
    ),
    "ledger_change": (
        [("branch", "int"), ("tx", "int"), ("entity", "int"), ("id", "int"), ("op", "text"), ("image", "blob")],
        ["branch", "tx", "entity", "id"], [],
    ),
    "ledger_execution": (
        [("id", "int"), ("principal", "int"), ("parent", "int"), ("box", "text"), ("kind", "text"), ("scope", "json"),
         ("reason", "text"), ("trace", "text"), ("started", "datetime"), ("tx", "int")],
        ["id"], [["tx"], ["parent"], ["trace"]],
    ),
    "ledger_outcome": (
        [("execution", "int"), ("status", "text"), ("finished", "datetime"), ("result", "json"), ("tx", "int")],
        ["execution"], [["tx"]],
    ),
    "ledger_step": (
        [("execution", "int"), ("n", "int"), ("kind", "text"), ("detail", "json"), ("at", "datetime"), ("tx", "int")],
        ["execution", "n"], [["tx"]],
    ),
    "ledger_box": (
        [("id", "text"), ("tier", "text"), ("owner", "int"), ("blueprint", "text"), ("created", "datetime"), ("tx", "int")],
        ["id"], [["tx"]],
    ),
    "ledger_snapshot": (
        [("id", "text"), ("box", "text"), ("parent", "text"), ("created", "datetime"), ("tx", "int")],
        ["id"], [["tx"]],
    ),
    "ledger_key": (
        [("principal", "int"), ("key", "text"), ("digest", "text"), ("result", "text"), ("tx", "int")],
        ["principal", "key"], [["tx"]],
    ),
    "ledger_prune": ([("tx", "int"), ("horizon", "int")], ["tx"], []),
    # since format 2
    "ledger_call": (
        [("execution", "int"), ("verb", "text"), ("function", "int"), ("version", "int"), ("arguments", "json"), ("branch", "int"),
         ("state", "int"), ("contract", "int"), ("trigger", "int"), ("cause_tx", "int"), ("attempt", "int"), ("due", "datetime"),
         ("key", "text"), ("seed", "text"), ("snapshot", "text"), ("permissions", "json"), ("runner", "text"), ("tx", "int")],
        ["execution"], [["tx"], ["function"], ["cause_tx"], ["trigger"], ["due"]],
    ),
    "ledger_usage": (
        [("execution", "int"), ("principal", "int"), ("contract", "int"), ("function", "int"), ("wall", "float"), ("cpu", "float"),
         ("memory", "float"), ("sent", "int"), ("received", "int"), ("disk", "int"), ("at", "datetime"), ("tx", "int")],
        ["execution"], [["tx"], ["principal", "at"], ["contract", "at"]],
    ),
    "ledger_decision": (
        [("id", "int"), ("principal", "int"), ("action", "text"), ("resource", "text"), ("allowed", "bool"), ("permissions", "json"),
         ("reason", "text"), ("execution", "int"), ("at", "datetime"), ("tx", "int")],
        ["id"], [["tx"], ["principal"], ["execution"]],
    ),
    "ledger_lineage": (
        [("id", "int"), ("box", "text"), ("parent", "text"), ("snapshot", "text"), ("branch", "int"), ("execution", "int"),
         ("created", "datetime"), ("tx", "int")],
        ["id"], [["tx"], ["box"], ["parent"]],
    ),
    "ledger_lease": ([("name", "text"), ("holder", "text"), ("until", "datetime"), ("value", "text")], ["name"], []),
}  # fmt: skip
FACTS = (
    "ledger_execution",
    "ledger_outcome",
    "ledger_step",
    "ledger_box",
    "ledger_snapshot",
    "ledger_key",
    "ledger_prune",
    "ledger_call",
    "ledger_usage",
    "ledger_decision",
    "ledger_lineage",
)
PASSING = ("ledger_lease",)  # who is at work on what now: no fact, not in a backup, may be emptied at any time


class Stale(Exception):
    """Raised by a reader whose views were made before the last change of schema or policy; make it anew."""


class Session(Protocol):
    """Statements in one transaction. SQL is written with ? for parameters; values are in stored form."""

    clock: tuple[Any, ...] | None  # of a write transaction: the row it locked

    def all(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...
    def one(self, sql: str, params: Sequence[Any] = ()) -> tuple[Any, ...] | None: ...
    def run(self, sql: str, params: Sequence[Any] = ()) -> None: ...
    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None: ...
    def fill(self, table: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> None:
        """Add many rows: `columns` are names and column types."""

    def rewrite(self, table: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> None:
        """Set columns (names and column types) of many rows: each is its new values, then its id."""

    def stream(self, sql: str, params: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]: ...
    def forget(self, store: str, number: int) -> None: ...


class Engine(Protocol):
    """A database that holds a layer."""

    location: str
    settings: Settings

    @property
    def dialect(self) -> Literal["sqlite", "postgres"]: ...
    @property
    def schema_prefix(self) -> str:
        """What stands before a table's name."""

    @property
    def index_prefix(self) -> str:
        """What stands before the table's name in CREATE INDEX."""

    @property
    def null_tx(self) -> str:
        """A null of a tx's type."""

    @property
    def barrier(self) -> str:
        """What ends a view that hides rows, so that no condition is evaluated on them."""

    @property
    def reads_ahead(self) -> bool:
        """Whether `begin` can ask for rows in the same round trip."""

    @property
    def address(self) -> str:
        """What opens it again, a password included: not for people's eyes."""

    # Connections and transactions

    def exists(self) -> bool: ...
    def create(self) -> bool:
        """Make the database if it is not there; False when it was."""

    def starting(self) -> AbstractContextManager[None]:
        """Keep others from making the same layer at the same time."""

    def has_table(self, session: Session, name: str) -> bool: ...
    def begin(self, reads: Sequence[tuple[str, tuple[Any, ...]]] = (), new: bool = False) -> Session:
        """Start the one write transaction and lock the clock (a `new` layer has none yet); `reads` will be asked for.

        Waits for another writer, then raises Unavailable.
        """

    def commit(self, session: Session) -> None: ...
    def rollback(self) -> None: ...
    def reading(self) -> AbstractContextManager[Session]:
        """One consistent snapshot to read internally; no guard, no grants."""

    def snapshot(self) -> AbstractContextManager[Session]:
        """The same for a whole block: every `reading` of this thread within it sees this one snapshot."""

    def translating(self) -> AbstractContextManager[None]:
        """The engine's errors as ours."""

    def close(self) -> None: ...

    # Types and tables

    def column(self, kind: str) -> str:
        """The column type for a field type."""

    def collate(self, kind: str) -> str:
        """What stands between a column and a comparison, so that equal values compare equal."""

    def portable(self, expression: str, kind: str) -> str:
        """SQL that gives a native column in stored form."""

    def native(self, kind: str, stored: Any) -> Any:
        """A stored value as a parameter for a native column."""

    def shown(self, expression: str, kind: str) -> str:
        """SQL for a column as people's queries see it."""

    def hex(self, expression: str) -> str: ...
    def converted(self, expression: str, old: str, new: str) -> str:
        """SQL that turns a value of one field type into another, null where it can't."""

    def ledger_tables(self) -> list[str]:
        """Statements that make the tables every layer has."""

    def tables(self, store: str, columns: Sequence[tuple[str, str]]) -> list[str]:
        """Statements that make an entity's three tables and triggers."""

    def triggers(self, store: str, columns: Sequence[str]) -> list[str]:
        """Statements that (re)make an entity's triggers after its columns changed."""

    def columns(self, session: Session, table: str) -> list[tuple[str, str]]:
        """The columns of a table with the type in which `portable` gives them."""

    # What verify asks

    def check(self) -> list[str]:
        """What the engine itself says is wrong with its files."""

    def statements(self, session: Session) -> dict[str, str]:
        """What makes the tables, indexes and triggers as they are now, by name."""

    def same_statement(self, there: str, wanted: str) -> bool: ...
    def structure(self, there: Mapping[str, str], store: str, columns: Sequence[tuple[str, str]]) -> Iterator[str]:
        """What is wrong with how an entity's tables are made."""

    def swift(self, epoch: int, table: Any, changed: Sequence[tuple[str, str]]) -> Callable[..., int] | None:
        """A shortcut for an update of main's row that nothing else depends on, where round trips are dear."""

    def strays(self, session: Session, known: set[str], stores: Sequence[str]) -> Iterator[str]:
        """What is there beside the known tables and triggers and those of the entities."""

    # Leases: who is at work on what. Not part of the ledger; by the database's clock; no writer's lock is taken.

    def lease(self, name: str, holder: str, seconds: float, value: str | None = None) -> bool:
        """Take a lease that is free or over, or renew one's own (its value stays unless one is given); False: another holds it."""

    def release(self, name: str, holder: str) -> None:
        """Give a lease back; one that is another's by now is left alone."""

    def leases(self, prefix: str = "") -> list[Lease]:
        """The leases that hold now whose names begin so, by name."""

    def claim(self, names: Sequence[str], holder: str, seconds: float) -> list[str]:
        """Those of `names` that were free or over and are this holder's now; those somebody has, itself included, are not."""

    # Content and queries

    def put_blob(self, digest: str, data: bytes) -> None: ...
    def get_blob(self, digest: str) -> bytes | None: ...
    def has_blob(self, digest: str) -> bool: ...
    def reader(self, source: Any) -> Any:
        """A guarded connection for the names of a `reads.Source`."""

    def inside(
        self, tx: Any, sql: str, params: Any, deadline: float, limit: int, narrow: Any = None, branch: str | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """A guarded query within the write transaction, which sees what it has written: on its branch, or another."""


def marks(count: int) -> str:
    return ", ".join("?" * count)


@contextmanager
def making(engine: Engine) -> Iterator[Session]:
    """The transaction that makes a layer: committed at the end, rolled back by an exception."""
    session = engine.begin(new=True)
    try:
        yield session
        engine.commit(session)
    except BaseException:
        engine.rollback()
        raise
