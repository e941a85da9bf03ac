"""The ten laws, each with a test of its name. What a law asks for that is not built yet is said in docs/laws.md."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from law.conftest import define
from sandbox.hosts import Host, wait_until

import livinglayer
from livinglayer import Layer
from livinglayer.bundle.apply import apply
from livinglayer.bundle.load import of_files
from livinglayer.bundle.plan import plan
from livinglayer.errors import Conflict, Denied, LayerError, NotFound
from livinglayer.law import tending
from livinglayer.sandbox import Sandbox
from livinglayer.substrate.ledger import Execution, Scope
from livinglayer.substrate.schema import OWNER

PAGE = Path(__file__).parents[2] / "docs" / "laws.md"


def test_law_1_a_mutation_outside_a_scoped_execution_is_rejected(desk: Layer) -> None:
    """Forged executions, other scopes and SQL are in test_door.py; here, from inside a box."""
    define(desk, "ticket.reach", "import layer\ndef main():\n    layer.insert('customer', name='x')")
    with pytest.raises(LayerError, match="scope"):
        desk.call("ticket.reach")
    with pytest.raises(Denied):
        desk.ledger.write(Execution(OWNER, Scope(), "forged"), "main", lambda tx: tx.insert("customer", {"name": "x"}))
    assert desk.query("select * from customer") == []
    refused = desk.query("select resource, allowed from decision where resource = 'customer'")
    assert refused and not any(row["allowed"] for row in refused)


def test_law_2_the_schema_is_rows_from_which_the_rest_follows(layer: Layer) -> None:
    """An entity alone is enough to write, read, fork and govern; pages, forms and tools are not built."""
    layer.call("entity.define", name="note", fields={"text": "text!"})
    id = layer.call("row.insert", entity="note", values={"text": "x"})
    assert layer.query("select text from note where id = :id", {"id": id}) == [{"text": "x"}]
    assert layer.query("select name from field where entity = (select id from entity where name = 'note')") == [
        {"name": "text"}
    ]
    assert not layer.can("ann", "read", "note")


def test_law_3_everything_but_the_database_can_be_deleted_and_comes_back(location: str, own_host: Host) -> None:
    with livinglayer.open(location, create=True) as layer:
        layer.define("ticket", {"title": "text!", "priority": {"type": "int", "default": 0}})
        define(layer, "ticket.add", "import layer\ndef main(title):\n    return layer.insert('ticket', title=title)")
        first = layer.call("ticket.add", title="before")
    own_host.hang_up()
    own_host.stop()
    for part in own_host.state.iterdir():
        if part.name != "native":
            shutil.rmtree(part, ignore_errors=True)
    with livinglayer.open(location) as layer:
        second = layer.call("ticket.add", title="after")
        assert layer.query("select id, title from ticket order by id") == [
            {"id": first, "title": "before"},
            {"id": second, "title": "after"},
        ]
        assert layer.verify().ok


def test_law_4_history_is_data(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "t", "priority": 1})
    desk.call("ticket.bump", id=id)
    found = desk.query(
        "select h.priority, e.function, s.kind from ticket__history h join execution e on e.id = h.execution"
        " join step s on s.execution = e.id where h.id = :id and s.kind = 'mutation'",
        {"id": id},
    )
    assert found == [{"priority": 2, "function": "ticket.bump", "kind": "mutation"}]


def test_law_5_fork_is_one_operation_over_state_and_boxes(desk: Layer) -> None:
    tending.of(desk).look()  # we look after boxes ourselves
    with Sandbox.create(name="mother") as box:
        box.files.write("/home/user/work.txt", "mine")
        id = desk.insert("ticket", {"title": "t"})
        made = desk.call("reality.fork", name="idea", box=box.id)
        with Sandbox.connect(made["box"]) as forked:
            try:
                assert forked.files.read("/home/user/work.txt") == b"mine"
                forked.files.write("/home/user/work.txt", "theirs")
                assert box.files.read("/home/user/work.txt") == b"mine"
            finally:
                forked.kill()
        desk.update("ticket", id, {"priority": 5}, branch="idea")
        assert desk.query("select priority from ticket") == [{"priority": 0}]
        tending.of(desk).close()
        assert desk.query("select parent, branch from lineage where branch = 'idea'") == [
            {"parent": box.id, "branch": "idea"}
        ]
        box.kill()


def test_law_6_what_acts_for_others_has_a_contract_and_no_other_reach(desk: Layer) -> None:
    """An agent sees what its contract lists, whatever its principal may; without a contract there is none."""
    desk.insert("ticket", {"title": "t"})
    program = "layer query 'select title from ticket'; layer query 'select priority from ticket'; layer insert ticket title=x; exit 0"
    desk.call("contract.define", name="reader", reads={"ticket": {"fields": ["title"]}}, scope={}, program=program)
    desk.principal("bot", "agent")
    with pytest.raises((Denied, NotFound)):
        desk.call("agent.run", contract="reader", task="look", principal="bot")
    assert desk.query("select count(*) as n from execution where kind = 'contract'") == [{"n": 0}]
    for action, resource in (
        ("call", "contract:reader"),
        ("fork", "branch:main"),
        ("read", "ticket"),
        ("write", "ticket"),
    ):
        desk.grant("bot", action, resource)
    tending.of(desk).look()
    number = desk.call("agent.run", contract="reader", task="look", principal="bot")["execution"]
    sql = "select status from execution where id = :id"
    wait_until(lambda: desk.query(sql, {"id": number}) != [{"status": "running"}], "the agent is over")
    tending.of(desk).close()
    asked = "select kind, detail from step where execution = :id and kind in ('query', 'refusal') order by n"
    assert [(row["kind"], row["detail"].get("do", "query")) for row in desk.query(asked, {"id": number})] == [
        ("query", "query"), ("refusal", "query"), ("refusal", "insert"),
    ]  # fmt: skip


def test_law_7_security_is_rows(desk: Layer) -> None:
    desk.principal("ann")
    permission = desk.grant("ann", "call", "function:ticket.bump")
    decided = desk.can("ann", "call", "function:ticket.bump")
    assert decided and [row["id"] for row in decided.rows] == [permission]
    desk.revoke(permission)
    with pytest.raises((Denied, NotFound)):
        desk.call("ticket.bump", id=1, principal="ann")
    desk.call("blueprint.define", name="tight", limits={"memory": "64M"})
    assert desk.query("select name, tier, limits from blueprint") == [
        {"name": "tight", "tier": "namespace", "limits": {"memory": "64M"}}
    ]


def test_law_8_an_answer_says_how_fresh_it_is(layer: Layer) -> None:
    """Strong and as of are there, and the answer says of which tx it is; bounded freshness is not built."""
    layer.define("item", {"name": "text!"})
    layer.insert("item", {"name": "a"})
    rows, tx = layer.query_at("select name from item")
    layer.insert("item", {"name": "b"})
    assert layer.query_at("select name from item", as_of=tx) == (rows, tx)
    again, later = layer.query_at("select name from item")
    assert later > tx and len(again) == 2


def test_law_9_people_see_the_difference_before_anything_changes(layer: Layer) -> None:
    """For branches, and for bundles: a plan changes nothing, and what opens something needs a yes to that very plan."""
    layer.define("item", {"name": "text!"})
    layer.fork("idea")
    layer.insert("item", {"name": "a"}, branch="idea")
    shown = layer.merge("idea", preview=True)
    assert layer.query("select * from item") == [] and shown is not None
    layer.merge("idea")
    assert [row["name"] for row in layer.query("select name from item")] == ["a"]
    policy = b"roles: {clerk: {}}\ngrants: [{to: clerk, action: read, resource: note}]"
    bundle = of_files({"bundle.yaml": b"{name: notes, version: 1.0.0}", "schema.yaml": b"entities: {note: {fields: {text: text}}}", "policy.yaml": policy})  # fmt: skip
    made = plan(layer, bundle)
    assert [change.name for change in made.changes if change.widens] == ["allow clerk read note"]
    with pytest.raises(Denied):
        apply(layer, bundle)
    with pytest.raises(Conflict):
        apply(layer, bundle, accept="another")
    assert "note" not in layer.schema().by_name
    apply(layer, bundle, accept=made.digest)
    assert plan(layer, bundle).empty


def test_law_10_why_answers_for_any_fact(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "t", "priority": 1}, reason="a customer called")
    desk.call("ticket.bump", id=id, reason="urgent")
    told: Any = desk.why(f"ticket/{id}.priority")
    text = "\n".join(told.lines()) if hasattr(told, "lines") else str(told)
    assert "ticket.bump" in text and "owner" in text and "urgent" in text
    assert "a customer called" in "\n".join(desk.why(f"ticket/{id}.title").lines())


def test_the_page_tells_of_every_law_where_it_is_enforced_and_tested() -> None:
    page = PAGE.read_text()
    tests = set(re.findall(r"^def (test_law_\d+_\w+)", Path(__file__).read_text(), re.M))
    assert {int(name.split("_")[2]) for name in tests} == set(range(1, 11))
    for number in range(1, 11):
        found = re.search(rf"^\*\*{number}\. .*?(?=^\*\*{number + 1}\. |\Z)", page, re.M | re.S)
        assert found is not None, f"law {number} has no paragraph"
        assert any(name in found[0] for name in tests if name.startswith(f"test_law_{number}_")), (
            f"law {number} names no test"
        )
        assert re.search(r"`(substrate|law|sandbox|edges|projection|bundle)/", found[0]), (
            f"law {number} does not say where it is enforced"
        )
