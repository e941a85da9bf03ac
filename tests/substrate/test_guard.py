"""Raw SQL from a principal reads what its grants show and nothing else, changes nothing, and never outlives its deadline.

The world is planted with canaries in every place the attacker, mallory, may not see. A twin world looks the same to
her and differs in all she may not see, so whatever tells the two apart is a leak, however small: a count, an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import multiprocessing
import os
import random
import re
import resource
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from cluster import Cluster, children
from substrate.sql_grammar import (
    PUZZLES,
    RELATIONS,
    SIDE_RELATIONS,
    STATEMENTS,
    VALUES,
    Grammar,
    Names,
    Statement,
    bombs,
    pieces,
)

import livinglayer
from livinglayer.errors import Denied, Invalid, LayerError, LimitExceeded, NotFound, TimedOut, Unavailable

REFUSALS = (Invalid, Denied, NotFound)
SLACK = 1.0  # seconds after the deadline within which the answer is there, on a busy machine
ITEM = {"id": "int", "name": "text", "qty": "int"}
READABLE = {
    "item": ITEM,
    "part": ITEM,
    "memo": {"id": "int", "title": "text", "level": "int"},
    "item__history": {**ITEM, "tx": "int", "tx_end": "int", "op": "text"},
    "part__history": {**ITEM, "tx": "int", "op": "text"},
}
HIDDEN = (
    "secret_thing", "shelf", "secret_thing__history", "principal", "permission", "membership", "role", "branch", "tx", "change",
    "entity", "field", "execution", "step", "conflict", "secret", "contract", "function", "permission__history", "principal__history",
)  # fmt: skip
HIDDEN_COLUMNS = (
    "secret",
    "owner",
    "price",
    "hidden",
    "shelf",
    "body",
    "label",
    "code",
    "token",
    "reason",
    "_tx",
    "tx_from",
    "tx_to",
    "del",
    "owner.name",
)


@dataclass
class Answer:
    rows: list[dict[str, Any]] | None
    error: BaseException | None
    seconds: float

    @property
    def outcome(self) -> str:
        return "ran" if self.error is None else type(self.error).__name__

    @property
    def text(self) -> str:
        if self.error is None:
            return repr(self.rows)
        return f"{self.error!s} {self.error!r} {getattr(self.error, 'hint', '')} {getattr(self.error, 'details', '')}"


@dataclass
class World:
    """A planted layer, seen through mallory's eyes and through a connection of its own that sees everything."""

    layer: Any
    engine: str
    location: str
    scratch: Path
    mark: str  # every canary text begins with it
    number: str  # every canary number begins with it
    me: int = 0
    ann: int = 0
    private: str = ""  # a branch that mallory can't know
    txs: tuple[int, int] = (1, 1)  # from when on she sees every entity, and the last one
    physical: tuple[str, ...] = ()
    internal: re.Pattern[str] = field(default_factory=lambda: re.compile(r"(?!)"))

    def canary(self, label: str) -> str:
        return f"{self.mark}{label}{secrets.token_hex(3)}"

    def canary_number(self) -> int:
        return int(self.number + f"{secrets.randbelow(10**5):05}")

    def ask(
        self,
        statement: Statement | str,
        timeout: float = 0.5,
        limit: int | None = 2000,
        principal: str = "mallory",
        **more: Any,
    ) -> Answer:
        if isinstance(statement, str):
            statement = Statement(statement)
        given = {
            "branch": statement.branch,
            "as_of": statement.as_of,
            "principal": principal,
            "timeout": timeout,
            "limit": limit,
            **more,
        }
        start = time.monotonic()
        try:
            rows, error = self.layer.query(statement.sql, statement.params, **given), None
        except Exception as caught:
            rows, error = None, caught
        return Answer(rows, error, time.monotonic() - start)

    def problems(
        self, statement: Statement | str, answer: Answer, timeout: float = 0.5, limit: int = 2000
    ) -> list[str]:
        """What is wrong with the answer, whatever the statement was."""
        if isinstance(statement, str):
            statement = Statement(statement)
        found, text = [], answer.text.lower()
        asked = f"{statement.sql} {statement.params} {statement.branch}".lower()
        if answer.error is not None and not isinstance(answer.error, LayerError):
            found.append(f"a raw {type(answer.error).__name__}: {answer.error}")
        if isinstance(answer.error, Unavailable):
            found.append(f"unavailable: {answer.error}")
        if any(sign in text for sign in (self.mark, self.mark[::-1], self.mark.encode().hex(), self.number)):
            found.append("a canary")
        for name in set(self.internal.findall(text)):
            if name not in asked:
                found.append(f"the internal name {name}")
        if str(self.location).lower() in text and str(self.location).lower() not in asked:
            found.append("the location")
        if answer.seconds > timeout + SLACK:
            found.append(f"{answer.seconds:.1f} s after a deadline of {timeout} s")
        if answer.rows is not None and len(answer.rows) > limit:
            found.append(f"{len(answer.rows)} rows above the limit of {limit}")
        return found

    def dump(self) -> dict[str, Any]:
        """A digest of everything stored, by an independent connection."""
        found = dump_sqlite(self.location) if self.engine == "sqlite" else dump_postgres(self.location)
        found["files"] = sorted(str(path) for path in self.scratch.rglob("*"))
        return found

    def settled(self) -> dict[str, Any]:
        """The dump once background work (the sealer) has come to rest."""
        before = self.dump()
        for _ in range(40):
            time.sleep(0.25)
            after = self.dump()
            if after == before:
                return after
            before = after
        raise AssertionError("the layer does not come to rest")


