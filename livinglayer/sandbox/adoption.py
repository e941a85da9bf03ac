"""What a host finds when it starts: named boxes of an earlier one, which it takes back, and remains of others, which it removes."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from ..errors import LayerError, Unavailable
from . import exchanges
from .blueprint import VIRTUAL, Blueprint
from .box import Box, Life
from .cgroups import remove as remove_cgroup
from .driver import Root, Spec
from .drivers.namespace import NamespaceDriver
from .networks import Network
from .trace import Trace

if TYPE_CHECKING:
    from .host import Host

PATIENCE = 15.0  # seconds that a box reaches nothing because nobody has said its secrets again


async def adopt(host: "Host") -> None:
    """Take back named boxes of an earlier host; remove everything of ours that belongs to none."""
    known: dict[str, dict[str, Any]] = {}
    for path in host.records.glob("*.json"):
        try:
            record = json.loads(path.read_text())
            known[record["id"]] = record
        except (ValueError, KeyError):
            path.unlink()
    residents = (
        {name: (pid, base, fds) for name, pid, base, fds in await host.spawner.residents()} if host.spawner else {}
    )
    for id, record in known.items():
        try:
            await _adopt_one(host, id, record, residents.pop(id, None))
        except (LayerError, OSError) as error:
            print(f"box {id} could not be adopted: {error}", file=sys.stderr)
    if host.spawner:
        for name, (pid, _, fds) in residents.items():
            for fd in fds:
                os.close(fd)
            if not pid:
                await host.spawner.release(name)
            else:
                gone = host.loop.create_future()
                host.spawner.on_exit[name] = gone.set_result
                await host.spawner.kill(name)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(gone, 2)
    _clean(host, set(host.boxes))
    for tier in ("container", "gvisor", "microvm", "vm") if host.root else ():
        try:
            host.driver_of(tier).clean(set(host.boxes), lambda line: print(line, file=sys.stderr))
        except (LayerError, OSError) as error:
            print(f"remains of tier {tier} could not be removed: {error}", file=sys.stderr)


async def _adopt_one(
    host: "Host", id: str, record: dict[str, Any], resident: tuple[int, int, list[int]] | None
) -> None:
    blueprint = Blueprint.of({key: value for key, value in record["blueprint"].items() if key != "secrets"})
    awaited = record["blueprint"].get("secrets") if "layer" in (record.get("labels") or {}) else None
    if awaited:  # whoever looks after it knows them, and will say them again
        blueprint = blueprint.changed(secrets=tuple(awaited))
    upper = host.disk.boxes / id
    if not upper.exists():
        return (host.records / f"{id}.json").unlink(missing_ok=True)
    driver = host.driver_of(blueprint.tier)
    fds = resident[2] if resident else []
    running = record["state"] in ("running", "paused")
    alive = running and len(fds) >= (4 if blueprint.tier in VIRTUAL else 5)
    cgroup = (
        host.cgroups.adopt(record["cgroup"])
        if alive
        else host.cgroups.take(blueprint.memory, blueprint.pids, blueprint.cpu)
    )
    spec = Spec(id, blueprint, Root(tuple(record["layers"]), upper), host.run / "boxes" / id, cgroup, keep=True)
    box = Box(id, blueprint, driver, spec, Trace(host.traces, id), name=record["name"])
    box.created, box.parent, box.snapshot = record["created"], record["parent"], record["snapshot"]
    box.labels, box.token = record.get("labels") or {}, record.get("token")
    box.life, box.asleep = Life(**record.get("life") or {}), bool(record.get("asleep"))
    box.rested = bool(record.get("rested"))
    box.spent, box.requests = record.get("spent") or box.spent, record.get("requests") or box.requests
    host.boxes[id] = box
    host.names[record["name"]] = id
    if alive and resident is not None:
        netns, tcp, dns, channel = fds[-4:]
        box.network = Network(netns, tcp, dns, channel, used=True)
        spec.netns, spec.held = box.network.netns, box.network.fds
        if isinstance(driver, NamespaceDriver):
            box.guest = driver.adopt(spec, resident[0], resident[1], fds[0])
        else:
            await host.driver(blueprint.tier)
            try:
                box.guest = await asyncio.wait_for(driver.adopt(spec), 20)  # type: ignore[attr-defined]
            except (LayerError, OSError, TimeoutError) as error:
                print(f"the machine of box {id} is lost: {error}", file=sys.stderr)
    if box.guest is not None and box.network is not None:
        host.live(box)
        host.name_channel(box)
        box.state = record["state"]
        if host.gateway and awaited:
            host.loop.call_later(PATIENCE, lambda: host.spawn_task(host.lend(box)))
        elif host.gateway:
            await host.gateway.serve(id, box.network, blueprint.egress, {})
        if box.state == "running":
            await asyncio.wait_for(box.guest.agent.ping(), 5)
    else:
        if resident is not None and host.spawner:  # what it held for a box that is gone: its name is wanted again
            for fd in fds if box.network is None else fds[:-4]:
                with contextlib.suppress(OSError):
                    os.close(fd)
            with contextlib.suppress(Unavailable):
                await host.spawner.release(id)
        host.drop_resources(box)
        box.state = "suspended"  # its processes went with the host; its files stay
        box.asleep = box.asleep or (record["state"] == "running" and box.life.given)
    host.arm(box)
    for event in exchanges.untold(host.state, id, box.trace):
        box.trace.add("network", **{key: value for key, value in event.items() if key not in ("event", "box", "at")})
    box.trace.add("adopt", state=box.state)
    box.save(host.records)


def _clean(host: "Host", alive: set[str]) -> None:
    """Remove the remains of boxes that are not `alive`: processes, cgroups, directories."""
    used = {str(path) for box in host.boxes.values() for path in box.spec.cgroup.directories.values()}
    for path in host.cgroups.leftovers(used):
        for _ in range(200):
            with contextlib.suppress(OSError):
                for name, content in (("cgroup.kill", "1"), ("freezer.state", "THAWED")):
                    if (path / name).exists():
                        (path / name).write_text(content)
                for pid in (path / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            if remove_cgroup(path):
                break
            time.sleep(0.005)
    for directory in host.disk.boxes.iterdir():
        if directory.name not in alive:
            host.disk.destroy(directory)
    for directory in host.disk.tmp.iterdir():
        host.disk.destroy(directory)
    for parent in (host.run / "boxes", host.state / "suspended"):
        for directory in parent.iterdir() if parent.exists() else ():
            if directory.name not in alive:
                shutil.rmtree(directory, ignore_errors=True)
