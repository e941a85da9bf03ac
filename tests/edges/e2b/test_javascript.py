"""The unmodified JavaScript packages of E2B against a server: tests/node/e2b.test.mjs, which says what each row of the protocol must do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from edges.serving import Server
from lacking import lacking

NODE = Path(__file__).parents[2] / "node"


def test_the_javascript_packages_do_all_they_can(server: Server) -> None:
    if not (NODE / "node_modules" / "e2b").is_dir() or shutil.which("node") is None:
        lacking("tests/node or node is not installed: tools/setup.sh test")
    command = ["node", "--test", "--test-reporter=spec", "e2b.test.mjs"]
    environment = os.environ | server.e2b() | {"E2B_VOLUME_API_URL": server.url, "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=NODE, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + server.log
