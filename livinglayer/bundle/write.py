"""Write: definitions as the files of a bundle, in one canonical form: the same definitions are always the same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import Invalid
from . import documents, files
from .load import LANGUAGES, LISTED, NAMED, Bundle, Seed

WIDTH = 100  # columns that something on one line may take
ROWS = 50  # of a seed, written where it is; more have a file of their own
KINDS = {
    "schema": ("entities",), "policy": ("roles", "principals", "grants", "quotas"), "blueprints": ("blueprints",),
    "functions": ("functions",), "triggers": ("triggers",), "projections": ("projections",), "contracts": ("contracts",),
    "pages": ("components",),
}  # fmt: skip
ENDS = {language: end for end, language in LANGUAGES.items()} | {"executable": ".sh"}
PLAIN = re.compile(r"[^\W\d][\w ./@+()<>='!?;%$^~*|&-]*")  # what needs no quotes; YAML allows more
BLOCK = re.compile(r"[^\W\d](?:[\w ./@+()<>='!?;%$^~*|&,\[\]{}\"-]|:(?=\w))*")  # the same, where no bracket is open
# Words that other readers of YAML take for something else.
SHY = frozenset("y n yes no on off true false null nan inf".split())
ODD = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")


def files_of(bundle: Bundle) -> dict[str, bytes]:
    """The files that say what a bundle does, however it was written before; documents beside them are not among them."""
    about = {
        "name": bundle.name,
        "version": bundle.version,
        "description": bundle.description,
        "requires": bundle.requires,
    }
    made = {"bundle.yaml": document("bundle", {key: value for key, value in about.items() if value})}
    told: dict[str, Any] = {kind: getattr(bundle, kind) for kind in (*NAMED, *LISTED)}
    told["functions"] = {name: _function(made, name, spec) for name, spec in bundle.functions.items()}
    for part, kinds in KINDS.items():
        if any(told[kind] for kind in kinds):
            made[f"{part}.yaml"] = document(part, {kind: told[kind] for kind in kinds if told[kind]})
    if bundle.seeds:
        made["seeds.yaml"] = document("seeds", {"seeds": [_seed(made, seed) for seed in bundle.seeds]})
    for migration in bundle.migrations:
        made[f"migrations/{migration.version}.yaml"] = document("migrations", {"steps": migration.steps})
    return files.check(made)


def document(part: str, value: Any) -> bytes:
    """One YAML file: keys in the order of the schema, definitions by name, text of several lines as it is."""
    schema = documents.schema()["$defs"]
    return text(_ordered(value, schema[part], schema)).encode()


def code_file(name: str, language: str) -> str:
    """Where the code of a function lies."""
    return f"functions/{name}{ENDS[language]}"


def _function(made: dict[str, bytes], name: str, spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function whose code has a file, where it can have one."""
    rest = {key: value for key, value in spec.items() if key != "code"}
    path, data = code_file(name, spec.get("language", "python")), spec["code"].encode("utf-8", "surrogatepass")
    named = path.isascii() and len(path) <= files.PATH_LENGTH
    if not named or len(data) > files.FILE_BYTES or _read(data) != spec["code"]:
        return spec
    made[path] = data
    if spec.get("language") != "executable":
        rest.pop("language", None)  # its file tells
    return {"file": path, **rest}


def _read(data: bytes) -> str | None:
    try:
        return documents.text("", data)
    except Invalid:
        return None


def _seed(made: dict[str, bytes], seed: Seed) -> Mapping[str, Any]:
    told: dict[str, Any] = {"entity": seed.entity, "key": list(seed.key)}
    if len(seed.rows) <= ROWS:
        return {**told, "rows": [dict(row) for row in seed.rows]}
    path = next(
        path for n in range(1, 10_000) if (path := f"seeds/{seed.entity}{f'-{n}' if n > 1 else ''}.jsonl") not in made
    )
    made[path] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in seed.rows).encode()
    return {**told, "file": path}


# Order


