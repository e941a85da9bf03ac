"""What works on this machine, found by doing: a box at every tier, the limits that bind, the disk, the kernel, the gateway."""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import Invalid, LayerError, Unavailable
from .blueprint import TIERS, Tier
from .box import environment
from .cgroups import Cgroups
from .commands import Command, encode_exec, exec_flags
from .driver import Capabilities
from .host import Host
from .wire import DONE, EXIT

FLOOR = (6, 1)  # of the kernel
BY_FD = (6, 13)  # the overlay takes its layers by fd from here on
PATIENCE = 600.0  # seconds for one tier: the first VM may have to fetch its Debian
LOST = "tiers above process, the gateway (so egress rules and secrets), and the disk limit"
KVM_CREATE_VM = 0xAE01
NEEDED = {  # programs without which a tier can't be, and where they come from
    "process": {"cc": "gcc libc6-dev libseccomp-dev"},
    "namespace": {"cc": "gcc libc6-dev libseccomp-dev", "nft": "nftables", "mkfs.btrfs": "btrfs-progs"},
    "container": {"crun": "crun"},
    "gvisor": {"runsc": "runsc"},
    "microvm": {"qemu-system-x86_64": "qemu-system-x86", "mkfs.erofs": "erofs-utils", "debootstrap": "debootstrap"},
    "vm": {"qemu-system-x86_64": "qemu-system-x86", "mkfs.erofs": "erofs-utils", "debootstrap": "debootstrap"},
}

Check = dict[str, Any]


def check(what: str, found: str, verdict: str = "good", hint: str | None = None) -> Check:
    """One finding: good, bad, or a note."""
    return {"what": what, "found": found, "verdict": verdict, "hint": hint}


async def examine(host: Host, say: Callable[[str], None], tiers: Sequence[str] | None = None) -> dict[str, Any]:
    """Try each tier and look at all that boxes stand on; nothing is left behind."""
    if unknown := [tier for tier in tiers or () if tier not in TIERS]:
        raise Invalid(f"tier {unknown[0]!r} does not exist", hint="one of " + ", ".join(TIERS))
    found = [await attempt(host, tier, say) for tier in TIERS if not tiers or tier in tiers]
    say("looking at the machine")
    return {
        "state": str(host.state),
        "host": {"pid": os.getpid(), "started": host.started, "boxes": len(host.boxes)},
        "tiers": found,
        "checks": [*await asyncio.to_thread(lambda: [*machine(host.state, accelerator(host))]), *parts(host)],
    }


def survey(state: Path, error: LayerError) -> dict[str, Any]:
    """What can be said when the host itself did not start."""
    root = os.geteuid() == 0
    missing = {
        tier: [package for program, package in NEEDED[tier].items() if not shutil.which(program)] for tier in TIERS
    }
    tiers: list[dict[str, Any]] = [
        {
            "tier": tier,
            "works": False,
            "isolation": None,
            "can": [],
            "cannot": [],
            "why": "the host did not start"
            + (f", and {' '.join(packages)} is missing" if (packages := missing[tier]) else ""),
            "hint": f"apt-get install {' '.join(packages)}" if packages else None,
        }
        for tier in TIERS
    ]
    checks = [check("host", f"it did not start: {error.message}", "bad", error.hint), *machine(state)]
    with contextlib.suppress(OSError):
        cgroups = Cgroups(state)
        checks.append(limits(cgroups.version, cgroups.limits, root))
        cgroups.close()
    return {"state": str(state), "host": None, "tiers": tiers, "checks": checks}


# ---- tiers ----


async def attempt(host: Host, tier: Tier, say: Callable[[str], None]) -> dict[str, Any]:
    """Make a box, run `true` in it, end it; with the times, or with the reason why not."""
    say(f"trying tier {tier}")
    report: dict[str, Any] = {
        "tier": tier,
        "works": False,
        "isolation": None,
        "can": [],
        "cannot": [],
        "why": None,
        "hint": None,
    }
    try:
        async with asyncio.timeout(PATIENCE):
            driver = await host.driver(tier)
            report |= abilities(driver.capabilities, host)
            await once(host, tier, say)  # the first may build what later ones find: its time says little
            return report | {"works": True, **await once(host, tier, say)}
    except LayerError as error:
        return report | {"why": error.message, "hint": error.hint}
    except TimeoutError:
        return report | {"why": f"it did not come up within {PATIENCE:.0f} s", "hint": f"see {host.run / 'host.log'}"}
    except OSError as error:
        return report | {"why": str(error), "hint": f"see {host.run / 'host.log'}"}


