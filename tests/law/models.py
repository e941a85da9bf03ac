"""Scripted models for tests: a server on loopback that serves both APIs, and what must hold of every conversation with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from livinglayer.jobs.scripted_model import Api, Request, ScriptedModel, Step

APIS: tuple[Api, ...] = ("anthropic", "openai")
KEY = "sk-scripted-0123456789"  # what the server believes; a box has only its placeholder
HOST = "model.test"


@contextmanager
def scripted(
    script: Sequence[Step] | Callable[[Request], Step], key: str | None = KEY, well_formed: bool = True
) -> Iterator[ScriptedModel]:
    """A server with this script; at its end every request must have been one that a real server takes."""
    with ScriptedModel(script, key) as model:
        yield model
        if well_formed:
            assert [request.refused for request in model.requests if request.refused] == []


def model_of(api: Api, url: str = f"http://{HOST}", secret: str = "MODEL_KEY", **more: Any) -> dict[str, Any]:
    """The field `model` of a contract."""
    return {"api": api, "url": url, "model": "scripted-1", "secret": secret, "max_tokens": 1024, **more}


def rule_of(model: ScriptedModel, secret: str = "MODEL_KEY") -> dict[str, Any]:
    """The egress rule by which a box reaches the server as model.test, with its key put in on the way."""
    return {
        "host": HOST,
        "protocol": "http",
        "resolve": f"127.0.0.1:{model.port}",
        "private": True,
        "secrets": [secret],
        "swap": "header",
    }


def texts(model: ScriptedModel) -> list[str]:
    """All that was given to the model as results of tools, in order."""
    return [text for request in model.requests for _, text, _ in request.results]
