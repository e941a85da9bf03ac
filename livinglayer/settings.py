"""What a layer allows by default; every field can be given to `livinglayer.open`."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import Conflict, Denied


@dataclass(frozen=True)
class Settings:
    """Limits and timeouts of one handle."""

    value_bytes: int = 1 << 20  # one value in a row; larger content belongs in a file field
    query_seconds: float = 10.0  # deadline of a query that names none
    longest_seconds: float = 60.0  # deadline that a query may name which is no owner's
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


def own_file(path: Path, make: Callable[[], bytes], otherwise: str) -> bytes:
    """What a file of this person alone holds, made at its first use; Denied, and `otherwise`, when others can read it."""
    for _ in range(2):
        try:
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise Denied(f"{path} can be read by others, so {otherwise}", hint=f"rm {path}")
                return file.read(1 << 16)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = path.with_name(f".{path.stem}.{secrets.token_hex(8)}")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(make())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(fresh, path)  # whoever is first: all use the same
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    raise Conflict(f"there is no key at {path}")
