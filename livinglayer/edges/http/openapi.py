"""OpenAPI: the native API as a document, made from the table of verbs, and for somebody known from their functions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ...law import functions
from ...law.signature import Signature
from ...law.verbs import VERBS
from ...substrate.ledger import MAIN_CHAIN
from ...substrate.reads import clock
from ...substrate.schema import SYSTEM, Field
from ...substrate.values import INT_MAX, INT_MIN
from ...typed import JSON
from .asked import CSV, NDJSON
from .query import PAGE

if TYPE_CHECKING:
    from ...layer import Layer

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "format": "int64", "minimum": INT_MIN, "maximum": INT_MAX}
COUNT: Schema = {"type": "integer", "minimum": 0}
ROW: Schema = {"type": "object"}
OBJECT: Schema = {"type": "object"}
TYPES: dict[str, Schema] = {
    "text": TEXT, "int": NUMBER, "float": {"type": "number"}, "bool": {"type": "boolean"}, "ref": NUMBER, "json": {},
    "decimal": {"type": ["string", "integer"]}, "date": {"type": "string"}, "datetime": {"type": "string"},
    "enum": TEXT, "state": TEXT, "file": TEXT,
}  # fmt: skip
REFUSED = {
    400: "Invalid: the request itself is wrong", 401: "Unauthenticated: no token, or one that is nobody's", 403: "Denied: known, not allowed",
    404: "NotFound: not there, or not for this principal to see", 405: "NotAllowed: another method", 406: "Unacceptable: none of the forms asked for",
    408: "Invalid: the request did not arrive in time", 409: "Conflict: not in the state this needs, or an idempotency key of another request",
    412: "Conflict: not the version that If-Match names", 413: "LimitExceeded: the body is too large", 415: "Unsupported: a body of another type",
    422: "Failed: the function or program itself failed", 429: "LimitExceeded: too large, or too many requests",
    503: "Unavailable: the engine or a host of boxes can't serve this now", 504: "TimedOut: the deadline passed; nothing was changed",
}  # fmt: skip
BRANCH = {"name": "branch", "in": "query", "schema": TEXT, "description": "which branch; main if not given"}
PRINCIPAL = {
    "name": "principal",
    "in": "query",
    "schema": TEXT,
    "description": "act as this one; needs the right to impersonate",
}
AS_OF = {
    "name": "as_of",
    "in": "query",
    "schema": TEXT,
    "description": "a tx number or a time: the data of that moment",
}
REASON = {"name": "reason", "in": "query", "schema": TEXT, "description": "why; kept with the tx"}
KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "maxLength": 1000},
    "description": "done once for each principal; the same request again gives the same answer",
}
TRACE = {"name": "traceparent", "in": "header", "schema": TEXT, "description": "the W3C trace this belongs to"}
MATCH = {
    "name": "If-Match",
    "in": "header",
    "schema": {"type": "string", "pattern": '^(W/)?"[0-9]{1,18}"$'},
    "description": "the ETag of the row: refused when it has another version by now",
}
FORMAT = {"name": "format", "in": "query", "schema": {"enum": ["json", "typed", "ndjson", "csv", "arrow"]}}
PAGING = [
    {"name": "page", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": PAGE}, "description": "rows of a page; without it all at once"},
    {"name": "cursor", "in": "query", "schema": TEXT, "description": "`next` of the page before"},
]  # fmt: skip
READ = [BRANCH, AS_OF, PRINCIPAL]


def document(url: str, layer: Layer | None = None) -> dict[str, Any]:
    """OpenAPI 3.1 of everything at /api; with a layer also the functions that its principal may call."""
    paths = dict(reads())
    for name, found in sorted(VERBS.items()):
        more = [MATCH] if name in ("row.update", "row.delete") else []
        takes = arguments(found.signature, found.shapes)
        paths[f"/api/{name}"] = {"post": doing(name, found.description, takes, more, found.told_once)}
    for each in [] if layer is None else callable(layer):
        takes = arguments(functions.load(layer, each["name"]).signature)
        said = each["description"] or f"The function {each['name']}."
        paths[f"/api/function/{each['name']}"] = {"post": doing(f"function.{each['name']}", said, takes)}
    try:
        release = version("livinglayer")
    except PackageNotFoundError:
        release = "0"
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Living Layer", "version": release,
            "description": "Decimals, dates and times are texts. Errors are {\"error\": {code, message, hint}}.",
        },
        "servers": [{"url": url}],
        "security": [{"token": []}, {"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
            "schemas": {"Error": ERROR, "Node": NODE},
            "responses": {str(status): answer(said, {"$ref": "#/components/schemas/Error"}) for status, said in REFUSED.items()},
        },
    }  # fmt: skip


ERROR: Schema = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["code", "message", "hint"],
        "properties": {"code": TEXT, "message": TEXT, "hint": {"type": ["string", "null"]}, "rows": {"type": "array"}, "execution": COUNT},
    }},
}  # fmt: skip
NODE: Schema = {
    "type": "object", "required": ["kind", "data", "links"],
    "properties": {"kind": TEXT, "data": OBJECT, "links": {"type": "array", "items": {"$ref": "#/components/schemas/Node"}}},
}  # fmt: skip


def callable(layer: Layer, branch: str = "main") -> list[dict[str, Any]]:
    """The functions that a handle's principal may call: name, signature, description."""
    catalog, function = layer.catalog, SYSTEM.by_name["function"]
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]
        policy = catalog.policy(session, layer.my_id, epoch)
        chain = MAIN_CHAIN if branch == "main" else catalog.chain(session, catalog.branch(session, branch))
        rows = catalog.rows(session, function, chain)
    return [
        {key: each[key] for key in ("name", "signature", "description")}
        for each in sorted(rows, key=lambda each: each["name"])
        if policy.outright("call", f"function:{each['name']}", branch)[0]
    ]


