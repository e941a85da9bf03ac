"""Why a fact is as it is, what came of it, and who may know: on both engines."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from law.conftest import define

from livinglayer import Layer
from livinglayer.edges.cli.main import main
from livinglayer.errors import Invalid, NotFound
from livinglayer.law import exports
from livinglayer.law.executions import traceparent
from livinglayer.law.tree import Node
from livinglayer.law.why import EFFECTS, Ask
from livinglayer.law.worker import Worker
from livinglayer.substrate.ledger import now
from livinglayer.substrate.past import Past
from livinglayer.substrate.reads import clock
from livinglayer.substrate.schema import MAIN


class Desk:
    """A help desk: anna's edit, a trigger, and a function of the bot's that writes. The function's run is recorded, not run."""

    def __init__(self, layer: Layer, definer: bool = False) -> None:
        self.layer = layer
        layer.define("ticket", {"title": "text!", "status": "text", "priority": "int", "owner": "ref principal"})
        self.anna, self.bot = layer.principal("anna"), layer.principal("bot", "service")
        self.writes = layer.grant("anna", "write", "ticket", where="owner = :me", reason="their own tickets")
        self.sets = layer.grant("bot", "update", "ticket", fields=["status", "priority"])
        self.calls = layer.grant("bot", "call", "function:ticket.triage", reason="the helper")
        rights = "definer" if definer else "caller"
        self.function = layer.call(
            "function.define", name="ticket.triage", code="def triage(id): pass", reads=["ticket"], writes=["ticket"], rights=rights
        )  # fmt: skip
        self.version = last(layer)
        values = {"name": "on_new", "function": "ticket.triage", "on_entity": "ticket", "on_actions": ["insert"]}
        self.trigger = layer.insert("trigger", {**values, "predicate": "priority > 1"})

    def edit(self, **values: Any) -> int:
        """Anna's new ticket."""
        row = {"title": "It burns", "status": "new", "priority": 3, "owner": self.anna, **values}
        return int(
            self.layer.call("row.insert", {"entity": "ticket", "values": row}, principal="anna", reason="a call")
        )

    def run(self, row: int, cause: int | None, status: str = "urgent", **more: Any) -> int:
        """The bot's function on a ticket, as a worker would have recorded it."""
        trace = more.pop("trace", None)
        made = self.layer.ledger.open(
            self.bot, {"entities": {"ticket": {}}}, "function", None, more.pop("parent", None), traceparent(trace)
        )
        made.tier = "namespace"
        made.call = {
            "verb": "function.call", "function": self.function, "version": self.version, "arguments": json.dumps({"id": row}), "branch": MAIN,
            "state": last(self.layer), "trigger": None if cause is None else self.trigger, "cause_tx": cause, "attempt": 1,
            "key": f"trigger/{self.trigger}/{cause}/ticket/{row}" if cause else None, "permissions": json.dumps([self.calls]), **more,
        }  # fmt: skip
        number = self.layer.ledger.intend(made)
        told = [("box", {"id": "bx1", "tier": "namespace", "reused": True}), ("prompt", {"text": "be kind"}), ("emit", {"name": "done", "data": {"id": row}})]  # fmt: skip
        steps = [("ledger_step", (number, n, kind, json.dumps(d), now())) for n, (kind, d) in enumerate(told, start=1)]
        self.layer.ledger.conclude(
            made, "done", {"value": None}, writes=lambda tx: tx.update("ticket", row, {"status": status}), facts=steps
        )
        return number

    def chain(self) -> tuple[int, int, int]:
        """A ticket, the tx of the edit, and the execution that followed from it."""
        row = self.edit()
        cause = last(self.layer)
        return row, cause, self.run(row, cause)


def last(layer: Layer) -> int:
    return int(layer.query("select max(tx) as tx from tx")[0]["tx"])


def kinds(tree: Node) -> list[str]:
    return [node.kind for node in tree.walk()]


