"""Widening: which changes of a plan let somebody do more than before, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..law.blueprints import weaker
from ..law.functions import parts
from ..substrate.schema import OWNER
from . import migrations
from .changes import Step, more
from .definitions import Found, Key, plain, same


class Widening:
    """Says of a change why it lets somebody do more than before; None when it does not."""

    def __init__(self, found: Found, step: Step) -> None:
        self.found, self.wanted = found, step.wanted
        rows = found.rows
        self.triggered = self._calling(
            {row["function"] for row in rows["trigger"].values()}
            | {spec["function"] for (kind, _), spec in step.wanted.items() if kind == "trigger"}
        )
        self.lent = self._calling({name for row in rows["contract"].values() for name in row["functions"] or ()})
        self.grants = [row for row in found.grants.values() if row["subject"] != OWNER]
        self.spoken = {row["resource"] for row in self.grants if row["effect"] == "allow"}
        bound = [row["subject"] for row in self.grants if row["effect"] == "deny"]
        bound += [row["subject"] for row in found.quotas.values()]
        self.bound = {found.principals[number]["name"] for number in bound if number in found.principals}

    def _calling(self, names: set[str]) -> set[str]:
        """These functions, and those that they call."""
        known = [(row["name"], row) for row in self.found.rows["function"].values()]
        known += [(name, spec) for (kind, name), spec in self.wanted.items() if kind == "function"]
        calls: dict[str, set[str]] = {}
        for name, spec in known:
            called = parts("reads", spec.get("reads")).get("function", {})
            calls.setdefault(name, set()).update(called.get("names") or ())
        waiting = [*names]
        while waiting:
            more = calls.get(waiting.pop(), set()) - names
            names |= more
            waiting += more
        return names

    def step(self, step: Mapping[str, Any]) -> str | None:
        """The same of a step of a migration: permissions and contracts go by names, and by what rows hold."""
        kind, given = migrations.parts(step)
        entity, to = given["entity"], given.get("to")
        said = [(g["effect"], g["resource"], g["fields"], g["predicate"]) for g in self.grants]
        said += [
            ("allow", name, part.get("fields"), part.get("where"))
            for row in self.found.rows["contract"].values()
            for label in ("reads", "scope")
            for name, part in parts(label, row[label]).items()
        ]
        if kind == "rename_entity":
            if any((effect, name) == ("deny", entity) for effect, name, _, _ in said):
                return f"a prohibition speaks of {entity}"
            named = any((effect, name) == ("allow", to) for effect, name, _, _ in said)
            return f"what is allowed already speaks of {to}" if named else None
        about = [(effect, fields or (), where or "") for effect, name, fields, where in said if name in (entity, "*")]
        if kind == "rename" and any(effect == "deny" and given["field"] in fields for effect, fields, _ in about):
            return f"a prohibition speaks of {entity}.{given['field']}"
        coming: Mapping[str, Any] = (
            {str(to): given["field"]} if kind == "rename" else given["values"] if kind == "set" else {}
        )
        for label, value in coming.items():
            source = value.get("$field") if kind == "set" and isinstance(value, Mapping) else value
            moved = kind == "rename" or source is not value
            if moved and any(e == "allow" and label in fields and source not in fields for e, fields, _ in about):
                return f"what is allowed already speaks of {entity}.{label}"
            if any(re.search(rf"\b{re.escape(label)}\b", where or "") for _, _, _, where in said):
                return f"a condition of what is allowed speaks of {label}"
        return None

    def why(self, key: Key, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str | None:
        judge = getattr(self, f"_{key[0]}", None)
        said = None if judge is None else judge(key[1], before, after)
        named = key[1] if key[0] == "entity" else f"{key[0]}:{key[1]}"
        if said is None and before is None and named in self.spoken:
            return f"a permission that is there already speaks of {named}"
        if key[0] == "projection" and before is None and after is not None and "*" in self.spoken:
            return "who may read everything may read it, and it shows what whoever applies this may see"
        return said

    def _grant(self, name: str, before: Any, after: Any) -> str | None:
        if after is None:
            return "a prohibition goes" if before["effect"] == "deny" else None
        return None if after["effect"] == "deny" else f"{after['to']} may {after['action']} {after['resource']}"

    def _role(self, name: str, before: Any, after: Any) -> str | None:
        if after is not None and before is not None and before["kind"] != "role":
            return "a principal becomes a role"
        return "prohibitions and limits of it go" if after is None and name in self.bound else None

    def _principal(self, name: str, before: Any, after: Any) -> str | None:
        had, has = {*(before or {}).get("roles", ())}, {*(after or {}).get("roles", ())}
        if more := sorted(has - had):
            return f"{name} gets the role {', '.join(more)}"
        if less := sorted((had - has) & self.bound):
            return f"prohibitions and limits of {', '.join(less)} do not hold for {name} any more"
        changed = after is not None and before is not None and not same(before["attributes"], after["attributes"])
        return "conditions may speak of its attributes" if changed else None

    def _blueprint(self, name: str, before: Any, after: Any) -> str | None:
        if after is None:
            return None
        was: Mapping[str, Any] = before or {"tier": "namespace"}
        said = []
        if after["tier"] == "process" and (before is None or was["tier"] != "process"):
            said.append("tier process: no walls")
        elif weaker(after["tier"], was["tier"]) and before is not None:
            said.append(f"tier {was['tier']} → {after['tier']}")
        said += _opened(was.get("egress"), after.get("egress"))
        said += [f"mounts {_of(each)}" for each in more(was.get("mounts"), after.get("mounts"))]
        said += [f"uses secret {_of(each)}" for each in more(was.get("secrets"), after.get("secrets"))]
        if before is not None:
            said += [
                f"another {label}"
                for label in ("base", "packages", "environment", "user_name")
                if was.get(label) != after.get(label)
            ]
            said += [f"port {_of(each)}" for each in more(was.get("ports"), after.get("ports"))]
        return "; ".join(said) or None

    def _function(self, name: str, before: Any, after: Any) -> str | None:
        if after is None:
            return None
        if after.get("rights") == "definer":
            return "it has the rights of whoever applies this"
        if lent := self._lent(before, after):
            return "; ".join(lent)
        does = ("language", "code", "reads", "writes", "blueprint")
        if before is None or any(before.get(k) != after.get(k) for k in does):
            if name in self.triggered:
                return "a trigger runs it as whoever wrote the trigger"
            if name in self.lent:
                return "what a contract may call calls it" if before is None else "boxes of a contract may call it"
        return None

    def _projection(self, name: str, before: Any, after: Any) -> str | None:
        if after is not None and after.get("remote") is not None and (before or {}).get("remote") != after["remote"]:
            return f"it makes this layer ask {after['remote'].get('url')}"
        changed = before is not None and after is not None and before["statement"] != after["statement"]
        return "it shows what whoever applies this may see" if changed else None

    def _contract(self, name: str, before: Any, after: Any) -> str | None:
        if after is None:
            return None
        was: Mapping[str, Any] = before or {}
        said = [f"{word} {_of(each)}" for label, word in (("functions", "calls"), ("projections", "shows"), ("contracts", "delegates to"))
                for each in more(was.get(label), after.get(label))]  # fmt: skip
        for label, word in (("reads", "reads"), ("scope", "writes")):
            mine, theirs = parts(label, after.get(label)), parts(label, was.get(label))
            said += [
                f"{word} {entity}"
                for entity, part in mine.items()
                if entity not in theirs or not _within(part, theirs[entity])
            ]
        if after.get("egress") is None and was.get("egress") is not None:
            said.append("egress as its blueprint")
        else:
            said += _opened(was.get("egress"), after.get("egress"))
        if after.get("secrets") is None and was.get("secrets") is not None:
            said.append("secrets as its blueprint")
        else:
            said += [f"uses secret {_of(each)}" for each in more(was.get("secrets"), after.get("secrets"))]
        if after.get("model") and after["model"] != was.get("model"):
            said.append(f"asks a model at {after['model'].get('url')}")
        if before is not None:
            least, now = was.get("minimum_tier"), after.get("minimum_tier")
            if least and (not now or weaker(now, least)):
                said.append(f"minimum_tier {least} → {now or 'none'}")
            if weaker(tier := self._tier(after, True), then := self._tier(was, False)):
                said.append(f"tier {then} → {tier}")
            if was.get("blueprint") != after.get("blueprint"):
                said.append(f"blueprint {was.get('blueprint')} → {after.get('blueprint')}")
            first = (after.get("approvals") or [])[: len(was.get("approvals") or ())]
            if first != (was.get("approvals") or []):  # the first that speaks of an act decides who is asked
                gone = more(after.get("approvals"), was.get("approvals"))
                said.append("approval no longer needed" if gone else "approvals: others are asked first")
            said += ["stops later" for _ in more(after.get("stops"), was.get("stops"))][:1]
            for label, amount in (was.get("budget") or {}).items():
                now = (after.get("budget") or {}).get(label)
                if now is None or now > amount:
                    said.append(f"budget {label} {plain(amount)} → {'none' if now is None else plain(now)}")
        elif self._tier(after, True) == "process":
            said.append("tier process: no walls")
        if before is None:
            said += self._lent(before, after)
        return "; ".join(dict.fromkeys(said)) or None

    def _lent(self, before: Any, after: Mapping[str, Any]) -> list[str]:
        """What boxes have by a blueprint that is not the bundle's own, when that is another than before."""
        name = after.get("blueprint")
        if name is None or ("blueprint", name) in self.wanted or (before or {}).get("blueprint") == name:
            return []
        row = self._shape(name)
        return [
            f"{k} as blueprint {name}" for k in ("egress", "secrets", "mounts") if after.get(k) is None and row.get(k)
        ]

    def _shape(self, name: str | None) -> Mapping[str, Any]:
        return next((row for row in self.found.rows["blueprint"].values() if row["name"] == name), {})

    def _tier(self, contract: Mapping[str, Any], coming: bool) -> str:
        """The tier of a contract's boxes, now or after this."""
        shape = self._shape(contract.get("blueprint"))
        if coming:
            shape = self.wanted.get(("blueprint", contract.get("blueprint") or ""), shape)
        return str(contract.get("tier") or shape.get("tier") or "namespace")

    def _trigger(self, name: str, before: Any, after: Any) -> str | None:
        return (
            None
            if after is None or not after.get("enabled", True)
            else f"calls {after['function']} as whoever applies this"
        )

    def _quota(self, name: str, before: Any, after: Any) -> str | None:
        if after is None:
            return "a limit goes"
        return "a limit rises" if before is not None and after["amount"] > before["amount"] else None


def _of(value: Any) -> str:
    if isinstance(value, Mapping):
        value = next(
            (value[k] for k in ("name", "secret", "source", "host", "path") if k in value),
            json.dumps(value, sort_keys=True),
        )
    return str(value)


def _opened(was: Sequence[Any] | None, now: Sequence[Any] | None) -> list[str]:
    """Egress rules that came, and prohibitions that went."""

    def denies(rule: Any) -> bool:
        return isinstance(rule, Mapping) and rule.get("action") == "deny"

    both = [rule for rule in was or () if rule in (now or ())]
    if both != [rule for rule in now or () if rule in (was or ())]:
        return ["egress: its rules come in another order"]
    opened = [
        f"egress opens: {rule if isinstance(rule, str) else json.dumps(rule, sort_keys=True)}"
        for rule in more(was, now)
        if not denies(rule)
    ]
    return opened + ["egress: a prohibition goes" for rule in more(now, was) if denies(rule)]


def _within(part: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a part of a contract allows no more than another: fields and actions of those, under the same condition."""
    for label in ("fields", "actions"):
        if other.get(label) is not None and (part.get(label) is None or not {*part[label]} <= {*other[label]}):
            return False
    return other.get("where") in (None, part.get("where"))
