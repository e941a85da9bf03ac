"""A recorded execution can be shown, run again and compared step by step, or take another course from one of its steps on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from law.conftest import define
from sandbox.egress.boxes import local

from livinglayer import Layer
from livinglayer.edges.cli.main import main
from livinglayer.errors import Denied, Invalid, LayerError, NotFound
from livinglayer.law import replay as law
from livinglayer.law.replay import Difference, Verdict, fork_at, replay, verify

FILES = """
import hashlib, os, pathlib
def files(n):
    pathlib.Path("work/deep").mkdir(parents=True)
    for i in range(n):
        pathlib.Path(f"work/deep/{i}.txt").write_text("line\\n" * (i + 1))
    os.remove("work/deep/0.txt")
    names = sorted(str(p) for p in pathlib.Path("work").rglob("*.txt"))
    pathlib.Path("/tmp/sum").write_bytes(b"".join(pathlib.Path(p).read_bytes() for p in names))
    print(names)
    return hashlib.sha256(pathlib.Path("/tmp/sum").read_bytes()).hexdigest()
"""
CLOCK = """
import datetime, time
def clock(n):
    seen = [time.time() for _ in range(n)]
    time.sleep(0.002)
    open("at", "w").write(datetime.datetime.now().isoformat())
    return [seen, time.monotonic(), time.perf_counter_ns(), time.process_time(), str(datetime.date.today()), time.ctime()]
"""
CHANCE = """
import layer, os, random, secrets, uuid
def chance(n):
    ids = [layer.insert("ticket", title=str(uuid.uuid4()), priority=random.randrange(1000)) for _ in range(n % 3 + 1)]
    layer.update("ticket", ids[0], note=secrets.token_hex(8))
    layer.upsert("ticket", {"title": os.urandom(4).hex(), "priority": 1}, on=["title"])
    return random.sample(range(100), 5)
"""
ROWS = """
import layer
def rows(n):
    top = layer.query("select id, title, priority from ticket order by priority desc, id limit :n", n=n + 1)
    first = layer.insert("ticket", [{"title": row["title"] + "!"} for row in top])
    try:
        layer.update("ticket", 999999, priority=1)
    except layer.NotFound as error:
        print(error, error.hint)
    try:
        layer.query("select * from customer")
    except layer.LayerError as error:
        print(type(error).__name__)
    layer.delete("ticket", first[0])
    seen = layer.query("select count(*) as n from ticket")
    layer.emit("counted", n=seen[0]["n"])
    open("report", "w").write("x" * 9000)
    layer.artifact("report")
    return [seen, layer.me()["function"], layer.call("ticket.inner", n=n)]
"""
INNER = "import layer\ndef inner(n):\n    return [layer.insert('ticket', title='inner'), n]"
HTTP = """
import layer, json, urllib.error, urllib.request
def http(n):
    seen = [json.load(urllib.request.urlopen(f"http://api.test/{i}")) for i in range(n % 3 + 1)]
    again = json.load(urllib.request.urlopen("http://api.test/0"))
    sent = json.load(urllib.request.urlopen("http://api.test/post", data=json.dumps(seen).encode()))
    try:
        urllib.request.urlopen("http://elsewhere.test/")
    except (urllib.error.URLError, OSError) as error:
        print("refused")
    layer.insert("ticket", title=str(again), priority=sent["count"])
    return [seen, again, sent]
