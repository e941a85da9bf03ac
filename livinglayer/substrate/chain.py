"""Chain: what is hashed, and how `verify` finds the first tx whose content is not what was written.

image   first 16 bytes of sha256 over a row's stored values, by column number: in every `ledger_change`
tx      sha256 over the hash before it, the tx's own facts, its changes with their images: in `ledger_tx`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

from .values import Stored, canonical

GENESIS = b"\0" * 32
GONE = b""  # the image of a deleted row


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def image(prefixes: Sequence[str], values: Sequence[Stored]) -> bytes:
    """The hash of a row: its non-null values under their column's number."""
    parts = []
    for prefix, value in zip(prefixes, values, strict=True):
        if value is not None:
            text = value if type(value) is str else canonical(value)
            parts.append(f"{prefix}{len(text) if text.isascii() else len(text.encode())}:{text}")
    return sha256("".join(parts).encode()).digest()[:16]


def lengthed(values: Iterable[Any]) -> str:
    """Values one after the other, each with its length, so that no two lists read the same."""
    return "".join(
        ["-;" if v is None else f"{_size(t)}:{t};" for v in values for t in (v if type(v) is str else canonical(v),)]
    )


def facts_digest(facts: Iterable[tuple[str, Sequence[Stored]]]) -> str | None:
    """The hash of ledger rows committed with a tx, in the order of their table and key."""
    texts = sorted(lengthed([table, *values]) for table, values in facts)
    return sha256("".join(texts).encode()).hexdigest() if texts else None


def tx_hash(
    before: bytes, own: Sequence[Any], changes: Iterable[tuple[int, int, str, bytes]], facts: str | None
) -> bytes:
    """`own`: tx, branch, at, principal, execution, cause, reason, merged_from; changes sorted by entity and id."""
    text = lengthed([*own, facts]) + "".join([lengthed([e, i, op, img.hex()]) for e, i, op, img in changes])
    return sha256(before + text.encode()).digest()


def clock_seal(tx: int, next_id: int, epoch: int, at: str, head: bytes) -> bytes:
    return sha256(lengthed([tx, next_id, epoch, at, head.hex()]).encode()).digest()[:8]
