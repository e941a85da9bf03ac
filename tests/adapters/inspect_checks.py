"""Inspect's own checks of a sandbox provider, on a box of the tier TIER; test_inspect.py runs this in an environment that has Inspect."""

import os
from collections.abc import AsyncIterator

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def made(anyio_backend: str) -> AsyncIterator[SandboxEnvironment]:
    provider, tier = registry_find_sandboxenv("layer"), os.environ["TIER"]
    await provider.task_init("checks", tier)
    environments = await provider.sample_init("checks", tier, {})
    yield environments["default"]
    await provider.sample_cleanup("checks", tier, environments, False)
    await provider.task_cleanup("checks", tier, True)


@pytest.fixture
def sandbox_env(made: SandboxEnvironment) -> SandboxEnvironment:
    return made
