"""Make a small layer to try things on: `make up`. Run again it changes nothing; `rm -r demo` starts over."""

from __future__ import annotations

import os
import sys
import time
from decimal import Decimal
from pathlib import Path

import livinglayer
from livinglayer import Layer
from livinglayer.errors import LayerError
from livinglayer.sandbox import Sandbox

NEXT = """
  {home} is a layer: an embedded database in {home}/.layer. No server runs; commands open it themselves.

  Try:
    . .venv/bin/activate && cd {home}
    layer schema                                     what is there
    layer query 'select * from item'                 read it with SQL
    layer log                                        who changed what, when and why
    layer query 'select * from item' --as ann        the same as somebody with fewer rights
    layer can ann read item                          why she sees that
    layer diff cheaper                               what the branch `cheaper` proposes
    layer merge cheaper                              take it over
    layer query 'select * from item' --as-of {tx}       as it was before
    layer verify                                     is everything as it was written?

    layer function show item.reorder                 logic is a row too; it runs in a box
    layer call item.reorder id={bolt}                   what it may read and write is declared
    layer why item/{bolt}.qty                           who, by which code, allowed by what, and why
    layer executions                                 everything that ran
    layer worker --once                              run what triggers and schedules have due

    layer doctor                                     which tiers of box work here
    layer box create work                            a box that stays: then exec, shell, cp, fork, trace, kill

  Coming in later releases: agents and bundles, the server with its pages and API.
"""


def fill(layer: Layer) -> None:
    """A shop's stock, somebody who sees part of it, and a branch with a proposal."""
    layer.define(
        "item",
        {
            "name": "text!",
            "qty": {"type": "int", "default": 0, "check": "qty >= 0"},
            "price": "decimal",
            "status": {
                "type": "state",
                "initial": "draft",
                "transitions": {"draft": ["listed"], "listed": ["sold out"], "sold out": ["listed"]},
            },
            "owner": "ref principal",
        },
        reason="a shop needs a stock",
    )
    ann = layer.principal("ann", kind="human", roles=["clerk"])
    bolt, *_ = layer.insert(
        "item",
        [
            {"name": "bolt", "qty": 300, "price": Decimal("0.12"), "owner": ann},
            {"name": "nut", "qty": 250, "price": Decimal("0.08"), "owner": ann},
            {"name": "hammer", "qty": 4, "price": Decimal("19.90")},
        ],
        reason="first delivery",
    )
    layer.update("item", bolt, {"status": "listed"}, reason="priced and shelved")
    layer.grant("clerk", "read", "item", where="owner = :me", reason="clerks see what they look after")
    layer.fork("cheaper")
    layer.update("item", bolt, {"price": Decimal("0.10")}, branch="cheaper", reason="what if bolts were cheaper?")


REORDER = """
import layer

def reorder(id):
    item = layer.one("select name, qty from item where id = :id", id=id)
    layer.update("item", id, qty=item["qty"] + 100)
    print("ordered 100 of", item["name"])
    return item["qty"] + 100
"""


def add_function(layer: Layer) -> None:
    """Logic as a row: it sees items, may set how many there are, and nothing else."""
    layer.call(
        "function.define",
        name="item.reorder",
        code=REORDER,
        signature={"arguments": {"id": "int!"}, "result": "int"},
        reads=["item"],
        writes={"item": {"actions": ["update"], "fields": ["qty"]}},
        description="Order a hundred more.",
        reason="clerks forget to order",
    )


def show_function(layer: Layer, bolt: int) -> None:
    """Call it: the code runs in a box, what it changes and why is recorded."""
    try:
        layer.call("item.reorder", id=bolt)  # the first one makes the box that the next finds waiting
        start = time.perf_counter()
        count = layer.call("item.reorder", id=bolt, reason="the bolts run out")
        took = time.perf_counter() - start
        print(
            f"  A function: item.reorder ran in a box of its own, governed and recorded, in {took * 1e3:.0f} ms; now {count} bolts."
        )
        for line in layer.why(f"item/{bolt}.qty").lines()[:8]:
            print(f"    {line}")
        print()
    except LayerError as error:
        print(f"  No function here: {error}" + (f"\n    hint: {error.hint}" if error.hint else ""))


CODE = "import os; print('user', os.getuid(), 'sees', os.listdir('/home'), 'and reaches nothing')"


def show_box() -> None:
    """Make a box, run something in it, keep it, fork it; all of it is gone afterwards."""
    try:
        Sandbox.create().kill()  # the first one also starts the host, and builds what it needs
        start = time.perf_counter()
        with Sandbox.create(memory="256M", pids=64) as box:
            made = time.perf_counter() - start
            print(f"  A box: tier {box.tier}, which {box.info()['isolation']}; it was there after {made * 1e3:.1f} ms.")
            print(f"    it says: {box.run(['python3', '-c', CODE]).stdout.text.strip()}")
            box.files.write("/home/user/note", "kept")
            snapshot = box.snapshot()
            start = time.perf_counter()
            forks = box.fork(3)
            took = time.perf_counter() - start
            notes = {fork.files.read("/home/user/note").decode() for fork in forks}
            print(
                f"    snapshot {snapshot.id[:12]} holds its files; three forks after {took * 1e3:.0f} ms have them too: {notes}"
            )
            for fork in forks:
                fork.kill()
    except LayerError as error:
        print(f"  No box here: {error}" + (f"\n    hint: {error.hint}" if error.hint else ""))


def main(home: str) -> int:
    existed = Path(home, ".layer").is_dir()
    try:
        layer = livinglayer.open(home, create=True)
        try:
            if not existed:
                fill(layer)
                add_function(layer)
            bolt = layer.query("select id from item where name = 'bolt'")[0]["id"]
            tx = layer.query("select max(tx) as tx from tx where branch = 'main'")[0]["tx"]
            print("There was already a demo." if existed else "Made a demo.")
            if os.geteuid() == 0:
                print()
                show_function(layer, bolt)
                show_box()
            else:
                print("  Boxes above tier process need root: sudo .venv/bin/layer doctor says which work here.")
        finally:
            layer.close()
    except LayerError as error:
        print(f"demo: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(NEXT.format(home=home, tx=tx, bolt=bolt), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
