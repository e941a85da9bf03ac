"""Make a small layer to try things on: `make up`. Run again it changes nothing; `rm -r demo` starts over."""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path

import livinglayer
from livinglayer import Layer
from livinglayer.errors import LayerError

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

  Coming in later releases: boxes to run code in, the law over them, the server with its pages and API.
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


def main(home: str) -> int:
    existed = Path(home, ".layer").is_dir()
    try:
        layer = livinglayer.open(home, create=True)
        try:
            if not existed:
                fill(layer)
            tx = layer.query("select max(tx) as tx from tx where branch = 'main'")[0]["tx"]
        finally:
            layer.close()
    except LayerError as error:
        print(f"demo: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(("There was already a demo." if existed else "Made a demo.") + NEXT.format(home=home, tx=tx), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
