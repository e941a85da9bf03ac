"""Replay: what an execution did, for people; the same again in a fresh box, compared step by step; another course from one of its steps on."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

from .. import errors
from ..errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound, Unavailable
from ..substrate.ledger import Execution, Tx, now
from ..substrate.reads import clock
from ..substrate.schema import OWNER
from . import functions, usage
from . import secrets as vault
from .blueprints import row_by_id
from .boxes import Program
from .executions import STEPS, Run, _Given, _insert, _Raw, asked_for, digest
from .functions import HARNESSED, Asking, Function
from .signature import dumps
from .verbs import Call, Object, verb

# What must be the same again, by the kind of step. Times, ids of boxes and what was used never are.
ESSENTIAL = {
    "query": ("sql", "projection", "params", "rows", "digest"),
    "mutation": ("do", "entity", "id", "fields", "digest"),
    "call": ("function", "asked", "digest"),
    "secret": ("name", "use"),
    "emit": ("name", "data"),
    "artifact": ("name", "bytes", "digest"),
    "refusal": ("do", "asked", "code"),
    "network": ("protocol", "method", "host", "port", "path", "status", "verdict"),
    "file": ("path", "kind", "type", "size", "digest"),
    "output": ("stream", "bytes", "digest", "truncated"),
    "command": ("exit_code", "reason"),
    "return": ("digest",),
    "tape": ("wall", "steady", "cpu"),
}
ASKED = ("query", "mutation", "call", "secret", "emit", "artifact", "refusal")  # what comes through the channel
UNJUDGED = ("me", "return", "openapi.json")  # requests that are no steps
AT_ONCE = 64  # steps that may have come in another order
RECORDED = ("http", "https", "h2")  # of the network; names are looked up anew, anything else can't be recorded
KINDS = {kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LayerError)}


@dataclass(frozen=True)
class Step:
    """One recorded act."""

    n: int
    kind: str
    detail: Mapping[str, Any]
    at: datetime

    def essence(self) -> dict[str, Any]:
        """What must be the same again."""
        return {key: self.detail[key] for key in ESSENTIAL.get(self.kind, ()) if self.detail.get(key) is not None}


@dataclass(frozen=True)
class Record:
    """An execution as it was recorded: its row, and what it did."""

    row: Mapping[str, Any]
    steps: tuple[Step, ...]
    principal: int = 0
    function: int | None = None

    @property
    def id(self) -> int:
        return int(self.row["id"])

    def of(self, *kinds: str) -> Iterator[Step]:
        """The steps of these kinds."""
        return (step for step in self.steps if step.kind in kinds)

    def detail(self, kind: str, key: str) -> Any:
        """What the first step of a kind that has such a detail says."""
        return next((step.detail[key] for step in self.of(kind) if key in step.detail), None)

    def json(self) -> dict[str, Any]:
        """The record in JSON's types."""
        steps = [{"n": s.n, "kind": s.kind, "detail": s.detail, "at": s.at} for s in self.steps]
        plain: dict[str, Any] = json.loads(dumps({"execution": dict(self.row), "steps": steps}))
        return plain

    def lines(self) -> list[str]:
        """The record for people."""
        row = self.row
        what = row["function"] or row["verb"] or row["kind"]
        given = ", ".join(f"{key}={_short(value)}" for key, value in (row["arguments"] or {}).items())
        found = [f"execution {self.id}: {what}({given}) by {row['principal']}, {row['status']}"]
        known = {
            "version": row["version"], "branch": row["branch"], "state": row["state"] and f"tx {row['state']}", "clock": self.detail("box", "clock"),
            "seed": row["seed"], "base": self.detail("command", "base"), "trace": row["trace"], "parent": row["parent"],
        }  # fmt: skip
        found += [f"  {key:8} {value}" for key, value in known.items() if value is not None]
        start = self.steps[0].at if self.steps else None
        for step in self.steps:
            since = 0.0 if start is None else (step.at - start).total_seconds() * 1000
            if step.kind in SPOKEN:
                found += spoken(step, since)
                continue
            detail = dict(step.detail)
            took = detail.pop("ms", None)
            shown = ESSENTIAL.get(step.kind, ())
            rest = {key: value for key, value in detail.items() if key in shown and value is not None} or detail
            words = [f"{key}={_short(value)}" for key, value in rest.items() if key not in ("sql", "digest")]
            told = " ".join((*filter(None, (rest.get("sql"),)), *words))
            found.append(f"{step.n:5} {since:9.2f} ms  {step.kind:9} {told}" + (f"  ({took} ms)" if took else ""))
        outcome = row["result"] or {}
        if "error" in outcome:
            found.append(f"  {row['status']}: {outcome['error'].get('message')}")
        elif "value" in outcome:
            found.append(f"  gave {_short(outcome['value'], 400)}")
        return found


