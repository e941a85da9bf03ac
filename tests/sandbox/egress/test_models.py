"""Models' APIs at the gateway: what an answer took is read from whatever comes, counted whoever asks, and kept beside the box."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sandbox.egress.boxes import Box, local, until

from livinglayer.errors import Invalid
from livinglayer.sandbox.egress import models
from livinglayer.sandbox.egress.exchanges import Exchanges
from livinglayer.sandbox.egress.models import MOST, Reader, read
from livinglayer.sandbox.egress.rules import parse_one

MakeBox = Callable[..., Box]

MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "large-1", "stop_reason": "tool_use",
    "content": [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "query", "input": {"sql": "select 1"}},
    ],
    "usage": {"input_tokens": 10, "cache_creation_input_tokens": 200, "cache_read_input_tokens": 3000, "output_tokens": 40},
}  # fmt: skip
COMPLETION = {
    "id": "c1", "object": "chat.completion", "model": "small-2",
    "choices": [{"index": 0, "finish_reason": "tool_calls", "message": {
        "role": "assistant", "content": "I look.",
        "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "query", "arguments": '{"sql": "select 1"}'}}],
    }}],
    "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120, "prompt_tokens_details": {"cached_tokens": 60}},
}  # fmt: skip
CALL = {"id": "t1", "name": "query", "arguments": {"sql": "select 1"}}


def events(*messages: Any, names: bool = True) -> bytes:
    """Server-sent events."""
    found = b""
    for one in messages:
        named = f"event: {one['type']}\n" if names and isinstance(one, dict) and "type" in one else ""
        found += f"{named}data: {one if isinstance(one, str) else json.dumps(one)}\n\n".encode()
    return found


ANTHROPIC_STREAM = events(
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None, "usage": {**MESSAGE["usage"], "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I "}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "look."}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t1", "name": "query", "input": {}}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"sql": "sel'}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": 'ect 1"}'}},
    {"type": "content_block_stop", "index": 1},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 40}},
    {"type": "message_stop"},
)  # fmt: skip


def chunk(delta: Any = None, finish: str | None = None, usage: Any = None) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": "c1", "object": "chat.completion.chunk", "model": "small-2", "choices": choices, "usage": usage}


OPENAI_SAID = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "I "}),
    chunk({"content": "look."}),
    chunk(
        {"tool_calls": [{"index": 0, "id": "t1", "type": "function", "function": {"name": "query", "arguments": ""}}]}
    ),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"sql": "sel'}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": 'ect 1"}'}}]}),
    chunk({}, "tool_calls"),
]
OPENAI_STREAM = events(*OPENAI_SAID, chunk(usage=COMPLETION["usage"]), "[DONE]")
WHOLE = {
    "anthropic": (json.dumps(MESSAGE).encode(), "application/json"),
    "anthropic stream": (ANTHROPIC_STREAM, "text/event-stream; charset=utf-8"),
    "openai": (json.dumps(COMPLETION).encode(), "application/json"),
    "openai stream": (OPENAI_STREAM, "text/event-stream"),
}
TOOK = {
    "anthropic": {"input": 3210, "cached": 3000, "output": 40},
    "openai": {"input": 100, "cached": 60, "output": 20},
}


@pytest.mark.parametrize("which", WHOLE)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_an_answer_is_read_in_whatever_pieces_it_comes(which: str, size: int) -> None:
    data, kind = WHOLE[which]
    reader = Reader(kind, keep=True)
    for at in range(0, len(data), size):
        reader.feed(data[at : at + size])
    reader.end()
    api = which.split()[0]
    assert reader.tokens(500, 200, True) == TOOK[api]
    assert reader.said() == {"text": "I look.", "calls": [CALL]}
    assert (reader.model, reader.stop) == (("large-1", "tool_use") if api == "anthropic" else ("small-2", "tool_calls"))
    if api == "anthropic":
        assert reader.blocks == MESSAGE["content"]


@pytest.mark.parametrize("which", WHOLE)
def test_an_answer_is_known_by_what_it_is_and_lines_may_end_in_two_ways(which: str) -> None:
    data, _ = WHOLE[which]
    assert read(data).said() == read(data.replace(b"\n", b"\r\n")).said() == {"text": "I look.", "calls": [CALL]}


def test_what_is_cut_off_counts_for_what_came() -> None:
    cut = read(ANTHROPIC_STREAM[: ANTHROPIC_STREAM.index(b"message_delta") - 20], "text/event-stream")
    assert cut.tokens(500, 200, True) == {"input": 3210, "cached": 3000, "output": 9, "estimated": True}
    assert cut.stop is None and cut.said() == {"text": "I look.", "calls": [CALL]}
    half = read(WHOLE["openai"][0][:200])
    assert half.tokens(600, 200, True) == {"input": 200, "cached": 0, "output": 67, "estimated": True}
    assert half.said() == {}
    nothing = read(b"")
    assert nothing.tokens(600, None, True) == {"input": 200, "cached": 0, "output": 0, "estimated": True}


def test_a_stream_without_counts_is_estimated() -> None:
    quiet = read(events(*OPENAI_SAID, "[DONE]"), "text/event-stream")
    assert quiet.stop == "tool_calls"
    assert quiet.tokens(300, 200, True) == {"input": 100, "cached": 0, "output": 9, "estimated": True}


def test_counts_that_grow_are_not_added_up() -> None:
    grown = [chunk({"content": "x"}, usage={"prompt_tokens": 50, "completion_tokens": n}) for n in (1, 2, 3)]
    assert read(events(*grown, chunk({}, "stop"))).tokens(1, 200, True) == {"input": 50, "cached": 0, "output": 3}
    delta = {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        "usage": {"input_tokens": 10, "output_tokens": 9},
    }
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1}}}
    assert read(events(start, delta)).tokens(1, 200, True) == {"input": 10, "cached": 0, "output": 9}


@pytest.mark.parametrize("claim", [-5, -(10**30), True, None, "12", 1.5, float("nan"), [], {}, {"a": 1}])
def test_counts_that_are_none_are_estimated_and_never_give_anything_back(claim: Any) -> None:
    for body in (
        {**MESSAGE, "usage": {"input_tokens": claim, "output_tokens": claim, "cache_read_input_tokens": claim}},
        {**COMPLETION, "usage": {"prompt_tokens": claim, "completion_tokens": claim, "prompt_tokens_details": claim}},
    ):
        found = read(json.dumps(body).encode()).tokens(300, 200, True)
        assert found["input"] == 100 and found["output"] > 0 and found["cached"] == 0 and found["estimated"]


def test_huge_counts_have_an_end() -> None:
    usage = {"input_tokens": 10**40, "output_tokens": 10**18, "cache_read_input_tokens": 10**18}
    found = read(json.dumps({**MESSAGE, "usage": usage}).encode()).tokens(1, 200, True)
    assert found == {"input": MOST, "cached": MOST, "output": MOST}
    text = json.dumps(MESSAGE).replace('"output_tokens": 40', '"output_tokens": ' + "9" * 5000).encode()
    assert read(text).tokens(30, 200, True)["estimated"]  # no number that anybody would read


def test_what_a_model_says_is_not_what_was_counted() -> None:
    lie = '"}],"usage":{"input_tokens":0,"output_tokens":0}}\n\ndata: {"type":"message_delta","usage":{"output_tokens":0}}\n\n'
    for body in (
        json.dumps({**MESSAGE, "content": [{"type": "text", "text": lie}]}).encode(),
        events(
            {"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1}}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": lie}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 40}},
        ),
    ):
        assert read(body).tokens(1, 200, True)["output"] == 40


def test_errors_and_questions_cost_nothing() -> None:
    error = read(b'{"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}')
    assert error.tokens(900, 429, True) == {"input": 0, "cached": 0, "output": 0}
    assert error.said() == {"error": "slow down"}
    assert read(b'{"input_tokens": 14}').tokens(900, 200, True) == {"input": 0, "cached": 0, "output": 0}


def test_nothing_that_comes_makes_it_fail() -> None:
    draw = random.Random(7)
    seeds = [data for data, _ in WHOLE.values()]
    hostile = [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"data: " + b"{" * 100_000 + b"\n\n",
        b"data:\n" * 300_000,
        b"\xff\xfe\0" * 1000,
    ]
    hostile += [
        events({"type": kind, "index": index, "delta": delta, "content_block": delta, "message": delta, "choices": [delta], "usage": delta})
        for kind in ("message", "content_block_start", "content_block_delta", "message_delta", 5, None)
        for index in (-1, 10**30, "x", None)
        for delta in ([], {}, "x", 5, {"type": "tool_use", "input": 5, "text": 5, "delta": {"tool_calls": [{"function": 5}, 7], "content": 5}})
    ]  # fmt: skip
    for _ in range(300):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(1, 30)):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(8)] = draw.randbytes(draw.randrange(8))
        hostile.append(bytes(data))
    for data in hostile:
        for keep in (False, True):
            reader = Reader(draw.choice(["", "text/event-stream"]), keep)
            while data:
                size = draw.randrange(1, len(data) + 1)
                reader.feed(data[:size])
                data = data[size:]
            reader.end()
            found = reader.tokens(10, 200, True)
            assert 0 <= found["input"] <= MOST and 0 <= found["output"] <= MOST
            reader.said()


def test_what_it_holds_has_an_end() -> None:
    reader = Reader("text/event-stream", keep=True)
    for _ in range(64):
        reader.feed(b"data: " + b"x" * (1 << 20))
        assert len(reader._held) <= models.LINE
    reader.feed(b"\n\n" + OPENAI_STREAM)
    assert reader.tokens(1, 200, True)["input"] == 100  # it goes on after the line that was too long
    for start in (b"{", b" "):
        whole = Reader()
        for _ in range(64):
            whole.feed(start + b" " * (1 << 20))
            assert len(whole._held) <= 2 * models.WHOLE
    dripping = Reader("text/event-stream")
    for _ in range(models.LINE // 2):
        dripping.feed(b"x")  # each byte costs the same
    dripping.feed(b"\n\n" + OPENAI_STREAM)
    assert dripping.tokens(1, 200, True)["input"] == 100


def test_of_a_large_answer_the_end_is_read() -> None:
    lie = '"usage": {"input_tokens": 0, "output_tokens": 0}'
    large = json.dumps({**MESSAGE, "content": [{"type": "text", "text": lie + "x" * (3 << 20) + lie}]})
    for body in (large, json.dumps({"data": [0.25] * 400_000, "usage": {"prompt_tokens": 3210, "total_tokens": 3210}})):
        reader = Reader("application/json")
        for at in range(0, len(body), 5000):
            reader.feed(body[at : at + 5000].encode())
        reader.end()
        found = reader.tokens(1, 200, True)
        assert found["input"] == 3210 and found["output"] in (0, 40) and "estimated" not in found
    assert read(large.encode()).said()["text"].startswith(lie)  # whoever has time reads all of it


@pytest.mark.parametrize("rule", [
    {"host": "a.test", "model": "other"}, {"host": "a.test", "model": "openai", "action": "deny"}, {"host": "a.test", "model": 5},
    {"host": "a.test", "model": "openai", "tls": "pass"}, {"host": "a.test", "model": "openai", "protocol": "tcp", "port": 443},
])  # fmt: skip
def test_a_rule_for_a_model_is_one_the_gateway_can_read(rule: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="model"):
        parse_one(rule)


# At the gateway


class Models:
    """A server whose answers a test decides."""

    def __init__(self) -> None:
        self.reply: Callable[[Any], None] = lambda handler: None
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                owner.asked.append((self.path, {key.lower(): one for key, one in self.headers.items()}, body))
                owner.reply(self)

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answers(self, data: bytes, kind: str = "application/json", status: int = 200, **headers: str) -> None:
        """Whole, with a length."""

        def reply(handler: Any) -> None:
            handler.send_response(status)
            for name, value in {"content-type": kind, "content-length": str(len(data)), **headers}.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.end_headers()
            handler.wfile.write(data)

        self.reply = reply

    def streams(self, data: bytes, size: int, hang: threading.Event | None = None) -> None:
        """In chunks; with `hang`, no end until that is set."""

        def reply(handler: Any) -> None:
            handler.send_response(200)
            handler.send_header("content-type", "text/event-stream")
            handler.send_header("transfer-encoding", "chunked")
            handler.end_headers()
            with contextlib.suppress(OSError):
                for at in range(0, len(data), size):
                    part = data[at : at + size]
                    handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    handler.wfile.flush()
                if hang is not None:
                    hang.wait(20)
                handler.wfile.write(b"0\r\n\r\n")

        self.reply = reply


@pytest.fixture
def model() -> Iterator[Models]:
    made = Models()
    yield made
    made.server.shutdown()
    made.server.server_close()


def at_model(model: Models, api: str = "anthropic", **more: Any) -> dict[str, Any]:
    return local("model.test", model.port, protocol="http", model=api, **more)


def told(box: Box, count: int = 1) -> list[dict[str, Any]]:
    """The events of exchanges with a model."""

    def found() -> list[dict[str, Any]]:
        return [event for event in box.gateway.events if event["box"] == box.id and "model" in event]

    box.gateway.wait(lambda: len(found()) >= count)
    return found()


def counts(event: dict[str, Any]) -> dict[str, Any]:
    return {key: event["model"].get(key) for key in ("api", "model", "input", "output", "stop")}


def ask(box: Box, *args: str, path: str = "/v1/messages") -> tuple[int, str]:
    return box.curl(*args, "-d", '{"model": "m", "messages": []}', f"http://model.test{path}")


@pytest.mark.parametrize("args", [(), ("--http2-prior-knowledge",)])
def test_an_exchange_is_counted_and_kept(
    make_box: MakeBox, model: Models, tmp_path: Path, args: tuple[str, ...]
) -> None:
    box = make_box(
        [at_model(model, secrets=["KEY"])], secrets={"KEY": "s3cr3t-value"}, exchanges=str(tmp_path / "kept" / "b1")
    )
    said = json.dumps({**MESSAGE, "content": [{"type": "text", "text": "your key is s3cr3t-value"}]})
    model.answers(said.encode())
    body = json.dumps({"model": "large", "messages": [{"role": "user", "content": "my key: LAYER_SECRET_KEY"}]})
    status, got = box.curl(*args, "-H", "x-api-key: LAYER_SECRET_KEY", "-H", "content-type: application/json", "-d", body,
                           "http://model.test/v1/messages")  # fmt: skip
    assert status == 200 and json.loads(got)["content"][0]["text"] == "your key is LAYER_SECRET_KEY"
    assert model.asked[0][1]["x-api-key"] == "s3cr3t-value" and b"s3cr3t-value" in model.asked[0][2]
    [event] = told(box)
    assert counts(event) == {"api": "anthropic", "model": "large-1", "input": 3210, "output": 40, "stop": "tool_use"}
    name = event["model"]["exchange"]
    kept = {path.name: path.read_bytes() for path in (tmp_path / "kept" / "b1").iterdir()}
    assert kept.keys() == {f"{name}.request", f"{name}.answer", f"{name}.json"}
    assert kept[f"{name}.request"] == body.encode() and kept[f"{name}.answer"] == got.encode()
    assert json.loads(kept[f"{name}.json"]) == event
    assert all(b"s3cr3t-value" not in data for data in kept.values())


def test_a_stream_passes_as_it_comes_and_is_counted(make_box: MakeBox, model: Models) -> None:
    box = make_box([at_model(model, "openai")])
    hang = threading.Event()
    model.streams(OPENAI_STREAM, 11, hang)
    code = """
