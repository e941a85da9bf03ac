"""E2B's network options: what they mean for a box's egress, and who may reach its ports.

The lists narrow what the box's blueprint allows (`sandbox.egress.narrow`); nothing here can widen it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import Invalid
from ...sandbox.blueprint import check_port
from ...sandbox.egress.narrow import EVERYTHING, narrow

EGRESS = {"allowOut", "denyOut", "rules", "egressProxy", "dnsServers", "allow_internet_access", "allowInternetAccess"}
PORTS = {"allowPublicTraffic", "maskRequestHost", "httpsPorts"}
SERVERS = 10  # of DNS, at most
_MASK = re.compile(r"[A-Za-z0-9.${}:_-]{1,253}")


@dataclass(frozen=True)
class Network:
    """What was asked for of a box's network."""

    egress: dict[str, Any] = field(repr=False)  # what `box.open` and `box.egress` take; it may hold values of headers
    shown: dict[str, Any]  # as it is told again, without such values
    public: bool = True
    mask: str | None = None
    https: tuple[int, ...] = ()


def parse(given: object = None, internet: bool | None = None) -> Network:
    """The network of a new box; Invalid says what can't be had here."""
    return _read({} if given is None else given, internet, EGRESS | PORTS)


def update(given: object) -> Network:
    """Other egress for a box that runs: what is not said is as if it had never been."""
    return _read(given, None, EGRESS)


def _read(given: object, internet: object, known: set[str]) -> Network:
    if not isinstance(given, Mapping):
        raise Invalid("network is an object", hint='{"allowOut": ["api.example.com"], "denyOut": ["0.0.0.0/0"]}')
    if unknown := sorted(map(str, set(given) - known)):
        raise Invalid(f"network has no {unknown[0]!r} here", hint=f"known: {', '.join(sorted(known))}")
    said = {key: value for key, value in given.items() if value is not None}
    for key in ("allow_internet_access", "allowInternetAccess"):
        internet = said.pop(key, internet)
    if internet not in (None, True, False):
        raise Invalid("allow_internet_access is true or false")
    if "egressProxy" in said:
        raise Invalid(
            "egressProxy is not supported: what a box sends is dialed by this host's gateway",
            hint="leave it out; run the host where the proxy is the way out",
        )
    _dns(said.get("dnsServers"))
    allow, deny = _hosts("allowOut", said), _hosts("denyOut", said)
    if internet is False:
        deny = [*deny, str(EVERYTHING)]
    headers = _headers(said.get("rules"))
    egress = {key: value for key, value in (("allow", allow), ("deny", deny), ("headers", headers)) if value}
    narrow([], egress)  # what is wrong with it is said before there is a box
    public, mask = said.get("allowPublicTraffic", True), said.get("maskRequestHost")
    if not isinstance(public, bool):
        raise Invalid("allowPublicTraffic is true or false")
    if mask is not None and not (isinstance(mask, str) and _MASK.fullmatch(mask.replace("${PORT}", "1"))):
        raise Invalid(f"maskRequestHost {mask!r:.100} is not a host", hint="${PORT}-app.example.com")
    shown = dict(said)
    if headers:
        shown["rules"] = {
            host: [{"transform": {"headers": dict.fromkeys(values, "…")}}] for host, values in headers.items()
        }
    return Network(egress, shown, public, mask, _ports(said.get("httpsPorts")))


def _hosts(key: str, said: Mapping[str, Any]) -> list[Any]:
    found = said.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise Invalid(
            f"{key} is a list of hosts, addresses and networks", hint=f'{{"{key}": ["1.1.1.1", "8.8.8.0/24"]}}'
        )
    return found


def _headers(given: object) -> dict[str, dict[str, str]]:
    """The headers of each host, a later rule's before an earlier one's."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Invalid("rules are lists by host", hint='{"api.example.com": [{"transform": {"headers": {"X-A": "b"}}}]}')
    found: dict[str, dict[str, str]] = {}
    for host, listed in given.items():
        if not isinstance(listed, list):
            raise Invalid(f"the rules of {host!r:.100} are a list")
        merged: dict[str, str] = {}
        for one in listed:
            transform = (
                one.get("transform") or {} if isinstance(one, Mapping) and not set(one) - {"transform"} else None
            )
            values = transform.get("headers", {}) if isinstance(transform, Mapping) else None
            if not isinstance(values, Mapping) or set(transform or ()) - {"headers"}:
                raise Invalid(f"a rule of {host!r:.100} is not a transform of headers")
            if any("${e2b.identity." in text for text in values.values() if isinstance(text, str)):
                raise Invalid("workload identity tokens are not minted here", hint="use a secret: ${e2b.secrets.NAME}")
            merged = {
                **{k: v for k, v in merged.items() if k not in map(str.lower, values)},
                **{k.lower(): v for k, v in values.items()},
            }
        if merged:
            found[host] = merged
    return found


def _dns(given: object) -> None:
    """Names are answered by the gateway wherever a box asks, so a list of servers changes nothing; none at all can't be had."""
    if given is None:
        return
    if not isinstance(given, list) or len(given) > SERVERS:
        raise Invalid(f"dnsServers is a list of up to {SERVERS} IPv4 addresses")
    if not given:
        raise Invalid("dnsServers can't be empty: the gateway answers every question of a box", hint="leave it out")
    for one in given:
        try:
            ipaddress.IPv4Address(one if isinstance(one, str) else "")
        except ValueError:
            raise Invalid(f"{one!r:.100} in dnsServers is not an IPv4 address") from None


def _ports(given: object) -> tuple[int, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > 100:
        raise Invalid("httpsPorts is a list of ports")
    return tuple(check_port(port) for port in given)