def of(tree: Node, kind: str) -> list[Node]:
    return [node for node in tree.walk() if node.kind == kind]


def test_a_fact_written_by_a_function_that_a_trigger_started_after_an_edit_shows_all_of_it(layer: Layer) -> None:
    desk = Desk(layer)
    row, cause, number = desk.chain()
    tree = layer.why(f"ticket/{row}.status")
    assert kinds(tree) == [
        "fact", "tx", "permission", "execution", "permission", "step", "trigger", "tx", "permission", "execution", "origin"
    ]  # fmt: skip
    fact, ran, trigger = tree, of(tree, "execution")[0].data, of(tree, "trigger")[0].data
    assert (fact.data["fields"], fact.data["tx"], fact.data["op"]) == ({"status": "urgent"}, last(layer), "update")
    assert (ran["id"], ran["function"], ran["version"], ran["principal"]) == (number, "ticket.triage", desk.version, "bot")  # fmt: skip
    assert (ran["arguments"], ran["state"], ran["steps"], ran["status"]) == ({"id": row}, cause, 3, "done")
    assert ran["ran_in"] == {"id": "bx1", "tier": "namespace", "reused": True, "snapshot": None}
    assert (trigger["name"], trigger["predicate"], trigger["on_actions"]) == ("on_new", "priority > 1", ["insert"])
    edit = of(tree, "tx")[1].data
    assert (edit["tx"], edit["principal"], edit["reason"], edit["changes"][0]["id"]) == (cause, "anna", "a call", row)
    assert edit["changes"][0]["fields"]["priority"] == 3
    assert [(p.data["id"], p.data["for"]) for p in of(tree, "permission")] == [
        (desk.sets, "write"), (desk.calls, "call"), (desk.writes, "write")
    ]  # fmt: skip
    assert of(tree, "step")[0].data["detail"] == {"text": "be kind"}
    assert of(tree, "origin")[0].data == {"origin": "person", "name": "anna"}
    assert json.loads(json.dumps(tree.json()))["links"][0]["data"]["tx"] == last(layer)


def test_a_row_tells_each_field_by_the_tx_that_set_it(layer: Layer) -> None:
    desk = Desk(layer)
    row, cause, _ = desk.chain()
    tree = layer.why(f"ticket/{row}")
    assert [(link.data["tx"], sorted(link.data["fields"])) for link in tree.links] == [
        (last(layer), ["status"]), (cause, ["owner", "priority", "title"])
    ]  # fmt: skip
    assert tree.links[1].links[0].data["above"]
    lines = tree.lines()
    assert lines[0] == f"ticket/{row} on main" and any(line.endswith("anna, a person") for line in lines)
    before = layer.why(f"ticket/{row}.status", as_of=cause)
    assert (before.data["fields"], before.data["tx"]) == ({"status": "new"}, cause)


def test_permissions_are_told_as_they_were(layer: Layer) -> None:
    desk = Desk(layer)
    row, _, number = desk.chain()
    layer.revoke(desk.calls)
    layer.revoke(desk.sets)
    layer.grant("bot", "update", "ticket")
    layer.delete("trigger", desk.trigger)
    told = {p.data["id"]: p.data for p in of(layer.why(f"ticket/{row}.status"), "permission")}
    assert set(told) == {desk.calls, desk.sets, desk.writes}
    assert (told[desk.sets]["fields"], told[desk.calls]["reason"]) == (["priority", "status"], "the helper")
    assert (told[desk.writes]["predicate"], told[desk.writes]["granted_by"]) == ("owner = :me", "owner")
    assert of(layer.why(number), "trigger")[0].data["function"] == "ticket.triage"


def test_definers_rights_name_whose_permissions_decided(layer: Layer) -> None:
    desk = Desk(layer, definer=True)
    row, _, number = desk.chain()
    ran = layer.why(number)
    assert (ran.data["principal"], ran.data["authority"]) == ("bot", "owner")
    allowed = [
        p.data["subject"] for p in of(layer.why(f"ticket/{row}.status"), "permission") if p.data["for"] == "write"
    ]
    assert allowed == ["owner", "anna"]


