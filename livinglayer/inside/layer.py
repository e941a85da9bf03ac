"""The layer, from inside a box: `import layer`. What you may do with it is decided outside, by the execution you are.

Standard library only, any Python from 3.8 on. One request is one HTTP/1.1 exchange with LAYER_URL, over a connection that
is kept; threads and children of a fork each have connections of their own.
"""

from __future__ import annotations

import _queue
import _socket
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs more than all the rest of this file
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, BinaryIO, NoReturn

    Values = Mapping[str, Any] | None

__all__ = [
    "Conflict",
    "Corrupt",
    "Denied",
    "Incompatible",
    "Invalid",
    "LayerError",
    "LimitExceeded",
    "NotFound",
    "TimedOut",
    "Unauthenticated",
    "Unavailable",
    "answer",
    "artifact",
    "call",
    "delegate",
    "delete",
    "emit",
    "insert",
    "me",
    "one",
    "projection",
    "query",
    "secret",
    "slice",
    "update",
    "upsert",
]

#: Seconds to wait for the layer to take or to give the next piece of a message; None waits for ever.
timeout: float | None = 600.0


# -- errors: the same names, codes and exit codes as outside ----------------------------------------------------------


class LayerError(Exception):
    """Something the layer refused or could not do; `hint` says what to try, `rows` name the permissions that decided."""

    code, status, exit_code = "error", 500, 1

    def __init__(self, message: str, hint: str | None = None, rows: Any = None) -> None:
        super().__init__(message, hint, rows)
        self.message, self.hint, self.rows = message, hint, rows

    def __str__(self) -> str:
        return self.message


class Invalid(LayerError):
    """The request itself is wrong."""

    code, status, exit_code = "invalid", 400, 2


class Unauthenticated(LayerError):
    """The token is nobody's, or its execution is over."""

    code, status, exit_code = "unauthenticated", 401, 3


class Denied(LayerError):
    """This execution may not do this."""

    code, status, exit_code = "denied", 403, 3


class NotFound(LayerError):
    """It is not there, or not for this execution to see."""

    code, status, exit_code = "not_found", 404, 4


class Conflict(LayerError):
    """The row is not in the state this needs."""

    code, status, exit_code = "conflict", 409, 5


class LimitExceeded(LayerError):
    """Larger or more than the limit allows."""

    code, status, exit_code = "limit_exceeded", 429, 6


class Corrupt(LayerError):
    """Stored content is not what was written."""

    code, status, exit_code = "corrupt", 500, 7


class Incompatible(LayerError):
    """The layer was written by a newer release."""

    code, status, exit_code = "incompatible", 500, 7


class Unavailable(LayerError):
    """The layer can't be reached or can't serve this now."""

    code, status, exit_code = "unavailable", 503, 8


class TimedOut(LayerError):
    """The deadline passed."""

    code, status, exit_code = "timed_out", 504, 9


_KINDS = [LayerError, Invalid, Unauthenticated, Denied, NotFound, Conflict, LimitExceeded, Corrupt, Incompatible]
_KINDS += [Unavailable, TimedOut]
_BY_CODE = {kind.code: kind for kind in _KINDS}
_BY_STATUS = {kind.status: kind for kind in reversed(_KINDS)}


# -- verbs ------------------------------------------------------------------------------------------------------------


def query(sql: str, params: Any = None, /, **named: Any) -> list[dict[str, Any]]:
    """Rows of one SELECT: `query("select * from ticket where id = ?", [7])`, or `… = :id", id=7)`."""
    return _ask("/query", {"sql": sql, "params": _params(params, named)}, safe=True)["rows"]


def one(sql: str, params: Any = None, /, **named: Any) -> dict[str, Any] | None:
    """The first row of a SELECT, or None."""
    rows = query(sql, params, **named)
    return rows[0] if rows else None


