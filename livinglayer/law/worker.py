"""The worker: fires triggers and schedules, runs what is queued, and concludes what dead runners left.

Any number of workers share a layer. One of them leads at a time: it reads what happened and looks after what others
left. All of them run what is due: an execution is claimed with a lease that names the runner, and the runner's own
lease, renewed while it lives, says whether that still means something.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from ..errors import Conflict, Denied, LayerError, NotFound
from ..sandbox import Sandbox
from ..sandbox.client import blocking_client, host_runs, run_blocking
from ..substrate.ledger import Execution
from ..substrate.reads import clock
from ..substrate.schema import MAIN
from . import functions, runners, usage
from .functions import Asking, Function, Outcome
from .triggers import LONG, Feed, after_failure, told_of

POLL = 0.2  # seconds between two looks at the clock
LOOK = 1.0  # between two looks for what runners left
TEND = 5.0  # between two looks at boxes and contracts
GRACE = 10.0  # for what runs when the worker is told to stop
log = logging.getLogger("livinglayer")


class Lost(LayerError):
    """Its runner ended before it did."""

    code = "lost"


@dataclass
class Open:
    """An execution that was recorded and is not over."""

    queued: bool
    runner: str | None  # of one that was begun at once
    tx: int


class Worker:
    """One process, or thread, that does what is due."""

    def __init__(
        self,
        layer: Any,
        concurrency: int | None = None,
        *,
        now: Callable[[], datetime] | None = None,
        say: Callable[..., None] | None = None,
    ) -> None:
        layer.only_owner("run a worker: it acts for everybody")
        self.layer, self.engine, self.ledger = layer, layer.engine, layer.ledger
        self.concurrency = concurrency or 2 * (os.cpu_count() or 1)
        self.now = now or (lambda: datetime.now(UTC))
        self.say = say or (lambda event, **details: log.info("%s %s", event, details))
        self.runner = runners.Runner(layer.engine, layer.settings.runner_seconds)
        self.id = self.runner.id
        self.feed = Feed(layer, self.now)
        self.open: dict[int, Open] = {}
        self.running: set[int] = set()
        self._queue: list[tuple[datetime, int]] = []  # of those that are queued: when, which; the first is due first
        self._aside: list[tuple[datetime, int]] = []
        self.leads = False
        self._seen: int | None = None
        self._wake, self._stop = threading.Event(), threading.Event()
        self._looked: dict[str, float] = {}
        self._missing: dict[str, float] = {}  # runners without a lease, and since when
        self._orphans: set[tuple[str, str]] = set()

    # The loop

    def run(self, once: bool = False) -> None:
        """Do what is due until `stop`; `once`: until nothing is left that could be done now."""
        with self.runner.running():
            self.say("start", runner=self.id, concurrency=self.concurrency)
            try:
                while not self._stop.is_set():
                    self._wake.clear()
                    try:
                        busy = self.turn()
                    except LayerError as error:  # the database is busy or away: what was not done is done later
                        self.say("trouble", error=error.message)
                        busy = True
                    if once and not busy and not self.running:
                        break
                    if not busy or self.running or not once:
                        self._wake.wait(POLL)
            finally:
                self._finish()
        self.runner.close()

    def stop(self) -> None:
        """End soon: what runs has ten seconds."""
        self._stop.set()
        self._wake.set()

    def turn(self) -> bool:
        """One look at everything; whether there was something to do."""
        self._lead()
        made: list[int] = []
        if self.leads:
            try:
                made = self.feed.look(LOOK) + self.feed.times()
            except Exception as error:  # of one cause: what is queued must be run all the same
                self.say("trouble", error=f"{type(error).__name__}: {error}")
                log.exception("triggers")
            for number in made:
                self.say("queued", execution=number)
        moved = self._follow()
        if self._time_for("look", LOOK):
            for each in self._aside:
                heapq.heappush(self._queue, each)
            self._aside.clear()
            if self.leads:
                self._recover()
        if self.leads and (moved or made):
            first = next(iter(self.open.values()), None)  # they came in the order of their txs
            self.feed.keep((self._seen or 0) if first is None else first.tx - 1)
        begun = self._begin()
        if self._time_for("tend", TEND):
            self._tend()
        return bool(made or begun or moved or (self.leads and self.feed.behind))

    def _time_for(self, what: str, seconds: float) -> bool:
        moment = time.monotonic()
        if moment - self._looked.get(what, -1e9) < seconds:
            return False
        self._looked[what] = moment
        return True

    def _lead(self) -> None:
        """Take the lead when nobody has it, and keep it."""
        seconds = self.layer.settings.runner_seconds
        if not self._time_for("lead", seconds / 3 if self.leads else min(LOOK, seconds / 3)):
            return
        held = [holder for name, holder, _, _ in self.engine.leases("feed") if name == "feed"]
        if held and held[0] != self.id and runners.dead(held[0]):
            self.engine.release("feed", held[0])
            held = []
        led = self.leads
        self.leads = (not held or held[0] == self.id) and self.engine.lease("feed", self.id, seconds)
        if self.leads and not led:
            self.feed.again()  # where others have come to is noted
            self.say("lead", runner=self.id)

    def _follow(self) -> bool:
        """Learn which executions were recorded and which ended since the last look."""
        at = self.engine.schema_prefix
        with self.engine.reading() as session:
            last, _ = clock(self.engine, session)
            if self._seen == last:
                return False
            first, fresh = self._seen, self._seen is None
            if first is None:
                noted = Feed.kept(self.layer)
                first = min(noted[1], last) if noted else 0
            due = self.engine.portable("c.due", "datetime")
            over = f"exists (select 1 from {at}ledger_outcome o where o.execution = c.execution)"
            found = session.all(
                f"select c.execution, {due}, c.runner, c.tx from {at}ledger_call c where c.tx > ? and c.tx <= ?"
                f" and (c.due is not null or c.runner is not null){f' and not {over}' if fresh else ''} order by c.tx",
                (first, last),
            )
            ended = session.all(f"select execution from {at}ledger_outcome where tx > ? and tx <= ?", (first, last))
        for number, due, runner, tx in found:
            self.open[number] = Open(due is not None, runner, tx)
            if due is not None:
                heapq.heappush(self._queue, (datetime.fromisoformat(due), number))
        for (number,) in ended:
            self.open.pop(number, None)
        self._seen = last
        return True

    # What is due

    def _begin(self) -> bool:
        """Claim what is due, as much as there is room for, and run it."""
        room = self.concurrency - len(self.running)
        if room <= 0 or self._stop.is_set():
            return False
        moment, wanted, others = self.now(), list[tuple[datetime, int]](), list[tuple[datetime, int]]()
        if not self._queue or self._queue[0][0] > moment:
            return False
        taken = {name for name, _, _, _ in self.engine.leases("execution/")}
        while self._queue and self._queue[0][0] <= moment and len(wanted) < room:
            each = heapq.heappop(self._queue)
            if each[1] in self.open:
                (others if f"execution/{each[1]}" in taken else wanted).append(each)
        claimed = self.engine.claim([f"execution/{number}" for _, number in wanted], self.id, LONG) if wanted else []
        # Those that somebody else runs are looked at again later: they may come back.
        self._aside += others + [each for each in wanted if f"execution/{each[1]}" not in claimed]
        for name in claimed:
            number = int(name.partition("/")[2])
            self.running.add(number)
            threading.Thread(target=self._run, args=(number,), name=f"layer-{name}", daemon=True).start()
        return bool(claimed)

    def _run(self, number: int) -> None:
        try:
            self._perform(number)
        except (Conflict, NotFound):
            pass  # it is over: another worker was quicker, or a person
        except Denied as error:
            self.say("over", execution=number, reason=error.message)  # it was given up elsewhere while it ran here
        except Exception as error:  # its end could not be recorded: it is lost, which the next look finds
            self.say("trouble", execution=number, error=f"{type(error).__name__}: {error}")
            log.exception("execution %s", number)
        finally:
            with contextlib.suppress(LayerError):
                self.engine.release(f"execution/{number}", self.id)
            self.running.discard(number)
            self._wake.set()

    def _perform(self, number: int) -> None:
        execution: Execution = self.ledger.resume(number)
        asking = self._asking(execution)
        try:
            function = self._function(execution, asking)
            functions.decide(self.layer, asking, function)
        except LayerError as error:
            return self._give_up(execution, error)
        further: list[Execution] = []

        def failing(outcome: Outcome) -> tuple[str, Any]:
            status, following = after_failure(self.layer, execution, function, asking, outcome, self.now())
            if following is None:
                return status, None
            further.append(following)
            return status, lambda tx: tx.intend(following)

        asking.failing = failing
        try:
            try:
                usage.admit(self.layer, asking.principal, asking.contract)
            except LayerError as error:  # there may be room later
                outcome = Outcome(number, "failed", error=error)
                outcome.status, also = failing(outcome)
                self.ledger.conclude(execution, outcome.status, {"error": told_of(error)}, also=also)
            else:
                given = json.loads((execution.call or {}).get("arguments") or "{}")
                outcome = functions.perform(self.layer, function, given, execution, asking)
        finally:
            for each in further:
                self.ledger.let_go(each)
        told: dict[str, Any] = {"execution": number, "function": function.name, "attempt": asking.attempt}
        if outcome.error is not None:
            told["error"] = outcome.error.message
        if further:
            told |= {"again": further[0].id, "due": (further[0].call or {})["due"]}
        self.say(outcome.status, **told)

    def _give_up(self, execution: Execution, error: LayerError) -> None:
        """It can't even begin, and never will."""
        self.ledger.conclude(execution, "dead", {"error": told_of(error)})
        self.say("dead", execution=execution.id, error=error.message)

    def _asking(self, execution: Execution) -> Asking:
        call = execution.call or {}
        with self.engine.reading() as session:
            branch = call.get("branch")
            name = "main" if branch in (None, MAIN) else self.layer.catalog.branch_by_id(session, branch).name
        return Asking(
            execution.principal, name, execution.parent, call.get("cause_tx"), call.get("trigger"), call.get("contract"), None,
            execution.trace, execution.reason, call.get("attempt") or 1, call.get("due"), self.id,
        )  # fmt: skip

    def _function(self, execution: Execution, asking: Asking) -> Function:
        """The function at the version that was queued, with the rights it runs with."""
        call = execution.call or {}
        function = functions.by_id(self.layer, int(call.get("function") or 0), call.get("version"), asking.branch)
        if function.rights == "definer":
            execution.authority = function.definer
        return function

    # What others left

    def _recover(self) -> None:
        """Conclude what runners that are gone have left open, and queue it again where that is asked for."""
        claims = {int(name.partition("/")[2]): holder for name, holder, _, _ in self.engine.leases("execution/")}
        alive = {name.partition("/")[2] for name, _, _, _ in self.engine.leases("runner/")}
        self._follow()  # after the leases were read: a claim of what is unknown yet is left alone
        held = {number: each.runner for number, each in self.open.items() if not each.queued and each.runner}
        for number, runner in (held | claims).items():
            if runner is None or number in self.running:
                continue
            if number not in self.open:
                self._tidy(number, runner)
            elif runner == self.id and number in claims:
                self._lose(number, runner, "its end could not be recorded")
            elif self._gone(runner, alive):
                self._lose(number, runner, f"its runner {runner} is gone")
        self._missing = {runner: since for runner, since in self._missing.items() if runner not in alive}

    def _gone(self, runner: str, alive: Iterable[str]) -> bool:
        """Whether a runner is dead: seen here, or without a lease for as long as a lease is."""
        if runner == self.id or runner == getattr(self.ledger.runner, "id", None):
            return False
        if runners.dead(runner):
            return True
        if runner in alive:
            self._missing.pop(runner, None)
            return False
        since = self._missing.setdefault(runner, time.monotonic())
        return time.monotonic() - since >= self.layer.settings.runner_seconds

    def _tidy(self, number: int, holder: str) -> None:
        """A claim of what is over."""
        at = self.engine.schema_prefix
        with self.engine.reading() as session:
            over = session.one(f"select 1 from {at}ledger_outcome where execution = ?", (number,))
        if over is not None and number not in self.running:
            self.engine.release(f"execution/{number}", holder)

    def _lose(self, number: int, runner: str, why: str) -> None:
        try:
            execution: Execution = self.ledger.resume(number)
        except (Conflict, NotFound):
            return
        error = Lost(why, hint="what it had asked for was not done: changes and outcome are one tx")
        following, status = None, "lost"
        if (execution.call or {}).get("due") is not None:
            asking = self._asking(execution)
            try:
                function = self._function(execution, asking)
                outcome = Outcome(number, "lost", error=error)
                status, following = after_failure(self.layer, execution, function, asking, outcome, self.now())
            except LayerError:
                status = "dead"
        try:
            also = None if following is None else lambda tx: tx.intend(following)
            self.ledger.conclude(execution, status, {"error": {**told_of(error), "runner": runner}}, also=also)
        except Denied:
            return  # it ended meanwhile
        finally:
            self.ledger.let_go(execution)
            if following is not None:
                self.ledger.let_go(following)
        self.engine.release(f"execution/{number}", runner)
        self.say(status, execution=number, error=why, **({} if following is None else {"again": following.id}))

    # Boxes

    def _tend(self) -> None:
        """Boxes that nobody will ask for any more, contracts, refusals that nobody has recorded."""
        with contextlib.suppress(ModuleNotFoundError):
            tend = getattr(import_module(".contracts", __package__), "tend", None)
            if tend is not None:
                tend(self.layer)
        if self.ledger.denials:
            self.ledger.flush(self.layer.execution_of(self.layer.my_id))
        try:
            self._remove_orphans()
        except LayerError as error:
            self.say("trouble", error=error.message)

    def _remove_orphans(self) -> None:
        """Kill boxes of executions that are over, or that there never were, when two looks have found them so."""
        if not host_runs():
            return
        at, found = self.engine.schema_prefix, set[tuple[str, str]]()
        for box in run_blocking(blocking_client().call({"do": "list", "labels": {"layer": self.layer.id}})):
            execution = box["labels"].get("execution", "")
            if not execution.isdecimal():
                continue
            with self.engine.reading() as session:
                open = session.one(
                    f"select 1 from {at}ledger_execution x where x.id = ? and not exists (select 1 from {at}ledger_outcome o where o.execution = x.id)",
                    (int(execution),),
                )
            if open is None:
                found.add((box["id"], execution))
        for box_id, execution in found & self._orphans:
            with contextlib.suppress(LayerError):
                Sandbox.connect(box_id).kill()
                self.say("box", killed=box_id, execution=int(execution))
        self._orphans = found

    # The end

    def _finish(self) -> None:
        """Let what runs end; what does not in time is queued again."""
        deadline = time.monotonic() + GRACE
        while self.running and time.monotonic() < deadline:
            self._wake.wait(0.05)
            self._wake.clear()
        for number in list(self.running):
            with contextlib.suppress(LayerError):
                self._lose(number, self.id, f"its worker {self.id} was stopped")
        with contextlib.suppress(LayerError):
            if self.leads:
                self.engine.release("feed", self.id)
            if self.ledger.denials:
                self.ledger.flush(self.layer.execution_of(self.layer.my_id))
        self.say("stop", runner=self.id)
