"""Noise and half-truths against everything that parses: the spawner, the agent (both with sanitizers), the host's side of each.

A few seconds each in `make test`, minutes under the torture marker. A failure prints its seed: LAYER_TEST_SEED repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox.escape.conftest import needs_root
from sandbox.hosts import Host
from sandbox.rig import rig, run

from livinglayer.errors import LayerError
from livinglayer.sandbox import Sandbox, native
from livinglayer.sandbox.agent import Agent, Writing
from livinglayer.sandbox.commands import encode_exec
from livinglayer.sandbox.drivers.namespace import HEAD, NamespaceDriver
from livinglayer.sandbox.wire import DONE, EXIT, STARTED, STDERR, STDOUT, Kind
from livinglayer.sandbox.wire import HEAD as FRAME

SEED = int(os.environ.get("LAYER_TEST_SEED") or random.randrange(1 << 32))
LENGTHS = [pytest.param(3.0, id="short"), pytest.param(240.0, id="long", marks=pytest.mark.torture)]


@pytest.fixture
def dice() -> random.Random:
    print(f"LAYER_TEST_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture
def sanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYER_SANITIZE", "1")
    monkeypatch.setattr(native, "PROGRAMS", {name: native.PROGRAMS[name] for name in ("spawner", "agent")})


def mutated(dice: random.Random, data: bytes) -> bytes:
    """Some bytes of it changed, cut out, doubled or put in."""
    found = bytearray(data)
    for _ in range(dice.choice((0, 1, 1, 2, 3, 8, 30))):
        at = dice.randrange(len(found) + 1)
        act = dice.randrange(5)
        if act == 0 and at < len(found):
            found[at] = dice.choice((0, 1, 2, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        elif act == 1:
            del found[at : at + dice.randrange(9)]
        elif act == 2:
            found[at:at] = dice.randbytes(dice.randrange(9))
        elif act == 3:
            found[at:at] = found[at : at + dice.randrange(64)]
        elif len(found) >= at + 4:
            found[at : at + 4] = struct.pack(
                "<I", dice.choice((0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 65535, 65536, 65537))
            )
    return bytes(found)


# ---- the spawner ----


def noise_for_spawner(dice: random.Random) -> bytes:
    counts = [dice.choice((0, 0, 1, 1, 2, 3, 8, 9, 64, 65, 0xFFFFFFFF)) for _ in range(5)]
    head = HEAD.pack(
        dice.choice((0, 1, 1, 1, 2, 3, 4, 4, 5, 6, 7, 32, 99)),
        dice.randrange(1 << 32),
        *counts,
        0,
        dice.randrange(1 << 64),
    )
    names = [
        b"fuzz",
        b"",
        b"-x",
        b"a" * 70,
        b"../../etc",
        b"host",
        b"no-such-layer",
        b"/",
        b".",
        b"x/y",
        b"proc",
        b"dev/shm",
        b"/" + b"m" * 900,
        dice.randbytes(5),
    ]
    strings = b"".join(dice.choice(names) + b"\0" for _ in range(dice.randrange(8)))
    return mutated(dice, head + strings) if dice.random() < 0.7 else dice.randbytes(dice.randrange(200))


@needs_root
@pytest.mark.parametrize("seconds", LENGTHS)
def test_spawner(tmp_path: Path, sanitized: None, dice: random.Random, seconds: float) -> None:
    async def fuzz() -> None:
        async with rig(tmp_path / "s") as parts:
            try:
                raw = parts.spawner._socket
                things = [
                    os.open("/dev/null", os.O_RDWR),
                    os.open("/tmp", os.O_PATH),
                    os.open("/tmp", os.O_RDONLY),
                    os.memfd_create("x"),
                    *os.pipe(),
                ]
                things += [end.detach() for end in socket.socketpair()] + [os.pidfd_open(os.getpid())]
                end, count = time.monotonic() + seconds, 0
                while time.monotonic() < end:
                    for _ in range(50):
                        fds = [dice.choice(things) for _ in range(dice.choice((0, 0, 1, 2, 3, 5, 40, 128)))]
                        with contextlib.suppress(BlockingIOError):
                            socket.send_fds(raw, [noise_for_spawner(dice) or b"x"], fds)
                            count += 1
                    await asyncio.sleep(0.005)
                    if parts.spawner._answers is None:
                        break
                # and it still does its work
                guest = await asyncio.wait_for(NamespaceDriver(parts.spawner).start(parts.spec("after")), 20)
                done = await run(guest, "echo", "alive")
                assert done.out == "alive\n", done
                await guest.kill()
                assert count > 100
                for fd in things:
                    os.close(fd)
            finally:  # it would stay for the fds it was told to hold
                os.kill(int((parts.run / "spawner.pid").read_text()), signal.SIGKILL)

    try:
        asyncio.run(fuzz())
    finally:
        log = tmp_path / "s/run/spawner.log"
        said = log.read_text() if log.exists() else ""
        assert "Sanitizer" not in said, said[-4000:]
        assert "runtime error" not in said, said[-4000:]


# ---- the agent ----


def noise_for_agent(dice: random.Random) -> bytes:
    number = dice.choice((0, 1, 2, 3, dice.randrange(1 << 32)))
    user, path = (
        dice.choice((b"", b"user", b"0:0", b"99999", b"x" * 300)),
        dice.choice(
            (b"/", b"/a", b"/a/b/c", b"/pipe", b"/link", b"a", b"", b"/" + b"y" * 5000, b"/../..", b"//", b"/a/..")
        ),
    )
    small = struct.pack("<I", dice.choice((0, 1, 2, 100, 0xFFFFFFFF)))
    shapes = {
        Kind.EXEC: encode_exec([dice.choice(("true", "cat", "/nonexistent", "sleep")), "0.01"], user.decode(), path.decode(), {"A": "b"}, dice.randrange(4)),
        Kind.INPUT: dice.randbytes(dice.choice((0, 1, 100, 60000))),
        Kind.INPUT_END: b"",
        Kind.SIGNAL: struct.pack("<iI", dice.choice((0, 1, 9, 15, 18, 64, 65, -1)), dice.randrange(2)),
        Kind.RESIZE: struct.pack("<II", dice.randrange(1 << 32), 7),
        Kind.WINDOW: small,
        Kind.CANCEL: b"",
        Kind.MORE: dice.randbytes(dice.choice((0, 1, 100, 60000))),
        Kind.READ: user + b"\0" + path + b"\0",
        Kind.WRITE: small + small + user + b"\0" + path + b"\0",
        Kind.LIST: small + user + b"\0" + path + b"\0",
        Kind.STAT: user + b"\0" + path + b"\0",
        Kind.MOVE: user + b"\0" + path + b"\0/b\0",
        Kind.REMOVE: user + b"\0" + path + b"\0",
        Kind.MKDIR: small + user + b"\0" + path + b"\0",
        Kind.LINK: user + b"\0/etc\0" + path + b"\0",
        Kind.CHMOD: small + user + b"\0" + path + b"\0",
        Kind.WATCH: small + user + b"\0" + path + b"\0",
        Kind.CONNECT: small,
        Kind.PING: b"x" * dice.randrange(100),
        Kind.CLOCK: bytes(8) + b"\0" + bytes(300),
        Kind.PROCESSES: b"",
    }  # fmt: skip
    kind = dice.choice([*shapes, 0, 9, 24, 99])
    payload = mutated(dice, shapes.get(kind, b""))[:65536]
    length = len(payload) if dice.random() < 0.995 else dice.choice((0, 65536))
    return FRAME.pack(length, number, int(kind)) + payload


@needs_root
@pytest.mark.parametrize("seconds", LENGTHS)
def test_agent(tmp_path: Path, sanitized: None, dice: random.Random, seconds: float) -> None:
    """As a user of its own, in a network of its own, over a directory of its own: what it is told to do, it may."""
    place = Path(f"/tmp/agent-fuzz-{os.getpid()}")
    place.mkdir(exist_ok=True)
    program, root = place / "agent", place / "root"
    try:
        shutil.copy(native.build(tmp_path) / "agent", program)
        end, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            shutil.rmtree(root, ignore_errors=True)
            (root / "a/b").mkdir(parents=True)
            (root / "home/user").mkdir(parents=True)
            os.mkfifo(root / "pipe")
            (root / "link").symlink_to("/etc/passwd")
            subprocess.run(["chown", "-hR", "61000:61000", str(place)], check=True)
            ours, theirs = socket.socketpair()
            number = str(theirs.fileno())
            with open(place / "log", "wb") as log:
                process = subprocess.Popen(
                    [
                        "unshare",
                        "-n",
                        "setpriv",
                        "--reuid=61000",
                        "--regid=61000",
                        "--clear-groups",
                        str(program),
                        number,
                        number,
                        str(root),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stderr=log,
                    env={"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0"},
                )
            theirs.close()
            ours.settimeout(5)
            with contextlib.suppress(OSError):
                assert ours.recv(65536)  # ready
                ours.setblocking(False)
                for _ in range(400):
                    with contextlib.suppress(BlockingIOError):
                        ours.send(noise_for_agent(dice))
                    with contextlib.suppress(BlockingIOError):
                        while ours.recv(1 << 20):
                            pass
            ours.close()
            status = process.wait(20)
            said = (place / "log").read_text(errors="replace")
            assert "Sanitizer" not in said and "runtime error" not in said, said[-4000:]
            assert status == 0, (status, said)
            rounds += 1
        assert rounds
    finally:
        shutil.rmtree(place, ignore_errors=True)


# ---- the host's side of an agent that is an attacker's ----


class Hostile:
    """The other end of an Agent: answers with whatever it is told to."""

    def __init__(self, kind: int = socket.SOCK_STREAM) -> None:
        ours, self.end = socket.socketpair(socket.AF_UNIX, kind)
        self.end.setblocking(False)
        self.agent = Agent(ours)

    def say(self, number: int, kind: int, payload: bytes) -> None:
        with contextlib.suppress(OSError):
            self.end.send(FRAME.pack(len(payload), number, kind) + payload)

    def asked(self) -> int:
        """The number of the conversation that was asked for last."""
        return self.agent._number


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("seconds", LENGTHS)
def test_host_of_a_hostile_agent(dice: random.Random, kind: int, seconds: float) -> None:
    """Every request ends, well or with one of our errors; nothing else is raised, and what is kept has a bound."""

    async def fuzz() -> None:
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            hostile = Hostile(kind)
            agent = hostile.agent
            requests = [
                agent.list("/"), agent.stat("/a"), agent.read("/a"), agent.ping(), agent.move("/a", "/b"), agent.write("/a", b"x" * 100_000),
            ]  # fmt: skip
            tasks = [asyncio.ensure_future(request) for request in requests]
            await asyncio.sleep(0)
            numbers = list(agent._talks)
            for _ in range(dice.choice((5, 50, 300))):
                payload = dice.choice(
                    (
                        b"",
                        dice.randbytes(dice.randrange(80)),
                        struct.pack("<I", dice.choice((0, 2, 0xFFFFFFFF))) + b"x\0",
                        bytes(60000),
                    )
                )
                hostile.say(
                    dice.choice([*numbers, 0, 7]),
                    dice.choice((STDOUT, STDERR, EXIT, DONE, STARTED, 64, 70, 71, 72, 73, 74, 0, 200)),
                    payload,
                )
                if dice.random() < 0.02:
                    with contextlib.suppress(OSError):
                        hostile.end.send(dice.randbytes(dice.randrange(1, 40)))
                await asyncio.sleep(0)
            hostile.end.close()
            for task in tasks:
                try:
                    await asyncio.wait_for(task, 5)
                except LayerError:
                    pass
            agent.close()
            agent.ready.exception() if agent.ready.done() else None
        assert not problems, problems[0]

    asyncio.run(fuzz())


def test_window_is_kept() -> None:
    """A guest that sends more than it was given room for is hung up on."""

    async def flood() -> int:
        hostile = Hostile()
        got = 0

        def on_frame(kind: int, payload: bytes) -> None:
            nonlocal got
            got += len(payload) if kind == STDOUT else 0

        number = hostile.agent.open(on_frame)
        while not hostile.agent.closed and got < 64 << 20:
            hostile.say(number, STDOUT, bytes(32768))
            await asyncio.sleep(0)
        assert hostile.agent.closed
        return got

    assert asyncio.run(flood()) <= 2 << 20


def test_list_without_end() -> None:
    async def flood() -> None:
        hostile = Hostile()
        task = asyncio.ensure_future(hostile.agent.list("/"))
        await asyncio.sleep(0)
        entry = struct.pack("<IIIQq", 0o100644, 0, 0, 1, 1) + b"x" * 2000 + b"\0\0"
        end = time.monotonic() + 20
        while not task.done() and time.monotonic() < end:
            for _ in range(50):
                hostile.say(hostile.asked(), 70, entry)
            await asyncio.sleep(0)
        with pytest.raises(LayerError):
            await task

    asyncio.run(flood())


def test_credit_is_bounded() -> None:
    """A guest can't make the host queue more than a window of what others send into it."""

    async def grant() -> int:
        hostile = Hostile()
        writing = Writing(hostile.agent, "/a", 0o644, "", False)
        for _ in range(100):
            hostile.say(hostile.asked(), 73, b"\xff\xff\xff\x7f")
        await asyncio.sleep(0.05)
        return writing._credit

    assert asyncio.run(grant()) <= 1 << 20


