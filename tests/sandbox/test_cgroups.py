"""Cgroups serve one box after the other, whatever limits they had."""

from __future__ import annotations

from pathlib import Path

import pytest
from sandbox.hosts import Host
from sandbox.rig import needs_root

from livinglayer.sandbox.cgroups import Cgroups
from livinglayer.sandbox.sandbox import Sandbox


@needs_root
def test_the_cgroup_of_a_box_that_outlived_its_host_serves_a_larger_one(own_host: Host) -> None:
    Sandbox.create("namespace", name="stays", memory="64M")
    own_host.crash()
    Sandbox.connect("stays").kill()
    for memory in ("300M", "64M", "1G"):  # more than it had, less, and more again
        with Sandbox.create("namespace", memory=memory) as box:
            assert box.run("echo well").stdout == "well\n"


@pytest.fixture
def cgroups(tmp_path: Path) -> Cgroups:
    found = Cgroups(tmp_path)
    if found.version == "none":
        pytest.skip("no cgroups here")
    return found


def test_limits_of_a_cgroup_that_was_there_go_up_and_down(cgroups: Cgroups) -> None:
    first = cgroups.take(64 << 20, 10, 1)
    paths = {controller: str(path) for controller, path in first.directories.items()}
    try:
        for memory in (300 << 20, 32 << 20, 1 << 30):
            cgroups.adopt(paths).limit(memory, 10, 1)
    finally:
        first.remove()
        cgroups.close()


def test_a_host_with_the_pid_of_one_before_it_shares_no_cgroup_with_its_boxes(cgroups: Cgroups, tmp_path: Path) -> None:
    before, after = cgroups.take(64 << 20, 10, 1), Cgroups(tmp_path).take(64 << 20, 10, 1)
    try:
        assert set(before.directories.values()).isdisjoint(after.directories.values())
    finally:
        before.remove()
        after.remove()
        cgroups.close()


def test_what_a_cgroup_refuses_is_named(cgroups: Cgroups) -> None:
    group = cgroups.take(64 << 20, 10, 1)
    try:
        with pytest.raises(OSError, match=r"can't write '-7'.*pids\.max"):
            group.limit(64 << 20, -7, 1)
    finally:
        group.remove()
        cgroups.close()
