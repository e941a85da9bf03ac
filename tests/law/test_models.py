"""Models of contracts: what a box says to one and is told is a step, whichever program asked; it is counted and has an end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from law.models import APIS, HOST, KEY, model_of, rule_of, scripted
from sandbox.hosts import Host, wait_until

from livinglayer import Layer
from livinglayer.errors import Invalid, LimitExceeded
from livinglayer.jobs.scripted_model import Api, ScriptedModel
from livinglayer.law import models, tending, usage
from livinglayer.law import secrets as vault
from livinglayer.sandbox.egress.rules import parse
from livinglayer.sandbox.sandbox import Sandbox

CLIENT = """
import json, os, urllib.request
def ask(words, path={path!r}, **more):
    body = {{"model": "scripted-1", "max_tokens": 50, "messages": [{{"role": "user", "content": words}}], **more}}
    headers = {{"content-type": "application/json", "anthropic-version": "2023-06-01", "x-api-key": os.environ["MODEL_KEY"],
               "authorization": "Bearer " + os.environ["MODEL_KEY"]}}
    request = urllib.request.Request("http://model.test" + path, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request).read().decode()
"""
PATH = {"anthropic": "/v1/messages", "openai": "/v1/chat/completions"}
PRICES = {"input": 3, "output": 15}


@pytest.fixture
def office(desk: Layer) -> Iterator[Layer]:
    """A help desk whose boxes this process looks after, with a key for a model."""
    vault.set(desk, "MODEL_KEY", KEY)
    tending.of(desk).look()
    yield desk
    for box in Sandbox.list(labels={"layer": desk.id}):
        box.kill()
    tending.of(desk).close()


def contract(layer: Layer, model: ScriptedModel, api: Api = "anthropic", **more: Any) -> None:
    layer.call(
        "blueprint.define",
        name="asking",
        limits={"memory": "192M", "disk": "64M"},
        egress=[rule_of(model)],
        secrets=["MODEL_KEY"],
    )
    given = {"name": "asker", "blueprint": "asking", "model": model_of(api, prices=PRICES), "reads": ["ticket"], **more}
    layer.call("contract.define", given)


def make(layer: Layer) -> tuple[Any, dict[str, Any]]:
    told = layer.call("box.create", contract="asker")
    return Sandbox.connect(told["id"]), told


def ask(box: Any, code: str, api: Api = "anthropic") -> str:
    """What a program in the box prints: no loop of ours, any client."""
    result = box.run(["python3", "-c", CLIENT.format(path=PATH[api]) + code], timeout=60)
    return (result.stdout.text + result.stderr.text).strip()


def said(layer: Layer, told: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The steps of what was said to models, once there are as many."""
    sql = "select detail from step where execution = :id and kind = 'model' order by n"

    def found() -> list[dict[str, Any]]:
        return [row["detail"] for row in layer.query(sql, {"id": told["execution"]})]

    wait_until(lambda: len(found()) >= count, f"{count} steps of models", 20)
    return found()


def outcome(layer: Layer, told: dict[str, Any]) -> dict[str, Any]:
    sql = "select status, result from execution where id = :id"
    wait_until(lambda: layer.query(sql, {"id": told["execution"]})[0]["status"] != "running", "it is over", 30)
    return layer.query(sql, {"id": told["execution"]})[0]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_any_program_says_to_a_model_is_a_step(office: Layer, api: Api, stream: bool) -> None:
    script = [{"text": "I look.", "calls": [("query", {"sql": "select 1"})], "usage": (1000, 200)}, "done"]
    with scripted(script) as model:
        contract(office, model, api)
        box, told = make(office)
        tools = [{"name": "query", "description": "", "input_schema": {"type": "object"}}]
        if api == "openai":
            tools = [{"type": "function", "function": {"name": "query", "parameters": {"type": "object"}}}]
        more = {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream and api == "openai" else {})
        assert (
            "I look"
            in ask(
                box,
                f"print(ask('hello LAYER_SECRET_MODEL_KEY', tools={tools!r}, **{more!r}).replace('\", \"', ''))",
                api,
            )
            or stream
        )
        [step] = said(office, told, 1)
    known = {key: step[key] for key in ("api", "model", "input", "output", "money", "status", "answer", "host", "path")}
    assert known == {
        "api": api, "model": "scripted-1", "input": 1000, "output": 200, "money": 0.006, "status": 200, "answer": "I look.", "host": HOST,
        "path": PATH[api],
    }  # fmt: skip
    assert step["stop"] == ("tool_use" if api == "anthropic" else "tool_calls") and step["ms"] > 0
    assert [(call["name"], call["arguments"]) for call in step["calls"]] == [("query", {"sql": "select 1"})]
    request = office.blob(step["request_content"])
    assert json.loads(request)["messages"] == [{"role": "user", "content": "hello LAYER_SECRET_MODEL_KEY"}]
    answer = office.blob(step["answer_content"])
    assert b"query" in answer and KEY.encode() not in request + answer
    assert office.verify().ok


