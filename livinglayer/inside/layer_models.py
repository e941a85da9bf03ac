"""Models that are spoken to from inside a box: two message APIs, each conversation in the shape its API has.

Standard library only, any Python from 3.8 on. Answers are streamed. What goes wrong is asked again where that may help, at
most RETRIES times in a row, and is a Trouble otherwise: its code is the exit code of a program that can't go on without.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import threading
import time
from email.utils import parsedate_to_datetime
from typing import Any, Callable, Dict, Iterator, NamedTuple
from urllib.parse import urlsplit

RETRIES = 5  # in a row
CONNECT = 30.0  # seconds to reach the server
PATIENCE = 60.0  # the longest pause between two attempts, whatever a server asks for
CALLS = 64  # of one answer that are taken up
ANSWER = 64 << 20  # bytes of one answer on the wire; an event of some hundred bytes may bring one token
LINE = 8 << 20  # bytes of one event
ARGUMENTS = 1 << 20  # characters of the arguments of one call
DEPTH = 100  # levels of them

# How a conversation can end, as exit codes; those of the layer where they mean the same.
DENIED, UNAVAILABLE, TIMED_OUT = 3, 8, 9
REJECTED, RATE_LIMITED, BROKEN = 10, 11, 12

Message = Dict[str, Any]
Say = Callable[[str], None]


class Trouble(Exception):
    """Why it does not go on; `again` says whether asking once more may help, `wait` how long to wait before."""

    def __init__(self, code: int, message: str, again: bool = False, wait: float | None = None) -> None:
        super().__init__(message)
        self.code, self.again, self.wait = code, again, wait


class Call(NamedTuple):
    """A call that the model asks for; `problem` says why it can't be made as it stands."""

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str | None = None
    given: Any = None  # the arguments as they came, where they are a problem


class Answer(NamedTuple):
    """What the model said, and the message by which the conversation remembers it."""

    text: str
    calls: list[Call]
    stop: str  # end, length, refusal
    message: Message | None  # None when nothing was said
    dropped: int = 0  # calls that were too many


