"""Attacks on the law by those it governs: principals with few permissions, authors of functions and triggers, code in a box."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pytest
from law.conftest import define
from sandbox.hosts import Host

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Denied, Invalid, LayerError, LimitExceeded, NotFound
from livinglayer.law import channel, contracts, executions, functions, tokens
from livinglayer.law.channel import Channel
from livinglayer.law.executions import STEPS, Run
from livinglayer.law.triggers import Feed

FLOW = {"type": "state", "transitions": {"open": ["closed"], "closed": ["open"], "burnt": []}}


@pytest.fixture
def shop(layer: Layer) -> Iterator[Layer]:
    """Tickets and salaries; mallory may do nothing yet."""
    layer.define("ticket", {"title": "text!", "owner": "ref principal", "status": FLOW, "note": "text"})
    layer.define("salary", {"person": "text!", "amount": "int"})
    layer.principal("mallory")
    yield layer


def run_of(layer: Layer, who: str, **capability: Any) -> Run:
    """A run as a function's would be, without its box."""
    scope = {"branch": "main", "entities": capability.pop("writes", {})}
    execution = layer.ledger.open(layer.id_of(who), scope, "function")
    execution.authority = capability.pop("authority", None)
    layer.ledger.intend(execution)
    return Run(layer, execution, **capability)


def ask(run: Run, name: str, /, **given: Any) -> Any:
    return run.answer("POST", name, "", given, b"")


# Permissions


def test_a_condition_on_rows_allows_nothing_that_has_none(shop: Layer) -> None:
    shop.call("function.define", name="salary.all", language="sql", code="select * from salary", reads=["salary"], rights="definer")  # fmt: skip
    shop.insert("salary", {"person": "ann", "amount": 7})
    shop.define("thing", {"owner": "ref principal"})
    shop.grant("mallory", "*", "*", where="owner = :me")
    for who in (lambda: shop.call("salary.all", principal="mallory"), lambda: shop.fork("mine", principal="mallory")):
        with pytest.raises((Denied, NotFound)):
            who()
    assert not shop.can("mallory", "impersonate", "principal:owner")
    with shop.engine.reading() as session:
        policy = shop.catalog.policy(session, shop.id_of("mallory"), 0)
        with pytest.raises(Denied):
            policy.require("impersonate", "principal:owner")


def test_a_call_that_is_granted_on_a_branch_is_not_granted_on_main(shop: Layer) -> None:
    shop.call("function.define", name="salary.all", language="sql", code="select * from salary", reads=["salary"], rights="definer")  # fmt: skip
    shop.fork("idea")
    shop.grant("mallory", "call", "function:salary.all", branch="idea")
    assert shop.call("salary.all", principal="mallory", branch="idea") == []
    with pytest.raises((Denied, NotFound)):
        shop.call("salary.all", principal="mallory")


def test_definers_rights_do_not_stay_with_whoever_called(shop: Layer) -> None:
    """What a definer's function has written must not decide what its caller writes later by itself."""
    number = shop.insert("ticket", {"title": "x", "note": "a"})
    shop.define("own", {"n": "int"})
    shop.grant("mallory", "insert", "own")
    shop.insert("own", {"n": 1}, principal="mallory")  # an execution of its own that is recorded
    run = run_of(shop, "mallory", writes={"ticket": {}}, authority=shop.my_id)
    ask(run, "update", entity="ticket", id=number, values={"note": "b"})
    shop.ledger.conclude(run.execution, "done", None, writes=run.draft.apply)
    with pytest.raises((Denied, NotFound)):
        shop.update("ticket", number, {"note": "stolen"}, principal="mallory")
    assert shop.query("select note from ticket") == [{"note": "b"}]


def test_a_token_that_ends_makes_none_that_outlives_it(shop: Layer, location: str) -> None:
    for who in ("mallory", "owner"):
        brief = shop.call("token.create", name="brief", principal=who, seconds=600)["token"]
        with livinglayer.open(location, token=brief) as handle:
            for given in ({}, {"seconds": 86_400.0}, {"seconds": 60.0}):
                made = handle.call("token.create", name=f"made by {who}", **given)["token"]
                with livinglayer.open(location, token=made) as again:
                    again.call("token.create", name=f"made by {who}")
            with pytest.raises(Denied, match="a token that ends makes none"):
                handle.token(who)
            with pytest.raises(Denied, match="makes no link"):
                tokens.create(handle, who, "link", "login")
    ends = {
        row["name"]: row["ends"] for row in shop.query("select name, max(expires) as ends from token group by name")
    }
    assert ends["made by mallory"] <= ends["brief"] and ends["made by owner"] == ends["brief"]
    assert shop.query("select count(*) as n from token where expires is null") == [{"n": 0}]
    shop.token("mallory")  # one without an end may