def dump_sqlite(location: str) -> dict[str, Any]:
    home = Path(location, ".layer")
    found: dict[str, Any] = {
        str(path): path.stat().st_size
        for path in sorted(Path(location).rglob("*"))
        if path.is_file() and not path.name.startswith("layer.db") and path.suffix not in (".lock", ".sock")
    }
    connection = apsw.Connection(str(home / "layer.db"), flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(5000)
    connection.create_collation("exact", lambda a, b: (a > b) - (a < b))
    with contextlib.closing(connection), connection:
        found["schema"] = list(connection.execute("select type, name, tbl_name, sql from sqlite_master order by 1, 2"))
        for pragma in ("user_version", "application_id", "journal_mode", "schema_version"):
            found[pragma] = connection.execute(f"pragma {pragma}").fetchall()
        for (name,) in connection.execute(
            "select name from sqlite_master where type = 'table' and name not like 'sqlite_stat%'"
        ).fetchall():
            digest = hashlib.sha256()
            for row in connection.execute(f'select * from "{name}"'):
                digest.update(repr(row).encode())
            found[f"table {name}"] = digest.hexdigest()
    return found


VIEWS = r"n.nspname ~ '^ll_.*_v\d+_'"  # the schemas of readers' views, made when first asked for
CATALOG = {
    "relations": "select n.nspname, c.relname, c.relkind, c.relowner, c.relacl::text from pg_class c join pg_namespace n on n.oid = c.relnamespace"
    f" where n.nspname not in ('pg_toast', 'information_schema') and not {VIEWS} order by 1, 2",
    "columns": "select count(*), sum(attnum::bigint * attrelid::bigint) from pg_attribute a join pg_class c on c.oid = a.attrelid"
    f" join pg_namespace n on n.oid = c.relnamespace where attrelid > 16383 and not {VIEWS}",
    "writable": f"select c.relname, c.relkind, c.relacl::text from pg_class c join pg_namespace n on n.oid = c.relnamespace where {VIEWS} and (c.relkind <> 'v' or c.relacl::text ~ '_\\d+=[^/]*[^r/]+/')",
    "functions": "select pronamespace::regnamespace::text, proname, prosrc from pg_proc where oid > 16383 order by 1, 2, 3",
    "roles": "select * from pg_roles where rolname not like 'pg\\_%' order by rolname",
    "members": "select roleid, member from pg_auth_members order by 1, 2",
    "schemas": f"select n.nspname, n.nspacl::text from pg_namespace n where n.nspname not like 'pg_t%' and not {VIEWS} order by 1",
    "settings": "select * from pg_db_role_setting order by 1, 2",
    "objects": "select count(*) from pg_largeobject_metadata",
    "extensions": "select extname from pg_extension order by 1",
    "locks": "select count(*) from pg_locks where locktype = 'advisory' and granted and database = (select oid from pg_database where datname = current_database())",
    "prepared": "select count(*) from pg_prepared_xacts",
    "slots": "select slot_name from pg_replication_slots",
    "origins": "select roname from pg_replication_origin",
    "databases": "select count(*) from pg_database where datname like 'z%'",
    "open": "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in transaction%' and state_change < now() - interval '2 s'",
}


def dump_postgres(location: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with psycopg.connect(location, autocommit=True) as connection:
        for name, sql in CATALOG.items():
            found[name] = connection.execute(sql).fetchall()
        tables = connection.execute(
            "select format('%I.%I', schemaname, tablename) from pg_tables where schemaname not in ('pg_catalog', 'information_schema') order by 1"
        ).fetchall()
        for (name,) in tables:
            sql = f"select md5(string_agg(t::text, chr(10) order by t::text)) from {name} t"
            found[f"table {name}"] = connection.execute(sql).fetchone()  # type: ignore[arg-type]
        for (name,) in connection.execute(
            "select format('%I.%I', schemaname, sequencename) from pg_sequences order by 1"
        ).fetchall():
            found[f"sequence {name}"] = connection.execute(f"select last_value, is_called from {name}").fetchone()  # type: ignore[arg-type]
    return found


def plant(world: World, extra: int) -> None:
    """Fill the layer: what mallory sees is the same at every call, what she does not is new at every call."""
    layer, canary, number = world.layer, world.canary, world.canary_number
    world.me = layer.principal("mallory", kind="agent", attributes={"team": "red"})
    world.ann = layer.principal("ann", attributes={"team": canary("team")})
    world.private = canary("branch")
    me, ann = world.me, world.ann
    layer.define(
        "item",
        {
            "name": "text!",
            "qty": "int",
            "price": "decimal",
            "owner": "ref principal",
            "secret": {"type": "text", "description": canary("about"), "indexed": True},
        },
    )
    layer.define("shelf", {"label": "text!", "keeper": "ref principal"})
    layer.define(
        "part",
        {
            "name": {"type": "text!", "indexed": True},
            "qty": {"type": "int", "indexed": True},
            "shelf": "ref shelf",
            "hidden": "text",
        },
    )
    layer.define("memo", {"title": "text!", "level": "int", "body": "text"})
    layer.define("secret_thing", {"label": "text!", "code": "int"})

    # What mallory sees.
    stock = [("bolt", 3), ("nut", 5), ("washer", 8), ("screw", None), ("it's", 1), ("ßtraße", 13), ("", 0)]
    items = layer.insert(
        "item",
        [{"name": n, "qty": q, "price": f"{number()}.5", "owner": me, "secret": canary("secret")} for n, q in stock],
        reason=canary("why"),
    )
    mine = layer.insert("shelf", {"label": canary("shelf"), "keeper": me}, reason=canary("shelving"))
    theirs = layer.insert("shelf", {"label": canary("shelf"), "keeper": ann}, reason=canary("shelving"))
    layer.insert(
        "part", [{"name": n, "qty": q, "shelf": mine, "hidden": canary("part")} for n, q in stock], reason=canary("why")
    )
    layer.insert(
        "memo", [{"title": f"memo {n}", "level": n, "body": canary("body")} for n in range(4)], reason=canary("why")
    )
    moved = layer.insert("item", {"name": canary("before"), "qty": number(), "owner": ann}, reason=canary("before"))
    layer.update("item", moved, {"name": "moved", "qty": 2, "owner": me}, reason=canary("why"))
    given = layer.insert("item", {"name": "given", "qty": 21, "owner": me}, reason=canary("why"))
    layer.update("item", items[0], {"qty": 4}, reason=canary("why"))
    layer.update("item", items[1], {"secret": canary("secret")}, reason=canary("why"))
    dead = layer.insert("item", {"name": "dead", "qty": 34, "owner": me}, reason=canary("why"))
    layer.delete("item", dead, reason=canary("why"))

    first = layer.query("select max(tx) as n from tx")[0]["n"]

    # What she does not.
    layer.update("item", given, {"name": canary("given"), "qty": number(), "owner": ann}, reason=canary("reason"))
    for entity, row in (
        (
            "item",
            lambda: {
                "name": canary("item"),
                "qty": number(),
                "price": f"{number()}.25",
                "owner": ann,
                "secret": canary("secret"),
            },
        ),
        ("item", lambda: {"name": canary("nobody"), "qty": number(), "owner": None}),
        ("part", lambda: {"name": canary("part"), "qty": number(), "shelf": theirs, "hidden": canary("part")}),
        ("memo", lambda: {"title": canary("memo"), "level": 9, "body": canary("body")}),
        ("secret_thing", lambda: {"label": canary("thing"), "code": number()}),
    ):
        ids = layer.insert(entity, [row() for _ in range(6 + extra)], reason=canary("reason"), cause=canary("cause"))
        layer.update(entity, ids[0], row(), reason=canary("reason"))
        layer.delete(entity, ids[1], reason=canary("reason"))
    layer.define(canary("entity"), {canary("field"): {"type": "enum", "values": [canary("enum")], "default": None}})
    layer.principal(canary("principal"), attributes={canary("key"): canary("value")}, roles=[canary("role")])
    layer.grant("ann", "read", "secret_thing", where=f"label = '{canary('where')}'", reason=canary("grant"))
    layer.grant(
        "mallory", "read", "item", where="owner = :me", fields=["name", "qty"], branch="main", reason=canary("grant")
    )
    layer.grant(
        "mallory",
        "read",
        "part",
        where="shelf.keeper = :me",
        fields=["name", "qty"],
        branch="main",
        reason=canary("grant"),
    )
    layer.grant("mallory", "read", "memo", branch="main", reason=canary("grant"))
    layer.grant("mallory", "read", "memo", where="level > 5", effect="deny", reason=canary("grant"))
    layer.grant("mallory", "read", "memo.body", effect="deny", reason=canary("grant"))
    for name in ("side", world.private):
        layer.fork(name)
        for owner in (me, ann):  # her grants are for main: on a branch even her own rows stay unseen
            layer.insert(
                "item",
                {"name": canary("fork"), "qty": number(), "owner": owner, "secret": canary("secret")},
                branch=name,
                reason=canary("reason"),
            )
        layer.update("item", items[2], {"name": canary("fork")}, branch=name, reason=canary("reason"))
    world.txs = first, layer.query("select max(tx) as n from tx")[0]["n"]


def look(world: World) -> None:
    """Learn the stored names: an attacker who knows them must not get further, one who doesn't must not be told."""
    if world.engine == "sqlite":
        with contextlib.closing(
            apsw.Connection(str(Path(world.location, ".layer", "layer.db")), flags=apsw.SQLITE_OPEN_READONLY)
        ) as connection:
            tables = [
                row[0] for row in connection.execute("select name from sqlite_master where name not like 'sqlite_%'")
            ]
            columns = [
                row[0]
                for row in connection.execute(
                    "select distinct c.name from sqlite_master m, pragma_table_info(m.name) c where m.type = 'table'"
                )
            ]
    else:
        with psycopg.connect(world.location) as admin:
            user = "not in ('pg_catalog', 'information_schema', 'pg_toast')"
            tables = [
                row[0]
                for row in admin.execute(
                    f"select relname from pg_class c join pg_namespace n on n.oid = relnamespace where nspname {user}"
                ).fetchall()
            ]
            columns = [
                row[0]
                for row in admin.execute(
                    f"select distinct column_name::text from information_schema.columns where table_schema {user}"
                ).fetchall()
            ]
            columns += [
                row[0]
                for row in admin.execute(
                    f"select nspname from pg_namespace where nspname {user} and nspname <> 'public'"
                ).fetchall()
            ]
            columns += [
                row[0]
                for row in admin.execute("select rolname from pg_roles where rolname not like 'pg\\_%'").fetchall()
            ]
    public = {*READABLE, *HIDDEN, *HIDDEN_COLUMNS, "mallory", "ann"} | {
        column for columns in READABLE.values() for column in columns
    }
    names = {name.lower() for name in (*tables, *columns)} - public
    told = [name for name in names if world.mark not in name and re.search(r"[\d_]", name)]
    world.physical = tuple(sorted(name for name in tables if world.mark not in name and name not in READABLE))
    world.internal = re.compile(r"\b(?:" + "|".join(sorted(map(re.escape, told), key=len, reverse=True)) + r")\b")


def names_of(world: World) -> Names:
    return Names(READABLE, HIDDEN, HIDDEN_COLUMNS, world.physical, ("main", "side"), *world.txs, str(world.scratch))


@contextlib.contextmanager
def make_world(engine: str, home: Path, cluster: Callable[..., Cluster], extra: int) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        location = str(home / f"world{extra}") if engine == "sqlite" else stack.enter_context(cluster().database())
        scratch = home / f"scratch{extra}"
        scratch.mkdir(mode=0o777)
        scratch.chmod(0o777)  # the database's own account could write here, if it were made to
        layer = livinglayer.open(location, create=True)
        stack.callback(layer.close)
        world = World(layer, engine, location, scratch, f"zq{secrets.token_hex(3)}", f"7{secrets.randbelow(10**9):09}")
        plant(world, extra)
        look(world)
        for name in READABLE:
            assert world.ask(f"select * from {name}", timeout=10).rows, f"mallory sees nothing of {name}"
        layer.query("select 1 from item")  # the owner's reader, too, is made when first asked for
        yield world


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def worlds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres_cluster: Callable[..., Cluster]
) -> Iterator[tuple[World, World]]:
    home = tmp_path_factory.mktemp("guard")
    with (
        make_world(request.param, home, postgres_cluster, 0) as world,
        make_world(request.param, home, postgres_cluster, 5) as twin,
    ):
        yield world, twin


@pytest.fixture
def world(worlds: tuple[World, World]) -> Iterator[World]:
    """The planted world; afterwards it must hold what it held before, and still serve."""
    world, _ = worlds
    before = world.settled()
    yield world
    assert changes(before, world.settled()) == {}
    assert world.ask("select name from item order by id", timeout=5).rows == [
        {"name": name} for name in ("bolt", "nut", "washer", "screw", "it's", "ßtraße", "", "moved")
    ]


@pytest.fixture
def twin(worlds: tuple[World, World]) -> World:
    return worlds[1]


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        key: (before.get(key), after.get(key))
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
    }


