"""Claude Code, the program itself, with a model that follows a script: it reads, proposes, merges and asks why, over HTTP and stdio."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from adapters import environments
from edges.serving import Server

from livinglayer.jobs.scripted_model import Request, ScriptedModel

pytestmark = pytest.mark.torture
QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ENABLE_TOOL_SEARCH": "false", "NO_COLOR": "1"}
CHANGE = {"do": "insert", "entity": "ticket", "values": {"title": "from Claude Code"}}


def script(request: Request) -> Any:
    """What a model would do that was asked for a ticket."""
    tools = {str(tool["name"]).removeprefix("mcp__layer__") for tool in request.body.get("tools") or ()}
    if "query" not in tools:
        return "A title"
    if {"box_create", "answer_approval"} & tools:
        return f"These are not ann's: {tools}"
    said = [str(result[1]) for result in request.results]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("schema", {}), ("query", {"sql": "select count(*) as n from ticket"}), ("propose_change", {"changes": [CHANGE], "reason": "asked"}),
    ]  # fmt: skip
    if len(said) >= 3:
        found = re.search(r'"branch": ?"(\w+)"', said[2])
        if found is None:
            return f"There is no branch: {said}"
        calls += [("diff", {"branch": found[1]}), ("merge", {"branch": found[1]})]
    calls += [("query", {"sql": "select id from ticket where title = 'from Claude Code'"})]
    if len(said) >= 6:
        number = re.search(r'"id": ?(\d+)', said[5])
        if number is None:
            return f"There is no ticket: {said}"
        calls += [("why", {"subject": f"ticket/{number[1]}"}), ("call_sum_add", {"a": 20, "b": 22})]
    if len(said) < len(calls):
        name, arguments = calls[len(said)]
        return {"calls": [(f"mcp__layer__{name}", arguments)]}
    return f"Done: {said[-1]}"


@pytest.mark.parametrize("transport", ["http", "stdio"])
def test_claude_code_works_with_a_layer(serve: Any, tmp_path: Path, transport: str) -> None:
    server: Server = serve()
    layer = server.layer
    layer.define("ticket", {"title": "text!"})
    code = "def main(a, b):\n    return a + b\n"
    layer.call("function.define", name="sum.add", code=code, signature={"arguments": {"a": "int!", "b": "int!"}})
    server.principal("ann")
    for action, resource in (
        ("read", "ticket"), ("write", "ticket"), ("fork", "branch:main"), ("merge", "branch:main"), ("read", "tx"), ("call", "function:sum.add"),
    ):  # fmt: skip
        layer.grant("ann", action, resource)
    [program] = (
        Path(environments.python("claude-agent-sdk")).parents[1].glob("lib/python*/site-packages/*/_bundled/claude")
    )
    told: dict[str, Any] = {
        "type": "http",
        "url": f"{server.url}/mcp",
        "headers": {"Authorization": f"Bearer {server.token('ann')}"},
    }
    if transport == "stdio":
        words = ["-m", "livinglayer.edges.cli.main", "mcp", "--dir", server.directory, "--as", "ann"]
        told = {"type": "stdio", "command": sys.executable, "args": words, "env": server.environment}
    settings = tmp_path / "mcp.json"
    settings.write_text(json.dumps({"mcpServers": {"layer": told}}))
    with ScriptedModel(script) as model:
        command = [
            str(program),
            "-p",
            "Make a ticket",
            "--mcp-config",
            str(settings),
            "--strict-mcp-config",
            "--allowedTools",
            "mcp__layer",
        ]
        environment = QUIET | server.environment | {
            "HOME": str(tmp_path), "ANTHROPIC_BASE_URL": model.url, "ANTHROPIC_API_KEY": "script", "PATH": "/usr/bin:/bin",
        }  # fmt: skip
        said = environments.heard(command, environment, place=tmp_path)
    assert "Done:" in said and "42" in said, said
    [row] = layer.query("select id from ticket where title = 'from Claude Code'")
    assert "ann" in "\n".join(layer.why(f"ticket/{row['id']}").lines())
