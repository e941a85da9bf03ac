"""Triggers: rows that say which function follows a change, a time or another function's end.

What a trigger starts is an execution that is queued: committed with a key of its own, so that it is there exactly once
however many workers have seen the same cause. A worker runs it later.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from ..errors import Conflict, Denied, Invalid, LayerError, NotFound
from ..substrate.catalog import Branch
from ..substrate.engine import Session, marks
from ..substrate.ledger import MAIN_CHAIN, Execution, Tx
from ..substrate.past import definer
from ..substrate.permissions import WRITES, Policy
from ..substrate.predicates import Env, compile_predicate
from ..substrate.reads import clock
from ..substrate.schema import MAIN, SYSTEM, Entity, Schema
from ..substrate.values import datetime_text, json_text
from . import functions
from .blueprints import row_by_id, row_of
from .executions import traceparent
from .functions import Asking, Function, Outcome
from .schedule import parse
from .signature import Signature
from .verbs import Call, Items, Object, verb

STATUSES = ("done", "failed", "denied", "lost", "dead", "cancelled")
# What a function can be told of its cause, beside the arguments of the trigger. The first is given to one that declares none.
TOLD = {
    "on_entity": ("id", "entity", "op", "tx"),
    "after_function": ("execution", "function", "status", "result", "tx"),
    "schedule": ("time",),
}
RETRIES = {"attempts": 5, "backoff": 1.0, "factor": 2.0, "longest": 3600.0, "jitter": 0.2}
EXTRA = 15  # further attempts when others changed the same rows meanwhile
STEP = 10_000  # txs that are looked at together
BATCH = 100  # executions that are queued with one commit
LONG = 10 * 365 * 86400.0  # seconds of a lease that is a note, not a claim
LARGEST = 64 << 10  # characters of a result that is told to what follows
OPS = {"i": "insert", "u": "update", "d": "delete"}
log = logging.getLogger("livinglayer")


@dataclass(frozen=True)
class Trigger:
    """One trigger as its row says, at one version."""

    id: int
    name: str
    function: str
    on_entity: str | None
    on_actions: Sequence[str] | None
    predicate: str | None
    on_fields: Sequence[str] | None
    schedule: str | None
    after_function: str | None
    after_status: str | None
    arguments: Mapping[str, Any] | None
    branch: str
    enabled: bool
    retries: Mapping[str, Any] | None
    version: int  # the tx that wrote the row
    principal: int  # who wrote it: whom its executions act for
    wrong: str | None  # why it can't fire, of a row that no verb has written

    @property
    def kind(self) -> str:
        return next((name for name in TOLD if getattr(self, name) is not None), "schedule")


@dataclass
class Firing:
    """One execution that a trigger asks for."""

    trigger: Trigger
    key: str
    due: datetime
    told: Mapping[str, Any]
    cause_tx: int | None = None
    trace: str | None = None
    refused: LayerError | None = None
    status: str = "dead"  # of one that is refused


# Rows


def known(layer: Any, session: Session, as_of: int | None = None) -> list[Trigger]:
    """The triggers of main: now, or as they were."""
    epoch = clock(layer.engine, session)[1]

    def make() -> list[Trigger]:
        found = []
        for row in layer.catalog.rows(session, SYSTEM.by_name["trigger"], layer.catalog.chain(session, MAIN, as_of)):
            wrote = definer(layer.catalog, session, epoch, SYSTEM.by_name["trigger"], row)
            given = {each.name: row[each.name] for each in fields(Trigger) if each.name in row}
            given |= {"branch": row["branch"] or "main", "enabled": row["enabled"] is not False, "wrong": _wrong(row)}
            found.append(Trigger(**given, version=row["_tx"], principal=wrote))
        return found

    if as_of is not None and as_of < epoch:
        return make()
    triggers: list[Trigger] = layer.catalog._cached(("triggers", epoch), make)
    return triggers


def _wrong(row: Mapping[str, Any]) -> str | None:
    """What keeps a row from being a trigger at all, whoever wrote it."""
    if sum(row[name] is not None for name in TOLD) != 1:
        return "it names not one cause: on_entity, schedule or after_function"
    for name, kind in (("on_actions", list), ("on_fields", list), ("arguments", dict)):
        if row[name] is not None and not isinstance(row[name], kind):
            return f"{name} is no {kind.__name__}"
    if not all(isinstance(each, str) for each in (row["on_actions"] or []) + (row["on_fields"] or [])):
        return "on_actions and on_fields are texts"
    return None


def by_id(layer: Any, session: Session, number: int | None) -> Trigger | None:
    """A trigger as it is now."""
    return next((each for each in known(layer, session) if each.id == number), None)


def check(layer: Any, row: Mapping[str, Any], on: str = "main") -> Function:
    """The function a trigger calls; Invalid or NotFound when it could never fire. A trigger `on` a branch is for when it is merged."""
    name = row["name"]
    if not isinstance(name, str) or not name or len(name) > 200:
        raise Invalid(f"{name!r} can't be the name of a trigger")
    given = [kind for kind in TOLD if row.get(kind) is not None]
    if len(given) != 1:
        raise Invalid(
            f"trigger {name!r} names {len(given)} causes, not one", hint="one of on_entity, schedule, after_function"
        )
    kind, branch = given[0], on if row.get("branch") in (None, "main") else row["branch"]
    function = functions.load(layer, row["function"], branch)
    for other, names in (
        ("on_entity", ("on_actions", "predicate", "on_fields")),
        ("after_function", ("after_status",)),
    ):
        for each in names if kind != other else ():
            if row.get(each) is not None:
                raise Invalid(f"trigger {name!r}: {each} goes with {other}")
    if kind == "on_entity":
        _check_change(layer, row, branch)
    elif kind == "schedule":
        parse(row["schedule"])
    else:
        functions.load(layer, row["after_function"], branch)
        if row.get("after_status") not in (None, *STATUSES):
            raise Invalid(f"an execution never ends as {row['after_status']!r}", hint=", ".join(STATUSES))
    _check_arguments(name, kind, row.get("arguments"), function.signature)
    retries(row.get("retries"))
    return function


def _check_change(layer: Any, row: Mapping[str, Any], branch: str) -> None:
    schema: Schema = layer.schema(branch)
    entity = schema.get(row["on_entity"])
    if entity.kind == "ledger":
        raise Invalid(
            f"{entity.name!r} is the ledger's own: its rows are facts of a tx", hint="after_function, perhaps"
        )
    actions = row.get("on_actions")
    if actions is not None and (not isinstance(actions, list) or not actions or set(map(str, actions)) - set(WRITES)):
        raise Invalid(f"on_actions is a list of {', '.join(WRITES)}, not {actions!r:.80}")
    if row.get("predicate") is not None:
        compile_predicate(row["predicate"], schema, entity)
    fields = row.get("on_fields")
    if fields is not None and (not isinstance(fields, list) or not fields):
        raise Invalid(f"on_fields is a list of fields of {entity.name!r}, not {fields!r:.80}")
    for each in fields or ():
        entity.get(each)


def _check_arguments(name: str, kind: str, given: Any, signature: Signature) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise Invalid(f"arguments of trigger {name!r} are a dict, not {given!r:.80}")
    if signature.arguments is None:
        return
    for each in given or ():
        if each not in signature.arguments:
            raise Invalid(f"its function has no argument {each!r}", hint=f"it takes {', '.join(signature.arguments)}")
    for each, known in signature.arguments.items():
        if known.required and known.initial is None and each not in (given or {}) and each not in TOLD[kind]:
            raise Invalid(
                f"its function needs the argument {each!r}", hint=f"arguments, or one of {', '.join(TOLD[kind])}"
            )


def retries(*given: Any) -> dict[str, float]:
    """How often and when something is tried again, from the first of `given` that says so; Invalid says what is wrong."""
    found: Any = next((each for each in given if each is not None), {})
    if not isinstance(found, Mapping) or set(found) - set(RETRIES):
        raise Invalid(f"retries are {', '.join(RETRIES)}", hint='{"attempts": 5, "backoff": 1.0, "factor": 2.0}')
    most = {"attempts": 1000, "backoff": 86400, "factor": 100, "longest": 30 * 86400, "jitter": 1}
    for name, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (1 if name in ("attempts", "factor") else 0) <= value <= most[name]:
            raise Invalid(f"retries: {name} is a number up to {most[name]}, not {value!r:.60}")
    return {**RETRIES, **found}


def arguments(trigger: Trigger, signature: Signature, told: Mapping[str, Any]) -> dict[str, Any]:
    """What the function is given: what it takes of what is told, and the trigger's own arguments, which come first."""
    if signature.arguments is None:
        first = TOLD[trigger.kind][0] if trigger.kind != "schedule" else None
        taken = {name: value for name, value in told.items() if name == first}
    else:
        taken = {name: value for name, value in told.items() if name in signature.arguments}
    return {**taken, **(trigger.arguments or {})}


