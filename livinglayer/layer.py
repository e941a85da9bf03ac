"""The handle people hold: one layer, with verbs that change it and SQL that reads it."""

from __future__ import annotations

import builtins
import copy
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from .errors import Denied, Invalid, LayerError, NotFound, TimedOut, Unauthenticated
from .settings import Settings, config_directory
from .substrate import authority, branches, evolve, exchange, genesis
from .substrate.backup import backup as make_backup
from .substrate.backup import restore as load_backup
from .substrate.blobs import naming
from .substrate.branches import Merge
from .substrate.catalog import Catalog
from .substrate.engine import Engine
from .substrate.ledger import MAIN_CHAIN, Execution, Ledger, Tx, Work
from .substrate.migrate import migrate
from .substrate.permissions import Decision
from .substrate.prune import prune as prune_history
from .substrate.reads import LONGEST, Attention, Reads, clock, writes
from .substrate.schema import FORMAT, OWNER, SYSTEM, Schema
from .substrate.sqlite import SqliteEngine
from .substrate.values import HASH
from .substrate.verify import Report, verify

Moment = int | datetime | None
Seen = Iterable[tuple[str, int, int]]


def engine_for(location: str | os.PathLike[str], settings: Settings) -> Engine:
    """The engine of a directory or a PostgreSQL URL."""
    text = os.fspath(location)
    if text.startswith(("postgresql://", "postgres://")):
        from .substrate.postgres import PostgresEngine

        return PostgresEngine(text, settings)
    if "://" in text:
        raise Invalid(
            f"{text.split('://')[0]!r} is no kind of database a layer lives in", hint="a directory, or postgresql://…"
        )
    path = Path(text)
    return SqliteEngine(path if path.name == ".layer" else path / ".layer", settings)


def open(location: str | os.PathLike[str], create: bool = False, token: str | None = None, **settings: Any) -> Layer:
    """Open the layer in a directory or at a PostgreSQL URL, as the principal whose token is given or found."""
    try:
        chosen = Settings(**settings)
    except TypeError as error:
        raise Invalid(f"there is no such setting: {error}") from None
    return Layer(engine_for(location, chosen), chosen, create, token)


def restore(source: str | os.PathLike[str], location: str | os.PathLike[str]) -> Layer:
    """Make a layer from a backup, on either engine; refuses to overwrite one."""
    settings = Settings()
    # Whoever restores holds a token of the layer; the backup stays as it is.
    kept = Layer(engine_for(source, settings), settings, False, None, migrating=False)
    token = os.environ.get("LAYER_TOKEN") or _stored_token(kept.id)
    kept.close()
    target = engine_for(location, settings)
    load_backup(engine_for(source, settings), target)
    target.close()
    return open(location, token=token)


def _token_path(layer_id: str) -> Path:
    return config_directory() / "tokens" / layer_id


def _stored_token(layer_id: str) -> str | None:
    try:
        return _token_path(layer_id).read_text().strip() or None
    except OSError:
        return None


def _keep_token(layer_id: str, token: str) -> None:
    path = _token_path(layer_id)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with builtins.open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token + "\n")


