"""Triggers: what is refused, what fires and what does not, exactly once, at its time, and not for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, LayerError, NotFound
from livinglayer.law.schedule import parse
from livinglayer.law.triggers import Feed, delay, retries
from livinglayer.law.worker import Worker

START = datetime(2030, 1, 1, 12, 0, 30, tzinfo=UTC)


class Clock:
    """A time that moves when told."""

    def __init__(self, moment: datetime = START) -> None:
        self.moment = moment

    def __call__(self) -> datetime:
        return self.moment

    def forward(self, **much: float) -> None:
        self.moment += timedelta(**much)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def desk(layer: Layer) -> Layer:
    """A layer with tickets, and functions in SQL, which need no box."""
    layer.define("ticket", {"title": "text!", "points": "int", "status": "text"})
    sql(layer, "note.change", "select :id as id, :op as op, :tx as tx", id="int!", op="text", tx="int")
    sql(layer, "note.time", "select :time as at", time="datetime")
    sql(layer, "note.end", "select :execution as e, :status as s", execution="int!", status="text")
    sql(layer, "note.bare", "select 1 as one")
    return layer


def sql(layer: Layer, name: str, code: str, **arguments: str) -> None:
    layer.call(
        "function.define", name=name, language="sql", code=code, signature={"arguments": arguments}, reads=["ticket"]
    )


def define(layer: Layer, name: str, function: str = "note.change", **more: Any) -> Any:
    return layer.call("trigger.define", name=name, function=function, **more)


def work(layer: Layer, clock: Callable[[], datetime] | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Everything that is due, and what the worker said."""
    said: list[tuple[str, dict[str, Any]]] = []
    Worker(layer, 2, now=clock, say=lambda event, **details: said.append((event, details))).run(once=True)
    return said


def fired(layer: Layer, trigger: str) -> list[dict[str, Any]]:
    """The arguments of what a trigger started, and how it ended."""
    sql = "select id, arguments, status, cause_tx, attempt, result, due from execution where trigger = :t order by id"
    return layer.query(sql, {"t": trigger})


def told(layer: Layer, trigger: str) -> list[tuple[str, int]]:
    return [(row["arguments"]["op"], row["arguments"]["id"]) for row in fired(layer, trigger)]


# What is refused


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "names 0 causes"),
        ({"on_entity": "ticket", "schedule": "* * * * *"}, "names 2 causes"),
        ({"on_entity": "nothing"}, "nothing"),
        ({"on_entity": "tx"}, "ledger's own"),
        ({"on_entity": "ticket", "on_actions": ["look"]}, "on_actions"),
        ({"on_entity": "ticket", "predicate": "colour = 'red'"}, "colour"),
        ({"on_entity": "ticket", "predicate": "points >"}, "can't be read"),
        ({"on_entity": "ticket", "on_fields": ["colour"]}, "colour"),
        ({"on_entity": "ticket", "after_status": "done"}, "goes with after_function"),
        ({"on_entity": "ticket", "given": {"colour": 1}}, "its function has no argument 'colour'"),
        ({"on_entity": "ticket", "retries": {"attempts": 0}}, "attempts"),
        ({"on_entity": "ticket", "retries": {"often": 3}}, "retries are"),
        ({"on_entity": "ticket", "on_branch": "idea"}, "idea"),
        ({"schedule": "* * * *"}, "five fields"),
        ({"after_function": "no.such"}, "no.such"),
        ({"after_function": "note.bare", "after_status": "well"}, "never ends as 'well'"),
        ({"schedule": "* * * * *"}, "needs the argument 'id'"),
        ({"function": "no.such", "on_entity": "ticket"}, "no.such"),
    ],
)
def test_a_trigger_that_could_never_fire_is_refused(desk: Layer, more: dict[str, Any], says: str) -> None:
    with pytest.raises((Invalid, NotFound), match=says):
        define(desk, "t", **more)
    assert desk.query("select * from trigger") == []


