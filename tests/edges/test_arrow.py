"""Answers in Arrow's format, by a server that has pyarrow: each type comes back as it was."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import httpx
import pytest
from adapters import environments
from edges.serving import Server

FIELDS = {
    "whole": "int", "real": "float", "price": "decimal", "name": "text", "fine": "bool", "day": "date", "at": "datetime", "more": "json",
    "never": "text",
}  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {
        "whole": 2**53 + 1, "real": 0.1, "price": Decimal("12345678901234567890.10"), "name": "ä\n\"", "fine": True, "day": date(2026, 1, 31),
        "at": datetime(2026, 1, 31, 12, 0, 0, 123456, UTC), "more": {"a": [1, None]},
    },
    {"whole": -1, "real": 1e300, "price": Decimal("-0.5"), "name": "", "fine": False, "more": "a text"},
    {"more": 7},
]  # fmt: skip


def test_every_type_comes_back_as_it_was(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(environments.beside("pyarrow"))
    monkeypatch.setenv("PYTHONPATH", place)
    server = serve()
    monkeypatch.syspath_prepend(place)
    import pyarrow

    def asked(sql: str) -> Any:
        headers = {"authorization": f"Bearer {server.token()}", "accept": "application/vnd.apache.arrow.stream"}
        answer = httpx.get(f"{server.url}/api/query", params={"sql": sql}, headers=headers, timeout=60)
        assert answer.headers["content-type"] == headers["accept"], answer.text
        return pyarrow.ipc.open_stream(io.BytesIO(answer.content)).read_all()

    server.layer.define("thing", FIELDS)
    for row in ROWS:
        server.layer.insert("thing", row)
    table = asked(f"select {', '.join(FIELDS)} from thing order by id")
    expected = [dict.fromkeys(FIELDS) | row for row in ROWS]
    for row, more in zip(expected, ('{"a":[1,null]}', '"a text"', "7"), strict=True):
        row["more"] = more  # a column with JSON in it is JSON
    assert table.to_pylist() == expected
    kinds = {field.name: str(field.type).partition("(")[0] for field in table.schema}
    assert kinds == {
        "whole": "int64", "real": "double", "price": "decimal128", "name": "string", "fine": "bool", "day": "date32[day]", "at": "timestamp[us, tz=UTC]",
        "more": "string", "never": "null",
    }  # fmt: skip
    assert asked("select x'00ff' as data").to_pylist() == [{"data": b"\x00\xff"}]
    assert asked("select name from thing where 1 = 0").num_rows == 0
    odd = {"sql": "select 1 as n union all select 'x'", "format": "arrow"}
    answer = httpx.get(f"{server.url}/api/query", params=odd, headers={"authorization": f"Bearer {server.token()}"})
    assert answer.status_code == 406 and "Arrow" in answer.json()["error"]["message"], answer.text
