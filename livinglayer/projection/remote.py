"""Remote projections: those of another layer, which has granted them to this one. Read there, now or at most so long ago.

Nothing is copied and no key is exchanged: each request is signed with this layer's identity, the other layer's permissions
decide. Only what an owner wrote is followed; it is http or https, never a redirect, and an answer has a size and an end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from .. import typed
from ..errors import Denied, Invalid, LayerError, LimitExceeded, Unauthenticated, Unavailable
from ..substrate.reads import clock
from . import identity

KEYS = ("url", "projection", "key")
SECONDS = 20.0  # for one answer
LARGEST = 32 << 20  # bytes of one
KEPT, KEPT_BYTES = 256, 1 << 20  # answers that are kept for a while, and the largest of them
QUIET = 40.0  # seconds without a word after which a stream is asked for again
SERVER = re.compile(r"[A-Za-z0-9._~:\[\]-]+")


@dataclass(frozen=True)
class Remote:
    """Where a projection is, and who must answer there."""

    url: str
    projection: str
    key: str | None = None  # the name of that layer: an answer of anybody else is none

    @property
    def origin(self) -> str:
        """The beginning of the address, which the other side knows itself by."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True)
class Source:
    """Where rows come from that are another layer's."""

    url: str
    projection: str
    layer: str | None
    tx: int

    def told(self) -> dict[str, Any]:
        return {"url": self.url, "projection": self.projection, "layer": self.layer, "tx": self.tx}


def check(given: Any) -> Remote:
    """What a row says of another layer; Invalid when it could never be reached."""
    hint = '{"url": "https://layer.example.org", "projection": "open_tickets", "key": "layer:…"}'
    if not isinstance(given, Mapping) or set(given) - set(KEYS) or not isinstance(given.get("projection"), str):
        raise Invalid("a remote projection has a url, a projection, and a key if only one layer will do", hint=hint)
    url = given.get("url")
    parts = urlsplit(url) if isinstance(url, str) else None
    try:
        odd = parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:  # a port that is none
        odd = True
    if (
        odd
        or parts is None
        or parts.query
        or parts.fragment
        or "@" in parts.netloc
        or not SERVER.fullmatch(parts.netloc)
    ):
        raise Invalid(f"the url {url!r:.120} of a remote projection is not http(s)://HOST[:PORT]", hint=hint)
    if parts.path not in ("", "/"):
        raise Invalid(f"the url {url!r:.120} of a remote projection has a path", hint="a server's address alone")
    if not re.fullmatch(r"[a-z0-9_.]{1,100}", given["projection"]):
        raise Invalid(f"{given['projection']!r:.120} can't be the name of a projection")
    if given.get("key") is not None:
        identity.public(given["key"])
    return Remote(str(url).rstrip("/"), given["projection"], given.get("key"))


def statement(remote: Remote) -> str:
    """What stands in the place of a SELECT, for people who look."""
    return f"-- {remote.projection} of {remote.url}"


def only_owners(layer: Any, definer: int, name: str) -> None:
    """Denied unless an owner wrote it: whoever may make this server ask an address could reach what only it can."""
    with layer.engine.reading() as session:
        policy = layer.catalog.policy(session, definer, clock(layer.engine, session)[1])
    if not policy.sovereign():
        raise Denied(f"projection {name!r} is another layer's, and only an owner may define such a one")


# Reading


_kept: OrderedDict[Any, tuple[float, list[dict[str, Any]], Source]] = OrderedDict()
_lock = threading.Lock()


def fetch(
    layer: Any, remote: Remote, arguments: Mapping[str, Any], as_of: Any = None, fresh: float = 0.0
) -> tuple[list[dict[str, Any]], Source]:
    """Its rows as the other layer shows them to this one, at most `fresh` seconds old."""
    if not isinstance(arguments, Mapping):
        raise Invalid(f"arguments of projection {remote.projection} are a dict, not {arguments!r:.60}")
    body = typed.dumps(dict(arguments))
    key = (layer.id, remote, body, as_of)
    with _lock:
        found = _kept.get(key)
    if found is not None and time.monotonic() - found[0] < fresh:
        return found[1], found[2]
    asked = time.monotonic()
    query = "" if as_of is None else "?" + urlencode({"as_of": as_of if isinstance(as_of, int) else as_of.isoformat()})
    size, answer = _ask(layer, remote, "POST", f"/api/projection/{remote.projection}{query}", body)
    rows, tx = answer.get("rows"), answer.get("tx")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or type(tx) is not int:
        raise Unavailable(f"what {remote.origin} answers is not of a layer")
    source = Source(remote.origin, remote.projection, remote.key, tx)
    if fresh > 0 and size <= KEPT_BYTES:
        with _lock:
            _kept[key] = (asked, rows, source)
            _kept.move_to_end(key)
            while len(_kept) > KEPT:
                _kept.popitem(last=False)
    return rows, source


