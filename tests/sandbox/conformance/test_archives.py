"""Archives: trees as one file, and hostile ones that are refused with nothing of theirs elsewhere."""

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

from livinglayer.errors import Conflict, Invalid, LayerError, LimitExceeded

Member = tuple[str, bytes | None, dict[str, Any]]


def tar(*members: Member, mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content, more in members:
            info = tarfile.TarInfo(name)
            info.size = len(content or b"")
            for key, value in more.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content) if content is not None else None)
    return buffer.getvalue()


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


LINK, HARD, DEVICE, PIPE = (
    {"type": kind} for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
)


@pytest.mark.core
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_a_tar_is_unpacked(box: Any, spot: str, mode: str) -> None:
    archive = tar(
        ("./", None, {"type": tarfile.DIRTYPE}),
        ("d/", None, {"type": tarfile.DIRTYPE, "mode": 0o755}),
        ("d/a", b"one", {"mode": 0o755}),
        ("l", None, LINK | {"linkname": "d/a"}),
        ("same", None, HARD | {"linkname": "d/a"}),
        mode=mode,
    )
    assert box.files.upload_archive(archive, f"{spot}/x") == 2
    assert box.run("cat l same; test -x d/a && echo ' run'", cwd=f"{spot}/x").stdout == "oneone run\n"


def test_a_zip_is_unpacked_and_a_directory_comes_back_as_a_tar(box: Any, spot: str) -> None:
    assert box.files.upload_archive(zipped(**{"a": b"1", "d/b": b"2" * 100_000}), f"{spot}/z") == 2
    box.files.link("a", f"{spot}/z/l")
    with tarfile.open(fileobj=io.BytesIO(box.files.download_archive(f"{spot}/z"))) as archive:
        assert sorted(archive.getnames()) == ["a", "d", "d/b", "l"]
        content = archive.extractfile("d/b")
        assert content and content.read() == b"2" * 100_000
        assert archive.getmember("l").linkname == "a"


@pytest.mark.core
def test_hostile_archives_are_refused_and_nothing_lands_elsewhere(box: Any, spot: str) -> None:
    above = f"{spot}/elsewhere"
    box.files.mkdir(above)
    hostile: dict[str, tuple[type[LayerError], bytes]] = {
        "climbs": (Invalid, tar(("../elsewhere/x", b"x", {}))),
        "climbs within": (Invalid, tar(("a/../../elsewhere/x", b"x", {}))),
        "absolute": (Invalid, tar((f"{above}/x", b"x", {}))),
        "zip slip": (Invalid, zipped(**{"../elsewhere/x": b"x"})),
        "backslashes": (Invalid, zipped(**{"..\\elsewhere\\x": b"x"})),
        "through its own link": (Conflict, tar(("d", None, LINK | {"linkname": above}), ("d/x", b"x", {}))),
        "hard link out": (Invalid, tar(("x", None, HARD | {"linkname": "../../../etc/shadow"}))),
        "hard link to nothing": (Invalid, tar(("x", None, HARD | {"linkname": "missing"}))),
        "device": (Invalid, tar(("x", None, DEVICE | {"devmajor": 1, "devminor": 3}))),
        "pipe": (Invalid, tar(("x", None, PIPE))),
        "long name": (Invalid, tar(("y" * 300, b"x", {}))),
        "not an archive": (Invalid, b"hello" * 1000),
        "empty": (Invalid, b""),
        "cut short": (Invalid, tar(("a", os.urandom(100_000), {}), mode="w:gz")[:50_000]),
        "broken zip": (Invalid, zipped(a=b"x" * 1000)[:60]),
    }
    for what, (kind, archive) in hostile.items():
        try:
            box.files.upload_archive(archive, f"{spot}/in")
            error: LayerError | None = None
        except LayerError as refused:
            error = refused
        assert isinstance(error, kind), (what, error)
        assert box.files.list(above) == [], what
    assert box.run("find . -type c -o -type b -o -type p", cwd=spot).stdout == b""


def test_a_link_in_a_tar_is_followed_by_nobody_but_the_box(box: Any, spot: str) -> None:
    box.files.upload_archive(tar(("l", None, LINK | {"linkname": "/etc/hostname"})), f"{spot}/in")
    assert box.files.stat(f"{spot}/in/l").target == "/etc/hostname"


def test_a_bomb_is_refused_before_it_goes_off(make: Callable[..., Any]) -> None:
    box = make(disk="64M")
    header = tarfile.TarInfo("zeros")
    header.size = 20 << 30
    bomb = gzip.compress(header.tobuf() + bytes(1 << 20))
    with pytest.raises(LimitExceeded, match="unpacks to more"):
        box.files.upload_archive(bomb, "/home/user/in")
    with pytest.raises(LimitExceeded):
        box.files.upload_archive(zipped(a=bytes(100 << 20)), "/home/user/in")
    assert box.run("echo well").stdout == "well\n"
