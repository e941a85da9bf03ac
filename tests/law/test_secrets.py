"""Secrets: they reach the boxes they are for and nothing else; a sealed value opens in its own place only."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import re
import secrets as randomness
import stat
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cluster import Cluster
from sandbox.hosts import Host, wait_until

import livinglayer
from livinglayer import Layer
from livinglayer.edges.cli.main import main
from livinglayer.errors import Conflict, Corrupt, Denied, Invalid, LayerError, NotFound, Unavailable
from livinglayer.law import secrets
from livinglayer.sandbox import Sandbox
from livinglayer.substrate.schema import OWNER

VALUE = "sk-live-0123456789"


@pytest.fixture(autouse=True)
def own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration directory of the test's own, made before its layer."""
    monkeypatch.setenv("LAYER_CONFIG", str(tmp_path / "config"))
    return tmp_path / "config"


@pytest.fixture
def vault(own_keys: Path, layer: Layer) -> Layer:
    """A layer with a secret, and with ann, who may use it."""
    secrets.set(layer, "stripe", VALUE, description="payments")
    layer.principal("ann")
    layer.grant("ann", "use", "secret:stripe")
    return layer


@contextlib.contextmanager
def execution(layer: Layer, principal: str | None = None, branch: str | None = None) -> Iterator[Any]:
    with layer.execution({"branch": branch}, principal) as scoped:
        yield scoped.execution


def value(layer: Layer, name: str = "stripe", branch: str = "main", as_of: int | None = None) -> str:
    with execution(layer) as run:
        return secrets.open_for(layer, [name], run, branch=branch, as_of=as_of)[name]


def sealed(layer: Layer, name: str = "stripe", branch: str = "main") -> str:
    [row] = layer.query("select sealed from secret where name = :name", {"name": name}, branch=branch)
    return str(row["sealed"])


def plant(layer: Layer, row: int, text: str, branch: str = "main", **more: Any) -> None:
    """Write a row as only someone who holds the database could."""
    with layer.in_tx(None, branch, "tampered") as tx:
        tx.record(secrets.SECRET, {"sealed": text, **more}, row)


def last(layer: Layer) -> int:
    return int(layer.query("select max(tx) as n from tx")[0]["n"])


# -- setting ----------------------------------------------------------------------------------------------------------


def test_a_secret_is_set_used_changed_and_removed(vault: Layer) -> None:
    assert value(vault) == VALUE
    before, first = last(vault), sealed(vault)
    row = secrets.set(vault, "stripe", "sk-live-another", reason="the old one leaked")
    assert last(vault) == before + 1 and value(vault) == "sk-live-another"
    assert vault.query("select id, name, description from secret") == [
        {"id": row, "name": "stripe", "description": "payments"}
    ]
    assert first.split(".")[2:] != sealed(vault).split(".")[2:]  # another data key, not only another value
    assert value(vault, as_of=before) == VALUE
    secrets.remove(vault, "stripe")
    with pytest.raises(NotFound, match="no secret 'stripe'"):
        value(vault)
    with pytest.raises(NotFound, match="no secret 'stripe'"):
        secrets.remove(vault, "stripe")


def test_what_is_told_of_secrets(vault: Layer) -> None:
    [told] = secrets.describe(vault)
    assert {**told, "set": None} == {
        "name": "stripe",
        "description": "payments",
        "set": None,
        "by": "owner",
        "used": None,
    }
    at = vault.query("select at from tx where reason = 'set secret stripe'")[0]["at"]
    assert told["set"] == at
    with vault.execution() as scoped, vault.ledger.work() as work:
        tx = work.tx(scoped.execution)
        tx.finish()
        tx = work.tx(scoped.execution)
        tx.fact(
            "ledger_step",
            scoped.execution.id,
            1,
            "secret",
            '{"name":"stripe","use":"injected"}',
            "2030-01-02T03:04:05.000000Z",
        )
        tx.finish()
    secrets.rotate_key(vault)
    [after] = secrets.describe(vault)
    assert (after["set"], after["by"]) == (at, "owner")  # the key changed, the value did not
    assert after["used"].isoformat() == "2030-01-02T03:04:05+00:00"
    with pytest.raises(NotFound):
        secrets.describe(vault, principal="ann")
    vault.grant("ann", "read", "secret", fields=["name", "description"])
    assert secrets.describe(vault, principal="ann") == [
        {"name": "stripe", "description": "payments", "set": None, "by": None, "used": None}
    ]


@pytest.mark.parametrize("name", ["", "a b", "1a", "a-b", "a" * 101, "x=1", "../x", None, 7])
def test_a_name_is_one_a_variable_can_have(layer: Layer, name: Any) -> None:
    with pytest.raises(Invalid, match="name of a secret"):
        secrets.set(layer, name, VALUE)


@pytest.mark.parametrize("bad", ["abc", "x" * 16385, "é" * 9000, "half \udcff", b"bytes-value", None, 12345])
def test_a_value_that_can_not_be_used_is_refused_without_being_shown(layer: Layer, bad: Any) -> None:
    with pytest.raises(Invalid, match="value of secret 'key'") as caught:
        secrets.set(layer, "key", bad)
    assert bad is None or str(bad) not in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.__context__ is None
    assert layer.query("select id from secret") == []


def test_only_the_verbs_write_secrets(vault: Layer) -> None:
    [row] = vault.query("select id from secret")
    for write in (
        lambda: vault.insert("secret", {"name": "other", "sealed": "in clear"}),
        lambda: vault.update("secret", row["id"], {"sealed": "in clear"}),
        lambda: vault.upsert("secret", {"name": "stripe", "sealed": "in clear"}, on=["name"]),
        lambda: vault.delete("secret", row["id"]),
    ):
        with pytest.raises(Denied, match="verbs of its own"):
            write()
    assert value(vault) == VALUE


