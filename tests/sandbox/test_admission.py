"""A full host: who asks for a box waits in line, and is told when none comes free."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sandbox.callers import run
from sandbox.homes import Home, home, variables

from livinglayer.errors import Invalid, LimitExceeded
from livinglayer.sandbox import Blueprint, Sandbox
from livinglayer.sandbox.once import Once, close_connections

SMALL = {"LAYER_HOST_BOXES": "3", "LAYER_HOST_MEMORY": "1G", "LAYER_HOST_WAIT": "0.3"}


@pytest.fixture(scope="module")
def crowded() -> Iterator[Home]:
    """A host that may have three boxes, and a gigabyte of memory among them."""
    with variables(SMALL), home(SMALL) as made:
        yield made
        close_connections(made.state)


def test_a_full_host_refuses_after_a_while(crowded: Home) -> None:
    boxes = [Sandbox.create(memory="64M") for _ in range(3)]
    try:
        with pytest.raises(LimitExceeded, match="the host is full: it has 3 boxes, and may have 3"):
            Sandbox.create(memory="64M")
        with pytest.raises(LimitExceeded, match="the host is full"):
            Once.start(blueprint=Blueprint(memory=64 << 20), tenant="t", python="pass", timeout=0.2)
        with pytest.raises(Invalid, match="wait"):
            Sandbox.create(wait=-1)
    finally:
        for box in boxes:
            box.kill()
    assert run(blueprint=Blueprint(memory=64 << 20), python="print(1)").stdout == b"1\n"


def test_memory_that_is_promised_counts(crowded: Home) -> None:
    with Sandbox.create(memory="700M"):
        with pytest.raises(LimitExceeded, match="memory together"):
            Sandbox.create(memory="400M")
        with Sandbox.create(memory="200M"):
            pass


def test_who_waits_comes_in_when_a_box_ends(crowded: Home) -> None:
    boxes = [Sandbox.create(memory="64M") for _ in range(3)]
    came: list[str] = []

    def ask(name: str) -> None:
        with Sandbox.create(memory="64M", wait=60):
            came.append(name)

    waiting = [threading.Thread(target=ask, args=(name,)) for name in "abcdefgh"]
    for thread in waiting:
        thread.start()
    for box in boxes:
        box.kill()
    for thread in waiting:
        thread.join(60)
    assert sorted(came) == [*"abcdefgh"]


def test_boxes_that_wait_for_nobody_make_room(crowded: Home) -> None:
    shape = Blueprint(memory=64 << 20)
    for tenant in "abcdef":  # each leaves a box as new behind
        assert run(blueprint=shape, tenant=tenant, python="pass", timeout=30).exit_code == 0
    boxes = [Sandbox.create(memory="64M", wait=30) for _ in range(3)]
    for box in boxes:
        box.kill()


def test_more_programs_than_room_all_run(crowded: Home) -> None:
    ended: list[int] = []

    def go(number: int) -> None:
        shape = Blueprint(memory=64 << 20)
        for turn in range(4):
            code = "pass" if turn % 2 else "open('/tmp/x', 'w')"
            ended.append(run(blueprint=shape, tenant=f"t{number}", python=code, timeout=60).exit_code)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert ended == [0] * 32
