"""Grants are rows of main: none means no, a deny wins, what may not be read is not there, and delegation only narrows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, NotFound, Unauthenticated


def last(layer: Layer) -> int:
    return int(layer.query("select max(tx) as n from tx")[0]["n"])


def names(layer: Layer, entity: str, who: str, **more: Any) -> list[str]:
    return [row["name"] for row in layer.query(f"select name from {entity} order by name", principal=who, **more)]


@contextmanager
def opened_as(layer: Layer, location: str, who: str) -> Iterator[Layer]:
    with livinglayer.open(location, token=layer.token(who)) as handle:
        yield handle


def test_without_a_grant_nothing_is_there_and_nothing_may_be_done(shared: Layer) -> None:
    shared.define("closed_off", {"name": "text"})
    row = shared.insert("closed_off", {"name": "x"})
    shared.principal("stranger")
    before = last(shared)
    with pytest.raises(NotFound):
        shared.query("select * from closed_off", principal="stranger")
    with pytest.raises(Denied, match="no permission allows it") as caught:
        shared.insert("closed_off", {"name": "y"}, principal="stranger")
    assert (caught.value.hint, caught.value.details) == (
        "layer can stranger insert closed_off",
        {"rows": [], "action": "insert", "resource": "closed_off"},
    )
    for write in (
        lambda: shared.update("closed_off", row, {"name": "y"}, principal="stranger"),
        lambda: shared.delete("closed_off", row, principal="stranger"),
    ):
        with pytest.raises(NotFound, match=f"there is no closed_off/{row}"):
            write()
    decision = shared.can("stranger", "read", "closed_off")
    assert (bool(decision), decision.rows, decision.reason) == (False, [], "no permission allows it")
    assert last(shared) == before


def test_roles_give_what_they_hold_also_through_other_roles_until_they_are_taken(shared: Layer) -> None:
    shared.define("paper", {"name": "text"})
    shared.insert("paper", {"name": "p"})
    shared.principal("clerk", kind="role", roles=["staff"])
    shared.principal("cleo", roles=["clerk"])
    grant = shared.grant("staff", "read", "paper")
    assert names(shared, "paper", "cleo") == ["p"]
    assert [row["id"] for row in shared.can("cleo", "read", "paper").rows] == [grant]
    assert {r["name"] for r in shared.query("select name from role")} >= {"clerk", "staff"}
    shared.principal("cleo", roles=[])
    assert not shared.can("cleo", "read", "paper")
    with pytest.raises(NotFound):
        names(shared, "paper", "cleo")


def test_roles_that_hold_each_other_are_no_endless_way(shared: Layer) -> None:
    shared.principal("ring_a", kind="role", roles=["ring_b"])
    shared.principal("ring_b", kind="role", roles=["ring_a"])
    shared.define("ringed", {"name": "text"})
    shared.grant("ring_b", "read", "ringed")
    assert shared.can("ring_a", "read", "ringed")


def test_a_deny_wins_over_any_allow(shared: Layer) -> None:
    shared.define("memo", {"name": "text", "secret": "text"})
    row = shared.insert("memo", {"name": "m", "secret": "s"})
    shared.principal("dan", roles=["memo_reader"])
    shared.grant("memo_reader", "*", "memo")
    shared.grant("dan", "read", "memo", fields=["name", "secret"])
    field = shared.grant("dan", "read", "memo", fields=["secret"], effect="deny")
    assert shared.query("select * from memo", principal="dan") == [{"id": row, "name": "m"}]
    assert not shared.can("dan", "read", "memo.secret")
    assert shared.can("dan", "read", "memo.name")
    shared.revoke(field)
    whole = shared.grant("dan", "write", "memo", effect="deny", reason="on leave")
    with pytest.raises(Denied, match=f"permission {whole} denies it") as caught:
        shared.update("memo", row, {"name": "n"}, principal="dan")
    assert whole in caught.value.details["rows"]
    decision = shared.can("dan", "update", "memo")
    assert (bool(decision), [(r["id"], r["reason"]) for r in decision.rows]) == (False, [(whole, "on leave")])
    assert names(shared, "memo", "dan") == ["m"]


def test_a_condition_that_is_unknown_allows_nothing_and_denies(shared: Layer) -> None:
    shared.define("leveled", {"name": "text", "level": "int"})
    low, high, none = shared.insert(
        "leveled", [{"name": n, "level": v} for n, v in (("low", 1), ("high", 9), ("none", None))]
    )
    shared.grant("allowed_low", "*", "leveled", where="level < 5")
    shared.grant("denied_high", "*", "leveled")
    shared.grant("denied_high", "*", "leveled", where="level > 5", effect="deny")
    for who in ("allowed_low", "denied_high"):
        assert names(shared, "leveled", who) == ["low"]
        shared.update("leveled", low, {"name": "low"}, principal=who)
        for row in (high, none):
            with pytest.raises(NotFound):
                shared.update("leveled", row, {"name": "x"}, principal=who)
            assert not shared.can(who, "update", f"leveled/{row}")


def test_fields_limit_what_is_read_and_what_is_set(shared: Layer) -> None:
    shared.define("form", {"name": "text", "salary": "int", "state": {"type": "text", "default": "draft"}})
    shared.grant("fay", "read", "form", fields=["name"])
    shared.grant("fay", "insert", "form", fields=["name"])
    shared.grant("fay", "update", "form.name")
    row = shared.insert("form", {"name": "a"}, principal="fay")
    shared.update("form", row, {"name": "b"}, principal="fay")
    assert shared.query("select * from form", principal="fay") == [{"id": row, "name": "b"}]
    for write in (
        lambda: shared.insert("form", {"name": "a", "salary": 1}, principal="fay"),
        lambda: shared.update("form", row, {"salary": 1}, principal="fay"),
        lambda: shared.update("form", row, {"name": "c", "state": "x"}, principal="fay"),
    ):
        with pytest.raises(Denied, match=r"no permission covers (salary|state)"):
            write()
    with pytest.raises((Invalid, NotFound)):
        shared.query("select salary from form", principal="fay")
    assert shared.query("select name, salary, state from form") == [{"name": "b", "salary": None, "state": "draft"}]


def test_fields_may_depend_on_the_row(shared: Layer) -> None:
    shared.define("person", {"name": "text", "phone": "text", "self": "ref principal"})
    me = shared.principal("pia")
    shared.insert("person", [{"name": "pia", "phone": "1", "self": me}, {"name": "tom", "phone": "2"}])
    shared.grant("pia", "read", "person", fields=["name"])
    shared.grant("pia", "read", "person", where="self = :me", fields=["phone"])
    assert shared.query("select name, phone from person order by name", principal="pia") == [
        {"name": "pia", "phone": "1"},
        {"name": "tom", "phone": None},
    ]
    assert shared.query("select name from person where phone = '2'", principal="pia") == []


def test_rows_by_who_one_is_by_attributes_and_along_references(shared: Layer) -> None:
    shared.define("customer", {"name": "text", "account_of": "ref principal", "region": "text"})
    shared.define("case_file", {"name": "text", "customer": "ref customer"})
    ann = shared.principal("ann", attributes={"region": "north", "level": 3, "chief": False})
    bob = shared.principal("bob", attributes={"region": "south"})
    a = shared.insert("customer", {"name": "A", "account_of": ann, "region": "south"})
    b = shared.insert("customer", {"name": "B", "account_of": bob, "region": "north"})
    files = shared.insert(
        "case_file", [{"name": "of A", "customer": a}, {"name": "of B", "customer": b}, {"name": "of none"}]
    )
    for where, seen in (
        ("customer.account_of = :me", ["of A"]),
        ("customer.account_of.name = :me.name", ["of A"]),
        ("customer.region = :me.region", ["of B"]),
        ("customer.region = :me.nothing", []),
        (":me.level = 3", ["of A", "of B", "of none"]),
        (":me.chief", []),
        ("customer is null and not :me.chief", ["of none"]),
    ):  # fmt: skip
        grants = [shared.grant("ann", action, "case_file", where=where) for action in ("read", "update")]
        assert names(shared, "case_file", "ann") == seen, where
        for row, name in zip(files, ("of A", "of B", "of none"), strict=True):
            assert bool(shared.can("ann", "update", f"case_file/{row}")) == (name in seen), where
        for grant in grants:
            shared.revoke(grant)


def test_a_write_needs_the_row_as_it_was_and_as_it_becomes(shared: Layer) -> None:
    shared.define("desk", {"name": "text", "keeper": "ref principal"})
    una, vic = shared.principal("una"), shared.principal("vic")
    mine, other = shared.insert("desk", [{"name": "mine", "keeper": una}, {"name": "other", "keeper": vic}])
    shared.grant("una", "read", "desk")
    grant = shared.grant("una", "write", "desk", where="keeper = :me")
    shared.update("desk", mine, {"name": "still mine"}, principal="una")
    for write in (
        lambda: shared.update("desk", other, {"keeper": una}, principal="una"),
        lambda: shared.update("desk", mine, {"keeper": vic}, principal="una"),
        lambda: shared.update("desk", mine, {"keeper": None}, principal="una"),
        lambda: shared.insert("desk", {"name": "new", "keeper": vic}, principal="una"),
        lambda: shared.insert("desk", {"name": "new"}, principal="una"),
        lambda: shared.delete("desk", other, principal="una"),
    ):
        with pytest.raises(Denied, match="no permission allows it") as caught:
            write()
        assert caught.value.details["rows"] == [grant]
    with pytest.raises(Denied), shared.transaction(principal="una") as tx:
        tx.update("desk", mine, {"name": "lost"})
        tx.delete("desk", other)
    assert names(shared, "desk", "una") == ["other", "still mine"]
    shared.delete("desk", mine, principal="una")


def test_a_row_that_may_not_be_read_is_not_found_and_one_that_may_is_denied(shared: Layer) -> None:
    shared.define("drawer", {"name": "text", "open": "bool"})
    shown, hidden = shared.insert("drawer", [{"name": "shown", "open": True}, {"name": "hidden", "open": False}])
    shared.grant("dora", "read", "drawer", where="open")
    shared.grant("dora", "update", "drawer", where="name = 'nobody'")
    with pytest.raises(Denied):
        shared.update("drawer", shown, {"name": "x"}, principal="dora")
    with pytest.raises(NotFound) as missing:
        shared.update("drawer", 10**9, {"name": "x"}, principal="dora")
    with pytest.raises(NotFound) as unseen:
        shared.update("drawer", hidden, {"name": "x"}, principal="dora")
    assert unseen.value.message.replace(str(hidden), "N") == missing.value.message.replace(str(10**9), "N")


def test_a_grant_holds_in_its_interval_only(shared: Layer) -> None:
    shared.define("lease", {"name": "text"})
    shared.insert("lease", {"name": "l"})
    now = datetime.now(UTC)
    day = timedelta(days=1)
    shared.grant("early", "read", "lease", valid_from=now + day)
    shared.grant("late", "read", "lease", valid_to=now - day)
    shared.grant("timely", "read", "lease", valid_from=now - day, valid_to=now + day)
    assert [bool(shared.can(who, "read", "lease")) for who in ("early", "late", "timely")] == [False, False, True]
    ends = datetime.now(UTC) + timedelta(seconds=1.5)
    shared.grant("brief", "*", "lease", valid_to=ends)
    assert names(shared, "lease", "brief") == ["l"]
    shared.insert("lease", {"name": "m"}, principal="brief")
    time.sleep(max(0.0, (ends - datetime.now(UTC)).total_seconds()) + 0.05)
    with pytest.raises(Denied):
        shared.insert("lease", {"name": "n"}, principal="brief")
    with pytest.raises(NotFound):
        names(shared, "lease", "brief")
    with pytest.raises(Invalid, match="no time zone"):
        shared.grant("brief", "read", "lease", valid_to=datetime(2026, 1, 1))


def test_can_answers_as_of_any_tx_with_the_rows_that_held_then(shared: Layer) -> None:
    shared.define("archive", {"name": "text"})
    before = last(shared)
    grant = shared.grant("hist", "read", "archive", reason="audit", valid_to=datetime.now(UTC) + timedelta(seconds=0.4))
    during = last(shared)
    time.sleep(0.5)
    shared.principal("hist", attributes={"x": 1})
    expired = last(shared)
    shared.revoke(grant)
    assert [bool(shared.can("hist", "read", "archive", as_of=tx)) for tx in (before, during, expired, last(shared))] == [
        False, True, False, False,
    ]  # fmt: skip
    assert [(r["id"], r["reason"]) for r in shared.can("hist", "read", "archive", as_of=during).rows] == [
        (grant, "audit")
    ]


def test_can_names_the_rows_and_their_condition(shared: Layer) -> None:
    shared.define("listing", {"name": "text", "qty": "int"})
    few, many = shared.insert("listing", [{"name": "few", "qty": 1}, {"name": "many", "qty": 9}])
    grant = shared.grant("cal", "read", "listing", where="qty < 5", fields=["name"])
    decision = shared.can("cal", "read", "listing")
    assert (decision.allowed, decision.reason, [r["id"] for r in decision.rows]) == (True, "where qty < 5", [grant])
    assert decision.rows[0]["fields"] == ["name"]
    answers = {
        f"listing/{few}": True, f"listing/{many}": False, f"listing/{few}.name": True, f"listing/{few}.qty": False, f"listing/{10**9}": False,
        "listing.name": True, "listing.qty": False, "listing.id": True, "*": False, "branch:main": False, "function:f": False,
    }  # fmt: skip
    assert {resource: bool(shared.can("cal", "read", resource)) for resource in answers} == answers
    assert not shared.can("nobody_at_all", "read", "listing")
    for action, resource in (
        ("peek", "listing"),
        ("read", "no_such_entity"),
        ("read", "listing.nothing"),
        ("read", "listing/x"),
    ):
        with pytest.raises(Invalid):
            shared.can("cal", action, resource)


def test_what_is_passed_on_can_only_be_narrower_and_dies_with_its_source(shared: Layer) -> None:
    shared.define("budget", {"name": "text", "n": "int", "of_whom": "ref principal"})
    gia = shared.principal("gia")
    shared.insert(
        "budget",
        [
            {"name": "gia 1", "n": 1, "of_whom": gia},
            {"name": "gia 9", "n": 9, "of_whom": gia},
            {"name": "other", "n": 1},
        ],
    )
    soon = datetime.now(UTC) + timedelta(days=1)
    source = shared.grant(
        "gia", "read", "budget", where="of_whom = :me", fields=["name", "n"], valid_to=soon, delegable=True
    )
    for narrower in (
        {"fields": None},
        {"fields": ["name", "of_whom"]},
        {"valid_to": None},
        {"valid_to": soon + timedelta(days=1)},
        {"effect": "deny"},
    ):
        with pytest.raises(Denied, match="nothing that wide"):
            shared.grant("hal", "read", "budget", by="gia", **{"fields": ["name"], "valid_to": soon, **narrower})
    for action, resource in (("update", "budget"), ("*", "budget"), ("read", "*")):
        with pytest.raises((Denied, Invalid)):
            shared.grant("hal", action, resource, by="gia", valid_to=soon)
    passed = shared.grant(
        "hal", "read", "budget", where="n < 5", fields=["name", "n"], valid_to=soon, delegable=True, by="gia"
    )
    assert names(shared, "budget", "hal") == ["gia 1"]
    further = shared.grant("ivy", "read", "budget", where="true", fields=["name"], valid_to=soon, by="hal")
    assert shared.query("select * from budget", principal="ivy") == [
        {"id": shared.query("select id from budget where name = 'gia 1'")[0]["id"], "name": "gia 1"}
    ]
    with pytest.raises(Denied, match="nothing that wide"):
        shared.grant("jon", "read", "budget", fields=["name"], valid_to=soon, by="ivy")
    with pytest.raises(Denied, match="did not grant it"):
        shared.revoke(source, by="hal")
    shared.revoke(source)
    assert [bool(shared.can(who, "read", "budget")) for who in ("gia", "hal", "ivy")] == [False, False, False]
    assert shared.query(f"select id from permission where id in ({source}, {passed}, {further})") == []


def test_what_was_passed_on_ends_when_its_source_does(shared: Layer) -> None:
    shared.define("loan", {"name": "text"})
    ends = datetime.now(UTC) + timedelta(seconds=1)
    shared.grant("lena", "read", "loan", valid_to=ends, delegable=True)
    shared.grant("milo", "read", "loan", valid_to=ends, by="lena")
    assert shared.can("milo", "read", "loan")
    time.sleep(1.05)
    assert not shared.can("milo", "read", "loan")


def test_who_holds_no_impersonation_acts_as_itself(shared: Layer, shared_location: str) -> None:
    shared.define("diary", {"name": "text"})
    shared.grant("kim", "read", "diary")
    shared.grant("lou", "*", "diary")
    shared.insert("diary", {"name": "d"})
    with opened_as(shared, shared_location, "kim") as handle:
        assert handle.me == "kim"
        assert handle.query("select name from diary") == [{"name": "d"}]
        assert handle.query("select name from diary", principal="kim") == [{"name": "d"}]
        for who in ("lou", "owner", "nobody_known"):
            for act in (
                lambda who=who: handle.query("select * from diary", principal=who),
                lambda who=who: handle.insert("diary", {"name": "x"}, principal=who),
                lambda who=who: handle.grant("kim", "*", "*", by=who),
                lambda who=who: handle.fork("stolen", principal=who),
            ):
                with pytest.raises(Denied, match=f"may not impersonate principal:{who}"):
                    act()
        shared.grant("kim", "impersonate", "principal:lou")
        handle.insert("diary", {"name": "as lou"}, principal="lou")
        assert shared.query("select principal from tx order by tx desc limit 1") == [{"principal": "lou"}]


def test_only_an_owner_changes_people_and_nobody_can_take_the_owner_away(shared: Layer, shared_location: str) -> None:
    shared.grant("nat", "grant", "*")
    shared.grant("nat", "define", "*")
    with opened_as(shared, shared_location, "nat") as handle:
        for act in (
            lambda: handle.principal("nat", roles=["clerk"]),
            lambda: handle.principal("new_one"),
            lambda: handle.token("owner"),
            lambda: handle.grant("nat", "read", "*"),
            lambda: handle.backup("/nowhere"),
            lambda: handle.prune(1),
            lambda: handle.fork("nats"),
        ):
            with pytest.raises(Denied):
                act()
        assert not handle.can("owner", "read", "*")
    with pytest.raises(Denied, match="can't be denied"):
        shared.grant("owner", "read", "*", effect="deny")
    with pytest.raises(Denied, match="can't be revoked"):
        shared.revoke(1502)
    with pytest.raises(NotFound):
        shared.revoke(10**9)


def test_a_new_token_ends_the_one_before(shared: Layer, shared_location: str) -> None:
    shared.principal("olaf")
    old = shared.token("olaf")
    new = shared.token("olaf")
    with pytest.raises(Unauthenticated, match="nobody's"):
        livinglayer.open(shared_location, token=old)
    with livinglayer.open(shared_location, token=new) as handle:
        assert handle.me == "olaf"


def test_policy_on_a_branch_changes_nothing_until_it_is_merged(shared: Layer) -> None:
    shared.define("plan", {"name": "text"})
    shared.insert("plan", {"name": "p"})
    held = shared.grant("quin", "read", "plan", branch="main")
    shared.fork("policy")
    shared.grant("rosa", "read", "plan", on="policy")
    shared.revoke(held, on="policy")
    for branch in ("main", "policy"):
        assert not shared.can("rosa", "read", "plan", branch=branch)
        with pytest.raises(NotFound):
            names(shared, "plan", "rosa", branch=branch)
    assert names(shared, "plan", "quin") == ["p"]
    assert shared.merge("policy")
    assert names(shared, "plan", "rosa") == ["p"]
    assert not shared.can("quin", "read", "plan")


def test_a_grant_of_a_branch_holds_there_only(shared: Layer) -> None:
    shared.define("sketch", {"name": "text"})
    row = shared.insert("sketch", {"name": "s"})
    shared.fork("studio")
    shared.grant("sam", "*", "sketch", branch="studio")
    assert names(shared, "sketch", "sam", branch="studio") == ["s"]
    shared.update("sketch", row, {"name": "t"}, branch="studio", principal="sam")
    with pytest.raises(NotFound):
        names(shared, "sketch", "sam")
    with pytest.raises(NotFound):
        shared.update("sketch", row, {"name": "t"}, principal="sam")
    assert (bool(shared.can("sam", "read", "sketch", branch="studio")), bool(shared.can("sam", "read", "sketch"))) == (
        True,
        False,
    )


def test_forking_and_merging_need_their_own_grants_and_those_of_the_rows(shared: Layer) -> None:
    shared.define("draft", {"name": "text"})
    row = shared.insert("draft", {"name": "d"})
    shared.grant("tess", "read", "draft")
    shared.grant("tess", "update", "draft", branch="tess_branch")
    with pytest.raises(Denied, match="may not fork branch:main"):
        shared.fork("tess_branch", principal="tess")
    shared.grant("tess", "fork", "branch:main")
    shared.fork("tess_branch", principal="tess")
    shared.update("draft", row, {"name": "e"}, branch="tess_branch", principal="tess")
    with pytest.raises(Denied, match="may not merge branch:main"):
        shared.merge("tess_branch", principal="tess")
    shared.grant("tess", "merge", "branch:main")
    with pytest.raises(Denied, match="may not update draft"):
        shared.merge("tess_branch", principal="tess")
    assert shared.query("select name from draft") == [{"name": "d"}]
    shared.grant("tess", "update", "draft", branch="main")
    assert shared.merge("tess_branch", principal="tess")
    assert shared.query("select name from draft") == [{"name": "e"}]


def test_a_grant_to_an_unknown_name_makes_it_a_pending_principal(shared: Layer) -> None:
    shared.define("welcome", {"name": "text"})
    shared.grant("not_yet", "read", "welcome")
    assert shared.query("select kind from principal where name = 'not_yet'") == [{"kind": "pending"}]
    shared.principal("not_yet", kind="agent")
    assert shared.query("select kind from principal where name = 'not_yet'") == [{"kind": "agent"}]


def test_a_grant_that_makes_no_sense_is_invalid(shared: Layer) -> None:
    shared.define("sense", {"name": "text"})
    before = last(shared)
    for action, resource, more in (
        ("peek", "sense", {}), ("read", "no_entity", {}), ("read", "sense.nothing", {}), ("read", "sense", {"fields": ["nothing"]}), ("read", "", {}),
        ("read", "sense", {"effect": "maybe"}), ("read", "branch:main", {"where": "true"}), ("read", "*", {"fields": ["name"]}), ("read", "sense", {"where": "x = 1"}),
        ("read", 5, {}), ("fork", "branch:x_*", {}), ("call", "function:*", {}), ("merge", "branch:", {}),
    ):  # fmt: skip
        with pytest.raises(Invalid):
            shared.grant("nonsense", action, resource, **more)
    for name in ("", "a b", "a/b", "a:b", "a\nb", "x" * 201, 5):
        with pytest.raises(Invalid):
            shared.grant(name, "read", "sense")
        with pytest.raises(Invalid):
            shared.principal(name)
    with pytest.raises(Invalid, match="not one of"):
        shared.principal("odd_kind", kind="ghost")
    assert last(shared) == before


def test_a_grant_speaks_of_the_field_it_names_after_a_rename(shared: Layer) -> None:
    """A condition that can't be read any more allows nothing, and one that denies goes on denying."""
    shared.define("moved", {"name": "text", "level": "int"})
    shared.insert("moved", {"name": "m", "level": 1})
    shared.grant("vera", "read", "moved", where="level < 5")
    shared.grant("walt", "read", "moved")
    shared.grant("walt", "read", "moved", where="level > 5", effect="deny")
    assert names(shared, "moved", "vera") == names(shared, "moved", "walt") == ["m"]
    shared.alter("moved", rename={"level": "rank"})
    for who in ("vera", "walt"):
        try:
            assert names(shared, "moved", who) == []
        except NotFound:
            pass


