"""Read, add one, write back if nobody was faster; else again."""

import threading
from typing import Any

import livinglayer
from livinglayer.errors import Conflict


def define(layer: Any) -> None:
    layer.define("tally", {"n": "int"})


def current(layer: Any, row: int) -> tuple[int, int]:
    """The value, and the version (the tx that wrote it)."""
    [found] = layer.query("select n, tx from tally__history where id = :id and tx_end is null", {"id": row})
    return found["n"], found["tx"]


def increment(layer: Any, row: int, how: str) -> None:
    if how == "transaction":
        with layer.transaction() as tx:
            [found] = tx.query("select n from tally where id = :id", {"id": row})
            tx.update("tally", row, {"n": found["n"] + 1})
        return
    n, version = current(layer, row)
    guard: dict[str, Any] = {"expect": version} if how == "expect" else {"seen": [("tally", row, version)]}
    layer.update("tally", row, {"n": n + 1}, **guard)


def run(location: str, row: int, how: str, threads: int, times: int) -> None:
    """In a process of its own: so many successful increments in each of so many threads."""
    layer = livinglayer.open(location)
    failed: list[BaseException] = []

    def work() -> None:
        left = times
        try:
            while left:
                try:
                    increment(layer, row, how)
                    left -= 1
                except Conflict:
                    pass
        except BaseException as error:
            failed.append(error)

    pool = [threading.Thread(target=work) for _ in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    layer.close()
    if failed:
        raise failed[0]
