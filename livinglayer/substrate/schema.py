"""Schema: entities and fields as rows, and the system's own ones, frozen here.

Every entity has three tables (head, closed versions, rows touched on branches) whose columns are the union over all
branches; a column is named after the field that made it, so a rename costs nothing and branches may differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import Invalid, LimitExceeded
from .predicates import Predicate, compile_predicate
from .values import ENCODE, TYPES, Encode, Stored, decode

FORMAT = 4
FIRST_ID = 2000  # below it: the system's entities, their fields and the rows every layer begins with
MAIN, OWNER, OWNER_PERMISSION = 1500, 1501, 1502
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
NAME_LENGTH = 48
INDEXED_BYTES = 2000
# Words that one of the engines does not take as a bare name.
WORDS = frozenset(
    """add all alter analyse analyze and any array as asc asymmetric authorization autoincrement between binary both
    case cast check collate collation column commit concurrently constraint create cross current_catalog current_date
    current_role current_schema current_time current_timestamp current_user default deferrable delete desc distinct do
    drop else end escape except exists false fetch for foreign freeze from full grant group having if ilike in index
    initially inner insert intersect into is isnull join lateral leading left like limit localtime localtimestamp
    natural not nothing notnull null offset on only or order outer overlaps placing primary raise references returning
    right select session_user set similar some symmetric table tablesample then to trailing transaction true union
    unique update user using values variadic verbose when where window with""".split()
)
RESERVED_FIELDS = frozenset({"id", "tx", "tx_end", "op"})  # columns that views add


@dataclass(frozen=True)
class Field:
    """One field of an entity, as its row says."""

    id: int
    entity: int
    name: str
    type: str
    store: str
    required: bool = False
    uniq: bool = False
    indexed: bool = False
    initial: Any = None  # the default
    rule: str | None = None  # a check
    target: str | None = None  # of a reference: the entity's name
    on_delete: str = "restrict"
    options: Mapping[str, Any] = field(default_factory=dict)  # enum values; a state machine
    description: str | None = None
    annotations: Mapping[str, Any] | None = None
    was: Mapping[str, Any] | None = None  # the column and type before a retype that is not backfilled yet

    @cached_property
    def number(self) -> int:
        """The number in the column's name: what hashes call the column."""
        return column_number(self.store)

    @cached_property
    def values(self) -> frozenset[str]:
        """What an enum or state field may hold."""
        if self.type == "state":
            return frozenset(self.options["transitions"])
        return frozenset(self.options.get("values", ()))

    def encode(self, entity: str, value: Any, limit: int) -> Stored:
        return None if value is None else self.encoder(f"{entity}.{self.name}", value, limit)

    @cached_property
    def encoder(self) -> Encode:
        """What turns a Python value (not None) into a stored one, or raises Invalid."""
        if self.type not in ("enum", "state"):
            return ENCODE[self.type]

        def choose(what: str, value: Any, limit: int) -> Stored:
            stored = ENCODE["text"](what, value, limit)
            if stored not in self.values:
                raise Invalid(f"{what}: {stored!r} is not one of its values", hint=", ".join(sorted(self.values)))
            return stored

        return choose


def column_number(store: str) -> int:
    return int(store.rsplit("_", 1)[1])


