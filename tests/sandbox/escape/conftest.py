"""What the escape suite shares: canaries planted around the worker's host, and boxes to attack from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from sandbox.escape.world import World, planted
from sandbox.hosts import Host

from livinglayer.errors import Unavailable
from livinglayer.sandbox import Sandbox

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


@pytest.fixture(scope="session")
def planted_world(host: Host) -> Iterator[World]:
    with planted(host.state) as world:
        yield world


@pytest.fixture
def world(planted_world: World, host: Host, use: Callable[[Host], Host]) -> Iterator[World]:
    """The canaries of this worker's host; after each test nothing on the host may have changed, and no decoy may have heard a thing."""
    use(host)
    planted_world.heard.clear()
    yield planted_world
    assert not planted_world.changed()


@pytest.fixture
def make_box(world: World) -> Iterator[Callable[..., Sandbox]]:
    """`make_box(tier=…)`: a box that is killed afterwards; skips when the tier does not work here."""
    made: list[Sandbox] = []

    def make(tier: str = "namespace", **shape: object) -> Sandbox:
        try:
            made.append(Sandbox.create(tier=tier, **shape))
        except Unavailable as error:
            pytest.skip(f"tier {tier}: {error}")
        return made[-1]

    yield make
    for box in made:
        box.kill()
