"""Tasks: work that outlasts a request. A task is an execution, so any server of the layer knows it, also after a restart."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import mcp_types as types
from mcp.shared.exceptions import MCPError

from ...errors import Conflict, LayerError, NotFound
from ...law import agents, approvals, held, runners
from ...sandbox.sandbox import Sandbox
from ...substrate.ledger import Execution, Work
from ...substrate.schema import OWNER
from ..http.serving import Caller
from .acts import gave
from .asking import FORM
from .tools import Object, Use, answer, failure

EXTENSION = "io.modelcontextprotocol/tasks"
POLL = 1000  # milliseconds
WAKING = 5  # seconds that a command has to begin before whoever would end it asks again
KEY = "approval-"


class TaskParams(types.RequestParams):
    """Which task."""

    task_id: str


class UpdateParams(TaskParams):
    """Answers to what a task asks."""

    input_responses: dict[str, Any]


def own(caller: Caller, number: int) -> dict[str, Any]:
    """The row of an execution that a principal asked for, an owner anybody's; NotFound for others', as for none."""
    engine = caller.layer.engine
    with engine.reading() as session:
        row = session.one(f"select principal from {engine.schema_prefix}ledger_execution where id = ?", (number,))
        sovereign = caller.layer.my_policy(session).sovereign()
    if row is None or (row[0] != caller.principal and not sovereign):
        raise NotFound(f"there is no execution {number}")
    found: dict[str, Any] = caller.layer.acting_as(OWNER).query("select * from execution where id = :e", {"e": number})[
        0
    ]
    return found


def number_of(task: str) -> int:
    """The execution that a task is."""
    if not task.isdecimal() or len(task) > 18:
        raise NotFound(f"there is no task {task!r:.80}")
    return int(task)


def handle(caller: Caller, number: int) -> Object:
    """What a client is given instead of a result, to ask for that later."""
    return {**_told(own(caller, number)), "status": "working", "resultType": "task"}


class Lasting:
    """The execution of a verb whose record is written at its end, unless that is long in coming."""

    def __init__(self) -> None:
        self._execution: Execution | None = None
        self._kept = contextlib.ExitStack()

    def begun(self, execution: Execution) -> None:
        """It runs; its end is not the end of a tx."""
        execution.brief, self._execution = False, execution

    def kept(self, use: Use) -> int | None:
        """Its number, written down; None when it is over, or has not begun yet."""
        if (execution := self._execution) is None or execution.call is None:
            return None

        def unless_over(work: Work) -> int | None:
            if execution.id is None and execution.open:
                work.tx(execution, reason=execution.reason, bare=True).finish()
                return execution.id
            return None

        # when the server dies, it is lost
        runner = self._kept.enter_context(runners.of(use.layer).running())
        execution.call = {**execution.call, "runner": runner}
        number: int | None = use.layer.ledger.submit(unless_over)
        if number is None:
            self._kept.close()
        return number

    def over(self, _: object) -> None:
        """It has ended, and said so itself."""
        self._kept.close()


def needs(caller: Caller, task: str) -> Literal["write", "boxes"]:
    """What a token must be for to have to do with a task: what it was for to begin it."""
    row = own(caller, number_of(task))
    return "boxes" if row["kind"] == "verb" and row["verb"] == "box.run" else "write"


def get(caller: Caller, task: str) -> Object:
    """A task as it is: what it gave, or what it waits for."""
    row = own(caller, number_of(task))
    told = _told(row)
    if row["status"] == "running":
        asked = _asked(caller, row["id"])
        return told | ({"status": "input_required", "inputRequests": asked} if asked else {"status": "working"})
    if row["status"] == "lost":
        return told | {"status": "cancelled", "statusMessage": _reason(row)}
    return told | {
        "status": "completed",
        "result": _result(row).model_dump(by_alias=True, mode="json", exclude_none=True),
    }


def _told(row: Mapping[str, Any]) -> Object:
    began, ended = row["started"], row["finished"] or datetime.now(UTC)
    what = row["function"] or row["verb"] or row["kind"]
    return {
        "taskId": str(row["id"]), "createdAt": began.isoformat(), "lastUpdatedAt": ended.isoformat(), "ttlMs": None, "pollIntervalMs": POLL,
        "statusMessage": f"{what}, execution {row['id']}",
    }  # fmt: skip


def _reason(row: Mapping[str, Any]) -> str:
    told = (row["result"] or {}).get("error") or {}
    return str(told.get("message") or row["status"])


def _result(row: Mapping[str, Any]) -> types.CallToolResult:
    """What the tool would have given."""
    found = row["result"] or {}
    if (wrong := found.get("error")) is not None:
        error = LayerError(str(wrong.get("message")), wrong.get("hint"), execution=row["id"])
        error.code = wrong.get("code") or "failed"
        return failure(error)
    if found.get("cut"):
        hint = "all of it was not kept: run it again with > FILE, and read that with box_read"
        return answer({**found["value"], "truncated": True, "hint": hint})
    return answer(gave(found.get("value"), row["id"]) if row["function"] else found.get("value") or found)


def _asked(caller: Caller, number: int) -> Object:
    """What an execution waits for a person to allow, of which this one may know."""
    rows = [row for row in approvals.of(caller.layer, number) if row["status"] == "pending"]
    form = {"mode": "form", "requestedSchema": FORM}
    return {
        f"{KEY}{row['id']}": {
            "method": "elicitation/create",
            "params": {**form, "message": f"May {row['contract'] or 'it'} {row['action']} {row['resource']}?"},
        }
        for row in rows
    }


def update(caller: Caller, task: str, responses: Mapping[str, Any]) -> None:
    """Answer what a task asks; what it does not ask (any more) is left alone."""
    number = number_of(task)
    own(caller, number)
    pending = {
        f"{KEY}{row['id']}": row["id"] for row in approvals.of(caller.layer, number) if row["status"] == "pending"
    }
    for key in pending.keys() & responses.keys():
        given = responses[key] if isinstance(responses[key], dict) else {}
        action, said = given.get("action"), given.get("content") or {}
        if action not in ("accept", "decline"):
            continue
        reason = said.get("reason") if isinstance(said.get("reason"), str) else None
        asked = {"id": pending[key], "approve": action == "accept" and said.get("confirm") is True, "reason": reason}
        caller.layer.call("approval.answer", asked)


def cancel(caller: Caller, task: str) -> None:
    """End what a task does, if it still does something: its box is killed, so it fails, and what it would have changed is not.

    Of a command in a box that somebody holds, the command is killed.
    """
    row = own(caller, number_of(task))
    if row["status"] != "running":
        return
    if row["kind"] == "verb" and row["verb"] == "box.run":
        given = row["arguments"] or {}
        if "tag" not in given:  # they were too long to keep
            raise Conflict("this command can't be ended by itself", hint="end its box, with box_destroy")
        box = held.mine(caller.layer, caller.principal, given["box"], False)
        for _ in range(WAKING * 4):
            with contextlib.suppress(NotFound):  # it has not begun yet, or has ended meanwhile
                return Sandbox.connect(box["id"]).signal(signal.SIGKILL, tag=given["tag"], tree=True)
            if own(caller, row["id"])["status"] != "running":
                return
            time.sleep(0.25)
        raise Conflict("this command has not begun: its box is not awake", hint="ask again")
    try:
        agents.find(caller.layer, row["id"])
        caller.layer.call("agent.stop", {"agent": str(row["id"])})
        return
    except (NotFound, Conflict):
        pass
    for box in Sandbox.list(labels={"layer": caller.layer.id, "execution": str(row["id"])}):
        box.kill()


def missing() -> MCPError:
    """What a client is told that asks about tasks without having said that it knows them."""
    return MCPError(
        code=-32021, message="Missing required client capability", data={"requiredCapabilities": {"extensions": {EXTENSION: {}}}}
    )  # fmt: skip


def known(capabilities: types.ClientCapabilities | None) -> bool:
    """Whether a client takes a task for an answer."""
    return capabilities is not None and EXTENSION in (capabilities.extensions or {})
