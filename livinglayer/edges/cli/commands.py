"""The commands of `layer`, one function each. A function's first docstring line is its help."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import livinglayer
from livinglayer.edges.cli import locate
from livinglayer.edges.cli.table import DIM, GREEN, RED, Printer, counted
from livinglayer.errors import Invalid, NotFound, Unauthenticated
from livinglayer.substrate.branches import Merge

if TYPE_CHECKING:
    from livinglayer import Layer

Arguments = tuple[tuple[tuple[str, ...], dict[str, Any]], ...]


@dataclass(frozen=True)
class Command:
    """One subcommand (`box create` is one too): its function, its arguments and which of the shared flags mean something to it."""

    name: str
    run: Callable[..., int | None]
    arguments: Arguments
    flags: frozenset[str]
    opens: bool
    place: str  # what `--dir` or `--state` says where to find: "layer", or the "host" of boxes

    @property
    def help(self) -> str:
        return (self.run.__doc__ or "").partition("\n")[0]


COMMANDS: dict[str, Command] = {}


def arg(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, options


def command(
    name: str,
    *arguments: tuple[tuple[str, ...], dict[str, Any]],
    flags: str = "",
    opens: bool = True,
    place: str = "layer",
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a command; with `opens` its function gets the open layer first."""

    def register(run: Callable[..., int | None]) -> Callable[..., int | None]:
        COMMANDS[name] = Command(name, run, arguments, frozenset(flags.split()), opens, place)
        return run

    return register


# -- words on the command line ----------------------------------------------------------------------------------------


def value(word: str) -> Any:
    """A value as people type it: JSON where it is JSON (3, 2.5, true, null, "3"), else the text itself."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def moment(word: str) -> int | datetime:
    """A tx number, or a time; a time without a zone is local."""
    if word.isdecimal():
        return int(word)
    try:
        return datetime.fromisoformat(word).astimezone()
    except ValueError:
        raise Invalid(
            f"{word!r} is neither a tx number nor a time", hint="42, 2026-03-01 or 2026-03-01T12:00:00Z"
        ) from None


def pairs(words: list[str] | None, what: str) -> dict[str, Any]:
    found = {}
    for word in words or ():
        name, equals, rest = word.partition("=")
        if not equals or not name:
            raise Invalid(f"{what} {word!r} is not NAME=VALUE", hint="-p n=2")
        found[name] = value(rest)
    return found


@contextlib.contextmanager
def progress(doing: str) -> Iterator[None]:
    """Show on a terminal that long work goes on."""
    done = threading.Event()

    def show() -> None:
        start = time.monotonic()
        while not done.wait(0.5):
            print(f"\r{doing} … {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield
        return
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# -- the layer itself -------------------------------------------------------------------------------------------------


@command(
    "init",
    arg("directory", nargs="?", default=None, metavar="DIR", help="where (default: the current directory)"),
    arg("--db", metavar="URL", help="keep the data in this PostgreSQL database instead of in DIR"),
    opens=False,
)
def init(args: Namespace, out: Printer) -> None:
    """Make a layer in a directory, embedded or standing for a PostgreSQL database; an existing one is left as it is."""
    if args.directory and args.dir:
        raise Invalid("init was given DIR and --dir", hint="layer init DIR")
    home = Path(args.directory or args.dir or ".")
    if args.db and not locate.is_url(args.db):
        raise Invalid(f"{args.db!r} is no PostgreSQL URL", hint="--db postgresql://user@host/database")
    url = locate.check_free(home, args.db)
    existed = True
    try:
        livinglayer.open(url or str(home)).close()
    except NotFound:
        existed = False
        livinglayer.open(url or str(home), create=True).close()
    if url:
        locate.configure(home, url)
    place = str((home / locate.HOME).resolve())
    out.say(
        f"{'There was already a layer' if existed else 'Made a layer'} in {place}{f' for {locate.hide_password(url)}' if url else ''}"
    )
    out.data(
        {"directory": str(home.resolve()), "db": locate.hide_password(url) if url else None, "created": not existed}
    )


@command(
    "schema",
    arg("entity", nargs="?", help="one entity, which may be the system's (default: all but the system's)"),
    flags="as branch as_of",
)
def schema(layer: Layer, args: Namespace, out: Printer) -> None:
    """Show entities and their fields, on a branch and at a time if asked."""
    where = "e.name = :name" if args.entity else "not e.system"
    rows = layer.query(
        f"select f.*, e.name as of_entity from entity e join field f on f.entity = e.id where {where} order by e.name, f.id",
        {"name": args.entity} if args.entity else {},
        **reading(args),
    )
    if args.entity and not rows:
        raise NotFound(f"there is no entity {args.entity!r}", hint="layer schema")
    fields = [
        {
            "entity": row["of_entity"],
            "field": row["name"],
            "type": row["type"],
            "to": row["target"],
            "on_delete": row["on_delete"] if row["target"] else None,
            "required": row["required"],
            "unique": row["uniq"],
            "indexed": row["indexed"],
            "default": row["initial"],
            "check": row["rule"],
            "options": row["options"],
            "description": row["description"],
            "annotations": row["annotations"],
        }
        for row in rows
    ]
    out.rows(fields, columns=telling(fields), noun="field")


def telling(rows: list[dict[str, Any]]) -> list[str]:
    """The columns that say something about any of the rows; people are spared the others."""
    return [name for name in (rows[0] if rows else ()) if any(row[name] not in (None, False) for row in rows)]


def reading(args: Namespace) -> dict[str, Any]:
    """The shared flags of a read, as `layer.query` takes them."""
    return {
        "branch": args.branch or "main",
        "as_of": moment(args.as_of) if args.as_of else None,
        "principal": acting(args),
    }


def acting(args: Namespace) -> str | None:
    """Who `--as` says acts; else whoever's token is found."""
    return str(name) if (name := getattr(args, "as")) is not None else None


