"""Templates: blueprints that somebody built step by step, in boxes. Each tag of one is a blueprint of its own: NAME, and NAME:TAG.

A build is an execution: its steps are what it printed, its outcome how it went. Whoever is no owner builds below its own name.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import Conflict, Denied, Invalid, LayerError, NotFound, TimedOut, Unavailable
from ..sandbox.blueprint import VIRTUAL, check_variable
from ..sandbox.client import blocking_client, run_blocking
from ..sandbox.sandbox import Sandbox
from ..settings import state_directory
from ..substrate.ledger import Tx, now
from ..substrate.reads import clock
from ..substrate.schema import SYSTEM
from ..substrate.values import json_text
from . import held, runners
from .blueprints import row_of, shape
from .turns import Turns
from .verbs import Call, Items, Object, verb

BLUEPRINT = SYSTEM.by_name["blueprint"]
BASE = "base"  # the blueprint that templates are made of
DEFAULT = "default"  # the tag that needs no name
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
HASH = re.compile(r"[0-9a-f]{16,128}")
BUILDS = 30  # of one template that are remembered
STEPS = 500  # of one build
LINES = 20_000  # of a build's log
CPUS, MEMORY = 8, 8 << 30  # of a template whose maker is no owner, unless the blueprint it is made of has more
TURNS = Turns(first=32, most=8, each=4)  # builds of one process at once
QUEUED = "queue"  # the step of a build that waits for its turn
READY = 120.0  # seconds for a start command to be ready
OURS = {"e2bdev/base": BASE, "e2bdev/code-interpreter": "code-interpreter-v1"}
LOCAL = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")


def seconds() -> float:
    """How long a build may take: LAYER_BUILD_SECONDS, half an hour unless that says otherwise."""
    return float(os.environ.get("LAYER_BUILD_SECONDS", "1800"))


# What there is


def known(layer: Any, principal: int) -> list[dict[str, Any]]:
    """The templates a principal may see: its own, public ones, an owner all; oldest first."""
    mine = [row for row in _rows(layer) if _template(row) and _sees(layer, principal, row)]
    return sorted(mine, key=lambda row: int(row["id"]))


def find(layer: Any, principal: int, text: object) -> dict[str, Any]:
    """A template's row by its id or name; NotFound for one that is not there and for one that is another's alike."""
    name = text.partition(":")[0] if isinstance(text, str) else ""
    for called in _names(layer, principal, name) if name.isprintable() and 0 < len(name) <= 512 else ():
        row = _blueprint(layer, called)
        if row is not None and _template(row) and _sees(layer, principal, row):
            return row
    if name.startswith("tpl"):
        for row in known(layer, principal):
            if _template(row)["id"] == name:
                return row
    raise NotFound(f"there is no template {text!r:.120}")


def resolve(layer: Any, principal: int, text: str) -> str:
    """The blueprint that opens boxes of a template, called by id or name, with or without a tag; other blueprints keep their names."""
    try:
        row = find(layer, principal, text)
    except NotFound:
        return text
    tag = text.partition(":")[2] or DEFAULT
    if tag not in _tags(row):
        raise NotFound(
            f"template {text!r:.120} has no finished build" + (f" tagged {tag!r}" if tag != DEFAULT else ""),
            hint="build it, or name a tag that it has",
        )
    return str(row["name"]) if tag == DEFAULT else f"{row['name']}:{tag}"


def _blueprint(layer: Any, name: str) -> dict[str, Any] | None:
    try:
        return row_of(layer, "blueprint", name)
    except NotFound:
        return None


def _template(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a template's own row says of it; nothing for a tag's, and for what is none."""
    about: dict[str, Any] = (row["annotations"] or {}).get("template") or {}
    return {} if "tag" in about else about


def _tags(row: Mapping[str, Any]) -> dict[str, Any]:
    return dict((row["annotations"] or {}).get("tags") or {})


def builds(row: Mapping[str, Any]) -> dict[str, Any]:
    """The builds of a template by id, oldest first; what is stored has no order."""
    found = (row["annotations"] or {}).get("builds") or {}
    return dict(sorted(found.items(), key=lambda one: str(one[1]["created"])))


def _names(layer: Any, principal: int, name: str) -> list[str]:
    """The names of rows that a name may mean to a principal, its own first."""
    return [name] if "/" in name else [f"{_policy(layer, principal).me['name']}/{name}", name]


def _sees(layer: Any, principal: int, row: Mapping[str, Any]) -> bool:
    about = row["annotations"]["template"]
    if about["owner"] == principal or about.get("public"):
        return True
    policy = _policy(layer, principal)
    return bool(policy.sovereign() or policy.outright("call", f"box:{row['name']}")[0])


