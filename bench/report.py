"""The figures as Markdown tables, each with its bar and whether it was met."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TITLES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
HEAD = ["operation", "plain", "layer", "figure", "bar", "met"]


@dataclass(frozen=True)
class Line:
    """One figure; `low` is the most it may be, `high` the least, neither when it is only for information."""

    operation: str
    figure: float
    unit: str  # "×", or what the figure counts
    low: float | None = None
    high: float | None = None
    plain: float | None = None  # seconds
    ours: float | None = None
    key: str = ""  # under which another table finds it

    @property
    def met(self) -> bool | None:
        """Whether the bar was met, at the bar's own precision: 1.04 meets a bar of 1.0, 1.06 does not."""
        if self.low is not None:
            return round(self.figure, len(exact(self.low).partition(".")[2])) <= self.low
        return None if self.high is None else self.figure >= self.high

    def cells(self) -> list[str]:
        bar = (
            f"≤ {exact(self.low)}" if self.low is not None else f"≥ {exact(self.high)}" if self.high is not None else ""
        )
        return [
            self.operation,
            duration(self.plain),
            duration(self.ours),
            amount(self.figure, self.unit),
            bar,
            {True: "✓", False: "✗", None: ""}[self.met],
        ]


@dataclass(frozen=True)
class Failed:
    """A measurement that could not be taken, which no bar forgives."""

    operation: str
    error: str
    met = False
    key = ""

    def cells(self) -> list[str]:
        return [self.operation, "", "", " ".join(self.error.split()).replace("|", "¦")[:70], "", "✗"]


def exact(bar: float) -> str:
    return f"{bar:,}"


def amount(figure: float, unit: str) -> str:
    return f"{figure:.2f}×" if unit == "×" else f"{figure:,.0f} {unit}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    size, name = next((pair for pair in ((1.0, "s"), (1e-3, "ms")) if seconds >= pair[0]), (1e-6, "µs"))
    return f"{seconds / size:.3g} {name}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def keep_part(path: Path, mark: str, text: str) -> None:
    """Write one part of the results (it begins with the line `mark`), leaving the others."""
    parts = re.split(r"(?m)^(?=# )", path.read_text() if path.exists() else "")
    kept = [part.strip() for part in parts if part.strip() and not part.startswith(mark + "\n")]
    path.write_text("\n\n".join([*kept, text.strip()]) + "\n")
