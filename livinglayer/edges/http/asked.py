"""Asked: what a request of the native API says: parameters by name and type, a JSON body, and the form of the answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from ...errors import Invalid, LayerError
from ...typed import JSON, TYPED, loads
from .serving import BODY, body

NDJSON, CSV, ARROW = "application/x-ndjson", "text/csv", "application/vnd.apache.arrow.stream"
FORMS = {"json": JSON, "typed": TYPED, "ndjson": NDJSON, "csv": CSV, "arrow": ARROW}
AT_ONCE = 64 << 10  # bytes that are read in no time
INT = re.compile(r"-?\d{1,18}")


class Unacceptable(LayerError):
    """An answer in none of the forms that were asked for."""

    code, status = "unacceptable", 406


class Unsupported(LayerError):
    """A body in a form that is not read here."""

    code, status = "unsupported", 415


class NotAllowed(LayerError):
    """A method that this path does not answer."""

    code, status = "not_allowed", 405


class Stale(LayerError):
    """What was to be changed is not as it was seen (If-Match)."""

    code, status = "conflict", 412


def text(name: str, given: str) -> str:
    return given


def whole(name: str, given: str) -> int:
    if not INT.fullmatch(given):
        raise Invalid(f"{name} is a whole number, not {given!r:.60}")
    return int(given)


def number(name: str, given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise Invalid(f"{name} is a number, not {given!r:.60}") from None


def flag(name: str, given: str) -> bool:
    if given not in ("true", "false", "1", "0"):
        raise Invalid(f"{name} is true or false, not {given!r:.60}")
    return given in ("true", "1")


def json(name: str, given: str) -> Any:
    try:
        return loads(given)
    except Invalid as error:
        raise Invalid(f"{name} is JSON: {error.message.removeprefix('the body ')}") from None


def moment(name: str, given: str) -> int | datetime:
    """A tx number or an aware time."""
    if INT.fullmatch(given):
        return int(given)
    try:
        return datetime.fromisoformat(given.replace(" ", "+"))  # a + that was not escaped
    except ValueError:
        raise Invalid(f"{name} is a tx number or a time like 2026-01-31T12:00:00Z, not {given!r:.60}") from None


Read = Callable[[str, str], Any]
READING: dict[str, Read] = {"branch": text, "as_of": moment, "principal": text}
WRITING: dict[str, Read] = {"branch": text, "reason": text, "principal": text}
PAGES: dict[str, Read] = {"page": whole, "cursor": text, "format": text}


def pairs(request: Request) -> dict[str, str]:
    """The parameters of the query string as they are; each once."""
    raw = request.scope["query_string"]
    if not raw:
        return {}
    try:
        listed = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=200)
    except ValueError:
        raise Invalid("the query string is not UTF-8, or has too many parts") from None
    found = dict(listed)
    if len(found) != len(listed):
        raise Invalid("a parameter is there twice")
    for name, value in found.items():
        if "\0" in name or "\0" in value:
            raise Invalid(f"parameter {name!r:.60} has a NUL character")
    return found


def parameters(request: Request, known: Mapping[str, Read], required: Collection[str] = ()) -> dict[str, Any]:
    """The parameters of the query string, by their types; Invalid names the one that is wrong."""
    given = pairs(request)
    for name in given:
        if name not in known:
            raise Invalid(f"there is no parameter {name!r:.60} here", hint=f"it takes {', '.join(known) or 'none'}")
    for name in required:
        if name not in given:
            raise Invalid(f"the parameter {name!r} is missing")
    return {name: known[name](name, value) for name, value in given.items()}


async def aside(size: int, act: Callable[..., Any], *args: Any) -> Any:
    """What is done with so many bytes of a request: of many on a thread, so that nobody else waits for it."""
    if size <= AT_ONCE:
        return act(*args)
    return await asyncio.get_running_loop().run_in_executor(None, act, *args)


async def document(request: Request, limit: int = BODY) -> dict[str, Any]:
    """The JSON object of a request; nothing is an empty one."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    data = await body(request, limit)
    if not data and kind in ("", JSON, TYPED):
        return {}
    if kind not in (JSON, TYPED):
        raise Unsupported(f"the body is {kind or 'of no type'!r:.60}, not {JSON}", hint=f"Content-Type: {JSON}")
    found = await aside(len(data), loads, data, kind == TYPED)
    if not isinstance(found, dict):
        raise Invalid("the body is not a JSON object", hint='{"name": value, …}')
    return found


def form(request: Request, chosen: str | None = None, among: Collection[str] = (JSON, TYPED)) -> str:
    """The media type of the answer: by ?format=, else by Accept."""
    if chosen is not None:
        if chosen not in FORMS or FORMS[chosen] not in among:
            names = ", ".join(name for name, kind in FORMS.items() if kind in among)
            raise Invalid(f"there is no format {chosen!r:.60} here", hint=names)
        return FORMS[chosen]
    accept = request.headers.get("accept", "")
    if not accept or accept in ("*/*", JSON):
        return JSON
    wanted = []
    for place, part in enumerate(accept.split(",")[:50]):
        kind, _, rest = part.strip().lower().partition(";")
        q = re.search(r"(?:^|;)\s*q=([01](?:\.\d{0,3})?)\s*(?:;|$)", rest)
        wanted.append((-float(q[1]) if q else -1.0, place, kind.strip()))
    for weight, _, kind in sorted(wanted):
        for each in among:
            if weight < 0 and (kind in (each, "*/*") or (kind.endswith("/*") and each.startswith(kind[:-1]))):
                return each
    raise Unacceptable(f"an answer can't be {accept!r:.80}", hint=f"Accept: {', '.join(among)}")
