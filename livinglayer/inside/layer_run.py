"""The harness of functions: runs one function in this process, with a clock and chance that can be had again.

`python3 -c "import layer; layer._main()"` reads one JSON object from stdin: {"code", "name", "arguments", "seed", "clock",
"tape"}. The function's value, or the error it ended with, goes to the layer as POST /return, and the process ends with 0,
1 (the function failed) or 2 (nothing could be returned).
"""

from __future__ import annotations

import _thread
import os
import sys
import time
from itertools import count

import layer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, NoReturn

TAPE_LENGTH = 10_000  # readings of clocks that are kept; a program that looks more often can't be replayed
TRACEBACK_LENGTH = 20_000

# Modules that wait with these clocks, for themselves: what they read is nobody's result and would only blur the tape.
WAITING = frozenset(
    (
        "threading", "queue", "selectors", "subprocess", "socketserver", "sched", "asyncio.base_events", "asyncio.timeouts",
        "concurrent.futures._base", "concurrent.futures.thread", "concurrent.futures.process", "multiprocessing.connection",
        "multiprocessing.popen_fork", "multiprocessing.queues", "multiprocessing.synchronize", "multiprocessing.pool",
    )
)  # fmt: skip

# The clocks as they are, before anybody has replaced them.
_real_time_ns, _real_steady_ns, _real_cpu_ns, _real_sleep = (
    time.time_ns,
    time.monotonic_ns,
    time.process_time_ns,
    time.sleep,
)
_real_localtime, _real_gmtime, _real_strftime = time.localtime, time.gmtime, time.strftime
_real_ctime, _real_asctime = time.ctime, time.asctime


def warm() -> None:
    """Load what a function's start needs, ahead of it."""
    import _sha3
    import datetime
    import linecache
    import random
    import traceback
    import types
    import uuid

    tame_datetime(datetime)
    del datetime, linecache, random, traceback, types, uuid, _sha3


# -- the tape ---------------------------------------------------------------------------------------------------------


