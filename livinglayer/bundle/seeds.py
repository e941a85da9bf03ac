"""Seeds: rows that come with a bundle, once; what people did with them since is theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from . import migrations
from .changes import Change, Step


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
