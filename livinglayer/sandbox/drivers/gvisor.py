"""Tier `gvisor`: a kernel of its own in user space (runsc); the host's kernel sees only what that one asks for.

runsc is run inside the box's user namespace and in a network namespace of its own, so that neither its sentry nor its file
server has any right on the host. Its network stack is its own too, which is what lets a checkpoint keep it: one wire leads
to the namespace that the gateway made, and there everything is redirected to the gateway.
"""

import asyncio
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from ...errors import Invalid, LayerError, Unavailable
from .. import mounts
from ..agent import Agent
from ..blueprint import Tier
from ..driver import Capabilities, Guest, Spec
from ..egress import netns
from ..native import build
from . import launch, oci

INSTALL = "apt-get install -t bookworm-backports runsc"
OLDEST = 20240729  # earlier ones refuse the flags that `ls` of Debian 12 gives to stat
THREADS, STUBS = 2048, 32  # tasks of the host that the sentry takes for itself, and for each process in the box
OWN_MEMORY = 96 << 20  # of the sentry and the file server
GATE, WIRE, PREFIX = "169.254.171.1", "169.254.171.2", 30
# what comes off the wire goes where the host's own output in this namespace goes
_RULES = f"""table ip wire {{}}
delete table ip wire
table ip wire {{
 chain prerouting {{
  type nat hook prerouting priority -100;
  iifname != "gate" accept
  ip daddr {netns.GATEWAY} tcp dport {netns.CHANNEL_PORT} accept
  udp dport 53 dnat to {netns.GATEWAY}:{netns.DNS_PORT}
  meta l4proto tcp dnat to {netns.GATEWAY}:{netns.TCP_PORT}
 }}
}}
"""


