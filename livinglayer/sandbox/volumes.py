"""Volumes: files of a host that stay when boxes end, each a subvolume with a limit of its own. Boxes see them as mounts `volume:ID`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import Conflict, Invalid, NotFound
from .blueprint import Blueprint
from .disk import Disk

ID = re.compile(r"[a-z0-9]{1,40}")


class Volumes:
    """The volumes of one disk, as the host has them."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        os.chmod(disk.volumes, 0o700)  # setuid files of a box's root lie here with uid 0

    def path(self, id: object) -> Path:
        """Where a volume lies, or NotFound."""
        path = self.disk.volumes / _checked(id)
        if not path.is_dir():
            raise NotFound(f"there is no volume {id!r} on this host")
        return path

    def create(self, id: object, size: int) -> None:
        """An empty volume that holds so many bytes, open to every user of the boxes that see it."""
        if isinstance(size, bool) or not isinstance(size, int) or not 1 << 20 <= size <= 1 << 50:
            raise Invalid(f"{size!r} is not a number of bytes that a volume may have")
        path = self.disk.subvolume(self.disk.volumes / _checked(id))
        try:
            self.disk.limit(path, size)
            os.chmod(path, 0o777)
        except BaseException:
            self.disk.destroy(path)
            raise

    def remove(self, id: object, shapes: Iterable[Blueprint]) -> None:
        """Take a volume away with all in it; Conflict while a box sees it."""
        path = self.path(id)
        if any(mount.source == f"volume:{id}" for shape in shapes for mount in shape.mounts):
            raise Conflict(f"volume {id!r} is in use by a box", hint="kill the boxes that mount it first")
        self.disk.destroy(path)


def _checked(id: object) -> str:
    if not isinstance(id, str) or not ID.fullmatch(id):
        raise Invalid(f"{id!r:.100} is not the id of a volume")
    return id
