"""The command about the past: `layer replay`, which shows an execution, runs it again, or lets it take another course."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from livinglayer.edges.cli.commands import acting, arg, command
from livinglayer.edges.cli.functions import words
from livinglayer.edges.cli.table import BOLD, DIM, GREEN, RED, Printer, as_json, escape
from livinglayer.errors import Invalid

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS: dict[str, str] = {}


@command(
    "replay",
    arg("execution", type=int, metavar="EXECUTION"),
    arg("--verify", action="store_true", help="run it again in a fresh box and say whether every step is the same"),
    arg("--fork-at", type=int, metavar="N", help="from step N on take another course, on the new branch --branch"),
    arg("--code", metavar="FILE", help="with --fork-at: other code of the function; it comes with the branch"),
    arg("--prompt", metavar="TEXT", help="with --fork-at, of an agent: say this to its model there"),
    arg("--model", metavar="M", help="with --fork-at, of an agent: ask another model of its contract's API"),
    arg("--detach", action="store_true", help="with --fork-at, of an agent: do not watch it"),
    arg("--argument", action="append", metavar="NAME=VALUE", help="with --fork-at: another argument; again for more"),
    flags="as branch reason",
)
def replay(layer: Layer, args: Namespace, out: Printer) -> int | None:
    """Show what an execution did; with --verify run it again and compare, with --fork-at go on differently from a step."""
    from livinglayer.law import replay as law

    if args.fork_at is not None:
        return fork(layer, args, out)
    if args.code or args.argument or args.branch or args.prompt or args.model or args.detach:
        raise Invalid(
            "--code, --argument, --branch, --prompt, --model and --detach go with --fork-at",
            hint="layer replay 2031 --fork-at 4 --branch idea",
        )
    if args.verify:
        verdict = law.verify(layer, args.execution, acting(args))
        out.data(verdict.plain())
        out.say(str(verdict), GREEN if verdict else RED)
        return 0 if verdict else 1
    record = law.replay(layer, args.execution, acting(args))
    out.data(record.json())
    for line in () if out.json else record.lines():
        print(escape(line), file=out.out)
    return None


def fork(layer: Layer, args: Namespace, out: Printer) -> int:
    from livinglayer.law import functions
    from livinglayer.law import replay as law

    if args.verify:
        raise Invalid("choose one of --verify and --fork-at")
    row = law.replay(layer, args.execution, acting(args)).row
    if row["verb"] == "agent.run":
        return fork_agent(layer, args, out)
    if args.prompt or args.model or args.detach:
        raise Invalid(f"execution {args.execution} is no agent", hint="--prompt, --model and --detach are for agents")
    if not args.branch:
        raise Invalid("--fork-at needs the name of a new branch", hint="layer replay 2031 --fork-at 4 --branch idea")
    given: dict[str, Any] = {"execution": args.execution, "at": args.fork_at, "name": args.branch}
    if args.code:
        given["code"] = Path(args.code).read_text()
    if args.argument:
        if row["function"] is None:
            raise Invalid(f"execution {args.execution} is of no function", hint=f"layer replay {args.execution}")
        signature = functions.load(layer, row["function"], row["branch"] or "main").signature
        given["arguments"] = signature.parse(row["function"], words(args.argument))
    made = layer.call("execution.fork", given, principal=acting(args), reason=args.reason)
    out.data(made)
    if made["status"] != "done":
        out.say(made["error"]["message"], RED)
        return 1
    out.say(f"execution {made['execution']} on branch {made['branch']} gave {as_json(made['value'])}", GREEN)
    out.say(f"layer diff {made['branch']} shows what it changed, layer merge {made['branch']} brings it back", DIM)
    return 0


def fork_agent(layer: Layer, args: Namespace, out: Printer) -> int:
    """Let an agent go on differently, and watch it."""
    from livinglayer.edges.cli.agents import follow

    if args.code or args.argument:
        raise Invalid("--code and --argument are for functions", hint="an agent takes --prompt and --model")
    given = {
        "execution": args.execution,
        "at": args.fork_at,
        "prompt": args.prompt,
        "model": args.model,
        "name": args.branch,
    }
    made = layer.call("agent.fork", given, principal=acting(args), reason=args.reason)
    step = made["from"]["model"]
    where = "from its beginning" if step is None else f"from where its model was asked in step {step}"
    out.say(
        f"Agent {made['execution']} of {made['contract']} on branch {made['branch']}, as agent {args.execution} {where}",
        BOLD,
    )
    if args.detach:
        out.say(f"Watch it with: layer agent show {made['execution']} --follow")
        out.data(made)
        return 0
    return follow(layer, made["execution"], out, acting(args))
