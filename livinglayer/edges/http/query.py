"""Query: reads of the native API: rows of one SELECT or of a projection, whole or in pages, in the form asked for."""

from __future__ import annotations

import base64
import binascii
import csv
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ... import typed
from ...errors import Invalid
from ...substrate.reads import clock
from ...typed import JSON, TYPED
from .asked import ARROW, CSV, NDJSON, Unacceptable

if TYPE_CHECKING:
    from ...layer import Layer

FORMS = (JSON, TYPED, NDJSON, CSV, ARROW)
PAGE = 10_000  # rows of a page at most
# Words of a statement whose answer may differ although no tx was: such an answer has no ETag.
RESTLESS = re.compile(
    r"\b(random|randomblob|now|current_\w+|date|time|datetime|julianday|strftime|unixepoch|age)\b", re.I
)
Moment = int | datetime | None
Rows = Callable[[Moment], tuple[list[dict[str, Any]], int]]


@dataclass(frozen=True)
class Page:
    """A part of an answer: so many rows after others, as of one tx."""

    size: int
    offset: int = 0
    tx: int | None = None

    def cursor(self, tx: int, request: str) -> str:
        """What asks for the page after this one."""
        return base64.urlsafe_b64encode(json.dumps([tx, self.offset + self.size, self.size, request]).encode()).decode()


def page_of(size: Any, cursor: Any, request: str) -> Page | None:
    """The page that is asked for; None for the whole answer."""
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= PAGE):
        raise Invalid(f"a page has 1 to {PAGE} rows, not {size!r:.60}")
    if cursor is None:
        return None if size is None else Page(size)
    try:
        tx, offset, kept, of = json.loads(base64.urlsafe_b64decode(str(cursor)[:1000].encode()))
        plain = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 53 for n in (tx, offset, kept))
    except (ValueError, TypeError, binascii.Error, RecursionError):
        plain, of = False, ""
    if not plain or of != request or not 1 <= kept <= PAGE:
        raise Invalid("the cursor is not one of this query's", hint="ask for the first page again, without it")
    return Page(size or kept, offset, tx)


def fingerprint(*asked: Any) -> str:
    """What tells one query from another, so that nobody goes on in the wrong one."""
    return sha256(typed.plain(asked)).hexdigest()[:16]


def paged(sql: str, page: Page | None) -> str:
    """A statement that gives one row more than the page has, if there is one."""
    if page is None:
        return sql
    return f"select * from (\n{sql.strip().rstrip(';')}\n) as page limit {page.size + 1} offset {page.offset}"


def answer(
    rows: list[dict[str, Any]], tx: int, form: str, page: Page | None, request: str, headers: Mapping[str, str]
) -> Response:
    """Rows in a form, with the tx they show and where they go on."""
    more = None
    if page is not None and len(rows) > page.size:
        rows, more = rows[: page.size], page.cursor(tx, request)
    told = {**headers, "layer-tx": str(tx)}
    if form in (JSON, TYPED):
        found: dict[str, Any] = {"rows": rows, "tx": tx}
        if page is not None:
            found["next"] = more
        return Response(typed.plain(found) if form == JSON else typed.dumps(found), 200, told, form)
    if more is not None:
        told["layer-next"] = more
    return Response(FORM[form](rows), 200, told, form)


def ndjson(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(typed.plain(row) + b"\n" for row in rows)


def commas(rows: list[dict[str, Any]]) -> bytes:
    """CSV with a line of names; JSON within a cell stays JSON, null is nothing."""
    out = io.StringIO()
    if rows:
        writer = csv.writer(out)
        writer.writerow(rows[0])
        writer.writerows([cell(value) for value in row.values()] for row in rows)
    return out.getvalue().encode("utf-8", "replace")


def cell(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | dict | list):
        return typed.plain(value).decode()
    return value if isinstance(value, int | float) else typed.text(value)


def arrow(rows: list[dict[str, Any]]) -> bytes:
    """A stream of Arrow's IPC format. A column with JSON in it is text, each value of it as JSON."""
    try:
        import pyarrow
    except ImportError:
        raise Unacceptable(
            "this server has no Arrow", hint="pip install 'livinglayer[parquet]', or ask for json, ndjson or csv"
        ) from None
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    for name, values in columns.items():
        if any(isinstance(value, dict | list) for value in values):
            columns[name] = [None if value is None else typed.plain(value).decode() for value in values]
    try:
        table = pyarrow.table(columns)
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise Unacceptable(f"Arrow can't hold these rows: {error}", hint="ask for json") from None
    out = io.BytesIO()
    with pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


FORM: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {NDJSON: ndjson, CSV: commas, ARROW: arrow}


def etag(layer: Layer, as_of: Moment, texts: str) -> str | None:
    """What changes when the answer to a statement may; None where the time alone can change it."""
    if isinstance(as_of, datetime) or RESTLESS.search(texts):
        return None
    with layer.engine.reading() as session:
        tx, epoch = clock(layer.engine, session)
        policy = layer.catalog.policy(session, layer.my_id, epoch)
    if policy.timed or any("now" in text for grant in policy.grants for text, _ in grant.where):
        return None
    return f'W/"{tx}"' if as_of is None else f'W/"{as_of}-{epoch}"'


def unchanged(tag: str | None, given: str | None) -> bool:
    """Whether If-None-Match names a tag."""
    if tag is None or given is None:
        return False
    return any(part.strip().removeprefix("W/") == tag.removeprefix("W/") for part in given.split(","))


CACHED = {"cache-control": "private, no-cache", "vary": "Authorization, X-API-Key, Cookie, Accept"}
