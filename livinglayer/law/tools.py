"""Tools: what a contract lets its agent do, as a model is told of it; each is one request of the box's own channel."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Invalid, LayerError, LimitExceeded, NotFound
from ..substrate.ledger import now
from ..substrate.schema import Entity, Field
from . import secrets as vault
from .blueprints import row_of
from .executions import INLINE, STEPS, Run, digest
from .signature import Signature, dumps

NAME = 64  # characters of a tool's name, as both APIs have it
ARGUMENTS = 4 << 20  # bytes of what a model gives to a tool
RESULT = 64 << 10  # bytes of an answer that a model gets
MINE = ("me.contract", "me.budget", "me.denials", "me.approvals")  # what an agent may know of itself
JSON = {"text": "string", "int": "integer", "float": "number", "decimal": "string", "bool": "boolean", "ref": "integer",
        "date": "string", "datetime": "string", "file": "string", "enum": "string", "state": "string"}  # fmt: skip
Asked = tuple[str, str, dict[str, Any], bytes]  # name, rest, what is given, body of a request to the channel


@dataclass(frozen=True)
class Tool:
    """One tool: what a model reads of it, and the request that it is. One without a request is done by the loop, in the box."""

    name: str
    description: str
    schema: Mapping[str, Any]
    request: Callable[[dict[str, Any]], Asked] | None = None

    def told(self) -> dict[str, Any]:
        """As GET /agent has it."""
        where = "box" if self.request is None else "layer"
        return {"name": self.name, "description": self.description, "input_schema": self.schema, "where": where}


def _object(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


TEXT = {"type": "string"}
BOX = (
    Tool("shell", "Run a command with sh in your box; you get what it prints and its exit code.",
         _object({"command": {**TEXT, "minLength": 1}, "timeout": {"type": "number", "description": "seconds"}}, "command")),
    Tool("read_file", "Read a text file of your box.",
         _object({"path": TEXT, "offset": {"type": "integer", "minimum": 0}, "limit": {"type": "integer", "minimum": 1}}, "path")),
    Tool("write_file", "Write a text file in your box, with the directories above it; what was there is replaced.",
         _object({"path": TEXT, "content": TEXT}, "path", "content")),
    Tool("finish", "Say that the task is done, or can't be, with your answer to whoever gave it.", _object({"answer": TEXT}, "answer")),
)  # fmt: skip


def tools(run: Run, contracts: tuple[str, ...] = ()) -> dict[str, Tool]:
    """The tools of one execution, by name: no more than what its channel would answer."""
    found = [_query(run)] if run.reads else []
    projections = [*(run.projections or ()), *MINE]
    found.append(
        Tool(
            "projection",
            "Rows that were prepared under a name. Those of me.* tell of yourself: your contract, the budget left, denials, approvals.",
            _object({"name": {**TEXT, "enum": projections}, "arguments": {"type": "object"}}, "name"),
            lambda given: ("projection", "", given, b""),
        )
    )
    schema = run.layer.schema(run.branch)
    for name, part in (run.execution.scope.entities or {}).items():
        if (entity := schema.by_name.get(name)) is not None:
            found += _writes(entity, part)
    found += [_call(run, name) for name in run.calls or ()]
    found.append(
        Tool(
            "artifact",
            "Keep a text as a named artifact of your work. (Files of your box: run `layer artifact FILE` in the shell.)",
            _object({"name": {**TEXT, "minLength": 1}, "content": TEXT}, "name", "content"),
            lambda given: ("artifact", given["name"], {}, given["content"].encode("utf-8", "replace")),
        )
    )
    if contracts:
        found.append(
            Tool(
                "delegate",
                "Give a part of the task to an agent of another contract, which may do no more than both contracts let it; you get its answer.",
                _object(
                    {"contract": {**TEXT, "enum": list(contracts)}, "task": {**TEXT, "minLength": 1}},
                    "contract",
                    "task",
                ),
                lambda given: ("delegate", "", given, b""),
            )
        )
    return {tool.name: tool for tool in [*found, *BOX]}


def _query(run: Run) -> Tool:
    known = run.layer.schema(run.branch).by_name
    there = []
    for name, part in sorted((run.reads or {}).items()):
        if name in known:
            shown = part.get("fields")
            fields = ["id", *(f"{f.name} {f.type}" for f in known[name].fields if shown is None or f.name in shown)]
            there.append(f"{name}({', '.join(fields)})")
    return Tool(
        "query", f"Rows of one SQL SELECT (SQLite and PostgreSQL both understand it). You may read: {'; '.join(there)}.",
        _object({"sql": {**TEXT, "minLength": 1}, "params": {"type": ["object", "array"]}, "limit": {"type": "integer", "minimum": 1}}, "sql"),
        lambda given: ("query", "", given, b""),
    )  # fmt: skip


def _writes(entity: Entity, part: Mapping[str, Any]) -> list[Tool]:
    name, allowed = entity.name, part.get("actions") or ("insert", "update", "delete")
    fields = {f.name: f for f in entity.fields if part.get("fields") is None or f.name in part["fields"]}
    values = {label: of_field(f) for label, f in fields.items()}
    needed = [label for label, f in fields.items() if f.required and f.initial is None and f.type != "state"]
    number = {"id": {"type": "integer", "description": f"of the {name}"}}
    about = f": {entity.description}" if entity.description else ""
    condition = f" Only rows where {part['where']}." if part.get("where") else ""
    found = []

    def rest(given: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in given.items() if key != "id"}

    if "insert" in allowed:
        found.append(Tool(
            f"insert_{name}", f"Add a {name}{about}.{condition} Gives its id.", _object(values, *needed),
            lambda given: ("insert", "", {"entity": name, "values": given}, b""),
        ))  # fmt: skip
    if "update" in allowed:
        found.append(Tool(
            f"update_{name}", f"Set fields of a {name}; those you leave out stay.{condition}", {**_object({**number, **values}, "id"), "minProperties": 2},
            lambda given: ("update", "", {"entity": name, "id": given["id"], "values": rest(given)}, b""),
        ))  # fmt: skip
    if "insert" in allowed and "update" in allowed:
        on = {
            "type": "array",
            "minItems": 1,
            "maxItems": max(1, len(fields)),
            "items": {**TEXT, "enum": list(fields)},
            "description": "the fields that tell rows apart",
        }
        found.append(Tool(
            f"upsert_{name}", f"Update the {name} that has these values in the fields `on`, or add one.{condition} Gives its id.",
            _object({"values": {"type": "object", "properties": values, "additionalProperties": False}, "on": on}, "values", "on"),
            lambda given: ("upsert", "", {"entity": name, **given}, b""),
        ))  # fmt: skip
    if "delete" in allowed:
        found.append(Tool(
            f"delete_{name}", f"Remove a {name}.{condition}", _object(number, "id"),
            lambda given: ("delete", "", {"entity": name, "id": given["id"]}, b""),
        ))  # fmt: skip
    return found


def _call(run: Run, name: str) -> Tool:
    try:
        row = row_of(run.layer, "function", name, run.branch)
        arguments, about = Signature.of(name, row["signature"]).arguments, row["description"]
    except NotFound:  # it was there when the contract was written
        arguments, about = None, None
    label = "call_" + name.replace(".", "_").replace("-", "_")
    if len(label) > NAME:
        label = f"{label[: NAME - 9]}_{digest(name.encode())[:8]}"
    schema: dict[str, Any] = {"type": "object"}
    if arguments is not None:
        needed = [key for key, f in arguments.items() if f.required and f.initial is None]
        schema = _object({key: of_field(f) for key, f in arguments.items()}, *needed)
    return Tool(
        label, f"Call the function {name}{': ' + about if about else ''}.", schema,
        lambda given: ("call", "", {"function": name, "arguments": given}, b""),
    )  # fmt: skip


def of_field(field: Field) -> dict[str, Any]:
    """JSON Schema of a field's values."""
    kind = JSON.get(field.type)
    if kind is None:
        found: dict[str, Any] = {}
    else:
        found = {"type": kind if field.required else [kind, "null"]}
        if field.values:
            found["enum"] = [*sorted(field.values), *([] if field.required else [None])]
    about = {
        "ref": f"the id of a {field.target}",
        "date": "YYYY-MM-DD",
        "datetime": "ISO 8601",
        "decimal": "a number as text",
        "file": "a digest",
    }
    said = "; ".join(filter(None, (field.description, about.get(field.type))))
    return found | ({"description": said} if said else {})


