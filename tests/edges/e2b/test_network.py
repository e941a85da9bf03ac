"""E2B's network options, with its own client: what a box reaches, what the gateway adds, and what can't be had; secrets too."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from edges.serving import Server

e2b = pytest.importorskip("e2b")
KEY = "sk-live-0123456789abcdef"

FETCH = """
import sys, urllib.request, urllib.error
class Stay(urllib.request.HTTPRedirectHandler):
    pass
for url in sys.argv[1:]:
    request = urllib.request.Request(url, headers={"X-Key": "the box's own"})
    try:
        answer = urllib.request.urlopen(request, timeout=10)
    except urllib.error.HTTPError as error:
        answer = error
    except OSError as error:
        print("none", error)
        continue
    print(answer.status, answer.headers.get("layer-egress"), answer.read().decode().strip().replace(chr(10), " "))
"""


class Upstream:
    """A server of the world outside, which tells what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                upstream.asked.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
                if self.path.startswith("/to/"):
                    self.send_response(302)
                    self.send_header("location", f"http://{self.path[4:]}")
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                body = json.dumps(dict(self.headers.items())).encode() if self.path == "/echo" else b"reached"
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def upstream(server: Server) -> Iterator[Upstream]:
    """Names that lead to it, as a blueprint has them."""
    made = Upstream()
    at = {"protocol": "http", "resolve": f"127.0.0.1:{made.port}", "private": True}
    names = ["api.test", "other.test", "*.wild.test"]
    rules = [{"host": name, **at} for name in names] + [
        {"host": "elsewhere.test", **at, "resolve": f"127.0.0.2:{made.port}"}
    ]
    rules.append({"host": "10.0.0.0/8", "protocol": "http", "private": True})
    server.layer.call("blueprint.define", {"name": "net", "egress": rules, "limits": {"memory": "256M"}})
    yield made
    made.server.shutdown()


