"""OIDC: people sign in with somebody who knows them already. What is proven is one claim, and a principal's row says whose it is.

Authorization code with PKCE. What a browser must bring back lies sealed in a cookie of its own, so any server of the layer
can go on; each attempt counts once. The algorithms are those of the configuration: what a token says of itself decides nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import secrets
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

import jwt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...errors import Conflict, Denied, Invalid, NotFound, Unauthenticated, Unavailable
from ...projection import identity
from ...projection.remote import within
from ...settings import config_directory
from ...substrate import authority
from ...substrate.ledger import MAIN_CHAIN
from ...substrate.schema import SYSTEM
from . import auth, home
from .asked import NotAllowed
from .serving import address_of

if TYPE_CHECKING:
    from .serving import Serving

COOKIES = (
    ("layer_oidc", "/login/oidc"),
    ("__Host-layer_oidc", "/"),
)  # names and paths; the second over HTTPS, where no neighbour's page can set it
CALLBACK = "/login/oidc/callback"
ATTEMPT = 600  # seconds to sign in over there
KNOWN = 3600.0  # seconds that what a provider says of itself is believed
AGAIN = 10.0  # between two looks for a key that nobody knows
SKEW = 30  # seconds that two clocks may differ
LARGEST, SECONDS = 1 << 20, 10.0  # of one answer
# Of these a configuration names some. Those that share a secret (HS…) and `none` are none of them.
ALGORITHMS = {
    "RS256": "RSA",
    "RS384": "RSA",
    "RS512": "RSA",
    "PS256": "RSA",
    "ES256": "EC",
    "ES384": "EC",
    "EdDSA": "OKP",
}
CLAIMS = ("sub", "email")
KEYS = frozenset("issuer client_id client_secret claim algorithms scope create".split())
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Provider:
    """Who knows people, and what of their word counts."""

    issuer: str
    client_id: str
    client_secret: str | None = None
    claim: str = "sub"  # what a principal's attribute `oidc` is compared with
    algorithms: tuple[str, ...] = ("RS256",)
    scope: str = "openid email"
    create: bool = False  # whether somebody whom no row knows becomes a principal, with no permission


def place(layer: str) -> Path:
    """The file with a layer's provider."""
    return config_directory() / "oidc" / f"{layer}.json"


