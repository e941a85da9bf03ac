"""Narrow: what an execution said it reads. Within what its principal may see, nothing else is there for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Invalid
from .predicates import LIMIT, Predicate, compile_predicate
from .schema import Schema
from .values import text

Narrow = tuple[tuple[str, tuple[str, ...] | None, str | None], ...]  # entity, its fields, which rows; in order
MOST = 1000  # entities, and fields of one
HINT = 'e.g. {"item": {"fields": ["name"], "where": "owner = :me"}, "part": None}'


@dataclass(frozen=True)
class Part:
    """What is there of one entity: these fields (None: all that may be read) of the rows that meet a condition."""

    fields: frozenset[str] | None
    where: Predicate | None


def canonical(narrow: Any) -> Narrow | None:
    """The one form of all that say the same; Invalid when it can't be one."""
    if narrow is None:
        return None
    if not isinstance(narrow, Mapping) or len(narrow) > MOST:
        raise Invalid(f"what a query is narrowed to is a dict of at most {MOST} entities", hint=HINT)
    found = []
    for entity, part in narrow.items():
        text("the name of an entity", entity, 1000)
        part = {} if part is None else part
        if not isinstance(part, Mapping) or not part.keys() <= {"fields", "where"}:
            raise Invalid(f"{entity!r} is narrowed to `fields` and `where`, not {part!r}", hint=HINT)
        fields, where = part.get("fields"), part.get("where")
        if fields is not None:
            wrong = isinstance(fields, str | bytes) or not isinstance(fields, Sequence | set | frozenset)
            if wrong or len(fields) > MOST or not all(isinstance(name, str) for name in fields):
                raise Invalid(f"the fields of {entity!r} are a list of names", hint=HINT)
            fields = tuple(sorted(set(fields)))
        if where is not None:
            text(f"the condition on {entity!r}", where, LIMIT)
        found.append((entity, fields, where))
    return tuple(sorted(found, key=lambda one: one[0]))


def compiled(narrow: Narrow | None, schema: Schema) -> dict[str, Part] | None:
    """Each entity's part; Invalid where an entity or field is not in the schema or a condition can't be read."""
    if narrow is None:
        return None
    found: dict[str, Part] = {}
    for name, fields, where in narrow:
        entity = schema.by_name.get(name)
        if entity is None:
            raise Invalid(f"there is no entity {name!r} to narrow a query to", hint="layer schema lists what there is")
        unknown = [] if fields is None else [f for f in fields if f != "id" and f not in entity.by_name]
        if unknown:
            raise Invalid(f"{name!r} has no field {unknown[0]!r} to narrow a query to")
        found[name] = Part(
            None if fields is None else frozenset((*fields, "id")),
            None if where is None else compile_predicate(where, schema, entity),
        )
    return found
