"""Who may ask the server: tokens, scopes, sign-in links, sessions, names and origins; each attacked."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from edges.serving import Server
from starlette.datastructures import Headers

from livinglayer.edges.http import auth
from livinglayer.errors import Unauthenticated
from livinglayer.law import tokens

QUERY = {"sql": "select 1 as n"}


def asked(server: Server, token: str | None = None, path: str = "/api/query", **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.post(f"{server.url}{path}", json=QUERY, headers=headers | more.pop("headers", {}), timeout=30, **more)


def session(server: Server, principal: str = "owner") -> httpx.Client:
    """A browser that has signed in by a link."""
    from livinglayer.edges.http import home

    link = home.link(server.layer, server.url, server.principal(principal))
    browser = httpx.Client(base_url=server.url, timeout=30)
    assert browser.get(link).status_code == 200
    answer = browser.post("/login", data={"token": link.partition("token=")[2]}, headers={"origin": server.url})
    assert answer.status_code == 303
    return browser


def test_a_token_says_who_asks_and_no_token_nobody(server: Server) -> None:
    server.layer.define("note", {"text": "text"})
    assert asked(server, server.token()).json()["rows"] == [{"n": 1}]
    assert asked(server, server.token("ann")).status_code == 200
    for wrong in (None, "", "ll_" + "0" * 40, "e2b_" + "0" * 40, "a.b.c", "Basic x", server.layer.id):
        answer = asked(server, wrong)
        assert answer.status_code in (401, 429) and answer.json()["error"]["code"] in (
            "unauthenticated",
            "limit_exceeded",
        )
    assert asked(server, headers={"x-api-key": server.key("ann")}).status_code == 200
    rows = server.layer.query(
        "select p.name, s.how, s.outcome from sign_in s left join principal p on p.id = s.principal"
    )
    assert {"name": "ann", "how": "token", "outcome": "in"} in rows
    assert {"name": None, "how": "token", "outcome": "refused"} in rows


def test_what_proves_somebody_is_kept_nowhere(server: Server) -> None:
    text = server.token("kept", name="secret one")
    row = server.layer.query("select hash, ending, kind from token where name = 'secret one'")[0]
    assert row["ending"] == text[-4:] and text not in json.dumps(row)
    assert text not in json.dumps(
        server.layer.query("select arguments, result from execution where verb = 'token.create'"), default=str
    )
    shown = tokens.known(server.layer)
    assert all("hash" not in one for one in shown) and any(one["name"] == "secret one" for one in shown)


def test_a_revoked_or_old_token_is_refused(server: Server) -> None:
    brief, lasting = server.token("ann", seconds=1.0, name="brief"), server.token("ann", name="gone")
    assert asked(server, lasting).status_code == 200
    number = server.layer.query("select id from token where name = 'gone'")[0]["id"]
    server.layer.call("token.revoke", {"id": number})
    time.sleep(max(auth.FRESH, 1.0) + 0.2)
    for token in (brief, lasting):
        assert asked(server, token).status_code == 401
    with pytest.raises(Unauthenticated):
        tokens.prove(server.layer, lasting)


def test_a_scope_narrows_a_token(server: Server) -> None:
    reads = server.token("owner", name="reads", scope=["read"])
    assert asked(server, reads).status_code == 200
    answer = asked(server, reads, "/api/branch.fork")
    assert answer.status_code == 403 and "read" in answer.json()["error"]["message"]
    boxes = server.token("owner", name="boxes", scope=["boxes"])
    assert asked(server, boxes).status_code == 403


def test_what_a_token_makes_ends_with_it(server: Server) -> None:
    brief = {"authorization": f"Bearer {server.token('ann', seconds=600.0, name='brief one')}"}
    for body in ({"name": "later"}, {"name": "later", "seconds": 9e6}):
        assert httpx.post(f"{server.url}/api/token.create", json=body, headers=brief).status_code == 200
    ends = server.layer.query("select name, expires from token where name in ('later', 'brief one')")
    most = max(row["expires"] for row in ends if row["name"] == "brief one")
    assert all(row["expires"].timestamp() <= most.timestamp() + 1 for row in ends) and len(ends) == 3


def test_nobody_but_the_owner_holds_a_thread_for_long(server: Server) -> None:
    body = {**QUERY, "timeout": 86400}
    for who, status in (("ann", 400), ("owner", 200)):
        headers = {"authorization": f"Bearer {server.token(who)}"}
        assert httpx.post(f"{server.url}/api/query", json=body, headers=headers).status_code == status


def test_nobody_makes_or_ends_tokens_of_others(server: Server) -> None:
    mallory = {"authorization": f"Bearer {server.token('mallory')}"}
    own = httpx.post(f"{server.url}/api/token.create", json={"name": "mine"}, headers=mallory)
    assert own.status_code == 200
    said = [
        httpx.post(f"{server.url}/api/token.create", json={"name": "x", "principal": name}, headers=mallory)
        for name in ("owner", "nobody")
    ]
    assert [answer.status_code for answer in said] == [404, 404]
    assert (
        said[0].text.replace("owner", "nobody") == said[1].text
    )  # the same of those who are there and those who are not
    number = server.layer.query("select id from token order by id limit 1")[0]["id"]
    ids = [number, 10**12]
    told = [httpx.post(f"{server.url}/api/token.revoke", json={"id": n}, headers=mallory) for n in ids]
    assert [answer.status_code for answer in told] == [404, 404]
    assert (
        asked(server, own.json()["result"]["token"] if "result" in own.json() else own.json()["token"]).status_code
        == 200
    )


def test_a_sign_in_link_works_once_however_many_try(server: Server) -> None:
    from livinglayer.edges.http import home

    token = home.link(server.layer, server.url, "owner").partition("token=")[2]

    def try_it(_: int) -> int:
        return httpx.post(
            f"{server.url}/login", data={"token": token}, headers={"origin": server.url}, timeout=30
        ).status_code

    def got_in() -> int:
        found = server.layer.query("select count(*) as n from sign_in where how = 'link' and outcome = 'in'")
        return int(found[0]["n"])

    before = got_in()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(try_it, range(8))) == [303] + [401] * 7
    assert got_in() == before + 1
    assert asked(server, token).status_code in (401, 429), "a link is not a token"


def test_a_browser_signs_in_and_out(server: Server) -> None:
    browser = session(server)
    page = browser.get("/")
    assert "as <b>owner</b>" in page.text and page.headers["content-security-policy"].startswith("default-src 'none'")
    form = re.search(r'name="csrf" value="(\w+)"', page.text)
    assert form
    cookie = next(iter(browser.cookies.jar))
    assert cookie.has_nonstandard_attr("HttpOnly") and cookie.get_nonstandard_attr("SameSite", "").lower() == "lax"
    assert browser.post("/logout", data={"csrf": "0" * 32}, headers={"origin": server.url}).status_code == 403
    value = cookie.value
    assert browser.post("/logout", data={"csrf": form[1]}, headers={"origin": server.url}).status_code == 303
    again = httpx.get(f"{server.url}/", headers={"cookie": f"layer_session={value}"})
    assert "not signed in" in again.text
    assert server.layer.query("select count(*) as n from sign_in where outcome = 'out'") == [{"n": 1}]


@pytest.mark.parametrize("origin", [None, "https://evil.example", "null", "http://3000-box.layer.localhost"])
def test_a_page_of_a_stranger_can_not_use_a_session(server: Server, origin: str | None) -> None:
    browser = session(server)
    headers = {} if origin is None else {"origin": origin}
    answer = browser.post("/api/query", json=QUERY, headers=headers)
    assert answer.status_code == 403, answer.text
    assert browser.post("/api/query", json=QUERY, headers={"origin": server.url}).status_code == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::2]", "api.evil"]
)
def test_a_server_is_asked_by_its_own_names_only(server: Server, name: str) -> None:
    answer = httpx.get(f"{server.url}/healthz", headers={"host": name})
    assert answer.status_code in (400, 421)
    assert httpx.get(f"{server.url}/healthz", headers={"host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example", "::", "http://["])
def test_pages_of_other_origins_are_refused_with_a_token_too(server: Server, origin: str) -> None:
    assert asked(server, server.token(), headers={"origin": origin}).status_code == 403


def test_an_address_that_guesses_is_locked_out_and_good_tokens_go_on(serve: Callable[..., Server]) -> None:
    server = serve()
    good = server.token("ann")
    codes = [asked(server, "ll_" + f"{n:040x}").status_code for n in range(auth.WRONG + 5)]
    assert codes[:3] == [401] * 3 and codes[-1] == 429
    answer = asked(server, "ll_" + "f" * 40)
    assert answer.headers["retry-after"] == "60"
    assert asked(server, good).status_code == 200, "who has a token is not hurt by a neighbour who guesses"
    outcomes = server.layer.query("select outcome, count(*) as n from sign_in group by outcome order by outcome")
    assert {"outcome": "locked", "n": 1} in outcomes
    assert all(one["n"] <= auth.WRONG for one in outcomes), "guessing does not fill the history"
    link = httpx.post(f"{server.url}/login", data={"token": "login_0"}, headers={"origin": server.url})
    assert link.status_code == 429


def test_nothing_that_a_stranger_sends_is_waited_for(server: Server) -> None:
    head = {"alg": "EdDSA", "typ": "layer-request+jwt"}
    claims = {"iss": "layer:" + "A" * 43, "aud": server.url, "jti": "x" * 20, "iat": 1, "exp": 2}
    forged = ".".join(
        base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in (head, claims)
    )
    for token in (f"{forged}.AAAA", "a.b.c", "..", "ll_0"):
        with socket.create_connection(("127.0.0.1", server.port), 10) as line:  # 16 MB are announced, and none sent
            begun = f"POST /api/query HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
            line.sendall(f"{begun}Content-Type: application/json\r\nContent-Length: 16000000\r\n\r\n".encode())
            assert re.match(rb"HTTP/1.1 (401|429) ", line.recv(100))


def test_all_addresses_of_one_customer_are_locked_out_together() -> None:
    gate = auth.Gate(3)
    for n in range(3):
        gate.failed(f"2001:db8::{n}:1")
        gate.failed(f"::ffff:192.0.2.{n}")
        gate.failed(f"198.51.100.{n}")
    assert gate.locked("2001:db8:0:0:ffff::9") and not gate.locked("2001:db8:0:1::1")
    assert not gate.locked("::ffff:192.0.2.1") and not gate.locked("198.51.100.1") and not gate.locked("?")


def test_metrics_are_an_owners(server: Server) -> None:
    def metrics(token: str) -> httpx.Response:
        return httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {token}"})

    assert asked(server, server.token()).status_code == 200
    text = metrics(server.token()).text
    assert 'layer_requests_total{part="native",status="200"}' in text and "process_resident_memory_bytes" in text
    assert metrics(server.token("ann")).status_code == 404
    assert httpx.get(f"{server.url}/metrics").status_code in (401, 429)


def test_health_needs_nobody(server: Server) -> None:
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/readyz").json() == {"status": "ready"}, "and nothing of the layer"


def test_a_request_with_two_names_is_for_nobody(server: Server) -> None:
    for names in (("127.0.0.1", "evil.example"), ("evil.example", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")):
        with socket.create_connection(("127.0.0.1", server.port), 10) as line:
            said = "".join(f"Host: {name}\r\n" for name in names)
            line.sendall(f"GET /healthz HTTP/1.1\r\n{said}\r\n".encode())
            assert line.recv(100).startswith(b"HTTP/1.1 421 ")


def test_a_session_is_no_token_and_a_token_no_session(server: Server) -> None:
    browser = session(server)
    cookie = browser.cookies["layer_session"]
    assert browser.get("/api/me").status_code == 200  # and for a second it is known
    assert asked(server, cookie).status_code in (401, 429)
    assert httpx.get(f"{server.url}/api/me", headers={"x-api-key": cookie}).status_code in (401, 429)
    token = server.token("ann")
    assert asked(server, token).status_code == 200
    said = httpx.get(f"{server.url}/api/me", headers={"cookie": f"layer_session={token}"})
    assert said.status_code in (401, 429)


def test_over_https_a_cookie_that_a_neighbour_could_set_is_none() -> None:
    plain, prefixed = (
        Headers({"cookie": "layer_session=x"}),
        Headers({"cookie": "layer_session=x; __Host-layer_session=y"}),
    )
    assert [auth.session_of(plain, tls) for tls in (False, True)] == ["x", None]
    assert [auth.session_of(prefixed, tls) for tls in (False, True)] == ["x", "y"]


def test_the_page_keeps_to_the_scope_of_a_token(server: Server) -> None:
    def page(scope: list[str]) -> str:
        token = server.token("owner", scope=scope)
        return httpx.get(server.url, headers={"authorization": f"Bearer {token}"}, timeout=60).text

    assert "Nothing happened yet that you may see" not in page(["read"])
    assert "Nothing happened yet that you may see" in page(["boxes"])


def test_a_restart_keeps_tokens_and_sessions(server: Server) -> None:
    browser, token = session(server), server.token("ann")
    server.restart()
    assert asked(server, token).status_code == 200
    assert "as <b>owner</b>" in browser.get("/").text


def test_requests_cut_off_and_nonsense_are_no_failure(server: Server) -> None:
    for data in (b"\0\1\2\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /api/query HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
                 b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", b"GET " + b"/a" * 40000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"):  # fmt: skip
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
            assert not answer or answer.split()[1][:1] == b"4", answer[:200]
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    assert "Traceback" not in server.log
