"""Control: E2B's control plane over held boxes: made, found, paused, forked, ended. What it answers is what its clients expect."""

from __future__ import annotations

import base64
import functools
import importlib
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...errors import Conflict, Invalid, LayerError, LimitExceeded, NotFound, Unauthenticated
from ...law import held
from ...sandbox.client import async_client
from ...substrate.values import recordable
from ..http.auth import authenticate
from ..http.limits import limits
from ..http.serving import Caller, Serving, body
from . import network as net
from . import reach

ENVD = "0.6.13"  # what of E2B's own daemon ours is like
CLIENT = "layer"
TIMEOUT = 300
PAGE = 100  # boxes of a list at once, and no more
BODY = 1 << 20  # bytes of a request
NEVER = "2286-11-20T17:46:39Z"  # the end of a box that has none
BOX = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
log = logging.getLogger("livinglayer.e2b")
Act = Callable[["Asked", str], Awaitable[Response]]
ROUTES: list[tuple[str, re.Pattern[str], Act]] = []
ELSEWHERE = {
    "templates": "templates",
    "default-templates": "templates",
    "volumes": "volumes",
    "volumecontent": "volumes",
    "secrets": "secrets",
    "teams": "templates",
}


class Asked:
    """One request: who asks, and what it says."""

    def __init__(self, serving: Serving, request: Request, caller: Caller, said: Mapping[str, Any]) -> None:
        self.serving, self.request, self.caller, self.said = serving, request, caller, said

    async def call(self, verb: str, key: str | None = None, **given: Any) -> Any:
        """A verb, as whoever asks."""
        return await self.serving.do(functools.partial(self.caller.layer.call, verb, given, key=key))

    async def box(self, id: str) -> dict[str, Any]:
        """What the host says of a box of the caller's."""
        return await self.serving.do(held.mine, self.caller.layer, self.caller.principal, id)

    def take(self, name: str, kind: type, default: Any = None, required: bool = False) -> Any:
        """A field of the body, of the type it must have."""
        value = self.said.get(name)
        if value is None:
            if required:
                raise Invalid(f"{name!r} is required")
            return default
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise Invalid(f"{name!r} must be {_KINDS[kind]}, not {value!r:.60}")
        return value

    def seconds(self, name: str = "timeout", default: int = TIMEOUT) -> int:
        """A time of a box."""
        found = self.take(name, int, default)
        if not 0 <= found <= 10 * 365 * 86400:
            raise Invalid(f"{name!r} must be a number of seconds from 0 on, not {found}")
        return int(found)

    def number(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        """A number of the query."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?\d{1,15}", text) or not low <= int(text) <= high:
            raise Invalid(f"{name!r} must be a number from {low} to {high}, not {text!r:.60}")
        return int(text)


_KINDS = {int: "a whole number", str: "a text", bool: "true or false", dict: "an object", list: "a list"}


def route(method: str, path: str) -> Callable[[Act], Act]:
    """Enter an answer into the table; {id} is a box."""
    pattern = re.compile(path.replace("{id}", r"(?P<id>[^/]+)"))

    def enter(act: Act) -> Act:
        ROUTES.append((method, pattern, act))
        return act

    return enter


async def handle(serving: Serving, request: Request) -> Response:
    """Answer what E2B's clients ask of the control plane."""
    try:
        return await _handle(serving, request)
    except LayerError as error:
        return told(error)
    except Exception:  # a text would make E2B's clients stumble
        log.exception("%s %s", request.method, request.scope["path"])
        return told(LayerError("something went wrong in the server; its log says more"))


async def _handle(serving: Serving, request: Request) -> Response:
    path = request.scope["path"].strip("/")
    first = next((part for part in path.split("/") if not re.fullmatch(r"v\d", part)), "")
    if first == "volumecontent" or re.match("templates/uploads/", path):  # they have tokens of their own
        return await _elsewhere(first).handle(serving, request)
    caller = await authenticate(
        serving, request.headers, request.client.host if request.client else "", request.method, request.url.path
    )
    await limits(serving).take(serving, caller)
    caller.require("boxes")
    if first in ELSEWHERE and not await _is_snapshot(serving, request, caller, path):
        return await _elsewhere(first).handle(serving, request, caller)
    wrong = False
    for method, pattern, act in ROUTES:
        if (found := pattern.fullmatch(path)) is None:
            continue
        if method != request.method:
            wrong = True
            continue
        id = found.groupdict().get("id", "")
        if id and first == "sandboxes" and not BOX.fullmatch(id):
            raise NotFound(f"there is no sandbox {id!r:.80}")
        given = await said(request) if method in ("POST", "PUT", "PATCH") else {}
        return await act(Asked(serving, request, caller, given), unquote(id))
    if wrong:
        raise LayerError(f"{request.method} is not for /{path:.120}", status=405)
    raise NotFound(f"there is nothing at /{path:.120}")


def _elsewhere(first: str) -> Any:
    return importlib.import_module(f"{__package__}.{ELSEWHERE[first]}")  # which imports this one


async def _is_snapshot(serving: Serving, request: Request, caller: Caller, path: str) -> bool:
    """Snapshots are deleted as templates are."""
    found = re.fullmatch(r"templates/([^/]+)", path)
    if found is None or request.method != "DELETE":
        return False
    name = unquote(found[1])
    rows = await serving.do(held.snapshots, caller.layer, caller.principal)
    return any(name in (row["name"], row["snapshot"]) for row in rows)


async def said(request: Request) -> dict[str, Any]:
    """What a request's body says: a JSON object, or nothing."""
    data = await body(request, BODY)
    if not data.strip():
        return {}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise Invalid("the body is not JSON") from None
    if not isinstance(found, dict):
        raise Invalid("the body must be a JSON object")
    if recordable(found) != found:
        raise Invalid("the body has texts that nobody can keep: NUL, or halves of characters")
    return found


def told(error: LayerError) -> Response:
    """An error as E2B's clients read it; what is no use to try again is said so."""
    status = int(str(error.details.get("status", error.status)))
    message = error.message + (f" ({error.hint})" if error.hint else "")
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = 'Bearer realm="layer"'
    if (after := error.details.get("retry_after")) is not None:
        headers["retry-after"] = str(after)
    elif isinstance(error, LimitExceeded) or status in (502, 504):
        headers["should-retry"] = "false"
    return JSONResponse({"code": status, "message": message}, status, headers)


EMPTY = functools.partial(Response, status_code=204)


# Shapes


def sandbox(serving: Serving, found: Mapping[str, Any]) -> dict[str, Any]:
    """A box as whoever made it gets it."""
    id = found["box"]
    made = {
        "templateID": _template(found), "sandboxID": id, "clientID": CLIENT, "envdVersion": ENVD,
        "envdAccessToken": held.token(serving.layer, id, "envd"), "domain": serving.domain,
    }  # fmt: skip
    if alias := _alias(found):
        made["alias"] = alias
    if not found["public"]:
        made["trafficAccessToken"] = held.token(serving.layer, id, "traffic")
    return made


def listed(found: Mapping[str, Any]) -> dict[str, Any]:
    """A box as it is listed."""
    limits = found["limits"]
    made = {
        "templateID": _template(found), "sandboxID": found["box"], "clientID": CLIENT, "startedAt": found["started"],
        "endAt": found["until"] or (found["started"] if found["state"] == "paused" else NEVER), "cpuCount": max(1, round(limits["cpu"])),
        "memoryMB": limits["memory"] >> 20, "diskSizeMB": limits["disk"] >> 20, "state": found["state"], "envdVersion": ENVD,
        "metadata": found["metadata"], "volumeMounts": found["volumes"],
    }  # fmt: skip
    if alias := _alias(found):
        made["alias"] = alias
    return made


def detail(serving: Serving, found: Mapping[str, Any]) -> dict[str, Any]:
    """All that is told of a box."""
    network = dict(found["annotations"].get("network") or {})
    network.setdefault("allowPublicTraffic", found["public"])
    return {
        **listed(found), "envdAccessToken": held.token(serving.layer, found["box"], "envd"), "domain": serving.domain,
        "network": network, "allowInternetAccess": found["annotations"].get("internet", True),
        "lifecycle": {"autoResume": found["resume"], "onTimeout": found["on_timeout"]},
    }  # fmt: skip


def _template(found: Mapping[str, Any]) -> str:
    return str((found.get("template") or {}).get("id") or found["blueprint"])


def _alias(found: Mapping[str, Any]) -> str | None:
    return found["blueprint"] if _template(found) != found["blueprint"] else None


# Boxes


@route("POST", "(v2/)?sandboxes")
async def create(asked: Asked, _: str) -> Response:
    """Make a box of a template; the same idempotency key gives the same box."""
    take = asked.take
    if asked.said.get("iam"):
        raise Invalid("workload identity is not offered", hint="secrets reach a host through network rules")
    template, internet = take("templateID", str, required=True), take("allow_internet_access", bool)
    asked_for = net.parse(take("network", dict), internet)
    pauses, wakes = take("autoPause", bool, False), bool(take("autoResume", dict, {}).get("enabled"))
    memory = take("autoPauseMemory", bool, True)
    if wakes and not memory:
        raise Invalid("a box that keeps no memory can't be resumed by traffic: autoResume needs autoPauseMemory")
    default = TIMEOUT if asked.request.scope["path"].startswith("/v2") else 15
    given = {
        "blueprint": await _blueprint(asked, template), "timeout": asked.seconds(default=default),
        "on_timeout": "pause" if pauses else "kill", "resume": wakes, "keep_memory": memory,
        "metadata": _texts(asked, "metadata"), "environment": _texts(asked, "envVars"), "public": asked_for.public,
        "egress": asked_for.egress, "volumes": _volumes(take("volumeMounts", list, [])),
        "annotations": _network(asked_for, internet),
    }  # fmt: skip
    found = await asked.call("box.open", _key(asked.request), **given)
    return JSONResponse(sandbox(asked.serving, found), 201)


def _key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not re.fullmatch(r"[\x21-\x7e]{1,255}", key):
        raise Invalid("an Idempotency-Key is up to 255 visible characters")
    return None if key is None else f"e2b:{key}"


async def _blueprint(asked: Asked, template: str) -> str:
    """The blueprint that a template is, by whichever name it is called."""
    from . import templates

    return str(await asked.serving.do(templates.resolve, asked.caller.layer, asked.caller.principal, template))


def _texts(asked: Asked, name: str) -> dict[str, str]:
    found = asked.take(name, dict, {})
    if not all(isinstance(value, str) for value in found.values()):
        raise Invalid(f"{name!r} must be texts by name")
    return dict(found)


def _network(found: net.Network, internet: bool | None) -> dict[str, Any]:
    """What is kept with a box of its network: how it is told again, and what its ports go by."""
    return {"network": found.shown, "internet": internet is not False, "mask": found.mask, "https": list(found.https)}


def _volumes(given: list[Any]) -> list[dict[str, str]]:
    for one in given:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str) or not isinstance(one.get("path"), str):
            raise Invalid("each of 'volumeMounts' has a name and a path")
    return [{"name": one["name"], "path": one["path"]} for one in given]


