"""What rules say, how they are refused, and that no spelling of a path slips by one."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from livinglayer.errors import Invalid
from livinglayer.sandbox.egress import rules
from livinglayer.sandbox.egress.rules import Ask


def allowed(
    given: list[Any], protocol: str, host: str, port: int, method: str | None = "GET", path: str | None = "/"
) -> bool:
    rule = rules.decide(rules.parse(given), Ask(protocol, host, port, method, path))
    return rule is not None and rule.action == "allow"


@pytest.mark.parametrize(
    ("rule", "ask", "answer"),
    [
        ("pypi.test", ("https", "pypi.test", 443), True),
        ("pypi.test", ("http", "pypi.test", 80), True),
        ("pypi.test", ("https", "pypi.test", 8443), False),
        ("pypi.test", ("http", "pypi.test", 443), False),
        ("pypi.test", ("https", "a.pypi.test", 443), False),
        ("pypi.test", ("https", "notpypi.test", 443), False),
        ("pypi.test", ("https", "pypi.test.evil.test", 443), False),
        ("PyPI.test.", ("https", "pypi.test", 443), True),
        ("pypi.test:8443", ("https", "pypi.test", 8443), True),
        ("pypi.test:8443", ("https", "pypi.test", 443), False),
        ("pypi.test/", ("https", "pypi.test", 443), True),
        ("*.test", ("https", "a.test", 443), True),
        ("*.test", ("https", "a.b.test", 443), True),
        ("*.test", ("https", "test", 443), False),
        ("*.test", ("https", "atest", 443), False),
        ("*.test", ("https", "1.2.3.4", 443), False),
        ("*", ("https", "anything.example", 443), True),
        ("*", ("https", "1.2.3.4", 443), True),
        ("1.2.3.4", ("http", "1.2.3.4", 80), True),
        ("https://api.test/v1/*", ("https", "api.test", 443, "POST", "/v1/x/y"), True),
        ("https://api.test/v1/*", ("https", "api.test", 443, "GET", "/v1"), False),
        ("https://api.test/v1/*", ("https", "api.test", 443, "GET", "/v10/x"), False),
        ("https://api.test/v1/*", ("http", "api.test", 80, "GET", "/v1/x"), False),
        ("https://api.test:8443/v1/*", ("https", "api.test", 8443, "GET", "/v1/x"), True),
        ("https://api.test/", ("https", "api.test", 443, "GET", "/any"), True),
        ("https://api.test/only", ("https", "api.test", 443, "GET", "/only"), True),
        ("https://api.test/only", ("https", "api.test", 443, "GET", "/only/more"), False),
        ("wss://api.test/socket", ("https", "api.test", 443, "GET", "/socket"), True),
        ("tcp://db.test:5432", ("tcp", "db.test", 5432, None, None), True),
        ("tcp://db.test:5432", ("tcp", "db.test", 5433, None, None), False),
        ("db.test", ("tcp", "db.test", 80, None, None), False),
        ({"host": "*.test", "port": 443, "method": ["GET"], "path": "/x/*", "protocol": "https"}, ("https", "a.test", 443, "GET", "/x/1"), True),
        ({"host": "*.test", "method": "get"}, ("https", "a.test", 443, "GET"), True),
        ({"host": "*.test", "method": "get"}, ("https", "a.test", 443, "HEAD"), False),
        ({"host": "a.test", "port": [80, 8080]}, ("http", "a.test", 8080), True),
        ({"host": "a.test", "tls": "pass"}, ("https", "a.test", 443, None, None), True),
        ({"host": "a.test", "tls": "pass"}, ("https", "a.test", 443, "GET"), False),
        ({"host": "a.test", "path": "/a b/*"}, ("https", "a.test", 443, "GET", "/a%20b/c"), True),
        ({"host": "a.test", "path": "/ü*"}, ("https", "a.test", 443, "GET", "/%C3%BCx"), True),
        ({"host": "a.test", "path": "*.json"}, ("https", "a.test", 443, "GET", "/x/y.json"), True),
        ({"host": "a.test", "path": "/@scope%2fname"}, ("https", "a.test", 443, "GET", "/other%2fname"), False),
    ],
)  # fmt: skip
def test_what_a_rule_allows(rule: Any, ask: tuple[Any, ...], answer: bool) -> None:
    assert allowed([rule], *ask) is answer


def test_nothing_is_allowed_by_no_rule() -> None:
    assert not allowed([], "https", "a.test", 443)


def test_the_first_match_decides() -> None:
    some = [{"host": "a.test", "path": "/admin*", "action": "deny"}, "*.test"]
    assert allowed(some, "https", "a.test", 443, "GET", "/x")
    assert not allowed(some, "https", "a.test", 443, "GET", "/admin/x")
    assert allowed(some, "https", "b.test", 443, "GET", "/admin/x")
    assert not allowed([{"host": "a.test", "action": "deny"}, "tcp://a.test:22"], "tcp", "a.test", 22, None, None)


@pytest.mark.parametrize(
    "rule",
    [
        "", "://", "ftp://a.test", "a.test/x", "https://a.test/x?y=1", "https://a.test/#x", "https://u@a.test/", "https://a.test:0/",
        "https://a.test:99999/", "https:///x", "*.*.test", "a.*.test", "*a.test", "**", "[::1]", "http://[::1]/", "tcp://db.test", "*.1.2.3.4",
        "a.test\n", "a.test\0", "0x7f.1", 7, None, ["a.test"], {}, {"host": 3}, {"host": "a.test", "prot": 1}, {"host": "a.test", "port": "443"},
        {"host": "a.test", "port": True}, {"host": "a.test", "port": 0}, {"host": "a.test", "port": []}, {"host": "a.test", "method": []},
        {"host": "a.test", "method": "G T"}, {"host": "a.test", "method": 3}, {"host": "a.test", "path": "x"}, {"host": "a.test", "path": 1},
        {"host": "a.test", "bytes": "10X"}, {"host": "a.test", "bytes": -1}, {"host": "a.test", "bytes": True}, {"host": "a.test", "rate": "10"},
        {"host": "a.test", "rate": "0/s"}, {"host": "a.test", "rate": 10}, {"host": "a.test", "protocol": "udp"}, {"host": "a.test", "secrets": "A-B"},
        {"host": "a.test", "secrets": [1]}, {"host": "a.test", "swap": "header"}, {"host": "a.test", "secrets": "A", "swap": "path"}, {"host": "a.test", "private": "yes"}, {"host": "a.test", "resolve": "b.test"},
        {"host": "a.test", "resolve": "0x7f.1"}, {"host": "a.test", "resolve": "1.2.3.4:x"}, {"host": "a.test", "action": "maybe"},
        {"host": "a.test", "tls": "off"}, {"host": "a.test", "tls": "pass", "path": "/x"}, {"host": "a.test", "tls": "pass", "secrets": "A"},
        {"host": "a.test", "tls": "pass", "protocol": "http"}, {"host": "a.test", "protocol": "tcp", "port": 1, "secrets": "A"},
    ],
)  # fmt: skip
def test_a_rule_that_makes_no_sense_is_refused(rule: Any) -> None:
    with pytest.raises(Invalid, match="egress rule"):
        rules.parse([rule])


@pytest.mark.parametrize("given", ["a.test", {"host": "a.test"}, b"x"])
def test_rules_are_a_list(given: Any) -> None:
    with pytest.raises(Invalid, match="not a list"):
        rules.parse(given)


def test_sizes_and_rates() -> None:
    [rule] = rules.parse([{"host": "a.test", "bytes": "10M", "rate": "30/m"}])
    assert (rule.bytes, rule.rate) == (10 << 20, (30, 60))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../admin", "/v1/%2e%2e/admin", "/v1/%2E./admin", "/v1/.%2e/admin", "/v1/..%2fadmin", "/v1/..%2Fadmin", "/v1/%2e%2e%2fadmin",
        "/v1/%252e%252e%252fadmin", "/v1/%252e%252e/admin", "/v1/..%5cadmin", "/v1/%2e%2e%5Cadmin", "/v1/..;/admin", "/v1/..;x=y/admin",
        "/v1/x/../../admin", "/v1/./../admin", "/v1//../../admin", "/v1/..", "/v1/%2e%2e", "/v1/x/..%2f..%2f..%2fadmin", "/v1%2f..%2fadmin",
        "/v1/%25252e%25252e/admin", "/v1/..%2fv1/", "/v1/x%2f..%2f..%2fv1/admin",
    ],
)  # fmt: skip
def test_no_spelling_of_dots_leaves_an_allowed_path(path: str) -> None:
    assert not allowed([{"host": "a.test", "path": "/v1/*"}], "https", "a.test", 443, "GET", path)


@pytest.mark.parametrize(
    "path",
    [
        "/admin", "/%61dmin", "/x/../admin", "/x/%2e%2e/admin", "//admin", "/./admin", "/%2fadmin", "/;/admin", "/admin;x", "/%2561dmin",
        "/x%2f..%2fadmin", "/admin%2fx",
    ],
)  # fmt: skip
def test_no_spelling_of_a_denied_path_is_allowed(path: str) -> None:
    given = [{"host": "a.test", "path": "/admin*", "action": "deny"}, "a.test"]
    assert not allowed(given, "https", "a.test", 443, "GET", path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "x",
        "*",
        "http://a.test/",
        "/a b",
        "/a\0",
        "/a%00",
        "/a%0a",
        "/a%7f",
        "/ä",
        "/a\\b",
        "/a#b",
        "/%" + "25" * 9 + "41",
    ],
)
def test_a_path_that_can_be_read_in_too_many_ways_is_refused(path: str) -> None:
    with pytest.raises(Invalid):
        rules.readings(path)


def test_scoped_names_pass() -> None:
    assert rules.readings("/@scope%2fname") == ("/@scope%2fname", "/@scope%2Fname", "/@scope/name")
    assert allowed(["https://npm.test/@scope*"], "https", "npm.test", 443, "GET", "/@scope%2fname")


@given(
    st.lists(
        st.sampled_from(["..", ".", "v1", "%2e", "%2E%2e", "%2f", "/", "%5c", ";", "x", "%25", "2e", "2f", "admin"]),
        max_size=9,
    )
)
@example(["v1", "/", "%25", "2e", "%25", "2e", "%25", "2f", "admin"])
def test_what_an_allow_rule_lets_through_is_below_it_for_every_server(parts: list[str]) -> None:
    path = "/v1/" + "".join(parts)
    if not allowed([{"host": "a.test", "path": "/v1/*"}], "https", "a.test", 443, "GET", path):
        return
    sent = rules.readings(path)[0]
    for _ in range(4):  # servers that decode once, twice, …, then resolve dots by either slash
        depth = 0
        parts_seen = [part for part in sent.replace("\\", "/").split("/") if part not in ("", ".")]
        for part in parts_seen:
            depth += -1 if part.partition(";")[0] == ".." else 1
            assert depth >= 1 and parts_seen[0] == "v1", sent
        sent = unquote(sent)


@given(st.text("ab*", max_size=8), st.text("ab", max_size=10))
def test_globs_are_what_they_seem(pattern: str, text: str) -> None:
    import re

    wanted = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None
    assert rules.glob(pattern, text) is wanted


def test_globs_are_never_slow() -> None:
    assert not rules.glob("/" + "a*" * 500 + "b", "/" + "a" * 20000)


def test_names_that_get_an_address() -> None:
    given = rules.parse(
        [
            {"host": "no.good.test", "action": "deny"},
            {"host": "few.good.test", "port": 22, "action": "deny"},
            "*.good.test",
        ]
    )
    assert [rules.names_allowed(given, name) for name in ("a.good.test", "no.good.test", "few.good.test", "good.test", "evil.test")] == [
        True, False, True, False, False,
    ]  # fmt: skip


def test_a_bucket_refills() -> None:
    bucket = rules.Bucket((2, 1), 100.0)
    assert [bucket.take(100.0) for _ in range(3)] == [0, 0, 1]
    assert bucket.take(100.5) == 0
    assert rules.Bucket((1, 3600), 0).take(0) == 0
