"""Layers whose functions run in real boxes: the sandbox's host of this worker, and a small help desk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sandbox.conftest import host, own_host, use  # noqa: F401  (fixtures)
from sandbox.hosts import Host

from livinglayer import Layer

BUMP = """
import layer

def bump(id):
    row = layer.one("select priority from ticket where id = :id", id=id)
    layer.update("ticket", id, priority=row["priority"] + 1)
    return row["priority"] + 1
"""


@pytest.fixture
def boxes(host: Host, use: Callable[[Host], Host]) -> Host:  # noqa: F811
    """Functions of this test run in boxes of the worker's host."""
    return use(host)


@pytest.fixture
def desk(layer: Layer, boxes: Host) -> Iterator[Layer]:
    """A layer with tickets and a function that raises their priority."""
    layer.define("ticket", {"title": "text!", "priority": {"type": "int", "default": 0}, "note": "text"})
    layer.define("customer", {"name": "text!"})
    define(layer, "ticket.bump", BUMP, signature={"arguments": {"id": "int!"}, "result": "int"})
    yield layer


def define(layer: Layer, name: str, code: str, **more: Any) -> int:
    """A function that reads and writes tickets, unless told otherwise."""
    return int(
        layer.call("function.define", {"name": name, "code": code, "reads": ["ticket"], "writes": ["ticket"], **more})
    )
