"""`make up`: a layer in demo/ with the helpdesk in it, and a server that looks after it. Run again it changes nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import livinglayer
from livinglayer.bundle.apply import apply
from livinglayer.bundle.load import load
from livinglayer.edges.cli.table import counted
from livinglayer.edges.http.home import link as sign_in_link
from livinglayer.errors import LayerError, Unavailable

BUNDLE = Path(__file__).parent.parent / "bundles" / "helpdesk"
LAYER = Path(sys.executable).with_name("layer")
NEXT = """
  {home} is a layer: an embedded database in {home}/.layer, with a help desk in it. {server}

  In a browser: {link}
  (it signs you in, once; `layer login` prints another; the page says how other clients connect)

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
    eval "$(layer env --e2b)"                        E2B's clients make boxes here; `layer mcp` is for agents' tools

  Stop the server with `make down`; boxes and data stay. Coming in later releases: apps' own pages.
"""


PORT = 7700


def server_of(home: Path) -> int | None:
    """The server that `make up` has started, if it still runs."""
    try:
        number = int((home / "server.pid").read_text())
        return number if b"\0up\0--json\0--dir\0" in Path(f"/proc/{number}/cmdline").read_bytes() else None
    except (OSError, ValueError):
        return None


def start_server(home: Path) -> int:
    """Start `layer up` and wait until it answers."""
    more = [] if os.geteuid() == 0 else ["--no-worker"]  # whose boxes need root
    with open(home / "server.log", "ab") as log:
        made = subprocess.Popen(
            [LAYER, "up", "--json", "--dir", home, "--port", str(free_port()), *more],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
    assert made.stdout is not None
    line = made.stdout.readline()
    if not line:
        raise Unavailable(f"the server did not start: see {home}/server.log")
    (home / "server.json").write_bytes(line)
    (home / "server.pid").write_text(f"{made.pid}\n")
    return made.pid


def free_port() -> int:
    """The usual port, or any when somebody has it."""
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", PORT))
            return PORT
        except OSError:
            return 0


def stop_server(home: Path) -> None:
    number = server_of(home)
    if number is not None:
        os.kill(number, 15)
        for _ in range(150):
            if server_of(home) is None:
                break
            time.sleep(0.1)
    for name in ("server.pid", "server.json"):
        (home / name).unlink(missing_ok=True)
    print("No server runs." if number is None else f"Stopped server {number}.")


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
            number = server_of(home) or start_server(home)
            url = json.loads((home / "server.json").read_text())["url"]
            server = f"Server {number} is at {url}; its log is {home}/server.log."
            if os.geteuid() == 0:
                _until_quiet(layer)
            else:
                server += " Boxes above tier process need root: sudo make up."
            [cara] = layer.query("select id from customer where email = 'cara@example.com'")
            [ticket] = layer.query("select min(id) as id from ticket")
            link = sign_in_link(layer, url, "owner")
            ran = layer.query(
                "select max(id) as id from execution where function = 'ticket.triage' and status = 'done'"
            )
    except LayerError as error:
        print(f"up: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(
        NEXT.format(
            home=home, server=server, link=link, cara=cara["id"], ticket=ticket["id"], execution=ran[0]["id"] or "ID"
        )
    )
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
    sys.exit(stop_server(place) if "down" in sys.argv[1:-1] else main(place))
