"""Authority: verbs that change who may do what, and the one that answers why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ..errors import Denied, Invalid, NotFound
from .catalog import Catalog
from .engine import Session
from .ledger import Tx
from .permissions import ACTIONS, WRITES, Decision, Grant, Policy
from .predicates import compile_predicate, parse
from .schema import MAIN, OWNER, OWNER_PERMISSION, SYSTEM, Schema
from .views import Level

PRINCIPAL, MEMBERSHIP, PERMISSION = (SYSTEM.by_name[n] for n in ("principal", "membership", "permission"))
NAMES = re.compile(r"[^\s\x00-\x1f/:]{1,200}")
KEY = re.compile(r"layer:[\w-]{42}[AEIMQUYcgkosw048]", re.ASCII)  # 32 bytes as projection/identity.py writes them
PREFIXES = ("branch:", "function:", "box:", "verb:", "projection:", "contract:", "secret:", "principal:")


def principal(
    tx: Tx,
    name: str,
    kind: str | None,
    attributes: Mapping[str, Any] | None,
    roles: Sequence[str] | None,
    token: str | None = None,
) -> int:
    """Make a principal, or change what is given of it."""
    if not tx.policy.sovereign():  # who can give roles and tokens can give itself everything
        raise Denied(f"{tx.policy.me['name']} may not change principals: only an owner may")
    number = find(tx, name)
    if not isinstance(attributes, Mapping | None) or not isinstance(roles, Sequence | None):
        raise Invalid("attributes are a dict, roles a list of names")
    values: dict[str, Any] = {
        k: v for k, v in (("kind", kind), ("attributes", attributes), ("token", token)) if v is not None
    }
    if number is None:
        number = _create(tx, name, **{"kind": "human", **values})
    elif values:
        tx.record(PRINCIPAL, tx._encoded(PRINCIPAL, values, partial=True), number)
    if "kind" in values or "attributes" in values:
        _named(tx, number)
    if roles is not None:
        _hold(tx, number, roles)
    return number


def _named(tx: Tx, number: int) -> None:
    """Invalid when another layer is to be known by what is no key: it could never prove that it is it."""
    (row,) = tx.work.catalog.rows(tx.session, PRINCIPAL, tx.chain, "where x.id = ?", (number,))
    key = (row["attributes"] or {}).get("key")
    if row["kind"] == "layer" and key is not None and not (isinstance(key, str) and KEY.fullmatch(key)):
        raise Invalid(f"{key!r:.80} is no key of a layer", hint="`layer identity` prints it there: key=layer:…")


def find(tx: Tx, name: Any) -> int | None:
    """The principal of a name, or None; Invalid for what can't be one."""
    if not isinstance(name, str) or not NAMES.fullmatch(name):
        raise Invalid(f"{name!r} can't be the name of a principal", hint="text without spaces, slashes and colons")
    return tx._having(PRINCIPAL, [PRINCIPAL.by_name["name"]], [name], None)


def _create(tx: Tx, name: str, **values: Any) -> int:
    return tx.record(PRINCIPAL, tx._encoded(PRINCIPAL, {"name": name, **values}))


def _hold(tx: Tx, member: int, roles: Sequence[str]) -> None:
    """Make these the roles a principal holds."""
    wanted = set()
    for role in [roles] if isinstance(roles, str) else roles:
        found = find(tx, role)
        wanted.add(_create(tx, role, kind="role") if found is None else found)
    rows = tx.work.catalog.rows(
        tx.session, MEMBERSHIP, tx.chain, f"where x.{MEMBERSHIP.by_name['member'].store} = ?", (member,)
    )
    for row in rows:
        if row["role"] not in wanted:
            tx.erase(MEMBERSHIP, row["id"])
    for number in sorted(wanted - {row["role"] for row in rows}):
        tx.record(MEMBERSHIP, {"member": member, "role": number})


def grant(
    tx: Tx, subject: str, action: str, resource: str, where: str | None, fields: Sequence[str] | None, branch: str | None, effect: str,
    reason: str | None, valid_from: datetime | None, valid_to: datetime | None, delegable: bool,
) -> int:  # fmt: skip
    """Write a permission; who is no owner can only pass on, narrower, what it holds and may delegate."""
    if action not in ACTIONS:
        raise Invalid(f"there is no action {action!r}", hint=", ".join(ACTIONS))
    if effect not in ("allow", "deny"):
        raise Invalid(f"an effect is allow or deny, not {effect!r}")
    resource, fields = _resource(tx.schema, resource, fields)
    entity = tx.schema.by_name.get(resource)
    if where is not None:
        parse(where)
        if entity is not None:
            compile_predicate(where, tx.schema, entity)
        elif resource != "*":
            raise Invalid(f"{resource!r} has no rows that a predicate could be about")
    number = find(tx, subject)
    if number == OWNER and effect == "deny":
        raise Denied("the owner can't be denied anything: nobody could give it back")
    if number is None:  # granting to an unknown name makes it known, not yet confirmed
        number = _create(tx, subject, kind="pending")
    source = None
    if not tx.policy.sovereign():
        source = _delegated(tx.policy, action, resource, fields, branch, effect, valid_from, valid_to)
    values = {
        "subject": number, "action": action, "resource": resource, "predicate": where, "fields": None if fields is None else sorted(fields), "branch": branch,
        "effect": effect, "reason": reason, "valid_from": valid_from, "valid_to": valid_to, "delegable": bool(delegable), "granted_by": tx.execution.principal, "source": source,
    }  # fmt: skip
    return tx.record(PERMISSION, tx._encoded(PERMISSION, values))


