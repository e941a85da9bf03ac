"""A server that answers E2B's clients at once and does nothing: what they can reach at most. `python -m bench.noop`."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import uvicorn


def frame(flag: int, data: object) -> bytes:
    payload = json.dumps(data).encode()
    return struct.pack(">BI", flag, len(payload)) + payload


RUN = (
    frame(0, {"event": {"start": {"pid": 4}}})
    + frame(0, {"event": {"end": {"exitCode": 0, "exited": True, "status": "exit status 0"}}})
    + frame(2, {})
)
BOX = json.dumps({"templateID": "base", "sandboxID": "ibox", "clientID": "x", "envdVersion": "0.6.13", "envdAccessToken": "x"}).encode()  # fmt: skip


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    status, kind, body = 204, b"application/json", b""
    if scope["path"] == "/process.Process/Start":
        status, kind, body = 200, b"application/connect+json", RUN
    elif scope["method"] == "POST":
        status, body = 201, BOX
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    uvicorn.Server(uvicorn.Config(app, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_level="error")).run([listener])  # fmt: skip