def attack(world: World, statements: list[str], refused: bool, twin: World | None = None) -> None:
    """Run them all, then name each that did not go as it must."""
    failures = []
    for sql in statements:
        answer = world.ask(sql)
        wrong = world.problems(sql, answer)
        if refused and not isinstance(answer.error, REFUSALS):
            wrong.append(f"not refused but {answer.outcome}: {answer.text[:200]}")
        if twin and (difference := differs(sql, answer, other := twin.ask(sql))):
            wrong.append(f"{difference}: {answer.text[:200]} | {other.text[:200]}")
        failures += [f"{sql[:300]!r}: {problem}" for problem in wrong]
    report(failures)


def report(failures: list[str]) -> None:
    if failures:
        pytest.fail(f"{len(failures)} failures\n" + "\n".join(failures[:200]), pytrace=False)


# The engine, the clock or chance decide these, not the data.
FICKLE = re.compile(
    r"random|now|clock|current|strftime|timediff|uuid|rowid|\boid\b|ctid|xmin|tableoid|changes|offset|execution|\bat\b|history.*\*|\*.*history|version|\bpg_|_tx",
    re.I | re.S,
)
# PostgreSQL promises no order, so what depends on one may differ between two databases.
UNORDERED = re.compile(r"limit|over\s*\(|agg|fetch|distinct on|tablesample", re.I)


def differs(sql: str, answer: Answer, other: Answer, engine: str = "sqlite") -> str:
    """Why the two worlds can be told apart by this statement, or nothing."""
    if FICKLE.search(sql) or (engine == "postgres" and UNORDERED.search(sql)):
        return ""
    if isinstance(answer.error, TimedOut | Unavailable | LimitExceeded) or isinstance(
        other.error, TimedOut | Unavailable | LimitExceeded
    ):
        return ""  # the hand-written oracles below look at deadlines
    if answer.outcome != other.outcome:
        return f"{answer.outcome} here, {other.outcome} in the twin"
    if answer.error is not None:
        # SQLite spells a table function as the connection's first statement did.
        return "" if str(answer.error).lower() == str(other.error).lower() else "the error differs in the twin"
    rows, others = [[repr(list(row.values())) for row in rows] for rows in (answer.rows or [], other.rows or [])]
    return "" if sorted(rows) == sorted(others) else "the rows differ in the twin"


