"""A narrowed query: what an execution said it reads, within what its principal may see, and no way around it."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cluster import Cluster
from substrate import test_guard as guard
from substrate.test_guard import World, check_shares, fuzz, make_world, report, seed_of

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Denied, Invalid, LayerError, LimitExceeded, NotFound, TimedOut

Row = dict[str, Any]
Narrow = dict[str, Any]


def last(layer: Layer) -> int:
    return int(layer.query("select max(tx) as n from tx")[0]["n"])


# -- what it shows


def stock(layer: Layer, entity: str) -> list[int]:
    """Six rows of an entity with a reference, a text and a number."""
    layer.define(f"{entity}_rack", {"label": "text!"})
    layer.define(entity, {"name": "text!", "qty": "int", "secret": "text", "rack": f"ref {entity}_rack"})
    racks = [layer.insert(f"{entity}_rack", {"label": label}) for label in ("a", "b")]
    return list(
        layer.insert(
            entity,
            [{"name": f"n{n}", "qty": n, "secret": f"secret {n}", "rack": racks[n % 2]} for n in range(6)],
        )
    )


def test_only_what_it_is_narrowed_to_is_there(shared: Layer) -> None:
    ids = stock(shared, "narrowed")
    narrow = {"narrowed": {"fields": ["name"], "where": "qty > 3"}}
    rows, tx = shared.query_at("select * from narrowed order by id", narrow=narrow)
    assert rows == [{"id": ids[4], "name": "n4"}, {"id": ids[5], "name": "n5"}]
    assert tx == last(shared)
    assert shared.query_at("select name from narrowed where id = :id", {"id": ids[0]}, narrow=narrow)[0] == []
    assert shared.query_at("select count(*) as n from narrowed", narrow={"narrowed": None})[0] == [{"n": 6}]
    assert shared.query_at("select id from narrowed order by id", narrow={"narrowed": {"fields": []}})[0] == [
        {"id": n} for n in ids
    ]
    assert shared.query_at("select 1 as one", narrow={})[0] == [{"one": 1}]
    for sql in ("select * from narrowed_rack", "select * from tx", "select * from principal", "select * from absent"):
        with pytest.raises(NotFound, match=r"there is no entity '[a-z_]+' to read"):
            shared.query_at(sql, narrow=narrow)
    for field in ("qty", "secret", "rack", "absent"):
        with pytest.raises(Invalid, match=field):
            shared.query_at(f"select {field} from narrowed", narrow=narrow)


def test_its_condition_may_follow_references_and_speak_of_the_principal(shared: Layer) -> None:
    stock(shared, "followed")
    shared.principal("nora", attributes={"label": "b"})
    shared.grant("nora", "read", "followed")
    shared.grant("nora", "read", "followed_rack")
    for where, names in (
        ("rack.label = 'a'", ["n0", "n2", "n4"]),
        ("rack.label = :me.label and qty < 4", ["n1", "n3"]),
        ("rack.label = :me.absent", []),
    ):
        rows, _ = shared.query_at(
            "select name from followed order by id", principal="nora", narrow={"followed": {"where": where}}
        )
        assert [row["name"] for row in rows] == names, where


def test_its_condition_tells_nothing_that_its_principal_may_not_read(shared: Layer) -> None:
    """Whoever writes it could otherwise try a hidden value bit by bit."""
    stock(shared, "guessed")
    shared.grant("olaf", "read", "guessed", fields=["name", "qty", "rack"])
    shared.grant("olaf", "read", "guessed.qty", effect="deny", where="qty = 5")

    def seen(where: str) -> list[str]:
        sql = "select name from guessed order by id"
        return [row["name"] for row in shared.query_at(sql, principal="olaf", narrow={"guessed": {"where": where}})[0]]

    assert seen("secret like 'secret%'") == seen("secret = 'secret 3'") == []
    assert seen("secret is null") == ["n0", "n1", "n2", "n3", "n4", "n5"]
    assert seen("rack.label = 'a'") == []
    assert seen("qty >= 4") == ["n4"]
    assert seen("qty is null") == ["n5"]
    shared.grant("olaf", "read", "guessed_rack")
    assert seen("rack.label = 'a'") == ["n0", "n2", "n4"]


def test_grants_follow_references_to_what_it_does_not_show_and_denies_deny(shared: Layer) -> None:
    stock(shared, "policed")
    shared.grant("pia", "read", "policed", where="rack.label = 'a'")
    shared.grant("pia", "read", "policed", where="qty = 4", effect="deny")
    narrow = {"policed": {"fields": ["name"], "where": "qty > 0"}}
    assert shared.query_at("select name from policed", principal="pia", narrow=narrow)[0] == [{"name": "n2"}]
    with pytest.raises(NotFound):
        shared.query_at("select * from policed_rack", principal="pia", narrow={**narrow, "policed_rack": None})


def test_history_goes_with_its_entity_and_names_people_only_where_tx_is_asked_for(shared: Layer) -> None:
    ids = stock(shared, "versioned")
    shared.update("versioned", ids[5], {"qty": 1}, reason="less")
    narrow = {"versioned": {"fields": ["qty"], "where": "qty > 3"}}
    rows, _ = shared.query_at("select * from versioned__history order by id, tx", narrow=narrow)
    assert [(row["id"], row["qty"], row["op"], row["principal"], row["reason"]) for row in rows] == [
        (ids[4], 4, "insert", None, None),
        (ids[5], 5, "insert", None, None),
    ]
    assert "name" not in rows[0]
    told, _ = shared.query_at("select * from versioned__history", narrow={"versioned": None, "tx": None})
    assert {row["principal"] for row in told} == {"owner"}
    for tx in ({"fields": ["tx"]}, {"where": "tx > 0"}):
        told, _ = shared.query_at("select * from versioned__history", narrow={"versioned": None, "tx": tx})
        assert {row["principal"] for row in told} == {None}
    for name in ("versioned_rack__history", "principal__history", "tx__history", "versioned__history__history"):
        with pytest.raises(NotFound):
            shared.query_at(f"select * from {name}", narrow=narrow)


def test_the_ledger_is_there_where_it_is_listed(shared: Layer) -> None:
    narrow = {"tx": {"fields": ["tx", "reason"], "where": "tx = 1"}}
    rows, _ = shared.query_at("select * from tx", narrow=narrow)
    assert [set(row) for row in rows] == [{"tx", "reason"}]
    assert [row["tx"] for row in rows] == [1]
    executions, _ = shared.query_at("select * from execution", narrow={"execution": {"fields": ["kind"]}})
    assert executions
    assert {key for row in executions for key in row} == {"id", "kind"}


def test_branches_slices_and_the_past_are_narrowed_too(shared: Layer) -> None:
    ids = stock(shared, "forked")
    before = last(shared)
    shared.update("forked", ids[0], {"qty": 10})
    shared.fork("forked_side")
    shared.update("forked", ids[1], {"qty": 11}, branch="forked_side")
    shared.fork("forked_part", slice={"forked": "qty <= 4"})
    narrow = {"forked": {"fields": ["qty"], "where": "qty > 3"}}

    def seen(**more: Any) -> list[int]:
        return [row["qty"] for row in shared.query_at("select qty from forked order by qty", narrow=narrow, **more)[0]]

    assert seen() == [4, 5, 10]
    assert seen(as_of=before) == [4, 5]
    assert seen(branch="forked_side") == [4, 5, 10, 11]
    assert seen(branch="forked_part") == [4]
    assert shared.query_at("select qty from forked", as_of=before, narrow=narrow)[1] == before
    with pytest.raises(NotFound):
        shared.query_at("select * from forked_rack", branch="forked_part", narrow={"forked_rack": None})


def test_what_is_no_narrowing_is_invalid(shared: Layer) -> None:
    stock(shared, "strict")
    for narrow in (
        {"absent": None},
        {"strict": {"fields": ["absent"]}},
        {"strict": {"where": "absent = 1"}},
        {"strict": {"where": "qty >"}},
        {"strict": {"where": "true; select 1"}},
        {"strict": {"where": "qty in (select 1)"}},
        {"strict": {"where": ""}},
        {"strict": {"where": "qty"}},
        {"strict": {"where": "rack.absent = 1"}},
        {"strict": {"where": 5}},
        {"strict": {"fields": "name"}},
        {"strict": {"fields": [1]}},
        {"strict": {"other": 1}},
        {"strict": "name"},
        {"strict__history": None},
        {"STRICT": None},
        {"strict\0": None},
        {1: None},
        ["strict"],
        "strict",
        {f"e{n}": None for n in range(2000)},
    ):
        with pytest.raises(Invalid):
            shared.query_at("select name from strict", narrow=narrow)  # type: ignore[arg-type]


def test_a_narrowed_name_keeps_to_schema_and_grants_as_they_are_now(shared: Layer) -> None:
    stock(shared, "moving")
    one = shared.grant("quin", "read", "moving", where="qty = 1")
    narrow = {"moving": {"fields": ["name", "qty"]}}

    def seen() -> Any:
        try:
            return [
                r["name"]
                for r in shared.query_at("select * from moving order by id", principal="quin", narrow=narrow)[0]
            ]
        except LayerError as error:
            return type(error)

    assert seen() == ["n1"]
    shared.grant("quin", "read", "moving", where="qty = 2")
    assert seen() == ["n1", "n2"]
    shared.revoke(one)
    assert seen() == ["n2"]
    shared.alter("moving", rename={"qty": "amount"})
    assert seen() is Invalid


def test_the_limits_of_a_narrowed_query_hold_for_the_owner_too(shared: Layer) -> None:
    stock(shared, "limited")
    narrow: Narrow = {"limited": None}
    with pytest.raises(LimitExceeded):
        shared.query_at("select * from limited", narrow=narrow, limit=5)
    endless = "with recursive r(n) as (select 1 union all select n + 1 from r) select count(*) as n from r, limited"
    with pytest.raises(TimedOut):
        shared.query_at(endless, narrow=narrow, timeout=0.3)
    assert shared.query_at("select count(*) as n from limited", narrow=narrow)[0] == [{"n": 6}]


# -- at which tx


def test_the_tx_is_the_last_one_that_the_rows_show(make_layer: Callable[[], Layer]) -> None:
    """While others write: a row that says in which tx it was written last is never newer, nor one before it missing."""
    layer = make_layer()
    layer.define("count", {"n": "int"})
    row = layer.insert("count", {"n": 0})
    wrote = {layer.update("count", row, {"n": 1}): 1}
    over = threading.Event()

    def write() -> None:
        n = 1
        while not over.is_set():
            n += 1
            wrote[layer.update("count", row, {"n": n})] = n

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[tuple[Any, int]] = []
    try:
        deadline = time.monotonic() + 3
        while len(seen) < 400 and time.monotonic() < deadline:
            for sql in ("select n from count", "select n from count where n < 0"):
                rows, tx = layer.query_at(sql, narrow={"count": None} if len(seen) % 2 else None)
                seen.append((rows[0]["n"] if rows else None, tx))
                (found,), tx = layer.query_at("select max(tx) as n from tx", narrow={"tx": None})
                assert found["n"] == tx
    finally:
        over.set()
        writer.join()
    assert len(wrote) > 5
    assert [(n, tx) for n, tx in seen if n is not None and wrote[tx] != n] == []
    assert all(tx in wrote for _, tx in seen)


def test_who_asks_as_another_must_be_allowed_to(shared: Layer, shared_location: str) -> None:
    stock(shared, "asked")
    shared.principal("rita")
    shared.grant("rita", "read", "asked")
    shared.principal("sven")
    token = shared.token("rita")
    with livinglayer.open(shared_location, token=token) as hers:
        assert hers.query_at("select count(*) as n from asked", narrow={"asked": None})[0] == [{"n": 6}]
        with pytest.raises((Denied, NotFound)):
            hers.query_at("select 1 as n", principal="sven", narrow={"asked": None})


# -- writing through a query


WRITES = (
    "insert into written(name) values ('x')", "update written set name = 'x'", "delete from written", "drop table written", "drop view written",
    "create table t(n int)", "create temp table t as select 1 as n", "alter table written add column x int", "attach 'x.db' as x", "pragma user_version = 5",
    "pragma writable_schema = on", "set role postgres", "reset role", "set search_path = livinglayer", "begin", "commit", "vacuum", "truncate written",
    "with x as (delete from written returning *) select * from x", "with x as (select 1) insert into written(name) select 'x'", "select name into t from written",
    "copy written to '/tmp/x'", "grant all on written to public", "select 1; delete from written", "/* */ delete from written",
    "replace into written(name) values ('x')", "merge into written using written w on true when matched then delete", "lock table written",
    "explain delete from written", "explain select * from written", "select * from written for update",
)  # fmt: skip


@pytest.mark.parametrize("narrow", [None, {"written": None}], ids=["plain", "narrowed"])
def test_a_statement_that_writes_is_refused(shared: Layer, narrow: Narrow | None) -> None:
    if "written" not in shared.schema().by_name:
        shared.define("written", {"name": "text"})
        shared.insert("written", {"name": "kept"})
    before = last(shared)
    wrong = []
    for sql in WRITES:
        try:
            found = shared.query_at(sql, narrow=narrow)
            wrong.append(f"{sql}: {found}")
        except (Denied, Invalid):
            pass
        except LayerError as error:
            wrong.append(f"{sql}: {error!r}")
    assert wrong == []
    assert shared.query("select name from written") == [{"name": "kept"}]
    assert shared.query(f"select count(*) as n from tx where tx > {before} and reason is not null") == [{"n": 0}]


# -- ways around it: the owner, who may see everything, narrowed to what mallory may see, meets every attack on her


@dataclass
class Narrowed:
    """A layer whose queries are the owner's, narrowed."""

    layer: Layer
    narrow: Narrow

    def query(
        self, sql: str, params: Any = None, branch: str = "main", principal: str | None = None, **more: Any
    ) -> Any:
        if branch != "main":
            raise NotFound(f"there is no branch {branch!r}")
        return self.layer.query_at(sql, params, narrow=self.narrow, **more)[0]