SPOKEN = ("model", "tool", "output", "answer")  # of an agent; people read what was said
INDENT = " " * 30


def spoken(step: Step, since: float) -> list[str]:
    """A part of a conversation in lines: who said what, to whom."""
    detail, took = step.detail, f"  ({step.detail['ms']} ms)" if step.detail.get("ms") else ""
    said: list[tuple[str, str]] = []
    if step.kind == "model":
        money = f", {detail['money']:g} money" if detail.get("money") else ""
        about = "" if not detail.get("estimated") else ", estimated"
        head = (
            f"{detail.get('model') or detail['api']}: {detail['input']} tokens in, {detail['output']} out{about}{money}"
        )
        head += f", {detail['stop']}" if detail.get("stop") else f", status {detail.get('status')}"
        said = [("«", detail.get("prompt") or ""), ("»", detail.get("answer") or ""), ("✗", detail.get("error") or "")]
        said += [
            ("→", f"{call.get('name')} {_short(call.get('arguments', '…'), 400)}") for call in detail.get("calls") or ()
        ]
    elif step.kind == "tool":
        head = f"{detail['name']} ({detail.get('where')}) {_short(detail.get('arguments', '…'), 200)}"
        said = [("✗" if detail.get("error") else "←", _short(detail.get("result", "…"), 1000))]
    elif step.kind == "answer":
        head = _short(detail.get("value", detail.get("error")), 1000)
    else:
        head = f"{detail.get('stream')}, {detail.get('bytes') or detail.get('lost')} bytes"
        said = [("│", detail.get("text") or "…")]
    first, *rest = head.splitlines() or [""]
    lines = [f"{step.n:5} {since:9.2f} ms  {step.kind:9} {first}{took}", *(f"{INDENT}{line}" for line in rest)]
    for mark, text in said:
        lines += [f"{INDENT}{mark if n == 0 else ' '} {line}" for n, line in enumerate(text.splitlines())]
    return lines


@dataclass(frozen=True)
class Difference:
    """Where a run left the record: at a step of it, or (n is None) with something that is not in it."""

    n: int | None
    kind: str
    expected: Mapping[str, Any] | None
    got: Mapping[str, Any] | None
    note: str | None = None

    def plain(self) -> dict[str, Any]:
        return {"n": self.n, "kind": self.kind, "expected": self.expected, "got": self.got, "note": self.note}

    def __str__(self) -> str:
        where = f"step {self.n} ({self.kind})" if self.n is not None else f"{self.kind} that is not in the record"
        if self.expected is None or self.got is None:
            told = "it did not come again" if self.got is None and self.expected is not None else _short(self.got, 400)
        else:
            told = f"expected {_short(self.expected, 400)}, got {_short(self.got, 400)}"
        return f"{where}: {told}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Verdict:
    """What came of running an execution again. Only `reproduced` says that every step and the result were the same."""

    execution: int
    status: str  # reproduced, differs, not deterministic
    verification: int | None = None  # the execution that found out
    difference: Difference | None = None
    reasons: tuple[str, ...] = ()  # what can't be had again, whatever this run gave
    notes: tuple[str, ...] = ()
    steps: int = 0  # that were compared

    def __bool__(self) -> bool:
        return self.status == "reproduced"

    def plain(self) -> dict[str, Any]:
        """The verdict in JSON's types."""
        return {
            "execution": self.execution, "status": self.status, "verification": self.verification,
            "difference": None if self.difference is None else self.difference.plain(), "reasons": list(self.reasons),
            "notes": list(self.notes), "steps": self.steps,
        }  # fmt: skip

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Verdict:
        found = plain["difference"] and Difference(**plain["difference"])
        return Verdict(
            plain["execution"], plain["status"], plain["verification"], found, tuple(plain["reasons"]), tuple(plain["notes"]), plain["steps"]
        )  # fmt: skip

    def __str__(self) -> str:
        if self.status == "reproduced":
            text = f"reproduced: {self.steps} steps and the result are the same"
        elif self.status == "differs":
            text = (
                f"differs at {self.difference}"
                if self.difference and self.difference.n
                else f"differs: {self.difference}"
            )
            text += "".join(f"; not deterministic: {reason}" for reason in self.reasons)
        else:
            text = f"not deterministic: {'; '.join(self.reasons)}"
        return text + "".join(f"; {note}" for note in self.notes)


