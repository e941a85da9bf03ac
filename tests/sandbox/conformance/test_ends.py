"""Ends: of boxes by the dozen, of the host's process, of everything. Nothing stays behind."""

import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sandbox.hosts import Host, running, wait_until

from livinglayer.errors import Conflict, LayerError, NotFound, Unavailable
from livinglayer.sandbox import Sandbox


def life(tier: str, number: int) -> None:
    """One box from its beginning to its end, of one kind or another."""
    box = Sandbox.create(tier)
    try:
        assert box.run(f"echo {number} > a; cat a").stdout == f"{number}\n"
        if number % 4 == 1:
            box.start("sleep 1000")
            box.run("setsid sleep 1000 & exit")
        elif number % 4 == 2:
            box.pause()
        elif number % 4 == 3:
            box.python("print(1)")
            next(box.files.watch("/home/user"))
            box.expose(80)
    finally:
        box.kill()


def growth(here: Host, act: Callable[[], None], rounds: int = 4) -> Counter[str]:
    """What the host holds more of after each round of `act`: pools fill at first, a leak never stops."""
    before: Counter[str] | None = None
    more: Counter[str] = Counter()
    for _ in range(rounds):
        act()
        deadline = time.monotonic() + 6
        after = here.census()
        while before is not None and (more := after - before) and time.monotonic() < deadline:
            time.sleep(0.1)
            after = here.census()
        if before is not None and not more:
            return Counter()
        before = after
    return more


@pytest.mark.core
def test_boxes_leave_nothing_behind(tier: str, here: Host) -> None:
    count = {"process": 16, "namespace": 24, "container": 8}.get(tier, 4)

    def lives() -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: life(tier, number), range(count)))

    assert growth(here, lives) == Counter()


def test_boxes_killed_midway_leave_nothing_behind(tier: str, here: Host) -> None:
    code = """
import threading
for n in range(3):
    threading.Thread(target=lambda: [Sandbox.create(sys.argv[1]).run("sleep 1000") for _ in range(3)], daemon=True).start()
import time; time.sleep(float(sys.argv[2]))
import os; os.kill(os.getpid(), 9)
"""

    def lives() -> None:
        for seconds in ("0.01", "0.05", "0.3"):
            here.python(code, tier, seconds)

    assert growth(here, lives) == Counter()


@pytest.mark.core
def test_the_host_is_killed_and_its_successor_takes_over(tier: str, own_host: Host) -> None:
    name = "stays"
    ephemeral, named = Sandbox.create(tier), Sandbox.create(tier, name=name)
    named.files.write("/home/user/note", b"kept")
    named.run("nohup sh -c 'while :; do date +%s%N > tick; sleep 0.05; done' > /dev/null 2>&1 &")
    wait_until(lambda: named.files.exists("/home/user/tick"), "it ticks", 30)
    pids = ephemeral.info()["pid"], named.info()["pid"]
    own_host.crash()
    wait_until(lambda: not running(pids[0]), "the ephemeral box went with the host", 20)

    def found() -> Any:
        try:
            return Sandbox.connect(name)
        except Unavailable:
            return None

    wait_until(found, "a new host answers", 30)
    with pytest.raises(NotFound):
        Sandbox.connect(ephemeral.id)
    again = found()
    assert again.id == named.id
    if tier == "namespace":
        assert again.info()["state"] == "running"
        assert again.info()["pid"] == pids[1]
        tick = again.files.read("/home/user/tick")
        wait_until(lambda: again.files.read("/home/user/tick") != tick, "it ticks on")
    elif again.info()["state"] == "suspended":
        assert not running(pids[1])
        with pytest.raises(Conflict, match="is suspended"):
            again.run("true")
        again.resume()
    assert again.files.read("/home/user/note") == b"kept"
    assert again.run("echo well").stdout == "well\n"
    again.kill()
    assert Sandbox.list() == []


def test_a_host_that_is_told_to_stop_keeps_named_boxes(tier: str, own_host: Host, capabilities: dict[str, Any]) -> None:
    ephemeral, named = Sandbox.create(tier), Sandbox.create(tier, name="stays")
    named.files.write("/home/user/note", b"kept")
    pid = ephemeral.info()["pid"]
    own_host.stop()
    assert not running(pid)
    again = None
    for _ in range(20):
        try:
            again = Sandbox.connect("stays")
            break
        except Unavailable:
            time.sleep(0.1)
    assert again is not None
    again.resume()
    assert again.files.read("/home/user/note") == b"kept"
    with pytest.raises(NotFound):
        Sandbox.connect(ephemeral.id)
    again.kill()


def test_a_second_host_for_the_same_state_is_refused(own_host: Host) -> None:
    Sandbox.create("process").kill()
    import subprocess
    import sys

    second = subprocess.run(
        [sys.executable, "-m", "livinglayer.sandbox.host"],
        env=os.environ | own_host.environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert second.returncode == Conflict.exit_code
    assert "runs already" in second.stderr
    assert Sandbox.list() == []


def test_what_an_earlier_host_left_is_removed_at_start(own_host: Host) -> None:
    box = Sandbox.create("namespace")
    box.run("echo x > a")
    own_host.crash()
    orphan = own_host.state / "run/boxes/bnobody"
    orphan.mkdir(parents=True)
    (own_host.state / "boxes/broken.json").write_text("{")
    for _ in range(20):
        try:
            assert Sandbox.list() == []
            break
        except Unavailable:
            time.sleep(0.1)
    assert not orphan.exists()
    assert list((own_host.state / "boxes").iterdir()) == []
    time.sleep(1)
    with_warm = {entry.name for entry in (own_host.state / "disk/boxes").iterdir()}
    assert box.id not in with_warm
    with pytest.raises(LayerError):
        box.run("true")
