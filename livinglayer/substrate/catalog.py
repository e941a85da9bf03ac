"""Catalog: what a layer says of itself (schema, branches, policies), read from its rows and kept until they change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..errors import Invalid, NotFound
from .engine import Engine, Session
from .permissions import Policy, load_policy
from .predicates import Predicate, compile_predicate
from .schema import MAIN, SYSTEM, Entity, Schema, schema_of
from .tables import Table
from .values import datetime_text, decode, text
from .views import Chain, Level, arms, field_sql

KEPT = 256
Slice = tuple[int, Mapping[str, str | None]]


@dataclass(frozen=True)
class Branch:
    """A branch, as its row on main says."""

    id: int
    name: str
    parent: int | None
    fork_tx: int
    base_own: int
    base_parent: int
    slice: Mapping[str, str | None] | None
    status: str


def no_branch(name: str) -> NotFound:
    return NotFound(f"there is no branch {name!r}", hint="layer branches lists them")


class Catalog:
    """Caches keyed by the epoch: the last tx that changed a schema or a policy anywhere."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, Any] = OrderedDict()

    def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made

    # Branches

    def branch(self, session: Session, name: str, open_only: bool = False) -> Branch:
        """The branch of this name, or NotFound; a discarded one is still readable."""
        text("the name of a branch", name, 1000)
        found = self._branches(session, "name", name)
        if not found:
            raise no_branch(name)
        if open_only and found[0].status != "open":
            raise Invalid(f"branch {name!r} is {found[0].status}", hint="fork it anew to go on")
        return found[0]

    def branch_by_id(self, session: Session, number: int) -> Branch:
        return self._branches(session, "id", number)[0]

    def _branches(self, session: Session, key: str, value: Any) -> list[Branch]:
        entity = SYSTEM.by_name["branch"]
        column = "id" if key == "id" else entity.by_name[key].store
        rows = self.rows(session, entity, (Level(MAIN),), f"where x.{column} = ?", (value,))
        return [Branch(**{k: v for k, v in row.items() if k != "_tx"}) for row in rows]

    def chain(self, session: Session, branch: Branch | int, as_of: int | None = None) -> Chain:
        """The levels a branch reads through. Before its fork a branch's past is its parent's."""
        if branch == MAIN or (isinstance(branch, Branch) and branch.id == MAIN):
            return (Level(MAIN, as_of),)
        here = branch if isinstance(branch, Branch) else self.branch_by_id(session, branch)
        levels: list[Level] = []
        cut = as_of
        while here.parent is not None:
            if cut is None or cut >= here.fork_tx:
                levels.append(Level(here.id, cut))
                cut = here.fork_tx
            here = self.branch_by_id(session, here.parent)
        return (*levels, Level(here.id, cut))

    def slices(self, session: Session, branch: Branch) -> list[Slice]:
        """The slices a branch lies in, its own and its ancestors', each with the branch that made it."""
        found: list[Slice] = []
        here = branch
        while here.parent is not None:
            if here.slice is not None:
                found.append((here.id, here.slice))
            here = self.branch_by_id(session, here.parent)
        return found

    def slice_predicates(self, slices: list[Slice], schema: Schema, entity: Entity) -> list[Predicate] | None:
        """The conditions a row must meet to lie in every slice; None when the entity is out of scope."""
        if entity.system:
            return []
        found = []
        for maker, part in slices:
            if entity.name in part:
                if condition := part[entity.name]:
                    found.append(compile_predicate(condition, schema, entity))
            elif entity.id < maker:  # ids are given in order: this entity was there when the slice was cut
                return None
        return found

    # Rows and schema

    def rows(
        self, session: Session, entity: Entity, chain: Chain, where: str = "", params: tuple[Any, ...] = ()
    ) -> list[dict[str, Any]]:
        """Rows as Python values under field names, with their version in _tx."""
        names = ["id", *(f.name for f in entity.fields), "_tx"]
        columns = [f"{field_sql(self.engine, f, self.engine.portable)} as {f.store}" for f in entity.fields]
        source = arms(self.engine, entity.store, chain, columns, version=True)
        stored = session.all(f"select * from ({source}) x {where}", params)
        kinds = [None, *(f.type for f in entity.fields), None]
        return [
            {n: v if k is None else decode(k, v) for n, k, v in zip(names, kinds, row, strict=True)} for row in stored
        ]

    def schema(self, session: Session, chain: Chain, epoch: Any) -> Schema:
        """The schema as a chain sees it."""

        def make() -> Schema:
            entity, f = SYSTEM.by_name["entity"], SYSTEM.by_name["field"]
            return schema_of(self.rows(session, entity, chain), self.rows(session, f, chain))

        versions = chain if any(level.cut is not None for level in chain[:1]) else (chain, epoch)
        return self._cached(("schema", versions), make)

    def columns(self, session: Session, store: str, epoch: Any) -> list[tuple[str, str]]:
        """Every column of an entity's head table with its stored type, whatever branch it belongs to."""
        return self._cached(
            ("columns", store, epoch),
            lambda: [c for c in self.engine.columns(session, store) if c[0] not in ("id", "_tx")],
        )

    def table(self, session: Session, store: str, epoch: Any) -> Table:
        """The physical side of an entity."""
        found: Table = self._cached(
            ("table", store, epoch), lambda: Table(self.engine, store, self.columns(session, store, epoch))
        )
        return found

    # Authority

    def policy(self, session: Session, principal: int, epoch: int, as_of: int | None = None) -> Policy:
        """The grants of a principal, from main: now, or as they were."""
        key = ("policy", principal, epoch, as_of)
        found: Policy = self._cached(key, lambda: load_policy(self, session, principal, as_of))
        if found.expired():
            with self._lock:
                self._kept.pop(key, None)
            found = self._cached(key, lambda: load_policy(self, session, principal, as_of))
        return found

    def principal(self, session: Session, name: str) -> dict[str, Any]:
        """A principal's row by its name, or NotFound."""
        text("the name of a principal", name, 1000)
        entity = SYSTEM.by_name["principal"]
        rows = self.rows(session, entity, (Level(MAIN),), f"where x.{entity.by_name['name'].store} = ?", (name,))
        if not rows:
            raise NotFound(f"there is no principal {name!r}", hint="select name from principal lists them")
        return rows[0]

    def principal_by_id(self, session: Session, number: int) -> dict[str, Any]:
        return self.rows(session, SYSTEM.by_name["principal"], (Level(MAIN),), "where x.id = ?", (number,))[0]

    # Time

    def time_of(self, session: Session, tx: int) -> datetime:
        """When a tx was."""
        at = self.engine.portable("at", "datetime")
        row = session.one(f"select {at} from {self.engine.schema_prefix}ledger_tx where tx = ?", (tx,))
        assert row is not None
        return datetime.fromisoformat(row[0])

    def moment(self, session: Session, as_of: int | datetime, last: int, pruned: bool = False) -> int:
        """The tx that `as_of` means; Invalid where rows of that time may be `pruned`, unless that does not matter."""
        found = self._moment(session, as_of, last)
        row = session.one(f"select max(horizon) from {self.engine.schema_prefix}ledger_prune")
        if not pruned and row is not None and row[0] is not None and found < row[0]:
            raise Invalid(
                f"history before tx {row[0]} was pruned", hint=f"the earliest moment to ask for is tx {row[0]}"
            )
        return found

    def _moment(self, session: Session, as_of: int | datetime, last: int) -> int:
        # Times of txs never go back, so a time is found by halving.
        if isinstance(as_of, bool) or not isinstance(as_of, int | datetime):
            raise Invalid(f"as_of is a tx number or an aware datetime, not {as_of!r}")
        if isinstance(as_of, int):
            if not 1 <= as_of <= last:
                raise Invalid(f"there is no tx {as_of}", hint=f"the layer is at tx {last}")
            return as_of
        if as_of.tzinfo is None:
            raise Invalid(f"as_of {as_of.isoformat()} has no time zone", hint="give an aware datetime, e.g. with UTC")
        wanted, low, high = datetime_text(as_of), 0, last
        at = self.engine.portable("at", "datetime")
        while low < high:
            middle = (low + high + 1) // 2
            row = session.one(f"select {at} from {self.engine.schema_prefix}ledger_tx where tx = ?", (middle,))
            if row is not None and row[0] <= wanted:
                low = middle
            else:
                high = middle - 1
        if low == 0:
            raise Invalid(f"the layer did not exist at {as_of.isoformat()}")
        return low
