"""The commands about agents: `layer agent …`. What one does is shown as it does it; at its end, what came of it and what to do next."""

from __future__ import annotations

import json
import sys
import time
from argparse import REMAINDER, Namespace
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from livinglayer.edges.cli.approvals import wanted
from livinglayer.edges.cli.commands import acting, arg, changes, command, flat
from livinglayer.edges.cli.commands import seconds as to_the_second
from livinglayer.edges.cli.table import BOLD, DIM, GREEN, RED, Printer, counted, cut, escape, text
from livinglayer.errors import Invalid, LayerError, NotFound

if TYPE_CHECKING:
    from livinglayer import Layer

GROUPS = {"agent": "Contracts at work: started with a task, watched, reviewed, stopped."}
AGENT = arg("agent", metavar="AGENT", help="its execution's number, or the name of its branch or box")
YELLOW, CYAN = "33", "36"
LOOK = 0.2  # seconds between two looks at an agent


@command(
    "agent run",
    arg("contract", help="the contract it acts under"),
    arg("--task", metavar="TEXT", help="what it is to do; - reads standard input"),
    arg("--from", dest="source", default="main", metavar="BRANCH", help="fork its branch from this one (default: main)"),
    arg("--on", metavar="BRANCH", help="work on this branch itself; nothing is proposed then"),
    arg("--name", help="what its branch and its box are called by"),
    arg("--model", metavar="M", help="another model than the contract's, at the same place"),
    arg("--no-propose", action="store_true", help="do not ask for a merge at its end"),
    arg("--detach", action="store_true", help="do not watch it"),
    arg("--program", nargs=REMAINDER, metavar="COMMAND", help="a program instead of the contract's: all that comes after this flag"),
    flags="as reason", place="both",
)  # fmt: skip
def run(layer: Layer, args: Namespace, out: Printer) -> int:
    """Give a task to an agent of a contract, on a branch of its own, and watch it; Ctrl-C leaves it to itself."""
    if not args.task:
        raise Invalid("an agent needs a task", hint=f'layer agent run {args.contract} --task "…"')
    given = {
        "contract": args.contract, "task": sys.stdin.read() if args.task == "-" else args.task, "source": args.source, "on": args.on,
        "command": args.program or None, "model": args.model, "name": args.name, "propose": not args.no_propose,
    }  # fmt: skip
    told = layer.call("agent.run", given, principal=acting(args), reason=args.reason)
    number = told["execution"]
    where = f"on {told['branch']}" if args.on else f"on branch {told['branch']}, forked from {args.source}"
    out.say(f"Agent {number} of {told['contract']} {where}; box {told['box']}, tier {told['tier']}", BOLD)
    if args.detach:
        out.say(f"Watch it with: layer agent show {number} --follow")
        out.data(told)
        return 0
    # --as says whom the agent acts for; who watches is whoever sits here, with permissions of their own
    return follow(layer, number, out, None)


@command("agent list", arg("--all", action="store_true", help="also those that ended more than a day ago"), flags="as")
def list_(layer: Layer, args: Namespace, out: Printer) -> None:
    """Agents, the newest last: what they were asked to do and how that stands."""
    since = "" if args.all else " and (x.finished is null or x.finished > :since)"
    sql = (
        "select x.id as agent, x.contract, x.principal, x.branch, x.status, x.started, x.arguments, x.result from execution x"
        f" where x.verb = 'agent.run' and x.kind = 'contract'{since} order by x.id"
    )
    params = {} if args.all else {"since": datetime.now(UTC) - timedelta(days=1)}
    rows = []
    for row in layer.query(sql, params, principal=acting(args)):
        given, result = row.pop("arguments") or {}, row.pop("result") or {}
        rows.append(row | {"proposal": result.get("proposal"), "task": (given.get("agent") or {}).get("task")})
    out.rows(rows if out.json else to_the_second(rows), noun="agent")


@command(
    "agent show",
    AGENT,
    arg("--follow", action="store_true", help="go on showing what it does until it ends"),
    flags="as",
)
def show(layer: Layer, args: Namespace, out: Printer) -> int:
    """All that an agent did, step by step, and what came of it."""
    from livinglayer.law import agents

    number = agents.find(layer, args.agent)
    if args.follow:
        return follow(layer, number, out, acting(args))
    Watch(layer, number, out, acting(args)).look()
    summary(layer, number, out, acting(args))
    return 0


