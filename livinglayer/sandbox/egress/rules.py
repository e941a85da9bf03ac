"""Egress rules: what a box may reach. Deny by default, first match wins; pure functions, nothing is dialed here."""

from __future__ import annotations

import functools
import ipaddress
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

from livinglayer.errors import Invalid
from livinglayer.sandbox.egress import models, names
from livinglayer.sandbox.egress.dial import literal

Protocol = Literal["http", "https", "tcp"]
PLACES = ("header", "query", "body")
DEFAULT_PORT = {"http": 80, "https": 443}
KEYS = frozenset(
    "host port method path bytes rate protocol secrets swap private resolve action tls model box headers without shares".split(),
)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_SIZE = re.compile(r"([0-9]{1,15})([KMGT]?)\Z")
_RATE = re.compile(r"([1-9][0-9]{0,8})/(s|m|h)\Z")
_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_CONTROL = re.compile(r"%(?:[01][0-9a-fA-F]|7[fF])")
_DOT = re.compile(r"%2[eE]")
ANY = frozenset(range(1, 65536)) - {53}  # every port but that of DNS, which is the gateway's own
# Headers that belong to one connection, or say how a body is framed: nobody writes those for a box.
_NEVER = frozenset(
    "host connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    "content-length expect http2-settings".split()
)
BOXES = ".box.internal"  # where boxes are for each other: `.internal` is nobody's out there, as `.box` is somebody's
_BOX = re.compile(r"(?:([a-z0-9](?:[a-z0-9-]{0,40}[a-z0-9])?)/)?([a-z](?:[a-z0-9-]{0,39}[a-z0-9])?)\Z")
_BOX_KEYS = frozenset("box port protocol method path bytes rate action".split())


@dataclass(frozen=True)
class Rule:
    """One line of a box's egress; `text` is how it was written and how events name it."""

    text: str
    host: str  # a name, an IPv4 address or network, "*" or "*.suffix"
    action: Literal["allow", "deny"] = "allow"
    protocols: frozenset[str] = frozenset({"http", "https"})
    ports: frozenset[int] | None = None  # None: the protocol's own; of a deny rule: all
    methods: frozenset[str] | None = None
    path: str | None = None
    bytes: int | None = None
    rate: tuple[int, int] | None = None  # requests, seconds
    secrets: frozenset[str] = frozenset()
    swap: frozenset[str] = frozenset(PLACES)  # where in a request they are put in
    private: bool = False
    resolve: tuple[str, int | None] | None = None  # the address to dial, and a port if it is another
    tls: Literal["terminate", "pass"] = "terminate"
    model: Literal["anthropic", "openai"] | None = (
        None  # the API spoken there: its exchanges are kept, its tokens counted
    )
    box: str | None = None  # another box, by its name: `host` is its name as boxes say it
    headers: tuple[tuple[str, str], ...] = field(
        default=(), repr=False
    )  # set in every request, in place of the box's own
    shares: str | None = None  # the text of another rule whose bytes and rate it spends from
    without: tuple[ipaddress.IPv4Network, ...] = ()  # addresses that are not dialed, whatever name leads there

    @property
    def account(self) -> str:
        """What its bytes and its rate are counted under."""
        return self.shares or self.text

    @property
    def whole(self) -> bool:
        """Speaks of everything at its host."""
        return self.ports is None and self.methods is None and self.path is None and "tcp" in self.protocols

    def dials_like(self, other: Rule) -> bool:
        """A connection made under the other rule could have been made under this one."""
        return self._dialing() == other._dialing()

    def _dialing(self) -> tuple[Any, ...]:
        return self.private, self.resolve, self.tls, self.box, self.headers, self.without


@dataclass(frozen=True)
class Ask:
    """What a box wants; method and path are None for a connection that is not HTTP the gateway can read."""

    protocol: str
    host: str
    port: int
    method: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        at = f"{self.protocol}://{self.host}"
        if self.port != DEFAULT_PORT.get(self.protocol):
            at += f":{self.port}"
        return f"{self.method} {at}{self.path}" if self.method else at