async def once(host: Host, tier: Tier, say: Callable[[str], None]) -> dict[str, float]:
    """The milliseconds of one box's life."""
    start = time.perf_counter()
    box = await host.create({"tier": tier}, owner=None, warm=False, say=say)
    try:
        made = time.perf_counter()
        ended: asyncio.Future[int] = host.loop.create_future()

        def sink(kind: int, data: bytes) -> None:
            if kind in (EXIT, DONE) and not ended.done():
                ended.set_result(kind)

        command = Command(box, ["true"], sink, timeout=60)
        command.start(encode_exec(["true"], box.blueprint.user, "", environment(box, {}), exec_flags(False, False)))
        await ended
        if command.error:
            raise command.error
        if command.status:
            raise Unavailable(f"`true` exits with {command.status} at tier {tier!r}")
        ran = time.perf_counter()
    finally:
        await host.kill(box)
    over = time.perf_counter()
    return {"create_ms": (made - start) * 1e3, "exec_ms": (ran - made) * 1e3, "kill_ms": (over - ran) * 1e3}


def abilities(can: Capabilities, host: Host) -> dict[str, Any]:
    """Capabilities in words."""
    binding = can.limits & (host.cgroups.limits | ({"disk"} if host.disk.quota != "none" else set()))
    words = {
        "suspend with memory": can.suspend_memory,
        "fork with memory": can.fork_memory,
        "fork while running": can.live_fork,
        "egress rules and secrets": can.egress and host.gateway is not None,
        "Python by zygote": can.zygote and host.zygote is not None,
        **{f"{name} limit": name in binding for name in ("memory", "pids", "cpu", "disk")},
    }
    return {
        "isolation": can.isolation,
        "can": [word for word, yes in words.items() if yes],
        "cannot": [word for word, yes in words.items() if not yes],
    }


# ---- what they stand on ----


def machine(state: Path, accelerator: str | None = None) -> Iterator[Check]:
    """What is true of this machine whether a host runs or not."""
    yield kernel()
    if os.geteuid():
        yield check("user", f"not root: {LOST} are lost", "note", "run the host as root (sudo layer host) to have them")
    else:
        yield check("user", "root")
    yield overlay()
    yield acceleration(accelerator)
    yield memory()
    yield space(state)


def kernel() -> Check:
    release = platform.release()
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    floor = ".".join(map(str, FLOOR))
    if numbers < FLOOR:
        return check("kernel", f"{release}, older than {floor}: boxes above tier process will not start", "bad")
    return check("kernel", f"{release} (at least {floor} is needed)")


def overlay() -> Check:
    """How a box's root is mounted; asked of the kernel itself."""
    if os.geteuid():
        return check("overlay", "not tried: it needs root", "note")
    if os.environ.get("LAYER_OVERLAY_BY_PATH") == "1":
        return check("overlay", "layers by path, because LAYER_OVERLAY_BY_PATH says so", "note")
    newer = ".".join(map(str, BY_FD))
    by_fd = layers_by_fd()
    if by_fd is None:
        return check("overlay", "this kernel has no overlay file system", "bad", "modprobe overlay")
    if by_fd:
        return check("overlay", "layers by fd")
    return check("overlay", f"layers by path: before kernel {newer} they can't be given by fd", "note")


def layers_by_fd() -> bool | None:
    """Whether an overlay takes `lowerdir+` by fd; None when there is no overlay at all."""
    libc = ctypes.CDLL(None, use_errno=True)
    context = libc.syscall(430, b"overlay", 1)  # fsopen
    if context < 0:
        return None
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return bool(libc.syscall(431, context, 5, b"lowerdir+", None, root) == 0)  # fsconfig, FSCONFIG_SET_FD
    finally:
        os.close(root)
        os.close(context)


def accelerator(host: Host) -> str | None:
    """What machines run with, as a driver that has booted one knows it."""
    known = (getattr(driver, "_accelerator", None) for driver in host._drivers.values())
    return next((found for found in known if found), None)