def _rows(layer: Any) -> list[dict[str, Any]]:
    with layer.engine.reading() as session:
        catalog = layer.catalog
        chain = catalog.chain(session, catalog.branch(session, "main"), None)
        column = BLUEPRINT.by_name["annotations"].store
        return [dict(row) for row in catalog.rows(session, BLUEPRINT, chain, f"where x.{column} is not null")]


def _policy(layer: Any, principal: int) -> Any:
    with layer.engine.reading() as session:
        return layer.catalog.policy(session, principal, clock(layer.engine, session)[1])


def changes(layer: Any, principal: int, row: Mapping[str, Any]) -> bool:
    """Whether a template is a principal's to change, and its log to read: one's own, an owner's all; public ones are to be opened."""
    return bool(row["annotations"]["template"]["owner"] == principal or _policy(layer, principal).sovereign())


def _mine(layer: Any, principal: int, text: object) -> dict[str, Any]:
    """A template that a principal may change."""
    row = find(layer, principal, text)
    if not changes(layer, principal, row):
        raise Denied(f"template {text!r:.120} is another's", action="write", resource=f"box:{row['name']}")
    return row


# Making


@verb("template.create")
def create(
    call: Call, *, name: str, tags: Items | None = None, cpu: float | None = None, memory: Any = None, public: bool | None = None
) -> Any:  # fmt: skip
    """A template, or another build of one's own; `template.build` says what is in it."""
    layer, principal = call.layer, call.asking.principal
    policy = _may(layer, principal)
    plain, _, tag = name.partition(":") if isinstance(name, str) else ("", "", "")
    above, _, plain = plain.rpartition("/")
    if not NAME.fullmatch(plain) or (above and above != policy.me["name"]):
        raise Invalid(
            f"{name!r:.120} can't be the name of a template",
            hint="lower-case letters, digits, . _ and -, perhaps a colon and a tag",
        )
    wanted = list(dict.fromkeys([*([tag] if tag else []), *checked_tags(tags or [])])) or [DEFAULT]
    checked_tags(wanted)
    called = plain if policy.sovereign() and not above else f"{policy.me['name']}/{plain}"
    base = row_of(layer, "blueprint", BASE)
    held.admitted(layer, principal, base, BASE)
    limits = {**(base["limits"] or {}), **{k: v for k, v in (("cpu", cpu), ("memory", memory)) if v is not None}}
    wanted_shape, least = shape({**base, "limits": limits}), shape(base)
    if not policy.sovereign() and (
        wanted_shape.cpu > max(CPUS, least.cpu) or wanted_shape.memory > max(MEMORY, least.memory)
    ):
        raise Invalid(
            f"a template has {CPUS} CPUs and {MEMORY >> 20} MiB of memory at most", hint="an owner may give it more"
        )
    build, forgotten = str(uuid.uuid4()), list[dict[str, Any]]()

    def act(tx: Tx) -> dict[str, Any]:
        forgotten.clear()
        there = _named(layer, tx, called)
        if there is not None and ((there["annotations"] or {}).get("template") or {}).get("owner") != principal:
            raise Conflict(f"a blueprint {called!r} exists already", hint="another name")
        if there is None:
            about: dict[str, Any] = {"id": f"tpl{secrets.token_hex(8)}", "owner": principal, "public": bool(public)}
            annotations: dict[str, Any] = {"template": about, "tags": {}, "builds": {}, "created": now()}
            row = {**_inherited(base), "name": called, "limits": limits, "base": _image(about["id"], "none")}
        else:
            annotations, row = {**there["annotations"]}, {"limits": limits}
            if public is not None:
                annotations["template"] = {**annotations["template"], "public": public}
        entry = {"created": now(), "tags": wanted, "cpu": limits.get("cpu", 1), "memory": limits.get("memory")}
        kept = _kept(annotations)
        forgotten.extend(one["made"] for key, one in annotations["builds"].items() if key not in kept and "made" in one)
        annotations |= {"builds": kept | {build: entry}, "updated": now()}
        _record(tx, {**row, "annotations": annotations}, there)
        return {"template": annotations["template"]["id"], "build": build, "name": called, "tags": wanted}

    made = layer.ledger.write(call.execution, "main", act)
    _drop(layer, forgotten)
    return made


def _may(layer: Any, principal: int) -> Any:
    policy, resource = _policy(layer, principal), "verb:template.build"
    allowed, grants = policy.outright("call", resource)
    if not allowed:
        raise policy.refusal("call", resource, grants, named=True)
    return policy


def checked_tags(given: object) -> list[str]:
    """Tags as people write them; Invalid for what is none."""
    if (
        not isinstance(given, list)
        or not all(isinstance(tag, str) and TAG.fullmatch(tag) for tag in given)
        or len(given) > 50
    ):
        raise Invalid("tags are a list of texts", hint="letters, digits, . _ and -")
    return list(dict.fromkeys(given))


