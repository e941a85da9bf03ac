"""The commands about what happens by itself: `layer worker`, `layer trigger …`, `layer executions`, `layer retry`."""

from __future__ import annotations

import json
import signal
import sys
import threading
from argparse import Namespace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from livinglayer.edges.cli.commands import acting, arg, command, pairs
from livinglayer.edges.cli.commands import seconds as to_the_second
from livinglayer.edges.cli.table import Printer, escape, plain
from livinglayer.errors import Invalid

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS = {"trigger": "What calls functions by itself: changes of rows, times, ends of other functions."}
NAME = arg("name", metavar="NAME")


@command(
    "worker",
    arg("--once", action="store_true", help="do what is due, with all that follows from it, then end"),
    arg("--concurrency", type=int, metavar="N", help="executions at a time (default: two for each core)"),
)
def worker(layer: Layer, args: Namespace, out: Printer) -> None:
    """Run what triggers, schedules and retries ask for, and conclude what died; several may share a layer."""
    from livinglayer.law.worker import Worker

    if args.concurrency is not None and not 1 <= args.concurrency <= 1000:
        raise Invalid(f"--concurrency is a number from 1 to 1000, not {args.concurrency}")
    lock = threading.Lock()

    def say(event: str, **details: Any) -> None:
        at = datetime.now(UTC)
        if out.json:
            line = json.dumps({"at": at.isoformat(), "event": event, **{key: plain(v) for key, v in details.items()}})
        else:
            told = " ".join(f"{key}={plain(value)}" for key, value in details.items())
            line = escape(f"{at:%H:%M:%S} {event} {told}")
        with lock:
            print(line, flush=True)

    made = Worker(layer, args.concurrency, say=say)
    before = {number: signal.signal(number, lambda *_: made.stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        made.run(once=args.once)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.stdout.flush()


@command(
    "trigger define",
    NAME,
    arg("function", metavar="FUNCTION", help="what it calls"),
    arg("--on", metavar="ENTITY", help="when a row of this entity changes"),
    arg("--action", action="append", choices=("insert", "update", "delete"), help="only so; may be repeated"),
    arg("--where", metavar="PREDICATE", help="only when the row is so: after the change, or before its deletion"),
    arg("--fields", metavar="A,B", help="of updates, only those that change one of these"),
    arg("--schedule", metavar="CRON", help="at these times, UTC: '*/5 * * * *'"),
    arg("--after", metavar="FUNCTION", help="when an execution of this function ends"),
    arg("--status", help="only when it ends so: done, failed, dead, …"),
    arg("-a", "--argument", action="append", metavar="NAME=VALUE", help="an argument for the function"),
    arg("--attempts", type=int, metavar="N", help="how often it is tried (default: 5)"),
    arg("--backoff", type=float, metavar="SECONDS", help="before the second attempt; doubled each time (default: 1)"),
    arg("--on-branch", metavar="BRANCH", default="main", help="changes of this branch (default: main)"),
    arg("--description", metavar="TEXT"),
    flags="as branch reason",
)
def define(layer: Layer, args: Namespace, out: Printer) -> None:
    """Make or change a trigger: one of --on, --schedule, --after. It acts as whoever defines it."""
    tries = {name: value for name in ("attempts", "backoff") if (value := getattr(args, name)) is not None}
    row = {
        "name": args.name, "function": args.function, "on_entity": args.on, "on_actions": args.action, "predicate": args.where,
        "on_fields": args.fields.split(",") if args.fields else None, "schedule": args.schedule, "after_function": args.after,
        "after_status": args.status, "given": pairs(args.argument, "the argument") or None, "on_branch": args.on_branch,
        "retries": tries or None, "description": args.description,
    }  # fmt: skip
    number = _call(layer, "trigger.define", row, args)
    out.say(f"Trigger {args.name} calls {args.function}; layer worker runs it")
    out.data({"id": number, "name": args.name})


def _call(layer: Layer, verb: str, given: dict[str, Any], args: Namespace) -> Any:
    branch = getattr(args, "branch", None) or "main"
    return layer.call(verb, given, branch=branch, reason=args.reason, principal=acting(args))


@command("trigger list", flags="as branch")
def list_(layer: Layer, args: Namespace, out: Printer) -> None:
    """The triggers there are, and when those with a schedule fire next."""
    from livinglayer.law.schedule import parse

    rows = layer.query(
        "select name, function, coalesce(on_entity, schedule, after_function) as cause, on_entity, on_actions, predicate, on_fields, schedule,"
        " after_function, after_status, arguments, branch, enabled, retries, description from trigger order by name",
        branch=args.branch or "main",
        principal=acting(args),
    )
    for row in rows:
        try:
            row["following"] = parse(row["schedule"]).following(datetime.now(UTC)) if row["schedule"] else None
        except Invalid:
            row["following"] = None
    columns = ("name", "function", "cause", "predicate", "branch", "enabled", "following")
    out.rows(rows, columns=columns, noun="trigger")


@command("trigger remove", NAME, flags="as branch reason")
def remove(layer: Layer, args: Namespace, out: Printer) -> None:
    """Take a trigger away; what it has queued is still run."""
    _call(layer, "trigger.remove", {"name": args.name}, args)
    out.say(f"Removed trigger {args.name}")
    out.data({"removed": args.name})


@command("trigger enable", NAME, flags="as branch reason")
def enable(layer: Layer, args: Namespace, out: Printer) -> None:
    """Let a trigger fire again, as whoever says so; what happened meanwhile is not made up for."""
    _call(layer, "trigger.enable", {"name": args.name}, args)
    out.say(f"Trigger {args.name} fires")
    out.data({"name": args.name, "enabled": True})


@command("trigger disable", NAME, flags="as branch reason")
def disable(layer: Layer, args: Namespace, out: Printer) -> None:
    """Keep a trigger from firing; what it has queued is still run."""
    _call(layer, "trigger.enable", {"name": args.name, "enabled": False}, args)
    out.say(f"Trigger {args.name} does not fire any more")
    out.data({"name": args.name, "enabled": False})


@command(
    "executions",
    arg("--status", help="only these: queued, running, done, failed, denied, lost, dead, …"),
    arg("--function", metavar="NAME", help="only those of this function"),
    arg("--trigger", metavar="NAME", help="only those of this trigger"),
    arg("-n", type=int, default=20, metavar="COUNT", help="how many (default: 20)"),
    flags="as",
)
def executions(layer: Layer, args: Namespace, out: Printer) -> None:
    """Show the latest executions: what was called, by whom, why, and what came of it."""
    given = {name: value for name in ("status", "function", "trigger") if (value := getattr(args, name)) is not None}
    where = " and ".join(f"{name} = :{name}" for name in given)
    rows = layer.query(
        f"select * from execution {f'where {where}' if where else ''} order by id desc limit {max(0, args.n)}",
        given,
        principal=acting(args),
    )
    if not out.json:
        rows = to_the_second(rows)
        for row in rows:
            result = row["result"] if isinstance(row["result"], dict) else {}
            row["what"] = row["function"] or row["verb"] or row["kind"]
            came = result.get("value", result.get("answer"))
            row["said"] = result["error"]["message"] if isinstance(result.get("error"), dict) else came
        tried = ["attempt"] if any((row["attempt"] or 1) > 1 for row in rows) else []
        columns = ["id", "started", "what", "status", *tried, "principal", "trigger", "said"]
        return out.rows(rows, columns=columns, noun="execution")
    out.rows(rows, noun="execution")


@command("retry", arg("execution", type=int, metavar="EXECUTION"), flags="as reason")
def retry(layer: Layer, args: Namespace, out: Printer) -> None:
    """Queue an execution that failed once more, as whoever says so; a worker runs it."""
    number = _call(layer, "execution.retry", {"id": args.execution}, args)
    out.say(f"Execution {number} is queued; layer worker runs it")
    out.data({"execution": number, "of": args.execution})
