"""Tiers microvm and vm: what is particular to machines: images, memory forked and suspended, QEMU's jail, one wire to the network."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox.rig import needs_root, run

from livinglayer.errors import Conflict, Corrupt, Invalid, LimitExceeded
from livinglayer.sandbox.blueprint import Blueprint
from livinglayer.sandbox.cgroups import Cgroups
from livinglayer.sandbox.disk import Disk
from livinglayer.sandbox.driver import Root, Spec
from livinglayer.sandbox.drivers import memory, qemu
from livinglayer.sandbox.drivers.changes import RECORD, receive
from livinglayer.sandbox.drivers.machine import DISK, MachineGuest, Machines
from livinglayer.sandbox.drivers.microvm import MicrovmDriver
from livinglayer.sandbox.drivers.vm import VmDriver
from livinglayer.sandbox.egress import netns
from livinglayer.sandbox.layers import Layers

pytestmark = [needs_root, pytest.mark.skipif(not shutil.which(qemu.BINARY), reason="no QEMU")]

# counts in memory; a file shows where it is
COUNTER = (
    "import time\nn = 0\nwhile True:\n    n += 1\n    open('/root/count', 'w').write(f'{n:09d}')\n    time.sleep(0.2)\n"
)


class Parts:
    """What a machine's driver needs of a host."""

    def __init__(self, state: Path, disk: Disk) -> None:
        self.state, self.run, self.disk, self.layers = state, state / "run", disk, Layers(disk)
        self.cgroups = Cgroups(state, pool=0)
        self.base = self.layers.resolve("debian")
        self.networks: list[netns.Network] = []
        self.specs: list[Spec] = []

    def spec(self, layers: tuple[str, ...] = (), network: bool = True, keep: bool = False, **blueprint: object) -> Spec:
        name = f"box-{os.urandom(4).hex()}"
        shape = Blueprint.of({"tier": "microvm", "memory": "256M", "disk": "128M", **blueprint})
        directory = self.run / "boxes" / name
        directory.mkdir(parents=True)
        if network:
            self.networks.append(netns.make())
        wire = self.networks[-1].netns if network else None
        root = Root((*layers, *self.base), self.disk.create(name, shape.disk))
        group = self.cgroups.take(shape.memory, shape.pids, shape.cpu)
        held = [self.networks[-1].netns, self.networks[-1].tcp, self.networks[-1].dns] if network else []
        self.specs.append(Spec(name, shape, root, directory, group, wire, held, keep))
        return self.specs[-1]

    def close(self) -> None:
        for spec in self.specs:
            spec.cgroup.kill()
            spec.cgroup.remove()
            self.disk.destroy(spec.root.upper)
        for network in self.networks:
            network.close()
        self.cgroups.close()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@contextlib.asynccontextmanager
async def machines(
    state: Path, kind: type[MicrovmDriver] | type[VmDriver] = MicrovmDriver
) -> AsyncIterator[tuple[Parts, Machines]]:
    """A driver; when it is closed nothing of it may be left."""
    with Disk.open(state) as disk:
        parts = Parts(state, disk)
        driver = kind(parts)
        try:
            await driver.probe()
            yield parts, driver
        finally:
            await driver.close()
            for pid in (left := list(driver.processes())):
                os.kill(pid, signal.SIGKILL)
            parts.close()
        assert not left
        assert not [path for path in (state / "run").rglob("*") if not path.is_dir()]
        for directory in (state / "run/boxes").iterdir():
            directory.rmdir()


async def out(guest: MachineGuest, command: str) -> str:
    result = await run(guest, "sh", "-c", command, seconds=60)
    assert result.code == 0, result
    return result.out.strip()


async def count(guest: MachineGuest) -> int:
    return int(await out(guest, "cat /root/count"))


async def begin_counting(guest: MachineGuest) -> None:
    await guest.agent.write("/root/counter.py", COUNTER.encode())
    await out(guest, "python3 /root/counter.py </dev/null >/dev/null 2>&1 & echo $! >/root/counter.pid")
    for _ in range(200):
        if await out(guest, "cat /root/count 2>/dev/null || echo 0") > "000000001":
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it does not count")


