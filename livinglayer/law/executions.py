"""Executions: one run of code, what it may do while it runs, and the steps it took."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from ..errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound
from ..substrate.ledger import Execution, Tx, now
from ..substrate.narrow import canonical
from ..substrate.reads import clock
from ..substrate.schema import SYSTEM
from ..substrate.values import recordable
from . import secrets as vault
from .channel import not_found
from .draft import Draft
from .signature import dumps

STEPS = 10_000  # of one execution
KEPT = 1 << 30  # bytes of artifacts and answers that are kept of one execution
DEPTH = 16  # functions that call each other, one inside the other
INLINE = 4096  # bytes of output that a step holds itself; more is stored by content
LEDGER = frozenset(entity.name for entity in SYSTEM.entities if entity.kind == "ledger")
TRACE = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


_inner = threading.local()  # how deep the functions that a thread runs are in each other


def traceparent(given: str | None) -> str:
    """A span of our own in the trace that is given, or in a new one."""
    found = TRACE.fullmatch(given or "")
    trace = found[1] if found else secrets.token_hex(16)
    return f"00-{trace}-{secrets.token_hex(8)}-01"


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()


class Run:
    """An execution that is being run here: it answers what its box asks, and keeps the steps.

    `atomic`: what it changes is a draft until its end. Otherwise each change is a tx at once.
    """

    def __init__(
        self,
        layer: Any,
        execution: Execution,
        *,
        branch: str = "main",
        reads: Mapping[str, Any] | None = None,
        calls: Sequence[str] | None = (),
        readable: Collection[str] = (),
        projections: Sequence[str] | None = (),
        voucher: int | None = None,
        atomic: bool = True,
        narrowed: bool = True,
        about: Mapping[str, Any] = {},
    ) -> None:
        self.layer, self.execution, self.branch, self.atomic = layer, execution, branch, atomic
        self.reads = {} if reads is None and narrowed else reads
        self.calls, self.readable, self.projections = calls, readable, projections
        self.timeless = bool(LEDGER & set(self.reads or ()))  # it may ask what can't be asked as of a moment
        self.voucher = voucher  # who wrote down what it may do: whoever lists a projection must be let read it
        self.token = secrets.token_urlsafe(24)
        self.draft = Draft()
        self.steps: list[tuple[str, dict[str, Any], str]] = []
        self.flushed = 0
        self.before = 0  # steps that were recorded by whoever ran it earlier
        self.kept = 0  # bytes of content it has asked to be kept
        self.returned: dict[str, Any] | None = None
        self.conflicted = False
        self.open = True
        self.about: dict[str, Any] = dict(about)  # what /me tells beside the rest
        self.on_slice: Callable[[], str] | None = None
        self.tape: Any = None
        self.read: dict[str, str] = {}  # secrets it has read, which are not kept where it prints them

    # Steps

    def step(self, kind: str, **detail: Any) -> int:
        """Record an act; its number."""
        self._room(1)
        if (size := len(dumps(detail))) > INLINE:
            self._keep(size)
        self.steps.append((kind, detail, now()))
        return len(self.steps)

    def facts(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The steps that are not recorded yet, as rows."""
        first, self.flushed = self.flushed, len(self.steps)
        return [
            self.fact(n, *step)
            for n, step in enumerate(self.steps[first : self.flushed], start=self.before + first + 1)
        ]

    def fact(self, n: int, kind: str, detail: Mapping[str, Any], at: str) -> tuple[str, tuple[Any, ...]]:
        """A step as a row."""
        return "ledger_step", (self.execution.id, n, kind, _detail(detail), at)

    def output(self, stream: str, data: bytes, truncated: bool) -> None:
        """Keep what was printed: short text in the step, more by content."""
        if not data:
            return
        data = vault.hide(self.read, data)
        detail: dict[str, Any] = {"stream": stream, "bytes": len(data), "digest": digest(data)}
        if truncated:
            detail["truncated"] = True
        shown = _plain_text(data) if len(data) <= INLINE else None
        if shown is not None:
            detail["text"] = shown
        else:
            detail["content"] = self.store(data)
        self.steps.append(("output", detail, now()))

    def store(self, data: bytes, asked: bool = False) -> str:
        """Keep content that a step names; its digest. What the box `asked` for has a limit, and a step it goes with."""
        if asked:
            self._room(1)
            self._keep(len(data))
        found = digest(data)
        self.layer.engine.put_blob(found, data)
        return found

    def _keep(self, size: int) -> None:
        if self.kept + size > KEPT:
            raise LimitExceeded(f"no more than {KEPT} bytes are kept of one execution", hint="keep less")
        self.kept += size

    def _told(self, data: bytes) -> dict[str, Any]:
        """An answer that nobody could give again later: a step holds it itself while it is short."""
        kept = {"answer": data.decode()} if len(data) <= INLINE else {"content": self.store(data, asked=True)}
        return {"digest": digest(data), **kept}

    # What the box asks

    def answer(self, method: str, name: str, rest: str, given: Mapping[str, Any], body: bytes) -> Any:
        """Do what was asked through the channel, within what this execution may."""
        if not self.open:
            raise Denied("this execution is over", hint="LAYER_URL holds for one execution")
        act = getattr(self, f"_on_{name}", None) if name.isidentifier() else None
        if name == "openapi.json":
            from .openapi import document

            return document()
        if act is None:
            error = not_found(name)
            self.refuse(name, error, given, body)
            raise error
        start = time.perf_counter()
        before = len(self.steps)
        try:
            answer = act(_Given(name, given, rest, body))
        except LayerError as error:
            if isinstance(error, Conflict) and self.draft.first_read is not None:
                self.conflicted = True
            self.refuse(name, error, given, body)
            raise
        if len(self.steps) > before:
            self.steps[before][1].setdefault("ms", round((time.perf_counter() - start) * 1000, 2))
        return answer

    def refuse(self, name: str, error: LayerError, given: Mapping[str, Any], body: bytes = b"") -> None:
        """Record that something was asked for and not done."""
        if isinstance(error, Denied):
            self.layer.ledger.denied(self.execution, error, action=name)
        if self.before + len(self.steps) < STEPS:
            self.steps.append(("refusal", _refusal(name, given, body, error), now()))

    def _on_query(self, given: _Given) -> Any:
        sql, params, limit = given.text("sql"), given.get("params"), given.get("limit")
        most = self.layer.settings.query_rows
        most = most if limit is None else min(given.number("limit"), most)
        if len(self.draft):
            rows, tx = self._within(sql, params, most), None
        else:
            rows, tx = self.layer.reads.query_at(
                sql, params, self.branch, None, self.deciding, None, most, narrow=self.reads
            )
            if self.draft.first_read is None:
                self.draft.first_read = tx
        data = dumps(rows)
        again = tx is not None and not self.timeless
        kept = {"digest": digest(data)} if again else self._told(data)
        self.step("query", sql=sql, params=params, tx=tx, rows=len(rows), **kept)
        return _Raw(b'{"rows":' + data + b',"tx":' + str(tx or "null").encode() + b"}")

    @property
    def deciding(self) -> int:
        return self.execution.deciding

    def _within(self, sql: str, params: Any, most: int) -> list[dict[str, Any]]:
        """Rows as they would be after what has been asked for so far."""
        engine, settings = self.layer.engine, self.layer.settings

        def act(tx: Tx) -> Any:
            self.draft.apply(tx)
            deadline = time.monotonic() + settings.query_seconds
            return engine.inside(tx, sql, params, deadline, most, narrow=canonical(self.reads))

        return list(self.layer.ledger.rehearse(self.execution, self.branch, act))

    def _on_insert(self, given: _Given) -> Any:
        entity, values = given.text("entity"), given.get("values")
        rows = values if isinstance(values, list) else [values]
        if not all(isinstance(row, dict) for row in rows):
            raise Invalid(f"a row of {entity!r} is an object of its fields")
        self._room(len(rows))
        ids = list(self.layer.ledger.reserve(len(rows)))
        self._change([partial(_insert, entity, row, number) for row, number in zip(rows, ids, strict=True)])
        for row, number in zip(rows, ids, strict=True):
            self._mutated("insert", entity, number, row)
        return {"ids": ids} if isinstance(values, list) else {"id": ids[0]}

    def _on_update(self, given: _Given) -> Any:
        entity, number, expect = given.text("entity"), given.number("id"), given.optional_number("expect")
        values = given.get("values")
        if not isinstance(values, dict):
            raise Invalid(f"new values of {entity!r} are an object of fields")
        self._change([lambda tx: tx.update(entity, number, values, expect, self.draft.first_read)])
        self._mutated("update", entity, number, values)
        return {"ok": True}

    def _on_delete(self, given: _Given) -> Any:
        entity, number, expect = given.text("entity"), given.number("id"), given.optional_number("expect")
        self._change([lambda tx: tx.delete(entity, number, expect, self.draft.first_read)])
        self._mutated("delete", entity, number, None)
        return {"ok": True}

    def _on_upsert(self, given: _Given) -> Any:
        entity, values, on = given.text("entity"), given.get("values"), given.get("on")
        if not isinstance(values, dict) or not isinstance(on, list) or not all(isinstance(one, str) for one in on):
            raise Invalid("upsert takes an object of fields, and in `on` the names of those that tell rows apart")
        if len(set(on)) < len(on):
            raise Invalid("upsert has a field twice in `on`")
        [number], found = self.layer.ledger.reserve(1), list[int]()
        self._change([partial(_upsert, entity, values, on, number, found)])
        self._mutated("upsert", entity, found[0] if found else None, values)
        return {"id": found[0] if found else None}

    def _room(self, count: int) -> None:
        """Refuses what there would be no steps for."""
        if self.before + len(self.steps) + count > STEPS:
            raise LimitExceeded(f"an execution takes at most {STEPS} steps")

    def _change(self, changes: Sequence[Callable[[Tx], Any]]) -> None:
        ledger = self.layer.ledger
        self._room(len(changes))
        if self.atomic:
            self.draft.add(changes, lambda act: ledger.rehearse(self.execution, self.branch, act))
        else:
            ledger.write(self.execution, self.branch, lambda tx: [change(tx) for change in changes])

    def _mutated(self, do: str, entity: str, number: int | None, values: Any) -> None:
        self.step(
            "mutation", do=do, entity=entity, id=number, fields=sorted(values or ()), digest=digest(dumps(values))
        )

    def _on_call(self, given: _Given) -> Any:
        return _Raw(self.called(given.text("function"), given.get("arguments") or {}))

    def called(self, name: str, arguments: Any, key: str | None = None) -> bytes:
        """The answer to a call of a function this execution may call; a second one with the same `key` runs nothing."""
        from .verbs import VERBS, call

        if name in VERBS or (self.calls is not None and name not in self.calls):
            raise Denied(f"this execution may not call {name!r}", action="call", resource=f"function:{name}")
        self._room(1)
        depth = getattr(_inner, "depth", 0)
        if depth >= DEPTH:
            raise LimitExceeded(f"functions call each other at most {DEPTH} deep", hint="a loop, or a queue of rows")
        _inner.depth = depth + 1
        try:
            outcome = call(
                self.layer,
                name,
                arguments,
                principal=self.execution.principal,
                branch=self.branch,
                parent=self.execution.id,
                trace=self.execution.trace,
                contract=(self.execution.call or {}).get("contract"),
                key=key,
            )
        finally:
            _inner.depth = depth
        data = dumps(outcome)
        with self.layer.engine.reading() as session:
            tx = clock(self.layer.engine, session)[0]
        self.step("call", function=name, asked=digest(dumps(arguments)), tx=tx, **self._told(data))
        return b'{"result":' + data + b"}"

    def _on_secret(self, given: _Given) -> Any:
        name = given.text("name")
        opened = vault.readable(
            self.layer, name, self.execution, self.readable, principal=self.deciding, branch=self.branch
        )
        self.read |= opened
        self.step("secret", name=name, use="read")
        return {"value": opened[name]}

    def _on_emit(self, given: _Given) -> Any:
        name, data = given.text("name"), given.get("data")
        if len(name) > 1000:
            raise Invalid("the name of an event is at most 1000 characters")
        if len(dumps(data)) > 65536:
            raise LimitExceeded("an event is at most 64 KiB", hint="keep large content as an artifact")
        self.step("emit", name=name, data=data)
        return {"ok": True}

    def _on_artifact(self, given: _Given) -> Any:
        name = given.rest or given.text("name")
        if name.startswith("/") or ".." in name.split("/") or "\0" in name or len(name) > 1000:
            raise Invalid(f"{name!r} is not a name for an artifact", hint="a relative path")
        found = self.store(given.body, asked=True)
        self.execution.contents.add(found)
        self.step("artifact", name=name, digest=found, content=found, bytes=len(given.body))
        return {"digest": found, "bytes": len(given.body)}

    def _on_projection(self, given: _Given) -> Any:
        from ..projection.query import may_read, read_from

        name, arguments = given.rest or given.text("name"), given.get("arguments") or {}
        if self.projections is not None and name not in self.projections:
            raise NotFound(f"there is no projection {name!r}")
        granted = self.voucher is not None and may_read(self.layer, self.voucher, name, self.branch)
        rows, tx, source = read_from(
            self.layer, name, arguments, principal=self.deciding, branch=self.branch, granted=granted
        )
        told = {} if source is None else {"remote": source.told()}
        if self.draft.first_read is None:
            self.draft.first_read = tx
        data = dumps(rows)
        self.step("query", projection=name, params=arguments, tx=tx, rows=len(rows), **told, **self._told(data))
        return _Raw(b'{"rows":' + data + b',"tx":' + str(tx).encode() + b"}")

    def _on_slice(self, given: _Given) -> Any:
        if self.on_slice is None:
            raise NotFound("this box has no local slice", hint="its blueprint says whether it has one")
        return {"path": self.on_slice()}

    def _on_me(self, given: _Given) -> Any:
        return {
            "execution": self.execution.id,
            "principal": self.layer.name_of(self.execution.principal),
            "branch": self.branch,
            "trace": self.execution.trace,
            "reads": None if self.reads is None else sorted(self.reads),
            "scope": None if self.execution.scope.entities is None else dict(self.execution.scope.entities),
            "functions": None if self.calls is None else list(self.calls),
            "steps": self.before + len(self.steps),
            **self.about,
        }

    def _on_return(self, given: _Given) -> Any:
        if self.returned is not None:
            raise Conflict("this execution has returned already")
        self.returned = {key: given.get(key) for key in ("value", "error") if given.has(key)}
        self.tape = given.get("tape")
        return {"ok": True}


