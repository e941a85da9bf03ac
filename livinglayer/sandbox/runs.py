"""One program in a box of its own, the host's side of once.py: the box is taken or made, the program run, told of, and the box let go of."""

import asyncio
import contextlib
import hashlib
import json
import os
import stat
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ..errors import Invalid, LayerError, LimitExceeded, Unavailable
from .blueprint import VIRTUAL, Blueprint, check_variable
from .box import Box, environment
from .changes import of_upper
from .commands import Command, Stream, encode_exec, exec_flags
from .host import Host, check_labels
from .keeping import keepable
from .layers import chain_of
from .wire import DONE, EXIT, PAYLOAD_MAX, STARTED, STDERR, STDOUT, Kind

BODY_MAX = 256 << 20  # bytes of code, files and input together
EVENTS = ("network", "secret", "limit")
EVENTS_MAX = 10_000
PROGRAMS = (
    "/var/lib/dpkg/status",
    "/var/lib/rpm",
    "/lib/apk/db/installed",
    "/usr/bin/python3",
)  # they change with the host's programs
CHANGES_MAX = 10_000
DIGESTED = 256 << 20  # bytes of changed files that are read for their digests
SCANNED = 1 << 20  # bytes of input that are looked at for names of modules
BRIEF = 0.05  # seconds; what runs longer is measured by its cgroup, too
# Code that is too long for a command line comes before the program's own input.
LONG = """import os
def _code(left):
    while left:
        piece = os.read(0, min(left, 65536))
        if not piece: break
        left -= len(piece)
        yield piece
_code = compile(b"".join(_code({size})), "<string>", "exec")
del os
exec(_code, globals())
"""
_shapes: dict[str, Blueprint] = {}


class Link(Protocol):
    """What a run uses of its client's connection."""

    gone: bool

    @property
    def stream(self) -> Stream | None: ...
    @stream.setter
    def stream(self, stream: Stream | None) -> None: ...
    def send(self, kind: int, payload: bytes = b"") -> None: ...
    def send_fds(self, kind: int, payload: bytes, fds: list[int]) -> None: ...
    def result(self, value: Any) -> None: ...
    def error(self, error: LayerError, **more: Any) -> None: ...
    @property
    def say(self) -> Callable[[str], None]: ...