# ---- the host's own socket ----


@needs_root
@pytest.mark.parametrize("seconds", LENGTHS)
def test_host_socket(host: Host, use: Callable[[Host], Host], dice: random.Random, seconds: float) -> None:
    """Noise from a client of the host's own user: it loses its connection at most."""
    use(host)
    with Sandbox.create() as box:
        pid = host.pid
        verbs = ["exec", "python", "files.read", "files.write", "files.list", "files.move", "files.chmod", "connect", "expose", "get", "metrics", "trace", "changes", "egress", "snapshot.diff", "follow", "signal", "processes", "hello", "fork", "create"]  # fmt: skip
        values = [
            None,
            True,
            -1,
            1 << 70,
            0.5,
            "",
            "x" * 5000,
            "/",
            "/home/user",
            "\0",
            "../..",
            [],
            [1],
            ["true"],
            {},
            {"a": 1},
            {"do": "x"},
            box.id,
        ]
        keys = ["box", "path", "argv", "user", "cwd", "env", "timeout", "code", "args", "to", "mode", "depth", "port", "rules", "id", "signal", "a", "b", "pty", "stdin", "background", "count", "blueprint", "name", "snapshot", "secrets", "session", "append", "recursive"]  # fmt: skip
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
                sock.settimeout(1)
                sock.connect(str(host.state / "run/host.sock"))
                for _ in range(dice.randrange(1, 30)):
                    request = {key: dice.choice(values) for key in dice.sample(keys, dice.randrange(6))} | {
                        "do": dice.choice(verbs)
                    }
                    request["box"] = box.id if dice.random() < 0.8 else dice.choice(values)
                    if request["do"] in ("create", "fork"):
                        request |= {
                            "count": dice.choice(("x", 0, -1, None, 10**9, [])),
                            "blueprint": dice.choice(("x", {"tier": "none"}, {"memory": -1}, [1], {"x": 1})),
                        }
                    payload = json.dumps(request).encode() if dice.random() < 0.9 else dice.randbytes(50)
                    sock.sendall(FRAME.pack(len(payload), 0, 100) + payload)
                    for _ in range(dice.randrange(3)):
                        noise = dice.randbytes(dice.randrange(40))
                        sock.sendall(FRAME.pack(len(noise), 0, dice.choice((2, 3, 4, 5, 7, 0, 101, 255))) + noise)
                    if dice.random() < 0.1:
                        sock.sendall(dice.randbytes(30))
                    with contextlib.suppress(TimeoutError):
                        sock.settimeout(0.02)
                        sock.recv(65536)
                    sock.settimeout(1)
        assert host.pid == pid
        assert box.run(["echo", "alive"]).stdout == "alive\n"
    assert "the host failed" not in host.log
    assert "Fatal error" not in host.log, host.log[-3000:]
