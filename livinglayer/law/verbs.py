"""The door: `call(layer, verb, arguments)`. Every change is a verb of one table or a function; both are bound, decided, recorded and run here."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import secrets
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound
from ..substrate.ledger import Execution, Tx, Work
from ..substrate.reads import clock
from ..substrate.schema import MAIN
from ..substrate.values import json_text, recordable
from ..substrate.values import text as checked
from . import functions, runners
from . import secrets as vault
from .executions import traceparent
from .functions import Asking
from .signature import Signature, dumps, field

Object = dict[str, Any]
Items = list[Any]
RESULT = 65536  # bytes of what a verb gave that its execution keeps
MANY = 100_000  # items of one argument
TAKEN = 60.0  # seconds for which an idempotency key is one server's, longer than clients wait before they ask again
KEPT = 1 << 20  # characters of a call's arguments that are kept
TYPES = {str: "text", int: "int", float: "float", bool: "bool"}


@dataclass(frozen=True)
class Verb:
    """One entry of the table: what it takes, what it says of itself, what it does."""

    name: str
    run: Callable[..., Any]
    signature: Signature
    description: str
    brief: bool  # it is one tx
    hidden: tuple[str, ...]  # arguments that are never recorded
    shapes: Mapping[str, type]  # of arguments that are JSON: what they must be, dict or list
    keyed: bool  # its own tx knows the idempotency key
    sealed: bool  # it gives what its tx gives, so that the tx keeps the key with it
    told_once: bool  # what it gives is not kept, so that a second request can't have it


VERBS: dict[str, Verb] = {}


def verb(
    name: str,
    *,
    brief: bool = True,
    hidden: tuple[str, ...] = (),
    keyed: bool = False,
    sealed: bool = False,
    told_once: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the table; its keywords are the arguments, its docstring what people read."""

    def enter(run: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(run)
        arguments, shapes = {}, {}
        for each in list(inspect.signature(run).parameters.values())[1:]:
            kind, optional, shape = _type(hints[each.name])
            if shape is not None:
                shapes[each.name] = shape
            spec: dict[str, Any] = {"type": kind, "required": not optional and each.default is each.empty}
            if each.default is not each.empty and each.default is not None:
                spec["default"] = each.default
            arguments[each.name] = (
                field(name, each.name, spec) if kind != "json" else field(name, each.name, {**spec, "default": None})
            )
        said = inspect.getdoc(run) or ""
        VERBS[name] = Verb(name, run, Signature(arguments), said, brief, hidden, shapes, keyed, sealed, told_once)
        return run

    return enter


def _type(hint: Any) -> tuple[str, bool, type | None]:
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kinds = [part for part in parts if part is not type(None)]
    shape = typing.get_origin(kinds[0]) if len(kinds) == 1 else None
    return (TYPES.get(kinds[0], "json") if len(kinds) == 1 else "json"), len(kinds) < len(parts), shape


class Call:
    """One use of a verb: the layer as its principal, in an execution of its own."""

    def __init__(self, layer: Any, execution: Execution, asking: Asking) -> None:
        self.asking, self.execution = asking, execution
        self.layer = copy.copy(layer)  # the same layer, acting as whoever calls and in this execution alone
        self.layer.my_id = asking.principal
        self.layer.execution_by = lambda principal=None: execution
        self.branch, self.reason = asking.branch, asking.reason

    def writing(self, cause: str | None, seen: Items | None) -> dict[str, Any]:
        """What a write is told beside its values."""
        return {
            "branch": self.branch, "reason": self.reason, "key": self.asking.key, "cause": cause, "seen": seen or (),
        }  # fmt: skip


def moment(what: str, given: Any) -> int | datetime | None:
    """A tx number, or a time as text; Invalid otherwise."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    if isinstance(given, datetime):
        return given
    try:
        return datetime.fromisoformat(given)
    except (TypeError, ValueError):
        raise Invalid(f"{what} is a tx number or a time like 2026-01-31T12:00:00Z, not {given!r:.60}") from None


def time_of(what: str, given: str | None) -> datetime | None:
    """A time as text."""
    if isinstance(found := moment(what, given), int):
        raise Invalid(f"{what} is a time like 2026-01-31T12:00:00Z, not {given!r:.60}")
    return found


def call(
    layer: Any,
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    principal: int | None = None,
    branch: str = "main",
    parent: int | None = None,
    cause_tx: int | None = None,
    trigger: int | None = None,
    contract: int | None = None,
    key: str | None = None,
    trace: str | None = None,
    reason: str | None = None,
    runner: str | None = None,
    begun: Callable[[Execution], None] | None = None,
) -> Any:
    """Do what a verb or a function does, as a principal: what it gives, or the error that is recorded too."""
    who = layer.my_id if principal is None else principal
    asking = Asking(who, branch, parent, cause_tx, trigger, contract, key, trace, reason, runner=runner, begun=begun)
    found = VERBS.get(name)
    if found is not None:
        return _verb(layer, found, arguments or {}, asking)
    try:
        outcome = functions.call(layer, name, arguments or {}, asking)
    except LayerError as error:
        _refused(layer, name, {}, asking, error)
        if isinstance(error, Denied) and not functions.readable(layer, who):
            raise functions.nowhere(name) from None  # whoever may not read functions does not learn that there is one
        raise
    if outcome.error is not None:
        outcome.error.details.setdefault("execution", outcome.execution)
        raise outcome.error
    return outcome.value


def _verb(layer: Any, found: Verb, arguments: Mapping[str, Any], asking: Asking) -> Any:
    known = (
        set(found.signature.arguments or ()) if found.hidden else set(arguments)
    )  # a misspelt one may be the hidden one
    shown = {key: value for key, value in arguments.items() if key in known - set(found.hidden)}
    try:
        for argument in found.shapes:  # before anything goes through them
            given = arguments.get(argument)
            if isinstance(given, list | tuple | Mapping) and len(given) > MANY:
                shown.pop(argument, None)
                raise LimitExceeded(f"{found.name}: {argument} has more than {MANY} items", hint="in several calls")
        bound = found.signature.bind(found.name, arguments)
        for argument, shape in found.shapes.items():
            if not isinstance(bound.get(argument), shape | None):
                needed = "an object" if shape is dict else "a list"
                raise Invalid(f"{found.name}: {argument} is {needed}, not {bound[argument]!r:.60}")
            if shape is dict and bound.get(argument):  # in the order it was given: fields of an entity have one
                bound[argument] = json.loads(dumps(arguments[argument]))
        if asking.key is not None:
            checked("the idempotency key", asking.key, 1000)
    except LayerError as wrong:
        takes = ", ".join(sorted(known))
        # the error of one that hides something may quote it
        error = Invalid(f"{found.name} can't take these arguments", hint=f"it takes {takes}") if found.hidden else wrong
        _refused(layer, found.name, shown, asking, error)
        raise error from None
    if asking.key is not None and not found.keyed:
        return _once(layer, found, bound, asking, asking.key)
    return _do(layer, found, bound, asking)


def _do(layer: Any, found: Verb, bound: Mapping[str, Any], asking: Asking, digest: str | None = None) -> Any:
    if found.brief:
        return _act(layer, found, bound, asking, digest)
    with runners.of(layer).running() as asking.runner:  # it may end between its first tx and its last
        return _act(layer, found, bound, asking)


def _once(layer: Any, found: Verb, bound: Mapping[str, Any], asking: Asking, key: str) -> Any:
    """What a verb gave to the request with this key; done if it is the first. The key is kept with its tx, or right after it."""
    request = dumps([found.name, bound, asking.branch])
    # of what is hidden nobody shall find out by guessing
    digest = hashlib.pbkdf2_hmac("sha256", request, key.encode(), 100_000 if found.hidden else 1).hex()
    at, who = layer.engine.schema_prefix, asking.principal
    name = f"key/{who}/{hashlib.sha256(key.encode()).hexdigest()}"
    # Looked up only when nobody else is at it, or what is done between looking and doing would be done twice.
    with _alone((layer.id, who, key)), nullcontext() if found.sealed else _leased(layer.engine, name):
        with layer.engine.reading() as session:
            row = session.one(f"select digest, result from {at}ledger_key where principal = ? and key = ?", (who, key))
        if row is not None:
            if row[0] != digest:
                raise Conflict(f"idempotency key {key!r:.120} was used for another request", hint="use a new key")
            if found.told_once:
                raise Conflict(f"{found.name} was done, and what it gave is told once", hint="use a new key")
            return json.loads(row[1])
        if found.sealed:
            return _do(layer, found, bound, asking, digest)
        result = _do(layer, found, bound, asking)
        kept = json_text("result", None if found.told_once else json.loads(dumps(result)))

        def note(work: Work) -> None:
            tx = work.tx(layer.execution_of(who), bare=True)
            if tx.kept(key) is None:  # it took so long that another server has done it too
                tx.fact("ledger_key", who, key, digest, kept)
                tx.finish()

        layer.ledger.submit(note)
        return result


@contextmanager
def _leased(engine: Any, name: str) -> Iterator[None]:
    """While no other server has it."""
    holder = secrets.token_hex(8)
    if not engine.lease(name, holder, TAKEN):
        raise _answering()
    try:
        yield
    finally:
        engine.release(name, holder)


def _answering() -> Conflict:
    return Conflict("a request with this idempotency key is being answered", hint="wait for its answer")


_flying: set[tuple[str, int, str]] = set()
_lock = threading.Lock()


@contextmanager
def _alone(request: tuple[str, int, str]) -> Iterator[None]:
    with _lock:
        if request in _flying:
            raise _answering()
        _flying.add(request)
    try:
        yield
    finally:
        _flying.discard(request)


def _act(layer: Any, found: Verb, bound: Mapping[str, Any], asking: Asking, digest: str | None = None) -> Any:
    execution = opened(layer, found.name, {k: v for k, v in bound.items() if k not in found.hidden}, asking)
    execution.brief = found.brief
    if asking.begun is not None:
        asking.begun(execution)
    if digest is not None and asking.key is not None:
        execution.once = (asking.key, digest, None)
    try:
        result = found.run(Call(layer, execution, asking), **bound)
    except LayerError as error:
        execution.brief = False
        _conclude(layer, execution, error)
        raise
    except BaseException as error:
        execution.brief = False
        said = type(error).__name__ if found.hidden else f"{type(error).__name__}: {error}"
        _conclude(layer, execution, LayerError(said))
        raise
    if execution.brief and execution.id is not None:
        layer.ledger.let_go(execution)
    elif execution.open:
        kept = dumps(result)  # a Decimal is a text in there
        if execution.once is not None:  # there was no tx: nothing had to be changed
            execution.once = (*execution.once[:2], None if found.told_once else json.loads(kept))
        layer.ledger.conclude(execution, "done", _kept(json.loads(kept), len(kept)))
    return result


def _kept(value: Any, size: int) -> dict[str, Any] | None:
    """What a verb gave, as its execution keeps it: of much text in an object the beginnings."""
    if size < RESULT:
        return {"value": value}
    if not isinstance(value, dict):
        return None
    cut = {name: each[: RESULT // 16] if isinstance(each, str) else each for name, each in value.items()}
    return {"value": cut, "cut": True} if len(dumps(cut)) < RESULT else None


def opened(layer: Any, name: str, shown: Mapping[str, Any], asking: Asking) -> Execution:
    made: Execution = layer.ledger.open(
        asking.principal, None, "verb", asking.reason, asking.parent, traceparent(asking.trace)
    )
    with layer.engine.reading() as session:
        state = clock(layer.engine, session)[0]
        try:
            branch = MAIN if asking.branch == "main" else layer.catalog.branch(session, asking.branch).id
        except NotFound:
            branch = None
    text = json_text("arguments", recordable(shown)) if _fits(shown) else ""
    made.call = {
        "verb": name, "arguments": text if 0 < len(text) <= KEPT else None, "branch": branch, "state": state, "contract": asking.contract,
        "trigger": asking.trigger, "cause_tx": asking.cause_tx, "attempt": asking.attempt, "key": asking.key, "runner": asking.runner,
    }  # fmt: skip
    return made


def _fits(shown: Any) -> bool:
    """Whether arguments may be short enough to be kept; says no as soon as they can't."""
    left, waiting = KEPT, [shown]
    while waiting and left > 0:
        value = waiting.pop()
        left -= len(value) + 2 if isinstance(value, str) else 2
        if isinstance(value, Mapping | list | tuple):
            left -= len(value)
            waiting += [*value, *value.values()] if isinstance(value, Mapping) else value
    return left > 0


def _refused(layer: Any, name: str, shown: Mapping[str, Any], asking: Asking, error: LayerError) -> None:
    """Record a call that did not come to an execution of its own."""
    _conclude(layer, opened(layer, name, shown, asking), error)


def _conclude(layer: Any, execution: Execution, error: LayerError) -> None:
    if not execution.open:
        return
    denied = isinstance(error, Denied)
    if isinstance(error, Denied):
        layer.ledger.denied(execution, error, action="call", resource=str((execution.call or {}).get("verb")))
    told = {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
    if error.details.get("rows"):
        told["error"]["rows"] = error.details["rows"]  # type: ignore[assignment]
    layer.ledger.conclude(execution, "denied" if denied else "failed", told)


# The table. Each is the layer's own method of the same meaning; functions and whatever else has rows bring their own.


@verb("row.insert", keyed=True)
def _insert(call: Call, *, entity: str, values: Any, cause: str | None = None, seen: Items | None = None) -> Any:
    """Add a row and give its id; a list of rows is one tx and gives a list of ids."""
    return call.layer.insert(entity, values, **call.writing(cause, seen))


@verb("row.update", keyed=True)
def _update(
    call: Call, *, entity: str, id: int, values: Object, expect: int | None = None, cause: str | None = None, seen: Items | None = None
) -> Any:  # fmt: skip
    """Set fields of a row and give the tx, its new version."""
    return call.layer.update(entity, id, values, expect=expect, **call.writing(cause, seen))


@verb("row.delete", keyed=True)
def _delete(
    call: Call, *, entity: str, id: int, expect: int | None = None, cause: str | None = None, seen: Items | None = None
) -> Any:
    """Remove a row, and what cascades from it; its history stays."""
    return call.layer.delete(entity, id, expect=expect, **call.writing(cause, seen))


@verb("row.upsert", keyed=True)
def _upsert(
    call: Call, *, entity: str, values: Object, on: Items, cause: str | None = None, seen: Items | None = None
) -> Any:
    """Update the row with these values in the fields `on`, or add one; gives its id."""
    return call.layer.upsert(entity, values, on=on, **call.writing(cause, seen))


@verb("row.change", keyed=True)
def _change(call: Call, *, changes: Items, cause: str | None = None, seen: Items | None = None) -> Any:
    """Several changes as one tx, all or nothing: each does insert, update, upsert or delete; gives the ids of the rows."""
    if not changes:
        raise Invalid("there is no change in the list", hint=CHANGE)
    return call.layer._whole(
        None, call.branch, call.reason, cause, call.asking.key, seen or (), ("change", changes),
        lambda tx: {"ids": [_changed(tx, place, change) for place, change in enumerate(changes, start=1)]},
    )  # fmt: skip


CHANGE = '{"do": "insert", "entity": "item", "values": {…}}'
CHANGES = {
    "insert": ("entity", "values"), "update": ("entity", "id", "values", "expect"), "upsert": ("entity", "values", "on"),
    "delete": ("entity", "id", "expect"),
}  # fmt: skip


def _changed(tx: Tx, place: int, change: Any) -> Any:
    """Do one of several changes: the id of its row."""
    do = change.get("do") if isinstance(change, Mapping) else None
    if not isinstance(do, str) or do not in CHANGES:
        raise Invalid(f"change {place} is no change: {change!r:.120}", hint=CHANGE)
    given = {key: value for key, value in change.items() if key != "do"}
    takes = CHANGES[do]
    if wrong := [*sorted(set(given) - set(takes)), *(key for key in takes if key != "expect" and key not in given)]:
        raise Invalid(f"change {place}: {do} takes {', '.join(takes)}; {wrong[0]!r:.120} is wrong or missing")
    kinds = {"values": Mapping, "on": list, "entity": str}
    if wrong := [key for key, kind in kinds.items() if key in given and not isinstance(given[key], kind)]:
        raise Invalid(f"change {place}: {wrong[0]} can't be {given[wrong[0]]!r:.120}", hint=CHANGE)
    done = getattr(tx, do)(*(given.get(key) for key in takes))
    return given.get("id", done)


@verb("entity.define", sealed=True)
def _define(
    call: Call, *, name: str, fields: Object, unique: Items | None = None, description: str | None = None, annotations: Any = None
) -> Any:  # fmt: skip
    """Make an entity with its fields, or add fields to one; gives its id."""
    return call.layer.define(
        name, fields, unique=unique or (), description=description, annotations=annotations, branch=call.branch, reason=call.reason,
    )  # fmt: skip


@verb("entity.alter", sealed=True)
def _alter(
    call: Call, *, name: str, add: Object | None = None, rename: Object | None = None, retype: Object | None = None, drop: Items | None = None,
    change: Object | None = None, new_name: str | None = None, description: str | None = None,
) -> Any:  # fmt: skip
    """Change an entity; stored rows are not rewritten."""
    return call.layer.alter(
        name, add=add, rename=rename, retype=retype, drop=drop or (), change=change, name=new_name, description=description,
        branch=call.branch, reason=call.reason,
    )  # fmt: skip


@verb("entity.backfill", sealed=True)
def _backfill(call: Call, *, name: str, field: str) -> Any:
    """Finish a retype: convert the rows that still hold the old type; says how many."""
    return call.layer.backfill(name, field, branch=call.branch, reason=call.reason)


@verb("entity.drop", sealed=True)
def _drop(call: Call, *, name: str) -> Any:
    """Take an entity out of the schema; its history stays."""
    return call.layer.drop(name, branch=call.branch, reason=call.reason)


@verb("branch.fork", brief=False)
def _fork(call: Call, *, name: str, source: str = "main", slice: Object | None = None, as_of: Any = None) -> Any:
    """A new branch of everything, or of a slice, as it is or as it was; costs one row."""
    return call.layer.fork(name, source, slice, moment("as_of", as_of), reason=call.reason)


@verb("branch.merge", brief=False)
def _merge(call: Call, *, name: str, target: str | None = None, preview: bool = False) -> Any:
    """Bring a branch's changes to its parent; with conflicts nothing is applied and they become rows. Or see what it would do."""
    return vars(call.layer.merge(name, target, preview=preview, reason=call.reason))


@verb("branch.discard", brief=False)
def _discard(call: Call, *, name: str) -> Any:
    """Close a branch; its name is free again, its history stays."""
    return call.layer.discard(name, reason=call.reason)


@verb("conflict.resolve", brief=False)
def _resolve(call: Call, *, id: int, value: Any = None, take: str | None = None) -> Any:
    """Say what a conflict's value shall be (or take ours or theirs); the next merge uses it."""
    return call.layer.resolve(id, value, take=take, reason=call.reason)


@verb("principal.define", sealed=True)
def _principal(
    call: Call, *, name: str, kind: str | None = None, attributes: Object | None = None, roles: Items | None = None
) -> Any:
    """Make a principal, or change what is given of it; gives its id."""
    return call.layer.principal(name, kind, attributes, roles, on=call.branch)


@verb("permission.grant", sealed=True)
def _grant(
    call: Call, *, principal: str, action: str, resource: str, where: str | None = None, fields: Items | None = None, on_branch: str | None = None,
    effect: str = "allow", delegable: bool = False, valid_from: str | None = None, valid_to: str | None = None,
) -> Any:  # fmt: skip
    """Allow (or deny) an action; gives the permission's id."""
    return call.layer.grant(
        principal, action, resource, where=where, fields=fields, branch=on_branch, effect=effect, delegable=delegable, on=call.branch,
        reason=call.reason, valid_from=time_of("valid_from", valid_from), valid_to=time_of("valid_to", valid_to),
    )  # fmt: skip


@verb("permission.revoke", sealed=True)
def _revoke(call: Call, *, id: int) -> Any:
    """Take a permission back, and what was delegated from it."""
    return call.layer.revoke(id, on=call.branch, reason=call.reason)


@verb("history.prune", brief=False)
def _prune(call: Call, *, before: Any) -> Any:
    """Forget closed versions that ended before a tx or a time; gives how many."""
    return call.layer.prune(moment("before", before), reason=call.reason)


@verb("secret.set", sealed=True, hidden=vault.SECRET_ARGUMENTS["secret.set"])
def _set_secret(call: Call, *, name: str, value: str, description: str | None = None) -> Any:
    """Keep a secret, or give it another value; gives its id. Nothing gives the value back, and it is not recorded."""
    return vault.set(call.layer, name, value, description=description, branch=call.branch, reason=call.reason)


@verb("secret.remove", sealed=True)
def _remove_secret(call: Call, *, name: str) -> Any:
    """Take a secret away."""
    return vault.remove(call.layer, name, branch=call.branch, reason=call.reason)


@verb("secret.rotate_key", brief=False)
def _rotate_key(call: Call) -> Any:
    """Make a new key and seal every secret with it, on main and all open branches; values stay as they are."""
    return vault.rotate_key(call.layer, reason=call.reason)


@verb("secret.forget_key", brief=False)
def _forget_key(call: Call, *, key: str) -> Any:
    """Destroy a key that seals nothing any more: what it sealed in history and backups can never be read again."""
    return vault.forget_key(call.layer, key, reason=call.reason)


@verb("blueprint.define", sealed=True)
def _blueprint(
    call: Call, *, name: str, tier: str = "namespace", base: str | None = None, limits: Object | None = None, egress: Items | None = None,
    mounts: Items | None = None, secrets: Items | None = None, environment: Object | None = None, idle: Object | None = None,
    packages: Items | None = None, ports: Items | None = None, slice: bool | None = None, description: str | None = None,
) -> Any:  # fmt: skip
    """Make or change the shape of boxes; gives its id."""
    from .blueprints import shape

    row = {
        "name": name, "tier": tier, "base": base, "limits": limits, "egress": egress, "mounts": mounts, "secrets": secrets, "environment": environment,
        "idle": idle, "packages": packages, "ports": ports, "slice": slice, "description": description,
    }  # fmt: skip
    shape(row)
    return call.layer.upsert("blueprint", row, on=["name"], branch=call.branch, reason=call.reason)


@verb("function.define", sealed=True)
def _function(
    call: Call, *, name: str, language: str = "python", code: str, signature: Object | None = None, blueprint: str | None = None, reads: Any = None,
    writes: Any = None, calls: Items | None = None, projections: Items | None = None, timeout: float | None = None, rights: str = "caller",
    retries: Object | None = None, deterministic: bool = True, description: str | None = None,
) -> Any:  # fmt: skip
    """Make or change a function; gives its id."""
    from .blueprints import row_of

    declared = functions.parts("reads", reads)
    if calls:
        declared["function"] = {"names": Items(calls)}
    if projections:
        declared["projection"] = {"names": Items(projections)}
    row = {
        "name": name, "language": language, "code": code, "signature": signature, "reads": declared or None, "writes": functions.parts("writes", writes) or None,
        "blueprint": None if blueprint is None else row_of(call.layer, "blueprint", blueprint, call.branch)["id"], "timeout": timeout,
        "rights": rights, "retries": retries, "deterministic": deterministic, "description": description,
    }  # fmt: skip
    functions.check(call.layer, row)
    return call.layer.upsert("function", row, on=["name"], branch=call.branch, reason=call.reason)
