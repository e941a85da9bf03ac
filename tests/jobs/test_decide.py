"""decide agrees with the field manual's rules, written here once more, on all 108 inputs; its advice is never below them; the page shows it."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from livinglayer import Layer
from livinglayer.errors import Denied, Invalid
from livinglayer.jobs.decide import LEVELS, QUESTIONS, SUBSTRATE, Verdict, decide
from livinglayer.law import contracts
from livinglayer.sandbox.blueprint import TIERS

INPUTS = list(product((0, 1, 3), range(4), range(3), range(3)))
PAGE = (Path(__file__).parents[2] / "docs" / "decide.md").read_text()


def manual(author: int, reach: int, runs: int, egress: int) -> tuple[int, int, str]:
    """(level, rung, place) as the manual has it, in its own words and order."""
    rung = 0
    if author == 1:
        rung = 1
    if author == 3:
        rung = 3
    if author == 3 and (reach >= 2 or egress >= 1):
        rung = 4
    if reach == 3 and rung < 3:
        rung = 3
    if runs == 2 and rung >= 2:
        rung = 4
    place = "inside the VPC" if reach >= 2 or egress == 2 else "outside, public and ephemeral"
    if author == 0 and reach <= 1 and egress <= 1 and runs == 0:
        return 0, rung, place
    return (1 if rung <= 1 else 2 if rung <= 3 else 3), rung, place


@pytest.mark.parametrize("answers", INPUTS, ids=str)
def test_the_minimum_is_the_manuals(answers: tuple[int, int, int, int]) -> None:
    level, rung, place = manual(*answers)
    verdict = decide(*answers)
    assert (verdict.level, verdict.minimum, verdict.placement) == (level, TIERS[rung], place)
    assert TIERS.index(verdict.recommended) >= rung
    assert any(line.startswith(verdict.minimum) for line in verdict.why)
    assert any(line.startswith(f"better {verdict.recommended}") for line in verdict.why) == (
        verdict.recommended != verdict.minimum
    )
    assert decide(**verdict.answers) == verdict


def test_the_verdicts_are_as_many_as_the_manual_counts() -> None:
    found = Counter(
        (verdict.level, verdict.minimum, verdict.placement.partition(",")[0].split()[0])
        for verdict in (decide(*answers) for answers in INPUTS)
    )
    assert found == {
        (0, "process", "outside"): 4,
        (1, "process", "outside"): 8, (1, "process", "inside"): 15,
        (1, "namespace", "outside"): 12, (1, "namespace", "inside"): 15,
        (2, "gvisor", "outside"): 4, (2, "gvisor", "inside"): 12,
        (3, "microvm", "outside"): 8, (3, "microvm", "inside"): 30,
    }  # fmt: skip
    assert sum(found.values()) == 108


@pytest.mark.parametrize(
    ("answers", "recommended", "substrate"),
    [
        (("me", "nothing", "once", "none"), "process", 0),
        (("me", "public", "dev", "none"), "container", 0),  # development
        (("teammate", "nothing", "fleet", "none"), "container", 3),  # CI
        (("me", "private", "fleet", "none"), "container", 3),  # the manual's minimum is a process
        (("me", "nothing", "once", "public"), "namespace", 1),
        (("model", "nothing", "dev", "none"), "gvisor", 2),  # an agent's code
        (("model", "public", "fleet", "none"), "microvm", 3),  # untrusted, many
        (("model", "private", "once", "internal"), "microvm", 2),
        (("model", "secrets", "once", "public"), "vm", 2),  # nothing can go more wrong
    ],
)
def test_what_is_recommended(answers: tuple[str, str, str, str], recommended: str, substrate: int) -> None:
    verdict = decide(*answers)
    assert (verdict.recommended, verdict.substrate) == (recommended, substrate)


def test_every_tier_is_recommended_for_something_and_every_level_reached() -> None:
    verdicts = [decide(*answers) for answers in INPUTS]
    assert {verdict.recommended for verdict in verdicts} == set(TIERS)
    assert {verdict.level for verdict in verdicts} == set(range(len(LEVELS)))
    assert {verdict.substrate for verdict in verdicts} == set(range(len(SUBSTRATE)))


@pytest.mark.parametrize("wrong", [2, 4, -1, "nobody", "", None, True, "3 "])
def test_another_answer_is_refused(wrong: object) -> None:
    with pytest.raises(Invalid, match="is no answer to 'Who wrote the code"):
        decide(wrong, 0, 0, 0)  # type: ignore[arg-type]


def test_a_contract_below_its_verdict_is_refused_a_box(layer: Layer) -> None:
    """For every answer: each tier below the minimum gets no box, on its own or as an agent; none is made, each refusal is recorded."""
    layer.define("ticket", {"title": "text!"})
    minima = {decide(*answers).minimum: decide(*answers) for answers in INPUTS}
    refused = 0
    for minimum, verdict in minima.items():
        for tier in TIERS:
            layer.call(
                "contract.define", name="c", reads=["ticket"], tier=tier, minimum_tier=minimum, decided=verdict.answers, program="true"
            )  # fmt: skip
            if TIERS.index(tier) >= TIERS.index(minimum):
                contracts.strong_enough(contracts.load(layer, "c"))
                continue
            for verb, more in (("box.create", {}), ("agent.run", {"task": "x"})):
                with pytest.raises(Denied, match=f"asks for tier '{tier}', and '{minimum}' is the least"):
                    layer.call(verb, contract="c", **more)
                refused += 1
    assert refused == 2 * (0 + 1 + 3 + 4)
    statuses = "select distinct status from execution where verb in ('box.create', 'agent.run')"
    assert layer.query(statuses) == [{"status": "denied"}]
    assert layer.query("select id from execution where kind = 'contract'") == []
    assert [row["name"] for row in layer.query("select name from branch")] == ["main"]
    assert len(layer.query("select id from decision where resource = 'contract:c' and allowed = false")) == refused


def cell(verdict: Verdict) -> str:
    better = "" if verdict.recommended == verdict.minimum else f" → {verdict.recommended}"
    return f"{verdict.level} {verdict.minimum}{better}"


def table() -> list[list[str]]:
    """The published table: a row for each author, reach and egress, a column for each way to run."""
    words = {question: list(answers) for question, (_, answers) in QUESTIONS.items()}
    return [
        [author, reach, egress, *(cell(decide(author, reach, runs, egress)) for runs in words["runs"]),
         decide(author, reach, "once", egress).placement.split(",")[0].split()[0]]
        for author, reach, egress in product(words["author"], words["reach"], words["egress"])
    ]  # fmt: skip


def test_the_page_shows_every_verdict() -> None:
    shown = [
        [part.strip() for part in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")
    ]
    start = next(at for at, row in enumerate(shown) if row[:3] == ["author", "reach", "egress"])
    assert shown[start : start + 37] == [["author", "reach", "egress", *QUESTIONS["runs"][1], "where"], *table()]


def test_the_page_names_every_answer() -> None:
    for question, (asked, answers) in QUESTIONS.items():
        row = re.search(rf"^\| `--{question}` \| {re.escape(asked)} \| (.*) \|$", PAGE, re.M)
        assert row, question
        assert row[1] == ", ".join(f"`{word}` ({number}: {meaning})" for word, (number, meaning) in answers.items())
    for level in LEVELS:
        assert level in PAGE