def test_tokens_that_are_used_up_end_the_box(office: Layer) -> None:
    with scripted(lambda request: {"text": "x", "usage": (400, 100)}) as model:
        contract(office, model, budget={"tokens": 1200})
        box, told = make(office)
        assert "text" in ask(box, "ask('a'); print(ask('b'))")
        assert len(said(office, told, 2)) == 2
        assert ask(box, "print(ask('c') and 'fine')") == "fine"
        ended = outcome(office, told)
    assert ended["status"] == "failed" and "over its budget of 1200 tokens: 1500" in ended["result"]["error"]["message"]
    assert not Sandbox.list(labels={"layer": office.id})
    assert (ended["result"]["tokens"], ended["result"]["money"]) == (1500, 0.0081)
    for by in ("principal", "contract"):
        [row] = [row for row in usage.totals(office, by) if row["tokens"]]
        assert (row[by], row["tokens"], row["money"]) == ({"principal": "owner", "contract": "asker"}[by], 1500, 0.0081)
    number = office.call("quota.set", contract="asker", resource="tokens", amount=1500, seconds=3600)
    with pytest.raises(LimitExceeded, match="the contract has used 1500 of 1500 tokens of models") as caught:
        make(office)
    assert caught.value.details["quota"] == number and "room again at" in str(caught.value.hint)
    office.call("quota.set", contract="asker", resource="tokens", amount=1501, seconds=3600)
    make(office)
    office.principal("ann")
    office.grant("ann", "read", "usage")
    assert [row["tokens"] for row in usage.totals(office, principal="ann")] == [
        0
    ]  # what it may not read adds up to nothing


def test_money_that_is_used_up_ends_the_box(office: Layer) -> None:
    with scripted(lambda request: {"text": "x", "usage": (1_000_000, 0)}) as model:
        contract(office, model, budget={"money": 5})
        box, told = make(office)
        ask(box, "ask('a'); ask('b')")
        ended = outcome(office, told)
    assert ended["status"] == "failed" and "over its budget of 5 money: 6" in ended["result"]["error"]["message"]


def test_the_count_survives_sleep_kills_and_another_keeper(office: Layer, boxes: Host) -> None:
    with scripted(lambda request: {"text": "x", "usage": (400, 100)}) as model:
        contract(office, model, budget={"tokens": 1900})
        box, told = make(office)
        ask(box, "ask('a')")
        said(office, told, 1)
        box.suspend()
        box.resume()
        ask(box, "import os, signal\nask('b')\nos.kill(-1, signal.SIGKILL)")
        said(office, told, 2)
        tending.of(office).close()  # and somebody else goes on
        tending.of(office).look()
        wait_until(lambda: told["execution"] in tending.of(office).kept, "it is kept again", 20)
        used = {row["resource"]: row["used"] for row in tending.of(office).kept[told["execution"]].run.budget()}
        wait_until(
            lambda: tending.of(office).kept[told["execution"]].used()["tokens"] == 1000, "it is counted anew", 10
        )
        assert used["tokens"] == 1000  # before it has looked, by the steps
        ask(box, "ask('c')")
        assert len(said(office, told, 3)) == 3
        ask(box, "ask('d')")
        ended = outcome(office, told)
    assert "over its budget of 1900 tokens: 2000" in ended["result"]["error"]["message"]
    assert len(said(office, told, 4)) == 4


def test_after_a_crash_of_the_host_the_key_is_put_in_again(office: Layer, boxes: Host) -> None:
    with scripted(lambda request: {"text": "x", "usage": (400, 100)}) as model:
        contract(office, model)
        box, told = make(office)
        ask(box, "ask('a')")
        code = CLIENT.format(path=PATH["anthropic"]) + (
            "import time\nfor n in range(300):\n    try: ask('b'); break\n    except OSError as error:\n"
            "        if getattr(error, 'code', 0) == 401: raise\n        time.sleep(0.1)\n"
        )
        going = box.start(["python3", "-c", "import time; time.sleep(1)\n" + code])
        boxes.crash()  # nobody has the key now but the layer
        boxes.hang_up()
        assert len(said(office, told, 2)) == 2
        assert [step["status"] for step in said(office, told, 2)] == [200, 200]
        again = Sandbox.connect(told["id"])
        assert again.info()["secrets"] == ["MODEL_KEY"] and going.id
        assert ask(again, "print(os.environ['MODEL_KEY'], ask('c') and 'fine')") == "LAYER_SECRET_MODEL_KEY fine"
    for place in ("boxes", "traces", "exchanges"):
        assert all(KEY.encode() not in path.read_bytes() for path in (boxes.state / place).rglob("*.*"))