# Queuing


def queue(layer: Any, firings: Sequence[Firing]) -> list[int]:
    """Commit what triggers ask for, each once, with one commit; the ids of those that are new."""
    ledger, made = layer.ledger, list[int]()
    if not firings:
        return made
    with layer.engine.reading() as session:
        taken = _taken(layer, session, firings)
    functions_of: dict[tuple[int, int], tuple[Function, list[int]]] = {}
    prepared = [
        (each, _prepared(layer, each, functions_of))
        for each in firings
        if (each.trigger.principal, each.key) not in taken
    ]
    if not prepared:
        return made
    try:
        with ledger.work() as work:
            taken = _taken(layer, work.session, firings)
            for each, execution in prepared:
                if (each.trigger.principal, each.key) in taken:
                    continue
                taken.add((each.trigger.principal, each.key))
                tx = Tx(work, execution, reason=execution.reason, bare=True)
                digest = sha256(each.key.encode()).hexdigest()
                tx.fact("ledger_key", each.trigger.principal, each.key, digest, "null")
                if each.refused is None:
                    tx.finish()
                else:
                    tx.finish(end=each.status, outcome={"error": told_of(each.refused)})
                made.append(int(execution.id or 0))
    finally:
        for _, execution in prepared:
            ledger.let_go(execution)
    return made


