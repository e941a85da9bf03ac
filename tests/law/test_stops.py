"""Stops: a box that loops or ignores refusals ends by itself, also when its contract says nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
from law.test_approvals import CLERK, begin, make, office, outcome  # noqa: F401  (a fixture)

from livinglayer import Layer
from livinglayer.errors import Invalid, NotFound
from livinglayer.law import tending

PLAIN = {key: value for key, value in CLERK.items() if key != "approvals"}
DENIED = "try: layer.call('row.insert')\n    except layer.LayerError: pass"
INVALID = "try: layer.query('select nothing')\n    except layer.LayerError: pass"


@pytest.mark.parametrize(
    ("stops", "code", "said", "count"),
    [
        ([], f"for n in range(100000):\n    layer.query(f'select {{n}} as n')\n    {DENIED}", "stopped after 100 denials", 100),
        ([], "for n in range(100000):\n    layer.me()", "stopped after asking the same 100 times in a row", 0),
        ([{"denials": 3}], f"for n in range(100000):\n    {DENIED}", "stopped after 3 denials", 3),
        ([{"refusals": 5}, {"refusals": 7}], f"for n in range(100000):\n    {INVALID}", "stopped after 5 refusals", 5),
        ([{"repeats": 4}], "for n in range(100000):\n    layer.query('select 1 as n')", "asking the same 4 times", 0),
    ],
)  # fmt: skip
def test_a_box_that_goes_on_and_on_is_stopped(
    office: Layer, stops: list[Any], code: str, said: str, count: int  # noqa: F811
) -> None:  # fmt: skip
    office.call("contract.define", {**PLAIN, "stops": stops})
    box, told = make(office)
    begin(box, code)
    end = outcome(office, told["execution"])
    assert (end["status"], end["result"]["error"]["code"]) == ("failed", "limit_exceeded")
    assert said in end["result"]["error"]["message"]
    steps = office.query("select kind from step where execution = :e", {"e": told["execution"]})
    assert sum(step["kind"] == "refusal" for step in steps) == count


def test_a_row_that_was_waited_for_ends_a_box_as_done(office: Layer) -> None:  # noqa: F811
    office.call("contract.define", {**PLAIN, "stops": [{"query": "select id from ticket where priority = 7"}]})
    box, told = make(office)
    begin(box, "import time; time.sleep(1); layer.insert('ticket', title='there', priority=7); time.sleep(60)")
    end = outcome(office, told["execution"])
    assert end["status"] == "done" and end["result"]["stopped"] == "select id from ticket where priority = 7"


def test_what_was_counted_is_counted_on_by_whoever_comes_next(office: Layer) -> None:  # noqa: F811
    office.call("contract.define", {**PLAIN, "stops": [{"denials": 4}]})
    box, told = make(office)
    code = f"for n in range(3):\n    {DENIED}"
    box.run(["python3", "-c", f"import layer\n{code}"])
    tending.of(office).close()
    assert (
        office.query("select status from execution where id = :e", {"e": told["execution"]})[0]["status"] == "running"
    )
    tending.of(office).look()
    begin(box, f"import time\nfor n in range(1000):\n    time.sleep(0.01)\n    {DENIED}")
    end = outcome(office, told["execution"])
    assert "stopped after 4 denials" in end["result"]["error"]["message"]
    decisions = office.query("select 1 as n from decision where execution = :e", {"e": told["execution"]})
    assert len(decisions) == 4


@pytest.mark.parametrize(
    "stops",
    [{"denials": 3}, [{"denials": 0}], [{"denials": True}], [{"wishes": 3}], [{"denials": 1, "refusals": 2}], ["never"],
     [{"query": 3}], [{"query": "select * from nothing"}], [{"query": "delete from ticket"}], [{"repeats": 10**9}]],
)  # fmt: skip
def test_stops_that_could_not_be_are_refused(desk: Layer, stops: Any) -> None:
    with pytest.raises((Invalid, NotFound)):
        desk.call("contract.define", {"name": "x", "reads": ["ticket"], "stops": stops})
