"""E2B's volumes: made, listed and removed with an API key; their files reached with the token of each."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ...errors import Invalid, LayerError, NotFound, Unauthenticated
from ...law import volumes
from ...sandbox.contents import Contents, Entry, Writing
from ..http.serving import Caller, Serving
from .control import EMPTY, said

PIECE = 1 << 20  # bytes of a file that are read or written at once
PATIENCE = 60.0  # seconds without a byte of an upload
IDS = 65536  # ids that a box has
EARLIEST, LATEST = -62135596800.0, 253402300799.0  # moments that a date can tell, in seconds


async def handle(serving: Serving, request: Request, caller: Caller | None = None) -> Response:
    """Answer for /volumes, as a caller, and for /volumecontent, whose every volume has a token."""
    parts = [unquote(part) for part in request.scope["path"].strip("/").split("/")]
    if parts[0] == "volumecontent":
        return await _content(serving, request, parts[1:])
    if caller is None:
        raise Unauthenticated("volumes are made with an API key")
    act = (request.method, len(parts))
    do = serving.do
    if act == ("POST", 1):
        name = (await said(request)).get("name")
        if not isinstance(name, str):
            raise Invalid("a volume has a name", hint='{"name": "data"}')
        made = await do(partial(caller.layer.call, "volume.create", {"name": name}))
        row = await do(volumes.find, caller.layer, caller.principal, made["volume"])
        return JSONResponse(_shown(serving, row, token=True), 201)
    if act == ("GET", 1):
        rows = await do(volumes.known, caller.layer, caller.principal)
        return JSONResponse([_shown(serving, row) for row in rows])
    if act == ("GET", 2):
        row = await do(volumes.find, caller.layer, caller.principal, parts[1])
        return JSONResponse(_shown(serving, row, token=True))
    if act == ("DELETE", 2):
        await do(partial(caller.layer.call, "volume.remove", {"volume": parts[1]}))
        return EMPTY()
    raise NotFound(f"there is nothing at /{'/'.join(parts):.120} for {request.method}")


def _shown(serving: Serving, row: dict[str, Any], token: bool = False) -> dict[str, Any]:
    found = {"volumeID": volumes.id_of(row), "name": row["name"]}
    return found | ({"token": volumes.token(serving.layer, row)} if token else {})


async def _content(serving: Serving, request: Request, parts: list[str]) -> Response:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("the files of a volume are reached with its token")
    if len(parts) != 2:
        raise NotFound(f"there is nothing at {request.scope['path']:.120}")
    row = await serving.do(volumes.reached, serving.layer, parts[0], token.strip())
    path = request.query_params.get("path")
    if path is None:
        raise Invalid("path is required", hint="?path=/notes.txt")
    with await serving.do(volumes.contents, row) as contents:
        match request.method, parts[1]:
            case "GET", "path":
                return _entry(await serving.do(contents.stat, path))
            case "PATCH", "path":
                changes = await said(request)
                if set(changes) - {"mode", "uid", "gid"}:
                    raise Invalid("of a file mode, uid and gid can be changed")
                given = {key: _number(key, changes.get(key)) for key in ("mode", "uid", "gid")}
                return _entry(await serving.do(partial(contents.change, path, **given)))
            case "DELETE", "path":
                await serving.do(contents.remove, path)
                return EMPTY()
            case "GET", "dir":
                depth = _asked(request, "depth")
                entries = await serving.do(contents.list, path, 1 if depth is None else depth)
                return JSONResponse([_told(entry) for entry in entries])
            case "POST", "dir":
                mode, uid, gid = (_asked(request, key) for key in ("mode", "uid", "gid"))
                make = partial(contents.mkdir, path, mode=mode, uid=uid, gid=gid, parents=bool(_flag(request, "force")))
                return _entry(await serving.do(make), 201)
            case "GET", "file":
                return await _download(serving, contents, path)
            case "PUT", "file":
                return await _upload(serving, request, contents, path)
    raise LayerError(f"{request.method} is not for {parts[1]!r:.60}", status=405)


async def _download(serving: Serving, contents: Contents, path: str) -> Response:
    fd = await serving.do(contents.read, path)
    size = os.fstat(fd).st_size

    async def pieces() -> AsyncIterator[bytes]:
        left = size  # a box may go on writing: what was promised is what is sent
        try:
            while left and (data := await serving.do(os.read, fd, min(left, PIECE))):
                left -= len(data)
                yield data
        finally:
            os.close(fd)

    headers = {"content-length": str(size), "x-content-type-options": "nosniff", "content-disposition": "attachment"}
    return StreamingResponse(pieces(), 200, headers, "application/octet-stream")


async def _upload(serving: Serving, request: Request, contents: Contents, path: str) -> Response:
    given = {key: _asked(request, key) for key in ("mode", "uid", "gid")}
    force = _flag(request, "force")
    writing: Writing = await serving.do(partial(contents.write, path, force=force is not False))
    try:
        held = bytearray()
        parts = request.stream()
        try:
            while True:
                async with asyncio.timeout(PATIENCE):
                    part = await anext(parts, None)
                if part is None:
                    break
                held += part
                if len(held) >= PIECE:
                    await serving.do(writing.add, bytes(held))
                    held.clear()
        except TimeoutError:
            raise Invalid(f"nothing came for {PATIENCE:g} seconds", status=408) from None
        except ClientDisconnect:
            raise Invalid("the client has hung up") from None
        await serving.do(writing.add, bytes(held))
        return _entry(await serving.do(partial(writing.finish, **given)), 201)
    finally:
        writing.close()


def _asked(request: Request, key: str) -> int | None:
    text = request.query_params.get(key)
    if text is not None and not re.fullmatch(r"\d{1,9}", text):
        raise Invalid(f"{key} must be a number, not {text!r:.60}")
    return _number(key, None if text is None else int(text))


def _number(key: str, value: object) -> int | None:
    most = {"mode": 0o7777, "depth": 100}.get(key, IDS - 1)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most):
        raise Invalid(f"{key} must be a number from 0 to {most}, not {value!r:.60}")
    return value


def _flag(request: Request, key: str) -> bool | None:
    text = request.query_params.get(key)
    if text is not None and text.lower() not in ("true", "false"):
        raise Invalid(f"{key} must be true or false, not {text!r:.60}")
    return None if text is None else text.lower() == "true"


def _entry(entry: Entry, status: int = 200) -> Response:
    return JSONResponse(_told(entry), status)


def _told(entry: Entry) -> dict[str, Any]:
    def moment(at: float) -> str:
        return datetime.fromtimestamp(min(max(at, EARLIEST), LATEST), UTC).isoformat()  # a box may set any

    found = {
        "name": _text(entry.name), "path": _text(entry.path), "type": entry.type, "size": entry.size, "mode": entry.mode, "uid": entry.uid,
        "gid": entry.gid, "atime": moment(entry.atime), "mtime": moment(entry.mtime), "ctime": moment(entry.ctime),
    }  # fmt: skip
    return found if entry.target is None else {**found, "target": _text(entry.target)}


def _text(name: str) -> str:
    """A name as JSON can hold it, also where a box wrote one that is no UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace")
