"""Auth: who asks. Tokens, sessions of browsers, one-time links; wrong ones are counted, locked out and kept as rows."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections import OrderedDict
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import Request, cookie_parser

from ...errors import Denied, LayerError, LimitExceeded, Unauthenticated
from ...law import tokens
from ...law.tokens import Proven
from .serving import Caller, address_of

if TYPE_CHECKING:
    from .serving import Serving

COOKIES = ("layer_session", "__Host-layer_session")  # the second over HTTPS, where no neighbour's page can set it
SESSION = 12 * 3600.0  # seconds a browser stays signed in
LINK = 15 * 60.0  # seconds a one-time link is good for
FRESH = 1.0  # seconds a proof is believed: a revoked token is refused after that
WRONG = 20  # proofs that may fail from an address within a minute; after that it is locked out for one
MINUTE = 60.0
KNOWN = 10_000  # proofs and addresses that are remembered
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
log = logging.getLogger("livinglayer.auth")


class Gate:
    """What the server remembers of proofs: those that held this second, and the addresses of those that did not."""

    def __init__(self, wrong: int = WRONG) -> None:
        self.most = wrong
        self.proven: OrderedDict[str, tuple[float, Proven]] = OrderedDict()
        self.wrong: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, how often
        self.seen: OrderedDict[tuple[int | None, str], None] = OrderedDict()  # tokens and where they were used

    def locked(self, address: str) -> bool:
        """Whether an address has failed too often."""
        since, count = self.wrong.get(_customer(address), (0.0, 0))
        return count >= self.most and time.monotonic() - since < MINUTE

    def failed(self, address: str) -> int:
        """Count a failure; how many there were this minute."""
        now, address = time.monotonic(), _customer(address)
        since, count = self.wrong.pop(address, (now, 0))
        if now - since > MINUTE:
            since, count = now, 0
        self.wrong[address] = (since if count + 1 < self.most else now, count + 1)
        _forget(self.wrong)
        return count + 1


def _customer(address: str) -> str:
    """What counts as one address: of IPv6 a /64, all of which one customer has."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv4Address) or found.ipv4_mapped is not None:
        return address
    return str(IPv6Address(int(found) >> 64 << 64))


def _forget(known: OrderedDict[Any, Any]) -> None:
    while len(known) > KNOWN:
        known.popitem(last=False)


def session_of(headers: Headers, tls: bool) -> str | None:
    """What a browser's cookie says; over HTTPS only the one that no neighbour's page can set."""
    if COOKIES[0] not in (cookie := headers.get("cookie", "")):
        return None
    return cookie_parser(cookie).get(COOKIES[tls])


def given(headers: Headers, tls: bool = False) -> tuple[str, str] | None:
    """What a request proves itself with, and how: `token` or `session`."""
    if (header := headers.get("authorization", "")) and header[:7].lower() == "bearer ":
        return header[7:].strip(), "token"
    if key := headers.get("x-api-key"):
        return key, "token"
    return (text, "session") if (text := session_of(headers, tls)) else None


def signed(text: str) -> bool:
    """Whether a token has the form of what another layer signs, which is good for one request."""
    return text.count(".") == 2


async def still(serving: Serving, request: Request) -> bool:
    """Whether what a stream was asked for with is good yet."""
    found = given(request.headers, serving.tls)
    if found is None or signed(found[0]):
        return False
    try:
        await authenticate(serving, request.headers, address_of(request), "GET", request.scope["path"])
    except LayerError:
        return False
    return True


async def authenticate(
    serving: Serving, headers: Headers, address: str, method: str = "GET", path: str = "/", payload: bytes | None = None
) -> Caller:
    """Who asks, or Unauthenticated."""
    found = given(headers, serving.tls)
    if found is None:
        raise Unauthenticated("there is no token in the request", hint="Authorization: Bearer TOKEN, or X-API-Key")
    text, how = found
    proven = await prove(serving, text, how, headers, address, method, path, payload)
    if how == "session" and method not in SAFE:
        same_origin(serving, headers)
    layer = serving.acting(proven.principal)
    layer.until = None if proven.kind == "session" else proven.expires
    return Caller(proven.principal, proven.name, layer, proven.scope, proven.token, proven.kind)


