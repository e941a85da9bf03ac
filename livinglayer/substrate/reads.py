"""Reads: a SELECT over entity names, answered through the views of one branch, moment and principal."""

from __future__ import annotations

import json
import logging
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import sqlglot
from sqlglot import exp

from .. import errors
from ..errors import Invalid, LayerError, LimitExceeded, NotFound, TimedOut, Unavailable
from ..settings import Settings
from .catalog import Branch, Catalog, no_branch
from .engine import Engine, Session, Stale
from .permissions import Policy
from .predicates import Me, Predicate
from .schema import Entity, Schema
from .values import decoder, parameter, text
from .views import Chain, base_sql, governed_sql, history_names, history_sql

SUFFIX = "__history"
LONGEST = 86_400
READERS = 12  # connections kept idle
MOST = 1 << 60  # rows anybody can mean
logging.getLogger("sqlglot").setLevel(logging.CRITICAL)  # what it thinks of a caller's text is not for our log
NAMED = ("principal", "reason", "execution", "branch")  # of history: who and why, for those who may read tx


class Source:
    """The SQL of every name one principal can use, on one branch at one moment."""

    def __init__(
        self, catalog: Catalog, session: Session, branch: Branch, as_of: int | None, policy: Policy, epoch: int
    ) -> None:
        self.catalog, self.engine, self.branch, self.policy, self.epoch = catalog, catalog.engine, branch, policy, epoch
        self.as_of = as_of
        self.chain: Chain = catalog.chain(session, branch, as_of)
        self.schema: Schema = catalog.schema(session, self.chain, epoch)
        self.slices = catalog.slices(session, branch)

    def entity(self, name: str) -> tuple[Entity, bool] | None:
        """The entity behind a name, and whether its history is meant."""
        past = name.endswith(SUFFIX)
        entity = self.schema.by_name.get(name.removesuffix(SUFFIX))
        return None if entity is None or (past and entity.kind == "ledger") else (entity, past)

    def base(self, name: str) -> str:
        found = self.entity(name)
        if found is None:
            raise Invalid(f"there is no entity {name!r}")
        entity, past = found
        return history_sql(self.engine, entity, self.chain) if past else base_sql(self.engine, entity, self.chain)

    def governed(self, name: str, relation: Callable[[str], str]) -> str | None:
        """The SQL a public name stands for; None when this principal has no such name."""
        found = self.entity(name)
        if found is None:
            return None
        entity, past = found
        rules = self.policy.rules("read", self.schema, entity, self.branch.name)
        conditions = self.catalog.slice_predicates(self.slices, self.schema, entity)
        if conditions is None:
            return None
        nobody: Me = {}
        extra: list[tuple[Predicate, Me]] = [(p, nobody) for p in conditions]
        names = [f.name for f in entity.fields]
        added = history_names(entity)
        fixed: Sequence[str] = () if entity.kind == "ledger" else ("id", *added.values()) if past else ("id",)
        blank: Sequence[str] = ()
        if past and not self.policy.rules("read", self.schema, self.schema.by_name["tx"], self.branch.name).everything:
            blank = [added[n] for n in NAMED]
        if entity.kind != "ledger":
            names = ["id", *names, *(added.values() if past else ())]
        return governed_sql(self.engine, names, relation(name), rules.read_rule(), relation, extra, fixed, blank)

    def open(self, name: str) -> bool:
        """Whether a name shows everything there is, so that no condition on it can tell what is hidden."""
        found = self.entity(name)
        return (
            found is not None
            and not self.slices
            and self.policy.rules("read", self.schema, found[0], self.branch.name).everything
        )

    def has_decimals(self, name: str) -> bool:
        found = self.entity(name)
        return found is not None and any(f.type == "decimal" for f in found[0].fields)

    def type_of(self, column: str, entities: Sequence[str]) -> str | None:
        for name in entities:
            found = self.entity(name)
            if found and column in found[0].by_name:
                return found[0].by_name[column].type
            if found and found[1] and column == history_names(found[0])["at"]:
                return "datetime"
        return None


# What a column that is an expression holds (SQLite only says it of plain columns)

_KEEP = (
    exp.Sum,
    exp.Min,
    exp.Max,
    exp.Coalesce,
    exp.Nullif,
    exp.Case,
    exp.If,
    exp.Window,
    exp.Paren,
    exp.FirstValue,
    exp.LastValue,
    exp.Lag,
    exp.Lead,
)


@lru_cache(512)
def _tree(sql: str) -> Any:
    try:
        return sqlglot.parse_one(sql, read="sqlite")
    except (sqlglot.errors.SqlglotError, RecursionError):
        return None


