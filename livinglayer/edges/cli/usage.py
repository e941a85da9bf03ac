"""The commands about what executions cost: `layer usage`, `layer quota …`."""

from __future__ import annotations

import re
from argparse import Namespace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from livinglayer.edges.cli.boxes import seconds
from livinglayer.edges.cli.commands import acting, arg, command, moment
from livinglayer.edges.cli.table import Printer
from livinglayer.errors import Invalid

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS = {"quota": "How much principals, roles and contracts may use in a time."}


def since(word: str | None) -> datetime | None:
    """A time, or how long ago: 90s, 15m, 2h, 7d."""
    if word is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?[smhd]", word):
        return datetime.now(UTC) - timedelta(seconds=seconds(word))
    found = moment(word)
    if isinstance(found, int):
        raise Invalid(f"{word!r} is no time", hint="2h, 7d or 2026-03-01")
    return found


@command(
    "usage",
    arg("--by", choices=("principal", "contract", "function"), default="principal", help="whose (default: principal)"),
    arg("--since", metavar="TIME|SPAN", help="2026-03-01, or 7d for the last seven days (default: all)"),
    flags="as",
)
def usage_(layer: Layer, args: Namespace, out: Printer) -> None:
    """Show what executions used: how many, seconds of CPU, byte-seconds of memory, bytes of network, tokens of models and their price."""
    from livinglayer.law import usage

    rows = usage.totals(layer, args.by, since(args.since), acting(args))
    if not out.json:
        rows = [
            row | {key: round(row[key] or 0, 3) for key in ("wall", "cpu")} | {"memory": f"{row['memory'] or 0:.0f}"}
            for row in rows
        ]
    out.rows(rows)


@command(
    "quota set",
    arg("resource", choices=("executions", "cpu", "memory", "bytes", "boxes", "tokens", "money")),
    arg("amount", type=float, help="how much: a number, seconds of CPU, byte-seconds, bytes"),
    arg("window", metavar="SPAN", help="in any span so long: 60, 15m, 1h, 1d"),
    arg("--of", metavar="WHO", help="a principal; or a role: then each of its holders has this much"),
    arg("--contract", metavar="NAME", help="what is done under this contract"),
    arg("--description", metavar="TEXT", help="why"),
    flags="as reason",
)
def set_(layer: Layer, args: Namespace, out: Printer) -> None:
    """Allow so much of a resource in a time; what is over it is refused until there is room again."""
    given = {
        "resource": args.resource, "amount": args.amount, "seconds": int(seconds(args.window)), "subject": args.of,
        "contract": args.contract, "description": args.description,
    }  # fmt: skip
    number = layer.call("quota.set", given, principal=acting(args), reason=args.reason)
    out.say(f"Set quota {number}")
    out.data({"quota": number})


@command("quota list", flags="as")
def list_(layer: Layer, args: Namespace, out: Printer) -> None:
    """List the quotas, with what counts against each now."""
    from livinglayer.law import quotas

    out.rows(quotas.listed(layer, acting(args)), noun="quota")


@command("quota remove", arg("id", type=int, help="from `layer quota list`"), flags="as reason")
def remove(layer: Layer, args: Namespace, out: Printer) -> None:
    """Take a quota away; what was used stays recorded."""
    layer.call("quota.remove", id=args.id, principal=acting(args), reason=args.reason)
    out.say(f"Removed quota {args.id}")
    out.data({"removed": args.id})
