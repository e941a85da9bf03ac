"""A change made past the layer, in any table, is noticed by `verify`, which names the first tx that is not as written."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import apsw
import psycopg
import pytest
from reliability import content
from reliability.intruder import Intruder, Postgres, SQLite

import livinglayer

torture = pytest.mark.torture


@pytest.fixture
def intruder(engine: str, location: str, layer: Any) -> Iterator[Intruder]:
    hand = SQLite(location) if engine == "sqlite" else Postgres(location)
    yield hand
    hand.connection.close()


@pytest.mark.parametrize("share", [0.1, pytest.param(1.0, marks=torture)])
def test_every_column_of_every_table_is_covered(
    layer: Any, intruder: Intruder, share: float, record_property: Callable[[str, object], None]
) -> None:
    content.populate(layer, rows=10)
    seed = int(os.environ.get("LAYER_TEST_SEED", random.randrange(1 << 32)))
    rng = random.Random(seed)
    tried, refused, unnoticed = 0, 0, []
    for what, statement in intruder.acts(rng):
        if rng.random() > share:
            continue
        try:
            with intruder.changed(statement):
                if layer.verify():
                    unnoticed.append(f"{what}: {statement}")
                tried += 1
        except (apsw.ConstraintError, apsw.MismatchError, psycopg.errors.IntegrityError):
            refused += 1  # the engine itself did not allow it
        except livinglayer.errors.LayerError as error:
            unnoticed.append(f"{what}: {statement}: {error!r}")  # verify reports, it does not raise
    assert not unnoticed, f"LAYER_TEST_SEED={seed}\n" + "\n".join(unnoticed)
    report = layer.verify()
    assert report, report.problems  # the intruder cleaned up after itself: nothing else was damaged
    record_property("changes noticed", tried)


@pytest.fixture
def scene(layer: Any) -> dict[str, Any]:
    """A few rows with known transactions, on main and on a branch; the names of the tables they are in."""
    layer.define("note", {"text": "text", "n": "int"})
    first = layer.insert("note", {"text": "first", "n": 1})
    second = layer.insert("note", {"text": "second", "n": 2})
    changed = layer.update("note", first, {"text": "first, changed"}, reason="wording")
    layer.fork("idea")
    branched = layer.update("note", second, {"text": "second, on a branch"}, branch="idea")
    gone = layer.insert("note", {"text": "gone", "n": 4})
    removed = layer.delete("note", gone)
    last = layer.insert("note", {"text": "third", "n": 3}, key="third")
    [entity] = layer.query("select id, store from entity where name = 'note'")
    columns = {
        row["name"]: row["store"]
        for row in layer.query("select name, store from field where entity = :e", {"e": entity["id"]})
    }
    versions = layer.query("select id, tx, n from note__history order by tx")
    written = {row["n"]: row["tx"] for row in versions[::-1]}
    return {
        "table": entity["store"], "text": columns["text"], "n": columns["n"], "entity": entity["id"],
        "first": first, "second": second, "third": last, "gone": gone, "removed": removed, "live": 2**63 - 1,
        "tx1": written[1], "tx2": written[2], "changed": changed, "branched": branched, "tx3": written[3],
    }  # fmt: skip


TAMPERINGS = {
    # name: (the tx to be named, statements)
    "a live row": ("changed", ["update {table} set {text} = 'forged' where id = {first}"]),
    "a live row's version": ("tx1", ["update {table} set _tx = {tx1} where id = {first}"]),
    "a closed version": ("tx1", ["update {table}__h set {text} = 'forged' where id = {first}"]),
    "a closed version's end": ("changed", ["update {table}__h set tx_to = tx_to + 1 where id = {first}"]),
    "a closed version made live": ("changed", ["update {table}__h set tx_to = {live} where id = {first}"]),
    "a deleted row brought back": (
        "removed",
        [
            "insert into {table} (id, _tx, {text}, {n}) select id, tx_from, {text}, {n} from {table}__h where id = {gone}",
            "delete from {table}__h where id = {gone}",
        ],
    ),
    "an old version brought back": (
        "changed",
        [
            "delete from {table} where id = {first}",
            "insert into {table} (id, _tx, {text}, {n}) select id, tx_from, {text}, {n} from {table}__h where id = {first}",
            "delete from {table}__h where id = {first}",
        ],
    ),
    "a row on a branch": ("branched", ["update {table}__d set {text} = 'forged' where id = {second}"]),
    "a live row deleted": ("tx2", ["delete from {table} where id = {second}"]),
    "a closed version deleted": ("tx1", ["delete from {table}__h where id = {first}"]),
    "a branch's row deleted": ("branched", ["delete from {table}__d where id = {second}"]),
    "a row of nobody's": (None, ["insert into {table} (id, {text}, _tx) values (999999, 'forged', {tx3})"]),
    "who": ("tx2", ["update ledger_tx set principal = principal + 1 where tx = {tx2}"]),
    "when": ("tx2", ["update ledger_tx set at = (select at from ledger_tx where tx = {tx1}) where tx = {tx2}"]),
    "why": ("changed", ["update ledger_tx set reason = 'forged' where tx = {changed}"]),
    "a tx deleted": ("tx2", ["delete from ledger_tx where tx = {tx2}"]),
    "the last tx deleted": ("tx3", ["delete from ledger_tx where tx = {tx3}"]),
    "two txs swapped": (
        "tx1",
        [
            "update ledger_tx set tx = -1 where tx = {tx1}",
            "update ledger_tx set tx = {tx1} where tx = {tx2}",
            "update ledger_tx set tx = {tx2} where tx = -1",
        ],
    ),
    "two rows swapped": (
        "tx2",
        [
            "update {table} set {text} = 'third' where id = {second}",
            "update {table} set {text} = 'second' where id = {third}",
        ],
    ),
    "a change deleted": ("tx2", ["delete from ledger_change where tx = {tx2} and entity = {entity}"]),
    "a change of something else": ("tx2", ["update ledger_change set op = 'delete' where tx = {tx2} and entity = {entity}"]),
    "a change more": (
        "tx2",
        ["insert into ledger_change select branch, {tx2}, entity, id, op, image from ledger_change where tx = {tx3} and entity = {entity}"],
    ),
    "an execution's scope": (None, ["update ledger_execution set scope = 'null'"]),
    "an execution deleted": (None, ["delete from ledger_execution"]),
    "an idempotency key": ("tx3", ["update ledger_key set result = '1'"]),
    "an idempotency key deleted": ("tx3", ["delete from ledger_key"]),
}  # fmt: skip


def test_verify_names_the_first_bad_tx(layer: Any, intruder: Intruder, scene: dict[str, Any]) -> None:
    wrong = {}
    for what, (expected, statements) in TAMPERINGS.items():
        with intruder.changed(*(statement.format(**scene) for statement in statements)):
            report = layer.verify()
        if report or (expected and report.problems[0][0] != scene[expected]):
            wrong[what] = (scene.get(expected), report.problems)
        report = layer.verify()
        assert report, (what, report.problems)
    assert not wrong
