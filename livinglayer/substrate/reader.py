"""The program of a reader process: answers queries from its standard input within a memory limit."""

import resource
import sys
import time
from datetime import datetime
from pathlib import Path

import apsw

from ..errors import LayerError, LimitExceeded
from ..settings import Settings
from .catalog import Catalog
from .reads import Reads, packed, receive, send
from .sqlite import SqliteEngine


def main() -> None:
    directory, memory = Path(sys.argv[1]), int(sys.argv[2])
    apsw.hard_heap_limit(memory)
    resource.setrlimit(resource.RLIMIT_AS, (memory + (1 << 30), memory + (1 << 30)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    engine = SqliteEngine(directory, Settings())
    reads = Reads(Catalog(engine), Settings(), isolate=False)
    while (request := receive(0)) is not None:
        found = answer(reads, request, memory)
        try:
            send(1, found, memory // 4)
        except LimitExceeded as error:
            send(1, {"error": "LimitExceeded", "message": error.message, "hint": error.hint})


def answer(reads: Reads, request: list, memory: int) -> dict:  # type: ignore[type-arg]
    sql, params, branch, moment, principal, listed, seconds, most = request
    narrow = None if listed is None else tuple((e, None if f is None else tuple(f), w) for e, f, w in listed)
    as_of = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    try:
        deadline = time.monotonic() + seconds
        names, kinds, rows, tx = reads.raw(sql, params, branch, as_of, principal, narrow, deadline, most)
        size = 0
        for row in rows:
            size += sum(len(v) if isinstance(v, str | bytes) else 8 for v in row)
            if size > memory // 4:
                raise LimitExceeded(f"the answer is larger than {memory // 4} bytes", hint="ask for less at a time")
        return {"names": names, "kinds": kinds, "rows": [[packed(v) for v in row] for row in rows], "tx": tx}
    except LayerError as error:
        details = {"writes": True} if error.details.get("writes") else {}
        return {"error": type(error).__name__, "message": error.message, "hint": error.hint, "details": details}
    except MemoryError:
        return {
            "error": "LimitExceeded",
            "message": "the query needs more memory than it may have",
            "hint": "ask for less at a time",
        }
    except RecursionError:
        return {"error": "Invalid", "message": "the query is nested too deeply", "hint": None}


if __name__ == "__main__":
    main()
