"""What a model's API answered: tokens, model, why it stopped, what it said; Anthropic Messages and OpenAI Chat Completions.

Reads along with what passes, as JSON or server-sent events, whole or cut off. Nothing that comes makes it fail: what it
can't read, it estimates, and says so.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

APIS = ("anthropic", "openai")
MOST = 10**9  # tokens that one answer can be of; what claims more counts as this many
LINE = 1 << 20  # bytes of one server-sent event
WHOLE = (
    1 << 20
)  # bytes of an answer in one piece of JSON that is read while it passes; of a larger one, what its end says
TAIL = 1 << 16
BYTES = 3  # of text for each token, where nobody counted: rather too many tokens than too few
BLOCKS = 10_000  # parts of one answer that are told apart
_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*(?=\{)')  # within a text its quotes would be escaped


class Reader:
    """Takes the body of one answer in pieces, in the order they come. With `keep` it also knows what was said."""

    def __init__(self, kind: str = "", keep: bool = False) -> None:
        self.model: str | None = None
        self.stop: str | None = None
        self.error: str | None = None
        self.text: list[str] = []
        self.calls: list[dict[str, Any]] = []  # id, name, arguments (an object, or the text that is none)
        self.blocks: list[dict[str, Any]] = []  # Anthropic's content, as it is sent back in the next request
        self._keep, self._size, self._said = keep, 0, 0  # bytes of it all, and of what was said
        self._stream: bool | None = True if kind.lower().startswith("text/event-stream") else None
        self._held, self._skipping = bytearray(), False
        self._data: list[bytes] = []
        self._pending = 0  # bytes of it
        self._counts: dict[str, int] = {}
        self._counted = self._ended = self._free = False
        self._open: dict[tuple[str, int], dict[str, Any]] = {}

    # What comes

    def feed(self, data: bytes) -> None:
        """The next piece."""
        self._size += len(data)
        if self._stream is None and (start := data.lstrip()[:1]):
            self._stream = start not in b"{["
        self._held += data
        if self._stream:
            if b"\n" in data:
                self._lines()
            if len(self._held) > LINE:
                self._held.clear()
                self._skipping = True
        elif self._size > WHOLE and not self._keep and len(self._held) > 2 * TAIL:
            del self._held[:-TAIL]

    def _lines(self) -> None:
        *lines, rest = self._held.split(b"\n")
        self._held = bytearray(rest)
        for line in lines:
            if self._skipping:
                self._skipping = False
                continue
            self._line(bytes(line).rstrip(b"\r"))

    def _line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._pending += len(value) + 1
            if self._pending <= LINE:
                self._data.append(value.removeprefix(b" "))
        elif not line and self._data:
            data, self._data, self._pending = b"\n".join(self._data), [], 0
            if data.strip() != b"[DONE]":
                self._message(data)

    def _message(self, data: bytes) -> None:
        try:
            found = json.loads(data)
            if isinstance(found, dict):
                self._take(found)
        except (ValueError, RecursionError):
            pass

    def end(self) -> None:
        """There is no more of it."""
        if self._stream:
            self._line(bytes(self._held).rstrip(b"\r"))
            self._line(b"")
        elif self._size <= WHOLE or self._keep:
            self._message(bytes(self._held))
        else:
            self._ends_with(bytes(self._held[-TAIL:]))
        self._held.clear()
        for call in self.calls:
            call["arguments"] = _parsed(call["arguments"])
        for block in self.blocks:
            if block.get("type") == "tool_use":
                block["input"] = _parsed(block["input"])

    def _ends_with(self, data: bytes) -> None:
        """The counts of an answer that is too large to be read."""
        for found in _USAGE.finditer(data):
            try:
                usage, _ = json.JSONDecoder().raw_decode(
                    data[found.end() : found.end() + 4096].decode("utf-8", "replace")
                )
                self._usage(usage)
            except (ValueError, RecursionError):
                continue

    # What it means

    def _take(self, found: dict[str, Any]) -> None:
        for part in (found, found.get("message"), found.get("response")):
            if isinstance(part, dict):
                self._usage(part.get("usage"))
                if isinstance(part.get("model"), str):
                    self.model = part["model"][:200]
        kind = found.get("type")
        if set(found) == {"input_tokens"}:
            self._free = True  # somebody asked how many there would be
        if isinstance(error := found.get("error"), dict | str):
            self.error = str(error.get("message") if isinstance(error, dict) else error)[:1000]
        if kind == "message":
            for at, block in enumerate(_dicts(found.get("content"))):
                self._block(at, block)
            self._stopped(found.get("stop_reason"))
        elif kind == "content_block_start" and isinstance(found.get("content_block"), dict):
            self._block(_index(found), found["content_block"], True)
        elif kind == "content_block_delta" and isinstance(found.get("delta"), dict):
            self._delta(_index(found), found["delta"])
        elif kind == "message_delta" and isinstance(found.get("delta"), dict):
            self._stopped(found["delta"].get("stop_reason"))
        for choice in _dicts(found.get("choices")):
            for part in (choice.get("message"), choice.get("delta")):
                if isinstance(part, dict):
                    self._choice(_index(choice), part)
            self._stopped(choice.get("finish_reason"))

    def _stopped(self, why: object) -> None:
        if isinstance(why, str):
            self.stop, self._ended = why[:100], True

    def _usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        said = {
            "input": usage.get("input_tokens", usage.get("prompt_tokens")),
            "output": usage.get("output_tokens", usage.get("completion_tokens")),
            "written": usage.get("cache_creation_input_tokens"),  # beside the input, unlike those of details
            "read": usage.get("cache_read_input_tokens"),
            "cached": details.get("cached_tokens") if isinstance(details, dict) else None,
        }
        for name, value in said.items():  # counts grow while an answer is streamed: the last is the largest
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if type(value) is int and value >= 0:
                self._counts[name] = max(self._counts.get(name, 0), min(value, MOST))
                self._counted = True

    def _block(self, at: int, block: dict[str, Any], begun: bool = False) -> None:
        if block.get("type") == "text" and isinstance(block.get("text"), str):
            self._words(block["text"])
        elif block.get("type") == "tool_use" and not begun:
            self._said += len(_dumped(block.get("input")))
        if self._keep and len(self.blocks) < BLOCKS:
            made = dict(block)
            if made.get("type") == "tool_use":
                call = {"id": made.get("id"), "name": made.get("name"), "arguments": "" if begun else made.get("input")}
                self.calls.append(call)
                self._open["call", at] = call
                made["input"] = "" if begun else made.get("input")
            self.blocks.append(made)
            self._open["block", at] = made

    def _delta(self, at: int, delta: dict[str, Any]) -> None:
        if isinstance(words := delta.get("text"), str):
            self._words(words)
        for key in ("partial_json", "thinking"):
            if isinstance(delta.get(key), str):
                self._said += len(delta[key].encode("utf-8", "replace"))
        block, call = self._open.get(("block", at)), self._open.get(("call", at))
        if block is not None:
            for key, into in (
                ("text", "text"),
                ("thinking", "thinking"),
                ("signature", "signature"),
                ("partial_json", "input"),
            ):
                if isinstance(delta.get(key), str) and isinstance(block.get(into, ""), str):
                    block[into] = block.get(into, "") + delta[key]
        if call is not None and isinstance(delta.get("partial_json"), str) and isinstance(call["arguments"], str):
            call["arguments"] += delta["partial_json"]

    def _choice(self, at: int, part: dict[str, Any]) -> None:
        if isinstance(part.get("content"), str):
            self._words(part["content"])
        for key in ("refusal", "reasoning_content", "reasoning"):
            if isinstance(part.get(key), str):
                self._said += len(part[key].encode("utf-8", "replace"))
        for order, call in enumerate(_dicts(part.get("tool_calls"))):
            what = call["function"] if isinstance(call.get("function"), dict) else {}
            said = what.get("arguments")
            self._said += len(_dumped(said))
            number = at * BLOCKS + (_index(call) if "index" in call else order)
            known = self._open.get(("call", number))
            if known is not None and call.get("id") in (None, "", known["id"]):
                if isinstance(said, str) and isinstance(known["arguments"], str):
                    known["arguments"] += said
            elif self._keep and len(self.calls) < BLOCKS:
                made = {"id": call.get("id"), "name": what.get("name"), "arguments": "" if said is None else said}
                self.calls.append(made)
                self._open["call", number] = made

    def _words(self, words: str) -> None:
        self._said += len(words.encode("utf-8", "replace"))
        if self._keep:
            self.text.append(words)

    # What is told

    def tokens(self, asked: int, status: int | None, posted: bool) -> dict[str, Any]:
        """Tokens in, of those from a cache, and out, of a request of `asked` bytes; what nobody counted is estimated."""
        counts = self._counts
        read, cached = counts.get("read", 0), counts.get("cached", 0)
        found: dict[str, Any] = {
            "input": min(counts.get("input", 0) + counts.get("written", 0) + read, MOST), "cached": min(read + cached, MOST),
            "output": counts.get("output", 0),
        }  # fmt: skip
        worked = posted and not self._free and (status is None or status < 300)
        if worked and "input" not in counts:
            found |= {"input": min(math.ceil(asked / BYTES), MOST), "estimated": True}
        if worked and (not self._counted or (self._stream and not self._ended)):
            said = math.ceil((self._said or self._size) / BYTES) if status is not None else 0
            if said > found["output"]:
                found |= {"output": min(said, MOST), "estimated": True}
        return found

    def said(self) -> dict[str, Any]:
        """Text, tool calls and error, as far as there are any."""
        found: dict[str, Any] = {"text": "".join(self.text), "calls": self.calls, "error": self.error}
        return {key: value for key, value in found.items() if value}


def read(data: bytes, kind: str = "") -> Reader:
    """What a body that was kept says."""
    reader = Reader(kind, keep=True)
    reader.feed(data)
    reader.end()
    return reader


def check(api: object) -> Literal["anthropic", "openai"] | None:
    """The API of a rule, or None if it is none that is known."""
    return api if api in APIS else None  # type: ignore[return-value]


def _dicts(given: object) -> list[dict[str, Any]]:
    return [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []


def _index(given: dict[str, Any]) -> int:
    found = given.get("index")
    return found if type(found) is int and 0 <= found < BLOCKS else 0


def _dumped(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _parsed(value: object) -> object:
    """The arguments of a call: an object, or what came instead."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value or "{}")
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict) else value
