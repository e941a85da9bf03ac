"""Ports: HTTP and WebSocket to a port of a box, at PORT-ID.domain, carried both ways as it comes.

What is sent on is written anew by h11 or wsproto, never copied: what a parser of ours and one in the box could read in two ways does
not get there. Nothing that proves somebody to this server goes in, and nothing that acts on other origins than the box's comes out.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import re
import ssl
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

import h11
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from wsproto import ConnectionType, WSConnection
from wsproto import events as ws
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from ...errors import Conflict, LayerError, NotFound
from ...law import held
from ...sandbox.sandbox import AsyncPort
from ..http.auth import COOKIES
from ..http.serving import Serving
from .reach import Gone, Reached, forget, missing, reach, stale

List = list[tuple[bytes, bytes]]
HEAD = 64 << 10  # bytes of the headers of an answer
MESSAGE = 16 << 20  # bytes of one message of a WebSocket
TRAFFIC = "e2b-traffic-access-token"
QUIET = 60.0  # seconds before a box's broken answers are told of again
CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
log = logging.getLogger("livinglayer.ports")
# Of one connection only, whoever it is with.
HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
# Of a request: what is for us, what we say ourselves, and what we have answered already.
OURS = HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"forwarded",
    b"e2b-sandbox-id",
    b"e2b-sandbox-port",
    TRAFFIC.encode(),
}
PROOFS = {b"authorization", b"x-api-key", b"x-access-token"}
TOKEN = re.compile(rb"(ll_|e2b_|session_|login_)[0-9a-zA-Z_-]{20,}\Z")
# Of an answer: what would speak for more than the box's own origin; the date is the server's.
FOREIGN = HOP | {b"clear-site-data", b"alt-svc", b"date"}


class Refusal(Exception):
    """What is asked of a port can't be: a status, and why."""

    def __init__(self, status: int, message: str, **more: object) -> None:
        super().__init__(message)
        self.status, self.body = status, {"code": status, "message": message, **more}


class Line(Protocol):
    """A connection to a server in a box."""

    async def send(self, data: bytes) -> None: ...
    async def receive(self) -> bytes: ...
    async def close(self) -> None: ...


async def handle(serving: Serving, scope: Scope, receive: Receive, send: Send, box: Reached, port: int) -> None:
    """Answer a request with what a port of a box answers."""
    try:
        admit(scope, box)
        line = await dial(serving, box, port)
        await carry(serving, scope, receive, send, box, port, line)
    except Refusal as refusal:
        await refuse(refusal, scope, receive, send, box)


def admit(scope: Scope, box: Reached) -> None:
    """Refuse who may not ask a port of this box, and what could be read in two ways."""
    headers = Headers(scope=scope)
    if not box.public:
        given = headers.get(TRAFFIC)
        if box.traffic is None or not hmac.compare_digest((given or "").encode(), box.traffic.encode()):
            problem = "is missing" if given is None else "is not this sandbox's"
            raise Refusal(403, f"Sandbox is secured with traffic access token. Token header '{TRAFFIC}' {problem}")
    lengths = headers.getlist("content-length")
    coding = [text.strip().lower() for text in headers.getlist("transfer-encoding")]
    if (lengths and coding) or len(set(lengths)) > 1 or coding not in ([], ["chunked"]):
        raise Refusal(400, "the request says in more than one way where it ends")
    if scope["type"] == "http" and scope["method"] == "CONNECT":
        raise Refusal(405, "a box's port is no proxy")


def proves(serving: Serving, scope: Scope, id: str) -> bool:
    """Whether a request has the traffic token of a box."""
    given = Headers(scope=scope).get(TRAFFIC, "")
    return hmac.compare_digest(given.encode(), held.token(serving.layer, id, "traffic").encode())


