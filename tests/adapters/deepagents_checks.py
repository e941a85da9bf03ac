"""LangChain's own tests of a sandbox for deepagents, on a box; and an agent with a scripted model. test_deepagents.py runs this."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from deepagents import create_deep_agent
from deepagents.backends.protocol import SandboxBackendProtocol
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import SandboxIntegrationTests

from livinglayer.edges.adapters.deepagents import BoxBackend
from livinglayer.sandbox import Sandbox


class TestBox(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[SandboxBackendProtocol]:
        with Sandbox.create(os.environ["TIER"], env={"PATH": "/home/user/bin:/usr/bin:/bin"}) as box:
            box.files.link("/usr/bin/python3", "/home/user/bin/python")  # the tests call it so
            yield BoxBackend(box)


def expected_of_an_older_deepagents(test: Any) -> Any:
    """Paths of matches from where was searched, directories among them, no overwriting: not what deepagents itself does now."""

    @pytest.mark.xfail(reason="deepagents differs", strict=True)
    @functools.wraps(test)
    def run(*args: Any, **given: Any) -> None:
        test(*args, **given)

    return run


for name in (
    "test_glob",
    "test_glob_basic_pattern",
    "test_glob_hidden_files_explicitly",
    "test_glob_with_character_class",
    "test_glob_with_directories",
    "test_glob_with_question_mark",
    "test_write_existing_file_fails",
):
    setattr(TestBox, name, expected_of_an_older_deepagents(getattr(TestBox, name)))


class Scripted(GenericFakeChatModel):
    """Says what it was told to, whichever tools it is given."""

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Scripted:
        return self


def calls(name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": name}])


def test_an_agent_works_in_a_box() -> None:
    script = [
        calls("write_file", file_path="/home/user/double.py", content="print(int(input()) * 2)\n"),
        calls("edit_file", file_path="/home/user/double.py", old_string="* 2", new_string="* 3"),
        calls("execute", command="echo 14 | python3 double.py; id -un"),
        AIMessage("42"),
    ]
    with Sandbox.create() as box:
        agent = create_deep_agent(model=Scripted(messages=iter(script)), backend=BoxBackend(box))
        messages = agent.invoke({"messages": [("user", "Triple 14 in the sandbox.")]})["messages"]
        assert messages[-1].content == "42"
        [ran] = [message.content for message in messages if getattr(message, "name", None) == "execute"]
        assert ran.startswith("42\nuser\n")
        assert box.files.read("/home/user/double.py") == b"print(int(input()) * 3)\n"


def test_a_command_out_of_time_is_told_with_what_it_printed() -> None:
    with Sandbox.create() as box:
        backend = BoxBackend(box)
        late = backend.execute("echo before; sleep 60", timeout=1)
        assert (late.exit_code, late.output.splitlines()[0]) == (124, "before")
        assert backend.execute("kill -9 $$").exit_code == 137
        assert backend.execute("echo out; echo err >&2; exit 3").exit_code == 3