def _taken(layer: Any, session: Session, firings: Sequence[Firing]) -> set[tuple[int, str]]:
    """The keys among those of firings that are there already, with whose they are."""
    keys = [each.key for each in firings]
    rows = session.all(
        f"select principal, key from {layer.engine.schema_prefix}ledger_key where key in ({marks(len(keys))})"
        f" and principal in ({marks(len(keys))})",
        [*keys, *(each.trigger.principal for each in firings)],
    )
    return {(principal, key) for principal, key in rows}


def told_of(error: LayerError) -> dict[str, Any]:
    """An error as an outcome keeps it."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def _prepared(layer: Any, firing: Firing, known: dict[tuple[int, int], tuple[Function, list[int]]]) -> Execution:
    """The execution of a firing, not recorded yet. One that can't be is refused, and that is recorded in its place."""
    trigger = firing.trigger
    asking = Asking(
        trigger.principal, trigger.branch, None, firing.cause_tx, trigger.id, None, firing.key, firing.trace,
        f"trigger {trigger.name}", due=datetime_text(firing.due),
    )  # fmt: skip
    given: Mapping[str, Any] = firing.told
    try:
        if trigger.wrong is not None:
            raise Invalid(f"trigger {trigger.name!r}: {trigger.wrong}")
        found = known.get((trigger.id, trigger.version))
        if found is None:
            loaded = functions.load(layer, trigger.function, trigger.branch)
            found = known[trigger.id, trigger.version] = (loaded, functions.decide(layer, asking, loaded))
        function, permissions = found
        given = arguments(trigger, function.signature, firing.told)
        bound = function.signature.bind(function.name, given)
        return functions.intent(layer, function, bound, asking, permissions)
    except LayerError as error:
        firing.refused = firing.refused or error
    made: Execution = layer.ledger.open(
        trigger.principal, {}, "function", asking.reason, None, traceparent(asking.trace)
    )
    made.call = {
        "verb": "function.call", "arguments": json_text("arguments", dict(given)), "trigger": trigger.id,
        "cause_tx": firing.cause_tx, "attempt": 1, "due": asking.due, "key": firing.key,
    }  # fmt: skip
    return made


def again(layer: Any, number: int, asking: Asking, given: Mapping[str, Any], function: str) -> Execution:
    """A further execution of a function for what another one did not finish, not recorded yet."""
    loaded = functions.load(layer, function, asking.branch)
    bound = loaded.signature.bind(loaded.name, given)
    asking.parent = number
    return functions.intent(layer, loaded, bound, asking, functions.decide(layer, asking, loaded))