@dataclass(frozen=True)
class Entity:
    """One entity with its fields, as one branch sees it."""

    id: int
    name: str
    store: str
    kind: str = "entity"  # or 'ledger': append-only facts, read through a view
    system: bool = False
    uniques: tuple[tuple[int, ...], ...] = ()
    fields: tuple[Field, ...] = ()
    description: str | None = None
    annotations: Mapping[str, Any] | None = None

    @cached_property
    def by_name(self) -> dict[str, Field]:
        return {f.name: f for f in self.fields}

    @cached_property
    def by_id(self) -> dict[int, Field]:
        return {f.id: f for f in self.fields}

    @cached_property
    def unique_sets(self) -> tuple[tuple[Field, ...], ...]:
        """Every set of fields that must differ from row to row."""
        sets: list[tuple[Field, ...]] = [(f,) for f in self.fields if f.uniq]
        sets += [tuple(self.by_id[i] for i in ids) for ids in self.uniques if all(i in self.by_id for i in ids)]
        return tuple(sets)

    @cached_property
    def encoders(self) -> dict[str, tuple[str, Encode, bool]]:
        """By field name: what errors call it, its encoder, and whether bytes may be given."""
        return {f.name: (f"{self.name}.{f.name}", self._bounded(f), f.type == "file") for f in self.fields}

    def _bounded(self, f: Field) -> Encode:
        """The encoder of a field, within what an index of either engine can hold."""
        sets = [len(fields) for fields in self.unique_sets if f in fields] + [1] * (f.indexed or f.type == "ref")
        if not sets or f.type not in ("text", "json"):
            return f.encoder
        most = INDEXED_BYTES // max(sets)

        def within(what: str, value: Any, limit: int) -> Stored:
            try:
                return f.encoder(what, value, min(limit, most))
            except LimitExceeded:
                raise LimitExceeded(
                    f"{what}: an indexed value has at most {most} bytes",
                    hint="index a shorter field, e.g. a hash of it",
                ) from None

        return within

    @cached_property
    def required(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.fields if f.required)

    @cached_property
    def defaults(self) -> tuple[Field, ...]:
        return tuple(f for f in self.fields if f.initial is not None)

    @cached_property
    def spanning(self) -> frozenset[str]:
        """Fields whose values say something about other rows: references and unique ones."""
        return frozenset(f.name for f in self.references) | {f.name for fields in self.unique_sets for f in fields}

    @cached_property
    def references(self) -> tuple[Field, ...]:
        return tuple(f for f in self.fields if f.type == "ref")

    def get(self, name: str) -> Field:
        found = self.by_name.get(name) if isinstance(name, str) else None
        if found is None:
            raise Invalid(
                f"{self.name!r} has no field {name!r:.120}", hint="fields: " + ", ".join(["id", *self.by_name])
            )
        return found


@dataclass(frozen=True)
class Schema:
    """What one branch can talk about at one moment."""

    entities: tuple[Entity, ...]

    @cached_property
    def by_name(self) -> dict[str, Entity]:
        return {e.name: e for e in self.entities}

    @cached_property
    def by_id(self) -> dict[int, Entity]:
        return {e.id: e for e in self.entities}

    @cached_property
    def referring(self) -> dict[str, list[tuple[Entity, Field]]]:
        """Which references lead to an entity."""
        found: dict[str, list[tuple[Entity, Field]]] = {}
        for entity in self.entities:
            for f in entity.references:
                found.setdefault(f.target or "", []).append((entity, f))
        return found

    @cached_property
    def _rules(self) -> dict[int, list[tuple[Field, Predicate]]]:
        return {}

    def rules(self, entity: Entity) -> list[tuple[Field, Predicate]]:
        """The compiled checks of an entity."""
        found = self._rules.get(entity.id)
        if found is None:
            found = [(f, compile_predicate(f.rule, self, entity)) for f in entity.fields if f.rule]
            self._rules[entity.id] = found
        return found

    def get(self, name: str) -> Entity:
        if not isinstance(name, str):
            raise Invalid(f"an entity is called by its name, not {name!r}", hint="layer schema lists them")
        found = self.by_name.get(name)
        if found is None:
            near = ", ".join(sorted(n for n in self.by_name if n[0] == name[:1]))
            raise Invalid(
                f"there is no entity {name!r}", hint=f"did you mean {near}?" if near else "layer schema lists them"
            )
        return found


