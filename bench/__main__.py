"""Measure the substrate on both engines against a plain table, with DoltLite as peer in the same run."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from bench.boxes import MARK
from bench.report import TITLES

HERE = Path(__file__).parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rows", help="table sizes (default: 100000,1000000; quick: 2000,20000)")
    parser.add_argument("--engines", default=",".join(TITLES), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small tables and few rounds: a look, not a measurement")
    parser.add_argument("--seconds", type=float, help="time for a side of a figure (default: 1; quick: 0.2)")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave DoltLite out")
    parser.add_argument("--out", type=Path, help="where to write the table (default: bench/results.md; quick: nowhere)")
    options = parser.parse_args()
    rows = options.rows or ("2000,20000" if options.quick else "100000,1000000")
    options.engines = options.engines.split(",")
    if unknown := set(options.engines) - set(TITLES):
        parser.error(f"unknown engine {unknown.pop()!r}: choose from {', '.join(TITLES)}")
    try:
        options.rows = [int(count) for count in rows.split(",")]
    except ValueError:
        parser.error(f"--rows takes numbers like 100000,1000000, not {rows!r}")
    if min(options.rows) < 2000:
        parser.error("a table needs at least 2000 rows to be measured")
    if options.seconds is None:
        options.seconds = 0.2 if options.quick else 1.0
    if not options.out and not options.quick:
        options.out = HERE / "results.md"
    return options


def main() -> int:
    options = arguments()
    sys.path.append(str(HERE.parent / "tests"))  # the PostgreSQL that the tests start serves here too
    from bench.run import Run

    # /var/tmp is on disk where /tmp may be memory, on which a sync costs nothing.
    tempfile.tempdir = os.environ.get("TMPDIR") or "/var/tmp"
    with tempfile.TemporaryDirectory(prefix="layer-bench-") as home:
        Path(home).chmod(0o711)  # PostgreSQL, under its own account, passes through
        os.environ["XDG_CONFIG_HOME"] = f"{home}/config"  # the layers' owner tokens go with them
        run = Run(Path(home), options.rows, options.seconds, options.peer)
        for engine in options.engines:
            run.engine(engine)
        text = run.text()
    print(text)
    if options.out:
        _, mark, boxes = options.out.read_text().partition(MARK) if options.out.exists() else ("", "", "")
        options.out.write_text(text + "\n" + ("\n" + mark + boxes if mark else ""))  # the boxes' part is not ours
    return run.failed


if __name__ == "__main__":
    sys.exit(main())