"""
SCRIPT = """
const layer = require("layer"), fs = require("fs"), crypto = require("crypto");
exports.main = async ({ n }) => {
  const seen = await layer.query("select id, priority from ticket order by id limit 3");
  const answer = await (await fetch("http://api.test/js")).json();
  fs.writeFileSync("made.txt", `${Math.random()} ${new Date().toISOString()} ${crypto.randomUUID()}`);
  await layer.insert("ticket", { title: String(Date.now()), priority: answer.count });
  console.log(performance.now(), n);
  return { seen, at: Date.now(), chance: [Math.random(), crypto.randomBytes(4).toString("hex")], answer };
};
"""
FAILS = "import layer, time\ndef fails(n):\n    layer.insert('ticket', title='half')\n    raise ValueError(f'{n} at {time.time()}')"
SELECT = "select id, title from ticket where priority >= :n order by id"


class Web:
    """A server whose every answer is another."""

    def __init__(self) -> None:
        self.count = 0
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                web.count += 1
                body = json.dumps(
                    {"count": web.count, "path": self.path, "got": self.rfile.read(size).decode()}
                ).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.rule = local("api.test", self.server.server_address[1])
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    yield made
    made.server.shutdown()
    made.server.server_close()


def last(layer: Layer, name: str) -> int:
    return int(layer.query("select max(id) as id from execution where function = :name", {"name": name})[0]["id"])


def ran(layer: Layer, name: str, **arguments: Any) -> int:
    """The execution of a call, whatever came of it."""
    try:
        layer.call(name, arguments)
    except LayerError as error:
        return int(error.details["execution"])  # type: ignore[call-overload]
    return last(layer, name)


def found(layer: Layer, code: str, **more: Any) -> Verdict:
    """What verifying a function with this code says."""
    define(layer, "ticket.it", code, **more)
    return verify(layer, ran(layer, "ticket.it"))


def workshop(layer: Layer, web: Web) -> list[str]:
    """Functions of all kinds that can be had again."""
    layer.call("blueprint.define", name="net", egress=[web.rule])
    define(layer, "ticket.inner", INNER)
    define(layer, "ticket.files", FILES)
    define(layer, "ticket.clock", CLOCK)
    define(layer, "ticket.chance", CHANCE)
    define(layer, "ticket.rows", ROWS, calls=["ticket.inner"])
    define(layer, "ticket.http", HTTP, blueprint="net")
    define(layer, "ticket.script", SCRIPT, blueprint="net", language="javascript")
    define(layer, "ticket.fails", FAILS)
    define(layer, "ticket.select", SELECT, language="sql")
    return [f"ticket.{name}" for name in ("files", "clock", "chance", "rows", "http", "script", "fails", "select")]


def test_a_hundred_executions_are_reproduced_whatever_has_happened_since(desk: Layer, web: Web) -> None:
    names = workshop(desk, web)
    for n in range(5):
        desk.insert("ticket", {"title": f"t{n}", "priority": n})
    executions = [ran(desk, names[n % len(names)], n=n % 5) for n in range(100)]
    with desk.transaction() as tx:
        for row in tx.query("select id from ticket"):
            tx.update("ticket", row["id"], {"title": "other", "priority": 0})
    for name in names[:-1]:
        define(desk, name, "def main(n): return 'something else'")
    tickets, reached = desk.query("select * from ticket order by id"), web.count
    verdicts = [verify(desk, number) for number in executions]
    assert [str(verdict) for verdict in verdicts if not verdict] == []
    assert all(verdict.steps >= 2 and not verdict.notes for verdict in verdicts)
    assert desk.query("select * from ticket order by id") == tickets and web.count == reached
    assert desk.query("select count(*) as n from execution where kind = 'replay' and status = 'done'") == [{"n": 100}]
    assert desk.verify().ok


def test_a_verification_is_an_execution_of_its_own(desk: Layer) -> None:
    number = ran(desk, "ticket.bump", id=desk.insert("ticket", {"title": "x"}))
    verdict = verify(desk, number)
    assert verdict and str(verdict).startswith("reproduced: ")
    [row] = desk.query("select * from execution where id = :id", {"id": verdict.verification})
    assert (row["kind"], row["verb"], row["parent"], row["status"]) == ("replay", "execution.verify", number, "done")
    assert row["result"]["value"] == verdict.plain()
    kinds = [s["kind"] for s in desk.query("select kind from step where execution = :id order by n", {"id": row["id"]})]
    assert kinds[:3] == ["box", "query", "mutation"] and desk.query("select priority from ticket") == [{"priority": 1}]


UNIQUE = "open('/proc/sys/kernel/random/uuid').read()"  # not the tape's: another each time


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (f"import layer\ndef main():\n    layer.insert('ticket', title='a')\n    layer.insert('ticket', title={UNIQUE})", "mutation"),
        (f"import layer\ndef main():\n    layer.query('select 1 as n from ticket where title = :t', t={UNIQUE})", "query"),
        (f"import layer\ndef main():\n    layer.emit('x', value={UNIQUE})", "emit"),
        (f"def main():\n    open('made', 'w').write({UNIQUE})", "file"),
        (f"def main():\n    open({UNIQUE}.strip(), 'w').write('x')", "file"),
        (f"def main():\n    print({UNIQUE})", "output"),
        (f"def main():\n    return {UNIQUE}", "return"),
        (f"def main():\n    raise ValueError({UNIQUE})", "outcome"),
        (f"import time\ndef main():\n    [time.time() for _ in range(1 + int({UNIQUE}[:4], 16) % 5000)]", "tape"),
        (f"import layer\ndef main():\n    try: layer.update('ticket', 1, title={UNIQUE})\n    except layer.NotFound: pass", "refusal"),
    ],
    ids=["mutation", "query", "emit", "content", "name", "output", "return", "error", "clocks", "refusal"],
)  # fmt: skip
def test_the_first_step_that_differs_is_named(desk: Layer, code: str, kind: str) -> None:
    verdict = found(desk, code)
    difference = verdict.difference
    assert verdict.status == "differs" and difference is not None and difference.kind == kind
    number = verdict.execution
    if difference.n is not None:
        [step] = desk.query("select kind from step where execution = :e and n = :n", {"e": number, "n": difference.n})
        assert kind in (step["kind"], "outcome") and difference.expected != difference.got
        assert str(verdict).startswith(f"differs at step {difference.n} ({kind})")
    if kind == "mutation":
        first = desk.query("select min(n) as n from step where execution = :e and kind = 'mutation'", {"e": number})
        assert difference.n == first[0]["n"] + 1


def test_steps_that_are_missing_or_too_many_are_named(desk: Layer) -> None:
    code = f"import layer\ndef main():\n    for n in range(int({UNIQUE}[:8], 16) % 1000): layer.emit('x')"
    verdict = found(desk, code)
    assert verdict.status == "differs" and verdict.difference is not None and verdict.difference.kind == "emit"
    assert (verdict.difference.got is None) == (verdict.difference.n is not None)


def test_another_request_to_the_network_is_named(desk: Layer, web: Web) -> None:
    desk.call("blueprint.define", name="net", egress=[web.rule])
    code = f"""
