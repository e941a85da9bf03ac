"""Bridging: which boxes a box may connect to. A rule of its egress names another box, a permission lets it; both, or nothing.

The host goes by ids, so what a name means is decided here: when a box is made, and again each second for as long as it
lives, so that a permission that is taken back ends what is open.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import NotFound
from ..sandbox.bridge import REACHES
from ..sandbox.client import blocking_client, run_blocking
from ..substrate.permissions import Grant, Policy
from ..substrate.reads import clock
from ..substrate.schema import MAIN, SYSTEM
from ..substrate.views import Level

ACTION = "connect"


def labels(layer: Any, principal: int, egress: Iterable[Any]) -> dict[str, str]:
    """What the host is told of a principal's box with these rules: which boxes it may reach now."""
    names = _named(egress)
    return {REACHES: json.dumps(_reaches(layer, principal, names, _living(layer)))} if names else {}


def look(layer: Any) -> None:
    """Decide anew for all boxes of this layer on this machine that name others."""
    asking = _boxes(layer, bridges=True)
    if not asking:
        return
    living = _living(layer)
    whose = {box["id"]: box["principal"] for box in living}
    for box in asking:
        if box["id"] not in whose:  # of a function, which is over soon: what was decided when it began
            continue
        boxes = _reaches(layer, whose[box["id"]], _named(box["egress"]), living)
        if boxes != json.loads(box["labels"].get(REACHES) or "{}"):
            with contextlib.suppress(NotFound):  # it ended this moment
                run_blocking(blocking_client().call({"do": "reach", "box": box["id"], "boxes": boxes}))


def _named(egress: Iterable[Any]) -> list[str]:
    return sorted({str(rule["box"]) for rule in egress if isinstance(rule, Mapping) and "box" in rule})


def _reaches(layer: Any, principal: int, names: list[str], living: list[dict[str, Any]]) -> dict[str, str]:
    with layer.engine.reading() as session:
        policy = layer.catalog.policy(session, principal, clock(layer.engine, session)[1])
        found = {name: _meant(layer, session, policy, name, living) for name in names}
    return {name: id for name, id in found.items() if id is not None}


def _meant(layer: Any, session: Any, policy: Policy, name: str, living: list[dict[str, Any]]) -> str | None:
    """The id of the box that a name means for a principal, if it may connect to it.

    Names belong to whoever has the box. `db` is one's own, or that of whoever granted it; `ben/db` is ben's.
    """
    allowed, grants = policy.outright(ACTION, f"box:{name}")
    if not allowed:
        return None
    owner, _, short = name.rpartition("/")
    known = [box for box in living if short in (box["name"], box["id"])]
    if owner:
        known = [box for box in known if box["owner"] == owner]
    elif not any(grant.resource == "*" for grant in grants):
        whose = {policy.principal, *_granters(layer, session, grants)}
        known = [box for box in known if box["principal"] in whose]
    mine = [box for box in known if box["principal"] == policy.principal]
    return next((str(box["id"]) for box in mine or known), None)


def _granters(layer: Any, session: Any, grants: list[Grant]) -> set[int]:
    listed = ", ".join(str(grant.id) for grant in grants)
    rows = layer.catalog.rows(
        session, SYSTEM.by_name["permission"], (Level(MAIN, None),), f"where x.id in ({listed})", ()
    )
    return {row["granted_by"] for row in rows}


def _boxes(layer: Any, **more: Any) -> list[dict[str, Any]]:
    request = {"do": "list", "labels": {"layer": layer.id}, **more}
    return list(run_blocking(blocking_client().call(request)))


def _living(layer: Any) -> list[dict[str, Any]]:
    """The boxes of this layer on this machine that are an execution, each with whose it is."""
    engine = layer.engine
    at, given = engine.schema_prefix, engine.portable("c.arguments", "json")
    with engine.reading() as session:
        rows = session.all(
            f"select {given}, x.principal from {at}ledger_lineage l join {at}ledger_call c on c.execution = l.execution"
            f" join {at}ledger_execution x on x.id = l.execution"
            f" where not exists (select 1 from {at}ledger_outcome o where o.execution = l.execution)"
        )
        chain, people = (Level(MAIN, None),), SYSTEM.by_name["principal"]
        whose = {json.loads(text or "{}").get("key"): principal for text, principal in rows}
        listed = ", ".join(map(str, sorted(set(whose.values()))))
        names = (
            {row["id"]: row["name"] for row in layer.catalog.rows(session, people, chain, f"where x.id in ({listed})")}
            if whose
            else {}
        )
    return [
        box | {"principal": whose[key], "owner": names.get(whose[key])}
        for box in _boxes(layer)
        if (key := box["labels"].get("box")) in whose
    ]