def test_setting_needs_the_right_to_write_that_secret(vault: Layer) -> None:
    for act in (
        lambda: secrets.set(vault, "stripe", "sk-of-ann", principal="ann"),
        lambda: secrets.set(vault, "another", "sk-of-ann", principal="ann"),
        lambda: secrets.remove(vault, "stripe", principal="ann"),
    ):
        with pytest.raises((Denied, NotFound)):
            act()
    refused = []
    for act in (secrets.set, lambda *a, **k: secrets.remove(a[0], a[1], **k)):  # type: ignore[misc]
        for name in ("stripe", "absent"):
            with pytest.raises((Denied, NotFound)) as caught:
                act(vault, name, "sk-of-ann", principal="ann")
            refused.append((type(caught.value), caught.value.message.replace(name, "NAME")))
    assert refused[0] == refused[1] and refused[2] == refused[3], "it is not told whether there is one"
    vault.grant("ann", "write", "secret", where="name = 'hers'")
    secrets.set(vault, "hers", "sk-of-old", principal="ann")
    secrets.set(vault, "hers", "sk-of-ann", principal="ann")
    with pytest.raises((Denied, NotFound)):
        secrets.set(vault, "stripe", "sk-of-ann", principal="ann")
    assert value(vault) == VALUE and value(vault, "hers") == "sk-of-ann"


# -- using ------------------------------------------------------------------------------------------------------------


def test_who_may_not_use_a_secret_is_not_told_whether_it_exists(vault: Layer) -> None:
    vault.principal("ben")
    with execution(vault, "ben") as run:
        messages = []
        for name in ("stripe", "absent"):
            with pytest.raises(Denied, match="no permission allows it") as caught:
                secrets.open_for(vault, [name], run)
            messages.append(caught.value.message.replace(name, "NAME"))
        assert messages[0] == messages[1]
    with execution(vault, "ann") as run:
        opened = secrets.open_for(vault, ["stripe"], run)
        assert opened == {"stripe": VALUE} and opened.steps == [{"kind": "secret", "name": "stripe", "use": "injected"}]
        with pytest.raises(Denied):
            secrets.open_for(vault, ["stripe", "absent"], run)
    assert vault.can("ann", "use", "secret:stripe") and not vault.can("ben", "use", "secret:stripe")


def test_a_deny_wins_and_a_condition_allows_nothing(vault: Layer) -> None:
    vault.principal("ben")
    vault.grant("ben", "*", "*", where="id = 1")
    denied = vault.grant("ann", "use", "secret:stripe", effect="deny")
    for who, why in (("ben", "no permission"), ("ann", f"permission {denied} denies")):
        with execution(vault, who) as run, pytest.raises(Denied, match=why):
            secrets.open_for(vault, ["stripe"], run)
    vault.revoke(denied)
    with execution(vault, "ann") as run:
        assert secrets.open_for(vault, ["stripe"], run)["stripe"] == VALUE


def test_a_secret_is_opened_for_an_open_execution_only(vault: Layer) -> None:
    with execution(vault) as run:
        pass
    for forged in (run, None, object()):
        with pytest.raises(Denied, match="open execution"):
            secrets.open_for(vault, ["stripe"], forged)  # type: ignore[arg-type]
        with pytest.raises(Denied, match="open execution"):
            secrets.readable(vault, "stripe", forged, ["stripe"])  # type: ignore[arg-type]


def test_code_reads_what_its_blueprint_says_is_readable(vault: Layer) -> None:
    with execution(vault, "ann") as run:
        for names in ((), ["other"]):
            with pytest.raises(Denied, match="not readable here"):
                secrets.readable(vault, "stripe", run, names)
        opened = secrets.readable(vault, "stripe", run, ["stripe"])
        assert opened == {"stripe": VALUE} and opened.steps == [{"kind": "secret", "name": "stripe", "use": "read"}]
    vault.principal("ben")
    with execution(vault, "ben") as run, pytest.raises(Denied, match="no permission"):
        secrets.readable(vault, "stripe", run, ["stripe"])


def test_who_decides_can_be_another_than_who_runs(vault: Layer) -> None:
    vault.principal("ben")
    people = {row["name"]: row["id"] for row in vault.query("select id, name from principal")}
    with execution(vault, "ben") as run:
        assert secrets.open_for(vault, ["stripe"], run, principal=people["ann"]) == {"stripe": VALUE}
        assert secrets.readable(vault, "stripe", run, ["stripe"], principal=people["ann"]) == {"stripe": VALUE}
    with execution(vault) as run, pytest.raises(Denied, match="ben may not use"):
        secrets.open_for(vault, ["stripe"], run, principal=people["ben"])


def test_what_is_kept_of_output_has_no_value() -> None:
    said = f"key={VALUE} {base64.b64encode(VALUE.encode()).decode()}".encode()
    assert secrets.hide({"stripe": VALUE}, said) == b"key=LAYER_SECRET_stripe LAYER_SECRET_stripe"
    assert secrets.hide({}, said) == said


def test_opened_values_are_not_shown_or_stored() -> None:
    opened = secrets.Opened({"stripe": VALUE}, ())
    assert VALUE not in f"{opened!r} {opened} {[opened]} { ({'a': opened}) }"
    with pytest.raises(TypeError):
        pickle.dumps(opened)


# -- attacks on what is stored ----------------------------------------------------------------------------------------


