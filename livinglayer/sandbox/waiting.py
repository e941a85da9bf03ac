"""Boxes that wait, started ahead for whoever asks next for one of the same layers; limits are set when one is taken."""

import os
import sys
import time
from typing import TYPE_CHECKING

from ..errors import LayerError
from .blueprint import Blueprint
from .box import Box

if TYPE_CHECKING:
    from .host import Host

WARM = int(os.environ.get("LAYER_WARM", "2"))  # boxes kept waiting of the shape that was asked for last
CALM, PATIENCE = 0.004, 0.1  # seconds without a request before the pool is filled, and how long to wait for them


class Waiting:
    """The boxes of one host that nobody has asked for yet."""

    def __init__(self, host: "Host") -> None:
        self._host = host
        self._boxes: dict[tuple[str, ...], list[Box]] = {}
        self._filling = False

    def __contains__(self, box: Box) -> bool:
        return any(box is waiting for boxes in self._boxes.values() for waiting in boxes)

    def take(self, blueprint: Blueprint, layers: tuple[str, ...]) -> Box | None:
        """A box of these layers that waits, with the limits of this blueprint."""
        waiting = self._boxes.get((blueprint.tier, *layers))
        while waiting:
            box = waiting.pop()
            if box.state != "running":
                continue
            box.spec.cgroup.limit(blueprint.memory, blueprint.pids, blueprint.cpu)
            if blueprint.disk != box.blueprint.disk:
                self._host.disk.limit(box.spec.root.upper, blueprint.disk)
            box.blueprint = box.spec.blueprint = blueprint
            box.created = time.time()
            box.touch()
            return box
        return None

    def evict(self) -> None:
        """Those who have asked come before those who may."""
        for boxes in self._boxes.values():
            while boxes:
                self._host.spawn_task(self._host.kill(boxes.pop()))

    def prepare(self, blueprint: Blueprint, layers: tuple[str, ...]) -> None:
        """Have boxes of this shape wait for whoever asks next."""
        key = (blueprint.tier, *layers)
        for other in [other for other in self._boxes if other != key]:  # one shape at a time
            for box in self._boxes.pop(other):
                self._host.spawn_task(self._host.kill(box))
        if not self._filling and len(self._boxes.setdefault(key, [])) < WARM:
            self._filling = True
            self._host.loop.call_later(CALM, self._fill_when_calm, key, blueprint, layers, time.monotonic() + PATIENCE)

    def _fill_when_calm(
        self, key: tuple[str, ...], blueprint: Blueprint, layers: tuple[str, ...], latest: float
    ) -> None:
        """The pool is filled when nobody waits for an answer, or when that takes too long."""
        if time.monotonic() - self._host.used < CALM and time.monotonic() < latest:
            self._host.loop.call_later(CALM, self._fill_when_calm, key, blueprint, layers, latest)
        else:
            self._host.spawn_task(self._fill(key, blueprint, layers))

    async def _fill(self, key: tuple[str, ...], blueprint: Blueprint, layers: tuple[str, ...]) -> None:
        try:
            plain = Blueprint(
                tier=blueprint.tier,
                base=blueprint.base,
                memory=blueprint.memory,
                pids=blueprint.pids,
                cpu=blueprint.cpu,
                disk=blueprint.disk,
            )
            while (
                key in self._boxes
                and len(self._boxes[key]) < WARM
                and not self._host.stopping.is_set()
                and not self._host.admission.crowded
                and not self._host.admission.full(plain.memory)
            ):
                box = await self._host.start(plain, await self._host.driver(blueprint.tier), layers)
                self._boxes.setdefault(key, []).append(box)
                if self._host.admission.crowded:  # somebody came meanwhile
                    self.evict()
            self._host.cgroups.refill()
            if self._host.gateway:
                self._host.gateway.refill()
        except LayerError as error:
            print(f"no warm box: {error}", file=sys.stderr)
        finally:
            self._filling = False
