"""Trust: what was written is proved, copied, taken along and, when it is old enough, forgotten, without a doubt about the rest."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, LayerError, NotFound, Unauthenticated

EVERY = {
    "t": "text", "i": "int", "f": "float", "d": "decimal", "b": "bool", "day": "date", "moment": "datetime", "j": "json",
    "e": {"type": "enum", "values": ["a", "b"]}, "r": "ref principal", "s": {"type": "state", "transitions": {"new": ["old"], "old": []}}, "c": "file",
}  # fmt: skip
CONTENT = b"\0 a file \xff"
FULL: dict[str, Any] = {
    "t": 'a "quoted", text;\r\nof two lines', "i": -(2**63), "f": 0.1, "d": Decimal("1.50"), "b": False, "day": date(2026, 1, 31),
    "moment": datetime(2026, 1, 31, 23, 59, 59, 999999, tzinfo=UTC), "j": {"a": [1, 2.5, None, "ü"]}, "e": "b", "r": 1501, "s": "new", "c": sha256(CONTENT).hexdigest(),
}  # fmt: skip
TEXTS = ["", '""', '"', " ", "null", "true", "1", "a,b", "\n", "=1+1", "😀"]
JSONS: list[Any] = [{}, [], "", "x", "1", "true", True, False, 0, 1.0, [None], {"a": ""}, 2**70]


def last(layer: Layer) -> int:
    return int(layer.query("select max(tx) as n from tx")[0]["n"])


# Verify


def test_verify_reads_everything_up_to_the_last_tx(shared: Layer) -> None:
    shared.define("proved", {"n": "int"})
    row = shared.insert("proved", {"n": 1})
    shared.update("proved", row, {"n": 2})
    shared.fork("proving")
    shared.delete("proved", row, branch="proving")
    report = shared.verify()
    assert (bool(report), report.tx, report.problems) == (True, last(shared), [])
    assert report.rows > 0
    hashes = [r["hash"] for r in shared.query("select hash from tx")]
    assert len(set(hashes)) == len(hashes) == report.tx
    assert {len(h) for h in hashes} == {64}


# Backup and restore


def world(layer: Layer) -> dict[str, Any]:
    """What a layer shows: rows, versions, branches, grants, the chain."""
    shown = {
        name: sorted(
            layer.query(f"select * from {name}"), key=lambda row: [str(row.get(k)) for k in ("tx", "id", "row_id")]
        )
        for name in ("kept", "kept__history", "tx", "change", "principal", "permission", "entity", "field", "execution")
    }
    return {
        **shown,
        "branch": layer.query("select * from kept order by id", branch="kept_branch"),
        "past": layer.query("select * from kept order by id", as_of=shown["kept__history"][0]["tx"]),
        "blob": layer.blob(sha256(CONTENT).hexdigest()),
        "theirs": layer.query("select t, d from kept order by t", principal="keeper"),
    }


@contextmanager
def place(kind: str, tmp_path: Path, postgres_cluster: Callable[..., Cluster]) -> Iterator[str]:
    if kind == "sqlite":
        yield str(tmp_path / "restored")
    else:
        with postgres_cluster().database() as url:
            yield url


@pytest.mark.parametrize("target", ["to sqlite", "to postgres"])
def test_a_backup_restores_to_either_engine_as_it_was(
    shared: Layer, target: str, tmp_path: Path, postgres_cluster: Callable[..., Cluster]
) -> None:
    if "kept" not in shared.schema().by_name:
        shared.define("kept", {**EVERY, "u": {"type": "text", "unique": True}})
        row = shared.insert("kept", {**FULL, "c": CONTENT, "u": "one"}, reason="first", key="k")
        shared.insert("kept", {})
        shared.update("kept", row, {"i": 5})
        shared.fork("kept_branch")
        shared.update("kept", row, {"c": None, "t": "branch"}, branch="kept_branch")
        shared.grant("keeper", "read", "kept", fields=["t", "d"], where="i = 5")
    expected = world(shared)
    shared.backup(tmp_path / "copy")
    with livinglayer.open(tmp_path / "copy") as copy:
        assert (world(copy), bool(copy.verify())) == (expected, True)
    with place(target.removeprefix("to "), tmp_path, postgres_cluster) as there:
        with livinglayer.restore(tmp_path / "copy", there) as restored:
            assert world(restored) == expected
            report = restored.verify()
            assert (report.tx, report.problems) == (last(shared), [])
            assert restored.insert("kept", {**FULL, "c": CONTENT, "u": "one"}, key="k") == expected["kept"][0]["id"]
            with pytest.raises(Conflict, match="is there already"):
                restored.insert("kept", {"u": "one"})
            assert restored.insert("kept", {"u": "two"}) > expected["kept"][-1]["id"]
            assert restored.merge("kept_branch")
            assert restored.verify()
        with pytest.raises(Conflict, match="already") as caught:
            livinglayer.restore(tmp_path / "copy", there)
        assert caught.value.hint
    assert world(shared) == expected


def test_a_backup_overwrites_nothing_and_what_is_none_is_not_found(shared: Layer, tmp_path: Path) -> None:
    shared.backup(tmp_path / "once")
    with pytest.raises(Conflict, match="already"):
        shared.backup(tmp_path / "once")
    with pytest.raises(NotFound):
        livinglayer.restore(tmp_path / "nothing", tmp_path / "there")
    assert not (tmp_path / "there" / ".layer").exists()


# Prune


def test_what_is_pruned_is_gone_refused_by_name_and_the_rest_still_verifies(layer: Layer, tmp_path: Path) -> None:
    layer.define("pruned", {"n": "int"})
    row = layer.insert("pruned", {"n": 0})
    gone = layer.insert("pruned", {"n": 100})
    early = last(layer)
    layer.delete("pruned", gone)
    for n in (1, 2, 3):
        layer.update("pruned", row, {"n": n})
    horizon = last(layer)
    layer.update("pruned", row, {"n": 4})
    assert layer.prune(horizon) == 4
    for as_of in (early, horizon - 1):
        with pytest.raises(Invalid, match=f"before tx {horizon} was pruned") as caught:
            layer.query("select n from pruned", as_of=as_of)
        assert caught.value.hint == f"the earliest moment to ask for is tx {horizon}"
    with pytest.raises(Invalid, match="was pruned"):
        layer.fork("too_early", as_of=early)
    assert layer.query("select n from pruned", as_of=horizon) == [{"n": 3}]
    assert [r["n"] for r in layer.query("select n from pruned__history where id = :id order by tx", {"id": row})] == [
        3,
        4,
    ]
    assert layer.query("select count(*) as n from tx where tx <= :tx", {"tx": horizon}) == [{"n": horizon}]
    assert not layer.can("owner_of_nothing", "read", "pruned", as_of=early)
    report = layer.verify()
    assert (report.tx, report.problems) == (last(layer), [])
    layer.backup(tmp_path / "pruned")
    with livinglayer.open(tmp_path / "pruned") as copy:
        assert copy.verify()
    assert layer.prune(horizon) == 0


def test_what_an_open_branch_was_forked_from_is_not_pruned(layer: Layer) -> None:
    layer.define("pruned", {"n": "int"})
    row = layer.insert("pruned", {"n": 1})
    layer.update("pruned", row, {"n": 2})
    layer.fork("holding_on")
    layer.update("pruned", row, {"n": 3})
    layer.update("pruned", row, {"n": 4})
    layer.prune(last(layer))
    assert layer.query("select n from pruned", branch="holding_on") == [{"n": 2}]
    layer.update("pruned", row, {"n": 5}, branch="holding_on")
    assert [c["field"] for c in layer.merge("holding_on").conflicts] == ["n"]
    assert layer.verify()


# Files people have


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_exported_rows_come_back_as_they_were(shared: Layer, tmp_path: Path, format: str) -> None:
    entity, again = f"out_{format}", f"in_{format}"
    for name in (entity, again):
        shared.define(name, EVERY)
    shared.insert(entity, {**FULL, "c": CONTENT})
    shared.insert(entity, [{"t": text} for text in TEXTS])
    shared.insert(entity, [{"j": value} for value in JSONS])
    shared.insert(entity, [{}, {"i": 0, "f": 0.0, "d": "0.00", "b": True}])
    select = "select t, i, f, d, b, day, moment, j, e, r, s, c from {} order by id"
    expected = shared.query(select.format(entity))
    path = tmp_path / f"rows.{format}"
    assert shared.export(entity, path) == len(expected)
    before = last(shared)
    assert shared.import_(again, path, reason="back") == len(expected)
    found = shared.query(select.format(again))
    for a, b in zip(found, expected, strict=True):
        assert (a, [type(v) for v in a.values()]) == (b, [type(v) for v in b.values()])
    assert [str(r["d"]) for r in found] == [str(r["d"]) for r in expected]
    assert last(shared) == before + 1


def test_an_export_is_what_its_reader_may_see_of_a_branch_and_a_moment(shared: Layer, tmp_path: Path) -> None:
    shared.define("exported", {"name": "text", "secret": "text"})
    a = shared.insert("exported", {"name": "a", "secret": "x"})
    then = last(shared)
    shared.fork("exporting")
    shared.update("exported", a, {"name": "branch"}, branch="exporting")
    b = shared.insert("exported", {"name": "b", "secret": "y"})
    shared.grant("carrier", "read", "exported", where="name <> 'b'", fields=["name"])

    def written(**more: Any) -> list[dict[str, Any]]:
        shared.export("exported", tmp_path / "x.jsonl", **more)
        return [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]

    assert written() == [{"id": a, "name": "a", "secret": "x"}, {"id": b, "name": "b", "secret": "y"}]
    assert written(as_of=then) == [{"id": a, "name": "a", "secret": "x"}]
    assert written(branch="exporting") == [{"id": a, "name": "branch", "secret": "x"}]
    assert written(principal="carrier") == [{"id": a, "name": "a"}]


def test_a_file_that_does_not_fit_leaves_nothing_behind(shared: Layer, tmp_path: Path) -> None:
    shared.define("imported", {"n": "int!", "name": "text"})
    before = last(shared)
    for name, text in (
        ("a.jsonl", '{"n": 1}\n{"n": "x"}\n'), ("b.jsonl", '{"n": 1}\n{"n": 2\n'), ("c.jsonl", "[1]\n"), ("d.jsonl", '{"n": 1, "nothing": 2}\n'),
        ("e.csv", "n,name\n1,a\nx,b\n"), ("f.csv", "n,nothing\n1,a\n"), ("g.csv", "name\na\n"), ("h.txt", "n\n1\n"), ("i.csv", "n,name\n1,a,extra\n"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        with pytest.raises(Invalid):
            shared.import_("imported", tmp_path / name)
    (tmp_path / "latin.csv").write_bytes(b"n,name\n1,\xff\n")
    with pytest.raises(Invalid):
        shared.import_("imported", tmp_path / "latin.csv")
    with pytest.raises(NotFound):
        shared.import_("imported", tmp_path / "nothing.csv")
    with pytest.raises(LayerError):
        shared.export("imported", tmp_path / "no" / "such" / "place.csv")
    with pytest.raises(Invalid):
        shared.export("imported", tmp_path / "x.xlsx")
    assert (last(shared), shared.query("select * from imported")) == (before, [])


# Tokens


def test_the_owners_token_is_a_file_only_the_owner_reads(shared: Layer) -> None:
    path = Path(os.environ["XDG_CONFIG_HOME"], "livinglayer", "tokens", shared.id)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    token = path.read_text().strip()
    (owner,) = shared.query("select * from principal where name = 'owner'")
    assert token.startswith("ll_")
    assert owner["token"] == sha256(token.encode()).hexdigest()


def test_without_a_token_nobody_is_let_in(
    shared: Layer, shared_location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.principal("guest")
    guest = shared.token("guest")
    with pytest.raises(Unauthenticated, match="nobody's"):
        livinglayer.open(shared_location, token="ll_wrong")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(Unauthenticated, match="no token") as caught:
        livinglayer.open(shared_location)
    assert shared.id in (caught.value.hint or "")
    monkeypatch.setenv("LAYER_TOKEN", guest)
    with livinglayer.open(shared_location) as handle:
        assert handle.me == "guest"
        with pytest.raises(Denied):
            handle.backup(tmp_path / "stolen")
        with pytest.raises(NotFound):
            handle.blob(sha256(CONTENT).hexdigest())


def test_content_is_for_those_who_may_read_a_row_that_names_it(shared: Layer, shared_location: str) -> None:
    shared.define("scan", {"name": "text", "page": "file", "open": "bool"})
    shared.insert(
        "scan", [{"name": "a", "page": b"shown", "open": True}, {"name": "b", "page": b"hidden", "open": False}]
    )
    shared.grant("viewer", "read", "scan", where="open")
    shown, hidden = sha256(b"shown").hexdigest(), sha256(b"hidden").hexdigest()
    with livinglayer.open(shared_location, token=shared.token("viewer")) as handle:
        assert handle.blob(shown) == b"shown"
        for digest in (hidden, "0" * 64):
            with pytest.raises(NotFound, match="there is no content"):
                handle.blob(digest)
    assert shared.blob(hidden) == b"hidden"


def test_times_never_go_back(shared: Layer) -> None:
    times = [r["at"] for r in shared.query("select at from tx order by tx")]
    assert times == sorted(times)
    assert timedelta(0) <= datetime.now(UTC) - times[-1] < timedelta(hours=1)
