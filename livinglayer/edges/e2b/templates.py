"""E2B's templates: asked for, their files taken, built in the background, watched, tagged and removed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ...errors import Denied, Invalid, LayerError, LimitExceeded, NotFound, Unauthenticated
from ...law import contracts, templates
from ...sandbox.blueprint import parse_size
from ...substrate.reads import clock
from ..http.serving import Caller, Serving, too_large
from .bases import BASES
from .control import EMPTY, ENVD, said

ARCHIVE = int(os.environ.get("LAYER_UPLOAD_BYTES", str(2 << 30)))  # bytes of the files of one COPY
ALL = 16 << 30  # bytes that one principal's files may take together
VALID = 3600  # seconds that a link for an upload is good
KEPT = 7 * 86400  # seconds that files are kept for another build
PATIENCE = 60.0  # seconds without a byte of an upload
BUILDS = 16  # of one principal, those that wait for their turn too
PART = 16 << 20  # bytes of an upload before it is asked again whether there is room
UPLOADS = 32  # of one principal at once
FILES = 10_000  # that one principal has sent and that are kept

resolve = templates.resolve
log = logging.getLogger("livinglayer")


async def handle(serving: Serving, request: Request, caller: Caller | None = None) -> Response:
    """Answer for /templates of every version, and for the links that files are uploaded to."""
    parts = [unquote(part) for part in request.scope["path"].strip("/").split("/")]
    parts = parts[1:] if re.fullmatch(r"v\d", parts[0]) else parts
    if parts == ["teams"] and caller is not None and request.method == "GET":  # each principal is a team of its own
        return JSONResponse([{"teamID": str(caller.principal), "name": caller.name, "apiKey": "", "isDefault": True}])
    if parts == ["default-templates"] and caller is not None and request.method == "GET":
        return JSONResponse(await serving.do(_defaults, serving.layer, caller.principal))
    if parts[0] != "templates":
        raise NotFound(f"there is nothing at /{'/'.join(parts):.120}")
    if parts[:2] == ["templates", "uploads"] and request.method == "PUT" and len(parts) == 4:
        return await _upload(serving, request, parts[2], parts[3])
    if caller is None:
        raise Unauthenticated("templates are made with an API key")
    asked = Asked(serving, request, caller)
    match request.method, *parts[1:]:
        case ("GET",):
            return JSONResponse([_shown(row) for row in await asked.known()])
        case ("POST",):
            return await _create(asked)
        case "POST", "tags":
            return await _tag(asked)
        case "DELETE", "tags":
            return await _untag(asked)
        case "GET", "aliases", name:
            row = await asked.find(name)
            about = row["annotations"]["template"]
            return JSONResponse({"templateID": about["id"], "public": bool(about.get("public"))})
        case "GET", id:
            return await _one(asked, id)
        case "PATCH", id:
            return await _change(asked, id)
        case "DELETE", id:
            await asked.call("template.remove", template=id)
            return EMPTY()
        case "POST", id:  # older clients: another build of it
            row = await asked.find(id)
            return await _create(asked, row["name"])
        case "GET", id, "tags", *more:
            return await _tags(asked, id, more)
        case "GET", id, "files", hashed:
            return await _files(asked, id, hashed)
        case "POST", id, "builds", build:
            return await _build(asked, id, build)
        case "GET", id, "builds", build, "status" | "logs" as what:
            return await _status(asked, id, build, what)
    raise NotFound(f"there is nothing at /{'/'.join(parts):.120} for {request.method}")


class Asked:
    """One request of somebody."""

    def __init__(self, serving: Serving, request: Request, caller: Caller) -> None:
        self.serving, self.request, self.caller = serving, request, caller

    async def call(self, verb: str, **given: Any) -> Any:
        """A verb, as whoever asks."""
        return await self.serving.do(functools.partial(self.caller.layer.call, verb, given))

    async def known(self) -> list[dict[str, Any]]:
        """The templates whoever asks may see."""
        return await self.serving.do(templates.known, self.caller.layer, self.caller.principal)

    async def find(self, text: str) -> dict[str, Any]:
        """One of them, or NotFound."""
        return await self.serving.do(templates.find, self.caller.layer, self.caller.principal, text)

    async def mine(self, text: str) -> dict[str, Any]:
        """One that whoever asks may change."""
        row = await self.find(text)
        if row["annotations"]["template"]["owner"] != self.caller.principal:
            raise Denied(f"template {text!r:.120} is another's")
        return row


# Asked for


async def _create(asked: Asked, name: str | None = None) -> Response:
    given = await said(asked.request)
    name = name or given.get("name") or given.get("alias")
    if not isinstance(name, str):
        raise Invalid("a template has a name", hint='{"name": "my-template"}')
    cpu, memory = given.get("cpuCount"), given.get("memoryMB")
    for key, value, most in (
        ("cpuCount", cpu, 1024),
        ("memoryMB", memory, 1 << 24),
        ("minFreeDiskMB", given.get("minFreeDiskMB"), 1 << 30),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most):
            raise Invalid(f"{key} must be a whole number up to {most}")
    made = await asked.call(
        "template.create", name=name, tags=given.get("tags"), cpu=cpu, memory=None if memory is None else memory << 20
    )
    row = await asked.find(made["template"])
    return JSONResponse({**_names(row), "buildID": made["build"], "tags": made["tags"]}, 202)


def _names(row: dict[str, Any]) -> dict[str, Any]:
    about, plain = row["annotations"]["template"], row["name"].rpartition("/")[2]
    return {"templateID": about["id"], "public": bool(about.get("public")), "names": [row["name"]], "aliases": [plain]}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    notes, builds = row["annotations"], templates.builds(row)
    done = [build for build, entry in builds.items() if "made" in entry]
    latest = next(reversed(builds), "")
    status = "ready" if done else "building" if "execution" in builds.get(latest, {}) else "waiting"
    return {
        **_names(row), **_size(row["limits"] or {}), "buildID": (done or [latest])[-1], "createdAt": templates.moment(notes["created"]),
        "updatedAt": templates.moment(notes["updated"]), "createdBy": None, "lastSpawnedAt": None, "spawnCount": 0,
        "buildCount": len(builds), "envdVersion": ENVD, "buildStatus": status,
    }  # fmt: skip


def _defaults(layer: Any, principal: int) -> list[dict[str, Any]]:
    """The blueprints that E2B's clients count on, of those a principal may open boxes of."""
    with layer.engine.reading() as session:
        policy = layer.catalog.policy(session, principal, clock(layer.engine, session)[1])
    found = []
    for row in layer.query("select id, name, limits, description from blueprint order by name"):
        if row["name"] not in BASES or not policy.outright("call", f"box:{row['name']}")[0]:
            continue
        times = layer.query("select at from blueprint__history where id = :id order by tx", {"id": row["id"]})
        found.append({
            "templateID": row["name"], "names": [row["name"]], "aliases": [row["name"]], "description": row["description"] or "", "public": True,
            "isDefault": True, **_size(row["limits"] or {}), "createdAt": times[0]["at"].isoformat(), "updatedAt": times[-1]["at"].isoformat(),
            "createdBy": None, "lastSpawnedAt": None, "spawnCount": 0, "buildCount": 0, "buildID": "", "buildStatus": "ready", "envdVersion": ENVD,
        })  # fmt: skip
    return found


