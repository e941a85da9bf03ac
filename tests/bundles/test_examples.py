"""Every bundle under bundles/: applied it is whole, planned again it is nothing, written back it is the same bytes, also elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from bundles.conftest import BUNDLES

from livinglayer import Layer
from livinglayer.bundle.apply import apply, remove
from livinglayer.bundle.export import export
from livinglayer.bundle.load import load
from livinglayer.bundle.plan import plan

NAMES = sorted(path.name for path in BUNDLES.iterdir() if path.is_dir())


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_in_and_comes_out_the_same(name: str, make_layer: Callable[[], Layer], tmp_path: Path) -> None:
    first, second, original = make_layer(), make_layer(), load(BUNDLES / name)
    before = plan(first, original)
    assert not before.empty and any(change.widens for change in before.changes)
    count = "select count(*) as n from tx"
    txs = first.query(count)[0]["n"]
    apply(first, original, accept=before.digest)
    assert first.query("select name, version, digest from bundle") == [
        {"name": name, "version": "1.0.0", "digest": original.digest}
    ]
    assert plan(first, original).empty
    assert first.query(count)[0]["n"] == txs + 1
    out = tmp_path / "out"
    export(first, name, out)
    assert files(out) == files(BUNDLES / name)
    apply(second, load(out), yes=True)
    assert plan(second, original).empty
    export(second, name, tmp_path / "again")
    assert files(tmp_path / "again") == files(out)
    assert first.verify().ok


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_taken_away(name: str, layer: Layer) -> None:
    kinds = ("function", "contract", "blueprint", "projection", "trigger", "component", "permission", "quota")
    count = " union all ".join(f"select '{kind}' as kind, count(*) as n from {kind}" for kind in kinds)
    before = layer.query(count)
    apply(layer, load(BUNDLES / name), yes=True)
    assert layer.query(count) != before
    remove(layer, name, data=True)
    assert layer.query(count) == before
    assert layer.query("select name from bundle") == []
    assert not set(load(BUNDLES / name).entities) & set(layer.schema().by_name)


def test_all_of_them_live_in_one_layer(layer: Layer) -> None:
    for name in NAMES:
        apply(layer, load(BUNDLES / name), yes=True)
    assert [row["name"] for row in layer.query("select name from bundle order by name")] == NAMES
    assert all(plan(layer, load(BUNDLES / name)).empty for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_explains_itself(name: str) -> None:
    bundle = load(BUNDLES / name)
    assert bundle.description and f"# {name}" in (BUNDLES / name / "README.md").read_text()
    for kind in ("entities", "functions", "triggers", "projections", "contracts", "blueprints"):
        assert all(each.get("description") for each in getattr(bundle, kind).values()), kind