class Model:
    """A conversation with one model. Told apart by `api`; the rest is common to both."""

    api = path = ""
    counts: tuple[str, str] = ("", "")
    ids = r"[!-~]{1,256}"

    def __init__(self, given: dict[str, Any], system: str, tools: list[dict[str, Any]], say: Say) -> None:
        self.given, self.system, self.tools, self.say = given, system, tools, say
        self.messages: list[Message] = []
        self.used = [0, 0]  # tokens, in and out
        self.counted = [0, 0]  # of the answer that is under way
        self.seen: list[str] = []  # ids of calls, of which none may come twice
        self.name = str(given["model"])
        self.idle = float(given.get("timeout") or 300)
        url = urlsplit(str(given["url"]))
        if url.scheme not in ("http", "https") or not url.hostname:
            raise Trouble(REJECTED, f"the model's url {str(given['url'])!r} is not http:// or https://")
        self.host, self.port, self.tls = url.hostname, url.port, url.scheme == "https"
        base = url.path.rstrip("/")
        self.target = base if base.endswith(self.path) else base + ("" if base.endswith("/v1") else "/v1") + self.path
        variable = given.get("secret")
        self.key = os.environ.get(variable, "") if variable else ""
        self.link: http.client.HTTPConnection | None = None
        self.sock: socket.socket | None = None  # its own, which it lets go of when the server will hang up

    # One answer

    def ask(self) -> Answer:
        """The model's next answer, which is then part of the conversation."""
        for attempt in range(RETRIES + 1):
            try:
                answer = self._attempt()
            except Trouble as trouble:
                self._hang_up()
                if not trouble.again:
                    raise
                if attempt == RETRIES:
                    raise Trouble(trouble.code, f"{trouble} ({RETRIES + 1} attempts)") from None
                pause = float(os.environ.get("LAYER_AGENT_PAUSE") or 1) * 2**attempt * random.uniform(0.75, 1.25)
                pause = min(pause if trouble.wait is None else trouble.wait, PATIENCE)
                self.say(f"\n[{trouble}; asking again in {pause:.1f} s]\n")
                time.sleep(pause)
            else:
                self.used = [self.used[0] + self.counted[0], self.used[1] + self.counted[1]]
                if answer.message:
                    self.messages.append(answer.message)
                return answer
        raise AssertionError("unreachable")

    def _attempt(self) -> Answer:
        self.counted = [0, 0]
        body = json.dumps(self.body(), allow_nan=False).encode()
        late = threading.Event()
        watch = threading.Timer(self.idle * 10, self._too_late, (late,))  # a server that drips is never idle
        watch.daemon = True
        watch.start()
        try:
            response = self._send(body)
            if response.status != 200:
                raise self._refusal(response)
            kind = (response.getheader("content-type") or "").lower()
            answer = self.taken(events(response)) if "event-stream" in kind else self.whole(_value(_all(response)))
            self._settle(response)
            return answer
        except Trouble:
            if late.is_set():
                raise self._slow() from None
            raise
        except (socket.timeout, TimeoutError):
            raise Trouble(TIMED_OUT, f"the model server said nothing for {self.idle:g} s", again=True) from None
        except Exception as error:
            if late.is_set():
                raise self._slow() from None
            if isinstance(error, (http.client.HTTPException, OSError)):
                raise Trouble(BROKEN, f"the model's answer broke off: {_why(error)}", again=True) from None
            what = f"the model server does not answer as the {self.api} API does: {_why(error)}"
            raise Trouble(BROKEN, what, again=True) from None
        finally:
            watch.cancel()

    def _slow(self) -> Trouble:
        return Trouble(TIMED_OUT, f"the model's answer had no end after {self.idle * 10:g} s", again=True)

    def _too_late(self, late: threading.Event) -> None:
        late.set()
        if self.sock is not None:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _send(self, body: bytes) -> http.client.HTTPResponse:
        """Send a request over the connection that is kept, or a new one; the head of the answer."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **self.headers()}
        kept = self.link
        try:
            if kept is None:
                made = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
                self.link = made(self.host, self.port, timeout=CONNECT)
                self.link.connect()
                self.sock = self.link.sock
        except (socket.timeout, TimeoutError):
            what = f"the model server {self.host} could not be reached within {CONNECT:g} s"
            raise Trouble(TIMED_OUT, what, again=True) from None
        except OSError as error:
            what = f"the model server {self.host} can't be reached: {_why(error)}"
            raise Trouble(UNAVAILABLE, what, again=True) from None
        assert self.link is not None and self.sock is not None
        try:
            self.sock.settimeout(self.idle)
            self.link.request("POST", self.target, body, headers)
            return self.link.getresponse()
        except (socket.timeout, TimeoutError):
            raise
        except (http.client.HTTPException, OSError) as error:
            self._hang_up()
            if kept is not None:  # it was closed while it waited for its next request
                return self._send(body)
            what = f"the model server {self.host} hung up without an answer: {_why(error)}"
            raise Trouble(UNAVAILABLE, what, again=True) from None

    def _settle(self, response: http.client.HTTPResponse) -> None:
        """Keep the connection if the answer has come to its end, which follows it at once."""
        try:
            if self.sock is not None:
                self.sock.settimeout(1.0)
            if response.will_close or response.read(4096):
                self._hang_up()
        except (http.client.HTTPException, OSError):
            self._hang_up()

    def _hang_up(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = self.sock = None

    def _refusal(self, response: http.client.HTTPResponse) -> Trouble:
        """What an answer that is none means."""
        data, status = _all(response), response.status
        said = _clean(data.decode("utf-8", "replace"))
        try:
            error = json.loads(said)["error"]
            said = str(error["message"] if isinstance(error, dict) else error)
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        said = " ".join(said.split())[:500] or "no reason given"
        if (response.getheader("layer-egress") or "") == "deny":
            return Trouble(DENIED, f"the contract does not let this box reach the model: {said}")
        if status in (401, 403):
            secret = self.given.get("secret")
            return Trouble(DENIED, f"the model server refuses the key (secret {secret!r}): {said}")
        if status == 429:
            wait = _after(response.getheader("retry-after"))
            return Trouble(RATE_LIMITED, f"the model server limits the rate: {said}", again=True, wait=wait)
        if status >= 500 or status in (408, 409):
            what = f"the model server failed with {status}: {said}"
            return Trouble(UNAVAILABLE, what, again=True, wait=_after(response.getheader("retry-after")))
        if status == 400 and self.adapt(said):
            return Trouble(REJECTED, "the model server wants it otherwise", again=True, wait=0)
        return Trouble(REJECTED, f"the model server refuses the request with {status}: {said}")

    def count(self, usage: Any) -> None:
        """What a server says of tokens, each time the sum so far."""
        for at, key in enumerate(self.counts):
            if isinstance(usage, dict) and isinstance(usage.get(key), int):
                self.counted[at] = usage[key]

    def adapt(self, said: str) -> bool:
        """Whether the next request will be another, after the server said this."""
        return False

    # What the model asked for

    def call(self, number: int, given_id: Any, name: Any, arguments: Any, cut: bool) -> Call:
        """One call, made whole: an id of its own, a name the API takes, arguments or the problem with them."""
        problem, known, given = None, [tool["name"] for tool in self.tools], arguments
        if isinstance(arguments, str):
            arguments, problem = _arguments(arguments)
            if problem and cut:
                problem += "; the answer was cut at max_tokens, so say less at a time"
        if not isinstance(arguments, dict):
            arguments, problem = (
                {},
                problem or f"the arguments are no JSON object: {_short(_clean(str(given)).encode())}",
            )
        name = _clean(name) if isinstance(name, str) else ""
        if name not in known:
            problem = f"there is no tool {name[:100]!r}; there are: {', '.join(known) or 'none'}"
            name = re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or "unknown"
        if not isinstance(given_id, str) or given_id in self.seen or not re.fullmatch(self.ids, given_id):
            given_id = f"call_{len(self.seen)}_{number}"
        self.seen.append(given_id)
        return Call(given_id, name, arguments, problem, _clean(str(given))[:1000] if problem else None)

    # What an API says in its own way

    def headers(self) -> dict[str, str]:
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def taken(self, stream: Iterator[Any]) -> Answer:
        """The answer that a stream of events is."""
        raise NotImplementedError

    def whole(self, value: Any) -> Answer:
        """The answer of a server that does not stream."""
        raise NotImplementedError

    def tell(self, text: str) -> None:
        """Say something to the model."""
        raise NotImplementedError

    def give(self, results: list[tuple[Call, str, bool]]) -> None:
        """The results of the calls it asked for, with whether each is an error."""
        raise NotImplementedError

    def resume(self, messages: list[Message]) -> list[Call]:
        """Go on from a transcript; the calls it ends with, which nobody has made yet."""
        raise NotImplementedError


NOT_MADE = "this call was not made"


class Anthropic(Model):
    """The Messages API."""

    api, path = "anthropic", "/messages"
    counts = ("input_tokens", "output_tokens")
    ids = r"[a-zA-Z0-9_-]{1,64}"
    stops = {"max_tokens": "length", "model_context_window_exceeded": "length", "refusal": "refusal"}

    def headers(self) -> dict[str, str]:
        return {"anthropic-version": "2023-06-01", **({"x-api-key": self.key} if self.key else {})}

    def body(self) -> dict[str, Any]:
        body = {"model": self.name, "max_tokens": int(self.given.get("max_tokens") or 8192), "stream": True}
        if self.system:
            body["system"] = self.system
        if self.tools:
            body["tools"] = [{key: tool[key] for key in ("name", "description", "input_schema")} for tool in self.tools]
        return {**body, "messages": self.messages}

    def taken(self, stream: Iterator[Any]) -> Answer:
        blocks: dict[int, dict[str, Any]] = {}
        parts: dict[tuple[int, str], list[str]] = {}
        stop, ended = None, False
        grown = {"text_delta": "text", "input_json_delta": "partial_json", "thinking_delta": "thinking"}
        grown["signature_delta"] = "signature"
        for event in stream:
            kind = event["type"]
            if kind == "message_start":
                self.count(event["message"].get("usage"))
            elif kind == "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            elif kind == "content_block_delta":
                field = grown.get(event["delta"]["type"])
                if field and blocks[event["index"]]:
                    piece = event["delta"][field]
                    parts.setdefault((event["index"], field), []).append(piece)
                    self.say(piece if field == "text" else "")
            elif kind == "message_delta":
                stop = event["delta"].get("stop_reason") or stop
                self.count(event.get("usage"))
            elif kind == "error":
                raise self._failed(event["error"])
            elif kind == "message_stop":
                ended = True
                break
        if not ended:
            raise Trouble(BROKEN, "the model's answer broke off in the middle", again=True)
        for (index, field), pieces in parts.items():
            block = blocks[index]
            if field == "partial_json":
                block["input"] = "".join(pieces)
            else:
                block[field] = str(block.get(field) or "") + "".join(pieces)
        return self._answer([blocks[index] for index in sorted(blocks)], stop)

    def whole(self, value: Any) -> Answer:
        if value.get("type") == "error":
            raise self._failed(value["error"])
        self.count(value.get("usage"))
        answer = self._answer([dict(block) for block in value["content"]], value.get("stop_reason"))
        self.say(answer.text)
        return answer

    @staticmethod
    def _failed(error: dict[str, Any]) -> Trouble:
        kind, said = str(error.get("type")), str(error.get("message"))[:500]
        code = RATE_LIMITED if kind == "rate_limit_error" else UNAVAILABLE
        if kind == "invalid_request_error":
            return Trouble(REJECTED, f"the model server refuses the request: {said}")
        return Trouble(code, f"the model server failed in the middle of an answer: {said} ({kind})", True)

    def _answer(self, blocks: list[dict[str, Any]], stop: str | None) -> Answer:
        content: list[dict[str, Any]] = []
        texts: list[str] = []
        calls: list[Call] = []
        dropped = 0
        for block in blocks:
            if block["type"] == "text":
                text = _clean(str(block["text"]))
                if text.strip():
                    texts.append(text)
                    content.append({"type": "text", "text": text})
            elif block["type"] == "tool_use":
                if len(calls) == CALLS:
                    dropped += 1
                    continue
                call = self.call(len(calls), block.get("id"), block.get("name"), block["input"], stop == "max_tokens")
                calls.append(call)
                content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
            elif block["type"] in ("thinking", "redacted_thinking"):
                content.append(block)  # as it is: it is signed
        message = {"role": "assistant", "content": content} if texts or calls else None
        return Answer("".join(texts), calls, self.stops.get(str(stop), "end"), message, dropped)

    def tell(self, text: str) -> None:
        self._user([{"type": "text", "text": text}])

    def give(self, results: list[tuple[Call, str, bool]]) -> None:
        blocks: list[dict[str, Any]] = []
        for call, text, is_error in results:
            block: dict[str, Any] = {"type": "tool_result", "tool_use_id": call.id, "content": text or "(nothing)"}
            blocks.append({**block, "is_error": True} if is_error else block)
        self._user(blocks)

    def _user(self, blocks: list[dict[str, Any]]) -> None:
        """Roles alternate: what the user says twice in a row is one message."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1] = {"role": "user", "content": _blocks(self.messages[-1]["content"]) + blocks}
        else:
            self.messages.append({"role": "user", "content": blocks})

    def resume(self, messages: list[Message]) -> list[Call]:
        waiting: list[Call] = []
        for message in messages:
            blocks = _blocks(message["content"])
            if message["role"] == "user":
                have = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
                missing = [call for call in waiting if call.id not in have]
                results = [block for block in blocks if block["type"] == "tool_result"]
                if missing:
                    self.give([(call, NOT_MADE, True) for call in missing])
                self._user(results + [block for block in blocks if block["type"] != "tool_result"])
                waiting = []
            else:
                if self.messages and self.messages[-1]["role"] == "assistant":
                    self.messages[-1]["content"] = _blocks(self.messages[-1]["content"]) + blocks
                else:
                    self.messages.append({"role": "assistant", "content": blocks})
                asked = [block for block in blocks if block["type"] == "tool_use"]
                waiting += [Call(block["id"], block["name"], block["input"]) for block in asked]
                self.seen += [block["id"] for block in asked]
        return waiting


