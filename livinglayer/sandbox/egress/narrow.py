"""Less than a blueprint allows: what one box of it may reach, by lists of what is allowed and denied, and headers set for it.

`{"allow": […], "deny": […], "headers": {HOST: {NAME: VALUE}}}`: names, `*.suffix`, IPv4 addresses and networks. What is allowed
beats what is denied. An allow list alone allows nothing else. A header allows nothing: it is set where a request may go anyway.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from livinglayer.errors import Invalid
from livinglayer.sandbox.egress import names, rules
from livinglayer.sandbox.egress.rules import Rule
from livinglayer.sandbox.egress.secrets import PREFIX, variable

KEYS = ("allow", "deny", "headers")
MANY = 1000  # entries of a list
EVERYTHING = ipaddress.IPv4Network("0.0.0.0/0")
SECRET = re.compile(r"\$\{(?:e2b\.)?secrets\.([^${}]*)\}")
Network = ipaddress.IPv4Network


@dataclass(frozen=True)
class Places:
    """Where something is: host patterns and networks."""

    hosts: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()

    @classmethod
    def of(cls, what: str, given: object) -> Places:
        """From a list as people write it; Invalid names what is none."""
        if given is None:
            return cls()
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) > MANY:
            raise Invalid(
                f"{what} is not a list of up to {MANY} hosts", hint='["api.test", "*.api.test", "10.0.0.0/8"]'
            )
        hosts, networks = [], []
        for one in given:
            found = place(one)
            networks.append(found) if isinstance(found, Network) else hosts.append(found)
        return cls(tuple(dict.fromkeys(hosts)), tuple(ipaddress.collapse_addresses(networks)))


def place(given: object) -> str | Network:
    """A name or a pattern of names in its one spelling, or a network."""
    pattern = rules.parse_one({"host": given}).host
    return rules.network(pattern) if "/" in pattern or names.is_address(pattern) else pattern


def narrow(given: Iterable[str | Mapping[str, Any]], wanted: Mapping[str, Any]) -> list[Any]:
    """The rules of a box from those of its blueprint and what was wanted of them: never wider than the blueprint's."""
    if not isinstance(wanted, Mapping) or set(wanted) - set(KEYS):
        raise Invalid("egress is narrowed by allow, deny and headers", hint='{"allow": ["api.test"]}')
    allow, deny = Places.of("allow", wanted.get("allow")), Places.of("deny", wanted.get("deny"))
    headers = _headers(wanted.get("headers"))
    known = [(written, rules.parse_one(written)) for written in given]
    if not (wanted.get("allow") or wanted.get("deny") or headers):
        return [written for written, _ in known]
    found: list[Any] = []
    listed = [*allow.hosts, *map(_spelled, allow.networks)]
    for written, rule in known if listed else ():  # what is allowed by name or address, before what is denied
        found += [written] if rule.action == "deny" else []
        found += [one for host in listed if rule.action == "allow" for one in _at(written, rule, host, headers, ())]
    if EVERYTHING in deny.networks or (not wanted.get("deny") and listed):
        return found
    left_out = _minus(deny.networks, allow.networks)
    found += [{"host": host, "action": "deny"} for host in (*deny.hosts, *map(_spelled, left_out))]
    for written, rule in known:
        found += [written] if rule.action == "deny" else _at(written, rule, rule.host, headers, left_out)
    return found


