"""A model server on loopback that answers what a script says, over both message APIs, and refuses what a real one would.

For tests, measurements and the demo: no model thinks here. A script is a list of steps, or a function of the request that
gives the next one. A step is a text, or a mapping:

    {"text": "…", "calls": [("query", {"sql": "…"}), …], "usage": (input, output), "stop": "…"}    an answer
    {"status": 429, "retry_after": 1, "message": "…"}      an error of that status
    {"error": "overloaded_error"}                          an error in the midst of a stream
    {"hang": seconds}                                      nothing at all, for so long
    {"stall": seconds, "text": "…"}                        half an answer, then nothing for so long
    {"garbage": "…"}                                       a stream that is not one of the API's
    {"cut": "…"}                                           a stream that ends in the middle of this text
    {"die": True}                                          the server is gone, for good

A call is (name, arguments), or a mapping {"name", "arguments", "id"}; arguments that are a text go out as they are, so they
need not be JSON.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal

Api = Literal["anthropic", "openai"]
Step = str | Mapping[str, Any]
PIECE = 12  # characters of a text or of arguments in one event


class Refused(Exception):
    """A request that a real server would refuse."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Request:
    """One request as it came; `refused` says why it was not answered by the script."""

    number: int
    api: Api
    body: Mapping[str, Any]
    headers: Mapping[str, str]  # names in lower case
    refused: str | None = None

    @property
    def messages(self) -> list[Any]:
        return list(self.body.get("messages") or [])

    @property
    def results(self) -> list[tuple[str, str, bool]]:
        """(id, text, whether it is an error) of the tool results this request ends with; OpenAI's have no such mark."""
        found: list[tuple[str, str, bool]] = []
        for message in reversed(self.messages):
            if self.api == "openai":
                if message["role"] != "tool":
                    break
                found.insert(0, (message["tool_call_id"], _text(message["content"]), False))
            elif message["role"] != "system":
                blocks = message["content"] if isinstance(message["content"], list) else []
                return [
                    (block["tool_use_id"], _text(block.get("content", "")), bool(block.get("is_error")))
                    for block in blocks
                    if block["type"] == "tool_result"
                ]
        return found

    @property
    def system(self) -> str:
        """The instructions, wherever the API has them."""
        if self.api == "anthropic":
            return _text(self.body.get("system", ""))
        return "".join(_text(each["content"]) for each in self.messages if each["role"] in ("system", "developer"))


@dataclass
class ScriptedModel:
    """Serves at `url` from the moment it is made until it is closed; `requests` is what came."""

    script: Sequence[Step] | Callable[[Request], Step]
    key: str | None = None  # which alone is believed, if given
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._answered = 0
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        if self.tls:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Hang up on everybody; may be said twice."""
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> ScriptedModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # What a connection asks

    def step(self, api: Api, body: Mapping[str, Any], headers: Mapping[str, str]) -> Mapping[str, Any]:
        """The next step of the script for a request that is well-formed; Refused for any other."""
        problem: Refused | None = None
        try:
            _check(api, body, headers, self.key)
        except Refused as error:
            problem = error
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            problem = Refused(f"the request is not of this API's form: {error!r}")
        with self._lock:
            request = Request(len(self.requests), api, body, headers, str(problem) if problem else None)
            self.requests.append(request)
            if problem:
                raise problem
            if callable(self.script):
                step = self.script(request)
            else:
                at, self._answered = self._answered, self._answered + 1
                if at >= len(self.script):
                    raise Refused(f"the script has {len(self.script)} steps, and this is request {at + 1}")
                step = self.script[at]
        return {"number": request.number, **({"text": step} if isinstance(step, str) else step)}

    def wait(self, seconds: float) -> None:
        """Do nothing for so long, or until the server is closed."""
        self._over.wait(seconds)

    def die(self) -> None:
        threading.Thread(target=self.close, daemon=True).start()
        self._over.wait()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of what is tried here."""