def test_nested_calls_lead_to_the_execution_they_were_part_of(layer: Layer) -> None:
    desk = Desk(layer)
    row, _, number = desk.chain()
    inner = desk.run(row, None, "calm", parent=number)
    assert [node.data["id"] for node in of(layer.why(f"ticket/{row}.status"), "execution")][:2] == [inner, number]
    assert of(layer.why(inner, depth=1), "note")[0].data["text"] == f"deeper: layer why --execution {number}"
    assert [node.data["id"] for node in of(layer.why(number, impact=True), "execution")] == [number, inner]


def test_a_merge_leads_to_the_txs_of_its_branch_and_to_who_resolved_a_conflict(layer: Layer) -> None:
    desk = Desk(layer)
    row = desk.edit()
    layer.fork("idea")
    changed = layer.update("ticket", row, {"priority": 5, "title": "It burns!"}, branch="idea", reason="more")
    layer.update("ticket", row, {"priority": 1})
    assert not layer.merge("idea")
    layer.resolve(layer.conflicts()[0]["id"], take="ours", reason="the idea wins")
    resolved = last(layer)
    merged = layer.merge("idea").tx
    tree = layer.why(f"ticket/{row}.priority")
    assert (tree.data["tx"], of(tree, "tx")[0].data["merged_from"]) == (merged, "idea")
    conflict, fact = of(tree, "conflict")[0], of(tree, "fact")[1]
    assert (conflict.data["field"], conflict.data["resolution"], conflict.links[0].data["tx"]) == ("priority", {"take": "ours"}, resolved)  # fmt: skip
    assert (fact.data["branch"], fact.data["tx"], fact.data["fields"]) == ("idea", changed, {"priority": 5})
    assert of(layer.why(f"ticket/{row}.title"), "conflict") == []
    on_branch = layer.why(f"ticket/{row}.priority", branch="idea")
    assert (on_branch.data["tx"], on_branch.data["branch"]) == (changed, "idea")
    assert [n.data["tx"] for n in of(layer.why(f"ticket/{row}.priority", branch="idea", impact=True), "tx")] == [changed, merged]  # fmt: skip


def test_a_branch_of_a_branch_is_followed_down(layer: Layer) -> None:
    layer.define("note", {"text": "text"})
    row = layer.insert("note", {"text": "a"})
    layer.fork("one")
    layer.fork("two", source="one")
    first = layer.update("note", row, {"text": "b"}, branch="two")
    up = layer.merge("two").tx
    down = layer.merge("one").tx
    assert [n.data["tx"] for n in of(layer.why(f"note/{row}.text"), "tx")] == [down, up, first]
    effects = layer.why(f"tx/{first}", impact=True, branch="two")
    assert [n.data["tx"] for n in of(effects, "tx")] == [first, up, down]


def test_origins_are_a_person_a_schedule_an_import_and_the_beginning(layer: Layer, tmp_path: Path) -> None:
    desk = Desk(layer)
    layer.update("trigger", desk.trigger, {"on_entity": None, "on_actions": None, "predicate": None, "schedule": "*/5 * * * *"})  # fmt: skip
    row = desk.edit()
    number = desk.run(row, None, trigger=desk.trigger, due=now())
    assert of(layer.why(number), "origin")[0].data["origin"] == "schedule"
    (tmp_path / "tickets.jsonl").write_text('{"title": "from a file"}\n')
    layer.import_("ticket", tmp_path / "tickets.jsonl", reason="the old desk")
    loaded = layer.query("select max(id) as id from ticket")[0]["id"]
    assert {n.data["name"] for n in of(layer.why(f"ticket/{loaded}"), "origin")} == {"owner", "tickets.jsonl"}
    assert of(layer.why("permission/1502"), "origin")[0].data["origin"] == "genesis"
    assert of(layer.why(number, principal="owner"), "execution")[0].data["trigger"] == "on_new"