def warm(world: World) -> None:
    """Start every reader and have it make every name: that takes its time, and some syntax errors depend on it."""
    counts = ", ".join(f"(select count(*) from {name}) as {name}_n" for name in guard.READABLE)
    both = threading.Barrier(2)

    def ask() -> None:
        for _ in range(3):
            both.wait(60)
            answer = world.ask(
                f"select {counts}, count(*) as n from item a, item b, item c, item d, item e", timeout=60
            )
            assert answer.error is None, answer.error

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def worlds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres_cluster: Callable[..., Cluster]
) -> Iterator[tuple[World, World]]:
    home: Path = tmp_path_factory.mktemp("narrow")
    with (
        make_world(request.param, home, postgres_cluster, 0) as world,
        make_world(request.param, home, postgres_cluster, 5) as twin,
    ):
        for each in (world, twin):
            narrow = {
                "item": {"fields": ["name", "qty"], "where": f"owner = {each.me}"},
                "part": {"fields": ["qty", "name"], "where": f"shelf.keeper = {each.me}"},
                "memo": {"fields": ["title", "level"], "where": "level <= 5"},
            }
            # Views and readers of other narrowings are there too.
            for name in ("secret_thing", "item", "shelf", "tx", "item__history"):
                each.layer.query_at(f"select * from {name}", narrow={name.removesuffix("__history"): None})
            each.layer = Narrowed(each.layer, narrow)
            each.physical = each.physical[::3]  # the guard's own tests take them all
            for name in guard.READABLE:
                assert each.ask(f"select * from {name}", timeout=10).rows, f"nothing of {name}"
            warm(each)
        yield world, twin


