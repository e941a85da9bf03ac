"""Definitions are written in one form, which says the same and stays the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundle.test_load import desk
from hypothesis import given, settings
from hypothesis import strategies as st

from livinglayer.bundle import documents, write
from livinglayer.bundle.load import Bundle, Seed, load, of_files

ROOT = Path(__file__).parents[2]


def said(bundle: Bundle) -> Bundle:
    """What a bundle defines, whatever its files look like."""
    return replace(bundle, files={}, digest="", signer=None)


def test_what_is_written_says_the_same_and_is_a_fixed_point() -> None:
    bundle = of_files(desk())
    made = write.files_of(bundle)
    again = of_files(made)
    assert said(again) == said(bundle)
    assert write.files_of(again) == made


@pytest.mark.parametrize("name", [each.name for each in sorted((ROOT / "bundles").glob("*/"))])
def test_the_bundles_of_this_project_can_be_written_back(name: str) -> None:
    bundle = load(ROOT / "bundles" / name)
    made = write.files_of(bundle)
    assert said(of_files(made)) == said(bundle)
    assert write.files_of(of_files(made)) == made


def test_the_form() -> None:
    made = write.files_of(of_files(desk()))
    assert made["bundle.yaml"] == b'name: desk\nversion: "1.1.0"\ndescription: A help desk.\n'
    assert (
        made["schema.yaml"].decode()
        == """\
entities:
  customer:
    fields:
      name: text!
      email: {type: text!, unique: true}
  ticket:
    description: What somebody asks for.
    fields:
      title: text!
      customer: ref customer!
      who: ref principal
      status: {type: state, transitions: {new: [open], open: [done], done: []}}
      priority: {type: int, check: priority > 0}
      due: date
      price: decimal
    unique: [[customer, title]]
"""
    )
    assert (
        made["projections.yaml"].decode()
        == """\
projections:
  open_tickets:
    statement: |
      select id, title
      from ticket
      where status = :status
    parameters: {status: text}
"""
    )
    assert made["functions/ticket.triage.py"] == desk()["functions/triage.py"]
    assert (
        made["migrations/1.1.0.yaml"].decode()
        == """\
steps:
  - {rename: {entity: ticket, field: name, to: title}}
  - {set: {entity: ticket, values: {priority: 1}}}
"""
    )


def test_the_order_of_definitions_makes_no_difference() -> None:
    bundle = of_files(desk())
    turned = replace(
        bundle,
        entities=dict(reversed(bundle.entities.items())),
        contracts={name: dict(reversed(spec.items())) for name, spec in bundle.contracts.items()},
    )
    assert write.files_of(turned) == write.files_of(bundle)


def test_states_are_written_in_the_order_in_which_they_are_come_to() -> None:
    moves: dict[str, Any] = {"closed": [], "new": ["open"], "open": ["closed"]}
    spec = {"entities": {"a": {"fields": {"s": {"type": "state", "transitions": moves, "initial": "new"}}}}}
    assert b"{type: state, transitions: {new: [open], open: [closed], closed: []}, initial: new}" in write.document("schema", spec)  # fmt: skip


def test_many_rows_have_a_file_of_their_own() -> None:
    rows = tuple({"email": f"{n}@b.c", "name": "x"} for n in range(100))
    bundle = replace(of_files(desk()), seeds=(Seed("customer", ("email",), rows), Seed("customer", ("email",), tuple({"email": f"{n}@c.c", "name": "x"} for n in range(51)))))  # fmt: skip
    made = write.files_of(bundle)
    assert made["seeds/customer.jsonl"].startswith(b'{"email": "0@b.c", "name": "x"}\n')
    assert said(of_files(made)) == said(bundle)
    assert "seeds/customer-2.jsonl" in made


@pytest.mark.parametrize("code", ["x = 1\r\ny = 2\r\n", "\ufeffx = 1", "# \x0c\nx = 1\n", "", "x = 'ü\u2028'\n"])
def test_code_that_a_file_would_change_is_written_where_it_is(code: str) -> None:
    bundle = replace(of_files({"bundle.yaml": b"name: x\nversion: 1.0.0\n"}), functions={"a.b": {"code": code, "language": "executable"}})  # fmt: skip
    if "\x0c" in code:  # no text of YAML, so it needs its file
        assert b"file: functions/a.b.sh" in write.files_of(bundle)["functions.yaml"]
    assert said(of_files(write.files_of(bundle))) == said(bundle)


# Any value

characters = st.characters(exclude_categories=("Cs",), exclude_characters="\0") | st.sampled_from(
    list(" \n\t:#-'\"{}[],&*!|>%@`\\~?=.0123")
)
texts = st.text(characters, max_size=20).filter(lambda text: not documents.CONTROL.search(text)) | st.sampled_from(
    ["null", "true", "no", "~", "1", "1.5", "0x1", "-", "- a", "a: b", "a #b", "#", "a:", ":a", "2026-01-01", "a\nb", "a\n b\n", " a\nb", "a\n\nb\n", "a\n\n", "\n", "a \nb", "a\n  \nb", "| a", "...", "---", "a\r\nb", "\u2028", "é\n\u0085", "yes", "<<", "=", "a\tb", "a\n\tb"]
)  # fmt: skip
keys = texts.filter(lambda text: 0 < len(text) <= 200 and text.isprintable())
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=500)
@given(anything)
def test_any_value_is_read_as_it_was_written(value: Any) -> None:
    assert json.dumps(documents.parse("x", write.text(value).encode())) == json.dumps(value)
