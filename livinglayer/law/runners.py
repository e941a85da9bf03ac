"""Runners: the processes that run executions. Each holds a lease while it does; what it leaves open when it is gone is lost."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..errors import LayerError

IDLE = 60.0  # seconds after its last execution that a runner gives its lease back
log = logging.getLogger("livinglayer")


@cache
def machine() -> str:
    """Where process numbers mean the same: this boot of this machine, this namespace of processes."""
    boot, numbers = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    return sha256(f"{boot} {numbers}".encode()).hexdigest()[:12]


def born(pid: int) -> str | None:
    """When a process began, in ticks; None when it is not there, or dead and not yet buried."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else words[19]


def dead(runner: str) -> bool:
    """Whether a runner was a process of this machine and is surely gone; of others only their lease can tell."""
    place, _, rest = runner.partition(".")
    pid, _, rest = rest.partition(".")
    return place == machine() and pid.isdigit() and born(int(pid)) != rest.partition(".")[0]


class Runner:
    """This process, as one that runs executions of a layer."""

    def __init__(self, engine: Any, seconds: float) -> None:
        self.pid = os.getpid()
        self.id = f"{machine()}.{self.pid}.{born(self.pid)}.{secrets.token_hex(4)}"
        self._engine, self._seconds = engine, seconds
        self._lock = threading.Lock()
        self._running, self._renewed, self._used = 0, -1e9, time.monotonic()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @contextmanager
    def running(self) -> Iterator[str]:
        """Its id, while something runs; its lease holds before that begins."""
        with self._lock:
            if time.monotonic() - self._renewed > self._seconds / 2:
                self._renew()
            if self._thread is None:
                self._stopped.clear()
                self._thread = threading.Thread(target=self._keep, name="layer-runner", daemon=True)
                self._thread.start()
            self._running += 1
        try:
            yield self.id
        finally:
            with self._lock:
                self._running -= 1
                self._used = time.monotonic()

    def _renew(self) -> None:
        begun = time.monotonic()
        self._engine.lease(f"runner/{self.id}", self.id, self._seconds)
        self._renewed = begun

    def _keep(self) -> None:
        while not self._stopped.wait(self._seconds / 3):
            with self._lock:
                if not self._running and time.monotonic() - self._used > IDLE:
                    self._thread = None
                    return self._release()
            try:
                self._renew()
            except LayerError as error:  # busy or away: the next time
                log.warning("the lease of runner %s could not be renewed: %s", self.id, error)

    def _release(self) -> None:
        self._renewed = -1e9
        try:
            self._engine.release(f"runner/{self.id}", self.id)
        except LayerError:
            pass  # it will be over by itself

    def close(self) -> None:
        """Nothing runs here any more."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        if self.pid == os.getpid() and thread is not None:
            thread.join()
            self._release()


def of(layer: Any) -> Runner:
    """This process as a runner of a layer; made at its first use."""
    ledger = layer.ledger
    found: Runner | None = ledger.runner
    if found is None or found.pid != os.getpid():
        made = Runner(layer.engine, layer.settings.runner_seconds)
        with ledger._mutex:
            if ledger.runner is found:
                ledger.runner = made
            found = ledger.runner
    assert found is not None
    return found
