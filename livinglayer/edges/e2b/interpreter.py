"""Interpreter: E2B's code interpreter, port 49999 of a box. It runs inside (inside/layer_interpreter.py) and is started when asked for."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from ...errors import LayerError
from ..http.serving import Serving
from . import ports
from .ports import Line, Refusal
from .reach import Reached

PORT = 49999
START = "import layer_interpreter; layer_interpreter.serve()"
PATIENCE = 180.0  # seconds for it to start; in a machine that is emulated it takes some


async def handle(serving: Serving, scope: Scope, receive: Receive, send: Send, box: Reached) -> None:
    """Run code in a box, or answer about its contexts. Code is run for whoever has the box's own token."""
    try:
        ports.admit(scope, box)
        if "execute" in scope["path"].lower():  # however a server in the box may read it: //execute, /x/../execute
            given = Headers(scope=scope).get("x-access-token", "")
            if not hmac.compare_digest(given.encode(), box.token.encode()):
                raise Refusal(401, "code is run for whoever has the sandbox's access token", hint="X-Access-Token")
        line = await reached(serving, box)
        await ports.carry(serving, scope, receive, send, box, PORT, line)
    except Refusal as refusal:
        await ports.refuse(refusal, scope, receive, send, box)


async def reached(serving: Serving, box: Reached) -> Line:
    """A connection to the interpreter of a box, which is started where none listens: after a start without memory, too."""
    try:
        return await ports.dial(serving, box, PORT)
    except Refusal as refusal:
        if "port" not in refusal.body:
            raise
    locks: dict[str, asyncio.Lock] = serving.more.setdefault("interpreters", {})
    lock = locks.setdefault(box.id, asyncio.Lock())
    try:
        async with lock:
            return await started(serving, box)
    finally:
        if not lock.locked():
            locks.pop(box.id, None)


async def started(serving: Serving, box: Reached) -> Line:
    """Start it, unless somebody else just did."""
    try:
        return await ports.dial(serving, box, PORT)
    except Refusal:
        pass
    try:
        ended = await box.box.python(START, timeout=PATIENCE)
    except LayerError as error:
        raise Refusal(502, f"the code interpreter could not be started: {error.message}") from None
    if not ended.ok:
        said = ended.stderr.text.strip().splitlines()[-1:]
        raise Refusal(502, f"the code interpreter could not be started: {''.join(said)[:500]}")
    return await ports.dial(serving, box, PORT)
