"""Tier `container`: an OCI runtime (crun, else runc) with a hardened bundle; compatible with what containers are, on the host's kernel."""

import asyncio
import base64
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from ...errors import Invalid, Unavailable
from .. import mounts
from ..agent import Agent
from ..blueprint import Tier
from ..driver import Capabilities, Guest, Spec
from ..native import build
from . import launch, oci

INSTALL = "apt-get install crun"
OTHERS = "pause keeps it in memory; tiers gvisor, microvm and vm keep it on disk"
HYBRID = Path("/sys/fs/cgroup/unified")


class ContainerDriver:
    """Boxes by crun, else runc."""

    tier: Tier = "container"

    def __init__(self, parts: launch.Parts, runtime: str | None = None) -> None:
        self.parts, self.spawner, self.native = parts, launch.spawner_of(parts), build(parts.state)
        self.runtime = runtime or ("crun" if shutil.which("crun") else "runc")
        self.suspends = "it was not tried yet"  # why memory can't be kept
        self.capabilities = Capabilities(
            isolation="shares the host's kernel, through an allow-list of system calls; namespaces made by an OCI runtime",
            live_fork=True,
        )

    async def probe(self) -> None:
        """Start a box with nothing in it and hear its agent; Unavailable when that fails here."""
        if not shutil.which(self.runtime):
            others = [name for name in ("podman", "docker") if shutil.which(name)]
            found = f" ({' and '.join(others)} is here, but a box needs the runtime beneath it)" if others else ""
            raise Unavailable(f"neither crun nor runc is installed{found}", hint=INSTALL)
        await launch.trial(self.tier, self.start, self.parts)
        self.suspends = await asyncio.to_thread(why_no_memory)

    async def start(self, spec: Spec) -> "ContainerGuest":
        """Unavailable with the runtime's own words when it can't."""
        ours, theirs = launch.socket_pair(socket.SOCK_SEQPACKET)
        directory = launch.fresh_directory(spec, self.tier)
        try:
            async with launch.made_root(self.spawner, spec) as made, launch.undone(spec, ours):
                pid = await launch.privately(
                    lambda stage: self._run(stage, spec, made, directory, theirs.fileno()), spec
                )
                guest = ContainerGuest(self, spec, launch.Process(pid), Agent(ours))
        except BaseException:
            ours.close()
            self.forget(spec)
            raise
        finally:
            theirs.close()
        return await launch.heard(guest)

    def adopt(self, spec: Spec, control: int) -> "ContainerGuest":
        """A box that outlived the host that made it, by the socket that the spawner held."""
        agent = Agent(socket.socket(fileno=control))
        agent.ready.set_result(None)
        return ContainerGuest(self, spec, launch.Process(launch.remembered(spec)[0]), agent)

    def _run(self, stage: Path, spec: Spec, made: launch.Made, directory: Path, stdio: int) -> int:
        bundle = launch.lay_out(stage, spec, made, self.native / "agent")
        config = oci.config(
            root=bundle.root,
            agent=bundle.agent,
            arguments=("0", "1"),
            environment=spec.environment,
            netns=f"/proc/{os.getpid()}/fd/{spec.netns}",
            uid_base=made.base,
            mounts=bundle.mounts,
            hostname=spec.id,
            shared_memory=spec.blueprint.memory // 2,
        )
        log, pid = directory / "log", directory / "pid"
        common = ["run", "--detach", "--bundle", str(stage), "--pid-file", str(pid), spec.id]
        if self.runtime == "crun":
            # the same compiled filter as tier namespace: crun would take 3 ms to compile it from names
            compiled = base64.b64encode((self.native / "filter.bpf").read_bytes()).decode()
            config["annotations"] = {"run.oci.seccomp_bpf_data": compiled}
            if HYBRID.is_mount():
                mounts.unmount(HYBRID)  # crun refuses both versions at once, though it is told to leave cgroups alone
            command = ["crun", "--root", str(directory / "state"), f"--log=file:{log}", "--cgroup-manager=disabled"]
            command = launch.joined(spec, [*command, *common])
        else:
            linux = config["linux"]
            assert isinstance(linux, dict)
            linux["seccomp"] = oci.seccomp(oci.syscalls())
            linux["cgroupsPath"] = _leave_to_runc(spec)
            command = launch.joined(spec, ["runc", "--root", str(directory / "state"), "--log", str(log), *common])
        (stage / "config.json").write_text(json.dumps(config))
        launch.run(command, log, spec.id, stdio)
        started = int(pid.read_text())
        launch.remember(directory, started)
        return started

    def forget(self, spec: Spec) -> None:
        """Remove what the runtime keeps of a box that has ended."""
        directory = spec.directory / "oci"
        if self.runtime == "runc":  # it has made a cgroup for devices
            command = ["runc", "--root", str(directory / "state"), "delete", "--force", spec.id]
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        shutil.rmtree(directory, ignore_errors=True)

    async def resume(self, spec: Spec, directory: Path) -> Guest:
        raise Invalid(f"tier 'container' can't keep memory here: {self.suspends}", hint=OTHERS)

    async def fork(self, guest: Guest, specs: list[Spec]) -> list[Guest]:
        raise Invalid("tier 'container' forks files, not memory", hint="tiers gvisor and microvm fork memory")

    def clean(self, alive: set[str], say: Callable[[str], None]) -> None:
        """Containers outlive a killed host: end those that nobody adopted."""
        launch.clean(self.parts.run / "boxes", self.tier, alive, say)

    async def close(self) -> None:
        """Nothing of ours runs beside the boxes."""


