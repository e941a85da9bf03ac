"""What an engine is: the differences between SQLite and PostgreSQL live behind this, in sqlite.py and postgres.py."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

LIVE = 2**63 - 1  # tx_to of a version that still holds

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
        [("id", "int"), ("principal", "int"), ("parent", "int"), ("box", "text"), ("kind", "text"), ("scope", "text"),
         ("reason", "text"), ("trace", "text"), ("started", "datetime"), ("tx", "int")],
        ["id"], [["tx"], ["parent"]],
    ),
    "ledger_outcome": (
        [("execution", "int"), ("status", "text"), ("finished", "datetime"), ("result", "text"), ("tx", "int")],
        ["execution"], [["tx"]],
    ),
    "ledger_step": (
        [("execution", "int"), ("n", "int"), ("kind", "text"), ("detail", "text"), ("at", "datetime"), ("tx", "int")],
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
}  # fmt: skip
FACTS = ("ledger_execution", "ledger_outcome", "ledger_step", "ledger_box", "ledger_snapshot", "ledger_key", "ledger_prune")


class Session(Protocol):
    """Statements in one transaction. SQL is written with ? for parameters; values are in stored form."""

    clock: tuple[Any, ...] | None  # of a write transaction: the row it locked

    def all(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...
    def one(self, sql: str, params: Sequence[Any] = ()) -> tuple[Any, ...] | None: ...
    def run(self, sql: str, params: Sequence[Any] = ()) -> None: ...
    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None: ...
    def stream(self, sql: str, params: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]: ...
    def forget(self, store: str, number: int) -> None: ...


class Engine(Protocol):
    """A database that holds a layer."""

    dialect: Literal["sqlite", "postgres"]
    location: str

    def begin(self, reads: Sequence[tuple[str, tuple[Any, ...]]] = (), new: bool = False) -> Session:
        """Start the one write transaction and lock the clock (a `new` layer has none yet); `reads` will be asked for.

        Waits for another writer, then raises Unavailable.
        """

    def commit(self, session: Session) -> None: ...
    def rollback(self) -> None: ...

    def reading(self) -> AbstractContextManager[Session]:
        """One consistent snapshot to read internally; no guard, no grants."""

    def create(self) -> bool:
        """Make the database if it is not there; False when it was."""

    def column(self, kind: str) -> str:
        """The column type for a field type."""

    def portable(self, expression: str, kind: str) -> str:
        """SQL that gives a native column in stored form."""

    def native(self, kind: str, stored: Any) -> Any:
        """A stored value as a parameter for a native column."""

    def shown(self, expression: str, kind: str) -> str:
        """SQL for a column as people's queries see it."""

    def converted(self, expression: str, old: str, new: str) -> str:
        """SQL that turns a value of one field type into another, null where it can't."""

    def tables(self, store: str, columns: Sequence[tuple[str, str]]) -> list[str]:
        """Statements that make an entity's three tables and triggers."""

    def triggers(self, store: str, columns: Sequence[str]) -> list[str]:
        """Statements that (re)make an entity's triggers after its columns changed."""

    def columns(self, session: Session, table: str) -> list[tuple[str, str]]:
        """The columns of a table with the type in which `portable` gives them."""

    def put_blob(self, digest: str, data: bytes) -> None: ...
    def get_blob(self, digest: str) -> bytes | None: ...
    def list_blobs(self) -> Iterator[str]: ...
    def check(self) -> list[str]:
        """What the engine itself says is wrong with its files."""

    def close(self) -> None: ...


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
