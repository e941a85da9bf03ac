"""`layer approvals`, `layer approve`, `layer refuse`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import livinglayer
from livinglayer.edges.cli.main import main
from livinglayer.law import approvals


def test_what_waits_is_listed_and_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with livinglayer.open(tmp_path, create=True) as layer:
        execution = layer.ledger.open(layer.my_id, None, "direct")
        layer.ledger.intend(execution)
        asked: dict[str, Any] = {
            "contract": "clerk", "branch": "main", "action": "update", "resource": "ticket",
            "request": {"do": "update", "given": {"entity": "ticket", "id": 7, "values": {"priority": 9}}},
        }  # fmt: skip
        one = approvals.request(layer, execution, **asked, reason="urgent is dear")
        two = approvals.request(layer, execution, **asked, key="another")
        late = approvals.request(layer, execution, **asked, key="late", expires=0.0)
        layer.principal("lee")

    def run(*words: str) -> str:
        capsys.readouterr()
        assert main([*words]) == 0
        return capsys.readouterr().out

    shown = run("approvals")
    assert 'ticket/7 {"priority": 9}' in shown and "urgent is dear" in shown and "2 approvals" in shown
    assert "Answer with: layer approve ID" in shown
    assert [row["id"] for row in json.loads(run("approvals", "--json"))] == [one, two]
    assert run("approve", str(one)) == f"Approval {one} is approved\n"
    assert json.loads(run("refuse", str(two), "--reason", "not now", "--json")) == {
        "approval": two,
        "status": "refused",
    }
    assert "0 approvals" in run("approvals")
    every = {row["id"]: (row["status"], row["answer"]) for row in json.loads(run("approvals", "--all", "--json"))}
    assert every == {one: ("approved", None), two: ("refused", "not now"), late: ("pending", None)}
    assert main(["approve", str(one)]) == 5 and "is approved already" in capsys.readouterr().err
    assert main(["approve", str(late)]) == 5 and "has expired" in capsys.readouterr().err
    assert main(["approve", "999999"]) == 4 and "there is no approval 999999" in capsys.readouterr().err
    assert main(["approve", str(two), "--as", "lee"]) == 4  # lee may not even know
