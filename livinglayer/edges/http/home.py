"""Home: a plain page of what runs and how to connect, signing in and out, and what machines ask of a server."""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...errors import LayerError, NotFound, Unauthenticated
from ...law import held, tokens
from ...substrate.reads import clock
from . import auth
from .serving import Caller, address_of, body

if TYPE_CHECKING:
    from .serving import Serving

log = logging.getLogger("livinglayer.http")
ROWS = 10  # executions and boxes that are shown
POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
STYLE = """
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.15rem;margin-top:2rem}h3{font-size:1rem;margin:1rem 0 .25rem}
pre{background:#8881;padding:.75rem;white-space:pre-wrap;overflow-wrap:anywhere;user-select:all;border-radius:.4rem;margin:0}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #8883}
form.out{float:right}button{font:inherit;padding:.25rem .75rem}.quiet{opacity:.7}
"""


async def page(serving: Serving, request: Request) -> Response:
    """What runs, how to connect, what happened last."""
    if request.method not in ("GET", "HEAD"):
        return not_so("GET")
    try:
        caller = await auth.authenticate(serving, request.headers, address_of(request))
    except Unauthenticated:
        return shown("Living Layer", signed_out(serving))
    session = auth.session_of(request.headers, serving.tls) or ""
    return shown("Living Layer", await serving.do(signed_in, serving, caller, auth.csrf(session)))


def signed_out(serving: Serving) -> str:
    from .oidc import place

    oidc = '<p><a href="/login/oidc">Sign in with your organisation</a></p>' if place(serving.layer.id).exists() else ""
    return (
        "<h1>Living Layer</h1><p>You are not signed in. On the machine where it runs, <code>layer login</code> prints a "
        f"link that signs you in, once.</p>{oidc}"
    )


def signed_in(serving: Serving, caller: Caller, csrf: str) -> str:
    """The page of somebody we know."""
    layer = caller.layer
    said = [
        f'<form class="out" method="post" action="/logout"><input type="hidden" name="csrf" value="{csrf}"><button>Sign out</button></form>',
        f"<h1>Living Layer</h1><p>Layer <code>{escaped(layer.id)}</code>, as <b>{escaped(caller.name)}</b>.</p>",
        "<h2>What runs</h2>",
        table(boxes(layer) if caller.may("boxes") else [], ("box", "blueprint", "tier", "state", "since"), "No boxes."),
        "<h2>Executions</h2>",
        table(executions(layer) if caller.may("read") else [], ("id", "what", "principal", "status", "started"), "Nothing happened yet that you may see."),
    ]  # fmt: skip
    said.append("<h2>Connect</h2>")
    for title, text in snippets(serving, caller):
        said.append(f"<h3>{escaped(title)}</h3><pre>{escaped(text)}</pre>")
    return "\n".join(said)


def snippets(serving: Serving, caller: Caller) -> list[tuple[str, str]]:
    """How each kind of client connects; the same lines are in the documentation."""
    url = serving.url
    return [
        ("A token", f"export LAYER_TOKEN=$(layer token create {caller.name} --name laptop)"),
        ("Python", f'import livinglayer\n\nlayer = livinglayer.connect("{url}", token="ll_…")\nlayer.query("select name from entity")'),
        ("curl", f'curl {url}/api/query -H "Authorization: Bearer $LAYER_TOKEN" --json \'{{"sql": "select name from entity"}}\''),
        ("E2B's clients (boxes)", f'export E2B_API_URL={url} E2B_SANDBOX_URL={url}\nexport E2B_API_KEY=e2b_…   # layer token create NAME --format e2b; `layer env --e2b` prints all three'),
        ("MCP (Claude Code)", f'claude mcp add --transport http layer {url}/mcp --header "Authorization: Bearer $LAYER_TOKEN"'),
        ("MCP over standard input and output", "layer mcp"),
    ]  # fmt: skip


def boxes(layer: Any) -> list[dict[str, Any]]:
    """The boxes this principal may use, newest first."""
    try:
        found = [held.shown(layer, box) for box in held.boxes(layer, layer.my_id)]
    except LayerError:  # no host of boxes runs here
        return []
    newest = sorted(found, key=lambda box: box["started"], reverse=True)[:ROWS]
    return [{**box, "since": box["started"][:19].replace("T", " ")} for box in newest]


def executions(layer: Any) -> list[dict[str, Any]]:
    """The latest executions this principal may read."""
    try:
        rows = layer.query(
            f"select id, coalesce(function, verb, kind) as what, principal, status, started from execution order by id desc limit {ROWS}"
        )
    except LayerError:
        return []
    return [{**row, "started": row["started"].strftime("%Y-%m-%d %H:%M:%S")} for row in rows]