def parse(rules: Iterable[object]) -> tuple[Rule, ...]:
    """Rules as people write them, checked; Invalid names the rule and what is wrong with it."""
    if isinstance(rules, str | bytes | Mapping):
        raise Invalid(f"egress is {rules!r}, not a list of rules", hint='egress=["pypi.test"]')
    return tuple(parse_one(rule) for rule in rules)


def parse_one(rule: object) -> Rule:
    """One rule, from a string or a mapping."""
    try:
        if isinstance(rule, str):
            return _from_mapping(rule, _from_string(rule))
        if isinstance(rule, Mapping):
            return _from_mapping(json.dumps(shown(rule), separators=(",", ":"), default=str), dict(rule))
    except Invalid as error:
        seen = shown(rule) if isinstance(rule, Mapping) else rule
        raise Invalid(f"egress rule {seen!r}: {error.message}", hint=error.hint) from None
    raise Invalid(f"egress rule {rule!r} is neither text nor a mapping", hint='"pypi.test" or {"host": "pypi.test"}')


def shown(rule: Any) -> Any:
    """A rule as people may see it: of headers their names only."""
    if not isinstance(rule, Mapping):
        return rule
    headers = rule.get("headers")
    named = dict.fromkeys(map(str, headers), "…") if isinstance(headers, Mapping) else "…"
    return {**rule, "headers": named} if headers is not None else dict(rule)


def spelled(rule: str | Mapping[str, Any]) -> dict[str, Any]:
    """A rule as a mapping, however it was written."""
    return _from_string(rule) if isinstance(rule, str) else dict(rule)


def _from_string(text: str) -> dict[str, Any]:
    scheme, mark, rest = text.partition("://")
    found: dict[str, Any] = {}
    if mark:
        scheme = {"ws": "http", "wss": "https"}.get(scheme.lower(), scheme.lower())
        found["protocol"] = scheme
    else:
        rest = text
    at, slash, path = rest.partition("/")
    if "?" in rest or "#" in rest:
        raise Invalid("a rule names no query", hint="end the path with *")
    if slash and path:
        if not mark:
            raise Invalid("a path needs a scheme", hint="https://host/path/*")
        found["path"] = "/" + path
    name, colon, number = at.partition(":")
    found["host"] = name
    if colon:
        found["port"] = names.port(number)
    return found


def _from_mapping(text: str, given: dict[str, Any]) -> Rule:
    if unknown := set(given) - KEYS:
        raise Invalid(f"unknown key {sorted(map(str, unknown))[0]!r}", hint=f"known: {', '.join(sorted(KEYS))}")
    if "box" in given:
        given = _towards_box(given)
    elif isinstance(given.get("host"), str) and given["host"].lower().rstrip(".").endswith(BOXES):
        raise Invalid(f"{given['host']!r} is a box", hint='{"box": "db", "port": 8080}')
    action = given.get("action", "allow")
    if action not in ("allow", "deny"):
        raise Invalid(f"action {action!r}", hint="allow or deny")
    protocol = given.get("protocol")
    if protocol not in (None, "http", "https", "tcp"):
        raise Invalid(f"protocol {protocol!r}", hint="http, https or tcp")
    tls = given.get("tls", "terminate")
    if tls not in ("terminate", "pass"):
        raise Invalid(f"tls {tls!r}", hint="terminate or pass")
    narrow = given.get("method") is not None or given.get("path") is not None
    if protocol is not None:
        protocols = frozenset({protocol})
    elif tls == "pass":
        protocols = frozenset({"https"})
    elif action == "deny" and not narrow:
        protocols = frozenset({"http", "https", "tcp"})
    else:
        protocols = frozenset({"http", "https"})
    ports = _ports(given.get("port"))
    secrets = _strings("secrets", given.get("secrets"))
    for name in secrets or ():
        if not _SECRET.match(name):
            raise Invalid(f"secret name {name!r}", hint="letters, digits and _")
    places = _strings("swap", given.get("swap"))
    if not set(places or ()) <= set(PLACES) or (places is not None and not secrets):
        raise Invalid(f"swap {given['swap']!r}", hint="header, query or body, for a rule with secrets")
    if protocol == "tcp" and ports is None and action == "allow":
        raise Invalid("tcp needs a port", hint="tcp://host:port")
    if (tls == "pass" or protocol == "tcp") and (narrow or secrets):
        raise Invalid("method, path and secrets need HTTP the gateway can read", hint='drop "tls": "pass" or tcp')
    if tls == "pass" and protocols != {"https"}:
        raise Invalid('"tls": "pass" is for https', hint="tcp passes whatever it carries")
    model = given.get("model")
    if model is not None and (models.check(model) is None or action == "deny" or not protocols & {"http", "https"}):
        raise Invalid(f"model {model!r}", hint=f"{' or '.join(models.APIS)}, for a rule that allows HTTP")
    if tls == "pass" and model is not None:
        raise Invalid("a model's answers need HTTP the gateway can read", hint='drop "tls": "pass"')
    if not isinstance(given.get("private", False), bool):
        raise Invalid(f"private {given['private']!r}", hint="true or false")
    headers = _headers(given.get("headers"))
    if headers and (tls == "pass" or not protocols & {"http", "https"} or action == "deny"):
        raise Invalid("headers are set in HTTP that the gateway can read", hint='drop "tls": "pass", tcp or deny')
    return Rule(
        text=text,
        host=_pattern(given.get("host")),
        action=action,
        protocols=protocols,
        ports=ports,
        methods=_methods(given.get("method")),
        path=_path(given.get("path")),
        bytes=_size(given.get("bytes")),
        rate=_rate(given.get("rate")),
        secrets=frozenset(secrets or ()),
        swap=frozenset(PLACES if places is None else places),
        private=given.get("private", False),
        resolve=_resolve(given.get("resolve")),
        tls=tls,
        model=models.check(model),
        box=given.get("box"),
        headers=headers,
        without=_networks(given.get("without")),
        shares=_shares(given.get("shares")),
    )