def replay(layer: Any, execution: int, principal: str | None = None) -> Record:
    """The record of an execution, as far as a principal may read it; NotFound when it may not."""
    return read_record(lambda sql: layer.query(sql, {"e": execution}, principal=principal), execution)


def verify(layer: Any, execution: int, principal: str | None = None) -> Verdict:
    """Run an execution again and compare; itself an execution."""
    return Verdict.of(layer.call("execution.verify", {"execution": execution}, principal=principal))


def fork_at(
    layer: Any,
    execution: int,
    n: int,
    branch: str,
    code: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    principal: str | None = None,
) -> dict[str, Any]:
    """Another course of an execution from its step `n` on, with other code or arguments, on a new branch."""
    given = {"execution": execution, "at": n, "name": branch, "code": code, "arguments": arguments}
    found: dict[str, Any] = layer.call("execution.fork", given, principal=principal)
    return found


def read_record(query: Callable[[str], list[dict[str, Any]]], number: int) -> Record:
    rows = query("select * from execution where id = :e")
    if not rows:
        raise NotFound(f"there is no execution {number}", hint="select id, function, status from execution")
    steps = query("select n, kind, detail, at from step where execution = :e order by n")
    return Record(rows[0], tuple(Step(s["n"], s["kind"], s["detail"] or {}, s["at"]) for s in steps))


def _whole(layer: Any, number: int, principal: int) -> Record:
    """The record to run an execution of a function again by, for whoever ran it and for owners: it is answered with their rights."""
    with layer.engine.reading() as session:
        at = layer.engine.schema_prefix
        row = session.one(
            f"select x.principal, c.function from {at}ledger_execution x left join {at}ledger_call c on c.execution = x.id where x.id = ?",
            (number,),
        )
        policy = layer.catalog.policy(session, principal, clock(layer.engine, session)[1])
    if row is None or (row[0] != principal and not policy.sovereign()):
        raise NotFound(f"there is no execution {number} that you may run again", hint="only who ran it and owners may")
    record = read_record(
        lambda sql: layer.reads.query(sql, {"e": number}, "main", None, OWNER, None, None, True), number
    )
    if row[1] is None or record.row["kind"] != "function":
        what = record.row["verb"] or record.row["kind"]
        raise Invalid(f"execution {number} is no function but {what}: its record is all there is of it")
    if record.row["status"] in ("running", "queued", "lost"):
        raise Invalid(f"execution {number} is {record.row['status']}: there is no whole record to go by")
    return Record(record.row, record.steps, row[0], row[1])


class Differs(LayerError):
    """A replay has left its record."""

    code, status, exit_code = "differs", 409, 5


