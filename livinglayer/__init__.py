"""Living Layer: one governed, versioned, forkable database, and boxes in which unreviewed code may act on it."""

from .layer import Layer, open, restore
from .substrate.branches import Merge
from .substrate.permissions import Decision
from .substrate.verify import Report

__all__ = ["Decision", "Layer", "Merge", "Report", "open", "restore"]
