"""Ways out of a contract that were tried: by a slice, by asking for several things at once, by delegating, by what a reviewer can't see."""

from __future__ import annotations

from typing import Any

import pytest
from law import test_agents, test_approvals, test_delegation
from law.test_approvals import begin, pending
from law.test_contracts import ask, outcome, refusal
from sandbox.hosts import wait_until

from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid
from livinglayer.law import agents, approvals, executions, tending
from livinglayer.law import kept as keeping
from livinglayer.sandbox.sandbox import Sandbox
from livinglayer.substrate import branches

agency, office, clerks = test_delegation.office, test_agents.office, test_approvals.office


OUT = "title = 'no') or (title <> 'no'"  # beside `priority < 5` it would be `(priority < 5) and (…) or (…)`


def test_a_slice_that_leaves_its_brackets_is_none(agency: Layer) -> None:
    for where in (OUT, "true) or (true", "true) -- "):
        with pytest.raises(Invalid, match="predicate"):
            agency.call("box.create", contract="head", principal="ann", slice={"ticket": where})
    box, _ = test_delegation.make(agency)
    told = ask(box, f"print(len(layer.query('select id from ticket')))\nprint({OUT!r})")
    assert told.splitlines()[0] == "2"
    code = f"layer._ask('/delegate', {{'contract': 'head', 'task': 'x', 'slice': {{'ticket': {OUT!r}}}}})"
    assert "is not one expression" in refusal(box, code)
    assert len(Sandbox.list(labels={"layer": agency.id})) == 1


def test_no_predicate_has_brackets_of_its_own_only_at_its_ends(layer: Layer) -> None:
    layer.define("ticket", {"title": "text!"})
    layer.principal("ann")
    with pytest.raises(Invalid, match="is not one expression"):
        layer.grant("ann", "read", "ticket", where="title = 'a') or (title = 'b'")
    layer.grant("ann", "read", "ticket", where="(title = 'a') or (title = 'b')")


def test_what_asks_for_several_things_at_once_needs_who_may_allow_each(clerks: Layer) -> None:
    rules = [
        {"action": "insert", "resource": "ticket", "where": "priority < 5"},
        {"action": "insert", "resource": "ticket", "where": "priority > 5", "by": ["lead"]},
    ]
    clerks.call("contract.define", {**test_approvals.CLERK, "approvals": rules})
    clerks.grant("max", "read", "approval")
    box, _ = test_approvals.make(clerks)
    program = begin(box, "layer.insert('ticket', [{'title': 'small', 'priority': 1}, {'title': 'big', 'priority': 9}])")
    [row] = pending(clerks)
    with pytest.raises(Denied, match="max may not answer"):
        clerks.call("approval.answer", id=row["id"], approve=True, principal="max")
    clerks.call("approval.answer", id=row["id"], approve=True, principal="lee")
    assert test_approvals.ended(box, program) == ""
    assert len(clerks.query("select id from ticket where title in ('small', 'big')")) == 2


def test_who_delegates_is_asked_by_its_own_people(agency: Layer) -> None:
    """The rule of the parent is answered by those who may answer for the parent, whatever the child's rules say."""
    rule = {"action": "insert", "resource": "ticket"}
    agency.call("contract.define", {**test_delegation.HAND, "approvals": [rule]})
    agency.call("contract.define", {**test_delegation.HEAD, "approvals": [rule]})
    agency.principal("max")
    agency.principal("lee")
    agency.grant("max", "approve", "contract:hand")
    agency.grant("max", "read", "approval")
    for name in ("hand", "head"):
        agency.grant("lee", "approve", f"contract:{name}")
    box, _ = test_delegation.make(agency)
    program = begin(box, "print(layer.delegate('hand', 'look around')['status'])")
    [row] = pending(agency)
    with pytest.raises(Denied, match="contract:head"):
        agency.call("approval.answer", id=row["id"], approve=True, principal="max")
    agency.call("approval.answer", id=row["id"], approve=True, principal="lee")
    assert test_approvals.ended(box, program) == "done"


def test_an_agent_whose_branch_is_discarded_ends(office: Layer) -> None:
    told = test_agents.run(office, command="layer insert ticket title=x priority=1 && touch /tmp/there && sleep 3")
    box = Sandbox.connect(told["id"])
    wait_until(lambda: box.run(["test", "-e", "/tmp/there"]).exit_code == 0, "it has changed something", 30)
    office.discard(told["branch"])
    ended = test_agents.outcome(office, told, 30)
    assert ended["status"] == "done" and ended["result"]["proposal"] is None
    assert Sandbox.list(labels={"layer": office.id}) == []


