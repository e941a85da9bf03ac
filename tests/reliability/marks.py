"""The writes of the kill campaign: every one leaves a mark, so that what must, may and must not be there is known."""

import itertools
import os
import select
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import livinglayer
from livinglayer.errors import Conflict

THREADS = {"a": 4, "b": 2}  # threads of each writing process
WRITERS = [f"{process}{thread}" for process, threads in THREADS.items() for thread in range(threads)]


def define(layer: Any) -> None:
    layer.define("mark", {"name": "text!", "round": {"type": "int", "indexed": True}})
    layer.define("counter", {"name": "text!", "value": "text"})
    layer.insert("counter", [{"name": writer, "value": ""} for writer in WRITERS])


def act(layer: Any, round: int, writer: str, n: int, counter: int) -> Any:
    """The writer's nth write of a round: in turn one row, by key, an update, a transaction, many by key."""
    rows = [{"name": name, "round": round} for name in names(round, writer, n)]
    mark = f"{round}/{writer}/{n}"
    match n % 5:
        case 0:
            return layer.insert("mark", rows[0])
        case 1:
            return layer.insert("mark", rows[0], key=mark)
        case 2:
            return layer.update("counter", counter, {"value": mark})
        case 3:
            with layer.transaction(reason=mark) as tx:
                return [tx.insert("mark", row) for row in rows]
        case _:
            return layer.insert("mark", rows, key=mark)


def names(round: int, writer: str, n: int) -> list[str]:
    """The rows of `mark` that a write leaves."""
    mark = f"{round}/{writer}/{n}"
    return [[mark], [mark], [], [f"{mark}+", f"{mark}-"], [f"{mark}<", f"{mark}>"]][n % 5]


def has_key(n: int) -> bool:
    return n % 5 in (1, 4)


def write(location: str, round: int, process: str, log: Connection) -> None:
    """In a process of its own: write until killed, telling each acknowledgement to `log`."""
    layer = livinglayer.open(location)
    counters = {row["name"]: row["id"] for row in layer.query("select id, name from counter")}

    def work(writer: str) -> None:
        for n in itertools.count():
            try:
                said = f"ok {act(layer, round, writer, n, counters[writer])}"
            except Conflict:
                said = "refused"  # a serializable transaction may be; then nothing of it is there
            except Exception as error:
                said = f"error {type(error).__name__}: {error}".replace("\n", " ")[:400]
            os.write(log.fileno(), f"{writer} {n} {said}\n".encode())  # shorter than PIPE_BUF: whole or not at all
            if said.startswith("error"):
                return

    threads = [threading.Thread(target=work, args=(f"{process}{n}",)) for n in range(THREADS[process])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Acks:
    """What the writers of a round have said, read from outside their processes."""

    def __init__(self, log: Connection) -> None:
        self.log, self.rest = log, b""
        self.done: dict[str, dict[int, str]] = defaultdict(dict)  # writer: {n: the result as text}
        self.refused: set[tuple[str, int]] = set()
        self.errors: list[str] = []

    def __len__(self) -> int:
        return sum(len(acked) for acked in self.done.values())

    def read(self, seconds: float) -> bool:
        """Take in what is there within `seconds`; False when nothing came."""
        if not select.select([self.log], [], [], seconds)[0]:
            return False
        data = os.read(self.log.fileno(), 1 << 16)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            writer, n, what, *text = line.decode().split(" ", 3)
            if what == "ok":
                self.done[writer][int(n)] = text[0]
            elif what == "refused":
                self.refused.add((writer, int(n)))
            else:
                self.errors.append(f"{writer} {n}: {text[0]}")
        return bool(data)

    def wait(self, count: int, process: str = "", seconds: float = 60) -> None:
        """Until `process` (or any) has acknowledged `count` writes."""
        while sum(len(acked) for writer, acked in self.done.items() if writer.startswith(process)) < count:
            assert self.read(seconds), f"no acknowledgement within {seconds} s; {self.errors}"
            if self.errors:
                return

    def drain(self) -> None:
        while self.read(0):
            pass

    def next(self, writer: str) -> int:
        """The write that may be under way: the first one the writer has not reported."""
        reported = [*self.done[writer], *(n for who, n in self.refused if who == writer)]
        return max(reported, default=-1) + 1

    def must(self, round: int) -> Counter[str]:
        return Counter(name for writer in WRITERS for n in self.done[writer] for name in names(round, writer, n))

    def may(self, round: int) -> Iterator[list[str]]:
        """The rows of each write under way: all of them may be there, or none."""
        for writer in WRITERS:
            yield names(round, writer, self.next(writer))