_UNKEPT = re.compile(r"\\u0000|\\ud[89a-f]|NaN|Infinity|[0-9]{300}|\[{90}")


def _detail(detail: Mapping[str, Any]) -> str:
    """A step's detail as both engines can keep and show it, whatever a box has put into it."""
    text = dumps(detail).decode()
    return dumps(recordable(detail)).decode() if _UNKEPT.search(text) else text


def _insert(entity: str, row: Mapping[str, Any], number: int, tx: Tx) -> int:
    return tx.insert(entity, row, number=number)


def _upsert(entity: str, row: Mapping[str, Any], on: Sequence[str], number: int, told: list[int], tx: Tx) -> None:
    """Once an id was told, another one is a conflict."""
    found = tx.upsert(entity, row, on, number=number)
    if told and told[0] != found:
        raise Conflict(f"{entity}/{found} was added meanwhile", hint="read it again and decide anew")
    told[:] = [found]


def _refusal(name: str, given: Mapping[str, Any], body: bytes, error: LayerError) -> dict[str, Any]:
    said = {"do": name, "code": error.code, "message": error.message[:2000], "asked": asked_for(given, body)}
    more = {"hint": error.hint, "rows": error.details.get("rows")}
    return said | {key: value for key, value in more.items() if value}


def asked_for(given: Mapping[str, Any], body: bytes) -> str:
    """What was asked, to be compared."""
    return digest(dumps(given) + b"\n" + body if given else body)


class _Raw(bytes):
    """An answer that is JSON already."""


class _Given:
    """What came with a request, each part checked when it is taken."""

    def __init__(self, name: str, given: Mapping[str, Any], rest: str, body: bytes) -> None:
        self.name, self._given, self.rest, self.body = name, given, rest, body

    def has(self, key: str) -> bool:
        return key in self._given

    def get(self, key: str) -> Any:
        return self._given.get(key)

    def text(self, key: str) -> str:
        value = self._given.get(key)
        if not isinstance(value, str) or not value:
            raise Invalid(f"{self.name} needs {key!r}, a text")
        return value

    def number(self, key: str) -> int:
        value = self.optional_number(key)
        if value is None:
            raise Invalid(f"{self.name} needs {key!r}, a number")
        return value

    def optional_number(self, key: str) -> int | None:
        value = self._given.get(key)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            return int(value)
        if value is not None and type(value) is not int:
            raise Invalid(f"{key!r} is a whole number, not {value!r:.60}")
        return value


def _plain_text(data: bytes) -> str | None:
    try:
        found = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in found else found
