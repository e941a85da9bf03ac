"""A full disk: a named error, reads go on, and once there is space again so do writes, without a restart."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

NO_MOUNT = 77
MISSING = (
    "the disk-full test could not mount a small tmpfs, so it did not run: run it as root, or allow user namespaces"
)


@pytest.mark.parametrize(
    ("engine", "times"),
    [
        ("sqlite", 1),
        pytest.param("sqlite", 10, marks=pytest.mark.torture),
        pytest.param("postgres", 3, marks=pytest.mark.torture),
    ],
)
def test_a_full_disk_is_an_error_with_a_name_and_passes(
    engine: str, times: int, record_property: Callable[[str, object], None]
) -> None:
    # In a mount namespace of its own: whatever happens, nothing stays mounted.
    private = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    script = f'mount -t tmpfs -o size=32m tmpfs "$1" || exit {NO_MOUNT}; exec "$2" -m reliability.disk "$3" "$1"'
    # Not below tmp_path, which the account that PostgreSQL runs as may not enter.
    place = tempfile.mkdtemp(dir=os.environ["LAYER_TEST_HOME"])
    for _ in range(times):
        done = subprocess.run(
            [*private, "sh", "-c", script, "sh", place, sys.executable, engine],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode == NO_MOUNT or "unshare" in done.stderr:
            pytest.fail(f"{MISSING} ({done.stderr.strip()})", pytrace=False)
        assert done.returncode == 0, done.stderr
    record_property("last time", done.stdout.strip())
