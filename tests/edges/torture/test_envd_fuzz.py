"""Whatever is asked of a box's envd: a clear refusal, never a fault, and nothing left behind."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2b import Sandbox
from edges.serving import Server

from livinglayer.sandbox.sandbox import Sandbox as Box

pytestmark = pytest.mark.torture
PROCEDURES = {
    "process.Process/List": {},
    "process.Process/SendInput": {"process": {"pid": 2}, "input": {"stdin": "aGk="}},
    "process.Process/CloseStdin": {"process": {"tag": "x"}},
    "process.Process/SendSignal": {"process": {"pid": 2}, "signal": "SIGNAL_SIGTERM"},
    "process.Process/Update": {"process": {"pid": 2}, "pty": {"size": {"rows": 1, "cols": 2}}},
    "filesystem.Filesystem/Stat": {"path": "a"},
    "filesystem.Filesystem/ListDir": {"path": "/etc", "depth": 2},
    "filesystem.Filesystem/MakeDir": {"path": "x/y"},
    "filesystem.Filesystem/Move": {"source": "x", "destination": "y"},
    "filesystem.Filesystem/Remove": {"path": "y"},
    "filesystem.Filesystem/CreateWatcher": {"path": ".", "recursive": True, "includeEntry": True},
    "filesystem.Filesystem/GetWatcherEvents": {"watcherId": "w0"},
    "filesystem.Filesystem/RemoveWatcher": {"watcherId": "w0"},
}
STREAMS = {
    "process.Process/Start": {"process": {"cmd": "/bin/true", "args": ["a"], "envs": {"A": "b"}, "cwd": "/"}, "stdin": False, "tag": "t", "pty": {"size": {"rows": 2}}},
    "process.Process/Connect": {"process": {"pid": 2}},
    "process.Process/StreamInput": {"start": {"process": {"pid": 2}}},
    "filesystem.Filesystem/WatchDir": {"path": "."},
}  # fmt: skip
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1e308,
    2**70,
    "",
    "\0",
    "\ud800",
    "../" * 50,
    "~x",
    "/" * 300,
    "x" * 300,
    [],
    [[]],
    {},
    {"pid": {}},
    "9" * 40,
]


@pytest.fixture(scope="module")
def box(server: Server) -> Iterator[Sandbox]:
    box = Sandbox.create(timeout=600, api_url=server.url, sandbox_url=server.url, api_key=server.key())
    yield box
    box.kill()


def twisted(message: Any, chance: random.Random) -> Any:
    """The same with something odd in it."""
    if not isinstance(message, dict) or not message or chance.random() < 0.2:
        return chance.choice(ODD)
    key = chance.choice([*message])
    changed = dict(message)
    if chance.random() < 0.15:
        del changed[key]
    else:
        changed[key] = twisted(message[key], chance)
    return changed


@pytest.mark.parametrize("seed", range(4))
def test_odd_requests_are_refused(server: Server, box: Sandbox, seed: int) -> None:
    chance = random.Random(seed)
    given = {"e2b-sandbox-id": box.sandbox_id, "e2b-sandbox-port": "49983", "x-access-token": str(box._envd_access_token), "connect-timeout-ms": "300"}  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for _ in range(400):
            stream = chance.random() < 0.4
            procedure = chance.choice([*(STREAMS if stream else PROCEDURES)])
            content = json.dumps(twisted((STREAMS if stream else PROCEDURES)[procedure], chance)).encode()
            if stream:
                content = struct.pack(">BI", 0, len(content)) + content
            if chance.random() < 0.2:
                at = chance.randrange(len(content))
                content = content[:at] + chance.randbytes(chance.randrange(8)) + content[at + chance.randrange(4) :]
            kind = "application/connect+json" if stream else "application/json"
            user = {"authorization": chance.choice(["Basic !", "Basic " + "A" * 400, "Basic cm9vdDo=", "Bearer x"])} if chance.random() < 0.3 else {}  # fmt: skip
            answer = client.post(f"/{procedure}", content=content, headers=given | user | {"content-type": kind})
            assert answer.status_code < 500, (procedure, content, answer.text)
        for query in (
            "path=%ff",
            "path=%00",
            "username=%00&path=x",
            "signature=%f0",
            "path=" + "a/" * 3000,
            "path=.",
            "path=/proc/self/mem",
        ):
            for method in ("GET", "POST"):
                octets = {"content-type": "application/octet-stream"}
                answer = client.request(method, f"/files?{query}", headers=given | octets)
                assert answer.status_code < 500, (method, query, answer.text)
    assert box.commands.run("echo fine").stdout == "fine\n"
    assert "Traceback" not in server.log, server.log[-3000:]
    held = Box.connect(box.sandbox_id)
    for found in held.processes():
        held.signal(9, found["pid"], tree=True)
    assert held.metrics()["open"] <= 64  # watches that nobody ended are the box's
