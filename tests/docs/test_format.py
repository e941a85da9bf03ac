"""docs/format.md says what a database holds: nothing more and nothing less, on both engines, hashes included."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from struct import pack
from typing import Any

import apsw
import psycopg
import pytest

import livinglayer
from livinglayer import Layer
from livinglayer.substrate import chain

SPEC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
LIVE = 2**63 - 1
FACTS = ["execution", "outcome", "step", "box", "snapshot", "key", "prune", "call", "usage", "decision", "lineage"]


# -- the page


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", SPEC, re.M | re.S)
    assert found, f"docs/format.md has no section {title!r}"
    return found[1]


def parts(text: str) -> Iterator[tuple[str, str]]:
    """The ### sections of a section: heading and body."""
    pieces = re.split(r"^### (.*)\n", text, flags=re.M)[1:]
    yield from zip(pieces[::2], pieces[1::2], strict=True)


def table(text: str) -> list[list[str]]:
    """The cells of the first Markdown table, its head left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def bare(cell: str) -> str:
    return cell.strip("`")


def ticked(text: str) -> list[str]:
    return re.findall(r"`([^`]*)`", text)


def blocks(kind: str) -> list[str]:
    return [block.strip() for block in re.findall(rf"^```{re.escape(kind)}\n(.*?)^```", SPEC, re.M | re.S)]


def types(engine: str) -> dict[str, str]:
    place = 2 if engine == "sqlite" else 3
    return {row[0]: bare(row[place]) for row in table(section("Types"))}


def statements(engine: str, words: str) -> list[str]:
    """The statements of the blocks of an engine that hold these words."""
    return [s for block in blocks(f"sql {engine}") if words in block for s in block.splitlines() if s]


def entities() -> list[dict[str, Any]]:
    """The system's entities, as the page lists them."""
    found = []
    for kind, title in (("entity", "The system's entities"), ("ledger", "Views over the ledger")):
        for heading, body in parts(section(title)):
            number, name = re.fullmatch(r"(\d+): `(\w+)`", heading).groups()  # type: ignore[union-attr]
            fields = [
                {"id": int(row[0]), "name": bare(row[1]), "type": row[2], "options": row[3] if kind == "entity" else ""}
                for row in table(body)
            ]
            unique = re.search(r"^Unique: (.*?)\. Indexes: (.*)\.$", body, re.M)
            found.append(
                {
                    "id": int(number),
                    "name": name,
                    "kind": kind,
                    "store": f"{name}_{number}" if kind == "entity" else f"ledger_{name}",
                    "description": body.split("\n", 1)[0],
                    "fields": fields,
                    "unique": [u.split(", ") for u in ticked(unique[1])] if unique else [],
                    "indexes": ticked(unique[2]) if unique else [],
                }
            )
    return sorted(found, key=lambda entity: entity["id"])


def ledger_statements(engine: str) -> list[str]:
    """What makes the tables every layer has, from the page's tables and the rule above them."""
    kinds, at = types(engine), "" if engine == "sqlite" else "livinglayer."
    made = []
    for heading, body in parts(section("Tables of every layer")):
        name = bare(heading)
        if not heading.startswith("`") or (name == "blob" and engine == "sqlite"):
            continue
        columns = [(bare(row[0]), kinds[row[1]], row[2]) for row in table(body)]
        if name == "blob":
            columns = [(c, "text" if c == "digest" else f"{kind} not null", text) for c, kind, text in columns]
        key, indexes = re.search(r"^Key: `(.*?)`\. Indexes: (.*)\.$", body, re.M).groups()  # type: ignore[union-attr]
        listed = ", ".join(f"{column} {kind}" for column, kind, _ in columns)
        if engine == "sqlite" and f"{key} INTEGER" == listed.split(",")[0]:
            made.append(f"create table {name}({listed.replace(' INTEGER', ' INTEGER PRIMARY KEY', 1)})")
        else:
            made.append(
                f"create table {at}{name}({listed}, primary key({key}))" + " without rowid" * (engine == "sqlite")
            )
        for index in re.findall(r"`(\w+)` on `([\w, ]+)`(?: where `([^`]+)`)?", indexes):
            made.append(f"create index {index[0]} on {at}{name}({index[1]})" + (f" where {index[2]}" * bool(index[2])))
    return made


