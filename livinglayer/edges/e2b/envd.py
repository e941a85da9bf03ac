"""Envd: what E2B's clients ask a box for: processes, files, and whether it is there."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import time
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from ...errors import LayerError, Unauthenticated
from ..http.serving import Serving
from . import files, processes
from .asking import Asked, headers_of, is_gone
from .frames import STREAM, Failure, Incoming, Left, answer, failure, over, parse, plain
from .reach import Reached, forget, gone, ids, missing, reach, token

VERSION = "0.6.13"
UNARY = {"/process.Process/" + name: act for name, act in processes.UNARY.items()} | {
    "/filesystem.Filesystem/" + name: act for name, act in files.UNARY.items()
}
STREAMS = {"/process.Process/" + name: act for name, act in processes.STREAMS.items()} | {
    "/filesystem.Filesystem/" + name: act for name, act in files.STREAMS.items()
}
SERVICES = ("/process.Process/", "/filesystem.Filesystem/")
LIVE, AGAIN = (
    1.0,
    0.0,
)  # seconds for which the boxes that there are are believed to be those; when none of them is meant
NO_STORE = [(b"cache-control", b"no-store"), (b"content-type", b"application/json")]
FORBIDDEN = "unauthorized access, please provide a valid access token or method signing if supported"


async def handle(serving: Serving, scope: Scope, receive: Receive, send: Send, box: Reached) -> None:
    """One request to a box's envd."""
    if scope["type"] != "http":
        return await send({"type": "websocket.close", "code": 1008})
    headers, path, begun = headers_of(scope), scope["path"], False

    async def sending(message: Any) -> None:
        nonlocal begun
        begun = True
        await send(message)

    asked = Asked(serving, box, headers, Incoming(receive))
    try:
        if (stream := STREAMS.get(path)) is not None:
            if check(scope, asked, b"application/connect+json"):
                await stream(asked, receive, sending)
        elif (unary := UNARY.get(path)) is not None:
            if check(scope, asked, b"application/json"):
                async with asyncio.timeout(asked.seconds):
                    found = await unary(asked, parse(await asked.incoming.whole() or b"{}"))
                await answer(sending, 200, json.dumps(found, separators=(",", ":")).encode())
        else:
            await other(asked, scope, sending)
    except Left:
        return
    except Unauthenticated as error:
        await plain(send, 401, error.message)
    except files.Refused as error:
        await plain(send, error.status, error.message)
    except TimeoutError:
        await tell(send, Failure("deadline_exceeded", "context deadline exceeded"))
    except Failure as error:
        if not begun:
            await tell(send, error)
    except LayerError as error:
        if begun:
            raise  # half an answer can only be cut off
        if is_gone(error):
            forget(serving, box.id)
            return await gone(missing(box.id), scope, receive, send)
        if path in STREAMS:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM})
            return await send({"type": "http.response.body", "body": over(failure(error))})
        await tell(send, failure(error))


async def tell(send: Send, failure: Failure) -> None:
    """An error where there is no stream."""
    await answer(send, failure.status, json.dumps(failure.body).encode())


def check(scope: Scope, asked: Asked, content: bytes) -> bool:
    """Refuse who may not ask, and what is not asked as the protocol has it."""
    proven(asked)
    if scope["method"] != "POST":
        raise Failure("unimplemented", f"{scope['method']} is not how a procedure is called", 405)
    kind = asked.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != content:
        raise Failure("unimplemented", f"the content is {kind.decode('latin-1')!r:.80}, not {content.decode()!r}", 415)
    packing = asked.headers.get(b"connect-content-encoding" if content != b"application/json" else b"content-encoding")
    if packing not in (None, b"", b"identity"):
        raise Failure("unimplemented", f"compression {packing!r:.40} is not taken", 415)
    return True


def proven(asked: Asked) -> None:
    """Unauthenticated for who does not have the box's token."""
    if not hmac.compare_digest(asked.headers.get(b"x-access-token", b""), asked.box.token.encode()):
        raise Unauthenticated(FORBIDDEN)


async def other(asked: Asked, scope: Scope, send: Send) -> None:
    """What is no procedure."""
    method, path = scope["method"], scope["path"]
    if path == "/health" and method == "GET":
        return await answer(send, 204, b"", [(b"cache-control", b"no-store")])
    if path == "/files" and method in ("GET", "POST"):
        query = queried(scope)
        signature(asked, query, method)
        asked.user = query.get("username") or asked.box.user
        if method == "POST":
            return await files.upload(asked, query.get("path"), scope["headers"], send)
        try:
            return await files.download(asked, query.get("path", ""), send)
        except Failure as error:
            raise files.Refused(error.status, error.message) from None
    proven(asked)
    if path == "/init" and method == "POST":
        if given := await asked.incoming.whole():
            parse(given)
        return await answer(send, 204, b"", [(b"x-envd-version", VERSION.encode())])
    if path == "/envs" and method == "GET":
        return await answer(send, 200, json.dumps(asked.box.environment).encode(), NO_STORE)
    if path == "/metrics" and method == "GET":
        return await answer(send, 200, json.dumps(await metrics(asked)).encode(), NO_STORE)
    if path.startswith(SERVICES):
        raise Failure("unimplemented", f"there is no procedure {path!r:.120}")
    if path in ("/health", "/files", "/init", "/envs", "/metrics"):
        raise files.Refused(405, f"{method} is not allowed at {path}")
    raise files.Refused(404, f"there is nothing at {path!r:.120}")


