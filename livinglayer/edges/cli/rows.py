"""The commands that change single rows and people: `layer insert`, `update`, `delete`, `principal`; each is a verb."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from livinglayer.edges.cli.commands import acting, arg, command, pairs
from livinglayer.edges.cli.table import Printer
from livinglayer.errors import Invalid

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS: dict[str, str] = {}
VALUES = arg("values", nargs="*", metavar="FIELD=VALUE", help='JSON where it is JSON (3, true, null, "3"), else text')
FILES = arg("--from-file", action="append", metavar="FIELD=FILE", help="text from a file; - reads standard input")
ENTITY, ID = arg("entity", metavar="ENTITY"), arg("id", type=int, metavar="ID")
EXPECT = arg("--expect", type=int, metavar="TX", help="only if this is still the row's version")


def act(layer: Layer, args: Namespace, verb: str, **given: Any) -> Any:
    return layer.call(verb, given, principal=acting(args), branch=args.branch or "main", reason=args.reason)


def values(args: Namespace) -> dict[str, Any]:
    """What was given as words and as files."""
    found = pairs(args.values, "value")
    for word in args.from_file or ():
        name, _, path = word.partition("=")
        if not name or not path:
            raise Invalid(f"--from-file {word!r} is not FIELD=FILE", hint="--from-file content=inbox.mbox")
        try:
            found[name] = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode()
        except UnicodeDecodeError as error:
            raise Invalid(f"{path} is not UTF-8: byte {error.start + 1}", hint="iconv -t utf-8 converts it") from None
    if not found:
        raise Invalid("no value is given", hint=f"layer {args.command} {args.entity} … FIELD=VALUE")
    return found


@command("insert", ENTITY, VALUES, FILES, flags="as branch reason")
def insert(layer: Layer, args: Namespace, out: Printer) -> None:
    """Add a row and print its id."""
    number = act(layer, args, "row.insert", entity=args.entity, values=values(args))
    out.say(f"Added {args.entity}/{number}")
    out.data({"id": number})


@command("update", ENTITY, ID, VALUES, FILES, EXPECT, flags="as branch reason")
def update(layer: Layer, args: Namespace, out: Printer) -> None:
    """Set fields of a row; those that are not named stay."""
    tx = act(layer, args, "row.update", entity=args.entity, id=args.id, values=values(args), expect=args.expect)
    out.say(f"Changed {args.entity}/{args.id} in tx {tx}")
    out.data({"tx": tx})


@command("delete", ENTITY, ID, EXPECT, flags="as branch reason")
def delete(layer: Layer, args: Namespace, out: Printer) -> None:
    """Remove a row, and what cascades from it; its history stays."""
    tx = act(layer, args, "row.delete", entity=args.entity, id=args.id, expect=args.expect)
    out.say(f"Removed {args.entity}/{args.id} in tx {tx}")
    out.data({"tx": tx})


@command(
    "principal",
    arg("name", metavar="NAME"),
    arg("--kind", choices=("human", "agent", "service", "layer", "role"), help="what it is (default, when new: human)"),
    arg("--role", action="append", metavar="ROLE", help="a role it holds; may be repeated, and replaces those it had"),
    arg("--no-roles", action="store_true", help="it holds no role any more"),
    arg("--attribute", action="append", metavar="NAME=VALUE", help="what permissions may ask of it as :me.NAME"),
    flags="as branch reason",
)
def principal(layer: Layer, args: Namespace, out: Printer) -> None:
    """Make somebody who can act, or change their kind, roles or attributes; only an owner may."""
    if args.role and args.no_roles:
        raise Invalid("--role and --no-roles exclude each other")
    given = {
        "kind": args.kind,
        "roles": [] if args.no_roles else args.role,
        "attributes": pairs(args.attribute, "attribute") or None,
    }
    number = act(layer, args, "principal.define", name=args.name, **given)
    out.say(f"principal/{number} is {args.name}")
    out.data({"id": number, "name": args.name})
