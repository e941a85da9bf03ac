"""A branch is a whole world for the price of a row: forked, sliced, nested, compared, merged field by field, or thrown away."""

from __future__ import annotations

from decimal import Decimal
from hashlib import sha256
from typing import Any

import pytest

from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, NotFound


def last(layer: Layer) -> int:
    return int(layer.query("select max(tx) as n from tx")[0]["n"])


def rows(layer: Layer, entity: str, branch: str = "main", **more: Any) -> list[dict[str, Any]]:
    return layer.query(f"select * from {entity} order by id", branch=branch, **more)


# Fork


def test_a_fork_costs_one_row_and_sees_nothing_of_what_comes_after(shared: Layer) -> None:
    shared.define("forked", {"name": "text"})
    a = shared.insert("forked", {"name": "a"})
    before = last(shared)
    number = shared.fork("cheap", reason="try")
    assert shared.query(f"select entity, row_id, op from change where tx = {before + 1}") == [
        {"entity": "branch", "row_id": number, "op": "insert"}
    ]
    shared.update("forked", a, {"name": "main"})
    b = shared.insert("forked", {"name": "b"}, branch="cheap")
    shared.delete("forked", a, branch="cheap")
    assert rows(shared, "forked") == [{"id": a, "name": "main"}]
    assert rows(shared, "forked", "cheap") == [{"id": b, "name": "b"}]
    assert rows(shared, "forked", "cheap", as_of=before + 1) == [{"id": a, "name": "a"}]
    assert shared.query("select name, status, fork_tx from branch where name = 'cheap'") == [
        {"name": "cheap", "status": "open", "fork_tx": before}
    ]


def test_a_fork_of_the_past_begins_there(shared: Layer) -> None:
    shared.define("aged", {"name": "text"})
    a = shared.insert("aged", {"name": "old"})
    then = last(shared)
    shared.update("aged", a, {"name": "new"})
    shared.alter("aged", add={"more": "int"})
    shared.fork("from_then", as_of=then)
    assert rows(shared, "aged", "from_then") == [{"id": a, "name": "old"}]
    assert shared.merge("from_then").changes == []
    with pytest.raises(Invalid, match="there is no tx"):
        shared.fork("from_never", as_of=10**9)


def test_forks_nest_and_each_merges_into_its_parent(shared: Layer) -> None:
    shared.define("nested", {"name": "text", "n": "int"})
    a = shared.insert("nested", {"name": "a", "n": 0})
    shared.fork("upper")
    shared.update("nested", a, {"name": "upper"}, branch="upper")
    shared.fork("lower", source="upper")
    shared.update("nested", a, {"n": 2}, branch="lower")
    shared.update("nested", a, {"name": "upper later"}, branch="upper")
    assert rows(shared, "nested", "lower") == [{"id": a, "name": "upper", "n": 2}]
    with pytest.raises(Invalid, match="merges into its parent 'upper'"):
        shared.merge("lower", "main")
    assert shared.diff("lower", "upper") == [{"entity": "nested", "id": a, "op": "update", "fields": {"n": (0, 2)}}]
    with pytest.raises(Invalid, match="is not the parent"):
        shared.diff("lower", "main")
    assert shared.merge("lower")
    assert (rows(shared, "nested", "upper"), rows(shared, "nested")) == (
        [{"id": a, "name": "upper later", "n": 2}],
        [{"id": a, "name": "a", "n": 0}],
    )
    assert shared.merge("upper")
    assert rows(shared, "nested") == [{"id": a, "name": "upper later", "n": 2}]


def test_bad_forks_are_refused(shared: Layer) -> None:
    shared.fork("taken_name")
    with pytest.raises(Conflict, match="is there already"):
        shared.fork("taken_name")
    for name in ("main__x", "a b", "", "Main", "x" * 49, 5):
        with pytest.raises(Invalid):
            shared.fork(name)
    with pytest.raises(NotFound, match="there is no branch 'nowhere'"):
        shared.fork("orphan", source="nowhere")
    for piece in ({"no_entity": None}, {"principal": "nothing = 1"}, ["principal"], "principal"):
        with pytest.raises(Invalid):
            shared.fork("bad_slice", slice=piece)
    with pytest.raises(Invalid, match="no parent"):
        shared.merge("main")
    with pytest.raises(Invalid, match="can't be discarded"):
        shared.discard("main")
    for act in (shared.merge, shared.discard, shared.diff, shared.conflicts):
        with pytest.raises(NotFound):
            act("nowhere")