def filled(world: World, table: dict[str, str]) -> list[str]:
    """Every fragment, and those with a stored name once for each of several stored names."""
    sequences = [name for name in world.physical if name.endswith("_seq")] or ["item_id_seq"]
    chosen = [
        name
        for name in world.physical
        if name.startswith(("item", "secret_thing", "principal", "permission", "ledger_tx"))
    ][:8] or ["item__h"]
    found = []
    for piece in pieces(table[world.engine]):
        for physical in chosen if "{physical}" in piece else chosen[:1]:
            found.append(piece.format(scratch=world.scratch, physical=physical, sequence=sequences[0]))
    return found


# -- attacks, one class each


def test_no_relation_but_the_granted_ones_can_be_read(world: World) -> None:
    shapes = (
        "select * from {}",
        "select count(*) from item where exists (select 1 from {})",
        "with item as (select * from {}) select * from item",
        "with recursive item as (select * from {} union all select * from item) select * from item",
        "select name from item union all select 'x' from {}",
        "select (select count(*) from {}) from item",
        "select 1 from item i join lateral (select * from {}) x on true",
    )
    hidden = [
        shape.format(name)
        for name in (*HIDDEN, *filled(world, RELATIONS))
        for shape in shapes[: 7 if world.engine == "postgres" else 6]
    ]
    attack(world, hidden, refused=True)


def test_no_value_but_those_of_granted_rows_can_be_computed(world: World) -> None:
    shapes = (
        "select {}",
        "select {} from item",
        "select name from item order by {}",
        "select name from item where ({}) is not null",
        "select count(*) from part group by {}",
    )
    attack(world, [shape.format(value) for value in filled(world, VALUES) for shape in shapes], refused=True)


def test_nothing_but_one_select_is_a_query(world: World) -> None:
    statements = filled(world, STATEMENTS)
    shapes = (
        "{}",
        "{};",
        "/* select */ {}",
        "-- select\n{}",
        "select 1; {}",
        "select name from item; {} --",
        "({})",
        "select * from ({}) x",
        "{} union select 1",
    )
    attack(world, [shape.format(statement) for statement in statements for shape in shapes], refused=True)


def test_odd_but_allowed_fragments_show_nothing_hidden(world: World, twin: World) -> None:
    puzzles = [
        shape.format(puzzle)
        for puzzle in filled(world, PUZZLES)
        for shape in (
            "select {} from item",
            "select {}",
            "select name from part where ({}) is not null",
            "select max(name) from memo, item group by {}",
        )
    ]
    sides = [f"select * from {side}" for side in filled(world, SIDE_RELATIONS)]
    twice = twin if world.engine == "sqlite" else None
    attack(world, puzzles + sides, refused=False, twin=twice)


COMPOSED = [
    "select * from item where 1=1 union select 1, label, code from secret_thing",
    "select * from item where name = '' or 1=1; select * from secret_thing",
    "select name from item where qty in (select code from secret_thing)",
    "select name from item where exists (select 1 from principal where name like 'a%')",
    "with secret_thing as (select * from secret_thing) select * from secret_thing",
    "select 1 where false and exists (select 1 from secret_thing)",
    "select case when false then (select label from secret_thing) end from item",
    "select secret from item",
    "select i.secret from item i",
    "select i.* , i.owner from item i",
    "select name from item where secret like '%'",
    "select name from item order by secret",
    "select count(*) from item group by owner",
    "select count(*) from item having max(price) > 0",
    "select row_number() over (order by secret) from item",
    "select name from item i where exists (select 1 from part p where p.hidden = i.name)",
    "select * from item natural join (select secret from item) x",
    "select * from item join part using (secret)",
    "select body from memo",
    "select name, hidden from part",
    "select shelf from part",
    "select shelf.label from part join shelf on shelf.id = part.shelf",
    "select part.shelf.label from part",
    "select secret from item__history",
    "select owner from item__history",
    "select * from secret_thing__history",
    "select * from shelf__history",
    "select * from item__history__history",
    'select * from "item""; drop table item; --"',
    "select * from item /* ; */ ; /* */ select 2",
    "select * from item /* /* nested */ ; select 2 */ ; select 3",
    "select 'a' ; -- '\nselect 2",
    "select * from item where name = 'a\\'; delete from item; --'",
    "select * from item;\x00",
    "select \x00 from item",
    "",
    " ",
    ";",
    "--",
    "/* */",
    "/*",
    "'",
    "selectname from item",
    "select * from ітем",  # the letters are Cyrillic
    "select * from ｉｔｅｍ",
    "select * from item\u037e select 1",  # the Greek question mark looks like a semicolon
    "select * from it\u200bem",
    "select * from item where name = :missing",
    "select * from item limit (select code from secret_thing limit 1)",
    "select * from item offset (select count(*) from principal)",
    "values ((select label from secret_thing limit 1))",
    "select * from (values ((select max(label) from secret_thing))) v",
    "with recursive c(n) as (select 1 union all select (select code from secret_thing limit 1) from c) select * from c",
    "with a as (with b as (with c as (select * from tx) select * from c) select * from b) select * from a",
    "insert into item (name) select name from item",
    "select name from item except select label from secret_thing",
    "select name from item intersect select label from secret_thing",
    "table secret_thing",
]


def test_composed_attacks_are_refused(world: World) -> None:
    attack(world, COMPOSED, refused=True)


def test_a_shadowed_name_never_opens_the_table_behind_it(world: World) -> None:
    statements = []
    for physical in world.physical:
        for name in ("item", "part", physical):
            statements += [
                f'with {name} as (select * from "{physical}") select * from {name}',
                f'select * from (select * from "{physical}") as {name}',
                f'with {name} as (select * from {"main" if world.engine == "sqlite" else "livinglayer"}."{physical}") select * from {name}',
            ]
    attack(world, statements, refused=True)


def test_a_name_that_is_hidden_and_one_that_is_not_there_get_the_same_answer(world: World) -> None:
    def told(sql: str, word: str) -> tuple[str, str]:
        answer = world.ask(sql)
        return answer.outcome, re.sub(rf"(['\"]|: |\w\.){word}\b['\"]?", "?", answer.text)

    absent = told("select * from absent_thing", "absent_thing")
    for name in (*HIDDEN, *world.physical[:20]):
        if f"{name}_" not in world.physical:
            entity = name.removesuffix("__history")  # by which the answer calls it
            assert told(f"select * from {name}", entity) == absent, name
    for entity, column in (
        ("item", "secret"),
        ("item", "owner"),
        ("part", "hidden"),
        ("part", "shelf"),
        ("memo", "body"),
        ("item__history", "secret"),
    ):
        for shape in ("select {} from {}", "select x.{} from {} x", "select id from {1} where {0} = 1"):
            assert told(shape.format(column, entity), column) == told(shape.format("absentcol", entity), "absentcol"), (
                entity,
                column,
            )
    for name in ("side", world.private):
        hidden, missing = world.ask("select 1 from item", branch=name), world.ask("select 1 from item", branch="absent")
        assert (hidden.outcome, hidden.text.replace(name, "?")) == (
            missing.outcome,
            missing.text.replace("absent", "?"),
        ), name