def test_whoever_may_not_call_the_function_can_not_have_it_called(desk: Layer) -> None:
    desk.principal("ann")
    for action in ("insert", "update"):
        desk.grant("ann", action, "trigger")
    for entity in ("ticket", "trigger", "function"):
        desk.grant("ann", "read", entity)
    with pytest.raises(Denied, match=r"may not call note\.change"):
        define(desk, "t", on_entity="ticket", principal="ann")


@pytest.mark.parametrize(
    ("text", "moment", "previous", "following"),
    [
        ("*/5 * * * *", "2024-02-28T23:58:10", "2024-02-28T23:55", "2024-02-29T00:00"),
        ("0 9 * * mon-fri", "2026-08-01T10:00", "2026-07-31T09:00", "2026-08-03T09:00"),
        ("0 0 29 2 *", "2025-01-01T00:00", "2024-02-29T00:00", "2028-02-29T00:00"),
        ("30 4 1,15 * 5", "2026-08-05T00:00", "2026-08-01T04:30", "2026-08-07T04:30"),  # one of both is enough
        ("0 0 * * 7", "2026-08-02T00:00", "2026-08-02T00:00", "2026-08-09T00:00"),
        ("@daily", "2026-08-02T00:00:59", "2026-08-02T00:00", "2026-08-03T00:00"),
        ("10-20/5 3 * jan,dec *", "2026-06-01T00:00", "2026-01-31T03:20", "2026-12-01T03:10"),
    ],
)
def test_a_schedule_names_times(text: str, moment: str, previous: str, following: str) -> None:
    def time(word: str) -> datetime:
        return datetime.fromisoformat(word).replace(tzinfo=UTC)

    assert parse(text).previous(time(moment)) == time(previous)
    assert parse(text).following(time(moment)) == time(following)


@pytest.mark.parametrize(
    "text",
    ["", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "5-1 * * * *",
     "*/0 * * * *", "x * * * *", "*-5 * * * *", "0 0 31 2 *", "1,,2 * * * *", "-1 * * * *", "１ * * * *"],
)  # fmt: skip
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse(text)


def test_waiting_grows_up_to_the_longest() -> None:
    policy = retries({"attempts": 9, "backoff": 2, "factor": 3, "longest": 30, "jitter": 0})
    assert [delay(policy, n) for n in (1, 2, 3, 4, 400)] == [2, 6, 18, 30, 30]
    wide = retries(None, {"jitter": 0.5, "backoff": 10})
    assert all(5 <= delay(wide, 1) <= 15 for _ in range(50))


# Changes


def test_changes_that_match_are_told_once_each(desk: Layer) -> None:
    define(desk, "all", on_entity="ticket")
    define(desk, "large", on_entity="ticket", predicate="points > 5", on_actions=["insert", "update"])
    define(desk, "moved", on_entity="ticket", on_fields=["status"], on_actions=["update"])
    define(desk, "gone", on_entity="ticket", predicate="status = 'shut'", on_actions=["delete"])
    a, b = desk.insert("ticket", [{"title": "a", "points": 1}, {"title": "b", "points": 9}])
    desk.update("ticket", a, {"points": 7})
    desk.update("ticket", a, {"points": 3, "status": "shut"})
    desk.update("ticket", a, {"status": "shut", "title": "still"})
    desk.delete("ticket", b)
    desk.delete("ticket", a)
    said = work(desk)
    assert told(desk, "all") == [
        ("insert", a), ("insert", b), ("update", a), ("update", a), ("update", a), ("delete", b), ("delete", a)
    ]  # fmt: skip
    assert told(desk, "large") == [("insert", b), ("update", a)]
    assert told(desk, "moved") == [("update", a)]
    assert told(desk, "gone") == [("delete", a)]
    rows = [row for name in ("all", "large", "moved", "gone") for row in fired(desk, name)]
    assert {row["status"] for row in rows} == {"done"}
    assert all(row["arguments"]["tx"] == row["cause_tx"] for row in rows)
    assert sum(event == "done" for event, _ in said) == len(rows)
    assert [event for event, _ in work(desk)] == ["start", "lead", "stop"]
    assert desk.verify().ok


