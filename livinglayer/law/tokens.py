"""Tokens: what principals prove with who they are. A row keeps the hash, the token itself is told once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from ..errors import Denied, Invalid, NotFound, Unauthenticated
from ..substrate import genesis
from ..substrate.ledger import MAIN_CHAIN
from ..substrate.schema import SYSTEM
from .verbs import Call, Items, verb

TOKEN, PRINCIPAL, SIGN_IN = (SYSTEM.by_name[name] for name in ("token", "principal", "sign_in"))
PARTS = ("read", "write", "boxes")  # what a scope may name: queries, changes, boxes
KINDS = {"api": "ll_", "e2b": "e2b_", "session": "session_", "login": "login_"}
Outcome = Literal["in", "refused", "locked", "out"]


@dataclass(frozen=True)
class Proven:
    """Whose a token is, and what for."""

    principal: int
    name: str
    token: int | None  # None: the one that the principal's own row knows
    kind: str
    scope: frozenset[str] | None  # None: all that its principal may
    expires: datetime | None


def nobody() -> Unauthenticated:
    """What a token that is unknown, over or taken back is told; not which of these."""
    return Unauthenticated("the token is nobody's here, or it has ended", hint="layer token create makes one")


def create(
    layer: Any,
    principal: str,
    name: str,
    kind: str = "api",
    scope: Sequence[str] | None = None,
    expires: datetime | None = None,
    reason: str | None = None,
) -> str:
    """A new token of a principal: its own, or anybody's when an owner asks. It ends with the token that made it at the latest."""
    if kind not in KINDS:
        raise Invalid(f"there is no kind of token {kind!r}", hint=", ".join(KINDS))
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise Invalid("a token has a name of up to 200 characters, to tell it from others")
    if scope is not None and (isinstance(scope, str) or not scope or not all(part in PARTS for part in scope)):
        raise Invalid(f"the scope of a token is one or more of {', '.join(PARTS)}, not {scope!r}")
    if layer.until is not None:
        if kind == "login":
            raise Denied("a token that ends makes no link to sign in with: the session would outlive it")
        expires = layer.until if expires is None else min(expires, layer.until)
    if expires is not None and expires <= datetime.now(UTC):
        raise Invalid(f"a token that ended at {expires.isoformat()} is good for nothing")
    text = KINDS[kind] + secrets.token_hex(20)
    with layer.in_tx(None, "main", reason or f"token {name} of {principal}") as tx:
        number = tx._having(PRINCIPAL, [PRINCIPAL.by_name["name"]], [principal], None)
        if not tx.policy.sovereign() and number != tx.execution.principal:
            raise Denied(f"{tx.policy.me['name']} may not make tokens of {principal}: only an owner may")
        if number is None:
            raise NotFound(f"there is no principal {principal!r}", hint="layer principal NAME makes one")
        row = {
            "principal": number, "name": name, "kind": kind, "hash": genesis.token_hash(text), "ending": text[-4:],
            "scope": None if scope is None else sorted(scope), "expires": expires,
        }  # fmt: skip
        tx.record(TOKEN, tx._encoded(TOKEN, row))
    return text


def prove(layer: Any, text: str) -> Proven:
    """Whose a token is; Unauthenticated for one that is unknown, over or taken back, without saying which."""
    hashed = genesis.token_hash(text)
    with layer.engine.reading() as session:

        def having(entity: Any, field: str, value: Any) -> list[dict[str, Any]]:
            column = "id" if field == "id" else entity.by_name[field].store
            return list(layer.catalog.rows(session, entity, MAIN_CHAIN, f"where x.{column} = ?", (value,)))

        rows = having(TOKEN, "hash", hashed)
        row = rows[0] if rows else None
        who = having(PRINCIPAL, "id", row["principal"]) if row else having(PRINCIPAL, "token", hashed)
    if not who or not secrets.compare_digest(row["hash"] if row else who[0]["token"], hashed):
        raise nobody()
    if row and (row["revoked"] is not None or (row["expires"] is not None and row["expires"] <= datetime.now(UTC))):
        raise nobody()
    if row is None:
        return Proven(who[0]["id"], who[0]["name"], None, "api", None, None)
    scope = None if row["scope"] is None else frozenset(row["scope"])
    return Proven(who[0]["id"], who[0]["name"], row["id"], row["kind"], scope, row["expires"])


