"""Transcripts: an agent's conversation with its model as it was recorded, and another course of it from one of its steps on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ..errors import Invalid, NotFound
from ..substrate.reads import clock
from ..substrate.schema import OWNER
from . import agents, contracts, models
from .executions import digest
from .replay import Record, Step, content, read_record
from .verbs import Call, verb

EFFECT = ("shell", "write_file")  # tools of the box that leave something there


@verb("agent.fork", brief=False)
def fork(
    call: Call, *, execution: int, at: int, prompt: str | None = None, model: str | None = None, name: str | None = None, propose: bool = True
) -> Any:  # fmt: skip
    """Another course of an agent from a step on: the same conversation up to there, with another prompt or model, on a new branch."""
    layer = call.layer
    record = _whole(layer, execution, call.asking.principal)
    given = record.row["arguments"]
    if not 1 <= at <= len(record.steps):
        raise Invalid(
            f"agent {execution} has steps 1 to {len(record.steps)}, not {at}", hint=f"layer replay {execution}"
        )
    asked = asked_by(record, at)
    task, parts = given["agent"]["task"], dict[str, str]()
    if asked is None:  # it had said nothing yet: from its beginning
        task = f"{task}\n\n{prompt}" if prompt else task
    else:
        messages, moment = _with(conversation(layer, record, asked), prompt, asked.detail["api"]), _began(asked)
        parts = {"content": _stored(layer, messages)}
        if redo := _redo(layer, record, moment):
            parts["redo_content"] = _stored(layer, redo)
    branch = name or agents.own_branch(given["contract"])
    found, permissions = contracts.admitted(call, given["contract"], branch)
    if asked is not None and (found.model or {}).get("api") != asked.detail["api"]:
        raise Invalid(f"contract {found.name!r} speaks to its model by another API than agent {execution} did")
    wanted = model or (given["agent"].get("model") or {}).get("model")
    agent = agents.of(found, task, given["agent"]["argv"], wanted, parts.get("content")) | {
        "propose": propose, "redo": parts.get("redo_content"),
        "from": {"execution": record.id, "at": at, "model": None if asked is None else asked.n, "prompt": prompt, **parts},
    }  # fmt: skip
    call.execution.parent = record.id
    told = agents.begin(
        call, found, agent, permissions, branch, record.row["branch"] or "main", as_of=_state(layer, record, asked), slice=given["slice"],
    )  # fmt: skip
    return told | {"from": agent["from"]}


def _whole(layer: Any, number: int, principal: int) -> Record:
    """The record of an agent, for whoever had it run and for owners: what it was told was told with their rights."""
    with layer.engine.reading() as session:
        row = session.one(f"select principal from {layer.engine.schema_prefix}ledger_execution where id = ?", (number,))
        policy = layer.catalog.policy(session, principal, clock(layer.engine, session)[1])
    if row is None or (row[0] != principal and not policy.sovereign()):
        raise NotFound(f"there is no agent {number} that you may run again", hint="only who ran it and owners may")
    record = read_record(
        lambda sql: layer.reads.query(sql, {"e": number}, "main", None, OWNER, None, None, True), number
    )
    if not isinstance((record.row["arguments"] or {}).get("agent"), Mapping):
        raise Invalid(
            f"execution {number} is no agent but {record.row['verb'] or record.row['kind']}", hint="layer agent list"
        )
    return record


def asked_by(record: Record, at: int) -> Step | None:
    """The last time that its model was asked, and answered, up to a step."""
    until = record.steps[at - 1]
    found = [
        step
        for step in record.of("model")
        if step.at <= until.at and "request_content" in step.detail and step.detail.get("status") == 200
    ]
    return max(found, key=lambda step: step.at, default=None)


def conversation(layer: Any, record: Record, asked: Step) -> list[dict[str, Any]]:
    """What its model was told when it was asked."""
    data = content(layer, asked.detail["request_content"])
    if data is None or "request" in asked.detail.get("cut", ()):
        raise Invalid(
            f"what was said to the model in step {asked.n} of agent {record.id} is not kept as a whole",
            hint="an earlier step",
        )
    messages = models.parsed(data).get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise Invalid(f"step {asked.n} of agent {record.id} is no conversation", hint=f"layer replay {record.id}")
    return messages


def _with(messages: list[dict[str, Any]], prompt: str | None, api: str) -> list[dict[str, Any]]:
    """The conversation with something more said by a person."""
    if prompt is None:
        return messages
    *before, last = messages
    if api == "anthropic" and last.get("role") == "user":  # roles alternate
        said = last.get("content")
        blocks = [{"type": "text", "text": said}] if isinstance(said, str) else list(said or ())
        return [*before, {**last, "content": [*blocks, {"type": "text", "text": prompt}]}]
    return [*messages, {"role": "user", "content": prompt}]


def _stored(layer: Any, value: Any) -> str:
    data = json.dumps(value).encode()
    layer.engine.put_blob(digest(data), data)
    return digest(data)


def _began(asked: Step) -> datetime:
    return datetime.fromtimestamp(asked.detail.get("began") or asked.detail["at"], UTC)


def _redo(layer: Any, record: Record, before: datetime) -> list[dict[str, Any]]:
    """What it had done in its box until then, which the new box has not seen."""
    found = []
    for step in sorted(record.of("tool"), key=lambda step: step.at):
        detail = step.detail
        if detail.get("where") != "box" or detail.get("name") not in EFFECT or step.at >= before:
            continue
        arguments = detail.get("arguments")
        if "arguments_content" in detail:
            arguments = models.parsed(content(layer, detail["arguments_content"]) or b"")
        if isinstance(arguments, dict) and arguments:
            found.append({"id": detail["id"], "name": detail["name"], "arguments": arguments})
    return found


def _state(layer: Any, record: Record, asked: Step | None) -> int:
    """The tx that its branch was at when its model was asked."""
    with layer.engine.reading() as session:
        last = clock(layer.engine, session)[0]
        at = record.row["state"] if asked is None else layer.catalog.moment(session, _began(asked), last)
    return max(int(at), int(record.row["state"]), 1)
