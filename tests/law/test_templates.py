"""Templates and volumes as rows and verbs, on both engines; what clients see of them is tested with E2B's own."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from sandbox.hosts import Host

from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, LayerError, NotFound
from livinglayer.law import templates, volumes


@pytest.fixture
def room(layer: Layer, boxes: Host) -> Layer:
    """A layer with the blueprint that templates are made of, and ann, who may build."""
    layer.call("blueprint.define", name="base", tier="namespace", limits={"memory": "128M"})
    layer.principal("ann")
    for what in ("box:base", "verb:template.build", "verb:volume.create"):
        layer.grant("ann", "call", what)
    return layer


def test_a_template_from_its_first_build_to_its_end(room: Layer) -> None:
    made = room.call("template.create", {"name": "tools:v1"}, principal="ann")
    assert (made["name"], made["tags"]) == ("ann/tools", ["v1"])
    me = room.query("select id from principal where name = 'ann'")[0]["id"]
    found = templates.find(room, me, "tools")
    assert templates.status(room, found, made["build"])["status"] == "waiting"
    given = {
        "template": "tools",
        "build": made["build"],
        "image": "e2bdev/base",
        "steps": [{"type": "RUN", "args": ["echo hello"], "force": True}],
    }
    room.call("template.build", given, principal="ann")
    told = templates.status(room, templates.find(room, me, made["template"]), made["build"])
    assert (told["status"], [line["message"] for line in told["log"]][1:3]) == (
        "ready",
        ["[1] RUN echo hello", "hello"],
    )
    assert (
        templates.status(room, found, made["build"], offset=2, limit=1)["log"] == []
    )  # of a row from before the build
    assert templates.resolve(room, me, "tools:v1") == "ann/tools:v1"
    with pytest.raises(NotFound, match="no finished build"):
        templates.resolve(room, me, "tools")
    with pytest.raises(Conflict, match="started already"):
        room.call("template.build", given, principal="ann")
    room.call("template.tag", {"target": "tools:v1", "tags": ["default"]}, principal="ann")
    assert templates.resolve(room, me, "tools") == "ann/tools"
    assert {row["name"] for row in room.query("select name from blueprint")} == {"base", "ann/tools", "ann/tools:v1"}
    room.principal("bob")
    with pytest.raises(LayerError):
        room.call("template.remove", {"template": "ann/tools"}, principal="bob")
    with pytest.raises(Denied, match=r"verb:template\.build"):
        room.call("template.create", {"name": "his"}, principal="bob")
    room.call("template.remove", {"template": "tools"}, principal="ann")
    assert [row["name"] for row in room.query("select name from blueprint")] == ["base"]


def test_a_build_that_waits_has_the_rights_of_when_it_begins(room: Layer) -> None:
    made = room.call("template.create", {"name": "late"}, principal="ann")
    me = room.query("select id from principal where name = 'ann'")[0]["id"]
    given = {"template": "late", "build": made["build"], "image": "e2bdev/base"}
    [right] = room.query("select id from permission where resource = 'verb:template.build'")
    with contextlib.ExitStack() as others, ThreadPoolExecutor(1) as pool:
        for _ in range(4):
            others.enter_context(templates.TURNS.turn((room.id, me), lambda _: None))
        build = pool.submit(room.call, "template.build", given, principal="ann")
        while not templates.status(room, templates.find(room, me, "late"), made["build"])["log"]:
            assert not build.done()
        room.revoke(right["id"])
        others.close()
        with pytest.raises(LayerError, match=r"verb:template\.build"):
            build.result(60)
    assert templates.status(room, templates.find(room, me, "late"), made["build"])["status"] == "error"


def test_a_volume_is_a_row_of_its_makers(room: Layer) -> None:
    made = room.call("volume.create", {"name": "data", "bytes": "8M"}, principal="ann")
    me = room.query("select id from principal where name = 'ann'")[0]["id"]
    assert [volumes.id_of(row) for row in volumes.known(room, me)] == [made["volume"]]
    assert volumes.known(room, room.my_id) == []
    with pytest.raises(NotFound):
        volumes.find(room, room.my_id, "data")
    assert volumes.find(room, room.my_id, made["volume"])["name"] == "data"  # an owner finds all by their ids
    with pytest.raises(Conflict, match="exists already"):
        room.call("volume.create", {"name": "data"}, principal="ann")
    with volumes.contents(volumes.find(room, me, "data")) as files:
        assert files.list("/") == []
    room.call("volume.remove", {"volume": "data"}, principal="ann")
    assert room.query("select count(*) as n from volume") == [{"n": 0}]


def test_builds_that_nobody_starts_are_forgotten_too(room: Layer) -> None:
    asked = [room.call("template.create", {"name": "many"}, principal="ann") for _ in range(templates.BUILDS + 5)]
    me = room.query("select id from principal where name = 'ann'")[0]["id"]
    known = templates.builds(templates.find(room, me, "many"))
    assert list(known) == [one["build"] for one in asked[-templates.BUILDS :]]


def test_a_template_is_not_larger_than_its_maker_may_make_it(room: Layer) -> None:
    for more in ({"cpu": 9}, {"memory": (8 << 30) + 1}):
        with pytest.raises(Invalid, match="at most"):
            room.call("template.create", {"name": "large", **more}, principal="ann")
        room.call("template.create", {"name": "large", **more})  # an owner
    room.call("template.create", {"name": "large", "cpu": 8, "memory": 8 << 30}, principal="ann")