def check_name(name: Any, what: str, words: frozenset[str] = WORDS) -> str:
    """A name that works unquoted on both engines, or Invalid."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > NAME_LENGTH:
        raise Invalid(
            f"{name!r} can't be the name of {what}",
            hint=f"lower-case letters, digits and single underscores, a letter first, at most {NAME_LENGTH}",
        )
    if name in words:
        raise Invalid(f"{name!r} is a word of SQL and can't be the name of {what}")
    return name


def check_entity_name(name: Any) -> str:
    check_name(name, "an entity")
    if name in SYSTEM.by_name or name.startswith(("pg_", "sqlite_", "ledger")) or name in ("meta", "blob"):
        raise Invalid(f"{name!r} is a name of the system's own")
    return str(name)


_DEFAULTS: dict[str, Any] = {
    "required": False, "unique": False, "indexed": False, "default": None, "check": None, "to": None,
    "on_delete": "restrict", "values": None, "transitions": None, "initial": None, "machine": None,
    "description": None, "annotations": None,
}  # fmt: skip


def field_values(entity: str, name: str, spec: str | Mapping[str, Any], limit: int) -> dict[str, Any]:
    """The row of a field from what people write: 'text!', 'ref person', or a dict. Invalid says what is wrong."""
    what = f"{entity}.{name}"
    check_name(name, f"a field of {entity}")
    if name in RESERVED_FIELDS:
        raise Invalid(f"{what}: {name!r} is a column every entity has already")
    if isinstance(spec, str):
        words = spec.removesuffix("!").split()
        spec = {
            "type": words[0] if words else "",
            "required": spec.endswith("!"),
            **({"to": words[1]} if len(words) == 2 else {}),
        }
    if not isinstance(spec, Mapping):
        raise Invalid(f"{what}: a field is text like 'text!' or a dict with a type")
    kind = spec.get("type")
    if isinstance(kind, str) and (" " in kind or kind.endswith("!")):
        return field_values(entity, name, {**field_spec(kind), **{k: v for k, v in spec.items() if k != "type"}}, limit)
    if kind not in TYPES:
        raise Invalid(f"{what}: there is no type {kind!r}", hint="types: " + ", ".join(TYPES))
    unknown = set(spec) - set(_DEFAULTS) - {"type"}
    if unknown:
        raise Invalid(
            f"{what}: {', '.join(sorted(map(str, unknown)))} is not an option of a field", hint=", ".join(_DEFAULTS)
        )
    given = {**_DEFAULTS, **spec}
    options: dict[str, Any] = {}
    if kind == "enum":
        options["values"] = _names(what, given["values"], "values")
    elif kind == "state":
        options = _machine(what, given)
        given["required"] = True  # a row is always in some state
        if given["default"] is None:
            given["default"] = options["initial"]
    elif kind == "ref":
        if not isinstance(given["to"], str):
            raise Invalid(f"{what}: a reference says where to, e.g. 'ref principal'")
        if given["on_delete"] not in ("restrict", "cascade", "null"):
            raise Invalid(f"{what}: on_delete is restrict, cascade or null, not {given['on_delete']!r}")
        if given["on_delete"] == "null" and given["required"]:
            raise Invalid(f"{what}: a required reference can't become null on delete")
    elif kind == "file" and given["default"] is not None:
        raise Invalid(f"{what}: a file has no default")  # a hash alone would show the content of others
    row = {
        "name": name, "type": kind, "required": bool(given["required"]), "uniq": bool(given["unique"]),
        "indexed": bool(given["indexed"]), "initial": given["default"], "rule": given["check"],
        "target": given["to"] if kind == "ref" else None, "on_delete": given["on_delete"], "options": options or None,
        "description": given["description"], "annotations": given["annotations"],
    }  # fmt: skip
    if row["initial"] is not None and row["initial"] != "now()":
        if kind == "decimal":
            row["initial"] = str(row["initial"])
        probe = Field(0, 0, name, kind, "x_0", options=options)
        stored = probe.encode(entity, row["initial"], limit)
        row["initial"] = decode(
            "json" if kind == "json" else "text" if kind in ("date", "datetime", "decimal") else kind, stored
        )
    return row


def field_spec(text: str) -> dict[str, Any]:
    words = text.removesuffix("!").split()
    return {"type": words[0], "required": text.endswith("!"), **({"to": words[1]} if len(words) == 2 else {})}


def _names(what: str, values: Any, word: str) -> list[str]:
    good = isinstance(values, list | tuple) and values and all(isinstance(v, str) and v for v in values)
    if not good or len(set(values)) != len(values):
        raise Invalid(f"{what}: needs {word}, a list of different texts")
    return list(values)


def _machine(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    moves = given["transitions"]
    if not isinstance(moves, Mapping) or not moves:
        raise Invalid(f"{what}: a state field needs transitions, e.g. {{'new': ['done'], 'done': []}}")
    for state, targets in moves.items():
        if not isinstance(state, str) or not isinstance(targets, list | tuple) or any(t not in moves for t in targets):
            raise Invalid(f"{what}: transitions of {state!r} must be a list of states that have their own line")
    initial = given["initial"] or next(iter(moves))
    if initial not in moves:
        raise Invalid(f"{what}: initial state {initial!r} is not one of {', '.join(moves)}")
    return {
        "initial": initial,
        "transitions": {s: list(t) for s, t in moves.items()},
        "machine": given["machine"] or what,
    }


def field_of(row: Mapping[str, Any]) -> Field:
    """A Field from its row (Python values, as read)."""
    return Field(
        id=row["id"], entity=row["entity"], name=row["name"], type=row["type"], store=row["store"],
        required=bool(row["required"]), uniq=bool(row["uniq"]), indexed=bool(row["indexed"]), initial=row["initial"],
        rule=row["rule"], target=row["target"], on_delete=row["on_delete"] or "restrict", options=row["options"] or {},
        description=row["description"], annotations=row["annotations"], was=row["was"],
    )  # fmt: skip


def schema_of(entities: Sequence[Mapping[str, Any]], fields: Sequence[Mapping[str, Any]]) -> Schema:
    """The Schema from the rows of `entity` and `field`; the system's own entities come from this file."""
    grouped: dict[int, list[Field]] = {}
    for row in sorted(fields, key=lambda r: r["id"]):
        grouped.setdefault(row["entity"], []).append(field_of(row))
    own = [
        Entity(
            id=row["id"], name=row["name"], store=row["store"], kind="entity", system=False,
            uniques=tuple(tuple(u) for u in row["uniques"] or ()), fields=tuple(grouped.get(row["id"], ())),
            description=row["description"], annotations=row["annotations"],
        )
        for row in sorted(entities, key=lambda r: r["id"])
        if not row["system"]
    ]  # fmt: skip
    return Schema(SYSTEM.entities + tuple(own))


