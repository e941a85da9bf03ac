"""Commands: what goes in, what comes out, how they end. One that can't run is an error; one that fails is a result."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sandbox.hosts import Host, wait_until

from livinglayer.errors import Denied, Invalid, LimitExceeded, NotFound, TimedOut
from livinglayer.sandbox import Sandbox

LARGE = 24 << 20


@pytest.mark.core
def test_argv_is_taken_as_it_is(box: Any) -> None:
    words = ["printf", "%s|", "a b", "", "$HOME", "*", "ünï", "line\nbreak", "'\"\\"]
    assert box.run(words).stdout == "a b||$HOME|*|ünï|line\nbreak|'\"\\|"


@pytest.mark.core
def test_a_text_is_for_the_shell(box: Any) -> None:
    result = box.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr, result.ok) == (3, b"out\n", b"err\n", False)
    assert 0 < result.duration < 30


@pytest.mark.core
def test_stdin_reaches_the_command(box: Any) -> None:
    assert box.run(["cat"], stdin=b"\0bytes\xff").stdout == b"\0bytes\xff"
    assert box.run(["cat"], stdin="text").stdout == "text"
    assert box.run(["cat"]).stdout == b""  # none is an empty one


def test_large_stdin_flows_through_a_command_that_answers_as_it_reads(make: Callable[..., Any], tier: str) -> None:
    data = os.urandom(1 << 20) * (LARGE >> 20 if tier in ("process", "namespace", "container") else 6)
    box = make(output=LARGE)
    assert box.run(["cat"], stdin=data).stdout == data


def test_large_stdin_for_a_command_that_does_not_read_is_dropped(box: Any) -> None:
    assert box.run(["true"], stdin=bytes(LARGE)).exit_code == 0
    with pytest.raises(NotFound):
        box.run(["no-such-command"], stdin=bytes(LARGE))
    assert box.run(["echo", "still well"]).stdout == "still well\n"


@pytest.mark.core
def test_exit_codes_and_signals(box: Any) -> None:
    assert [box.run(f"exit {code}").exit_code for code in (0, 1, 127, 255)] == [0, 1, 127, 255]
    assert [box.run(f"kill -{name} $$").exit_code for name in ("TERM", "KILL", "SEGV")] == [-15, -9, -11]


def test_cwd(box: Any, spot: str) -> None:
    assert box.run("pwd", cwd=spot).stdout.text.strip().endswith(spot)
    assert box.run("pwd").stdout.text.strip().endswith("/home/user")
    with pytest.raises(NotFound, match=r"working directory|No such file"):
        box.run("pwd", cwd=spot + "/missing")
    box.files.write(spot + "/file", b"")
    with pytest.raises(Invalid, match="Not a directory"):
        box.run("pwd", cwd=spot + "/file")


def test_env(make: Callable[..., Any]) -> None:
    box = make(env={"A": "from the box", "B": "b"})
    assert box.run('echo "$A,$B,$C"', env={"A": "given", "C": "ü ="}).stdout == "given,b,ü =\n"
    assert box.run('echo "$LAYER_BOX"').stdout == box.id + "\n"
    with pytest.raises(Invalid):
        box.run("true", env={"A B": "c"})


def test_the_environment_of_the_host_is_not_the_box_s(box: Any, here: Host) -> None:
    seen = box.run("env; tr '\\0' '\\n' < /proc/1/environ || true").stdout
    assert "LAYER_STATE" not in seen
    assert "PYTEST" not in seen


@pytest.mark.core
def test_users(box: Any, tier: str) -> None:
    if tier == "process":  # one user, whoever is asked for
        own = box.run("id -u").stdout
        assert own != "0\n" or os.geteuid()
        assert [box.run("id -u", user=user).stdout for user in ("root", "user", "1234")] == [own] * 3
        return
    found = [box.run("id -u; id -g; echo $HOME", user=user).stdout.text.split() for user in ("root", "user", "1234:77")]
    assert found == [["0", "0", "/root"], ["1000", "1000", "/home/user"], ["1234", "77", "/"]]
    assert box.run("id -un").stdout == "user\n"
    with pytest.raises(NotFound, match="has no user 'nobody-here'"):
        box.run("id", user="nobody-here")


@pytest.mark.core
def test_a_command_out_of_time_is_killed_and_what_it_printed_is_told(box: Any) -> None:
    began = time.monotonic()
    with pytest.raises(TimedOut, match="its time was up") as caught:
        box.run("echo so far; echo so bad >&2; sleep 100", timeout=1.5)
    assert time.monotonic() - began < 10
    assert caught.value.details["stdout"] == "so far\n"
    assert caught.value.details["stderr"] == "so bad\n"
    assert box.processes() == []


def test_what_a_timed_out_command_started_is_killed_too(box: Any, spot: str) -> None:
    with pytest.raises(TimedOut):
        box.run(
            "(trap '' TERM HUP; setsid sh -c 'while :; do date +%N > tick; sleep 0.05; done') & wait",
            timeout=1,
            cwd=spot,
        )
    time.sleep(0.3)
    before = box.files.read(spot + "/tick")
    time.sleep(0.5)
    assert box.files.read(spot + "/tick") == before


@pytest.mark.core
def test_a_command_that_can_t_run_is_an_error(box: Any, spot: str) -> None:
    with pytest.raises(NotFound, match="'no-such-command' was not found"):
        box.run(["no-such-command"])
    with pytest.raises(NotFound, match=r"'\./missing'"):
        box.run(["./missing"], cwd=spot)
    box.files.write(spot + "/plain", "#!/bin/sh\n")
    with pytest.raises(Denied, match="Permission denied"):
        box.run(["./plain"], cwd=spot)
    box.files.write(spot + "/garbage", b"\x7fELF, or not", mode=0o755)
    with pytest.raises(Invalid, match="Exec format error"):
        box.run(["./garbage"], cwd=spot)
    with pytest.raises(Denied):
        box.run([spot if box.tier != "process" else "/tmp"])
    for argv in ([], ["a\0b"], [1]):
        with pytest.raises(Invalid):
            box.run(argv)
    with pytest.raises(Invalid):
        box.run("true", timeout=-1)


def test_arguments_beyond_the_limit_are_refused_by_name(box: Any) -> None:
    assert len(box.run(["printf", "%s", *["x" * 60_000] * 20]).stdout) == 1_200_000  # more than a frame
    [told] = [event["argv"] for event in box.trace() if event["event"] == "exec"][-1:]
    assert told[:2] == ["printf", "%s"] and told[2].endswith("(60000 characters)")
    assert box.run("echo ${#BIG}", env={"BIG": "x" * 100_000}).stdout == "100000\n"
    with pytest.raises(Invalid, match="Argument list too long"):  # the kernel's own limit
        box.run("true", env={"BIG": "x" * 200_000})
    with pytest.raises(LimitExceeded, match="more than"):
        box.run(["echo", *["x" * 60_000] * 80])
    assert box.run("echo well").stdout == "well\n"


def test_a_gigabyte_of_output_is_cut_and_does_not_fill_the_host(
    make: Callable[..., Any], tier: str, here: Host
) -> None:
    box = make(output="4M")
    status, peak = Path(f"/proc/{here.pid}/status"), Path(f"/proc/{here.pid}/clear_refs")
    peak.write_text("5")  # the peak from here on

    def resident() -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) << 10

    before = resident()
    size = 1_000_000_000 if tier in ("process", "namespace", "container") else 100_000_000
    result = box.run(f"head -c {size} /dev/zero; echo done >&2")
    assert (result.exit_code, len(result.stdout), result.stderr, result.truncated) == (0, 4 << 20, b"done\n", True)
    assert resident() - before < 64 << 20
    assert [event["limit"] for event in box.trace() if event["event"] == "limit"] == ["output"]
    assert not box.run("echo little").truncated


@pytest.mark.core
def test_output_is_heard_as_it_comes(box: Any) -> None:
    heard: list[tuple[float, str]] = []
    result = box.run(
        "echo one; sleep 0.5; echo two >&2; sleep 0.5; echo three",
        on_stdout=lambda data: heard.append((time.monotonic(), data.decode())),
        on_stderr=lambda data: heard.append((time.monotonic(), data.decode())),
    )
    assert [words for _, words in heard] == ["one\n", "two\n", "three\n"]
    assert heard[1][0] - heard[0][0] > 0.2 < heard[2][0] - heard[1][0]
    assert (result.stdout, result.stderr) == ("one\nthree\n", "two\n")


@pytest.mark.core
def test_a_background_child_that_holds_stdout_keeps_nobody_waiting(box: Any) -> None:
    began = time.monotonic()
    assert box.run("(sleep 4; echo late) & echo now").stdout == "now\n"
    assert time.monotonic() - began < 3
    assert box.run("echo next").stdout == "next\n"


@pytest.mark.core
def test_a_background_command_goes_on_by_itself(box: Any, spot: str) -> None:
    process = box.start("echo begun; read line; echo got $line; exit 5", stdin=True, cwd=spot)
    assert [(found["id"], found["pid"]) for found in box.processes()] == [(process.id, process.pid)]
    assert box.run("echo beside").stdout == "beside\n"
    process.write(b"words\n")
    result = process.wait()
    assert (result.exit_code, result.stdout) == (5, "begun\ngot words\n")
    assert box.processes() == []


def test_a_background_command_that_can_t_start_is_an_error(box: Any) -> None:
    with pytest.raises(NotFound):
        box.start(["no-such-command"])
    assert box.processes() == []


@pytest.mark.core
def test_signals_reach_a_background_command(box: Any) -> None:
    process = box.start("trap 'echo caught; exit 4' USR1; echo ready; while :; do sleep 0.05; done")
    for _, data in process.output():
        if b"ready" in data:
            break
    process.signal(signal.SIGUSR1)
    assert (process.wait().exit_code, process.wait().stdout) == (4, "ready\ncaught\n")
    sleeper = box.start("sleep 100")
    sleeper.kill()
    assert sleeper.wait().exit_code == -9


def test_another_client_follows_a_command(box: Any, here: Host) -> None:
    process = box.start("echo before; read line; echo $line; exit 6", stdin=True)
    code = """
