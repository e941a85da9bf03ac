"""The commands about boxes: `layer box …`, `layer host`, `layer doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import posixpath
import random
import re
import stat as modes
import sys
import threading
import time
from argparse import REMAINDER, Namespace
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import livinglayer
from livinglayer.edges.cli import locate
from livinglayer.edges.cli.commands import acting, arg, command
from livinglayer.edges.cli.table import BOLD, DIM, GREEN, RED, Printer, counted, escape
from livinglayer.errors import Conflict, Invalid, LayerError, NotFound, Unavailable
from livinglayer.sandbox.blueprint import NAME, TIERS, VARIABLE
from livinglayer.sandbox.client import blocking_client
from livinglayer.sandbox.sandbox import Sandbox
from livinglayer.settings import state_directory

GROUPS = {
    "box": "Make, use and end boxes: disposable computers in which unreviewed code can run.",
    "box snapshots": "See, compare and remove what was kept of boxes.",
}
HOME = "/home/user"
CALM = "brave calm clever eager fair gentle keen kind lively lucky mellow merry neat noble patient proud quick quiet".split()
BEASTS = (
    "badger bee crane deer eel falcon finch fox gull hare heron ibis lark lynx mole newt otter owl seal swan".split()
)
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


# -- words on the command line ----------------------------------------------------------------------------------------


def seconds(word: str) -> float:
    """A span of time: 90, 90s, 15m, 2h, 1d."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", word.strip())
    if not found:
        raise Invalid(f"{word!r} is no span of time", hint="90, 15m, 2h or 1d")
    return float(found[1]) * UNITS[found[2]]


def idle(words: list[str] | None) -> dict[str, float]:
    steps = {}
    for word in ",".join(words or ()).split(","):
        if word:
            step, equals, span = word.partition("=")
            if not equals or step not in ("freeze", "checkpoint", "archive"):
                raise Invalid(
                    f"{word!r} is no step of the idle ladder", hint="--idle freeze=5m,checkpoint=1h,archive=1d"
                )
            steps[step] = seconds(span)
    return steps


def environment(words: list[str] | None) -> dict[str, str]:
    """NAME=VALUE as given, NAME alone with the value it has here."""
    found = {}
    for word in words or ():
        name, equals, text = word.partition("=")
        if not equals and name not in os.environ:
            raise Invalid(f"{name!r} is not set here", hint=f"-e {name}=VALUE")
        found[name] = text if equals else os.environ[name]
    return found


def rule(word: str) -> str | dict[str, Any]:
    """An egress rule: a host or URL, or a JSON object."""
    if not word.startswith("{"):
        return word
    try:
        found = json.loads(word)
    except ValueError as error:
        raise Invalid(
            f"egress rule {word!r} is not JSON: {error}", hint='{"host": "api.test", "method": ["GET"]}'
        ) from None
    assert isinstance(found, dict)
    return found


def mount(word: str) -> dict[str, Any]:
    source, _, rest = word.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target or mode not in ("", "ro", "rw"):
        raise Invalid(f"mount {word!r} is not SOURCE:TARGET[:rw]", hint="--mount ./data:/data")
    return {"source": os.path.abspath(source), "target": target, "readonly": mode != "rw"}


def secrets(args: Namespace) -> dict[str, str]:
    """Values of secrets: from the environment or from files, since a command line can be read by everyone on this machine."""
    found = {}
    for name in args.secret or ():
        if not VARIABLE.fullmatch(name):
            raise Invalid(
                "--secret takes a name only: others can read a command line",
                hint="put the value into a variable of that name, or use --secret-file NAME=FILE",
            )
        if name not in os.environ:
            raise Invalid(f"secret {name!r} is not set here", hint=f"export {name}=…, or --secret-file {name}=FILE")
        found[name] = os.environ[name]
    for word in args.secret_file or ():
        name, equals, path = word.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise Invalid(f"secret file {word!r} is not NAME=FILE", hint="--secret-file TOKEN=/run/token")
        found[name] = Path(path).read_text().rstrip("\n")
    return found


def place(word: str) -> tuple[str, str] | None:
    """BOX:PATH as (box, path in it, made absolute), None when the word is a local path."""
    box, colon, path = word.partition(":")
    if not colon or not NAME.fullmatch(box):
        return None
    return box, posixpath.normpath(posixpath.join(HOME, path)) + ("/" if path.endswith("/") and path != "/" else "")


# -- what people read -------------------------------------------------------------------------------------------------


def human(size: float | None) -> str:
    """Bytes in a few characters."""
    if size is None:
        return ""
    for unit in ("", "K", "M", "G"):
        if size < 1024:
            return f"{size:.0f}{unit}" if not unit or size >= 10 else f"{size:.1f}{unit}"
        size /= 1024
    return f"{size:.1f}T"


