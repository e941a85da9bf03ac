"""The native API, asked by plain HTTP: what it gives, and what it says to bad requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from typing import Any
from urllib.parse import urlencode

import pytest
from edges.serving import Server

from livinglayer.edges.http.native import EACH, Turns


class Asker:
    """Somebody with a token and a connection."""

    def __init__(self, server: Server, token: str | None) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def __call__(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **given: str
    ) -> Answer:
        sent = {**self.headers, **(headers or {})}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        target = path + (f"?{urlencode(given)}" if given else "")
        try:
            self.connection.request(method, target, body, sent)
            found = self.connection.getresponse()
        except (http.client.HTTPException, OSError):  # it was restarted meanwhile
            self.connection.close()
            self.connection.request(method, target, body, sent)
            found = self.connection.getresponse()
        return Answer(found.status, dict(found.getheaders()), found.read())

    def post(self, verb: str, headers: dict[str, str] | None = None, **arguments: Any) -> Answer:
        return self("POST", f"/api/{verb}", arguments, headers)


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, {k.lower(): v for k, v in headers.items()}, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def result(self) -> Any:
        assert self.status == 200, self.body
        return self.json["result"]

    @property
    def code(self) -> tuple[int, str]:
        error = self.json["error"]
        assert set(error) >= {"code", "message", "hint"}
        return self.status, error["code"]


@pytest.fixture(scope="module")
def owner(server: Server) -> Asker:
    server.layer.define("item", {"name": "text!", "qty": "int", "price": "decimal", "more": "json", "doc": "file"})
    server.layer.define("vault", {"name": "text!"})
    server.layer.insert("vault", {"name": "gold"})
    server.principal("ann")
    server.principal("ben")
    server.layer.grant("ann", "*", "item", where="name like 'ann%'")
    server.layer.grant("ben", "*", "item", where="name like 'ben%'")
    return Asker(server, server.token("owner"))


@pytest.fixture(scope="module")
def ann(server: Server, owner: Asker) -> Asker:
    return Asker(server, server.token("ann"))


@pytest.fixture(scope="module")
def ben(server: Server, owner: Asker) -> Asker:
    return Asker(server, server.token("ben"))


@pytest.fixture(autouse=True)
def never_a_fault(server: Server) -> Iterator[None]:
    """No request, however bad, makes the server fail."""
    yield
    assert "Traceback" not in server.log


def test_a_row_is_made_changed_and_read(owner: Asker) -> None:
    made = owner.post("row.insert", entity="item", values={"name": "bolt", "qty": 3, "price": "1.50"}).result
    (row,) = owner("GET", "/api/query", sql="select name, price from item where id = :id", params=json.dumps({"id": made})).json["rows"]  # fmt: skip
    assert row == {"name": "bolt", "price": "1.50"}
    found = owner("GET", f"/api/row/item/{made}")
    assert found.json["row"]["qty"] == 3 and found.headers["etag"] == f'"{found.json["tx"]}"'
    seen = {"If-Match": found.headers["etag"]}
    changed = owner.post("row.update", seen, entity="item", id=made, values={"qty": 4})
    assert changed.headers["layer-tx"] == str(changed.result)
    assert owner.post("row.update", seen, entity="item", id=made, values={"qty": 5}).code == (412, "conflict")
    assert [row["qty"] for row in owner("GET", f"/api/history/item/{made}").json["rows"]] == [3, 4]
    assert owner("GET", "/api/why", subject=f"item/{made}").json["tree"]["kind"] == "row"
    assert owner("GET", "/api/can", action="read", resource="item").json["allowed"] is True
    assert owner("POST", "/api/row.delete?reason=old", {"entity": "item", "id": made}).status == 200
    assert owner("GET", f"/api/row/item/{made}").code == (404, "not_found")


def test_branches_over_http(owner: Asker) -> None:
    made = owner.post("row.insert", entity="item", values={"name": "fork me", "qty": 1}).result
    owner.post("branch.fork", name="idea").result  # noqa: B018
    assert (
        owner("POST", "/api/row.update?branch=idea", {"entity": "item", "id": made, "values": {"qty": 2}}).status == 200
    )
    assert len(owner("GET", "/api/diff", branch="idea").json["changes"]) == 1
    assert owner.post("branch.merge", name="idea", preview=True).result["applied"] is False
    assert owner.post("branch.merge", name="idea").result["applied"] is True
    assert owner("GET", "/api/conflicts").json == {"conflicts": []}
    assert owner.post("branch.discard", name="idea").result is None


def test_answers_come_in_the_form_that_is_asked_for(owner: Asker) -> None:
    asked = {"sql": "select 'a,b' as x, null as y, 1.5 as z union all select 'c', 'd', 2"}
    assert owner("GET", "/api/query", None, {"Accept": "text/csv"}, **asked).body == b'x,y,z\r\n"a,b",,1.5\r\nc,d,2\r\n'
    lines = owner("GET", "/api/query", **asked, format="ndjson")
    assert lines.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["x"] for line in lines.body.splitlines()] == ["a,b", "c"]
    assert owner("GET", "/api/query", None, {"Accept": "image/png"}, **asked).code == (406, "unacceptable")
    assert owner("GET", "/api/query", **asked, format="xml").code == (400, "invalid")
    arrow = owner("GET", "/api/query", **asked, format="arrow")
    assert arrow.status == 200 or arrow.code == (406, "unacceptable")  # test_arrow.py has a server with pyarrow
    typed = owner("POST", "/api/query", {"sql": "select price from item where price is not null"}, {"Accept": "application/vnd.livinglayer+json"})  # fmt: skip
    assert typed.headers["content-type"] == "application/vnd.livinglayer+json"
    assert owner("GET", "/api/query", sql="select 9e999 as n").json["rows"] == [{"n": None}]  # JSON has no infinity


def test_pages_go_on_where_the_last_ended_and_stay_in_their_moment(owner: Asker) -> None:
    owner.post("entity.define", name="leaf", fields={"n": "int"})
    owner.post("row.insert", entity="leaf", values=[{"n": n} for n in range(5)])
    asked = {"sql": "select n from leaf order by n", "page": 2}
    first = owner("POST", "/api/query", asked).json
    owner.post("row.insert", entity="leaf", values={"n": -1})
    second = owner("POST", "/api/query", {"sql": asked["sql"], "cursor": first["next"]}).json
    third = owner("POST", "/api/query", {**asked, "cursor": second["next"]}).json
    assert [[row["n"] for row in page["rows"]] for page in (first, second, third)] == [[0, 1], [2, 3], [4]]
    assert third["next"] is None and first["tx"] == third["tx"]
    assert owner("POST", "/api/query", {"sql": "select 1 as n", "cursor": first["next"]}).code == (400, "invalid")
    for cursor in ("x", "bnVsbA==", "W10=", "é", "WzEsMSwxLCJhIl0="):
        assert owner("POST", "/api/query", {**asked, "cursor": cursor}).code == (400, "invalid")


def test_etags_are_txs(owner: Asker) -> None:
    asked = {"sql": "select name from item order by id limit 1"}
    first = owner("GET", "/api/query", **asked)
    again = owner("GET", "/api/query", None, {"If-None-Match": first.headers["etag"]}, **asked)
    assert again.status == 304 and again.body == b""
    owner.post("row.insert", entity="item", values={"name": "another"})
    assert owner("GET", "/api/query", None, {"If-None-Match": first.headers["etag"]}, **asked).status == 200
    assert "etag" not in owner("GET", "/api/query", sql="select random() as n").headers
    assert "etag" not in owner("GET", "/api/query", sql="select datetime('now') as n").headers


def test_an_idempotency_key_holds_for_every_verb(owner: Asker, ann: Asker) -> None:
    for key, verb, one, other in (
        ("a", "row.insert", {"entity": "item", "values": {"name": "ann once"}}, {"entity": "item", "values": {"name": "ann twice"}}),
        ("b", "entity.define", {"name": "once", "fields": {"a": "int"}}, {"name": "twice", "fields": {"a": "int"}}),
        ("c", "branch.fork", {"name": "onlyonce"}, {"name": "twice"}),
        ("d", "row.change", {"changes": [{"do": "insert", "entity": "item", "values": {"name": "ann"}}]}, {"changes": [{"do": "insert", "entity": "item", "values": {"name": "b"}}]}),
        ("e", "secret.set", {"name": "s", "value": "one-one"}, {"name": "s", "value": "two-two"}),
    ):  # fmt: skip
        first = owner.post(verb, {"Idempotency-Key": key}, **one)
        again = owner.post(verb, {"Idempotency-Key": key}, **one)
        assert first.result == again.result
        assert owner.post(verb, {"Idempotency-Key": key}, **other).code == (409, "conflict")
    once = owner.post("token.create", {"Idempotency-Key": "t"}, name="x")
    assert once.status == 200 and owner.post("token.create", {"Idempotency-Key": "t"}, name="x").code[0] == 409
    # a key is a principal's own
    assert ann.post("row.insert", {"Idempotency-Key": "a"}, entity="item", values={"name": "ann 2"}).status == 200
    assert owner.post("row.insert", {"Idempotency-Key": "x" * 2000}, entity="item", values={"name": "x"}).code == (429, "limit_exceeded")  # fmt: skip


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (b"", None, 400), (b"{", None, 400), (b"[]", None, 400), (b"null", None, 400), (b"\xff\xfe", None, 400), (b'{"entity": "item", "entity": "vault"}', None, 400),
        (b'{"entity": NaN}', None, 400), (b'{"entity": Infinity}', None, 400), (b'{"a": ' * 5000 + b"1" + b"}" * 5000, None, 400),
        (b"[" * 100_000, None, 400), (b'{"entity": "\\ud800"}', None, 400), (b'{"entity": "item", "values": {"qty": ' + b"9" * 5000 + b"}}", None, 400),
        (b'{"entity": "item", "values": {"name": "x", "qty": 99999999999999999999}}', None, 400), (b'{"entity": "item", "values": {"name": "\\u0000"}}', None, 400),
        (b'{"entity": "item", "values": {"name": "x", "qty": 1e400}}', None, 400), (b'{"entity": 5, "values": {}}', None, 400), (b'{"entity": "item"}', None, 400),
        (b'{"entity": "item", "values": "x"}', None, 400), (b'{"entity": "item", "values": [1]}', None, 400), (b'{"entity": "item", "values": {"name": {}}}', None, 400),
        (b'{"entity": "item", "values": {}, "more": 1}', None, 400), (b'{"entity": "", "values": {}}', None, 400), (b'{"entity": "nowhere", "values": {}}', None, 400),
        (b'{"entity": "permission", "values": {}}', None, 403), (b"entity=item", "application/x-www-form-urlencoded", 415), (b"{}", "text/plain", 415),
        (b"\x00" * 100, None, 400), (b"x" * (17 << 20), None, 413),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused(owner: Asker, body: bytes, kind: str | None, expected: int) -> None:
    answer = owner("POST", "/api/row.insert", body, {"Content-Type": kind or "application/json"})
    assert answer.status == expected and answer.json["error"]["code"]
    owner.connection.close()


@pytest.mark.parametrize(
    "asked",
    [
        {"sql": 5}, {"sql": None}, {"sql": ""}, {"sql": "select"}, {"sql": "select 1; select 2"}, {"sql": "delete from item"}, {"sql": "pragma table_list"},
        {"sql": "select :n", "params": 5}, {"sql": "select :n as n", "params": {"n": {"a": float("1e308")}}, "limit": -1}, {"sql": "select 1", "limit": "x"},
        {"sql": "select 1", "limit": 10**30}, {"sql": "select 1", "timeout": 0}, {"sql": "select 1", "timeout": "1"}, {"sql": "select 1", "timeout": 10**400},
        {"sql": "select 1", "as_of": -1}, {"sql": "select 1", "as_of": 10**30}, {"sql": "select 1", "as_of": "yesterday"}, {"sql": "select 1", "as_of": []},
        {"sql": "select 1", "branch": 7}, {"sql": "select 1", "branch": "nowhere"}, {"sql": "select 1", "branch": "a\0b"}, {"sql": "select 1", "page": 0},
        {"sql": "select 1", "page": True}, {"sql": "select 1", "cursor": 5}, {"sql": "select 1", "nope": 1}, {"sql": "select 1", "principal": []},
        {"sql": "select 1", "principal": "nobody"}, {"sql": "x" * 2_000_000}, {"sql": "select " + "(" * 5000 + "1" + ")" * 5000}, {"sql": "select 1", "as_of": "2026-01-01"},
        {"sql": "select 1", "as_of": True}, {"sql": "select 'a\0b'"}, {"sql": "select 1 as n", "params": [1, 2, 3]}, {"sql": "select ?", "params": {"a": []}},
    ],
)  # fmt: skip
def test_bad_queries_are_refused(owner: Asker, ann: Asker, asked: dict[str, Any]) -> None:
    for who in (owner, ann):
        assert 400 <= who("POST", "/api/query", asked).code[0] < 500


@pytest.mark.parametrize(
    "target",
    [
        "/api", "/api/", "/api/nothing", "/api/row.insert/x", "/api/query/x", "/api/row", "/api/row/item", "/api/row/item/x", "/api/row/item/99999999999999999999",
        "/api/row/ITEM/1", "/api/row/item;drop/1", "/api/history/item/0", "/api/blob/x", "/api/blob/../../etc/passwd", "/api/projection/x", "/api/projection/%00",
        "/api/query?sql=select+1&sql=select+2", "/api/query?sql=%ff", "/api/query?nope=1", "/api/query?sql=select+1&limit=x", "/api/query?sql=select+1&params={",
        "/api/query?sql=select+1&as_of=soon", "/api/why", "/api/why?subject=", "/api/why?subject=a/b/c/d", "/api/why?subject=item/1&depth=x", "/api/why?subject=tx/99999999",
        "/api/can?action=read", "/api/diff", "/api/diff?branch=nowhere", "/api/schema?branch=nowhere", "/api/schema?as_of=99999999", "/api/live", "/api/live?sql=select",
        "/api/live?entity=nowhere", "/api/live?entity=item&sql=select+1", "/api/live?projection=x", "/api/live?entity=item&id=x", "/api/conflicts?branch=nowhere",
        "/api/me?x=1", "/api/history/item/5?cursor=x", "/api/projection/a%2Fb", "/api/why?subject=item/1&as_of=0", "/api/why?subject=item/1&depth=-1",
        "/api/why?subject=item/99999999999999999999999", "/api/can?action=fly&resource=item", "/api/can?action=read&resource=item/x.y.z",
    ],
)  # fmt: skip
def test_bad_paths_and_parameters_are_refused(owner: Asker, ann: Asker, target: str) -> None:
    for who in (owner, ann):
        answer = who("GET", target)
        if "/can?action=fly" not in target and "x.y.z" not in target:
            assert 400 <= answer.code[0] < 500, answer.body
        assert answer.status < 500


def test_another_method_is_told_which_there_are(owner: Asker) -> None:
    for method, path, allowed in (
        ("GET", "/api/row.insert", "POST"), ("DELETE", "/api/query", "GET, POST, HEAD"), ("PUT", "/api/me", "GET, HEAD"), ("PATCH", "/openapi.json", "GET, HEAD"),
        ("TRACE", "/api/schema", "GET, HEAD"), ("OPTIONS", "/api/row.insert", "POST"),
    ):  # fmt: skip
        answer = owner(method, path)
        assert answer.code == (405, "not_allowed") and answer.headers["allow"] == allowed
    assert owner("HEAD", "/api/me").status == 200


def test_who_is_nobody_learns_nothing(server: Server, owner: Asker) -> None:
    for headers in (
        {}, {"Authorization": "Bearer "}, {"Authorization": "Bearer ll_" + "0" * 40}, {"Authorization": "Basic b3duZXI6eA=="}, {"X-API-Key": "x"},
        {"Cookie": "layer_session=session_" + "0" * 40}, {"Authorization": "Bearer a.b.c"}, {"Authorization": "Bearer ü"},
    ):  # fmt: skip
        for method, path in (("GET", "/api/me"), ("GET", "/api/nothing"), ("POST", "/api/row.insert"), ("PUT", "/api/row.insert")):  # fmt: skip
            stranger = Asker(server, None)
            try:
                answer = stranger(method, path, headers=headers)
            except UnicodeEncodeError:
                continue
            assert answer.code[0] in (401, 429), (headers, path)
        if answer.status == 429:
            break
    server.restart()  # it has locked this address out by now


def test_tokens_end(server: Server) -> None:
    short = Asker(server, server.token("ann", seconds=1.0))
    assert short("GET", "/api/me").json["name"] == "ann"
    revoked = Asker(server, server.token("ben", name="b"))
    assert revoked("GET", "/api/me").status == 200
    server.layer.call("token.revoke", id=server.layer.query("select max(id) as id from token")[0]["id"])
    time.sleep(2.2)
    assert short("GET", "/api/me").code == (401, "unauthenticated")
    assert revoked("GET", "/api/me").code == (401, "unauthenticated")


def test_a_scoped_token_keeps_to_its_scope(server: Server, owner: Asker) -> None:
    reader = Asker(server, server.token("owner", scope=["read"]))
    assert reader("GET", "/api/query", sql="select 1 as n").status == 200
    assert reader.post("row.insert", entity="item", values={"name": "x"}).code == (403, "denied")
    assert reader("POST", "/api/blob", b"x").code == (403, "denied")
    writer = Asker(server, server.token("owner", scope=["write"]))
    assert writer("GET", "/api/query", sql="select 1 as n").code == (403, "denied")
    server.layer.call("function.define", name="seen.act", code="def main(): return 1")
    assert [
        "/api/function/seen.act" in Asker(server, server.token("owner", scope=[part]))("GET", "/openapi.json").json["paths"]
        for part in ("read", "boxes")
    ] == [True, False]  # fmt: skip


def test_a_scoped_token_makes_none_with_a_wider_scope(server: Server, owner: Asker) -> None:
    writer = Asker(server, server.token("ann", scope=["write"]))
    for wider in (["read"], ["write", "read"], ["boxes"]):
        assert writer.post("token.create", name="x", scope=wider).code == (403, "denied")
    odd: Any
    given: Any
    for odd in ([], "read", [["read"]], [{}], [1], ["all"], {"read": 1}):
        assert writer.post("token.create", name="x", scope=odd).code == (400, "invalid")
    for given in ({}, {"scope": None}, {"scope": ["write"]}):
        made = Asker(server, writer.post("token.create", name="x", **given).result["token"])
        assert made("GET", "/api/me").json["scope"] == ["write"]
        assert made("GET", "/api/query", sql="select 1 as n").code == (403, "denied")
    lent = Asker(server, server.token("owner", scope=["write"])).post("token.create", name="x", principal="ann").result
    assert Asker(server, lent["token"])("GET", "/api/me").json == {**writer("GET", "/api/me").json, "scope": ["write"]}
    assert Asker(server, server.token("ann")).post("token.create", name="x", scope=["read"]).status == 200


def test_many_streams_of_slow_questions_leave_threads_for_others(server: Server, ann: Asker, ben: Asker) -> None:
    slow = "with recursive c(n) as (select {} union all select n + 1 from c where n < 300000000) select count(*) as n from c"
    paths = [f"/api/live?{urlencode({'sql': slow.format(n)})}" for n in range(40)]
    waiting = [socket.create_connection(("127.0.0.1", server.port)) for _ in paths]
    mallory = server.token("mallory")
    try:
        for each, path in zip(waiting, paths, strict=True):
            each.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {mallory}\r\n\r\n".encode())
        time.sleep(1)
        began = time.monotonic()
        assert ben("GET", "/api/query", sql="select 1 as n").status == 200
        assert time.monotonic() - began < 4
    finally:
        for each in waiting:
            each.close()


def test_one_principal_has_a_few_turns_and_none_is_kept() -> None:
    async def act() -> None:
        turns, inside, most = Turns(), 0, 0

        async def work(principal: int) -> None:
            nonlocal inside, most
            async with turns.turn(principal):
                inside, most = inside + 1, max(most, inside + 1)
                try:
                    await asyncio.sleep(0)
                finally:
                    inside -= 1

        crowd = [asyncio.create_task(work(7)) for _ in range(5 * EACH)]
        await asyncio.sleep(0)
        crowd[0].cancel()  # one that has its turn,
        crowd[-1].cancel()  # and one that waits for it
        await asyncio.gather(*crowd, return_exceptions=True)
        assert most == EACH and not turns.of
        await asyncio.gather(*(work(principal) for principal in range(100)))
        assert not turns.of

    asyncio.run(act())


def test_a_query_ends_when_its_client_hangs_up(server: Server, owner: Asker) -> None:
    owner.post("principal.define", name="hasty").result  # noqa: B018
    hasty, endless = server.token("hasty"), "with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) as n from c"  # fmt: skip
    path = f"/api/query?{urlencode({'sql': endless, 'timeout': 55})}"
    asked = json.dumps({"sql": endless, "timeout": 55}).encode()
    heads = (
        f"GET {path} HTTP/1.1\r\n".encode(),
        f"POST /api/query HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(asked)}\r\n".encode(),
    )
    waiting = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    for n, each in enumerate(waiting):  # two are at work, the others wait for their turn
        head = heads[n % 2] + f"Host: 127.0.0.1\r\nX-API-Key: {hasty}\r\n\r\n".encode()
        each.sendall(head + (asked if n % 2 else b""))
    time.sleep(1.5)
    for each in waiting:
        each.close()
    began = time.monotonic()
    assert Asker(server, hasty)("GET", "/api/query", sql="select 1 as n", timeout="50").status == 200
    assert time.monotonic() - began < 30
    refused = Asker(server, hasty)("GET", "/api/query", sql="select 1 as n", timeout="61")
    assert refused.code == (400, "invalid")


def test_a_key_that_reads_like_a_content_is_a_conflict(server: Server, owner: Asker) -> None:
    data = b"sent after its key was used"
    digest = sha256(data).hexdigest()
    server.layer.call("principal.define", name="of_a_key", key=f"content/{digest}")
    assert owner("POST", "/api/blob", data).code == (409, "conflict")


def test_one_content_sent_by_many_at_once_is_kept_once(server: Server, owner: Asker) -> None:
    token, sent = owner.headers["Authorization"].removeprefix("Bearer "), list[int]()

    def send(asker: Asker, content: bytes) -> None:
        sent.append(asker("POST", "/api/blob", content).status)

    for n in range(5):
        senders = [threading.Thread(target=send, args=(Asker(server, token), b"the same %d" % n)) for _ in range(4)]
        for each in senders:
            each.start()
        for each in senders:
            each.join()
    assert sent == [200] * 20


def test_what_is_anothers_is_not_there(ann: Asker, ben: Asker, owner: Asker) -> None:
    mine = ann.post("row.insert", entity="item", values={"name": "ann's own"}).result
    digest = ann("POST", "/api/blob", b"ann's content").json["digest"]
    ann.post("row.update", entity="item", id=mine, values={"doc": digest}).result  # noqa: B018
    assert ann("GET", f"/api/blob/{digest}").body == b"ann's content"
    # to know a hash is not to have the content
    stolen = {"name": "ben's", "doc": digest}
    assert ben.post("row.insert", entity="item", values=stolen).code == (404, "not_found")
    assert ben.post("row.change", changes=[{"do": "insert", "entity": "item", "values": stolen}]).code == (404, "not_found")  # fmt: skip
    claim = {"Idempotency-Key": f"content/{digest}"}  # a key that reads like a proof of having sent it
    assert ben.post("row.insert", claim, entity="item", values={"name": "ben's"}).status == 200
    assert ben.post("row.insert", entity="item", values=stolen).code == (404, "not_found")
    own = ben("POST", "/api/blob", b"ben's content").json["digest"]
    assert ben.post("row.insert", entity="item", values={"name": "ben's", "doc": own}).status == 200
    missing = mine + 100_000
    for there, not_there in (
        (ben("GET", f"/api/row/item/{mine}"), ben("GET", f"/api/row/item/{missing}")),
        (ben("GET", f"/api/history/item/{mine}"), ben("GET", f"/api/history/item/{missing}")),
        (ben("GET", "/api/why", subject=f"item/{mine}"), ben("GET", "/api/why", subject=f"item/{missing}")),
        (ben.post("row.update", entity="item", id=mine, values={"qty": 1}), ben.post("row.update", entity="item", id=missing, values={"qty": 1})),
        (ben.post("row.delete", entity="item", id=mine), ben.post("row.delete", entity="item", id=missing)),
        (ben("GET", f"/api/blob/{digest}"), ben("GET", f"/api/blob/{'0' * 64}")),
        (ben("POST", "/api/query", {"sql": "select * from vault"}), ben("POST", "/api/query", {"sql": "select * from nowhere"})),
        (ben("GET", "/api/live", entity="vault"), ben("GET", "/api/live", entity="nowhere")),
        (ben("GET", "/api/row/vault/1"), ben("GET", "/api/row/nowhere/1")),
        (ben.post("row.insert", entity="vault", values={"name": "x"}), ben.post("row.insert", entity="nowhere", values={"name": "x"})),
        (ben("GET", "/api/can", action="read", resource="vault"), ben("GET", "/api/can", action="read", resource="nowhere")),
    ):  # fmt: skip
        assert there.status == not_there.status, (there.body, not_there.body)
        hidden = there.body.replace(str(mine).encode(), b"N").replace(b"vault", b"E").replace(digest.encode(), b"D")
        nothing = not_there.body.replace(str(missing).encode(), b"N").replace(b"nowhere", b"E").replace(b"0" * 64, b"D")
        assert hidden == nothing
    assert [entity["name"] for entity in ben("GET", "/api/schema").json["entities"]] == ["item"]
    assert ben("POST", "/api/query", {"sql": "select name from item where name like 'ann%'"}).json["rows"] == []
    assert ben("POST", "/api/query?format=json", {"sql": "select 1 as n", "principal": "ann"}).code[0] in (403, 404)
    assert ben("GET", "/api/verify").code == (403, "denied")
    for verb in ("entity.define", "permission.grant", "principal.define", "token.create", "history.prune", "branch.fork"):  # fmt: skip
        given = {"name": "x", "fields": {"a": "int"}} if verb == "entity.define" else {"name": "mallory"}
        if verb == "permission.grant":
            given = {"principal": "ben", "action": "*", "resource": "*"}
        if verb == "token.create":
            given = {"name": "x", "principal": "owner"}
        if verb == "history.prune":
            given = {"before": 3}
        assert ben.post(verb, **given).code[0] in (403, 404), verb


def test_a_verb_does_not_tell_what_is_hidden_from_what_is_missing(server: Server, owner: Asker, ben: Asker) -> None:
    owner.post("function.define", name="hidden.act", code="def main(): return 1").result  # noqa: B018
    owner.post("blueprint.define", name="hidden").result  # noqa: B018
    owner.post("contract.define", name="hidden", blueprint="hidden").result  # noqa: B018
    owner.post("projection.define", name="hidden", statement="select 1 as n").result  # noqa: B018
    owner.post("secret.set", name="hidden", value="a-secret-value").result  # noqa: B018
    granted = owner.post("permission.grant", principal="ann", action="read", resource="vault").result
    sure = server.layer.query("select max(id) as id from execution")[0]["id"]
    for verb, there, missing in (
        ("row.insert", {"entity": "vault", "values": {"nope": 1}}, {"entity": "absent", "values": {"nope": 1}}),
        ("row.upsert", {"entity": "vault", "values": {"name": "gold"}, "on": ["name"]}, {"entity": "absent", "values": {"name": "gold"}, "on": ["name"]}),
        ("row.change", {"changes": [{"do": "insert", "entity": "vault", "values": {}}]}, {"changes": [{"do": "insert", "entity": "absent", "values": {}}]}),
        ("entity.alter", {"name": "vault", "add": {"a": "int"}}, {"name": "absent", "add": {"a": "int"}}),
        ("entity.drop", {"name": "vault"}, {"name": "absent"}),
        ("permission.grant", {"principal": "ben", "action": "read", "resource": "vault"}, {"principal": "ben", "action": "read", "resource": "absent"}),
        ("permission.grant", {"principal": "ann", "action": "read", "resource": "item"}, {"principal": "absent", "action": "read", "resource": "item"}),
        ("permission.revoke", {"id": granted}, {"id": 10**9}),
        ("secret.remove", {"name": "hidden"}, {"name": "absent"}),
        ("function.define", {"name": "a.b", "code": "def main(): return 1", "blueprint": "hidden"}, {"name": "a.b", "code": "def main(): return 1", "blueprint": "absent"}),
        ("contract.define", {"name": "q", "blueprint": "hidden"}, {"name": "q", "blueprint": "absent"}),
        ("contract.remove", {"name": "hidden"}, {"name": "absent"}),
        ("projection.remove", {"name": "hidden"}, {"name": "absent"}),
        ("box.create", {"contract": "hidden"}, {"contract": "absent"}),
        ("box.open", {"blueprint": "hidden"}, {"blueprint": "absent"}),
        ("agent.run", {"contract": "hidden", "task": "x"}, {"contract": "absent", "task": "x"}),
        ("quota.set", {"resource": "cpu", "amount": 1, "seconds": 1, "subject": "ann"}, {"resource": "cpu", "amount": 1, "seconds": 1, "subject": "absent"}),
        ("token.create", {"name": "x", "principal": "ann"}, {"name": "x", "principal": "absent"}),
        ("execution.retry", {"id": sure}, {"id": 10**9}),
        ("function/hidden.act", {}, None),
    ):  # fmt: skip
        one = ben.post(verb, **there)
        other = ben.post(verb.replace("hidden", "absent") if missing is None else verb, **(missing or {}))
        plain = [
            (answer.status, re.sub(r"vault|hidden|absent|ann\b|\d+", "X", answer.body.decode()))
            for answer in (one, other)
        ]
        assert plain[0] == plain[1] and one.status in (403, 404), (verb, one.body, other.body)


def test_functions_and_projections_are_there_for_those_who_may(owner: Asker, ann: Asker, ben: Asker) -> None:
    owner.post("function.define", name="number.double", code="def main(n): return n * 2", signature={"arguments": {"n": "int!"}}).result  # noqa: B018  # fmt: skip
    owner.post("permission.grant", principal="ann", action="call", resource="function:number.double").result  # noqa: B018
    owner.post("projection.define", name="many", statement="select name from item where qty >= :n order by name", parameters={"n": "int!"}).result  # noqa: B018  # fmt: skip
    owner.post("permission.grant", principal="ann", action="read", resource="projection:many").result  # noqa: B018
    assert [each["name"] for each in ann("GET", "/api/function").json["functions"]] == ["number.double"]
    assert ben("GET", "/api/function").json == {"functions": []} and ben("GET", "/api/projection").json == {"projections": []}  # fmt: skip
    assert ann("GET", "/api/projection/many", n="1").status == 200
    assert ann("POST", "/api/projection/many", {"n": 1}).status == 200
    assert ann("GET", "/api/projection/many", n="x").code == (400, "invalid")
    assert ann("GET", "/api/projection/many").code == (400, "invalid")
    assert ben("GET", "/api/projection/many", n="x").body.replace(b"many", b"X") == ben("GET", "/api/projection/much", n="x").body.replace(b"much", b"X")  # fmt: skip
    assert ann("POST", "/api/function/number.double", {"n": 4}).result == 8
    assert ann("POST", "/api/function/number.double", {"n": "x"}).code == (400, "invalid")
    assert ben("POST", "/api/function/number.double", {"n": 4}).code == (404, "not_found")
    paths = ann("GET", "/openapi.json").json["paths"]
    assert (
        "/api/function/number.double" in paths
        and "/api/function/number.double" not in ben("GET", "/openapi.json").json["paths"]
    )


def test_a_large_body_holds_up_nobody(server: Server, owner: Asker, ben: Asker) -> None:
    large = b'{"x": [' + b",".join([b"{}"] * 3_000_000) + b"]}"
    asking = threading.Thread(target=lambda: ben("POST", "/api/query", large))
    asking.start()
    waited = 0.0
    while asking.is_alive():
        began = time.monotonic()
        assert owner("GET", "/healthz").status == 200
        waited = max(waited, time.monotonic() - began)
        time.sleep(0.02)
    assert waited < 3
    assert ben("POST", "/api/query", large[:-1]).code == (400, "invalid")


def test_requests_are_limited_by_quota(server: Server, owner: Asker) -> None:
    hasty = Asker(server, server.token("hasty"))
    owner.post("quota.set", resource="requests", amount=5, seconds=60, subject="hasty").result  # noqa: B018
    found = [hasty("GET", "/api/me") for _ in range(10)]
    assert [answer.status for answer in found] == [200] * 5 + [429] * 5
    assert int(found[-1].headers["retry-after"]) >= 1 and found[-1].code == (429, "limit_exceeded")
    for path in ("/mcp", "/sandboxes", "/templates", "/openapi.json"):  # no other door is open either
        assert hasty("GET", path).status == 429
    assert owner("GET", "/api/me").status == 200


def test_a_trace_goes_on(server: Server, owner: Asker) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    owner.post("row.insert", {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}, entity="item", values={"name": "traced"}).result  # noqa: B018  # fmt: skip
    assert server.layer.query("select 1 as n from execution where trace like :t", {"t": f"00-{trace}-%"}) == [{"n": 1}]


def test_a_body_that_never_ends_and_a_hang_up_hurt_nobody(server: Server, owner: Asker) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as one:
            one.sendall(b"POST /api/query HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: " + owner.headers["Authorization"].encode() + b"\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{\"sql\"")  # fmt: skip
    assert owner("GET", "/api/me").status == 200


def test_the_document_is_whole(owner: Asker) -> None:
    from livinglayer.edges.http.native import PATHS
    from livinglayer.law.verbs import VERBS

    found = owner("GET", "/openapi.json").json
    assert found["openapi"].startswith("3.1") and {f"/api/{name}" for name in VERBS} <= set(found["paths"])
    assert {path.split("/")[2] for path in found["paths"]} - set(VERBS) == set(PATHS)
    for operations in found["paths"].values():
        for operation in operations.values():
            assert operation["summary"] and operation["operationId"]
