"""Code in a box: what it says to the layer, how functions run, and that clocks and chance can be had again.

A small HTTP server plays the layer's side of the channel; the programs are real python3 and node processes.
"""

from __future__ import annotations

import ast
import hashlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

INSIDE = Path(__file__).parents[2] / "livinglayer" / "inside"
CLOCK = "2026-03-01T12:00:00.250000+00:00"


def pythons() -> list[str]:
    """The system's Python, and the oldest and the newest of those that are here and new enough."""
    places = [*os.environ.get("PATH", "").split(":"), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    found = {
        int(match[1]): str(path)
        for at in places
        for path in Path(at).glob("python3.*")
        if "shims" not in path.parts and (match := re.fullmatch(r"python3\.(\d+)", path.name)) and int(match[1]) >= 8
    }
    others = [found[version] for version in sorted(found)]
    return list(dict.fromkeys(["/usr/bin/python3", *others[:1], *others[-1:]]))


PYTHONS = pythons()
NODE = shutil.which("node")


@pytest.fixture
def node() -> str:
    if NODE is None:
        pytest.fail("node is missing: tools/setup.sh test installs Debian's nodejs", pytrace=False)
    return NODE


class Layer:
    """The layer's side of the channel: keeps what it is asked, answers what a test says."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.connections = 0
        self.answers: dict[str, Callable[[Any], tuple[int, Any]]] = {}
        channel = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                channel.connections += 1
                super().setup()

            def do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                start, _, verb = self.path[1:].partition("/")
                given: Any = body
                if self.headers.get("Content-Type") == "application/json" and body:
                    given = json.loads(body)
                channel.asked.append((self.command, verb, given))
                status, answer = channel.answer(start, verb, given)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do

            def log_message(self, *words: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/token"

    def answer(self, token: str, verb: str, given: Any) -> tuple[int, Any]:
        if token != "token":
            return 403, {"error": {"code": "denied", "message": "this execution is over", "hint": "h"}}
        verb = verb.partition("/")[0]
        if verb in self.answers:
            return self.answers[verb](given)
        if verb == "insert" and isinstance(given["values"], list):
            return 200, {"ids": list(range(len(given["values"])))}
        if verb == "artifact":
            return 200, {"digest": hashlib.sha256(given).hexdigest(), "bytes": len(given)}
        return 200, {
            "query": {"rows": [{"id": 7, "title": "größer 🐘"}], "tx": 3}, "insert": {"id": 7}, "update": {"ok": True}, "delete": {"ok": True},
            "upsert": {"id": 8}, "call": {"result": [1, None]}, "secret": {"value": "s3cret"}, "emit": {"ok": True}, "me": {"principal": "ann"},
            "projection": {"rows": [], "tx": 3}, "slice": {"path": "/slice.db"}, "return": {"ok": True},
        }[verb]  # fmt: skip

    @property
    def returned(self) -> dict[str, Any]:
        return [given for _, verb, given in self.asked if verb == "return"][-1]

    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{INSIDE}/bin:{os.environ['PATH']}", "LAYER_URL": self.url, "PYTHONPATH": str(INSIDE), "NODE_PATH": str(INSIDE),
            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", "/"),
        }  # fmt: skip


@pytest.fixture
def channel() -> Iterator[Layer]:
    made = Layer()
    yield made
    made.server.shutdown()
    made.server.server_close()


def python(channel: Layer, code: str, executable: str = PYTHONS[0], **more: str) -> subprocess.CompletedProcess[str]:
    """A program of its own that imports layer."""
    return subprocess.run(
        [executable, "-c", code], env=channel.environment() | more, capture_output=True, text=True, timeout=60
    )


def function(
    channel: Layer, code: str, program: str = PYTHONS[0], name: str = "ticket.triage", **given: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run a function as the law does."""
    request = {"code": code, "name": name, "arguments": {}, "seed": "seed", "clock": CLOCK, "tape": None, **given}
    argv = (
        [program, "-e", "require('run.js')"]
        if program.endswith("node")
        else [program, "-c", "import layer; layer._main()"]
    )
    return subprocess.run(
        argv, input=json.dumps(request).encode(), env=channel.environment(), capture_output=True, timeout=60
    )


# -- the client --------------------------------------------------------------------------------------------------------

EVERY_VERB = """
import datetime, decimal, layer, uuid
when = datetime.datetime(2026, 1, 2, 3, 4, 5)
print(layer.query("select 1"), layer.query("select ?", [1]), layer.query("select :a", a=when), layer.query("select :a", {"a": 1}, b=2))
print(layer.one("select 1")["title"])
print(layer.insert("ticket", title="größer 🐘", cost=decimal.Decimal("1.50")), layer.insert("ticket", [{"a": 1}, {"a": 2}]))
print(layer.insert("ticket", {"values": 1}, entity=2, on=datetime.date(2026, 1, 2)))
layer.update("ticket", 7, status="open", expect=3)
layer.delete("ticket", 7)
print(layer.upsert("ticket", {"key": uuid.UUID(int=5)}, on=["key"]), layer.call("f", function=1, name="x"), layer.secret("KEY"))
layer.emit("done", name="x")
print(layer.me(), layer.projection("open", name="y"), layer.slice(), layer.artifact(__import__("sys").argv[0], "a b/ü"))
"""


@pytest.mark.parametrize("executable", PYTHONS)
def test_every_verb_says_what_the_protocol_says(channel: Layer, executable: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(EVERY_VERB)
    done = subprocess.run(
        [executable, program], env=channel.environment(), capture_output=True, text=True, encoding="utf-8", timeout=60
    )
    assert done.stderr == ""
    rows = [{"id": 7, "title": "größer 🐘"}]
    digest = hashlib.sha256(EVERY_VERB.encode()).hexdigest()
    assert done.stdout.splitlines() == [
        f"{rows} {rows} {rows} {rows}",
        "größer 🐘",
        "7 [0, 1]",
        "7",
        "8 [1, None] s3cret",
        f"{{'principal': 'ann'}} [] /slice.db {digest}",
    ]
    assert channel.asked == [
        ("POST", "query", {"sql": "select 1", "params": None}),
        ("POST", "query", {"sql": "select ?", "params": [1]}),
        ("POST", "query", {"sql": "select :a", "params": {"a": "2026-01-02T03:04:05"}}),
        ("POST", "query", {"sql": "select :a", "params": {"a": 1, "b": 2}}),
        ("POST", "query", {"sql": "select 1", "params": None}),
        ("POST", "insert", {"entity": "ticket", "values": {"title": "größer 🐘", "cost": "1.50"}}),
        ("POST", "insert", {"entity": "ticket", "values": [{"a": 1}, {"a": 2}]}),
        ("POST", "insert", {"entity": "ticket", "values": {"values": 1, "entity": 2, "on": "2026-01-02"}}),
        ("POST", "update", {"entity": "ticket", "id": 7, "values": {"status": "open"}, "expect": 3}),
        ("POST", "delete", {"entity": "ticket", "id": 7, "expect": None}),
        ("POST", "upsert", {"entity": "ticket", "values": {"key": "00000000-0000-0000-0000-000000000005"}, "on": ["key"]}),
        ("POST", "call", {"function": "f", "arguments": {"function": 1, "name": "x"}}),
        ("POST", "secret", {"name": "KEY"}),
        ("POST", "emit", {"name": "done", "data": {"name": "x"}}),
        ("GET", "me", b""),
        ("POST", "projection", {"name": "open", "arguments": {"name": "y"}}),
        ("POST", "slice", {}),
        ("PUT", "artifact/a%20b/%C3%BC", EVERY_VERB.encode()),
    ]  # fmt: skip
    assert channel.connections == 1


def test_the_same_verbs_in_javascript(channel: Layer, node: str) -> None:
    code = """
    const layer = require("layer");
    (async () => {
      console.log(JSON.stringify([await layer.query("select :a", {a: new Date(0)}), await layer.one("select 1"), await layer.insert("ticket", {title: "größer 🐘"}),
        await layer.insert("ticket", [{a: 1}]), await layer.update("ticket", 7, {a: 1}, {expect: 3}), await layer.delete("ticket", 7), await layer.upsert("ticket", {k: 1}, "k"),
        await layer.call("f", {x: 1}), await layer.secret("KEY"), await layer.emit("done", {x: 1}), await layer.me(), await layer.projection("open"), await layer.slice(),
        await layer.artifact("/etc/hostname", "a b")]));
      try { await layer.insert("ticket", {a: [1n]}); } catch (error) { console.log(error instanceof layer.Invalid, error.message); }
    })();
    """
    done = subprocess.run([node, "-e", code], env=channel.environment(), capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    row = {"id": 7, "title": "größer 🐘"}
    digest = hashlib.sha256(Path("/etc/hostname").read_bytes()).hexdigest()
    first, second = done.stdout.splitlines()
    assert json.loads(first) == [
        [row], row, 7, [0], None, None, 8, [1, None], "s3cret", None, {"principal": "ann"}, [], "/slice.db", digest
    ]  # fmt: skip
    assert second == 'true the request["values"]["a"][0] is a bigint, for which JSON has no form'
    assert channel.asked[0] == ("POST", "query", {"sql": "select :a", "params": {"a": "1970-01-01T00:00:00.000Z"}})
    assert channel.asked[4][2] == {"entity": "ticket", "id": 7, "values": {"a": 1}, "expect": 3}
    assert channel.asked[-1][:2] == ("PUT", "artifact/a%20b") and channel.connections == 1


CODES = {
    "invalid": (400, "Invalid", 2), "unauthenticated": (401, "Unauthenticated", 3), "denied": (403, "Denied", 3), "not_found": (404, "NotFound", 4),
    "conflict": (409, "Conflict", 5), "limit_exceeded": (429, "LimitExceeded", 6), "corrupt": (500, "Corrupt", 7), "incompatible": (500, "Incompatible", 7),
    "unavailable": (503, "Unavailable", 8), "timed_out": (504, "TimedOut", 9), "error": (500, "LayerError", 1),
}  # fmt: skip


def test_a_refusal_has_the_class_of_its_code_in_every_language(channel: Layer, node: str) -> None:
    def refuse(given: Any) -> tuple[int, Any]:
        return CODES[given["sql"]][0], {"error": {"code": given["sql"], "message": "nö", "hint": "h", "rows": [1]}}

    channel.answers["query"] = refuse
    code = f"""
import layer, pickle
for code in {list(CODES)}:
    try: layer.query(code)
    except layer.LayerError as error:
        again = pickle.loads(pickle.dumps(error))
        print(type(again).__name__, again.code, again.status, again.exit_code, again, again.hint, again.rows)
"""
    wanted = [f"{name} {code} {status} {number} nö h [1]" for code, (status, name, number) in CODES.items()]
    assert python(channel, code).stdout.splitlines() == wanted
    script = f"""const layer = require("layer"); (async () => {{ for (const code of {list(CODES)}) {{
        try {{ await layer.query(code); }} catch (error) {{
            const Kind = layer[error.name];
            console.log(error.name, error.code, Kind.status, error.exitCode, error.message, error.hint, error.rows, error instanceof Kind); }} }} }})()"""
    done = subprocess.run([node, "-e", script], env=channel.environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [line.replace("[1]", "[ 1 ] true") for line in wanted]
    for code, (_, _, number) in CODES.items():
        shown = subprocess.run(["layer", "query", code], env=channel.environment(), capture_output=True, text=True)
        assert (shown.returncode, shown.stdout, shown.stderr) == (number, "", "layer: nö (h)\n")
    assert channel.connections == 2 + len(CODES)  # a refusal keeps the connection


def test_a_status_without_a_known_code_is_told_by_its_number(channel: Layer) -> None:
    channel.answers["query"] = lambda given: (404, b"")
    channel.answers["insert"] = lambda given: (418, {"error": "tea"})
    code = """
import layer
for act in (lambda: layer.query("x"), lambda: layer.insert("x")):
    try: act()
    except layer.LayerError as error: print(type(error).__name__, error)
"""
    assert python(channel, code).stdout == "NotFound the layer answered 404\nLayerError the layer answered 418\n"


@pytest.mark.parametrize("url", ["", "https://127.0.0.1:1/x", "nonsense", "http://127.0.0.1:9/x"])
def test_outside_of_a_box_one_sentence_says_so(channel: Layer, node: str, url: str) -> None:
    wanted = "not inside a box of a layer" if not url else "can't be reached" if ":9/" in url else "is not the address"
    environment = channel.environment() | {"LAYER_URL": url}
    code = "import layer\ntry: layer.query('x')\nexcept layer.Unavailable as error: print(error)"
    assert wanted in python(channel, code, LAYER_URL=url).stdout
    script = 'require("layer").query("x").catch((error) => console.log(error.name, error.message))'
    done = subprocess.run([node, "-e", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("Unavailable ") and wanted in done.stdout
    shown = subprocess.run(["layer", "me"], env=environment, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 8 and wanted in shown.stderr and shown.stderr.count("\n") == 1


def test_importing_it_loads_next_to_nothing(channel: Layer) -> None:
    code = "import sys; before = set(sys.modules); import layer; print(sorted(set(sys.modules) - before))"
    assert set(ast.literal_eval(python(channel, code).stdout)) <= {"__future__", "_queue", "_socket", "layer"}


def test_threads_ask_at_once_and_each_gets_its_own_answer(channel: Layer) -> None:
    channel.answers["query"] = lambda given: (200, {"rows": [{"n": given["params"][0]}], "tx": 1})
    code = """
import layer, concurrent.futures as futures
with futures.ThreadPoolExecutor(40) as pool:
    found = list(pool.map(lambda n: layer.query("?", [n])[0]["n"], range(2000)))
print(found == list(range(2000)))
"""
    assert python(channel, code).stdout == "True\n"
    assert 1 <= channel.connections <= 16


def test_javascript_asks_at_once_too(channel: Layer, node: str) -> None:
    channel.answers["query"] = lambda given: (200, {"rows": [{"n": given["params"][0]}], "tx": 1})
    script = """const layer = require("layer"); Promise.all([...Array(200).keys()].map(async (n) => (await layer.query("?", [n]))[0].n === n))
        .then((all) => console.log(all.every(Boolean)))"""
    done = subprocess.run([node, "-e", script], env=channel.environment(), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, channel.connections) == ("true\n", "", 8)


def test_a_child_of_a_fork_has_a_connection_and_an_address_of_its_own(channel: Layer) -> None:
    code = f"""
import layer, os
layer.query("parent")
if os.fork() == 0:
    layer.query("child")
    os.environ["LAYER_URL"] = {channel.url.replace("/token", "/other")!r}
    try: layer.query("other")
    except layer.Denied as error: print("child:", error, flush=True)
    os._exit(0)
os.wait()
layer.query("parent again")
"""
    assert python(channel, code).stdout == "child: this execution is over\n"
    assert [given["sql"] for _, _, given in channel.asked] == ["parent", "child", "other", "parent again"]
    assert channel.connections == 3


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_large_messages_go_both_ways(channel: Layer, node: str, language: str) -> None:
    channel.answers["query"] = lambda given: (200, {"rows": [{"text": given["params"][0]}], "tx": 1})
    if language == "python":
        done = python(channel, "import layer; t = 'ü' * 5_000_000; print(layer.one('?', [t])['text'] == t)")
    else:
        script = 'const t = "ü".repeat(5e6); require("layer").one("?", [t]).then((row) => console.log(row.text === t ? "True" : "no"))'
        done = subprocess.run(
            [node, "-e", script], env=channel.environment(), capture_output=True, text=True, timeout=60
        )
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert len(channel.asked[0][2]["params"][0].encode()) == 10_000_000


def test_a_large_artifact_is_sent_whole(channel: Layer, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(10_000_000))
    done = python(channel, f"import layer; print(layer.artifact({str(tmp_path / 'big')!r}))")
    assert done.stdout.strip() == hashlib.sha256((tmp_path / "big").read_bytes()).hexdigest()
    assert "needs a name" in python(channel, "import layer; layer.artifact('/tmp/')").stderr


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("{'a': [1, {2, 3}]}", "the request['values']['a'][1] is a set, for which JSON has no form"),
        ("{'a': float('nan')}", "the request['values']['a'] is nan, for which JSON has no form"),
        ("{'a': {(1, 2): 3}}", "the request['values']['a'] has the key (1, 2), a tuple; keys in JSON are texts"),
        ("{'a': b'x'}", "the request['values']['a'] is a bytes, for which JSON has no form"),
        ("{'a': __import__('decimal').Decimal('NaN')}", "the request['values']['a'] is a Decimal, for which JSON has no form"),
        ("loop", "the request is nested too deep for JSON, or contains itself"),
        ("deep", "the request is nested too deep for JSON, or contains itself"),
    ],
)  # fmt: skip
def test_what_json_can_not_hold_is_named_with_its_place(channel: Layer, value: str, wanted: str) -> None:
    code = f"""
import layer
loop = {{}}; loop["loop"] = loop
deep = {{}}
for _ in range(100_000): deep = {{"deep": deep}}
try: layer.insert("ticket", {value})
except layer.Invalid as error: print(error, flush=True)
import os; os._exit(0)
"""
    assert python(channel, code).stdout == wanted + "\n"
    assert channel.asked == []


# -- a layer that misbehaves -------------------------------------------------------------------------------------------


class Rude:
    """A server that does to each connection what its turn in `turns` says; the last one holds for all further ones."""

    def __init__(self, *turns: bytes | str) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/t"
        self.turns, self.seen, self.held = list(turns), 0, []  # type: tuple[list[bytes | str], int, list[socket.socket]]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            turn = self.turns[min(self.seen, len(self.turns) - 1)]
            self.seen += 1
            if turn == "close":
                connection.close()
                continue
            if connection.recv(65536) and isinstance(turn, bytes):
                connection.sendall(turn)
            if turn == "hang" or (isinstance(turn, bytes) and b"hold" in turn):
                self.held.append(connection)
            else:
                connection.close()


GOOD = b'HTTP/1.1 200 OK\r\nX: hold\r\nContent-Length: 11\r\n\r\n{"rows":[]}'
GOOD_ONCE = b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"rows":[]}'
ASK = "import layer, sys\ntry: print(layer.{})\nexcept layer.LayerError as error: print(type(error).__name__, error)"
ASK_JS = "require('layer').{}.then((rows) => console.log('[]'), (error) => console.log(error.name, error.message))"


def both(rude: Callable[[], Rude], verb: str, node: str, timeout: float = 30) -> list[str]:
    """What Python and node print when they ask so."""
    shown = []
    setting = f"layer.timeout = {timeout}\n"
    for argv in (
        [PYTHONS[0], "-c", ASK.format(verb).replace("\n", "\n" + setting, 1)],
        [node, "-e", f"require('layer').timeout = {timeout};" + ASK_JS.format(verb)],
    ):
        server = rude()
        environment = {
            "PATH": os.environ["PATH"],
            "LAYER_URL": server.url,
            "PYTHONPATH": str(INSIDE),
            "NODE_PATH": str(INSIDE),
        }
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
        server.listener.close()
        shown.append(done.stdout + done.stderr)
    return shown


def test_a_read_is_asked_again_when_the_layer_hangs_up_and_a_write_is_not(node: str) -> None:
    assert both(lambda: Rude("close", GOOD), "query('x')", node) == ["[]\n", "[]\n"]
    for shown in both(lambda: Rude("close", GOOD), "insert('x', {'a': 1})", node):
        assert shown.startswith("Unavailable the layer hung up without an answer")
    for shown in both(lambda: Rude("close"), "query('x')", node):
        assert shown.startswith("Unavailable the layer hung up without an answer")


def test_a_write_takes_no_connection_that_was_closed_meanwhile() -> None:
    server = Rude(GOOD_ONCE, b'HTTP/1.1 200 OK\r\nX: hold\r\nContent-Length: 8\r\n\r\n{"id":7}')
    code = "import layer, time\nprint(layer.query('x'))\ntime.sleep(0.2)\nprint(layer.insert('x', a=1))"
    environment = {"LAYER_URL": server.url, "PYTHONPATH": str(INSIDE)}
    done = subprocess.run([PYTHONS[0], "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n7\n", "")
    assert server.seen == 2


def test_a_layer_that_hangs_is_given_up(node: str) -> None:
    for shown in both(lambda: Rude("hang"), "query('x')", node, timeout=0.3):
        assert shown == "TimedOut the layer did not answer within 0.3 s\n"


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"\x00" * 100_000,
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{,",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 500 No\r\nContent-Length: 6\r\n\r\n<html>",
    ],
    ids=lambda text: str(text[:60]),
)
def test_garbage_is_called_garbage(node: str, garbage: bytes) -> None:
    for shown in both(lambda: Rude(garbage), "query('x')", node):
        assert shown.startswith("Unavailable what answers at LAYER_URL does not speak as a layer does: ")
        assert shown.count("\n") == 1


def test_an_interim_answer_and_one_that_ends_the_connection_are_understood(node: str) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD
    assert both(lambda: Rude(interim), "query('x')", node) == ["[]\n", "[]\n"]
    closing = GOOD.replace(b"X: hold", b"Connection: close")
    assert both(lambda: Rude(closing), "query('x')", node) == ["[]\n", "[]\n"]


# -- functions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("def main(n, *, text='x'): return [n, text]", [2, "x"]),
        ("def other(n): return 1\ndef triage(n): return n + 1", 3),
        ("def anything(n): return n", 2),
        ("def _helper(): pass\nfrom json import dumps\ndef whole(n): return dumps(n)", "2"),
        ("async def main(n):\n  import asyncio\n  await asyncio.sleep(0)\n  return n", 2),
        ("def main(n):\n  yield n\n  yield {'n': n}", [2, {"n": 2}]),
        ("async def main(n):\n  yield n", [2]),
        ("main = lambda n: None", None),
        ("class main:\n  def __new__(cls, n): return n", 2),
        ("import sys\ndef main(n): sys.exit()", None),
        ("import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n  n: int\ndef main(n): return pickle.loads(pickle.dumps(A(n))).n", 2),
        ("import datetime, decimal\ndef main(n): return [datetime.date(2026, 1, 2), decimal.Decimal('1.10')]", ["2026-01-02", "1.10"]),
        ("import layer\ndef main(n): return layer.query('x')", [{"id": 7, "title": "größer 🐘"}]),
        ("def main(n): return 'ü\\ud800'", "ü\ud800"),
        ("def main(n): return __name__", "function.ticket.triage"),
    ],
)  # fmt: skip
def test_a_function_is_found_called_and_its_value_returned(channel: Layer, code: str, value: object) -> None:
    done = function(channel, code, arguments={"n": 2})
    assert (channel.returned.get("value", channel.returned), done.returncode, done.stderr) == (value, 0, b"")


def test_what_it_prints_is_its_output_and_comes_before_the_end(channel: Layer) -> None:
    code = "import atexit\natexit.register(print, 'last')\ndef main():\n  print('grüße')\n  return 1"
    done = function(channel, code)
    assert (done.stdout.decode(), channel.returned["value"]) == ("grüße\nlast\n", 1)


@pytest.mark.parametrize("executable", PYTHONS)
def test_an_error_shows_the_functions_own_lines(channel: Layer, executable: str) -> None:
    code = "import json\n\ndef deeper(text):\n    return json.loads(text)\n\ndef main():\n    deeper('{')\n"
    done = function(channel, code, executable)
    error = channel.returned["error"]
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
    assert (error["type"], error["message"][:14]) == ("json.decoder.JSONDecodeError", "Expecting prop")
    lines = [line for line in error["traceback"].splitlines() if set(line.strip()) - {"^", "~"}]
    assert lines[:5] == [
        "Traceback (most recent call last):",
        '  File "ticket.triage", line 7, in main',
        "    deeper('{')",
        '  File "ticket.triage", line 4, in deeper',
        "    return json.loads(text)",
    ]
    assert len(lines) == 6 and "layer" not in error["traceback"]


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("def main(:", "SyntaxError", None),
        ("def main(): return undefined", "NameError", "name 'undefined' is not defined"),
        ("raise ValueError('at the top')", "ValueError", "at the top"),
        ("x = 1", "Invalid", "the code of 'ticket.triage' has no function main or triage, and not exactly one other: none"),
        ("def a(): pass\ndef b(): pass", "Invalid", "the code of 'ticket.triage' has no function main or triage, and not exactly one other: a, b"),
        ("def main(other): pass", "TypeError", None),
        ("import sys\ndef main(): sys.exit(3)", "SystemExit", "exit code 3"),
        ("import sys\ndef main(): sys.exit('no')", "SystemExit", "no"),
        ("def main(): raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("def main(): return main()", "RecursionError", None),
        ("def main(): return {'a': [{1}]}", "Invalid", "the result['a'][0] is a set, for which JSON has no form"),
        ("def main(): return [float('nan')]", "Invalid", "the result[0] is nan, for which JSON has no form"),
        ("def main(): return 10 ** 5000", "Invalid", "the result is a number of too many digits"),
        ("def main():\n  yield 1\n  raise OSError('half')", "OSError", "half"),
        ("async def main(): raise OSError('half')", "OSError", "half"),
        ("class Own(Exception): pass\ndef main(): raise Own('x' * 100_000)", "Own", "x" * 19_999 + "…"),
        ("class Own(Exception):\n  def __str__(self): raise OSError\ndef main(): raise Own", "Own", "the message of this error can't be shown"),
        ("def main(): raise ValueError('\\ud800')", "ValueError", "\ud800"),
        ("def main(): raise MemoryError", "MemoryError", ""),
    ],
)  # fmt: skip
def test_however_a_function_fails_it_is_told(channel: Layer, code: str, kind: str, message: str | None) -> None:
    done = function(channel, code)
    error = channel.returned["error"]
    assert (done.returncode, done.stderr, error["type"]) == (1, b"", kind)
    assert message is None or error["message"] == message
    assert isinstance(error["traceback"], str) and len(error["traceback"]) < 21_000
    assert [verb for _, verb, _ in channel.asked] == ["return"]


def test_a_refusal_of_the_layer_keeps_its_code_and_a_chain_its_causes(channel: Layer) -> None:
    channel.answers["insert"] = lambda given: (
        403,
        {"error": {"code": "denied", "message": "nö", "hint": "h", "rows": [3]}},
    )
    code = "import layer\ndef main():\n  try: layer.insert('x')\n  except layer.Denied as error: raise ValueError('worse') from error"
    function(channel, code)
    trace = channel.returned["error"]["traceback"]
    assert "layer.Denied: nö" in trace and "direct cause" in trace and "ValueError: worse" in trace
    function(channel, "import layer\ndef main(): layer.insert('x')")
    error = channel.returned["error"]
    assert {key: error[key] for key in ("type", "message", "code", "hint", "rows")} == {
        "type": "Denied", "message": "nö", "code": "denied", "hint": "h", "rows": [3]
    }  # fmt: skip
    assert [line for line in error["traceback"].splitlines() if "File" in line] == [
        '  File "ticket.triage", line 2, in main'
    ]


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_a_value_that_the_layer_does_not_take_becomes_the_functions_error(
    channel: Layer, node: str, language: str
) -> None:
    def refuse(given: Any) -> tuple[int, Any]:
        if "value" in given:
            return 429, {"error": {"code": "limit_exceeded", "message": "too large", "hint": None}}
        return 200, {"ok": True}

    channel.answers["return"] = refuse
    if language == "python":
        done = function(channel, "def main(): return 'x' * 10_000_000")
    else:
        done = function(channel, "module.exports = () => 'x'.repeat(1e7)", node)
    assert (done.returncode, channel.returned["error"]["type"], channel.returned["error"]["message"]) == (
        1,
        "LimitExceeded",
        "too large",
    )


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_what_can_not_be_returned_is_said_on_stderr(channel: Layer, node: str, language: str) -> None:
    program, code = (PYTHONS[0], "def main(): pass") if language == "python" else (node, "exports.main = () => 1")
    channel.answers["return"] = lambda given: (503, {"error": {"code": "unavailable", "message": "closing"}})
    assert (function(channel, code, program).returncode, function(channel, code, program).stderr) == (
        2,
        b"layer: closing\n",
    )
    argv = [program, "-e", "require('run.js')"] if program == node else [program, "-c", "import layer; layer._main()"]
    for stdin in (b"", b"[]", b"{}", b'{"code": 1}', b"\xff"):
        done = subprocess.run(argv, input=stdin, env=channel.environment(), capture_output=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr == b'layer: stdin is not a JSON object with the "code" of a function\n'


JAVASCRIPT = [
    ("exports.main = ({n}) => n", 2),
    ("module.exports = async ({n}) => [n, undefined]", [2, None]),
    ("function helper() {}\nfunction main({n}) { return n }", 2),
    ("const triage = ({n}) => n + 1", 3),
    ("export function main({n}) { return n }", 2),
    ("export default async ({n}) => n", 2),
    ("export const anything = ({n}) => n", 2),
    ('import layer, { query } from "layer";\nexport async function main() { return [await query("x"), typeof layer.one] }',
     [[{"id": 7, "title": "größer 🐘"}], "function"]),
    ('import {\n  basename,\n} from "node:path";\nimport "fs";\nexport const main = () => basename("/a/b")', "b"),
    ("const n = await Promise.resolve(5);\nexport const main = () => n", 5),
    ("exports.main = function* ({n}) { yield n; yield 3 }", [2, 3]),
    ("exports.main = async function* ({n}) { yield n }", [2]),
    ("exports.main = () => {}", None),
    ("exports.main = () => ({when: new Date(0), not: undefined})", {"when": "1970-01-01T00:00:00.000Z"}),
    ("exports.main = () => process.exit(0)", None),
]  # fmt: skip


@pytest.mark.parametrize(("code", "value"), JAVASCRIPT)
def test_a_function_in_javascript(channel: Layer, node: str, code: str, value: object) -> None:
    if "import layer" in code:  # named imports of CommonJS are found by node only in what it can read statically
        code = code.replace("layer, { query }", "layer").replace("await query", "await layer.query")
    done = function(channel, code, node, arguments={"n": 2})
    assert (channel.returned.get("value", channel.returned), done.returncode, done.stderr) == (value, 0, b"")


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("exports.main = () => { throw new TypeError('nö') }", "TypeError", "nö"),
        ("export const main = async () => { throw new TypeError('nö') }", "TypeError", "nö"),
        ("function main( {", "SyntaxError", None),
        ("export function main( {", "SyntaxError", None),
        ("exports.a = 1", "Invalid", "the code of 'ticket.triage' has no function main or triage, and not exactly one other: none"),
        ("exports.main = () => ({a: [NaN]})", "Invalid", 'the result["a"][0] is NaN, for which JSON has no form'),
        ("exports.main = () => [new Map()]", "Invalid", "the result[0] is a Map, for which JSON has no form"),
        ("exports.main = () => 1n", "Invalid", "the result is a bigint, for which JSON has no form"),
        ("exports.main = () => { const a = {}; a.a = a; return a }", "Invalid", "the result is nested too deep for JSON, or contains itself"),
        ("exports.main = () => exports.main()", "RangeError", "Maximum call stack size exceeded"),
        ("exports.main = () => process.exit(3)", "ExitCode", "exit code 3"),
        ("exports.main = () => new Promise(() => {})", "Error", None),
        ("exports.main = () => { setTimeout(() => { throw new Error('late') }, 1); return new Promise(() => {}) }", "Error", "late"),
        ("exports.main = () => { Promise.reject(new Error('alone')); return new Promise((end) => setTimeout(end, 5000)) }", "Error", "alone"),
        ("exports.main = () => { throw 'text' }", "string", "text"),
        ("exports.main = () => { throw null }", "null", "null"),
        ("exports.main = () => require('nothing-of-this-name')", "Error", None),
    ],
)  # fmt: skip
def test_however_a_function_in_javascript_fails_it_is_told(
    channel: Layer, node: str, code: str, kind: str, message: str | None
) -> None:
    done = function(channel, code, node)
    error = channel.returned["error"]
    assert (done.returncode, done.stderr, error["type"]) == (1, b"", kind)
    assert message is None or error["message"] == message
    assert str(INSIDE) not in error["traceback"] and "base64" not in error["traceback"]
    if kind == "TypeError":
        assert "ticket.triage:1:" in error["traceback"]