@route("GET", "(v2/)?sandboxes")
async def list_(asked: Asked, _: str) -> Response:
    """The boxes one holds, filtered, sorted and in pages."""
    params, old = asked.request.query_params, asked.request.scope["path"].startswith("/sandboxes")
    wanted = {
        unquote(key): unquote(value) for key, value in parse_qsl(params.get("metadata", ""), keep_blank_values=True)
    }
    states = {state for given in params.getlist("state") for state in given.split(",") if state}
    if states - {"running", "paused"}:
        raise Invalid(f"'state' must be running or paused, not {sorted(states)[0]!r:.60}")
    states = states or ({"running"} if old else {"running", "paused"})
    order = params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Invalid(f"'order' must be asc or desc, not {order!r:.60}")
    after, template = _time(params.get("startedAfter")), params.get("template")
    limit = min(asked.number("limit", 1, 1000, PAGE) or PAGE, PAGE)
    begin = _cursor(params.get("nextToken"))
    boxes = await asked.serving.do(held.boxes, asked.caller.layer, asked.caller.principal)
    boxes.sort(key=lambda box: (box["created"], box["id"]), reverse=order == "desc")
    found: list[tuple[tuple[float, str], dict[str, Any]]] = []
    for box in boxes:
        place = (box["created"], box["id"])
        if begin is not None and (place >= begin if order == "desc" else place <= begin):
            continue
        one = held.shown(None, box)
        if after is not None and datetime.fromisoformat(one["started"]) <= after:
            continue
        if one["state"] not in states or not wanted.items() <= one["metadata"].items():
            continue
        if not template or template in (_template(one), one["blueprint"]):
            found.append((place, listed(one)))
    return _page(found, len(found) if old else limit)