def entity_statements(engine: str, store: str, columns: list[tuple[str, str]], indexes: list[str]) -> list[str]:
    """What makes the tables of one entity, from the page's templates."""
    kinds, at = types(engine), "" if engine == "sqlite" else "livinglayer."
    words = {
        "{S}": store,
        "{columns}": "".join(f", {name} {kinds[kind]}" for name, kind in columns),
        "{names}": "".join(f", {name}" for name, _ in columns),
        "{old}": "".join(f", old.{name}" for name, _ in columns),
    }
    made = []
    for sql in statements(engine, "{S}"):
        for word, text in words.items():
            sql = sql.replace(word, text)
        made.append(sql)
    for index in indexes:
        on, numbers = re.fullmatch(r"(.*)_i_([\d_]+)", index).groups()  # type: ignore[union-attr]
        listed = [next(name for name, _ in columns if name.rsplit("_", 1)[1] == n) for n in numbers.split("_")]
        if on == f"{store}__d":
            listed.insert(0, "branch")
        made.append(f"create index {index} on {at}{on}({', '.join(listed)})")
    return made


def everything(engine: str) -> list[str]:
    made = []
    if engine == "postgres":
        made += ["create schema livinglayer", *statements(engine, "create domain")]
    made += ledger_statements(engine)
    for entity in entities():
        if entity["kind"] == "entity":
            columns = [(f"{f['name']}_{f['id']}", f["type"]) for f in entity["fields"]]
            made += entity_statements(engine, entity["store"], columns, entity["indexes"])
    return made


# -- the database


@contextmanager
def opened(engine: str, location: str) -> Iterator[Callable[[str], list[tuple[Any, ...]]]]:
    """A connection that knows nothing of layers."""
    if engine == "postgres":
        with psycopg.connect(location, autocommit=True) as connection:
            yield (
                lambda sql: (
                    cursor.fetchall() if (cursor := connection.cursor().execute(sql.encode())).description else []
                )
            )
        return
    path = ":memory:" if location == ":memory:" else str(Path(location) / ".layer" / "layer.db")
    file = apsw.Connection(path)
    file.create_collation("exact", lambda a, b: (Decimal(a) > Decimal(b)) - (Decimal(a) < Decimal(b)))
    yield lambda sql: file.execute(sql).fetchall()
    file.close(True)


def words(sql: str) -> str:
    """A statement without what SQLite does to its spelling."""
    return re.sub(r"^create (table|index|trigger)\b", r"create \1", sql.rstrip("; "), flags=re.I)


def shape(engine: str, run: Callable[[str], list[tuple[Any, ...]]]) -> dict[str, Any]:
    """All there is in a database, by name: tables with columns and keys, indexes, triggers, functions, types."""
    if engine == "postgres":
        return _postgres_shape(run)
    found: dict[str, Any] = {}
    for kind, name, on, sql in run("select type, name, tbl_name, sql from sqlite_schema"):
        if kind == "table":
            [(rowid,)] = run(f"select wr from pragma_table_list where schema = 'main' and name = '{name}'")
            columns = run(f"select name, type, \"notnull\", dflt_value, pk, hidden from pragma_table_xinfo('{name}')")
            exact = re.findall(r"(\w+) DECIMAL_TEXT collate exact", sql, re.I)
            found[f"table {name}"] = (rowid, columns, exact)
        else:
            found[f"{kind} {name}"] = (on, words(sql))
    return found


