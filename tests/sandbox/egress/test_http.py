"""HTTP out of a box, by clients people use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sandbox.egress.boxes import Box, local


def test_http_by_curl(make_box: Callable[..., Box], servers: Any) -> None:
    box = make_box([local("index.test", servers.http)])
    assert box.curl("http://index.test/a?b=1") == (200, "GET /a?b=1")
    [event] = box.events(protocol="http")
    assert event["verdict"] == "allow" and event["path"] == "/a" and event["status"] == 200, event


def test_https_by_curl(make_box: Callable[..., Box], servers: Any) -> None:
    box = make_box([local("index.test", servers.https)])
    assert box.curl("--http1.1", "https://index.test/a") == (200, "GET /a")
    assert box.curl("https://index.test/b") == (200, "GET /b")