def test_a_deleted_row_tells_who_deleted_it(layer: Layer) -> None:
    desk = Desk(layer)
    row = desk.edit()
    gone = layer.delete("ticket", row, principal="anna", reason="settled")
    tree = layer.why(f"ticket/{row}")
    assert (tree.data["deleted"], tree.links[0].data["op"], tree.links[0].data["tx"]) == (True, "delete", gone)
    assert [p.data["id"] for p in of(tree, "permission")] == [desk.writes]
    layer.grant("anna", "read", "ticket", where="owner = :me")
    assert layer.why(f"ticket/{row}", principal="anna").links[0].data["tx"] == gone
    layer.principal("ben")
    layer.grant("ben", "read", "ticket", where="owner = :me")
    with pytest.raises(NotFound):
        layer.why(f"ticket/{row}", principal="ben")


def test_impact_tells_what_a_change_started_and_leaves_out_what_another_row_did(layer: Layer) -> None:
    desk = Desk(layer)
    row, cause, number = desk.chain()
    with layer.transaction() as tx:
        a, b = tx.insert("ticket", [{"title": "a"}, {"title": "b"}])
    both = last(layer)
    ran = [desk.run(each, both) for each in (a, b)]
    assert [n.data["id"] for n in of(layer.why(f"ticket/{a}", impact=True), "execution")] == [ran[0]]
    assert [n.data["id"] for n in of(layer.why(f"tx/{both}", impact=True), "execution")] == ran
    tree = layer.why(f"ticket/{row}", impact=True)
    assert [n.data["tx"] for n in of(tree, "tx")] == [cause, layer.why(f"ticket/{row}.status").data["tx"]]
    assert of(tree, "execution")[0].data["id"] == number
    assert of(tree, "tx")[1].data["changes"] == [{"entity": "ticket", "id": row, "op": "update", "fields": {"status": "urgent"}}]  # fmt: skip


def test_impact_says_where_it_was_cut(layer: Layer) -> None:
    desk = Desk(layer)
    row = desk.edit()
    cause = last(layer)
    for n in range(EFFECTS + 1):
        desk.run(row, cause, f"s{n}")
    tree = layer.why(f"tx/{cause}", impact=True)
    assert len(of(tree, "execution")) == EFFECTS
    assert [n.data["text"] for n in of(tree, "note")] == [f"only the first {EFFECTS} executions are told"]
    told = [n.data["text"] for n in of(layer.why(f"ticket/{row}", impact=True), "note")]
    assert told == [f"earlier changes are left out: these are the last {EFFECTS}"]


def test_what_may_not_be_read_is_not_there(layer: Layer) -> None:
    desk = Desk(layer)
    row, cause, number = desk.chain()
    layer.principal("ben")
    layer.grant("ben", "read", "ticket", fields=["status"])
    for subject in (number, f"tx/{cause}", f"ticket/{row}.title", f"ticket/{row + 1000}", f"permission/{desk.calls}"):
        with pytest.raises(NotFound):
            layer.why(subject, principal="ben")
        with pytest.raises(NotFound):
            layer.why(subject, principal="ben", impact=True)
    seen = layer.why(f"ticket/{row}.status", principal="ben")
    assert seen.data["fields"] == {"status": "urgent"} and kinds(seen) == ["fact", "tx", "note"]
    assert sorted(seen.links[0].data) == ["at", "tx"]
    assert list(layer.why(f"ticket/{row}", principal="ben").links[0].data["fields"]) == ["status"]
    layer.grant("ben", "read", "tx")
    assert kinds(layer.why(f"ticket/{row}.status", principal="ben")) == ["fact", "tx", "note"]
    layer.grant(
        "ben", "read", "execution", fields=["id", "principal", "function", "trigger"], where="principal = 'bot'"
    )
    seen = layer.why(f"ticket/{row}.status", principal="ben")
    ran = of(seen, "execution")[0].data
    assert {"id", "principal", "function"} <= set(ran) and not {"arguments", "result", "steps", "tier"} & set(ran)
    edit = of(seen, "tx")[1]
    assert edit.data["changes"] == [{"entity": "ticket", "id": row, "op": "insert", "fields": {"status": "new"}}]
    assert kinds(edit) == ["tx", "note"] and of(seen, "permission") == []
    layer.grant("ben", "read", "permission", where="action = 'call'")
    assert [p.data["id"] for p in of(layer.why(number, principal="ben"), "permission")] == []
    layer.grant("ben", "read", "execution", fields=["permissions"], where="principal = 'bot'")
    assert [p.data["id"] for p in of(layer.why(number, principal="ben"), "permission")] == [desk.calls]


