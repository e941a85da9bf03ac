"""Volumes: files that stay when boxes end. A row says whose one is and where it lies; its files are the host's."""

from __future__ import annotations

import hmac
import posixpath
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Conflict, Invalid, LayerError, NotFound, Unauthenticated, Unavailable
from ..sandbox.blueprint import VIRTUAL, Mount, parse_size
from ..sandbox.client import blocking_client, run_blocking
from ..sandbox.contents import Contents, opened
from ..settings import state_directory
from ..substrate.ledger import MAIN_CHAIN, Tx
from ..substrate.reads import clock
from ..substrate.schema import SYSTEM
from . import contracts
from .verbs import Call, verb

VOLUME = SYSTEM.by_name["volume"]
BYTES = 4 << 30  # that a volume holds unless somebody says otherwise
MOST = 1 << 40
MANY = 1000  # volumes of one principal
MOUNTS = 16  # volumes of one box
ID = re.compile(r"vol[0-9a-f]{16}")
NAMES = "letters, digits, . _ and -, at most 128"
RESERVED = ("/proc", "/sys", "/dev", "/run", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/boot")


@verb("volume.create")
def create(call: Call, *, name: str, bytes: Any = None) -> Any:
    """A volume of one's own, empty; boxes that mount it share its files, and it stays when they end."""
    layer, principal = call.layer, call.asking.principal
    if not _named(name):
        raise Invalid(f"{name!r:.120} can't be the name of a volume", hint=NAMES)
    size = BYTES if bytes is None else parse_size(bytes, "bytes")
    if size > MOST:
        raise Invalid(f"a volume holds {MOST} bytes at most")
    _may(layer, principal)
    id = f"vol{secrets.token_hex(8)}"
    row = {"name": name, "principal": principal, "place": f"{contracts.home()}/{id}", "annotations": {"bytes": size}}

    def act(tx: Tx) -> None:
        mine = layer.catalog.rows(tx.session, VOLUME, tx.chain, f"where x.{_column('principal')} = ?", (principal,))
        if any(known["name"] == name for known in mine):
            raise Conflict(f"a volume {name!r} exists already", hint="another name, or remove it first")
        if len(mine) >= MANY:
            raise Conflict(f"there are {MANY} volumes already", hint="remove some")
        tx.record(VOLUME, tx._encoded(VOLUME, row))

    _host({"do": "volume.create", "volume": id, "bytes": size})
    try:
        layer.ledger.write(call.execution, "main", act)
    except BaseException:
        _host({"do": "volume.remove", "volume": id})
        raise
    return {"volume": id, "name": name, "bytes": size}


@verb("volume.remove")
def remove(call: Call, *, volume: str) -> Any:
    """Take a volume away with all in it, by id or name; not while a box mounts it."""
    layer = call.layer
    row = find(layer, call.asking.principal, volume)
    try:
        _host({"do": "volume.remove", "volume": id_of(row)})
    except NotFound:
        pass  # an earlier attempt came this far
    layer.ledger.write(call.execution, "main", lambda tx: tx.erase(VOLUME, row["id"]))
    return {"removed": id_of(row), "name": row["name"]}


def known(layer: Any, principal: int) -> list[dict[str, Any]]:
    """The volumes of a principal; an owner's handle has its own too, and finds others by id."""
    return sorted(_rows(layer, "principal", principal), key=lambda row: str(row["name"]))


def find(layer: Any, principal: int, text: object) -> dict[str, Any]:
    """A volume by its name, or by its id; NotFound for another's, unless an owner asks for it by id."""
    mine = [row for row in _rows(layer, "principal", principal) if text in (row["name"], id_of(row))]
    if not mine and isinstance(text, str) and ID.fullmatch(text) and _policy(layer, principal).sovereign():
        mine = _rows(layer, "place", f"{contracts.home()}/{text}")
    if not mine:
        raise NotFound(f"there is no volume {text!r:.120}", hint="volume.create makes one")
    return mine[0]


def id_of(row: Mapping[str, Any]) -> str:
    """What the host knows a volume by."""
    return str(row["place"]).rpartition("/")[2]


def mounts(layer: Any, principal: int, given: Sequence[Mapping[str, Any]], tier: str | None = None) -> list[Mount]:
    """What a box's blueprint mounts for volumes that were asked for as {"name", "path"}."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or len(given) > MOUNTS:
        raise Invalid(f"volumes of a box are a list of up to {MOUNTS}", hint='[{"name": "data", "path": "/mnt/data"}]')
    if given and (tier == "process" or tier in VIRTUAL):
        raise Invalid(f"tier {tier!r} can't show volumes to a box", hint="use tier namespace, container or gvisor")
    found: dict[str, Mount] = {}
    for one in given:
        if (
            not isinstance(one, Mapping)
            or not isinstance(path := one.get("path"), str)
            or set(one) - {"name", "path", "readonly"}
        ):
            raise Invalid("a volume of a box has a name and a path", hint='{"name": "data", "path": "/mnt/data"}')
        target = posixpath.normpath(path)
        if not path.startswith("/") or ".." in path.split("/") or not target.isprintable() or len(target) > 1024:
            raise Invalid(f"a volume can't be mounted at {path!r:.120}", hint="an absolute path, as /mnt/data")
        if target in ("/", "//") or any(target == place or target.startswith(f"{place}/") for place in RESERVED):
            raise Invalid(f"a volume can't be mounted at {path!r:.120}", hint="/mnt/data, or below /home")
        if target in found or any(target.startswith(f"{other}/") or other.startswith(f"{target}/") for other in found):
            raise Invalid(f"two volumes can't be mounted at {path!r:.120}, or one in the other")
        row = find(layer, principal, one.get("name"))
        _here(row)
        readonly = one.get("readonly", False)
        if not isinstance(readonly, bool):
            raise Invalid("readonly is true or false")
        found[target] = Mount(f"volume:{id_of(row)}", target, readonly)
    return list(found.values())


def contents(row: Mapping[str, Any]) -> Contents:
    """The files of a volume."""
    _here(row)
    return Contents(opened(state_directory(), id_of(row)))


def token(layer: Any, row: Mapping[str, Any]) -> str:
    """What a client reaches the files of a volume with: made of a key that lies in no database."""
    return f"{id_of(row)}_{contracts.token(f'{layer.id}:volume', id_of(row))}"


def reached(layer: Any, id: str, given: str) -> dict[str, Any]:
    """The volume that a token is for; Unauthenticated for any other token, whether or not there is such a volume."""
    if not ID.fullmatch(id):
        raise Unauthenticated("the token is not of this volume")
    wanted = f"{id}_{contracts.token(f'{layer.id}:volume', id)}"
    if not hmac.compare_digest(wanted.encode(), given.encode()):
        raise Unauthenticated("the token is not of this volume")
    rows = _rows(layer, "place", f"{contracts.home()}/{id}")
    if not rows:
        raise NotFound(f"there is no volume {id!r:.120}")
    return rows[0]


def _named(name: object) -> bool:
    return (
        isinstance(name, str)
        and 0 < len(name) <= 128
        and name.isascii()
        and name[0].isalnum()
        and all(c.isalnum() or c in "._-" for c in name)
    )


def _may(layer: Any, principal: int) -> None:
    policy, resource = _policy(layer, principal), "verb:volume.create"
    allowed, grants = policy.outright("call", resource)
    if not allowed:
        raise policy.refusal("call", resource, grants, named=True)


def _policy(layer: Any, principal: int) -> Any:
    with layer.engine.reading() as session:
        return layer.catalog.policy(session, principal, clock(layer.engine, session)[1])


def _here(row: Mapping[str, Any]) -> None:
    if str(row["place"]).partition("/")[0] != contracts.home():
        raise Unavailable(f"volume {row['name']!r} lies on another host", hint="use it where it was made")


def _column(field: str) -> str:
    return VOLUME.by_name[field].store


def _rows(layer: Any, field: str, value: Any) -> list[dict[str, Any]]:
    with layer.engine.reading() as session:
        rows = layer.catalog.rows(session, VOLUME, MAIN_CHAIN, f"where x.{_column(field)} = ?", (value,))
        return [dict(row) for row in rows]


def _host(request: dict[str, Any]) -> Any:
    try:
        return run_blocking(blocking_client().call(request))
    except OSError as error:
        raise LayerError(f"the host of boxes can't be reached: {error}") from None
