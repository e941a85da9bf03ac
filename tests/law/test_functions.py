"""Functions run in boxes, as their rows say; whatever they do ends as a recorded outcome, whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from law.conftest import define

import livinglayer
from livinglayer import Layer
from livinglayer.errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound, TimedOut
from livinglayer.law.functions import Raised


def last(layer: Layer, columns: str = "*") -> dict[str, Any]:
    return layer.query(f"select {columns} from execution order by id desc limit 1")[0]


def steps(layer: Layer, execution: int) -> list[dict[str, Any]]:
    return layer.query("select kind, detail from step where execution = :e order by n", {"e": execution})


def tickets(layer: Layer) -> list[dict[str, Any]]:
    return layer.query("select id, title, priority from ticket order by id")


def test_a_function_reads_and_writes_and_its_execution_says_how(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "broken", "priority": 4})
    assert desk.call("ticket.bump", id=id) == 5
    assert tickets(desk) == [{"id": id, "title": "broken", "priority": 5}]
    made = last(desk)
    version = desk.query("select max(tx) as tx from change where entity = 'function'")[0]["tx"]
    assert (made["status"], made["kind"], made["function"], made["version"]) == (
        "done",
        "function",
        "ticket.bump",
        version,
    )
    assert made["arguments"] == {"id": id} and made["result"] == {"value": 5} and made["trace"].startswith("00-")
    kinds = [step["kind"] for step in steps(desk, made["id"])]
    assert kinds[0] == "box" and {"query", "mutation", "return"} <= set(kinds)
    history = desk.query("select execution from ticket__history where id = :id order by tx desc limit 1", {"id": id})
    assert history[0]["execution"] == made["id"]


def test_what_a_function_wrote_is_one_tx_with_its_outcome(desk: Layer) -> None:
    define(
        desk,
        "ticket.many",
        "import layer\ndef many():\n    return [layer.insert('ticket', title=str(n)) for n in range(5)]",
    )
    ids = desk.call("ticket.many")
    written = desk.query("select distinct tx from change where entity = 'ticket'")
    assert len(written) == 1 and [row["id"] for row in tickets(desk)] == ids
    assert desk.verify().ok


def test_a_function_sees_what_it_has_written(desk: Layer) -> None:
    code = """
import layer
def see():
    id = layer.insert("ticket", title="mine")
    layer.update("ticket", id, priority=7)
    return layer.query("select title, priority from ticket")
