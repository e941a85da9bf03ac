"""Permissions: grants as rows decide. No row means no, a deny wins, and every answer names the rows behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import Denied, Invalid
from .predicates import Env, Me, Predicate, compile_predicate
from .schema import MAIN, SYSTEM, Entity, Schema
from .views import Level, ReadRule

if TYPE_CHECKING:
    from .catalog import Catalog
    from .engine import Session

WRITES = ("insert", "update", "delete")
ACTIONS = (
    "read",
    *WRITES,
    "write",
    "fork",
    "merge",
    "define",
    "grant",
    "impersonate",
    "call",
    "use",
    "approve",
    "connect",
    "*",
)


@dataclass(frozen=True)
class Grant:
    """One permission row that holds now, with the conditions it inherits from those it was delegated from."""

    id: int
    action: str
    resource: str
    effect: str
    fields: frozenset[str] | None
    branch: str | None
    where: tuple[tuple[str, Mapping[str, Any]], ...]  # texts with whose `:me` each speaks of
    delegable: bool
    valid_from: datetime | None
    valid_to: datetime | None

    def covers(self, action: str, resource: str, branch: str | None) -> bool:
        if self.action not in ("*", action) and not (self.action == "write" and action in WRITES):
            return False
        return self.resource in ("*", resource) and (self.branch is None or branch is None or self.branch == branch)


@dataclass(frozen=True)
class Decision:
    """An answer of `can`: truthy when allowed, with the permission rows that decided."""

    allowed: bool
    rows: list[dict[str, Any]]
    reason: str

    def __bool__(self) -> bool:
        return self.allowed


@dataclass(frozen=True)
class Rules:
    """The grants that speak of one action on one entity, compiled."""

    allows: tuple[tuple[Grant, tuple[tuple[Predicate, Me], ...]], ...]
    denies: tuple[tuple[Grant, tuple[tuple[Predicate, Me], ...]], ...]

    @cached_property
    def everything(self) -> bool:
        return not self.denies and any(not where and g.fields is None for g, where in self.allows)

    def read_rule(self) -> ReadRule:
        return ReadRule(tuple((w, g.fields) for g, w in self.allows), tuple((w, g.fields) for g, w in self.denies))

    def refusal(self, fields: frozenset[str], row: Mapping[str, Any], follow: Any) -> str | None:
        """Why the row may not be touched in these fields; None when it may."""

        def holds(where: tuple[tuple[Predicate, Me], ...]) -> bool | None:
            answer: bool | None = True
            for predicate, me in where:
                value = predicate.test(Env(row, me, follow))
                if value is False:
                    return False
                answer = answer and value
            return answer

        for grant, where in self.denies:
            if (grant.fields is None or grant.fields & fields) and holds(where) is not False:
                return f"permission {grant.id} denies it"
        given = [g for g, where in self.allows if holds(where)]
        if not given:
            return "no permission allows it"
        if any(g.fields is None for g in given):
            return None
        missing = fields - frozenset().union(*(g.fields for g in given if g.fields is not None))
        return f"no permission covers {', '.join(sorted(missing))}" if missing else None


@dataclass
class Policy:
    """Everything granted to one principal, itself or through its roles."""

    principal: int
    me: Mapping[str, Any]
    grants: tuple[Grant, ...]
    until: datetime | None  # when a validity interval begins or ends and this must be read again
    key: str
    timed: bool = False  # whether the time it was read for decided anything
    _rules: dict[Any, tuple[Schema, Rules]] = field(default_factory=dict)

    def expired(self) -> bool:
        return self.until is not None and datetime.now(UTC) >= self.until

    def rules(self, action: str, schema: Schema, entity: Entity, branch: str | None) -> Rules:
        key = (action, id(schema), entity.id, branch)
        found = self._rules.get(key)
        if found is None or found[0] is not schema:
            sides = [
                tuple(
                    self._compile(g, schema, entity)
                    for g in self.grants
                    if g.effect == effect and g.covers(action, entity.name, branch)
                )
                for effect in ("allow", "deny")
            ]
            found = self._rules[key] = (schema, Rules(*sides))
        return found[1]

    def readable(self, schema: Schema, branch: str | None) -> Schema:
        """The entities that it may read something of."""
        if self.sovereign():
            return schema
        return Schema(tuple(e for e in schema.entities if self.rules("read", schema, e, branch).allows))

    def _compile(self, grant: Grant, schema: Schema, entity: Entity) -> tuple[Grant, tuple[tuple[Predicate, Me], ...]]:
        try:
            return grant, tuple((compile_predicate(text, schema, entity), me) for text, me in grant.where)
        except Invalid:
            if grant.resource == "*" and grant.effect == "allow":  # speaks of fields this entity has not
                return grant, ((compile_predicate("false", schema, entity), grant.where[0][1]),)
            if grant.effect == "deny":
                return grant, ()  # a prohibition that can't be read any more prohibits
            return grant, ((compile_predicate("false", schema, entity), grant.where[0][1]),)

    def decide(self, action: str, resource: str, branch: str | None = None) -> tuple[bool, list[Grant]]:
        """Whether an action on something that has no rows is allowed, and the grants that say so."""
        speaking = [g for g in self.grants if g.covers(action, resource, branch)]
        denies = [g for g in speaking if g.effect == "deny" and not g.where]
        if denies:
            return False, denies
        allows = [g for g in speaking if g.effect == "allow" and not g.where]  # a condition is about rows
        return bool(allows), allows

    def outright(self, action: str, resource: str, branch: str | None = None) -> tuple[bool, list[Grant]]:
        """`decide` where a condition can't be looked at: only what is granted without one counts, and any deny does."""
        speaking = [g for g in self.grants if g.covers(action, resource, branch)]
        denies = [g for g in speaking if g.effect == "deny"]
        allows = [g for g in speaking if g.effect == "allow" and not g.where]
        return (False, denies) if denies else (bool(allows), allows)

    def require(self, action: str, resource: str, branch: str | None = None) -> None:
        allowed, grants = self.decide(action, resource, branch)
        if not allowed:
            raise self.refusal(action, resource, grants)

    def refusal(
        self,
        action: str,
        resource: str,
        grants: list[Grant],
        command: str = "can",
        called: str = "",
        named: bool = False,
    ) -> Denied:
        """What whoever may not is told: the grants that deny it, and the command to go on with. `named` for the ledger."""
        by = f"permission {grants[0].id} denies it" if grants else "no permission allows it"
        who, details = self.me["name"], {"action": action, "resource": resource} if named else {}
        return Denied(
            f"{who} may not {action} {called or resource}: {by}",
            hint=f"layer {command} {who} {action} {resource}",
            rows=[g.id for g in grants],
            **details,
        )

    def sovereign(self) -> bool:
        """Holds everything without conditions: an owner."""
        return any(
            g.action == "*"
            and g.resource == "*"
            and g.effect == "allow"
            and not g.where
            and g.fields is None
            and g.branch is None
            for g in self.grants
        ) and not any(g.effect == "deny" for g in self.grants)