import layer, urllib.request
def main():
    urllib.request.urlopen("http://api.test/same").read()
    try:
        layer.insert("ticket", title=urllib.request.urlopen("http://api.test/" + {UNIQUE}.strip()).read().decode())
    except OSError:
        layer.emit("refused")
"""
    verdict = found(desk, code, blueprint="net")
    assert verdict.status == "differs" and verdict.difference is not None
    assert verdict.difference.kind == "network" and verdict.difference.expected is not None
    assert verdict.difference.expected["path"] != "/same" and web.count == 2


def test_an_answer_that_is_another_now_is_named(desk: Layer) -> None:
    code = "import layer\ndef main():\n    return layer.query('select title, priority from ticket order by id')"
    define(desk, "ticket.list", code)
    desk.grant("ann", "call", "function:ticket.list")
    allowed = desk.grant("ann", "read", "ticket")
    desk.insert("ticket", {"title": "a"})
    desk.call("ticket.list", principal="ann")
    number = last(desk, "ticket.list")
    assert verify(desk, number)
    desk.revoke(allowed)
    desk.grant("ann", "read", "ticket", where="priority > 5")
    verdict = verify(desk, number)
    assert verdict.status == "differs" and verdict.difference is not None
    assert verdict.difference.kind == "query" and "permissions" in str(verdict)


@pytest.mark.parametrize(
    ("code", "more", "reason"),
    [
        ("#!/bin/sh\necho '\"same\"'", {"language": "executable"}, "executable"),
        ("def main(): return 1", {"deterministic": False}, "declared not to be"),
        ("import time\ndef main():\n    for _ in range(10_001): time.time()", {}, "more often than is kept"),
        ("import time\ndef main():\n    while True: pass", {"timeout": 1.0}, "limit (timed out)"),
        ("import os\ndef main():\n    os._exit(0)", {}, "without telling"),
    ],
    ids=["executable", "declared", "overflow", "timeout", "exit"],
)
def test_what_can_not_be_deterministic_is_named_and_not_claimed(desk: Layer, code: str, more: Any, reason: str) -> None:
    verdict = found(desk, code, **more)
    assert (verdict.status, verdict.difference) == ("not deterministic", None) and reason in verdict.reasons[0]
    assert not verdict and str(verdict).startswith("not deterministic: ")


@pytest.mark.parametrize("tape", ['"none"', '{"wall": 7}', '{"untamed": [1]}', '{"wall": ["x"]}', "[1]"])
def test_a_tape_that_is_none_harms_nobody(desk: Layer, tape: str) -> None:
    code = f"""