class OpenAI(Model):
    """The Chat Completions API, as OpenAI and many others speak it."""

    api, path = "openai", "/chat/completions"
    stops = {"length": "length", "content_filter": "refusal"}
    counts = ("prompt_tokens", "completion_tokens")
    limit = "max_tokens"
    asks_counts = True

    def headers(self) -> dict[str, str]:
        return {"Authorization": "Bearer " + self.key} if self.key else {}

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.name, "messages": self.messages, "stream": True}
        if self.system and not any(each["role"] in ("system", "developer") for each in self.messages[:1]):
            body["messages"] = [{"role": "system", "content": self.system}] + self.messages
        if self.asks_counts:
            body["stream_options"] = {"include_usage": True}
        if self.given.get("max_tokens"):
            body[self.limit] = int(self.given["max_tokens"])
        if self.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": tool["description"],
                        "parameters": tool["input_schema"],
                    },
                }
                for tool in self.tools
            ]
        return body

    def adapt(self, said: str) -> bool:
        # The API has two names for the limit, of which newer models refuse the old and other servers do not know the new.
        if "max_completion_tokens" in said and self.limit == "max_tokens":
            self.limit = "max_completion_tokens"
            return True
        if "stream_options" in said and self.asks_counts:
            self.asks_counts = False
            return True
        return False

    def taken(self, stream: Iterator[Any]) -> Answer:
        spoken: dict[str, list[str]] = {"content": [], "refusal": [], "reasoning_content": []}
        calls: dict[Any, dict[str, Any]] = {}
        stop, last = None, None
        for event in stream:
            if event.get("error"):
                raise self._failed(event["error"])
            self.count(event.get("usage"))
            for choice in event.get("choices") or ():
                if choice.get("index"):
                    continue
                stop = choice.get("finish_reason") or stop
                delta = choice.get("delta") or {}
                for field, pieces in spoken.items():
                    if delta.get(field):
                        pieces.append(delta[field])
                        self.say(delta[field] if field != "reasoning_content" else "")
                for part in delta.get("tool_calls") or ():
                    index = part.get("index")
                    if index is None:  # some servers leave it out, and send each call in one piece
                        index = last if last is not None and not part.get("id") else len(calls)
                    last = index
                    call = calls.setdefault(index, {"id": None, "name": None, "arguments": []})
                    function = part.get("function") or {}
                    call["id"], call["name"] = call["id"] or part.get("id"), call["name"] or function.get("name")
                    if function.get("arguments"):
                        call["arguments"].append(function["arguments"])
        if stop is None:
            raise Trouble(BROKEN, "the model's answer broke off in the middle", again=True)
        asked = [(call["id"], call["name"], "".join(call["arguments"])) for call in calls.values()]
        return self._answer({field: "".join(pieces) for field, pieces in spoken.items()}, asked, stop)

    def whole(self, value: Any) -> Answer:
        if value.get("error"):
            raise self._failed(value["error"])
        self.count(value.get("usage"))
        choice = value["choices"][0]
        spoken = choice["message"]
        asked = [
            (call.get("id"), call["function"].get("name"), call["function"].get("arguments"))
            for call in spoken.get("tool_calls") or ()
        ]
        fields = {field: spoken.get(field) or "" for field in ("content", "refusal", "reasoning_content")}
        answer = self._answer(fields, asked, choice.get("finish_reason"))
        self.say(answer.text)
        return answer

    @staticmethod
    def _failed(error: Any) -> Trouble:
        said = str(error.get("message") if isinstance(error, dict) else error)[:500]
        kind = str(error.get("type") or error.get("code")) if isinstance(error, dict) else "error"
        if kind == "invalid_request_error":
            return Trouble(REJECTED, f"the model server refuses the request: {said}")
        code = RATE_LIMITED if "rate_limit" in kind else UNAVAILABLE
        return Trouble(code, f"the model server failed in the middle of an answer: {said} ({kind})", True)

    def _answer(self, spoken: dict[str, str], asked: list[tuple[Any, Any, Any]], stop: str | None) -> Answer:
        cut = stop == "length"
        calls = [self.call(at, *call, cut=cut) for at, call in enumerate(asked[:CALLS])]
        text = _clean(spoken["content"] + spoken["refusal"])
        message: Message | None = None
        if text.strip() or calls:
            message = {"role": "assistant", "content": text or None}
            if spoken["reasoning_content"]:
                message["reasoning_content"] = _clean(spoken["reasoning_content"])  # servers that send it want it back
            if calls:
                message["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                    }
                    for call in calls
                ]
        kind = "refusal" if spoken["refusal"] else self.stops.get(str(stop), "end")
        return Answer(text, calls, kind, message, max(0, len(asked) - CALLS))

    def tell(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def give(self, results: list[tuple[Call, str, bool]]) -> None:
        for call, text, is_error in results:
            content = "Error: " + text if is_error else text or "(nothing)"
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def resume(self, messages: list[Message]) -> list[Call]:
        waiting: list[Call] = []
        for message in messages:
            if message["role"] == "tool":
                waiting = [call for call in waiting if call.id != message["tool_call_id"]]
            elif waiting:
                self.give([(call, NOT_MADE, True) for call in waiting])
                waiting = []
            self.messages.append(dict(message))
            for call in message.get("tool_calls") or ():
                arguments, problem = _arguments(call["function"]["arguments"])
                waiting.append(Call(call["id"], call["function"]["name"], arguments or {}, problem))
                self.seen.append(call["id"])
        return waiting


MODELS = {kind.api: kind for kind in (Anthropic, OpenAI)}


# -- the wire ---------------------------------------------------------------------------------------------------------


def events(response: Any) -> Iterator[Any]:
    """The data of each server-sent event, as JSON; ends at [DONE] and with the stream."""
    data: list[bytes] = []
    for line in _lines(response):
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
            raise ValueError(f"{_short(line)} is no server-sent event")
        elif not line and data:
            whole = b"\n".join(data)
            data = []
            if whole == b"[DONE]":
                return
            yield _value(whole)
    if data and data != [b"[DONE]"]:
        yield _value(b"\n".join(data))


def _lines(response: Any) -> Iterator[bytes]:
    rest, total = bytearray(), 0
    while True:
        piece = response.read1(65536)
        total += len(piece)
        if total > ANSWER or len(rest) > LINE:
            raise ValueError("it has no end")
        if not piece:
            break
        rest += piece
        if b"\n" in piece:
            *whole, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in whole:
                yield line.rstrip(b"\r")
    if rest:
        yield bytes(rest).rstrip(b"\r")


def _all(response: http.client.HTTPResponse) -> bytes:
    data = response.read(LINE + 1)
    if len(data) > LINE:
        raise ValueError("it has no end")
    return data


def _value(data: bytes) -> Any:
    try:
        value = json.loads(data.decode("utf-8", "replace"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{_short(data)} is no JSON object")
    return value


def _arguments(text: str) -> tuple[Any, str | None]:
    """The arguments that a text is, and the problem with it."""
    if len(text) > ARGUMENTS:
        return None, f"the arguments are longer than {ARGUMENTS} characters"
    try:
        value = json.loads(text) if text.strip() else {}
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        _shallow(value)
    except (ValueError, RecursionError) as error:
        return None, f"the arguments are not JSON ({_why(error)[:100]}): {_short(text.encode('utf-8', 'replace'))}"
    return value, None


def _shallow(value: Any) -> None:
    """ValueError for what is nested deeper than others can read."""
    level = [value]
    for _ in range(DEPTH):
        level = [
            part
            for each in level
            if isinstance(each, (dict, list))
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError("nested too deep")


def _blocks(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _clean(text: str) -> str:
    """Without halves of characters, for which UTF-8 has no form."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _short(data: bytes) -> str:
    text = data[:80].decode("utf-8", "replace")
    return repr(text if len(data) <= 80 else text + "…")


def _why(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _after(header: str | None) -> float | None:
    """The seconds that a server asks to wait, if it does so in a way that can be understood."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds == seconds else None
