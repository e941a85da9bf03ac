"""Verbs of projections: a SELECT gets a name, typed parameters and a definer, whose rights it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Invalid
from ..projection import query
from ..projection import remote as elsewhere
from .blueprints import row_of
from .verbs import Call, Object, verb


@verb("projection.define", sealed=True)
def define(
    call: Call, *, name: str, statement: str | None = None, parameters: Object | None = None, description: str | None = None,
    freshness: Any = None, remote: Object | None = None,
) -> Any:  # fmt: skip
    """Make or change a projection; it shows what whoever defines it may see, to whoever may read it. Gives its id.

    One with `remote` is another layer's, {"url": …, "projection": …, "key": "layer:…"}, which only an owner can define.
    """
    if statement is None:
        if remote is None:
            raise Invalid(f"projection {name!r:.120} needs a statement", hint="one SELECT, or a remote")
        statement = stand_in(remote)
    row = {
        "name": name, "statement": statement, "parameters": parameters or None, "description": description,
        "freshness": freshness, "remote": remote or None,
    }  # fmt: skip
    check(call.layer, row, call.asking.principal, call.branch)
    return call.layer.upsert("projection", row, on=["name"], branch=call.branch, reason=call.reason)


@verb("projection.remove", sealed=True)
def remove(call: Call, *, name: str) -> Any:
    """Take a projection away; its history stays."""
    row = row_of(call.layer, "projection", name, call.branch)
    return call.layer.delete("projection", row["id"], branch=call.branch, reason=call.reason)


def stand_in(remote: Any) -> str:
    """What the row of a projection that is another layer's has in the place of a statement."""
    return elsewhere.statement(elsewhere.check(remote))


def check(layer: Any, row: Mapping[str, Any], principal: int, branch: str = "main") -> None:
    """Refuses a projection that could never be read."""
    _freshness(row["freshness"])
    query.check(layer, row, principal, branch)


def _freshness(given: Any) -> Any:
    bounded = isinstance(given, Mapping) and set(given) == {"bounded"} and type(given["bounded"]) in (int, float)
    if given in (None, "strong") or (bounded and 0 < given["bounded"] <= 86_400_000):
        return given
    raise Invalid(
        f"there is no freshness {given!r:.80}", hint='"strong", or {"bounded": MS}: at most so many milliseconds old'
    )