def test_a_sealed_value_opens_under_its_name_in_its_row_and_layer_only(
    vault: Layer, make_layer: Callable[[], Layer], own_keys: Path
) -> None:
    secrets.set(vault, "other", "sk-other-1234")
    ids = {row["name"]: row["id"] for row in vault.query("select id, name from secret")}
    stripe, other = sealed(vault), sealed(vault, "other")
    plant(vault, ids["stripe"], other)
    plant(vault, ids["other"], stripe)
    for name in ids:  # swapped between rows
        with pytest.raises(Corrupt, match=f"secret '{name}' does not open"):
            value(vault, name)
    plant(vault, ids["other"], other, name="renamed")
    with pytest.raises(Corrupt):  # the same row under another name
        value(vault, "renamed")
    plant(vault, ids["stripe"], stripe)
    assert value(vault) == VALUE
    head, key, wrapped, body = stripe.split(".")
    secrets.set(vault, "stripe", "sk-live-newer")
    _, _, wrapped_2, body_2 = sealed(vault).split(".")
    for mixed in ((wrapped, body_2), (wrapped_2, body)):  # halves of two versions
        plant(vault, ids["stripe"], ".".join((head, key, *mixed)))
        with pytest.raises(Corrupt):
            value(vault)

    # Another layer with the very same key, name and row.
    second = make_layer()
    ring = json.loads((own_keys / "keys" / vault.id).read_text())
    path = own_keys / "keys" / second.id
    path.write_text(json.dumps(ring | {"layer": second.id}))
    path.chmod(0o600)
    secrets.set(second, "stripe", "sk-of-the-second")
    [row] = second.query("select id from secret")
    stolen = secrets.seal(secrets.load(vault.id), "stripe", row["id"], VALUE)
    assert secrets.unseal(secrets.load(vault.id), "stripe", row["id"], stolen) == VALUE
    plant(second, row["id"], stolen)
    with pytest.raises(Corrupt):
        value(second)


def test_every_changed_or_missing_character_is_noticed(own_keys: Path) -> None:
    path = secrets.key_file("abcdef")
    with secrets._writing(path):
        ring = secrets._with_new_key(path, "abcdef", None)
    text = secrets.seal(ring, "stripe", 7, VALUE)
    assert secrets.unseal(ring, "stripe", 7, text) == VALUE
    wrong = [text[:at] for at in range(len(text))]
    for at, letter in enumerate(text):
        wrong += [text[:at] + other + text[at + 1 :] for other in "Aa0.-=é" if other != letter]
    wrong += [text + more for more in ("A", "=", ".", "\n", " ")] + ["", "1...", "2" + text[1:], "in clear", "....."]
    for one in wrong:
        with pytest.raises((Corrupt, Unavailable)) as caught:
            secrets.unseal(ring, "stripe", 7, one)
        assert VALUE not in str(caught.value) and caught.value.__cause__ is None
    for name, row in (("Stripe", 7), ("stripe", 8), ("stripe7", 7)):
        with pytest.raises(Corrupt):
            secrets.unseal(ring, name, row, text)


def test_two_equal_values_look_different(vault: Layer) -> None:
    secrets.set(vault, "same", VALUE)
    mine, other = sealed(vault).split("."), sealed(vault, "same").split(".")
    assert mine[:2] == other[:2] and mine[2] != other[2] and mine[3] != other[3]
    assert len(secrets.seal(secrets.load(vault.id), "a", 1, "x" * 100)) > len(VALUE)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_the_key_is_made_at_the_first_use_for_its_owner_alone(layer: Layer, own_keys: Path) -> None:
    path = own_keys / "keys" / layer.id
    assert not path.exists()
    before = os.umask(0)
    try:
        secrets.set(layer, "stripe", VALUE)
        secrets.rotate_key(layer)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o666, 0o777])
def test_a_key_that_others_can_reach_is_not_used(vault: Layer, own_keys: Path, mode: int) -> None:
    path = own_keys / "keys" / vault.id
    path.chmod(mode)
    for act in (
        lambda: value(vault),
        lambda: secrets.set(vault, "stripe", "sk-new"),
        lambda: secrets.rotate_key(vault),
    ):
        with pytest.raises(Unavailable, match=re.escape(str(path))) as caught:
            act()
        assert f"{mode:04o}" in caught.value.message and "chmod 600" in str(caught.value.hint)
    path.chmod(0o600)
    path.parent.chmod(0o755)
    with pytest.raises(Unavailable, match=f"{re.escape(str(path.parent))} is open to others"):
        value(vault)
    path.parent.chmod(0o700)
    assert value(vault) == VALUE


def test_a_missing_key_is_named_and_never_replaced_by_another(vault: Layer, own_keys: Path) -> None:
    path = own_keys / "keys" / vault.id
    kept = path.rename(path.with_name("kept"))
    for act in (
        lambda: value(vault),
        lambda: secrets.set(vault, "second", "sk-second"),
        lambda: secrets.rotate_key(vault),
        lambda: secrets.keys(vault),
    ):
        with pytest.raises(Unavailable, match=f"there is no {re.escape(str(path))}") as caught:
            act()
        assert "LAYER_KEY_FILE" in str(caught.value.hint)
    assert not path.exists() and vault.query("select name from secret") == [{"name": "stripe"}]
    secrets.remove(vault, "stripe")  # who has lost the key can begin anew
    secrets.set(vault, "stripe", "sk-begun-anew")
    assert path.exists() and value(vault) == "sk-begun-anew" and kept.exists()


