"""Acts: the tools of the table, each a verb of the layer (or a read) in the words of a model."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from ...errors import Invalid, LayerError, NotFound
from ...law import approvals, held, replay  # noqa: F401  (their verbs are in the table)
from ...law.signature import dumps
from ...law.tools import of_field
from ...law.verbs import call
from ...projection.query import read as read_projection
from ...substrate import branches
from .tools import SHOWN, Object, Seen, Use, tool

ROWS = 100  # of an answer, unless more are asked for
MOST = 1000
CELL = 8 << 10  # characters of one value
PAGE = "ui://layer/projection"

Branch = Annotated[str, "a branch, as fork makes them"]
Moment = Annotated[int | str | None, "as it was at this tx number or ISO 8601 time"]
Limit = Annotated[int, {"minimum": 1, "maximum": MOST}]
Offset = Annotated[int, "where to go on, from `next` of the answer before", {"minimum": 0, "maximum": 10**12}]
Reason = Annotated[str | None, "why, kept with the change"]
Key = Annotated[
    str | None, "a key of your own: asking again with it gives what the first time gave", {"maxLength": 200}
]
Box = Annotated[str, "the id or name of a box"]
NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
LIST = {"type": "array", "items": {"type": "object"}}
PAGED = {"rows": LIST, "tx": NUMBER, "next": {"type": "integer", "description": "the offset of the rows that are left"}}


def moment(given: int | str | None) -> int | datetime | None:
    """A tx number or a time from what a model writes."""
    if not isinstance(given, str):
        return given
    if given.isdecimal() and len(given) < 19:
        return int(given)
    try:
        found = datetime.fromisoformat(given)
    except ValueError:
        raise Invalid(f"{given!r:.60} is neither a tx nor a time", hint="41, or 2026-01-31T12:00:00Z") from None
    if found.tzinfo is None:
        raise Invalid(f"{given!r:.60} says no time zone", hint=f"{given}Z")
    return found


def paged(rows: Sequence[Any], offset: int, limit: int, label: str = "rows") -> Object:
    """As many of these as an answer holds, and where to go on. `rows` may be one more than the limit, to tell that there are."""
    shown: list[Any] = []
    size = 0
    for row in rows[:limit]:
        row = {key: _short(value) for key, value in row.items()} if isinstance(row, Mapping) else row
        size += len(dumps(row))
        if shown and size > SHOWN:
            break
        shown.append(row)
    return {label: shown} | ({"next": offset + len(shown)} if len(shown) < len(rows) else {})


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else dumps(value).decode() if isinstance(value, dict | list) else ""
    if len(text) <= CELL:
        return value
    return f"{text[:CELL]}… (cut: {len(text)} characters; select substr(field, {CELL + 1}, {CELL}) has more)"


# Reading


def entity_of(entity: Any) -> Object:
    """An entity as a model reads it."""
    fields = {"id": {"type": "integer"}} | {each.name: of_field(each) | {"kind": each.type} for each in entity.fields}
    needed = [each.name for each in entity.fields if each.required]
    return {"name": entity.name, "description": entity.description, "fields": fields, "required": needed}


@tool("schema", "read", lambda seen: seen.reads, output={"entities": LIST, "names": {"type": "array", "items": TEXT}})
def schema(
    use: Use, *, entity: Annotated[str | None, "only this one"] = None, system: Annotated[bool, "the layer's own too"] = False, branch: Branch = "main",
) -> Any:  # fmt: skip
    """What there is to read: entities, their fields and types. Start here, then use query."""
    found = use.layer.schema(branch)
    if entity is not None:
        return {"entities": [entity_of(found.get(entity))]}
    shown = [each for each in found.entities if system or not each.system]
    return paged([entity_of(each) for each in shown], 0, MOST, "entities") | {
        "names": [each.name for each in found.entities]
    }


@tool("query", "read", lambda seen: seen.reads, output=PAGED)
def query(
    use: Use, *, sql: Annotated[str, "one SELECT over entity names, their NAME__history, and tx, change, execution, step", {"minLength": 1}],
    params: Annotated[dict[str, Any] | list[Any] | None, "values for :name or ?"] = None, branch: Branch = "main", as_of: Moment = None,
    limit: Limit = ROWS, offset: Offset = 0,
) -> Any:  # fmt: skip
    """Rows of one SQL SELECT, as a branch was at a moment and as you may see it. Nothing can be written with it."""
    # an answer of more rows than a limit is refused, so it is the statement that has one; its last line may be a comment
    window = f"select * from ({sql.strip().rstrip(';')}\n) q limit {limit + 1} offset {offset}"
    try:
        rows, tx = use.layer.query_at(window, params, branch, moment(as_of))
    except Invalid:  # the words for what is wrong are about what was asked; and some can't stand in another
        rows, tx = use.layer.query_at(sql, params, branch, moment(as_of))
        rows = rows[offset : offset + limit + 1]
    return paged(rows, offset, limit) | {"tx": tx}


@tool("history", "read", lambda seen: seen.reads, output=PAGED)
def history(use: Use, *, entity: str, id: int, branch: Branch = "main", limit: Limit = ROWS, offset: Offset = 0) -> Any:
    """Every version of one row, newest first: what it was, since which tx, by whom and why."""
    known = use.layer.schema(branch).get(entity)
    sql = f"select * from {known.name}__history where id = :id order by tx desc limit {limit + 1} offset {offset}"
    rows = use.layer.query(sql, {"id": id}, branch=branch)
    if not rows and not offset:
        raise NotFound(f"there is no {entity}/{id}")
    return paged(rows, offset, limit)


@tool("why", "read", lambda seen: seen.reads, output={"text": TEXT, "tree": {"type": "object"}})
def why(
    use: Use, *, subject: Annotated[str | int, "ticket/7, ticket/7.status, tx/41, or an execution by its number"],
    impact: Annotated[bool, "the other way: what came of it"] = False, branch: Branch = "main", as_of: Moment = None,
    depth: Annotated[int, "how many executions back", {"minimum": 1, "maximum": 100}] = 8,
) -> Any:  # fmt: skip
    """What led to a row, a field, a tx or an execution: who did it, why, with which permissions, back to its origin."""
    tree = use.layer.why(subject, impact=impact, branch=branch, as_of=moment(as_of), depth=depth)
    text = "\n".join(tree.lines())
    if len(text) > SHOWN:
        return {
            "text": f"{text[:SHOWN]}\n… cut: ask again with a smaller depth, or about one of the txs and executions above"
        }
    found = tree.json()
    return {"text": text} | ({"tree": found} if len(dumps(found)) <= SHOWN else {})


@tool("can", "read", lambda seen: True, output={"allowed": {"type": "boolean"}, "reason": TEXT, "rows": LIST})
def can(
    use: Use, *, action: Annotated[str, "read, insert, update, delete, define, fork, merge, call, approve, …"],
    resource: Annotated[str, "ticket, ticket/7, ticket.status, branch:main, function:NAME, contract:NAME, …"],
    principal: Annotated[str | None, "of whom; yourself unless you are an owner"] = None, branch: Branch = "main", as_of: Moment = None,
) -> Any:  # fmt: skip
    """Whether you may do something, and the permissions that decide."""
    found = use.layer.can(principal or use.layer.me, action, resource, branch=branch, as_of=moment(as_of))
    return {"allowed": found.allowed, "reason": found.reason, "rows": found.rows}


@tool(
    "open_projection",
    "read",
    lambda seen: bool(seen.projections),
    output=PAGED | {"name": TEXT},
    meta={"ui": {"resourceUri": PAGE}},
)
def open_projection(
    use: Use, *, name: str, arguments: Annotated[dict[str, Any] | None, "its parameters"] = None, branch: Branch = "main", as_of: Moment = None,
    limit: Limit = ROWS, offset: Offset = 0,
) -> Any:  # fmt: skip
    """Rows that were prepared under a name; layer://projection/NAME is the same as a resource."""
    rows, tx = read_projection(
        use.layer, name, arguments or {}, principal=use.caller.principal, branch=branch, as_of=moment(as_of)
    )
    return paged(rows[offset : offset + limit + 1], offset, limit) | {"tx": tx, "name": name}


