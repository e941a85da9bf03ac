"""Layer to layer, between two real servers: a grant in the one and a row in the other, nothing else; and attacks on it."""

from __future__ import annotations

import base64
import http.server
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from edges.serving import Server
from sandbox.hosts import Host

from livinglayer.edges.http import layers
from livinglayer.edges.http.auth import Gate
from livinglayer.edges.http.metrics import Metrics
from livinglayer.edges.http.serving import Serving
from livinglayer.errors import Denied, Invalid, LimitExceeded, NotFound, Unauthenticated, Unavailable
from livinglayer.law.tree import nodes
from livinglayer.projection import identity, remote

PATH = "/api/projection/shown"


@pytest.fixture(scope="module")
def servers(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A layer that shows what its tickets cost to another one, and that other one."""
    made = []
    before = {name: os.environ.get(name) for name in host.environment()}
    os.environ |= host.environment()
    try:
        for name in ("a", "b"):
            home = tmp_path_factory.mktemp(name)
            made.append(Server(str(home / "layer"), home, host.environment(), "--no-worker"))
        a, b = made
        a.layer.define("ticket", {"title": "text!", "price": "decimal", "secret": "text"})
        statement = "select title, price from ticket where title <> :but order by id"
        but = {"but": {"type": "text", "default": ""}}
        a.layer.call("projection.define", name="shown", statement=statement, parameters=but)
        a.layer.principal("other", "layer", {"key": identity.name(b.layer.id)})
        yield a, b
    finally:
        for each in made:
            each.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@pytest.fixture
def two(servers: tuple[Server, Server]) -> tuple[Server, Server]:
    """Both, with one ticket that is shown."""
    a, b = servers
    for row in a.layer.query("select id from ticket"):
        a.layer.delete("ticket", row["id"])
    a.layer.insert("ticket", {"title": "printer", "price": Decimal("1.50"), "secret": "hush"})
    if not a.layer.can("other", "read", "projection:shown"):
        a.layer.grant("other", "read", "projection:shown")
    define(b, "theirs", a)
    return a, b


def define(b: Server, name: str, a: Server, **more: Any) -> None:
    freshness = more.pop("freshness", None)
    b.layer.call(
        "projection.define", name=name, remote={"url": a.url, "projection": "shown", **more}, freshness=freshness
    )


def get(server: Server, path: str, principal: str = "owner") -> Any:
    request = urllib.request.Request(server.url + path, headers={"authorization": f"Bearer {server.token(principal)}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def post(
    server: Server, text: str, path: str = PATH, body: bytes = b"{}", **headers: str
) -> tuple[int, dict[str, Any]]:
    """Status and body of a request that proves itself with a text."""
    given = {"authorization": f"Bearer {text}", "content-type": "application/json", **headers}
    request = urllib.request.Request(server.url + path, body, given, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_grant_there_and_a_row_here_are_all_it_takes(two: tuple[Server, Server]) -> None:
    a, b = two
    assert b.layer.projection("theirs") == [{"title": "printer", "price": Decimal("1.50")}]
    assert b.layer.projection("theirs", but="printer") == []
    a.layer.insert("ticket", {"title": "phone", "price": Decimal("2")})  # seen at once
    assert [row["title"] for row in get(b, "/api/projection/theirs")["rows"]] == ["printer", "phone"]
    with pytest.raises(NotFound):  # who reads it here is decided here
        b.layer.projection("theirs", principal=b.principal("ben"))
    b.layer.grant("ben", "read", "projection:theirs")
    assert len(b.layer.projection("theirs", principal="ben")) == 2
    with pytest.raises(Invalid, match="no parameter 'x'"):
        b.layer.projection("theirs", x=1)
    [row] = a.layer.query("select how, outcome, principal from sign_in where how = 'layer'")
    assert row["outcome"] == "in"
    permission = a.layer.query("select id from permission where resource = 'projection:shown'")[0]["id"]
    a.layer.revoke(permission)
    with pytest.raises(Unavailable, match="does not show projection 'shown' to this layer"):
        b.layer.projection("theirs")
    define(b, "pinned", a, key=identity.name(a.layer.id))  # a refusal is signed too: it is not taken for a stranger's
    with pytest.raises(Unavailable, match="does not show projection 'shown' to this layer"):
        b.layer.projection("pinned")


def test_a_layer_is_known_by_a_key_and_nothing_else(two: tuple[Server, Server]) -> None:
    """What `layer principal --kind layer` takes is just what can prove something."""
    a, b = two
    true = identity.name(b.layer.id)
    spelt = true[:-1] + chr(ord(true[-1]) + 1)  # the same bytes, were they read carelessly
    for key in ("foo", "", true.removeprefix("layer:"), true + "=", true + "\n", true[:-1], true + "A", spelt, f"layer:{'ü' * 43}", 5, [true]):  # fmt: skip
        with pytest.raises(Invalid):
            identity.public(key)
        with pytest.raises(Invalid, match="is no key of a layer"):
            a.layer.principal("b_known", "layer", {"key": key})
    assert a.layer.query("select 1 as n from principal where name = 'b_known'") == []
    a.layer.principal("b_known", "service", {"key": "foo"})  # of others it says nothing
    with pytest.raises(Invalid, match="'foo' is no key of a layer"):
        a.layer.principal("b_known", "layer")
    with pytest.raises(Invalid, match="is no key of a layer"):
        a.layer.call("principal.define", name="b_known", kind="layer", attributes={"key": "foo"})
    a.layer.principal("b_known", "layer", {"key": identity._name(Ed25519PrivateKey.generate().public_key())})


def test_by_the_command_line(two: tuple[Server, Server]) -> None:
    a, b = two

    def run(server: Server, *words: str) -> str:
        command = [sys.executable, "-m", "livinglayer.edges.cli.main", "--dir", server.directory, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | server.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    named = run(a, "identity")
    assert named == identity.name(a.layer.id) and named.startswith("layer:")
    run(b, "principal", "first", "--kind", "layer", "--attribute", f"key={named}")
    assert b.layer.query("select kind, attributes from principal where name = 'first'") == [
        {"kind": "layer", "attributes": {"key": named}}
    ]
    run(b, "projection", "define", "pinned", "--remote", a.url, "--of", "shown", "--key", named)
    assert "printer" in run(b, "projection", "read", "pinned")


def test_why_names_the_tx_of_the_other_layer(two: tuple[Server, Server]) -> None:
    a, b = two
    code = "import layer\ndef copy():\n    for row in layer.projection('theirs'):\n        layer.insert('seen', title=row['title'])\n"
    b.layer.define("seen", {"title": "text!"})
    b.layer.call("function.define", name="seen.copy", code=code, writes=["seen"], projections=["theirs"])
    b.layer.call("seen.copy")
    [row] = b.layer.query("select id, title from seen")
    assert row["title"] == "printer"
    [step] = b.layer.query("select detail from step where kind = 'query'")
    last = a.layer.query("select max(tx) as tx from ticket__history")[0]["tx"]
    told = step["detail"]["remote"]
    assert told["url"] == a.url and told["projection"] == "shown" and told["tx"] >= last
    why = b.layer.why(f"seen/{row['id']}")
    assert [node.data["detail"] for node in nodes(why, "step")] == [told]


def test_a_change_there_is_told_here_live(two: tuple[Server, Server]) -> None:
    a, b = two
    request = urllib.request.Request(
        f"{b.url}/api/live?projection=theirs", headers={"authorization": f"Bearer {b.token()}"}
    )
    told: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        with urllib.request.urlopen(request, timeout=60) as stream:
            for line in stream:
                if line.startswith(b"data: "):
                    told.put(json.loads(line[6:]))

    threading.Thread(target=listen, daemon=True).start()
    assert len(told.get(timeout=20)["rows"]) == 1
    a.layer.insert("ticket", {"title": "phone"})
    assert len(told.get(timeout=20)["rows"]) == 2
    a.restart()
    a.layer.insert("ticket", {"title": "fax"})
    assert len(told.get(timeout=30)["rows"]) == 3


def test_freshness_says_how_old_an_answer_may_be(two: tuple[Server, Server]) -> None:
    a, b = two
    define(b, "old", a, freshness={"bounded": 3_600_000})
    define(b, "new", a, freshness="strong")
    assert len(b.layer.projection("old")) == len(b.layer.projection("new")) == 1
    a.layer.insert("ticket", {"title": "phone"})
    assert (len(b.layer.projection("old")), len(b.layer.projection("new"))) == (1, 2)
    a.stop()
    assert len(b.layer.projection("old")) == 1
    with pytest.raises(Unavailable, match="can't be reached"):
        b.layer.projection("new")
    with pytest.raises(urllib.error.HTTPError) as error:
        get(b, "/api/projection/new")
    assert error.value.code == 503 and "can't be reached" in error.value.read().decode()
    a.start()
    assert len(b.layer.projection("new")) == 2


def test_only_an_owner_says_whom_the_server_asks(two: tuple[Server, Server]) -> None:
    a, b = two
    b.principal("ben")
    b.layer.grant("ben", "write", "projection")
    b.layer.grant("ben", "read", "projection")
    spy = {"url": a.url, "projection": "shown"}
    with pytest.raises(Denied, match="only an owner"):
        b.layer.call("projection.define", name="spied", remote=spy, principal="ben")
    ben = b.layer.acting_as(b.layer.id_of("ben"))
    ben.insert("projection", {"name": "spied", "statement": "select 1", "remote": spy})  # past the verb
    with pytest.raises(Denied, match="only an owner"):
        b.layer.projection("spied")
    for url in (
        "file:///etc/passwd", "ftp://x.test", "http://", "http://u:p@x.test", "http://x.test/a", "http://x.test?y", "http://x.test#z",
        "http://x.test:0", "http://x.test:99999", "gopher://x", "http://a b", "http://x.test\r\nHost: y", "javascript:1", "", 7, None,
    ):  # fmt: skip
        with pytest.raises(Invalid):
            b.layer.call("projection.define", name="odd", remote={"url": url, "projection": "shown"})
    for wrong in (
        {},
        {"url": a.url},
        {"url": a.url, "projection": "../x"},
        {**spy, "key": "layer:x"},
        {**spy, "more": 1},
    ):
        with pytest.raises(Invalid):
            b.layer.call("projection.define", name="odd", remote=wrong)


class Odd(http.server.BaseHTTPRequestHandler):
    """A server that is no layer."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        how = self.path.rpartition("/")[2]
        if how == "elsewhere":
            self.send_response(307)
            self.send_header("location", self.server.lure)  # type: ignore[attr-defined]
            self.send_header("content-length", "0")
            self.end_headers()
            return
        body = {
            "huge": b"[" + b"1," * (17 << 20) + b"1]",
            "text": b"hello",
            "deep": b"[" * 100_000,
            "rows": b'{"rows": [1], "tx": 1}',
        }
        data = body.get(how, b'{"rows": [], "tx": 5}')
        self.send_response(200)
        self.send_header("content-length", str(len(data) + (how == "short")))
        self.end_headers()
        self.wfile.write(data)
        if how == "slow":
            time.sleep(30)
        self.close_connection = how == "short"

    def log_message(self, *args: Any) -> None:
        pass


def test_what_is_no_layer_is_unavailable(two: tuple[Server, Server]) -> None:
    a, b = two
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    server.lure = f"{a.url}{PATH}"  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        for how in ("elsewhere", "huge", "text", "deep", "rows", "short"):
            with pytest.raises((Unavailable, LimitExceeded)):
                remote.fetch(b.layer, remote.check({"url": url, "projection": how}), {})
        # One that is not the layer that was meant, however well it answers.
        assert remote.fetch(b.layer, remote.check({"url": url, "projection": "fine"}), {})[0] == []
        pinned = {"url": url, "projection": "fine", "key": identity.name(a.layer.id)}
        with pytest.raises(Unavailable, match="is not the layer"):
            remote.fetch(b.layer, remote.check(pinned), {})
        rows, source = remote.fetch(b.layer, remote.check({**pinned, "url": a.url, "projection": "shown"}), {})
        assert len(rows) == 1 and source.layer == identity.name(a.layer.id)
    finally:
        server.shutdown()
        server.server_close()


def test_what_is_signed_is_good_for_one_request_and_one_receiver(two: tuple[Server, Server]) -> None:
    a, b = two
    me, us = b.layer.id, identity.name(a.layer.id)
    sign = identity.request

    def status(text: str, **more: Any) -> int:
        a_status, said = post(a, text, **more)
        assert a_status in (200, 401), said
        return a_status

    text, _ = sign(me, a.url, "POST", PATH, b"{}")
    assert status(text) == 200
    assert status(text) == 401  # once
    assert status(sign(me, us, "POST", PATH, b"{}")[0]) == 200  # by its name too
    assert status(sign(me, a.url, "POST", PATH, b"{}")[0], body=b'{"but": "printer"}') == 401  # another body
    assert status(sign(me, a.url, "POST", "/api/projection/other", b"{}")[0]) == 401  # another path
    assert status(sign(me, a.url, "GET", PATH, b"{}")[0]) == 401  # another method
    assert status(sign(me, a.url, "POST", PATH, b"{}")[0], path=f"{PATH}?branch=main") == 401  # another query
    for other in (b.url, identity.name(b.layer.id), "http://evil.test"):  # for somebody else, who passes it on
        assert status(sign(me, other, "POST", PATH, b"{}")[0]) == 401
    # A layer is nobody else: what it may not see is not there, and it writes nothing.
    assert post(a, sign(me, a.url, "POST", "/api/projection/none", b"{}")[0], "/api/projection/none")[0] == 404
    body = json.dumps({"entity": "ticket", "values": {"title": "x"}}).encode()
    assert post(a, sign(me, a.url, "POST", "/api/row.insert", body)[0], "/api/row.insert", body)[0] in (403, 404)


def test_what_is_forged_proves_nothing(two: tuple[Server, Server]) -> None:
    """At what the server proves requests with, so that no address is locked out."""
    a, b = two
    serving = Serving(a.layer, a.url, "x.test", frozenset({"127.0.0.1", "a.test"}), Gate(), Metrics())
    stranger, mine, now = Ed25519PrivateKey.generate(), identity.private(b.layer.id), int(time.time())
    said = {"iss": identity.name(b.layer.id), "aud": a.url, "iat": now, "exp": now + 30, "htm": "POST", "path": PATH, "body": identity.digest(b"{}")}  # fmt: skip
    count = iter(range(100))

    def forged(key: Any = mine, algorithm: str = "EdDSA", kind: str = identity.REQUEST, **more: Any) -> str:
        claims = {**said, "jti": f"forged-number-{next(count):06}", **more}
        text = json.dumps({name: value for name, value in claims.items() if value is not ...}).encode()
        return jwt.PyJWS().encode(text, key, algorithm, {"typ": kind})

    def holds(text: str) -> bool:
        try:
            return layers._prove(serving, text, "POST", PATH, b"{}").name == "other"
        except Unauthenticated:
            return False

    assert holds(forged()) and holds(forged(aud="https://a.test")) and holds(forged(aud=identity.name(a.layer.id)))
    wrong = [
        forged(stranger),  # another's key under its name
        forged(stranger, iss=identity._name(stranger.public_key())),  # a layer that nobody knows
        forged(kind=identity.ANSWER),
        forged(exp=now + 3600),
        forged(iat=now - 120, exp=now - 60),
        forged(iat=now + 3600, exp=now + 3630),
        forged(base64.urlsafe_b64encode(identity.public(identity.name(b.layer.id)).public_bytes_raw()), "HS256"),
        forged(None, "none"),
        *(forged(**{missing: ...}) for missing in ("iss", "aud", "iat", "exp", "jti", "htm", "path", "body")),
        *(forged(aud=other) for other in (b.url, "http://evil.test", "http://127.0.0.1:1", "ftp://a.test", "http://[", [a.url], None, 7)),
        *(forged(exp=odd) for odd in ("soon", True, 1e400, -1, [], str(now + 30))),
        *(forged(iat=odd) for odd in ("x", 1e400, {}, None)),
        *(forged(jti=odd) for odd in (7, "x", "x" * 1000, None)),
        *(forged(iss=odd) for odd in (5, "layer:", "layer:" + "A" * 43, f"{said['iss']}=")),
        ".".join([*forged().split(".")[:2], ""]),
        "a.b.c", "..", "{}.{}.{}",
    ]  # fmt: skip
    assert [text for text in wrong if holds(text)] == []
    once = forged()
    assert holds(once) and not holds(once)
    a.layer.principal("twin", "layer", {"key": said["iss"]})  # two of one name: nobody
    assert not holds(forged())
    a.layer.principal("twin", "layer", {"key": "layer:" + "A" * 43})


def test_it_never_costs_the_key(two: tuple[Server, Server]) -> None:
    """The private half is in one file that others can't read, and in no row, log or answer."""
    _, b = two
    place = identity._place(b.layer.id)
    assert place.stat().st_mode & 0o777 == 0o600
    lines = [line for line in place.read_text().splitlines() if "-" not in line]
    assert b.layer.projection("theirs") and not any(line in b.log for line in lines)
    place.chmod(0o644)
    with pytest.raises(Denied, match="can be read by others"):
        identity.name(b.layer.id)
    place.chmod(0o600)


def test_a_server_that_drips_is_broken_off(two: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    _, b = two
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        peer, _ = listener.accept()
        try:
            peer.recv(65536)
            peer.sendall(b"HTTP/1.1 200 OK\r\n")
            while True:
                peer.sendall(b"x: y\r\n")
                time.sleep(0.2)
        except OSError:
            pass

    threading.Thread(target=drip, daemon=True).start()
    monkeypatch.setattr(remote, "SECONDS", 1.0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(Unavailable, match="no answer within 1 seconds"):
        remote.fetch(b.layer, remote.check({"url": url, "projection": "x"}), {})
    listener.close()


@pytest.mark.torture
def test_two_servers_of_a_layer_take_a_statement_once(
    serve: Callable[..., Server], two: tuple[Server, Server], postgres_cluster: Callable[..., Any]
) -> None:
    _, b = two
    with postgres_cluster().database() as place:
        first = serve(place)
        second = serve(place)
        first.layer.define("ticket", {"title": "text!"})
        first.layer.call("projection.define", name="shown", statement="select title from ticket")
        first.layer.principal("other", "layer", {"key": identity.name(b.layer.id)})
        first.layer.grant("other", "read", "projection:shown")
        text, _ = identity.request(b.layer.id, identity.name(first.layer.id), "POST", PATH, b"{}")
        assert post(first, text)[0] == 200 and post(second, text)[0] == 401
        text, _ = identity.request(b.layer.id, identity.name(first.layer.id), "POST", PATH, b"{}")
        assert post(second, text)[0] == 200 and post(first, text)[0] == 401
        first.close()
        second.close()
