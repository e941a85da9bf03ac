"""Concurrent list-append transactions through the public API, and the history their clients saw.

Two kinds of list: `register` keeps a list in one row, so two appends meet on that row; `entry` keeps a row per value,
so two appends meet only in what they read, and a database that looks at written rows alone lets both through.
"""

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

from reliability.isolation import Op, Txn

import livinglayer
from livinglayer.errors import Conflict, TimedOut, Unavailable

ACTIVE = 5  # lists in use at a time: few, so that transactions meet
USES = 40  # transactions of one thread before it moves on to other lists: long lists say no more than short ones


def define(layer: Any, keys: int) -> None:
    layer.define("register", {"name": {"type": "text!", "unique": True}, "items": "json"})
    layer.define("entry", {"register": {"type": "text!", "indexed": True}, "position": "int!", "value": "int!"})
    layer.insert("register", [{"name": f"register{n}", "items": []} for n in range(keys)])


def lists(transactions: int) -> int:
    """How many lists of a kind are in use over a run of so many transactions a thread."""
    return (transactions // USES + 1) * ACTIVE


def read(view: Any, key: str) -> list[int]:
    """A list through `tx.query` or `layer.query`."""
    if key.startswith("register"):
        return list(view.query("select items from register where name = :name", {"name": key})[0]["items"])
    rows = view.query("select value from entry where register = :name order by position, id", {"name": key})
    return [row["value"] for row in rows]


def append(tx: Any, key: str, value: int) -> list[int]:
    """Read the list and write it back one longer; returns what was read."""
    if key.startswith("register"):
        [row] = tx.query("select id, items from register where name = :name", {"name": key})
        tx.update("register", row["id"], {"items": [*row["items"], value]})
        return list(row["items"])
    values = read(tx, key)
    tx.insert("entry", {"register": key, "position": len(values), "value": value})
    return values


def run(location: str, log: str, process: int, threads: int, transactions: range) -> None:
    """In a process of its own: random transactions in so many threads; invocations and outcomes go to the file `log`."""
    layer = livinglayer.open(location)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(**event: Any) -> None:
        os.write(file, ("\n" + json.dumps(event)).encode())  # a kill may tear a line: the next one begins afresh

    def work(thread: int) -> None:
        rng = random.Random()
        for n in transactions:
            name = f"{process}.{thread}.{n}"
            first = n // USES * ACTIVE
            keys = [
                f"{rng.choice(('register', 'entry'))}{first + rng.randrange(ACTIVE)}" for _ in range(rng.randint(1, 4))
            ]
            writes = [rng.random() < 0.6 for _ in keys]
            # A value names its writer, so no two writers append the same one.
            values = [(process * 10**6 + n) * 100 + thread * 10 + i for i in range(len(keys))]
            plan = [["append", k, v] for k, v, w in zip(keys, values, writes, strict=True) if w]
            say(name=name, start=time.monotonic_ns(), status="info", ops=plan)
            ops: list[Op] = []
            status = "ok"
            try:
                if not any(writes) and n % 2:
                    [key] = keys[:1]
                    ops.append(("read", key, read(layer, key)))  # a plain query is a transaction too
                else:
                    with layer.transaction(reason=name) as tx:
                        for key, value, writing in zip(keys, values, writes, strict=True):
                            if writing:
                                ops += [("read", key, append(tx, key, value)), ("append", key, value)]
                            else:
                                ops.append(("read", key, read(tx, key)))
            except Conflict:
                status = "fail"
            except (Unavailable, TimedOut) as error:
                status = "info"
                say(name=name, error=f"{type(error).__name__}: {error}")
            except Exception as error:
                say(name=name, error=f"{type(error).__name__}: {error}", unexpected=True)
                raise
            say(name=name, end=time.monotonic_ns(), status=status, ops=ops if status != "info" else plan)

    pool = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    layer.close()


def history(log: str) -> tuple[list[Txn], list[str]]:
    """The transactions of a log, and the errors in it other than conflicts."""
    txns: dict[str, dict[str, Any]] = {}
    errors = []
    with open(log) as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # torn by a kill: it never began, or nobody learned its outcome
            if "error" in event:
                errors.append(f"{event['name']}: {event['error']}")
            else:
                txns.setdefault(event["name"], {"end": 0}).update(event)
    return [
        Txn(tuple(map(tuple, t["ops"])), t["status"], t["start"], t["end"], name) for name, t in txns.items()
    ], errors


def final(layer: Any, keys: int) -> Iterator[Txn]:
    """What every list holds when all is done."""
    for n in range(keys):
        for key in (f"register{n}", f"entry{n}"):
            start = time.monotonic_ns()
            yield Txn((("read", key, read(layer, key)),), "ok", start, time.monotonic_ns(), f"final {key}")