def _size(limits: dict[str, Any]) -> dict[str, int]:
    memory, disk = (parse_size(limits.get(key) or least) for key, least in (("memory", 512 << 20), ("disk", 1 << 30)))
    return {"cpuCount": max(1, round(limits.get("cpu") or 1)), "memoryMB": memory >> 20, "diskSizeMB": disk >> 20}


async def _one(asked: Asked, id: str) -> Response:
    row = await asked.find(id)
    found = []
    for build, entry in templates.builds(row).items():
        how = await asked.serving.do(templates.status, asked.caller.layer, row, build, 0, 1)
        found.append({
            "buildID": build, "status": how["status"], "createdAt": templates.moment(entry["created"]),
            "updatedAt": templates.moment(entry.get("finished") or entry["created"]), **_size(row["limits"] or {}), "envdVersion": ENVD,
        })  # fmt: skip
    return JSONResponse({**_shown(row), "builds": found})


async def _change(asked: Asked, id: str) -> Response:
    public = (await said(asked.request)).get("public")
    if not isinstance(public, bool):
        raise Invalid("public is true or false")
    row = await asked.mine(id)
    await asked.call("template.change", template=row["name"], public=public)
    return JSONResponse({"names": [row["name"]]})


# Files


async def _files(asked: Asked, id: str, hashed: str) -> Response:
    """Whether files are here already; else a link, good for an hour, that they are put to."""
    await asked.mine(id)
    if not templates.HASH.fullmatch(hashed):
        raise Invalid(f"{hashed!r:.120} is not a hash")
    if (templates.uploads(asked.serving.layer, asked.caller.principal) / hashed).is_file():
        return JSONResponse({"present": True}, 201)
    until = int(time.time()) + VALID
    proof = _proof(asked.serving, asked.caller.principal, hashed, until)
    base = asked.serving.url
    if host := asked.request.headers.get("host"):
        base = f"{'https' if asked.serving.tls else 'http'}://{host}"
    place = f"{base}/templates/uploads/{asked.caller.principal}/{quote(hashed)}"
    return JSONResponse({"present": False, "url": f"{place}?until={until}&proof={proof}"}, 201)