# Slice


def test_a_slice_holds_what_it_names_and_nothing_can_leave_it(shared: Layer) -> None:
    shared.define("owner_of", {"name": "text"})
    shared.define("sliced", {"name": {"type": "text", "unique": True}, "n": "int", "by_whom": "ref owner_of"})
    shared.define("left_out", {"n": "int"})
    o = shared.insert("owner_of", {"name": "o"})
    few, many, none = shared.insert(
        "sliced", [{"name": "few", "n": 1, "by_whom": o}, {"name": "many", "n": 9}, {"name": "none"}]
    )
    shared.fork("slice_a", slice={"sliced": "n < 5", "owner_of": None})
    assert rows(shared, "sliced", "slice_a") == [{"id": few, "name": "few", "n": 1, "by_whom": o}]
    assert rows(shared, "owner_of", "slice_a") == [{"id": o, "name": "o"}]
    with pytest.raises((NotFound, Invalid)):
        rows(shared, "left_out", "slice_a")
    for row in (many, none):
        with pytest.raises(NotFound):
            shared.update("sliced", row, {"name": "x"}, branch="slice_a")
    for write in (
        lambda: shared.update("sliced", few, {"n": 9}, branch="slice_a"),
        lambda: shared.update("sliced", few, {"n": None}, branch="slice_a"),
        lambda: shared.insert("sliced", {"name": "new", "n": 5}, branch="slice_a"),
    ):
        with pytest.raises(Denied, match="would leave the slice"):
            write()
    new = shared.insert("sliced", {"name": "new", "n": 2}, branch="slice_a")
    shared.fork("slice_b", source="slice_a", slice={"sliced": "n > 1"})
    assert [r["id"] for r in rows(shared, "sliced", "slice_b")] == [new]
    shared.update("sliced", few, {"n": 3}, branch="slice_a")
    assert shared.merge("slice_a")
    assert [(r["id"], r["n"]) for r in rows(shared, "sliced")] == [(few, 3), (many, 9), (none, None), (new, 2)]


def test_a_unique_value_outside_a_slice_is_met_at_the_merge(shared: Layer) -> None:
    shared.define("sliced_unique", {"name": {"type": "text", "unique": True}, "n": "int"})
    shared.insert("sliced_unique", {"name": "taken", "n": 9})
    shared.fork("slice_u", slice={"sliced_unique": "n < 5"})
    shared.insert("sliced_unique", {"name": "taken", "n": 1}, branch="slice_u")
    with pytest.raises(Conflict, match="is there already"):
        shared.merge("slice_u")
    assert len(rows(shared, "sliced_unique")) == 1


# Diff and merge


def test_a_diff_is_by_row_and_field_since_the_fork(shared: Layer) -> None:
    shared.define("compared", {"name": "text", "price": "decimal"})
    a, b, c = shared.insert("compared", [{"name": n, "price": "1.50"} for n in "abc"])
    shared.fork("comparing")
    shared.update("compared", a, {"price": "2"}, branch="comparing")
    shared.update("compared", a, {"price": "2.50"}, branch="comparing")
    shared.delete("compared", b, branch="comparing")
    d = shared.insert("compared", {"name": "d"}, branch="comparing")
    shared.update("compared", c, {"name": "x"}, branch="comparing")
    shared.update("compared", c, {"name": "c"}, branch="comparing")
    gone = shared.insert("compared", {"name": "gone"}, branch="comparing")
    shared.delete("compared", gone, branch="comparing")
    shared.update("compared", c, {"name": "main's"})
    expected = [
        {"entity": "compared", "id": a, "op": "update", "fields": {"price": (Decimal("1.50"), Decimal("2.50"))}},
        {
            "entity": "compared",
            "id": b,
            "op": "delete",
            "fields": {"name": ("b", None), "price": (Decimal("1.50"), None)},
        },
        {"entity": "compared", "id": d, "op": "insert", "fields": {"name": (None, "d")}},
    ]
    assert shared.diff("comparing", "main") == expected
    assert shared.diff("main") == []
    preview = shared.merge("comparing", preview=True)
    assert (bool(preview), preview.tx, preview.changes, preview.conflicts) == (False, None, expected, [])
    merged = shared.merge("comparing", reason="done")
    assert (bool(merged), merged.tx, merged.changes) == (True, last(shared), expected)
    assert shared.diff("comparing") == []
    assert [(r["name"], r["price"]) for r in rows(shared, "compared")] == [
        ("a", Decimal("2.50")),
        ("main's", Decimal("1.50")),
        ("d", None),
    ]
    assert shared.query(f"select reason, merged_from from tx where tx = {merged.tx}") == [
        {"reason": "done", "merged_from": "comparing"}
    ]