def test_a_branch_and_a_slice_that_may_not_be_read_are_not_there(layer: Layer) -> None:
    desk = Desk(layer)
    row, other = desk.edit(), desk.edit(priority=1)
    layer.fork("part", slice={"ticket": "priority > 2"})
    layer.update("ticket", row, {"status": "seen"}, branch="part")
    layer.grant("anna", "read", "ticket", branch="main")
    with pytest.raises(NotFound, match="there is no branch 'part'"):
        layer.why(f"ticket/{row}", branch="part", principal="anna")
    assert layer.why(f"ticket/{row}.status", branch="part").data["fields"] == {"status": "seen"}
    with pytest.raises(NotFound):
        layer.why(f"ticket/{other}", branch="part")


@pytest.mark.parametrize(
    "subject", ["", "ticket", "ticket/x", "ticket/7.", "ticket/7/8", "7; drop", None, 1.5, True, "step/1"]
)
def test_what_is_no_subject_is_refused(layer: Layer, subject: Any) -> None:
    with pytest.raises((Invalid, NotFound)):
        layer.why(subject)
    with pytest.raises((Invalid, NotFound)):
        layer.why(subject, impact=True)


def test_secrets_and_tokens_are_not_told(layer: Layer) -> None:
    layer.principal("cara")
    layer.token("cara")
    number = layer.query("select id from principal where name = 'cara'")[0]["id"]
    assert layer.why(f"principal/{number}.token").data["fields"] == {"token": "…"}


def test_a_field_is_found_through_a_long_history_and_says_what_was_pruned(layer: Layer) -> None:
    layer.define("counter", {"name": "text", "value": "int"})
    row = layer.insert("counter", {"name": "a", "value": 0})
    made = last(layer)
    for value in range(1, 80):
        layer.update("counter", row, {"value": value})
    tree = layer.why(f"counter/{row}.name")
    assert (tree.data["tx"], tree.data["op"]) == (made, "insert")
    layer.prune(last(layer))
    tree = layer.why(f"counter/{row}.name")
    assert tree.data["tx"] == last(layer) - 1 and "pruned" in of(tree, "note")[0].data["text"]


def test_versions_are_those_of_the_history_view(layer: Layer) -> None:
    layer.define("note", {"text": "text"})
    pick = random.Random(7)
    rows = layer.insert("note", [{"text": str(n)} for n in range(4)])
    layer.fork("side")
    layer.fork("deep", source="side")
    for n in range(60):
        name, row = pick.choice(["main", "side", "deep"]), pick.choice(rows)
        try:
            if pick.random() < 0.1:
                layer.delete("note", row, branch=name)
            else:
                layer.update("note", row, {"text": f"n{n}"}, branch=name)
        except NotFound:
            continue
    with layer.engine.reading() as session:
        past = Past(layer.catalog, session, clock(layer.engine, session)[1])
        entity = layer.schema().get("note")
        for name in ("main", "side", "deep"):
            for moment in (None, last(layer) - 20):
                chain = layer.catalog.chain(session, layer.catalog.branch(session, name), moment)
                for row in rows:
                    found = [version.tx for version in past.versions(entity, row, chain)]
                    told = layer.query(f"select distinct tx from note__history where id = {row} order by tx desc", branch=name, as_of=moment)  # fmt: skip
                    assert found == [each["tx"] for each in told], (name, moment, row)


