"""Tree: an answer about causes, as data and as lines for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any


@dataclass(frozen=True)
class Node:
    """One part of an answer: a row, fact, tx, execution, permission, trigger, step, conflict, merge, origin or note, and what it leads to."""

    kind: str
    data: Mapping[str, Any]
    links: tuple[Node, ...] = ()

    def walk(self) -> Iterator[Node]:
        """This one and all it leads to."""
        yield self
        for link in self.links:
            yield from link.walk()

    def json(self) -> dict[str, Any]:
        """The tree in JSON's types."""
        return {"kind": self.kind, "data": plain(self.data), "links": [link.json() for link in self.links]}

    def lines(self) -> list[str]:
        """The tree for people."""
        first, *more = said(self)
        found = [first, *(f"{'│' if self.links else ' '}  {line}" for line in more)]
        for place, link in enumerate(self.links, start=1):
            last = place == len(self.links)
            head, *rest = link.lines()
            found.append(f"{'└' if last else '├'}─ {head}")
            found += [f"{' ' if last else '│'}  {line}" for line in rest]
        return found


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def note(text: str) -> Node:
    return Node("note", {"text": text})


# What each says


def said(node: Node) -> list[str]:
    """What one part says, its own lines only."""
    return _SAYS[node.kind](node.data)


def moment(value: Any) -> str:
    return f"{value:%Y-%m-%d %H:%M:%S}Z" if isinstance(value, datetime) else ""


def duration(seconds: float) -> str | None:
    if seconds < 0.001:
        return None
    return f"in {seconds * 1000:,.0f} ms" if seconds < 10 else f"in {seconds:,.0f} s"


def short(value: Any, most: int = 60) -> str:
    text = json.dumps(plain(value), ensure_ascii=False)
    return text if len(text) <= most else text[: most - 1] + "…"


def _parts(*parts: str | None) -> str:
    return " · ".join(part for part in parts if part)


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {short(value)}" for name, value in fields.items())


def _say_row(data: Mapping[str, Any]) -> list[str]:
    return [f"{data['entity']}/{data['id']} on {data['branch']}{', which was deleted' if data.get('deleted') else ''}"]


def _say_fact(data: Mapping[str, Any]) -> list[str]:
    row, fields = f"{data['entity']}/{data['id']}", data["fields"]
    where = "" if data["branch"] in (None, "main") else f" on {data['branch']}"
    if data["op"] == "delete":
        return [f"{row}{where} was deleted"]
    if data["op"] == "insert" and len(fields) > 1:
        fields = {name: value for name, value in fields.items() if value is not None}
    if len(fields) == 1:
        return [f"{row}.{_fields(fields)}{where}"]
    return [f"{row}{where}: {_fields(fields)}" if fields else f"{row}{where}"]


def _say_tx(data: Mapping[str, Any]) -> list[str]:
    reason = f"“{data['reason']}”" if data.get("reason") else None
    where = None if data.get("branch") in (None, "main") else f"on {data['branch']}"
    merged = f"merged {data['merged_from']}" if data.get("merged_from") else None
    above = "as above" if data.get("above") else None
    lines = [_parts(f"tx {data['tx']}", moment(data.get("at")), data.get("principal"), where, merged, reason, above)]
    for change in () if above else data.get("changes") or ():
        done = {"insert": "new", "update": "changed", "delete": "deleted"}.get(change["op"] or "", "changed")
        lines.append(
            f"{done} {change['entity']}/{change['id']}" + (f": {_fields(change['fields'])}" if change["fields"] else "")
        )
    if data.get("more") and not above:
        lines.append("and more rows")
    return lines


def _say_execution(data: Mapping[str, Any]) -> list[str]:
    what = data.get("function") or data.get("verb") or data.get("kind") or ""
    given = data.get("arguments")
    called = ", ".join(f"{k}={short(v, 40)}" for k, v in given.items()) if isinstance(given, Mapping) else ""
    if len(called) > 120:
        called = called[:119] + "…"
    shown = f"{what}({called})" if data.get("function") or data.get("verb") else what
    who = data.get("principal")
    if data.get("authority"):
        who = f"{who} with the rights of {data['authority']}"
    if data.get("above"):
        return [_parts(f"execution {data['id']}", what, who, "as above")]
    took, result = None, data.get("result")
    if isinstance(data.get("finished"), datetime) and isinstance(data.get("started"), datetime):
        took = duration((data["finished"] - data["started"]).total_seconds())
    status = None if data.get("kind") == "direct" else data.get("status")  # that of a handle: open until it is closed
    ended = " ".join(part for part in (status, took) if part)
    lines = [_parts(f"execution {data['id']}", shown, who, ended)]
    attempt = data.get("attempt")
    more = _parts(
        f"code of tx {data['version']}" if data.get("version") else None,
        data.get("language"),
        f"contract {data['contract']}" if data.get("contract") else None,
        _box(data) if data.get("function") or data.get("blueprint") else None,
        f"snapshot {data['snapshot']}" if data.get("snapshot") else None,
        f"attempt {attempt}" if isinstance(attempt, int) and attempt > 1 else None,
        f"saw tx {data['state']}" if data.get("function") and data.get("state") else None,
        f"{data['steps']} step{'' if data['steps'] == 1 else 's'}" if data.get("steps") else None,
        f"trace {str(data['trace'])[3:35]}" if data.get("function") and data.get("trace") else None,
        f"“{data['reason']}”" if data.get("reason") else None,
    )
    if more:
        lines.append(more)
    error = result.get("error") if isinstance(result, Mapping) else None
    if isinstance(error, Mapping):
        lines.append(f"{error.get('code')}: {error.get('message')}")
    return lines