def test_a_wrong_damaged_or_foreign_key_file_is_told_apart(
    vault: Layer, make_layer: Callable[[], Layer], own_keys: Path
) -> None:
    path = own_keys / "keys" / vault.id
    good = path.read_text()
    ring = json.loads(good)
    number = ring["current"]

    def with_file(text: str) -> None:
        path.write_text(text)

    second = make_layer()
    secrets.set(second, "stripe", "sk-second")
    other = json.loads((own_keys / "keys" / second.id).read_text())
    with_file(json.dumps(other))
    with pytest.raises(Unavailable, match=f"holds the keys of layer {second.id}"):
        value(vault)
    with_file(json.dumps(other | {"layer": vault.id}))
    with pytest.raises(Unavailable, match=f"sealed with key {number}"):
        value(vault)
    swapped = {number: next(iter(other["keys"].values()))}
    for text in (
        "",
        "{}",
        good[:-20],
        json.dumps(ring | {"keys": swapped}),
        json.dumps(ring | {"current": "nobody"}),
        "[]",
    ):
        with_file(text)
        with pytest.raises(Corrupt, match="no whole ring") as caught:
            value(vault)
        assert ring["keys"][number]["key"] not in str(caught.value)
    with_file(good)
    assert value(vault) == VALUE
    path.unlink()
    path.symlink_to(own_keys / "keys" / second.id)
    with pytest.raises(Unavailable, match="can't be read"):
        value(vault)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(Unavailable, match="no file of yours"):
        value(vault)


def test_the_key_file_can_lie_elsewhere(
    layer: Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_keys: Path
) -> None:
    elsewhere = tmp_path / "run" / "key"
    monkeypatch.setenv("LAYER_KEY_FILE", str(elsewhere))
    with pytest.raises(Unavailable, match=re.escape(str(elsewhere.parent))):
        secrets.set(layer, "stripe", VALUE)
    assert layer.query("select id from secret") == []
    elsewhere.parent.mkdir()
    secrets.set(layer, "stripe", VALUE)
    assert value(layer) == VALUE and stat.S_IMODE(elsewhere.stat().st_mode) == 0o600
    assert not (own_keys / "keys").exists()
    elsewhere.chmod(0o644)
    with pytest.raises(Unavailable, match="can be read by others"):
        value(layer)


