"""Pause, suspend, snapshot, fork: what is kept, and that nothing of it is lost or shared."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from sandbox.hosts import wait_until

from livinglayer.errors import Conflict, Invalid, NotFound
from livinglayer.sandbox import Sandbox

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > count.new; mv count.new count; sleep 0.05; done"


def start_counter(box: Any) -> Callable[[], int]:
    """A daemon of the box's own that counts twenty times a second; its count."""
    box.run(f"nohup sh -c '{COUNTER}' > /dev/null 2>&1 &")
    wait_until(lambda: box.files.exists("/home/user/count"), "it counts", 30)

    def count() -> int:
        return int(box.files.read("/home/user/count"))

    return count


@pytest.mark.core
def test_a_paused_box_stands_still(make: Callable[..., Any]) -> None:
    box = make()
    count = start_counter(box)
    box.pause()
    assert box.info()["state"] == "paused"
    box.pause()  # again is fine
    for act in (lambda: box.run("true"), lambda: box.files.read("/home/user/count"), lambda: box.port(80)):
        with pytest.raises(Conflict, match="is paused") as caught:
            act()
        assert "resume" in caught.value.hint
    time.sleep(0.2)
    box.resume()
    before = count()
    box.pause()
    time.sleep(1.5)
    box.resume()
    assert count() - before < 15
    wait_until(lambda: count() > before + 15, "it counts on", 30)
    box.resume()
    box.pause()
    box.kill()


def test_a_command_that_runs_when_its_box_is_paused_goes_on_after(make: Callable[..., Any]) -> None:
    box = make()
    process = box.start("for i in 1 2 3 4 5; do echo $i; sleep 0.2; done")
    time.sleep(0.3)
    box.pause()
    time.sleep(0.5)
    box.resume()
    assert process.wait().stdout == "1\n2\n3\n4\n5\n"


@pytest.mark.core
def test_suspend_keeps_what_the_tier_says(make: Callable[..., Any], capabilities: dict[str, Any]) -> None:
    box = make()
    count = start_counter(box)
    box.files.write("/home/user/note", b"kept")
    before = count()
    assert box.suspend() == {"memory": capabilities["suspend_memory"]}
    assert box.info()["state"] == "suspended"
    assert box.info()["pid"] is None
    with pytest.raises(Conflict, match="is suspended"):
        box.run("true")
    assert box.suspend() == {"memory": capabilities["suspend_memory"]}
    box.resume()
    assert box.files.read("/home/user/note") == b"kept"
    assert box.run("echo well").stdout == "well\n"
    if capabilities["suspend_memory"]:
        wait_until(lambda: count() > before + 5, "it counts on", 30)
    else:
        still = count()
        time.sleep(0.5)
        assert count() == still


def test_a_suspended_box_can_be_killed(make: Callable[..., Any]) -> None:
    box = make()
    box.suspend()
    box.kill()
    with pytest.raises(NotFound):
        box.info()


def test_killing_a_suspended_box_leaves_the_limits_of_others(
    make: Callable[..., Any], capabilities: dict[str, Any]
) -> None:
    boxes = [make() for _ in range(3)]
    for box in boxes:
        box.suspend()
    others = [make(pids=40) for _ in range(3)]  # on what was given back
    for box in boxes:
        box.kill()
    for other in others:
        assert other.metrics()["pids"] >= 1
        if "pids" in capabilities["limits"] and other.tier in ("process", "namespace", "container"):
            forks = "import os, time\nfor n in range(60):\n    if not os.fork(): time.sleep(1000)"
            assert b"BlockingIOError" in other.run(["python3", "-c", forks]).stderr


def test_nothing_is_lost_over_ten_suspensions_and_a_snapshot(make: Callable[..., Any]) -> None:
    box = make()
    expected: dict[str, bytes] = {}

    def check(of: Any) -> None:
        found = {entry.name: of.files.read(entry.path) for entry in of.files.list("/home/user/notes")}
        assert found == expected

    for step in range(10):
        expected |= {f"n{step}": b"written by the host", "same": f"step {step}".encode(), f"c{step}": b"by the box\n"}
        box.files.write(f"/home/user/notes/n{step}", expected[f"n{step}"])
        box.files.write("/home/user/notes/same", expected["same"])
        assert box.run(f"echo by the box > notes/c{step}").exit_code == 0
        if step == 4:
            box.files.remove("/home/user/notes/n0")
            del expected["n0"]
        box.suspend()
        box.resume()
        check(box)
    snapshot = box.snapshot()
    check(make(snapshot=snapshot.id))
    check(box)