def _inherited(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a template has of the blueprint it is made of: its walls and what it may reach, so never more."""
    return {key: row[key] for key in ("tier", "egress", "secrets", "idle", "ports", "user_name", "environment")}


def _kept(annotations: Mapping[str, Any]) -> dict[str, Any]:
    """The builds that are remembered: those with a tag, and the latest."""
    found, tagged = builds({"annotations": annotations}), {one["build"] for one in annotations["tags"].values()}
    for build in list(found):
        if len(found) < BUILDS:
            break
        if build not in tagged:
            del found[build]
    return found


def _named(layer: Any, tx: Tx, name: str) -> dict[str, Any] | None:
    rows = layer.catalog.rows(
        tx.session, BLUEPRINT, tx.chain, f"where x.{BLUEPRINT.by_name['name'].store} = ?", (name,)
    )
    return dict(rows[0]) if rows else None


def _record(tx: Tx, values: Mapping[str, Any], there: Mapping[str, Any] | None) -> None:
    number = None if there is None else int(there["id"])
    tx.record(BLUEPRINT, tx._encoded(BLUEPRINT, dict(values), partial=there is not None), number)


def _image(template: str, build: str) -> str:
    return f"template/{template}/{build}"


@dataclass
class Plan:
    """What a build does: image steps, and what stays of them for the boxes of the template."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of each, which of the given steps it is
    user: str = "user"
    cwd: str = "/home/user"
    env: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, given: object, uploads: Path, user: str = "user", cwd: str = "/home/user") -> Plan:
        """From steps COPY, RUN, ENV, USER and WORKDIR; Invalid names the one that is wrong."""
        if not isinstance(given, list) or len(given) > STEPS:
            raise Invalid(f"steps are a list of up to {STEPS}")
        plan = cls(user=user, cwd=cwd)
        for number, step in enumerate(given, 1):
            kind = step.get("type") if isinstance(step, Mapping) else None
            args = step.get("args") or [] if isinstance(step, Mapping) else None
            if not isinstance(args, list) or not all(isinstance(one, str) and _text(one) for one in args):
                raise Invalid(f"step {number} has no list of texts as args", step=number)
            act = {
                "COPY": plan._copy,
                "RUN": plan._run,
                "ENV": plan._env,
                "USER": plan._user,
                "WORKDIR": plan._workdir,
            }.get(str(kind).upper())
            if act is None:
                raise Invalid(f"step {number} is {kind!r:.60}", hint="COPY, RUN, ENV, USER or WORKDIR", step=number)
            try:
                done = act(args, step, uploads)
            except Invalid as error:
                raise Invalid(f"step {number} ({kind}): {error.message}", hint=error.hint, step=number) from None
            if done is not None:
                plan.steps.append({**done, **({"force": True} if step.get("force") else {})})
                plan.numbers.append(number)
        return plan

    def _run(self, args: list[str], step: Mapping[str, Any], uploads: Path) -> dict[str, Any]:
        if not 1 <= len(args) <= 2 or not args[0].strip():
            raise Invalid("RUN has a command, and perhaps a user")
        shell = 'if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; else exec /bin/sh -l -c "$1"; fi'
        cwd = f'cd -- "$2" && {shell}'
        return {
            "run": ["/bin/sh", "-c", cwd, "run", args[0], self.cwd],
            "user": _user_name(args[1] if len(args) > 1 and args[1] else self.user),
            "env": dict(self.env),
        }

    def _copy(self, args: list[str], step: Mapping[str, Any], uploads: Path) -> dict[str, Any]:
        source, to, owner, mode = [*args, "", "", ""][:4] if 2 <= len(args) <= 4 else ("", "", "", "")
        hashed = step.get("filesHash")
        if not source or not to or not isinstance(hashed, str) or not HASH.fullmatch(hashed):
            raise Invalid("COPY has a source, a destination, and the hash of its files")
        archive = uploads / hashed
        if not archive.is_file():
            raise Invalid(f"the files of {source!r:.100} were not uploaded", hint="GET …/files/HASH says where to")
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        place = home + to[1:] if to == "~" or to.startswith("~/") else to
        there = posixpath.normpath(posixpath.join(self.cwd, place))
        there += "/" if to.endswith(("/", "/.")) or to == "." else ""
        copied = {
            "archive": str(archive),
            "source": posixpath.normpath(source),
            "to": there,
            "owner": owner or _user_name(self.user),
            "mode": mode,
        }
        return {"copy": copied}

    def _env(self, args: list[str], step: Mapping[str, Any], uploads: Path) -> None:
        if not args or len(args) % 2:
            raise Invalid("ENV has names, each with a value")
        for name, value in zip(args[::2], args[1::2], strict=True):
            check_variable(name, value)
            self.env[name] = value

    def _user(self, args: list[str], step: Mapping[str, Any], uploads: Path) -> None:
        if len(args) != 1:
            raise Invalid("USER has a name")
        self.user = _user_name(args[0])

    def _workdir(self, args: list[str], step: Mapping[str, Any], uploads: Path) -> dict[str, Any]:
        if len(args) != 1 or not args[0]:
            raise Invalid("WORKDIR has a path")
        self.cwd = posixpath.normpath(posixpath.join(self.cwd, args[0]))
        make = '[ -d "$1" ] || { mkdir -p -- "$1" && chown -- "$2" "$1"; }'
        return {"run": ["/bin/sh", "-c", make, "workdir", self.cwd, self.user], "user": "root", "env": {}}


