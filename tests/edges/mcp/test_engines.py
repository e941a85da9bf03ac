"""On PostgreSQL, too: what the tools and tasks look up themselves is there as it is on SQLite."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from cluster import Cluster
from edges.mcp.clients import names, over_http, run, use
from edges.serving import Server
from mcp.client.subscriptions import ResourceUpdated


@pytest.fixture
def elsewhere(postgres_cluster: Callable[..., Cluster], serve: Callable[..., Server]) -> Any:
    database: AbstractContextManager[str] = postgres_cluster().database()
    with database as location:
        made = serve(location)
        yield made
        made.close()


def test_a_round_on_postgresql(elsewhere: Server) -> None:
    layer = elsewhere.layer
    layer.define("ticket", {"title": "text!"})
    layer.call("function.define", name="sum.add", code="def main(a, b):\n    return a + b\n")
    layer.call("projection.define", name="titles", statement="select title from ticket order by id")

    async def act() -> None:
        async with over_http(elsewhere) as client:
            assert {"query", "call_sum_add", "open_projection"} <= set(await names(client))
            proposed = await use(
                client, "propose_change", changes=[{"do": "insert", "entity": "ticket", "values": {"title": "a"}}]
            )
            async with client.listen(resource_subscriptions=["layer://entity/ticket"]) as told:
                assert (await use(client, "merge", branch=proposed["branch"]))["applied"]
                async with asyncio.timeout(20):
                    assert await anext(aiter(told)) == ResourceUpdated(uri="layer://entity/ticket")
            [row] = (
                await use(client, "query", sql="select id, title from ticket where title = :t", params={"t": "a"})
            )["rows"]
            assert (await use(client, "history", entity="ticket", id=row["id"]))["rows"][0]["title"] == "a"
            assert (await use(client, "open_projection", name="titles"))["rows"] == [{"title": "a"}]
            done = await use(client, "call_sum_add", a=1, b=2)
            assert done["value"] == 3 and isinstance(done["execution"], int)
            whole = await client.read_resource(f"layer://execution/{done['execution']}/result")
            assert '"value":3' in whole.contents[0].text.replace(" ", "")  # type: ignore[union-attr]

    run(act())
