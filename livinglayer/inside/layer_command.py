"""The command `layer` in a box: rows as tables for people, `--json` for programs, one clear line when it is refused."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import json
import unicodedata

import layer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

USAGE = """\
usage: layer query SQL [NAME=VALUE…]              rows of one SELECT; SQL - is read from stdin
       layer projection PROJECTION [NAME=VALUE…]  rows of a named projection
       layer insert ENTITY NAME=VALUE…            add a row, print its id
       layer update ENTITY ID NAME=VALUE…         set fields of a row       [--expect VERSION]
       layer delete ENTITY ID                     remove a row              [--expect VERSION]
       layer upsert ENTITY NAME=VALUE… --on NAME  update the row that has this value, or add one
       layer call FUNCTION [NAME=VALUE…]          run a function, print its result
       layer secret NAME                          print a secret, where it may be read
       layer emit NAME [NAME=VALUE…]              tell of something that happened
       layer artifact PATH [--name NAME]          keep a file with the execution, print its digest
       layer delegate CONTRACT TASK               have an agent of another contract do it, print its end
       layer answer TEXT                          give the final answer of an agent; - reads it from stdin
       layer slice                                print the path of a fresh local SQLite file of the slice
       layer me                                   who this execution is and what it may do
A VALUE is JSON where it is JSON (3, 2.5, true, null, "3"), else the text itself. In place of NAME=VALUE words there may be
one JSON object. --json answers in JSON. Exit codes: 0 done, 1 failed, 2 wrong request, 3 not allowed, 4 not found,
5 conflict, 6 too much, 7 damaged or too new, 8 unavailable, 9 too slow."""

# verb: words it needs besides NAME=VALUE ones, whether it takes those, its flags
VERBS: dict[str, tuple[tuple[str, ...], bool, tuple[str, ...]]] = {
    "query": (("SQL",), True, ()),
    "projection": (("PROJECTION",), True, ()),
    "insert": (("ENTITY",), True, ()),
    "update": (("ENTITY", "ID"), True, ("--expect",)),
    "delete": (("ENTITY", "ID"), False, ("--expect",)),
    "upsert": (("ENTITY",), True, ("--on",)),
    "call": (("FUNCTION",), True, ()),
    "secret": (("NAME",), False, ()),
    "emit": (("NAME",), True, ()),
    "artifact": (("PATH",), False, ("--name",)),
    "delegate": (("CONTRACT", "TASK"), False, ()),
    "answer": (("TEXT",), False, ()),
    "slice": ((), False, ()),
    "me": ((), False, ()),
}


def main(words: list[str]) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    if any(word in ("-h", "--help") for word in words) or words[:1] == ["help"]:
        print(USAGE)
        return 0
    try:
        if not words:
            raise layer.Invalid("a command is needed", hint="layer --help")
        show(words[0], run(words[0], words[1:]), as_json)
        sys.stdout.flush()
        return 0
    except layer.LayerError as error:
        complain(error.code, str(error), error.hint, as_json)
        return int(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has seen enough
        return 0
    except OSError as error:
        complain(
            "os", f"{error.strerror or error}" + (f": {error.filename!r}" if error.filename else ""), None, as_json
        )
        return 1
    except KeyboardInterrupt:
        return 130


def run(verb: str, words: list[str]) -> Any:
    if verb not in VERBS:
        raise layer.Invalid(f"there is no command {verb!r}", hint="layer --help")
    needed, pairs, known = VERBS[verb]
    flags: dict[str, str] = {}
    rest: list[str] = []
    waiting = iter(words)
    for word in waiting:
        flag, equals, given = word.partition("=")
        if flag in known:
            value = given if equals else next(waiting, None)
            if value is None:
                raise layer.Invalid(f"{flag} needs a value", hint="layer --help")
            flags[flag] = value
        elif word.startswith("--") and len(rest) < len(needed) and not (verb == "query"):
            raise layer.Invalid(f"layer {verb} takes no {flag}", hint="layer --help")
        else:
            rest.append(word)
    if len(rest) < len(needed):
        raise layer.Invalid(f"layer {verb} needs {' '.join(needed[len(rest) :])}", hint="layer --help")
    own, more = rest[: len(needed)], rest[len(needed) :]
    if more and not pairs:
        raise layer.Invalid(f"layer {verb} takes no {more[0]!r}", hint="layer --help")
    expect = whole(flags["--expect"], "--expect") if "--expect" in flags else None
    given_values = fields(more, rows=verb == "insert")
    if verb == "query":
        return layer.query(sys.stdin.read() if own[0] == "-" else own[0], given_values or None)
    if verb == "insert":
        return layer.insert(own[0], given_values)
    if verb == "update":
        return layer.update(own[0], whole(own[1], "ID"), given_values, expect=expect)
    if verb == "delete":
        return layer.delete(own[0], whole(own[1], "ID"), expect=expect)
    if verb == "upsert":
        if "--on" not in flags:
            raise layer.Invalid("layer upsert needs --on NAME", hint="layer --help")
        return layer.upsert(own[0], given_values, on=flags["--on"].split(","))
    if verb == "answer":
        return layer.answer(sys.stdin.read().strip() if own[0] == "-" else own[0])
    if verb == "artifact":
        return layer.artifact(own[0], flags.get("--name"))
    return getattr(layer, verb)(*own, **given_values)


def whole(word: str, what: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise layer.Invalid(f"{what} {word!r} is not a number") from None


def fields(words: list[str], rows: bool = False) -> Any:
    """NAME=VALUE words, or one JSON object (where `rows` are taken, also a list of them)."""
    if len(words) == 1 and words[0][:1] in ("{", "["):
        try:
            value = json.loads(words[0])
        except ValueError as error:
            raise layer.Invalid(f"{words[0]!r} is not JSON: {error}") from None
        if not isinstance(value, dict) and not rows:
            raise layer.Invalid(f"{words[0]!r} is not a JSON object")
        return value
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise layer.Invalid(f"{word!r} is not NAME=VALUE", hint="layer --help")
        try:
            found[name] = json.loads(text, parse_constant=lambda constant: constant)
        except ValueError:
            found[name] = text
    return found


# -- what is printed ---------------------------------------------------------------------------------------------------


def show(verb: str, value: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(value))
    elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        table(value)
    elif verb in ("query", "projection"):
        print("0 rows")
    elif isinstance(value, dict):
        wide = max((width(escape(str(key))) for key in value), default=0)
        for key, part in value.items():
            name = escape(str(key))
            print(f"{name}{' ' * (wide - width(name))}  {text(part)}")
    elif verb == "secret" and isinstance(value, str):
        print(value)  # as it is, for $(layer secret NAME)
    elif value is not None:
        print(value if isinstance(value, str) and not sys.stdout.isatty() else text(value))


def table(rows: list[dict[str, Any]]) -> None:
    """Aligned columns, numbers to the right."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[text(row.get(name)) for name in names] for row in rows]
    heads = [escape(name) for name in names]
    widths = [max(map(width, column)) for column in zip(heads, *cells)]
    right = []
    for name in names:
        kinds = {type(row.get(name)) for row in rows} - {type(None)}
        right.append(bool(kinds) and kinds <= {int, float})
    lines = [heads, ["─" * size for size in widths], *cells]
    for line in lines:
        shown = []
        for at, cell in enumerate(line):
            pad = " " * (widths[at] - width(cell))
            shown.append(pad + cell if right[at] else cell + pad)
        print("  ".join(shown).rstrip())
    print(f"{len(rows)} row{'' if len(rows) == 1 else 's'}")


def text(value: Any) -> str:
    """The value on one line, with everything a terminal would act on spelled out."""
    if isinstance(value, str):
        return escape(value)
    return escape(json.dumps(value, ensure_ascii=False))


def escape(value: str) -> str:
    if value.isprintable():
        return value
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()
        for char in value
    )


def width(value: str) -> int:
    if value.isascii():
        return len(value)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in value
    )


def complain(code: str, message: str, hint: str | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": code, "message": message, "hint": hint}), file=sys.stderr)
    else:
        print(f"layer: {escape(message)}" + (f" ({escape(hint)})" if hint else ""), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
