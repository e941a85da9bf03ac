"""A snapshot with memory: processes go on in a box made of it, and its files are there for tiers that keep none."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from sandbox.hosts import Host, wait_until

from livinglayer.errors import Invalid
from livinglayer.sandbox import Sandbox

COUNTING = "i=0; while :; do i=$((i+1)); echo $i > /home/user/n; sleep 0.05; done"


def test_processes_go_on_from_a_snapshot_with_memory(host: Host, use: Callable[[Host], Host]) -> None:
    use(host)
    with Sandbox.create("microvm", memory="256M") as box:
        box.start(COUNTING)
        wait_until(lambda: box.files.exists("/home/user/n"), "the box counts")
        kept = box.snapshot(memory=True)
        before = int(box.run("cat /home/user/n").stdout)
    assert kept.memory
    with Sandbox.create("microvm", snapshot=kept.id) as again:
        first = int(again.run("cat /home/user/n").stdout or 0)
        wait_until(lambda: int(again.run("cat /home/user/n").stdout or 0) > first, "the count goes on")
        assert first <= before + 20  # it began where the snapshot was taken, not where the box ended much later
        assert abs(float(again.run("date +%s").stdout) - time.time()) < 60
    with Sandbox.create("namespace", snapshot=kept.id) as files:
        assert files.files.read("/home/user/n").strip().isdigit()
        assert files.processes() == []


def test_a_tier_that_keeps_no_memory_says_so(host: Host, use: Callable[[Host], Host]) -> None:
    use(host)
    with Sandbox.create("namespace") as box, pytest.raises(Invalid, match="can't keep memory"):
        box.snapshot(memory=True)
