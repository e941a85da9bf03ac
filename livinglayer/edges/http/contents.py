"""Contents: files that come and go over HTTP. Whoever knows a hash has not got the content: it is named by whom it was seen or sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ...errors import Denied, LayerError, NotFound
from ...substrate.reads import clock
from ...substrate.values import HASH

if TYPE_CHECKING:
    from ...layer import Layer

SENT = "content/"  # the key under which the ledger knows that a principal has sent a content


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
    if not _sent(layer, digest):
        layer.ledger.note(
            layer.execution_of(layer.my_id), [("ledger_key", (layer.my_id, SENT + digest, digest, "null"))]
        )
    return digest


def check(layer: Layer, verb: str, arguments: Mapping[str, Any], branch: str) -> None:
    """NotFound when a row is to name a content that its writer has neither sent nor may read."""
    for entity, values in _written(verb, arguments):
        named = {name: value for name, value in values.items() if isinstance(value, str) and HASH.fullmatch(value)}
        for digest in _files(layer, entity, named, branch) if named else ():
            if not _sent(layer, digest) and not layer._names(digest):
                raise NotFound(f"there is no content {digest!r}", hint="POST /api/blob stores it")


def _written(verb: str, arguments: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """What a verb writes: entities and values."""
    changes = arguments.get("changes") if verb == "row.change" else [arguments] if verb.startswith("row.") else []
    for change in changes if isinstance(changes, list) else ():
        if isinstance(change, Mapping):
            values = change.get("values")
            for row in values if isinstance(values, list) else [values]:
                if isinstance(row, Mapping):
                    yield change.get("entity"), row


def _files(layer: Layer, entity: Any, named: Mapping[str, str], branch: str) -> list[str]:
    with layer.engine.reading() as session:
        if layer.my_policy(session).sovereign():
            return []
        try:
            chain = layer.catalog.chain(session, layer.catalog.branch(session, branch))
        except LayerError:
            return []
        found = layer.catalog.schema(session, chain, clock(layer.engine, session)[1]).by_name.get(str(entity))
    fields = {} if found is None else found.by_name
    return [digest for name, digest in named.items() if name in fields and fields[name].type == "file"]


def _sent(layer: Layer, digest: str) -> bool:
    at = layer.engine.schema_prefix
    with layer.engine.reading() as session:
        # the digest too: an idempotency key that only reads like one of ours has that of its request
        sql = f"select 1 from {at}ledger_key where principal = ? and key = ? and digest = ?"
        return session.one(sql, (layer.my_id, SENT + digest, digest)) is not None