def test_first_uses_at_once_make_one_key(location: str, layer: Layer) -> None:
    errors: list[BaseException] = []

    def act(number: int) -> None:
        try:
            with livinglayer.open(location) as own:
                secrets.set(own, f"key_{number}", f"value-{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=act, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(secrets.keys(layer)) == 1
    assert [value(layer, f"key_{number}") for number in range(6)] == [f"value-{number}" for number in range(6)]


def test_a_rotated_key_seals_main_and_branches_and_the_old_one_opens_history(vault: Layer) -> None:
    secrets.set(vault, "other", "sk-other-1234")
    vault.fork("idea")
    secrets.set(vault, "stripe", "sk-of-idea", branch="idea")
    vault.fork("deeper", "idea")
    vault.fork("gone")
    secrets.set(vault, "stripe", "sk-of-gone", branch="gone")
    vault.discard("gone")
    secrets.set(vault, "other", "sk-newer-1234")
    then, [old] = last(vault), [one["key"] for one in secrets.keys(vault)]
    bodies = {
        (b, n): sealed(vault, n, b).split(".")[3] for b in ("main", "idea", "deeper") for n in ("stripe", "other")
    }
    done = secrets.rotate_key(vault, reason="yearly")
    assert done["rewrapped"] == {"main": 2, "idea": 2, "deeper": 2} and done["key"] != old
    assert [(one["key"], one["current"]) for one in secrets.keys(vault)] == [(old, False), (done["key"], True)]
    for (branch, name), body in bodies.items():
        _, key, _, now = sealed(vault, name, branch).split(".")
        assert (key, now) == (done["key"], body)
    expected = {"main": (VALUE, "sk-newer-1234"), "idea": ("sk-of-idea", "sk-other-1234")}
    for branch, values in {**expected, "deeper": expected["idea"]}.items():
        assert (value(vault, "stripe", branch), value(vault, "other", branch)) == values
    assert value(vault, as_of=then) == VALUE
    assert vault.verify().ok

    with pytest.raises(Conflict, match="the one that seals"):
        secrets.forget_key(vault, done["key"])
    with pytest.raises(NotFound):
        secrets.forget_key(vault, "000000000000")
    lost = secrets.forget_key(vault, old)
    assert lost["unreadable"] >= 4 and [one["key"] for one in secrets.keys(vault)] == [done["key"]]
    with pytest.raises(Unavailable, match=f"sealed with key {old}"):
        value(vault, as_of=then)
    assert value(vault) == VALUE and value(vault, branch="deeper") == "sk-of-idea" and vault.verify().ok
    assert vault.query("select reason from tx order by tx desc limit 1") == [{"reason": f"forget key {old} of secrets"}]


def test_a_key_that_still_seals_something_is_not_forgotten(vault: Layer) -> None:
    vault.fork("idea")
    [row] = vault.query("select id from secret")
    secrets.set(vault, "stripe", "sk-of-idea", branch="idea")
    before = sealed(vault, branch="idea")
    old = before.split(".")[1]
    secrets.rotate_key(vault)
    plant(vault, row["id"], before, "idea")
    with pytest.raises(Conflict, match="'stripe' on branch 'idea' is still sealed"):
        secrets.forget_key(vault, old)
    secrets.rotate_key(vault)
    secrets.forget_key(vault, old)
    assert value(vault, branch="idea") == "sk-of-idea"


def test_a_rotation_that_can_not_open_everything_changes_nothing(vault: Layer) -> None:
    secrets.set(vault, "broken", "sk-broken-1")
    vault.fork("idea")
    rows = {row["name"]: row["id"] for row in vault.query("select id, name from secret")}
    plant(vault, rows["broken"], sealed(vault), "idea")
    before, stored = last(vault), sealed(vault)
    with pytest.raises(Corrupt, match="on branch 'idea': secret 'broken' does not open"):
        secrets.rotate_key(vault)
    assert last(vault) == before and sealed(vault) == stored and value(vault) == VALUE
    secrets.remove(vault, "broken", branch="idea")
    assert secrets.rotate_key(vault)["rewrapped"] == {"main": 2, "idea": 1}
    assert value(vault) == VALUE and value(vault, "broken") == "sk-broken-1"


def test_only_an_owner_handles_keys(vault: Layer, location: str) -> None:
    vault.grant("ann", "write", "secret")
    for act in (
        lambda: secrets.rotate_key(vault, principal="ann"),
        lambda: secrets.forget_key(vault, "000000000000", principal="ann"),
    ):
        with pytest.raises(Denied, match="only an owner"):
            act()
    with livinglayer.open(location, token=vault.token("ann")) as hers, pytest.raises(Denied):
        secrets.keys(hers)
    assert len(secrets.keys(vault)) == 1


# -- branches, copies -------------------------------------------------------------------------------------------------


def test_a_branchs_sealed_value_is_merged_back_and_opens(vault: Layer) -> None:
    vault.fork("idea")
    secrets.set(vault, "stripe", "sk-of-idea", branch="idea")
    secrets.set(vault, "fresh", "sk-fresh-1", branch="idea")
    assert value(vault) == VALUE and value(vault, branch="idea") == "sk-of-idea"
    assert VALUE not in repr(vault.diff("idea")) and "sk-of-idea" not in repr(vault.diff("idea"))
    assert vault.merge("idea")
    assert value(vault) == "sk-of-idea" and value(vault, "fresh") == "sk-fresh-1"


@pytest.mark.parametrize("changed", ["branch", "main", "neither", "removed on branch", "removed on main"])
def test_a_rotation_between_fork_and_merge_is_no_conflict(vault: Layer, changed: str) -> None:
    vault.fork("idea")
    for branch in ("main", "idea"):
        if changed == ("main" if branch == "main" else "branch"):
            secrets.set(vault, "stripe", "sk-changed", branch=branch)
        elif changed == f"removed on {'main' if branch == 'main' else 'branch'}":
            secrets.remove(vault, "stripe", branch=branch)
    secrets.rotate_key(vault)
    merged = vault.merge("idea")
    assert merged and merged.conflicts == []
    if changed.startswith("removed"):
        assert vault.query("select id from secret") == []
    else:
        assert value(vault) == (VALUE if changed == "neither" else "sk-changed")


def test_a_conflict_of_two_values_shows_neither_and_takes_none_in_clear(vault: Layer) -> None:
    vault.fork("idea")
    secrets.set(vault, "stripe", "sk-of-idea", branch="idea")
    secrets.set(vault, "stripe", "sk-of-main")
    merged = vault.merge("idea")
    [conflict] = merged.conflicts
    assert conflict["field"] == "sealed"
    shown = repr((conflict, vault.conflicts(), vault.query("select * from conflict")))
    assert not [one for one in (VALUE, "sk-of-idea", "sk-of-main") if one in shown]
    with pytest.raises(Denied, match="set, not resolved"):
        vault.resolve(conflict["id"], "sk-typed-here")
    vault.resolve(conflict["id"], take="ours")
    assert vault.merge("idea") and value(vault) == "sk-of-idea"


def test_a_restored_backup_opens_with_the_key_file_and_not_without(
    vault: Layer, make_location: Callable[[], str], tmp_path: Path, own_keys: Path
) -> None:
    vault.backup(tmp_path / "copy")
    with livinglayer.restore(tmp_path / "copy", make_location()) as restored:
        assert value(restored) == VALUE
        (own_keys / "keys" / restored.id).unlink()
        with pytest.raises(Unavailable, match="keys of this layer's secrets are not here"):
            value(restored)


# -- boxes ------------------------------------------------------------------------------------------------------------


def test_a_blueprints_secrets_become_rules() -> None:
    listed = secrets.wanted(
        [{"name": "stripe", "hosts": ["API.test", "*.pay.test"]}, "plain", {"name": "seen", "readable": True}]
    )
    assert [(one.name, one.readable) for one in listed] == [("stripe", False), ("plain", False), ("seen", True)]
    assert secrets.bind(["pypi.test", {"host": "x.test", "secrets": ["plain"]}], listed) == [
        "pypi.test",
        {"host": "x.test", "secrets": ["plain"]},
        {"host": "api.test", "protocol": "https", "secrets": ["stripe"]},
        {"host": "*.pay.test", "protocol": "https", "secrets": ["stripe"]},
    ]
    one = secrets.wanted([{"name": "stripe", "hosts": ["api.test"]}])
    assert secrets.bind(["https://api.test/v1/*", {"host": "api.test", "method": "GET", "bytes": "1M"}], one) == [
        {"protocol": "https", "host": "api.test", "path": "/v1/*", "secrets": ["stripe"]},
        {"host": "api.test", "method": "GET", "bytes": "1M", "secrets": ["stripe"], "protocol": "https"},
        {"host": "api.test", "method": "GET", "bytes": "1M"},  # in clear, without the secret
    ]
    assert secrets.bind([{"host": "api.test", "protocol": "http"}], one) == [
        {"host": "api.test", "protocol": "http", "secrets": ["stripe"]}
    ]
    denied = {"host": "*", "action": "deny"}
    assert secrets.bind([denied], one)[0] == denied  # a deny goes on deciding first
    assert secrets.bind([{"host": "api.test", "secrets": ["stripe"]}], one) == [
        {"host": "api.test", "secrets": ["stripe"]}
    ]
    assert secrets.bind([{"host": "api.test", "tls": "pass"}], one)[-1]["protocol"] == "https"


@pytest.mark.parametrize(
    ("egress", "given"),
    [
        ([], "stripe"),
        ([], {"name": "stripe"}),
        ([], [7]),
        ([], [{"hosts": ["api.test"]}]),
        ([], [{"name": "a-b"}]),
        ([], ["twice", "twice"]),
        ([], [{"name": "stripe", "hosts": "api.test"}]),
        ([], [{"name": "stripe", "hosts": ["not a host"]}]),
        ([], [{"name": "stripe", "readable": "yes"}]),
        ([], [{"name": "stripe", "value": "sk"}]),
        ([{"host": "api.test", "secrets": ["unlisted"]}], ["stripe"]),
        (["*"], [{"name": "stripe", "hosts": ["api.test"]}]),
        (["*.test", "api.test"], [{"name": "stripe", "hosts": ["api.test"]}]),
        (["*.test"], [{"name": "stripe", "hosts": ["*.api.test"]}]),
    ],
)
def test_a_blueprint_that_does_not_say_where_a_secret_goes_is_refused(egress: list[Any], given: Any) -> None:
    with pytest.raises(Invalid):
        secrets.bind(egress, secrets.wanted(given))


def test_what_a_box_is_made_with(vault: Layer) -> None:
    secrets.set(vault, "seen", "sk-readable")
    vault.grant("ann", "use", "secret:seen")
    ann = vault.query("select id from principal where name = 'ann'")[0]["id"]
    row = {
        "secrets": [{"name": "stripe", "hosts": ["api.test"]}, {"name": "seen", "readable": True}],
        "egress": ["pypi.test"],
    }
    opened, egress, readable = secrets.for_box(vault, row, ann)
    assert opened == {"stripe": VALUE} and readable == {"seen"}
    assert egress == ["pypi.test", {"host": "api.test", "protocol": "https", "secrets": ["stripe"]}]
    assert opened.steps == [{"kind": "secret", "name": "stripe", "use": "injected"}]
    with vault.engine.reading() as session:
        assert secrets.for_box(vault, row, ann, session)[0] == opened
    assert secrets.for_box(vault, {"secrets": None, "egress": None}, ann) == ({}, [], frozenset())
    vault.principal("ben")
    ben = vault.query("select id from principal where name = 'ben'")[0]["id"]
    for wanted in (["stripe"], [{"name": "seen", "readable": True}]):
        with pytest.raises(Denied, match="ben may not use"):
            secrets.for_box(vault, {"secrets": wanted, "egress": []}, ben)


def forms(value: str) -> list[bytes]:
    """What a value could look like on a disk."""
    plain = value.encode()
    shifted = [base64.b64encode(b"x" * pad + plain)[4 if pad else 0 : -4] for pad in range(3)]
    return [
        plain,
        plain.hex().encode(),
        plain[::-1],
        urllib.parse.quote(value).encode(),
        value.encode("utf-16-le"),
        *shifted,
    ]


def holding(marks: list[bytes], *places: Path) -> list[str]:
    """The files that hold any of these."""
    found = []
    for place in places:
        for path in [place] if place.is_file() else place.rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    data = path.read_bytes()
                    found += [str(path)] if any(mark in data for mark in marks) else []
    return found


class Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append(self.headers["authorization"])  # type: ignore[attr-defined]
        body = f"you said {self.headers['authorization']}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host()
    try:
        for name, text in made.environment().items():
            monkeypatch.setenv(name, text)
        yield made
        made.hang_up()
        made.stop()
        wait_until(lambda: not made.remains(), "nothing of the host is left")
    finally:
        made.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="boxes above tier process need root")
