"""Reads: a SELECT over entity names, answered through the views of one branch, moment and principal."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import sqlglot
from sqlglot import exp

from .. import errors
from ..errors import Invalid, LayerError, LimitExceeded, NotFound, TimedOut, Unavailable
from ..settings import Settings
from .catalog import Branch, Catalog, no_branch
from .engine import Engine, Session, Stale
from .narrow import Narrow, canonical, compiled
from .permissions import Policy
from .predicates import Me, Predicate
from .schema import Entity, Schema
from .values import decoder, parameter, text
from .views import Chain, ReadRule, base_sql, governed_sql, history_names, history_sql

SUFFIX = "__history"
LONGEST = 86_400
READERS = 12  # connections kept idle
CROWD = 4  # principals whose reader processes may all be at work at once
MOST = 1 << 60  # rows anybody can mean
logging.getLogger("sqlglot").setLevel(logging.CRITICAL)  # what it thinks of a caller's text is not for our log
NAMED = ("principal", "reason", "execution", "branch")  # of history: who and why, for those who may read tx


Relation = Callable[[str], str]  # the view that stands for a name, made when first asked for
EVERYTHING = ReadRule((((), None),), ())


class Source:
    """The SQL of every name one principal can use, on one branch at one moment, within what it is narrowed to."""

    def __init__(
        self,
        catalog: Catalog,
        session: Session,
        branch: Branch,
        as_of: int | None,
        policy: Policy,
        epoch: int,
        narrow: Narrow | None = None,
    ) -> None:
        self.catalog, self.engine, self.branch, self.policy, self.epoch = catalog, catalog.engine, branch, policy, epoch
        self.as_of = as_of
        self.chain: Chain = catalog.chain(session, branch, as_of)
        self.schema: Schema = catalog.schema(session, self.chain, epoch)
        self.slices = catalog.slices(session, branch)
        self.narrow, self.parts = narrow, compiled(narrow, self.schema)
        self._visible: dict[str, bool] = {}

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

    def governed(self, name: str, relation: Relation, seen: Relation) -> str | None:
        """The SQL a public name stands for; None when this principal, so narrowed, has no such name.

        Grants look at what is there (`relation`). What it is narrowed to looks through its principal's own eyes
        (`seen`): whoever wrote it may not learn from its rows what the principal may not read.
        """
        found = self.entity(name)
        if found is None or (self.parts is not None and found[0].name not in self.parts):
            return None
        part = None if self.parts is None else self.parts[found[0].name]
        columns, fixed, blank = self._columns(*found)
        if part is not None and part.fields is not None:
            columns = [c for c in columns if c in fixed or c in part.fields]
        plain = self._granted(found[0], columns, relation(name), relation, fixed, blank)
        if plain is None or part is None or part.where is None:
            return plain
        rule = self._rule(found[0])
        columns = [c for c in columns if c in fixed or shows(rule, c)]
        return governed_sql(
            self.engine, columns, seen(name), EVERYTHING, seen, [(part.where, self.policy.me)], fixed, blank
        )

    def seen(self, name: str, relation: Relation) -> str | None:
        """The SQL of a name as the principal sees it, not narrowed, null where it may not look; None when it sees all."""
        found = self.entity(name)
        if found is None:
            raise Invalid(f"there is no entity {name!r}")
        if self._unlimited(found[0]):
            return None
        columns, fixed, blank = self._columns(*found)
        rule = self._rule(found[0])
        sql = self._granted(found[0], columns, relation(name), relation, fixed, blank)
        if sql is None:
            return f"select n.* from {relation(name)} n where 1 = 0"
        listed = [
            f"x.{c}" if c in fixed or shows(rule, c) else f"(select n.{c} from {relation(name)} n where 1 = 0) as {c}"
            for c in columns
        ]
        return f"select {', '.join(listed)} from ({sql}) x"

    def _columns(self, entity: Entity, past: bool) -> tuple[list[str], Sequence[str], Sequence[str]]:
        """The columns of a name, those that go with any row, and those that are always null."""
        names = [f.name for f in entity.fields]
        if entity.kind == "ledger":
            return names, (), ()
        if not past:
            return ["id", *names], ("id",), ()
        added = history_names(entity)
        blank = [] if self._tells_who() else [added[n] for n in NAMED]
        return ["id", *names, *added.values()], ("id", *added.values()), blank

    def _tells_who(self) -> bool:
        """Whether history says who and why: for those who may read all of tx, and said so if they are narrowed."""
        part = None if self.parts is None else self.parts.get("tx")
        if self.parts is not None and (part is None or part.fields is not None or part.where is not None):
            return False
        return self.policy.rules("read", self.schema, self.schema.by_name["tx"], self.branch.name).everything

    def _granted(
        self,
        entity: Entity,
        columns: Sequence[str],
        source: str,
        relation: Relation,
        fixed: Sequence[str],
        blank: Sequence[str],
    ) -> str | None:
        """The rows and fields that grants and slices leave."""
        conditions = self.catalog.slice_predicates(self.slices, self.schema, entity)
        rule = self._rule(entity)
        if conditions is None or not any(c in fixed or c in blank or shows(rule, c) for c in columns):
            return None
        nobody: Me = {}
        extra: list[tuple[Predicate, Me]] = [(p, nobody) for p in conditions]
        return governed_sql(self.engine, columns, source, rule, relation, extra, fixed, blank)

    def _rule(self, entity: Entity) -> ReadRule:
        return self.policy.rules("read", self.schema, entity, self.branch.name).read_rule()

    def _unlimited(self, entity: Entity) -> bool:
        return not self.slices and self.policy.rules("read", self.schema, entity, self.branch.name).everything

    def visible(self, name: str) -> bool:
        """Whether there is such a name here."""
        found = self._visible.get(name)
        if found is None:
            found = self.governed(name, str, str) is not None
            if len(self._visible) < 1000:
                self._visible[name] = found
        return found

    def open(self, name: str) -> bool:
        """Whether a name shows every row there is, so that no condition on it can tell what is hidden."""
        found = self.entity(name)
        if found is None or (self.parts is not None and self.parts[found[0].name].where is not None):
            return False
        return self._unlimited(found[0])

    def has_decimals(self, name: str) -> bool:
        found = self.entity(name)
        return found is not None and any(f.type == "decimal" for f in found[0].fields)

    def type_of(self, column: str, entities: Sequence[str]) -> str | None:
        for name in entities:
            found = self.entity(name) if self.visible(name) else None
            if found and column in found[0].by_name:
                return found[0].by_name[column].type
            if found and found[1] and column == history_names(found[0])["at"]:
                return "datetime"
        return None


def shows(rule: ReadRule, column: str) -> bool:
    """Whether a rule shows a column in any row."""
    return any(fields is None or column in fields for _, fields in rule.allows) and not any(
        not where and fields is not None and column in fields for where, fields in rule.denies
    )


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
    Sequence[str], Sequence[tuple[int, str]], Sequence[tuple[Any, ...]], int
]  # names, types of special columns, rows, the last tx that they show


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
    names: Sequence[str], kinds: Sequence[tuple[int, str]], rows: Sequence[tuple[Any, ...]], tx: int = 0
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


# How a statement begins that means to do more than read.
_WRITES = re.compile(
    r"""(?:\s|--[^\n]*\n|/\*.*?\*/|;)*
    (?:alter|analyze|attach|begin|call|checkpoint|close|cluster|comment|commit|copy|create|deallocate|declare|delete|detach
    |discard|do|drop|end|execute|grant|import|insert|listen|load|lock|merge|move|notify|pragma|prepare|reassign|refresh
    |reindex|release|replace|reset|revoke|rollback|savepoint|security|set|start|truncate|unlisten|update|vacuum)\b""",
    re.I | re.S | re.X,
)


def writes(sql: str, error: LayerError) -> bool:
    """Whether a statement was refused because it would have done more than read."""
    return bool(error.details.get("writes")) or _WRITES.match(sql) is not None


class Attention:
    """Whether somebody still waits for an answer. When nobody does, what would give it is ended."""

    def __init__(self) -> None:
        self._lock, self._lost = threading.Lock(), False
        self._end: Callable[[], object] | None = None

    def lose(self) -> None:
        with self._lock:
            self._lost = True
            if self._end is not None:
                self._end()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """While something is at work that `end` ends, called from another thread."""
        with self._lock:
            if self._lost:
                raise TimedOut("whoever asked has gone")
            self._end = end
        try:
            yield
        finally:
            with self._lock:  # an end that has begun ends this, and nothing that comes after it
                self._end = None
        if self._lost:  # what it ended is of no more use, though it was done just before
            raise TimedOut("whoever asked has gone")


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
        narrow: Any = None,
    ) -> list[dict[str, Any]]:
        """Rows of one SELECT as dicts."""
        return self.query_at(sql, params, branch, as_of, principal, timeout, limit, trusted, narrow)[0]

    def query_at(
        self,
        sql: str,
        params: Mapping[str, Any] | Sequence[Any] | None,
        branch: str,
        as_of: int | datetime | None,
        principal: int,
        timeout: float | None = None,
        limit: int | None = None,
        trusted: bool = False,
        narrow: Any = None,
        attention: Attention | None = None,
    ) -> tuple[list[dict[str, Any]], int]:
        """Rows of one SELECT, and the last tx they show: of main and all branches, or the one that `as_of` means.

        With `narrow` only the entities, fields and rows it names are there, and nobody is trusted.
        """
        seconds = self.settings.query_seconds if timeout is None else timeout
        most = self.settings.query_rows if limit is None else limit
        check_request(sql, params, branch, as_of, seconds, most)
        if timeout is not None and timeout > self.settings.longest_seconds and timeout > self.longest(principal):
            raise Invalid(
                f"a query has {self.settings.longest_seconds:g} seconds at most, not {timeout!r:.40}",
                hint="ask for less at a time; an owner's may take longer",
            )
        within, attention = canonical(narrow), attention or Attention()
        if self.processes is not None and (not trusted or within is not None):
            return self.processes.query(sql, params, branch, as_of, principal, within, seconds, most, attention)
        deadline = time.monotonic() + seconds
        answer = self.raw(sql, params, branch, as_of, principal, within, deadline, most, attention)
        return as_dicts(*answer), answer[3]

    def longest(self, principal: int) -> float:
        """Seconds that a query of a principal may name."""
        with self.engine.reading() as session:
            policy = self.catalog.policy(session, principal, clock(self.engine, session)[1])
        return LONGEST if policy.sovereign() else self.settings.longest_seconds

    def raw(
        self,
        sql: str,
        params: Any,
        branch: str,
        as_of: int | datetime | None,
        principal: int,
        narrow: Narrow | None,
        deadline: float,
        most: int,
        attention: Attention | None = None,
    ) -> Answer:
        """The answer of one SELECT, values as the engine gives them."""
        key, attention = (branch, as_of, principal, narrow), attention or Attention()
        for _ in range(20):
            reader, used = self._take(key)
            if used and reader.source.policy.expired():
                reader.close()
                continue
            try:
                with attention.ending(reader.interrupt):
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
        branch, as_of, principal, narrow = key
        with self.engine.reading() as session:
            last, epoch = clock(self.engine, session)
            moment = None if as_of is None else self.catalog.moment(session, as_of, last)
            policy = self.catalog.policy(session, principal, epoch)
            if branch != "main" and not any(
                g.effect == "allow" and g.action in ("read", "*") and g.branch in (None, branch) for g in policy.grants
            ):
                raise no_branch(branch)  # what may not be read is not there
            source = Source(self.catalog, session, self.catalog.branch(session, branch), moment, policy, epoch, narrow)
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
        key = (branch, as_of, principal, None)
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
    coming = select.poll()  # select() knows no number of a file above 1023, which a server with many clients has
    coming.register(fd, select.POLLIN)

    def exactly(count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and (left < 0 or not coming.poll(left * 1000)):
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


@contextmanager
def _within(turns: threading.Semaphore, until: float) -> Iterator[None]:
    if not turns.acquire(timeout=max(0, until - time.monotonic())):
        raise Unavailable("all readers are busy", hint="try again")
    try:
        yield
    finally:
        turns.release()


class Processes:
    """A few reader processes, started when first needed."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._all_turns = threading.Semaphore(settings.readers * CROWD)
        self._own: WeakValueDictionary[int, threading.Semaphore] = WeakValueDictionary()  # of principals that ask now
        self.closed = False

    @contextmanager
    def _turn_of(self, principal: int, seconds: float) -> Iterator[None]:
        """While one of a principal's readers is at work: whoever asks what takes long keeps nobody else waiting."""
        with self._lock:
            own = self._own.get(principal)
            if own is None:
                own = self._own[principal] = threading.Semaphore(self.settings.readers)
        until = time.monotonic() + max(seconds, 0.01)
        with _within(own, until), _within(self._all_turns, until):
            yield

    def query(
        self,
        sql: str,
        params: Any,
        branch: str,
        as_of: int | datetime | None,
        principal: int,
        narrow: Narrow | None,
        seconds: float,
        most: int,
        attention: Attention,
    ) -> tuple[list[dict[str, Any]], int]:
        given = (
            {k: packed(parameter(v)) for k, v in params.items()}
            if isinstance(params, Mapping)
            else [packed(parameter(v)) for v in params or ()]
        )
        moment = as_of.isoformat() if isinstance(as_of, datetime) else as_of
        with self._turn_of(principal, seconds):
            for attempt in (1, 2):
                process = self._start()
                try:
                    assert process.stdin is not None and process.stdout is not None
                    with attention.ending(process.kill):
                        send(process.stdin.fileno(), [sql, given, branch, moment, principal, narrow, seconds, most])
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

    def _rows(self, answer: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
        if "error" in answer:
            kind = getattr(errors, answer["error"], LayerError)
            raise kind(answer["message"], answer["hint"], **answer.get("details", {}))
        rows = as_dicts(answer["names"], answer["kinds"], [tuple(map(unpacked, row)) for row in answer["rows"]])
        return rows, answer["tx"]

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
