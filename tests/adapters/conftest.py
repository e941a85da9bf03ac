"""The tests of adapters use the sandbox's host of this worker."""

from __future__ import annotations

from sandbox.conftest import host, use

__all__ = ["host", "use"]
