"""The box's channel: plain HTTP + JSON on a listener that only this box can reach.

Who asks is known by the listener and by the token in the path; what may be done is decided by the execution, not by what
the box says. One thread drives an execution: its program and its channel take turns in one poll.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote

import httptools

from ..errors import Denied, Invalid, LayerError, LimitExceeded, NotFound
from .signature import dumps

BODY = 64 << 20  # bytes of one request
HEAD = 64 << 10
CONNECTIONS = 64
HELD = 192 << 20  # bytes of requests and answers of one box that wait
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
           409: "Conflict", 413: "Content Too Large", 429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable",
           504: "Gateway Timeout"}  # fmt: skip


class Asked(Protocol):
    """What answers: one execution."""

    token: str

    def answer(self, method: str, name: str, rest: str, given: Mapping[str, Any], body: bytes) -> Any: ...


class Connection:
    """One connection of the box: requests one after the other."""

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            pass
        self.sock, self.channel = sock, channel
        self._out = bytearray()
        self._fed = 0  # bytes of this request, also of a line of its head that has no end yet
        self._parser = httptools.HttpRequestParser(self)
        self._over = False
        self._begin()

    def _begin(self) -> None:
        self._url, self._body, self._type, self._head = b"", bytearray(), b"", 0
        self._problem: LayerError | None = None

    # What the parser tells

    def on_message_begin(self) -> None:
        self._begin()
        self._fed = 0

    def on_url(self, part: bytes) -> None:
        self._url += part
        self._grow(len(part))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._grow(len(name) + len(value))
        if name.lower() == b"content-type":
            self._type = value.lower()
        elif name.lower() == b"expect" and value.lower() == b"100-continue":
            self._out += b"HTTP/1.1 100 Continue\r\n\r\n"

    def _grow(self, size: int) -> None:
        self._head += size
        if self._head > HEAD:
            self._problem = LimitExceeded(f"the head of a request is larger than {HEAD} bytes")

    def on_body(self, part: bytes) -> None:
        if len(self._body) + len(part) > BODY or self.channel.held + len(part) > HELD:
            self._problem = LimitExceeded(f"a request is larger than {BODY} bytes", hint="send less at a time")
        else:
            self._body += part

    def on_message_complete(self) -> None:
        if self._over:
            return
        keep = self._parser.should_keep_alive()
        status, answer = self._answer()
        self._body, self._fed = bytearray(), 0
        data = answer if isinstance(answer, bytes) else dumps(answer)
        close = b"" if keep else b"Connection: close\r\n"
        self._out += (
            b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"
            % (status, REASONS.get(status, "Error").encode(), len(data), close)
        ) + data
        self._over = self._over or not keep

    def _answer(self) -> tuple[int, Any]:
        try:
            if self._problem is None and self.channel.waiting > HELD - BODY:
                self._over = True
                self._problem = LimitExceeded("too many answers wait to be read", hint="read them before asking more")
            if self._problem is not None:
                raise self._problem
            method, self.channel.asking = self._parser.get_method().decode(), self
            return 200, self.channel.answer(method, self._url, self._type, bytes(self._body))
        except LayerError as error:
            return error.status, told(error)
        except Exception as error:
            self.channel.failed(error)
            return 500, {"error": {"code": "error", "message": "the layer failed to answer", "hint": None}}

    # What the poll tells

    def readable(self) -> bool:
        """Read and answer; False when the connection is over."""
        try:
            data = self.sock.recv(262144)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        self._fed += len(data)
        if self._fed > 2 * BODY + HEAD or (not self._body and self._fed > HEAD + len(data)):
            self._out.clear()
            return False  # the parser keeps a line until its end, which may never come
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            problem = dumps(told(Invalid("this is not HTTP/1.1", hint="curl $LAYER_URL/me")))
            self._out += (
                b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(problem) + problem
            )
            self._over = True
        if self._problem is not None:
            self._over = True
        return self.writable()

    def writable(self) -> bool:
        """Send what waits; False when the connection is over."""
        try:
            while self._out:
                sent = self.sock.send(self._out[:1048576] if len(self._out) > 1048576 else self._out)
                del self._out[:sent]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return not self._over

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    @property
    def listens(self) -> bool:
        """Whether it is asked more: not while answers wait that nobody reads."""
        return len(self._out) < 1 << 20


def told(error: LayerError) -> dict[str, Any]:
    """An error as it is sent."""
    body: dict[str, Any] = {"code": error.code, "message": error.message, "hint": error.hint}
    if error.details.get("rows"):
        body["rows"] = error.details["rows"]
    return {"error": body}


class Channel:
    """The listener of one box and the connections on it."""

    def __init__(self, listener: socket.socket, failed: Callable[[BaseException], Any] = lambda error: None) -> None:
        listener.setblocking(False)
        try:
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1
            )  # woken once: a request is there already
        except OSError:
            pass
        self.listener, self.failed = listener, failed
        self.executions: dict[str, Asked] = {}  # by token; an ended one is taken out
        self._connections: dict[int, Connection] = {}
        self.asking: Connection | None = None  # whose request is being answered
        self.stranger: Callable[[Denied], Any] = lambda error: None  # is told of a token that is not of this box
        self.poll = select.poll()
        self.poll.register(listener, select.POLLIN)

    def answer(self, method: str, url: bytes, kind: bytes, body: bytes) -> Any:
        """One request, as the execution whose token it names decides."""
        try:
            path, _, query = url.decode("ascii").partition("?")
        except ValueError:
            raise Invalid("this is not a path") from None
        token, _, path = path.removeprefix("/").partition("/")
        asked = next(
            (each for key, each in self.executions.items() if secrets.compare_digest(key.encode(), token.encode())),
            None,
        )
        if asked is None:
            error = Denied(
                "this execution is over, or never was", hint="LAYER_URL holds for one execution", resource="LAYER_URL"
            )
            self.stranger(error)
            raise error
        name, _, rest = path.partition("/")
        given: dict[str, Any] = {}
        if query:
            given = {key: values[-1] for key, values in parse_qs(query, keep_blank_values=True).items()}
        if method in ("POST", "PUT") and name != "artifact" and body:
            if kind.startswith(b"text/plain") or (name == "query" and body.lstrip()[:1] not in (b"{", b"[")):
                given["sql"] = _text(body)
            else:
                try:
                    found = json.loads(body)
                except (ValueError, RecursionError):
                    raise Invalid("the body is not JSON") from None
                if not isinstance(found, dict):
                    raise Invalid("the body is not a JSON object")
                given |= found
        elif method not in ("GET", "POST", "PUT"):
            raise Invalid(f"{method} is not answered here", hint="POST a JSON object")
        return asked.answer(method, name, unquote(rest), given, body)

    def hold(self, why: str) -> None:
        """Tell whoever asks that the answer comes later: should the connection break until then, asking again is safe."""
        found = self.asking
        if found is not None and found._parser.get_http_version() == "1.1":
            found._out += f"HTTP/1.1 100 Continue\r\nWaits: {why}\r\n\r\n".encode()
            found.writable()

    @property
    def waiting(self) -> int:
        """Bytes of answers that wait to be read."""
        return sum(len(each._out) for each in self._connections.values())

    @property
    def held(self) -> int:
        """Bytes that are kept for the box: its requests, and answers to them."""
        return self.waiting + sum(len(each._body) for each in self._connections.values())

    def turn(self, fd: int, event: int) -> None:
        """Something happened on a descriptor of ours."""
        if fd == self.listener.fileno():
            return self._accept()
        connection = self._connections.get(fd)
        if connection is None:
            return
        alive = connection.writable() if event & select.POLLOUT else True
        if alive and event & (select.POLLIN | select.POLLHUP | select.POLLERR):
            alive = connection.readable()
        if not alive and not connection.waits:
            self._drop(fd)
        else:
            asks = select.POLLIN if connection.listens else 0
            self.poll.modify(fd, asks | (select.POLLOUT if connection.waits else 0))

    def _accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return
        if len(self._connections) >= CONNECTIONS:
            sock.close()
            return
        self._connections[sock.fileno()] = Connection(sock, self)
        self.poll.register(sock, select.POLLIN)
        self.turn(sock.fileno(), select.POLLIN)

    def _drop(self, fd: int) -> None:
        self.poll.unregister(fd)
        self._connections.pop(fd).sock.close()

    def close(self) -> None:
        """Hang up on the box."""
        for fd in list(self._connections):
            self._drop(fd)
        self.listener.close()


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise Invalid("the body is not UTF-8") from None


def not_found(name: str) -> NotFound:
    return NotFound(f"there is no {name!r} here", hint="GET $LAYER_URL/openapi.json lists what there is")