def insert(entity: str, values: Any = None, /, **fields: Any) -> Any:
    """Add a row and return its id; a list of rows returns a list of ids."""
    if isinstance(values, (list, tuple)):
        if fields:
            raise Invalid("insert takes a list of rows or the fields of one, not both")
        return _ask("/insert", {"entity": entity, "values": values})["ids"]
    return _ask("/insert", {"entity": entity, "values": _values(values, fields)})["id"]


def update(entity: str, id: int, values: Values = None, /, *, expect: int | None = None, **fields: Any) -> None:
    """Set fields of a row; with `expect`, only if that is still its version, else Conflict."""
    body = {"entity": entity, "id": id, "values": _values(values, fields), "expect": expect}
    _ask("/update", body)


def delete(entity: str, id: int, /, *, expect: int | None = None) -> None:
    """Remove a row; with `expect`, only if that is still its version, else Conflict."""
    _ask("/delete", {"entity": entity, "id": id, "expect": expect})


def upsert(entity: str, values: Values = None, /, *, on: Sequence[str], **fields: Any) -> int:
    """Update the row that has these values in the fields `on`, or add one; returns its id."""
    keys = [on] if isinstance(on, str) else list(on)
    return _ask("/upsert", {"entity": entity, "values": _values(values, fields), "on": keys})["id"]


def call(function: str, /, **arguments: Any) -> Any:
    """Run another function of the layer and return its result."""
    return _ask("/call", {"function": function, "arguments": arguments})["result"]


def delegate(contract: str, task: str, /, *, slice: Any = None) -> dict[str, Any]:
    """Have an agent of another contract do a task, within both contracts; how it ended, and its answer."""
    return _ask("/delegate", {"contract": contract, "task": task, "slice": slice})


def projection(name: str, /, **arguments: Any) -> list[dict[str, Any]]:
    """The rows of a named projection."""
    return _ask("/projection", {"name": name, "arguments": arguments}, safe=True)["rows"]


def secret(name: str) -> str:
    """The value of a secret, where it may be read at all; each reading is recorded."""
    return _ask("/secret", {"name": name}, safe=True)["value"]


def emit(name: str, /, **data: Any) -> None:
    """Tell of something that happened; it is kept with the execution."""
    _ask("/emit", {"name": name, "data": data})


def artifact(path: str | os.PathLike[str], name: str | None = None) -> str:
    """Keep a file with the execution and return its digest."""
    name = os.path.basename(os.fspath(path)) if name is None else name
    if not name:
        raise Invalid(f"an artifact needs a name, and {os.fspath(path)!r} gives none", hint="artifact(path, name)")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return _exchange("PUT", "/artifact/" + _quoted(name), file, size, "application/octet-stream")["digest"]


def answer(value: Any, /) -> None:
    """Give the final answer of an agent; once."""
    _ask("/return", {"value": value})


def me() -> dict[str, Any]:
    """Who and what this execution is, and what it may do."""
    return _exchange("GET", "/me", b"", safe=True)


def slice() -> str:
    """The path of a local read-only SQLite file with this box's slice of the layer, made fresh now."""
    return _ask("/slice", {}, safe=True)["path"]


def _params(params: Any, named: dict[str, Any]) -> Any:
    if not named:
        return params
    if params is not None and not hasattr(params, "keys"):
        raise Invalid("parameters are given by place or by name, not both")
    return {**(params or {}), **named}


def _values(values: Any, fields: dict[str, Any]) -> dict[str, Any]:
    if values is not None and not hasattr(values, "keys"):
        raise Invalid(f"the values of a row are a dict of its fields, not {_kind(values)}")
    return {**(values or {}), **fields}


def _quoted(name: str) -> str:
    plain = "/-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    return "".join(
        chr(byte) if chr(byte) in plain else f"%{byte:02X}" for byte in name.encode("utf-8", "surrogateescape")
    )


# -- JSON -------------------------------------------------------------------------------------------------------------

_dumps: Callable[[Any], str] | None = None
_loads: Callable[[bytes], Any] | None = None


