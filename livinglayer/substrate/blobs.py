"""Blobs: content by its hash, for fields of type file and for steps of executions."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from .engine import marks
from .schema import SYSTEM, Schema
from .values import HASH

if TYPE_CHECKING:
    from .catalog import Catalog
    from .engine import Engine, Session

SENT = "content/"  # the key under which the ledger knows that a principal has sent a content


def sent(engine: Engine, session: Session, principals: Collection[int], digest: str) -> bool:
    """Whether one of these principals has sent a content."""
    # the digest too: an idempotency key that only reads like one of ours has that of its request
    sql = f"select 1 from {engine.schema_prefix}ledger_key where key = ? and digest = ? and principal in ({marks(len(principals))})"
    return session.one(sql, (SENT + digest, digest, *principals)) is not None


def naming(schema: Schema) -> Iterator[str]:
    """Queries of which one has a row where a row names the content :digest."""
    for entity in schema.entities:
        for f in entity.fields:
            if f.type == "file":
                yield f"select 1 as n from {entity.name} where {f.name} = :digest limit 1"


def referenced(catalog: Catalog, session: Session) -> Iterator[str]:
    """Every content hash that a stored version names, on any branch, or that a step names as its `content` or the `_content` of a part."""
    engine, entity, field = catalog.engine, SYSTEM.by_name["entity"], SYSTEM.by_name["field"]
    at = engine.schema_prefix
    columns = {c: field.by_name[c].store for c in ("entity", "store", "type")}
    stores: dict[int, str] = {}
    files: set[tuple[int, str]] = set()
    for suffix in ("", "__h", "__d"):
        for number, store in session.all(f"select id, {entity.by_name['store'].store} from {at}{entity.store}{suffix}"):
            if store is not None:
                stores[number] = store
        for number, store in session.all(
            f"select {columns['entity']}, {columns['store']} from {at}{field.store}{suffix} where {columns['type']} = 'file'"
        ):
            files.add((number, store))
    seen: set[str] = set()
    for number, column in sorted(files):
        for suffix in ("", "__h", "__d"):
            for (digest,) in session.all(
                f"select distinct {column} from {at}{stores[number]}{suffix} where {column} is not null"
            ):
                if digest not in seen:
                    seen.add(digest)
                    yield digest
    detail = engine.portable("detail", "json")
    for (text,) in session.all(f"select {detail} from {at}ledger_step where {detail} like '%content\"%'"):
        for key, digest in json.loads(text).items():
            named = key == "content" or key.endswith("_content")
            if named and isinstance(digest, str) and HASH.fullmatch(digest) and digest not in seen:
                seen.add(digest)
                yield digest
