"""How the layers in format1/, format2/ and format3/ were made, each with a release of that format: `make_old.py FORMAT sqlite DIRECTORY`
or `make_old.py FORMAT postgres URL`.

The content is the same on both engines; `layer.tar.xz` is the directory, `layer.sql.xz` what pg_dump says of the schema.
"""

from __future__ import annotations

import io
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import livinglayer


def fill(layer: livinglayer.Layer) -> None:
    """Something of everything a layer keeps."""
    layer.define(
        "item",
        {
            "name": "text!",
            "qty": "int",
            "price": "decimal",
            "rate": "float",
            "on_sale": {"type": "bool", "default": True},
            "at": "datetime",
            "more": "json",
            "picture": "file",
        },
        unique=[["name"]],
    )
    layer.define(
        "part", {"item": {"type": "ref", "to": "item", "on_delete": "cascade"}, "n": {"type": "int", "indexed": True}}
    )
    bolt = layer.insert(
        "item",
        {
            "name": "bölt",
            "qty": 1,
            "price": "0.50",
            "rate": 0.1,
            "at": "2026-01-31T12:00:00Z",
            "more": {"a": [1, 2.5]},
            "picture": b"png",
        },
        reason="stock",
        key="one",
    )
    nut = layer.insert("item", {"name": "nut", "qty": 9}, cause="an order")
    layer.insert("part", [{"item": bolt, "n": n} for n in range(3)])
    for qty in range(2, 6):
        layer.update("item", bolt, {"qty": qty})
    layer.principal("ada", attributes={"team": "a"})
    layer.principal("reader", kind="role")
    layer.grant("reader", "read", "item", where="qty > 3")
    layer.insert("blueprint", {"name": "small", "tier": "process"})
    box = layer.query("select id from blueprint")[0]["id"]
    layer.insert("function", {"name": "count", "language": "python", "code": "def count(): return 1", "blueprint": box})
    layer.insert("contract", {"name": "helper", "functions": ["count"], "blueprint": box})
    layer.fork("idea")
    layer.update("item", nut, {"qty": 7}, branch="idea")
    layer.delete("item", bolt, branch="idea")
    layer.insert("item", {"name": "screw"}, branch="idea")
    layer.alter("item", add={"colour": "text"}, branch="idea")
    layer.fork("gone")
    layer.insert("item", {"name": "never"}, branch="gone")
    layer.discard("gone")
    layer.alter("item", retype={"qty": "text"})
    with layer.execution({"entities": ["item"]}, reason="bounded") as execution:
        execution.update("item", nut, {"price": "8.10"})
    layer.delete("item", layer.insert("item", {"name": "brief"}))


def main(format: str, engine: str, place: str) -> None:
    here = Path(__file__).parent / f"format{format}"
    os.environ["XDG_CONFIG_HOME"] = config = tempfile.mkdtemp()
    layer = livinglayer.open(place, create=True)
    fill(layer)
    assert layer.verify()
    layer.close()
    token = next(Path(config).rglob("tokens/*"))
    (here / f"{engine}.token").write_text(token.read_text())
    if engine == "sqlite":
        with io.BytesIO() as data:
            with tarfile.open(fileobj=data, mode="w") as tar:
                for path in sorted(Path(place, ".layer").rglob("*")):
                    tar.add(path, path.relative_to(place), recursive=False, filter=_nobodys)
            (here / "layer.tar.xz").write_bytes(lzma.compress(data.getvalue(), preset=9))
        return
    dump = subprocess.run(
        ["pg_dump", "--schema=livinglayer", "--inserts", "--no-owner", "--no-privileges", "--no-comments", place],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # What a session sets depends on the server's release.
    kept = [
        s for s in dump.splitlines() if s and not s.startswith(("--", "\\", "SET ", "SELECT pg_catalog.set_config"))
    ]
    (here / "layer.sql.xz").write_bytes(lzma.compress("\n".join(kept).encode(), preset=9))


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = 0
    return info


if __name__ == "__main__":
    main(*sys.argv[1:])
