"""personal: mail and calendars are read in boxes, whatever is in them; the brief is written without a network."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from bundles.conftest import Apply, ended

from livinglayer import Layer
from livinglayer.errors import Denied, NotFound
from livinglayer.law.worker import Worker

MBOX = """From ada@example.com Mon Jan  5 10:00:00 2026
From: =?utf-8?q?Ada_L=C3=B8vel?= <ada@example.com>
To: me@example.com
Subject: =?utf-8?b?Q2Fmw6k=?= at ten?
Date: Mon, 05 Jan 2026 10:00:00 +0100
Message-ID: <1@example.com>
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary=b

--b
Content-Type: text/plain; charset=iso-8859-1
Content-Transfer-Encoding: quoted-printable

Un caf=E9?
--b
Content-Type: text/plain
Content-Disposition: attachment; filename=x.txt

not this
--b--

From bob@example.com Tue Jan  6 10:00:00 2026
From: bob@example.com
Subject: =?no-such-charset?q?odd?=
Date: the day before yesterday
Message-ID: <2@example.com>
Content-Type: text/plain; charset=no-such-charset

>From here on it is plain.

From bob@example.com Tue Jan  6 10:00:00 2026
From: bob@example.com
Message-ID: <2@example.com>

The same again.

From nobody Tue Jan  6 10:00:00 2026

no header at all
"""
ICS = """BEGIN:VCALENDAR
VERSION:2.0
BEGIN:VEVENT
UID:1@example.com
SUMMARY:Lunch\\, with Ada and every
 body
