"""Load: a bundle from its files, checked as far as that can be done without a layer."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import Invalid, LimitExceeded
from ..law import projections
from . import documents, files
from .documents import wrong
from .files import pack, unpack

__all__ = ["Bundle", "Migration", "Seed", "load", "newer", "of_files", "pack", "satisfies", "unpack"]

LANGUAGES = {".py": "python", ".js": "javascript", ".sql": "sql"}
NAMED = ("entities", "roles", "principals", "blueprints", "functions", "triggers", "projections", "contracts")
MOST = 10_000  # definitions of one kind
LISTED = ("grants", "quotas", "components")


@dataclass(frozen=True)
class Seed:
    """Rows of one entity, told apart by the fields of `key`."""

    entity: str
    key: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Migration:
    """What is done when a version before this one is replaced."""

    version: str
    steps: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Bundle:
    """Definitions as their files say, with what lay in files of its own (code, statements, instructions, rows) put in."""

    name: str
    version: str
    description: str | None = None
    requires: Mapping[str, str] = field(default_factory=dict)
    entities: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    roles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    principals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grants: tuple[Mapping[str, Any], ...] = ()
    quotas: tuple[Mapping[str, Any], ...] = ()
    blueprints: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    triggers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    projections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    contracts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    components: tuple[Mapping[str, Any], ...] = ()
    seeds: tuple[Seed, ...] = ()
    migrations: tuple[Migration, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    digest: str = ""
    signer: str | None = None  # the public key whose signature is good; whether it is trusted is another question


def load(directory: str | os.PathLike[str]) -> Bundle:
    """The bundle in a directory; Invalid names the file, the place in it and what is wrong."""
    place = Path(os.path.abspath(directory))
    if place.is_dir() and not os.path.lexists(place / "bundle.yaml"):  # said before its files are held against it
        raise Invalid(f"{str(directory)!r} is no bundle: it has no bundle.yaml", hint="name the directory that has one")
    return _labelled(place.name, lambda: _bundle(files.read(directory)))


def of_files(given: Mapping[str, bytes]) -> Bundle:
    """The bundle that files are, wherever they came from: refused for the same reasons as a directory."""
    label = "bundle"
    try:
        label = str(documents.parse("bundle.yaml", given["bundle.yaml"])["name"])[:60]
    except (Invalid, KeyError, TypeError, AttributeError):
        pass  # said below
    return _labelled(label, lambda: _bundle(files.check(given)))


def _labelled(label: str, make: Callable[[], Bundle]) -> Bundle:
    """What goes wrong is told with the bundle's name before the path of the file."""

    def told(message: str) -> str:
        return f"{label}{': ' if ' ' in message.partition(': ')[0] else '/'}{message}"

    try:
        return make()
    except (Invalid, LimitExceeded) as error:
        found: Any = error.details.get("problems") or [error.message]
        raise type(error)(told(error.message), error.hint, problems=[told(each) for each in found]) from None


