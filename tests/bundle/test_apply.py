"""A bundle becomes rows in one attributed tx, or nothing of it does; a stranger's gets nothing without the owner's yes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bundle.desks import DESK, bundle, desk, last_tx, swapped

from livinglayer import Layer
from livinglayer.bundle.apply import apply, remove
from livinglayer.bundle.load import Bundle
from livinglayer.bundle.plan import plan
from livinglayer.bundle.verbs import sent
from livinglayer.errors import Conflict, Denied, Invalid, LayerError, NotFound

COUNTS = "entity", "field", "principal", "membership", "permission", "blueprint", "function", "contract", "projection"
TABLES = (*COUNTS, "trigger", "quota", "component", "bundle")


def rows(layer: Layer, branch: str = "main") -> dict[str, list[dict[str, Any]]]:
    return {name: layer.query(f"select * from {name} order by id", branch=branch) for name in TABLES}


def test_everything_is_one_attributed_tx(layer: Layer) -> None:
    before = last_tx(layer)
    apply(layer, desk(), yes=True, reason="the desk opens")
    assert last_tx(layer) == before + 1
    assert layer.query("select principal, reason from tx order by tx desc limit 1") == [
        {"principal": "owner", "reason": "the desk opens"}
    ]
    touched = {row["entity"] for row in layer.query("select entity from change where tx = :tx", {"tx": before + 1})}
    assert touched == {*TABLES, "customer", "ticket"}
    assert layer.query("select name, version, signer from bundle") == [
        {"name": "desk", "version": "1.0.0", "signer": None}
    ]
    assert layer.query(
        "select t.title, t.status, t.priority, c.name, p.name as who from ticket t join customer c on c.id = t.customer"
        " join principal p on p.id = c.who"
    ) == [{"title": "Help", "status": "open", "priority": 2, "name": "Cara", "who": "ann"}]
    assert layer.query("select c.name, p.name as parent from component c left join component p on p.id = c.parent order by c.id") == [
        {"name": "home", "parent": None}, {"name": "list", "parent": "home"},
    ]  # fmt: skip
    assert layer.verify()


def test_what_was_applied_holds_at_once(layer: Layer) -> None:
    assert layer.schema().by_name.get("ticket") is None  # known as it was before
    assert not layer.can("ann", "read", "ticket")
    apply(layer, desk(), yes=True)
    assert layer.can("ann", "read", "ticket") and not layer.can("ann", "delete", "ticket")
    assert layer.query("select title from ticket", principal="ann") == [{"title": "Help"}]
    assert layer.projection("open_tickets", principal="ann") == [
        {"id": 0, "title": "Help"} | layer.query("select id from ticket")[0]
    ]
    with pytest.raises(Invalid, match="breaks its check"):
        layer.insert(
            "ticket", {"title": "x", "customer": layer.query("select id from customer")[0]["id"], "priority": -1}
        )


def test_through_the_door_it_is_recorded_without_its_files(layer: Layer) -> None:
    told = layer.call("bundle.apply", files=sent(desk().files), yes=True, reason="yes")
    assert told["bundle"] == "desk" and told["widens"]
    assert layer.query("select verb, arguments, status, result is null as quiet from execution where verb = 'bundle.apply'") == [
        {"verb": "bundle.apply", "arguments": {"yes": True, "adopt": False}, "status": "done", "quiet": True}
        | layer.query("select arguments from execution where verb = 'bundle.apply'")[0]
    ]  # fmt: skip
    assert "files" not in layer.query("select arguments from execution where verb = 'bundle.apply'")[0]["arguments"]
    with pytest.raises(Invalid, match="own verbs"):
        layer.call("function.define", name="bundle.apply", code="def apply(): pass")


def test_the_plan_that_was_accepted_is_the_one_that_is_done(layer: Layer) -> None:
    made = plan(layer, desk())
    layer.principal("ann")  # meanwhile
    with pytest.raises(Conflict, match=f"not {made.digest}"):
        apply(layer, desk(), accept=made.digest)
    assert layer.query("select name from bundle") == []
    other = plan(layer, desk(swapped("policy.yaml", "priority < 5", "priority < 6")), adopt=True)
    with pytest.raises(Conflict, match="the plan is"):
        apply(layer, desk(), accept=other.digest, adopt=True)


def test_only_owners_apply_and_the_refusal_is_recorded(layer: Layer) -> None:
    layer.principal("ann")
    for action, resource in (("define", "*"), ("write", "*"), ("read", "*"), ("grant", "*")):
        layer.grant("ann", action, resource)
    for act in (
        lambda: layer.call("bundle.apply", files=sent(desk().files), yes=True, principal="ann"),
        lambda: apply(layer, desk(), yes=True, principal="ann"),
        lambda: remove(layer, "desk", principal="ann"),
        lambda: layer.insert("bundle", {"name": "desk", "version": "9.9.9"}),
    ):
        with pytest.raises(Denied):
            act()
    layer.principal("bob")  # any tx takes refusals along
    denied = layer.query("select principal, resource from decision where allowed = false")
    assert [row["resource"] for row in denied].count("bundle") == 4


def with_(kind: str, name: str, **more: Any) -> Bundle:
    """The desk with one definition changed, as if no file had been looked at."""
    made = desk()
    group = getattr(made, kind)
    return replace(made, **{kind: {**group, name: {**group[name], **more}}})


WRONG: list[tuple[Callable[[], Bundle], str]] = [
    (lambda: with_("contracts", "triage", egress=["evil.test"]), "contract triage: egress rule evil.test"),
    (lambda: with_("contracts", "triage", functions=["ticket.gone"]), "contract triage: there is no function"),
    (lambda: with_("contracts", "triage", reads={"tikcet": {}}), "contract triage: there is no entity 'tikcet'"),
    (lambda: with_("functions", "ticket.rank", writes=["tikcet"]), "function ticket.rank: there is no entity"),
    (lambda: with_("functions", "ticket.rank", blueprint="huge"), "function ticket.rank: there is no blueprint 'huge'"),
    (lambda: with_("functions", "ticket.rank", code="def rank("), "function ticket.rank"),
    (lambda: with_("triggers", "rank-new", where="colour = 1"), "trigger rank-new"),
    (lambda: with_("triggers", "rank-new", function="ticket.gone"), "trigger rank-new: there is no function"),
    (lambda: with_("blueprints", "small", limits={"memory": "lots"}), "blueprint small"),
    (lambda: desk(swapped("projections/open.sql", "select id, title", "select id, nothing")), "projection open_tickets"),
    (lambda: with_("projections", "open_tickets", statement="select 1 as n from ledger_tx where 0 < :least"), "projection open_tickets"),
    (lambda: desk(swapped("seeds.yaml", "email: c@x.test}}}, status", "email: nobody@x.test}}}, status")), "seed ticket"),
    (lambda: desk(swapped("seeds.yaml", "priority: 2", "priority: -2")), "breaks its check"),
    (lambda: replace(desk(), grants=({"to": "agent", "action": "read", "resource": "tikcet"},)), "there is no entity 'tikcet'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), WRONG)
def test_what_could_never_work_is_refused_and_leaves_nothing(
    layer: Layer, make: Callable[[], Bundle], said: str
) -> None:
    before, tables, tx = rows(layer), _tables(layer), last_tx(layer)
    with pytest.raises(LayerError) as refused:
        apply(layer, make(), yes=True)
    assert said in str(refused.value)
    assert rows(layer) == before and _tables(layer) == tables and last_tx(layer) == tx
    apply(layer, desk(), yes=True)  # and nothing stands in the way
    assert layer.verify()


def _tables(layer: Layer) -> set[str]:
    with layer.engine.reading() as session:
        return set(layer.engine.statements(session))


def test_on_a_branch_it_is_there_alone_until_it_is_merged(layer: Layer) -> None:
    layer.fork("try")
    before = rows(layer)
    apply(layer, desk(), branch="try", yes=True)
    assert rows(layer) == before and plan(layer, desk(), "try").empty and not plan(layer, desk()).empty
    assert layer.query("select title from ticket", branch="try") == [{"title": "Help"}]
    layer.principal("ann")
    assert not layer.can("ann", "read", "*")
    layer.discard("try")
    layer.fork("again")
    with pytest.raises(Conflict, match="principal 'ann' is there already"):
        apply(layer, desk(), branch="again", yes=True)
    apply(layer, desk(), branch="again", yes=True, adopt=True)
    assert not layer.query("select id from permission p where p.resource = 'ticket'")
    assert layer.merge("again")
    assert layer.can("ann", "read", "ticket") and plan(layer, desk()).empty
    assert layer.query("select title from ticket", principal="ann") == [{"title": "Help"}]
    assert layer.verify()


# Names


def test_names_of_others_are_taken_over_only_if_asked(layer: Layer) -> None:
    layer.define("customer", {"name": "text!", "phone": "text"})
    layer.insert("customer", {"name": "Old", "phone": "1"})
    layer.call("blueprint.define", name="small", limits={"memory": "64M"})
    with pytest.raises(Conflict, match=r"entity 'customer' is there already: it was not made by a bundle, and 2 more"):
        apply(layer, desk(), yes=True)
    without_rows = desk(
        {"seeds.yaml": None, **swapped("schema.yaml", "email: {type: text!, unique", "email: {type: text, unique")}
    )
    apply(layer, without_rows, yes=True, adopt=True)
    assert layer.query("select name, phone from customer") == [{"name": "Old", "phone": "1"}]
    assert layer.query("select limits from blueprint") == [{"limits": {"memory": "128M"}}]
    assert plan(layer, without_rows).empty


def test_a_name_of_another_bundle_moves_with_adopt(layer: Layer) -> None:
    one = bundle("one", schema="entities: {thing: {fields: {name: text!}}}")
    two = bundle("two", schema="entities: {thing: {fields: {name: text!, size: int}}}")
    apply(layer, one)
    with pytest.raises(Conflict, match="it is of bundle one"):
        apply(layer, two)
    apply(layer, two, adopt=True)
    assert plan(layer, two).empty
    remove(layer, "one", data=True)
    assert "size" in layer.schema().get("thing").by_name


def test_what_the_system_has_is_nobodys(layer: Layer) -> None:
    """Also where no file was looked at before."""
    for wrong in (
        Bundle("bad", "1.0.0", entities={"permission": {"fields": {"x": "text"}}}),
        Bundle("bad", "1.0.0", entities={"ledger_tx": {"fields": {"x": "text"}}}),
        Bundle("bad", "1.0.0", principals={"owner": {"kind": "human"}}),
        Bundle("bad", "1.0.0", roles={"owner": {}}),
    ):
        with pytest.raises(Invalid, match=r"system's own|owner of the layer"):
            apply(layer, wrong, yes=True, adopt=True)


# Strangers

GIVEN: dict[str, dict[str, Any]] = {
    "to whoever applies": {"grants": ({"to": "owner", "action": "*", "resource": "*"},)},
    "to somebody who is there": {"grants": ({"to": "ann", "action": "*", "resource": "*"},)},
    "to a role of its own": {"roles": {"r": {}}, "grants": ({"to": "r", "action": "read", "resource": "*"},)},
    "a grant to pass on": {"grants": ({"to": "ann", "action": "read", "resource": "tx", "delegable": True},)},
    "another one as somebody": {"grants": ({"to": "ann", "action": "impersonate", "resource": "principal:owner"},)},
    "the rights of its definer": {"functions": {"x.y": {"code": "def y(): pass", "rights": "definer", "writes": ["permission"]}}},
    "a trigger": {"functions": {"x.y": {"code": "def y(): pass"}}, "triggers": {"t": {"function": "x.y", "schedule": "@hourly"}}},
    "an opening": {"blueprints": {"b": {"egress": ["evil.test"]}}},
    "no walls": {"blueprints": {"b": {"tier": "process"}}},
    "files of the host": {"blueprints": {"b": {"mounts": [{"source": "/", "target": "/host"}]}}},
    "a role of the owner": {"principals": {"mallory": {"roles": ["owner"]}}},
    "a role for somebody who is there": {"principals": {"mallory": {"roles": ["ann"]}}},
    "a contract": {"contracts": {"c": {"reads": ["principal"]}}},
}  # fmt: skip


@pytest.mark.parametrize("what", GIVEN)
def test_a_stranger_gets_nothing_without_the_owners_yes(layer: Layer, what: str) -> None:
    layer.principal("ann")
    before = rows(layer)
    stranger = Bundle("stranger", "1.0.0", digest="0" * 64, **GIVEN[what])
    for attempt in (dict[str, Any](), {"adopt": True}, {"branch": "main", "reason": "trust me"}):
        with pytest.raises(Denied, match="more than before"):
            apply(layer, stranger, **attempt)
    with pytest.raises(Conflict):
        apply(layer, stranger, accept="0" * 16)
    assert rows(layer) == before
    layer.principal("bob")
    refused = layer.query("select action, resource from decision where resource = 'bundle:stranger'")
    assert refused == [{"action": "grant", "resource": "bundle:stranger"}] * 3


def test_names_that_nobody_has_get_no_grant(layer: Layer) -> None:
    for name in ("*", "nobody"):
        stray = Bundle("stray", "1.0.0", grants=({"to": name, "action": "read", "resource": "tx"},))
        with pytest.raises(Invalid, match="there is no principal or role"):
            apply(layer, stray, yes=True)
    assert layer.query("select name from principal where kind = 'pending'") == []


def test_a_function_is_not_called_like_a_verb(layer: Layer) -> None:
    for name in ("row.insert", "permission.steal", "bundle.apply"):
        bad = Bundle("bad", "1.0.0", functions={name: {"code": "def f(): pass", "language": "python"}})
        with pytest.raises(Invalid, match="own verbs"):
            apply(layer, bad, yes=True)
    assert layer.query("select name from function") == []


def test_rows_go_nowhere_else_than_into_entities_of_the_bundle(layer: Layer) -> None:
    from livinglayer.bundle.load import Seed

    layer.define("member", {"team": "text!"})
    for entity, values in (
        ("member", {"team": "admins"}),
        ("principal", {"name": "x"}),
        ("blueprint", {"name": "x", "tier": "process"}),
    ):
        key = tuple(values)[:1]
        sly = Bundle("sly", "1.0.0", seeds=(Seed(entity, key, (values,)),), digest="1")
        assert plan(layer, sly).widens
        with pytest.raises(LayerError):
            apply(layer, sly, yes=True)
    assert layer.query("select count(*) as n from member") == [{"n": 0}]


# Seeds


def test_seeds_are_planted_once(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    dan = layer.query("select id from customer where name = 'Dan'")[0]["id"]
    ticket = layer.query("select id from ticket")[0]["id"]
    layer.delete("customer", dan)
    layer.update("ticket", ticket, {"priority": 4})
    more = DESK["seeds.yaml"].replace(
        "{name: Dan, email: d@x.test}", "{name: Dan, email: d@x.test}, {name: Eve, email: e@x.test}"
    )
    newer = desk({"seeds.yaml": more}, version="1.1.0")
    assert [c.detail["after"] for c in plan(layer, newer).changes if c.kind == "seed"] == [{"rows": 1}]
    apply(layer, newer)
    assert layer.query("select name from customer order by name") == [{"name": "Cara"}, {"name": "Eve"}]
    assert layer.query("select priority from ticket") == [{"priority": 4}]
    assert plan(layer, newer).empty


def test_a_row_that_is_there_is_left_alone(layer: Layer) -> None:
    apply(layer, desk({"seeds.yaml": None}), yes=True)
    layer.insert("customer", {"name": "Other", "email": "c@x.test"})
    apply(layer, desk(), yes=True)
    assert layer.query("select name from customer order by name") == [{"name": "Dan"}, {"name": "Other"}]


def test_rows_for_an_entity_of_a_bundle_that_it_needs(layer: Layer) -> None:
    people = bundle("people", schema="entities: {person: {fields: {name: text!, rank: {type: int, default: 1}}}}")
    staff = bundle(
        "staff", requires='{people: ">=1.0.0"}', schema="entities: {desk: {fields: {of: ref person}}}",
        seeds="""
        seeds:
          - {entity: person, key: [name], rows: [{name: Ann}, {name: Bob, rank: 2}]}
          - {entity: desk, key: [of], rows: [{of: {$ref: {person: {name: Ann, rank: 1}}}}]}
        """,
    )  # fmt: skip
    apply(layer, people)
    made = plan(layer, staff)
    assert [c.why for c in made.changes if c.widens] == ["2 rows of person, which is not this bundle's"]
    with pytest.raises(Denied):
        apply(layer, staff)
    apply(layer, staff, accept=made.digest)
    assert layer.query("select name, rank from person order by name") == [
        {"name": "Ann", "rank": 1},
        {"name": "Bob", "rank": 2},
    ]
    assert layer.query("select p.name from desk d join person p on p.id = d.of") == [{"name": "Ann"}]
    assert plan(layer, staff).empty


# The end


def test_removing_takes_definitions_and_leaves_rows(layer: Layer) -> None:
    layer.define("badge", {"of": "ref principal"})
    before = rows(layer)
    apply(layer, desk(), yes=True)
    layer.insert("badge", {"of": layer.query("select id from principal where name = 'ann'")[0]["id"]})
    then = last_tx(layer)
    remove(layer, "desk")
    after = rows(layer)
    assert {name for name in TABLES if after[name] != before[name]} == {"entity", "field", "principal"}
    assert [row["name"] for row in after["principal"] if row not in before["principal"]] == [
        "ann"
    ]  # a row refers to her
    assert layer.query("select count(*) as n from membership") == [{"n": 0}] and not layer.can("ann", "read", "ticket")
    assert layer.query("select title from ticket") == [{"title": "Help"}]
    assert layer.query("select name from function", as_of=then) == [{"name": "ticket.rank"}]
    with pytest.raises(NotFound):
        remove(layer, "desk")
    apply(layer, desk(), yes=True, adopt=True)
    remove(layer, "desk", data=True)
    assert "ticket" not in layer.schema().by_name
    assert layer.query("select title from ticket", as_of=then) == [{"title": "Help"}]
    assert layer.verify()


def test_what_another_needs_is_not_removed(layer: Layer) -> None:
    people = bundle("people", schema="entities: {person: {fields: {name: text!}}}")
    desks = bundle("desks", requires='{people: ">=1.0.0"}', schema="entities: {seat: {fields: {owner: ref person}}}")
    apply(layer, desks, beside={"people": people})
    with pytest.raises(Conflict, match="bundle desks needs people"):
        layer.call("bundle.remove", name="people")
    layer.call("bundle.remove", name="desks", data=True)
    assert layer.call("bundle.remove", name="people", data=True) == [
        {"kind": "entity", "name": "person"}, {"kind": "field", "name": "person.name"},
    ]  # fmt: skip


def test_components_in_a_circle_are_refused(layer: Layer) -> None:
    circle = Bundle(
        "circle", "1.0.0", components=({"name": "a", "kind": "Column", "parent": "b"}, {"name": "b", "kind": "Column", "parent": "a"})
    )  # fmt: skip
    with pytest.raises(Invalid, match="in a circle: a, b"):
        apply(layer, circle)


def test_two_handles_see_the_same(layer: Layer, make_layer: Callable[[], Layer], location: str) -> None:
    import livinglayer

    with livinglayer.open(location) as other:
        assert "ticket" not in other.schema().by_name
        apply(layer, desk(), yes=True)
        assert other.query("select title from ticket") == [{"title": "Help"}] and plan(other, desk()).empty
        changed = desk(swapped("functions/rank.py", "return 1", "return 2"))
        apply(other, changed, yes=True)
        assert plan(layer, changed).empty
        assert "return 2" in layer.query("select code from function")[0]["code"]


def test_the_signer_is_kept(layer: Layer) -> None:
    apply(layer, replace(desk(), signer="a key"), yes=True)
    assert layer.query("select signer from bundle") == [{"signer": "a key"}]
