"""Ledger: the one write path. A mutation belongs to a tx, a tx to an open execution with a scope; there is no other way.

Everything is checked before it is written: types, constraints, transitions, grants, scope, slice. One writer at a time
holds the layer; writes that are one statement each are committed in groups.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from ..errors import Conflict, Denied, Invalid, LayerError, NotFound, TimedOut, Unavailable
from ..settings import Settings
from .blobs import naming, sent
from .catalog import Branch, Catalog
from .chain import GONE, clock_seal, facts_digest, tx_hash
from .engine import LEDGER, Engine, Session, marks
from .permissions import Policy, Rules
from .predicates import Env, Predicate, compile_predicate
from .schema import MAIN, Entity, Field, Schema, dumps
from .tables import Row, Table
from .values import HASH, INT_MAX, Stored, json_text, recordable, text
from .views import Chain, Level, arm_count, arms, field_sql

MAIN_CHAIN: Chain = (Level(MAIN),)
GUARDED = frozenset(
    {
        "entity",
        "field",
        "branch",
        "permission",
        "principal",
        "membership",
        "conflict",
        "secret",
        "approval",
        "bundle",
        "token",
        "sign_in",
        "volume",
    }
)  # changed by verbs of their own
AUTHORITY = frozenset({"permission", "principal", "membership", "token"})  # who may do what
GOVERNING = frozenset(
    {"entity", "field", "permission", "principal", "membership", "blueprint", "function", "contract", "projection",
     "trigger", "quota"}
)  # a change of these ends an epoch  # fmt: skip
VERBS = {
    "entity": "define",
    "field": "alter",
    "branch": "fork",
    "permission": "grant",
    "principal": "principal",
    "membership": "principal",
    "conflict": "resolve",
    "secret": "call",
    "approval": "call",
    "bundle": "call",
    "token": "call",
    "sign_in": "call",
    "volume": "call",
}


MANY = 200  # changes of a tx that are sent together

_Denial = tuple[Stored, ...]  # columns of ledger_decision after its id
_DENIALS = 1000  # kept until a tx records them
_CALL = tuple(name for name, _ in LEDGER["ledger_call"][0][1:-1])  # without execution and tx
OVER = "select 1 from {}ledger_outcome where execution = ?"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")[:26] + "Z"  # as values.datetime_text writes it


@dataclass(frozen=True)
class Scope:
    """What an execution may write: a branch (None: any) and, by entity, actions, fields and rows (None: everything)."""

    branch: str | None = None
    entities: Mapping[str, Mapping[str, Any]] | None = None

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Scope:
        if given is None:
            return Scope()
        if not isinstance(given, Mapping):
            raise Invalid(f"a scope is a dict with branch and entities, not {given!r}")
        unknown = set(given) - {"branch", "entities"}
        if unknown:
            raise Invalid(f"a scope has branch and entities, not {', '.join(sorted(unknown))}")
        entities = given.get("entities")
        if entities is not None:
            if isinstance(entities, Sequence) and not isinstance(entities, str):
                entities = {name: {} for name in entities}
            if not isinstance(entities, Mapping):
                raise Invalid("the entities of a scope are a dict: entity -> actions, fields, where")
            for name, part in entities.items():
                if not isinstance(part, Mapping) or set(part) - {"actions", "fields", "where"}:
                    raise Invalid(f"the scope of {name!r} has actions, fields and where")
        return Scope(given.get("branch"), entities)

    def text(self) -> str:
        return dumps({"branch": self.branch, "entities": self.entities})


@dataclass(eq=False)
class Execution:
    """One run that may write: who, in which scope. The ledger knows its own; a copy or a forgery opens nothing."""

    principal: int
    scope: Scope
    kind: str
    reason: str | None = None
    parent: int | None = None
    trace: str | None = None
    id: int | None = None  # given with its first tx
    open: bool = True
    tier: str = "process"  # of the box it runs in
    blueprint: str | None = None
    call: Mapping[str, Any] | None = None  # what was asked, as columns of ledger_call
    authority: int | None = None  # whose permissions decide, where these are not the principal's own
    brief: bool = False  # its first tx is its only one, and ends it
    once: tuple[str, str, Any] | None = None  # if brief: the key its tx keeps, a digest of the request, what it gives
    contents: set[str] = field(default_factory=set)  # hashes of contents that it has given: its rows may name them
    _predicates: dict[Any, Any] = field(default_factory=dict)

    @property
    def deciding(self) -> int:
        """Whose permissions decide."""
        return self.principal if self.authority is None else self.authority


@dataclass
class Clock:
    """Where the layer is: the row every writer locks."""

    tx: int
    next_id: int
    epoch: int
    at: str
    hash: bytes


class Work:
    """One transaction of the engine: any number of txs, committed together."""

    _draft = itertools.count()

    def __init__(self, ledger: Ledger, session: Session) -> None:
        self.ledger, self.session = ledger, session
        self.engine, self.catalog, self.settings = ledger.engine, ledger.catalog, ledger.settings
        row = session.clock
        if row is None:
            raise Unavailable("the layer has no clock; it was not made completely", hint="make it anew")
        self.clock = Clock(row[0], row[1], row[2], row[3], bytes(row[4]))
        self.version: Any = self.clock.epoch  # what caches go by: the epoch, or a draft of the next one
        self.tables: dict[Any, Table] = {}
        self.opened: list[Execution] = []
        self.checked: set[int] = set()
        self.acting: Any = None  # the execution of the tx begun last: whom a refusal is recorded of
        self.denials: list[_Denial] = []  # refusals recorded with this work

    def new_id(self) -> int:
        self.clock.next_id += 1
        return self.clock.next_id - 1

    def changed_governing(self, tx: int) -> None:
        self.clock.epoch = tx
        self.version = ("draft", next(self._draft))

    def table(self, entity: Entity) -> Table:
        found = self.tables.get((entity.store, self.version))
        if found is None:
            found = self.tables[entity.store, self.version] = self.catalog.table(
                self.session, entity.store, self.version
            )
        return found

    def tx(self, execution: Execution, branch: str | Branch = "main", **more: Any) -> Tx:
        return Tx(self, execution, branch, **more)

    def admit(self, execution: Execution) -> None:
        """The execution is one this ledger opened, and is not over."""
        self.acting = execution
        if not isinstance(execution, Execution) or execution not in self.ledger.executions or not execution.open:
            raise Denied("a mutation happens inside an open execution", hint="open one with layer.execution(...)")
        if execution.id is not None and execution.id not in self.checked:
            if self.session.one(OVER.format(self.engine.schema_prefix), (execution.id,)):
                execution.open = False
                raise Denied(f"execution {execution.id} is over", hint="open another one")
            self.checked.add(execution.id)

    def undone(self) -> None:
        """Nothing of this was committed: what it had given is taken back."""
        for execution in self.opened:
            execution.id = None
        self.ledger.denials[:0] = self.denials

    def finish(self) -> None:
        c = self.clock
        seal = clock_seal(c.tx, c.next_id, c.epoch, c.at, c.hash)
        at = self.engine.native("datetime", c.at)
        self.session.run(
            f"update {self.engine.schema_prefix}ledger_clock set tx = ?, next_id = ?, epoch = ?, at = ?, hash = ?, seal = ?",
            (c.tx, c.next_id, c.epoch, at, c.hash, seal),
        )


class Tx:
    """One atomic, attributed change of one branch."""

    def __init__(
        self, work: Work, execution: Execution, branch: str | Branch = "main", reason: str | None = None, cause: str | None = None,
        key: str | None = None, seen: Iterable[tuple[str, int, int]] = (), merged_from: int | None = None, deferred: bool = True,
        bare: bool = False,
    ) -> None:  # fmt: skip
        work.admit(execution)
        self.bare = bare  # records facts only, so that no scope or branch is asked for
        self.work, self.session, self.engine, self.execution = work, work.session, work.engine, execution
        self.number = work.clock.tx + 1
        self.reason, self.cause, self.merged_from, self.key = (
            _text("reason", reason),
            _text("cause", cause),
            merged_from,
            _text("key", key),
        )
        self.deferred = deferred  # constraints between rows are looked at when the tx ends
        if branch == "main":
            self.branch, self.name, self.chain, self.slices = MAIN, "main", MAIN_CHAIN, []
        else:
            found = branch if isinstance(branch, Branch) else work.catalog.branch(work.session, branch, open_only=True)
            self.branch, self.name, self.chain, self.slices = (
                found.id,
                found.name,
                work.catalog.chain(work.session, found),
                work.catalog.slices(work.session, found),
            )
        if execution.scope.branch not in (None, self.name) and not bare:
            raise Denied(f"execution is scoped to branch {execution.scope.branch!r}, not {self.name!r}")
        self.policy: Policy = work.catalog.policy(work.session, execution.deciding, work.version)
        self.changes: dict[tuple[int, int], tuple[str, bytes]] = {}
        self.rewritten: dict[tuple[int, int], tuple[Table, list[Stored]]] = {}  # of which the image is not made yet
        self.touched: dict[tuple[str, int], set[str]] = {}  # entity name and id: fields set, for the checks at the end
        self.before: dict[tuple[int, int], Row | None] | None = None  # rows as they were, where somebody looks at them
        self.facts: list[tuple[str, list[Stored]]] = []
        self.named: set[str] = set()  # hashes of contents that its rows may name
        self.searched = 0.0  # seconds it took to find that
        self.result: Any = None
        self._schema: tuple[Any, Schema] | None = None
        self._request: list[Any] = []
        if execution.brief and execution.once is not None and self.kept(execution.once[0]) is not None:
            raise Conflict(
                "a request with this idempotency key was answered meanwhile", hint="ask for its answer again"
            )
        for item in _seen(seen):
            self._unchanged(*item)

    @property
    def schema(self) -> Schema:
        if self._schema is None or self._schema[0] is not self.work.version:
            self._schema = (self.work.version, self.work.catalog.schema(self.session, self.chain, self.work.version))
        return self._schema[1]

    def foretell(self, schema: Schema) -> None:
        """What the schema is after what was just recorded, known without reading all of it again."""
        self._schema = (self.work.version, schema)

    # What people call

    def insert(self, entity: str, values: Mapping[str, Any], loading: bool = False, number: int | None = None) -> int:
        """Add a row and return its id; Invalid, Conflict or Denied when it may not be. One that is `loading` has a past.

        `number` is an id that was reserved for it.
        """
        found = self._writable(entity)
        if not isinstance(values, Mapping):
            raise Invalid(f"a row of {entity!r} is a dict of its fields, not {type(values).__name__}")
        return self.add(found, self._encoded(found, values), number, given=values.keys(), loading=loading)

    def update(
        self, entity: str, number: int, values: Mapping[str, Any], expect: int | None = None, since: int | None = None
    ) -> int:
        """Set fields of a row and return the tx, its new version; NotFound, Conflict when it is not the version `expect`.

        Conflict too when another tx has changed it after the tx `since`.
        """
        found = self._writable(entity)
        if not isinstance(values, Mapping):
            raise Invalid(f"new values of {entity!r} are a dict of fields, not {type(values).__name__}")
        self.change(found, _id(number), self._encoded(found, values, partial=True), expect, since=since)
        return self.number

    def delete(self, entity: str, number: int, expect: int | None = None, since: int | None = None) -> int:
        """Remove a row (its history stays) and what cascades from it; Conflict when something refers to it."""
        found = self._writable(entity)
        self.remove(found, _id(number), expect, since=since)
        return self.number

    def upsert(self, entity: str, values: Mapping[str, Any], on: Sequence[str], number: int | None = None) -> int:
        """Update the row that has these values in the fields `on`, or add one; returns its id.

        `number` is an id that was reserved for a row that is added.
        """
        found = self._writable(entity)
        fields = [found.get(name) for name in ([on] if isinstance(on, str) else on)]
        if not fields or any(values.get(f.name) is None for f in fields):
            raise Invalid(
                f"upsert needs a value for each field of `on`: {', '.join(f.name for f in fields) or 'none given'}",
                hint="they tell which row is meant",
            )
        stored = self._encoded(found, values, partial=True)
        there = self._known(found, fields, [stored[f.name] for f in fields])
        if there is None:
            return self.add(found, self._encoded(found, values), number, given=values.keys())
        self.change(found, there, {k: v for k, v in stored.items() if k not in {f.name for f in fields}}, None)
        return there

    def _known(self, entity: Entity, fields: Sequence[Field], wanted: Sequence[Stored]) -> int | None:
        """The first row with these values of those that may be read in these fields: no other is there to be found."""
        rules: Rules = self.policy.rules("read", self.schema, entity, self.name)
        if rules.everything:
            return self._having(entity, fields, wanted, None)
        table, names = self.work.table(entity), frozenset(f.name for f in fields)
        for number in sorted(self._find(entity, fields, wanted, None, "")):
            row = table.get(self.session, self.chain, number)
            if row is not None and not rules.refusal(names, table.named(entity, row.values, number), self._follow):
                return number
        return None

    # Rows

    def _writable(self, name: str) -> Entity:
        entity = self.schema.get(name)
        if entity.kind == "ledger":
            raise Denied(f"{name!r} is the ledger's own: facts are recorded, not written", resource=name)
        if name in GUARDED:
            raise Denied(
                f"{name!r} is changed by verbs of its own", hint=f"see layer.{VERBS[name]}(...)", resource=name
            )
        return entity

    def _encoded(self, entity: Entity, values: Mapping[str, Any], partial: bool = False) -> dict[str, Stored]:
        """Stored values by field name; defaults filled in for a new row."""
        limit, encoders = self.work.settings.value_bytes, entity.encoders
        found: dict[str, Stored] = {}
        for label, value in values.items():
            known = encoders.get(label)
            if known is None:
                entity.get(label)
                raise AssertionError
            what, encode, content = known
            if content and value is not None:
                value = self._content(value)
            found[label] = None if value is None else encode(what, value, limit)
        if not partial:
            for f in entity.defaults:
                if f.name not in found:
                    found[f.name] = self._default(entity, f)
        for label in entity.required:
            if found.get(label, 0 if partial else None) is None:
                raise Invalid(
                    f"{entity.name}.{label} is required",
                    hint="give it a value" if label in values else "it has no default",
                )
        return found

    def _content(self, value: Any) -> Any:
        """The hash that a file field is given, its content stored; NotFound for one that is not there or its writer may not have."""
        if isinstance(value, bytes | bytearray):
            digest = sha256(value).hexdigest()
            self.engine.put_blob(digest, bytes(value))
            self.named.add(digest)
            return digest
        if isinstance(value, str) and value not in self.named and HASH.fullmatch(value):
            known = self.policy.sovereign() or value in self.execution.contents or self._may_have(value)
            if not (known and self.engine.has_blob(value)):
                raise NotFound(f"there is no content {value!r}", hint="give its bytes; over HTTP, POST /api/blob first")
            self.named.add(value)
        return value

    def _may_have(self, digest: str) -> bool:
        """Whether who acts or decides has sent a content, or may read a row that names it, on this branch or on main."""
        if sent(self.engine, self.session, {self.execution.principal, self.execution.deciding}, digest):
            return True
        began = time.monotonic()
        deadline = began + self.work.settings.query_seconds - self.searched  # all of this tx: others wait meanwhile
        main = self.work.catalog.schema(self.session, MAIN_CHAIN, self.work.version)
        for branch, schema in {self.name: self.schema, "main": main}.items():
            for sql in naming(self.policy.readable(schema, branch)):
                if time.monotonic() > deadline:
                    raise TimedOut("to find the contents that rows name took too long", hint="give their bytes")
                try:
                    if self.engine.inside(self, sql, {"digest": digest}, deadline, 1, branch=branch):
                        self.searched += time.monotonic() - began
                        return True
                except (NotFound, Invalid):  # not a field of this principal's
                    continue
        return False

    def _default(self, entity: Entity, f: Field) -> Stored:
        value = f.initial
        if value == "now()" and f.type in ("date", "datetime"):
            value = now() if f.type == "datetime" else now()[:10]
        return f.encode(entity.name, value, self.work.settings.value_bytes)

    def record(
        self, entity: Entity, stored: Mapping[str, Stored], number: int | None = None, new: int | None = None
    ) -> int:
        """Write a row of the system's own entities, for a verb that has decided it may: add one, or change `number`."""
        table = self.work.table(entity)
        row = None if number is None else table.get(self.session, self.chain, number)
        values: list[Stored] = [None] * len(table.columns) if row is None else list(row.values)
        if number is None:
            number = self.work.new_id() if new is None else new
        elif row is None:
            raise NotFound(f"there is no {entity.name}/{number}")
        places: list[int] = []
        for name, value in stored.items():
            places += table.set(entity.by_name[name], values, value)
        self._constrain(entity, table, number, values, set(stored))
        self._write(entity, table, number, row, values, tuple(sorted(places)))
        return number

    def erase(self, entity: Entity, number: int) -> None:
        """Remove a row of the system's own entities, for a verb that has decided it may."""
        self.remove(entity, number, cascading=True)

    def add(
        self,
        entity: Entity,
        stored: Mapping[str, Stored],
        number: int | None = None,
        merging: bool = False,
        given: Iterable[str] | None = None,
        loading: bool = False,
    ) -> int:
        """Write a new row of stored values by field name; `given` are those the caller set itself (others are defaults)."""
        table = self.work.table(entity)
        values: list[Stored] = [None] * len(table.columns)
        for name, value in stored.items():
            f = entity.by_name[name]
            values[table.index[f.store]] = value
            if (
                f.type == "state"
                and not merging
                and not loading
                and value is not None
                and value != f.options["initial"]
            ):
                raise Invalid(
                    f"{entity.name}.{f.name}: a new row begins as {f.options['initial']!r}, not {value!r}",
                    hint="insert it, then update the state",
                )
        number = self.work.new_id() if number is None else number
        self.overwrite(
            entity, table, number, None, values, (), set(stored), merging, stored.keys() if given is None else given
        )
        return number

    def change(
        self,
        entity: Entity,
        number: int,
        stored: Mapping[str, Stored],
        expect: int | None = None,
        merging: bool = False,
        since: int | None = None,
    ) -> None:
        """Write stored values into a row."""
        table = self.work.table(entity)
        row = self._current(entity, table, number)
        wrong: LayerError | None = self._unexpected(entity, number, row, expect, since)
        values = list(row.values)
        places: list[int] = []
        for name, value in stored.items():
            f = entity.by_name[name]
            if f.type == "state" and not merging:
                before = table.value(f, row.values)
                if before is not None and value != before and value not in f.options["transitions"].get(before, ()):
                    allowed = ", ".join(f.options["transitions"].get(before, ())) or "nothing"
                    wrong = wrong or Invalid(
                        f"{entity.name}.{name} can't go from {before!r} to {value!r}",
                        hint=f"from {before!r} it can go to {allowed}",
                    )
            places += table.set(f, values, value)
        if wrong is not None:  # it speaks of the row: only to whoever may change it
            self._authorize("update", entity, table, number, row, values, frozenset(stored))
            raise wrong
        self.overwrite(entity, table, number, row, values, tuple(sorted(set(places))), set(stored), merging)

    def overwrite(
        self,
        entity: Entity,
        table: Table,
        number: int,
        row: Row | None,
        values: list[Stored],
        places: tuple[int, ...],
        names: set[str],
        merging: bool,
        given: Iterable[str] | None = None,
    ) -> None:
        """Put a whole row in the place of `row` (None: there was none), if everything allows it."""
        if merging:
            self._complete(entity, table, values)
        fields = frozenset(names if given is None else given)
        self._authorize("insert" if row is None else "update", entity, table, number, row, values, fields)
        self._constrain(entity, table, number, values, names)
        self._write(entity, table, number, row, values, places)

    def remove(
        self, entity: Entity, number: int, expect: int | None = None, cascading: bool = False, since: int | None = None
    ) -> None:
        table = self.work.table(entity)
        if cascading and table.get(self.session, self.chain, number) is None:
            return  # another way led here before
        row = self._current(entity, table, number)
        if not cascading:
            self._authorize("delete", entity, table, number, row, row.values, frozenset())
        if (wrong := self._unexpected(entity, number, row, expect, since)) is not None:
            raise wrong
        self._write(entity, table, number, row, None, ())
        for other, f in self.schema.referring.get(entity.name, ()):
            for child in self._all_having(other, f, number):
                if f.on_delete == "cascade":
                    self.remove(other, child, cascading=True)
                elif f.on_delete == "null":
                    self._nullify(other, f, child)
                else:
                    raise Conflict(
                        f"{entity.name}/{number} is referred to by {other.name}/{child}.{f.name}",
                        hint="delete or change that first",
                    )

    def _complete(self, entity: Entity, table: Table, values: Sequence[Stored]) -> None:
        """Nothing required is missing in a row that comes from elsewhere."""
        for name in entity.required:
            if table.value(entity.by_name[name], values) is None:
                raise Invalid(f"{entity.name}.{name} is required and would be empty")

    def _nullify(self, entity: Entity, f: Field, number: int) -> None:
        table = self.work.table(entity)
        row = table.get(self.session, self.chain, number)
        assert row is not None
        values = list(row.values)
        places = table.set(f, values, None)
        if not self._in_slice(entity, table, number, values):
            raise Denied(
                f"{entity.name}/{number} would leave the slice of branch {self.name!r}", hint="change it first"
            )
        self._constrain(entity, table, number, values, {f.name})
        self._write(entity, table, number, row, values, places)

    def _current(self, entity: Entity, table: Table, number: int) -> Row:
        row = table.get(self.session, self.chain, number)
        if self.branch == MAIN and self.engine.reads_ahead:
            self.work.ledger.learn(self, entity, table)
        if row is None or not self._in_slice(entity, table, number, row.values):
            raise self._nowhere(entity, number)
        return row

    def _nowhere(self, entity: Entity, number: int) -> NotFound:
        """The same for a row that is not there and for one that may not be known of."""
        where = "" if self.branch == MAIN else f" on branch {self.name!r}"
        return NotFound(f"there is no {entity.name}/{number}{where}", hint=f"select id from {entity.name} lists them")

    def _unexpected(
        self, entity: Entity, number: int, row: Row, expect: int | None, since: int | None
    ) -> Conflict | None:
        """What is said when a row is not the version somebody counts on."""
        if since is not None and since < row.version != self.number:
            changed = f"{entity.name}/{number} has changed since tx {since}"
        elif expect is not None and row.version != expect:
            changed = f"{entity.name}/{number} is at version {row.version}, not {expect}"
        else:
            return None
        return Conflict(changed, hint="read it again and decide anew")

    def _unchanged(self, entity: str, number: int, tx: int) -> None:
        """What the caller read is still so."""
        found = self.schema.get(entity)
        row = self.work.table(found).get(self.session, self.chain, _id(number))
        if row is None or row.version > tx:
            raise Conflict(f"{entity}/{number} has changed since tx {tx}", hint="read it again and decide anew")

    def _write(
        self,
        entity: Entity,
        table: Table,
        number: int,
        row: Row | None,
        values: list[Stored] | None,
        places: tuple[int, ...],
    ) -> None:
        if self.bare:
            raise Denied("this tx records facts only")
        key = (entity.id, number)
        self.session.forget(table.store, number)
        before = self.changes.get(key)
        if self.before is not None:
            self.before.setdefault(key, row)
        again = row is not None and row.version == self.number
        if values is None and before is not None and before[0] == "i":
            table.forget(self.session, self.branch, number, self.number)
            del self.changes[key]
            self.touched.pop((entity.name, number), None)
            return
        if self.branch != MAIN:
            table.put(self.session, self.branch, number, self.number, values, again)
        elif values is None:
            table.delete(self.session, number, self.number)
        elif row is None:
            table.insert(self.session, number, self.number, values)
        else:
            table.update(self.session, number, self.number, places, values)
        op = "d" if values is None else "i" if row is None or (before is not None and before[0] == "i") else "u"
        self.changes[key] = (op, GONE if values is None else table.image(values))
        if values is None:
            self.touched.pop((entity.name, number), None)
        if entity.name in GOVERNING:
            same = entity.name not in ("entity", "field") and self._schema and self._schema[0] is self.work.version
            self.work.changed_governing(self.number)
            if same and self._schema:
                self.foretell(self._schema[1])  # a policy has changed, what there is has not

    def rewrite(
        self, entity: Entity, rows: Iterable[tuple[int, Row, list[Stored]]], places: tuple[int, ...], names: set[str]
    ) -> int:
        """Write many rows of an entity, for a verb that has decided it may; how many.

        Each is an id, the row as it is and all its new values, of which those at `places` differ.
        """
        if self.bare or entity.name in GOVERNING:
            raise Denied(f"{entity.name!r} is not written like that")
        table, done, rest = self.work.table(entity), 0, iter(rows)
        checked = bool(names) and bool(self.schema.rules(entity) or entity.spanning & names)
        while part := list(itertools.islice(rest, 5000)):
            if checked:
                for number, _, values in part:
                    self._constrain(entity, table, number, values, names)
            whole = [(number, values) for number, _, values in part]
            if self.branch == MAIN:
                table.update_many(self.session, self.number, places, whole)
            else:
                again = {number for number, row, _ in part if row.version == self.number}
                table.put_many(self.session, self.branch, self.number, whole, again)
            for number, values in whole:
                before = self.changes.get((entity.id, number))
                op = "i" if before is not None and before[0] == "i" else "u"
                self.changes[entity.id, number] = (op, GONE)
                self.rewritten[entity.id, number] = (table, values)
            done += len(part)
        return done

    # Authority

    def _authorize(
        self,
        action: str,
        entity: Entity,
        table: Table,
        number: int,
        row: Row | None,
        values: Sequence[Stored],
        fields: frozenset[str],
    ) -> None:
        """Grants, scope and slice allow this change of this row, as it was and as it becomes."""
        if entity.name in AUTHORITY and not self.policy.sovereign():  # a merge: elsewhere verbs of their own decide
            raise Denied(
                f"{self.policy.me['name']} may not {action} rows of {entity.name!r}: they say who may do what",
                hint="an owner merges a branch that changes them",
                action=action,
                resource=entity.name,
            )
        rules: Rules = self.policy.rules(action, self.schema, entity, self.name)
        scope = self.execution.scope.entities
        if rules.everything and scope is None and not self.slices:
            return
        states: list[Mapping[str, Stored]] = []
        if row is not None:
            states.append(table.named(entity, row.values, number))
        if action != "delete":
            states.append(table.named(entity, values, number))
        who = self.policy.me["name"]
        if not rules.everything:
            for place, state in enumerate(states):
                why = rules.refusal(fields, state, self._follow)
                if why is not None:
                    if (
                        row is not None
                        and place == 0
                        and self.policy.rules("read", self.schema, entity, self.name).refusal(
                            frozenset(), state, self._follow
                        )
                    ):
                        raise self._nowhere(entity, number)
                    raise Denied(f"{who} may not {action} {entity.name}{'' if row is None else f'/{number}'}: {why}", hint=f"layer can {who} {action} {entity.name}",
                                 rows=[g.id for g, _ in (*rules.denies, *rules.allows)], action=action, resource=entity.name)  # fmt: skip
        if scope is not None:
            part = scope.get(entity.name)
            if part is None or action not in (part.get("actions") or (action,)):
                raise Denied(
                    f"the execution's scope does not cover {action} of {entity.name!r}",
                    action=action,
                    resource=entity.name,
                )
            outside = fields - set(part["fields"]) if part.get("fields") is not None and action != "delete" else set()
            if outside:
                raise Denied(
                    f"the execution's scope does not cover {entity.name}.{sorted(outside)[0]}",
                    action=action,
                    resource=f"{entity.name}.{sorted(outside)[0]}",
                )
            if part.get("where"):
                predicate = self._scoped(entity, part["where"])
                if any(predicate.test(Env(state, self.policy.me, self._follow)) is not True for state in states):
                    raise Denied(
                        f"{entity.name}/{number} is outside the execution's scope ({part['where']})",
                        action=action,
                        resource=f"{entity.name}/{number}",
                    )
        if self.slices and action != "delete" and not self._in_slice(entity, table, number, values):
            raise Denied(f"{entity.name}/{number} would leave the slice of branch {self.name!r}")

    def _scoped(self, entity: Entity, text: str) -> Predicate:
        key = (entity.id, text, self.work.version)
        found = self.execution._predicates.get(key)
        if found is None:
            self.execution._predicates.clear()
            found = self.execution._predicates[key] = compile_predicate(text, self.schema, entity)
        return found

    def _in_slice(self, entity: Entity, table: Table, number: int, values: Sequence[Stored]) -> bool:
        if not self.slices:
            return True
        predicates = self.work.catalog.slice_predicates(self.slices, self.schema, entity)
        if predicates is None:
            return False
        state = table.named(entity, values, number)
        return all(p.test(Env(state, {}, self._follow)) is True for p in predicates)

    def _follow(self, name: str, number: int) -> Mapping[str, Any] | None:
        entity = self.schema.get(name)
        table = self.work.table(entity)
        row = table.get(self.session, self.chain, number)
        return None if row is None else table.named(entity, row.values, number)

    # Constraints

    def _constrain(self, entity: Entity, table: Table, number: int, values: list[Stored], names: set[str]) -> None:
        rules = [] if entity.system else self.schema.rules(entity)  # the system's own have none
        if rules:
            state = table.named(entity, values, number)
            for f, rule in rules:
                if rule.test(Env(state, {}, self._follow)) is False:
                    raise Invalid(
                        f"{entity.name}.{f.name} breaks its check: {f.rule}",
                        hint="give a row that meets it; layer schema shows the checks",
                    )
        if not entity.spanning & names:
            return
        if self.deferred:
            self.touched.setdefault((entity.name, number), set()).update(names)
        else:
            self._between(entity, table, number, values, names)

    def _between(self, entity: Entity, table: Table, number: int, values: Sequence[Stored], names: set[str]) -> None:
        """Constraints between rows: references lead somewhere, unique values are."""
        for f in entity.references:
            if f.name in names:
                value = table.value(f, values)
                if value is not None and not self._exists(f.target or "", int(value)):
                    raise Invalid(
                        f"{entity.name}.{f.name}: there is no {f.target}/{value}",
                        hint=f"insert the {f.target} first, or in the same transaction",
                    )
        for fields in entity.unique_sets:
            if any(f.name in names for f in fields):
                wanted = [table.value(f, values) for f in fields]
                if None not in wanted and (other := self._having(entity, fields, wanted, number)) is not None:
                    shown = ", ".join(f"{f.name} {v!r}" for f, v in zip(fields, wanted, strict=True))
                    raise Conflict(
                        f"{entity.name} with {shown} is there already: {entity.name}/{other}",
                        hint="update that one, or upsert",
                    )

    def _exists(self, name: str, number: int) -> bool:
        entity = self.schema.by_name.get(name)
        if entity is None:
            return False
        table = self.work.table(entity)
        row = table.get(self.session, self.chain, number)
        return row is not None and self._in_slice(entity, table, number, row.values)

    def _having(
        self, entity: Entity, fields: Sequence[Field], wanted: Sequence[Stored], other_than: int | None
    ) -> int | None:
        found = self._find(entity, fields, wanted, other_than, " limit 1")
        return found[0] if found else None

    def _all_having(self, entity: Entity, f: Field, number: int) -> list[int]:
        return self._find(entity, [f], [number], None, "")

    def _find(
        self, entity: Entity, fields: Sequence[Field], wanted: Sequence[Stored], other_than: int | None, tail: str
    ) -> list[int]:
        """The ids of rows with these values, as this tx sees them."""
        where = "".join(f" and {self._equal(f)}" for f in fields) + ("" if other_than is None else " and x.id <> ?")
        params = [self.engine.native(f.type, v) for f, v in zip(fields, wanted, strict=True)] + (
            [] if other_than is None else [other_than]
        )
        sql = arms(self.engine, entity.store, self.chain, [], where=where) + ("" if self.slices else tail)
        found = [row[0] for row in self.session.all(sql, params * arm_count(self.chain))]
        if not self.slices:
            return found
        table = self.work.table(entity)  # what lies outside the slice is not there
        return [
            i
            for i in found
            if (row := table.get(self.session, self.chain, i)) is not None
            and self._in_slice(entity, table, i, row.values)
        ]

    def _equal(self, f: Field) -> str:
        column = field_sql(self.engine, f, lambda expression, kind: expression)
        return f"{column} {self.engine.collate(f.type)}= ?"

    # The end

    def fact(self, table: str, *values: Stored) -> None:
        """Record a ledger row with this tx (its tx column comes last)."""
        columns = LEDGER[table][0]
        row = [*values, self.number] if table != "ledger_prune" else list(values)
        stored = {"bool": int, "float": float}  # a hash sees what the engine gives back
        row = [
            stored[kind](v) if kind in stored and v is not None else v
            for (_, kind), v in zip(columns, row, strict=True)
        ]
        native = [self.engine.native(kind, v) for (_, kind), v in zip(columns, row, strict=True)]
        self.session.run(f"insert into {self.engine.schema_prefix}{table} values ({marks(len(row))})", native)
        self.facts.append((table, row))

    def facts_of(self, table: str, rows: Sequence[Sequence[Stored]]) -> None:
        """Record several rows of one ledger table."""
        kinds = [kind for _, kind in LEDGER[table][0]]
        whole = [[*values, self.number] for values in rows]
        native = [[self.engine.native(k, v) for k, v in zip(kinds, row, strict=True)] for row in whole]
        self.session.many(f"insert into {self.engine.schema_prefix}{table} values ({marks(len(kinds))})", native)
        self.facts += [(table, row) for row in whole]

    def recall(self, request: Any) -> bool:
        """With an idempotency key: whether this request was done before (then `result` is what it gave)."""
        if self.key is None:
            return False
        digest = sha256(repr(request).encode()).hexdigest()
        row = self.kept(self.key)
        if row is None:
            self._request = [digest]
            return False
        if row[0] != digest:
            raise Conflict(f"idempotency key {self.key!r} was used for another request", hint="use a new key")
        self.result, self.number = json.loads(row[1]), row[2]
        return True

    def kept(self, key: str) -> Any:
        return self.session.one(
            f"select digest, result, tx from {self.engine.schema_prefix}ledger_key where principal = ? and key = ?",
            (self.execution.principal, key),
        )

    def check(self) -> None:
        """Look at what spans rows: references and unique values of everything this tx touched."""
        for (name, number), names in self.touched.items():
            entity = self.schema.by_name.get(name)
            if entity is None:
                continue
            table = self.work.table(entity)
            row = table.get(self.session, self.chain, number)
            if row is not None:
                self._between(entity, table, number, row.values, names)

    def intend(self, execution: Execution) -> int:
        """Record that an execution is going to happen, this tx's own or another; its id."""
        work, at = self.work, max(now(), self.work.clock.at)
        number = execution.id = work.new_id()
        work.opened.append(execution)
        box = f"b{number}"
        said = (execution.kind, execution.scope.text(), execution.reason, execution.trace, at)
        self.fact("ledger_box", box, execution.tier, execution.principal, execution.blueprint, at)
        self.fact("ledger_execution", number, execution.principal, execution.parent, box, *said)
        if execution.call is not None:
            self.fact("ledger_call", number, *[execution.call.get(name) for name in _CALL])
        return number

    def finish(self, result: Any = None, end: str | None = None, outcome: Any = None, said: str | None = None) -> int:
        """Check what spans rows, then record the tx; returns its number.

        `end` is how its execution ends with it, `outcome` what came of it (`said`: that, as JSON).
        """
        self.check()
        self.result = result
        work, execution, clock = self.work, self.execution, self.work.clock
        at = max(now(), clock.at)
        if execution.id is None:
            self.intend(execution)
        end = "done" if execution.brief and end is None else end
        if end is not None:
            said = json_text("result", outcome) if said is None and outcome is not None else said
            self.fact("ledger_outcome", execution.id, end, at, said)
        for denial in work.ledger.take_denials():
            work.denials.append(denial)
            self.fact("ledger_decision", work.new_id(), *denial)
        if self.key is not None and self._request:
            self.fact("ledger_key", execution.principal, self.key, self._request[0], json_text("result", result))
        if execution.brief and execution.once is not None:
            named, asked, gives = execution.once
            self.fact(
                "ledger_key", execution.principal, named, asked, json_text("result", result if gives is None else gives)
            )
        own = (
            self.number,
            self.branch,
            at,
            execution.principal,
            execution.id,
            self.cause,
            self.reason,
            self.merged_from,
        )
        for key, (table, values) in self.rewritten.items():
            self.changes[key] = (self.changes[key][0], table.image(values))
        changes = sorted((e, i, op, img) for (e, i), (op, img) in self.changes.items())
        digest = tx_hash(clock.hash, own, changes, facts_digest(self.facts))
        prefix, native = self.engine.schema_prefix, self.engine.native("datetime", at)
        self.session.run(
            f"insert into {prefix}ledger_tx values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (self.number, self.branch, native, *own[3:], digest),
        )
        rows = [(self.branch, self.number, e, i, op, img) for e, i, op, img in changes]
        sql = f"insert into {prefix}ledger_change values (?, ?, ?, ?, ?, ?)"
        if len(rows) == 1:
            self.session.run(sql, rows[0])
        elif len(rows) > MANY:
            columns = [(name, self.engine.column(kind)) for name, kind in LEDGER["ledger_change"][0]]
            self.session.fill(f"{prefix}ledger_change", columns, rows)
        elif rows:
            self.session.many(sql, rows)
        clock.tx, clock.at, clock.hash = self.number, at, digest
        return self.number

    @property
    def dirty(self) -> bool:
        return bool(self.changes or self.facts or self.merged_from)


