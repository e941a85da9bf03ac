"""deepagents, as it is published, in an environment of its own: LangChain's tests of a sandbox, and an agent in a box."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from adapters import environments
from sandbox.hosts import Host

from livinglayer.sandbox import Sandbox
from livinglayer.sandbox.blueprint import TIERS


@pytest.mark.parametrize("tier", [TIERS[1], *[pytest.param(tier, marks=pytest.mark.torture) for tier in TIERS[2:]]])
def test_langchains_own_tests_all_pass(tier: str, host: Host, use: Callable[[Host], Host], tmp_path: Path) -> None:
    use(host)
    said = environments.checks(
        "deepagents", "deepagents_checks.py", tmp_path, {"TIER": tier}, "-o", "asyncio_mode=auto"
    )
    assert said.startswith("81 passed, 7 xfailed"), said
    assert Sandbox.list() == []