class Tape:
    """The clocks and the chance of one run: recorded, or with a tape given, the same again."""

    def __init__(self, seed: str, clock: str | None, given: dict[str, Any] | None) -> None:
        self.replaying = given is not None
        given = given or {}
        self.begun = clock or given.get("start")
        self.zero, self.cpu_zero = _real_steady_ns(), _real_cpu_ns()
        self.start = instant(self.begun) if self.begun else _real_time_ns() // 1000 * 1000
        self.clock = clock
        self.given = {kind: list(reversed(given.get(kind) or ())) for kind in ("wall", "steady", "cpu")}
        self.kept: dict[str, list[int]] = {"wall": [], "steady": [], "cpu": []}
        self.last = {"wall": 0, "steady": 0, "cpu": 0}
        self.room, self.overflow = TAPE_LENGTH, False
        self.untamed: list[str] = []
        self.key = b"livinglayer " + str(seed).encode("utf-8", "surrogatepass")
        self.forks, self.draws = count(1), count(1)
        self.lock = _thread.RLock()

    def values(self) -> dict[str, Any]:
        """What is kept of the run: for each clock the nanoseconds from one reading to the next, the first from the start."""
        kept: dict[str, Any] = {kind: values for kind, values in self.kept.items() if values}
        if not self.clock:
            seconds, parts = divmod(self.start // 1000, 1_000_000)
            kept["start"] = _real_strftime("%Y-%m-%dT%H:%M:%S", _real_gmtime(seconds)) + f".{parts:06d}Z"
        if self.overflow:
            kept["overflow"] = True
        if self.untamed:
            kept["untamed"] = self.untamed
        return kept

    def read(self, kind: str, elapsed: int) -> int:
        with self.lock:
            last, given = self.last[kind], self.given[kind]
            elapsed = last + given.pop() if given else max(last, elapsed)
            self.last[kind] = elapsed
            if self.room:
                self.room -= 1
                self.kept[kind].append(elapsed - last)
            else:
                self.overflow = True
            return elapsed

    def wall(self) -> int:
        return self.start + self.read("wall", _real_steady_ns() - self.zero)

    def steady(self) -> int:
        # starts at a second, not at 0: programs take 0 for "never"
        return 1_000_000_000 + self.read("steady", _real_steady_ns() - self.zero)

    def cpu(self) -> int:
        return self.read("cpu", _real_cpu_ns() - self.cpu_zero)

    def draw(self, size: int, of: str | None = None) -> bytes:
        """The next bytes of the seed's stream; those `of` a name are always the same."""
        if size < 0:
            raise ValueError("negative argument not allowed")
        from _sha3 import shake_256

        return shake_256(self.key + b"\0" + (of or str(next(self.draws))).encode()).digest(size)

    def number(self, of: str | None = None) -> int:
        return int.from_bytes(self.draw(32, of), "big")

    # -- in the place of the real ones

    def install(self) -> None:
        """Put this tape in the place of every clock and every source of chance of this interpreter."""
        self._tame_time()
        os.urandom = self.draw
        if hasattr(os, "getrandom"):
            os.getrandom = self._getrandom
        os.register_at_fork(before=self._forking, after_in_child=self._forked)
        self.fork = 0
        later: dict[str, Callable[[Any], None]] = {
            "datetime": self._tame_datetime, "random": self._tame_random, "uuid": self._tame_uuid,
        }  # fmt: skip
        for name in list(later):
            if name in sys.modules:
                later.pop(name)(sys.modules[name])
        if later:
            sys.meta_path.insert(0, Watch(later))

    def _getrandom(self, size: int, flags: int = 0) -> bytes:
        return self.draw(size)

    def _forking(self) -> None:
        self.fork = next(self.forks)

    def _forked(self) -> None:
        """A child draws other bytes than its parent, and the same in every run."""
        self.lock = _thread.RLock()
        self.key += b" child %d" % self.fork
        self.forks, self.draws = count(1), count(1)

    def _tame_time(self) -> None:
        """Bound methods, because they stay as they are when somebody makes one an attribute of a class, as C functions do."""
        frame = sys._getframe

        def monotonic_ns(tape: Tape) -> int:
            return tape.steady() if frame(1).f_globals.get("__name__") not in WAITING else _real_steady_ns()

        def monotonic(tape: Tape) -> float:
            return (tape.steady() if frame(1).f_globals.get("__name__") not in WAITING else _real_steady_ns()) / 1e9

        def sleep(tape: Tape, seconds: float, /) -> None:
            if not tape.replaying or frame(1).f_globals.get("__name__") in WAITING:
                _real_sleep(seconds)
            elif seconds < 0:
                raise ValueError("sleep length must be non-negative")

        def clock_gettime_ns(tape: Tape, clock: int, /) -> int:
            if clock in (time.CLOCK_REALTIME, getattr(time, "CLOCK_TAI", -1), 5):  # 5: CLOCK_REALTIME_COARSE
                return tape.wall()
            return (
                tape.cpu() if clock in (time.CLOCK_PROCESS_CPUTIME_ID, time.CLOCK_THREAD_CPUTIME_ID) else tape.steady()
            )

        def local(tape: Tape, moment: Any) -> Any:
            return _real_localtime(tape.wall() / 1e9) if moment is None else moment

        replaced: dict[str, Any] = {
            "time": lambda tape: tape.wall() / 1e9,
            "time_ns": lambda tape: tape.wall(),
            "monotonic": monotonic,
            "monotonic_ns": monotonic_ns,
            "perf_counter": lambda tape: tape.steady() / 1e9,
            "perf_counter_ns": lambda tape: tape.steady(),
            "process_time": lambda tape: tape.cpu() / 1e9,
            "process_time_ns": lambda tape: tape.cpu(),
            "thread_time": lambda tape: tape.cpu() / 1e9,
            "thread_time_ns": lambda tape: tape.cpu(),
            "clock_gettime": lambda tape, clock: clock_gettime_ns(tape, clock) / 1e9,
            "clock_gettime_ns": clock_gettime_ns,
            "localtime": lambda tape, at=None: _real_localtime(tape.wall() / 1e9 if at is None else at),
            "gmtime": lambda tape, at=None: _real_gmtime(tape.wall() / 1e9 if at is None else at),
            "ctime": lambda tape, at=None: _real_ctime(tape.wall() / 1e9 if at is None else at),
            "asctime": lambda tape, at=None: _real_asctime(local(tape, at)),
            "strftime": lambda tape, form, at=None: _real_strftime(form, local(tape, at)),
            "sleep": sleep,
        }
        from types import MethodType

        for name, function in replaced.items():
            if hasattr(time, name):
                function.__name__ = function.__qualname__ = name
                setattr(time, name, MethodType(function, self))

    def _tame_datetime(self, module: Any) -> None:
        global _current
        self.untamed += tame_datetime(module)
        _current = self

    def _tame_random(self, module: Any) -> None:
        plainly = module.Random.seed

        def seed(generator: Any, a: Any = None, version: int = 2) -> None:
            plainly(generator, self.number() if a is None else a, version)

        module.Random.seed = seed
        module._urandom = self.draw
        module.seed = module._inst.seed
        module.seed(self.number("random"))
        os.register_at_fork(after_in_child=lambda: module.seed(self.number("random")))

    def _tame_uuid(self, module: Any) -> None:
        module._generate_time_safe = module._UuidCreate = None
        module._has_uuid_generate_time_safe = False  # Python 3.8 looks for it at first use
        module._node = self.number("node") & 0xFFFFFFFFFFFF | 1 << 40  # multicast: no network card has it


_current: Tape | None = None  # whose time it is; None: the real one
_untamed: list[str] | None = None  # what could not be changed, once that was tried


def tame_datetime(module: Any) -> list[str]:
    """Other methods in the same classes, so that it does not matter who imported them when. They tell the real time until there is a tape.

    Done ahead where a process is forked for each function: making an interpreter forget what it knows of all its classes is dear.
    """
    global _untamed
    if _untamed is not None:
        return _untamed
    utc = module.timezone.utc
    real = {
        (kind, name): kind.__dict__[name]
        for kind, name in ((module.date, "today"), (module.datetime, "now"), (module.datetime, "utcnow"))
    }

    def now(cls: Any, tz: Any = None) -> Any:
        if _current is None:
            return real[module.datetime, "now"].__get__(None, cls)(tz)
        seconds, parts = divmod(_current.wall(), 1_000_000_000)
        return cls.fromtimestamp(seconds, tz).replace(microsecond=parts // 1000)

    def utcnow(cls: Any) -> Any:
        if _current is None:
            return real[module.datetime, "utcnow"].__get__(None, cls)()
        return now(cls, utc).replace(tzinfo=None)

    def today(cls: Any) -> Any:
        if issubclass(cls, module.datetime):
            return now(cls)
        if _current is None:
            return real[module.date, "today"].__get__(None, cls)()
        return cls.fromtimestamp(_current.wall() // 1_000_000_000)

    _untamed = []
    for kind, method in ((module.date, today), (module.datetime, now), (module.datetime, utcnow)):
        replace(kind, method.__name__, method)
        if getattr(getattr(kind, method.__name__), "__func__", None) is not method:
            _untamed.append(f"datetime.{kind.__name__}.{method.__name__}")
    return _untamed


class Watch:
    """An importer that waits for a few modules, and changes them once they are loaded."""

    def __init__(self, waiting: dict[str, Callable[[Any], None]]) -> None:
        self.waiting = waiting

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module as it would be found anyway, with what is to happen after it has run."""
        if name not in self.waiting:
            return None
        tame = self.waiting.pop(name)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                wrapped: Any = Wrapped(spec.loader, tame)
                spec.loader = wrapped
                return spec
        return None


class Wrapped:
    """A loader, and what is to happen to the module after it."""

    def __init__(self, loader: Any, tame: Callable[[Any], None]) -> None:
        self.loader, self.tame = loader, tame

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.tame(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def replace(kind: type, name: str, method: Any) -> None:
    """Give a class another class method, also one that is written in C and takes none."""
    try:
        setattr(kind, name, classmethod(method))
    except TypeError:
        import gc

        members: Any = gc.get_referents(kind.__dict__)[0]
        members[name] = classmethod(method)
        sys._clear_type_cache()


def instant(text: str) -> int:
    """The nanoseconds since 1970 of a time in ISO 8601; without a zone it is UTC. Any Python, no import."""
    try:
        day, _, clock = text.strip().replace(" ", "T").partition("T")
        year, month, date = (int(part) for part in day.split("-"))
        offset = 0
        if clock.endswith(("Z", "z")):
            clock = clock[:-1]
        else:
            for sign in "+-":
                if sign in clock:
                    clock, _, zone = clock.partition(sign)
                    hours, _, minutes = zone.partition(":")
                    offset = (int(hours[:2]) * 60 + int(minutes or hours[2:] or 0)) * (60 if sign == "+" else -60)
        clock, _, parts = clock.partition(".")
        hour, minute, second = ([int(part) for part in clock.split(":")] if clock else []) + [0] * (
            3 - (len(clock.split(":")) if clock else 0)
        )
        shifted = year - (month <= 2)
        era, of_era = divmod(shifted, 400)
        of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + date - 1
        days = era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468
        seconds = days * 86400 + hour * 3600 + minute * 60 + second - offset
        return seconds * 1_000_000_000 + int((parts + "000000000")[:9])
    except (AttributeError, ValueError):
        raise layer.Invalid(f"the clock {text!r} is no time in ISO 8601") from None


# -- one function -----------------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Run the function that stdin describes, send what it returns to the layer, and end the process."""
    status = 2
    try:
        status = serve()
    except layer.LayerError as error:
        _say(f"layer: {error}")
    except BaseException as error:
        _say(f"layer: the harness failed: {error!r}")
    finally:
        os._exit(status)  # at once: taking an interpreter down takes longer than most functions


def serve() -> int:
    request = _request()
    name = str(request.get("name") or "function")
    tape = None
    try:
        if request.get("seed") is not None:
            tape = Tape(str(request["seed"]), request.get("clock"), request.get("tape"))
            tape.install()
        answer = b'{"value":' + layer._encode(run(name, request), "the result")
        status = 0
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            answer, status = b'{"value":null', 0
        else:
            answer, status = b'{"error":' + layer._encode(described(error, name), "the error"), 1
    status |= _finish()
    end = b',"tape":' + layer._encode(tape.values() if tape else None, "the tape") + b"}"
    try:
        _return(answer + end)
    except layer.LayerError as error:
        # A value that the layer does not take (too large, the wrong type) is an error of the function.
        if status or isinstance(error, (layer.Unavailable, layer.TimedOut, layer.Unauthenticated)):
            raise
        _return(b'{"error":' + layer._encode(described(error, name), "the error") + end)
        return 1
    return status


def _request() -> dict[str, Any]:
    pieces = []
    while True:
        piece = os.read(0, 1 << 20)
        if not piece:
            break
        pieces.append(piece)
    layer._load_json()
    try:
        request = layer._loads(b"".join(pieces))
        if not isinstance(request, dict) or not isinstance(request.get("code"), str):
            raise ValueError
    except (ValueError, RecursionError):
        raise layer.Invalid('stdin is not a JSON object with the "code" of a function') from None
    return request


def _return(body: bytes) -> None:
    layer._exchange("POST", "/return", body, len(body))


def _finish() -> int:
    """What happens at the end of a program, before its result is told: callbacks of atexit, the rest of its output."""
    import atexit

    try:
        atexit._run_exitfuncs()
    except BaseException as error:
        _say(f"layer: at exit: {error!r}")
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    return 0


def _say(sentence: str) -> None:
    try:
        os.write(2, sentence.encode("utf-8", "backslashreplace") + b"\n")
    except OSError:
        pass


def run(name: str, request: dict[str, Any]) -> Any:
    """The value of the function; a coroutine is awaited, a generator becomes a list."""
    import linecache
    import types

    code = request["code"]
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    # Below `function`, so that it hides no module that the code imports; with those above it, so that pickle finds it.
    parts = f"function.{name}".split(".")
    for size in range(1, len(parts) + 1):
        module = sys.modules[".".join(parts[:size])] = types.ModuleType(".".join(parts[:size]))
        module.__path__ = []
    sys.argv[:] = [name]
    exec(compile(code, name, "exec", dont_inherit=True), module.__dict__)
    arguments = request.get("arguments")
    value = function_of(module, name)(**(arguments or {}))
    if hasattr(value, "__await__"):
        import asyncio

        return asyncio.run(_settle(value))
    if hasattr(value, "__aiter__") and hasattr(value, "__anext__"):
        import asyncio

        return asyncio.run(_gather(value))
    return list(value) if isinstance(value, types.GeneratorType) else value


async def _settle(value: Any) -> Any:
    return await value


async def _gather(value: Any) -> list[Any]:
    return [item async for item in value]


def function_of(module: ModuleType, name: str) -> Callable[..., Any]:
    """`main`, else the function named like the last part of the name, else the only one that is defined."""
    names = vars(module)
    last = name.rpartition(".")[2]
    for wanted in ("main", last):
        if callable(names.get(wanted)):
            return names[wanted]
    defined = [
        value
        for key, value in names.items()
        if not key.startswith("_") and hasattr(value, "__code__") and value.__module__ == module.__name__
    ]
    if len(defined) != 1:
        found = ", ".join(value.__name__ for value in defined) or "none"
        wanted = "main" if last == "main" else f"main or {last}"
        raise layer.Invalid(f"the code of {name!r} has no function {wanted}, and not exactly one other: {found}")
    return defined[0]


def described(error: BaseException, name: str) -> dict[str, Any]:
    """What is told of an error: its type, its message, and where in the function it came from."""
    kind = type(error)
    module = kind.__module__
    known = module in ("builtins", "layer", "__main__", f"function.{name}")
    told: dict[str, Any] = {"type": kind.__qualname__ if known else f"{module}.{kind.__qualname__}"}
    try:
        told["message"] = str(error)
    except BaseException:
        told["message"] = "the message of this error can't be shown"
    if isinstance(error, SystemExit):
        told["message"] = f"exit code {error.code}" if isinstance(error.code, int) else str(error.code)
    if isinstance(error, layer.LayerError):
        told.update(code=error.code, hint=error.hint, rows=error.rows)
    if len(told["message"]) > TRACEBACK_LENGTH:
        told["message"] = told["message"][: TRACEBACK_LENGTH - 1] + "…"
    try:
        told["traceback"] = _traceback(error)
    except BaseException:
        told["traceback"] = ""
    try:
        layer._encode(told, "the error")
    except layer.Invalid:
        told = {key: str(told[key]) for key in ("type", "message", "traceback")}
    return told


def _traceback(error: BaseException) -> str:
    import traceback

    library = os.path.dirname(os.__file__)
    ours = (main.__code__.co_filename, layer._main.__code__.co_filename)  # whatever they were loaded from

    def own(path: str) -> bool:
        return not (
            path in ours or path.startswith((library, "<frozen ")) or "-packages/" in path or path == "<string>"
        )

    summary = traceback.TracebackException(type(error), error, error.__traceback__)
    waiting: list[traceback.TracebackException | None] = [summary]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        part.stack[:] = [frame for frame in part.stack if own(frame.filename)]
        waiting += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
    text = "".join(summary.format())
    half = TRACEBACK_LENGTH // 2
    return text if len(text) <= TRACEBACK_LENGTH else f"{text[:half]}\n  …\n{text[-half:]}"
