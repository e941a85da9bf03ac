"""Measure the server: through E2B's own client beside a server that does nothing, queries with wrk, idle boxes, slow clients.

`python -m bench.edges [--quick]`; `make bench` runs it after the law's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import livinglayer
from bench.boxes import apart
from bench.report import Failed, Line, keep_part, table

HERE = Path(__file__).parent
MARK = "# Benchmark of the server"
HEAD = ["operation", "peer", "ours", "figure", "bar", "met"]
CLIENTS, BOXES, SLOW = 16, 500, 1000
DRIP = 0.1  # seconds between two bytes of a slow client

# What one process of clients does: threads, each with a box of its own, until the time is over.
COMMANDS = """
import sys, threading, time
from e2b import Sandbox
threads, seconds = int(sys.argv[1]), float(sys.argv[2])
boxes = [Sandbox.create() for _ in range(threads)]
for box in boxes: box.commands.run("true")
counts, end = [0] * threads, time.monotonic() + seconds
def run(n):
    while time.monotonic() < end:
        boxes[n].commands.run("true"); counts[n] += 1
each = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
[t.start() for t in each]; [t.join() for t in each]
print(sum(counts))
for box in boxes: box.kill()
"""
# The same sixteen in one process that waits for all of them at once.
AT_ONCE = """
import asyncio, sys, time
from e2b import AsyncSandbox
async def main(count, seconds):
    boxes = [await AsyncSandbox.create() for _ in range(count)]
    for box in boxes: await box.commands.run("true")
    counts, end = [0] * count, time.monotonic() + seconds
    async def run(n):
        while time.monotonic() < end:
            await boxes[n].commands.run("true"); counts[n] += 1
    await asyncio.gather(*(run(n) for n in range(count)))
    print(sum(counts))
    for box in boxes: await box.kill()
asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
"""
CREATES = """
import sys, time, statistics
from e2b import Sandbox
times = []
for n in range(int(sys.argv[1])):
    began = time.perf_counter(); box = Sandbox.create(); box.commands.run("true"); times.append(time.perf_counter() - began); box.kill()
print(statistics.median(times[2:]))
"""
# What a command is at the least: a shell, in no box, with nobody asking and no profile to read.
SHELLS = """
import os, sys, time
count, end = 0, time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    os.waitpid(os.posix_spawn("/bin/bash", ["bash", "-c", "true"], {"PATH": "/usr/bin:/bin"}), 0); count += 1
print(count)
"""
IDLE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from e2b import Sandbox
with ThreadPoolExecutor(8) as pool: boxes = list(pool.map(lambda _: Sandbox.create(timeout=3600), range(int(sys.argv[1]))))
print("made", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(8) as pool: list(pool.map(lambda box: box.kill(), boxes))
"""


