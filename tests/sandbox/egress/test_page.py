"""docs/egress.md names everything a person can set or meet."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from livinglayer.sandbox.egress.limits import Limits
from livinglayer.sandbox.egress.rules import KEYS

PAGE = (Path(__file__).parents[3] / "docs" / "egress.md").read_text()


@pytest.mark.parametrize("name", sorted(KEYS) + [field.name for field in dataclasses.fields(Limits)])
def test_the_page_names(name: str) -> None:
    assert f"`{name}`" in PAGE
