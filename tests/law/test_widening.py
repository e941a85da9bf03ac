"""A contract can't be widened from inside: each attempt is refused, recorded, and changes nothing.

One box, whose principal may do nearly everything, so that only the contract stands between. Every attempt is one request
of the box's channel; the test asserts its status, the step `refusal` it left and, where it was denied, the decision row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from law.conftest import define as define_function
from law.test_contracts import ask, outcome
from sandbox.hosts import wait_until

from livinglayer import Layer
from livinglayer.law import tending
from livinglayer.sandbox.sandbox import Sandbox

AGENT: dict[str, Any] = {
    "name": "agent", "blueprint": "armed", "reads": {"ticket": {"fields": ["title", "priority"], "where": "priority < 5"}},
    "scope": {"ticket": {"actions": ["update"], "fields": ["priority"], "where": "priority < 5"}}, "functions": ["ticket.bump"],
    "projections": ["urgent"], "egress": ["a.test"], "secrets": ["ONE"], "budget": {"steps": 3000}, "stops": [{"denials": 1000}],
    "approvals": [{"action": "update", "resource": "ticket", "where": "priority = 4", "expires": 3600}],
    "contracts": ["hand", "wide", "agent"], "program": ["sleep", "1"],
}  # fmt: skip

# What is asked (verb, body), and the codes it may be refused with. {…} are numbers the test fills in.
DENIED, GONE, WRONG = ("denied",), ("not_found", "invalid"), ("invalid",)
Attempt = tuple[str, str, dict[str, Any], tuple[str, ...]]
QUERIES: list[Attempt] = [
    (what, "query", {"sql": sql}, GONE)
    for what, sql in {
        "an entity it does not read": "select * from salary",
        "a field it does not read": "select note from ticket",
        "a field by way of a condition": "select title from ticket where note = 'secret'",
        "the history of what it reads": "select note from ticket__history",
        "the history of another entity": "select * from salary__history",
        "the past of what it does not read": "select * from salary as of 1",
        "another branch": "select * from idea.ticket",
        "contracts": "select * from contract",
        "permissions": "select * from permission",
        "principals": "select * from principal",
        "functions": "select code from function",
        "secrets": "select * from secret",
        "approvals, also its own": "select * from approval",
        "executions": "select * from execution",
        "steps": "select * from step",
        "decisions": "select * from decision",
        "txs": "select * from tx",
        "the ledger's own tables": "select * from ledger_execution",
        "stored rows beside the views": "select * from e_ticket",
        "the catalog of SQLite": "select * from sqlite_master",
        "the catalog of PostgreSQL": "select * from pg_catalog.pg_class",
        "information_schema": "select * from information_schema.tables",
        "a join with what it does not read": "select t.title from ticket t join salary s on true",
        "a subquery": "select (select amount from salary) as amount",
        "two statements": "select 1 as n; delete from ticket",
        "a change in a query": "delete from ticket",
        "a change in a CTE": "with x as (delete from ticket returning id) select * from x",
        "a function of the engine": "select pg_read_file('/etc/passwd') as x",
        "an extension": "select load_extension('x') as x",
        "a setting": "set role postgres",
        "a file": "attach database '/etc/passwd' as x",
    }.items()
]
OTHERS = ("contract", "permission", "approval", "function", "blueprint", "secret", "bundle", "trigger", "principal", "membership",
          "projection", "quota", "branch", "entity", "field")  # fmt: skip
WRITES: list[Attempt] = [
    *((f"inserts a row of {name}", "insert", {"entity": name, "values": {"name": "x"}}, ("denied", "not_found", "invalid")) for name in OTHERS),
    *((f"updates its {name}", "update", {"entity": name, "id": "{" + name + "}", "values": {"name": "x"}}, ("denied", "not_found", "invalid"))
      for name in ("contract", "permission", "function", "blueprint", "secret", "principal", "projection", "trigger", "branch")),
    ("upserts its contract", "upsert", {"entity": "contract", "values": {"name": "agent", "reads": ["salary"]}, "on": ["name"]}, ("denied", "not_found")),
    ("upserts its budget", "upsert", {"entity": "contract", "values": {"name": "agent", "budget": {}}, "on": ["name"]}, ("denied", "not_found")),
    ("upserts a permission", "upsert", {"entity": "permission", "values": {"action": "*", "resource": "*"}, "on": ["action"]}, ("denied", "not_found")),
    ("deletes its contract's denial", "delete", {"entity": "permission", "id": "{permission}"}, ("denied", "not_found")),
    ("writes the ledger", "insert", {"entity": "execution", "values": {"status": "done"}}, ("denied", "not_found")),
    ("writes a decision", "insert", {"entity": "decision", "values": {"allowed": True}}, ("denied", "not_found")),
    ("writes an entity beyond its scope", "insert", {"entity": "salary", "values": {"amount": 1}}, DENIED),
    ("writes a field beyond its scope", "update", {"entity": "ticket", "id": "{low}", "values": {"note": "x"}}, DENIED),
    ("writes a row beyond its scope", "update", {"entity": "ticket", "id": "{high}", "values": {"priority": 1}}, DENIED),
    ("moves a row out of its scope", "update", {"entity": "ticket", "id": "{low}", "values": {"priority": 9}}, DENIED),
    ("acts beyond its scope", "delete", {"entity": "ticket", "id": "{low}"}, DENIED),
    ("inserts where it may only update", "insert", {"entity": "ticket", "values": {"title": "x", "priority": 1}}, DENIED),
    ("inserts by an upsert", "upsert", {"entity": "ticket", "values": {"title": "fresh", "priority": 1}, "on": ["title"]}, DENIED),
    ("hides a wide row in a list", "insert", {"entity": "ticket", "values": [{"title": "a"}, {"title": "b", "note": "c"}]}, DENIED),
    ("names a branch in a change", "insert", {"entity": "salary", "values": {"amount": 1}, "branch": "idea"}, DENIED),
    ("names a principal in a change", "insert", {"entity": "salary", "values": {"amount": 1}, "principal": "owner"}, DENIED),
]  # fmt: skip
VERBS = ("approval.answer", "contract.define", "contract.remove", "permission.grant", "permission.revoke", "principal.define", "function.define",
         "blueprint.define", "secret.set", "branch.merge", "branch.fork", "branch.discard", "row.insert", "row.update", "entity.define",
         "box.create", "agent.run", "agent.stop", "bundle.apply", "projection.define", "quota.remove", "trigger.define", "reality.fork",
         "history.prune", "execution.replay")  # fmt: skip
CALLS: list[Attempt] = [
    *((f"calls the verb {name}", "call", {"function": name, "arguments": {"id": 1, "approve": True}}, DENIED) for name in VERBS),
    ("calls a function it does not list", "call", {"function": "ticket.other"}, DENIED),
    ("calls a function that is not there", "call", {"function": "ticket.nothing"}, DENIED),
    ("calls a Python name", "call", {"function": "__init__"}, DENIED),
    ("reads a projection it does not list", "projection", {"name": "salaries"}, ("not_found",)),
    ("reads what another execution may know of itself", "projection", {"name": "me.budget/{other}"}, ("not_found",)),
    ("reads a me. that is none", "projection", {"name": "me.secrets"}, ("not_found",)),
    ("reads a secret it does not list", "secret", {"name": "TWO"}, DENIED),
    ("reads a secret it may only send", "secret", {"name": "ONE"}, DENIED),
    ("reads a secret that is not there", "secret", {"name": "THREE"}, DENIED),
    ("delegates to a wider contract", "delegate", {"contract": "wide", "task": "x"}, DENIED),
    ("delegates to a contract it does not name", "delegate", {"contract": "root", "task": "x"}, DENIED),
    ("delegates to nobody", "delegate", {"contract": "", "task": "x"}, WRONG),
    ("widens a slice of a child", "delegate", {"contract": "hand", "task": "x", "slice": {"salary": None}}, DENIED),
    ("answers its own approval", "approval", {"id": "{approval}", "approve": True}, ("not_found",)),
    ("approves by a made-up verb", "approve", {"id": "{approval}"}, ("not_found",)),
    ("merges its branch", "merge", {"name": "idea"}, ("not_found",)),
    ("raises its budget", "budget", {"steps": 10**9}, ("not_found",)),
    ("calls an inner method", "_change", {}, ("not_found",)),
    ("calls an attribute", "stand", {}, ("not_found",)),
    ("asks for an agent's part that it is not", "agent", {}, ("not_found",)),
    ("makes a slice where there is none", "slice", {}, ("not_found",)),
    ("reads as of a moment", "query", {"sql": "select * from salary", "as_of": 1}, GONE),
    ("reads as somebody else, elsewhere", "query", {"sql": "select * from salary", "principal": "owner", "branch": "idea", "narrow": None}, GONE),
    ("reads a projection as of a moment", "projection", {"name": "salaries", "as_of": 1}, ("not_found",)),
    ("uses a tool that it has not", "tool", {"id": "1", "name": "insert_salary", "arguments": {"amount": 1}}, ()),
    ("uses the tool of a verb", "tool", {"id": "1", "name": "call_contract_define", "arguments": {"name": "agent"}}, ()),
    ("uses a tool beyond its scope", "tool", {"id": "1", "name": "update_ticket", "arguments": {"id": "{high}", "priority": 1}}, ()),
    ("keeps an artifact above its place", "artifact/..%2f..%2fetc%2fpasswd", {}, WRONG),
    ("keeps an artifact at a path of the host", "artifact//etc/passwd", {}, WRONG),
    ("keeps an artifact with a zero in its name", "artifact/a%00b", {}, WRONG),
]  # fmt: skip
ATTEMPTS = [*QUERIES, *WRITES, *CALLS]

TRY = """
import json, sys, urllib.error, urllib.request, os
url, told = os.environ["LAYER_URL"], []
for verb, body in json.load(sys.stdin):
    request = urllib.request.Request(url + "/" + verb, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    try:
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        told.append(["ok", answer])
    except urllib.error.HTTPError as error:
        told.append([json.load(error)["error"]["code"], None])
print(json.dumps(told))
"""


@pytest.fixture
def office(desk: Layer) -> Iterator[Layer]:
    """A principal who may do everything but own the layer, and a contract that may do little."""
    desk.define("salary", {"amount": "int"})
    desk.insert("salary", {"amount": 7})
    define_function(desk, "ticket.other", "def other(): return 1")
    desk.call("projection.define", name="urgent", statement="select count(*) as n from ticket where priority > 5")
    desk.call("projection.define", name="salaries", statement="select amount from salary")
    for name in ("ONE", "TWO"):
        desk.call("secret.set", name=name, value=f"the value of {name}")
    armed = [{"name": "ONE", "hosts": ["a.test"]}, {"name": "TWO", "readable": True}]
    desk.call("blueprint.define", name="armed", egress=["*.test"], secrets=armed)
    hand = {"reads": {"ticket": {"fields": ["title"]}}, "program": ["true"]}
    desk.call("contract.define", {**hand, "name": "hand"})
    desk.call("contract.define", {**hand, "name": "wide", "reads": ["ticket", "salary"]})
    desk.call("contract.define", {**hand, "name": "root", "scope": ["salary"]})
    desk.call("contract.define", AGENT)
    desk.call("trigger.define", {"name": "bumped", "function": "ticket.bump", "on_entity": "ticket", "enabled": False})
    desk.principal("ann")
    for action in ("read", "insert", "update", "delete", "call", "use", "fork", "merge", "approve", "define"):
        desk.grant("ann", action, "*")
    desk.insert(
        "ticket",
        [{"title": "low", "priority": 1, "note": "secret"}, {"title": "high", "priority": 9, "note": "secret"}],
    )
    desk.fork("idea")
    tending.of(desk).look()
    yield desk
    for box in Sandbox.list(labels={"layer": desk.id}):
        box.kill()
    tending.of(desk).close()


def filled(value: Any, numbers: dict[str, int]) -> Any:
    """A body with its numbers."""
    if isinstance(value, dict):
        return {key: filled(each, numbers) for key, each in value.items()}
    if isinstance(value, str) and value.startswith("{") and value[1:-1] in numbers:
        return numbers[value[1:-1]]
    return value


def everything(layer: Layer, branch: str) -> dict[str, Any]:
    """All rows that an attempt could have changed."""
    return {
        name: layer.query(f"select * from {name} order by id", branch=branch) for name in ("ticket", "salary", *OTHERS)
    }


@pytest.mark.parametrize("branch", ["main", "idea"])
def test_no_attempt_to_widen_a_contract_succeeds(office: Layer, branch: str) -> None:
    told = office.call("box.create", contract="agent", principal="ann", branch=branch)
    box, number = Sandbox.connect(told["id"]), told["execution"]
    numbers = {name: office.query(f"select min(id) as id from {name}")[0]["id"] or 1 for name in OTHERS}
    numbers |= {
        title: office.query("select id from ticket where title = :t", {"t": title})[0]["id"]
        for title in ("low", "high")
    }
    numbers["other"] = number - 1
    before = {each: everything(office, each) for each in ("main", "idea")}
    asked = [(verb, filled(body, numbers)) for _, verb, body, _ in ATTEMPTS]
    result = box.run(["python3", "-c", TRY], stdin=json.dumps(asked), timeout=300)
    assert result.ok, result.stderr.text
    answers = json.loads(result.stdout.text)
    for (what, verb, _, codes), (code, answer) in zip(ATTEMPTS, answers, strict=True):
        if verb == "tool":  # a refusal is the tool's answer
            assert code == "ok" and answer["is_error"], (what, code, answer)
        else:
            assert code in codes, (what, code, answer)
    assert {each: everything(office, each) for each in ("main", "idea")} == before
    box.kill()
    assert outcome(office, number)["status"] == "done"
    refusals = [row["detail"] for row in office.query("select detail from step where execution = :e and kind = 'refusal' order by n", {"e": number})]  # fmt: skip
    assert len(refusals) == len(ATTEMPTS) >= 40
    for (what, verb, _, codes), refusal in zip(ATTEMPTS, refusals, strict=True):
        expected = codes or ("denied", "not_found", "invalid")
        assert refusal["code"] in expected, (what, refusal)
        assert verb == "tool" or refusal["do"] == verb.split("/")[0], (what, refusal)
    denied = [refusal for refusal in refusals if refusal["code"] == "denied"]
    decisions = office.query(
        "select principal, allowed, reason from decision where execution = :e order by id", {"e": number}
    )
    assert [row["reason"] for row in decisions] == [refusal["message"] for refusal in denied]
    assert {(row["principal"], row["allowed"]) for row in decisions} == {("ann", False)}
    assert len(denied) >= 40
    assert office.verify().ok


def test_the_address_of_another_box_or_a_forged_one_opens_nothing(office: Layer) -> None:
    told = [office.call("box.create", contract="agent", principal="ann") for _ in range(2)]
    one, other = (Sandbox.connect(each["id"]) for each in told)
    theirs = other.run(["sh", "-c", "echo $LAYER_URL"]).stdout.text.strip()
    mine = one.run(["sh", "-c", "echo $LAYER_URL"]).stdout.text.strip()
    place, _, token = mine.rpartition("/")
    forged = [
        f"{place}/{theirs.rpartition('/')[2]}", f"{place}/", f"{place}/{token}x", f"{place}/{token[:-1]}", f"{place}/{token.upper()}",
        f"{place}/{token}%2f..", f"{place}/../{token}", f"{place}/owner", f"{place}/*", f"{place}//{token}", f"{place}/{token}%00",
    ]  # fmt: skip
    code = """
import sys, urllib.error, urllib.request
for url in sys.stdin.read().split():
    try:
        urllib.request.urlopen(url + "/query", data=b"select 1 as n", timeout=20)
        print("open", url)
    except urllib.error.HTTPError as error:
        print(error.code)
    except Exception as error:
        print(type(error).__name__)
"""
    said = one.run(["python3", "-c", code], stdin="\n".join(forged), timeout=120).stdout.text.split()
    assert len(said) == len(forged) and set(said) <= {"403", "400", "404"}, said
    recorded = "select action, resource, reason from decision where execution = :e"
    denied = {"action": "token", "resource": "LAYER_URL", "reason": "this execution is over, or never was"}
    wait_until(
        lambda: len(office.query(recorded, {"e": told[0]["execution"]})) >= said.count("403"), "all are recorded"
    )
    assert office.query(recorded, {"e": told[0]["execution"]}) == [denied] * said.count("403")
    reached = one.run(["python3", "-c", code], stdin=theirs, timeout=60).stdout.text.split()
    assert reached and reached[0] != "open"


def test_egress_and_files_beyond_the_contract_are_refused_and_recorded(office: Layer) -> None:
    told = office.call("box.create", contract="agent", principal="ann")
    box = Sandbox.connect(told["id"])
    for host in ("b.test", "example.com", "169.254.169.254"):
        said = ask(box, f"import urllib.request\ntry: urllib.request.urlopen('http://{host}/', timeout=10); print('open')\nexcept Exception as e: print('no')")  # fmt: skip
        assert said == "no"
    assert "the value of" not in box.run(["env"]).stdout.text
    box.kill()
    outcome(office, told["execution"])
    steps = office.query("select detail from step where execution = :e and kind = 'network'", {"e": told["execution"]})
    refused = {step["detail"].get("host") for step in steps if step["detail"].get("verdict") == "deny"}
    assert {"b.test", "example.com"} <= refused


def test_a_request_that_waits_for_a_yes_is_not_done_by_asking_differently(office: Layer) -> None:
    """While a rule speaks of a change, no way of writing it goes round: each is the same question, or one of its own."""
    told = office.call("box.create", contract="agent", principal="ann")
    box = Sandbox.connect(told["id"])
    low = office.query("select id from ticket where title = 'low'")[0]["id"]
    bodies = [("update", {"entity": "ticket", "id": low, "values": {"priority": 4}}), ("update", {"entity": "ticket", "id": str(low), "values": {"priority": 4}})]  # fmt: skip
    program = box.start(["python3", "-c", f"import io, sys\nsys.stdin = io.StringIO({json.dumps(bodies)!r})\n{TRY}"])
    sql = "select id from approval where status = 'pending'"
    wait_until(lambda: len(office.query(sql)) == 1, "it asks", 30)
    office.call("approval.answer", id=office.query(sql)[0]["id"], approve=False)
    wait_until(lambda: box.printed(program.id).over, "it is over", 60)
    assert [code for code, _ in json.loads(program.wait().stdout.text)] == ["denied", "denied"]
    assert len(office.query("select 1 as n from approval")) == 1  # the second was the same
    assert office.query("select priority from ticket where id = :id", {"id": low}) == [{"priority": 1}]