import layer, os
def main():
    body = b'{{"value": 1, "tape": {tape}}}'
    layer._exchange("POST", "/return", body, len(body))
    os._exit(0)
"""
    assert found(desk, code).status in ("differs", "not deterministic", "reproduced")


def test_an_executable_is_compared_all_the_same(desk: Layer) -> None:
    code = "#!/bin/sh\nlayer emit seen >/dev/null\ncat /proc/sys/kernel/random/uuid\n"
    verdict = found(desk, code, language="executable")
    assert verdict.status == "differs" and verdict.difference is not None and verdict.difference.kind == "output"
    assert "executable" in verdict.reasons[0]


def test_a_request_that_got_no_answer_is_not_claimed(desk: Layer) -> None:
    desk.call("blueprint.define", name="net", egress=[local("nobody.test", 1)])
    code = "import urllib.request\ndef main():\n    try: urllib.request.urlopen('http://nobody.test/')\n    except OSError as error: return 'no'"
    verdict = found(desk, code, blueprint="net")
    assert not verdict and any("got no whole answer" in reason for reason in verdict.reasons)


def test_a_recording_that_is_damaged_is_not_claimed(desk: Layer, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.call("blueprint.define", name="net", egress=[web.rule])
    define(desk, "ticket.http", HTTP, blueprint="net")
    number = ran(desk, "ticket.http", n=1)
    read = desk.engine.get_blob
    monkeypatch.setattr(desk.engine, "get_blob", lambda digest: (read(digest) or b"").replace(b"200", b"201"))
    verdict = verify(desk, number)
    assert verdict.status == "not deterministic" and "gone or damaged" in str(verdict)


def test_a_past_that_was_pruned_is_not_claimed(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "x"})
    number = ran(desk, "ticket.bump", id=id)
    desk.update("ticket", id, {"priority": 50})
    desk.prune(desk.update("ticket", id, {"priority": 60}))
    verdict = verify(desk, number)
    assert verdict.status == "not deterministic" and "pruned" in verdict.reasons[0]


def test_an_execution_on_a_branch_is_verified_there_even_when_it_is_discarded(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "x", "priority": 3})
    desk.fork("idea")
    desk.call("ticket.bump", id=id, branch="idea")
    desk.update("ticket", id, {"priority": 70}, branch="idea")
    number = last(desk, "ticket.bump")
    assert verify(desk, number)
    desk.discard("idea")
    assert verify(desk, number)


def test_what_is_no_whole_record_of_a_function_is_refused(desk: Layer) -> None:
    desk.call("row.insert", entity="ticket", values={"title": "x"})
    number = desk.query("select max(id) as id from execution")[0]["id"]
    with pytest.raises(Invalid, match=r"row\.insert"):
        verify(desk, number)
    with pytest.raises(NotFound):
        verify(desk, 999_999)
    with pytest.raises(NotFound):
        replay(desk, 999_999)
    assert replay(desk, number).row["verb"] == "row.insert"


def test_only_who_ran_it_and_owners_may_run_it_again(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "x"})
    for name in ("ann", "ben"):
        for action, resource in (("call", "function:ticket.bump"), ("read", "ticket"), ("update", "ticket")):
            desk.grant(name, action, resource)
    desk.call("ticket.bump", id=id, principal="ann")
    number = last(desk, "ticket.bump")
    assert verify(desk, number) and verify(desk, number, "ann")
    with pytest.raises(NotFound):
        verify(desk, number, "ben")
    with pytest.raises(NotFound):
        fork_at(desk, number, 1, "idea", principal="ben")
    with pytest.raises(NotFound):
        replay(desk, number, "ben")


# Another course

BROKEN = """
import layer, urllib.request, random
def settle(id):
    row = layer.one("select title, priority from ticket where id = :id", id=id)
    made = layer.insert("ticket", title=urllib.request.urlopen("http://api.test/").read().decode(), priority=random.randrange(100))
    layer.update("ticket", id, note=row["titel"])
    return made
