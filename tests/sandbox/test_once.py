"""A box serves one program after another only when it is as new: whatever a program leaves, the next one finds a box like any new one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sandbox.callers import ASK, answer, run, serve, waiting
from sandbox.homes import Home, home
from sandbox.hosts import Host, wait_until

from livinglayer.errors import Invalid, Unavailable
from livinglayer.sandbox import Blueprint, Sandbox
from livinglayer.sandbox.once import Ended, Once, close_connections

# Everything that a program can see of its box and that is the same in every new one. Left out is what only counts (process ids, packets) and
# what names the box (its id, when it was made).
LOOK = r"""
import glob, hashlib, json, os, resource, signal, socket, stat, sys
seen = {}
def files(top, times):
    found = []
    for at, directories, names in os.walk(top):
        for name in sorted(directories + names):
            path = os.path.join(at, name)
            try:
                here = os.lstat(path)
                marks = os.listxattr(path, follow_symlinks=False)
            except OSError as error:
                found.append((path, error.errno)); continue
            found.append((path, here.st_mode, here.st_uid, here.st_gid, here.st_size if not stat.S_ISDIR(here.st_mode) else 0, here.st_nlink, marks, here.st_mtime_ns if times else 0))
    return found
for top in ("/etc", "/home", "/tmp", "/var", "/run", "/opt", "/root", "/srv", "/mnt", "/media"):
    seen[top] = hashlib.sha256(repr(files(top, True)).encode()).hexdigest()
seen["/dev"] = [entry[:4] for entry in files("/dev", False) if not entry[0].startswith("/dev/pts/")]
root = os.stat("/")
seen["/"] = (sorted(os.listdir("/")), root.st_mode, root.st_uid, root.st_nlink, os.listxattr("/"))
shm = os.statvfs("/dev/shm")
seen["shm"] = (os.listdir("/dev/shm"), shm.f_blocks - shm.f_bfree, shm.f_files - shm.f_ffree, os.stat("/dev/shm").st_mode)
seen["mounts"] = [line.split(" ", 3)[3].split(" - ")[0] for line in open("/proc/self/mountinfo")]
seen["limits"] = [resource.getrlimit(number) for number in range(16)]
seen["ipc"] = [open(path).read() for path in sorted(glob.glob("/proc/sysvipc/*"))]
def inet(name):
    return sorted(line.split()[1:4] for line in open(f"/proc/net/{name}").readlines()[1:])
seen["net"] = {name: inet(name) for name in ("tcp", "tcp6", "udp", "udp6", "raw")}
seen["unix"] = open("/proc/net/unix").read().count("\n")
seen["used"] = open("/proc/net/sockstat").read().split()[2]
sysctl = {}
for at, _, names in os.walk("/proc/sys"):
    for name in names:
        path = os.path.join(at, name)
        if any(part in path for part in ("/fs/", "random", "ns_last_pid", "nf_conntrack_count", "pty/nr", "hostname", "/vm/", "sched_domain", "uuid")): continue
        try: sysctl[path] = open(path).read()
        except (OSError, UnicodeDecodeError): pass
