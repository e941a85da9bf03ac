"""Verbs of bundles: through the door like every other change."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from ..errors import Invalid
from ..law.verbs import Call, Items, Object, verb


@verb("bundle.apply", hidden=("files", "beside"))
def _apply(
    call: Call, *, files: Object, beside: Items | None = None, accept: str | None = None, yes: bool = False, adopt: bool = False
) -> Any:  # fmt: skip
    """Make a branch what a bundle says, in one tx, or change nothing; gives what was done. Only an owner may.

    `files` are its files by path, as text or {"base64": …}; `beside` those of bundles that it may need. What lets
    somebody do more than before needs `accept`, the digest of its plan, or `yes`.
    """
    from .apply import apply

    found = {each.name: each for each in (_bundle(one) for one in beside or ())}
    made = apply(
        call.layer, _bundle(files), branch=call.branch, accept=accept, yes=yes, reason=call.reason, adopt=adopt, beside=found
    )  # fmt: skip
    return made.json()


@verb("bundle.remove")
def _remove(call: Call, *, name: str, data: bool = False) -> Any:
    """Take away what a bundle has made, and with `data` its entities; refused while another one needs it."""
    from .apply import remove

    gone = remove(call.layer, name, data=data, branch=call.branch, reason=call.reason)
    return [{"kind": kind, "name": label} for kind, label in gone]


def _bundle(files: Any) -> Any:
    from .load import of_files

    if not isinstance(files, Mapping):
        raise Invalid("the files of a bundle are a dict: path -> text")
    return of_files({path: _bytes(path, content) for path, content in files.items()})


def _bytes(path: str, content: Any) -> bytes:
    try:
        if isinstance(content, Mapping) and set(content) == {"base64"}:
            return base64.b64decode(content["base64"], validate=True)
        if isinstance(content, str):
            return content.encode()
    except (binascii.Error, ValueError, TypeError):
        pass
    raise Invalid(f"{path!r:.120} is a text, or {{'base64': …}}")


def sent(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Files as the verb takes them."""
    told: dict[str, Any] = {}
    for path, data in files.items():
        try:
            told[path] = data.decode()
        except UnicodeDecodeError:
            told[path] = {"base64": base64.b64encode(data).decode()}
    return told