"""


def test_a_failed_execution_goes_on_with_repaired_code_and_its_branch_merges(desk: Layer, web: Web) -> None:
    desk.call("blueprint.define", name="net", egress=[web.rule])
    define(desk, "ticket.settle", BROKEN, blueprint="net")
    id = desk.insert("ticket", {"title": "x"})
    number = ran(desk, "ticket.settle", id=id)
    record = replay(desk, number)
    assert record.row["status"] == "failed" and "KeyError" in record.lines()[-1]
    other = desk.insert("ticket", {"title": "later"})
    desk.update("ticket", id, {"priority": 9})
    mutation = next(step for step in record.steps if step.kind == "mutation")
    made = fork_at(desk, number, mutation.n + 1, "repaired", code=BROKEN.replace("titel", "title"))
    assert made["status"] == "done" and made["value"] == mutation.detail["id"] and web.count == 1
    there = {row["id"]: row for row in desk.query("select * from ticket", branch="repaired")}
    assert other not in there and there[id]["note"] == "x" and '"count": 1' in there[made["value"]]["title"]
    [row] = desk.query("select * from execution where id = :id", {"id": made["execution"]})
    assert (row["parent"], row["branch"], row["kind"], row["status"]) == (number, "repaired", "function", "done")
    assert str(number) in json.dumps(desk.why(f"ticket/{id}.note", branch="repaired").json())
    assert verify(desk, made["execution"])
    assert desk.merge("repaired")
    now = {row["id"]: row for row in desk.query("select * from ticket")}
    assert (now[id]["note"], now[id]["priority"], len(now)) == ("x", 9, 3)
    assert desk.call("ticket.settle", id=id) and web.count == 2  # the code came with the branch
    assert desk.verify().ok


def test_from_the_step_on_everything_is_in_earnest(desk: Layer, web: Web) -> None:
    desk.call("blueprint.define", name="net", egress=[web.rule])
    code = HTTP.replace("n % 3 + 1", "n")
    define(desk, "ticket.http", code, blueprint="net")
    number = ran(desk, "ticket.http", n=3)
    assert web.count == 5
    made = fork_at(desk, number, 1, "anew")
    assert made["value"][0][0]["count"] == 6 and web.count == 10
    requests = [step.n for step in replay(desk, number).steps if step.detail.get("protocol") == "http"]
    made = fork_at(desk, number, requests[2], "later")
    assert [seen["count"] for seen in made["value"][0]] == [1, 2, 11] and web.count == 13
    assert verify(desk, made["execution"]) and web.count == 13


def test_other_arguments_from_a_step_on(desk: Layer) -> None:
    code = """
