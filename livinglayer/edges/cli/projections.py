"""The commands about projections: `layer projection …`."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING

from livinglayer.edges.cli.commands import acting, arg, command, reading
from livinglayer.edges.cli.table import Printer
from livinglayer.errors import Invalid, NotFound

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS = {"projection": "Named queries: whoever may read one sees what its definer would."}
NAME = arg("name")


@command(
    "projection define",
    NAME,
    arg("statement", nargs="?", help="one SELECT, with :name where a parameter goes"),
    arg(
        "--remote",
        metavar="URL",
        help="instead of a statement: read it of the layer served there, which has granted it",
    ),
    arg("--of", metavar="NAME", help="what it is called there (default: the same)"),
    arg("--key", metavar="layer:…", help="the only layer that may answer there, as its `layer identity` says"),
    arg("--parameter", action="append", metavar="NAME=TYPE", help="such as status=text!; may be repeated"),
    arg("--description", metavar="TEXT", help="what it shows"),
    arg("--freshness", metavar="JSON", help='"strong", or {"bounded": MS}'),
    flags="as branch reason",
)
def define(layer: Layer, args: Namespace, out: Printer) -> None:
    """Give a SELECT a name, or one that another layer has: it shows what you may see to whoever is granted to read it."""
    parameters = {}
    for word in args.parameter or ():
        name, equals, kind = word.partition("=")
        if not equals or not kind:
            raise Invalid(f"parameter {word!r} is not NAME=TYPE", hint="--parameter status=text!")
        parameters[name] = kind
    given = {
        "name": args.name,
        "statement": args.statement,
        "parameters": parameters or None,
        "description": args.description,
    }
    if args.remote is not None:
        key = {} if args.key is None else {"key": args.key}
        given["remote"] = {"url": args.remote, "projection": args.of or args.name, **key}
    if args.freshness is not None:
        try:
            given["freshness"] = json.loads(args.freshness)
        except ValueError:
            given["freshness"] = args.freshness
    number = layer.call(
        "projection.define", given, principal=acting(args), branch=args.branch or "main", reason=args.reason
    )
    out.say(f"Defined projection {args.name}; layer grant WHO read projection:{args.name} lets others read it")
    out.data({"projection": args.name, "id": number})


@command("projection list", flags="as branch")
def list_(layer: Layer, args: Namespace, out: Printer) -> None:
    """List the projections that may be read."""
    from livinglayer.projection.query import readable

    rows = readable(layer, layer.id_of(acting(args)), args.branch or "main")
    out.rows(
        rows if out.json else [{k: row[k] for k in ("name", "parameters", "description")} for row in rows],
        noun="projection",
    )


@command(
    "projection read",
    NAME,
    arg("argument", nargs="*", metavar="NAME=VALUE", help="a value for a parameter"),
    flags="as branch as_of",
)
def read(layer: Layer, args: Namespace, out: Printer) -> None:
    """Show the rows of a projection."""
    from livinglayer.law.signature import Signature
    from livinglayer.projection.query import readable

    words = {}
    for word in args.argument:
        name, equals, text = word.partition("=")
        if not equals:
            raise Invalid(f"argument {word!r} is not NAME=VALUE", hint="status=open")
        words[name] = text
    shared = reading(args)
    known = {row["name"]: row for row in readable(layer, layer.id_of(acting(args)), shared["branch"])}
    if args.name not in known:
        raise NotFound(f"there is no projection {args.name!r}", hint="layer projection list")
    signature = Signature.of(args.name, {"arguments": known[args.name]["parameters"] or {}})
    out.rows(layer.projection(args.name, signature.parse(args.name, words), **shared))


@command("projection remove", NAME, flags="as branch reason")
def remove(layer: Layer, args: Namespace, out: Printer) -> None:
    """Take a projection away."""
    layer.call(
        "projection.remove", name=args.name, principal=acting(args), branch=args.branch or "main", reason=args.reason
    )
    out.say(f"Removed projection {args.name}")
    out.data({"removed": args.name})