@command(
    "query",
    arg("sql", help="one SELECT over entity names; - reads it from standard input"),
    arg("-p", "--param", action="append", metavar="NAME=VALUE", help="a value for :NAME in the SQL; may be repeated"),
    flags="as branch as_of timeout limit",
)
def query(layer: Layer, args: Namespace, out: Printer) -> None:
    """Read with SQL: any SELECT over entities, their __history and the system's tables; nothing can be written."""
    sql = sys.stdin.read() if args.sql == "-" else args.sql
    params = pairs(args.param, "the parameter")
    out.rows(layer.query(sql, params, timeout=args.timeout, limit=args.limit, **reading(args)))


@command("log", arg("-n", type=int, default=20, metavar="COUNT", help="how many (default: 20)"), flags="as branch")
def log(layer: Layer, args: Namespace, out: Printer) -> None:
    """Show the latest transactions: number, time, branch, who and why."""
    where = "where branch = :branch" if args.branch else ""
    rows = layer.query(
        f"select * from tx {where} order by tx desc limit {max(0, args.n)}",
        {"branch": args.branch} if args.branch else {},
        principal=acting(args),
    )
    out.rows(
        rows if out.json else seconds(rows), columns=("tx", "at", "branch", "principal", "reason"), noun="transaction"
    )


def seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their times to the second, which is what fits a line."""
    return [
        {name: item.replace(microsecond=0) if isinstance(item, datetime) else item for name, item in row.items()}
        for row in rows
    ]


# -- branches ---------------------------------------------------------------------------------------------------------


@command("branches", flags="as")
def branches(layer: Layer, args: Namespace, out: Printer) -> None:
    """List the branches, with what they were forked from and when."""
    rows = layer.query(
        "select b.name, p.name as parent, b.fork_tx, b.slice, b.status"
        " from branch b left join branch p on p.id = b.parent order by b.id",
        principal=acting(args),
    )
    out.rows(rows, noun="branch")


@command(
    "fork",
    arg("name", help="the new branch"),
    arg("--from", dest="source", metavar="BRANCH", help="what to fork (default: --branch, else main)"),
    arg(
        "--slice",
        action="append",
        metavar="ENTITY[=PREDICATE]",
        help="only this entity, and only its rows that match; may be repeated, entities not named are not there",
    ),
    arg(
        "--box", metavar="BOX", help="fork this box with it: one that begins where this one is, and acts on the branch"
    ),
    arg("--box-name", metavar="NAME", help="of the forked box (default: after the box)"),
    flags="as branch as_of reason",
)
def fork(layer: Layer, args: Namespace, out: Printer) -> None:
    """Open a branch: everything or a slice of it, to change freely; costs one row whatever the size."""
    cuts = None
    if args.slice:
        cuts = {entity: predicate or None for entity, _, predicate in (word.partition("=") for word in args.slice)}
    source = args.source or args.branch or "main"
    if args.box:
        if args.as_of:
            raise Invalid("a box can't be forked as it was", hint="leave --as-of out")
        given = {"name": args.name, "box": args.box, "source": source, "slice": cuts, "box_name": args.box_name}
        made = layer.call("reality.fork", given, principal=acting(args), reason=args.reason)
        out.say(f"Forked {args.name} from {source}, and box {made['box']} ({made['id']}) from {args.box}")
        if made["kept"] == "started":
            out.say("No worker runs here, so a process was started that answers for it: layer box keep")
        out.data(made)
        return
    layer.fork(
        args.name,
        source=source,
        slice=cuts,
        as_of=moment(args.as_of) if args.as_of else None,
        reason=args.reason,
        principal=acting(args),
    )
    out.say(f"Forked {args.name} from {source}; work on it with --branch {args.name}")
    out.data({"branch": args.name, "source": source})


BRANCH = arg("name", metavar="BRANCH")
PARENT = arg("target", nargs="?", metavar="PARENT", help="the branch it was forked from, which is the default")


@command("diff", BRANCH, PARENT, flags="as")
def diff(layer: Layer, args: Namespace, out: Printer) -> None:
    """Show what a branch changed since it was forked or last merged, row by row and field by field."""
    changes(layer.diff(args.name, args.target, principal=acting(args)), out)


def changes(found: list[dict[str, Any]], out: Printer) -> None:
    if out.json:
        out.data([flat(change) for change in found])
        return
    shown = []
    for change in found:
        head = {"entity": change["entity"], "id": change["id"], "op": change["op"]}
        for name, (before, after) in (change["fields"] or {"": (None, None)}).items():
            shown.append(head | {"field": name, "before": before, "after": after})
    if shown:
        out.table(("entity", "id", "op", "field", "before", "after"), shown)
    out.say(f"{counted(len(found), 'row')} changed", DIM)


def flat(change: dict[str, Any]) -> dict[str, Any]:
    fields = {name: {"before": before, "after": after} for name, (before, after) in change["fields"].items()}
    return change | {"fields": fields}


@command(
    "merge",
    BRANCH,
    PARENT,
    arg("--preview", action="store_true", help="say what would happen and change nothing"),
    arg("--artifacts", action="store_true", help="keep the files that boxes forked with it have written, as artifacts"),
    flags="as reason",
)
def merge(layer: Layer, args: Namespace, out: Printer) -> int:
    """Bring a branch's changes into its parent, all or none; conflicts are listed and exit 5."""
    brought: list[dict[str, Any]] = []
    if args.artifacts and not args.preview:
        given = {"name": args.name, "target": args.target}
        told = layer.call("reality.merge", given, principal=acting(args), reason=args.reason)
        brought = told.pop("artifacts")
        result = Merge(**told)
    else:
        result = layer.merge(args.name, args.target, preview=args.preview, reason=args.reason, principal=acting(args))
    out.data(
        {
            "applied": result.applied,
            "tx": result.tx,
            "changes": [flat(change) for change in result.changes],
            "conflicts": list(result.conflicts),
            **({"artifacts": brought} if args.artifacts else {}),
        }
    )
    if result.conflicts:
        if not out.json:
            show_conflicts(list(result.conflicts), out)
            print(f"layer: {args.name!r} conflicts with its parent; nothing was merged", file=sys.stderr)
            print(
                f"hint: layer resolve ID VALUE, or --take ours|theirs, then layer merge {args.name} again",
                file=sys.stderr,
            )
        return 5
    if not out.json and args.preview:
        changes(list(result.changes), out)
        out.say("Nothing conflicts; nothing was changed: this was a preview")
    elif result.changes:
        out.say(f"Merged {args.name} in tx {result.tx}: {counted(len(result.changes), 'row')}", GREEN)
    else:
        out.say(f"{args.name} has nothing that its parent lacks")
    return 0


