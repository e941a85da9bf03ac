"""The parts of a host that a driver needs, without the host: a disk, a masked base, limits, networks, the spawner."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from livinglayer.sandbox.blueprint import Blueprint
from livinglayer.sandbox.cgroups import Cgroups
from livinglayer.sandbox.commands import encode_exec
from livinglayer.sandbox.disk import Disk
from livinglayer.sandbox.driver import Guest, Root, Spec
from livinglayer.sandbox.drivers.namespace import Spawner
from livinglayer.sandbox.egress import netns
from livinglayer.sandbox.layers import Layers
from livinglayer.sandbox.wire import DONE, EXIT, STDERR, STDOUT, Kind

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and namespaces need root")


@dataclass(frozen=True)
class Result:
    """What a command left."""

    code: int
    out: str
    err: str


class Rig:
    """One state directory, for the drivers under test."""

    def __init__(self, state: Path, spawner: Spawner, disk: Disk, layers: tuple[str, ...]) -> None:
        self.state, self.spawner, self.disk, self.layers = state, spawner, disk, layers
        self.run = state / "run"
        self.cgroups = Cgroups(state, pool=0)
        self.networks: dict[str, netns.Network] = {}
        self.specs: list[Spec] = []

    def spec(self, name: str, upper: Path | None = None, **blueprint: object) -> Spec:
        """A box of this state; its files are new unless `upper` is given."""
        shape = Blueprint.of({"memory": "256M", **blueprint})
        upper = upper or self.disk.create(name)
        for part in ("u", "w"):
            (upper / part).mkdir(exist_ok=True)
        directory = self.run / "boxes" / name
        directory.mkdir(parents=True, exist_ok=True)
        group = self.cgroups.take(shape.memory, shape.pids, shape.cpu)
        self.networks[name] = network = netns.make()
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        spec = Spec(name, shape, Root(self.layers, upper), directory, group, network.netns, environment=environment)
        self.specs.append(spec)
        return spec

    def close(self) -> None:
        for spec in self.specs:
            spec.cgroup.kill()
            spec.cgroup.remove()
            self.networks[spec.id].close()
            self.disk.destroy(spec.root.upper)
        self.cgroups.close()
        self.spawner.close()
        pid = int((self.run / "spawner.pid").read_text())  # the next test must not meet it on its way out
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@contextlib.asynccontextmanager
async def rig(state: Path) -> AsyncIterator[Rig]:
    """The parts of `state`, started and ended with the block."""
    (state / "run").mkdir(parents=True, exist_ok=True)
    with Disk.open(state) as disk:
        parts = Rig(state, Spawner(state, disk.root, state / "run"), disk, Layers(disk).resolve("host"))
        try:
            yield parts
        finally:
            parts.close()


async def run(guest: Guest, *argv: str, user: str = "", seconds: float = 30) -> Result:
    """Run one command in a box to its end."""
    out: dict[int, bytearray] = {STDOUT: bytearray(), STDERR: bytearray()}
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_frame(kind: int, payload: bytes) -> None:
        if kind in out:
            out[kind] += payload
            guest.agent.send(Kind.WINDOW, len(payload).to_bytes(4, "little"), number)
        elif kind == EXIT and not ended.done():
            ended.set_result(os.waitstatus_to_exitcode(int.from_bytes(payload[:4], "little")))
        elif kind == DONE and not ended.done():
            ended.set_result(127)

    number = guest.agent.open(on_frame)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root"}
    guest.agent.send(Kind.EXEC, encode_exec(argv, user, "/", environment, 0), number)
    code = await asyncio.wait_for(ended, seconds)
    guest.agent.drop(number)
    return Result(code, out[STDOUT].decode(), out[STDERR].decode())


def traces(name: str) -> Iterator[str]:
    """Whatever on this machine still speaks of the box `name`: processes, mounts, cgroups."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if name.encode() in (process / "cmdline").read_bytes():
                    yield f"process {process.name}"
    if name in Path("/proc/self/mountinfo").read_text():
        yield "mount"
    for path in Path("/sys/fs/cgroup").glob(f"**/*{name}*"):
        yield str(path)
