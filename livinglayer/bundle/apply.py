"""Apply: a bundle becomes rows, all of it in one attributed tx, or nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import Conflict, Denied, Invalid, LayerError, NotFound
from ..law import blueprints, contracts, functions, projections, triggers
from ..substrate import authority, evolve
from ..substrate.ledger import Tx
from ..substrate.schema import SYSTEM
from . import migrations
from .changes import Change, Step
from .definitions import KINDS, NAMED, Found, Key, Spec, field_text
from .load import pack
from .plan import Plan, compare, differences, standing, stored
from .seeds import Rows, fresh, mark, present, referred
from .within import within

BUNDLE, PRINCIPAL = SYSTEM.by_name["bundle"], SYSTEM.by_name["principal"]


def apply(
    layer: Any,
    bundle: Any,
    *,
    branch: str = "main",
    accept: str | None = None,
    yes: bool = False,
    principal: str | None = None,
    reason: str | None = None,
    adopt: bool = False,
    beside: Mapping[str, Any] | None = None,
) -> Plan:
    """Make a branch what a bundle says, in one tx; what was done. Only an owner may.

    A plan by which somebody may do more than before needs `accept`, that plan's digest, or `yes`. Names that others
    have are a Conflict, unless they are adopted.
    """
    with layer.in_tx(principal, branch, reason or f"apply {bundle.name} {bundle.version}") as tx:
        _only_owners(tx)
        found = _found(tx)
        made = compare(found, bundle, branch, _rows(tx), lambda row: stored(layer, row), adopt, beside or {})
        _agreed(made, accept, yes)
        if not made.empty:
            for step in made.steps:
                Applying(layer, tx, step, adopt).run()
    return made


def remove(
    layer: Any,
    name: str,
    *,
    data: bool = False,
    branch: str = "main",
    principal: str | None = None,
    reason: str | None = None,
) -> list[Key]:
    """Take away what a bundle has made, its entities with their rows only with `data`; history stays. What went."""
    with layer.in_tx(principal, branch, reason or f"remove bundle {name}") as tx:
        _only_owners(tx)
        found = _found(tx)
        row = found.bundles.get(name)
        if row is None:
            raise NotFound(f"there is no bundle {name!r}", hint="layer bundle list")
        for other, each in found.bundles.items():
            if name in ((each["manifest"] or {}).get("requires") or {}):
                raise Conflict(f"bundle {other} needs {name}", hint=f"layer bundle remove {other} first")
        owned = found.owned(name)
        gone = [key for key in owned if data or key[0] not in ("entity", "field")]
        _erase(tx, found, [key for key in gone if not _in_dropped(key, gone)], owned)
        tx.erase(BUNDLE, row["id"])
        return gone


def _in_dropped(key: Key, gone: list[Key]) -> bool:
    """Fields go with their entity."""
    return key[0] == "field" and ("entity", key[1].split(".")[0]) in gone


def _only_owners(tx: Tx) -> None:
    if not tx.policy.sovereign():
        who = tx.policy.me["name"]
        raise Denied(f"{who} may not apply or remove bundles: only an owner may", action="define", resource="bundle")


def _found(tx: Tx) -> Found:
    return Found(tx.work.catalog, tx.session, tx.chain, tx.work.version)


def _rows(tx: Tx) -> Rows:
    return Rows(tx.work.catalog, tx.session, tx.chain, tx.work.version)


def _agreed(made: Plan, accept: str | None, yes: bool) -> None:
    """An owner has seen what this does, where that matters."""
    if accept is not None and accept != made.digest:
        raise Conflict(
            f"the plan is {made.digest} by now, not {accept}", hint="layer plan shows what it would do; accept that"
        )
    if taken := [change for change in made.changes if change.action == "conflict"]:
        first = taken[0]
        more = f", and {len(taken) - 1} more" if len(taken) > 1 else ""
        raise Conflict(
            f"{first.kind} {first.name!r} is there already: {first.why}{more}",
            hint="rename it, or adopt what is there: --adopt",
        )
    if made.widens and accept is None and not yes:
        opening = [change for change in made.changes if change.widens]
        shown = "; ".join(f"{change.kind} {change.name}" for change in opening[:3]) + (
            "; …" if len(opening) > 3 else ""
        )
        raise Denied(
            f"{made.name} {made.version} lets somebody do more than before: {shown}",
            hint=f"read the plan, then accept it: --accept {made.digest}",
            action="grant",
            resource=f"bundle:{made.name}"[:1000],
        )


class Applying:
    """One bundle, written within an open tx."""

    def __init__(self, layer: Any, tx: Tx, step: Step, adopt: bool) -> None:
        self.layer, self.tx, self.step, self.adopt = layer, tx, step, adopt
        self.bundle = step.bundle

    def run(self) -> None:
        tx, step = self.tx, self.step
        if not step.changes:
            return
        migrations.run(tx, step.migrations, step.wanted, self.naming)
        # What is there by now: a migration may have done some of it.
        found = _found(tx)
        there = standing(found, step)
        changes = differences(found, step, there, self.adopt, {})
        self.schema([each for each in changes if each.kind in ("entity", "field")])
        self.policy(changes)
        for kind in NAMED[:-1]:
            for each in changes:
                if each.kind == kind and each.action in ("add", "change", "adopt"):
                    with self.naming(kind, each.name):
                        self.put(kind, each.name)
        self.quotas(changes)
        self.components(changes)
        gone = [each.key for each in changes if each.action == "remove"]
        _erase(tx, _found(tx), gone, {key: number for key, number in step.owned.items() if number is not None})
        self.seeds()
        self.check()
        self.adopted(found, changes)
        self.record()

    @contextmanager
    def naming(self, kind: str, name: str = "") -> Iterator[None]:
        """Errors say what they are about."""
        try:
            yield
        except LayerError as error:
            error.message = f"{self.bundle.name}: {f'{kind} {name}'.rstrip()}: {error.message}"
            error.args = (error.message,)
            raise

    # Schema

    def schema(self, changes: list[Change]) -> None:
        tx, wanted = self.tx, self.step.wanted
        said: dict[str, dict[str, Any]] = {}  # fields by entity: those of one go together
        for each in changes:
            entity, _, label = each.name.partition(".")
            if each.kind == "entity" and each.action == "add":
                said[entity] = {}
            elif each.kind == "field" and each.action in ("add", "change", "adopt"):
                there = tx.schema.by_name.get(entity)
                if there is not None and label in there.by_name:
                    with self.naming("field", each.name):
                        self.field(entity, label, wanted[each.key])
                else:
                    said.setdefault(entity, {})[label] = field_text(wanted[each.key])
        fresh = {name: fields for name, fields in said.items() if name not in tx.schema.by_name}
        with self.naming("schema"):
            evolve.define_all(
                tx, {name: (fields, wanted["entity", name].get("description")) for name, fields in fresh.items()}
            )
        for entity in [name for name in said if name not in fresh]:
            with self.naming("entity", entity):
                evolve.alter(tx, entity, said[entity], {}, {}, (), {}, None, None)
        for each in changes:
            if each.kind == "entity" and each.action != "remove":
                with self.naming("entity", each.name):
                    spec, now = wanted[each.key], tx.schema.get(each.name)
                    if now.description != spec.get("description"):
                        evolve.describe(tx, each.name, spec.get("description"))
                    known = sorted(sorted(now.by_id[i].name for i in ids if i in now.by_id) for ids in now.uniques)
                    if known != spec.get("unique", []):
                        evolve.unique(tx, each.name, spec.get("unique", []))

    def field(self, entity: str, label: str, spec: Spec) -> None:
        if self.tx.schema.get(entity).by_name[label].type != spec["type"]:
            said = field_text(spec)
            given: dict[str, Any] = {"type": said} if isinstance(said, str) else dict(said)
            retyped = {label: {k: v for k, v in given.items() if k not in _LATER}}
            evolve.alter(self.tx, entity, {}, {}, retyped, (), {}, None, None)
        options: dict[str, Any] = {
            "required": bool(spec.get("required")), "unique": bool(spec.get("uniq")), "indexed": bool(spec.get("indexed")),
            "default": spec.get("initial"), "check": spec.get("rule"), "description": spec.get("description"),
            "annotations": spec.get("annotations"), **(spec.get("options") or {}),
        }  # fmt: skip
        if spec["type"] == "ref":
            options |= {"to": spec["target"], "on_delete": spec.get("on_delete", "restrict")}
        evolve.alter(self.tx, entity, {}, {}, {}, (), {label: options}, None, None)

    # Policy

    def policy(self, changes: list[Change]) -> None:
        tx, wanted = self.tx, self.step.wanted
        made = [each for each in changes if each.action in ("add", "change", "adopt")]
        for kind in ("role", "principal"):
            for each in made:
                if each.kind == kind:
                    with self.naming(kind, each.name):
                        spec = wanted[each.key]
                        self.known(spec.get("roles", ()))
                        roles = spec["roles"] if kind == "principal" else None
                        authority.principal(tx, each.name, spec["kind"], spec.get("attributes") or {}, roles)
        for each in made:
            if each.kind == "grant":
                with self.naming("grant", each.name):
                    spec = wanted[each.key]
                    self.known([spec["to"]])
                    if each.action != "add":  # a permission is never changed: another takes its place
                        self.tx.erase(authority.PERMISSION, self.step.owned[each.key] or 0)
                    self.step.owned[each.key] = authority.grant(
                        tx, spec["to"], spec["action"], spec["resource"], spec.get("where"), spec.get("fields"), spec.get("branch"),
                        spec["effect"], spec.get("reason"), None, None, bool(spec.get("delegable")),
                    )  # fmt: skip

    def known(self, names: Any) -> None:
        for name in names:
            if self.named("principal", name) is None:
                raise Invalid(
                    f"there is no principal or role {name!r:.60}", hint="name it in policy.yaml, in roles or principals"
                )

    def quotas(self, changes: list[Change]) -> None:
        for each in changes:
            if each.kind == "quota" and each.action in ("add", "change", "adopt"):
                with self.naming("quota", each.name):
                    self.numbered("quota", each.key, self.step.wanted[each.key])

    # Rows

    def named(self, kind: str, name: str) -> int | None:
        entity = SYSTEM.by_name[kind]
        return self.tx._having(entity, [entity.by_name["name"]], [name], None)

    def values(self, kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """A whole row: names as ids, null for what is not said."""
        found: dict[str, Any] = {}
        for f in SYSTEM.by_name[kind].fields:
            if f.name == "name":
                continue
            value = spec.get(f.name)
            if (
                f.type == "ref"
                and value is not None
                and (number := self.reference(kind, f.target or "", value)) is None
            ):
                raise Invalid(f"there is no {f.target} {value!r:.60}")
            found[f.name] = number if f.type == "ref" and value is not None else value
        return found

    def reference(self, kind: str, target: str, name: str) -> int | None:
        if target == "component":
            return self.step.owned.get(("component", name))
        return self.named(target, name)

    def put(self, kind: str, name: str) -> None:
        """Make or change a row that is known by its name."""
        spec = self.step.wanted[kind, name]
        if kind == "contract" and "decided" not in spec:
            values = {k: v for k, v in self.values(kind, spec).items() if k != "decided"}
        else:
            values = self.values(kind, spec)
        self.tx.upsert(kind, {"name": name, **values}, ["name"])

    def numbered(self, kind: str, key: Key, spec: Spec, **more: Any) -> None:
        """Make or change a row that is known by its number alone."""
        number = self.step.owned.get(key)
        values = {**self.values(kind, spec), **more}
        if (
            number is None
            or self.tx.work.table(SYSTEM.by_name[kind]).get(self.tx.session, self.tx.chain, number) is None
        ):
            self.step.owned[key] = self.tx.insert(kind, values)
        else:
            self.tx.update(kind, number, values)

    def components(self, changes: list[Change]) -> None:
        """Parents first."""
        left = {
            each.name: each
            for each in changes
            if each.kind == "component" and each.action in ("add", "change", "adopt")
        }
        while left:
            ready = [name for name in left if self.step.wanted["component", name].get("parent") not in left]
            if not ready:
                raise Invalid(
                    f"{self.bundle.name}: components lie in each other in a circle: {', '.join(sorted(left))}"
                )
            for name in ready:
                with self.naming("component", name):
                    self.numbered("component", ("component", name), self.step.wanted["component", name], name=name)
                del left[name]

    # Seeds

    def seeds(self) -> None:
        if not self.bundle.seeds:
            return
        row = _found(self.tx).bundles.get(self.bundle.name)
        before = None if row is None else stored(self.layer, row)
        rows = _rows(self.tx)
        own = {name for kind, name in self.step.wanted if kind == "entity"}
        required = {
            name for each in self.bundle.requires for kind, name in _found(self.tx).owned(each) if kind == "entity"
        }
        for seed, values in fresh(self.step, before):
            with self.naming("seed", mark(seed.entity, {each: values.get(each) for each in seed.key})):
                if seed.entity not in own | required:
                    raise Invalid(f"{seed.entity!r} is neither this bundle's nor one's that it requires")
                if present(rows, seed, values):
                    continue
                given = {label: self.seeded(rows, value) for label, value in values.items()}
                number = self.tx.insert(seed.entity, given, loading=True)
                rows.add(self.tx, seed.entity, number, given)

    def seeded(self, rows: Rows, value: Any) -> Any:
        if not isinstance(value, Mapping) or set(value) not in ({"$ref"}, {"$principal"}):
            return value
        number = referred(rows, value)
        if number is None:
            raise Invalid(f"there is no such row: {dict(value)}", hint="rows that are referred to come first")
        return number

    # What the law says of it

    def check(self) -> None:
        """Everything that the bundle defines could work, whatever of it has changed."""
        view, tx = within(self.layer, self.tx), self.tx
        who, on = tx.execution.principal, tx.name
        checks: dict[str, Callable[[dict[str, Any]], Any]] = {
            "blueprint": lambda row: blueprints.shape(row),
            "projection": lambda row: projections.check(view, row, who, on),
            "function": lambda row: functions.check(view, row, on),
            "contract": lambda row: _contract(view, row, on),
            "trigger": lambda row: triggers.check(view, row, on),
        }
        for kind, name in self.step.wanted:
            if kind in checks:
                with self.naming(kind, name):
                    checks[kind](blueprints.row_of(view, kind, name, on))

    # The bundle's own row

    def adopted(self, found: Found, changes: list[Change]) -> None:
        """What was another bundle's is not any more."""
        taken = {each.key for each in changes if each.action == "adopt"}
        for name, row in found.bundles.items():
            if name != self.bundle.name and taken & found.owned(name).keys():
                left = {key: number for key, number in found.owned(name).items() if key not in taken}
                manifest = {**row["manifest"], "items": _grouped(left)}
                self.tx.record(BUNDLE, self.tx._encoded(BUNDLE, {"manifest": manifest}, partial=True), row["id"])

    def record(self) -> None:
        tx, bundle = self.tx, self.bundle
        found = _found(tx)
        numbers = {key: found.id(key, self.step.owned.get(key)) for key in self.step.wanted}
        manifest = {
            "description": bundle.description, "requires": dict(bundle.requires),
            "items": _grouped({key: number for key, number in numbers.items() if number is not None}),
        }  # fmt: skip
        values = {
            "name": bundle.name, "version": bundle.version, "manifest": manifest, "digest": bundle.digest,
            "content": pack(bundle.files), "signer": bundle.signer,
        }  # fmt: skip
        row = found.bundles.get(bundle.name)
        tx.record(BUNDLE, tx._encoded(BUNDLE, values), None if row is None else row["id"])


