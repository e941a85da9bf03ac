"""The client: one script, run against an embedded layer and against a server, gives the same."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from edges.serving import Server

import livinglayer
from livinglayer.errors import Invalid, LayerError, NotFound, Unauthenticated, Unavailable

AT = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)


def told(act: Callable[[], Any]) -> Any:
    """What something gives, or the error it raises."""
    try:
        return act()
    except LayerError as error:
        return type(error).__name__, error.code, re.sub(r"\d+", "N", error.message), error.hint


def script(layer: Any, name: str) -> list[Any]:
    """Everything a handle does, without the ids and numbers that differ from layer to layer."""
    said: list[Any] = []
    layer.define(name, {"name": "text!", "qty": "int", "price": "decimal", "day": "date", "at": "datetime", "doc": "file", "more": "json",
                        "sku": {"type": "text", "unique": True}}, description="things")  # fmt: skip
    bolt = layer.insert(
        name,
        {"name": "bolt", "qty": 3, "price": Decimal("1.50"), "day": date(2026, 1, 31), "at": AT, "doc": b"\0content", "more": {"a": [1, {"$decimal": "x"}]}},
        reason="stock", cause="order 17",
    )  # fmt: skip
    nut, pin = layer.insert(name, [{"name": "nut", "qty": 2}, {"name": "pin", "qty": 1}])
    columns = "name, qty, price, day, at, more"
    said.append(layer.query(f"select {columns} from {name} order by name"))
    said.append(layer.query(f"select name from {name} where price = :p and at = :at", {"p": Decimal("1.50"), "at": AT}))
    said.append(layer.query(f"select sum(qty) as n, max(at) as last from {name}"))
    (row,) = layer.query(f"select doc from {name} where id = :id", {"id": bolt})
    said.append((row, layer.blob(row["doc"])))
    version = layer.update(name, bolt, {"qty": 4})
    said.append(told(lambda: layer.update(name, bolt, {"qty": 5}, expect=version + 1000)))
    layer.update(name, bolt, {"qty": 5}, expect=version)
    said.append(layer.query(f"select qty from {name} where id = :id", {"id": bolt}, as_of=version))
    one = layer.insert(name, {"name": "gear"}, key="k1")
    said.append(one == layer.insert(name, {"name": "gear"}, key="k1"))
    said.append(told(lambda: layer.insert(name, {"name": "other"}, key="k1"))[:2])
    said.append(
        layer.upsert(name, {"sku": "a", "name": "disc"}, on=["sku"])
        == layer.upsert(name, {"sku": "a", "qty": 9}, on=["sku"])
    )
    layer.delete(name, pin)
    with layer.transaction(reason="both") as tx:
        tx.update(name, nut, {"qty": 20})
        tx.insert(name, {"name": "shelf", "qty": 1})
    said.append(layer.query(f"select name, qty, sku from {name} order by name"))
    said.append(layer.query(f"select op, qty from {name}__history where id = :id order by tx", {"id": bolt}))
    with pytest.raises(ZeroDivisionError), layer.transaction() as tx:
        tx.delete(name, nut)
        raise ZeroDivisionError
    for wrong in (
        lambda: layer.insert(name, {"nope": 1}),
        lambda: layer.insert(name, {"qty": "many"}),
        lambda: layer.insert(name, 3),
        lambda: layer.update(name, 1 << 40, {"qty": 1}),
        lambda: layer.query(f"select * from {name}", limit=1),
        lambda: layer.query("select nothing from nowhere"),
        lambda: layer.query(f"delete from {name}"),
        lambda: layer.query("select :n as n", 5),
        lambda: layer.projection("nowhere"),
        lambda: layer.call("no.function"),
        lambda: layer.call("row.insert", entity=name),
        lambda: layer.blob("0" * 64),
        lambda: layer.why(f"{name}/999999999"),
        lambda: layer.fork("idea", "nowhere"),
        lambda: layer.insert(name, {"name": "x"}, branch="nowhere"),
        lambda: layer.grant("ann", "fly", name),
        lambda: layer.query("select 1 as n", principal="nobody"),
    ):
        said.append(told(wrong))
    layer.alter(name, add={"color": "text"}, rename={"qty": "count"})
    said.append([(f.name, f.type, f.required) for e in layer.schema().entities if e.name == name for f in e.fields])
    # branches
    layer.fork(f"{name}_idea", reason="try")
    layer.update(name, nut, {"count": 7}, branch=f"{name}_idea")
    layer.update(name, nut, {"count": 8})
    said.append([{k: change[k] for k in ("entity", "op") if k in change} for change in layer.diff(f"{name}_idea")])
    merged = layer.merge(f"{name}_idea", preview=True)
    said.append((type(merged), bool(merged), len(merged.changes), len(merged.conflicts)))
    said.append(bool(layer.merge(f"{name}_idea")))
    (conflict,) = layer.conflicts(f"{name}_idea")
    said.append((conflict["ours"], conflict["theirs"]))
    layer.resolve(conflict, take="ours")
    said.append(bool(layer.merge(f"{name}_idea")))
    said.append(layer.query(f"select count from {name} where id = :id", {"id": nut}))
    layer.discard(f"{name}_idea")
    # authority
    layer.principal("ann", "human", {"team": "blue"}, ["clerk"])
    grant = layer.grant("clerk", "read", name, where="count > 5", fields=["name", "count"], reason="clerks")
    said.append(
        [
            list(row)[1:] + list(row.values())[1:]
            for row in layer.query(f"select * from {name} order by name", principal="ann")
        ]
    )
    decision = layer.can("ann", "read", name)
    said.append((type(decision), bool(decision), decision.reason, len(decision.rows)))
    said.append(told(lambda: layer.insert(name, {"name": "x"}, principal="ann"))[:2])
    layer.revoke(grant)
    said.append(told(lambda: layer.query(f"select * from {name}", principal="ann")))
    # projections, causes, trust
    layer.call(
        "projection.define", name=f"{name}_many", statement=f"select name from {name} where count > :n order by name", parameters={"n": "int!"}
    )  # fmt: skip
    said.append(layer.projection(f"{name}_many", n=4))
    said.append(told(lambda: layer.projection(f"{name}_many", n="x")))
    tree = layer.why(f"{name}/{bolt}.count")
    said.append((type(tree), tree.kind, tree.data["entity"], tree.data["fields"] if "fields" in tree.data else None))
    said.append("stock" in [node.data.get("reason") for node in layer.why(f"{name}/{bolt}").walk()])
    report = layer.verify()
    said.append((type(report), bool(report), report.problems))
    said.append(layer.me)
    layer.drop(name)
    said.append(told(lambda: layer.query(f"select * from {name}")))
    return said


@pytest.mark.parametrize("engine", ["sqlite", pytest.param("postgres", marks=pytest.mark.torture)], indirect=True)
def test_one_script_gives_the_same_embedded_and_remote(
    serve: Callable[..., Server], make_location: Callable[[], str]
) -> None:
    with livinglayer.open(make_location(), create=True) as embedded:
        expected = script(embedded, "thing")
    server = serve(make_location(), "--no-worker")
    with livinglayer.connect(server.url, server.token("owner")) as remote:
        found = script(remote, "thing")
    for one, other in zip(expected, found, strict=True):
        assert other == one


def test_a_client_is_nobody_without_a_token_and_says_where_it_could_not_connect(server: Server) -> None:
    with pytest.raises(Unauthenticated):
        livinglayer.connect(server.url, "ll_" + "0" * 40)
    with pytest.raises(Unavailable, match="can't be reached"):
        livinglayer.connect("http://127.0.0.1:9", "ll_x")
    with pytest.raises(Invalid):
        livinglayer.connect("ftp://somewhere", "ll_x")


def test_threads_share_a_client(server: Server) -> None:
    server.layer.define("tally", {"n": "int"})
    with livinglayer.connect(server.url, server.token("owner")) as remote:
        threads = [
            threading.Thread(target=lambda: [remote.insert("tally", {"n": n}) for n in range(20)]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert remote.query("select count(*) as n from tally") == [{"n": 160}]


def test_a_client_and_its_streams_survive_a_restart_of_the_server(server: Server) -> None:
    with livinglayer.connect(server.url, server.token("owner")) as remote:
        server.layer.define("beat", {"n": "int"})
        events = remote.live("select n from beat order by n")
        assert next(events).data["rows"] == []
        server.restart()
        assert remote.query("select 2 as n") == [{"n": 2}]
        server.layer.insert("beat", {"n": 1})
        assert next(events).data["rows"] == [{"n": 1}]
        events.close()


def test_pages_are_of_one_moment(server: Server) -> None:
    server.layer.define("line", {"n": "int"})
    server.layer.insert("line", [{"n": n} for n in range(25)])
    with livinglayer.connect(server.url, server.token("owner")) as remote:
        pages = remote.pages("select n from line order by n", size=10)
        found = [next(pages)]
        server.layer.insert("line", {"n": -1})
        found += list(pages)
    assert [[row["n"] for row in page] for page in found] == [list(range(10)), list(range(10, 20)), list(range(20, 25))]


def test_a_live_query_tells_its_answer_again_when_a_tx_changes_it(server: Server) -> None:
    server.layer.define("mark", {"n": "int", "price": "decimal"})
    server.layer.define("aside", {"n": "int"})
    with livinglayer.connect(server.url, server.token("owner")) as remote:
        events = remote.live("select n, price from mark order by n")
        assert next(events).data["rows"] == []
        server.layer.insert("aside", {"n": 1})  # changes nothing of it
        server.layer.insert("mark", {"n": 1, "price": Decimal("2.50")})
        event = next(events)
        assert event.kind == "rows" and event.data["rows"] == [{"n": 1, "price": Decimal("2.50")}]
        events.close()
        # whoever comes back with the tx it has seen is told only what it has not
        again = remote.live("select n, price from mark order by n", since=event.tx)
        server.layer.insert("mark", {"n": 2})
        assert [row["n"] for row in next(again).data["rows"]] == [1, 2]
        again.close()


def test_live_changes_of_an_entity_lose_none(server: Server) -> None:
    server.layer.define("step_taken", {"n": "int"})
    with livinglayer.connect(server.url, server.token("owner")) as remote:
        start = server.layer.insert("step_taken", {"n": 0})
        (row,) = server.layer.query("select tx from step_taken__history where id = :id", {"id": start})
        ids = server.layer.insert("step_taken", [{"n": n} for n in (1, 2)])
        server.layer.update("step_taken", ids[0], {"n": 9})
        events = remote.live(entity="step_taken", since=row["tx"])
        found = [next(events) for _ in range(3)]
        server.layer.delete("step_taken", ids[1])
        found.append(next(events))
        events.close()
    assert [(e.data["op"], e.data["n"]) for e in found] == [("insert", 1), ("insert", 2), ("update", 9), ("delete", 2)]
    assert [e.tx is None for e in found] == [True, False, False, False]  # a tx counts as seen with its last change


def test_a_live_stream_of_what_may_not_be_seen_is_not_there(server: Server) -> None:
    server.layer.define("hidden_thing", {"n": "int"})
    with livinglayer.connect(server.url, server.token("ben")) as ben:
        for stream in (ben.live(entity="hidden_thing"), ben.live(entity="nowhere")):
            with pytest.raises(NotFound):
                next(stream)
        with pytest.raises(NotFound):
            next(ben.live("select * from hidden_thing"))


def test_what_the_page_shows_works(server: Server) -> None:
    page = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```", page, re.M | re.S)
    names: dict[str, Any] = {"url": server.url, "token": server.token("owner"), "Decimal": Decimal}
    for block in blocks:
        exec(compile(block, "client.md", "exec"), names)
    assert len(blocks) == 3
