"""Genesis: the first tx of a layer, and what opening one checks."""

from __future__ import annotations

import secrets
from hashlib import sha256
from typing import Any

from ..errors import Corrupt, Incompatible
from .chain import GENESIS, clock_seal
from .engine import Engine, Session, making
from .evolve import ensure_indexes
from .ledger import Ledger, Work, now
from .schema import FIRST_ID, FORMAT, MAIN, OWNER, OWNER_PERMISSION, SYSTEM, system_rows


def token() -> str:
    return "ll_" + secrets.token_urlsafe(32)


def token_hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def new_id() -> str:
    return secrets.token_hex(8)


def begin(engine: Engine, ledger: Ledger, layer_id: str, owner_token: str) -> None:
    """Make the tables and the rows every layer begins with, in one transaction."""
    with making(engine) as session:
        for sql in engine.ledger_tables():
            session.run(sql)
        for entity in SYSTEM.entities:
            if entity.kind == "entity":
                for sql in engine.tables(entity.store, [(f.store, f.type) for f in entity.fields]):
                    session.run(sql)
        at, prefix = now(), engine.schema_prefix
        for key, value in (("format", str(FORMAT)), ("layer", layer_id)):
            session.run(f"insert into {prefix}meta values (?, ?)", (key, value))
        clock = (0, FIRST_ID, 0, at, GENESIS)
        session.run(
            f"insert into {prefix}ledger_clock values (1, ?, ?, ?, ?, ?, ?)",
            (*clock[:3], engine.native("datetime", at), GENESIS, clock_seal(*clock)),
        )
        session.clock = clock
        execution = ledger.open(OWNER, kind="genesis")
        work = Work(ledger, session)
        tx = work.tx(execution, reason=f"layer {layer_id} begins in format {FORMAT}")
        entities, fields = system_rows()
        for name, rows in (("entity", entities), ("field", fields)):
            for row in rows:
                put(tx, name, row)
        put(tx, "branch", {"id": MAIN, "name": "main", "fork_tx": 0, "base_own": 0, "base_parent": 0, "status": "open"})
        put(tx, "principal", {"id": OWNER, "name": "owner", "kind": "human", "token": token_hash(owner_token)})
        put(
            tx,
            "permission",
            {
                "id": OWNER_PERMISSION,
                "subject": OWNER,
                "action": "*",
                "resource": "*",
                "effect": "allow",
                "reason": "the owner of the layer",
                "delegable": True,
                "granted_by": OWNER,
            },
        )
        for entity in SYSTEM.entities:
            if entity.kind == "entity":
                ensure_indexes(engine, session, entity)
        tx.touched.clear()
        tx.finish(end="done")
        work.finish()
    ledger.executions.discard(execution)


def put(tx: Any, name: str, row: dict[str, Any]) -> None:
    """Write a row of the system's own entities, under the id it always has."""
    entity = SYSTEM.by_name[name]
    values = {k: v for k, v in row.items() if k != "id" and v is not None}
    tx.record(entity, tx._encoded(entity, values), None, row["id"])


def identify(engine: Engine, session: Session) -> str:
    """The id of the layer in this database; Incompatible when a newer release wrote it."""
    return stored_format(engine, session)[0]


def stored_format(engine: Engine, session: Session) -> tuple[str, int]:
    """The id of the layer and its format, which is this release's or an earlier one."""
    rows: dict[str, str] = dict(session.all(f"select key, value from {engine.schema_prefix}meta"))
    try:
        found = int(rows["format"])
        layer_id = str(rows["layer"])
    except (KeyError, ValueError):
        raise Corrupt("the layer does not say which format it has", hint="restore a backup") from None
    if found > FORMAT:
        raise Incompatible(
            f"the layer has format {found}, this release knows up to {FORMAT}", hint="upgrade livinglayer"
        )
    return layer_id, found
