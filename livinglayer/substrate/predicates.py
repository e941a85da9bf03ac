"""Predicates: one small boolean language for grants, slices, scopes and checks.

A predicate is parsed once into an allow-listed tree and compiled twice: to SQL for views and to Python for the
write path. Nothing of its text reaches an engine unparsed. Unknown (null) is neither true nor false, as in SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import sqlglot
from sqlglot import exp

from ..errors import Invalid
from .values import canonical, datetime_text

if TYPE_CHECKING:
    from .schema import Entity, Schema

Dialect = Literal["sqlite", "postgres"]
Me = Mapping[str, Any]  # the principal: id, name and attributes
LIMIT = 4000
NODES = 250
HINT = (
    "comparisons, and/or/not, in, between, like, is null, + - * / %, length, coalesce, abs, now(), :me, :me.attribute"
)


@dataclass(frozen=True)
class Env:
    """What a predicate is tested against: a row by field name (stored values), the principal, a way along references."""

    row: Mapping[str, Any]
    me: Me
    follow: Callable[[str, int], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Names:
    """What a predicate is written for: the dialect, the principal, and the relation that stands for an entity."""

    dialect: Dialect
    me: Me
    relation: Callable[[str], str]


Test = Callable[[Env], Any]
Write = Callable[[Names, str], str]


@dataclass(frozen=True)
class Node:
    kind: str
    test: Test
    write: Write
    literal: str | None = None


@dataclass(frozen=True)
class Predicate:
    """A compiled predicate over one entity."""

    text: str
    test: Callable[[Env], bool | None]
    _write: Write

    def sql(self, names: Names, alias: str) -> str:
        return self._write(names, alias)


def quote(value: Any) -> str:
    """A literal that both engines read as the same value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Decimal):
        return f"({value})"
    return "'" + str(value).replace("'", "''") + "'"


# What a node may say beside its operands. Anything else would be a meaning that the compiler does not know.
_ARGUMENTS = frozenset(
    "this expression expressions low high negate is_string table db catalog quoted safe typed".split()
)
_LANGUAGE = (
    exp.Paren, exp.And, exp.Or, exp.Not, exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Neg, exp.In,
    exp.Between, exp.Is, exp.Like, exp.Literal, exp.Boolean, exp.Null, exp.Placeholder, exp.Dot, exp.Column, exp.Identifier, exp.Length, exp.Abs, exp.Coalesce,
    exp.CurrentTimestamp,
)  # fmt: skip


def parse(text: Any) -> Any:
    """The tree of one boolean expression, or Invalid."""
    if not isinstance(text, str):
        raise Invalid(f"a predicate is text, not {type(text).__name__}", hint=HINT)
    return _parse(text)


@lru_cache(512)
def _parse(text: str) -> Any:
    if len(text) > LIMIT:
        raise Invalid(f"a predicate has at most {LIMIT} characters")
    if "\0" in text or "\\" in text or "$" in text or ";" in text:
        raise Invalid(f"predicate {text!r} has a character that has no place in one", hint=HINT)
    try:
        tree = sqlglot.parse_one(f"select ({text})", read="postgres")
    except (sqlglot.errors.SqlglotError, RecursionError):
        raise Invalid(f"predicate {text!r} can't be read", hint=HINT) from None
    used = [key for key, value in tree.args.items() if value]
    whole = type(tree) is exp.Select and used == ["expressions"] and len(tree.expressions) == 1
    if not whole or type(tree.expressions[0]) is not exp.Paren:  # `a) or (b` would be another one beside a third
        raise Invalid(f"predicate {text!r} is not one expression", hint=HINT)
    nodes = list(tree.expressions[0].walk())
    if len(nodes) > NODES:
        raise Invalid(f"a predicate has at most {NODES} parts")
    for node in nodes:
        unknown = {key for key, value in node.args.items() if value} - _ARGUMENTS
        if not isinstance(node, _LANGUAGE) or unknown:
            raise Invalid(f"predicate {text!r}: {node.sql()!r} is not part of the language", hint=HINT)
    return tree.expressions[0]