import layer
def main(id, by):
    row = layer.one("select priority from ticket where id = :id", id=id)
    layer.update("ticket", id, priority=row["priority"] + by)
    return layer.one("select priority from ticket where id = :id", id=id)["priority"]
"""
    define(desk, "ticket.raise", code, signature={"arguments": {"id": "int!", "by": "int!"}, "result": "int"})
    id = desk.insert("ticket", {"title": "x", "priority": 1})
    number = ran(desk, "ticket.raise", id=id, by=1)
    update = next(step.n for step in replay(desk, number).steps if step.kind == "mutation")
    made = fork_at(desk, number, update, "more", arguments={"by": 10})
    assert made["value"] == 11 and desk.query("select priority from ticket", branch="more") == [{"priority": 11}]
    assert desk.merge("more").conflicts  # main went the other way
    assert fork_at(desk, number, update + 1, "same")["value"] == 2
    assert desk.merge("same") and desk.query("select priority from ticket") == [{"priority": 2}]


def test_what_differs_before_the_step_ends_it_with_the_verdict(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "x"})
    number = ran(desk, "ticket.bump", id=id)
    record = replay(desk, number)
    code = "import layer\ndef bump(id):\n    try: layer.query('select title from ticket')\n    except Exception: pass\n    layer.update('ticket', id, priority=8)"
    end = len(record.steps)
    made = fork_at(desk, number, end, "no", code=code)
    assert (made["status"], made["branch"]) == ("failed", None) and made["difference"]["kind"] == "query"
    assert "select title" in Difference(**made["difference"]).__str__() and made["error"]["code"] == "differs"
    with pytest.raises(NotFound):
        desk.query("select 1 as n", branch="no")
    for wrong in (0, end + 2):
        with pytest.raises(Invalid, match="has steps"):
            fork_at(desk, number, wrong, "no")
    with pytest.raises(Invalid):
        fork_at(desk, number, 1, "no", code="def (")
    with pytest.raises(Invalid):
        fork_at(desk, number, 1, "no", arguments={"nobody": 1})
    assert "no" not in [row["name"] for row in desk.query("select name from branch where status = 'open'")]


def test_code_of_ones_own_has_ones_own_rights(desk: Layer) -> None:
    define(
        desk,
        "ticket.free",
        "import layer\ndef main():\n    return layer.query('select title from ticket')",
        rights="definer",
    )
    desk.insert("ticket", {"title": "hidden"})
    for action, resource in (
        ("call", "function:ticket.free"),
        ("fork", "branch:main"),
        ("update", "function"),
        ("read", "function"),
    ):
        desk.grant("ann", action, resource)
    desk.grant("ann", "read", "ticket", where="priority > 100")
    assert desk.call("ticket.free", principal="ann") == [{"title": "hidden"}]
    number = last(desk, "ticket.free")
    code = "import layer\ndef main():\n    return layer.query('select title, note from ticket')"
    made = fork_at(desk, number, 1, "mine", code=code, principal="ann")
    assert (made["status"], made["value"]) == ("done", [])
    taken = "import layer\ndef main():\n    return layer.query('select title from ticket')"
    with pytest.raises(Denied, match="rights of its definer"):
        fork_at(desk, number, len(replay(desk, number).steps), "taken", code=taken, principal="ann")


def test_secrets_are_those_of_the_time(desk: Layer) -> None:
    desk.call("secret.set", name="key", value="the first value")
    desk.call("blueprint.define", name="safe", secrets=[{"name": "key", "readable": True}])
    code = "import layer\ndef main():\n    value = layer.secret('key')\n    print(value)\n    return len(value)"
    define(desk, "ticket.open", code, blueprint="safe")
    number = ran(desk, "ticket.open")
    desk.call("secret.set", name="key", value="another")
    assert verify(desk, number)
    desk.call("secret.remove", name="key")
    assert verify(desk, number)
    kept = desk.query("select detail from step") + desk.query("select result from execution")
    assert "the first value" not in str(kept)


def test_questions_that_are_asked_at_once_may_come_in_any_order(desk: Layer) -> None:
    code = """