import urllib.request
got = b""
with urllib.request.urlopen(urllib.request.Request("http://model.test/v1/chat/completions", b"{}")) as answer:
    while not got.endswith(b"[DONE]\\n\\n"):  # before it is over
        got += answer.read1(100000)
print(got.count(b"data:"))"""
    assert box.python(code) == str(OPENAI_STREAM.count(b"data:"))
    hang.set()
    assert counts(told(box)[0]) == {
        "api": "openai",
        "model": "small-2",
        "input": 100,
        "output": 20,
        "stop": "tool_calls",
    }


def test_whoever_hangs_up_pays_for_what_came(make_box: MakeBox, model: Models) -> None:
    box = make_box([at_model(model)])
    part = ANTHROPIC_STREAM[: ANTHROPIC_STREAM.index(b"message_delta") - 20]
    hang = threading.Event()
    model.streams(part + events({"type": "ping"}) * 100_000, 4096, hang)
    code = """
import socket
s = socket.create_connection(("model.test", 80))
s.sendall(b"POST /v1/messages HTTP/1.1\\r\\nHost: model.test\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
s.recv(2000)
s.close()"""
    box.python(code)
    [event] = told(box)
    hang.set()
    assert counts(event) == {"api": "anthropic", "model": "large-1", "input": 3210, "output": 9, "stop": None}
    assert event["model"]["estimated"] and event["reason"] == "the connection broke"


def test_a_stream_that_is_reset_before_it_began_pays_for_what_it_asked(make_box: MakeBox, model: Models) -> None:
    box = make_box([at_model(model)])
    asked, hang = threading.Event(), threading.Event()

    def reply(handler: Any) -> None:
        asked.set()
        hang.wait(20)
        handler.close_connection = True

    model.reply = reply
    code = """
import socket, h2.connection
s = socket.create_connection(("model.test", 80))
c = h2.connection.H2Connection(); c.initiate_connection()
c.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":authority", "model.test"), (":path", "/v1/messages")])
c.send_data(1, b"x" * 3000, end_stream=True); s.sendall(c.data_to_send())
import sys; print("sent", flush=True); sys.stdin.readline()
c.reset_stream(1); s.sendall(c.data_to_send()); s.recv(100)"""
    import subprocess
    import sys

    with box.popen(sys.executable, "-c", code, stdin=subprocess.PIPE) as process:
        assert asked.wait(10)
        process.communicate("\n", timeout=10)
    [event] = told(box)
    hang.set()
    assert event["model"]["input"] == 1000 and event["model"]["output"] == 0 and event["model"]["estimated"]


def test_any_program_any_path_and_every_request_of_a_connection(make_box: MakeBox, model: Models) -> None:
    box = make_box([at_model(model)])
    model.answers(json.dumps(MESSAGE).encode())
    code = """
