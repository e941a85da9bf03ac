"""Servers for the tests of the edges: real `layer up` processes, whose boxes are the worker's host's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from edges.serving import Server
from sandbox.conftest import host, own_host, use  # noqa: F401  (fixtures)
from sandbox.hosts import Host


@pytest.fixture
def serve(host: Host, use: Callable[[Host], Host], tmp_path: Path) -> Iterator[Callable[..., Server]]:  # noqa: F811
    """`serve()`: a server of a test's own; `serve(location)`: of another layer, or a second one of the same."""
    made: list[Server] = []

    def start(location: str | None = None, *more: str) -> Server:
        home = tmp_path / f"server{len(made)}"
        home.mkdir()
        made.append(Server(location or str(home / "layer"), home, use(host).environment(), *more))
        return made[-1]

    yield start
    for each in reversed(made):
        each.close()


@pytest.fixture(scope="module")
def server(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:  # noqa: F811
    """A server over an embedded layer, shared by the tests of a file."""
    home: Path = tmp_path_factory.mktemp("server")
    before = {name: os.environ.get(name) for name in host.environment()}
    os.environ |= host.environment()  # the embedded handle of this process asks the same host
    # The tests of a file send many wrong tokens from one address; what locks one out has a server of its own.
    made = Server(str(home / "layer"), home, host.environment(), "--lock-out", "1000000")
    try:
        yield made
    finally:
        made.close()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