"""
    define(desk, "ticket.see", code)
    assert desk.call("ticket.see") == [{"title": "mine", "priority": 7}]


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("import layer\ndef main():\n    layer.insert('ticket', title='half')\n    raise ValueError('no')", Raised, "ValueError: no"),
        ("import layer, os\ndef main():\n    layer.insert('ticket', title='half')\n    os._exit(3)", Raised, "exit code 3"),
        ("import layer\ndef main():\n    layer.insert('ticket', title='half')\n    while True: pass", TimedOut, "ran longer"),
        ("import layer\ndef main():\n    layer.insert('ticket', title='half')\n    x = 'x' * (1 << 30)", (LimitExceeded, Raised), ""),
        ("import layer\ndef main():\n    layer.insert('ticket', title='half')\n    return object()", Raised, "JSON"),
        ("import layer\ndef main():\n    layer.insert('customer', name='other')", Raised, "scope"),
        ("import layer\ndef main():\n    layer.query('select * from customer')", Raised, "customer"),
        ("import layer\ndef main():\n    layer.insert('ticket', title='half')\n    layer.update('ticket', 1, title='x')", Raised, "ticket/1"),
        ("import layer\ndef main():\n    layer.call('ticket.other')", Raised, "may not call"),
        ("import layer\ndef main():\n    layer.query('delete from ticket')", Raised, ""),
        ("import layer, os\ndef main():\n    layer.insert('ticket', title='half')\n    while True: os.fork()", (LayerError), ""),
        ("import layer\ndef main():\n    layer.insert('ticket', title='half')\n    open('big', 'wb').write(b'x' * (300 << 20))", (LayerError), ""),
    ],
    ids=["raises", "exits", "loops", "memory", "no-json", "scope", "reads", "not-found", "call", "sql", "forks", "disk"],
)  # fmt: skip
def test_a_function_that_fails_leaves_nothing_and_says_why(desk: Layer, code: str, kind: Any, message: str) -> None:
    define(desk, "ticket.bad", code, timeout=3.0)
    with pytest.raises(kind) as caught:
        desk.call("ticket.bad")
    assert message in str(caught.value)
    made = last(desk)
    assert made["function"] == "ticket.bad" and made["status"] in ("failed", "denied")
    assert made["result"]["error"]["message"] == caught.value.message
    assert tickets(desk) == []
    assert (
        desk.call("function.define", name="ticket.good", code="def main(): return 1") and desk.call("ticket.good") == 1
    )


def test_a_gigabyte_of_output_is_cut_and_said_so(desk: Layer) -> None:
    define(
        desk,
        "ticket.loud",
        "import sys\ndef main():\n    for _ in range(1024): sys.stdout.write('x' * (1 << 20))\n    return 1",
        timeout=60,
    )
    assert desk.call("ticket.loud") == 1
    output = [s["detail"] for s in steps(desk, last(desk)["id"]) if s["kind"] == "output"]
    assert output[0]["truncated"] and output[0]["bytes"] <= 1 << 20


def test_a_result_of_the_wrong_type_is_refused_and_nothing_is_written(desk: Layer) -> None:
    define(
        desk,
        "ticket.typed",
        "import layer\ndef main():\n    layer.insert('ticket', title='x')\n    return 'text'",
        signature={"result": "int"},
    )
    with pytest.raises(Invalid, match="wrong type"):
        desk.call("ticket.typed")
    assert tickets(desk) == [] and last(desk)["status"] == "failed"


@pytest.mark.parametrize("given", [{}, {"id": "7"}, {"id": 7, "more": 1}, {"id": None}, {"id": 2**70}, {"id": True}])
def test_wrong_arguments_are_refused_and_recorded(desk: Layer, given: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        desk.call("ticket.bump", given)
    assert last(desk, "status, verb")["status"] == "failed"


def test_a_poisoned_argument_is_only_text(desk: Layer) -> None:
    define(
        desk,
        "ticket.say",
        "import layer\ndef main(text):\n    return layer.insert('ticket', title=text)",
        signature={"arguments": {"text": "text!"}},
    )
    nasty = "'); drop table ticket; -- \"\"\" {\"code\": 1}\n__import__('os').system('true') \u202e 🙃"
    desk.call("ticket.say", text=nasty)
    assert tickets(desk)[0]["title"] == nasty


def test_lost_updates_are_retried(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "counter", "priority": 0})
    failures: list[BaseException] = []

    def bump() -> None:
        for _ in range(5):
            try:
                desk.call("ticket.bump", id=id)
            except Conflict:
                failures.append(Conflict("x"))

    threads = [threading.Thread(target=bump) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tickets(desk)[0]["priority"] == 20 - len(failures)


def test_an_idempotency_key_makes_effects_happen_once(desk: Layer) -> None:
    define(desk, "ticket.add", "import layer\ndef main(title):\n    return layer.insert('ticket', title=title)")
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(desk.call("ticket.add", title="once", key="k1")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tickets(desk)) == 1 and set(answers) == {tickets(desk)[0]["id"]} and len(answers) == 6
    with pytest.raises(Conflict, match="another request"):
        desk.call("ticket.add", title="twice", key="k1")


def test_who_may_call_is_decided_by_permissions(desk: Layer) -> None:
    desk.principal("ann")
    id = desk.insert("ticket", {"title": "t"})
    with pytest.raises(NotFound, match="there is no function"):  # she may not even know
        desk.call("ticket.bump", id=id, principal="ann")
    reading = desk.grant("ann", "read", "function")
    with pytest.raises(Denied, match="may not call"):
        desk.call("ticket.bump", id=id, principal="ann")
    desk.revoke(reading)
    denied = last(desk)
    assert denied["status"] == "denied" and denied["principal"] == "ann"
    grant = desk.grant("ann", "call", "function:ticket.bump")
    with pytest.raises(LayerError):  # with the caller's rights it sees no ticket
        desk.call("ticket.bump", id=id, principal="ann")
    define(
        desk, "ticket.sudo", "import layer\ndef main(id):\n    layer.update('ticket', id, priority=9)", rights="definer"
    )
    desk.grant("ann", "call", "function:ticket.sudo")
    desk.call("ticket.sudo", id=id, principal="ann")
    assert tickets(desk)[0]["priority"] == 9
    made = last(desk)
    assert made["principal"] == "ann" and made["permissions"] != [grant]
    with pytest.raises(NotFound):
        desk.query("select * from ticket", principal="ann")


def test_a_function_calls_another_that_it_declares(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "t", "priority": 1})
    define(
        desk,
        "ticket.twice",
        "import layer\ndef main(id):\n    layer.call('ticket.bump', id=id)\n    return layer.call('ticket.bump', id=id)",
        calls=["ticket.bump"],
    )
    assert desk.call("ticket.twice", id=id) == 3
    (outer,) = desk.query("select id from execution where function = 'ticket.twice'")
    inner = desk.query("select parent, trace from execution where function = 'ticket.bump'")
    assert [row["parent"] for row in inner] == [outer["id"]] * 2


def test_javascript_sql_and_executables(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "js", "priority": 1})
    js = "const layer = require('layer');\nexports.main = async ({id}) => { const [row] = await layer.query('select priority from ticket where id = :id', {id}); await layer.update('ticket', id, {priority: row.priority + 1}); return row.priority + 1; };"
    define(desk, "ticket.js", js, language="javascript")
    assert desk.call("ticket.js", id=id) == 2
    define(
        desk,
        "ticket.count",
        "select count(*) as n from ticket where priority >= :least",
        language="sql",
        signature={"arguments": {"least": "int!"}},
    )
    assert desk.call("ticket.count", least=2) == [{"n": 1}]
    define(
        desk,
        "ticket.sh",
        "#!/bin/sh\nlayer update ticket $(python3 -c 'import json,sys; print(json.load(sys.stdin)[\"id\"])') priority=9 >&2\necho '{\"done\": true}'",
        language="executable",
    )
    assert desk.call("ticket.sh", id=id) == {"done": True}
    assert tickets(desk)[0]["priority"] == 9


def test_on_a_branch_a_function_reads_and_writes_there(desk: Layer) -> None:
    id = desk.insert("ticket", {"title": "t", "priority": 1})
    desk.fork("idea")
    assert desk.call("ticket.bump", id=id, branch="idea") == 2
    assert tickets(desk)[0]["priority"] == 1
    assert desk.query("select priority from ticket", branch="idea") == [{"priority": 2}]
    desk.merge("idea")
    assert tickets(desk)[0]["priority"] == 2


def test_names_of_the_layers_own_are_not_for_functions(desk: Layer) -> None:
    for name in ("row.insert", "row.other", "noverb", "a.b.c", "1.2", "x; drop", ""):
        with pytest.raises(Invalid):
            desk.call("function.define", name=name, code="def main(): pass")
    with pytest.raises(Invalid, match="invalid syntax"):
        desk.call("function.define", name="ticket.syntax", code="def (")
    with pytest.raises(NotFound):
        desk.call("ticket.nowhere")


def test_what_a_function_printed_and_kept_is_in_a_backup(desk: Layer, tmp_path: Path) -> None:
    code = "import layer\ndef main():\n    print('x' * 10000)\n    open('a', 'w').write('kept')\n    return layer.artifact('a')"
    define(desk, "ticket.print", code)
    desk.call("ticket.print")
    assert desk.verify().ok
    desk.backup(tmp_path / "copy")
    with livinglayer.open(tmp_path / "copy") as copy:
        for step in steps(copy, last(copy)["id"]):
            if step["kind"] in ("output", "artifact"):
                assert copy.blob(step["detail"]["content"]) == (
                    b"x" * 10000 + b"\n" if step["kind"] == "output" else b"kept"
                )


def test_half_a_character_is_refused_and_hurts_nobody(desk: Layer) -> None:
    define(
        desk,
        "ticket.half",
        "import layer\ndef main():\n    layer.emit('x', text='\\ud800')\n    layer.insert('ticket', title='\\ud800')",
    )
    with pytest.raises(Raised, match="surrogate"):
        desk.call("ticket.half")
    assert last(desk)["status"] == "failed" and desk.verify().ok


def test_an_argument_that_is_not_given_has_the_codes_own_default(desk: Layer) -> None:
    signature = {"arguments": {"a": "int!", "b": "int", "c": {"type": "int", "default": 3}}}
    define(desk, "ticket.sum", "def main(a, b=20, c=300):\n    return [a, b, c]", signature=signature)
    assert desk.call("ticket.sum", a=1) == [1, 20, 3]
    assert desk.call("ticket.sum", a=1, b=None, c=4) == [1, None, 4]