def _seen(given: Any) -> list[tuple[str, int, int]]:
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        items = list(given)
        if all(isinstance(item, tuple | list) and len(item) == 3 and isinstance(item[2], int) for item in items):
            return [tuple(item) for item in items]
    raise Invalid("seen is a list of (entity, id, tx): what was read, and when")


def _fits(number: Any) -> bool:
    return type(number) is int and 0 <= number <= INT_MAX


def _id(number: Any) -> int:
    if not _fits(number):
        raise Invalid(
            f"an id is an int of 64 bits, not {number!r}", hint="insert returns it; select id from the entity"
        )
    return number


def _text(what: str, value: Any) -> str | None:
    return None if value is None else text(what, value, 100_000)


def _said(status: str, result: Any) -> str:
    """What came of an execution as it is kept. What can't be is no result; an error is told without it."""
    try:
        return json_text("result", result)
    except LayerError:
        if status == "done":
            raise
    return json_text("result", recordable(result))


@dataclass
class _Request:
    """One write waiting for the next group."""

    act: Callable[[Work], Any]
    ahead: tuple[str, tuple[Any, ...]] | None  # a row it will read first
    ready: threading.Lock
    done: bool = False
    result: Any = None
    error: BaseException | None = None


class Ledger:
    """Hands the layer to one writer at a time and commits small writes in groups."""

    def __init__(self, engine: Engine, catalog: Catalog, settings: Settings) -> None:
        self.engine, self.catalog, self.settings = engine, catalog, settings
        self.executions: set[Execution] = set()
        # Of the last write of main: what swift ones go by.
        self.known: tuple[Work, dict[int, Policy], Schema] | None = None
        self.reads: dict[str, str] = {}  # the statement that reads a row of main, by entity
        self.denials: list[_Denial] = []  # refused and not recorded yet: the next tx does
        self._unrecorded = 0  # refusals beyond those kept
        self.runner: Any = None  # this process as one that runs executions, once it has
        self._reserved = range(0)
        self._writing = threading.Lock()
        self._mutex = threading.Lock()
        self._queue: list[_Request] = []
        self._leading = False

    def open(
        self,
        principal: int,
        scope: Mapping[str, Any] | None = None,
        kind: str = "direct",
        reason: str | None = None,
        parent: int | None = None,
        trace: str | None = None,
    ) -> Execution:
        """Open an execution; its row is written with its first tx, or when it is intended."""
        execution = Execution(principal, Scope.of(scope), kind, reason, parent, trace)
        self.executions.add(execution)
        return execution

    def end(self, execution: Execution, status: str = "done") -> None:
        """Close an execution; nothing can be written in it any more."""
        if execution not in self.executions or not execution.open:
            return
        try:
            if execution.id is not None:
                with self.work() as work:
                    tx = work.tx(execution, reason=f"end of execution {execution.id}")
                    tx.finish(end=status)
        finally:
            execution.open = False
            self.executions.discard(execution)

    # Intent, act, outcome

    def intend(self, execution: Execution, also: Callable[[Tx], Any] | None = None) -> int:
        """Commit that an execution is going to happen, before it does; its id. `also` may record more with it."""

        def run(work: Work) -> int:
            tx = Tx(work, execution, reason=execution.reason, bare=True)
            if also is not None:
                also(tx)
            tx.finish()
            assert execution.id is not None
            return execution.id

        return int(self.submit(run))

    def resume(self, number: int) -> Execution:
        """An execution that was intended and is not over, to be run here and now; Conflict when it is over."""
        at = self.engine.schema_prefix
        with self.engine.reading() as session:
            shown = [self.engine.portable(f"c.{name}", kind) for name, kind in LEDGER["ledger_call"][0][1:-1]]
            row = session.one(
                f"select x.principal, x.parent, x.kind, {self.engine.portable('x.scope', 'json')}, x.reason, x.trace, b.tier, b.blueprint,"
                f" {', '.join(shown)} from {at}ledger_execution x join {at}ledger_call c on c.execution = x.id"
                f" left join {at}ledger_box b on b.id = x.box where x.id = ?",
                (number,),
            )
            over = session.one(OVER.format(at), (number,))
        if row is None:
            raise NotFound(f"there is no execution {number}")
        if over:
            raise Conflict(f"execution {number} is over")
        principal, parent, kind, scope, reason, trace, tier, blueprint = row[:8]
        execution = Execution(
            principal,
            Scope.of(json.loads(scope)),
            kind,
            reason,
            parent,
            trace,
            number,
            True,
            tier or "process",
            blueprint,
        )
        execution.call = dict(zip(_CALL, row[8:], strict=True))
        self.executions.add(execution)
        return execution

    def conclude(
        self,
        execution: Execution,
        status: str,
        result: Any = None,
        *,
        writes: Callable[[Tx], Any] | None = None,
        branch: str = "main",
        reason: str | None = None,
        facts: Sequence[tuple[str, tuple[Stored, ...]]] = (),
        also: Callable[[Tx], Any] | None = None,
    ) -> int:
        """End an execution with all it wrote and what came of it, in one tx; its number.

        When `writes` is refused nothing is written and the execution stays open. `facts` are rows of ledger tables.
        """
        said = None if result is None else _said(status, result)  # refused before anything is written

        def run(work: Work) -> int:
            tx = Tx(work, execution, branch, reason, bare=writes is None)
            if writes is not None:
                with _Savepoint(work):
                    writes(tx)
                    tx.check()
                    tx.touched.clear()
            for table, group in itertools.groupby(facts, key=lambda each: each[0]):
                tx.facts_of(table, [values for _, values in group])
            if also is not None:
                also(tx)
            return tx.finish(end=status, said=said)

        number = int(self.submit(run))
        execution.open = False
        self.executions.discard(execution)
        return number

    def write(
        self, execution: Execution, branch: str, act: Callable[[Tx], Any], reason: str | None = None, key: str | None = None
    ) -> Any:  # fmt: skip
        """Changes as one tx: all or nothing, sharing a commit with others. What `act` gives, or gave with this `key`."""

        def run(work: Work) -> Any:
            tx = Tx(work, execution, branch, reason, key=key)
            if tx.recall(key):
                return tx.result
            with _Savepoint(work):
                result = act(tx)
                tx.check()
                tx.touched.clear()
            tx.finish(result)
            return result

        return self.submit(run)

    def note(self, execution: Execution, facts: Sequence[tuple[str, tuple[Stored, ...]]]) -> int:
        """Record facts of an execution that goes on."""

        def run(work: Work) -> int:
            tx = Tx(work, execution, bare=True)
            for table, group in itertools.groupby(facts, key=lambda each: each[0]):
                tx.facts_of(table, [values for _, values in group])
            return tx.finish()

        return int(self.submit(run))

    def let_go(self, execution: Execution) -> None:
        """This process is done with an execution that has ended elsewhere, or will."""
        execution.open = False
        self.executions.discard(execution)

    def rehearse(self, execution: Execution, branch: str, act: Callable[[Tx], Any]) -> Any:
        """What `act` would give, or the error it would meet; nothing is kept."""
        if not self._writing.acquire(timeout=self.settings.busy_seconds):
            raise Unavailable("another transaction holds the layer", hint="try again")
        try:
            session = self.engine.begin()
            work: Work | None = None
            try:
                with self.engine.translating():
                    work = Work(self, session)
                    tx = Tx(work, execution, branch)
                    result = act(tx)
                    tx.check()
                    return result
            except Denied as error:
                self.denied(execution, error)
                raise
            finally:
                self.engine.rollback()
                if work is not None:
                    work.undone()
        finally:
            self._writing.release()

    def reserve(self, count: int = 1) -> range:
        """Ids that nobody else will get."""
        with self._mutex:
            held, self._reserved = self._reserved, range(0)
        if len(held) < count:
            with self.work() as work:
                held = range(work.clock.next_id, work.clock.next_id + max(256, count))
                work.clock.next_id = held.stop
        with self._mutex:
            if len(held) - count > len(self._reserved):
                self._reserved = held[count:]
        return held[:count]

    # Refusals

    def denied(self, execution: Any, error: Denied, action: str = "write", resource: str = "") -> None:
        """Keep a refusal: the next tx of this ledger records it, once however often it is told on its way up."""
        if error.recorded:
            return
        error.recorded = True
        genuine = isinstance(execution, Execution) and (execution in self.executions or execution.id is not None)
        details = error.details
        denial: _Denial = (
            execution.principal if genuine else None,
            recordable(str(details.get("action") or action)[:1000]),
            recordable(str(details.get("resource") or resource)[:1000]),
            False,
            json_text("rows", recordable(list(details.get("rows") or ()))),  # type: ignore[call-overload]
            recordable(error.message[:2000]),
            execution.id if genuine else None,
            now(),
        )
        with self._mutex:
            if len(self.denials) < _DENIALS:
                self.denials.append(denial)
            else:
                self._unrecorded += 1

    def take_denials(self) -> list[_Denial]:
        if not self.denials:
            return []
        with self._mutex:
            found, self.denials = self.denials, []
            if self._unrecorded:
                found.append(
                    (None, "write", "", False, "[]", f"{self._unrecorded} more refusals", None, now())
                )  # a flood is counted, not kept
                self._unrecorded = 0
        return found

    def flush(self, execution: Execution) -> None:
        """Record refusals that no tx has taken along yet."""
        if self.denials:
            self.note(execution, ())

    def work(self, timeout: float | None = None) -> _Exclusive:
        """The layer for one writer, until the block ends: committed, or rolled back by an exception."""
        return _Exclusive(self, timeout)

    def learn(self, tx: Tx, entity: Entity, table: Table) -> None:
        """Keep what the next write of this entity on main can go by."""
        self.reads[entity.name] = table._sql["get", MAIN_CHAIN]
        if type(tx.work.version) is int:
            same_epoch = self.known is not None and self.known[0].version == tx.work.version
            policies = self.known[1] if same_epoch and self.known is not None else {}
            self.known = (
                tx.work,
                {**policies, tx.policy.principal: tx.policy},
                tx.schema,
            )  # who decides may be another than who acts

    def ahead(self, entity: str, number: Any) -> tuple[str, tuple[Any, ...]] | None:
        """How main's row of an entity was last read: what the next write of one can ask for with its begin."""
        sql = self.reads.get(entity)
        return (sql, (number,)) if sql is not None and _fits(number) else None

    def swift(
        self, execution: Execution, entity: str, number: Any, values: Any, expect: int | None, cause: Any, reason: Any
    ) -> int | None:
        """Update one row of main with one statement where the engine can and nothing but its values is to be looked at.

        None: it can't be done like that; nothing has happened.
        """
        alone = self.engine.reads_ahead and not self._leading and _fits(number) and isinstance(values, Mapping)
        if not alone or self.known is None or execution not in self.executions or not execution.open:
            return None
        work, policies, schema = self.known
        found, policy = schema.by_name.get(entity), policies.get(execution.principal)
        if found is None or policy is None or not self._plain(execution, policy, schema, found, values):
            return None
        table = work.tables.get((found.store, work.version))
        if table is None:
            return None
        limit = self.settings.value_bytes
        stored = {
            found.by_name[name].store: None if v is None else found.encoders[name][1](found.encoders[name][0], v, limit)
            for name, v in values.items()
        }
        changed = sorted((found.by_name[name].store, found.by_name[name].type) for name in values)
        said = (_text("cause", cause), _text("reason", reason))
        run = self.engine.swift(work.clock.epoch, table, changed)
        if run is None or not self._writing.acquire(blocking=False):
            return None
        try:
            given = [self.engine.native(kind, stored[column]) for column, kind in changed]
            return (
                run(work.clock.epoch, found.id, execution.id, execution.principal, now(), *said, number, expect, *given)
                or None
            )
        finally:
            self._writing.release()

    def _plain(
        self, execution: Execution, policy: Policy, schema: Schema, entity: Entity, values: Mapping[str, Any]
    ) -> bool:
        """Whether an update is decided by its values alone: no condition, check, state, other row or content is involved."""
        if (
            execution.id is None
            or execution.brief
            or execution.authority is not None
            or execution.scope != Scope()
            or policy.expired()
            or entity.system
            or schema.rules(entity)
        ):
            return False
        fields = [entity.by_name.get(name) for name in values]
        if not fields or any(
            f is None or f.type in ("state", "file") or f.was or (f.required and values[f.name] is None) for f in fields
        ):
            return False
        return not entity.spanning & values.keys() and policy.rules("update", schema, entity, "main").everything

    def submit(self, act: Callable[[Work], Any], ahead: tuple[str, tuple[Any, ...]] | None = None) -> Any:
        """Run one small write; writes that arrive meanwhile share the next commit."""
        ready = threading.Lock()
        ready.acquire()
        request = _Request(act, ahead, ready)
        with self._mutex:
            self._queue.append(request)
            lead = not self._leading
            self._leading = True
        if not lead:
            ready.acquire()
        if not request.done:
            self._lead(request)
        if request.error is not None:
            raise request.error
        return request.result

    def _lead(self, own: _Request) -> None:
        batch: list[_Request] = []
        try:
            if not self._writing.acquire(timeout=self.settings.busy_seconds):
                with self._mutex:
                    batch, self._queue = self._queue, []
                error = Unavailable("another transaction holds the layer", hint="try again")
                for request in batch:
                    request.error = error
                return
            try:
                with self._mutex:
                    batch, self._queue = self._queue, []
                self._group(batch)
            finally:
                self._writing.release()
        finally:
            with self._mutex:
                following = self._queue[0] if self._queue else None
                self._leading = following is not None
            for request in batch:
                request.done = True
                if request is not own:
                    request.ready.release()
            if following is not None:
                following.ready.release()

    def _group(self, batch: list[_Request]) -> None:
        """Run all of a batch in one commit; when one of them makes the engine fail, each on its own."""
        try:
            self._together(batch)
        except _Spoiled as spoiled:
            if len(batch) == 1:
                batch[0].error = spoiled.__cause__
            else:
                for request in batch:
                    self._group([request])
        except BaseException as error:  # nothing could begin, or whether it was committed is not known
            for request in batch:
                request.error = error

    def _together(self, batch: list[_Request]) -> None:
        session = self.engine.begin([r.ahead for r in batch if r.ahead is not None])
        work: Work | None = None
        try:
            try:
                with self.engine.translating():
                    work = Work(self, session)
                    for request in batch:
                        try:
                            request.result, request.error = request.act(work), None
                        except LayerError as error:  # it was refused before it wrote anything
                            request.error = error
                            if isinstance(error, Denied):
                                self.denied(work.acting, error)
                    work.finish()
            except BaseException as error:
                raise _Spoiled from error
            self.engine.commit(session)
        except BaseException:
            self.engine.rollback()
            if work is not None:
                work.undone()
            raise


