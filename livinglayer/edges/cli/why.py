"""The commands about causes: `layer why`, and `layer trace export` for other tools."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from livinglayer.edges.cli.commands import acting, arg, command, moment
from livinglayer.edges.cli.table import DIM, Printer, counted, escape
from livinglayer.errors import Invalid, Unavailable

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS = {"trace": "Give executions and what they did to other tools."}
BRANCHES = re.compile(r"[ │├└─]*")


@command(
    "why",
    arg("subject", nargs="?", help="a row (ticket/7), a field of it (ticket/7.status), or a transaction (tx/41)"),
    arg("--execution", type=int, metavar="E", help="ask about an execution instead"),
    arg("--impact", action="store_true", help="the other way: what came of it"),
    arg("--depth", type=int, default=32, metavar="N", help="how many executions back (default: 32)"),
    flags="as branch as_of",
)
def why(layer: Layer, args: Namespace, out: Printer) -> None:
    """Tell what led to a row, a field, a transaction or an execution: who, why, with which permissions, back to its origin."""
    if (args.subject is None) == (args.execution is None):
        raise Invalid("why needs a row, or --execution", hint="layer why ticket/7.status")
    tree = layer.why(
        args.subject if args.execution is None else args.execution,
        impact=args.impact,
        branch=args.branch or "main",
        as_of=moment(args.as_of) if args.as_of else None,
        principal=acting(args),
        depth=args.depth,
    )
    out.data(tree.json())
    for line in () if out.json else tree.lines():
        print(painted(line, out), file=out.out)


def painted(line: str, out: Printer) -> str:
    """A line of a tree: its branches dim, what it says as it is."""
    found = BRANCHES.match(line)
    cut = found.end() if found else 0
    return out.paint(line[:cut], DIM) + escape(line[cut:])


@command(
    "trace export",
    arg("subject", help="an execution by its number, a trace by its 32 hex digits; for --prov whatever why takes"),
    arg("--otlp", metavar="FILE|URL", help="OpenTelemetry spans: OTLP as JSON, to a file, - or a collector"),
    arg("--prov", metavar="FILE", help="W3C PROV as JSON, to a file or -"),
    arg("--cloudevents", metavar="FILE", help="CloudEvents, one JSON a line, to a file or -"),
    flags="as",
)
def export(layer: Layer, args: Namespace, out: Printer) -> None:
    """Write the executions of a trace, or what led to something, as OpenTelemetry, PROV or CloudEvents."""
    from livinglayer.law import exports

    chosen = [name for name in ("otlp", "prov", "cloudevents") if getattr(args, name) is not None]
    if len(chosen) != 1:
        raise Invalid("choose one of --otlp, --prov and --cloudevents", hint="layer trace export 2031 --otlp -")
    who, place = layer.id_of(acting(args)), getattr(args, chosen[0])
    if chosen[0] == "otlp":
        document = exports.otel(layer, args.subject, principal=who)
        count = counted(len(document["resourceSpans"][0]["scopeSpans"][0]["spans"]), "span")
        text = json.dumps(document)
    elif chosen[0] == "prov":
        made = exports.prov(layer, args.subject, principal=who)
        text, count = json.dumps(made, indent=2), counted(len(made.get("activity", ())), "execution")
    else:
        events = exports.cloudevents(layer, args.subject, principal=who)
        text, count = "\n".join(json.dumps(event) for event in events), counted(len(events), "event")
    if place.startswith(("http://", "https://")):
        if chosen[0] != "otlp":
            raise Invalid(f"--{chosen[0]} goes to a file", hint=f"--{chosen[0]} -")
        send(place, text)
    elif place == "-":
        print(text, file=sys.stdout)
        return
    else:
        Path(place).write_text(text + "\n")
    out.say(f"Exported {count} to {place}")
    out.data({"exported": place, "what": count})


def send(url: str, text: str) -> None:
    """Post spans to a collector; headers come from OTEL_EXPORTER_OTLP_HEADERS, as other tools take them."""
    path = url if url.rstrip("/").endswith("/v1/traces") else url.rstrip("/") + "/v1/traces"
    request = urllib.request.Request(path, text.encode(), {"content-type": "application/json"}, method="POST")
    for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","):
        name, equals, value = pair.partition("=")
        if equals:
            request.add_header(name.strip(), urllib.parse.unquote(value.strip()))
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        raise Unavailable(f"{path} answered {error.code} {error.reason}") from None
    except OSError as error:
        raise Unavailable(f"{path} can't be reached: {getattr(error, 'reason', error)}") from None
