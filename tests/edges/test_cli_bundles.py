"""`layer plan`, `layer apply` and `layer bundle`: what they print, ask and give back."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from bundle.desks import DESK, swapped
from edges.results import Result, Run

import livinglayer
from livinglayer.edges.cli.main import main

LAYER = [sys.executable, "-m", "livinglayer.edges.cli.main"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("plan", "desk")` runs `layer plan desk` where a fresh layer and the bundle `desk` lie."""
    livinglayer.open(tmp_path, create=True).close()
    write(tmp_path / "desk", DESK)
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        capsys.readouterr()
        try:
            code = main([*map(str, words)])
        except SystemExit as ended:
            code = int(str(ended.code))
        return Result(code, *capsys.readouterr())

    return command


def write(place: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)


def test_a_plan_for_people_marks_what_widens(run: Run) -> None:
    shown = run("plan", "desk")
    assert shown.code == 0 and "\x1b" not in shown.out
    lines = shown.out.splitlines()
    assert lines[0] == "desk 1.0.0, new here   not signed"
    assert "  + entity ticket" in lines and "    + title                text!" in lines
    assert "! + agent read ticket where priority < 5" in lines
    assert "  + deny agent delete ticket" in lines
    assert any(line.startswith("! + trigger rank-new") and "as whoever applies this" in line for line in lines)
    digest = run("plan", "desk", "--json").json["digest"]
    assert lines[-1] == f"To do exactly this: layer apply desk --accept {digest}"
    assert lines[-3] == f"plan {digest}"


def test_a_plan_that_widens_is_applied_when_it_is_accepted(run: Run) -> None:
    refused = run("apply", "desk")
    assert refused.code == 3 and "lets somebody do more than before" in refused.err
    digest = run("plan", "desk", "--json").json["digest"]
    assert f"--accept {digest}" in refused.err
    wrong = run("apply", "desk", "--accept", "0" * 16)
    assert wrong.code == 5 and f"the plan is {digest} by now" in wrong.err
    done = run("apply", "desk", "--accept", digest, "--reason", "yes")
    assert done.code == 0 and done.out.startswith("Applied desk 1.0.0: ") and done.out.endswith("one tx\n")
    assert run("plan", "desk").out.splitlines()[1] == "  nothing to do: the layer is what the bundle says"
    again = run("apply", "desk", "--json").json
    assert again["applied"] is False and again["empty"] is True
    assert run("query", "select principal, reason from tx order by tx desc limit 1", "--json").json == [
        {"principal": "owner", "reason": "yes"}
    ]


def test_json_is_one_document(run: Run) -> None:
    done = run("apply", "desk", "--yes", "--json").json
    assert done["applied"] is True and done["bundle"] == "desk" and done["widens"] is True
    grants = [change for change in done["changes"] if change["kind"] == "grant"]
    assert {key: grants[0][key] for key in ("name", "action", "widens")} == {
        "name": "allow agent read ticket where priority < 5", "action": "add", "widens": True,
    }  # fmt: skip


def test_on_a_branch(run: Run) -> None:
    run("fork", "try")
    assert (
        run("apply", "desk", "--branch", "try", "--yes")
        .out.splitlines()[-1]
        .startswith("Applied desk 1.0.0 on branch try: ")
    )
    assert run("bundle", "list", "--json").json == []
    assert [row["name"] for row in run("bundle", "list", "--branch", "try", "--json").json] == ["desk"]


def test_lists_shows_exports_and_removes(run: Run, tmp_path: Path) -> None:
    run("apply", "desk", "--yes")
    listed = run("bundle", "list")
    assert "desk" in listed.out and "A help desk." in listed.out and "1 bundle" in listed.out
    tree = run("bundle", "show", "desk").out
    assert "├─ entity (2)" in tree and "ticket   customer, note, priority, status, title" in tree
    assert run("bundle", "show", "other").code == 4
    assert run("bundle", "export", "desk", "out").out == f"Exported desk to out: {len(DESK)} files\n"
    assert all((tmp_path / "out" / path).read_text() == text for path, text in DESK.items())
    gone = run("bundle", "remove", "desk")
    assert gone.code == 0 and gone.out.endswith("its entities and rows stay\n")
    assert run("query", "select count(*) as n from ticket", "--json").json == [{"n": 1}]
    assert run("bundle", "remove", "desk").code == 4