def test_arguments_are_no_way_in(world: World) -> None:
    odd = [
        "main'--",
        "main; drop table item",
        'main" union select 1 --',
        "MAIN",
        "",
        " ",
        "main\x00",
        "../main",
        "temp",
        "livinglayer",
        "\ud800",
        "x" * 100_000,
        None,
        7,
        b"main",
    ]
    for branch in [*odd, "side", world.private]:
        answer = world.ask("select * from item", branch=branch)
        assert answer.error is not None or branch is None, branch
        if branch != world.private:
            assert world.problems(Statement("", branch=str(branch)), answer) == [], branch
    for as_of in [
        -1,
        2**63,
        2**200,
        "1",
        "1; drop table item",
        "now()",
        1.5,
        float("nan"),
        True,
        b"1",
        (1,),
        "2020-01-01",
    ]:
        assert world.problems("", world.ask("select * from item", as_of=as_of)) == [], as_of
    for principal in [
        *odd[:-3],
        "mallory' or '1'='1",
        "Mallory",
        "mallory ",
        "MALLORY",
        "nobody",
        "*",
        ":me",
        7,
        b"mallory",
    ]:
        answer = world.ask("select * from item", principal=principal)
        assert answer.error is not None, principal
        assert world.problems(str(principal), answer) == [], principal
    for timeout in [0, -1, 1e300, float("inf"), float("nan"), "1", "0; drop table item"]:
        assert world.problems("", world.ask("select name from item", timeout=timeout), timeout=10) == [], timeout
    for limit in [0, -1, 2**63, 2**200, 1.5, "1", "1; drop table item"]:
        assert world.problems("", world.ask("select name from item", limit=limit)) == [], limit


def test_as_of_moves_the_data_and_never_the_grants(world: World) -> None:
    last = world.layer.query("select max(tx) as n from tx")[0]["n"]
    for tx in range(last + 3):
        for entity in READABLE:
            answer = world.ask(f"select * from {entity}", as_of=tx)
            assert world.problems("", answer) == [], (tx, entity)
        for entity in HIDDEN[:4]:
            assert isinstance(world.ask(f"select * from {entity}", as_of=tx).error, REFUSALS), (tx, entity)


def test_parameters_are_values_and_never_the_principal(world: World) -> None:
    seen = world.ask("select id, name, qty from item order by id").rows
    for name in ("me", "ME", "me.team", "principal", "owner", "1", "p1", "_1", "branch", "id", "name"):
        for value in (
            world.ann,
            str(world.ann),
            "ann",
            "' or 1=1 --",
            "1) or (1=1",
            None,
            [world.ann],
            {"a": 1},
            object(),
            b"\xff",
            2**70,
            float("nan"),
            "a\x00b",
            "\ud800",
        ):
            for sql in (
                "select id, name, qty from item order by id",
                f"select id, name, qty from item where :{name} is not null order by id",
                f"select id, name, qty from item where cast(:{name} as text) = 'x' or 1=1 order by id",
            ):
                answer = world.ask(Statement(sql, {name: value}))
                assert world.problems(Statement(sql, {name: repr(value)}), answer) == [], (sql, value)
                assert answer.error is not None or answer.rows in (seen, []), (sql, value)
    for sql in (
        "select :me as me",
        "select name from item where id = :me",
        "select :me.team as team",
        "select name from item where 'x' = :me",
        "select ':me', '%(x)s', '%s', '%' as a, ':n' as b",
    ):
        assert world.problems(sql, world.ask(sql)) == [], sql
        assert world.problems(sql, world.ask(Statement(sql, {"me": world.ann}))) == [], sql
    for params in (
        [1],
        (1,),
        "x",
        7,
        {"n": 1, "unused": 2},
        {1: 2},
        {"a b": 1},
        {"": 1},
        {"n'": 1},
        {"x" * 10_000: 1},
        {f"p{n}": n for n in range(70_000)},
    ):
        answer = world.ask("select id, name, qty from item where 1 = 1 order by id")
        given = Statement("select id, name, qty from item order by id", params)  # type: ignore[arg-type]
        answer = world.ask(given)
        assert answer.error is None or isinstance(answer.error, LayerError), (str(params)[:80], answer.error)
        assert answer.error is not None or answer.rows == seen


# -- oracles: nothing a statement does may depend on a hidden row


def test_hidden_rows_decide_no_error_and_no_deadline(world: World, twin: World) -> None:
    """Each would fail or hang on a hidden row of this world alone, if the condition ever met one."""
    spin = "with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) from c"
    fails = {
        "sqlite": [
            "abs(-9223372036854775808)",
            "json('{')",
            "json_extract('{', '$')",
            "zeroblob(2000000000)",
            "length(printf('%2000000000d', 1))",
            "('a' like 'a' escape 'xx')",
            "json_extract('{}', 'x')",
            f"({spin})",
        ],
        "postgres": [
            "1 / (qty - qty)",
            "'x'::int",
            "cast(name as integer)",
            "9223372036854775807 + coalesce(qty, 1)",
            "length(repeat('x', 2000000000))",
            "('{'||name)::json::text::int",
            "ln(0 * qty)",
            "sqrt(-1 - abs(qty))",
            f"({spin})",
        ],
    }[world.engine]
    failures = []
    for entity in ("item", "part", "item__history", "part__history"):
        for column in ("name", "cast(qty as text)"):
            for fail in fails:
                guard = f"case when {column} like '{world.mark if column == 'name' else world.number}%' then {fail} else 1 end"
                for sql in (
                    f"select count(*) as n from {entity} where {guard} is not null",
                    f"select {guard} as n from {entity} order by 1",
                    f"select count(*) as n from {entity} where qty > 0 and {guard} is not null",
                    f"select count(*) as n from {entity} where qty > 1000000 and {guard} is not null",
                    f"select count(*) as n from {entity} where name >= 'y' and {guard} is not null",
                    f"select max({guard}) as n from {entity}",
                    f"select count(*) as n from (select {guard} as x from {entity}) s where x is not null",
                    f"with s as (select name, qty from {entity}) select count(*) as n from s where {guard} is not null",
                    f"select count(*) as n from memo m left join {entity} e on {guard.replace('name', 'e.name').replace('qty', 'e.qty')} is not null",
                    f"select count(*) as n from {entity} group by {guard}",
                    f"select count(*) as n from {entity} where exists (select 1 where {guard} is not null)",
                    f"select name from {entity} where {guard} is not null limit 1000",
                ):
                    answer, other = world.ask(sql), twin.ask(sql)
                    if (answer.outcome, answer.rows) != (other.outcome, other.rows):
                        failures.append(
                            f"{sql}: {answer.text[:80]} ({answer.outcome}), in the twin {other.text[:80]} ({other.outcome})"
                        )
    report(failures)


