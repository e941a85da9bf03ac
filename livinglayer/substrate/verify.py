"""Verify: read everything again, compute every hash anew, and name the first tx that is not what was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ..errors import Corrupt, LayerError
from .blobs import referenced
from .catalog import Catalog
from .chain import GENESIS, GONE, clock_seal, facts_digest, tx_hash
from .engine import FACTS, LEDGER, LIVE, Session
from .schema import FIRST_ID, MAIN, SYSTEM
from .tables import Table

PROBLEMS = 100


@dataclass
class Report:
    """The answer of verify: truthy when everything is as it was written."""

    ok: bool = True
    tx: int = 0
    rows: int = 0
    problems: list[tuple[int | None, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.ok

    def add(self, tx: int | None, text: str) -> None:
        self.ok = False
        if len(self.problems) < PROBLEMS:
            self.problems.append((tx, text))


def verify(catalog: Catalog) -> Report:
    """Reread and recompute the whole layer."""
    report = Report()
    engine = catalog.engine
    for text in engine.check():
        report.add(None, text)
    try:
        with engine.reading() as session:
            _verify(catalog, session, report)
    except Corrupt as error:
        report.add(None, error.message)
    except LayerError:
        raise
    except Exception as error:  # damaged content can break anything that reads it: that is a finding, not a crash
        report.add(None, f"the layer can't be read: {type(error).__name__}: {error}")
    report.problems.sort(key=lambda p: (p[0] is None, p[0] or 0))
    return report


def _verify(catalog: Catalog, session: Session, report: Report) -> None:
    engine = catalog.engine
    at = engine.schema_prefix
    clocks = session.all(
        f"select tx, next_id, epoch, {engine.portable('at', 'datetime')}, hash, seal, one from {at}ledger_clock"
    )
    if not clocks:
        report.add(None, "the layer has no clock")
        return
    clock = clocks[0]
    if len(clocks) > 1 or clock[6] != 1:
        report.add(None, "the clock is not what was written")
    if clock_seal(clock[0], clock[1], clock[2], clock[3], bytes(clock[4])) != bytes(clock[5]):
        report.add(None, "the clock is not what was written")
    for problem in _structure(catalog, session):
        report.add(None, problem)
    for problem in _meta(catalog, session):
        report.add(None, problem)
    horizon = (session.one(f"select max(horizon) from {at}ledger_prune") or (None,))[0] or 0
    expected = _changes(engine, session)
    facts = _facts(engine, session)
    before, last = GENESIS, 0
    pending_facts = next(facts, None)
    pending = next(expected, None)
    columns = f"tx, branch, {engine.portable('at', 'datetime')}, principal, execution, cause, reason, merged_from, hash"
    for row in session.stream(f"select {columns} from {at}ledger_tx order by tx"):
        number = row[0]
        if number != last + 1:
            report.add(last + 1, f"tx {last + 1} is missing")
        own_changes, own_facts = [], []
        while pending is not None and pending[1] < number:
            report.add(pending[1], f"a change of tx {pending[1]}, which is not there")
            pending = next(expected, None)
        while pending is not None and pending[1] == number:
            if pending[0] != row[1]:
                report.add(number, f"tx {number} changed {pending[3]} on another branch than its own")
            own_changes.append((pending[2], pending[3], pending[4], bytes(pending[5])))
            pending = next(expected, None)
        while pending_facts is not None and pending_facts[0] < number:
            report.add(pending_facts[0], f"a fact of tx {pending_facts[0]}, which is not there")
            pending_facts = next(facts, None)
        while pending_facts is not None and pending_facts[0] == number:
            own_facts.append(pending_facts[1])
            pending_facts = next(facts, None)
        digest = tx_hash(before, row[:8], sorted(own_changes), facts_digest(own_facts))
        if digest != bytes(row[8]):
            report.add(number, f"tx {number} is not what was written")
        before, last = bytes(row[8]), number  # go on from what is stored, so that one bad tx is named once
        report.tx = last
    if pending is not None:
        report.add(pending[1], f"a change of tx {pending[1]}, which is not there")
    if pending_facts is not None:
        report.add(pending_facts[0], f"a fact of tx {pending_facts[0]}, which is not there")
    if last != clock[0] or before != bytes(clock[4]):
        report.add(min(last, clock[0]) + 1, f"the clock is at tx {clock[0]}, the ledger at {last}")
    _images(catalog, session, report, horizon)
    for digest_text in referenced(catalog, session):
        data = engine.get_blob(digest_text)
        if data is None:
            report.add(None, f"the content of file {digest_text} is missing")
        elif sha256(data).hexdigest() != digest_text:
            report.add(None, f"the content of file {digest_text} is not what was written")


def _changes(engine: Any, session: Session) -> Iterator[tuple[Any, ...]]:
    return session.stream(
        f"select branch, tx, entity, id, op, image from {engine.schema_prefix}ledger_change order by tx, entity, id"
    )


def _facts(engine: Any, session: Session) -> Iterator[tuple[int, tuple[str, list[Any]]]]:
    """Ledger rows in the order of their tx, from all tables at once."""
    found: list[tuple[int, tuple[str, list[Any]]]] = []
    for table in FACTS:
        columns = LEDGER[table][0]
        shown = ", ".join(engine.portable(name, kind) for name, kind in columns)
        place = [name for name, _ in columns].index("tx")
        found += [
            (row[place], (table, list(row)))
            for row in session.all(f"select {shown} from {engine.schema_prefix}{table}")
        ]
    return iter(sorted(found, key=lambda f: f[0]))


def _stores(catalog: Catalog, session: Session) -> dict[int, str]:
    """The table set of every entity there ever was, on any branch."""
    engine, entity = catalog.engine, SYSTEM.by_name["entity"]
    at, store = engine.schema_prefix, entity.by_name["store"].store
    found: dict[int, str] = {e.id: e.store for e in SYSTEM.entities}
    for table in (entity.store, f"{entity.store}__h", f"{entity.store}__d"):
        for number, name in session.all(f"select id, {store} from {at}{table} where {store} is not null"):
            found[number] = name
    kinds = {e.id for e in SYSTEM.entities if e.kind == "ledger"}
    return {number: name for number, name in found.items() if number not in kinds}


def _images(catalog: Catalog, session: Session, report: Report, horizon: int) -> None:
    """Every stored version has the image its change recorded, and every change its version."""
    engine = catalog.engine
    at = engine.schema_prefix
    stores = _stores(catalog, session)
    for number, first in session.all(f"select entity, min(tx) from {at}ledger_change group by entity"):
        if number not in stores:
            report.add(first, f"tx {first}: it changed entity {number}, of which nothing is left")
    for number, store in sorted(stores.items()):
        table = Table(engine, store, [c for c in engine.columns(session, store) if c[0] not in ("id", "_tx")])
        picked = "".join(f", {column}" for column in table.portable)
        arms = [
            f"select {MAIN}, x.id, x._tx, {LIVE}, 0{picked} from {at}{store} x",
            f"select {MAIN}, x.id, x.tx_from, x.tx_to, 0{picked} from {at}{store}__h x",
            f"select x.branch, x.id, x.tx_from, x.tx_to, x.del{picked} from {at}{store}__d x",
        ]
        recorded = session.stream(
            f"select branch, id, tx, op, image from {at}ledger_change where entity = {number} order by branch, id, tx"
        )
        versions = session.stream(" union all ".join(arms) + " order by 1, 2, 3")
        version = next(versions, None)
        previous: tuple[int, int] | None = None
        tail: int | None = None
        for branch, row_id, tx, op, image in recorded:
            while version is not None and version[:3] < (branch, row_id, tx):
                report.add(version[2], f"tx {version[2]}: a version of {store}/{version[1]} that nothing recorded")
                version = next(versions, None)
            if previous == (branch, row_id) and tail is not None and tail != tx:
                report.add(tx, f"tx {tx}: the version of {store}/{row_id} before it does not end there")
            previous = (branch, row_id)
            here = version is not None and version[:3] == (branch, row_id, tx)
            if op == "d" and branch == MAIN:
                tail = None
                if here:
                    report.add(tx, f"tx {tx}: {store}/{row_id} was deleted and is there")
                    version = next(versions, None)
                continue
            if not here:
                tail = None
                if not (
                    branch == MAIN and tx <= horizon and _superseded(session, at, number, branch, row_id, tx, horizon)
                ):
                    report.add(tx, f"tx {tx}: the version of {store}/{row_id} it wrote is missing")
                continue
            assert version is not None
            report.rows += 1
            values = list(version[5:])
            wanted = GONE if version[4] else table.image(values)
            if (
                wanted != bytes(image)
                or bool(version[4]) != (op == "d")
                or (version[4] and any(v is not None for v in values))
            ):
                report.add(tx, f"tx {tx}: {store}/{row_id} is not what was written")
            tail = version[3]
            if version[3] != LIVE and version[3] <= tx:
                report.add(tx, f"tx {tx}: the version of {store}/{row_id} ends before it begins")
            if version[3] != LIVE and not session_has(session, at, branch, version[3], number, row_id):
                report.add(
                    version[3], f"tx {version[3]}: it is said to end a version of {store}/{row_id} and did not touch it"
                )
            version = next(versions, None)
        while version is not None:
            report.add(version[2], f"tx {version[2]}: a version of {store}/{version[1]} that nothing recorded")
            version = next(versions, None)


def session_has(session: Session, at: str, branch: int, tx: int, entity: int, row_id: int) -> bool:
    return (
        session.one(
            f"select 1 from {at}ledger_change where branch = ? and tx = ? and entity = ? and id = ?",
            (branch, tx, entity, row_id),
        )
        is not None
    )


def _superseded(session: Session, at: str, entity: int, branch: int, row_id: int, tx: int, horizon: int) -> bool:
    """Whether a missing version may have been pruned: a later change of the row lies before the horizon too."""
    row = session.one(
        f"select min(tx) from {at}ledger_change where branch = ? and entity = ? and id = ? and tx > ?",
        (branch, entity, row_id, tx),
    )
    return row is not None and row[0] is not None and row[0] <= horizon


def _structure(catalog: Catalog, session: Session) -> Iterator[str]:
    """Tables, indexes and triggers are those the schema asks for."""
    engine = catalog.engine
    wanted = {named(sql): sql for sql in engine.ledger_tables()}
    there = engine.statements(session)
    kinds = _kinds(catalog, session)
    for store in _stores(catalog, session).values():
        columns = [c for c in engine.columns(session, store) if c[0] not in ("id", "_tx")]
        for name, _ in columns:
            if name not in kinds:
                yield f"column {name} of {store} belongs to no field"
        known = [(name, kinds.get(name, "text")) for name, _ in columns]
        yield from engine.structure(there, store, known)
        for sql in engine.triggers(store, [name for name, _ in columns]):
            if sql.startswith("create"):
                wanted[named(sql)] = sql
    yield from engine.strays(session, set(wanted), list(_stores(catalog, session).values()))
    for name, sql in wanted.items():
        if there.get(name) is None:
            yield f"{name} is missing from the database"
        elif not engine.same_statement(there[name], sql):
            yield f"{name} is not made as it should be"


def _kinds(catalog: Catalog, session: Session) -> dict[str, str]:
    """The type of every column a field ever had, on any branch."""
    engine, field = catalog.engine, SYSTEM.by_name["field"]
    store, kind = field.by_name["store"].store, field.by_name["type"].store
    found = {f.store: f.type for e in SYSTEM.entities for f in e.fields}
    for suffix in ("", "__h", "__d"):
        found |= dict(
            session.all(
                f"select {store}, {kind} from {engine.schema_prefix}{field.store}{suffix} where {store} is not null"
            )
        )
    return found


def named(sql: str) -> str:
    """What a statement makes."""
    words = sql.replace("(", " ").split()
    return words[2].rsplit(".", 1)[-1]


def _meta(catalog: Catalog, session: Session) -> Iterator[str]:
    """The layer's own words are those of the txs that wrote the system's entities: its first, and migrations."""
    at = catalog.engine.schema_prefix
    rows = dict(session.all(f"select key, value from {at}meta"))
    if set(rows) - {"format", "layer", "reader_key"}:
        yield "meta is not what was written"
    said = [
        reason
        for (reason,) in session.all(
            f"select t.reason from {at}ledger_tx t where t.tx in (select c.tx from {at}ledger_change c"
            f" where c.branch = {MAIN} and c.entity = {SYSTEM.by_name['entity'].id} and c.id < {FIRST_ID}) order by t.tx"
        )
    ]
    if not said:
        return
    known = [
        f"layer {rows.get('layer')} begins in format ",
        *[f"layer {rows.get('layer')} moves to format "] * (len(said) - 1),
    ]
    if (
        not all((reason or "").startswith(words) for reason, words in zip(said, known, strict=True))
        or said[-1] != f"{known[-1]}{rows.get('format')}"
    ):
        yield "meta is not what was written"
