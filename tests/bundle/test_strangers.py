"""What a stranger's bundle opens is marked and shown, by whatever way it opens it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle.desks import DESK, bundle, desk, swapped

from livinglayer import Layer
from livinglayer.bundle.apply import apply, remove
from livinglayer.bundle.export import files_of
from livinglayer.bundle.load import Bundle, of_files
from livinglayer.bundle.plan import Plan, plan
from livinglayer.errors import Conflict, LayerError

STAFF = "entities: {person: {fields: {name: text, ssn: text, public: bool}}}"


def opening(made: Plan, kind: str) -> list[str]:
    return [change.why or "" for change in made.changes if change.widens and change.kind == kind]


def after(layer: Layer, steps: str, schema: str) -> Plan:
    """The plan of a newer version of `staff` with a migration."""
    files = {
        "bundle.yaml": "name: staff\nversion: 1.1.0\n",
        "schema.yaml": schema,
        "migrations/1.1.0.yaml": f"steps: {steps}",
    }
    return plan(layer, of_files({path: text.encode() for path, text in files.items()}))


def denied_entity(layer: Layer) -> None:
    layer.grant("guest", "read", "*")
    layer.grant("guest", "read", "person", effect="deny")


@pytest.mark.parametrize(
    ("grants", "steps", "schema", "why"),
    [
        (denied_entity, "[rename_entity: {entity: person, to: crew}]", STAFF.replace("person", "crew"), "prohibition"),
        (
            lambda layer: layer.grant("guest", "read", "person", fields=["ssn"], effect="deny"),
            "[rename: {entity: person, field: ssn, to: number}]", STAFF.replace("ssn", "number"), "prohibition",
        ),
        (
            lambda layer: layer.grant("guest", "read", "person", fields=["name"]),
            "[{drop: {entity: person, field: name}}, {rename: {entity: person, field: ssn, to: name}}]",
            STAFF.replace("name: text, ssn", "name"), "speaks of person.name",
        ),
        (
            lambda layer: layer.grant("guest", "read", "person", fields=["name"]),
            "[set: {entity: person, values: {name: {$field: ssn}}}]", STAFF, "speaks of person.name",
        ),
        (
            lambda layer: layer.grant("guest", "read", "person", where="public"),
            "[set: {entity: person, values: {public: true}}]", STAFF, "condition",
        ),
    ],
)  # fmt: skip
def test_a_migration_that_opens_rows(
    layer: Layer, grants: Callable[[Layer], Any], steps: str, schema: str, why: str
) -> None:
    apply(layer, bundle("staff", schema=STAFF))
    assert not after(layer, steps, schema).widens
    layer.principal("guest")
    grants(layer)
    made = after(layer, steps, schema)
    assert any(why in each for each in opening(made, "migration")), made.lines()


def test_what_a_migration_sets_is_shown(layer: Layer) -> None:
    apply(layer, bundle("staff", schema=STAFF))
    made = after(layer, "[set: {entity: person, values: {name: mallory, public: {$field: public}}}]", STAFF)
    assert any('person.name = "mallory", person.public = public' in line for line in made.lines()), made.lines()


def test_an_entity_that_goes_by_a_name_that_contracts_read(layer: Layer) -> None:
    layer.define("crew", {"name": "text"})
    layer.call("contract.define", name="clerk", reads=["crew"])
    layer.drop("crew")
    apply(layer, bundle("staff", schema=STAFF))
    made = after(layer, "[rename_entity: {entity: person, to: crew}]", STAFF.replace("person", "crew"))
    assert opening(made, "migration")


def test_a_weaker_tier_than_the_blueprint_of_a_contract(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    made = plan(layer, desk(swapped("contracts.yaml", "blueprint: small", "blueprint: small\n    tier: process")))
    assert any("tier" in each for each in opening(made, "contract")), made.lines()
    new = plan(layer, bundle("odd", contracts="contracts: {odd: {tier: process}}"))
    assert any("tier process" in each for each in opening(new, "contract")), new.lines()


def test_the_first_approval_that_speaks_decides_so_its_place_matters(layer: Layer) -> None:
    one, two = (
        "{action: update, resource: ticket, by: [lead]}",
        "{action: write, resource: ticket, by: [agent], expires: 9}",
    )
    contract = "budget: {seconds: 60}"
    apply(layer, desk(swapped("contracts.yaml", contract, f"{contract}\n    approvals: [{one}]")), yes=True)
    before = plan(layer, desk(swapped("contracts.yaml", contract, f"{contract}\n    approvals: [{two}, {one}]")))
    assert any("approval" in each for each in opening(before, "contract")), before.lines()
    behind = plan(layer, desk(swapped("contracts.yaml", contract, f"{contract}\n    approvals: [{one}, {two}]")))
    assert not behind.widens


def test_prohibitions_go_with_the_role_that_has_them(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    made = plan(layer, desk(swapped("policy.yaml", "roles: [agent], attributes", "attributes")))
    assert opening(made, "principal"), made.lines()  # agents may not delete tickets
    layer.grant("lead", "read", "customer", effect="deny")
    policy = (
        DESK["policy.yaml"].replace(", lead: {}", "").replace("  - {to: lead, action: read, resource: ticket}\n", "")
    )
    assert opening(plan(layer, desk({"policy.yaml": policy})), "role")


def test_functions_that_are_called_on_the_way(layer: Layer) -> None:
    functions = """
      functions:
        x.outer: {code: "def outer(): pass", calls: [x.inner]}
        x.inner: {code: "def inner(): pass"}
        x.lone: {code: "def lone(): pass"}
        x.lent: {code: "def lent(): pass"}
    """
    more = {
        "triggers": "triggers: {t: {function: x.outer, schedule: '@hourly'}}",
        "contracts": "contracts: {c: {functions: [x.lent]}}",
    }
    apply(layer, bundle("x", functions=functions, **more), yes=True)
    made = plan(layer, bundle("x", functions=functions.replace("pass", "return 1"), **more))
    assert {c.name for c in made.changes if c.widens} == {"x.outer", "x.inner", "x.lent"}


def test_what_runs_in_boxes_is_what_the_blueprint_says(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    for change in (
        "environment: {PYTHONPATH: /x}, limits:",
        "packages: [{pip: [x]}], limits:",
        "ports: [80], limits:",
    ):
        assert opening(plan(layer, desk(swapped("blueprints.yaml", "limits:", change))), "blueprint"), change


def test_a_new_projection_for_those_who_may_read_everything_but(layer: Layer) -> None:
    layer.principal("guest")
    spy = bundle("spy", projections="projections: {spy: {statement: select * from principal}}")
    assert not plan(layer, spy).widens
    layer.grant("guest", "read", "*")
    layer.grant("guest", "read", "principal", effect="deny")
    assert opening(plan(layer, spy), "projection")


# What is shown


def test_what_is_taken_over_shows_how_it_changes(layer: Layer) -> None:
    layer.call("function.define", name="x.y", code="def y():\n    return 1\n")
    mine = bundle("mine", functions='functions: {x.y: {code: "def y():\\n    return 2\\n"}}')
    assert "          +     return 2" in plan(layer, mine, adopt=True).lines()


def test_lines_that_only_change_places_are_shown(layer: Layer) -> None:
    apply(layer, desk({"functions/rank.py": "def rank(id):\n    id = 1\n    check(id)\n    return id\n"}), yes=True)
    made = plan(layer, desk({"functions/rank.py": "def rank(id):\n    check(id)\n    id = 1\n    return id\n"}))
    assert [line for line in made.lines() if line.startswith("          ")]


def test_the_whole_condition_of_a_grant_is_shown(layer: Layer) -> None:
    from livinglayer.edges.cli.bundles import lines

    policy = """
      roles: {r: {}}
      grants: [{to: r, action: read, resource: person, where: "public or   (ssn is null or not public)"}]
    """
    made = plan(layer, bundle("staff", schema=STAFF, policy=policy))
    (grant,) = [change for change in made.changes if change.kind == "grant"]
    assert list(lines(grant)) == ["! + r read person where public or   (ssn is null or not public)"]


def test_a_digest_can_not_be_made_to_fit(layer: Layer) -> None:
    """Whoever writes two bundles that have one digest shows one of them and applies the other."""
    assert len(plan(layer, desk()).digest) >= 32


def test_what_was_signed_is_another_plan(layer: Layer, tmp_path: Path) -> None:
    from livinglayer.bundle import sign

    sign.keygen(tmp_path / "key")
    plain = desk()
    signed = of_files({**plain.files, "signature.yaml": sign.signature(plain.files, sign.private(tmp_path / "key"))})
    assert plan(layer, plain).digest != plan(layer, signed).digest


def test_a_function_in_boxes_that_are_somebody_elses(layer: Layer) -> None:
    apply(layer, bundle("base"))
    rules = [{"host": "mail.test", "secrets": ["KEY"]}]
    layer.call("blueprint.define", name="mailer", egress=rules, secrets=["KEY"])
    code = 'functions: {x.y: {code: "def y(): pass"}}'
    lent = code.replace('pass"', 'pass", blueprint: mailer')
    made = plan(layer, bundle("spy", functions=lent, requires="{base: '>=1.0.0'}"))
    assert opening(made, "function") == ["egress as blueprint mailer; secrets as blueprint mailer"]
    apply(layer, bundle("spy", functions=code, requires="{base: '>=1.0.0'}"))
    assert opening(plan(layer, bundle("spy", functions=lent, requires="{base: '>=1.0.0'}")), "function")


# What is somebody else's by now


def test_what_was_made_anew_by_hand_is_not_the_bundles(layer: Layer) -> None:
    """A name says nothing of who made what has it: a migration, an upgrade and a removal leave it alone."""
    functions = 'functions: {x.y: {code: "def y(): pass"}}'
    apply(layer, bundle("staff", schema=STAFF, functions=functions))
    layer.drop("person")
    layer.define("person", {"name": "text"})
    layer.insert("person", {"name": "mine"})
    layer.delete("function", layer.query("select id from function")[0]["id"])
    layer.call("function.define", name="x.y", code="def y(): return 'mine'")
    newer = {"bundle.yaml": "name: staff\nversion: 1.1.0\n", "schema.yaml": "entities: {}"}
    for steps in ("[drop: {entity: person}]", "[set: {entity: person, values: {name: x}}]"):
        with pytest.raises(LayerError, match="not this bundle's"):
            after(layer, steps, "entities: {}")
    without = of_files({path: text.encode() for path, text in newer.items()})
    assert [change.kind for change in plan(layer, without).changes] == ["bundle"]
    assert remove(layer, "staff", data=True) == []
    assert layer.query("select name from person") == [{"name": "mine"}]
    assert layer.query("select name from function") == [{"name": "x.y"}]


def test_true_is_not_1(layer: Layer) -> None:
    def said(value: str) -> Bundle:
        return bundle("n", policy=f"principals: {{p: {{attributes: {{admin: {value}}}}}}}")

    apply(layer, said("1"))
    assert opening(plan(layer, said("true")), "principal")
    apply(layer, said("true"), yes=True)
    assert layer.query("select attributes from principal where name = 'p'") == [{"attributes": {"admin": True}}]


def test_only_a_newline_ends_a_line(layer: Layer) -> None:
    """What is a comment to Python up to its end is shown as one."""
    apply(
        layer, desk({"functions/rank.py": "def rank(id):\n    # all is well\u2028    evil()\n    return 1\n"}), yes=True
    )
    made = plan(layer, desk({"functions/rank.py": "def rank(id):\n    # all is well\n    evil()\n    return 1\n"}))
    assert "          +     evil()" in made.lines()


def test_a_component_that_got_another_name_is_missed(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    layer.update("component", layer.query("select id from component where name = 'list'")[0]["id"], {"name": "mine"})
    assert [(c.action, c.key) for c in plan(layer, desk()).changes] == [("add", ("component", "list"))]
    apply(layer, desk())
    assert plan(layer, desk()).empty


def test_what_no_bundle_can_say_is_not_written(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    layer.principal("lead", attributes={"color": "red"})
    with pytest.raises(Conflict, match="rows say what no bundle can"):
        files_of(layer, "desk")