async def prove(
    serving: Serving, text: str, how: str, headers: Headers, address: str, method: str, path: str, payload: bytes | None
) -> Proven:
    """Whose a token is, believed for a second."""
    gate, digest = serving.gate, hashlib.sha256(text.encode()).hexdigest()
    kept = gate.proven.get(digest)
    if kept is not None and time.monotonic() - kept[0] < FRESH and _fits(kept[1], how):
        return kept[1]
    try:
        if signed(text) and how == "token":
            from . import layers

            proven = await layers.prove(serving, text, method, path, payload)
            if (-proven.principal, address) not in gate.seen:
                gate.seen[-proven.principal, address] = None
                _forget(gate.seen)
                await keep(serving, "layer", "in", headers, address, proven.principal)
            return proven
        proven = await serving.do(tokens.prove, serving.layer, text)
        if not _fits(proven, how):
            raise tokens.nobody()
    except Unauthenticated as error:
        gate.proven.pop(digest, None)
        await refused(serving, how, headers, address, error.message)
        raise
    gate.proven[digest] = (time.monotonic(), proven)
    _forget(gate.proven)
    if (proven.token, address) not in gate.seen:
        gate.seen[proven.token, address] = None
        _forget(gate.seen)
        if how != "session":  # whose sign-in was kept when it began
            await keep(serving, how, "in", headers, address, proven.principal, token=proven.token)
    return proven


def _fits(proven: Proven, how: str) -> bool:
    """Whether a proof came the way it is for: a session as a cookie, any other in a header, a link neither way."""
    return proven.kind != "login" and (proven.kind == "session") == (how == "session")


async def refused(serving: Serving, how: str, headers: Headers, address: str, detail: str) -> None:
    """Count and keep that a proof failed; an address that does so too often is locked out."""
    count = serving.gate.failed(address)
    most = serving.gate.most
    if count <= WRONG or count == most:
        await keep(serving, how, "locked" if count == most else "refused", headers, address, None, detail=detail)
    if count >= most:
        raise locked_out()


def locked_out() -> LimitExceeded:
    return LimitExceeded("too many wrong tokens came from this address", hint="wait a minute", retry_after=int(MINUTE))


async def keep(
    serving: Serving, how: str, outcome: tokens.Outcome, headers: Headers, address: str, principal: int | None, *, token: int | None = None, detail: str | None = None,
) -> None:  # fmt: skip
    """A row of `sign_in`."""
    client = headers.get("user-agent", "")[:200] or None
    try:
        await serving.do(
            tokens.signed_in, serving.layer, how, outcome, principal, address=address, client=client, token=token, detail=detail
        )  # fmt: skip
    except LayerError as error:
        log.warning("a sign-in could not be kept: %s", error)


async def open_session(serving: Serving, principal: int, how: str, address: str, client: str | None) -> str:
    """Sign a browser in: the value of its cookie."""
    headers = Headers({"user-agent": client or ""})
    layer = serving.acting(principal)
    expires = tokens.lasting(SESSION)
    text = await serving.do(lambda: tokens.create(layer, layer.me, "browser", "session", None, expires))
    proven = await serving.do(tokens.prove, serving.layer, text)
    await keep(serving, how, "in", headers, address, principal, token=proven.token)
    return text


async def redeem(serving: Serving, text: str, headers: Headers, address: str) -> str:
    """Use a one-time link: the value of a cookie. It works once, however many try at the same time."""
    if serving.gate.locked(address):
        raise locked_out()
    try:
        principal = await serving.do(tokens.redeem, serving.layer, text)
    except Unauthenticated as error:
        await refused(serving, "link", headers, address, error.message)
        raise
    return await open_session(serving, principal, "link", address, headers.get("user-agent"))


async def close_session(serving: Serving, headers: Headers, address: str) -> None:
    """Sign a browser out."""
    caller = await authenticate(serving, headers, address, "POST")
    if caller.token is not None:
        await serving.do(tokens.revoke, caller.layer, caller.token)
        serving.gate.proven.clear()
        await keep(serving, "session", "out", headers, address, caller.principal, token=caller.token)


def same_origin(serving: Serving, headers: Headers) -> None:
    """A browser that carries a session acts only for pages of this server."""
    origin = headers.get("origin") or headers.get("referer")
    if origin is None or origin.partition("://")[2].partition("/")[0] != headers.get("host"):
        raise Denied("a browser's session is used by pages of this server only", hint="use a token instead")


def csrf(session: str) -> str:
    """What a form of a session carries, so that no other page can send it."""
    return hmac.new(session.encode(), b"form", hashlib.sha256).hexdigest()[:32]


def is_form_of(session: str, given: object) -> bool:
    return isinstance(given, str) and hmac.compare_digest(csrf(session).encode(), given.encode())
