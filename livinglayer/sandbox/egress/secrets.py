"""Secrets of a box: placeholders become values on the way to hosts whose rule names them, values become placeholders on the way back.

Values are in no repr, event or error.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, quote_plus

from livinglayer.errors import Invalid, LimitExceeded

PREFIX = "LAYER_SECRET_"
MOST = 8 << 20  # bytes that placeholders of one text may become
CREDENTIALS = 100  # different Basic credentials a box may make
SHORTEST = 4  # a shorter value would be found, and replaced, in innocent text
TELLING = 8  # characters of a credential in a header from which on it is hidden: shorter ones are in innocent text
_CREDENTIAL = re.compile(r"auth|key|token|secret|cookie|pass|sign|cred|session")  # in the name of a header
_RANDOM = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])\S{20,}")  # or what looks like one
HEADER = b"LAYER_HEADER"
Escape = Callable[[str], bytes]


def variable(name: str) -> str:
    """The name of a variable for a secret that is called otherwise, as openai-api-key: the same every time, and another for another."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return name
    return f"{re.sub('[^A-Za-z0-9]', '_', name)[:80]:_>1}_{hashlib.sha256(name.encode()).hexdigest()[:8]}".lstrip(
        "0123456789"
    )


def plain(value: str) -> bytes:
    """As it is."""
    return value.encode()


def in_query(value: str) -> bytes:
    """Percent-encoded."""
    return quote(value, safe="").encode()


def in_form(value: str) -> bytes:
    """As in application/x-www-form-urlencoded."""
    return quote_plus(value).encode()


def in_json(value: str) -> bytes:
    """As inside a JSON string."""
    return json.dumps(value)[1:-1].encode()


def in_header(value: str) -> bytes:
    """As it is, if a header can carry it."""
    if not value.isprintable():
        raise Invalid("a secret with line breaks or control characters can't go into a header or credential")
    return value.encode()


@dataclass
class Used:
    """Names of secrets met in one request: put in, and left as placeholders."""

    swapped: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)