def arguments(signature: Signature, shapes: Any = None) -> Schema:
    """What a verb or a function takes, as a schema of its body."""
    if signature.arguments is None:
        return OBJECT
    takes = {name: one(each, (shapes or {}).get(name)) for name, each in signature.arguments.items()}
    needed = [name for name, each in signature.arguments.items() if each.required]
    found: Schema = {"type": "object", "properties": takes, "additionalProperties": False}
    return {**found, "required": needed} if needed else found


def one(each: Field, shape: type | None) -> Schema:
    found = dict(TYPES.get(each.type, {}))
    if shape is not None:
        found = {"type": "object"} if shape is dict else {"type": "array"}
    if each.type in ("enum", "state"):
        found = {"enum": sorted(each.values)}
    elif not each.required and isinstance(found.get("type"), str | list):
        kinds = [found["type"]] if isinstance(found["type"], str) else found["type"]
        found["type"] = [*kinds, "null"]
    if each.initial is not None:
        found["default"] = each.initial
    return found


def answer(said: str, schema: Schema, kind: str = JSON) -> dict[str, Any]:
    return {"description": said, "content": {kind: {"schema": schema}}}


def refusals(*more: int) -> dict[str, Any]:
    """The errors any request may meet, and those of its own."""
    listed = (400, 401, 403, 404, 405, 406, 408, 413, 429, 503, 504, *more)
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(listed)}


def doing(
    name: str, said: str, takes: Schema, more: list[dict[str, Any]] | None = None, told_once: bool = False
) -> dict[str, Any]:
    """One verb."""
    first, _, rest = said.partition("\n")
    gives: Schema = {"type": "object", "properties": {"result": {}}, "required": ["result"]}
    return {
        "operationId": name, "summary": first, "description": rest.strip() or first, "tags": [name.partition(".")[0]],
        "parameters": [BRANCH, REASON, PRINCIPAL, KEY, TRACE, *(more or ())],
        "requestBody": {"required": bool(takes.get("required")), "content": {JSON: {"schema": takes}}},
        "responses": {
            "200": {**answer("what it gives", gives), "headers": {"Layer-Tx": {"schema": TEXT, "description": "the last tx"}}},
            **refusals(409, 412, 415, 422),
        },
    }  # fmt: skip


def asking(
    name: str, said: str, parameters: list[dict[str, Any]], gives: Schema, *, tables: bool = False, body: Schema | None = None
) -> dict[str, Any]:  # fmt: skip
    """One read."""
    ok = answer("what was asked for", gives)
    if tables:
        ok["content"] |= {NDJSON: {"schema": {}}, CSV: {"schema": TEXT}}
        ok["headers"] = {"Layer-Tx": {"schema": TEXT, "description": "the last tx that it shows"}}
    found: dict[str, Any] = {
        "operationId": name, "summary": said, "tags": ["read"], "parameters": parameters,
        "responses": {"200": ok, "304": {"description": "as If-None-Match knows it"}, **refusals()},
    }  # fmt: skip
    if body is not None:
        found["requestBody"] = {"required": bool(body.get("required")), "content": {JSON: {"schema": body}}}
        found["responses"] |= refusals(415)
    return found


def named(name: str, schema: Schema, required: bool = False, said: str = "") -> dict[str, Any]:
    found = {"name": name, "in": "query", "schema": schema, "required": required}
    return {**found, "description": said} if said else found


def of_path(name: str, schema: Schema = TEXT) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def listing(name: str, items: Schema = ROW) -> Schema:
    return {"type": "object", "properties": {name: {"type": "array", "items": items}}, "required": [name]}