class Run(Stream):
    """A program from its request to the moment its caller lets go of the box."""

    def __init__(self, connection: Link, host: Host, request: dict[str, Any]) -> None:
        self._connection, self._host, self._request = connection, host, request
        self._body = bytearray()
        self._wanted, self._headed = 0, False
        self._box: Box | None = None
        self._command: Command | None = None
        self._output: dict[int, list[bytes]] = {STDOUT: [], STDERR: []}
        self._events: list[dict[str, Any]] = []
        self._task: asyncio.Task[None] | None = None
        self._begun = self._let_go = self._kept = False
        self._shape, self._spent = "", 0.0
        self.over = False  # its caller has heard how it ended

    # ---- the request ----

    def begin(self) -> None:
        """Take the request apart; the program starts when all that belongs to it has come."""
        self._host.busy += 1
        with self._told():
            self._headed = "head" in self._request
            self._wanted = _size(self._request["head"]) if self._headed else self._measure()
            self._advance()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong is the end of the request, and its caller hears of it."""
        try:
            yield
        except LayerError as error:
            self._fail(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._fail(Invalid(f"the request 'once' is not well formed: {error!r}"))
        except OSError as error:
            self._fail(Unavailable(f"the program could not be started: {error}"))

    def input(self, data: bytes | None) -> None:
        if self._box is not None or self._task is not None or data is None:
            return
        self._body += data
        if len(self._body) >= self._wanted:
            with self._told():
                self._advance()

    def _measure(self) -> int:
        request = self._request
        sizes = [
            request.get("python") or 0,
            request.get("stdin") or 0,
            *(size for _, size in request.get("files") or ()),
        ]
        total = sum(_size(size) for size in sizes)
        if total > BODY_MAX:
            raise LimitExceeded(f"code, files and input take {total} bytes, more than {BODY_MAX}")
        return total

    def _advance(self) -> None:
        if len(self._body) < self._wanted:
            return
        if self._headed:
            head = bytes(self._body[: self._wanted])
            del self._body[: self._wanted]
            self._request, self._headed = json.loads(head), False
            self._wanted = self._measure()
            return self._advance()
        self._start()

    def _start(self) -> None:
        request = self._request
        text = request["blueprint"]
        blueprint = _shapes.get(text)
        if blueprint is None:
            if len(_shapes) > 256:
                _shapes.clear()
            blueprint = _shapes[text] = Blueprint.of(json.loads(text))
        argv, self.tenant = request.get("argv"), request["tenant"]
        if request.get("python") is None and (
            not isinstance(argv, list)
            or not argv
            or not all(isinstance(part, str) and "\0" not in part for part in argv)
        ):
            raise Invalid("a command is a list of texts without NUL")
        timeout = request.get("timeout")
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
            raise Invalid(f"timeout {timeout!r} is not a number of seconds")
        for key, value in (request.get("env") or {}).items():
            check_variable(key, value)
        check_labels(request.get("labels") or {})
        for key in ("token", "snapshot"):
            if not isinstance(request.get(key), str | None):
                raise Invalid(f"{key} is not a text")
        self._shape, self._kept = text, self._may_be_kept(blueprint)
        if self._kept and (box := self._host.keeping.take(self.tenant, text, self._host.masked())):
            box.labels, box.created = request.get("labels") or {}, time.time()
            return self._go(box, True)
        self._task = self._host.loop.create_task(self._make(blueprint))

    def _may_be_kept(self, blueprint: Blueprint) -> bool:
        """Whether the box may serve another program after this one; such programs run in an IPC namespace of their own."""
        request, zygote = self._request, self._host.zygote
        return (
            zygote is not None
            and request.get("python") is not None
            and request.get("reuse") is not False
            and not any(request.get(key) for key in ("files", "secrets", "record", "replay", "snapshot"))
            and keepable(blueprint)
        )

    async def _make(self, blueprint: Blueprint) -> None:
        """A box for the program, its files, its start."""
        request, box = self._request, None
        try:
            box = await self._host.create(
                blueprint,
                owner=None,
                snapshot=request.get("snapshot"),
                secret_values=request.get("secrets"),
                record=request.get("record"),
                replay=request.get("replay"),
                labels=request.get("labels"),
                wait=request.get("timeout"),
                say=self._connection.say,
            )
            at = request.get("python") or 0
            for path, size in request.get("files") or ():
                await box.agent.write(str(path), bytes(self._body[at : at + size]), user=blueprint.user)
                at += size
            if self._kept:
                self._host.keeping.look(box)
            self._go(box, False)
        except LayerError as error:
            self._fail(error)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # a defect of ours: its caller must not wait for ever
            traceback.print_exc()
            self._fail(Unavailable(f"the program could not be started: {error!r}"))
        finally:
            self._task = None
            if box is not None and self._box is None:
                self._host.spawn_task(self._host.kill(box))

    # ---- the program ----

    def _go(self, box: Box, reused: bool) -> None:
        request, host = self._request, self._host
        self._box, self._reused = box, reused
        box.trace.also = self._note
        token, fds = request.get("token"), []
        given: dict[str, str] = request.get("env") or {}
        if token is not None:
            fd, address = host.channel(box)
            fds.append(fd)
            given = {"LAYER_URL": f"{address}/{token}", **given}
        size = request.get("python")
        stdin = bytes(self._body[self._wanted - (request.get("stdin") or 0) : self._wanted])
        code = None if size is None else bytes(self._body[:size])
        self._body.clear()
        box.touch()
        if code is not None and host.zygote and host.zygote.serves(box):
            user, timeout = box.blueprint.user, request.get("timeout")
            self._spent = box.looks.begin() if reused and box.looks else 0.0
            variables = environment(box, given)
            command: Command = host.zygote.run(
                box, code, [], variables, "", user, timeout, stdin=stdin[:SCANNED], alone=self._kept
            )
            self._command = command
            self._tell_begun(fds)
            command.listen(self._sink)
            if stdin:
                command.write(stdin)
                command.write(None)
            return
        argv: list[str] = request.get("argv") or []
        if code is not None:
            argv = ["python3", "-c", code.decode("utf-8", "surrogateescape")]
            if len(code) > PAYLOAD_MAX // 2:
                argv[2], stdin = LONG.format(size=len(code)), code + stdin
        command = Command(box, argv, self._sink, timeout=request.get("timeout"))
        self._command = command
        payload = encode_exec(argv, box.blueprint.user, "", environment(box, given), exec_flags(False, bool(stdin)))
        plain = command.on_frame

        def on_frame(kind: int, payload: bytes) -> None:
            if kind == STARTED:
                self._tell_begun(fds)
            plain(kind, payload)

        command.on_frame = on_frame  # type: ignore[method-assign]
        command.start(payload)
        for at in range(0, len(stdin), 32768):
            command.write(stdin[at : at + 32768])
        if stdin:
            command.write(None)

    def _tell_begun(self, fds: list[int]) -> None:
        assert self._box is not None
        self._begun = True
        said = (b"1" if self._reused else b"0") + self._box.id.encode()
        if fds:
            self._connection.send_fds(STARTED, said, fds)
        else:
            self._connection.send(STARTED, said)

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] in EVENTS and len(self._events) < EVENTS_MAX:
            self._events.append(event)

    def control(self, kind: int, payload: bytes) -> None:
        if kind == Kind.SIGNAL and len(payload) >= 8 and self._command and not self.over:
            number, tree = struct.unpack_from("<iI", payload)
            self._command.signal(number, bool(tree))
        elif kind == Kind.CANCEL and self.over:
            self.release()

    def _sink(self, kind: int, data: bytes) -> None:
        if kind == STDOUT or kind == STDERR:
            self._output[kind].append(data)
        elif kind == EXIT:
            self._exited()
        elif kind == DONE:
            assert self._command is not None
            error = self._command.error
            if self._begun and self._killed_with_its_box():
                self._command.status = -9
                self._answer(None)
            else:
                self._fail(error or Invalid("the program did not start"))

    def _killed_with_its_box(self) -> bool:
        """Whether a limit ended the box under the program: memory, its time, or a deadline that the box did not answer to."""
        box, command = self._box, self._command
        assert box is not None and command is not None
        if box.spec.cgroup.stats().get("oom_kills"):
            command.usage["oom_killed"] = True
        expired = [event for event in self._events if event.get("limit") == "wall"]
        command.timed_out |= bool(expired)
        return command.timed_out or "oom_killed" in command.usage

    # ---- its end ----

    def _exited(self) -> None:
        box = self._box
        assert box is not None
        if (box.network and box.network.used) or _touched(box):
            self._task = self._host.loop.create_task(self._conclude(box))
        else:
            self._answer([])

    async def _conclude(self, box: Box) -> None:
        """What takes longer to know: requests that were under way, files that were changed."""
        changes: list[dict[str, Any]] | None = None
        try:
            if box.network and box.network.used and self._host.gateway:
                await self._host.gateway.finish(box.id)  # what it had still to tell has been told then
            changes = await self._host.look_at_changes(box, _changes)
        except (LayerError, OSError):
            pass
        except Exception:  # a defect of ours: its caller must not wait for ever
            traceback.print_exc()
        finally:
            self._task = None
        self._answer(changes)

    def _answer(self, changes: list[dict[str, Any]] | None) -> None:
        box, command = self._box, self._command
        assert box is not None and command is not None
        code = command.status or 0
        usage = dict(command.usage)
        stats: dict[str, Any] = {}
        if (code or command.duration > BRIEF) and not box.spec.cgroup.closed and box.guest is not None:
            stats = box.spec.cgroup.stats()
        counted = stats.get("cpu_seconds", 0.0) - self._spent
        usage["cpu"] = max(usage.get("user", 0.0) + usage.get("system", 0.0), counted)
        usage["memory"] = max(usage.get("max_resident", 0), stats.get("memory_peak", 0))
        usage["sent"], usage["received"] = box.requests["up"], box.requests["down"]
        body = {
            "exit_code": code,
            "truncated": command.truncated,
            "duration": round(command.duration, 6),
            "usage": usage,
            "events": self._events,
            "changes": changes,
            "reason": self._reason(box, command, code, stats) if code else None,
            "base": _base(box.spec.root.layers),
        }
        for kind, pieces in self._output.items():
            data = b"".join(pieces)
            for at in range(0, len(data), PAYLOAD_MAX):
                self._connection.send(kind, data[at : at + PAYLOAD_MAX])
        self._connection.result(body)
        self._output.clear()
        self.over = True
        self._connection.stream = self  # until the caller lets go
        if self._connection.gone:
            self.gone()
        elif not self._kept or box.looks is None or not box.looks.alone():
            self._discard()  # or what it left running would go on

    def _reason(self, box: Box, command: Command, code: int, stats: dict[str, Any]) -> str | None:
        """The limit that a program died of."""
        if command.timed_out:
            return "timed out"
        if command.usage.get("oom_killed") or stats.get("oom_kills"):
            return "out of memory"
        if stats.get("pids_refused"):
            return "too many processes"
        if box.blueprint.tier not in VIRTUAL and _touched(box):
            with contextlib.suppress(LayerError, OSError):
                if self._host.disk.used(box.spec.root.upper) > box.blueprint.disk * 0.95:
                    return "disk full"
        return None

    def _discard(self) -> None:
        """The box goes, after its caller has heard."""
        self._kept = False
        if self._box is not None:
            self._host.spawn_task(self._host.kill(self._box))

    def release(self) -> None:
        """The caller has let go of the box and of its channel."""
        if not self._let_go:
            self._let_go = True
            self._host.busy -= 1
            if self._kept and self._box is not None:
                self._host.keeping.give(self._box, self.tenant, self._shape)
            if self._connection.stream is self:
                self._connection.stream = None

    def _fail(self, error: LayerError) -> None:
        """It could not start, or its box ended under it."""
        if self.over:
            return
        self.over = True
        self._connection.error(error)
        self._discard()
        self.release()

    def gone(self) -> None:
        if self._task:
            self._task.cancel()
        self._discard()
        self.release()


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or value > BODY_MAX:
        raise Invalid(f"{value!r} is not a number of bytes")
    return value


def _base(layers: tuple[str, ...]) -> str:
    """What the files below a box are, in short: of images their content, of the host when its programs were last changed."""
    names, states = chain_of(layers), []
    for path in PROGRAMS if "host" in names or not names else ():
        with contextlib.suppress(OSError):
            here = os.stat(path)
            states.append(f"{path} {here.st_size} {here.st_mtime_ns}")
    return hashlib.sha256("\n".join((*names, *states)).encode()).hexdigest()[:16]


def _touched(box: Box) -> bool:
    """Whether files of the box may have been changed."""
    if box.looks is not None:
        return not box.looks.untouched()
    if box.blueprint.tier in VIRTUAL or box.blueprint.tier == "process":
        return True
    try:
        return bool(os.listdir(box.spec.root.upper / "u"))
    except OSError:
        return True


def _changes(upper: Path) -> list[dict[str, Any]]:
    """The files that were changed, as a caller hears of them."""
    found = [change for change in of_upper(upper) if change.type != "directory"][:CHANGES_MAX]
    digests = _digests(upper, [change.path for change in found if change.type == "file" and change.kind != "removed"])
    return [
        {"path": f"/{change.path}", "kind": change.kind, "type": change.type, "size": change.after}
        | {"digest": digests.get(change.path)}
        for change in found
    ]


def _digests(upper: Path, paths: list[str]) -> dict[str, str]:
    """SHA-256 of changed files, as long as they are not too much to read; nothing is followed."""
    found: dict[str, str] = {}
    left = DIGESTED
    for path in paths:
        with contextlib.suppress(OSError):
            directory = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for part in path.split("/")[:-1]:
                    below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
                    os.close(directory)
                    directory = below
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with open(os.open(path.rpartition("/")[2], flags, dir_fd=directory), "rb") as file:
                    here = os.fstat(file.fileno())
                    if stat.S_ISREG(here.st_mode) and here.st_size <= left:
                        left -= here.st_size
                        found[path] = hashlib.file_digest(file, "sha256").hexdigest()
            finally:
                os.close(directory)
    return found


__all__ = ["Run"]
