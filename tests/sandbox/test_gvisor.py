"""Tier gvisor: what is particular to a kernel in user space: its rights on the host, its network, its memory on disk and forked."""

import asyncio
import json
import os
import shutil
import signal
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sandbox.rig import Rig, needs_root, rig, run, traces
from sandbox.test_container import ATTACKS, outlive, reaped

from livinglayer.errors import Unavailable
from livinglayer.sandbox.drivers.gvisor import GvisorDriver, GvisorGuest

pytestmark = [needs_root, pytest.mark.skipif(not shutil.which("runsc"), reason="no runsc")]

# counts in memory and in a file, one after the other: whoever sees both at one moment sees the same number
COUNTER = """
import os, time
count = 0
with open("/home/user/count", "w") as file:
    while True:
        count += 1
        file.seek(0)
        file.write(f"{count:09d}")
        file.flush()
        os.rename("/tmp/beat", "/tmp/beat2") if os.path.exists("/tmp/beat") else open("/tmp/beat", "w").close()
        time.sleep(0.005)
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("state")

    async def story() -> None:
        async with rig(state) as parts:
            try:
                await GvisorDriver(parts).probe()
            except Unavailable as error:
                if "too old" in error.message:
                    pytest.skip(error.message)
                raise

    asyncio.run(story())
    return state


@asynccontextmanager
async def box(state: Path, **blueprint: object) -> AsyncIterator[tuple[Rig, GvisorGuest]]:
    async with rig(state) as parts:
        guest = await GvisorDriver(parts).start(parts.spec(f"box-{os.urandom(3).hex()}", **blueprint))
        try:
            yield parts, guest
        finally:
            await guest.kill()


def test_a_runsc_that_is_too_old_is_refused_with_what_to_install(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GvisorDriver, "_version", lambda self: 20221219)

    async def story() -> None:
        async with rig(state) as parts:
            with pytest.raises(Unavailable, match="too old") as caught:
                await GvisorDriver(parts).probe()
            assert caught.value.hint and "backports" in caught.value.hint

    asyncio.run(story())


def test_sentry_and_file_server_are_nobody_on_the_host(state: Path) -> None:
    async def story() -> None:
        async with box(state) as (parts, guest):
            processes = guest.spec.cgroup.pids()
            assert guest.pid in processes and len(processes) >= 2
            for pid in processes:
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                assert min(map(int, status["Uid"].split())) >= 1 << 20, status["Name"]
                for kind in ("user", "mnt", "net"):
                    assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), (
                        status["Name"],
                        kind,
                    )
                held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
                assert [path for path in held if path.startswith(("/sys", "/etc", str(parts.state)))] == []

    asyncio.run(story())


@pytest.mark.parametrize("user", ["", "user"])
def test_attacks_meet_another_kernel_and_are_refused(state: Path, user: str) -> None:
    async def story() -> dict[str, str]:
        async with box(state) as (_, guest):
            assert (await run(guest, "uname", "-r")).out.strip() != os.uname().release
            listed = await run(guest, "ls", "-l", "/usr")
            assert (listed.code, listed.err) == (0, "")
            thread = "import threading; t = threading.Thread(target=print, args=('ran',)); t.start(); t.join()"
            assert (await run(guest, "python3", "-c", thread)).out == "ran\n"
            done = await run(guest, "python3", "-c", ATTACKS, user=user)
            assert done.code == 0, done.err
            return json.loads(done.out)

    found = asyncio.run(story())
    assert [name for name, outcome in found.items() if outcome == "done"] == []
    assert (found["fds"], found["kcore"], found["clone3"]) == ("", "empty", "ENOSYS")


def test_what_a_box_writes_reaches_its_files(state: Path) -> None:
    async def story() -> None:
        async with box(state) as (_, guest):
            assert (
                await run(guest, "sh", "-c", "echo x > /tmp/mine; echo y > /home/user/also; ls /tmp /home/user")
            ).code == 0
            upper = guest.spec.root.upper / "u"
            files = sorted(str(path.relative_to(upper)) for path in upper.rglob("*") if not path.is_dir())
            assert files == ["home/user/also", "tmp/mine"]

    asyncio.run(story())


def test_a_sandbox_that_dies_by_itself_is_cleaned_up_after(state: Path) -> None:
    async def story() -> None:
        async with rig(state) as parts:
            spec = parts.spec(f"dies-{os.urandom(3).hex()}")
            guest = await GvisorDriver(parts).start(spec)
            os.kill(guest.pid, signal.SIGKILL)
            assert await asyncio.wait_for(guest.ended, 10) == "its agent ended"
            assert guest.agent.closed and list(spec.directory.iterdir()) == [] and list(traces(spec.id)) == []
            assert Path("/dev/null").stat().st_uid == 0

    asyncio.run(story())


def test_too_many_processes_are_refused_and_too_much_memory_ends_the_box(state: Path) -> None:
    async def story() -> None:
        async with box(state, memory="64M", pids=32) as (_, guest):
            bomb = await run(guest, "sh", "-c", "for i in $(seq 100); do sleep 3 & done; wait", user="user")
            assert "fork" in bomb.err.lower()
            assert (await run(guest, "echo", "alive")).out == "alive\n"
            await run(guest, "python3", "-c", "bytearray(400 << 20)")
            assert await asyncio.wait_for(guest.ended, 10) == "it ran out of memory"

    asyncio.run(story())


CLIENT = """
import socket
with socket.create_connection(("203.0.113.7", 4433), 10) as stream:
    stream.sendall(b"ask"); print(stream.recv(99).decode())
