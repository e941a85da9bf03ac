"""A small layer with something of everything, and two ways to see what it holds."""

import random
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import apsw

import livinglayer
from livinglayer.errors import LayerError


def populate(layer: Any, rows: int = 40) -> None:
    """Every field type, versions, deletions, a branch that merged and one that did not, grants, an altered schema."""
    rng = random.Random(1)
    layer.define("person", {"name": "text!", "email": {"type": "text", "unique": True}})
    layer.define(
        "item",
        {
            "name": {"type": "text!", "indexed": True},
            "qty": {"type": "int", "indexed": True},
            "weight": "float",
            "price": "decimal",
            "sold": "bool",
            "made": "date",
            "seen": "datetime",
            "extra": "json",
            "kind": {"type": "enum", "values": ["a", "b"], "default": "a"},
            "status": {"type": "state", "transitions": {"new": ["open"], "open": ["done"], "done": []}},
            "owner": "ref person",
            "picture": "file",
        },
    )
    people = layer.insert("person", [{"name": f"p{n}", "email": f"p{n}@example.org"} for n in range(5)])
    items = layer.insert(
        "item",
        [
            {
                "name": f"item {n} " + "é" * rng.randrange(30),
                "qty": rng.randrange(100),
                "weight": rng.random(),
                "price": Decimal(rng.randrange(10**6)) / 100,
                "sold": n % 2 == 0,
                "made": date(2024, 1, 1 + n % 28),
                "seen": datetime(2024, 1, 1, n % 24, tzinfo=UTC),
                "extra": {"n": n, "list": [1, 2.5, None, "x"]},
                "kind": rng.choice("ab"),
                "owner": rng.choice(people),
                "picture": f"picture {n % 7}".encode() * 50,
            }
            for n in range(rows)
        ],
        reason="stock",
    )
    layer.insert("item", {"name": "long", "extra": {"text": "word " * 4000}})  # does not fit one page
    for item in items[::3]:
        layer.update("item", item, {"qty": rng.randrange(100), "status": "open"}, reason="count")
    for item in items[::5]:
        layer.update("item", item, {"price": Decimal("1.50")}, key=f"price/{item}")
    layer.delete("item", items[7])
    for branch in ("merged", "idea"):
        layer.fork(branch)
        layer.update("item", items[1], {"qty": 1000, "extra": {"branch": branch}}, branch=branch)
        layer.insert("item", {"name": f"on {branch}"}, branch=branch)
        layer.delete("item", items[2 if branch == "merged" else 4], branch=branch)
        if branch == "merged":
            assert layer.merge("merged", "main")
    layer.principal("ann", attributes={"team": "x"}, roles=["clerk"])
    layer.grant("clerk", "read", "item", where="qty > 3", fields=["name", "qty"], reason="so they can count")
    layer.alter("item", add={"color": "text"}, rename={"weight": "mass"})
    layer.update("item", items[3], {"color": "red"})


def served(layer: Any) -> list[Any]:
    """What the API answers: whole entities on each branch, and each indexed value by itself."""
    answers: list[Any] = []
    for branch in ("main", "idea"):
        for entity in ("item", "person", "item__history"):
            order = "id, tx" if entity.endswith("__history") else "id"
            answers.append(layer.query(f"select * from {entity} order by {order}", branch=branch))
    answers.append(
        layer.query("select * from item order by id", as_of=layer.query("select max(tx) as n from tx")[0]["n"] - 5)
    )
    for field, entity in (("name", "item"), ("qty", "item"), ("email", "person")):
        for value in sorted({str(row[field]) for row in layer.query(f"select {field} from {entity}")}):
            given = int(value) if field == "qty" and value != "None" else value
            answers.append(layer.query(f"select id from {entity} where {field} = :value order by id", {"value": given}))
    for table in ("tx", "change", "permission", "principal", "branch", "entity", "field", "execution"):
        answers.append(sorted(map(repr, layer.query(f"select * from {table}"))))
    return answers


def database(directory: str | Path) -> Path:
    return Path(directory) / ".layer" / "layer.db"


def settle(directory: str | Path) -> None:
    """Bring the write-ahead log into the file, so that the file is all there is."""
    connection = apsw.Connection(str(database(directory)))
    connection.pragma("wal_checkpoint(TRUNCATE)")
    connection.close()
    assert not Path(f"{database(directory)}-wal").exists()


def stored(path: Path) -> Iterator[Any]:
    """Everything in a SQLite file, schema included, through a connection that knows nothing of layers."""
    connection = apsw.Connection(str(path))
    connection.collation_needed(collate)
    try:
        schema = list(connection.execute("select type, name, tbl_name, sql from sqlite_schema"))
        yield schema
        for kind, name, _, _ in schema:
            if kind == "table":
                yield name, list(connection.execute(f'select * from "{name}" not indexed'))
    finally:
        connection.close()


def collate(connection: apsw.Connection, name: str) -> None:
    """Any order does for a connection that does not care for order."""
    connection.create_collation(name, lambda a, b: (a > b) - (a < b))


def examine(directory: str, answer: Connection) -> None:
    """In a process of its own, since a damaged file may bring it down: what does a layer there say of itself?"""
    answer.send(judge(directory))


def judge(directory: str) -> tuple[str, Any]:
    """('refused', why), ('problems', which), ('fine', what it serves), or ('broken', the unnamed error)."""
    try:
        layer = livinglayer.open(directory)
        try:
            report = layer.verify()
            return ("fine", served(layer)) if report else ("problems", report.problems[:3])
        finally:
            layer.close()
    except LayerError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "broken", f"{type(error).__name__}: {error}"
