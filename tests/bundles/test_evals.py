"""evals: a runner answers what it sees and never what is expected; what is done is scored, and can be compared."""

from __future__ import annotations

import pytest
from bundles.conftest import Apply, ended

from livinglayer import Layer
from livinglayer.errors import Denied, LayerError
from livinglayer.law.worker import Worker


@pytest.fixture
def lab(applied: Apply) -> Layer:
    layer = applied("evals")
    layer.principal("eva", roles=["evaluator"])
    return layer


def test_a_run_is_answered_scored_and_compared(lab: Layer, tended: None) -> None:
    told = lab.call("agent.run", contract="eval-runner", task="the next run", principal="eval-bot")
    done = ended(lab, told)
    assert done["status"] == "done", done
    lab.call("approval.answer", id=done["result"]["proposal"], approve=True)
    Worker(lab).run(once=True)
    assert lab.query("select status, function from execution where trigger = 'score-finished-runs'") == [
        {"status": "done", "function": "score.exact"}
    ]
    [run] = lab.query("select id from run")
    [summary] = lab.call("run.summary", id=run["id"], principal="eva")
    assert summary | {"id": 0} == {
        "id": 0, "suite": "echo", "candidate": "last word", "status": "done", "samples": 3, "answered": 3, "points": 2,
    }  # fmt: skip
    scores = lab.query(
        "select p.name, x.answer, x.value, x.why from score x join sample p on p.id = x.sample order by p.id",
        principal="eva",
    )
    assert scores == [
        {"name": "colour", "answer": "blue", "value": 1.0, "why": None},
        {"name": "number", "answer": "seven", "value": 1.0, "why": None},
        {"name": "trap", "answer": "one", "value": 0.0, "why": "expected 'two'"},
    ]
    assert lab.projection("leaderboard", suite="echo", principal="eva") == [
        {"candidate": "last word", "run": run["id"], "answered": 3, "points": 2.0}
    ]


CHEAT = """
for try in "layer query 'select expected from sample'" "layer query 'select value from score'" "layer call score.exact id=RUN" \\
    "layer insert sample name=x" "layer update run RUN candidate=me"; do
    sh -c "$try" >/dev/null 2>&1 && echo "worked: $try"
done
layer update run RUN status=running
layer insert score run=RUN sample=SAMPLE answer=two value=1.0 >/dev/null 2>&1 && echo "worked: scored itself"
true
"""


def test_a_candidate_can_neither_look_nor_score(lab: Layer, tended: None) -> None:
    [run], sample = lab.query("select id from run"), lab.query("select id from sample")[0]
    code = CHEAT.replace("RUN", str(run["id"])).replace("SAMPLE", str(sample["id"]))
    told = lab.call("agent.run", contract="eval-runner", task="cheat", command=["sh", "-c", code], principal="eval-bot")
    assert ended(lab, told)["status"] == "done"
    steps = lab.query("select kind, detail from step where execution = :e", {"e": told["execution"]})
    assert "worked" not in str([step["detail"] for step in steps if step["kind"] == "output"])
    assert len([step for step in steps if step["kind"] == "refusal"]) == 6
    with pytest.raises(LayerError):
        lab.query("select expected from sample", principal="eval-bot")
    with pytest.raises(Denied):
        lab.insert("score", {"run": run["id"], "sample": sample["id"], "value": 1.0}, principal="eval-bot")