class Noted:
    """A session that keeps its statements."""

    def __init__(self, session: Any) -> None:
        self.session, self.statements = session, dict[str, Any]()

    def one(self, sql: str, params: Any = ()) -> Any:
        self.statements[sql] = params
        return self.session.one(sql, params)

    def all(self, sql: str, params: Any = ()) -> Any:
        self.statements[sql] = params
        return self.session.all(sql, params)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_every_lookup_goes_by_a_key_or_an_index(layer: Layer) -> None:
    desk = Desk(layer)
    row, cause, number = desk.chain()
    layer.fork("idea")
    layer.update("ticket", row, {"priority": 5}, branch="idea")
    layer.merge("idea")
    scanned = []
    with layer.engine.reading() as session:
        noted = Noted(session)
        for name, id, field in (("ticket", row, None), ("tx", cause, None), ("execution", number, None)):
            for direction in ("back", "forward"):
                getattr(Ask(layer, noted, layer.my_id, "main", None), direction)(name, id, field, 32)
        for sql, params in noted.statements.items():
            plan = [line[-1] for line in session.all(f"explain query plan {sql}", params)]
            scanned += [(line, sql) for line in plan if line.startswith("SCAN") and "ledger_clock" not in sql]
    allowed = ("SCAN CONSTANT ROW", "SCAN v", "SCAN pragma_table_info")  # a recursion's own rows; no rows of ours
    assert [each for each in scanned if not each[0].startswith(allowed)] == []


def test_otlp_has_a_span_for_each_execution_with_its_parent_and_steps(layer: Layer) -> None:
    desk = Desk(layer)
    row, _, number = desk.chain()
    trace = layer.query(f"select trace from execution where id = {number}")[0]["trace"]
    inner = desk.run(row, None, "calm", parent=number, trace=trace)
    document = exports.otel(layer, number)
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert document == exports.otel(layer, trace[3:35]) == exports.otel(layer, inner)
    assert [span["name"] for span in spans] == ["ticket.triage", "ticket.triage"]
    assert (spans[0]["traceId"], spans[0]["spanId"]) == (trace[3:35], trace[36:52])
    assert spans[1]["parentSpanId"] == spans[0]["spanId"] and spans[1]["traceId"] == spans[0]["traceId"]
    assert len(spans[0]["links"]) == 1  # the edit, which has a trace of its own
    assert [event["name"] for event in spans[0]["events"]] == ["box", "prompt", "emit"]
    assert int(spans[0]["endTimeUnixNano"]) > int(spans[0]["startTimeUnixNano"]) > 10**18
    told = {each["key"]: each["value"] for each in spans[0]["attributes"]}
    assert told["livinglayer.id"] == {"intValue": str(number)} and told["livinglayer.principal"] == {"stringValue": "bot"}  # fmt: skip
    with pytest.raises(NotFound):
        exports.otel(layer, "0" * 32)
    with pytest.raises(Invalid):
        exports.otel(layer, "a trace")
    with pytest.raises(NotFound):
        exports.otel(layer, number, principal=desk.anna)