# -- the same again ----------------------------------------------------------------------------------------------------

NASTY = """
import asyncio, calendar, email.utils, logging, os, pickle, queue, random, secrets, string, sys, tempfile, threading, time, uuid
import datetime as dates
from datetime import date, datetime, timedelta, timezone
from time import time as early, perf_counter, sleep

class Mine(datetime):
    pass

class Dice(random.Random):
    pass

def main():
    start = time.monotonic()
    print(time.time(), early(), time.time_ns(), time.clock_gettime(time.CLOCK_REALTIME), time.clock_gettime_ns(time.CLOCK_MONOTONIC))
    print(perf_counter(), time.perf_counter_ns(), time.monotonic_ns(), time.process_time(), time.thread_time_ns())
    print(datetime.now(), datetime.utcnow(), datetime.today(), date.today(), datetime.now(timezone.utc), dates.datetime.now(tz=timezone(timedelta(hours=2))))
    print(Mine.now(), type(Mine.now()).__name__, Mine.today(), Mine.utcnow(), repr(datetime.now()))
    print(time.localtime(), time.gmtime(), time.ctime(), time.asctime(), time.strftime("%c"), email.utils.formatdate(), time.gmtime(0).tm_year)
    now = datetime.now()
    assert isinstance(now, datetime) and type(now) is datetime and pickle.loads(pickle.dumps(now)) == now and datetime is dates.datetime
    assert isinstance(Mine.now(), Mine) and datetime.now().tzinfo is None and abs(datetime.now(timezone.utc).timestamp() - time.time()) < 5
    print(random.random(), random.randint(1, 10**9), random.sample(range(1000), 5), random.gauss(0, 1), random.choice("abc"))
    print(random.Random().random(), random.Random(5).random(), Dice().random(), random.SystemRandom().random(), random.SystemRandom().randrange(10**9))
    random.seed(); print(random.random())
    print(os.urandom(9), os.getrandom(4), secrets.token_hex(), secrets.token_urlsafe(), secrets.randbelow(10**9), secrets.choice(string.printable))
    print(uuid.uuid1(), uuid.uuid1(), uuid.uuid4(), uuid.uuid4(), uuid.getnode())
    print(next(tempfile._get_candidate_names()), len(set(os.urandom(1000))) > 200)
    logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(created)f %(message)s", force=True)
    logging.warning("logged")
    sleep(0.05)
    time.sleep(0.01)
    done = threading.Event(); waiting = queue.Queue()
    threading.Thread(target=lambda: (done.wait(5), waiting.put(1))).start()
    done.set(); waiting.get(timeout=5)
    async def tick():
        await asyncio.wait_for(asyncio.sleep(0.01), 5)
        return time.time()
    print(asyncio.run(tick()))
    child = os.fork()
    if child == 0:
        print("child", os.urandom(4), random.random(), uuid.uuid4(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(time.monotonic() - start >= 0.06, os.urandom(4))
    return [time.time(), datetime.now(), random.random(), uuid.uuid4(), time.monotonic() - start]
"""


