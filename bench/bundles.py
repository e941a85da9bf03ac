"""Measure bundles: an upgrade whose migration goes through every row, on both engines.

`python -m bench.bundles [--quick]`. The upgrade renames a field, converts another, adds one that becomes required, and sets two in
all rows, in one durable tx; the figure is all of `apply`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import livinglayer
from bench.report import TITLES, Line, keep_part, table
from livinglayer.bundle.apply import apply
from livinglayer.bundle.load import Bundle, of_files
from livinglayer.bundle.plan import plan

HERE = Path(__file__).parent
MARK = "# Benchmark of bundles"
HEAD = ["operation", "plain", "ours", "figure", "bar", "met"]
FIELDS = "name: text!, sku: {type: text, indexed: true}"
BEFORE = f"entities: {{item: {{fields: {{{FIELDS}, qty: int, price: text, status: {{type: enum, values: [a, b]}}}}}}}}"
AFTER = (
    f"entities: {{item: {{fields: {{{FIELDS}, amount: int, price: decimal, status: {{type: enum, values: [a, done]}},"
    " label: text!}}}"
)
STEPS = """
steps:
  - rename: {entity: item, field: qty, to: amount}
  - retype: {entity: item, field: price, to: decimal}
  - backfill: {entity: item, field: price}
  - add: {entity: item, fields: {label: text}}
  - set: {entity: item, values: {status: done, label: {$field: name}}}
"""


def version(number: str, schema: str, steps: str | None = None) -> Bundle:
    files = {"bundle.yaml": f"name: shop\nversion: {number}\n", "schema.yaml": schema}
    return of_files(
        {
            path: text.encode()
            for path, text in (files | ({f"migrations/{number}.yaml": steps} if steps else {})).items()
        }
    )


def measure(location: str, rows: int) -> list[Line]:
    layer = livinglayer.open(location, create=True)
    try:
        apply(layer, version("1.0.0", BEFORE))
        with layer.transaction(timeout=600) as tx:
            tx.insert(
                "item",
                [
                    {"name": f"item {n}", "sku": f"s{n}", "qty": n, "price": f"{n}.50", "status": "a"}
                    for n in range(rows)
                ],
            )
        last = layer.query("select max(tx) as n from tx")[0]["n"]
        newer = version("1.1.0", AFTER, STEPS)
        planning = _took(lambda: plan(layer, newer))
        ours = _took(lambda: apply(layer, newer))
        assert plan(layer, newer).empty
        assert layer.query("select count(*) as n from item where label = name and status = 'done'") == [{"n": rows}]
        assert layer.query("select count(*) as n from item where status = 'a'", as_of=last) == [{"n": rows}]
        assert layer.verify().ok
    finally:
        layer.close()
    return [
        Line(f"upgrade with a migration of {rows:,} rows, history kept", ours, "s", low=10.0, ours=ours),
        Line("its plan", planning * 1000, "ms", ours=planning),
    ]


def _took(act: Any) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


@contextmanager
def places(home: Path) -> Iterator[dict[str, str]]:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from cluster import Cluster

    home.chmod(0o711)  # the user postgres passes through
    cluster = Cluster(home)
    try:
        with cluster.database() as url:
            yield {"sqlite": str(home / "layer"), "postgres": url}
    finally:
        cluster.remove()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bundles", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 rows: a look, not a measurement")
    options = parser.parse_args()
    rows = 2_000 if options.quick else 100_000
    parts = [MARK, "", f"Python {platform.python_version()}, {os.cpu_count()} cores, durable."]
    with tempfile.TemporaryDirectory(prefix="lb-", dir="/var/tmp") as place:
        os.environ["XDG_CONFIG_HOME"] = place + "/config"
        with places(Path(place)) as found:
            for engine, location in found.items():
                lines = measure(location, rows)
                parts += ["", f"## {TITLES[engine]}", "", table(HEAD, [line.cells() for line in lines])]
    text = "\n".join(parts)
    print(text)
    if not options.quick:
        keep_part(HERE / "results.md", MARK, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
