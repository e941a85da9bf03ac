"""Fixtures: a gateway as the host starts it, boxes at it, and servers on loopback for them to reach."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.egress.boxes import Box, Gateway
from sandbox.egress.servers import Servers


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("servers")) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, servers: Any) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("state"), "--pool", "2", env={"SSL_CERT_FILE": str(servers.ca)})
    yield running
    running.stop()
    said = (running.state / "gateway.log").read_text()
    assert said == ""  # no complaint, no warning


@pytest.fixture
def make_box(gateway: Gateway) -> Iterator[Callable[..., Box]]:
    made: list[Box] = []

    def make(rules: list[Any], **more: Any) -> Box:
        made.append(Box(gateway, rules, **more))
        return made[-1]

    yield make
    for box in made:
        box.drop()


@pytest.fixture
def own_gateway(tmp_path: Path, servers: Any) -> Iterator[Callable[..., Gateway]]:
    """Gateways of a test's own, to be killed and configured."""
    made: list[Gateway] = []

    def make(*options: str, state: Path | None = None, hosts: Path | None = None) -> Gateway:
        made.append(
            Gateway(state or tmp_path, "--pool", "1", *options, env={"SSL_CERT_FILE": str(servers.ca)}, hosts=hosts)
        )
        return made[-1]

    yield make
    for running in made:
        with contextlib.suppress(OSError):
            running.stop()
