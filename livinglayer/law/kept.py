"""Kept: one box of a contract, looked after: answered, watched, held within its budget, and concluded."""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..errors import Conflict, Denied, LayerError, LimitExceeded, NotFound, Unavailable
from ..sandbox.sandbox import Sandbox
from ..substrate.ledger import Execution, now
from ..substrate.schema import MAIN
from ..substrate.values import datetime_text
from . import approvals, contracts, delegation, models, usage
from . import secrets as vault
from .bound import Bound
from .channel import Channel
from .executions import STEPS, Run
from .programs import Program, recorded
from .signature import dumps

if TYPE_CHECKING:
    from .tending import Tending

TICK = 1.0  # seconds between two looks at it
LARGE = 16 << 10  # bytes of a step's detail
KINDS = {
    "exec": "command",
    "network": "network",
    "model": "model",
    "secret": "secret",
    "file": "file",
    "limit": "limit",
}
STRANGERS = 100  # uses of a wrong token that are recorded
PASSING = ("/run/", "/tmp/", "/var/tmp/", "/dev/")  # what is there is nobody's work
log = logging.getLogger("livinglayer")


class Kept:
    """One box, looked after by a thread of its own."""

    def __init__(self, tending: Tending, number: int, id: str | None) -> None:
        self.tending, self.layer, self.number, self.id = tending, tending.layer, number, id
        self.execution: Execution = self.layer.ledger.resume(number)
        call = self.execution.call or {}
        self.given: dict[str, Any] = json.loads(call["arguments"])
        self.contract: int | None = call["contract"]
        with self.layer.engine.reading() as session:
            known = call["branch"] in (None, MAIN)
            self.branch = "main" if known else self.layer.catalog.branch_by_id(session, call["branch"]).name
        self.box = None if id is None else Sandbox.connect(id)
        self.channel: Channel | None = None
        self.run: Run = Run(self.layer, self.execution, branch=self.branch, atomic=False)
        self.problem: LayerError | None = None
        try:
            if self.contract is not None:
                self.run = Bound(self.layer, self.execution, self.branch, self.given, self.box)
        except (Unavailable, Conflict):
            raise
        except Exception as error:  # nobody can act under it any more
            said = error.message if isinstance(error, LayerError) else repr(error)
            self.problem = Denied(f"contract {self.given.get('contract')!r} is no more: {said}")
        self.run.before, self.seen, self.began = self._recorded()
        self.stopped: str | None = None  # the query that was waited for
        self._known: LayerError | None = None  # why it ends
        for _, detail in recorded(self.run, ("stop",)):  # somebody decided that, and could not conclude it
            self.stopped, self._known = detail.get("stopped"), approvals.raised(detail.get("error"))
        if isinstance(self.run, Bound):
            self.run.used, self.run.asks.hold = self.used, self._hold
            for _, detail in recorded(self.run, ("refusal",)):
                self.run.stops.refused(detail["code"])
            self._recall(self.run)
        self.frozen, self._held = False, 0.0  # whether its box waits, and when that was last looked at
        self.strangers = 0
        self.offset, self.ended, self.untold = 0, False, list[dict[str, Any]]()
        self.cpu, self.memory, self.sent, self.received, self._cpu_now = 0.0, 0.0, 0, 0, 0.0
        self._heard = {"cpu": 0.0, "sent": 0.0, "received": 0.0, "tokens": 0.0, "money": 0.0}
        asked = [detail for _, detail in recorded(self.run, ("model",))]
        self._said = {
            "tokens": sum(one["input"] + one["output"] for one in asked),
            "money": sum(one["money"] for one in asked),
        }
        self._ticked, self._why = time.monotonic(), ""
        self._pid = None if self.box is None else self.box.info()["pid"]
        self._remember()
        agent = self.given.get("agent")
        self.program = None if agent is None else Program(self.run, self.box, agent)
        self.stop, self.stale = threading.Event(), False
        acts = [self._watch_over, self._serve] if isinstance(self.run, Bound) else [self._watch_over]
        self.threads = [threading.Thread(target=act, name=f"layer-box-{number}", daemon=True) for act in acts]

    def _recorded(self) -> tuple[int, float, datetime]:
        """How many steps there are, when the last one happened that the host told of, and when it all began."""
        at, engine = self.layer.engine.schema_prefix, self.layer.engine
        detail, last, when = engine.portable("x.detail", "json"), 0, 0.0
        with engine.reading() as session:
            rows = session.all(
                f"select x.n, {detail} from {at}ledger_step x where x.execution = ? order by x.n desc limit 1000",
                (self.number,),
            )
            for n, text in rows:  # in the order they began, so the last that ended may be any of these
                last, when = max(last, n), max(when, json.loads(text).get("at") or 0.0)
            started = engine.portable("x.started", "datetime")
            began = session.one(f"select {started} from {at}ledger_execution x where x.id = ?", (self.number,))
        assert began is not None
        return last, when, datetime.fromisoformat(began[0])

    def _recall(self, run: Bound) -> None:
        """The secrets it has read before, which are still not kept where it shows them."""
        for name in {detail["name"] for _, detail in recorded(run, ("secret",)) if detail.get("use") == "read"}:
            try:
                run.read |= vault.readable(
                    self.layer, name, self.execution, run.readable, principal=run.deciding, branch=run.branch
                )
            except LayerError as error:
                log.warning("secret %s of execution %s: %s", name, self.number, error)

    def _remember(self) -> None:
        """Go on from what was known of its usage."""
        for name, _, _, value in self.layer.engine.leases(f"{usage.LIVE}{self.number}"):
            if name == f"{usage.LIVE}{self.number}" and value:
                kept = json.loads(value)
                self.memory = float(kept.get("memory") or 0)

    # Two threads: one answers, which may take as long as a function does; the other looks at the box meanwhile

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def _serve(self) -> None:
        """Answer what the box asks."""
        try:
            self._attend()
            while not self.stop.is_set() and not self.ended:
                if self.stale:
                    self._hang_up()
                if self.channel is None:
                    self._connect()
                if self.channel is None:
                    self.stop.wait(TICK / 5)
                    continue
                self._thaw()
                for fd, event in self.channel.poll.poll(TICK * 1000 / 5):
                    self.channel.turn(fd, event)
                    self._thaw()  # the answer is in its socket
        except approvals.Halted:
            pass  # whoever comes next goes on waiting
        except Exception as error:
            log.exception("box of execution %s", self.number, exc_info=error)
        finally:
            self.stop.set()
            self._hang_up()

    def _attend(self) -> None:
        """Go on with what the box waited for when whoever answered before ended."""
        assert isinstance(self.run, Bound) and self.box is not None
        rows = list(self.run.asks.rows.values())
        for row in rows:
            if row["status"] in ("pending", "approved"):
                self.run.asks.settle(row)
        if self.frozen or self.box.info()["state"] != "paused":
            return
        paused = max((event["at"] for event in self.box.trace() if event["event"] == "pause"), default=0.0)
        spans = [(row["asked"], row["answered"]) for row in rows] + delegation.spans(self.layer, self.number)
        self.frozen = any(  # not by a person, who may have paused it too
            begun.timestamp() - TICK < paused < (end or datetime.now(UTC)).timestamp() + TICK for begun, end in spans
        )

    def _hold(self) -> None:
        """Keep the box frozen while it waits: its memory stays, its clocks of waiting stand still."""
        if self.stop.is_set() or self.ended or not self.run.open:
            raise approvals.Halted
        if self.frozen and time.monotonic() - self._held < TICK:
            return
        if not self.frozen and self.channel is not None:
            self.channel.hold("approval")
        self.frozen, self._held = True, time.monotonic()
        assert self.box is not None
        try:
            if self.box.info()["state"] == "running":
                self.box.pause()
        except LayerError as error:  # it is gone, or its host starts again
            log.info("box %s: %s", self.id, error)

    def _thaw(self) -> None:
        """Let a box that waited go on."""
        if not self.frozen:
            return
        assert self.box is not None
        try:
            self.box.resume()
            self.frozen = False
        except NotFound:
            self.frozen = False
        except LayerError as error:  # its host starts again: the next turn does it
            log.info("box %s: %s", self.id, error)

    def _connect(self) -> None:
        assert self.box is not None and isinstance(self.run, Bound)
        try:
            listener = self.box.channel()
        except LayerError as error:  # it sleeps, or its host starts again
            log.info("box %s: %s", self.id, error)
            return
        self.stale = False
        self.channel = Channel(listener, lambda error: log.exception("channel of %s", self.id, exc_info=error))
        self.channel.executions[self.run.token] = self.run
        self.channel.stranger = self._stranger

    def _stranger(self, error: Denied) -> None:
        """Record that the box used a token that is not its own; a program that was forked while it ran may go on and on."""
        self.strangers += 1
        if self.strangers <= STRANGERS:
            Run.refuse(self.run, "token", error, {})

    def _hang_up(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()

    def _watch_over(self) -> None:
        """Look at the box until it has ended, or somebody else does."""
        try:
            while not self.stop.wait(TICK if self.program is None else TICK / 5) and not self.ended:
                try:
                    if self.program is not None and self._turn():
                        self.finish()
                    elif self.program is None or time.monotonic() - self._ticked >= TICK:
                        self._tick()
                except LayerError as error:  # the database is busy or away
                    log.warning("box of execution %s: %s", self.number, error)
        except Exception as error:
            log.exception("box of execution %s", self.number, exc_info=error)
        finally:
            self.stop.set()
            if not self.ended:
                self._leave()

    def _leave(self) -> None:
        """Somebody else will go on."""
        try:
            self._flush()
            self.layer.engine.release(f"{usage.LIVE}{self.number}", self.tending.id)
        except LayerError as error:
            log.warning("steps of execution %s: %s", self.number, error)
        self.layer.ledger.let_go(self.execution)

    def _tick(self) -> None:
        """One look at the box: what it did and used, whether it may go on."""
        passed, self._ticked = time.monotonic() - self._ticked, time.monotonic()
        assert self.box is not None
        try:
            found = self.box.info()
            self._measure(passed)
        except NotFound:
            return self.conclude()
        except (Conflict, Unavailable) as error:  # its host starts again
            log.info("box %s: %s", self.id, error)
            return
        if found["pid"] != self._pid:  # it was suspended: since it goes on it has another listener
            self.stale, self._pid = True, found["pid"]
        if isinstance(self.run, Bound) and self.run.contract.secrets and not found.get("secrets", True):
            self._lend(self.run.contract)
        if not self.layer.engine.lease(f"{usage.LIVE}{self.number}", self.tending.id, contracts.LEASE, self._value()):
            self.stop.set()  # another looks after it now
            return
        self._watch()
        self._flush()
        problem = self._known or self.problem or self._over()
        if problem is None and isinstance(self.run, Bound):
            try:
                self.run.stand()
            except Denied as error:
                problem = error
            problem = problem or self.run.stops.over
            if problem is None and (stopped := self.stopped or self._met()) is not None:
                self.stopped = stopped
                self._files()
                self._decided({"stopped": stopped})
                assert self.box is not None
                self.box.kill()
                return self.conclude()
        if problem is not None:
            self.end(problem)

    def _met(self) -> str | None:
        """The query among its stops that gives a row by now, as the box itself would see it."""
        assert isinstance(self.run, Bound)
        run = self.run
        for sql in run.stops.queries:
            try:
                rows, _ = self.layer.reads.query_at(
                    sql, None, self.branch, None, run.deciding, None, 1, narrow=run.reads
                )
            except LimitExceeded:  # more than one
                return str(sql)
            except LayerError as error:
                log.warning("stop of execution %s: %s", self.number, error)
                continue
            if rows:
                return str(sql)
        return None

    def _lend(self, contract: contracts.Contract) -> None:
        """Its host has started again, and knows no secrets: say them once more, if they may still be used."""
        assert self.box is not None
        row = {**(contract.blueprint or {}), "egress": list(contract.egress), "secrets": list(contract.secrets)}
        try:
            values = vault.for_box(self.layer, row, self.execution.principal, branch=self.branch)[0]
            if values:
                self.box.lend(dict(values))
        except LayerError as error:
            log.warning("secrets of box %s: %s", self.id, error)

    def _turn(self) -> bool:
        """Look at the agent's program; whether it is over."""
        assert self.program is not None
        begun = self.program.id is not None
        try:
            over = self.program.turn()
            if not begun:
                self._flush()  # whoever comes next shall know it
            return over
        except (NotFound, Conflict, Unavailable) as error:  # the box is gone, or its host starts again
            log.info("program of execution %s: %s", self.number, error)
            return False

    def _measure(self, passed: float) -> None:
        assert self.box is not None
        found = self.box.metrics()
        cpu = float(found.get("cpu_seconds") or 0)
        if cpu < self._cpu_now:  # it was suspended meanwhile, and counts anew
            self.cpu += self._cpu_now
        self._cpu_now = cpu
        self.memory += float(found.get("memory") or 0) * passed
        self.sent, self.received = int(found["network"]["up"]), int(found["network"]["down"])

    def spent(self) -> dict[str, Any]:
        """What it has used so far, as far as anybody knows."""
        return {
            "cpu": round(max(self.cpu + self._cpu_now, self._heard["cpu"]), 6), "memory": self.memory,
            "sent": int(max(self.sent, self._heard["sent"])), "received": int(max(self.received, self._heard["received"])),
        }  # fmt: skip

    def _value(self) -> str:
        return json.dumps(
            {"principal": self.execution.principal, "contract": self.contract, **self.spent(), **self.asked()}
        )

    def _watch(self) -> None:
        """What the host saw of it since the last look, as steps."""
        if self.box is None:
            return
        self._hear_all()
        while True:
            self.untold, self.offset = self.box.trace_after(self.offset)
            if not self.untold:
                return
            self._hear_all()

    def _hear_all(self) -> None:
        """Each of what was told, once: what could not be recorded now is tried again."""
        while self.untold:
            self._hear(self.untold[0])
            del self.untold[0]

    def _hear(self, event: dict[str, Any]) -> None:
        """What the host told counts, also of what began and ended between two looks; what is new becomes a step."""
        told = event.get("model") if event["event"] == "network" else None
        money = models.price(self.run.contract.model if isinstance(self.run, Bound) else None, told) if told else 0.0
        if event["at"] > self.seen:
            self._note(event if told is None else models.step(self.run, str(self.id), event, money))
        if told:
            self._heard["tokens"] += told["input"] + told["output"]
            self._heard["money"] += money
        if event["event"] == "network":
            self._heard["sent"] += int(event.get("up") or 0)
            self._heard["received"] += int(event.get("down") or 0)
        elif event["event"] == "exec":
            self._heard["cpu"] += float(event.get("user") or 0) + float(event.get("system") or 0)

    def _note(self, event: dict[str, Any]) -> None:
        self.seen, name = event["at"], event["event"]
        if name in ("limit", "end"):
            self._why = f"{event.get('limit')} limit" if name == "limit" else self._why or str(event.get("reason"))
        if name == "usage":
            return
        detail = event if len(dumps(event)) <= LARGE else {"at": event["at"], "event": name, "cut": str(event)[:LARGE]}
        detail = json.loads(dumps(detail).decode().replace(self.run.token, "…"))  # a command may have had its LAYER_URL
        if self.run.before + len(self.run.steps) < STEPS:
            at = datetime_text(datetime.fromtimestamp(event.get("began") or event["at"], UTC))
            self.run.steps.append((KINDS.get(name, "box"), detail, at))

    def _flush(self) -> None:
        first = self.run.flushed
        if len(self.run.steps) == first:
            return
        try:
            self.layer.ledger.note(self.execution, self.run.facts())
        except LayerError:
            self.run.flushed = first
            raise

    def _waited(self) -> float:
        return approvals.waited(list(self.run.asks.rows.values())) if isinstance(self.run, Bound) else 0.0

    def used(self) -> dict[str, float]:
        """What it has used of what budgets speak of."""
        used = self.spent()
        lent = (
            delegation.spent(self.layer, self.number)
            if isinstance(self.run, Bound) and self.run.contract.contracts
            else {}
        )
        own: dict[str, float] = {
            "seconds": (datetime.now(UTC) - self.began).total_seconds() - self._waited(), "steps": self.run.before + len(self.run.steps),
            "cpu": used["cpu"], "bytes": used["sent"] + used["received"],
            **self.asked(),
        }  # fmt: skip
        return {name: amount + lent.get(name, 0) for name, amount in own.items()}

    def asked(self) -> dict[str, float]:
        """What it has used of models itself: as its host has told, and at least what is recorded."""
        return {name: max(self._heard[name], self._said[name]) for name in usage.MODELS}

    def _over(self) -> LimitExceeded | None:
        """The budget that is used up, if one is."""
        budget = {} if not isinstance(self.run, Bound) else self.run.contract.budget
        spent = self.used()
        for name, amount in {"steps": STEPS, **budget}.items():
            if spent[name] > amount:
                return _spent(name, spent[name], amount)
        if isinstance(self.run, Bound) and self.run.before + len(self.run.steps) >= STEPS:  # no more are recorded
            return _spent("steps", STEPS, STEPS)
        return None

    # Its end

    def end(self, problem: LayerError) -> None:
        """Stop the box, and say why."""
        self.run.open = False
        assert self.box is not None
        self._files()
        self._decided({"error": {"code": problem.code, "message": problem.message, "hint": problem.hint}})
        self.box.kill()
        self.conclude(problem)

    def _decided(self, why: dict[str, Any]) -> None:
        """Record why it ends before it does: whoever finds the box killed knows then."""
        if not recorded(self.run, ("stop",)):
            self.run.steps.append(("stop", why, now()))
        self._flush()

    def _files(self) -> None:
        """The files it changed, as steps."""
        assert self.box is not None
        try:
            found = [
                one for one in self.box.changes() if one["type"] != "directory" and not one["path"].startswith(PASSING)
            ]
        except LayerError:
            return
        for change in found[:1000]:
            if self.run.before + len(self.run.steps) < STEPS:
                self.run.steps.append(("file", dict(change), now()))

    def _kept_files(self) -> list[dict[str, Any]]:
        """Those that are recorded as changed by it; what the host told while it ran has a time."""
        return [detail for _, detail in recorded(self.run, ("file",)) if "at" not in detail]

    def finish(self) -> None:
        """The agent's program is over: keep what it did, propose it, and let the box go. Whoever is killed here is followed by one who goes on."""
        self.run.open = False
        assert self.box is not None
        self._watch()
        if not self._kept_files():
            self._files()
        self._flush()
        self._propose()
        self.box.kill()
        self.conclude()

    def _failure(self) -> LayerError | None:
        """Why the agent has failed, if it has."""
        assert self.program is not None
        if self.stopped is not None:
            return None
        if self.program.exit is None:
            return LayerError("it was stopped before its program ended") if self._why == "killed" else None
        return self.program.problem(self.run.contract.artifacts if isinstance(self.run, Bound) else ())

    def _propose(self) -> int | None:
        """Its branch for a merge, when it is done and has changed something; once."""
        from . import agents

        if (
            self.program is None
            or not self.program.agent.get("propose")
            or (self.program.exit is None and self.stopped is None)
            or self._failure()
        ):
            return None
        return agents.propose(
            self.layer, self.execution, str(self.given["contract"]), self.branch, len(self._kept_files())
        )

    def conclude(self, problem: LayerError | None = None) -> None:
        """The box is gone: record the rest, and how it ended."""
        self.run.open, problem = False, problem or self._known
        try:
            self._watch()
        except LayerError as error:
            log.warning("the trace of box %s: %s", self.id, error)
        status = "done"
        told: dict[str, Any] = {"box": self.id, "steps": self.run.before + len(self.run.steps)}
        if self.stopped is not None:
            told["stopped"] = self.stopped
        elif problem is None and self._why == "wall limit":
            budget = self.run.contract.budget.get("seconds") if isinstance(self.run, Bound) else None
            problem = LimitExceeded("its time was over") if budget is None else _spent("seconds", budget, budget)
        elif problem is None and self.program is not None and (self.program.exit is not None or self._why == "killed"):
            problem = self._failure()
        elif problem is None and self._why not in ("killed", ""):
            problem = LayerError(f"the box ended: {self._why}")
        elif problem is None and not self._why:
            problem = LayerError("the box is gone, and its host does not know why")
        if self.program is not None:
            told |= self.program.told() | {"branch": self.branch, "proposal": None if problem else self._propose()}
        told |= {name: amount for name, amount in self.asked().items() if amount}
        if problem is not None:
            status = "denied" if isinstance(problem, Denied) else "failed"
            told["error"] = {"code": problem.code, "message": problem.message, "hint": problem.hint}
        if isinstance(self.run, Bound):
            told["used"] = {name: round(amount, 6) for name, amount in self.used().items()}
        wall = (datetime.now(UTC) - self.began).total_seconds()
        spent = (round(wall, 3), *self.spent().values(), 0, now())
        row = ("ledger_usage", (self.number, self.execution.principal, self.contract, None, *spent))
        self._withdraw(over=False)  # whoever is killed after it is over is followed by nobody
        try:
            self.layer.ledger.conclude(self.execution, status, told, facts=[*self.run.facts(), row])
        except Denied:
            self.layer.ledger.let_go(self.execution)  # another was quicker
        self._withdraw(over=True)
        self.ended = True
        self.layer.engine.release(f"{usage.LIVE}{self.number}", self.tending.id)

    def _withdraw(self, over: bool) -> None:
        if not isinstance(self.run, Bound) or self.run.contract.approvals:
            approvals.withdraw(self.layer, self.execution, over)


def _spent(name: str, used: float, amount: float) -> LimitExceeded:
    return LimitExceeded(
        f"over its budget of {amount:g} {name}: {used:.3f}".rstrip("0").rstrip("."), hint="the contract's budget says how much a box may use"
    )  # fmt: skip


class Ended(Kept):
    """A box that was gone before anybody looked."""

    def __init__(self, tending: Tending, number: int, id: str | None) -> None:
        super().__init__(tending, number, None)
        self.id = id
        self._past = id

    def _watch(self) -> None:
        if self._past is None:
            return
        from ..sandbox.client import blocking_client, run_blocking

        self._hear_all()
        while True:
            request = {"do": "trace.more", "box": self._past, "offset": self.offset, "wait": 0}
            more = run_blocking(blocking_client().call(request))
            self.untold, self.offset = more["events"], more["offset"]
            if not self.untold:
                return
            self._hear_all()
