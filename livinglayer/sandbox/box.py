"""One box in the host: its parts, its state, the commands that run in it."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import Conflict, Invalid, NotFound
from .agent import Agent
from .blueprint import Blueprint
from .commands import Command
from .driver import Driver, Guest, Spec
from .egress.rules import shown
from .gathering import Gathering
from .networks import Network
from .trace import Trace
from .wire import PAYLOAD_MAX

if TYPE_CHECKING:
    from .bridge import Bridge
    from .keeping import Looks

FINISHED = 16  # commands in the background whose end is remembered
State = Literal["starting", "running", "paused", "suspended", "ended"]
LONGEST = 10 * 365 * 86400  # seconds that a box may be given


@dataclass
class Life:
    """How long a box runs, what happens then, and whether any touch lets it go on."""

    seconds: float | None = None  # from when it is said, and from each time it goes on
    then: Literal["kill", "pause"] = "kill"
    wakes: bool = False
    memory: bool = True  # stays when it is paused
    given: bool = False  # somebody said how long: it goes on after its host was away, whatever its tier
    until: float | None = None  # when its time is over, if that is running

    def change(self, given: object) -> None:
        """Take what is said of it; with `"shorten": False` its end never comes earlier than it would have."""
        if not isinstance(given, Mapping) or set(given) - {"seconds", "then", "wakes", "memory", "shorten"}:
            raise Invalid(f"the life of a box has seconds, then, wakes, memory and shorten, not {given!r:.100}")
        seconds = given.get("seconds", self.seconds)
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST
        ):
            raise Invalid(f"{seconds!r:.60} is not a number of seconds that a box may have")
        if given.get("then", "kill") not in ("kill", "pause"):
            raise Invalid(f"a box whose time is over is killed or paused, not {given['then']!r:.60}")
        self.then, self.wakes = given.get("then", self.then), bool(given.get("wakes", self.wakes))
        self.memory = bool(given.get("memory", self.memory))
        until = None if seconds is None else time.time() + seconds
        if given.get("shorten", True) or self.until is None or (until is not None and until > self.until):
            self.seconds, self.until = seconds, until

    def begin(self) -> None:
        """Its time runs anew."""
        self.until = None if self.seconds is None else time.time() + self.seconds


def told(argv: Sequence[str]) -> list[str]:
    """A command as the trace has it: of very long ones only how their arguments begin."""
    if sum(map(len, argv)) <= PAYLOAD_MAX:
        return list(argv)
    begun = [part if len(part) <= 256 else f"{part[:256]}… ({len(part)} characters)" for part in argv[:64]]
    return begun + ([f"… ({len(argv)} arguments)"] if len(argv) > 64 else [])


class Box:
    """A box and all that must be given back when it ends."""

    def __init__(
        self,
        id: str,
        blueprint: Blueprint,
        driver: Driver,
        spec: Spec,
        trace: Trace,
        *,
        name: str | None = None,
        owner: str | None = None,
    ) -> None:
        self.id, self.name, self.owner = id, name, owner
        self.blueprint, self.driver, self.spec, self.trace = blueprint, driver, spec, trace
        self.loop = asyncio.get_running_loop()
        self.state: State = "starting"
        self.keeps_files = False  # a build step: what it wrote is taken when it has ended
        self.asleep = False  # put to sleep for idleness, or by its life: any touch wakes it
        self.rested = False  # it stands still because somebody said so, or its time was over
        self.life = Life()
        self.alarm: asyncio.TimerHandle | None = None  # when its time is over
        self.spent = {"cpu": 0.0, "seconds": 0.0}  # before it was last suspended
        self.since = time.time()  # when it began or went on
        self.guest: Guest | None = None
        self.network: Network | None = None
        self.secrets: dict[str, str] = {}
        self.commands: dict[int, Command] = {}
        self.finished: dict[int, Command] = {}
        self.created, self.touched = time.time(), time.monotonic()
        self.parent: str | None = None
        self.snapshot: str | None = None
        self.lock = asyncio.Lock()  # one change of state at a time
        self.timers: list[asyncio.TimerHandle] = []
        self.root_fd: int | None = None  # of the zygote, opened at its first use
        self.listeners: dict[int, asyncio.Server] = {}  # exposed ports
        self.gatherings: dict[str, Gathering] = {}
        self.bridges: set[Bridge] = set()  # connections of its programs to other boxes
        self.requests = {"allow": 0, "deny": 0, "up": 0, "down": 0}
        self._oom = 0
        self.environment: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        self.looks: Looks | None = None  # how it was when it was new, where programs may use it one after the other
        self.uses = 0
        self.token: str | None = None  # of its channel
        self.channel: socket.socket | None = None  # a listener of its own, where there is no network of its own

    @property
    def agent(self) -> Agent:
        """Of the running guest; Conflict when the box is not running."""
        if self.guest is None or self.state != "running":
            raise Conflict(
                f"box {self.id!r} is {self.state}",
                hint=f"layer box resume {self.name or self.id}" if self.state in ("paused", "suspended") else None,
            )
        return self.guest.agent

    def touch(self) -> None:
        """It is being used."""
        self.touched = time.monotonic()

    def command_ended(self, command: Command) -> None:
        """Record a command's end, and what limit it met."""
        self.touch()
        self.commands.pop(command.number, None)
        if command.background:  # whoever started it may ask how it ended
            self.finished[command.number] = command
            if len(self.finished) > FINISHED:
                del self.finished[next(iter(self.finished))]
        if self.guest is not None:
            self.guest.agent.drop(command.number)
        fields: dict[str, Any] = {
            "argv": told(command.argv),
            "seconds": round(command.duration, 6),
            "exit_code": command.status,
        } | command.usage
        if command.error:
            fields["error"] = command.error.message
        if command.truncated:
            fields["truncated"] = True
        if command.background:
            fields["id"] = command.number
        self.trace.add("exec", **fields)
        if command.status is not None and command.status < 0:
            killed = self.spec.cgroup.stats().get("oom_kills", 0)
            if killed > self._oom:
                self._oom = killed
                command.usage["oom_killed"] = True
                self.trace.add("limit", limit="memory", command=command.argv[0])

    def command(self, number: int) -> Command:
        """A command by the number that `start` gave: one that runs, or was among the last in the background to end."""
        if found := self.commands.get(number) or self.finished.get(number):
            return found
        raise NotFound(f"box {self.id!r} runs no command {number}")

    def command_by(self, pid: int | None, tag: str | None, since: float = 0.0) -> Command:
        """A command by its process or its tag: one that runs, or the last that ended no more than `since` seconds ago."""
        late = (done for done in reversed(self.finished.values()) if time.monotonic() - done.ended <= since)
        for command in (*self.commands.values(), *late):
            if command.pid == pid if tag is None else (command.notes or {}).get("tag") == tag:
                return command
        raise NotFound(f"process with {f'pid {pid}' if tag is None else f'tag {tag!r}'} not found", of="process")

    def metrics(self) -> dict[str, Any]:
        """What it uses now."""
        stats = {} if self.spec.cgroup.closed else self.spec.cgroup.stats()
        return stats | {
            "commands": len(self.commands),
            "open": 0 if self.guest is None else self.guest.agent.conversations,
            "network": dict(self.requests),
            "state": self.state,
            "age": time.time() - self.created,
        }

    def describe(self) -> dict[str, Any]:
        """As a caller sees it."""
        return {
            "id": self.id,
            "name": self.name,
            "tier": self.blueprint.tier,
            "base": self.blueprint.base,
            "user": self.blueprint.user,
            "isolation": self.driver.capabilities.isolation,
            "state": "sleeping" if self.asleep else self.state,
            "resting": self.state in ("paused", "suspended") and (self.rested or not self.asleep),
            "limits": {key: getattr(self.blueprint, key) for key in ("memory", "pids", "cpu", "disk")},
            "egress": [shown(rule) for rule in self.blueprint.egress],
            "created": self.created,
            "parent": self.parent,
            "snapshot": self.snapshot,
            "pid": self.guest.pid if self.guest else None,
            "labels": dict(self.labels),
            "secrets": sorted(self.secrets),
            "life": asdict(self.life),
        }

    def used(self) -> dict[str, float]:
        """What it has used since it began, for whoever pays for it."""
        stats = {} if self.spec.cgroup.closed or not self.spec.cgroup.directories else self.spec.cgroup.stats()
        seconds = self.spent["seconds"] + (0 if self.state in ("suspended", "ended") else time.time() - self.since)
        return {
            "cpu": round(self.spent["cpu"] + float(stats.get("cpu_seconds") or 0), 6),
            "memory": float(stats.get("memory_peak") or 0) * seconds,
            "sent": self.requests["up"],
            "received": self.requests["down"],
        }

    # ---- what outlives the host ----

    def record(self) -> dict[str, Any]:
        """What must be known to have it again; never a secret's value."""
        return {
            "id": self.id,
            "name": self.name,
            "blueprint": self.blueprint.plain(),
            "layers": list(self.spec.root.layers),
            "state": self.state,
            "created": self.created,
            "parent": self.parent,
            "snapshot": self.snapshot,
            "labels": self.labels,
            "token": self.token,
            "life": asdict(self.life),
            "asleep": self.asleep,
            "rested": self.rested,
            "spent": self.spent,
            "requests": self.requests,
            "cgroup": {controller: str(path) for controller, path in self.spec.cgroup.directories.items()},
        }

    def save(self, directory: Path) -> None:
        """Write the record of a named box; others need none."""
        if self.name is None:
            return
        path = directory / f"{self.id}.json"
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(self.record()))
        os.replace(aside, path)

    def forget(self, directory: Path) -> None:
        """Remove the record."""
        (directory / f"{self.id}.json").unlink(missing_ok=True)

    def fresh_work(self) -> None:
        """An overlay that is mounted again wants an empty work directory (a volatile one refuses its old)."""
        work = self.spec.root.upper / "w"
        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(FileExistsError):
            work.mkdir(mode=0o700)

    def end_commands(self) -> None:
        """Tell whoever waits for a command that the box is gone."""
        for command in list(self.commands.values()):
            command.fail(Conflict(f"box {self.id!r} has ended"))


def environment(box: Box, given: dict[str, str], tail: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """What a command finds in its environment: the box's, then the caller's."""
    found = {**box.environment, **box.blueprint.env, **given, **dict(tail)}
    for key in ("PYTHONPATH", "NODE_PATH"):  # what somebody sets there comes before what is ours, not instead of it
        if (ours := box.environment.get(key)) and ours != found[key]:
            found[key] = f"{found[key]}:{ours}" if found[key] else ours
    return found