process = Sandbox.connect(sys.argv[1]).attach(int(sys.argv[2]))
process.write(b"from elsewhere\\n")
result = process.wait()
print(result.exit_code, result.stdout)
"""
    other = here.python(code, box.id, str(process.id))
    assert other.stdout
    assert other.stdout.read() == "6 before\nfrom elsewhere\n\n"
    assert process.wait().exit_code == 6
    with pytest.raises(NotFound, match="runs no command"):
        box.attach(process.id)


@pytest.mark.core
def test_how_a_background_command_ended_is_told_afterwards(box: Any) -> None:
    processes = [box.start(f"echo {number}; exit {number}") for number in range(4)]
    wait_until(lambda: not box.processes(), "they have ended")
    assert [(done.exit_code, done.stdout) for done in (process.wait() for process in processes)] == [
        (number, f"{number}\n".encode()) for number in range(4)
    ]


@pytest.mark.core
def test_what_a_background_command_printed_is_read_piece_by_piece(box: Any) -> None:
    process = box.start("echo one; echo oops >&2; read line; echo $line; exit 5", stdin=True)

    def heard(after: int = 0) -> bytes:
        return b"".join(data for stream, data, _ in box.printed(process.id, stdout=after).pieces if stream == "stdout")

    wait_until(lambda: heard() == b"one\n" and len(box.printed(process.id).pieces) == 2, "it printed")
    first = box.printed(process.id)
    assert {(stream, data) for stream, data, _ in first.pieces} == {("stdout", b"one\n"), ("stderr", b"oops\n")}
    assert (first.over, first.exit_code, first.lost) == (False, None, {"stdout": 0, "stderr": 0})
    assert box.printed(process.id, stdout=2).pieces[0][1] in (b"e\n", b"oops\n")
    process.write(b"two\n")
    wait_until(lambda: box.printed(process.id).over, "it has ended")
    last = box.printed(process.id, stdout=4, stderr=5)
    assert ([data for _, data, _ in last.pieces], last.exit_code, last.error) == ([b"two\n"], 5, None)
    with pytest.raises(NotFound, match="runs no command"):
        box.printed(process.id + 1000)


def test_closing_stdin_ends_what_reads_it(box: Any) -> None:
    process = box.start(["wc", "-c"], stdin=True)
    process.write(b"12345")
    process.write(bytes(3 << 20))
    process.close_stdin()
    assert process.wait().stdout.text.strip() == str(5 + (3 << 20))


def test_a_caller_that_stops_listening_does_not_end_a_background_command(box: Any, spot: str, here: Host) -> None:
    code = "b = Sandbox.connect(sys.argv[1]); b.start('sleep 1; echo done > end', cwd=sys.argv[2]); print('left')"
    assert here.python(code, box.id, spot).returncode == 0
    wait_until(lambda: box.files.exists(spot + "/end"), "it went on")
    wait_until(lambda: not box.processes(), "it has ended")


@pytest.mark.core
def test_many_commands_at_once(box: Any, tier: str) -> None:
    count = 40 if tier in ("process", "namespace", "container") else 8
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(lambda n: box.run(f"echo {n}; sleep 0.1; echo {n} >&2; exit {n}"), range(count)))
    assert [(r.exit_code, r.stdout, r.stderr) for r in results] == [
        (n, f"{n}\n".encode(), f"{n}\n".encode()) for n in range(count)
    ]


def test_usage_is_told(box: Any) -> None:
    usage = box.run(["python3", "-c", "x = bytearray(30 << 20)\nfor i in range(200000): x[i] = 1"]).usage
    assert usage["user"] > 0
    assert usage["max_resident"] > 30 << 20


@pytest.mark.core
def test_python(box: Any, spot: str) -> None:
    result = box.python(
        "import sys, os\nprint(sys.argv[1:], os.getcwd().endswith(sys.argv[1]))\nprint('err', file=sys.stderr)\nsys.exit(9)",
        args=[spot, "b c"],
        cwd=spot,
    )
    assert (result.exit_code, result.stdout, result.stderr) == (9, f"{[spot, 'b c']!r} True\n".encode(), b"err\n")


def test_python_knows_whose_it_is_as_commands_do(box: Any) -> None:
    names = ("HOME", "USER", "LOGNAME")
    for given in ({}, {"LOGNAME": "somebody"}):
        code = f"import os; print(*[os.environ[name] for name in {names}])"
        assert box.python(code, env=given).stdout == box.run("echo $HOME $USER $LOGNAME", env=given).stdout


def test_python_is_like_an_interpreter_of_its_own(box: Any, tier: str) -> None:
    assert box.python("import sys; print(sys.stdin.read())", stdin="in").stdout == "in\n"
    assert box.python("print(__name__)").stdout == "__main__\n"
    failed = box.python("def f():\n    raise ValueError('wrong')\nf()")
    assert failed.exit_code == 1
    assert failed.stderr.text.splitlines()[-1] == "ValueError: wrong"
    broken = box.python("def (:")
    assert (broken.exit_code, broken.stderr.text.splitlines()[-1]) == (1, "SyntaxError: invalid syntax")
    assert box.python("import os; print(os.environ['X'])", env={"X": "y"}).stdout == "y\n"
    assert box.python("import os; os.kill(os.getpid(), 9)").exit_code == -9
    box.python("import builtins; builtins.planted = 1")
    assert "NameError" in box.python("print(planted)").stderr
    with pytest.raises(TimedOut) as caught:
        box.python("print('so far', flush=True)\nwhile True: pass", timeout=1.5)
    assert caught.value.details["stdout"] == "so far\n"
    if tier != "process":
        assert box.python("import os; print(os.getuid())").stdout == "1000\n"
        assert box.python("import os; print(os.getuid())", user="root").stdout == "0\n"
    first, second = (box.python("import random, uuid, os; print(random.random(), os.urandom(4))") for _ in range(2))
    assert first.stdout != second.stdout


SLEEPERS = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if b"sleep\\x001000" in open(f"/proc/{pid}/cmdline", "rb").read() and os.stat(f"/proc/{pid}").st_uid == os.getuid():
            print(pid)
    except OSError:
        pass
"""


