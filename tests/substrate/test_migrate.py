"""A layer of an earlier format, as a release of that format left it, opens as one of today's: whole, once, or not at all."""

from __future__ import annotations

import lzma
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Incompatible, LayerError, Unauthenticated
from livinglayer.substrate.ledger import Tx
from livinglayer.substrate.schema import FIRST_ID, FORMAT

HERE = Path(__file__).parent


@pytest.fixture(params=range(1, FORMAT))
def past(request: pytest.FixtureRequest) -> int:
    """An earlier format."""
    return int(request.param)


@pytest.fixture
def token(engine: str, past: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The old layer's owner."""
    text = (HERE / f"format{past}" / f"{engine}.token").read_text().strip()
    monkeypatch.setenv("LAYER_TOKEN", text)
    return text


@pytest.fixture
def old(engine: str, location: str, past: int, token: str) -> str:
    """The place of a layer of an earlier format, not opened yet."""
    if engine == "postgres":
        with psycopg.connect(location, autocommit=True) as connection:
            connection.execute("set check_function_bodies = off")
            connection.execute(lzma.decompress((HERE / f"format{past}" / "layer.sql.xz").read_bytes()))
    else:
        with tarfile.open(HERE / f"format{past}" / "layer.tar.xz") as tar:
            tar.extractall(location, filter="data")
    return location


@pytest.fixture
def fresh(token: str, make_location: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The place of a layer of today's."""
    place = make_location()
    with monkeypatch.context() as patch:
        patch.delenv("LAYER_TOKEN")
        livinglayer.open(place, create=True).close()
    return place


@contextmanager
def raw(engine: str, location: str) -> Iterator[Callable[[str], list[tuple[Any, ...]]]]:
    """A connection that knows nothing of layers."""
    if engine == "postgres":
        with psycopg.connect(location, autocommit=True, options="-c search_path=livinglayer") as connection:
            yield (
                lambda sql: (
                    cursor.fetchall() if (cursor := connection.cursor().execute(sql.encode())).description else []
                )
            )
        return
    file = apsw.Connection(str(Path(location) / ".layer" / "layer.db"))
    file.set_busy_timeout(10_000)
    file.create_collation("exact", lambda a, b: (Decimal(a) > Decimal(b)) - (Decimal(a) < Decimal(b)))
    yield lambda sql: file.execute(sql).fetchall()
    file.close(True)


def content(engine: str, location: str) -> dict[str, Any]:
    """Every row of every table the database has, and how its objects are made."""
    with raw(engine, location) as run:
        if engine == "sqlite":
            made = run("select name, sql from sqlite_schema order by name")
            tables = [name for (name,) in run("select name from sqlite_schema where type = 'table'")]
        else:
            made = run(
                "select table_name, column_name, data_type from information_schema.columns where table_schema = 'livinglayer' order by 1, 2"
            ) + run(
                "select proname, prosrc, '' from pg_proc where pronamespace = 'livinglayer'::regnamespace order by 1"
            )
            tables = [name for (name,) in run("select tablename from pg_tables where schemaname = 'livinglayer'")]
        return {"": made, **{name: sorted(map(repr, run(f"select * from {name}"))) for name in tables}}


def meta(engine: str, location: str) -> str:
    with raw(engine, location) as run:
        return str(run("select value from meta where key = 'format'")[0][0])


def test_a_layer_of_an_earlier_format_opens_and_is_whole(engine: str, past: int, old: str) -> None:
    assert meta(engine, old) == str(past)
    with raw(engine, old) as run:
        [(last,)] = run("select max(tx) from ledger_tx")
    layer = livinglayer.open(old)
    report = layer.verify()
    assert report, report.problems
    assert meta(engine, old) == str(FORMAT)
    assert layer.query("select reason, principal from tx where tx > :last", {"last": last}) == [
        {"reason": f"layer {layer.id} moves to format {FORMAT}", "principal": "owner"}
    ]
    assert layer.query("select kind, status, verb from execution where id = (select max(id) from execution)") == [
        {"kind": "migration", "status": "done", "verb": None}
    ]
    # What was there reads as it did.
    assert layer.query("select name, qty, price, on_sale, more from item order by id") == [
        {"name": "bölt", "qty": "5", "price": Decimal("0.50"), "on_sale": True, "more": {"a": [1, 2.5]}},
        {"name": "nut", "qty": "9", "price": Decimal("8.10"), "on_sale": True, "more": None},
    ]
    bolt = layer.query("select id from item where name = 'bölt'")[0]["id"]
    versions = layer.query("select qty from item__history where id = :id order by tx", {"id": bolt})
    assert [row["qty"] for row in versions] == ["1", "2", "3", "4", "5"]
    assert [row["name"] for row in layer.query("select name from item order by id", branch="idea")] == ["nut", "screw"]
    assert layer.query("select qty from item where id = :id", {"id": bolt}, as_of=last)[0]["qty"] == "5"
    rights = None if past == 1 else "caller"
    assert layer.query("select name, rights, retries from function") == [
        {"name": "count", "rights": rights, "retries": None}
    ]
    assert layer.query("select name, rights from function", as_of=last) == [{"name": "count", "rights": rights}]
    assert layer.query("select * from trigger", as_of=last) == []
    # And what is new works, on main and on branches forked before.
    for branch in ("main", "idea"):
        layer.insert("trigger", {"name": "t", "function": "count", "on_entity": "item"}, branch=branch)
        assert layer.query("select enabled, branch from trigger", branch=branch) == [
            {"enabled": True, "branch": "main"}
        ]
        layer.upsert(
            "function", {"name": "count", "rights": "definer", "language": "python"}, on=["name"], branch=branch
        )
        assert layer.query("select rights from function", branch=branch) == [{"rights": "definer"}]
        layer.insert("quota", {"resource": "cpu", "amount": 1.5, "seconds": 60}, branch=branch)
    layer.delete("trigger", layer.query("select id from trigger", branch="idea")[0]["id"], branch="idea")
    layer.update("item", bolt, {"qty": "6"})
    assert layer.engine.lease("runner/a", "me", 60)
    assert layer.query("select * from usage") + layer.query("select * from decision where allowed") == []
    layer.close()
    layer = livinglayer.open(old)
    report = layer.verify()
    assert report, report.problems
    assert layer.query("select count(*) as n from tx where reason like '%moves to format%'") == [{"n": 1}]
    layer.close()


def test_a_migrated_database_is_made_like_a_fresh_one(engine: str, old: str, fresh: str) -> None:
    livinglayer.open(old).close()
    shapes = []
    for place in (old, fresh):
        with raw(engine, place) as run:
            if engine == "sqlite":
                tables = [n for (n,) in run("select name from sqlite_schema where type = 'table'")]
                shape = {(n, *c) for n in tables for c in run(f"select name, type, pk from pragma_table_info('{n}')")}
                shape |= set(run("select name, sql from sqlite_schema where type in ('index', 'trigger')"))
            else:
                shape = set(content(engine, place)[""])
                shape |= set(run("select indexname, indexdef from pg_indexes where schemaname = 'livinglayer'"))
        shapes.append({row for row in shape if not row[0].startswith(("item_", "part_"))})
    assert shapes[0] == shapes[1]


def test_the_systems_rows_are_those_of_a_fresh_layer(old: str, fresh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(place: str) -> list[Any]:
        layer = livinglayer.open(place)
        found = [layer.query(f"select * from {name} where id < {FIRST_ID} order by id") for name in ("entity", "field")]
        layer.close()
        return found

    there = rows(old)
    monkeypatch.delenv("LAYER_TOKEN")
    assert there == rows(fresh)


PROCESS = """
import sys, livinglayer
print("ready", flush=True)
sys.stdin.readline()
layer = livinglayer.open(sys.argv[1])
layer.insert("item", {"name": sys.argv[2]})
layer.close()
"""


def test_processes_that_open_it_at_once_migrate_it_once(engine: str, old: str) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, old, f"p{n}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for n in range(3)
    ]
    for process in running:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        process.communicate(timeout=120)
        assert process.returncode == 0
    layer = livinglayer.open(old)
    assert layer.query("select count(*) as n from tx where reason like '%moves to format%'") == [{"n": 1}]
    assert layer.query("select count(*) as n from item where name like 'p_'") == [{"n": 3}]
    report = layer.verify()
    assert report, report.problems
    layer.close()


KILLED = """
import os, signal, sys, livinglayer
from livinglayer.layer import engine_for
from livinglayer.settings import Settings
kind = type(engine_for(sys.argv[1], Settings()))
kind.commit = lambda self, session: os.kill(os.getpid(), signal.SIGKILL)
livinglayer.open(sys.argv[1])
"""


def test_a_crash_in_the_middle_leaves_it_as_it_was(engine: str, old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(engine, old)
    assert subprocess.run([sys.executable, "-c", KILLED, old], timeout=60).returncode == -9
    assert content(engine, old) == before
    with monkeypatch.context() as patch:
        patch.setattr(Tx, "finish", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no room")))
        with pytest.raises(RuntimeError, match="no room"):
            livinglayer.open(old)
    assert content(engine, old) == before
    layer = livinglayer.open(old)
    assert layer.verify()
    layer.close()


def test_who_has_no_token_migrates_nothing(engine: str, old: str) -> None:
    before = content(engine, old)
    with pytest.raises(Unauthenticated):
        livinglayer.open(old, token="ll_nobody")
    assert content(engine, old) == before


def test_a_name_the_format_needs_must_be_free(engine: str, old: str) -> None:
    with raw(engine, old) as run:  # as the old release would have made it, on a branch
        [(branch,)] = run("select id from branch_3 where name_120 = 'idea'")
        names = "id, tx_from, tx_to, del, name_40, store_41, kind_42, system_43"
        no = "false" if engine == "postgres" else "0"
        run(
            f"insert into entity_1__d(branch, {names}) values ({branch}, 9000, 5, 9223372036854775807, 0, 'approval', 'approval_9000', 'entity', {no})"
        )
    before = content(engine, old)
    with pytest.raises(Incompatible, match="needs the name 'approval', which is an entity on branch 'idea'"):
        livinglayer.open(old)
    assert content(engine, old) == before


def test_a_format_of_the_future_is_left_alone(engine: str, old: str) -> None:
    with raw(engine, old) as run:
        run(f"update meta set value = '{FORMAT + 1}' where key = 'format'")
    before = content(engine, old)
    with pytest.raises(Incompatible, match=f"format {FORMAT + 1}, this release knows up to {FORMAT}"):
        livinglayer.open(old)
    assert content(engine, old) == before


def test_verify_knows_a_format_that_was_not_moved_to(engine: str, past: int, old: str) -> None:
    layer = livinglayer.open(old)
    with raw(engine, old) as run:
        run(f"update meta set value = '{past}' where key = 'format'")
        assert [text for _, text in layer.verify().problems] == ["meta is not what was written"]
        run(f"update meta set value = '{FORMAT}' where key = 'format'")
    assert layer.verify()
    # Words of a reason are anybody's to write; they are not believed.
    layer.define("other", {"n": "int"})
    layer.insert("other", {"n": 1}, reason=f"layer {layer.id} moves to format {FORMAT + 1}")
    assert layer.verify()
    layer.close()


@pytest.mark.parametrize("onto", ["sqlite", "postgres"])
def test_a_backup_of_an_earlier_format_is_restored_and_stays_as_it_is(
    onto: str, past: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_cluster: Any
) -> None:
    """A backup is an embedded layer, whichever engine it was made from."""
    monkeypatch.setenv("LAYER_TOKEN", (HERE / f"format{past}" / "sqlite.token").read_text().strip())
    source = tmp_path / "backup"
    with tarfile.open(HERE / f"format{past}" / "layer.tar.xz") as tar:
        tar.extractall(source, filter="data")
    before = content("sqlite", str(source))
    if onto == "postgres":
        with postgres_cluster().database() as url:
            _restored(source, url)
    else:
        _restored(source, str(tmp_path / "restored"))
    assert content("sqlite", str(source)) == before


def _restored(source: Path, place: str) -> None:
    layer = livinglayer.restore(source, place)
    report = layer.verify()
    assert report, report.problems
    assert [row["name"] for row in layer.query("select name from item order by id")] == ["bölt", "nut"]
    picture = layer.query("select picture from item where name = 'bölt'")[0]["picture"]
    assert layer.engine.get_blob(picture) == b"png"
    layer.insert("trigger", {"name": "t", "function": "count"})
    layer.close()


def facts(layer: Layer) -> None:
    """A row of each new table, as a call leaves them."""
    with layer.ledger.work() as work:
        execution = layer.ledger.open(1501, kind="program")
        tx = work.tx(execution, reason="a call")
        at = "2026-03-01T12:00:00.000000Z"
        tx.fact("ledger_call", 9001, "function.call", layer_function(layer), 3, '{"n":1}', 1500, 7, None, None, 6, 1, at, "k", "s", None, "[1502]", "r")  # fmt: skip
        tx.fact("ledger_usage", 9001, 1501, None, layer_function(layer), 0.25, 1, 2.0, 10, 20, 30, at)
        tx.fact("ledger_decision", 9002, 1501, "write", "item", False, "[1502]", "no", 9001, at)
        tx.fact("ledger_lineage", 9003, "b2", "b1", "s1", 1500, 9001, at)
        tx.fact("ledger_execution", 9001, 1501, None, "b2", "call", "{}", None, None, at)
        tx.finish()
    layer.ledger.end(execution)


def layer_function(layer: Layer) -> int:
    with layer.engine.reading() as session:
        return int(session.all(f"select id from {layer.engine.schema_prefix}function_9")[0][0])


def test_the_new_facts_are_hashed_read_by_name_and_carried_by_backups(
    layer: Layer, engine: str, tmp_path: Path, make_location: Callable[[], str]
) -> None:
    layer.insert("function", {"name": "count", "language": "python"})
    facts(layer)
    report = layer.verify()
    assert report, report.problems
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    call = {
        "verb": "function.call", "function": "count", "version": 3, "arguments": {"n": 1}, "branch": "main", "state": 7, "contract": None,
        "trigger": None, "cause_tx": 6, "attempt": 1, "due": noon, "key": "k", "seed": "s", "snapshot": None, "permissions": [1502], "runner": "r",
    }  # fmt: skip
    names = {
        "execution": [{"id": 9001, "status": "queued", **call}],
        "usage": [{"execution": 9001, "principal": "owner", "contract": None, "function": "count", "wall": 0.25, "cpu": 1.0, "memory": 2.0,
                   "sent": 10, "received": 20, "disk": 30, "at": noon}],
        "decision": [{"id": 9002, "principal": "owner", "action": "write", "resource": "item", "allowed": False, "permissions": [1502],
                      "reason": "no", "execution": 9001, "at": noon}],
        "lineage": [{"id": 9003, "box": "b2", "parent": "b1", "snapshot": "s1", "branch": "main", "execution": 9001, "created": noon}],
    }  # fmt: skip

    def check(there: Layer) -> None:
        for name, rows in names.items():
            where = " where id = 9001" if name == "execution" else ""
            assert there.query(f"select {', '.join(rows[0])} from {name}{where}") == rows

    check(layer)
    assert layer.engine.lease("execution/9001", "me", 60)
    assert layer.query("select status from execution where id = 9001") == [{"status": "running"}]
    layer.delete("function", layer.query("select id from function")[0]["id"])  # its last name goes on being said
    layer.backup(tmp_path / "copy")
    place = make_location()
    restored = livinglayer.restore(tmp_path / "copy", place)
    check(restored)
    assert restored.engine.leases() == []
    report = restored.verify()
    assert report, report.problems
    for table, column in (("call", "seed"), ("usage", "cpu"), ("decision", "allowed"), ("lineage", "parent")):
        with raw(engine, place) as run:
            [(kept,)] = run(f"select {column} from ledger_{table}")
            run(f"update ledger_{table} set {column} = null")
            assert not restored.verify()
            text = repr(kept) if isinstance(kept, str) else str(kept).lower()
            run(f"update ledger_{table} set {column} = {text}")
        assert restored.verify()
    restored.close()


def test_facts_can_not_be_written_from_outside(layer: Layer) -> None:
    for name in ("usage", "decision", "lineage"):
        with pytest.raises(LayerError):
            layer.insert(name, {})