@pytest.mark.core
def test_a_box_begins_where_a_snapshot_was_taken(make: Callable[..., Any], tier: str) -> None:
    box = make()
    box.run("mkdir -p d; echo before > d/a; echo gone > b; ln -s d/a l; chmod 750 d; printf x > \"$(printf '\\377')\"")
    box.run("rm b; rm -rf /home/user/.bashrc")
    snapshot = box.snapshot()
    assert len(snapshot.id) >= 32
    box.run("echo after > d/a; echo new > c")
    other = make(snapshot=snapshot.id)
    assert other.run("cat l; ls; stat -c %a d; echo mine >> d/a; cat d/a").stdout.text.split("\n") == [
        "before", "d", "l", *(["\ufffd"]), "750", "before", "mine", "",
    ]  # fmt: skip
    assert box.run("cat d/a c").stdout == "after\nnew\n"
    assert make(snapshot=snapshot).run("cat d/a").stdout == "before\n"
    second = other.snapshot()
    assert make(snapshot=second.id).run("cat d/a").stdout == "before\nmine\n"
    if tier != "process":
        assert make(snapshot=second.id).run("whoami; test -w d && echo writable").stdout == "user\nwritable\n"


def test_a_snapshot_of_nothing_new_is_the_same(make: Callable[..., Any]) -> None:
    box = make()
    box.run("echo x > a")
    first = box.snapshot()
    assert box.snapshot().id == first.id


@pytest.mark.core
def test_forks_go_their_own_ways(make: Callable[..., Any], capabilities: dict[str, Any]) -> None:
    box = make()
    box.run("echo common > a")
    count = start_counter(box) if capabilities["fork_memory"] else None
    forks = box.fork(3)
    try:
        assert len({box.id, *(fork.id for fork in forks)}) == 4
        for number, fork in enumerate(forks):
            assert fork.run(f"cat a; echo {number} > a").stdout == "common\n"
            assert fork.info()["parent"] == box.id
        box.run("echo parent > a")
        assert [fork.run("cat a").stdout for fork in forks] == [b"0\n", b"1\n", b"2\n"]
        assert box.run("cat a").stdout == "parent\n"
        if count:
            before = int(forks[0].files.read("/home/user/count"))
            wait_until(lambda: int(forks[0].files.read("/home/user/count")) > before + 3, "the fork counts on", 30)
            wait_until(lambda: count() > before + 3, "so does its parent", 30)
        forks[0].kill()
        assert forks[1].run("cat a").stdout == "1\n"
    finally:
        for fork in forks:
            fork.kill()
    for wrong in (0, -1, 1.5, "2", 100_000):
        with pytest.raises(Invalid):
            box.fork(wrong)


def test_a_fork_of_a_writing_box_sees_no_later_write(make: Callable[..., Any]) -> None:
    box = make()
    count = start_counter(box)
    (fork,) = box.fork()
    try:
        wait_until(lambda: count() > 40, "the parent counts on", 60)
        if not Sandbox.capabilities(box.tier)["fork_memory"]:
            first = fork.files.read("/home/user/count")
            time.sleep(0.3)
            assert fork.files.read("/home/user/count") == first
    finally:
        fork.kill()


def test_idle_boxes_freeze_and_wake_on_touch(make: Callable[..., Any]) -> None:
    box = make(idle={"freeze": 1})
    count = start_counter(box)
    before, began = count(), time.monotonic()
    wait_until(lambda: box.info()["state"] == "sleeping", "it sleeps")
    time.sleep(2)
    counted = count() - before  # reading it woke it
    assert counted < 20 * (time.monotonic() - began - 1.5)
    assert box.info()["state"] == "running"
    wait_until(lambda: box.info()["state"] == "sleeping", "it sleeps again")
    assert box.run("echo awake").stdout == "awake\n"
    assert [event["step"] for event in box.trace() if event["event"] == "idle"] == ["freeze", "freeze"]


def test_the_lower_steps_of_the_idle_ladder(make: Callable[..., Any], capabilities: dict[str, Any]) -> None:
    box = make(idle={"checkpoint": 1, "archive": 4 if capabilities["suspend_memory"] else 1})
    count = start_counter(box)
    box.files.write("/home/user/note", b"kept")
    wait_until(lambda: box.info()["state"] == "sleeping", "it sleeps", 20)
    before = count()  # woken
    if capabilities["suspend_memory"]:
        wait_until(lambda: count() > before, "it counts on", 20)
    wait_until(lambda: any(event.get("step") == "archive" for event in box.trace()), "its memory goes", 30)
    assert box.files.read("/home/user/note") == b"kept"
    still = count()
    time.sleep(0.5)
    assert count() == still


def test_a_box_that_a_person_paused_is_not_woken_by_a_touch(make: Callable[..., Any]) -> None:
    box = make(idle={"freeze": 1})
    box.pause()
    time.sleep(1.5)
    with pytest.raises(Conflict):
        box.run("true")
    box.resume()
