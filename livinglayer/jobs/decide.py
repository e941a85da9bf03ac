"""decide: four answers about some code give the weakest tier that will do, the one we would take, where it runs, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Invalid
from ..sandbox.blueprint import TIERS

# Each question, and its answers: a word, how far it reaches, what it means. Nothing lies between a teammate and a model.
QUESTIONS: dict[str, tuple[str, dict[str, tuple[int, str]]]] = {
    "author": (
        "Who wrote the code?",
        {
            "me": (0, "I did, or I have read it"),
            "teammate": (1, "a teammate reviewed it"),
            "model": (3, "a model wrote it, unreviewed"),
        },
    ),
    "reach": (
        "What can it reach?",
        {
            "nothing": (0, "nothing sensitive"),
            "public": (1, "public data only"),
            "private": (2, "private data, internal services"),
            "secrets": (3, "production secrets"),
        },
    ),
    "runs": (
        "How does it run?",
        {
            "once": (0, "once"),
            "dev": (1, "in an interactive dev loop"),
            "fleet": (2, "thousands in parallel"),
        },
    ),
    "egress": (
        "Where can it send?",
        {
            "none": (0, "nowhere"),
            "public": (1, "the public internet"),
            "internal": (2, "internal services"),
        },
    ),
}
LEVELS = ("just run it", "light isolation", "sandbox it", "isolate aggressively")
INSIDE, OUTSIDE = "inside the VPC", "outside, public and ephemeral"
SUBSTRATE = (
    "rows and schema",
    "rows and schema, permissions and history",
    "rows and schema, permissions and history, contracts, projections and replay",
    "rows and schema, permissions and history, contracts, projections and replay, fork, merge and causes",
)
PROCESS, NAMESPACE, CONTAINER, GVISOR, MICROVM, VM = range(len(TIERS))


@dataclass(frozen=True)
class Verdict:
    """What four answers come to. The law holds a contract to the minimum; the rest is advice."""

    answers: dict[str, str]
    minimum: str
    level: int
    placement: str
    recommended: str
    substrate: int
    why: tuple[str, ...]


def decide(author: str | int, reach: str | int, runs: str | int, egress: str | int) -> Verdict:
    """The verdict on four answers, each a word or its number in QUESTIONS; another one is Invalid."""
    given = {"author": author, "reach": reach, "runs": runs, "egress": egress}
    words = {question: _word(question, answer) for question, answer in given.items()}
    wrote, touches, often, sends = (QUESTIONS[question][1][word][0] for question, word in words.items())
    why = []

    # The minimum: the field manual's rules, as they are.
    rung = PROCESS
    if wrote == 1:
        rung = NAMESPACE
        why.append("namespace: somebody else wrote it, even though it was reviewed")
    if wrote == 3:
        rung = GVISOR
        why.append("gvisor: nobody has read it, so it does not get the host's kernel")
        if touches >= 2 or sends >= 1:
            rung = MICROVM
            why.append("microvm: unread code that sees private data or can send something needs a kernel of its own")
    if touches == 3 and rung < GVISOR:
        rung = GVISOR
        why.append("gvisor: production secrets are within its reach")
    if often == 2 and rung >= CONTAINER and rung < MICROVM:
        rung = MICROVM
        why.append("microvm: thousands at once make a rare hole a certain one")
    inside = touches >= 2 or sends == 2
    level = (
        0 if (wrote, often) == (0, 0) and touches <= 1 and sends <= 1 else 1 if rung <= NAMESPACE else 2 if rung <= GVISOR else 3
    )  # fmt: skip
    if rung == PROCESS:
        why.append("process: you know the code, so limits will do")
    why.append(
        f"{INSIDE}: it touches what is yours, and that should not travel"
        if inside
        else f"{OUTSIDE}: nothing of yours is near it, and nothing should come near"
    )

    # What we would take: what each tier is for. Never less than the minimum.
    better, because = rung, ""
    for tier, applies, reason in (
        (NAMESPACE, sends >= 1, "a process has no egress rules, and records nothing of what it sends"),
        (CONTAINER, often >= 1, "development and CI belong in containers"),
        (CONTAINER, touches >= 2 or sends == 2, "your own code has bugs too, and here they would meet private data"),
        (VM, wrote == 3 and touches == 3 and (sends >= 1 or often == 2), "unread code with production secrets and a way out: nothing can go more wrong"),
    ):  # fmt: skip
        if applies and tier > better:
            better, because = tier, reason
    if because:
        why.append(f"better {TIERS[better]}: {because}")

    substrate = 3 if often == 2 else 2 if wrote == 3 else 1 if touches >= 2 or sends >= 1 else 0
    why.append(
        (
            "rows and schema: it reads, and changes nothing outside",
            "+ permissions and history: it can change the world, so who may and who did must be known",
            "+ contracts, projections and replay: an agent acts, so what it may see and do is said beforehand",
            "+ fork, merge and causes: a fleet tries what if, and somebody must compare",
        )[substrate]
    )
    place = INSIDE if inside else OUTSIDE
    return Verdict(words, TIERS[rung], level, place, TIERS[better], substrate, tuple(why))


def _word(question: str, answer: str | int) -> str:
    answers = QUESTIONS[question][1]
    for word, (number, _) in answers.items():
        if answer == word or str(answer) == str(number):
            return word
    raise Invalid(
        f"{answer!r:.60} is no answer to {QUESTIONS[question][0]!r}", hint=f"{question}: {', '.join(answers)}"
    )
