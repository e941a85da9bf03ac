"""Held boxes: those that no contract speaks of. Somebody opens one, uses it and lets it go; it is decided and recorded like any other.

The execution of `box.open` lasts as long as the box. What the host must know of it is a label, so whoever asks the host
knows all; its time is the host's to keep, and what it does is written down by `recorder`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ..errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound, Unavailable
from ..sandbox.blueprint import NAME as BOX_NAME
from ..sandbox.blueprint import VIRTUAL, Blueprint, check_variable
from ..sandbox.client import blocking_client, run_blocking
from ..sandbox.egress import narrow, rules
from ..sandbox.sandbox import Sandbox
from ..substrate.ledger import MAIN_CHAIN, Execution, Tx, now
from ..substrate.past import Past
from ..substrate.reads import clock
from ..substrate.schema import MAIN, SYSTEM
from ..substrate.values import datetime_text, json_text
from . import bridging, contracts, usage
from . import secrets as vault
from .blueprints import definer_of, guard, row_of, shape
from .executions import traceparent
from .verbs import Call, Items, Object, verb

LABEL = "held"  # of a host's box: what this file knows of it
LARGEST = 24 << 10  # bytes of that
SHOWN = 1 << 20  # bytes of each stream that box.run gives back
KEPT_NAME, ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}"), re.compile(r"(tpl)?[0-9a-f]{16,}")
READABLE = 16 << 20  # bytes of a file that box.read gives back


@verb("box.open", brief=False, hidden=("environment", "egress"), keyed=True)
def open_(
    call: Call, *, blueprint: str, name: str | None = None, snapshot: str | None = None, timeout: float | None = None,
    on_timeout: str = "kill", metadata: Object | None = None, environment: Object | None = None, egress: Any = None,
    volumes: Items | None = None, resume: bool = False, keep_memory: bool = True, public: bool = True, annotations: Object | None = None,
) -> Any:  # fmt: skip
    """Open a box of a blueprint; it runs until its time is over or somebody kills it. What its environment holds is not recorded."""
    layer, asking = call.layer, call.asking
    making = Making(layer, asking.principal, blueprint, egress, environment, volumes, snapshot)
    life = {"seconds": timeout, "then": on_timeout, "wakes": resume, "memory": keep_memory}
    if on_timeout not in ("kill", "pause"):
        raise Invalid(f"a box whose time is over is killed or paused, not {on_timeout!r:.60}")
    if timeout is not None and not 0 <= timeout <= 10 * 365 * 86400:
        raise Invalid(f"timeout {timeout!r} is not a number of seconds that a box may have")
    if name is not None and not BOX_NAME.fullmatch(name):
        raise Invalid(
            f"{name!r:.120} can't be the name of a box", hint="lower-case letters, digits and hyphens, 41 at most"
        )
    key = secrets.token_hex(8)
    name = name or f"held-{key}"
    told = {"metadata": _texts("metadata", metadata), "public": public, "annotations": annotations or {}}
    asked = {
        "blueprint": blueprint, "snapshot": snapshot, "timeout": timeout, "on_timeout": on_timeout, "resume": resume, "egress": told_egress(egress),
        "volumes": volumes, "environment": sorted(environment or {}), **told,
    }  # fmt: skip
    execution = making.execution(call.execution, "box.open", name, key, asked, asking.key)
    known = _intended(
        layer,
        execution,
        {
            **asked,
            "name": name if call.asking.key is None else None,
            "values": _sealed({"environment": environment, "egress": egress}),
        },
        asking.key,
        making.snapshot,
    )
    if known is not None:
        return again(layer, known)
    label = making.label(execution, {**told, "volumes": volumes or []})
    found = run_blocking(blocking_client().call({
        "do": "create", "blueprint": making.shape.plain() | {"secrets": None}, "session": blocking_client().session, "name": name,
        "snapshot": making.snapshot, "secrets": dict(making.values) or None, "warm": True, "life": life,
        "labels": {**contracts.labels(layer.id, key), **bridging.labels(layer, asking.principal, making.shape.egress), LABEL: label},
    }))  # fmt: skip
    try:
        made(layer, [execution], [found], making.values)
    except BaseException:
        Sandbox.connect(found["id"]).kill()
        raise
    start = ((making.row.get("annotations") or {}).get("template") or {}).get("start")
    if start and making.snapshot is None:
        from . import templates

        with contextlib.suppress(LayerError):  # whoever opened it finds what it printed
            templates.started(Sandbox.connect(found["id"]), start)
    return shown(layer, found) | {"kept": _kept(layer)}


class Making:
    """A box of a blueprint, decided and shaped, not made yet."""

    def __init__(
        self, layer: Any, principal: int, blueprint: str, egress: Any = None,
        environment: Mapping[str, Any] | None = None, volumes: Sequence[Any] | None = None, snapshot: str | None = None,
    ) -> None:  # fmt: skip
        self.layer, self.principal = layer, principal
        self.row = find(layer, blueprint, principal)
        self.permissions = admitted(layer, principal, self.row, blueprint)
        usage.admit(layer, principal, None, ("boxes",))
        if snapshot is not None and not _took(layer, principal, snapshot) and not _owner(layer, principal):
            raise NotFound(f"there is no snapshot {snapshot!r:.120}")
        self.snapshot: str | None = snapshot or self.row.get("snapshot")
        self.egress = narrowed(self.row, egress)
        given = lending(self.row, self.egress)
        self.values, bound, _ = vault.for_box(layer, given, principal)
        shaped = shape({**self.row, "egress": bound})
        guard(layer, shaped, definer_of(layer, "blueprint", self.row))
        for variable, value in (environment or {}).items():
            check_variable(variable, value)
        self.shape: Blueprint = shaped.changed(
            env={**shaped.env, **(environment or {})},
            mounts=(*shaped.mounts, *_mounts(layer, principal, volumes, shaped.tier)),
        )

    def execution(
        self, execution: Execution, act: str, name: str, key: str, asked: Mapping[str, Any], again: str | None = None
    ) -> Execution:
        """The execution that the box is: that of the call which opens it, or of each fork."""
        execution.kind, execution.tier, execution.blueprint = "box", self.shape.tier, self.row["name"]
        with self.layer.engine.reading() as session:
            state = clock(self.layer.engine, session)[0]
        given = {"contract": None, "name": name, "key": key, "host": contracts.home(), **asked}
        execution.call = {
            "verb": act, "version": self.row["_tx"], "arguments": json_text("arguments", given), "branch": MAIN, "state": state, "attempt": 1,
            "key": again, "snapshot": self.snapshot, "permissions": json_text("permissions", self.permissions),
        }  # fmt: skip
        return execution

    def label(self, execution: Execution, told: Mapping[str, Any]) -> str:
        """What the host keeps for us with the box."""
        return label(
            {
                "principal": self.principal, "execution": execution.id, "blueprint": self.row["name"], "secrets": sorted(self.values),
                "template": (self.row.get("annotations") or {}).get("template"), **told,
            }
        )  # fmt: skip


def label(told: Mapping[str, Any]) -> str:
    text = json.dumps(told, separators=(",", ":"))
    if len(text) > LARGEST:
        raise LimitExceeded(f"metadata and annotations of a box take {len(text)} bytes, more than {LARGEST}")
    return text


# Who may


def find(layer: Any, blueprint: str, principal: int | None = None) -> dict[str, Any]:
    """A blueprint by its name, or by the snapshot that it is: of equal ones, which share an id, the principal's own."""
    kept = _of(layer, blueprint) if ID.fullmatch(blueprint) else []
    if mine := [row for row in kept if principal is not None and giver(layer, row) == principal]:
        return mine[0]
    try:
        return row_of(layer, "blueprint", blueprint)
    except NotFound:
        if not kept:
            raise _missing(blueprint) from None
        return kept[0]


