"""`layer demo`: the tour, told to whoever watches."""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import livinglayer
from livinglayer.edges.cli.commands import arg, command
from livinglayer.edges.cli.table import BOLD, DIM, GREEN, RED, Printer
from livinglayer.errors import Conflict, Unavailable

GROUPS: dict[str, str] = {}


class Told:
    """The chapters on a terminal; nothing of it with --json."""

    def __init__(self, out: Printer, pace: float) -> None:
        self.out, self.pace = out, pace

    def chapter(self, number: int, title: str) -> None:
        self.out.say()
        self.out.say(f"{number}. {title}", BOLD)

    def say(self, text: str) -> None:
        self._line("  ", text, "")

    def good(self, text: str) -> None:
        self._line("  ✓ ", text, GREEN)

    def bad(self, text: str) -> None:
        self._line("  ✗ ", text, RED)

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows and not self.out.json:
            self.out.table(list(rows[0]), rows, indent="    ")

    def lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.out.say("    " + line, RED if line.lstrip().startswith("!") else DIM)

    def _line(self, mark: str, text: str, colour: str) -> None:
        self.out.say(mark + text, colour)
        if not self.out.json:
            time.sleep(self.pace)


@command(
    "demo",
    arg("--keep", metavar="DIRECTORY", help="make the layer here and leave it, to look at afterwards"),
    arg("--pace", type=float, default=0.0, metavar="SECONDS", help="wait so long after each sentence (default: 0)"),
    opens=False,
    place="host",
)
def demo(args: Namespace, out: Printer) -> int:
    """A tour: a help desk in a layer of its own, with boxes, an agent, forks and proofs; gone afterwards."""
    from livinglayer.jobs.demo import HELPDESK, Tour

    if not HELPDESK.is_dir():
        raise Unavailable(f"the demo needs {HELPDESK}", hint="run it from a checkout of the project")
    if os.geteuid() != 0:
        raise Unavailable("the demo runs boxes at tier namespace, which needs root", hint="sudo .venv/bin/layer demo")
    with tempfile.TemporaryDirectory(prefix="layer-demo-") as place:
        home = Path(args.keep or place)
        if (home / ".layer").exists():
            raise Conflict(f"there is a layer in {home} already", hint="the demo makes one of its own: name another")
        layer = livinglayer.open(home, create=True)
        try:
            out.say(f"A help desk, in {home}. Everything below happens now, on this machine.", DIM)
            found = Tour(layer, Told(out, args.pace)).run()
        finally:
            layer.close()
    out.say()
    out.say(f"That was all of it in {found['seconds']:.0f} s.", BOLD)
    out.say(
        f"Look around: cd {home} && layer log"
        if args.keep
        else "layer demo --keep DIRECTORY leaves it, to look around."
    )
    out.data(found)
    broken = [name for name, kept in found["kept"].items() if not kept]
    if broken:
        out.say(f"Not as promised: {', '.join(broken)}. layer demo --json says what was found.", RED)
    return 1 if broken else 0