class Secrets:
    """What a box's placeholders stand for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise Invalid(f"secret name {name!r}", hint="letters, digits and _")
            if not isinstance(value, str) or len(value) < SHORTEST:
                raise Invalid(f"secret {name!r} is not a text of at least {SHORTEST} characters")
        self._values = dict(values)
        found = "|".join(sorted(map(re.escape, values), key=len, reverse=True))
        self._placeholder = re.compile(f"{PREFIX}({found})".encode()) if values else None
        self._longest = max((len(value.encode()) for value in values.values()), default=0)
        self._redaction: re.Pattern[bytes] | None = None
        self._credentials = 0
        self._forms: dict[bytes, bytes] = {}
        for name, value in values.items():
            placeholder = (PREFIX + name).encode()
            coded = base64.b64encode(value.encode())
            for form in {plain(value), in_query(value), in_form(value), in_json(value), coded, coded.rstrip(b"=")}:
                self._forms.setdefault(form, placeholder)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(sorted(self._values))})"

    def __bool__(self) -> bool:
        return bool(self._forms)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def also(self, headers: Iterable[tuple[str, str]]) -> None:
        """Hide the values of headers that the gateway sets, too: a server that repeats one must not reveal it."""
        for name, value in headers:
            if PREFIX in value or not (_CREDENTIAL.search(name) or _RANDOM.search(value)):
                continue
            for text in {value, value.rpartition(" ")[2]}:
                if len(text) >= TELLING and self._forms.setdefault(text.encode(), HEADER) is HEADER:
                    self._forms.setdefault(in_json(text), HEADER)
                    self._redaction = None

    def placeholders(self) -> dict[str, str]:
        """What a box finds in its environment under each name."""
        return {name: PREFIX + name for name in self._values}

    def swap(self, text: bytes, allowed: Collection[str], escape: Escape, used: Used) -> bytes:
        """Text with the allowed placeholders replaced; `used` learns what was met."""
        if self._placeholder is None or PREFIX.encode() not in text:
            return text

        def value(found: re.Match[bytes]) -> bytes:
            name = found[1].decode()
            if name not in allowed:
                used.kept.add(name)
                return found[0]
            used.swapped.add(name)
            return escape(self._values[name])

        if text.count(PREFIX.encode()) * self._longest * 3 > MOST:  # escaped, a value can be three times as long
            raise LimitExceeded("the request has too many placeholders")
        return self._placeholder.sub(value, text)

    def swap_header(self, name: bytes, value: bytes, allowed: Collection[str], used: Used) -> bytes:
        """A header value with placeholders replaced, also inside Basic credentials."""
        scheme, _, rest = value.partition(b" ")
        if name in (b"authorization", b"proxy-authorization") and scheme.lower() == b"basic":
            try:
                credential = base64.b64decode(rest.strip(), validate=True)
            except (binascii.Error, ValueError):
                return value
            swapped = self.swap(credential, allowed, in_header, used)
            if swapped == credential:
                return value
            coded = base64.b64encode(swapped)
            if coded not in self._forms:  # a server that repeats the credential must not reveal it
                if self._credentials >= CREDENTIALS:
                    raise LimitExceeded(f"more than {CREDENTIALS} different credentials with secrets")
                self._credentials += 1
                self._forms[coded] = rest.strip()
                self._redaction = None
            return scheme + b" " + coded
        return self.swap(value, allowed, in_header, used)

    def hide(self, text: bytes) -> bytes:
        """Text with every value replaced by its placeholder."""
        redactor = self.redactor()
        return redactor.feed(text) + redactor.end()

    def hide_text(self, text: str) -> str:
        """Like `hide`, for what goes into events and messages."""
        return self.hide(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape") if self else text

    def redactor(self, same_length: bool = False) -> Redactor:
        """For a stream; same_length keeps every byte in its place, with asterisks."""
        if self._redaction is None and self._forms:
            ordered = sorted(self._forms, key=len, reverse=True)
            self._redaction = re.compile(b"|".join(map(re.escape, ordered)))
        return Redactor(self._forms, self._redaction, same_length)

    def scanner(self, used: Used) -> Scanner:
        """Looks for placeholders in a stream that goes out as it is."""
        return Scanner(self, used)


class Scanner:
    """Notes placeholders that leave in a body unswapped."""

    def __init__(self, secrets: Secrets, used: Used) -> None:
        self._secrets, self._used, self._tail = secrets, used, b""

    def feed(self, data: bytes) -> None:
        if self._secrets:
            self._secrets.swap(self._tail + data, (), plain, self._used)
            self._tail = (self._tail + data)[-128:]


class Redactor:
    """Replaces forms in a stream, also when a border of chunks runs through one; holds back only what could begin one."""

    def __init__(self, forms: Mapping[bytes, bytes], any_: re.Pattern[bytes] | None, same_length: bool) -> None:
        self._forms, self._any, self._same_length = forms, any_, same_length
        self._held = b""

    def _other(self, found: bytes) -> bytes:
        return b"*" * len(found) if self._same_length else self._forms[found]

    def __repr__(self) -> str:
        return "Redactor()"

    def feed(self, data: bytes) -> bytes:
        """What can be passed on now."""
        if self._any is None:
            return data
        data = self._held + data
        keep = self._begun(data)
        out, at = [], 0
        for found in self._any.finditer(data):
            if found.start() >= len(data) - keep:
                break  # it could be the beginning of a longer one
            out += [data[at : found.start()], self._other(found[0])]
            at = found.end()
        cut = max(at, len(data) - keep)
        out.append(data[at:cut])
        self._held = data[cut:]
        return b"".join(out)

    def end(self) -> bytes:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, b""
        return self._any.sub(lambda found: self._other(found[0]), held) if self._any else held

    def _begun(self, data: bytes) -> int:
        """Length of the longest end of data that could be the beginning of a form."""
        longest = 0
        for form in self._forms:
            for size in range(min(len(form) - 1, len(data)), longest, -1):
                if data.endswith(form[:size]):
                    longest = size
                    break
        return longest
