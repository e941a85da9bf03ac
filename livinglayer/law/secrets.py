"""Secrets: people set them, boxes use them, nobody reads them back.

A row holds `1.KEY.WRAPPED.BODY`: BODY is the value under a data key of its own, WRAPPED is that data key under key KEY
of the layer's ring, a file beside no database. Both are bound to the layer, the secret's name and its row. Values are
in no repr and in no error.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import secrets as randomness
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..errors import Conflict, Corrupt, Denied, Invalid, LayerError, NotFound, Unavailable
from ..sandbox.blueprint import VARIABLE
from ..sandbox.egress import rules
from ..sandbox.egress.secrets import SHORTEST, Secrets
from ..settings import config_directory
from ..substrate.ledger import MAIN_CHAIN, Execution, Tx, Work
from ..substrate.permissions import Policy
from ..substrate.reads import clock
from ..substrate.schema import MAIN, SYSTEM
from ..substrate.views import history_sql
from .blueprints import definer_of

SECRET = SYSTEM.by_name["secret"]
SECRET_ARGUMENTS: Mapping[str, tuple[str, ...]] = {"secret.set": ("value",)}  # recorded nowhere, hashed nowhere
LONGEST = 16384  # bytes of a value
FORM = "1"
NONCE = 12
_PR_SET_DUMPABLE = 4


class Opened(dict[str, str]):
    """Values by name, and the steps that say they were opened. Shows names only, and is not stored."""

    def __init__(self, values: Mapping[str, str], steps: Iterable[dict[str, Any]]) -> None:
        super().__init__(values)
        self.steps = list(steps)

    def __repr__(self) -> str:
        return f"Opened({', '.join(sorted(self))})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("values of secrets are not stored")


# The ring: keys outside the database


@dataclass(frozen=True)
class Ring:
    """The keys of one layer: the one that seals, and those before it, which open what they sealed."""

    path: Path
    layer: str
    current: str
    keys: Mapping[str, bytes] = field(repr=False)
    made: Mapping[str, str]

    def key(self, number: str) -> AESGCM:
        if number not in self.keys:
            raise Unavailable(
                f"a secret is sealed with key {number}, which {self.path} does not have",
                hint="it was forgotten, or this is another machine's file: put the right one there, or set the secret anew",
            )
        return AESGCM(self.keys[number])


class _Missing(Unavailable):
    """There is no file of keys."""


def key_file(layer_id: str) -> Path:
    """Where a layer's keys lie: LAYER_KEY_FILE, else keys/ID in the configuration directory."""
    if given := os.environ.get("LAYER_KEY_FILE"):
        return Path(given).resolve()
    return config_directory() / "keys" / layer_id


def load(layer_id: str) -> Ring:
    """The keys of a layer; Unavailable names the file when it is not there or others can read it."""
    path = key_file(layer_id)
    mine = {os.geteuid(), 0}
    if not os.environ.get("LAYER_KEY_FILE"):
        _guarded_directory(path.parent)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _Missing(
            f"the keys of this layer's secrets are not here: there is no {path}",
            hint="bring that file from where the secrets were set, or name it in LAYER_KEY_FILE",
        ) from None
    except OSError as error:
        raise Unavailable(f"the keys of this layer's secrets, {path}, can't be read: {error.strerror}") from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or (status.st_uid not in mine and os.geteuid() != 0):
            raise Unavailable(f"{path} is no file of yours, so no keys are read from it")
        if status.st_mode & 0o077:
            raise Unavailable(
                f"{path} can be read by others (mode {status.st_mode & 0o777:04o}), so its keys are not used",
                hint=f"chmod 600 {path}; then layer secret rotate-key, and set anew what may have been seen",
            )
        data = file.read(1 << 20)
    return _ring(path, layer_id, data)


