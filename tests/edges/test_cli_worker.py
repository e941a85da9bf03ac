"""`layer trigger`, `worker`, `executions`, `retry`: what they print, and that they are the same verbs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import livinglayer
from livinglayer.edges.cli.main import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a layer, tickets and a function in SQL, which needs no box."""
    monkeypatch.chdir(tmp_path)
    with livinglayer.open(tmp_path, create=True) as layer:
        layer.define("ticket", {"title": "text!", "points": "int"})
        signature = {"arguments": {"id": "int!", "word": "text"}}
        layer.call(
            "function.define", name="note.it", language="sql", code="select :id as id, :word as w", signature=signature
        )
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code
    both = capsys.readouterr()
    return both.out + both.err


def test_a_trigger_from_its_definition_to_its_end(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    define = [
        "trigger",
        "define",
        "t",
        "note.it",
        "--on",
        "ticket",
        "--action",
        "insert",
        "--where",
        "points > 1",
        "-a",
        "word=hello",
    ]
    assert "layer worker runs it" in said(capsys, *define)
    (shown,) = json.loads(said(capsys, "trigger", "list", "--json"))
    assert (shown["cause"], shown["predicate"], shown["arguments"], shown["enabled"]) == (
        "ticket",
        "points > 1",
        {"word": "hello"},
        True,
    )
    with livinglayer.open(home) as layer:
        layer.insert("ticket", [{"title": "a", "points": 1}, {"title": "b", "points": 2}])
    lines = [json.loads(line) for line in said(capsys, "worker", "--once", "--json").splitlines()]
    assert [line["event"] for line in lines] == ["start", "lead", "queued", "done", "stop"]
    (row,) = json.loads(said(capsys, "executions", "--trigger", "t", "--json"))
    assert row["status"] == "done" and row["arguments"]["word"] == "hello"
    assert "note.it" in said(capsys, "executions", "--status", "done")
    assert "does not fire" in said(capsys, "trigger", "disable", "t")
    assert "fires" in said(capsys, "trigger", "enable", "t")
    assert "Removed" in said(capsys, "trigger", "remove", "t")
    assert json.loads(said(capsys, "trigger", "list", "--json")) == []


def test_what_is_wrong_is_said_in_one_sentence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "five fields" in said(capsys, "trigger", "define", "t", "note.it", "--schedule", "soon", code=2)
    assert "no trigger 't'" in said(capsys, "trigger", "remove", "t", code=4)
    assert "no execution 7" in said(capsys, "retry", "7", code=4)
    assert "--concurrency" in said(capsys, "worker", "--concurrency", "0", code=2)


def test_a_dead_letter_is_tried_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with livinglayer.open(home) as layer:
        wrong = {"arguments": {"id": "int!"}, "result": "int!"}
        layer.call("function.define", name="note.bad", language="sql", code="select :id as id", signature=wrong)
    said(capsys, "trigger", "define", "t", "note.bad", "--on", "ticket", "--attempts", "1")
    with livinglayer.open(home) as layer:
        layer.insert("ticket", {"title": "a"})
    assert " dead " in said(capsys, "worker", "--once")
    (dead,) = json.loads(said(capsys, "executions", "--status", "dead", "--json"))
    made = json.loads(said(capsys, "retry", str(dead["id"]), "--json"))
    assert made["of"] == dead["id"]
    (queued,) = json.loads(said(capsys, "executions", "--status", "queued", "--json"))
    assert queued["id"] == made["execution"] and queued["parent"] == dead["id"]
