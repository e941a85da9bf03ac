"""Documents: YAML 1.2 as JSON knows it. No tags, anchors or aliases, no key twice, nothing deep; dates stay text."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from ..errors import Invalid

DEPTH = 50
NODES = 1_000_000
KEY_LENGTH = 200
MOST_PROBLEMS = 20  # that are told at once
INTEGER = re.compile(r"[-+]?[0-9]+")
OTHER_BASE = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
UNENDING = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
WORDS: Mapping[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# Nothing that a terminal could take for a command, and nothing that is half a character.
CONTROL = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def wrong(file: str, path: str, why: str, hint: str | None = None) -> Invalid:
    """What every error of a bundle looks like: the file, the place in it, what is wrong."""
    return Invalid(f"{file}: {path}: {why}" if path else f"{file}: {why}", hint)


def text(file: str, data: bytes) -> str:
    """A file as text: UTF-8, its lines ended by a newline, without the mark that some editors put first."""
    try:
        found = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong(file, "", f"is not UTF-8: byte {error.start + 1} is 0x{data[error.start]:02x}") from None
    if "\0" in found:
        raise wrong(file, "", f"line {found.count(chr(10), 0, found.index(chr(0))) + 1} has a NUL character")
    return found.replace("\r\n", "\n")


def parse(file: str, data: bytes) -> Any:
    """What a YAML file says, as dicts, lists, texts, numbers, true, false and null; Invalid names the line."""
    try:
        return _Building(file).value(text(file, data))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or getattr(error, "reason", None) or "can't be read"
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        raise wrong(file, where, f"is not YAML: {said}") from None


class _Building:
    """One document, made of the parser's events without recursion."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.nodes = 0

    def wrong(self, event: Any, why: str, hint: str | None = None) -> Invalid:
        return wrong(self.file, f"line {event.start_mark.line + 1}", why, hint)

    def value(self, content: str) -> Any:
        top: list[Any] = []
        stack: list[Any] = [top]
        keys: list[Any] = [None]  # of each mapping: the key that waits for its value
        documents = 0
        for event in yaml.parse(content, Loader=_LOADER):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.wrong(event, "there is one document in a file", "remove the second '---'")
                if event.tags or event.version not in (None, (1, 2)):
                    raise self.wrong(event, "directives have no place in a bundle", "remove the lines with a %")
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent | yaml.ScalarEvent):
                made = self.made(event)
                container = stack[-1]
                if isinstance(container, list):
                    container.append(made)
                elif keys[-1] is _NONE:
                    if not isinstance(made, str):
                        raise self.wrong(event, f"a key is text, not {made!r:.60}", "put it in quotes")
                    if not made or not made.isprintable() or len(made) > KEY_LENGTH:
                        raise self.wrong(event, f"{made!r:.60} can't be a key")
                    if made in container:
                        raise self.wrong(event, f"{made!r:.60} is there twice")
                    keys[-1] = made
                    continue
                else:
                    container[keys[-1]] = made
                    keys[-1] = _NONE
                if isinstance(made, dict | list):
                    stack.append(made)
                    keys.append(_NONE)
                    if len(stack) > DEPTH + 1:
                        raise self.wrong(event, f"is nested more than {DEPTH} deep")
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                stack.pop()
                keys.pop()
            elif isinstance(event, yaml.AliasEvent):
                raise self.wrong(event, "aliases (*name) have no place in a bundle", "write it out")
        return top[0] if top else None

    def made(self, event: Any) -> Any:
        self.nodes += 1
        if self.nodes > NODES:
            raise self.wrong(event, f"has more than {NODES:,} values", "rows go into seeds/NAME.jsonl")
        if event.anchor is not None:
            raise self.wrong(event, "anchors (&name) have no place in a bundle", "write it out where it is used")
        if event.tag is not None:
            raise self.wrong(event, f"tags ({event.tag:.60}) have no place in a bundle", "say it in plain values")
        if isinstance(event, yaml.MappingStartEvent):
            return {}
        if isinstance(event, yaml.SequenceStartEvent):
            return []
        if found := CONTROL.search(event.value):
            raise self.wrong(event, f"has the control character U+{ord(found[0]):04X}")
        return event.value if event.style else self.plain(event)

    def plain(self, event: Any) -> Any:
        """A scalar without quotes, by the core schema of YAML 1.2."""
        said: str = event.value
        if said in WORDS:
            return WORDS[said]
        if UNENDING.fullmatch(said):
            raise self.wrong(event, f"{said} is no number that can be stored", "put it in quotes if it is text")
        if said[0] not in "-+.0123456789":
            return said
        if INTEGER.fullmatch(said) or OTHER_BASE.fullmatch(said):
            number = int(said, 10 if said[1:2] not in ("o", "x") else 0) if len(said) < 25 else 2**63
            if not -(2**63) <= number < 2**63:
                raise self.wrong(event, f"{said:.40} has more than 64 bits", "put it in quotes: a decimal is text")
            return number
        if FLOAT.fullmatch(said):
            measure = float(said) if len(said) < 400 else math.inf
            if math.isinf(measure):
                raise self.wrong(event, f"{said:.40} is too large for a number", "put it in quotes: a decimal is text")
            return measure
        return said


_NONE: Any = object()  # no key waits for a value


# The published schema