def _ring(path: Path, layer_id: str, data: bytes) -> Ring:
    try:
        said = json.loads(data)
        keys = {str(name): _bytes(one["key"]) for name, one in said["keys"].items()}
        made = {str(name): str(one["made"]) for name, one in said["keys"].items()}
        layer, current = said["layer"], said["current"]
        whole = current in keys and all(name == _name_of(key) for name, key in keys.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        whole, layer = False, layer_id
    if layer != layer_id:
        raise Unavailable(
            f"{path} holds the keys of layer {layer}, not of {layer_id}",
            hint="LAYER_KEY_FILE names the file of one layer",
        )
    if not whole:
        raise Corrupt(f"{path} holds no whole ring of keys", hint="bring it back from a copy")
    return Ring(path, layer_id, current, keys, made)


def _guarded_directory(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        if status.st_mode & 0o077:
            raise Unavailable(
                f"{path} is open to others (mode {status.st_mode & 0o777:04o}), so keys are not kept there",
                hint=f"chmod 700 {path}",
            )


def _name_of(key: bytes) -> str:
    if len(key) != 32:
        raise ValueError
    return hashlib.sha256(b"livinglayer key of secrets\0" + key).hexdigest()[:12]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Nobody else changes the ring meanwhile."""
    try:
        if not os.environ.get("LAYER_KEY_FILE"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"keys can't be kept in {path.parent}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
        os.fsync(fd)
    finally:
        os.close(fd)


def _store(ring: Ring) -> None:
    kept = {name: {"key": _text(ring.keys[name]), "made": made} for name, made in ring.made.items()}
    text = json.dumps({"layer": ring.layer, "current": ring.current, "keys": kept}, indent=1) + "\n"
    fresh = ring.path.with_name(f".{ring.path.name}.{randomness.token_hex(4)}")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(fd)
            os.replace(fresh, ring.path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Unavailable(f"the keys of secrets can't be written to {ring.path}: {error.strerror}") from None


def _with_new_key(path: Path, layer_id: str, ring: Ring | None) -> Ring:
    key = AESGCM.generate_key(256)
    name = _name_of(key)
    keys, made = (dict(ring.keys), dict(ring.made)) if ring is not None else ({}, {})
    keys[name], made[name] = key, datetime.now(UTC).isoformat(timespec="seconds")
    fresh = Ring(path, layer_id, name, keys, made)
    _store(fresh)
    return fresh


def _ring_to_seal(tx: Tx, layer_id: str) -> Ring:
    """The ring, made at the first use; a layer whose secrets another ring opens gets no second one."""
    try:
        return load(layer_id)
    except _Missing:
        if any(rows for _, rows in _standing(tx.work)):
            raise
    path = key_file(layer_id)
    with _writing(path):
        try:
            return load(layer_id)
        except _Missing:
            return _with_new_key(path, layer_id, None)


# Sealing


def _bound(*parts: object) -> bytes:
    return json.dumps(["livinglayer secret", FORM, *parts]).encode()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def _bytes(text: str) -> bytes:
    """What `_text` made the text of; ValueError for any other spelling of it."""
    data = base64.b64decode(text, altchars=b"-_", validate=True)
    if _text(data) != text:
        raise ValueError
    return data


def _encrypt(key: AESGCM, data: bytes, bound: bytes) -> str:
    nonce = os.urandom(NONCE)
    return _text(nonce + key.encrypt(nonce, data, bound))


def _decrypt(key: AESGCM, text: str, bound: bytes) -> bytes:
    data = _bytes(text)
    return key.decrypt(data[:NONCE], data[NONCE:], bound)


def seal(ring: Ring, name: str, row: int, value: str) -> str:
    """A value as the row of this name keeps it: under a data key of its own, which nothing else is ever sealed with."""
    data_key = AESGCM.generate_key(256)
    body = _encrypt(AESGCM(data_key), value.encode(), _bound(ring.layer, name, row))
    return f"{FORM}.{ring.current}.{_wrap(ring, name, row, data_key)}.{body}"


def unseal(ring: Ring, name: str, row: int, sealed: str) -> str:
    """The value; Corrupt when it was changed, or sealed for another layer, name or row."""
    with _damage(name):
        _, _, _, body = parts = _parts(sealed)
        return _decrypt(AESGCM(_data_key(ring, name, row, parts)), body, _bound(ring.layer, name, row)).decode()


def rewrap(ring: Ring, name: str, row: int, sealed: str) -> str:
    """The same value, its data key under the ring's current key."""
    unseal(ring, name, row, sealed)
    with _damage(name):
        parts = _parts(sealed)
        return f"{FORM}.{ring.current}.{_wrap(ring, name, row, _data_key(ring, name, row, parts))}.{parts[3]}"


def _wrap(ring: Ring, name: str, row: int, data_key: bytes) -> str:
    return _encrypt(ring.key(ring.current), data_key, _bound(ring.layer, name, row, ring.current))


def _data_key(ring: Ring, name: str, row: int, parts: list[str]) -> bytes:
    _, number, wrapped, _ = parts
    return _decrypt(ring.key(number), wrapped, _bound(ring.layer, name, row, number))


def _parts(sealed: str) -> list[str]:
    parts = sealed.split(".")
    if len(parts) != 4 or parts[0] != FORM:
        raise ValueError
    return parts


def _key_of(sealed: str) -> str:
    return sealed.split(".")[1] if sealed.count(".") == 3 else ""


@contextlib.contextmanager
def _damage(name: str) -> Iterator[None]:
    """What goes wrong while opening is said without what was opened."""
    try:
        yield
    except LayerError:
        raise
    except (InvalidTag, ValueError, binascii.Error):
        raise Corrupt(
            f"secret {name!r} does not open: its row is not what was sealed for this layer, name and row",
            hint=f"layer secret set {name}",
        ) from None


@functools.cache
def undumpable() -> None:
    """This process holds values now: it leaves no core dump, and other processes of the user can't look into it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


# What people do


def set(
    layer: Any, name: str, value: str, *, description: str | None = None, principal: str | None = None, branch: str = "main",
    reason: str | None = None,
) -> int:  # fmt: skip
    """Keep a value under a name, or give a name another value, in one tx; returns the row's id. Nothing gives it back."""
    check(name, value)
    with layer.in_tx(principal, branch, reason or f"set secret {name}") as tx:
        tx.result = put(tx, layer.id, name, value, description)
        return int(tx.result)


def check(name: Any, value: Any) -> None:
    """Refuses what can't be a secret."""
    if not isinstance(name, str) or not VARIABLE.fullmatch(name) or len(name) > 100:
        raise Invalid(  # not shown: name and value may have been exchanged
            "that can't be the name of a secret",
            hint="letters, digits and _, at most 100, as of a variable: boxes find it under that name",
        )
    if not isinstance(value, str):
        raise Invalid(f"the value of secret {name!r} is a text, not {type(value).__name__}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        size = -1
    if size < 0:
        raise Invalid(f"the value of secret {name!r} is not text that UTF-8 can hold")
    if len(value) < SHORTEST or size > LONGEST:
        raise Invalid(
            f"the value of secret {name!r} has {'fewer than ' + str(SHORTEST) + ' characters' if size <= LONGEST else f'more than {LONGEST} bytes'}"
        )


def put(tx: Tx, layer_id: str, name: str, value: str, description: str | None = None) -> int:
    """`set` inside a tx that is open already."""
    check(name, value)
    undumpable()
    ring = _ring_to_seal(tx, layer_id)
    number = _find(tx, name)
    said: dict[str, Any] = {} if description is None else {"description": description}
    if number is not None:
        values = {"sealed": seal(ring, name, number, value), **said}
        with contextlib.suppress(NotFound):  # for who may not know of it there is none, and what follows is refused
            tx.change(SECRET, number, tx._encoded(SECRET, values, partial=True))
            return number
    number = tx.work.new_id()
    values = {"name": name, "sealed": seal(ring, name, number, value), **said}
    return tx.add(SECRET, tx._encoded(SECRET, values), number)


def _find(tx: Tx, name: Any) -> int | None:
    return tx._having(SECRET, [SECRET.by_name["name"]], [name], None) if isinstance(name, str) else None


def remove(
    layer: Any, name: str, *, principal: str | None = None, branch: str = "main", reason: str | None = None
) -> None:
    """Take a secret away. Its sealed versions stay in history until they are pruned or their key is forgotten."""
    with layer.in_tx(principal, branch, reason or f"remove secret {name}") as tx:
        number = _find(tx, name)
        try:
            if number is None:
                raise _nowhere(name)
            tx.remove(SECRET, number)
        except NotFound:
            raise _nowhere(name) from None


def _nowhere(name: str) -> NotFound:
    return NotFound(f"there is no secret {name!r}", hint="layer secret list")


def describe(layer: Any, *, branch: str = "main", principal: str | None = None) -> list[dict[str, Any]]:
    """The secrets a principal may read of: name, description, when and by whom the value was set, when it was used last."""
    rows = layer.query("select id, name, description from secret order by name", branch=branch, principal=principal)
    number = layer.id_of(principal)
    engine, catalog = layer.engine, layer.catalog
    with engine.reading() as session:
        epoch = clock(engine, session)[1]
        policy, chain = catalog.policy(session, number, epoch), catalog.chain(session, catalog.branch(session, branch))
        schema = catalog.schema(session, chain, epoch)

        def sees(name: str) -> bool:
            return policy.rules("read", schema, SYSTEM.by_name[name], branch).everything

        told: dict[int, tuple[str, str, str]] = {}
        if sees("tx"):
            at = engine.portable("v.at", "datetime")
            past = session.all(
                f"select v.id, v.sealed, {at}, v.principal from ({history_sql(engine, SECRET, chain)}) v order by v.tx"
            )
            for row, sealed, when, who in past:  # a key that was wrapped anew is no new value
                body = str(sealed).rpartition(".")[2]
                if row not in told or told[row][0] != body:
                    told[row] = (body, when, who)
        used: dict[str, str] = {}
        if sees("step"):
            last, name = engine.portable("max(x.at)", "datetime"), f"{engine.shown('x.detail', 'json')} ->> 'name'"
            used = dict(
                session.all(
                    f"select {name}, {last} from {engine.schema_prefix}ledger_step x where x.kind = 'secret' group by 1"
                )
            )

    def moment(text: str | None) -> datetime | None:
        return None if text is None else datetime.fromisoformat(text)

    return [
        {
            "name": row["name"],
            "description": row["description"],
            "set": moment(told[row["id"]][1] if row["id"] in told else None),
            "by": told[row["id"]][2] if row["id"] in told else None,
            "used": moment(used.get(row["name"])),
        }
        for row in rows
    ]


# Keys


def keys(layer: Any) -> list[dict[str, Any]]:
    """The keys of the ring, by name: when each was made, and which one seals."""
    layer.only_owner("see which keys there are")
    ring = load(layer.id)
    return [{"key": name, "made": made, "current": name == ring.current} for name, made in ring.made.items()]


def rotate_key(layer: Any, *, principal: str | None = None, reason: str | None = None) -> dict[str, Any]:
    """Make a new key and wrap every data key with it, on main and every open branch, all or none.

    History keeps what it has, and the ring keeps the keys before for it until `forget_key`.
    """
    execution = layer.execution_by(principal)
    undumpable()
    with layer.ledger.work() as work:
        _owners_only(work, execution, "rotate the key of secrets")
        path = key_file(layer.id)
        with _writing(path):
            # In the file before any row needs it. What fails from here on leaves a key too many, and no secret without one.
            try:
                ring = _with_new_key(path, layer.id, load(layer.id))
            except _Missing:
                if any(rows for _, rows in _standing(work)):
                    raise
                ring = _with_new_key(path, layer.id, None)
        rewrapped: dict[tuple[int, str, str], str] = {}  # one text for all branches, so that they stay alike
        count: dict[str, int] = {}
        for branch, rows in _standing(work):
            tx = work.tx(execution, branch, reason=reason or f"rotate the key of secrets to {ring.current}")
            for row in rows:
                key = (row["id"], row["name"], row["sealed"])
                if key not in rewrapped:
                    rewrapped[key] = _told_where(ring, row, branch)
                tx.record(SECRET, {"sealed": rewrapped[key]}, row["id"])
            if tx.dirty:
                count[branch] = len(tx.changes)
                tx.finish()
    return {"key": ring.current, "rewrapped": count}


def _told_where(ring: Ring, row: Mapping[str, Any], branch: str) -> str:
    try:
        return rewrap(ring, row["name"], row["id"], row["sealed"])
    except LayerError as error:
        raise type(error)(
            f"on branch {branch!r}: {error.message}", f"set or remove secret {row['name']!r} there, then rotate again"
        ) from None


def forget_key(layer: Any, key: str, *, principal: str | None = None, reason: str | None = None) -> dict[str, Any]:
    """Destroy a key that seals nothing any more. Versions it sealed, in history and in backups, can never be read again."""
    execution = layer.execution_by(principal)
    with layer.ledger.work() as work:
        _owners_only(work, execution, "forget a key of secrets")
        path = key_file(layer.id)
        if not path.exists():
            raise NotFound(f"there is no key {key!r:.120}: there are none", hint="layer secret keys")
        with _writing(path):
            ring = load(layer.id)
            if key not in ring.keys:
                raise NotFound(f"there is no key {key!r:.120} in {path}", hint="layer secret keys")
            if key == ring.current:
                raise Conflict(f"key {key} is the one that seals", hint="layer secret rotate-key makes another")
            for branch, rows in _standing(work):
                for row in rows:
                    if _key_of(row["sealed"]) == key:
                        raise Conflict(
                            f"secret {row['name']!r} on branch {branch!r} is still sealed with key {key}",
                            hint="layer secret rotate-key",
                        )
            sealed, at = SECRET.by_name["sealed"].store, work.engine.schema_prefix
            lost = 0
            for table in (f"{SECRET.store}__h", f"{SECRET.store}__d"):
                row = work.session.one(f"select count(*) from {at}{table} where {sealed} like ?", (f"{FORM}.{key}.%",))
                lost += int(row[0]) if row is not None else 0
            work.tx(execution, reason=reason or f"forget key {key} of secrets").finish()
            left = {name: one for name, one in ring.keys.items() if name != key}
            _store(replace(ring, keys=left, made={name: ring.made[name] for name in left}))
    return {"key": key, "unreadable": lost}


def _owners_only(work: Work, execution: Execution, act: str) -> None:
    policy = work.catalog.policy(work.session, execution.principal, work.version)
    if not policy.sovereign():
        raise Denied(f"{policy.me['name']} may not {act}: only an owner may")


def _standing(work: Work) -> list[tuple[str, list[dict[str, Any]]]]:
    """Main and every open branch, the older first, with the secrets each sees."""
    branches = work.catalog.rows(work.session, SYSTEM.by_name["branch"], MAIN_CHAIN)
    return [
        (row["name"], work.catalog.rows(work.session, SECRET, work.catalog.chain(work.session, row["id"])))
        for row in sorted(branches, key=lambda row: row["id"])
        if row["status"] == "open" or row["id"] == MAIN
    ]


# What boxes get


@dataclass(frozen=True)
class Wanted:
    """A secret as a blueprint names it."""

    name: str
    hosts: tuple[str, ...] = ()
    readable: bool = False


def wanted(given: Any) -> tuple[Wanted, ...]:
    """What a blueprint's `secrets` say: names, or {"name", "hosts", "readable"}."""
    if given is None:
        return ()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Collection):
        raise Invalid(
            f"secrets {given!r} is not a list", hint='["stripe"] or [{"name": "stripe", "hosts": ["api.test"]}]'
        )
    found: dict[str, Wanted] = {}
    for one in given:
        said = {"name": one} if isinstance(one, str) else one
        if not isinstance(said, Mapping) or frozenset(said) - {"name", "hosts", "readable"} or "name" not in said:
            raise Invalid(
                f"secret {one!r} of a blueprint is neither a name nor a mapping with name, hosts and readable"
            )
        name, hosts, readable = said["name"], said.get("hosts") or (), said.get("readable", False)
        if not isinstance(name, str) or not VARIABLE.fullmatch(name) or name in found:
            raise Invalid(f"secret name {name!r} of a blueprint", hint="letters, digits and _; each once")
        if isinstance(hosts, str) or not isinstance(hosts, Collection) or not all(isinstance(h, str) for h in hosts):
            raise Invalid(
                f"hosts {hosts!r} of secret {name!r} is not a list of hosts", hint='["api.test", "*.api.test"]'
            )
        if not isinstance(readable, bool):
            raise Invalid(f"readable {readable!r} of secret {name!r}", hint="true or false")
        found[name] = Wanted(name, tuple(hosts), readable)
    return tuple(found.values())


def bind(egress: Iterable[Any] | None, secrets: Iterable[Wanted]) -> list[Any]:
    """Egress rules that name each secret at its hosts: added to the rules of that host, over https, or a rule of its own at the end."""
    given: list[Any] = list(egress or ())
    listed = {one.name: one for one in secrets}
    for rule in rules.parse(given):
        if unknown := sorted(rule.secrets - listed.keys()):
            raise Invalid(f"egress rule {rule.text} names secret {unknown[0]!r}, which the blueprint does not")
    for one in listed.values():
        for host in one.hosts:
            given = _bind_one(given, one.name, rules.parse_one({"host": host}).host)
    return given


def _bind_one(given: list[Any], name: str, host: str) -> list[Any]:
    found: list[Any] = []
    bound = False
    for written in given:
        rule = rules.parse_one(written)
        web = rule.protocols & {"http", "https"}
        if rule.action == "deny" or not web or rule.tls == "pass" or rule.host != host:
            if rule.action == "allow" and web and not bound and rule.host != host and _covers(rule.host, host):
                raise Invalid(
                    f"egress rule {rule.text} speaks of {host} before a rule that could name secret {name!r}",
                    hint=f"put a rule for {host} before it",
                )
            found.append(written)
            continue
        bound = True
        spelled = rules.spelled(written)
        if name in rule.secrets:
            found.append(written)
            continue
        with_it = {**spelled, "secrets": sorted({*rule.secrets, name})}
        if web == {"http", "https"}:  # in clear it goes nowhere unless a rule says so itself
            found += [{**with_it, "protocol": "https"}, written]
        else:
            found.append(with_it)
    if not bound:
        found.append({"host": host, "protocol": "https", "secrets": [name]})
    return found


def _covers(pattern: str, host: str) -> bool:
    return pattern == "*" or (pattern.startswith("*.") and ("." + host.removeprefix("*.")).endswith(pattern[1:]))


def for_box(
    layer: Any, blueprint: Mapping[str, Any], principal: int, session: Any = None, *, branch: str = "main", as_of: int | None = None,
    author: int | None = None,
) -> tuple[Opened, list[Any], frozenset[str]]:  # fmt: skip
    """What a box of a blueprint's row is made with: values for the gateway, its egress rules, names it may read itself.

    Who wrote the blueprint, and the code that runs in the box (`author`), must be let use the secrets as well.
    """
    listed = wanted(blueprint.get("secrets"))
    egress = bind(blueprint.get("egress"), listed)
    sent = frozenset[str]().union(*(rule.secrets for rule in rules.parse(egress)))
    names = [one.name for one in listed if not one.readable or one.name in sent]
    readable = frozenset(one.name for one in listed if one.readable)
    with _reading(layer, session) as held:
        opened = _open(layer, held, names, principal, branch, as_of, "injected")
        asked = {principal, principal if author is None else author}
        if listed and blueprint.get("_tx") is not None:
            asked.add(definer_of(layer, "blueprint", blueprint, branch))
        for policy in [_policy(layer, held, who) for who in sorted(asked)] if listed else ():
            for name in sorted({*names, *readable}):
                _may_use(layer, policy, name, branch)
    return opened, egress, readable


def open_for(
    layer: Any, names: Iterable[str], execution: Execution, *, principal: int | None = None, branch: str | None = None, as_of: int | None = None
) -> Opened:  # fmt: skip
    """The values of these secrets for the box of an execution that is open; Denied unless its principal may use each.

    `principal` is who is asked instead, where a function has its definer's rights.
    """
    return _opened(layer, names, execution, principal, branch, as_of, "injected")


def readable(
    layer: Any, name: str, execution: Execution, names: Collection[str], *, principal: int | None = None, branch: str | None = None,
    as_of: int | None = None,
) -> Opened:  # fmt: skip
    """The value of one secret for code in a box that asks for it; `names` are those its blueprint says are readable."""
    if not isinstance(name, str) or name not in names:
        raise Denied("that secret is not readable here", hint='a blueprint says {"name": …, "readable": true} of it')
    return _opened(layer, [name], execution, principal, branch, as_of, "read")


def _opened(
    layer: Any, names: Iterable[str], execution: Execution, principal: int | None, branch: str | None, as_of: int | None, use: str
) -> Opened:  # fmt: skip
    if not isinstance(execution, Execution) or execution not in layer.ledger.executions or not execution.open:
        raise Denied("secrets are opened for an open execution only")
    asked = execution.principal if principal is None else principal
    with layer.engine.reading() as session:
        return _open(layer, session, names, asked, branch or execution.scope.branch or "main", as_of, use)


def hide(values: Mapping[str, str], data: bytes) -> bytes:
    """What code wrote, without the values it has read: for what is kept of its output."""
    return Secrets(values).hide(data) if values else data


def used(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps of what the gateway told of secrets: which one went to which host."""
    return [
        {"kind": "secret", "name": event["name"], "host": event.get("host"), "use": "sent"}
        for event in events
        if event.get("event") == "secret"
    ]


@contextlib.contextmanager
def _reading(layer: Any, session: Any) -> Iterator[Any]:
    if session is not None:
        yield session
        return
    with layer.engine.reading() as fresh:
        yield fresh


def _policy(layer: Any, session: Any, principal: int) -> Policy:
    found: Policy = layer.catalog.policy(session, principal, clock(layer.engine, session)[1])
    return found


def _may_use(layer: Any, policy: Policy, name: str, branch: str) -> None:
    """Only what is granted without conditions counts, since a secret has no rows they could be about; any deny does."""
    allowed, grants = policy.outright("use", f"secret:{name}", branch)
    if not allowed:
        raise policy.refusal("use", f"secret:{name}", grants, "grant")


def _open(
    layer: Any, session: Any, names: Iterable[str], principal: int, branch: str, as_of: int | None, use: str
) -> Opened:
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return Opened({}, ())
    policy = _policy(layer, session, principal)
    for name in wanted:
        _may_use(layer, policy, name, branch)
    chain = layer.catalog.chain(session, layer.catalog.branch(session, branch), as_of)
    rows = {row["name"]: row for row in layer.catalog.rows(session, SECRET, chain)}
    for name in wanted:
        if name not in rows:
            raise NotFound(f"there is no secret {name!r}", hint=f"layer secret set {name}")
    undumpable()
    ring = load(layer.id)
    values = {name: unseal(ring, name, rows[name]["id"], rows[name]["sealed"]) for name in wanted}
    return Opened(values, [{"kind": "secret", "name": name, "use": use} for name in wanted])