class Again(Run):
    """A run that is answered from a record, and compared with it; with `until`, only up to that step, and then in earnest."""

    def __init__(
        self, layer: Any, execution: Execution, record: Record, function: Function, branch: str, until: int | None = None
    ) -> None:  # fmt: skip
        super().__init__(layer, execution, **functions.capability(function, branch))
        self.record, self.function, self.until = record, function, until
        self.before_fork = str(record.row["branch"])
        self.difference: Difference | None = None
        self.gone: str | None = None  # why an answer can't be had again
        self.expected = deque(
            step for step in record.of(*ASKED) if step.kind != "secret" or step.detail.get("use") == "read"
        )

    @property
    def deciding(self) -> int:
        if self.live:
            return super().deciding
        return self.function.definer if self.function.rights == "definer" else self.record.principal

    @property
    def live(self) -> bool:
        """Whether the record is left behind on purpose."""
        return self.until is not None and (not self.expected or self.expected[0].n >= self.until)

    def answer(self, method: str, name: str, rest: str, given: Mapping[str, Any], body: bytes) -> Any:
        if self.difference is not None or self.gone is not None:
            raise Differs(f"this replay is over: {self.difference or self.gone}")
        if name in UNJUDGED or self.live or not self.open:
            return super().answer(method, name, rest, given, body)
        before, start = len(self.steps), time.perf_counter()
        answer = self._again(_Given(name, given, rest, body), dict(given))
        if len(self.steps) > before:
            self.steps[before][1]["ms"] = round((time.perf_counter() - start) * 1000, 2)
        return answer

    def _again(self, given: _Given, plain: dict[str, Any]) -> Any:
        act = getattr(self, f"_again_{given.name}", None) if given.name.isidentifier() else None
        if self.expected and self.expected[0].kind == "refusal":
            said = self.expected[0].detail
            self._same("refusal", {**said, "do": given.name, "asked": asked_for(plain, given.body)})
            error = KINDS.get(said["code"], LayerError)(said["message"], said.get("hint"), rows=said.get("rows"))
            if isinstance(error, Conflict) and self.draft.first_read is not None:
                self.conflicted = True
            raise error
        if act is None:
            self._differ(given.name, plain)
        return act(given)  # type: ignore[misc]

    def _same(self, kind: str, detail: dict[str, Any]) -> Step:
        """The next step of the record, if this is it; it counts as done then."""
        got = Step(0, kind, json.loads(dumps(detail)), datetime.min).essence()
        if not self.expected:
            self._differ(kind, got)
        step = self.expected[0]
        want = step.essence()
        if step.kind != kind:
            self._differ(kind, {"kind": kind, **got}, {"kind": step.kind, **want})
        if want != got:
            keys = [key for key in ESSENTIAL[kind] if want.get(key) != got.get(key)]
            self._differ(kind, {key: got.get(key) for key in keys}, {key: want.get(key) for key in keys})
        self.expected.popleft()
        self.step(kind, **{key: value for key, value in step.detail.items() if key != "ms"})
        return step

    def _differ(
        self, kind: str, got: Mapping[str, Any], want: Mapping[str, Any] | None = None, note: str | None = None
    ) -> None:
        step = self.expected[0] if self.expected else None
        if step is None:
            self.difference = Difference(None, kind, None, got, note)
        else:
            self.difference = Difference(step.n, step.kind, step.essence() if want is None else want, got, note)
        raise Differs(f"this run has left the record: {self.difference}")

    def _lost(self, reason: str) -> None:
        self.gone = reason
        raise Differs(f"this run can't go on: {reason}")

    def _kept(self, step: Step) -> bytes:
        """An answer that the record holds."""
        if "answer" in step.detail:
            return str(step.detail["answer"]).encode()
        data = content(self.layer, step.detail.get("content"))
        if data is None:
            self._lost(f"the answer of step {step.n} is not kept")
        return data or b""

    # What the box asks, answered from the record

    def _again_query(self, given: _Given) -> Any:
        sql, params = given.text("sql"), given.get("params")
        self._pull("query", {"sql": sql, "params": params})
        want = self.expected[0].detail if self.expected and self.expected[0].kind == "query" else {}
        known = {key: want.get(key) for key in ("rows", "digest")}
        tx, first = want.get("tx"), self.draft.first_read
        if (sql, params) == (want.get("sql"), want.get("params")) and not want.keys() & {"answer", "content"}:
            data = self._past(sql, params, int(want["tx"]))
            self._same("query", {"sql": sql, "params": params, **known})
        else:
            data = self._kept(self._same("query", {"sql": sql, "params": params, **known}))
        if first is None:
            self.draft.first_read = tx
        return _Raw(b'{"rows":' + data + b',"tx":' + str(tx or "null").encode() + b"}")

    def _pull(self, kind: str, asked: Mapping[str, Any], row: tuple[str, int] | None = None) -> None:
        """Questions, and changes of different rows, that were asked at once come in any order: this one is next."""
        for place, step in enumerate(islice(self.expected, AT_ONCE)):
            if step.kind != kind:
                return
            if all(step.detail.get(key) == value for key, value in asked.items()):
                del self.expected[place]
                return self.expected.appendleft(step)
            if row is not None and row == (step.detail.get("entity"), step.detail.get("id")):
                return

    def _past(self, sql: str, params: Any, tx: int) -> bytes:
        """Rows as they were at a step's tx."""
        step = self.expected[0]
        try:
            rows, _ = self.layer.reads.query_at(
                sql,
                params,
                self.before_fork,
                tx,
                self.deciding,
                None,
                self.layer.settings.query_rows,
                narrow=self.reads,
            )
        except LayerError as error:
            self._lost(f"step {step.n} reads what can't be read any more: {error.message}")
            raise
        data = dumps(rows)
        if digest(data) != step.detail.get("digest"):
            note = f"asked as of tx {tx} again: permissions have changed since, or the statement gives something else each time"
            self._differ(
                "query",
                {"rows": len(rows), "digest": digest(data)},
                {key: step.detail.get(key) for key in ("rows", "digest")},
                note,
            )
        return data

    def _again_projection(self, given: _Given) -> Any:
        name, arguments = given.rest or given.text("name"), given.get("arguments") or {}
        want = self.expected[0].detail if self.expected else {}
        known = {key: want.get(key) for key in ("rows", "digest")}
        step = self._same("query", {"projection": name, "params": arguments, **known})
        if self.draft.first_read is None:
            self.draft.first_read = step.detail["tx"]
        return _Raw(b'{"rows":' + self._kept(step) + b',"tx":' + str(step.detail["tx"]).encode() + b"}")

    def _again_insert(self, given: _Given) -> Any:
        entity, values = given.text("entity"), given.get("values")
        ids = []
        for row in values if isinstance(values, list) else [values]:
            number = self._mutation("insert", entity, None, row)
            ids.append(number)
            self._also(partial(_insert, entity, row, number))
        return {"ids": ids} if isinstance(values, list) else {"id": ids[0]}

    def _again_update(self, given: _Given) -> Any:
        entity, number, expect = given.text("entity"), given.number("id"), given.optional_number("expect")
        values = given.get("values")
        self._mutation("update", entity, number, values)
        self._also(lambda tx: tx.update(entity, number, values, expect, self.draft.first_read))
        return {"ok": True}

    def _again_delete(self, given: _Given) -> Any:
        entity, number, expect = given.text("entity"), given.number("id"), given.optional_number("expect")
        self._mutation("delete", entity, number, None)
        self._also(lambda tx: tx.delete(entity, number, expect, self.draft.first_read))
        return {"ok": True}

    def _again_upsert(self, given: _Given) -> Any:
        entity, values, on = given.text("entity"), given.get("values"), given.get("on")
        number = self._mutation("upsert", entity, None, values)
        self._also(lambda tx: tx.upsert(entity, values, on, number=number))
        return {"id": number}

    def _mutation(self, do: str, entity: str, number: int | None, values: Any) -> Any:
        """Compare a change; ids of new rows are those of the record."""
        known = {"do": do, "entity": entity, "digest": digest(dumps(values))}
        if number is None:
            self._pull("mutation", known)
            number = self.expected[0].detail.get("id") if self.expected else None
        else:
            self._pull("mutation", {**known, "id": number}, (entity, number))
        fields = sorted(values or ()) if isinstance(values, Mapping | None) else []
        return self._same("mutation", {**known, "id": number, "fields": fields}).detail.get("id")

    def _also(self, change: Callable[[Tx], Any]) -> None:
        """What was done before the fork is done there, too."""
        if self.until is not None:
            self.draft.changes.append(change)

    def _again_call(self, given: _Given) -> Any:
        name, arguments = given.text("function"), given.get("arguments") or {}
        want = self.expected[0].detail if self.expected else {}
        told = {"function": name, "asked": digest(dumps(arguments)), "digest": want.get("digest")}
        return _Raw(b'{"result":' + self._kept(self._same("call", told)) + b"}")

    def _again_secret(self, given: _Given) -> Any:
        name, deciding = given.text("name"), self.deciding
        self._same("secret", {"name": name, "use": "read"})
        try:
            opened = vault.readable(
                self.layer, name, self.execution, self.readable, principal=deciding, branch=self.before_fork, as_of=self.record.row["state"],
            )  # fmt: skip
        except LayerError as error:
            self._lost(f"secret {name} can't be had as it was: {error.message}")
            raise
        self.read |= opened
        return {"value": opened[name]}

    def _again_emit(self, given: _Given) -> Any:
        self._same("emit", {"name": given.text("name"), "data": given.get("data")})
        return {"ok": True}

    def _again_artifact(self, given: _Given) -> Any:
        name, found = given.rest or given.text("name"), digest(given.body)
        self._same("artifact", {"name": name, "digest": found, "bytes": len(given.body)})
        return {"digest": found, "bytes": len(given.body)}

    def _on_me(self, given: _Given) -> Any:
        row = self.record.row
        then = {"execution": row["id"], "principal": row["principal"], "branch": row["branch"], "trace": row["trace"]}
        return super()._on_me(given) | {"scope": dict(self.function.writes)} | ({} if self.until is not None else then)