def _towards_box(given: dict[str, Any]) -> dict[str, Any]:
    """A rule for a port of another box, with the host it is at."""
    if odd := set(given) - _BOX_KEYS:
        raise Invalid(f"{sorted(odd)[0]!r} is not for a box", hint=f"of a box: {', '.join(sorted(_BOX_KEYS))}")
    name = given.get("box")
    if not isinstance(name, str) or not (found := _BOX.match(name)):
        raise Invalid(f"box {name!r}", hint="the name of a box, or PRINCIPAL/NAME; lower-case letters, digits, hyphens")
    deny = given.get("action") == "deny"
    if given.get("protocol") not in (None, "http", "tcp"):
        raise Invalid(f"protocol {given['protocol']!r} of a box", hint="http, which WebSocket is too, or tcp")
    if given.get("port") is None and not deny:
        raise Invalid("a box needs a port", hint='{"box": "db", "port": 5432, "protocol": "tcp"}')
    protocol = {} if deny else {"protocol": given.get("protocol") or "http"}
    return given | protocol | {"host": ".".join(filter(None, (found[2], found[1]))) + BOXES}


def _pattern(given: object) -> str:
    if not isinstance(given, str) or not given:
        raise Invalid("no host", hint='{"host": "pypi.test"}')
    if given == "*":
        return given
    if given.startswith("*."):
        suffix = names.host(given[2:])
        if names.is_address(suffix):
            raise Invalid(f"{given!r} is a pattern of an address", hint="name each address")
        return "*." + suffix
    return str(network(given)) if "/" in given else names.host(given)


def network(given: object) -> ipaddress.IPv4Network:
    """Addresses as 10.0.0.0/8, or one of them, in plain decimal."""
    try:
        if isinstance(given, str) and given.isascii():
            return ipaddress.IPv4Network(given)
    except ValueError:
        pass
    raise Invalid(
        f"{given!r} is not an IPv4 address or network", hint="as 10.0.0.7, or 10.0.0.0/8 with no bits set after it"
    )


def _networks(given: object) -> tuple[ipaddress.IPv4Network, ...]:
    return tuple(ipaddress.collapse_addresses(map(network, _strings("without", given) or ())))


def _shares(given: object) -> str | None:
    if given is None or (isinstance(given, str) and 0 < len(given) <= 65536):
        return given
    raise Invalid(f"shares {given!r:.100}", hint="the text of the rule whose bytes and rate it spends from")