def test_a_box_goes_on_from_an_image_with_its_own_name_time_and_randomness(state: Path) -> None:
    async def story() -> None:
        async with machines(state) as (parts, driver):
            await (await driver.start(parts.spec())).kill()  # the image is made now at the latest
            guests = [await driver.start(parts.spec()) for _ in range(2)]
            said = [
                (await out(guest, "hostname; head -c 16 /dev/urandom | od -An -tx1; date +%s.%N")).splitlines()
                for guest in guests
            ]
            for guest, (hostname, _, date) in zip(guests, said, strict=True):
                assert b"-kernel" not in Path(f"/proc/{guest.pid}/cmdline").read_bytes().split(b"\0")
                assert hostname == guest.spec.id
                assert abs(float(date) - time.time()) < 10
            assert said[0][1] != said[1][1]
            await asyncio.gather(*(guest.kill() for guest in guests))
            await guests[0].kill()  # twice is fine
            assert guests[0].ended.result() == "killed"

    asyncio.run(story())


def test_ten_forks_are_independent_and_the_parent_goes_on(state: Path) -> None:
    async def story() -> None:
        async with machines(state) as (parts, driver):
            parent = await driver.start(parts.spec())
            await begin_counting(parent)
            await out(parent, "echo parent >/root/who; echo synced >/root/on-disk; sync")
            before = await count(parent)
            forks = await driver.fork(parent, [parts.spec() for _ in range(10)])
            assert all(isinstance(fork, MachineGuest) for fork in forks)
            forks = [fork for fork in forks if isinstance(fork, MachineGuest)]
            await out(parent, "echo later >/root/later; echo changed >/root/who; sync")
            random = set()
            for number, fork in enumerate(forks):
                assert (
                    await out(fork, "cat /root/who /root/on-disk; ls /root/later 2>&1 || true")
                    == "parent\nsynced\nls: cannot access '/root/later': No such file or directory"
                )
                assert await out(fork, "kill -0 $(cat /root/counter.pid) && hostname") == fork.spec.id
                random.add(await out(fork, "head -c 16 /dev/urandom | od -An -tx1"))
                await out(fork, f"echo fork {number} >/root/who; sync")
            assert len(random) == 10
            assert [await out(fork, "cat /root/who") for fork in forks] == [f"fork {number}" for number in range(10)]
            assert await out(parent, "cat /root/who") == "changed"
            assert await count(forks[9]) >= before  # each counts on by itself
            was = await count(parent)
            await asyncio.sleep(1)
            assert await count(parent) > was
            grandchild = (await driver.fork(forks[3], [parts.spec()]))[0]
            await parent.kill()
            await forks[3].kill()
            assert isinstance(grandchild, MachineGuest)
            assert await out(grandchild, "cat /root/who") == "fork 3"
            for fork in (*forks, grandchild):
                await fork.kill()

    asyncio.run(story())


def test_suspend_keeps_processes_and_files_and_the_time_is_right_afterwards(state: Path) -> None:
    async def story() -> None:
        async with machines(state) as (parts, driver):
            guest = await driver.start(parts.spec())
            spec, kept = guest.spec, state / "kept"
            await begin_counting(guest)
            for turn in range(3):
                await out(guest, f"echo {turn} >>/root/turns")
                was = await count(guest)
                await guest.suspend(kept)
                assert await guest.ended == "suspended"
                assert guest.pid not in driver.processes()
                await asyncio.sleep(1.2)
                guest = await driver.resume(spec, kept)
                assert await out(guest, "cat /root/turns") == "\n".join(str(number) for number in range(turn + 1))
                assert abs(float(await out(guest, "date +%s.%N")) - time.time()) < 5
                await asyncio.sleep(1)
                assert await count(guest) > was
            await guest.kill()
            (kept / "ram").write_bytes(b"short")
            with pytest.raises(Corrupt):
                await driver.resume(spec, kept)
            (kept / "machine.json").write_text(
                (kept / "machine.json").read_text().replace('"qemu": "', '"qemu": "other')
            )
            with pytest.raises(Conflict, match="another QEMU"):
                await driver.resume(spec, kept)
            # memory thrown away, the files stay
            guest = await driver.start(spec)
            assert await out(guest, "cat /root/turns") == "0\n1\n2"
            await guest.kill()
            shutil.rmtree(kept)

    asyncio.run(story())


