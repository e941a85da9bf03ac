"""What lies outside a box for its code to find: canaries in files, processes, sockets, keys and memory of the host; and what code tried."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("inside.py")
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
WATCHED = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/kernel/hostname",
)
OWN_KERNEL = ("gvisor", "microvm", "vm")  # where what in-box root does to its kernel is its own affair


@dataclass(frozen=True)
class Outcome:
    """What came of one attack."""

    name: str
    user: str
    got: str | None
    refused: str | None
    broken: bool = False


def load() -> dict[str, tuple[Any, str, tuple[str, ...]]]:
    """The attacks of inside.py: name → (function, kind, users)."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("escape_inside", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ATTACKS  # type: ignore[no-any-return]


class World:
    """Everything planted; `leave` takes it away again."""

    def __init__(self, state: Path | str) -> None:
        self.state = str(state)
        self.token = f"canary-{secrets.token_hex(16)}"
        self.tag = f"ll-canary-{os.getpid()}-{secrets.token_hex(4)}"
        self.heard: list[str] = []
        self._open = contextlib.ExitStack()
        self.files = [
            Path(place, self.tag)
            for place in ("/tmp", "/var/tmp", "/run", "/srv", "/root", "/usr/local/etc", "/opt")
            if os.path.isdir(place)
        ]
        for path in self.files:
            path.write_text(self.token)
            self._open.callback(path.unlink, missing_ok=True)
        self._before = self._look()
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(3600)", self.token],
            env={"SECRET": self.token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self._open.callback(self.process.wait)
        self._open.callback(self.process.kill)
        self.addresses = [
            word
            for word in subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
            if "." in word
        ][:2]
        self.tcp = self._serve(socket.AF_INET, socket.SOCK_STREAM, [("127.0.0.1", 0)])
        for address in self.addresses:
            self._serve(socket.AF_INET, socket.SOCK_STREAM, [(address, self.tcp)])
        self.tcp6 = self._serve(socket.AF_INET6, socket.SOCK_STREAM, [("::1", 0)])
        self.udp = self._serve(socket.AF_INET, socket.SOCK_DGRAM, [("127.0.0.1", 0)])
        for address in self.addresses:
            self._serve(socket.AF_INET, socket.SOCK_DGRAM, [(address, self.udp)])
        self.abstract = self.tag
        self._serve(socket.AF_UNIX, socket.SOCK_STREAM, ["\0" + self.tag])
        self._plant_ipc()
        self._plant_keys()

    # ---- planting ----

    def _serve(self, family: int, kind: int, addresses: list[Any]) -> int:
        sock = socket.socket(family, kind)
        sock.bind(addresses[0])
        if kind == socket.SOCK_STREAM:
            sock.listen(64)
        threading.Thread(target=self._answer, args=(sock, kind), daemon=True).start()
        self._open.callback(sock.close)
        return 0 if family == socket.AF_UNIX else int(sock.getsockname()[1])

    def _answer(self, sock: socket.socket, kind: int) -> None:
        where = str(sock.getsockname())
        with contextlib.suppress(OSError):
            while True:
                if kind == socket.SOCK_STREAM:
                    connection, _ = sock.accept()
                    self.heard.append(where)
                    with connection, contextlib.suppress(OSError):
                        connection.settimeout(2)
                        connection.recv(4096)
                        connection.sendall(
                            f"HTTP/1.1 200 OK\r\nContent-Length: {len(self.token)}\r\n\r\n{self.token}".encode()
                        )
                else:
                    _, peer = sock.recvfrom(4096)
                    self.heard.append(where)
                    sock.sendto(self.token.encode(), peer)

    def _plant_ipc(self) -> None:
        self.shm_key = secrets.randbelow(1 << 30) + 1
        identifier = libc.shmget(self.shm_key, 4096, 0o1666)
        libc.shmat.restype = ctypes.c_void_p
        at = libc.shmat(identifier, None, 0)
        ctypes.memmove(at, self.token.encode(), len(self.token))
        self._open.callback(libc.shmctl, identifier, 0, None)
        self.mq = self.tag
        queue = libc.mq_open(f"/{self.mq}".encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
        libc.mq_send(queue, self.token.encode(), len(self.token), 0)
        self._open.callback(libc.mq_unlink, f"/{self.mq}".encode())
        shared = Path("/dev/shm", self.tag)
        shared.write_text(self.token)
        self._open.callback(shared.unlink, missing_ok=True)

    def _plant_keys(self) -> None:
        self.keys = []
        for ring in (-3, -4):  # of the session, which whatever we start inherits, and of the user
            key = libc.syscall(
                248, b"user", b"ll-canary", self.token.encode(), ctypes.c_long(len(self.token)), ctypes.c_long(ring)
            )
            if key > 0:
                self.keys.append(key)
                self._open.callback(libc.syscall, 250, ctypes.c_long(9), ctypes.c_long(key), ctypes.c_long(ring))

    # ---- what code in a box is told ----

    def facts(
        self, tier: str, box: str = "box", others: tuple[str, ...] = (), more: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """What inside.py knows: where to look, and only hashes of what is there."""
        run = Path(self.state, "run")
        private = [
            line
            for path in ("/etc/shadow", "/etc/machine-id")
            if os.path.exists(path)
            for line in Path(path).read_bytes().splitlines()
        ]
        return {
            "hashes": [hashlib.sha256(token.encode()).hexdigest() for token in (self.token, *more)],
            "canaries": [str(path) for path in self.files],
            "state": self.state,
            "box": box,
            "others": list(others),
            "hostname": socket.gethostname(),
            "host_pid": self.process.pid,
            "host_command": "time.sleep(3600)",
            "kernel_arguments": hashlib.sha256(Path("/proc/cmdline").read_bytes()).hexdigest(),
            "private_lines": [
                hashlib.sha256(line).hexdigest()
                for line in private
                if len(line) > 12 and b":*:" not in line and b":!" not in line
            ],
            "tcp": self.tcp,
            "tcp6": self.tcp6,
            "udp": self.udp,
            "abstract": self.abstract,
            "addresses": self.addresses,
            "sockets": [
                *map(str, run.glob("*.sock")),
                "/run/dbus/system_bus_socket",
                "/var/run/docker.sock",
                "/run/systemd/private",
            ],
            "shm_key": self.shm_key,
            "mq": self.mq,
            "keys": self.keys,
            "own_dev": tier not in ("namespace",),
            "own_net": tier in OWN_KERNEL,
        }

    # ---- what happened ----

    def _look(self) -> dict[str, Any]:
        found: dict[str, Any] = {path: Path(path).read_bytes() for path in WATCHED if os.path.exists(path)}
        program = Path("/usr/bin/env").resolve()
        info = program.stat()
        found["/usr/bin/env"] = (
            hashlib.sha256(program.read_bytes()).hexdigest(),
            stat.S_IMODE(info.st_mode),
            info.st_uid,
        )
        found["files"] = {str(path): (path.read_text(), path.stat().st_uid, path.stat().st_mode) for path in self.files}
        return found

    def changed(self) -> list[str]:
        """What is not as it was: settings of the kernel, files; and every decoy that heard something."""
        now = self._look()
        return [name for name, value in self._before.items() if now.get(name) != value] + [
            f"a connection to {where}" for where in self.heard
        ]

    def leave(self) -> None:
        self._open.close()


@contextlib.contextmanager
def planted(state: Path | str) -> Iterator[World]:
    world = World(state)
    try:
        yield world
    finally:
        world.leave()


Run = Callable[[list[str], str, bytes], "tuple[int, bytes, bytes]"]  # argv, user, stdin → exit code, stdout, stderr


def outcomes(said: bytes) -> list[Outcome]:
    """The lines that inside.py printed."""
    found = []
    for line in said.splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            found.append(
                Outcome(entry["name"], entry["user"], entry["got"], entry.get("refused"), bool(entry.get("broken")))
            )
    return found


def applies(kind: str, tier: str) -> bool:
    """Whether an attack of this kind must fail on a tier."""
    return kind == "reach" or tier not in OWN_KERNEL


def clean(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
