"""E2B's secrets: kept as the layer keeps its own, told of by name and version; nothing gives a value back."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...errors import Conflict, Denied, Invalid, LayerError, NotFound, Unauthenticated
from ...sandbox.egress.secrets import variable
from ..http.serving import Caller, Serving
from .control import EMPTY, said

ENTRIES, KEY, VALUE, TOGETHER = 32, 128, 1024, 8192  # of a secret's metadata, the last three in bytes
PAGE = 100
MARK = "e2b: "  # how the description of a secret begins that holds its name and metadata there
NAME = re.compile(r"[^{}\x00-\x20\x7f-\x9f]{1,100}")


async def handle(serving: Serving, request: Request, caller: Caller | None = None) -> Response:
    """Answer for /secrets."""
    if caller is None:
        raise Unauthenticated("secrets are kept with an API key")
    parts = [unquote(part) for part in request.scope["path"].strip("/").split("/")]

    async def call(verb: str, **given: Any) -> Any:
        return await serving.do(functools.partial(caller.layer.call, verb, given))

    async def known() -> list[dict[str, Any]]:
        try:
            return await serving.do(_known, caller)
        except NotFound:  # whoever may read of no secret has none
            return []

    async def find(text: str) -> dict[str, Any]:
        for secret in await known():
            if text in (secret["secretID"], secret["name"]):
                return secret
        raise NotFound(f"there is no secret {text!r:.120}")

    match request.method, *parts[1:]:
        case ("GET",):
            return _page(request, await known())
        case ("POST",):
            given = await said(request)
            name, value = given.get("name"), given.get("value")
            if (
                not isinstance(name, str)
                or not NAME.fullmatch(name)
                or not name.isprintable()
                or not isinstance(value, str)
            ):
                raise Invalid("a secret has a value, and a name of up to 100 visible characters without { and }")
            notes = _notes(name, given.get("metadata"))
            if any(secret["name"] == name for secret in await known()):
                raise Conflict(f"a secret {name!r} exists already", hint="POST /secrets/NAME gives it another value")
            try:
                await call("secret.set", name=variable(name), value=value, description=notes)
            except Denied:  # by the name that the client gave it
                raise Denied(f"{caller.name} may not keep secret {name!r}", hint="an owner can grant it") from None
            return JSONResponse(await find(name), 201)
        case "GET", text:
            return JSONResponse(await find(text))
        case "POST", text:
            given, secret = await said(request), await find(text)
            if not isinstance(given.get("value"), str):
                raise Invalid("a secret has a value")
            again = secret["metadata"] if given.get("metadata") is None else given["metadata"]
            notes = _notes(secret["name"], again)
            await call("secret.set", name=variable(secret["name"]), value=given["value"], description=notes)
            return JSONResponse(await find(secret["name"]))
        case "DELETE", text:
            await call("secret.remove", name=variable((await find(text))["name"]))
            return EMPTY()
    raise NotFound(f"there is nothing at /{'/'.join(parts):.120} for {request.method}")


def _known(caller: Caller) -> list[dict[str, Any]]:
    """The secrets that a caller may read of, as E2B's clients are told of them."""
    rows = caller.layer.query("select id, name, description from secret order by name")
    past: dict[int, list[datetime]] = {}
    with contextlib.suppress(LayerError):  # whoever may not read what was
        for row in caller.layer.query("select id, at from secret__history where op <> 'delete'") if rows else ():
            past.setdefault(row["id"], []).append(row["at"])
    found = []
    for row in rows:
        times = past.get(row["id"]) or [datetime.fromtimestamp(0, UTC)]
        found.append({
            "secretID": f"sec{row['id']}", "currentVersion": len(times), **_noted(row["name"], row["description"] or ""),
            "createdAt": min(times).isoformat(), "updatedAt": max(times).isoformat(),
        })  # fmt: skip
    return sorted(found, key=lambda secret: str(secret["name"]))


def _noted(name: str, description: str) -> dict[str, Any]:
    """The name and metadata that a description holds; whoever may write secrets may have written anything there."""
    with contextlib.suppress(ValueError, RecursionError):
        kept = json.loads(description.removeprefix(MARK)) if description.startswith(MARK) else None
        if isinstance(kept, dict) and isinstance(called := kept.get("name"), str) and variable(called) == name:
            return {"name": called, "metadata": kept.get("metadata") or {}}
    return {"name": name, "metadata": {}}


def _notes(name: str, given: object) -> str:
    """Metadata as the description of a secret."""
    given = {} if given is None else given
    texts = isinstance(given, dict) and all(
        isinstance(one, str) and _text(one) for pair in given.items() for one in pair
    )
    if not texts or len(given) > ENTRIES:  # type: ignore[arg-type]
        raise Invalid(f"metadata of a secret are up to {ENTRIES} texts by name")
    text = json.dumps(given, ensure_ascii=False)
    if len(text.encode()) > TOGETHER or any(
        len(key.encode()) > KEY or len(value.encode()) > VALUE for key, value in dict(given).items()  # type: ignore[call-overload]
    ):  # fmt: skip
        raise Invalid(f"metadata of a secret take {TOGETHER} bytes at most, a name {KEY}, a text {VALUE}")
    return MARK + json.dumps({"name": name, "metadata": given}, ensure_ascii=False)


def _text(given: str) -> bool:
    try:
        return bool(given.encode() or True)
    except UnicodeEncodeError:
        return False


def _page(request: Request, found: list[dict[str, Any]]) -> Response:
    limit, begin = request.query_params.get("limit", str(PAGE)), request.query_params.get("nextToken", "")
    if not re.fullmatch(r"\d{1,4}", limit) or not 1 <= int(limit) <= 1000:
        raise Invalid(f"limit must be a number from 1 to 1000, not {limit!r:.60}")
    left = [secret for secret in found if secret["name"] > begin]
    shown = left[: int(limit)]
    return JSONResponse(shown, headers={"x-next-token": shown[-1]["name"]} if len(left) > len(shown) else {})
