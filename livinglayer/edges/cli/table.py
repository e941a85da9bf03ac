"""What a command prints: a table for people, JSON for programs. A stored value can never drive the terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TextIO

NARROWEST = 6  # a column cut below this says nothing; the rows are then shown one under the other
BOLD, DIM, RED, GREEN = "1", "2", "31", "32"


def plain(value: object) -> object:
    """The value in JSON's types: decimals as strings, so that no reader rounds them; times in ISO 8601."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value


def as_json(value: object) -> str:
    """One JSON text; a list has one element a line, for `grep` and `head`. All ASCII: nothing in it drives a terminal."""
    if isinstance(value, list | tuple) and value:
        return "[\n" + ",\n".join(json.dumps(plain(item)) for item in value) + "\n]"
    return json.dumps(plain(value))


def text(value: object) -> str:
    """The value on one line, with everything a terminal would act on spelled out."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return escape(value.isoformat(sep=" ").replace("+00:00", "Z"))
    if isinstance(value, Mapping | list | tuple):
        return escape(json.dumps(plain(value), ensure_ascii=False))
    return escape(str(plain(value)))


def escape(value: str) -> str:
    """Spell out control characters (also C1, bidi overrides, surrogates), which could move the cursor or fake a line."""
    if value.isprintable():
        return value
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()
        for char in value
    )


def width(value: str) -> int:
    """How many cells of a terminal the text takes."""
    if value.isascii():
        return len(value)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in value
    )


def cut(value: str, cells: int) -> str:
    """The text in at most so many cells, with … where something is missing."""
    if width(value) <= cells:
        return value
    kept, used = "", 0
    for char in value:
        used += width(char)
        if used > cells - 1:
            break
        kept += char
    return kept + "…"


class Printer:
    """Where a command's answer goes, and how: for people or, with `json`, for programs."""

    def __init__(self, json: bool = False, out: TextIO | None = None) -> None:
        self.json = json
        self.out = out or sys.stdout
        terminal = self.out.isatty()
        self.colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.columns = shutil.get_terminal_size().columns if terminal else None

    def paint(self, value: str, colour: str) -> str:
        return f"\x1b[{colour}m{value}\x1b[0m" if self.colour and value else value

    def say(self, sentence: str = "", colour: str = "") -> None:
        """A sentence for people; `--json` does not print it."""
        if not self.json:
            print(self.paint(escape(sentence), colour) if colour else escape(sentence), file=self.out)

    def data(self, value: object) -> None:
        """The answer for programs; people do not see it."""
        if self.json:
            print(as_json(value), file=self.out)

    def rows(self, rows: Sequence[Mapping[str, object]], columns: Iterable[str] = (), noun: str = "row") -> None:
        """Rows as an aligned table, or as a JSON array of objects."""
        if self.json:
            self.data(list(rows))
            return
        names = list(columns) or list(dict.fromkeys(name for row in rows for name in row))
        if rows:
            self.table(names, rows)
        self.say(counted(len(rows), noun), DIM)

    def table(self, names: Sequence[str], rows: Sequence[Mapping[str, object]], indent: str = "") -> None:
        heads = [escape(name) for name in names]
        cells = [[text(row.get(name)) for name in names] for row in rows]
        widths = [max(map(width, column)) for column in zip(heads, *cells, strict=True)]
        if self.columns is not None:
            room = self.columns - 2 * (len(widths) - 1) - len(indent)
            if sum(min(size, NARROWEST) for size in widths) > room:
                self.records(heads, cells)
                return
            widths = squeeze(widths, room)
        right = [are_numbers([row.get(name) for row in rows]) for name in names]

        def line(values: Sequence[str], nulls: Sequence[bool] = (), colour: str = "") -> str:
            shown = []
            for at, value in enumerate(values):
                value = cut(value, widths[at])
                pad = " " * (widths[at] - width(value))
                paint = DIM if nulls and nulls[at] else colour
                value = self.paint(value, paint) if paint else value
                shown.append(pad + value if right[at] else value + pad)
            return "  ".join(shown).rstrip()

        print(indent + line(heads, colour=BOLD), file=self.out)
        print(indent + self.paint("  ".join("─" * size for size in widths), DIM), file=self.out)
        for row, values in zip(rows, cells, strict=True):
            print(indent + line(values, [row.get(name) is None for name in names]), file=self.out)

    def fields(self, row: Mapping[str, object]) -> None:
        """One row, field by field; nothing is cut: what is long goes on below."""
        names = [escape(name) for name in row]
        indent = max(map(width, names)) + 2
        for name, value in zip(names, row.values(), strict=True):
            head = self.paint(name, BOLD) + " " * (indent - width(name))
            for line in parts(value):
                for piece in textwrap.wrap(line, max(20, self.columns - indent) if self.columns else 10**9) or [""]:
                    print(head + piece, file=self.out)
                    head = " " * indent

    def records(self, heads: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        """Too many columns for the terminal: each row as a list of its fields."""
        widest = max(map(width, heads))
        for values in cells:
            for head, value in zip(heads, values, strict=True):
                shown = cut(value, max(NARROWEST, (self.columns or 80) - widest - 2))
                print(self.paint(head, BOLD) + " " * (widest - width(head) + 2) + shown, file=self.out)
            print(file=self.out)


def parts(value: object) -> list[str]:
    """The value in lines for people: an entry of a JSON object or a list a line, short lists in one, text as its own lines."""
    if isinstance(value, str):
        return [escape(line) for line in value.splitlines()] or [""]
    if isinstance(value, Mapping):
        return [f"{escape(str(key))}: {text(item)}" for key, item in value.items()]
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return [text(item) for item in value]
    return [", ".join(map(text, value)) if isinstance(value, list | tuple) else text(value)]


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`, `2 branches`, `2 boxes`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith(('ch', 'x')) else 's'}"


def are_numbers(values: Sequence[object]) -> bool:
    there = [value for value in values if value is not None]
    return bool(there) and all(
        isinstance(value, int | float | Decimal) and not isinstance(value, bool) for value in there
    )


def squeeze(widths: Sequence[int], room: int) -> list[int]:
    """Cut the widest columns, as little as needed, until all fit."""
    for widest in range(min(max(widths), room), 0, -1):
        if sum(min(size, widest) for size in widths) <= room:
            return [min(size, widest) for size in widths]
    return list(widths)
