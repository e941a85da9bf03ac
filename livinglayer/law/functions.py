"""Functions: logic as rows. A call runs the code in a box of its blueprint, with a capability for exactly its scope."""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from ..errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound, TimedOut
from ..sandbox.blueprint import Blueprint
from ..substrate.ledger import MAIN_CHAIN, Execution, Scope, Tx, now
from ..substrate.past import definer
from ..substrate.reads import clock
from ..substrate.schema import MAIN, SYSTEM
from ..substrate.values import json_text
from . import bridging, runners, usage
from . import secrets as vault
from .blueprints import definer_of, guard, row_by_id, row_of, shape
from .boxes import Program, drive
from .executions import Run, digest, traceparent
from .signature import Signature, dumps

LANGUAGES = ("python", "javascript", "sql", "executable")
HARNESSED = ("python", "javascript")  # their clocks and their chance are recorded
TIMEOUT = 60.0
TRIES = 5  # of a call whose rows others changed meanwhile
LARGE = 256 << 10  # bytes of a result that is stored by content
TAPE = 4096  # bytes of a tape that its step holds itself
TAPE_MOST = 1 << 20  # of one that is kept


@dataclass(frozen=True)
class Function:
    """One function as its row says, at one version."""

    id: int
    name: str
    version: int  # the tx that wrote the row
    language: str
    code: str
    signature: Signature
    blueprint: Mapping[str, Any] | None
    reads: Mapping[str, Any]
    writes: Mapping[str, Any]
    calls: tuple[str, ...]
    projections: tuple[str, ...]
    timeout: float
    rights: str
    retries: Mapping[str, Any] | None
    deterministic: bool
    definer: int

    @property
    def shape(self) -> Blueprint:
        return shape(self.blueprint)


def parts(what: str, given: Any) -> dict[str, Any]:
    """Declared reads or writes by entity, from a list of names or a dict; Invalid says what is wrong."""
    if given is None:
        return {}
    if isinstance(given, list | tuple) and all(isinstance(name, str) for name in given):
        given = {name: {} for name in given}
    if not isinstance(given, Mapping) or not all(isinstance(part, Mapping | None) for part in given.values()):
        raise Invalid(f"{what} are a list of entities, or a dict: entity -> fields, where")
    return {name: dict(part or {}) for name, part in given.items()}


def load(layer: Any, name: str, branch: str = "main", as_of: int | None = None) -> Function:
    """A function by its name, or NotFound."""
    row = row_of(layer, "function", name, branch, as_of)
    return _known(layer, row, branch, as_of)


def by_id(layer: Any, number: int, version: int | None, branch: str = "main") -> Function:
    """A function that is there now, at the version that is given, or NotFound."""
    row = row_by_id(layer, "function", number, branch)
    if version is None or row["_tx"] == version:
        return _known(layer, row, branch, None)
    return _known(layer, row_by_id(layer, "function", number, branch, version), branch, version)


def as_it_was(layer: Any, number: int, version: int, branch: str, state: int) -> Function:
    """A function at a version, with its blueprint as it was at a moment; NotFound when that is forgotten."""
    row = row_by_id(layer, "function", number, branch, version)
    if row["_tx"] != version:
        raise NotFound(f"function/{number} at version {version} is forgotten")
    return _known(layer, row, branch, state)


def _known(layer: Any, row: Mapping[str, Any], branch: str, as_of: int | None) -> Function:
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]

        def make() -> Function:
            wrote = definer(layer.catalog, session, epoch, SYSTEM.by_name["function"], row, branch)
            blueprint = (
                None if row["blueprint"] is None else row_by_id(layer, "blueprint", row["blueprint"], branch, as_of)
            )
            declared = parts("reads", row["reads"])
            calls = declared.pop("function", {}).get("names", ())
            shown = declared.pop("projection", {}).get("names", ())
            return Function(
                row["id"], row["name"], row["_tx"], row["language"], row["code"] or "", Signature.of(row["name"], row["signature"]),
                blueprint, declared, parts("writes", row["writes"]), tuple(calls), tuple(shown),
                row["timeout"] or TIMEOUT, row["rights"] or "caller", row["retries"],
                row["deterministic"] is not False, wrote,
            )  # fmt: skip

        if as_of is not None or branch != "main":
            return make()
        known: Function = layer.catalog._cached(("function", row["id"], row["_tx"], epoch), make)
        return known


