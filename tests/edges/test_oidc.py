"""Signing in with an OpenID provider: a real one over HTTP, and one that lies."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from edges.provider import CLIENT, SECRET, Provider
from edges.serving import Server

from livinglayer.edges.http import oidc
from livinglayer.edges.http.auth import WRONG, Gate
from livinglayer.edges.http.metrics import Metrics
from livinglayer.edges.http.serving import Serving
from livinglayer.errors import Conflict, Denied, Invalid, Unauthenticated, Unavailable


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.close()


@pytest.fixture
def configure(server: Server, provider: Provider) -> Callable[..., None]:
    def write(**more: Any) -> None:
        place = oidc.place(server.layer.id)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(
            json.dumps(
                {
                    "issuer": provider.url,
                    "client_id": CLIENT,
                    "client_secret": SECRET,
                    "algorithms": ["RS256", "ES256"],
                    **more,
                }
            )
        )
        place.chmod(0o600)

    write()
    return write


def known(server: Server, name: str = "ann", value: str = "subject-7") -> None:
    server.layer.principal(server.principal(name), attributes={"oidc": value})


def browse(server: Server, to: str = "/", browser: httpx.Client | None = None) -> tuple[httpx.Client, httpx.Response]:
    """A browser that goes to sign in, to the provider and back."""
    browser = browser or httpx.Client(timeout=30)
    answer = browser.get(f"{server.url}/login/oidc", params={"next": to})
    assert answer.status_code == 303, answer.text
    back = browser.get(answer.headers["location"]).headers["location"]
    return browser, browser.get(back)


def me(server: Server, browser: httpx.Client) -> Any:
    answer = browser.get(f"{server.url}/api/query", params={"sql": "select 1 as n"})
    return answer.status_code


def test_whoever_a_row_knows_is_signed_in(server: Server, provider: Provider, configure: Callable[..., None]) -> None:
    known(server)
    assert 'href="/login/oidc"' in httpx.get(server.url).text
    browser, answer = browse(server, "/api/query?sql=select+1")
    assert answer.status_code == 303 and answer.headers["location"] == "/api/query?sql=select+1"
    assert me(server, browser) == 200
    [row] = server.layer.query(
        "select p.name, s.outcome from sign_in s join principal p on p.id = s.principal where s.how = 'oidc'"
    )
    assert row == {"name": "ann", "outcome": "in"}
    assert browse(server)[1].headers["location"] == "/"
    assert provider.asked["/.well-known/openid-configuration"] == provider.asked["/keys"] == 1  # and kept
    for lure in ("//evil.test", "https://evil.test", "/\\evil.test", "javascript:alert(1)", "/a\nb"):
        assert oidc.local(lure) is False


def test_it_is_one_browser_and_one_attempt(server: Server, provider: Provider, configure: Callable[..., None]) -> None:
    known(server)
    browser = httpx.Client(timeout=30)
    answer = browser.get(f"{server.url}/login/oidc")
    sent = {name: values[0] for name, values in parse_qs(urlsplit(answer.headers["location"]).query).items()}
    assert (
        sent["code_challenge_method"] == "S256" and sent["response_type"] == "code" and sent["scope"] == "openid email"
    )
    cookie = answer.headers["set-cookie"]
    assert (
        "HttpOnly" in cookie
        and "SameSite=lax" in cookie
        and sent["nonce"] not in cookie
        and sent["state"] not in cookie
    )
    back = browser.get(answer.headers["location"]).headers["location"]
    # Another browser that is made to come back (login CSRF), one with another attempt, another state.
    assert httpx.get(back).status_code == 401
    other = httpx.Client(timeout=30)
    other.get(f"{server.url}/login/oidc")
    assert other.get(back).status_code == 401
    state = sent["state"]
    assert browser.get(back.replace(state, state[::-1])).status_code == 401
    jar = dict(browser.cookies)
    assert browser.get(back).status_code == 303
    assert httpx.get(back, cookies=jar).status_code == 401  # the same again
    assert httpx.get(f"{server.url}{oidc.CALLBACK}?error=access_denied&state={state}", cookies=jar).status_code == 401
    assert browser.post(f"{server.url}/login/oidc").status_code == 405
    assert browser.get(f"{server.url}/login/oidcx").status_code == 404


@pytest.fixture
def serving(server: Server, configure: Callable[..., None]) -> Serving:
    """What a server decides with, here: no address is locked out."""
    return Serving(server.layer, server.url, "x.test", frozenset(), Gate(), Metrics())


def attempt(serving: Serving, **more: Any) -> dict[str, Any]:
    return {"state": f"state-{time.monotonic_ns()}", "nonce": "nonce-1", "verifier": "v" * 50, "to": "/", "until": int(time.time()) + 60, **more}  # fmt: skip


def test_a_provider_that_lies_is_not_believed(serving: Serving, server: Server, provider: Provider) -> None:
    known(server)
    found = oidc.known(serving)
    stranger = rsa.generate_private_key(65537, 2048)
    now = int(time.time())

    def holds(token: object, nonce: str = "n") -> bool:
        try:
            return oidc.proven(found, token, nonce)["sub"] == "subject-7"
        except Unauthenticated:
            return False

    make = provider.honest
    assert holds(make("n")) and holds(make("n", aud=[CLIENT])) and holds(make("n", aud=[CLIENT, "x"], azp=CLIENT))
    pem = provider.keys["one"].public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )  # fmt: skip
    head = {"alg": "none", "kid": "one"}
    body = make("n").split(".")[1]
    unsigned = ".".join([base64.urlsafe_b64encode(json.dumps(head).encode()).decode().rstrip("="), body, ""])
    forged = (
        base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": "one", "typ": "JWT"}).encode()).decode().rstrip("=")
    )
    mac = hmac.new(pem, f"{forged}.{body}".encode(), hashlib.sha256).digest()
    wrong = [
        unsigned,
        f"{forged}.{body}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}",  # the public key as a shared secret
        make("n", stranger),
        make("n", stranger, kid="other"),
        make("n", algorithm="RS512"),  # right key, other algorithm than the configuration has
        make("other"),
        make("n", aud="somebody-else"), make("n", aud=[CLIENT, "x"]), make("n", aud=[CLIENT, "x"], azp="x"), make("n", azp="x"), make("n", aud=...),
        make("n", iss="https://evil.test"), make("n", iss=...),
        make("n", exp=now - 120), make("n", exp=...), make("n", exp="x"), make("n", exp=1e400),
        make("n", nbf=now + 3600), make("n", iat=now + 3600), make("n", iat=...),
        make("n", sub=...), make("n", nonce=...), make("n", nonce=7),
        make("n")[:-4] + "AAAA", "a.b.c", "", None, 7, {},
    ]  # fmt: skip
    assert [token for token in wrong if holds(token)] == []
    assert provider.asked["/keys"] <= 2  # unknown keys do not make us ask again and again


def test_keys_change_and_are_found(serving: Serving, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    found = oidc.known(serving)
    assert oidc.proven(found, provider.honest("n"), "n")["sub"] == "subject-7"
    old = provider.honest("n")
    provider.rotate("two", "ES256")
    with pytest.raises(Unauthenticated):  # looked for just now
        oidc.proven(found, provider.honest("n"), "n")
    monkeypatch.setattr(oidc, "AGAIN", 0.0)
    assert oidc.proven(found, provider.honest("n"), "n")["sub"] == "subject-7"
    with pytest.raises(Unauthenticated):  # a key that was taken back
        oidc.proven(found, old, "n")


def test_whom_a_claim_means(serving: Serving, server: Server, provider: Provider) -> None:
    mail = oidc.Provider(provider.url, CLIENT, claim="email")
    sub = oidc.Provider(provider.url, CLIENT)
    known(server)
    claims = {"sub": "subject-7", "email": "ben@example.org", "email_verified": True}
    ann = server.layer.query("select id from principal where name = 'ann'")[0]["id"]
    assert oidc.who(serving, sub, claims) == ann
    for wrong in ({"sub": "nobody"}, {"sub": ""}, {"sub": 7}, {}):
        with pytest.raises(Unauthenticated):
            oidc.who(serving, sub, wrong)
    with pytest.raises(Unauthenticated, match="this layer does not"):
        oidc.who(serving, mail, claims)
    known(server, "ben", "ben@example.org")
    assert oidc.who(serving, mail, claims) != ann
    for unverified in (False, None, "true", 1):
        with pytest.raises(Unauthenticated, match="not verified"):
            oidc.who(serving, mail, claims | {"email_verified": unverified})
    known(server, "twin", "subject-7")  # two whom one claim means: nobody
    with pytest.raises(Unauthenticated):
        oidc.who(serving, sub, claims)
    known(server, "twin", "")
    # Somebody new, where the configuration says so: known from then on, and with no permission.
    fresh = oidc.Provider(provider.url, CLIENT, create=True)
    number = oidc.who(serving, fresh, {"sub": "carl/the:first"})
    assert number == oidc.who(serving, fresh, {"sub": "carl/the:first"})
    assert server.layer.query("select name, kind from principal where id = :id", {"id": number}) == [
        {"name": "carlthefirst", "kind": "human"}
    ]
    assert not server.layer.query("select id from permission where subject = :id", {"id": number})
    with pytest.raises(Conflict, match="already"):  # no name is taken over
        oidc.who(serving, fresh, {"sub": "owner"})


def test_attempts_are_sealed_and_end(serving: Serving, server: Server) -> None:
    layer = serving.layer.id
    given = attempt(serving)
    cookie = oidc.sealed(layer, given)
    assert oidc.opened(layer, cookie) == given
    for wrong in (
        None,
        "",
        "x",
        cookie[:-8],
        cookie[:20] + "AAAA" + cookie[24:],
        oidc.sealed(layer, attempt(serving, until=1)),
    ):
        with pytest.raises(Unauthenticated):
            oidc.begun(serving, {"state": given["state"]}, wrong)
    for state in ({}, {"state": ""}, {"state": "é"}, {"state": given["state"][:-1]}):
        with pytest.raises(Unauthenticated):
            oidc.begun(serving, state, cookie)
    begun = oidc.begun(serving, {"state": given["state"]}, cookie)
    with pytest.raises(Unauthenticated, match="another provider"):
        oidc.finish(serving, {"code": "x", "iss": "https://evil.test"}, begun)
    with pytest.raises(Unauthenticated, match="used before"):
        oidc.finish(serving, {"code": "x"}, begun)


def test_a_page_of_a_stranger_locks_nobody_out(server: Server, configure: Callable[..., None]) -> None:
    known(server)
    browser, kept = httpx.Client(timeout=30), "select count(*) as n from sign_in"
    before = server.layer.query(kept)
    begun = browser.get(f"{server.url}/login/oidc")
    for n in range(WRONG + 5):  # pictures bring no cookie, windows that are opened bring one
        assert httpx.get(f"{server.url}{oidc.CALLBACK}?state=x{n}&code=y").status_code == 401
        assert browser.get(f"{server.url}{oidc.CALLBACK}?state=x{n}&code=y").status_code == 401
    assert server.layer.query(kept) == before, "nor do they fill the history"
    back = browser.get(begun.headers["location"]).headers["location"]
    assert browser.get(back).status_code == 303


def test_what_a_provider_may_be(
    serving: Serving, server: Server, provider: Provider, configure: Callable[..., None]
) -> None:
    for wrong in (
        {"issuer": "http://evil.test"}, {"issuer": "ftp://x"}, {"issuer": "https://"}, {"issuer": 7}, {"client_id": ""}, {"algorithms": ["none"]},
        {"algorithms": ["HS256"]}, {"algorithms": []}, {"algorithms": "RS256"}, {"claim": "name"}, {"scope": "email"}, {"more": 1}, {"create": "yes"},
    ):  # fmt: skip
        configure(**wrong)
        with pytest.raises(Invalid):
            oidc.provider(server.layer.id)
    configure()
    place = oidc.place(server.layer.id)
    place.chmod(0o644)
    with pytest.raises(Denied, match="can be read by others"):
        oidc.provider(server.layer.id)
    place.chmod(0o600)
    # One that says it is another, or leads to where nobody should be asked.
    for document in ({"issuer": "https://evil.test"}, {"token_endpoint": "http://10.0.0.1/x"}, {"token_endpoint": "file:///etc/passwd"}, {"token_endpoint": None}):  # fmt: skip
        provider.document = document
        serving.more.clear()
        with pytest.raises(Unavailable):
            oidc.known(serving).endpoint("token_endpoint")
    place.unlink()
    assert httpx.get(f"{server.url}/login/oidc").status_code == 404
    assert SECRET not in server.log