def test_pause_stops_the_machine_and_its_clock_is_set_again(state: Path) -> None:
    async def story() -> None:
        async with machines(state) as (parts, driver):
            guest = await driver.start(parts.spec())
            await guest.pause()
            used = os.times()
            await asyncio.sleep(1.5)
            del used
            fork = (await driver.fork(guest, [parts.spec()]))[0]  # of a paused one, too; it stays paused
            assert (await guest.machine.qmp.run("query-status"))["status"] == "paused"
            await guest.resume()
            assert isinstance(fork, MachineGuest)
            for each in (guest, fork):
                assert abs(float(await out(each, "date +%s.%N")) - time.time()) < 5
                await each.kill()

    asyncio.run(story())


def test_qemu_has_no_rights_no_files_no_network_and_can_not_change_an_image(state: Path) -> None:
    async def story() -> None:
        async with machines(state) as (parts, driver):
            guest = await driver.start(parts.spec())
            process = Path(f"/proc/{guest.pid}")
            status = dict(
                line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line
            )
            assert int(status["Uid"].split()[0]) >= qemu.FIRST_UID
            assert (status["CapEff"], status["CapPrm"], status["NoNewPrivs"], status["Seccomp"]) == (
                "0" * 16,
                "0" * 16,
                "1",
                "2",
            )
            assert {path.name for path in (process / "root").iterdir()} <= {
                "usr",
                "lib",
                "lib64",
                "bin",
                "etc",
                "proc",
                "dev",
            }
            assert not (process / "environ").read_bytes()
            assert os.readlink(process / "ns/net") != os.readlink("/proc/self/ns/net")
            assert "eth" not in (process / "net/dev").read_text()
            rams = [fd for fd in (process / "fd").iterdir() if os.readlink(fd).startswith("/memfd:ram")]
            assert rams
            for ram in rams:
                with open(ram, "r+b", buffering=0) as file, pytest.raises(PermissionError):
                    file.write(b"x")
                with open(ram, "rb") as file:
                    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
            await asyncio.sleep(0.5)  # one that waited moves into its cgroup in the background
            assert guest.pid in guest.spec.cgroup.pids() or not guest.spec.cgroup.directories
            await guest.kill()

    asyncio.run(story())


def test_the_only_way_out_is_the_gateways_listener(state: Path) -> None:
    async def story() -> None:
        async with machines(state) as (parts, driver):
            guest = await driver.start(parts.spec())
            network = parts.networks[-1]
            with (
                socket.socket(fileno=os.dup(network.tcp)) as listener,
                socket.socket(fileno=os.dup(network.dns)) as names,
            ):
                listener.settimeout(20)
                names.settimeout(20)
                asked = asyncio.create_task(
                    run(
                        guest,
                        "python3",
                        "-c",
                        "import socket; s = socket.create_connection(('93.184.216.34', 443), 20); s.sendall(b'hello'); print(s.recv(9))",
                        seconds=60,
                    )
                )
                taken, _ = await asyncio.to_thread(listener.accept)
                with taken:
                    assert taken.recv(5) == b"hello"
                    taken.sendall(b"gateway")
                assert "gateway" in (await asked).out
                code = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'question', ('198.18.0.1', 53)); s.settimeout(20); print(s.recv(9))"
                asked = asyncio.create_task(run(guest, "python3", "-c", code, seconds=60))
                question, who = await asyncio.to_thread(names.recvfrom, 100)
                assert question == b"question"
                names.sendto(b"answer", who)
                assert "answer" in (await asked).out
            await guest.kill()
            alone = await driver.start(parts.spec(network=False))  # air-gapped: no network card
            assert await out(alone, "ls /sys/class/net") == "lo"
            await alone.kill()

    asyncio.run(story())