# One use


def use(run: Run, known: Mapping[str, Tool], given: Any) -> dict[str, Any]:
    """Do what a model asked of a tool, as the channel would: its answer as text. A refusal is an answer too, and both are a step."""
    name, arguments, id = given.text("name"), given.get("arguments"), str(given.get("id") or "")[:200]
    start, error, asked = time.perf_counter(), False, False
    try:
        request = _request(known, name, {} if arguments is None else arguments)
        asked = True
        answer = run.answer("POST", *request)
        data = answer if isinstance(answer, bytes) else dumps(answer)
    except LayerError as wrong:
        if not asked:  # the channel has not seen it, so it is recorded here
            run.refuse("tool", wrong, {"name": name, "arguments": arguments})
        error, data = (
            True,
            f"{type(wrong).__name__}: {wrong.message}{f' ({wrong.hint})' if wrong.hint else ''}".encode(),
        )
    text = data.decode("utf-8", "replace")
    if len(data) > RESULT:
        text = data[:RESULT].decode("utf-8", "ignore") + f"\n… cut here, of {len(data)} bytes: ask for less"
    step(run, id, name, "layer", arguments, text, error, round((time.perf_counter() - start) * 1000, 2))
    return {"content": text, "is_error": error}


def _request(known: Mapping[str, Tool], name: str, arguments: Any) -> Asked:
    tool = known.get(name)
    if tool is None or tool.request is None:
        there = ", ".join(key for key, one in known.items() if one.request is not None)
        raise NotFound(f"there is no tool {name!r:.120}", hint=f"there are {there}")
    from jsonschema import Draft202012Validator

    if (size := len(dumps(arguments))) > ARGUMENTS:  # they are looked at one by one
        raise LimitExceeded(
            f"{name}: {size} bytes are more than the arguments of a tool may have", hint=f"{ARGUMENTS} at most"
        )
    wrong = next(Draft202012Validator(tool.schema).iter_errors(arguments), None)
    if wrong is not None:
        where = ".".join(map(str, wrong.absolute_path))
        raise Invalid(
            f"{name}: {where + ': ' if where else ''}{wrong.message:.500}", hint="see the tool's input_schema"
        )
    return tool.request(arguments)


