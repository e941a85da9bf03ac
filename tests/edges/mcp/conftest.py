"""One server for those tests of MCP that mind nobody else's rows; `own` for the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from edges.serving import Server
from sandbox.hosts import Host


@contextmanager
def serving(host: Host, home: Path) -> Iterator[Server]:
    """A server, and the host of its boxes for this process, too."""
    before = {name: os.environ.get(name) for name in host.environment()}
    os.environ |= host.environment()
    made = Server(str(home / "layer"), home, host.environment())
    try:
        yield made
    finally:
        made.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@pytest.fixture(scope="session")
def server(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of this worker."""
    with serving(host, tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture(scope="module")
def own(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose lists nobody else makes longer."""
    with serving(host, tmp_path_factory.mktemp("own")) as made:
        yield made