_LATER = ("required", "unique", "indexed", "check", "description", "annotations")  # options a retype has no say in


def _contract(view: Any, row: Mapping[str, Any], on: str) -> None:
    shaped = None if row["blueprint"] is None else blueprints.row_by_id(view, "blueprint", row["blueprint"], on)
    contracts.check(view, row, shaped, on)
    contracts.check_agent(row)


def _grouped(items: Mapping[Key, int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (kind, name), number in items.items():
        found.setdefault(kind, {})[name] = number
    return found


def _erase(tx: Tx, found: Found, gone: list[Key], owned: Mapping[Key, int]) -> None:
    """Take definitions away, what refers to others first."""
    children = [key for key in gone if key[0] == "component"]
    entities: list[str] = []
    for key in sorted(gone, key=lambda key: (-KINDS.index(key[0]), key not in children)):
        kind, name = key
        number = found.id(key, owned.get(key))
        if number is None:
            continue
        if kind == "entity":
            entities.append(name)
        elif kind == "field":
            entity, _, label = name.partition(".")
            evolve.alter(tx, entity, {}, {}, {}, (label,), {}, None, None)
        elif kind == "grant":
            authority.revoke(tx, number)
        elif kind in ("role", "principal"):
            _leave(tx, name, number)
        elif kind == "component":
            _component(tx, number)
        else:
            tx.delete(kind, number)
    _drop(tx, entities)


def _drop(tx: Tx, entities: list[str]) -> None:
    """Drop entities, those that no other refers to first; of a ring a reference goes before."""
    while entities:
        refer = {
            name: [
                (e.name, f.name) for e, f in tx.schema.referring.get(name, ()) if e.name in entities and e.name != name
            ]
            for name in entities
        }
        free = min(entities, key=lambda name: len(refer[name]))
        for entity, label in refer[free]:
            evolve.alter(tx, entity, {}, {}, {}, (label,), {}, None, None)
        evolve.drop(tx, free)
        entities.remove(free)


def _component(tx: Tx, number: int) -> None:
    """A component, and those that lie in it."""
    entity = SYSTEM.by_name["component"]
    if tx.work.table(entity).get(tx.session, tx.chain, number) is None:
        return
    for child in tx._all_having(entity, entity.by_name["parent"], number):
        _component(tx, child)
    tx.delete("component", number)


def _leave(tx: Tx, name: str, number: int) -> None:
    """A principal goes, with what it was allowed; one that rows refer to stays, without roles."""
    for entity, f in tx.schema.referring.get("principal", ()):
        if f.on_delete == "restrict" and tx._all_having(entity, f, number):
            authority.principal(tx, name, None, {}, ())
            return
    tx.erase(PRINCIPAL, number)
