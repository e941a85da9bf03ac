"""A PostgreSQL server of the tests' own, from Debian's packages: loopback only, in a temporary directory, always stopped."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psycopg

OLDEST = 15
MISSING = f"PostgreSQL {OLDEST} or newer is not installed in /usr/lib/postgresql: `make setup` installs it"


def installed() -> list[Path]:
    """The bin directories of the PostgreSQL versions that are there, oldest first."""
    found = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "initdb").exists()]
    versions = {int(path.parent.name): path for path in found if path.parent.name.isdigit()}
    return [versions[number] for number in sorted(versions) if number >= OLDEST]


def die_with_parent() -> None:
    """Ask the kernel for SIGQUIT (an immediate shutdown) when the test process dies without a word."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


class Cluster:
    """One server; `url()` makes a fresh, empty database on it."""

    def __init__(self, where: Path, fsync: bool = True, **settings: str) -> None:
        self.bin = installed()[-1]
        self.home = Path(tempfile.mkdtemp(prefix="postgres-", dir=where))
        self.data, self.log = self.home / "data", self.home / "log"
        # PostgreSQL refuses to run as root, so root lends it the account Debian made for it.
        self.user = "postgres" if os.geteuid() == 0 else None
        if self.user:
            account = pwd.getpwnam(self.user)
            os.chown(self.home, account.pw_uid, account.pw_gid)
        self.settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "200",
            "timezone": "Asia/Kathmandu",  # a server far from UTC catches a time stored without its zone
        }
        if not fsync:
            self.settings |= {"fsync": "off", "full_page_writes": "off"}
        self.settings |= settings
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.names = count(1)
        atexit.register(self.remove)
        self._run(
            [
                self.bin / "initdb",
                "-D",
                self.data,
                "-U",
                "postgres",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C.UTF-8",
                "-N",
            ]
        )
        # The superuser is let in; everybody else shows a password, so that a login which works only by trust is noticed.
        (self.data / "pg_hba.conf").write_text(
            "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        )
        self.start()

    def _account(self) -> dict[str, object]:
        return {"user": self.user, "group": self.user, "extra_groups": []} if self.user else {}

    def _run(self, command: list[object]) -> None:
        done = subprocess.run(
            [str(part) for part in command], cwd=self.home, capture_output=True, text=True, **self._account()
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} exited {done.returncode}: {done.stderr.strip()}")

    def start(self) -> None:
        """Start the server, on the port it had before if it ran before; returns when it answers."""
        # A free port can be taken between asking and binding, and killed processes take a moment to be gone: try again.
        for _ in range(5):
            port = self.port or free_port()
            options = [f"-c{name}={value}" for name, value in self.settings.items()]
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    [self.bin / "postgres", "-D", self.data, f"-p{port}", *options],
                    cwd=self.home,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a ctrl-c is for the tests, which stop the server themselves
                    preexec_fn=die_with_parent,
                    **self._account(),
                )
            if self._answers(port):
                self.port = port
                return
            time.sleep(0.2)
        raise RuntimeError(f"PostgreSQL does not start: {self.log.read_text(errors='replace')[-2000:]}")

    def _answers(self, port: int) -> bool:
        assert self.process
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                psycopg.connect(f"postgresql://postgres@127.0.0.1:{port}/postgres", connect_timeout=5).close()
                return True
            except psycopg.OperationalError:
                time.sleep(0.05)
        self.kill()
        return False

    def stop(self) -> None:
        """Shut down in order (connections are cut, what was committed stays); `start()` brings it back."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        self.process = None

    def kill(self) -> None:
        """kill -9 the server and all its processes at once, as a power cut would; `start()` recovers."""
        if self.process:
            # Stopped first, so that it starts no new child between the list and the blow.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in [self.process.pid, *children(self.process.pid)]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            self.process.wait()
        self.process = None

    def remove(self) -> None:
        """Stop and delete everything."""
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def execute(self, sql: str) -> None:
        """Run one statement as the superuser, outside any transaction."""
        with psycopg.connect(f"postgresql://postgres@127.0.0.1:{self.port}/postgres", autocommit=True) as connection:
            connection.execute(sql)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new, empty database, dropped afterwards with whoever is still connected to it."""
        name = f"t{next(self.names)}"
        self.execute(f"create database {name} template template0")
        try:
            yield f"postgresql://postgres@127.0.0.1:{self.port}/{name}"
        finally:
            self.execute(f"drop database if exists {name} with (force)")


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