def _resource(schema: Schema, resource: str, fields: Sequence[str] | None) -> tuple[str, list[str] | None]:
    """An entity, something with a prefix, or everything; `entity.field` is an entity with one field."""
    if not isinstance(resource, str) or not resource:
        raise Invalid("a resource is an entity, entity.field, branch:NAME, function:NAME … or *")
    if resource == "*" or resource.startswith(PREFIXES):
        if fields is not None:
            raise Invalid(f"{resource!r} has no fields")
        if resource != "*" and ("*" in resource or resource.endswith(":")):
            raise Invalid(f"{resource!r} names nothing", hint="a whole name, as in branch:main; * alone is everything")
        return resource, None
    name, _, label = resource.partition(".")
    if label:
        fields = [label, *(fields or ())]
    entity = schema.get(name)
    if fields is not None:
        fields = [
            f.name for f in (entity.get(n) for n in ([fields] if isinstance(fields, str) else fields) if n != "id")
        ]
    return name, None if fields is None else list(fields)


def _delegated(
    policy: Policy,
    action: str,
    resource: str,
    fields: Sequence[str] | None,
    branch: str | None,
    effect: str,
    start: datetime | None,
    end: datetime | None,
) -> int:
    """The delegable grant this one lies within; its conditions go on holding, whatever the new one says."""
    for held in policy.grants:
        inside = (
            held.delegable and held.effect == "allow" and effect == "allow"
            and (held.action in ("*", action) or (held.action == "write" and action in WRITES))
            and held.resource in ("*", resource)
            and (held.fields is None or (fields is not None and set(fields) <= held.fields))
            and (held.branch is None or held.branch == branch)
            and (held.valid_to is None or (end is not None and end <= held.valid_to))
            and (held.valid_from is None or (start is not None and start >= held.valid_from))
        )  # fmt: skip
        if inside:
            return held.id
    raise Denied(
        f"{policy.me['name']} may not grant {action} on {resource}: it holds nothing that wide to pass on",
        hint="a grant can be passed on when it is delegable, and only narrower",
    )


def revoke(tx: Tx, number: int) -> None:
    """Take a permission back, and everything delegated from it."""
    rows = tx.work.catalog.rows(tx.session, PERMISSION, tx.chain, "where x.id = ?", (number,))
    if not rows:
        raise NotFound(f"there is no permission {number}")
    if number == OWNER_PERMISSION:
        raise Denied("the owner's own permission can't be revoked: nobody could give it back")
    if not tx.policy.sovereign() and rows[0]["granted_by"] != tx.execution.principal:
        raise Denied(f"{tx.policy.me['name']} may not revoke permission {number}: it did not grant it")
    tx.erase(PERMISSION, number)


def can(
    catalog: Catalog,
    session: Session,
    epoch: int,
    policy: Policy,
    action: str,
    resource: str,
    branch: str,
    as_of: int | None,
) -> Decision:
    """Whether a principal may do something, and the permission rows that decide it."""
    if action not in ACTIONS:
        raise Invalid(f"there is no action {action!r}", hint=", ".join(ACTIONS))
    if not isinstance(resource, str):
        raise Invalid(f"a resource is text like item, item.name or item/7, not {resource!r}")
    head, _, row_part = resource.partition("/")
    name, _, label = head.partition(".")
    row_id, _, row_field = row_part.partition(".")
    label = label or row_field
    if resource == "*" or resource.startswith(PREFIXES):
        allowed, grants = policy.decide(action, resource, branch)
        return _decision(catalog, session, policy, allowed, grants, as_of)
    chain = catalog.chain(session, catalog.branch(session, branch), as_of)
    schema = catalog.schema(session, chain, epoch)
    entity = schema.get(name)
    fields = frozenset({entity.get(label).name}) if label and label != "id" else frozenset()
    rules = policy.rules(action, schema, entity, branch)
    if row_part:
        if not row_id.isdigit():
            raise Invalid(f"{resource!r}: a row is named entity/id")
        table = catalog.table(session, entity.store, epoch)
        row = table.get(session, chain, int(row_id))
        if row is None:
            return Decision(False, [], f"there is no {name}/{row_id}")

        def follow(other: str, number: int) -> Mapping[str, Any] | None:
            target = schema.get(other)
            found = catalog.table(session, target.store, epoch)
            at = found.get(session, chain, number)
            return None if at is None else found.named(target, at.values, number)

        why = rules.refusal(fields, table.named(entity, row.values, int(row_id)), follow)
        return _decision(
            catalog, session, policy, why is None, [g for g, _ in (*rules.denies, *rules.allows)], as_of, why
        )
    denies = [g for g, where in rules.denies if not where and (g.fields is None or g.fields & fields)]
    allows = [g for g, _ in rules.allows if not fields or g.fields is None or fields <= g.fields]
    if denies:
        return _decision(catalog, session, policy, False, denies, as_of)
    return _decision(catalog, session, policy, bool(allows), allows, as_of)


def _decision(
    catalog: Catalog,
    session: Session,
    policy: Policy,
    allowed: bool,
    grants: Sequence[Grant],
    as_of: int | None,
    why: str | None = None,
) -> Decision:
    rows = []
    for number in dict.fromkeys(g.id for g in grants):
        rows += catalog.rows(session, PERMISSION, (Level(MAIN, as_of),), "where x.id = ?", (number,))
    conditions = [text for g in grants for text, _ in g.where]
    if why is None and allowed:
        why = (
            "where " + " or ".join(dict.fromkeys(conditions))
            if conditions and all(g.where for g in grants)
            else "allowed"
        )
    elif why is None:
        why = "a permission denies it" if rows else "no permission allows it"
    return Decision(allowed, [{k: v for k, v in row.items() if k != "_tx"} for row in rows], why)