def acceleration(proved: str | None) -> Check:
    if proved == "tcg":
        return check("kvm", "no guest boots with it: machines run by emulation (TCG), many times slower inside", "note")
    if proved == "kvm":
        return check("kvm", "works: machines run at full speed")
    try:
        with open("/dev/kvm", "rb+", buffering=0) as device:
            os.close(fcntl.ioctl(device, KVM_CREATE_VM, 0))
    except OSError as error:
        why = "there is no /dev/kvm" if isinstance(error, FileNotFoundError) else f"/dev/kvm: {error.strerror}"
        return check("kvm", f"no ({why}): machines run by emulation (TCG), many times slower inside", "note")
    return check("kvm", "the device answers; whether a guest boots with it is known once a machine ran", "note")


def memory() -> Check:
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
    free, total = int(found["MemAvailable"]) / (1 << 20), int(found["MemTotal"]) / (1 << 20)
    return check("memory", f"{free:.1f} of {total:.1f} GB free", "good" if free > 0.5 else "bad")


def space(state: Path) -> Check:
    where = next(path for path in (state, *state.parents) if path.exists())
    found = shutil.disk_usage(where)
    free = found.free / (1 << 30)
    return check(
        "space", f"{free:.1f} of {found.total / (1 << 30):.1f} GB free in {where}", "good" if free > 1 else "bad"
    )


def limits(version: str, binding: frozenset[str], root: bool) -> Check:
    hint = None if root else "a user's cgroup must be delegated, as systemd-run --user --scope -p Delegate=yes does"
    if not binding:
        return check("cgroups", "none can be had: memory, processes and cpu are not limited", "bad", hint)
    missing = sorted({"memory", "pids", "cpu"} - binding)
    said = f"{version}: {', '.join(sorted(binding))} bind" + (f"; {', '.join(missing)} do not" if missing else "")
    return check("cgroups", said, "bad" if missing else "good", hint if missing else None)


def parts(host: Host) -> Iterator[Check]:
    """What the running host owns."""
    yield limits(host.cgroups.version, host.cgroups.limits, host.root)
    yield disk(host)
    if host.gateway is None:
        yield check("gateway", "none: it needs root", "note")
    else:
        alive = Path("/proc", str(host.gateway.pid)).exists()
        yield check(
            "gateway",
            f"alive, process {host.gateway.pid}" if alive else "dead: nothing leaves any box",
            "good" if alive else "bad",
        )
    if host.zygote is None:
        yield check("zygote", "none: it needs root", "note")
    else:
        yield check("zygote", "ready to fork Python into boxes at tier namespace")
    remains = list(leftovers(host))
    if remains:
        yield check(
            "leftovers",
            f"{len(remains)}: {', '.join(remains[:5])}",
            "bad",
            "layer host --stop: they are removed at the next start",
        )
    else:
        yield check("leftovers", "none")


def disk(host: Host) -> Check:
    kinds = {
        "btrfs": "btrfs, where the state lies",
        "loop": "btrfs in a file, by a loop device",
        "reflink": "plain directories whose files share blocks when they are copied",
        "copy": "plain directories, copied whole by every fork and snapshot",
    }
    quotas = {"simple": "quotas bind", "full": "quotas bind", "none": "no quota: a box's disk limit does not bind"}
    said = f"{kinds.get(host.disk.kind, host.disk.kind)}; {quotas[host.disk.quota]}; {host.disk.free() / (1 << 30):.1f} GB free"
    if host.disk.note:
        said += f" ({host.disk.note})"
    good = host.disk.btrfs and host.disk.quota != "none"
    return check(
        "disk", said, "good" if good else "note", "apt-get install btrfs-progs" if host.root and not good else None
    )


def leftovers(host: Host) -> Iterator[str]:
    """Cgroups and directories that belong to no box."""
    groups = [*(box.spec.cgroup for box in host.boxes.values()), *host.cgroups.spare]
    used = {str(path) for group in groups for path in group.directories.values()}
    for path in host.cgroups.leftovers(used):
        yield str(path)
    for parent in (host.disk.boxes, host.run / "boxes", host.state / "suspended"):
        for path in parent.iterdir() if parent.exists() else ():
            if path.name not in host.boxes:
                yield str(path)
