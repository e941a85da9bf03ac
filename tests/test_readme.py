"""What the README shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from livinglayer.edges.cli.commands import COMMANDS
from livinglayer.edges.cli.main import parser

README = (Path(__file__).parent.parent / "README.md").read_text()
DEMO = (Path(__file__).parent.parent / "tools" / "demo.py").read_text()


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README, re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})


def test_the_demo_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = {"__name__": "demo"}
    exec(compile(DEMO, "demo.py", "exec"), demo)
    assert [demo["main"]("shop"), demo["main"]("shop")] == [0, 0]  # type: ignore[operator]
    shown = capsys.readouterr().out
    assert "Made a demo." in shown and "There was already a demo." in shown


@pytest.mark.parametrize("page", [README, DEMO], ids=["README.md", "demo.py"])
def test_the_commands_shown_exist(page: str) -> None:
    shown = re.findall(r"^(?:\$|   ) layer (.*?)(?:   |  #|\n| &&)", page, re.M)
    assert len(shown) > 5
    for line in shown:
        words = re.findall(r"'[^']*'|\"[^\"]*\"|\S+", line)
        assert parser().parse_args([word.strip("'\"") for word in words]).command in COMMANDS