CONFLICT = ("id", "branch", "target", "entity", "row", "field", "base", "ours", "theirs")


def show_conflicts(found: list[dict[str, Any]], out: Printer) -> None:
    out.rows(found, columns=CONFLICT, noun="conflict")


@command("conflicts", arg("name", nargs="?", help="of this branch (default: of all)"))
def conflicts(layer: Layer, args: Namespace, out: Printer) -> None:
    """List the conflicts that keep branches from merging."""
    show_conflicts(list(layer.conflicts(args.name)), out)


@command(
    "resolve",
    arg("conflict", type=int, help="its id, from `layer conflicts`"),
    arg("value", nargs="?", help="the value to keep: JSON, or plain text"),
    arg("--take", choices=("ours", "theirs"), help="keep the branch's value (ours) or the target's (theirs)"),
    flags="as reason",
)
def resolve(layer: Layer, args: Namespace, out: Printer) -> None:
    """Settle a conflict, with a value or by taking a side; then merge again."""
    if (args.value is None) == (args.take is None):
        raise Invalid("resolve needs a value or --take, and not both", hint="layer resolve 7 --take ours")
    given = {"take": args.take} if args.take else {"value": value(args.value)}
    layer.resolve(args.conflict, reason=args.reason, principal=acting(args), **given)
    out.say(f"Conflict {args.conflict} is resolved")
    out.data({"conflict": args.conflict, "open": len(layer.conflicts())})


@command("discard", BRANCH, flags="as reason")
def discard(layer: Layer, args: Namespace, out: Printer) -> None:
    """Give a branch up: its name is free again, and what happened on it stays readable."""
    layer.discard(args.name, reason=args.reason, principal=acting(args))
    out.say(f"Discarded {args.name}; `layer branches` shows the name it is kept under")
    out.data({"discarded": args.name})


# -- authority --------------------------------------------------------------------------------------------------------

WHO = arg("principal", help="a principal or a role")
ACTION = arg(
    "action",
    help="read, insert, update, delete, write, fork, merge, grant, impersonate, call, use, approve, connect or *",
)
RESOURCE = arg("resource", help="an entity, entity.field, entity/ID, branch:NAME, function:NAME or *")


@command("can", WHO, ACTION, RESOURCE, flags="branch as_of")
def can(layer: Layer, args: Namespace, out: Printer) -> int:
    """Ask whether somebody may do something, and which permissions decide; exits 1 when the answer is no."""
    decision = layer.can(
        args.principal,
        args.action,
        args.resource,
        branch=args.branch or "main",
        as_of=moment(args.as_of) if args.as_of else None,
    )
    out.data({"allowed": decision.allowed, "reason": decision.reason, "rows": list(decision.rows)})
    out.say("yes" if decision.allowed else "no", GREEN if decision.allowed else RED)
    if decision.reason:
        out.say(decision.reason)
    if decision.rows and not out.json:
        names = {row["id"]: row["name"] for row in layer.query("select id, name from principal")}
        called = [
            row | {name: names.get(row[name], row[name]) for name in ("subject", "granted_by") if name in row}
            for row in decision.rows
        ]
        out.rows(called, columns=telling(called), noun="permission")
    return 0 if decision.allowed else 1


