"""Tier `microvm`: a machine of its own with as few devices as can be, started from an image in tens of milliseconds."""

from .machine import Machines, Parts
from .qemu import MICROVM

ISOLATION = "a kernel of its own behind QEMU, which runs without privileges, files or network"


class MicrovmDriver(Machines):
    """Boxes on the smallest board; two machines of the shape used last are kept waiting."""

    def __init__(self, parts: Parts) -> None:
        super().__init__("microvm", MICROVM, ISOLATION, parts)