def test_grants_on_everything_reach_what_is_made_later(shared: Layer) -> None:
    shared.grant("xena", "read", "*")
    shared.define("later", {"name": "text"})
    shared.insert("later", {"name": "l"})
    assert names(shared, "later", "xena") == ["l"]
    with pytest.raises(Denied):
        shared.insert("later", {"name": "x"}, principal="xena")


def test_a_unique_value_of_a_hidden_row_is_still_taken(shared: Layer) -> None:
    shared.define("handle", {"name": {"type": "text", "unique": True}, "shown": "bool"})
    shared.insert("handle", {"name": "taken", "shown": False})
    shared.grant("yan", "*", "handle", where="shown")
    with pytest.raises(Conflict):
        shared.insert("handle", {"name": "taken", "shown": True}, principal="yan")


@pytest.mark.parametrize("changed", ["grant", "role", "revoke"])
def test_who_is_no_owner_merges_nothing_that_says_who_may_do_what(layer: Layer, changed: str) -> None:
    """An owner tries something on a branch; that it counts on main is for an owner to say, whatever else one may merge."""
    layer.define("item", {"name": "text!"})
    layer.principal("ann")
    for action, resource in (("merge", "branch:main"), ("write", "*"), ("read", "*"), ("define", "*")):
        layer.grant("ann", action, resource)
    held = layer.grant("ann", "read", "item", effect="deny")
    layer.fork("try")
    layer.insert("item", {"name": "bolt"}, branch="try")
    if changed == "grant":
        layer.grant("ann", "impersonate", "*", on="try")
    elif changed == "role":
        layer.principal("ann", roles=["boss"], on="try")
    else:
        layer.revoke(held, on="try")
    with pytest.raises(Denied, match="they say who may do what"):
        layer.merge("try", principal="ann")
    assert not layer.can("ann", "impersonate", "principal:owner") and layer.query("select * from item") == []
    assert layer.merge("try")
