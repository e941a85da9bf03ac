"""What a layer allows by default; every field can be given to `livinglayer.open`."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Limits and timeouts of one handle."""

    value_bytes: int = 1 << 20  # one value in a row; larger content belongs in a file field
    query_seconds: float = 10.0  # deadline of a query that names none
    query_rows: int = 100_000  # rows of one answer
    query_bytes: int = 256 << 20  # memory of a reader process, and the largest answer it may give
    busy_seconds: float = 10.0  # how long a writer waits for another one
    readers: int = 2  # reader processes of one principal, for SQL that is not the owner's
    runner_seconds: float = 10.0  # how long a process that runs executions is waited for without a sign of life
    trigger_depth: int = 16  # triggers that set each other off, one after another
    trigger_rate: int = 1000  # executions a minute that one trigger starts; more wait


def config_directory() -> Path:
    """Where a person's tokens lie: LAYER_CONFIG, else the XDG configuration directory."""
    if given := os.environ.get("LAYER_CONFIG"):
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "livinglayer"


def state_directory() -> Path:
    """Where this host keeps its boxes: LAYER_STATE, else /var/lib/livinglayer for root, else the XDG state directory."""
    if given := os.environ.get("LAYER_STATE"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/lib/livinglayer")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "livinglayer"
