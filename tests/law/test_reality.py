"""Fork reality: state and box are forked in one operation, both or neither, and come back together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from law.test_contracts import AGENT, ask, make, outcome, refusal
from sandbox.hosts import wait_until

from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, NotFound
from livinglayer.law import tending
from livinglayer.sandbox.sandbox import Sandbox


@pytest.fixture
def office(desk: Layer) -> Iterator[Layer]:
    desk.call("contract.define", {**AGENT, "functions": None, "projections": None})
    desk.principal("ann")
    for action, resource in (
        ("call", "contract:agent"),
        ("fork", "branch:main"),
        ("merge", "branch:main"),
        ("read", "*"),
        ("write", "ticket"),
    ):
        desk.grant("ann", action, resource)
    desk.insert("ticket", {"title": "t0"})
    tending.of(desk).look()
    yield desk
    for box in Sandbox.list(labels={"layer": desk.id}):
        box.kill()
    tending.of(desk).close()


def fork(layer: Layer, box: Any, **more: Any) -> tuple[Any, dict[str, Any]]:
    told = layer.call("reality.fork", **{"name": "idea", "box": box.id, "principal": "ann", **more})
    return Sandbox.connect(told["id"]), told


def test_state_and_box_are_forked_together_and_come_back_together(office: Layer) -> None:
    box, told = make(office)
    box.run("echo before > /home/user/notes; echo gone > /home/user/old")
    child, forked = fork(office, box)
    assert child.run("cat /home/user/notes").stdout == "before\n"
    ask(child, "layer.insert('ticket', title='from the fork')")
    assert office.query("select 1 as n from ticket where title = 'from the fork'") == []
    assert len(office.query("select 1 as n from ticket where title = 'from the fork'", branch="idea")) == 1
    ask(box, "layer.insert('ticket', title='from main')")  # the parent goes on where it was
    assert len(office.query("select 1 as n from ticket where title = 'from main'")) == 1
    child.run("echo after > /home/user/notes; echo new > /home/user/made; rm /home/user/old; echo x > /tmp/passing")
    box.run("echo parent > /home/user/parents")
    lines = office.query("select box, parent, snapshot, branch, execution from lineage order by id")
    assert lines == [
        {
            "box": f"b{told['execution']}",
            "parent": None,
            "snapshot": None,
            "branch": "main",
            "execution": told["execution"],
        },
        {
            "box": f"b{forked['execution']}",
            "parent": f"b{told['execution']}",
            "snapshot": forked["snapshot"],
            "branch": "idea",
            "execution": forked["execution"],
        },
    ]
    assert office.query("select id, box from snapshot") == [{"id": forked["snapshot"], "box": f"b{told['execution']}"}]
    (row,) = office.query(
        "select kind, scope, contract, branch from execution where id = :id", {"id": forked["execution"]}
    )
    assert (row["kind"], row["scope"]["branch"], row["contract"], row["branch"]) == (
        "contract",
        "idea",
        "agent",
        "idea",
    )
    merged = office.call("reality.merge", name="idea", principal="ann")
    assert merged["applied"] and len(office.query("select 1 as n from ticket where title = 'from the fork'")) == 1
    found = {each["name"]: each for each in merged["artifacts"]}
    assert {name: each["kind"] for name, each in found.items()} == {
        "home/user/notes": "changed", "home/user/made": "added", "home/user/old": "removed"
    }  # fmt: skip
    assert office.engine.get_blob(found["home/user/made"]["digest"]) == b"new\n"
    steps = office.query("select detail from step where kind = 'artifact'")
    assert {step["detail"]["name"] for step in steps} == set(found)
    child.kill()
    assert outcome(office, forked["execution"])["status"] == "done"
    assert office.verify().ok


def test_a_forked_box_is_itself_and_not_its_parent(office: Layer) -> None:
    box, _ = make(office)
    child, _ = fork(office, box)
    urls = [each.run(["sh", "-c", "echo $LAYER_URL"]).stdout.text.strip() for each in (box, child)]
    assert urls[0] != urls[1]
    get = "import urllib.request, urllib.error\ntry: print(urllib.request.urlopen({!r} + '/me').read())\nexcept urllib.error.HTTPError as e: print(e.code)"
    assert ask(child, get.format(urls[0])) == "403"
    assert '"branch":"idea"' in ask(child, get.format(urls[1]))
    assert refusal(child, "layer.delete('ticket', 1)").startswith(("Denied", "NotFound"))


def test_when_one_can_not_be_forked_neither_is(office: Layer) -> None:
    box, _ = make(office)
    office.fork("idea")
    with pytest.raises(Conflict):  # the branch is there already
        fork(office, box)
    assert [each.id for each in Sandbox.list(labels={"layer": office.id})] == [box.id]
    with pytest.raises(Conflict, match="exists already"):  # the name of the box is
        fork(office, box, name="other", box_name=box.name)
    with pytest.raises(Invalid):
        fork(office, box, name="other", box_name="No Name")
    with pytest.raises((Invalid, NotFound)):
        fork(office, box, name="other", slice={"nowhere": None})
    with pytest.raises(NotFound):
        office.call("reality.fork", name="other", box="nowhere")
    assert {row["name"] for row in office.query("select name from branch")} == {"main", "idea"}
    assert [each.id for each in Sandbox.list(labels={"layer": office.id})] == [box.id]
    assert len(office.query("select * from lineage")) == 1
    failed = office.query("select status from execution where verb = 'reality.fork'")
    assert {row["status"] for row in failed} <= {"failed"} and len(failed) == 5


def test_forking_needs_the_right_to_each(office: Layer) -> None:
    box, _ = make(office)
    office.principal("bob")
    with pytest.raises(Denied, match="may not fork box:"):
        fork(office, box, principal="bob")
    office.grant("bob", "fork", f"box:{box.name}")
    with pytest.raises(Denied, match="may not call contract:agent"):
        fork(office, box, principal="bob")
    office.grant("bob", "call", "contract:agent")
    with pytest.raises(Denied, match="may not fork branch:main"):
        fork(office, box, principal="bob")
    assert [each.id for each in Sandbox.list(labels={"layer": office.id})] == [box.id]
    office.grant("bob", "fork", "branch:main")
    _, told = fork(office, box, principal="bob")
    assert office.query("select principal from execution where id = :id", {"id": told["execution"]}) == [
        {"principal": "bob"}
    ]


def test_a_box_without_a_contract_can_be_forked_too(office: Layer) -> None:
    with Sandbox.create(name="plain-one", memory="64M", disk="64M") as plain:
        plain.run("echo here > /home/user/file")
        child, told = fork(office, plain, principal=None)
        assert child.run("cat /home/user/file; echo $LAYER_URL").stdout == "here\n\n"
        (line,) = office.query("select parent, branch from lineage")
        assert line == {"parent": plain.id, "branch": "idea"}
        child.run("echo more > /home/user/file")
        merged = office.call("reality.merge", name="idea")
        assert [each["name"] for each in merged["artifacts"]] == ["home/user/file"]
        child.kill()
        assert outcome(office, told["execution"])["status"] == "done"
        wait_until(lambda: office.engine.leases("box/") == [], "nobody looks after it any more")