def test_a_box_uses_a_secret_of_the_layer_and_never_has_it(layer: Layer, host: Host) -> None:
    planted = "sk-" + randomness.token_urlsafe(24)
    secrets.set(layer, "stripe", planted)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.seen = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        rule = {"host": "api.test", "protocol": "http", "resolve": f"127.0.0.1:{server.server_port}", "private": True}
        row = layer.insert(
            "blueprint",
            {
                "name": "payer",
                "tier": "namespace",
                "egress": [rule],
                "secrets": [{"name": "stripe", "hosts": ["api.test"]}],
            },
        )
        [blueprint] = layer.query("select * from blueprint where id = :id", {"id": row})
        opened, egress, _ = secrets.for_box(layer, blueprint, OWNER)
        with Sandbox.create(tier="namespace", egress=egress, secrets=opened) as box:
            done = box.run('curl -sS http://api.test/ -H "Authorization: Bearer $stripe"')
            assert done.stdout == "you said Bearer LAYER_SECRET_stripe", done.stderr
            assert server.seen == [f"Bearer {planted}"]  # type: ignore[attr-defined]
            assert planted not in box.run("env; cat /proc/*/environ 2>/dev/null").stdout
            trace = list(box.trace())
            assert planted not in repr(trace)
            assert secrets.used(trace) == [{"kind": "secret", "name": "stripe", "host": "api.test", "use": "sent"}]
            assert holding(forms(planted), host.state / "run", host.state / "egress", host.state / "records") == []
    finally:
        server.shutdown()
        server.server_close()
    assert planted not in host.log


# -- nowhere in clear -------------------------------------------------------------------------------------------------