@lru_cache(1)
def schema() -> dict[str, Any]:
    """The JSON Schema of every file of a bundle."""
    found: dict[str, Any] = json.loads(schema_text())
    return found


def schema_text() -> str:
    """The same as it is published."""
    return resources.files(__package__).joinpath("schema.json").read_text("utf-8")


@lru_cache(32)
def _validator(part: str) -> Any:
    from jsonschema import Draft202012Validator, ValidationError, validators  # takes a tenth of a second

    def pattern(_: Any, wanted: str, value: Any, __: Any) -> Iterator[ValidationError]:
        # In Python `$` also stands before a newline at the end; in the editors that read the same schema it does not.
        if isinstance(value, str) and not re.search(re.sub(r"\$$", r"\\Z", wanted), value):
            yield ValidationError("does not match")

    kind: Any = validators.extend(Draft202012Validator, {"pattern": pattern})  # type: ignore[no-untyped-call]
    return kind({"$ref": f"#/$defs/{part}", "$defs": schema()["$defs"]})


def problems(part: str, file: str, value: Any) -> list[Invalid]:
    """What is wrong with the shape of a document; nothing when it is as the schema says."""
    found = itertools.islice(_validator(part).iter_errors(value), MOST_PROBLEMS)
    # A misspelt key is also one that is missing; what was misspelt is the better thing to hear first.
    return [explained(file, error) for error in sorted(found, key=lambda error: error.validator == "required")]


def explained(file: str, error: Any) -> Invalid:
    """An error of the validator in words that name the place, the value and what was wanted."""
    value, limit = error.instance, error.validator_value
    place, said = place_of(error.absolute_path), error.schema if isinstance(error.schema, dict) else {}
    hint = said.get("description")
    match error.validator:
        case "oneOf" | "anyOf" if all(isinstance(each, dict) and set(each) == {"required"} for each in limit):
            names = [each["required"][0] for each in limit]
            given = [name for name in names if isinstance(value, dict) and name in value]
            return wrong(
                file, place, f"has {' and '.join(given) or 'none'} of {', '.join(names)}", "it needs one of them"
            )
        case "oneOf" | "anyOf" if error.context:
            return explained(file, _likely(error))
        case "additionalProperties":
            known = list(said.get("properties", ()))
            unknown = next(key for key in value if key not in known)
            return wrong(file, place, f"there is no {unknown!r:.60} here", did_you_mean(unknown, known))
        case "required":
            missing = next(key for key in limit if key not in value)
            more = said.get("properties", {}).get(missing, {})
            more = schema()["$defs"][more["$ref"].rpartition("/")[2]] | more if "$ref" in more else more
            return wrong(file, place, f"{missing!r} is missing", more.get("description") or hint)
        case "type":
            wanted = limit if isinstance(limit, list) else [limit]
            return wrong(file, place, f"{_short(value)} is not {' or '.join(_TYPES[each] for each in wanted)}", hint)
        case "enum":
            near = did_you_mean(value, limit) if isinstance(value, str) else ", ".join(limit)
            return wrong(file, place, f"{_short(value)} is none of its values", near)
        case "pattern" | "const":
            what = (
                "can't be a name here" if "propertyNames" in error.absolute_schema_path else "is not what belongs here"
            )
            return wrong(file, place, f"{_short(value)} {what}", hint or f"it is {limit}")
        case "not":
            return wrong(file, place, f"has both {' and '.join(limit['required'])}", "it needs one of them")
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
            word = {
                "minimum": "below",
                "exclusiveMinimum": "not above",
                "maximum": "above",
                "exclusiveMaximum": "not below",
            }
            return wrong(file, place, f"{_short(value)} is {word[error.validator]} {limit}", hint)
        case "minItems" | "minLength" | "minProperties":
            return wrong(file, place, "is empty", hint)
        case "maxLength":
            return wrong(file, place, f"{_short(value)} has more than {limit} characters", hint)
        case "maxProperties":
            return wrong(file, place, f"has {', '.join(value)}, and may have only one", hint)
        case "uniqueItems":
            return wrong(file, place, "has something twice", hint)
    return wrong(file, place, "is not what belongs here", hint)


def _likely(error: Any) -> Any:
    """Of several shapes that a value could have, the first thing wrong with the one that was meant."""
    shapes: dict[int, list[Any]] = {}
    for each in error.context:
        shapes.setdefault(each.relative_schema_path[0], []).append(each)

    def distance(found: list[Any]) -> tuple[bool, bool]:
        here = {each.validator for each in found if not each.relative_path}
        return "type" in here, "required" in here or "const" in here

    return min(shapes.values(), key=distance)[0]


_TYPES = {
    "object": "a mapping", "array": "a list", "string": "text", "integer": "a whole number", "number": "a number",
    "boolean": "true or false", "null": "null",
}  # fmt: skip


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else shown[:59] + "…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the names that are nearest, or those there are."""
    names = list(itertools.islice(known, 500))
    near = difflib.get_close_matches(name[:60], names, 3, 0.6)
    return f"did you mean {' or '.join(near)}?" if near else ", ".join(names[:20]) + (" …" if len(names) > 20 else "")


def place_of(steps: Iterable[Any]) -> str:
    """A place in a document: contracts.triage.approvals[0].by."""
    made = ""
    for step in steps:
        made += f"[{step}]" if isinstance(step, int) else f"{'.' if made else ''}{step:.60}"
    return made
