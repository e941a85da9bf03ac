"""The same function works on every tier, through the same channel."""

from __future__ import annotations

import pytest
from law.conftest import define

from livinglayer import Layer
from livinglayer.sandbox.blueprint import TIERS

CODE = """
import json, os, subprocess, urllib.request
import layer

def main(id):
    row = layer.one("select priority from ticket where id = :id", id=id)
    layer.update("ticket", id, priority=row["priority"] + 1)
    body = json.dumps({"sql": "select priority from ticket where id = :id", "params": {"id": id}}).encode()
    with urllib.request.urlopen(urllib.request.Request(os.environ["LAYER_URL"] + "/query", body)) as answer:
        plain = json.load(answer)["rows"][0]["priority"]
    told = json.loads(subprocess.check_output(["layer", "--json", "query", f"select priority from ticket where id = {id}"]))
    try:
        layer.insert("customer", name="not in its scope")
        refused = False
    except layer.Denied:
        refused = True
    layer.emit("seen", tier=os.environ.get("LAYER_BOX"))
    open("note.txt", "w").write("kept")
    layer.artifact("note.txt")
    return {"plain": plain, "command": told, "refused": refused}
"""


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("tier", TIERS)
def test_one_function_on_every_tier(desk: Layer, tier: str) -> None:
    desk.call("blueprint.define", name=f"on-{tier}", tier=tier, limits={"memory": "512M", "pids": 512})
    define(desk, "ticket.everywhere", CODE, blueprint=f"on-{tier}", timeout=120.0)
    id = desk.insert("ticket", {"title": "t", "priority": 1})
    answer = desk.call("ticket.everywhere", id=id)
    assert answer["plain"] == 2 and answer["refused"] is True and "2" in str(answer["command"])
    assert desk.query("select priority from ticket") == [{"priority": 2}]
    [run] = desk.query("select id, status from execution where function = 'ticket.everywhere'")
    kinds = {row["kind"] for row in desk.query("select kind from step where execution = :e", {"e": run["id"]})}
    assert run["status"] == "done" and kinds >= {
        "box",
        "query",
        "mutation",
        "refusal",
        "emit",
        "artifact",
        "command",
        "return",
    }
    assert desk.query("select tier from box where id = :id", {"id": f"b{run['id']}"}) == [{"tier": tier}]