def span(length: float) -> str:
    """Seconds in a few characters."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if length >= 2 * size:
            return f"{length / size:.0f}{unit}"
    return f"{length:.0f}s"


def clock(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC).replace(microsecond=0)


@contextlib.contextmanager
def telling(doing: str) -> Iterator[Callable[[str], None]]:
    """Long work: what the host says about it, on standard error; on a terminal one line that counts the seconds."""
    if not sys.stderr.isatty():
        yield lambda line: print(escape(line), file=sys.stderr, flush=True)
        return
    done, latest, start = threading.Event(), doing, time.monotonic()

    def say(line: str) -> None:
        nonlocal latest
        latest = line

    def show() -> None:
        while not done.wait(0.5):
            print(
                f"\r\x1b[K{escape(latest)[:100]} … {time.monotonic() - start:.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        done.set()
        thread.join()
        if time.monotonic() - start > 0.5:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def host(request: dict[str, Any], say: Callable[[str], None] = lambda line: None) -> Any:
    """One request to the host that no method of a Sandbox makes."""
    work = blocking_client().call(request, say=say)
    from livinglayer.sandbox.client import run_blocking

    return run_blocking(work)


def boxes_here() -> list[dict[str, Any]]:
    return list(host({"do": "list"}))


def call_it(found: dict[str, Any]) -> str:
    return str(found["name"] or found["id"])


# -- life -------------------------------------------------------------------------------------------------------------

BOX = arg("box", metavar="BOX", help="its name or id, from `layer box list`")


@command(
    "box create",
    arg("name", nargs="?", metavar="NAME", help="lower-case letters, digits, hyphens (default: one is made up)"),
    arg(
        "--tier",
        choices=TIERS,
        help="how strong its walls are (default: namespace); `layer doctor` says which work here",
    ),
    arg(
        "--base",
        metavar="BASE",
        help="its files: host (the default: this machine's programs, without its data), debian, or an OCI image",
    ),
    arg("--snapshot", metavar="ID", help="begin with the files of this snapshot"),
    arg("--memory", metavar="SIZE", help="such as 256M or 2G (default: 512M)"),
    arg("--pids", metavar="COUNT", type=int, help="processes and threads (default: 256)"),
    arg("--cpu", metavar="CORES", type=float, help="such as 0.5 or 2 (default: 1)"),
    arg("--disk", metavar="SIZE", help="of what it writes (default: 1G)"),
    arg("--output", metavar="SIZE", help="of each stream of one command; the rest is dropped (default: 16M)"),
    arg("--lifetime", metavar="SPAN", help="it ends after so long: 90, 15m, 2h, 1d (default: never)"),
    arg(
        "--egress",
        metavar="RULE",
        action="append",
        help="what it may reach: a host, https://host/path/*, tcp://host:port, or a JSON object; may be repeated (default: nothing)",
    ),
    arg(
        "-e",
        "--env",
        metavar="NAME[=VALUE]",
        action="append",
        help="a variable of every command in it; may be repeated",
    ),
    arg(
        "--secret",
        metavar="NAME",
        action="append",
        help="a secret for egress rules that name it; its value is read from the variable NAME here and never enters the box",
    ),
    arg("--secret-file", metavar="NAME=FILE", action="append", help="the same with the value from a file"),
    arg(
        "--mount",
        metavar="SOURCE:TARGET[:rw]",
        action="append",
        help="a directory of this machine that it sees, read-only unless rw; may be repeated",
    ),
    arg("--user", metavar="USER", help="who its commands run as (default: user; root is root inside only)"),
    arg(
        "--idle",
        metavar="STEP=SPAN,…",
        action="append",
        help="when nobody uses it: freeze=5m,checkpoint=1h,archive=1d; touching it wakes it",
    ),
    arg("--record", metavar="FILE", help="keep every answer from the network in this file"),
    arg("--replay", metavar="FILE", help="answer from such a file instead of the network"),
    arg("--contract", metavar="NAME", help="a box of this contract of the layer, which says all of its shape"),
    arg(
        "--slice",
        action="append",
        metavar="ENTITY[=PREDICATE]",
        help="of what the contract reads, only this entity and only its rows that match; may be repeated",
    ),
    flags="as branch reason",
    opens=False,
    place="both",
)
def create(args: Namespace, out: Printer) -> None:
    """Make a box that stays until it is killed, and say how strong its walls are."""
    if args.contract:
        return of_contract(args, out)
    for key in ("dir", "as", "branch", "reason", "slice"):
        if getattr(args, key) is not None:
            raise Invalid(f"--{key} is for boxes of a contract", hint="--contract NAME")
    shape = {
        "base": args.base,
        "memory": args.memory,
        "pids": args.pids,
        "cpu": args.cpu,
        "disk": args.disk,
        "output": args.output,
        "wall": seconds(args.lifetime) if args.lifetime else None,
        "egress": [rule(word) for word in args.egress or ()],
        "env": environment(args.env),
        "mounts": [mount(word) for word in args.mount or ()],
        "user": args.user,
        "idle": idle(args.idle),
    }
    more = {key: os.path.abspath(path) for key in ("record", "replay") if (path := getattr(args, key))}
    given = secrets(args)
    with telling("Making a box") as say:
        for attempt in range(10):
            name = args.name or f"{random.choice(CALM)}-{random.choice(BEASTS)}"
            try:
                box = Sandbox.create(
                    args.tier, name=name, snapshot=args.snapshot, secrets=given, progress=say, **more, **shape
                )
                break
            except Conflict:
                if args.name or attempt == 9:
                    raise
    found = box.info()
    out.say(f"Made box {name} ({found['id']}) at tier {found['tier']}: {found['isolation']}")
    out.say(f"Use it: layer box exec {name} -- COMMAND, or layer box shell {name}", DIM)
    out.data(found)


OF_CONTRACT = ("tier", "base", "snapshot", "memory", "pids", "cpu", "disk", "output", "lifetime", "egress", "env", "secret",
               "secret_file", "mount", "user", "idle", "record", "replay")  # fmt: skip


def of_contract(args: Namespace, out: Printer) -> None:
    """A box as a contract says, on a branch, with a view over a slice."""
    for key in OF_CONTRACT:
        if getattr(args, key) is not None:
            raise Invalid(f"--{key.replace('_', '-')} is not for a box of a contract: its blueprint says that")
    cuts = None
    if args.slice:
        cuts = {entity: where or None for entity, _, where in (word.partition("=") for word in args.slice)}
    layer = livinglayer.open(locate.find(args.dir))
    try:
        with telling("Making a box"):
            found = layer.call(
                "box.create", contract=args.contract, name=args.name, slice=cuts, branch=args.branch or "main",
                principal=acting(args), reason=args.reason,
            )  # fmt: skip
    finally:
        layer.close()
    name = found["box"]
    out.say(
        f"Made box {name} ({found['id']}) of contract {args.contract} at tier {found['tier']}: {found['isolation']}"
    )
    out.say(f"In it `layer query`, `layer insert` … act on branch {found['branch']} as execution {found['execution']}")
    if found["slice"]:
        out.say(f"Its slice is at {found['slice']}, in $LAYER_SLICE; `layer slice` there brings a new one")
    if found["kept"] == "started":
        out.say("No worker runs here, so a process was started that answers for it: layer box keep")
    out.say(f"Use it: layer box exec {name} -- COMMAND, or layer box shell {name}", DIM)
    out.data(found)


def listed(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": found["name"] or "",
        "id": found["id"],
        "tier": found["tier"],
        "base": found["base"],
        "state": found["state"],
        "memory": human(found["limits"]["memory"]),
        "egress": counted(len(found["egress"]), "rule") if found["egress"] else "none",
        "age": span(time.time() - found["created"]),
        "from": found["parent"] or (found["snapshot"] or "")[:12],
    }


@command("box list", opens=False, place="host")
def list_(args: Namespace, out: Printer) -> None:
    """List the boxes of this machine, with their tier and state."""
    found = sorted(boxes_here(), key=lambda box: box["created"])
    if out.json:
        out.data(found)
        return
    out.rows([listed(box) for box in found], noun="box")
    if not found:
        out.say("layer box create makes one", DIM)


@command("box pause", BOX, opens=False, place="host")
def pause(args: Namespace, out: Printer) -> None:
    """Freeze a box: its processes stand still, its memory stays."""
    box = Sandbox.connect(args.box)
    box.pause()
    out.say(f"Paused {args.box}; layer box resume {args.box} lets it go on")
    out.data(box.info())


@command("box resume", BOX, opens=False, place="host")
def resume(args: Namespace, out: Printer) -> None:
    """Let a paused or suspended box go on."""
    box = Sandbox.connect(args.box)
    with telling("Resuming"):
        box.resume()
    out.say(f"{args.box} runs")
    out.data(box.info())


@command("box suspend", BOX, opens=False, place="host")
def suspend(args: Namespace, out: Printer) -> None:
    """Put a box to rest on disk, with its processes where the tier can keep them, else with its files alone."""
    box = Sandbox.connect(args.box)
    with telling("Suspending"):
        kept = box.suspend()
    what = (
        "its processes and files are"
        if kept["memory"]
        else f"tier {box.tier} can't keep processes, so they ended; its files are"
    )
    out.say(f"Suspended {args.box}: {what} on disk")
    out.data(box.info() | kept)


@command(
    "box kill",
    arg("box", nargs="*", metavar="BOX", help="names or ids"),
    arg("--all", action="store_true", help="every box of this machine"),
    opens=False,
    place="host",
)
def kill(args: Namespace, out: Printer) -> None:
    """End boxes, with all their processes and files; snapshots and traces stay."""
    if bool(args.box) == args.all:
        raise Invalid("kill needs boxes or --all, and not both", hint="layer box list")
    ended = []
    for found in boxes_here() if args.all else [host({"do": "get", "box": word}) for word in dict.fromkeys(args.box)]:
        with contextlib.suppress(NotFound):  # gone by itself, or by another's hand
            host({"do": "kill", "box": found["id"]})
        ended.append(found)
        out.say(
            f"Killed {call_it(found)}" + (f"; its trace stays: layer box trace {found['id']}" if found["name"] else "")
        )
    if not ended:
        out.say("There was no box")
    out.data([found["id"] for found in ended])


@command(
    "box fork",
    BOX,
    arg("count", nargs="?", type=int, default=1, metavar="COUNT", help="how many (default: 1)"),
    arg("--name", metavar="NAME", help="of the forks: NAME, or NAME-1, NAME-2, … (default: after the box)"),
    opens=False,
    place="host",
)
def fork(args: Namespace, out: Printer) -> None:
    """Make boxes that begin where this one is, while it goes on; with its processes where the tier can."""
    box = Sandbox.connect(args.box)
    if not 1 <= args.count <= 1000:
        raise Invalid(f"fork count {args.count!r} is not between 1 and 1000")
    if args.name and args.count == 1:
        names = [args.name]
    else:
        taken = {found["name"] for found in boxes_here()}
        prefix, number, names = (args.name or box.name or box.id)[:36], 0, []
        while len(names) < args.count:
            number += 1
            if f"{prefix}-{number}" not in taken:
                names.append(f"{prefix}-{number}")
    with telling("Forking"):
        forks = [found.info() for found in box.fork(args.count, names=names)]
    out.say(f"Forked {args.box}: {', '.join(names)}")
    out.data(forks)


# -- commands and files in a box --------------------------------------------------------------------------------------

USER = arg("-u", "--user", metavar="USER", help="as this user of the box (root is root inside only)")
CWD = arg("-w", "--cwd", metavar="DIR", help=f"in this directory of the box (default: {HOME})")
ENV = arg("-e", "--env", metavar="NAME[=VALUE]", action="append", help="a variable; may be repeated")


@command(
    "box exec",
    arg(
        "-i",
        "--stdin",
        action="store_true",
        help="pass standard input on, also from a terminal (from elsewhere it is passed anyway)",
    ),
    arg("-n", "--no-stdin", action="store_true", help="do not read standard input at all"),
    arg("-t", "--tty", action="store_true", help="give it a terminal; with one here, it is yours"),
    USER,
    CWD,
    ENV,
    BOX,
    arg(
        "words",
        nargs=REMAINDER,
        metavar="COMMAND",
        help="the command and its arguments; flags of `layer` stand before BOX",
    ),
    flags="timeout",
    opens=False,
    place="host",
)
def exec_(args: Namespace, out: Printer) -> int:
    """Run a command in a box, with its output as it comes; exits as the command does (128 + N when signal N killed it)."""
    from livinglayer.edges.cli import terminal

    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise Invalid("exec needs a command", hint=f"layer box exec {args.box} -- uname -a")
    stdin = not args.no_stdin and (args.stdin or args.tty or not sys.stdin.isatty())
    if out.json:
        result = Sandbox.connect(args.box).run(
            words,
            stdin=sys.stdin.buffer.read() if stdin else None,
            timeout=args.timeout,
            cwd=args.cwd,
            env=environment(args.env),
            user=args.user,
        )
        out.data(
            {
                "exit_code": result.exit_code,
                "stdout": result.stdout.text,
                "stderr": result.stderr.text,
                "duration": result.duration,
                "truncated": result.truncated,
                "usage": dict(result.usage),
            }
        )
        return terminal.exit_code(result)
    given = environment(args.env)
    if args.tty and "TERM" in os.environ:
        given = {"TERM": os.environ["TERM"]} | given
    work = terminal.execute(
        args.box, words, pty=args.tty, stdin=stdin, timeout=args.timeout, cwd=args.cwd, env=given, user=args.user
    )
    result = asyncio.run(work)
    tell_end(result)
    return terminal.exit_code(result)


def tell_end(result: Any) -> None:
    """What an exit code alone does not say."""
    if result.truncated:
        print("layer: some of the output was dropped: it was more than the box's limit", file=sys.stderr)
        print("hint: layer box create --output SIZE, or write to a file and copy it", file=sys.stderr)
    if result.usage.get("oom_killed"):
        print("layer: it was killed: the box's memory was full", file=sys.stderr)
        print("hint: layer box create --memory SIZE", file=sys.stderr)


# The prompt is set once more after the box's own files have set theirs: a person knows a box by its name.
SHELL = r"""if command -v bash >/dev/null; then PROMPT_COMMAND="PS1='\u@$0:\w\\$ '; unset PROMPT_COMMAND" exec bash; else exec sh -i; fi"""


@command("box shell", USER, CWD, ENV, BOX, opens=False, place="host")
def shell(args: Namespace, out: Printer) -> int:
    """Sit at a terminal in a box; it owns your terminal until its shell ends."""
    from livinglayer.edges.cli import terminal

    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise Invalid("a shell needs a terminal", hint=f"layer box exec {args.box} -- sh, with commands on its input")
    given = {"TERM": os.environ.get("TERM", "xterm-256color")} | environment(args.env)
    result = asyncio.run(
        terminal.execute(
            args.box, ["/bin/sh", "-c", SHELL, args.box], pty=True, stdin=True, cwd=args.cwd, env=given, user=args.user
        )
    )
    return terminal.exit_code(result)


@command(
    "box cp",
    USER,
    arg("source", metavar="SOURCE", help="a file or directory here, BOX:PATH in a box, or - for standard input"),
    arg(
        "target",
        metavar="TARGET",
        help="BOX:PATH, a path here, or - for standard output; relative paths in a box begin at its home",
    ),
    opens=False,
    place="host",
)
def cp(args: Namespace, out: Printer) -> None:
    """Copy a file or a whole tree into a box or out of it."""
    source, target = place(args.source), place(args.target)
    if (source is None) == (target is None):
        raise Invalid(
            "one of the two must be BOX:PATH, the other a path here", hint="layer box cp report.csv work:/tmp/"
        )
    if target is not None:
        box = Sandbox.connect(target[0])
        path = landing(box, target[1], os.path.basename(os.path.abspath(args.source)), args)
        with telling("Copying"):
            if args.source == "-":
                box.files.write(path, sys.stdin.buffer, user=args.user)
                count = 1
            else:
                count = box.files.upload(args.source, path, user=args.user)
        out.say(f"Copied {counted(count, 'file')} to {target[0]}:{path}")
        out.data({"box": target[0], "path": path, "files": count})
        return
    assert source is not None
    box, there = Sandbox.connect(source[0]), source[1].rstrip("/") or "/"
    if args.target == "-":
        if box.files.stat(there, user=args.user).type == "directory":
            raise Invalid(f"{args.source!r} is a directory", hint="name a directory here to copy it to")
        box.files.read_into(there, sys.stdout.buffer, user=args.user)
        return
    here = Path(args.target)
    if here.is_dir() and posixpath.basename(there):
        here = here / posixpath.basename(there)
    with telling("Copying"):
        count = box.files.download(there, here, user=args.user)
    out.say(f"Copied {counted(count, 'file')} to {here}")
    out.data({"path": str(here), "files": count})


def landing(box: Any, path: str, name: str, args: Namespace) -> str:
    """Where in the box a copy lands: into a directory that is there, else at the path itself, as `cp` does it."""
    bare = path.rstrip("/") or "/"
    if args.source == "-":
        return bare
    if path != bare:
        return posixpath.join(bare, name)
    with contextlib.suppress(NotFound):
        found = box.files.stat(bare, user=args.user)
        if found.type == "directory":
            return posixpath.join(bare, name)
        if os.path.isdir(args.source):
            raise Conflict(f"{bare!r} in the box is a {found.type}, and {args.source!r} a directory")
    return bare


@command(
    "box ls",
    USER,
    arg("box", metavar="BOX[:PATH]", help=f"a box, and a directory in it (default: {HOME})"),
    arg("--depth", type=int, default=1, metavar="LEVELS", help="how deep (default: 1)"),
    opens=False,
    place="host",
)
def ls(args: Namespace, out: Printer) -> None:
    """List the files in a directory of a box."""
    name, path = place(args.box) or (args.box, HOME)
    path = path.rstrip("/") or "/"
    box = Sandbox.connect(name)
    entry = box.files.stat(path, user=args.user)
    found = box.files.list(path, depth=args.depth, user=args.user) if entry.type == "directory" else [entry]
    if out.json:
        out.data([vars(entry) for entry in found])
        return
    kinds = {"directory": modes.S_IFDIR, "link": modes.S_IFLNK, "file": modes.S_IFREG}
    out.rows(
        [
            {
                "mode": modes.filemode(kinds.get(entry.type, 0) | entry.mode & 0o7777),
                "owner": f"{entry.uid}:{entry.gid}",
                "size": human(entry.size) if entry.type == "file" else "",
                "modified": clock(entry.mtime),
                "name": posixpath.relpath(entry.path, path) if len(entry.path) > len(path) else entry.name,
            }
            | ({"leads to": entry.target or ""} if any(entry.target for entry in found) else {})
            for entry in sorted(found, key=lambda entry: entry.path)
        ],
        noun="file",
    )


@command(
    "box expose",
    BOX,
    arg("port", type=int, help="a TCP port that something in the box serves"),
    opens=False,
    place="host",
)
def expose(args: Namespace, out: Printer) -> None:
    """Give a port of a box an address on this machine's loopback; connecting there wakes the box."""
    address, port = Sandbox.connect(args.box).expose(args.port)
    out.say(f"Port {args.port} of {args.box} is at {address}:{port}")
    out.data({"host": address, "port": port})


