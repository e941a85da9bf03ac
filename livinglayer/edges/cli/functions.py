"""The commands about functions: `layer call`, `layer function …`, `layer blueprint …`, and the table of verbs."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from livinglayer.edges.cli.commands import acting, arg, command
from livinglayer.edges.cli.table import DIM, Printer, as_json
from livinglayer.errors import Invalid

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS = {
    "function": "Logic as rows: make functions, look at them.",
    "blueprint": "The shapes of the boxes that functions and contracts run in.",
}
ENDINGS = {".py": "python", ".js": "javascript", ".mjs": "javascript", ".sql": "sql", ".sh": "executable"}


def words(given: list[str]) -> dict[str, str]:
    found = {}
    for word in given:
        name, equals, rest = word.partition("=")
        if not equals or not name:
            raise Invalid(f"{word!r} is not NAME=VALUE", hint="layer call ticket.triage id=7")
        found[name] = Path(rest[1:]).read_text() if rest.startswith("@") else rest
    return found


@command(
    "call",
    arg("name", metavar="NAME", help="a function or a verb: ticket.triage, row.insert; `layer verbs` lists the verbs"),
    arg("arguments", nargs="*", metavar="ARGUMENT=VALUE", help="JSON where its type is not text; @FILE reads a file"),
    arg("--key", metavar="TEXT", help="an idempotency key: a second call with it gives the first one's result"),
    flags="as branch reason",
)
def call(layer: Layer, args: Namespace, out: Printer) -> None:
    """Do what a verb or a function does, recorded; prints what it gives."""
    from livinglayer.law import functions
    from livinglayer.law.verbs import VERBS

    branch = args.branch or "main"
    found = VERBS.get(args.name)
    signature = found.signature if found else functions.load(layer, args.name, branch).signature
    given = signature.parse(args.name, words(args.arguments))
    result = layer.call(args.name, given, branch=branch, reason=args.reason, key=args.key, principal=acting(args))
    if out.json:
        out.data(result)
    elif isinstance(result, list) and result and all(isinstance(row, dict) for row in result):
        out.rows(result)
    elif result is not None:
        out.say(result if isinstance(result, str) else as_json(result))


@command("verbs", arg("noun", nargs="?", metavar="NOUN", help="only those of one noun"))
def verbs(layer: Layer, args: Namespace, out: Printer) -> None:
    """Everything that changes the layer: each verb, what it takes, what it does."""
    from livinglayer.law.verbs import VERBS

    rows: list[dict[str, Any]] = []
    for name, found in sorted(VERBS.items()):
        if args.noun in (None, name.split(".")[0]):
            takes = {
                each.name: each.type + ("!" if each.required else "")
                for each in (found.signature.arguments or {}).values()
            }
            shown = takes if out.json else " ".join(f"{key}:{kind}" for key, kind in takes.items())
            rows.append({"verb": name, "does": found.description.partition("\n")[0], "takes": shown})
    out.rows(rows, noun="verb")


def declared(given: list[str] | None) -> dict[str, Any] | None:
    """ticket, ticket.title,status or ticket:priority > 2 as what a function reads or writes."""
    if given is None:
        return None
    found: dict[str, Any] = {}
    for word in given:
        entity, colon, where = word.partition(":")
        name, dot, fields = entity.partition(".")
        part: dict[str, Any] = {"fields": fields.split(",")} if dot else {}
        found[name.strip()] = part | ({"where": where.strip()} if colon else {})
    return found


@command(
    "function define",
    arg("name", metavar="NOUN.VERB"),
    arg("--file", metavar="FILE", help="its code (default: standard input); the ending tells the language"),
    arg("--language", choices=["python", "javascript", "sql", "executable"]),
    arg("--argument", action="append", metavar="NAME=TYPE", help="id=int!, note=text, … (! = must be given)"),
    arg("--result", metavar="TYPE"),
    arg("--reads", action="append", metavar="ENTITY[.FIELD,…][:WHERE]", help="what it may read; again for more"),
    arg("--writes", action="append", metavar="ENTITY[.FIELD,…][:WHERE]", help="what it may write; again for more"),
    arg("--calls", action="append", metavar="FUNCTION", help="a function it may call"),
    arg("--projections", action="append", metavar="NAME", help="a projection it may read"),
    arg("--blueprint", metavar="NAME", help="the box it runs in"),
    arg("--seconds", metavar="SECONDS", type=float, help="how long it may run"),
    arg("--rights", choices=["caller", "definer"], default="caller", help="whose permissions decide (default: caller)"),
    arg("--description", metavar="TEXT"),
    flags="as branch reason",
)
def define(layer: Layer, args: Namespace, out: Printer) -> None:
    """Make or change a function; what it declares is all it can reach."""
    code = sys.stdin.read() if args.file in (None, "-") else Path(args.file).read_text()
    language = args.language or ENDINGS.get(Path(args.file or "x.py").suffix, "python")
    arguments = None if args.argument is None else words(args.argument)
    signature = {"arguments": arguments, "result": args.result} if arguments is not None or args.result else None
    row = {
        "name": args.name, "language": language, "code": code, "signature": signature, "reads": declared(args.reads), "writes": declared(args.writes),
        "calls": args.calls, "projections": args.projections, "blueprint": args.blueprint, "timeout": args.seconds, "rights": args.rights,
        "description": args.description,
    }  # fmt: skip
    number = layer.call(
        "function.define", row, branch=args.branch or "main", reason=args.reason, principal=acting(args)
    )
    out.data({"id": number, "name": args.name})
    out.say(f"{args.name} is defined; layer call {args.name} runs it")


@command("function list", flags="as branch")
def list_functions(layer: Layer, args: Namespace, out: Printer) -> None:
    """The functions there are."""
    sql = "select f.name, f.language, b.name as blueprint, f.rights, f.timeout, f.description from function f left join blueprint b on b.id = f.blueprint order by f.name"
    out.rows(layer.query(sql, branch=args.branch or "main", principal=acting(args)), noun="function")


@command("function show", arg("name", metavar="NOUN.VERB"), flags="as branch")
def show(layer: Layer, args: Namespace, out: Printer) -> None:
    """One function: what it declares, and its code."""
    rows = layer.query(
        "select * from function where name = :name",
        {"name": args.name},
        branch=args.branch or "main",
        principal=acting(args),
    )
    if not rows:
        from livinglayer.errors import NotFound

        raise NotFound(f"there is no function {args.name!r}", hint="layer function list")
    if out.json:
        return out.data(rows[0])
    for key in ("language", "signature", "reads", "writes", "rights", "timeout", "description"):
        if rows[0][key] is not None:
            shown = rows[0][key] if isinstance(rows[0][key], str) else json.dumps(rows[0][key])
            out.say(f"{key:12} {shown}", DIM)
    out.say(rows[0]["code"] or "")


@command(
    "blueprint define",
    arg("name", metavar="NAME"),
    arg("--tier", default="namespace", help="process, namespace, container, gvisor, microvm, vm (default: namespace)"),
    arg("--base", metavar="IMAGE"),
    arg("--limit", action="append", metavar="NAME=VALUE", help="memory=256M, pids=64, cpu=0.5, disk=1G, wall=60"),
    arg("--allow", action="append", metavar="RULE", help="an egress rule: api.example.com, or JSON"),
    arg("--secret", action="append", metavar="NAME[@HOST]", help="a secret, and the host it is sent to"),
    arg("--env", action="append", metavar="NAME=VALUE"),
    arg("--slice", action="store_true", help="boxes of contracts have their slice as a local SQLite file"),
    arg("--description", metavar="TEXT"),
    flags="as branch reason",
)
def blueprint(layer: Layer, args: Namespace, out: Printer) -> None:
    """Make or change the shape of boxes: tier, limits, where they may connect, which secrets go along."""
    limits: dict[str, Any] = {}
    for name, text in words(args.limit or []).items():
        try:
            limits[name] = json.loads(text)
        except ValueError:
            limits[name] = text
    secrets = [
        {"name": name, **({"hosts": [host]} if at else {})}
        for name, at, host in (each.partition("@") for each in args.secret or [])
    ]
    egress = [json.loads(rule) if rule.startswith("{") else rule for rule in args.allow or []]
    row = {
        "name": args.name, "tier": args.tier, "base": args.base, "limits": limits or None, "egress": egress or None, "secrets": secrets or None,
        "environment": words(args.env or []) or None, "slice": args.slice or None, "description": args.description,
    }  # fmt: skip
    number = layer.call(
        "blueprint.define", row, branch=args.branch or "main", reason=args.reason, principal=acting(args)
    )
    out.data({"id": number, "name": args.name})
    out.say(f"blueprint {args.name} is defined")


@command("blueprint list", flags="as branch")
def list_blueprints(layer: Layer, args: Namespace, out: Printer) -> None:
    """The shapes of boxes there are."""
    sql = "select name, tier, base, limits, egress, secrets, description from blueprint order by name"
    out.rows(layer.query(sql, branch=args.branch or "main", principal=acting(args)), noun="blueprint")


@command("steps", arg("execution", type=int, metavar="EXECUTION"), flags="as")
def steps(layer: Layer, args: Namespace, out: Printer) -> None:
    """What an execution did, step by step."""
    rows = layer.query(
        "select n, kind, detail, at from step where execution = :e order by n",
        {"e": args.execution},
        principal=acting(args),
    )
    if out.json:
        return out.data(rows)
    for row in rows:
        detail = dict(row["detail"] or {})
        took = detail.pop("ms", None)
        detail.pop("digest", None)
        shown = detail.pop("sql", None) or " ".join(f"{key}={_short(value)}" for key, value in detail.items())
        out.say(f"{row['n']:4}  {row['kind']:9} {shown}{f'  ({took} ms)' if took is not None else ''}")
    out.say(f"{len(rows)} steps", DIM)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:79] + "…"
