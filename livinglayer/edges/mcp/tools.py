"""Tools: what a model may do. One table, from which each principal is offered what it may use and nothing else."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import mcp_types as types
from jsonschema import Draft202012Validator

from ...errors import Invalid, LayerError, LimitExceeded
from ...law.signature import Signature, dumps
from ...law.tools import of_field
from ...projection.query import readable
from ...substrate.ledger import MAIN_CHAIN, Execution
from ...substrate.permissions import WRITES, Policy
from ...substrate.reads import clock
from ...substrate.schema import SYSTEM, Schema
from ..http.serving import Caller

SHOWN = 64 << 10  # bytes of an answer; a model that reads more than this forgets why it asked
ARGUMENTS = 4 << 20  # bytes
NAME = 64  # characters of a tool's name that every client takes
PLAIN = re.compile(r"[A-Za-z0-9_-]+")
JSON = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
FUNCTION = SYSTEM.by_name["function"]

Object = dict[str, Any]
Need = Literal["read", "write", "boxes"]


@dataclass(frozen=True)
class Use:
    """One use of a tool: who asks for what."""

    caller: Caller
    arguments: Mapping[str, Any]
    key: str  # by which its execution is found
    trace: str | None = None
    said: Mapping[str, Any] = field(default_factory=dict)  # what a person answered
    begun: Callable[[Execution], None] | None = None  # is told of its execution

    @property
    def layer(self) -> Any:
        return self.caller.layer

    def call(self, verb: str, arguments: Mapping[str, Any], **more: Any) -> Any:
        """Through the one door, in the trace of whoever asks."""
        return self.layer.call(verb, arguments, trace=self.trace, **more)


@dataclass(frozen=True)
class Tool:
    """One entry of the table: what it takes and gives, who is offered it, what must be asked before."""

    name: str
    description: str
    input: Mapping[str, Any]
    run: Callable[[Use], Any]
    needs: Need
    may: Callable[[Seen], bool]
    output: Mapping[str, Any] | None = None
    destructive: bool = False
    idempotent: bool = False
    open_world: bool = False
    long: bool = False  # it may go on as a task: the execution that it is
    lasts: bool = False  # so may this; its execution is written then, or else at its end
    ask: Callable[[Use], str | None] | None = None  # what a person must say yes to first; None: nothing
    person: bool = False  # nobody but a person may say it
    function: str | None = None
    meta: Mapping[str, Any] | None = None

    def told(self) -> types.Tool:
        """As MCP lists it."""
        hints = types.ToolAnnotations(
            read_only_hint=self.needs == "read", destructive_hint=self.destructive, open_world_hint=self.open_world,
            idempotent_hint=self.idempotent or self.needs == "read",
        )  # fmt: skip
        output = None if self.output is None else dict(self.output)
        return types.Tool(
            name=self.name, description=self.description, input_schema=dict(self.input), output_schema=output,
            annotations=hints, _meta=None if self.meta is None else dict(self.meta),
        )  # fmt: skip

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Invalid when arguments are not what it takes."""
        if (size := len(dumps(arguments))) > ARGUMENTS:
            raise LimitExceeded(
                f"{self.name}: {size} bytes are more than arguments may have", hint=f"{ARGUMENTS} at most"
            )
        sound(self.name, arguments)
        wrong = next(Draft202012Validator(self.input).iter_errors(arguments), None)
        if wrong is not None:
            where = ".".join(map(str, wrong.absolute_path))
            raise Invalid(
                f"{self.name}: {where + ': ' if where else ''}{wrong.message:.300}", hint="see its inputSchema"
            )


def sound(what: str, value: Any) -> None:
    """Invalid for what JSON can write and nothing here can hold: half a character, or a number of more than 64 bits."""
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise Invalid(f"{what}: {value[:60]!r} has half a character", hint="a text is Unicode without lone surrogates")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Invalid(
            f"{what}: {value:.3g} has more than 64 bits" if abs(value) < 10**300 else f"{what}: a number is too large"
        )
    if isinstance(value, Mapping):
        for key, inner in value.items():
            sound(what, key)
            sound(what, inner)
    elif isinstance(value, list):
        for inner in value:
            sound(what, inner)


