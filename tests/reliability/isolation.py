"""Decide whether a history of list-append transactions could have happened one at a time, in real-time order.

After Elle (Kingsbury and Alvaro, 2020): every appended value is unique, so a list that was read tells the order of
its writes. From that follow the dependencies between transactions (ww: wrote after, wr: read from, rw: read before
another wrote, rt: began after another ended); a cycle among them is an anomaly, and its edges give it its name.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

Op = tuple[Literal["append", "read"], Any, Any]  # ("append", key, value) or ("read", key, [values])
Edges = dict[int, dict[int, set[str]]]


@dataclass(frozen=True)
class Txn:
    """One transaction as its client saw it; `info` is one whose outcome the client never learned."""

    ops: tuple[Op, ...]
    status: Literal["ok", "fail", "info"] = "ok"
    start: int = 0
    end: int = 0
    name: str = ""


@dataclass(frozen=True)
class Anomaly:
    name: str
    text: str


def check(history: Iterable[Txn]) -> list[Anomaly]:
    """Every anomaly found, the plainest first; an empty list means strictly serializable."""
    txns = list(history)
    writer = {(k, v): i for i, t in enumerate(txns) for op, k, v in t.ops if op == "append"}
    reads = [(i, k, list(v)) for i, t in enumerate(txns) if t.status == "ok" for op, k, v in t.ops if op == "read"]
    order: dict[Any, list[Any]] = {}
    for _, key, values in reads:
        if len(values) > len(order.get(key, [])):
            order[key] = values
    seen = {writer.get((key, v)) for key, values in order.items() for v in values}
    committed = [t.status == "ok" or (t.status == "info" and i in seen) for i, t in enumerate(txns)]
    found = [*_bad_reads(txns, writer, reads, order), *_lost(txns, committed, reads, order)]
    return found + list(_cycles(txns, _dependencies(txns, committed, writer, reads, order)))


def _bad_reads(txns: list[Txn], writer: dict, reads: list, order: dict) -> Iterator[Anomaly]:
    last = {(i, k): v for i, t in enumerate(txns) for op, k, v in t.ops if op == "append"}
    for i, key, values in reads:
        where = f"{_label(txns, i)} read {key!r} = {values}"
        if len(set(values)) < len(values):
            yield Anomaly("duplicate", where)
        if values != order.get(key, [])[: len(values)]:
            yield Anomaly("incompatible order", f"{where}, another read {order[key]}")
        for v in values:
            if (key, v) not in writer:
                yield Anomaly("garbage read", f"{where}: nobody wrote {v}")
            elif txns[writer[key, v]].status == "fail":
                yield Anomaly("G1a", f"{where}: {v} was written by {_label(txns, writer[key, v])}, which aborted")
        others = [v for v in values if writer.get((key, v), i) != i]
        if others and last[writer[key, others[-1]], key] != others[-1]:
            yield Anomaly("G1b", f"{where}: {others[-1]} is not the last value its writer left")
    for i, t in enumerate(txns):
        if t.status == "ok":
            yield from _internal(txns, i)


def _internal(txns: list[Txn], i: int) -> Iterator[Anomaly]:
    """A transaction sees its own appends, and the same list twice otherwise."""
    known: dict[Any, list[Any]] = {}
    own: dict[Any, list[Any]] = defaultdict(list)
    for op, key, v in txns[i].ops:
        if op == "append":
            own[key].append(v)
            if key in known:
                known[key] = [*known[key], v]
        else:
            values = list(v)
            if values != known.get(key, values) or values[len(values) - len(own[key]) :] != own[key]:
                yield Anomaly("internal", f"{_label(txns, i)} read {key!r} = {values} after {known.get(key, own[key])}")
            known[key] = values


def _lost(txns: list[Txn], committed: list[bool], reads: list, order: dict) -> Iterator[Anomaly]:
    based: dict[Any, int] = {}
    for i, t in enumerate(txns):
        first: dict[Any, tuple] = {}
        for op, key, v in t.ops if committed[i] else ():
            if op == "read":
                first.setdefault(key, tuple(v))
            elif key in first:
                other = based.setdefault((key, first[key]), i)
                if other != i:
                    what = f"both read {key!r} = {list(first[key])} and appended to it"
                    yield Anomaly("lost update", f"{_label(txns, other)} and {_label(txns, i)} {what}")
    kept = {(key, v) for key, values in order.items() for v in values}
    latest: dict[Any, int] = defaultdict(int)
    for i, key, _ in reads:
        latest[key] = max(latest[key], txns[i].start)
    for i, t in enumerate(txns):
        for op, key, v in t.ops if t.status == "ok" else ():
            if op == "append" and (key, v) not in kept and latest[key] > t.end:
                yield Anomaly("lost append", f"{_label(txns, i)} appended {v} to {key!r}; no later read has it")


def _dependencies(txns: list[Txn], committed: list[bool], writer: dict, reads: list, order: dict) -> Edges:
    edges: Edges = defaultdict(lambda: defaultdict(set))

    def add(a: int | None, b: int | None, kind: str) -> None:
        if a is not None and b is not None and a != b:
            edges[a][b].add(kind)

    for key, values in order.items():
        for a, b in pairwise(values):
            add(writer.get((key, a)), writer.get((key, b)), "ww")
    for i, key, values in reads:
        theirs = [v for v in values if writer.get((key, v)) != i]
        if theirs:
            add(writer.get((key, theirs[-1])), i, "wr")
        if len(theirs) == len(values) < len(order.get(key, [])):
            add(i, writer.get((key, order[key][len(values)])), "rw")
    # Real time as a chain of instants, numbered after the transactions: n edges in place of n².
    now = None
    events = [(t.start, 0, i) for i, t in enumerate(txns) if committed[i]]
    events += [(t.end, 1, i) for i, t in enumerate(txns) if t.status == "ok"]
    for instant, (_, ended, i) in enumerate(sorted(events), len(txns)):
        if ended:
            add(now, instant, "rt")
            add(i, instant, "rt")
            now = instant
        else:
            add(now, i, "rt")
    return edges


def _cycles(txns: list[Txn], edges: Edges) -> Iterator[Anomaly]:
    """The plainest cycle of each strongly connected part, named as Adya does."""
    done: set[int] = set()
    for suffix, clock in (("", set[str]()), ("-realtime", {"rt"})):
        for name, kinds in (("G0", {"ww"}), ("G1c", {"ww", "wr"}), ("G2", {"ww", "wr", "rw"})):
            graph = {a: [b for b, have in to.items() if have & (kinds | clock)] for a, to in edges.items()}
            for part in components(graph):
                if len(part) > 1 and not done & set(part):
                    done |= set(part)
                    path = _cycle(graph, set(part))
                    steps = [_kind(edges[a][b], kinds | clock) for a, b in pairwise(path)]
                    called = "G-single" if name == "G2" and steps.count("rw") == 1 else name
                    shown = [(a, s) for a, s in zip(path, steps, strict=False) if a < len(txns)]
                    text = "".join(f"{_label(txns, a)} -{s}-> " for a, s in shown)
                    yield Anomaly(called + suffix, text + _label(txns, shown[0][0]))


def _kind(have: set[str], wanted: set[str]) -> str:
    return next(k for k in ("ww", "wr", "rw", "rt") if k in have & wanted)


def _cycle(graph: dict[int, list[int]], part: set[int]) -> list[int]:
    """A shortest cycle through one node of a strongly connected part."""
    start = min(part)
    back: dict[int, int] = {}
    queue = [start]
    for a in queue:
        for b in graph.get(a, []):
            if b == start:
                path = [start, a]
                while path[-1] != start:
                    path.append(back[path[-1]])
                return path[::-1] if a != start else [start, start]
            if b in part and b not in back:
                back[b] = a
                queue.append(b)
    raise AssertionError("not strongly connected")


def components(graph: dict[int, list[int]]) -> Iterator[list[int]]:
    """Strongly connected components (Tarjan), without recursion: histories are longer than the stack."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    inside: set[int] = set()
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(graph[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        inside.add(root)
        while work:
            a, rest = work[-1]
            for b in rest:
                if b not in index:
                    index[b] = low[b] = len(index)
                    stack.append(b)
                    inside.add(b)
                    work.append((b, iter(graph.get(b, []))))
                    break
                if b in inside:
                    low[a] = min(low[a], index[b])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[a])
                if low[a] == index[a]:
                    part = []
                    while not part or part[-1] != a:
                        part.append(stack.pop())
                        inside.discard(part[-1])
                    yield part


def _label(txns: list[Txn], i: int) -> str:
    return txns[i].name or f"T{i}"
