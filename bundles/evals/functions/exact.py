"""Exact match: what was expected, as people would compare it."""

import layer


def exact(id):
    rows = layer.query(
        "select x.id, x.answer, p.expected from score x join sample p on p.id = x.sample where x.run = :id order by x.id",
        id=id,
    )
    points = 0
    for row in rows:
        right = same(row["answer"]) == same(row["expected"])
        layer.update("score", row["id"], value=float(right), why=None if right else f"expected {row['expected']!r}")
        points += right
    return {"run": id, "scored": len(rows), "points": points}


def same(text):
    return " ".join((text or "").casefold().split())