class _Savepoint:
    """Part of a work that is undone alone when it is refused."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __enter__(self) -> None:
        self.kept = (replace(self.work.clock), self.work.version)
        self.work.session.run("savepoint part")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None and not isinstance(error, LayerError):
            return  # the engine failed: the whole transaction is undone
        if error is not None:
            self.work.session.run("rollback to savepoint part")
            self.work.clock, self.work.version = self.kept
        self.work.session.run("release savepoint part")


class _Spoiled(Exception):
    """A write of a group made the engine fail before anything was committed."""


class _Exclusive:
    """The layer, held by one writer for a `with` block."""

    def __init__(self, ledger: Ledger, timeout: float | None) -> None:
        self.ledger, self.timeout = ledger, timeout

    def __enter__(self) -> Work:
        ledger = self.ledger
        if not ledger._writing.acquire(timeout=ledger.settings.busy_seconds):
            raise Unavailable("another transaction holds the layer", hint="try again; a long transaction may be open")
        try:
            session = ledger.engine.begin()
            try:
                with ledger.engine.translating():
                    self.work = Work(ledger, session)
            except BaseException:
                ledger.engine.rollback()
                raise
        except BaseException:
            ledger._writing.release()
            raise
        self.deadline = None if self.timeout is None else time.monotonic() + self.timeout
        return self.work

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        ledger = self.ledger
        try:
            if error is not None:
                raise error
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise TimedOut(f"the transaction was open longer than {self.timeout} s; nothing was written")
            with ledger.engine.translating():
                self.work.finish()
            ledger.engine.commit(self.work.session)
        except BaseException:
            ledger.engine.rollback()
            self.work.undone()
            if isinstance(error, Denied):
                ledger.denied(self.work.acting, error)
            with ledger.engine.translating():
                raise
        finally:
            ledger._writing.release()