class GvisorDriver:
    """Boxes by runsc."""

    tier: Tier = "gvisor"
    capabilities = Capabilities(
        isolation="a kernel in user space stands between the box and the host's, which it asks for little",
        suspend_memory=True,
        fork_memory=True,
    )

    def __init__(self, parts: launch.Parts) -> None:
        self.parts, self.spawner, self.native = parts, launch.spawner_of(parts), build(parts.state)
        self.runsc = shutil.which("runsc") or "runsc"
        # systrap spins while it waits: with few cores, or a share of one, ptrace does more in the same time
        self.platforms = ("systrap", "ptrace") if (os.cpu_count() or 1) > 4 else ("ptrace", "systrap")
        self.platform = self.platforms[0]

    async def probe(self) -> None:
        """Start a box with nothing in it and hear its agent, on one platform or the other; Unavailable when both fail here."""
        version = await asyncio.to_thread(self._version)
        if version < OLDEST:
            raise Unavailable(
                f"runsc of {version} is too old: in it `ls` and `stat` fail" if version else "runsc is not installed",
                hint=INSTALL,
            )
        for tool, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
            if not shutil.which(tool):
                raise Unavailable(f"tier 'gvisor' needs {tool!r}", hint=f"apt-get install {package}")
        failed: LayerError | None = None
        for platform in self.platforms:
            self.platform = platform
            try:
                return await launch.trial(self.tier, self.start, self.parts)
            except LayerError as error:
                failed = failed or error
        raise Unavailable(f"runsc does not work here: {failed}", hint=INSTALL)

    def _version(self) -> int:
        try:
            said = subprocess.run([self.runsc, "--version"], capture_output=True, text=True, check=False).stdout
        except OSError:
            return 0
        found = re.search(r"20\d{6}", said)
        return int(found[0]) if found else 0

    async def start(self, spec: Spec) -> "GvisorGuest":
        """Unavailable with the runtime's own words when it can't."""
        return await launch.heard(await self._bring_up(spec, None))

    async def resume(self, spec: Spec, directory: Path) -> "GvisorGuest":
        """A guest with the memory and processes that `suspend` left in `directory`, which stays as it is."""
        guest = await self._bring_up(spec, directory)
        guest.agent.ready.set_result(None)  # it said so before it was suspended
        try:
            await asyncio.wait_for(guest.agent.ping(), launch.SECONDS)
        except BaseException:
            await guest.kill()
            raise
        return guest

    async def fork(self, guest: Guest, specs: list[Spec]) -> list[Guest]:
        """Guests with the memory and the files of this one as they were at one moment; it stands still for that long."""
        assert isinstance(guest, GvisorGuest)
        image = Path(tempfile.mkdtemp(prefix="fork-", dir=self.parts.disk.tmp))
        try:
            await guest.settle()
            await self._tell(guest, "pause")
            try:
                await asyncio.to_thread(self._copy_files, guest.spec, specs)
                await self.checkpoint(guest, image, "--leave-running")
            finally:
                await self._tell(guest, "resume")
            began = await asyncio.gather(*(self.resume(spec, image) for spec in specs), return_exceptions=True)
        finally:
            shutil.rmtree(image, ignore_errors=True)
        guests = [child for child in began if isinstance(child, GvisorGuest)]
        if failed := [error for error in began if isinstance(error, BaseException)]:
            await asyncio.gather(*(child.kill() for child in guests))
            raise failed[0]
        return list(guests)

    def _copy_files(self, parent: Spec, children: list[Spec]) -> None:
        disk = self.parts.disk
        for child in children:
            upper = child.root.upper
            disk.destroy(upper)
            disk.snapshot(parent.root.upper, upper)
            disk.limit(upper, child.blueprint.disk)
            shutil.rmtree(upper / "w", ignore_errors=True)
            (upper / "w").mkdir(mode=0o700)
            upper.chmod(0o700)

    async def _bring_up(self, spec: Spec, image: Path | None) -> "GvisorGuest":
        if spec.netns is None:
            raise Invalid("a gvisor box needs a network namespace")
        ours, theirs = launch.socket_pair()
        directory = launch.fresh_directory(spec, self.tier)
        # the host's count is a second fence: the sentry dies of it. In the box a limit on each user's processes binds first
        spec.cgroup.limit(spec.blueprint.memory + OWN_MEMORY, THREADS + STUBS * spec.blueprint.pids, spec.blueprint.cpu)
        inside: Inside | None = None
        try:
            async with launch.made_root(self.spawner, spec) as made:
                inside = Inside(made)
                await launch.in_thread(inside.open)
                work = functools.partial(self._run, spec, made, inside, directory, theirs.fileno(), image)
                async with launch.undone(spec, ours):
                    pid = await launch.privately(work, spec)
                    return GvisorGuest(self, spec, launch.Process(pid), Agent(ours), inside)
        except BaseException:
            ours.close()
            shutil.rmtree(directory, ignore_errors=True)
            if inside:
                inside.close()
            raise
        finally:
            theirs.close()

    def _run(
        self,
        spec: Spec,
        made: launch.Made,
        inside: "Inside",
        directory: Path,
        stdio: int,
        image: Path | None,
        stage: Path,
    ) -> int:
        connect(inside, spec)
        shutil.copy(
            (image or self.native) / "agent", directory / "agent"
        )  # a checkpoint goes with the agent it began with
        bundle = launch.lay_out(stage, spec, made, directory / "agent")
        config = oci.config(
            root=bundle.root,
            agent=bundle.agent,
            arguments=("0", "1"),
            environment=spec.environment,
            netns="/proc/self/ns/net",  # the one it is started in: without a name it would make another
            uid_base=None,
            mounts=bundle.mounts,
            hostname=spec.id,
            shared_memory=spec.blueprint.memory // 2,
            processes=spec.blueprint.pids,
        )
        # The allow-list of the other tiers, kept by its own kernel: less of that can be reached. It knows no error but EPERM, so
        # the call that should look absent is left to a tracer that is never there, and audit to its kernel, which has none.
        linux = config["linux"]
        assert isinstance(linux, dict)
        linux["seccomp"] = oci.seccomp(oci.syscalls(), absent="SCMP_ACT_TRACE", audit="SCMP_ACT_ALLOW")
        (stage / "config.json").write_text(json.dumps(config))
        state = directory / "state"
        state.mkdir()
        os.chown(state, made.base, made.base)
        command = self._command(stage, spec, inside)
        what = ["--detach", "--bundle", str(stage), "--pid-file", str(stage / "state/pid"), spec.id]
        if image is None:
            command += ["run", *what]
        else:
            (stage / "image").mkdir()
            mounts.bind(image, stage / "image")
            command += ["restore", "--image-path", str(stage / "image"), *what]
        launch.run(launch.joined(spec, command), state / "log", spec.id, stdio)
        pids = [int((state / "pid").read_text())]
        for path in state.glob("*.state"):
            pids += [gofer] if (gofer := json.loads(path.read_text()).get("goferPid")) else []
        launch.remember(directory, *pids)
        return pids[0]

    def _command(self, stage: Path, spec: Spec, inside: "Inside") -> list[str]:
        """runsc as root of the box's own user namespace, which is nobody outside."""
        (stage / "state").mkdir()
        mounts.mount(str(spec.directory / "oci/state"), stage / "state", None, mounts.MS_BIND)
        # it takes a namespace in which this can be seen for the host's own; kernels since 6.11 show it in all of them
        mounts.mount("tmpfs", Path("/proc/sys/net"), "tmpfs", mounts.MS_RDONLY)
        own = f"/proc/{os.getpid()}/fd"
        return [
            *("nsenter", f"--net={own}/{inside.netns}", f"--user={own}/{inside.userns}"),
            *("unshare", "--mount", "--propagation", "unchanged"),
            *(self.runsc, "--root", str(stage / "state"), "--log", str(stage / "state/log"), "--ignore-cgroups"),
            *("--platform", self.platform, "--network=sandbox", "--host-uds=none", "--directfs=false", "--oci-seccomp"),
            "--net-disconnect-ok",  # one that is closing is no reason to refuse a fork or a suspend
            "--overlay2=none",  # what a box writes must reach its upper directory, where snapshots find it
        ]

    async def checkpoint(self, guest: "GvisorGuest", image: Path, *options: str) -> None:
        """Write memory and processes of a running box into `image`, an empty directory."""
        os.chown(image, guest.inside.base, guest.inside.base)
        await self._tell(guest, "checkpoint", *options, image=image)
        shutil.copyfile(guest.spec.directory / "oci/agent", image / "agent")  # the very program that is in that memory
        for path in (image, *image.iterdir()):
            os.chown(path, 0, 0)
            path.chmod(0o755)  # read by each box that comes of it; who may come here is for the directory above to say

    async def _tell(self, guest: "GvisorGuest", verb: str, *options: str, image: Path | None = None) -> None:
        def work(stage: Path) -> None:
            command = [*self._command(stage, guest.spec, guest.inside), verb, *options]
            if image is not None:
                (stage / "image").mkdir()
                mounts.bind(image, stage / "image", read_only=False)
                command += ["--image-path", str(stage / "image")]
            launch.run([*command, guest.spec.id], guest.spec.directory / "oci/state/log", guest.spec.id)

        await launch.privately(work, guest.spec)

    def clean(self, alive: set[str], say: Callable[[str], None]) -> None:
        """End boxes that outlived a killed host and that nobody adopted."""
        launch.clean(self.parts.run / "boxes", self.tier, alive, say)

    async def close(self) -> None:
        """Nothing of ours runs beside the boxes."""


