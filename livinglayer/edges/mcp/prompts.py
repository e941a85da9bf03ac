"""Prompts: how to begin with what people mostly come for; offered to those who may use the tools they speak of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import mcp_types as types

from ...errors import Invalid, NotFound


@dataclass(frozen=True)
class Prompt:
    """A text with one place to fill in, and the tool that it is about."""

    name: str
    description: str
    argument: str
    about: str
    tool: str
    text: str

    def told(self) -> types.Prompt:
        """As MCP lists it."""
        needed = types.PromptArgument(name=self.argument, description=self.about, required=True)
        return types.Prompt(name=self.name, description=self.description, arguments=[needed])


PROMPTS = {
    each.name: each
    for each in (
        Prompt(
            "explain", "How something came to be.", "subject", "ticket/7, ticket/7.status, tx/41, or an execution's number", "why",
            "Use `why` on {}, and `history` or `replay` where it helps. Then tell in a few sentences who did it, why, with which permission,"
            " and what it was before.",
        ),
        Prompt(
            "review", "Look over what a branch changes.", "branch", "the name of a branch", "diff",
            "Use `diff` on branch {} and look at the rows around what it changes. Say what it does, what could go wrong, and whether you would merge it."
            " Merge nothing.",
        ),
        Prompt(
            "change", "Change something, with a look before it counts.", "task", "what shall be different", "propose_change",
            "Read `schema`, find the rows with `query`, then use `propose_change` for this: {}. Show the difference and ask before you merge.",
        ),
    )
}  # fmt: skip


def offered(tools: Collection[str]) -> list[types.Prompt]:
    """The prompts about tools that somebody has."""
    return [each.told() for each in PROMPTS.values() if each.tool in tools]


def get(name: str, arguments: Mapping[str, str], tools: Collection[str]) -> types.GetPromptResult:
    """A prompt, filled in."""
    found = PROMPTS.get(name)
    if found is None or found.tool not in tools:
        raise NotFound(f"there is no prompt {name!r:.120}", hint="prompts/list")
    if set(arguments) != {found.argument}:
        raise Invalid(f"prompt {name} takes {found.argument}", hint=found.about)
    text = types.TextContent(text=found.text.format(arguments[found.argument]))
    return types.GetPromptResult(
        description=found.description, messages=[types.PromptMessage(role="user", content=text)]
    )
