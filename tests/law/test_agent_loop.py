"""The built-in loop as a process of its own, between a scripted model and what a box finds at LAYER_URL.

What the law makes of its calls is tested with agents (test_agents.py); here it is how the loop speaks, and how it ends.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from law.models import APIS, HOST, KEY, model_of, rule_of, scripted, texts
from sandbox.homes import home
from sandbox.hosts import wait_until
from sandbox.registries import Trust

from livinglayer import Layer
from livinglayer.jobs import scripted_model
from livinglayer.jobs.scripted_model import Api, Request, ScriptedModel
from livinglayer.law import tending
from livinglayer.law.tools import BOX
from livinglayer.sandbox.sandbox import Sandbox

INSIDE = Path(__file__).parent.parent.parent / "livinglayer" / "inside"
SQL = {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"], "additionalProperties": False}
TOOLS = [
    {"name": "query", "description": "Rows of one SELECT.", "input_schema": SQL, "where": "layer"},
    *(tool.told() for tool in BOX),
]


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> Api:
    found: Api = request.param
    return found


@dataclass
class Channel:
    """What a box finds at LAYER_URL, as far as an agent's loop asks for it: says what there is to do, and writes down the rest."""

    agent: dict[str, Any]
    answer: Callable[[dict[str, Any]], tuple[int, Any]]
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def of(self, name: str) -> list[Any]:
        return [body for verb, body in self.asked if verb == name]

    def __enter__(self) -> Channel:
        channel = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.reply(200, channel.agent)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                name = self.path.rpartition("/")[2]
                channel.asked.append((name, body))
                if name == "return" and len(json.dumps(body)) > 65536:
                    return self.reply(429, {"error": {"code": "limit_exceeded", "message": "at most 65536 bytes"}})
                self.reply(*(channel.answer(body) if name == "tool" else (200, {"ok": True})))

            def reply(self, status: int, value: Any) -> None:
                if status == 0:
                    self.close_connection = True
                    return
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


@dataclass
class Ran:
    code: int
    printed: str
    channel: Channel

    @property
    def returned(self) -> Any:
        [told] = self.channel.of("return")
        return told

    def failed(self, code: int, sentence: str) -> None:
        """It ended so, and said so: to whoever watches, and to the layer."""
        assert self.code == code, self.printed
        error = self.returned["error"]
        assert error["exit_code"] == code and sentence in error["message"] and sentence in self.printed
        assert "\n" not in error["message"]


def rows(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"content": json.dumps([{"id": 7}]), "is_error": False}


def run(
    server: ScriptedModel | str, api: Api, answer: Callable[[dict[str, Any]], tuple[int, Any]] = rows, directory: Any = None, **more: Any
) -> Ran:  # fmt: skip
    url = server if isinstance(server, str) else server.url
    given = {
        "task": "Look after ticket 7.", "instructions": "Be brief.", "model": model_of(api, url, timeout=more.pop("timeout", 20)),
        "tools": TOOLS, "messages": None, "budget": [], **more,
    }  # fmt: skip
    with Channel(given, answer) as channel:
        kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        where = f"http://127.0.0.1:{channel.server.server_port}/token"
        env = {**kept, "PYTHONPATH": str(INSIDE), "LAYER_URL": where, "MODEL_KEY": KEY, "LAYER_AGENT_PAUSE": "0.01"}
        done = subprocess.run(
            [sys.executable, "-B", "-m", "layer_agent"], env=env, capture_output=True, text=True, timeout=120, cwd=directory
        )  # fmt: skip
        assert done.stderr == ""
        return Ran(done.returncode, done.stdout, channel)


def roles(request: Request) -> list[str]:
    return [message["role"] for message in request.messages]


# -- how it works -----------------------------------------------------------------------------------------------------


def test_it_makes_the_calls_of_the_model_and_returns_its_last_words(api: Api) -> None:
    script = [
        {"text": "I look it up.", "calls": [("query", {"sql": "select 1"}), ("query", {"sql": "select 2"})]},
        "Ticket 7 is fine.",
    ]
    with scripted(script) as model:
        ran = run(model, api)
    assert (ran.code, ran.returned) == (0, {"value": "Ticket 7 is fine."})
    assert [(call["name"], call["arguments"]) for call in ran.channel.of("tool")] == [
        ("query", {"sql": "select 1"}),
        ("query", {"sql": "select 2"}),
    ]
    first, second = model.requests
    assert first.system.startswith("Be brief.") and "Look after ticket 7." in json.dumps(first.messages)
    assert second.results == [("call_0_0", '[{"id": 7}]', False), ("call_0_1", '[{"id": 7}]', False)]
    assert ran.printed == (
        'I look it up.\n→ query {"sql":"select 1"}\n← [{"id": 7}]\n→ query {"sql":"select 2"}\n← [{"id": 7}]\nTicket 7 is fine.\n'
    )


