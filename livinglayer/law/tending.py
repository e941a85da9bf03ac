"""Tending: boxes of contracts are taken up when nobody looks after them, by one process at a time."""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ..errors import Conflict, LayerError, NotFound
from ..sandbox.client import host_runs
from ..sandbox.sandbox import Sandbox
from ..settings import state_directory
from ..substrate.reads import clock
from . import bridging, contracts, runners, usage
from .held import LABEL
from .kept import Ended, Kept
from .recorder import Recorder

LOOK = 0.5  # seconds between two looks for boxes
SWEEP = 10.0  # between two looks for boxes that nobody knows
YOUNG = 30.0  # an execution without a box that is younger is being made
KEEPER = "keeper/"  # leases of those who look after boxes, by host
log = logging.getLogger("livinglayer")


class Tending:
    """The boxes of contracts that this process looks after."""

    def __init__(self, layer: Any) -> None:
        self.layer, pid = layer, os.getpid()
        self.id = f"{runners.machine()}.{pid}.{runners.born(pid)}.{secrets.token_hex(4)}"
        self.kept: dict[int, Kept] = {}
        self.leads = False  # whether it is the one whom others count on to take new boxes
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._swept, self._told, self._seen = time.monotonic(), -1e9, 0
        self.recorder = Recorder(self)

    def look(self) -> None:
        """Look now, and go on looking beside whatever else this process does."""
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._loop, name="layer-tending", daemon=True)
                self._thread.start()
        self.turn()

    def _loop(self) -> None:
        while not self._stop.wait(LOOK):
            try:
                self.turn()
                if self.leads and host_runs():
                    bridging.look(self.layer)
            except LayerError as error:
                log.warning("boxes of contracts: %s", error)
            except Exception as error:
                if self._stop.is_set():
                    return
                log.exception("boxes of contracts", exc_info=error)

    def turn(self) -> None:
        """Take over boxes that nobody looks after, and conclude those that are gone."""
        with self._lock:
            if self._stop.is_set():
                return
            if time.monotonic() - self._told > contracts.LEASE / 3:
                name = f"{KEEPER}{contracts.home()}"
                for known, holder, _, _ in self.layer.engine.leases(name):
                    if known == name and runners.dead(holder):
                        self.layer.engine.release(name, holder)
                self.leads = self.layer.engine.lease(name, self.id, contracts.LEASE)
                self._told = time.monotonic()
            for number in [number for number, kept in self.kept.items() if not kept.alive]:
                del self.kept[number]
            with self.layer.engine.reading() as session:
                tx = clock(self.layer.engine, session)[0]
            waiting = []
            if tx != self._seen:  # else nothing can have begun since there was nothing to do
                waiting = [each for each in open_boxes(self.layer, held=False) if each[0] not in self.kept]
                self._seen = 0 if waiting or self.kept else tx
            if waiting:
                here = {found["labels"].get("box"): found for found in _boxes(self.layer)}
                for number, key, started in waiting:
                    try:
                        self._take(number, here.get(key), started)
                    except Exception as error:  # one of them is no reason to leave the others alone
                        log.exception("box of execution %s", number, exc_info=error)
            if time.monotonic() - self._swept > SWEEP:
                self._swept = time.monotonic()
                self._sweep()
            self.recorder.turn()

    @property
    def busy(self) -> bool:
        """Whether there is a box that somebody must look after."""
        return bool(self.kept or self.recorder.lines or (self.leads and any(open_boxes(self.layer))))

    def _sweep(self) -> None:
        """Kill boxes that were made for this layer and never got an execution: whoever made them ended in between."""
        if not host_runs():
            return
        late = time.time() - YOUNG
        boxes = {
            key: box
            for box in _boxes(self.layer)  # a held one has an execution before it is there
            if (key := box["labels"].get("box")) and box["created"] < late and LABEL not in box["labels"]
        }
        for key in boxes.keys() - known_keys(self.layer) if boxes else ():
            log.warning("box %s of no execution is removed", boxes[key]["id"])
            Sandbox.connect(boxes[key]["id"]).kill()

    def _take(self, number: int, found: Mapping[str, Any] | None, started: datetime) -> None:
        name = f"{usage.LIVE}{number}"
        for known, holder, _, _ in self.layer.engine.leases(name):
            if known == name and runners.dead(holder):
                self.layer.engine.release(name, holder)
        if found is None and (datetime.now(UTC) - started).total_seconds() < YOUNG and not was_made(self.layer, number):
            return
        if not self.layer.engine.lease(name, self.id, contracts.LEASE):
            return
        try:
            id = was_made(self.layer, number) or (None if found is None else str(found["id"]))
            if found is None and id is not None:  # it may have been made since they were listed
                found = next((box for box in _boxes(self.layer) if box["id"] == id), None)
            if found is not None and found["id"] == id:
                self.kept[number] = Kept(self, number, id)
                self.kept[number].start()
            else:
                _gone(self, number, id)
        except Conflict:
            self.layer.engine.release(name, self.id)  # it is over
        except NotFound:
            pass  # it went this moment: the next look finds it gone

    def close(self) -> None:
        """Leave all of them to others."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(10)
        self.recorder.close()
        for kept in self.kept.values():
            kept.stop.set()
        for kept in self.kept.values():
            for thread in kept.threads:
                thread.join(10)
        try:
            self.layer.engine.release(f"{KEEPER}{contracts.home()}", self.id)
        except LayerError:
            pass


def _gone(tending: Tending, number: int, id: str | None) -> None:
    kept = Ended(tending, number, id)
    kept.conclude(None if id is not None else LayerError("the box was never made: whoever made it ended before it was"))


def _boxes(layer: Any) -> list[dict[str, Any]]:
    """The host's boxes of this layer; of those with the same label the first, which the others are forks of."""
    from ..sandbox.client import blocking_client, run_blocking

    found = run_blocking(blocking_client().call({"do": "list", "labels": {"layer": layer.id}}))
    return sorted(found, key=lambda box: -box["created"])