def delay(policy: Mapping[str, float], attempt: int) -> float:
    """Seconds from the end of an attempt to the next one."""
    wait = min(policy["longest"], policy["backoff"] * policy["factor"] ** min(attempt - 1, 64))
    return wait * random.uniform(1 - policy["jitter"], 1 + policy["jitter"])


def after_failure(
    layer: Any, execution: Execution, function: Function, asking: Asking, outcome: Outcome, moment: datetime
) -> tuple[str, Execution | None]:
    """How a queued execution that failed ends, and the one that tries again: none when it was the last, or pointless."""
    conflicted = outcome.run is not None and outcome.run.conflicted
    with layer.engine.reading() as session:
        trigger = by_id(layer, session, asking.trigger)
    try:
        policy = retries(None if trigger is None else trigger.retries, function.retries)
    except Invalid:
        policy = dict(RETRIES)
    if isinstance(outcome.error, Denied) or asking.attempt >= policy["attempts"] + (EXTRA if conflicted else 0):
        return "dead", None
    wait = random.uniform(0, min(1.0, 0.01 * 2**asking.attempt)) if conflicted else delay(policy, asking.attempt)
    call = execution.call or {}
    following = Asking(
        asking.principal, asking.branch, None, asking.cause_tx, asking.trigger, asking.contract, call.get("key"), asking.trace,
        asking.reason, asking.attempt + 1, datetime_text(moment + timedelta(seconds=wait)),
    )  # fmt: skip
    try:
        given = json.loads(call.get("arguments") or "{}")
        return outcome.status, again(layer, int(execution.id or 0), following, given, function.name)
    except LayerError:
        return "dead", None  # the function is gone, or may not be called any more


# What happened


