"""The example bundles, applied to layers whose functions run in real boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from law.conftest import boxes  # noqa: F401  (fixtures)
from sandbox.conftest import host, own_host, use  # noqa: F401
from sandbox.hosts import Host, wait_until

from livinglayer import Layer
from livinglayer.bundle.apply import apply
from livinglayer.bundle.load import load
from livinglayer.law import tending
from livinglayer.sandbox.sandbox import Sandbox

BUNDLES = Path(__file__).parents[2] / "bundles"
Apply = Callable[[str], Layer]


@pytest.fixture
def applied(layer: Layer, boxes: Host) -> Apply:  # noqa: F811
    """`applied("helpdesk")`: the layer, with that bundle."""

    def make(name: str) -> Layer:
        apply(layer, load(BUNDLES / name), yes=True)
        return layer

    return make


@pytest.fixture
def tended(layer: Layer, boxes: Host) -> Iterator[None]:  # noqa: F811
    """This process looks after boxes of contracts; none is left."""
    tending.of(layer).look()
    yield
    for box in Sandbox.list(labels={"layer": layer.id}):
        box.kill()
    tending.of(layer).close()


def ended(layer: Layer, told: dict[str, Any]) -> dict[str, Any]:
    """How an agent ended; waits for that."""
    sql = "select status, result from execution where id = :id"
    wait_until(lambda: layer.query(sql, {"id": told["execution"]})[0]["status"] != "running", "the agent is over", 90)
    return layer.query(sql, {"id": told["execution"]})[0]