async def dial(serving: Serving, box: Reached, port: int) -> Line:
    """A connection to a port of a box; 502 when nothing listens there."""
    if not 0 < port < 65536:
        raise Refusal(400, f"{port} is not a port")
    try:
        line = await box.box.port(port)
    except (NotFound, Conflict) as error:
        forget(serving, box.id)
        raise Refusal(502, missing(box.id).message, sandboxId=box.id) from error
    except LayerError as error:
        if error.details.get("errno") != errno.ECONNREFUSED:
            raise Refusal(502, f"port {port} of the sandbox can't be reached: {error.message}", port=port) from error
        raise Refusal(502, "The sandbox is running but port is not open", port=port) from None
    return await secured(line) if port in _kept(box).get("https", ()) else line


async def refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send, box: Reached) -> None:
    """Say why not, as E2B's edge does."""
    answer = JSONResponse({**refusal.body, "sandboxId": box.id}, refusal.status, {"Should-Retry": "false"})
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        return await send({"type": "websocket.close", "code": 1008})
    await answer(scope, receive, send)


async def carry(
    serving: Serving, scope: Scope, receive: Receive, send: Send, box: Reached, port: int, line: Line
) -> None:
    """A request to a server in the box and its answer back, over a connection that is used up."""
    target = scope.get("raw_path") or scope["path"].encode()
    if query := scope.get("query_string"):
        target += b"?" + query
    headers = _inward(serving, scope, box, port)
    exchange = _http if scope["type"] == "http" else _websocket
    try:
        await exchange(serving, scope, receive, send, box, line, target, headers)
    finally:
        await line.close()