def _load_json() -> None:
    global _dumps, _loads
    import json

    _dumps = json.JSONEncoder(default=_plain, allow_nan=False, separators=(",", ":")).encode
    _loads = json.loads


def _plain(value: Any) -> str:
    """A date, a time, a decimal or a UUID as the text that stands for it in JSON."""
    if type(value).__module__ in ("datetime", "decimal", "uuid") or hasattr(value, "isoformat"):
        if hasattr(value, "isoformat"):
            return value.isoformat()
        if not hasattr(value, "is_finite"):
            if type(value).__name__ == "UUID":
                return str(value)
        elif value.is_finite():
            return f"{value:f}"
    raise TypeError


def _encode(value: Any, what: str) -> bytes:
    """The value as JSON; Invalid says what in it has no form there, and where."""
    if _dumps is None:
        _load_json()
    assert _dumps is not None
    try:
        return _dumps(value).encode()
    except (TypeError, ValueError, RecursionError):
        pass
    raise Invalid(_blame(value, what))


def _blame(value: Any, what: str) -> str:
    """Which part of a value JSON has no form for."""
    waiting: list[tuple[Any, str, int]] = [(value, what, 0)]
    while waiting:
        part, path, depth = waiting.pop()
        if depth > 500:
            return f"{what} is nested too deep for JSON, or contains itself"
        if isinstance(part, dict):
            for key in part:
                if not isinstance(key, (str, int, float, bool, type(None))):
                    return f"{path} has the key {_short(key)}, {_kind(key)}; keys in JSON are texts"
            waiting += [(part[key], f"{path}[{_short(key)}]", depth + 1) for key in reversed(list(part))]
        elif isinstance(part, (list, tuple)):
            waiting += [(part[at], f"{path}[{at}]", depth + 1) for at in reversed(range(len(part)))]
        elif isinstance(part, float) and (part != part or part in (float("inf"), float("-inf"))):
            return f"{path} is {part!r}, for which JSON has no form"
        elif not isinstance(part, (str, int, float, bool, type(None))):
            try:
                _plain(part)
            except TypeError:
                return f"{path} is {_kind(part)}, for which JSON has no form"
        elif isinstance(part, int):
            try:
                str(part)
            except ValueError:
                return f"{path} is a number of too many digits"
    return f"{what} can't be written as JSON"


def _kind(value: Any) -> str:
    name = type(value).__qualname__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        return "…"
    return text if len(text) <= 60 else text[:59] + "…"


# -- HTTP/1.1, as little of it as the channel speaks ------------------------------------------------------------------


_CONNECTIONS = 16  # at a time; further threads wait for one
_TRIES = 20  # of a request whose answer comes later
_GRACE = 0.25  # seconds beside the timeout