@command(
    "box egress",
    BOX,
    arg(
        "rules",
        nargs="*",
        metavar="RULE",
        help="all it may reach from now on: hosts, URLs, tcp://host:port or JSON objects",
    ),
    arg("--none", action="store_true", help="nothing may leave any more"),
    opens=False,
    place="host",
)
def egress(args: Namespace, out: Printer) -> None:
    """Show what a box may reach, or set it anew while it runs; connections that are no longer allowed are closed."""
    box = Sandbox.connect(args.box)
    if args.none and args.rules:
        raise Invalid("egress was given rules and --none")
    if args.rules or args.none:
        box.set_egress([rule(word) for word in args.rules])
    rules = box.info()["egress"]
    out.data(rules)
    if not rules:
        out.say(f"{args.box} can reach nothing")
    for found in rules:
        out.say(found if isinstance(found, str) else json.dumps(found))


# -- snapshots --------------------------------------------------------------------------------------------------------


@command("box snapshot", BOX, opens=False, place="host")
def snapshot(args: Namespace, out: Printer) -> None:
    """Keep what a box holds, by content; the box stands still for milliseconds only."""
    box = Sandbox.connect(args.box)
    with telling("Taking a snapshot"):
        kept = box.snapshot()
    out.say(f"Kept {args.box} as snapshot {kept.id} ({human(kept.size)})")
    out.say(f"Begin there: layer box create --snapshot {kept.id}", DIM)
    out.data(vars(kept))