def _postgres_shape(run: Callable[[str], list[tuple[Any, ...]]]) -> dict[str, Any]:
    here = "'livinglayer'::regnamespace"
    found: dict[str, Any] = {}
    asked = {
        "relation": f"select relname, relkind::text, relpersistence::text, reloptions from pg_class where relnamespace = {here}",
        "columns": "select c.relname, array_agg(row(a.attname, format_type(a.atttypid, a.atttypmod), l.collname, a.attnotnull)::text order by a.attnum)"
        " from pg_attribute a join pg_class c on c.oid = a.attrelid left join pg_collation l on l.oid = a.attcollation"
        f" where c.relnamespace = {here} and c.relkind <> 'i' and a.attnum > 0 and not a.attisdropped group by 1",
        "constraint": f"select conname, conrelid::regclass::text, pg_get_constraintdef(oid) from pg_constraint where connamespace = {here}",
        "index": "select indexname, indexdef from pg_indexes where schemaname = 'livinglayer'",
        "trigger": f"select tgname, pg_get_triggerdef(t.oid) from pg_trigger t join pg_class c on c.oid = tgrelid where c.relnamespace = {here}",
        "function": f"select proname, pg_get_functiondef(oid) from pg_proc where pronamespace = {here}",
        "domain": "select typname, format_type(typbasetype, null), collname, typnotnull from pg_type t left join pg_collation l on l.oid = typcollation"
        f" where typnamespace = {here} and typtype = 'd'",
    }
    for kind, sql in asked.items():
        for name, *rest in run(sql):
            found[f"{kind} {name}"] = rest
    return found