class _Place:
    """Where the layer is, as LAYER_URL says, and the connections to it that wait for their next request."""

    def __init__(self, url: str | None) -> None:
        self.url, self.pid = url, os.getpid()
        self.idle: list[_socket.socket] = []
        self.places: _queue.SimpleQueue[None] = _queue.SimpleQueue()  # one for each connection there may be
        for _ in range(_CONNECTIONS):
            self.places.put(None)
        if not url:
            raise Unavailable(
                "not inside a box of a layer: LAYER_URL is not set",
                hint="run this as a function or in a box of a layer",
            )
        scheme, _, rest = url.partition("://")
        at, slash, path = rest.partition("/")
        host, colon, port = at.rpartition(":")
        if not colon or "]" in port:
            host, port = at, "80"
        if scheme != "http" or not host or not port.isdigit():
            raise Unavailable("LAYER_URL is not the address of a layer: http://HOST:PORT/…")
        host = host.strip("[]")
        self.family = _socket.AF_INET6 if ":" in host else _socket.AF_INET
        self.address = (host, int(port))
        self.path = (slash + path).rstrip("/")
        self.host = at

    def take(self, sure: bool) -> _socket.socket | None:
        """A connection that waits, or None. With `sure`, one that the other side has not closed."""
        while self.idle:
            try:
                link = self.idle.pop()
            except IndexError:  # another thread was quicker
                return None
            if sure:
                try:
                    link.recv(1, _socket.MSG_PEEK | _socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return link  # nothing to read, as it should be
                except OSError:
                    pass
                link.close()
                continue
            return link
        return None

    def connect(self) -> _socket.socket:
        link = _socket.socket(self.family, _socket.SOCK_STREAM)
        try:
            link.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            _patience(link, 10.0 if timeout is None else min(timeout, 10.0))
            link.connect(self.address)
            _patience(link, timeout)
        except OSError as error:
            link.close()
            if isinstance(error, BlockingIOError):
                raise TimedOut("the layer could not be reached in time") from None
            raise Unavailable(f"the layer can't be reached: {error.strerror or error}") from None
        except BaseException:
            link.close()
            raise
        return link


def _patience(link: _socket.socket, seconds: float | None) -> None:
    """The kernel's own timeouts: a wait that costs no extra system call."""
    whole = int(seconds or 0)
    parts = int(((seconds or 0) - whole) * 1_000_000)
    if seconds and not whole and not parts:
        parts = 1
    value = whole.to_bytes(8, sys.byteorder) + parts.to_bytes(8, sys.byteorder)
    if sys.maxsize < 2**32:
        value = whole.to_bytes(4, sys.byteorder) + parts.to_bytes(4, sys.byteorder)
    link.setsockopt(_socket.SOL_SOCKET, _socket.SO_RCVTIMEO, value)
    link.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, value)


_here: _Place | None = None


class _Lost(Exception):
    """The other side hung up before it answered."""

    waited = False  # whether it had said that the answer comes later: then the same request gets the same answer


def _ask(verb: str, body: Any, safe: bool = False) -> Any:
    data = _encode(body, "the request")
    return _exchange("POST", verb, data, len(data), safe=safe)


def _exchange(
    method: str, verb: str, body: bytes | BinaryIO, size: int = 0, kind: str = "application/json", safe: bool = False
) -> Any:
    """One request and its answer. What only reads is sent again, once, when a connection turns out to be closed."""
    global _here
    place, url = _here, os.environ.get("LAYER_URL")
    if place is None or place.url != url or place.pid != os.getpid():
        place = _here = _Place(url)
    head = (
        f"{method} {place.path}{verb} HTTP/1.1\r\nHost: {place.host}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {size}\r\n\r\n"
    ).encode("latin-1")
    place.places.get()
    try:
        status, answer = _attempt(place, head, body, size, safe)
    finally:
        place.places.put(None)
    if _loads is None:
        _load_json()
    assert _loads is not None
    try:
        value = _loads(answer) if answer else None
    except (ValueError, RecursionError):
        _garbage(f"what came with status {status} is no JSON")
    if 200 <= status < 300:
        if not isinstance(value, dict):
            _garbage("the answer is no JSON object")
        return value
    raise _refusal(status, value)


def _attempt(place: _Place, head: bytes, body: bytes | BinaryIO, size: int, safe: bool) -> tuple[int, bytes]:
    link, tries = place.take(sure=not safe), 0
    while True:
        if link is None:
            link = place.connect()
        try:
            status, answer, kept = _talk(link, head, body, size)
        except _Lost as lost:
            link.close()
            if (lost.waited or tries) and tries < _TRIES:  # whoever was to answer has ended: another goes on
                link, tries = None, tries + 1
                place.idle.clear()
                _rest(0.1 * tries)
                continue
            if safe:
                link, safe = None, False
                place.idle.clear()
                continue
            raise Unavailable(f"the layer hung up without an answer: {lost}") from None
        except BaseException:
            link.close()
            raise
        if kept:
            place.idle.append(link)
        else:
            link.close()
        return status, answer