class Seen:
    """What a principal may, as far as it decides what is offered."""

    def __init__(self, caller: Caller, session: Any) -> None:
        layer = caller.layer
        self.caller, self.epoch = caller, clock(layer.engine, session)[1]
        self.policy: Policy = layer.catalog.policy(session, caller.principal, self.epoch)
        self.schema: Schema = layer.catalog.schema(session, MAIN_CHAIN, self.epoch)
        rows = layer.catalog.rows(session, FUNCTION, MAIN_CHAIN)
        self.functions = [
            row
            for row in sorted(rows, key=lambda row: row["name"])
            if self.policy.outright("call", f"function:{row['name']}", "main")[0]
        ]

    def holds(self, action: str, kind: str) -> bool:
        """Whether an action is allowed on something of a kind, as `fork` on some `branch:`."""
        for grant in self.policy.grants:
            named = grant.resource if grant.resource != "*" else f"{kind}:?"
            if grant.effect == "allow" and grant.covers(action, named, None) and named.startswith(f"{kind}:"):
                if self.policy.outright(action, named)[0]:
                    return True
        return False

    def _some(self, *actions: str) -> bool:
        return any(
            self.policy.rules(action, self.schema, entity, None).allows
            for entity in self.schema.entities
            for action in actions
        )

    @cached_property
    def reads(self) -> bool:
        return self._some("read")

    @cached_property
    def writes(self) -> bool:
        return self._some(*WRITES)

    def reads_of(self, entity: str) -> bool:
        return bool(self.policy.rules("read", self.schema, self.schema.get(entity), "main").allows)

    @cached_property
    def projections(self) -> list[Object]:
        return readable(self.caller.layer, self.caller.principal)


# The table

TOOLS: dict[str, Tool] = {}