DTSTART;TZID=Europe/Berlin:20260705T120000
DTEND;TZID=Europe/Berlin:20260705T130000
LOCATION:The Bay\\; downstairs
BEGIN:VALARM
TRIGGER:-PT15M
SUMMARY:not this
END:VALARM
END:VEVENT
BEGIN:VEVENT
UID:2@example.com
SUMMARY:Holiday
DTSTART;VALUE=DATE:20260706
END:VEVENT
BEGIN:VEVENT
UID:3@example.com
SUMMARY:In a zone nobody knows
DTSTART;TZID=Moon/Tycho:20260707T120000
END:VEVENT
BEGIN:VEVENT
UID:4@example.com
DTSTART:whenever
END:VEVENT
BEGIN:VEVENT
SUMMARY:Without an id
DTSTART:20260707T120000Z
END:VEVENT
END:VCALENDAR
"""


@pytest.fixture
def mine(applied: Apply) -> Layer:
    return applied("personal")


def upload(layer: Layer, format: str, content: str) -> dict[str, int]:
    """What the import that follows an upload says."""
    layer.insert("upload", {"name": "x", "format": format, "content": content})
    Worker(layer).run(once=True)
    last = "select status, result from execution where trigger is not null order by id desc limit 1"
    [run] = layer.query(last)
    assert run["status"] == "done", run
    found: dict[str, int] = run["result"]["value"]
    return found


def test_mail_comes_from_an_mbox(mine: Layer) -> None:
    assert upload(mine, "mbox", MBOX) == {"imported": 3, "skipped": 1}
    first, second, third = mine.query(
        "select message_id, sender, recipients, subject, sent, body, seen from mail order by id"
    )
    assert first == {
        "message_id": "<1@example.com>", "sender": "Ada Løvel <ada@example.com>", "recipients": "me@example.com", "subject": "Café at ten?",
        "sent": datetime(2026, 1, 5, 9, tzinfo=UTC), "body": "Un café?", "seen": False,
    }  # fmt: skip
    assert (second["sent"], second["body"]) == (None, ">From here on it is plain.")
    assert third["sender"] == "unknown" and third["message_id"].startswith("sha256:")
    assert upload(mine, "mbox", MBOX) == {"imported": 0, "skipped": 4}
    assert upload(mine, "mbox", "this is no mailbox") == {"imported": 0, "skipped": 0}


def test_events_come_from_an_ics(mine: Layer) -> None:
    assert upload(mine, "ics", ICS.replace("\n", "\r\n")) == {"imported": 3, "skipped": 2}
    assert mine.query("select title, starts, ends, all_day, place from event order by starts") == [
        {"title": "Lunch, with Ada and everybody", "starts": datetime(2026, 7, 5, 10, tzinfo=UTC),
         "ends": datetime(2026, 7, 5, 11, tzinfo=UTC), "all_day": False, "place": "The Bay; downstairs"},
        {"title": "Holiday", "starts": datetime(2026, 7, 6, tzinfo=UTC), "ends": None, "all_day": True, "place": None},
        {"title": "In a zone nobody knows", "starts": datetime(2026, 7, 7, 12, tzinfo=UTC), "ends": None, "all_day": False, "place": None},
    ]  # fmt: skip
    assert upload(mine, "ics", ICS.replace("Holiday", "Holidays")) == {"imported": 3, "skipped": 2}
    assert [row["title"] for row in mine.query("select title from event order by starts")][1] == "Holidays"
    assert upload(mine, "ics", "END:VEVENT\nBEGIN\n:::") == {"imported": 0, "skipped": 1}
    assert [
        (row["kind"], row["title"], row["day"], row["at"]) for row in mine.projection("agenda", day="2026-07-06")
    ] == [
        ("event", "Holidays", "2026-07-06", "00:00"),
        ("event", "In a zone nobody knows", "2026-07-07", "12:00"),
        ("task", "Renew the passport", "2026-09-30", ""),
    ]


def test_a_message_becomes_a_task(mine: Layer) -> None:
    upload(mine, "mbox", MBOX)
    mail = mine.projection("inbox")
    task = mine.call("task.from_mail", id=mail[-1]["id"], due="2026-02-01")
    assert mine.query("select title, about from task where id = :id", {"id": task}) == [
        {"title": mine.query("select subject from mail where id = :id", {"id": mail[-1]["id"]})[0]["subject"] or "Answer unknown",
         "about": mail[-1]["id"]}
    ]  # fmt: skip
    assert len(mine.projection("inbox")) == 2


def test_the_brief_is_written_in_a_box_that_reaches_nothing(mine: Layer, tended: None) -> None:
    upload(mine, "mbox", MBOX)
    soon = datetime.now(UTC) + timedelta(minutes=1)
    mine.insert("event", {"uid": "now", "title": "Standup", "starts": soon, "place": "here"})
    told = mine.call("agent.run", contract="daily-brief", task="today", principal="briefer")
    done = ended(mine, told)
    assert done["status"] == "done", done
    [note] = mine.query("select title, body from note where title like 'Brief of %'", branch=told["branch"])
    assert note["title"].startswith("Brief of 20")
    assert f"- {soon:%H:%M} Standup (here)" in note["body"] and "- Renew the passport, due 2026-09-30" in note[
        "body"
    ].replace("late", "due")
    assert "- Ada Løvel <ada@example.com>: Café at ten?" in note["body"]
    steps = mine.query("select kind, detail from step where execution = :e", {"e": told["execution"]})
    assert [step["detail"]["name"] for step in steps if step["kind"] == "artifact"] == ["brief.md"]
    assert mine.query("select id from note where title like 'Brief of %'") == []
    mine.call("approval.answer", id=done["result"]["proposal"], approve=True)
    assert len(mine.query("select id from note where title like 'Brief of %'")) == 1


NOSY = """
for try in "layer query 'select body from mail'" "layer query 'select id from upload'" "layer insert task title=x" \\
    "layer insert note title=Hello body=x" "curl -sS -m 5 https://example.com" "layer update mail 1 seen=true"; do
    sh -c "$try" >/dev/null 2>&1 && echo "worked: $try"
done
echo x > brief.md; layer artifact brief.md >/dev/null; true
"""


def test_the_one_who_writes_it_sees_and_writes_no_more_than_it_needs(mine: Layer, tended: None) -> None:
    upload(mine, "mbox", MBOX)
    told = mine.call("agent.run", contract="daily-brief", task="snoop", command=["sh", "-c", NOSY], principal="briefer")
    assert ended(mine, told)["status"] == "done"
    steps = mine.query("select kind, detail from step where execution = :e", {"e": told["execution"]})
    assert "worked" not in str([step["detail"] for step in steps if step["kind"] == "output"])
    with pytest.raises((Denied, NotFound)):
        mine.query("select body from note", principal="briefer")
