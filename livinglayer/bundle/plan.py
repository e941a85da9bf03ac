"""Plan: the exact difference between a bundle and the rows of a branch, and what of it lets somebody do more than before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from hashlib import sha256
from typing import Any

from ..errors import Conflict, Denied, Invalid
from ..law.blueprints import weaker
from ..law.functions import parts
from ..substrate.reads import clock
from ..substrate.schema import OWNER
from . import migrations
from .definitions import KINDS, UNMANAGED, Found, Key, Spec, plain, same, shorter, wanted
from .load import newer, of_files, satisfies, unpack

MARKS = {"add": "+", "change": "~", "remove": "-", "adopt": "=", "run": ">", "keep": " ", "conflict": "x"}


@dataclass(frozen=True)
class Change:
    """One difference: what is made, changed, removed, taken over, run, left alone or in the way."""

    bundle: str
    kind: str
    name: str
    action: str
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    widens: bool = False
    why: str | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.name

    @property
    def detail(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after}

    def json(self) -> dict[str, Any]:
        return {"bundle": self.bundle, "kind": self.kind, "name": self.name, "action": self.action, **self.detail,
                "widens": self.widens, "why": self.why}  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For people: `!` before what widens, then what happens to what, and how it differs."""
        yield f"{'!' if self.widens else ' '} {MARKS[self.action]} {self.kind} {self.name}" + (
            f"   ({self.why})" if self.why else ""
        )
        if self.action in ("change", "adopt"):
            was, now = shorter(self.before or {}, self.after or {})
            for label in now:
                yield from _difference(label, was[label], now[label])


def _difference(label: str, was: Any, now: Any) -> Iterator[str]:
    """How a value differs, down to where it does."""
    if isinstance(was, Mapping) and isinstance(now, Mapping) and was and now:
        for key in [*was, *(key for key in now if key not in was)]:
            if was.get(key) != now.get(key):
                yield from _difference(f"{label}.{key}", was.get(key), now.get(key))
    elif isinstance(was, list) and isinstance(now, list) and was and now:
        gone, come = _more(now, was), _more(was, now)
        said = [*(f"- {_short(each)}" for each in gone), *(f"+ {_short(each)}" for each in come)]
        yield f"        {label}: {', '.join(said) or 'another order'}"
    elif isinstance(was, str) and isinstance(now, str) and ("\n" in was or "\n" in now):
        gone, come = was.removesuffix("\n").split("\n"), now.removesuffix("\n").split("\n")
        yield f"        {label}: {len(gone)} → {len(come)} lines"
        for do, i, j, k, m in _edits(gone, come):
            yield from (f"          - {line}" for line in gone[i:j] if do != "equal")
            yield from (f"          + {line}" for line in come[k:m] if do != "equal")
    else:
        yield f"        {label}: {_short(was)} → {_short(now)}"


def _edits(was: list[str], now: list[str]) -> Sequence[tuple[str, int, int, int, int]]:
    """Which lines take the place of which; of long texts all together, since comparing those takes too long."""
    if max(len(was), len(now)) > 2000:
        return [("replace", 0, len(was), 0, len(now))]
    return SequenceMatcher(None, was, now, autojunk=False).get_opcodes()