SNAPSHOT = arg("snapshot", metavar="SNAPSHOT", help="its id, or enough of its beginning")


def snapshot_id(word: str) -> str:
    """The id that a beginning of it means."""
    found = [kept["id"] for kept in host({"do": "snapshots"}) if kept["id"].startswith(word)]
    if word in found or len(found) == 1:
        return word if word in found else str(found[0])
    if found:
        raise Invalid(f"{len(found)} snapshots begin with {word!r}", hint="layer box snapshots list")
    raise NotFound(f"there is no snapshot {word!r}", hint="layer box snapshots list")


@command("box snapshots list", opens=False, place="host")
def snapshots_list(args: Namespace, out: Printer) -> None:
    """List the snapshots of this machine."""
    found = sorted(host({"do": "snapshots"}), key=lambda kept: kept["created"])
    if out.json:
        out.data(found)
        return
    out.rows(
        [
            {
                "id": kept["id"],
                "size": human(kept["size"]),
                "tier": kept["tier"],
                "memory": "kept" if kept["memory"] else "",
                "created": clock(kept["created"]),
                "held by": _layers(kept["holders"]),
            }
            for kept in found
        ],
        noun="snapshot",
    )


def _layers(holders: Iterable[str]) -> str:
    """The layers among those who hold a snapshot; "" is whoever uses the machine."""
    return ", ".join(sorted({holder.partition("/")[0] for holder in holders} - {""}))