def test_counts_and_extremes_are_those_of_visible_rows(world: World, twin: World) -> None:
    for sql in (
        "select count(*) as n, count(qty) as q, sum(qty) as s, max(id) as i, min(name) as a, max(name) as z from item",
        "select count(*) as n, count(qty) as q, sum(qty) as s, max(id) as i, min(name) as a, max(name) as z from part",
        "select count(*) as n, max(level) as l from memo",
        "select count(*) as n, max(tx) as t, min(id) as i from item__history",
        "select count(*) as n, max(tx) as t, min(id) as i from part__history",
        "select count(*) as n from item a, item b, part c",
        "select name, count(*) as n from item__history group by name order by name",
    ):
        answer, other = world.ask(sql, timeout=5), twin.ask(sql, timeout=5)
        assert answer.error is None, sql
        assert answer.rows == other.rows, sql


# -- what costs too much


def test_bombs_meet_their_deadline_and_leave_memory_alone(world: World) -> None:
    failures, before = [], memory()
    for sql in bombs(world.engine):
        answer = world.ask(sql)
        wrong = world.problems(sql, answer)
        if wrong and "deadline" in wrong[0]:  # a busy machine gets one more try
            answer = world.ask(sql)
            wrong = world.problems(sql, answer)
        failures += [f"{sql[:200]}: {problem}" for problem in wrong]
        if (grown := memory() - before) > 600 << 20:
            failures.append(f"{sql[:200]}: grew by {grown >> 20} MiB")
            before = memory()
        again = world.ask("select count(*) as n from item")
        if again.rows != [{"n": 8}] or again.seconds > 1.5:
            failures.append(f"{sql[:200]}: the next query took {again.seconds:.1f} s: {again.text[:100]}")
    report(failures)


def memory() -> int:
    """The most this process has held so far, and what its reader processes hold now."""
    total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for pid in readers():
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return total