def _of(layer: Any, snapshot: str) -> list[dict[str, Any]]:
    """The blueprints whose boxes begin at a snapshot, whoever's they are."""
    entity = SYSTEM.by_name["blueprint"]
    with layer.engine.reading() as session:
        catalog = layer.catalog
        chain = catalog.chain(session, catalog.branch(session, "main"), None)
        rows = catalog.rows(session, entity, chain, f"where x.{entity.by_name['snapshot'].store} = ?", (snapshot,))
    return [dict(row) for row in rows]


def _missing(called: str) -> NotFound:
    """What is told of a blueprint that there is not, and of one that whoever asks may not know of."""
    hint = f"select name from blueprint lists them; whoever opens one needs `call` on box:{called:.60}"
    return NotFound(f"there is no blueprint {called!r:.120}", hint=hint)


def admitted(layer: Any, principal: int, row: Mapping[str, Any], called: str) -> list[int]:
    """The permission rows that let a principal open boxes of a blueprint; what it kept of its own boxes it may open itself."""
    with layer.engine.reading() as session:
        policy = layer.catalog.policy(session, principal, clock(layer.engine, session)[1])
    resource = f"box:{row['name']}"
    allowed, grants = policy.outright("call", resource)
    if allowed and _named(layer, principal, row, called) and not any(grant.resource == resource for grant in grants):
        raise NotFound(
            f"there is no blueprint {called!r:.120}", hint="a snapshot of somebody else's box is opened by its id"
        )
    if allowed:
        return [grant.id for grant in grants]
    built = (row.get("annotations") or {}).get("template")
    if built and not grants and (built.get("public") or built.get("owner") == principal):
        wrote = definer_of(layer, "blueprint", row)
        if wrote == built.get("owner") or _owner(layer, wrote):
            return []  # a template is for whoever built it, a public one for everybody
    kept = row.get("snapshot") is not None and not grants
    if kept and giver(layer, row) == principal and definer_of(layer, "blueprint", row) == principal:
        return []
    error = policy.refusal("call", resource, grants, named=True)
    if "blueprint" in layer.schema().by_name and _readable(layer, principal, row["id"]):
        raise error
    layer.ledger.denied(layer.execution_by(None), error)
    raise _missing(called)  # whoever may not read blueprints does not learn that there is one