class Server:
    """A `layer up` over a new layer, or the server that does nothing."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.url: str = json.loads(self.process.stdout.readline())["url"]
        self.port = int(self.url.rpartition(":")[2])
        self.key = ""

    def clients(self, code: str, *args: str) -> subprocess.Popen[str]:
        """A process of E2B's clients of this server."""
        given = {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.key or "e2b_" + "0" * 40}
        return subprocess.Popen([sys.executable, "-c", code, *args], env=os.environ | given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip

    def resident(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[Server]:
    made = Server(command)
    try:
        yield made
    finally:
        made.process.send_signal(signal.SIGTERM)
        made.process.wait(30)


def rate(server: Server, code: str, seconds: float) -> float:
    """Commands a second of all clients together: a process for each core where they are threads."""
    count = 1 if code is AT_ONCE else 2
    processes = [server.clients(code, str(CLIENTS // count), str(seconds)) for _ in range(count)]
    return sum(int(process.communicate()[0] or 0) for process in processes) / seconds


def shells(seconds: float) -> float:
    """Shells a second on all cores, which no server of commands can be faster than."""
    command = [sys.executable, "-c", SHELLS, str(seconds)]
    each = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(os.cpu_count() or 1)]
    return sum(int(process.communicate()[0]) for process in each) / seconds


def wrk(server: Server, token: str, seconds: float) -> float:
    """Queries of one row a second."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        body = json.dumps({"sql": "select id, title, priority from ticket where id = :id", "params": {"id": 2100}})
        script.write(
            f'wrk.method = "POST"\nwrk.body = [[{body}]]\nwrk.headers["Content-Type"] = "application/json"\nwrk.headers["Authorization"] = "Bearer {token}"\n'
        )
        script.flush()
        command = ["wrk", "-t1", f"-c{CLIENTS}", f"-d{seconds:g}s", "-s", script.name, f"{server.url}/api/query"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if "Non-2xx" in said:
        raise RuntimeError(f"answers were errors: {said}")
    return float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1])  # type: ignore[index]


def fast(server: Server, token: str, count: int) -> list[float]:
    """How long each of many queries of one client takes."""
    connection, times = http.client.HTTPConnection("127.0.0.1", server.port), []
    body = json.dumps({"sql": "select id, title from ticket where id = 2100"})
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    for _ in range(count):
        began = time.perf_counter()
        connection.request("POST", "/api/query", body, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        times.append(time.perf_counter() - began)
    return times


async def drip(port: int, token: str, count: int, ready: Callable[[], None]) -> None:
    """Clients that send, or read, a byte now and then."""

    answering = asyncio.Semaphore(0)

    async def one(n: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        body = json.dumps({"sql": "select * from ticket"}).encode()
        length = len(body) if n % 2 else 1 << 16  # which it never comes to
        head = f"POST /api/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer {token}\r\nContent-Length: {length}\r\n\r\n"
        writer.write(head.encode() + (body if n % 2 else b""))
        if n % 2:
            await reader.read(1)
            answering.release()
        while True:
            await asyncio.sleep(DRIP * (0.5 + n / count))
            if n % 2:
                if not await reader.read(1):
                    return
            else:
                writer.write(b" ")

    tasks = [asyncio.create_task(one(n)) for n in range(count)]
    for _ in range(count // 2):  # their queries are done: from now on they are slow, and nothing else
        await answering.acquire()
    await asyncio.sleep(1)
    ready()
    await asyncio.wait(tasks)


def slow_clients(port: str, token: str, count: str) -> None:
    """What the process of slow clients does."""
    with contextlib.suppress(KeyboardInterrupt, ConnectionError):
        asyncio.run(drip(int(port), token, int(count), lambda: print("ready", flush=True)))


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def beside_slow(server: Server, token: str, count: int) -> Line:
    alone = p99(fast(server, token, count))
    crowd = subprocess.Popen(
        [sys.executable, "-m", "bench.edges", "--slow", str(server.port), token, str(SLOW)], stdout=subprocess.PIPE
    )
    try:
        assert crowd.stdout is not None and crowd.stdout.readline() == b"ready\n"
        together = p99(fast(server, token, count))
    finally:
        crowd.kill()
        crowd.wait()
    return Line(
        f"p99 of a fast client beside {SLOW:,} slow ones", together / alone, "×", plain=alone, ours=together, low=2.0
    )


def measure(quick: bool) -> list[Line | Failed]:
    seconds, lines = (2.0, []) if quick else (8.0, [])  # type: tuple[float, list[Line | Failed]]

    def take(name: str, act: Callable[[], Line]) -> None:
        try:
            lines.append(act())
        except Exception as error:
            lines.append(Failed(name, repr(error)))
        print(" | ".join(lines[-1].cells()), flush=True)

    with apart() as place:
        with livinglayer.open(place / "layer", create=True) as layer:
            layer.define("ticket", {"title": "text!", "priority": "int"})
            layer.insert("ticket", [{"title": f"ticket {n}", "priority": n} for n in range(1000)])
            layer.principal("ann")
            layer.grant("ann", "read", "ticket", where="priority >= 0")
            token, key, other = (
                layer.call("token.create", {"name": "bench", "kind": kind, "principal": principal})["token"]
                for kind, principal in (("api", "owner"), ("e2b", "owner"), ("api", "ann"))
            )
        up = [sys.executable, "-m", "livinglayer.edges.cli.main", "up", "--json", "--dir", str(place / "layer"), "--port", "0"]  # fmt: skip
        with running(up) as server, running([sys.executable, "-m", "bench.noop"]) as noop:
            server.key = key

            def create() -> Line:
                runs = str(10 if quick else 40)
                peer, ours = (float(each.clients(CREATES, runs).communicate()[0]) for each in (noop, server))
                return Line(
                    "E2B client: create, first command (p50, ms)", ours * 1000, "ms", plain=peer, ours=ours, low=60
                )

            def commands(name: str, code: str) -> Line:
                ours, peer = (statistics.median(found) for found in zip(*((rate(server, code, seconds), rate(noop, code, seconds)) for _ in range(3)), strict=True))  # fmt: skip
                print(f"commands/s of {name}: {ours:.0f}, of a server that does nothing {peer:.0f}")
                return Line(f"E2B client: commands/s of {CLIENTS} clients, {name}", ours / peer, "×", plain=1 / peer, ours=1 / ours, high=0.5)  # fmt: skip

            def limit() -> Line:
                ours, most = rate(server, COMMANDS, seconds), shells(seconds)
                return Line("E2B client: commands/s beside plain shells in no box", ours / most, "×", plain=1 / most, ours=1 / ours)  # fmt: skip

            def queries(whose: str, token: str) -> Line:
                found = wrk(server, token, seconds)
                return Line(f"query of one row by {whose}, wrk", found, "/s", ours=1 / found, high=2000)

            def idle() -> Line:
                before, owner = server.resident(), server.clients(IDLE, str(BOXES))
                assert owner.stdout is not None and owner.stdout.readline() == "made\n"
                time.sleep(5)
                after = server.resident()
                owner.communicate("\n")
                print(f"RSS of the server: {before >> 20} MB, with {BOXES} boxes {after >> 20} MB")
                return Line(f"RSS of the server with {BOXES} idle boxes", after / 1e6, "MB", low=250)

            take("create, first command", create)
            take("commands/s", lambda: commands("asynchronous", AT_ONCE))
            take("commands/s", lambda: commands("threads", COMMANDS))
            take("shells", limit)
            take("query of one row", lambda: queries("the owner", token))
            take("query of one row", lambda: queries("others, in a reader process", other))
            take("slow clients", lambda: beside_slow(server, token, 500 if quick else 3000))
            take("idle boxes", idle)
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.edges", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs, nothing is written")
    parser.add_argument("--slow", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.slow:
        slow_clients(*args.slow)
        return 0
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing: make bench installs it")
    lines = measure(args.quick)
    text = f"{MARK}\n\n`peer` is the same client against a server that answers at once and does nothing, or the same client alone.\n\n{table(HEAD, [line.cells() for line in lines])}\n"
    if not args.quick:
        keep_part(HERE / "results.md", MARK, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