def test_both_sides_changes_of_different_fields_are_kept(shared: Layer) -> None:
    shared.define("mixed", {"a": "text", "b": "text", "c": "text"})
    row = shared.insert("mixed", {"a": "0", "b": "0", "c": "0"})
    shared.fork("mixing")
    shared.update("mixed", row, {"a": "branch", "c": "same"}, branch="mixing")
    shared.update("mixed", row, {"b": "main", "c": "same"})
    assert shared.merge("mixing")
    assert rows(shared, "mixed") == [{"id": row, "a": "branch", "b": "main", "c": "same"}]


def test_a_branch_goes_on_after_its_merge(shared: Layer) -> None:
    shared.define("going", {"n": "int"})
    row = shared.insert("going", {"n": 0})
    shared.fork("going_on")
    for n in (1, 2):
        shared.update("going", row, {"n": n}, branch="going_on")
        assert shared.diff("going_on") == [{"entity": "going", "id": row, "op": "update", "fields": {"n": (n - 1, n)}}]
        assert shared.merge("going_on")
        assert rows(shared, "going") == [{"id": row, "n": n}]
    again = shared.merge("going_on")
    assert (bool(again), again.changes) == (True, [])


# Conflicts


def test_conflicts_are_rows_nothing_is_applied_and_a_resolution_is_taken_by_the_next_merge(shared: Layer) -> None:
    shared.define("disputed", {"name": "text", "price": "decimal", "ok": "bool"})
    row = shared.insert("disputed", {"name": "base", "price": "1.00", "ok": None})
    other = shared.insert("disputed", {"name": "other"})
    shared.fork("dispute")
    shared.update("disputed", row, {"name": "ours", "price": "2.50", "ok": True}, branch="dispute")
    shared.update("disputed", other, {"name": "undisputed"}, branch="dispute")
    shared.update("disputed", row, {"name": "theirs", "price": "3.50", "ok": False})
    before = rows(shared, "disputed")
    merged = shared.merge("dispute")
    assert (bool(merged), merged.tx, merged.changes) == (False, None, [])
    found = shared.conflicts("dispute")
    assert merged.conflicts == found
    assert [{k: v for k, v in c.items() if k != "id"} for c in found] == [
        {"branch": "dispute", "target": "main", "entity": "disputed", "row": row, "field": field, "base": base, "ours": ours, "theirs": theirs}
        for field, base, ours, theirs in (
            ("name", "base", "ours", "theirs"),
            ("price", Decimal("1.00"), Decimal("2.50"), Decimal("3.50")),
            ("ok", None, True, False),
        )
    ]  # fmt: skip
    assert shared.query("select count(*) as n from conflict where branch = 'dispute' and status = 'open'") == [{"n": 3}]
    assert rows(shared, "disputed") == before
    assert not shared.merge("dispute")
    assert shared.conflicts("dispute") == found
    shared.resolve(found[0], "both")
    shared.resolve(found[1]["id"], Decimal("2.75"))
    assert [c["field"] for c in shared.conflicts("dispute")] == ["ok"]
    assert not shared.merge("dispute")
    shared.resolve(found[2], take="ours")
    assert shared.merge("dispute")
    assert rows(shared, "disputed") == [
        {"id": row, "name": "both", "price": Decimal("2.75"), "ok": True},
        {"id": other, "name": "undisputed", "price": None, "ok": None},
    ]
    assert shared.conflicts("dispute") == []
    with pytest.raises(Conflict, match="is closed"):
        shared.resolve(found[0], "late")


