"""Run the attacks by hand and print a table: `python tests/sandbox/escape/run.py [TIER…] [-k PART]`; exits with 1 when one got through."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from sandbox.escape.world import OWN_KERNEL, SCRIPT, Outcome, World, applies, load, outcomes, planted

from livinglayer.errors import LayerError, Unavailable
from livinglayer.sandbox import Sandbox
from livinglayer.settings import state_directory


def attack_box(
    box: Sandbox, world: World, tier: str, user: str, only: list[str] | None = None, zygote: bool = False
) -> list[Outcome]:
    """All attacks (or `only` these) from inside one box."""
    facts = world.facts(tier, box.id) | {"only": only, "seconds": 60 if tier in OWN_KERNEL else 20}
    if tier in OWN_KERNEL:  # root may end its own first process there, and with it its own box
        facts["skip"] = [
            "agent.signals",
            "agent.freeze_by_limits",
            "agent.ptrace",
            "call.reboot",
            "kernel.sysrq",
            "mount.unmount_proc",
        ]
    if zygote:
        code = SCRIPT.read_text() + "\n"
        done = box.python(code, stdin=json.dumps(facts).encode(), user=user, timeout=600)
    else:
        box.files.write("/tmp/inside.py", SCRIPT.read_bytes(), user="root")
        done = box.run(["python3", "inside.py"], cwd="/tmp", stdin=json.dumps(facts).encode(), user=user, timeout=600)
    found = outcomes(done.stdout)
    if not found:
        raise AssertionError(f"the attacks did not run: {done.exit_code} {done.stderr.text[-2000:]}")
    return found


def breaches(found: list[Outcome], tier: str) -> list[Outcome]:
    """Those that got what they must not on this tier."""
    table = load()
    return [outcome for outcome in found if outcome.got and applies(table[outcome.name][1], tier)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tiers", nargs="*", default=["process", "namespace", "container", "gvisor", "microvm", "vm"])
    parser.add_argument("-k", default="", help="only attacks whose name has this in it")
    parser.add_argument("-v", action="store_true", help="show how each was refused")
    arguments = parser.parse_args()
    only = [name for name in load() if arguments.k in name]
    failed = 0
    with planted(os.environ.get("LAYER_STATE") or state_directory()) as world:
        for tier in arguments.tiers:
            ways = [("user", False), ("root", False)] + (
                [("user", True), ("root", True)] if tier == "namespace" else []
            )
            try:
                box = Sandbox.create(tier=tier)
            except Unavailable as error:
                print(f"{tier}: not here: {error}")
                continue
            with box:
                for user, zygote in ways:
                    start = time.monotonic()
                    try:
                        found = attack_box(box, world, tier, user, only, zygote)
                    except (LayerError, AssertionError) as error:
                        print(f"{tier}: {error}")
                        failed += tier != "process"
                        continue
                    bad = breaches(found, tier)
                    way = f"{tier} as {user}{' by the zygote' if zygote else ''}"
                    print(f"{way}: {len(found)} attacks, {len(bad)} got through, {time.monotonic() - start:.1f} s")
                    for outcome in found if arguments.v else bad + [o for o in found if o.broken]:
                        mark = (
                            "OPEN"
                            if outcome in bad
                            else "broken"
                            if outcome.broken
                            else "own"
                            if outcome.got
                            else "refused"
                        )
                        print(f"  {mark:8} {outcome.name:36} {(outcome.got or outcome.refused or '')[:110]}")
                    failed += len(bad) if tier != "process" else 0
                if changed := world.changed():
                    print(f"{tier}: on the host: {changed[:10]}")
                    failed += tier != "process"
                    world.heard.clear()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
