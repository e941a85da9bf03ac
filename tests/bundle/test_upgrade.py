"""A newer version takes the place of an older one: with migrations, whole or not at all, and history stays."""

from __future__ import annotations

import pytest
from bundle.desks import DESK, bundle, desk, last_tx, swapped

from livinglayer import Layer
from livinglayer.bundle.apply import apply
from livinglayer.bundle.load import Bundle, Migration
from livinglayer.bundle.plan import plan
from livinglayer.errors import Conflict, Invalid, LayerError

ITEMS = """
entities:
  item:
    fields: {name: text!, qty: int, price: text, status: {type: enum, values: [draft, old], default: draft}, extra: json, gone: text}
  part:
    fields: {of: ref item, size: int}
"""
LATER = """
entities:
  article:
    description: What we sell.
    fields:
      name: text!
      amount: {type: int, required: true}
      price: decimal
      status: {type: enum, values: [draft, live], default: draft}
      extra: json
      label: {type: text!, check: length(label) > 1}
    unique: [[name, label]]
  part:
    fields: {of: ref article, size: int}
"""
STEPS = """
steps:
  - rename: {entity: item, field: qty, to: amount}
  - rename_entity: {entity: item, to: article}
  - retype: {entity: article, field: price, to: decimal}
  - backfill: {entity: article, field: price}
  - add: {entity: article, fields: {label: text}}
  - set: {entity: article, values: {label: {$field: name}, extra: {seen: true}}}
  - set: {entity: article, where: status = 'old', values: {status: live}}
  - set: {entity: article, where: amount is null, values: {amount: 0}}
  - drop: {entity: article, field: gone}
"""


def later(steps: str = STEPS, schema: str = LATER, version: str = "1.1.0") -> Bundle:
    from livinglayer.bundle.load import of_files

    files = {"bundle.yaml": f"name: shop\nversion: {version}\n", "schema.yaml": schema, "migrations/1.1.0.yaml": steps}
    return of_files({path: text.encode() for path, text in files.items()})


@pytest.fixture
def shop(layer: Layer) -> Layer:
    """A shop with two hundred items, half of them old."""
    apply(layer, bundle("shop", schema=ITEMS))
    made = layer.insert(
        "item",
        [
            {
                "name": f"item {n}",
                "qty": n or None,
                "price": f"{n}.50",
                "status": "old" if n % 2 else "draft",
                "gone": "x",
            }
            for n in range(200)
        ],
    )
    layer.insert("part", [{"of": made[0], "size": 3}])
    return layer


def test_a_migration_changes_rows_and_schema_in_one_tx_and_history_stays(shop: Layer) -> None:
    before, query = last_tx(shop), "select name, qty, price, status, gone from item order by id"
    was = shop.query(query)
    made = plan(shop, later())
    assert [c.why for c in made.changes if c.kind == "migration"][:4] == [
        "rename item.qty → amount", "rename entity item → article", "retype article.price → decimal", "backfill article.price",
    ]  # fmt: skip
    rest = [(c.action, c.kind, c.name) for c in made.changes if c.kind not in ("migration", "bundle")]
    assert rest == [
        ("change", "entity", "article"), ("change", "field", "article.amount"), ("change", "field", "article.status"),
        ("change", "field", "article.label"),
    ]  # fmt: skip
    apply(shop, later(), accept=made.digest)
    assert last_tx(shop) == before + 1 and plan(shop, later()).empty
    rows = shop.query("select name, amount, price, status, extra, label from article order by id")
    assert [(r["name"], r["amount"], str(r["price"]), r["status"], r["extra"], r["label"]) for r in rows] == [
        (f"item {n}", n, f"{n}.50", "live" if n % 2 else "draft", {"seen": True}, f"item {n}") for n in range(200)
    ]
    assert shop.query("select a.name, p.size from part p join article a on a.id = p.of") == [
        {"name": "item 0", "size": 3}
    ]
    assert shop.query(query, as_of=before) == was
    first = shop.query("select min(id) as n from article")[0]["n"]
    assert shop.query(f"select op, tx from article__history where id = {first} order by tx") == [
        {"op": "insert", "tx": before - 1}, {"op": "update", "tx": before + 1},
    ]  # fmt: skip
    assert shop.verify()
    with pytest.raises(Conflict, match="is older"):
        apply(shop, bundle("shop", schema=ITEMS))