def _named(layer: Any, principal: int, row: Mapping[str, Any], called: str) -> bool:
    """Whether this is a name that somebody else gave to a snapshot: they could have taken one that others expect something else of."""
    kept = row.get("snapshot") if "snapshot" in (row.get("annotations") or {}) else None
    return kept is not None and called != kept and giver(layer, row) not in (None, principal)


def _readable(layer: Any, principal: int, number: int) -> bool:
    try:
        found = layer.reads.query_at(
            "select id from blueprint where id = :id", {"id": number}, "main", None, principal, None, 1
        )[0]
    except LayerError:
        return False
    return bool(found)


def _owner(layer: Any, principal: int) -> bool:
    with layer.engine.reading() as session:
        return bool(layer.catalog.policy(session, principal, clock(layer.engine, session)[1]).sovereign())


def taker(layer: Any, snapshot: str) -> int | None:
    """Whose box a snapshot was taken of, as the ledger knows."""
    at = layer.engine.schema_prefix
    with layer.engine.reading() as session:
        row = session.one(
            f"select x.principal from {at}ledger_snapshot s join {at}ledger_execution x on x.box = s.box where s.id = ?",
            (snapshot,),
        )
    return None if row is None else int(row[0])


def giver(layer: Any, row: Mapping[str, Any]) -> int | None:
    """Who kept a snapshot as this blueprint. Boxes with equal files have equal snapshots: the ledger's taker is but the first."""
    entity, catalog, at = SYSTEM.by_name["blueprint"], layer.catalog, layer.engine.schema_prefix
    with layer.engine.reading() as session:
        past, wrote, kept = Past(catalog, session, clock(layer.engine, session)[1]), None, None
        for version in past.versions(entity, row["id"], catalog.chain(session, catalog.branch(session, "main"), None)):
            value = (
                None if version.values is None else past.table(entity).value(entity.by_name["snapshot"], version.values)
            )
            if value is None or kept not in (None, value):
                break
            kept, wrote = value, version.tx
        found = wrote and session.one(
            f"select t.principal from {at}ledger_tx t join {at}ledger_call c on c.execution = t.execution where t.tx = ? and c.verb = 'box.snapshot'",
            (wrote,),
        )
    return int(found[0]) if found else taker(layer, row["snapshot"])


def _took(layer: Any, principal: int, snapshot: str) -> bool:
    return taker(layer, snapshot) == principal or any(giver(layer, row) == principal for row in _of(layer, snapshot))


def told_egress(egress: Any) -> Any:
    """What was wanted of a box's egress as it is recorded: values of headers are not."""
    return narrow.shown(egress) if isinstance(egress, Mapping) else [rules.shown(rule) for rule in egress or ()] or None