def content(layer: Any, named: str | None) -> bytes | None:
    """What is stored under a digest of a step, if it is what was stored."""
    found: bytes | None = None if named is None else layer.engine.get_blob(named)
    return found if found is not None and digest(found) == named else None


def tape_of(layer: Any, record: Record) -> dict[str, Any] | None:
    """The readings of clocks of an execution; None when they are not kept."""
    for step in record.of("tape"):
        if step.detail.get("missing"):
            return None
        if "digest" in step.detail:
            data = content(layer, step.detail.get("content"))
            found = step.detail.get("values") if data is None else json.loads(data)
            return found if _is_tape(found) else None
    return {}


def _is_tape(given: Any) -> bool:
    """What a box calls its tape may be anything."""
    return isinstance(given, dict) and all(
        isinstance(given.get(kind, []), list) for kind in (*ESSENTIAL["tape"], "untamed")
    )


def uncontrolled(layer: Any, record: Record, function: Function) -> list[str]:
    """What of an execution can't be had again for sure, each in words; none: it is deterministic as far as can be told."""
    found = []
    seeded = function.language in HARNESSED and record.row["seed"] is not None
    if limit := record.detail("command", "reason"):
        found.append(f"it was ended by a limit ({limit}), which depends on the machine")
    if function.language == "executable":
        found.append("an executable's clocks and chance are the machine's")
    elif function.language in HARNESSED and not seeded:
        found.append("it is declared not to be: its clocks and chance are the machine's")
    if seeded:
        tape = tape_of(layer, record)
        if tape is None:
            found.append("it ended without telling which times it had read")
        elif tape.get("overflow"):
            found.append("it read its clocks more often than is kept")
        elif tape.get("untamed"):
            found.append(f"these clocks could not be replaced: {', '.join(map(str, tape['untamed']))}")
        if record.detail("box", "clock") is None:
            found.append("the clock that it started with is not recorded")
    if len(record.steps) >= STEPS:
        found.append(f"it took more than {STEPS} steps")
    found += _of_network(layer, record)
    found += [
        f"{step.detail['path']} is too large to compare"
        for step in record.of("file")
        if step.detail.get("type") == "file" and step.detail["kind"] != "removed" and not step.detail.get("digest")
    ]
    return found


