"""Programs: the command that an agent is in its box. It is started once, heard as it prints, and its end is recorded before anything comes of it."""

from __future__ import annotations

import fnmatch
import json
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from ..errors import Conflict, LayerError, NotFound, Unavailable
from ..substrate.ledger import now
from ..substrate.values import datetime_text
from . import secrets as vault
from .executions import INLINE, STEPS, Run, digest

SHOWN = 64 << 10  # bytes of output that steps hold themselves; more is stored by content
RARELY = 30.0  # seconds between two of those
TOGETHER = 0.5  # seconds within which what is printed is one step
LOOP = ["python3", "-m", "layer_agent"]  # what an agent is whose contract names no program


class Program:
    """The program of one agent. Whoever looks after its box later goes on from the steps: nothing is started or heard twice."""

    def __init__(self, run: Run, box: Any, agent: Mapping[str, Any]) -> None:
        self.run, self.box, self.agent = run, box, agent
        self.argv: list[str] = list(agent["argv"])
        self.id: int | None = None
        self.heard = {"stdout": 0, "stderr": 0}
        self.shown, self._looked = 0, time.monotonic()
        self.exit: dict[str, Any] | None = None  # how it ended
        self.answer: dict[str, Any] | None = None  # what it returned
        self.kept: set[str] = set()  # names of artifacts
        for kind, detail in recorded(run, ("program", "output", "exit", "answer", "artifact")):
            if kind == "program":
                self.id = detail["id"]
            elif kind == "output" and "from" in detail:
                self.heard[detail["stream"]] = detail["from"] + detail["bytes"]
                self.shown += detail["bytes"]
            elif kind == "exit":
                self.exit = detail
            elif kind == "answer":
                self.answer = detail
            elif kind == "artifact":
                self.kept.add(detail["name"])

    def turn(self) -> bool:
        """Start it, or take what it has printed; whether it is over."""
        if self.exit is not None:
            return True
        if self.id is None:
            self._start()
            return self.exit is not None
        try:
            found = self.box.printed(self.id, **self.heard)
        except NotFound:
            self.box.info()  # NotFound here: the box itself is gone
            ended = self._traced() or {"error": "the host of boxes started again, and its end was not seen"}
            self._over({key: value for key, value in ended.items() if key != "id"})
            return True
        if not found.over and self._later(sum(len(data) for _, data, _ in found.pieces)):
            return False
        for stream, lost in found.lost.items():
            if lost:
                self.run.steps.append(("output", {"stream": stream, "lost": lost}, now()))
                self.heard[stream] += lost
        for stream, data, at in _joined(found.pieces, found.over):
            self._hear(stream, data, datetime_text(datetime.fromtimestamp(at, UTC)))
        if found.over:
            self._over({"exit_code": found.exit_code} | ({"error": found.error} if found.error else {}))
        return bool(found.over)

    def _later(self, size: int) -> bool:
        """Whether what is new can wait: a program that prints for hours takes few steps."""
        if self.shown < SHOWN or size >= SHOWN or time.monotonic() - self._looked > RARELY:
            self._looked = time.monotonic()
            return False
        return True

    def _start(self) -> None:
        """Start it, unless somebody did and ended before it was recorded."""
        running = [one["id"] for one in self.box.processes() if one["background"] and one["argv"] == self.argv]
        if running:
            self.id = running[0]
        elif ended := self._traced():
            self.id = ended["id"]
        else:
            try:
                self.id = self.box.start(self.argv, env={"LAYER_TASK": self.agent["task"]}).id
            except (Conflict, Unavailable):
                return  # the box sleeps, or its host starts again: the next turn does it
            except LayerError as error:  # there is no such command
                self._over({"error": error.message})
                return
        self.run.steps.append(("program", {"id": self.id, "argv": self.argv}, now()))

    def _traced(self) -> dict[str, Any] | None:
        """Its end as the box's trace has it."""
        for event in reversed(self.box.trace()):
            if event["event"] == "exec" and event.get("argv") == self.argv and "id" in event:
                return {key: event[key] for key in ("id", "exit_code", "error") if event.get(key) is not None}
        return None

    def _hear(self, stream: str, data: bytes, at: str) -> None:
        """Keep what it printed: a step for each few lines, what is beyond a measure in one piece by content."""
        while data:
            size = len(data)
            if self.shown < SHOWN and size > INLINE:
                size = data.rfind(b"\n", 0, INLINE) + 1 or INLINE
            piece, data = data[:size], data[size:]
            hidden = vault.hide(self.run.read, piece)
            detail: dict[str, Any] = {
                "stream": stream,
                "from": self.heard[stream],
                "bytes": len(piece),
                "digest": digest(hidden),
            }
            if self.shown < SHOWN and len(hidden) <= 2 * INLINE:
                detail["text"] = hidden.decode("utf-8", "replace").replace("\0", "�")
            else:
                detail["content"] = self.run.store(hidden)
            if self.run.before + len(self.run.steps) < STEPS:
                self.run.steps.append(("output", detail, at))
            self.heard[stream] += len(piece)
            self.shown += len(piece)

    def _over(self, how: dict[str, Any]) -> None:
        self.exit = how
        self.run.steps.append(("exit", how, now()))

    # What came of it

    def problem(self, artifacts: tuple[str, ...]) -> LayerError | None:
        """Why it has failed, if it has."""
        said, how = self.returned(), self.exit or {}
        if how.get("error"):
            return LayerError(f"the program could not run: {how['error']}")
        if said.get("error"):
            told = said["error"]
            return LayerError(str(told.get("message") if isinstance(told, Mapping) else told))
        if code := how.get("exit_code"):
            what = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
            return LayerError(f"the program {what}", hint="its output is in its steps: layer agent show")
        names = {*self.kept, *(detail["name"] for kind, detail, _ in self.run.steps if kind == "artifact")}
        missing = [wanted for wanted in artifacts if not fnmatch.filter(names, wanted)]
        if missing:
            return LayerError(
                f"it has not kept {', '.join(missing)}, which its contract requires",
                hint="layer.artifact(path, name) in the box, or the tool `artifact`",
            )
        return None

    def returned(self) -> dict[str, Any]:
        """What it said its answer, or its error, is."""
        return self.run.returned or self.answer or {}

    def told(self) -> dict[str, Any]:
        """Its end, for the outcome of the execution."""
        found = {"exit_code": (self.exit or {}).get("exit_code")}
        return found | ({"answer": self.returned()["value"]} if "value" in self.returned() else {})