def _proof(serving: Serving, principal: int, hashed: str, until: int) -> str:
    return contracts.token(f"{serving.layer.id}:upload", f"{principal}:{hashed}:{until}")


async def _upload(serving: Serving, request: Request, principal: str, hashed: str) -> Response:
    until, proof = request.query_params.get("until", ""), request.query_params.get("proof", "")
    if (
        not (principal.isdecimal() and until.isdecimal() and templates.HASH.fullmatch(hashed))
        or len(until) > 15
        or len(principal) > 18
    ):
        raise Unauthenticated("the link is none of ours")
    wanted = _proof(serving, int(principal), hashed, int(until))
    if not hmac.compare_digest(wanted.encode(), proof.encode()) or int(until) < time.time():
        raise Unauthenticated("the link is not good any more, or never was")
    directory = templates.uploads(serving.layer, int(principal))
    await serving.do(_tidy, directory)
    new = directory / f".{secrets.token_hex(8)}.new"
    file = open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    size, seen, digest = 0, 0, hashlib.sha256()

    def put(part: bytes) -> None:
        file.write(part)
        file.flush()  # so that others see how much there is of it, and that it grows

    try:
        if (
            await serving.do(_tidy, directory) > UPLOADS
        ):  # with this one, so that many that come at once are counted too
            raise LimitExceeded(f"{UPLOADS} uploads of yours are under way", hint="try again when one is done", retry_after=10)  # fmt: skip
        parts = request.stream()
        while True:
            async with asyncio.timeout(PATIENCE):
                part = await anext(parts, None)
            if part is None:
                break
            size += len(part)
            if size > ARCHIVE:
                raise too_large(ARCHIVE)
            digest.update(part)
            await serving.do(put, part)
            if size - seen >= PART:
                seen = size
                await serving.do(_tidy, directory)
        await serving.do(file.close)
        await serving.do(_tidy, directory)  # all that are coming in count, each until it has its name
        os.rename(new, directory / hashed)
    except TimeoutError:
        raise Invalid(f"nothing came for {PATIENCE:g} seconds", status=408) from None
    except ClientDisconnect:
        raise Invalid("the client has hung up") from None
    finally:
        file.close()
        new.unlink(missing_ok=True)
    return Response(status_code=200, headers={"etag": f'"{digest.hexdigest()}"'})