# The system's own entities. Append only: a field's id is its place, and stored layers know it by that.
_ENTITIES: dict[str, tuple[str, dict[str, str | dict[str, Any]], list[list[str]]]] = {
    "entity": (
        "An entity of the schema.",
        {"name": "text!", "store": "text!", "kind": "text!", "system": "bool!", "uniques": "json", "description": "text",
         "annotations": "json"},
        [["name"]],
    ),
    "field": (
        "A field of an entity.",
        {"entity": {"type": "ref", "to": "entity", "required": True, "on_delete": "cascade"}, "name": "text!",
         "type": "text!", "store": "text!", "required": "bool!", "uniq": "bool!", "indexed": "bool!", "initial": "json",
         "rule": "text", "target": "text", "on_delete": "text", "options": "json", "description": "text",
         "annotations": "json", "was": "json"},
        [["entity", "name"]],
    ),
    "branch": (
        "A line of history; main has no parent.",
        {"name": "text!", "parent": "ref branch", "fork_tx": "int!", "base_own": "int!", "base_parent": "int!",
         "slice": "json", "status": {"type": "state", "transitions": {"open": ["discarded"], "discarded": []}}},
        [["name"]],
    ),
    "principal": (
        "Someone who acts: a person, an agent, a service, another layer; or a role they hold.",
        {"name": "text!", "kind": {"type": "enum", "values": ["human", "agent", "service", "layer", "role", "pending"],
         "default": "human"}, "attributes": "json", "token": "text"},
        [["name"]],
    ),
    "membership": (
        "A principal holds a role.",
        {"member": {"type": "ref", "to": "principal", "required": True, "on_delete": "cascade"},
         "role": {"type": "ref", "to": "principal", "required": True, "on_delete": "cascade"}},
        [["member", "role"]],
    ),
    "permission": (
        "A grant: who may (or may not) do what to which rows.",
        {"subject": {"type": "ref", "to": "principal", "required": True, "on_delete": "cascade"}, "action": "text!",
         "resource": "text!", "predicate": "text", "fields": "json", "branch": "text",
         "effect": {"type": "enum", "values": ["allow", "deny"], "default": "allow"}, "reason": "text",
         "valid_from": "datetime", "valid_to": "datetime", "delegable": {"type": "bool", "default": False},
         "granted_by": "ref principal", "source": {"type": "ref", "to": "permission", "on_delete": "cascade"}},
        [],
    ),
    "conflict": (
        "A field two branches changed differently; resolving it is an update.",
        {"branch": "text!", "target": "text!", "entity": "text!", "row_id": "int!", "field": "text", "base": "json",
         "ours": "json", "theirs": "json", "resolution": "json",
         "status": {"type": "state", "transitions": {"open": ["resolved", "closed"], "resolved": ["closed", "resolved"], "closed": []}}},
        [],
    ),
    "blueprint": (
        "The shape of a box.",
        {"name": "text!", "tier": "text!", "base": "text", "limits": "json", "egress": "json", "mounts": "json",
         "secrets": "json", "environment": "json", "idle": "json", "description": "text", "packages": "json", "slice": "bool",
         "ports": "json", "user_name": "text", "snapshot": "text", "annotations": "json"},
        [["name"]],
    ),
    "function": (
        "Logic as a row.",
        {"name": "text!", "language": "text!", "code": "text", "signature": "json", "blueprint": "ref blueprint",
         "reads": "json", "writes": "json", "timeout": "float", "description": "text",
         "rights": {"type": "enum", "values": ["caller", "definer"], "default": "caller"}, "retries": "json",
         "deterministic": "bool"},
        [["name"]],
    ),
    "contract": (
        "What an agent may see and do.",
        {"name": "text!", "projections": "json", "functions": "json", "scope": "json", "blueprint": "ref blueprint",
         "minimum_tier": "text", "egress": "json", "secrets": "json", "budget": "json", "approvals": "json",
         "description": "text", "reads": "json", "stops": "json", "artifacts": "json", "tier": "text", "model": "json",
         "program": "json", "instructions": "text", "contracts": "json", "decided": "json"},
        [["name"]],
    ),
    "projection": (
        "A named view over a slice, with a freshness.",
        {"name": "text!", "statement": "text!", "parameters": "json", "freshness": "json", "description": "text",
         "remote": "json"},
        [["name"]],
    ),
    "component": (
        "A piece of a page, as a row.",
        {"name": "text!", "projection": "ref projection", "kind": "text!", "properties": "json", "parent": "ref component"},
        [],
    ),
    "bundle": (
        "Files that became rows.",
        {"name": "text!", "version": "text!", "manifest": "json", "digest": "text", "content": "file", "signer": "text"},
        [["name"]],
    ),
    "secret": (
        "A secret, encrypted; its key is not in the database.",
        {"name": "text!", "sealed": "text!", "description": "text"},
        [["name"]],
    ),
    "trigger": (
        "What calls a function: a change of rows, the end of another function, or a time.",
        {"name": "text!", "function": "text!", "on_entity": "text", "on_actions": "json", "predicate": "text", "on_fields": "json",
         "schedule": "text", "after_function": "text", "after_status": "text", "arguments": "json",
         "branch": {"type": "text", "default": "main"}, "enabled": {"type": "bool", "default": True}, "retries": "json",
         "description": "text"},
        [["name"]],
    ),
    "quota": (
        "How much of a resource a principal or a contract may use in a time.",
        {"subject": "ref principal", "contract": "ref contract", "resource": "text!", "amount": "float!", "seconds": "int!",
         "description": "text"},
        [],
    ),
    "approval": (
        "What somebody must allow before it happens: an act of a box, or a merge.",
        {"execution": {"type": "int", "required": True, "indexed": True}, "contract": "text", "principal": {"type": "ref", "to": "principal", "on_delete": "null"},
         "branch": "text!", "action": "text!", "resource": "text!", "request": "json", "digest": "text!", "rule": "json",
         "reason": "text",
         "status": {"type": "state", "transitions": {"pending": ["approved", "refused", "expired", "withdrawn"],
         "approved": ["done", "failed"], "refused": [], "expired": [], "withdrawn": [], "done": [], "failed": []}},
         "expires": "datetime", "answered_by": {"type": "ref", "to": "principal", "on_delete": "null"}, "answer": "text",
         "result": "json", "asked": {"type": "datetime", "default": "now()"}, "answered": "datetime"},
        [],
    ),
    "token": (
        "What a principal proves with who it is; the token itself is kept nowhere.",
        {"principal": {"type": "ref", "to": "principal", "required": True, "on_delete": "cascade"}, "name": "text!",
         "kind": {"type": "enum", "values": ["api", "e2b", "session", "login"], "default": "api"},
         "hash": "text!", "ending": "text", "scope": "json", "expires": "datetime",
         "revoked": "datetime", "made": {"type": "datetime", "default": "now()"}},
        [["hash"]],
    ),
    "sign_in": (
        "That somebody proved who they are, or could not.",
        {"principal": {"type": "ref", "to": "principal", "on_delete": "null"}, "how": "text!", "address": "text", "client": "text",
         "outcome": {"type": "enum", "values": ["in", "refused", "locked", "out"], "default": "in"}, "detail": "text",
         "token": {"type": "ref", "to": "token", "on_delete": "null"}, "at": {"type": "datetime", "default": "now()"}},
        [],
    ),
    "volume": (
        "Files that stay when boxes end, and that several may share.",
        {"name": "text!", "principal": {"type": "ref", "to": "principal", "required": True, "on_delete": "cascade"}, "place": "text!",
         "annotations": "json"},
        [["principal", "name"]],
    ),
}  # fmt: skip

