"""Writers whose output shows where it was cut: numbers without gaps, per writer and over all writers."""

import itertools
import os
import select
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import livinglayer
from livinglayer.errors import Conflict

PROCESSES, THREADS = 2, 2
WRITERS = [f"{process}.{thread}" for process in range(PROCESSES) for thread in range(THREADS)]
TICKETS = "tickets"  # the stream all processes write together


def define(layer: Any) -> None:
    layer.define("beat", {"writer": "text!", "n": "int!"})
    layer.define("ticket", {"n": "int!"})
    layer.define("total", {"n": "int!"})
    layer.insert("total", {"n": 0})


def run(location: str, process: int, log: Connection, stop: Event) -> None:
    """In a process of its own: write until told to stop, saying each acknowledged number to `log`."""
    layer = livinglayer.open(location)
    [total] = layer.query("select id from total")
    failed: list[BaseException] = []

    def say(stream: str, n: int) -> None:
        os.write(log.fileno(), f"{stream} {n}\n".encode())

    def beats(writer: str) -> None:
        for n in itertools.count():
            if stop.is_set():
                return
            layer.insert("beat", {"writer": writer, "n": n})
            say(writer, n)
            time.sleep(0.01)

    def tickets() -> None:
        while not stop.is_set():
            try:
                with layer.transaction() as tx:
                    n = tx.query("select n from total")[0]["n"] + 1
                    tx.insert("ticket", {"n": n})
                    tx.update("total", total["id"], {"n": n})
            except Conflict:
                continue
            say(TICKETS, n)
            time.sleep(0.01)

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            failed.append(error)

    pool = [threading.Thread(target=guarded, args=(beats, f"{process}.{n}")) for n in range(THREADS)]
    pool.append(threading.Thread(target=guarded, args=(tickets,)))
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    layer.close()
    if failed:
        raise failed[0]


class Progress:
    """The highest acknowledged number of each stream, kept current from the log."""

    def __init__(self, log: Connection) -> None:
        self.log, self.rest = log, b""
        self.seen = dict.fromkeys([*WRITERS, TICKETS], -1)

    def __call__(self) -> dict[str, int]:
        while select.select([self.log], [], [], 0)[0]:
            data = os.read(self.log.fileno(), 1 << 16)
            if not data:
                break
            *lines, self.rest = (self.rest + data).split(b"\n")
            for line in lines:
                stream, n = line.decode().split()
                self.seen[stream] = max(self.seen[stream], int(n))
        return dict(self.seen)


def found(layer: Any, **when: Any) -> dict[str, list[int]]:
    """Every stream as a layer holds it."""
    streams: dict[str, list[int]] = {writer: [] for writer in WRITERS}
    for row in layer.query("select writer, n from beat order by n", limit=10_000_000, timeout=60, **when):
        streams[row["writer"]].append(row["n"])
    rows = layer.query("select n from ticket order by n", limit=10_000_000, timeout=60, **when)
    return {**streams, TICKETS: [row["n"] for row in rows]}