class Writes:
    """The verbs of a writer: a layer's own, or those of a narrower execution."""

    ledger: Ledger

    def execution_by(self, principal: str | None) -> Execution:
        raise NotImplementedError

    def insert(
        self, entity: str, values: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, branch: str = "main", reason: str | None = None,
        cause: str | None = None, key: str | None = None, principal: str | None = None, seen: Seen = (),
    ) -> Any:  # fmt: skip
        """Add a row and return its id; a list of rows is one tx and gives a list of ids."""
        if isinstance(values, Mapping):
            return self._single(
                principal,
                branch,
                reason,
                cause,
                key,
                seen,
                ("insert", entity, dict(values)),
                lambda tx: tx.insert(entity, values),
            )
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise Invalid(f"rows of {entity!r} are a dict or a list of dicts, not {type(values).__name__}")
        return self._whole(
            principal,
            branch,
            reason,
            cause,
            key,
            seen,
            ("insert", entity, list(values)),
            lambda tx: [tx.insert(entity, row) for row in values],
        )

    def update(
        self, entity: str, id: int, values: Mapping[str, Any], *, expect: int | None = None, branch: str = "main", reason: str | None = None,
        cause: str | None = None, key: str | None = None, principal: str | None = None, seen: Seen = (),
    ) -> int:  # fmt: skip
        """Set fields of a row and return the tx, which is the row's new version."""
        request = ("update", entity, id, dict(values) if isinstance(values, Mapping) else values, expect)
        if branch == "main" and key is None and seen == ():
            number = self.ledger.swift(self.execution_by(principal), entity, id, values, expect, cause, reason)
            if number is not None:
                return number
        ahead = self.ledger.ahead(entity, id) if branch == "main" else None
        return int(
            self._single(
                principal,
                branch,
                reason,
                cause,
                key,
                seen,
                request,
                lambda tx: tx.update(entity, id, values, expect),
                ahead,
            )
        )

    def delete(
        self, entity: str, id: int, *, expect: int | None = None, branch: str = "main", reason: str | None = None, cause: str | None = None,
        key: str | None = None, principal: str | None = None, seen: Seen = (),
    ) -> int:  # fmt: skip
        """Remove a row, and what cascades from it; its history stays. Returns the tx."""
        return int(
            self._whole(
                principal,
                branch,
                reason,
                cause,
                key,
                seen,
                ("delete", entity, id, expect),
                lambda tx: tx.delete(entity, id, expect),
            )
        )

    def upsert(
        self, entity: str, values: Mapping[str, Any], *, on: Sequence[str], branch: str = "main", reason: str | None = None, cause: str | None = None,
        key: str | None = None, principal: str | None = None, seen: Seen = (),
    ) -> int:  # fmt: skip
        """Update the row with these values in the fields `on`, or add one; returns its id."""
        if not isinstance(values, Mapping) or isinstance(on, bytes) or not isinstance(on, Sequence):
            raise Invalid("upsert takes a dict of fields, and in `on` the names of those that tell rows apart")
        return int(
            self._whole(
                principal,
                branch,
                reason,
                cause,
                key,
                seen,
                ("upsert", entity, dict(values), list(on)),
                lambda tx: tx.upsert(entity, values, on),
            )
        )

    def _single(
        self,
        principal: str | None,
        branch: str,
        reason: Any,
        cause: Any,
        key: Any,
        seen: Seen,
        request: Any,
        act: Any,
        ahead: Any = None,
    ) -> Any:
        """One row, checked before it is written, so that it can share a commit with others."""
        execution = self.execution_by(principal)

        def run(work: Work) -> Any:
            tx = Tx(work, execution, branch, reason, cause, key, seen, deferred=False)
            if key is not None and tx.recall(request):
                return tx.result
            result = act(tx)
            tx.finish(result)
            return result

        return self.ledger.submit(run, ahead)

    def _whole(
        self, principal: str | None, branch: str, reason: Any, cause: Any, key: Any, seen: Seen, request: Any, act: Any
    ) -> Any:
        """Several rows: a commit of their own, rolled back whole."""
        execution = self.execution_by(principal)
        with self.ledger.work() as work:
            tx = Tx(work, execution, branch, reason, cause, key, seen)
            if tx.recall(request):
                return tx.result
            result = act(tx)
            tx.finish(result)
            return result

    @contextmanager
    def transaction(
        self,
        reason: str | None = None,
        branch: str = "main",
        principal: str | None = None,
        *,
        cause: str | None = None,
        seen: Seen = (),
        timeout: float = 60.0,
    ) -> Iterator[Transaction]:
        """Many changes as one tx: all or nothing. Others wait to write meanwhile; reads inside see its own writes."""
        execution = self.execution_by(principal)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST:
            raise Invalid(f"timeout is a number of seconds up to {LONGEST}, not {timeout!r}")
        with self.ledger.work(timeout) as work:
            held = Transaction(self, Tx(work, execution, branch, reason, cause, None, seen), time.monotonic() + timeout)
            try:
                with self.ledger.engine.translating():
                    yield held
                    if held.tx.dirty:
                        held.number = held.tx.finish()
            finally:
                held.close()