def revoke(layer: Any, number: int, reason: str | None = None) -> None:
    """End a token: one's own, or anybody's when an owner asks."""
    with layer.in_tx(None, "main", reason or f"revoke token {number}") as tx:
        rows = layer.catalog.rows(tx.session, TOKEN, MAIN_CHAIN, "where x.id = ?", (number,))
        if not rows or not (tx.policy.sovereign() or rows[0]["principal"] == tx.execution.principal):
            raise NotFound(f"there is no token {number}", hint="layer token list")
        if rows[0]["revoked"] is None:
            tx.record(TOKEN, tx._encoded(TOKEN, {"revoked": datetime.now(UTC)}, partial=True), number)


def redeem(layer: Any, text: str) -> int:
    """Use up a one-time token: whose it is. Of several who try, one gets in."""
    proven = prove(layer, text)
    if proven.kind != "login" or proven.token is None:
        raise nobody()
    with layer.in_tx(None, "main", f"sign-in link of {proven.name} is used") as tx:
        (row,) = layer.catalog.rows(tx.session, TOKEN, MAIN_CHAIN, "where x.id = ?", (proven.token,))
        if row["revoked"] is not None:
            raise nobody()
        tx.record(TOKEN, tx._encoded(TOKEN, {"revoked": datetime.now(UTC)}, partial=True), proven.token)
    return proven.principal


def known(layer: Any) -> list[dict[str, Any]]:
    """The tokens a handle's principal may know of: its own, an owner everybody's; never what proves anything."""
    with layer.engine.reading() as session:
        sovereign = layer.my_policy(session).sovereign()
        where = "" if sovereign else f"where x.{TOKEN.by_name['principal'].store} = ?"
        rows = layer.catalog.rows(session, TOKEN, MAIN_CHAIN, where, () if sovereign else (layer.my_id,))
        names = {row["id"]: row["name"] for row in layer.catalog.rows(session, PRINCIPAL, MAIN_CHAIN)}
    hidden = ("hash", "_tx")
    return [
        {**{k: v for k, v in row.items() if k not in hidden}, "principal": names.get(row["principal"])} for row in rows
    ]


def signed_in(layer: Any, how: str, outcome: Outcome, principal: int | None, **more: Any) -> None:
    """Keep that somebody proved who they are, or could not."""
    with layer.in_tx(None, "main", f"sign-in by {how}: {outcome}") as tx:
        tx.record(SIGN_IN, tx._encoded(SIGN_IN, {"principal": principal, "how": how, "outcome": outcome, **more}))


def lasting(seconds: float | None) -> datetime | None:
    """The moment so many seconds from now."""
    if seconds is None:
        return None
    if not 0 < seconds <= 10 * 366 * 86400:
        raise Invalid(f"a token lasts for some seconds, ten years at most, not {seconds!r}")
    return datetime.now(UTC) + timedelta(seconds=seconds)


@verb("token.create", sealed=True, told_once=True)
def _create(
    call: Call, *, name: str, principal: str | None = None, kind: str = "api", scope: Items | None = None, seconds: float | None = None
) -> Any:  # fmt: skip
    """A new token, told this once: one's own, or anybody's when an owner asks. A scope of read, write, boxes narrows it."""
    if kind not in ("api", "e2b"):
        raise Invalid(f"a token is made for api or e2b, not {kind!r}", hint="sessions begin by signing in")
    whose = call.layer.me if principal is None else principal
    return {"token": create(call.layer, whose, name, kind, scope, lasting(seconds), call.reason)}


@verb("token.revoke", sealed=True)
def _revoke(call: Call, *, id: int) -> Any:
    """End a token at once."""
    revoke(call.layer, id, call.reason)
