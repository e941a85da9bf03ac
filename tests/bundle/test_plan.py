"""A plan is the exact difference with the rows of a branch, and says what of it lets somebody do more than before."""

from __future__ import annotations

from typing import Any

import pytest
from bundle.desks import bundle, desk, last_tx, swapped

from livinglayer import Layer
from livinglayer.bundle.apply import apply
from livinglayer.bundle.load import Bundle
from livinglayer.bundle.plan import Plan, plan
from livinglayer.errors import Conflict, Denied, Invalid


def changed(made: Plan) -> list[tuple[str, str, str]]:
    return [(c.action, c.kind, c.name) for c in made.changes if c.kind != "bundle"]


def test_a_plan_says_everything_and_changes_nothing(layer: Layer) -> None:
    before = last_tx(layer)
    made = plan(layer, desk())
    assert last_tx(layer) == before
    assert [c for c in changed(made) if c[1] in ("entity", "role", "seed", "component")] == [
        ("add", "entity", "customer"), ("add", "entity", "ticket"), ("add", "role", "agent"), ("add", "role", "lead"),
        ("add", "component", "home"), ("add", "component", "list"), ("add", "seed", "customer"), ("add", "seed", "ticket"),
    ]  # fmt: skip
    assert not made.empty and made.before is None and made.widens


