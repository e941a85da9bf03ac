"""Resources: what is at layer:// addresses for whom, and that changes of it are told to those who may see them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from edges.mcp.clients import MODES, ask, over_http, run, use
from edges.serving import Server
from mcp.client.subscriptions import ResourceUpdated, ToolsListChanged
from mcp.shared.exceptions import MCPError

EVIL = "<script>alert('x')</script>\"&'"


@pytest.fixture(scope="module")
def shop(own: Server) -> Server:
    """Items, of which ann sees those of team blue; two projections; a file."""
    layer = own.layer
    layer.define("item", {"name": "text!", "qty": "int", "team": "text", "photo": "file"})
    layer.define("margin", {"amount": "int"})
    layer.insert(
        "item",
        [
            {"name": EVIL, "qty": 1, "team": "blue", "photo": b"\x89PNG\x00\xff"},
            {"name": "red one", "qty": 2, "team": "red"},
        ],
    )
    layer.call("projection.define", name="stock", statement="select name, qty from item order by id")
    layer.call(
        "projection.define",
        name="item.least",
        statement="select name from item where qty >= :least",
        parameters={"least": "int!"},
    )
    own.principal("ann")
    layer.grant("ann", "read", "item", where="team = 'blue'")
    layer.grant("ann", "read", "projection:stock")
    return own


def content(answer: Any) -> Any:
    return json.loads(answer.contents[0].text)


@pytest.mark.parametrize("mode", MODES)
def test_everything_has_an_address(shop: Server, mode: str) -> None:
    async def act() -> None:
        async with over_http(shop, mode=mode) as client:
            listed = [each.uri for each in (await client.list_resources()).resources]
            assert listed == [
                "layer://schema", "layer://entity/item", "layer://entity/margin", "layer://projection/item.least", "layer://projection/stock",
                "ui://layer/projection",
            ]  # fmt: skip
            assert len((await client.list_resource_templates()).resource_templates) == 9
            assert {"item", "margin"} <= {
                each["name"] for each in content(await client.read_resource("layer://schema"))["entities"]
            }
            assert content(await client.read_resource("layer://schema/item"))["fields"]["qty"]["kind"] == "int"
            first, second = content(await client.read_resource("layer://entity/item"))["rows"]
            page = content(await client.read_resource("layer://entity/item?limit=1&offset=1"))
            assert [row["id"] for row in page["rows"]] == [second["id"]]
            assert content(await client.read_resource(f"layer://row/item/{first['id']}"))["row"] == first
            assert content(await client.read_resource("layer://projection/item.least?least=2"))["rows"] == [
                {"name": "red one"}
            ]
            [execution] = shop.layer.query("select max(id) as id from execution where verb is not null")
            record = content(await client.read_resource(f"layer://execution/{execution['id']}"))
            assert record["execution"]["id"] == execution["id"]
            photo = await client.read_resource(f"layer://file/{first['photo']}")
            assert photo.contents[0].blob == "iVBORwD/"  # type: ignore[union-attr]

    run(act())


@pytest.mark.parametrize("mode", MODES)
def test_what_one_may_not_see_is_not_there(shop: Server, mode: str) -> None:
    blue, red = (row["id"] for row in shop.layer.query("select id from item order by id"))
    hidden = [
        f"layer://row/item/{red}", "layer://entity/margin", "layer://schema/margin", "layer://entity/principal", "layer://projection/item.least",
        "layer://projection/nowhere", "layer://execution/2000", "layer://execution/2000/result", "layer://file/" + "a" * 64, "layer://box/none",
        "layer://nothing", "layer://row/item", "layer://row/item/abc", "layer://row/item/99999999999999999999", "ui://layer/projection/nowhere",
        "ui://elsewhere", "file:///etc/passwd", "http://127.0.0.1/", "layer://entity/item?limit=x", "layer://entity/item%27%20or%201=1", "nonsense", "",
        "layer://entity/item?drop=1", "layer://[::1/x",
    ]  # fmt: skip

    async def act() -> None:
        async with over_http(shop, "ann", mode) as client:
            assert [each.uri for each in (await client.list_resources()).resources] == [
                "layer://schema", "layer://entity/item", "layer://projection/stock", "ui://layer/projection",
            ]  # fmt: skip
            assert [row["id"] for row in content(await client.read_resource("layer://entity/item"))["rows"]] == [blue]
            for uri in hidden:
                with pytest.raises(MCPError) as told:
                    await client.read_resource(uri)
                code = -32002 if mode == "legacy" else -32602
                assert told.value.error.code == code, (uri, told.value)

    run(act())
    assert "Traceback" not in shop.log


def test_a_projection_is_a_page_without_holes(shop: Server) -> None:
    async def act() -> str:
        async with over_http(shop, "ann") as client:
            assert (await use(client, "open_projection", name="stock"))["rows"][0]["name"] == EVIL
            empty = (await client.read_resource("ui://layer/projection")).contents[0]
            assert empty.mime_type == "text/html;profile=mcp-app"
            return (await client.read_resource("ui://layer/projection/stock")).contents[0].text  # type: ignore[union-attr]

    page = run(act())
    assert "<script>alert" not in page and "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&quot;&amp;&#x27;" in page
    assert page.count("<script>") == 1 and "innerHTML" not in page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src &#x27;none&#x27;" in policy[1] and "unsafe-inline" not in policy[1]


def test_lists_and_reads_say_how_long_they_hold(shop: Server) -> None:
    for method in ("tools/list", "resources/list", "resources/templates/list"):
        result = ask(shop, method)["result"]
        assert result["cacheScope"] == "private" and result["ttlMs"] > 0
    read = ask(shop, "resources/read", {"uri": "layer://schema"})["result"]
    assert (read["ttlMs"], read["cacheScope"]) == (0, "private")
    assert ask(shop, "tools/list", {"cursor": "zzz"})["error"]["code"] == -32602


def test_changes_are_told_to_those_who_may_see_them(shop: Server) -> None:
    layer = shop.layer
    blue, red = (row["id"] for row in layer.query("select id from item order by id"))
    uris = [
        f"layer://row/item/{blue}",
        f"layer://row/item/{red}",
        "layer://entity/item",
        "layer://projection/stock",
        "layer://entity/margin",
    ]

    async def act() -> None:
        async with (
            over_http(shop, "ann") as client,
            client.listen(resource_subscriptions=uris, tools_list_changed=True) as told,
        ):
            assert told.honored.resource_subscriptions == [uris[0], uris[2], uris[3]]
            heard: list[Any] = []

            async def hear() -> None:
                async for event in told:
                    heard.append(event)

            task = asyncio.create_task(hear())

            async def until(*events: Any) -> None:
                async with asyncio.timeout(20):
                    while not set(events) <= set(heard):
                        await asyncio.sleep(0.05)

            await asyncio.to_thread(layer.update, "item", red, {"team": "red"})  # nothing that she sees
            await asyncio.to_thread(layer.insert, "margin", {"amount": 5})
            await asyncio.to_thread(layer.update, "item", blue, {"qty": 7})
            await until(*(ResourceUpdated(uri=uri) for uri in (uris[0], uris[2], uris[3])))
            assert ResourceUpdated(uri=uris[1]) not in heard and ToolsListChanged() not in heard
            layer.grant("ann", "fork", "branch:main")
            await until(ToolsListChanged())
            task.cancel()

    run(act())


def test_the_older_protocols_subscribe(shop: Server) -> None:
    layer = shop.layer
    blue, red = (row["id"] for row in layer.query("select id from item order by id"))
    heard: list[str] = []

    async def hear(message: Any) -> None:
        heard.append(getattr(getattr(message, "params", None), "uri", None) or getattr(message, "method", ""))

    async def act() -> None:
        async with over_http(shop, "ann", "legacy", message_handler=hear) as client:
            uri = f"layer://row/item/{blue}"
            await client.subscribe_resource(uri)
            with pytest.raises(MCPError):
                await client.subscribe_resource(f"layer://row/item/{red}")
            await asyncio.sleep(0.3)  # the client opens its stream
            async with asyncio.timeout(20):
                n = 100
                while uri not in heard:
                    n += 1
                    await asyncio.to_thread(layer.update, "item", blue, {"qty": n})
                    await asyncio.sleep(0.2)
                granted = layer.grant("ann", "merge", "branch:main")
                while "notifications/tools/list_changed" not in heard:
                    await asyncio.sleep(0.05)
                layer.revoke(granted)
            await client.unsubscribe_resource(uri)

    run(act())


def test_a_stream_ends_with_its_token(shop: Server) -> None:
    token = shop.token("ann", seconds=3600)
    [row] = shop.layer.query("select max(id) as id from token")

    async def act() -> None:
        async with over_http(shop, token=token) as client, client.listen(tools_list_changed=True) as told:
            shop.layer.call("token.revoke", id=row["id"])
            async with asyncio.timeout(20):
                async for _ in told:
                    pass

    run(act())


def test_streams_end_when_the_server_does(serve: Callable[..., Server]) -> None:
    server = serve()

    async def act() -> float:
        async with (
            over_http(server) as client,
            client.listen(tools_list_changed=True),
            over_http(server, mode="legacy"),
        ):
            began = time.monotonic()
            await asyncio.to_thread(server.stop)
            return time.monotonic() - began

    with contextlib.suppress(Exception):  # what a client says to that is its own affair
        run(act())
    assert server.process.wait(10) == 0
    assert "Traceback" not in server.log