# Append-only facts: never forked, hashed with the tx they were committed with. Read through views of these names.
_LEDGER: dict[str, tuple[str, dict[str, str]]] = {
    "tx": (
        "One atomic, attributed, chained change of one branch.",
        {"tx": "int", "branch": "text", "at": "datetime", "principal": "text", "execution": "int", "cause": "text",
         "reason": "text", "merged_from": "text", "hash": "text"},
    ),
    "change": (
        "A row a tx touched.",
        {"branch": "text", "tx": "int", "entity": "text", "row_id": "int", "op": "text"},
    ),
    "execution": (
        "One run of a function, agent or command, with its scope.",
        {"id": "int", "principal": "text", "parent": "int", "box": "text", "kind": "text", "scope": "json", "reason": "text",
         "trace": "text", "started": "datetime", "status": "text", "finished": "datetime", "result": "json", "verb": "text",
         "function": "text", "version": "int", "arguments": "json", "branch": "text", "state": "int", "contract": "text",
         "trigger": "text", "cause_tx": "int", "attempt": "int", "due": "datetime", "key": "text", "seed": "text",
         "snapshot": "text", "permissions": "json", "runner": "text"},
    ),
    "step": (
        "One recorded act of an execution.",
        {"execution": "int", "n": "int", "kind": "text", "detail": "json", "at": "datetime"},
    ),
    "box": (
        "One sandbox.",
        {"id": "text", "tier": "text", "owner": "text", "blueprint": "text", "created": "datetime"},
    ),
    "snapshot": (
        "The files (and memory) of a box at one moment, by content.",
        {"id": "text", "box": "text", "parent": "text", "created": "datetime"},
    ),
    "role": ("A principal that others hold.", {"id": "int", "name": "text", "attributes": "json"}),
    "usage": (
        "What an execution used.",
        {"execution": "int", "principal": "text", "contract": "text", "function": "text", "wall": "float", "cpu": "float",
         "memory": "float", "sent": "int", "received": "int", "disk": "int", "at": "datetime"},
    ),
    "decision": (
        "An answer to whether someone may do something, with the permissions behind it.",
        {"id": "int", "principal": "text", "action": "text", "resource": "text", "allowed": "bool", "permissions": "json",
         "reason": "text", "execution": "int", "at": "datetime"},
    ),
    "lineage": (
        "Where a box comes from: another box, a snapshot of it, and the branch made with it.",
        {"id": "int", "box": "text", "parent": "text", "snapshot": "text", "branch": "text", "execution": "int",
         "created": "datetime"},
    ),
}  # fmt: skip

