"""The zygote: a Python of the host's that forks itself into boxes, so that their code starts without an interpreter's start.

Run by the system's python3 with nothing of ours but this file: `python3 THIS CONTROL LIBENTER FILTER`, all four by fd, so that no path
of the host's is in its memory. It holds no secret, reads no request but its host's, and a child runs no line of a caller's before it is
inside the box. A child has all that its parent has in memory: so the parent never looks into a request, and wipes it at once.
"""

import array
import ctypes
import gc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import types
from typing import Any, NoReturn

# What code in a box tends to import; loaded once, shared by every child.
for name in ("json", "re", "math", "random", "datetime", "collections", "itertools", "functools", "pathlib", "subprocess", "hashlib", "base64",
             "tempfile", "shutil", "urllib.request", "urllib.parse", "typing", "dataclasses", "csv", "io", "time", "traceback", "threading", "string",
             "decimal", "statistics", "uuid", "textwrap", "contextlib", "asyncio", "sqlite3", "logging"):  # fmt: skip
    try:
        __import__(name)
    except ImportError:
        pass

CLONE_NEWPID = 0x20000000
INSIDE = "/opt/livinglayer"


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def child(data: bytes, fds: list[int], join: Any, program: Program) -> NoReturn:
    """Enter the box, then run the code as `python3 -c` would. Never returns."""
    code = 1
    try:
        size, aside = struct.unpack_from("<II", data)
        request, source = json.loads(data[8 : 8 + size]), data[8 + size :]
        pidfd, root, stdin, stdout, stderr, *tasks = fds
        if aside:
            with open(tasks.pop(0), "rb") as file:
                source = file.read()
        step = ctypes.c_char_p()
        numbers = (ctypes.c_int * len(tasks))(*tasks)
        who = (request["uid"], request["gid"], request["alone"])
        if join(pidfd, root, numbers, len(tasks), *who, ctypes.byref(program), ctypes.byref(step)):
            os.write(stderr, b"the box could not be joined: " + (step.value or b"") + b"\n")
            os._exit(125)
        for target, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, target)
        os.closerange(3, 4096)
        for usual in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(usual, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        os.umask(0o022)
        for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
            stream = open(
                number,
                mode,
                encoding="utf-8",
                errors="surrogateescape" if number == 0 else "backslashreplace" if number == 2 else "strict",
                closefd=False,
                buffering=1 if number == 2 else -1,
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        sys.argv[:] = ["-c", *request["args"]]
        sys.path[:0] = ["", *filter(None, request["env"].get("PYTHONPATH", "").split(":"))]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        gc.enable()
        try:
            exec(compile(source, "<string>", "exec"), main.__dict__)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            if code == 1 and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        except BaseException as raised:
            trace = raised.__traceback__.tb_next if raised.__traceback__ else None  # from the caller's own code on
            sys.excepthook(type(raised), raised.with_traceback(trace), trace)
            code = 130 if isinstance(raised, KeyboardInterrupt) else 1
        threading = sys.modules["threading"]
        threading._shutdown()
        import atexit

        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 120
    except BaseException as error:
        try:
            os.write(2, f"zygote: {error!r}\n".encode())
        except OSError:
            pass
    finally:
        os._exit(code & 0xFF)


def preload(fds: dict[str, int]) -> None:
    """Our own modules that boxes have at /opt/livinglayer, as if imported from there."""
    for name, fd in fds.items():
        with open(fd, "rb") as file:
            source = file.read()
        path = f"{INSIDE}/{name}.py"
        spec = importlib.machinery.ModuleSpec(name, importlib.machinery.SourceFileLoader(name, path), origin=path)
        spec.has_location = True
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            exec(compile(source, path, "exec"), module.__dict__)
        except Exception as error:
            del sys.modules[name]
            sys.stderr.write(f"zygote: {name} is not preloaded: {error!r}\n")


def forget_arguments() -> None:
    """Our own command line, which a box would see as that of its Python."""
    with open("/proc/self/stat", "rb") as file:
        start, end = file.read().rpartition(b")")[2].split()[45:47]
    name = b"python3"
    ctypes.memset(int(start), 0, int(end) - int(start))
    ctypes.memmove(int(start), name, len(name))
    sys.orig_argv[:] = sys.argv[:] = [name.decode()]


def main() -> None:
    """Serve the host until it hangs up."""
    number, library_fd, filter_fd = (int(text) for text in sys.argv[1:4])
    rest = sys.argv[4:]  # fds of modules, then their names
    preload(dict(zip(rest[len(rest) // 2 :], map(int, rest), strict=False)))
    control = socket.socket(fileno=number)
    library = ctypes.PyDLL(f"/proc/self/fd/{library_fd}", use_errno=True)
    libc = ctypes.PyDLL(None, use_errno=True)
    with open(filter_fd, "rb") as file:
        instructions = file.read()
    os.close(library_fd)
    forget_arguments()
    held = ctypes.create_string_buffer(instructions, len(instructions))
    program = Program(len(instructions) // 8, ctypes.cast(held, ctypes.c_void_p))
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no zygote without its host
    message = bytearray(1 << 20)
    gc.collect()
    gc.freeze()
    gc.disable()
    waits = select.poll()
    waits.register(control, select.POLLIN)
    waits.register(readable, select.POLLIN)
    while True:
        for fd, _ in waits.poll():
            if fd == readable:
                os.read(readable, 4096)
                while True:
                    try:
                        pid, status, usage = os.wait4(-1, os.WNOHANG)
                    except ChildProcessError:
                        break
                    if not pid:
                        break
                    serial = running.pop(pid, None)
                    if serial is not None:
                        control.send(
                            json.dumps(
                                {
                                    "serial": serial,
                                    "status": status,
                                    "user": usage.ru_utime,
                                    "system": usage.ru_stime,
                                    "resident": usage.ru_maxrss * 1024,
                                }
                            ).encode()
                        )
                continue
            size, ancillary, _, _ = control.recvmsg_into([message], socket.CMSG_SPACE(4 * 32), socket.MSG_CMSG_CLOEXEC)
            if not size:
                os._exit(0)
            fds = array.array("i")
            for _, _, raw in ancillary:
                fds.frombytes(raw[: len(raw) // 4 * 4])
            wanted, number = struct.unpack_from(
                "<II", message
            )  # the request's serial, and 0 or a signal for what it started
            if number:
                for pid, serial in running.items():
                    if serial == wanted:
                        try:
                            os.killpg(pid, number)  # its group too: it leads a session
                        except (ProcessLookupError, ValueError):
                            pass
                continue
            failed = False
            if libc.setns(fds[0], CLONE_NEWPID):  # children of ours are born in the box's own numbering
                failed = True
            else:
                try:
                    pid = os.fork()
                    if pid == 0:
                        control.close()
                        running.clear()
                        child(bytes(message[8:size]), list(fds), library.box_join, program)
                    running[pid] = wanted
                    control.send(json.dumps({"serial": wanted, "pid": pid}).encode())
                except OSError:
                    failed = True
                libc.setns(own, CLONE_NEWPID)
            message[:size] = bytes(size)
            for fd in fds:
                os.close(fd)
            if failed:
                control.send(
                    json.dumps({"serial": wanted, "status": 125 << 8, "user": 0, "system": 0, "resident": 0}).encode()
                )


if __name__ == "__main__":
    main()
