"""Export: a bundle written back from the rows it has become, the same bytes for the same rows on either engine.

What still means what its file said is written as it was, comments and all; the rest in the one canonical form.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import Conflict, Invalid, NotFound
from ..substrate.reads import clock
from . import documents, files, write
from .definitions import UNMANAGED, Found, Key, Spec, same, told, wanted
from .load import Bundle, of_files, part_of
from .plan import stored

# Which definitions each part of a bundle has, and what of them may lie in a file of its own.
PARTS = {
    "schema": ("entity", "field"), "policy": ("role", "principal", "grant", "quota"), "blueprints": ("blueprint",),
    "functions": ("function",), "triggers": ("trigger",), "projections": ("projection",), "contracts": ("contract",),
    "pages": ("component",),
}  # fmt: skip
APART = {
    "functions": ("file", "code"),
    "projections": ("file", "statement"),
    "contracts": ("instructions_file", "instructions"),
}


def export(
    layer: Any,
    name: str,
    directory: str | os.PathLike[str],
    branch: str = "main",
    as_of: Any = None,
    principal: str | None = None,
) -> list[str]:
    """Write a bundle to a directory that is empty, or holds an earlier state of it; gives the paths of its files."""
    made = files_of(layer, name, branch, as_of, principal)
    top = Path(directory)
    if top.is_dir() and any(top.iterdir()):
        before = files.read(top)
        try:
            there = documents.parse("bundle.yaml", before["bundle.yaml"])["name"]
        except (KeyError, TypeError, Invalid):
            there = None
        if there != name:
            raise Conflict(f"{str(directory)!r} is not empty and not bundle {name!r}", hint="name another directory")
    files.write(top, made)
    return sorted(made)


def files_of(
    layer: Any, name: str, branch: str = "main", as_of: Any = None, principal: str | None = None
) -> dict[str, bytes]:
    """The files of a bundle as its rows are on a branch, now or at a moment; for those who may read all of it."""
    who = layer.id_of(principal)
    with layer.engine.snapshot() as session:
        catalog = layer.catalog
        last, epoch = clock(layer.engine, session)
        if not catalog.policy(session, who, epoch).sovereign():
            raise NotFound(f"there is no bundle {name!r} for you to export", hint="an owner may")
        moment = None if as_of is None else catalog.moment(session, as_of, last)
        chain = catalog.chain(session, catalog.branch(session, branch), moment)
        found = Found(catalog, session, chain, epoch)
    row = found.bundles.get(name)
    if row is None:
        raise NotFound(f"there is no bundle {name!r}", hint="layer bundle list")
    return rebuilt(found, stored(layer, row))


def rebuilt(found: Found, original: Bundle) -> dict[str, bytes]:
    """The files of a bundle: as they were where they still say what rows do."""
    here, said = standing(found, original), wanted(original)
    fresh = write.files_of(bundle_of(found, here, original))
    made = {path: data for path, data in original.files.items() if path != files.SIGNATURE}
    for part, kinds in PARTS.items():
        now = {key: spec for key, (_, spec) in here.items() if key[0] in kinds}
        then = {key: spec for key, spec in said.items() if key[0] in kinds}
        if same(sorted(now.items()), sorted(then.items())):
            continue
        old = parts_of(original, part)
        if part in APART and (kept := _only_apart(part, original, now, then)) is not None:
            made |= kept
            continue
        for path in old:
            made.pop(path, None)
        made |= {path: data for path, data in fresh.items() if path == f"{part}.yaml" or path.startswith(f"{part}/")}
    if files.digest(made) == original.digest and files.SIGNATURE in original.files:
        made[files.SIGNATURE] = original.files[files.SIGNATURE]
    try:
        of_files(made)  # what is written can be read again
    except Invalid as error:
        raise Conflict(
            f"rows say what no bundle can, so they can't be written as one: {error.message}",
            hint=f"layer plan shows what was changed by hand; change it back, or put it into the files of {original.name}",
        ) from None
    return dict(sorted(made.items()))


def standing(found: Found, original: Bundle) -> dict[Key, tuple[int, Spec]]:
    """What there is of a bundle, fields that were added to its entities included."""
    here: dict[Key, tuple[int, Spec]] = {}
    said = wanted(original)
    for key, owned in found.owned(original.name).items():
        number = found.id(key, owned)
        if number is None or (key[0] != "field" and number != owned):
            continue
        spec = found.spec(key, number)
        left = [label for label in UNMANAGED.get(key[0], ()) if label not in said.get(key, ())]
        here[key] = (number, {k: v for k, v in spec.items() if k not in left})
    for _, entity in [key for key in here if key[0] == "entity"]:
        for f in found.schema.by_name[entity].fields:
            key = ("field", f"{entity}.{f.name}")
            here[key] = (f.id, found.spec(key, f.id))
    return {key: item for key, item in here.items() if key[0] != "field" or ("entity", key[1].split(".")[0]) in here}


def bundle_of(found: Found, here: Mapping[Key, tuple[int, Spec]], original: Bundle) -> Bundle:
    """A bundle that says what rows do; rows made from seeds, and migrations, are as they were."""

    def of(kind: str) -> list[tuple[str, Spec]]:
        rows = sorted((number, name, spec) for (k, name), (number, spec) in here.items() if k == kind)
        return [(name, told(kind, spec)) for _, name, spec in rows]

    entities: dict[str, dict[str, Any]] = {name: {**spec, "fields": {}} for name, spec in of("entity")}
    for name, spec in of("field"):
        entity, _, label = name.partition(".")
        entities[entity]["fields"][label] = spec
    return replace(
        original,
        entities=entities,
        roles=dict(of("role")),
        principals=dict(of("principal")),
        grants=tuple(spec for _, spec in of("grant")),
        quotas=tuple(spec for _, spec in of("quota")),
        components=tuple({"name": name, **spec} for name, spec in of("component")),
        blueprints=dict(of("blueprint")),
        projections=dict(of("projection")),
        functions=dict(of("function")),
        contracts=dict(of("contract")),
        triggers=dict(of("trigger")),
    )


def parts_of(original: Bundle, part: str) -> dict[str, str | None]:
    """The files of a part: its YAML, and those that definitions in it name, each with the definition's name."""
    found: dict[str, str | None] = {}
    for path, data in original.files.items():
        if part_of(path) != part:
            continue
        found[path] = None
        if part in APART:
            for name, spec in ((documents.parse(path, data) or {}).get(part) or {}).items():
                if (spec or {}).get(APART[part][0]):
                    found[spec[APART[part][0]]] = name
    return found


def _only_apart(
    part: str, original: Bundle, now: Mapping[Key, Spec], then: Mapping[Key, Spec]
) -> dict[str, bytes] | None:
    """The files that changed when nothing but they did: code, statements, instructions. None when more has changed."""
    label = APART[part][1]
    places = {name: path for path, name in parts_of(original, part).items() if name is not None}
    if now.keys() != then.keys() or len(set(places.values())) < len(places):
        return None
    made = {}
    for key, spec in now.items():
        if spec == then[key]:
            continue
        if {k: v for k, v in spec.items() if k != label} != {k: v for k, v in then[key].items() if k != label}:
            return None
        if key[1] not in places or label not in spec:
            return None
        made[places[key[1]]] = spec[label].encode()
        if documents.text(key[1], made[places[key[1]]]) != spec[label]:
            return None
    return made
