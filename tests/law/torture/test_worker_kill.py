"""kill -9 of workers during 200 executions: each is finished, tried again or explained; effects happen exactly once; no box is left."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from law import kills
from sandbox.conftest import host, own_host, use  # noqa: F401  (fixtures)
from sandbox.hosts import Host


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_9_during_200_executions(
    workers: int,
    location: str,
    own_host: Host,  # noqa: F811
    record_property: Callable[[str, object], None],
) -> None:
    seed = int(os.environ.get("LAYER_TEST_SEED", random.randrange(1 << 32)))
    record_property("seed", seed)
    for name, value in kills.campaign(location, own_host, 200, 5, workers, seed).items():
        record_property(name, value)
        print(f"{name}: {value}")
