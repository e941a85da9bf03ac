"""Bridging by the law: a box connects to another where its rules name it and a permission row lets it, and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.hosts import Host, wait_until

import livinglayer
from livinglayer import Layer
from livinglayer.law import bridging, tending
from livinglayer.sandbox.sandbox import Sandbox

SERVE = """
import http.server, sys
class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = sys.argv[1].encode()
        self.send_response(200); self.send_header("content-length", "99999" if self.path == "/slow" else str(len(body))); self.end_headers()
        if self.path == "/slow":
            while True: self.wfile.write(b"x"); self.wfile.flush(); __import__("time").sleep(0.05)
        self.wfile.write(body)
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Page).serve_forever()
"""
SQLITE = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
RULE = {"box": "web", "port": 8080}


@pytest.fixture
def street(layer: Layer, boxes: Host) -> Iterator[Layer]:
    """A layer in which ann and ben may open boxes that name others."""
    egress = [RULE, {"box": "ben/web", "port": 8080}, {"box": "owner/web", "port": 8080}]
    layer.call("blueprint.define", name="small", limits={"memory": "128M", "disk": "64M"}, egress=egress)
    layer.call("contract.define", name="asker", blueprint="small")
    for who in ("ann", "ben"):
        layer.principal(who)
        for resource in ("box:small", "contract:asker"):
            layer.grant(who, "call", resource)
    tending.of(layer).look()
    yield layer
    for box in Sandbox.list(labels={"layer": layer.id}):
        box.kill()
    tending.of(layer).close()


def serving(layer: Layer, who: str, name: str = "web") -> Any:
    """A box of somebody's with a page that says whose it is."""
    box = Sandbox.connect(layer.call("box.open", blueprint="small", name=name, egress=[], principal=who)["box"])
    box.files.write("/tmp/serve.py", SERVE)
    box.start(["python3", "/tmp/serve.py", who])
    line = "cat /proc/net/tcp | grep -q ':1F90 .* 0A '"
    wait_until(lambda: box.run(["sh", "-c", line]).exit_code == 0, "it serves")
    return box


def get(box: Any, name: str = "web", path: str = "/") -> str:
    done = box.run(["curl", "-s", "-m", "20", f"http://{name}.box.internal:8080{path}"])
    return str(done.stdout.text or f"curl {done.exit_code}")


def steps(layer: Layer, execution: int, **fields: Any) -> list[dict[str, Any]]:
    rows = layer.query("select detail from step where execution = :e and kind = 'network' order by n", {"e": execution})
    return [row["detail"] for row in rows if all(row["detail"].get(key) == value for key, value in fields.items())]


@pytest.mark.parametrize("kind", ["held", "contract"])
def test_a_grant_opens_it_and_its_end_cuts_it(street: Layer, kind: str) -> None:
    web = serving(street, "owner")
    if kind == "held":
        told = street.call("box.open", blueprint="small", principal="ann")
        box = Sandbox.connect(told["box"])
    else:
        told = street.call("box.create", contract="asker", principal="ann")
        box = Sandbox.connect(told["id"])
    assert "no permission lets this box connect to box 'web'" in get(box)
    permission = street.grant("ann", "connect", "box:web")
    wait_until(lambda: get(box) == "owner", "the grant counts")
    slow = box.start(["curl", "-s", "-m", "60", "-o", "/dev/null", "http://web.box.internal:8080/slow"])
    wait_until(lambda: web.run(["sh", "-c", "grep -q ':1F90 .* 01 ' /proc/net/tcp"]).exit_code == 0, "it is open")
    street.revoke(permission)
    assert slow.wait().exit_code not in (0, 28)  # cut, not timed out
    assert "no permission" in get(box)
    # Both boxes have it among their steps.
    wait_until(lambda: steps(street, told["execution"], to="web", verdict="allow"), "who asked has it")
    [page, *_] = steps(street, told["execution"], to="web", verdict="allow", path="/")
    assert (page["peer"], page["port"], page["host"]) == (web.id, 8080, "web.box.internal")
    made = street.query("select execution, detail from step where kind = 'box'")
    [served] = [row["execution"] for row in made if row["detail"].get("id") == web.id]
    wait_until(lambda: steps(street, served, protocol="bridge", origin=box.id), "who was asked has it")
    wait_until(lambda: steps(street, told["execution"], to="web", verdict="deny"), "refusals too")


@SQLITE
def test_names_belong_to_whoever_has_the_box(street: Layer) -> None:
    """A name is one's own, or that of whoever granted it; another's box of that name is not meant."""
    bens = serving(street, "ben")
    box = Sandbox.connect(street.call("box.open", blueprint="small", principal="ann")["box"])
    street.grant("ann", "connect", "box:web")  # by the owner, who has no such box
    bridging.look(street)
    assert "no permission" in get(box)
    street.grant("ann", "connect", "box:owner/web")
    bridging.look(street)
    assert "no permission" in get(box, "web.owner")
    street.grant("ann", "connect", "box:ben/web")
    bridging.look(street)
    assert get(box, "web.ben") == "ben" and "no permission" in get(box)
    bens.kill()
    serving(street, "ann")
    bridging.look(street)
    assert get(box) == "ann" and "no permission" in get(box, "web.ben")  # ben has none any more


@SQLITE
def test_a_box_of_another_layer_is_never_meant(street: Layer, tmp_path: Path) -> None:
    with livinglayer.open(tmp_path / "other", create=True) as other:
        tending.of(other).look()
        other.call("blueprint.define", name="small", limits={"memory": "128M", "disk": "64M"}, egress=[RULE])
        web = serving(other, "owner")
        box = Sandbox.connect(street.call("box.open", blueprint="small")["box"])  # an owner's: it may everything here
        bridging.look(street)
        assert "no permission" in get(box)
        web.kill()
        tending.of(other).close()


@SQLITE
def test_what_stands_still_is_woken_but_not_what_waits_for_a_yes(street: Layer) -> None:
    web = serving(street, "owner")
    box = Sandbox.connect(street.call("box.open", blueprint="small")["box"])
    street.call("box.pause", box=web.id)
    assert get(box) == "owner" and web.info()["state"] == "running"
    web.kill()
    bound = Sandbox.connect(street.call("box.create", contract="asker", name="web")["id"])
    bridging.look(street)
    bound.pause()
    assert get(box) == "box 'web' waits for somebody\n" and bound.info()["state"] == "paused"


@SQLITE
def test_a_function_connects_as_whoever_it_decides_by(street: Layer) -> None:
    serving(street, "owner")
    code = """
import urllib.request, urllib.error
def fetch():
    try:
        return urllib.request.urlopen("http://web.box.internal:8080/", timeout=20).read().decode()
    except urllib.error.HTTPError as error:
        return str(error.code)
"""
    street.call("function.define", name="page.fetch", code=code, blueprint="small", signature={"result": "text"})
    street.grant("ann", "call", "function:page.fetch")
    assert street.call("page.fetch", principal="ann") == "403"
    street.grant("ann", "connect", "box:web")
    assert street.call("page.fetch", principal="ann") == "owner"
