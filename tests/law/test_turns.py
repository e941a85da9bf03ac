"""Turns: everybody has one before anybody has a second, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from sandbox.hosts import wait_until

from livinglayer.law.turns import Turns


class Work:
    """Work of many under one set of turns, each ended by hand."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.order, self.told = turns, [], Counter[str]()
        self.ends: dict[str, threading.Event] = {}
        self.threads: list[threading.Thread] = []

    def begin(self, name: str) -> None:
        """Work called `who` and a number; returns when it goes on or waits."""
        self.ends[name] = threading.Event()
        self.threads.append(threading.Thread(target=self._run, args=(name,), daemon=True))
        self.threads[-1].start()
        wait_until(lambda: name in self.order or self.told[name], f"{name} goes on or waits")

    def _run(self, name: str) -> None:
        with self.turns.turn(name[0], lambda others: self.told.update([name])):
            self.order.append(name)
            self.ends[name].wait(30)

    def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()


def test_work_that_hangs_keeps_nobody_from_a_first() -> None:
    work = Work(Turns(first=6, most=4, each=3))
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1", "d1"):
        work.begin(name)
    assert work.order == ["a1", "a2", "a3", "b1", "c1", "d1"]  # of a no more than three; b's second is beyond the four
    assert work.told.keys() == {"a4", "b2"}
    work.begin("e1")
    assert "e1" not in work.order  # six are as many as there may be
    work.end("a1")
    wait_until(lambda: "e1" in work.order, "who has none comes before who came first")
    work.end("c1", "d1", "e1", "a2")
    wait_until(lambda: "b2" in work.order, "whoever has fewer comes first")
    work.end("a3")
    wait_until(lambda: "a4" in work.order, "and all come in the end")
    work.end("a4", "b1", "b2")
    for thread in work.threads:
        thread.join(10)
        assert not thread.is_alive()


def test_who_fails_while_waiting_is_in_nobodys_way() -> None:
    turns = Turns(first=1, most=1, each=1)

    def broken(others: int) -> None:
        raise OSError("no log")

    with turns.turn("a", broken):
        with pytest.raises(OSError, match="no log"), turns.turn("b", broken):
            pass
    with turns.turn("c", broken):
        pass


def test_never_more_than_there_may_be() -> None:
    turns, lock, most = Turns(first=5, most=3, each=2), threading.Lock(), Counter[str]()
    now: Counter[str] = Counter()

    def run(who: str) -> None:
        for _ in range(20):
            with turns.turn(who, lambda others: None):
                with lock:
                    now[who] += 1
                    most.update({"all": max(0, now.total() - most["all"]), who: max(0, now[who] - most[who])})
                time.sleep(0.0005)
                with lock:
                    now[who] -= 1

    threads = [threading.Thread(target=run, args=(who,)) for who in "aaabbbcccdddeeefff"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert most["all"] <= 5 and max(most[who] for who in "abcdef") <= 2
