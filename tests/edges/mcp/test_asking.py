"""Asking: destructive acts wait for a person's yes, by whichever way a client has; approvals for nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
from edges.mcp.clients import MODES, NEW, ask, names, over_http, refused, run, use
from edges.serving import Server
from mcp_types import ElicitResult

from livinglayer.substrate.schema import SYSTEM


class Person:
    """Somebody at a client, who says the same to everything."""

    def __init__(self, action: str, **content: Any) -> None:
        self.action, self.content, self.asked = action, content, list[str]()

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        self.asked.append(params.message)
        return ElicitResult(action=self.action, content=self.content or None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def desk(server: Server) -> Server:
    server.layer.define("ticket", {"title": "text!"})
    return server


def made(desk: Server) -> int:
    return int(desk.layer.insert("ticket", {"title": "to go"}))


def there(desk: Server, number: int) -> bool:
    return bool(desk.layer.query("select 1 as n from ticket where id = :i", {"i": number}))


def removal(number: int) -> dict[str, Any]:
    return {"changes": [{"do": "delete", "entity": "ticket", "id": number}]}


@pytest.mark.parametrize("mode", MODES)
def test_a_person_who_says_yes_is_asked_once(desk: Server, mode: str) -> None:
    person, number = Person("accept", confirm=True), made(desk)

    async def act() -> None:
        async with over_http(desk, mode=mode, elicitation_callback=person) as client:
            assert await use(client, "apply_change", **removal(number)) == {"ids": [number]}

    run(act())
    assert not there(desk, number)
    assert person.asked == [f"owner wants to remove from branch main: delete ticket/{number}"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "person", [Person("decline"), Person("cancel"), Person("accept"), Person("accept", confirm=False)]
)
def test_anything_but_yes_is_no(desk: Server, mode: str, person: Person) -> None:
    number = made(desk)

    async def act() -> None:
        async with over_http(desk, mode=mode, elicitation_callback=person) as client:
            error = await refused(
                client, "apply_change", **removal(number), confirm=True
            )  # what a model says counts for nothing
            assert error["code"] == "denied" and "nothing was done" in error["message"]

    run(act())
    assert there(desk, number)


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_cannot_ask_is_told_what_to_pass(desk: Server, mode: str) -> None:
    number = made(desk)

    async def act() -> None:
        async with over_http(desk, mode=mode) as client:
            error = await refused(client, "apply_change", **removal(number))
            assert error["code"] == "needs_confirmation" and "confirm: true" in error["hint"]
            assert there(desk, number)
            await use(client, "apply_change", **removal(number), confirm=True)

    run(act())
    assert not there(desk, number)


def test_an_answer_holds_for_what_was_asked_alone(desk: Server) -> None:
    one, other = made(desk), made(desk)
    can = {"elicitation": {"form": {}}}

    def call(number: int, principal: str = "owner", **more: Any) -> dict[str, Any]:
        params = {"name": "apply_change", "arguments": removal(number), **more}
        return ask(desk, "tools/call", params, principal, capabilities=can)

    asked = call(one)["result"]
    assert asked["resultType"] == "input_required"
    yes = {"inputResponses": {"confirm": {"action": "accept", "content": {"confirm": True}}}}
    state = asked["requestState"]
    assert call(other, **yes, requestState=state)["error"]["code"] == -32602  # another act
    assert call(one, **yes, requestState=state[:-2] + "xx")["error"]["code"] == -32602
    assert call(one, **yes)["result"]["resultType"] == "input_required"  # nobody was asked
    other_one = desk.principal("mallory")
    desk.layer.grant(other_one, "write", "ticket")
    desk.layer.grant(other_one, "read", "ticket")
    assert call(one, other_one, **yes, requestState=state)["error"]["code"] == -32602  # another's
    assert there(desk, one) and there(desk, other)
    assert call(one, **yes, requestState=state)["result"]["structuredContent"] == {"ids": [one]}
    assert not there(desk, one)


def test_a_merge_asks_when_it_removes(desk: Server) -> None:
    number, person = made(desk), Person("accept", confirm=True)

    async def act() -> None:
        async with over_http(desk, elicitation_callback=person) as client:
            kept = await use(
                client, "propose_change", changes=[{"do": "insert", "entity": "ticket", "values": {"title": "n"}}]
            )
            await use(client, "merge", branch=kept["branch"])
            assert person.asked == []
            gone = await use(client, "propose_change", **removal(number))
            assert person.asked == []  # on a fork nothing is lost
            assert (await use(client, "merge", branch=gone["branch"], preview=True))["applied"] is False
            assert (await use(client, "merge", branch=gone["branch"]))["applied"]
            assert len(person.asked) == 1 and "removes 1 of 1 rows" in person.asked[0]

    run(act())


def test_approvals_are_answered_by_people_alone(desk: Server) -> None:
    """What is proposed for a merge waits; a model that says yes itself is refused."""
    layer = desk.layer
    layer.fork("proposed")
    layer.insert("ticket", {"title": "of an agent"}, branch="proposed")
    entity = SYSTEM.by_name["approval"]
    row = {
        "execution": 2000,
        "branch": "proposed",
        "action": "merge",
        "resource": "branch:main",
        "digest": "d",
        "status": "pending",
    }
    with layer.in_tx(None, "main", "a proposal") as tx:
        number = tx.record(entity, tx._encoded(entity, row))

    async def act() -> None:
        async with over_http(desk) as client:
            assert "answer_approval" in await names(client)
            error = await refused(client, "answer_approval", id=number)
            assert error["code"] == "needs_confirmation" and "layer approve" in error["hint"]
            assert (await refused(client, "answer_approval", id=number, confirm=True))["code"] == "invalid"
            assert (await refused(client, "answer_approval", id=10**9))["code"] == "not_found"
        person = Person("accept", confirm=False, reason="not today")
        async with over_http(desk, mode=NEW, elicitation_callback=person) as client:
            assert (await use(client, "answer_approval", id=number))["status"] == "refused"
            assert f"Approval {number}" in person.asked[0]

    run(act())
