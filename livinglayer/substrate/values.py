"""Values: what a field type accepts, how it is stored, how it comes back.

A *stored* value is the portable form both engines agree on and the chain hashes: None, int, float or str
(decimals, dates, datetimes and json as canonical text, bool as 0/1). An engine may keep it natively.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, get_args

from ..errors import Invalid, LimitExceeded

Type = Literal["text", "int", "float", "decimal", "bool", "date", "datetime", "json", "enum", "ref", "file", "state"]
TYPES: tuple[str, ...] = get_args(Type)
Stored = int | float | str | None
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
DECIMAL_DIGITS = 1000  # far below PostgreSQL's limits, far above anyone's money
JSON_DEPTH = 100


def _wrong(what: str, value: object, needed: str) -> Invalid:
    shown = repr(value)
    return Invalid(f"{what}: {shown[:60]}{'…' if len(shown) > 60 else ''} is not {needed}", hint=f"give {needed}")


def text(what: str, value: Any, limit: int) -> str:
    if type(value) is not str and not isinstance(value, str):
        raise _wrong(what, value, "text")
    if "\0" in value:
        raise Invalid(f"{what}: text can't contain a NUL character", hint="store bytes in a file field")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise Invalid(
            f"{what}: text has a lone surrogate, which is not valid Unicode",
            hint="decode it with the encoding it was written in",
        ) from None
    if size > limit:
        raise LimitExceeded(f"{what}: {size} bytes are more than {limit}", hint="store large content in a file field")
    return value


def _int(what: str, value: Any, limit: int) -> int:
    if type(value) is not int and (not isinstance(value, int) or isinstance(value, bool)):
        raise _wrong(what, value, "an int")
    if not INT_MIN <= value <= INT_MAX:
        raise Invalid(f"{what}: an int has 64 bits", hint="a decimal field holds larger numbers exactly")
    return int(value)


def _float(what: str, value: Any, limit: int) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(what, value, "a float")
    try:
        number = float(value)
    except OverflowError:
        raise _wrong(what, value, "a finite float") from None
    if not math.isfinite(number):
        raise _wrong(what, value, "a finite float")
    return number + 0.0  # -0.0 becomes 0.0: SQLite can't keep the sign


def _decimal(what: str, value: Any, limit: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str | Decimal):
        raise Invalid(f"{what}: {value!r} is not an exact decimal", hint='give a Decimal, an int or text like "1.50"')
    try:
        number = Decimal(value)
    except InvalidOperation:
        raise _wrong(what, value, "a decimal") from None
    if not number.is_finite():
        raise _wrong(what, value, "a finite decimal")
    if abs(number.adjusted()) > DECIMAL_DIGITS or len(number.as_tuple().digits) > DECIMAL_DIGITS:
        raise LimitExceeded(f"{what}: a decimal has at most {DECIMAL_DIGITS} digits")
    return decimal_text(number)


def decimal_text(number: Decimal) -> str:
    """Plain notation, scale kept, no negative zero: what PostgreSQL's numeric prints."""
    shown = format(number, "f")
    return shown[1:] if number.is_zero() and shown[0] == "-" else shown


def _bool(what: str, value: Any, limit: int) -> int:
    if not isinstance(value, bool):
        raise _wrong(what, value, "a bool")
    return int(value)


def _date(what: str, value: Any, limit: int) -> str:
    if isinstance(value, str):
        try:
            value = date.fromisoformat(value)
        except ValueError:
            raise _wrong(what, value, "a date like 2026-01-31") from None
    if not isinstance(value, date) or isinstance(value, datetime):
        raise _wrong(what, value, "a date")
    return value.isoformat()


def _datetime(what: str, value: Any, limit: int) -> str:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise _wrong(what, value, "a datetime like 2026-01-31T12:00:00Z") from None
    if not isinstance(value, datetime):
        raise _wrong(what, value, "a datetime")
    if value.tzinfo is None:
        raise Invalid(f"{what}: {value.isoformat()} has no time zone", hint="give an aware datetime, e.g. with UTC")
    try:
        return datetime_text(value)
    except OverflowError:
        raise _wrong(what, value, "a datetime between the years 1 and 9999 in UTC") from None


def datetime_text(value: datetime) -> str:
    """UTC with microseconds in a fixed width, so that text order is time order."""
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _json(what: str, value: Any, limit: int) -> str:
    return text(what, json_text(what, value), limit)


def recordable(value: Any, depth: int = 0) -> Any:
    """What JSON of both engines can hold of a value, whatever it is: for records of what could not be done."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    if isinstance(value, list | tuple | Mapping) and depth >= 32:
        return "…"
    if isinstance(value, Mapping):
        return {recordable(str(key)): recordable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [recordable(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) <= INT_MAX):
        return value
    if isinstance(value, float) and value == value and abs(value) < 1e300:
        return value
    return recordable(str(value)[:1000]) if not isinstance(value, int) else "…"


def json_text(what: str, value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, no exponent in integral floats (jsonb would make them ints)."""
    return _json_part(what, value, 0)


