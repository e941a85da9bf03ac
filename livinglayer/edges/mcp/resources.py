"""Resources: what there is, at layer:// addresses; each is read as whoever asks may see it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import mcp_types as types

from ...errors import Invalid, LayerError, NotFound
from ...law import held, replay
from ...law.signature import Signature, dumps
from ...projection.query import fields, readable
from ...projection.query import read as read_projection
from ..http.serving import Caller
from . import apps
from .acts import MOST, PAGE, ROWS, entity_of, paged

LARGEST = 16 << 20  # bytes of a file
LISTED = 200  # resources of one page
JSON = "application/json"


@dataclass(frozen=True)
class Content:
    """What is at an address."""

    data: bytes
    type: str = JSON
    meta: dict[str, Any] | None = None

    @property
    def digest(self) -> str:
        return sha256(self.data).hexdigest()

    def told(self, uri: str) -> types.TextResourceContents | types.BlobResourceContents:
        """As MCP gives it."""
        if self.type.startswith(("application/json", "text/")):
            text = self.data.decode("utf-8", "replace")
            return types.TextResourceContents(uri=uri, mime_type=self.type, text=text, _meta=self.meta)
        return types.BlobResourceContents(uri=uri, mime_type=self.type, blob=base64.b64encode(self.data).decode())


TEMPLATES = (
    ("layer://schema/{entity}", "entity's schema", "The fields of an entity.", JSON),
    ("layer://entity/{name}{?limit,offset}", "rows", "Rows of an entity, in the order of their ids.", JSON),
    ("layer://row/{entity}/{id}", "row", "One row as it is now, with the tx of its version.", JSON),
    (
        "layer://projection/{name}{?arguments*}",
        "projection",
        "Rows of a named projection; its parameters follow the ?.",
        JSON,
    ),
    ("layer://execution/{id}", "execution", "An execution and its steps.", JSON),
    ("layer://execution/{id}/result", "result", "All that an execution gave.", JSON),
    ("layer://box/{id}", "box", "A box that you hold, as it is now.", JSON),
    ("layer://file/{digest}", "file", "The content of a file field, or an artifact, by its digest.", None),
    ("ui://layer/projection/{name}", "page", "A projection as a page.", apps.TYPE),
)


def templates() -> list[types.ResourceTemplate]:
    """The shapes of addresses."""
    return [
        types.ResourceTemplate(uri_template=uri, name=name, description=about, mime_type=kind)
        for uri, name, about, kind in TEMPLATES
    ]


def listed(caller: Caller) -> list[types.Resource]:
    """The resources a principal may read, always in the same order. Rows, executions and files are found by templates."""
    if caller.scope is not None and "read" not in caller.scope:
        return []
    layer = caller.layer
    known = layer.schema()
    found = []
    if known.entities:
        found.append(
            types.Resource(
                uri="layer://schema", name="schema", description="Entities and their fields.", mime_type=JSON
            )
        )
    for entity in sorted((each for each in known.entities if not each.system), key=lambda each: each.name):
        found.append(
            types.Resource(
                uri=f"layer://entity/{entity.name}", name=entity.name, description=entity.description, mime_type=JSON
            )
        )
    shown = readable(layer, caller.principal)
    for row in shown:
        uri = f"layer://projection/{quote(row['name'])}"
        found.append(types.Resource(uri=uri, name=row["name"], description=row["description"], mime_type=JSON))
    if shown:
        found.append(
            types.Resource(
                uri=PAGE,
                name="projection page",
                description="What open_projection gives, as a page.",
                mime_type=apps.TYPE,
                _meta=apps.META,
            )
        )
    return found


def read(caller: Caller, uri: str) -> Content:
    """What is at an address, or NotFound."""
    caller.require("read")
    try:
        uri.encode()
        parts = urlsplit(uri)
        given = dict(
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=50)
        )
        words = [unquote(word) for word in (parts.netloc + parts.path).split("/")]
    except ValueError:
        raise nowhere(uri) from None
    if parts.scheme == "ui" and words[:2] == ["layer", "projection"] and len(words) <= 3 and not given:
        return _page(caller, words[2] if len(words) == 3 else None)
    reader = READERS.get((words[0], len(words))) if parts.scheme == "layer" else None
    if reader is None or parts.fragment or (given and words[0] not in ("entity", "projection")):
        raise nowhere(uri)
    try:
        return reader(caller, words, given)
    except NotFound as error:
        raise NotFound(error.message, error.hint or "resources/list, and resources/templates/list", uri=uri) from None


def nowhere(uri: str) -> NotFound:
    return NotFound(f"there is no resource {uri!r:.200}", hint="resources/list, and resources/templates/list", uri=uri)


def _json(value: Any) -> Content:
    return Content(dumps(value))


def _number(word: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", word):
        raise NotFound(f"{word!r:.60} is no number")
    return int(word)


def _known(caller: Caller, name: str) -> Any:
    found = caller.layer.schema().by_name.get(name)
    if found is None:
        raise NotFound(f"there is no entity {name!r:.120}", hint="layer://schema")
    return found


def _schema(caller: Caller, words: list[str], given: dict[str, str]) -> Content:
    known = caller.layer.schema()
    if len(words) == 2:
        return _json(entity_of(_known(caller, words[1])))
    if not known.entities:
        raise NotFound("there is nothing to read for you")
    return _json({"entities": [entity_of(each) for each in known.entities]})


def _entity(caller: Caller, words: list[str], given: dict[str, str]) -> Content:
    if set(given) - {"limit", "offset"}:
        raise NotFound("rows have a limit and an offset")
    limit, offset = (_number(given.get(key, default)) for key, default in (("limit", str(ROWS)), ("offset", "0")))
    limit = max(1, min(limit, MOST))
    name = _known(caller, words[1]).name
    rows = caller.layer.query(f"select * from {name} order by id limit {limit + 1} offset {offset}")
    return _json({"entity": name} | paged(rows, offset, limit))


def _row(caller: Caller, words: list[str], given: dict[str, str]) -> Content:
    name, number = _known(caller, words[1]).name, _number(words[2])
    rows = caller.layer.query(f"select * from {name} where id = :id", {"id": number})
    if not rows:
        raise NotFound(f"there is no {name}/{number}")
    return _json({"entity": name, "row": rows[0]})


def _projection(caller: Caller, words: list[str], given: dict[str, str]) -> Content:
    name = words[1]
    shown = next((row for row in readable(caller.layer, caller.principal) if row["name"] == name), None)
    if shown is None:
        raise NotFound(f"there is no projection {name!r:.120}")
    typed = Signature(fields(name, shown["parameters"])).parse(name, given)
    rows, _ = read_projection(caller.layer, name, typed, principal=caller.principal)
    return _json({"projection": name} | paged(rows[: MOST + 1], 0, MOST))


def _page(caller: Caller, name: str | None) -> Content:
    shown = {row["name"]: row for row in readable(caller.layer, caller.principal)}
    if name is None and shown:
        return Content(apps.page().encode(), apps.TYPE, apps.META)
    if name not in shown:
        raise nowhere(f"{PAGE}/{name}" if name else PAGE)
    assert name is not None
    rows, _ = read_projection(caller.layer, name, {}, principal=caller.principal)
    found = paged(rows[: ROWS + 1], 0, ROWS)
    text = apps.page(name, json.loads(dumps(found["rows"])), "next" in found)
    return Content(text.encode("utf-8", "replace"), apps.TYPE, apps.META)


def _execution(caller: Caller, words: list[str], given: dict[str, str]) -> Content:
    number = _number(words[1])
    if len(words) == 2:
        return _json(replay.replay(caller.layer, number).json())
    if words[2] != "result":
        raise NotFound(f"an execution has a result, no {words[2]!r:.60}")
    from .tasks import own  # whoever asked for it may read what it gave

    return _json({"execution": number, "result": own(caller, number)["result"]})


def _box(caller: Caller, words: list[str], given: dict[str, str]) -> Content:
    caller.require("boxes")
    return _json(held.shown(caller.layer, held.mine(caller.layer, caller.principal, words[1], False)))


def _file(caller: Caller, words: list[str], given: dict[str, str]) -> Content:
    data = caller.layer.blob(words[1])
    if len(data) > LARGEST:
        raise Invalid(f"the file has {len(data)} bytes, more than {LARGEST}", hint="layer blob, or GET /api/blob")
    try:
        data.decode()
        return Content(data, "text/plain")
    except UnicodeDecodeError:
        return Content(data, "application/octet-stream")


READERS: dict[tuple[str, int], Callable[[Caller, list[str], dict[str, str]], Content]] = {
    ("schema", 1): _schema, ("schema", 2): _schema, ("entity", 2): _entity, ("row", 3): _row, ("projection", 2): _projection,
    ("execution", 2): _execution, ("execution", 3): _execution, ("box", 2): _box, ("file", 2): _file,
}  # fmt: skip


def complete(caller: Caller, argument: str, begun: str) -> list[str]:
    """What an argument of a template or a prompt may be, of which the beginning is known."""
    if caller.scope is not None and "read" not in caller.scope:
        return []
    layer, found = caller.layer, set[str]()
    if argument in ("entity", "name", "subject"):
        found |= {each.name for each in layer.schema().entities if not each.system}
    if argument == "name":
        found |= {row["name"] for row in readable(layer, caller.principal)}
    if argument == "branch" and "branch" in layer.schema().by_name:
        found |= {row["name"] for row in layer.query("select name from branch where status = 'open'")}
    return sorted(name for name in found if name.startswith(begun))


def digest(caller: Caller, uri: str) -> str | None:
    """What tells whether a resource is as it was; None when it can't be read."""
    try:
        return read(caller, uri).digest
    except LayerError:
        return None


def about(uri: str) -> tuple[str | None, int | None]:
    """The entity and row whose changes change a resource; None: any may."""
    words = urlsplit(uri).netloc, *urlsplit(uri).path.strip("/").split("/")
    if words[0] in ("row", "entity") and len(words) > 1:
        return words[1], int(words[2]) if len(words) == 3 and words[2].isdecimal() else None
    return None, None