def test_a_trigger_speaks_of_what_happens_while_it_is_there_and_enabled(desk: Layer) -> None:
    desk.insert("ticket", {"title": "before"})
    define(desk, "t", on_entity="ticket", description="one")
    a = desk.insert("ticket", {"title": "a"})
    define(desk, "t", on_entity="ticket", description="two", predicate="title <> 'b'")  # the change was before
    desk.call("trigger.enable", name="t", enabled=False)
    desk.insert("ticket", {"title": "meanwhile"})
    desk.call("trigger.enable", name="t")
    desk.insert("ticket", {"title": "b"})
    c = desk.insert("ticket", {"title": "c"})
    work(desk)
    assert told(desk, "t") == [("insert", a), ("insert", c)]
    desk.insert("ticket", {"title": "late"})
    desk.call("trigger.remove", name="t")
    work(desk)
    assert len(desk.query("select id from execution where trigger is not null")) == 2


def test_losing_the_place_or_looking_at_the_same_time_fires_nothing_twice(desk: Layer, location: str) -> None:
    define(desk, "t", on_entity="ticket")
    for n in range(30):
        desk.insert("ticket", {"title": str(n)})
    with livinglayer.open(location) as other:
        feeds = [Feed(handle, lambda: datetime.now(UTC)) for handle in (desk, other) for _ in range(2)]
        threads = [threading.Thread(target=feed.look) for feed in feeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(fired(desk, "t")) == 30
    late = desk.insert("ticket", {"title": "late"})
    again = Feed(desk, lambda: datetime.now(UTC))  # knows nothing, and nothing is noted
    assert desk.engine.leases("feed/place") == [] and len(again.look()) == 1
    assert told(desk, "t")[-1] == ("insert", late) and len(fired(desk, "t")) == 31


def test_a_trigger_of_another_branch_hears_of_that_branch(desk: Layer) -> None:
    desk.fork("idea")
    define(desk, "there", on_entity="ticket", on_branch="idea")
    define(desk, "here", on_entity="ticket")
    a = desk.insert("ticket", {"title": "a"}, branch="idea")
    work(desk)
    assert (told(desk, "there"), told(desk, "here")) == ([("insert", a)], [])
    assert desk.query("select branch from execution where trigger = 'there'") == [{"branch": "idea"}]
    desk.merge("idea")
    work(desk)
    assert told(desk, "here") == [("insert", a)]


def test_it_acts_as_whoever_wrote_it_last_and_loses_what_they_lose(desk: Layer) -> None:
    desk.principal("ann")
    for action, what in (("write", "trigger"), ("read", "trigger"), ("read", "function"), ("read", "ticket")):
        desk.grant("ann", action, what)
    grant = desk.grant("ann", "call", "function:note.change")
    define(desk, "t", on_entity="ticket", principal="ann")
    desk.insert("ticket", {"title": "a"})
    work(desk)
    assert desk.query("select principal, status from execution where trigger = 't'") == [
        {"principal": "ann", "status": "done"}
    ]
    desk.revoke(grant)
    desk.insert("ticket", {"title": "b"})
    work(desk)
    last = fired(desk, "t")[-1]
    assert last["status"] == "dead" and "may not call" in last["result"]["error"]["message"]


def test_what_can_not_be_called_any_more_is_a_dead_letter_that_says_so(desk: Layer) -> None:
    define(desk, "t", on_entity="ticket", predicate="points > 1")
    sql(desk, "note.change", "select 1 as one", other="int!")
    desk.insert("ticket", {"title": "a", "points": 2})
    work(desk)
    assert [row["status"] for row in fired(desk, "t")] == ["dead"]
    assert "'other'" in fired(desk, "t")[0]["result"]["error"]["message"]
    desk.alter("ticket", rename={"points": "size"})
    for title in ("b", "c"):
        desk.insert("ticket", {"title": title, "size": 2})
    work(desk)
    said = [row["result"]["error"]["message"] for row in fired(desk, "t")]
    assert len(said) == 2 and "no field 'points'" in said[1]  # once, not for every change
    with pytest.raises(LayerError):
        desk.call("execution.retry", id=fired(desk, "t")[1]["id"])


def test_a_row_that_no_verb_has_written_does_no_harm(desk: Layer) -> None:
    define(desk, "good", on_entity="ticket")
    strange = {
        "none": {}, "both": {"on_entity": "ticket", "schedule": "@daily"}, "actions": {"on_entity": "ticket", "on_actions": 7},
        "fields": {"on_entity": "ticket", "on_fields": {"a": 1}}, "arguments": {"on_entity": "ticket", "arguments": [1]},
        "time": {"schedule": "soon"}, "retries": {"on_entity": "ticket", "retries": "often"}, "nobody": {"on_entity": "nothing"},
        "branch": {"on_entity": "ticket", "branch": "nowhere"}, "field": {"on_entity": "ticket", "on_fields": ["nope"]},
    }  # fmt: skip
    for name, row in strange.items():
        desk.insert("trigger", {"name": name, "function": "note.change", **row})
    for _ in range(2):
        ticket = desk.insert("ticket", {"title": "a"})
        desk.update("ticket", ticket, {"title": "b"})
        work(desk)
    assert len(told(desk, "good")) == 4 and len(told(desk, "retries")) == 4
    ended = {name: sorted(row["status"] for row in fired(desk, name)) for name in strange if name != "retries"}
    assert ended == {
        "none": ["dead"], "both": ["dead"], "actions": ["dead"], "fields": ["dead"], "arguments": ["dead"], "time": ["dead"],
        "nobody": [], "branch": [], "field": ["dead", "done", "done"],
    }  # fmt: skip


def test_a_large_tx_is_told_whole(desk: Layer) -> None:
    define(desk, "t", "note.bare", on_entity="ticket")
    desk.insert("ticket", [{"title": str(n)} for n in range(1200)])
    assert len(Feed(desk, lambda: datetime.now(UTC)).look()) == 1200
    assert desk.query("select count(*) as n, count(distinct key) as k from execution where trigger = 't'") == [
        {"n": 1200, "k": 1200}
    ]


def test_a_trigger_that_fires_too_often_waits(location: str, clock: Clock) -> None:
    with livinglayer.open(location, create=True, trigger_rate=10) as layer:
        layer.define("ticket", {"title": "text!"})
        layer.call("function.define", name="note.bare", language="sql", code="select 1 as one")
        define(layer, "t", "note.bare", on_entity="ticket")
        layer.insert("ticket", [{"title": str(n)} for n in range(30)])
        Feed(layer, clock).look()
        waits = [(row["due"] - clock.moment).total_seconds() for row in fired(layer, "t")]
        assert waits[:11] == [0] * 11 and waits[-1] == 114  # one each 6 s after a minute's worth at once


# Times


def test_missed_times_are_one_execution(desk: Layer, clock: Clock) -> None:
    define(desk, "hourly", "note.time", schedule="0 * * * *")
    clock.moment = datetime.now(UTC).replace(minute=30) + timedelta(days=1)
    full = clock.moment.replace(minute=0, second=0, microsecond=0)
    work(desk, clock)
    work(desk, clock)
    assert [row["arguments"]["time"][:16] for row in fired(desk, "hourly")] == [full.isoformat()[:16]]
    clock.forward(minutes=29)
    work(desk, clock)
    assert len(fired(desk, "hourly")) == 1
    clock.forward(minutes=2)
    work(desk, clock)
    clock.forward(hours=5)
    work(desk, clock)
    assert [row["arguments"]["time"][:16] for row in fired(desk, "hourly")] == [
        (full + timedelta(hours=hours)).isoformat()[:16] for hours in (0, 1, 6)
    ]


def test_a_schedule_whose_note_is_lost_fires_nothing_twice(desk: Layer, clock: Clock) -> None:
    number = define(desk, "daily", "note.time", schedule="@daily")
    clock.moment = datetime.now(UTC) + timedelta(days=3)
    for _ in range(2):
        Feed(desk, clock).times()
        desk.engine.release(f"cron/{number}", "cron")
    feeds = [Feed(desk, clock) for _ in range(3)]
    for feed in feeds:
        feed._times[number] = clock.moment - timedelta(days=2)  # as if each had not heard of the others
        feed.times()
    assert len(fired(desk, "daily")) == 1


# Ends


def test_a_function_follows_the_end_of_another(desk: Layer) -> None:
    define(desk, "then", "note.end", after_function="note.bare", after_status="done")
    define(desk, "always", "note.end", after_function="note.change")
    desk.call("note.bare")
    with pytest.raises(Invalid):
        desk.call("note.change", id="x")  # never came to be an execution of the function
    desk.call("note.change", id=1)
    first = desk.query("select id from execution where function = 'note.bare'")[0]["id"]
    work(desk)
    assert [row["arguments"] for row in fired(desk, "then")] == [{"execution": first, "status": "done"}]
    assert [row["arguments"]["status"] for row in fired(desk, "always")] == ["done"]


def test_a_cycle_of_triggers_ends_and_says_so(desk: Layer) -> None:
    sql(desk, "ping.pong", "select 1 as one")
    define(desk, "a", "ping.pong", after_function="note.bare")
    define(desk, "b", "note.bare", after_function="ping.pong")
    desk.call("note.bare")
    work(desk)
    rows = desk.query("select trigger, status, result from execution where trigger is not null order by id")
    assert [row["status"] for row in rows] == ["done"] * 16 + ["failed"]
    assert rows[-1]["result"]["error"]["message"] == "trigger cycle: a → b → a"
    assert work(desk)[0][0] == "start" and len(desk.query("select id from execution where trigger is not null")) == 17


# Again


def test_attempts_end_as_a_dead_letter_that_a_person_can_retry(desk: Layer, clock: Clock) -> None:
    desk.call(
        "function.define", name="note.wrong", language="sql", code="select 1 as one", signature={"arguments": {"id": "int!"}, "result": "int!"}
    )  # fmt: skip
    define(
        desk, "t", "note.wrong", on_entity="ticket", retries={"attempts": 3, "backoff": 10, "factor": 6, "jitter": 0}
    )
    ticket = desk.insert("ticket", {"title": "a"})
    statuses = []
    for seconds in (0, 9, 2, 55, 10, 3600):
        clock.forward(seconds=seconds)
        work(desk, clock)
        statuses.append([(row["attempt"], row["status"]) for row in fired(desk, "t")])
    assert statuses == [
        [(1, "failed"), (2, "queued")],
        [(1, "failed"), (2, "queued")],
        [(1, "failed"), (2, "failed"), (3, "queued")],
        [(1, "failed"), (2, "failed"), (3, "queued")],
        [(1, "failed"), (2, "failed"), (3, "dead")],
        [(1, "failed"), (2, "failed"), (3, "dead")],
    ]
    dead = desk.query("select id, parent, result from execution where status = 'dead'")
    assert len(dead) == 1 and "wrong type" in dead[0]["result"]["error"]["message"]
    assert dead[0]["parent"] == fired(desk, "t")[1]["id"]
    desk.principal("ann")
    with pytest.raises(NotFound):
        desk.call("execution.retry", id=dead[0]["id"], principal="ann")
    desk.grant("ann", "read", "execution")
    with pytest.raises(Denied):
        desk.call("execution.retry", id=dead[0]["id"], principal="ann")
    desk.call(
        "function.define", name="note.wrong", language="sql", code="select :id as n", signature={"arguments": {"id": "int!"}}
    )  # fmt: skip
    made = desk.call("execution.retry", id=dead[0]["id"], reason="mended")
    work(desk)
    row = desk.query("select status, parent, principal, arguments, result from execution where id = :id", {"id": made})
    assert row[0]["status"] == "done" and row[0]["parent"] == dead[0]["id"] and row[0]["arguments"] == {"id": ticket}
    with pytest.raises(Conflict, match="is done"):
        desk.call("execution.retry", id=made)
    with pytest.raises(NotFound):
        desk.call("execution.retry", id=1)


def test_what_is_queued_runs_at_its_version_and_what_is_tried_again_at_the_present_one(
    desk: Layer, clock: Clock
) -> None:
    define(desk, "t", "note.bare", on_entity="ticket")
    desk.insert("ticket", {"title": "a"})
    Feed(desk, clock).look()
    sql(desk, "note.bare", "select 2 as two")
    work(desk, clock)
    assert [row["result"]["value"] for row in fired(desk, "t")] == [[{"one": 1}]]