def _headers(given: object) -> tuple[tuple[str, str], ...]:
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise Invalid("headers are texts by name", hint='{"authorization": "Bearer …"}')
    found = {}
    for name, value in given.items():
        if not isinstance(name, str) or not _TOKEN.match(name) or name.lower() in _NEVER or len(name) > 256:
            raise Invalid(
                f"header {name!r:.120} can't be set", hint="not one of the connection or of the body's framing"
            )
        if not isinstance(value, str) or len(value) > 8192 or not value.replace("\t", " ").isprintable():
            raise Invalid(f"the value of header {name!r} is no text that a header can carry")  # it is not shown
        if name.lower() in found:
            raise Invalid(f"header {name!r} is there twice")
        found[name.lower()] = value.strip(" \t")
    return tuple(found.items())


def _ports(given: object) -> frozenset[int] | None:
    if given is None:
        return None
    if given == "*":
        return ANY
    ports = given if isinstance(given, list | tuple) else [given]
    for port in ports:
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
            raise Invalid(f"port {port!r}", hint="a number from 1 to 65535, a list of them, or * for all")
    if not ports:
        raise Invalid("an empty list of ports", hint="leave it out for the protocol's own")
    return frozenset(ports)


def _strings(what: str, given: object) -> list[str] | None:
    if given is None:
        return None
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise Invalid(f"{what} {given!r}", hint="a text or a list of texts")
    return list(found)


def _methods(given: object) -> frozenset[str] | None:
    methods = _strings("method", given)
    if methods is None:
        return None
    for method in methods:
        if not _TOKEN.match(method):
            raise Invalid(f"method {method!r}", hint="GET, POST, …")
    if not methods:
        raise Invalid("an empty list of methods", hint="leave it out for all")
    return frozenset(method.upper() for method in methods)


def _path(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given.startswith(("/", "*")):
        raise Invalid(f"path {given!r}", hint="begins with / ; * stands for anything, slashes too")
    if "?" in given or "#" in given:
        raise Invalid("a rule names no query", hint="end the path with *")
    return unquote(given, encoding="latin-1") if given.isascii() else given.encode().decode("latin-1")


def _size(given: object) -> int | None:
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    if isinstance(given, str) and (found := _SIZE.match(given)):
        return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2]]
    raise Invalid(f"bytes {given!r}", hint='a number or "10M"')


def _rate(given: object) -> tuple[int, int] | None:
    if given is None:
        return None
    if isinstance(given, str) and (found := _RATE.match(given)):
        return int(found[1]), {"s": 1, "m": 60, "h": 3600}[found[2]]
    raise Invalid(f"rate {given!r}", hint='"10/s", "100/m" or "1000/h"')


def _resolve(given: object) -> tuple[str, int | None] | None:
    if given is None:
        return None
    if isinstance(given, str):
        name, colon, number = given.partition(":") if given.count(":") <= 1 else (given, "", "")
        address = literal(name)
        if address is not None:
            return str(address), names.port(number) if colon else None
    raise Invalid(f"resolve {given!r}", hint="an address to dial, as 10.0.0.7 or 10.0.0.7:8080")


@functools.lru_cache(4096)
def _network(pattern: str) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(pattern)


def host_matches(pattern: str, host: str) -> bool:
    """`*.test` matches `a.test` and `a.b.test`, never `test`; `*` matches names and addresses alike."""
    if pattern == "*":
        return True
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and not names.is_address(host)
    if "/" in pattern:
        return names.is_address(host) and ipaddress.IPv4Address(host) in _network(pattern)
    return host == pattern


def _names(rule: Rule, host: str) -> bool:
    """Whether a rule speaks of a host. No pattern and no name lets a box reach another: only a rule for boxes does."""
    return host_matches(rule.host, host) and (rule.box is not None or rule.action == "deny" or not host.endswith(BOXES))


