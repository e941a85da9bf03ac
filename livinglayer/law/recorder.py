"""Recorder: what held boxes do, written down as steps of their executions. One for all of them: boxes that do nothing cost nothing."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..errors import Conflict, Denied, LayerError, LimitExceeded, NotFound
from ..sandbox.client import blocking_client, host_runs, run_blocking
from ..sandbox.sandbox import Sandbox
from ..substrate.ledger import Execution, now
from ..substrate.values import datetime_text
from . import held, models
from .executions import STEPS, Run
from .kept import KINDS, LARGE
from .signature import dumps

if TYPE_CHECKING:
    from .tending import Tending

SWEEP = 10.0  # seconds between two looks for executions whose box is gone
YOUNG = 30.0  # an execution without a box that is younger is being made
log = logging.getLogger("livinglayer")


@dataclass
class Line:
    """One box that is written down."""

    id: str
    execution: Execution
    run: Run
    began: datetime
    seen: float  # when the last thing happened that is recorded
    offset: int = 0  # in its trace
    ended: dict[str, Any] | None = None  # what its host said last of it
    why: str = ""
    used: dict[str, float] = field(default_factory=dict)


class Recorder:
    """All held boxes of a layer on this machine, for the one process that leads."""

    def __init__(self, tending: Tending) -> None:
        self.tending, self.layer = tending, tending.layer
        self.lines: dict[str, Line] = {}
        self._host, self._mark, self._swept = 0.0, 0, -1e9
        self._again: dict[str, dict[str, Any]] = {}  # boxes that are known before their execution knows them
        self._over: set[str] = set()  # boxes of executions that are over

    def turn(self) -> None:
        """Write down what is new."""
        if not self.tending.leads:
            self.lines.clear()
            self._host = 0.0
            return
        late = time.monotonic() - self._swept > SWEEP
        if not host_runs() and not (late and any(self._open())):
            return
        news = self._call(do="news", labels={"layer": self.layer.id}, host=self._host, since=self._mark)
        fresh, self._host, self._mark = news["host"] != self._host, news["host"], news["mark"]
        boxes = {**self._again, **{box["id"]: box for box in news["changed"]}}
        self._again = {}
        for box in boxes.values():
            if held.LABEL in box["labels"]:
                self._safely(self._look, box, fresh)
        for box in news["ended"]:
            if held.LABEL in box["labels"]:
                self._safely(self._gone, box["id"], held.told(box)["execution"])
        if late or fresh:
            self._swept = time.monotonic()
            self._sweep()

    def _safely(self, act: Any, *given: Any) -> None:
        """One of them is no reason to leave the others alone."""
        try:
            act(*given)
        except LayerError as error:
            log.warning("held box %s: %s", given[0] if isinstance(given[0], str) else given[0]["id"], error)
            self._host = 0.0  # the next turn looks at all of them again
        except Exception as error:
            log.exception("held box", exc_info=error)

    def _call(self, **request: Any) -> Any:
        return run_blocking(blocking_client().call(request))

    def _look(self, box: Mapping[str, Any], fresh: bool) -> None:
        line = self._line(box)
        if line is None:
            return
        told = held.told(box)
        if fresh and told.get("secrets") and not box["secrets"]:
            self._lend(box["id"], told)
        self._hear(line)
        self._write(line)

    def _line(self, box: Mapping[str, Any]) -> Line | None:
        """A box that is written down from now on; none for one of an execution that is over."""
        from .tending import was_made

        id, number = box["id"], held.told(box)["execution"]
        if id in self.lines or id in self._over:
            return self.lines.get(id)
        made = was_made(self.layer, number)
        if made is None:
            self._again[id] = dict(box)
        if made != id:  # it is being made, or forked
            return None
        return self._begin(id, number)

    def _begin(self, id: str, number: int) -> Line | None:
        try:
            execution = self.layer.ledger.resume(number)
        except (Conflict, NotFound):
            self._over.add(id)
            return None
        engine, at, seen = self.layer.engine, self.layer.engine.schema_prefix, 0.0
        run = Run(self.layer, execution, branch="main", atomic=False)
        with engine.reading() as session:
            rows = session.all(
                f"select x.n, {engine.portable('x.detail', 'json')} from {at}ledger_step x where x.execution = ? order by x.n desc limit 1000",
                (number,),
            )
            began = session.one(
                f"select {engine.portable('x.started', 'datetime')} from {at}ledger_execution x where x.id = ?",
                (number,),
            )
        assert began is not None
        for n, text in rows:
            run.before, seen = max(run.before, n), max(seen, json.loads(text).get("at") or 0.0)
        self.lines[id] = Line(id, execution, run, datetime.fromisoformat(began[0]), seen)
        return self.lines[id]

    def _lend(self, id: str, told: Mapping[str, Any]) -> None:
        """Its host has started again, and knows no secrets: say them once more, if they may still be used."""
        try:
            values = held.lent(self.layer, told["principal"], told["secrets"])
            Sandbox.connect(id).lend(dict(values))
        except LayerError as error:
            log.warning("secrets of box %s: %s", id, error)

    def _hear(self, line: Line) -> None:
        while True:
            more = self._call(do="trace.more", box=line.id, offset=line.offset, wait=0)
            line.offset = more["offset"]
            for event in more["events"]:
                self._note(line, event)
            if not more["events"]:
                return

    def _note(self, line: Line, event: dict[str, Any]) -> None:
        name, run = event["event"], line.run
        if name == "end":
            line.ended, line.used = event, event.get("used") or {}
        if name == "limit":
            line.why = str(event.get("limit"))
        if event["at"] <= line.seen or name == "usage":
            return
        line.seen = event["at"]
        if name == "network" and event.get("model"):
            event = models.step(run, line.id, event, 0.0)
            name = event["event"]
        count = run.before + len(run.steps)
        if count >= STEPS:
            return  # it may go on: what it did before is kept
        detail = event if len(dumps(event)) <= LARGE else {"at": event["at"], "event": name, "cut": str(event)[:LARGE]}
        if count == STEPS - 1:
            detail, name = {"at": event["at"], "event": "limit", "limit": "steps"}, "limit"
        at = datetime_text(datetime.fromtimestamp(event.get("began") or event["at"], UTC))
        run.steps.append((KINDS.get(name, "box"), detail, at))

    def _write(self, line: Line) -> None:
        run, first = line.run, line.run.flushed
        if len(run.steps) == first:
            return
        try:
            self.layer.ledger.note(line.execution, run.facts())
        except Denied:  # it is over
            self._drop(line)
            self._over.add(line.id)
        except LayerError:
            run.flushed = first
            raise
        run.before, run.flushed = run.before + len(run.steps), 0
        run.steps.clear()

    def _gone(self, id: str, number: int) -> None:
        """A box has ended: its execution does."""
        line = self.lines.get(id) or (self._begin(id, number) if id not in self._over else None)
        self._over.discard(id)
        if line is None:
            return
        try:
            self._hear(line)
        except NotFound:
            pass  # its trace is gone too
        self._conclude(line)

    def _conclude(self, line: Line) -> None:
        reason = str((line.ended or {}).get("reason") or "")
        problem: LayerError | None = None
        told: dict[str, Any] = {"box": line.id, "steps": line.run.before + len(line.run.steps)}
        if line.why == "time":
            told["ended"] = "its time was over"
        elif line.why == "wall":
            problem = LimitExceeded("its time was over")
        elif line.ended is None:
            problem = LayerError("the box is gone, and its host does not know why")
        elif reason != "killed":
            problem = LayerError(f"the box ended: {reason}")
        if problem is not None:
            told["error"] = {"code": problem.code, "message": problem.message, "hint": problem.hint}
        self._end(line.execution, "done" if problem is None else "failed", told, line)

    def _end(self, execution: Execution, status: str, told: dict[str, Any], line: Line | None = None) -> None:
        facts: list[Any] = []
        if line is not None:
            wall = round((datetime.now(UTC) - line.began).total_seconds(), 3)
            spent = [line.used.get(key) or 0 for key in ("cpu", "memory", "sent", "received")]
            facts = [
                *line.run.facts(),
                ("ledger_usage", (execution.id, execution.principal, None, None, wall, *spent, 0, now())),
            ]
            self.lines.pop(line.id, None)
        try:
            self.layer.ledger.conclude(execution, status, told, facts=facts)
        except Denied:
            self.layer.ledger.let_go(execution)  # another was quicker

    def _drop(self, line: Line) -> None:
        self.lines.pop(line.id, None)
        self.layer.ledger.let_go(line.execution)

    def _open(self) -> Any:
        from .tending import open_boxes

        return open_boxes(self.layer, held=True)

    def _sweep(self) -> None:
        """Conclude executions whose box ended while nobody looked, or was never made."""
        from .tending import was_made

        waiting = list(self._open())
        if not waiting:
            return
        boxes = self._call(do="list", labels={"layer": self.layer.id})
        living = {box["id"] for box in boxes}
        keys = {box["labels"].get("box") for box in boxes}
        for number, key, started in waiting:
            id = was_made(self.layer, number)
            if key in keys or (id is not None and id in living):
                continue
            if id is not None:
                self._safely(self._gone, id, number)
            elif (datetime.now(UTC) - started).total_seconds() > YOUNG:
                error = {
                    "code": "error",
                    "message": "the box was never made: whoever made it ended before it was",
                    "hint": None,
                }
                try:
                    self._end(self.layer.ledger.resume(number), "failed", {"error": error})
                except Conflict:
                    pass

    def close(self) -> None:
        """Leave them to others."""
        for line in list(self.lines.values()):
            self._drop(line)