def _of_network(layer: Any, record: Record) -> list[str]:
    found = []
    for step in record.of("network"):
        event = step.detail
        if event.get("verdict") != "allow" or event.get("protocol") == "dns":
            continue
        to = f"{event.get('method') or event.get('protocol')} {event.get('host')}{event.get('path') or ''}"
        if event.get("protocol") not in RECORDED or event.get("method") is None:
            found.append(f"step {step.n} ({to}) is a connection that is not recorded")
        elif event.get("status") is None or (event["status"] >= 500 and event.get("reason")):
            found.append(f"step {step.n} ({to}) got no whole answer: {event.get('reason')}")
    if (lost := _lost(layer, record)) is not None:
        found.append(lost)
    return found


def _lost(layer: Any, record: Record) -> str | None:
    for step in record.of("tape"):
        if "network" in step.detail and content(layer, step.detail["network"]) is None:
            reason = step.detail.get("reason") or "the recording is gone or damaged"
            return f"what came from the network is not kept: {reason}"
    return None


@contextmanager
def _recording(layer: Any, record: Record, until: int | None = None) -> Iterator[str]:
    """A file with the responses that an execution got; up to a step, those that were asked for before it."""
    data = content(layer, record.detail("tape", "network")) or b""
    if until is not None:
        most = sum(
            step.n < until and step.detail.get("protocol") in RECORDED and step.detail.get("verdict") == "allow"
            for step in record.of("network")
        )
        data = b"".join(line for line in data.splitlines(keepends=True) if _order(line) <= most)
    with tempfile.NamedTemporaryFile(prefix="layer-replay-") as file:
        file.write(data)
        file.flush()
        yield file.name


def _order(line: bytes) -> int:
    """The place of an exchange in the order in which requests began."""
    return int(json.loads(line)["id"].partition("-")[2])


def _adjusted(program: Program, layer: Any, record: Record, recording: str) -> None:
    """The same clock, chance and network."""
    row = record.row
    if program.given is not None and row["seed"] is not None:
        program.given |= {"seed": row["seed"], "clock": record.detail("box", "clock")}
        program.given["tape"] = tape_of(layer, record) or {}
    program.env["TRACEPARENT"] = row["trace"] or ""
    if program.blueprint.egress:
        program.replay = recording
    program.fresh = True


@dataclass
class _Ran:
    value: Any
    error: LayerError | None
    ended: Any
    seconds: float
    notes: list[str] = field(default_factory=list)


def _run(layer: Any, run: Again, bound: Mapping[str, Any], recording: str) -> _Ran:
    def adjust(program: Program) -> None:
        _adjusted(program, layer, run.record, recording)
        program.recorded = run.until is not None

    begun = time.monotonic()
    moment = run.record.row["state"] if run.until is None else None
    value, error, ended = functions.act(layer, run, run.function, bound, adjust, moment)
    return _Ran(value, error, ended, time.monotonic() - begun)