@command("box snapshots diff", arg("a", help="a snapshot"), arg("b", help="another"), opens=False, place="host")
def snapshots_diff(args: Namespace, out: Printer) -> None:
    """Show the files that differ between two snapshots."""
    with telling("Comparing"):
        found = host({"do": "snapshot.diff", "a": snapshot_id(args.a), "b": snapshot_id(args.b)})
    if out.json:
        out.data(found)
        return
    rows = [
        {
            "change": "attributes" if change.get("attributes_only") else change["kind"],
            "type": change["type"],
            "before": human(change["before"]),
            "after": human(change["after"]),
            "path": change["path"],
        }
        for change in found
    ]
    out.rows(rows, noun="change")


@command(
    "box snapshots remove",
    arg("snapshots", nargs="+", metavar="SNAPSHOT", help="ids, or enough of their beginnings"),
    arg("--force", action="store_true", help="also those that layers hold: boxes can't begin there any more"),
    opens=False,
    place="host",
)
def snapshots_remove(args: Namespace, out: Printer) -> None:
    """Remove snapshots that no layer holds; boxes that were made from them go on, and what no other snapshot shares is freed."""
    removed = []
    for word in args.snapshots:
        id = snapshot_id(word)
        if held := host({"do": "snapshot.remove", "snapshot": id, "all": args.force})["held"]:
            raise Conflict(
                f"snapshot {id} is held by {_layers(held)}", hint="box.forget there; --force removes it all the same"
            )
        removed.append(id)
        out.say(f"Removed snapshot {id}")
    out.data(removed)


