"""Python in namespace boxes without an interpreter's start: the host's side of the zygote (zygote_process.py)."""

import asyncio
import contextlib
import fcntl
import os
import re
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

from ..errors import Conflict, Invalid, LimitExceeded, Unavailable
from . import inside
from .box import Box
from .commands import Command
from .drivers.namespace import NamespaceGuest
from .native import build
from .wire import STDERR, STDOUT

PYTHON = "/usr/bin/python3"  # the interpreter that boxes on the host's files see too
INLINE, MESSAGE = 100_000, 900_000  # bytes of code beyond which it goes by a file in memory; most of one message
REQUEST, ENDED = struct.Struct("<8I"), struct.Struct("<IiddQ")  # of native/zygote.c
ALONE, ASIDE, EMPTY = 1, 2, 4
PATIENCE = 0.02  # seconds before the output of a program is read as it comes: most have ended by then
# For modules that would start threads, which no fork has, and that would leave files at home.
THREADLESS = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "HOME": "/proc",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
PRELOADED = ("layer.py", "layer_run.py")
# Names that tell that code wants what only the larger of the two has loaded; that one costs each of its children more.
HEAVY = re.compile(
    rb"\b(pathlib|subprocess|hashlib|base64|tempfile|shutil|urllib|dataclasses|csv|decimal|statistics|asyncio|sqlite3|logging|socket|ssl"
    rb"|http|email|concurrent|inspect)\b"
)
KERNEL = re.compile(rb"\blayer_interpreter\b")
USERS = {"user": (1000, 1000, "/home/user"), "root": (0, 0, "/root")}


class Zygotes:
    """Fork servers: a small one for most code, one with more modules for code that names them, one with what code interpreters load."""

    def __init__(self, state: Path) -> None:
        self._usual, self._more, self._kernels = (Zygote(state, size) for size in range(3))
        self._there = os.path.exists(PYTHON)

    def serves(self, box: Box) -> bool:
        """Whether Python code of this box's user can run in it by a fork of ours."""
        return (
            box.driver.capabilities.zygote
            and "host" in box.spec.root.layers
            and box.blueprint.user in USERS
            and self._there
        )

    def run(
        self,
        box: Box,
        code: str | bytes,
        args: list[str],
        environment: dict[str, str],
        cwd: str,
        user: str,
        timeout: float | None,
        stdin: bytes | None = None,
        alone: bool = False,
    ) -> Command:
        """Run Python code in a namespace box; `stdin`, where all of it is known, is looked at for names of modules, too."""
        if not isinstance(code, str | bytes):
            raise Invalid("code is not a text")
        if isinstance(code, str):
            code = code.encode("utf-8", "surrogatepass")
        heavy = HEAVY.search(code) or (stdin and HEAVY.search(stdin))
        zygote = self._kernels if KERNEL.search(code) else self._more if heavy else self._usual
        return zygote.run(box, code, args, environment, cwd, user, timeout, stdin != b"", alone)

    def close(self) -> None:
        """End all of them."""
        for zygote in (self._usual, self._more, self._kernels):
            zygote.close()