@dataclass
class Feed:
    """What happened since the last look, and what triggers make of it. Losing its place only means looking again."""

    layer: Any
    now: Callable[[], datetime]
    place: int | None = None  # the last tx that was looked at
    _pending: list[Firing] = field(default_factory=list)  # read and not queued yet
    _end: int | None = None  # up to where that goes
    _times: dict[int, datetime] = field(default_factory=dict)  # of schedules: what was fired last
    _waits: dict[tuple[int, int], datetime] = field(default_factory=dict)  # and from when on to look again
    _arrival: dict[int, datetime] = field(
        default_factory=dict
    )  # of triggers: when the next one may start (a leaky bucket)
    _broken: set[tuple[int, int]] = field(default_factory=set)

    def look(self, seconds: float = math.inf) -> list[int]:
        """Queue what changes and ends of functions ask for, up to now or for so long; the ids of what is new."""
        made, deadline = list[int](), time.monotonic() + seconds
        while self._step():
            while self._pending:
                now, self._pending = self._pending[:BATCH], self._pending[BATCH:]
                made += queue(self.layer, now)
                if time.monotonic() > deadline:
                    return made
        return made

    @property
    def behind(self) -> bool:
        """Whether the last look ended before it was through."""
        return bool(self._pending)

    def again(self) -> None:
        """Somebody else has looked meanwhile: go on from where they have come to."""
        self.place, self._pending = None, []

    def _step(self) -> bool:
        """Read what happened next; False when there is nothing."""
        if self._pending:
            return True
        if self._end is not None:
            self.place, self._end = self._end, None
        with self.layer.engine.reading() as session:
            last, epoch = clock(self.layer.engine, session)
            if self.place is None:
                self.place = self._lost_place(session)
            if self.place >= last:
                return False
            # The triggers are those of the tx that is looked at, so a step ends before their next change.
            end, triggers = last, known(self.layer, session)
            if epoch > self.place + 1:
                triggers = known(self.layer, session, self.place + 1)
                end = self._next_change(session, self.place + 1, last)
            now_enabled = {each.id for each in known(self.layer, session) if each.enabled}
            for each in triggers:
                if each.enabled and each.wrong:
                    self._break(each, Invalid(f"trigger {each.name!r}: {each.wrong}"), each.version)
            wanted = [each for each in triggers if each.enabled and not each.wrong and each.id in now_enabled]
            self._end = min(end, self.place + STEP) if wanted else end
            self._pending = [*self._fired(session, wanted, self.place, self._end)] if wanted else []
        return True

    def keep(self, oldest: int) -> None:
        """Note the place, and the tx of the oldest execution that is not over, for whoever looks next."""
        self.layer.engine.lease("feed/place", "feed", LONG, f"{self.place} {oldest}")

    @staticmethod
    def kept(layer: Any) -> tuple[int, int] | None:
        """What was noted."""
        for _, _, _, value in layer.engine.leases("feed/place"):
            place, _, oldest = (value or "").partition(" ")
            if place.isdecimal() and oldest.isdecimal():
                return int(place), int(oldest)
        return None

    def _lost_place(self, session: Session) -> int:
        """Where to go on: what was noted, else the last cause that became an execution: causes are taken in their order."""
        noted = self.kept(self.layer)
        if noted is not None:
            return noted[0]
        at = self.layer.engine.schema_prefix
        row = session.one(
            f"select max(cause_tx) from {at}ledger_call where (key like 'trigger/%' or key like 'after/%') and attempt = 1"
        )
        pruned = session.one(f"select max(horizon) from {at}ledger_prune")
        first = (pruned[0] or 0) if pruned else 0
        if row is not None and row[0] is not None:
            return max(first, int(row[0]) - 1)
        # Nothing was ever fired: begin where there was a trigger first.
        return max(first, self._next_change(session, 0, clock(self.layer.engine, session)[0]))

    def _next_change(self, session: Session, tx: int, last: int) -> int:
        """The last tx before the triggers change after `tx`, or `last`."""
        row = session.one(
            f"select min(tx) from {self.layer.engine.schema_prefix}ledger_change where branch = ? and tx > ? and tx <= ? and entity = ?",
            (MAIN, tx, last, SYSTEM.by_name["trigger"].id),
        )
        return last if row is None or row[0] is None else int(row[0]) - 1

    def _fired(self, session: Session, triggers: Sequence[Trigger], first: int, last: int) -> Iterator[Firing]:
        found: list[tuple[int, Trigger, str, Mapping[str, Any]]] = []
        branches: dict[str, list[Trigger]] = {}
        for each in triggers:
            branches.setdefault(each.branch, []).append(each)
        for name, here in branches.items():
            try:
                branch = self.layer.catalog.branch(session, name)
            except NotFound:
                continue
            found += self._changes(session, branch, [each for each in here if each.on_entity], first, last)
            found += self._ends(session, branch, [each for each in here if each.after_function], first, last)
        chains: dict[int, tuple[list[str], str | None]] = {}
        for tx, trigger, key, told in sorted(found, key=lambda each: each[0]):
            if tx not in chains:
                chains[tx] = ancestry(self.layer, session, tx)
            names, trace = chains[tx]
            firing = Firing(trigger, key, self._slot(trigger), told, tx, trace)
            if len(names) >= self.layer.settings.trigger_depth:
                firing.refused, firing.status = _cycle([*names, trigger.name]), "failed"
            yield firing

    def _slot(self, trigger: Trigger) -> datetime:
        """When the next execution of a trigger may start: at once, unless a minute's worth has started already."""
        moment, minute = self.now(), timedelta(minutes=1)
        arrival = max(self._arrival.get(trigger.id, moment), moment)
        self._arrival[trigger.id] = arrival + minute / max(1, self.layer.settings.trigger_rate)
        return max(moment, arrival - minute)

    def _changes(
        self, session: Session, branch: Branch, triggers: Sequence[Trigger], first: int, last: int
    ) -> Iterator[tuple[int, Trigger, str, Mapping[str, Any]]]:
        if not triggers:
            return
        layer = self.layer
        epoch = clock(layer.engine, session)[1]
        names = {each.on_entity for each in triggers}
        rows = session.all(
            f"select tx, entity, id, op from {layer.engine.schema_prefix}ledger_change where branch = ? and tx > ? and tx <= ? order by tx",
            (branch.id, first, last),
        )
        for tx, number, row, op in rows:
            moment = _Moment(layer, session, branch, tx, epoch)
            entity = moment.schema.by_id.get(number)
            if entity is None or entity.name not in names:
                continue
            for trigger in triggers:
                if trigger.on_entity == entity.name and OPS[op] in (trigger.on_actions or WRITES):
                    try:
                        if not moment.matches(trigger, entity, row, op):
                            continue
                    except LayerError as error:
                        self._break(trigger, error, tx)
                        continue
                    told = {"id": row, "entity": entity.name, "op": OPS[op], "tx": tx}
                    yield tx, trigger, f"trigger/{trigger.id}/{tx}/{entity.name}/{row}", told

    def _break(self, trigger: Trigger, error: LayerError, tx: int) -> None:
        """A trigger whose row can't be understood any more: said once for each of its versions."""
        if (trigger.id, trigger.version) not in self._broken:
            self._broken.add((trigger.id, trigger.version))
            key = f"broken/{trigger.id}/{trigger.version}"
            queue(self.layer, [Firing(trigger, key, self.now(), {}, tx, None, error)])

    def _ends(
        self, session: Session, branch: Branch, triggers: Sequence[Trigger], first: int, last: int
    ) -> Iterator[tuple[int, Trigger, str, Mapping[str, Any]]]:
        layer, by_function = self.layer, dict[int, list[Trigger]]()
        for each in triggers:
            try:
                number = row_of(layer, "function", str(each.after_function), branch.name)["id"]
            except NotFound:
                continue
            by_function.setdefault(number, []).append(each)
        if not by_function:
            return
        at, result = layer.engine.schema_prefix, layer.engine.portable("o.result", "json")
        # What was refused for being a cycle never began: its end must not go round once more.
        rows = session.all(
            f"select o.tx, o.execution, o.status, {result}, c.function, x.principal from {at}ledger_outcome o"
            f" join {at}ledger_call c on c.execution = o.execution join {at}ledger_execution x on x.id = o.execution"
            f" where o.tx > ? and o.tx <= ? and (c.tx < o.tx or o.status = 'dead') and c.branch = ? and c.function in ({marks(len(by_function))}) order by o.tx",
            (first, last, branch.id, *by_function),
        )
        readers = {each.principal: _reads_results(layer, session, each.principal) for each in triggers}
        for tx, execution, status, said, function, principal in rows:
            for trigger in by_function[function]:
                if trigger.after_status in (None, status) and status != "duplicate":
                    value = json.loads(said).get("value") if said is not None and len(said) <= LARGEST else None
                    if principal != trigger.principal and not readers[trigger.principal]:
                        value = None  # what others were told is for whoever may read it
                    told = {
                        "execution": execution,
                        "function": trigger.after_function,
                        "status": status,
                        "result": value,
                        "tx": tx,
                    }
                    yield tx, trigger, f"after/{trigger.id}/{execution}", told

    # Times

    def times(self) -> list[int]:
        """Queue what schedules ask for; times that were missed are one execution, not many."""
        firings, notes, moment = [], [], self.now()
        with self.layer.engine.reading() as session:
            for trigger in known(self.layer, session):
                if trigger.schedule is None or not trigger.enabled or trigger.wrong:
                    continue
                if moment < self._waits.get((trigger.id, trigger.version), moment):
                    continue
                try:
                    schedule = parse(trigger.schedule)
                except Invalid as error:
                    self._break(trigger, error, trigger.version)
                    continue
                hour, following = schedule.previous(moment), schedule.following(moment)
                if hour is not None and hour > self._last_time(session, trigger):
                    key, told = f"cron/{trigger.id}/{datetime_text(hour)}", {"time": datetime_text(hour)}
                    firings.append(Firing(trigger, key, hour, told))
                    notes.append((trigger.id, hour))
                if following is not None:
                    self._waits[trigger.id, trigger.version] = following
        made = queue(self.layer, firings)
        for number, hour in notes:
            self._times[number] = hour
            self.layer.engine.lease(f"cron/{number}", "cron", LONG, datetime_text(hour))
        return made

    def _last_time(self, session: Session, trigger: Trigger) -> datetime:
        """The last time that was fired, or from which on the trigger is as it is."""
        since = self.layer.catalog.time_of(session, trigger.version)
        if trigger.id not in self._times:
            noted = [
                value
                for name, _, _, value in self.layer.engine.leases(f"cron/{trigger.id}")
                if name == f"cron/{trigger.id}"
            ]
            if noted and noted[0]:
                self._times[trigger.id] = datetime.fromisoformat(noted[0])
            else:
                engine = self.layer.engine
                row = session.one(
                    f"select {engine.portable('max(due)', 'datetime')} from {engine.schema_prefix}ledger_call where trigger = ? and attempt = 1"
                    " and key like 'cron/%'",
                    (trigger.id,),
                )
                self._times[trigger.id] = datetime.fromisoformat(row[0]) if row and row[0] else since
        return max(since, self._times[trigger.id])


