"""Definitions: what a bundle says and what rows say, in one form in which they can be compared; and the way back to text.

Each has a key (kind, name) and a spec: its fields without those that are null, other rows by their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import Invalid
from ..law.functions import parts
from ..substrate.authority import PREFIXES
from ..substrate.catalog import Catalog
from ..substrate.engine import Session
from ..substrate.schema import SYSTEM, Entity, Field, check_entity_name, field_values
from ..substrate.values import decode
from ..substrate.views import Chain

Key = tuple[str, str]
Spec = dict[str, Any]
# In the order in which they can be made; they are taken away the other way round.
KINDS = ("entity", "field", "role", "principal", "grant", "blueprint", "projection", "function", "contract", "quota",
         "trigger", "component")  # fmt: skip
NAMED = ("blueprint", "projection", "function", "contract", "trigger", "component")  # rows of the entity of that name
LIMIT = 16 << 20  # characters of one value
# What the verbs that define them assume.
DEFAULTS: dict[str, Spec] = {
    "blueprint": {"tier": "namespace"},
    "function": {"language": "python", "rights": "caller", "deterministic": True},
    "trigger": {"branch": "main", "enabled": True},
}
UNMANAGED = {"contract": ("decided",)}  # left alone where a bundle does not say it
RENAMED = {"trigger": {"where": "predicate"}}  # what files call it, and rows


def canonical(entity: Entity, values: Mapping[str, Any]) -> Spec:
    """Values as the rows of a system entity give them back, without nulls; Invalid says what is wrong."""
    found: Spec = {}
    for label, value in values.items():
        f = entity.get(label)
        if value is not None:
            what = f"{entity.name}.{label}"
            given = value if f.type == "ref" else decode(f.type, f.encode(entity.name, value, LIMIT))
            if f.type == "ref" and not isinstance(value, str):
                raise Invalid(f"{what} is a name, not {value!r:.60}")
            found[label] = given
    return found


# What a bundle says


def wanted(bundle: Any) -> dict[Key, Spec]:
    """All definitions of a bundle by their keys; Invalid names the one that can't be."""
    found: dict[Key, Spec] = {}
    for name, given in bundle.entities.items():
        check_entity_name(name)
        found["entity", name] = {
            k: v for k, v in (("description", given.get("description")), ("unique", sets(given.get("unique") or ()))) if v
        }  # fmt: skip
    for name, given in bundle.entities.items():
        for label, spec in (given.get("fields") or {}).items():
            found["field", f"{name}.{label}"] = field_spec(name, field_values(name, label, spec, LIMIT))
    for name, given in bundle.roles.items():
        told = (given or {}).get("description")
        found["role", name] = {"kind": "role"} | ({"attributes": {"description": told}} if told else {})
    for name, given in bundle.principals.items():
        if ("role", name) in found:
            raise Invalid(f"{name!r} is both a role and a principal")
        given = given or {}
        found["principal", name] = {
            "kind": given.get("kind") or "human", "attributes": dict(given.get("attributes") or {}),
            "roles": sorted(set(given.get("roles") or ())),
        }  # fmt: skip
    for given in bundle.grants:
        spec = grant_spec(given)
        found["grant", grant_name(spec)] = spec
    for kind, group in (("blueprint", bundle.blueprints), ("projection", bundle.projections), ("function", bundle.functions),
                        ("contract", bundle.contracts), ("trigger", bundle.triggers)):  # fmt: skip
        for name, given in group.items():
            found[kind, name] = row_spec(kind, given)
    for given in bundle.quotas:
        spec = canonical(SYSTEM.by_name["quota"], given)
        found["quota", quota_name(spec)] = spec
    for given in bundle.components:
        name = given["name"]
        if ("component", name) in found:
            raise Invalid(f"there are two components {name!r}", hint="a bundle's components differ in their names")
        found["component", name] = row_spec("component", {k: v for k, v in given.items() if k != "name"})
    return found


def sets(given: Iterable[Iterable[str]]) -> list[list[str]]:
    """Fields that are unique together, whatever order they were said in."""
    return sorted(sorted(each) for each in given)


def field_spec(entity: str, row: Mapping[str, Any]) -> Spec:
    """A field from its row."""
    flags = ("required", "uniq", "indexed")
    spec = {k: v for k, v in row.items() if k != "name" and v is not None and (v or k not in (*flags, "options"))}
    if spec.get("type") != "ref":
        spec.pop("on_delete", None)
    if "options" in spec and "machine" in spec["options"]:  # the machine's name stays when the field gets another
        spec["options"] = {k: v for k, v in spec["options"].items() if k != "machine"}
    return spec


