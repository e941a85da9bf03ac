"""Exchange: rows to and from files people have: JSON lines, CSV, Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..errors import Invalid, NotFound, Unavailable
from .schema import Entity, Field

FORMATS = ("jsonl", "csv", "parquet")
ROWS = 1 << 60


def _format(path: Path, given: str | None) -> str:
    found = given or {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}.get(path.suffix)
    if found not in FORMATS:
        raise Invalid(f"{given or path.name!r} is no format to exchange rows in", hint=", ".join(FORMATS))
    return found


def export(
    layer: Any, entity: str, path: Path, format: str | None, branch: str, as_of: Any, principal: str | None
) -> int:
    """Write the rows a principal may read, in the order of their ids."""
    chosen = _format(path, format)
    found = layer.schema(branch, as_of).get(entity)
    rows = layer.query(
        f"select * from {found.name} order by id",
        branch=branch,
        as_of=as_of,
        principal=principal,
        limit=ROWS,
        timeout=min(3600, layer.reads.longest(layer.id_of(principal))),
    )
    names = list(rows[0]) if rows else ["id", *found.by_name]
    try:
        if chosen == "jsonl":
            with open(path, "w", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, default=_plain, ensure_ascii=False) + "\n")
        elif chosen == "csv":
            with open(path, "w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(names)
                for row in rows:
                    writer.writerow([_cell(found.by_name.get(name), row[name]) for name in names])
        else:
            _write_parquet(path, names, rows)
    except OSError as error:
        raise Unavailable(f"{path} can't be written: {error.strerror}") from None
    return len(rows)


def _plain(value: Any) -> str:
    return str(value) if isinstance(value, Decimal) else value.isoformat()


def _cell(f: Field | None, value: Any) -> str:
    """CSV has no null: an empty cell is null; an empty text, or one that begins with a quote, is written as JSON."""
    if value is None:
        return ""
    if (f is not None and f.type == "json") or value == "" or (isinstance(value, str) and value[0] == '"'):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    return _plain(value) if isinstance(value, date | datetime | Decimal) else str(value)


def load(
    layer: Any, entity: str, path: Path, format: str | None, branch: str, reason: str | None, principal: str | None
) -> int:
    """Add every row of a file as one tx; the file's ids are not taken over."""
    chosen = _format(path, format)
    found = layer.schema(branch).get(entity)
    if not path.is_file():
        raise NotFound(f"there is no file {path}")
    count = 0
    told = f"import {path.name}"
    with layer.transaction(reason or told, branch, principal, cause=told, timeout=3600) as tx:
        for line, row in enumerate(_rows(path, chosen, found), start=1):
            row.pop("id", None)
            try:
                tx.tx.insert(entity, row, loading=True)
            except Invalid as error:
                raise Invalid(f"{path.name}, row {line}: {error.message}", error.hint) from None
            count += 1
    return count


def _rows(path: Path, chosen: str, entity: Entity) -> Iterator[dict[str, Any]]:
    if chosen == "parquet":
        yield from _read_parquet(path)
        return
    with open(path, encoding="utf-8", newline="" if chosen == "csv" else None) as file:
        try:
            if chosen == "jsonl":
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        row = json.loads(line)
                        if not isinstance(row, dict):
                            raise Invalid(f"{path.name}, line {number} is not an object")
                        yield row
                return
            for number, cells in enumerate(csv.DictReader(file), start=1):
                if None in cells:
                    raise Invalid(f"{path.name}, row {number} has more cells than there are columns")
                yield {name: _value(entity.by_name.get(name), cell) for name, cell in cells.items() if name is not None}
        except (json.JSONDecodeError, UnicodeDecodeError, csv.Error) as error:
            raise Invalid(f"{path.name} can't be read as {chosen}: {error}") from None


def _value(f: Field | None, cell: Any) -> Any:
    """A CSV cell as its field's type."""
    if cell is None or cell == "":
        return None
    kind = f.type if f else "text"
    try:
        if kind in ("int", "ref"):
            return int(cell)
        if kind == "float":
            return float(cell)
        if kind == "bool":
            return {"true": True, "false": False, "1": True, "0": False}[cell.lower()]
        if kind == "json" or cell[0] == '"':
            return json.loads(cell)
    except (ValueError, KeyError):
        raise Invalid(f"{cell!r} is not {kind}") from None
    return cell


def _parquet() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Unavailable("Parquet needs an extra", hint="pip install livinglayer[parquet]") from None
    return pyarrow


def _write_parquet(path: Path, names: list[str], rows: list[dict[str, Any]]) -> None:
    arrow = _parquet()
    table = arrow.table(
        {name: [json.dumps(v) if isinstance(v := row[name], dict | list) else v for row in rows] for name in names}
    )
    arrow.parquet.write_table(table, path)


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    yield from _parquet().parquet.read_table(path).to_pylist()