# The number of each is its place here, from 1. Append only: stored layers know them by it.
_NUMBERED = (
    "entity", "field", "branch", "principal", "membership", "permission", "conflict", "blueprint", "function", "contract",
    "projection", "component", "bundle", "secret", "tx", "change", "execution", "step", "box", "snapshot", "role",
    "trigger", "quota", "usage", "decision", "lineage", "approval", "token", "sign_in", "volume",
)  # fmt: skip


def _system() -> Schema:
    entities = []
    for number, name in enumerate(_NUMBERED, start=1):
        first = number * 40
        if name in _LEDGER:
            description, kinds = _LEDGER[name]
            facts = tuple(
                Field(place, number, label, kind, f"{label}_{place}")
                for place, (label, kind) in enumerate(kinds.items(), first)
            )
            entities.append(Entity(number, name, f"ledger_{name}", "ledger", True, (), facts, description))
            continue
        description, specs, uniques = _ENTITIES[name]
        fields = []
        for place, (label, spec) in enumerate(specs.items(), first):
            own = {"id": place, "entity": number, "store": f"{label}_{place}", "was": None}
            fields.append(field_of({**_bare_field(name, label, spec), **own}))
        ids = {f.name: f.id for f in fields}
        sets = tuple(tuple(ids[n] for n in names) for names in uniques)
        entities.append(Entity(number, name, f"{name}_{number}", "entity", True, sets, tuple(fields), description))
    return Schema(tuple(entities))


