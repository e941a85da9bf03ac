"""The commands about bundles: `layer plan`, `layer apply` and `layer bundle …`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from livinglayer.edges.cli.commands import acting, arg, command, moment
from livinglayer.edges.cli.table import BOLD, DIM, GREEN, RED, Printer, counted, escape, text
from livinglayer.errors import Denied, Invalid, NotFound

if TYPE_CHECKING:
    from livinglayer import Layer
    from livinglayer.bundle.changes import Change
    from livinglayer.bundle.plan import Plan

GROUPS = {"bundle": "Software as a directory of definitions: listed, exported, removed, signed."}
ADOPT = arg("--adopt", action="store_true", help="take over rows of the same names that others made")
DIRECTORY = arg("directory", metavar="DIR", help="the bundle: a directory with a bundle.yaml")


@command("plan", DIRECTORY, ADOPT, flags="as branch")
def plan_(layer: Layer, args: Namespace, out: Printer) -> None:
    """Show exactly what applying a bundle would change; `!` and red mark what lets somebody do more than before."""
    from livinglayer.bundle.plan import plan

    bundle, beside = found(args.directory)
    made = plan(layer, bundle, args.branch or "main", acting(args), adopt=args.adopt, beside=beside)
    if out.json:
        out.data({**made.json(), "signer": bundle.signer})
        return
    show(made, out)
    if not made.empty:
        way = f"--accept {made.digest}" if made.widens else ""
        where = f"--branch {made.branch} " if made.branch != "main" else ""
        out.say()
        out.say(f"To do exactly this: layer apply {args.directory} {where}{way}".rstrip())


@command(
    "apply",
    DIRECTORY,
    ADOPT,
    arg("--accept", metavar="DIGEST", help="the digest of the plan you have read; refused when it is another by now"),
    arg("--yes", action="store_true", help="accept whatever the plan is"),
    flags="as branch reason",
)
def apply_(layer: Layer, args: Namespace, out: Printer) -> None:
    """Make the layer what a bundle says, in one tx, or change nothing; asks before somebody may do more than before."""
    from livinglayer.bundle.plan import plan
    from livinglayer.bundle.verbs import sent

    bundle, beside = found(args.directory)
    branch, who = args.branch or "main", acting(args)
    made = plan(layer, bundle, branch, who, adopt=args.adopt, beside=beside)
    accept = args.accept
    if accept is None:
        show(made, out) if not out.json else None
        if made.empty:
            out.data({**made.json(), "applied": False})
            return
        if made.widens and not args.yes and not out.json and sys.stdin.isatty() and sys.stdout.isatty():
            accept = made.digest if asked(out, "Apply all of this?") else None
            if accept is None:
                raise Denied("nothing was applied", hint=f"to apply it later: --accept {made.digest}")
    done = layer.call(
        "bundle.apply", files=sent(bundle.files), beside=[sent(each.files) for each in beside.values()], accept=accept,
        yes=args.yes, adopt=args.adopt, principal=who, branch=branch, reason=args.reason,
    )  # fmt: skip
    where = "" if branch == "main" else f" on branch {branch}"
    number = sum(change["action"] != "keep" and change["kind"] != "bundle" for change in done["changes"])
    out.say(f"Applied {bundle.name} {bundle.version}{where}: {counted(number, 'change')}, one tx", GREEN)
    out.data({**done, "applied": True})


def found(directory: str) -> tuple[Any, dict[str, Any]]:
    """A bundle, and those it needs that lie beside it."""
    from livinglayer.bundle.load import load

    top = Path(directory)
    bundle, beside = load(top), dict[str, Any]()
    waiting = [*bundle.requires]
    while waiting:
        name = waiting.pop()
        place = top.resolve().parent / name
        if name not in beside and name != bundle.name and (place / "bundle.yaml").is_file():
            other = load(place)
            if other.name != name:
                raise Invalid(f"{place}/bundle.yaml: name: it is {other.name!r} in a directory called {name!r}")
            beside[name] = other
            waiting += other.requires
    return bundle, beside


def asked(out: Printer, question: str) -> bool:
    """Whether whoever sits there says yes."""
    print(out.paint(f"{question} [y/N] ", BOLD), end="", flush=True, file=out.out)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# What a plan looks like


TITLES = {
    "migration": "Migration", "entity": "Schema", "field": "Schema", "role": "Roles and principals", "principal": "Roles and principals",
    "grant": "Grants", "blueprint": "Boxes", "projection": "Projections", "function": "Functions", "contract": "Contracts",
    "quota": "Quotas", "trigger": "Triggers", "component": "Pages", "seed": "Rows", "bundle": "Bundle",
}  # fmt: skip
WORDS = {
    "add": "to add",
    "change": "to change",
    "remove": "to remove",
    "adopt": "to take over",
    "run": "to run",
    "conflict": "in the way",
}


def show(made: Plan, out: Printer) -> None:
    """A plan for people."""
    for step in made.steps:
        name, was, now = step.bundle.name, step.before, step.bundle.version
        version = f"{was} → {now}" if was not in (None, now) else f"{now}, new here" if was is None else now
        line = (
            out.paint(escape(name), BOLD)
            + f" {version}"
            + ("" if made.branch == "main" else f" on branch {escape(made.branch)}")
        )
        print(line + out.paint(f"   {signer(step.bundle)}", DIM), file=out.out)
        if all(change.action == "keep" for change in step.changes):
            out.say("  nothing to do: the layer is what the bundle says")
        title = None
        for change in by_entity(step.changes):
            if change.kind != "bundle" and TITLES[change.kind] != title:
                title = TITLES[change.kind]
                print(f"\n{out.paint(title, BOLD)}", file=out.out)
            for number, line in enumerate(lines(change)):
                opens = change.widens or change.action == "conflict"
                out.say(line, RED if opens and not number else DIM if change.action == "keep" or number else "")
    counts = {
        word: sum(c.action == action and c.kind != "bundle" for c in made.changes) for action, word in WORDS.items()
    }
    opening = sum(change.widens for change in made.changes)
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    if said:
        out.say()
        out.say(
            said
            + (f"; ! {opening} let somebody do more than before" if opening else "; nobody may do more than before"),
            RED if opening else "",
        )
        out.say(f"plan {made.digest}", DIM)


def by_entity(changes: Sequence[Change]) -> Iterator[Change]:
    """The same with every field below its entity."""
    schema = [change for change in changes if change.kind in ("entity", "field")]
    names = dict.fromkeys(change.name.partition(".")[0] for change in schema)
    first = next((place for place, change in enumerate(changes) if change.kind in ("entity", "field")), len(changes))
    yield from changes[:first]
    for name in names:
        whole = [change for change in schema if change.kind == "entity" and change.name == name]
        fields = [change for change in schema if change.kind == "field" and change.name.startswith(f"{name}.")]
        yield from whole or [replace(fields[0], kind="entity", name=name, action="keep", widens=False, why=None)]
        yield from fields
    yield from changes[first + len(schema) :]


def lines(change: Change) -> Iterator[str]:
    """A change as lines: fields stand below their entity with their types, what else differs below it."""
    first, *rest = change.lines()
    label = change.name.partition(".")[2]
    if change.kind == "bundle":
        return
    if change.kind == "grant":
        if change.action == "add":  # its name says it all
            first = next(replace(change, why=None).lines())
        yield first.replace(" grant allow ", " ", 1).replace(" grant deny ", " deny ", 1)
    elif change.kind == "field" and change.action == "add":
        from livinglayer.bundle.definitions import field_text

        said = field_text(change.after or {})
        spec = said if isinstance(said, str) else said["type"] + "".join(
            f" {key}" if value is True else f" {key} {text(value)}" for key, value in said.items()
            if key not in ("type", "description", "annotations", "transitions", "values")
        )  # fmt: skip
        yield f"{first[:2]}  {first[2:4]}{label:<20} {spec}"
    elif change.kind == "field":
        yield f"{first[:2]}  {first[2:4]}{label}" + (f"   ({change.why})" if change.why else "")
    elif change.kind == "migration":
        yield f"{first[:4]}{change.name}  {change.why}"
    elif change.kind == "seed":
        yield f"{first[:4]}{change.name}   {change.why}"
    else:
        yield first
    yield from rest


def signer(bundle: Any) -> str:
    """Who signed a bundle."""
    from livinglayer.bundle.sign import publisher

    if bundle.signer is None:
        return "not signed"
    name = publisher(bundle.signer)
    return f"signed by {name}" if name else f"signed with a key that is not trusted here: {bundle.signer}"


# What is applied


@command("bundle list", flags="as branch as_of")
def list_(layer: Layer, args: Namespace, out: Printer) -> None:
    """The bundles that are applied."""
    from livinglayer.edges.cli.commands import reading

    rows = layer.query("select name, version, manifest, digest, signer from bundle order by name", **reading(args))
    for row in rows:
        manifest = row.pop("manifest") or {}
        row["definitions"] = sum(len(group) for group in (manifest.get("items") or {}).values())
        row["requires"] = (
            ", ".join(f"{name} {version}" for name, version in (manifest.get("requires") or {}).items()) or None
        )
        row["description"] = manifest.get("description")
        if not out.json:
            row["digest"] = (row["digest"] or "")[:12]
    out.rows(rows, ("name", "version", "definitions", "requires", "signer", "description"), noun="bundle")


@command("bundle show", arg("name"), flags="as branch as_of")
def show_(layer: Layer, args: Namespace, out: Printer) -> None:
    """What a bundle has made: a tree of its definitions."""
    from livinglayer.edges.cli.commands import reading

    rows = layer.query("select * from bundle where name = :name", {"name": args.name}, **reading(args))
    if not rows:
        raise NotFound(f"there is no bundle {args.name!r}", hint="layer bundle list")
    row, items = rows[0], (rows[0]["manifest"] or {}).get("items") or {}
    if out.json:
        out.data(row)
        return
    print(
        f"{out.paint(escape(row['name']), BOLD)} {row['version']}   {out.paint('digest ' + (row['digest'] or '')[:16], DIM)}",
        file=out.out,
    )
    fields = items.pop("field", {})
    groups = [(kind, sorted(names)) for kind, names in items.items() if names]
    for place, (kind, names) in enumerate(groups):
        last = place == len(groups) - 1
        out.say(f"{'└─' if last else '├─'} {kind} ({len(names)})")
        for n, name in enumerate(names):
            more = (
                ", ".join(each.partition(".")[2] for each in fields if each.startswith(f"{name}."))
                if kind == "entity"
                else ""
            )
            branch = f"{'  ' if last else '│ '} {'└─' if n == len(names) - 1 else '├─'} {escape(name)}"
            print(branch + (out.paint(f"   {escape(more)}", DIM) if more else ""), file=out.out)


@command("bundle export", arg("name"), arg("directory", metavar="DIR"), flags="as branch as_of")
def export_(layer: Layer, args: Namespace, out: Printer) -> None:
    """Write a bundle back from its rows as they are: what still says the same is written as it was."""
    from livinglayer.bundle.export import export

    when = moment(args.as_of) if args.as_of else None
    paths = export(layer, args.name, args.directory, args.branch or "main", when, acting(args))
    out.say(f"Exported {args.name} to {args.directory}: {counted(len(paths), 'file')}")
    out.data({"bundle": args.name, "directory": args.directory, "files": paths})


@command(
    "bundle remove",
    arg("name"),
    arg("--data", action="store_true", help="its entities too, with all their rows; history stays"),
    flags="as branch reason",
)
def remove_(layer: Layer, args: Namespace, out: Printer) -> None:
    """Take away what a bundle has made; refused while another bundle needs it."""
    gone = layer.call(
        "bundle.remove", name=args.name, data=args.data, principal=acting(args), branch=args.branch or "main", reason=args.reason
    )  # fmt: skip
    kept = "" if args.data else "; its entities and rows stay"
    out.say(f"Removed bundle {args.name}: {counted(len(gone), 'definition')}{kept}")
    out.data({"removed": args.name, "definitions": gone})


# Who made it


@command(
    "bundle sign",
    DIRECTORY,
    arg("--key", metavar="FILE", help="a key of your own (default: the one of keygen)"),
    opens=False,
)
def sign_(args: Namespace, out: Printer) -> None:
    """Sign a bundle with your key: writes its signature.yaml."""
    from livinglayer.bundle import sign

    key = sign.sign(args.directory, args.key)
    out.say(f"Signed {args.directory} with {key}")
    out.data({"signed": args.directory, "key": key})


@command("bundle verify", DIRECTORY, opens=False)
def verify_(args: Namespace, out: Printer) -> int | None:
    """Say who signed a bundle; exits with 3 unless it is a publisher that is trusted here."""
    from livinglayer.bundle import sign
    from livinglayer.bundle.load import load

    name, key = sign.verify(load(args.directory).files)
    out.say(f"Signed by {name}, nothing has changed since", GREEN)
    out.data({"publisher": name, "key": key})
    return None


@command(
    "bundle keygen", arg("--key", metavar="FILE", help="where to put it (default: in your configuration)"), opens=False
)
def keygen_(args: Namespace, out: Printer) -> None:
    """Make a key to sign bundles with; gives its public half, which others can trust."""
    from livinglayer.bundle import sign

    key = sign.keygen(args.key)
    out.say(key)
    out.data({"key": key})


@command(
    "bundle trust",
    arg("name", nargs="?", help="a publisher; none: those that are trusted"),
    arg("key", nargs="?", help="its public key"),
    arg("--remove", action="store_true", help="do not trust it any more"),
    opens=False,
)
def trust_(args: Namespace, out: Printer) -> None:
    """Trust a publisher's key, or list those that are trusted."""
    from livinglayer.bundle import sign

    if args.name is None:
        out.rows([{"publisher": name, "key": key} for name, key in sign.publishers().items()], noun="publisher")
        return
    if args.remove:
        sign.distrust(args.name)
    elif args.key is None:
        raise Invalid(f"which key is {args.name!r}'s?", hint="layer bundle trust NAME KEY")
    else:
        sign.trust(args.name, args.key)
    out.say(f"{args.name} is {'not ' if args.remove else ''}trusted here")
    out.data({"publisher": args.name, "trusted": not args.remove})


@command("bundle schema", opens=False)
def schema_(args: Namespace, out: Printer) -> None:
    """Print the JSON Schema of a bundle's files, for editors."""
    import json

    from livinglayer.bundle.documents import schema

    print(json.dumps(schema(), indent=2, ensure_ascii=False), file=out.out)
