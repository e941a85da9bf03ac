"""Hosts for the tests of the sandbox: one for each worker, and fresh ones for tests that kill theirs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
from sandbox.hosts import Host, sweep


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """The host of this worker. At the end nothing of it may be left: no process, mount, loop device or cgroup."""
    sweep()
    made = Host()
    try:
        yield made
        if not made.alive():
            warnings.warn(
                f"the host of this worker ended before its tests did; its log:\n{made.log[-3000:]}", stacklevel=1
            )
        made.python(
            "Sandbox.list()"
        )  # one that has ended is started once more: what it left is found and removed at its start
        made.hang_up()
        made.stop()
        left, log = made.remains(), made.log
    finally:
        made.remove()
    assert not left, "the host left behind:\n" + "\n".join(left[:20]) + f"\nits log:\n{log[-3000:]}"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Host], Host]:
    """`use(host)`: from now on `Sandbox` asks this host."""

    def choose(host: Host) -> Host:
        for name, value in host.environment().items():
            monkeypatch.setenv(name, value)
        return host

    return choose


@pytest.fixture
def own_host(use: Callable[[Host], Host]) -> Iterator[Host]:
    """A host that a test may kill; it must leave nothing either."""
    made = Host()
    try:
        yield use(made)
        made.hang_up()
        made.stop()
        left, log = made.remains(), made.log
    finally:
        made.remove()
    assert not left, "the host left behind:\n" + "\n".join(left[:20]) + f"\nits log:\n{log[-3000:]}"