def _bare_field(entity: str, name: str, spec: str | Mapping[str, Any]) -> dict[str, Any]:
    # The system's own names are checked by a test against both engines, not by the rules for users.
    row = field_values(entity, "x", spec, 1 << 20)
    if row["type"] == "state":
        row["options"]["machine"] = f"{entity}.{name}"
    return {**row, "name": name}


SYSTEM = _system()


def system_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of `entity` and `field` that describe the system's own entities: written once, at the beginning."""
    entities, fields = [], []
    for entity in SYSTEM.entities:
        entities.append({"id": entity.id, "name": entity.name, "store": entity.store, "kind": entity.kind, "system": True,
                         "uniques": [list(u) for u in entity.uniques] or None, "description": entity.description})  # fmt: skip
        for f in entity.fields:
            fields.append({"id": f.id, "entity": entity.id, "name": f.name, "type": f.type, "store": f.store, "required": f.required,
                           "uniq": f.uniq, "indexed": f.indexed, "initial": f.initial, "target": f.target, "on_delete": f.on_delete,
                           "options": dict(f.options) or None})  # fmt: skip
    return entities, fields


def with_field(schema: Schema, entity: Entity, new: Field) -> Schema:
    """The schema with one more field: what a check is compiled against before it is stored."""
    changed = replace(entity, fields=tuple(f for f in entity.fields if f.id != new.id) + (new,))
    return Schema(tuple(changed if e.id == entity.id else e for e in schema.entities))


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
