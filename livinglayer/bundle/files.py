"""Files of a bundle: read once and safely from a directory, packed and unpacked in one canonical way, named by a digest."""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from ..errors import Invalid, LimitExceeded, NotFound

SIGNATURE = "signature.yaml"
PARTS = ("schema", "policy", "blueprints", "functions", "triggers", "projections", "contracts", "pages", "seeds")
FOLDERS = (*PARTS, "instructions", "migrations", "docs", "tests")
MOST_FILES = 1000
MOST_BYTES = 64 << 20  # of all together
FILE_BYTES = 4 << 20
SEED_BYTES = 64 << 20  # of rows in seeds/
PATH_LENGTH = 100  # what one field of a tar archive holds
DEPTH = 8  # directories in directories
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")
FREE = re.compile(r"(README|LICENSE)[A-Za-z0-9_.+@-]*|instructions\.md")  # kept, not interpreted


def read(directory: str | os.PathLike[str]) -> dict[str, bytes]:
    """Every file below a directory, read once; refuses links, devices, unknown files and what is too large.

    Names that begin with a dot and `__pycache__` are not part of a bundle and are passed over.
    """
    try:
        top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(
            f"there is no directory {str(directory)!r}", hint="a bundle is a directory with a bundle.yaml"
        ) from None
    except (OSError, ValueError) as error:
        raise Invalid(
            f"{str(directory)!r} can't be read as a bundle: {_reason(error)}", hint="name a directory"
        ) from None
    reading = _Reading()
    try:
        reading.folder(top, "")
    finally:
        os.close(top)
    return dict(sorted(reading.found.items()))


class _Reading:
    """One walk through a directory.

    Each step is taken from an open directory by a single name that may not be a link: what is renamed or swapped
    meanwhile can make it fail, and can't lead it elsewhere.
    """

    def __init__(self) -> None:
        self.found: dict[str, bytes] = {}
        self.seen, self.room = 0, MOST_BYTES

    def folder(self, opened: int, above: str) -> None:
        names: list[str] = []
        with os.scandir(opened) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.name != "__pycache__":
                    names.append(entry.name)
                    self.seen += 1
                    _bounded(self.seen, self.room)
        for name in sorted(names):
            path = above + name
            try:
                mode = os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    check_folder(path)
                    inner = os.open(name, os.O_DIRECTORY | _SAFELY, dir_fd=opened)
                    try:
                        self.folder(inner, f"{path}/")
                    finally:
                        os.close(inner)
                else:
                    _only_regular(path, mode)
                    check_path(path)
                    self.file(os.open(name, os.O_NONBLOCK | os.O_NOCTTY | _SAFELY, dir_fd=opened), path)
            except (OSError, ValueError) as error:
                raise Invalid(f"{shown(path)}: can't be read: {_reason(error)}") from None

    def file(self, opened: int, path: str) -> None:
        with open(opened, "rb") as file:
            _only_regular(path, os.fstat(opened).st_mode)  # it may be another one than was looked at
            data = file.read(min(size_limit(path), self.room) + 1)
        check_size(path, len(data))
        self.found[path] = data
        self.room -= len(data)
        _bounded(self.seen, self.room)


