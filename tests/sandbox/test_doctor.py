"""`doctor` finds out by doing: what it says works does, what it says does not is said with a reason, and nothing stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox.hosts import Host

from livinglayer.errors import Invalid, Unavailable
from livinglayer.sandbox import Sandbox
from livinglayer.sandbox.blueprint import TIERS
from livinglayer.sandbox.client import blocking_client, run_blocking
from livinglayer.sandbox.doctor import layers_by_fd, survey

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="boxes above tier process need root")


def examine(*tiers: str) -> dict[str, Any]:
    said: list[str] = []
    report = run_blocking(blocking_client().call({"do": "doctor", "tiers": list(tiers) or None}, say=said.append))
    assert [line for line in said if line.startswith("trying")] == [
        f"trying tier {tier['tier']}" for tier in report["tiers"]
    ]
    return dict(report)


def checks(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["what"]: check for check in report["checks"]}


@pytest.fixture(autouse=True)
def here(host: Host, use: Callable[[Host], Host]) -> Host:
    return use(host)


@needs_root
def test_the_quick_tiers_work_and_say_what_they_can() -> None:
    process, namespace = examine("process", "namespace")["tiers"]
    assert process["works"] and namespace["works"]
    assert "no wall" in process["isolation"] and "shares the host's kernel" in namespace["isolation"]
    assert "egress rules and secrets" in process["cannot"] and "egress rules and secrets" in namespace["can"]
    assert "disk limit" in namespace["can"] and "suspend with memory" in namespace["cannot"]
    assert all(0 < namespace[key] < 10_000 for key in ("create_ms", "exec_ms", "kill_ms"))


@needs_root
def test_the_machine_is_described_and_nothing_stays(here: Host) -> None:
    before = len(Sandbox.list())
    report = examine("process", "namespace")
    assert len(Sandbox.list()) == before
    found = checks(report)
    assert {
        "kernel",
        "user",
        "overlay",
        "kvm",
        "memory",
        "space",
        "cgroups",
        "disk",
        "gateway",
        "zygote",
        "leftovers",
    } <= set(found)
    assert found["leftovers"]["found"] == "none" and found["gateway"]["verdict"] == "good"
    assert report["state"] == str(here.state) and report["host"]["pid"] == here.pid


@needs_root
def test_the_path_of_the_overlay_is_the_one_that_is_taken(own_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYER_OVERLAY_BY_PATH", "1")
    report = examine("namespace")
    assert "by path" in checks(report)["overlay"]["found"] and report["tiers"][0]["works"]
    assert layers_by_fd() in (True, False)


@needs_root
def test_a_leftover_is_found(here: Host) -> None:
    with Sandbox.create(tier="process"):
        stray = here.state / "run" / "boxes" / "stray"
        stray.mkdir(parents=True)
        try:
            assert str(stray) in checks(examine("process"))["leftovers"]["found"]
        finally:
            stray.rmdir()


@needs_root
def test_a_tier_that_is_missing_says_what_to_install(
    own_host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("cc", "sh", "ip", "nsenter", "mkfs.btrfs", "losetup", "mount", "umount", "as", "ld"):
        for place in ("/usr/bin", "/bin", "/usr/sbin", "/sbin"):
            if Path(place, name).exists() and not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(Path(place, name))
    monkeypatch.setenv("PATH", str(tmp_path))  # the host that is started now finds no runtime
    container, gvisor, microvm = examine("container", "gvisor", "microvm")["tiers"]
    for tier in (container, gvisor, microvm):
        assert not tier["works"] and tier["why"] and "apt-get install" in tier["hint"], tier


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(Invalid, match="tier 'cloud' does not exist"):
        examine("cloud")


def test_without_a_host_it_says_why(tmp_path: Path) -> None:
    report = survey(tmp_path, Unavailable("the disk is gone", hint="look for it"))
    assert [tier["tier"] for tier in report["tiers"]] == list(TIERS)
    assert not any(tier["works"] for tier in report["tiers"])
    assert report["checks"][0] == {
        "what": "host",
        "found": "it did not start: the disk is gone",
        "verdict": "bad",
        "hint": "look for it",
    }
    assert {"kernel", "memory", "space", "cgroups"} <= set(checks(report))
