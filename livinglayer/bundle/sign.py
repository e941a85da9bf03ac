"""Signatures: who made a bundle, by a key; and whose keys are trusted here."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..errors import Conflict, Denied, Invalid, NotFound
from ..settings import config_directory
from . import documents, files
from .documents import wrong
from .files import SIGNATURE

NAME = re.compile(r"[a-z0-9][a-z0-9_.@-]{0,99}")
SIGNED = b"livinglayer bundle 1\n"  # before the digest, so that the signature of anything else is none of a bundle


def verified(given: Mapping[str, bytes]) -> str | None:
    """The public key that signed these files, or None of files without a signature; Invalid when it is of other files."""
    if SIGNATURE not in given:
        return None
    said = documents.parse(SIGNATURE, given[SIGNATURE])
    if found := documents.problems("signature", SIGNATURE, said):
        raise found[0]
    try:
        key = Ed25519PublicKey.from_public_bytes(_decoded(said["key"]))
        key.verify(_decoded(said["signature"]), _message(given))
    except (InvalidSignature, ValueError):
        raise wrong(
            SIGNATURE, "signature", "is not of these files: one of them was changed after they were signed",
            "layer bundle sign DIR signs them anew, with your key; or remove signature.yaml",
        ) from None  # fmt: skip
    return str(said["key"])


def _message(given: Mapping[str, bytes]) -> bytes:
    return SIGNED + files.digest(given).encode()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Invalid(f"{text!r:.80} is not base64") from None


# Signing


def keygen(path: str | os.PathLike[str] | None = None) -> str:
    """Make a key to sign bundles with and give its public half; Conflict when there is one. Only you can read the file."""
    place = Path(path) if path is not None else key_file()
    key = Ed25519PrivateKey.generate()
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        opened = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise Conflict(
            f"there is a key at {place} already", hint="what it has signed would not be known as yours"
        ) from None
    except OSError as error:
        raise Invalid(f"{place} can't be written: {error.strerror}") from None
    with open(opened, "wb") as file:
        file.write(data)
    return public(key)


def key_file() -> Path:
    """Where one's own key lies."""
    return config_directory() / "publisher.key"


def public(key: Ed25519PrivateKey) -> str:
    return base64.b64encode(
        key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    ).decode()


def private(path: str | os.PathLike[str] | None = None) -> Ed25519PrivateKey:
    """One's own key, or the one in a file (PEM); NotFound, or Denied when others can read it."""
    place = Path(path) if path is not None else key_file()
    try:
        with open(os.open(place, os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise Denied(f"{place} can be read by others, so nothing is signed with it", hint=f"chmod 600 {place}")
            data = file.read(1 << 16)
    except OSError as error:
        raise NotFound(f"there is no key at {place}: {error.strerror}", hint="layer bundle keygen makes one") from None
    try:
        key = serialization.load_pem_private_key(data, None)
        if isinstance(key, Ed25519PrivateKey):
            return key
    except (ValueError, TypeError, UnsupportedAlgorithm):
        pass  # said below
    raise Invalid(f"{place} is no Ed25519 key without a password", hint="layer bundle keygen makes one")


def signature(given: Mapping[str, bytes], key: Ed25519PrivateKey) -> bytes:
    """The signature.yaml of files."""
    made = base64.b64encode(key.sign(_message(given))).decode()
    return f'key: "{public(key)}"\nsignature: "{made}"\n'.encode()


def sign(directory: str | os.PathLike[str], key: str | os.PathLike[str] | None = None) -> str:
    """Sign the bundle in a directory with one's own key, or the one in a file; gives the public half."""
    from .load import of_files

    mine = private(key)
    given = {path: data for path, data in files.read(directory).items() if path != SIGNATURE}
    of_files(given)  # what could not be loaded is not worth a name
    files.put(Path(directory) / SIGNATURE, signature(given, mine))
    return public(mine)


# Trust


def trust(name: str, key: str) -> None:
    """From now on this key is known here as a publisher's; Conflict when the name is another key's."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Invalid(f"{name!r:.120} can't be the name of a publisher", hint="lower-case letters, digits and _ . @ -")
    if not isinstance(key, str) or len(_decoded(key)) != 32:
        raise Invalid(f"{key!r:.80} is no public key", hint="base64 of 32 bytes, as layer bundle keygen prints it")
    known = publishers()
    if known.get(name, key) != key:
        raise Conflict(f"publisher {name!r} has another key here", hint=f"layer bundle trust --remove {name}")
    place = config_directory() / "publishers"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.put(place / f"{name}.pub", f"{key}\n".encode())


def distrust(name: str) -> None:
    """A publisher is not trusted any more."""
    if name not in publishers():
        raise NotFound(f"there is no publisher {name!r:.120} here", hint="layer bundle trust lists them")
    (config_directory() / "publishers" / f"{name}.pub").unlink(missing_ok=True)


def publishers() -> dict[str, str]:
    """The publishers that are trusted here: name -> public key."""
    found = {}
    try:
        places = sorted((config_directory() / "publishers").glob("*.pub"))
    except OSError:
        return {}
    for place in places:
        if NAME.fullmatch(place.stem) and place.is_file():
            found[place.stem] = place.read_text("ascii", "replace").strip()
    return found


def publisher(key: str | None) -> str | None:
    """The name under which a key is trusted here, or None."""
    return next((name for name, known in publishers().items() if key is not None and known == key), None)


def verify(given: Mapping[str, bytes]) -> tuple[str, str]:
    """Who signed these files, as (name, key); Denied unless it is a publisher that is trusted here."""
    key = verified(given)
    if key is None:
        raise Denied("the bundle is not signed", hint="layer bundle sign DIR")
    name = publisher(key)
    if name is None:
        raise Denied(
            f"the bundle is signed by a key that nobody here trusts: {key}", hint="layer bundle trust NAME KEY"
        )
    return name, key