# What errors tell


def test_errors_tell_nothing_of_a_row_that_may_not_be_read(shop: Layer) -> None:
    number = shop.insert("ticket", {"title": "x"})
    shop.update("ticket", number, {"status": "closed"})

    def told(act: Any) -> tuple[Any, ...]:
        with pytest.raises(LayerError) as met:
            act()
        error = met.value
        return type(error), error.message.replace(str(number), "N").replace("999", "N"), error.hint

    for attempt in (
        {"arguments": {"values": {"status": "burnt"}}},
        {"arguments": {"values": {"title": "y"}, "expect": 1}},
        {"arguments": {"values": {"title": "y"}}},
        {"verb": "row.delete", "arguments": {"expect": 1}},
    ):
        verb, given = attempt.get("verb", "row.update"), attempt["arguments"]

        def act(id: int, verb: Any = verb, given: Any = given) -> Any:
            return shop.call(verb, {"entity": "ticket", "id": id, **given}, principal="mallory")

        assert told(lambda: act(number)) == told(lambda: act(999)), attempt


def test_code_that_read_before_learns_no_version_of_a_hidden_row(shop: Layer) -> None:
    number = shop.insert("ticket", {"title": "x"})
    shop.grant("mallory", "read", "salary")
    run = run_of(shop, "mallory", reads={"salary": {}}, writes={"ticket": {}})
    ask(run, "query", sql="select * from salary")
    shop.update("ticket", number, {"note": "later"})
    for verb, more in (("update", {"values": {"note": "z"}}), ("delete", {})):
        with pytest.raises(NotFound):
            ask(run, verb, entity="ticket", id=number, **more)


def test_upsert_finds_no_row_by_what_may_not_be_read(shop: Layer) -> None:
    hidden = shop.insert("salary", {"person": "ann", "amount": 7000})

    def probe(amount: int) -> Any:
        given = {"entity": "salary", "values": {"person": "x", "amount": amount}, "on": ["amount"]}
        with pytest.raises(LayerError) as met:
            shop.call("row.upsert", given, principal="mallory")
        return type(met.value), met.value.message

    assert probe(7000) == probe(7001)
    shop.grant("mallory", "write", "salary")
    shop.grant("mallory", "read", "salary.person")
    made = shop.upsert("salary", {"person": "eve", "amount": 7000}, on=["amount"], principal="mallory")
    assert made != hidden
    assert shop.upsert("salary", {"person": "ann", "amount": 1}, on=["person"], principal="mallory") == hidden


# Functions, projections, blueprints, triggers


def author(layer: Layer) -> None:
    """Mallory may write functions, triggers, blueprints, contracts, and call her own."""
    for entity in ("function", "trigger", "blueprint", "contract"):
        layer.grant("mallory", "write", entity)
        layer.grant("mallory", "read", entity)
    for resource in ("function:my.own", "contract:mine"):
        layer.grant("mallory", "call", resource)


def test_who_writes_a_function_lists_no_projection_it_may_not_read(shop: Layer) -> None:
    shop.insert("salary", {"person": "ann", "amount": 7})
    shop.call("projection.define", name="pay", statement="select person, amount from salary")
    author(shop)
    shop.call("function.define", name="my.own", code="def own(): pass", projections=["pay"], principal="mallory")
    with pytest.raises(NotFound):
        run = run_of(shop, "mallory", **functions.capability(functions.load(shop, "my.own"), "main"))
        ask(run, "projection", name="pay")
    shop.insert("contract", {"name": "mine", "projections": ["pay"]}, principal="mallory")
    found = contracts.load(shop, "mine")
    with pytest.raises(NotFound):
        ask(run_of(shop, "mallory", projections=found.projections, voucher=found.writer), "projection", name="pay")
    # What an owner lists, callers need no permission for.
    shop.call("function.define", name="pay.show", code="def show(): pass", projections=["pay"])
    run = run_of(shop, "mallory", **functions.capability(functions.load(shop, "pay.show"), "main"))
    assert b"ann" in ask(run, "projection", name="pay")