def tool(
    name: str, needs: Need, may: Callable[[Seen], bool], *, output: Mapping[str, Any] | None = None, **more: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the table; its keywords are the arguments, its docstring what models read."""

    def enter(run: Callable[..., Any]) -> Callable[..., Any]:
        takes = _takes(run)
        if more.get("ask") is not None and not more.get("person"):
            takes["properties"]["confirm"] = {
                "type": "boolean", "description": "that a person has agreed; counts where the client can't ask them itself"
            }  # fmt: skip

        def use(given: Use) -> Any:
            return run(given, **{key: value for key, value in given.arguments.items() if key != "confirm"})

        gives = None if output is None else {"type": "object", "properties": dict(output)}
        TOOLS[name] = Tool(name, inspect.getdoc(run) or "", takes, use, needs, may, gives, **more)
        return run

    return enter


def _takes(run: Callable[..., Any]) -> Object:
    """JSON Schema of a function's keywords."""
    hints, properties, needed = typing.get_type_hints(run, include_extras=True), {}, []
    for each in list(inspect.signature(run).parameters.values())[1:]:
        properties[each.name] = schema_of(hints[each.name])
        if each.default is each.empty:
            needed.append(each.name)
        elif each.default is not None:
            properties[each.name]["default"] = each.default
    made: Object = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | ({"required": needed} if needed else {})


def schema_of(hint: Any) -> Object:
    """JSON Schema of a type: Annotated[…, "what it is"], with Literal for one of some."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *said = typing.get_args(hint)
        found = schema_of(inner)
        for each in said:
            found |= each if isinstance(each, dict) else {"description": each}
        return found
    if typing.get_origin(hint) is Literal:
        return {"type": "string", "enum": list(typing.get_args(hint))}
    kinds = [typing.get_origin(part) or part for part in typing.get_args(hint) or (hint,)]
    if typing.get_origin(hint) in (dict, list):
        kinds = [typing.get_origin(hint)]
    names = [JSON[kind] for kind in kinds if kind in JSON]
    return {} if Any in kinds or not names else {"type": names[0] if len(names) == 1 else names}


# What is offered


def offer(caller: Caller) -> dict[str, Tool]:
    """The tools of a principal by name, always in the same order: those of the table, then one for each function it may call."""
    layer = caller.layer
    with layer.engine.reading() as session:
        seen = Seen(caller, session)
    found = {
        name: each
        for name, each in TOOLS.items()
        if (caller.scope is None or each.needs in caller.scope) and each.may(seen)
    }
    if caller.scope is None or "write" in caller.scope:
        found |= _functions(seen)
    return found


def _functions(seen: Seen) -> dict[str, Tool]:
    labels = [_label(row["name"]) for row in seen.functions]
    found = {}
    for row, label in zip(seen.functions, labels, strict=True):
        if labels.count(label) > 1 or len(label) > NAME or not PLAIN.fullmatch(label):
            plain = re.sub(r"[^A-Za-z0-9_-]", "_", label)
            label = f"{plain[: NAME - 9]}_{sha256(row['name'].encode()).hexdigest()[:8]}"
        if (made := _function(label, row)) is not None:
            found[label] = made
    return found


def _label(name: str) -> str:
    return "call_" + name.replace(".", "_")


def _function(label: str, row: Mapping[str, Any]) -> Tool | None:
    """The tool of one function; None when what its row says of its arguments can't be read."""
    name = row["name"]
    try:
        signature = Signature.of(name, row["signature"])
    except LayerError:
        return None
    takes: Object = {"type": "object"}
    if signature.arguments is not None:
        needed = [key for key, each in signature.arguments.items() if each.required and each.initial is None]
        properties = {key: of_field(each) for key, each in signature.arguments.items()}
        takes = {"type": "object", "properties": properties, "additionalProperties": False}
        takes |= {"required": needed} if needed else {}
    value = {} if signature.result is None else of_field(signature.result)
    about = f"{row['description'].rstrip('.')}. " if row["description"] else ""
    writes = sorted(row["writes"] or {})
    touched = f"It may change {', '.join(writes)}." if writes else "It changes nothing."

    def run(use: Use) -> Any:
        from .acts import called

        return called(use, name, use.arguments)

    return Tool(
        label, f"{about}Calls the function {name} in a box of its own. {touched}", takes, run, "write", lambda seen: True,
        {"type": "object", "properties": {"value": value, "execution": {"type": "integer"}}},
        destructive=bool(writes), long=True, function=name,
    )  # fmt: skip


# What is answered


def answer(value: Any, error: bool = False) -> types.CallToolResult:
    """What a tool gives, as text and as data."""
    if value is None:
        value = {"done": True}
    data = json.loads(dumps(value if isinstance(value, dict) else {"value": value}))
    said = data.get("text")  # what is meant to be read is not told in quotes
    text = said if isinstance(said, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    text = text.encode("utf-8", "replace").decode()
    if len(text) > SHOWN * 4:  # tools cut what they give themselves; this is for what they could not foresee
        cut = {"characters": len(text), "beginning": text[:SHOWN]}
        data = {"cut": cut, "hint": "ask for less: fewer rows, fields or steps"}
        text = json.dumps(data, ensure_ascii=False)
    return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=data, is_error=error)


def failure(error: LayerError) -> types.CallToolResult:
    """An error, as a model can act on it."""
    told: Object = {"code": error.code, "message": error.message, "hint": error.hint}
    told |= {key: error.details[key] for key in ("execution", "rows") if error.details.get(key)}
    hint = f" ({error.hint})" if error.hint else ""
    return types.CallToolResult(
        content=[types.TextContent(text=f"{error.code}: {error.message}{hint}")],
        structured_content={"error": json.loads(dumps(told))}, is_error=True,
    )  # fmt: skip