@command("agent stop", AGENT, flags="as reason", place="both")
def stop(layer: Layer, args: Namespace, out: Printer) -> None:
    """End an agent now; what it changed stays on its branch."""
    told = layer.call("agent.stop", agent=args.agent, principal=acting(args), reason=args.reason)
    out.say(f"Stopped agent {told['stopped']}")
    out.data(told)


@command(
    "agent review",
    arg("proposal", metavar="PROPOSAL", help="the number of a proposed merge, or an agent"),
    flags="as",
)
def review(layer: Layer, args: Namespace, out: Printer) -> None:
    """What an agent proposes to merge: rows by field, changes of policy and schema, files."""
    from livinglayer.law import agents

    found = agents.review(layer, agents.proposal(layer, args.proposal), principal=acting(args))
    out.data(found | {"rows": [flat(row) for row in found["rows"]], "policy": [flat(row) for row in found["policy"]]})
    if out.json:
        return
    out.say(
        f"Proposal {found['approval']} of agent {found['execution']} ({found['contract']}): merge {found['branch']}, {found['status']}",
        BOLD,
    )
    if found["policy"]:
        out.say()
        out.say(f"! It changes how the layer is governed: {counted(len(found['policy']), 'row')}", RED)
        for row in found["policy"]:
            values = ", ".join(
                _became(row["op"], name, *both)
                for name, both in row["fields"].items()
                if any(one is not None for one in both)
            )
            out.say(f"! {row['op']} {row['entity']}/{row['id']}: {values}", RED)
    out.say()
    changes(found["rows"], out)
    if found["unseen"]:
        out.say(
            f"! {counted(found['unseen'], 'row')} more would be merged that {'is' if found['unseen'] == 1 else 'are'} not shown here",
            RED,
        )
        out.say(f"  You may not read them, or there are too many: layer diff {found['branch']} --json")
    for title, key in (("Files", "files"), ("Artifacts", "artifacts")):
        if found[key]:
            out.say()
            out.say(f"{title}")
            for one in found[key]:
                what = one.get("kind") or f"{one.get('bytes')} bytes"
                out.say(f"  {what:<10} {one.get('path') or one.get('name')}")
    if found["moved"]:
        out.say()
        out.say("The branch has changed since this was proposed: approving it will be refused.", RED)
        out.say(f"Merge what is there now with: layer merge {found['branch']}")
    elif found["status"] == "pending":
        out.say()
        out.say(f"layer approve {found['approval']}   or   layer refuse {found['approval']} --reason …", BOLD)


def _became(op: str, name: str, before: Any, after: Any) -> str:
    """A field of what governs the layer: what it was, where it was something, and what it would be."""
    was = f"{text(before)} → " if op == "update" else ""
    return f"{name} = {was}{text(before if op == 'delete' else after)}"


# Watching


def follow(layer: Layer, number: int, out: Printer, principal: str | None) -> int:
    """Show what an agent does until it ends; 0 when it is done, 3 when it was not allowed, else 1."""
    watch = Watch(layer, number, out, principal)
    try:
        while watch.look() == "running":
            time.sleep(LOOK)
        watch.look()
    except NotFound:
        out.say(f"{principal or layer.me} may not read execution and step, so it is not shown; agent {number} goes on.")
        out.data({"agent": number, "status": None})
        return 0
    except KeyboardInterrupt:
        out.say()
        out.say(
            f"Left to itself: agent {number} goes on. layer agent show {number} --follow, layer agent stop {number}"
        )
        return 0
    found = summary(layer, number, out, principal)
    return {"done": 0, "denied": 3}.get(str(found["status"]), 1)


