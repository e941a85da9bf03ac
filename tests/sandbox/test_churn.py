"""Boxes come and go by the thousand, some torn away midway, and nothing of them stays; thousands stand idle at once, for little."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox.homes import Home, home, list_directory, read
from sandbox.registries import Answer, Server

from livinglayer.sandbox import Sandbox

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and namespaces need root")

# A client: boxes made, used and killed, one in forty while a command runs in it. It says each number when it is done with it.
CLIENT = """
import random
turns, chance = int(sys.argv[1]), random.Random(int(sys.argv[2]))
for turn in range(turns):
    box = Sandbox.create()
    if chance.random() < 0.025:
        box.start("sleep 60 & sleep 60")
        box.kill()
    else:
        done = box.python("print(6 * 7)") if turn % 20 == 0 else box.run(["true"])
        assert done.exit_code == 0, done
        if turn % 50 == 0:
            box.fork(2)  # left to the end of the client
        box.kill()
    print(turn, flush=True)
"""


class Torn(threading.Thread):
    """Runs a client over and over until its turns are done, killing it now and then in the middle of one."""

    def __init__(self, own: Home, turns: int, seed: int) -> None:
        super().__init__()
        self.own, self.turns, self.chance = own, turns, random.Random(seed)
        self.done, self.killed, self.wrong = 0, 0, ""

    def run(self) -> None:
        while self.done < self.turns and not self.wrong:
            doomed = self.chance.randint(1, 80) if self.turns - self.done > 1 else 0  # one turn in forty, on average
            client = self.own.python(CLIENT, str(self.turns - self.done), str(self.chance.random())[2:10], wait=False)
            assert client.stdout is not None
            said = []
            for line in client.stdout:
                if not line.strip().isdigit():
                    said.append(line)
                    continue
                self.done += 1
                if int(line) + 1 == doomed:
                    time.sleep(self.chance.random() * 0.012)
                    client.send_signal(signal.SIGKILL)
                    self.killed += 1
                    self.done += 1
                    break
            code = client.wait(60)
            client.stdout.close()
            if code not in (0, -signal.SIGKILL):
                self.wrong = "".join(said)


def kernel_counts() -> Counter[str]:
    """Objects of the whole machine by which the kernel itself would show a leak; others use the machine too, so they are only printed."""
    counts: Counter[str] = Counter()
    for line in read("/proc/slabinfo").splitlines():
        name, *rest = line.split()
        if name in ("net_namespace", "pid_namespace", "user_namespace", "mnt_cache", "ovl_inode"):
            counts[name] = int(rest[0])
    return counts


def churn(own: Home, turns: int) -> None:
    """`turns` boxes by two clients, then not one thing more than before."""
    fill_pools(own)
    before, kernel, resident = own.census(), kernel_counts(), memory_of(own)
    began = time.monotonic()
    clients = [Torn(own, turns // 2, seed) for seed in (1, 2)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seconds = time.monotonic() - began
    assert [client.wrong for client in clients] == ["", ""]
    left = own.left_since(before, 30)
    print(
        f"\n{turns} boxes by 2 clients in {seconds:.1f} s, {sum(client.killed for client in clients)} clients killed midway;"
        f" left: {left or 'nothing'}; kernel objects: {dict(kernel)} → {dict(kernel_counts())};"
        f" resident KB: {resident} → {memory_of(own)}; log: {len(own.log)} bytes"
    )
    assert left == {}
    assert own.log == "", own.log[-2000:]


def fill_pools(own: Home) -> None:
    """What a host keeps for the next box it keeps up to a limit: from here on it has all it will ever keep, and its zygote."""
    boxes = [Sandbox.create() for _ in range(100)]
    for box in boxes[:3]:
        box.python("pass")
    for box in boxes:
        box.kill()
    own.hang_up()
    settle(own)


def settle(own: Home) -> None:
    """Wait until what the host makes ahead has been made."""
    last: Counter[str] = Counter()
    for _ in range(50):
        own.commit()
        time.sleep(0.3)
        now = own.census()
        if now == last:
            return
        last = now


def memory_of(own: Home) -> dict[str, int]:
    """Resident KB of the processes that outlive boxes."""
    found = {}
    for name, pid in own.servants.items():
        line = next(
            (line for line in read(f"/proc/{pid}/status").splitlines() if line.startswith("VmRSS")), "VmRSS 0 kB"
        )
        found[name] = int(line.split()[1])
    return found


@pytest.fixture
def own() -> Iterator[Home]:
    with home({"LAYER_HOST_IDLE": "0"}) as made:
        yield made


def test_boxes_that_come_and_go_leave_nothing(own: Home) -> None:
    churn(own, 150)


@pytest.mark.torture
def test_ten_thousand_boxes_leave_nothing(own: Home) -> None:
    churn(own, 10_000)
    assert len(list_directory(own.state / "traces")) < 12_000


def meminfo() -> dict[str, int]:
    """KB by name."""
    return {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}


def crowd(own: Home, size: int) -> dict[str, float]:
    """So many idle boxes at once: what each costs, how long the last takes, that all of them live."""
    subprocess.run(["sync"], check=True)
    memory = meminfo()
    took: list[float] = []
    boxes = []
    for _ in range(size):
        began = time.perf_counter()
        boxes.append(Sandbox.create(warm=False))  # spawned now, not taken from those that wait
        took.append((time.perf_counter() - began) * 1000)
    time.sleep(1)
    now = meminfo()
    each = (memory["MemAvailable"] - now["MemAvailable"]) / size
    slab = (now["SUnreclaim"] - memory["SUnreclaim"]) / size
    began = time.perf_counter()
    assert all(box.run(["true"]).exit_code == 0 for box in boxes)
    answered = (time.perf_counter() - began) * 1000 / size
    assert len(Sandbox.list()) == size
    many = min(50, size // 4)
    began = time.perf_counter()
    for box in boxes[: size // 2]:
        box.kill()
    killed = (time.perf_counter() - began) * 1000 / (size // 2)
    own.hang_up()  # the other half goes with its client
    settle(own)
    again = []  # alone once more, at the load the machine has now: others use it, too
    for _ in range(many):
        began = time.perf_counter()
        boxes = [Sandbox.create(warm=False)]
        again.append((time.perf_counter() - began) * 1000)
    own.hang_up()
    figures = {
        "boxes": size,
        "KB each (MemAvailable)": round(each, 1),
        "of which unreclaimable slab (KB)": round(slab, 1),
        "first (ms)": round(statistics.median(took[:many]), 2),
        "last (ms)": round(statistics.median(took[-many:]), 2),
        "again (ms)": round(statistics.median(again), 2),
        "`true` in each (ms)": round(answered, 2),
        "kill (ms)": round(killed, 2),
    }
    print(f"\n{figures}")
    return figures


def twice(own: Home, size: int) -> dict[str, float]:
    """A crowd leaves pools that the next is served from. They are bounded, and full after a few; what leaks grows each time."""
    Sandbox.create().kill()
    own.hang_up()
    settle(own)
    figures, left = crowd(own, size), {"": 1}
    for _ in range(4):
        settle(own)
        before = own.census()
        crowd(own, size)
        left = own.left_since(before, 20)
        print(f"left: {left or 'nothing'}")
        if not left:
            break
    assert left == {}
    return figures


def test_a_hundred_idle_boxes_cost_little(own: Home) -> None:
    twice(own, 100)


@pytest.mark.torture
def test_two_thousand_idle_boxes_cost_little(own: Home) -> None:
    figures = twice(own, 2000)
    assert figures["last (ms)"] <= 2 * max(figures["first (ms)"], figures["again (ms)"]), figures


def test_a_gateway_with_a_thousand_files_open_makes_networks() -> None:
    """libnftables aborts a process whose files are numbered beyond 1024."""
    code = """
import os
from livinglayer.sandbox.egress.netns import Maker
maker = Maker()
many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
network = maker.make()
assert min(network.fds) > 1024 and len(set(network.fds)) == 4
network.close()
maker.close()
print("made")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "made\n", done.stderr


@pytest.mark.torture
def test_six_hundred_boxes_with_rules_are_served(own: Home) -> None:
    with Server(lambda asked: Answer(b"served")) as server:
        rule = {"host": "good.test", "protocol": "http", "resolve": f"127.0.0.1:{server.port}", "private": True}
        gateway = own.gateway
        boxes = [Sandbox.create(egress=[rule]) for _ in range(600)]
        for box in boxes[::50]:
            assert box.run(["curl", "-fsS", "-m", "5", "http://good.test/"]).stdout == "served"
        assert own.gateway == gateway  # the one that began
        for box in boxes:
            box.kill()