async def _first(box: Reached, *works: Coroutine[Any, Any, Any]) -> None:
    """Until one of them is done, or the box is gone; the others end with it."""
    tasks = [asyncio.ensure_future(work) for work in (*works, box.gone.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _parted(serving: Serving, box: Reached) -> None:
    """A server broke off: if that is the end of its box, whoever is told asks for the box next, and must hear that it is gone."""
    for _ in range(10):
        stale(serving, box.id)
        try:
            await reach(serving, box.id, wake=False)
        except Gone:
            return
        await asyncio.sleep(0.05)


# ---- HTTP ----


async def _http(
    serving: Serving, scope: Scope, receive: Receive, send: Send, box: Reached, line: Line, target: bytes, headers: List
) -> None:
    inside = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD)
    begun = False

    async def ask() -> None:
        """The body, as it comes; then until the client hangs up."""
        while (message := await receive())["type"] != "http.disconnect":
            if inside.our_state is not h11.SEND_BODY:
                continue
            data = inside.send(h11.Data(message.get("body", b""))) or b""
            if not message.get("more_body", False):
                data += inside.send(h11.EndOfMessage()) or b""
            try:
                await line.send(data)
            except (LayerError, OSError):  # it takes no more, but may well answer
                await asyncio.Event().wait()

    async def answer() -> None:
        nonlocal begun
        while True:
            event = inside.next_event()
            if event is h11.NEED_DATA:
                inside.receive_data(await line.receive())
            elif isinstance(event, h11.Response):
                if event.status_code > 599:  # nothing that a server can say again
                    raise h11.RemoteProtocolError(f"status {event.status_code} is none")
                told = _outward(event.headers)
                if event.status_code in (204, 304):  # the length of what is not sent, which would be waited for
                    told = [(name, value) for name, value in told if name != b"content-length"]
                begun = True
                await send({"type": "http.response.start", "status": event.status_code, "headers": told})
            elif isinstance(event, h11.Data):
                await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                return await send({"type": "http.response.body", "body": b""})
            elif not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("the connection was closed")

    try:
        head = inside.send(
            h11.Request(method=scope["method"], target=target, headers=[*headers, (b"connection", b"close")])
        )
    except h11.LocalProtocolError as error:
        raise Refusal(400, f"the request is not one that can be sent on: {error}") from None
    try:
        await line.send(head or b"")
        await _first(box, ask(), answer())
    except (LayerError, OSError, h11.RemoteProtocolError) as error:
        await _parted(serving, box)
        if begun:  # half an answer is cut off: the server does so when nobody ends it
            return _broke_off(serving, box, error)
        if box.gone.is_set():
            raise Refusal(502, missing(box.id).message) from None
        raise Refusal(502, f"the server in the sandbox gave no answer: {error}") from None
    if not begun and box.gone.is_set():
        raise Refusal(502, missing(box.id).message)


def _broke_off(serving: Serving, box: Reached, error: Exception) -> None:
    """Say that a box did not end its answer; once in a while, as it could do so all day."""
    told: dict[str, float] = serving.more.setdefault("broke off", {})
    at = time.monotonic()
    if at - told.get(box.id, -QUIET) >= QUIET:
        for id in [id for id, last in told.items() if at - last >= QUIET]:
            del told[id]
        told[box.id] = at
        log.info("an answer of box %s broke off: %s", box.id, str(error)[:200])


# ---- WebSocket ----


async def _websocket(
    serving: Serving, scope: Scope, receive: Receive, send: Send, box: Reached, line: Line, target: bytes, headers: List
) -> None:
    await receive()  # websocket.connect
    inside = WSConnection(ConnectionType.CLIENT)
    host = next(value.decode("latin-1") for name, value in headers if name == b"host")
    more = [
        (name, value)
        for name, value in headers
        if name not in (b"host", b"content-length", b"transfer-encoding") and not name.startswith(b"sec-websocket-")
    ]
    request = ws.Request(host, target.decode("latin-1"), extra_headers=more, subprotocols=list(scope["subprotocols"]))
    try:
        await line.send(inside.send(request))
        accepted = await _accepted(inside, line)
    except (LayerError, OSError, RemoteProtocolError, LocalProtocolError) as error:
        raise Refusal(502, f"the server in the sandbox speaks no WebSocket: {error}") from None
    if isinstance(accepted, Refusal):
        raise accepted
    await send(
        {"type": "websocket.accept", "subprotocol": accepted.subprotocol, "headers": [(name, value) for name, value in _outward(accepted.extra_headers) if not name.startswith(b"sec-websocket-")]}
    )  # fmt: skip
    over: Message = {"type": "websocket.close", "code": 1011, "reason": "the sandbox is gone"}

    async def ask() -> None:
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            data: Any = message.get("bytes") if text is None else text
            await line.send(inside.send(ws.Message(data=data)))
        code = message.get("code") or 1005
        await line.send(inside.send(ws.CloseConnection(code=1000 if code in (1005, 1006) else code)))

    async def answer() -> None:
        nonlocal over
        whole = bytearray()  # of however many parts: a box may send millions that hold nothing
        while True:
            for event in inside.events():
                if isinstance(event, ws.Message):
                    text = isinstance(event.data, str)
                    whole += event.data.encode() if isinstance(event.data, str) else event.data
                    if len(whole) > MESSAGE:
                        over = {"type": "websocket.close", "code": 1009}
                        return
                    if event.message_finished:
                        data = {"text": whole.decode()} if text else {"bytes": bytes(whole)}
                        await send({"type": "websocket.send", **data})
                        whole.clear()
                elif isinstance(event, ws.Ping):
                    await line.send(inside.send(event.response()))
                elif isinstance(event, ws.CloseConnection):
                    code = 1000 if event.code in (1005, 1006) else int(event.code)
                    over = {"type": "websocket.close", "code": code, "reason": event.reason or ""}
                    await line.send(inside.send(event.response()))
                    return
            came = await line.receive()
            inside.receive_data(came or None)
            if not came:
                return

    left = False
    try:

        async def leaving() -> None:
            nonlocal left
            await ask()
            left = True

        await _first(box, leaving(), answer())
    except (LayerError, OSError, RemoteProtocolError, LocalProtocolError):
        pass
    if not left:
        await send(over)


async def _accepted(inside: WSConnection, line: Line) -> ws.AcceptConnection | Refusal:
    """That the server in the box takes the WebSocket, or what it answers instead."""
    while True:
        for event in inside.events():
            if isinstance(event, ws.AcceptConnection):
                return event
            if isinstance(event, ws.RejectConnection):
                status = (
                    event.status_code if 400 <= event.status_code < 600 else 502
                )  # others have no text, or promise more
                return Refusal(status, "the server in the sandbox does not take a WebSocket here")
        data = await line.receive()
        if not data:
            raise RemoteProtocolError("the connection was closed")
        inside.receive_data(data)


# ---- headers ----


def _kept(box: Reached) -> dict[str, Any]:
    return box.held.get("annotations") or {}


def _inward(serving: Serving, scope: Scope, box: Reached, port: int) -> List:
    """The headers of a request as the box gets them."""
    given: List = scope["headers"]
    own = f"{port}-{box.id}.{serving.domain}".encode()
    asked = next((value for name, value in given if name == b"host"), b"")
    if asked.partition(b".")[0] != own.partition(b".")[0]:  # by our own name, and headers that said which box
        asked = own
    mask = _kept(box).get("mask")
    listed = {name.strip().lower() for key, value in given if key == b"connection" for name in value.split(b",")}
    found: List = [(b"host", mask.replace("${PORT}", str(port)).encode() if mask else asked)]
    for name, value in given:
        if name in OURS or name in listed or name.startswith(b"x-forwarded-"):
            continue
        if name in PROOFS and (TOKEN.search(value) or hmac.compare_digest(value, box.token.encode())):
            continue
        if name == b"cookie":
            pairs = [
                pair for pair in value.split(b";") if pair.partition(b"=")[0].strip().decode("latin-1") not in COOKIES
            ]
            if not pairs:
                continue
            value = b";".join(pairs).strip()
        found.append((name, value))
    for name, value in given:  # where the body ends: one of them, `admit` has seen to it
        if name in (b"content-length", b"transfer-encoding"):
            found.append((name, value.strip().lower()))
            break
    client = scope.get("client")
    proto = b"https" if serving.tls else b"http"
    found += [(b"x-forwarded-host", asked), (b"x-forwarded-proto", proto)]
    if client:
        found.append((b"x-forwarded-for", client[0].encode()))
    return found


def _outward(given: Iterable[tuple[bytes, bytes]]) -> List:
    """The headers of an answer as others get them; a cookie is the box's host's alone, and none is called as ours."""
    headers = [(bytes(name).lower(), bytes(value)) for name, value in given]
    listed = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    found: List = []
    for name, value in headers:
        if name in FOREIGN or name in listed:
            continue
        if CONTROLS.search(value):  # nothing that a server can say again
            raise Refusal(502, f"the header {name.decode('latin-1')!r:.60} of the sandbox's answer holds control characters")  # fmt: skip
        if name == b"set-cookie":
            first, *attributes = value.split(b";")
            if first.partition(b"=")[0].strip().decode("latin-1") in COOKIES:
                continue
            value = b";".join(
                [first, *(one for one in attributes if one.partition(b"=")[0].strip().lower() != b"domain")]
            )
        found.append((name, value))
    return found


# ---- TLS, for servers in boxes that speak nothing else ----


async def secured(line: AsyncPort) -> Secured:
    """A connection with TLS in it; whatever certificate the box shows is taken: the connection leads nowhere else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    found = Secured(line, context)
    try:
        await found.drive(found.tls.do_handshake)
    except (ssl.SSLError, LayerError, OSError) as error:
        await line.close()
        raise Refusal(502, f"the server in the sandbox speaks no TLS: {error}") from None
    return found


class Secured:
    """TLS over a connection to a port."""

    def __init__(self, line: AsyncPort, context: ssl.SSLContext) -> None:
        self._line, self._in, self._out = line, ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out, server_hostname="localhost")

    async def drive(self, act: Any, *given: Any) -> Any:
        """Do what TLS does, fetching and sending what it needs."""
        while True:
            try:
                done, wanting = act(*given), False
            except ssl.SSLWantReadError:
                done, wanting = None, True
            if data := self._out.read():
                await self._line.send(data)
            if not wanting:
                return done
            if came := await self._line.receive():
                self._in.write(came)
            else:
                self._in.write_eof()

    async def send(self, data: bytes) -> None:
        await self.drive(self.tls.write, data)

    async def receive(self) -> bytes:
        try:
            found: bytes = await self.drive(self.tls.read, 65536)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return b""
        return found

    async def close(self) -> None:
        await self._line.close()