@pytest.mark.parametrize("executable", PYTHONS)
def test_every_clock_and_every_chance_is_the_same_again(channel: Layer, executable: str) -> None:
    def run(**given: Any) -> tuple[bytes, dict[str, Any]]:
        done = function(channel, NASTY, executable, **given)
        assert done.stderr == b"" and "value" in channel.returned, (done.stderr, channel.returned)
        return done.stdout, channel.returned

    output, returned = run()
    assert set(returned["tape"]) == {"wall", "steady", "cpu"}
    assert all(type(part) is int for values in returned["tape"].values() for part in values)
    again, replayed = run(tape=returned["tape"])
    assert again == output
    assert replayed == returned
    other, differs = run(seed="another", tape=returned["tape"])
    assert (
        other != output and differs["value"][0] == returned["value"][0] and differs["value"][2] != returned["value"][2]
    )
    assert output.startswith(b"1772366400.") and b"2026-03-01 12:00:00." in output
    assert len(set(output.split())) > 60


NASTY_JS = """
const crypto = require("crypto"), { promisify } = require("util"), { performance: timer } = require("perf_hooks");
class Mine extends Date {}
exports.main = async () => {
  const start = performance.now();
  console.log(Date.now(), new Date(), Date().length > 20, Date(), new Date(0), new Date(2020, 1), new Mine(), new Mine() instanceof Mine);
  console.log(new Date() instanceof Date, new Date().constructor === Date, Date.length, Date.name, Date.UTC(2020, 1), typeof Date.parse, structuredClone(new Date()));
  console.log(performance.now(), timer.now(), performance.timeOrigin, process.hrtime(), process.hrtime(process.hrtime()), process.hrtime.bigint(), process.uptime(), process.cpuUsage());
  console.log(new Intl.DateTimeFormat("en", {timeStyle: "full", timeZone: "UTC"}).format(), new Intl.DateTimeFormat("en").formatToParts().length, new Date().toLocaleString());
  console.log(Math.random(), Math.random(), [3, 1, 2].sort(() => Math.random() - 0.5));
  console.log(crypto.randomBytes(5), crypto.randomUUID(), crypto.randomInt(1000), crypto.randomInt(5, 10), crypto.randomFillSync(Buffer.alloc(4)));
  console.log(await promisify(crypto.randomBytes)(3), await promisify(crypto.randomInt)(99), await new Promise((end) => crypto.randomFill(new Uint8Array(3), (error, made) => end(made))));
  console.log(crypto.webcrypto.getRandomValues(new Uint32Array(2)), crypto.getRandomValues?.(new Uint8Array(2)), crypto.webcrypto.randomUUID());
  console.log((await import("node:crypto")).randomUUID(), globalThis.crypto?.randomUUID());
  await new Promise((end) => setTimeout(end, 20));
  return [Date.now(), new Date(), Math.random(), crypto.randomUUID(), performance.now() - start];
};
"""


