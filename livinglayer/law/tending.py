"""Tending: boxes of contracts are answered, watched, kept within their budgets and concluded, by one process at a time."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ..errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound, Unavailable
from ..sandbox.egress import rules
from ..sandbox.sandbox import Sandbox
from ..settings import state_directory
from ..substrate.ledger import Execution, Tx, now
from ..substrate.reads import clock
from ..substrate.schema import MAIN
from ..substrate.values import datetime_text
from . import approvals, contracts, delegation, models, runners, stops, tools, usage
from . import secrets as vault
from .channel import Channel
from .executions import STEPS, Run, asked_for
from .programs import Program, recorded
from .signature import dumps

LOOK = 0.5  # seconds between two looks for boxes
TICK = 1.0  # between two looks at one
SWEEP = 10.0  # between two looks for boxes that nobody knows
YOUNG = 30.0  # an execution without a box that is younger is being made
LARGE = 16 << 10  # bytes of a step's detail
KEEPER = "keeper/"  # leases of those who look after boxes, by host
KINDS = {
    "exec": "command",
    "network": "network",
    "model": "model",
    "secret": "secret",
    "file": "file",
    "limit": "limit",
}
STRANGERS = 100  # uses of a wrong token that are recorded
ANSWER = 64 << 10  # bytes of what an agent returns
PASSING = ("/run/", "/tmp/", "/var/tmp/", "/dev/")  # what is there is nobody's work
log = logging.getLogger("livinglayer")


class Bound(Run):
    """The execution that a box of a contract is: each change is a tx at once, while the contract and the permission stand."""

    def __init__(self, layer: Any, execution: Execution, branch: str, given: Mapping[str, Any], box: Any) -> None:
        contract = delegation.effective(layer, (execution.call or {})["contract"], given)
        super().__init__(
            layer, execution, branch=branch, reads=contracts.view(layer, contract, given["slice"], branch), calls=contract.functions,
            readable=given["readable"], projections=contract.projections, voucher=contract.writer, atomic=False,
        )  # fmt: skip
        self.contract, self.terms, self.given = contract, given["terms"], given
        self.token = contracts.token(layer.id, given["key"])
        self.about = {"contract": contract.name, "box": given["name"], "projections": list(contract.projections)}
        self.agent: Mapping[str, Any] | None = given.get("agent")
        self._known: tuple[Any, dict[str, tools.Tool]] | None = None
        self.used: Callable[[], Mapping[str, float]] = dict
        self.refused: Denied | None = None
        self.stops = stops.Stops(contract.stops)
        self.guard = approvals.guarded(contract.approvals)
        self.asks = approvals.Asks(self, contract.name, self.stand)
        if given["sliced"]:
            self.on_slice = lambda: self._slice(box)

    def answer(self, method: str, name: str, rest: str, given: Mapping[str, Any], body: bytes) -> Any:
        """As a function's, if the box may still act at all."""
        try:
            self.stand()
        except Denied as error:
            if self.refused is None:
                self.layer._ledger.denied(self.execution, error, action=name)
            self.refused = error
            raise
        if name != "tool":  # what it asks for is asked here once more
            self.stops.asked(f"{name}/{rest}", asked_for({} if body else given, body))
        if (over := self.stops.over) is not None:
            raise over  # its keeper ends the box
        try:
            return super().answer(method, name, rest, given, body)
        finally:
            self.draft.first_read = None  # what is changed is changed now: nothing read before must still be so

    def facts(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The steps that are not recorded yet, by their time: what the host tells of comes a moment later than what the channel sees."""
        first, self.flushed = self.flushed, len(self.steps)
        steps = sorted(self.steps[first : self.flushed], key=lambda step: step[2])
        return [self.fact(self.before + first + n, *step) for n, step in enumerate(steps, 1)]

    def stand(self) -> None:
        """Denied when the contract is gone or says something else now, or its principal may not act under it any more."""
        try:
            found = delegation.effective(self.layer, self.contract.id, self.given)
            delegation.stand(self.layer, self.execution.principal, self.given)
        except NotFound:
            raise Denied(
                f"contract {self.contract.name!r} is no more", resource=f"contract:{self.contract.name}"
            ) from None
        except Invalid as error:
            raise Denied(
                f"contract {self.contract.name!r} can't be kept to any more: {error.message}",
                resource=f"contract:{self.contract.name}",
            ) from None
        if found.terms != self.terms or found.name != self.contract.name:
            raise Denied(
                f"contract {self.contract.name!r} has changed since this box was made",
                hint="make another box",
                resource=f"contract:{self.contract.name}",
            )
        contracts.decide(self.layer, self.execution.principal, found, self.branch)

    def refuse(self, name: str, error: LayerError, given: Mapping[str, Any], body: bytes = b"") -> None:
        super().refuse(name, error, given, body)
        self.stops.refused(error.code)

    # What somebody must say yes to first

    def _change(self, changes: Sequence[Callable[[Tx], Any]]) -> None:
        before, after = self.guard
        super()._change([before, *changes, after] if self.contract.approvals else changes)

    def _asking(self, do: str, given: Any, act: Callable[[Any], Any]) -> Any:
        try:
            return act(given)
        except approvals.Needed as needed:
            asked = {key: given.get(key) for key in ("entity", "values", "on", "function", "arguments")}
            asked |= {key: given.optional_number(key) for key in ("id", "expect")}
            return self.asks.answer(needed.rule, do, {key: value for key, value in asked.items() if value is not None})

    def _on_insert(self, given: Any) -> Any:
        return self._asking("insert", given, super()._on_insert)

    def _on_update(self, given: Any) -> Any:
        return self._asking("update", given, super()._on_update)

    def _on_delete(self, given: Any) -> Any:
        return self._asking("delete", given, super()._on_delete)

    def _on_upsert(self, given: Any) -> Any:
        return self._asking("upsert", given, super()._on_upsert)

    def _on_call(self, given: Any) -> Any:
        return self._asking("call", given, super()._on_call)

    def called(self, name: str, arguments: Any, key: str | None = None) -> bytes:
        if key is None and name in self.contract.functions:
            if needed := approvals.of_call(self, self.contract.approvals, name, arguments):
                raise approvals.Needed(needed)
        return super().called(name, arguments, key)

    def _on_delegate(self, given: Any) -> Any:
        told = delegation.delegate(self, self.contract, self.used(), given, self.asks.hold)
        self.step("delegation", **{key: told[key] for key in ("execution", "status")}, contract=given.text("contract"))
        return told

    # What an agent asks of itself

    def _on_projection(self, given: Any) -> Any:
        mine = {
            "me.contract": self._terms,
            "me.budget": self.budget,
            "me.denials": self._denials,
            "me.approvals": self.asks.told,
        }
        name = given.rest or given.text("name")
        if name not in mine:
            return super()._on_projection(given)
        rows = mine[name]()
        self.step("query", projection=name, rows=len(rows), **self._told(dumps(rows)))
        return {"rows": rows, "tx": None}

    def _terms(self) -> list[dict[str, Any]]:
        """Its contract as it holds for it."""
        shown = (
            "reads",
            "scope",
            "functions",
            "projections",
            "contracts",
            "tier",
            "budget",
            "approvals",
            "stops",
            "artifacts",
            "instructions",
        )
        said = {name: getattr(self.contract, name) for name in shown} | {"reads": self.reads}
        hosts = [rule.text for rule in rules.parse(list(self.contract.egress))]
        names = [secret.name for secret in vault.wanted(list(self.contract.secrets))]
        return [{"name": self.contract.name, "branch": self.branch, **said, "egress": hosts, "secrets": names}]

    def _denials(self) -> list[dict[str, Any]]:
        """What it was denied, the last thousand."""
        self.layer._ledger.flush(self.execution)
        engine, names = self.layer.engine, ("id", "action", "resource", "reason", "at")
        with engine.reading() as session:
            rows = session.all(
                f"select id, action, resource, reason, {engine.portable('at', 'datetime')} from {engine.schema_prefix}ledger_decision"
                " where execution = ? order by id desc limit 1000",
                (self.execution.id,),
            )
        return [dict(zip(names, row, strict=True)) for row in reversed(rows)]

    def _on_agent(self, given: Any) -> Any:
        if self.agent is None:
            raise NotFound("this box is no agent's", hint="layer agent run CONTRACT --task …")
        model, digest = self.agent["model"], self.agent.get("messages")
        if model is not None:
            model = {key: model.get(key) for key in ("api", "url", "model", "max_tokens", "timeout", "secret")}
        kept, redo = (
            None if one is None else self.layer.engine.get_blob(one) for one in (digest, self.agent.get("redo"))
        )
        return {
            "task": self.agent["task"], "instructions": self.contract.instructions, "model": model,
            "tools": [tool.told() for tool in self._tools().values()], "messages": None if kept is None else json.loads(kept),
            "redo": [] if redo is None else json.loads(redo), "budget": self.budget(),
        }  # fmt: skip

    def budget(self) -> list[dict[str, Any]]:
        """What its contract lets it use, what it has used and what is left."""
        used = self.used()
        return [
            {"resource": name, "amount": amount, "used": round(used.get(name, 0), 6), "left": round(max(0, amount - used.get(name, 0)), 6)}
            for name, amount in {"steps": STEPS, **self.contract.budget}.items()
        ]  # fmt: skip

    def _tools(self) -> dict[str, tools.Tool]:
        with self.layer.engine.reading() as session:
            epoch = clock(self.layer.engine, session)[1]
        if self._known is None or self._known[0] != epoch:
            self._known = (epoch, tools.tools(self, self.contract.contracts))
        return self._known[1]

    def _on_tool(self, given: Any) -> Any:
        return tools.use(self, self._tools(), given)

    def _on_said(self, given: Any) -> Any:
        return tools.said(self, given)

    def _on_return(self, given: Any) -> Any:
        done = super()._on_return(given)
        assert self.returned is not None
        data = dumps(self.returned)
        if len(data) > ANSWER:
            self.returned = None
            raise LimitExceeded(f"an answer is at most {ANSWER} bytes", hint="keep the rest as an artifact")
        self.step("answer", **self.returned)
        return done

    def _slice(self, box: Any) -> str:
        tx = contracts.put_slice(self.layer, box, self.reads or {}, self.execution.principal, self.branch)
        self.step("query", slice=sorted(self.reads or {}), tx=tx)
        return contracts.SLICE


class Kept:
    """One box, looked after by a thread of its own."""

    def __init__(self, tending: Tending, number: int, id: str | None) -> None:
        self.tending, self.layer, self.number, self.id = tending, tending.layer, number, id
        self.execution: Execution = self.layer._ledger.resume(number)
        call = self.execution.call or {}
        self.given: dict[str, Any] = json.loads(call["arguments"])
        self.contract: int | None = call["contract"]
        with self.layer.engine.reading() as session:
            known = call["branch"] in (None, MAIN)
            self.branch = "main" if known else self.layer._catalog.branch_by_id(session, call["branch"]).name
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
        self.layer._ledger.let_go(self.execution)

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
                rows, _ = self.layer._reads.query_at(
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
        while self._heard_all():
            self.untold, self.offset = self.box.trace_after(self.offset)
            if not self.untold:
                return

    def _heard_all(self) -> bool:
        """Each of what was told, once: what could not be recorded now is tried again."""
        while self.untold:
            self._hear(self.untold[0])
            del self.untold[0]
        return True

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
            self.layer._ledger.note(self.execution, self.run.facts())
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
            self.layer._ledger.conclude(self.execution, status, told, facts=[*self.run.facts(), row])
        except Denied:
            self.layer._ledger.let_go(self.execution)  # another was quicker
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


class Tending:
    """The boxes of contracts that this process looks after."""

    def __init__(self, layer: Any) -> None:
        self.layer, pid = layer, os.getpid()
        self.id = f"{runners.machine()}.{pid}.{runners.born(pid)}.{secrets.token_hex(4)}"
        self.kept: dict[int, Kept] = {}
        self.leads = False  # whether it is the one whom others count on to take new boxes
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._swept, self._told, self._seen = time.monotonic(), -1e9, 0

    def look(self) -> None:
        """Look now, and go on looking beside whatever else this process does."""
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._loop, name="layer-tending", daemon=True)
                self._thread.start()
        self.turn()

    def _loop(self) -> None:
        while not self._stop.wait(LOOK):
            try:
                self.turn()
            except LayerError as error:
                log.warning("boxes of contracts: %s", error)
            except Exception as error:
                if self._stop.is_set():
                    return
                log.exception("boxes of contracts", exc_info=error)

    def turn(self) -> None:
        """Take over boxes that nobody looks after, and conclude those that are gone."""
        with self._lock:
            if self._stop.is_set():
                return
            if time.monotonic() - self._told > contracts.LEASE / 3:
                name = f"{KEEPER}{contracts.home()}"
                for known, holder, _, _ in self.layer.engine.leases(name):
                    if known == name and runners.dead(holder):
                        self.layer.engine.release(name, holder)
                self.leads = self.layer.engine.lease(name, self.id, contracts.LEASE)
                self._told = time.monotonic()
            for number in [number for number, kept in self.kept.items() if not kept.alive]:
                del self.kept[number]
            with self.layer.engine.reading() as session:
                tx = clock(self.layer.engine, session)[0]
            waiting = []
            if tx != self._seen:  # else nothing can have begun since there was nothing to do
                waiting = [each for each in open_boxes(self.layer) if each[0] not in self.kept]
                self._seen = 0 if waiting or self.kept else tx
            if waiting:
                here = {found["labels"].get("box"): found for found in _boxes(self.layer)}
                for number, key, started in waiting:
                    try:
                        self._take(number, here.get(key), started)
                    except Exception as error:  # one of them is no reason to leave the others alone
                        log.exception("box of execution %s", number, exc_info=error)
            if time.monotonic() - self._swept > SWEEP:
                self._swept = time.monotonic()
                self._sweep()

    def _sweep(self) -> None:
        """Kill boxes that were made for this layer and never got an execution: whoever made them ended in between."""
        if not _host_runs():
            return
        late = time.time() - YOUNG
        boxes = {key: box for box in _boxes(self.layer) if (key := box["labels"].get("box")) and box["created"] < late}
        for key in boxes.keys() - known_keys(self.layer) if boxes else ():
            log.warning("box %s of no execution is removed", boxes[key]["id"])
            Sandbox.connect(boxes[key]["id"]).kill()

    def _take(self, number: int, found: Mapping[str, Any] | None, started: datetime) -> None:
        name = f"{usage.LIVE}{number}"
        for known, holder, _, _ in self.layer.engine.leases(name):
            if known == name and runners.dead(holder):
                self.layer.engine.release(name, holder)
        if (
            found is None
            and (datetime.now(UTC) - started).total_seconds() < YOUNG
            and not _was_made(self.layer, number)
        ):
            return
        if not self.layer.engine.lease(name, self.id, contracts.LEASE):
            return
        try:
            id = _was_made(self.layer, number) or (None if found is None else str(found["id"]))
            if found is None and id is not None:  # it may have been made since they were listed
                found = next((box for box in _boxes(self.layer) if box["id"] == id), None)
            if found is not None and found["id"] == id:
                self.kept[number] = Kept(self, number, id)
                self.kept[number].start()
            else:
                _gone(self, number, id)
        except Conflict:
            self.layer.engine.release(name, self.id)  # it is over
        except NotFound:
            pass  # it went this moment: the next look finds it gone

    def close(self) -> None:
        """Leave all of them to others."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(10)
        for kept in self.kept.values():
            kept.stop.set()
        for kept in self.kept.values():
            for thread in kept.threads:
                thread.join(10)
        try:
            self.layer.engine.release(f"{KEEPER}{contracts.home()}", self.id)
        except LayerError:
            pass


class _Ended(Kept):
    """A box that was gone before anybody looked."""

    def __init__(self, tending: Tending, number: int, id: str | None) -> None:
        super().__init__(tending, number, None)
        self.id = id
        self._past = id

    def _watch(self) -> None:
        if self._past is None:
            return
        from ..sandbox.client import blocking_client, run_blocking

        while self._heard_all():
            request = {"do": "trace.more", "box": self._past, "offset": self.offset, "wait": 0}
            more = run_blocking(blocking_client().call(request))
            self.untold, self.offset = more["events"], more["offset"]
            if not self.untold:
                return


def _gone(tending: Tending, number: int, id: str | None) -> None:
    kept = _Ended(tending, number, id)
    kept.conclude(None if id is not None else LayerError("the box was never made: whoever made it ended before it was"))


def _boxes(layer: Any) -> list[dict[str, Any]]:
    """The host's boxes of this layer; of those with the same label the first, which the others are forks of."""
    from ..sandbox.client import blocking_client, run_blocking

    found = run_blocking(blocking_client().call({"do": "list", "labels": {"layer": layer.id}}))
    return sorted(found, key=lambda box: -box["created"])


def _was_made(layer: Any, number: int) -> str | None:
    """The id of the box that an execution got, once that is recorded."""
    at, detail = layer.engine.schema_prefix, layer.engine.portable("x.detail", "json")
    with layer.engine.reading() as session:
        row = session.one(
            f"select {detail} from {at}ledger_step x where x.execution = ? and x.kind = 'box' order by x.n limit 1",
            (number,),
        )
    return None if row is None else json.loads(row[0]).get("id")


def open_boxes(layer: Any) -> Iterator[tuple[int, str, datetime]]:
    """Executions of boxes on this machine that are not over: number, label, when they began."""
    engine, here = layer.engine, contracts.home()
    at, given, started = (
        engine.schema_prefix,
        engine.portable("c.arguments", "json"),
        engine.portable("x.started", "datetime"),
    )
    with engine.reading() as session:
        rows = session.all(
            f"select l.execution, {given}, {started} from {at}ledger_lineage l join {at}ledger_call c on c.execution = l.execution"
            f" join {at}ledger_execution x on x.id = l.execution"
            f" where not exists (select 1 from {at}ledger_outcome o where o.execution = l.execution) order by l.execution"
        )
    for number, text, began in rows:
        found = json.loads(text or "{}")
        if found.get("host") == here and isinstance(found.get("key"), str):
            yield number, found["key"], datetime.fromisoformat(began)


def known_keys(layer: Any) -> set[str]:
    """The labels of all boxes that have or had an execution."""
    at, given = layer.engine.schema_prefix, layer.engine.portable("c.arguments", "json")
    with layer.engine.reading() as session:
        rows = session.all(
            f"select {given} from {at}ledger_lineage l join {at}ledger_call c on c.execution = l.execution"
        )
    return {json.loads(row[0] or "{}").get("key") for row in rows}


def _host_runs() -> bool:
    """Whether a host of boxes answers here; none is started for this."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(state_directory() / "run" / "host.sock"))
        except OSError:
            return False
    return True


def of(layer: Any) -> Tending:
    """What this process looks after of a layer; made at its first use."""
    ledger = layer._ledger
    with ledger._mutex:
        found: Tending | None = getattr(ledger, "tending", None)
        if found is None or found._stop.is_set():
            found = ledger.tending = Tending(layer)
    return found


_started: list[subprocess.Popen[bytes]] = []


def ensure(layer: Any) -> str:
    """Somebody looks after this machine's boxes: a worker, or a process that is started for it and ends after the last one."""
    for known, holder, _, _ in layer.engine.leases(f"{KEEPER}{contracts.home()}"):
        if known == f"{KEEPER}{contracts.home()}" and not runners.dead(holder):
            return "running"
    _started[:] = [process for process in _started if process.poll() is None]
    place = str(layer.engine.address)
    place = os.path.dirname(os.path.abspath(place)) if os.path.basename(place) == ".layer" else place
    environment = dict(os.environ) | {"LAYER_DIR": place, "LAYER_STATE": str(state_directory())}
    (state_directory() / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(state_directory() / "run" / "keep.log", "ab") as output:
        _started.append(
            subprocess.Popen(
                [sys.executable, "-m", "livinglayer.edges.cli.main", "box", "keep"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True, cwd="/",
            )
        )  # fmt: skip
    return "started"