def table(rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...], nothing: str) -> str:
    """Rows as a table; everything in it is somebody's text."""
    lines = [
        "<tr>" + "".join(f"<td>{escaped('' if row[c] is None else row[c])}</td>" for c in columns) + "</tr>"
        for row in rows
    ]
    if not lines:
        return f'<p class="quiet">{nothing}</p>'
    return "<table><tr>" + "".join(f"<th>{c}</th>" for c in columns) + "</tr>" + "".join(lines) + "</table>"


def escaped(value: Any) -> str:
    return html.escape(str(value), quote=True)


def shown(title: str, content: str, status: int = 200) -> Response:
    text = f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style><body>{content}'
    headers = {
        "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "same-origin", "cache-control": "no-store",
        "cross-origin-opener-policy": "same-origin",
    }  # fmt: skip
    return Response(text, status, headers, "text/html; charset=utf-8")


async def login(serving: Serving, request: Request) -> Response:
    """A one-time link: first a page, so that what previews links does not use it up, then a session."""
    if request.method == "GET":
        given = escaped(request.query_params.get("token", ""))
        form = f'<form method="post" action="/login"><input type="hidden" name="token" value="{given}"><button autofocus>Sign in</button></form>'
        return shown("Sign in", f"<h1>Living Layer</h1><p>Sign in on this browser?</p>{form}")
    if request.method != "POST":
        return not_so("GET, POST")
    auth.same_origin(serving, request.headers)
    fields = parse_qs((await body(request, 65536)).decode("latin-1"))
    try:
        cookie = await auth.redeem(serving, fields.get("token", [""])[0], request.headers, address_of(request))
    except Unauthenticated:
        text = "<h1>Living Layer</h1><p>This link has been used, or is too old. <code>layer login</code> prints another.</p>"
        return shown("Sign in", text, 401)
    return entered(serving, cookie)


def entered(serving: Serving, cookie: str, to: str = "/") -> Response:
    """To the page, with a session."""
    response = RedirectResponse(to, 303)
    response.set_cookie(
        auth.COOKIES[serving.tls],
        cookie,
        max_age=int(auth.SESSION),
        httponly=True,
        samesite="lax",
        secure=serving.tls,
        path="/",
    )
    return response


async def logout(serving: Serving, request: Request) -> Response:
    """End this browser's session."""
    if request.method != "POST":
        return not_so("POST")
    fields = parse_qs((await body(request, 65536)).decode("latin-1"))
    if not auth.is_form_of((auth.session_of(request.headers, serving.tls) or ""), fields.get("csrf", [""])[0]):
        return shown("Sign out", "<h1>Living Layer</h1><p>That form was not of this session.</p>", 403)
    await auth.close_session(serving, request.headers, address_of(request))
    response = RedirectResponse("/", 303)
    response.delete_cookie(auth.COOKIES[serving.tls], path="/", secure=serving.tls)
    return response


async def healthz(serving: Serving, request: Request) -> Response:
    """It runs."""
    return plainly({"status": "ok"})


async def readyz(serving: Serving, request: Request) -> Response:
    """It can answer: its layer does."""
    try:
        await serving.do(last_tx, serving)
    except LayerError as error:
        log.warning("not ready: %s", error)  # what is wrong is not for everybody to read
        return plainly({"status": "unavailable"}, 503)
    return plainly({"status": "ready"})


def last_tx(serving: Serving) -> int:
    with serving.layer.engine.reading() as session:
        return int(clock(serving.layer.engine, session)[0])


async def metrics(serving: Serving, request: Request) -> Response:
    """For Prometheus, with a token of an owner: they tell of everybody."""
    caller = await auth.authenticate(serving, request.headers, address_of(request))
    caller.require("read")
    if not await serving.do(sovereign, caller):
        raise NotFound("there is nothing at '/metrics'", hint="/ tells what is")
    text = serving.metrics.text(serving, await serving.do(last_tx, serving))
    return Response(text, media_type="text/plain; version=0.0.4")


def sovereign(caller: Caller) -> bool:
    with caller.layer.engine.reading() as session:
        return bool(caller.layer.my_policy(session).sovereign())


def link(layer: Any, url: str, principal: str) -> str:
    """A link that signs a principal's browser in, once."""
    text = tokens.create(layer, principal, "link", "login", None, tokens.lasting(auth.LINK))
    return f"{url}/login?token={text}"


def plainly(data: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(data), status, media_type="application/json")


def not_so(allowed: str) -> Response:
    return Response(b"", 405, {"allow": allowed})
