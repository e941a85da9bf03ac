"""What the README shows works as shown."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.hosts import Host, wait_until

import livinglayer
from livinglayer.edges.cli.commands import COMMANDS
from livinglayer.edges.cli.main import parser

README = (Path(__file__).parent.parent / "README.md").read_text()
UP = Path(__file__).parent.parent / "tools" / "up.py"


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
def test_make_up_leaves_a_help_desk_that_is_looked_after(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    up: dict[str, Any] = {"__name__": "up", "__file__": str(UP)}
    exec(compile(UP.read_text(), "up.py", "exec"), up)
    home = Path("desk")
    try:
        assert up["main"](home) == 0
        first = capsys.readouterr().out
        assert "Made a layer in desk; applied helpdesk: " in first and "The worker has triaged every ticket" in first
        server = up["server_of"](home)
        assert server is not None and f"Server {server} is at http://127.0.0.1:" in first
        page = urllib.request.urlopen(re.search(r"In a browser: (\S+)", first)[1], timeout=30)  # type: ignore[index]
        assert b"Sign in on this browser?" in page.read()
        with livinglayer.open(home) as layer:  # and it goes on doing so
            cara = layer.query("select id from customer where email = 'cara@example.com'")[0]["id"]
            rows = layer.query("select id from ticket")
            rows += layer.query("select id from execution where function = 'ticket.triage'")
            named = {int(number) for number in re.findall(r"^\$ layer .*?\b(2\d{3})\b", README, re.M)}
            assert named and named <= {cara, *(row["id"] for row in rows)}  # what the README speaks of is there
            made = layer.insert("ticket", {"title": "The app is slow", "customer": cara}, principal="cara")
            state = lambda: layer.query("select status from ticket where id = :id", {"id": made})[0]["status"]  # noqa: E731
            wait_until(lambda: state() == "triaged", "triage of a new ticket")
        assert up["main"](home) == 0  # again: nothing is changed, and there is still one server
        again = capsys.readouterr().out
        assert "There was already a layer in desk; applied helpdesk: nothing had to be changed." in again
        assert up["server_of"](home) == server
    finally:
        up["stop_server"](home)
    assert up["server_of"](home) is None


@pytest.mark.parametrize("page", [README, UP.read_text()], ids=["README.md", "up.py"])
def test_the_commands_shown_exist(page: str) -> None:
    shown = re.findall(r"^(?:\$|   ) layer (.*?)(?:   |  #|\n| &&)", page, re.M)
    assert len(shown) > 5
    for line in shown:
        words = re.findall(r"'[^']*'|\"[^\"]*\"|\S+", re.sub(r"\{\w+\}|\b(ID|AGENT)\b", "7", line))
        assert parser().parse_args([word.strip("'\"") for word in words]).command in COMMANDS
