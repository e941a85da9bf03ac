"""What the README shows works as shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox.hosts import Host, wait_until

from livinglayer.edges.cli.commands import COMMANDS
from livinglayer.edges.cli.main import parser

README = (Path(__file__).parent.parent / "README.md").read_text()
DEMO = (Path(__file__).parent.parent / "tools" / "demo.py").read_text()


LAYER, FUNCTION, BOX = re.findall(r"```python\n(.*?)```", README, re.S)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="boxes above tier process need root")


@pytest.fixture(scope="module")
def made_host() -> Iterator[Host]:
    made = Host()
    try:
        yield made
        made.hang_up()
        made.stop()
        wait_until(lambda: not made.remains(), "nothing of the host is left")
    finally:
        made.remove()


@pytest.fixture
def host(made_host: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    for name, value in made_host.environment().items():
        monkeypatch.setenv(name, value)
    return made_host


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(LAYER, "README.md", "exec"), {})


@needs_root
def test_the_example_of_a_function_runs(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(LAYER.replace("layer.close()", ""), "README.md", "exec"), names)
    exec(compile(FUNCTION, "README.md", "exec"), names)
    names["layer"].close()  # type: ignore[attr-defined]


@needs_root
def test_the_example_of_a_box_runs(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BOX, "README.md", "exec"), {})
    assert capsys.readouterr().out == "0 42\n\n"


@needs_root
def test_the_demo_shows_a_box(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = {"__name__": "demo"}
    exec(compile(DEMO, "demo.py", "exec"), demo)
    assert demo["main"]("shop") == 0  # type: ignore[operator]
    shown = capsys.readouterr().out
    assert "A box:" in shown and "shares the host's kernel" in shown and "three forks" in shown
    assert "A function: item.reorder ran" in shown and "item.reorder" in shown.partition("A function:")[2]


def test_the_demo_is_made_once(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
        words = re.findall(r"'[^']*'|\"[^\"]*\"|\S+", line.replace("{bolt}", "7"))
        assert parser().parse_args([word.strip("'\"") for word in words]).command in COMMANDS
