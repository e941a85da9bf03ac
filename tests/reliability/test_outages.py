"""What is out of the layer's hands: lost connections, locked files, newer formats. Each is a named error, and passes."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from cluster import Cluster
from reliability import content, together
from reliability.children import finish, start

import livinglayer
from livinglayer.errors import Conflict, Incompatible, Invalid, LimitExceeded, NotFound, Unavailable

postgres = pytest.mark.parametrize("engine", ["postgres"])
sqlite = pytest.mark.parametrize("engine", ["sqlite"])


@pytest.fixture
def stocked(layer: Any) -> Any:
    layer.define("note", {"text": "text"})
    layer.insert("note", {"text": "first"})
    layer.grant("ann", "read", "note")
    return layer


def insert_in_transaction(layer: Any) -> None:
    with layer.transaction() as tx:
        tx.query("select * from note")
        tx.insert("note", {"text": "second"})


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "query": lambda layer: layer.query("select * from note"),
    "query of somebody": lambda layer: layer.query("select * from note", principal="ann"),
    "insert": lambda layer: layer.insert("note", {"text": "second"}),
    "transaction": insert_in_transaction,
    "define": lambda layer: layer.define(f"e{time.monotonic_ns()}", {"text": "text"}),
    "fork": lambda layer: layer.fork(f"b{time.monotonic_ns()}"),
    "verify": lambda layer: layer.verify(),
}


def terminate(url: str) -> None:
    """Cut every connection to the database, as a failover or an administrator would."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        )


@postgres
def test_a_cut_connection_costs_at_most_one_error(stocked: Any, location: str) -> None:
    for what, act in OPERATIONS.items():
        act(stocked)
        for _ in range(2):
            terminate(location)
            count = stocked_rows(location)
            try:
                act(stocked)
            except Unavailable as error:
                assert error.hint, what
                act(stocked)
            if what in ("insert", "transaction"):
                # Cut before the write began: the error means that nothing was written.
                assert stocked_rows(location) == count + 1, what
    assert stocked.verify()


def stocked_rows(location: str) -> int:
    with closing(livinglayer.open(location)) as other:
        return int(other.query("select count(*) as n from note")[0]["n"])


@postgres
def test_a_connection_cut_inside_a_transaction_leaves_nothing_of_it(stocked: Any, location: str) -> None:
    with pytest.raises(Unavailable), stocked.transaction() as tx:
        tx.insert("note", {"text": "half"})
        terminate(location)
        tx.insert("note", {"text": "other half"})
    insert_in_transaction(stocked)
    assert [row["text"] for row in stocked.query("select text from note order by id")] == ["first", "second"]
    assert stocked.verify()


@postgres
def test_a_server_that_is_down_is_unavailable_and_its_return_is_enough(
    stocked: Any, location: str, postgres_cluster: Callable[..., Cluster]
) -> None:
    server = postgres_cluster()
    server.stop()
    try:
        for what, act in OPERATIONS.items():
            began = time.monotonic()
            with pytest.raises(Unavailable) as caught:
                act(stocked)
            assert caught.value.hint, what
            assert time.monotonic() - began < 15, what
        with pytest.raises(Unavailable):
            livinglayer.open(location)
    finally:
        server.start()
    for act in OPERATIONS.values():
        try:
            act(stocked)
        except Unavailable:
            act(stocked)
    assert [row["text"] for row in stocked.query("select text from note order by id")] == ["first", "second", "second"]
    assert stocked.verify()


@contextmanager
def locked(directory: str) -> Iterator[None]:
    """Another program holds the write lock."""
    connection = apsw.Connection(str(content.database(directory)))
    connection.execute("begin immediate")
    try:
        yield
    finally:
        connection.execute("rollback")
        connection.close()


