"""Remote: a layer behind a server, with the surface of the embedded one: `livinglayer.connect(url, token)`."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from . import errors, typed
from .errors import Invalid, LayerError, Unauthenticated, Unavailable
from .typed import JSON, TYPED

if TYPE_CHECKING:
    from .substrate.branches import Merge
    from .substrate.permissions import Decision
    from .substrate.schema import Schema
    from .substrate.verify import Report

Moment = int | datetime | None
Seen = Sequence[tuple[str, int, int]]
KINDS: dict[str, type[LayerError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LayerError)
}


class Failed(LayerError):
    """The function or program itself failed."""

    code, status, exit_code = "failed", 422, 10


KINDS["failed"] = Failed


def connect(url: str, token: str | None = None, *, timeout: float = 300.0) -> RemoteLayer:
    """The layer that a server has at a URL, as the principal whose token is given or in LAYER_TOKEN."""
    return RemoteLayer(url, token or os.environ.get("LAYER_TOKEN"), timeout)


@dataclass(frozen=True)
class Event:
    """One event of a stream: rows of a query or projection, or one change of an entity."""

    kind: str  # rows or change
    data: Any
    tx: int | None  # what `since` takes to go on after it


class RemoteLayer:
    """A handle on a layer behind a server. Threads may share it: each has a connection of its own."""

    def __init__(self, url: str, token: str | None, timeout: float = 300.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise Invalid(f"{url!r:.120} is not the URL of a server", hint="e.g. http://127.0.0.1:7700")
        if not token:
            raise Unauthenticated("there is no token for this server", hint="connect(url, token), or LAYER_TOKEN")
        self.url, self._token, self._timeout = url.rstrip("/"), token, timeout
        self._parts, self._base = parts, parts.path.rstrip("/")
        self._local = threading.local()
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self.tx = 0  # the last one that an answer told of
        self.id = str(self._get("me")["layer"])

    # Asking

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if found is None:
            found = self._local.connection = self._dial(self._timeout)
        return found

    def _dial(self, timeout: float | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        made = kind(self._parts.hostname, self._parts.port, timeout=timeout)
        with self._lock:
            self._open.add(made)
        return made

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)
        if getattr(self._local, "connection", None) is connection:
            self._local.connection = None

    def _ask(
        self, method: str, path: str, given: Mapping[str, Any], data: bytes | None = None, safe: bool = True, **headers: str
    ) -> tuple[http.client.HTTPResponse, bytes]:  # fmt: skip
        """One request. A kept connection that the server has closed is made anew, where asking twice does no harm."""
        words = {k: word(v) for k, v in given.items() if v is not None}
        target = f"{self._base}/api/{path}" + (f"?{urlencode(words)}" if words else "")
        headers = {"Authorization": f"Bearer {self._token}", "Accept": TYPED, **headers}
        for attempt in (1, 2):
            connection = self._connection()
            fresh = connection.sock is None
            try:
                connection.request(method, target, data, headers)
                answer = connection.getresponse()
                found = answer.read()
            except (OSError, http.client.HTTPException) as error:
                self._drop(connection)
                lost = isinstance(error, http.client.RemoteDisconnected | BrokenPipeError | ConnectionResetError)
                if attempt == 1 and not fresh and lost and safe:
                    continue
                raise Unavailable(
                    f"the server at {self.url} can't be reached: {error}", hint="does `layer up` run? With a key= it is safe to try again"
                ) from None  # fmt: skip
            if answer.will_close:
                self._drop(connection)
            if number := answer.getheader("layer-tx"):
                self.tx = int(number)
            if answer.status >= 300:
                raise refusal(answer.status, found)
            return answer, found
        raise AssertionError

    def _get(self, path: str, **given: Any) -> Any:
        return typed.loads(self._ask("GET", path, given)[1], typed=True)

    def _post(
        self, path: str, body: Mapping[str, Any], given: Mapping[str, Any], safe: bool = True, **headers: str
    ) -> Any:
        data = typed.dumps(body)
        return typed.loads(
            self._ask("POST", path, given, data, safe, **{"Content-Type": TYPED, **headers})[1], typed=True
        )

    def _do(self, verb: str, arguments: Mapping[str, Any], **given: Any) -> Any:
        """Do what a verb does. Without a key it is asked once: it may have been done before a connection broke."""
        key = given.pop("key", None)
        headers = {} if key is None else {"Idempotency-Key": header("key", key)}
        if (trace := given.pop("trace", None)) is not None:
            headers["traceparent"] = header("trace", trace)
        sent = {name: value for name, value in arguments.items() if value is not None}
        return self._post(verb, sent, given, safe=key is not None, **headers)["result"]

    # Who acts

    @property
    def me(self) -> str:
        """The name of the principal this handle acts as."""
        return str(self._get("me")["name"])

    def call(
        self, verb: str, arguments: Mapping[str, Any] | None = None, *, principal: str | None = None, branch: str = "main", key: str | None = None,
        reason: str | None = None, trace: str | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        """Through the one door: what a verb or a function gives, recorded. Arguments as a dict, or as keywords."""
        given = {**(arguments or {}), **more}
        about = {"principal": principal, "branch": branch, "reason": reason, "key": key, "trace": trace}
        try:
            return self._do(quote(verb, safe=""), given, **about)
        except errors.NotFound as error:
            if not error.message.startswith("there is nothing at "):
                raise
        return self._do(f"function/{quote(verb, safe='')}", given, **about)

    # Writes

    def insert(
        self, entity: str, values: Any, *, branch: str = "main", reason: str | None = None, cause: str | None = None, key: str | None = None,
        principal: str | None = None, seen: Seen = (),
    ) -> Any:  # fmt: skip
        """Add a row and return its id; a list of rows is one tx and gives a list of ids."""
        if isinstance(values, str | bytes) or not isinstance(values, Mapping | Sequence):
            raise Invalid(f"rows of {entity!r} are a dict or a list of dicts, not {type(values).__name__}")
        sent = self._kept(values) if isinstance(values, Mapping) else [self._kept(row) for row in values]
        about = {"branch": branch, "reason": reason, "key": key, "principal": principal}
        return self._do(
            "row.insert", {"entity": entity, "values": sent, "cause": cause, "seen": list(seen) or None}, **about
        )

    def update(
        self, entity: str, id: int, values: Mapping[str, Any], *, expect: int | None = None, branch: str = "main", reason: str | None = None,
        cause: str | None = None, key: str | None = None, principal: str | None = None, seen: Seen = (),
    ) -> int:  # fmt: skip
        """Set fields of a row and return the tx, which is the row's new version."""
        about = {"branch": branch, "reason": reason, "key": key, "principal": principal}
        sent = {
            "entity": entity,
            "id": id,
            "values": self._kept(values),
            "expect": expect,
            "cause": cause,
            "seen": list(seen) or None,
        }
        return int(self._do("row.update", sent, **about))

    def delete(
        self, entity: str, id: int, *, expect: int | None = None, branch: str = "main", reason: str | None = None, cause: str | None = None,
        key: str | None = None, principal: str | None = None, seen: Seen = (),
    ) -> int:  # fmt: skip
        """Remove a row, and what cascades from it; its history stays. Returns the tx."""
        about = {"branch": branch, "reason": reason, "key": key, "principal": principal}
        sent = {"entity": entity, "id": id, "expect": expect, "cause": cause, "seen": list(seen) or None}
        return int(self._do("row.delete", sent, **about))

    def upsert(
        self, entity: str, values: Mapping[str, Any], *, on: Sequence[str], branch: str = "main", reason: str | None = None, cause: str | None = None,
        key: str | None = None, principal: str | None = None, seen: Seen = (),
    ) -> int:  # fmt: skip
        """Update the row with these values in the fields `on`, or add one; returns its id."""
        about = {"branch": branch, "reason": reason, "key": key, "principal": principal}
        sent = {
            "entity": entity,
            "values": self._kept(values),
            "on": list(on),
            "cause": cause,
            "seen": list(seen) or None,
        }
        return int(self._do("row.upsert", sent, **about))

    def _kept(self, values: Mapping[str, Any]) -> Any:
        """Values with content stored first, of which a row has the hash."""
        if not isinstance(values, Mapping):
            return values
        return {k: self.store(v) if isinstance(v, bytes | bytearray) else v for k, v in values.items()}

    @contextmanager
    def transaction(
        self, reason: str | None = None, branch: str = "main", principal: str | None = None, *, cause: str | None = None, key: str | None = None,
        seen: Seen = (),
    ) -> Iterator[Batch]:  # fmt: skip
        """Many changes as one tx, sent when the block ends. Nothing is known of them before: their ids are in `ids` after it."""
        batch = Batch(self)
        yield batch
        if batch.changes:
            about = {"branch": branch, "reason": reason, "key": key, "principal": principal}
            sent = {"changes": batch.changes, "cause": cause, "seen": list(seen) or None}
            batch.ids = self._do("row.change", sent, **about)["ids"]
            batch.number = self.tx

    def execution(self, *_: Any, **__: Any) -> Any:
        """There is none over HTTP: every request is an execution of its own; a token's scope or a principal's permissions narrow it."""
        raise Invalid(
            "a scope of one's own needs the embedded layer",
            hint="a token with a scope, or a principal that may less: docs/client.md",
        )

    # Reads

    def query(
        self, sql: str, params: Mapping[str, Any] | Sequence[Any] | None = None, branch: str = "main", as_of: Moment = None, principal: str | None = None,
        timeout: float | None = None, limit: int | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Rows of one SELECT over entity names, as a branch was at a moment and as a principal may see it."""
        rows: list[dict[str, Any]] = self._query(sql, params, branch, as_of, principal, timeout=timeout, limit=limit)[
            "rows"
        ]
        return rows

    def _query(self, sql: str, params: Any, branch: str, as_of: Moment, principal: str | None, **more: Any) -> Any:
        asked = {"sql": sql, "params": params, "branch": branch, "as_of": as_of, "principal": principal, **more}
        return self._post("query", {k: v for k, v in asked.items() if v is not None}, {})

    def pages(
        self, sql: str, params: Mapping[str, Any] | Sequence[Any] | None = None, branch: str = "main", as_of: Moment = None, principal: str | None = None,
        size: int = 1000,
    ) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
        """The answer in pages, all of one moment: for more rows than fit in one answer."""
        cursor = None
        while True:
            found = self._query(sql, params, branch, as_of, principal, page=size, cursor=cursor)
            yield found["rows"]
            if (cursor := found["next"]) is None:
                return

    def projection(
        self, name: str, arguments: Mapping[str, Any] | None = None, *, branch: str = "main", as_of: Moment = None, principal: str | None = None,
        **more: Any,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Rows of a named projection that a principal may read. Arguments as a dict, or as keywords."""
        about = {"branch": branch, "as_of": as_of, "principal": principal}
        rows: list[dict[str, Any]] = self._post(
            f"projection/{quote(name, safe='')}", {**(arguments or {}), **more}, about
        )["rows"]
        return rows

    def live(
        self, sql: str | None = None, params: Mapping[str, Any] | None = None, *, projection: str | None = None, arguments: Mapping[str, Any] | None = None,
        entity: str | None = None, id: int | None = None, branch: str = "main", since: int | None = None,
    ) -> Iterator[Event]:  # fmt: skip
        """What a query or projection shows, now and whenever a tx changes it; or the changes of an entity. Goes on over lost connections."""
        given = {
            "sql": sql, "params": None if params is None else typed.plain(params).decode(), "projection": projection,
            "arguments": None if arguments is None else typed.plain(arguments).decode(), "entity": entity, "id": id, "branch": branch, "format": "typed",
        }  # fmt: skip
        words = urlencode({k: word(v) for k, v in given.items() if v is not None})
        while True:
            connection = self._dial(60.0)
            try:
                headers = {"Authorization": f"Bearer {self._token}", "Accept": "text/event-stream"}
                if since is not None:
                    headers["Last-Event-ID"] = str(since)
                connection.request("GET", f"{self._base}/api/live?{words}", None, headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise refusal(answer.status, answer.read())
                for event in events(answer):
                    since = event.tx if event.tx is not None else since
                    yield event
            except (OSError, http.client.HTTPException):
                pass
            finally:
                self._drop(connection)
            time.sleep(1.0)

    def why(
        self, subject: str | int, *, impact: bool = False, branch: str = "main", as_of: Moment = None, principal: str | None = None, depth: int = 32
    ) -> Any:  # fmt: skip
        """What led to ticket/7, ticket/7.status, tx/41 or an execution by its number: a tree; with `impact` what came of it."""
        from .law.tree import Node

        def node(found: Any) -> Node:
            return Node(found["kind"], found["data"], tuple(node(link) for link in found["links"]))

        about = {"branch": branch, "as_of": as_of, "principal": principal}
        return node(self._get("why", subject=subject, impact=impact, depth=depth, **about)["tree"])

    def schema(self, branch: str = "main", as_of: Moment = None) -> Schema:
        """The entities and fields of a branch, those this handle's principal may read something of."""
        from .substrate.schema import Entity, Field, Schema

        def entity(found: dict[str, Any]) -> Entity:
            fields = tuple(Field(**each) for each in found.pop("fields"))
            uniques = tuple(tuple(each) for each in found.pop("uniques"))
            return Entity(**found, uniques=uniques, fields=fields)

        return Schema(tuple(map(entity, self._get("schema", branch=branch, as_of=as_of)["entities"])))

    def row(
        self, entity: str, id: int, *, branch: str = "main", as_of: Moment = None, principal: str | None = None
    ) -> tuple[dict[str, Any], int]:
        """One row, and its version: what `expect` takes."""
        found = self._get(f"row/{quote(entity, safe='')}/{id}", branch=branch, as_of=as_of, principal=principal)
        return found["row"], found["tx"]

    def history(
        self, entity: str, id: int, *, branch: str = "main", as_of: Moment = None, principal: str | None = None
    ) -> list[dict[str, Any]]:
        """Every version of a row, oldest first."""
        rows: list[dict[str, Any]] = self._get(
            f"history/{quote(entity, safe='')}/{id}", branch=branch, as_of=as_of, principal=principal
        )["rows"]
        return rows

    # Schema

    def define(
        self, entity: str, fields: Mapping[str, Any], *, unique: Sequence[Sequence[str]] = (), description: str | None = None, annotations: Any = None,
        branch: str = "main", reason: str | None = None, principal: str | None = None,
    ) -> int:  # fmt: skip
        """Make an entity with its fields, or add fields to one; returns its id."""
        sent = {
            "name": entity,
            "fields": fields,
            "unique": list(unique) or None,
            "description": description,
            "annotations": annotations,
        }
        return int(self._do("entity.define", sent, branch=branch, reason=reason, principal=principal))

    def alter(
        self, entity: str, *, add: Mapping[str, Any] | None = None, rename: Mapping[str, str] | None = None, retype: Mapping[str, Any] | None = None,
        drop: Sequence[str] = (), change: Mapping[str, Mapping[str, Any]] | None = None, name: str | None = None, description: str | None = None,
        branch: str = "main", reason: str | None = None, principal: str | None = None,
    ) -> None:  # fmt: skip
        """Change an entity; stored rows are not rewritten."""
        sent = {
            "name": entity, "add": add, "rename": rename, "retype": retype, "drop": list(drop) or None, "change": change, "new_name": name,
            "description": description,
        }  # fmt: skip
        self._do("entity.alter", sent, branch=branch, reason=reason, principal=principal)

    def backfill(
        self, entity: str, field: str, *, branch: str = "main", reason: str | None = None, principal: str | None = None
    ) -> dict[str, int]:
        """Finish a retype: convert the rows that still hold the old type; says how many, and how many could not be."""
        sent = {"name": entity, "field": field}
        found: dict[str, int] = self._do("entity.backfill", sent, branch=branch, reason=reason, principal=principal)
        return found

    def drop(
        self, entity: str, *, branch: str = "main", reason: str | None = None, principal: str | None = None
    ) -> None:
        """Take an entity out of the schema; its history stays."""
        self._do("entity.drop", {"name": entity}, branch=branch, reason=reason, principal=principal)

    # Branches

    def fork(
        self, name: str, source: str = "main", slice: Mapping[str, str | None] | None = None, as_of: Moment = None, *, reason: str | None = None,
        principal: str | None = None,
    ) -> int:  # fmt: skip
        """A new branch of everything, or of a slice; costs one row."""
        sent = {"name": name, "source": source, "slice": slice, "as_of": as_of}
        return int(self._do("branch.fork", sent, reason=reason, principal=principal))

    def diff(self, branch: str, target: str | None = None, *, principal: str | None = None) -> list[dict[str, Any]]:
        """What a branch changed since its fork or last merge, by row and field."""
        changes: list[dict[str, Any]] = self._get("diff", branch=branch, target=target, principal=principal)["changes"]
        return changes

    def merge(
        self, branch: str, target: str | None = None, *, preview: bool = False, reason: str | None = None, principal: str | None = None
    ) -> Merge:  # fmt: skip
        """Bring a branch's changes to its parent; with conflicts nothing is applied and they become rows."""
        from .substrate.branches import Merge

        sent = {"name": branch, "target": target, "preview": preview}
        return Merge(**self._do("branch.merge", sent, reason=reason, principal=principal))

    def conflicts(self, branch: str | None = None) -> list[dict[str, Any]]:
        """The open conflicts."""
        found: list[dict[str, Any]] = self._get("conflicts", branch=branch)["conflicts"]
        return found

    def resolve(
        self, conflict: int | Mapping[str, Any], value: Any = None, *, take: str | None = None, reason: str | None = None, principal: str | None = None
    ) -> None:  # fmt: skip
        """Say what a conflict's value shall be (or take="ours"|"theirs"); the next merge uses it."""
        number = conflict["id"] if isinstance(conflict, Mapping) else conflict
        sent = {"id": number, "value": value, "take": take}
        self._do("conflict.resolve", sent, reason=reason, principal=principal)

    def discard(self, branch: str, *, reason: str | None = None, principal: str | None = None) -> None:
        """Close a branch; its name is free again, its history stays."""
        self._do("branch.discard", {"name": branch}, reason=reason, principal=principal)

    # Authority

    def principal(
        self, name: str, kind: str | None = None, attributes: Mapping[str, Any] | None = None, roles: Sequence[str] | None = None, *, on: str = "main"
    ) -> int:  # fmt: skip
        """Make a principal, or change what is given of it; returns its id."""
        sent = {"name": name, "kind": kind, "attributes": attributes, "roles": None if roles is None else list(roles)}
        return int(self._do("principal.define", sent, branch=on))

    def token(self, principal: str, name: str = "key") -> str:
        """A new token for a principal, told this once."""
        return str(self._do("token.create", {"principal": principal, "name": name})["token"])

    def grant(
        self, principal: str, action: str, resource: str, *, where: str | None = None, fields: Sequence[str] | None = None, branch: str | None = None,
        effect: str = "allow", reason: str | None = None, valid_from: datetime | None = None, valid_to: datetime | None = None, delegable: bool = False,
        on: str = "main", by: str | None = None,
    ) -> int:  # fmt: skip
        """Allow (or deny) an action; returns the permission's id."""
        sent = {
            "principal": principal, "action": action, "resource": resource, "where": where, "fields": None if fields is None else list(fields),
            "on_branch": branch, "effect": effect, "delegable": delegable, "valid_from": valid_from, "valid_to": valid_to,
        }  # fmt: skip
        return int(self._do("permission.grant", sent, branch=on, reason=reason, principal=by))

    def revoke(self, permission: int, *, reason: str | None = None, on: str = "main", by: str | None = None) -> None:
        """Take a permission back, and what was delegated from it."""
        self._do("permission.revoke", {"id": permission}, branch=on, reason=reason, principal=by)

    def can(
        self, principal: str, action: str, resource: str, *, branch: str = "main", as_of: Moment = None
    ) -> Decision:
        """Whether a principal may do something, with the permission rows that decide: now, or as they were."""
        from .substrate.permissions import Decision

        about = {"action": action, "resource": resource, "branch": branch, "as_of": as_of}
        return Decision(**self._get("can", principal=principal, **about))

    # Trust and content

    def verify(self) -> Report:
        """Everything read again by the server, and every hash recomputed; for owners."""
        from .substrate.verify import Report

        found = self._get("verify")
        return Report(**{**found, "problems": [(tx, text) for tx, text in found["problems"]]})

    def prune(self, before: int | datetime, *, reason: str | None = None) -> int:
        """Forget closed versions that ended before a moment; returns how many."""
        return int(self._do("history.prune", {"before": before}, reason=reason))

    def blob(self, digest: str) -> bytes:
        """The content of a file field of a row that this handle's principal may read."""
        return self._ask("GET", f"blob/{quote(str(digest), safe='')}", {}, Accept="*/*")[1]

    def store(self, content: bytes | bytearray) -> str:
        """Store content for a file field: its hash, which a row then names."""
        kind = {"Content-Type": "application/octet-stream", "Accept": JSON}
        digest: str = json.loads(self._ask("POST", "blob", {}, bytes(content), True, **kind)[1])["digest"]
        return digest

    def backup(self, destination: str | os.PathLike[str]) -> Path:
        """There is none over HTTP: a backup is made where the database is."""
        raise Invalid("a backup is made on the machine of the layer", hint="layer backup DIRECTORY")

    def close(self) -> None:
        """Let go of every connection."""
        with self._lock:
            opened, self._open = self._open, set()
        for connection in opened:
            connection.close()

    def __enter__(self) -> RemoteLayer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Batch:
    """Changes that become one tx when the block ends."""

    def __init__(self, layer: RemoteLayer) -> None:
        self._layer = layer
        self.changes: list[dict[str, Any]] = []
        self.ids: list[int] = []
        self.number = 0

    def insert(self, entity: str, values: Any) -> None:
        """Add a row, or each of a list."""
        for row in [values] if isinstance(values, Mapping) else values:
            self.changes.append({"do": "insert", "entity": entity, "values": self._layer._kept(row)})

    def update(self, entity: str, id: int, values: Mapping[str, Any], expect: int | None = None) -> None:
        """Set fields of a row."""
        self.changes.append(
            {"do": "update", "entity": entity, "id": id, "values": self._layer._kept(values), "expect": expect}
        )

    def delete(self, entity: str, id: int, expect: int | None = None) -> None:
        """Remove a row."""
        self.changes.append({"do": "delete", "entity": entity, "id": id, "expect": expect})

    def upsert(self, entity: str, values: Mapping[str, Any], on: Sequence[str]) -> None:
        """Update or add a row."""
        self.changes.append({"do": "upsert", "entity": entity, "values": self._layer._kept(values), "on": list(on)})

    def query(self, *_: Any, **__: Any) -> Any:
        """Not here: nothing is sent before the block ends."""
        raise Invalid(
            "a transaction over HTTP does not read: it is sent when it ends",
            hint="query before it and give `expect` or `seen`",
        )


def word(value: Any) -> str:
    """A parameter of a query string."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, datetime | date) else str(value)


def header(name: str, value: str) -> str:
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        raise Invalid(f"{name} is printable ASCII over HTTP, not {value!r:.60}")
    return value


def refusal(status: int, data: bytes) -> LayerError:
    """The error that a server told of, as the embedded layer raises it."""
    try:
        told = json.loads(data)["error"]
        kind = KINDS.get(told["code"], LayerError)
        more = {name: told[name] for name in ("rows", "execution") if name in told}
        return kind(told["message"], told.get("hint"), **more)
    except (ValueError, KeyError, TypeError):
        return Unavailable(f"what answers there is no layer: HTTP {status}", hint="is it the URL of `layer up`?")


def events(answer: http.client.HTTPResponse) -> Iterator[Event]:
    """The events of a stream; an error ends it."""
    kind, number, data = "", None, b""
    for raw in answer:
        line = raw.rstrip(b"\r\n")
        if line.startswith(b"event: "):
            kind = line[7:].decode()
        elif line.startswith(b"id: "):
            number = int(line[4:])
        elif line.startswith(b"data: "):
            data = line[6:]
        elif not line and kind:
            if kind == "error":
                raise refusal(400, data)
            yield Event(kind, typed.loads(data, typed=True), number)
            kind, number, data = "", None, b""