with socket.create_connection(("169.254.170.1", 7700), 10) as stream:
    print(stream.recv(99).decode())
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
    query.settimeout(10); query.sendto(b"name?", ("198.18.0.1", 53)); print(query.recv(99).decode())
with socket.create_server(("0.0.0.0", 80)) as server, socket.create_connection(("127.0.0.1", 80), 10):
    print("served")
for address in ("2001:db8::1", "203.0.113.7"):
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(kind, socket.SOCK_DGRAM) as stray:
        stray.settimeout(0.3)
        try:
            stray.sendto(b"x", (address, 9)); stray.recv(9); print("answered")
        except OSError:
            print("nothing")
"""


def test_its_network_ends_at_the_gateway(state: Path) -> None:
    async def story() -> None:
        async with box(state) as (parts, guest):
            loop, network = asyncio.get_running_loop(), parts.networks[guest.spec.id]
            tcp, dns, channel = (socket.socket(fileno=os.dup(fd)) for fd in (network.tcp, network.dns, network.channel))
            asked: list[tuple[str, int]] = []

            async def gateway() -> None:
                stream, _ = await loop.sock_accept(tcp)
                original = stream.getsockopt(socket.SOL_IP, 80, 16)  # SO_ORIGINAL_DST
                asked.append((socket.inet_ntoa(original[4:8]), struct.unpack(">H", original[2:4])[0]))
                await loop.sock_sendall(stream, b"from the gateway")
                other, _ = await loop.sock_accept(channel)
                await loop.sock_sendall(other, b"from the channel")
                _, who = await loop.sock_recvfrom(dns, 99)
                await loop.sock_sendto(dns, b"name", who)
                stream.close()
                other.close()

            served = asyncio.create_task(gateway())
            done = await run(guest, "python3", "-c", CLIENT)
            await asyncio.wait_for(served, 5)
            assert done.out.splitlines() == [
                "from the gateway",
                "from the channel",
                "name",
                "served",
                "nothing",
                "nothing",
            ], done.err
            assert asked == [("203.0.113.7", 4433)]
            for end in (tcp, dns, channel):
                end.close()

    asyncio.run(story())


def test_suspend_keeps_processes_and_files_again_and_again(state: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with box(state) as (_, guest):
            driver, spec = guest.driver, guest.spec
            await run(guest, "sh", "-c", 'exec python3 -c "$0" >/dev/null 2>&1 &', COUNTER)
            count, seen = guest.spec.root.upper / "u/home/user/count", 0
            for turn in range(3):
                await asyncio.sleep(0.6)
                assert (await run(guest, "sh", "-c", f"echo {turn} > /home/user/turn{turn}")).code == 0
                image = tmp_path / str(turn)
                image.mkdir()
                await guest.suspend(image)
                assert await guest.ended == "suspended"
                assert reaped(guest.pid) and list(traces(spec.id)) == []
                stood = int(count.read_text())
                assert stood > seen
                guest = await driver.resume(spec, image)
                await asyncio.sleep(0.5)
                seen = int(count.read_text())
                assert stood < seen < stood + 400  # it went on counting, not anew
                files = (await run(guest, "sh", "-c", "cat /home/user/turn*")).out.split()
                assert files == [str(number) for number in range(turn + 1)]
            await guest.kill()

    asyncio.run(story())


def test_forks_have_memory_and_files_of_one_moment(state: Path) -> None:
    async def story() -> None:
        async with box(state) as (parts, guest):
            await run(guest, "sh", "-c", 'exec python3 -c "$0" >/dev/null 2>&1 &', COUNTER)
            await asyncio.sleep(0.5)
            specs = [parts.spec(f"{guest.spec.id}-{number}") for number in range(2)]
            children = await guest.driver.fork(guest, specs)
            for child in children:
                assert isinstance(child, GvisorGuest)
                await run(child, "sh", "-c", f"echo {child.spec.id} > /home/user/who")
            await asyncio.sleep(0.3)
            uppers = [one.spec.root.upper / "u/home/user" for one in (guest, *children) if isinstance(one, GvisorGuest)]
            before = [int((upper / "count").read_text()) for upper in uppers]
            await asyncio.sleep(0.3)
            after = [int((upper / "count").read_text()) for upper in uppers]
            assert all(late > early for early, late in zip(before, after, strict=True))  # all three go on counting
            assert [(upper / "who").exists() for upper in uppers] == [False, True, True]
            await asyncio.gather(*(child.kill() for child in children))
            assert (await run(guest, "true")).code == 0

    asyncio.run(story())


def test_pause_stops_and_kill_while_frozen_leaves_nothing(state: Path) -> None:
    async def story() -> None:
        async with rig(state) as parts:
            name = f"gone-{os.urandom(3).hex()}"
            guest = await GvisorDriver(parts).start(parts.spec(name))
            await run(guest, "sh", "-c", "sleep 1000 >/dev/null 2>&1 &")
            await guest.pause()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(guest.agent.ping(), 0.2)
            await asyncio.gather(guest.kill(), guest.kill())
            assert await guest.ended == "killed"
            assert reaped(guest.pid) and list(guest.spec.directory.iterdir()) == [] and list(traces(name)) == []

    asyncio.run(story())


def test_a_killed_supervisor_leaves_no_box(tmp_path: Path, state: Path) -> None:
    async def clean(parts: Rig) -> None:
        said: list[str] = []
        GvisorDriver(parts).clean({"another"}, said.append)
        assert said[-1] == f"removed {parts.run / 'boxes/orphan/oci'}"

    outlive(tmp_path, "gvisor", "GvisorDriver", clean)