@command(
    "grant",
    WHO,
    ACTION,
    arg("resource", help="an entity, entity.field, branch:NAME, function:NAME or *"),
    arg("--where", metavar="PREDICATE", help="only rows that match, such as 'owner = :me'"),
    arg("--fields", metavar="A,B", help="only these fields"),
    arg("--deny", action="store_true", help="forbid instead; a denial wins over any permission"),
    arg("--valid-from", metavar="TIME", help="holds from then on"),
    arg("--valid-to", metavar="TIME", help="holds until then"),
    arg("--delegable", action="store_true", help="may be passed on, narrowed but never widened"),
    flags="as branch reason",
)
def grant(layer: Layer, args: Namespace, out: Printer) -> None:
    """Permit (or with --deny forbid) a principal or role an action; without a permission the answer is no."""
    permission = layer.grant(
        args.principal,
        args.action,
        args.resource,
        where=args.where,
        fields=[name.strip() for name in args.fields.split(",")] if args.fields else None,
        branch=args.branch,
        effect="deny" if args.deny else "allow",
        reason=args.reason,
        valid_from=clock(args.valid_from),
        valid_to=clock(args.valid_to),
        delegable=args.delegable,
        by=acting(args),
    )
    out.say(
        f"{'Denied' if args.deny else 'Granted'} {args.principal} {args.action} {args.resource}: permission {permission}"
    )
    out.data({"permission": permission})


def clock(word: str | None) -> datetime | None:
    if word is None:
        return None
    found = moment(word)
    if isinstance(found, int):
        raise Invalid(f"{word!r} is no time", hint="2026-03-01 or 2026-03-01T12:00:00Z")
    return found


@command(
    "revoke",
    arg("permission", type=int, help="its id, from `layer query 'select * from permission'`"),
    flags="as reason",
)
def revoke(layer: Layer, args: Namespace, out: Printer) -> None:
    """Take a permission back; its history stays."""
    layer.revoke(args.permission, reason=args.reason, by=acting(args))
    out.say(f"Revoked permission {args.permission}")
    out.data({"revoked": args.permission})


# -- trust ------------------------------------------------------------------------------------------------------------


@command("verify")
def verify(layer: Layer, args: Namespace, out: Printer) -> int:
    """Reread everything and recompute the chain of hashes; names the first transaction that is not as written, exits 1."""
    with progress("Verifying"):
        report = layer.verify()
    problems = [{"tx": tx, "problem": problem} for tx, problem in report.problems]
    out.data({"ok": report.ok, "tx": report.tx, "rows": report.rows, "problems": problems})
    if report.ok:
        out.say(f"All is as it was written, up to tx {report.tx}: {report.rows} rows", GREEN)
        return 0
    if not out.json:
        out.rows(problems, columns=("tx", "problem"), noun="problem")
        first = next((problem["tx"] for problem in problems if problem["tx"] is not None), None)
        where = f"the first bad transaction is tx {first}" if first is not None else "outside any one transaction"
        print(f"layer: the stored content is not what was written: {where}", file=sys.stderr)
        print("hint: layer restore BACKUP DIR brings back the last good copy", file=sys.stderr)
    return 1


@command("backup", arg("destination", metavar="DEST", help="a directory that does not exist yet"))
def backup(layer: Layer, args: Namespace, out: Printer) -> None:
    """Copy the whole layer, while it is in use, into a directory that is itself an embedded layer."""
    with progress("Backing up"):
        layer.backup(args.destination)
    out.say(f"Backed up to {args.destination}")
    out.data({"backup": args.destination})