def _text(given: str) -> bool:
    """Whether a command line can hold it."""
    try:
        return b"\0" not in given.encode() and len(given) <= 1 << 16
    except UnicodeEncodeError:
        return False


def _user_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9_][a-z0-9_.-]{0,62}", name):
        raise Invalid(f"{name!r:.60} is not a user")
    return name


def uploads(layer: Any, principal: int) -> Path:
    """Where the files that a principal has sent for its builds lie. What they hold is its own word: nobody else's build takes them."""
    return state_directory() / "uploads" / str(layer.id) / str(principal)


@verb("template.build", brief=False, hidden=("login",))
def build(
    call: Call, *, template: str, build: str, steps: Items | None = None, image: str | None = None, parent: str | None = None,
    start: str | None = None, ready: str | None = None, force: bool = False, login: Object | None = None,
) -> Any:  # fmt: skip
    """Build a template: from an image or another template, by steps, each in a box. What it prints are the execution's steps."""
    layer, principal = call.layer, call.asking.principal
    _may(layer, principal)
    row = _mine(layer, principal, template)
    if build not in builds(row):
        raise NotFound(f"template {template!r:.120} has no build {build!r:.120}")
    if bool(image) == bool(parent):
        raise Invalid("a build begins with an image or with another template, one of them")
    origin = _opened(layer, principal, parent) if parent else None
    about = ((origin or {}).get("annotations") or {}).get("template") or {}
    plan = Plan.of(
        steps or [], uploads(layer, principal), about.get("user") or "user", about.get("cwd") or "/home/user"
    )
    layer.ledger.intend(call.execution)
    _begin(layer, call, row["name"], build)
    log = Log(layer, call.execution)
    with TURNS.turn((layer.id, principal), lambda others: _wait(log, others)):
        return _made(Making(layer, call, row, build, plan, log), image, parent, start, ready, force, login)


def _wait(log: Log, others: int) -> None:
    log.add(f"{others} builds are under way: this one waits for its turn", "info", QUEUED)
    log.flush()


def _made(making: Making, image: str | None, parent: str | None, *more: Any) -> Any:
    try:
        return making.act(image, parent, *more)
    except LayerError as error:
        failed = Failed(error, making.step, making.doing)
        making.log.add(failed.message, "error", making.step)
        with contextlib.suppress(LayerError):
            _forget({"do": "image.remove", "name": making.image})
        raise failed from None
    finally:
        making.log.flush()


def _opened(layer: Any, principal: int, text: str) -> dict[str, Any]:
    """The blueprint of a template that a principal may open boxes of."""
    try:
        row = held.find(layer, resolve(layer, principal, text))
        held.admitted(layer, principal, row, text)
    except (NotFound, Denied):
        raise NotFound(f"there is no template {text!r:.120} to build on") from None
    return row


class Failed(LayerError):
    """A build that failed; its message begins with the step that did."""

    code, status = "build_failed", 400

    def __init__(self, error: LayerError, step: str, doing: str) -> None:
        found = re.fullmatch(r"step \d+ \(.*\) failed with exit code (\d+): ?(.*)", error.message, re.DOTALL)
        message = f"step {step} ({doing}) failed with exit code {found[1]}: {found[2]}" if found else error.message
        super().__init__(message, hint=error.hint, step=step)


def _begin(layer: Any, call: Call, name: str, build: str) -> None:
    """Take a build for an execution; Conflict when another has it."""

    def act(tx: Tx) -> None:
        there = _named(layer, tx, name)
        entry = builds(there).get(build) if there is not None else None
        if there is None or entry is None:
            raise NotFound(f"there is no build {build!r}")
        if "execution" in entry:
            raise Conflict(f"build {build!r} was started already", hint="ask for a new build of the template")
        _annotate(tx, there, builds={**builds(there), build: {**entry, "execution": call.execution.id}})

    layer.ledger.write(call.execution, "main", act)


def _annotate(tx: Tx, there: Mapping[str, Any], **more: Any) -> None:
    _record(tx, {"annotations": {**there["annotations"], **more, "updated": now()}}, there)


