"""The tour runs by itself, and what it claims is so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from sandbox.hosts import Host, wait_until

import livinglayer
from livinglayer.jobs.demo import PROMISES

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the tour runs boxes at tier namespace, which needs root")
LAYER = Path(sys.executable).with_name("layer")


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A machine on which nothing of ours has ever run."""
    host = Host()
    try:
        yield {**os.environ, **host.environment(), "XDG_CONFIG_HOME": str(tmp_path / "config")}
        host.stop()
        wait_until(lambda: not host.remains(), "nothing of the host is left")
    finally:
        host.remove()


def test_the_tour_does_what_it_claims(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    told = subprocess.run(
        [LAYER, "demo", "--json", "--keep", kept], env=environment, capture_output=True, text=True, timeout=170
    )
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-3000:]
    found = json.loads(told.stdout)
    assert found["kept"] == dict.fromkeys(PROMISES, True)
    claims = {each["chapter"]: each for each in found["chapters"]}
    # The layer it left says the same, asked by itself.
    monkeypatch.setenv("XDG_CONFIG_HOME", environment["XDG_CONFIG_HOME"])
    with livinglayer.open(kept) as layer:
        assert layer.verify()
        agent = claims["agent"]["execution"]
        kinds = [
            row["kind"] for row in layer.query("select kind from step where execution = :e order by n", {"e": agent})
        ]
        assert kinds.count("model") == claims["agent"]["model_calls"] == 6
        assert {"tool", "query", "mutation", "refusal", "network", "approval", "call", "answer"} <= set(kinds)
        answered = layer.query("select action, status from approval where execution = :e order by id", {"e": agent})
        assert answered == [{"action": "call", "status": "done"}, {"action": "merge", "status": "done"}]
        assert layer.query("select amount, issued_by from refund") == [
            {"amount": Decimal("19.90"), "issued_by": "triage-bot"}
        ]
        denied = layer.query("select resource from decision where execution = :e and not allowed", {"e": agent})
        assert denied and all(row["resource"].startswith("refund") for row in denied)
        assert layer.query("select name from branch where status = 'open' and name like 'idea%'") == []
    again = subprocess.run([LAYER, "demo", "--keep", kept], env=environment, capture_output=True, text=True, timeout=30)
    assert again.returncode == 5 and "there is a layer in" in again.stderr


def test_the_tour_is_told_to_people(environment: dict[str, str]) -> None:
    told = subprocess.run([LAYER, "demo"], env=environment, capture_output=True, text=True, timeout=170)
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-3000:]
    for number in range(1, len(PROMISES) + 1):
        assert f"\n{number}. " in told.stdout
    assert "\x1b" not in told.stdout and "Traceback" not in told.stdout and "✓ Nothing got out" in told.stdout
