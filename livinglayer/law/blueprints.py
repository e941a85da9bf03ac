"""Blueprints: the rows that shape boxes, as the sandbox takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Denied, Invalid, NotFound
from ..sandbox.blueprint import TIERS, Blueprint, check_tier
from ..sandbox.egress import rules
from ..substrate.past import definer
from ..substrate.reads import clock
from ..substrate.schema import SYSTEM

LIMITS = ("memory", "pids", "cpu", "disk", "output", "wall")
FUNCTION = Blueprint(memory=256 << 20, pids=64, disk=256 << 20, output=1 << 20)  # of a function that names no other


def shape(row: Mapping[str, Any] | None) -> Blueprint:
    """The blueprint a row describes; Invalid says what is wrong with it."""
    if row is None:
        return FUNCTION
    limits = row["limits"] or {}
    if not isinstance(limits, Mapping) or set(limits) - set(LIMITS):
        raise Invalid(f"limits of blueprint {row['name']!r} are {', '.join(LIMITS)}")
    given: dict[str, Any] = {"tier": row["tier"], **limits}
    for column, name in (("base", "base"), ("mounts", "mounts"), ("environment", "env"), ("idle", "idle"), ("packages", "packages"),
                         ("ports", "ports"), ("user_name", "user"), ("egress", "egress")):  # fmt: skip
        if row.get(column) is not None:
            given[name] = row[column]
    return Blueprint.of(given)


def find(layer: Any, name: str, branch: str = "main") -> dict[str, Any]:
    """The row of a blueprint, or NotFound."""
    return row_of(layer, "blueprint", name, branch)


def row_of(layer: Any, entity: str, name: str, branch: str = "main", as_of: int | None = None) -> dict[str, Any]:
    """A row of a system entity by its name, with its version in `_tx`; NotFound when there is none."""
    catalog, known = layer.catalog, SYSTEM.by_name[entity]
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]

        def make() -> dict[str, Any] | None:
            chain = catalog.chain(session, catalog.branch(session, branch), as_of)
            rows = catalog.rows(session, known, chain, f"where x.{known.by_name['name'].store} = ?", (name,))
            return rows[0] if rows else None

        found: dict[str, Any] | None
        if as_of is None and branch == "main":
            found = catalog._cached(("named", entity, name, epoch), make)
        else:
            found = make()
    if found is None:
        raise NotFound(f"there is no {entity} {name!r}", hint=f"select name from {entity} lists them")
    return found


def row_by_id(layer: Any, entity: str, number: int, branch: str = "main", as_of: int | None = None) -> dict[str, Any]:
    """A row of a system entity by its id, with its version in `_tx`; NotFound when there is none."""
    catalog, known = layer.catalog, SYSTEM.by_name[entity]
    with layer.engine.reading() as session:
        chain = catalog.chain(session, catalog.branch(session, branch), as_of)
        rows = catalog.rows(session, known, chain, "where x.id = ?", (number,))
    if not rows:
        raise NotFound(f"there is no {entity}/{number}")
    return dict(rows[0])


def definer_of(layer: Any, entity: str, row: Mapping[str, Any], branch: str = "main") -> int:
    """With whose rights a row of a system entity acts."""
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]
        return definer(layer.catalog, session, epoch, SYSTEM.by_name[entity], row, branch)


def guard(layer: Any, shaped: Blueprint, *writers: int) -> None:
    """Refuses a box that the machine is open to, unless owners wrote all that asks for it."""
    if shaped.tier == "process":
        what = "tier process"
    elif shaped.mounts:
        what = "directories of the host"
    elif any(rule.private or rule.resolve for rule in rules.parse(shaped.egress)):
        what = "private addresses"
    else:
        return
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]
        for who in writers:
            policy = layer.catalog.policy(session, who, epoch)
            if not policy.sovereign():
                raise Denied(
                    f"{policy.me['name']} may not give a box {what}: only an owner may",
                    hint="an owner writes the blueprint, and the function or contract that has it",
                    action="use",
                    resource=what,
                )


def weaker(tier: str, than: str) -> bool:
    """Whether a tier isolates less than another."""
    for each in (tier, than):
        check_tier(each)
    return TIERS.index(tier) < TIERS.index(than)