def test_a_resolution_must_be_a_value_of_the_field(shared: Layer) -> None:
    shared.define("typed", {"n": "int"})
    row = shared.insert("typed", {"n": 0})
    shared.fork("typed_branch")
    shared.update("typed", row, {"n": 1}, branch="typed_branch")
    shared.update("typed", row, {"n": 2})
    (conflict,) = shared.merge("typed_branch").conflicts
    with pytest.raises(Invalid, match="not an int"):
        shared.resolve(conflict, "three")
    with pytest.raises(Invalid, match="take is"):
        shared.resolve(conflict, take="mine")
    with pytest.raises(NotFound):
        shared.resolve(10**9, 3)
    assert [c["id"] for c in shared.conflicts("typed_branch")] == [conflict["id"]]


def test_a_resolution_names_no_content_that_no_side_has(shared: Layer) -> None:
    shared.define("scan", {"n": "int", "page": "file", "words": "text"})
    shared.define("hidden_scan", {"page": "file"})
    shared.insert("hidden_scan", {"page": b"another's"})
    stolen, ours = (sha256(data).hexdigest() for data in (b"another's", b"ours"))
    both, gone = shared.insert("scan", [{"page": b"base"}, {"n": 1}])
    shared.principal("solver")
    for action, resource in (("write", "scan"), ("read", "scan"), ("merge", "branch:main")):
        shared.grant("solver", action, resource)
    shared.fork("scanning")
    shared.update("scan", both, {"page": b"ours"}, branch="scanning")
    shared.update("scan", both, {"page": b"theirs"})
    (field,) = shared.merge("scanning").conflicts
    with pytest.raises(Invalid, match="page is a file that no side has"):
        shared.resolve(field, stolen, principal="solver")
    shared.resolve(field, ours, principal="solver")
    assert shared.merge("scanning", principal="solver")
    shared.delete("scan", gone, branch="scanning")
    shared.update("scan", gone, {"n": 2})
    (row,) = shared.merge("scanning").conflicts
    shared.resolve(row, {"page": stolen}, principal="solver")
    with pytest.raises(Invalid, match="page is a file that no side has"):
        shared.merge("scanning")
    shared.resolve(row, {"words": stolen}, principal="solver")  # it may be a text, until the two change their names
    for before, after in (("words", "moved"), ("page", "words"), ("moved", "page")):
        shared.alter("scan", rename={before: after}, branch="scanning")
    with pytest.raises(Invalid, match="words is a file that no side has"):
        shared.merge("scanning")
    assert rows(shared, "scan") == [
        {"id": both, "n": None, "page": ours, "words": None},
        {"id": gone, "n": 2, "page": None, "words": None},
    ]


@pytest.mark.parametrize(("take", "kept"), [("ours", []), ("theirs", ["main"])])
def test_a_row_deleted_here_and_changed_there_is_one_conflict(shared: Layer, take: str, kept: list[str]) -> None:
    entity, branch = f"gone_{take}", f"deleting_{take}"
    shared.define(entity, {"name": "text"})
    row = shared.insert(entity, {"name": "base"})
    shared.fork(branch)
    shared.delete(entity, row, branch=branch)
    shared.update(entity, row, {"name": "main"})
    (conflict,) = shared.merge(branch).conflicts
    assert (conflict["field"], conflict["base"], conflict["ours"], conflict["theirs"]) == (
        None,
        {"name": "base"},
        None,
        {"name": "main"},
    )
    shared.resolve(conflict, take=take)
    assert shared.merge(branch)
    assert [r["name"] for r in rows(shared, entity)] == kept


