"""What a machine lacks that a test needs: told here, and in CI, where nobody reads what was skipped, a failure."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Skip a test; with CI set fail."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} (with CI set nothing is skipped)", pytrace=False)
    pytest.skip(what)
