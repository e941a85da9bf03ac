"""What was said to models, as hosts have it: read by whoever looks after a box, also after its end, and never lost with a host."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from sandbox.egress.test_models import MESSAGE, Models, at_model, model  # noqa: F401  (a fixture)
from sandbox.hosts import Host, wait_until

from livinglayer.errors import Invalid, NotFound
from livinglayer.sandbox import exchanges
from livinglayer.sandbox.sandbox import Sandbox

ASK = "import urllib.request as r\nfor n in range({0}): r.urlopen(r.Request('http://model.test/v1/messages', b'{{}}')).read()"


def told(box: Any) -> list[dict[str, Any]]:
    """Of each exchange that its trace has."""
    return [event["model"] for event in box.trace() if event["event"] == "network" and "model" in event]


def made(model: Models, **more: Any) -> Any:  # noqa: F811
    model.answers(json.dumps(MESSAGE).encode())
    return Sandbox.create(egress=[at_model(model)], **more)


def test_bodies_are_read_while_a_box_lives_and_after(own_host: Host, model: Models) -> None:  # noqa: F811
    box = made(model, name="asking")
    assert box.run(["python3", "-c", ASK.format(1)]).ok
    wait_until(lambda: len(told(box)) == 1, "it is told", 10)
    name = told(box)[0]["exchange"]
    assert box.exchange(name, "request") == b"{}" and json.loads(box.exchange(name, "answer")) == MESSAGE
    for wrong in ("../../boxes/x", "", f"{name}/../{name}", name + "\n"):
        with pytest.raises(Invalid):
            box.exchange(wrong, "request")
    with pytest.raises(Invalid):
        box.exchange(name, "json")
    with pytest.raises(NotFound):
        box.exchange("0-000000", "request")
    box.kill()
    assert box.exchange(name, "request") == b"{}"
    assert [event["model"]["exchange"] for event in box.trace() if "model" in event] == [name]


def test_a_host_that_dies_forgets_none(own_host: Host, model: Models) -> None:  # noqa: F811
    box = made(model, name="asking")
    assert box.run(["python3", "-c", ASK.format(20)]).ok
    own_host.crash()  # before it has written all of it down
    own_host.hang_up()
    again = Sandbox.connect("asking")
    assert len({one["exchange"] for one in told(again)}) == len(told(again)) == 20
    own_host.crash()
    own_host.hang_up()
    assert len(told(Sandbox.connect("asking"))) == 20  # each once, however often it starts
    Sandbox.connect("asking").kill()


def test_of_boxes_that_have_ended_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "MOST", 250)
    (tmp_path / "traces").mkdir()
    for age, name in enumerate(("alive", "new", "newer", "old", "untraced")):
        at = exchanges.directory(tmp_path, name)
        at.mkdir(parents=True)
        (at / "1-000000.request").write_bytes(b"x" * 100)
        os.utime(at, (1e9 - age, 1e9 - age))
        if name != "untraced":
            (tmp_path / "traces" / f"{name}.jsonl").touch()
    exchanges.prune(tmp_path, {"alive"})
    assert {path.name for path in (tmp_path / "exchanges").iterdir()} == {"alive", "new", "newer"}
    shutil.rmtree(tmp_path / "exchanges")
    exchanges.prune(tmp_path, set())