def lending(row: Mapping[str, Any], egress: Sequence[Any]) -> dict[str, Any]:
    """A blueprint's row with the rules of one box, and the secrets that these name."""
    listed = {one if isinstance(one, str) else one.get("name") for one in row.get("secrets") or ()}
    more = [name for name in narrow.secrets_of(egress) if name not in listed]
    return {**row, "egress": list(egress), "secrets": [*(row.get("secrets") or ()), *more]}


def narrowed(row: Mapping[str, Any], egress: Any) -> tuple[Any, ...]:
    """The rules of a box: its blueprint's, or those given, each of which the blueprint must allow too; of lists, what they leave."""
    whole = tuple(row.get("egress") or ())
    if egress is None:
        return whole
    if isinstance(egress, Mapping):
        return tuple(narrow.narrow(whole, egress))
    theirs = [(written, rules.parse_one(written)) for written in whole]
    for mine in rules.parse(egress):
        if (
            mine.action == "allow"
            and mine.box is None
            and not any(contracts.rule_within(mine, rule) for _, rule in theirs)
        ):
            raise Denied(
                f"egress rule {mine.text} is not within what blueprint {row['name']!r} allows",
                hint="a box narrows its blueprint",
                action="use",
                resource=f"egress:{mine.host}",
            )
    return (*(written for written, rule in theirs if rule.action == "deny"), *egress)


def lent(layer: Any, principal: int, names: Sequence[str]) -> Mapping[str, str]:
    """Values of secrets for a box that has them already, if its principal may still use them."""
    values, _, _ = vault.for_box(layer, {"secrets": list(names), "egress": []}, principal)
    return values


def _mounts(layer: Any, principal: int, given: Sequence[Any] | None, tier: str) -> tuple[Any, ...]:
    if not given:
        return ()
    from . import volumes

    return tuple(volumes.mounts(layer, principal, given, tier))


def _texts(what: str, given: Any) -> dict[str, str]:
    if not all(isinstance(value, str) for value in (given or {}).values()):
        raise Invalid(f"{what} of a box are texts by name")
    return dict(given or {})


def _sealed(given: Mapping[str, Any]) -> str:
    """Values that may be secrets, so that two requests can be compared and nobody can try them out."""
    text = json_text("given", dict(given))
    return hmac.new(contracts.channel_key(), text.encode(), hashlib.sha256).hexdigest()


def token(layer: Any, box: str, use: str) -> str:
    """A token of a box for one use: made of a key that lies in no database, so there is nothing to keep."""
    return contracts.token(f"{layer.id}:{use}", box)


# Its execution


def _intended(layer: Any, execution: Execution, request: Any, key: str | None, snapshot: str | None) -> int | None:
    """Commit that there will be a box; with an idempotency key, the execution of the one that was asked for before."""

    def run(work: Any) -> int | None:
        tx = Tx(work, execution, reason=execution.reason, bare=True, key=key)
        if tx.recall(request):
            return int(tx.result)
        contracts.record(tx, execution, None, snapshot)
        tx.finish(execution.id)
        return None

    found: int | None = layer.ledger.submit(run)
    return found


def again(layer: Any, execution: int) -> dict[str, Any]:
    """The box of an execution that was asked for before, or how that went."""
    import time

    from . import tending

    for _ in range(600):
        if (id := tending.was_made(layer, execution)) is not None:
            return shown(layer, info(id))
        at, said = layer.engine.schema_prefix, layer.engine.portable("result", "json")
        with layer.engine.reading() as session:
            row = session.one(f"select {said} from {at}ledger_outcome where execution = ?", (execution,))
        if row is not None:
            error = (json.loads(row[0] or "{}") or {}).get("error") or {}
            raise Conflict(f"that request was made before, and failed: {error.get('message')}", hint="use a new key")
        time.sleep(0.05)  # whoever was first is making it
    raise Unavailable("a box is being made for this key, and is not there yet")


def made(
    layer: Any,
    executions: Sequence[Execution],
    found: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    **more: Any,
) -> None:
    """Record the boxes that executions have got; from now on others look after them."""
    at = now()
    with layer.ledger.work() as work:
        for execution, box in zip(executions, found, strict=True):
            step = {"id": box["id"], "name": box["name"], "tier": box["tier"], "isolation": box["isolation"], **more}
            steps = [("box", step), *(("secret", {"name": name, "use": "injected"}) for name in values)]
            tx = work.tx(execution, bare=True)
            tx.facts_of(
                "ledger_step",
                [(execution.id, n, kind, json_text("step", detail), at) for n, (kind, detail) in enumerate(steps, 1)],
            )
            tx.finish()
    for execution in executions:
        layer.ledger.let_go(execution)


