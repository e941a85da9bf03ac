"""What was done to and by a box is told, during its life and after."""

from collections.abc import Callable
from typing import Any

import pytest
from sandbox.hosts import wait_until


@pytest.mark.core
def test_everything_done_is_in_the_trace(make: Callable[..., Any], tier: str) -> None:
    box = make()
    box.run(["sh", "-c", "exit 3"])
    box.files.write("/home/user/a", b"abc")
    box.files.read("/home/user/a")
    box.files.move("/home/user/a", "/home/user/b")
    box.files.remove("/home/user/b")
    box.pause()
    box.resume()
    snapshot = box.snapshot()
    box.kill()
    events = box.trace()
    assert [event["event"] for event in events] == [
        *("create", "exec", "file", "file", "file", "file", "pause", "resume", "snapshot", "end")
    ]
    by = {event["event"]: event for event in events}
    assert (by["create"]["tier"], by["exec"]["argv"], by["exec"]["exit_code"]) == (tier, ["sh", "-c", "exit 3"], 3)
    assert [(event["act"], event["path"]) for event in events if event["event"] == "file"] == [
        ("write", "/home/user/a"),
        ("read", "/home/user/a"),
        ("move", "/home/user/a"),
        ("remove", "/home/user/b"),
    ]
    assert by["snapshot"]["snapshot"] == snapshot.id
    assert by["end"]["reason"] == "killed"
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)


@pytest.mark.core
def test_the_files_a_box_has_changed(make: Callable[..., Any], tier: str) -> None:
    box = make()
    box.run("mkdir d; echo x > d/a; sync")
    paths = {change["path"].lstrip("/") for change in box.changes()}
    assert "home/user/d/a" in paths
    if tier not in ("process",):
        assert box.run("rm /etc/group && echo x >> /etc/passwd && sync", user="root").exit_code == 0
        changes = {change["path"].lstrip("/") for change in box.changes()}
        assert {"etc/group", "etc/passwd"} <= changes


@pytest.mark.core
def test_requests_of_the_box_are_in_the_trace(make: Callable[..., Any], capabilities: dict[str, Any]) -> None:
    if not capabilities["egress"]:
        return
    box = make()
    assert box.run("getent hosts nowhere.test").exit_code != 0
    reach = "import socket; socket.create_connection(('192.0.2.1', 80), 3).recv(1)"
    box.run(["python3", "-c", reach], timeout=30)
    wait_until(lambda: [event for event in box.trace() if event["event"] == "network"], "the refusal is told")
    refused = [event for event in box.trace() if event["event"] == "network"]
    assert {event["verdict"] for event in refused} == {"deny"}
    assert box.metrics()["network"]["deny"] >= 1


@pytest.mark.core
def test_metrics(make: Callable[..., Any]) -> None:
    box = make()
    box.run(["python3", "-c", "x = 0\nfor i in range(500_000): x += i"])
    box.files.write("/home/user/large", bytes(3 << 20))
    process = box.start("sleep 100")
    found = box.metrics()
    assert found["cpu_seconds"] > 0.01
    assert found["memory"] > 100_000
    assert found["memory_peak"] >= found["memory"]
    assert found["pids"] >= 2
    assert found["commands"] == 1
    assert found["state"] == "running"
    assert found["age"] > 0
    box.run("sync")
    wait_until(lambda: box.metrics()["disk"] >= 3 << 20, "the disk is counted", 40)
    process.kill()


def test_limits_that_were_met_are_in_the_trace(make: Callable[..., Any]) -> None:
    box = make(output="1K")
    box.run("seq 10000")
    with pytest.raises(Exception, match="its time was up"):
        box.run("sleep 100", timeout=0.5)
    assert [event["limit"] for event in box.trace() if event["event"] == "limit"] == ["output", "time"]
