"""The commands about what waits for a yes: `layer approvals`, `layer approve`, `layer refuse`."""

from __future__ import annotations

import json
from argparse import Namespace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from livinglayer.edges.cli.commands import acting, arg, command
from livinglayer.edges.cli.commands import seconds as to_the_second
from livinglayer.edges.cli.table import Printer

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS: dict[str, str] = {}


@command("approvals", arg("--all", action="store_true", help="those that were answered too"), flags="as")
def list_(layer: Layer, args: Namespace, out: Printer) -> None:
    """What boxes and agents wait for somebody to allow."""
    where = "" if args.all else " where status = 'pending'"
    columns = "id, status, contract, execution, action, resource, branch, request, reason, answer, asked, expires"
    present = datetime.now(UTC)
    rows = [
        row
        for row in layer.query(f"select {columns} from approval{where} order by id", principal=acting(args))
        if args.all or row["expires"] is None or row["expires"] > present
    ]
    if out.json:
        out.rows(rows)
        return
    shown = [{**row, "request": wanted(row)} for row in to_the_second(rows)]
    told = {key for row in shown for key, value in row.items() if value is not None}
    out.rows([{key: value for key, value in row.items() if key in told} for row in shown], noun="approval")
    if any(row["status"] == "pending" for row in rows):
        out.say("Answer with: layer approve ID, layer refuse ID --reason …")


def wanted(row: dict[str, Any]) -> str:
    """What is asked for, in a line."""
    given = (row["request"] or {}).get("given") or row["request"] or {}
    parts = [f"{given['entity']}/{given['id']}" if "entity" in given and "id" in given else ""]
    parts += [json.dumps(given[key], ensure_ascii=False) for key in ("arguments", "values", "rows") if key in given]
    text = " ".join(filter(None, parts))
    return text if len(text) <= 120 else text[:119] + "…"


@command("approve", arg("id", type=int, help="from `layer approvals`"), flags="as reason")
def approve(layer: Layer, args: Namespace, out: Printer) -> None:
    """Say yes: what was asked for is done, or what an agent did is merged."""
    answer(layer, args, out, True)


@command("refuse", arg("id", type=int, help="from `layer approvals`"), flags="as reason")
def refuse(layer: Layer, args: Namespace, out: Printer) -> None:
    """Say no; whoever asked is told the reason."""
    answer(layer, args, out, False)


def answer(layer: Layer, args: Namespace, out: Printer, approve: bool) -> None:
    told = layer.call(
        "approval.answer", {"id": args.id, "approve": approve}, principal=acting(args), reason=args.reason
    )
    said = f"Merged {told['merged']}" if "merged" in told else f"Approval {args.id} is {told['status']}"
    out.say(said)
    out.data(told)