@pytest.fixture
def world(worlds: tuple[World, World]) -> Iterator[World]:
    """The planted world; afterwards it must hold what it held before, and still serve."""
    world, _ = worlds
    before = world.settled()
    yield world
    assert guard.changes(before, world.settled()) == {}
    assert world.ask("select count(*) as n from item", timeout=5).rows == [{"n": 8}]


@pytest.fixture
def twin(worlds: tuple[World, World]) -> World:
    return worlds[1]


ATTACKS = [
    guard.test_no_relation_but_the_granted_ones_can_be_read,
    guard.test_composed_attacks_are_refused,
    guard.test_a_shadowed_name_never_opens_the_table_behind_it,
]
ORACLES = [
    guard.test_hidden_rows_decide_no_error_and_no_deadline,
    guard.test_counts_and_extremes_are_those_of_visible_rows,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.removeprefix("test_"))
def test_attacks(world: World, attack: Callable[[World], None]) -> None:
    attack(world)


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.__name__.removeprefix("test_"))
def test_oracles(world: World, twin: World, oracle: Callable[[World, World], None]) -> None:
    oracle(world, twin)


def test_narrowed_fuzz(world: World, twin: World) -> None:
    check_shares(fuzz(world, twin, seed_of(), 800, bomb=0.001))