def readings(path: str) -> tuple[str, str, str]:
    """What is sent for a path, what a careful server reads, what the least careful one could.

    An allow rule must match both readings, a deny rule needs one: so no spelling of dots and slashes slips by.
    """
    if not path.startswith("/") or not path.isascii() or not path.isprintable() or set(path) & set(' "<>^`{|}\\#?'):
        raise Invalid("the path has characters a URL can't have", hint="percent-encode them")
    if _CONTROL.search(path):
        raise Invalid("the path has encoded control characters")
    sent = path
    if any(_DOT.sub(".", part) in (".", "..") for part in path.split("/")):
        sent = _without_dots("/".join(_DOT.sub(".", part) for part in path.split("/")))
    # %2F stays what it is: part of a name, as registries use it for scoped packages
    careful = "%2F".join(unquote(part, encoding="latin-1") for part in re.split("%2[fF]", sent))
    return sent, careful, _without_dots(_decoded(sent))


def _decoded(path: str) -> str:
    """A path as the least careful server decodes it, dots and all."""
    for _ in range(4):
        found = unquote(path, encoding="latin-1")
        if found == path:
            break
        path = found
    else:
        raise Invalid("the path is percent-encoded too many times")
    return re.sub("/+", "/", "/".join(part.partition(";")[0] for part in path.replace("\\", "/").split("/")))


def _without_dots(path: str) -> str:
    kept: list[str] = []
    parts = path.split("/")[1:]
    for part in parts:
        if part == "..":
            if kept:
                kept.pop()
        elif part != ".":
            kept.append(part)
    if parts[-1] in (".", ".."):
        kept.append("")
    return "/" + "/".join(kept)


def glob(pattern: str, text: str) -> bool:
    """Whether all of text matches; `*` is any run of characters. Never slower than their product."""
    if "*" not in pattern:
        return pattern == text
    first, *middle, last = pattern.split("*")
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _reaches(rule: Rule, host: str, port: int, protocol: str | None = None) -> bool:
    if not _names(rule, host) or (protocol is not None and protocol not in rule.protocols):
        return False
    if rule.ports is not None:
        return port in rule.ports
    if rule.action == "deny":
        return True
    return any(DEFAULT_PORT.get(one) == port for one in ([protocol] if protocol else rule.protocols))


def matches(rule: Rule, ask: Ask) -> bool:
    """Whether a rule speaks of this; raises Invalid for a path that can't be read."""
    if not _reaches(rule, ask.host, ask.port, ask.protocol):
        return False
    if ask.method is None:
        return rule.methods is None and rule.path is None
    if rule.tls == "pass" and rule.action == "allow":
        return False  # the gateway reads this one, so it was not passed
    if rule.methods is not None and ask.method not in rule.methods:
        return False
    if rule.path is not None:
        sent, careful, loose = readings(ask.path or "/")
        found = (glob(rule.path, careful), glob(rule.path, loose))
        if rule.action == "deny":
            return any(found)
        # Dots that are hidden in what is sent may climb above the rule and come back: not where a server cuts its prefix off first.
        return all(found) and ".." not in _decoded(sent).split("/")
    return True


def decide(rules: Sequence[Rule], ask: Ask) -> Rule | None:
    """The first rule that speaks of this, allow or deny, or None: and then it is denied."""
    return next((rule for rule in rules if matches(rule, ask)), None)


def first_at(rules: Sequence[Rule], host: str, port: int) -> Rule | None:
    """The first rule for a connection before anything of it was read: it decides whether it is HTTP, passed or raw."""
    return next((rule for rule in rules if _reaches(rule, host, port)), None)


def names_allowed(rules: Sequence[Rule], host: str) -> bool:
    """Whether some rule could allow something at this host: whether the box may have an address for it."""
    for rule in rules:
        if _names(rule, host):
            if rule.action == "allow":
                return True
            if rule.whole:
                return False
    return False


class Bucket:
    """Requests per time: `rate` of them at once, refilled evenly."""

    def __init__(self, rate: tuple[int, int], now: float) -> None:
        self.size, self.per_second = rate[0], rate[0] / rate[1]
        self.tokens, self.at = float(self.size), now

    def take(self, now: float) -> int:
        """0 if one may go, else the seconds to wait."""
        self.tokens = min(self.size, self.tokens + (now - self.at) * self.per_second)
        self.at = now
        if self.tokens >= 1:
            self.tokens -= 1
            return 0
        return max(1, math.ceil((1 - self.tokens) / self.per_second))