def _talk(link: _socket.socket, head: bytes, body: bytes | BinaryIO, size: int) -> tuple[int, bytes, bool]:
    """Send a request; the status, the content of the answer, and whether the connection may be used again."""
    broken, waited = None, False
    try:
        if not isinstance(body, bytes):
            link.sendall(head)
            _send_file(link, body, size)
        elif size < 65536:
            link.sendall(head + body)
        else:
            link.sendall(head)
            link.sendall(body)
    except BlockingIOError:
        raise TimedOut(f"the layer took nothing for {timeout:g} s") from None
    except OSError as error:
        broken = error  # it may have answered before it hung up: too large, for example
    data = b""
    while True:
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            if data[9:10] != b"1":
                break
            waited = waited or b"\r\nwaits:" in data[:end].lower()
            data = data[end + 4 :]  # 100 Continue
            continue
        if len(data) > 65536:
            _garbage("its head has no end")
        piece = _receive(link, 65536)
        if not piece:
            if data:
                _garbage("its head is cut short")
            lost = _Lost(broken or "the connection is closed")
            lost.waited = waited
            raise lost
        data += piece
    lines = data[:end].lower()
    try:
        if lines[:7] != b"http/1." or lines[8:9] != b" ":
            raise ValueError
        status = int(lines[9:12])
        at = lines.find(b"\r\ncontent-length:")
        length = int(lines[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0 if status in (204, 304) else -1
    except ValueError:
        _garbage(f"{_short(data[:40])} is not how HTTP begins")
    if length < 0 or b"\r\ntransfer-encoding:" in lines:
        _garbage("its length is not given")
    content = data[end + 4 :]
    missing = length - len(content)
    if missing > 0:
        pieces = [content]
        while missing > 0:
            piece = _receive(link, min(missing, 1 << 20))
            if not piece:
                _garbage(f"{missing} bytes are missing at its end")
            pieces.append(piece)
            missing -= len(piece)
        content = b"".join(pieces)
    return status, content[:length], missing == 0 and broken is None and b"\r\nconnection: close" not in lines


def _rest(seconds: float) -> None:
    """Wait a little; the clock of functions is not this one's matter."""
    import select

    select.select([], [], [], seconds)


def _receive(link: _socket.socket, most: int) -> bytes:
    try:
        return link.recv(most)
    except BlockingIOError:
        pass
    except OSError:
        return b""
    try:  # a box that was frozen finds its time over, and the answer there a moment later: that counts
        _patience(link, _GRACE)
        piece = link.recv(most)
        _patience(link, timeout)
        return piece
    except BlockingIOError:
        raise TimedOut(f"the layer did not answer within {timeout:g} s") from None
    except OSError:
        return b""


def _send_file(link: _socket.socket, file: BinaryIO, size: int) -> None:
    while size > 0:
        piece = file.read(min(size, 1 << 18))
        if not piece:
            raise Invalid("the file became shorter while it was sent")
        link.sendall(piece)
        size -= len(piece)


def _garbage(why: str) -> NoReturn:
    raise Unavailable(f"what answers at LAYER_URL does not speak as a layer does: {why}")


def _refusal(status: int, value: Any) -> LayerError:
    said = value.get("error") if isinstance(value, dict) else None
    said = said if isinstance(said, dict) else {}
    kind = _BY_CODE.get(str(said.get("code"))) or _BY_STATUS.get(status, LayerError)
    return kind(str(said.get("message") or f"the layer answered {status}"), said.get("hint"), said.get("rows"))


# -- the harness of functions -----------------------------------------------------------------------------------------


def _main() -> NoReturn:
    """Run the function that stdin describes, send what it returns to the layer, and end the process."""
    import layer_run

    raise SystemExit(layer_run.main())  # which ends the process itself


def _warm() -> None:
    """Load what a function's start needs, in the process that functions are forked from."""
    import layer_run

    _load_json()
    layer_run.warm()
