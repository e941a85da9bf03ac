"""Apps: a projection as a page that a client shows beside the conversation. Static, without network, all text escaped."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

TYPE = "text/html;profile=mcp-app"
EXTENSION = "io.modelcontextprotocol/ui"
META = {"ui": {"csp": {"connectDomains": [], "resourceDomains": []}, "prefersBorder": True}}

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 12px; color: CanvasText; background: Canvas; color-scheme: light dark }
h1 { font-size: 16px; margin: 0 0 8px }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid color-mix(in srgb, currentColor 18%, transparent); vertical-align: top }
p { color: color-mix(in srgb, currentColor 65%, transparent); margin: 8px 0 0 }
"""

# What the tool gave is put into the page as text, never as markup. The protocol with the client is JSON-RPC by postMessage.
SCRIPT = """
"use strict";
const send = message => parent.postMessage({ jsonrpc: "2.0", ...message }, "*");
const text = value => value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
function show(result) {
  const data = result && result.structuredContent;
  if (!data || !Array.isArray(data.rows)) return;
  const names = [...new Set(data.rows.flatMap(row => Object.keys(row)))];
  const cell = (kind, value) => { const made = document.createElement(kind); made.textContent = value; return made; };
  const line = (kind, values) => { const made = document.createElement("tr"); made.append(...values.map(value => cell(kind, value))); return made; };
  document.querySelector("h1").textContent = text(data.name) || "Projection";
  const table = document.querySelector("table");
  table.replaceChildren(line("th", names), ...data.rows.map(row => line("td", names.map(name => text(row[name])))));
  document.querySelector("p").textContent = data.rows.length + " rows" + (data.next ? ", there are more" : "");
  send({ method: "ui/notifications/size-changed", params: { height: document.documentElement.scrollHeight } });
}
addEventListener("message", event => {
  if (event.source !== parent || !event.data || event.data.jsonrpc !== "2.0") return;
  if (event.data.id === 1) send({ method: "ui/notifications/initialized" });
  if (event.data.method === "ui/notifications/tool-result") show(event.data.params);
});
send({ id: 1, method: "ui/initialize", params: { protocolVersion: "2026-01-26", appInfo: { name: "livinglayer", version: "1" }, appCapabilities: {} } });
"""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; base-uri 'none'; form-action 'none'"
)


def page(name: str | None = None, rows: Sequence[Mapping[str, Any]] = (), more: bool = False) -> str:
    """A page of a projection's rows; without them, one that waits for what the tool gives."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    lines = [_line("th", names)] if names else []
    lines += [_line("td", [_text(row.get(key)) for key in names]) for row in rows]
    count = "" if name is None else f"{len(rows)} rows{', there are more' if more else ''}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}"><title>{escape(name or "Projection")}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(name or 'Projection')}</h1><table>{''.join(lines)}</table>"
        f"<p>{count}</p><script>{SCRIPT}</script></body></html>\n"
    )


def _line(kind: str, values: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(value)}</{kind}>' for value in values)}</tr>"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else str(value)