def inferred(sql: str, name: str, source: Source) -> str | None:
    """The field type of an output column, where the statement makes it plain."""
    tree = _tree(sql)
    if tree is None:
        return None
    entities = [t.name.lower() for t in tree.find_all(exp.Table)]
    aliases = {a.alias: a.this for a in tree.find_all(exp.Alias)}

    def kind(node: Any, depth: int) -> str | None:
        if depth > 8 or node is None:
            return None
        if isinstance(node, exp.Column):
            found = source.type_of(node.name, entities)
            return found if found or node.name not in aliases else kind(aliases[node.name], depth + 1)
        if isinstance(node, exp.Predicate | exp.Not | exp.And | exp.Or):
            return "bool"
        if isinstance(node, exp.Subquery):
            return (
                kind(node.this.expressions[0], depth + 1)
                if isinstance(node.this, exp.Select) and node.this.expressions
                else None
            )
        if isinstance(node, exp.Alias):
            return kind(node.this, depth + 1)
        if isinstance(node, exp.Case):
            parts = [i.args.get("true") for i in node.args.get("ifs", [])] + [node.args.get("default")]
        elif isinstance(node, exp.Distinct):
            parts = list(node.expressions)
        elif isinstance(node, _KEEP):
            parts = (
                [node.this, *node.expressions]
                if not isinstance(node, exp.If)
                else [node.args.get("true"), node.args.get("false")]
            )
        else:
            return None
        kinds = {kind(p, depth + 1) for p in parts if p is not None and not isinstance(p, exp.Null | exp.Literal)}
        return kinds.pop() if len(kinds) == 1 else None

    if name in aliases:
        return kind(aliases[name], 0)
    outer = tree if isinstance(tree, exp.Select) else tree.find(exp.Select)
    for item in outer.expressions if outer is not None else ():
        if not isinstance(item, exp.Star) and item.sql(dialect="sqlite").lower().replace(
            " ", ""
        ) == name.lower().replace(" ", ""):
            return kind(item, 0)
    return source.type_of(name, entities)


DECLARED = {
    "DECIMAL_TEXT": "decimal",
    "DATE_TEXT": "date",
    "DATETIME_TEXT": "datetime",
    "JSON_TEXT": "json",
    "BOOL_INT": "bool",
}
_SPECIAL = ("decimal", "date", "datetime", "json", "bool")
_PLAIN = {"TEXT", "INTEGER", "REAL", "BLOB"}


Answer = tuple[
    Sequence[str], Sequence[tuple[int, str]], Sequence[tuple[Any, ...]]
]  # names, types of special columns, rows


def shaped(
    sql: str, shape: Sequence[tuple[str, str | None]], source: Source
) -> tuple[list[str], list[tuple[int, str]]]:
    """Column names, and which columns are stored in a form that Python has a better one for."""
    kinds: list[tuple[int, str]] = []
    for place, (name, declared) in enumerate(shape):
        kind = DECLARED.get(declared or "") if declared else inferred(sql, name, source)
        if declared in _PLAIN:
            continue
        if kind in _SPECIAL:
            kinds.append((place, kind))
    return distinct([name for name, _ in shape]), kinds


def distinct(names: list[str]) -> list[str]:
    """Column names of an answer: a second `id` is called id_2, so that a dict loses nothing."""
    if len(set(names)) == len(names):
        return names
    found: dict[str, None] = {}
    for name in names:
        n, free = 2, name
        while free in found:
            free, n = f"{name}_{n}", n + 1
        found[free] = None
    return list(found)


def as_dicts(
    names: Sequence[str], kinds: Sequence[tuple[int, str]], rows: Sequence[tuple[Any, ...]]
) -> list[dict[str, Any]]:
    if not kinds:
        return [dict(zip(names, row, strict=False)) for row in rows]
    turns = [(place, turn) for place, kind in kinds if (turn := decoder(kind)) is not None]
    found = []
    for row in rows:
        values = list(row)
        for place, turn in turns:
            if values[place] is not None:
                try:
                    values[place] = turn(values[place])
                except (ValueError, TypeError, ArithmeticError):  # an expression that is not what it seemed
                    pass
        found.append(dict(zip(names, values, strict=False)))
    return found


