"""A signature says who made exactly these files; who is trusted is decided here."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from livinglayer.bundle import files, sign
from livinglayer.bundle.load import load, of_files
from livinglayer.errors import Conflict, Denied, Invalid, NotFound


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYER_CONFIG", str(tmp_path / "config"))
    return tmp_path / "config"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "desk"
    files.write(
        place, {"bundle.yaml": b"name: desk\nversion: 1.0.0\n", "schema.yaml": b"entities: {a: {fields: {b: text}}}\n"}
    )
    return place


def test_a_signed_bundle_names_its_key_and_keeps_its_digest(directory: Path) -> None:
    before = load(directory)
    key = sign.keygen()
    assert sign.sign(directory) == key
    found = load(directory)
    assert (found.signer, found.digest) == (key, before.digest)
    assert of_files(found.files) == found
    assert sign.sign(directory) == key  # signing anew changes nothing
    assert load(directory) == found


def test_whoever_is_trusted_has_a_name_here(directory: Path) -> None:
    key = sign.keygen()
    with pytest.raises(Denied, match="is not signed"):
        sign.verify(files.read(directory))
    sign.sign(directory)
    with pytest.raises(Denied, match="signed by a key that nobody here trusts"):
        sign.verify(files.read(directory))
    assert load(directory).signer == key  # which is no reason to refuse it: the plan says so
    sign.trust("acme", key)
    sign.trust("acme", key)
    assert (sign.verify(files.read(directory)), sign.publisher(key), sign.publishers()) == (("acme", key), "acme", {"acme": key})  # fmt: skip
    sign.distrust("acme")
    assert (sign.publishers(), sign.publisher(key)) == ({}, None)
    with pytest.raises(NotFound, match="no publisher 'acme'"):
        sign.distrust("acme")


@pytest.mark.parametrize("path", ["bundle.yaml", "schema.yaml", "README.md"])
def test_a_signature_of_other_content_is_refused(directory: Path, path: str) -> None:
    sign.keygen()
    sign.sign(directory)
    with open(directory / path, "ab") as file:
        file.write(b"# changed\n")
    with pytest.raises(Invalid, match=r"desk/signature\.yaml: signature: is not of these files"):
        load(directory)


def test_a_signature_can_not_be_taken_to_another_bundle_or_given_another_key(directory: Path, tmp_path: Path) -> None:
    mine = sign.keygen()
    sign.sign(directory)
    signed = files.read(directory)
    other = sign.keygen(tmp_path / "other.key")
    assert other != mine
    stolen = signed["signature.yaml"].replace(mine.encode(), other.encode())
    swapped = {**signed, "schema.yaml": signed["bundle.yaml"], "bundle.yaml": signed["bundle.yaml"] + b"\n"}
    for given in ({**signed, "signature.yaml": stolen}, swapped, {**signed, "docs/new": b""}):
        with pytest.raises(Invalid):
            of_files(given)


@pytest.mark.parametrize(
    "text",
    [b"", b"key: x\n", b"key: 1\nsignature: 2\n", b'key: "%s"\nsignature: "%s"\n' % (b"A" * 43 + b"=", b"A" * 86 + b"=="),
     b'key: "%s"\nsignature: "%s"\n' % (b"A" * 44, b"A" * 88), b"[]", b"!!python/object:x {}", b"key: x\nsignature: y\nmore: z\n"],
)  # fmt: skip
def test_what_is_no_signature(directory: Path, text: bytes) -> None:
    (directory / "signature.yaml").write_bytes(text)
    with pytest.raises(Invalid, match=r"desk/signature\.yaml"):
        load(directory)


def test_a_key_is_made_once_and_read_by_nobody_else(directory: Path, configuration: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no key"):
        sign.sign(directory)
    sign.keygen()
    place = configuration / "publisher.key"
    assert place.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Conflict, match="there is a key"):
        sign.keygen()
    place.chmod(0o644)
    with pytest.raises(Denied, match="can be read by others"):
        sign.sign(directory)
    place.chmod(0o600)
    place.write_text("no key")
    with pytest.raises(Invalid, match="is no Ed25519 key"):
        sign.sign(directory)
    link = tmp_path / "link.key"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Conflict):
        sign.keygen(link)
    assert not (tmp_path / "elsewhere").exists()


def test_a_key_of_openssl_signs_too(directory: Path, tmp_path: Path) -> None:
    place = tmp_path / "key.pem"
    assert os.system(f"umask 077; openssl genpkey -algorithm ed25519 -out {place} 2>/dev/null") == 0
    assert load(directory).signer is None
    key = sign.sign(directory, place)
    assert load(directory).signer == key


def test_signing_does_not_follow_a_link_and_signs_no_broken_bundle(directory: Path, tmp_path: Path) -> None:
    sign.keygen()
    (tmp_path / "victim").write_text("mine")
    (directory / "signature.yaml").symlink_to(tmp_path / "victim")
    with pytest.raises(Invalid, match="is a symbolic link"):
        sign.sign(directory)
    assert (tmp_path / "victim").read_text() == "mine"
    (directory / "signature.yaml").unlink()
    (directory / "schema.yaml").write_text("entities: {permission: {fields: {a: text}}}")
    with pytest.raises(Invalid, match="a name of the system's own"):
        sign.sign(directory)
    assert not (directory / "signature.yaml").exists()


@pytest.mark.parametrize(
    ("name", "key"),
    [("../x", "A" * 43 + "="), ("", "A" * 43 + "="), ("a/b", "A" * 43 + "="), ("ok", "x"), ("ok", base64.b64encode(b"short").decode()), ("ok", "ü" * 44)],
)  # fmt: skip
def test_who_can_not_be_trusted(name: str, key: str, configuration: Path) -> None:
    with pytest.raises(Invalid):
        sign.trust(name, key)
    assert sign.publishers() == {}


def test_a_publisher_does_not_change_its_key_unnoticed() -> None:
    a, b = base64.b64encode(bytes(32)).decode(), base64.b64encode(bytes([1] * 32)).decode()
    sign.trust("acme", a)
    with pytest.raises(Conflict, match="has another key here"):
        sign.trust("acme", b)
    assert sign.publishers() == {"acme": a}