SHAPES = (
    "select * from {}", "select count(*) as n from {}", "select 1 as n from {}", "select 1 as n where exists (select 1 from {})", "select (select count(*) from {}) as n",
    "with item as (select * from {}) select * from item", "with recursive item as (select * from {} union all select * from item) select * from item",
    "select name from item union all select 'x' from {}", "select name from item except select 'x' from {}", "select i.name from item i join {} x on true",
    "select i.name from item i left join {} x on false", "select name from item where id in (select id from {})", "select * from (select * from {}) item",
    "with a as (with b as (select * from {}) select * from b) select * from a", "explain select * from {}", "explain query plan select * from {}",
    "select name from item order by (select count(*) from {})", "select max((select count(*) from {})) from item", "values ((select count(*) from {}))",
    "select case when false then (select count(*) from {}) end from item", "select name from item limit (select count(*) from {})",
    "table {}",
)  # fmt: skip


def test_no_spelling_of_a_name_opens_what_is_not_narrowed_to(world: World) -> None:
    hidden = (
        "secret_thing",
        "shelf",
        "tx",
        "principal",
        "secret_thing__history",
        "shelf__history",
        "principal__history",
    )
    spelled = [
        spelling.format(name, name.upper(), name.title())
        for name in hidden
        for spelling in (
            "{0}",
            "{1}",
            "{2}",
            '"{0}"',
            '"{1}"',
            "[{0}]",
            "`{0}`",
            "main.{0}",
            "temp.{0}",
            'main."{0}"',
            "public.{0}",
            "livinglayer.{0}",
        )
    ]
    spelled += [
        "sqlite_master", "sqlite_schema", "sqlite_temp_master", "sqlite_temp_schema", "temp.sqlite_master", "main.sqlite_schema", "pragma_table_list", "pragma_table_info('item')",
        "dbstat", "sqlite_dbpage", "sqlite_stmt", "bytecode('select 1')", "information_schema.tables", "information_schema.views", "pg_catalog.pg_views", "pg_views", "pg_class",
        "pg_roles", "pg_stat_activity", '"pg_views"', "_clock", '"_clock"', "_epoch", "_b_item", "_p_item", "_g_item", '"_b_secret_thing"', '"_p_shelf"',
    ]  # fmt: skip
    if world.engine == "postgres":  # the views of other narrowings, of the principal's own, and of this one
        with psycopg.connect(world.location) as admin:
            views = admin.execute("select schemaname, viewname from pg_views where schemaname ~ '^ll_'").fetchall()
        assert len({schema for schema, _ in views}) > 4
        spelled += [f"{schema}.{view}" for schema, view in views] + [f'"{schema}"."{view}"' for schema, view in views]
    statements = [shape.format(name) for name in spelled for shape in (SHAPES if name in hidden else SHAPES[:5])]
    guard.attack(world, statements, refused=True)


