"""Contracts: a box made of one sees and does what it says, on its branch, as long as it stands; all of it is recorded."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from law.conftest import define as define_function
from sandbox.hosts import Host, running, wait_until

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, LimitExceeded, NotFound
from livinglayer.law import contracts, tending
from livinglayer.sandbox.sandbox import Sandbox

AGENT: dict[str, Any] = {
    "name": "agent",
    "reads": {"ticket": {"fields": ["title", "priority"]}},
    "scope": {"ticket": {"actions": ["update", "insert"], "fields": ["priority", "title"]}},
    "functions": ["ticket.bump"],
    "projections": ["urgent"],
}


@pytest.fixture
def office(desk: Layer) -> Iterator[Layer]:
    """A help desk with a contract, whose boxes this process looks after."""
    desk.call("projection.define", name="urgent", statement="select count(*) as n from ticket where priority > 5")
    desk.call("blueprint.define", name="small", limits={"memory": "128M", "disk": "64M"}, slice=True)
    desk.call("contract.define", {**AGENT, "blueprint": "small"})
    desk.principal("ann")
    for action, resource in (
        ("call", "contract:agent"),
        ("call", "function:ticket.bump"),
        ("read", "ticket"),
        ("write", "ticket"),
    ):
        desk.grant("ann", action, resource)
    for n in range(3):
        desk.insert("ticket", {"title": f"t{n}", "priority": n * 3, "note": "secret"})
    tending.of(desk).look()
    yield desk
    for box in Sandbox.list(labels={"layer": desk.id}):
        box.kill()
    tending.of(desk).close()


def make(layer: Layer, **more: Any) -> tuple[Any, dict[str, Any]]:
    told = layer.call("box.create", **{"contract": "agent", "principal": "ann", **more})
    return Sandbox.connect(told["id"]), told


def ask(box: Any, code: str) -> str:
    """What a program in the box prints, with `layer` imported."""
    result = box.run(["python3", "-c", f"import layer\n{code}"], timeout=60)
    return (result.stdout.text + result.stderr.text).strip()


def refusal(box: Any, code: str) -> str:
    """The name of the error that a program in the box meets."""
    return ask(
        box, f"try:\n    print({code})\nexcept layer.LayerError as error:\n    print(type(error).__name__, error)"
    )


def outcome(layer: Layer, execution: int) -> dict[str, Any]:
    """How it ended; waits for that."""
    sql = "select status, result from execution where id = :id"
    wait_until(lambda: layer.query(sql, {"id": execution})[0]["status"] != "running", "the execution is over", 30)
    return layer.query(sql, {"id": execution})[0]


def test_a_box_of_a_contract_reads_and_writes_as_it_says(office: Layer) -> None:
    box, told = make(office)
    assert ask(box, "print(layer.query('select title from ticket order by id'))") == str(
        [{"title": f"t{n}"} for n in range(3)]
    )
    first = office.query("select min(id) as id from ticket")[0]["id"]
    assert (
        ask(box, f"layer.update('ticket', {first}, priority=9); print(layer.insert('ticket', title='new') > 0)")
        == "True"
    )
    assert office.query("select priority from ticket where id = :id", {"id": first}) == [{"priority": 9}]
    assert ask(box, f"layer.update('ticket', {first}, priority=1); layer.update('ticket', {first}, priority=2)") == ""
    assert ask(box, "print(layer.projection('urgent'))") == "[{'n': 1}]"
    assert ask(box, f"print(layer.call('ticket.bump', id={first}))") == "3"
    assert "agent" in ask(box, "print(layer.me()['contract'])")
    written = office.query(
        "select principal, execution from tx where tx = (select max(tx) from ticket__history where id = :id)",
        {"id": first},
    )
    called = office.query("select id, parent, contract, principal from execution where function = 'ticket.bump'")
    assert written == [{"principal": "ann", "execution": called[0]["id"]}]
    assert called[0] | {"id": 0} == {"id": 0, "parent": told["execution"], "contract": "agent", "principal": "ann"}
    box.kill()
    assert outcome(office, told["execution"])["status"] == "done"
    kinds = {
        row["kind"] for row in office.query("select kind from step where execution = :id", {"id": told["execution"]})
    }
    assert {"box", "command", "query", "mutation", "call"} <= kinds
    (used,) = office.query(
        "select principal, contract, cpu, wall from usage where execution = :id", {"id": told["execution"]}
    )
    assert (used["principal"], used["contract"]) == ("ann", "agent") and used["cpu"] > 0 and used["wall"] > 0
    (line,) = office.query("select box, parent, branch, execution from lineage")
    assert line == {"box": f"b{told['execution']}", "parent": None, "branch": "main", "execution": told["execution"]}
    assert office.query("select tier, owner from box where id = :box", {"box": line["box"]}) == [
        {"tier": "namespace", "owner": "ann"}
    ]
    assert office.verify().ok


def test_what_a_contract_does_not_say_is_refused_and_recorded(office: Layer) -> None:
    office.define("salary", {"amount": "int"})
    office.insert("salary", {"amount": 7})
    for action in ("read", "write", "call"):
        office.grant("ann", action, "*")  # ann may; the contract does not
    define_function(office, "ticket.other", "def other(): return 1")
    office.call("projection.define", name="all", statement="select * from salary")
    box, told = make(office)
    first = office.query("select min(id) as id from ticket")[0]["id"]
    assert refusal(box, "layer.query('select * from salary')").startswith(("NotFound", "Invalid"))
    assert refusal(box, "layer.query('select note from ticket')").startswith(("NotFound", "Invalid"))
    assert refusal(box, f"layer.update('ticket', {first}, note='x')").startswith("Denied")
    assert refusal(box, f"layer.delete('ticket', {first})").startswith("Denied")
    assert refusal(box, "layer.insert('salary', amount=1)").startswith("Denied")
    assert refusal(box, "layer.call('ticket.other')").startswith("Denied")
    assert refusal(box, "layer.call('row.insert', entity='salary', values={})").startswith("Denied")
    assert refusal(box, "layer.projection('all')").startswith("NotFound")
    assert refusal(box, "layer.secret('anything')").startswith("Denied")
    assert office.query("select * from salary") == [{"id": office.query("select id from salary")[0]["id"], "amount": 7}]
    wait_until(
        lambda: len(office.query("select 1 as n from decision where execution = :id", {"id": told["execution"]})) >= 5,
        "the refusals are recorded",
    )


def test_what_its_principal_may_not_the_contract_does_not_give(office: Layer) -> None:
    office.principal("bob")
    with pytest.raises(NotFound, match="no contract 'agent'"):
        make(office, principal="bob")
    office.grant("bob", "read", "contract")
    with pytest.raises(Denied, match="bob may not call contract:agent"):
        make(office, principal="bob")
    office.grant("bob", "call", "contract:agent")
    office.grant("bob", "read", "ticket", where="priority > 5")
    box, _ = make(office, principal="bob")
    assert ask(box, "print(len(layer.query('select title from ticket')))") == "1"
    first = office.query("select min(id) as id from ticket")[0]["id"]
    assert refusal(box, f"layer.update('ticket', {first}, priority=9)").startswith(("Denied", "NotFound"))
    assert refusal(box, f"layer.call('ticket.bump', id={first})").startswith("NotFound")
    assert ask(box, "print(layer.projection('urgent'))") == "[{'n': 1}]"  # the contract shows it


def test_a_box_acts_on_the_branch_it_was_made_for(office: Layer) -> None:
    office.fork("idea")
    box, told = make(office, branch="idea")
    ask(box, "layer.insert('ticket', title='only there')")
    assert len(office.query("select 1 as n from ticket where title = 'only there'", branch="idea")) == 1
    assert office.query("select 1 as n from ticket where title = 'only there'") == []
    assert told["branch"] == "idea" and office.query("select branch from lineage") == [{"branch": "idea"}]
    with pytest.raises(NotFound, match="no branch"):
        make(office, branch="nowhere")


def test_a_slice_is_a_view_and_a_file_that_is_made_anew_when_asked_for(office: Layer) -> None:
    box, told = make(office, slice={"ticket": "priority > 2"})
    assert told["slice"]
    assert ask(box, "print(len(layer.query('select id from ticket')))") == "2"
    look = (
        "import os, sqlite3; c = sqlite3.connect('file:' + os.environ['LAYER_SLICE'] + '?mode=ro', uri=True); "
        "print(c.execute('select title, priority from ticket order by id').fetchall(), [d[0] for d in c.execute('select * from ticket').description])"
    )
    assert ask(box, look) == "[('t1', 3), ('t2', 6)] ['id', 'title', 'priority']"
    assert (
        ask(box, "import os\ntry: open(os.environ['LAYER_SLICE'], 'w')\nexcept OSError as e: print(type(e).__name__)")
        == "PermissionError"
    )
    ask(box, "layer.insert('ticket', title='new', priority=8)")
    assert "new" not in ask(box, look)
    assert ask(box, "print(layer.slice())") == contracts.SLICE
    assert "('new', 8)" in ask(box, look)
    about = ask(
        box,
        "import os, sqlite3; print(sqlite3.connect(os.environ['LAYER_SLICE']).execute('select layer, branch, tx > 0 from _slice').fetchall())",
    )
    assert about == f"[('{office.id}', 'main', 1)]"
    with pytest.raises(Denied, match="does not read 'customer'"):
        make(office, slice={"customer": None})
    with pytest.raises(Invalid):
        make(office, slice={"ticket": "no condition !"})


def test_a_token_is_of_no_use_in_another_box_or_after_the_end(office: Layer) -> None:
    one, _ = make(office)
    other, told = make(office)
    url = other.run(["sh", "-c", "echo $LAYER_URL"]).stdout.text.strip()
    assert url != one.run(["sh", "-c", "echo $LAYER_URL"]).stdout.text.strip()
    code = "import sys, urllib.request, urllib.error\ntry: print(urllib.request.urlopen(sys.stdin.read() + '/me').read())\nexcept urllib.error.HTTPError as e: print(e.code)"

    def get(box: Any) -> str:
        return str(box.run(["python3", "-c", code], stdin=url, timeout=60).stdout.text.strip())

    assert "agent" in get(other) and other.run(["echo", url]).ok
    assert get(one) == "403"
    other.kill()
    outcome(office, told["execution"])
    assert get(one) == "403"
    with office.engine.reading() as session:  # nothing in the database opens the channel
        at, token = office.engine.schema_prefix, url.rpartition("/")[2]
        for table, column in (("ledger_call", "arguments"), ("ledger_step", "detail"), ("ledger_lease", "value")):
            rows = session.all(
                f"select {office.engine.portable(column, 'json' if table != 'ledger_lease' else 'text')} from {at}{table}"
            )
            assert not any(token in str(row) for row in rows)


@pytest.mark.parametrize("how", ["removed", "changed", "revoked"])
def test_a_box_whose_contract_or_permission_is_gone_ends(office: Layer, how: str) -> None:
    box, told = make(office)
    assert ask(box, "print(len(layer.query('select id from ticket')))") == "3"
    if how == "removed":
        office.call("contract.remove", name="agent")
    elif how == "changed":
        office.call("contract.define", {**AGENT, "blueprint": "small", "functions": []})
    else:
        (permission,) = office.query("select id from permission where resource = 'contract:agent'")
        office.revoke(permission["id"])
    end = outcome(office, told["execution"])
    assert end["status"] == "denied", end
    said = {"removed": "is no more", "changed": "has changed", "revoked": "may not call"}[how]
    assert said in end["result"]["error"]["message"]
    wait_until(lambda: Sandbox.list(labels={"layer": office.id}) == [], "the box is gone")


@pytest.mark.parametrize(
    ("budget", "code", "said"),
    [
        ({"steps": 3}, "for n in range(9): layer.query('select 1 as n')", "budget of 3 steps"),
        ({"cpu": 0.5}, "while True: pass", "budget of 0.5 cpu"),
        ({"seconds": 3}, "import time; time.sleep(60)", "budget of 3 seconds"),
    ],
)
def test_a_box_over_its_budget_is_stopped(office: Layer, budget: dict[str, float], code: str, said: str) -> None:
    office.call("contract.define", {**AGENT, "name": "short", "budget": budget})
    office.grant("ann", "call", "contract:short")
    box, told = make(office, contract="short")
    box.start(["python3", "-c", f"import layer\n{code}"])
    end = outcome(office, told["execution"])
    assert end["status"] == "failed" and said in end["result"]["error"]["message"], end
    assert Sandbox.list(labels={"layer": office.id}) == []


def test_quotas_hold_for_boxes(office: Layer) -> None:
    office.call("quota.set", subject="ann", resource="boxes", amount=1, seconds=3600)
    box, told = make(office)
    with pytest.raises(LimitExceeded, match="ann has used 1 of 1 boxes"):
        make(office)
    box.kill()
    outcome(office, told["execution"])
    with pytest.raises(LimitExceeded, match="1 of 1"):
        make(office)


def test_another_process_goes_on_where_one_ended(office: Layer) -> None:
    box, told = make(office)
    ask(box, "layer.query('select 1 as n')")
    tending.of(office).close()
    before = office.query("select count(*) as n from step where execution = :id", {"id": told["execution"]})[0]["n"]
    assert before >= 2
    with livinglayer.open(office.engine.address) as again:
        tending.of(again).look()
        assert ask(box, "print(layer.query('select 1 as n'))") == "[{'n': 1}]"
    tending.of(office).look()
    assert ask(box, "print(layer.query('select 1 as n'))") == "[{'n': 1}]"
    box.kill()
    assert outcome(office, told["execution"])["status"] == "done"
    steps = office.query("select n, kind, detail from step where execution = :id order by n", {"id": told["execution"]})
    assert [row["n"] for row in steps] == list(range(1, len(steps) + 1))
    assert sum(row["kind"] == "command" for row in steps) == 3 and sum(row["kind"] == "query" for row in steps) >= 3


def test_a_box_that_was_suspended_is_answered_again(office: Layer) -> None:
    box, told = make(office)
    assert ask(box, "print(len(layer.query('select id from ticket')))") == "3"
    box.suspend()
    box.resume()
    assert ask(box, "print(len(layer.query('select id from ticket')))") == "3"
    box.pause()
    box.resume()
    assert ask(box, "print(len(layer.query('select id from ticket')))") == "3"
    box.kill()
    assert outcome(office, told["execution"])["status"] == "done"


def test_a_box_that_ended_while_nobody_looked_is_concluded(office: Layer) -> None:
    box, told = make(office)
    tending.of(office).close()
    ask_later = box.run(["true"])
    assert ask_later.ok
    box.kill()
    tending.of(office).look()
    assert outcome(office, told["execution"])["status"] == "done"
    assert office.query(
        "select count(*) as n from step where execution = :id and kind = 'command'", {"id": told["execution"]}
    ) == [{"n": 1}]


def test_a_box_that_could_not_be_made_leaves_a_failed_execution_and_nothing_else(office: Layer) -> None:
    make(office, name="taken")
    with pytest.raises(Conflict, match="exists already"):
        make(office, name="taken")
    failed = office.query("select kind, status from execution where status = 'failed' order by id")
    assert failed == [{"kind": "verb", "status": "failed"}, {"kind": "contract", "status": "failed"}]
    assert len(Sandbox.list(labels={"layer": office.id})) == 1
    with pytest.raises(Invalid, match="name of a box"):
        make(office, name="No Name")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "No"}, "can't be the name"),
        ({"functions": ["ticket.nowhere"]}, "no function"),
        ({"projections": ["nowhere"]}, "no projection"),
        ({"reads": ["nowhere"]}, "nowhere"),
        ({"reads": {"ticket": {"where": "no condition !"}}}, ""),
        ({"scope": {"ticket": {"actions": ["read"]}}}, "no action"),
        ({"scope": {"ticket": {"fields": ["colour"]}}}, "colour"),
        ({"scope": {"nowhere": {}}}, "nowhere"),
        ({"blueprint": "nowhere"}, "no blueprint"),
        ({"minimum_tier": "cellar"}, "tier"),
        ({"budget": {"money": 3}}, "budget"),
        ({"budget": {"cpu": -1}}, "budget"),
        ({"egress": ["example.test"]}, "not within"),
        ({"secrets": ["stripe"]}, "no secret"),
        ({"stops": "never"}, "list"),
    ],
)
def test_a_contract_that_could_not_be_kept_is_refused(desk: Layer, given: dict[str, Any], said: str) -> None:
    bare = {"name": "x", "reads": ["ticket"]}
    with pytest.raises((Invalid, NotFound), match=said or None):
        desk.call("contract.define", {**bare, **given})
    assert desk.query("select * from contract") == []


def test_a_contract_narrows_its_blueprint(desk: Layer) -> None:
    desk.call("blueprint.define", name="net", egress=["*.example.test", "https://api.test/v1/*"], tier="process")
    for rules in (["a.example.test"], ["https://api.test/v1/*"], [{"host": "b.example.test", "method": ["GET"]}], []):
        desk.call("contract.define", name="x", blueprint="net", egress=rules)
        assert contracts.load(desk, "x").egress == tuple(rules)
    for rules in (
        ["example.org"],
        ["https://api.test/v2/*"],
        ["api.test"],
        ["*"],
        [{"host": "a.example.test", "port": 22, "protocol": "tcp"}],
    ):
        with pytest.raises(Invalid, match="not within"):
            desk.call("contract.define", name="x", blueprint="net", egress=rules)


@pytest.mark.parametrize("weak", [{"blueprint": "weak"}, {"tier": "namespace"}, {}])
def test_a_contract_below_its_minimum_is_refused_a_box(office: Layer, weak: dict[str, Any]) -> None:
    office.call("blueprint.define", name="weak", tier="container")
    office.call("contract.define", {**AGENT, **weak, "minimum_tier": "gvisor"})
    with pytest.raises(Denied, match=r"asks for tier '(container|namespace)', and 'gvisor' is the least"):
        make(office)
    (last,) = office.query("select status, result from execution where verb = 'box.create' order by id desc limit 1")
    assert last["status"] == "denied" and "'gvisor' is the least" in last["result"]["error"]["message"]
    assert office.query("select id from execution where kind = 'contract'") == []
    assert office.query("select resource from decision where resource = 'contract:agent'") == [
        {"resource": "contract:agent"}
    ]
    assert Sandbox.list(labels={"layer": office.id}) == []
    office.call("contract.define", {**AGENT, "minimum_tier": "namespace"})
    assert make(office)[1]["tier"] == "namespace"


def test_a_minimum_that_is_raised_ends_boxes_and_lets_none_be_forked(office: Layer) -> None:
    _, told = make(office)
    office.call(
        "row.update", entity="contract", id=contracts.load(office, "agent").id, values={"minimum_tier": "microvm"}
    )
    with pytest.raises(Denied, match="'microvm' is the least"):
        office.call("reality.fork", name="idea", box=told["box"])
    assert outcome(office, told["execution"])["status"] == "denied"


def test_where_no_worker_runs_a_process_is_started_that_answers(office: Layer, boxes: Host, tmp_path: Path) -> None:
    tending.of(office).close()
    box, told = make(office)
    assert told["kept"] == "started"
    process = tending._started[-1]
    try:
        assert ask(box, "print(len(layer.query('select id from ticket')))") == "3"
        _, again = make(office)
        assert again["kept"] == "running"
        box.kill()
        assert outcome(office, told["execution"])["status"] == "done"
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(20)
    assert not running(process.pid)


def test_a_box_and_its_channel_outlive_the_host_and_whoever_answered(layer: Layer, own_host: Host) -> None:
    layer.define("ticket", {"title": "text!"})
    layer.call("contract.define", name="agent", reads=["ticket"], scope=["ticket"])
    box, told = make(layer, principal=None)
    process = tending._started[-1]
    assert told["kept"] == "started"
    try:
        assert ask(box, "layer.insert('ticket', title='one'); print(len(layer.query('select id from ticket')))") == "1"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        own_host.crash()
        own_host.hang_up()
        assert tending.ensure(layer) == "started"  # whoever it was counted on is gone, which is seen at once
        process = tending._started[-1]
        box = Sandbox.connect(told["id"])
        assert ask(box, "layer.insert('ticket', title='two'); print(len(layer.query('select id from ticket')))") == "2"
        box.kill()
        assert outcome(layer, told["execution"])["status"] == "done"
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(20)
    steps = layer.query("select n, kind from step where execution = :id order by n", {"id": told["execution"]})
    assert [row["n"] for row in steps] == list(range(1, len(steps) + 1))
    assert [row["kind"] for row in steps].count("mutation") >= 1
    assert layer.verify().ok


def test_a_worker_answers_for_boxes(office: Layer) -> None:
    from livinglayer.law.worker import Worker

    tending.of(office).close()
    worker = Worker(office)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    wait_until(lambda: office.engine.leases("keeper/") != [], "the worker looks after boxes", 30)
    box, told = make(office)
    assert told["kept"] == "running"
    assert ask(box, "print(len(layer.query('select id from ticket')))") == "3"
    worker.stop()
    thread.join(30)
    box.kill()
    assert outcome(office, told["execution"])["status"] == "done"


def test_secrets_are_those_the_contract_names_of_its_blueprint(office: Layer) -> None:
    for name in ("ONE", "TWO"):
        office.call("secret.set", name=name, value=f"the value of {name}")
        office.grant("ann", "use", f"secret:{name}")
    wanted = [{"name": name, "readable": True} for name in ("ONE", "TWO")]
    office.call("blueprint.define", name="armed", secrets=wanted)
    office.call("contract.define", {**AGENT, "name": "armed", "blueprint": "armed", "secrets": ["ONE"]})
    office.grant("ann", "call", "contract:armed")
    box, told = make(office, contract="armed")
    assert ask(box, "print(layer.secret('ONE'))") == "the value of ONE"
    assert refusal(box, "layer.secret('TWO')").startswith("Denied")
    box.kill()
    outcome(office, told["execution"])
    steps = office.query("select detail from step where execution = :id and kind = 'secret'", {"id": told["execution"]})
    assert [step["detail"]["name"] for step in steps] == ["ONE"]
    assert "the value of" not in str(office.query("select detail from step"))
    (permission,) = office.query("select id from permission where resource = 'secret:ONE'")
    office.revoke(permission["id"])
    with pytest.raises(Denied, match="secret:ONE"):
        make(office, contract="armed")


def test_a_contract_works_at_tier_process_too(office: Layer) -> None:
    office.call("blueprint.define", name="thin", tier="process", slice=True)
    office.call("contract.define", {**AGENT, "name": "thin", "blueprint": "thin"})
    office.grant("ann", "call", "contract:thin")
    box, told = make(office, contract="thin")
    assert (told["tier"], told["slice"]) == ("process", None)
    assert ask(box, "print(len(layer.query('select id from ticket')))") == "3"
    assert refusal(box, "layer.query('select note from ticket')").startswith(("NotFound", "Invalid"))
    assert refusal(box, "layer.slice()").startswith("NotFound")


def test_what_a_crash_leaves_between_intent_and_box_is_cleared_up(
    office: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from livinglayer.law.functions import Asking

    with office.engine.reading() as session:
        ann = office.catalog.principal(session, "ann")["id"]
    made = contracts.Making(office, contracts.load(office, "agent"), ann, "main", None, None, [])
    execution = made.execution(Asking(ann), None)  # the intent, of a process that ends here
    office.ledger.intend(execution, lambda tx: contracts.record(tx, execution))
    office.ledger.let_go(execution)
    stray = Sandbox.create(name="stray-one", labels=contracts.labels(office.id, "nobody's"), memory="64M", disk="64M")
    box, _ = make(office)
    monkeypatch.setattr(tending, "YOUNG", 0.0)
    monkeypatch.setattr(tending, "SWEEP", 0.0)
    end = outcome(office, int(execution.id or 0))
    assert end["status"] == "failed" and "never made" in end["result"]["error"]["message"]
    wait_until(lambda: [each.id for each in Sandbox.list(labels={"layer": office.id})] == [box.id], "the stray is gone")
    with pytest.raises(NotFound):
        stray.info()
    assert ask(box, "print(len(layer.query('select id from ticket')))") == "3"


def test_a_slow_function_does_not_keep_a_box_from_its_budget(office: Layer) -> None:
    define_function(office, "ticket.slow", "import time\ndef slow(): time.sleep(20)")
    office.call("contract.define", {**AGENT, "name": "short", "functions": ["ticket.slow"], "budget": {"cpu": 0.5}})
    for resource in ("contract:short", "function:ticket.slow"):
        office.grant("ann", "call", resource)
    box, told = make(office, contract="short")
    box.start(["python3", "-c", "import layer\nlayer.call('ticket.slow')"])
    wait_until(
        lambda: office.query("select 1 as n from execution where function = 'ticket.slow'") != [], "it is called", 30
    )
    box.start(["python3", "-c", "while True: pass"])
    end = outcome(office, told["execution"])
    assert end["status"] == "failed" and "budget of 0.5 cpu" in end["result"]["error"]["message"]
    assert office.query("select status from execution where function = 'ticket.slow'") == [{"status": "running"}]


def test_requests_are_steps_and_bytes_are_counted_against_the_budget(office: Layer) -> None:
    class Large(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "200000")
            self.end_headers()
            self.wfile.write(b"x" * 200000)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Large) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        rule = {"host": "files.test", "protocol": "http", "resolve": f"127.0.0.1:{server.server_port}", "private": True}
        office.call("blueprint.define", name="net", egress=[rule, "other.test"])
        for name, budget in (("net", {"bytes": 1_000_000}), ("tight", {"bytes": 50_000})):
            given = {**AGENT, "name": name, "blueprint": "net", "egress": [rule], "budget": budget}
            office.call("contract.define", given)
            office.grant("ann", "call", f"contract:{name}")
        get = "import urllib.request; print(len(urllib.request.urlopen('http://{}.test/').read()))"
        box, told = make(office, contract="net")
        assert ask(box, get.format("files")) == "200000"
        assert "Error" in ask(box, get.format("other"))  # the blueprint would let it, the contract does not
        box.kill()
        assert outcome(office, told["execution"])["status"] == "done"
        steps = office.query(
            "select detail from step where execution = :id and kind = 'network'", {"id": told["execution"]}
        )
        assert {(step["detail"]["host"], step["detail"]["verdict"]) for step in steps} >= {
            ("files.test", "allow"),
            ("other.test", "deny"),
        }
        (used,) = office.query("select received from usage where execution = :id", {"id": told["execution"]})
        assert used["received"] >= 200_000
        box, told = make(office, contract="tight")
        box.start(["python3", "-c", get.format("files") + "; import time; time.sleep(60)"])
        end = outcome(office, told["execution"])
        assert end["status"] == "failed" and "budget of 50000 bytes" in end["result"]["error"]["message"]
        server.shutdown()


def test_a_box_that_is_made_while_somebody_looks_is_not_taken_for_gone(office: Layer) -> None:
    keeper = tending.of(office)
    keeper.close()
    office.engine.lease(f"{tending.KEEPER}{contracts.home()}", keeper.id, 60)  # so that nobody is started to look
    box, told = make(office)
    later = tending.of(office)
    [(number, _, started)] = tending.open_boxes(office)
    later._take(number, None, started)  # it was not in the list that was made before it
    assert number == told["execution"] and number in later.kept
    assert ask(box, "print(layer.me()['box'])") == told["box"]
    assert office.query("select status from execution where id = :id", {"id": number}) == [{"status": "running"}]