class Zygote:
    """One fork server, started at first use and again when it has died; its size says which modules it has."""

    def __init__(self, state: Path, size: int) -> None:
        self._state, self._size, self._loop = state, size, asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._running: dict[int, PythonCommand] = {}
        self._serial = 0

    def warm(self) -> None:
        """Start it, so that the first caller need not wait."""
        if self._socket is not None or not os.path.exists(PYTHON):
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.setblocking(False)
        programs = build(self._state)
        fds = [
            _in_memory("zygote", Path(__file__).with_name("zygote_process.py")),
            theirs.fileno(),
            _in_memory("enter", programs / "libenter.so"),
            _in_memory("filter", programs / "filter.bpf"),
        ]
        modules = {path.removesuffix(".py"): content for path, _, content in inside.files() if path in PRELOADED}
        given = [*fds[1:], self._size]
        for name, content in modules.items():
            fds.append(_memory(name, content, 0))
        given += fds[-len(modules) :] if modules else []
        self._process = subprocess.Popen(
            [PYTHON, "-I", "-B", f"/proc/self/fd/{fds[0]}", *map(str, given), *modules],
            pass_fds=fds,
            env={
                "LANG": "C.UTF-8",
                "PATH": "/usr/bin:/bin",
                "LD_BIND_NOW": "1",
                **(THREADLESS if self._size > 1 else {}),
            },
            stdin=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        theirs.detach()
        for fd in fds:
            os.close(fd)
        self._socket = ours
        self._loop.add_reader(ours.fileno(), self._readable)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._died()
        serial, status, user, system, resident = ENDED.unpack(data)
        if command := self._running.pop(serial, None):
            command.exited(
                os.waitstatus_to_exitcode(status), {"user": user, "system": system, "max_resident": resident}
            )

    def _died(self) -> None:
        assert self._socket is not None
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        if self._process:
            self._process.kill()
            self._process.wait()
        for command in list(self._running.values()):
            command.fail(Unavailable("the Python zygote has died", hint="it starts again; try again"))
        self._running.clear()

    def run(
        self,
        box: Box,
        code: bytes,
        args: list[str],
        environment: dict[str, str],
        cwd: str,
        user: str,
        timeout: float | None,
        stdin: bool,
        alone: bool,
    ) -> Command:
        """Run Python code in a namespace box; `alone`: in an IPC namespace of its own."""
        self.warm()
        guest = box.guest
        if self._socket is None or not isinstance(guest, NamespaceGuest):
            raise Unavailable(f"there is no {PYTHON} on this host", hint="apt-get install python3")
        if box.root_fd is None:
            box.root_fd = os.open(f"/proc/{guest.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        uid, gid, home = USERS[user]
        self._serial = self._serial % 0x7FFFFFFF + 1
        where = (cwd or home).encode("utf-8", "surrogateescape") + b"\0"
        variables = {"HOME": home, "USER": user, "LOGNAME": user, **environment}
        block = "".join([f"{key}={value}\0" for key, value in variables.items()]).encode("utf-8", "surrogateescape")
        words = "".join([f"{word}\0" for word in args]).encode("utf-8", "surrogateescape")
        aside = len(code) > INLINE
        flags = (ALONE if alone else 0) | (ASIDE if aside else 0) | (0 if stdin else EMPTY)
        head = REQUEST.pack(self._serial, 0, uid, gid, flags, len(where), len(block), len(words))
        data = b"".join((head, where, block, words, b"" if aside else code))
        if len(data) > MESSAGE or "\0" in cwd or block.count(b"\0") != len(variables):
            raise LimitExceeded(
                f"arguments and environment take {len(data)} bytes, more than the zygote takes",
                hint="send them as input",
            )
        command = PythonCommand(box, self, self._serial, timeout, stdin)
        try:
            if aside:
                command.theirs.append(_memory("code", code))
            fds = [guest.pidfd, box.root_fd, *command.theirs, *box.spec.cgroup.task_fds]
            socket.send_fds(self._socket, [data], fds)
        except OSError as error:
            command.abandon()
            raise Unavailable(f"the Python zygote can't be reached: {error}") from None
        finally:
            command.hand_over()
        self._running[self._serial] = command
        box.commands[command.number] = command
        return command

    def kill(self, serial: int, number: int) -> None:
        """Send a signal to one child."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(struct.pack("<II", serial, number))

    def close(self) -> None:
        """End it."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._process:
            self._process.kill()
            self._process.wait()


def _in_memory(name: str, path: Path) -> int:
    """A file without a path: what is mapped from it names no directory of the host's."""
    return _memory(name, path.read_bytes(), 0)


def _memory(name: str, content: bytes, flags: int = os.MFD_CLOEXEC) -> int:
    fd = os.memfd_create(name, flags)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class PythonCommand(Command):
    """A child of the zygote: its output comes by pipes of its own rather than through the agent."""

    def __init__(self, box: Box, zygote: Zygote, serial: int, timeout: float | None, stdin: bool) -> None:
        super().__init__(box, ["python3", "-c", "…"], None, timeout=timeout)
        self._zygote, self._serial_number = zygote, serial
        self.number = -serial
        self._outputs: dict[int, int] = {}
        self.theirs: list[int] = []
        self._stdin = -1
        if stdin:
            theirs, self._stdin = os.pipe2(os.O_CLOEXEC)
            self.theirs.append(theirs)
            fcntl.fcntl(self._stdin, fcntl.F_SETFL, os.O_NONBLOCK)
        for kind in (STDOUT, STDERR):
            ours, theirs = os.pipe2(os.O_CLOEXEC)
            fcntl.fcntl(ours, fcntl.F_SETFL, os.O_NONBLOCK)
            self._outputs[ours] = kind
            self.theirs.append(theirs)
        self._pending = bytearray()
        self._closing = False
        self._status: tuple[int, dict[str, Any]] | None = None
        self._watched = self._feeding = False
        self._watching = box.loop.call_later(PATIENCE, self._watch)

    def _watch(self) -> None:
        """Read what it prints as it comes."""
        self._watched = True
        for fd in self._outputs:
            self.box.loop.add_reader(fd, self._readable, fd)

    def hand_over(self) -> None:
        """The child has its ends now."""
        for fd in self.theirs:
            os.close(fd)
        self.theirs = []

    def abandon(self) -> None:
        """It never started."""
        self._close()

    def _readable(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if data:
            self.output(self._outputs[fd], data)
            return
        if self._watched:
            self.box.loop.remove_reader(fd)
        os.close(fd)
        del self._outputs[fd]
        self._settle()

    def exited(self, status: int, usage: dict[str, Any]) -> None:
        """The child has ended; what it printed is still to be read."""
        self._status = (status, usage)
        for fd in list(self._outputs):
            while fd in self._outputs:
                before = self._seen[self._outputs[fd]]
                self._readable(fd)
                if fd in self._outputs and self._seen[self._outputs[fd]] == before:
                    break  # something in the background holds it open
        self._settle(True)

    def _settle(self, final: bool = False) -> None:
        if self._status is not None and (final or not self._outputs) and not self.over:
            self._close()
            self.end(*self._status)

    def _close(self) -> None:
        self._watching.cancel()
        for fd in self._outputs:
            if self._watched:
                self.box.loop.remove_reader(fd)
            os.close(fd)
        self._outputs.clear()
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            if self._feeding:
                self.box.loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def fail(self, error: Any) -> None:
        self._close()
        super().fail(error)

    def signal(self, number: int, tree: bool = False) -> None:
        if not self.over:
            self._zygote.kill(self._serial_number, number)

    def hold(self, on: bool, who: object = None) -> None:
        if on and not self._watched:
            self._watching.cancel()
        self._watched = True
        for fd in self._outputs:
            self.box.loop.remove_reader(fd) if on else self.box.loop.add_reader(fd, self._readable, fd)

    def resize(self, rows: int, columns: int) -> None:
        raise Conflict("this command has no terminal")

    def write(self, data: bytes | None) -> bool:
        if self._stdin < 0:
            return True
        if data is None:
            self._closing = True
        else:
            self._pending += data
        self._feed()
        return not self._pending

    def _feed(self) -> None:
        try:
            while self._pending:
                sent = os.write(self._stdin, self._pending[:65536])
                del self._pending[:sent]
        except BlockingIOError:
            if not self._feeding:
                self._feeding = True
                self.box.loop.add_writer(self._stdin, self._feed)
            return
        except OSError:
            self._pending.clear()
            self._closing = True
        if self._feeding:
            self._feeding = False
            self.box.loop.remove_writer(self._stdin)
        self.on_room()
        if self._closing:
            self._close_stdin()
