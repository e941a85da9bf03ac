"""What every box has of ours: the files of livinglayer/inside/ at /opt/livinglayer, which belong to its root and come with its base."""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "inside"
PLACE = "opt/livinglayer"  # in a box
FOR_ALL = Path("/run/livinglayer")  # where tier process finds them when only root may look into the package


def files() -> Iterator[tuple[str, int, bytes]]:
    """(path, mode, content) of each, sorted."""
    for at, directories, names in os.walk(SOURCE):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        for name in sorted(names):
            path = Path(at, name)
            relative = path.relative_to(SOURCE).as_posix()
            if not name.startswith(".") and not name.endswith((".pyc", ".tmp", "~")):
                yield relative, 0o755 if relative.startswith("bin/") else 0o644, path.read_bytes()


def signature() -> tuple[tuple[str, int, int], ...]:
    """Something that is another when a file is; cheap."""
    found = []
    for at, directories, names in os.walk(SOURCE):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        for name in sorted(names):
            here = os.stat(f"{at}/{name}")
            found.append((name, here.st_mtime_ns, here.st_size))
    return tuple(found)


def digest() -> str:
    """Of all they hold."""
    return hashlib.sha256(repr(list(files())).encode()).hexdigest()


def write(tree: Path) -> None:
    """Into a directory that is there."""
    for relative, mode, content in files():
        path = tree / relative
        for parent in reversed(Path(relative).parents[:-1]):
            (tree / parent).mkdir(exist_ok=True)
            (tree / parent).chmod(0o755)
        path.write_bytes(content)
        path.chmod(mode)


def on_host() -> Path:
    """Where a process of another user finds them on this machine: the package itself, or a copy where others can't look into it."""
    if os.geteuid() or all(os.stat(parent).st_mode & stat.S_IXOTH for parent in (SOURCE, *SOURCE.parents)):
        return SOURCE
    copy = FOR_ALL / f"inside-{digest()[:16]}"
    if not copy.exists():
        aside = FOR_ALL / f".inside-{os.getpid()}"
        aside.mkdir(parents=True, exist_ok=True)
        FOR_ALL.chmod(0o755)
        aside.chmod(0o755)
        write(aside)
        try:
            aside.rename(copy)
        except OSError:  # another host was faster
            pass
    return copy


def variables(place: str) -> dict[str, str]:
    """How programs find them, beside PATH."""
    return {"PYTHONPATH": place, "NODE_PATH": place}
