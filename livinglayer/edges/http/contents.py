"""Contents: files that come over HTTP, and who sent them."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from ...errors import Conflict, Denied
from ...substrate.blobs import SENT, sent
from ...substrate.ledger import Work
from ...substrate.reads import clock

if TYPE_CHECKING:
    from ...layer import Layer


def may_store(layer: Layer) -> None:
    """Denied unless the principal may write some row with a file field."""
    with layer.engine.reading() as session:
        policy, epoch = layer.my_policy(session), clock(layer.engine, session)[1]
        if policy.sovereign():
            return
        schema = layer.catalog.schema(
            session, layer.catalog.chain(session, layer.catalog.branch(session, "main")), epoch
        )
        for entity in schema.entities:
            if any(f.type == "file" for f in entity.fields):
                if any(policy.rules(act, schema, entity, None).allows for act in ("insert", "update")):
                    return
    raise Denied("no permission lets this principal write a file field")


def store(layer: Layer, data: bytes) -> str:
    """Keep a content, and who sent it; its hash."""
    digest = sha256(data).hexdigest()
    layer.engine.put_blob(digest, data)
    with layer.engine.reading() as session:
        known = sent(layer.engine, session, [layer.my_id], digest)

    def note(work: Work) -> None:
        tx = work.tx(layer.execution_of(layer.my_id), bare=True)
        row = tx.kept(SENT + digest)
        if row is None:  # else it was sent by the same, at the same time
            tx.fact("ledger_key", layer.my_id, SENT + digest, digest, "null")
            tx.finish()
        elif row[0] != digest:
            raise Conflict(f"idempotency key '{SENT}{digest}' was used for another request", hint="use others")

    if not known:
        layer.ledger.submit(note)
    return digest