class Transaction:
    """An open tx: the verbs of a row, and reads that see them."""

    def __init__(self, writes: Writes, tx: Tx, deadline: float) -> None:
        self.tx, self.number, self._writes, self._deadline = tx, 0, writes, deadline
        self._thread, self._open = threading.get_ident(), True

    def _check(self) -> Tx:
        if not self._open:
            raise Denied("the transaction is over", hint="open another one")
        if threading.get_ident() != self._thread:
            raise Invalid("a transaction belongs to the thread that opened it")
        if time.monotonic() > self._deadline:
            raise TimedOut("the transaction has been open too long; nothing will be written")
        return self.tx

    def insert(self, entity: str, values: Any) -> Any:
        """Add a row and return its id; a list of rows gives a list of ids."""
        tx = self._check()
        return tx.insert(entity, values) if isinstance(values, Mapping) else [tx.insert(entity, row) for row in values]

    def update(self, entity: str, id: int, values: Mapping[str, Any], expect: int | None = None) -> int:
        """Set fields of a row."""
        return self._check().update(entity, id, values, expect)

    def delete(self, entity: str, id: int, expect: int | None = None) -> int:
        """Remove a row."""
        return self._check().delete(entity, id, expect)

    def upsert(self, entity: str, values: Mapping[str, Any], on: Sequence[str]) -> int:
        """Update or add a row."""
        return self._check().upsert(entity, values, on)

    def query(
        self, sql: str, params: Any = None, timeout: float | None = None, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """Rows of one SELECT, as this transaction sees them."""
        tx = self._check()
        settings = self._writes.ledger.settings
        seconds = min(settings.query_seconds if timeout is None else timeout, self._deadline - time.monotonic())
        return tx.engine.inside(
            tx, sql, params, time.monotonic() + seconds, settings.query_rows if limit is None else limit
        )

    def close(self) -> None:
        self._open = False


class Scoped(Writes):
    """An execution of its own: writes within a scope, until the block ends."""

    def __init__(self, layer: Layer, execution: Execution) -> None:
        self._layer, self.ledger, self.execution = layer, layer.ledger, execution

    @property
    def id(self) -> int | None:
        return self.execution.id

    def execution_by(self, principal: str | None) -> Execution:
        if principal is not None:
            raise Invalid("an execution acts as the principal it was opened for")
        return self.execution

    def query(self, sql: str, params: Any = None, **more: Any) -> list[dict[str, Any]]:
        """Rows of one SELECT, as this execution's principal may see them."""
        return self._layer.query(
            sql,
            params,
            **{"branch": self.execution.scope.branch or "main", **more},
            principal=self._layer.name_of(self.execution.principal),
        )


class Layer(Writes):
    """One governed reality: a directory with an embedded database, or a PostgreSQL URL.

    Apps use the verbs and the queries. The law and the edges, which stand on this class, also use `engine`, `catalog`,
    `ledger`, `reads`, `my_id`, `my_policy`, `id_of`, `name_of`, `acting_as`, `execution_by`, `execution_of` and `in_tx`:
    they decide nothing for who holds them and may change with any version.
    """

    def __init__(
        self, engine: Engine, settings: Settings, create: bool, token: str | None, migrating: bool = True
    ) -> None:
        self.engine, self.settings = engine, settings
        self.catalog = Catalog(engine)
        self.ledger = Ledger(engine, self.catalog, settings)
        self._executions: dict[int, Execution] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.until: datetime | None = None  # when the token ends that this handle was opened with
        try:
            if not engine.exists():
                if not create:
                    raise NotFound(
                        f"there is no layer at {engine.location}",
                        hint="layer init makes one; in Python, open(…, create=True)",
                    )
                engine.create()
            self.id = self._begin(create)
            self.my_id = self._authenticate(token or os.environ.get("LAYER_TOKEN") or _stored_token(self.id))
            if migrating and self._format < FORMAT:
                migrate(self.ledger)
            self.reads = Reads(self.catalog, settings)
        except BaseException:
            engine.close()
            raise

    def _begin(self, create: bool) -> str:
        if not engine_has_layer(self.engine):
            if not create:
                raise NotFound(
                    f"there is no layer at {self.engine.location}",
                    hint="layer init makes one; in Python, open(…, create=True)",
                )
            with self.engine.starting():
                if not engine_has_layer(self.engine):
                    token, layer_id = genesis.token(), genesis.new_id()
                    _keep_token(layer_id, token)  # first: a layer nobody holds the token of could never be opened
                    genesis.begin(self.engine, self.ledger, layer_id, token)
        with self.engine.reading() as session:
            layer_id, self._format = genesis.stored_format(self.engine, session)
        return layer_id

    def _authenticate(self, token: str | None) -> int:
        if token is None:
            raise Unauthenticated(
                "there is no token for this layer", hint=f"put it into LAYER_TOKEN or {_token_path(self.id)}"
            )
        hashed = genesis.token_hash(token)
        principal = SYSTEM.by_name["principal"]
        with self.engine.reading() as session:
            rows = self.catalog.rows(
                session, principal, MAIN_CHAIN, f"where x.{principal.by_name['token'].store} = ?", (hashed,)
            )
        if rows and secrets.compare_digest(rows[0]["token"], hashed):
            return int(rows[0]["id"])
        if self._format < FORMAT:  # no token of its own kind of row yet
            raise Unauthenticated("the token is nobody's here")
        from .law import tokens

        proven = tokens.prove(self, token)
        if proven.scope is not None or proven.kind not in ("api", "e2b"):
            raise Unauthenticated(
                "a token with a scope is for a server, which keeps to it", hint="livinglayer.connect(url, token)"
            )
        self.until = proven.expires
        return proven.principal

    # Who acts

    @property
    def me(self) -> str:
        """The name of the principal this handle acts as."""
        return self.name_of(self.my_id)

    def acting_as(self, number: int) -> Layer:
        """The same layer as another principal, for whoever has made sure that it is them; only the first handle closes it."""
        made = copy.copy(self)
        made.my_id, made.until = number, None
        return made

    def name_of(self, number: int) -> str:
        with self.engine.reading() as session:
            return str(self.catalog.principal_by_id(session, number)["name"])

    def id_of(self, principal: str | None) -> int:
        """The id of who acts: this handle's principal, or another it may impersonate."""
        if principal is None:
            return self.my_id
        with self.engine.reading() as session:
            try:
                number = int(self.catalog.principal(session, principal)["id"])
            except NotFound:
                self.my_policy(session).require("impersonate", f"principal:{principal}")
                raise
            if number != self.my_id:
                self.my_policy(session).require("impersonate", f"principal:{principal}")
        return number

    def my_policy(self, session: Any) -> Any:
        return self.catalog.policy(session, self.my_id, clock(self.engine, session)[1])

    def execution_by(self, principal: str | None) -> Execution:
        return self.execution_of(self.my_id if principal is None else self.id_of(principal))

    def execution_of(self, number: int) -> Execution:
        """This handle's own execution of a principal."""
        found = self._executions.get(number)
        if found is None or not found.open:
            with self._lock:
                if self._closed:
                    raise Denied("the layer is closed", hint="open it again")
                found = self._executions.get(number)
                if found is None or not found.open:
                    found = self._executions[number] = self.ledger.open(number)
        return found

    @contextmanager
    def execution(
        self,
        scope: Mapping[str, Any] | None = None,
        principal: str | None = None,
        reason: str | None = None,
        kind: str = "program",
    ) -> Iterator[Scoped]:
        """An execution with a scope of its own: what it writes outside of it is refused, and afterwards everything."""
        opened = self.ledger.open(self.id_of(principal), scope if scope is not None else {}, kind, reason)
        status = "done"
        try:
            yield Scoped(self, opened)
        except BaseException:
            status = "failed"
            raise
        finally:
            self.ledger.end(opened, status)

    def call(
        self,
        verb: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        principal: str | None = None,
        branch: str = "main",
        key: str | None = None,
        reason: str | None = None,
        trace: str | None = None,
        **more: Any,
    ) -> Any:
        """Through the one door: what a verb or a function gives, recorded. Arguments as a dict, or as keywords."""
        from .bundle import verbs  # noqa: F401  (its verbs are in the table too)
        from .law.verbs import call

        given = {**(arguments or {}), **more}
        return call(
            self, verb, given, principal=self.id_of(principal), branch=branch, key=key, reason=reason, trace=trace
        )

    # Reads

    def query(
        self, sql: str, params: Mapping[str, Any] | Sequence[Any] | None = None, branch: str = "main", as_of: Moment = None, principal: str | None = None,
        timeout: float | None = None, limit: int | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Rows of one SELECT over entity names, as a branch was at a moment and as a principal may see it."""
        number = self.my_id if principal is None else self.id_of(principal)
        with self._refused(number, sql):
            return self.reads.query(sql, params, branch, as_of, number, timeout, limit, number == OWNER)

    def query_at(
        self, sql: str, params: Mapping[str, Any] | Sequence[Any] | None = None, branch: str = "main", as_of: Moment = None, principal: str | None = None,
        narrow: Mapping[str, Any] | None = None, timeout: float | None = None, limit: int | None = None, trusted: bool = False,
        execution: Execution | None = None, attention: Attention | None = None,
    ) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
        """Rows of one SELECT as `query` gives them, and the last tx that they show.

        With `narrow` = {entity: {"fields": [...], "where": "..."}} nothing else is there; a query that is `trusted`
        may run in this process; when `attention` is lost it is ended.
        """
        number = self.my_id if principal is None else self.id_of(principal)
        with self._refused(number, sql, execution):
            return self.reads.query_at(sql, params, branch, as_of, number, timeout, limit, trusted, narrow, attention)

    def projection(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        /,
        *,
        branch: str = "main",
        as_of: Moment = None,
        principal: str | None = None,
        **more: Any,
    ) -> list[dict[str, Any]]:
        """Rows of a named projection that a principal may read. Arguments as a dict, or as keywords."""
        from .projection.query import read

        given = {**(arguments or {}), **more}
        return read(self, name, given, principal=self.id_of(principal), branch=branch, as_of=as_of)[0]

    def why(
        self,
        subject: str | int,
        *,
        impact: bool = False,
        branch: str = "main",
        as_of: Moment = None,
        principal: str | None = None,
        depth: int = 32,
    ) -> Any:
        """What led to ticket/7, ticket/7.status, tx/41 or an execution by its number: a tree; with `impact` what came of it."""
        from .law import why

        ask = why.impact if impact else why.why
        return ask(self, subject, principal=self.id_of(principal), branch=branch, as_of=as_of, depth=depth)

    @contextmanager
    def _refused(self, principal: int, sql: str, execution: Execution | None = None) -> Iterator[None]:
        """A query that tries to write is refused, and the ledger keeps that."""
        try:
            yield
        except (Denied, Invalid) as error:
            keep = getattr(self.ledger, "denied", None)
            if keep is not None and isinstance(sql, str) and writes(sql, error):
                keep(
                    execution or self.execution_of(principal), Denied(f"{error.message}: {sql[:200]}"), "write", "query"
                )
            raise

    @contextmanager
    def reader(self, branch: str = "main", as_of: Moment = None) -> Iterator[Any]:
        """The driver's own connection on which this principal's names are bound: for measurements and tools."""
        held, give = self.reads.borrow(branch, as_of, self.my_id)
        try:
            yield held.raw_connection()
        finally:
            give()

    def schema(self, branch: str = "main", as_of: Moment = None) -> Schema:
        """The entities and fields of a branch, those this handle's principal may read something of."""
        with self.engine.reading() as session:
            last, epoch = clock(self.engine, session)
            moment = None if as_of is None else self.catalog.moment(session, as_of, last)
            chain = self.catalog.chain(session, self.catalog.branch(session, branch), moment)
            readable: Schema = self.my_policy(session).readable(self.catalog.schema(session, chain, epoch), branch)
            return readable

    # Schema

    @contextmanager
    def in_tx(self, principal: str | None, branch: str, reason: str | None) -> Iterator[Tx]:
        execution = self.execution_by(principal)
        with self.ledger.work() as work:
            tx = Tx(work, execution, branch, reason)
            with self.engine.translating():
                yield tx
                if tx.dirty:
                    tx.finish(tx.result)

    def define(
        self, entity: str, fields: Mapping[str, Any], *, unique: Sequence[Sequence[str]] = (), description: str | None = None, annotations: Any = None,
        branch: str = "main", reason: str | None = None, principal: str | None = None,
    ) -> int:  # fmt: skip
        """Make an entity with its fields, or add fields to one; returns its id."""
        with self.in_tx(principal, branch, reason or f"define {entity}") as tx:
            tx.result = evolve.define(tx, entity, fields, unique, description, annotations)
            return int(tx.result)

    def alter(
        self, entity: str, *, add: Mapping[str, Any] | None = None, rename: Mapping[str, str] | None = None, retype: Mapping[str, Any] | None = None,
        drop: Sequence[str] = (), change: Mapping[str, Mapping[str, Any]] | None = None, name: str | None = None, description: str | None = None,
        branch: str = "main", reason: str | None = None, principal: str | None = None,
    ) -> None:  # fmt: skip
        """Change an entity; stored rows are not rewritten."""
        with self.in_tx(principal, branch, reason or f"alter {entity}") as tx:
            evolve.alter(tx, entity, add or {}, rename or {}, retype or {}, drop, change or {}, name, description)

    def backfill(
        self, entity: str, field: str, *, branch: str = "main", reason: str | None = None, principal: str | None = None
    ) -> dict[str, int]:
        """Finish a retype: convert the rows that still hold the old type; says how many, and how many could not be."""
        with self.in_tx(principal, branch, reason or f"backfill {entity}.{field}") as tx:
            done, lost = evolve.backfill(tx, entity, field)
            tx.result = {"converted": done - lost, "lost": lost}
        return dict(tx.result)

    def drop(
        self, entity: str, *, branch: str = "main", reason: str | None = None, principal: str | None = None
    ) -> None:
        """Take an entity out of the schema; its history stays."""
        with self.in_tx(principal, branch, reason or f"drop {entity}") as tx:
            evolve.drop(tx, entity)

    # Branches

    def fork(
        self,
        name: str,
        source: str = "main",
        slice: Mapping[str, str | None] | None = None,
        as_of: Moment = None,
        *,
        reason: str | None = None,
        principal: str | None = None,
    ) -> int:
        """A new branch of everything, or of a slice; costs one row."""
        return branches.fork(self.ledger, self.execution_by(principal), name, source, slice, as_of, reason)

    def diff(self, branch: str, target: str | None = None, *, principal: str | None = None) -> list[dict[str, Any]]:
        """What a branch changed since its fork or last merge, by row and field."""
        number = self.id_of(principal)
        with self.engine.reading() as session:
            epoch = clock(self.engine, session)[1]
            found = self.catalog.branch(session, branch)
            if target is not None and (
                found.parent is None or self.catalog.branch_by_id(session, found.parent).name != target
            ):
                raise Invalid(
                    f"{target!r} is not the parent of {branch!r}",
                    hint="a branch is compared with the one it was forked from",
                )
            if found.parent is None:
                return []
            return branches.diff(self.catalog, session, epoch, found, self.catalog.policy(session, number, epoch))

    def merge(
        self,
        branch: str,
        target: str | None = None,
        *,
        preview: bool = False,
        reason: str | None = None,
        principal: str | None = None,
    ) -> Merge:
        """Bring a branch's changes to its parent; with conflicts nothing is applied and they become rows."""
        return branches.merge(self.ledger, self.execution_by(principal), branch, target, preview, reason)

    def conflicts(self, branch: str | None = None) -> list[dict[str, Any]]:
        """The open conflicts."""
        with self.engine.reading() as session:
            self.my_policy(session).require("merge", "branch:main")
            if branch is not None:
                self.catalog.branch(session, branch)
        return branches.conflicts(self.catalog, self.ledger, branch)

    def resolve(
        self,
        conflict: int | Mapping[str, Any],
        value: Any = None,
        *,
        take: str | None = None,
        reason: str | None = None,
        principal: str | None = None,
    ) -> None:
        """Say what a conflict's value shall be (or take="ours"|"theirs"); the next merge uses it."""
        if take not in (None, "ours", "theirs"):
            raise Invalid(f"take is ours or theirs, not {take!r}")
        number = conflict["id"] if isinstance(conflict, Mapping) else conflict
        branches.resolve(
            self.ledger, self.execution_by(principal), number, {"take": take} if take else {"value": value}, reason
        )

    def discard(self, branch: str, *, reason: str | None = None, principal: str | None = None) -> None:
        """Close a branch; its name is free again, its history stays."""
        branches.discard(self.ledger, self.execution_by(principal), branch, reason)

    # Authority

    def principal(
        self,
        name: str,
        kind: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        roles: Sequence[str] | None = None,
        *,
        on: str = "main",
    ) -> int:
        """Make a principal, or change what is given of it; returns its id."""
        with self.in_tx(None, on, f"principal {name}") as tx:
            tx.result = authority.principal(tx, name, kind, attributes, roles)
            return int(tx.result)

    def token(self, principal: str) -> str:
        """A new token for a principal; the one before it ends. It has no end of its own, so that one which has makes none."""
        if self.until is not None:
            raise Denied(
                "a token that ends makes none that does not", hint="layer token create makes one that ends with it"
            )
        made = genesis.token()
        with self.in_tx(None, "main", f"token of {principal}") as tx:
            authority.principal(tx, principal, None, None, None, genesis.token_hash(made))
        return made

    def grant(
        self, principal: str, action: str, resource: str, *, where: str | None = None, fields: Sequence[str] | None = None, branch: str | None = None,
        effect: str = "allow", reason: str | None = None, valid_from: datetime | None = None, valid_to: datetime | None = None, delegable: bool = False,
        on: str = "main", by: str | None = None,
    ) -> int:  # fmt: skip
        """Allow (or deny) an action; returns the permission's id. Only main's permissions decide; `on` writes it elsewhere."""
        with self.in_tx(by, on, reason or f"grant {action} on {resource} to {principal}") as tx:
            tx.result = authority.grant(
                tx, principal, action, resource, where, fields, branch, effect, reason, valid_from, valid_to, delegable
            )
            return int(tx.result)

    def revoke(self, permission: int, *, reason: str | None = None, on: str = "main", by: str | None = None) -> None:
        """Take a permission back, and what was delegated from it."""
        with self.in_tx(by, on, reason or f"revoke {permission}") as tx:
            authority.revoke(tx, permission)

    def can(
        self, principal: str, action: str, resource: str, *, branch: str = "main", as_of: Moment = None
    ) -> Decision:
        """Whether a principal may do something, with the permission rows that decide: now, or as they were."""
        with self.engine.reading() as session:
            last, epoch = clock(self.engine, session)
            moment = None if as_of is None else self.catalog.moment(session, as_of, last, pruned=True)
            try:
                number = int(self.catalog.principal(session, principal)["id"])
                if number != self.my_id and not self.my_policy(session).sovereign():
                    raise NotFound("whom others may do what is for an owner to ask")
            except NotFound:
                return Decision(False, [], f"there is no principal {principal!r}")
            policy = self.catalog.policy(session, number, epoch, moment)
            return authority.can(self.catalog, session, epoch, policy, action, resource, branch, moment)

    # Trust

    def verify(self) -> Report:
        """Reread everything and recompute every hash; names the first bad tx."""
        return verify(self.catalog)

    def backup(self, destination: str | os.PathLike[str]) -> Path:
        """A copy as it is now, while others write: a directory that is itself an embedded layer."""
        self.only_owner("back up the layer")
        return make_backup(self.engine, Path(destination), self.settings)

    def export(
        self,
        entity: str,
        path: str | os.PathLike[str],
        format: str | None = None,
        *,
        branch: str = "main",
        as_of: Moment = None,
        principal: str | None = None,
    ) -> int:
        """Write an entity's rows to a file (jsonl, csv, parquet); returns how many."""
        return exchange.export(self, entity, Path(path), format, branch, as_of, principal)

    def import_(
        self,
        entity: str,
        path: str | os.PathLike[str],
        format: str | None = None,
        *,
        branch: str = "main",
        reason: str | None = None,
        principal: str | None = None,
    ) -> int:
        """Add rows from a file, as one tx; returns how many."""
        return exchange.load(self, entity, Path(path), format, branch, reason, principal)

    def prune(self, before: int | datetime, *, reason: str | None = None) -> int:
        """Forget closed versions that ended before a moment; returns how many. The chain goes on verifying."""
        return prune_history(self.ledger, self.execution_by(None), before, reason)

    def blob(self, digest: str) -> bytes:
        """The content of a file field of a row that this handle's principal may read."""
        known = isinstance(digest, str) and HASH.fullmatch(digest) is not None and self._names(digest)
        data = self.engine.get_blob(digest) if known else None
        if data is None:
            raise NotFound(f"there is no content {digest!r}")
        return data

    def _names(self, digest: str) -> bool:
        """Whether a row this principal may read names a content."""
        if self.my_id == OWNER:
            return True
        for sql in naming(self.schema()):
            try:
                if self.query(sql, {"digest": digest}):
                    return True
            except (NotFound, Invalid):  # not a field of this principal's
                continue
        return False

    def only_owner(self, act: str) -> None:
        with self.engine.reading() as session:
            if not self.my_policy(session).sovereign():
                raise Denied(f"only an owner may {act}")

    def close(self) -> None:
        """End this handle's executions and let go of the database."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if (tending := getattr(self.ledger, "tending", None)) is not None:
            tending.close()
        if self.ledger.runner is not None:
            self.ledger.runner.close()
        if self.ledger.denials:
            try:
                self.ledger.flush(self._executions.get(self.my_id) or self.ledger.open(self.my_id))
            except LayerError:
                pass
        for execution in list(self._executions.values()):
            try:
                self.ledger.end(execution)
            except LayerError:
                pass  # a layer that can't be reached any more is closed all the same
        self.reads.close()
        self.engine.close()

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def engine_has_layer(engine: Engine) -> bool:
    with engine.reading() as session:
        return engine.has_table(session, "meta")