def test_every_clock_and_every_chance_is_the_same_again_in_javascript(channel: Layer, node: str) -> None:
    def run(**given: Any) -> tuple[bytes, dict[str, Any]]:
        done = function(channel, NASTY_JS, node, **given)
        assert done.stderr == b"" and "value" in channel.returned, (done.stderr, channel.returned)
        return done.stdout, channel.returned

    output, returned = run()
    assert set(returned["tape"]) == {"wall", "steady", "cpu"}
    assert all(type(part) is int for values in returned["tape"].values() for part in values)
    assert run(tape=returned["tape"]) == (output, returned)
    other, differs = run(seed="another", tape=returned["tape"])
    assert (
        other != output
        and differs["value"][:2] == returned["value"][:2]
        and differs["value"][2] != returned["value"][2]
    )
    assert output.startswith(b"1772366400") and b"true true 7 Date" in output


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_without_a_clock_the_tape_says_when_it_began_and_without_a_seed_nothing_is_touched(
    channel: Layer, node: str, language: str
) -> None:
    if language == "python":
        program, code = PYTHONS[0], "import time, random\ndef main(): return [time.time(), random.random()]"
        plain = "import time, random, os, datetime, uuid\ndef main(): return [repr(time.time), repr(os.urandom), repr(datetime.datetime.now)[:9], abs(time.time() - %f) < 600]"
        untouched = ["<built-in function time>", "<built-in function urandom>", "<built-in", True]
    else:
        program, code = node, "exports.main = () => [Date.now() / 1000, Math.random()]"
        plain = "exports.main = () => [String(Date.now), String(Math.random).slice(0, 8), Math.abs(Date.now() / 1000 - %f) < 600]"
        untouched = ["function now() { [native code] }", "function", True]
    function(channel, code, program, clock=None)
    first = channel.returned
    assert first["tape"]["start"].endswith("Z")
    function(channel, code, program, clock=None, tape=first["tape"])
    assert channel.returned == first
    import time

    function(channel, plain % time.time(), program, seed=None, clock=None)
    assert channel.returned == {"value": untouched, "tape": None}


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_a_tape_that_is_full_says_so(channel: Layer, node: str, language: str) -> None:
    if language == "python":
        function(channel, "import time\ndef main(): return len([time.time() for _ in range(10_001)])")
    else:
        function(channel, "exports.main = () => [...Array(10001)].map(() => Date.now()).length", node)
    assert channel.returned["value"] == 10_001
    assert len(channel.returned["tape"]["wall"]) == 10_000 and channel.returned["tape"]["overflow"] is True


