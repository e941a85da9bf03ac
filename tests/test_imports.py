"""Imports go down only: edges → jobs → law → {substrate, sandbox}; nothing below knows what stands on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "livinglayer"

GROUND = {"errors", "settings"}
# What each part may import besides itself. A part that is missing here is refused until someone decides where it stands.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "settings": {"errors"},
    "typed": {"errors"},
    "remote": GROUND | {"typed", "substrate", "law"},  # a client; it gives answers in the shapes of the embedded layer
    "substrate": GROUND,
    "inside": set(),  # runs in boxes, alone with the standard library
    "sandbox": GROUND,  # the box knows nothing of the database
    "projection": GROUND | {"typed", "substrate"},
    "law": GROUND | {"substrate", "sandbox", "projection"},
    "bundle": GROUND | {"substrate", "law"},
    "jobs": GROUND | {"substrate", "sandbox", "projection", "law", "bundle"},
    "layer": GROUND | {"substrate", "sandbox", "projection", "law", "bundle", "jobs"},  # the facade people hold
    "": GROUND | {"layer", "remote", "substrate"},  # livinglayer/__init__.py: the names people import
    "edges": GROUND | {"", "layer", "remote", "typed", "substrate", "sandbox", "projection", "law", "bundle", "jobs"},
}
# The engines' drivers stay behind the substrate, so that nothing else can tell the engines apart.
DRIVERS = {"apsw", "sqlite3", "psycopg"}


def part(module: str) -> str:
    """`livinglayer.substrate.chain` → `substrate`; the package itself → the empty name."""
    names = module.split(".")
    return names[1] if len(names) > 1 else ""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        names = ("livinglayer", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imports(module: str, path: Path, source: str | None = None) -> set[str]:
    """The modules a file names in any import, also those inside functions and under TYPE_CHECKING."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    known = modules()
    found: set[str] = set()
    for node in ast.walk(ast.parse(source if source is not None else path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from livinglayer import errors` names a module, `from livinglayer import Layer` the package
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
    return found


def wrong(module: str, names: set[str]) -> list[str]:
    here = part(module)
    if here not in MAY_IMPORT:
        return [f"{module} is in no known part of the package: say in tests/test_imports.py where {here!r} stands"]
    said = []
    for name in sorted(names):
        if name.split(".")[0] == "livinglayer" and part(name) not in MAY_IMPORT[here] | {here}:
            said.append(f"{module} imports {name}, which is not below it")
        if name.split(".")[0] in DRIVERS and here != "substrate":
            said.append(f"{module} imports the driver {name}, which only the substrate may")
    return said


@pytest.mark.parametrize("module", modules())
def test_imports_go_down_only(module: str) -> None:
    assert wrong(module, imports(module, modules()[module])) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("livinglayer.substrate.chain", "from livinglayer.edges.cli import main"),
        ("livinglayer.substrate.chain", "from ..layer import Layer"),
        ("livinglayer.substrate.chain", "def later():\n    import livinglayer.law.verbs"),
        ("livinglayer.sandbox.host", "from livinglayer.substrate import engine"),
        ("livinglayer.edges.http.app", "import psycopg"),
        ("livinglayer.somewhere", "import json"),
    ],
)
def test_an_import_that_goes_up_is_found(module: str, source: str) -> None:
    assert wrong(module, imports(module, ROOT / "chain.py", source)) != []