def recorded(run: Run, kinds: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Steps of these kinds that are in the database."""
    engine, marks = run.layer.engine, ", ".join("?" for _ in kinds)
    with engine.reading() as session:
        rows = session.all(
            f"select x.kind, {engine.portable('x.detail', 'json')} from {engine.schema_prefix}ledger_step x"
            f" where x.execution = ? and x.kind in ({marks}) order by x.n",
            (run.execution.id, *kinds),
        )
    return [(kind, json.loads(text)) for kind, text in rows]


def _joined(pieces: Iterable[tuple[str, bytes, float]], over: bool) -> list[tuple[str, bytes, float]]:
    """Pieces of one stream that came together as one; of each stream's last one whole lines, unless nothing more comes."""
    found: list[tuple[str, bytes, float]] = []
    for stream, data, at in pieces:
        if found and found[-1][0] == stream and at - found[-1][2] < TOGETHER:
            found[-1] = (stream, found[-1][1] + data, found[-1][2])
        else:
            found.append((stream, data, at))
    for stream in () if over else ("stdout", "stderr"):
        last = max((n for n, one in enumerate(found) if one[0] == stream), default=None)
        if last is not None:
            found[last] = (stream, _lines(found[last][1]), found[last][2])
    return found


def _lines(data: bytes) -> bytes:
    """Whole lines, or all of it when no line ends for long."""
    return data[: data.rfind(b"\n") + 1] or (data if len(data) >= INLINE else b"")
