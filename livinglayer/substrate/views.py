"""Views: the SQL of an entity as one branch sees it, at one moment, through one principal's grants.

own rows touched on the branch ∪ each ancestor's at the cut ∪ main's head ∪ versions main has closed since; every lower
arm leaves out what a nearer one has. Main's head without a past is the table itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .engine import LIVE
from .predicates import Me, Names, Predicate
from .schema import MAIN, Entity, Field

if TYPE_CHECKING:
    from .engine import Engine

Cut = int | str | None  # up to which tx a level is seen; None is its head, text is an expression of the engine


@dataclass(frozen=True)
class Level:
    """One branch of a chain, seen up to a cut."""

    branch: int
    cut: Cut = None


Chain = tuple[Level, ...]  # the nearest first, main last


def arms(
    engine: Engine, store: str, chain: Chain, columns: Sequence[str], version: bool = False, where: str = ""
) -> str:
    """The rows of a table set as a chain sees them; `columns` and `where` speak of the row as x."""
    at = engine.schema_prefix
    picked = ", ".join(["x.id", *columns])
    selects: list[str] = []
    for depth, level in enumerate(chain[:-1]):
        held = f"x.tx_to = {LIVE}" if level.cut is None else f"x.tx_from <= {level.cut} and x.tx_to > {level.cut}"
        shadow = _unshadowed(engine, store, chain[:depth])
        extra = ", x.tx_from as _tx" if version else ""
        selects.append(
            f"select {picked}{extra} from {at}{store}__d x where x.branch = {level.branch} and {held} and x.del = 0{shadow}{where}"
        )
    cut, shadow = chain[-1].cut, _unshadowed(engine, store, chain[:-1])
    if cut is None:
        extra = ", x._tx" if version else ""
        selects.append(
            f"select {picked}{extra} from {at}{store} x" + (f" where true{shadow}{where}" if shadow or where else "")
        )
    else:
        extra, closed = (", x._tx", ", x.tx_from") if version else ("", "")
        selects.append(f"select {picked}{extra} from {at}{store} x where x._tx <= {cut}{shadow}{where}")
        selects.append(
            f"select {picked}{closed} from {at}{store}__h x where x.tx_to > {cut} and x.tx_from <= {cut}{shadow}{where}"
        )
    return " union all ".join(selects)


def _unshadowed(engine: Engine, store: str, nearer: Chain) -> str:
    """Leave out what a nearer branch has touched."""
    found = ""
    for level in nearer:
        seen = "" if level.cut is None else f" and o.tx_from <= {level.cut}"
        found += f" and not exists (select 1 from {engine.schema_prefix}{store}__d o where o.branch = {level.branch} and o.id = x.id{seen})"
    return found


def field_sql(engine: Engine, f: Field, wrap: Callable[[str, str], str]) -> str:
    """A field of the row x, converted from its former column where a retype is not backfilled yet."""
    now = wrap(f"x.{f.store}", f.type)
    if not f.was:
        return now
    then = engine.converted(engine.portable(f"x.{f.was['store']}", f.was["type"]), f.was["type"], f.type)
    return f"coalesce({now}, {wrap(then, f.type)})"


def base_sql(engine: Engine, entity: Entity, chain: Chain) -> str:
    """An entity under its own field names, as a chain sees it, before grants."""
    if entity.kind == "ledger":
        return ledger_sql(engine, entity.name)
    return arms(
        engine, entity.store, chain, [f"{field_sql(engine, f, engine.shown)} as {f.name}" for f in entity.fields]
    )


def history_sql(engine: Engine, entity: Entity, chain: Chain) -> str:
    """Every version a chain has seen, and every deletion, with who, when and why."""
    at, number = engine.schema_prefix, entity.id
    fields = "".join(f", {field_sql(engine, f, engine.shown)} as {f.name}" for f in entity.fields)
    parts: list[str] = []
    for depth, level in enumerate(chain):
        within = "" if level.cut is None else f" and {{}} <= {level.cut}"
        # A version a nearer branch replaced ended, for this chain, when that branch first touched the row.
        ends = [
            f"(select min(o.tx_from) from {at}{entity.store}__d o where o.branch = {n.branch} and o.id = x.id{'' if n.cut is None else f' and o.tx_from <= {n.cut}'})"
            for n in chain[:depth]
        ]
        past = f"x.tx_to < {LIVE}" if level.cut is None else f"x.tx_to <= {level.cut}"
        closed = f"case when {past} then x.tx_to end"
        ended = f"coalesce({', '.join([closed, *ends])})" if ends else closed
        alive = f"coalesce({', '.join([*ends, 'null'])})" if ends else "null"
        act = f"(select c.op from {at}ledger_change c where c.branch = {level.branch} and c.tx = {{}} and c.entity = {number} and c.id = x.id)"
        null = engine.null_tx
        if level.branch == MAIN:
            parts.append(
                f"select x.id{fields}, x._tx as tx, {alive if ends else null} as tx_end, {act.format('x._tx')} as op, {MAIN} as b__ from {at}{entity.store} x where true{within.format('x._tx')}"
            )
            parts.append(
                f"select x.id{fields}, x.tx_from, {ended}, {act.format('x.tx_from')}, {MAIN} from {at}{entity.store}__h x where true{within.format('x.tx_from')}"
            )
            parts.append(
                f"select x.id{fields}, c.tx, c.tx, 'd', {MAIN} from {at}{entity.store}__h x join {at}ledger_change c on c.branch = {MAIN} and c.tx = x.tx_to and c.entity = {number} and c.id = x.id and c.op = 'd' where true{within.format('x.tx_to')}"
            )
        else:
            parts.append(
                f"select x.id{fields}, x.tx_from as tx, case when x.del = 1 then x.tx_from else {ended} end as tx_end, {act.format('x.tx_from')} as op, {level.branch} as b__ from {at}{entity.store}__d x where x.branch = {level.branch}{within.format('x.tx_from')}"
            )
    names = ", ".join(["v.id", *(f"v.{f.name}" for f in entity.fields)])
    branch, principal = _name(engine, "branch", "v.b__"), _name(engine, "principal", "t.principal")
    op = "case v.op when 'i' then 'insert' when 'u' then 'update' when 'd' then 'delete' end"
    n = history_names(entity)
    return (
        f"select {names}, v.tx, v.tx_end, {op} as op, t.at as {n['at']}, {principal} as {n['principal']}, t.reason as {n['reason']}, t.execution as {n['execution']}, {branch} as {n['branch']}"
        f" from ({' union all '.join(parts)}) v join {at}ledger_tx t on t.tx = v.tx"
    )


HISTORY = ("tx", "tx_end", "op", "at", "principal", "reason", "execution", "branch")


def history_names(entity: Entity) -> dict[str, str]:
    """What a history view calls its own columns: with tx_ before them where the entity has a field of that name."""
    return {name: f"tx_{name}" if name in entity.by_name else name for name in HISTORY}


def arm_count(chain: Chain) -> int:
    """How many selects `arms` makes, each with its own parameters."""
    return len(chain) + (chain[-1].cut is not None)


def _name(engine: Engine, entity: str, key: str) -> str:
    """The name of a branch or principal by its id, as main has it now."""
    from .schema import SYSTEM

    found = SYSTEM.by_name[entity]
    return f"(select n.{found.by_name['name'].store} from {engine.schema_prefix}{found.store} n where n.id = {key})"


def _last_name(engine: Engine, entity: str, key: str) -> str:
    """The name of a row by its id, as main has it, or had it last, or a branch has it."""
    from .schema import SYSTEM

    found = SYSTEM.by_name[entity]
    column, table = found.by_name["name"].store, f"{engine.schema_prefix}{found.store}"
    past = f"(select n.{column} from {table}__h n where n.id = {key} order by n.tx_to desc limit 1)"
    beside = f"(select n.{column} from {table}__d n where n.id = {key} and n.del = 0 order by n.tx_from desc limit 1)"
    return f"coalesce({_name(engine, entity, key)}, {past}, {beside})"


def ledger_sql(engine: Engine, name: str) -> str:
    """The append-only facts, with names for people."""
    at = engine.schema_prefix
    from .schema import SYSTEM

    if name == "role":
        p = SYSTEM.by_name["principal"]
        c = {f.name: f.store for f in p.fields}
        return f"select x.id, x.{c['name']} as name, {engine.shown('x.' + c['attributes'], 'json')} as attributes from {at}{p.store} x where x.{c['kind']} = 'role'"
    if name == "tx":
        return (
            f"select x.tx, {_name(engine, 'branch', 'x.branch')} as branch, x.at, {_name(engine, 'principal', 'x.principal')} as principal,"
            f" x.execution, x.cause, x.reason, {_name(engine, 'branch', 'x.merged_from')} as merged_from, {engine.hex('x.hash')} as hash from {at}ledger_tx x"
        )
    if name == "change":
        e = SYSTEM.by_name["entity"]
        named = f"coalesce((select n.{e.by_name['name'].store} from {at}{e.store} n where n.id = x.entity), 'entity ' || x.entity)"
        op = "case x.op when 'i' then 'insert' when 'u' then 'update' when 'd' then 'delete' end"
        return f"select {_name(engine, 'branch', 'x.branch')} as branch, x.tx, {named} as entity, x.id as row_id, {op} as op from {at}ledger_change x"
    if name == "execution":
        return (
            f"select x.id, {_name(engine, 'principal', 'x.principal')} as principal, x.parent, x.box, x.kind, {engine.shown('x.scope', 'json')} as scope,"
            f" x.reason, x.trace, x.started, case when o.status is not null then o.status when c.due is not null and not exists"
            f" (select 1 from {at}ledger_lease l where l.name = 'execution/' || x.id) then 'queued' else 'running' end as status,"
            f" o.finished, {engine.shown('o.result', 'json')} as result, c.verb, {_last_name(engine, 'function', 'c.function')} as function,"
            f" c.version, {engine.shown('c.arguments', 'json')} as arguments, {_name(engine, 'branch', 'c.branch')} as branch, c.state,"
            f" {_last_name(engine, 'contract', 'c.contract')} as contract, {_last_name(engine, 'trigger', 'c.trigger')} as trigger, c.cause_tx,"
            f" c.attempt, c.due, c.key, c.seed, c.snapshot, {engine.shown('c.permissions', 'json')} as permissions, c.runner"
            f" from {at}ledger_execution x left join {at}ledger_outcome o on o.execution = x.id left join {at}ledger_call c on c.execution = x.id"
        )
    if name == "step":
        return f"select x.execution, x.n, x.kind, {engine.shown('x.detail', 'json')} as detail, x.at from {at}ledger_step x"
    if name == "box":
        return f"select x.id, x.tier, {_name(engine, 'principal', 'x.owner')} as owner, x.blueprint, x.created from {at}ledger_box x"
    if name == "usage":
        return (
            f"select x.execution, {_name(engine, 'principal', 'x.principal')} as principal, {_last_name(engine, 'contract', 'x.contract')} as contract,"
            f" {_last_name(engine, 'function', 'x.function')} as function, x.wall, x.cpu, x.memory, x.sent, x.received, x.disk, x.at from {at}ledger_usage x"
        )
    if name == "decision":
        return (
            f"select x.id, {_name(engine, 'principal', 'x.principal')} as principal, x.action, x.resource, x.allowed,"
            f" {engine.shown('x.permissions', 'json')} as permissions, x.reason, x.execution, x.at from {at}ledger_decision x"
        )
    if name == "lineage":
        return (
            f"select x.id, x.box, x.parent, x.snapshot, {_name(engine, 'branch', 'x.branch')} as branch, x.execution, x.created"
            f" from {at}ledger_lineage x"
        )
    return f"select x.id, x.box, x.parent, x.created from {at}ledger_snapshot x"


@dataclass(frozen=True)
class ReadRule:
    """What a principal sees of an entity: conditions of which one must hold, conditions that hide, and per field."""

    allows: tuple[tuple[tuple[tuple[Predicate, Me], ...], frozenset[str] | None], ...]
    denies: tuple[tuple[tuple[tuple[Predicate, Me], ...], frozenset[str] | None], ...]

    @property
    def everything(self) -> bool:
        return not self.denies and any(not where and fields is None for where, fields in self.allows)


def governed_sql(
    engine: Engine,
    columns: Sequence[str],
    source: str,
    rule: ReadRule,
    relation: Callable[[str], str],
    extra: Sequence[tuple[Predicate, Me]],
    fixed: Sequence[str] = (),
    blank: Sequence[str] = (),
) -> str | None:
    """A view's SQL over `source` with a rule's rows and fields (and a slice's rows); None when nothing may be seen.

    Columns the rule does not name are left out, or null in the rows in which another condition hides them; `fixed`
    ones go with any row, `blank` ones are always null.
    """

    def holds(where: Sequence[tuple[Predicate, Me]], unknown: str) -> str:
        if not where:
            return "true"
        joined = " and ".join(p.sql(Names(engine.dialect, me, relation), "x") for p, me in where)
        return f"coalesce({joined}, {unknown})"

    rows: list[str] = []
    shown: list[str] = []
    hidden_rows = [holds(where, "true") for where, fields in rule.denies if fields is None]
    if "true" in hidden_rows:
        return None
    rows = [holds(where, "false") for where, _ in rule.allows]
    if not rows:
        return None
    open_rows = "true" in rows
    for column in columns:
        if column in blank:
            shown.append(f"case when 1 = 0 then x.{column} end as {column}")
            continue
        if column in fixed:
            shown.append(f"x.{column}")
            continue
        givers = [holds(where, "false") for where, fields in rule.allows if fields is None or column in fields]
        takers = [holds(where, "true") for where, fields in rule.denies if fields is not None and column in fields]
        if not givers or "true" in takers:
            continue
        given = "true" if "true" in givers or set(givers) == set(rows) else "(" + " or ".join(givers) + ")"
        kept = [given] if given != "true" else []
        kept += [f"not {t}" for t in takers]
        shown.append(f"case when {' and '.join(kept)} then x.{column} end as {column}" if kept else f"x.{column}")
    where = [] if open_rows else ["(" + " or ".join(dict.fromkeys(rows)) + ")"]
    where += [f"not {h}" for h in hidden_rows]
    where += [holds([part], "false") for part in extra]
    sql = f"select {', '.join(shown)} from {source} x"
    if where:
        sql += " where " + " and ".join(where)
    masked = bool(where) or any(s.startswith("case") for s in shown)
    return sql + (engine.barrier if masked else "")
