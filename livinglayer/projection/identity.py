"""Identity: who a layer is to other layers. A key of its own, beside the person's other keys and never in the database.

What it signs is good for one request, one receiver and a minute at most. There is one algorithm, Ed25519.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..errors import Corrupt, Invalid, Unauthenticated
from ..settings import config_directory, own_file

PREFIX = "layer:"
ALGORITHM = "EdDSA"
REQUEST, ANSWER = "layer-request+jwt", "layer-answer+jwt"  # one can't be taken for the other
LONGEST = 60  # seconds that a statement is good for
SKEW = 10  # seconds that two clocks may differ
SECONDS = 30  # for which ours are made


def name(layer: str) -> str:
    """The public name of a layer, by its id: `layer:` and its key."""
    return _name(private(layer).public_key())


def _name(key: Ed25519PublicKey) -> str:
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def public(named: object) -> Ed25519PublicKey:
    """The key in the name of a layer; Invalid when it is none."""
    text = named.removeprefix(PREFIX) if isinstance(named, str) and named.startswith(PREFIX) else ""
    try:
        found = Ed25519PublicKey.from_public_bytes(base64.b64decode(text + "=", altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        found = None
    if found is None or _name(found) != named:  # one spelling only
        raise Invalid(f"{named!r:.80} is not the name of a layer", hint="`layer identity` prints it: layer:…")
    return found


def private(layer: str) -> Ed25519PrivateKey:
    """The key of a layer, made at its first use; Denied when others can read it."""
    place = _place(layer)
    try:
        key = serialization.load_pem_private_key(own_file(place, _fresh, "nothing is signed with it"), None)
        assert isinstance(key, Ed25519PrivateKey)
    except (ValueError, TypeError, AssertionError):
        raise Corrupt(f"{place} is no key of a layer", hint="remove it: the layer gets another name") from None
    return key


def _place(layer: str) -> Path:
    return config_directory() / "identities" / f"{layer}.key"


def _fresh() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


# Statements


def request(layer: str, audience: str, method: str, path: str, body: bytes) -> tuple[str, str]:
    """What a layer proves one request with, and the number that the answer repeats."""
    number = secrets.token_urlsafe(16)
    said = {"aud": audience, "jti": number, "htm": method, "path": path, "body": digest(body)}
    return _signed(layer, REQUEST, said), number


def answer(layer: str, audience: str, number: str, status: int, body: bytes) -> str:
    """What a layer proves with that an answer is its own, and to what."""
    return _signed(layer, ANSWER, {"aud": audience, "jti": number, "status": status, "body": digest(body)})


def _signed(layer: str, kind: str, said: Mapping[str, Any]) -> str:
    now, key = int(time.time()), private(layer)
    claims = {"iss": _name(key.public_key()), "iat": now, "exp": now + SECONDS, **said}
    return jwt.encode(claims, key, ALGORITHM, headers={"typ": kind})


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def claims(text: str) -> dict[str, Any]:
    """What a statement says, proven or not."""
    try:
        return dict(jwt.decode(text, options={"verify_signature": False}))
    except (jwt.InvalidTokenError, ValueError, RecursionError):
        raise _unproven("it can't be read") from None


def opened(text: str, kind: str, named: str, audiences: list[str]) -> dict[str, Any]:
    """What a statement says that a layer of this name has signed for one of these; Unauthenticated otherwise."""
    try:
        if jwt.get_unverified_header(text).get("typ") != kind:
            raise _unproven("it is of another kind")
        said = jwt.decode(
            text, public(named), [ALGORITHM], audience=audiences, issuer=named, leeway=SKEW,
            options={"require": ["iss", "aud", "iat", "exp", "jti"]},
        )  # fmt: skip
    except (jwt.InvalidTokenError, ValueError, TypeError, OverflowError, RecursionError, Invalid) as error:
        raise _unproven(str(error) or type(error).__name__) from None
    if type(said["exp"]) is not int or type(said["iat"]) is not int:
        raise _unproven("its times are whole seconds")
    if not isinstance(said["aud"], str) or not isinstance(said["jti"], str) or not 16 <= len(said["jti"]) <= 100:
        raise _unproven("it is for one receiver, with a number of its own")
    if not said["exp"] - said["iat"] <= LONGEST:
        raise _unproven(f"it is good for more than {LONGEST} seconds")
    return dict(said)


def _unproven(why: str) -> Unauthenticated:
    return Unauthenticated(f"what a layer proves itself with does not hold: {why:.120}")
