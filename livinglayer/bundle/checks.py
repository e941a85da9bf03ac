"""Checks of a bundle that need no layer: names, references, code, conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .load import Bundle


def check(bundle: Bundle, places: Mapping[tuple[str, str], str]) -> None:
    """Refuses a bundle that no layer could take; `places` says where each definition was written."""