def _leave_to_runc(spec: Spec) -> str:
    """The cgroup that runc is told to make. It makes one in every hierarchy of v1 that it sees: let it see only what it can't do without."""
    if spec.cgroup.version == "v2":
        return "/" + str(spec.cgroup.directories["memory"].relative_to("/sys/fs/cgroup"))
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind in ("cgroup", "cgroup2") and "devices" not in options.split(","):
            mounts.unmount(Path(where))
    return f"/{spec.id}"


def why_no_memory() -> str:
    """Why a container's memory can't go to disk here, found by doing."""
    try:
        tried = subprocess.run(["criu", "check"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return "CRIU is not installed"
    errors = re.findall(r"^Error \(.*?\): (.*)$", tried.stderr, re.MULTILINE)
    if tried.returncode:
        return f"CRIU does not work on this kernel ({errors[0] if errors else 'it gives no reason'})"
    return "CRIU can't restore a root that is mapped to a box's own ids"


class ContainerGuest:
    """One running container."""

    def __init__(self, driver: ContainerDriver, spec: Spec, process: launch.Process, agent: Agent) -> None:
        self.driver, self.spec, self.process, self.agent = driver, spec, process, agent
        self.pid, self.ended = process.pid, process.ended
        self.paused = False
        process.clean_up = self._clean_up

    async def pause(self) -> None:
        """Freeze every process; memory stays."""
        await asyncio.to_thread(self.spec.cgroup.freeze)
        self.paused = True

    async def resume(self) -> None:
        """Thaw them."""
        self.spec.cgroup.thaw()
        self.paused = False

    async def suspend(self, directory: Path) -> None:
        raise Invalid(f"tier 'container' can't keep memory here: {self.driver.suspends}", hint=OTHERS)

    async def kill(self) -> None:
        """With the first process of its pid namespace everything goes, frozen or not."""
        self.process.kill()
        if self.paused:
            await asyncio.to_thread(self.spec.cgroup.kill)
        await self.process.over()

    async def _clean_up(self) -> None:
        self.agent.close()
        await asyncio.to_thread(self.driver.forget, self.spec)
        await launch.release(self.driver.spawner, self.spec)
