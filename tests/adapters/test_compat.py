"""The snippets of docs/compat.md, each in an environment of its own against a real server, with a model that follows a script."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import environments
from edges.serving import Server

from livinglayer.jobs.scripted_model import Request, ScriptedModel
from livinglayer.sandbox import Sandbox

PAGE = (Path(__file__).parents[2] / "docs/compat.md").read_text()
SNIPPETS = dict(re.findall(r"^```(?:python|js|sh) ([\w-]+)\n(.*?)^```", PAGE, re.M | re.S))
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "ENABLE_TOOL_SEARCH": "false",
    "NO_COLOR": "1",
}
Script = Callable[[Request], Any]
COMMAND = "echo $((6 * 7))"


def shell(tool: str, argument: str) -> Script:
    """One command by this tool, then the answer, if the command gave it."""

    def script(request: Request) -> Any:
        if not request.results:
            return {"calls": [(tool, {argument: COMMAND})]}
        return "It is 42." if "42" in request.results[-1][1] else f"The tool said {request.results[-1][1]}"

    return script


def boxes(request: Request) -> Any:
    """A box is made and used by MCP's tools, whatever a client calls them."""
    tools = [str((tool.get("function") or tool)["name"]) for tool in request.body.get("tools") or ()]
    named = {name: next((tool for tool in tools if tool.endswith(name)), "") for name in ("box_create", "box_exec")}
    if not tools:
        return "A title"  # Claude Code asks for one beside its work
    said = request.results[-1][1] if request.results else ""
    if not said:
        return {"calls": [(named["box_create"], {})]}
    if found := re.search(r'"box": ?"(\w+)"', said):
        return {"calls": [(named["box_exec"], {"box": found[1], "command": COMMAND})]}
    return "It is 42." if re.search(r'"stdout": ?"42\\n"', said) else f"The tool said {said}"


def thought(request: Request) -> str:
    """What smolagents runs as code."""
    return "Thought: I compute it.\n<code>\nfinal_answer(f'It is {6 * 7}.')\n</code>"


MODELS: dict[str, Script] = {
    "deepagents": shell("execute", "command"),
    "openai-agents": shell("exec_command", "cmd"),
    "smolagents": thought,
    "crewai": shell("e2b_sandbox_exec", "command"),
    "vercel-ai": shell("run", "command"),
    "langchain": boxes,
    "pydantic-ai": boxes,
    "claude-code": boxes,
    "claude-agent-sdk": boxes,
}
INSPECTED = """
from inspect_ai import eval
from inspect_ai.model import ModelOutput, ModelUsage, get_model

script = [ModelOutput.for_tool_call("m", *call) for call in (("bash", {"command": "echo $((6 * 7))"}), ("submit", {"answer": "It is 42."}))]
for output in script:
    output.usage = ModelUsage()
[log] = eval(arithmetic(), model=get_model("mockllm/model", custom_outputs=script), display="none", log_dir=".")
print(log.samples[0].output.completion)
"""


def test_every_snippet_is_run() -> None:
    assert set(SNIPPETS) == {"inspect", *MODELS}
    for name, needs in environments.NEEDS.items():  # the page says which versions these were
        version = next(need.rpartition("==")[2] for need in needs if need.startswith(name.removesuffix("-slim")))
        assert version in PAGE, f"{name} {version}"


@pytest.fixture(autouse=True)
def gone() -> Iterator[None]:
    """Boxes that were made over MCP outlive who made them; not the test."""
    yield
    for box in Sandbox.list() if "LAYER_STATE" in os.environ else ():
        box.kill()


@pytest.mark.torture
@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_works_as_it_stands(name: str, server: Server, tmp_path: Path) -> None:
    code = SNIPPETS[name] + (INSPECTED if name == "inspect" else "")
    with ScriptedModel(MODELS.get(name, thought)) as model:
        environment = QUIET | server.environment | server.e2b() | {
            "LAYER_URL": server.url, "LAYER_TOKEN": server.token(), "HOME": str(tmp_path),
            "OPENAI_BASE_URL": model.url + "/v1", "OPENAI_API_KEY": "script",
            "ANTHROPIC_BASE_URL": model.url, "ANTHROPIC_API_KEY": "script",
        }  # fmt: skip
        said = environments.heard(command(name, code, environment), environment, place=tmp_path)
        assert said.splitlines() and "It is 42." in said, (said, [request.body for request in model.requests][-1:])


def command(name: str, code: str, environment: dict[str, str]) -> list[str]:
    if name == "vercel-ai":
        file = environments.node(name) / "snippet.mjs"
        file.write_text(code)
        return ["node", str(file)]
    if name == "claude-code":  # the program comes with the package
        [program] = (
            Path(environments.python("claude-agent-sdk")).parents[1].glob("lib/python*/site-packages/*/_bundled")
        )
        environment["PATH"] = f"{program}:/usr/bin:/bin"
        return ["/bin/sh", "-ec", code]
    return [environments.python(name), "-c", code]
