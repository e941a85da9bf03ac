"""The rows every side holds: 111 bytes each, about 100 to a group, scattered so that a range is not one page."""

from __future__ import annotations

from typing import Any

FIELDS: dict[str, Any] = {"name": "text!", "grp": {"type": "int", "indexed": True}, "owner": "text", "qty": "int"}
BYTES = 111  # name 61, owner 26, three integers of 8

POINT = "select id, name, grp, owner, qty from item where id = ?"
RANGE = "select id, name, grp, owner, qty from item where grp = ?"
SCAN = "select count(*), sum(qty) from item"
UPDATE = "update item set qty = ? where id = ?"
INSERT = "insert into item (id, name, grp, owner, qty) values (?, ?, ?, ?, ?)"


def groups(count: int) -> int:
    return max(1, count // 100)


def row(number: int, count: int) -> dict[str, Any]:
    return {
        "name": f"item {number:08d} {'of the stock that every side of this comparison holds':47.47s}",
        "grp": number % groups(count),
        "owner": f"owner {number % 997:03d} of the warehouse",
        "qty": number % 1000,
    }
