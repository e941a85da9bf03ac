"""Layers: requests that another layer has signed, and what is shown live of another one's projections.

A layer is a principal of kind `layer` whose attribute `key` is its name. What it signs is for this server, this request
and once; it reads what its permissions let it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ... import typed
from ...errors import LayerError, LimitExceeded, Unauthenticated
from ...law.tokens import Proven
from ...projection import identity, query, remote
from ...substrate.ledger import MAIN_CHAIN
from ...substrate.schema import SYSTEM

if TYPE_CHECKING:
    from .serving import Caller, Serving

FOLLOWED = 200  # streams of other layers at once: each has a thread
NOBODY = "no layer of this name is known here"
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


async def prove(serving: Serving, text: str, method: str, path: str, payload: bytes | None) -> Proven:
    """The principal of the layer that signed this very request; Unauthenticated for anything else."""
    return await serving.do(_prove, serving, text, method, path, payload or b"")


async def plausible(serving: Serving, text: str) -> bool:
    """Whether a layer that is known here has signed it for us, so that what it sends with it is worth reading."""
    try:
        await serving.do(_said, serving, text)
    except Unauthenticated:
        return False
    return True


def _said(serving: Serving, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of the layer that signed a statement for us, and what it says."""
    layer = serving.layer
    claims = identity.claims(text)
    named = claims.get("iss")
    people = SYSTEM.by_name["principal"]
    with layer.engine.reading() as session:
        where = f"where x.{people.by_name['kind'].store} = ?"
        rows = layer.catalog.rows(session, people, MAIN_CHAIN, where, ("layer",))
    found = [row for row in rows if (row["attributes"] or {}).get("key") == named]
    if len(found) != 1 or not isinstance(named, str):
        raise Unauthenticated(NOBODY, hint="layer principal NAME --kind layer --attribute key=layer:…")
    audiences = [identity.name(layer.id), *_origins(serving, claims.get("aud"))]
    return found[0], identity.opened(text, identity.REQUEST, named, audiences)


def _prove(serving: Serving, text: str, method: str, path: str, payload: bytes) -> Proven:
    row, said = _said(serving, text)
    if (said.get("htm"), said.get("path"), said.get("body")) != (method, path, identity.digest(payload)):
        raise Unauthenticated("what a layer signed is another request than this one")
    if not serving.layer.engine.claim(
        [f"statement/{said['iss']}/{said['jti']}"], secrets.token_hex(8), identity.LONGEST + 2 * identity.SKEW
    ):
        raise Unauthenticated("what a layer signed was used before")
    return Proven(row["id"], row["name"], None, "layer", frozenset({"read"}), None)


def _origins(serving: Serving, wanted: object) -> list[str]:
    """The address that a statement is for, if that is one of ours: by a name of our own, and on this machine by our port too."""
    try:
        parts = urlsplit(wanted if isinstance(wanted, str) else "")
        host, port = parts.hostname, parts.port
    except ValueError:
        return []
    if parts.scheme not in ("http", "https") or host not in serving.hosts:
        return []
    if host in LOCAL and port != urlsplit(serving.url).port:  # every server of this machine has that name
        return []
    return [str(wanted)]


async def countersigned(serving: Serving, request: Request, response: Response) -> Response:
    """An answer to a layer, with our proof that it is ours and to what it was asked."""
    if isinstance(response, StreamingResponse):
        return response  # what is in it is only a reason to ask
    from . import auth

    said = identity.claims((auth.given(request.headers) or ("", ""))[0])  # it was proven before
    proof = await serving.do(
        identity.answer, serving.layer.id, said["iss"], said["jti"], response.status_code, bytes(response.body)
    )
    response.headers["layer-proof"] = proof
    return response


# Live


def followed(
    serving: Serving, request: Request, caller: Caller, found: query.Projection, arguments: Mapping[str, Any], kind: str, branch: str
) -> AsyncIterator[bytes]:  # fmt: skip
    """Events of a projection that is another layer's: `rows` whenever they are others there."""
    if serving.more.get("followed", 0) >= FOLLOWED:
        raise LimitExceeded(f"{FOLLOWED} streams of other layers are open", hint="close some", retry_after=1)
    return _followed(serving, request, caller, found, arguments, kind, branch)


async def _followed(
    serving: Serving, request: Request, caller: Caller, found: query.Projection, arguments: Mapping[str, Any], kind: str, branch: str
) -> AsyncIterator[bytes]:  # fmt: skip
    from . import auth, live
    from .native import do

    assert found.remote is not None
    loop, changed, ended = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def follow() -> None:
        assert found.remote is not None
        over = lambda: ended.is_set() or serving.closing.is_set()  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop has ended
            for _ in remote.follow(serving.layer, found.remote, arguments, over):
                loop.call_soon_threadsafe(changed.set)

    serving.more["followed"] = serving.more.get("followed", 0) + 1
    threading.Thread(target=follow, name="layer-follows", daemon=True).start()
    known, proven = b"", time.monotonic()
    try:
        yield b"retry: 1000\n\n"
        changed.set()
        while not serving.closing.is_set():
            waits = [asyncio.ensure_future(one.wait()) for one in (changed, serving.closing)]
            await asyncio.wait(waits, timeout=live.HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()
            if serving.closing.is_set():
                return
            if time.monotonic() - proven >= live.HEARTBEAT:
                if not await auth.still(serving, request):
                    return
                proven = time.monotonic()
            if not changed.is_set():
                yield b": still here\n\n"
                continue
            changed.clear()
            try:
                rows, tx = await do(
                    serving,
                    caller,
                    lambda: query.read(caller.layer, found.name, arguments, principal=caller.principal, branch=branch),
                )
            except LayerError as error:
                if error.status != 503:
                    yield live.failed(error)
                    return
                continue  # it is away: when it is back, so are its rows
            data = {"rows": rows, "tx": tx}
            digest = live.fingerprint(rows)
            if digest != known:
                known = digest
                yield live.event("rows", typed.dumps(data) if kind else typed.plain(data), tx)
    finally:
        ended.set()
        serving.more["followed"] -= 1