def grant_spec(given: Mapping[str, Any]) -> Spec:
    """A permission by what it says: `entity.field` is an entity with one field."""
    resource, fields = given["resource"], given.get("fields")
    if resource != "*" and not resource.startswith(PREFIXES):
        resource, _, label = resource.partition(".")
        fields = [label, *(fields or ())] if label else fields
    spec = {
        "to": given["to"], "action": given["action"], "resource": resource, "where": given.get("where"),
        "fields": None if fields is None else sorted({f for f in fields if f != "id"}), "branch": given.get("branch"),
        "effect": given.get("effect") or "allow", "delegable": bool(given.get("delegable")), "reason": given.get("reason"),
    }  # fmt: skip
    return {k: v for k, v in spec.items() if v is not None and v is not False}


def grant_name(spec: Mapping[str, Any]) -> str:
    """One line that no other grant has."""
    return (
        f"{spec['effect']} {spec['to']} {spec['action']} {spec['resource']}"
        + (f" ({', '.join(spec['fields'])})" if "fields" in spec else "")
        + (f" where {spec['where']}" if "where" in spec else "")
        + (f" on branch {spec['branch']}" if "branch" in spec else "")
        + (", and to pass it on" if spec.get("delegable") else "")
    )


def quota_name(spec: Mapping[str, Any]) -> str:
    of = " under ".join(str(spec[k]) for k in ("subject", "contract") if k in spec)
    return f"{of}: {spec['resource']} per {spec['seconds']} s"


def row_spec(kind: str, given: Mapping[str, Any]) -> Spec:
    """What a definition's row holds, from what a file says."""
    entity = SYSTEM.by_name[kind]
    values = {RENAMED.get(kind, {}).get(k, k): v for k, v in given.items()}
    if kind == "function":
        reads = parts("reads", values.get("reads"))
        for ours, theirs in (("calls", "function"), ("projections", "projection")):
            if names := values.pop(ours, None):
                reads[theirs] = {"names": list(names)}
        values |= {"reads": reads or None, "writes": parts("writes", values.get("writes")) or None}
    elif kind == "projection":
        values["parameters"] = values.get("parameters") or None
    return canonical(entity, {**DEFAULTS.get(kind, {}), **{k: v for k, v in values.items() if v is not None}})


# What rows say


class Found:
    """The definitions of a layer, as a chain of branches sees them in one snapshot or open tx."""

    def __init__(self, catalog: Catalog, session: Session, chain: Chain, version: Any) -> None:
        def rows(kind: str) -> list[dict[str, Any]]:
            return catalog.rows(session, SYSTEM.by_name[kind], chain)

        self.schema = catalog.schema(session, chain, version)
        self.bundles = {row["name"]: row for row in rows("bundle")}
        self.principals = {row["id"]: row for row in rows("principal")}
        self.members: dict[int, list[str]] = {}
        for row in rows("membership"):
            self.members.setdefault(row["member"], []).append(self.principals[row["role"]]["name"])
        self.grants = {row["id"]: row for row in rows("permission")}
        self.quotas = {row["id"]: row for row in rows("quota")}
        self.rows = {kind: {row["id"]: row for row in rows(kind)} for kind in NAMED}
        self._named = {
            kind: {row["name"]: number for number, row in group.items()}
            for kind, group in (*self.rows.items(), ("principal", self.principals))
        }

    def owned(self, name: str) -> dict[Key, int]:
        """What a bundle has made and is still there: what somebody made anew under the same name is not its own."""
        row = self.bundles.get(name)
        items = ((row or {}).get("manifest") or {}).get("items") or {}
        entities = items.get("entity", {})

        def its(kind: str, label: str, number: int) -> bool:
            if kind == "field":  # goes with its entity, also one that was made anew
                kind, label = "entity", label.partition(".")[0]
                number = entities.get(label, number)
            return self.id((kind, label), number) in (None, number)

        return {(k, label): n for k, group in items.items() for label, n in group.items() if its(k, label, n)}

    def owners(self, other_than: str) -> dict[Key, str]:
        """Which other bundle has what."""
        return {key: name for name in self.bundles if name != other_than for key in self.owned(name)}

    def id(self, key: Key, owned: int | None = None) -> int | None:
        """The row of a definition: found by its name, where names are unique, or as the one that is listed."""
        kind, name = key
        if kind == "entity":
            entity = self.schema.by_name.get(name)
            return None if entity is None or entity.system else entity.id
        if kind == "field":
            entity, label = self.schema.by_name.get(name.partition(".")[0]), name.partition(".")[2]
            f = None if entity is None or entity.system else entity.by_name.get(label)
            return None if f is None else f.id
        if kind in ("role", "principal"):
            return self._named["principal"].get(name)
        if kind in ("grant", "quota", "component"):
            group: Mapping[int, Any] = {
                "grant": self.grants,
                "quota": self.quotas,
                "component": self.rows["component"],
            }[kind]
            named = kind != "component" or (group.get(owned or 0) or {}).get("name") == name
            return owned if owned in group and named else None
        return self._named[kind].get(name)

    def spec(self, key: Key, number: int) -> Spec:
        """What the row of a definition says."""
        kind, name = key
        if kind == "entity":
            entity = self.schema.by_id[number]
            known = entity.by_id
            unique = sets([known[i].name for i in ids] for ids in entity.uniques if all(i in known for i in ids))
            return {k: v for k, v in (("description", entity.description), ("unique", unique)) if v}
        if kind == "field":
            entity_name, _, label = name.partition(".")
            return field_spec(entity_name, _field_row(self.schema.by_name[entity_name].by_name[label]))
        if kind in ("role", "principal"):
            row = self.principals[number]
            if kind == "role":
                return {"kind": row["kind"]} | ({"attributes": row["attributes"]} if row["attributes"] else {})
            roles = sorted(self.members.get(number, ()))
            return {"kind": row["kind"], "attributes": row["attributes"] or {}, "roles": roles}
        if kind == "grant":
            return self.grant(self.grants[number])
        row = self.quotas[number] if kind == "quota" else self.rows[kind][number]
        return self._row(kind, row)

    def grant(self, row: Mapping[str, Any]) -> Spec:
        """A permission as `grant_spec` says it."""
        return grant_spec(
            {**row, "to": self.principals[row["subject"]]["name"], "where": row["predicate"]}
        )  # fmt: skip

    def _row(self, kind: str, row: Mapping[str, Any]) -> Spec:
        spec = {}
        for f in SYSTEM.by_name[kind].fields:
            value = row[f.name]
            if value is None or f.name == "name":
                continue
            if f.type == "ref":
                group = self.principals if f.target == "principal" else self.rows[str(f.target)]
                value = group[value]["name"] if value in group else f"{f.target}/{value}"
            spec[f.name] = value
        return {**DEFAULTS.get(kind, {}), **spec}