def both(one: str, other: str) -> str:
    """The predicate that holds where two do; each must be one by itself."""
    parse(one), parse(other)
    return f"({one}) and ({other})"


def compile_predicate(text: str, schema: Schema, entity: Entity) -> Predicate:
    """Bind a predicate to an entity's fields; unknown fields and anything outside the language are Invalid."""
    compiler = _Compiler(schema, entity, text)
    node = compiler.truth(compiler.node(parse(text)), "a predicate")
    return Predicate(text, lambda env: _truth(node.test(env)), node.write)


def _truth(value: Any) -> bool | None:
    return None if value is None else bool(value)


_COMPARE: dict[type, tuple[str, Callable[[Any, Any], bool]]] = {
    exp.EQ: ("=", lambda a, b: a == b),
    exp.NEQ: ("<>", lambda a, b: a != b),
    exp.LT: ("<", lambda a, b: a < b),
    exp.LTE: ("<=", lambda a, b: a <= b),
    exp.GT: (">", lambda a, b: a > b),
    exp.GTE: (">=", lambda a, b: a >= b),
}


def _divide(a: Any, b: Any) -> Any:
    if b == 0:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # towards zero, as both engines do
    return a / b


def _modulo(a: Any, b: Any) -> Any:
    return None if b == 0 else a - b * _divide(a, b)


_ARITHMETIC: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    exp.Add: ("+", lambda a, b: a + b),
    exp.Sub: ("-", lambda a, b: a - b),
    exp.Mul: ("*", lambda a, b: a * b),
    exp.Div: ("/", _divide),
    exp.Mod: ("%", _modulo),
}
_NUMBERS = ("int", "float", "number")
_TEXTS = ("text", "enum", "state", "file", "literal")


