"""The commands about the server and who may ask it: `layer up`, `layer token …`, `layer login`, `layer env`."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shlex
import signal
import socket
import sys
import threading
from argparse import Namespace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from livinglayer.edges.cli.commands import acting, arg, command
from livinglayer.edges.cli.commands import seconds as to_the_second
from livinglayer.edges.cli.table import Printer
from livinglayer.errors import Denied, Invalid, NotFound, Unauthenticated, Unavailable
from livinglayer.settings import config_directory

if TYPE_CHECKING:
    from livinglayer import Layer
    from livinglayer.edges.http.serving import Serving

GROUPS = {"token": "What principals prove themselves with: API keys of this layer's server."}
LOCAL = ("127.0.0.1", "localhost", "::1")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LASTING, SHORT = timedelta(days=30), timedelta(days=7)  # of the key that `layer env` keeps, and when it makes the next


@command(
    "up",
    arg("--port", type=int, default=7700, help="default: 7700; 0 takes any"),
    arg("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1, this machine only)"),
    arg("--domain", metavar="NAME", help="boxes' ports are at PORT-ID.NAME (default: layer.localhost)"),
    arg("--allow-host", action="append", default=[], metavar="NAME", help="another name the server is asked by; may be repeated"),
    arg("--url", help="how others reach it, when something stands in front (default: http://HOST:PORT)"),
    arg("--no-worker", action="store_true", help="leave triggers, schedules and retries to `layer worker`"),
    arg("--lock-out", type=int, default=20, metavar="N", help="wrong tokens an address may send in a minute (default: 20); more when many come through one proxy"),
    arg("--access-log", action="store_true", help="a line for each request"),
)  # fmt: skip
def up(layer: Layer, args: Namespace, out: Printer) -> int:
    """Serve the layer: HTTP API, E2B-compatible boxes, MCP and a page, on one port, until it is stopped."""
    import uvicorn

    layer.only_owner("serve the layer: the server acts for everybody")
    logs(out.json)
    listener = listening(args.host, args.port)
    from livinglayer.edges.e2b import bases

    bases.ensure(layer)
    serving = prepared(layer, args, listener.getsockname()[1])
    worker = None if args.no_worker else work_beside(layer)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each connection is a file
    from livinglayer.edges.http.app import App
    from livinglayer.edges.http.heads import Heads

    config = uvicorn.Config(
        App(serving, args.access_log), loop="uvloop", http=Heads, ws="wsproto", lifespan="on", access_log=False, server_header=False,
        proxy_headers=False, timeout_keep_alive=75, timeout_graceful_shutdown=5, backlog=4096, log_config=None, ws_max_size=16 << 20,
    )  # fmt: skip
    place = config_directory() / "servers" / layer.id

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                announce(layer, serving, place, out)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            serving.closing.set()  # streams end now, else all of us would wait for them
            await super().shutdown(sockets)

    server = Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):  # which uvicorn raises again once it has ended
        signal.signal(number, lambda *_: None)
    try:
        server.run(sockets=[listener])
    finally:
        place.unlink(missing_ok=True)
        if worker is not None:
            worker.stop()
        serving.pool.shutdown(wait=True, cancel_futures=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return 0 if server.started else 8


def prepared(layer: Layer, args: Namespace, port: int) -> Serving:
    """What the parts of the server share."""
    from livinglayer.edges.http.auth import Gate
    from livinglayer.edges.http.metrics import Metrics
    from livinglayer.edges.http.serving import Serving

    url = (args.url or f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{port}").rstrip("/")
    if not re.fullmatch(r"https?://[^/\s?#]+", url):
        raise Invalid(f"--url {url!r} is not like https://layer.example.org")
    domain = args.domain or f"layer.localhost:{port}"
    from livinglayer.edges.http.app import hostname

    names = {
        *LOCAL,
        args.host.lower(),
        hostname(url.partition("://")[2]),
        hostname(domain),
        *map(hostname, args.allow_host),
    }
    return Serving(
        layer, url, domain, frozenset(names), Gate(max(1, args.lock_out)), Metrics(), url.startswith("https:")
    )


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, or Unavailable with who has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise Unavailable(f"the server can't listen on {host}:{port}: {error}", hint="--port 0 takes any") from None
    listener.listen(4096)
    return listener


def work_beside(layer: Layer) -> Any:
    """A worker in a thread of this process."""
    from livinglayer.law.worker import Worker

    worker = Worker(layer)
    threading.Thread(target=worker.run, name="layer-worker", daemon=True).start()
    return worker


class Text(logging.Formatter):
    """One line for what is said, whatever a request had in its path."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().formatMessage(record))