def _field_row(f: Field) -> dict[str, Any]:
    return {
        "type": f.type, "required": f.required, "uniq": f.uniq, "indexed": f.indexed, "initial": f.initial, "rule": f.rule,
        "target": f.target, "on_delete": f.on_delete, "options": dict(f.options), "description": f.description,
        "annotations": None if f.annotations is None else dict(f.annotations),
    }  # fmt: skip


# The way back: what a file says, as short as it can be said


def told(kind: str, spec: Mapping[str, Any]) -> Spec:
    """A definition as a file has it."""
    if kind == "entity":
        return dict(spec)
    if kind == "field":
        return field_text(spec)
    if kind == "role":
        return dict(spec.get("attributes") or {})
    if kind == "principal":
        return {k: v for k, v in spec.items() if v and (k, v) != ("kind", "human")}
    if kind == "grant":
        return {k: v for k, v in spec.items() if (k, v) != ("effect", "allow")}
    back = {theirs: ours for ours, theirs in RENAMED.get(kind, {}).items()}
    given = {back.get(k, k): plain(v) for k, v in spec.items() if DEFAULTS.get(kind, {}).get(k) != v}
    if kind == "projection" and "remote" in given:
        del given["statement"]
    if kind == "function" and "reads" in given:
        reads = dict(given.pop("reads"))
        for ours, theirs in (("calls", "function"), ("projections", "projection")):
            if theirs in reads:
                given[ours] = reads.pop(theirs).get("names", [])
        if reads:
            given["reads"] = reads
    return given


def field_text(spec: Mapping[str, Any]) -> Any:
    """A field as people write it: 'text!' where that says it all, else a dict."""
    names = {"uniq": "unique", "initial": "default", "rule": "check", "target": "to"}
    given = {names.get(k, k): plain(v) for k, v in spec.items() if k != "options"} | dict(spec.get("options") or {})
    if given.get("on_delete") == "restrict":
        del given["on_delete"]
    if given["type"] == "state":
        given.pop("required", None)  # a row is always in some state
        given.pop("default", None) if given.get("default") == given.get("initial") else None
    head = given["type"] + (f" {given['to']}" if "to" in given else "") + ("!" if given.get("required") else "")
    rest = {k: v for k, v in given.items() if k not in ("type", "to", "required")}
    return {"type": head, **rest} if rest else head


def plain(value: Any) -> Any:
    """A number without a fraction is written without one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same in JSON too, where 1 is not true."""
    return bool(one == other) and json.dumps(one, sort_keys=True, default=str) == json.dumps(
        other, sort_keys=True, default=str
    )


def shorter(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Spec, Spec]:
    """Only what differs."""
    labels: Sequence[str] = sorted(k for k in {*before, *after} if not same(before.get(k), after.get(k)))
    return {k: before.get(k) for k in labels}, {k: after.get(k) for k in labels}
