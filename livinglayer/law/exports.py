"""Exports: executions as other tools read them: OpenTelemetry spans, W3C PROV, CloudEvents. All of it is JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any

from ..errors import Invalid, NotFound
from ..substrate.schema import SYSTEM
from ..substrate.values import decode
from .executions import TRACE
from .tree import Node, plain
from .why import Ask, why

SPANS = 10_000  # executions of one export
EVENTS = 1000  # steps of one execution in an export
NAME = "livinglayer"
TRACE_ID = re.compile(r"[0-9a-f]{32}")
_STEP = SYSTEM.by_name["step"]


def otel(layer: Any, of: int | str, *, principal: int | None = None) -> dict[str, Any]:
    """The trace of an execution, or a trace by its id, as OTLP/JSON: executions are spans, their steps events; NotFound when it may not be read."""
    with layer.engine.reading() as session:
        ask = Ask(layer, session, layer.my_id if principal is None else principal, "main", None)
        spans = [_span(layer, ask, row, seen) for row, seen in _executions(ask, of)]
    resource = {"attributes": _attributes({"service.name": NAME, f"{NAME}.layer": layer.id})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": NAME}, "spans": spans}]}]}


def cloudevents(layer: Any, of: int | str, *, principal: int | None = None) -> list[dict[str, Any]]:
    """The ends of executions of a trace and what they emitted, as CloudEvents 1.0; NotFound when it may not be read."""
    found = []
    with layer.engine.reading() as session:
        ask = Ask(layer, session, layer.my_id if principal is None else principal, "main", None)
        for row, seen in _executions(ask, of):
            about = {
                "specversion": "1.0", "source": f"/layer/{layer.id}", "subject": f"execution/{row['id']}", "datacontenttype": "application/json",
                **({"traceparent": seen["trace"]} if seen.get("trace") else {}),
            }  # fmt: skip
            for step in _steps(ask, row["id"]):
                if step["kind"] == "emit":
                    named = f"{NAME}.event.{step['detail'].get('name')}"
                    found.append(
                        about
                        | {
                            "id": f"{row['id']}/{step['n']}",
                            "type": named,
                            "time": step["at"],
                            "data": step["detail"].get("data"),
                        }
                    )
            if seen.get("finished"):
                kind = f"{NAME}.execution.{seen.get('status')}"
                data = plain({k: v for k, v in ask.described(row, seen).items() if v is not None})
                found.append(about | {"id": str(row["id"]), "type": kind, "time": seen["finished"], "data": data})
    return found


def prov(layer: Any, subject: str | int, *, principal: int | None = None, branch: str = "main") -> dict[str, Any]:
    """Why something is as it is, as PROV-JSON: facts are entities, executions activities, principals agents; NotFound as for `why`."""
    document: dict[str, Any] = {"prefix": {"ll": f"urn:{NAME}:{layer.id}:"}}
    _Provenance(document).visit(why(layer, subject, principal=principal, branch=branch), None)
    return document


# The executions of a trace


def _executions(ask: Ask, of: int | str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The recorded executions that belong to a trace, or to that of one execution, those that may be read."""
    seen = 0
    for number in _numbers(ask, of):
        row = ask.recorded(number)
        shown = ask.visible_execution(row)
        if row is not None and shown is not None:
            seen += 1
            yield row, shown
    if not seen:
        raise NotFound(f"there is no {'execution' if isinstance(of, int) else 'trace'} {of}")


def _numbers(ask: Ask, of: int | str) -> list[int]:
    if isinstance(of, str) and of.isascii() and of.isdigit() and len(of) < 19:
        of = int(of)
    trace = of
    if type(of) is int:
        row = ask.recorded(of)
        if row is None or ask.visible_execution(row) is None:
            raise NotFound(f"there is no execution {of}")
        found = TRACE.fullmatch(row["trace"] or "")
        if found is None:
            return _below(ask, of)
        trace = found[1]
    if not isinstance(trace, str) or not TRACE_ID.fullmatch(trace):
        raise Invalid(f"{of!r} is no trace", hint="an execution's number, or the 32 hex digits of a trace")
    rows = ask.session.all(
        f"select id from {ask.at}ledger_execution where trace >= ? and trace < ? order by trace limit {SPANS}",
        (f"00-{trace}-", f"00-{trace}."),
    )
    return sorted(number for (number,) in rows)


def _below(ask: Ask, number: int) -> list[int]:
    """An execution without a trace, and those it started."""
    found, frontier = [number], [number]
    while frontier and len(found) < SPANS:
        rows = ask.session.all(
            f"select id from {ask.at}ledger_execution where parent = ? limit {SPANS}", (frontier.pop(),)
        )
        found += [child for (child,) in rows]
        frontier += [child for (child,) in rows]
    return sorted(found[:SPANS])


def _steps(ask: Ask, number: int) -> Iterator[dict[str, Any]]:
    detail, at = ask.engine.portable("detail", "json"), ask.engine.portable("at", "datetime")
    rows = ask.session.all(
        f"select n, kind, {detail}, {at} from {ask.at}ledger_step where execution = ? order by n limit {EVENTS}",
        (number,),
    )
    for n, kind, stored, when in rows:
        seen = ask.shown(_STEP, {"execution": number, "n": n, "kind": kind, "detail": stored, "at": when})
        if seen is not None:
            told = json.loads(seen.get("detail") or "null")
            yield {"n": n, "kind": kind, "at": when, "detail": told if isinstance(told, dict) else {"detail": told}}


