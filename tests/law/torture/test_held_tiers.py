"""Held boxes at every tier: what pausing keeps, that no file is ever lost, and that they outlive their host."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from law.test_held import counted, prepared
from sandbox.hosts import Host, wait_until

from livinglayer import Layer
from livinglayer.errors import Unavailable
from livinglayer.sandbox.sandbox import Sandbox

embedded = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
tiers = pytest.mark.parametrize("tier", ["namespace", "container", "gvisor", "microvm", "vm"])


def opened(layer: Layer, tier: str, **more: Any) -> Any:
    try:
        Sandbox.capabilities(tier)
    except Unavailable as error:
        pytest.skip(f"{tier}: {error}")
    layer.call("blueprint.define", name=tier, tier=tier, limits={"memory": "512M"})
    return layer.call("box.open", {"blueprint": tier, "timeout": 900, **more})


@embedded
@tiers
def test_ten_resumes_lose_nothing_and_a_counter_goes_on(layer: Layer, own_host: Host, tier: str) -> None:
    with prepared(layer) as room:
        id = opened(room, tier)["box"]
        box = Sandbox.connect(id)
        box.start(
            "i=0; while :; do i=$((i+1)); echo $i > /home/user/next; mv /home/user/next /home/user/count; sleep 0.05; done"
        )
        wait_until(lambda: box.files.exists("/home/user/count"), "it counts", 30)
        count = 0
        for turn in range(10):
            box.files.write(f"/home/user/file{turn}", str(turn))
            assert room.call("box.pause", box=id)["memory"] is True
            room.call("box.resume", box=id)
            assert [box.files.read(f"/home/user/file{n}") for n in range(turn + 1)] == [str(n).encode() for n in range(turn + 1)]  # fmt: skip
            wait_until(lambda: counted(box) > count, "it goes on counting", 30)  # noqa: B023
            count = counted(box)


@embedded
@tiers
def test_without_memory_files_stay(layer: Layer, own_host: Host, tier: str) -> None:
    with prepared(layer) as room:
        id = opened(room, tier)["box"]
        box = Sandbox.connect(id)
        for turn in range(3):
            box.files.write(f"/home/user/file{turn}", str(turn))
            box.run("sync")
            room.call("box.pause", box=id, memory=turn == 0)
            room.call("box.resume", box=id, memory=False)
            assert box.processes() == []
            assert [box.files.read(f"/home/user/file{n}") for n in range(turn + 1)] == [str(n).encode() for n in range(turn + 1)]  # fmt: skip


def listed(room: Layer) -> Any:
    """The boxes, once the host is there again: a connection that it had with somebody is cut."""
    for _ in range(10):
        with contextlib.suppress(Unavailable):
            return room.call("box.list")
    return room.call("box.list")


@embedded
@tiers
@pytest.mark.parametrize("how", ["stop", "crash"])
def test_a_box_outlives_its_host(layer: Layer, own_host: Host, tier: str, how: str) -> None:
    with prepared(layer) as room:
        id = opened(room, tier)["box"]
        room.call("box.run", box=id, command="echo kept > /home/user/a; sync")
        getattr(own_host, how)()
        assert [(box["box"], box["state"]) for box in listed(room)] == [(id, "running")]
        assert room.call("box.run", box=id, command="cat /home/user/a")["stdout"] == "kept\n"
        forks = room.call("box.fork", box=id, count=2)
        for fork in forks:
            assert room.call("box.run", box=fork["box"], command="cat /home/user/a")["stdout"] == "kept\n"