@tool(
    "replay",
    "read",
    lambda seen: seen.reads_of("execution"),
    output={"execution": {"type": "object"}, "steps": LIST, "next": NUMBER},
)
def show_execution(use: Use, *, execution: int, limit: Limit = ROWS, offset: Offset = 0) -> Any:
    """An execution as it was recorded: what was asked, every step it took, what it gave."""
    record = replay.replay(use.layer, execution).json()
    row = {key: _short(value) for key, value in record["execution"].items() if value is not None}
    return {"execution": row} | paged(record["steps"][offset : offset + limit + 1], offset, limit, "steps")


@tool("replay_again", "write", lambda seen: seen.reads_of("execution") and bool(seen.functions), long=True)
def run_again(use: Use, *, execution: int) -> Any:
    """Run a recorded execution of a function again, in a box and without effect, and say whether it does the same."""
    return use.call("execution.verify", {"execution": execution}, key=use.key)


# Changing

DO = ("insert", "update", "upsert", "delete", "define", "alter", "drop")
ROW_CHANGES = DO[:4]
CHANGES = Annotated[
    list[Any],
    {
        "minItems": 1,
        "maxItems": 1000,
        "items": {
            "type": "object",
            "properties": {
                "do": {"enum": list(DO)},
                "entity": TEXT,
                "id": NUMBER,
                "values": {"type": "object", "description": "fields of the row"},
                "on": {"type": "array", "items": TEXT, "description": "of upsert: the fields that tell rows apart"},
                "expect": {"type": "integer", "description": "the tx that the row's version must still have"},
                "fields": {"type": "object", "description": 'of define: {"title": "text!", "owner": "ref person"}'},
                "change": {
                    "type": "object",
                    "description": "of alter: add, rename, retype, drop, new_name, description",
                },
            },
            "required": ["do", "entity"],
            "additionalProperties": False,
        },
    },
    'what to change, e.g. [{"do": "update", "entity": "ticket", "id": 7, "values": {"status": "done"}}]',
]


