"""What commands print: aligned, cut to the terminal, and never able to drive it."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest

from livinglayer.edges.cli.table import Printer, as_json, cut, escape, squeeze, text, width


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(rows: list[dict[str, object]], columns: int | None = None) -> str:
    out = io.StringIO()
    printer = Printer(out=out)
    printer.columns = columns
    printer.rows(rows)
    return out.getvalue()


def test_columns_are_aligned_numbers_to_the_right() -> None:
    assert show([{"id": 7, "name": "bolt"}, {"id": 12, "name": None}]) == (
        "id  name\n──  ────\n 7  bolt\n12  null\n2 rows\n"
    )


def test_no_rows_say_so() -> None:
    assert show([]) == "0 rows\n"


def test_a_wide_value_is_cut_to_the_terminal_and_kept_whole_in_a_pipe() -> None:
    rows: list[dict[str, object]] = [{"id": 1, "text": "x" * 200, "end": "ok"}]
    assert all(len(line) <= 60 for line in show(rows, columns=60).splitlines())
    assert "…" in show(rows, columns=60) and "ok" in show(rows, columns=60)
    assert "x" * 200 in show(rows)


def test_too_many_columns_are_shown_one_under_the_other() -> None:
    shown = show([{f"column{n}": "a longer value" for n in range(20)}], columns=60)
    assert "column19  a longer value\n" in shown
    assert all(len(line) <= 60 for line in shown.splitlines())


def test_one_row_is_shown_whole_whatever_the_width() -> None:
    row: dict[str, object] = {
        "name": "a",
        "reads": {"ticket": ["title"], "note": 1},
        "stops": [{"denials": 3}, {"repeats": 2}],
        "says": "one\x1b[2J\ntwo " + "word " * 9,
    }
    out = io.StringIO()
    printer = Printer(out=out)
    printer.columns = 30
    printer.fields(row | {"names": ["a", "b"], "none": None})
    assert (
        out.getvalue()
        == """\
name   a
reads  ticket: ["title"]
       note: 1
stops  {"denials": 3}
       {"repeats": 2}
says   one\\x1b[2J
       two word word word word
       word word word word
       word
names  a, b
none   null
"""
    )


def test_wide_characters_count_as_two_cells() -> None:
    assert (width("漢字"), width("é"), width("e\u0301")) == (4, 1, 1)
    assert cut("漢字漢字", 5) == "漢字…"
    assert show([{"a": "漢", "b": 1}, {"a": "x", "b": 2}]).splitlines()[2:4] == ["漢  1", "x   2"]


@pytest.mark.parametrize(
    "attack",
    [
        "\x1b[2J",
        "\x1b]0;title\x07",
        "\x9b31m",
        "a\rb",
        "line\nline",
        "\u202egnp.exe",
        "\x00",
        "\x7f",
        "\ud800",
        "\u2028",
    ],
)
def test_a_stored_terminal_escape_cannot_run(attack: str) -> None:
    out = Terminal()
    printer = Printer(out=out)
    printer.colour, printer.columns = False, 80
    printer.rows([{attack: attack, "json": {"key": attack}}])
    printer.say(f"sentence with {attack}")
    assert all(char.isprintable() or char == "\n" for char in out.getvalue())
    assert out.getvalue().count("\n") == 5  # no value added a line
    assert all(char.isprintable() or char in "\n\x7f" for char in as_json([{attack: attack}]))


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert (Printer(out=Terminal()).colour, Printer(out=io.StringIO()).colour) == (True, False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert Printer(out=Terminal()).colour is False


def test_json_keeps_values_exactly() -> None:
    row = {
        "price": Decimal("0.10"),
        "big": 2**63 - 1,
        "at": datetime(2026, 3, 1, 12, tzinfo=UTC),
        "day": date(2026, 3, 1),
        "empty": "",
        "none": None,
        "nested": {"price": Decimal("1E+3"), "list": (1, True)},
        "bytes": b"\x00\xff",
    }
    assert json.loads(as_json([row])) == [
        {
            "price": "0.10",
            "big": 9223372036854775807,
            "at": "2026-03-01T12:00:00+00:00",
            "day": "2026-03-01",
            "empty": "",
            "none": None,
            "nested": {"price": "1000", "list": [1, True]},
            "bytes": "00ff",
        }
    ]
    assert as_json([]) == "[]"


def test_text_of_values() -> None:
    assert [text(value) for value in (True, Decimal("0.10"), datetime(2026, 3, 1, tzinfo=UTC), {"a": [1]}, "")] == [
        "true",
        "0.10",
        "2026-03-01 00:00:00Z",
        '{"a": [1]}',
        "",
    ]


def test_squeeze_cuts_the_widest_only() -> None:
    assert squeeze([3, 100, 5], 40) == [3, 32, 5]
    assert squeeze([3, 4], 40) == [3, 4]
    assert squeeze([50, 50], 20) == [10, 10]


def test_escape_leaves_letters_alone() -> None:
    assert escape("Größe 漢字 🔩\u00a0") == "Größe 漢字 🔩\u00a0"
