"""A layer that the tests of one file share: making one costs more than most tests do with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from cluster import Cluster

import livinglayer
from livinglayer import Layer

Shared = Callable[[str], tuple[Layer, str]]


@pytest.fixture(scope="module")
def shared_layers(
    postgres_cluster: Callable[..., Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    """The file's layer on an engine, with its place; made at its first use."""
    made: dict[str, tuple[Layer, str]] = {}
    with contextlib.ExitStack() as places:

        def get(engine: str) -> tuple[Layer, str]:
            if engine not in made:
                if engine == "postgres":
                    place = places.enter_context(postgres_cluster().database())
                else:
                    place = str(tmp_path_factory.mktemp("shared") / "layer")
                opened = livinglayer.open(place, create=True)
                places.callback(opened.close)
                made[engine] = (opened, place)
            return made[engine]

        yield get


@pytest.fixture
def shared(engine: str, shared_layers: Shared) -> Layer:
    """A layer that other tests of the file use too: a test takes names of entities, branches and people of its own."""
    return shared_layers(engine)[0]


@pytest.fixture
def shared_location(engine: str, shared_layers: Shared) -> str:
    """Where `shared` lives."""
    return shared_layers(engine)[1]