@verb("execution.verify", brief=False)
def _verify(call: Call, *, execution: int) -> Any:
    """Run an execution of a function again in a fresh box and compare each step: reproduced, or where it differs."""
    layer, made = call.layer, call.execution
    record = _whole(layer, execution, call.asking.principal)
    made.kind, made.parent = "replay", record.id
    row = record.row
    try:
        function = functions.as_it_was(layer, int(record.function or 0), row["version"], row["branch"], row["state"])
    except LayerError as error:
        reasons = (f"its code can't be had as it was: {error.message}",)
        return Verdict(record.id, "not deterministic", None, None, reasons).plain()
    if record.detail("command", "reason") or _lost(layer, record):  # running it would tell nothing
        return Verdict(record.id, "not deterministic", None, None, tuple(uncontrolled(layer, record, function))).plain()
    usage.admit(layer, call.asking.principal, call.asking.contract)
    layer.ledger.intend(made)
    run = Again(layer, made, record, function, str(row["branch"]))
    bound = function.signature.bind(function.name, row["arguments"] or {})
    with _recording(layer, record) as recording:
        ran = _run(layer, run, bound, recording)
    if isinstance(ran.error, Unavailable) or (ran.ended is None and isinstance(ran.error, LimitExceeded)):
        raise ran.error  # there was no box: nothing was found out
    verdict = judge(layer, run, ran).plain() | {"verification": made.id}
    if ran.error is None:
        run.steps.append(("return", {"digest": digest(dumps(ran.value))}, now()))
    facts = [*run.facts(), usage.fact(run, function, call.asking, ran.ended, ran.seconds)]
    layer.ledger.conclude(made, "done", {"value": verdict}, facts=facts)
    return verdict


def judge(layer: Any, run: Again, ran: _Ran) -> Verdict:
    """Compare what a run did, and what came of it, with the record."""
    record = run.record
    reasons = uncontrolled(layer, record, run.function)
    difference = None
    stopped = run.gone or _stopped(run, ran)
    if stopped is not None:
        reasons.insert(0, stopped)
    else:
        found = [*filter(None, (run.difference, *_rest(run)))]
        if not found:
            found = [*_after(layer, run, ran)]
        difference = min(found, key=lambda one: one.n or 1 << 62) if found else None
    then, base = record.detail("command", "base"), ran.ended.base if ran.ended is not None else None
    notes = ["the base of its box has changed since"] if then and base and then != base else []
    status = "differs" if difference else "not deterministic" if reasons else "reproduced"
    if status == "not deterministic" and stopped is None:
        notes.append("what could be compared was the same")
    return Verdict(record.id, status, None, difference, tuple(reasons), tuple(notes), len(record.steps))


def _stopped(run: Again, ran: _Ran) -> str | None:
    """Why there is nothing to compare: it could not be started as it was, or was ended by a limit."""
    if run.difference is not None:
        return None
    if ran.ended is None and ran.error is not None and next(run.record.of("box"), None) is not None:
        return f"it can't be started as it was: {ran.error.message}"
    if ran.ended is not None and ran.ended.reason:
        return f"run again it was ended by a limit ({ran.ended.reason})"
    return None


def _rest(run: Again) -> Iterator[Difference]:
    """Steps that did not come, and requests to the network that were not those of the record."""
    got = [Step(0, kind, detail, datetime.min) for kind, detail, _ in run.steps if kind == "network"]
    left = Counter(_key(step) for step in got if step.detail.get("protocol") != "dns")
    for step in run.record.of("network"):
        if step.detail.get("protocol") != "dns":
            if not left[_key(step)]:
                near = next((other for other in got if left[_key(other)] and _near(other, step)), None)
                yield Difference(step.n, "network", step.essence(), None if near is None else near.essence())
                return
            left[_key(step)] -= 1
    if run.difference is None and run.expected:
        yield Difference(run.expected[0].n, run.expected[0].kind, run.expected[0].essence(), None)
    for step in got:
        if run.difference is None and left[_key(step)]:
            yield Difference(None, "network", None, step.essence())
            return


def _key(step: Step) -> bytes:
    return dumps(step.essence())


def _near(one: Step, other: Step) -> bool:
    return all(one.detail.get(key) == other.detail.get(key) for key in ("method", "host", "path"))


