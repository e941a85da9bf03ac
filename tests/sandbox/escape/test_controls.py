"""The suite can fail: with each protection left out in turn, at least one attack gets what it must not, and with all of them none does.

The spawner is compiled from the same source with one WITHOUT_… macro, in a directory of the test's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sandbox.escape.conftest import needs_root
from sandbox.escape.world import SCRIPT, World, outcomes, planted
from sandbox.rig import Rig, run

from livinglayer.errors import LayerError
from livinglayer.sandbox import Sandbox, archive, layers, native
from livinglayer.sandbox.agent import Agent
from livinglayer.sandbox.disk import Disk
from livinglayer.sandbox.drivers.namespace import NamespaceDriver, Spawner
from livinglayer.sandbox.layers import Layers

pytestmark = needs_root

# control → (what is left out, as whom, the attacks of which one must get through, which must all be refused with everything on)
WEAKENED: dict[str, tuple[list[str], str, list[str]]] = {
    "seccomp": (["SECCOMP"], "user", ["call.io_uring", "privilege.filter", "namespace.unshare_user"]),
    "capabilities": (["CAPS"], "root", ["privilege.capabilities"]),
    "no new privileges": (["NO_NEW_PRIVS", "SECCOMP"], "user", ["privilege.no_new_privs"]),
    "nosuid and nodev": (["NOSUID"], "user", ["privilege.nosuid"]),
    "what keeps setuid files from working": (["NOSUID", "NO_NEW_PRIVS", "SECCOMP"], "root", ["privilege.setuid_file"]),
    "user namespace": (["USERNS"], "root", ["namespace.host_root_mapped", "kernel.core_pattern"]),
    "network namespace": (["NETNS"], "user", ["network.abstract_socket", "network.host_loopback", "network.devices"]),
    "pid namespace": (["PIDNS"], "user", ["leak.host_processes"]),
    "ipc namespace": (["IPCNS"], "user", ["ipc.shared_memory", "ipc.listed"]),
    "uts namespace": (["UTSNS"], "user", ["leak.hostname"]),
    "cgroup namespace": (["CGROUPNS"], "user", ["leak.cgroup_path"]),
    "a keyring of its own": (["KEYRING", "SECCOMP"], "root", ["keys.of_the_host"]),
    "what keeps a chroot closed": (["SECCOMP", "CAPS"], "root", ["mount.chroot_escape"]),
    "the mask of proc": (["PROC_MASK"], "user", ["leak.kernel_arguments", "leak.proc_of_the_host"]),
}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("s")
    (directory / "run").mkdir()
    return directory


@pytest.fixture(scope="module")
def decoys(state: Path) -> Iterator[World]:
    with planted(state) as world:
        yield world


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`without("SECCOMP")`: what is compiled from now on in this test lacks it."""

    def weaken(*names: str) -> None:
        monkeypatch.setattr(native, "HARDENED", ["-O0", "-std=gnu17", *(f"-DWITHOUT_{name}" for name in names)])
        monkeypatch.setattr(native, "STATIC", ["-static"])
        monkeypatch.setattr(native, "PROGRAMS", {name: native.PROGRAMS[name] for name in ("spawner", "agent")})

    return weaken


@contextlib.asynccontextmanager
async def parts(state: Path):  # type: ignore[no-untyped-def]
    with Disk.open(state) as disk:
        rig = Rig(state, Spawner(state, disk.root, state / "run"), disk, Layers(disk).resolve("host"))
        try:
            yield rig
        finally:
            rig.close()


async def attack(state: Path, world: World, user: str, names: list[str]) -> set[str]:
    """The names of those attacks that get something in a box of the spawner that is compiled now."""
    async with parts(state) as rig:
        spec = rig.spec(f"weak-{os.urandom(4).hex()}")
        (spec.root.upper / "u/inside.py").write_bytes(SCRIPT.read_bytes())
        (spec.root.upper / "u/facts").write_text(json.dumps(world.facts("namespace", spec.id) | {"only": names}))
        guest = await NamespaceDriver(rig.spawner).start(spec)
        done = await run(guest, "sh", "-c", "cat /facts | python3 /inside.py", user=user)
        found = outcomes(done.out.encode())
        await guest.kill()
        assert {outcome.name for outcome in found} == set(names), done.err
        return {outcome.name for outcome in found if outcome.got}


