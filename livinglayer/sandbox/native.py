"""The C of the sandbox: the spawner, the guest agent, the seccomp filter; compiled once for each version of its source.

`LAYER_SANITIZE=1` builds them with the address and undefined-behaviour sanitizers instead, for the tests that attack them.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from ..errors import Unavailable
from ..settings import state_directory

SOURCE = Path(__file__).parent / "native"
HARDENED = [
    *(
        "-O2",
        "-std=gnu17",
        "-Wall",
        "-Wextra",
        "-D_FORTIFY_SOURCE=2",
        "-fstack-protector-strong",
        "-fstack-clash-protection",
    ),
    *("-fcf-protection", "-fno-strict-aliasing", "-Wl,-z,relro,-z,now,-z,noexecstack"),
]
STATIC = ["-static-pie", "-fPIE"]
SANITIZED = ["-O1", "-g", "-std=gnu17", "-Wall", "-Wextra", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
PROGRAMS = {
    "spawner": ["spawner.c", "enter.c", "agent.c"],
    "agent": ["main_agent.c", "agent.c"],
    "init": ["init.c", "agent.c"],
}
INSTALL = "apt-get install gcc libc6-dev libseccomp-dev"


def build(state: Path | None = None) -> Path:
    """The directory with `spawner`, `agent`, `init`, `libenter.so` and `filter.bpf`; compiles them when they are not there."""
    sanitize = os.environ.get("LAYER_SANITIZE") == "1"
    files = sorted(path for path in SOURCE.iterdir() if path.suffix in (".c", ".h", ".txt"))
    digest = hashlib.sha256(b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in files))
    digest.update(repr((HARDENED, STATIC, SANITIZED, sanitize)).encode())
    place = (state or state_directory()) / "native" / digest.hexdigest()[:16]
    if (place / "complete").exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (place / "complete").exists():
            return place
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o755)
        for program, sources in PROGRAMS.items():
            if all((SOURCE / source).exists() for source in sources):
                flags = SANITIZED if sanitize and program != "init" else [*HARDENED, *STATIC]
                _compile([*flags, *sources, "-o", str(place / program)])
        _compile([*HARDENED, "-shared", "-fPIC", "enter.c", "zygote.c", "-o", str(place / "libenter.so")])
        _compile(["-O1", "filter.c", "-o", str(place / "filter"), "-lseccomp"])
        _run([str(place / "filter"), "syscalls.txt", str(place / "filter.bpf")])
        (place / "complete").touch()
    return place


def _compile(arguments: list[str]) -> None:
    if not shutil.which("cc"):
        raise Unavailable("the sandbox's C programs can't be built: there is no C compiler", hint=INSTALL)
    _run(["cc", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[:2000]}", hint=INSTALL)