@command(
    "restore",
    arg("backup", help="a directory made by `layer backup`"),
    arg("directory", nargs="?", default=None, metavar="DIR", help="where (default: the current directory)"),
    arg("--db", metavar="URL", help="into this PostgreSQL database instead"),
    opens=False,
)
def restore(args: Namespace, out: Printer) -> None:
    """Make a layer from a backup, on either engine; refuses a place that already holds one."""
    if args.directory and args.dir:
        raise Invalid("restore was given DIR and --dir", hint="layer restore BACKUP DIR")
    home = Path(args.directory or args.dir or ".")
    if args.db and not locate.is_url(args.db):
        raise Invalid(f"{args.db!r} is no PostgreSQL URL", hint="--db postgresql://user@host/database")
    url = locate.check_free(home, args.db)
    try:
        with progress("Restoring"):
            livinglayer.restore(args.backup, url or str(home)).close()
    except Unauthenticated:  # restored, but whoever did it has no token to open it with
        if url:
            locate.configure(home, url)
        raise
    if url:
        locate.configure(home, url)
    out.say(f"Restored {args.backup} to {home.resolve()}")
    out.data({"restored": args.backup, "directory": str(home.resolve())})


FORMATS = ("jsonl", "csv", "parquet")


def chosen_format(args: Namespace) -> str:
    suffix = Path(args.path).suffix.removeprefix(".")
    return str(args.format or (suffix if suffix in FORMATS else "jsonl"))


@command(
    "export",
    arg("entity"),
    arg("path", help="the file; - writes to standard output"),
    arg("--format", choices=FORMATS, help="default: by the file's name, else jsonl"),
    flags="as branch as_of",
)
def export(layer: Layer, args: Namespace, out: Printer) -> None:
    """Write an entity's rows to a file, exactly: values come back as they were."""
    with tempfile.TemporaryDirectory() as spare, progress("Exporting"):
        path = str(Path(spare, "rows")) if args.path == "-" else args.path
        count = layer.export(
            args.entity,
            path,
            format=chosen_format(args),
            branch=args.branch or "main",
            as_of=moment(args.as_of) if args.as_of else None,
            principal=acting(args),
        )
        if args.path == "-":
            with open(path, "rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
            return
    out.say(f"Exported {counted(count, 'row')} of {args.entity} to {args.path}")
    out.data({"entity": args.entity, "path": args.path, "rows": count})


@command(
    "import",
    arg("entity"),
    arg("path", help="the file"),
    arg("--format", choices=FORMATS, help="default: by the file's name, else jsonl"),
    flags="as branch reason",
)
def import_(layer: Layer, args: Namespace, out: Printer) -> None:
    """Insert the rows of a file into an entity, all or none."""
    with progress("Importing"):
        count = layer.import_(
            args.entity,
            args.path,
            format=chosen_format(args),
            branch=args.branch or "main",
            reason=args.reason,
            principal=acting(args),
        )
    out.say(f"Imported {counted(count, 'row')} of {args.path} into {args.entity}")
    out.data({"entity": args.entity, "path": args.path, "rows": count})


@command(
    "prune",
    arg("before", help="forget versions that ended before this tx number or time"),
    arg("--yes", action="store_true", help="really do it: what is pruned cannot be read again"),
    flags="reason",
)
def prune(layer: Layer, args: Namespace, out: Printer) -> None:
    """Forget old versions of rows, up to a point; the live rows stay and the chain still verifies."""
    before = moment(args.before)
    if not args.yes:
        raise Invalid(
            "pruned history cannot be read again", hint=f"layer prune {args.before} --yes, after a layer backup"
        )
    with progress("Pruning"):
        count = layer.prune(before=before, reason=args.reason)
    out.say(f"Pruned {counted(count, 'version')} that ended before {args.before}")
    out.data({"pruned": count, "before": args.before})
