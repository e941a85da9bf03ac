"""A bundle goes from files to rows and back to the same files, on either engine; what rows say now is what is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from bundle.desks import DESK, desk, last_tx, swapped
from cluster import Cluster

import livinglayer
from livinglayer import Layer
from livinglayer.bundle.apply import apply
from livinglayer.bundle.export import export, files_of
from livinglayer.bundle.load import load, of_files
from livinglayer.bundle.plan import plan
from livinglayer.errors import Conflict, Invalid, NotFound

EXAMPLES = sorted(
    path.name for path in (Path(__file__).parents[2] / "bundles").iterdir() if (path / "bundle.yaml").exists()
)


@pytest.fixture
def both(tmp_path: Path, postgres_cluster: Callable[..., Cluster]) -> Iterator[Callable[[str], Layer]]:
    """`both("postgres")` is a fresh layer on that engine."""
    with contextlib.ExitStack() as opened:

        def make(engine: str) -> Layer:
            place = (
                str(tmp_path / f"layer{len(made)}")
                if engine == "sqlite"
                else opened.enter_context(postgres_cluster().database())
            )
            made.append(livinglayer.open(place, create=True))
            opened.callback(made[-1].close)
            return made[-1]

        made: list[Layer] = []
        yield make


def by_hand(layer: Layer) -> None:
    """Changes that no file says."""
    layer.alter(
        "ticket",
        add={"color": {"type": "enum", "values": ["red", "blue"], "default": "red"}},
        change={"note": {"indexed": True}},
    )
    layer.call(
        "contract.define",
        name="triage",
        blueprint="small",
        reads={"ticket": {"fields": ["title"]}},
        egress=[{"box": "db", "port": 5432, "protocol": "tcp"}],
        stops=[{"denials": 3}],
    )
    layer.principal("bot", attributes={"size": 1.5, "of": ["a", None]})


DIRECTIONS = [(one, other) for one in ("sqlite", "postgres") for other in ("sqlite", "postgres")]


@pytest.mark.parametrize(("one", "other"), DIRECTIONS)
@pytest.mark.parametrize("changed", [False, True])
def test_there_and_back_again(both: Callable[[str], Layer], one: str, other: str, changed: bool) -> None:
    first, second = both(one), both(other)
    apply(first, desk(), yes=True)
    if changed:
        by_hand(first)
    out = files_of(first, "desk")
    assert changed or out == dict(desk().files)
    apply(second, of_files(out), yes=True)
    assert files_of(second, "desk") == out
    assert plan(second, of_files(out)).empty
    assert {c.kind for c in plan(first, of_files(out)).changes} == ({"bundle"} if changed else set())
    apply(first, of_files(out), yes=True)
    assert files_of(first, "desk") == out and plan(first, of_files(out)).empty


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_come_back_as_they_were(layer: Layer, name: str, tmp_path: Path) -> None:
    place = Path(__file__).parents[2] / "bundles" / name
    beside = {each: load(place.parent / each) for each in load(place).requires}
    apply(layer, load(place), yes=True, beside=beside)
    assert plan(layer, load(place), beside=beside).empty
    export(layer, name, tmp_path / "out")
    assert load(tmp_path / "out").files == load(place).files
    assert layer.verify()


def test_only_what_changed_is_written_anew(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    layer.call("function.define", {**_rank(layer), "code": "def rank(id):\n    return 3\n"})
    out = files_of(layer, "desk")
    assert {path for path in out if out[path] != desk().files.get(path)} == {"functions/rank.py"}
    assert out["functions/rank.py"] == b"def rank(id):\n    return 3\n" and out.keys() == desk().files.keys()
    layer.call("function.define", {**_rank(layer), "code": "def rank(id):\n    return 3\n", "timeout": 5.0})
    out = files_of(layer, "desk")
    assert out.keys() - desk().files.keys() == {"functions/ticket.rank.py"}
    assert "functions/rank.py" not in out
    assert b"timeout: 5\n" in out["functions.yaml"] and out["schema.yaml"] == DESK["schema.yaml"].encode()


def _rank(layer: Layer) -> Mapping[str, object]:
    return {
        "name": "ticket.rank", "signature": {"arguments": {"id": "int!"}, "result": "int"}, "reads": ["ticket"],
        "writes": {"ticket": {"actions": ["update"], "fields": ["priority"]}}, "blueprint": "small",
    }  # fmt: skip


def test_what_was_taken_away_is_not_written(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    layer.call("trigger.remove", name="rank-new")
    layer.revoke(layer.query("select id from permission where effect = 'deny'")[0]["id"])
    out = of_files(files_of(layer, "desk"))
    assert out.triggers == {} and len(out.grants) == 4
    assert plan(layer, out).lines()[0].startswith("  ~ bundle desk")


def test_the_past_and_a_branch_are_written_as_they_are_there(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    then = last_tx(layer)
    layer.fork("idea")
    layer.alter("ticket", add={"color": "text"}, branch="idea")
    layer.call("trigger.remove", name="rank-new")
    assert files_of(layer, "desk", as_of=then) == dict(desk().files)
    assert b"color: text" in files_of(layer, "desk", "idea")["schema.yaml"] and "triggers.yaml" in files_of(
        layer, "desk", "idea"
    )
    assert "triggers.yaml" not in files_of(layer, "desk")


def test_a_directory_is_brought_up_to_date_and_nothing_else_is_overwritten(layer: Layer, tmp_path: Path) -> None:
    apply(layer, desk(), yes=True)
    out = tmp_path / "out"
    export(layer, "desk", out)
    (out / ".git").mkdir()
    layer.call("trigger.remove", name="rank-new")
    export(layer, "desk", out)
    assert not (out / "triggers.yaml").exists() and (out / ".git").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("mine")
    with pytest.raises(Conflict, match="is not empty"):
        export(layer, "desk", other)
    assert [path.name for path in other.iterdir()] == ["README.md"]
    linked = tmp_path / "linked"
    export(layer, "desk", linked)
    (linked / "schema.yaml").unlink()
    (linked / "schema.yaml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Invalid, match="symbolic link"):
        export(layer, "desk", linked)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_is_no_directory(layer: Layer, tmp_path: Path) -> None:
    apply(layer, desk(), yes=True)
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(Invalid, match="can't be written"):
            export(layer, "desk", place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_signature_stays_as_long_as_it_is_true(layer: Layer, tmp_path: Path) -> None:
    from livinglayer.bundle import sign

    place = tmp_path / "desk"
    for path, text in DESK.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    sign.keygen(tmp_path / "key")
    sign.sign(place, tmp_path / "key")
    apply(layer, load(place), yes=True)
    assert files_of(layer, "desk") == dict(load(place).files)
    layer.call("trigger.remove", name="rank-new")
    assert "signature.yaml" not in files_of(layer, "desk")


def test_who_may_not_read_it_all_does_not_export(layer: Layer) -> None:
    apply(layer, desk(swapped("policy.yaml", "roles: [agent]", "roles: [lead]")), yes=True)
    with pytest.raises(NotFound):
        files_of(layer, "desk", principal="ann")
    with pytest.raises(NotFound, match="there is no bundle 'other'"):
        files_of(layer, "other")


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_what_is_of_another_layer_and_what_reaches_another_box_come_back(layer: Layer) -> None:
    given = {
        "bundle.yaml": b"name: two\nversion: 1.0.0\n",
        "projections.yaml": b"projections:\n  theirs: {remote: {url: 'https://other.test', projection: shown}}\n",
        "blueprints.yaml": b"blueprints:\n  asker: {egress: [{box: db, port: 5432, protocol: tcp}]}\n",
        "policy.yaml": b"roles: {crew: {}}\ngrants:\n  - {to: crew, action: connect, resource: 'box:db'}\n",
    }
    wanted = plan(layer, of_files(given))
    assert "it makes this layer ask https://other.test" in str(wanted.changes)
    apply(layer, of_files(given), yes=True)
    [row] = layer.query("select statement, remote from projection where name = 'theirs'")
    assert row["remote"] == {"url": "https://other.test", "projection": "shown"} and row["statement"].startswith("--")
    assert plan(layer, of_files(given)).empty and plan(layer, of_files(files_of(layer, "two"))).empty