import socket
s = socket.create_connection(("model.test", 80))
one = b"POST %s HTTP/1.1\\r\\nHost: model.test\\r\\nContent-Length: 2\\r\\n\\r\\n{}"
s.sendall(b"".join(one % path for path in (b"/v1/messages", b"/other", b"/v1/messages?beta=true", b"/v1//complete")))
got = b""
while got.count(b'"tool_use"') < 8: got += s.recv(65536)"""
    box.python(code)
    assert [event["model"]["input"] for event in told(box, 4)] == [3210] * 4
    assert ask(box, "-X", "PUT")[0] == 501  # nothing that its server does, nothing that it costs
    assert told(box, 5)[4]["model"]["input"] == 0


def test_an_answer_of_the_other_api_is_counted_too(make_box: MakeBox, model: Models) -> None:
    box = make_box([at_model(model, "anthropic")])
    model.answers(json.dumps(COMPLETION).encode())
    ask(box, path="/v1/chat/completions")
    assert counts(told(box)[0])["input"] == 100


def test_a_compressed_answer_is_not_asked_for_and_read_all_the_same(make_box: MakeBox, model: Models) -> None:
    box = make_box([at_model(model)])
    model.answers(gzip.compress(json.dumps(MESSAGE).encode()), content_encoding="gzip")
    status, got = ask(box, "-H", "accept-encoding: gzip, br", "-H", "range: bytes=0-10")
    assert status == 200 and json.loads(got) == MESSAGE
    assert model.asked[0][1]["accept-encoding"] == "identity" and "range" not in model.asked[0][1]
    assert counts(told(box)[0])["input"] == 3210
    model.answers(b"\x0b\x02\x80", content_encoding="br")
    assert ask(box)[0] == 502


def test_garbage_passes_and_is_estimated(make_box: MakeBox, model: Models) -> None:
    box = make_box([at_model(model, "openai")])
    garbage = base64.b64encode(bytes(range(256)) * 12)
    model.answers(garbage, "text/event-stream")
    assert ask(box) == (200, garbage.decode())
    found = told(box)[0]["model"]
    assert found["estimated"] and found["output"] == -(-len(garbage) // 3) and found["input"] == 10


def test_a_server_that_fails_costs_nothing(make_box: MakeBox, model: Models) -> None:
    box = make_box([at_model(model)])
    model.answers(b'{"error": {"message": "busy"}}', status=529)
    assert ask(box)[0] == 529

    def die(handler: Any) -> None:
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True

    model.reply = die
    assert ask(box)[0] == 502
    assert [event["model"]["input"] + event["model"]["output"] for event in told(box, 2)] == [0, 0]


def test_websockets_to_a_model_are_refused(make_box: MakeBox, model: Models) -> None:
    box = make_box([at_model(model)])
    status, text = box.curl("-H", "connection: upgrade", "-H", "upgrade: websocket", "http://model.test/v1/realtime")
    assert status == 403 and "can't be counted" in text and not model.asked
    assert box.events(protocol="ws")[0]["verdict"] == "deny"


def test_hosts_that_are_no_models_say_what_they_like(make_box: MakeBox, model: Models) -> None:
    box = make_box([local("other.test", model.port, protocol="http")])
    model.answers(json.dumps(MESSAGE).encode())
    assert box.curl("-d", "{}", "http://other.test/v1/messages")[0] == 200
    assert "model" not in box.events(protocol="http")[0]


def test_what_is_kept_has_an_end_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("livinglayer.sandbox.egress.exchanges.LARGEST", 1000)
    monkeypatch.setattr("livinglayer.sandbox.egress.exchanges.KEPT", 2500)
    exchanges = Exchanges(tmp_path / "x")
    first, second = exchanges.begin(), exchanges.begin()
    for _ in range(20):
        first.add("request", b"r" * 100)
    first.add("answer", b"a" * 1000)
    first.close()
    second.add("request", b"r" * 800)
    second.close()
    assert first.cut == {"request"} and second.cut == {"request"}
    assert (tmp_path / "x" / f"{first.name}.request").read_bytes() == b"r" * 1000
    assert (tmp_path / "x" / f"{second.name}.request").read_bytes() == b"r" * 500
    assert Exchanges(tmp_path / "x").room == 0  # also for whoever comes after a restart


def test_a_gateway_that_starts_again_keeps_on(own_gateway: Callable[..., Any], model: Models, tmp_path: Path) -> None:
    model.answers(json.dumps(MESSAGE).encode())
    for count in (1, 2):
        box = Box(own_gateway(), [at_model(model)], exchanges=str(tmp_path / "kept"))
        assert ask(box)[0] == 200
        told(box)
        until(lambda count=count: len(list((tmp_path / "kept").glob("*.json"))) == count)
        box.gateway.process.kill()
