"""A program reaches whoever owns its box at LAYER_URL, and nobody else; what boxes have of ours is there on every tier."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest
from sandbox.callers import ASK, answer, echo, run, serve, waiting

from livinglayer.errors import Invalid, NotFound
from livinglayer.sandbox import Blueprint, Sandbox
from livinglayer.sandbox.once import Once

Make = Callable[..., Any]


@pytest.mark.core
def test_a_program_reaches_its_caller(tier: str) -> None:
    ended = run(blueprint=Blueprint(tier=tier), python=ASK, token="t0ken")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, b"/t0ken/hello", b"")


@pytest.mark.core
def test_a_command_reaches_its_caller(tier: str) -> None:
    ended = run(blueprint=Blueprint(tier=tier), argv=["python3", "-c", ASK], token="t0ken")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, b"/t0ken/hello", b"")


@pytest.mark.core
def test_a_box_that_stays_has_a_channel_too(make: Make) -> None:
    box = make(token="secret", labels={"kind": "worker"})
    asking = box.start(["python3", "-c", ASK])
    with box.channel() as listener:
        assert waiting(listener, 60)
        assert answer(listener)
        assert asking.wait().stdout == "/secret/hello"
        assert not waiting(listener)
    with box.channel() as listener:  # again, by anybody who may ask
        assert box.start(["python3", "-c", ASK]).pid and waiting(listener, 60)


@pytest.mark.core
def test_a_box_reaches_its_own_channel_only(tier: str, make: Make) -> None:
    one, other = make(token="one"), make(token="other")
    knock = """
import os, socket, urllib.parse
own = urllib.parse.urlsplit(os.environ["LAYER_URL"])
for at in {(own.hostname, own.port), ("169.254.170.1", 7700), ("127.0.0.1", 7700), ("10.0.2.2", 7700), ("169.254.171.1", 7700)}:
    try:
        socket.create_connection(at, 5).sendall(b"GET /other/hello HTTP/1.1\\r\\n\\r\\n")
    except OSError:
        pass