def test_it_speaks_each_api_as_its_servers_do() -> None:
    with scripted(["done"]) as model:
        run(model, "anthropic")
    [request] = model.requests
    body = dict(request.body)
    assert request.headers["x-api-key"] == KEY and request.headers["anthropic-version"] == "2023-06-01"
    assert (body["model"], body["max_tokens"], body["stream"]) == ("scripted-1", 1024, True)
    assert body["tools"][0] == {"name": "query", "description": "Rows of one SELECT.", "input_schema": SQL}
    with scripted(["done"]) as model:
        run(model, "openai")
    [request] = model.requests
    body = dict(request.body)
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert (body["model"], body["max_tokens"], body["stream_options"]) == ("scripted-1", 1024, {"include_usage": True})
    function = {"name": "query", "description": "Rows of one SELECT.", "parameters": SQL}
    assert body["tools"][0] == {"type": "function", "function": function}
    assert roles(request) == ["system", "user"]


@pytest.mark.parametrize(
    ("api", "base"),
    [("anthropic", ""), ("anthropic", "/"), ("anthropic", "/proxy/v1"), ("openai", ""), ("openai", "/v1"), ("openai", "/api/v1/")],
)  # fmt: skip
def test_the_url_may_have_a_base(api: Api, base: str) -> None:
    with scripted(["done"]) as model:
        assert run(model.url + base, api).code == 0


def test_finish_ends_it_after_the_other_calls_of_the_same_answer(api: Api) -> None:
    step = {"calls": [("finish", {"answer": "two rows"}), ("query", {"sql": "select 1"})]}
    with scripted([step]) as model:
        ran = run(model, api)
    assert (ran.code, ran.returned) == (0, {"value": "two rows"})
    assert len(ran.channel.of("tool")) == 1 and "→ finish two rows\n" in ran.printed


def test_tools_of_the_box_are_done_here_and_told(api: Api, tmp_path: Path) -> None:
    script = [
        {"calls": [("write_file", {"path": "a/b.txt", "content": "one\ntwo\nthree\n"}), ("shell", {"command": "cat a/b.txt; exit 3"})]},
        {"calls": [("read_file", {"path": "a/b.txt", "offset": 1, "limit": 1}), ("read_file", {"path": "none"})]},
        {"calls": [("shell", {"command": "echo early; sleep 60", "timeout": 0.3}), ("shell", {"command": "(sleep 1; echo more; sleep 60) & echo left"})]},
        "ok",
    ]  # fmt: skip
    with scripted(script) as model:
        ran = run(model, api, directory=tmp_path)
    assert ran.code == 0
    given = texts(model)
    assert given[:3] == ["wrote 14 bytes to a/b.txt", "one\ntwo\nthree\n\n[exit code 3]", "two\n"]
    assert "No such file" in given[3]
    assert given[4].removeprefix("Error: ") == "early\n\n[killed after 0.3 s]" and given[5] == "left\n"
    told = [said["tool"] for said in ran.channel.of("said")]
    assert [(one["name"], one["is_error"]) for one in told] == [
        ("write_file", False), ("shell", False), ("read_file", False), ("read_file", True), ("shell", True), ("shell", False),
    ]  # fmt: skip
    assert told[0]["arguments"] == {"path": "a/b.txt", "content": "one\ntwo\nthree\n"} and told[1]["result"] == given[1]
    assert ran.channel.of("tool") == []


def test_what_is_long_is_cut_with_a_note(api: Api, tmp_path: Path) -> None:
    def long(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"content": "x" * 200_000, "is_error": False}

    script = [
        {"calls": [("query", {"sql": "select 1"}), ("shell", {"command": "seq 1 200000"})]},
        {"calls": [("shell", {"command": "seq 1 20000 > f"}), ("read_file", {"path": "f"})]},
        "ok",
    ]
    with scripted(script) as model:
        assert run(model, api, long, tmp_path).code == 0
    rows, numbers, _, lines = texts(model)
    assert rows == "x" * 65536 + "\n[cut: 65536 of 200000 characters; ask for less]"
    assert numbers.startswith("1\n2\n") and numbers.endswith("\n200000\n") and "bytes left out" in numbers
    assert lines.endswith(": read on with offset]") and max(map(len, (numbers, lines))) < 66_000