def test_code_in_a_box_calls_functions_and_no_verbs(shop: Layer) -> None:
    with pytest.raises(Invalid):
        shop.call("function.define", name="my.own", code="def own(): pass", calls=["permission.grant"])
    row = {"name": "my.own", "language": "python", "code": "", "reads": {"function": {"names": ["permission.grant"]}}}
    shop.insert("function", row)
    run = run_of(shop, "owner", **functions.capability(functions.load(shop, "my.own"), "main"))
    with pytest.raises(Denied):
        ask(run, "call", function="permission.grant", arguments={"principal": "mallory", "action": "*", "resource": "*"})  # fmt: skip
    assert not shop.can("mallory", "read", "salary")


@pytest.mark.parametrize(
    "shape",
    [{"tier": "process"}, {"mounts": [{"source": "/", "target": "/mnt"}]}, {"egress": [{"host": "127.0.0.1", "private": True}]}],
)  # fmt: skip
@pytest.mark.parametrize("whose", ["blueprint", "function"])
def test_only_what_owners_wrote_opens_the_machine_to_a_box(shop: Layer, shape: dict[str, Any], whose: str) -> None:
    author(shop)
    who = {"blueprint": ("mallory", "owner"), "function": ("owner", "mallory")}[whose]
    blueprint = shop.insert("blueprint", {"name": "wide", "tier": "namespace", **shape}, principal=who[0])
    code = "def own():\n    return open('/etc/hostname').read()"
    row = {"name": "my.own", "language": "python", "code": code, "blueprint": blueprint}
    shop.insert("function", row, principal=who[1])
    with pytest.raises(Denied, match="only an owner may"):
        shop.call("my.own", principal="mallory")
    contract = shop.insert("contract", {"name": "mine", "blueprint": blueprint}, principal=who[1])
    with pytest.raises(Denied, match="only an owner may"):
        contracts.Making(shop, contracts.by_id(shop, contract), shop.id_of("mallory"), "main", None, None, [])


def test_a_contract_alone_lowers_no_tier_to_process(shop: Layer) -> None:
    author(shop)
    number = shop.insert("contract", {"name": "mine", "tier": "process"}, principal="mallory")
    with pytest.raises(Denied, match="only an owner may"):
        contracts.Making(shop, contracts.by_id(shop, number), shop.id_of("mallory"), "main", None, None, [])


def test_secrets_go_where_only_those_who_may_use_them_say(shop: Layer) -> None:
    author(shop)
    shop.call("secret.set", name="KEY", value="a-secret-value-1")
    rules = {"egress": ["https://evil.test"], "secrets": [{"name": "KEY", "hosts": ["evil.test"], "readable": True}]}
    shop.call("blueprint.define", name="net", egress=["https://api.test"], secrets=[{"name": "KEY", "hosts": ["api.test"]}])  # fmt: skip
    made = {"code": "def pay(): pass", "blueprint": "net"}
    shop.call("function.define", name="money.pay", rights="definer", **made)
    shop.grant("mallory", "call", "function:money.pay")
    # She sends the owner's secret elsewhere, on main or on a branch that is hers.
    shop.fork("hers")
    for branch in ("hers", "main"):
        number = shop.query("select id from blueprint")[0]["id"]
        shop.update("blueprint", number, rules, branch=branch, principal="mallory")
        with pytest.raises(Denied, match="mallory may not use secret:KEY"):
            shop.call("money.pay", principal="mallory", branch=branch)
    # Or has her own code run in a box that has it, by somebody who may use it.
    shop.call("blueprint.define", name="net", egress=["https://api.test"], secrets=[{"name": "KEY", "hosts": ["api.test"]}])  # fmt: skip
    shop.call("function.define", name="my.own", principal="mallory", **made)
    with pytest.raises(Denied, match="mallory may not use secret:KEY"):
        shop.call("my.own")


def fired(layer: Layer) -> list[dict[str, Any]]:
    Feed(layer, lambda: datetime.now(UTC)).look()
    return [row["arguments"] for row in layer.query("select arguments from execution where trigger is not null order by id")]  # fmt: skip


