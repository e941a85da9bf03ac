"""What shapes a box: its tier, its files, its limits, what it may reach."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ..errors import Invalid

Tier = Literal["process", "namespace", "container", "gvisor", "microvm", "vm"]
TIERS: tuple[Tier, ...] = get_args(Tier)
VIRTUAL: tuple[Tier, ...] = ("microvm", "vm")  # those whose files lie on a disk of their own
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
NAME = re.compile(r"[a-z][a-z0-9-]{0,40}")
VOLUME = re.compile(r"volume:([a-z0-9]{1,40})")  # files that stay, by their id
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_size(value: object, what: str = "size") -> int:
    """Bytes from 268435456 or "256M"; the units are powers of 1024."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = (
        re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(?:i?b)?", value.strip().lower())
        if isinstance(value, str)
        else None
    )
    if not found or float(found[1]) <= 0:
        raise Invalid(f"{what} {value!r} is not a size", hint='a number of bytes, or "256M", "2G"')
    return int(float(found[1]) * UNITS[found[2]])


@dataclass(frozen=True)
class Mount:
    """A directory of the host, or `volume:ID`, that a box sees at `target`; it must be named by the person who makes the box, never by the box."""

    source: str
    target: str
    readonly: bool = True


@dataclass(frozen=True)
class Idle:
    """Seconds without use after which a box is frozen, checkpointed, archived (None: never). Touching it wakes it."""

    freeze: float | None = None
    checkpoint: float | None = None
    archive: float | None = None


@dataclass(frozen=True)
class Blueprint:
    """The shape of a box. Sizes are bytes; `egress` is empty, so nothing leaves, unless rules say otherwise."""

    tier: Tier = "namespace"
    base: str = "host"
    packages: tuple[Mapping[str, Any], ...] = ()
    user: str = "user"
    memory: int = 512 << 20
    pids: int = 256
    cpu: float = 1.0
    disk: int = 1 << 30
    output: int = 16 << 20  # of each stream of one command; the rest is dropped and said so
    wall: float | None = None  # seconds from creation to the end of the box
    egress: tuple[str | Mapping[str, Any], ...] = ()
    mounts: tuple[Mount, ...] = ()
    secrets: tuple[str, ...] = ()  # names only: their values are the gateway's
    env: Mapping[str, str] = field(default_factory=dict)
    idle: Idle = Idle()
    ports: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_tier(self.tier)
        for name, low, high in (
            ("pids", 4, 1 << 20),
            ("cpu", 0.01, 1024),
            ("memory", 4 << 20, 1 << 44),
            ("disk", 1 << 20, 1 << 50),
            ("output", 1, 1 << 40),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise Invalid(f"{name} {value!r} is not between {low} and {high}")
        if self.wall is not None and not self.wall > 0:
            raise Invalid(f"wall {self.wall!r} is not a number of seconds")
        if not isinstance(self.user, str) or not re.fullmatch(r"[a-z0-9_][a-z0-9_.:-]{0,63}", self.user):
            raise Invalid(f"user {self.user!r} is not a user name or number")
        for key, text in self.env.items():
            check_variable(key, text)
        for port in self.ports:
            check_port(port)
        for mount in self.mounts:
            if (
                not mount.target.startswith("/")
                or ".." in mount.target.split("/")
                or not (mount.source.startswith("/") or VOLUME.fullmatch(mount.source))
            ):
                raise Invalid(f"mount {mount.source!r} at {mount.target!r} needs two absolute paths")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Blueprint":
        """A blueprint from plain values, as a person or a row writes them; what it does not know is refused."""
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise Invalid(f"a blueprint has no {unknown[0]!r}", hint="it has " + ", ".join(sorted(known)))
        values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        for key in ("memory", "disk", "output"):
            if key in values:
                values[key] = parse_size(values[key], key)
        if "wall" in values:
            values["wall"] = _number(values["wall"], "wall")
        if "cpu" in values:
            values["cpu"] = float(_number(values["cpu"], "cpu"))
        if "pids" in values and (isinstance(values["pids"], bool) or not isinstance(values["pids"], int)):
            raise Invalid(f"pids {values['pids']!r} is not a whole number")
        for key in ("packages", "egress", "ports", "secrets"):
            if key in values:
                values[key] = _sequence(values[key], key)
        if "mounts" in values:
            values["mounts"] = tuple(
                mount if isinstance(mount, Mount) else _build(Mount, mount, "mount")
                for mount in _sequence(values["mounts"], "mounts")
            )
        if "idle" in values and not isinstance(values["idle"], Idle):
            values["idle"] = _build(Idle, values["idle"], "idle")
        if "env" in values and not isinstance(values["env"], Mapping):
            raise Invalid(f"env {values['env']!r} is not a mapping of names to texts")
        return cls(**values)

    def changed(self, **values: Any) -> "Blueprint":
        """The same with some fields set anew."""
        return replace(self, **values)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | {
            "env": dict(self.env),
            "egress": [rule if isinstance(rule, str) else dict(rule) for rule in self.egress],
        }


def check_tier(tier: object) -> None:
    """Refuses what is not a tier."""
    if tier not in TIERS:
        raise Invalid(f"tier {tier!r} does not exist", hint="one of " + ", ".join(TIERS))


def check_variable(key: object, text: object) -> None:
    """Refuses what can't be an environment variable."""
    if not isinstance(key, str) or not VARIABLE.fullmatch(key) or not isinstance(text, str) or "\0" in text:
        raise Invalid(f"environment variable {key!r} is not a name with a text")


def check_port(port: object) -> int:
    """Refuses what is not a TCP port."""
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise Invalid(f"port {port!r} is not between 1 and 65535")
    return port


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Invalid(f"{what} {value!r} is not a number")
    return value


def _sequence(value: object, what: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise Invalid(f"{what} {value!r} is not a list")
    return tuple(value)


def _build(kind: type[Any], value: object, what: str) -> Any:
    if not isinstance(value, Mapping):
        raise Invalid(f"{what} {value!r} is not a mapping")
    names = {entry.name for entry in fields(kind)}
    if unknown := sorted(set(value) - names):
        raise Invalid(f"{what} has no {unknown[0]!r}", hint="it has " + ", ".join(sorted(names)))
    try:
        return kind(**value)
    except TypeError as error:
        raise Invalid(f"{what} {dict(value)!r} is incomplete: {error}") from None