# -- what happened, and what is used ----------------------------------------------------------------------------------

QUIET = ("at", "event")


def told(event: dict[str, Any]) -> str:
    """One event on a line, for people."""
    said = []
    for key, value in event.items():
        if key in QUIET or value is None or value == [] or value == {}:
            continue
        if key == "argv":
            value = " ".join(value)
        elif isinstance(value, float):
            value = f"{value:.3g}"
        elif not isinstance(value, str):
            value = json.dumps(value)
        said.append(f"{key}={value}" if key != "argv" else str(value))
    return escape("  ".join(said))


@command(
    "box trace",
    BOX,
    arg("-f", "--follow", action="store_true", help="go on as things happen, until the box ends"),
    arg(
        "--event",
        action="append",
        metavar="KIND",
        help="only these: create, exec, file, network, secret, limit, usage, …; may be repeated",
    ),
    arg("-n", type=int, metavar="COUNT", help="only the latest so many"),
    opens=False,
    place="host",
)
def trace(args: Namespace, out: Printer) -> None:
    """Show everything done to and by a box: commands, files, network, secrets used, limits hit; also after its end, by its id."""
    wanted = set(args.event or ())
    if args.follow:
        for event in Sandbox.connect(args.box).follow():
            if not wanted or event["event"] in wanted:
                show_event(event, out)
        return
    found = [event for event in host({"do": "trace", "box": args.box}) if not wanted or event["event"] in wanted]
    found = found[max(0, len(found) - args.n) :] if args.n is not None else found
    if out.json:
        out.data(found)
        return
    for event in found:
        show_event(event, out)
    out.say(counted(len(found), "event"), DIM)


