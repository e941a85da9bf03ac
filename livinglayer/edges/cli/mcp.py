"""The command `layer mcp`: the layer for a client of models that starts its servers itself."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from livinglayer.edges.cli.commands import acting, command
from livinglayer.edges.cli.table import Printer

if TYPE_CHECKING:
    from livinglayer import Layer


GROUPS: dict[str, str] = {}


@command("mcp", flags="as")
def mcp(layer: Layer, args: Namespace, out: Printer) -> None:
    """Speak MCP on standard input and output, as you (or --as somebody), until the client hangs up."""
    import asyncio
    import signal

    from livinglayer.edges.http.auth import Gate
    from livinglayer.edges.http.metrics import Metrics
    from livinglayer.edges.http.serving import Caller, Serving
    from livinglayer.edges.mcp.server import speak
    from livinglayer.substrate.schema import OWNER

    number = layer.id_of(acting(args))
    caller = Caller(number, layer.name_of(number), layer.acting_as(number))
    # What it looks up for itself (that something changed, whose an execution is) it looks up as the layer.
    serving = Serving(layer.acting_as(OWNER), "", "", frozenset(), Gate(), Metrics())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it as SIGTERM does: what reads the input can't be woken
    try:
        asyncio.run(speak(serving, caller))
    finally:
        serving.pool.shutdown(wait=True, cancel_futures=True)
