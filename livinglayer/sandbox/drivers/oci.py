"""The hardened OCI bundle that crun, runc and runsc start a box from.

Beyond a runtime's default: a user namespace of the box's own, an allow-list of system calls, no new privileges, seven
capabilities instead of fourteen, no /sys, no keys, kernel settings read-only, the network namespace that the gateway made.
"""

import errno
import functools
import resource
import socket
import termios
from collections.abc import Iterable, Mapping
from pathlib import Path

# in-box root owns files, changes users, ends processes and serves low ports; nothing else, and only in its own namespace
CAPABILITIES = tuple(
    f"CAP_{name}" for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL", "NET_BIND_SERVICE")
)
IDS = 65536
SYSCALLS = Path(__file__).parent.parent / "native/syscalls.txt"
AGENT = "/dev/agent"  # in /dev because that is memory: a mount point elsewhere would be a file of the box

_NAMESPACES = ("user", "pid", "mount", "ipc", "uts", "cgroup")
_MASKED = (
    "acpi asound cmdline config.gz diskstats interrupts iomem ioports kallsyms kcore key-users keys kmsg kpagecgroup kpagecount kpageflags "
    "latency_stats locks modules mtrr partitions pressure sched_debug schedstat scsi slabinfo softirqs swaps timer_list timer_stats "
    "vmallocinfo"
)
_READ_ONLY = "bus driver dynamic_debug fs irq sys sysrq-trigger tty"
_CLONE_NEW = 0x7E020000  # every CLONE_NEW* that clone() takes: no namespace is made inside a box


@functools.cache
def syscalls() -> tuple[str, ...]:
    """Names of the calls a box may make: one a line of native/syscalls.txt, `#` begins a comment."""
    lines = (line.split("#")[0].split() for line in SYSCALLS.read_text().splitlines())
    return tuple(sorted({words[0] for words in lines if words}))


def seccomp(
    allowed: tuple[str, ...], absent: str = "SCMP_ACT_ERRNO", audit: str = "SCMP_ACT_ERRNO"
) -> dict[str, object]:
    """The filter of native/filter.c for a runtime that compiles its own: `allowed`, some calls by argument, EPERM for the rest.

    clone3 is answered by the action `absent`, NETLINK_AUDIT by `audit`, as if the kernel did not have them.
    """

    def rule(name: str, index: int, operator: str, value: int, second: int = 0) -> dict[str, object]:
        compared = {"index": index, "value": value, "valueTwo": second, "op": f"SCMP_CMP_{operator}"}
        return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [compared]}

    def differs(name: str, index: int, value: int) -> list[dict[str, object]]:
        # The kernel looks at 32 bits and a plain NE at 64, so one more bit above would pass it: allowed is what differs in one of the 32.
        return [rule(name, index, "MASKED_EQ", 1 << bit, ~value & 1 << bit) for bit in range(32)]

    def protocol(number: int) -> dict[str, object]:
        return {"index": 2, "value": number, "op": "SCMP_CMP_EQ"}

    netlink = {"index": 0, "value": int(socket.AF_NETLINK), "op": "SCMP_CMP_EQ"}
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "syscalls": [
            {"names": list(allowed), "action": "SCMP_ACT_ALLOW"},
            rule("clone", 0, "MASKED_EQ", _CLONE_NEW),
            # its flags lie in memory, where a filter can't look: libc falls back to clone
            {"names": ["clone3"], "action": absent, "errnoRet": errno.ENOSYS},
            *(rule("socket", 0, "EQ", int(family)) for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)),
            {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [netlink, protocol(0)]},  # NETLINK_ROUTE
            {"names": ["socket"], "action": audit, "errnoRet": errno.EPROTONOSUPPORT, "args": [netlink, protocol(9)]},
            rule("socketpair", 0, "EQ", int(socket.AF_UNIX)),
            *differs("ioctl", 1, termios.TIOCSTI),  # a box may not push characters into a terminal
            *differs("prctl", 0, 22),  # PR_SET_SECCOMP
            rule("prlimit64", 0, "EQ", 0),  # one's own limits, not those of the agent
            rule("personality", 0, "EQ", 0),
            rule("personality", 0, "EQ", 0xFFFFFFFF),
        ],
    }


def config(
    *,
    root: Path,
    agent: Path,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    netns: str | None,
    uid_base: int | None,
    mounts: Iterable[tuple[Path, str, bool]] = (),
    hostname: str,
    shared_memory: int = 64 << 20,
    processes: int | None = None,
) -> dict[str, object]:
    """config.json of one box: `agent` (a host file) runs as PID 1 and root of the box.

    A filter and limits are the runtime's to add; without `netns` or `uid_base` those namespaces are what the runtime is in.
    """
    capabilities = {name: list(CAPABILITIES) for name in ("bounding", "effective", "permitted")}
    files = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # a user namespace may only lower it
    namespaces = [{"type": name} for name in _NAMESPACES if name != "user" or uid_base is not None]
    linux: dict[str, object] = {
        "namespaces": namespaces + ([{"type": "network", "path": netns}] if netns else []),
        "maskedPaths": [f"/proc/{name}" for name in _MASKED.split()] + ["/sys/firmware"],
        "readonlyPaths": [f"/proc/{name}" for name in _READ_ONLY.split()],
        "resources": {"devices": [{"allow": False, "access": "rwm"}]},
    }
    if uid_base is not None:
        linux["uidMappings"] = linux["gidMappings"] = [{"containerID": 0, "hostID": uid_base, "size": IDS}]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [AGENT, *arguments],
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": "/",
            "capabilities": {**capabilities, "inheritable": [], "ambient": []},
            "noNewPrivileges": True,
            "oomScoreAdj": 500,  # the host goes last
            "rlimits": [
                {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
                {"type": "RLIMIT_NOFILE", "soft": min(1024, files), "hard": files},
                *([{"type": "RLIMIT_NPROC", "soft": processes, "hard": processes}] if processes else []),
            ],
        },
        "root": {"path": str(root), "readonly": False},
        "hostname": hostname,
        "mounts": [
            _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("/dev", "tmpfs", "nosuid", "mode=755", "size=65536"),
            _mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
            _mount("/dev/shm", "tmpfs", "nosuid", "nodev", "mode=1777", f"size={shared_memory}"),
            _mount(AGENT, "bind", "bind", "ro", "nosuid", "nodev", source=str(agent)),
            *(
                _mount(target, "bind", "bind", "ro" if readonly else "rw", "nosuid", "nodev", source=str(source))
                for source, target, readonly in mounts
            ),
        ],
        "linux": linux,
    }


def _mount(target: str, kind: str, *options: str, source: str | None = None) -> dict[str, object]:
    return {"destination": target, "type": kind, "source": source or kind, "options": list(options)}
