"""What was said to models and by them, as the gateway keeps it beside a box, from a host's point of view."""

import json
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..errors import Invalid, NotFound
from .trace import Trace

MOST = 4 << 30  # bytes of boxes that have ended
PIECE = 1 << 20
_NAME = re.compile(r"[0-9a-f]{1,32}-[0-9a-f]{6}")


def directory(state: Path, box: str) -> Path:
    """Where those of a box lie."""
    return state / "exchanges" / Path(box).name


def read(state: Path, box: str, name: object, part: object, offset: int) -> bytes:
    """A piece of a `request` or an `answer`, nothing after its end; NotFound if it was not kept."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or part not in ("request", "answer") or offset < 0:
        raise Invalid(f"{name!r:.100} {part!r:.100} is no part of an exchange", hint="request or answer")
    try:
        with open(directory(state, box) / f"{name}.{part}", "rb") as file:
            file.seek(offset)
            return file.read(PIECE)
    except OSError:
        raise NotFound(f"box {box!r} has no {part} of exchange {name}") from None


def untold(state: Path, box: str, trace: Trace) -> Iterator[dict[str, Any]]:
    """Events of exchanges that a trace does not have, for its host ended before it was written."""
    found = sorted(directory(state, box).glob("*.json"))
    known = {(event.get("model") or {}).get("exchange") for event in trace.events()} if found else set()
    for path in found:
        if path.stem not in known:
            try:
                yield json.loads(path.read_text())
            except (OSError, ValueError):
                continue


def prune(state: Path, alive: Collection[str]) -> None:
    """Keep the newest of boxes that have ended."""
    try:
        ended = [path for path in (state / "exchanges").iterdir() if path.name not in alive]
    except FileNotFoundError:
        return
    kept = 0
    for path in sorted(ended, key=lambda path: path.stat().st_mtime, reverse=True):
        kept += sum(file.stat().st_size for file in path.iterdir())
        if kept > MOST or not (state / "traces" / f"{path.name}.jsonl").exists():
            shutil.rmtree(path, ignore_errors=True)
