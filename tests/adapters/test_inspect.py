"""Inspect AI, as it is published, in an environment of its own: its checks of a sandbox, and evaluations in boxes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from adapters import environments
from sandbox.hosts import Host

from livinglayer.sandbox import Sandbox
from livinglayer.sandbox.blueprint import TIERS

HERE = Path(__file__).parent
PLAIN = {"NO_COLOR": "1"}
LATER = [pytest.param(tier, marks=pytest.mark.torture) for tier in TIERS[2:]]


@pytest.fixture(autouse=True)
def here(host: Host, use: Callable[[Host], Host]) -> Host:
    return use(host)


@pytest.mark.parametrize("tier", [TIERS[1], *LATER])
def test_inspects_own_checks_all_pass(tier: str, tmp_path: Path) -> None:
    said = environments.checks("inspect", "inspect_checks.py", tmp_path, {"TIER": tier})
    assert said.startswith("44 passed in "), said
    assert Sandbox.list(labels={"made-by": "inspect"}) == []


def evaluate(logs: Path, how: str) -> dict[str, dict[str, object]]:
    environments.run("inspect", str(HERE / "inspect_eval.py"), str(logs), how, environment=PLAIN)
    said = json.loads((logs / "said.json").read_text())
    assert said["status"] == "success"
    return said["samples"]


def test_an_evaluation_runs_in_boxes_that_are_gone_afterwards(tmp_path: Path) -> None:
    samples = evaluate(tmp_path, "clean")
    assert {name: sample["score"] for name, sample in samples.items()} == {"drawer": "C", "stressed": "I"}
    listed, shouted, late = samples["drawer"]["tools"][:3]  # type: ignore[index]
    assert (listed, shouted) == ("reward\nuser\nanswer.txt\nword.txt\n", "REWARD\n")
    assert "timed out" in late.lower()
    assert Sandbox.list(labels={"made-by": "inspect"}) == []


@pytest.mark.torture
def test_boxes_that_were_kept_are_ended_by_inspects_own_command(tmp_path: Path) -> None:
    with Sandbox.create() as other:
        evaluate(tmp_path, "keep")
        kept = Sandbox.list(labels={"made-by": "inspect"})
        assert sorted(box.files.read("/home/user/answer.txt") for box in kept) == [b"desserts\n", b"reward\n"]
        command = ["-m", "inspect_ai", "sandbox", "cleanup", "layer"]
        environments.run("inspect", *command, kept[0].name, environment=PLAIN)
        assert [box.name for box in Sandbox.list(labels={"made-by": "inspect"})] == [kept[1].name]
        environments.run("inspect", *command, environment=PLAIN)
        assert [box.id for box in Sandbox.list()] == [other.id]
