"""Named projections: one SELECT under a name, with typed parameters. Whoever may read it sees what its definer would."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlglot
from sqlglot import exp

from ..errors import Invalid, NotFound
from ..substrate.past import definer
from ..substrate.permissions import Policy
from ..substrate.reads import clock
from ..substrate.schema import OWNER, SYSTEM, Field, field_of, field_values
from ..substrate.values import decode, text
from . import remote
from .remote import Remote, Source, fetch, only_owners

PROJECTION = SYSTEM.by_name["projection"]
NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?")
ME = "me"  # in a statement: the id of whoever reads
LARGEST = 1 << 20  # bytes of a statement, and of one argument


@dataclass(frozen=True)
class Projection:
    """One projection as its row says."""

    id: int
    name: str
    statement: str
    parameters: Mapping[str, Field]
    definer: int  # whose rights it has
    uses_me: bool
    remote: Remote | None = None  # another layer's
    fresh: float = 0.0  # seconds that such an answer may be old


def read(
    layer: Any,
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    principal: int,
    branch: str = "main",
    as_of: int | datetime | None = None,
    granted: bool = False,
) -> tuple[list[dict[str, Any]], int]:
    """Its rows for these arguments, and the last tx they show; NotFound unless the principal may read it.

    `granted`: that was decided already: who wrote the function or contract that lists it may read it.
    """
    rows, tx, source = read_from(
        layer, name, arguments, principal=principal, branch=branch, as_of=as_of, granted=granted
    )
    return rows, tx if source is None else source.tx


def find(layer: Any, name: str, principal: int, branch: str = "main", granted: bool = False) -> Projection:
    """A projection that a principal may read, or NotFound."""
    found = _find(layer, name, branch) if isinstance(name, str) else None
    if found is None or not (granted or may_read(layer, principal, found.name, branch)):
        raise NotFound(f"there is no projection {name!r:.120}", hint="layer projection list")
    return found


def read_from(
    layer: Any,
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    principal: int,
    branch: str = "main",
    as_of: int | datetime | None = None,
    granted: bool = False,
) -> tuple[list[dict[str, Any]], int, Source | None]:
    """As `read`, with the last tx of this layer, and where rows come from that are another one's; `as_of` is of that one then."""
    found = find(layer, name, principal, branch, granted)
    if found.remote is not None:
        only_owners(layer, found.definer, found.name)
        with layer.engine.reading() as session:
            tx = clock(layer.engine, session)[0]
        given = bind(found, arguments or {}) if found.parameters else arguments or {}
        rows, source = fetch(layer, found.remote, given, as_of, found.fresh)
        return rows, tx, source
    bound = bind(found, arguments or {})
    if found.uses_me:
        bound[ME] = principal
    trusted = found.definer == principal == OWNER  # arguments of others run where they can't hurt
    rows, tx = layer.reads.query_at(found.statement, bound, branch, as_of, found.definer, trusted=trusted)
    return rows, tx, None


def readable(layer: Any, principal: int, branch: str = "main") -> list[dict[str, Any]]:
    """The projections that a principal may read: name, parameters, description."""
    catalog = layer.catalog
    with layer.engine.reading() as session:
        policy = catalog.policy(session, principal, clock(layer.engine, session)[1])
        rows = catalog.rows(session, PROJECTION, catalog.chain(session, catalog.branch(session, branch)))
    return [
        {key: row[key] for key in ("name", "parameters", "description", "statement", "freshness")}
        for row in sorted(rows, key=lambda row: row["name"])
        if allowed(policy, row["name"], branch)
    ]


