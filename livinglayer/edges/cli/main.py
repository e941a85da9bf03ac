"""`layer`: reads the command line, finds the layer, runs the command, and says in one sentence what went wrong."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import livinglayer
from livinglayer.edges.cli import (
    agents,
    approvals,
    boxes,
    bundles,
    contracts,
    decide,
    demo,
    functions,
    images,
    layers,
    locate,
    mcp,
    projections,
    replay,
    rows,
    secrets,
    serving,
    usage,
    why,
    workers,
)
from livinglayer.edges.cli.commands import COMMANDS, Command
from livinglayer.edges.cli.table import Printer, escape
from livinglayer.errors import Invalid, LayerError

# Flags that mean the same wherever they are taken; they may stand before the command or after it.
SHARED: dict[str, dict[str, object]] = {
    "as": {"metavar": "PRINCIPAL", "help": "act as this principal, with its permissions and no others"},
    "branch": {"metavar": "BRANCH", "help": "the branch (default: main; for log and grant: all)"},
    "as_of": {"metavar": "TX|TIME", "help": "as it was at this tx number or time"},
    "reason": {"metavar": "TEXT", "help": "why, kept with the change"},
    "timeout": {"metavar": "SECONDS", "type": float, "help": "give up after so long"},
    "limit": {"metavar": "ROWS", "type": int, "help": "refuse an answer of more rows"},
}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="layer",
        description="One versioned, forkable, governed database, and boxes to run unreviewed code in. A layer is found "
        "like a git repository: in the current directory or above it, or where --dir or LAYER_DIR say (a directory or "
        "a PostgreSQL URL). Boxes belong to this machine.",
        epilog="`layer COMMAND --help` explains a command. Exit codes: 0 done, 1 the answer is no, 2 wrong request, "
        "3 not allowed, 4 not found, 5 conflict, 6 too much, 7 damaged or too new, 8 unavailable, 9 too slow.",
    )
    top.set_defaults(**dict.fromkeys(("dir", "state", "json", *SHARED)))
    add_flags(top, frozenset(SHARED), ("dir", "state"))
    groups = {"": top.add_subparsers(dest="command", metavar="COMMAND", required=True)}
    for command in COMMANDS.values():
        above, _, last = command.name.rpartition(" ")
        sub = verbs(groups, above).add_parser(last, help=command.help, description=command.help)
        sub.set_defaults(command=command.name)
        for names, options in command.arguments:
            sub.add_argument(*names, **options)
        places = {"host": ("state",), "layer": ("dir",), "both": ("dir", "state")}
        add_flags(sub, command.flags, places[command.place])
    return top


def verbs(groups: dict[str, Any], name: str) -> Any:
    """Where the commands below `layer NAME` are added; made at its first use."""
    if name not in groups:
        above, _, last = name.rpartition(" ")
        parts = (
            agents,
            approvals,
            boxes,
            bundles,
            images,
            layers,
            secrets,
            functions,
            workers,
            why,
            contracts,
            projections,
            usage,
            replay,
            decide,
            demo,
            rows,
            serving,
            mcp,
        )
        what = next(part.GROUPS[name] for part in parts if name in part.GROUPS)
        sub = verbs(groups, above).add_parser(last, help=what, description=what)
        groups[name] = sub.add_subparsers(metavar="VERB", required=True)
    return groups[name]


def add_flags(to: argparse.ArgumentParser, names: frozenset[str], places: Sequence[str]) -> None:
    # SUPPRESS: a flag that is not after the command must not undo the one before it
    group = to.add_argument_group("flags") if to.prog != "layer" else to.add_argument_group("flags of most commands")
    if "dir" in places:
        group.add_argument("--dir", metavar="DIR|URL", default=argparse.SUPPRESS, help="the layer")
    if "state" in places:
        group.add_argument(
            "--state",
            metavar="DIR",
            default=argparse.SUPPRESS,
            help="where the host keeps its boxes (default: LAYER_STATE, else /var/lib/livinglayer for root)",
        )
    group.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="answer in JSON, for programs")
    for name, options in SHARED.items():
        if name in names:
            group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, **options)  # type: ignore[arg-type]


def run(args: argparse.Namespace, command: Command, out: Printer) -> int:
    for name in SHARED:
        # Silently reading main where --branch was asked for, or as the owner where --as was, would be a wrong answer.
        if getattr(args, name) is not None and name not in command.flags:
            raise Invalid(f"layer {command.name} takes no {flag(name)}", hint=f"layer {command.name} --help")
    if command.place == "host" and args.dir is not None:
        raise Invalid("boxes belong to this machine, not to a layer", hint="leave --dir out; --state names a host")
    if command.place == "layer" and args.state is not None:
        raise Invalid(f"layer {command.name} takes no --state", hint=f"layer {command.name} --help")
    if args.state is not None:
        os.environ["LAYER_STATE"] = os.path.abspath(args.state)
    if not command.opens:
        return command.run(args, out) or 0
    layer = livinglayer.open(locate.find(args.dir))
    try:
        return command.run(layer, args, out) or 0
    finally:
        layer.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal that cannot show a character is no reason to fail
    args = parser().parse_args(argv)
    try:
        code = run(args, COMMANDS[args.command], Printer(bool(args.json)))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (head, less) has seen enough; without this Python complains again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except LayerError as error:
        complain(error.code, error.message, error.hint, bool(args.json))
        return error.exit_code
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        complain("os", f"{error.strerror or error}{where}", None, bool(args.json))
        return 1


def complain(code: str, message: str, hint: str | None, as_json: bool) -> None:
    message, hint = locate.hide_password(message), locate.hide_password(hint) if hint else None
    if as_json:
        print(json.dumps({"error": code, "message": message, "hint": hint}), file=sys.stderr)
        return
    print(f"layer: {escape(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {escape(hint)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
