"""Typed JSON: what a server and our own clients exchange, so that a Decimal comes back as one.

Plain JSON has decimals, dates and times as texts. Where both sides speak TYPED, such a value is an object with one key
that names its type: {"$decimal": "1.50"}. An object that has such a key itself is wrapped: {"$object": {…}}.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from .errors import Invalid

JSON, TYPED = "application/json", "application/vnd.livinglayer+json"
DEPTH = 100  # of a document
_TURN: dict[str, Callable[[str], Any]] = {
    "$decimal": Decimal,
    "$datetime": datetime.fromisoformat,
    "$date": date.fromisoformat,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$float": float,  # one that is not finite
    "$object": lambda inner: inner,
}


def dumps(value: Any) -> bytes:
    """JSON in which types are kept."""
    return _encode(_tagged(value))


def plain(value: Any) -> bytes:
    """JSON in which decimals, dates, times and bytes are texts."""
    try:
        return _PLAIN.encode(value).encode("utf-8", "backslashreplace")
    except ValueError:  # a number that is not finite, which JSON has no form for
        return _PLAIN.encode(_finite(value)).encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def loads(data: bytes | str, typed: bool = False) -> Any:
    """A document that came from somewhere else: strictly JSON, no key twice, no deeper than DEPTH; Invalid otherwise."""
    try:
        found = json.loads(data, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise Invalid("the body is nested too deeply", hint=f"{DEPTH} levels at most") from None
    except ValueError as error:  # also bytes that are not UTF-8, and numbers without end
        raise Invalid(f"the body is not JSON: {str(error).partition('(')[0].strip():.120}") from None
    opened = (data.count("{") + data.count("[")) if isinstance(data, str) else (data.count(b"{") + data.count(b"["))
    if opened > DEPTH and depth(found) > DEPTH:
        raise Invalid("the body is nested too deeply", hint=f"{DEPTH} levels at most")
    if ("\\u" in data) if isinstance(data, str) else (b"\\u" in data):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Invalid("the body has half a character, which is not valid Unicode") from None
    return _untagged(found) if typed else found


def depth(value: Any) -> int:
    """How deep a value is nested, found without recursion."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        found, level = waiting.pop()
        deepest = max(deepest, level)
        inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        waiting += [(each, level + 1) for each in inner if isinstance(each, dict | list)]
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def text(value: Any) -> Any:
    """For json: what has no form of its own there, as text."""
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _tagged(value: Any) -> Any:
    if isinstance(value, Mapping):
        inner = {key: _tagged(item) for key, item in value.items()}
        return {"$object": inner} if len(inner) == 1 and next(iter(inner)) in _TURN else inner
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, datetime | date):
        return {"$datetime" if isinstance(value, datetime) else "$date": value.isoformat()}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": text(value)}
    return str(value)


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "$object" and isinstance(inner, dict):
            return {name: _untagged(item) for name, item in inner.items()}
        if key in _TURN and isinstance(inner, str):
            try:
                return _TURN[key](inner)
            except (ValueError, InvalidOperation, binascii.Error):
                raise Invalid(f"{inner!r:.60} is no {key[1:]}") from None
    return {name: _untagged(item) for name, item in value.items()}


_PLAIN = json.JSONEncoder(default=text, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