def test_cloudevents_and_prov_tell_the_same(layer: Layer) -> None:
    desk = Desk(layer)
    row, cause, number = desk.chain()
    emitted, ended = exports.cloudevents(layer, number)
    assert (emitted["type"], emitted["data"]) == ("livinglayer.event.done", {"id": row})
    assert (ended["type"], ended["subject"]) == ("livinglayer.execution.done", f"execution/{number}")
    assert ended["specversion"] == "1.0" and ended["traceparent"].startswith("00-")
    document = exports.prov(layer, f"ticket/{row}.status")
    edit = layer.query(f"select execution from tx where tx = {cause}")[0]["execution"]
    assert set(document["activity"]) == {f"ll:execution/{number}", f"ll:execution/{edit}"}
    assert set(document["agent"]) == {"ll:principal/bot", "ll:principal/anna"}
    made = {(r["prov:entity"], r["prov:activity"]) for r in document["wasGeneratedBy"].values()}
    assert made == {(f"ll:ticket/{row}@{last(layer)}", f"ll:execution/{number}"), (f"ll:ticket/{row}@{cause}", f"ll:execution/{edit}")}  # fmt: skip
    assert list(document["wasInformedBy"].values()) == [{"prov:informed": f"ll:execution/{number}", "prov:informant": f"ll:execution/{edit}"}]  # fmt: skip


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OpenTelemetry collector that keeps what it gets."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(
                (self.path, json.loads(self.rfile.read(int(self.headers["content-length"]))), self.headers["x-key"])
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_command_line(
    layer: Layer, location: str, tmp_path: Path, collector: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(layer)
    row, _, number = desk.chain()
    monkeypatch.setenv("LAYER_DIR", location)
    assert main(["why", f"ticket/{row}.status"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == layer.why(f"ticket/{row}.status").lines() and shown[0] == f'ticket/{row}.status = "urgent"'
    assert main(["why", f"ticket/{row}", "--impact", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == layer.why(f"ticket/{row}", impact=True).json()
    assert main(["why", "--execution", str(number)]) == 0
    assert capsys.readouterr().out.startswith(f"execution {number} · ticket.triage(id={row}) · bot · done")
    assert main(["why"]) == 2 and main(["why", "ticket/1"]) == 4
    file = tmp_path / "spans.json"
    assert main(["trace", "export", str(number), "--otlp", str(file)]) == 0
    assert json.loads(file.read_text()) == exports.otel(layer, number)
    url, got = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b")
    assert main(["trace", "export", str(number), "--otlp", url]) == 0
    assert got == [("/v1/traces", exports.otel(layer, number), "a b")]
    assert main(["trace", "export", str(number), "--otlp", "http://127.0.0.1:1"]) == 8
    capsys.readouterr()
    assert main(["trace", "export", str(number), "--cloudevents", "-"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == exports.cloudevents(layer, number)
    assert main(["trace", "export", f"ticket/{row}", "--prov", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["agent"]
    assert main(["trace", "export", str(number)]) == 2


def test_why_of_a_real_function_that_a_worker_ran_after_an_edit(desk: Layer) -> None:
    desk.principal("anna")
    writes = desk.grant("anna", "insert", "ticket")
    define(desk, "ticket.greet", "import layer\ndef greet(id):\n    layer.update('ticket', id, note='hello')\n", signature={"arguments": {"id": "int!"}})  # fmt: skip
    desk.call("trigger.define", name="on_new", function="ticket.greet", on_entity="ticket", on_actions=["insert"])
    row = desk.call("row.insert", {"entity": "ticket", "values": {"title": "a"}}, principal="anna")
    Worker(desk, 1).run(once=True)
    tree = desk.why(f"ticket/{row}.note")
    assert tree.data["fields"] == {"note": "hello"}
    ran = of(tree, "execution")
    assert [node.data.get("function") or node.data["verb"] for node in ran] == ["ticket.greet", "row.insert"]
    assert ran[0].data["ran_in"]["tier"] == "namespace" and ran[0].data["steps"] > 2
    assert of(tree, "trigger")[0].data["name"] == "on_new"
    assert [p.data["id"] for p in of(tree, "permission")] == [1502, 1502, writes]
    assert of(tree, "origin")[0].data == {"origin": "person", "name": "anna"}
    assert of(desk.why(f"ticket/{row}", impact=True), "execution")[0].data["id"] == ran[0].data["id"]