def _kept(layer: Any) -> str:
    from . import tending

    return tending.ensure(layer)


# What is told of it


def info(box: str) -> dict[str, Any]:
    """What the host says of a box, or NotFound."""
    return dict(run_blocking(blocking_client().call({"do": "get", "box": box})))


def told(found: Mapping[str, Any]) -> dict[str, Any]:
    """What this file has kept with a box; nothing for one that is not held."""
    held: dict[str, Any] = json.loads(found["labels"].get(LABEL) or "{}")
    return held


def resting(found: Mapping[str, Any]) -> bool:
    """Whether a box stands still until somebody lets it go on: one that its host put aside for a while does not."""
    return bool(found["resting"])


def shown(layer: Any, found: Mapping[str, Any], names: dict[int, str] | None = None) -> dict[str, Any]:
    """A box as whoever holds it sees it; `names` of principals that are known already. Without a layer they are left out."""
    held, life, names = told(found), found["life"], {} if names is None else names
    if layer is not None and (who := held.get("principal")) is not None and who not in names:
        names[who] = layer.name_of(who)
    until = life["until"]
    return {
        "box": found["id"], "name": found["name"], "state": "paused" if resting(found) else "running", "execution": held.get("execution"),
        "blueprint": held.get("blueprint"), "principal": names.get(held.get("principal", 0)),
        "tier": found["tier"], "isolation": found["isolation"], "limits": found["limits"], "metadata": held.get("metadata") or {},
        "started": _moment(found["created"]), "until": None if until is None else _moment(until), "on_timeout": life["then"],
        "resume": life["wakes"], "public": held.get("public", True), "volumes": held.get("volumes") or [], "parent": found["parent"],
        "snapshot": found["snapshot"], "egress": found["egress"], "annotations": held.get("annotations") or {},
        "template": held.get("template"),
    }  # fmt: skip


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def owned(layer: Any, principal: int, found: Mapping[str, Any]) -> bool:
    """Whether a box of the host is this layer's, and this principal's to use: its own, or any where it owns the layer."""
    if found["labels"].get("layer") != layer.id:
        return False
    held = told(found)
    if not held:
        from . import reality

        number = reality.whose(layer, found)[0]
        at = layer.engine.schema_prefix
        with layer.engine.reading() as session:
            row = (
                None
                if number is None
                else session.one(f"select principal from {at}ledger_execution where id = ?", (number,))
            )
        held = {} if row is None else {"principal": row[0]}
    return held.get("principal") == principal or _owner(layer, principal)


def mine(layer: Any, principal: int, box: str, held: bool = True) -> dict[str, Any]:
    """What the host says of a box that a principal may use; NotFound for one of others, as for one that is not."""
    missing = NotFound(f"there is no box {box!r:.80}", hint="box.list lists them")
    try:
        found = info(box)
    except NotFound:
        raise missing from None
    if not owned(layer, principal, found):
        raise missing
    if held and not told(found):
        raise Conflict(
            f"box {box!r} has a contract, which says how long it runs", hint="layer box kill, layer contract show"
        )
    return found


def boxes(layer: Any, principal: int) -> list[dict[str, Any]]:
    """What the host says of the held boxes that a principal may use."""
    everything = run_blocking(blocking_client().call({"do": "list", "labels": {"layer": layer.id}}))
    owner = _owner(layer, principal)
    found = [(box, told(box)) for box in everything]
    return [box for box, held in found if held and (owner or held.get("principal") == principal)]


@verb("box.list")
def list_(call: Call, *, metadata: Object | None = None, state: str | None = None) -> Any:
    """The boxes one holds (an owner: all that are held), newest first; those with this metadata, or in this state alone."""
    names: dict[int, str] = {}
    found = [shown(call.layer, box, names) for box in boxes(call.layer, call.asking.principal)]
    wanted = _texts("metadata", metadata).items()
    found = [box for box in found if wanted <= box["metadata"].items() and state in (None, box["state"])]
    return sorted(found, key=lambda box: box["started"], reverse=True)