def readers() -> list[int]:
    """Processes this one started, the database server excepted."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if (
                "postgres" not in Path(f"/proc/{pid}/exe").resolve().name
                and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
            ):
                found.append(pid)
    return found


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


def test_bombs_at_once_do_not_starve_each_other(world: World) -> None:
    """Many hanging statements at a time: each ends in time, and a small one still gets its answer."""
    chosen = bombs(world.engine)[:8]
    answers: list[tuple[str, Answer]] = []
    threads = [threading.Thread(target=lambda sql=sql: answers.append((sql, world.ask(sql)))) for sql in chosen]
    for thread in threads:
        thread.start()
    small = world.ask("select count(*) as n from item", timeout=10)
    for thread in threads:
        thread.join(30)
    assert small.rows == [{"n": 8}]
    # They share the readers, so the last may be told that it timed out before it began, but no later.
    assert [
        (sql, answer.seconds) for sql, answer in answers if answer.error is None or answer.seconds > 0.5 + 2 * SLACK
    ] == []
    assert len(answers) == len(chosen)


def test_answers_have_a_row_limit(world: World) -> None:
    pairs = "select a.id from item a, item b"
    assert len(world.ask(pairs, limit=64).rows or []) == 64
    assert isinstance(world.ask(pairs, limit=63).error, LimitExceeded)
    assert isinstance(
        world.ask("select a.id from item a, item b, item c, item d, item e, item f", limit=None, timeout=8).error,
        LimitExceeded,
    )


# -- keeping on serving


def test_a_killed_or_hanging_reader_is_replaced(world: World) -> None:
    if world.engine != "sqlite":
        pytest.skip("PostgreSQL has backends, not readers")
    spin = "with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) from c"
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGTERM):
        for busy in (False, True):
            answers: list[Answer] = []
            thread = threading.Thread(target=lambda answers=answers: answers.append(world.ask(spin, timeout=1)))
            if busy:
                thread.start()
                time.sleep(0.3)
            pids = readers()
            assert pids, "no reader process"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if busy:
                thread.join(10)
                assert answers and isinstance(answers[0].error, LayerError), number
                assert answers[0].seconds < 1 + 2 * SLACK, number
            deadline = time.monotonic() + 8
            while (answer := world.ask("select count(*) as n from item", timeout=1)).rows != [{"n": 8}]:
                assert isinstance(answer.error, LayerError), answer.error
                assert time.monotonic() < deadline, f"not serving after {number.name}: {answer.text}"
            for pid in pids:  # one that hangs must not stay behind
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def test_a_lost_connection_is_replaced(world: World) -> None:
    if world.engine != "postgres":
        pytest.skip("SQLite has readers, not backends")
    with psycopg.connect(world.location, autocommit=True) as admin:
        for _ in range(3):
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and usename <> current_user"
            )
            deadline = time.monotonic() + 8
            while (answer := world.ask("select count(*) as n from item", timeout=1)).rows != [{"n": 8}]:
                assert isinstance(answer.error, LayerError), answer.error
                assert time.monotonic() < deadline, answer.text


def test_no_session_state_survives_a_statement(world: World) -> None:
    if world.engine != "postgres":
        pytest.skip("SQLite's readers take no settings")
    state = "select pid, state, xact_start is null from pg_stat_activity where datname = current_database() and usename <> current_user"
    for sql in [
        piece
        for piece in pieces(STATEMENTS["postgres"])
        if re.match("set|reset|discard|begin|prepare|declare|listen|commit|start", piece)
    ]:
        world.ask(f"{sql}; select name from item")
        world.ask(sql)
        world.ask(
            "select set_config('search_path', 'livinglayer', false), set_config('statement_timeout', '0', false) from item"
        )
        assert world.ask("select count(*) as n from item").rows == [{"n": 8}], sql
        answer = world.ask(
            "select count(*) as n from item a, item b, item c, item d, item e, item f, item g, item h, item i, item j, item k, item l"
        )
        assert isinstance(answer.error, TimedOut), sql
        assert world.problems("", answer) == [], sql
        with psycopg.connect(world.location, autocommit=True) as admin:
            assert all(idle for _, state, idle in admin.execute(state).fetchall() if state == "idle"), sql
            assert not [
                state for _, state, _ in admin.execute(state).fetchall() if "in transaction" in (state or "")
            ], sql


# -- one handle, many principals


def test_no_answer_reaches_another_principal(make_layer: Callable[[], Any]) -> None:
    """The same text by many principals at once, on one handle: a cache keyed too loosely would mix them up."""
    layer = make_layer()
    layer.define("note", {"text": "text!", "owner": "ref principal"})
    people = {name: layer.principal(name) for name in ("p0", "p1", "p2", "p3", "p4", "p5")}
    for name, number in people.items():
        layer.insert("note", [{"text": f"{name} {n}", "owner": number} for n in range(5)])
        layer.grant(name, "read", "note", where="owner = :me", fields=["text"])
    failures: list[str] = []

    def work(name: str) -> None:
        for n in range(60):
            sql = (
                "select text from note",
                "select text from note order by id desc limit 3",
                "select max(text) as text from note",
                "select text from note__history",
            )[n % 4]
            try:
                rows = layer.query(sql, principal=name, timeout=20)
                if not rows or any(not row["text"].startswith(name) for row in rows):
                    failures.append(f"{name} got {rows}")
            except Exception as error:
                failures.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=work, args=(name,)) for name in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(failures)
    assert len(layer.query("select text from note")) == 30


def test_a_changed_grant_counts_at_the_next_statement(make_layer: Callable[[], Any]) -> None:
    layer = make_layer()
    layer.define("note", {"text": "text!", "kind": "text"})
    layer.insert("note", [{"text": "a", "kind": "x"}, {"text": "b", "kind": "y"}])
    layer.principal("bob", attributes={"kind": "x"})

    def seen(sql: str = "select * from note order by id") -> Any:
        try:
            return [[value for key, value in row.items() if key != "id"] for row in layer.query(sql, principal="bob")]
        except REFUSALS as error:
            return type(error)

    assert seen() is NotFound
    one = layer.grant("bob", "read", "note", where="kind = :me.kind", fields=["text"])
    assert seen() == [["a"]]
    layer.principal("bob", attributes={"kind": "y"})
    assert seen() == [["b"]]
    two = layer.grant("bob", "read", "note")
    assert seen() == [["a", "x"], ["b", "y"]]
    layer.revoke(two)
    assert seen() == [["b"]]
    layer.alter("note", add={"extra": "text"})
    assert seen() == [["b"]]
    deny = layer.grant("bob", "read", "note", effect="deny")
    assert seen() is NotFound
    layer.revoke(deny)
    layer.revoke(one)
    assert seen() is NotFound


# -- and what everybody may write


PORTABLE: list[tuple[str, dict[str, Any], list[tuple[Any, ...]]]] = [
    ("select name, qty from thing where qty > :n order by qty desc, name", {"n": 2}, [("gear", 9), ("bolt", 5), ("nut", 3)]),
    ("select t.name, p.name as who from thing t join person p on p.id = t.owner order by t.name", {}, [("bolt", "ann"), ("gear", "bob"), ("nut", "ann")]),
    ("select t.name, p.name as who from thing t left join person p on p.id = t.owner where p.id is null", {}, [("pin", None)]),
    ("select p.name, count(t.id) as n, sum(t.qty) as s from person p left join thing t on t.owner = p.id group by p.name order by p.name", {}, [("ann", 2, 8), ("bob", 1, 9), ("cy", 0, None)]),
    ("select p.name, max(t.qty) as m from thing t join person p on p.id = t.owner group by p.name having count(*) > 1", {}, [("ann", 5)]),
    ("with big as (select * from thing where qty >= 5) select name from big order by name", {}, [("bolt",), ("gear",)]),
    ("with recursive c(n) as (select 1 union all select n + 1 from c where n < 5) select sum(n) as s from c", {}, [(15,)]),
    ("with recursive c(n, s) as (select 1, 1 union all select n + 1, s * 2 from c where n < 4) select n, s from c order by n", {}, [(1, 1), (2, 2), (3, 4), (4, 8)]),
    ("select name, row_number() over (order by qty desc) as r from thing where qty is not null order by r", {}, [("gear", 1), ("bolt", 2), ("nut", 3), ("pin", 4)]),
    ("select name, rank() over (partition by owner order by qty) as r, lag(name) over (order by qty) as l from thing order by qty", {}, [("pin", 1, None), ("nut", 1, "pin"), ("bolt", 2, "nut"), ("gear", 1, "bolt")]),
    ("select name, sum(qty) over (order by qty rows between unbounded preceding and current row) as s from thing order by qty", {}, [("pin", 1), ("nut", 4), ("bolt", 9), ("gear", 18)]),
    ("select count(*) as n, count(distinct owner) as o, min(qty) as a, max(qty) as z from thing", {}, [(4, 2, 1, 9)]),
    ("select name from thing where qty = (select max(qty) from thing)", {}, [("gear",)]),
    ("select name, (select p.name from person p where p.id = t.owner) as who from thing t order by name", {}, [("bolt", "ann"), ("gear", "bob"), ("nut", "ann"), ("pin", None)]),
    ("select name, case when qty > 4 then 'many' when qty > 1 then 'some' else 'few' end as much from thing order by name", {}, [("bolt", "many"), ("gear", "many"), ("nut", "some"), ("pin", "few")]),
    ("select name from thing where name like '%n%' order by name", {}, [("nut",), ("pin",)]),
    ("select coalesce(owner, 0) > 0 as owned, nullif(name, 'pin') as n from thing where name in ('pin')", {}, [(False, None)]),
    ("select distinct owner is null as free from thing order by 1", {}, [(False,), (True,)]),
    ("select name from thing order by name limit 2 offset 1", {}, [("gear",), ("nut",)]),
    ("select name from person p where exists (select 1 from thing t where t.owner = p.id) order by name", {}, [("ann",), ("bob",)]),
    ("select name from person p where not exists (select 1 from thing t where t.owner = p.id)", {}, [("cy",)]),
    ("select name from thing where owner in (select id from person where name = :who) order by name", {"who": "ann"}, [("bolt",), ("nut",)]),
    ("select name from thing where qty between :a and :b order by name", {"a": 3, "b": 5}, [("bolt",), ("nut",)]),
    ("select name from thing union select name from person order by name", {}, [(n,) for n in ("ann", "bob", "bolt", "cy", "gear", "nut", "pin")]),
    ("select name from thing union all select name from thing order by name limit 3", {}, [("bolt",), ("bolt",), ("gear",)]),
    ("select name from thing except select name from thing where qty > 2", {}, [("pin",)]),
    ("select name from thing intersect select 'nut'", {}, [("nut",)]),
    ("select lower(upper(name)) as n, length(name) as l, name || '!' as b, substr(name, 1, 2) as s, replace(name, 't', 'd') as r, trim('  x ') as t from thing where name = 'nut'", {}, [("nut", 3, "nut!", "nu", "nud", "x")]),
    ("select abs(-qty) as a, qty + 1 as p, qty * 2 as m, qty % 2 as r, -qty as g from thing where name = 'bolt'", {}, [(5, 6, 10, 1, -5)]),
    ("select cast(qty as text) as t, cast('7' as integer) as i from thing where name = 'bolt'", {}, [("5", 7)]),
    ("select a.name as x, b.name as y from thing a join thing b on a.qty < b.qty where a.name <> 'pin' order by 1, 2", {}, [("bolt", "gear"), ("nut", "bolt"), ("nut", "gear")]),
    ("select s.name from (select name, qty from thing where qty > 1) s where s.qty < 9 order by s.name", {}, [("bolt",), ("nut",)]),
    ("select x.column1 as a from (values (1), (2)) x order by 1", {}, [(1,), (2,)]),
    ("select count(*) as n from thing cross join person", {}, [(12,)]),
    ("select name from thing where not (qty > 2 or name = 'x')", {}, [("pin",)]),
    ("select name -- a comment; with 'quotes'\nfrom thing /* and ; another */ where name = 'it''s; --' or name = 'pin'", {}, [("pin",)]),
    ("SELECT \"name\" FROM thing WHERE \"qty\" = 9;", {}, [("gear",)]),
    ("select 1 as one, null as none, 'x' as s", {}, [(1, None, "x")]),
    ("select op, qty from thing__history where name = 'nut' order by tx", {}, [("insert", 2), ("update", 3)]),
]  # fmt: skip


@pytest.mark.parametrize("who", ["owner", "granted"])
def test_portable_sql_runs(layer: Any, who: str) -> None:
    layer.define("person", {"name": "text!"})
    layer.define("thing", {"name": "text!", "qty": "int", "owner": "ref person"})
    ann, bob, _ = layer.insert("person", [{"name": "ann"}, {"name": "bob"}, {"name": "cy"}])
    rows = [("bolt", 5, ann), ("nut", 2, ann), ("gear", 9, bob), ("pin", 1, None)]
    ids = layer.insert("thing", [dict(zip(("name", "qty", "owner"), row, strict=True)) for row in rows])
    layer.update("thing", ids[1], {"qty": 3})
    layer.principal("clerk")
    for entity in ("person", "thing"):
        layer.grant("clerk", "read", entity)
    wrong = []
    for sql, params, expected in PORTABLE:
        try:
            got: Any = [
                tuple(row.values()) for row in layer.query(sql, params, principal="clerk" if who == "granted" else None)
            ]
        except LayerError as error:
            got = repr(error)
        if got != expected:
            wrong.append(f"{sql}\n  {got}\n  {expected}")
    report(wrong)


# -- the fuzz


@dataclass
class Tally:
    """How statements ended, by kind; what went wrong; the slowest answer."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0


