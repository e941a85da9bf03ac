"""One HTTP request of a box: checked, its secrets put in, sent on, its response brought back without them.

HTTP/1.1 and HTTP/2 differ only in how they are read and written (h1.py, h2.py); what is decided is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import ssl
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from livinglayer.errors import Denied, Invalid, LayerError, LimitExceeded, NotFound, TimedOut, Unavailable
from livinglayer.sandbox.egress import models, names, rules, secrets, tls
from livinglayer.sandbox.egress.box import Box, Passage
from livinglayer.sandbox.egress.complaint import complain
from livinglayer.sandbox.egress.record import Headers, Key
from livinglayer.sandbox.egress.rules import Ask, Rule
from livinglayer.sandbox.egress.streams import CHUNK, Streams, dialed, tunnel

# Of one connection, not of the request; and what the gateway writes itself.
_OWN = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    b"host content-length expect http2-settings alt-svc".split()
)
_FRAMING = frozenset(b"host content-length transfer-encoding content-type cookie authorization".split())
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+\Z")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*\Z")
_TARGET = re.compile(rb"[\x21-\x7e]+\Z")
_TEXT = re.compile(
    rb"(?:text/|application/(?:[\w.+-]*json|x-www-form-urlencoded|[\w.+-]*xml|graphql)|multipart/form-data)"
)
_AT_ONCE = 8  # HTTP/1.1 connections to a server for the requests of one HTTP/2 connection
HELD = 64 << 20  # bytes of a request that waits until it is known whether it was recorded
_NO_PROXY = "the gateway is no proxy, and none is needed: connect to the host itself"
_STATUS = {Denied: 403, LimitExceeded: 429, Invalid: 400, NotFound: 403, Unavailable: 502, TimedOut: 504}


class Gone(Exception):
    """The box or the server ended its connection early."""


@dataclass
class Request:
    """A request as a box wrote it."""

    protocol: str  # for the event: http, https, h2
    method: str
    target: bytes
    authorities: list[bytes]  # Host headers and :authority
    headers: Headers
    length: int | None  # of the body; None if only its end will tell
    body: AsyncIterator[bytes]
    trailers: Headers = field(default_factory=list)
    problem: str | None = None  # why it can't be what it seems


@dataclass
class Response:
    """A response as it arrives; trailers are there after the body."""

    status: int
    headers: Headers
    body: AsyncGenerator[bytes, None]
    trailers: Headers = field(default_factory=list)
    streams: Streams | None = None  # after 101: the rest of the connection
    early: bytes = b""  # and what of it was read already


class Reply(Protocol):
    """Where a response goes."""

    started: bool

    async def head(self, status: int, headers: Headers) -> None: ...
    async def data(self, data: bytes) -> None: ...
    async def end(self, trailers: Headers) -> None: ...
    async def switch(self, headers: Headers) -> tuple[Streams, bytes]: ...
    def abort(self) -> None: ...


class Upstream(Protocol):
    """A connection to a server."""

    generation: int

    @property
    def usable(self) -> bool: ...
    async def ask(
        self,
        method: str,
        scheme: str,
        authority: bytes,
        target: bytes,
        headers: Headers,
        length: int | None,
        body: AsyncIterator[bytes],
        trailers: Headers,
        upgrade: bool,
    ) -> Response: ...
    def close(self) -> None: ...
    async def settled(self) -> None: ...


class Site:
    """Where one connection of a box leads, and the gateway's own connections to there."""

    contexts: dict[bool, ssl.SSLContext] = {}

    def __init__(self, box: Box, scheme: str, host: str | None, address: str, port: int, sni: str | None) -> None:
        self.box, self.scheme, self.host, self.address, self.port, self.sni = box, scheme, host, address, port, sni
        self._idle: list[Upstream] = []
        self._dialed: set[Upstream] = set()
        self._shared: Upstream | None = None
        self._dialing = asyncio.Lock()
        self._freed = asyncio.Event()
        box.idle.add(self._end_idle)

    def agree(self, authorities: list[bytes]) -> str:
        """The host, if destination, SNI and every authority name the same one; Denied or Invalid otherwise."""
        default = rules.DEFAULT_PORT[self.scheme]
        said = {names.authority(one, default) for one in authorities}
        if len(said) > 1:
            raise Denied("Host and :authority name different hosts")
        host, port = said.pop() if said else (self.host, self.port)
        if host is None:
            raise Invalid("the request names no host")
        if self.sni is not None and self.sni != host:
            raise Denied(f"the request is for {host}, the TLS connection was made for {self.sni}")
        if self.host is None and rules.names_allowed(self.box.rules, host) and self.box.book.adopt(host, self.address):
            self.host = host
        if (self.host or self.address) != host or port != self.port:
            raise Denied(
                f"the request is for {host}:{port}, the connection goes to {self.host or self.address}:{self.port}"
            )
        return host

    async def upstream(self, rule: Rule, host: str, multiplexed: bool) -> tuple[Upstream, bool]:
        """A connection to the server, and whether it was used before."""
        from livinglayer.sandbox.egress.h1 import H1Upstream
        from livinglayer.sandbox.egress.h2 import H2Upstream

        fresh = self.box.generation
        if multiplexed:
            await self._dialing.acquire()  # the first request decides whether all share one HTTP/2 connection
        try:
            if multiplexed and self._shared is not None:
                if self._shared.usable and self._shared.generation == fresh:
                    return self._shared, True
                self._shared = None
            while True:
                while self._idle:
                    upstream = self._idle.pop()
                    if upstream.usable and upstream.generation == fresh:
                        return upstream, True
                    await self.drop(upstream)
                if not multiplexed or len(self._dialed) < _AT_ONCE:
                    break
                self._freed.clear()
                await self._freed.wait()
            limits = self.box.limits
            sock = await self.box.connect(host, self.port, rule)
            context = None
            if self.scheme == "https":
                context = self.contexts.get(multiplexed)
                if context is None:
                    context = tls.client(["h2", "http/1.1"] if multiplexed else ["http/1.1"])
                    self.contexts[multiplexed] = context
            try:
                streams = await dialed(sock, context, host, limits.connect_seconds)
            except ssl.SSLCertVerificationError as error:
                raise Unavailable(f"the certificate of {host} is not trusted: {error.verify_message}") from None
            except (OSError, ssl.SSLError) as error:
                raise Unavailable(f"no TLS with {host}: {getattr(error, 'reason', None) or 'broken off'}") from None
            chosen = streams[1].get_extra_info("ssl_object")
            if chosen is not None and chosen.selected_alpn_protocol() == "h2":
                self._shared = await H2Upstream.start(streams, self.box, fresh)
                self._dialed.add(self._shared)
                return self._shared, False
            made = H1Upstream(streams, limits, fresh)
            self._dialed.add(made)
            return made, False
        finally:
            if multiplexed:
                self._dialing.release()

    async def give_back(self, upstream: Upstream) -> None:
        """Keep a connection for the next request, if it can be used again."""
        if upstream is self._shared:
            return
        if upstream.usable and upstream.generation == self.box.generation:
            self._idle.append(upstream)
            self._freed.set()
        else:
            await self.drop(upstream)

    async def drop(self, upstream: Upstream) -> None:
        """End a connection a request failed on, unless other requests are on it too."""
        if upstream is not self._shared or not upstream.usable:
            upstream.close()
            self._dialed.discard(upstream)
            self._freed.set()
            await upstream.settled()
            self._shared = None if upstream is self._shared else self._shared

    def _end_idle(self) -> None:
        while self._idle:
            upstream = self._idle.pop()
            upstream.close()
            self._dialed.discard(upstream)

    def close(self) -> None:
        self.box.idle.discard(self._end_idle)
        for upstream in self._dialed:
            upstream.close()