import layer, threading, time
def main():
    def ask(n):
        time.sleep(0.002 * (int(open('/proc/sys/kernel/random/uuid').read()[:4], 16) % 5))
        layer.query("select :n as n", n=n)
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    [thread.start() for thread in threads] + [thread.join() for thread in threads]
"""
    define(desk, "ticket.it", code)
    number = ran(desk, "ticket.it")
    assert [str(verdict) for verdict in (verify(desk, number) for _ in range(3)) if not verdict] == []
    code = """
const layer = require("layer");
exports.main = async () => {
  const seen = await Promise.all([1, 2, 3, 4, 5, 6].map((n) => layer.query("select :n as n from ticket", { n })));
  const ids = await Promise.all([1, 2, 3, 4, 5, 6].map((n) => layer.insert("ticket", { title: String(n) })));
  await Promise.all(ids.map((id, n) => layer.update("ticket", id, { priority: n })));
  return [seen, ids];
};
"""
    define(desk, "ticket.it", code, language="javascript")
    number = ran(desk, "ticket.it")
    assert [str(verdict) for verdict in (verify(desk, number) for _ in range(3)) if not verdict] == []


def test_what_the_ledger_said_then_is_said_again(desk: Layer) -> None:
    code = "import layer\ndef main():\n    return layer.query('select count(*) as n from execution')"
    define(desk, "ticket.it", code, reads=["execution", "ticket"])
    number = ran(desk, "ticket.it")
    ran(desk, "ticket.it")
    assert verify(desk, number)


def test_another_base_is_told(desk: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    number = ran(desk, "ticket.bump", id=desk.insert("ticket", {"title": "x"}))
    whole = law._whole

    def other(*given: Any) -> law.Record:
        record = whole(*given)
        steps = [replace(s, detail={**s.detail, "base": "0" * 16}) if s.kind == "command" else s for s in record.steps]
        return replace(record, steps=tuple(steps))

    monkeypatch.setattr(law, "_whole", other)
    assert str(verify(desk, number)).endswith("the base of its box has changed since")


def test_the_command(
    desk: Layer, location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAYER_DIR", location)
    id = desk.insert("ticket", {"title": "x"})
    number = ran(desk, "ticket.bump", id=id)
    assert main(["replay", str(number)]) == 0
    shown = capsys.readouterr().out
    assert (
        f"execution {number}: ticket.bump(id={id})" in shown
        and "select priority from ticket" in shown
        and "gave 1" in shown
    )
    assert main(["replay", str(number), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][1]["kind"] == "query"
    assert main(["replay", str(number), "--verify"]) == 0 and "reproduced" in capsys.readouterr().out
    define(desk, "ticket.odd", f"def main():\n    return {UNIQUE}")
    assert main(["replay", str(ran(desk, "ticket.odd")), "--verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"]["kind"] == "return"
    file = tmp_path / "other.py"
    file.write_text(desk.query("select code from function where name = 'ticket.bump'")[0]["code"].replace("+ 1", "+ 5"))
    assert main(["replay", str(number), "--fork-at", "3", "--branch", "five", "--code", str(file)]) == 0
    assert "layer merge five" in capsys.readouterr().out
    assert desk.query("select priority from ticket", branch="five") == [{"priority": 5}]
    assert main(["replay", str(number), "--fork-at", "2", "--branch", "six", "--argument", f"id={id}"]) == 0
    assert main(["replay", str(number), "--fork-at", "2", "--branch", "seven", "--argument", "id=1"]) == 1
    assert main(["replay", str(number), "--fork-at", "2"]) == 2 and main(["replay", str(number), "--code", "x"]) == 2
    assert main(["replay", str(number), "--fork-at", "2", "--branch", "x", "--verify"]) == 2
    assert main(["replay", "999999", "--verify"]) == 4