def test_a_refusal_of_the_law_is_a_result_for_the_model(api: Api) -> None:
    def refuse(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"content": "Denied: ticket may not be read", "is_error": True}

    with scripted([{"calls": [("query", {"sql": "select 1"})]}, "I may not."]) as model:
        ran = run(model, api, refuse)
    assert (ran.code, ran.returned) == (0, {"value": "I may not."})
    [(_, text, is_error)] = model.requests[1].results
    assert text.endswith("Denied: ticket may not be read") and is_error is (api == "anthropic")
    assert "✗ Denied: ticket may not be read\n" in ran.printed


def test_it_goes_on_from_a_transcript_and_makes_the_calls_that_wait_in_it(api: Api) -> None:
    with scripted([{"text": "Looking.", "calls": [("query", {"sql": "select 1"})]}, "seven"]) as model:
        run(model, api)
    told = list(model.requests[1].messages)  # up to the results
    prompt = {"role": "user", "content": "Answer in words."}
    waits = told[:-1]  # up to the calls, which nobody has made
    for transcript, calls, results in ((told, 0, 1), ([*told, prompt], 0, 1), (waits, 1, 1), ([*waits, prompt], 0, 1)):
        with scripted(["eight"]) as model:
            ran = run(model, api, messages=transcript)
        assert (ran.code, ran.returned) == (0, {"value": "eight"})
        [request] = model.requests
        assert len(ran.channel.of("tool")) == calls
        assert json.dumps(request.messages).count("tool_use_id" if api == "anthropic" else "tool_call_id") == results
        assert ("Answer in words." in json.dumps(request.messages)) is (prompt in transcript)
        assert ("this call was not made" in json.dumps(request.messages)) is (transcript == [*waits, prompt])


def test_servers_that_do_not_stream_will_do(api: Api) -> None:
    """Some servers that say they are compatible ignore `stream`."""

    def plain(request: Request) -> dict[str, Any]:
        return {"text": "bye"} if request.results else {"text": "hm", "calls": [("query", {"sql": "select 1"})]}

    with scripted(plain) as model:
        step = model.step

        def whole(api: Api, body: Any, headers: Any) -> Any:
            found = step(api, body, headers)
            body.pop("stream")
            return found

        model.step = whole  # type: ignore[method-assign, assignment]
        ran = run(model, api)
    assert (ran.code, ran.returned) == (0, {"value": "bye"}) and len(ran.channel.of("tool")) == 1


def test_a_server_that_knows_other_words_is_asked_in_them() -> None:
    def picky(request: Request) -> Any:
        for word, other in (("stream_options", "nothing"), ("max_tokens", "max_completion_tokens")):
            if word in request.body:
                return {"status": 400, "message": f"Unsupported parameter: {word}. Use {other} instead."}
        return "fine"

    with scripted(picky) as model:
        assert run(model, "openai").returned == {"value": "fine"}
    assert model.requests[-1].body["max_completion_tokens"] == 1024


# -- models that misbehave --------------------------------------------------------------------------------------------


def test_calls_that_cannot_be_made_come_back_as_errors_and_are_recorded(api: Api, tmp_path: Path) -> None:
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    step = {
        "calls": [
            ("drop table!", {}), ("query", '{"sql": "sel'), ("query", "[1, 2]"), ("query", '{"sql": NaN}'), ("query", deep),
            ("query", '{"sql": "\\ud800"}'), {"name": "query", "arguments": {"sql": "select 1"}, "id": None},
            {"name": "query", "arguments": {"sql": "select 2"}, "id": "no good id; at all"},
            {"name": "query", "arguments": {"sql": "select 3"}, "id": "twice"}, {"name": "query", "arguments": {"sql": "select 4"}, "id": "twice"},
            ("shell", {}), ("shell", {"command": 7}), ("shell", {"command": "true", "force": True}),
            ("read_file", {"path": "x", "limit": 0}), ("read_file", {"path": "/"}), ("write_file", "nonsense"),
        ]
    }  # fmt: skip
    with scripted([step, "sorry"]) as model:
        ran = run(model, api, directory=tmp_path)
    assert (ran.code, ran.returned) == (0, {"value": "sorry"})
    wanted = [
        "there is no tool 'drop table!'; there are: query, shell", "not JSON", "no JSON object", "not JSON", "not JSON", "not JSON",
        '[{"id": 7}]', '[{"id": 7}]', '[{"id": 7}]', '[{"id": 7}]',
        "'command' is missing", "must be of type string", "no argument 'force'", "too small", "is not a file", "not JSON",
    ]  # fmt: skip
    assert [part in text for part, text in zip(wanted, texts(model), strict=True)] == [True] * 16
    assert len({id for id, _, _ in model.requests[1].results}) == 16
    recorded = [(call["name"], call["arguments"]) for call in ran.channel.of("tool")]
    assert recorded[:3] == [("drop_table_", "{}"), ("query", '{"sql": "sel'), ("query", "[1, 2]")]
    assert [said["tool"]["is_error"] for said in ran.channel.of("said")] == [True] * 6