@sqlite
def test_a_locked_database_is_unavailable_with_a_hint(location: str) -> None:
    with closing(livinglayer.open(location, create=True, busy_seconds=0.3)) as layer:
        layer.define("note", {"text": "text"})
        layer.insert("note", {"text": "first"})
        with locked(location):
            for what in ("insert", "transaction", "define", "fork"):
                began = time.monotonic()
                with pytest.raises(Unavailable) as caught:
                    OPERATIONS[what](layer)
                assert caught.value.hint, what
                assert time.monotonic() - began < 5, what
            assert [row["text"] for row in layer.query("select text from note")] == ["first"]
            assert layer.verify()
        insert_in_transaction(layer)
        assert [row["text"] for row in layer.query("select text from note order by id")] == ["first", "second"]
        assert layer.verify()


@sqlite
def test_a_lock_that_goes_away_in_time_is_only_waited_for(location: str) -> None:
    with closing(livinglayer.open(location, create=True)) as layer:
        layer.define("note", {"text": "text"})
        writer = start(together.insert, location, "note", 1, 5)
        with locked(location):
            time.sleep(0.5)
        finish(writer)
        assert layer.query("select count(*) as n from note") == [{"n": 5}]


def test_a_newer_format_is_incompatible_and_left_alone(layer: Any, location: str, engine: str) -> None:
    layer.define("note", {"text": "text"})
    layer.close()
    newer = "update meta set value = cast(cast(value as integer) + 1 as text) where key = 'format'"
    if engine == "sqlite":
        connection = apsw.Connection(str(content.database(location)))
        connection.execute(newer)
        assert connection.changes() == 1
        connection.close()
    else:
        with psycopg.connect(location, options="-c search_path=livinglayer") as server:
            assert server.execute(newer).rowcount == 1
    for create in (False, True):
        with pytest.raises(Incompatible) as caught:
            livinglayer.open(location, create=create)
        assert caught.value.hint


def test_what_one_writer_does_wrong_is_not_another_ones_error(layer: Any) -> None:
    """Writes share a commit; a refused one, whatever refuses it, is refused alone."""
    layer.define(
        "note", {"name": {"type": "text!", "indexed": True}, "n": {"type": "int", "unique": True}, "of": "ref note"}
    )
    rng = random.Random(1)
    mistakes: list[dict[str, Any]] = [
        {"name": "twice", "n": 0},
        {"name": "of nothing", "of": 10**9},
        {"name": None},
        {"name": "x" * (2 << 20)},
        {"name": rng.randbytes(5000).hex()},  # more than an index of PostgreSQL takes; SQLite's does
    ]
    layer.insert("note", {"name": "first", "n": 0})
    failed: list[str] = []
    kept: list[str] = []

    def right(writer: int) -> None:
        for n in range(20):
            try:
                layer.insert("note", {"name": f"{writer}/{n}", "n": writer * 100 + n})
                kept.append(f"{writer}/{n}")
            except Exception as error:
                failed.append(repr(error))

    def wrong() -> None:
        for n in range(20):
            try:
                layer.insert("note", mistakes[n % len(mistakes)])
                assert n % len(mistakes) == 4
            except (Invalid, Conflict, LimitExceeded):
                pass
            except Exception as error:
                failed.append(repr(error)[:200])

    threads = [threading.Thread(target=right, args=(n,)) for n in (1, 2, 3)] + [
        threading.Thread(target=wrong) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sorted(r["name"] for r in layer.query("select name from note where n > 0")) == sorted(kept)
    assert layer.verify()


def test_what_is_not_there_is_not_made(engine: str, tmp_path: Path, location: str) -> None:
    with pytest.raises(NotFound) as caught:
        livinglayer.open(location)
    assert caught.value.hint
    assert not (tmp_path / "layer1" / ".layer").exists()


def test_processes_that_open_one_layer_at_once_write_it_together(location: str) -> None:
    """All of them make it, define the same entity and write; it is made once, and every row is there once."""
    finish(*(start(together.create_and_insert, location, n, 3, 20) for n in range(3)))
    with closing(livinglayer.open(location)) as layer:
        rows = [row["text"] for row in layer.query("select text from note")]
        assert sorted(rows) == sorted(f"{p}/{t}/{n}" for p in range(3) for t in range(3) for n in range(20))
        assert len({row["id"] for row in layer.query("select id from note")}) == len(rows)
        report = layer.verify()
        assert report, report.problems
