"""Signatures: the typed arguments and result of a function or a verb."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Invalid
from ..substrate.schema import Field, field_of, field_values
from ..substrate.values import decode

LARGEST = 16 << 20  # bytes of one argument


def field(what: str, name: str, spec: str | Mapping[str, Any]) -> Field:
    """A field from what people write: 'int!', 'ref ticket', or a dict."""
    if not isinstance(name, str) or not name.isidentifier():
        raise Invalid(f"{name!r} can't be the name of an argument of {what}")
    try:
        row = field_values(what, "x", spec, LARGEST)  # an argument may be called what no column could be
    except Invalid as error:
        raise Invalid(error.message.replace(f"{what}.x", f"{what}: {name}"), error.hint) from None
    return field_of({**row, "name": name, "id": 0, "entity": 0, "store": "x_0", "was": None})


@dataclass(frozen=True)
class Signature:
    """What a function takes and gives. Without declared arguments it takes any."""

    arguments: Mapping[str, Field] | None = None
    result: Field | None = None

    @staticmethod
    def of(what: str, given: Mapping[str, Any] | None) -> Signature:
        """From {"arguments": {"id": "int!"}, "result": "json"}; Invalid says what is wrong with it."""
        if given is None:
            return Signature()
        if not isinstance(given, Mapping) or set(given) - {"arguments", "result"}:
            raise Invalid(f"the signature of {what} has arguments and result", hint='{"arguments": {"id": "int!"}}')
        arguments = given.get("arguments")
        if arguments is not None and not isinstance(arguments, Mapping):
            raise Invalid(f"the arguments of {what} are a dict: name -> type")
        result = given.get("result")
        return Signature(
            None if arguments is None else {name: field(what, name, spec) for name, spec in arguments.items()},
            None if result is None else field(what, "result", result),
        )

    def bind(self, what: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments checked, with defaults, as JSON holds them; Invalid names the one that is wrong."""
        if not isinstance(given, Mapping) or any(not isinstance(name, str) for name in given):
            raise Invalid(f"arguments of {what} are a dict, not {given!r:.60}")
        if self.arguments is None:
            return dict(given)
        if unknown := sorted(set(given) - set(self.arguments)):
            takes = ", ".join(self.arguments) or "nothing"
            raise Invalid(f"{what} has no argument {unknown[0]!r}", hint=f"it takes {takes}")
        bound: dict[str, Any] = {}
        for name, each in self.arguments.items():
            if name not in given and each.initial is None and not each.required:
                continue  # the code's own default holds
            value = given.get(name, each.initial)
            if value is None and each.required:
                raise Invalid(f"{what} needs the argument {name!r}", hint=f"{name}={each.type}")
            bound[name] = plain(each, each.encode(what, value, LARGEST))
        return bound

    def parse(self, what: str, words: Mapping[str, str]) -> dict[str, Any]:
        """Arguments from words of a command line, by their types; without types, JSON where it is some."""
        return {name: self._parsed(what, name, text) for name, text in words.items()}

    def _parsed(self, what: str, name: str, text: str) -> Any:
        each = (self.arguments or {}).get(name)
        if each is not None and each.type not in ("int", "float", "bool", "json", "ref"):
            return text
        try:
            return json.loads(text)
        except ValueError:
            if each is None or each.type == "json":
                return text
            raise Invalid(f"{what}: {name}={text} is not {each.type}") from None

    def check(self, what: str, value: Any) -> Any:
        """The result as JSON holds it; Invalid when it is not what the signature says."""
        if self.result is None:
            return value
        if value is None and self.result.required:
            raise Invalid(f"{what} returned nothing, not {self.result.type}")
        try:
            return plain(self.result, self.result.encode(what, value, LARGEST))
        except Invalid as error:
            raise Invalid(f"{what} returned the wrong type: {error.message}", error.hint) from None


def plain(each: Field, stored: Any) -> Any:
    """A stored value as JSON holds it."""
    return decode(each.type, stored) if each.type in ("json", "bool") else stored


def jsonable(value: Any) -> Any:
    """For json.dumps: decimals, dates and times are texts."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


_ENCODER = json.JSONEncoder(default=jsonable, ensure_ascii=False, separators=(",", ":"))


def dumps(value: Any) -> bytes:
    """JSON as bytes; half a character, which UTF-8 has no bytes for, stays the escape that JSON has for it."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")
