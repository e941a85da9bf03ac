"""The `layer` command, on both engines: what it prints, what it changes, how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from edges.results import Result, Run

import livinglayer
from livinglayer import Layer
from livinglayer.edges.cli.commands import COMMANDS
from livinglayer.edges.cli.main import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("query", "select 1")` runs one command in this process."""

    def command(*argv: object) -> Result:
        capsys.readouterr()
        try:
            code = main([str(word) for word in argv])
        except SystemExit as exit:  # argparse leaves this way
            code = int(exit.code or 0)
        return Result(code, *capsys.readouterr())

    return command


@pytest.fixture
def home(engine: str, location: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that holds a layer (or stands for one in PostgreSQL), as the current directory."""
    home = Path(location) if engine == "sqlite" else tmp_path / "home"
    made = run("init", home, *(["--db", location] if engine == "postgres" else []))
    assert (made.code, made.err) == (0, "")
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def shop(home: Path, location: str) -> Iterator[Layer]:
    """The layer in `home` with some stock; open while commands run beside it."""
    layer = livinglayer.open(location)
    layer.define("item", {"name": "text!", "qty": "int", "price": "decimal", "owner": "ref principal"})
    layer.insert(
        "item",
        [{"name": "bolt", "qty": 3, "price": Decimal("0.10")}, {"name": "nut", "qty": 5, "price": Decimal("0.05")}],
        reason="stock",
    )
    yield layer
    layer.close()


def ids(layer: Layer) -> dict[str, int]:
    return {row["name"]: row["id"] for row in layer.query("select id, name from item")}


# -- finding and making a layer -----------------------------------------------------------------------------------------


def test_init_makes_a_layer_that_is_found_from_below(home: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    below = home / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert run("query", "select name from branch", "--json").json == [{"name": "main"}]


def test_init_again_changes_nothing(home: Path, shop: Layer, run: Run) -> None:
    again = run("init")
    assert again.code == 0 and "already" in again.out
    assert len(run("query", "select * from item", "--json").json) == 2


def test_init_with_a_database_remembers_it_for_its_owner_only(tmp_path: Path, run: Run, postgres_cluster: Any) -> None:
    with postgres_cluster().database() as url:
        assert run("init", tmp_path / "far", "--db", url).code == 0
        config = tmp_path / "far" / ".layer" / "config.json"
        assert json.loads(config.read_text()) == {"db": url}
        assert config.stat().st_mode & 0o777 == 0o600
        assert sorted(path.name for path in config.parent.iterdir()) == ["config.json"]
        refused = run("init", tmp_path / "far", "--db", url + "2")
        assert refused.code == 5 and "already stands for" in refused.err


def test_init_refuses_a_second_database_for_a_directory(tmp_path: Path, run: Run) -> None:
    assert run("init", tmp_path / "near").code == 0
    refused = run("init", tmp_path / "near", "--db", "postgresql://127.0.0.1:1/none")
    assert refused.code == 5 and "already holds an embedded layer" in refused.err


def test_init_with_an_unreachable_database_leaves_nothing(tmp_path: Path, run: Run) -> None:
    refused = run("init", tmp_path / "far", "--db", "postgresql://ann:sesame@127.0.0.1:1/none")
    assert refused.code == 8 and "sesame" not in refused.err and "Traceback" not in refused.err
    assert not (tmp_path / "far").exists()


def test_init_refuses_what_is_no_place_for_a_layer(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in run("init", tmp_path / "file").err
    assert run("init", tmp_path / "x", "--db", "mysql://x").code == 2


def test_dir_and_environment_name_a_layer(
    home: Path, location: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("branches").code == 4
    for place in (str(home), location):
        assert run("--dir", place, "branches").code == run("branches", "--dir", place).code == 0
        monkeypatch.setenv("LAYER_DIR", place)
        assert run("branches").code == 0
        monkeypatch.delenv("LAYER_DIR")


def test_no_layer_is_one_sentence_and_a_hint(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    missing = run("log")
    assert (missing.code, missing.out) == (4, "")
    assert missing.err == (
        f"layer: there is no layer in {str(tmp_path)!r} or above it\n"
        "hint: layer init, or name one with --dir or LAYER_DIR\n"
    )
    assert run("log", "--dir", tmp_path).code == 4
    assert run("log", "--dir", "https://example.org").code == 2


def test_a_damaged_config_is_said(tmp_path: Path, run: Run) -> None:
    (tmp_path / ".layer").mkdir()
    for content in ("{", "[]", '{"db": 3}', '{"db": "mysql://x"}'):
        (tmp_path / ".layer" / "config.json").write_text(content)
        damaged = run("log", "--dir", tmp_path)
        assert damaged.code == 7 and "config.json" in damaged.err


# -- reading ------------------------------------------------------------------------------------------------------------


def test_query_prints_a_table(shop: Layer, run: Run) -> None:
    shown = run("query", "select name, qty, price from item order by name")
    assert shown == Result(0, "name  qty  price\n────  ───  ─────\nbolt    3   0.10\nnut     5   0.05\n2 rows\n", "")


def test_query_in_json_with_parameters(shop: Layer, run: Run) -> None:
    found = run(
        "query",
        "select name, qty, price from item where qty > :n and name <> :name",
        "-p",
        "n=2",
        "-p",
        "name=nut",
        "--json",
    )
    assert found.json == [{"name": "bolt", "qty": 3, "price": "0.10"}]
    assert run("query", "select name from item where qty > :n", "-p", "n").code == 2


def test_query_reads_its_sql_from_standard_input(shop: Layer, location: str) -> None:
    done = layer_process("--dir", location, "query", "-", "--json", input="select count(*) as n from item")
    assert (done.stderr, json.loads(done.stdout or "null")) == ("", [{"n": 2}])


def test_query_as_of_a_tx_and_on_a_branch(shop: Layer, run: Run) -> None:
    bolt = ids(shop)["bolt"]
    tx = shop.update("item", bolt, {"qty": 9})
    shop.fork("idea")
    shop.update("item", bolt, {"qty": 100}, branch="idea")
    sql = f"select qty from item where id = {bolt}"
    assert run("query", sql, "--json").json == [{"qty": 9}]
    assert run("query", sql, "--json", "--as-of", tx - 1).json == [{"qty": 3}]
    assert run("query", sql, "--json", "--branch", "idea").json == [{"qty": 100}]
    assert run("--branch", "idea", "--json", "query", sql).json == [{"qty": 100}]
    assert run("query", sql, "--as-of", "yesterday").code == 2


def test_query_as_a_principal_sees_what_it_may(shop: Layer, run: Run) -> None:
    ann = shop.principal("ann")
    shop.update("item", ids(shop)["nut"], {"owner": ann})
    shop.grant("ann", "read", "item", where="owner = :me", fields=["name"])
    assert [row["name"] for row in run("query", "select * from item", "--as", "ann", "--json").json] == ["nut"]
    assert run("query", "select qty from item", "--as", "ann").code in (2, 4)
    assert run("query", "select * from item", "--as", "nobody").code in (3, 4)


def test_query_refuses_to_write_and_too_much(shop: Layer, run: Run) -> None:
    for sql in ("delete from item", "select 1; select 2", "selec", "select * from nothing"):
        refused = run("query", sql)
        assert refused.code in (2, 3, 4), sql
        assert refused.err.startswith("layer: ") and "Traceback" not in refused.err
    assert run("query", "select * from item", "--limit", "1").code == 6
    slow = "with recursive r(n) as (select 1 union all select n + 1 from r) select count(*) from r"
    assert run("query", slow, "--timeout", "0.3").code == 9


def test_an_error_in_json_is_json(shop: Layer, run: Run) -> None:
    refused = run("query", "select * from nothing", "--json")
    assert refused.out == ""
    assert set(json.loads(refused.err)) == {"error", "message", "hint"}


def test_log_shows_who_when_and_why(shop: Layer, run: Run) -> None:
    shown = run("log")
    head, _, first, *rest = shown.out.splitlines()
    assert head.split() == ["tx", "at", "branch", "principal", "reason"]
    assert first.endswith("stock") and "main" in first
    assert rest[-1].endswith("transactions")
    assert len(run("log", "-n", "1", "--json").json) == 1
    shop.fork("idea")
    shop.insert("item", {"name": "x"}, branch="idea")
    assert {row["branch"] for row in run("log", "--branch", "idea", "--json").json} == {"idea"}


def test_schema_shows_entities_and_fields(shop: Layer, run: Run) -> None:
    shown = run("schema", "item")
    assert shown.code == 0
    assert [line.split()[:2] for line in shown.out.splitlines()[2:6]] == [
        ["item", "name"],
        ["item", "qty"],
        ["item", "price"],
        ["item", "owner"],
    ]
    assert [(row["field"], row["type"]) for row in run("schema", "item", "--json").json] == [
        ("name", "text"),
        ("qty", "int"),
        ("price", "decimal"),
        ("owner", "ref"),
    ]
    assert run("schema", "nothing").code == 4
    assert "item" in run("schema").out


# -- branches -----------------------------------------------------------------------------------------------------------


def test_fork_diff_merge(shop: Layer, run: Run) -> None:
    bolt = ids(shop)["bolt"]
    assert run("fork", "idea").code == 0
    assert [row["name"] for row in run("branches", "--json").json] == ["main", "idea"]
    shop.update("item", bolt, {"qty": 4}, branch="idea")
    shown = run("diff", "idea").out.splitlines()
    assert shown[2].split() == ["item", str(bolt), "update", "qty", "3", "4"]
    assert run("diff", "idea", "--json").json == [
        {"entity": "item", "id": bolt, "op": "update", "fields": {"qty": {"before": 3, "after": 4}}}
    ]
    preview = run("merge", "idea", "--preview")
    assert preview.code == 0 and "preview" in preview.out
    assert shop.query("select qty from item where id = :id", {"id": bolt}) == [{"qty": 3}]
    merged = run("merge", "idea", "--reason", "good idea")
    assert merged.code == 0 and merged.out.startswith("Merged idea in tx ")
    assert shop.query("select qty from item where id = :id", {"id": bolt}) == [{"qty": 4}]
    assert "good idea" in [row["reason"] for row in run("log", "--json").json]


def test_merge_with_conflicts_lists_them_and_exits_5(shop: Layer, run: Run) -> None:
    bolt = ids(shop)["bolt"]
    shop.fork("idea")
    shop.update("item", bolt, {"qty": 30}, branch="idea")
    shop.update("item", bolt, {"qty": 40})
    refused = run("merge", "idea")
    assert refused.code == 5
    assert refused.out.splitlines()[0].split() == [
        "id",
        "branch",
        "target",
        "entity",
        "row",
        "field",
        "base",
        "ours",
        "theirs",
    ]
    assert refused.out.splitlines()[2].split()[1:] == ["idea", "main", "item", str(bolt), "qty", "3", "30", "40"]
    assert "nothing was merged" in refused.err and "hint: " in refused.err
    assert run("merge", "idea", "--json").code == 5
    [conflict] = run("conflicts", "--json").json
    assert run("resolve", conflict["id"]).code == 2
    assert run("resolve", conflict["id"], "35").code == 0
    assert run("merge", "idea").code == 0
    assert shop.query("select qty from item where id = :id", {"id": bolt}) == [{"qty": 35}]
    assert run("conflicts").out == "0 conflicts\n"


def test_resolve_by_taking_a_side(shop: Layer, run: Run) -> None:
    bolt = ids(shop)["bolt"]
    shop.fork("idea")
    shop.update("item", bolt, {"name": "screw"}, branch="idea")
    shop.update("item", bolt, {"name": "rivet"})
    assert run("merge", "idea").code == 5
    [conflict] = run("conflicts", "idea", "--json").json
    assert run("resolve", conflict["id"], "--take", "ours").code == 0
    assert run("merge", "idea").code == 0
    assert shop.query("select name from item where id = :id", {"id": bolt}) == [{"name": "screw"}]


def test_fork_a_slice_and_discard_it(shop: Layer, run: Run) -> None:
    assert run("fork", "part", "--slice", "item=qty > 3").code == 0
    assert run("query", "select name from item", "--branch", "part", "--json").json == [{"name": "nut"}]
    assert run("discard", "part").code == 0
    assert run("query", "select name from item", "--branch", "part").code == 4
    [kept] = [row["name"] for row in run("branches", "--json").json if row["status"] == "discarded"]
    assert run("query", "select name from item", "--branch", kept, "--json").json == [{"name": "nut"}]
    assert run("merge", "part").code == run("discard", "part").code == 4
    assert run("fork", "main").code == 5
    assert run("fork", "x", "--from", "nowhere").code == 4


# -- authority ----------------------------------------------------------------------------------------------------------


def test_grant_can_revoke(shop: Layer, run: Run) -> None:
    refused = run("can", "clerk", "read", "item")
    assert refused.code == 1 and refused.out.splitlines()[0] == "no"
    granted = run(
        "grant", "clerk", "read", "item", "--where", "qty > 3", "--fields", "name,qty", "--reason", "needs it", "--json"
    )
    assert granted.code == 0
    permission = granted.json["permission"]
    allowed = run("can", "clerk", "read", "item", "--json")
    assert (allowed.code, allowed.json["allowed"]) == (0, True)
    assert run("query", "select * from item", "--as", "clerk", "--json").json == [
        {"id": ids(shop)["nut"], "name": "nut", "qty": 5}
    ]
    assert run("grant", "clerk", "read", "item", "--deny").code == 0
    assert run("can", "clerk", "read", "item").code == 1
    assert run("revoke", permission).code == 0
    assert run("revoke", 10**9).code == 4
    assert run("grant", "clerk", "read", "nothing").code in (2, 4)
    assert run("grant", "clerk", "read", "item", "--valid-to", "12").code == 2


# -- trust --------------------------------------------------------------------------------------------------------------


def test_verify_is_quiet_about_good_content(shop: Layer, run: Run) -> None:
    good = run("verify")
    assert good.code == 0 and good.out.startswith("All is as it was written")
    report = run("verify", "--json").json
    assert report["ok"] is True and report["problems"] == []


def test_verify_names_the_first_bad_tx(shop: Layer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # The content itself is damaged in the substrate's own tests; here the report is what matters.
    bad = shop.verify().__class__(
        ok=False, tx=9, rows=3, problems=[(7, "the row is not what was hashed"), (8, "so is this")]
    )
    monkeypatch.setattr(Layer, "verify", lambda self: bad)
    shown = run("verify")
    assert shown.code == 1 and "first bad transaction is tx 7" in shown.err
    assert run("verify", "--json").code == 1


def test_backup_and_restore(
    shop: Layer, engine: str, make_location: Callable[[], str], tmp_path: Path, run: Run
) -> None:
    assert run("backup", tmp_path / "copy").code == 0
    shop.insert("item", {"name": "late"})
    again = tmp_path / "again"
    database = ["--db", make_location()] if engine == "postgres" else []
    assert run("restore", tmp_path / "copy", again, *database).code == 0
    for place in (tmp_path / "copy", again):
        rows = run("query", "select name, price from item order by name", "--dir", place, "--json").json
        assert rows == [{"name": "bolt", "price": "0.10"}, {"name": "nut", "price": "0.05"}]
        assert run("verify", "--dir", place).code == 0
    assert run("restore", tmp_path / "copy", again, *database).code == 5
    assert run("restore", tmp_path / "nothing", tmp_path / "new").code == 4


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_export_and_import(shop: Layer, run: Run, tmp_path: Path, format: str) -> None:
    path = tmp_path / f"items.{format}"
    assert run("export", "item", path).code == 0
    shop.fork("idea")
    for id in ids(shop).values():
        shop.delete("item", id, branch="idea")
    assert run("import", "item", path, "--branch", "idea", "--reason", "moved").code == 0
    rows = run("query", "select name, qty, price from item order by name", "--branch", "idea", "--json").json
    assert rows == [{"name": "bolt", "qty": 3, "price": "0.10"}, {"name": "nut", "qty": 5, "price": "0.05"}]
    assert run("export", "nothing", tmp_path / "x.jsonl").code in (2, 4)
    assert run("import", "item", tmp_path / "missing.csv").code in (1, 4)
    assert run("export", "item", tmp_path / "no" / "such" / "directory.csv").code != 0


def test_export_to_standard_output(shop: Layer, location: str) -> None:
    done = layer_process("--dir", location, "export", "item", "-", "--format", "csv")
    assert done.returncode == 0 and "bolt" in done.stdout


def test_import_of_a_bad_file_changes_nothing(shop: Layer, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"name": "good"}\n{"name": 7, "qty": "many"}\n')
    assert run("import", "item", path).code == 2
    assert len(ids(shop)) == 2


def test_prune_asks_first_and_still_verifies(shop: Layer, run: Run) -> None:
    bolt = ids(shop)["bolt"]
    for qty in range(5):
        tx = shop.update("item", bolt, {"qty": qty})
    assert run("prune", tx).code == 2
    assert run("prune", tx, "--yes").code == 0
    assert run("verify").code == 0
    assert run("prune", "soon", "--yes").code == 2


# -- the command line itself --------------------------------------------------------------------------------------------


def layer_process(*argv: object, input: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "livinglayer.edges.cli.main", *map(str, argv)]
    return subprocess.run(command, input=input, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, run: Run) -> None:
    shown = run(*name.split(), "--help")
    assert shown.code == 0 and len(COMMANDS[name].help) > 20
    assert " ".join(COMMANDS[name].help.split()) in " ".join(shown.out.split())


def test_a_flag_that_means_nothing_to_a_command_is_refused(run: Run) -> None:
    refused = run("--as", "ann", "verify")
    assert (refused.code, refused.err) == (2, "layer: layer verify takes no --as\nhint: layer verify --help\n")
    assert run("verify", "--branch", "idea").code == 2
    assert run("nonsense").code == 2
    assert run().code == 2


def test_as_a_process_a_stored_escape_stays_text_and_a_closed_pipe_is_no_error(shop: Layer, location: str) -> None:
    shop.insert("item", {"name": "\x1b[2Jevil"})
    done = layer_process("--dir", location, "query", "select name from item")
    assert done.returncode == 0 and "\x1b" not in done.stdout and "\\x1b[2Jevil" in done.stdout
    many = "with recursive r(n) as (select 1 union all select n + 1 from r where n < 50000) select n from r"
    command = [sys.executable, "-m", "livinglayer.edges.cli.main", "--dir", location, "query", many]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (0, b"")
    process.stderr.close()


def test_commands_work_while_another_process_holds_the_layer_open(shop: Layer, location: str) -> None:
    done = layer_process("--dir", location, "fork", "beside")
    assert (done.returncode, done.stderr) == (0, "")
    shop.insert("item", {"name": "here"}, branch="beside")
    assert os.environ["XDG_CONFIG_HOME"] != str(Path.home() / ".config")


def test_a_value_may_come_from_a_file(run: Run, home: Path, location: str, tmp_path: Path) -> None:
    with livinglayer.open(location) as layer:
        layer.define("thing", {"name": "text!", "note": "text"})
    text = tmp_path / "long.txt"
    text.write_text("3\n" + "x" * 200_000)  # more than a word of a command line can hold, and no number
    made = run("insert", "thing", "name=bolt", "--from-file", f"note={text}", "--json")
    assert made.code == 0 and run("query", "select length(note) as n from thing", "--json").json == [{"n": 200_002}]
    text.write_text("short")
    assert run("update", "thing", made.json["id"], "--from-file", f"note={text}").code == 0
    assert run("query", "select note from thing", "--json").json == [{"note": "short"}]
    text.write_bytes(b"caf\xe9")
    assert "is not UTF-8: byte 4" in run("insert", "thing", "name=x", "--from-file", f"note={text}").err
    assert "is not FIELD=FILE" in run("insert", "thing", "--from-file", "note").err
    assert "no value is given" in run("insert", "thing").err


def test_rows_are_added_changed_and_removed(run: Run, home: Path, location: str) -> None:
    with livinglayer.open(location) as layer:
        layer.define("thing", {"name": "text!", "qty": "int", "kept": "bool"})
    made = run("insert", "thing", "name=bolt", "qty=3", "--json")
    number = made.json["id"]
    assert run("update", "thing", number, "qty=4", "kept=true", "--reason", "counted again").code == 0
    told = run("query", "select name, qty, kept from thing", "--json").json
    assert told == [{"name": "bolt", "qty": 4, "kept": True}]
    late = run("update", "thing", number, "qty=5", "--expect", 1)
    assert late.code == 5 and late.err.startswith("layer: ")
    assert run("insert", "thing", "qty=many").code == 2
    assert run("insert", "thing", "bolt").err.startswith("layer: value 'bolt' is not NAME=VALUE")
    assert run("delete", "thing", number).out.startswith(f"Removed thing/{number} in tx ")
    assert run("query", "select * from thing", "--json").json == []
    assert run("delete", "thing", number).code == 4


def test_people_are_made_with_roles_and_attributes(run: Run, home: Path) -> None:
    assert run("principal", "ann", "--role", "clerk", "--attribute", "team=blue").code == 0
    assert run("grant", "clerk", "read", "principal").code == 0
    assert run(
        "query", "select name, kind, attributes from principal where name = 'ann'", "--json", "--as", "ann"
    ).json == [{"name": "ann", "kind": "human", "attributes": {"team": "blue"}}]
    assert run("principal", "ben", "--as", "ann").code == 3
    assert run("principal", "ann", "--role", "boss", "--no-roles").code == 2
    assert run("principal", "ann", "--no-roles").code == 0
    assert run("query", "select name from principal", "--as", "ann").code == 4
