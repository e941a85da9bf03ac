"""The checker itself: it flags each known anomaly, and nothing in histories that a serial database could give."""

import random
from collections import defaultdict

import pytest
from reliability.isolation import Txn, check, components


def append(key: str, value: int) -> tuple:
    return ("append", key, value)


def read(key: str, *values: int) -> tuple:
    return ("read", key, list(values))


def txn(*ops: tuple, status: str = "ok", at: tuple[int, int] = (0, 100)) -> Txn:
    """By default all transactions overlap, so that only data decides."""
    return Txn(tuple(ops), status, *at)  # type: ignore[arg-type]


ANOMALIES = {
    "G0": [  # dirty write: x says 1 before 2, y says 2 before 1
        txn(append("x", 1), append("y", 1)),
        txn(append("x", 2), append("y", 2)),
        txn(read("x", 1, 2), read("y", 2, 1)),
    ],
    "G1a": [txn(append("x", 1), status="fail"), txn(read("x", 1))],
    "G1b": [txn(append("x", 1), append("x", 2)), txn(read("x", 1)), txn(read("x", 1, 2))],
    "G1c": [txn(append("x", 1), read("y", 1)), txn(append("y", 1), read("x", 1))],
    "G-single": [  # read skew: the reader sees the writer on y, not on x
        txn(append("x", 1), append("y", 1)),
        txn(read("x"), read("y", 1)),
        txn(read("x", 1)),
    ],
    "G2": [  # write skew
        txn(read("x"), read("y"), append("x", 1)),
        txn(read("x"), read("y"), append("y", 1)),
        txn(read("x", 1), read("y", 1)),
    ],
    "lost update": [txn(read("x"), append("x", 1)), txn(read("x"), append("x", 2)), txn(read("x", 1, 2))],
    "lost append": [txn(append("x", 1), at=(0, 1)), txn(read("x"), at=(2, 3))],
    "incompatible order": [
        txn(append("x", 1)),
        txn(append("x", 2)),
        txn(read("x", 1)),
        txn(read("x", 2)),
        txn(read("x", 1, 2)),
    ],
    "duplicate": [txn(append("x", 1)), txn(read("x", 1, 1))],
    "garbage read": [txn(read("x", 7))],
    "internal": [txn(append("x", 1), read("x"))],
    "G-single-realtime": [  # a stale read: 1 was there before the reader began
        txn(append("x", 1), at=(0, 1)),
        txn(read("x"), at=(2, 3)),
        txn(read("x", 1), at=(4, 5)),
    ],
    "G1c-realtime": [txn(read("x", 1), at=(0, 1)), txn(append("x", 1), at=(2, 3))],  # a read from the future
    "G0-realtime": [
        txn(append("x", 1), at=(2, 3)),
        txn(append("x", 2), at=(0, 1)),
        txn(read("x", 1, 2), at=(4, 5)),
    ],
}


@pytest.mark.parametrize("name", ANOMALIES)
def test_each_anomaly_is_flagged_by_name(name: str) -> None:
    assert name in {anomaly.name for anomaly in check(ANOMALIES[name])}


def test_the_plainest_name_is_given() -> None:
    for name in ("G0", "G1c", "G-single", "G2", "G-single-realtime", "G1c-realtime", "G0-realtime"):
        assert [anomaly.name for anomaly in check(ANOMALIES[name])] == [name]


def test_an_outcome_nobody_learned_may_be_either() -> None:
    unknown = txn(append("x", 1), status="info", at=(0, 1))
    assert check([unknown, txn(read("x"), at=(2, 3))]) == []
    assert check([unknown, txn(read("x"), at=(2, 3)), txn(read("x", 1), at=(4, 5))]) == []


def test_an_aborted_transaction_that_nobody_saw_is_no_anomaly() -> None:
    assert check([txn(append("x", 1), read("y", 9), status="fail"), txn(read("x"))]) == []


def simulate(seed: int, isolated: str, length: int = 400) -> list[Txn]:
    """Overlapping transactions on a small store: `serial` runs each alone, `snapshot` lets write skew through."""
    rng = random.Random(seed)
    store: dict[str, list[int]] = defaultdict(list)
    version: dict[str, int] = defaultdict(int)
    history, value, now = [], 0, 0
    while now < length:
        batch = []  # these read the same snapshot
        for _ in range(1 if isolated == "serial" else 2):
            keys = [rng.choice("abcd") for _ in range(rng.randint(1, 4))]
            local = {k: list(store[k]) for k in keys}
            ops: list[tuple] = []
            for key in keys:
                ops.append(read(key, *local[key]))
                if rng.random() < 0.5:
                    value += 1
                    local[key].append(value)
                    ops.append(append(key, value))
            batch.append((ops, {k: version[k] for k in keys}))
        for ops, based in batch:
            written = {k for op, k, _ in ops if op == "append"}
            ok = all(version[k] == based[k] for k in written)  # first committer wins
            if ok:
                for op, key, v in ops:
                    if op == "append":
                        store[key].append(v)
                        version[key] = now + 1
            history.append(txn(*ops, status="ok" if ok else "fail", at=(now, now + 2)))
        now += 3
    history += [txn(*(read(k, *store[k]) for k in "abcd"), at=(now, now + 1))]
    return history


@pytest.mark.parametrize("seed", range(20))
def test_a_serial_history_is_clean(seed: int) -> None:
    assert check(simulate(seed, "serial")) == []


def test_snapshot_isolation_is_told_from_serializability() -> None:
    names = {anomaly.name for seed in range(20) for anomaly in check(simulate(seed, "snapshot"))}
    assert "G2" in names and not names & {"lost update", "G0", "G1a", "G1b", "G1c", "G-single"}


def test_components_of_a_graph() -> None:
    graph = {1: [2], 2: [3], 3: [1, 4], 4: [5], 5: [4], 6: [6]}
    assert sorted(sorted(part) for part in components(graph)) == [[1, 2, 3], [4, 5], [6]]


def test_a_long_chain_needs_no_stack() -> None:
    history = [txn(append("x", n), at=(2 * n, 2 * n + 1)) for n in range(5_000)]
    assert check([*history, txn(read("x", *range(5_000)), at=(20_000, 20_001))]) == []