def load_policy(
    catalog: Catalog, session: Session, principal: int, as_of: int | None, now: datetime | None = None
) -> Policy:
    """Read the permission rows that speak of a principal or a role it holds; those whose time it is `now`."""
    chain = (Level(MAIN, None if as_of is None else "?"),)
    cuts = () if as_of is None else (as_of,) * 3  # wherever the chain's SQL says ?
    entities = SYSTEM.by_name

    def having(name: str, label: str, values: Collection[int]) -> list[dict[str, Any]]:
        column = "id" if label == "id" else entities[name].by_name[label].store
        listed = ", ".join(map(str, sorted(values)))
        return catalog.rows(session, entities[name], chain, f"where x.{column} in ({listed})", cuts)

    subjects, frontier = {principal}, {principal}
    while frontier:
        frontier = {row["role"] for row in having("membership", "member", frontier)} - subjects
        subjects |= frontier
    rows = {row["id"]: row for row in having("permission", "subject", subjects)}
    missing = {row["source"] for row in rows.values()} - rows.keys() - {None}
    while missing:
        found = {row["id"]: row for row in having("permission", "id", missing)}
        rows |= found
        missing = {row["source"] for row in found.values()} - rows.keys() - {None}
    granters = {row["granted_by"] for row in rows.values() if row["source"] is not None} - {None}
    people = {row["id"]: row for row in having("principal", "id", {principal, *granters})}
    if now is None:
        now = datetime.now(UTC) if as_of is None else catalog.time_of(session, as_of)
    grants, edges, timed = [], [], False

    def me_of(number: int) -> dict[str, Any]:
        person = people.get(number, {})
        return {
            **{k: v for k, v in (person.get("attributes") or {}).items() if isinstance(v, str | int | bool)},
            "id": number,
            "name": person.get("name"),
        }

    for row in rows.values():
        if row["subject"] not in subjects:
            continue
        where: list[tuple[str, Mapping[str, Any]]] = []
        link: dict[str, Any] | None = row
        holds, whose, seen = True, principal, set()
        while link is not None and holds:
            edges += [t for t in (link["valid_from"], link["valid_to"]) if t is not None and t > now]
            timed = timed or link["valid_from"] is not None or link["valid_to"] is not None
            holds = (link["valid_from"] is None or link["valid_from"] <= now) and (
                link["valid_to"] is None or now < link["valid_to"]
            )
            if link["predicate"]:
                where.append((link["predicate"], me_of(whose)))
            if link["source"] is None:
                break
            whose = link["granted_by"]  # what was delegated is the granter's own reach
            seen.add(link["id"])
            link = rows.get(link["source"])
            holds = holds and link is not None and link["id"] not in seen
        if holds:
            grants.append(Grant(row["id"], row["action"], row["resource"], row["effect"], None if row["fields"] is None else frozenset(row["fields"]),
                                row["branch"], tuple(where), bool(row["delegable"]), row["valid_from"], row["valid_to"]))  # fmt: skip
    me = me_of(principal)
    ordered = tuple(sorted(grants, key=lambda g: g.id))
    return Policy(
        principal,
        me,
        ordered,
        min(edges, default=None) if as_of is None else None,
        repr((ordered, sorted(me.items(), key=str))),
        timed,
    )
