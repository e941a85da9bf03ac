"""Migrate: a layer of an earlier format becomes one of today's when it is opened: in one tx, and its history stays."""

from __future__ import annotations

from ..errors import Incompatible
from .engine import Session
from .evolve import ENTITY, ensure_indexes, new_columns
from .genesis import put, stored_format
from .ledger import MAIN_CHAIN, Ledger, Work
from .schema import FORMAT, OWNER, SYSTEM, system_rows
from .verify import named


def migrate(ledger: Ledger) -> None:
    """Bring the layer to this release's format, once, whoever comes first; a crash leaves it as it was."""
    engine = ledger.engine
    with engine.starting():
        with engine.reading() as session:
            layer_id, found = stored_format(engine, session)
        if found >= FORMAT:
            return  # another process was here
        execution = ledger.open(OWNER, kind="migration")
        try:
            with ledger.work() as work:
                _refuse_taken_names(work)
                _make_tables(work)
                tx = work.tx(execution, reason=f"layer {layer_id} moves to format {FORMAT}")
                for name, rows in zip(("entity", "field"), system_rows(), strict=True):
                    there = _ids(work.session, f"{engine.schema_prefix}{SYSTEM.by_name[name].store}")
                    for row in rows:
                        if row["id"] not in there:
                            put(tx, name, row)
                work.session.run(
                    f"update {engine.schema_prefix}meta set value = ? where key = 'format'", (str(FORMAT),)
                )
                tx.finish(end="done")
        finally:
            execution.open = False
            ledger.executions.discard(execution)


def _ids(session: Session, table: str) -> set[int]:
    return {number for (number,) in session.all(f"select id from {table}")}


def _refuse_taken_names(work: Work) -> None:
    """Names this format adds must be free on main and on every open branch."""
    catalog, session = work.catalog, work.session
    for branch in catalog.rows(session, SYSTEM.by_name["branch"], MAIN_CHAIN):
        if branch["status"] != "open":
            continue
        chain = catalog.chain(session, branch["id"])
        for entity in catalog.rows(session, ENTITY, chain):
            if not entity["system"] and entity["name"] in SYSTEM.by_name:
                raise Incompatible(
                    f"format {FORMAT} needs the name {entity['name']!r}, which is an entity on branch {branch['name']!r}",
                    hint="rename it with the release of livinglayer that wrote the layer, then open it again",
                )


def _make_tables(work: Work) -> None:
    """Every table, column, trigger and index of today's that is not there."""
    engine, session = work.engine, work.session
    there = set(engine.statements(session))
    for sql in engine.ledger_tables():
        if named(sql) not in there:
            session.run(sql)
    for entity in SYSTEM.entities:
        if entity.kind != "entity":
            continue
        if entity.store not in there:
            for sql in engine.tables(entity.store, [(f.store, f.type) for f in entity.fields]):
                session.run(sql)
        else:
            columns = {name for name, _ in engine.columns(session, entity.store)}
            missing = [(f.store, f.type) for f in entity.fields if f.store not in columns]
            if missing:
                new_columns(work, entity.store, missing)
        ensure_indexes(engine, session, entity)