def test_it_ends_when_no_call_can_be_made_five_times_in_a_row(api: Api) -> None:
    bad = {"calls": [("query", '{"sql": ')]}
    good = {"calls": [("query", {"sql": "select 1"}), ("nonsense", {})]}
    with scripted([bad, bad, bad, bad, good, bad, bad, bad, bad, bad, "never asked"]) as model:
        ran = run(model, api)
    ran.failed(13, "5 answers in a row had no call that can be made: the arguments are not JSON")
    assert len(model.requests) == 10


def test_of_a_thousand_calls_at_once_some_are_made(api: Api) -> None:
    step = {"calls": [("query", {"sql": f"select {number}"}) for number in range(1000)]}
    with scripted([step, "enough"]) as model:
        ran = run(model, api)
    assert ran.code == 0 and len(ran.channel.of("tool")) == 64
    assert texts(model)[-1].endswith("(936 more calls of this answer were not made: at most 64 at a time)")


def test_huge_arguments_are_not_passed_on(api: Api) -> None:
    with scripted([{"calls": [("query", {"sql": "x" * 3_000_000})]}, "sorry"]) as model:
        ran = run(model, api)
    assert ran.code == 0
    assert [len(call["arguments"]) for call in ran.channel.of("tool")] == [1000]
    assert "longer than 1048576 characters" in texts(model)[0]


def test_answers_that_are_empty_or_cut_are_asked_for_again_a_few_times(api: Api) -> None:
    cut = "max_tokens" if api == "anthropic" else "length"
    with scripted([{"text": ""}, {"text": "  \n"}, "here"]) as model:
        assert run(model, api).returned == {"value": "here"}
    with scripted([{"text": "half of", "stop": cut}, "the rest"]) as model:
        assert run(model, api).returned == {"value": "the rest"}
    assert "cut at max_tokens" in json.dumps(model.requests[1].messages)
    with scripted([{"text": ""}] * 3) as model:
        run(model, api).failed(14, "the model said nothing 3 times in a row")
    with scripted([{"text": "and", "stop": cut}] * 3) as model:
        run(model, api).failed(14, "the model was cut at max_tokens 3 times in a row")
    with scripted([{"calls": [("query", '{"sql": "se')], "stop": cut}, "shorter"]) as model:
        assert run(model, api).code == 0
    assert "cut at max_tokens, so say less at a time" in texts(model)[0]


def test_a_model_that_refuses_ends_it(api: Api) -> None:
    with scripted([{"text": "I will not.", "stop": "refusal" if api == "anthropic" else "content_filter"}]) as model:
        run(model, api).failed(15, "the model refuses: I will not.")


def test_a_model_that_is_never_done_is_stopped(api: Api) -> None:
    with scripted(lambda request: {"calls": [("query", {"sql": "select 1"})]}) as model:
        ran = run(model, api, budget=[{"resource": "steps", "amount": 100, "used": 93, "left": 7}])
    ran.failed(6, "the model was not done after 7 answers")
    assert len(model.requests) == 7
    with scripted(lambda request: {"calls": [("query", {"sql": "select 1"})]}) as model:
        run(model, api).failed(6, "the model was not done after 200 answers")


# -- servers that misbehave -------------------------------------------------------------------------------------------


