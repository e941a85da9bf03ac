"""What the pages show works, what they link to is there, and what a user can meet is on a page."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sandbox.escape.world import load
from sandbox.hosts import Host, wait_until

from livinglayer import Layer, errors
from livinglayer.edges.cli import (
    agents,
    approvals,
    boxes,
    bundles,
    contracts,
    decide,
    demo,
    functions,
    images,
    layers,
    mcp,
    projections,
    replay,
    secrets,
    serving,
    usage,
    why,
    workers,
)
from livinglayer.edges.cli import (
    rows as row_commands,
)
from livinglayer.edges.cli.commands import COMMANDS
from livinglayer.inside import layer_command
from livinglayer.law import tending
from livinglayer.sandbox.blueprint import TIERS, Blueprint, parse_size
from livinglayer.settings import Settings
from livinglayer.substrate import postgres, schema, sqlite, values
from livinglayer.substrate.permissions import ACTIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
LAW = ("agents.md", "functions.md", "replay.md")  # pages whose snippets need a layer whose functions run in boxes
BOXES = ("sandbox.md", "tiers.md", "threat-model-boxes.md")  # pages whose snippets need boxes, and no layer


def snippets(boxes: bool = False) -> list[tuple[str, int, str]]:
    """Every block marked ```python, with its page and line: of the pages about the layer, or of those about boxes."""
    found = []
    for name, text in PAGES.items():
        if (name in BOXES) != boxes:
            continue
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S):
            found.append((name, text.count("\n", 0, block.start()) + 1, block[1]))
    return found


@pytest.mark.parametrize(
    ("page", "line", "code"), snippets(), ids=lambda part: str(part) if "\n" not in str(part) else ""
)
def test_a_snippet_runs(
    page: str, line: int, code: str, layer: Layer, location: str, tmp_path: Path, make_location: Callable[[], str],
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if page in LAW:
        for name, value in request.getfixturevalue("host").environment().items():
            monkeypatch.setenv(name, value)
        tending.of(layer).look()  # else a process is started that does
    names = {
        "layer": layer,
        "location": location,
        "directory": tmp_path,
        "elsewhere": make_location() if "elsewhere" in code else None,
    }
    exec(compile("\n" * line + code, page, "exec"), names)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    made = Host()
    try:
        yield made
        made.hang_up()
        made.stop()
        wait_until(lambda: not made.remains(), "nothing of the host is left")
    finally:
        made.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="boxes above tier process need root")
@pytest.mark.parametrize(
    ("page", "line", "code"), snippets(boxes=True), ids=lambda part: str(part) if "\n" not in str(part) else ""
)
def test_a_snippet_about_boxes_runs(
    page: str, line: int, code: str, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in host.environment().items():
        monkeypatch.setenv(name, value)
    exec(compile("\n" * line + code, page, "exec"), {"directory": tmp_path})


def test_most_pages_show_something() -> None:
    shown = {page for page, _, _ in snippets() + snippets(boxes=True)}
    assert shown >= {
        "sandbox.md",
        "egress.md",
        "index.md",
        "schema.md",
        "writing.md",
        "reading.md",
        "branches.md",
        "permissions.md",
        "trust.md",
        "format.md",
    }


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    wrong = []
    text = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (DOCS / name).resolve() if name else DOCS / page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            wrong.append(target)
    assert wrong == []


def test_every_page_is_on_the_map() -> None:
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", PAGES["index.md"]))
    assert linked == set(PAGES) - {"index.md"}


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_that_are_named_are_there(page: str) -> None:
    wrong, last = [], ""
    for name in re.findall(r"`([^`\n]+)`", PAGES[page]):
        path, _, test = name.partition("::")
        if re.fullmatch(r"(tests|substrate|sandbox|edges)/[\w/]*(\.py|\.c|\.txt)?", path):
            last = path
            if not any((at / path).exists() for at in (ROOT, ROOT / "livinglayer")):
                wrong.append(name)
        elif path or not test.startswith("test_"):
            continue
        if test and f"def {test}(" not in (ROOT / last).read_text():
            wrong.append(f"{last}::{test}")
    assert wrong == []


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports when it runs; those needed for types alone are left out."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and child.level:
                module = child.module or ""
                found.update(
                    [module.rsplit(".", 1)[-1]] if module not in ("", "substrate") else [a.name for a in child.names]
                )
            walk(child)

    walk(ast.parse(path.read_text()))
    return found


def test_the_drawing_names_every_file_and_imports_go_down_in_it() -> None:
    drawing = re.search(r"^```text imports\n(.*?)^```", PAGES["architecture.md"], re.M | re.S)
    assert drawing
    lines = [re.split(r"  +", line)[0].split(", ") for line in drawing[1].splitlines() if re.match(r"\w", line)]
    height = {name: -place for place, names in enumerate(lines) for name in names}
    files = {path.stem: path for at in ("", "substrate") for path in (ROOT / "livinglayer" / at).glob("*.py")}
    del files["__init__"]
    assert set(files) == set(height) - {"edges/cli"}
    wrong = [
        (name, other)
        for name, path in files.items()
        for other in imported(path) & set(height)
        if height[other] >= height[name]
    ]
    assert wrong == []


def test_the_drawing_of_the_law_names_every_file_and_imports_go_down_in_it() -> None:
    drawing = re.search(r"^```text imports law\n(.*?)^```", PAGES["architecture.md"], re.M | re.S)
    assert drawing
    lines = [re.split(r"  +", line)[0].split(", ") for line in drawing[1].splitlines() if re.match(r"\w", line)]
    height = {name: -place for place, names in enumerate(lines) for name in names}
    files = {path.stem: path for path in (ROOT / "livinglayer" / "law").glob("*.py") if path.stem != "__init__"}
    assert set(files) == set(height)
    wrong = [
        (name, other) for name, path in files.items() for other in law_imports(path) if height[other] >= height[name]
    ]
    assert wrong == []


def law_imports(path: Path) -> set[str]:
    """The modules of the law that a file of it imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found


def imported_by_box(name: str, path: Path, files: dict[str, Path]) -> set[str]:
    """The modules of the sandbox that a file of it imports when it is imported itself."""
    found: set[str] = set()
    package = ["livinglayer", "sandbox", *name.split("/")[:-1]]

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            ):
                continue
            if isinstance(child, ast.ImportFrom):
                above = package[: len(package) - child.level + 1] if child.level else []
                words = [*above, *(child.module or "").split(".")] if child.module else above
                if words[:2] == ["livinglayer", "sandbox"]:
                    at = "/".join(words[2:])
                    names = [at] if at in files else [f"{at}/{alias.name}".strip("/") for alias in child.names]
                    found.update(each for each in names if each in files)
            walk(child)

    walk(ast.parse(path.read_text()))
    return found


def test_the_drawing_of_the_sandbox_names_every_file_and_imports_go_down_in_it() -> None:
    drawing = re.search(r"^```text imports sandbox\n(.*?)^```", PAGES["architecture.md"], re.M | re.S)
    assert drawing
    lines = [re.split(r"  +", line)[0].split(", ") for line in drawing[1].splitlines() if re.match(r"\w", line)]
    height = {name: -place for place, names in enumerate(lines) for name in names}
    place = ROOT / "livinglayer" / "sandbox"
    files = {str(path.relative_to(place).with_suffix("")): path for path in place.rglob("*.py")}
    files = {name: path for name, path in files.items() if path.name != "__init__.py"}
    assert set(files) == set(height)
    wrong = [
        (name, other)
        for name, path in files.items()
        for other in imported_by_box(name, path, files)
        if height[other] >= height[name]
    ]
    assert wrong == []
    shown = set(re.findall(r"`([\w.]+\.(?:c|txt))`", PAGES["architecture.md"]))
    assert shown >= {path.name for path in (place / "native").glob("*.c")} - {"main_agent.c"}


def rows(page: str, columns: int) -> list[list[str]]:
    """The cells of every Markdown table of a page that has so many columns."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGES[page].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines if len(line) == columns]


def test_every_setting_is_documented_with_its_default() -> None:
    said = {row[0].strip("`"): row[1] for row in rows("index.md", 3) if row[0].startswith("`")}
    assert {f.name: str(f.default) for f in dataclasses.fields(Settings)} == said


def test_every_field_of_a_blueprint_is_documented_with_its_default() -> None:
    said = {row[0].strip("`"): row[1] for row in rows("sandbox.md", 3) if row[0].startswith("`")}
    for field in dataclasses.fields(Blueprint):
        default = getattr(Blueprint(), field.name)
        if field.name in ("memory", "disk", "output"):
            assert parse_size(said[field.name]) == default, field.name
        elif not default or field.name == "idle":
            assert said[field.name] in ("none", "never"), field.name
        else:
            assert said[field.name] == str(default), field.name


def test_every_attack_that_is_named_is_made_and_every_kind_is_named() -> None:
    made = {*load()}
    kinds = {name.partition(".")[0] for name in made}
    named = set(re.findall(rf"`((?:{'|'.join(kinds)})\.[\w*]+)`", PAGES["threat-model-boxes.md"]))
    assert {name for name in named if not name.endswith("*")} <= made
    assert {name.partition(".")[0] for name in named} == kinds


def test_every_tier_is_documented() -> None:
    assert tuple(row[0].strip("`") for row in rows("tiers.md", 3) if row[0].startswith("`")) == TIERS
    assert ["", *TIERS] in rows("tiers.md", 7)


def test_every_error_is_documented_with_its_codes() -> None:
    said = {
        row[0].strip("`"): (row[1].strip("`"), int(row[2]), int(row[3]))
        for row in rows("writing.md", 5)
        if row[0].startswith("`")
    }
    kinds = [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, errors.LayerError)]
    assert {kind.__name__: (kind.code, kind.status, kind.exit_code) for kind in kinds} == said


def test_every_type_option_and_system_name_is_documented() -> None:
    text = " ".join(PAGES["schema.md"].split())
    assert {row[0].strip("`") for row in rows("schema.md", 4) if row[0].startswith("`")} == set(values.TYPES)
    assert [name for name in schema._DEFAULTS if f"`{name}`" not in text] == []
    system = re.search(r"The system's names are (.*?)\.", text)
    assert system and set(re.findall(r"\w+", system[1])) - {"and"} == set(schema.SYSTEM.by_name)
    reading = re.findall(r"`(\w+)`", re.search(r"## Names\n(.*?)\n## ", PAGES["reading.md"], re.S)[1])  # type: ignore[index]
    assert set(schema.SYSTEM.by_name) <= set(reading)


def test_every_conversion_is_documented() -> None:
    said = set()
    for old, new in rows("schema.md", 2):
        if old not in ("from", "---", "option") and not old.startswith(("`", "-")):
            said |= {(a, b) for a in old.split(", ") for b in new.split(", ")}
    assert said == {(a, b) for a in values.TYPES for b in values.TYPES if a != b and values.convertible(a, b)}


def test_every_action_is_documented() -> None:
    said = [
        word
        for row in rows("permissions.md", 3)
        for cell in (row[0], row[2])
        for word in re.findall(r"`([\w*]+)`", cell)
    ]
    assert [action for action in ACTIONS if action not in said] == []


def test_every_function_that_is_listed_may_be_called_and_sqlites_list_is_whole() -> None:
    lists = re.search(r"### Functions on SQLite\n(.*)### Functions on PostgreSQL\n(.*)", PAGES["reading.md"], re.S)
    assert lists
    listed = [set(re.search(r"`([^`]*)`", text)[1].split()) for text in lists.groups()]  # type: ignore[index]
    assert listed[0] == {name for name in sqlite.FUNCTIONS if name[0].isalpha()}
    refused = []
    for name in sorted(listed[1]):
        for given in ("", "a", "a, b", "a, b, 3", "a, 1", "'a', b"):
            try:
                postgres.checked(f"select {name}({given}) from t")
                break
            except errors.LayerError:
                continue
        else:
            refused.append(name)
    assert refused == []


def test_every_command_that_is_named_exists() -> None:
    parts = (
        boxes, images, secrets, functions, workers, why, contracts, projections, usage, replay, decide, agents, approvals, bundles, demo,
        row_commands, layers, mcp, serving,
    )  # fmt: skip
    groups = {name: text for part in parts for name, text in part.GROUPS.items()}
    known = {*COMMANDS, *groups, *layer_command.VERBS}  # the last in a box
    named = {
        words
        for text in PAGES.values()
        for words in re.findall(r"(?:`|^\$ )layer ([a-z]+(?: [a-z][a-z|-]*){0,2})", text, re.M)
    }
    wrong = []
    for words in named:
        first, *rest = words.split()
        while f"{first} {rest[0].split('|')[0]}" in known if rest else False:
            first = f"{first} {rest.pop(0).split('|')[0]}"
        wrong += [words] if first not in known or (first in groups and rest) else []
    assert wrong == []
    shown = {" ".join(name.split()[:2]) for name in COMMANDS if name.startswith("box ")}
    assert {name for name in shown if f"layer {name}" not in PAGES["sandbox.md"]} <= {
        "box pause", "box resume", "box suspend", "box list", "box ls", "box stats", "box expose", "box egress"
    }  # fmt: skip


def test_figures_of_limits_are_those_of_the_code() -> None:
    text = " ".join(PAGES["schema.md"].split())
    assert f"at most {schema.NAME_LENGTH} characters" in text and f"at most {schema.INDEXED_BYTES} bytes" in text
    assert f"at most {values.DECIMAL_DIGITS} digits" in text and f"at most {values.JSON_DEPTH} deep" in text