def test_a_conflict_that_the_target_moved_on_from_is_asked_anew(shared: Layer) -> None:
    shared.define("moving_on", {"n": "int"})
    row = shared.insert("moving_on", {"n": 0})
    shared.fork("moving_branch")
    shared.update("moving_on", row, {"n": 1}, branch="moving_branch")
    shared.update("moving_on", row, {"n": 2})
    (first,) = shared.merge("moving_branch").conflicts
    shared.resolve(first, 5)
    shared.update("moving_on", row, {"n": 3})
    (second,) = shared.merge("moving_branch").conflicts
    assert (second["theirs"], second["id"] != first["id"]) == (3, True)


def test_a_preview_changes_nothing(shared: Layer) -> None:
    shared.define("previewed", {"n": "int"})
    row = shared.insert("previewed", {"n": 0})
    shared.fork("previewing")
    shared.update("previewed", row, {"n": 1}, branch="previewing")
    shared.update("previewed", row, {"n": 2})
    before = last(shared)
    preview = shared.merge("previewing", preview=True)
    assert (bool(preview), len(preview.conflicts), shared.conflicts("previewing"), last(shared)) == (
        False,
        1,
        [],
        before,
    )


def test_a_discarded_branch_is_closed_its_name_free_and_its_past_readable(shared: Layer) -> None:
    shared.define("thrown", {"n": "int"})
    shared.fork("away")
    shared.insert("thrown", {"n": 1}, branch="away")
    shared.discard("away", reason="no good")
    for act in (
        lambda: shared.insert("thrown", {"n": 2}, branch="away"),
        lambda: shared.merge("away"),
        lambda: rows(shared, "thrown", "away"),
    ):
        with pytest.raises((NotFound, Invalid)):
            act()
    shared.fork("away")
    assert rows(shared, "thrown", "away") == []
    (old,) = shared.query("select name from branch where status = 'discarded' and name like 'away_%'")
    assert [r["n"] for r in rows(shared, "thrown", old["name"])] == [1]
    assert rows(shared, "thrown") == []


# Constraints and schema at a merge


def test_whoever_forked_a_branch_may_discard_it_and_nobody_else(shared: Layer) -> None:
    shared.principal("other_forker")
    for who in ("forker", "other_forker"):
        shared.grant(who, "fork", "branch:main")
    shared.fork("own_fork", principal="forker")
    shared.fork("owners_fork", as_of=last(shared) - 2)
    for name, who in (("own_fork", "other_forker"), ("owners_fork", "forker")):
        with pytest.raises(Denied, match=f"may not fork branch:{name}: no permission allows it"):
            shared.discard(name, principal=who)
    denied = shared.grant("forker", "fork", "branch:own_fork", effect="deny")
    with pytest.raises(Denied, match=f"permission {denied} denies it"):
        shared.discard("own_fork", principal="forker")
    shared.revoke(denied)
    shared.discard("own_fork", principal="forker")
    shared.fork("own_fork")  # the name is the owner's by now
    with pytest.raises(Denied, match="no permission allows it"):
        shared.discard("own_fork", principal="forker")


def test_unique_values_that_meet_only_at_the_merge_are_refused_there(shared: Layer) -> None:
    shared.define("met", {"sku": {"type": "text", "unique": True}})
    shared.fork("meeting")
    shared.insert("met", {"sku": "a"}, branch="meeting")
    shared.insert("met", {"sku": "a"})
    before = last(shared)
    for preview in (True, False):
        with pytest.raises(Conflict, match="is there already"):
            shared.merge("meeting", preview=preview)
    assert (len(rows(shared, "met")), last(shared)) == (1, before)


def test_references_hold_at_the_merge(shared: Layer) -> None:
    shared.define("target_row", {"name": "text"})
    shared.define("pointing", {"to_row": "ref target_row"})
    a, b = shared.insert("target_row", [{"name": "a"}, {"name": "b"}])
    shared.fork("pointing_branch")
    shared.insert("pointing", {"to_row": a}, branch="pointing_branch")
    shared.delete("target_row", a)
    with pytest.raises(Invalid, match=f"there is no target_row/{a}"):
        shared.merge("pointing_branch")
    shared.discard("pointing_branch")
    shared.fork("deleting_branch")
    shared.delete("target_row", b, branch="deleting_branch")
    shared.insert("pointing", {"to_row": b})
    with pytest.raises(Conflict, match="refers to it"):
        shared.merge("deleting_branch")


