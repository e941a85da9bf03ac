"""Clients of MCP for tests: the package's own, over HTTP with a principal's token or over stdio, on old and new protocols."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
from edges.serving import Server
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

T = TypeVar("T")
MODES = ("legacy", "2026-07-28")
NEW = "2026-07-28"
HTTP = httpx.Client(timeout=30)  # making one takes longer than asking
HEADERS = {"content-type": "application/json", "accept": "application/json, text/event-stream"}


def run(doing: Coroutine[Any, Any, T]) -> T:
    """What it gives, if it comes to an end."""
    return asyncio.run(asyncio.wait_for(doing, 60))


@asynccontextmanager
async def over_http(
    server: Server, principal: str = "owner", mode: str = NEW, token: str | None = None, **more: Any
) -> AsyncIterator[Client]:
    """A client that holds a principal's token."""
    headers = {"authorization": f"Bearer {token or server.token(principal)}"}
    async with create_mcp_http_client(headers) as http:
        transport = streamable_http_client(f"{server.url}/mcp", http_client=http)
        async with Client(transport, mode=mode, cache=None, **more) as client:
            yield client


@asynccontextmanager
async def over_stdio(server: Server, *flags: str, mode: str = NEW, **more: Any) -> AsyncIterator[Client]:
    """A client that starts `layer mcp` itself, which complains of nothing; what it says is in the report of a test that fails."""
    words = ["-m", "livinglayer.edges.cli.main", "mcp", "--dir", server.directory, *flags]
    program = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ) | server.environment)
    with tempfile.TemporaryFile("w+") as said:
        try:
            async with Client(stdio_client(program, said), mode=mode, cache=None, **more) as client:
                yield client
        finally:
            said.seek(0)
            print(complaint := said.read(), file=sys.stderr)
        assert "Traceback" not in complaint


async def use(client: Client, tool: str, **arguments: Any) -> Any:
    """What a tool gives; its error is an AssertionError."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.structured_content
    return result.structured_content


async def refused(client: Client, tool: str, **arguments: Any) -> Any:
    """The error that a tool gives."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    return result.structured_content["error"]


async def names(client: Client) -> list[str]:
    """The tools that a client is offered."""
    return [tool.name for tool in (await client.list_tools()).tools]


def post(server: Server, body: Any, principal: str | None = "owner", headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:  # fmt: skip
    """What the server says to bytes of any kind."""
    sent = {**HEADERS, **(headers or {})}
    if principal is not None:
        sent.setdefault("authorization", f"Bearer {server.token(principal)}")
    given = {"content": body} if isinstance(body, bytes | str) else {"json": body}
    return HTTP.post(f"{server.url}/mcp", headers=sent, **given, **more)


def asked(method: str, params: dict[str, Any] | None = None, id: Any = 1, capabilities: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, str]]:  # fmt: skip
    """A request of the newest protocol, and the headers that go with it."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": NEW,
        "io.modelcontextprotocol/clientCapabilities": capabilities or {},
    }
    given = dict(params or {})
    given["_meta"] = meta | given.get("_meta", {})
    headers = {"mcp-protocol-version": NEW, "mcp-method": method}
    if (name := given.get("name") or given.get("uri") or given.get("taskId")) is not None:
        headers["mcp-name"] = str(name)
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": given}, headers


def ask(
    server: Server, method: str, params: dict[str, Any] | None = None, principal: str = "owner", **more: Any
) -> dict[str, Any]:
    """What the server answers to one request of the newest protocol, by hand."""
    body, headers = asked(method, params, **more)
    answer = post(server, body, principal, headers)
    assert answer.status_code < 500, answer.text
    found: dict[str, Any] = answer.json()
    return found
