"""The commands about contracts: `layer contract …`, and what looks after their boxes."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from livinglayer.edges.cli.commands import acting, arg, command
from livinglayer.edges.cli.table import Printer
from livinglayer.errors import Invalid, NotFound

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS = {"contract": "What somebody may see and do in a box: made, listed and shown as rows."}


@command(
    "contract define",
    arg("--file", required=True, metavar="FILE", help="a JSON object with name, reads, scope, functions, …; - reads standard input"),
    flags="as branch reason",
)  # fmt: skip
def define(layer: Layer, args: Namespace, out: Printer) -> None:
    """Make or change a contract; boxes that were made of it before it changed end."""
    text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text()
    try:
        given = json.loads(text)
    except ValueError as error:
        raise Invalid(f"{args.file} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Invalid(f"{args.file} does not hold a JSON object", hint='{"name": "agent", "reads": ["ticket"]}')
    number = layer.call(
        "contract.define", given, principal=acting(args), branch=args.branch or "main", reason=args.reason
    )
    out.say(f"Defined contract {given['name']}")
    out.data({"contract": given["name"], "id": number})


@command("contract list", flags="as branch")
def list_(layer: Layer, args: Namespace, out: Printer) -> None:
    """The contracts there are, and what each may see and do."""
    sql = (
        "select c.name, b.name as blueprint, c.minimum_tier, c.functions, c.projections, c.budget, c.description"
        " from contract c left join blueprint b on b.id = c.blueprint order by c.name"
    )
    out.rows(layer.query(sql, branch=args.branch or "main", principal=acting(args)), noun="contract")


@command("contract show", arg("name"), flags="as branch as_of")
def show(layer: Layer, args: Namespace, out: Printer) -> None:
    """Show all of a contract."""
    from livinglayer.edges.cli.commands import reading

    rows = layer.query("select * from contract where name = :name", {"name": args.name}, **reading(args))
    if not rows:
        raise NotFound(f"there is no contract {args.name!r}", hint="layer contract list")
    if out.json:
        out.data(rows[0])
        return
    shown = {key: value for key, value in rows[0].items() if value is not None}
    with contextlib.suppress(NotFound):  # who may not read blueprints sees its number
        for row in layer.query(
            "select name from blueprint where id = :id", {"id": shown.get("blueprint")}, **reading(args)
        ):
            shown["blueprint"] = row["name"]
    out.fields(shown)


@command("contract remove", arg("name"), flags="as branch reason")
def remove(layer: Layer, args: Namespace, out: Printer) -> None:
    """Take a contract away; its boxes end."""
    layer.call(
        "contract.remove", name=args.name, principal=acting(args), branch=args.branch or "main", reason=args.reason
    )
    out.say(f"Removed contract {args.name}")
    out.data({"removed": args.name})


@command(
    "box keep",
    arg("--idle", type=float, default=60.0, metavar="SECONDS", help="end when there was no box for so long (default: 60)"),
)  # fmt: skip
def keep(layer: Layer, args: Namespace, out: Printer) -> None:
    """Answer for the boxes of contracts until there is none; started on demand where no `layer worker` runs."""
    from livinglayer.law import tending

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    found = tending.of(layer)
    found.look()
    quiet = time.monotonic()
    while not stop.wait(0.5):
        quiet = time.monotonic() if found.busy else quiet
        if time.monotonic() - quiet > args.idle:
            return