def _connection(remote: Remote, seconds: float) -> http.client.HTTPConnection:
    parts = urlsplit(remote.url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        return http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=seconds, context=ssl.create_default_context()
        )
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)


def _send(
    layer: Any, remote: Remote, connection: http.client.HTTPConnection, method: str, path: str, body: bytes, accept: str
) -> str:
    """Send a signed request; its number."""
    proof, number = identity.request(layer.id, remote.key or remote.origin, method, path, body)
    headers = {"authorization": f"Bearer {proof}", "accept": accept, "user-agent": "livinglayer"}
    if method == "POST":
        headers["content-type"] = typed.TYPED
    connection.request(method, path, body if method == "POST" else None, headers)
    return number


@contextlib.contextmanager
def within(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """What is not over by then is broken off, however slowly it comes; what goes wrong is said of the other side."""
    late = threading.Event()

    def end() -> None:
        late.set()
        if (sock := connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
        if late.is_set():
            raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        said = (
            f"no answer within {seconds:g} seconds" if late.is_set() or isinstance(error, TimeoutError) else str(error)
        )
        raise Unavailable(
            f"the server at {connection.host}:{connection.port} can't be reached: {said or type(error).__name__}",
            hint="what it has is back when it is",
        ) from None
    finally:
        timer.cancel()
        connection.close()


def _ask(layer: Any, remote: Remote, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    connection = _connection(remote, SECONDS)
    with within(connection, SECONDS):
        number = _send(layer, remote, connection, method, path, body, typed.TYPED)
        response = connection.getresponse()
        data = response.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise LimitExceeded(f"the answer of {remote.origin} is larger than {LARGEST} bytes")
        if response.length:
            raise http.client.IncompleteRead(data)
    if remote.key is not None:
        _own_words(layer, remote, number, response, data)
    if response.status != 200:
        raise refusal(remote, response.status, data)
    try:
        found = typed.loads(data, typed=True)
    except Invalid:
        found = None
    if not isinstance(found, dict):
        raise Unavailable(f"what {remote.origin} answers is not of a layer")
    return len(data), found


def _own_words(layer: Any, remote: Remote, number: str, response: http.client.HTTPResponse, data: bytes) -> None:
    """Unavailable unless the layer that is meant has signed this answer to this request."""
    try:
        proof = response.headers.get("layer-proof") or ""
        said = identity.opened(proof, identity.ANSWER, str(remote.key), [identity.name(layer.id)])
        if (said["jti"], said.get("status"), said.get("body")) == (number, response.status, identity.digest(data)):
            return
    except Unauthenticated:
        pass
    if response.status == 401:  # whom it does not know it tells nothing, its name neither
        raise Unavailable(
            f"whoever answers at {remote.origin} does not know this layer, or is not the layer {remote.key}",
            hint=f"there: layer identity; layer principal NAME --kind layer --attribute key={identity.name(layer.id)}",
        )
    raise Unavailable(
        f"whoever answers at {remote.origin} is not the layer {remote.key}",
        hint="`layer identity` there prints its name",
    )


def refusal(remote: Remote, status: int, data: bytes) -> LayerError:
    """Why the other side gave no rows."""
    try:
        said = str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        said = f"status {status}"
    said = "".join(letter for letter in said[:300] if letter.isprintable())
    if status == 400:
        return Invalid(f"{remote.origin} says: {said}")
    if status in (401, 403, 404):
        return Unavailable(
            f"{remote.origin} does not show projection {remote.projection!r} to this layer: {said}",
            hint=f"there: layer principal … --kind layer --attribute key=…, layer grant … read projection:{remote.projection}",
        )
    if 300 <= status < 400:
        return Unavailable(f"{remote.origin} leads elsewhere, where nobody is asked")
    return Unavailable(f"{remote.origin} gives no answer: {said}")


# Following


def follow(layer: Any, remote: Remote, arguments: Mapping[str, Any], over: Callable[[], bool]) -> Iterator[None]:
    """Yields whenever the rows may be others, until `over`; a stream that ends, or a layer that was away, is asked again."""
    asked = urlencode({"projection": remote.projection, "arguments": typed.plain(dict(arguments)).decode()})
    pause = 1.0  # seconds until it is asked again: longer each time that it has nothing to say
    while not over():
        connection = _connection(remote, QUIET)
        try:
            with within(connection, 3600.0):
                _send(layer, remote, connection, "GET", f"/api/live?{asked}", b"", "text/event-stream")
                response = connection.getresponse()
                if response.status != 200:
                    raise http.client.HTTPException(f"status {response.status}")
                while not over() and (line := response.readline(LARGEST)):
                    pause = 1.0
                    if line.startswith(b"event: rows"):
                        yield
        except Unavailable:
            pause = min(pause * 2, 30.0)
        until = time.monotonic() + pause
        while time.monotonic() < until:
            if over():
                return
            time.sleep(0.1)
        yield  # what happened meanwhile