def said(run: Run, given: Any) -> dict[str, Any]:
    """Record what the loop did in the box itself."""
    told = given.get("tool")
    if not isinstance(told, dict) or not isinstance(told.get("name"), str):
        raise Invalid('said needs "tool": {"id", "name", "arguments", "result", "is_error", "ms"}')
    ms = told.get("ms")
    result = told.get("result")
    text = result if isinstance(result, str) else dumps(result).decode()
    ms = ms if isinstance(ms, int | float) else None
    step(
        run,
        str(told.get("id") or "")[:200],
        told["name"],
        "box",
        told.get("arguments"),
        text,
        bool(told.get("is_error")),
        ms,
    )
    return {"ok": True}


def step(run: Run, id: str, name: str, where: str, arguments: Any, result: str, error: bool, ms: float | None) -> None:
    """One use of a tool as a step; what is long is stored by content."""
    if run.read:  # secrets it was let read are not kept where it shows them
        result = vault.hide(run.read, result.encode("utf-8", "replace")).decode("utf-8", "replace")
        try:
            arguments = json.loads(vault.hide(run.read, dumps(arguments)))
        except ValueError:  # the value of one has brackets or commas
            arguments = None
    detail: dict[str, Any] = {"id": id, "name": name[:NAME], "where": where, "error": error, "ms": ms}
    for key, text in (("arguments", dumps(arguments).decode()), ("result", result)):
        if len(text) <= INLINE:
            detail[key] = arguments if key == "arguments" else text
        else:
            detail[f"{key}_content"] = run.store(text.encode("utf-8", "replace"), asked=True)
    if run.before + len(run.steps) < STEPS:
        run.steps.append(("tool", detail, now()))
