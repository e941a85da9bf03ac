"""`python -m bench.memory PLACE SECONDS`: open a layer, read and write it in every way, print the peak memory in bytes."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import livinglayer
from bench.rows import row


def main(place: str, seconds: float) -> int:
    layer = livinglayer.open(place)
    pick = random.Random(7)
    low, high, groups = layer.query("select min(id) low, max(id) high, max(grp) groups from item")[0].values()
    as_of = layer.update("item", low, {"qty": 1}, reason="the moment to look back to")
    deadline = time.monotonic() + seconds
    turn = 0
    while turn < 2 or time.monotonic() < deadline:
        for _ in range(100):
            found = layer.query(
                "select * from item where id >= :id order by id limit 1", {"id": pick.randint(low, high)}
            )
            layer.update("item", found[0]["id"], {"qty": pick.randrange(1000)}, reason="recount")
        layer.query("select * from item where grp = :grp", {"grp": pick.randint(0, groups)})
        layer.query("select count(*), sum(qty) from item")
        layer.query("select count(*), sum(qty) from item", as_of=as_of)
        layer.query("select count(*), sum(qty) from item", branch="fork1")
        layer.query("select * from item limit 10000")
        with layer.transaction(reason="delivery") as tx:
            for number in range(1000):
                tx.insert("item", row(number, 1000))
        branch = f"memory{time.time_ns()}"
        layer.fork(branch)
        with layer.transaction(branch=branch) as tx:
            for found in layer.query("select id from item limit 1000", branch=branch):
                tx.update("item", found["id"], {"qty": turn})
        layer.diff(branch, "main")
        layer.merge(branch, "main")
        turn += 1
    layer.close()
    # VmHWM, not ru_maxrss: the latter starts at what the process that started this one had.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    print(main(sys.argv[1], float(sys.argv[2])))