def test_changes_become_a_layer_that_other_boxes_start_from(state: Path) -> None:
    async def story() -> None:
        async with machines(state) as (parts, driver):
            guest = await driver.start(parts.spec())
            await out(
                guest,
                "mkdir -p /srv/a; echo one >/srv/a/b; ln /srv/a/b /srv/c; ln -s nowhere /srv/d; rm /etc/debian_version; chown 1000:1000 /srv/a; chmod 4751 /srv/a/b",
            )
            name = "ab" * 32
            layer = parts.disk.layers / name
            layer.mkdir()
            await guest.changes(layer)
            await guest.kill()
            found = (layer / "srv/a/b").stat()
            assert (found.st_mode & 0o7777, found.st_nlink, (layer / "srv/a").stat().st_uid) == (0o4751, 2, 1000)
            assert (layer / "etc/debian_version").is_char_device()
            for _ in range(2):  # without an image, and with one
                guest = await driver.start(parts.spec(layers=(name,)))
                assert (
                    await out(
                        guest,
                        "cat /srv/c; readlink /srv/d; stat -c %u /srv/a; ls /etc/debian_version 2>/dev/null || echo gone",
                    )
                    == "one\nnowhere\n1000\ngone"
                )
                await guest.kill()
            shutil.rmtree(layer)
            shutil.rmtree(driver.artefacts.root / f"layer-{name}")
            with pytest.raises(Invalid, match="layers"):
                await driver.start(parts.spec(layers=tuple(f"{number:064x}" for number in range(11))))

    asyncio.run(story())


def test_machines_die_with_their_host_unless_they_are_named(state: Path) -> None:
    code = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from pathlib import Path
from sandbox.test_vm import Disk, MicrovmDriver, Parts
async def story():
    with Disk.open(Path({str(state)!r})) as disk:
        parts = Parts(Path({str(state)!r}), disk)
        driver = MicrovmDriver(parts)
        one, named = await driver.start(parts.spec()), await driver.start(parts.spec(keep=True))
        print(one.pid, named.pid, named.spec.id, flush=True)
        await asyncio.sleep(600)