def test_no_text_of_the_readers_own_is_run_for_a_caller(world: World) -> None:
    """A statement that a connection has prepared for itself is not checked again when it comes from outside."""
    own = [
        "begin", "rollback", "commit", "end", "select tx, epoch from main.ledger_clock", "select epoch from main.ledger_clock", "select name from main.sqlite_schema",
        "select tx, epoch from livinglayer.ledger_clock", "select tx, next_id, epoch, at, hash from ledger_clock where one = 1", "pragma shrink_memory", "pragma cache_size",
        "select set_config('search_path', 'livinglayer', false)", "select set_config($1, $2, false)",
    ]  # fmt: skip
    for _ in range(3):
        world.ask("select name from item")
        guard.attack(world, own, refused=True)


def test_no_function_tells_of_what_is_not_narrowed_to(world: World) -> None:
    calls = (
        "current_user", "session_user", "current_setting('search_path')", "set_config('search_path', 'livinglayer', false)", "current_schemas(true)", "to_regclass('secret_thing')",
        "'secret_thing'::regclass", "has_table_privilege('secret_thing', 'select')", "pg_get_viewdef('item')", "query_to_xml('select * from secret_thing', true, false, '')",
        "table_to_xml('item', true, false, '')", "schema_to_xml('livinglayer', true, false, '')", "dblink('', 'select 1')", "lo_import('/etc/passwd')", "pg_read_file('/etc/passwd')",
        "load_extension('x')", "readfile('/etc/passwd')", "edit('x')", "sqlite_source_id()", "layer_convert('int', 'text', 1)", "fts3_tokenizer('simple')",
    )  # fmt: skip
    shapes = ("select {}", "select {} as x from item", "select name from item where ({}) is not null")
    guard.attack(world, [shape.format(call) for call in calls for shape in shapes], refused=True)


