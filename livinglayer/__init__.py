"""Living Layer: one governed, versioned, forkable database, and boxes in which unreviewed code may act on it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layer import Layer, open, restore
    from .remote import RemoteLayer, connect
    from .substrate.branches import Merge
    from .substrate.permissions import Decision
    from .substrate.verify import Report

__all__ = ["Decision", "Layer", "Merge", "RemoteLayer", "Report", "connect", "open", "restore"]

_HOMES = {
    "Layer": "layer",
    "open": "layer",
    "restore": "layer",
    "connect": "remote",
    "RemoteLayer": "remote",
    "Merge": "substrate.branches",
    "Decision": "substrate.permissions",
    "Report": "substrate.verify",
}


def __getattr__(name: str) -> Any:
    # The database is imported when it is asked for: who only wants boxes does not wait a quarter of a second for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = found
    return found
