"""Contracts: what somebody may see and do in a box, as a row; and the boxes that are made of one.

A box of a contract is an execution that lasts as long as the box: what it asks for at LAYER_URL is decided by the
contract, by the permissions of whoever had it made, and by the branch it was made for. `tending` looks after them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import Denied, Invalid, LayerError, NotFound
from ..sandbox.blueprint import NAME as BOX_NAME
from ..sandbox.blueprint import TIERS, Blueprint, check_tier
from ..sandbox.egress import rules
from ..sandbox.sandbox import Sandbox
from ..settings import config_directory, own_file, state_directory
from ..substrate import slices
from ..substrate.ledger import Execution, Scope, Tx, now
from ..substrate.narrow import canonical, compiled
from ..substrate.predicates import both, compile_predicate
from ..substrate.reads import clock
from ..substrate.schema import MAIN
from ..substrate.values import json_text
from . import approvals, bridging, functions, models, stops, usage
from . import secrets as vault
from .blueprints import definer_of, guard, row_by_id, row_of, shape
from .executions import traceparent
from .verbs import Call, Items, Object, verb

NAME = re.compile(r"[a-z][a-z0-9_.-]{0,99}")
BUDGET = ("seconds", "steps", "cpu", "bytes", "tokens", "money")
TERMS = (
    "reads", "scope", "functions", "projections", "blueprint", "egress", "secrets", "minimum_tier", "tier", "approvals", "stops", "artifacts",
    "contracts", "model",
)  # fmt: skip
SLICE = "/run/layer/slice.db"  # where a box finds its slice
LEASE = 15.0  # seconds that whoever looks after a box may be silent


@dataclass(frozen=True)
class Contract:
    """One contract as its row on main says: a branch can't give itself another."""

    id: int
    name: str
    version: int
    reads: Mapping[str, Any]
    scope: Mapping[str, Any]
    functions: tuple[str, ...]
    projections: tuple[str, ...]
    blueprint: Mapping[str, Any] | None
    budget: Mapping[str, float]
    tier: str
    minimum: str | None  # the weakest tier that will do: below it there is no box
    egress: tuple[Any, ...]
    secrets: tuple[Any, ...]
    terms: str  # a digest of what its boxes go by
    writer: int  # the principal who gave it what it says
    artifacts: tuple[str, ...] = ()
    model: Mapping[str, Any] | None = None
    program: tuple[str, ...] | None = None
    instructions: str | None = None
    approvals: tuple[Mapping[str, Any], ...] = ()  # what somebody must say yes to
    stops: tuple[Mapping[str, Any], ...] = ()  # when its boxes end by themselves
    contracts: tuple[str, ...] = ()  # to whom it may delegate


def load(layer: Any, name: str) -> Contract:
    """A contract by its name, or NotFound."""
    return _contract(layer, row_of(layer, "contract", name))


def by_id(layer: Any, number: int) -> Contract:
    """A contract by its id, or NotFound."""
    with layer.engine.reading() as session:
        epoch = clock(layer.engine, session)[1]
    found: Contract = layer.catalog._cached(
        ("contract", number, epoch), lambda: _contract(layer, row_by_id(layer, "contract", number))
    )
    return found


def _contract(layer: Any, row: Mapping[str, Any]) -> Contract:
    _check_shape(row)
    blueprint = None if row["blueprint"] is None else row_by_id(layer, "blueprint", row["blueprint"])
    tier = row["tier"] or (Blueprint().tier if blueprint is None else blueprint["tier"])
    return Contract(
        row["id"], row["name"], row["_tx"], functions.parts("reads", row["reads"]), functions.parts("scope", row["scope"]),
        tuple(row["functions"] or ()), tuple(row["projections"] or ()), blueprint, row["budget"] or {},
        tier, row["minimum_tier"], egress(row, blueprint), lent(row, blueprint), terms(row), definer_of(layer, "contract", row),
        tuple(row["artifacts"] or ()), row["model"], argv(row["program"]), row["instructions"],
        tuple(row["approvals"] or ()), tuple(row["stops"] or ()), tuple(row["contracts"] or ()),
    )  # fmt: skip


