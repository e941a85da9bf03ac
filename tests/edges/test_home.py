"""The page people see, in a real browser: signing in by a link, what runs, how to connect, signing out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from edges.serving import Server
from playwright.sync_api import Page, sync_playwright

from livinglayer.edges.http import home


@pytest.fixture
def page() -> Iterator[Page]:
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


def test_somebody_signs_in_looks_and_signs_out(server: Server, page: Page) -> None:
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(server.url)
    assert "You are not signed in" in page.inner_text("body")
    server.layer.define("note", {"text": "text"})
    server.layer.call("row.insert", {"entity": "note", "values": {"text": "x"}}, reason="<script>alert(1)</script>")
    box = server.layer.call("box.open", {"blueprint": "base"})["box"]
    page.goto(home.link(server.layer, server.url, "owner"))
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{server.url}/")
    text = page.inner_text("body")
    assert "as owner" in text and "row.insert" in text and box in text
    assert f'livinglayer.connect("{server.url}"' in text and f"{server.url}/mcp" in text and "E2B_API_URL" in text
    assert page.evaluate("document.cookie") == "", "scripts do not see the session"
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url(f"{server.url}/")
    assert "You are not signed in" in page.inner_text("body")
    server.layer.call("box.kill", {"box": box})
    assert said == []


def test_names_of_others_are_text_on_the_page(server: Server, page: Page) -> None:
    name = server.principal("<img>")
    page.goto(home.link(server.layer, server.url, name))
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{server.url}/")
    assert f"as {name}" in page.inner_text("body") and page.locator("img").count() == 0
