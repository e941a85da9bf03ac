"""Limits: a bomb of any kind harms its own box at most."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sandbox.hosts import wait_until

from livinglayer.errors import Conflict, LayerError, LimitExceeded, TimedOut
from livinglayer.sandbox import Sandbox


@pytest.fixture
def unharmed(box: Any) -> Iterator[None]:
    """Another box of the tier works before and after, in reasonable time."""
    assert box.run("echo well").stdout == "well\n"
    yield
    began = time.monotonic()
    assert box.run("echo well > note; cat note").stdout == "well\n"
    assert time.monotonic() - began < 5
    with Sandbox.create(box.tier) as another:
        assert another.run("echo new").stdout == "new\n"


def answers(box: Any) -> bool:
    """Whether a box still runs commands, or has ended as a whole and says so."""
    try:
        return box.run("echo alive", timeout=20).stdout == "alive\n"
    except LimitExceeded:
        return True
    except LayerError:
        wait_until(lambda: box.id not in {found.id for found in Sandbox.list()}, "the box has ended")
        return True


@pytest.mark.core
def test_a_memory_bomb(make: Callable[..., Any], unharmed: None, capabilities: dict[str, Any]) -> None:
    box = make(memory="128M")
    code = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    try:
        result = box.run(["python3", "-c", code], timeout=100)
    except Conflict:  # gVisor's kernel is a process with the memory of all of them: the box ends as a whole
        assert box.tier == "gvisor"
        assert answers(box)
        return
    assert result.exit_code != 0
    assert result.exit_code == -9 or b"MemoryError" in result.stderr
    assert answers(box)
    if result.exit_code == -9 and "memory" in capabilities["limits"]:
        assert box.metrics().get("memory_peak", 0) <= 140 << 20 or box.tier in ("microvm", "vm", "gvisor")


def test_memory_in_files_counts(make: Callable[..., Any], unharmed: None, tier: str) -> None:
    if tier == "process":
        return  # it has no memory file system of its own
    box = make(memory="128M")
    result = box.run("head -c 300M /dev/zero > /dev/shm/big", timeout=100)
    assert result.exit_code != 0
    assert answers(box)


@pytest.mark.core
def test_a_fork_bomb(make: Callable[..., Any], unharmed: None) -> None:
    box = make(pids=48)
    try:
        box.run("b() { b | b & }; b; sleep 2", timeout=3)
    except (TimedOut, LimitExceeded):
        pass
    try:
        box.run("while :; do sleep 1000 & done", timeout=3)
    except (TimedOut, LimitExceeded):
        pass
    assert answers(box)
    if "pids" in box.metrics() and box.tier not in ("microvm", "vm", "gvisor"):
        assert box.metrics()["pids"] <= 48
    began = time.monotonic()
    box.kill()
    assert time.monotonic() - began < 10


@pytest.mark.core
def test_a_full_disk(make: Callable[..., Any], unharmed: None, capabilities: dict[str, Any]) -> None:
    box = make(disk="48M")
    if "disk" not in capabilities["limits"]:
        return
    result = box.run("head -c 200M /dev/zero > big; code=$?; wc -c < big; exit $code", timeout=60)
    assert result.exit_code != 0
    assert int(result.stdout) < 60 << 20
    with pytest.raises(LimitExceeded):
        box.files.write("/home/user/more", bytes(100 << 20))
    box.run("rm -f big more; sync")
    wrote = box.run("head -c 1M /dev/urandom > small && wc -c < small")
    assert wrote.stdout == f"{1 << 20}\n", wrote


def test_files_without_number(
    make: Callable[..., Any], unharmed: None, capabilities: dict[str, Any], tier: str
) -> None:
    if "disk" not in capabilities["limits"]:
        return
    box = make(disk="16M")
    count = 200_000 if tier in ("namespace", "container") else 50_000
    code = f"import os\nfor n in range({count}):\n    os.close(os.open(f'f{{n:040}}', os.O_CREAT | os.O_WRONLY))"
    try:
        result = box.run(["python3", "-c", code], timeout=50)
        assert result.exit_code != 0 or tier in ("microvm", "vm", "gvisor")
    except TimedOut:
        pass
    assert answers(box)
    began = time.monotonic()
    box.kill()
    assert time.monotonic() - began < 10


def test_open_files_without_number(make: Callable[..., Any], unharmed: None) -> None:
    box = make()
    code = "import os\nfds = []\nwhile True: fds.append(os.open('/dev/null', os.O_RDONLY))"
    result = box.run(["python3", "-c", code], timeout=50)
    assert result.exit_code != 0
    assert b"Too many open files" in result.stderr or result.exit_code == -9, result.stderr[-300:]
    assert answers(box)


def test_a_share_of_the_processor(make: Callable[..., Any], capabilities: dict[str, Any]) -> None:
    if "cpu" not in capabilities["limits"]:
        return
    box = make(cpu=0.25)
    box.run("true")
    before, began = box.metrics()["cpu_seconds"], time.monotonic()
    with pytest.raises(TimedOut):
        box.run("while :; do :; done & while :; do :; done", timeout=2.5)
    used, passed = box.metrics()["cpu_seconds"] - before, time.monotonic() - began
    assert used / passed < 0.45


def test_a_flood_of_output_from_many_commands(make: Callable[..., Any], unharmed: None, tier: str) -> None:
    box = make(output="64K")
    processes = [box.start("yes", timeout=2) for _ in range(4)]
    for process in processes:
        with pytest.raises(TimedOut):
            process.wait()
    assert box.run("echo well").stdout == "well\n"