def test_what_a_box_says_of_tokens_itself_is_not_believed(office: Layer) -> None:
    """It can leave counts out, break off, ask by another path, and ask elsewhere: what it got was counted, and elsewhere it can't."""
    with scripted(lambda request: {"text": "x" * 300, "usage": (400, 100)}) as model:
        contract(office, model, "openai", budget={"tokens": 100_000})
        box, told = make(office)
        ask(box, "ask('a', stream=True)", "openai")  # without stream_options nobody is told
        code = """
import http.client
c = http.client.HTTPConnection("model.test")
c.request("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": [{"role": "user", "content": "y"}]}),
          {"content-type": "application/json", "authorization": "Bearer " + os.environ["MODEL_KEY"], "accept-encoding": "gzip"})
c.sock.close()
try: urllib.request.urlopen(urllib.request.Request("http://model.test/other", b"usage"))
except Exception as error: print(error)
try: print(urllib.request.urlopen("http://fake.test/", timeout=5).status)
except Exception as error: print(type(error).__name__)"""
        assert ask(box, code, "openai").splitlines()[-1] == "URLError"
        steps = said(office, told, 3)
    assert steps[0]["estimated"] and steps[0]["output"] == 100 and steps[0]["input"] > 20
    counted = {step["status"]: step["input"] + step["output"] for step in steps[1:]}
    assert counted.pop(404, None) == 0 and sum(counted.values()) > 0
    denied = office.query(
        "select detail from step where execution = :id and kind = 'network'", {"id": told["execution"]}
    )
    assert any(row["detail"]["verdict"] == "deny" and row["detail"]["host"] == "fake.test" for row in denied)


def test_a_server_that_refuses_is_a_step_that_costs_nothing(office: Layer) -> None:
    with scripted([{"status": 429, "message": "slow down"}, {"garbage": "data: {nothing\\n\\n"}]) as model:
        contract(office, model)
        box, told = make(office)
        assert "429" in ask(box, "ask('a')")
        ask(box, "ask('b', stream=True)")
        steps = said(office, told, 2)
    assert (steps[0]["status"], steps[0]["input"], steps[0]["output"], steps[0]["error"]) == (429, 0, 0, "slow down")
    assert steps[1]["estimated"] and steps[1]["input"] > 0


# What a contract may say


def test_a_contract_whose_model_can_not_be_asked_is_refused(office: Layer) -> None:
    office.call("blueprint.define", name="b", egress=["https://model.test", "https://other.test"],
                secrets=[{"name": "MODEL_KEY", "hosts": ["model.test"]}])  # fmt: skip
    good = {"api": "anthropic", "url": "https://model.test", "model": "m", "secret": "MODEL_KEY"}
    for model, complaint in (
        ({**good, "url": "https://elsewhere.test"}, "does not allow POST https://elsewhere.test/v1/messages"),
        ({**good, "url": "http://model.test"}, "does not allow POST http://model.test/v1/messages"),
        ({**good, "url": "https://model.test:8443"}, "does not allow"),
        ({**good, "url": "https://other.test"}, "'MODEL_KEY' of the model .* does not go to other.test"),
        ({**good, "secret": "OTHER"}, "'OTHER' of the model"),
        ({**good, "prices": {"input": -1}}, "prices"),
        ({**good, "prices": {"input": True}}, "prices"),
    ):
        with pytest.raises(Invalid, match=complaint):
            office.call("contract.define", name="c", blueprint="b", model=model)
    with pytest.raises(Invalid, match="in money, and its model has no prices"):
        office.call("contract.define", name="c", blueprint="b", model=good, budget={"money": 5})
    for budget in ({"tokens": 0}, {"tokens": -5}, {"money": "5"}, {"tokens": True}):
        with pytest.raises(Invalid, match="budget"):
            office.call("contract.define", name="c", blueprint="b", model={**good, "prices": PRICES}, budget=budget)
    assert office.call(
        "contract.define", name="c", blueprint="b", model={**good, "prices": PRICES}, budget={"tokens": 5, "money": 1}
    )


def test_every_rule_by_which_a_model_can_be_reached_counts() -> None:
    model = {"api": "openai", "url": "https://model.test/v1", "model": "m"}

    def bound(*egress: Any) -> list[tuple[str, str | None]]:
        return [(rule.host, rule.model) for rule in parse(models.bind("contract 'c'", egress, model))]

    assert bound("model.test", "other.test") == [("model.test", "openai"), ("other.test", None)]
    assert bound("https://model.test/v1/*", "*") == [("model.test", "openai"), ("model.test", "openai"), ("*", None)]
    assert bound({"host": "*.test", "bytes": "1M"}, "tcp://model.test:22") == [
        ("*.test", "openai"),
        ("model.test", None),
    ]
    assert bound({"host": "model.test", "path": "/admin*", "action": "deny"}, "model.test") == [
        ("model.test", None),
        ("model.test", "openai"),
    ]
    with pytest.raises(Invalid, match="unread"):
        bound({"host": "*", "tls": "pass"}, "model.test")
    with pytest.raises(Invalid, match="does not allow"):
        bound({"host": "model.test", "action": "deny"}, "*")


def test_prices_are_for_a_million_tokens_and_a_cache_may_have_its_own() -> None:
    told = {"input": 1_000_000, "cached": 900_000, "output": 100_000}
    assert models.price({"prices": PRICES}, told) == 4.5
    assert models.price({"prices": {**PRICES, "cached": 0.3}}, told) == 2.07
    assert models.price(None, told) == models.price({"model": "m"}, told) == 0