# Versions


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def newer(version: str, than: str) -> bool:
    """Whether a version comes after another."""
    return _numbers(version) > _numbers(than)


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version is one of those that a requirement such as ">=1.2.0, <2.0.0" names."""
    for part in wanted.split(","):
        part = part.strip()
        sign = part[:2] if part[1:2] == "=" else part[:1]
        ours, theirs = _numbers(version), _numbers(part[len(sign) :].strip())
        if not {
            ">=": ours >= theirs,
            "<=": ours <= theirs,
            "==": ours == theirs,
            ">": ours > theirs,
            "<": ours < theirs,
        }[sign]:
            return False
    return True


# From files to definitions


def _bundle(given: dict[str, bytes]) -> Bundle:
    from . import checks, sign

    if "bundle.yaml" not in given:
        raise wrong("bundle.yaml", "", "is missing: every bundle has one", "name: helpdesk, version: 1.0.0")
    made = _Loading(given)
    bundle = made.bundle()
    checks.check(bundle, made.places)
    return replace(bundle, signer=sign.verified(given))


class _Loading:
    def __init__(self, given: dict[str, bytes]) -> None:
        self.files = given
        self.used: set[str] = set()
        self.places: dict[tuple[str, str], str] = {}  # (kind, name) -> the file that says it

    def bundle(self) -> Bundle:
        read = [
            (part, path, documents.parse(path, self.files[path]))
            for path in self.files
            if (part := part_of(path)) is not None
        ]
        if found := [
            each for part, path, value in read for each in documents.problems(part, path, _empty(part, value))
        ]:
            raise Invalid(found[0].message, found[0].hint, problems=[each.message for each in found])
        named: dict[str, dict[str, Any]] = {}
        listed: dict[str, list[Any]] = {}
        migrations: dict[str, list[Any]] = {}
        about: dict[str, Any] = {}
        for part, path, value in read:
            if part == "bundle":
                about = value
            elif part == "migrations":
                migrations[path.removeprefix("migrations/").removesuffix(".yaml")] = value["steps"]
            elif part != "signature":
                for kind, items in (value or {}).items():
                    if len(items) + len(named.get(kind, ())) + len(listed.get(kind, ())) > MOST:
                        raise LimitExceeded(f"{path}: {kind}: a bundle has at most {MOST:,} {kind}")
                    if isinstance(items, dict):
                        self.merge(path, kind, named.setdefault(kind, {}), items)
                    else:
                        start = len(listed.setdefault(kind, []))
                        listed[kind] += items
                        for n in range(len(items)):
                            self.places[kind, str(start + n)] = f"{path}: {kind}[{n}]"
        for name, spec in named.get("functions", {}).items():
            self.code(name, spec)
        for name, spec in named.get("projections", {}).items():
            self.inline("projections", name, spec, "file", "statement")
            if "remote" in spec:
                spec["statement"] = projections.stand_in(spec["remote"])
        for name, spec in named.get("contracts", {}).items():
            self.inline("contracts", name, spec, "instructions_file", "instructions")
        entities = named.get("entities", {})
        seeds = tuple(self.seed(n, spec, entities) for n, spec in enumerate(listed.get("seeds", ())))
        self.idle()
        told: dict[str, Any] = {kind: named.get(kind, {}) for kind in NAMED}
        told |= {kind: tuple(listed.get(kind, ())) for kind in LISTED}
        return Bundle(
            about["name"],
            about["version"],
            about.get("description"),
            about.get("requires", {}),
            seeds=seeds,
            migrations=tuple(Migration(each, tuple(migrations[each])) for each in _versions(migrations)),
            files=self.files,
            digest=files.digest(self.files),
            **told,
        )

    def merge(self, path: str, kind: str, into: dict[str, Any], items: Mapping[str, Any]) -> None:
        for name, spec in items.items():
            if name in into:
                there = self.places[kind, name].partition(":")[0]
                raise wrong(path, f"{kind}.{name}", f"{name!r} is in {there} already", "give one of them another name")
            into[name] = {} if spec is None else spec
            self.places[kind, name] = f"{path}: {kind}.{name}"

    def wrong(self, kind: str, name: str, at: str, why: str, hint: str | None = None) -> Invalid:
        return Invalid(f"{self.places[kind, name]}{'.' if at else ''}{at}: {why}", hint)

    def take(self, kind: str, name: str, at: str, path: str) -> str:
        """The text of a file that a definition names."""
        if path not in self.files or part_of(path) is not None:
            near = [each for each in self.files if part_of(each) is None]
            raise self.wrong(
                kind, name, at, f"there is no file {files.shown(path)}", documents.did_you_mean(path, near) or None
            )
        self.used.add(path)
        return documents.text(path, self.files[path])

    def inline(self, kind: str, name: str, spec: dict[str, Any], at: str, into: str) -> None:
        if at in spec:
            spec[into] = self.take(kind, name, at, spec.pop(at))

    def code(self, name: str, spec: dict[str, Any]) -> None:
        path = spec.get("file", "")
        self.inline("functions", name, spec, "file", "code")
        language = LANGUAGES.get(os.path.splitext(path)[1], "python")
        if path and "language" not in spec and os.path.splitext(path)[1] not in LANGUAGES:
            raise self.wrong(
                "functions",
                name,
                "language",
                "is missing, and its file does not tell",
                "python, javascript, sql, executable",
            )
        spec.setdefault("language", language)

    def seed(self, n: int, spec: Mapping[str, Any], entities: Mapping[str, Any]) -> Seed:
        rows = spec.get("rows")
        if rows is None:
            path = spec["file"]
            content = self.take("seeds", str(n), "file", path)
            rows = list(
                _lines(path, content) if path.endswith(".jsonl") else _cells(path, content, spec["entity"], entities)
            )
        return Seed(spec["entity"], tuple(spec["key"]), tuple(rows))

    def idle(self) -> None:
        """Refuses files that nothing names: what is there and does nothing is a mistake, or hides something."""
        for path in self.files:
            kept = path.startswith(("docs/", "tests/", "README", "LICENSE"))
            if part_of(path) is None and path not in self.used and not kept:
                where = re.split("[/.]", path)[0]
                raise wrong(
                    path,
                    "",
                    "no definition names this file",
                    f"name it in {'contracts' if where == 'instructions' else where}.yaml, or move it to docs/",
                )


def _versions(migrations: Iterable[str]) -> list[str]:
    """Their versions in order."""
    for version in migrations:
        file = f"migrations/{version}.yaml"
        if documents.problems("version", file, version):
            raise wrong(file, "", "is not called after a version", "e.g. migrations/1.1.0.yaml")
    return sorted(migrations, key=_numbers)


def part_of(path: str) -> str | None:
    """Which definition of the schema a YAML file follows; None for every other file."""
    folder, _, name = path.rpartition("/")
    stem, dot, end = name.rpartition(".")
    if dot and end == "yaml":
        if not folder:
            return stem
        if folder in files.PARTS or folder == "migrations":
            return folder
    return None


def _empty(part: str, value: Any) -> Any:
    """An empty file says nothing, which most may."""
    return {} if value is None and part not in ("bundle", "signature", "migrations") else value


# Rows


def _lines(path: str, content: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_once, parse_constant=_refused)
        except (ValueError, RecursionError) as error:
            raise wrong(path, f"line {number}", f"is not JSON: {str(error)[:120]}") from None
        if not isinstance(row, dict):
            raise wrong(path, f"line {number}", "is not an object", "a row is {field: value}")
        yield row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no number that can be stored")


def _cells(path: str, content: str, entity: str, entities: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a CSV file, by the types of their fields; an empty cell is no value, as it is when rows are imported."""
    if entity not in entities:
        raise wrong(path, "", f"the types of {entity!r} are another bundle's", "give its rows as .jsonl")
    kinds = {name: kind_of(spec) for name, spec in entities[entity]["fields"].items()}
    reader = csv.DictReader(io.StringIO(content, newline=""), strict=True)
    try:
        names = reader.fieldnames or []
        if len(set(names)) != len(names):
            raise wrong(path, "line 1", "a column is there twice")
        if unknown := [name for name in names if name not in kinds]:
            raise wrong(
                path, "line 1", f"{entity!r} has no field {unknown[0]!r:.60}", documents.did_you_mean(unknown[0], kinds)
            )
        for cells in reader:
            if None in cells or None in cells.values():
                raise wrong(path, f"line {reader.line_num}", f"has not the {len(names)} cells of the first line")
            yield {name: _cell(path, reader.line_num, kinds[name], cell) for name, cell in cells.items() if cell != ""}
    except csv.Error as error:
        raise wrong(path, f"line {reader.line_num}", f"is not CSV: {error}") from None


def _cell(path: str, line: int, kind: str, cell: str) -> Any:
    try:
        if kind in ("int", "ref") and not cell.startswith("{"):
            return int(cell)
        if kind == "float":
            return float(cell)
        if kind == "bool":
            return {"true": True, "false": False, "1": True, "0": False}[cell.lower()]
        if kind in ("json", "ref") or cell[0] == '"':
            return json.loads(cell, object_pairs_hook=_once, parse_constant=_refused)
    except (ValueError, KeyError, RecursionError):
        raise wrong(path, f"line {line}", f"{cell!r:.60} is not {kind}") from None
    return cell


def kind_of(spec: Any) -> str:
    """The type that a field is written with."""
    said = spec if isinstance(spec, str) else spec["type"]
    return str((said.removesuffix("!").split() or [""])[0])
