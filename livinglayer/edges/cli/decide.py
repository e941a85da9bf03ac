"""`layer decide`: four questions about some code, and which walls it needs."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import livinglayer
from livinglayer.edges.cli import locate
from livinglayer.edges.cli.commands import acting, arg, command
from livinglayer.edges.cli.table import BOLD, DIM, GREEN, RED, Printer, escape
from livinglayer.errors import Invalid, NotFound
from livinglayer.jobs.decide import LEVELS, QUESTIONS, SUBSTRATE, Verdict, decide
from livinglayer.sandbox.blueprint import TIERS, Blueprint

GROUPS: dict[str, str] = {}  # it is one command


@command(
    "decide",
    *(arg(f"--{name}", metavar="|".join(answers), help=question) for name, (question, answers) in QUESTIONS.items()),
    arg("--contract", metavar="CONTRACT", help="keep the minimum as this contract's: below it, it gets no box"),
    flags="as branch reason",
    opens=False,
)
def run(args: Namespace, out: Printer) -> None:
    """Answer four questions about some code; get the weakest tier that will do, the one to take, where it runs, and why."""
    if args.contract is None and (
        unused := [name for name in ("dir", "as", "branch", "reason") if getattr(args, name)]
    ):
        raise Invalid(f"--{unused[0]} says nothing without --contract", hint="layer decide --contract CONTRACT")
    verdict = decide(**{name: getattr(args, name) or _ask(name) for name in QUESTIONS})
    stored = None if args.contract is None else _store(args, verdict)
    out.data(
        {
            "answers": verdict.answers, "minimum": verdict.minimum, "recommended": verdict.recommended,
            "level": verdict.level, "level_says": LEVELS[verdict.level], "placement": verdict.placement,
            "substrate": verdict.substrate, "substrate_says": SUBSTRATE[verdict.substrate], "why": verdict.why, "contract": stored,
        }
    )  # fmt: skip
    out.say(f"minimum      {verdict.minimum}", BOLD)
    out.say(f"recommended  {verdict.recommended}", GREEN)
    out.say(f"level        {verdict.level}: {LEVELS[verdict.level]}")
    out.say(f"where        {verdict.placement}")
    out.say(f"substrate    {SUBSTRATE[verdict.substrate]}")
    for line in verdict.why:
        out.say(f"  {line}", DIM)
    if stored:
        out.say(f"Contract {stored['name']}: minimum tier {verdict.minimum} (before: {stored['before'] or 'none'})")
        if stored["refused"]:
            out.say(f"! Its tier is {stored['tier']}: it gets no box until that is {verdict.minimum} or stronger.", RED)


def _ask(name: str) -> str:
    """One question on the terminal, answered by a number or a word; asked again until it is."""
    question, answers = QUESTIONS[name]
    if not sys.stdin.isatty():
        raise Invalid(f"there is nobody to ask, and --{name} is not given", hint=f"--{name} {'|'.join(answers)}")
    tell: Any = sys.stderr  # the answer alone goes to standard output
    print(escape(question), file=tell)
    for number, (word, (_, meaning)) in enumerate(answers.items(), 1):
        print(f"  {number}  {word:<9} {meaning}", file=tell)
    while True:
        print("> ", end="", file=tell, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise Invalid(f"no answer to {question!r}", hint=f"--{name} {'|'.join(answers)}")
        said = line.strip().lower()
        if said.isdecimal() and 1 <= int(said) <= len(answers):
            return list(answers)[int(said) - 1]
        if said in answers:
            return said
        print(f"a number from 1 to {len(answers)}, or one of {', '.join(answers)}", file=tell)


def _store(args: Namespace, verdict: Verdict) -> dict[str, Any]:
    """Write the minimum, and the answers it came from, into the contract."""
    at: dict[str, Any] = {"branch": args.branch or "main", "principal": acting(args)}
    with livinglayer.open(locate.find(args.dir)) as layer:
        rows = layer.query(
            "select c.id, c.name, c.minimum_tier, c.tier, b.tier as shaped from contract c"
            " left join blueprint b on b.id = c.blueprint where c.name = :name",
            {"name": args.contract}, **at,
        )  # fmt: skip
        if not rows:
            raise NotFound(f"there is no contract {args.contract!r}", hint="layer contract list")
        values = {"minimum_tier": verdict.minimum, "decided": verdict.answers}
        layer.call("row.update", entity="contract", id=rows[0]["id"], values=values, reason=args.reason, **at)
    tier = rows[0]["tier"] or rows[0]["shaped"] or Blueprint().tier
    return {
        "name": args.contract, "before": rows[0]["minimum_tier"], "tier": tier,
        "refused": TIERS.index(tier) < TIERS.index(verdict.minimum),
    }  # fmt: skip