def test_after_an_apply_there_is_nothing_to_do(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    again = plan(layer, desk())
    assert again.empty and again.changes == [] and again.lines() == [] and not again.widens
    before = last_tx(layer)
    assert apply(layer, desk()).empty
    assert last_tx(layer) == before


def test_what_is_changed_by_hand_is_drift(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    layer.alter("ticket", change={"note": {"required": False, "description": "by hand"}}, add={"color": "text"})
    layer.call("trigger.enable", name="rank-new", enabled=False)
    layer.principal("ann", roles=["agent", "lead"])
    grant = layer.query("select id from permission where effect = 'deny'")[0]["id"]
    layer.revoke(grant)
    made = plan(layer, desk())
    assert changed(made) == [
        ("change", "field", "ticket.note"), ("keep", "field", "ticket.color"), ("change", "principal", "ann"),
        ("add", "grant", "deny agent delete ticket"), ("change", "trigger", "rank-new"),
    ]  # fmt: skip
    ann = next(c for c in made.changes if c.name == "ann")
    assert ann.detail == {"before": {"roles": ["agent", "lead"]}, "after": {"roles": ["agent"]}} and not ann.widens
    apply(layer, desk(), accept=made.digest)
    assert plan(layer, desk()).empty
    assert "color" in layer.schema().get("ticket").by_name  # what others added stays


def test_lines_mark_what_widens(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    made = plan(layer, desk(swapped("policy.yaml", "priority < 5", "priority < 9")))
    assert [line for line in made.lines() if "bundle" not in line and "digest" not in line] == [
        "! + grant allow agent read ticket where priority < 9   (agent may read ticket)",
        "  - grant allow agent read ticket where priority < 5",
    ]
    assert made.json()["widens"] and made.json()["digest"] == made.digest


def test_lines_go_down_to_what_differs(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    changes = swapped("contracts.yaml", "fields: [title, priority]", "fields: [title, note]")
    changes |= swapped("functions/rank.py", "return 1", "return 2")
    lines = plan(layer, desk(changes)).lines()
    assert "        reads.ticket.fields: - priority, + note" in lines
    assert lines[lines.index("        code: 2 → 2 lines") + 1 :][:2] == [
        "          -     return 1  # everything is urgent", "          +     return 2  # everything is urgent",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (swapped("policy.yaml", "bot: {kind: service}", "bot: {kind: service, roles: [lead]}"), "bot gets the role lead"),
        (swapped("policy.yaml", "team: billing", "team: all"), "conditions may speak of its attributes"),
        (swapped("policy.yaml", ", effect: deny, reason: nothing is lost here", ""), "agent may delete ticket"),
        (swapped("policy.yaml", "amount: 100", "amount: 1000"), "a limit rises"),
        (swapped("policy.yaml", "seconds: 3600", "seconds: 60"), "a limit goes"),
        (swapped("blueprints.yaml", "limits:", "tier: process, limits:"), "tier process: no walls"),
        (swapped("blueprints.yaml", "limits:", "egress: [api.test], limits:"), "egress opens: api.test"),
        (swapped("blueprints.yaml", "limits:", "mounts: [{source: /srv, target: /srv}], limits:"), "mounts /srv"),
        (
            swapped("blueprints.yaml", "limits:", "egress: [{host: api.test, secrets: [K]}], secrets: [K], limits:"),
            "uses secret K",
        ),
        (swapped("functions.yaml", "reads: [ticket]", "reads: [ticket]\n    rights: definer"), "rights of whoever applies"),
        (swapped("functions/rank.py", "return 1", "return 2"), "a trigger runs it"),
        (swapped("projections/open.sql", "status = 'open' and ", ""), "it shows what whoever applies this may see"),
        (swapped("contracts.yaml", "[title, priority]}}\n    scope", "[title, note]}}\n    scope"), "reads ticket"),
        (swapped("contracts.yaml", "[update], fields: [priority]", "[update, insert], fields: [priority]"), "writes ticket"),
        (swapped("contracts.yaml", "seconds: 60", "seconds: 61"), "budget seconds 60 → 61"),
        (swapped("contracts.yaml", "budget: {seconds: 60}", ""), "budget seconds 60 → none"),
        (swapped("triggers.yaml", "[insert]", "[insert, update]"), "calls ticket.rank as whoever applies this"),
    ],
)  # fmt: skip
def test_what_lets_somebody_do_more(layer: Layer, change: dict[str, str], why: str) -> None:
    apply(layer, desk(), yes=True)
    made = plan(layer, desk(change))
    assert made.widens and any(why in (c.why or "") for c in made.changes if c.widens), made.lines()
    with pytest.raises(Denied, match="more than before"):
        apply(layer, desk(change))
    assert apply(layer, desk(change), accept=made.digest).digest == made.digest
    assert plan(layer, desk(change)).empty


@pytest.mark.parametrize(
    "change",
    [
        swapped("policy.yaml", '  - {to: lead, action: read, resource: ticket}\n', ""),
        swapped("policy.yaml", "amount: 100", "amount: 10"),
        swapped("contracts.yaml", "fields: [title, priority]}}\n    scope", "fields: [title]}}\n    scope"),
        swapped("contracts.yaml", "    functions: [ticket.rank]\n", ""),
        swapped("blueprints.yaml", "limits:", "tier: container, limits:"),
        swapped("schema.yaml", "note: text", "note: text\n      color: text"),
    ],
)  # fmt: skip
def test_what_lets_nobody_do_more(layer: Layer, change: dict[str, str]) -> None:
    apply(layer, desk(), yes=True)
    made = plan(layer, desk(change))
    assert not made.empty and not made.widens, made.lines()
    apply(layer, desk(change))
    assert plan(layer, desk(change)).empty


def test_only_owners_plan(layer: Layer) -> None:
    layer.principal("ann")
    layer.grant("ann", "define", "*")
    with pytest.raises(Denied, match="only an owner may"):
        plan(layer, desk(), principal="ann")


def test_names_that_others_have_are_conflicts(layer: Layer) -> None:
    layer.define("customer", {"name": "text!", "phone": "text"})
    layer.principal("agent", kind="role")
    made = plan(layer, desk())
    assert [c.why for c in made.changes if c.action == "conflict"] == ["it was not made by a bundle"] * 3
    assert [(c.kind, c.name) for c in made.changes if c.action == "conflict"] == [
        ("entity", "customer"), ("field", "customer.name"), ("role", "agent"),
    ]  # fmt: skip
    taken = plan(layer, desk(), adopt=True)
    assert [(c.action, c.name) for c in taken.changes if c.name in ("customer", "customer.name", "customer.email")] == [
        ("adopt", "customer"), ("adopt", "customer.name"), ("add", "customer.email"), ("add", "customer"),
    ]  # fmt: skip


def needs(name: str, **requires: str) -> Bundle:
    return bundle(
        name, **({"requires": "{" + ", ".join(f'{k}: "{v}"' for k, v in requires.items()) + "}"} if requires else {})
    )


def test_what_is_needed_comes_first_and_circles_are_refused(layer: Layer) -> None:
    people = bundle("people", "1.2.0", schema="entities: {person: {fields: {name: text!}}}")
    desks = bundle(
        "desks", requires='{people: ">=1.1.0"}', schema="entities: {desk: {fields: {owner: ref person}}}"
    )  # fmt: skip
    with pytest.raises(Conflict, match=r"desks needs people >=1.1.0: it is not applied"):
        plan(layer, desks)
    old = bundle("people", "1.0.0", schema="entities: {person: {fields: {name: text!}}}")
    with pytest.raises(Conflict, match=r"it is not applied, beside it lies 1.0.0"):
        plan(layer, desks, beside={"people": old})
    made = plan(layer, desks, beside={"people": people})
    assert [step.bundle.name for step in made.steps] == ["people", "desks"]
    apply(layer, old)
    with pytest.raises(Conflict, match=r"applied is 1.0.0"):
        plan(layer, desks)
    apply(layer, desks, beside={"people": people})
    assert layer.query("select name, version from bundle order by name") == [
        {"name": "desks", "version": "1.0.0"}, {"name": "people", "version": "1.2.0"},
    ]  # fmt: skip
    with pytest.raises(Invalid, match="circle: a → b → c → a"):
        beside: dict[str, Any] = {"b": needs("b", c=">=1.0.0"), "c": needs("c", a=">=1.0.0")}
        plan(layer, needs("a", b=">=1.0.0"), beside=beside)


def test_a_downgrade_is_refused(layer: Layer) -> None:
    apply(layer, desk(version="1.2.0"), yes=True)
    with pytest.raises(Conflict, match=r"desk 1.2.0 is applied, and 1.1.9 is older"):
        plan(layer, desk(version="1.1.9"))