def _handler(model: ScriptedModel) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            path = self.path.partition("?")[0]
            api: Api = "anthropic" if path.endswith("/v1/messages") else "openai"
            if not path.endswith(("/v1/messages", "/v1/chat/completions")):
                return self.fail(api, 404, f"there is no {path}")
            try:
                body = json.loads(data)
                if not isinstance(body, dict):
                    raise ValueError
            except (ValueError, RecursionError):
                return self.fail(api, 400, "the body is not a JSON object")
            try:
                step = model.step(api, body, {name.lower(): value for name, value in self.headers.items()})
            except Refused as error:
                return self.fail(api, error.status, str(error))
            self.act(api, body, step)

        def act(self, api: Api, body: Mapping[str, Any], step: Mapping[str, Any]) -> None:
            if "status" in step:
                extra = {"Retry-After": str(step["retry_after"])} if "retry_after" in step else {}
                return self.fail(api, step["status"], step.get("message", "as the script says"), extra)
            if "die" in step:
                model.die()
                return self.drop()
            if "hang" in step:
                model.wait(step["hang"])
                return self.drop()
            name = str(body["model"])
            if not body.get("stream"):
                answer = json.dumps(_whole(api, name, step)).encode()
                if "garbage" in step:
                    answer = str(step["garbage"]).encode()
                return self.reply(200, answer, "application/json", cut="cut" in step or "stall" in step)
            counted = (body.get("stream_options") or {}).get("include_usage")
            events = list(_events(api, name, {**step, "counted": counted}))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            half = len(events) // 2 + 1
            for at, event in enumerate(events):
                if at == half and ("cut" in step or "stall" in step):
                    model.wait(step.get("stall", 0))
                    return self.drop()
                self.chunk(event)
            self.wfile.write(b"0\r\n\r\n")

        def chunk(self, event: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

        def fail(self, api: Api, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
            self.reply(status, json.dumps(_error(api, status, message)).encode(), "application/json", headers)

        def reply(
            self, status: int, data: bytes, kind: str, headers: Mapping[str, str] | None = None, cut: bool = False
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.drop()

        def drop(self) -> None:
            """Hang up as a server that crashed: with a reset."""
            self.close_connection = True
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    return Handler


# -- answers ----------------------------------------------------------------------------------------------------------


def _calls(step: Mapping[str, Any]) -> list[tuple[str | None, str, str]]:
    """(id, name, arguments as they go out) of each call of a step."""
    found = []
    for number, call in enumerate(step.get("calls", ())):
        given = call if isinstance(call, Mapping) else {"name": call[0], "arguments": call[1]}
        arguments = given.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        found.append((given.get("id", f"call_{step['number']}_{number}"), given["name"], text))
    return found


def _usage(step: Mapping[str, Any]) -> tuple[int, int]:
    given, answered = step.get("usage", (10, 5))
    return int(given), int(answered)


def _said(step: Mapping[str, Any]) -> str:
    return str(step.get("text") or step.get("cut") or "")


def _events(api: Api, model: str, step: Mapping[str, Any]) -> Iterator[bytes]:
    """The stream of an answer, event by event."""
    if "garbage" in step:
        yield str(step["garbage"]).encode()
        return
    make = _anthropic_events if api == "anthropic" else _openai_events
    for name, data in make(model, step):
        head = f"event: {name}\n" if name else ""
        yield f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), max(PIECE, len(text) // 200)):
        yield text[at : at + max(PIECE, len(text) // 200)]


def _anthropic_events(model: str, step: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    calls, (given, answered) = _calls(step), _usage(step)

    def event(kind: str, **more: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **more}

    message = _message(model, [], None, given, 1)
    yield event("message_start", message=message)
    yield event("ping")
    index = 0
    if _said(step):
        yield event("content_block_start", index=index, content_block={"type": "text", "text": ""})
        for piece in _pieces(_said(step)):
            yield event("content_block_delta", index=index, delta={"type": "text_delta", "text": piece})
        yield event("content_block_stop", index=index)
        index += 1
    if "error" in step:
        yield event("error", error={"type": step["error"], "message": "as the script says"})
        return
    for call_id, name, arguments in calls:
        block: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        yield event("content_block_start", index=index, content_block=block)
        for piece in _pieces(arguments):
            yield event("content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": piece})
        yield event("content_block_stop", index=index)
        index += 1
    stop = step.get("stop") or ("tool_use" if calls else "end_turn")
    yield event("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage={"output_tokens": answered})
    yield event("message_stop")


def _openai_events(model: str, step: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    calls, (given, answered) = _calls(step), _usage(step)

    def chunk(delta: Mapping[str, Any], stop: str | None = None) -> tuple[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": stop}
        return "", {**_envelope("chat.completion.chunk", model), "choices": [choice], "usage": None}

    yield chunk({"role": "assistant", "content": "" if _said(step) else None})
    for piece in _pieces(_said(step)):
        yield chunk({"content": piece})
    if "error" in step:
        yield "", {"error": {"message": "as the script says", "type": step["error"], "code": None}}
        return
    for index, (call_id, name, arguments) in enumerate(calls):
        head = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        yield chunk({"tool_calls": [head]})
        for piece in _pieces(arguments):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, step.get("stop") or ("tool_calls" if calls else "stop"))
    if step.get("counted"):
        usage = {"prompt_tokens": given, "completion_tokens": answered, "total_tokens": given + answered}
        yield "", {**_envelope("chat.completion.chunk", model), "choices": [], "usage": usage}
    yield "", "[DONE]"


def _message(model: str, content: list[Any], stop: str | None, given: int, answered: int) -> dict[str, Any]:
    return {
        "id": "msg_scripted",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": given, "output_tokens": answered},
    }


def _envelope(kind: str, model: str) -> dict[str, Any]:
    return {"id": "chatcmpl-scripted", "object": kind, "created": 0, "model": model}


def _whole(api: Api, model: str, step: Mapping[str, Any]) -> dict[str, Any]:
    """The answer in one piece."""
    calls, (given, answered) = _calls(step), _usage(step)
    if api == "anthropic":
        content: list[dict[str, Any]] = [{"type": "text", "text": _said(step)}] if _said(step) else []
        content += [{"type": "tool_use", "id": id, "name": name, "input": _value(text)} for id, name, text in calls]
        return _message(model, content, step.get("stop") or ("tool_use" if calls else "end_turn"), given, answered)
    spoken: dict[str, Any] = {"role": "assistant", "content": _said(step) or None}
    if calls:
        spoken["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": text}} for id, name, text in calls
        ]
    choice = {"index": 0, "message": spoken, "finish_reason": step.get("stop") or ("tool_calls" if calls else "stop")}
    usage = {"prompt_tokens": given, "completion_tokens": answered, "total_tokens": given + answered}
    return {**_envelope("chat.completion", model), "choices": [choice], "usage": usage}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _error(api: Api, status: int, message: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 529: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    if api == "anthropic":
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


# -- what a real server would refuse ----------------------------------------------------------------------------------


def _need(true: object, otherwise: str, status: int = 400) -> None:
    if not true:
        raise Refused(otherwise, status)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(block.get("text", "")) for block in content or ())


def _check(api: Api, body: Mapping[str, Any], headers: Mapping[str, str], key: str | None) -> None:
    given = (api == "anthropic" and headers.get("x-api-key")) or headers.get("authorization", "").removeprefix(
        "Bearer "
    )
    _need(given and key in (None, given), "invalid x-api-key" if api == "anthropic" else "Incorrect API key", 401)
    _need(isinstance(body.get("model"), str) and body["model"], "model: Field required")
    _need(isinstance(body.get("messages"), list) and body["messages"], "messages: at least one message is required")
    most = body.get("max_tokens", body.get("max_completion_tokens", 1))
    _need(isinstance(most, int) and not isinstance(most, bool) and most > 0, "max_tokens: a number above 0 is required")
    names = []
    for tool in body.get("tools", ()):
        if api == "openai":
            _need(tool.get("type") == "function", "tools: type must be 'function'")
            tool = tool["function"]
        schema = tool.get("input_schema" if api == "anthropic" else "parameters")
        longest = 128 if api == "anthropic" else 64
        _need(
            re.fullmatch(rf"[a-zA-Z0-9_-]{{1,{longest}}}", tool["name"]),
            f"tools: the name {tool['name']!r} is not allowed",
        )
        _need(
            isinstance(schema, dict) and schema.get("type") == "object",
            f"tools: {tool['name']} has no schema of an object",
        )
        names.append(tool["name"])
    _need(len(names) == len(set(names)), "tools: Tool names must be unique.")
    _need(api == "anthropic" or len(names) <= 128, "tools: at most 128")
    if api == "anthropic":
        _need("anthropic-version" in headers, "anthropic-version: header is required")
        _need("max_tokens" in body, "max_tokens: Field required")
        # with a beta there may be instructions in the midst of a conversation, and at its end
        beta = "anthropic-beta" in headers
        _check_anthropic([one for one in body["messages"] if not (beta and one["role"] == "system")])
    else:
        _need("stream_options" not in body or body.get("stream"), "stream_options: only allowed with stream")
        _check_openai(body["messages"])


def _check_anthropic(messages: list[Any]) -> None:
    asked: list[str] = []  # ids of the tool_use blocks of the message before
    for at, message in enumerate(messages):
        role, content = message["role"], message["content"]
        _need(role == ("user", "assistant")[at % 2], f"messages.{at}: roles must alternate between user and assistant")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        _need(isinstance(blocks, list) and blocks, f"messages.{at}: content must be non-empty")
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        unknown = [each for each in results if role == "assistant" or each not in asked]
        _need(not unknown, f"messages.{at}: unexpected `tool_use_id` found in `tool_result` blocks: {unknown}")
        missing = [each for each in asked if results.count(each) != 1]
        _need(
            not missing,
            f"messages.{at - 1}: `tool_use` ids were found without `tool_result` blocks immediately after: {missing}",
        )
        first = [block["type"] for block in blocks][: len(results)]
        _need(first == ["tool_result"] * len(results), f"messages.{at}: tool_result blocks come before text")
        asked = []
        for block in blocks:
            kind = block["type"]
            _need(
                kind in ("text", "tool_use", "tool_result", "thinking", "image"),
                f"messages.{at}: unknown block {kind!r}",
            )
            _need(kind != "text" or block["text"].strip(), f"messages.{at}: text content blocks must be non-empty")
            if kind == "tool_use":
                _need(role == "assistant", f"messages.{at}: tool_use is the assistant's")
                _need(
                    re.fullmatch(r"[a-zA-Z0-9_-]+", block["id"]),
                    f"messages.{at}: tool_use.id does not match the pattern",
                )
                _need(block["id"] not in asked, f"messages.{at}: `tool_use` ids must be unique")
                _need(
                    isinstance(block["input"], dict) and block["name"],
                    f"messages.{at}: tool_use.input: Input should be a valid dictionary",
                )
                asked.append(block["id"])
    _need(messages[-1]["role"] == "user", "the conversation must end with a user message")


def _check_openai(messages: list[Any]) -> None:
    asked: list[str] = []  # ids of calls that have no answer yet
    for at, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        _need(
            role in ("system", "developer", "user", "assistant", "tool"), f"messages.[{at}].role: {role!r} is unknown"
        )
        if role == "tool":
            _need(
                message["tool_call_id"] in asked,
                "messages with role 'tool' must be a response to a preceding message with 'tool_calls'.",
            )
            asked.remove(message["tool_call_id"])
            _need(isinstance(content, (str, list)), f"messages.[{at}].content: a text is required")
            continue
        _need(
            not asked,
            f"An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id': {asked}",
        )
        calls = message.get("tool_calls")
        _need(calls is None or (role == "assistant" and calls), f"messages.[{at}].tool_calls: [] is too short")
        _need(isinstance(content, (str, list)) or calls, f"messages.[{at}].content: a text is required")
        for call in calls or ():
            _need(
                call["type"] == "function" and call["id"] and call["id"] not in asked,
                f"messages.[{at}].tool_calls: an id of its own is required",
            )
            function = call["function"]
            _need(
                function["name"] and isinstance(function["arguments"], str),
                f"messages.[{at}].tool_calls: arguments are a text",
            )
            json.loads(function["arguments"])  # servers that are compatible read it, and fail where it is not JSON
            asked.append(call["id"])
    _need(
        not asked,
        f"An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id': {asked}",
    )
