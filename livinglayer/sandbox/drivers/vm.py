"""Tier `vm`: a whole PC (q35, PCI) of its own; without a network namespace it has no network card at all."""

from .machine import Machines, Parts
from .qemu import Q35

ISOLATION = "a whole PC of its own behind QEMU, which runs without privileges, files or network"


class VmDriver(Machines):
    """Boxes on a board with PCI; none is kept waiting."""

    def __init__(self, parts: Parts) -> None:
        super().__init__("vm", Q35, ISOLATION, parts, spare=0)