def _ordered(value: Any, schema: Mapping[str, Any], known: Mapping[str, Any], key: str = "") -> Any:
    """The same with its keys in order: as the schema lists them, else by name; fields, states and rows stay as they are."""
    schema = _meant(value, schema, known)
    if isinstance(value, Mapping):
        listed = schema.get("properties", {})
        names = sorted(value) if not listed and key not in ("fields", "transitions", "rows") else list(value)
        if listed:
            names = [name for name in listed if name in value] + sorted(set(value) - set(listed))
        if key == "transitions":
            return {name: list(value[name]) for name in names}
        rest = schema.get("additionalProperties")
        rest = rest if isinstance(rest, Mapping) else {}
        made = {name: _ordered(value[name], listed.get(name, rest), known, name if listed else "") for name in names}
        if isinstance(made.get("transitions"), dict) and isinstance(made.get("initial"), str):
            made["transitions"] = _walked(made["transitions"], made["initial"])
        return made
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = schema.get("items", {})
        return [_ordered(each, items, known, "rows" if key == "rows" else "") for each in value]
    return value


def _meant(value: Any, schema: Mapping[str, Any], known: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a value follows, of those it could."""
    if "$ref" in schema:
        return _meant(value, known[schema["$ref"].rpartition("/")[2]], known)
    for each in schema.get("oneOf", ()) if "properties" not in schema else ():
        found = _meant(value, each, known)
        kind = {"object": Mapping, "array": list}.get(found.get("type", ""))
        if kind is not None and isinstance(value, kind) and set(found.get("required", ())) <= set(value):
            return found
    return schema


def _walked(moves: Mapping[str, Any], first: str) -> dict[str, Any]:
    """States in the order in which they are come to."""
    order, waiting = [], [first, *sorted(moves)]
    while waiting:
        state = waiting.pop(0)
        if state in moves and state not in order:
            order.append(state)
            waiting = [*moves[state], *waiting]
    return {state: moves[state] for state in order}


# YAML


def text(value: Any) -> str:
    """A document as YAML."""
    if not isinstance(value, Mapping | list) or not value:
        return _flow(value) + "\n"
    return "\n".join(_lines(value, 0, 0)) + "\n"


def _lines(value: Any, indent: int, depth: int) -> Iterator[str]:
    """The lines of a mapping or list that is not empty."""
    space = " " * indent
    if isinstance(value, Mapping):
        for key, each in value.items():
            open = isinstance(each, Mapping) and (depth < 2 or (depth == 2 and key == "fields"))
            yield from _entry(f"{space}{_scalar(key, PLAIN)}:", each, indent, depth + 1, open)
        return
    for each in value:
        if _is_block(each, len(space) + 2, False):
            first, *rest = _lines(each, indent + 2, depth + 1)
            yield f"{space}- {first.lstrip()}"
            yield from rest
        else:
            yield from _entry(f"{space}-", each, indent, depth + 1, False)


def _entry(start: str, value: Any, indent: int, depth: int, open: bool) -> Iterator[str]:
    if isinstance(value, str) and _is_literal(value):
        yield f"{start} {'|' if value.endswith(chr(10)) else '|-'}"
        for line in value.removesuffix("\n").split("\n"):
            yield f"{' ' * (indent + 2)}{line}" if line else ""
    elif _is_block(value, len(start) + 1, open):
        yield start
        yield from _lines(value, indent + 2, depth)
    else:
        yield f"{start} {_scalar(value, BLOCK) if isinstance(value, str) else _flow(value)}"


def _is_block(value: Any, start: int, open: bool) -> bool:
    """Whether a value has lines of its own: definitions always, what they hold when it is long or not simple."""
    if not isinstance(value, Mapping | list) or not value:
        return False
    return open or not _simple(value, 3) or start + len(_flow(value)) > WIDTH


def _simple(value: Any, depth: int) -> bool:
    if isinstance(value, str):
        return not _is_literal(value)
    if isinstance(value, Mapping | list):
        return depth > 0 and all(
            _simple(each, depth - 1) for each in (value.values() if isinstance(value, Mapping) else value)
        )
    return True


def _is_literal(value: str) -> bool:
    """Whether text can be written line by line, with nothing lost."""
    return (
        "\n" in value.removesuffix("\n")
        and value[0] not in " \t\n"
        and not value.endswith("\n\n")
        and not documents.CONTROL.search(value)
        and not ODD.search(value)
        and "\r" not in value
        and not any(line and not line.strip() for line in value.split("\n"))
    )


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key, PLAIN)}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(each) for each in value) + "]"
    return _scalar(value, PLAIN)


def _scalar(value: Any, plain: re.Pattern[str]) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if (
        plain.fullmatch(value)
        and value.lower() not in SHY
        and not value.endswith(" ")
        and " #" not in value
        and value.isprintable()
    ):
        return str(value)
    return ODD.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