def test_a_box_that_has_taken_all_steps_there_are_ends(clerks: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (executions, keeping):
        monkeypatch.setattr(module, "STEPS", 50)
    box, told = test_approvals.make(clerks)
    code = "try: layer.query(f'select {n} as n')\n    except layer.LayerError: pass"
    begin(box, f"import time\nfor n in range(100000):\n    time.sleep(0.01)\n    {code}")
    end = outcome(clerks, told["execution"])
    assert end["status"] == "failed" and "budget of 50 steps" in end["result"]["error"]["message"]


def test_what_a_box_makes_up_fills_no_steps(clerks: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "KEPT", 1 << 20)
    box, told = test_approvals.make(clerks)
    long = "'x' * 600_000"
    assert ask(box, f"print(layer._ask('/tool', {{'name': {long}, 'arguments': {{}}}})['is_error'])") == "True"
    assert "at most 1000 characters" in refusal(box, f"layer._ask('/emit', {{'name': {long}, 'data': 1}})")
    query = f"layer.query('select id from ticket where title = :x', {{'x': {long}}})"
    assert refusal(box, query) == "[]" and "no more than 1048576 bytes are kept" in refusal(box, query)
    box.kill()
    outcome(clerks, told["execution"])
    sql = "select sum(length(cast(detail as text))) as size from step where execution = :e"
    assert clerks.query(sql, {"e": told["execution"]})[0]["size"] < 1 << 20


def test_a_merge_is_of_what_was_shown(office: Layer) -> None:
    office.fork("idea")
    office.insert("ticket", {"title": "shown"}, branch="idea")
    with office.engine.reading() as session:
        shown = branches.head(office.engine, session, office.catalog.branch(session, "idea"))
    office.insert("ticket", {"title": "hidden"}, branch="idea")
    with pytest.raises(Conflict, match="has changed since it was proposed"):
        branches.merge(office.ledger, office.execution_by(None), "idea", None, False, None, expect=shown)
    assert not {"shown", "hidden"} & test_agents.titles(office)


def test_nobody_says_yes_to_a_box_that_has_ended(clerks: Layer) -> None:
    """Whoever looked after it was killed after its end, before it said that nothing is wanted any more."""
    box, told = test_approvals.make(clerks)
    box.kill()
    outcome(clerks, told["execution"])
    execution: Any = clerks.ledger.open(clerks.my_id, None, "verb")
    execution.id = told["execution"]
    number = approvals.request(
        clerks, execution, contract="clerk", branch="main", action="delete", resource="ticket", request={"do": "delete"}
    )
    with pytest.raises(Conflict, match="the box that asked has ended"):
        clerks.call("approval.answer", id=number, approve=True)
    assert approvals.get(clerks, number)["status"] == "withdrawn"


def test_a_review_says_that_there_is_more_than_it_shows(office: Layer) -> None:
    """Who may approve and merge, and not read all of it, is told so; what widens by becoming nothing is shown too."""
    told = test_agents.run(office)
    number = test_agents.outcome(office, told)["result"]["proposal"]
    office.principal("lee")
    for action, resource in (("approve", "contract:clerk"), ("read", "approval"), ("read", "step")):
        office.grant("lee", action, resource)
    office.grant("lee", "read", "ticket", where="priority > 100")
    found = agents.review(office, number, principal="lee")
    assert (found["rows"], found["unseen"]) == ([], 1)
    assert agents.review(office, number)["unseen"] == 0


def test_a_contract_that_can_not_be_kept_to_any_more_ends_its_boxes(clerks: Layer) -> None:
    """Whoever narrows a blueprint cuts off the boxes whose contracts are not within it any more, with their budgets."""
    clerks.call("blueprint.define", name="open", egress=["a.test", "b.test"])
    clerks.call("contract.define", {**test_approvals.CLERK, "blueprint": "open", "egress": ["a.test"]})
    _, told = test_approvals.make(clerks)
    clerks.call("blueprint.define", name="open", egress=["b.test"])
    end = outcome(clerks, told["execution"])
    assert end["status"] == "denied" and "is not within what its blueprint allows" in end["result"]["error"]["message"]
    assert Sandbox.list(labels={"layer": clerks.id}) == []


@pytest.mark.parametrize(
    "row", [{"stops": [5]}, {"budget": {"steps": "x"}}, {"budget": [1]}, {"approvals": ["x"]}]
)  # fmt: skip
def test_a_row_that_is_no_contract_keeps_nobody_from_looking_after_others(clerks: Layer, row: dict[str, Any]) -> None:
    clerks.principal("eve")
    for action, resource in (("write", "contract"), ("read", "contract"), ("call", "contract:bad")):
        clerks.grant("eve", action, resource)
    number = clerks.insert("contract", {"name": "bad", **row}, principal="eve")
    with pytest.raises(Invalid, match="contract 'bad'"):
        clerks.call("box.create", contract="bad", principal="eve")
    # One that had a box before it became like that: the box ends, and others are looked after.
    clerks.update("contract", number, dict.fromkeys(row) | {"reads": {"ticket": {}}}, principal="eve")
    told = clerks.call("box.create", contract="bad", principal="eve")
    _, other = test_approvals.make(clerks)
    tending.of(clerks).close()
    clerks.update("contract", number, row, principal="eve")
    tending.of(clerks).look()
    assert outcome(clerks, told["execution"])["status"] == "denied"
    assert ask(Sandbox.connect(other["id"]), "print(layer.query('select 1 as n'))") == "[{'n': 1}]"


def test_a_secret_that_was_read_is_in_no_step_of_a_tool(clerks: Layer) -> None:
    """Also when somebody else looks after the box since."""
    clerks.call("secret.set", name="SEEN", value="sesame-0123456789")
    clerks.call("blueprint.define", name="seeing", secrets=[{"name": "SEEN", "readable": True}])
    clerks.call("contract.define", {**test_approvals.CLERK, "blueprint": "seeing"})
    clerks.grant("ann", "use", "secret:SEEN")
    box, told = test_approvals.make(clerks)
    show = "layer._ask('/said', {'tool': {'name': 'shell', 'arguments': {'command': 'echo ' + s}, 'result': s}})"
    assert ask(box, f"s = layer.secret('SEEN')\n{show}\nprint(len(s))") == "17"
    tending.of(clerks).close()
    tending.of(clerks).look()
    ask(box, f"s = ''.join(('sesame-', '0123456789'))\n{show}")
    box.kill()
    outcome(clerks, told["execution"])
    sql = "select cast(detail as text) as detail from step where execution = :e and kind = 'tool'"
    found = [step["detail"] for step in clerks.query(sql, {"e": told["execution"]})]
    assert len(found) == 2 and "sesame-0123456789" not in "".join(found)


def test_what_a_box_gives_in_the_wrong_shape_is_refused_on_record(clerks: Layer) -> None:
    box, told = test_approvals.make(clerks)
    for on in ("[[]]", "['title'] * 300_000"):
        code = f"layer._ask('/upsert', {{'entity': 'ticket', 'values': {{'title': 'x'}}, 'on': {on}}})"
        assert refusal(box, code).startswith("Invalid upsert")
    for many, said in (
        (1000, "Invalid: upsert_ticket: on: "),
        (1_000_000, "more than the arguments of a tool may have"),
    ):
        given = f"{{'values': {{'title': 'x'}}, 'on': ['title'] * {many}}}"
        assert said in ask(
            box, f"print(layer._ask('/tool', {{'name': 'upsert_ticket', 'arguments': {given}}})['content'])"
        )
    box.kill()
    outcome(clerks, told["execution"])
    sql = "select detail from step where execution = :e and kind = 'refusal' order by n"
    steps = clerks.query(sql, {"e": told["execution"]})
    assert [step["detail"]["do"] for step in steps] == ["upsert", "upsert", "tool", "tool"]


@pytest.mark.parametrize("ends", ["budget", "query"])
def test_why_a_box_ended_is_known_to_whoever_comes_next(clerks: Layer, ends: str) -> None:
    """Whoever looked after it is killed after it has killed the box, before it has said so."""
    stop = "select id from ticket where priority = 7"
    more = {"budget": {"steps": 5}} if ends == "budget" else {"stops": [{"query": stop}]}
    clerks.call("contract.define", {**test_approvals.CLERK, "approvals": None, **more})
    box, told = test_approvals.make(clerks)
    wait_until(lambda: told["execution"] in tending.of(clerks).kept, "somebody looks after it", 10)
    tending.of(clerks).close()
    # What it does until it is killed: the step, and the box.
    kept = keeping.Kept(tending.of(clerks), told["execution"], told["id"])
    if ends == "budget":
        kept._decided({"error": {"code": "limit_exceeded", "message": "over its budget of 5 steps: 6", "hint": None}})
    else:
        kept._decided({"stopped": stop})
    box.kill()
    clerks.ledger.let_go(kept.execution)
    tending.of(clerks).look()
    end = outcome(clerks, told["execution"])
    if ends == "budget":
        assert end["status"] == "failed" and "over its budget of 5 steps" in end["result"]["error"]["message"]
    else:
        assert end["status"] == "done" and end["result"]["stopped"] == stop


def test_a_yes_that_is_granted_on_a_branch_is_none_on_main(clerks: Layer) -> None:
    clerks.principal("eve")
    clerks.grant("eve", "approve", "contract:clerk", branch="idea")
    clerks.grant("eve", "read", "approval")
    box, _ = test_approvals.make(clerks)
    begin(box, f"layer.update('ticket', {test_approvals.first(clerks)}, priority=9)")
    [row] = pending(clerks)
    with pytest.raises(Denied, match="eve may not approve contract:clerk"):
        clerks.call("approval.answer", id=row["id"], approve=True, principal="eve")


def test_a_task_that_is_no_text_is_refused_on_record(agency: Layer) -> None:
    box, told = test_delegation.make(agency)
    assert refusal(box, r"layer._ask('/delegate', {'contract': 'hand', 'task': '\ud800'})").startswith("Invalid")
    box.kill()
    outcome(agency, told["execution"])
    sql = "select detail from step where execution = :e and kind = 'refusal'"
    assert [step["detail"]["do"] for step in agency.query(sql, {"e": told["execution"]})] == ["delegate"]