def _after(layer: Any, run: Again, ran: _Ran) -> Iterator[Difference]:
    """What is known at the end: files, output, how it ended, what it gave, which times it read."""
    record = run.record
    for kind, name in (("file", "path"), ("output", "stream")):
        got = {detail[name]: Step(0, kind, detail, datetime.min) for which, detail, _ in run.steps if which == kind}
        for step in record.of(kind):
            again = got.pop(step.detail[name], None)
            if again is None or again.essence() != step.essence():
                yield Difference(step.n, kind, step.essence(), None if again is None else again.essence())
        for again in got.values():
            yield Difference(None, kind, None, again.essence())
    ended = next((detail for which, detail, _ in run.steps if which == "command"), None)
    for step in record.of("command"):
        again = Step(0, "command", ended or {}, datetime.min)
        if again.essence() != step.essence():
            yield Difference(step.n, "command", step.essence(), again.essence())
    told = None if ran.error is None else {"code": ran.error.code, "message": ran.error.message}
    gave = next(record.of("return"), None)
    if gave is not None:
        found = {"digest": digest(dumps(ran.value))} if told is None else told
        if found != gave.essence():
            shown = {"value": ran.value} if told is None else found
            yield Difference(gave.n, "return", {"value": (record.row["result"] or {}).get("value")}, shown)
    else:
        error = (record.row["result"] or {}).get("error") or {}
        want = {"code": error.get("code"), "message": error.get("message")}
        if want != told:
            n = record.steps[-1].n if record.steps else None
            yield Difference(n, "outcome", want, {"value": ran.value} if told is None else told)
    tape = tape_of(layer, record)
    if record.row["seed"] is not None and tape is not None and (run.tape or {}) != tape:
        n = next((step.n for step in record.of("tape") if "digest" in step.detail), record.steps[-1].n)
        now_read = run.tape if _is_tape(run.tape) else {}
        counts = [{kind: len(one.get(kind, ())) for kind in ESSENTIAL["tape"]} for one in (tape, now_read)]
        yield Difference(n, "tape", counts[0], counts[1], "readings of its clocks")


@verb("execution.fork", brief=False)
def _fork(
    call: Call, *, execution: int, at: int, name: str, code: str | None = None, arguments: Object | None = None
) -> Any:
    """Another course of an execution from a step on, with other code or arguments, on a new branch of the state of that step."""
    layer, asking, branch = call.layer, call.asking, name
    record = _whole(layer, execution, asking.principal)
    row = record.row
    if not 1 <= at <= len(record.steps) + 1:
        raise Invalid(
            f"execution {execution} has steps 1 to {len(record.steps)}, not {at}", hint=f"layer replay {execution}"
        )
    number = int(record.function or 0)
    function = functions.as_it_was(layer, number, row["version"], row["branch"], row["state"])
    bound = function.signature.bind(function.name, (row["arguments"] or {}) | (arguments or {}))
    if code is not None:
        _may_see(layer, record, function, at, asking.principal)
        functions.check(layer, row_by_id(layer, "function", number, row["branch"], row["version"]) | {"code": code})
    reason = call.reason or f"execution {record.id} from step {at} on"
    own = Asking(asking.principal, branch, record.id, contract=asking.contract, reason=reason, runner=asking.runner)
    permissions = functions.decide(layer, own, function)
    call.execution.parent = record.id
    seen = [int(step.detail["tx"]) for step in record.of("query", "call") if step.n < at and step.detail.get("tx")]
    layer.fork(branch, row["branch"], as_of=max([row["state"], *seen]), reason=reason)
    if code is not None:
        layer.update("function", number, {"code": code}, branch=branch, reason=reason)
        function = functions.by_id(layer, number, None, branch)
    usage.admit(layer, own.principal, own.contract)
    made = functions.intent(layer, function, bound, own, permissions)
    made.call = {**(made.call or {}), "seed": row["seed"]}
    layer.ledger.intend(made)
    run = Again(layer, made, record, function, branch, until=at)
    with _recording(layer, record, at) as recording:
        ran = _run(layer, run, bound, recording)
    left = run.difference or (Difference(None, "answer", None, {"reason": run.gone}) if run.gone else None)
    if left is not None:
        ran.error = Differs(f"before step {at} it left the record of execution {record.id}: {left}")
    outcome = functions.settle(layer, run, function, own, ran.value, ran.error, ran.ended, ran.seconds, None)
    if left is not None:
        layer.discard(branch, reason=f"execution {made.id} left its record")
    error = outcome.error and {"code": outcome.error.code, "message": outcome.error.message}
    return {
        "execution": made.id, "branch": None if left else branch, "status": outcome.status, "value": outcome.value, "error": error,
        "difference": None if left is None else left.plain(),
    }  # fmt: skip


def _may_see(layer: Any, record: Record, function: Function, at: int, principal: int) -> None:
    """Code of somebody else's gets no answers that were given with the definer's rights."""
    if function.rights != "definer" or principal == function.definer or not any(s.n < at for s in record.of(*ASKED)):
        return
    with layer.engine.reading() as session:
        if not layer.catalog.policy(session, principal, clock(layer.engine, session)[1]).sovereign():
            raise Denied(
                f"what {function.name} was told before step {at} it was told with the rights of its definer",
                hint="fork at step 1, or leave its code as it is",
                action="call",
                resource=f"function:{function.name}",
            )


def _short(value: Any, most: int = 80) -> str:
    text = value if isinstance(value, str) else dumps(value).decode()
    return text if len(text) <= most else text[: most - 1] + "…"


__all__ = ["Difference", "Record", "Verdict", "fork_at", "replay", "verify"]