def _reads_results(layer: Any, session: Session, principal: int) -> bool:
    """Whether a principal may read what executions gave, of everybody."""
    epoch = clock(layer.engine, session)[1]
    schema = layer.catalog.schema(session, MAIN_CHAIN, epoch)
    policy = layer.catalog.policy(session, principal, epoch)
    rules = policy.rules("read", schema, SYSTEM.by_name["execution"], "main")
    whole = any(not where and (g.fields is None or "result" in g.fields) for g, where in rules.allows)
    return whole and not rules.denies


class _Moment:
    """A branch as a tx left it, to test what it changed."""

    def __init__(self, layer: Any, session: Session, branch: Branch, tx: int, epoch: int) -> None:
        self.layer, self.session, self.branch, self.tx, self.epoch = layer, session, branch, tx, epoch
        catalog = layer.catalog
        current = tx >= epoch  # what the schema is now
        chain = MAIN_CHAIN if branch.id == MAIN else catalog.chain(session, branch)
        self.schema: Schema = catalog.schema(session, chain if current else catalog.chain(session, branch, tx), epoch)

    def row(self, entity: Entity, number: int, tx: int) -> dict[str, Any] | None:
        catalog = self.layer.catalog
        table = catalog.table(self.session, entity.store, self.epoch)
        found = table.get(self.session, catalog.chain(self.session, self.branch, tx), number)
        return None if found is None else table.named(entity, found.values, number)

    def seen(self, policy: Policy, entity: Entity, number: int, tx: int) -> dict[str, Any] | None:
        """A row as a principal may read it: what it may not is null, and a row it may not is not there."""
        row = self.row(entity, number, tx)
        rules = policy.rules("read", self.schema, entity, self.branch.name)
        if row is None or rules.everything:
            return row

        def follow(name: str, other: int) -> Mapping[str, Any] | None:
            return self.row(self.schema.get(name), other, tx)

        if rules.refusal(frozenset(), row, follow):
            return None
        return {k: v if k == "id" or not rules.refusal(frozenset({k}), row, follow) else None for k, v in row.items()}

    def matches(self, trigger: Trigger, entity: Entity, number: int, op: str) -> bool:
        """Whether the change is one the trigger speaks of, as far as whoever wrote it may read the row."""
        policy, tx = self.layer.catalog.policy(self.session, trigger.principal, self.epoch), self.tx - (op == "d")
        sees = policy.rules("read", self.schema, entity, self.branch.name).everything
        if sees and trigger.predicate is None and (op != "u" or trigger.on_fields is None):
            return True
        row = self.seen(policy, entity, number, tx)
        if row is None:
            return False
        if op == "u" and trigger.on_fields is not None:
            before = self.seen(policy, entity, number, self.tx - 1)
            for each in trigger.on_fields:
                entity.get(each)
            if before is not None and all(before[f] == row[f] for f in trigger.on_fields):
                return False
        if trigger.predicate is None:
            return True

        def follow(name: str, other: int) -> Mapping[str, Any] | None:
            return self.seen(policy, self.schema.get(name), other, tx)

        predicate = compile_predicate(trigger.predicate, self.schema, entity)
        return predicate.test(Env(row, policy.me, follow)) is True


