"""Every test runs against real engines: an embedded layer in a temporary directory, and a PostgreSQL started here."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import hypothesis
import pytest
from cluster import MISSING, Cluster, installed

if TYPE_CHECKING:
    from livinglayer import Layer

# Two busy cores make a slow example, not a wrong one.
hypothesis.settings.register_profile("layer", deadline=None)
hypothesis.settings.load_profile("layer")


def pytest_configure(config: pytest.Config) -> None:
    # Python dies of SIGTERM without a word; as an interrupt it still tears the fixtures down.
    signal.signal(signal.SIGTERM, interrupt)
    if "LAYER_TEST_HOME" in os.environ:  # a worker shares the home of the process that started it
        return
    sweep()
    home = Path(tempfile.mkdtemp(prefix=f"{HOMES}{os.getpid()}-"))
    home.chmod(0o711)  # the user postgres passes through
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    # Owner tokens of test layers never land in the home of whoever runs the tests, nor is a layer of theirs touched.
    for name in [name for name in os.environ if name.startswith("LAYER_") and not name.startswith("LAYER_TEST_")]:
        del os.environ[name]
    os.environ |= {"LAYER_TEST_HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "torture" in item.path.parts or (item.path.name in ALIKE and _on_postgres(item)):
            item.add_marker("torture")


# What these are about does not depend on the engine, which their neighbours try: on PostgreSQL they run in `make torture`.
ALIKE = {"test_docs.py", "test_cli.py", "test_plan.py", "test_strangers.py", "test_tools.py", "test_agents.py"}


def _on_postgres(item: pytest.Item) -> bool:
    given = getattr(item, "callspec", None)
    return given is not None and given.params.get("engine") == "postgres" and "end_to_end" not in item.name


HOMES = "layer-tests-"


def sweep() -> None:
    """Remove what a test run left that was killed before it could."""
    for home in Path(tempfile.gettempdir()).glob(f"{HOMES}*"):
        if not Path("/proc", home.name.removeprefix(HOMES).partition("-")[0]).exists():
            shutil.rmtree(home, ignore_errors=True)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="session")
def postgres_cluster() -> Iterator[Callable[..., Cluster]]:
    """`postgres_cluster(fsync=True)`: the session's server with these settings, started at its first use."""
    clusters: dict[tuple[tuple[str, object], ...], Cluster] = {}

    def get(fsync: bool = bool(os.environ.get("LAYER_TEST_FSYNC")), **settings: str) -> Cluster:
        key = (("fsync", fsync), *sorted(settings.items()))
        if key not in clusters:
            if not installed():
                pytest.fail(MISSING, pytrace=False)
            clusters[key] = Cluster(Path(os.environ["LAYER_TEST_HOME"]), fsync, **settings)
        return clusters[key]

    yield get
    for cluster in clusters.values():
        cluster.remove()


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest) -> str:
    """The engine under test; `-k sqlite` or `-k postgres` narrows a run to one."""
    return str(request.param)


@pytest.fixture
def make_location(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest, postgres_cluster: Callable[..., Cluster]
) -> Iterator[Callable[[], str]]:
    """A fresh place for a layer at each call: a path that is not there yet, or the URL of an empty database."""
    # A torture test asserts what survives a crash, which a server without fsync does not promise.
    fsync = {"fsync": True} if request.node.get_closest_marker("torture") else {}
    with contextlib.ExitStack() as places:

        def make() -> str:
            if engine == "postgres":
                return places.enter_context(postgres_cluster(**fsync).database())
            numbers.append(len(numbers) + 1)
            return str(tmp_path / f"layer{numbers[-1]}")

        numbers: list[int] = []
        yield make


@pytest.fixture
def location(make_location: Callable[[], str]) -> str:
    """A fresh place for a layer: a path or a URL, for `livinglayer.open(location, create=True)`."""
    return make_location()


@pytest.fixture
def make_layer(make_location: Callable[[], str]) -> Iterator[Callable[[], Layer]]:
    """`make_layer()` opens a further fresh layer on the same engine, closed afterwards."""
    import livinglayer

    with contextlib.ExitStack() as opened:

        def make() -> Layer:
            layer = livinglayer.open(make_location(), create=True)
            opened.callback(layer.close)
            return layer

        yield make


@pytest.fixture
def layer(location: str) -> Iterator[Layer]:
    """A fresh layer at `location`."""
    import livinglayer

    layer = livinglayer.open(location, create=True)
    yield layer
    layer.close()