class Exchange:
    """One request and its response."""

    def __init__(self, site: Site, request: Request, reply: Reply) -> None:
        self.site, self.box, self.request, self.reply = site, site.box, request, reply
        path = request.target.partition(b"?")[0].decode("latin-1")
        seen = path if path.isprintable() else ascii(path)
        ask = Ask(site.scheme, site.host or site.address, site.port, request.method, seen)
        self.passage = Passage(site.box, request.protocol, ask)
        self.digest = hashlib.sha256()
        self.reader: models.Reader | None = None  # of a model's answer
        self._asked, self._went = 0, False  # bytes of the request, and whether a server has got any
        self._task = asyncio.current_task()

    async def run(self) -> None:
        """Answer the request, with the server's response or with the reason why there is none."""
        try:
            await self._forward()
        except LayerError as error:
            if isinstance(error, Denied | LimitExceeded | Invalid | NotFound):
                self.passage.verdict = "deny"
                rule = error.details.get("rule")
                self.passage.rule = rule if isinstance(rule, Rule) else self.passage.rule
            self.passage.reason = self.passage.reason or error.message
            await self._refuse(_STATUS.get(type(error), 502), error)
        except (Gone, OSError, ssl.SSLError):
            self.passage.reason = self.passage.reason or "the connection broke"
            self.reply.abort()
        except Exception as error:
            complain(error)
            self.passage.reason = "the gateway failed"
            self.reply.abort()
        finally:
            self._count()
            await self.passage.end()

    def _count(self) -> None:
        """What an exchange with a model took, also of one that was broken off: whoever hangs up has been answered so far."""
        passage, kept = self.passage, self.passage.kept
        if self.reader is None or not self._went or passage.rule is None:
            passage.kept = None
            return
        self.reader.end()
        counts = self.reader.tokens(self._asked, passage.status, posted=True)
        passage.model = {"api": passage.rule.model, "model": self.reader.model, **counts, "stop": self.reader.stop}
        if kept is not None:
            kept.close()
            passage.model |= {"exchange": kept.name} | ({"cut": sorted(kept.cut)} if kept.cut else {})

    async def _heard(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for data in body:
            self._asked += len(data)
            if self.passage.kept is not None:
                self.passage.kept.add("request", data)
            yield data

    async def _refuse(self, status: int, error: LayerError) -> None:
        if self.reply.started:
            self.reply.abort()
            return
        self.passage.status = status
        text = self.box.secrets.hide(
            error.message.encode() + (f"\n{error.hint}".encode() if error.hint else b"") + b"\n"
        )
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(text)).encode())]
        if self.passage.verdict == "deny":
            headers.append((b"layer-egress", b"deny"))
        if "wait" in error.details:
            headers.append((b"retry-after", str(error.details["wait"]).encode()))
        with contextlib.suppress(Gone, OSError, ssl.SSLError):
            await self.reply.head(status, headers)
            if self.request.method != "HEAD":
                await self.reply.data(text)
            await self.reply.end([])

    def _abort(self) -> None:
        self.reply.abort()
        if self._task is not None:
            self._task.cancel()

    def _check(self) -> tuple[str, Rule, bytes, bytes]:
        """Host, rule, path and query of a request that is allowed."""
        request = self.request
        if request.problem:
            raise Invalid(request.problem)
        if len(request.target) + _size(request.headers) > self.box.limits.header_bytes:
            raise Invalid(f"the request's head is longer than {self.box.limits.header_bytes} bytes")
        if request.method == "CONNECT" or (request.target[:1] != b"/" and b"://" in request.target):
            raise Denied(_NO_PROXY)
        if not _TARGET.match(request.target) or b"#" in request.target:
            raise Invalid("the request's path has characters a URL can't have")
        for name, value in [*request.headers, *request.trailers]:
            if not _NAME.match(name) or not _VALUE.match(value):
                raise Invalid(f"header {name.decode('latin-1')!r} has characters a header can't have")
        host = self.site.agree(request.authorities)
        path, mark, query = request.target.partition(b"?")
        sent = rules.readings(path.decode("ascii"))[0]
        self.passage.ask = Ask(self.site.scheme, host, self.site.port, request.method, sent)
        return host, self.passage.allow(self._abort), sent.encode(), mark + query

    async def _forward(self) -> None:
        request, box = self.request, self.box
        host, rule, path, query = self._check()
        upgrade = self._wants_websocket()
        if upgrade:
            self.passage.protocol = "ws"
            if rule.model is not None:
                raise Denied("what is said to a model over a WebSocket can't be counted", rule=rule)
        recorder, replay = box.recorder, box.replay
        recording = recorder.begin() if recorder and not upgrade else None
        url = box.secrets.hide_text(str(Ask(self.site.scheme, host, self.site.port)) + (path + query).decode())
        if replay is not None:
            if upgrade:
                raise Denied("WebSockets are not recorded, so they can't be replayed")
            if await self._replayed(url, recording):
                return
        if rule.model is not None and request.method not in ("GET", "HEAD", "OPTIONS"):
            self.reader, request.body = models.Reader(), self._heard(request.body)
            self.passage.kept = box.exchanges.begin() if box.exchanges is not None else None
        headers, query, length, body = await self._with_secrets(rule, query, upgrade)
        self.passage.sent(len(path) + len(query) + _size(headers) + 32)
        authority = host.encode() + (
            b"" if self.site.port == rules.DEFAULT_PORT[self.site.scheme] else b":%d" % self.site.port
        )
        again = length == 0
        while True:
            upstream, used = await self.site.upstream(rule, host, request.protocol == "h2" and not upgrade)
            self._went = True
            try:
                response = await upstream.ask(
                    request.method, self.site.scheme, authority, path + query, headers, length, body, [],
                    upgrade,
                )  # fmt: skip
                break
            except (Gone, OSError, ssl.SSLError):
                await self.site.drop(upstream)
                if not (used and again):  # an idle connection the server had ended meanwhile is no failure
                    raise Unavailable(f"{host} broke off before its response") from None
                again = False
            except BaseException:
                await self.site.drop(upstream)
                raise
        try:
            if response.streams is not None:
                await self._websocket(response, rule)
                return
            async with contextlib.aclosing(response.body):
                await self._relay(response, rule, recording, (request.method, url))
        except BaseException:
            await self.site.drop(upstream)
            raise
        await self.site.give_back(upstream)

    def _wants_websocket(self) -> bool:
        said = dict(self.request.headers)
        return (
            self.request.protocol != "h2"
            and said.get(b"upgrade", b"").lower() == b"websocket"
            and b"upgrade" in [one.strip().lower() for one in said.get(b"connection", b"").split(b",")]
        )

    async def _with_secrets(
        self, rule: Rule, query: bytes, upgrade: bool
    ) -> tuple[Headers, bytes, int | None, AsyncIterator[bytes]]:
        """What is sent: headers, query, length and body, with the placeholders this rule names replaced."""
        request, known, used = self.request, self.box.secrets, self.passage.used
        said = dict(request.headers)
        dropped = {one.strip().lower() for one in said.get(b"connection", b"").split(b",")} - _FRAMING
        kept = [(name, value) for name, value in request.headers if name not in _OWN and name not in dropped]
        guarded = known and (rule.secrets or rule.headers)
        if guarded or rule.model is not None:
            # The response must be readable and whole, or a value could come back in a form that is not seen, or tokens uncounted.
            kept = [
                (name, value)
                for name, value in kept
                if name not in (b"accept-encoding", b"range", b"if-range", b"sec-websocket-extensions")
            ]
            kept.append((b"accept-encoding", b"identity"))
        allowed = {place: rule.secrets if place in rule.swap else frozenset[str]() for place in rules.PLACES}
        headers = [(name, known.swap_header(name, value, allowed["header"], used)) for name, value in kept]
        if rule.headers:
            set_here = {name.encode(): value.encode() for name, value in rule.headers}
            headers = [(name, value) for name, value in headers if name not in set_here]
            headers += [(name, known.swap_header(name, value, rule.secrets, used)) for name, value in set_here.items()]
        known.swap(request.target.partition(b"?")[0], (), secrets.plain, used)  # notes what stays in a path
        query = known.swap(query, allowed["query"], secrets.in_query, used)
        if request.length == 0:
            return headers, query, 0, _nothing()
        kind = said.get(b"content-type", b"text/plain").lower()
        if (
            not guarded
            or not allowed["body"]
            or said.get(b"content-encoding", b"identity").lower() != b"identity"
            or not _TEXT.match(kind)
        ):
            return headers, query, request.length, self._counted(b"", known.scanner(used))
        held = b""
        async for data in request.body:
            held += data
            if len(held) > self.box.limits.swap_bytes:
                return headers, query, request.length, self._counted(held, known.scanner(used))
        escape = secrets.in_json if b"json" in kind else secrets.in_form if b"urlencoded" in kind else secrets.plain
        self.digest.update(held)
        swapped = known.swap(held, allowed["body"], escape, used)
        self.passage.sent(len(swapped))
        return headers, query, len(swapped), _once(swapped)

    async def _counted(self, begun: bytes, scanner: secrets.Scanner) -> AsyncIterator[bytes]:
        if begun:
            self.digest.update(begun)
            scanner.feed(begun)
            self.passage.sent(len(begun))
            yield begun
        async for data in self.request.body:
            self.digest.update(data)
            scanner.feed(data)
            self.passage.sent(len(data))
            yield data

    async def _relay(self, response: Response, rule: Rule, recording: str | None, asked: tuple[str, str]) -> None:
        known = self.box.secrets
        headers = self._hidden([(name, value) for name, value in response.headers if name not in _OWN])
        length = dict(response.headers).get(b"content-length")
        no_body = self.request.method == "HEAD" or response.status in (204, 304)
        decode: Callable[[bytes], Iterator[bytes]] | None = None
        if ((known and (rule.secrets or rule.headers)) or rule.model is not None) and not no_body:
            coding = dict(headers).get(b"content-encoding", b"identity").lower()
            if coding != b"identity":
                decode = _decoder(coding)
                headers = [(name, value) for name, value in headers if name not in (b"content-encoding", b"etag")]
        if length is not None and (no_body or (not known and decode is None)):
            headers.append((b"content-length", length))
        self.passage.status = response.status
        self.passage.received(_size(response.headers) + 16)
        await self.reply.head(response.status, headers)
        recorder = self.box.recorder
        redactor = known.redactor()
        if self.reader is not None:
            self.reader = models.Reader(dict(headers).get(b"content-type", b"").decode("latin-1"))

        async def pass_on(data: bytes) -> None:
            if data:
                if recording and recorder:
                    recorder.data(recording, data)
                if self.reader is not None:
                    self.reader.feed(data)
                if self.passage.kept is not None:
                    self.passage.kept.add("answer", data)
                await self.reply.data(data)

        async for data in response.body:
            self.passage.received(len(data))
            for part in decode(data) if decode is not None else (data,):
                await pass_on(redactor.feed(part))
        await pass_on(redactor.end())
        trailers = self._hidden([(name, value) for name, value in response.trailers if name not in _OWN])
        await self.reply.end(trailers)
        if recording and recorder:
            recorder.end(recording, (*asked, self.digest.hexdigest()), response.status, headers, trailers)

    def _hidden(self, headers: Headers) -> Headers:
        known = self.box.secrets
        return [(name, known.hide(value)) for name, value in headers] if known else headers

    async def _replayed(self, url: str, recording: str | None) -> bool:
        """Answer from the recording. What is not in it is refused; where this is recorded, too, it goes out: False."""
        request, replay, recorder, held = self.request, self.box.replay, self.box.recorder, bytearray()
        assert replay is not None
        async for data in request.body:
            self.digest.update(data)
            if recorder is not None:
                if len(held) + len(data) > HELD:
                    raise LimitExceeded(f"a request that may have been recorded is larger than {HELD} bytes")
                held += data
        key: Key = (request.method, url, self.digest.hexdigest())
        if recorder is not None and not replay.has(key):
            self.digest, request.body = hashlib.sha256(), _once(bytes(held)) if held else _nothing()
            return False
        seen = replay.find(key)
        self.passage.status, self.passage.reason = seen.status, "replayed"
        await self.reply.head(seen.status, seen.headers)
        for data in replay.body(seen):
            self.passage.down += len(data)
            await self.reply.data(data)
            if recording and recorder:
                recorder.data(recording, data)
        await self.reply.end(seen.trailers)
        if recording and recorder:
            recorder.end(recording, key, seen.status, seen.headers, seen.trailers)
        return True

    async def _websocket(self, response: Response, rule: Rule) -> None:
        assert response.streams is not None
        self.passage.status = 101
        headers = self._hidden([(name, value) for name, value in response.headers if name not in _OWN])
        box, early = await self.reply.switch(headers)
        # The frames keep their lengths, so a value that comes back is blotted out rather than replaced.
        redactor = self.box.secrets.redactor(same_length=True)

        def sent(data: bytes) -> bytes:
            self.passage.sent(len(data))
            return data

        def received(data: bytes) -> bytes:
            self.passage.received(len(data))
            return redactor.feed(data) if data else redactor.end()

        if early:
            response.streams[1].write(sent(early))
        if response.early:
            box[1].write(received(response.early))
        await tunnel(box, response.streams, sent, received, self.box.limits.tunnel_seconds)


def _size(headers: Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _decoder(coding: bytes) -> Callable[[bytes], Iterator[bytes]]:
    """Undo a content coding the server used unasked; Unavailable for one that can't be undone here."""
    if coding not in (b"gzip", b"x-gzip", b"deflate"):
        raise Unavailable(f"the server answered in {coding.decode('latin-1')}, which the gateway can't read")
    stream = zlib.decompressobj(47)  # gzip or zlib, by its header

    def decode(data: bytes) -> Iterator[bytes]:
        try:
            while data:  # in parts, for a little data can unfold to a lot
                yield stream.decompress(data, CHUNK)
                data = stream.unconsumed_tail
        except zlib.error:
            raise Gone from None

    return decode