def test_a_trigger_sees_what_its_writer_may_read(shop: Layer) -> None:
    author(shop)
    shop.grant("mallory", "read", "salary.person", where="person <> 'boss'")
    shop.call("function.define", name="my.own", code="def own(**more): pass", signature={"arguments": {"id": "int"}}, principal="mallory")  # fmt: skip
    for name, more in (
        ("rich", {"on_entity": "salary", "predicate": "amount > 1000"}),
        ("boss", {"on_entity": "salary", "predicate": "person = 'boss'"}),
        ("raise", {"on_entity": "salary", "on_fields": ["amount"], "on_actions": ["update"]}),
        ("blind", {"on_entity": "ticket"}),
        ("fair", {"on_entity": "salary", "predicate": "person = 'ann'", "on_actions": ["insert"]}),
    ):
        shop.insert("trigger", {"name": name, "function": "my.own", **more}, principal="mallory")
    ann = shop.insert("salary", {"person": "ann", "amount": 2000})
    boss = shop.insert("salary", {"person": "boss", "amount": 9000})
    shop.insert("ticket", {"title": "x"})
    for number in (ann, boss):
        shop.update("salary", number, {"amount": 3000})
    assert fired(shop) == [{"id": ann}]


def test_a_trigger_is_not_told_what_others_were(shop: Layer) -> None:
    author(shop)
    shop.insert("salary", {"person": "ann", "amount": 7})
    shop.call("function.define", name="salary.all", language="sql", code="select person from salary", reads=["salary"])
    signature = {"arguments": {"result": "json", "execution": "int"}}
    shop.call("function.define", name="my.own", code="def own(**more): pass", signature=signature, principal="mallory")
    shop.insert("trigger", {"name": "spy", "function": "my.own", "after_function": "salary.all"}, principal="mallory")
    shop.call("salary.all")
    [told] = fired(shop)
    assert told["result"] is None
    shop.grant("mallory", "read", "execution")
    shop.call("salary.all")
    assert fired(shop)[1]["result"] == [{"person": "ann"}]


# Code that wants more than there is


def test_no_change_is_made_that_there_is_no_step_for(shop: Layer) -> None:
    run = run_of(shop, "owner", writes={"salary": {}}, atomic=False)
    run.steps += [("emit", {}, executions.now())] * (STEPS - 3)  # a refusal is one, too
    with pytest.raises(LimitExceeded):
        ask(run, "insert", entity="salary", values=[{"person": str(n)} for n in range(4)])
    ask(run, "insert", entity="salary", values=[{"person": "a"}, {"person": "b"}])
    for verb, more in (("insert", {"values": {"person": "c"}}), ("upsert", {"values": {"person": "c"}, "on": ["person"]})):  # fmt: skip
        with pytest.raises(LimitExceeded):
            ask(run, verb, entity="salary", **more)
    assert shop.query("select count(*) as n from salary") == [{"n": 2}]


def test_a_box_asks_for_no_more_rows_than_there_may_be(shop: Layer) -> None:
    shop.insert("salary", [{"person": str(n)} for n in range(5)])
    run = run_of(shop, "owner", reads={"salary": {}})
    shop.settings = shop.settings.__class__(query_rows=3)
    with pytest.raises(LimitExceeded):
        ask(run, "query", sql="select * from salary", limit=1_000_000)
    for wrong in ("x", [1], {}, 1.5):
        with pytest.raises(Invalid):
            ask(run, "query", sql="select * from salary", limit=wrong)


def test_what_one_execution_keeps_has_a_limit(shop: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "KEPT", 10_000)
    run = run_of(shop, "owner")
    run.answer("PUT", "artifact", "a", {}, b"x" * 9000)
    with pytest.raises(LimitExceeded):
        run.answer("PUT", "artifact", "b", {}, b"y" * 9000)
    run.steps += [("emit", {}, executions.now())] * STEPS
    with pytest.raises(LimitExceeded):
        run.answer("PUT", "artifact", "c", {}, b"z")


def test_code_in_a_box_names_no_content_of_others(shop: Layer) -> None:
    shop.define("letter", {"page": "file"})
    shop.insert("letter", {"page": b"the owner's"})
    shop.define("mine", {"page": "file"})
    for action in ("read", "write"):
        shop.grant("mallory", action, "mine")
    stolen = sha256(b"the owner's").hexdigest()
    for atomic in (True, False):
        run = run_of(shop, "mallory", reads={"mine": {}}, writes={"mine": {}}, atomic=atomic)
        for verb, more in (("insert", {}), ("upsert", {"on": ["page"]})):
            with pytest.raises(NotFound, match="there is no content"):
                ask(run, verb, entity="mine", values={"page": stolen}, **more)
        kept = run.answer("PUT", "artifact", "a", {}, b"of the box")["digest"]
        ask(run, "insert", entity="mine", values={"page": kept})  # what it gave itself
        assert run.answer("PUT", "artifact", "a", {}, b"the owner's")["digest"] == stolen
        ask(run, "insert", entity="mine", values={"page": stolen})  # and whoever has it all needs nobody
    with pytest.raises(NotFound, match="there is no content"):
        shop.acting_as(shop.id_of("mallory")).insert("mine", {"page": sha256(b"?").hexdigest()})


