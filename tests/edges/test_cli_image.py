"""`layer image`, with real boxes: steps are run once and kept, an image makes boxes, a snapshot becomes an archive that others read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox.hosts import Host, sweep, wait_until

LAYER = [sys.executable, "-m", "livinglayer.edges.cli.main"]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="images need root")


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    sweep()
    made = Host()
    try:
        yield made
        made.hang_up()
        made.stop()
        wait_until(lambda: not made.remains(), "nothing of the host is left")
    finally:
        made.remove()


def layer(host: Host, *words: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*LAYER, *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | host.environment(),
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_steps_are_kept_and_make_boxes(host: Host, tmp_path: Path) -> None:
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps([{"files": {"/opt/a": "one"}}, {"run": "cat /opt/a > /opt/b; date +%N >> /opt/b"}]))
    first = layer(host, "image", "build", "tools", steps, "--base", "host")
    assert first.returncode == 0 and "layer box create --base tools" in first.stdout, first.stderr
    again = layer(host, "image", "build", "tools", steps, "--base", "host")
    assert again.stderr.count("kept from before") == 2
    assert [image["name"] for image in json.loads(layer(host, "image", "list", "--json").stdout)] == ["tools"]
    assert layer(host, "box", "create", "made", "--base", "tools").returncode == 0
    assert layer(host, "box", "exec", "made", "cat", "/opt/b").stdout.startswith("one")
    snapshot = json.loads(layer(host, "box", "snapshot", "made", "--json").stdout)["id"]
    archive = tmp_path / "made.tar"
    refused = layer(host, "image", "export", snapshot, archive)
    assert refused.returncode == 2 and "host's own files" in refused.stderr
    written = layer(host, "image", "export", snapshot, archive, "--changes-only")
    assert written.returncode == 0, written.stderr
    if skopeo := shutil.which("skopeo"):
        seen = subprocess.run(
            [skopeo, "inspect", f"oci-archive:{archive}"], capture_output=True, text=True, check=False
        )
        assert seen.returncode == 0, seen.stderr
    assert layer(host, "image", "remove", "tools").returncode == 0
    assert layer(host, "box", "exec", "made", "cat", "/opt/a").stdout == "one"
    layer(host, "box", "kill", "made")


def test_a_failing_step_says_which_and_keeps_nothing(host: Host, tmp_path: Path) -> None:
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps([{"run": "echo fine"}, {"run": "echo broken >&2; exit 7"}]))
    failed = layer(host, "image", "build", "bad", steps, "--base", "host")
    assert failed.returncode == 2 and "step 2" in failed.stderr and "broken" in failed.stderr
    assert json.loads(layer(host, "image", "list", "--json").stdout) == []


def test_broken_archives_and_steps_are_refused(host: Host, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"no archive")
    broken = layer(host, "image", "import", tmp_path / "x.tar", "x")
    assert broken.returncode in (2, 7) and broken.stderr.startswith("layer: ")
    (tmp_path / "steps.json").write_text("{")
    assert layer(host, "image", "build", "x", tmp_path / "steps.json").returncode == 2
    assert layer(host, "image", "remove", "nothing").returncode == 4
