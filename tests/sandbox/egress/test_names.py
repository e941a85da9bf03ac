"""One spelling for each host, and none for what only looks like one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livinglayer.errors import Invalid
from livinglayer.sandbox.egress import names


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("pypi.test", "pypi.test"),
        ("PyPI.Test", "pypi.test"),
        ("pypi.test.", "pypi.test"),
        (b"PYPI.test.", "pypi.test"),
        ("bücher.test", "xn--bcher-kva.test"),
        ("BÜCHER.test", "xn--bcher-kva.test"),
        ("faß.test", "xn--fa-hia.test"),
        ("xn--bcher-kva.test", "xn--bcher-kva.test"),
        ("pypi。test", "pypi.test"),
        ("_dmarc.a-b.test", "_dmarc.a-b.test"),
        ("93.184.216.34", "93.184.216.34"),
        ("93.184.216.34.", "93.184.216.34"),
        ("localhost", "localhost"),
        ("a" * 63 + ".test", "a" * 63 + ".test"),
    ],
)
def test_a_host_has_one_spelling(given: str | bytes, host: str) -> None:
    assert names.host(given) == host


@pytest.mark.parametrize(
    "given",
    [
        "", ".", "..", "pypi..test", ".pypi.test", "pypi.test..", "pypi.test\0", "pypi.test\0.evil.test", "pypi.test%00",
        "pypi.test%2eevil.test", "pypi.test\n", "pypi.test\r\nX: y", " pypi.test", "pypi.test ", "pypi\t.test", "user@pypi.test",
        "pypi.test@evil.test", "pypi.test:80", "pypi.test/", "pypi.test#", "pypi.test?", "pypi.test\\", "[::1]", "::1", "-a.test",
        "a-.test", "*.test", "0177.0.0.1", "0x7f.0.0.1", "0x7f000001", "2130706433", "127.1", "1.2.3.4.5",
        "999.1.1.1", "1.2.3", "01.2.3.4", "1.2.3.0x4", "a" * 64 + ".test", ".".join(["a" * 60] * 5), "pypi.test\x7f",
        b"b\xc3\xbccher.test", b"pypi.test\xff", "a\u200b\u3000.test", "\u2488.test", "pypi.test\u2028", "１２７.1",
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused(given: str | bytes) -> None:
    with pytest.raises(Invalid):
        names.host(given)


@given(st.one_of(st.text(max_size=40), st.binary(max_size=40)))
def test_the_spelling_of_a_spelling_is_itself(text: str | bytes) -> None:
    try:
        host = names.host(text)
    except Invalid:
        return
    assert names.host(host) == host == names.host(host.encode())
    assert set(host) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.")


@pytest.mark.parametrize(
    "given", ["h:0", "h:65536", "h:080", "h:+80", "h: 80", "h:8_0", "h:", "h:80:80", "h:８０", ":80", "a@h:80"]
)
def test_an_authority_is_a_host_and_a_plain_port(given: str) -> None:
    with pytest.raises(Invalid):
        names.authority(given, 80)
    assert names.authority("H.test.:8080", 80) == ("h.test", 8080)
    assert names.authority(b"h.test", 443) == ("h.test", 443)
