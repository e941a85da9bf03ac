"""What every tier offers the host: start a guest, pause it, keep it, fork it, end it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .agent import Agent
from .blueprint import Blueprint, Tier
from .cgroups import Cgroup


@dataclass(frozen=True)
class Capabilities:
    """What a tier can and can't do; shown by `layer doctor` and wherever a person picks a tier."""

    isolation: str  # one honest sentence
    suspend_memory: bool = False  # suspend and resume keep the processes
    fork_memory: bool = False  # fork keeps the processes
    live_fork: bool = False  # fork does not stop the parent for long
    egress: bool = True  # the gateway governs its network
    zygote: bool = False  # Python without an interpreter's start
    limits: frozenset[str] = frozenset({"memory", "pids", "cpu", "disk"})


@dataclass(frozen=True)
class Root:
    """What a box's / is made of."""

    layers: tuple[str, ...]  # names under disk/layers, topmost first; "host" is the host's own / and comes last
    upper: Path  # disk/boxes/ID: u and w of the overlay


@dataclass
class Spec:
    """All that a driver needs to start a guest."""

    id: str
    blueprint: Blueprint
    root: Root
    directory: Path  # run/boxes/ID: sockets, pid files, bundles
    cgroup: Cgroup
    netns: int | None = None
    held: list[int] = field(default_factory=list)  # fds that must outlive the host when the box does
    keep: bool = False  # a named box: stays when the host dies
    environment: dict[str, str] = field(default_factory=dict)


class Guest(Protocol):
    """One running box."""

    agent: Agent
    pid: int  # a process of the host that stands for the box
    ended: "asyncio.Future[str]"  # done when the guest is gone, with the reason

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def suspend(self, directory: Path) -> None:
        """Memory and device state into `directory`, then gone. Invalid on a tier that can't."""

    async def kill(self) -> None:
        """All its processes are gone when this returns; asking twice is fine."""


class Driver(Protocol):
    """One tier."""

    tier: Tier
    capabilities: Capabilities

    async def probe(self) -> None:
        """Returns when the tier works here, found by doing; else Unavailable says why and how to install it."""

    async def start(self, spec: Spec) -> Guest: ...

    async def resume(self, spec: Spec, directory: Path) -> Guest:
        """The guest that `suspend` left in `directory`."""

    async def fork(self, guest: Guest, specs: list[Spec]) -> list[Guest]:
        """Guests with the memory of this one, which goes on."""

    def clean(self, alive: set[str], say: Callable[[str], None]) -> None:
        """Remove what an earlier host left behind of boxes that are not `alive`."""

    async def close(self) -> None: ...