def check_request(sql: Any, params: Any, branch: Any, as_of: Any, timeout: float, limit: int) -> None:
    """What can't be a query is Invalid before anything looks at it."""
    text("the query", sql, 1 << 20)
    text("the name of a branch", branch, 1000)
    if isinstance(as_of, bool) or not isinstance(as_of, int | datetime | None):
        raise Invalid(f"as_of is a tx number or an aware datetime, not {as_of!r}")
    number = isinstance(timeout, int | float) and isinstance(limit, int) and not isinstance(limit, bool)
    if not number or not 0 < timeout <= LONGEST or not 0 <= limit <= MOST:
        raise Invalid(f"timeout is a number of seconds up to {LONGEST}, limit a number of rows")
    if isinstance(params, str | bytes) or not isinstance(params, Mapping | Sequence | None):
        raise Invalid(f"parameters are a dict or a list, not {type(params).__name__}")
    for value in params.values() if isinstance(params, Mapping) else params or ():
        if isinstance(value, str):
            text("a parameter", value, 1 << 30)


class Reads:
    """Answers queries: the owner's here, everybody else's where they can't hurt (a reader process, a role of their own)."""

    def __init__(self, catalog: Catalog, settings: Settings, isolate: bool = True) -> None:
        self.catalog, self.engine, self.settings = catalog, catalog.engine, settings
        self._idle: OrderedDict[Any, list[Any]] = OrderedDict()
        self._lock = threading.Lock()
        self.processes = Processes(catalog.engine, settings) if isolate and catalog.engine.dialect == "sqlite" else None

    def query(
        self,
        sql: str,
        params: Mapping[str, Any] | Sequence[Any] | None,
        branch: str,
        as_of: int | datetime | None,
        principal: int,
        timeout: float | None,
        limit: int | None,
        trusted: bool,
    ) -> list[dict[str, Any]]:
        """Rows of one SELECT as dicts."""
        seconds = self.settings.query_seconds if timeout is None else timeout
        most = self.settings.query_rows if limit is None else limit
        check_request(sql, params, branch, as_of, seconds, most)
        if self.processes is not None and not trusted:
            return self.processes.query(sql, params, branch, as_of, principal, seconds, most)
        return as_dicts(*self.raw(sql, params, branch, as_of, principal, time.monotonic() + seconds, most))

    def raw(
        self,
        sql: str,
        params: Any,
        branch: str,
        as_of: int | datetime | None,
        principal: int,
        deadline: float,
        most: int,
    ) -> Answer:
        """The answer of one SELECT, values as the engine gives them."""
        key = (branch, as_of, principal)
        for _ in range(20):
            reader, used = self._take(key)
            if used and reader.source.policy.expired():
                reader.close()
                continue
            try:
                answer: Answer = reader.answer(sql, params, deadline, most)
            except Stale:
                reader.close()
                continue
            except (NotFound, Invalid):
                # A name that was not there when the reader was made may be by now.
                stale = used and self._epoch() != reader.source.epoch
                self._give(key, reader, keep=not stale)
                if not stale:
                    raise
                continue
            except BaseException as error:
                self._give(key, reader, keep=isinstance(error, LayerError) and not isinstance(error, Unavailable))
                if used and isinstance(error, Unavailable):  # its connection died while it lay idle
                    continue
                raise
            self._give(key, reader, keep=not reader.source.policy.expired())
            return answer
        raise Unavailable("the schema changes faster than this query can be read", hint="try again")

    def _epoch(self) -> int:
        with self.engine.reading() as session:
            return clock(self.engine, session)[1]

    def _take(self, key: Any) -> tuple[Any, bool]:
        """A reader for a key, and whether it was used before."""
        with self._lock:
            idle = self._idle.get(key)
            if idle:
                self._idle.move_to_end(key)
                return idle.pop(), True
        branch, as_of, principal = key
        with self.engine.reading() as session:
            last, epoch = clock(self.engine, session)
            moment = None if as_of is None else self.catalog.moment(session, as_of, last)
            policy = self.catalog.policy(session, principal, epoch)
            if branch != "main" and not any(
                g.effect == "allow" and g.action in ("read", "*") and g.branch in (None, branch) for g in policy.grants
            ):
                raise no_branch(branch)  # what may not be read is not there
            source = Source(self.catalog, session, self.catalog.branch(session, branch), moment, policy, epoch)
        return self.engine.reader(source), False

    def _give(self, key: Any, reader: Any, keep: bool) -> None:
        dropped = [] if keep else [reader]
        with self._lock:
            if keep:
                self._idle.setdefault(key, []).append(reader)
            if len(self._idle) > 1 or len(self._idle.get(key, ())) > READERS:
                while sum(map(len, self._idle.values())) > READERS:
                    old = next(k for k, idle in self._idle.items() if idle)
                    dropped.append(self._idle[old].pop(0))
                for empty in [k for k, idle in self._idle.items() if not idle]:
                    del self._idle[empty]
        for each in dropped:
            each.close()

    def borrow(self, branch: str, as_of: int | datetime | None, principal: int) -> tuple[Any, Callable[[], None]]:
        """A reader to run several statements on, and what gives it back."""
        key = (branch, as_of, principal)
        reader, _ = self._take(key)
        return reader, lambda: self._give(key, reader, keep=True)

    def close(self) -> None:
        with self._lock:
            readers = [r for idle in self._idle.values() for r in idle]
            self._idle.clear()
        for reader in readers:
            reader.close()
        if self.processes is not None:
            self.processes.close()