def _box(data: Mapping[str, Any]) -> str | None:
    ran = data.get("ran_in") or {}
    tier = ran.get("tier") or data.get("tier")
    if not tier:
        return None
    named = f"{tier} box" + (f" {ran['id']}" if ran.get("id") else "")
    return (
        named
        + (f" of {data['blueprint']}" if data.get("blueprint") else "")
        + (", reused" if ran.get("reused") else "")
    )


def _say_permission(data: Mapping[str, Any]) -> list[str]:
    verb = "may not" if data.get("effect") == "deny" else "may"
    fields = f" ({', '.join(data['fields'])})" if data.get("fields") else ""
    where = f" where {data['predicate']}" if data.get("predicate") else ""
    branch = f" on {data['branch']}" if data.get("branch") else ""
    action, resource = data.get("action"), data.get("resource")
    act = f"{action} {'everything' if resource == '*' else resource}"
    if action == "*":
        act = "do everything" + ("" if resource == "*" else f" with {resource}")
    what = f"{data.get('subject')} {verb} {act}{fields}{where}{branch}"
    by = f"granted by {data['granted_by']}" if data.get("granted_by") else None
    reason = f"“{data['reason']}”" if data.get("reason") else None
    return [_parts(f"permission {data['id']}: {what}", by, reason)]


def _say_trigger(data: Mapping[str, Any]) -> list[str]:
    on = None
    if data.get("on_entity"):
        acts = " or ".join(data.get("on_actions") or ("change",))
        fields = f" ({', '.join(data['on_fields'])})" if data.get("on_fields") else ""
        on = f"on {acts} of {data['on_entity']}{fields}" + (
            f" where {data['predicate']}" if data.get("predicate") else ""
        )
    elif data.get("schedule"):
        on = f"at {data['schedule']}"
    elif data.get("after_function"):
        on = f"after {data['after_function']}" + (f" is {data['after_status']}" if data.get("after_status") else "")
    return [_parts(f"trigger {data.get('name') or data['id']}" + (f": {on}" if on else ""), data.get("function"))]


def _say_step(data: Mapping[str, Any]) -> list[str]:
    detail = data["detail"] if isinstance(data["detail"], Mapping) else {"detail": data["detail"]}
    return [f"step {data['n']}, {data['step']}: {', '.join(f'{k} {short(v)}' for k, v in detail.items() if k != 'ms')}"]


def _say_conflict(data: Mapping[str, Any]) -> list[str]:
    name = f"{data.get('entity')}/{data.get('row_id')}" + (f".{data['field']}" if data.get("field") else "")
    sides = f"{short(data.get('ours'))} on {data.get('branch')}, {short(data.get('theirs'))} on {data.get('target')}"
    chosen = data.get("resolution") or {}
    took = f"took {data.get('branch') if chosen.get('take') == 'ours' else data.get('target')}'s"
    return [
        f"conflict {data['id']} over {name}: {sides}; resolved: {took if 'take' in chosen else short(chosen.get('value'))}"
    ]


def _say_origin(data: Mapping[str, Any]) -> list[str]:
    kind, name = data["origin"], data["name"]
    if kind == "genesis":
        return ["the beginning of the layer"]
    if kind == "schedule":
        return [_parts(f"the schedule {name}", f"due {moment(data['due'])}" if data.get("due") else None)]
    if kind == "import":
        return [f"an import of {name}"]
    return [f"{name}, {'an' if kind[:1] in 'aeiou' else 'a'} {kind}" if kind else str(name)]


_SAYS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "row": _say_row, "fact": _say_fact, "tx": _say_tx, "execution": _say_execution, "permission": _say_permission, "trigger": _say_trigger,
    "step": _say_step, "conflict": _say_conflict, "origin": _say_origin, "note": lambda data: [str(data["text"])],
}  # fmt: skip


def nodes(tree: Node, kind: str) -> Iterable[Node]:
    """The parts of one kind."""
    return (node for node in tree.walk() if node.kind == kind)
