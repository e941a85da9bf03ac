"""`layer box`, `layer host` and `layer doctor`, with real boxes: what they print, how they end, and that a terminal is a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from edges.results import Result, Run
from sandbox.hosts import Host, sweep, wait_until

from livinglayer.edges.cli.main import main

LAYER = [sys.executable, "-m", "livinglayer.edges.cli.main"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="boxes above tier process need root")
TIERS = ["process", pytest.param("namespace", marks=needs_root)]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host for this file; nothing of it may be left at the end."""
    sweep()
    made = Host()
    try:
        yield made
        made.hang_up()
        made.stop()
        wait_until(lambda: not made.remains(), "nothing of the host is left")
    finally:
        made.remove()


@pytest.fixture
def run(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run("list")` runs `layer box list` as a process of its own; boxes that are left at the end are killed."""
    for name, value in host.environment().items():
        monkeypatch.setenv(name, value)

    def command(*words: object, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
        done = subprocess.run(
            [*LAYER, "box", *map(str, words)],
            input=stdin,
            capture_output=True,
            env=os.environ | (env or {}),
            timeout=120,
            check=False,
        )
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    yield command
    command("kill", "--all")


@pytest.fixture(params=TIERS)
def box(request: pytest.FixtureRequest, run: Run) -> str:
    """A box named `work`, at either tier."""
    made = run("create", "work", "--tier", request.param)
    assert made.code == 0, made.err
    return "work"


# -- life ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "words"), [("process", "no wall"), pytest.param("namespace", "shares the host's kernel", marks=needs_root)]
)
def test_create_says_how_strong_the_walls_are_and_the_box_outlives_it(run: Run, tier: str, words: str) -> None:
    made = run("create", "--tier", tier)
    assert made.code == 0 and words in made.out
    name = re.match(r"Made box ([a-z]+-[a-z]+) \(b\w+\) at tier", made.out)
    assert name, made.out
    [found] = run("list", "--json").json
    assert (found["name"], found["tier"], found["state"]) == (name[1], tier, "running")
    assert name[1] in run("list").out
    killed = run("kill", name[1])
    assert killed.code == 0 and found["id"] in killed.out
    assert run("list", "--json").json == []
    assert "create" in run("trace", found["id"]).out


@needs_root
def test_create_takes_the_whole_shape(run: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # a box is a stranger here: it reads what everybody may
    (tmp_path / "note").write_text("from outside\n")
    made = run(
        "create", "shaped", "--memory", "128M", "--pids", 32, "--cpu", 0.5, "--disk", "64M", "--lifetime", "1h",
        "-e", "A=1", "-e", "FROM_HERE", "--mount", f"{tmp_path}:/mnt/here", "--idle", "freeze=5m,archive=1d",
        "--egress", "example.test", "--egress", '{"host": "api.test", "method": ["GET"]}', "--json",
        env={"FROM_HERE": "there"},
    )  # fmt: skip
    assert made.code == 0, made.err
    assert made.json["limits"] == {"memory": 128 << 20, "pids": 32, "cpu": 0.5, "disk": 64 << 20}
    assert made.json["egress"] == ["example.test", {"host": "api.test", "method": ["GET"]}]
    shown = run("exec", "shaped", "sh", "-c", "echo $A $FROM_HERE; cat /mnt/here/note")
    assert shown.out == "1 there\nfrom outside\n"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["create", "Upper"], 2, "name 'Upper'"),
        (["create", "--memory", "lots"], 2, "'lots' is not a size"),
        (["create", "--idle", "sleep=3"], 2, "no step of the idle ladder"),
        (["create", "--mount", "here"], 2, "SOURCE:TARGET"),
        (["create", "--egress", "{broken"], 2, "is not JSON"),
        (["create", "--secret", "TOKEN=abc"], 2, "a name only"),
        (["create", "--secret", "NOT_SET_ANYWHERE"], 2, "is not set here"),
        (["create", "--lifetime", "soon"], 2, "span of time"),
        (["create", "--snapshot", "0" * 64], 4, "snapshot"),
        (["exec", "nobody", "true"], 4, "no box 'nobody'"),
        (["kill", "nobody"], 4, "no box 'nobody'"),
        (["kill"], 2, "boxes or --all"),
        (["cp", "a", "b"], 2, "one of the two"),
        (["shell", "nobody"], 2, "needs a terminal"),
        (["snapshots", "remove", "zz"], 4, "no snapshot 'zz'"),
        (["list", "--dir", "x"], 2, ""),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(run: Run, words: list[str], code: int, says: str) -> None:
    refused = run(*words)
    assert (refused.code, refused.out) == (code, ""), refused
    assert says in refused.err
    if says:
        told = run("--json", *words) if words[0] == "snapshots" else run(words[0], "--json", *words[1:])
        assert words[0] == "snapshots" or says in json.loads(told.err)["message"]


def test_two_boxes_cannot_have_one_name(run: Run) -> None:
    assert run("create", "one", "--tier", "process").code == 0
    again = run("create", "one", "--tier", "process")
    assert again.code == 5 and "exists already" in again.err and "hint: layer box kill one" in again.err


def test_pause_stops_it_and_resume_lets_it_go_on(box: str, run: Run) -> None:
    assert run("pause", box).code == 0
    stopped = run("exec", box, "true")
    assert stopped.code == 5 and "hint: layer box resume work" in stopped.err
    assert run("list", "--json").json[0]["state"] == "paused"
    assert run("resume", box).code == 0
    assert run("exec", box, "true").code == 0


def test_suspend_says_what_it_kept(box: str, run: Run) -> None:
    run("exec", box, "sh", "-c", "echo kept > /home/user/note" if "process" not in box else "true")
    run("cp", "-", f"{box}:note", stdin=b"kept")
    suspended = run("suspend", box)
    assert suspended.code == 0 and "can't keep processes" in suspended.out
    assert run("resume", box).code == 0
    assert run("cp", f"{box}:note", "-").out == "kept"


# -- commands in a box ----------------------------------------------------------------------------------------------------


def test_exec_is_the_command(box: str, run: Run) -> None:
    done = run("exec", box, "--", "sh", "-c", "cat; echo err >&2; exit 3", stdin=b"in\n")
    assert (done.code, done.out, done.err) == (3, "in\n", "err\n")
    assert run("exec", box, "sh", "-c", "kill -9 $$").code == 128 + 9
    told = run("exec", "--json", "-n", box, "echo", "hi").json
    assert (told["exit_code"], told["stdout"], told["stderr"]) == (0, "hi\n", "")


def test_exec_passes_flags_after_the_box_to_the_command(box: str, run: Run) -> None:
    assert run("exec", "-e", "X=1", box, "sh", "-c", "echo $X $1", "sh", "--json").out == "1 --json\n"


def test_exec_carries_much_input_and_output(box: str, run: Run) -> None:
    blob = os.urandom(3 << 20)
    done = subprocess.run([*LAYER, "box", "exec", box, "cat"], input=blob, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == blob


def test_exec_that_cannot_run_is_an_error_and_its_time_is_limited(box: str, run: Run) -> None:
    missing = run("exec", box, "no-such-command")
    assert missing.code == 4 and "'no-such-command' was not found" in missing.err
    late = run("exec", "--timeout", 0.3, box, "sleep", 20)
    assert late.code == 9 and "its time was up" in late.err


def test_dropped_output_is_said(run: Run) -> None:
    assert run("create", "small", "--tier", "process", "--output", "1K").code == 0
    done = run("exec", "small", "sh", "-c", "yes | head -c 5000")
    assert len(done.out) == 1024 and "was dropped" in done.err


def test_a_closed_pipe_ends_the_command(box: str, run: Run, host: Host) -> None:
    shown = subprocess.run(
        f"{' '.join(LAYER)} box exec -n {box} yes | head -1", shell=True, capture_output=True, timeout=60, check=False
    )
    assert shown.stdout == b"y\n" and shown.stderr == b""
    wait_until(lambda: not commands(run, box), "the command has ended")


def commands(run: Run, box: str) -> int:
    return int(run("stats", box, "--json").json[0]["metrics"]["commands"])


def test_ctrl_c_interrupts_the_command_and_twice_ends_it(box: str, run: Run) -> None:
    polite = "import os,signal,sys,time\nsignal.signal(2, lambda *a: (os.write(1, b'bye\\n'), sys.exit(7)))\nprint('ready', flush=True)\ntime.sleep(60)"
    deaf = "import signal,time\nsignal.signal(2, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)"
    for code, interrupts, exit_code in ((polite, 1, 7), (deaf, 2, 137)):
        process = subprocess.Popen(
            [*LAYER, "box", "exec", "-n", box, "python3", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        for _ in range(interrupts):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert process.wait(20) == exit_code
        assert (process.stdout.read() == b"bye\n") == (code is polite)
        process.stdout.close()
    wait_until(lambda: not commands(run, box), "the command has ended")


def test_a_killed_exec_takes_its_command_along(box: str, run: Run) -> None:
    process = subprocess.Popen([*LAYER, "box", "exec", "-n", box, "sleep", "300"])
    wait_until(lambda: commands(run, box), "the command runs")
    process.kill()
    process.wait()
    wait_until(lambda: not commands(run, box), "the command has ended")


# -- a terminal -----------------------------------------------------------------------------------------------------------


class Terminal:
    """A person at a terminal of 30 lines and 100 columns, in which `layer` runs."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            [*LAYER, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
            env=os.environ | {"TERM": "xterm"},
        )
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_until(self, pattern: str, seconds: float = 20) -> str:
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.S)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def ask(self, text: str, pattern: str) -> str:
        """Type until the answer comes: a shell that gets its terminal back drops what was typed before."""
        for _ in range(20):
            self.type(text)
            with contextlib.suppress(AssertionError):
                return self.read_until(pattern, 2)
        return self.read_until(pattern, 1)

    def end(self) -> int:
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        assert self.process.poll() is not None, f"it does not end; seen: {self.seen!r}"
        code = self.process.wait(5)
        assert termios.tcgetattr(self.slave) == self.before, "the terminal is not as it was"
        os.close(self.master)
        os.close(self.slave)
        return code


def test_a_shell_is_a_terminal(box: str, run: Run) -> None:
    at = Terminal("box", "shell", box)
    at.read_until(r"[$#] ")
    at.type("stty size; tty >/dev/null && echo is-a-$((1+1))-tty; echo $TERM\r")
    assert "30 100" in at.read_until("is-a-2-tty\r\n") + at.read_until("xterm\r\n")
    at.resize(40, 120)
    at.process.send_signal(signal.SIGWINCH)
    at.ask("stty size\r", "40 120")
    at.type("echo asleep-$((40+2)); sleep 100\r")
    at.read_until("asleep-42")
    at.ask("\x03", r"[$#] ")  # Ctrl-C belongs to the box: the sleep ends, the shell stays
    at.ask("echo still-$((40+2))\r", "still-42")
    at.read_until(r"[$#] ")
    at.type("exit 5\r")
    assert at.end() == 5


def test_a_shell_outlives_its_output_limit(run: Run) -> None:
    assert run("create", "small", "--tier", "process", "--output", "1K").code == 0
    at = Terminal("box", "exec", "-t", "small", "sh", "-c", "yes | head -c 4000; echo the-end")
    at.read_until("the-end")
    assert at.end() == 0


def test_a_hung_up_terminal_ends_the_shell(box: str, run: Run) -> None:
    at = Terminal("box", "shell", box)
    at.read_until(r"[$#] ")
    at.process.send_signal(signal.SIGHUP)
    assert at.end() != 0
    wait_until(lambda: not commands(run, box), "the shell has ended")


def test_output_on_a_terminal_can_not_drive_it_unless_it_was_given_one(box: str, run: Run) -> None:
    nasty = r"printf '\033]0;owned\007\033[2Jshown\n'"
    at = Terminal("box", "exec", "-n", box, "sh", "-c", nasty)
    seen = at.read_until("shown")
    assert at.end() == 0 and "\x1b" not in seen and "\\x1b]0;owned\\x07" in seen
    given = Terminal("box", "exec", "-t", box, "sh", "-c", nasty)
    assert "\x1b]0;owned\x07" in given.read_until("shown")
    assert given.end() == 0


# -- files ----------------------------------------------------------------------------------------------------------------


def test_trees_are_copied_both_ways(box: str, run: Run, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "sub" / "data").write_bytes(bytes(range(256)) * 1000)
    (tree / "link").symlink_to("run.sh")
    into = run("cp", tree, f"{box}:")
    assert (into.code, into.out) == (0, f"Copied 2 files to {box}:/home/user/tree\n")
    names = {entry["path"]: entry["type"] for entry in run("ls", f"{box}:tree", "--depth", 9, "--json").json}
    assert names == {
        "/home/user/tree/link": "link",
        "/home/user/tree/run.sh": "file",
        "/home/user/tree/sub": "directory",
        "/home/user/tree/sub/data": "file",
        "/home/user/tree/sub/empty": "directory",
    }
    assert run("cp", f"{box}:tree", tmp_path / "back").code == 0
    back = tmp_path / "back"
    assert (back / "sub/data").read_bytes() == (tree / "sub/data").read_bytes()
    assert (
        os.access(back / "run.sh", os.X_OK) and os.readlink(back / "link") == "run.sh" and (back / "sub/empty").is_dir()
    )
    (tmp_path / "there").mkdir()
    assert run("cp", f"{box}:tree/run.sh", tmp_path / "there").code == 0
    assert (tmp_path / "there" / "run.sh").read_text() == "#!/bin/sh\n"


def test_standard_input_and_output_are_files_too(box: str, run: Run) -> None:
    assert run("cp", "-", f"{box}:/tmp/note", stdin=b"\x00\x01text").code == 0
    assert run("cp", f"{box}:/tmp/note", "-").out == "\x00\x01text"
    assert run("cp", f"{box}:/tmp", "-").code == 2
    missing = run("cp", f"{box}:/tmp/none", "-")
    assert missing.code == 4 and "/tmp/none" in missing.err
    assert run("ls", f"{box}:/tmp/note").out.splitlines()[2].endswith("note")


# -- snapshots and forks --------------------------------------------------------------------------------------------------


@needs_root
def test_snapshots_are_kept_compared_and_removed(run: Run) -> None:
    assert run("create", "work").code == 0
    run("cp", "-", "work:a", stdin=b"one")
    first = run("snapshot", "work", "--json").json
    run("exec", "work", "sh", "-c", "echo two > a; echo new > b")
    second = run("snapshot", "work", "--json").json
    found = {
        change["path"].lstrip("/"): change["kind"]
        for change in run("snapshots", "diff", first["id"], second["id"], "--json").json
    }
    assert (found["home/user/a"], found["home/user/b"]) == ("changed", "added")
    assert {first["id"], second["id"]} <= {kept["id"] for kept in run("snapshots", "list", "--json").json}
    assert first["id"][:12] in run("snapshots", "list").out
    assert run("create", "again", "--snapshot", first["id"]).code == 0
    assert run("cp", "again:a", "-").out == "one"
    assert run("snapshots", "remove", first["id"][:16], second["id"]).code == 0
    assert run("snapshots", "list", "--json").json == []
    code = "from livinglayer.sandbox import Sandbox; print(Sandbox.connect('work').snapshot(holder='some-layer/1').id)"
    held = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert re.search(rf"{held}.* some-layer\n", run("snapshots", "list").out)
    refused = run("snapshots", "remove", held)
    assert refused.code == 5 and "is held by some-layer" in refused.err
    assert run("snapshots", "remove", held, "--force").code == 0
    assert run("snapshots", "list", "--json").json == []


def test_forks_stay_and_are_apart(box: str, run: Run) -> None:
    run("cp", "-", f"{box}:a", stdin=b"parent")
    forked = run("fork", box, 2)
    assert (forked.code, forked.out) == (0, "Forked work: work-1, work-2\n"), forked.err
    run("cp", "-", "work-1:a", stdin=b"child")
    assert [run("cp", f"{name}:a", "-").out for name in ("work", "work-1", "work-2")] == ["parent", "child", "parent"]
    assert run("fork", "work", "--name", "spare").code == 0
    assert {found["name"] for found in run("list", "--json").json} == {"work", "work-1", "work-2", "spare"}
    taken = run("fork", "work", "--name", "spare")
    assert taken.code == 5 and "exists already" in taken.err


# -- what happened --------------------------------------------------------------------------------------------------------


def test_the_trace_tells_and_follows(box: str, run: Run) -> None:
    run("exec", box, "echo", "hello")
    run("cp", "-", f"{box}:/tmp/note", stdin=b"x")
    events = run("trace", box, "--json").json
    assert [event["event"] for event in events][:3] == ["create", "exec", "file"]
    assert "echo hello" in run("trace", box, "--event", "exec").out
    assert len(run("trace", box, "-n", 1, "--json").json) == 1
    process = subprocess.Popen([*LAYER, "box", "trace", "-f", "--json", box], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [json.loads(process.stdout.readline())["event"] for _ in range(3)] == ["create", "exec", "file"]
    run("exec", box, "echo", "later")
    assert json.loads(process.stdout.readline())["argv"] == ["echo", "later"]
    run("kill", box)
    assert [json.loads(line)["event"] for line in process.stdout][-1] == "end"
    assert process.wait(20) == 0


def test_stats_count(box: str, run: Run) -> None:
    run("exec", box, "true")
    shown = run("stats")
    assert shown.code == 0 and "work" in shown.out and "512M" in shown.out
    [found] = run("stats", box, "--json").json
    assert found["metrics"]["memory"] > 0 and found["metrics"]["state"] == "running"
    process = subprocess.Popen(
        [*LAYER, "box", "stats", box, "--watch", "0.2", "--json"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = [process.stdout.readline() for _ in range(6)]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130 and "".join(first).count('"metrics"') == 2


@needs_root
def test_egress_is_shown_and_changed(run: Run) -> None:
    assert run("create", "work").code == 0
    assert run("egress", "work").out == "work can reach nothing\n"
    assert run("egress", "work", "one.test", '{"host": "two.test", "port": 443}').code == 0
    assert run("egress", "work", "--json").json == ["one.test", {"host": "two.test", "port": 443}]
    assert run("egress", "work", "--none", "--json").json == []


@needs_root
def test_a_secret_is_a_placeholder_in_the_box(run: Run, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cr3t-of-the-file\n")
    rule = json.dumps({"host": "api.test", "secrets": ["TOKEN", "KEY"]})
    made = run(
        "create", "work", "--secret", "TOKEN", "--secret-file", f"KEY={tmp_path / 'key'}", "--egress", rule,
        env={"TOKEN": "s3cr3t-of-the-environment"},
    )  # fmt: skip
    assert made.code == 0, made.err
    inside = run("exec", "work", "env").out
    assert "TOKEN=" in inside and "KEY=" in inside and "s3cr3t" not in inside
    assert "s3cr3t" not in run("trace", "work", "--json").out + run("list", "--json").out


@needs_root
def test_a_port_is_exposed(run: Run) -> None:
    import socket

    assert run("create", "work").code == 0
    server = "import socket\ns=socket.create_server(('127.0.0.1', 8000))\nprint('up', flush=True)\nc=s.accept()[0]\nc.sendall(b'from inside')\nc.close()"
    process = subprocess.Popen([*LAYER, "box", "exec", "-n", "work", "python3", "-c", server], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    where = run("expose", "work", 8000, "--json").json
    with socket.create_connection((where["host"], where["port"]), 10) as connection:
        assert connection.recv(100) == b"from inside"
    assert process.wait(20) == 0


# -- the host -------------------------------------------------------------------------------------------------------------


@needs_root
def test_a_named_box_outlives_the_host(run: Run, host: Host) -> None:
    assert run("create", "work").code == 0
    run("cp", "-", "work:a", stdin=b"still here")
    before = run("list", "--json").json[0]["pid"]
    stopped = subprocess.run([*LAYER, "host", "--stop"], capture_output=True, text=True, timeout=60, check=False)
    assert stopped.returncode == 0 and "named boxes stay" in stopped.stdout
    assert run("cp", "work:a", "-").out == "still here"
    assert run("list", "--json").json[0]["pid"] == before
    again = [
        subprocess.run([*LAYER, "host", "--stop"], capture_output=True, text=True, timeout=60, check=False)
        for _ in "12"
    ]
    assert "No host runs" in again[1].stdout


def test_the_host_runs_in_the_foreground_until_ctrl_c(run: Run, host: Host) -> None:
    subprocess.run([*LAYER, "host", "--stop"], capture_output=True, timeout=60, check=False)
    process = subprocess.Popen([*LAYER, "host"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and str(host.state) in process.stderr.readline()
    wait_until((host.state / "run" / "host.sock").exists, "it listens", 30)
    assert run("list", "--json").json == []
    second = subprocess.run([*LAYER, "host"], capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 5 and "runs already" in second.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def test_doctor_names_what_works(run: Run) -> None:
    done = subprocess.run(
        [*LAYER, "doctor", "process", "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0 and [tier["tier"] for tier in report["tiers"]] == ["process"]
    assert report["tiers"][0]["works"] and "no wall" in report["tiers"][0]["isolation"]
    shown = subprocess.run([*LAYER, "doctor", "process"], capture_output=True, text=True, timeout=120, check=False)
    assert "works" in shown.stdout and "1 of 1 tiers work here: process" in shown.stdout
    wrong = subprocess.run([*LAYER, "doctor", "cloud"], capture_output=True, text=True, timeout=120, check=False)
    assert wrong.returncode == 2 and "tier 'cloud' does not exist" in wrong.stderr


def test_doctor_speaks_when_the_host_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broken = tmp_path / "file" / "state"
    done = subprocess.run(
        [*LAYER, "doctor", "--state", broken, "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    report = json.loads(done.stdout)
    assert done.returncode == 1 and not any(tier["works"] for tier in report["tiers"])
    assert report["checks"][0]["what"] == "host" and "file" in report["checks"][0]["found"]


def test_the_state_can_be_named_on_the_command_line(
    host: Host, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("create", "work", "--tier", "process")
    monkeypatch.setenv("LAYER_STATE", "/nowhere")
    assert main(["box", "list", "--state", str(host.state), "--json"]) == 0
    assert [found["name"] for found in json.loads(capsys.readouterr().out)] == ["work"]
    monkeypatch.setenv("LAYER_STATE", str(host.state))
    host.hang_up()
