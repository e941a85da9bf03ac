"""The example bundles, applied to layers whose functions run in real boxes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from law.conftest import boxes  # noqa: F401  (fixtures)
from sandbox.conftest import host, own_host, use  # noqa: F401
from sandbox.hosts import Host

from livinglayer import Layer
from livinglayer.bundle.apply import apply
from livinglayer.bundle.load import load

BUNDLES = Path(__file__).parents[2] / "bundles"
Apply = Callable[[str], Layer]


@pytest.fixture
def applied(layer: Layer, boxes: Host) -> Apply:  # noqa: F811
    """`applied("helpdesk")`: the layer, with that bundle."""

    def make(name: str) -> Layer:
        apply(layer, load(BUNDLES / name), yes=True)
        return layer

    return make