def provider(layer: str) -> Provider:
    """A layer's provider; NotFound when it has none."""
    try:
        with open(os.open(place(layer), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise Denied(f"{place(layer)} can be read by others", hint=f"chmod 600 {place(layer)}")
            return configured(json.loads(file.read(1 << 16)))
    except FileNotFoundError:
        raise NotFound("nobody else signs people in here", hint="layer login prints a link") from None
    except (ValueError, RecursionError):
        raise Invalid(f"{place(layer)} is not JSON") from None


def configured(given: Any) -> Provider:
    """A provider as its file says; Invalid names what is wrong with it."""
    if not isinstance(given, Mapping) or set(given) - KEYS:
        raise Invalid(f"a provider has {', '.join(sorted(KEYS))}")
    for key in ("issuer", "client_id"):
        if not isinstance(given.get(key), str) or not given[key]:
            raise Invalid(f"a provider needs {key!r}")
    _safe(given["issuer"], "the issuer")
    listed = given.get("algorithms", ["RS256"])
    if not isinstance(listed, list) or not listed or any(each not in ALGORITHMS for each in listed):
        raise Invalid(f"algorithms {listed!r:.80} are not some of {', '.join(ALGORITHMS)}")
    if given.get("claim", "sub") not in CLAIMS:
        raise Invalid(f"people are known by {' or '.join(CLAIMS)}, not {given['claim']!r:.60}")
    for key, kind in (("client_secret", str), ("scope", str), ("create", bool)):
        if given.get(key) is not None and not isinstance(given[key], kind):
            raise Invalid(f"{key} of a provider is not {kind.__name__}")
    scope = given.get("scope") or "openid email"
    if "openid" not in scope.split():
        raise Invalid("the scope of a provider has openid in it")
    return Provider(
        given["issuer"].rstrip("/"), given["client_id"], given.get("client_secret"), given.get("claim", "sub"), tuple(listed), scope,
        bool(given.get("create")),
    )  # fmt: skip


def _safe(url: object, what: str) -> str:
    """An address that a provider may have: https, and http on this machine alone."""
    parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
    try:
        fine = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOCAL)
        fine = fine and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc and not parts.fragment
    except ValueError:
        fine = False
    if not fine or not str(url).isprintable() or " " in str(url):
        raise Invalid(f"{what} {url!r:.120} is not https://…")
    return str(url)


# What a provider says of itself


@dataclass
class Known:
    """A provider's document and keys, asked for when they are needed and believed for a while."""

    provider: Provider
    document: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    read: float = -KNOWN
    looked: float = -KNOWN
    lock: threading.Lock = field(default_factory=threading.Lock)

    def endpoint(self, name: str) -> str:
        with self.lock:
            if time.monotonic() - self.read >= KNOWN:
                found = asked(f"{self.provider.issuer}/.well-known/openid-configuration")
                if str(found.get("issuer")).rstrip("/") != self.provider.issuer:
                    raise Unavailable(f"{self.provider.issuer} says it is {found.get('issuer')!r:.120}")
                self.document, self.read = found, time.monotonic()
        try:
            return _safe(self.document.get(name), f"the {name} of {self.provider.issuer}")
        except Invalid as error:
            raise Unavailable(error.message) from None

    def key(self, named: str | None, algorithm: str) -> Any:
        """The key of that name, looked for again when it is new: keys are changed now and then."""
        address = self.endpoint("jwks_uri")
        with self.lock:
            now = time.monotonic()
            if now - self.looked >= KNOWN or (self._find(named, algorithm) is None and now - self.looked >= AGAIN):
                listed, self.looked = asked(address).get("keys"), now
                self.keys = {}
                for each in listed if isinstance(listed, list) else ():
                    if isinstance(each, dict) and each.get("use", "sig") == "sig":
                        self.keys[str(each.get("kid"))] = each
            found = self._find(named, algorithm)
        if found is None:
            raise Unauthenticated("what the provider signed is signed with a key that it does not have")
        try:
            return jwt.PyJWK(found, algorithm).key
        except (jwt.PyJWTError, ValueError, TypeError, KeyError):
            raise Unauthenticated("the key of the provider is none") from None

    def _find(self, named: str | None, algorithm: str) -> dict[str, Any] | None:
        fits = [
            each
            for each in self.keys.values()
            if each.get("kty") == ALGORITHMS[algorithm] and each.get("alg", algorithm) == algorithm
        ]
        if named is None:
            return fits[0] if len(fits) == 1 else None
        return next((each for each in fits if each.get("kid") == named), None)


def asked(url: str, form: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A JSON document of a provider; redirects are not followed, and what is too large or too slow is none."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection: http.client.HTTPConnection = (
        http.client.HTTPSConnection(parts.hostname, parts.port, timeout=SECONDS, context=ssl.create_default_context())
        if parts.scheme == "https"
        else http.client.HTTPConnection(parts.hostname, parts.port, timeout=SECONDS)
    )
    with within(connection, SECONDS):
        given = {"accept": "application/json", "user-agent": "livinglayer", **(headers or {})}
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if form is None:
            connection.request("GET", path, headers=given)
        else:
            given["content-type"] = "application/x-www-form-urlencoded"
            connection.request("POST", path, urlencode(form), given)
        response = connection.getresponse()
        data = response.read(LARGEST + 1)
    if response.status == 400 and form is not None:
        raise Unauthenticated("the provider does not know this attempt to sign in")
    try:
        found = json.loads(data) if response.status == 200 and len(data) <= LARGEST else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unavailable(f"{parts.scheme}://{parts.netloc} gives no answer that can be used: status {response.status}")
    return found


def known(serving: Serving) -> Known:
    """What this server knows of its provider, as it is configured now."""
    now = provider(serving.layer.id)
    found: Known | None = serving.more.get("oidc")
    if found is None or found.provider != now:
        found = serving.more["oidc"] = Known(now)
    return found


# Signing in


async def handle(serving: Serving, request: Request) -> Response:
    """/login/oidc sends a browser to the provider, /login/oidc/callback is where it comes back."""
    if request.method not in ("GET", "HEAD"):
        raise NotAllowed("signing in is a GET", hint="GET", allow="GET")
    if request.scope["path"] == "/login/oidc":
        return await begin(serving, request)
    if request.scope["path"] != CALLBACK:
        raise NotFound(f"there is nothing at {request.scope['path']!r:.120}", hint="/login/oidc")
    address = address_of(request)
    if serving.gate.locked(address):
        raise auth.locked_out()
    given = dict(request.query_params)
    # Any page can send a browser here, 20 pictures at once: what this browser did not begin is refused and counts nothing.
    attempt = await serving.do(begun, serving, given, request.cookies.get(COOKIES[serving.tls][0]))
    try:
        principal = await serving.do(finish, serving, given, attempt)
    except Unauthenticated as error:
        await auth.refused(serving, "oidc", request.headers, address, error.message)
        raise
    cookie = await auth.open_session(serving, principal, "oidc", address, request.headers.get("user-agent"))
    response = home.entered(serving, cookie, attempt["to"])
    name, path = COOKIES[serving.tls]
    response.delete_cookie(name, path, secure=serving.tls, httponly=True, samesite="lax")
    return response


async def begin(serving: Serving, request: Request) -> Response:
    """To the provider, with what it must bring back."""
    found = known(serving)
    to = request.query_params.get("next", "/")
    attempt = {
        "state": secrets.token_urlsafe(24), "nonce": secrets.token_urlsafe(24), "verifier": secrets.token_urlsafe(48),
        "to": to if local(to) else "/", "until": int(time.time()) + ATTEMPT,
    }  # fmt: skip
    challenge = (
        base64.urlsafe_b64encode(hashlib.sha256(str(attempt["verifier"]).encode()).digest()).decode().rstrip("=")
    )
    query = {
        "response_type": "code", "client_id": found.provider.client_id, "redirect_uri": serving.url + CALLBACK, "scope": found.provider.scope,
        "state": attempt["state"], "nonce": attempt["nonce"], "code_challenge": challenge, "code_challenge_method": "S256",
    }  # fmt: skip
    there = await serving.do(found.endpoint, "authorization_endpoint")
    response = RedirectResponse(f"{there}{'&' if '?' in there else '?'}{urlencode(query, quote_via=quote)}", 303)
    name, path = COOKIES[serving.tls]
    response.set_cookie(
        name, sealed(serving.layer.id, attempt), ATTEMPT, path=path, secure=serving.tls, httponly=True, samesite="lax"
    )
    response.headers["cache-control"] = "no-store"
    return response


def local(path: str) -> bool:
    """Whether a browser stays here when it goes there."""
    return path.startswith("/") and not path.startswith(("//", "/\\")) and path.isascii() and path.isprintable()


def begun(serving: Serving, given: Mapping[str, str], cookie: str | None) -> dict[str, Any]:
    """The attempt that a browser comes back from; Unauthenticated when it did not begin that one."""
    attempt = opened(serving.layer.id, cookie)
    if not hmac.compare_digest(given.get("state", "").encode(), attempt["state"].encode()):
        raise Unauthenticated("this browser did not begin to sign in, or did once more since")
    return attempt


def finish(serving: Serving, given: Mapping[str, str], attempt: Mapping[str, Any]) -> int:
    """Who has come back from an attempt; Unauthenticated unless all of it holds."""
    found = known(serving)
    if not serving.layer.engine.claim([f"oidc/{attempt['state']}"], secrets.token_hex(8), ATTEMPT + SKEW):
        raise Unauthenticated("this attempt to sign in was used before")
    if "iss" in given and given["iss"].rstrip("/") != found.provider.issuer:
        raise Unauthenticated("another provider answers than was asked")
    if "code" not in given:
        raise Unauthenticated(f"the provider says: {given.get('error', 'nothing'):.100}")
    form = {
        "grant_type": "authorization_code", "code": given["code"], "redirect_uri": serving.url + CALLBACK,
        "client_id": found.provider.client_id, "code_verifier": attempt["verifier"],
    }  # fmt: skip
    headers = {}
    if (secret := found.provider.client_secret) is not None:
        pair = f"{quote(found.provider.client_id, safe='')}:{quote(secret, safe='')}"
        headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    answer = asked(found.endpoint("token_endpoint"), form, headers)
    claims = proven(found, answer.get("id_token"), attempt["nonce"])
    return who(serving, found.provider, claims)


def proven(found: Known, token: object, nonce: str) -> dict[str, Any]:
    """What a provider has signed about somebody, for us and this attempt; Unauthenticated otherwise."""
    issuer = found.provider.issuer
    try:
        if not isinstance(token, str):
            raise Unauthenticated("the provider gave no ID token")
        head = jwt.get_unverified_header(token)
        algorithm = head.get("alg")
        if algorithm not in found.provider.algorithms:
            raise Unauthenticated(f"the ID token is signed with {algorithm!r:.40}, which does not count here")
        key = found.key(head.get("kid"), str(algorithm))
        claims = jwt.decode(
            token, key, [str(algorithm)], audience=found.provider.client_id, issuer=[issuer, issuer + "/"], leeway=SKEW,
            options={"require": ["iss", "sub", "aud", "exp", "iat"]},
        )  # fmt: skip
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unauthenticated(f"the ID token does not hold: {error!s:.120}") from None
    if not isinstance(claims.get("nonce"), str) or not hmac.compare_digest(claims["nonce"].encode(), nonce.encode()):
        raise Unauthenticated("the ID token is of another attempt to sign in")
    several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
    if (several or "azp" in claims) and claims.get("azp") != found.provider.client_id:
        raise Unauthenticated("the ID token is for somebody else too")
    return dict(claims)


def who(serving: Serving, provider: Provider, claims: Mapping[str, Any]) -> int:
    """The principal whose attribute `oidc` is what was proven."""
    value = claims.get(provider.claim)
    if not isinstance(value, str) or not value:
        raise Unauthenticated(f"the provider does not tell the {provider.claim} of whoever signs in")
    if provider.claim == "email" and claims.get("email_verified") is not True:
        raise Unauthenticated("the provider has not verified this e-mail address")
    people = SYSTEM.by_name["principal"]
    with serving.layer.engine.reading() as session:
        rows = serving.layer.catalog.rows(session, people, MAIN_CHAIN)
    found = [
        row for row in rows if (row["attributes"] or {}).get("oidc") == value and row["kind"] not in ("role", "layer")
    ]
    if len(found) == 1:
        return int(found[0]["id"])
    if found or not provider.create:
        raise Unauthenticated(
            "the provider knows you, and this layer does not",
            hint=f"layer principal NAME --attribute oidc={value:.200}",
        )
    name = "".join(letter for letter in value if authority.NAMES.fullmatch(letter))[:100]
    with serving.layer.in_tx(None, "main", f"{name} signs in for the first time") as tx:
        if not name or authority.find(tx, name) is not None:
            raise Conflict(f"there is a principal {name!r} already, who is not known by the provider")
        return authority.principal(tx, name, "human", {"oidc": value}, None)


# What a browser keeps between the two


def _key(layer: str) -> bytes:
    raw = identity.private(layer).private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )
    return HKDF(hashes.SHA256(), 32, None, b"livinglayer oidc attempt").derive(raw)


def sealed(layer: str, attempt: Mapping[str, Any]) -> str:
    """An attempt as a cookie that only servers of this layer can read."""
    nonce = secrets.token_bytes(12)
    data = nonce + AESGCM(_key(layer)).encrypt(nonce, json.dumps(dict(attempt)).encode(), layer.encode())
    return base64.urlsafe_b64encode(data).decode()


def opened(layer: str, cookie: str | None) -> dict[str, Any]:
    """The attempt in a cookie; Unauthenticated when there is none, or it is over."""
    try:
        data = base64.urlsafe_b64decode((cookie or "").encode())
        found = json.loads(AESGCM(_key(layer)).decrypt(data[:12], data[12:], layer.encode()))
    except (InvalidTag, ValueError):
        raise Unauthenticated("this browser did not begin to sign in here", hint="/login/oidc") from None
    if found["until"] < time.time():
        raise Unauthenticated("this attempt to sign in took too long", hint="/login/oidc")
    return dict(found)