def test_narrowings_of_one_principal_do_not_mix(make_layer: Callable[[], Layer]) -> None:
    """The same text under many narrowings at once: a reader kept under too wide a name would mix them up."""
    layer = make_layer()
    layer.define("note", {"text": "text!", "part": "int"})
    layer.define("other", {"text": "text!"})
    layer.insert("note", [{"text": f"p{n % 6} {n}", "part": n % 6} for n in range(30)])
    layer.insert("other", {"text": "hidden"})
    failures: list[str] = []

    def work(part: int) -> None:
        narrow = {"note": {"fields": ["text"], "where": f"part = {part}"}}
        for n in range(30):
            sql = ("select text from note", "select max(text) as text from note", "select text from note__history")[
                n % 3
            ]
            try:
                rows, _ = layer.query_at(sql, narrow=narrow, timeout=30)
                if not rows or any(not row["text"].startswith(f"p{part} ") for row in rows):
                    failures.append(f"{part} got {rows}")
            except Exception as error:
                failures.append(f"{part}: {error!r}")
            for sql in ("select part from note", "select text from other"):
                with contextlib.suppress(Invalid, NotFound):
                    failures.append(f"{part}: {layer.query_at(sql, narrow=narrow, timeout=30)}")

    threads = [threading.Thread(target=work, args=(part,)) for part in range(6)]
    for thread in threads:
        thread.start()
    layer.grant("anybody", "read", "note")  # all views are made anew meanwhile
    for thread in threads:
        thread.join()
    report(failures)


# -- for any policy, narrowing and query: what is left of the answer that is not narrowed


See = Callable[[str, Any], Mapping[str, Any]]
Test = Callable[[Mapping[str, Any], See, Row], bool | None]


def holds(value: Any, test: Callable[[Any], bool]) -> bool | None:
    return None if value is None else test(value)


CONDITIONS: dict[str, dict[str, Test]] = {
    "item": {
        "qty > 2": lambda r, see, me: holds(r.get("qty"), lambda v: v > 2),
        "not (qty > 2)": lambda r, see, me: holds(r.get("qty"), lambda v: not v > 2),
        "name like 'b%'": lambda r, see, me: holds(r.get("name"), lambda v: v.startswith("b")),
        "name is null": lambda r, see, me: r.get("name") is None,
        "price >= 2.5": lambda r, see, me: holds(r.get("price"), lambda v: v >= Decimal("2.5")),
        "owner = :me": lambda r, see, me: holds(r.get("owner"), lambda v: v == me["id"]),
        "crew.label = 'red'": lambda r, see, me: holds(see("crew", r.get("crew")).get("label"), lambda v: v == "red"),
        "crew.label = :me.crew": lambda r, see, me: holds(see("crew", r.get("crew")).get("label"), lambda v: v == me.get("crew")),
        "crew.lead.name is not null": lambda r, see, me: see("principal", see("crew", r.get("crew")).get("lead")).get("name") is not None,
        "coalesce(qty, 9) >= 4": lambda r, see, me: (9 if r.get("qty") is None else r["qty"]) >= 4,
        "day < '2026-01-03' or qty is null": lambda r, see, me: r.get("qty") is None or holds(r.get("day"), lambda v: v < datetime(2026, 1, 3, tzinfo=UTC).date()),
        "true": lambda r, see, me: True,
        "false": lambda r, see, me: False,
    },
    "crew": {
        "label <> 'red'": lambda r, see, me: holds(r.get("label"), lambda v: v != "red"),
        "lead = :me": lambda r, see, me: holds(r.get("lead"), lambda v: v == me["id"]),
        "label is not null": lambda r, see, me: r.get("label") is not None,
    },
}  # fmt: skip
FIELDS = {"item": ["name", "qty", "price", "day", "owner", "crew"], "crew": ["label", "lead"]}
SAFE = {"item": [text for text in CONDITIONS["item"] if text != "false"], "crew": list(CONDITIONS["crew"])}