def test_a_value_is_found_nowhere_after_everything_was_done_with_it(
    engine: str,
    location: str,
    make_location: Callable[[], str],
    tmp_path: Path,
    own_keys: Path,
    postgres_cluster: Callable[..., Cluster],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted = ["sk-" + randomness.token_urlsafe(24) for _ in range(4)]
    canary = "canary-" + randomness.token_hex(16)
    places = [own_keys, tmp_path]
    if engine == "postgres":
        name = location.rsplit("/", 1)[1].partition("?")[0]
        with psycopg.connect(location, autocommit=True) as connection:
            connection.execute(f"alter database {name} set log_statement = 'all'")
        places.append(postgres_cluster().home)
    said: list[str] = []

    def failing(act: Callable[[], Any]) -> None:
        with pytest.raises(LayerError) as caught:
            act()
        error: BaseException | None = caught.value
        while error is not None:
            said.append(f"{error!r} {error} {getattr(error, 'hint', '')} {getattr(error, 'details', '')}")
            error = error.__cause__ or error.__context__

    layer = livinglayer.open(location, create=True)
    secrets.set(layer, "key", planted[0], description=canary)
    secrets.set(layer, "key", planted[1])
    layer.fork("idea")
    secrets.set(layer, "key", planted[2], branch="idea")
    secrets.set(layer, "key", planted[3])
    said += [
        repr(layer.diff("idea")),
        repr(layer.merge("idea", preview=True)),
        repr(layer.merge("idea")),
        repr(layer.conflicts()),
    ]
    layer.resolve(layer.conflicts()[0]["id"], take="ours")
    said.append(repr(layer.merge("idea")))
    layer.principal("ann")
    failing(lambda: secrets.set(layer, "key", planted[0], principal="ann"))
    failing(lambda: secrets.set(layer, "a b", planted[0]))
    failing(lambda: secrets.set(layer, "key", planted[0] * 1000))
    failing(lambda: secrets.set(layer, "key", planted[0], branch="nowhere"))
    failing(lambda: secrets.set(layer, "key", planted[0], description=7))  # type: ignore[arg-type]
    with layer.execution() as scoped:
        opened = secrets.open_for(layer, ["key"], scoped.execution)
        assert opened == {"key": planted[2]}
        said.append(repr((opened, opened.steps)))
        said.append(repr(secrets.readable(layer, "key", scoped.execution, ["key"])))
    said.append(repr(secrets.for_box(layer, {"secrets": [{"name": "key", "hosts": ["api.test"]}]}, OWNER)))
    secrets.rotate_key(layer)
    for name in ("secret", "secret__history", "conflict", "conflict__history", "tx", "change", "execution", "step"):
        said.append(repr(layer.query(f"select * from {name}")))
    said += [repr(secrets.describe(layer)), repr(secrets.keys(layer)), repr(secrets.load(layer.id))]
    layer.export("secret", tmp_path / "export.jsonl")
    layer.export("secret", tmp_path / "export.csv")
    [row] = layer.query("select id, sealed from secret")
    plant(layer, row["id"], row["sealed"][:-4])
    failing(lambda: value(layer, "key"))
    plant(layer, row["id"], row["sealed"])
    layer.backup(tmp_path / "backup")
    livinglayer.restore(tmp_path / "backup", make_location()).close()
    assert layer.verify().ok
    old = secrets.keys(layer)[0]["key"]
    secrets.forget_key(layer, old)
    said.append(repr([(key, text[:4]) for key, text in os.environ.items()]))
    if engine == "postgres":
        cluster = postgres_cluster()
        dump = subprocess.run([cluster.bin / "pg_dump", location], capture_output=True, check=True)
        (tmp_path / "dump.sql").write_bytes(dump.stdout)
        with psycopg.connect(location, autocommit=True) as connection:
            connection.execute("checkpoint")
    secrets.remove(layer, "key")
    assert holding([canary.encode()], *places) != []  # before the log of changes is folded in
    assert holding([mark for one in planted for mark in forms(one)], *places) == []
    layer.close()

    captured = capsys.readouterr()
    said += [caplog.text, captured.out, captured.err]
    assert [one for one in planted if one in "\n".join(said)] == []
    assert holding([mark for one in planted for mark in forms(one)], *places) == []
    # The search could fail: what is no secret is found in every kind of place.
    seen = holding([canary.encode()], *places)
    kinds = ["export.jsonl", "export.csv", "backup"] + (
        ["dump.sql", "pg_wal", "/base/", "/log"] if engine == "postgres" else ["layer.db"]
    )
    assert [kind for kind in kinds if not any(kind in path for path in seen)] == []


def test_keys_are_in_no_backup_and_no_database(vault: Layer, tmp_path: Path, own_keys: Path) -> None:
    ring = json.loads((own_keys / "keys" / vault.id).read_text())
    key = next(iter(ring["keys"].values()))["key"]
    marks = [key.encode(), base64.urlsafe_b64decode(key), base64.urlsafe_b64decode(key).hex().encode()]
    vault.backup(tmp_path / "copy")
    assert [path for path in holding(marks, tmp_path) if not path.startswith(str(own_keys))] == []
    assert VALUE not in repr(secrets.load(vault.id)) and key not in repr(secrets.load(vault.id))


def test_a_process_that_held_a_value_leaves_no_core(location: str, layer: Layer) -> None:
    code = (
        "import livinglayer, sys, resource\nfrom livinglayer.law import secrets\n"
        "layer = livinglayer.open(sys.argv[1]); secrets.set(layer, 'key', sys.stdin.read())\n"
        "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)); layer.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, location], input=VALUE, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"  # PR_GET_DUMPABLE


# -- the door ---------------------------------------------------------------------------------------------------------


def test_the_door_does_not_record_the_value(layer: Layer) -> None:
    row = layer.call("secret.set", {"name": "stripe", "value": VALUE, "description": "payments"})
    assert layer.query("select id from secret") == [{"id": row}] and value(layer) == VALUE
    for wrong in (
        {"name": "stripe", "valeu": VALUE},
        {"name": "stripe", "value": [VALUE]},
        {"name": "stripe", "value": {"nested": VALUE}},
        {"name": "stripe", "value": VALUE + "\udcff"},
        {"name": "stripe", "value": VALUE * 1000},
        {"name": "stripe", "value": VALUE, VALUE: 1},
    ):
        with pytest.raises(LayerError) as caught:
            layer.call("secret.set", wrong)
        assert VALUE not in f"{caught.value!r} {caught.value.hint}"
    layer.principal("ann")
    with pytest.raises(LayerError):
        layer.call("secret.set", {"name": "stripe", "value": VALUE}, principal="ann")
    old = secrets.keys(layer)[0]["key"]
    assert layer.call("secret.rotate_key")["rewrapped"] == {"main": 1}
    assert layer.call("secret.forget_key", {"key": old})["key"] == old
    layer.call("secret.remove", {"name": "stripe"})
    kept = [layer.query(f"select * from {name}") for name in ("execution", "tx", "step", "decision", "secret__history")]
    recorded = [call["arguments"] for call in kept[0] if call["verb"] == "secret.set"]
    assert len(recorded) == 8 and recorded[0] == {"name": "stripe", "description": "payments"}
    assert VALUE not in repr(kept)


READING = """
import layer

def look():
    value = layer.secret("stripe")
    print("it is", value)
    try:
        layer.secret("other")
    except layer.Denied:
        return len(value)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="boxes above tier process need root")
def test_a_function_reads_a_secret_and_what_it_prints_is_kept_without_it(layer: Layer, boxes: Host) -> None:
    for name in ("stripe", "other"):
        layer.call("secret.set", {"name": name, "value": VALUE})
    listed = [{"name": "stripe", "readable": True}, {"name": "other", "hosts": ["api.test"]}]
    layer.call("blueprint.define", {"name": "reader", "secrets": listed})
    layer.call("function.define", {"name": "desk.look", "code": READING, "blueprint": "reader"})
    layer.principal("ann")
    layer.grant("ann", "call", "function:desk.look")
    with pytest.raises(Denied, match="ann may not use secret:"):
        layer.call("desk.look", principal="ann")
    for name in ("stripe", "other"):
        layer.grant("ann", "use", f"secret:{name}")
    assert layer.call("desk.look", principal="ann") == len(VALUE)
    steps = layer.query("select kind, detail from step order by execution, n")
    opened = [(step["detail"]["name"], step["detail"]["use"]) for step in steps if step["kind"] == "secret"]
    assert opened == [("other", "injected"), ("stripe", "read")]
    printed = [step["detail"].get("text") for step in steps if step["kind"] == "output"]
    assert printed == ["it is LAYER_SECRET_stripe\n"]
    assert VALUE not in repr(steps) + repr(layer.query("select * from execution"))
    assert all(told["used"] is not None for told in secrets.describe(layer))


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(
    layer: Layer, location: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: object, stdin: str | None = None) -> tuple[int, str, str]:
        with open(tmp_path / "stdin", "w+") as file:
            file.write(stdin or "")
            file.seek(0)
            monkeypatch.setattr("sys.stdin", file)
            capsys.readouterr()
            code = main(["--dir", location, *map(str, words)])
        captured = capsys.readouterr()
        assert VALUE not in captured.out + captured.err
        return code, captured.out, captured.err

    code, out, _ = run("secret", "set", "stripe", "--description", "payments", "--json", stdin=VALUE + "\n")
    assert code == 0 and json.loads(out)["secret"] == "stripe" and value(layer) == VALUE
    (tmp_path / "file").write_text("two\nlines\r\n")
    assert run("secret", "set", "pem", "--from-file", tmp_path / "file")[:2] == (0, "Set secret pem\n")
    assert value(layer, "pem") == "two\nlines"
    code, _, err = run("secret", "set", "stripe", VALUE)
    assert code == 2 and "not taken from the command line" in err
    for stdin in ("", "x", "x" * 20000):
        assert run("secret", "set", "stripe", stdin=stdin)[0] == 2
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 4)
    assert run("secret", "set", "stripe", "--from-file", tmp_path / "binary")[0] == 2
    assert run("secret", "set", "stripe", "--from-file", tmp_path / "absent")[0] == 1
    assert value(layer) == VALUE
    code, out, _ = run("secret", "list", "--json")
    assert code == 0 and [(row["name"], row["description"], row["by"]) for row in json.loads(out)] == [
        ("pem", None, "owner"),
        ("stripe", "payments", "owner"),
    ]
    assert "payments" in run("secret", "list")[1]
    old = json.loads(run("secret", "keys", "--json")[1])[0]["key"]
    assert json.loads(run("secret", "rotate-key", "--json")[1])["rewrapped"] == {"main": 2}
    assert "can't be read any more" in run("secret", "forget-key", old)[1]
    assert run("secret", "remove", "pem")[0] == 0 and run("secret", "remove", "pem")[0] == 4
    assert run("secret", "list", "--as", "nobody")[0] == 4
    monkeypatch.setattr("getpass.getpass", lambda prompt: VALUE)
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    assert main(["--dir", location, "secret", "set", "typed"]) == 0 and value(layer, "typed") == VALUE