def check(layer: Any, values: Mapping[str, Any], branch: str = "main") -> None:
    """Refuses a function that could never run."""
    from .verbs import VERBS

    name = values.get("name")
    if not isinstance(name, str) or name.count(".") != 1 or not all(part.isidentifier() for part in name.split(".")):
        raise Invalid(f"{name!r} can't be the name of a function", hint="noun.verb, e.g. ticket.triage")
    if name in VERBS or name.split(".")[0] in {verb.split(".")[0] for verb in VERBS}:
        raise Invalid(f"{name!r} is a name of the layer's own verbs", hint="choose another noun")
    if values.get("language") not in LANGUAGES:
        raise Invalid(f"there is no language {values.get('language')!r}", hint=", ".join(LANGUAGES))
    Signature.of(name, values.get("signature"))
    schema = layer.schema(branch)
    for what in ("reads", "writes"):
        declared = parts(what, values.get(what))
        if what == "reads":
            declared.pop("function", None), declared.pop("projection", None)
        for entity in declared:
            schema.get(entity)
    Scope.of({"entities": parts("writes", values.get("writes"))})
    for called in parts("reads", values.get("reads")).get("function", {}).get("names", ()):
        if called in VERBS:
            raise Invalid(f"{name} can't call {called}: a function calls functions", hint="declare what it writes")
    timeout = values.get("timeout")
    if timeout is not None and not 0 < timeout <= 86_400:
        raise Invalid(f"timeout is a number of seconds up to 86,400, not {timeout!r}")
    if values.get("language") == "python":
        try:
            compile(values.get("code") or "", name, "exec")
        except (
            SyntaxError,
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:  # code may be nested too deeply to be read
            raise Invalid(f"{name}: {error}", hint="the code is Python that defines a function") from None


@dataclass
class Asking:
    """Who asks for an execution, and in what connection."""

    principal: int
    branch: str = "main"
    parent: int | None = None
    cause_tx: int | None = None
    trigger: int | None = None
    contract: int | None = None
    key: str | None = None
    trace: str | None = None
    reason: str | None = None
    attempt: int = 1
    due: str | None = None
    runner: str | None = None
    begun: Callable[[Execution], None] | None = None  # is told of a verb's execution before it does anything
    failing: Callable[[Outcome], tuple[str, Callable[[Tx], Any] | None]] | None = (
        None  # the status to fail with, and what goes with it
    )


@dataclass
class Outcome:
    """How an execution ended."""

    execution: int
    status: str  # done, failed, denied
    value: Any = None
    error: LayerError | None = None
    tx: int | None = None
    steps: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    run: Run | None = None


class Raised(LayerError):
    """The function itself failed: it raised, exited, or was ended for going over a limit."""

    code, status, exit_code = "failed", 422, 10


def decide(layer: Any, asking: Asking, function: Function) -> list[int]:
    """The permission rows that allow the call; Denied (or NotFound where nothing may be known) when none do."""
    with layer.engine.reading() as session:
        policy = layer.catalog.policy(session, asking.principal, clock(layer.engine, session)[1])
        resource = f"function:{function.name}"
        allowed, grants = policy.outright("call", resource, asking.branch)
        if allowed and function.rights == "definer" and not function.definer:
            raise Denied(
                f"{function.name} was written by several, so it has nobody's rights",
                hint="remove it and define it anew; whoever does gives it theirs",
                action="call",
                resource=resource,
            )
        if allowed:
            return [grant.id for grant in grants]
        raise policy.refusal("call", resource, grants, called=function.name, named=True)


def intent(
    layer: Any, function: Function, bound: Mapping[str, Any], asking: Asking, permissions: list[int]
) -> Execution:
    """An execution of a function, not recorded yet."""
    scope = {"branch": asking.branch, "entities": function.writes}
    made: Execution = layer.ledger.open(
        asking.principal, scope, "function", asking.reason, asking.parent, traceparent(asking.trace)
    )
    if function.rights == "definer":
        made.authority = function.definer
    blueprint = function.shape
    made.tier, made.blueprint = blueprint.tier, None if function.blueprint is None else function.blueprint["name"]
    with layer.engine.reading() as session:
        state = clock(layer.engine, session)[0]
        branch = MAIN if asking.branch == "main" else layer.catalog.branch(session, asking.branch, open_only=True).id
    made.call = {
        "verb": "function.call", "function": function.id, "version": function.version, "arguments": json_text("arguments", dict(bound)),
        "branch": branch, "state": state, "contract": asking.contract, "trigger": asking.trigger, "cause_tx": asking.cause_tx,
        "attempt": asking.attempt, "due": asking.due, "key": asking.key, "seed": secrets.token_hex(16) if function.deterministic else None,
        "snapshot": None, "permissions": json.dumps(permissions), "runner": asking.runner,
    }  # fmt: skip
    return made


def call(layer: Any, name: str, arguments: Mapping[str, Any], asking: Asking) -> Outcome:
    """Run a function to its end: recorded before and after, retried when what it read has changed meanwhile."""
    with layer.engine.snapshot():
        function = load(layer, name, asking.branch)
        permissions = decide(layer, asking, function)
        bound = function.signature.bind(name, arguments)
        request = sha256(dumps([name, bound, asking.branch])).hexdigest()
        if asking.key is not None and (known := recall(layer, asking.principal, asking.key, request)) is not None:
            return known
    with runners.of(layer).running() as runner:
        for attempt in range(1, TRIES + 1):
            asking.attempt = max(asking.attempt, attempt)
            asking.runner = asking.runner or runner
            with layer.engine.snapshot():
                usage.admit(layer, asking.principal, asking.contract)
                execution = intent(layer, function, bound, asking, permissions)
            layer.ledger.intend(execution)
            outcome = perform(layer, function, bound, execution, asking, request)
            if not isinstance(outcome.error, Conflict) or outcome.run is None or not outcome.run.conflicted:
                break
            time.sleep(random.uniform(0, 0.002 * 2**attempt))
            asking.parent = asking.parent or execution.id
    return outcome


def recall(layer: Any, principal: int, key: str, request: str) -> Outcome | None:
    """What a call with this idempotency key gave before; Conflict when it was another call."""
    at = layer.engine.schema_prefix
    with layer.engine.reading() as session:
        row = session.one(
            f"select digest, result, tx from {at}ledger_key where principal = ? and key = ?", (principal, key)
        )
    if row is None:
        return None
    if row[0] != request:
        raise Conflict(f"idempotency key {key!r} was used for another request", hint="use a new key")
    kept = json.loads(row[1])
    return Outcome(kept["execution"], "done", kept["value"], tx=row[2])


def perform(
    layer: Any,
    function: Function,
    bound: Mapping[str, Any],
    execution: Execution,
    asking: Asking,
    request: str | None = None,
) -> Outcome:
    """Act and commit the outcome of an execution that is intended. Never raises for what the function did."""
    run = Run(layer, execution, **capability(function, asking.branch))
    started = time.monotonic()
    value, error, spent = act(layer, run, function, bound)
    outcome = settle(layer, run, function, asking, value, error, spent, time.monotonic() - started, request)
    outcome.run = run
    return outcome


def capability(function: Function, branch: str) -> dict[str, Any]:
    """What a run of a function may do, beside its scope."""
    return {
        "branch": branch,
        "reads": function.reads,
        "calls": function.calls,
        "projections": function.projections,
        "voucher": function.definer,
        "about": {"function": function.name, "version": function.version},
    }


def act(
    layer: Any,
    run: Run,
    function: Function,
    bound: Mapping[str, Any],
    adjust: Callable[[Program], Any] | None = None,
    as_of: int | None = None,
) -> tuple[Any, LayerError | None, Any]:
    """Run the code to its end: what it gave, or why it failed, and what the host tells of it."""
    value, error, spent = None, None, None
    try:
        if function.language == "sql":
            value = _select(run, function, bound)
        else:
            program = prepare(layer, run, function, bound, as_of)
            if adjust is not None:
                adjust(program)
            spent = drive(run, program)
            value = _value(run, program, spent)
        value = function.signature.check(function.name, value)
        if isinstance(value, float | int | str | list | dict) and len(dumps(value)) > LARGE:
            raise LimitExceeded(
                f"{function.name} returned more than {LARGE} bytes", hint="keep large content as an artifact"
            )
    except LayerError as failure:
        error = failure
    except Exception as failure:
        error = LayerError(f"the layer failed: {type(failure).__name__}: {failure}")
    run.open = False
    return value, error, spent


def _select(run: Run, function: Function, bound: Mapping[str, Any]) -> Any:
    params = {name: bound.get(name) for name in function.signature.arguments or bound}  # what is not given is null
    answer = json.loads(run.answer("POST", "query", "", {"sql": function.code, "params": params}, b""))
    return answer["rows"]


def prepare(layer: Any, run: Run, function: Function, bound: Mapping[str, Any], as_of: int | None = None) -> Program:
    """What is run in which box, with the secrets of now or of a moment."""
    blueprint = function.shape
    if function.blueprint is not None:
        guard(layer, blueprint, function.definer, definer_of(layer, "blueprint", function.blueprint, run.branch))
    given: dict[str, Any] = {
        "name": function.name,
        "arguments": dict(bound),
        "seed": run.execution.call and run.execution.call.get("seed"),
    }
    values: Mapping[str, str] = {}
    if function.blueprint is not None and (function.blueprint["secrets"] or function.blueprint["egress"]):
        values, egress, run.readable = vault.for_box(
            layer, function.blueprint, run.deciding, branch=run.branch, as_of=as_of, author=function.definer
        )
        blueprint = blueprint.changed(egress=tuple(egress))
        for name in values:
            run.step("secret", name=name, use="injected")
    program = Program(
        blueprint=blueprint,
        tenant=f"{layer.id}:{run.execution.principal}:{run.deciding}",
        timeout=function.timeout,
        env={"TRACEPARENT": run.execution.trace or ""},
        secrets=dict(values),
        labels={
            "layer": layer.id,
            "execution": str(run.execution.id),
            **bridging.labels(layer, run.deciding, blueprint.egress),
        },
        language=function.language,
    )
    if function.language == "executable":
        program.env["LAYER_CODE"] = function.code
        program.argv = [
            "sh",
            "-c",
            'printf %s "$LAYER_CODE" > ./function && chmod +x ./function && unset LAYER_CODE && exec ./function',
        ]
        program.stdin = dumps(given["arguments"])
        return program
    given |= {
        "code": function.code,
        "language": function.language,
        "clock": datetime.now(UTC).isoformat(),
        "tape": None,
    }
    program.given = given
    if function.language == "python":
        program.python = "import layer; layer._main()"
    else:
        program.argv = ["node", "-e", "require('run.js')"]
    return program


def _value(run: Run, program: Program, ended: Any) -> Any:
    """What the program gave, or why it failed."""
    returned = run.returned
    if returned is not None and "error" in returned and returned["error"] is not None:
        told = returned["error"] if isinstance(returned["error"], dict) else {"message": str(returned["error"])}
        if run.conflicted:
            raise Conflict(str(told.get("message")))
        raise Raised(
            f"{told.get('type') or 'Error'}: {told.get('message') or ''}"[:10_000],
            kind=str(told.get("type")),
            traceback=str(told.get("traceback") or "")[-10_000:],
        )
    if ended.reason:
        if ended.reason == "timed out":
            raise TimedOut(f"it ran longer than {program.timeout:g} s and was ended", hint="a function has a timeout")
        raise LimitExceeded(f"it was ended: {ended.reason}", hint="its blueprint sets the limits")
    if ended.exit_code:
        last = bytes(ended.stderr).decode("utf-8", "replace").strip().splitlines()[-5:]
        raise Raised(f"it ended with exit code {ended.exit_code}: {' / '.join(last)}"[:4000], exit_code=ended.exit_code)
    if returned is not None:
        return returned.get("value")
    if program.language != "executable":
        raise Raised("it ended without returning")
    shown = bytes(ended.stdout).decode("utf-8", "replace").strip()
    try:
        return json.loads(shown) if shown else None
    except ValueError:
        return shown


def settle(
    layer: Any,
    run: Run,
    function: Function,
    asking: Asking,
    value: Any,
    error: LayerError | None,
    ended: Any,
    wall: float,
    request: str | None,
) -> Outcome:
    """Commit what came of it: the draft, the steps, the usage and the outcome in one tx."""
    execution, ledger = run.execution, layer.ledger
    run.step("return", digest=digest(dumps(value))) if error is None else None
    data = dumps(run.tape) if isinstance(run.tape, dict) else b""
    if ended is not None and function.language in HARNESSED and (run.returned is None or len(data) > TAPE_MOST):
        run.steps.append(("tape", {"missing": True}, now()))  # it was ended, or ended itself
    elif len(data) > 2:
        kept = {"values": run.tape} if len(data) <= TAPE else {"content": run.store(data)}
        run.steps.append(("tape", {"digest": digest(data), **kept}, now()))
    facts = [*run.facts(), usage.fact(run, function, asking, ended, wall)]
    if error is None:

        def apply(tx: Tx) -> None:
            if asking.key is not None:
                at = tx.engine.schema_prefix
                if tx.session.one(
                    f"select 1 from {at}ledger_key where principal = ? and key = ?", (asking.principal, asking.key)
                ):
                    raise _taken
                result = json_text("result", {"execution": execution.id, "value": value})
                tx.fact("ledger_key", asking.principal, asking.key, request, result)
            run.draft.apply(tx)

        writes = apply if len(run.draft) or asking.key is not None else None
        try:
            tx = ledger.conclude(
                execution,
                "done",
                {"value": value},
                writes=writes,
                branch=asking.branch,
                facts=facts,
                reason=asking.reason,
            )
            return Outcome(execution.id, "done", value, tx=tx, steps=run.steps)  # type: ignore[arg-type]
        except LayerError as failure:
            if isinstance(failure, _Taken):
                tx = ledger.conclude(execution, "duplicate", None, facts=facts)
                known = recall(layer, asking.principal, str(asking.key), str(request))
                assert known is not None
                return known
            error = failure
            run.conflicted = run.conflicted or (isinstance(failure, Conflict) and run.draft.first_read is not None)
    status = "denied" if isinstance(error, Denied) else "failed"
    told = {"code": error.code, "message": error.message, "hint": error.hint, **_plain_details(error)}
    outcome, also = Outcome(execution.id, status, error=error, steps=run.steps, run=run), None  # type: ignore[arg-type]
    if asking.failing is not None:
        outcome.status, also = asking.failing(outcome)
    outcome.tx = ledger.conclude(execution, outcome.status, {"error": told}, facts=facts, also=also)
    return outcome


class _Taken(LayerError):
    """Another call with this idempotency key was first."""


_taken = _Taken("another call with this idempotency key was first")


def _plain_details(error: LayerError) -> dict[str, Any]:
    return {key: value for key, value in error.details.items() if isinstance(value, str | int | list | float)}


def readable(layer: Any, principal: int) -> bool:
    """Whether a principal may read functions at all."""
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]
        schema = layer.catalog.schema(session, MAIN_CHAIN, epoch)
        policy = layer.catalog.policy(session, principal, epoch)
        return bool(policy.rules("read", schema, schema.by_name["function"], "main").allows)


def nowhere(name: str) -> NotFound:
    return NotFound(f"there is no function {name!r}", hint="select name from function lists them")