TROUBLES: list[dict[str, Any]] = [
    {"status": 429, "retry_after": 0, "message": "slow down"},
    {"status": 429, "retry_after": "Thu, 01 Jan 1970 00:00:00 GMT"},
    {"status": 429, "retry_after": "nan"},
    {"status": 500},
    {"status": 529, "message": "Overloaded"},
    {"error": "overloaded_error", "text": "I was about to"},
    {"garbage": "<html>Bad gateway</html>"},
    {"garbage": "data: {]\n\n"},
    {"garbage": 'data: {"type": "content_block_delta", "index": 4, "delta": {"type": "text_delta", "text": 7}, "choices": 3}\n\n'},
    {"garbage": ""},
    {"garbage": "data: [DONE]\n\n"},
    {"cut": "this sentence is never brought to its end because the server crashes"},
]  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda step: "-".join(str(each)[:20] for each in step.values()))
def test_passing_trouble_is_no_end(api: Api, trouble: dict[str, Any]) -> None:
    with scripted([trouble, {"calls": [("query", {"sql": "select 1"})]}, trouble, "done"]) as model:
        ran = run(model, api)
    assert (ran.code, ran.returned) == (0, {"value": "done"}) and ran.printed.count("asking again") == 2
    assert len(model.requests) == 4 and len(ran.channel.of("tool")) == 1


@pytest.mark.parametrize(
    ("trouble", "code", "sentence"),
    [
        (TROUBLES[0], 11, "the model server limits the rate: slow down (6 attempts)"),
        (TROUBLES[3], 8, "the model server failed with 500"),
        (TROUBLES[5], 8, "failed in the middle of an answer"),
        (TROUBLES[6], 12, "does not answer as the"),
        (TROUBLES[11], 12, "broke off"),
    ],
    ids=["429", "500", "overloaded", "garbage", "cut"],
)
def test_trouble_that_stays_is_an_end_of_its_own(api: Api, trouble: Any, code: int, sentence: str) -> None:
    with scripted(lambda request: trouble) as model:
        run(model, api).failed(code, sentence)
    assert len(model.requests) == 6


def test_what_asking_again_does_not_help_is_not_asked_again(api: Api) -> None:
    with scripted([{"status": 400, "message": "prompt is too long"}]) as model:
        run(model, api).failed(10, "the model server refuses the request with 400: prompt is too long")
    with scripted(["never"], key="another", well_formed=False) as model:
        run(model, api).failed(3, "the model server refuses the key (secret 'MODEL_KEY')")
    assert len(model.requests) == 1


@pytest.mark.parametrize(
    "step", [{"hang": 60}, {"stall": 60, "text": "so far and no further, says the server"}], ids=["hang", "stall"]
)
def test_a_server_that_says_nothing_is_given_up(api: Api, step: dict[str, Any]) -> None:
    with scripted(lambda request: step) as model:
        run(model, api, timeout=0.2).failed(9, "said nothing for 0.2 s (6 attempts)")


def test_a_server_that_drips_is_given_up(api: Api) -> None:
    """Never idle, never done: one comment after another."""
    with Dripping() as url:
        run(url, api, timeout=0.1).failed(9, "had no end after 1 s")


class Dripping:
    """A server that sends one byte of a stream every now and then, for ever."""

    def __enter__(self) -> str:
        over = self.over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                while not over.wait(0.01):
                    self.wfile.write(b":")
                    self.wfile.flush()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign, assignment]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


def test_a_server_that_dies_or_never_was_is_an_end(api: Api) -> None:
    with scripted([{"calls": [("query", {"sql": "select 1"})]}, {"die": True}]) as model:
        ran = run(model, api)
    ran.failed(8, "can't be reached")
    assert len(ran.channel.of("tool")) == 1