@pytest.fixture(autouse=True)
def api(server: Server, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's settings of E2B's client."""
    for name, value in server.e2b().items():
        monkeypatch.setenv(name, value)
    upstream.asked.clear()


def fetch(box: Any, *urls: str) -> list[str]:
    """What a box gets: the status, whether it was refused, and the body."""
    box.files.write("/tmp/fetch.py", FETCH)
    return str(box.commands.run(f"python3 /tmp/fetch.py {' '.join(urls)}").stdout).splitlines()


def test_lists_of_what_is_allowed_and_denied() -> None:
    with e2b.Sandbox.create("net") as box:
        assert (
            fetch(box, "http://api.test/", "http://a.wild.test/", "http://elsewhere.test/")[:2]
            == ["200 None reached"] * 2
        )
        box.update_network({"allow_out": ["api.test"], "deny_out": ["0.0.0.0/0"]})
        assert fetch(box, "http://api.test/") == ["200 None reached"]
        assert not any("reached" in line for line in fetch(box, "http://other.test/", "http://a.wild.test/"))
        box.update_network({"allow_out": ["*.wild.test"]})
        assert fetch(box, "http://a.wild.test/", "http://a.b.wild.test/") == ["200 None reached"] * 2
        assert not any("reached" in line for line in fetch(box, "http://api.test/", "http://wild.test/"))
        # A network that is denied is denied wherever a name leads; a name that is allowed beats it.
        box.update_network({"deny_out": ["127.0.0.0/8"]})
        assert all(line.startswith("403 deny") for line in fetch(box, "http://api.test/", "http://other.test/"))
        box.update_network({"deny_out": ["127.0.0.0/8"], "allow_out": ["api.test"]})
        assert fetch(box, "http://api.test/") == ["200 None reached"]
        box.update_network({"allow_internet_access": False})
        assert not any("reached" in line for line in fetch(box, "http://api.test/", "http://other.test/"))
        box.update_network({})  # what is not said is as if it had never been
        assert fetch(box, "http://other.test/") == ["200 None reached"]


def test_a_box_without_internet() -> None:
    with e2b.Sandbox.create("net", allow_internet_access=False) as box:
        assert not any("reached" in line for line in fetch(box, "http://api.test/", "http://other.test/"))


def test_no_box_reaches_more_than_its_blueprint() -> None:
    network = {"allow_out": ["*", "0.0.0.0/0", "example.com", "127.0.0.1", "169.254.169.254"]}
    with e2b.Sandbox.create("net", network=network) as box:
        assert fetch(box, "http://api.test/") == ["200 None reached"]
        for line in fetch(box, "http://example.com/", "http://169.254.169.254/", "http://8.8.8.8/"):
            assert "reached" not in line
            assert line.startswith(("403 deny", "none"))


def test_no_spelling_and_no_redirect_leads_around_a_list(upstream: Upstream) -> None:
    network = {"deny_out": ["10.0.0.0/8", "other.test"]}
    with e2b.Sandbox.create("net", network=network) as box:
        for url in ("http://10.9.8.7/", "http://168364039/", "http://0xa.9.8.7/", "http://012.9.8.7/", "http://10.591879/", "http://0x0a090807/"):  # fmt: skip
            (line,) = fetch(box, url)
            assert line.startswith(("403 deny", "400", "none")), (url, line)
        for url in ("http://api.test/to/other.test/", "http://api.test/to/OTHER.TEST./", "http://api.test/to/10.9.8.7/", "http://OTHER.test/", "http://other.test./"):  # fmt: skip
            (line,) = fetch(box, url)
            assert "reached" not in line, (url, line)
    assert {path for path, _ in upstream.asked} <= {"/to/other.test/", "/to/OTHER.TEST./", "/to/10.9.8.7/"}


def test_headers_that_a_box_never_holds(server: Server, upstream: Upstream) -> None:
    network = {"rules": {"api.test": [{"transform": {"headers": {"X-Key": KEY, "X-A": "b"}}}]}}
    with e2b.Sandbox.create("net", network=network) as box:
        (echoed,) = fetch(box, "http://api.test/echo")
        (_, sent) = upstream.asked[-1]
        assert (sent["x-key"], sent["x-a"]) == (KEY, "b")  # in place of the box's own
        assert KEY not in echoed and "LAYER_HEADER" in echoed  # a server that repeats it does not tell it
        fetch(box, "http://other.test/")
        assert upstream.asked[-1][1]["x-key"] == "the box's own"
        assert KEY not in box.commands.run("env; cat /proc/*/environ 2>/dev/null || true", user="root").stdout
        told = json.dumps(box.get_info().network)
        assert KEY not in told and "api.test" in told
        box.update_network({"rules": {"other.test": [{"transform": {"headers": {"X-Key": KEY}}}]}})
        fetch(box, "http://api.test/", "http://other.test/")
        assert [sent["x-key"] for _, sent in upstream.asked[-2:]] == ["the box's own", KEY]
        box.update_network({})
        fetch(box, "http://other.test/")
        assert upstream.asked[-1][1]["x-key"] == "the box's own"
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/sandboxes", headers={"x-api-key": server.key()})) as answer:  # fmt: skip
        assert KEY not in answer.read().decode()
    kept = server.layer.query("select arguments, result from execution") + server.layer.query("select detail from step")
    assert KEY not in json.dumps(kept, default=str)
    assert KEY not in server.log


def test_secrets_are_kept_and_put_into_headers(server: Server, upstream: Upstream) -> None:
    secret = e2b.Secret.create("model-key", KEY, metadata={"for": "models"})
    assert (secret.name, secret.version, secret.metadata) == ("model-key", 1, {"for": "models"})
    with pytest.raises(e2b.exceptions.SecretException, match="exists already"):
        e2b.Secret.create("model-key", KEY)
    again = e2b.Secret.update("model-key", f"{KEY}-2")
    assert (again.secret_id, again.version, again.metadata) == (secret.secret_id, 2, {"for": "models"})
    assert e2b.Secret.exists(secret.secret_id) and not e2b.Secret.exists("nothing")
    assert [one.name for one in e2b.Secret.list(limit=1).next_items()] == ["model-key"]
    for text in (
        "e2b: {",
        'e2b: ["x"]',
        'e2b: {"name": "model-key"}',
    ):  # whoever may write secrets writes what they like
        server.layer.call("secret.set", name="ODD", value=KEY, description=text)
        assert sorted(one.name for one in e2b.Secret.list().next_items()) == ["ODD", "model-key"]
    server.layer.call("secret.remove", name="ODD")
    header = {"Authorization": f"Bearer {e2b.Secret.fill('model-key')}"}
    network = {"rules": {"api.test": [{"transform": {"headers": header}}]}}
    with e2b.Sandbox.create("net", network=network) as box:
        (echoed,) = fetch(box, "http://api.test/echo")
        assert upstream.asked[-1][1]["authorization"] == f"Bearer {KEY}-2"
        assert KEY not in echoed
    ann = server.key("ann")
    server.layer.grant("ann", "call", "box:net")
    assert not e2b.Secret.exists("model-key", api_key=ann)
    assert e2b.Secret.list(api_key=ann).next_items() == [] and not e2b.Secret.destroy("model-key", api_key=ann)
    for name in ("model-key", "other"):  # whether it is there is not told
        with pytest.raises(e2b.exceptions.SecretException, match=f"^403: ann may not keep secret '{name}'"):
            e2b.Secret.create(name, KEY, api_key=ann)
    with pytest.raises(e2b.exceptions.SecretNotFoundException):
        e2b.Secret.update("model-key", KEY, api_key=ann)
    with pytest.raises(e2b.SandboxException):  # she may not use it, so no box of hers does
        e2b.Sandbox.create("net", network=network, api_key=ann)
    assert e2b.Secret.destroy("model-key")
    assert not e2b.Secret.destroy("model-key")
    with pytest.raises(e2b.SandboxException, match="no secret"):
        e2b.Sandbox.create("net", network=network)


@pytest.mark.parametrize("network", [
    {"egress_proxy": {"address": "proxy.test:1080"}}, {"dns_servers": []}, {"dns_servers": ["one"]}, {"allow_out": ["10.0.0.1/8"]}, {"deny_out": ["a b"]},
    {"rules": {"api.test": [{"transform": {"headers": {"Host": "x"}}}]}}, {"rules": {"api.test": [{"transform": {"headers": {"A": "b\r\nC: d"}}}]}},
    {"mask_request_host": "a/b"},
])  # fmt: skip
def test_what_can_not_be_had_is_refused(network: dict[str, Any]) -> None:
    with pytest.raises((e2b.SandboxException, e2b.InvalidArgumentException), match="400"):
        e2b.Sandbox.create("net", network=network)