# What is done with it


def _box(call: Call, box: str, held: bool = True) -> Any:
    return Sandbox.connect(mine(call.layer, call.asking.principal, box, held)["id"])


@verb("box.kill")
def kill(call: Call, *, box: str) -> Any:
    """End a box, with all its processes and files."""
    found = _box(call, box, held=False)
    found.kill()
    return {"killed": found.id}


@verb("box.pause")
def pause(call: Call, *, box: str, memory: bool = True) -> Any:
    """Let a box stand still until it is resumed: its memory stays, unless only its files shall."""
    found = mine(call.layer, call.asking.principal, box)
    if resting(found):
        raise Conflict(f"box {box!r} is paused already", hint="box.resume")
    return {"paused": found["id"], **Sandbox.connect(found["id"]).rest(memory)}


@verb("box.resume")
def resume(call: Call, *, box: str, timeout: float | None = None, memory: bool = True, shorten: bool = False) -> Any:
    """Let a box go on, for at least so many seconds; without `memory` it starts anew with its files. One that runs gets the time."""
    found = mine(call.layer, call.asking.principal, box)
    sandbox, stood = Sandbox.connect(found["id"]), resting(found)
    if stood and not memory:
        sandbox.suspend(memory=False)
    life = None if timeout is None else {"seconds": timeout, "shorten": shorten or stood}
    if not stood:
        return shown(call.layer, sandbox.change(life=life or {"shorten": False})) | {"resumed": False}
    return shown(call.layer, sandbox.resume(life)) | {"resumed": True}


@verb("box.timeout")
def timeout(call: Call, *, box: str, seconds: float, shorten: bool = True) -> Any:
    """Let a box run for so many seconds from now; without `shorten` never less than it would have."""
    if not 0 <= seconds <= 10 * 365 * 86400:
        raise Invalid(f"{seconds!r} is not a number of seconds that a box may have")
    return shown(call.layer, _box(call, box).change(life={"seconds": seconds, "shorten": shorten}))


@verb("box.egress", hidden=("rules",))
def egress(call: Call, *, box: str, rules: Any = None, annotations: Object | None = None) -> Any:
    """Other rules for what a box reaches from now on, within what its blueprint allows; without any, the blueprint's."""
    found = mine(call.layer, call.asking.principal, box)
    held = told(found)
    row = find(call.layer, held["blueprint"])
    wanted = narrowed(row, rules)
    values, bound, _ = vault.for_box(call.layer, lending(row, wanted), call.asking.principal)
    sandbox = Sandbox.connect(found["id"])
    if set(values) - set(found["secrets"]):
        sandbox.lend(dict(values))
    sandbox.set_egress(bound)
    held |= {"secrets": sorted(values), "annotations": {**(held.get("annotations") or {}), **(annotations or {})}}
    sandbox.change(labels={**found["labels"], LABEL: label(held)})
    return {"box": found["id"], "rules": told_egress(wanted)}


@verb("box.run", hidden=("environment", "stdin"))
def run(
    call: Call, *, box: str, command: Any, timeout: float | None = 300.0, cwd: str | None = None, environment: Object | None = None,
    user: str | None = None, stdin: str | None = None, tag: str | None = None,
) -> Any:  # fmt: skip
    """Run a command in a box, a text for its shell or a list, to its end; gives exit code and output. One that fails is a result.

    A tag is a name for it while it runs, which E2B's clients and the host know it by.
    """
    if not isinstance(command, str) and not (
        isinstance(command, list) and all(isinstance(one, str) for one in command)
    ):
        raise Invalid("a command is a text for the shell, or a list of texts")
    done = _box(call, box, held=False).run(
        command, timeout=timeout, cwd=cwd, env=environment, user=user, stdin=stdin, tag=tag
    )
    cut = max(len(done.stdout), len(done.stderr)) > SHOWN
    return {
        "exit_code": done.exit_code, "stdout": done.stdout[:SHOWN].decode("utf-8", "replace"),
        "stderr": done.stderr[:SHOWN].decode("utf-8", "replace"), "seconds": round(done.duration, 6), "truncated": done.truncated or cut,
    }  # fmt: skip


