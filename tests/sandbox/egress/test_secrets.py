"""Values go where rules name them and come back as placeholders; they are in no repr."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livinglayer.errors import Invalid, LimitExceeded
from livinglayer.sandbox.egress import secrets
from livinglayer.sandbox.egress.secrets import Secrets, Used

VALUE = 'se"cret/v&lue +1'


def test_a_placeholder_is_swapped_only_where_it_is_allowed() -> None:
    known, used = Secrets({"A": "value-a", "AB": "value-ab"}), Used()
    text = b"LAYER_SECRET_A LAYER_SECRET_AB LAYER_SECRET_C"
    assert known.swap(text, {"A"}, secrets.plain, used) == b"value-a LAYER_SECRET_AB LAYER_SECRET_C"
    assert (used.swapped, used.kept) == ({"A"}, {"AB"})


def test_each_place_has_its_own_spelling() -> None:
    known = Secrets({"A": VALUE})
    ways = {
        way.__name__: known.swap(b"LAYER_SECRET_A", {"A"}, way, Used())
        for way in (secrets.in_query, secrets.in_form, secrets.in_json)
    }
    assert ways == {
        "in_query": b"se%22cret%2Fv%26lue%20%2B1", "in_form": b"se%22cret%2Fv%26lue+%2B1", "in_json": b'se\\"cret/v&lue +1',
    }  # fmt: skip
    for spelled in ways.values():
        assert known.hide(b"<" + spelled + b">") == b"<LAYER_SECRET_A>"


def test_basic_credentials_are_opened() -> None:
    known, used = Secrets({"A": "value-a"}), Used()
    header = b"Basic " + base64.b64encode(b"user:LAYER_SECRET_A")
    swapped = known.swap_header(b"authorization", header, {"A"}, used)
    assert swapped == b"Basic " + base64.b64encode(b"user:value-a") and used.swapped == {"A"}
    assert known.hide(swapped) == header
    assert known.swap_header(b"authorization", header, (), Used()) == header
    assert known.swap_header(b"authorization", b"Basic !!", {"A"}, Used()) == b"Basic !!"


def test_a_header_takes_no_line_breaks() -> None:
    with pytest.raises(Invalid) as caught:
        Secrets({"A": "one\r\nX: two"}).swap_header(b"x", b"LAYER_SECRET_A", {"A"}, Used())
    assert "two" not in str(caught.value)


@pytest.mark.parametrize("values", [{"A": ""}, {"A": "abc"}, {"A-B": "value"}, {"A": 5}, {"": "value"}])
def test_what_can_be_no_secret_is_refused_without_saying_it(values: dict[str, str]) -> None:
    with pytest.raises(Invalid) as caught:
        Secrets(values)
    assert "value" not in str(caught.value)


def test_values_are_in_no_repr() -> None:
    known = Secrets({"A": "value-a"})
    assert "value" not in repr(known) + repr(known.redactor()) + repr(vars(known.scanner(Used())))


@given(
    st.lists(st.sampled_from([b"value-a", b"value-ab", b"val", b"ue-a", b"v", b"x", b"-", b""]), max_size=12),
    st.randoms(),
)
def test_redaction_does_not_depend_on_the_borders_of_chunks(parts: list[bytes], random) -> None:  # type: ignore[no-untyped-def]
    known, text = Secrets({"A": "value-a", "AB": "value-ab"}), b"".join(parts)
    whole = known.hide(text)
    assert b"value-a" not in whole
    redactor, out, at = known.redactor(), b"", 0
    while at < len(text):
        size = random.randint(1, 5)
        out += redactor.feed(text[at : at + size])
        at += size
    assert out + redactor.end() == whole
    same, blotted, at = known.redactor(same_length=True), b"", 0
    while at < len(text):
        blotted += same.feed(text[at : at + 3])
        at += 3
    blotted += same.end()
    assert len(blotted) == len(text) and b"value-a" not in blotted


def test_nothing_is_held_back_without_need() -> None:
    redactor = Secrets({"A": "value-a"}).redactor()
    assert [redactor.feed(part) for part in (b"data: 1\n\n", b"va", b"n", b"valu", b"e-a!")] == [
        b"data: 1\n\n", b"", b"van", b"", b"LAYER_SECRET_A!",
    ]  # fmt: skip


def test_a_scanner_notes_what_leaves() -> None:
    used = Used()
    scanner = Secrets({"A": "value-a"}).scanner(used)
    for part in (b"xLAYER_", b"SECRET", b"_A"):
        scanner.feed(part)
    assert used.kept == {"A"}


def test_few_bytes_do_not_become_many() -> None:
    known = Secrets({"A": "x" * 5000})
    with pytest.raises(LimitExceeded):
        known.swap(b"LAYER_SECRET_A" * 5000, {"A"}, secrets.plain, Used())
    with pytest.raises(LimitExceeded):
        for number in range(200):
            known.swap_header(
                b"authorization", b"Basic " + base64.b64encode(b"%d:LAYER_SECRET_A" % number), {"A"}, Used()
            )