def ancestry(layer: Any, session: Session, tx: int) -> tuple[list[str], str | None]:
    """The triggers behind a tx, the first one first, and the trace it belongs to."""
    at, names, trace = layer.engine.schema_prefix, list[str](), None
    of_tx = f"select execution from {at}ledger_tx where tx = ?"
    row = session.one(of_tx, (tx,))
    execution = row[0] if row else None
    for _ in range(1000):
        if execution is None or len(names) > layer.settings.trigger_depth:
            break
        found = session.one(
            f"select x.parent, x.trace, c.trigger, c.cause_tx from {at}ledger_execution x left join {at}ledger_call c on c.execution = x.id where x.id = ?",
            (execution,),
        )
        if found is None:
            break
        parent, own_trace, trigger, cause = found
        trace = trace or own_trace
        if trigger is None:
            execution = parent
            continue
        try:
            names.append(str(row_by_id(layer, "trigger", trigger)["name"]))
        except NotFound:
            names.append(f"trigger/{trigger}")
        row = session.one(of_tx, (cause,)) if cause is not None else None
        execution = row[0] if row else None
    return names[::-1], trace


def _cycle(names: list[str]) -> LayerError:
    last = names[-1]
    earlier = [place for place, name in enumerate(names[:-1]) if name == last]
    shown = names[earlier[-1] :] if earlier else names
    what = "trigger cycle" if earlier else "too many triggers in a row"
    return Conflict(
        f"{what}: {' → '.join(shown)}", hint=f"it was not fired after {len(names) - 1}; give a predicate that ends it"
    )


