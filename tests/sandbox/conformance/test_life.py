"""Boxes begin, are found again, and end: once, for good, whoever asks."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sandbox.hosts import Host, running, wait_until

from livinglayer.errors import Conflict, Invalid, LayerError, NotFound
from livinglayer.sandbox import AsyncSandbox, Sandbox


def gone(box: str) -> bool:
    try:
        Sandbox.connect(box)
    except NotFound:
        return True
    return False


@pytest.mark.core
def test_a_box_ends_with_its_block(tier: str) -> None:
    with Sandbox.create(tier) as box:
        assert box.run("echo hello").stdout == "hello\n"
        info = box.info()
        assert (info["tier"], info["state"], info["name"]) == (tier, "running", None)
        assert running(info["pid"])
    assert gone(box.id)
    assert not running(info["pid"])
    with pytest.raises(NotFound, match="there is no box"):
        box.run("true")


@pytest.mark.core
def test_killing_twice_and_by_many_at_once_is_fine(make: Callable[..., Any]) -> None:
    box = make()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: box.kill(), range(8)))
    box.kill()
    assert gone(box.id)


def test_a_command_that_runs_when_its_box_is_killed_hears_of_it(make: Callable[..., Any]) -> None:
    box = make()
    heard: list[LayerError] = []

    def wait() -> None:
        try:
            box.run(["sleep", "100"])
        except LayerError as error:
            heard.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(box.processes, "the command runs")
    box.kill()
    waiting.join(10)
    assert [type(error) for error in heard] == [Conflict]


@pytest.mark.core
def test_a_new_box_finds_nothing_of_those_before_it(make: Callable[..., Any], tier: str) -> None:
    for _ in range(3):
        box = make()
        assert box.run("ls -A | grep planted; ls -A ${TMPDIR:-/tmp} | grep planted").stdout == b""
        box.run("echo x > planted; echo y > ${TMPDIR:-/tmp}/planted; sync")
        if tier != "process":
            assert box.run("rm /etc/group; ls /root; echo x > /root/planted; sync", user="root").stderr == b""
            assert box.files.exists("/home/user/planted")
        box.kill()
        empty = make()  # and one that writes nothing
        assert empty.run("ls -A | grep planted").stdout == b""
        empty.kill()


def test_boxes_are_listed_and_found_by_id_and_name(make: Callable[..., Any]) -> None:
    name = f"found-{os.getpid()}"
    plain, named = make(), make(name=name)
    listed = {box.id: box.name for box in Sandbox.list()}
    assert listed[plain.id] is None
    assert listed[named.id] == name
    assert Sandbox.connect(plain.id).id == plain.id
    assert Sandbox.connect(name).id == named.id
    with pytest.raises(Conflict, match="exists already"):
        make(name=name)
    named.kill()
    make(name=name)  # free again


def test_a_shape_that_makes_no_sense_is_refused_before_anything_is_made(tier: str) -> None:
    before = {box.id for box in Sandbox.list()}
    for shape in (
        {"memory": "lots"},
        {"memory": 1},
        {"pids": 0},
        {"cpu": -1},
        {"disk": True},
        {"colour": "red"},
        {"env": {"A=B": "c"}},
        {"env": {"A": "b\0"}},
        {"name": "Not A Name"},
        {"name": "../../x"},
        {"wall": 0},
        {"ports": [70000]},
        {"mounts": [{"source": "etc", "target": "/x"}]},
        {"mounts": [{"source": "/etc", "target": "/a/../../x"}]},
        {"user": "no such\nuser"},
        {"idle": {"freese": 1}},
    ):
        with pytest.raises(Invalid):
            Sandbox.create(tier, **shape)
    with pytest.raises(Invalid, match="does not exist"):
        Sandbox.create("submarine")
    with pytest.raises(NotFound):
        Sandbox.create(tier, snapshot="0" * 64)
    assert {box.id for box in Sandbox.list()} == before


def test_rules_are_refused_where_no_gateway_keeps_them(tier: str, capabilities: dict[str, Any]) -> None:
    if capabilities["egress"]:
        Sandbox.create(tier, egress=["index.test"]).kill()
    else:
        with pytest.raises(Invalid, match="no gateway"):
            Sandbox.create(tier, egress=["index.test"])


@pytest.mark.core
def test_an_unnamed_box_ends_with_the_process_that_made_it(tier: str, here: Host) -> None:
    maker = here.python("print(Sandbox.create(sys.argv[1]).id, flush=True); input()", tier, wait=False)
    assert maker.stdout
    wait_until(lambda: maker.poll() is not None, "it has met the end of its input", 60)
    box = maker.stdout.read().split()[0]
    wait_until(lambda: gone(box), "the box is gone")


def test_an_unnamed_box_ends_with_a_maker_that_is_killed(tier: str, here: Host) -> None:
    code = "import time; print(Sandbox.create(sys.argv[1]).id, flush=True); time.sleep(100)"
    maker = here.python(code, tier, wait=False)
    assert maker.stdout
    box = maker.stdout.readline().strip()
    assert not gone(box)
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    wait_until(lambda: gone(box), "the box is gone")


@pytest.mark.core
def test_a_named_box_outlives_its_maker(tier: str, here: Host) -> None:
    name = f"stays-{os.getpid()}"
    maker = here.python("box = Sandbox.create(sys.argv[1], name=sys.argv[2]); box.run('echo mine > note')", tier, name)
    assert maker.returncode == 0, maker.stdout and maker.stdout.read()
    with Sandbox.connect(name) as box:
        assert box.run("cat note").stdout == "mine\n"
    assert gone(name)


def test_threads_that_use_a_fresh_client_at_once_keep_their_boxes(tier: str, here: Host) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    boxes = list(pool.map(lambda n: Sandbox.create(sys.argv[1]) if n < 2 else Sandbox.list() and None, range(16)))
import time; time.sleep(0.2)
print([box.run("echo alive").stdout.text for box in boxes if box])
"""
    process = here.python(code, tier)
    assert process.stdout
    assert process.stdout.read().strip() == repr(["alive\n"] * 2)


def test_event_loops_come_and_go(tier: str) -> None:
    async def story() -> bytes:
        async with await AsyncSandbox.create(tier) as box:
            first, second = await asyncio.gather(box.run("echo a"), box.run("echo b"))
            return first.stdout + second.stdout

    assert [asyncio.run(story()) for _ in range(3)] == [b"a\nb\n"] * 3


def test_a_box_meets_its_wall_time(make: Callable[..., Any], tier: str) -> None:
    seconds = 1.5 if tier in ("process", "namespace", "container") else 8.0
    box = make(wall=seconds)
    assert box.run("echo yes").stdout == "yes\n"
    wait_until(lambda: gone(box.id), "its time is up", 20)
    assert {"event": "limit", "limit": "wall", "seconds": seconds}.items() <= next(
        event for event in box.trace() if event["event"] == "limit"
    ).items()
