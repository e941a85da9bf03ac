"""Bases: the blueprints that E2B's clients count on. They are rows like any other: change them, or take them away."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...errors import NotFound
from ...law.blueprints import find

if TYPE_CHECKING:
    from ...layer import Layer

EGRESS = ["*", {"host": "*", "protocol": "tcp", "port": "*"}]  # the public internet; private addresses are not
BASES = {
    "base": {"memory": "512M", "pids": 512, "disk": "2G"},
    "code-interpreter-v1": {"memory": "1G", "pids": 512, "disk": "2G"},
}

KERNEL = [{"apt": ["python3-ipykernel", "python3-matplotlib", "python3-pandas"]}]  # what tools/setup.sh installs here


def ensure(layer: Layer) -> None:
    """Make those that are not there, as the layer's owner; LAYER_E2B_TIER says which walls their boxes have."""
    for name, limits in BASES.items():
        try:
            find(layer, name)
        except NotFound:
            tier = os.environ.get("LAYER_E2B_TIER", "namespace")
            given = {
                "name": name,
                "tier": tier,
                "limits": limits,
                "egress": EGRESS,
                "description": "what E2B's clients open",
            }
            if tier in ("microvm", "vm") and name == "code-interpreter-v1":
                given["packages"] = KERNEL  # a machine does not see the host's; they are built in once
            layer.call("blueprint.define", given, reason="layer up")
