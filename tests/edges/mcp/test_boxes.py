"""Boxes by MCP: made, used, forked, kept and ended by whoever holds them; for others they are not there."""

from __future__ import annotations

import base64

import pytest
from edges.mcp.clients import MODES, over_http, refused, run, use
from edges.serving import Server
from mcp.shared.exceptions import MCPError


@pytest.mark.parametrize("mode", MODES)
def test_a_box_from_its_beginning_to_its_end(server: Server, mode: str) -> None:
    server.principal("ann")
    server.layer.grant("ann", "call", "box:base")
    server.principal("eve")
    server.layer.grant("eve", "call", "box:base")

    async def act() -> None:
        async with over_http(server, "ann", mode) as client, over_http(server, "eve", mode) as other:
            made = await use(client, "box_create", metadata={"for": mode}, environment={"SECRET": "s3cret"})
            box = made["box"]
            ran = await use(client, "box_exec", box=box, command="echo $((6 * 7)) $SECRET; echo oops >&2; exit 3")
            assert (ran["exit_code"], ran["stdout"], ran["stderr"]) == (3, "42 s3cret\n", "oops\n")
            await use(client, "box_write", box=box, path="/home/user/deep/er/a.txt", content="héllo\n" * 20_000)
            found, offset = "", 0
            while offset is not None:
                part = await use(client, "box_read", box=box, path="/home/user/deep/er/a.txt", offset=offset)
                found, offset = found + part["content"], part.get("next")
            assert found == "héllo\n" * 20_000
            await use(
                client,
                "box_write",
                box=box,
                path="/home/user/b",
                content=base64.b64encode(b"\xff\x00").decode(),
                encoding="base64",
            )
            assert (await use(client, "box_read", box=box, path="/home/user/b"))["encoding"] == "base64"
            loud = await use(client, "box_exec", box=box, command="seq 100000")
            assert (
                loud["truncated"]
                and len(loud["stdout"]) < 70_000
                and "left out" in loud["stdout"]
                and "box_read" in loud["hint"]
            )
            assert [each["box"] for each in (await use(client, "box_list"))["boxes"]] == [box]
            assert (await use(other, "box_list"))["boxes"] == []
            assert (await client.read_resource(f"layer://box/{box}")).contents
            for tool, given in (("box_exec", {"command": "id"}), ("box_read", {"path": "/etc/passwd"}), ("box_write", {"path": "/x", "content": ""}), ("box_fork", {}), ("box_snapshot", {}), ("box_destroy", {"confirm": True})):  # fmt: skip
                assert (await refused(other, tool, box=box, **given))["code"] == "not_found", tool
            with pytest.raises(MCPError):
                await other.read_resource(f"layer://box/{box}")
            kept = f"kept-{mode[:4]}"
            await use(client, "box_snapshot", box=box, name=kept)
            forks = await use(client, "box_fork", box=box, count=2)
            assert len((await use(client, "box_list"))["boxes"]) == 3, forks
            assert (await refused(client, "box_destroy", box=box))["code"] == "needs_confirmation"
            for each in (await use(client, "box_list"))["boxes"]:
                assert (
                    await use(client, "box_exec", box=each["box"], command="wc -c < deep/er/a.txt", cwd="/home/user")
                )["stdout"].strip() == "140000"
                await use(client, "box_destroy", box=each["box"], confirm=True)
            assert (await use(client, "box_list"))["boxes"] == []
            assert (await refused(client, "box_exec", box=box, command="id"))["code"] == "not_found"

    run(act())
    assert server.layer.query("select 1 as n from execution where principal = 'ann' and verb = 'box.open'")
