"""The traps that others have stepped into, each with a test of its own, and both ways of mounting a box's root."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox.escape.conftest import needs_root
from sandbox.escape.run import attack_box, breaches
from sandbox.escape.test_inside import CORE
from sandbox.escape.world import World, planted
from sandbox.hosts import Host

from livinglayer.errors import Invalid, LayerError
from livinglayer.sandbox import Sandbox, native
from livinglayer.sandbox.cgroups import Cgroups
from livinglayer.sandbox.drivers import gvisor, qemu

MakeBox = Callable[..., Sandbox]
pytestmark = needs_root


def test_1_host_root_is_mapped_into_no_box(make_box: MakeBox, world: World, tmp_path: Path) -> None:
    """A box with host id 0 could open core_pattern for writing. The spawner refuses a range that begins below 65536."""
    program = native.build(Path(world.state)) / "spawner"
    for first in ("0", "1", "65535", "-1"):
        done = subprocess.run(
            [program, str(tmp_path), "/dev/null", first, "1"], capture_output=True, check=False, timeout=5
        )
        assert done.returncode, first
    found = attack_box(make_box(), world, "namespace", "root", ["kernel.core_pattern", "namespace.host_root_mapped"])
    assert not [outcome for outcome in found if outcome.got]


@pytest.mark.parametrize("tier", ["namespace", "container"])
def test_2_no_key_of_the_host_is_readable(make_box: MakeBox, world: World, tier: str) -> None:
    names = [
        "keys.of_the_host",
        "keys.by_number",
        "call.keyctl",
        "call.add_key",
        "call.request_key",
        "call.i386_keyctl",
    ]
    for user in ("user", "root"):
        assert not [outcome for outcome in attack_box(make_box(tier), world, tier, user, names) if outcome.got]


def test_3_fds_and_environment_are_closed_and_cleared(
    make_box: MakeBox, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", world.token)
    for zygote in (False, True):
        found = attack_box(
            make_box(), world, "namespace", "user", ["leak.fds", "leak.environment", "leak.first_process"], zygote
        )
        assert not [outcome for outcome in found if outcome.got]


def test_4_no_box_leaves_a_zombie(make_box: MakeBox, host: Host) -> None:
    for _ in range(10):
        box = make_box()
        box.run("for i in 1 2 3 4 5; do (sleep 0.001 &) ; done; sleep 0.05")
        assert not [
            line for line in box.run("cat /proc/[0-9]*/stat 2>/dev/null").stdout.text.splitlines() if ") Z " in line
        ]
        box.kill()
    spawner = (host.state / "run/spawner.pid").read_text()
    time.sleep(0.2)
    for parent in (spawner, str(host.pid)):
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        states = {
            child: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            for child in children
            if Path(f"/proc/{child}").exists()
        }
        assert "Z" not in states.values(), states


def test_5_nothing_outlives_a_killed_host(own_host: Host) -> None:
    """kill -9 of the host: ephemeral boxes end with it, and what is left is taken away when it comes back."""
    box = Sandbox.create()
    mark = f"trap5-{os.getpid()}"
    box.start(["sh", "-c", f"exec -a {mark} sleep 600 || sleep 600; : {mark}"])
    own_host.crash()
    end = time.monotonic() + 10
    while subprocess.run(["pgrep", "-f", mark], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < end
        time.sleep(0.05)
    own_host.hang_up()
    with contextlib.suppress(LayerError):
        Sandbox.create().kill()


def test_6_gvisor_has_room_for_its_stubs(make_box: MakeBox) -> None:
    """The sentry's own processes count against the host's pids: a small limit of the box's must not make it panic."""
    box = make_box("gvisor", pids=16)
    box.run("for i in $(seq 40); do sleep 2 & done; wait", timeout=30)
    assert box.run(["echo", "alive"]).stdout == "alive\n"
    assert "pids" in Path(gvisor.__file__).read_text()


def test_7_files_are_collected_without_following_links(make_box: MakeBox, tmp_path: Path, world: World) -> None:
    for tier in ("process", "namespace"):
        box = make_box(tier)
        box.run(f"mkdir d; ln -s {world.files[0]} d/a; ln -s /etc/passwd d/b; mkfifo d/c; ln -s / d/root")
        with contextlib.suppress(LayerError):
            box.files.download("/home/user/d", tmp_path / tier)
        for path in (tmp_path / tier).rglob("*"):
            assert path.is_symlink() or not path.is_file() or world.token not in path.read_text(errors="replace")
            assert not path.is_fifo()


def test_8_the_root_is_writable_and_the_cgroup_without_a_path(make_box: MakeBox) -> None:
    """An idmapped overlay is silently read-only when its mounter's id is not mapped; a cgroup namespace made too early shows the host's path."""
    box = make_box()
    assert box.run(
        "echo x >/opt/x && rm /opt/x && mkdir /new && touch /var/lib/y && echo y >>/etc/hosts", user="root"
    ).ok
    assert all(line.endswith(":/") for line in box.run(["cat", "/proc/self/cgroup"]).stdout.text.split())
    refused = box.run(
        [
            "python3",
            "-c",
            "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(425, 8, bytes(120)), ctypes.get_errno())",
        ]
    )
    assert refused.stdout == "-1 1\n"  # io_uring would pass a filter of network calls


def test_9_machines_are_started_so_that_they_do_not_hang() -> None:
    """TCG boots hang on TSC calibration now and then unless they are told the answer."""
    text = "".join(path.read_text() for path in Path(qemu.__file__).parent.glob("*.py"))
    assert "tsc_early_khz" in text
    assert "lpj=" in text


@pytest.mark.parametrize(
    "request_",
    [
        {"mounts": ["/etc:../../x"]},
        {"mounts": [{"source": "relative", "target": "/x"}]},
        {"mounts": [{"source": "/etc", "target": "/../x"}]},
    ],
)
def test_10_roots_come_from_whoever_owns_the_host(make_box: MakeBox, world: World, request_: dict[str, object]) -> None:
    """No request to a box names a path of the host: cwd and files are the box's own, and a mount is part of the blueprint or there is none."""
    with pytest.raises(Invalid):
        Sandbox.create(**request_)
    box = make_box()
    for cwd in (str(world.files[0].parent), "/proc/1/cwd", "/" + "../" * 20, "/state", "/host"):
        with contextlib.suppress(LayerError):
            assert world.token not in box.run(["sh", "-c", "cat ./* 2>/dev/null"], cwd=cwd).stdout


def test_limits_that_are_not_there_are_not_claimed(tmp_path: Path) -> None:
    limits = Cgroups(tmp_path)
    assert limits.version in ("v1", "v2", "none")
    assert limits.limits == frozenset({"memory", "pids", "cpu"}) or limits.version != "v2"
    limits.close()


def test_overlay_by_path(use: Callable[[Host], Host], monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    """The way of kernels before 6.13, which take layers by path only: the same attacks, with the same result."""
    monkeypatch.setenv("LAYER_OVERLAY_BY_PATH", "1")
    made = Host(native=host.state / "native") if "native" in Host.__init__.__code__.co_varnames else Host()
    use(made)
    try:
        with planted(made.state) as world, Sandbox.create() as box:
            assert re.search(r"lowerdir=", box.run(["cat", "/proc/self/mountinfo"]).stdout.text)
            for user in ("user", "root"):
                found = attack_box(box, world, "namespace", user, CORE)
                assert not breaches(found, "namespace"), breaches(found, "namespace")
            assert not world.changed()
        made.hang_up()
        made.stop()
        assert not made.remains()
    finally:
        made.remove()