def test_a_check_over_fields_that_two_sides_changed_holds_at_the_merge(shared: Layer) -> None:
    shared.define("ranged", {"low": "int", "high": {"type": "int", "check": "low <= high"}})
    row = shared.insert("ranged", {"low": 1, "high": 9})
    shared.fork("ranging")
    shared.update("ranged", row, {"low": 8}, branch="ranging")
    shared.update("ranged", row, {"high": 5})
    with pytest.raises(Invalid, match="breaks its check"):
        shared.merge("ranging")
    assert rows(shared, "ranged") == [{"id": row, "low": 1, "high": 5}]


def test_schema_changes_merge_with_the_rows_that_need_them(shared: Layer) -> None:
    shared.define("evolving", {"name": "text", "qty": "int"})
    a = shared.insert("evolving", {"name": "a", "qty": 1})
    shared.fork("evolution")
    shared.alter(
        "evolving", rename={"qty": "amount"}, retype={"amount": "decimal"}, add={"color": "text"}, branch="evolution"
    )
    shared.update("evolving", a, {"color": "red", "amount": "1.5"}, branch="evolution")
    shared.define("brand_new", {"of_it": "ref evolving"}, branch="evolution")
    shared.insert("brand_new", {"of_it": a}, branch="evolution")
    b = shared.insert("evolving", {"name": "b", "qty": 7})
    assert shared.merge("evolution")
    assert rows(shared, "evolving") == [
        {"id": a, "name": "a", "amount": Decimal("1.5"), "color": "red"},
        {"id": b, "name": "b", "amount": Decimal(7), "color": None},
    ]
    assert [r["of_it"] for r in rows(shared, "brand_new")] == [a]
    assert shared.backfill("evolving", "amount") == {"converted": 1, "lost": 0}
    assert [str(r["amount"]) for r in rows(shared, "evolving")] == ["1.5", "7"]


def test_a_field_changed_differently_on_both_sides_is_a_conflict(shared: Layer) -> None:
    shared.define("contested", {"n": "int"})
    shared.fork("contest")
    shared.alter("contested", rename={"n": "ours"}, branch="contest")
    shared.alter("contested", rename={"n": "theirs"})
    (conflict,) = shared.merge("contest").conflicts
    assert [conflict[k] for k in ("entity", "field", "base", "ours", "theirs")] == [
        "field",
        "name",
        "n",
        "ours",
        "theirs",
    ]
    shared.resolve(conflict, "both")
    assert shared.merge("contest")
    assert list(shared.schema().get("contested").by_name) == ["both"]


def test_a_field_retyped_on_both_sides_is_not_merged_silently(shared: Layer) -> None:
    shared.define("twice_typed", {"n": "int"})
    shared.insert("twice_typed", {"n": 1})
    shared.fork("retyping")
    shared.alter("twice_typed", retype={"n": "text"}, branch="retyping")
    shared.alter("twice_typed", retype={"n": "decimal"})
    try:
        assert not shared.merge("retyping")
        assert shared.conflicts("retyping")
    except Conflict:
        pass
    assert [r["n"] for r in rows(shared, "twice_typed")] == [Decimal(1)]


def test_two_entities_of_one_name_do_not_merge(shared: Layer) -> None:
    shared.fork("same_name")
    shared.define("named_twice", {"a": "text"}, branch="same_name")
    shared.define("named_twice", {"b": "text"})
    with pytest.raises(Conflict, match="named_twice"):
        shared.merge("same_name")
    assert list(shared.schema().get("named_twice").by_name) == ["b"]


def test_policy_changed_on_both_sides_is_a_conflict(shared: Layer) -> None:
    shared.principal("polly", attributes={"level": 1})
    shared.fork("policies")
    shared.principal("polly", attributes={"level": 2}, on="policies")
    shared.principal("polly", attributes={"level": 3})
    (conflict,) = shared.merge("policies").conflicts
    assert [conflict[k] for k in ("entity", "field")] == ["principal", "attributes"]
    shared.resolve(conflict, take="theirs")
    assert shared.merge("policies")
    assert shared.query("select attributes from principal where name = 'polly'") == [{"attributes": {"level": 3}}]
