"""Terminals: what a person at a shell expects of one."""

from typing import Any

import pytest


def until(process: Any, marker: bytes) -> bytes:
    """What it prints until `marker` has come."""
    seen = b""
    for _, data in process.output():
        seen += data
        if marker in seen:
            return seen
    raise AssertionError(f"it ended without {marker!r}: {seen!r}")


@pytest.mark.core
def test_a_terminal_has_the_size_it_is_given(box: Any) -> None:
    shell = box.start(["/bin/sh"], pty=(30, 100), env={"PS1": "> "})
    shell.write(b"stty size; tty; echo $TERM\n")
    seen = until(shell, b"xterm-256color")
    assert b"30 100" in seen
    assert b"/dev/pts/" in seen
    shell.resize(50, 120)
    shell.write(b"stty size\n")
    until(shell, b"50 120")
    shell.write(b"exit 7\n")
    assert shell.wait().exit_code == 7


@pytest.mark.core
def test_control_c_interrupts_what_runs_in_the_terminal(box: Any) -> None:
    process = box.start("trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.05; done", pty=(24, 80))
    until(process, b"ready")
    process.write(b"\x03")
    assert b"caught" in until(process, b"caught")
    assert process.wait().exit_code == 3
    plain = box.start("echo ready; exec sleep 1000", pty=(24, 80))
    until(plain, b"ready")
    plain.write(b"\x03")
    assert plain.wait().exit_code in (-2, 130)


def test_the_end_of_input_ends_a_reader(box: Any) -> None:
    process = box.start(["cat"], pty=(24, 80))
    process.write(b"line\n")
    until(process, b"line\r\nline\r\n")
    process.close_stdin()
    assert process.wait().exit_code == 0


def test_job_control(box: Any) -> None:
    shell = box.start(["/bin/bash", "--norc", "-i"], pty=(24, 80), env={"PS1": "> "})
    shell.write(b"sh -c 'echo u\"\"p; exec sleep 100'\n")
    until(shell, b"up\r\n")
    shell.write(b"\x1a")
    until(shell, b"Stopped")
    shell.write(b"kill -9 %1; sleep 0.1; jobs\n")
    until(shell, b"Killed")
    shell.write(b"exit 2\n")
    assert shell.wait().exit_code == 2


def test_a_terminal_that_is_killed(box: Any) -> None:
    shell = box.start(["/bin/sh"], pty=(24, 80))
    shell.write(b"sleep 1000 &\nsetsid sleep 1001 &\necho up\n")
    until(shell, b"up")
    shell.kill()
    assert shell.wait().exit_code == -9