def compare(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(set(actual) - set(expected)) == [], "in the database, not in docs/format.md"
    assert sorted(set(expected) - set(actual)) == [], "in docs/format.md, not in the database"
    assert {n: v for n, v in actual.items() if expected[n] != v} == {
        n: v for n, v in expected.items() if actual[n] != v
    }


@pytest.fixture
def blank(engine: str, make_location: Callable[[], str]) -> str:
    """An empty database to make what the page says in."""
    return ":memory:" if engine == "sqlite" else make_location()


# -- structure


def test_a_fresh_database_is_made_as_the_page_says(layer: Layer, location: str, engine: str, blank: str) -> None:
    with opened(engine, location) as there, opened(engine, blank) as said:
        for sql in everything(engine):
            said(sql)
        compare(shape(engine, there), shape(engine, said))


def test_an_entity_is_stored_as_the_page_says(layer: Layer, location: str, engine: str, blank: str) -> None:
    every = [kind for kind in types(engine) if kind != "blob"]
    specs: dict[str, Any] = {f"a_{kind}": kind for kind in every if kind not in ("enum", "ref", "state")}
    specs["a_text"] = {"type": "text", "unique": True}
    specs["a_int"] = {"type": "int", "indexed": True}
    specs["a_enum"] = {"type": "enum", "values": ["x", "y"]}
    specs["a_ref"] = "ref principal"
    specs["a_state"] = {"type": "state", "transitions": {"new": ["done"], "done": []}}
    number = layer.define("thing", specs, unique=[["a_date", "a_bool"]])
    layer.alter("thing", add={"later": "decimal"}, retype={"a_float": "float"})
    layer.alter("thing", retype={"a_int": "text"}, drop=["a_json"])
    rows = layer.query("select id, name, type, store from field where entity = :e order by id", {"e": number})
    ids = {row["name"]: int(row["store"].rsplit("_", 1)[1]) for row in rows}
    # A column keeps its place and number when its field is dropped or retyped.
    made = {
        f"{name}_{number + place}": kind.removeprefix("a_")
        for place, (name, kind) in enumerate(zip(specs, specs, strict=True), 1)
    }
    later = {row["store"]: row["type"] for row in rows if row["store"] not in made}
    assert {**made, **later}.items() >= {row["store"]: row["type"] for row in rows}.items()
    store, first = f"thing_{number}", number + 1
    columns = [*made.items(), *sorted(later.items(), key=lambda c: int(c[0].rsplit("_", 1)[1]))]
    place = {name: first + n for n, name in enumerate(specs)}
    three = [
        place["a_text"],
        place["a_int"],
        f"{place['a_date']}_{place['a_bool']}",
        ids["a_int"],
    ]  # still indexed, in its new column
    indexes = [
        f"{store}_i_{place['a_ref']}",
        *(f"{store}{suffix}_i_{n}" for n in three for suffix in ("", "__h", "__d")),
    ]
    with opened(engine, location) as there, opened(engine, blank) as said:
        for sql in [*everything(engine), *entity_statements(engine, store, columns, indexes)]:
            said(sql)
        compare(shape(engine, there), shape(engine, said))


def test_the_three_tables_have_the_columns_listed(engine: str, blank: str) -> None:
    listed: dict[str, list[str]] = {}
    for name, column, _ in table(section("The three tables of an entity")):
        listed.setdefault(bare(name).replace("S", "s_9", 1), []).append(bare(column))
    with opened(engine, blank) as run:
        for sql in [*everything(engine), *entity_statements(engine, "s_9", [], [])]:
            run(sql)
        for name, columns in listed.items():
            if engine == "sqlite":
                found = run(f"select name from pragma_table_info('{name}')")
            else:
                found = run(
                    f"select column_name::text from information_schema.columns where table_schema = 'livinglayer' and table_name = '{name}' order by ordinal_position"
                )
            assert [c for (c,) in found] == columns


# -- rows every layer begins with


def options(field: dict[str, Any], entity: str) -> dict[str, Any]:
    """What a field's row says, from the words of the page."""
    row: dict[str, Any] = {
        "required": False,
        "indexed": False,
        "target": None,
        "on_delete": "restrict",
        "initial": None,
        "options": None,
    }
    for word in filter(None, re.split(r"; (?!`)", field["options"])):
        if word in ("required", "indexed"):
            row[word] = True
        elif found := re.fullmatch(r"to `(\w+)`, on delete (\w+)", word):
            row["target"], row["on_delete"] = found.groups()
        elif word.startswith("one of "):
            row["options"] = {"values": ticked(word)}
        elif word.startswith("moves "):
            moves = {(t := ticked(move))[0]: t[1:] for move in word.removeprefix("moves ").split("; ")}
            row["options"] = {
                "initial": next(iter(moves)),
                "transitions": moves,
                "machine": f"{entity}.{field['name']}",
            }
        elif found := re.fullmatch(r"default `(.*)`", word):
            row["initial"] = json.loads(found[1])
        else:
            raise AssertionError(f"{field['name']}: {word!r} is no option")
    return row


def test_the_systems_entities_are_those_listed(layer: Layer) -> None:
    expected_entities, expected_fields = [], []
    for entity in entities():
        ids = {f["name"]: f["id"] for f in entity["fields"]}
        expected_entities.append(
            {
                "id": entity["id"], "name": entity["name"], "store": entity["store"], "kind": entity["kind"], "system": True,
                "uniques": [[ids[n] for n in names] for names in entity["unique"]] or None, "description": entity["description"], "annotations": None,
            }
        )  # fmt: skip
        expected_fields += [
            {
                "id": f["id"], "entity": entity["id"], "name": f["name"], "type": f["type"], "store": f"{f['name']}_{f['id']}", "uniq": False,
                "rule": None, "description": None, "annotations": None, "was": None, **options(f, entity["name"]),
            }
            for f in entity["fields"]
        ]  # fmt: skip
    fields = layer.query("select * from field order by id")
    assert layer.query("select * from entity order by id") == expected_entities
    assert fields == expected_fields


def test_the_first_tx_writes_what_is_listed(layer: Layer, location: str, engine: str) -> None:
    for name, values in table(section("The first tx")):
        entity, number = bare(name).split("/")
        [said] = [json.loads(text) for text in ticked(values) if text.startswith("{")]
        [row] = layer.query(f"select * from {entity}")
        assert row["id"] == int(number)
        assert {k: v for k, v in row.items() if v is not None and k not in ("id", "token")} == said
    executions = layer.query("select id, kind, box, status from execution")
    assert executions == [{"id": 2000, "kind": "genesis", "box": "b2000", "status": "done"}]
    at = "" if engine == "sqlite" else "livinglayer."
    with opened(engine, location) as run:
        meta = dict(run(f"select key, value from {at}meta"))
        assert (meta.pop("reader_key", None) is not None) == (engine == "postgres")  # these queries made it
        assert meta == {"format": re.search(r"Format \*\*(\d+)\*\*", SPEC)[1], "layer": layer.id}  # type: ignore[index]
        assert run(f"select tx, reason from {at}ledger_tx") == [
            (1, f"layer {layer.id} begins in format {meta['format']}")
        ]
        assert run(f"select tx, next_id, epoch, one from {at}ledger_clock") == [(1, 2001, 1, 1)]


def test_the_ids_are_those_listed() -> None:
    rows = dict(table(section("Ids")))
    assert f"1 to {len(entities())}" in rows and "from 2000" in rows
    assert all(f["id"] == e["id"] * 40 + place for e in entities() for place, f in enumerate(e["fields"]))
    assert ["main" in rows["1500"], "owner" in rows["1501"], "permission" in rows["1502"]] == [True] * 3


# -- hashes, computed here as the page says and not as the code does


def canonical(value: Any) -> str:
    return pack(">d", value).hex() if isinstance(value, float) else str(value)


def listed(*values: Any) -> str:
    return "".join("-;" if v is None else f"{len(canonical(v).encode())}:{canonical(v)};" for v in values)


def stored(value: Any) -> Any:
    """A value as PostgreSQL gives it, in stored form."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    return value.isoformat() if isinstance(value, date) else value


def image(row: dict[str, Any]) -> str:
    numbers = {
        int(name.rsplit("_", 1)[1]): stored(v) for name, v in row.items() if v is not None and re.search(r"_\d+$", name)
    }
    text = "".join(f"{n}:{len(canonical(v).encode())}:{canonical(v)}" for n, v in sorted(numbers.items()))
    return sha256(text.encode()).hexdigest()[:32]


def dicts(engine: str, run: Callable[[str], list[tuple[Any, ...]]], name: str) -> list[dict[str, Any]]:
    if engine == "sqlite":
        columns = [c for (c,) in run(f"select name from pragma_table_info('{name}')")]
    else:
        columns = [
            c
            for (c,) in run(
                f"select column_name::text from information_schema.columns where table_schema = 'livinglayer' and table_name = '{name}' order by ordinal_position"
            )
        ]
    at = "" if engine == "sqlite" else "livinglayer."
    return [dict(zip(columns, row, strict=True)) for row in run(f"select * from {at}{name}")]


def eventful(layer: Layer) -> None:
    """Something of everything that is hashed."""
    layer.define(
        "item",
        {
            "name": "text!",
            "qty": "int",
            "price": "decimal",
            "rate": "float",
            "on_sale": "bool",
            "day": "date",
            "at": "datetime",
            "more": "json",
        },
    )
    bolt = layer.insert(
        "item",
        {
            "name": "bölt",
            "qty": -3,
            "price": "0.50",
            "rate": 0.1,
            "on_sale": True,
            "day": "2026-01-31",
            "at": "2026-01-31T12:00:00+02:00",
            "more": {"b": [1, 2.0, "é"], "a": None},
        },
        reason="é",
        key="one",
    )
    nut = layer.insert("item", {"name": "nut", "qty": 1}, cause="why")
    layer.update("item", bolt, {"qty": 4})
    for n in range(3):  # plain updates, for which an engine may know a shorter way
        layer.update("item", bolt, {"qty": n, "price": f"{n}.10", "rate": -n / 3, "on_sale": n > 1, "more": ["ü", n]})
        layer.update(
            "item", bolt, {"day": f"2026-01-0{n + 1}", "at": f"2026-01-01T00:00:0{n}.5+02:00", "name": "ö" * n + "'"}
        )
        layer.update("item", nut, {"qty": None, "price": None, "at": None, "rate": 1e300 * n})
    layer.fork("idea")
    layer.update("item", nut, {"qty": 9}, branch="idea")
    layer.delete("item", bolt, branch="idea")
    layer.insert("item", {"name": "new"}, branch="idea")
    layer.alter("item", retype={"qty": "text"}, branch="idea")
    layer.merge("idea")
    layer.update("item", nut, {"price": "7"})
    with layer.execution({"entities": ["item"]}, reason="bounded") as execution:
        execution.update("item", nut, {"price": "8"})
    layer.prune(layer.query("select max(tx) as n from tx")[0]["n"])
    with layer.ledger.work() as work:  # as a call in a box leaves them
        tx, noon = work.tx(layer.execution_by(None)), "2026-03-01T12:00:00.000000Z"
        tx.fact("ledger_step", 9000, 1, "query", '{"sql":"é"}', noon)
        tx.fact(
            "ledger_call", 9000, "call", 9, 3, '{"n":1}', 1500, 7, None, None, 6, 1, noon, "k", "s", None, "[1502]", "r"
        )
        tx.fact("ledger_usage", 9000, 1501, None, 9, 0.25, 0, 1e300, 10, 20, 30, noon)
        tx.fact("ledger_decision", 9001, 1501, "write", "item", True, "[1502]", "é", 9000, noon)
        tx.fact("ledger_lineage", 9002, "b2", "b1", "s1", 1500, 9000, noon)
        tx.finish()


def test_every_hash_of_a_layer_is_as_the_page_says(layer: Layer, location: str, engine: str) -> None:
    eventful(layer)
    assert layer.verify()
    layer.close()
    with opened(engine, location) as run:
        txs, changes = (dicts(engine, run, f"ledger_{name}") for name in ("tx", "change"))
        facts: dict[int, list[str]] = {}
        for name in FACTS:
            for row in dicts(engine, run, f"ledger_{name}"):
                facts.setdefault(row["tx"], []).append(listed(f"ledger_{name}", *map(stored, row.values())))
        before = bytes(32)
        for place, tx in enumerate(sorted(txs, key=lambda t: t["tx"]), 1):
            assert tx["tx"] == place
            own = [
                stored(tx[c])
                for c in ("tx", "branch", "at", "principal", "execution", "cause", "reason", "merged_from")
            ]
            said = facts.pop(place, None)
            text = listed(*own, said and sha256("".join(sorted(said)).encode()).hexdigest())
            for c in sorted((c for c in changes if c["tx"] == place), key=lambda c: (c["entity"], c["id"])):
                assert c["branch"] == tx["branch"]
                text += listed(c["entity"], c["id"], c["op"], bytes(c["image"]).hex())
            assert sha256(before + text.encode()).digest() == bytes(tx["hash"]), f"tx {place}"
            before = bytes(tx["hash"])
        assert facts == {}
        [clock] = dicts(engine, run, "ledger_clock")
        assert bytes(clock["hash"]) == before
        seal = listed(*(stored(clock[c]) for c in ("tx", "next_id", "epoch", "at")), before.hex())
        assert sha256(seal.encode()).digest()[:8] == bytes(clock["seal"])
        images = {(c["branch"], c["tx"], c["entity"], c["id"]): bytes(c["image"]).hex() for c in changes}
        stores = {row["id"]: row["store_41"] for row in dicts(engine, run, "entity_1") if row["kind_42"] == "entity"}
        seen = 0
        for number, store in stores.items():
            for suffix in ("", "__h", "__d"):
                for row in dicts(engine, run, store + suffix):
                    key = (row.get("branch", 1500), row.get("_tx", row.get("tx_from")), number, row["id"])
                    assert images[key] == ("" if row.get("del") else image(row)), (store, row)
                    seen += 1
        assert seen > 150


# -- the worked example


def example() -> dict[str, str]:
    return dict(re.findall(r"^```text (.*)\n(.*)\n```", SPEC, re.M))


def test_the_worked_example_adds_up() -> None:
    texts, hashes = example(), set(re.findall(r"`([0-9a-f]{16,64})`", section("What is hashed")))
    assert len(texts["image"].encode()) == 30
    first = sha256(texts["image"].encode()).hexdigest()
    third = sha256(bytes([2]) * 32 + texts["tx 3"].encode()).hexdigest()
    fact = sha256(texts["facts of tx 4"].encode()).hexdigest()
    fourth = sha256(bytes.fromhex(third) + texts["tx 4"].encode()).hexdigest()
    seal = sha256(texts["clock"].encode()).hexdigest()[:16]
    assert hashes == {first, first[:32], third, fact, fourth, seal}
    assert first[:32] in texts["tx 3"] and fact in texts["tx 4"] and fourth in texts["clock"]


def test_the_worked_example_is_what_the_code_computes() -> None:
    texts, noon = example(), "2026-03-01T12:00:00.000000Z"
    later = noon.replace(":00.", ":01.")
    img = chain.image(["2002:", "2003:", "2004:"], ["bolt", 3, "0.50"])
    third = chain.tx_hash(
        bytes([2]) * 32, (3, 1500, noon, 1501, 2005, None, "stock", None), [(2001, 2006, "i", img)], None
    )
    fact = chain.facts_digest([("ledger_outcome", [2005, "done", later, None, 4])])
    fourth = chain.tx_hash(third, (4, 1500, later, 1501, 2005, None, "end of execution 2005", None), [], fact)
    seal = chain.clock_seal(4, 2007, 2, later, fourth)
    said = section("What is hashed")
    assert all(f"`{h}`" in said for h in (img.hex(), third.hex(), fact, fourth.hex(), seal.hex()))
    assert chain.lengthed([4, 2007, 2, later, fourth.hex()]) == texts["clock"]


def test_the_worked_example_happens(layer: Layer, location: str, engine: str) -> None:
    [snippet] = re.findall(r"^```python\n(.*?)^```", section("What is hashed"), re.M | re.S)
    exec(compile(snippet, "format.md", "exec"), {"layer": layer})
    at = "" if engine == "sqlite" else "livinglayer."
    with opened(engine, location) as run:
        [change] = [c for c in dicts(engine, run, "ledger_change") if c["tx"] == 3]
        assert {**change, "image": bytes(change["image"]).hex()} == {
            "branch": 1500,
            "tx": 3,
            "entity": 2001,
            "id": 2006,
            "op": "i",
            "image": sha256(example()["image"].encode()).hexdigest()[:32],
        }
        txs = run(
            f"select tx, branch, principal, execution, cause, reason, merged_from from {at}ledger_tx where tx > 2 order by tx"
        )
        assert txs == [
            (3, 1500, 1501, 2005, None, "stock", None),
            (4, 1500, 1501, 2005, None, "end of execution 2005", None),
        ]
        assert run(f"select execution, status, result, tx from {at}ledger_outcome where tx > 1") == [
            (2005, "done", None, 4)
        ]
        assert run(f"select tx, next_id, epoch from {at}ledger_clock") == [(4, 2007, 2)]


def test_a_backup_has_the_format_too(layer: Layer, tmp_path: Path, engine: str) -> None:
    """A backup is an embedded layer, made as the page says, from either engine."""
    layer.backup(tmp_path / "copy")
    with opened("sqlite", str(tmp_path / "copy")) as there, opened("sqlite", ":memory:") as said:
        for sql in everything("sqlite"):
            said(sql)
        compare(shape("sqlite", there), shape("sqlite", said))


def test_a_restored_database_has_the_format_too(
    layer: Layer, tmp_path: Path, engine: str, make_location: Callable[[], str], blank: str
) -> None:
    layer.backup(tmp_path / "copy")
    place = make_location()
    livinglayer.restore(tmp_path / "copy", place).close()
    with opened(engine, place) as there, opened(engine, blank) as said:
        for sql in everything(engine):
            said(sql)
        compare(shape(engine, there), shape(engine, said))