def _check_shape(row: Mapping[str, Any]) -> None:
    """Refuses a row that was not written by `contract.define` and could be no contract: whoever keeps its boxes relies on it."""
    for keys, each in (
        (("functions", "projections", "artifacts", "contracts"), str),
        (("approvals", "stops"), Mapping),
    ):
        for key in keys:
            if row[key] is not None and not (
                isinstance(row[key], list) and all(isinstance(one, each) for one in row[key])
            ):
                raise Invalid(
                    f"{key} of contract {row['name']!r} are no list of {'names' if each is str else 'rules'}",
                    hint="contract.define checks it",
                )
    check_agent(row)
    check_budget(f"contract {row['name']!r}", row["budget"])


def argv(program: Any) -> tuple[str, ...] | None:
    """A command as a list: a text is for the shell."""
    return None if program is None else ("/bin/sh", "-c", program) if isinstance(program, str) else tuple(program)


def terms(row: Mapping[str, Any]) -> str:
    """A digest of what boxes of a contract go by: when it is another, those made before are not its any more."""
    text = json_text("terms", [row[name] for name in TERMS])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# What a contract takes away from its blueprint


def egress(row: Mapping[str, Any], blueprint: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """The rules of a box: the blueprint's, or those of the contract, each of which the blueprint must allow too."""
    whole = list((blueprint or {}).get("egress") or ())
    if row["egress"] is None:
        return tuple(whole)
    theirs = [(rule, rules.parse_one(rule)) for rule in whole]
    for mine in rules.parse(row["egress"]):
        if mine.action == "allow" and mine.box is None and not any(rule_within(mine, rule) for _, rule in theirs):
            raise Invalid(
                f"egress rule {mine.text} of contract {row['name']!r} is not within what its blueprint allows",
                hint="a contract narrows its blueprint",
            )
    return (*(written for written, rule in theirs if rule.action == "deny"), *row["egress"])


def rule_within(mine: rules.Rule, theirs: rules.Rule) -> bool:
    """Whether all that one rule allows the other allows too."""
    return (
        theirs.action == "allow"
        and (theirs.host in ("*", mine.host) or (theirs.host[:2] == "*." and ("." + mine.host.removeprefix("*.")).endswith(theirs.host[1:])))
        and mine.protocols <= theirs.protocols
        and (theirs.ports is None if mine.ports is None else theirs.ports is None or mine.ports <= theirs.ports)
        and (theirs.methods is None or (mine.methods is not None and mine.methods <= theirs.methods))
        and theirs.path in (None, mine.path)
        and (theirs.bytes is None or (mine.bytes is not None and mine.bytes <= theirs.bytes))
        and theirs.rate in (None, mine.rate)
        and theirs.model in (None, mine.model)
        and mine.secrets <= theirs.secrets
        and mine.dials_like(theirs)
    )  # fmt: skip


def lent(row: Mapping[str, Any], blueprint: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """The secrets of a box: the blueprint's, or those of them that the contract names."""
    whole = vault.wanted((blueprint or {}).get("secrets"))
    given = (blueprint or {}).get("secrets") or ()
    if row["secrets"] is None:
        return tuple(given)
    names = row["secrets"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Invalid("the secrets of a contract are a list of names, of those that its blueprint has")
    if unknown := sorted({*names} - {one.name for one in whole}):
        raise Invalid(f"the blueprint of contract {row['name']!r} has no secret {unknown[0]!r}")
    return tuple(said for said, one in zip(given, whole, strict=True) if one.name in names)


# Verbs


@verb("contract.define", sealed=True)
def define(
    call: Call, *, name: str, projections: Items | None = None, functions: Items | None = None, scope: Any = None, reads: Any = None,
    blueprint: str | None = None, minimum_tier: str | None = None, tier: str | None = None, egress: Items | None = None,
    secrets: Items | None = None, budget: Object | None = None, approvals: Items | None = None, stops: Items | None = None,
    artifacts: Items | None = None, description: str | None = None, model: Object | None = None, program: Any = None,
    instructions: str | None = None, contracts: Items | None = None, decided: Object | None = None,
) -> Any:  # fmt: skip
    """Make or change a contract: what a box made of it may see and do. Gives its id."""
    shaped = None if blueprint is None else row_of(call.layer, "blueprint", blueprint, call.branch)
    row = {
        "name": name, "projections": projections, "functions": functions, "scope": scope, "reads": reads,
        "blueprint": None if shaped is None else shaped["id"], "minimum_tier": minimum_tier, "tier": tier, "egress": egress,
        "secrets": secrets, "budget": budget, "approvals": approvals, "stops": stops, "artifacts": artifacts, "description": description,
        "model": model, "program": program, "instructions": instructions, "contracts": contracts, "decided": decided,
    }  # fmt: skip
    check_agent(row)
    check(call.layer, row, shaped, call.branch)
    return call.layer.upsert("contract", row, on=["name"], branch=call.branch, reason=call.reason)


@verb("contract.remove", sealed=True)
def remove(call: Call, *, name: str) -> Any:
    """Take a contract away; boxes that were made of it end."""
    row = row_of(call.layer, "contract", name, call.branch)
    return call.layer.delete("contract", row["id"], branch=call.branch, reason=call.reason)


def check(layer: Any, row: Mapping[str, Any], blueprint: Mapping[str, Any] | None, branch: str = "main") -> None:
    """Refuses a contract of which no box could be made."""
    what = f"contract {row['name']!r:.120}"
    if not isinstance(row["name"], str) or not NAME.fullmatch(row["name"]):
        raise Invalid(f"{row['name']!r:.120} can't be the name of a contract", hint="e.g. support-agent")
    for key in ("projections", "functions", "artifacts", "contracts"):
        if row[key] is not None and not (
            isinstance(row[key], list) and all(isinstance(each, str) and each for each in row[key])
        ):
            raise Invalid(f"{key} of {what} are a list of names", hint='["one", "another"]')
    for key, entity in (("projections", "projection"), ("functions", "function"), ("contracts", "contract")):
        for each in row[key] or ():
            if key != "contracts" or each != row["name"]:  # it may delegate to itself
                row_of(layer, entity, each, branch)
    approvals.check(layer, what, row["approvals"], branch)
    stops.check(layer, what, row["stops"], branch)
    schema = layer.schema(branch)
    compiled(canonical(functions.parts("reads", row["reads"])), schema)
    for name, part in functions.parts("scope", row["scope"]).items():
        entity = schema.get(name)
        Scope.of({"entities": {name: part}})
        for label in part.get("fields") or ():
            entity.get(label)
        if part.get("where"):
            compile_predicate(part["where"], schema, entity)
        if wrong := sorted(set(part.get("actions") or ()) - {"insert", "update", "delete"}):
            raise Invalid(f"{what} has no action {wrong[0]!r}", hint="insert, update, delete")
    for tier in (row["minimum_tier"], row["tier"]):
        check_tier(tier) if tier is not None else None
    check_budget(what, row["budget"])
    said = {**(blueprint or {}), "egress": list(egress(row, blueprint)), "secrets": list(lent(row, blueprint))}
    models.bind(what, vault.bind(said["egress"], vault.wanted(said["secrets"])), row["model"])
    if "money" in (row["budget"] or {}) and not (row["model"] or {}).get("prices"):
        raise Invalid(
            f"the budget of {what} is in money, and its model has no prices",
            hint='"prices": {"input": 3, "output": 15}',
        )


def check_budget(what: str, budget: Any) -> None:
    """Refuses a budget that nobody could count against."""
    for key, amount in (
        budget.items() if isinstance(budget, Mapping) else [("it", budget)] if budget is not None else []
    ):
        if (
            key not in BUDGET
            or isinstance(amount, bool)
            or not isinstance(amount, int | float)
            or not 0 < amount < 1e15
        ):
            raise Invalid(
                f"the budget of {what} has {', '.join(BUDGET)}, each a number above 0, not {key}={amount!r:.60}",
                hint='{"seconds": 900, "tokens": 200000}',
            )


MODEL = {"api", "url", "model", "secret", "max_tokens", "timeout", "prices"}


def check_agent(row: Mapping[str, Any]) -> None:
    """Refuses a model that nobody could ask, and a program that nobody could run."""
    what, model, program = f"contract {row['name']!r:.120}", row.get("model"), row.get("program")
    words = program if isinstance(program, list) else [program]
    if program is not None and not (words and all(isinstance(one, str) and one and "\0" not in one for one in words)):
        raise Invalid(
            f"the program of {what} is a list of texts, or a text for the shell", hint='["python3", "-m", "x"]'
        )
    if model is None:
        return
    if not isinstance(model, Mapping) or (wrong := sorted(set(model) - MODEL)):
        has = f", not {wrong[0]!r}" if isinstance(model, Mapping) else ""
        raise Invalid(f"the model of {what} has {', '.join(sorted(MODEL))}{has}")
    for key in ("api", "url", "model"):
        if not isinstance(model.get(key), str) or not model[key]:
            raise Invalid(
                f"the model of {what} needs {key!r}", hint='{"api": "anthropic", "url": "https://…", "model": "…"}'
            )
    if model["api"] not in ("anthropic", "openai"):
        raise Invalid(f"the model of {what} speaks {model['api']!r:.60}", hint="anthropic or openai")
    url = urlsplit(model["url"])
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or "@" in url.netloc:
        raise Invalid(f"the url of the model of {what} is not http(s)://HOST[/base]", hint="https://api.anthropic.com")
    if model.get("secret") is not None and not isinstance(model["secret"], str):
        raise Invalid(f"the secret of the model of {what} is a name", hint="its value is set with `layer secret set`")
    for key in ("max_tokens", "timeout"):
        if (n := model.get(key)) is not None and (
            isinstance(n, bool) or not isinstance(n, int | float) or not 0 < n < 1e9
        ):
            raise Invalid(f"{key} of the model of {what} is a number above 0")
    prices = model.get("prices")
    if prices is not None and not (
        isinstance(prices, Mapping) and all(k in ("input", "cached", "output") and not isinstance(v, bool) and isinstance(v, int | float) and 0 <= v < 1e9 for k, v in prices.items())
    ):  # fmt: skip
        raise Invalid(f"the prices of the model of {what} are of a million tokens", hint='{"input": 3, "output": 15}')


@verb("box.create", brief=False)
def create(call: Call, *, contract: str, name: str | None = None, slice: Object | None = None) -> Any:
    """Open a box of a contract on a branch, with a view over a slice; it stays until it is killed or over its budget."""
    layer, asking = call.layer, call.asking
    found, permissions = admitted(call, contract, call.branch)
    if name is not None and not BOX_NAME.fullmatch(name):
        raise Invalid(
            f"{name!r:.120} can't be the name of a box", hint="lower-case letters, digits and hyphens, 41 at most"
        )
    layer.ledger.intend(call.execution)
    made = Making(layer, found, asking.principal, call.branch, slice, name, permissions)
    execution = made.execution(asking, call.execution.id)
    layer.ledger.intend(execution, lambda tx: record(tx, execution))
    return made.act(execution)


def admitted(call: Call, contract: str, branch: str) -> tuple[Contract, list[int]]:
    """A contract by its name, and the permission rows that let the caller have a box of it on a branch; within its quotas."""
    layer, principal = call.layer, call.asking.principal
    found = load(layer, contract)
    try:
        permissions = decide(layer, principal, found, branch)
    except Denied as error:
        if "contract" in layer.schema().by_name:
            raise
        layer.ledger.denied(call.execution, error)  # whoever may not read contracts does not learn that there is one
        raise NotFound(f"there is no contract {contract!r}", hint="select name from contract lists them") from None
    usage.admit(layer, principal, found.id, ("boxes",))
    return found, permissions


def decide(layer: Any, principal: int, contract: Contract, branch: str) -> list[int]:
    """The permission rows that let a principal act under a contract, or Denied."""
    with layer.engine.reading() as session:
        policy = layer.catalog.policy(session, principal, clock(layer.engine, session)[1])
    resource = f"contract:{contract.name}"
    allowed, grants = policy.outright("call", resource, branch)
    if allowed:
        return [grant.id for grant in grants]
    raise policy.refusal("call", resource, grants, named=True)


def strong_enough(contract: Contract) -> None:
    """Denied when a contract's boxes would be weaker than the least it says: nobody is given another tier than was asked for."""
    if contract.minimum is None:
        return
    check_tier(contract.tier)
    check_tier(contract.minimum)
    if TIERS.index(contract.tier) < TIERS.index(contract.minimum):
        raise Denied(
            f"contract {contract.name!r} asks for tier {contract.tier!r}, and {contract.minimum!r} is the least for what it does",
            hint=f'layer contract define with "tier": "{contract.minimum}", or a stronger blueprint; `layer decide` says why',
            action="call",
            resource=f"contract:{contract.name}",
        )


def view(layer: Any, contract: Contract, slice: Any, branch: str) -> dict[str, Any]:
    """What a box reads: all that the contract does, or a slice of that."""
    if slice is None:
        return dict(contract.reads)
    if not isinstance(slice, Mapping):
        raise Invalid("a slice is a dict: entity -> condition, or null for all its rows")
    found = {}
    for entity, where in slice.items():
        if entity not in contract.reads:
            raise Denied(
                f"contract {contract.name!r} does not read {entity!r:.120}", action="read", resource=str(entity)
            )
        part = dict(contract.reads[entity])
        if where is not None:
            part["where"] = where if not part.get("where") else both(part["where"], where)
        found[entity] = part
    compiled(canonical(found), layer.schema(branch))
    return found


def record(tx: Tx, execution: Execution, parent: str | None = None, snapshot: str | None = None) -> None:
    """The intent of a box: its execution, and where it comes from."""
    number = tx.intend(execution)
    at = (execution.call or {})["branch"]
    tx.fact("ledger_lineage", tx.work.new_id(), f"b{number}", parent, snapshot, at, number, now())


def labels(layer_id: str, key: str) -> dict[str, str]:
    """What its host knows a box of this layer by."""
    return {"layer": layer_id, "box": key}


class Making:
    """One box of a contract, from what is wanted to where somebody else looks after it."""

    def __init__(
        self, layer: Any, contract: Contract, principal: int, branch: str, slice: Any, name: str | None, permissions: list[int]
    ) -> None:  # fmt: skip
        strong_enough(contract)
        self.layer, self.contract, self.principal, self.branch, self.slice = layer, contract, principal, branch, slice
        self.reads, self.permissions = view(layer, contract, slice, branch), permissions
        self.agent: dict[str, Any] | None = None  # the program that its keeper starts in it, and the task
        self.key = secrets.token_hex(8)  # the box's label, and what its token is made of
        self.name = name or f"{re.sub('[^a-z0-9]+', '-', contract.name)[:30].strip('-')}-{self.key[:6]}"
        row = {**(contract.blueprint or {}), "egress": list(contract.egress), "secrets": list(contract.secrets)}
        self.values, given, self.readable = vault.for_box(layer, row, principal, branch=branch)
        given = models.bind(f"contract {contract.name!r}", given, contract.model)
        limit = contract.budget.get("seconds")
        shaped = (
            Blueprint()
            if contract.blueprint is None
            else shape({**contract.blueprint, "tier": contract.tier, "egress": given})
        )
        wrote = () if contract.blueprint is None else (definer_of(layer, "blueprint", contract.blueprint),)
        guard(layer, shaped.changed(tier=contract.tier), contract.writer, *wrote)
        # At tier process a file has no place that is the same in every box.
        self.sliced = bool((contract.blueprint or {}).get("slice")) and contract.tier != "process"
        env = {"LAYER_SLICE": SLICE} if self.sliced else {}
        self.shape = shaped.changed(
            tier=contract.tier,
            # The host's clock goes on while a box waits for a yes, which its budget does not pay: then only its keeper counts.
            wall=shaped.wall if contract.approvals else min(filter(None, (shaped.wall, limit)), default=None),
            env={**shaped.env, **env},
        )

    def execution(self, asking: Any, parent: int | None, fresh: bool = False) -> Execution:
        """The execution that the box is, not recorded yet. A `fresh` branch is not there yet either."""
        scope = {"branch": self.branch, "entities": self.contract.scope}
        made: Execution = self.layer.ledger.open(
            self.principal, scope, "contract", asking.reason, parent, traceparent(asking.trace)
        )
        made.tier = self.shape.tier
        made.blueprint = None if self.contract.blueprint is None else self.contract.blueprint["name"]
        with self.layer.engine.reading() as session:
            state = clock(self.layer.engine, session)[0]
            branch = MAIN if self.branch == "main" or fresh else self._branch(session)
        made.call = self.called(branch, state)
        return made

    def _branch(self, session: Any) -> int:
        return int(self.layer.catalog.branch(session, self.branch, open_only=True).id)

    def called(self, branch: int | None, state: int) -> dict[str, Any]:
        """What was asked, as columns of the ledger."""
        given = {
            "contract": self.contract.name, "name": self.name, "slice": self.slice, "key": self.key, "terms": self.contract.terms,
            "host": home(), "readable": sorted(self.readable), "sliced": self.sliced,
        }  # fmt: skip
        if self.agent is not None:
            given["agent"] = self.agent
        return {
            "verb": "box.create" if self.agent is None else "agent.run", "version": self.contract.version, "arguments": json_text("arguments", given), "branch": branch, "state": state,
            "contract": self.contract.id, "attempt": 1, "permissions": json_text("permissions", self.permissions),
        }  # fmt: skip

    def act(self, execution: Execution) -> dict[str, Any]:
        """Make the box that was intended; what fails is the execution's end, and leaves no box."""
        from . import tending

        ledger, box = self.layer.ledger, None
        holder = f"maker.{self.key}"
        self.layer.engine.lease(f"{usage.LIVE}{execution.id}", holder, 120.0)
        try:
            env = {**self.shape.env, "TRACEPARENT": execution.trace or ""}
            box = Sandbox.create(
                name=self.name, blueprint=self.shape.changed(env=env), secrets=dict(self.values),
                labels=labels(self.layer.id, self.key) | bridging.labels(self.layer, self.principal, self.shape.egress),
                token=token(self.layer.id, self.key),
            )  # fmt: skip
            told = self.finish(execution, box)
        except BaseException as error:
            if box is not None:
                box.kill()
            failure = error if isinstance(error, LayerError) else LayerError(f"{type(error).__name__}: {error}")
            said = {"error": {"code": failure.code, "message": failure.message, "hint": failure.hint}}
            ledger.conclude(execution, "denied" if isinstance(error, Denied) else "failed", said)
            raise
        finally:
            self.layer.engine.release(f"{usage.LIVE}{execution.id}", holder)
        ledger.let_go(execution)
        told["kept"] = tending.ensure(self.layer)
        return told

    def finish(self, execution: Execution, box: Any) -> dict[str, Any]:
        """What is done once there is a box: its slice, and the first steps."""
        found = box.info()
        steps = [("box", {"id": box.id, "name": self.name, "tier": box.tier, "isolation": found["isolation"]})]
        steps += [("secret", {"name": name, "use": "injected"}) for name in self.values]
        if origin := (self.agent or {}).get("from"):
            steps.append(("fork", origin))
        if self.sliced:
            steps.append(
                (
                    "query",
                    {
                        "slice": sorted(self.reads),
                        "tx": put_slice(self.layer, box, self.reads, self.principal, self.branch),
                    },
                )
            )
        at = now()
        self.layer.ledger.note(
            execution,
            [
                ("ledger_step", (execution.id, n, kind, json_text("step", detail), at))
                for n, (kind, detail) in enumerate(steps, 1)
            ],
        )
        return {
            "box": self.name, "id": box.id, "execution": execution.id, "contract": self.contract.name, "branch": self.branch,
            "tier": box.tier, "isolation": found["isolation"], "slice": SLICE if self.sliced else None,
        }  # fmt: skip


def put_slice(layer: Any, box: Any, reads: Mapping[str, Any], principal: int, branch: str) -> int:
    """Write what a box may read into a file of it, in the place of the one before; the tx it shows."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "slice.db")
        tx = slices.write(path, layer.reads, reads, principal, branch, {"layer": layer.id, "at": now()})
        with open(path, "rb") as file:
            box.files.write(f"{SLICE}.new", file, mode=0o444, user="root")
        box.files.move(f"{SLICE}.new", SLICE, user="root")
    return tx


# Who a box is: its listener, and a token that is made of its label with a key that lies in no database


def token(layer_id: str, key: str) -> str:
    """The token of a box's channel: the same for whoever has this person's keys, also after a restart."""
    made = hmac.new(channel_key(), f"{layer_id}:{key}".encode(), hashlib.sha256)
    return made.hexdigest()[:48]


def channel_key() -> bytes:
    """What tokens of boxes are made with: this person's, made at its first use."""
    path = config_directory() / "channel.key"
    return own_file(path, lambda: secrets.token_bytes(32), "no box is made with it")


def home() -> str:
    """This machine's host of boxes: a name that stays the same when it starts again."""
    try:
        machine = Path("/etc/machine-id").read_text().strip() or os.uname().nodename
    except OSError:
        machine = os.uname().nodename
    return hashlib.sha256(f"{machine}:{state_directory()}".encode()).hexdigest()[:12]


def tend(layer: Any) -> None:
    """Look after the boxes of contracts that live on this machine, from now on."""
    from . import tending

    tending.of(layer).look()