def _page(found: list[tuple[tuple[float, str], dict[str, Any]]], limit: int) -> Response:
    """So many of what was found, and where to go on."""
    headers = {"x-next-token": _token(found[limit - 1][0])} if len(found) > limit else {}
    return JSONResponse([one for _, one in found[:limit]], headers=headers)


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text.replace(" ", "+"))  # a plus that was not quoted
    except ValueError:
        raise Invalid(f"'startedAfter' must be a time, not {text!r:.60}") from None
    return found.replace(tzinfo=found.tzinfo or UTC)


def _token(place: tuple[float, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def _cursor(text: str | None) -> tuple[float, str] | None:
    if not text:
        return None
    try:
        at, id = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if not isinstance(at, int | float) or not isinstance(id, str):
            raise ValueError
        return float(at), id
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise Invalid("'nextToken' is none of ours") from None


@route("GET", "(v2/)?sandboxes/metrics")
async def all_metrics(asked: Asked, _: str) -> Response:
    """What several boxes use now."""
    ids = [id for id in asked.request.query_params.get("sandbox_ids", "").split(",") if id]
    if not 1 <= len(ids) <= PAGE:
        raise Invalid(f"'sandbox_ids' must be 1 to {PAGE} ids")
    mine = {box["id"]: box for box in await asked.serving.do(held.boxes, asked.caller.layer, asked.caller.principal)}
    found = {id: await _metric(asked.serving, mine[id]) for id in ids if id in mine and not held.resting(mine[id])}
    return JSONResponse({"sandboxes": found})


@route("GET", "(v2/)?sandboxes/{id}")
async def get(asked: Asked, id: str) -> Response:
    """One box."""
    found = await asked.box(id)
    return JSONResponse(detail(asked.serving, held.shown(None, found)))


@route("DELETE", "(v2/)?sandboxes/{id}")
async def kill(asked: Asked, id: str) -> Response:
    """End a box; whoever has something open with it is cut off."""
    await asked.call("box.kill", box=id)
    reach.forget(asked.serving, id)
    return EMPTY()


@route("POST", "(v2/)?sandboxes/{id}/timeout")
async def timeout(asked: Asked, id: str) -> Response:
    """Another end of its time."""
    asked.take("timeout", int, required=True)
    await asked.call("box.timeout", box=id, seconds=asked.seconds())
    return EMPTY()


@route("POST", "(v2/)?sandboxes/{id}/refreshes")
async def refresh(asked: Asked, id: str) -> Response:
    """More time, never less."""
    duration = asked.seconds("duration", 60)
    await asked.call("box.timeout", box=id, seconds=duration, shorten=False)
    return EMPTY()


@route("POST", "(v2/)?sandboxes/{id}/pause")
async def pause(asked: Asked, id: str) -> Response:
    """Let it stand still; 409 when it does."""
    asked.take("requireHealthyGuest", bool)
    await asked.call("box.pause", box=id, memory=asked.take("memory", bool, True))
    reach.forget(asked.serving, id)
    return EMPTY()


@route("POST", "(v2/)?sandboxes/{id}/connect")
async def connect(asked: Asked, id: str) -> Response:
    """A box that runs, for at least so long; one that stood still goes on."""
    memory = asked.take("memory", bool, True)
    found = await asked.call("box.resume", box=id, timeout=asked.seconds(), memory=memory)
    reach.stale(asked.serving, id)
    return JSONResponse(sandbox(asked.serving, found), 201 if found["resumed"] else 200)


@route("POST", "sandboxes/{id}/resume")
async def resume(asked: Asked, id: str) -> Response:
    """As older clients do it: 409 for a box that runs."""
    if not held.resting(await asked.box(id)):
        raise Conflict(f"sandbox {id} is running already")
    return await connect(asked, id)


@route("PUT", "(v2/)?sandboxes/{id}/network")
async def network(asked: Asked, id: str) -> Response:
    """Other rules for what it reaches; those before are gone."""
    found, internet = net.update(asked.said), asked.take("allow_internet_access", bool)
    before = held.told(await asked.box(id)).get("annotations") or {}
    kept = {key: value for key, value in (before.get("network") or {}).items() if key in net.PORTS}
    more = {"network": {**kept, **found.shown}, "internet": internet is not False}
    await asked.call("box.egress", box=id, rules=found.egress, annotations=more)
    reach.stale(asked.serving, id)
    return EMPTY()


@route("POST", "(v2/)?sandboxes/{id}/fork")
async def fork(asked: Asked, id: str) -> Response:
    """Boxes that begin where this one is."""
    count = asked.take("count", int, 1)
    if not 1 <= count <= 100:
        raise Invalid(f"'count' must be from 1 to 100, not {count}")
    found = await asked.call("box.fork", box=id, count=count, timeout=asked.seconds())
    return JSONResponse([{"sandbox": sandbox(asked.serving, one)} for one in found], 201)


# Snapshots


@route("POST", "(v2/)?sandboxes/{id}/snapshots")
async def snapshot(asked: Asked, id: str) -> Response:
    """Keep what a box holds."""
    name, memory = asked.take("name", str), asked.take("memory", bool, True)
    found = await asked.call("box.snapshot", box=id, name=name or None, memory=memory)
    return JSONResponse({"snapshotID": found["snapshot"], "names": [name] if name else []}, 201)


@route("GET", "(v2/)?snapshots")
async def snapshots(asked: Asked, _: str) -> Response:
    """What was kept of one's boxes."""
    params = asked.request.query_params
    limit, begin = min(asked.number("limit", 1, 1000, PAGE) or PAGE, PAGE), _cursor(params.get("nextToken"))
    rows = await asked.serving.do(held.snapshots, asked.caller.layer, asked.caller.principal)
    found: list[tuple[tuple[float, str], dict[str, Any]]] = []
    for row in rows:
        kept = row["annotations"]["snapshot"]
        if params.get("sandboxID") not in (None, kept["box"]) or params.get("name") not in (None, row["name"]):
            continue
        if begin is None or row["id"] > begin[0]:
            names = [row["name"]] if kept["named"] else []
            found.append(((row["id"], ""), {"snapshotID": row["snapshot"], "names": names}))
    return _page(found, limit)


@route("DELETE", "templates/{id}")
async def forget(asked: Asked, id: str) -> Response:
    """Take a snapshot away."""
    await asked.call("box.forget", snapshot=id)
    return EMPTY()


# What a box uses and has done


@route("GET", "(v2/)?sandboxes/{id}/metrics")
async def metrics(asked: Asked, id: str) -> Response:
    """What a box uses now, as the one entry of its history."""
    start, end = (asked.number(name, 0, 10**11) for name in ("start", "end"))
    if start is not None and end is not None and end < start:
        raise Invalid("'end' is before 'start'")
    box = await asked.box(id)
    if held.resting(box) or (end is not None and end < time.time() - 60):
        return JSONResponse([])
    return JSONResponse([await _metric(asked.serving, box)])


async def _metric(serving: Serving, box: Mapping[str, Any]) -> dict[str, Any]:
    found, now = await async_client().call({"do": "metrics", "box": box["id"]}), time.time()
    samples: dict[str, tuple[float, float]] = serving.more.setdefault("cpu", {})
    cpu, limits = float(found.get("cpu_seconds") or 0), box["limits"]
    before, used = samples.get(box["id"], (box["created"], 0.0))
    if len(samples) > reach.MOST:
        samples.clear()
    samples[box["id"]] = (now, cpu)
    return {
        "timestamp": datetime.fromtimestamp(now, UTC).isoformat().replace("+00:00", "Z"), "timestampUnix": int(now),
        "cpuCount": max(1, round(limits["cpu"])), "cpuUsedPct": round(max(0.0, cpu - used) / max(now - before, 0.001) * 100, 2),
        "memUsed": int(found.get("memory") or 0), "memTotal": limits["memory"], "memCache": 0,
        "diskUsed": int(found.get("disk") or 0), "diskTotal": limits["disk"],
    }  # fmt: skip


@route("GET", "sandboxes/{id}/logs")
async def logs(asked: Asked, id: str) -> Response:
    """What a box has done, oldest first."""
    start, limit = asked.number("start", 0, 10**15, 0) or 0, asked.number("limit", 1, 10_000, 1000) or 1000
    found = [one for one in await _entries(asked, id) if _ms(one) >= start][:limit]
    lines = [{"timestamp": one["timestamp"], "line": one["message"]} for one in found]
    return JSONResponse({"logs": lines, "logEntries": found})


@route("GET", "v2/sandboxes/{id}/logs")
async def later_logs(asked: Asked, id: str) -> Response:
    """The same from a moment on, in either direction."""
    cursor, limit = asked.number("cursor", 0, 10**15), asked.number("limit", 1, 10_000, 1000) or 1000
    back = asked.request.query_params.get("direction", "forward") == "backward"
    found = await _entries(asked, id)
    found = [
        one
        for one in (found[::-1] if back else found)
        if cursor is None or (_ms(one) <= cursor if back else _ms(one) >= cursor)
    ]
    return JSONResponse({"logs": found[:limit]})


def _ms(entry: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(entry["timestamp"].replace("Z", "+00:00")).timestamp() * 1000


async def _entries(asked: Asked, id: str) -> list[dict[str, Any]]:
    await asked.box(id)
    events = await async_client().call({"do": "trace", "box": id})
    return [
        {
            "timestamp": datetime.fromtimestamp(event["at"], UTC).isoformat().replace("+00:00", "Z"),
            "level": "error" if event.get("error") else "info",
            "message": f"{event['event']} " + " ".join(f"{key}={value}" for key, value in event.items() if key not in ("at", "event")),
            "fields": {key: str(value) for key, value in event.items() if key != "at"},
        }
        for event in events
        if event["event"] != "usage"
    ]  # fmt: skip