@pytest.fixture(scope="module")
def stores(
    postgres_cluster: Callable[..., Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], tuple[Layer, int]]]:
    made: dict[str, tuple[Layer, int]] = {}
    with contextlib.ExitStack() as places:

        def get(engine: str) -> tuple[Layer, int]:
            if engine not in made:
                where = str(tmp_path_factory.mktemp("narrowed") / "layer")
                place = places.enter_context(postgres_cluster().database()) if engine == "postgres" else where
                layer = livinglayer.open(place, create=True)
                places.callback(layer.close)
                made[engine] = (layer, fill(layer))
            return made[engine]

        yield get


def fill(layer: Layer) -> int:
    """Rows, versions, branches; a moment in between."""
    people = [layer.principal(name, attributes={"crew": crew}) for name, crew in (("ann", "red"), ("bea", "blue"))]
    layer.define("crew", {"label": "text", "lead": "ref principal"})
    layer.define(
        "item",
        {"name": "text", "qty": "int", "price": "decimal", "day": "date", "owner": "ref principal", "crew": "ref crew"},
    )
    crews = layer.insert(
        "crew",
        [{"label": label, "lead": lead} for label, lead in (("red", people[0]), ("blue", people[1]), (None, None))],
    )
    chance = random.Random(5)

    def row() -> Row:
        return {
            "name": chance.choice(["axle", "bolt", "bar", None]),
            "qty": chance.choice([None, 0, 1, 2, 3, 4, 5]),
            "price": chance.choice([None, "1.25", "2.50", "10"]),
            "day": chance.choice([None, "2026-01-01", "2026-01-03", "2026-02-01"]),
            "owner": chance.choice([None, *people]),
            "crew": chance.choice([None, *crews]),
        }

    ids = layer.insert("item", [row() for _ in range(24)])
    moment = last(layer)
    for n in chance.sample(ids, 10):
        layer.update("item", n, row())
    for n in ids[:3]:
        layer.delete("item", n)
    layer.fork("side")
    for n in ids[3:9]:
        layer.update("item", n, row(), branch="side")
    layer.insert("item", row(), branch="side")
    layer.fork("cut", slice={"item": "qty > 1", "crew": None})
    layer.fork("only", slice={"item": None})
    return moment


def test_what_is_left_is_the_answer_without_the_rest(stores: Callable[[str], tuple[Layer, int]], engine: str) -> None:
    layer, moment = stores(engine)
    seed = seed_of()
    chance = random.Random(seed)
    failures: list[str] = []
    for n in range(12):
        who = f"who{n}"
        me: Row = {"crew": chance.choice(["red", "blue"])}
        me["id"] = layer.principal(who, attributes={"crew": me["crew"]})
        said = policy(layer, who, chance)
        for _ in range(4):
            at = {"branch": chance.choice(["main", "main", "side", "cut", "only"])}
            if chance.random() < 0.3:
                at["as_of"] = moment  # type: ignore[assignment]
            narrow = narrowing(chance)
            failures += [
                f"seed {seed}: policy {said}, {at}, narrow {narrow}: {problem}"
                for problem in compare(layer, who, me, at, narrow, chance)
            ]
    report(failures[:20])