def bind(projection: Projection, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments checked, with defaults; Invalid names the one that is wrong."""
    what = f"projection {projection.name}"
    if not isinstance(given, Mapping):
        raise Invalid(f"arguments of {what} are a dict, not {given!r:.60}")
    if unknown := sorted(str(name) for name in given if name not in projection.parameters):
        takes = ", ".join(projection.parameters) or "nothing"
        raise Invalid(f"{what} has no parameter {unknown[0]!r:.120}", hint=f"it takes {takes}")
    bound = {}
    for name, each in projection.parameters.items():
        value = given.get(name)
        value = each.initial if value is None else value
        if value is None and each.required:
            raise Invalid(f"{what} needs the parameter {name!r}", hint=f"{name}={each.type}")
        bound[name] = None if value is None else decode(each.type, each.encode(what, value, LARGEST))
    return bound


def parsed(layer: Any, name: str, words: Mapping[str, str], *, principal: int, branch: str = "main") -> dict[str, Any]:
    """Arguments from texts, by the types of the parameters; what is no parameter is left for `bind` to refuse."""
    found = _find(layer, name, branch)
    if found is None or not may_read(layer, principal, name, branch):
        return dict(words)
    given: dict[str, Any] = {}
    for label, word in words.items():
        each = found.parameters.get(label)
        try:
            given[label] = json.loads(word) if each is not None and each.type in _WRITTEN else word
        except ValueError:
            raise Invalid(f"projection {name}: {label}={word!r:.60} is not {each.type}") from None  # type: ignore[union-attr]
    return given


_WRITTEN = ("int", "float", "bool", "json", "ref")


def check(layer: Any, row: Mapping[str, Any], principal: int, branch: str = "main") -> None:
    """Refuses a projection that could never be read: its statement as its definer, with no arguments and for no rows."""
    name, statement = row["name"], row["statement"]
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > 100:
        raise Invalid(f"{name!r:.120} can't be the name of a projection", hint="e.g. open_tickets, or ticket.open")
    if row.get("remote") is not None:
        where = remote.check(row["remote"])
        only_owners(layer, principal, name)
        if statement not in (None, "", remote.statement(where)):
            raise Invalid(f"projection {name} has a statement of its own, or is another layer's")
        fields(name, row["parameters"])
        return
    text("the statement", statement, LARGEST)
    parameters, used = fields(name, row["parameters"]), placeholders(statement, layer.engine.dialect)
    if missing := sorted(used - set(parameters) - {ME}):
        raise Invalid(f"projection {name} uses :{missing[0]}, which is no parameter of it")
    if idle := sorted(set(parameters) - used):
        raise Invalid(f"projection {name} has a parameter {idle[0]!r} that its statement does not use")
    tried = f"select * from ({statement.strip().rstrip(';')}\n) q limit 0"  # its last line may be a comment
    layer.reads.query_at(tried, dict.fromkeys(used), branch, None, principal)


def fields(name: str, parameters: Any) -> dict[str, Field]:
    """Parameters by name, as fields: from {"status": "text!"}."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise Invalid(f"parameters of projection {name} are a dict: name -> type", hint='{"status": "text!"}')
    found = {}
    for label, spec in parameters.items():
        if not isinstance(label, str) or not re.fullmatch(r"[a-z_][a-z0-9_]*", label) or label == ME:
            raise Invalid(f"{label!r:.120} can't be the name of a parameter of projection {name}")
        try:
            row = field_values(name, "x", spec, LARGEST)  # a parameter may be called what no column could be
        except Invalid as error:
            raise Invalid(error.message.replace(f"{name}.x", f"{name}: {label}"), error.hint) from None
        found[label] = field_of({**row, "name": label, "id": 0, "entity": 0, "store": "x_0", "was": None})
    return found


def placeholders(statement: str, dialect: str) -> set[str]:
    """The names that a statement has as :name."""
    try:
        trees = sqlglot.parse(statement, read=dialect)
    except (sqlglot.errors.SqlglotError, RecursionError):
        raise Invalid("the statement is not one SELECT", hint="e.g. select id, title from ticket") from None
    if len([tree for tree in trees if tree is not None]) != 1 or not isinstance(trees[0], exp.Query):
        raise Invalid("a projection is one SELECT", hint="e.g. select id, title from ticket where status = :status")
    return {str(node.name) for node in trees[0].find_all(exp.Placeholder) if node.name}


def allowed(policy: Policy, name: str, branch: str) -> bool:
    """Whether a permission lets it be read. One with conditions does not count: it is about rows, which this has none of."""
    return policy.outright("read", f"projection:{name}", branch)[0]


def may_read(layer: Any, principal: int, name: str, branch: str) -> bool:
    """Whether a principal may read a projection of this name."""
    with layer.engine.reading() as session:
        policy = layer.catalog.policy(session, principal, clock(layer.engine, session)[1])
    return allowed(policy, name, branch)


def _find(layer: Any, name: str, branch: str) -> Projection | None:
    """As it is now: a moment in the past moves what it shows, not what it is."""
    catalog = layer.catalog
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]

        def make() -> Projection | None:
            chain = catalog.chain(session, catalog.branch(session, branch))
            column = PROJECTION.by_name["name"].store
            rows = catalog.rows(session, PROJECTION, chain, f"where x.{column} = ?", (name,))
            if not rows:
                return None
            row = rows[0]
            wrote = definer(catalog, session, epoch, PROJECTION, row, branch)
            declared = fields(row["name"], row["parameters"])
            if row["remote"] is not None:
                where, old = remote.check(row["remote"]), (row["freshness"] or {})
                fresh = old["bounded"] / 1000 if isinstance(old, Mapping) and old else 0.0
                return Projection(row["id"], row["name"], row["statement"], declared, wrote, False, where, fresh)
            uses_me = ME in placeholders(row["statement"], layer.engine.dialect)
            return Projection(row["id"], row["name"], row["statement"], declared, wrote, uses_me)

        found: Projection | None = catalog._cached(("projection", name, branch, epoch), make)
        return found