class _Compiler:
    def __init__(self, schema: Schema, entity: Entity, text: str) -> None:
        self.schema, self.entity, self.text = schema, entity, text

    def wrong(self, why: str) -> Invalid:
        return Invalid(f"predicate {self.text!r}: {why}", hint=HINT)

    def node(self, tree: Any) -> Node:
        if tree.args.get("negate") and not isinstance(tree, exp.Is):  # `not like` and its kind
            positive = tree.copy()
            positive.set("negate", None)
            return self.node(exp.Not(this=positive))
        if isinstance(tree, exp.Paren):
            return self.node(tree.this)
        if isinstance(tree, exp.And | exp.Or):
            return self.junction(tree)
        if isinstance(tree, exp.Not):
            inner = self.truth(self.node(tree.this), "not")
            return Node("bool", lambda e: _negate(_truth(inner.test(e))), lambda n, a: f"(not {inner.write(n, a)})")
        if type(tree) in _COMPARE:
            return self.comparison(type(tree), self.node(tree.this), self.node(tree.expression))
        if type(tree) in _ARITHMETIC:
            return self.arithmetic(tree)
        if isinstance(tree, exp.Neg):
            inner = self.node(tree.this)
            if inner.kind not in _NUMBERS:
                raise self.wrong(f"minus needs a number, not {inner.kind}")
            negated = None if inner.literal is None else "-" + inner.literal
            return Node(
                inner.kind,
                lambda e: _map(lambda v: -v, inner.test(e)),
                lambda n, a: f"(- {inner.write(n, a)})",
                negated,
            )
        if isinstance(tree, exp.In):
            if tree.args.get("query") or not tree.expressions:
                raise self.wrong("`in` takes a list of values")
            return self.any_of(
                [self.comparison(exp.EQ, self.node(tree.this), self.node(item)) for item in tree.expressions]
            )
        if isinstance(tree, exp.Between):
            low = self.comparison(exp.GTE, self.node(tree.this), self.node(tree.args["low"]))
            high = self.comparison(exp.LTE, self.node(tree.this), self.node(tree.args["high"]))
            return self.both(low, high)
        if isinstance(tree, exp.Is):
            return self.identity(tree)
        if isinstance(tree, exp.Like):
            return self.like(tree)
        if isinstance(tree, exp.Literal):
            return self.literal(tree)
        if isinstance(tree, exp.Boolean):
            value = bool(tree.this)
            return Node("bool", lambda e: value, lambda n, a: "true" if value else "false")
        if isinstance(tree, exp.Null):
            return Node("null", lambda e: None, lambda n, a: "null")
        if isinstance(tree, exp.Placeholder):
            return self.me(tree.this, None)
        if isinstance(tree, exp.Dot) and isinstance(tree.this, exp.Placeholder):
            return self.me(tree.this.this, tree.expression.name)
        if isinstance(tree, exp.Column):
            return self.path([part.name for part in tree.parts])
        if isinstance(tree, exp.Length):
            inner = self.node(tree.this)
            if inner.kind not in _TEXTS:
                raise self.wrong(f"length needs text, not {inner.kind}")
            return Node("int", lambda e: _map(len, inner.test(e)), lambda n, a: f"length({inner.write(n, a)})")
        if isinstance(tree, exp.Abs):
            inner = self.node(tree.this)
            if inner.kind not in _NUMBERS:
                raise self.wrong(f"abs needs a number, not {inner.kind}")
            return Node(inner.kind, lambda e: _map(abs, inner.test(e)), lambda n, a: f"abs({inner.write(n, a)})")
        if isinstance(tree, exp.Coalesce):
            parts = [self.node(tree.this), *map(self.node, tree.expressions)]
            kinds = {part.kind for part in parts if part.literal is None} - {"null"}
            if len(kinds) > 1:
                raise self.wrong("coalesce mixes types")
            kind = kinds.pop() if kinds else parts[0].kind
            parts = [self.fit(part, kind) for part in parts]
            if any(part.kind != "null" and not _comparable(part.kind, kind) for part in parts):
                raise self.wrong("coalesce mixes types")
            return Node(kind, lambda e: next((v for p in parts if (v := p.test(e)) is not None), None),
                        lambda n, a: "coalesce(" + ", ".join(p.write(n, a) for p in parts) + ")")  # fmt: skip
        if isinstance(tree, exp.CurrentTimestamp):
            return Node("datetime", lambda e: datetime_text(datetime.now(UTC)),
                        lambda n, a: "now()" if n.dialect == "postgres" else "strftime('%Y-%m-%dT%H:%M:%f000Z', 'now')")  # fmt: skip
        raise self.wrong(f"{tree.sql()!r} is not part of the language")

    def truth(self, node: Node, what: str) -> Node:
        """A node where true or false is needed; an attribute of the principal that is neither is unknown."""
        if node.kind == "attribute":
            return Node(
                "bool",
                lambda e: v if isinstance(v := node.test(e), bool) else None,
                lambda n, a: w if (w := node.write(n, a)) in ("true", "false") else "null",
            )
        if node.kind not in ("bool", "null"):
            raise self.wrong(f"{what} needs true or false, not {node.kind}")
        return node

    def junction(self, tree: exp.And | exp.Or) -> Node:
        left, right = self.truth(self.node(tree.this), "and/or"), self.truth(self.node(tree.expression), "and/or")
        return self.both(left, right) if isinstance(tree, exp.And) else self.any_of([left, right])

    def both(self, left: Node, right: Node) -> Node:
        def test(env: Env) -> bool | None:
            a = _truth(left.test(env))
            if a is False:
                return False
            b = _truth(right.test(env))
            return False if b is False else None if a is None or b is None else True

        return Node("bool", test, lambda n, a: f"({left.write(n, a)} and {right.write(n, a)})")

    def any_of(self, nodes: list[Node]) -> Node:
        def test(env: Env) -> bool | None:
            unknown = False
            for node in nodes:
                value = _truth(node.test(env))
                if value:
                    return True
                unknown |= value is None
            return None if unknown else False

        return Node("bool", test, lambda n, a: "(" + " or ".join(node.write(n, a) for node in nodes) + ")")

    def comparison(self, kind: type, left: Node, right: Node) -> Node:
        left, right = self.fit(left, right.kind), self.fit(right, left.kind)
        if not _comparable(left.kind, right.kind):
            raise self.wrong(f"{left.kind} and {right.kind} can't be compared")
        sign, compare = _COMPARE[kind]
        exact = "decimal" in (left.kind, right.kind)

        def test(env: Env) -> bool | None:
            a, b = left.test(env), right.test(env)
            return None if a is None or b is None else compare(a, b)

        def write(names: Names, alias: str) -> str:
            a, b = left.write(names, alias), right.write(names, alias)
            if exact and names.dialect == "sqlite":  # decimals are text there, ordered by the collation
                return f"(cast({a} as text) collate exact {sign} cast({b} as text))"
            return f"({a} {sign} {b})"

        return Node("bool", test, write)

    def fit(self, node: Node, other: str) -> Node:
        """A literal takes the type of what it is compared with."""
        if node.literal is None:
            return node
        value: Any
        try:
            if other == "decimal" and node.kind in ("number", "int"):
                value = Decimal(node.literal)
                return Node(
                    "decimal", lambda e: value, lambda n, a: f"'{value:f}'" if n.dialect == "sqlite" else f"({value:f})"
                )
            if other == "datetime" and node.kind == "literal":
                moment = datetime.fromisoformat(node.literal)
                value = datetime_text(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
                cast = "::timestamptz"
            elif other == "date" and node.kind == "literal":
                value, cast = datetime.fromisoformat(node.literal).date().isoformat(), "::date"
            else:
                return node
        except ValueError:
            raise self.wrong(f"{node.literal!r} is not a {other}") from None
        return Node(other, lambda e: value, lambda n, a: quote(value) + (cast if n.dialect == "postgres" else ""))

    def arithmetic(self, tree: Any) -> Node:
        left, right = self.node(tree.this), self.node(tree.expression)
        for side in (left, right):
            if side.kind not in _NUMBERS:
                raise self.wrong(f"arithmetic needs int or float, not {side.kind}")
        sign, act = _ARITHMETIC[type(tree)]
        divides = isinstance(tree, exp.Div | exp.Mod)
        floats = "float" in (left.kind, right.kind)
        whole = {left.kind, right.kind} == {"int"}
        if isinstance(tree, exp.Mod) and not whole:
            raise self.wrong("% needs int on both sides")

        def test(env: Env) -> Any:
            a, b = left.test(env), right.test(env)
            if a is None or b is None:
                return None
            return act(float(a), float(b)) if floats else act(a, b)

        def write(names: Names, alias: str) -> str:
            a, b = left.write(names, alias), right.write(names, alias)
            b = f"nullif({b}, 0)" if divides else b
            if names.dialect == "sqlite" or floats:
                return f"({a} {sign} {b})"
            exact = f"({a})::numeric {sign} {b}"  # a bigint would overflow, and fail every read through the view
            return f"trunc({exact})" if isinstance(tree, exp.Div) and whole else f"({exact})"

        return Node("float" if floats else "int" if whole else "number", test, write)

    def identity(self, tree: exp.Is) -> Node:
        inner, other = self.node(tree.this), tree.expression
        negate = bool(tree.args.get("negate"))
        if isinstance(other, exp.Null):
            word = "is not null" if negate else "is null"
            return Node(
                "bool", lambda e: (inner.test(e) is None) != negate, lambda n, a: f"({inner.write(n, a)} {word})"
            )
        if isinstance(other, exp.Boolean) and inner.kind == "bool":
            wanted, word = bool(other.this), "is not" if negate else "is"
            return Node("bool", lambda e: (_truth(inner.test(e)) is wanted) != negate,
                        lambda n, a: f"({inner.write(n, a)} {word} {'true' if wanted else 'false'})")  # fmt: skip
        raise self.wrong("`is` compares with null, true or false")

    def like(self, tree: exp.Like) -> Node:
        inner, pattern = self.node(tree.this), tree.expression
        if inner.kind not in _TEXTS or not isinstance(pattern, exp.Literal) or not pattern.is_string:
            raise self.wrong("`like` compares text with a pattern in quotes")
        signs = pattern.this
        regex = re.compile("".join({"%": ".*", "_": "."}.get(c, re.escape(c)) for c in signs), re.DOTALL)
        glob = "".join(
            {"%": "*", "_": "?"}.get(c, f"[{c}]" if c in "*?[" else c) for c in signs
        )  # like ignores case in SQLite
        return Node("bool", lambda e: _map(lambda v: regex.fullmatch(v) is not None, inner.test(e)),
                    lambda n, a: f"({inner.write(n, a)} " + (f"like {quote(signs)})" if n.dialect == "postgres" else f"glob {quote(glob)})"))  # fmt: skip

    def literal(self, tree: exp.Literal) -> Node:
        if tree.is_string:
            value: str = tree.this
            return Node("literal", lambda e: value, lambda n, a: quote(value), value)
        try:
            number: Any = int(tree.this)
            return Node("int", lambda e: number, lambda n, a: quote(number), tree.this)
        except ValueError:
            number = Decimal(tree.this)
            return Node("number", lambda e: number, lambda n, a: quote(number), tree.this)

    def me(self, name: str, attribute: str | None) -> Node:
        if name != "me":
            raise self.wrong(f"the only parameter is :me, not :{name}")
        key = attribute or "id"
        kind = {"id": "ref", "name": "literal"}.get(key, "attribute")
        return Node(kind, lambda e: e.me.get(key), lambda n, a: quote(n.me.get(key)))

    def path(self, parts: list[str]) -> Node:
        if len(parts) > 1 and parts[0] == self.entity.name and parts[0] not in self.entity.by_name:
            parts = parts[1:]
        entity, hops = self.entity, []
        for part in parts[:-1]:
            field = entity.by_name.get(part)
            if field is None or field.type != "ref":
                raise self.wrong(f"{entity.name}.{part} is not a reference")
            target = self.schema.by_name.get(field.target or "")
            if target is None:
                raise self.wrong(f"{entity.name}.{part} leads to {field.target!r}, which is not there")
            hops.append((part, target.name))
            entity = target
        last = parts[-1]
        if last == "id":
            kind = "ref"
        elif last in entity.by_name:
            kind = entity.by_name[last].type
        else:
            raise self.wrong(f"{entity.name!r} has no field {last!r}")
        if kind == "json":
            raise self.wrong(f"{last!r} is json, which predicates can't look into")

        def test(env: Env) -> Any:
            row: Mapping[str, Any] | None = env.row
            for part, name in hops:
                key = row.get(part) if row else None
                row = None if key is None else env.follow(name, key)
            value = row.get(last) if row else None
            return Decimal(value) if kind == "decimal" and value is not None else value

        def write(names: Names, alias: str) -> str:
            shown = f"{alias}.{parts[0]}"
            for depth, ((_, name), part) in enumerate(zip(hops, parts[1:], strict=True)):
                inner = f"{alias}_{depth}"
                shown = f"(select {inner}.{part} from {names.relation(name)} {inner} where {inner}.id = {shown})"
            return shown

        return Node(kind, test, write)


def _map(act: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else act(value)


def _negate(value: bool | None) -> bool | None:
    return None if value is None else not value


def _family(kind: str) -> str:
    return "number" if kind in (*_NUMBERS, "ref", "decimal") else "text" if kind in _TEXTS else kind


def _comparable(a: str, b: str) -> bool:
    if "null" in (a, b) or "attribute" in (a, b):
        return True
    if {a, b} == {"decimal", "float"}:
        return False
    return _family(a) == _family(b)


def same(a: Any, b: Any) -> bool:
    """Whether two stored values are the same value of the same type."""
    return a is b or (type(a) is type(b) and canonical(a) == canonical(b))
