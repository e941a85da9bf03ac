"""The tests of adapters use the sandbox's host of this worker, and a server for those that ask one."""

from __future__ import annotations

from edges.conftest import server
from sandbox.conftest import host, use

__all__ = ["host", "server", "use"]