@verb("box.read")
def read(call: Call, *, box: str, path: str, encoding: str = "text", user: str | None = None) -> Any:
    """A file of a box, as text or base64."""
    data = _box(call, box, held=False).files.read(path, user=user, limit=READABLE)
    if encoding not in ("text", "base64"):
        raise Invalid(f"a file is read as text or base64, not {encoding!r:.60}")
    content = base64.b64encode(data).decode() if encoding == "base64" else data.decode("utf-8", "replace")
    return {"path": path, "bytes": len(data), "content": content}


@verb("box.write", hidden=("content",))
def write(
    call: Call, *, box: str, path: str, content: str, encoding: str = "text", mode: int = 0o644, user: str | None = None
) -> Any:
    """Write a file of a box, its directories made; the content is text or base64."""
    try:
        data = base64.b64decode(content, validate=True) if encoding == "base64" else content.encode()
    except ValueError:
        raise Invalid("the content is not base64") from None
    return {"path": path, "bytes": _box(call, box, held=False).files.write(path, data, mode=mode, user=user)}


# What comes of it: snapshots and forks


@verb("box.snapshot")
def snapshot(call: Call, *, box: str, name: str | None = None, memory: bool = False) -> Any:
    """Keep what a box holds, as a blueprint of that name (or of the snapshot's id) whose boxes begin there; memory where its tier can."""
    layer, principal = call.layer, call.asking.principal
    found = mine(layer, principal, box)
    held = told(found)
    if name is not None and (not KEPT_NAME.fullmatch(name) or ID.fullmatch(name)):
        raise Invalid(f"{name!r:.120} can't be the name of a snapshot", hint="e.g. after-install, or team/app:v2")
    row = dict(find(layer, held["blueprint"], principal))
    if name is not None and _anothers(layer, principal, name):
        raise Conflict(f"a blueprint {name!r} exists already", hint="another name")
    holder = f"{layer.id}/{secrets.token_hex(8)}"  # the host keeps equal content once, for all layers
    taken = Sandbox.connect(found["id"]).snapshot(memory=memory and found["tier"] in VIRTUAL, holder=holder)
    called = name or taken.id
    if name is None and any(kept["name"] == called and giver(layer, kept) != principal for kept in _of(layer, called)):
        called = f"{called}-{secrets.token_hex(4)}"  # somebody else has kept the same files
    entity = SYSTEM.by_name["blueprint"]
    annotations = {
        "snapshot": {"box": found["id"], "of": row["name"], "created": taken.created, "named": name is not None, "holder": holder}
    }  # fmt: skip
    kept = {
        **row,
        "name": called,
        "snapshot": taken.id,
        "annotations": annotations,
        "description": f"box {found['id']}",
    }

    def act(tx: Tx) -> Any:
        known = layer.catalog.rows(
            tx.session, entity, tx.chain, f"where x.{entity.by_name['name'].store} = ?", (called,)
        )
        if known and (known[0].get("snapshot") is None or giver(layer, known[0]) != principal):
            raise Conflict(f"a blueprint {called!r} exists already", hint="another name")
        at = layer.engine.schema_prefix
        if not tx.session.one(f"select 1 from {at}ledger_snapshot where id = ?", (taken.id,)):
            moment = datetime_text(datetime.fromtimestamp(taken.created, UTC))
            tx.fact("ledger_snapshot", taken.id, f"b{held['execution']}", taken.parent, moment)
        values = {f.name: kept.get(f.name) for f in entity.fields}
        tx.record(entity, tx._encoded(entity, values), known[0]["id"] if known else None)
        return known[0] if known else None

    try:
        before = layer.ledger.write(call.execution, "main", act)
    except BaseException:
        let_go(taken.id, holder)
        raise
    if before is not None:  # the name is of another now, or of the same once more
        _leave(layer, before)
    return {"snapshot": taken.id, "blueprint": called, "box": found["id"], "memory": taken.memory}


def _anothers(layer: Any, principal: int, name: str) -> bool:
    """Whether a name lies below that of somebody else, where only they keep templates; an owner keeps them everywhere."""
    above, slash, _ = name.partition("/")
    if not slash or _owner(layer, principal):
        return False
    entity = SYSTEM.by_name["principal"]
    with layer.engine.reading() as session:
        rows = layer.catalog.rows(session, entity, MAIN_CHAIN, f"where x.{entity.by_name['name'].store} = ?", (above,))
    return any(row["id"] != principal for row in rows)


