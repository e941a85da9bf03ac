"""`layer decide`: asked on a terminal, given as flags, kept with a contract."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from edges.results import Result, Run

import livinglayer
from livinglayer.edges.cli.main import main

WALLED = ("--author", "model", "--reach", "private", "--runs", "dev", "--egress", "none")


class Terminal(io.StringIO):
    """Somebody who types these lines."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)

    def command(*words: str, typed: str | None = None) -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO() if typed is None else Terminal(typed))
        capsys.readouterr()
        return Result(main(["decide", *words]), *capsys.readouterr())

    return command


def test_flags_answer_without_a_layer(run: Run) -> None:
    told = run(*WALLED)
    assert told.code == 0
    assert told.out.splitlines()[:4] == [
        "minimum      microvm",
        "recommended  microvm",
        "level        3: isolate aggressively",
        "where        inside the VPC",
    ]
    assert "needs a kernel of its own" in told.out
    found = run("--author", "0", "--reach", "2", "--runs", "2", "--egress", "0", "--json").json
    assert (found["minimum"], found["recommended"], found["level"], found["substrate"]) == (
        "process",
        "container",
        1,
        3,
    )
    assert found["answers"] == {"author": "me", "reach": "private", "runs": "fleet", "egress": "none"}


def test_somebody_at_a_terminal_is_asked_what_is_not_given(run: Run) -> None:
    told = run("--runs", "once", "--json", typed="7\nmodel\nperhaps\n1\n1\n")
    assert told.code == 0 and told.json["minimum"] == "gvisor"
    assert told.json["answers"] == {"author": "model", "reach": "nothing", "runs": "once", "egress": "none"}
    assert told.err.count("Who wrote the code?") == 1 and "How does it run?" not in told.err
    assert told.err.count("a number from 1 to 3") == 1 and told.err.count("a number from 1 to 4") == 1
    assert "  3  model     a model wrote it, unreviewed" in told.err.splitlines()


def test_nobody_to_ask_and_wrong_answers_are_refused(run: Run) -> None:
    alone = run("--author", "me")
    assert (
        alone.code == 2
        and "--reach is not given" in alone.err
        and "--reach nothing|public|private|secrets" in alone.err
    )
    assert run(*WALLED[:-1], "moon").code == 2
    assert run(typed="1\n").code == 2  # whoever was asked went away
    assert "without --contract" in run(*WALLED, "--as", "ann").err


def test_a_contract_keeps_its_verdict(run: Run, tmp_path: Path) -> None:
    with livinglayer.open(tmp_path, create=True) as layer:
        layer.define("ticket", {"title": "text!"})
        layer.call("contract.define", name="triage", reads=["ticket"], budget={"seconds": 60})
        layer.principal("ann")
        layer.grant("ann", "read", "contract")
        layer.grant("ann", "read", "blueprint")
    told = run(*WALLED, "--contract", "triage", "--reason", "a model wrote it")
    assert told.code == 0
    assert "Contract triage: minimum tier microvm (before: none)" in told.out
    assert "! Its tier is namespace: it gets no box until that is microvm or stronger." in told.out
    lower = run(
        "--author", "me", "--reach", "public", "--runs", "once", "--egress", "none", "--contract", "triage", "--json"
    )
    assert lower.json["contract"] == {"name": "triage", "before": "microvm", "tier": "namespace", "refused": False}
    assert run(*WALLED, "--contract", "triage", "--as", "ann").code == 3
    assert run(*WALLED, "--contract", "nobody").code == 4
    with livinglayer.open(tmp_path) as layer:
        versions = layer.query(
            "select h.minimum_tier, h.decided, t.reason from contract__history h join tx t on t.tx = h.tx order by h.tx"
        )
        assert [row["minimum_tier"] for row in versions] == [None, "microvm", "process"]
        assert versions[1]["decided"] == {"author": "model", "reach": "private", "runs": "dev", "egress": "none"}
        assert versions[1]["reason"] == "a model wrote it"
        assert layer.query("select reads, budget from contract") == [{"reads": ["ticket"], "budget": {"seconds": 60}}]