async def metrics(asked: Asked) -> dict[str, Any]:
    """What the box uses now, in envd's words."""
    used, limits = await asked.box.box.metrics(), asked.box.info.get("limits") or {}
    memory, total = int(used.get("memory") or 0), int(limits.get("memory") or 0)
    return {
        "ts": int(time.time()), "cpu_count": max(1, round(float(limits.get("cpu") or 1))), "cpu_used_pct": 0.0,
        "mem_total": total, "mem_used": memory, "mem_cache": int(used.get("memory_cache") or 0), "mem_total_mib": total >> 20,
        "mem_used_mib": memory >> 20, "disk_used": int(used.get("disk") or 0), "disk_total": int(limits.get("disk") or 0),
    }  # fmt: skip


# ---- signed URLs ----


def queried(scope: Scope) -> dict[str, str]:
    """What a URL says after its path; of several of one name the first."""
    try:
        found = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=32)
    except ValueError:
        raise files.Refused(400, "the query has too many fields") from None
    return {name: values[0] for name, values in found.items()}


def signed_with(query: dict[str, str], method: str, secret: str) -> bytes:
    """What the signature of a URL must be, by the token of a box."""
    words = [query.get("path", ""), "read" if method == "GET" else "write", query.get("username", ""), secret]
    if "signature_expiration" in query:
        words.append(query["signature_expiration"])
    digest = hashlib.sha256(":".join(words).encode("utf-8", "replace")).digest()
    return b"v1_" + base64.b64encode(digest).rstrip(b"=")


def signature(asked: Asked, query: dict[str, str], method: str) -> None:
    """Unauthenticated unless the request has the box's token, or its URL was signed with it and is still good."""
    if asked.headers.get(b"x-access-token"):
        if not hmac.compare_digest(asked.headers[b"x-access-token"], asked.box.token.encode()):
            raise Unauthenticated("access token present in header but does not match")
        return
    given = query.get("signature")
    if given is None:
        raise Unauthenticated("missing signature query parameter")
    until = expiry(query)
    if not hmac.compare_digest(signed_with(query, method, asked.box.token), given.encode("utf-8", "replace")):
        raise Unauthenticated("invalid signature")
    if until is not None and until < time.time():
        raise Unauthenticated("signature is already expired")


def proves(serving: Serving, scope: Scope, id: str) -> bool:
    """Whether a request has the token of a box, or was signed with it: nothing else wakes one."""
    secret, method = token(serving, id), scope.get("method", "")
    if hmac.compare_digest(headers_of(scope).get(b"x-access-token", b""), secret.encode()):
        return True
    try:
        query = queried(scope)
    except files.Refused:
        return False
    given = query.get("signature", "").encode("utf-8", "replace")
    return scope["path"] == "/files" and hmac.compare_digest(given, signed_with(query, method, secret))


def expiry(query: dict[str, str]) -> int | None:
    given = query.get("signature_expiration")
    if given is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,17}", given):
        raise files.Refused(400, "Invalid format for parameter signature_expiration")
    return int(given)


async def signed(serving: Serving, scope: Scope, receive: Receive, send: Send) -> None:
    """A request that names no box: the one whose token its URL was signed with answers it."""
    headers, method = headers_of(scope), scope["method"]
    try:
        if method not in ("GET", "POST") or scope["path"] != "/files":
            raise files.Refused(404, f"there is nothing at {scope['path']!r:.120}")
        query = queried(scope)
        given, key = query.get("signature", "").encode("utf-8", "replace"), headers.get(b"x-access-token", b"")
        if not given and not key:
            raise Unauthenticated("missing signature query parameter")
        expiry(query)
        found = whose(await live(serving, LIVE), query, method, given, key)
        if found is None:  # a box that was made just now?
            found = whose(await live(serving, AGAIN), query, method, given, key)
        if found is None:
            raise Unauthenticated("invalid signature")
    except Unauthenticated as error:
        return await plain(send, 401, error.message)
    except files.Refused as error:
        return await plain(send, error.status, error.message)
    try:
        box = await reach(serving, found)
    except LayerError:
        return await gone(missing(found), scope, receive, send)
    await handle(serving, scope, receive, send, box)


def whose(tokens: dict[str, str], query: dict[str, str], method: str, given: bytes, key: bytes) -> str | None:
    """The box that a signature or a token is of; all are tried, so that how long it takes says nothing."""
    found = None
    for id, secret in tokens.items():
        matches = secret.encode() if key else signed_with(query, method, secret)
        if hmac.compare_digest(matches, key or given):
            found = id
    return found


async def live(serving: Serving, age: float) -> dict[str, str]:
    """The tokens of the boxes that there are, as they were at most `age` seconds ago; the host is asked by one at a time."""
    kept: dict[str, Any] = serving.more.setdefault("envd_tokens", {"at": 0.0, "tokens": {}, "lock": asyncio.Lock()})
    asked = time.monotonic()
    async with kept["lock"]:
        if kept["at"] < asked - age:
            before: dict[str, str] = kept["tokens"]
            kept["at"] = time.monotonic()
            kept["tokens"] = {id: before.get(id) or token(serving, id) for id in await ids(serving)}
        tokens: dict[str, str] = kept["tokens"]
        return tokens