def _removes(use: Use) -> str | None:
    gone = [each for each in use.arguments["changes"] if each["do"] in ("delete", "drop")]
    if not gone:
        return None
    named = ", ".join(f"{each['do']} {each['entity']}/{each.get('id', '')}".rstrip("/") for each in gone[:10])
    more = f" and {len(gone) - 10} more" if len(gone) > 10 else ""
    return f"{use.layer.me} wants to remove from branch {use.arguments.get('branch', 'main')}: {named}{more}"


def _changed(use: Use, changes: Sequence[Any], branch: str, reason: str | None, key: str | None) -> Object:
    """Do changes: those of rows as one tx; one of the schema is a tx of its own."""
    if all(each["do"] in ROW_CHANGES for each in changes):
        done: Object = use.call("row.change", {"changes": list(changes)}, branch=branch, reason=reason, key=key)
        return done
    for each in changes:
        name, do = each["entity"], each["do"]
        if do in ROW_CHANGES:
            use.call("row.change", {"changes": [each]}, branch=branch, reason=reason)
            continue
        given = {"define": {"fields": each.get("fields") or {}}, "alter": dict(each.get("change") or {}), "drop": {}}[
            do
        ]
        use.call(f"entity.{do}", {"name": name, **given}, branch=branch, reason=reason)
    return {"changed": len(changes)}


@tool(
    "propose_change",
    "write",
    lambda seen: seen.holds("fork", "branch"),
    output={"branch": TEXT, "changes": LIST, "next": NUMBER},
)
def propose_change(
    use: Use, *, changes: CHANGES, reason: Reason = None, source: Annotated[str, "the branch it is for"] = "main",
    branch: Annotated[str | None, "a name for the fork, or one you proposed on before"] = None,
) -> Any:  # fmt: skip
    """Try changes on a fork and show the difference; nothing else sees them until you merge the branch (or discard it)."""
    layer, name = use.layer, branch or f"proposal_{secrets.token_hex(4)}"
    fresh = branch is None
    try:
        use.call("branch.fork", {"name": name, "source": source}, reason=reason)
        fresh = True
    except LayerError as error:
        if branch is None or error.code != "conflict":
            raise
    try:
        _changed(use, changes, name, reason, None)
        found = layer.diff(name)
    except LayerError:
        if fresh:
            branches.withdraw(layer.ledger, layer.execution_by(None), name)
        raise
    return {"branch": name} | paged(found, 0, ROWS, "changes")