def _json_part(what: str, value: Any, depth: int) -> str:
    if depth > JSON_DEPTH:
        raise LimitExceeded(f"{what}: json is nested deeper than {JSON_DEPTH}")
    if isinstance(value, str):
        return json.dumps(text(what, value, 1 << 40), ensure_ascii=False)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        if abs(value) > 10**DECIMAL_DIGITS:
            raise LimitExceeded(f"{what}: a number in json has at most {DECIMAL_DIGITS} digits")
        return str(int(value))
    if isinstance(value, float):
        number = _float(what, value, 0)
        return f"{number:.1f}" if number.is_integer() else repr(number)
    if isinstance(value, list | tuple):
        return "[" + ",".join([_json_part(what, item, depth + 1) for item in value]) + "]"
    if isinstance(value, dict):
        if any(not isinstance(key, str) for key in value):
            raise Invalid(f"{what}: keys of a json object are text")
        parts = [f"{_json_part(what, key, 0)}:{_json_part(what, value[key], depth + 1)}" for key in sorted(value)]
        return "{" + ",".join(parts) + "}"
    raise _wrong(what, value, "json: None, bool, int, float, str, list or dict")


HASH = re.compile(r"[0-9a-f]{64}")


def _file(what: str, value: Any, limit: int) -> str:
    if not isinstance(value, str) or not HASH.fullmatch(value):
        raise Invalid(f"{what}: a file field holds the sha256 of its content", hint="give bytes to store them")
    return value


Encode = Callable[[str, Any, int], Stored]
ENCODE: dict[str, Encode] = {
    "text": text, "int": _int, "float": _float, "decimal": _decimal, "bool": _bool, "date": _date,
    "datetime": _datetime, "json": _json, "enum": text, "ref": _int, "file": _file, "state": text,
}  # fmt: skip
_DECODE: dict[str, Callable[[Any], Any]] = {
    "decimal": Decimal, "bool": bool, "date": date.fromisoformat, "datetime": datetime.fromisoformat, "json": json.loads,
}  # fmt: skip


def decoder(kind: str) -> Callable[[Any], Any] | None:
    """What turns a stored value of this type back into Python; None where it already is."""
    return _DECODE.get(kind)


def decode(kind: str, stored: Stored) -> Any:
    turn = _DECODE.get(kind)
    return stored if turn is None or stored is None else turn(stored)


def parameter(value: Any) -> Any:
    """A query parameter in stored form, so that it compares with stored values."""
    if value is None or type(value) in (int, str, float, bytes):
        if type(value) is int and not INT_MIN <= value <= INT_MAX:
            return str(value)
        return value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, Decimal):
        return decimal_text(value)
    if isinstance(value, datetime):
        return _datetime("parameter", value, 0)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, dict | list | tuple):
        return json_text("parameter", value)
    raise Invalid(f"a parameter can't be a {type(value).__name__}")


def canonical(stored: Stored) -> str:
    """The text of a stored value that hashes and comparisons use."""
    if type(stored) is float:
        return struct.pack(">d", stored).hex()
    return stored if type(stored) is str else str(stored)


# Retyping: which conversions exist. What can't be converted becomes null, and `backfill` counts it.
_CONVERT: dict[tuple[str, str], Callable[[Any], Stored]] = {
    ("int", "float"): float,
    ("int", "decimal"): str,
    ("int", "text"): str,
    ("bool", "int"): int,
    ("bool", "text"): lambda v: "true" if v else "false",
    ("decimal", "text"): str,
    ("date", "text"): str,
    ("date", "datetime"): lambda v: f"{v}T00:00:00.000000Z",
    ("datetime", "text"): str,
    ("datetime", "date"): lambda v: v[:10],
    ("enum", "text"): str,
    ("state", "text"): str,
    ("text", "enum"): str,
    ("text", "int"): lambda v: int(v) if re.fullmatch(r"-?[0-9]{1,18}", v) else None,
    ("text", "decimal"): lambda v: (
        decimal_text(Decimal(v)) if re.fullmatch(r"-?[0-9]{1,300}(\.[0-9]{1,300})?", v) else None
    ),
}


def convertible(old: str, new: str) -> bool:
    return old == new or (old, new) in _CONVERT


def convert(old: str, new: str, stored: Stored) -> Stored:
    """A stored value of type `old` as one of type `new`; None when it can't be."""
    if stored is None or old == new:
        return stored
    turn = _CONVERT.get((old, new))
    return None if turn is None else turn(stored)
