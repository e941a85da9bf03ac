"""Checks of a bundle that need no layer: names, references, code, conditions, rows.

What a bundle speaks of is in it, is the system's own, or is another bundle's that it requires; of those only the layer
knows, so where a bundle requires others a name that is not here is left to it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Invalid, LayerError
from ..law import contracts, schedule, triggers
from ..law import secrets as vault
from ..law.blueprints import shape
from ..law.functions import LANGUAGES, parts
from ..law.signature import Signature
from ..law.usage import RESOURCES
from ..law.verbs import VERBS
from ..substrate.authority import PREFIXES
from ..substrate.predicates import compile_predicate, parse
from ..substrate.schema import SYSTEM, Entity, Field, Schema, check_entity_name, field_of, field_values
from ..substrate.values import json_text
from .documents import MOST_PROBLEMS, did_you_mean

if TYPE_CHECKING:
    from .load import Bundle

LARGEST = 1 << 20  # bytes of one value
ROWS = 1_000_000  # of all seeds
COLUMNS = ("tier", "base", "limits", "egress", "mounts", "secrets", "environment", "idle", "packages", "ports")


def check(bundle: Bundle, places: Mapping[tuple[str, str], str]) -> None:
    """Refuses a bundle that no layer could take; `places` says where each definition was written."""
    checking = Checking(bundle, places)
    with contextlib.suppress(_Enough):
        checking.all()
    if found := checking.problems:
        raise Invalid(found[0].message, found[0].hint, problems=[each.message for each in found])


class Checking:
    """One bundle on its way through the checks."""

    def __init__(self, bundle: Bundle, places: Mapping[tuple[str, str], str]) -> None:
        self.bundle, self.places = bundle, places
        self.problems: list[LayerError] = []
        self.open = bool(bundle.requires)  # some names are others'
        self.schema, self.whole = SYSTEM, False
        self.people = {**bundle.roles, **bundle.principals}

    def all(self) -> None:
        for part in (
            self.manifest, self.entities, self.policy, self.blueprints, self.functions, self.triggers, self.projections,
            self.contracts, self.components, self.seeds, self.migrations,
        ):  # fmt: skip
            part()

    def note(self, where: str, why: str, hint: str | None = None) -> None:
        self.problems.append(Invalid(f"{where}: {why}", hint))
        if len(self.problems) >= MOST_PROBLEMS:
            raise _Enough

    @contextlib.contextmanager
    def at(self, kind: str, name: object, inside: str = "") -> Iterator[None]:
        """Notes what is wrong within, with the place; the checks that follow go on."""
        try:
            yield
        except LayerError as error:
            where = self.places.get((kind, str(name)), f"{kind}: {name}")
            label = f"{where}.{inside}" if inside and not inside.startswith("[") else f"{where}{inside}"
            self.note(label, error.message, error.hint)
            raise _Noted from None

    @contextlib.contextmanager
    def each(self, kind: str, name: object) -> Iterator[None]:
        """The same around one definition: the first thing that is wrong with it is enough."""
        with contextlib.suppress(_Noted), self.at(kind, name):
            yield

    def known(self, what: str, name: str, here: Mapping[str, Any]) -> None:
        if name not in here and not self.open:
            raise Invalid(
                f"there is no {what} {name!r:.80} in this bundle",
                hint=did_you_mean(name, here) or f"define it, or require the bundle that has this {what}",
            )

    # What is checked

    def manifest(self) -> None:
        if self.bundle.name in self.bundle.requires:
            self.note(f"bundle.yaml: requires.{self.bundle.name}", "a bundle can't require itself")

    def entities(self) -> None:
        made: list[Entity] = []
        number = 1 << 40
        for name, spec in self.bundle.entities.items():
            with self.each("entities", name):
                check_entity_name(name)
                fields: list[Field] = []
                for label, given in spec["fields"].items():
                    number += 1
                    with self.at("entities", name, f"fields.{label}"):
                        row = field_values(name, label, given, LARGEST)
                        fields.append(field_of({**row, "id": number, "entity": 0, "store": f"x_{number}", "was": None}))
                ids = {f.name: f.id for f in fields}
                for n, labels in enumerate(spec.get("unique", ())):
                    with self.at("entities", name, f"unique[{n}]"):
                        for label in labels:
                            if label not in ids:
                                raise Invalid(f"{name!r} has no field {label!r:.60}", hint=did_you_mean(label, ids))
                number += 1
                sets = tuple(tuple(ids[label] for label in labels) for labels in spec.get("unique", ()))
                made.append(Entity(number, name, f"x_{number}", uniques=sets, fields=tuple(fields)))
        self.schema = Schema(SYSTEM.entities + tuple(made))
        self.whole = all(f.target in self.schema.by_name for entity in made for f in entity.references)
        for entity in made:
            for f in entity.fields:
                with self.each("entities", entity.name), self.at("entities", entity.name, f"fields.{f.name}"):
                    if f.type == "ref":
                        self.entity(f.target or "")
                    if f.rule:
                        self.predicate(f.rule, entity.name)

    def entity(self, name: str) -> Entity | None:
        """An entity by its name; None where it may be another bundle's."""
        found = self.schema.by_name.get(name)
        if found is None and not self.open:
            raise Invalid(
                f"there is no entity {name!r:.80} in this bundle",
                hint=did_you_mean(name, [e.name for e in self.schema.entities if not e.system])
                or "define it in schema.yaml",
            )
        return found

    def fields(self, entity: str, names: Sequence[str]) -> None:
        found = self.entity(entity)
        for name in names if found is not None else ():
            if name != "id" and found is not None and name not in found.by_name:
                raise Invalid(f"{entity!r} has no field {name!r:.60}", hint=did_you_mean(name, ["id", *found.by_name]))

    def predicate(self, text: str, entity: str | None) -> None:
        """Refuses a condition that can't be read; where all that it may speak of is here, also one that means nothing."""
        parse(text)
        found = None if entity is None else self.entity(entity)
        if found is not None and self.whole:
            compile_predicate(text, self.schema, found)

    def parts(self, kind: str, name: str, key: str, spec: Mapping[str, Any]) -> None:
        """Entities that are read or written, with fields and conditions."""
        with self.at(kind, name, key):
            found = parts(key, spec.get(key))
        for entity, part in found.items():
            with self.at(kind, name, f"{key}.{entity}"):
                self.fields(entity, part.get("fields") or ())
                if part.get("where"):
                    self.predicate(part["where"], entity)

    def policy(self) -> None:
        bundle = self.bundle
        for kind, group in (("roles", bundle.roles), ("principals", bundle.principals)):
            for name in group:
                with self.each(kind, name):
                    if name == "owner":
                        raise Invalid("'owner' is the layer's own", hint="choose another name")
                    if kind == "principals" and name in bundle.roles:
                        raise Invalid(f"{name!r} is a role already", hint="choose another name")
        for name, spec in bundle.principals.items():
            for n, role in enumerate(spec.get("roles", ())):
                with self.each("principals", name), self.at("principals", name, f"roles[{n}]"):
                    if role == "owner":
                        raise Invalid("'owner' is no role that a bundle could give", hint="an owner makes owners")
                    self.known("role", role, bundle.roles)
        for n, spec in enumerate(bundle.grants):
            with self.each("grants", n):
                with self.at("grants", n, "to"):
                    self.known("role or principal", spec["to"], self.people)
                self.resource(n, spec)
        for n, spec in enumerate(bundle.quotas):
            with self.each("quotas", n):
                if "subject" in spec:
                    self.known("role or principal", spec["subject"], self.people)
                if "contract" in spec:
                    self.known("contract", spec["contract"], bundle.contracts)
                if spec["resource"] not in RESOURCES:
                    raise Invalid(f"there is no quota of {spec['resource']!r:.60}", hint=", ".join(RESOURCES))

    def resource(self, n: int, spec: Mapping[str, Any]) -> None:
        """What a grant speaks of."""
        resource = spec["resource"]
        rows = resource != "*" and not resource.startswith(PREFIXES)
        with self.at("grants", n, "resource"):
            kind, colon, name = resource.partition(":")
            known = {
                "function": self.bundle.functions,
                "projection": self.bundle.projections,
                "contract": self.bundle.contracts,
            }
            if colon and not rows and kind in known and name != "*":
                self.known(kind, name, known[kind])
            if rows:
                entity, dot, label = resource.partition(".")
                self.fields(entity, [label] if dot else [])
        with self.at("grants", n, "fields"):
            if "fields" in spec and not rows:
                raise Invalid(f"{resource!r:.80} has no fields")
            self.fields(resource.partition(".")[0], spec.get("fields", ())) if rows else None
        with self.at("grants", n, "where"):
            if "where" in spec and not rows and resource != "*":
                raise Invalid(f"{resource!r:.80} has no rows that a predicate could be about")
            if "where" in spec:
                self.predicate(spec["where"], resource.partition(".")[0] if rows else None)

    def blueprints(self) -> None:
        for name, spec in self.bundle.blueprints.items():
            with self.each("blueprints", name):
                row = dict.fromkeys(COLUMNS) | {"tier": "namespace"} | dict(spec) | {"name": name}
                shape(row)
                with self.at("blueprints", name, "egress"):
                    vault.bind(row["egress"], vault.wanted(row["secrets"]))

    def functions(self) -> None:
        nouns = {verb.partition(".")[0] for verb in VERBS}
        for name, spec in self.bundle.functions.items():
            with self.each("functions", name):
                if name.partition(".")[0] in nouns:
                    raise Invalid(f"{name!r} is a name of the layer's own verbs", hint="choose another noun")
                if spec["language"] not in LANGUAGES:
                    raise Invalid(f"there is no language {spec['language']!r}", hint=", ".join(LANGUAGES))
                with self.at("functions", name, "signature"):
                    Signature.of(name, spec.get("signature"))
                for key in ("reads", "writes"):
                    self.parts("functions", name, key, spec)
                for key, what, here in (
                    ("calls", "function", self.bundle.functions),
                    ("projections", "projection", self.bundle.projections),
                ):
                    for n, each in enumerate(spec.get(key, ())):
                        with self.at("functions", name, f"{key}[{n}]"):
                            self.known(what, each, here)
                with self.at("functions", name, "blueprint"):
                    if "blueprint" in spec:
                        self.known("blueprint", spec["blueprint"], self.bundle.blueprints)
                with self.at("functions", name, "retries"):
                    triggers.retries(spec.get("retries"))
                with self.at("functions", name, "code"):
                    if spec["language"] == "python":
                        compiles(spec["code"], name)

    def triggers(self) -> None:
        for name, spec in self.bundle.triggers.items():
            with self.each("triggers", name):
                for key in ("function", "after_function"):
                    with self.at("triggers", name, key):
                        if key in spec:
                            self.known("function", spec[key], self.bundle.functions)
                for key, needed in (
                    ("on_actions", "on_entity"),
                    ("where", "on_entity"),
                    ("on_fields", "on_entity"),
                    ("after_status", "after_function"),
                ):
                    if key in spec and needed not in spec:
                        raise Invalid(f"{key} goes with {needed}")
                with self.at("triggers", name, "on_fields"):
                    if "on_entity" in spec:
                        self.fields(spec["on_entity"], spec.get("on_fields", ()))
                with self.at("triggers", name, "where"):
                    if "where" in spec:
                        self.predicate(spec["where"], spec["on_entity"])
                with self.at("triggers", name, "schedule"):
                    if "schedule" in spec:
                        schedule.parse(spec["schedule"])
                with self.at("triggers", name, "arguments"):
                    called = self.bundle.functions.get(spec["function"], {})
                    taken = (called.get("signature") or {}).get("arguments")
                    for each in spec.get("arguments", ()):
                        if taken is not None and each not in taken:
                            raise Invalid(
                                f"{spec['function']} has no argument {each!r:.60}", hint=did_you_mean(each, taken)
                            )
                with self.at("triggers", name, "retries"):
                    triggers.retries(spec.get("retries"))

    def projections(self) -> None:
        for name, spec in self.bundle.projections.items():
            for label, given in spec.get("parameters", {}).items():
                with self.each("projections", name), self.at("projections", name, f"parameters.{label}"):
                    field_values(name, "x", given, LARGEST)

    def contracts(self) -> None:
        bundle = self.bundle
        lists = (
            ("functions", "function", bundle.functions),
            ("projections", "projection", bundle.projections),
            ("contracts", "contract", bundle.contracts),
        )
        for name, spec in bundle.contracts.items():
            with self.each("contracts", name):
                for key in ("reads", "scope"):
                    self.parts("contracts", name, key, spec)
                for key, what, here in lists:
                    for n, each in enumerate(spec.get(key, ())):
                        with self.at("contracts", name, f"{key}[{n}]"):
                            self.known(what, each, here)
                shaped = spec.get("blueprint")
                with self.at("contracts", name, "blueprint"):
                    if shaped is not None:
                        self.known("blueprint", shaped, bundle.blueprints)
                if shaped is None or shaped in bundle.blueprints:
                    row = {"name": name, "egress": spec.get("egress"), "secrets": spec.get("secrets")}
                    blueprint = bundle.blueprints.get(shaped or "")
                    with self.at("contracts", name, "secrets"):
                        lent = contracts.lent(row, blueprint)
                    with self.at("contracts", name, "egress"):
                        vault.bind(contracts.egress(row, blueprint), vault.wanted(lent))
                for n, rule in enumerate(spec.get("approvals", ())):
                    with self.at("contracts", name, f"approvals[{n}]"):
                        self.approval(rule)

    def approval(self, rule: Mapping[str, Any]) -> None:
        kind, colon, called = rule["resource"].partition(":")
        if (rule["action"] == "call") != (bool(colon) and kind == "function"):
            raise Invalid(
                f"{rule['action']!r} of {rule['resource']!r:.80} can't be",
                hint="call of function:NAME; insert, update … of an entity",
            )
        if colon:
            self.known("function", called, self.bundle.functions)
            if "where" in rule:
                self.predicate(rule["where"], None)
        else:
            self.fields(kind, rule.get("fields", ()))
            if "where" in rule:
                self.predicate(rule["where"], kind)
        for who in rule.get("by", ()):
            self.known("role or principal", who, self.people | {"owner": {}})

    def components(self) -> None:
        above: dict[str, str | None] = {}
        for n, spec in enumerate(self.bundle.components):
            with self.each("components", n):
                if spec["name"] in above:
                    raise Invalid(f"{spec['name']!r:.80} is there twice", hint="give one of them another name")
                above[spec["name"]] = spec.get("parent")
        good: set[str | None] = {None}  # those from which the top is reached
        for n, spec in enumerate(self.bundle.components):
            with self.each("components", n):
                if "projection" in spec:
                    self.known("projection", spec["projection"], self.bundle.projections)
                if "parent" in spec:
                    self.known("component", spec["parent"], above)
                way: set[str | None] = set()
                place: str | None = spec["name"]
                while place not in good and place not in way:
                    way.add(place)
                    place = above.get(place or "")
                if place in way:
                    raise Invalid(f"{spec['name']!r:.80} is part of itself: {place!r:.80} is above and below it")
                good |= way

    def seeds(self) -> None:
        if sum(len(seed.rows) for seed in self.bundle.seeds) > ROWS:
            self.note("seeds.yaml: seeds", f"there are more than {ROWS:,} rows", "import them: layer import")
            return
        keys: dict[str, set[str]] = {}
        for n, seed in enumerate(self.bundle.seeds):
            with self.each("seeds", n):
                entity = self.entity(seed.entity)
                if entity is not None and entity.system:
                    raise Invalid(
                        f"{seed.entity!r} is the system's own: its rows have files of their own",
                        hint="policy.yaml, functions.yaml …",
                    )
                with self.at("seeds", n, "key"):
                    self.fields(seed.entity, seed.key)
                taken = keys.setdefault(seed.entity, set())
                for number, row in enumerate(seed.rows):
                    with self.at("seeds", n, f"rows[{number}]"):
                        self.row(entity, seed.key, row)
                        key = json_text("key", [seed.key, [row[label] for label in seed.key]])
                        if key in taken:
                            raise Invalid(
                                f"another row has the same {', '.join(seed.key)}",
                                hint="its key tells a row from all others",
                            )
                        taken.add(key)

    def row(self, entity: Entity | None, key: Sequence[str], row: Mapping[str, Any]) -> None:
        if missing := [label for label in key if row.get(label) is None]:
            raise Invalid(f"has no {missing[0]}, which is in its key")
        for label, value in row.items():
            f = None
            if entity is not None:
                f = entity.by_name.get(label)
                if f is None:
                    raise Invalid(
                        f"{entity.name!r} has no field {label!r:.60}", hint=did_you_mean(label, entity.by_name)
                    )
            if isinstance(value, Mapping) and set(value) & {"$ref", "$principal"} and (f is None or f.type == "ref"):
                self.reference(label, value)
            elif f is not None and f.type == "ref" and value is not None:
                raise Invalid(
                    f"{label}: {value!r:.60} is an id, which is another in each layer",
                    hint='{"$ref": {"customer": {"email": "x"}}}',
                )
            elif f is not None and f.type != "file":
                f.encode(entity.name if entity is not None else "", value, LARGEST)
            else:
                json_text(label, value)
        for label in entity.required if entity is not None else ():
            if row.get(label) is None and entity is not None and entity.by_name[label].initial is None:
                raise Invalid(f"has no {label}, which {entity.name} requires")

    def reference(self, label: str, value: Mapping[str, Any]) -> None:
        (sort, target), *more = value.items()
        if not more and sort == "$principal" and isinstance(target, str):
            return self.known("role or principal", target, self.people | {"owner": {}})
        if not more and sort == "$ref" and isinstance(target, Mapping) and len(target) == 1:
            ((entity, by),) = target.items()
            if (
                isinstance(by, Mapping)
                and by
                and not any(isinstance(each, list | dict) or each is None for each in by.values())
            ):
                return self.fields(entity, list(by))
        raise Invalid(
            f"{label}: can't be read as a reference",
            hint='{"$ref": {"customer": {"email": "x"}}}, or {"$principal": "ann"}',
        )

    def migrations(self) -> None:
        from .load import newer

        for migration in self.bundle.migrations:
            file = f"migrations/{migration.version}.yaml"
            if newer(migration.version, self.bundle.version):
                self.note(
                    file, f"leads beyond version {self.bundle.version} of the bundle", "raise version in bundle.yaml"
                )
            for n, step in enumerate(migration.steps):
                ((act, spec),) = step.items()
                try:
                    self.step(act, spec)
                except LayerError as error:
                    self.note(f"{file}: steps[{n}].{act}", error.message, error.hint)

    def step(self, act: str, spec: Mapping[str, Any]) -> None:
        if spec["entity"] in SYSTEM.by_name:
            raise Invalid(f"{spec['entity']!r} is the system's own")
        if act == "rename_entity":
            check_entity_name(spec["to"])
        if act == "retype":
            field_values(spec["entity"], spec["field"], spec["to"], LARGEST)
        for label, given in spec.get("fields", {}).items() if act == "add" else ():
            field_values(spec["entity"], label, given, LARGEST)
        if act == "set":
            if "where" in spec:
                parse(spec["where"])
            for label, value in spec["values"].items():
                json_text(label, value)
                if (
                    isinstance(value, Mapping)
                    and "$field" in value
                    and (len(value) != 1 or not isinstance(value["$field"], str))
                ):
                    raise Invalid(f"values.{label}: can't be read as another field", hint='{"$field": "title"}')


class _Enough(Exception):
    """More than anybody wants to read at once."""


class _Noted(Exception):
    """It was noted already what is wrong."""


def compiles(code: str, name: str) -> None:
    """Refuses text that is no Python; nothing of it is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise Invalid(f"is not Python: {line}{said}", hint="the code defines a function") from None
