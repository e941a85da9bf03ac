"""Past: the versions of one row, from the newest to the oldest; each is found by key, however long the history is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .catalog import Catalog
from .engine import Session
from .schema import MAIN, Entity
from .tables import Table
from .values import Stored
from .views import Chain

INERT = frozenset({"description", "enabled"})  # fields that say nothing of what a row does
BATCHES = (8, 64, 500)  # versions read with one statement: most rows have few


@dataclass(frozen=True, slots=True)
class Version:
    """A row as one tx left it; without values the tx deleted it."""

    branch: int
    tx: int
    values: tuple[Stored, ...] | None


class Past:
    """Reads versions in one snapshot."""

    def __init__(self, catalog: Catalog, session: Session, epoch: Any) -> None:
        self.catalog, self.session, self.epoch = catalog, session, epoch
        self.at = catalog.engine.schema_prefix
        self._found: dict[Any, Version | None] = {}  # what main had: it does not change in a snapshot

    def table(self, entity: Entity) -> Table:
        return self.catalog.table(self.session, entity.store, self.epoch)

    def version(self, entity: Entity, number: int, chain: Chain) -> Version | None:
        """What a chain of branches sees of a row; None, or a version without values, when it is not there."""
        for level in chain[:-1]:
            before = None if level.cut is None else int(level.cut) + 1
            for found in self._own(entity, number, level.branch, before, 1):
                return found
        return self._main(entity, number, chain[-1].cut)

    def versions(self, entity: Entity, number: int, chain: Chain) -> Iterator[Version]:
        """What a chain sees of a row, and what it saw before, until the row was made or its past was pruned."""
        for level in chain[:-1]:
            before = None if level.cut is None else int(level.cut) + 1
            for size in _sizes():
                found = self._own(entity, number, level.branch, before, size)
                yield from found
                if len(found) < size:
                    break
                before = found[-1].tx
        last = self._of_main(entity, number, chain[-1].cut)
        if last is None:
            return
        yield last
        ends = last.tx
        for size in _sizes():
            found = self._closed(entity, number, ends, size)
            yield from found
            if len(found) < size:
                return
            ends = found[-1].tx

    def op(self, entity: Entity, number: int, version: Version) -> str | None:
        """What a version's tx did to the row: i, u or d."""
        row = self.session.one(
            f"select op from {self.at}ledger_change where branch = ? and tx = ? and entity = ? and id = ?",
            (version.branch, version.tx, entity.id, number),
        )
        return None if row is None else row[0]

    def _own(self, entity: Entity, number: int, branch: int, before: int | None, most: int) -> list[Version]:
        """A branch's own versions, the newest first."""
        table = self.table(entity)
        until = "" if before is None else " and x.tx_from < ?"
        rows = self.session.all(
            f"select x.tx_from, x.del{_columns(table)} from {self.at}{table.store}__d x"
            f" where x.branch = ? and x.id = ?{until} order by x.tx_from desc limit {most}",
            (branch, number) if before is None else (branch, number, before),
        )
        return [Version(branch, row[0], None if row[1] else tuple(row[2:])) for row in rows]

    def _of_main(self, entity: Entity, number: int, cut: Any) -> Version | None:
        """Main's version, or its deletion."""
        key = (entity.id, number, cut)
        if key not in self._found:
            self._found[key] = self._main(entity, number, cut) or self._deletion(entity, number, cut)
        return self._found[key]

    def _main(self, entity: Entity, number: int, cut: Any) -> Version | None:
        table = self.table(entity)
        columns, head, closed = _columns(table), f"{self.at}{table.store}", f"{self.at}{table.store}__h"
        if cut is None:
            row = self.session.one(f"select x._tx{columns} from {head} x where x.id = ?", (number,))
        else:
            row = self.session.one(
                f"select x._tx{columns} from {head} x where x.id = ? and x._tx <= ? union all"
                f" select x.tx_from{columns} from {closed} x where x.id = ? and x.tx_to > ? and x.tx_from <= ?",
                (number, cut, number, cut, cut),
            )
        return None if row is None else Version(MAIN, row[0], tuple(row[1:]))

    def _deletion(self, entity: Entity, number: int, cut: Any) -> Version | None:
        closed = f"{self.at}{self.table(entity).store}__h"
        within, params = ("", (number,)) if cut is None else (" and x.tx_to <= ?", (number, cut))
        row = self.session.one(f"select max(x.tx_to) from {closed} x where x.id = ?{within}", params)
        return None if row is None or row[0] is None else Version(MAIN, row[0], None)

    def _closed(self, entity: Entity, number: int, ends: int, most: int) -> list[Version]:
        """Main's versions before the one that began with a tx: each ended with the tx that began the next."""
        table = self.table(entity)
        closed = f"{self.at}{table.store}__h"
        rows = self.session.all(
            f"with recursive v(n, ends, began) as (select 1, h.tx_to, h.tx_from from {closed} h where h.tx_to = ? and h.id = ?"
            f" union all select v.n + 1, h.tx_to, h.tx_from from v join {closed} h on h.tx_to = v.began and h.id = ? where v.n < ?)"
            f" select x.tx_from{_columns(table)} from v join {closed} x on x.tx_to = v.ends and x.id = ? order by v.n",
            (ends, number, number, most, number),
        )
        return [Version(MAIN, row[0], tuple(row[1:])) for row in rows]


def _columns(table: Table) -> str:
    return "".join(f", {column}" for column in table.portable)


def _sizes() -> Iterator[int]:
    yield from BATCHES
    while True:
        yield BATCHES[-1]


def definer(
    catalog: Catalog, session: Session, epoch: int, entity: Entity, row: Mapping[str, Any], branch: str = "main"
) -> int:
    """With whose rights a row acts (a function, a projection, a trigger, …): whoever's tx gave it what it does.

    What an owner changed in it adds no rights to what somebody else wrote. 0, which is nobody, when two others wrote it
    or nobody knows who did.
    """
    past = Past(catalog, session, epoch)
    table = past.table(entity)
    wanted: dict[str, Stored] = {}
    wrote: dict[str, int] = {}
    fields = [f for f in entity.fields if f.name not in INERT]
    for version in past.versions(
        entity, row["id"], catalog.chain(session, catalog.branch(session, branch), row["_tx"])
    ):
        if version.values is None:
            break
        for f in list(fields):
            value = table.value(f, version.values)
            if wanted.setdefault(f.name, value) == value:
                wrote[f.name] = version.tx
            else:
                fields.remove(f)  # an older value: who gave the newer one is known
        if not fields:
            break
    who: dict[int, int] = {}
    for tx in set(wrote.values()):
        found = session.one(f"select principal from {past.at}ledger_tx where tx = ?", (tx,))
        if found is not None:
            who[found[0]] = max(tx, who.get(found[0], 0))
    others = sorted(each for each in who if not catalog.policy(session, each, epoch).sovereign())
    if len(others) > 1:
        return 0
    return others[0] if others else max(who, key=lambda each: who[each], default=0)
