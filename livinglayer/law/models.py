"""Models: whom an agent asks, by which egress rule, at what price; and what was said, as steps, whichever program asked."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ..errors import Invalid, LimitExceeded, NotFound
from ..sandbox.egress import models as wire
from ..sandbox.egress import rules
from . import secrets as vault
from .executions import INLINE, Run
from .signature import dumps

PATHS = {"anthropic": "/messages", "openai": "/chat/completions"}


def bind(what: str, egress: Sequence[Any], model: Mapping[str, Any] | None) -> list[Any]:
    """Egress rules by which a model's host is one; Invalid when they do not let it be asked, or not with its key."""
    if model is None:
        return list(egress)
    url = urlsplit(model["url"])
    host, found = rules.parse_one({"host": url.hostname}).host, list[Any]()
    for written in egress:
        rule, spelled = rules.parse_one(written), rules.spelled(written)
        web = rule.action == "allow" and rule.tls == "terminate" and rule.protocols & {"http", "https"}
        if not web or not rules.host_matches(rule.host, host):
            found.append(written)
        elif rule.host == host or rule.bytes is not None or rule.rate is not None:  # it is spent once, so it stays one
            found.append({**spelled, "model": model["api"]})
        else:
            found += [{**spelled, "host": host, "model": model["api"]}, written]
    _reachable(what, rules.parse(found), model, host)
    return found


def _reachable(what: str, parsed: Sequence[rules.Rule], model: Mapping[str, Any], host: str) -> None:
    url, path = urlsplit(model["url"]), PATHS[model["api"]]
    port, base = url.port or rules.DEFAULT_PORT[url.scheme], url.path.rstrip("/")
    whole = base if base.endswith(path) else base + ("" if base.endswith("/v1") else "/v1") + path
    ask = rules.Ask(url.scheme, host, port, "POST", whole)
    first, rule = rules.first_at(parsed, host, port), rules.decide(parsed, ask)
    if rule is None or rule.action == "deny" or first is None:
        raise Invalid(
            f"the egress of {what} does not allow {ask}, where its model is",
            hint=f'egress: ["{url.scheme}://{url.netloc}"]',
        )
    if first.tls == "pass" or first.protocols == {"tcp"}:
        raise Invalid(
            f"egress rule {first.text} of {what} passes what is said to its model unread",
            hint="put a rule for https before it",
        )
    name = model.get("secret")
    if name is not None and name not in rule.secrets:
        raise Invalid(
            f"secret {name!r} of the model of {what} does not go to {host}",
            hint=f'the blueprint says so: secrets: [{{"name": "{name}", "hosts": ["{host}"]}}]',
        )


def price(model: Mapping[str, Any] | None, told: Mapping[str, Any]) -> float:
    """What an exchange costs at the prices of a contract, which are for a million tokens."""
    prices = (model or {}).get("prices") or {}
    each = prices.get("input", 0)
    cached = min(told.get("cached", 0), told["input"])
    cost = (
        (told["input"] - cached) * each + cached * prices.get("cached", each) + told["output"] * prices.get("output", 0)
    )
    return round(float(cost / 1e6), 9)


def step(run: Run, box: str, event: Mapping[str, Any], money: float) -> dict[str, Any]:
    """An exchange that the gateway told of, as a step: what was asked and answered is stored by content."""
    told = dict(event["model"])
    name, cut = told.pop("exchange", None), told.pop("cut", None)
    detail: dict[str, Any] = {
        "at": event["at"], "began": event.get("began"), "event": "model", **told, "money": money, "status": event.get("status"),
        "ms": round((event["at"] - event.get("began", event["at"])) * 1000, 2), "host": event.get("host"), "path": event.get("path"),
    }  # fmt: skip
    if event.get("reason"):
        detail["reason"] = event["reason"]
    lost = []
    for part in ("request", "answer"):
        data = None if name is None else _kept(run, box, name, part)
        try:
            if data is not None:
                detail[f"{part}_content"] = run.store(data, asked=True)
        except LimitExceeded:
            lost.append(part)
        if data is None:
            lost.append(part)
        elif part == "request":
            asked = parsed(data)
            detail["model"] = detail["model"] or str(asked.get("model") or "")[:200] or None
            if prompt := last_words(asked.get("messages")):
                detail["prompt"] = _short(prompt)
        else:
            said = wire.read(data).said()
            if "text" in said:
                detail["answer"] = _short(said["text"])
            if "error" in said:
                detail["error"] = said["error"]
            if calls := said.get("calls"):
                detail["calls"] = (
                    calls if len(dumps(calls)) <= INLINE else [{"id": c["id"], "name": c["name"]} for c in calls][:100]
                )
    return detail | ({"cut": cut} if cut else {}) | ({"lost": lost} if lost else {})


def _kept(run: Run, box: str, name: str, part: str) -> bytes | None:
    """What the host has kept of one exchange, without what is nobody's to read."""
    from ..sandbox.client import blocking_client, run_blocking

    found = b""
    try:
        while True:
            request = {"do": "exchange", "box": box, "name": name, "part": part, "offset": len(found)}
            piece = base64.b64decode(run_blocking(blocking_client().call(request)))
            if not piece:
                break
            found += piece
    except NotFound:
        return None
    return vault.hide(run.read, found.replace(run.token.encode(), "…".encode()))


def last_words(messages: object) -> str:
    """What people said since the model's last answer; results of tools are not theirs."""
    found: list[str] = []
    for message in reversed(messages) if isinstance(messages, list) else ():
        if not isinstance(message, dict) or message.get("role") == "assistant":
            break
        if message.get("role") == "user":
            said = message.get("content")
            blocks = (
                [said]
                if isinstance(said, str)
                else [b.get("text") for b in said if isinstance(b, dict)]
                if isinstance(said, list)
                else []
            )
            found = [*(one for one in blocks if isinstance(one, str)), *found]
    return "\n".join(found)


def parsed(data: bytes) -> dict[str, Any]:
    """A request to a model, or nothing if it is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _short(text: str) -> str:
    text = text.replace("\0", "�").encode("utf-8", "replace").decode()
    return text if len(text) <= INLINE else text[: INLINE - 1] + "…"