class Inside:
    """The box's user namespace, and a network namespace that belongs to it: in that one runsc may do as it likes."""

    def __init__(self, made: launch.Made) -> None:
        self.base, self.userns, self.netns = made.base, os.dup(made.userns), -1

    def open(self) -> None:
        """Make the network namespace."""
        # made by a process, since a thread can't enter a user namespace; `cat` answers from inside
        command = ["nsenter", f"--user=/proc/{os.getpid()}/fd/{self.userns}", "unshare", "--net", "cat"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            assert child.stdin and child.stdout
            child.stdin.write(b"\n")
            child.stdin.flush()
            if not child.stdout.read(1):
                raise Unavailable("a network namespace for gVisor can't be made", hint="apt-get install util-linux")
            self.netns = os.open(f"/proc/{child.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            child.kill()

    def close(self) -> None:
        os.close(self.userns)
        if self.netns >= 0:
            os.close(self.netns)


def connect(inside: Inside, spec: Spec) -> None:
    """A wire from the namespace that the gateway made to the box's own."""
    here, there = f"/proc/{os.getpid()}/fd/{spec.netns}", f"/proc/{os.getpid()}/fd/{inside.netns}"
    wire = (
        f"link add gate type veth peer name eth0 netns {there}",
        f"addr add {GATE}/{PREFIX} dev gate",
        "link set gate up",
        # every address is local here, so that the gateway hears all; this one is not
        f"route add {WIRE}/32 dev gate table local",
    )
    for attempt in range(3):
        try:
            _ip(here, *wire)
            break
        except Unavailable as error:
            if "File exists" not in error.message or attempt == 2:
                raise
            with contextlib.suppress(Unavailable):  # of an earlier guest in this network; it may just be leaving
                _ip(here, "link del gate")
    _ip(
        there,
        "link set lo up",
        f"addr add {WIRE}/{PREFIX} dev eth0",
        "link set eth0 up",
        f"route add default via {GATE}",
    )
    _feed(["nsenter", f"--net={here}", "nft", "-f", "-"], _RULES)


def _ip(namespace: str, *lines: str) -> None:
    _feed(["nsenter", f"--net={namespace}", "ip", "-batch", "-"], "\n".join(lines))


def _feed(command: list[str], text: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(
            f"gVisor's network can't be made: {done.stderr.strip()[:300]}", hint="apt-get install iproute2 nftables"
        )


class GvisorGuest:
    """One running sandbox of runsc."""

    def __init__(self, driver: GvisorDriver, spec: Spec, process: launch.Process, agent: Agent, inside: Inside) -> None:
        self.driver, self.spec, self.process, self.agent, self.inside = driver, spec, process, agent, inside
        self.pid, self.ended = process.pid, process.ended
        process.clean_up = self._clean_up

    async def pause(self) -> None:
        """Freeze every process, the sentry's too; memory stays."""
        await asyncio.to_thread(self.spec.cgroup.freeze)

    async def resume(self) -> None:
        """Thaw them."""
        self.spec.cgroup.thaw()

    async def suspend(self, directory: Path) -> None:
        """Memory and processes into `directory`, then gone."""
        await self.settle()
        self.process.held = True  # the checkpoint ends it; for the caller it is suspended before it is gone
        try:
            await self.driver.checkpoint(self, directory)
            self.process.reason = "suspended"
            await self.kill()
        finally:
            self.process.held = False
            if self.process.gone.is_set():
                asyncio.get_running_loop().call_soon(self.process.say)

    async def settle(self) -> None:
        """What was sent to the agent is taken in: a frame on its way would be lost."""
        self.spec.cgroup.thaw()
        await asyncio.wait_for(self.agent.ping(), launch.SECONDS)

    async def kill(self) -> None:
        """All processes of the sandbox go."""
        self.process.kill()
        if not self.process.gone.is_set():
            await asyncio.to_thread(self.spec.cgroup.kill)
        await self.process.over()

    async def _clean_up(self) -> None:
        if self.process.reason == launch.AGENT_ENDED and self.spec.cgroup.stats()["oom_kills"]:
            self.process.reason = "it ran out of memory"  # at this tier the box goes as a whole
        await asyncio.to_thread(self.spec.cgroup.kill)  # the file server, had it not noticed
        for _ in range(100):  # what the agent said last is still to be read
            if self.agent.closed:
                break
            await asyncio.sleep(0.001)
        self.agent.close()
        self.inside.close()
        shutil.rmtree(self.spec.directory / "oci", ignore_errors=True)
        await launch.release(self.driver.spawner, self.spec)