ROWS: Schema = {
    "type": "object", "required": ["rows", "tx"],
    "properties": {"rows": {"type": "array", "items": ROW}, "tx": COUNT, "next": {"type": ["string", "null"]}},
}  # fmt: skip
ENTITY = of_path("entity", {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,47}$"})
ID = of_path("id", {"type": "integer", "minimum": 0, "maximum": 10**18 - 1})


def reads() -> dict[str, Any]:
    """The paths that only read."""
    limit = {"type": "integer", "minimum": 0, "maximum": 1 << 60}
    seconds = {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400}
    queried = [
        named("sql", TEXT, True, "one SELECT over entity names"),
        named("params", TEXT, said="JSON: values for :name"),
        *READ,
    ]
    body: Schema = {
        "type": "object", "required": ["sql"], "additionalProperties": False,
        "properties": {
            "sql": TEXT, "params": {"type": ["object", "array", "null"]}, "branch": TEXT, "as_of": {"type": ["integer", "string", "null"]},
            "principal": {"type": ["string", "null"]}, "timeout": {**seconds, "type": ["number", "null"]}, "limit": {**limit, "type": ["integer", "null"]},
            "page": {"type": ["integer", "null"], "minimum": 1, "maximum": PAGE}, "cursor": {"type": ["string", "null"]},
        },
    }  # fmt: skip
    decided: Schema = {
        "type": "object", "required": ["allowed", "rows", "reason"],
        "properties": {"allowed": {"type": "boolean"}, "rows": {"type": "array", "items": ROW}, "reason": TEXT},
    }  # fmt: skip
    row = {"type": "object", "properties": {"row": ROW, "tx": COUNT}, "required": ["row", "tx"]}
    whoami = {
        "type": "object",
        "properties": {"id": COUNT, "name": TEXT, "layer": TEXT, "scope": {}},
        "required": ["id", "name", "layer"],
    }
    kept = {"type": "object", "properties": {"digest": TEXT, "bytes": COUNT}, "required": ["digest", "bytes"]}
    tree = {"type": "object", "properties": {"tree": {"$ref": "#/components/schemas/Node"}}, "required": ["tree"]}
    report = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "tx": COUNT, "rows": COUNT, "problems": {"type": "array"}},
        "required": ["ok"],
    }
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    blob = asking("blob.get", "The content of a file field of a row you may read.", [of_path("digest")], {})
    blob["responses"]["200"]["content"] = binary
    store = asking("blob.store", "Store content for a file field: its hash, which a row then names.", [], kept)
    store["requestBody"] = {"content": binary}
    stream = asking(
        "live", "Server-sent events: a query or projection told again when its answer changes, or the changes of an entity.",
        [named("sql", TEXT), named("params", TEXT), named("projection", TEXT), named("arguments", TEXT), named("entity", TEXT), named("id", {"type": "integer"}),
         BRANCH, named("format", {"enum": ["json", "typed"]}), {"name": "Last-Event-ID", "in": "header", "schema": TEXT}], {},
    )  # fmt: skip
    stream["responses"]["200"]["content"] = {"text/event-stream": {"schema": TEXT}}
    subject = named("subject", TEXT, True, "ticket/7, ticket/7.status, tx/41 or an execution's number")
    return {
        "/api/query": {
            "get": asking("query.get", "Rows of one SELECT.", [*queried, named("limit", limit), named("timeout", seconds), *PAGING, FORMAT], ROWS, tables=True),
            "post": asking("query", "Rows of one SELECT.", [FORMAT], ROWS, tables=True, body=body),
        },
        "/api/projection": {"get": asking("projection.list", "The projections you may read.", [BRANCH], listing("projections"))},
        "/api/projection/{name}": {
            "get": asking("projection.get", "Rows of a projection; its arguments are parameters.", [of_path("name"), *READ, *PAGING, FORMAT], ROWS, tables=True),
            "post": asking("projection", "Rows of a projection; its arguments are the body.", [of_path("name"), *READ, *PAGING, FORMAT], ROWS, tables=True, body=OBJECT),
        },
        "/api/function": {"get": asking("function.list", "The functions you may call.", [BRANCH], listing("functions"))},
        "/api/function/{name}": {"post": {**doing("function", "Call a function.", OBJECT), "parameters": [of_path("name"), BRANCH, REASON, PRINCIPAL, KEY, TRACE]}},
        "/api/row/{entity}/{id}": {"get": asking("row.get", "One row; its version is the ETag.", [ENTITY, ID, *READ], row)},
        "/api/history/{entity}/{id}": {"get": asking("history.get", "Every version of a row, oldest first.", [ENTITY, ID, *READ, *PAGING, FORMAT], ROWS, tables=True)},
        "/api/schema": {"get": asking("schema", "The entities and fields you may read something of.", [BRANCH, AS_OF], listing("entities"))},
        "/api/diff": {"get": asking("diff", "What a branch changed since its fork or last merge.", [{**BRANCH, "required": True}, named("target", TEXT), PRINCIPAL], listing("changes"))},
        "/api/conflicts": {"get": asking("conflicts", "What keeps branches from merging.", [BRANCH], listing("conflicts"))},
        "/api/why": {"get": asking("why", "What led to it, or came of it.", [subject, named("impact", {"type": "boolean"}), named("depth", {"type": "integer"}), *READ], tree)},
        "/api/can": {"get": asking("can", "Whether a principal may do something, and which permissions decide.", [named("action", TEXT, True), named("resource", TEXT, True), *READ], decided)},
        "/api/me": {"get": asking("me", "Who you are here.", [], whoami)},
        "/api/verify": {"get": asking("verify", "Everything read again, every hash recomputed; for owners.", [], report)},
        "/api/blob": {"post": store},
        "/api/blob/{digest}": {"get": blob},
        "/api/live": {"get": stream},
    }  # fmt: skip
