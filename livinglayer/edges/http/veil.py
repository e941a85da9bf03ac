"""Veil: what a principal may not see is told like what is not there, whichever way it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import Conflict, Denied, Invalid, LayerError, NotFound
from ...substrate.reads import clock
from ...substrate.schema import SYSTEM

if TYPE_CHECKING:
    from ...layer import Layer

# Arguments that name something, and what; `name` and `id` mean what the verb is about.
NAMED = {
    "entity": "entity", "blueprint": "blueprint", "contract": "contract", "function": "function", "source": "branch", "target": "branch",
    "principal": "principal", "subject": "principal", "execution": "execution", "box": "box",
}  # fmt: skip
MAKING = (".define", ".fork", ".create", ".open", ".apply")  # verbs whose name is that of something new
TOLD = (Denied, NotFound, Invalid, Conflict)


def veiled(layer: Layer, verb: str, arguments: Mapping[str, Any], branch: str, error: LayerError) -> LayerError:
    """The error that a principal is told: NotFound when it is about something it does not see. The ledger has what it was."""
    if not isinstance(error, TOLD):
        return error
    with layer.engine.reading() as session:
        if layer.my_policy(session).sovereign():
            return error
    for kind, name in [("branch", branch), *things(verb, arguments)]:
        if isinstance(name, str | int) and not isinstance(name, bool) and not sees(layer, kind, name, branch):
            return NotFound(f"there is no {kind} {name!r:.120}", hint="or no permission shows it to you")
    return error


def things(verb: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the arguments of a verb speak of: kinds and names."""
    about = verb.partition(".")[0]
    for argument, value in arguments.items():
        if argument in NAMED:
            yield NAMED[argument], value
        elif argument in ("name", "id") and about != "row" and not verb.endswith(MAKING):
            yield about, value
        elif argument == "resource" and verb == "permission.grant" and isinstance(value, str) and ":" not in value:
            yield "entity", value.partition(".")[0].partition("/")[0]
        elif argument == "changes" and isinstance(value, list):
            yield from (("entity", change.get("entity")) for change in value[:1000] if isinstance(change, dict))


def sees(layer: Layer, kind: str, name: str | int, branch: str) -> bool:
    """Whether a handle's principal may know of something."""
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]
        policy = layer.catalog.policy(session, layer.my_id, epoch)
        allows = [grant for grant in policy.grants if grant.effect == "allow"]
        if kind == "branch":
            reads = any(g.action in ("read", "*") and g.branch in (None, name) for g in allows)
            named = any(g.resource in (f"branch:{name}", "*") for g in allows)
            return name == "main" or ((reads or named) and _there(layer, session, name))
        if kind == "principal" and name == policy.me["name"]:
            return True
        if any(g.resource == f"{kind}:{name}" for g in allows):
            return True
        if kind == "entity":
            if name in SYSTEM.by_name:
                return True
            try:
                chain = layer.catalog.chain(session, layer.catalog.branch(session, branch))
            except LayerError:
                return False
            schema = layer.catalog.schema(session, chain, epoch)
            found = schema.by_name.get(str(name))
            actions = ("read", "insert", "update", "delete")
            return found is not None and any(policy.rules(act, schema, found, branch).allows for act in actions)
    if kind not in SYSTEM.by_name:
        return True  # nothing that has rows
    column = "id" if isinstance(name, int) or "name" not in SYSTEM.by_name[kind].by_name else "name"
    try:
        return bool(layer.query(f"select 1 as n from {kind} where {column} = :it limit 1", {"it": name}))
    except LayerError:
        return False


def _there(layer: Layer, session: Any, name: str | int) -> bool:
    try:
        layer.catalog.branch(session, str(name))
    except LayerError:
        return False
    return True
