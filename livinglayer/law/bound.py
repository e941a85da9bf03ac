"""Bound: the execution that a box of a contract is; what it asks for is decided here, and what needs a yes waits here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import Denied, Invalid, LayerError, LimitExceeded, NotFound
from ..sandbox.egress import rules
from ..substrate.ledger import Execution, Tx
from ..substrate.reads import clock
from . import approvals, contracts, delegation, stops, tools
from . import secrets as vault
from .executions import STEPS, Run, asked_for
from .signature import dumps

ANSWER = 64 << 10  # bytes of what an agent returns


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
                self.layer.ledger.denied(self.execution, error, action=name)
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
        self.layer.ledger.flush(self.execution)
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