seen["sysctl"] = hashlib.sha256(repr(sorted(sysctl.items())).encode()).hexdigest()
seen["processes"] = sorted(open(f"/proc/{pid}/comm").read() for pid in os.listdir("/proc") if pid.isdigit())
status = dict(line.rstrip("\n").split(":\t", 1) for line in open("/proc/self/status") if ":\t" in line)
seen["self"] = {key: status[key] for key in ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Seccomp_filters", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd", "SigQ", "TracerPid", "Umask", "Threads", "Cpus_allowed")}
seen["nice"] = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), open("/proc/self/oom_score_adj").read(), open("/proc/self/personality").read() if os.access("/proc/self/personality", os.R_OK) else "", os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid())
seen["first"] = {key: line for key, line in (line.split(":", 1) for line in open("/proc/1/status")) if key in ("Uid", "Threads", "SigIgn", "SigCgt", "Seccomp", "TracerPid")}
seen["env"] = {key: value for key, value in os.environ.items() if key not in ("LAYER_BOX", "LAYER_URL")}
seen["cwd"], seen["fds"], seen["modules"] = os.getcwd(), sorted(os.listdir("/proc/self/fd"))[:3], sorted(sys.modules)
seen["cgroup"] = open("/proc/self/cgroup").read()
seen["keys"] = open("/proc/key-users").read().count("1000:") if os.path.exists("/proc/key-users") else 0
print(json.dumps(seen))
"""

CALL = "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
# What a program may leave behind, and whether a box in which it did may serve another program at all.
LEFT: dict[str, tuple[str, bool]] = {
    "nothing": ("pass", True),
    "a background process": ("import subprocess\nsubprocess.Popen(['sleep', '600'])", False),
    "a daemon": ("import os, time\nif not os.fork():\n    os.setsid()\n    if os.fork(): os._exit(0)\n    os.closerange(0, 100); time.sleep(600)", False),
    "a file in /tmp": ("open('/tmp/x', 'w').write('x')", False),
    "a file in /var/tmp": ("open('/var/tmp/x', 'w').write('x')", False),
    "a file at home": ("open('x', 'w').write('x')", False),
    "a file that was removed again": ("import os\nopen('x', 'w').write('x')\nos.unlink('x')", False),
    "a file in /dev/shm": ("open('/dev/shm/x', 'w').write('x')", False),
    "a directory in /dev/shm": ("import os\nos.mkdir('/dev/shm/x')", False),
    "shared memory by name": ("from multiprocessing import shared_memory as s\nfrom multiprocessing import resource_tracker as r\nx = s.SharedMemory('x', True, 4096)\nr.unregister(x._name, 'shared_memory')\nx.close()", False),
    "a semaphore by name": ("import _multiprocessing as m\nm.SemLock(1, 1, 1, '/sem-x', False)", False),
    "shell history": ("import subprocess\nsubprocess.run(['bash', '-ic', 'history -s secret; history -w'], check=True)", False),
    "attributes of a file of the base": ("import os\ntry: os.utime('/home/user', (1, 1))\nexcept OSError: pass", False),
    "an extended attribute": ("import os\nos.setxattr('/home/user', 'user.x', b'x')", False),
    "another mode": ("import os\nos.chmod('/home/user', 0o700)", False),
    "a moved directory": ("import os\nos.mkdir('a'); os.rename('a', 'b')", False),
    "a bound socket": ("import socket\nsocket.socket(socket.AF_UNIX).bind('/home/user/s')", False),
    "an abstract socket": ("import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0x')\ns.listen()", True),
    "an abstract socket that a child holds": ("import os, socket, time\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0x')\nif not os.fork(): time.sleep(600)", False),
    "a message queue": (CALL + "assert libc.mq_open(b'/x', os.O_CREAT | os.O_RDWR, 0o600, None) >= 0", True),
    "shared memory of System V": (CALL + "assert libc.shmget(7777, 4096, 0o1666) >= 0", True),
    "semaphores of System V": (CALL + "assert libc.semget(7777, 3, 0o1666) >= 0", True),
    "a queue of System V": (CALL + "assert libc.msgget(7777, 0o1666) >= 0", True),
    "a key": (CALL + "libc.syscall(248, b'user', b'x', b'secret', 6, -4)", True),
    "a limit": ("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))", True),
    "a limit of the agent": ("import resource\ntry: resource.prlimit(1, resource.RLIMIT_NOFILE, (10, 10))\nexcept (OSError, PermissionError): pass", True),
    "a setting of the kernel": ("for name in ('kernel/shmmax', 'kernel/msgmax', 'net/ipv4/ip_forward', 'net/ipv4/ip_default_ttl', 'net/core/somaxconn', 'kernel/hostname', 'kernel/ns_last_pid', 'fs/mqueue/queues_max'):\n    try: open('/proc/sys/' + name, 'w').write('5')\n    except OSError: pass", True),
    "another host name": ("import socket\ntry: socket.sethostname('x')\nexcept OSError: pass", True),
    "a listener": ("import socket\nsocket.create_server(('127.0.0.1', 8080))", True),
    "a connection that lingers": ("import socket\ns = socket.create_server(('127.0.0.1', 8080))\nc = socket.create_connection(('127.0.0.1', 8080))\na = s.accept()[0]\nc.close(); a.recv(1); a.close()", False),
    "data nobody has read": ("import socket\ns = socket.create_server(('127.0.0.1', 8080))\nc = socket.create_connection(('127.0.0.1', 8080))\nc.sendall(b'x' * 65536)", True),
    "a datagram": ("import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\ns.bind(('127.0.0.1', 5353))\ns.sendto(b'x', ('127.0.0.1', 5353))", True),
    "a question to the gateway": ("import socket\ntry: socket.getaddrinfo('nowhere.test', 80)\nexcept OSError: pass", False),
    "a request to the gateway": ("import socket\ntry: socket.create_connection(('198.51.100.1', 80), 5).recv(1)\nexcept OSError: pass", False),
    "a tracer": (CALL + "pid = os.fork()\nif not pid:\n    libc.ptrace(0, 0, 0, 0); os._exit(0)\nos.waitpid(pid, 0)\nlibc.ptrace(16, 1, 0, 0)", True),
    "a mount": (CALL + "libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None); libc.unshare(0x10020000)", True),
    "another directory": ("import os\nos.chdir('/usr'); os.umask(0)", True),
    "another name and niceness": ("import os\nos.nice(19)\nfor name in ('comm', 'oom_score_adj'):\n    try: open('/proc/self/' + name, 'w').write('999')\n    except OSError: pass", True),
    "ignored signals": ("import signal\nfor n in (1, 2, 15, 17): signal.signal(n, signal.SIG_IGN)", True),
    "signals to everybody": ("import os, signal\nsignal.signal(15, signal.SIG_IGN)\nfor pid in (1, -1):\n    try: os.kill(pid, 15)\n    except OSError: pass", True),
    "locks and leases on files of the base": ("import fcntl\nf = open('/usr/bin/env', 'rb'); fcntl.flock(f, fcntl.LOCK_EX)", True),
    "a watch": (CALL + "fd = libc.inotify_init(); libc.inotify_add_watch(fd, b'/', 0xfff)", True),
    "a terminal": ("import os, pty\npty.openpty()", True),
    "memory in a file": ("import os\nfd = os.memfd_create('x'); os.write(fd, bytes(1 << 20))", True),
    "a crash": (CALL + "ctypes.string_at(0)", True),
    "an exit code": ("import sys\nsys.exit(3)", True),
    "a death": ("import os\nos.kill(os.getpid(), 9)", True),
    "a limit that it met": ("import os\ntry:\n    pids = []\n    while True:\n        pid = os.fork()\n        if not pid: __import__('time').sleep(600)\n        pids.append(pid)\nexcept OSError: pass\nfor pid in pids: os.kill(pid, 9); os.waitpid(pid, 0)", False),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(host: Host, use: Callable[[Host], Host]) -> Host:
    return use(host)


def program(tenant: str, code: str, **more: Any) -> tuple[Once, Ended]:
    with Once.start(**{"blueprint": Blueprint(), "tenant": tenant, "python": code} | more) as once:
        return once, serve(once)


def test_a_program_that_leaves_nothing_leaves_its_box_to_the_next() -> None:
    tenant = secrets.token_hex(4)
    boxes = [program(tenant, ASK, token=f"t{number}") for number in range(5)]
    assert [ended.stdout for _, ended in boxes] == [b"/t%d/hello" % number for number in range(5)]
    assert [once.reused for once, _ in boxes] == [False, True, True, True, True]
    assert len({once.box for once, _ in boxes}) == 1


@pytest.mark.parametrize("what", LEFT)
def test_the_next_program_finds_a_box_as_new(what: str) -> None:
    code, may_serve = LEFT[what]
    shape = Blueprint(pids=32)
    _, ended = program("fresh", LOOK, reuse=False, blueprint=shape)
    assert ended.stderr == b""
    like_new = json.loads(ended.stdout)
    tenant = secrets.token_hex(4)
    first, _ = program(tenant, "pass", blueprint=shape)
    attack, said = program(tenant, code, blueprint=shape)
    assert attack.reused and attack.box == first.box
    assert said.exit_code in ((0, 3, -9, -11) if may_serve else (0,)), said
    after, ended = program(tenant, LOOK, blueprint=shape)
    if not may_serve:
        assert not after.reused
    assert ended.stderr == b""
    found = json.loads(ended.stdout)
    assert {key: found[key] for key in found if found[key] != like_new[key]} == {}


def test_boxes_are_kept_for_their_tenant_and_shape_alone() -> None:
    one, other = secrets.token_hex(4), secrets.token_hex(4)
    first, _ = program(one, "pass")
    assert not program(other, "pass")[0].reused
    assert not program(one, "pass", blueprint=Blueprint(memory=300 << 20))[0].reused
    assert not program(one, "pass", reuse=False)[0].reused
    again, _ = program(one, "pass")
    assert again.reused and again.box == first.box


@pytest.mark.parametrize(
    "shape", [{"user": "root"}, {"egress": ("nowhere.test",)}, {"wall": 600.0}, {"base": "debian"}]
)
def test_boxes_that_cannot_be_shown_to_be_as_new_are_never_kept(shape: dict[str, Any]) -> None:
    tenant = secrets.token_hex(4)
    for _ in range(2):
        once, ended = program(tenant, "pass", blueprint=Blueprint(**shape))
        assert ended.exit_code == 0 and not once.reused


def test_commands_and_files_and_secrets_have_new_boxes() -> None:
    tenant = secrets.token_hex(4)
    assert program(tenant, "pass")[1].exit_code == 0
    for given in ({"files": {"/home/user/x": b"x"}}, {"secrets": {"KEY": "value"}}):
        for _ in range(2):
            once, ended = program(tenant, "pass", **given)
            assert ended.exit_code == 0 and not once.reused
    with Once.start(blueprint=Blueprint(), tenant=tenant, argv=["true"]) as once:
        assert once.wait().exit_code == 0 and not once.reused


# ---- the channel ----


def test_a_connection_that_nobody_took_is_never_anothers() -> None:
    """The program connects, sends and ends; whoever has the network next must not be asked in its name."""
    tenant = secrets.token_hex(4)
    knock = "import os, socket, urllib.parse\nat = urllib.parse.urlsplit(os.environ['LAYER_URL'])\nfor _ in range(3): socket.create_connection((at.hostname, at.port)).sendall(b'GET /stolen HTTP/1.1\\r\\n\\r\\n')"
    for _ in range(10):
        with Once.start(blueprint=Blueprint(), tenant=tenant, python=knock, token="old") as once:
            assert once.wait().exit_code == 0  # its channel is not looked at
        for owner in (tenant, secrets.token_hex(4)):
            with Once.start(
                blueprint=Blueprint(), tenant=owner, python="import time; time.sleep(0.02)", token="new"
            ) as next_:
                assert next_.wait().exit_code == 0 and next_.channel
                assert not waiting(next_.channel)


def test_a_box_that_was_never_asked_for_its_channel_gives_no_connection_to_the_next() -> None:
    knock = "import socket\nfor _ in range(3): socket.create_connection(('169.254.170.1', 7700)).sendall(b'GET /stolen HTTP/1.1\\r\\n\\r\\n')"
    for _ in range(5):
        with Sandbox.create() as box:
            assert box.python(knock).exit_code == 0
        with Sandbox.create(token="new") as box, box.channel() as listener:
            assert not waiting(listener)


def test_what_a_caller_did_not_take_in_time_can_still_be_taken_before_it_lets_go() -> None:
    last = "import os, socket, urllib.parse\nat = urllib.parse.urlsplit(os.environ['LAYER_URL'])\nsocket.create_connection((at.hostname, at.port)).sendall(b'GET /last HTTP/1.1\\r\\n\\r\\n')"
    with Once.start(blueprint=Blueprint(), tenant="t", python=last, token="x") as once:
        assert once.wait().exit_code == 0 and once.channel
        connection, _ = once.channel.accept()
        with connection:
            assert connection.recv(100).startswith(b"GET /last")


def test_a_caller_that_dies_takes_its_program_and_box_along(host: Host) -> None:
    code = """