def _short(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 4000 else text[:3999] + "…"


@dataclass
class Step:
    """One bundle of a plan: it, or one that it needs."""

    bundle: Any
    before: str | None  # the version that is applied now
    wanted: dict[Key, Spec]
    owned: dict[Key, int | None]
    migrations: list[tuple[str, Mapping[str, Any]]]
    changes: list[Change] = field(default_factory=list)
    digest: str | None = None  # of the files that are applied now


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
    who = layer._acting(principal)
    with layer.engine.snapshot() as session:
        catalog, epoch = layer._catalog, clock(layer.engine, session)[1]
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


class Rows:
    """Which rows have which values, asked once for each set of fields: what tells whether a seed is there."""

    def __init__(self, catalog: Any, session: Any, chain: Any, version: Any) -> None:
        self.catalog, self.session, self.chain, self.version = catalog, session, chain, version
        self._known: dict[tuple[str, tuple[str, ...]], dict[tuple[Any, ...], int]] = {}

    def by(self, name: str, labels: tuple[str, ...]) -> dict[tuple[Any, ...], int]:
        """Ids by the values of these fields, in stored form."""
        found = self._known.get((name, labels))
        if found is None:
            entity = self.catalog.schema(self.session, self.chain, self.version).get(name)
            fields = [entity.get(label) for label in labels]
            table = self.catalog.table(self.session, entity.store, self.version)
            found = {
                tuple(table.value(f, row.values) for f in fields): number
                for number, row in table.scan(self.session, self.chain)
            }
            self._known[name, labels] = found
        return found

    def add(self, tx: Any, name: str, number: int, given: Mapping[str, Any]) -> None:
        """A row that was written since."""
        entity = tx.schema.get(name)
        for (other, labels), found in self._known.items():
            if other != name:
                continue
            if all(label in given for label in labels):
                key = tuple(entity.get(label).encode(name, given[label], 1 << 24) for label in labels)
            else:  # the default of a field tells
                table = tx.work.table(entity)
                row = table.get(tx.session, tx.chain, number)
                key = tuple(table.value(entity.get(label), row.values) for label in labels)
            found[key] = number

    def has(self, name: str) -> bool:
        return name in self.catalog.schema(self.session, self.chain, self.version).by_name


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


def fresh(step: Step, before: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """The seeds that the version applied before had not: what people changed or deleted of those stays as they left it."""
    known: set[str] = set()
    for seed in before.seeds if before is not None else ():
        entity, label = migrations.renamed(step.migrations, seed.entity)
        known |= {mark(entity, {label(each): row.get(each) for each in seed.key}) for row in seed.rows}
    for seed in step.bundle.seeds:
        for row in seed.rows:
            if mark(seed.entity, {each: row.get(each) for each in seed.key}) not in known:
                yield seed, row


def mark(entity: str, key: Mapping[str, Any]) -> str:
    """What tells a seed from all others."""
    return f"{entity} {json.dumps(key, sort_keys=True, ensure_ascii=False, default=str)}"


def seeds(step: Step, rows: Rows, before: Any) -> list[Change]:
    """How many rows are going to be added to which entity."""
    counts: dict[str, int] = {}
    for seed, row in fresh(step, before):
        there = rows.has(seed.entity) and present(rows, seed, row)
        counts[seed.entity] = counts.get(seed.entity, 0) + (not there)
    made = []
    for entity, count in counts.items():
        own = ("entity", entity) in step.wanted
        if count:
            why = f"{count} row{'s' * (count != 1)}" + ("" if own else f" of {entity}, which is not this bundle's")
            made.append(Change(step.bundle.name, "seed", entity, "add", None, {"rows": count}, not own, why))
    return made


def present(rows: Rows, seed: Any, row: Mapping[str, Any]) -> bool:
    """Whether a row with the key of a seed is there."""
    entity = rows.catalog.schema(rows.session, rows.chain, rows.version).get(seed.entity)
    if any(label not in entity.by_name for label in seed.key):
        return False  # a field that is made with it
    values = []
    for label in seed.key:
        value = row.get(label)
        if isinstance(value, Mapping) and set(value) in ({"$ref"}, {"$principal"}):
            found = referred(rows, value)
            if found is None:
                return False
            values.append(found)
        else:
            values.append(entity.get(label).encode(entity.name, value, 1 << 24))
    return tuple(values) in rows.by(seed.entity, tuple(seed.key))


def referred(rows: Rows, value: Mapping[str, Any]) -> int | None:
    """The row that {"$ref": {"customer": {"email": "x"}}} or {"$principal": "ann"} means."""
    if "$principal" in value:
        return rows.by("principal", ("name",)).get((value["$principal"],))
    (name, by), *_ = value["$ref"].items()
    if not rows.has(name):
        return None
    labels = tuple(sorted(by))
    entity = rows.catalog.schema(rows.session, rows.chain, rows.version).get(name)
    wanted = tuple(entity.get(label).encode(name, by[label], 1 << 24) for label in labels)
    return rows.by(name, labels).get(wanted)


# Widening


class Widening:
    """Says of a change why it lets somebody do more than before; None when it does not."""

    def __init__(self, found: Found, step: Step) -> None:
        self.found, self.wanted = found, step.wanted
        rows = found.rows
        self.triggered = self._calling(
            {row["function"] for row in rows["trigger"].values()}
            | {spec["function"] for (kind, _), spec in step.wanted.items() if kind == "trigger"}
        )
        self.lent = self._calling({name for row in rows["contract"].values() for name in row["functions"] or ()})
        self.grants = [row for row in found.grants.values() if row["subject"] != OWNER]
        self.spoken = {row["resource"] for row in self.grants if row["effect"] == "allow"}
        bound = [row["subject"] for row in self.grants if row["effect"] == "deny"]
        bound += [row["subject"] for row in found.quotas.values()]
        self.bound = {found.principals[number]["name"] for number in bound if number in found.principals}

    def _calling(self, names: set[str]) -> set[str]:
        """These functions, and those that they call."""
        known = [(row["name"], row) for row in self.found.rows["function"].values()]
        known += [(name, spec) for (kind, name), spec in self.wanted.items() if kind == "function"]
        calls: dict[str, set[str]] = {}
        for name, spec in known:
            called = parts("reads", spec.get("reads")).get("function", {})
            calls.setdefault(name, set()).update(called.get("names") or ())
        waiting = [*names]
        while waiting:
            more = calls.get(waiting.pop(), set()) - names
            names |= more
            waiting += more
        return names

    def step(self, step: Mapping[str, Any]) -> str | None:
        """The same of a step of a migration: permissions and contracts go by names, and by what rows hold."""
        kind, given = migrations.parts(step)
        entity, to = given["entity"], given.get("to")
        said = [(g["effect"], g["resource"], g["fields"], g["predicate"]) for g in self.grants]
        said += [
            ("allow", name, part.get("fields"), part.get("where"))
            for row in self.found.rows["contract"].values()
            for label in ("reads", "scope")
            for name, part in parts(label, row[label]).items()
        ]
        if kind == "rename_entity":
            if any((effect, name) == ("deny", entity) for effect, name, _, _ in said):
                return f"a prohibition speaks of {entity}"
            named = any((effect, name) == ("allow", to) for effect, name, _, _ in said)
            return f"what is allowed already speaks of {to}" if named else None
        about = [(effect, fields or (), where or "") for effect, name, fields, where in said if name in (entity, "*")]
        if kind == "rename" and any(effect == "deny" and given["field"] in fields for effect, fields, _ in about):
            return f"a prohibition speaks of {entity}.{given['field']}"
        coming: Mapping[str, Any] = (
            {str(to): given["field"]} if kind == "rename" else given["values"] if kind == "set" else {}
        )
        for label, value in coming.items():
            source = value.get("$field") if kind == "set" and isinstance(value, Mapping) else value
            moved = kind == "rename" or source is not value
            if moved and any(e == "allow" and label in fields and source not in fields for e, fields, _ in about):
                return f"what is allowed already speaks of {entity}.{label}"
            if any(re.search(rf"\b{re.escape(label)}\b", where or "") for _, _, _, where in said):
                return f"a condition of what is allowed speaks of {label}"
        return None

    def why(self, key: Key, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str | None:
        judge = getattr(self, f"_{key[0]}", None)
        said = None if judge is None else judge(key[1], before, after)
        named = key[1] if key[0] == "entity" else f"{key[0]}:{key[1]}"
        if said is None and before is None and named in self.spoken:
            return f"a permission that is there already speaks of {named}"
        if key[0] == "projection" and before is None and after is not None and "*" in self.spoken:
            return "who may read everything may read it, and it shows what whoever applies this may see"
        return said

    def _grant(self, name: str, before: Any, after: Any) -> str | None:
        if after is None:
            return "a prohibition goes" if before["effect"] == "deny" else None
        return None if after["effect"] == "deny" else f"{after['to']} may {after['action']} {after['resource']}"

    def _role(self, name: str, before: Any, after: Any) -> str | None:
        if after is not None and before is not None and before["kind"] != "role":
            return "a principal becomes a role"
        return "prohibitions and limits of it go" if after is None and name in self.bound else None

    def _principal(self, name: str, before: Any, after: Any) -> str | None:
        had, has = {*(before or {}).get("roles", ())}, {*(after or {}).get("roles", ())}
        if more := sorted(has - had):
            return f"{name} gets the role {', '.join(more)}"
        if less := sorted((had - has) & self.bound):
            return f"prohibitions and limits of {', '.join(less)} do not hold for {name} any more"
        changed = after is not None and before is not None and not same(before["attributes"], after["attributes"])
        return "conditions may speak of its attributes" if changed else None

    def _blueprint(self, name: str, before: Any, after: Any) -> str | None:
        if after is None:
            return None
        was: Mapping[str, Any] = before or {"tier": "namespace"}
        said = []
        if after["tier"] == "process" and (before is None or was["tier"] != "process"):
            said.append("tier process: no walls")
        elif weaker(after["tier"], was["tier"]) and before is not None:
            said.append(f"tier {was['tier']} → {after['tier']}")
        said += _opened(was.get("egress"), after.get("egress"))
        said += [f"mounts {_of(each)}" for each in _more(was.get("mounts"), after.get("mounts"))]
        said += [f"uses secret {_of(each)}" for each in _more(was.get("secrets"), after.get("secrets"))]
        if before is not None:
            said += [
                f"another {label}"
                for label in ("base", "packages", "environment", "user_name")
                if was.get(label) != after.get(label)
            ]
            said += [f"port {_of(each)}" for each in _more(was.get("ports"), after.get("ports"))]
        return "; ".join(said) or None

    def _function(self, name: str, before: Any, after: Any) -> str | None:
        if after is None:
            return None
        if after.get("rights") == "definer":
            return "it has the rights of whoever applies this"
        if lent := self._lent(before, after):
            return "; ".join(lent)
        does = ("language", "code", "reads", "writes", "blueprint")
        if before is None or any(before.get(k) != after.get(k) for k in does):
            if name in self.triggered:
                return "a trigger runs it as whoever wrote the trigger"
            if name in self.lent:
                return "what a contract may call calls it" if before is None else "boxes of a contract may call it"
        return None

    def _projection(self, name: str, before: Any, after: Any) -> str | None:
        changed = before is not None and after is not None and before["statement"] != after["statement"]
        return "it shows what whoever applies this may see" if changed else None

    def _contract(self, name: str, before: Any, after: Any) -> str | None:
        if after is None:
            return None
        was: Mapping[str, Any] = before or {}
        said = [f"{word} {_of(each)}" for label, word in (("functions", "calls"), ("projections", "shows"), ("contracts", "delegates to"))
                for each in _more(was.get(label), after.get(label))]  # fmt: skip
        for label, word in (("reads", "reads"), ("scope", "writes")):
            mine, theirs = parts(label, after.get(label)), parts(label, was.get(label))
            said += [
                f"{word} {entity}"
                for entity, part in mine.items()
                if entity not in theirs or not _within(part, theirs[entity])
            ]
        if after.get("egress") is None and was.get("egress") is not None:
            said.append("egress as its blueprint")
        else:
            said += _opened(was.get("egress"), after.get("egress"))
        if after.get("secrets") is None and was.get("secrets") is not None:
            said.append("secrets as its blueprint")
        else:
            said += [f"uses secret {_of(each)}" for each in _more(was.get("secrets"), after.get("secrets"))]
        if after.get("model") and after["model"] != was.get("model"):
            said.append(f"asks a model at {after['model'].get('url')}")
        if before is not None:
            least, now = was.get("minimum_tier"), after.get("minimum_tier")
            if least and (not now or weaker(now, least)):
                said.append(f"minimum_tier {least} → {now or 'none'}")
            if weaker(tier := self._tier(after, True), then := self._tier(was, False)):
                said.append(f"tier {then} → {tier}")
            if was.get("blueprint") != after.get("blueprint"):
                said.append(f"blueprint {was.get('blueprint')} → {after.get('blueprint')}")
            first = (after.get("approvals") or [])[: len(was.get("approvals") or ())]
            if first != (was.get("approvals") or []):  # the first that speaks of an act decides who is asked
                gone = _more(after.get("approvals"), was.get("approvals"))
                said.append("approval no longer needed" if gone else "approvals: others are asked first")
            said += ["stops later" for _ in _more(after.get("stops"), was.get("stops"))][:1]
            for label, amount in (was.get("budget") or {}).items():
                now = (after.get("budget") or {}).get(label)
                if now is None or now > amount:
                    said.append(f"budget {label} {plain(amount)} → {'none' if now is None else plain(now)}")
        elif self._tier(after, True) == "process":
            said.append("tier process: no walls")
        if before is None:
            said += self._lent(before, after)
        return "; ".join(dict.fromkeys(said)) or None

    def _lent(self, before: Any, after: Mapping[str, Any]) -> list[str]:
        """What boxes have by a blueprint that is not the bundle's own, when that is another than before."""
        name = after.get("blueprint")
        if name is None or ("blueprint", name) in self.wanted or (before or {}).get("blueprint") == name:
            return []
        row = self._shape(name)
        return [
            f"{k} as blueprint {name}" for k in ("egress", "secrets", "mounts") if after.get(k) is None and row.get(k)
        ]

    def _shape(self, name: str | None) -> Mapping[str, Any]:
        return next((row for row in self.found.rows["blueprint"].values() if row["name"] == name), {})

    def _tier(self, contract: Mapping[str, Any], coming: bool) -> str:
        """The tier of a contract's boxes, now or after this."""
        shape = self._shape(contract.get("blueprint"))
        if coming:
            shape = self.wanted.get(("blueprint", contract.get("blueprint") or ""), shape)
        return str(contract.get("tier") or shape.get("tier") or "namespace")

    def _trigger(self, name: str, before: Any, after: Any) -> str | None:
        return (
            None
            if after is None or not after.get("enabled", True)
            else f"calls {after['function']} as whoever applies this"
        )

    def _quota(self, name: str, before: Any, after: Any) -> str | None:
        if after is None:
            return "a limit goes"
        return "a limit rises" if before is not None and after["amount"] > before["amount"] else None


def _more(was: Any, now: Any) -> list[Any]:
    """What one list has and the other has not."""
    had = [json.dumps(each, sort_keys=True) for each in was or ()]
    return [each for each in now or () if json.dumps(each, sort_keys=True) not in had]


def _of(value: Any) -> str:
    if isinstance(value, Mapping):
        value = next(
            (value[k] for k in ("name", "secret", "source", "host", "path") if k in value),
            json.dumps(value, sort_keys=True),
        )
    return str(value)


def _opened(was: Sequence[Any] | None, now: Sequence[Any] | None) -> list[str]:
    """Egress rules that came, and prohibitions that went."""

    def denies(rule: Any) -> bool:
        return isinstance(rule, Mapping) and rule.get("action") == "deny"

    both = [rule for rule in was or () if rule in (now or ())]
    if both != [rule for rule in now or () if rule in (was or ())]:
        return ["egress: its rules come in another order"]
    opened = [
        f"egress opens: {rule if isinstance(rule, str) else json.dumps(rule, sort_keys=True)}"
        for rule in _more(was, now)
        if not denies(rule)
    ]
    return opened + ["egress: a prohibition goes" for rule in _more(now, was) if denies(rule)]


def _within(part: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a part of a contract allows no more than another: fields and actions of those, under the same condition."""
    for label in ("fields", "actions"):
        if other.get(label) is not None and (part.get(label) is None or not {*part[label]} <= {*other[label]}):
            return False
    return other.get("where") in (None, part.get("where"))