def test_on_a_branch_an_upgrade_is_tried_first(shop: Layer) -> None:
    shop.fork("try")
    shop.update("item", shop.query("select max(id) as n from item")[0]["n"], {"qty": 7}, branch="try")
    apply(shop, later(), branch="try", yes=True)
    assert shop.query("select count(*) as n from article where label = name", branch="try") == [{"n": 200}]
    assert shop.query("select count(*) as n, max(status) as status from item") == [{"n": 200, "status": "old"}]
    assert plan(shop, later(), "try").empty and not plan(shop, later()).empty
    assert shop.merge("try")
    assert shop.query("select sum(amount) as n from article") == [{"n": sum(range(199)) + 7}]
    assert plan(shop, later()).empty and shop.verify()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("  - set: {entity: article, values: {amount: many}}", "int"),
        ("  - set: {entity: article, values: {name: null}}", "required"),
        ("  - set: {entity: article, values: {status: sold}}", "status"),
        ("  - set: {entity: article, values: {label: x}}", "breaks its check|length"),
        ("  - set: {entity: article, values: {name: same, label: same}}", "is there already"),
        ("  - rename: {entity: article, field: nothing, to: more}", "no field 'nothing'"),
        ("  - drop: {entity: article}", "part.of refers to"),
        ("  - backfill: {entity: article, field: price}", "is not being retyped"),
    ],
)
def test_a_migration_that_fails_midway_leaves_nothing(shop: Layer, step: str, said: str) -> None:
    before, tx = shop.query("select * from item order by id"), last_tx(shop)
    steps = tuple(later().migrations[0].steps)
    from livinglayer.bundle.documents import parse

    bad = Migration("1.1.0", (*steps, *parse("x", ("steps:\n" + step).encode())["steps"]))
    broken = Bundle(**{**vars(later()), "migrations": (bad,)})
    with pytest.raises(LayerError, match=said):
        apply(shop, broken, yes=True)
    assert shop.query("select * from item order by id") == before and last_tx(shop) == tx
    assert shop.query("select version from bundle") == [{"version": "1.0.0"}]
    assert "article" not in shop.schema().by_name and shop.verify()
    apply(shop, later(), yes=True)
    assert shop.query("select count(*) as n from article") == [{"n": 200}]


def test_what_can_not_be_converted_is_not_lost(shop: Layer) -> None:
    number = shop.insert("item", {"name": "free", "price": "nothing"})
    with pytest.raises(Conflict, match=r"migration 1.1.0/4: 1 of 201 values of article.price can't be converted"):
        apply(shop, later(), yes=True)
    assert shop.query(f"select price from item where id = {number}") == [{"price": "nothing"}]
    fixed = STEPS.replace(
        "steps:\n", "steps:\n  - set: {entity: item, where: price = 'nothing', values: {price: '0'}}\n"
    )
    apply(shop, later(fixed), yes=True)
    assert str(shop.query(f"select price from article where id = {number}")[0]["price"]) == "0"


def test_a_migration_changes_nothing_of_others(layer: Layer) -> None:
    layer.define("salary", {"amount": "int"})
    layer.insert("salary", {"amount": 1})
    apply(layer, bundle("shop", schema=ITEMS))
    sly = later("steps:\n  - set: {entity: item, values: {qty: 1}}\n", ITEMS)
    sly = Bundle(
        **{**vars(sly), "migrations": (Migration("1.1.0", ({"set": {"entity": "salary", "values": {"amount": 9}}},)),)}
    )
    with pytest.raises(Invalid, match="'salary' is not this bundle's"):
        apply(layer, sly, yes=True)
    for name in ("permission", "principal"):
        system = Migration("1.1.0", ({"set": {"entity": name, "values": {"reason": "x"}}},))
        with pytest.raises(Invalid, match="is not this bundle's"):
            apply(layer, Bundle(**{**vars(sly), "migrations": (system,)}), yes=True)
    assert layer.query("select amount from salary") == [{"amount": 1}]