"""
    with one.channel() as here, other.channel() as there:
        assert one.run(["python3", "-c", knock]).stderr == ""
        assert waiting(here)
        assert not waiting(there, 0.2)


@pytest.mark.core
def test_the_layer_can_be_imported(box: Any) -> None:
    plain = box.run(["python3", "-c", "import layer; print(layer.__name__, callable(layer.query))"])
    assert (plain.stdout, plain.stderr) == ("layer True\n", "")
    quick = box.python("import layer; print(layer.__name__, callable(layer.query))")
    assert (quick.stdout, quick.stderr) == ("layer True\n", "")
    assert box.python("import layer, layer_run, sys; print(layer_run.__file__)").stderr == ""


@pytest.mark.core
def test_what_is_ours_is_there_and_not_the_users_to_change(tier: str, box: Any) -> None:
    place = box.run('echo -n "$PYTHONPATH"').stdout.decode()
    assert (place == "/opt/livinglayer") == (tier != "process")
    assert box.run('echo -n "$NODE_PATH"').stdout == place
    assert box.run('echo -n "$PATH"').stdout.decode().split(":")[0] == f"{place}/bin"
    assert box.run(["touch", f"{place}/layer.py"]).exit_code != 0
    assert box.run(["touch", f"{place}/new"]).exit_code != 0


def test_a_path_of_ones_own_comes_first(box: Any) -> None:
    found = box.run("python3 -c 'import sys; print(sys.path[1]); import layer'", env={"PYTHONPATH": "/tmp"})
    assert (found.stdout, found.stderr) == ("/tmp\n", "")


def test_boxes_are_found_by_their_labels(make: Make) -> None:
    mark = secrets.token_hex(8)
    one, two = make(labels={"of": mark, "n": "1"}), make(labels={"of": mark, "n": "2"})
    make()
    assert {box.id for box in Sandbox.list(labels={"of": mark})} == {one.id, two.id}
    assert [box.id for box in Sandbox.list(labels={"of": mark, "n": "2"})] == [two.id]
    assert Sandbox.list(labels={"of": mark, "n": "3"}) == []
    assert one.info()["labels"] == {"of": mark, "n": "1"}
    with pytest.raises(Invalid, match="labels"):
        make(labels={"n": 1})


# ---- programs in boxes of their own ----


@pytest.mark.core
def test_input_output_and_exit_code(tier: str) -> None:
    shape = Blueprint(tier=tier)
    ended = run(blueprint=shape, argv=["sh", "-c", "cat; echo no >&2; exit 3"], stdin=b"in\n")
    assert (ended.exit_code, ended.stdout, ended.stderr, ended.reason) == (3, b"in\n", b"no\n", None)
    ended = run(blueprint=shape, python="import sys\nprint(sys.stdin.read(), __name__)\nsys.exit(4)", stdin=b"in")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (4, b"in __main__\n", b"")
    assert ended.usage["cpu"] > 0 and ended.usage["memory"] > 0 and ended.duration > 0


@pytest.mark.core
def test_megabytes_go_in_and_out(tier: str) -> None:
    code = f"data = {'x' * 300_000!r}\nimport sys\nsys.stdout.write(data * 10 + sys.stdin.read())\n"
    ended = run(blueprint=Blueprint(tier=tier), python=code, stdin=b"y" * 2_000_000)
    assert ended.stderr == b""
    assert ended.stdout == b"x" * 3_000_000 + b"y" * 2_000_000 and not ended.truncated


@pytest.mark.core
def test_files_are_there_and_changes_are_told(tier: str) -> None:
    files = {"/home/user/a/in.txt": b"x" * 100_000, "/home/user/b": b""}
    ended = run(blueprint=Blueprint(tier=tier), argv=["sh", "-c", "wc -c < a/in.txt; echo new > out; ls"], files=files)
    assert (ended.stdout, ended.stderr) == (b"100000\na\nb\nout\n", b"")
    changed = {change["path"]: (change["size"], change["digest"]) for change in ended.changes or ()}
    new = "7aa7a5359173d05b63cfd682e3c38487f3cb4f7f1d60659fe59fab1505977d4c"
    assert changed["/home/user/out"] == (4, new)
    assert set(changed) == {*files, "/home/user/out"}


@pytest.mark.core
def test_limits_are_named(tier: str, capabilities: dict[str, Any]) -> None:
    shape = Blueprint(tier=tier, memory=128 << 20)
    ended = run(blueprint=shape, argv=["sleep", "60"], timeout=0.5)
    assert (ended.exit_code, ended.reason) == (-9, "timed out")
    if tier not in ("microvm", "vm"):  # there the guest's kernel counts, and tells nobody
        ended = run(blueprint=shape, python="a = [bytearray(1 << 20) for _ in range(400)]")
        assert (ended.exit_code, ended.reason) == (-9, "out of memory")
    with Once.start(blueprint=shape, tenant="tests", argv=["sleep", "60"]) as once:
        once.kill()
        ended = once.wait()
    assert (ended.exit_code, ended.reason) == (-9, None)


def test_too_many_processes_and_a_full_disk_are_named(tier: str, capabilities: dict[str, Any]) -> None:
    if tier in ("microvm", "vm", "gvisor"):
        pytest.skip("the guest's kernel counts")
    crowd = "import os, sys, time\nfor _ in range(64):\n    if not os.fork(): time.sleep(60)"
    ended = run(blueprint=Blueprint(tier=tier, pids=16), python=crowd)
    assert ended.reason == "too many processes" and b"Resource temporarily unavailable" in ended.stderr
    if "disk" in capabilities["limits"]:
        full = (
            "with open('/home/user/x', 'wb') as file:\n    for _ in range(64): file.write(bytes(1 << 20)); file.flush()"
        )
        ended = run(blueprint=Blueprint(tier=tier, disk=16 << 20), python=full)
        assert ended.reason == "disk full" and ended.exit_code == 1


@pytest.mark.core
def test_what_cannot_run_is_an_error(tier: str) -> None:
    with pytest.raises(NotFound, match="'nonesuch'"):
        Once.start(blueprint=Blueprint(tier=tier), tenant="tests", argv=["nonesuch"])
    with pytest.raises(Invalid, match="either argv or python"):
        Once.start(blueprint=Blueprint(tier=tier), tenant="tests")


def test_a_program_that_is_let_go_of_ends_and_its_box_with_it(tier: str) -> None:
    once = Once.start(blueprint=Blueprint(tier=tier), tenant="tests", argv=["sleep", "600"], labels={"of": "let go"})
    assert [box.id for box in Sandbox.list(labels={"of": "let go"})] == [once.box]
    once.close()
    for _ in range(1000):
        if not Sandbox.list(labels={"of": "let go"}):
            break
    assert Sandbox.list(labels={"of": "let go"}) == []


def test_a_program_has_egress_and_secrets_and_its_requests_are_told(tier: str, capabilities: dict[str, Any]) -> None:
    if not capabilities["egress"]:
        with pytest.raises(Invalid, match="no gateway"):
            Once.start(blueprint=Blueprint(tier=tier, egress=("nowhere.test",)), tenant="t", argv=["true"])
        return
    code = "import urllib.request\ntry: urllib.request.urlopen('http://198.51.100.7/x', timeout=20)\nexcept OSError as e: print(e)"
    with Once.start(blueprint=Blueprint(tier=tier), tenant="tests", argv=["python3", "-c", code]) as once:
        ended = serve(once, echo)
    [told] = [event for event in ended.events if event["event"] == "network" and event.get("method")]
    assert (told["host"], told["path"], told["verdict"]) == ("198.51.100.7", "/x", "deny")