def shown(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What was wanted, as it may be recorded: of headers their names only."""
    headers = wanted.get("headers") if isinstance(wanted, Mapping) else None
    if not isinstance(headers, Mapping):
        return dict(wanted)
    named = {host: sorted(map(str, given)) if isinstance(given, Mapping) else [] for host, given in headers.items()}
    return {**wanted, "headers": named}


def secrets_of(given: Iterable[str | Mapping[str, Any]]) -> list[str]:
    """The secrets that rules name."""
    return sorted(frozenset[str]().union(*(rule.secrets for rule in rules.parse(list(given)))))


def _at(
    written: str | Mapping[str, Any], rule: Rule, host: str, headers: Mapping[str, Mapping[str, str]], left_out: Sequence[Network]
) -> list[dict[str, Any]]:  # fmt: skip
    """A rule where it meets a host pattern, without some networks; before that, where headers are set, with them."""
    met = _meet(rule.host, host)
    if met is None or (rule.box is not None and host != rule.host):
        return []
    plain = {**rules.spelled(written), "host": met}
    if rule.box is not None:
        return [dict(rules.spelled(written))]
    if left_out:
        plain["without"] = [str(net) for net in (*rule.without, *left_out)]
    if rule.bytes is not None or rule.rate is not None:
        plain["shares"] = rule.shares or rule.text  # what is allowed once is not allowed once for each part
    found = []
    for pattern, values in headers.items() if rule.tls != "pass" and rule.protocols & {"http", "https"} else ():
        if (narrower := _meet(met, pattern)) is not None:
            one = {**plain, "host": narrower, "headers": {**dict(rule.headers), **values}}
            if lent := {name for text in values.values() for name in _lent(text)}:
                one |= {"secrets": sorted(rule.secrets | lent), "swap": _swap(rule)}
                if rule.protocols == {"http", "https"}:  # in clear a secret goes nowhere unless a rule says so itself
                    one["protocol"] = "https"
            found.append(one)
            if narrower == met and "protocol" not in one.keys() - plain.keys():
                return found
    return [*found, plain]


def _swap(rule: Rule) -> list[str]:
    """Where the box's own placeholders are put in: as before, and nowhere of a rule that named none."""
    return sorted(rule.swap) if rule.secrets else []


def _lent(text: str) -> list[str]:
    return re.findall(f"{PREFIX}([A-Za-z_][A-Za-z0-9_]*)", text)


def _headers(given: object) -> dict[str, dict[str, str]]:
    """Headers by host, the narrowest pattern first; ${secrets.NAME} becomes the secret's placeholder."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or len(given) > MANY:
        raise Invalid("headers are set by host", hint='{"api.test": {"authorization": "Bearer …"}}')
    found: dict[str, dict[str, str]] = {}
    for host, values in given.items():
        where = place(host)
        checked = dict(rules.parse_one({"host": "checked.test", "headers": values}).headers)
        filled = {name: SECRET.sub(lambda m: PREFIX + variable(m[1]), text) for name, text in checked.items()}
        found[_spelled(where) if isinstance(where, Network) else where] = filled
    return dict(sorted(found.items(), key=lambda one: _breadth(one[0])))


def _breadth(pattern: str) -> tuple[int, int]:
    if pattern == "*":
        return 3, 0
    if "/" in pattern:
        return 2, -int(pattern.partition("/")[2])
    return (1, -len(pattern)) if pattern.startswith("*.") else (0, 0)


def _spelled(net: Network) -> str:
    return str(net.network_address) if net.prefixlen == 32 else str(net)


def _meet(a: str, b: str) -> str | None:
    """What two host patterns have in common, as a pattern; None when that is nothing."""
    if a == b or b == "*":
        return a
    if a == "*":
        return b
    if _network(a) and _network(b):
        one, other = rules.network(a), rules.network(b)
        return a if one.subnet_of(other) else b if other.subnet_of(one) else None
    if _network(a) or _network(b):
        return None
    if a.startswith("*.") and b.startswith("*."):
        return a if a.endswith(b[1:]) else b if b.endswith(a[1:]) else None
    if a.startswith("*."):
        return b if rules.host_matches(a, b) else None
    return a if rules.host_matches(b, a) else None


def _network(pattern: str) -> bool:
    return "/" in pattern or (pattern[-1:].isdigit() and names.is_address(pattern))


def _minus(whole: Iterable[Network], parts: Iterable[Network]) -> list[Network]:
    """Networks without some parts of them."""
    left = list(whole)
    for part in parts:
        left = [
            piece
            for net in left
            for piece in (net.address_exclude(part) if part.subnet_of(net) else () if net.subnet_of(part) else (net,))
        ]
    return sorted(left)
