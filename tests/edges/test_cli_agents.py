"""`layer agent`: what it shows while an agent works, what at its end, and how it ends itself."""

from __future__ import annotations

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
from livinglayer import Layer
from livinglayer.jobs.scripted_model import ScriptedModel

LAYER = [sys.executable, "-m", "livinglayer.edges.cli.main"]
KEY = "sk-scripted-0123456789"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="boxes above tier process need root")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run("agent", "list")` runs it in a fresh layer with a contract, and a host of its own whose boxes end with the test."""
    sweep()
    made = Host()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with livinglayer.open(tmp_path, create=True) as layer:
        layer.define("ticket", {"title": "text!", "priority": "int", "note": "text"})
        layer.insert("ticket", [{"title": "one", "priority": 1}, {"title": "two", "priority": 2}])
        layer.call(
            "contract.define",
            name="clerk",
            reads=["ticket"],
            scope={"ticket": {"fields": ["title", "priority"]}},
            program="true",
        )
        layer.principal("ann")

    def command(*words: object, stdin: str = "") -> Result:
        done = subprocess.run(
            [*LAYER, *map(str, words)], capture_output=True, timeout=120, check=False, text=True, input=stdin
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    try:
        yield command
        command("box", "kill", "--all")
        with livinglayer.open(tmp_path) as layer:
            keepers = [int(holder.split(".")[1]) for _, holder, _, _ in layer.engine.leases("keeper/")]
        for pid in keepers:
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda pid=pid: not running(pid), "the keeper is gone", 20)
        made.hang_up()
        made.stop()
        wait_until(lambda: not made.remains(), "nothing of the host is left")
    finally:
        made.remove()


@pytest.fixture
def layer(tmp_path: Path, run: Run) -> Iterator[Layer]:
    with livinglayer.open(tmp_path) as opened:
        yield opened


SHELL = """echo hello; layer query "select title from ticket"; id=$(layer insert ticket title="$LAYER_TASK" priority=5)
layer update ticket $id note=x || echo refused; echo words > notes.txt"""


def test_an_agent_is_watched_reviewed_and_merged(run: Run, layer: Layer) -> None:
    done = run("agent", "run", "clerk", "--task", "fix the printer", "--program", "sh", "-c", SHELL)
    assert done.code == 0, done.err
    (row,) = layer.query("select id, branch, result from execution where verb = 'agent.run' and kind = 'contract'")
    proposal = row["result"]["proposal"]
    for shown in (
        f"Agent {row['id']} of clerk on branch {row['branch']}, forked from main", "│ hello", "· select title from ticket  (2 rows)",
        "✗ update: the execution's scope does not cover ticket.note", "│ refused", "done after", "ticket: 1 insert", f"Next: layer agent review {proposal}",
    ):  # fmt: skip
        assert shown in done.out, (shown, done.out)
    assert "fix the printer" in run("agent", "list").out
    (told,) = run("agent", "list", "--json").json
    assert (told["agent"], told["status"], told["proposal"]) == (row["id"], "done", proposal)
    seen = run("agent", "review", proposal)
    assert (
        "fix the printer" in seen.out and "/home/user/notes.txt" in seen.out and f"layer approve {proposal}" in seen.out
    )
    assert run("agent", "review", row["branch"]).out == seen.out
    (change,) = run("agent", "review", row["id"], "--json").json["rows"]
    assert (change["entity"], change["fields"]["title"]) == ("ticket", {"before": None, "after": "fix the printer"})
    merged = run("approve", proposal)
    assert merged.code == 0, merged.err
    assert layer.query("select count(*) as n from ticket") == [{"n": 3}]
    again = run("agent", "show", row["id"])
    assert "│ hello" in again.out and "done after" in again.out
    assert "ticket: 1 insert (merged)" in again.out and "Next:" not in again.out


def test_an_agent_for_somebody_else_is_watched_by_who_started_it(run: Run, layer: Layer) -> None:
    for action, resource in (("call", "contract:clerk"), ("fork", "branch:main"), ("read", "ticket")):
        layer.grant("ann", action, resource)
    done = run("agent", "run", "clerk", "--task", "x", "--as", "ann", "--program", "echo", "hello")
    assert done.code == 0 and "│ hello" in done.out and "done after" in done.out, done
    (row,) = layer.query("select id, principal from execution where verb = 'agent.run' and kind = 'contract'")
    assert row["principal"] == "ann"
    hidden = run("agent", "show", row["id"], "--follow", "--as", "ann")  # what ann may not read she is not shown
    assert "ann may not read execution and step" in hidden.out and "hello" not in hidden.out


def test_how_an_agent_ends_is_the_exit_code(run: Run) -> None:
    failed = run("agent", "run", "clerk", "--task", "x", "--program", "sh", "-c", "echo no >&2; exit 3")
    assert failed.code == 1 and "the program exited with 3" in failed.out and "│ no" in failed.out
    quiet = run("agent", "run", "clerk", "--task", "x", "--json")
    assert quiet.code == 0 and quiet.json["status"] == "done" and quiet.json["proposal"] is None
    assert "nothing to propose" in run("agent", "run", "clerk", "--task", "-", stdin="from a pipe").out
    on = run(
        "agent", "run", "clerk", "--task", "x", "--on", "main", "--program", "layer", "insert", "ticket", "title=there"
    )
    assert on.code == 0 and "on main" in on.out
    for words, code, message in (
        (("nobody", "--task", "x"), 4, "there is no contract 'nobody'"),
        (("clerk",), 2, "an agent needs a task"),
        (("clerk", "--task", " "), 2, "an agent needs a task"),
        (("clerk", "--task", "x", "--on", "nowhere"), 4, "no branch 'nowhere'"),
        (("clerk", "--task", "x", "--model", "m"), 2, "has no model"),
        (("clerk", "--task", "x", "--as", "ann"), 4, "there is no contract 'clerk'"),
    ):
        wrong = run("agent", "run", *words)
        assert wrong.code == code and message in wrong.err, (words, wrong)
    assert (
        run("agent", "show", "nobody").code == run("agent", "stop", "7").code == run("agent", "review", "7").code == 4
    )


def test_an_agent_is_left_to_itself_followed_and_stopped(run: Run, layer: Layer) -> None:
    started = run(
        "agent", "run", "clerk", "--task", "x", "--detach", "--json", "--program", "sh", "-c", "echo begun; sleep 1000"
    )
    number = started.json["execution"]
    assert run("agent", "list", "--json").json[0]["status"] == "running"
    watching = subprocess.Popen([*LAYER, "agent", "show", str(number), "--follow"], stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None and watching.stdout.readline() == "│ begun\n"
    watching.send_signal(signal.SIGINT)
    assert "Left to itself" in watching.stdout.read() and watching.wait(20) == 0
    assert layer.query("select status from execution where id = :id", {"id": number}) == [{"status": "running"}]
    assert "begun" in run("agent", "show", number).out
    assert run("agent", "stop", started.json["branch"]).code == 0
    ended = run("agent", "show", number, "--follow")
    assert ended.code == 1 and "it was stopped before its program ended" in ended.out
    assert run("agent", "stop", number).code == 5


def test_what_a_model_says_is_shown_with_what_it_cost_and_what_waits(run: Run, layer: Layer) -> None:
    first = layer.query("select min(id) as id from ticket")[0]["id"]
    script = [
        {"text": "I look.", "calls": [("query", {"sql": "select title from ticket"})], "usage": (1000, 10)},
        {"text": "I set it.", "calls": [("update_ticket", {"id": first, "priority": 9})], "usage": (2000, 20)},
        {"calls": [("finish", {"answer": "It has 9 now.\nThat is all."})], "usage": (3000, 30)},
    ]
    with ScriptedModel(script, key=KEY) as model:
        layer.call("secret.set", name="MODEL_KEY", value=KEY)
        rule = {
            "host": "model.test",
            "protocol": "http",
            "resolve": f"127.0.0.1:{model.port}",
            "private": True,
            "secrets": ["MODEL_KEY"],
        }
        layer.call("blueprint.define", name="asking", egress=[rule], secrets=["MODEL_KEY"])
        layer.call(
            "contract.define", name="clerk", blueprint="asking", reads=["ticket"], scope=["ticket"],
            approvals=[{"action": "update", "resource": "ticket", "reason": "it is felt"}],
            model={"api": "anthropic", "url": "http://model.test", "model": "m", "secret": "MODEL_KEY", "prices": {"input": 3, "output": 15}},
        )  # fmt: skip
        watching = subprocess.Popen(
            [*LAYER, "agent", "run", "clerk", "--task", "Sort."], stdout=subprocess.PIPE, text=True
        )
        wait_until(lambda: layer.query("select id from approval"), "it asks", 60)
        (asked,) = layer.query("select id from approval")
        assert run("approve", asked["id"], "--reason", "fine").code == 0
        out, _ = watching.communicate(timeout=60)
        assert watching.returncode == 0, out
    lines = out.splitlines()
    order = [
        "I look.", '→ query {"sql":"select title from ticket"}', "I set it.", f'→ update_ticket {{"id":{first},"priority":9}}',
        "⏸ waits for somebody's yes to update ticket", f"  layer approve {asked['id']}   or", "▶ approved: fine", "→ finish It has 9 now.", "done after",
    ]  # fmt: skip
    at = [next(n for n, line in enumerate(lines) if line.startswith(start)) for start in order]
    assert at == sorted(at), out
    assert "tokens    6,000 in, 60 out, 3 answers" in out and "money     0.0189" in out
    assert "answer    It has 9 now.\n          That is all." in out
