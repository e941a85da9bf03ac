"""Host names and authorities: one parser for rules, DNS questions, SNI, Host headers and dialing."""

from __future__ import annotations

import ipaddress
import re

import idna

from livinglayer.errors import Invalid

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z")
_PORT = re.compile(r"[1-9][0-9]{0,4}\Z", re.ASCII)


def host(text: str | bytes) -> str:
    """The one spelling of a host: lower case, no trailing dot, A-labels, or a plain dotted IPv4; Invalid for all else.

    Bytes come from a wire and must be ASCII; text comes from a person and may be international.
    """
    try:
        name = text.decode("ascii") if isinstance(text, bytes) else text
        if not name.isascii():
            name = idna.encode(name, uts46=True).decode("ascii")
    except (UnicodeError, idna.IDNAError):
        raise Invalid(f"{text!r} is not a host name", hint="write the name as letters, digits and hyphens") from None
    name = name.lower()
    name = name.removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.match(label) for label in labels):
        raise Invalid(f"{text!r} is not a host name", hint="no port, user, path, brackets or control characters here")
    if _NUMBER.match(labels[-1]):
        # A name that ends in a number is an address to some resolvers (0177.1, 0x7f.1, 2130706433): one form only.
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError:
            raise Invalid(f"{text!r} is not an IPv4 address", hint="write four decimal numbers") from None
    return name


def is_address(name: str) -> bool:
    """Whether a host, as `host` gives it, is an IPv4 address rather than a name."""
    return name.rpartition(".")[2].isdigit()


def port(text: str) -> int:
    """A port number in plain decimal."""
    if not _PORT.match(text) or int(text) > 65535:
        raise Invalid(f"{text!r} is not a port", hint="a number from 1 to 65535")
    return int(text)


def authority(text: str | bytes, default: int) -> tuple[str, int]:
    """Host and port of `host[:port]` as in a Host header or a URL; user names are refused."""
    if isinstance(text, bytes):
        try:
            text = text.decode("ascii")
        except UnicodeError:
            raise Invalid(f"{text!r} is not a host and port") from None
    name, colon, number = text.partition(":")
    return host(name.encode() if name.isascii() else name), port(number) if colon else default
