"""The commands about secrets: `layer secret …`. A value comes from standard input, a prompt or a file, never from the command line."""

from __future__ import annotations

import getpass
import sys
from argparse import SUPPRESS, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from livinglayer.edges.cli.commands import acting, arg, command
from livinglayer.edges.cli.commands import seconds as to_the_second
from livinglayer.edges.cli.table import Printer, counted
from livinglayer.errors import Invalid

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS = {"secret": "Keep secrets that boxes use and nobody reads back, and the keys they are sealed with."}
NAME = arg("name", help="letters, digits and _, as of a variable")


def value(args: Namespace) -> str:
    """The value, without the line break that ends a file or a line."""
    from livinglayer.law import secrets  # only here: boxes' commands start without the database

    if args.extra is not None:
        raise Invalid(
            "the value of a secret is not taken from the command line, which others can read",
            hint=f"layer secret set {args.name} asks for it, or reads standard input or --from-file; choose another value now",
        )
    if args.from_file is not None:
        data = Path(args.from_file).read_bytes()
    elif sys.stdin.isatty():
        return getpass.getpass(f"{args.name}: ")
    else:
        data = sys.stdin.buffer.read(secrets.LONGEST + 3)
    try:
        found = data.decode()
    except UnicodeDecodeError:
        found = None  # the error would quote it
    if found is None:
        raise Invalid(f"the value of secret {args.name!r} is not UTF-8 text")
    return found.removesuffix("\n").removesuffix("\r")


@command(
    "secret set",
    NAME,
    arg("extra", nargs="?", help=SUPPRESS),
    arg("--from-file", metavar="FILE", help="read the value from a file (default: standard input, or a prompt)"),
    arg("--description", metavar="TEXT", help="what it is for"),
    flags="as branch reason",
)
def set_(layer: Layer, args: Namespace, out: Printer) -> None:
    """Keep a secret, or give it another value; nothing shows it again."""
    from livinglayer.law import secrets

    secrets.undumpable()
    number = secrets.set(
        layer,
        args.name,
        value(args),
        description=args.description,
        principal=acting(args),
        branch=args.branch or "main",
        reason=args.reason,
    )
    out.say(f"Set secret {args.name}")
    out.data({"secret": args.name, "id": number})


@command("secret list", flags="as branch")
def list_(layer: Layer, args: Namespace, out: Printer) -> None:
    """List the secrets: when and by whom each was set, and when it was used last; never a value."""
    from livinglayer.law import secrets

    rows = secrets.describe(layer, branch=args.branch or "main", principal=acting(args))
    out.rows(rows if out.json else to_the_second(rows), noun="secret")


@command("secret remove", NAME, flags="as branch reason")
def remove(layer: Layer, args: Namespace, out: Printer) -> None:
    """Take a secret away; boxes that have it already keep it until they end."""
    from livinglayer.law import secrets

    secrets.remove(layer, args.name, principal=acting(args), branch=args.branch or "main", reason=args.reason)
    out.say(f"Removed secret {args.name}")
    out.data({"removed": args.name})


@command("secret keys")
def keys(layer: Layer, args: Namespace, out: Printer) -> None:
    """List the keys that seal secrets, by name, and where they lie."""
    from livinglayer.law import secrets

    found = secrets.keys(layer)
    if not out.json:
        out.say(f"In {secrets.key_file(layer.id)}")
    out.rows(found, noun="key")


@command("secret rotate-key", flags="as reason")
def rotate_key(layer: Layer, args: Namespace, out: Printer) -> None:
    """Make a new key and seal everything with it, on main and all open branches; values stay as they are."""
    from livinglayer.law import secrets

    done = secrets.rotate_key(layer, principal=acting(args), reason=args.reason)
    out.say(f"Key {done['key']} seals {counted(done['rewrapped'].get('main', 0), 'secret')} of main from now on")
    out.data(done)


@command("secret forget-key", arg("key", help="its name, from `layer secret keys`"), flags="as reason")
def forget_key(layer: Layer, args: Namespace, out: Printer) -> None:
    """Destroy a key that seals nothing any more: what it sealed in history and backups can never be read again."""
    from livinglayer.law import secrets

    done = secrets.forget_key(layer, args.key, principal=acting(args), reason=args.reason)
    out.say(f"Forgot key {done['key']}; {counted(done['unreadable'], 'old version')} can't be read any more")
    out.data(done)