class Lines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat()
        line: dict[str, Any] = {
            "at": at,
            "level": record.levelname.lower(),
            "part": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key in ("address", "ms") if (value := getattr(record, key, None)) is not None}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def logs(as_json: bool) -> None:
    """The log goes to standard error, as text or as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines() if as_json else Text("%(asctime)s %(levelname)s %(name)s %(message)s"))
    top = logging.getLogger()
    top.handlers[:] = [handler]
    top.setLevel(logging.WARNING)
    logging.getLogger("livinglayer").setLevel(logging.INFO)
    # Whoever leaves an answer unfinished says so itself, with its reason.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: "without completing response" not in record.getMessage()
    )


def announce(layer: Layer, serving: Serving, place: Path, out: Printer) -> None:
    """Say where it is, to people and to later commands."""
    from livinglayer.edges.http import home

    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    place.write_text(json.dumps({"url": serving.url, "domain": serving.domain, "pid": os.getpid()}))
    link = home.link(layer, serving.url, layer.me)
    out.say(f"Layer {layer.id} at {serving.url}")
    out.say(f"Sign in (once, within 15 minutes): {link}")
    out.say("Stop with Ctrl-C; boxes go on.")
    out.data({"url": serving.url, "domain": serving.domain, "layer": layer.id, "login": link, "pid": os.getpid()})
    sys.stdout.flush()


def server_of(layer: Layer) -> dict[str, Any]:
    """Where this layer is served on this machine."""
    try:
        found: dict[str, Any] = json.loads((config_directory() / "servers" / layer.id).read_text())
        os.kill(found["pid"], 0)
    except (OSError, ValueError, KeyError):
        raise NotFound("no server of this layer runs here", hint="layer up") from None
    return found


@command("login", flags="as")
def login(layer: Layer, args: Namespace, out: Printer) -> None:
    """A link that signs a browser in, once, within 15 minutes."""
    from livinglayer.edges.http import home

    link = home.link(layer, server_of(layer)["url"], acting(args) or layer.me)
    out.say(link)
    out.data({"login": link})


@command(
    "token create",
    arg("principal", nargs="?", metavar="NAME", help="whose it is (default: yours)"),
    arg("--name", metavar="TEXT", default="key", help="what you call it, to tell it from others"),
    arg("--format", choices=("layer", "e2b"), default="layer", help="e2b: as E2B's clients want API keys"),
    arg("--scope", metavar="A,B", help="only for some of read, write, boxes"),
    arg("--expires", metavar="TIME", help="how long it is good for: 90s, 30m, 12h, 30d (default: until it is revoked)"),
    flags="as reason",
)
def create(layer: Layer, args: Namespace, out: Printer) -> None:
    """Make a token and show it, this once."""
    given = {
        "name": args.name, "principal": args.principal, "kind": "e2b" if args.format == "e2b" else "api",
        "scope": args.scope.split(",") if args.scope else None, "seconds": lasting(args.expires),
    }  # fmt: skip
    made = layer.call("token.create", given, principal=acting(args), reason=args.reason)
    out.say(made["token"])
    out.data(made)


def lasting(text: str | None) -> float | None:
    """Seconds of 90s, 30m, 12h, 30d."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if not found:
        raise Invalid(f"--expires {text!r} is not a time", hint="90s, 30m, 12h or 30d")
    return float(int(found[1]) * UNITS[found[2]])


@command("token list", flags="as")
def list_(layer: Layer, args: Namespace, out: Printer) -> None:
    """The tokens there are: yours, or everybody's for an owner; never what they say."""
    from livinglayer.law import tokens

    rows = tokens.known(layer.acting_as(layer.id_of(acting(args))))
    told = [{**row, "scope": ",".join(row["scope"]) if row["scope"] else None} for row in to_the_second(rows)]
    out.rows(told, ["id", "principal", "name", "kind", "ending", "scope", "made", "expires", "revoked"], "token")


@command("token revoke", arg("id", type=int), flags="as reason")
def revoke(layer: Layer, args: Namespace, out: Printer) -> None:
    """End a token; servers refuse it within a second."""
    layer.call("token.revoke", {"id": args.id}, principal=acting(args), reason=args.reason)
    out.say(f"Token {args.id} is revoked")
    out.data({"id": args.id})


@command("env", arg("--e2b", action="store_true", help="for E2B's clients"), flags="as")
def env(layer: Layer, args: Namespace, out: Printer) -> None:
    """The lines to export so that a client's tools find this layer: eval "$(layer env --e2b)"."""
    if not args.e2b:
        raise Invalid("layer env prints the lines of one kind of client", hint="layer env --e2b")
    url = server_of(layer)["url"]
    values = {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": kept_key(layer, acting(args) or layer.me)}
    for name, value in values.items():
        out.say(f"export {name}={shlex.quote(value)}")
    out.data(values)


def kept_key(layer: Layer, principal: str) -> str:
    """The E2B key of a principal on this machine: the one that was made before, while it is good for some days more."""
    from livinglayer.law import tokens

    if principal != layer.me:
        layer.id_of(principal)  # only for whom one may act
    if not re.fullmatch(r"[\w.@+-]+", principal):
        raise Denied(f"{principal!r} can't be the name of a file", hint="layer token create --format e2b")
    path = config_directory() / "e2b" / f"{layer.id}.{principal}"
    try:
        text = path.read_text().strip()
        found = tokens.prove(layer, text)
        until = datetime.now(UTC) + SHORT  # or what the next could not outlast either
        until = until if layer.until is None else min(until, layer.until)
        if found.name != principal or found.expires is None or found.expires < until:
            raise tokens.nobody()
    except (OSError, Unauthenticated):
        given = {"name": "layer env", "principal": principal, "kind": "e2b", "seconds": LASTING.total_seconds()}
        text = layer.call("token.create", given)["token"]
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text + "\n")
    return text