from livinglayer.sandbox import Blueprint
from livinglayer.sandbox.once import Once
import os, signal
once = Once.start(blueprint=Blueprint(), tenant="t", python="import time; time.sleep(600)", token="x", labels={"of": "the dead"})
os.kill(os.getpid(), signal.SIGKILL)
"""
    host.python(code)
    wait_until(lambda: not Sandbox.list(labels={"of": "the dead"}), "its box is gone")


def test_the_channel_of_a_named_box_is_there_after_a_restart(own_host: Host) -> None:
    name = f"n{secrets.token_hex(4)}"
    Sandbox.create(name=name, token="kept", labels={"kind": "worker"})
    own_host.hang_up()
    own_host.stop()
    [box] = Sandbox.list(labels={"kind": "worker"})
    assert box.name == name
    asking = box.start(["python3", "-c", ASK])
    with box.channel() as listener:
        assert waiting(listener, 20) and answer(listener)
    assert asking.wait().stdout == "/kept/hello"
    box.kill()


# ---- one host after many programs ----


@pytest.fixture(scope="module")
def quiet() -> Iterator[Home]:
    """A host of its own, of which everything is counted."""
    with home() as made:
        yield made
        close_connections(made.state)


def test_nothing_is_left_of_programs(quiet: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in quiet.environment().items():
        monkeypatch.setenv(name, value)

    def churn() -> None:
        for number in range(10):
            run(python=ASK, token="t", tenant=f"tenant-{number % 3}")
            run(python="open('/tmp/x', 'w')", token="t")
            run(argv=["true"], token="t")
            run(python="import time; time.sleep(60)", timeout=0.05, token="t")
            with Once.start(blueprint=Blueprint(), tenant="t", python="import time; time.sleep(60)", token="t"):
                pass  # let go of while it runs
            with pytest.raises(Invalid):
                Once.start(blueprint=Blueprint(base="host"), tenant="t", python="pass", timeout=-1)

    churn()
    churn()
    wait_until(lambda: not quiet.left_since(quiet.census(), 1), "all is quiet", 60)
    before = quiet.census()
    churn()
    spare = ("disk/tmp", "quota groups")  # directories of boxes that wrote nothing are kept for the next
    assert {what: more for what, more in quiet.left_since(before, 20).items() if what not in spare} == {}
    assert all(path.name.startswith("spare-") for path in (quiet.state / "disk/tmp").iterdir())


def test_a_host_that_dies_is_told_of(own_host: Host) -> None:
    with Once.start(blueprint=Blueprint(), tenant="t", python="import time; time.sleep(600)", token="x") as once:
        own_host.crash()
        with pytest.raises(Unavailable, match="hung up"):
            once.wait()
    assert program("t", "pass")[1].exit_code == 0  # and started again