def test_a_module_that_was_loaded_before_is_tamed_too(channel: Layer) -> None:
    """In the fork server all of them are loaded, and their classes held by others, before a function starts."""
    code = "def main():\n  import sys, random\n  held = sys.held\n  return [held[0].now(), str(held[1]()), held[2].random(), random.random()]"
    start = "import sys, random, uuid; from datetime import datetime; sys.held = datetime, uuid.uuid4, random; datetime.now(); datetime.now(); import layer; layer._warm(); layer._main()"
    request: dict[str, Any] = {"code": code, "name": "f", "arguments": {}, "seed": "s", "clock": CLOCK, "tape": None}
    seen = []
    for executable in PYTHONS:
        for argv in ([executable, "-c", start], [executable, "-c", start]):
            done = subprocess.run(
                argv, input=json.dumps(request).encode(), env=channel.environment(), capture_output=True
            )
            assert done.stderr == b""
            seen.append(channel.returned["value"])
            request["tape"] = channel.returned["tape"]
    assert all(each == seen[0] for each in seen) and seen[0][0].startswith("2026-03-01T12:00:0")


def test_sleep_is_real_at_first_and_skipped_in_a_replay(channel: Layer) -> None:
    code = "import time\ndef main():\n  before = time.time()\n  time.sleep(0.5)\n  return time.time() - before"
    function(channel, code)
    first = channel.returned
    assert first["value"] >= 0.5
    first["tape"]["wall"][1] += 3_600_000_000_000
    function(channel, code.replace("0.5", "3600"), tape=first["tape"])
    assert channel.returned["value"] > 3600
    function(channel, code.replace("0.5", "-1"), tape=first["tape"])
    assert channel.returned["error"]["type"] == "ValueError"


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2026-03-01T12:00:00.25+00:00", 1772366400250000000),
        ("2026-03-01T12:00:00.250000", 1772366400250000000),
        ("2026-03-01 14:00:00.123456789+02:00", 1772366400123456789),
        ("2026-03-01T06:30-0530", 1772366400000000000),
        ("2024-02-29", 1709164800000000000),
        ("1969-12-31T23:59:59Z", -1000000000),
    ],
)
def test_the_clock_is_read_as_iso_8601(text: str, nanoseconds: int) -> None:
    code = f"import layer_run; print(layer_run.instant({text!r}))"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(INSIDE)}, capture_output=True, text=True)
    assert done.stdout == f"{nanoseconds}\n"


