"""The channel as an OpenAPI document: what code in a box can ask for, in any language."""

from __future__ import annotations

from typing import Any

ROW = {"type": "object", "additionalProperties": True}
ANY: dict[str, Any] = {}
TEXT = {"type": "string"}
NUMBER = {"type": "integer", "format": "int64"}
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
ROWS = {"type": "object", "properties": {"rows": {"type": "array", "items": ROW}, "tx": {**NUMBER, "nullable": True}}}
ERRORS = {
    400: "Invalid",
    403: "Denied",
    404: "NotFound",
    409: "Conflict",
    429: "LimitExceeded",
    503: "Unavailable",
    504: "TimedOut",
}

# path: (summary, what it needs, what it takes beside, what it gives)
ASKED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "/query": (
        "Rows of one SELECT over the entities this execution reads. The SQL may also be the body itself, as text/plain.",
        {"sql": TEXT}, {"params": {"oneOf": [{"type": "object"}, {"type": "array"}]}, "limit": NUMBER}, ROWS,
    ),
    "/insert": (
        "Add a row, or a list of rows.",
        {"entity": TEXT, "values": {"oneOf": [ROW, {"type": "array", "items": ROW}]}}, {},
        {"type": "object", "properties": {"id": NUMBER, "ids": {"type": "array", "items": NUMBER}}},
    ),
    "/update": ("Set fields of a row.", {"entity": TEXT, "id": NUMBER, "values": ROW}, {"expect": NUMBER}, OK),
    "/delete": ("Remove a row.", {"entity": TEXT, "id": NUMBER}, {"expect": NUMBER}, OK),
    "/upsert": (
        "Update the row with these values in the fields `on`, or add one.",
        {"entity": TEXT, "values": ROW, "on": {"type": "array", "items": TEXT}}, {}, {"type": "object", "properties": {"id": NUMBER}},
    ),
    "/call": (
        "Call a function this execution may call; it is an execution of its own.",
        {"function": TEXT}, {"arguments": {"type": "object"}}, {"type": "object", "properties": {"result": ANY}},
    ),
    "/delegate": (
        "Have an agent of another contract do a task, where the box's own contract lets it; its end.",
        {"contract": TEXT, "task": TEXT}, {"slice": {"type": "object"}},
        {"type": "object", "properties": {"execution": NUMBER, "status": TEXT, "answer": ANY, "error": {"type": "object"}}},
    ),
    "/projection": ("Rows of a named projection.", {"name": TEXT}, {"arguments": {"type": "object"}}, ROWS),
    "/secret": ("A secret that the blueprint says may be read.", {"name": TEXT}, {}, {"type": "object", "properties": {"value": TEXT}}),
    "/emit": ("Record an event as a step.", {"name": TEXT}, {"data": ANY}, OK),
    "/slice": ("Write the local slice again; its path.", {}, {}, {"type": "object", "properties": {"path": TEXT}}),
    "/tool": (
        "Use a tool of an agent, as its model asked for it; a refusal is an answer too.",
        {"name": TEXT}, {"id": TEXT, "arguments": {"type": "object"}},
        {"type": "object", "properties": {"content": TEXT, "is_error": {"type": "boolean"}}},
    ),
    "/said": (
        "Record a tool that an agent's program used in the box itself.",
        {"tool": {"type": "object", "properties": {"id": TEXT, "name": TEXT, "arguments": ANY, "result": TEXT, "is_error": {"type": "boolean"},
         "ms": {"type": "number"}}, "required": ["name"]}}, {}, OK,
    ),
    "/return": ("What a function or an agent gives, or its error; once.", {}, {"value": ANY, "error": {"type": "object"}, "tape": ANY}, OK),
}  # fmt: skip


def document() -> dict[str, Any]:
    """OpenAPI 3.0 of everything at LAYER_URL."""
    failures = {str(status): _answer(name, {"$ref": "#/components/schemas/Error"}) for status, name in ERRORS.items()}
    paths: dict[str, Any] = {}
    for path, (summary, needs, takes, gives) in ASKED.items():
        body: dict[str, Any] = {"type": "object", "properties": {**needs, **takes}}
        if needs:
            body["required"] = list(needs)
        content: dict[str, Any] = {"application/json": {"schema": body}}
        if path == "/query":
            content["text/plain"] = {"schema": TEXT}
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": path[1:],
                "requestBody": {"required": bool(needs), "content": content},
                "responses": {"200": _answer("what was asked for", gives), **failures},
            }
        }
    paths["/artifact/{name}"] = {
        "put": {
            "summary": "Keep the body as an artifact of this execution.",
            "operationId": "artifact",
            "parameters": [{"name": "name", "in": "path", "required": True, "schema": TEXT}],
            "requestBody": {
                "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
            },
            "responses": {
                "200": _answer("where it is", {"type": "object", "properties": {"digest": TEXT, "bytes": NUMBER}}),
                **failures,
            },
        }
    }
    for name, summary in (
        ("me", "Who this execution is and what it may do."),
        ("agent", "What an agent is to do: task, instructions, model, tools, budget."),
    ):
        told = {"summary": summary, "operationId": name, "responses": {"200": _answer("it", ROW), **failures}}
        paths[f"/{name}"] = {"get": told}
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "The channel of a box",
            "version": "1",
            "description": "Plain HTTP at LAYER_URL, which names one execution and holds until it ends. Decimals, dates and times are texts.",
        },
        "servers": [{"url": "{LAYER_URL}", "variables": {"LAYER_URL": {"default": "http://169.254.170.1:7700/TOKEN"}}}],
        "paths": paths,
        "components": {"schemas": {"Error": _error()}},
    }


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _error() -> dict[str, Any]:
    inner = {
        "code": TEXT,
        "message": TEXT,
        "hint": {**TEXT, "nullable": True},
        "rows": {"type": "array", "items": NUMBER},
    }
    return {
        "type": "object",
        "properties": {"error": {"type": "object", "properties": inner, "required": ["code", "message"]}},
    }