def show_event(event: dict[str, Any], out: Printer) -> None:
    if out.json:
        print(json.dumps(event), file=out.out, flush=True)
        return
    at = datetime.fromtimestamp(event["at"], UTC).strftime("%H:%M:%S.%f")[:-3]
    colour = RED if event["event"] == "limit" or event.get("verdict") == "deny" else BOLD
    print(
        f"{out.paint(at, DIM)}  {out.paint(escape(event['event']).ljust(8), colour)}  {told(event)}",
        file=out.out,
        flush=True,
    )


@command(
    "box stats",
    arg("box", nargs="*", metavar="BOX", help="names or ids (default: all)"),
    arg(
        "--watch",
        nargs="?",
        type=float,
        const=2.0,
        metavar="SECONDS",
        help="again and again (default: every 2 seconds)",
    ),
    opens=False,
    place="host",
)
def stats(args: Namespace, out: Printer) -> None:
    """Show what boxes use: processor, memory, processes, disk, network; limits they have met."""
    if args.watch is not None and not args.watch > 0:
        raise Invalid(f"--watch {args.watch} is no number of seconds")
    before: dict[str, tuple[float, float]] = {}
    while True:
        found = usage(args.box)
        if out.json:
            out.data(found)
        else:
            if args.watch and out.colour:
                print("\x1b[H\x1b[2J", end="", file=out.out)
            out.rows([used(box, before) for box in found], noun="box")
        if not args.watch:
            return
        out.out.flush()
        time.sleep(args.watch)


def usage(words: list[str]) -> list[dict[str, Any]]:
    """Boxes with their metrics; those that end meanwhile are left out unless they were asked for."""
    found = []
    for box in [host({"do": "get", "box": word}) for word in words] or boxes_here():
        try:
            found.append(box | {"metrics": host({"do": "metrics", "box": box["id"]})})
        except NotFound:
            if words:
                raise
    return found