def fuzz_part(world: World, twin: World, seed: str, count: int, bomb: float) -> Tally:
    """Run the statements of one seed; every third also in the twin."""
    tally, grammar = Tally(), Grammar(seed, world.engine, names_of(world))
    for number in range(count):
        if len(tally.failures) > 10:
            break
        statement = grammar.statement(bomb)
        answer = world.ask(statement, timeout=0.25)
        wrong = world.problems(statement, answer, timeout=0.25)
        if any("deadline" in problem for problem in wrong):  # a busy machine gets one more try
            answer = world.ask(statement, timeout=0.25)
            wrong = world.problems(statement, answer, timeout=0.25)
        if statement.kind != "bomb" and number % 3 == 0:
            other = twin.ask(statement, timeout=0.25)
            if difference := differs(statement.sql, answer, other, world.engine):
                wrong.append(f"{difference}: {answer.text[:300]} | {other.text[:300]}")
        tally.outcomes[statement.kind, answer.outcome] += 1
        tally.slowest = max(tally.slowest, answer.seconds)
        tally.failures += [f"seed {seed}, statement {number}, {statement!r}:\n    {problem}" for problem in wrong]
    return tally


def fuzz_elsewhere(world: dict[str, Any], twin: dict[str, Any], seed: str, count: int, bomb: float) -> dict[str, Any]:
    """`fuzz_part` in a process of its own, with handles of its own."""
    with contextlib.ExitStack() as opened:
        pair = []
        for known in (world, twin):
            layer = livinglayer.open(known["location"])
            opened.callback(layer.close)
            pair.append(World(layer, **known))
            pair[-1].ask("select 1 from item", timeout=30)  # a reader takes its time to start
        return vars(fuzz_part(pair[0], pair[1], seed, count, bomb))


def fuzz(world: World, twin: World, seed: int, count: int, bomb: float, processes: int = 0) -> Counter[tuple[str, str]]:
    """Run `count` statements of a seed, in two threads or so many processes; returns how they ended, by kind."""
    if processes:
        known = [{key: value for key, value in vars(each).items() if key != "layer"} for each in (world, twin)]
        # By the name under which a fresh process can import it, which is not the one pytest gave this module.
        work = importlib.import_module("substrate.test_guard").fuzz_elsewhere
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            given = [(*known, f"{seed}.{part}", count // processes, bomb) for part in range(processes)]
            parts = [Tally(**found) for found in pool.starmap(work, given, chunksize=1)]
    else:
        with ThreadPoolExecutor(2) as threads:
            parts = list(threads.map(lambda part: fuzz_part(world, twin, f"{seed}.{part}", count // 2, bomb), range(2)))
    outcomes = sum((part.outcomes for part in parts), Counter())
    total, ran = sum(outcomes.values()), sum(n for (_, outcome), n in outcomes.items() if outcome == "ran")
    print(
        f"\n{world.engine}: seed {seed}, {total} statements, {ran / max(total, 1):.0%} ran; slowest {max(part.slowest for part in parts):.2f} s"
    )
    for kind in ("clean", "spiked", "hostile", "mangled", "bomb"):
        print(
            f"  {kind:8}",
            ", ".join(f"{outcome} {n}" for (found, outcome), n in outcomes.most_common() if found == kind),
        )
    report([failure for part in parts for failure in part.failures])
    return outcomes


def seed_of() -> int:
    return int(os.environ.get("LAYER_TEST_SEED", random.randrange(1 << 32)))


def check_shares(outcomes: Counter[tuple[str, str]]) -> None:
    """A guard that refuses everything leaks nothing, so what is clean must run and part of the rest must get far."""
    clean = {outcome: n for (kind, outcome), n in outcomes.items() if kind == "clean"}
    assert clean["ran"] > 0.95 * sum(clean.values()), clean
    assert outcomes["spiked", "ran"] > 0.1 * sum(n for (kind, _), n in outcomes.items() if kind == "spiked")


def test_fuzz(world: World, twin: World) -> None:
    check_shares(fuzz(world, twin, seed_of(), 3000, bomb=0.001))


@pytest.mark.torture
def test_long_fuzz(world: World, twin: World) -> None:
    """LAYER_TEST_FUZZ_STATEMENTS statements, 100,000 unless told; the state is compared after every tenth."""
    total, seed = int(os.environ.get("LAYER_TEST_FUZZ_STATEMENTS", 100_000)), seed_of()
    outcomes: Counter[tuple[str, str]] = Counter()
    before = world.settled()
    for round_ in range(10):
        outcomes += fuzz(world, twin, seed + round_, total // 10, bomb=0.001, processes=2)
        assert changes(before, world.settled()) == {}
    print(f"{world.engine}: {sum(outcomes.values())} statements in all, from seed {seed}")
    check_shares(outcomes)