@tool(
    "apply_change",
    "write",
    lambda seen: seen.writes,
    output={"ids": {"type": "array"}, "changed": NUMBER},
    ask=_removes,
    destructive=True,
)
def apply_change(use: Use, *, changes: CHANGES, branch: Branch = "main", reason: Reason = None, key: Key = None) -> Any:
    """Change rows at once, all or none of them. Use propose_change where somebody shall look at it first."""
    if len(changes) > 1 and not all(each["do"] in ROW_CHANGES for each in changes):
        raise Invalid(
            "define, alter and drop are each a tx of their own", hint="one of them at a time; or propose_change"
        )
    return _changed(use, changes, branch, reason, key)


def _forks(seen: Seen) -> bool:
    return seen.holds("fork", "branch")


@tool("fork", "write", _forks, output={"branch": TEXT, "id": NUMBER})
def fork(
    use: Use, *, name: str, source: Branch = "main", slice: Annotated[dict[str, Any] | None, "entity -> condition, or null for all rows"] = None,
    as_of: Annotated[int | None, "a tx"] = None, reason: Reason = None,
) -> Any:  # fmt: skip
    """A branch of everything, or of a slice, to try things on; it costs one row."""
    given = {"name": name, "source": source, "slice": slice, "as_of": as_of}
    return {"branch": name, "id": use.call("branch.fork", given, reason=reason)}


@tool("diff", "read", lambda seen: seen.reads, output={"changes": LIST, "next": NUMBER})
def diff(use: Use, *, branch: Branch, limit: Limit = ROWS, offset: Offset = 0) -> Any:
    """What a branch changed since it was forked or merged, by row and field."""
    return paged(use.layer.diff(branch)[offset : offset + limit + 1], offset, limit, "changes")


def _merges(use: Use) -> str | None:
    if use.arguments.get("preview"):
        return None
    found = use.layer.diff(use.arguments["branch"])
    gone = [each for each in found if each["op"] == "delete"]
    return (
        f"{use.layer.me} wants to merge {use.arguments['branch']}, which removes {len(gone)} of {len(found)} rows"
        if gone
        else None
    )


@tool(
    "merge",
    "write",
    lambda seen: seen.holds("merge", "branch"),
    output={"applied": {"type": "boolean"}, "tx": {"type": ["integer", "null"]}, "conflicts": LIST, "changes": LIST},
    ask=_merges,
    destructive=True,
)
def merge(
    use: Use, *, branch: Branch, preview: Annotated[bool, "only say what would happen"] = False, reason: Reason = None
) -> Any:
    """Bring a branch's changes to the one it was forked from. With conflicts nothing is applied: resolve them and merge again."""
    if preview:
        done = vars(use.layer.merge(branch, preview=True))
    else:
        done = use.call("branch.merge", {"name": branch}, reason=reason)
    conflicts = paged(done["conflicts"], 0, ROWS, "conflicts")["conflicts"]
    return {"applied": done["applied"], "tx": done["tx"], "conflicts": conflicts} | paged(
        done["changes"], 0, ROWS, "changes"
    )


@tool("resolve", "write", lambda seen: seen.holds("merge", "branch"))
def resolve(
    use: Use, *, conflict: Annotated[int, "its id"], take: Annotated[Literal["ours", "theirs"] | None, {"enum": ["ours", "theirs"]}] = None,
    value: Any = None, reason: Reason = None,
) -> Any:  # fmt: skip
    """Say what the value of a conflict shall be; the next merge uses it."""
    return use.call("conflict.resolve", {"id": conflict, "take": take, "value": value}, reason=reason)


@tool(
    "discard",
    "write",
    _forks,
    destructive=True,
    ask=lambda use: f"{use.layer.me} wants to discard branch {use.arguments['branch']!r}",
)
def discard(use: Use, *, branch: Branch, reason: Reason = None) -> Any:
    """Close a branch without merging it; its name is free again, its history stays."""
    return use.call("branch.discard", {"name": branch}, reason=reason)


# Functions and agents


def latest(layer: Any) -> int:
    """The number of the last execution."""
    with layer.engine.reading() as session:
        row = session.one(f"select max(id) from {layer.engine.schema_prefix}ledger_execution")
    return int(row[0] or 0) if row else 0


def execution_of(layer: Any, key: str, since: int) -> int | None:
    """The execution after another that has a key."""
    with layer.engine.reading() as session:
        sql = f"select max(execution) from {layer.engine.schema_prefix}ledger_call where execution > ? and key = ?"
        row = session.one(sql, (since, key))
    return None if row is None or row[0] is None else int(row[0])