def test_migrations_between_two_versions_run_in_order(shop: Layer) -> None:
    from livinglayer.bundle.load import of_files

    third = (
        LATER.replace("label:", "title:")
        .replace("[name, label]", "[name, title]")
        .replace("length(label)", "length(title)")
    )
    files = {
        "bundle.yaml": "name: shop\nversion: 1.10.0\n", "schema.yaml": third, "migrations/1.1.0.yaml": STEPS,
        "migrations/1.9.0.yaml": "steps:\n  - rename: {entity: article, field: label, to: title}\n",
        "migrations/1.10.0.yaml": "steps:\n  - set: {entity: article, where: title = 'item 1', values: {title: first}}\n",
    }  # fmt: skip
    made = of_files({path: text.encode() for path, text in files.items()})
    assert [c.name for c in plan(shop, made).changes if c.kind == "migration"][-3:] == [
        "1.1.0/9",
        "1.9.0/1",
        "1.10.0/1",
    ]
    apply(shop, made, yes=True)
    assert (
        shop.query("select count(*) as n from article where title = 'first'") == [{"n": 1}] and plan(shop, made).empty
    )


def test_a_first_apply_runs_no_migration(layer: Layer) -> None:
    assert not any(c.kind == "migration" for c in apply(layer, later()).changes)
    assert plan(layer, later()).empty


def test_without_a_migration_what_is_gone_goes_and_types_change_where_they_can(layer: Layer) -> None:
    apply(layer, bundle("shop", schema=ITEMS))
    number = layer.insert("item", {"name": "a", "qty": 3})
    then = last_tx(layer)
    slim = bundle(
        "shop", "2.0.0", schema="entities: {item: {fields: {name: text!, qty: decimal, status: {type: enum, values: [draft]}}}}"
    )  # fmt: skip
    made = plan(layer, slim)
    assert [(c.action, c.name) for c in made.changes if c.kind in ("entity", "field")] == [
        ("remove", "part"), ("change", "item.qty"), ("change", "item.status"), ("remove", "item.extra"),
        ("remove", "item.gone"), ("remove", "item.price"),
    ]  # fmt: skip
    apply(layer, slim)
    assert str(layer.query(f"select qty from item where id = {number}")[0]["qty"]) == "3"
    assert "part" not in layer.schema().by_name and plan(layer, slim).empty
    assert layer.query("select qty, gone from item", as_of=then) == [{"qty": 3, "gone": None}]
    with pytest.raises(LayerError, match=r"field item.qty: item.qty: .*can't become|being retyped"):
        apply(layer, bundle("shop", "3.0.0", schema="entities: {item: {fields: {name: text!, qty: date}}}"))


def test_seeds_follow_what_was_renamed(layer: Layer) -> None:
    apply(layer, desk(), yes=True)
    layer.delete("customer", layer.query("select id from customer where name = 'Dan'")[0]["id"])

    def renamed(part: str) -> str:
        text = DESK[part].replace("customer", "client")
        return text.replace("email", "mail") if part in ("schema.yaml", "seeds.yaml") else text

    files = {part: renamed(part) for part in ("schema.yaml", "policy.yaml", "seeds.yaml")}
    files["migrations/1.1.0.yaml"] = (
        "steps:\n  - rename_entity: {entity: customer, to: client}\n  - rename: {entity: client, field: email, to: mail}\n"
        "  - rename: {entity: ticket, field: customer, to: client}\n"
    )
    made = desk(files, version="1.1.0")
    assert [c for c in plan(layer, made).changes if c.kind in ("seed", "entity", "field")] == []
    apply(layer, made)
    assert layer.query("select name, mail from client") == [{"name": "Cara", "mail": "c@x.test"}]
    assert plan(layer, made).empty


