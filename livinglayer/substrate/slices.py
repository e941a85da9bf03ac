"""Slices as files: rows of some entities, as one principal sees them at one moment, in a SQLite database of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import apsw

from ..errors import LimitExceeded
from .catalog import Catalog
from .narrow import canonical
from .reads import Reads, Source, clock, shows
from .values import parameter

KINDS = {"int": "INTEGER", "ref": "INTEGER", "bool": "INTEGER", "float": "REAL"}  # all else is text
ROWS = 1_000_000  # of one entity
LARGEST = 1 << 30  # bytes of a file


def write(
    path: Path, reads: Reads, narrow: Mapping[str, Any], principal: int, branch: str, about: Mapping[str, Any]
) -> int:
    """A file with a table for each entity of `narrow`, and `_slice`, which says what it is; the tx it shows."""
    columns, tx = _columns(reads.catalog, narrow, principal, branch)
    connection = apsw.Connection(str(path))
    try:
        run = connection.execute
        for statement in ("pragma journal_mode = off", "pragma synchronous = off", "begin"):
            list(run(statement))
        for entity, named in columns.items():
            run(f'create table "{entity}" ({", ".join(f"{chr(34)}{name}{chr(34)} {kind}" for name, kind in named)})')
            seconds = min(60.0, reads.settings.longest_seconds)
            rows, _ = reads.query_at(
                f"select * from {entity}", None, branch, tx, principal, seconds, ROWS, narrow=narrow
            )
            marks = ", ".join("?" * len(named))
            connection.executemany(
                f'insert into "{entity}" values ({marks})',
                ([parameter(row.get(name)) for name, _ in named] for row in rows),
            )
            if path.stat().st_size > LARGEST:
                raise LimitExceeded(f"the slice is larger than {LARGEST} bytes", hint="ask for fewer rows")
        told = {**about, "branch": branch, "tx": tx}
        run(f"create table _slice ({', '.join(told)})")
        run(f"insert into _slice values ({', '.join('?' * len(told))})", [parameter(value) for value in told.values()])
        run("commit")
    finally:
        connection.close()
    return tx


def _columns(
    catalog: Catalog, narrow: Mapping[str, Any], principal: int, branch: str
) -> tuple[dict[str, list[tuple[str, str]]], int]:
    """The columns a principal sees of each entity that it sees something of, the id first; and the last tx."""
    found: dict[str, list[tuple[str, str]]] = {}
    with catalog.engine.reading() as session:
        tx, epoch = clock(catalog.engine, session)
        policy = catalog.policy(session, principal, epoch)
        source = Source(catalog, session, catalog.branch(session, branch), None, policy, epoch, canonical(dict(narrow)))
        for name in sorted(narrow):
            if not source.visible(name):
                continue
            entity, part = source.schema.get(name), (source.parts or {})[name]
            rule = source._rule(entity)
            kept = [f for f in entity.fields if shows(rule, f.name) and (part.fields is None or f.name in part.fields)]
            first = [] if entity.kind == "ledger" else [("id", "INTEGER PRIMARY KEY")]
            found[name] = first + [(f.name, KINDS.get(f.type, "TEXT")) for f in kept]
    return found, tx