# Verbs


@verb("trigger.define", sealed=True)
def _define(
    call: Call, *, name: str, function: str, on_entity: str | None = None, on_actions: Items | None = None, predicate: str | None = None,
    on_fields: Items | None = None, schedule: str | None = None, after_function: str | None = None, after_status: str | None = None,
    given: Object | None = None, on_branch: str = "main", enabled: bool = True, retries: Object | None = None, description: str | None = None,
) -> Any:  # fmt: skip
    """Make or change a trigger, which from then on acts as whoever wrote it; gives its id. `given` are arguments for the function."""
    row = {
        "name": name, "function": function, "on_entity": on_entity, "on_actions": on_actions, "predicate": predicate, "on_fields": on_fields,
        "schedule": schedule, "after_function": after_function, "after_status": after_status, "arguments": given, "branch": on_branch,
        "enabled": enabled, "retries": retries, "description": description,
    }  # fmt: skip
    found = check(call.layer, row)
    functions.decide(call.layer, Asking(call.asking.principal, on_branch), found)
    return call.layer.upsert("trigger", row, on=["name"], branch=call.branch, reason=call.reason)


@verb("trigger.remove", sealed=True)
def _remove(call: Call, *, name: str) -> Any:
    """Take a trigger away; what it has queued is still run."""
    row = row_of(call.layer, "trigger", name, call.branch)
    return call.layer.delete("trigger", row["id"], branch=call.branch, reason=call.reason)


@verb("trigger.enable", sealed=True)
def _enable(call: Call, *, name: str, enabled: bool = True) -> Any:
    """Let a trigger fire, or not any more; from then on it acts as whoever did this."""
    row = row_of(call.layer, "trigger", name, call.branch)
    if enabled:
        functions.decide(call.layer, Asking(call.asking.principal), check(call.layer, row))
    return call.layer.update("trigger", row["id"], {"enabled": enabled}, branch=call.branch, reason=call.reason)


@verb("execution.retry")
def _retry(call: Call, *, id: int) -> Any:
    """Queue an execution that failed once more, as whoever asks for it; gives the new one's id."""
    layer, ledger, at = call.layer, call.layer.ledger, call.layer.engine.schema_prefix
    if not layer.query("select id from execution where id = :id", {"id": id}):
        raise NotFound(f"there is no execution {id}", hint="layer executions")
    given = layer.engine.portable("c.arguments", "json")
    with layer.engine.reading() as session:
        row = session.one(
            f"select o.status, c.function, {given}, c.branch, c.trigger, c.cause_tx, c.contract, x.trace from {at}ledger_execution x"
            f" join {at}ledger_call c on c.execution = x.id left join {at}ledger_outcome o on o.execution = x.id where x.id = ?",
            (id,),
        )
        if row is None:
            raise NotFound(f"there is no execution {id} that could be tried again")
        status, function, given, branch, trigger, cause, contract, trace = row
        fired = by_id(layer, session, trigger)
        name = "main" if branch in (None, MAIN) else layer.catalog.branch_by_id(session, branch).name
    if status in (None, "done", "duplicate"):
        raise Conflict(f"execution {id} is {status or 'not over'}", hint="only what failed is tried again")
    if function is None and fired is None:
        raise NotFound(f"execution {id} called no function", hint="call the verb again")
    called = fired.function if function is None and fired is not None else _function_name(layer, function, name)
    asking = Asking(
        call.asking.principal, name, None, cause, trigger, contract, None, trace, f"execution {id}, once more",
        due=datetime_text(datetime.now(UTC)),
    )  # fmt: skip
    made = again(layer, id, asking, json.loads(given or "{}"), called)

    def run(work: Any) -> int:
        tx = Tx(work, call.execution, reason=call.reason, bare=True)
        number = tx.intend(made)
        tx.finish()
        return number

    try:
        return int(ledger.submit(run))
    finally:
        ledger.let_go(made)


def _function_name(layer: Any, number: int, branch: str) -> str:
    return str(row_by_id(layer, "function", number, branch)["name"])
