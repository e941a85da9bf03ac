"""Asking: what a person must say yes to before it is done, put to them by whichever client there is."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import NoBackChannelError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ...errors import Denied, LayerError

Context = ServerRequestContext[Any, Any]
CONFIRM = "confirm"
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        CONFIRM: {"type": "boolean", "title": "Yes, do it", "default": False},
        "reason": {"type": "string", "title": "Why (optional)", "maxLength": 500},
    },
    "required": [CONFIRM],
}


class Unconfirmed(LayerError):
    """Somebody must say yes first."""

    code, status, exit_code = "needs_confirmation", 409, 5


def can_ask(ctx: Context) -> bool:
    """Whether the client shows its person a form."""
    capability = getattr(ctx.session.client_capabilities, "elicitation", None)
    if capability is None or (capability.url is not None and capability.form is None):
        return False
    return ctx.protocol_version in MODERN_PROTOCOL_VERSIONS or ctx.session.can_send_request


async def ask(
    ctx: Context, params: types.CallToolRequestParams, question: str, person: bool
) -> dict[str, Any] | types.InputRequiredResult:
    """What the person said, or the request to ask them; Unconfirmed where nobody can be asked, Denied when they say no.

    A client that asks its person is always made to: what the model says of them counts only where there is no other way.
    """
    if not can_ask(ctx):
        if person:
            raise Unconfirmed(
                f"{question} A person must answer, and this client can't ask one", hint="layer approve ID"
            )
        if (params.arguments or {}).get(CONFIRM) is True:
            return {CONFIRM: True}
        raise Unconfirmed(question, hint="ask the person; when they agree, call again with confirm: true")
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        asked = sha256(question.encode("utf-8", "replace")).hexdigest()  # sealed, so it is what we asked this one
        answered = (params.input_responses or {}).get(CONFIRM)
        if params.request_state != asked or answered is None:
            form = types.ElicitRequestFormParams(message=question, requested_schema=FORM)
            return types.InputRequiredResult(
                input_requests={CONFIRM: types.ElicitRequest(params=form)}, request_state=asked
            )
    else:
        try:
            answered = await ctx.session.elicit_form(question, FORM, related_request_id=ctx.request_id)
        except NoBackChannelError:
            raise Unconfirmed(question, hint="this connection can't be asked back; use one that can") from None
    if not isinstance(answered, types.ElicitResult) or answered.action == "cancel":
        raise Denied("the person did not answer, so nothing was done")
    said = dict(answered.content or {})
    if answered.action != "accept" or (said.get(CONFIRM) is not True and not person):
        raise Denied("the person said no, so nothing was done")
    return said
