"""Backup and restore: a backup is itself an embedded layer, from either engine and for either, chain included."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import Conflict, Corrupt, NotFound
from ..settings import Settings
from .blobs import referenced
from .catalog import Catalog
from .engine import LEDGER, PASSING, Engine, Session, making, marks
from .evolve import ensure_indexes
from .genesis import identify
from .ledger import MAIN_CHAIN
from .sqlite import SqliteEngine
from .verify import _stores

BATCH = 2000


def backup(engine: Engine, destination: Path, settings: Settings) -> Path:
    """Copy a layer as of now into `destination`/.layer; refuses to overwrite."""
    target = SqliteEngine(destination / ".layer", settings)
    if target.exists():
        raise Conflict(f"there is something at {destination} already", hint="back up into a new directory")
    try:
        if isinstance(engine, SqliteEngine):
            target.directory.mkdir(parents=True, mode=0o700, exist_ok=True)
            engine.copy(target.path)
        else:
            with engine.reading() as session:
                transfer(engine, session, target)
        with target.reading() as session:
            digests = list(referenced(Catalog(target), session))
        _copy_blobs(engine, target, digests)
    except BaseException:
        target.close()
        shutil.rmtree(target.directory, ignore_errors=True)
        raise
    target.close()
    return destination


def restore(source: Engine, target: Engine) -> str:
    """Make a layer from a backup; returns its id. Refuses where one is already."""
    if not source.exists():
        raise NotFound(f"there is no backup at {source.location}")
    if target.exists():
        with target.reading() as session:
            if target.has_table(session, "meta"):
                raise Conflict(f"there is a layer at {target.location} already", hint="restore to a new place")
    try:
        with source.reading() as session:
            layer_id = identify(source, session)
            if isinstance(source, SqliteEngine) and isinstance(target, SqliteEngine):
                target.directory.mkdir(parents=True, mode=0o700, exist_ok=True)
                target.path.unlink(missing_ok=True)
                source.copy(target.path)
                target.create()
            else:
                transfer(source, session, target)
            digests = list(referenced(Catalog(source), session))
        _copy_blobs(source, target, digests)
    finally:
        source.close()
    return layer_id


def _copy_blobs(source: Engine, target: Engine, digests: list[str]) -> None:
    for digest in digests:
        data = source.get_blob(digest)
        if data is None:
            raise Corrupt(f"the content of file {digest} is missing", hint="layer verify")
        target.put_blob(digest, data)


def transfer(source: Engine, session: Session, target: Engine) -> None:
    """Copy every table from one engine to another, values in stored form; a layer of an earlier format keeps it."""
    target.create()
    with making(target) as into:
        for sql in target.ledger_tables():
            into.run(sql)
        for name, (columns, _, _) in LEDGER.items():
            if name in PASSING or not source.has_table(session, name):
                continue
            _copy(
                source,
                session,
                target,
                into,
                name,
                list(columns),
                " where key <> 'reader_key'" if name == "meta" else "",
            )
        for store in _stores(Catalog(source), session).values():
            if not source.has_table(session, store):
                continue
            columns = [c for c in source.columns(session, store) if c[0] not in ("id", "_tx")]
            for sql in target.tables(store, columns):
                into.run(sql)
            own = [("id", "int"), ("_tx", "int")]
            closed = [("id", "int"), ("tx_from", "int"), ("tx_to", "int")]
            touched = [("branch", "int"), *closed, ("del", "int")]
            for suffix, first in (("", own), ("__h", closed), ("__d", touched)):
                _copy(source, session, target, into, store + suffix, [*first, *columns])
        catalog = Catalog(target)
        for entity in catalog.schema(into, MAIN_CHAIN, ("restored",)).entities:
            if entity.kind == "entity" and target.has_table(into, entity.store):
                ensure_indexes(target, into, entity)


def _copy(
    source: Engine,
    session: Session,
    target: Engine,
    into: Session,
    table: str,
    columns: list[tuple[str, str]],
    where: str = "",
) -> None:
    shown = ", ".join(source.portable(name, kind) for name, kind in columns)
    names = ", ".join(name for name, _ in columns)
    sql = f"insert into {target.schema_prefix}{table}({names}) values ({marks(len(columns))})"
    kinds = [kind for _, kind in columns]
    batch: list[list[object]] = []
    for row in session.stream(f"select {shown} from {source.schema_prefix}{table}{where}"):
        batch.append([target.native(kind, value) for kind, value in zip(kinds, row, strict=True)])
        if len(batch) == BATCH:
            into.many(sql, batch)
            batch = []
    if batch:
        into.many(sql, batch)