def used(box: dict[str, Any], before: dict[str, tuple[float, float]]) -> dict[str, Any]:
    now, metrics, limits = time.monotonic(), box["metrics"], box["limits"]
    cpu = float(metrics.get("cpu_seconds", 0))
    share = ""
    if box["id"] in before:
        at, earlier = before[box["id"]]
        share = f"{max(0.0, cpu - earlier) / (now - at):.0%}"
    before[box["id"]] = now, cpu
    network = metrics["network"]
    return {
        "box": call_it(box),
        "state": box["state"],
        **({"cpu": share} if share else {}),
        "cpu time": f"{cpu:.1f}s",
        "memory": f"{human(metrics.get('memory'))}/{human(limits['memory'])}",
        "peak": human(metrics.get("memory_peak")),
        "pids": f"{metrics.get('pids', 0)}/{limits['pids']}",
        "disk": f"{human(metrics['disk'])}/{human(limits['disk'])}",
        "requests": network["allow"],
        "denied": network["deny"],
        "sent": human(network["up"]),
        "received": human(network["down"]),
        "ooms": metrics.get("oom_kills", 0),
    }


# -- the host ---------------------------------------------------------------------------------------------------------


@command(
    "host",
    arg("--stop", action="store_true", help="stop the one that runs: named boxes stay, others end"),
    opens=False,
    place="host",
)
def host_(args: Namespace, out: Printer) -> int:
    """Run the supervisor of this machine's boxes here, until Ctrl-C; without it, it is started and ended on demand."""
    state = state_directory()
    if args.stop:
        return stop_host(state, out)
    os.environ.setdefault("LAYER_HOST_IDLE", "0")  # somebody watches it: it does not end by itself
    from livinglayer.sandbox.host import serve

    print(f"host of the boxes in {state}; Ctrl-C ends it (named boxes stay)", file=sys.stderr)
    asyncio.run(serve(state))
    return 0


def stop_host(state: Path, out: Printer) -> int:
    try:
        pid = int((state / "run" / "host.pid").read_text())
        os.kill(pid, 0)
        if not (state / "run" / "host.sock").exists():
            raise ProcessLookupError
    except (OSError, ValueError):
        out.say(f"No host runs for {state}")
        out.data({"stopped": None})
        return 0
    host({"do": "shutdown"})
    with telling("Stopping the host"):
        while (state / "run" / "host.sock").exists() and Path("/proc", str(pid)).exists():
            time.sleep(0.02)
    out.say(
        f"Stopped the host of {state}; named boxes stay (all but those at tier namespace suspended), and the next command starts it again"
    )
    out.data({"stopped": pid})
    return 0


@command(
    "doctor",
    arg("tiers", nargs="*", metavar="TIER", help="only these (default: all six)"),
    opens=False,
    place="host",
)
def doctor(args: Namespace, out: Printer) -> int:
    """Try every tier by making a box there, and say what works here, what does not, why, and what to install."""
    from livinglayer.sandbox.doctor import survey

    for tier in args.tiers:
        if tier not in TIERS:
            raise Invalid(f"tier {tier!r} does not exist", hint="one of " + ", ".join(TIERS))
    state = state_directory()
    with telling("Looking around") as say:
        try:
            report = host({"do": "doctor", "tiers": args.tiers or None}, say)
        except (LayerError, OSError) as error:
            report = survey(state, error if isinstance(error, LayerError) else Unavailable(str(error)))
    out.data(report)
    if not out.json:
        show_report(report, out)
    return 0 if any(found["works"] for found in report["tiers"]) else 1


def show_report(report: dict[str, Any], out: Printer) -> None:
    out.say("Tiers", BOLD)
    for found in report["tiers"]:
        mark = out.paint("works ", GREEN) if found["works"] else out.paint("no    ", RED)
        timing = f"  (box {found['create_ms']:.0f} ms, `true` {found['exec_ms']:.0f} ms)" if found["works"] else ""
        print(
            f"  {mark} {out.paint(found['tier'].ljust(10), BOLD)} {escape(found['isolation'] if found['works'] else found['why'])}{timing}",
            file=out.out,
        )
        if found["works"]:
            out.say(f"                    can: {', '.join(found['can'])}", DIM)
            out.say(f"                    can't: {', '.join(found['cannot']) or 'nothing of the list'}", DIM)
        elif found["hint"]:
            out.say(f"                    hint: {found['hint']}")
    out.say()
    out.say("Machine", BOLD)
    for check in report["checks"]:
        mark = {"good": out.paint("good  ", GREEN), "bad": out.paint("bad   ", RED)}.get(check["verdict"], "note  ")
        print(f"  {mark} {out.paint(check['what'].ljust(10), BOLD)} {escape(check['found'])}", file=out.out)
        if check.get("hint"):
            out.say(f"                    hint: {check['hint']}")
    works = [found["tier"] for found in report["tiers"] if found["works"]]
    out.say()
    out.say(
        f"{len(works)} of {len(report['tiers'])} tiers work here: {', '.join(works)}"
        if works
        else "No tier works here",
        GREEN if works else RED,
    )
