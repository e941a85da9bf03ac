"""`make up`: a layer in demo/ with the helpdesk in it, and a worker that looks after it. Run again it changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import livinglayer
from livinglayer.bundle.apply import apply
from livinglayer.bundle.load import load
from livinglayer.edges.cli.table import counted
from livinglayer.errors import LayerError

BUNDLE = Path(__file__).parent.parent / "bundles" / "helpdesk"
LAYER = Path(sys.executable).with_name("layer")
NEXT = """
  {home} is a layer: an embedded database in {home}/.layer, with a help desk in it. {worker}

  Try:
    . .venv/bin/activate && cd {home}
    layer demo                                       the tour: everything below and more, in a quarter of a minute

    layer query 'select id, title, status, team, priority from ticket'
    layer query 'select id, title from ticket' --as cara        what a customer sees of it
    layer projection read queue --as ann             what her team has to do
    layer can cara read ticket                       and why
    layer insert ticket title='The app is slow' customer={cara} --as cara
    layer log                                        who changed what, when and why
    layer why ticket/{ticket}.priority                 by which code, called by what, allowed by whom
    layer executions                                 everything that ran
    layer replay {execution} --verify                       again, in a fresh box, compared step by step

    layer fork idea                                  a second reality; then --branch idea, diff, merge, discard
    layer plan ../bundles/personal                   another app: what it would change, and what it opens
    layer contract show triage-agent                 what an agent may see, do and spend
    layer agent run triage-agent --task 'Triage what is new' --as triage-bot     (needs: layer secret set ANTHROPIC_API_KEY)
    layer doctor                                     which tiers of box work here

  Stop the worker with `make down`. Coming in later releases: the server with its pages and API.
"""


def worker_of(home: Path) -> int | None:
    """The worker that `make up` has started, if it still runs."""
    try:
        number = int((home / "worker.pid").read_text())
        return number if b"worker" in Path(f"/proc/{number}/cmdline").read_bytes() else None
    except (OSError, ValueError):
        return None


def start_worker(home: Path) -> int:
    with open(home / "worker.log", "ab") as log:
        made = subprocess.Popen(
            [LAYER, "worker", "--dir", home], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    (home / "worker.pid").write_text(f"{made.pid}\n")
    return made.pid


def stop_worker(home: Path) -> None:
    number = worker_of(home)
    if number is not None:
        os.kill(number, 15)
        for _ in range(150):
            if worker_of(home) is None:
                break
            time.sleep(0.1)
    (home / "worker.pid").unlink(missing_ok=True)
    print("No worker runs." if number is None else f"Stopped worker {number}.")


def main(home: Path) -> int:
    existed = (home / ".layer").is_dir()
    try:
        with livinglayer.open(home, create=True) as layer:
            found = apply(layer, load(BUNDLE), yes=True, reason="make up")
            done = (
                "nothing had to be changed"
                if found.empty
                else f"{counted(len(found.changes), 'change')} in one transaction"
            )
            print(f"{'There was already' if existed else 'Made'} a layer in {home}; applied {BUNDLE.name}: {done}.")
            worker = "Boxes above tier process need root: sudo make up runs the worker."
            if os.geteuid() == 0:
                number = worker_of(home) or start_worker(home)
                worker = f"Worker {number} looks after it; its log is {home}/worker.log."
                _until_quiet(layer)
            [cara] = layer.query("select id from customer where email = 'cara@example.com'")
            [ticket] = layer.query("select min(id) as id from ticket")
            ran = layer.query(
                "select max(id) as id from execution where function = 'ticket.triage' and status = 'done'"
            )
    except LayerError as error:
        print(f"up: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(NEXT.format(home=home, worker=worker, cara=cara["id"], ticket=ticket["id"], execution=ran[0]["id"] or "ID"))
    return 0


def _until_quiet(layer: livinglayer.Layer) -> None:
    """The worker triages what came with the bundle; a first look should find that done."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        [row] = layer.query("select count(*) as n from ticket where status = 'new'")
        if row["n"] == 0:
            print("The worker has triaged every ticket, each in a box of its own.")
            return
        time.sleep(0.2)
    print("The worker is still at it: layer executions shows how far it is.")


if __name__ == "__main__":
    place = Path(sys.argv[-1])
    sys.exit(stop_worker(place) if "down" in sys.argv[1:-1] else main(place))