class Watch:
    """What an agent has done, shown once each."""

    def __init__(self, layer: Layer, number: int, out: Printer, principal: str | None) -> None:
        from livinglayer.law import agents
        from livinglayer.law.programs import LOOP

        self.layer, self.number, self.out, self.principal = layer, number, out, principal
        self.seen = 0
        self.loop = agents.given(layer, number)["agent"]["argv"] == LOOP  # it prints its calls itself
        self.last = ""

    def look(self) -> str:
        """Show what is new; its status."""
        row = self.layer.query(
            "select status from execution where id = :id", {"id": self.number}, principal=self.principal
        )
        sql = "select n, kind, detail from step where execution = :id and n > :n order by n"
        for step in self.layer.query(sql, {"id": self.number, "n": self.seen}, principal=self.principal):
            self.seen = step["n"]
            if not self.out.json:
                self.show(step["kind"], step["detail"])
        return str(row[0]["status"]) if row else "gone"

    def show(self, kind: str, detail: dict[str, Any]) -> None:
        """One step, if a person wants to see it."""
        if kind == "output":
            self.printed(detail)
        elif kind == "approval" and detail["status"] == "pending":
            self.say(f"⏸ waits for somebody's yes to {detail['do']} {detail['resource']}{self.asked(detail)}", YELLOW)
            self.say(
                f"  layer approve {detail['approval']}   or   layer refuse {detail['approval']} --reason …", YELLOW
            )
        elif kind == "approval":
            said = f": {detail['answer']}" if detail.get("answer") else ""
            self.say(f"▶ {detail['status']}{said}", GREEN if detail["status"] in ("approved", "done") else RED)
        elif kind == "network" and detail.get("verdict") == "deny":
            self.say(f"✗ {detail.get('host')}:{detail.get('port')} {detail.get('reason') or 'refused'}", RED)
        elif kind == "limit":
            self.say(f"! {detail.get('limit')} limit", RED)
        elif kind == "refusal" and not self.loop:
            self.say(f"✗ {detail['do']}: {detail['message']}", RED)
        elif not self.loop and (line := self.told(kind, detail)):
            self.say(line, CYAN)

    def asked(self, detail: dict[str, Any]) -> str:
        """What exactly it asks for, where that may be read."""
        try:
            sql = "select request, reason from approval where id = :id"
            (row,) = self.layer.query(sql, {"id": detail["approval"]}, principal=self.principal)
        except (LayerError, ValueError):
            return ""
        return f" {wanted(row)}" + (f": {row['reason']}" if row["reason"] else "")

    def told(self, kind: str, detail: dict[str, Any]) -> str | None:
        """What the layer did for a program, in a line."""
        if kind == "query":
            what = detail.get("projection") or " ".join(str(detail.get("sql") or "slice").split())
            return f"· {cut(str(what), 100)}  ({counted(detail.get('rows') or 0, 'row')})"
        if kind == "mutation":
            return f"· {detail['do']} {detail['entity']}/{detail['id']}: {', '.join(detail['fields'])}"
        if kind == "call":
            return f"· call {detail['function']}"
        if kind == "artifact":
            return f"· kept {detail['name']}, {detail['bytes']} bytes"
        if kind == "model":
            return f"· {detail.get('model')}: {detail.get('input') or 0} tokens in, {detail.get('output') or 0} out"
        return None

    def printed(self, detail: dict[str, Any]) -> None:
        if "lost" in detail:
            return self.say(f"… {detail['lost']} bytes were not caught", DIM)
        if "text" not in detail:
            return self.say(f"… {detail['bytes']} bytes more (kept by content, sha256 {detail['content'][:12]}…)", DIM)
        for line in detail["text"].splitlines():
            colour = {"→": CYAN, "✗": RED, "←": DIM}.get(line[:1], "") if self.loop else ""
            self.say(line if self.loop else f"│ {line}", RED if detail["stream"] == "stderr" else colour)

    def say(self, line: str, colour: str = "") -> None:
        line = escape(line)
        if line == self.last and line.startswith("✗"):
            return  # asked twice, refused twice
        self.last = line
        if self.out.columns is not None:
            line = line if len(line) < 4 * self.out.columns else cut(line, 4 * self.out.columns)
        print(self.out.paint(line, colour) if colour else line, file=self.out.out, flush=True)