def was_made(layer: Any, number: int) -> str | None:
    """The id of the box that an execution got, once that is recorded."""
    at, detail = layer.engine.schema_prefix, layer.engine.portable("x.detail", "json")
    with layer.engine.reading() as session:
        row = session.one(
            f"select {detail} from {at}ledger_step x where x.execution = ? and x.kind = 'box' order by x.n limit 1",
            (number,),
        )
    return None if row is None else json.loads(row[0]).get("id")


def open_boxes(layer: Any, held: bool | None = None) -> Iterator[tuple[int, str, datetime]]:
    """Executions of boxes on this machine that are not over: number, label, when they began. Those that are held, or those that are not."""
    which = "" if held is None else f" and c.verb {'' if held else 'not '}in ('box.open', 'box.fork')"
    engine, here = layer.engine, contracts.home()
    at, given, started = (
        engine.schema_prefix,
        engine.portable("c.arguments", "json"),
        engine.portable("x.started", "datetime"),
    )
    floors: dict[bool | None, int] = layer.ledger.__dict__.setdefault("floors", {})
    with engine.reading() as session:
        last = session.one(f"select max(id) from {at}ledger_lineage")
        rows = session.all(
            f"select l.execution, {given}, {started}, l.id from {at}ledger_lineage l join {at}ledger_call c on c.execution = l.execution"
            f" join {at}ledger_execution x on x.id = l.execution where l.id > ?"
            f" and not exists (select 1 from {at}ledger_outcome o where o.execution = l.execution){which} order by l.execution",
            (floors.get(held, 0),),
        )
    # What is over stays so, and what begins later has a higher number: the many that ended need not be looked at again.
    floors[held] = min((row[3] - 1 for row in rows), default=(last and last[0]) or 0)
    for number, text, began, _ in rows:
        found = json.loads(text or "{}")
        if found.get("host") == here and isinstance(found.get("key"), str):
            yield number, found["key"], datetime.fromisoformat(began)


def known_keys(layer: Any) -> set[str]:
    """The labels of all boxes that have or had an execution."""
    at, given = layer.engine.schema_prefix, layer.engine.portable("c.arguments", "json")
    with layer.engine.reading() as session:
        rows = session.all(
            f"select {given} from {at}ledger_lineage l join {at}ledger_call c on c.execution = l.execution"
        )
    return {json.loads(row[0] or "{}").get("key") for row in rows}


def of(layer: Any) -> Tending:
    """What this process looks after of a layer; made at its first use."""
    ledger = layer.ledger
    with ledger._mutex:
        found: Tending | None = getattr(ledger, "tending", None)
        if found is None or found._stop.is_set():
            found = ledger.tending = Tending(layer)
    return found


_started: list[subprocess.Popen[bytes]] = []


def ensure(layer: Any) -> str:
    """Somebody looks after this machine's boxes: a worker, or a process that is started for it and ends after the last one."""
    for known, holder, _, _ in layer.engine.leases(f"{KEEPER}{contracts.home()}"):
        if known == f"{KEEPER}{contracts.home()}" and not runners.dead(holder):
            return "running"
    _started[:] = [process for process in _started if process.poll() is None]
    place = str(layer.engine.address)
    place = os.path.dirname(os.path.abspath(place)) if os.path.basename(place) == ".layer" else place
    environment = dict(os.environ) | {"LAYER_DIR": place, "LAYER_STATE": str(state_directory())}
    (state_directory() / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(state_directory() / "run" / "keep.log", "ab") as output:
        _started.append(
            subprocess.Popen(
                [sys.executable, "-m", "livinglayer.edges.cli.main", "box", "keep"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True, cwd="/",
            )
        )  # fmt: skip
    return "started"