_SAFELY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def _only_regular(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = next((word for test, word in _KINDS if test(mode)), "no regular file")
        raise Invalid(f"{shown(path)}: is {what}", hint="a bundle has plain files and directories, and no links")


_KINDS = (
    (stat.S_ISLNK, "a symbolic link"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _bounded(count: int, room: int) -> None:
    if count > MOST_FILES:
        raise LimitExceeded(f"a bundle has at most {MOST_FILES:,} files", hint="large seeds go into one file")
    if room < 0:
        raise LimitExceeded(f"the files of a bundle have at most {MOST_BYTES >> 20} MiB together")


def check(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files as they came over a wire, in order of their paths; refuses what a directory could not have held."""
    if not isinstance(files, Mapping):
        raise Invalid(f"the files of a bundle are a dict: path -> bytes, not {type(files).__name__}")
    _bounded(len(files), 0)
    room = MOST_BYTES
    for path, data in files.items():
        check_path(path)
        if not isinstance(data, bytes):
            raise Invalid(f"{path}: the content of a file is bytes, not {type(data).__name__}")
        check_size(path, len(data))
        room -= len(data)
        _bounded(0, room)
    for path in files:
        above = path.rpartition("/")[0]
        while above:
            if above in files:
                raise Invalid(f"{path}: {above} is a file and a directory")
            above = above.rpartition("/")[0]
    return dict(sorted(files.items()))


def check_path(path: object) -> None:
    """Refuses a path that is none of a bundle's: outside it, hidden, oddly named, or where nothing of that name belongs."""
    if not isinstance(path, str):
        raise Invalid(f"a path is text, not {type(path).__name__}")
    folder, _, name = path.rpartition("/")
    check_folder(folder)
    if not NAME.fullmatch(name) or len(path) > PATH_LENGTH:
        raise _odd(path)
    if folder:
        if folder.partition("/")[0] in ("docs", "tests"):
            return
        if folder == "migrations" and not name.endswith(".yaml"):
            raise Invalid(
                f"{path}: a migration is a YAML file", hint="migrations/1.1.0.yaml, after the version it leads to"
            )
        return
    if name not in ("bundle.yaml", SIGNATURE, *(f"{part}.yaml" for part in PARTS)) and not FREE.fullmatch(name):
        raise Invalid(f"{path}: nothing of a bundle has this name", hint=_near(name))


def check_folder(folder: str) -> None:
    """Refuses a directory that a bundle has no use for."""
    if not folder:
        return
    names = folder.split("/")
    if len(names) > DEPTH or len(folder) > PATH_LENGTH or not all(NAME.fullmatch(name) for name in names):
        raise _odd(folder)
    if names[0] not in FOLDERS:
        raise Invalid(f"{shown(folder)}: a bundle has no directory {names[0]!r}", hint=", ".join(FOLDERS))


def _odd(path: str) -> Invalid:
    return Invalid(
        f"{shown(path)}: is no path of a bundle",
        hint=f"letters, digits and _ . + @ -, at most {PATH_LENGTH} characters and {DEPTH} directories deep; no '..', nothing hidden",
    )


def _near(name: str) -> str:
    from difflib import get_close_matches

    known = ["bundle.yaml", *(f"{part}.yaml" for part in PARTS), SIGNATURE]
    near = get_close_matches(name.removesuffix(".yml") + (".yaml" if name.endswith(".yml") else ""), known, 1)
    more = "README, LICENSE, docs/ and tests/ are kept as they are"
    return f"did you mean {near[0]}?" if near else more


def shown(path: str) -> str:
    """A path as an error may show it, whatever is in it."""
    if path.isascii() and path.isprintable() and len(path) <= PATH_LENGTH and " " not in path:
        return path
    return repr(path.encode("utf-8", "backslashreplace").decode()[:PATH_LENGTH])


def is_rows(path: str) -> bool:
    """Whether a file holds rows of seeds."""
    return path.startswith("seeds/") and path.endswith((".jsonl", ".csv"))


def size_limit(path: str) -> int:
    return SEED_BYTES if is_rows(path) else FILE_BYTES


def check_size(path: str, size: int) -> None:
    """Refuses a file that is too large."""
    most = size_limit(path)
    if size > most:
        raise LimitExceeded(
            f"{path}: has more than {most >> 20} MiB", hint="rows go into seeds/NAME.jsonl, which may be larger"
        )


# What names and carries them


def digest(files: Mapping[str, bytes]) -> str:
    """The name of exactly these files: what `sha256sum` prints for each but the signature, by path, hashed once more."""
    lines = [f"{sha256(files[path]).hexdigest()}  {path}\n" for path in sorted(files) if path != SIGNATURE]
    return sha256("".join(lines).encode()).hexdigest()


def pack(files: Mapping[str, bytes]) -> bytes:
    """The files as one tar archive, the same bytes for the same files wherever it is made."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, data in check(files).items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """The files of an archive that `pack` made; any other is Invalid."""
    found: dict[str, bytes] = {}
    wrong = Invalid("this is no packed bundle", hint="layer bundle export gives the files of one")
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for entry in archive:
                if entry.type != tarfile.REGTYPE or entry.size > len(data) or len(found) >= MOST_FILES:
                    raise wrong
                found[entry.name] = data[entry.offset_data : entry.offset_data + entry.size]
    except (tarfile.TarError, ValueError, OverflowError, EOFError, OSError, TypeError, KeyError, IndexError):
        raise wrong from None
    # Archives say the same in many ways (links, long names, owners); only the one that we write is read.
    if pack(found) != data:
        raise wrong
    return found


def write(directory: str | os.PathLike[str], files: Mapping[str, bytes]) -> None:
    """Write files into a directory that is new or empty, or holds a bundle: of that, what is not among them goes."""
    top, wanted = Path(directory), check(files)
    before = read(top) if top.is_dir() else {}
    for path, data in wanted.items():
        if before.get(path) != data:
            try:
                (top / path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise Invalid(
                    f"{str(directory)!r} can't be written: {error.strerror}", hint="name a directory"
                ) from None
            put(top / path, data)
    for path in before.keys() - wanted.keys():
        (top / path).unlink()


def put(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file in the place of the one before it, whole or not at all; a link that is there is not followed."""
    fresh = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with open(
            os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode), "wb"
        ) as file:
            file.write(data)
        os.replace(fresh, path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise Invalid(f"{path} can't be written: {error.strerror}") from None