@verb("box.forget")
def forget(call: Call, *, snapshot: str) -> Any:
    """Take a snapshot away, and the blueprint that it is; boxes that began there go on."""
    layer, principal = call.layer, call.asking.principal
    row = find(layer, snapshot, principal)
    if row.get("snapshot") is None or (giver(layer, row) != principal and not _owner(layer, principal)):
        raise NotFound(f"there is no snapshot {snapshot!r:.120}")
    entity = SYSTEM.by_name["blueprint"]
    layer.ledger.write(call.execution, "main", lambda tx: tx.erase(entity, row["id"]))
    _leave(layer, row)
    return {"forgotten": row["name"], "snapshot": row["snapshot"]}


def let_go(snapshot: str, holder: str) -> None:
    """Tell the host that a holder of a snapshot needs it no more; it goes with the last of them."""
    with contextlib.suppress(NotFound):
        run_blocking(blocking_client().call({"do": "snapshot.remove", "snapshot": snapshot, "holder": holder}))


def _leave(layer: Any, row: Mapping[str, Any]) -> None:
    """Let go of what a blueprint was a snapshot of; those of before there were holders have one in common."""
    holder = str(((row.get("annotations") or {}).get("snapshot") or {}).get("holder", ""))
    if holder or not _of(layer, row["snapshot"]):
        let_go(row["snapshot"], holder)


def snapshots(layer: Any, principal: int) -> list[dict[str, Any]]:
    """The blueprints that are snapshots of boxes a principal may use, oldest first."""
    entity, owner = SYSTEM.by_name["blueprint"], _owner(layer, principal)
    with layer.engine.reading() as session:
        catalog = layer.catalog
        chain = catalog.chain(session, catalog.branch(session, "main"), None)
        rows = catalog.rows(session, entity, chain, f"where x.{entity.by_name['snapshot'].store} is not null")
    found = [dict(row) for row in rows if "snapshot" in (row["annotations"] or {})]
    return [row for row in sorted(found, key=lambda row: row["id"]) if owner or giver(layer, row) == principal]


@verb("box.fork", brief=False)
def fork(call: Call, *, box: str, count: int = 1, timeout: float | None = None) -> Any:
    """Boxes that begin where this one is, with its memory where its tier can; it goes on."""
    layer, asking = call.layer, call.asking
    if not 1 <= count <= 100:
        raise Invalid(f"{count!r} forks are not between 1 and 100")
    found = mine(layer, asking.principal, box)
    held = told(found)
    making = Making(layer, asking.principal, held["blueprint"])
    usage.admit(layer, asking.principal, None, ("boxes",), count)
    parent, life = f"b{held['execution']}", found["life"]
    life = {"seconds": life["seconds"] if timeout is None else timeout, "then": life["then"], "wakes": life["wakes"]}
    layer.ledger.intend(call.execution)
    forks = []
    for _ in range(count):
        opened = layer.ledger.open(
            asking.principal, None, "box", call.reason, call.execution.id, traceparent(asking.trace)
        )
        key = secrets.token_hex(8)
        forks.append(
            (making.execution(opened, "box.fork", f"held-{key}", key, {"box": found["id"], "timeout": timeout}), key)
        )
    executions = [execution for execution, _ in forks]
    with layer.ledger.work() as work:
        tx = work.tx(call.execution, bare=True)
        for execution in executions:
            contracts.record(tx, execution, parent)
        tx.finish()
    kept: dict[str, Any] = {key: held[key] for key in ("metadata", "public", "annotations", "volumes") if key in held}
    labels = [{**contracts.labels(layer.id, key), LABEL: making.label(execution, kept)} for execution, key in forks]
    try:
        children = run_blocking(blocking_client().call({
            "do": "fork", "box": found["id"], "count": count, "session": blocking_client().session,
            "names": [f"held-{key}" for _, key in forks], "labels": labels, "life": life,
        }))  # fmt: skip
        made(layer, executions, children, {}, parent=found["id"])
    except BaseException as error:
        failure = error if isinstance(error, LayerError) else LayerError(f"{type(error).__name__}: {error}")
        for execution in executions:
            if execution.open:
                layer.ledger.conclude(
                    execution,
                    "failed",
                    {"error": {"code": failure.code, "message": failure.message, "hint": failure.hint}},
                )
        raise
    _kept(layer)
    return [shown(layer, child) for child in children]
