"""Usage and quotas: what executions cost is rows, and what is over a quota is refused, said why, and recorded."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from law.conftest import define
from sandbox.hosts import Host

from livinglayer import Layer
from livinglayer.errors import Denied, Invalid, LimitExceeded, NotFound
from livinglayer.law import quotas, usage
from livinglayer.sandbox.sandbox import Sandbox
from livinglayer.substrate.ledger import now
from livinglayer.substrate.values import datetime_text


@pytest.fixture
def counting(layer: Layer) -> Layer:
    """A layer with a function that needs no box, which ann and bob may call."""
    layer.call("function.define", name="one.more", language="sql", code="select 1 as n")
    for name in ("ann", "bob"):
        layer.principal(name, roles=["staff"])
        layer.grant(name, "call", "function:one.more")
    return layer


def spend(
    layer: Layer, who: str, *, ago: float = 0, contract: int | None = None, function: int | None = 1, **used: Any
) -> None:
    """A row of usage, as an execution that ended `ago` seconds before now would have left it."""
    with layer.engine.reading() as session:
        principal = layer.catalog.principal(session, who)["id"]
    execution = layer.ledger.open(principal)
    layer.ledger.intend(execution)
    at = datetime_text(datetime.now(UTC) - timedelta(seconds=ago))
    amounts = {"wall": 0.0, "cpu": 0.0, "memory": 0.0, "sent": 0, "received": 0, "disk": 0, **used}
    layer.ledger.conclude(
        execution,
        "done",
        facts=[("ledger_usage", (execution.id, principal, contract, function, *amounts.values(), at))],
    )


def test_without_quotas_everything_is_admitted(counting: Layer) -> None:
    assert [counting.call("one.more", principal="ann") for _ in range(3)] == [[{"n": 1}]] * 3
    (row,) = usage.totals(counting)
    assert (row["principal"], row["executions"]) == ("ann", 3)
    assert usage.totals(counting, "function")[0]["function"] == "one.more"
    assert usage.totals(counting, since=datetime.now(UTC) + timedelta(hours=1)) == []
    with pytest.raises(Invalid):
        usage.totals(counting, "colour")


def test_over_quota_is_refused_with_the_row_the_amount_and_when_it_frees_up(counting: Layer) -> None:
    number = counting.call("quota.set", subject="ann", resource="executions", amount=2, seconds=3600)
    counting.call("one.more", principal="ann")
    counting.call("one.more", principal="ann")
    before = datetime.now(UTC)
    with pytest.raises(LimitExceeded, match=f"ann has used 2 of 2 executions in 3600 s: quota {number}") as caught:
        counting.call("one.more", principal="ann")
    assert caught.value.details["rows"] == [number] and caught.value.details["used"] == 2
    frees = datetime.fromisoformat(str(caught.value.details["frees"]))
    assert before + timedelta(seconds=3500) < frees < before + timedelta(seconds=3601)
    (refused,) = counting.query("select principal, status, result from execution where status = 'failed'")
    assert refused["principal"] == "ann" and refused["result"]["error"]["code"] == "limit_exceeded"
    assert refused["result"]["error"]["rows"] == [number]
    assert counting.call("one.more", principal="bob") == [{"n": 1}]  # a quota of ann is ann's
    counting.call("quota.set", subject="ann", resource="executions", amount=3, seconds=3600)
    assert counting.call("one.more", principal="ann") == [{"n": 1}]
    counting.call("quota.remove", id=number)
    assert counting.call("one.more", principal="ann") == [{"n": 1}]


def test_what_has_left_the_window_does_not_count(counting: Layer) -> None:
    counting.call("quota.set", subject="ann", resource="cpu", amount=10, seconds=60)
    spend(counting, "ann", ago=61, cpu=100.0)
    counting.call("one.more", principal="ann")
    spend(counting, "ann", ago=50, cpu=6.0)
    spend(counting, "ann", ago=20, cpu=6.0)
    with pytest.raises(LimitExceeded, match="12 of 10 seconds of CPU") as caught:
        counting.call("one.more", principal="ann")
    frees = datetime.fromisoformat(str(caught.value.details["frees"])) - datetime.now(UTC)
    assert timedelta(seconds=5) < frees < timedelta(seconds=10)  # when the older of the two has left


@pytest.mark.parametrize(
    ("resource", "used"), [("memory", {"memory": 5e9}), ("bytes", {"sent": 3, "received": 2}), ("cpu", {"cpu": 5.0})]
)
def test_each_resource_is_summed(counting: Layer, resource: str, used: dict[str, Any]) -> None:
    amount = sum(used.values())
    counting.call("quota.set", subject="ann", resource=resource, amount=amount, seconds=60)
    spend(counting, "ann", **{key: value - type(value)(1) for key, value in used.items()})
    counting.call("one.more", principal="ann")
    spend(counting, "ann", **used)
    with pytest.raises(LimitExceeded):
        counting.call("one.more", principal="ann")


def test_a_quota_of_a_role_is_each_holders_own(counting: Layer) -> None:
    counting.call("quota.set", subject="staff", resource="executions", amount=1, seconds=60)
    counting.call("one.more", principal="ann")
    with pytest.raises(LimitExceeded):
        counting.call("one.more", principal="ann")
    counting.call("one.more", principal="bob")
    counting.principal("ann", roles=[])
    counting.call("one.more", principal="ann")


def test_a_quota_of_a_contract_is_shared_by_all_who_act_under_it(counting: Layer) -> None:
    from livinglayer.law import verbs

    contract = counting.insert("contract", {"name": "agent"})
    counting.call("quota.set", contract="agent", resource="executions", amount=2, seconds=60)
    ids = {}
    with counting.engine.reading() as session:
        for name in ("ann", "bob"):
            ids[name] = counting.catalog.principal(session, name)["id"]
    for name in ("ann", "bob"):
        verbs.call(counting, "one.more", principal=ids[name], contract=contract)
    with pytest.raises(LimitExceeded, match="the contract has used 2 of 2"):
        verbs.call(counting, "one.more", principal=ids["ann"], contract=contract)
    counting.call("one.more", principal="ann")  # not under the contract


def test_boxes_that_live_count_as_they_were_last_seen(counting: Layer) -> None:
    with counting.engine.reading() as session:
        ann = counting.catalog.principal(session, "ann")["id"]
    counting.call("quota.set", subject="ann", resource="cpu", amount=10, seconds=60)
    seen = {"principal": ann, "contract": None, "cpu": 11.0, "memory": 0.0, "sent": 0, "received": 0}
    assert counting.engine.lease("box/7", "worker", 60, json.dumps(seen))
    with pytest.raises(LimitExceeded, match="11 of 10") as caught:
        counting.call("one.more", principal="ann")
    assert "has ended" in str(caught.value.hint)
    counting.engine.release("box/7", "worker")
    counting.call("one.more", principal="ann")


def test_quotas_of_boxes_are_for_boxes(counting: Layer) -> None:
    with counting.engine.reading() as session:
        ann = counting.catalog.principal(session, "ann")["id"]
    counting.call("quota.set", subject="ann", resource="boxes", amount=1, seconds=60)
    spend(counting, "ann", function=None)
    counting.call("one.more", principal="ann")
    with pytest.raises(LimitExceeded, match="1 of 1 boxes"):
        usage.admit(counting, ann, None, ("boxes",))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resource": "gold"}, "no quota of 'gold'"),
        ({"amount": -1}, "0 or more"),
        ({"seconds": 0}, "window"),
        ({"seconds": 10**9}, "window"),
        ({"subject": "nobody"}, "no principal"),
        ({"subject": None, "contract": "none"}, "no contract"),
        ({"subject": None}, "of a subject"),
    ],
)
def test_a_quota_that_means_nothing_is_refused(counting: Layer, given: dict[str, Any], said: str) -> None:
    with pytest.raises((Invalid, NotFound), match=said):
        counting.call("quota.set", {"subject": "ann", "resource": "cpu", "amount": 1, "seconds": 60, **given})
    assert counting.query("select * from quota") == []


def test_setting_quotas_needs_the_right_and_a_list_shows_what_was_used(counting: Layer) -> None:
    with pytest.raises(Denied):
        counting.call("quota.set", subject="ann", resource="cpu", amount=1, seconds=60, principal="ann")
    counting.call("quota.set", subject="ann", resource="cpu", amount=9, seconds=60)
    counting.call("quota.set", subject="staff", resource="cpu", amount=9, seconds=60)
    spend(counting, "ann", cpu=2.5)
    shown = [(row["subject"], row["used"]) for row in quotas.listed(counting)]
    assert shown == [("ann", 2.5), ("staff", None)]


def test_a_quota_at_zero_stops_everything_and_now_is_in_utc(counting: Layer) -> None:
    assert now().endswith("+00:00") or now().endswith("Z")
    counting.call("quota.set", subject="ann", resource="executions", amount=0, seconds=60)
    with pytest.raises(LimitExceeded, match="0 of 0"):
        counting.call("one.more", principal="ann")


def test_a_function_in_a_box_leaves_what_it_used(desk: Layer) -> None:
    ticket = desk.insert("ticket", {"title": "a"})
    define(desk, "ticket.work", "def work(id):\n    return sum(range(3_000_000)) and id\n")
    assert desk.call("ticket.work", id=ticket) == ticket
    (row,) = desk.query("select * from usage where function = 'ticket.work'")
    assert row["cpu"] > 0 and row["wall"] > 0 and row["memory"] > 0


def test_a_full_host_is_a_clear_refusal_that_is_recorded(
    layer: Layer, own_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYER_HOST_BOXES", "1")
    monkeypatch.setenv("LAYER_HOST_WAIT", "0.5")
    layer.define("ticket", {"title": "text!"})
    define(layer, "ticket.one", "def one(): return 1", timeout=2.0)  # so long it waits in line, too
    layer.call("contract.define", name="agent", reads=["ticket"])
    only = Sandbox.create(name="only", memory="64M", disk="64M")
    with pytest.raises(LimitExceeded, match="full"):
        layer.call("ticket.one")
    with pytest.raises(LimitExceeded, match="full"):
        layer.call("box.create", contract="agent")
    rows = layer.query("select kind, status, result from execution where status = 'failed' order by id")
    assert {row["kind"] for row in rows} == {"function", "contract", "verb"}
    assert {row["result"]["error"]["code"] for row in rows} == {"limit_exceeded"}
    only.kill()
    assert layer.call("ticket.one") == 1