asyncio.run(story())
"""

    async def story(named: str, pid: int) -> None:
        with Disk.open(state) as disk:
            parts = Parts(state, disk)
            driver = MicrovmDriver(parts)
            spec = parts.spec()
            home = state / "run/boxes" / named
            adopted = Spec(
                named, spec.blueprint, Root(spec.root.layers, disk.boxes / named), home, spec.cgroup, keep=True
            )
            guest = await driver.adopt(adopted)
            assert guest.pid == pid
            assert await out(guest, "hostname") == named
            with socket.socket(fileno=os.dup(adopted.held[1])) as listener:  # its way out is still there
                listener.settimeout(20)
                code = "import socket; socket.create_connection(('93.184.216.34', 443), 20)"
                asked = asyncio.create_task(run(guest, "python3", "-c", code, seconds=60))
                (await asyncio.to_thread(listener.accept))[0].close()
                assert (await asked).code == 0
            for fd in adopted.held:
                os.close(fd)
            fork = (await driver.fork(guest, [spec]))[0]
            await fork.kill()
            driver.clean({named}, print)
            assert not guest.ended.done()
            driver.clean(set(), print)
            await asyncio.wait_for(guest.ended, 5)
            await guest.kill()
            await driver.close()
            disk.destroy(disk.boxes / named)
            assert not list(driver.processes())
            parts.close()
        shutil.rmtree(state / "run")

    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        one, named, name = host.stdout.readline().split()
        host.kill()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{one}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{one}").exists()
    assert Path(f"/proc/{named}").exists()
    asyncio.run(story(name, int(named)))


def test_a_whole_pc_starts_forks_and_resumes_too(state: Path) -> None:
    async def story() -> None:
        async with machines(state, VmDriver) as (parts, driver):
            guest = await driver.start(parts.spec(tier="vm"))
            await begin_counting(guest)
            fork = (await driver.fork(guest, [parts.spec(tier="vm")]))[0]
            assert isinstance(fork, MachineGuest)
            assert await count(fork) > 0
            await fork.kill()
            was = await count(guest)
            await guest.suspend(state / "kept")
            guest = await driver.resume(guest.spec, state / "kept")
            await asyncio.sleep(1)
            assert await count(guest) > was
            assert (guest.spec.root.upper / DISK).exists()
            await guest.kill()
            shutil.rmtree(state / "kept")

    asyncio.run(story())


def records(*entries: tuple[int, bytes, bytes]) -> bytes:
    """Records as a guest sends them: mode, path, content."""
    sent = b""
    for mode, path, content in entries:
        sent += RECORD.pack(mode, 0, 0, 0, len(content), len(sent), 0, 1, len(path), 0, 0) + path + content
    return sent + bytes(RECORD.size)


@pytest.mark.parametrize(
    "entries",
    [
        [(0o40755, b"", b""), (0o100644, b"../out", b"x")],
        [(0o40755, b"", b""), (0o100644, b"/etc/out", b"x")],
        [(0o40755, b"", b""), (0o100644, b"missing/out", b"x")],
        [(0o40755, b"", b""), (0o100644, b"a", b"x"), (0o100644, b"a", b"y")],
        [(0o40755, b"", b""), (0o120777, b"link", b""), (0o100644, b"link/out", b"x")],
        [(0o40755, b"", b""), (0o100644, b"a\0b", b"x")],
    ],
)
def test_a_hostile_guest_can_not_write_elsewhere(entries: list[tuple[int, bytes, bytes]], tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    data = records(*entries)

    async def read(size: int) -> bytes:
        nonlocal data
        taken, data = data[:size], data[size:]
        return taken

    with pytest.raises(Corrupt):
        asyncio.run(receive(read, tmp_path / "target"))
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_guest_that_sends_without_end_is_stopped(tmp_path: Path) -> None:
    async def read(size: int) -> bytes:
        return RECORD.pack(0o100644, 0, 0, 0, 1 << 40, 1, 0, 1, 1, 0, 0) if size == RECORD.size else b"a" * size

    with pytest.raises(LimitExceeded):
        asyncio.run(receive(read, tmp_path, 1 << 20))


def test_capture_finds_what_a_process_changed_with_and_without_the_newer_call() -> None:
    size = 64 * memory.PAGE
    image = memory.blank(size)
    os.pwrite(image, b"old" * 10, 5 * memory.PAGE)
    memory.seal(image)
    with pytest.raises(PermissionError):
        os.pwrite(image, b"x", 0)
    code = f"import mmap, sys; m = mmap.mmap({image}, {size}, mmap.MAP_PRIVATE); m[7 * 4096] = 7; m[8 * 4096] = 8; m[40 * 4096] = 40; print(m[5 * 4096], flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[image]
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        ((start, end, _),) = memory._mappings(process.pid, image)
        pagemap = os.open(f"/proc/{process.pid}/pagemap", os.O_RDONLY)
        walked = list(memory._walk(pagemap, start, end))
        assert [((low - start) // memory.PAGE, (high - start) // memory.PAGE) for low, high in walked] == [
            (7, 9),
            (40, 41),
        ]
        with contextlib.suppress(OSError):  # a kernel before 6.7
            assert list(memory._scan(pagemap, start, end)) == walked
        target = memory.blank(size)
        memory.capture(process.pid, image, target, zeros=False)
        assert [os.pread(target, 1, page * memory.PAGE)[0] for page in (5, 7, 8, 40)] == [0, 7, 8, 40]
        process.stdin.close()
    for fd in (pagemap, target, image):
        os.close(fd)


def test_numbers_of_the_c_side_are_the_same() -> None:
    source = (Path(qemu.__file__).parent.parent / "native/init.c").read_text()
    assert f"#define LAYERS {qemu.LAYERS} " in source
    assert struct.calcsize("<IIIIQQqIIII") == RECORD.size
