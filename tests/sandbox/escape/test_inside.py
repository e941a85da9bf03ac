"""Every attack of inside.py, from inside a box of every tier above process that works here: none gets anything."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from sandbox.escape.run import attack_box, breaches
from sandbox.escape.world import SCRIPT, Outcome, World, load, outcomes

from livinglayer.sandbox import Sandbox

MakeBox = Callable[..., Sandbox]

# What every tier is asked in `make test`: the ways out that have worked somewhere before, one or two of each kind.
CORE = [
    "namespace.unshare_user_then_mount", "namespace.clone3", "namespace.setns_of_first_process", "mount.tmpfs", "mount.cgroup_v1", "mount.chroot_escape",
    "path.plain", "path.dotdot", "path.spawner_directories", "path.proc_1_root", "path.fds_of_all_processes", "path.open_by_handle", "path.host_shadow",
    "path.write_lower_layer", "path.unix_socket_of_host", "leak.mountinfo", "leak.cgroup_path", "leak.first_process", "leak.environment", "leak.fds",
    "leak.hostname", "leak.host_processes", "leak.kernel_memory", "leak.other_boxes", "leak.host_sockets", "kernel.core_pattern", "kernel.release_agent",
    "kernel.raise_own_limits", "call.io_uring", "call.bpf", "call.keyctl", "call.ptrace", "call.i386_by_int80", "device.make_disk", "device.open",
    "keys.of_the_host", "keys.by_number", "agent.memory", "agent.signals", "privilege.capabilities", "privilege.setuid_programs", "privilege.setuid_file",
    "network.abstract_socket", "network.host_loopback", "network.host_address", "network.host_ipv6", "network.host_udp", "network.metadata",
    "network.dns_elsewhere", "network.egress_by_name", "network.vsock", "network.packet", "ipc.shared_memory", "ipc.message_queue", "ipc.dev_shm",
]  # fmt: skip


def assert_nothing(found: list[Outcome], tier: str, wanted: int) -> None:
    assert len(found) >= wanted, f"only {len(found)} attacks ran"
    assert not [outcome for outcome in found if outcome.broken], "attacks that did not work as written"
    got = breaches(found, tier)
    assert not got, "\n".join(f"{outcome.name} as {outcome.user} on {tier}: {outcome.got}" for outcome in got)


def test_there_are_enough() -> None:
    assert len(load()) >= 150
    assert set(CORE) <= set(load())


@pytest.mark.parametrize("user", ["user", "root"])
def test_namespace(make_box: MakeBox, world: World, user: str) -> None:
    box = make_box()
    assert_nothing(attack_box(box, world, "namespace", user), "namespace", 170)
    assert box.run(["echo", "alive"]).stdout == "alive\n"


@pytest.mark.parametrize("user", ["user", "root"])
def test_namespace_by_the_zygote(make_box: MakeBox, world: World, user: str) -> None:
    assert_nothing(attack_box(make_box(), world, "namespace", user, zygote=True), "namespace", 170)


@pytest.mark.parametrize("tier", ["container", "gvisor", "microvm", "vm"])
def test_core_of_every_tier(make_box: MakeBox, world: World, tier: str) -> None:
    box = make_box(tier)
    for user in ("root",) if tier in ("microvm", "vm") else ("user", "root"):  # emulated machines are slow
        assert_nothing(attack_box(box, world, tier, user, CORE), tier, len(CORE) - 6)
    assert box.run(["echo", "alive"]).stdout == "alive\n"


@pytest.mark.torture
@pytest.mark.parametrize("user", ["user", "root"])
@pytest.mark.parametrize("tier", ["container", "gvisor", "microvm", "vm"])
def test_whole_of_every_tier(make_box: MakeBox, world: World, tier: str, user: str) -> None:
    assert_nothing(attack_box(make_box(tier), world, tier, user), tier, 160)


def test_with_terminal(make_box: MakeBox, world: World) -> None:
    """A command with a terminal finds nothing more than one without."""
    box = make_box()
    names = ["leak.fds", "device.push_into_terminal", "leak.environment", "path.fds_of_all_processes"]
    facts = world.facts("namespace", box.id) | {"only": names}
    box.files.write("/tmp/inside.py", SCRIPT.read_bytes())
    box.files.write("/tmp/facts", json.dumps(facts).encode())
    done = box.start("stty -echo; cat /tmp/facts | python3 /tmp/inside.py; exit", pty=(24, 200)).wait()
    assert_nothing(outcomes(done.stdout), "namespace", 4)


def test_process_says_what_is_open(make_box: MakeBox, world: World) -> None:
    """Tier process has no wall, and the docs say so: this is the list. Its own user and its limits are what it has."""
    found = attack_box(make_box("process"), world, "process", "user")
    open_ = {outcome.name for outcome in found if outcome.got}
    assert {"path.plain", "network.host_loopback", "leak.host_processes", "leak.hostname"} <= open_
    # What even it must refuse: the host's root, its keys, its settings, other users' files.
    assert not open_ & {
        "keys.of_the_host", "kernel.core_pattern", "privilege.become_root", "privilege.setuid_programs", "path.host_shadow", "leak.fds", "agent.memory",
        "leak.environment",
    }, sorted(open_)  # fmt: skip
    world.heard.clear()