def test_what_is_in_the_way_is_said_and_can_be_adopted(run: Run, tmp_path: Path) -> None:
    with livinglayer.open(tmp_path) as layer:
        layer.define("customer", {"name": "text!"})
    shown = run("plan", "desk").out
    assert "  x entity customer   (it was not made by a bundle)" in shown
    refused = run("apply", "desk", "--yes")
    assert refused.code == 5 and "--adopt" in refused.err
    assert run("apply", "desk", "--yes", "--adopt").code == 0


def test_what_it_needs_lies_beside_it(run: Run, tmp_path: Path) -> None:
    needs = {"bundle.yaml": 'name: shop\nversion: 1.0.0\nrequires: {desk: ">=1.0.0"}\n'}
    write(tmp_path / "shop", {**needs, "schema.yaml": "entities: {order_line: {fields: {ticket: ref ticket}}}\n"})
    shown = run("plan", "shop").out
    assert shown.index("desk 1.0.0, new here") < shown.index("shop 1.0.0, new here")
    assert run("apply", "shop", "--yes").code == 0
    assert [row["name"] for row in run("bundle", "list", "--json").json] == ["desk", "shop"]
    refused = run("bundle", "remove", "desk")
    assert refused.code == 5 and "bundle shop needs desk" in refused.err


def test_errors_name_the_file(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "desk", {"triggers.yaml": "triggers: {t: {function: no.such, schedule: '@hourly'}}\n"})
    refused = run("plan", "desk")
    assert refused.code == 2 and "desk/triggers.yaml: triggers.t" in refused.err
    assert run("plan", "nowhere").code == 4


def test_signing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = run("bundle", "keygen", "--key", "key", "--json").json["key"]
    assert run("bundle", "verify", "desk").code == 3
    assert run("bundle", "sign", "desk", "--key", "key").code == 0
    assert run("bundle", "verify", "desk").code == 3  # by whom?
    assert run("plan", "desk").out.splitlines()[0].endswith(f"signed with a key that is not trusted here: {key}")
    try:
        assert run("bundle", "trust", "me-at-work", key).code == 0
        assert run("bundle", "verify", "desk").out.startswith("Signed by me-at-work")
        assert run("plan", "desk").out.splitlines()[0] == "desk 1.0.0, new here   signed by me-at-work"
        assert {"publisher": "me-at-work", "key": key} in run("bundle", "trust", "--json").json
    finally:
        run("bundle", "trust", "me-at-work", "--remove")
    write(tmp_path / "desk", {"README.md": "changed\n"})
    assert run("plan", "desk").code == 2


def test_the_schema_is_printed(run: Run) -> None:
    assert run("bundle", "schema").json["$schema"].startswith("https://json-schema.org/")


def test_at_a_terminal_it_is_red_and_asks(run: Run, tmp_path: Path) -> None:
    assert "\x1b[31m! + agent read ticket where priority < 5\x1b[0m" in terminal("n\n", "apply", "desk")[1]
    assert run("bundle", "list", "--json").json == []
    code, shown = terminal("y\n", "apply", "desk")
    assert code == 0 and "Apply all of this? [y/N]" in shown and "Applied desk 1.0.0" in shown
    write(tmp_path / "desk", swapped("policy.yaml", "priority < 5", "priority < 6"))
    code, shown = terminal("\n", "apply", "desk")
    assert code == 3 and "nothing was applied" in shown


def terminal(typed: str, *words: str) -> tuple[int, str]:
    """A command on a terminal of its own, with what somebody types there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*LAYER, *words], stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, typed.encode())
    shown, until = b"", time.monotonic() + 60
    while time.monotonic() < until:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            shown += part
        elif process.poll() is not None:
            break
    os.close(ours)
    return process.wait(timeout=30), shown.decode()