def test_queries_that_see_a_draft_have_the_limits_of_others(shop: Layer) -> None:
    """On SQLite they run in this process, which others' memory is in."""
    run = run_of(shop, "owner", reads={"salary": {}}, writes={"salary": {}})
    ask(run, "insert", entity="salary", values={"person": "x"})
    big = "repeat('x', 30000000)" if shop.engine.dialect == "postgres" else "printf('%.*c', 30000000, 'x')"
    many = f"with recursive c(n) as (select 1 union all select n + 1 from c where n < 50) select {big} as x, n from c"
    attacks = [many] if shop.engine.dialect == "postgres" else [many, "select printf('%.*c', 400000000, 'x') as x"]
    for sql in attacks:
        with pytest.raises(LayerError):
            ask(run, "query", sql=sql)
    assert b"x" in ask(run, "query", sql="select person from salary")


def test_a_function_that_calls_itself_ends(desk: Layer, boxes: Host) -> None:
    code = "import layer\ndef dig(n):\n    return layer.call('ticket.dig', n=n + 1)"
    define(desk, "ticket.dig", code, calls=["ticket.dig"])
    with pytest.raises(LayerError, match="at most 16 deep"):
        desk.call("ticket.dig", n=0)
    assert desk.query("select status, count(*) as n from execution where function = 'ticket.dig' group by status") == [{"status": "failed", "n": 17}]  # fmt: skip


class Asked:
    """Answers everything with a lot."""

    token = "t"

    def answer(self, *_: Any) -> Any:
        return b"x" * (1 << 20)


@pytest.fixture
def line() -> Iterator[tuple[Channel, Any]]:
    listener = socket.create_server(("127.0.0.1", 0))
    served = Channel(listener)
    served.executions["t"] = Asked()
    clients = []

    def connect() -> socket.socket:
        clients.append(socket.create_connection(listener.getsockname()))
        clients[-1].setblocking(False)
        serve(served)
        return clients[-1]

    yield served, connect
    for each in clients:
        each.close()
    served.close()


def serve(served: Channel) -> None:
    for fd, event in served.poll.poll(100):
        served.turn(fd, event)


def flood(served: Channel, client: socket.socket, data: bytes, turns: int) -> None:
    for _ in range(turns):
        try:
            client.send(data)
        except BlockingIOError:
            pass
        except OSError:
            return
        serve(served)