# OpenTelemetry


def _ids(layer: Any, row: Mapping[str, Any]) -> tuple[str, str]:
    """The trace and span of an execution; one that has none gets its own, always the same."""
    found = TRACE.fullmatch(row["trace"] or "")
    if found:
        return found[1], found[2]
    made = sha256(f"{layer.id}/execution/{row['id']}".encode()).hexdigest()
    return made[:32], made[32:48]


def _span(layer: Any, ask: Ask, row: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    trace, span = _ids(layer, row)
    data = ask.described(row, seen)
    start, end = data.get("started"), data.get("finished") or data.get("started")
    result = data.get("result")
    error = result.get("error") if isinstance(result, Mapping) else None
    made: dict[str, Any] = {
        "traceId": trace, "spanId": span, "name": str(data.get("function") or data.get("verb") or data.get("kind") or "execution"),
        "kind": 1, "startTimeUnixNano": _nanoseconds(start), "endTimeUnixNano": _nanoseconds(end),
        "attributes": _attributes({f"{NAME}.{key}": value for key, value in data.items() if key not in ("started", "finished", "trace", "result")}),
        "events": [
            {"timeUnixNano": _nanoseconds(decode("datetime", step["at"])), "name": step["kind"], "attributes": _attributes(step["detail"])}
            for step in _steps(ask, row["id"])
        ],
        "status": {"code": 1 if data.get("status") == "done" else 2 if data.get("finished") else 0},
    }  # fmt: skip
    if isinstance(error, Mapping):
        made["status"]["message"] = f"{error.get('code')}: {error.get('message')}"
    for above in _above(ask, row, seen):
        other = _ids(layer, above)
        if other[0] == trace and "parentSpanId" not in made:
            made["parentSpanId"] = other[1]
        else:
            made.setdefault("links", []).append({"traceId": other[0], "spanId": other[1]})
    return made


def _above(ask: Ask, row: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The executions that led to one: its parent, and that of the change that fired it."""
    numbers = [row["parent"]] if row["parent"] is not None and "parent" in seen else []
    if row["cause_tx"] is not None and "cause_tx" in seen:
        cause = ask.transaction(row["cause_tx"])
        numbers += [] if cause is None else [cause["execution"]]
    for number in dict.fromkeys(numbers):
        above = ask.recorded(number)
        if above is not None and ask.visible_execution(above) is not None:
            yield above


def _nanoseconds(at: Any) -> str:
    if not isinstance(at, datetime):
        return "0"
    return f"{int(at.timestamp())}{at.microsecond:06}000"


def _attributes(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _any(value)} for key, value in given.items() if value is not None]


def _any(value: Any) -> dict[str, Any]:
    value = plain(value)
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


# PROV


class _Provenance:
    """Fills a PROV document from a tree of causes."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def visit(self, node: Node, caused: str | None) -> None:
        """Take a part in; `caused` is the activity that it led to."""
        data = node.data
        if node.kind == "fact":
            for tx in (link.data for link in node.links if link.kind == "tx"):
                self._generated(data, tx)
        elif node.kind == "tx":
            for change in data.get("changes") or ():
                self._generated(change, data)
        if node.kind == "execution":
            caused = self._activity(data, caused)
        for link in node.links:
            self.visit(link, caused)

    def _put(self, kind: str, name: str, **values: Any) -> str:
        self.document.setdefault(kind, {}).setdefault(name, {}).update(
            {k: v for k, v in values.items() if v is not None}
        )
        return name

    def _relate(self, kind: str, **ends: Any) -> None:
        known = self.document.setdefault(kind, {})
        relation = {f"prov:{name}": value for name, value in ends.items() if value is not None}
        if relation not in known.values():
            known[f"_:{kind}{len(known) + 1}"] = relation

    def _generated(self, fact: Mapping[str, Any], tx: Mapping[str, Any]) -> None:
        values = {f"ll:{name}": json.dumps(plain(value)) for name, value in fact["fields"].items()}
        entity = self._put("entity", f"ll:{fact['entity']}/{fact['id']}@{tx['tx']}", **values)
        if tx.get("execution") is not None:
            made = {"entity": entity, "activity": f"ll:execution/{tx['execution']}", "time": plain(tx.get("at"))}
            self._relate("wasGeneratedBy", **made)

    def _activity(self, data: Mapping[str, Any], caused: str | None) -> str:
        told = {"prov:startTime": plain(data.get("started")), "prov:endTime": plain(data.get("finished"))}
        name = self._put(
            "activity", f"ll:execution/{data['id']}", **told, **{"prov:label": data.get("function") or data.get("verb")}
        )
        if data.get("principal"):
            agent = self._put("agent", f"ll:principal/{data['principal']}")
            self._relate("wasAssociatedWith", activity=name, agent=agent)
            if data.get("authority"):
                other = self._put("agent", f"ll:principal/{data['authority']}")
                self._relate("actedOnBehalfOf", delegate=agent, responsible=other, activity=name)
        if data.get("function"):
            code = self._put("entity", f"ll:function/{data['function']}@{data.get('version')}")
            self._relate("used", activity=name, entity=code)
        if caused is not None:
            self._relate("wasInformedBy", informed=caused, informant=name)
        return name
