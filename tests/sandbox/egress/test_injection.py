"""Secrets at the gateway: they reach the hosts a rule names, never the box, and no log."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox.egress.boxes import Box, Gateway, local
from sandbox.egress.servers import Servers

MakeBox = Callable[..., Box]
KEY, OTHER = "sk-live-7f3a9c/+Q==x", 'pa"ss w\\ord&1'
SECRETS = {"KEY": KEY, "OTHER": OTHER}


def forms() -> list[str]:
    return [
        KEY,
        OTHER,
        base64.b64encode(KEY.encode()).decode(),
        base64.b64encode(f"user:{KEY}".encode()).decode(),
        KEY[:12],
    ]


@pytest.fixture
def box(make_box: MakeBox, servers: Servers) -> Box:
    return make_box(
        [local("*.secret.test", servers.https, secrets=["KEY", "OTHER"]), local("h2.good.test", servers.h2, secrets="KEY"), local("api.test", servers.https)],
        secrets=SECRETS,
    )  # fmt: skip


def last(servers: Servers) -> dict[str, Any]:
    return servers.seen[-1] | {"headers": dict(servers.seen[-1]["headers"])}


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_headers_query_and_body(box: Box, servers: Servers, version: str) -> None:
    status, echoed = box.curl(
        version, "-H", "Authorization: Bearer LAYER_SECRET_KEY", "-H", "Content-Type: application/json", "-d", '{"password": "LAYER_SECRET_OTHER"}',
        "https://a.secret.test/echo?key=LAYER_SECRET_KEY&x=1",
    )  # fmt: skip
    seen = last(servers)
    assert seen["headers"]["authorization"] == f"Bearer {KEY}" and seen["headers"]["accept-encoding"] == "identity"
    assert seen["target"] == "/echo?key=sk-live-7f3a9c%2F%2BQ%3D%3Dx&x=1"
    assert json.loads(seen["body"]) == {"password": OTHER} and int(seen["headers"]["content-length"]) == len(
        seen["body"]
    )
    assert status == 200 and not [form for form in forms() if form in echoed]
    assert json.loads(echoed)["target"] == "/echo?key=LAYER_SECRET_KEY&x=1"
    event = box.events(host="a.secret.test", method="POST")[-1]
    assert event["secrets"] == ["KEY", "OTHER"] and event["placeholders"] == [] and event["path"] == "/echo"


def test_over_http2_all_the_way(box: Box, servers: Servers) -> None:
    status, echoed = box.curl(
        "--http2", "-H", "x-key: LAYER_SECRET_KEY", "-d", "k=LAYER_SECRET_KEY", "https://h2.good.test/echo"
    )
    assert servers.seen[-1]["version"] == "2" and last(servers)["headers"]["x-key"] == KEY
    assert servers.seen[-1]["body"] == b"k=sk-live-7f3a9c%2F%2BQ%3D%3Dx"
    assert status == 200 and KEY not in echoed and json.loads(echoed)["body"] == "k=LAYER_SECRET_KEY"


def test_basic_credentials(box: Box, servers: Servers) -> None:
    status, echoed = box.curl("-i", "-u", "user:LAYER_SECRET_KEY", "https://a.secret.test/echo")
    assert last(servers)["headers"]["authorization"] == "Basic " + base64.b64encode(f"user:{KEY}".encode()).decode()
    assert status == 200 and not [form for form in forms() if form in echoed]
    assert base64.b64encode(b"user:LAYER_SECRET_KEY").decode() in echoed


def test_elsewhere_a_placeholder_stays_one(box: Box, servers: Servers) -> None:
    box.curl(
        "-H",
        "Authorization: Bearer LAYER_SECRET_KEY",
        "-d",
        "LAYER_SECRET_KEY",
        "https://api.test/echo/LAYER_SECRET_KEY?LAYER_SECRET_KEY",
    )
    seen = last(servers)
    assert (
        seen["headers"]["authorization"] == "Bearer LAYER_SECRET_KEY"
        and seen["body"] == b"LAYER_SECRET_KEY"
        and KEY not in seen["target"]
    )
    event = box.events(host="api.test", method="POST")[0]
    assert (event["secrets"], event["placeholders"], event["reason"]) == ([], ["KEY"], "placeholder left as it is: KEY")
    # a rule that names one secret does not give another
    box.curl("-H", "x: LAYER_SECRET_OTHER", "https://h2.good.test/echo")
    assert last(servers)["headers"]["x"] == "LAYER_SECRET_OTHER"
    # nor does a path get one
    box.curl("https://a.secret.test/echo/LAYER_SECRET_KEY")
    assert servers.seen[-1]["target"] == "/echo/LAYER_SECRET_KEY"


@pytest.mark.parametrize("path", ["/echo", "/echo/gzip", "/stream/split"])
def test_an_echo_is_hidden(box: Box, servers: Servers, path: str) -> None:
    done = box.run("curl", "-sSi", "--http1.1", "-H", "Authorization: LAYER_SECRET_KEY", f"https://a.secret.test{path}")
    assert last(servers)["headers"]["authorization"] == KEY
    assert "LAYER_SECRET_KEY" in done.stdout and not [form for form in forms() if form in done.stdout], done.stdout


def test_what_can_not_be_searched_does_not_come_back(box: Box) -> None:
    status, text = box.curl("-H", "Authorization: LAYER_SECRET_KEY", "https://a.secret.test/echo/br")
    assert status == 502 and "the gateway can't read" in text


def test_ranges_and_compression_are_not_asked_for(box: Box, servers: Servers) -> None:
    box.curl("-H", "Range: bytes=0-5", "-H", "If-Range: x", "--compressed", "https://a.secret.test/echo")
    assert {"range", "if-range"}.isdisjoint(last(servers)["headers"]) and last(servers)["headers"][
        "accept-encoding"
    ] == "identity"
    box.curl("-H", "Range: bytes=0-5", "--compressed", "https://api.test/echo")
    assert last(servers)["headers"]["range"] == "bytes=0-5" and "gzip" in last(servers)["headers"]["accept-encoding"]


def test_a_server_that_tells_another_box_host(box: Box, servers: Servers) -> None:
    """A value that comes back from where it was never sent is hidden too."""
    answer = box.curl("-d", KEY, "https://api.test/echo")[1]
    assert KEY not in answer and "LAYER_SECRET_KEY" in answer


def test_large_and_binary_bodies_pass_as_they_are(box: Box, servers: Servers, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"LAYER_SECRET_KEY" + b"x" * (1 << 20) + b"LAYER_SECRET_KEY")
    assert box.curl(
        "--data-binary", f"@{tmp_path}/big", "-H", "Content-Type: text/plain", "https://a.secret.test/length"
    ) == (200, str((1 << 20) + 32))
    assert box.events(host="a.secret.test", method="POST")[-1]["placeholders"] == ["KEY"]
    box.curl("-H", "Content-Type: application/octet-stream", "-d", "LAYER_SECRET_KEY", "https://a.secret.test/length")
    assert servers.seen[-1]["body"] == b"LAYER_SECRET_KEY"


def test_a_rule_may_say_where_a_secret_goes(make_box: MakeBox, servers: Servers) -> None:
    """Else a box could have a host publish it: as the text of a note, say."""
    box = make_box([local("api.test", servers.https, secrets="KEY", swap="header")], secrets=SECRETS)
    box.curl("-H", "x: LAYER_SECRET_KEY", "-d", "LAYER_SECRET_KEY", "https://api.test/echo?LAYER_SECRET_KEY")
    seen = last(servers)
    assert (seen["headers"]["x"], seen["body"], seen["target"]) == (KEY, b"LAYER_SECRET_KEY", "/echo?LAYER_SECRET_KEY")
    event = box.events(method="POST")[0]
    assert (event["secrets"], event["placeholders"]) == (["KEY"], ["KEY"])


def test_a_websocket_with_a_secret(make_box: MakeBox, servers: Servers) -> None:
    from sandbox.egress.test_http import WEBSOCKET

    box = make_box([local("api.test", servers.ws, secrets="KEY")], secrets=SECRETS)
    done = box.run(sys.executable, "-c", WEBSOCKET, "ws://api.test/")
    said = json.loads(done.stdout.splitlines()[2])
    assert {name.lower(): value for name, value in said.items()}["x-key"] == "*" * len(KEY)
    assert box.events(protocol="ws")[0]["secrets"] == ["KEY"]


def test_a_secret_taken_from_a_rule_is_no_longer_given(box: Box, servers: Servers) -> None:
    box.rules([local("a.secret.test", servers.https)])
    box.curl("-H", "Authorization: LAYER_SECRET_KEY", "https://a.secret.test/echo")
    assert last(servers)["headers"]["authorization"] == "LAYER_SECRET_KEY"


def test_line_breaks_in_a_secret_make_no_header(make_box: MakeBox, servers: Servers) -> None:
    box, seen = (
        make_box([local("api.test", servers.https, secrets="PEM")], secrets={"PEM": "one\r\nX-Evil: two"}),
        len(servers.seen),
    )
    for version in ("--http1.1", "--http2"):
        status, text = box.curl(version, "-H", "x: LAYER_SECRET_PEM", "https://api.test/echo")
        assert status == 400 and "two" not in text
    assert len(servers.seen) == seen
    assert box.curl("-H", "Content-Type: text/plain", "-d", "LAYER_SECRET_PEM", "https://api.test/length") == (
        200,
        "16",
    )


def test_a_planted_secret_is_in_no_log(own_gateway: Callable[..., Gateway], servers: Servers, tmp_path: Path) -> None:
    """Whatever a box does with what it has, or guesses: events, answers, stderr, recording and state stay clean."""
    running = own_gateway()
    box = Box(
        running,
        [local("a.secret.test", servers.https, secrets="KEY"), "good.test"],
        secrets={"KEY": KEY},
        record=str(tmp_path / "record"),
    )
    for version in ("--http1.1", "--http2"):
        box.curl(
            version,
            "-H",
            "Authorization: LAYER_SECRET_KEY",
            "-d",
            "LAYER_SECRET_KEY",
            "https://a.secret.test/echo?LAYER_SECRET_KEY",
        )
        # as if it had learned the value elsewhere
        box.curl(version, "-H", f"X: {KEY}", "-d", KEY, f"https://a.secret.test/{KEY}?{KEY}")
        box.curl(version, "-X", KEY.replace("/", ""), f"https://a.secret.test/%2e%2e/{KEY}")
        box.curl(version, f"https://93.184.216.34/{KEY}")
    box.run("curl", "-sS", "http://sk-live-7f3a9c.test/")
    answer, _ = running.ask({"do": "open", "box": "x", "rules": [], "secrets": {"BAD-NAME": KEY}}, [box.tcp, box.dns])
    assert answer["ok"] is False
    box.events(2, host="93.184.216.34")
    box.drop()
    running.stop()
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for form in [KEY, base64.b64encode(KEY.encode()).decode(), "7f3a9c%2F%2BQ"]:
        assert form.encode() not in running.raw
        assert form.encode() not in kept
    assert b"LAYER_SECRET_KEY" in kept
