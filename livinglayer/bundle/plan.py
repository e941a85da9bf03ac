"""Plan: the exact difference between a bundle and the rows of a branch, and what of it lets somebody do more than before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from ..errors import Conflict, Denied, Invalid
from ..substrate.reads import clock
from ..substrate.schema import OWNER
from . import migrations
from .changes import Change, Step
from .definitions import KINDS, UNMANAGED, Found, Key, same, shorter, wanted
from .load import newer, of_files, satisfies, unpack
from .seeds import Rows, seeds
from .widening import Widening


@dataclass
class Plan:
    """What applying a bundle to a branch would do, those it needs first."""

    name: str
    version: str
    branch: str
    steps: list[Step]

    @property
    def changes(self) -> list[Change]:
        return [change for step in self.steps for change in step.changes]

    @property
    def before(self) -> str | None:
        """The version that is applied now."""
        return self.steps[-1].before

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return all(change.action == "keep" for change in self.changes)

    @property
    def widens(self) -> bool:
        """Whether somebody could do more than before, so that an owner must say yes to exactly this."""
        return any(change.widens for change in self.changes)

    @cached_property
    def digest(self) -> str:
        """What `accept` names: another one for any other bundle, branch or difference."""
        said = [
            self.branch,
            [[s.bundle.name, s.bundle.digest, s.bundle.signer, s.before] for s in self.steps],
            [c.json() for c in self.changes],
        ]
        text = json.dumps(said, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
        return sha256(text.encode()).hexdigest()[:32]  # who can choose both may not find two bundles with one digest

    def json(self) -> dict[str, Any]:
        return {"bundle": self.name, "version": self.version, "before": self.before, "branch": self.branch, "digest": self.digest,
                "empty": self.empty, "widens": self.widens, "changes": [change.json() for change in self.changes]}  # fmt: skip

    def lines(self) -> list[str]:
        """For people, one difference a line; what widens begins with `!`."""
        return [line for change in self.changes for line in change.lines()]


def plan(
    layer: Any,
    bundle: Any,
    branch: str = "main",
    principal: str | None = None,
    *,
    adopt: bool = False,
    beside: Mapping[str, Any] | None = None,
) -> Plan:
    """What applying a bundle would do now, for an owner; `beside` are bundles by name that it may need. Changes nothing."""
    who = layer.id_of(principal)
    with layer.engine.snapshot() as session:
        catalog, epoch = layer.catalog, clock(layer.engine, session)[1]
        policy = catalog.policy(session, who, epoch)
        if not policy.sovereign():
            raise Denied(
                f"{policy.me['name']} may not plan or apply bundles: only an owner may",
                action="define",
                resource="bundle",
            )
        chain = catalog.chain(session, catalog.branch(session, branch, open_only=True))
        seeds = Rows(catalog, session, chain, epoch)
        return compare(
            Found(catalog, session, chain, epoch),
            bundle,
            branch,
            seeds,
            lambda row: stored(layer, row),
            adopt,
            beside or {},
        )


def stored(layer: Any, row: Mapping[str, Any]) -> Any:
    """The bundle as it was applied: what its row keeps."""
    data = layer.engine.get_blob(row["content"]) if row["content"] else None
    if data is None:
        raise Conflict(f"the files of bundle {row['name']!r} are not there", hint="restore a backup")
    return of_files(unpack(data))


def ordered(bundle: Any, beside: Mapping[str, Any], found: Found) -> list[Any]:
    """A bundle after those that it needs and that are not applied yet; Invalid for a circle, Conflict for what is missing."""
    placed: dict[str, Any] = {}
    way: list[str] = []

    def visit(each: Any) -> None:
        way.append(each.name)
        for name, constraint in each.requires.items():
            if name in way:
                raise Invalid(f"bundles need each other in a circle: {' → '.join([*way[way.index(name) :], name])}")
            applied = found.bundles.get(name)
            there = placed[name].version if name in placed else None if applied is None else str(applied["version"])
            if there is not None and satisfies(there, constraint):
                continue
            other = beside.get(name)
            if name in placed or other is None or not satisfies(other.version, constraint):
                known = f"applied is {there}" if there else "it is not applied"
                near = "" if other is None else f", beside it lies {other.version}"
                raise Conflict(
                    f"{each.name} needs {name} {constraint}: {known}{near}",
                    hint=f"apply {name} first, or put its directory beside this one",
                )
            visit(other)
        way.pop()
        placed[each.name] = each

    visit(bundle)
    return list(placed.values())


def compare(
    found: Found, bundle: Any, branch: str, rows: Rows, stored: Any, adopt: bool, beside: Mapping[str, Any]
) -> Plan:
    """The plan of a bundle and those that it needs."""
    made = Plan(bundle.name, bundle.version, branch, [])
    coming: dict[Key, str] = {}
    for each in ordered(bundle, beside, found):
        step = _step(found, each, rows, stored, adopt, coming)
        coming |= dict.fromkeys(step.wanted, each.name)
        made.steps.append(step)
    return made


def _step(found: Found, bundle: Any, rows: Rows, stored: Any, adopt: bool, coming: Mapping[Key, str]) -> Step:
    row = found.bundles.get(bundle.name)
    before = None if row is None else str(row["version"])
    if before is not None and newer(before, bundle.version):
        raise Conflict(
            f"{bundle.name} {before} is applied, and {bundle.version} is older",
            hint="there is no way back: write a newer version",
        )
    owned: dict[Key, int | None] = dict(found.owned(bundle.name))
    step = Step(
        bundle,
        before,
        wanted(bundle),
        owned,
        migrations.steps(bundle, before),
        digest=None if row is None else row["digest"],
    )
    there = standing(found, step)
    name = bundle.name
    widening = Widening(found, step)
    for label, each in step.migrations:
        opens, told = widening.step(each), migrations.told(each)
        why = f"{told}: {opens}" if opens else told
        step.changes.append(Change(name, "migration", label, "run", None, dict(each), opens is not None, why))
        migrations.foresee(each, there, owned)
    step.changes += differences(found, step, there, adopt, coming)
    step.changes += seeds(step, rows, None if row is None or not bundle.seeds else stored(row))
    if row is None or row["version"] != bundle.version or row["digest"] != bundle.digest:
        was = None if row is None else {"version": row["version"], "digest": row["digest"]}
        now = {"version": bundle.version, "digest": bundle.digest}
        short = shorter(was or {}, now)
        step.changes.append(
            Change(name, "bundle", name, "add" if row is None else "change", was and short[0], short[1])
        )
    return step


def standing(found: Found, step: Step) -> migrations.Items:
    """What is there of what a bundle has or wants."""
    there: migrations.Items = {}
    for key in {**step.wanted, **step.owned}:
        number = found.id(key, step.owned.get(key))
        if number is not None:
            there[key] = (number, found.spec(key, number))
    for _, name in [key for key in there if key[0] == "entity"]:
        for f in found.schema.by_name[name].fields:  # also those that others have added
            key = ("field", f"{name}.{f.name}")
            there[key] = (f.id, found.spec(key, f.id))
    return there


def differences(
    found: Found, step: Step, there: migrations.Items, adopt: bool, coming: Mapping[Key, str]
) -> list[Change]:
    """What is to be made, changed and removed, in the order of kinds."""
    made: list[Change] = []
    name, owned = step.bundle.name, step.owned
    others = {**found.owners(name), **coming}
    widening = Widening(found, step)
    for key, after in step.wanted.items():
        number, before = there.get(key, (None, None))
        before = (
            None
            if before is None
            else {k: v for k, v in before.items() if k in after or k not in UNMANAGED.get(key[0], ())}
        )
        ours = key in owned and owned[key] in (None, number)
        if key[0] == "field" and key not in others:  # one that somebody added to an entity of the bundle is its own now
            entity = ("entity", key[1].split(".")[0])
            ours = ours or (entity in owned and owned[entity] in (None, there.get(entity, (None,))[0]))
        if key in coming or (before is not None and not ours):
            whose = f"it is of bundle {others[key]}" if key in others else "it was not made by a bundle"
            if key[0] in ("role", "principal") and number == OWNER:
                raise Invalid(f"{key[1]!r} is the owner of the layer, which no bundle defines")
            if (
                not adopt
                or key in coming
                or (key[0] == "field" and ("entity", key[1].split(".")[0]) not in step.wanted)
            ):
                made.append(Change(name, *key, "conflict", before and dict(before), dict(after), why=whose))
                continue
            why = widening.why(key, None, after) or widening.why(key, before, after)
            made.append(Change(name, *key, "adopt", before, dict(after), why is not None, why or whose))
        elif before is None:
            why = widening.why(key, None, after)
            made.append(Change(name, *key, "add", None, dict(after), why is not None, why))
        elif not same(before, after):
            why = widening.why(key, before, after)
            made.append(Change(name, *key, "change", *shorter(before, after), why is not None, why))
    for key in owned:
        if key not in step.wanted and key in there and _whole(key, owned, step):
            why = widening.why(key, there[key][1], None)
            made.append(Change(name, *key, "remove", dict(there[key][1]), None, why is not None, why or _loss(key)))
    for key in there:
        entity = ("entity", key[1].split(".")[0])
        if key[0] == "field" and key not in owned and key not in step.wanted and entity in step.wanted:
            made.append(Change(name, *key, "keep", dict(there[key][1]), why="not in the bundle: left as it is"))
    return sorted(made, key=lambda change: (KINDS.index(change.kind), change.action == "remove"))


def _whole(key: Key, owned: Mapping[Key, Any], step: Step) -> bool:
    """Fields of an entity that goes as a whole are not told one by one."""
    entity = ("entity", key[1].split(".")[0])
    return key[0] != "field" or entity in step.wanted or entity not in owned


def _loss(key: Key) -> str | None:
    return (
        "its rows stay in history only"
        if key[0] == "entity"
        else "its values stay in history only"
        if key[0] == "field"
        else None
    )


# Seeds