def clock(engine: Engine, session: Session) -> tuple[int, int]:
    """The last tx and the epoch."""
    row = session.one(f"select tx, epoch from {engine.schema_prefix}ledger_clock")
    assert row is not None
    return row[0], row[1]


# Reader processes: a statement that eats memory or never ends takes only its own process with it.


def send(fd: int, message: Any, most: int | None = None) -> None:
    data = json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode()
    if most is not None and len(data) > most:
        raise LimitExceeded(f"the answer is larger than {most} bytes", hint="ask for less at a time")
    data = struct.pack(">I", len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int, deadline: float | None = None) -> Any:
    """One message; None at the end of the stream; TimeoutError when the deadline passes first."""

    def exactly(count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            if deadline is not None and not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(fd, min(1 << 20, count - len(parts)))
            if not part:
                return None
            parts += part
        return bytes(parts)

    head = exactly(4)
    body = None if head is None else exactly(struct.unpack(">I", head)[0])
    return None if body is None else json.loads(body)


def packed(value: Any) -> Any:
    """A stored value as JSON can carry it."""
    return {"b": value.hex()} if isinstance(value, bytes) else value


def unpacked(value: Any) -> Any:
    return bytes.fromhex(value["b"]) if isinstance(value, dict) else value


class Processes:
    """A few reader processes, started when first needed."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._free = threading.Semaphore(settings.readers)
        self.closed = False

    def query(
        self,
        sql: str,
        params: Any,
        branch: str,
        as_of: int | datetime | None,
        principal: int,
        seconds: float,
        most: int,
    ) -> list[dict[str, Any]]:
        given = (
            {k: packed(parameter(v)) for k, v in params.items()}
            if isinstance(params, Mapping)
            else [packed(parameter(v)) for v in params or ()]
        )
        moment = as_of.isoformat() if isinstance(as_of, datetime) else as_of
        if not self._free.acquire(timeout=max(seconds, 0.01)):
            raise Unavailable("all readers are busy", hint="try again")
        try:
            for attempt in (1, 2):
                process = self._start()
                try:
                    assert process.stdin is not None and process.stdout is not None
                    send(process.stdin.fileno(), [sql, given, branch, moment, principal, seconds, most])
                    answer = receive(process.stdout.fileno(), time.monotonic() + seconds + 1.0)
                except TimeoutError:
                    self._kill(process)
                    raise TimedOut("the query took too long", hint="ask for less, or give a longer timeout") from None
                except (BrokenPipeError, OSError):
                    answer = None
                except BaseException:
                    self._kill(process)
                    raise
                if answer is not None:
                    with self._lock:
                        self._idle.append(process)
                    return self._rows(answer)
                code = self._kill(process)
                if attempt == 2 or code not in (0, None):  # it died of this query, not of age
                    break
            raise LimitExceeded("the query needs more memory than it may have", hint="ask for less at a time")
        finally:
            self._free.release()

    def _rows(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        if "error" in answer:
            kind = getattr(errors, answer["error"], LayerError)
            raise kind(answer["message"], answer["hint"])
        return as_dicts(answer["names"], answer["kinds"], [tuple(map(unpacked, row)) for row in answer["rows"]])

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self.closed:
                raise Unavailable("the layer is closed")
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                self._all.discard(process)
        process = subprocess.Popen(
            [sys.executable, "-m", "livinglayer.substrate.reader", self.engine.location, str(self.settings.query_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=True, bufsize=0, start_new_session=True,
            env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip
        with self._lock:
            self._all.add(process)
        return process

    def _kill(self, process: subprocess.Popen[bytes]) -> int | None:
        code = process.poll()
        if code is None:
            process.kill()
            process.wait()
        with self._lock:
            self._all.discard(process)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        return code

    def close(self) -> None:
        with self._lock:
            self.closed, processes = True, list(self._all)
            self._idle.clear()
        for process in processes:
            self._kill(process)
