"""Boxes of executions: one thread starts the program, answers its channel, and waits for its end."""

from __future__ import annotations

import logging
import select
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..errors import TimedOut
from ..sandbox.blueprint import Blueprint
from ..sandbox.once import Ended, Once
from ..substrate.ledger import now
from ..substrate.values import datetime_text
from .channel import Channel
from .executions import STEPS, Run
from .signature import dumps

RECORDED = 64 << 20  # bytes of what a program gets from the network that are kept
LATE = 5.0  # seconds that the host has to end a program whose time is over
log = logging.getLogger("livinglayer")


@dataclass
class Program:
    """What is run, and in which box."""

    blueprint: Blueprint
    tenant: str
    timeout: float
    language: str
    python: str | None = None
    argv: list[str] | None = None
    given: dict[str, Any] | None = None  # sent as JSON on its input
    stdin: bytes = b""
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    labels: dict[str, str] = field(default_factory=dict)
    record: str | None = None
    recorded: bool = True  # what it gets from the network is kept
    replay: str | None = None
    snapshot: str | None = None
    fresh: bool = False  # in a box that has served nobody


def drive(run: Run, program: Program) -> Ended:
    """Run a program to its end and answer what it asks meanwhile; what it gets from the network is recorded."""
    if not program.blueprint.egress:
        return _drive(run, program)
    with tempfile.NamedTemporaryFile(prefix="layer-network-") as recording:
        program.record = recording.name if program.recorded else None
        ended = _drive(run, program)
        data = recording.read(RECORDED + 1)
    if len(data) > RECORDED:
        run.steps.append(("tape", {"network": None, "reason": f"more than {RECORDED} bytes came"}, now()))
    elif data:
        found = run.store(data)
        run.steps.append(("tape", {"network": found, "content": found, "bytes": len(data)}, now()))
    return ended


def _drive(run: Run, program: Program) -> Ended:
    once = Once.start(
        blueprint=program.blueprint,
        tenant=program.tenant,
        argv=program.argv,
        python=program.python,
        stdin=program.stdin if program.given is None else dumps(program.given),
        env=program.env,
        timeout=program.timeout,
        token=run.token,
        secrets=program.secrets or None,
        record=program.record,
        replay=program.replay,
        snapshot=program.snapshot,
        labels=program.labels,
        reuse=not program.fresh,
    )
    channel = None
    try:
        begun = {"id": once.box, "tier": program.blueprint.tier, "reused": once.reused}
        if program.given is not None and program.given.get("seed") is not None:
            begun["clock"] = program.given["clock"]
        run.steps.append(("box", begun, now()))
        assert once.channel is not None
        channel = Channel(once.channel, lambda error: log.exception("channel of %s", once.box, exc_info=error))
        channel.executions[run.token] = run
        ended = _until_end(once, channel, time.monotonic() + program.timeout + LATE)
    finally:
        if channel is not None:
            channel.close()
        once.close()
    _record(run, program, ended)
    return ended


def _until_end(once: Once, channel: Channel, deadline: float) -> Ended:
    ended = once.receive()
    own = once.fileno()
    channel.poll.register(own, select.POLLIN)
    while ended is None:
        left = deadline - time.monotonic()
        if left <= 0:
            once.kill()
            raise TimedOut("the host did not end the program in time")
        for fd, event in channel.poll.poll(left * 1000):
            if fd == own:
                ended = once.receive() or ended
            else:
                channel.turn(fd, event)
    return ended


def _record(run: Run, program: Program, ended: Ended) -> None:
    """What the host saw, as steps; those that can be are put between the others by their time."""
    for event in ended.events:
        if len(run.steps) < STEPS:
            began = event.get("began") or event.get("at")
            at = now() if began is None else datetime_text(datetime.fromtimestamp(began, UTC))
            run.steps.append((_kind(event), event, at))
    if ended.events:
        run.steps[run.flushed :] = sorted(run.steps[run.flushed :], key=lambda step: step[2])
    for change in ended.changes or ():
        if len(run.steps) < STEPS:
            run.steps.append(("file", dict(change), now()))
    run.output("stdout", bytes(ended.stdout), ended.truncated)
    run.output("stderr", bytes(ended.stderr), ended.truncated)
    command = {"exit_code": ended.exit_code, "usage": dict(ended.usage), "ms": round(ended.duration * 1000, 2)}
    if ended.reason:
        command["reason"] = ended.reason
    if ended.base:
        command["base"] = ended.base
    run.steps.append(("command", {"argv": program.argv or ["python3"], **command}, now()))


def _kind(event: dict[str, Any]) -> str:
    return "secret" if event.get("event") == "secret" else "network"
