"""The benchmark runs and writes its table. What it measures is nothing a test may depend on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BARRED = [
    "point, main",
    "range, main",
    "scan, main",
    "point, as of",
    "range, as of",
    "scan, as of",
    "point, fork of depth 1",
    "range, fork of depth 1",
    "scan, fork of depth 1",
    "layer.query of one row, against dicts from the driver",
    "governed write of one row, durable",
    "merge of 1,000 rows, against a plain update of as many",
    "bytes per governed write of a 111-byte row",
    "durable governed writes, 64 clients",
    "rows in transactions of 1,000, one insert each",
    "peak memory of a process reading and writing",
]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True)


def cells(report: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading, without its head."""
    lines = report.partition(f"## {heading}\n\n")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_quick_run_writes_every_figure_with_its_bar_and_the_peer(tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    done = bench("--quick", "--rows", "2000", "--engines", "sqlite", "--seconds", "0.01", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = out.read_text()
    assert done.stdout == report
    barred = {row[0]: row for row in cells(report, "SQLite, 2,000 rows") if row[4]}
    assert set(barred) >= set(BARRED)
    assert all(row[5] in ("✓", "✗") for row in barred.values())
    assert [row[0] for row in cells(report, "SQLite, fork and diff")] == ["fork", "diff of 100 changes"]
    peer = cells(report, "SQLite, 2,000 rows, beside DoltLite")
    assert [row[0] for row in peer] == [
        "branch",
        "diff of 100 changes",
        "a change of one row, committed and attributed",
        "merge of 1,000 rows",
        "bytes per such change",
        "the same after DoltLite's garbage collection",
    ]
    assert all(row[1] and row[2] and row[3].endswith("×") for row in peer)


def test_options_that_make_no_sense_are_refused_in_one_sentence() -> None:
    for arguments, sentence in (
        (("--engines", "oracle"), "unknown engine 'oracle'"),
        (("--rows", "many"), "--rows takes numbers"),
        (("--rows", "10"), "at least 2000 rows"),
    ):
        done = bench(*arguments)
        assert done.returncode == 2
        assert sentence in done.stderr