def policy(layer: Layer, who: str, chance: random.Random) -> list[Any]:
    """Some grants at random; what they are."""
    said: list[Any] = []
    for entity in ("item", "crew", "principal", "tx"):
        known = entity in FIELDS
        for effect in ["allow"] * chance.choice([0, 1, 1, 2]) + ["deny"] * chance.choice([0, 0, 1]):
            if not known and (effect == "deny" or chance.random() < 0.4):
                continue
            more: Row = {}
            if known and chance.random() < 0.6:
                more["where"] = chance.choice(SAFE[entity])
            if known and chance.random() < 0.4:
                more["fields"] = chance.sample(FIELDS[entity], chance.randint(1, len(FIELDS[entity])))
            layer.grant(who, "read", entity, effect=effect, **more)
            said.append((entity, effect, more))
    return said


def narrowing(chance: random.Random) -> Narrow:
    narrow: Narrow = {}
    for entity, fields in FIELDS.items():
        if chance.random() < 0.85:
            part: Row = {}
            if chance.random() < 0.7:
                part["where"] = chance.choice(list(CONDITIONS[entity]))
            if chance.random() < 0.5:
                part["fields"] = chance.sample(fields, chance.randint(0, len(fields)))
            narrow[entity] = part or chance.choice([None, {}])
    if chance.random() < 0.3:
        narrow["tx"] = None
    return narrow


def compare(layer: Layer, who: str, me: Row, at: Row, narrow: Narrow, chance: random.Random) -> Iterator[str]:
    """Where a narrowed answer is not the filtered one."""

    def whole(name: str) -> list[Row] | None:
        try:
            return layer.query(f"select * from {name} order by id", principal=who, **at)
        except NotFound:
            return None

    def asked(sql: str, **params: Any) -> Any:
        try:
            return layer.query_at(sql, params, principal=who, narrow=narrow, **at)[0]
        except LayerError as error:
            return type(error)

    seen = {name: {row["id"]: row for row in whole(name) or ()} for name in ("item", "crew", "principal")}

    def see(entity: str, number: Any) -> Mapping[str, Any]:
        return seen[entity].get(number, {}) if number is not None else {}

    def left(name: str) -> list[Row] | None:
        """What must be left of a name."""
        entity = name.removesuffix("__history")
        rows = whole(name)
        if entity not in narrow or rows is None:
            return None
        part = narrow[entity] or {}
        test = CONDITIONS[entity][part["where"]] if part.get("where") else None
        fields = FIELDS[entity] if part.get("fields") is None else part["fields"]
        gone = set(FIELDS[entity]) - set(fields)
        blank = (
            set() if narrow.get("tx", 0) is None or name == entity else {"principal", "reason", "execution", "branch"}
        )
        return [
            {key: None if key in blank else value for key, value in row.items() if key not in gone}
            for row in rows
            if test is None or test(row, see, me)
        ]

    def same(found: Any, wanted: Any) -> bool:
        if isinstance(found, type) or isinstance(wanted, type):
            return bool(found is wanted)
        return sorted(map(repr, found)) == sorted(map(repr, wanted))

    for name in ("item", "crew", "item__history", "crew__history"):
        rows = left(name)
        found = asked(f"select * from {name}")
        if not same(found, NotFound if rows is None else rows):
            yield f"{name}: {found} instead of {rows}"
        if rows is None:
            continue
        columns = list(rows[0]) if rows else ["id"]
        field = chance.choice(columns)
        number = rows[0]["id"] if rows else 1
        for sql, wanted in (
            (f"select count(*) as n from {name}", [{"n": len(rows)}]),
            (f"select {field} from {name} where id = :id", [{field: row[field]} for row in rows if row["id"] == number]),
            (f"select count({field}) as n from {name} where {field} is not null", [{"n": sum(row[field] is not None for row in rows)}]),
            (f"with picked as (select id from {name}) select max(id) as m from picked", [{"m": max((row["id"] for row in rows), default=None)}]),
        ):  # fmt: skip
            found = asked(sql, **({"id": number} if ":id" in sql else {}))
            if not same(found, wanted):
                yield f"{sql}: {found} instead of {wanted}"
    items, crews = left("item"), left("crew")
    found = asked("select count(*) as n from item i, crew c")
    pairs: Any = NotFound if items is None or crews is None else [{"n": len(items) * len(crews)}]
    if not same(found, pairs):
        yield f"join: {found} instead of {pairs}"
