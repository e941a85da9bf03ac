"""What is not installed is told, and never passed over in CI."""

from __future__ import annotations

import pytest
from lacking import lacking


def test_what_is_lacking_is_skipped_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no node"):
        lacking("no node")
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="no node"):
        lacking("no node")