def test_a_clock_that_is_none_is_refused(channel: Layer, node: str) -> None:
    for program in (PYTHONS[0], node):
        function(channel, "def main(): pass" if program != node else "exports.main = () => 1", program, clock="soon")
        assert channel.returned["error"]["type"] == "Invalid" and "ISO 8601" in channel.returned["error"]["message"]


# -- the command -------------------------------------------------------------------------------------------------------


def command(channel: Layer, *words: str, stdin: str = "", **more: str) -> tuple[int, str, str]:
    done = subprocess.run(
        ["layer", *words], env=channel.environment() | more, input=stdin, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_prints_tables_for_people_and_json_for_programs(channel: Layer, tmp_path: Path) -> None:
    assert command(channel, "query", "select") == (0, "id  title\n──  ─────────\n 7  größer 🐘\n1 row\n", "")
    assert (
        command(channel, "query", "-", "a=1", "--json", stdin="select :a")[1]
        == '[{"id": 7, "title": "gr\\u00f6\\u00dfer \\ud83d\\udc18"}]\n'
    )
    assert channel.asked[-1] == ("POST", "query", {"sql": "select :a", "params": {"a": 1}})
    assert command(channel, "insert", "ticket", "title=größer", "n=3", 'text="3"', "gone=null") == (0, "7\n", "")
    assert channel.asked[-1][2]["values"] == {"title": "größer", "n": 3, "text": "3", "gone": None}
    assert command(channel, "insert", "ticket", '[{"a": 1}, {"a": 2}]') == (0, "[0, 1]\n", "")
    assert command(channel, "update", "ticket", "7", "status=open", "--expect", "3") == (0, "", "")
    assert channel.asked[-1][2] == {"entity": "ticket", "id": 7, "values": {"status": "open"}, "expect": 3}
    assert command(channel, "upsert", "ticket", "k=1", "--on=k") == (0, "8\n", "")
    assert command(channel, "delete", "ticket", "7") == (0, "", "")
    assert command(channel, "call", "f", "name=x", "--json") == (0, "[1, null]\n", "")
    assert command(channel, "secret", "KEY") == (0, "s3cret\n", "")
    assert command(channel, "emit", "done", '{"x": 1}') == (0, "", "")
    assert command(channel, "projection", "open") == (0, "0 rows\n", "")
    assert command(channel, "me") == (0, "principal  ann\n", "")
    assert command(channel, "slice") == (0, "/slice.db\n", "")
    (tmp_path / "file").write_bytes(b"x")
    assert command(channel, "artifact", str(tmp_path / "file"), "--name", "n") == (
        0,
        hashlib.sha256(b"x").hexdigest() + "\n",
        "",
    )
    channel.answers["query"] = lambda given: (200, {"rows": [{"a": "\x1b[31m\n", "b": None, "c": {"d": [1]}}], "tx": 1})
    assert command(channel, "query", "x")[1].splitlines()[2] == '\\x1b[31m\\n  null  {"d": [1]}'
    status, shown, _ = command(channel, "--help")
    assert status == 0 and shown.startswith("usage: layer query SQL")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], "a command is needed"),
        (["nothing"], "there is no command 'nothing'"),
        (["query"], "layer query needs SQL"),
        (["insert", "ticket", "title"], "'title' is not NAME=VALUE"),
        (["insert", "ticket", "{no"], "is not JSON"),
        (["update", "ticket", "x", "a=1"], "ID 'x' is not a number"),
        (["upsert", "ticket", "a=1"], "needs --on"),
        (["me", "you"], "takes no 'you'"),
        (["update", "--force", "ticket", "7"], "takes no --force"),
        (["update", "ticket", "7", "--expect"], "--expect needs a value"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_told_in_one_line(channel: Layer, words: list[str], wanted: str) -> None:
    status, output, complaint = command(channel, *words)
    assert (status, output, complaint.count("\n")) == (2, "", 1) and wanted in complaint
    assert json.loads(command(channel, *words, "--json")[2])["error"] == "invalid"
    assert channel.asked == []


def test_without_python_curl_does_it(channel: Layer, tmp_path: Path) -> None:
    for name in ("sh", "curl", "cat"):
        (tmp_path / name).symlink_to(shutil.which(name) or pytest.fail(f"{name} is missing"))
    path = {"PATH": f"{INSIDE}/bin:{tmp_path}"}
    row = '{"rows": [{"id": 7, "title": "gr\\u00f6\\u00dfer \\ud83d\\udc18"}], "tx": 3}\n'
    channel.answers["query"] = lambda given: (200, {"rows": [{"id": 7, "title": "größer 🐘"}], "tx": 3})
    assert command(channel, "query", "select '@x'", "--json", **path) == (0, row, "")
    assert channel.asked[-1] == ("POST", "query", b"select '@x'")
    assert command(channel, "insert", "ticket", '{"title": "größer"}', **path) == (0, '{"id": 7}\n', "")
    assert channel.asked[-1] == ("POST", "insert", {"entity": "ticket", "values": {"title": "größer"}})
    assert command(channel, "update", "ticket", "7", '{"a": 1}', **path) == (0, '{"ok": true}\n', "")
    assert command(channel, "call", "ticket.triage", **path) == (0, '{"result": [1, null]}\n', "")
    assert channel.asked[-1] == ("POST", "call", {"function": "ticket.triage", "arguments": {}})
    assert command(channel, "me", **path) == (0, '{"principal": "ann"}\n', "")
    channel.answers["insert"] = lambda given: (403, {"error": {"code": "denied", "message": "no"}})
    assert command(channel, "insert", "ticket", "{}", **path) == (
        3,
        "",
        'layer: {"error": {"code": "denied", "message": "no"}}\n',
    )
    for words in (
        ["insert", "ticket", "a=1"],
        ["insert", 'x","y', "{}"],
        ["update", "ticket", "7a", "{}"],
        ["secret", "x"],
        ["query"],
    ):
        status, output, complaint = command(channel, *words, **path)
        assert (status, output, complaint.count("\n")) == (2, "", 1)
    assert command(channel, "--help", **path)[0] == 0
    assert command(channel, "me", **path, LAYER_URL="")[::2] == (
        8,
        "layer: not inside a box of a layer: LAYER_URL is not set\n",
    )
    status, _, complaint = command(channel, "me", **path, LAYER_URL="http://127.0.0.1:9/x")
    assert status == 8 and complaint.startswith("layer: the layer can't be reached: ")
    (tmp_path / "curl").unlink()
    assert command(channel, "me", **path) == (8, "", "layer: this box has neither python3 nor curl\n")


# -- the page ----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "inside.md").read_text()


def shown(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S)


def test_what_the_page_shows_works(channel: Layer, node: str) -> None:
    (python_code,), (javascript,), shell = shown("python function"), shown("js function"), shown("sh box")
    function(channel, python_code, arguments={"id": 7})
    assert channel.returned["value"] == {"id": 7, "title": "größer 🐘"}
    function(channel, javascript, node, arguments={"id": 7})
    assert channel.returned["value"]["title"] == "größer 🐘"
    for script in shell:
        done = subprocess.run(
            ["sh", "-ec", script], env=channel.environment(), capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "") and done.stdout
    assert ("POST", "query", b"select * from ticket") in channel.asked


def test_the_page_names_every_verb() -> None:
    source = ast.parse((INSIDE / "layer.py").read_text())
    verbs = [node.name for node in source.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    assert [verb for verb in verbs if not re.search(rf"`{verb}[`(]", PAGE)] == []