def slept(box: Any) -> str:
    """The processes of the box's user that sleep for a thousand seconds."""
    return str(box.run(["python3", "-c", SLEEPERS]).stdout)


def test_an_interrupted_caller_takes_its_command_along(make: Callable[..., Any], here: Host) -> None:
    box = make()
    for number in (signal.SIGINT, signal.SIGKILL):
        code = "Sandbox.connect(sys.argv[1]).run('echo on > began; sleep 1000')"
        caller = here.python(code, box.id, wait=False)
        wait_until(lambda: box.processes(), "the command runs", 30)
        caller.send_signal(number)
        caller.wait(20)
        wait_until(lambda: not box.processes(), "the command is gone")
        wait_until(lambda: not slept(box), "so is what it started")
    assert Sandbox.connect(box.id).run("echo well").stdout == "well\n"


def test_an_interrupted_caller_takes_its_own_box_along(tier: str, here: Host) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        code = "box = Sandbox.create(sys.argv[1]); print(box.id, flush=True); box.run('sleep 1000')"
        caller = here.python(code, tier, wait=False)
        assert caller.stdout
        box = Sandbox.connect(caller.stdout.readline().strip())
        wait_until(box.processes, "the command runs", 30)
        caller.send_signal(number)
        caller.wait(20)
        id = box.id
        wait_until(lambda id=id: id not in {found.id for found in Sandbox.list()}, "the box is gone")