def test_with_every_control_none_gets_through(state: Path, decoys: World, without: Callable[..., None]) -> None:
    without()
    for user in ("user", "root"):
        names = sorted({name for _, who, names in WEAKENED.values() for name in names if who == user})
        assert asyncio.run(attack(state, decoys, user, names)) == set()


@pytest.mark.parametrize("control", WEAKENED)
def test_is_noticed(state: Path, decoys: World, without: Callable[..., None], control: str) -> None:
    macros, user, names = WEAKENED[control]
    without(*macros)
    assert asyncio.run(attack(state, decoys, user, names))


def test_keyring_holds_without_the_filter(state: Path, decoys: World, without: Callable[..., None]) -> None:
    """Two walls around the host's keys: with the first down the second stands."""
    without("SECCOMP")
    assert asyncio.run(attack(state, decoys, "root", ["keys.of_the_host", "keys.by_number"])) == set()


def test_the_mask_of_the_host_is_noticed(
    state: Path, decoys: World, without: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without()
    monkeypatch.setattr(layers, "SHOWN", re.compile(".*"))
    kept = {name: mode for name, mode in layers.FRESH.items() if name in ("proc", "dev", "etc", "home", "sys")}
    monkeypatch.setattr(layers, "FRESH", kept)
    monkeypatch.setattr(layers, "build_mask", lambda tree, names, ca: bare_mask(tree))
    assert asyncio.run(attack(state, decoys, "user", ["path.plain"])) == {"path.plain"}


def bare_mask(tree: Path) -> None:
    """The directories that a box is mounted into, and nothing hidden."""
    os.chmod(tree, 0o755)
    for name in ("proc", "dev", "dev/pts", "dev/shm", "home", "home/user"):
        (tree / name).mkdir()
    (tree / "etc").mkdir()
    (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")


def test_closing_of_fds_is_noticed(state: Path, without: Callable[..., None]) -> None:
    async def fds() -> int:
        async with parts(state) as rig:
            guest = await NamespaceDriver(rig.spawner).start(rig.spec(f"weak-{os.urandom(4).hex()}"))
            found = len(os.listdir(f"/proc/{guest.pid}/fd"))
            await guest.kill()
            return found

    without()
    closed = asyncio.run(fds())
    without("CLOSING")
    assert asyncio.run(fds()) > closed


def test_death_with_the_spawner_is_noticed(state: Path, without: Callable[..., None]) -> None:
    async def survives() -> bool:
        async with parts(state) as rig:
            guest = await NamespaceDriver(rig.spawner).start(rig.spec(f"weak-{os.urandom(4).hex()}"))
            fd = os.pidfd_open(guest.pid)
            os.kill(int((state / "run/spawner.pid").read_text()), signal.SIGKILL)
            time.sleep(0.5)  # not the loop's: hearing of it we would hang up, and the agent would go for that reason
            alive = f"/proc/{guest.pid}/stat"
            found = os.path.exists(alive) and Path(alive).read_text().rpartition(")")[2].split()[0] not in "ZX"
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
            return found

    without()
    assert not asyncio.run(survives())
    without("DEATH_SIGNAL")
    assert asyncio.run(survives())


# ---- limits ----

HOG = "x = []\nfor _ in range(200): x.append(bytearray(b'x') * (1 << 20))\nprint('had 200 MB')"
FORKS = "import os\nn = 0\ntry:\n  while n < 120:\n    if os.fork() == 0:\n      import time; time.sleep(3); os._exit(0)\n    n += 1\nexcept OSError: pass\nprint('had' if n == 120 else n)"
FILL = "f = open('/big', 'wb', 0)\nfor _ in range(48): f.write(__import__('os').urandom(1 << 20))\nimport os; os.fsync(f.fileno()); print('had 48 MB')"


@pytest.mark.parametrize(("limit", "code"), [("memory", HOG), ("pids", FORKS), ("disk", FILL)])
def test_limits_are_noticed(
    state: Path, limit: str, code: str, without: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without()

    async def had() -> bool:
        async with parts(state) as rig:
            spec = rig.spec(f"weak-{os.urandom(4).hex()}", memory="128M", pids=64)
            if limited:
                rig.disk.limit(spec.root.upper, 32 << 20)
            guest = await NamespaceDriver(rig.spawner).start(spec)
            done = await run(guest, "python3", "-c", code, user="root")
            await guest.kill()
            return "had" in done.out

    limited = True
    assert not asyncio.run(had())
    limited = False
    monkeypatch.setattr("livinglayer.sandbox.cgroups.Cgroup.limit", lambda *_: None)
    assert asyncio.run(had())


# ---- egress, files, archives, the agent ----


def test_rules_of_the_gateway_are_noticed(make_box: Callable[..., Sandbox], world: World) -> None:
    from sandbox.escape.run import attack_box

    closed = attack_box(make_box(), world, "namespace", "user", ["network.egress_by_name"])
    assert not closed[0].got
    rule = {"host": "decoy.test", "port": world.tcp, "resolve": "127.0.0.1", "private": True}
    opened = attack_box(make_box(egress=[rule]), world, "namespace", "user", ["network.egress_by_name"])
    assert opened[0].got
    world.heard.clear()


async def plain_agent(
    state: Path, directory: Path, user: int | None = None
) -> tuple[Agent, asyncio.subprocess.Process]:
    """The agent of tier process over a directory, as it is compiled now."""
    ours, theirs = socket.socketpair()
    number = str(theirs.fileno())
    program = Path(f"/tmp/agent-{os.getpid()}")  # anybody may run it there
    shutil.copy(native.build(state) / "agent", program)
    process = await asyncio.create_subprocess_exec(
        program,
        number,
        number,
        str(directory),
        pass_fds=[theirs.fileno()],
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
    theirs.close()
    agent = Agent(ours)
    await agent.ready
    program.unlink()
    return agent, process


def test_openat2_is_noticed(state: Path, decoys: World, without: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(decoys.files[0])

    async def read() -> bytes:
        agent, process = await plain_agent(state, tmp_path)
        try:
            return await agent.read("/link")
        except LayerError:
            return b""
        finally:
            agent.close()
            await process.wait()

    without()
    assert asyncio.run(read()) == b""
    without("OPENAT2")
    assert asyncio.run(read()) == decoys.token.encode()


def test_agent_that_can_be_read_is_noticed(state: Path, without: Callable[..., None], tmp_path: Path) -> None:
    """What runs under the agent's own id may open its memory only if it is dumpable: as another process of that id would see it."""

    async def opened() -> bool:
        agent, process = await plain_agent(state, Path("/"), user=61000)
        child = os.fork()
        if child == 0:
            os.setresgid(61000, 61000, 61000)
            os.setresuid(61000, 61000, 61000)
            try:
                os.close(os.open(f"/proc/{process.pid}/mem", os.O_RDWR))
                os._exit(1)
            except OSError:
                os._exit(0)
        found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        agent.close()
        await process.wait()
        return found

    without()
    assert not asyncio.run(opened())
    without("UNDUMPABLE")
    assert asyncio.run(opened())


def test_clean_names_of_archives_are_noticed(make_box: Callable[..., Sandbox], monkeypatch: pytest.MonkeyPatch) -> None:
    from sandbox.escape.test_outside import SLIPS

    monkeypatch.setattr(archive, "clean", lambda name: name)
    box = make_box()
    with contextlib.suppress(LayerError):
        box.files.upload_archive(SLIPS["parent"], "/home/user/in")
    assert box.files.exists("/home/user/escaped")


def test_no_build_leaves_anything_out() -> None:
    """The macros are nowhere but in the C itself, and there only to leave something out."""
    package = Path(native.__file__).parent
    for path in package.rglob("*.py"):
        assert "WITHOUT_" not in path.read_text(), path
    used = {
        macro
        for source in native.SOURCE.glob("*.[ch]")
        for macro in re.findall(r"WITHOUT_([A-Z0-9_]+)", source.read_text())
    }
    tried = {macro for macros, _, _ in WEAKENED.values() for macro in macros} | {
        "CLOSING",
        "DEATH_SIGNAL",
        "OPENAT2",
        "UNDUMPABLE",
    }
    assert used == tried
