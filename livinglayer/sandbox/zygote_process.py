"""The zygote: a Python of the host's that forks itself into boxes, so that their code starts without an interpreter's start.

Run by the system's python3 with nothing of ours but this file: `python3 THIS CONTROL LIBENTER FILTER`, all four by fd, so that no path
of the host's is in its memory. It holds no secret, reads no request but its host's, and a child runs no line of a caller's before it is
inside the box. A child has all that its parent has in memory: so the parent never looks into a request, and wipes it at once.
"""

import _random
import atexit
import ctypes
import functools
import gc
import importlib.machinery
import importlib.util
import os
import random
import signal
import struct
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

# What code in a box tends to import; loaded once, shared by every child. What a child does not need costs it, too: so there are three of us.
USUAL = (
    "json", "re", "math", "random", "datetime", "collections", "itertools", "functools", "typing", "io", "time", "traceback", "threading",
    "string", "contextlib", "textwrap", "linecache", "copy", "enum", "operator", "bisect", "heapq", "uuid", "_sha3",
)  # fmt: skip
MORE = (
    "pathlib", "subprocess", "hashlib", "base64", "tempfile", "shutil", "urllib.request", "urllib.parse", "dataclasses", "csv", "decimal",
    "statistics", "asyncio", "sqlite3", "logging", "socket", "ssl", "http.client",
)  # fmt: skip
KERNEL = (
    "ipykernel.kernelapp",
    "ipykernel.zmqshell",
    "jupyter_client.session",
    "matplotlib_inline.backend_inline",
    "matplotlib.pyplot",
    "pandas",
)

REQUEST = struct.Struct("<IIII")  # of native/zygote.c
HEAD, ASIDE = 32, 2  # bytes before the working directory; a flag: the code comes as a file
INSIDE = "/opt/livinglayer"
PATH = INSIDE.encode()
COLLAPSE, HUGE = 25, 2 << 20  # MADV_COLLAPSE
GATHERED = 8 << 20  # bytes


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def child(message: bytearray, size: int, names: dict[str, Any], reseed: Callable[[], None]) -> NoReturn:
    """Run the code as `python3 -c` would, inside the box already. Never returns. Every object it touches is a page to copy, so it touches few."""
    code = 1
    try:
        flags, cwd, environment, arguments = REQUEST.unpack_from(message, 16)
        at = HEAD + cwd
        block = bytes(message[at : at + environment])
        own = dict([one.split(b"=", 1) for one in block.split(b"\0")[:-1]])
        os.environ._data = os.environb._data = own  # type: ignore[attr-defined]
        at += environment
        if arguments:
            words = bytes(message[at : at + arguments]).split(b"\0")[:-1]
            sys.argv[1:] = [word.decode("utf-8", "surrogateescape") for word in words]
        source = bytes(message[at + arguments : size])
        if flags & ASIDE:
            with open(3, "rb") as file:
                source = file.read()
        path = own.get(b"PYTHONPATH")
        if path != PATH:
            sys.path[1:2] = os.fsdecode(path).split(":") if path else []
        reseed()
        gc.enable()
        try:
            exec(compile(source, "<string>", "exec"), names)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            if code == 1 and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        except BaseException as raised:
            trace = raised.__traceback__.tb_next if raised.__traceback__ else None  # from the caller's own code on
            sys.excepthook(type(raised), raised.with_traceback(trace), trace)
            code = 130 if isinstance(raised, KeyboardInterrupt) else 1
        if len(threading._active) > 1 or threading._shutdown_locks:  # type: ignore[attr-defined]
            threading._shutdown()  # type: ignore[attr-defined]
        if atexit._ncallbacks():
            atexit._run_exitfuncs()
        logging = sys.modules.get("logging")
        if logging and logging._handlerList:
            logging.shutdown()
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


def prepare() -> None:
    """All that a child would do the same way: done once, here."""
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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = ["-c"]
    sys.path[:0] = ["", INSIDE]
    threading._main_thread._native_id = None  # type: ignore[attr-defined]  # ours is nobody's business
    atexit._clear()  # what modules of ours wanted at their end is seen to by whoever ends


def gather() -> list[bytes]:
    """Have Python take the memory it will need in one piece, so that it can be made of large pages; what is returned must be kept."""
    blocks = [bytes(480) for _ in range(GATHERED // 512)]
    return blocks[:: (1 << 20) // 512 // 2]  # something in each arena of a megabyte keeps it


def join_pages() -> None:
    """Make large pages of our memory where the kernel can: a fork copies one entry for each page."""
    libc = ctypes.PyDLL(None)
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        words = line.split()
        if words[1] == "rw-p" and (len(words) == 5 or words[5] == "[heap]"):
            start, end = (int(number, 16) for number in words[0].split("-"))
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if start < end:
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), COLLAPSE)


def load(names: tuple[str, ...]) -> None:
    """Import what there is of some modules."""
    for name in names:
        try:
            __import__(name)
        except ImportError:
            pass


def load_kernels() -> None:
    """What a code interpreter needs; matplotlib makes a directory for the lack of a home, and complains of that."""
    import logging
    import shutil

    log = logging.getLogger("matplotlib")
    log.setLevel(logging.CRITICAL)
    load(KERNEL)
    log.setLevel(logging.NOTSET)
    if made := os.environ.get("MPLCONFIGDIR"):
        shutil.rmtree(made)


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
    if "layer" in sys.modules and "layer_run" in sys.modules:
        sys.modules["layer"]._warm()


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
    number, library_fd, filter_fd, more = (int(text) for text in sys.argv[1:5])
    rest = sys.argv[5:]  # fds of modules, then their names
    pieces = gather()
    load((*USUAL, *(MORE if more else ())))
    if more > 1:
        load_kernels()
    preload(dict(zip(rest[len(rest) // 2 :], map(int, rest), strict=False)))
    library = ctypes.PyDLL(f"/proc/self/fd/{library_fd}", use_errno=True)
    with open(filter_fd, "rb") as file:
        instructions = file.read()
    os.close(library_fd)
    forget_arguments()
    held = ctypes.create_string_buffer(instructions, len(instructions))
    program = Program(len(instructions) // 8, ctypes.cast(held, ctypes.c_void_p))
    ctypes.PyDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no zygote without its host
    message = bytearray(1 << 20)
    place = (ctypes.c_char * len(message)).from_buffer(message)
    size, step = ctypes.c_size_t(), ctypes.c_char_p()
    prepare()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    reseed = functools.partial(_random.Random.seed, random._inst)
    gc.collect()
    gc.freeze()
    gc.disable()
    join_pages()
    assert pieces
    serve = library.box_serve
    given = (
        number,
        ctypes.byref(program),
        place,
        ctypes.c_size_t(len(message)),
        ctypes.byref(size),
        ctypes.byref(step),
    )
    if serve(*given):  # from here on a child
        problem = os.strerror(ctypes.get_errno())
        os.write(2, b"the box could not be joined: %b: %b\n" % (step.value or b"", problem.encode()))
        os._exit(125)
    child(message, size.value, main.__dict__, reseed)


if __name__ == "__main__":
    main()