def test_however_a_stream_is_broken_the_conversation_can_go_on(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any event may be lost, in another place or hold anything: then it is no answer, or one after which the next request is well-formed."""
    monkeypatch.syspath_prepend(str(INSIDE))
    models = importlib.import_module("layer_models")
    chance = random.Random(5)
    junk = [None, -1, "", [], {}, "x", 3.5, True, {"a": 1}, float("inf"), "\ud800"]

    def broken(value: Any) -> Any:
        if chance.random() < 0.1:
            return chance.choice(junk)
        if isinstance(value, dict):
            return {key: broken(each) for key, each in value.items() if chance.random() > 0.05}
        return [broken(each) for each in value] if isinstance(value, list) else value

    step = {"number": 0, "text": "Well then", "calls": [("query", {"sql": "s"}), ("query", '{"a'), ("none", {})]}
    answers = 0
    for _ in range(1500):
        model = models.MODELS[api](
            {"model": "m", "url": "http://h", "max_tokens": 9}, "", TOOLS, lambda text: text + ""
        )
        model.tell("Begin.")
        events = [event.decode().removeprefix("data: ") for event in scripted_model._events(api, "m", step)]
        events = [event.partition("data: ")[2] or event for event in events]
        sent = []
        for event in events:
            if chance.random() < 0.2 and "{" in event:
                event = json.dumps(broken(json.loads(event)))
            sent += [f"data: {event.strip()}\n\n".encode()] * (chance.random() > 0.03)
        if chance.random() < 0.1:
            chance.shuffle(sent)
        try:
            answer = model.taken(models.events(io.BufferedReader(io.BytesIO(b"".join(sent)))))  # type: ignore[arg-type]
        except Exception:
            continue  # whatever it is, the loop takes it for a broken answer and asks again
        answers += 1
        model.messages += [answer.message] if answer.message else []
        model.give([(call, "fine", False) for call in answer.calls])
        if not answer.calls:
            model.tell("Go on.")
        body = json.loads(json.dumps(model.body(), allow_nan=False))
        scripted_model._check(api, body, {"x-api-key": KEY, "authorization": KEY, "anthropic-version": "x"}, None)
    assert answers > 100


# -- a layer that misbehaves ------------------------------------------------------------------------------------------


def test_a_layer_that_ended_the_execution_ends_the_loop(api: Api) -> None:
    def over(body: dict[str, Any]) -> tuple[int, Any]:
        return 403, {"error": {"code": "denied", "message": "this execution is over, or never was", "hint": None}}

    with scripted([{"calls": [("query", {"sql": "select 1"})]}]) as model:
        run(model, api, over).failed(16, "the layer has ended this agent: this execution is over")


def test_an_answer_that_the_layer_does_not_take_is_an_error(api: Api) -> None:
    with scripted([{"calls": [("finish", {"answer": "x" * 100_000})]}]) as model:
        ran = run(model, api)
    assert ran.code == 6 and "the layer does not take the answer: at most 65536 bytes" in ran.printed
    refused, told = ran.channel.of("return")
    assert refused == {"value": "x" * 100_000} and told["error"]["code"] == "limit_exceeded"


def test_a_layer_that_is_away_for_a_moment_is_not_the_end(api: Api) -> None:
    answers: Iterator[tuple[int, Any]] = iter(
        [(0, None), (503, {"error": {"code": "unavailable", "message": "later"}})]
    )
    step = {"calls": [("query", {"sql": "select 1"})]}
    with scripted([step, step, step, "done"]) as model:
        ran = run(model, api, lambda body: next(answers, rows(body)))
    assert (ran.code, ran.returned) == (0, {"value": "done"})
    assert [("not known" in text) for text in texts(model)] == [True, True, False]
    with scripted([step] * 5) as model:
        run(model, api, lambda body: (0, None)).failed(16, "the layer can't be reached")


@pytest.mark.parametrize(
    "more",
    [{"model": None}, {"model": {"api": "smoke"}}, {"tools": [{}]}, {"messages": [{"role": "user"}]}, {"tools": 3}],
)
def test_what_makes_no_sense_is_said(more: dict[str, Any]) -> None:
    run("http://127.0.0.1:1", "anthropic", **more).failed(2, "what the layer says of this agent makes no sense")


def test_without_its_secret_nothing_is_asked() -> None:
    with scripted([]) as model:
        given = model_of("openai", model.url, secret="NOT_THERE")
        run(model, "openai", model=given).failed(2, "the model's secret 'NOT_THERE' is not in the environment")


# -- in a box ---------------------------------------------------------------------------------------------------------


ASK = """
import layer_models, sys
model = layer_models.MODELS[sys.argv[1]]({"model": "m", "url": sys.argv[2], "secret": "MODEL_KEY", "max_tokens": 9}, "", [], print)
model.tell("Begin.")
try:
    print(model.key, model.ask().text, model.used)
except layer_models.Trouble as trouble:
    print(trouble.code, trouble)
"""


def test_from_a_box_a_model_is_reached_over_tls_with_a_key_the_box_never_has(tmp_path: Path) -> None:
    trust = Trust(tmp_path, HOST)
    with home({"SSL_CERT_FILE": str(trust.ca)}), ScriptedModel(["Hello.", "Hello."], KEY, trust.context) as model:
        rule = {**rule_of(model), "protocol": "https"}
        with Sandbox.create(egress=[rule], secrets={"MODEL_KEY": KEY}) as box:
            for api in APIS:
                done = box.run(["python3", "-c", ASK, api, f"https://{HOST}"], timeout=60)
                assert done.stdout.text.splitlines()[-1] == "LAYER_SECRET_MODEL_KEY Hello. [10, 5]", done.stderr.text
        assert [request.refused for request in model.requests] == [None, None]
        with Sandbox.create(egress=[{**rule, "path": "/elsewhere/*"}], secrets={"MODEL_KEY": KEY}) as box:
            done = box.run(["python3", "-c", ASK, "openai", f"https://{HOST}"], timeout=60)
            assert done.stdout.text == (
                "3 the contract does not let this box reach the model: no egress rule allows POST https://model.test/v1/chat/completions\n"
            )


@pytest.fixture
def office(desk: Layer) -> Iterator[Layer]:
    """A help desk whose agents this process looks after."""
    desk.insert("ticket", {"title": "a wheel is loose", "priority": 1})
    desk.call("secret.set", name="MODEL_KEY", value=KEY)
    tending.of(desk).look()
    yield desk
    for box in Sandbox.list(labels={"layer": desk.id}):
        box.kill()
    tending.of(desk).close()


def work(layer: Layer, model: ScriptedModel, api: Api, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How an agent of this model ends, and its steps."""
    layer.call(
        "blueprint.define", name="asking", limits={"memory": "192M"}, egress=[rule_of(model)], secrets=["MODEL_KEY"],
        environment={"LAYER_AGENT_PAUSE": "0.01"},
    )  # fmt: skip
    layer.call(
        "contract.define", name="clerk", blueprint="asking", model=model_of(api, timeout=1), reads={"ticket": {}},
        scope={"ticket": {"actions": ["update"], "fields": ["priority"]}}, **more,
    )  # fmt: skip
    told = layer.call("agent.run", contract="clerk", task="Look after ticket 1.")
    sql = "select status, result from execution where id = :id"
    wait_until(lambda: layer.query(sql, {"id": told["execution"]})[0]["status"] != "running", "it is over", 60)
    steps = layer.query("select kind, detail from step where execution = :id order by n", {"id": told["execution"]})
    return {**layer.query(sql, {"id": told["execution"]})[0], "branch": told["branch"]}, steps


ENDS: dict[str, tuple[Api, list[Any], int, str]] = {
    "hangs": ("anthropic", [{"hang": 60}] * 6, 9, "said nothing for 1 s"),
    "garbage": ("openai", [{"garbage": "<html>"}] * 6, 12, "does not answer as the openai API does"),
    "limits": ("anthropic", [{"status": 429, "retry_after": 0}] * 6, 11, "limits the rate"),
    "dies": ("openai", [{"die": True}], 8, "the model server failed with 502"),
    "malformed": ("anthropic", [{"calls": [("update_ticket", '{"id": ')]}] * 5, 13, "no call that can be made"),
    "loops": ("openai", [{"calls": [("delete_ticket", {"id": 1})]}] * 5, 13, "there is no tool 'delete_ticket'"),
}


@pytest.mark.parametrize("how", ENDS)
def test_an_agent_whose_model_fails_is_recorded_with_what_it_did(office: Layer, how: str) -> None:
    api, script, code, sentence = ENDS[how]
    [ticket] = office.query("select id from ticket")
    with scripted([{"calls": [("update_ticket", {**ticket, "priority": 9})]}, *script]) as model:
        ended, steps = work(office, model, api)
    assert ended["status"] == "failed" and sentence in ended["result"]["error"]["message"], ended
    assert [step["detail"]["exit_code"] for step in steps if step["kind"] == "exit"] == [code]
    printed = "".join(step["detail"].get("text", "") for step in steps if step["kind"] == "output")
    assert f'→ update_ticket {{"id":{ticket["id"]},"priority":9}}\n← ' in printed and sentence in printed
    assert office.query("select priority from ticket", branch=ended["branch"]) == [{"priority": 9}]
    assert office.query("select priority from ticket") == [{"priority": 1}]
    refused = [step["detail"]["do"] for step in steps if step["kind"] == "refusal"]
    assert refused == (["tool"] * 5 if code == 13 else [])
    assert office.verify().ok