def test_answers_that_nobody_reads_are_not_piled_up(line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HELD", 24 << 20)
    monkeypatch.setattr(channel, "BODY", 8 << 20)
    served, connect = line
    flood(served, connect(), b"GET /t/me HTTP/1.1\r\nHost: x\r\n\r\n" * 200, 30)
    assert served.held < 24 << 20


def test_a_head_without_end_is_not_kept(line: Any) -> None:
    served, connect = line
    client = connect()
    flood(served, client, b"GET /t/me HTTP/1.1\r\nX: ", 1)
    flood(served, client, b"x" * 65536, 20)
    assert not served._connections


def test_requests_of_many_connections_share_one_limit(line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HELD", 4 << 20)
    monkeypatch.setattr(channel, "BODY", 2 << 20)
    served, connect = line
    for _ in range(8):
        client = connect()
        flood(served, client, b"PUT /t/artifact/x HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n", 1)
        flood(served, client, b"x" * 65536, 25)
    assert served.held <= 4 << 20


HOSTILE = """
import json, os, urllib.request
import layer

def post(name, body):
    url = os.environ["LAYER_URL"] + "/" + name
    try:
        urllib.request.urlopen(urllib.request.Request(url, data=body.encode(), method="POST")).read()
    except urllib.error.HTTPError as error:
        error.read()

def hostile(what):
    layer.insert("ticket", title="kept only with a result")
    post(*what)
    if what[0] == "return":
        os._exit(0)
    return 1
"""


SAID = [
    ("return", '{"value": %s}' % ("[" * 200 + "]" * 200)),
    ("return", '{"value": NaN}'),
    ("return", '{"value": 1%s}' % ("0" * 2000)),
    ("return", '{"value": "\\u0000"}'),
    ("return", '{"value": "\\ud800"}'),
    ("return", '{"value": {"\\u0000": 1}}'),
    ("return", '{"error": {"type": "\\u0000", "message": "\\ud800 \\u0000", "traceback": ["\\u0000"]}}'),
    ("return", '{"error": "\\u0000"}'),
    ("return", '{"value": 1, "tape": "\\u0000 \\ud800"}'),
    ("return", '{"value": 1, "tape": %s}' % ("[" * 900 + "]" * 900)),
    ("emit", '{"name": "\\u0000", "data": {"\\u0000": "\\ud800"}}'),
    ("emit", '{"name": "x", "data": %s}' % ("[" * 900 + "]" * 900)),
    ("emit", '{"name": "x", "data": NaN}'),
    ("query", '{"sql": "select 1 as n", "params": {"x": "\\u0000"}}'),
    ("query", '{"sql": "select \\u0000", "params": {"\\ud800": NaN}}'),
    ("insert", '{"entity": "\\u0000", "values": {"\\ud800": "\\u0000"}}'),
    ("call", '{"function": "\\u0000", "arguments": {"\\ud800": NaN}}'),
    ("projection", '{"name": "\\ud800\\u0000"}'),
]


def test_whatever_a_box_says_ends_as_a_recorded_outcome(desk: Layer) -> None:
    define(desk, "ticket.hostile", HOSTILE)
    for name, body in SAID:
        before = len(desk.query("select id from ticket"))
        try:
            desk.call("ticket.hostile", what=[name, body])
        except LayerError:
            pass
        [run] = desk.query("select status from execution where function = 'ticket.hostile' order by id desc limit 1")
        assert run["status"] in ("done", "failed", "denied"), (name, body)
        assert len(desk.query("select id from ticket")) == before + (run["status"] == "done"), (name, body)
    assert desk.verify().problems == []
    assert len(desk.query("select kind, detail from step")) > len(SAID)


def test_an_owners_touch_gives_no_rights_to_what_somebody_else_wrote(layer: Layer) -> None:
    """An owner who edits a line of somebody's function, projection or trigger does not lend it an owner's rights."""
    layer.define("vault", {"code": "text!"})
    layer.insert("vault", {"code": "1234"})
    layer.principal("mallory")
    for entity in ("function", "projection", "trigger"):
        layer.grant("mallory", "write", entity)
        layer.grant("mallory", "read", entity)
    layer.grant("mallory", "call", "*")
    layer.grant("mallory", "read", "projection:vault.all")
    steal = {
        "name": "vault.steal",
        "language": "sql",
        "code": "select code from vault",
        "reads": {"vault": {}},
        "rights": "definer",
    }
    layer.insert(
        "function", steal, principal="mallory"
    )  # past the verb, which would not let her name what she can't see
    with pytest.raises(LayerError):
        layer.call("vault.steal", principal="mallory")
    [row] = layer.query("select id from function where name = 'vault.steal'")
    layer.update("function", row["id"], {"description": "looks fine", "timeout": 5.0})  # by an owner
    with pytest.raises(LayerError):
        layer.call("vault.steal", principal="mallory")
    layer.update("function", row["id"], {"reads": {"vault": {}}})
    with pytest.raises(LayerError):
        layer.call("vault.steal", principal="mallory")
    layer.update(
        "function", row["id"], {"code": "select count(*) as n from vault"}
    )  # the parts that are left are hers still
    with pytest.raises(LayerError):
        layer.call("vault.steal", principal="mallory")


def test_what_two_wrote_has_nobodys_rights(layer: Layer) -> None:
    layer.define("item", {"name": "text!"})
    for name in ("ann", "bob"):
        for action, resource in (("write", "function"), ("read", "function"), ("call", "*"), ("read", "item")):
            layer.grant(name, action, resource)
    count = {
        "name": "item.count",
        "language": "sql",
        "code": "select count(*) as n from item",
        "reads": ["item"],
        "rights": "definer",
    }
    layer.call("function.define", count, principal="ann")
    assert layer.call("item.count", principal="bob") == [{"n": 0}]
    [row] = layer.query("select id from function where name = 'item.count'")
    layer.update("function", row["id"], {"code": "select 7 as n from item"}, principal="bob")
    with pytest.raises(Denied, match="written by several"):
        layer.call("item.count", principal="ann")
