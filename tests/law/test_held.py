"""Boxes that no contract speaks of: who may open and use one, what is recorded of it, how long it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sandbox.hosts import Host, wait_until

from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, LimitExceeded, NotFound
from livinglayer.law import held, tending
from livinglayer.law.replay import replay
from livinglayer.sandbox.client import blocking_client, run_blocking
from livinglayer.sandbox.sandbox import Sandbox

embedded = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)  # where the engine does not matter


@pytest.fixture
def room(layer: Layer, boxes: Host) -> Iterator[Layer]:
    """A layer with a blueprint that ann may open boxes of, and somebody who looks after them."""
    with prepared(layer):
        yield layer


@contextlib.contextmanager
def prepared(layer: Layer) -> Iterator[Layer]:
    layer.call("blueprint.define", name="small", tier="namespace", limits={"memory": "128M"}, egress=["api.test"])
    for name in ("ann", "bob"):
        layer.principal(name)
        layer.grant(name, "call", "box:small")
    layer.grant("ann", "read", "execution")
    layer.grant("ann", "read", "step")
    tending.of(layer).look()
    try:
        yield layer
    finally:
        for box in Sandbox.list(labels={"layer": layer.id}):
            box.kill()
        tending.of(layer).close()


def opened(layer: Layer, **more: Any) -> dict[str, Any]:
    return dict(layer.call("box.open", {"blueprint": "small", "timeout": 60, **more}, principal="ann"))


def row(layer: Layer, number: int) -> dict[str, Any]:
    (found,) = layer.query("select * from execution where id = :id", {"id": number})
    return found


def over(layer: Layer, number: int) -> dict[str, Any]:
    """The execution of a box, once that is over."""
    wait_until(lambda: row(layer, number)["status"] != "running", "the execution is over", 30)
    return row(layer, number)


def steps(layer: Layer, number: int) -> list[dict[str, Any]]:
    return layer.query("select n, kind, detail from step where execution = :id order by n", {"id": number})


def test_a_box_is_an_execution_from_its_start_to_its_end(room: Layer) -> None:
    box = opened(room, metadata={"for": "tests"}, environment={"TOKEN": "hunter2"})
    assert (box["state"], box["principal"], box["tier"], box["metadata"]) == ("running", "ann", "namespace", {"for": "tests"})  # fmt: skip
    said = room.call("box.run", box=box["box"], command="echo $TOKEN", principal="ann")
    assert (said["exit_code"], said["stdout"]) == (0, "hunter2\n")
    room.call("box.write", box=box["box"], path="/home/user/a", content="text", principal="ann")
    assert room.call("box.read", box=box["box"], path="/home/user/a", principal="ann")["content"] == "text"
    found = row(room, box["execution"])
    assert (found["kind"], found["verb"], found["status"], found["principal"]) == ("box", "box.open", "running", "ann")
    assert found["arguments"]["environment"] == ["TOKEN"] and "hunter2" not in str(found)
    room.call("box.kill", box=box["box"], principal="ann")
    found = over(room, box["execution"])
    assert (found["status"], found["result"]["box"]) == ("done", box["box"])
    kinds = [step["kind"] for step in steps(room, box["execution"])]
    assert kinds[:2] == ["box", "box"] and kinds.count("command") == 1 and kinds.count("file") == 2
    assert [step["n"] for step in steps(room, box["execution"])] == list(range(1, len(kinds) + 1))
    (used,) = room.query("select principal, cpu, memory from usage where execution = :id", {"id": box["execution"]})
    assert used["principal"] == "ann" and used["cpu"] > 0 and used["memory"] > 0
    assert "hunter2" not in str(room.query("select detail from step where kind = 'box'"))
    assert room.query("select box from lineage where execution = :id", {"id": box["execution"]}) == [{"box": f"b{box['execution']}"}]  # fmt: skip
    assert room.verify().ok


@embedded
def test_why_and_replay_tell_of_it(room: Layer) -> None:
    box = opened(room)
    room.call("box.run", box=box["box"], command="echo hi", principal="ann")
    room.call("box.kill", box=box["box"], principal="ann")
    over(room, box["execution"])
    tree = str(room.why(f"execution/{box['execution']}"))
    assert "box.open" in tree and box["box"] in tree and "ann" in tree
    assert "echo hi" in str(replay(room, box["execution"]).steps)


@embedded
def test_a_permission_says_who_may_open_one(room: Layer) -> None:
    room.principal("eve")
    with pytest.raises(NotFound, match="no blueprint 'small'"):
        room.call("box.open", blueprint="small", principal="eve")
    room.grant("eve", "read", "blueprint")
    with pytest.raises(Denied, match="eve may not call box:small"):
        room.call("box.open", blueprint="small", principal="eve")
    denials = room.query("select action, resource from decision where principal = 'eve'")
    assert denials == [{"action": "call", "resource": "box:small"}] * 2
    with pytest.raises(NotFound, match="no blueprint 'none'"):
        room.call("box.open", blueprint="none", principal="ann")


@embedded
def test_others_boxes_are_not_there(room: Layer) -> None:
    box = opened(room)["box"]
    for verb, more in (
        ("kill", {}), ("pause", {}), ("resume", {}), ("timeout", {"seconds": 1}), ("snapshot", {}), ("fork", {}), ("egress", {}),
        ("run", {"command": "true"}), ("read", {"path": "/etc/passwd"}), ("write", {"path": "/tmp/a", "content": ""}),
    ):  # fmt: skip
        with pytest.raises(NotFound, match=f"there is no box '{box}'"):
            room.call(f"box.{verb}", {"box": box, **more}, principal="bob")
    assert room.call("box.list", principal="bob") == []
    assert [one["box"] for one in room.call("box.list", principal="ann")] == [box]
    assert [one["box"] for one in room.call("box.list")] == [box]  # an owner sees all
    assert room.call("box.run", box=box, command="true")["exit_code"] == 0


@embedded
def test_its_time_is_the_hosts_to_keep(room: Layer) -> None:
    box = opened(room, timeout=0.3)
    found = over(room, box["execution"])
    assert (found["status"], found["result"]["ended"]) == ("done", "its time was over")
    resting = opened(room, timeout=0.3, on_timeout="pause")
    wait_until(lambda: room.call("box.list", state="paused") != [], "it is paused", 30)
    assert row(room, resting["execution"])["status"] == "running"
    again = room.call("box.resume", box=resting["box"], timeout=60, principal="ann")
    assert (again["state"], again["resumed"]) == ("running", True)
    assert room.call("box.resume", box=resting["box"], timeout=1, principal="ann")["until"] == again["until"]
    assert room.call("box.timeout", box=resting["box"], seconds=600, principal="ann")["until"] > again["until"]
    with pytest.raises(Invalid, match="not a number of seconds"):
        room.call("box.timeout", box=resting["box"], seconds=-1, principal="ann")


@embedded
def test_paused_it_keeps_its_memory_and_never_loses_a_file(room: Layer) -> None:
    id = opened(room)["box"]
    box = Sandbox.connect(id)
    box.start(
        "i=0; while :; do i=$((i+1)); echo $i > /home/user/next; mv /home/user/next /home/user/count; sleep 0.01; done"
    )
    count = 0
    for turn in range(10):
        box.files.write(f"/home/user/file{turn}", str(turn))
        room.call("box.pause", box=id, principal="ann")
        with pytest.raises(Conflict, match="paused already"):
            room.call("box.pause", box=id, principal="ann")
        room.call("box.resume", box=id, principal="ann")
        assert [box.files.read(f"/home/user/file{n}") for n in range(turn + 1)] == [str(n).encode() for n in range(turn + 1)]  # fmt: skip
        wait_until(lambda: counted(box) > count, "it goes on counting", 30)  # noqa: B023
        assert counted(box) >= count
        count = counted(box)


def counted(box: Any) -> int:
    return int(box.files.read("/home/user/count") or 0)


@embedded
def test_without_memory_it_starts_anew_with_its_files(room: Layer) -> None:
    id = opened(room)["box"]
    box = Sandbox.connect(id)
    box.start("sleep 1000")
    box.files.write("/home/user/kept", "kept")
    room.call("box.pause", box=id, principal="ann")
    room.call("box.resume", box=id, memory=False, principal="ann")
    assert box.processes() == [] and box.files.read("/home/user/kept") == b"kept"
    room.call("box.pause", box=id, memory=False, principal="ann")
    assert room.call("box.resume", box=id, principal="ann")["state"] == "running"
    assert box.files.read("/home/user/kept") == b"kept"


def test_snapshots_are_blueprints_of_whoever_took_them(room: Layer) -> None:
    box = opened(room)
    room.call("box.write", box=box["box"], path="/home/user/a", content="kept", principal="ann")
    taken = room.call("box.snapshot", box=box["box"], name="mine", principal="ann")
    assert room.query("select id, box from snapshot") == [{"id": taken["snapshot"], "box": f"b{box['execution']}"}]
    for name in ("mine", taken["snapshot"]):
        child = room.call("box.open", blueprint=name, timeout=60, principal="ann")
        assert room.call("box.read", box=child["box"], path="/home/user/a", principal="ann")["content"] == "kept"
    with pytest.raises(NotFound):
        room.call("box.open", blueprint="mine", principal="bob")
    with pytest.raises(NotFound):
        room.call("box.open", blueprint="small", snapshot=taken["snapshot"], principal="bob")
    for name in ("mine", taken["snapshot"]):  # an owner means what it says, not what somebody has called so
        with contextlib.suppress(NotFound):
            room.call("box.kill", box=room.call("box.open", blueprint=name, timeout=60)["box"])
            assert name != "mine"
    for name in ("a b", "x" * 200, "0" * 40, "tpl" + "0" * 16):
        with pytest.raises(Invalid, match="name of a snapshot"):
            room.call("box.snapshot", box=box["box"], name=name, principal="ann")
    with pytest.raises(Conflict, match="'small' exists already"):
        room.call("box.snapshot", box=box["box"], name="small", principal="ann")
    theirs = room.call("box.open", blueprint="small", timeout=60, principal="bob")
    with pytest.raises(Conflict, match="'mine' exists already"):
        room.call("box.snapshot", box=theirs["box"], name="mine", principal="bob")
    with pytest.raises(NotFound):
        room.call("box.forget", snapshot="mine", principal="bob")
    assert room.call("box.forget", snapshot="mine", principal="ann")["snapshot"] == taken["snapshot"]
    with pytest.raises(NotFound):
        room.call("box.open", blueprint="mine", principal="ann")


def test_forks_are_executions_with_a_parent(room: Layer) -> None:
    box = opened(room, metadata={"a": "b"})
    room.call("box.write", box=box["box"], path="/home/user/a", content="before", principal="ann")
    forks = room.call("box.fork", box=box["box"], count=2, principal="ann")
    room.call("box.write", box=box["box"], path="/home/user/a", content="after", principal="ann")
    for fork in forks:
        assert fork["metadata"] == {"a": "b"} and fork["until"]
        assert room.call("box.read", box=fork["box"], path="/home/user/a", principal="ann")["content"] == "before"
        lines = room.query("select parent from lineage where execution = :id", {"id": fork["execution"]})
        assert lines == [{"parent": f"b{box['execution']}"}]
        room.call("box.kill", box=fork["box"], principal="ann")
        assert over(room, fork["execution"])["status"] == "done"
    with pytest.raises(Invalid, match="between 1 and 100"):
        room.call("box.fork", box=box["box"], count=0, principal="ann")


@embedded
def test_egress_is_only_ever_narrowed(room: Layer) -> None:
    with pytest.raises(Denied, match=r"other\.test is not within"):
        opened(room, egress=["other.test"])
    box = opened(room, egress=[])
    assert box["egress"] == []
    room.call("box.egress", box=box["box"], rules=["api.test"], principal="ann")
    assert room.call("box.list", principal="ann")[0]["egress"] == ["api.test"]
    with pytest.raises(Denied):
        room.call("box.egress", box=box["box"], rules=["*"], principal="ann")


def test_a_key_gives_one_box_and_a_quota_bounds_them(room: Layer) -> None:
    def create(key: str, **more: Any) -> Any:
        given = {"blueprint": "small", "timeout": 60, "environment": {"A": "b"}, **more}
        return room.call("box.open", given, principal="ann", key=key)

    first = create("k")
    assert create("k")["box"] == first["box"]
    for other in ({"timeout": 61}, {"environment": {"A": "c"}}):
        with pytest.raises(Conflict, match="another request"):
            create("k", **other)
    room.call("quota.set", subject="ann", resource="boxes", amount=1, seconds=3600)
    with pytest.raises(LimitExceeded):
        create("l")
    room.call("box.kill", box=first["box"], principal="ann")


@embedded
def test_wrong_arguments_are_refused_before_anything_is_made(room: Layer) -> None:
    for more in ({"on_timeout": "explode"}, {"timeout": -1.0}, {"metadata": {"a": 1}}, {"name": "No Name"}, {"environment": {"a b": "c"}}):  # fmt: skip
        with pytest.raises(Invalid):
            opened(room, **more)
    with pytest.raises(LimitExceeded, match="metadata"):
        opened(room, metadata={"a": "x" * 30_000})
    assert room.call("box.list") == []


@embedded
def test_boxes_outlive_their_host(layer: Layer, own_host: Host) -> None:
    with prepared(layer) as room:
        stays, ends = opened(room), opened(room, timeout=600, environment={"A": "b"})
        room.call("box.pause", box=stays["box"], principal="ann")
        room.call("secret.set", name="KEY", value="value")
        room.call("blueprint.define", name="lent", secrets=["KEY"], egress=[{"host": "api.test", "secrets": ["KEY"]}])
        lent = room.call("box.open", blueprint="lent", timeout=600)["box"]
        own_host.crash()
        found = {box["box"]: box for box in room.call("box.list")}
        assert {stays["box"]: "paused", ends["box"]: "running", lent: "running"} == {
            id: box["state"] for id, box in found.items()
        }
        assert room.call("box.run", box=ends["box"], command="echo $A", principal="ann")["stdout"] == "b\n"
        assert found[ends["box"]]["until"] == ends["until"]
        wait_until(lambda: held.info(lent)["secrets"] == ["KEY"], "its secrets were said again", 30)
        room.call("box.timeout", box=ends["box"], seconds=0.1, principal="ann")
        assert over(room, ends["execution"])["result"]["ended"] == "its time was over"
        room.call("box.resume", box=stays["box"], timeout=60, principal="ann")
        assert room.call("box.run", box=stays["box"], command="true", principal="ann")["exit_code"] == 0


def test_a_box_that_went_unseen_is_concluded(room: Layer) -> None:
    box = opened(room)
    looking = tending.of(room)
    wait_until(lambda: box["box"] in looking.recorder.lines, "it is written down", 30)
    looking.close()
    Sandbox.connect(box["box"]).run("echo unseen")
    Sandbox.connect(box["box"]).kill()
    time.sleep(0.05)
    tending.of(room).look()
    assert over(room, box["execution"])["status"] == "done"
    assert "echo unseen" in str(steps(room, box["execution"]))
    assert [step["n"] for step in steps(room, box["execution"])] == list(range(1, len(steps(room, box["execution"])) + 1))  # fmt: skip


@embedded
def test_tokens_of_boxes_differ_and_stay(room: Layer) -> None:
    found: Callable[..., str] = held.token
    assert found(room, "bone", "envd") == found(room, "bone", "envd")
    assert len({found(room, id, use) for id in ("bone", "btwo") for use in ("envd", "traffic")}) == 4


def test_equal_snapshots_of_two_tenants_are_each_ones_own(room: Layer) -> None:
    mine, theirs = (room.call("box.open", blueprint="small", timeout=60, principal=who) for who in ("ann", "bob"))
    first = room.call("box.snapshot", box=mine["box"], principal="ann")
    with pytest.raises(Conflict, match="'small' exists already"):  # what another has kept stays when this fails
        room.call("box.snapshot", box=theirs["box"], name="small", principal="bob")
    second = room.call("box.snapshot", box=theirs["box"], principal="bob")
    assert first["snapshot"] == second["snapshot"] and first["blueprint"] != second["blueprint"]
    room.call("box.snapshot", box=theirs["box"], name="theirs", principal="bob")
    with pytest.raises(NotFound):
        room.call("box.forget", snapshot="theirs", principal="ann")
    for who in ("ann", "bob"):
        room.call(
            "box.kill", box=room.call("box.open", blueprint=first["snapshot"], principal=who)["box"], principal=who
        )
    room.call("box.forget", snapshot=first["snapshot"], principal="ann")
    with pytest.raises(NotFound):
        room.call("box.open", blueprint=first["snapshot"], principal="ann")
    room.call("box.kill", box=room.call("box.open", blueprint=second["snapshot"], principal="bob")["box"])


def test_a_snapshot_takes_no_name_below_somebody_elses(room: Layer) -> None:
    box = room.call("box.open", blueprint="small", timeout=60, principal="bob")
    with pytest.raises(Conflict, match="'ann/web' exists already"):
        room.call("box.snapshot", box=box["box"], name="ann/web", principal="bob")
    for name in ("bob/web", "team/web:v2"):
        assert room.call("box.snapshot", box=box["box"], name=name, principal="bob")["blueprint"] == name


@embedded
def test_forks_are_within_a_quota_all_together(room: Layer) -> None:
    box = opened(room)
    room.call("quota.set", subject="ann", resource="boxes", amount=3, seconds=1)
    with pytest.raises(LimitExceeded, match="quota"):
        room.call("box.fork", box=box["box"], count=3, principal="ann")
    assert len(room.call("box.fork", box=box["box"], count=2, principal="ann")) == 2


@embedded
def test_equal_snapshots_of_two_layers_on_one_host_are_each_ones_own(
    room: Layer, make_layer: Callable[[], Layer]
) -> None:
    with prepared(make_layer()) as other:
        mine = opened(room)["box"]
        Sandbox.connect(mine).run("echo >/home/user/something that no other test keeps")
        first = room.call("box.snapshot", box=mine, principal="ann")
        theirs = other.call("box.open", blueprint="small", snapshot=first["snapshot"], timeout=60)["box"]
        second = other.call("box.snapshot", box=theirs)
        assert first["snapshot"] == second["snapshot"] and room.id != other.id
        with pytest.raises(Conflict):  # one that fails takes nothing away
            other.call("box.snapshot", box=theirs, name="small")
        again = other.call("box.snapshot", box=theirs)  # kept twice, it is one of ours all the same
        assert again == second
        other.call("box.forget", snapshot=again["snapshot"])
        with pytest.raises(NotFound):
            other.call("box.open", blueprint=again["snapshot"])
        assert room.call("box.open", blueprint=first["snapshot"], timeout=60, principal="ann")["box"]
        room.call("box.forget", snapshot=first["snapshot"], principal="ann")
        assert first["snapshot"] not in {kept["id"] for kept in _kept()}


@embedded
def test_a_name_that_is_given_to_another_snapshot_keeps_the_first_no_longer(room: Layer) -> None:
    box = opened(room)["box"]
    Sandbox.connect(box).run("echo >/home/user/first")
    first, again = (room.call("box.snapshot", box=box, name=name, principal="ann") for name in ("nightly", "weekly"))
    Sandbox.connect(box).run("echo >/home/user/second")
    second = room.call("box.snapshot", box=box, name="nightly", principal="ann")
    assert first["snapshot"] == again["snapshot"] in {kept["id"] for kept in _kept()}  # it has another name
    room.call("box.snapshot", box=box, name="weekly", principal="ann")
    kept = {kept["id"] for kept in _kept()}
    assert first["snapshot"] not in kept and second["snapshot"] in kept
    assert Sandbox.connect(opened(room, blueprint="nightly")["box"]).files.exists("/home/user/second")


@embedded
def test_merging_takes_no_snapshot_away_that_a_fork_was_kept_as(room: Layer) -> None:
    fork = Sandbox.connect(room.call("reality.fork", name="elsewhere", box=opened(room)["box"])["id"])
    fork.run("echo >/home/user/new")
    kept = fork.snapshot()
    room.call("reality.merge", {"name": "elsewhere"})
    with Sandbox.create("namespace", snapshot=kept) as box:
        assert box.files.read("/home/user/new") == b"\n"


def _kept() -> list[dict[str, Any]]:
    return list(run_blocking(blocking_client().call({"do": "snapshots"})))