def test_the_same_version_can_say_something_else(layer: Layer) -> None:
    """While one writes it."""
    apply(layer, desk(), yes=True)
    other = desk(swapped("schema.yaml", "note: text", "note: text\n      color: text"))
    assert [c.kind for c in apply(layer, other).changes] == ["field", "bundle"]
    assert plan(layer, other).empty


ODD = ["", "NULL", "a,b", '"quoted"', "back\\slash", "{curly}", "line\nbreak", "\ttab", "ünï☃", "'", "$1 ?"]


def test_values_of_every_type_survive_a_change_of_many_rows(layer: Layer) -> None:
    kinds = {
        "t": "text", "i": "int", "f": "float", "b": "bool", "d": "decimal", "j": "json", "day": "date", "at": "datetime",
    }  # fmt: skip
    fields = ", ".join(f"{name}: {kind}, {name}2: {kind}" for name, kind in kinds.items())
    schema = "entities: {odd: {fields: {" + fields + ", n: int}}}"
    apply(layer, bundle("odd", schema=schema))
    layer.insert(
        "odd",
        [
            {
                "t": text, "i": -(2**62) + n, "f": n / 3, "b": n % 2 == 0, "d": f"-{n}.500", "j": {"k": [text, None, 1.0]},
                "day": f"2026-01-{n + 1:02}", "at": f"2026-01-01T00:00:{n:02}.000001Z", "n": n,
            }
            for n, text in enumerate(ODD)
        ] + [{"n": 99}],
    )  # fmt: skip
    copy = ", ".join(f"{name}2: {{$field: {name}}}" for name in kinds)
    from livinglayer.bundle.load import of_files

    files = {
        "bundle.yaml": "name: odd\nversion: 1.1.0\n", "schema.yaml": schema,
        "migrations/1.1.0.yaml": "steps:\n  - set: {entity: odd, values: {" + copy + "}}\n",
    }  # fmt: skip
    layer.fork("try")
    made = of_files({path: text.encode() for path, text in files.items()})
    for branch in ("try", "main"):
        apply(layer, made, branch=branch)
        rows = layer.query("select * from odd order by n", branch=branch)
        assert len(rows) == len(ODD) + 1
        assert all(row[name] == row[f"{name}2"] for row in rows for name in kinds)
        assert [row["t2"] for row in rows] == [*ODD, None]
    assert layer.verify()


def test_steps_that_go_through_rows_at_once_do_what_they_do_one_by_one(shop: Layer) -> None:
    """A later one sees what an earlier one did; one that looks at other rows sees those as they are by then."""
    steps = """
steps:
  - set: {entity: item, values: {qty: 1}}
  - add: {entity: item, fields: {color: text}}
  - set: {entity: item, where: qty = 1 and status = 'old', values: {qty: 2, color: red}}
  - retype: {entity: item, field: qty, to: text}
  - set: {entity: item, where: qty = '2', values: {gone: {$field: qty}}}
  - backfill: {entity: item, field: qty}
  - set: {entity: part, where: of.qty = '1', values: {size: 9}}
"""
    schema = ITEMS.replace("qty: int", "qty: text").replace("gone: text", "gone: text, color: text")
    apply(shop, later(steps, schema), yes=True)
    counted = "select qty, color, gone, count(*) as n from item group by qty, color, gone order by qty"
    assert shop.query(counted) == [
        {"qty": "1", "color": None, "gone": "x", "n": 100}, {"qty": "2", "color": "red", "gone": "2", "n": 100},
    ]  # fmt: skip
    assert shop.query("select size from part") == [{"size": 9}]
    assert plan(shop, later(steps, schema)).empty and shop.verify()


def test_a_choice_is_never_filled_with_what_it_does_not_know(shop: Layer) -> None:
    wrong = "steps:\n  - set: {entity: item, values: {status: {$field: name}}}\n"
    with pytest.raises(Conflict, match=r"migration 1.1.0/1: item.status: 'item 0' is not one of its values"):
        apply(shop, later(wrong, ITEMS), yes=True)
    assert shop.query("select distinct status from item order by status") == [{"status": "draft"}, {"status": "old"}]
