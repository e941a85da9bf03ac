"""One suite for every tier. `make test` runs all of it on WHOLE and what is marked `core` on every tier; `make torture` all of it on all.

A tier that does not work on this machine fails its tests. A machine that is known to lack one says so, with the reason:
LAYER_TEST_WITHOUT="gvisor=no runsc for this architecture;vm=…"
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from sandbox.hosts import Host

from livinglayer.errors import LayerError, Unavailable
from livinglayer.sandbox import Sandbox
from livinglayer.sandbox.blueprint import TIERS

WHOLE = ("process", "namespace", "microvm")
SLOW = {"gvisor": 3, "microvm": 3, "vm": 6}  # emulated machines take their time
SECONDS = 60  # for one test; more on slow tiers


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "core: of the sandbox's conformance suite; runs on every tier in `make test`")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tier" in metafunc.fixturenames:
        metafunc.parametrize("tier", TIERS, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything = config.getoption("markexpr", "") == "torture"
    for item in items:
        tier = getattr(item, "callspec", None) and item.callspec.params.get("tier")  # type: ignore[attr-defined]
        if tier and (everything or (tier not in WHOLE and not item.get_closest_marker("core"))):
            item.add_marker("torture")


@pytest.fixture(autouse=True)
def deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that hangs fails instead."""
    tier = getattr(request.node, "callspec", None) and request.node.callspec.params.get("tier")
    seconds = SECONDS * SLOW.get(str(tier), 1)

    def late(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"the test did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def here(host: Host, use: Callable[[Host], Host]) -> Host:
    """The worker's host is the one that `Sandbox` asks."""
    return use(host)


def excused() -> dict[str, str]:
    """The tiers that this machine is known to lack, and why."""
    listed = os.environ.get("LAYER_TEST_WITHOUT", "").split(";")
    return {tier.strip(): why.strip() for tier, equals, why in (entry.partition("=") for entry in listed) if equals}


@pytest.fixture(scope="session")
def broken() -> dict[str, str]:
    """Tiers that were found not to work, and why."""
    return {}


@pytest.fixture
def tier(request: pytest.FixtureRequest, here: Host, broken: dict[str, str]) -> str:
    """The tier under test, which works here or is excused."""
    name = str(request.param)
    if why := excused().get(name):
        pytest.skip(f"tier {name} is listed in LAYER_TEST_WITHOUT: {why}")
    if name not in broken:
        broken[name] = ""
        try:
            Sandbox.capabilities(name)
        except Unavailable as error:
            broken[name] = f"{error.message} ({error.hint})"
    if broken[name]:
        pytest.fail(f"tier {name} does not work here: {broken[name]}", pytrace=False)
    return name


@pytest.fixture
def capabilities(tier: str) -> dict[str, Any]:
    """What the tier says it can."""
    return Sandbox.capabilities(tier)


@pytest.fixture
def make(tier: str) -> Iterator[Callable[..., Any]]:
    """`make(memory="64M", …)`: a box of this tier that ends with the test."""
    made: list[Any] = []

    def create(**shape: Any) -> Any:
        made.append(Sandbox.create(tier, **shape))
        return made[-1]

    yield create
    for box in made:
        box.kill()


@pytest.fixture(scope="session")
def shared() -> dict[str, Any]:
    return {}


@pytest.fixture
def box(tier: str, shared: dict[str, Any]) -> Iterator[Any]:
    """A box for tests that harm nothing: many use it after each other, and each leaves it running."""
    if tier not in shared:
        shared[tier] = Sandbox.create(tier)
    found = shared[tier]
    try:
        yield found
        assert found.info()["state"] == "running"
        assert [command["argv"] for command in found.processes()] == []
    except BaseException:
        del shared[tier]
        with contextlib.suppress(LayerError):
            found.kill()
        raise


@pytest.fixture
def spot(box: Any) -> str:
    """A directory of the test's own in the shared box."""
    path = f"/home/user/{secrets.token_hex(6)}"
    box.files.mkdir(path)
    return path
