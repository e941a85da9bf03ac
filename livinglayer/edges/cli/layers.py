"""The command about who a layer is to others: `layer identity`."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from livinglayer.edges.cli.commands import command
from livinglayer.edges.cli.table import Printer

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS: dict[str, str] = {}


@command("identity")
def identity(layer: Layer, args: Namespace, out: Printer) -> None:
    """Print the name by which other layers know this one: a public key, whose other half lies with your keys."""
    from livinglayer.projection.identity import name

    layer.only_owner("speak for the layer")
    found = name(layer.id)
    out.say(found)
    out.data({"identity": found, "layer": layer.id})
