"""Tables: the stored rows of one entity, written and read by column; main's head, or a branch's own rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

from .chain import image
from .engine import LIVE, Engine, Session, marks
from .schema import MAIN, Entity, Field, column_number
from .values import Stored, convert
from .views import Chain, arm_count, arms

CHUNK = 500  # rows read with one statement
SCANNED = 5000  # rows of a scan that are held at once


@dataclass(slots=True)
class Row:
    """A stored row: its version and one value for each column of its table."""

    version: int
    values: list[Stored]


class Table:
    """The physical side of an entity: columns of every branch, in the order of their numbers."""

    def __init__(self, engine: Engine, store: str, columns: Sequence[tuple[str, str]]) -> None:
        self.engine, self.store = engine, store
        self.columns = sorted(columns, key=lambda c: column_number(c[0]))
        self.index = {name: place for place, (name, _) in enumerate(self.columns)}
        self.prefixes = [f"{column_number(name)}:" for name, _ in self.columns]
        self.kinds = [kind for _, kind in self.columns]
        self._sql: dict[Any, str] = {}

    def image(self, values: Sequence[Stored]) -> bytes:
        return image(self.prefixes, values)

    @cached_property
    def portable(self) -> list[str]:
        return [f"{self.engine.portable(f'x.{name}', kind)} as {name}" for name, kind in self.columns]

    @cached_property
    def plain(self) -> bool:
        """Whether stored values are parameters as they are."""
        return all(self.engine.native(kind, 1) == 1 and type(self.engine.native(kind, 1)) is int for kind in self.kinds)

    def natives(self, values: Sequence[Stored]) -> list[Any]:
        if self.plain:
            return list(values)
        return [self.engine.native(kind, value) for kind, value in zip(self.kinds, values, strict=True)]

    # Reading

    def get(self, session: Session, chain: Chain, number: int) -> Row | None:
        """The row as a chain sees it."""
        key = ("get", chain)
        sql = self._sql.get(key)
        if sql is None:
            sql = arms(self.engine, self.store, chain, self.portable, version=True, where=" and x.id = ?")
            if len(self._sql) < 500:
                self._sql[key] = sql
        found = session.one(sql, (number,) * arm_count(chain))
        return None if found is None else Row(found[-1], list(found[1:-1]))

    def get_many(self, session: Session, chain: Chain, numbers: Sequence[int]) -> dict[int, Row]:
        """Rows by id as a chain sees them; those that are not there are left out."""
        found: dict[int, Row] = {}
        for start in range(0, len(numbers), CHUNK):
            listed = ", ".join(map(str, numbers[start : start + CHUNK]))
            sql = arms(self.engine, self.store, chain, self.portable, version=True, where=f" and x.id in ({listed})")
            found.update((row[0], Row(row[-1], list(row[1:-1]))) for row in session.all(sql))
        return found

    def scan(self, session: Session, chain: Chain, where: str = "") -> Iterator[tuple[int, Row]]:
        """All rows as a chain sees them, by id, in pieces: who reads may change those it has got."""
        numbers = sorted(row[0] for row in session.all(arms(self.engine, self.store, chain, [], where=where)))
        sql = arms(
            self.engine, self.store, chain, self.portable, version=True, where=f" and x.id >= ? and x.id <= ?{where}"
        )
        for start in range(0, len(numbers), SCANNED):
            part = numbers[start : start + SCANNED]
            for row in sorted(session.all(sql, (part[0], part[-1]) * arm_count(chain)), key=itemgetter(0)):
                yield row[0], Row(row[-1], list(row[1:-1]))

    # Writing

    def insert(self, session: Session, number: int, tx: int, values: Sequence[Stored]) -> None:
        sql = self._sql.get("insert")
        if sql is None:
            names = "".join(f", {name}" for name in self.index)
            sql = self._sql["insert"] = (
                f"insert into {self.engine.schema_prefix}{self.store}(id, _tx{names}) values ({marks(len(self.index) + 2)})"
            )
        session.run(sql, [number, tx, *self.natives(values)])

    def update(self, session: Session, number: int, tx: int, places: tuple[int, ...], values: Sequence[Stored]) -> None:
        """Set the columns at `places` of main's row to what `values` (a whole row) has there."""
        sql = self._sql.get(places)
        if sql is None:
            sets = "".join(f"{self.columns[place][0]} = ?, " for place in places)
            sql = self._sql[places] = f"update {self.engine.schema_prefix}{self.store} set {sets}_tx = ? where id = ?"
        native = self.engine.native
        session.run(sql, [*(native(self.kinds[place], values[place]) for place in places), tx, number])

    def update_many(
        self, session: Session, tx: int, places: tuple[int, ...], rows: Sequence[tuple[int, Sequence[Stored]]]
    ) -> None:
        """`update` of many rows, each its id and a whole row."""
        native, engine = self.engine.native, self.engine
        named = [(self.columns[place][0], engine.column(self.kinds[place])) for place in places]
        session.rewrite(
            f"{engine.schema_prefix}{self.store}",
            [*named, ("_tx", engine.column("int"))],
            [(*(native(self.kinds[p], values[p]) for p in places), tx, number) for number, values in rows],
        )

    def put_many(
        self,
        session: Session,
        branch: int,
        tx: int,
        rows: Sequence[tuple[int, Sequence[Stored]]],
        again: Collection[int],
    ) -> None:
        """`put` of many rows, of which this tx has written some before."""
        at, store = self.engine.schema_prefix, self.store
        for numbers, sql in (
            ([n for n, _ in rows if n in again], f"delete from {at}{store}__d where tx_from = {tx}"),
            ([n for n, _ in rows if n not in again], f"update {at}{store}__d set tx_to = {tx} where tx_to = {LIVE}"),
        ):
            if numbers:
                session.run(f"{sql} and branch = {branch} and id in ({', '.join(map(str, numbers))})")
        fixed = [(name, self.engine.column("int")) for name in ("branch", "id", "tx_from", "tx_to", "del")]
        session.fill(
            f"{at}{store}__d",
            [*fixed, *((name, self.engine.column(kind)) for name, kind in self.columns)],
            [(branch, number, tx, LIVE, 0, *self.natives(values)) for number, values in rows],
        )

    def delete(self, session: Session, number: int, tx: int) -> None:
        session.run(
            f"update {self.engine.schema_prefix}ledger_clock set tx = ?", (tx,)
        )  # the trigger closes the version with it
        session.run(f"delete from {self.engine.schema_prefix}{self.store} where id = ?", (number,))

    def put(
        self, session: Session, branch: int, number: int, tx: int, values: Sequence[Stored] | None, again: bool
    ) -> None:
        """A branch's own version of a row (None: deleted); `again` when this tx has written it before."""
        at, store = self.engine.schema_prefix, self.store
        if again:
            session.run(f"delete from {at}{store}__d where branch = ? and id = ? and tx_from = ?", (branch, number, tx))
        else:
            session.run(
                f"update {at}{store}__d set tx_to = ? where branch = ? and id = ? and tx_to = {LIVE}",
                (tx, branch, number),
            )
        kept = [None] * len(self.kinds) if values is None else self.natives(values)
        session.run(self._put(), [branch, number, tx, LIVE, int(values is None), *kept])

    def _put(self) -> str:
        sql = self._sql.get("put")
        if sql is None:
            names, into = "".join(f", {name}" for name in self.index), f"{self.engine.schema_prefix}{self.store}__d"
            sql = self._sql["put"] = (
                f"insert into {into}(branch, id, tx_from, tx_to, del{names}) values ({marks(len(self.index) + 5)})"
            )
        return sql

    def forget(self, session: Session, branch: int, number: int, tx: int) -> None:
        """Remove a row this tx made: it was never there."""
        at, store = self.engine.schema_prefix, self.store
        if branch == MAIN:
            self.delete(session, number, tx)
        else:
            session.run(f"delete from {at}{store}__d where branch = ? and id = ? and tx_from = ?", (branch, number, tx))

    # Fields

    def value(self, f: Field, values: Sequence[Stored]) -> Stored:
        """A field's value in a row, converted where a retype is not backfilled."""
        found = values[self.index[f.store]]
        if found is None and f.was:
            return convert(f.was["type"], f.type, values[self.index[f.was["store"]]])
        return found

    def set(self, f: Field, values: list[Stored], stored: Stored) -> tuple[int, ...]:
        """Put a field's value into a row; the columns that changed."""
        place = self.index[f.store]
        values[place] = stored
        if f.was:
            old = self.index[f.was["store"]]
            values[old] = None
            return (place, old)
        return (place,)

    def named(self, entity: Entity, values: Sequence[Stored], number: int) -> dict[str, Stored]:
        """A row under its field names."""
        return {"id": number, **{f.name: self.value(f, values) for f in entity.fields}}