def summary(layer: Layer, number: int, out: Printer, principal: str | None) -> dict[str, Any]:
    """What came of an agent so far, and what to do next."""
    found = account(layer, number, principal)
    out.data(found)
    if out.json:
        return found
    good = found["status"] in ("done", "running")
    out.say()
    out.say(f"{found['status']} after {found['seconds']:.1f} s", GREEN if good else RED)
    if found["error"]:
        out.say(found["error"]["message"], RED)
        if found["error"].get("hint"):
            out.say(f"hint: {found['error']['hint']}")
    steps, denied = found["steps"], found["denials"]
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(steps).most_common(6))
    rows = "; ".join(f"{e}: {', '.join(f'{n} {op}' for op, n in by.items())}" for e, by in found["rows"].items())
    rows += {"done": " (merged)", "refused": " (refused)"}.get(str(found["proposed"]), "")
    lines = {
        "answer": found["answer"], "exit code": found["exit_code"] or None, "steps": f"{sum(steps.values())} ({kinds})",
        "tokens": f"{found['input']:,} in, {found['output']:,} out, {counted(found['asked'], 'answer')}" if found["asked"] else None,
        "money": f"{found['money']:.4f}" if found["money"] else None, "denials": denied or None,
        "rows": rows or ("none changed" if found["status"] == "running" else "none changed: there is nothing to propose"), "files": found["files"] or None, "branch": found["branch"],
    }  # fmt: skip
    for name, value in lines.items():
        if value is not None:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            first, *more = shown.splitlines() or [""]
            print(out.paint(f"{name:<10}", BOLD) + escape(first), file=out.out)
            for line in more[:20]:
                print(" " * 10 + escape(line), file=out.out)
    if following := found["next"]:
        out.say()
        out.say(f"Next: {following}", BOLD)
    return found


def account(layer: Layer, number: int, principal: str | None = None) -> dict[str, Any]:
    """An agent in numbers."""
    sql = "select contract, branch, status, started, finished, result, arguments from execution where id = :id"
    (row,) = layer.query(sql, {"id": number}, principal=principal)
    rows = layer.query(
        "select kind, detail from step where execution = :id order by n", {"id": number}, principal=principal
    )
    told, result = Counter(step["kind"] for step in rows), row["result"] or {}
    asked = [step["detail"] for step in rows if step["kind"] == "model"]
    ended = row["finished"] or datetime.now(UTC)
    counts: dict[str, Counter[str]] = {}
    if row["branch"] != "main":
        try:
            for change in layer.diff(row["branch"], principal=principal):
                counts.setdefault(change["entity"], Counter())[change["op"]] += 1
        except LayerError:
            pass  # the branch is closed
    proposed = _proposed(layer, result.get("proposal"), principal)
    if proposed.get("status") not in (None, "pending"):  # its branch has nothing left to tell
        counts = {entity: Counter(by) for entity, by in proposed["request"]["rows"].items()}
    found = {
        "agent": number, "contract": row["contract"], "branch": row["branch"], "status": row["status"],
        "seconds": (ended - row["started"]).total_seconds(), "answer": result.get("answer"), "error": result.get("error"),
        "exit_code": result.get("exit_code"), "proposal": result.get("proposal"), "proposed": proposed.get("status"), "steps": dict(told), "asked": len(asked),
        "input": sum(one.get("input") or 0 for one in asked), "output": sum(one.get("output") or 0 for one in asked),
        "money": sum(one.get("money") or 0 for one in asked), "rows": {entity: dict(by) for entity, by in counts.items()},
        "denials": sum(step["kind"] == "refusal" and step["detail"].get("code") == "denied" for step in rows),
        "files": sum(step["kind"] == "file" and "at" not in step["detail"] for step in rows),
    }  # fmt: skip
    return found | {"next": following(found)}


def _proposed(layer: Layer, number: int | None, principal: str | None) -> dict[str, Any]:
    """The merge that an agent has proposed, where it may be read."""
    try:
        rows = layer.query(
            "select status, request from approval where id = :id", {"id": number or 0}, principal=principal
        )
    except NotFound:
        return {}
    return rows[0] if rows else {}


def following(found: dict[str, Any]) -> str | None:
    """The command that comes after this."""
    if found["status"] == "running":
        return f"layer agent show {found['agent']} --follow"
    if found["proposed"] not in (None, "pending"):
        return None
    if found["proposal"]:
        return f"layer agent review {found['proposal']}"
    if found["rows"]:
        return f"layer diff {found['branch']}"
    return None if found["status"] == "done" else f"layer why --execution {found['agent']}"