def _tidy(directory: Path) -> int:
    """Make the directory, forget what nobody has used for a week and what did not come to its end, see that there is room, and count what comes in."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    total = coming = files = 0
    for path in directory.iterdir():
        try:
            found, part = path.stat(), path.name.startswith(".")
            if time.time() - max(found.st_mtime, 0 if part else found.st_atime) > (3 * PATIENCE if part else KEPT):
                path.unlink()
            else:
                total, coming, files = total + found.st_size, coming + part, files + 1
        except FileNotFoundError:
            continue
    if total > ALL:
        raise LimitExceeded(f"files for builds take more than {ALL} bytes", hint="they are forgotten after a week")
    if files > FILES:  # each is looked at whenever one comes
        raise LimitExceeded(f"more than {FILES} archives are kept for builds", hint="they are forgotten after a week")
    return coming


# Built


async def _build(asked: Asked, id: str, build: str) -> Response:
    """Begin a build; it goes on when this has been answered."""
    given = await said(asked.request)
    row = await asked.mine(id)
    for key in ("fromImage", "fromTemplate", "startCmd", "readyCmd"):
        if given.get(key) is not None and not isinstance(given[key], str):
            raise Invalid(f"{key} is a text")
    login = given.get("fromImageRegistry")
    if login is not None and (not isinstance(login, dict) or login.get("type") != "registry"):
        raise Invalid(
            "images are fetched with a user name and a password", hint="aws and gcp registries are not supported"
        )
    if not isinstance(given.get("force", False), bool) or not isinstance(given.get("steps", []), list):
        raise Invalid("force is true or false, steps are a list")
    running: dict[threading.Thread, int] = asked.serving.more.setdefault("builds", {})
    for thread in [thread for thread in running if not thread.is_alive()]:
        del running[thread]
    if list(running.values()).count(asked.caller.principal) >= BUILDS:
        raise LimitExceeded(f"{BUILDS} builds of yours are under way", hint="try again when one is done", retry_after=10)  # fmt: skip
    arguments = {
        "template": row["name"], "build": build, "steps": given.get("steps") or [], "image": given.get("fromImage") or None,
        "parent": given.get("fromTemplate") or None, "start": given.get("startCmd") or None, "ready": given.get("readyCmd") or None,
        "force": given.get("force", False), "login": login,
    }  # fmt: skip
    loop, begun = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(error: LayerError | None) -> None:
        if not begun.done():
            begun.set_result(error)

    def run() -> None:
        error = None
        try:
            asked.caller.layer.call("template.build", arguments)
        except LayerError as failed:
            error = failed
        except Exception as defect:
            log.exception("build %s", build)
            error = LayerError(f"the build failed: {type(defect).__name__}")
        with contextlib.suppress(RuntimeError):  # the server has ended: nobody waits
            loop.call_soon_threadsafe(settle, error)

    thread = threading.Thread(target=run, name=f"build-{build[:8]}", daemon=True)
    running[thread] = asked.caller.principal
    thread.start()
    while True:  # what is wrong with it is said now; once it is an execution, its status tells
        done, _ = await asyncio.wait({begun}, timeout=0.02)
        entry = templates.builds(await asked.find(row["name"])).get(build) or {}
        if done and begun.result() is not None and not isinstance(begun.result(), templates.Failed):
            raise begun.result()
        if done or "execution" in entry:
            return Response(status_code=202)


async def _status(asked: Asked, id: str, build: str, what: str) -> Response:
    params = asked.request.query_params
    offset, limit = (
        _number(params.get(key, str(default)), key) for key, default in (("logsOffset", 0), ("limit", 100))
    )
    row = await asked.find(id)
    how = await asked.serving.do(templates.status, asked.caller.layer, row, build, offset, max(1, min(limit, 100)))
    if not await asked.serving.do(templates.changes, asked.caller.layer, asked.caller.principal, row):
        how |= {"log": [], "reason": None}  # what it printed is its maker's
    log = [
        {"timestamp": templates.moment(line["at"]), "message": line["message"], "level": line["level"], **({"step": line["step"]} if "step" in line else {})}
        for line in how["log"] if not params.get("level") or line["level"] == params["level"]
    ]  # fmt: skip
    if what == "logs":
        return JSONResponse({"logs": log})
    found = {
        "templateID": row["annotations"]["template"]["id"],
        "buildID": build,
        "status": how["status"],
        "logs": [],
        "logEntries": log,
    }
    if how["reason"]:
        found["reason"] = {**how["reason"], "logEntries": [line for line in log if line["level"] == "error"]}
    return JSONResponse(found)


def _number(text: str, key: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise Invalid(f"{key} must be a number, not {text!r:.60}")
    return int(text)


# Tags


async def _tag(asked: Asked) -> Response:
    given = await said(asked.request)
    if not isinstance(given.get("target"), str):
        raise Invalid("target is a template's name, with a tag or without")
    await asked.mine(given["target"])
    made = await asked.call("template.tag", target=given["target"], tags=given.get("tags") or [])
    return JSONResponse({"buildID": made["build"], "tags": made["tags"]}, 201)


async def _untag(asked: Asked) -> Response:
    given = await said(asked.request)
    if not isinstance(given.get("name"), str):
        raise Invalid("name is a template's")
    await asked.mine(given["name"])
    await asked.call("template.untag", template=given["name"], tags=given.get("tags") or [])
    return EMPTY()


async def _tags(asked: Asked, id: str, more: list[str]) -> Response:
    tags = (await asked.find(id))["annotations"].get("tags") or {}
    if more == ["count"]:
        return JSONResponse({"count": len(tags)})
    if more == ["exists"]:
        return JSONResponse({"exists": asked.request.query_params.get("tag") in tags})
    if more:
        raise NotFound(f"there is nothing at tags/{'/'.join(more):.60}")
    return JSONResponse([
        {"tag": tag, "buildID": one["build"], "createdAt": templates.moment(one["created"])} for tag, one in tags.items()
    ])  # fmt: skip
