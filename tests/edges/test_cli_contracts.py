"""`layer projection`, `layer quota`, `layer usage`, `layer contract`, and boxes of contracts: what they print and how they end."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from edges.results import Result, Run
from sandbox.hosts import Host, running, sweep, wait_until

import livinglayer
from livinglayer.edges.cli.main import main

LAYER = [sys.executable, "-m", "livinglayer.edges.cli.main"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="boxes above tier process need root")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("usage")` runs `layer usage` in a fresh layer with tickets."""
    with livinglayer.open(tmp_path, create=True) as layer:
        layer.define("ticket", {"title": "text!", "priority": "int"})
        layer.insert("ticket", [{"title": "one", "priority": 1}, {"title": "two", "priority": 2}])
        layer.principal("ann")

    monkeypatch.chdir(tmp_path)

    def command(*words: object, stdin: str = "") -> Result:
        if words[:2] == ("box", "exec"):  # joins its command to the streams of a process
            done = subprocess.run([*LAYER, *map(str, words)], capture_output=True, timeout=120, check=False, text=True)
            assert "Traceback" not in done.stderr, done.stderr
            return Result(done.returncode, done.stdout, done.stderr)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            code = main([*map(str, words)])
        except SystemExit as ended:
            code = int(str(ended.code))
        return Result(code, *capsys.readouterr())

    return command


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Host]:
    """A host for one test. Boxes and whoever looks after them end with it; nothing of it may be left."""
    sweep()
    made = Host()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    try:
        yield made
        subprocess.run([*LAYER, "box", "kill", "--all"], capture_output=True, check=True)
        for pid in keepers(tmp_path):
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda pid=pid: not running(pid), "the keeper is gone", 20)
        made.hang_up()
        made.stop()
        wait_until(lambda: not made.remains(), "nothing of the host is left")
    finally:
        made.remove()


def keepers(place: Path) -> list[int]:
    with livinglayer.open(place) as layer:
        return [int(holder.split(".")[1]) for _, holder, _, _ in layer.engine.leases("keeper/")]


def test_projections_are_defined_listed_and_read(run: Run) -> None:
    sql = "select title from ticket where priority >= :least order by id"
    assert (
        run(
            "projection", "define", "urgent", sql, "--parameter", "least=int!", "--description", "those that matter"
        ).code
        == 0
    )
    assert run("projection", "read", "urgent", "least=2", "--json").json == [{"title": "two"}]
    assert "urgent" in run("projection", "list").out
    assert run("projection", "list", "--as", "ann", "--json").json == []
    hidden = run("projection", "read", "urgent", "least=2", "--as", "ann")
    assert hidden.code == 4 and "there is no projection 'urgent'" in hidden.err
    assert run("grant", "ann", "read", "projection:urgent").code == 0
    assert "two" in run("projection", "read", "urgent", "least=2", "--as", "ann").out
    assert run("projection", "read", "urgent", "least=x").code == 2
    assert run("projection", "define", "bad", "select nothing from ticket").code == 2
    assert run("projection", "define", "bad", "select 1 as n", "--parameter", "x").code == 2
    assert run("projection", "remove", "urgent").code == 0 and run("projection", "read", "urgent").code == 4


def test_quotas_and_usage_are_shown(run: Run) -> None:
    made = run("quota", "set", "executions", "5", "1h", "--of", "ann", "--json")
    assert made.code == 0
    (row,) = run("quota", "list", "--json").json
    assert (row["subject"], row["resource"], row["amount"], row["seconds"], row["used"]) == (
        "ann",
        "executions",
        5.0,
        3600,
        0.0,
    )
    assert run("quota", "set", "gold", "5", "1h", "--of", "ann").code == 2
    assert run("quota", "set", "cpu", "5", "1h").code == 2
    assert run("usage", "--by", "function", "--since", "7d", "--json").json == []
    assert run("usage", "--since", "yesterday").code == 2
    assert run("quota", "remove", made.json["quota"]).code == 0 and run("quota", "remove", 77).code == 4


@needs_root
def test_a_box_of_a_contract_is_made_used_forked_and_merged(run: Run, host: Host, tmp_path: Path) -> None:
    contract = {"name": "agent", "reads": ["ticket"], "scope": {"ticket": {"actions": ["insert"]}}}
    assert run("contract", "define", "--file", "-", stdin=json.dumps(contract)).code == 0
    assert run("contract", "define", "--file", "-", stdin="[]").code == 2
    assert run("contract", "list", "--json").json[0]["name"] == "agent"
    assert "ticket" in run("contract", "show", "agent").out and run("contract", "show", "nobody").code == 4
    for action, resource in (
        ("call", "contract:agent"),
        ("read", "ticket"),
        ("write", "ticket"),
        ("fork", "branch:main"),
    ):
        run("grant", "ann", action, resource)
    made = run("box", "create", "work", "--contract", "agent", "--as", "ann", "--slice", "ticket=priority > 1")
    assert made.code == 0 and "a process was started that answers for it" in made.out, made.err
    wait_until(lambda: len(keepers(tmp_path)) == 1, "it is there", 30)
    shown = run("box", "exec", "work", "--", "layer", "query", "select title from ticket", "--json")
    assert shown.json == [{"title": "two"}]
    forked = run("fork", "idea", "--box", "work", "--box-name", "other", "--as", "ann", "--json")
    assert forked.code == 0 and forked.json["box"] == "other", forked.err
    assert (
        run(
            "box", "exec", "other", "--", "sh", "-c", "echo new > made; layer insert ticket title=three priority=3"
        ).code
        == 0
    )
    merged = run("merge", "idea", "--artifacts", "--json")
    assert merged.code == 0 and [each["name"] for each in merged.json["artifacts"]] == ["home/user/made"], merged.err
    assert "three" in run("query", "select title from ticket").out
    assert [row["branch"] for row in run("query", "select branch from lineage order by id", "--json").json] == [
        "main",
        "idea",
    ]
    refused = run("box", "create", "--contract", "agent", "--memory", "1G")
    assert refused.code == 2 and "--memory is not for a box of a contract" in refused.err
    assert (
        run("box", "create", "--slice", "ticket").code == 2 and run("box", "create", "--contract", "nobody").code == 4
    )