def called(use: Use, name: str, arguments: Mapping[str, Any], branch: str = "main", key: str | None = None) -> Object:
    """What a function gives, and the execution that it was."""
    since, key = latest(use.layer), key or use.key
    value = use.call(name, arguments, branch=branch, key=key)
    return gave(value, execution_of(use.layer, key, since))


def gave(value: Any, execution: int | None) -> Object:
    """A function's value as a model is told it."""
    told: Object = {} if execution is None else {"execution": execution}
    if len(data := dumps(value)) > SHOWN:
        told["cut"] = {"bytes": len(data), "beginning": data[: SHOWN // 2].decode("utf-8", "ignore")}
        told["hint"] = f"all of it is at layer://execution/{execution}/result"
        return told
    return {"value": value, **told}


@tool(
    "call_function",
    "write",
    lambda seen: bool(seen.functions),
    output={"value": {}, "execution": NUMBER},
    destructive=True,
    long=True,
)
def call_function(
    use: Use, *, name: Annotated[str, "noun.verb"], arguments: Annotated[dict[str, Any] | None, "by name"] = None, branch: Branch = "main",
    key: Key = None,
) -> Any:  # fmt: skip
    """Call a function by its name, on any branch; each that you may call on main has a tool of its own, too."""
    if "." not in name or name in _verbs():
        raise NotFound(f"there is no function {name!r:.120}", hint="select name from function lists them")
    return called(use, name, arguments or {}, branch, key)


def _verbs() -> Mapping[str, Any]:
    from ...law.verbs import VERBS

    return VERBS


@tool(
    "run_agent",
    "write",
    lambda seen: seen.holds("call", "contract"),
    output={"execution": NUMBER, "branch": TEXT, "box": TEXT},
    long=True,
)
def run_agent(
    use: Use, *, contract: str, task: Annotated[str, "what it shall do", {"minLength": 1}], source: Annotated[str, "the branch it begins from"] = "main",
) -> Any:  # fmt: skip
    """Have an agent of a contract do a task on a branch of its own; what it changes waits for a person's yes."""
    return use.call("agent.run", {"contract": contract, "task": task, "source": source}, key=use.key)


def _question(use: Use) -> str:
    row = next(iter(use.layer.query("select * from approval where id = :id", {"id": use.arguments["id"]})), None)
    if row is None:
        raise NotFound(
            f"there is no approval {use.arguments['id']}", hint="select id, action, resource, status from approval"
        )
    asked = dumps(row.get("request")).decode()[:2000]
    return f"Approval {row['id']}: may {row.get('contract') or 'it'} {row['action']} {row['resource']} on {row['branch']}? {asked}"


@tool(
    "answer_approval",
    "write",
    lambda seen: seen.holds("approve", "contract") and seen.reads_of("approval"),
    ask=_question,
    person=True,
    destructive=True,
)
def answer_approval(use: Use, *, id: Annotated[int, "of the approval"]) -> Any:
    """Have the person at this client answer what a box asks, or a merge that is proposed. You can't answer it yourself."""
    given = {"id": id, "approve": use.said.get("confirm") is True, "reason": use.said.get("reason") or None}
    return use.call("approval.answer", given)


# Boxes


def _boxes(seen: Seen) -> bool:
    return seen.holds("call", "box")


@tool("box_create", "boxes", _boxes, output={"box": TEXT, "execution": NUMBER}, open_world=True)
def box_create(
    use: Use, *, blueprint: Annotated[str, "the shape of the box"] = "base", name: str | None = None,
    timeout: Annotated[float, "seconds until it ends by itself", {"minimum": 1}] = 3600, metadata: Annotated[dict[str, Any] | None, "texts by name"] = None,
    environment: Annotated[dict[str, Any] | None, "variables; their values are not recorded"] = None,
) -> Any:  # fmt: skip
    """A box of your own: a machine to run unreviewed code in. It ends when its time is over; destroy it when you are done."""
    given = {"blueprint": blueprint, "name": name, "timeout": timeout, "metadata": metadata, "environment": environment}
    return use.call("box.open", {key: value for key, value in given.items() if value is not None})


@tool(
    "box_exec",
    "boxes",
    _boxes,
    output={"exit_code": {"type": ["integer", "null"]}, "stdout": TEXT, "stderr": TEXT},
    open_world=True,
    destructive=True,
    lasts=True,
)
def box_exec(
    use: Use, *, box: Box, command: Annotated[str | list[Any], "for its shell, or a list of words"], cwd: str | None = None,
    timeout: Annotated[float, "seconds", {"minimum": 0.1, "maximum": 3600}] = 120, stdin: str | None = None,
    environment: dict[str, Any] | None = None, user: str | None = None,
) -> Any:  # fmt: skip
    """Run a command in a box to its end. An exit code other than 0 is an answer too. Long output is cut: write it to a file, then box_read."""
    given = {
        "box": box, "command": command, "cwd": cwd, "timeout": timeout, "stdin": stdin, "environment": environment, "user": user,
        "tag": use.key,
    }  # fmt: skip
    given = {key: value for key, value in given.items() if value is not None}
    done = dict(call(use.layer, "box.run", given, trace=use.trace, begun=use.begun))
    for stream in ("stdout", "stderr"):
        if len(text := done[stream]) > SHOWN // 2:
            done[stream] = (
                text[: SHOWN // 4] + f"\n… {len(text) - SHOWN // 2} characters are left out …\n" + text[-SHOWN // 4 :]
            )
            done["truncated"] = True
            done["hint"] = "run it again with > FILE, and read that with box_read"
    return done


@tool(
    "box_read",
    "boxes",
    _boxes,
    output={"path": TEXT, "bytes": NUMBER, "content": TEXT, "encoding": TEXT, "next": NUMBER},
)
def box_read(
    use: Use,
    *,
    box: Box,
    path: str,
    offset: Offset = 0,
    limit: Annotated[int, "bytes", {"minimum": 1, "maximum": SHOWN}] = SHOWN,
) -> Any:
    """A file of a box: text, or base64 where it is none. Of a long one a part; go on at `next`."""
    data = base64.b64decode(use.call("box.read", {"box": box, "path": path, "encoding": "base64"})["content"])
    part = data[offset : offset + limit]
    told: Object = {"path": path, "bytes": len(data), "encoding": "text"}
    for cut in range(min(4, len(part)) if offset + len(part) < len(data) else 1):  # not amid a character
        try:
            told["content"] = part[: len(part) - cut].decode()
            part = part[: len(part) - cut]
            break
        except UnicodeDecodeError:
            continue
    else:
        told |= {"content": base64.b64encode(part).decode(), "encoding": "base64"}
    return told | ({"next": offset + len(part)} if offset + len(part) < len(data) else {})


@tool("box_write", "boxes", _boxes, output={"path": TEXT, "bytes": NUMBER}, idempotent=True, destructive=True)
def box_write(use: Use, *, box: Box, path: str, content: str, encoding: Literal["text", "base64"] = "text") -> Any:
    """Write a file of a box; directories above it are made."""
    return use.call("box.write", {"box": box, "path": path, "content": content, "encoding": encoding})


@tool("box_list", "boxes", _boxes, output={"boxes": LIST, "next": NUMBER})
def box_list(use: Use, *, limit: Limit = ROWS, offset: Offset = 0) -> Any:
    """The boxes you hold, newest first."""
    return paged(use.call("box.list", {})[offset : offset + limit + 1], offset, limit, "boxes")


@tool("box_fork", "boxes", _boxes, output={"boxes": LIST})
def box_fork(
    use: Use, *, box: Box, count: Annotated[int, {"minimum": 1, "maximum": 100}] = 1, timeout: float | None = None
) -> Any:
    """Boxes that begin where this one is; it goes on."""
    made = use.call("box.fork", {"box": box, "count": count} | ({} if timeout is None else {"timeout": timeout}))
    return made if isinstance(made, dict) else {"boxes": made}


@tool("box_snapshot", "boxes", _boxes)
def box_snapshot(use: Use, *, box: Box, name: Annotated[str | None, "of the blueprint that it becomes"] = None) -> Any:
    """Keep what a box holds; box_create with the name as blueprint begins there."""
    return use.call("box.snapshot", {"box": box} | ({} if name is None else {"name": name}))


@tool(
    "box_destroy",
    "boxes",
    _boxes,
    destructive=True,
    idempotent=True,
    ask=lambda use: f"{use.layer.me} wants to end box {use.arguments['box']!r} with all its files",
)
def box_destroy(use: Use, *, box: Box) -> Any:
    """End a box, with all its processes and files."""
    return use.call("box.kill", {"box": box})