class Log:
    """What a build says, as steps of its execution: in batches, for whoever looks on."""

    def __init__(self, layer: Any, execution: Any) -> None:
        self._layer, self._execution = layer, execution
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, str]] = []
        self._count, self._at = 0, 0.0

    def add(self, line: str, level: str = "info", step: str | None = None) -> None:
        """One line; written a moment later, with others."""
        with self._lock:
            if self._count + len(self._waiting) >= LINES:
                return
            detail = {"message": line[-4096:], "level": level, **({"step": step} if step else {})}
            self._waiting.append((json_text("step", detail), now()))
            due = time.monotonic() - self._at > 0.25
        if due:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            first, self._at = self._count + 1, time.monotonic()
            self._count += len(waiting)
        if waiting:
            number = self._execution.id
            facts = [("ledger_step", (number, n, "log", detail, at)) for n, (detail, at) in enumerate(waiting, first)]
            self._layer.ledger.note(self._execution, facts)


class Making:
    """One build, under way."""

    def __init__(self, layer: Any, call: Call, row: Mapping[str, Any], build: str, plan: Plan, log: Log) -> None:
        self.layer, self.call, self.row, self.build, self.plan, self.log = layer, call, row, build, plan, log
        self.template = row["annotations"]["template"]["id"]
        self.image = _image(self.template, build)
        self.step = self.doing = "base"
        self.until = time.monotonic() + seconds()

    def act(
        self, image: str | None, parent: str | None, start: str | None, ready: str | None, force: bool,
        login: Mapping[str, Any] | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Do all of it, and give the template's tags what came of it."""
        # It may have waited for its turn: what was narrowed or taken away meanwhile counts.
        principal = self.call.asking.principal
        _may(self.layer, principal)
        self.row = _mine(self.layer, principal, self.template)
        origin = _opened(self.layer, principal, parent) if parent else None
        base, env = self._parent(origin) if origin else self._base(str(image), login)
        steps = [{**step, "env": {**env, **step["env"]}} if "env" in step else step for step in self.plan.steps]
        self._host(
            {"do": "image.build", "name": self.image, "base": base, "steps": steps, "egress": list(self.row["egress"] or ()),
             "cache": not force, "output": True, "seconds": self._left()}, self._heard,
        )  # fmt: skip
        if origin and origin.get("snapshot"):
            _forget({"do": "image.remove", "name": base})
        self.step = "finalize"
        started = self._start(start, ready, {**env, **self.plan.env})
        try:
            self.layer.ledger.write(self.call.execution, "main", lambda tx: self._finish(tx, env, started))
        except BaseException:
            if kept := (started or {}).get("snapshot"):  # nothing names it
                held.let_go(kept, f"{self.layer.id}/{self.build}")
            raise
        self.log.add(f"template {self.row['name']} is built")
        return {"template": self.template, "build": self.build, "image": self.image}

    def _left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimedOut(f"the build took longer than {seconds():g} seconds")
        return left

    def _host(self, request: dict[str, Any], say: Callable[[str], None]) -> Any:
        try:
            return run_blocking(blocking_client().call(request, say=say))
        except TimedOut:
            raise TimedOut(
                f"step {self.step}: the build took longer than {seconds():g} seconds and was ended"
            ) from None

    def _heard(self, line: str) -> None:
        """What the host says of a build: its steps, and after `> ` what they print."""
        if found := re.match(r"step (\d+) of \d+: (.*)", line, re.DOTALL):
            self.step = str(self.plan.numbers[int(found[1]) - 1])
            self.doing = _told(self.plan.steps[int(found[1]) - 1])
            kept = "CACHED " if found[2].endswith("(kept from before)") else ""
            self.log.add(f"{kept}[{self.step}] {self.doing}", "info", self.step)
            self.log.flush()  # a step that hangs says nothing more, and is the one to look at
        else:
            self.log.add(line.removeprefix("> "), "info", self.step)

    # what it begins with

    def _parent(self, row: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        self.log.add(f"FROM template {row['name']}", "info", "base")
        env = dict(row["environment"] or {})
        if row.get("snapshot"):
            made = f"{self.image}-parent"
            self._host({"do": "image.of", "snapshot": row["snapshot"], "name": made}, self.log.add)
            return made, env
        return self._on_disk(row["base"]), env

    def _on_disk(self, base: str | None) -> str:
        """The base of a blueprint as one that images can stand on; another kernel can't be shown this machine's files."""
        return "debian" if (base or "host") == "host" and self.row["tier"] in VIRTUAL else base or "host"

    def _base(self, image: str, login: Mapping[str, Any] | None) -> tuple[str, dict[str, str]]:
        name = image.partition("@")[0]
        name = name.rpartition(":")[0] if ":" in name.rpartition("/")[2] else name
        if name in OURS:
            row = row_of(self.layer, "blueprint", OURS[name])
            self.log.add(f"FROM {image}: blueprint {row['name']}", "info", "base")
            return self._on_disk(row["base"]), dict(row["environment"] or {})
        self.log.add(f"FROM {image}", "info", "base")
        if image.startswith(("template/", "private/", "built-")):
            raise Invalid(f"{image!r:.120} is no image of a registry", hint="fromTemplate builds on a template")
        found = self._known(image) if login is None else None
        if found is None:
            found = self._pulled(image, login)
        env = dict(part.partition("=")[::2] for part in found["env"])
        env.pop("PATH", None) if set(env.get("PATH", "").split(":")) <= USUAL else None
        return str(found["name"]), {
            key: value for key, value in env.items() if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", key)
        }

    def _known(self, image: str) -> dict[str, Any] | None:
        """An image that is here, imported by whoever runs this host; what others pulled with a login of theirs is not offered."""
        images = self._host({"do": "images"}, self.log.add)
        return next((one for one in images if one["name"] == image), None)

    def _pulled(self, image: str, login: Mapping[str, Any] | None) -> dict[str, Any]:
        registry, slash, _ = image.partition("/")
        remote = bool(slash) and ("." in registry or ":" in registry or registry == "localhost")
        allowed = {"docker.io", *filter(None, os.environ.get("LAYER_REGISTRIES", "").split(","))}
        if remote and registry not in allowed and not _policy(self.layer, self.call.asking.principal).sovereign():
            raise Denied(
                f"images of {registry} are not for everybody here",
                hint="an owner may; LAYER_REGISTRIES names registries that all may use",
                action="use",
                resource=f"registry:{registry}",
            )
        name = image if login is None else f"private/{secrets.token_hex(8)}"
        request = {
            "do": "image.pull",
            "reference": image,
            "name": name,
            "tls": not LOCAL.fullmatch(registry),
            "seconds": min(self._left(), 900.0),
            "login": _login(login),
        }
        try:
            found: dict[str, Any] = self._host(request, self.log.add)
        except (NotFound, Unavailable, Invalid) as error:
            raise Invalid(
                f"the image {image!r:.120} can't be had: {error.message}",
                hint="import it with `layer image pull` or `layer image import`, or build from e2bdev/base",
            ) from None
        return found

    # how it ends

    def _start(self, start: str | None, ready: str | None, env: Mapping[str, str]) -> dict[str, Any] | None:
        """See that the start command comes up in a box of the template; where its tier keeps memory, it is kept running."""
        if not start and not ready:
            return None
        about = {"command": start or "", "ready": ready or "", "user": self.plan.user, "cwd": self.plan.cwd}
        self.log.add(f"START {start or ''}", "info", self.step)
        shaped = shape({**self.row, "base": self.image, "environment": {**(self.row["environment"] or {}), **env}})
        box = Sandbox.create(blueprint=shaped.changed(secrets=(), wall=min(self._left(), 900.0)))
        try:
            started(box, about, min(self._left(), READY), lambda line: self.log.add(line, "info", self.step))
            if box.tier in VIRTUAL:
                return {**about, "snapshot": box.snapshot(memory=True, holder=f"{self.layer.id}/{self.build}").id}
        finally:
            box.kill()
        return about

    def _finish(self, tx: Tx, env: Mapping[str, str], start: dict[str, Any] | None) -> None:
        there = _named(self.layer, tx, self.row["name"])
        if there is None:
            raise NotFound(f"template {self.row['name']!r} was removed meanwhile")
        if self.build not in builds(there):
            raise NotFound(f"build {self.build!r} is not remembered any more: {BUILDS} others were asked for since")
        entry = {**builds(there)[self.build], "finished": now()}
        about = {
            "start": start, "user": self.plan.user, "cwd": self.plan.cwd, "build": self.build,
            "env": {**(self.row["environment"] or {}), **env, **self.plan.env}, "image": self.image, "limits": self.row["limits"],
        }  # fmt: skip
        known = {**builds(there), self.build: {**entry, "made": about}}
        tags = _tags(there) | {tag: {"build": self.build, "created": now()} for tag in entry["tags"]}
        _annotate(tx, there, builds=known, tags=tags)
        for tag in entry["tags"]:
            place(self.layer, tx, str(there["name"]), tag, about)


def _told(step: Mapping[str, Any]) -> str:
    """A step as whoever wrote it knows it."""
    if "copy" in step:
        return f"COPY {step['copy']['source']} {step['copy']['to']}"
    return f"{step['run'][3].upper()} {step['run'][4]:.200}"


USUAL = {"", "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}


def _login(given: Mapping[str, Any] | None) -> list[str] | None:
    if given is None:
        return None
    if given.get("type") != "registry" or not all(isinstance(given.get(key), str) for key in ("username", "password")):
        raise Invalid(
            "a registry is logged in to with a user name and a password", hint="aws and gcp are not supported"
        )
    return [given["username"], given["password"]]


def place(layer: Any, tx: Tx, name: str, tag: str, made: Mapping[str, Any]) -> None:
    """Let a tag's blueprint be what a build made: the template's own row for the default tag, NAME:TAG for others."""
    main = _named(layer, tx, name)
    assert main is not None
    start = made["start"] or {}
    about = {
        **main["annotations"]["template"],
        "build": made["build"],
        "start": {k: v for k, v in start.items() if k != "snapshot"} or None,
        "user": made["user"],
        "cwd": made["cwd"],
    }
    values = {
        "base": made["image"], "snapshot": start.get("snapshot"), "limits": made["limits"], "environment": made["env"] or None,
        "user_name": made["user"],
    }  # fmt: skip
    if tag == DEFAULT:
        _record(tx, {**values, "annotations": {**main["annotations"], "template": about}}, main)
        return
    row = {**_inherited(main), **values, "name": f"{name}:{tag}", "annotations": {"template": {**about, "tag": tag}}}
    _record(tx, row, _named(layer, tx, f"{name}:{tag}"))


def started(
    box: Any, start: Mapping[str, Any], limit: float = READY, say: Callable[[str], None] = lambda line: None
) -> None:
    """Start a template's command in a box and wait until it is ready; TimedOut when it is not in time."""
    process = None
    if start.get("command"):
        command = 'mkdir -p -- "$2" 2>/dev/null; cd -- "$2"; if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; else exec /bin/sh -l -c "$1"; fi'
        process = box.start(["/bin/sh", "-c", command, "start", start["command"], start["cwd"]], user=start["user"])
    ready = start.get("ready") or ("sleep 2" if start.get("command") else "")
    until = time.monotonic() + limit
    while ready:
        left = until - time.monotonic()
        try:
            if left > 0 and box.run(ready, user=start["user"], cwd=None, timeout=left).ok:
                break
        except TimedOut:
            left = 0
        if left <= 0:
            raise TimedOut(
                f"the start command was not ready in {limit:g} seconds", hint=f"the ready command is {ready!r:.200}"
            )
        if process is not None and (printed := box.printed(process.id) if hasattr(box, "printed") else None):
            if printed.over and printed.exit_code:
                raise Invalid(f"the start command ended with exit code {printed.exit_code}")
        time.sleep(0.2)
    say("it is ready")


# How it goes


def status(layer: Any, row: Mapping[str, Any], build: str, offset: int = 0, limit: int = 100) -> dict[str, Any]:
    """How a build goes: waiting, building, ready or error, with why; and lines of its log."""
    entry = builds(row).get(build)
    if entry is None:
        raise NotFound(f"there is no build {build!r:.120}")
    number = entry.get("execution")
    if number is None:
        return {"status": "waiting", "log": [], "reason": None}
    at, engine = layer.engine.schema_prefix, layer.engine
    with engine.reading() as session:
        outcome = session.one(
            f"select status, {engine.portable('result', 'json')} from {at}ledger_outcome where execution = ?", (number,)
        )
        runner = session.one(f"select runner from {at}ledger_call where execution = ?", (number,))
        lines = session.all(
            f"select {engine.portable('detail', 'json')}, {engine.portable('at', 'datetime')} from {at}ledger_step"
            " where execution = ? and kind = 'log' order by n limit ? offset ?",
            (number, limit, offset),
        )
    log = [{**_json(detail), "at": moment} for detail, moment in lines]
    if outcome is not None and outcome[0] != "lost":
        error = (_json(outcome[1]) or {}).get("error") or {}
        done = outcome[0] == "done"
        reason = (
            None if done else {"message": error.get("message") or "the build was lost", "step": _last(layer, number)}
        )
        return {"status": "ready" if done else "error", "log": log, "reason": reason}
    if outcome is not None or runner is None or _gone(layer, runner[0]):
        told = "the server was stopped during the build: start another"
        return {"status": "error", "log": log, "reason": {"message": told, "step": _last(layer, number)}}
    return {"status": "waiting" if _last(layer, number) == QUEUED else "building", "log": log, "reason": None}


def _gone(layer: Any, runner: str | None) -> bool:
    if runner is None or runners.dead(runner):
        return True
    mine = getattr(layer.ledger.runner, "id", None)
    return runner != mine and not any(lease.name == f"runner/{runner}" for lease in layer.engine.leases("runner/"))


def _last(layer: Any, number: int) -> str:
    """The step that a build came to."""
    at, engine = layer.engine.schema_prefix, layer.engine
    with engine.reading() as session:
        row = session.one(
            f"select {engine.portable('detail', 'json')} from {at}ledger_step where execution = ? and kind = 'log' order by n desc limit 1",
            (number,),
        )
    return str((_json(row[0]) if row else {}).get("step") or "base")


def _json(text: Any) -> Any:
    import json

    return json.loads(text) if isinstance(text, str) else text


# Tags, and the end


@verb("template.tag")
def tag(call: Call, *, target: str, tags: Items) -> Any:
    """Give a build of a template more tags: that of `NAME:TAG`, or of NAME."""
    layer, principal = call.layer, call.asking.principal
    row = _mine(layer, principal, target)
    wanted = checked_tags(tags)
    if not wanted:
        raise Invalid("at least one tag is needed")
    of = target.partition(":")[2] or DEFAULT

    def act(tx: Tx) -> dict[str, Any]:
        there = _named(layer, tx, row["name"])
        assert there is not None
        found = _tags(there).get(of)
        build = found["build"] if found else of if of in builds(there) else None
        if build is None or "made" not in builds(there).get(build, {}):
            raise NotFound(f"template {target!r:.120} has no finished build", hint="NAME:TAG names one")
        moved = {tag: {"build": build, "created": now()} for tag in wanted}
        _annotate(tx, there, tags=_tags(there) | moved)
        for one in wanted:
            place(layer, tx, str(there["name"]), one, builds(there)[build]["made"])
        return {"build": build, "tags": wanted}

    return layer.ledger.write(call.execution, "main", act)


@verb("template.untag")
def untag(call: Call, *, template: str, tags: Items) -> Any:
    """Take tags away; what was built stays."""
    layer, principal = call.layer, call.asking.principal
    row, wanted = _mine(layer, principal, template), checked_tags(tags)

    def act(tx: Tx) -> None:
        there = _named(layer, tx, row["name"])
        assert there is not None
        if missing := [one for one in wanted if one not in _tags(there)]:
            raise NotFound(f"template {template!r:.120} has no tag {missing[0]!r}")
        left = {key: value for key, value in _tags(there).items() if key not in wanted}
        _annotate(tx, there, tags=left)
        for one in wanted:
            if one == DEFAULT:
                again = _named(layer, tx, row["name"])
                assert again is not None
                _record(tx, {"base": _image(again["annotations"]["template"]["id"], "none"), "snapshot": None}, again)
            elif (tagged := _named(layer, tx, f"{row['name']}:{one}")) is not None:
                tx.erase(BLUEPRINT, tagged["id"])

    layer.ledger.write(call.execution, "main", act)


@verb("template.change")
def change(call: Call, *, template: str, public: bool) -> Any:
    """Let everybody open boxes of a template, or nobody but those who may."""
    layer = call.layer
    row = _mine(layer, call.asking.principal, template)

    def act(tx: Tx) -> None:
        for known in _family(layer, tx, row["name"]):
            about = {**known["annotations"]["template"], "public": public}
            _record(tx, {"annotations": {**known["annotations"], "template": about}}, known)

    layer.ledger.write(call.execution, "main", act)
    return {"name": row["name"], "public": public}


@verb("template.remove")
def remove(call: Call, *, template: str) -> Any:
    """Take a template away with all its tags and builds; boxes that began there go on."""
    layer = call.layer
    row = _mine(layer, call.asking.principal, template)
    images = [made["made"] for made in builds(row).values() if "made" in made]

    def act(tx: Tx) -> None:
        for known in _family(layer, tx, row["name"]):
            tx.erase(BLUEPRINT, known["id"])

    layer.ledger.write(call.execution, "main", act)
    _drop(layer, images)
    return {"removed": row["name"]}


def _drop(layer: Any, builds: Sequence[Mapping[str, Any]]) -> None:
    """What builds made and nothing names any more."""
    for made in builds:
        _forget({"do": "image.remove", "name": made["image"]})
        if kept := (made["start"] or {}).get("snapshot"):
            held.let_go(kept, f"{layer.id}/{made['build']}")


def _forget(request: dict[str, Any]) -> None:
    try:
        run_blocking(blocking_client().call(request))
    except NotFound:
        pass


def _family(layer: Any, tx: Tx, name: str) -> Sequence[dict[str, Any]]:
    """A template's row and those of its tags."""
    main = _named(layer, tx, name)
    if main is None:
        raise NotFound(f"there is no template {name!r}")
    tagged = [_named(layer, tx, f"{name}:{tag}") for tag in _tags(main) if tag != DEFAULT]
    return [main, *(row for row in tagged if row is not None)]


def moment(text: str | None) -> str:
    """A time as E2B's clients read it."""
    found = datetime.fromisoformat(text) if text else datetime.fromtimestamp(0, UTC)
    return found.replace(tzinfo=found.tzinfo or UTC).isoformat()
