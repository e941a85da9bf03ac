"""Lists that narrow a blueprint's egress: what they leave is never more than the blueprint allows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from livinglayer.errors import Invalid
from livinglayer.sandbox.egress.narrow import narrow, secrets_of, shown
from livinglayer.sandbox.egress.rules import Ask, Rule, decide, names_allowed, parse
from livinglayer.sandbox.egress.secrets import Secrets

ALL = ["*", {"host": "*", "protocol": "tcp", "port": "*"}]


def allowed(rules: Any, host: str, port: int = 443, protocol: str = "https") -> Rule | None:
    http = protocol != "tcp"
    known = rules if isinstance(rules, tuple) else parse(rules)
    found = decide(known, Ask(protocol, host, port, "GET" if http else None, "/" if http else None))
    return found if found is not None and found.action == "allow" else None


def test_nothing_wanted_changes_nothing() -> None:
    assert narrow(ALL, {}) == ALL
    assert narrow(ALL, {"allow": [], "deny": []}) == ALL


def test_what_is_allowed_beats_what_is_denied() -> None:
    rules = narrow(ALL, {"allow": ["api.test", "*.ok.test", "10.0.0.0/24", "1.1.1.1"], "deny": ["0.0.0.0/0"]})
    for host in ("api.test", "a.ok.test", "a.b.ok.test", "10.0.0.7", "1.1.1.1"):
        assert allowed(rules, host) and allowed(rules, host, 22, "tcp"), host
    for host in ("ok.test", "other.test", "10.0.1.7", "1.1.1.2", "api.test.evil.test"):
        assert not allowed(rules, host) and not allowed(rules, host, 22, "tcp"), host
    assert not names_allowed(parse(rules), "other.test")  # it has no address, so no question of it leaves


def test_an_allow_list_alone_allows_nothing_else() -> None:
    rules = narrow(ALL, {"allow": ["1.1.1.1"]})
    assert allowed(rules, "1.1.1.1") and not allowed(rules, "8.8.8.8") and not allowed(rules, "one.test")


def test_a_network_that_is_denied_is_left_out_wherever_a_name_leads() -> None:
    rules = narrow(ALL, {"deny": ["10.0.0.0/8"], "allow": ["10.0.0.7", "good.test"]})
    assert allowed(rules, "10.0.0.7") and not allowed(rules, "10.0.0.8") and allowed(rules, "9.9.9.9")
    other, good = allowed(rules, "other.test"), allowed(rules, "good.test")
    assert other and good
    assert any(str(net) == "10.128.0.0/9" for net in other.without) and not good.without


def test_names_can_be_denied_too() -> None:
    rules = narrow(ALL, {"deny": ["*.evil.test"], "allow": ["fine.evil.test"]})
    assert not allowed(rules, "a.evil.test") and allowed(rules, "fine.evil.test") and allowed(rules, "other.test")
    assert allowed(rules, "fine.evil.test", 22, "tcp")


def test_headers_are_set_where_requests_may_go_anyway() -> None:
    rules = narrow(["api.test"], {"headers": {"*.test": {"X-Key": "wide"}, "api.test": {"X-Key": "own"}, "elsewhere.example": {"X-Key": "x"}}})  # fmt: skip
    found = allowed(rules, "api.test")
    assert found and dict(found.headers) == {"x-key": "own"}
    assert not allowed(rules, "elsewhere.example") and not allowed(rules, "other.test")
    assert "own" not in found.text and "own" not in repr(found)
    assert shown({"headers": {"api.test": {"X-Key": "own"}}}) == {"headers": {"api.test": ["X-Key"]}}


def test_a_secret_in_a_header_is_named_and_goes_over_https_alone() -> None:
    rules = narrow(["api.test"], {"headers": {"api.test": {"Authorization": "Bearer ${e2b.secrets.MODEL_KEY}"}}})
    over, clear = allowed(rules, "api.test"), allowed(rules, "api.test", 80, "http")
    assert secrets_of(rules) == ["MODEL_KEY"]
    assert over and dict(over.headers) == {"authorization": "Bearer LAYER_SECRET_MODEL_KEY"} and not over.swap
    assert clear and not clear.headers and not clear.secrets


def test_what_was_given_once_is_not_given_again() -> None:
    rules = parse(
        narrow([{"host": "*", "bytes": "10M", "rate": "5/s"}], {"allow": ["a.test", "b.test"], "deny": ["c.test"]})
    )
    assert len({rule.account for rule in rules if rule.action == "allow"}) == 1


def test_never_wider_than_the_blueprint() -> None:
    chance = random.Random(7)
    hosts = [
        "*",
        "a.test",
        "b.a.test",
        "*.a.test",
        "*.test",
        "10.0.0.0/8",
        "10.1.0.0/16",
        "10.1.2.3",
        "1.1.1.1",
        "0.0.0.0/0",
    ]
    asked = [
        "a.test",
        "b.a.test",
        "c.b.a.test",
        "x.test",
        "other.example",
        "10.1.2.3",
        "10.2.3.4",
        "1.1.1.1",
        "8.8.8.8",
    ]
    for _ in range(300):
        base: list[Any] = []
        for _ in range(chance.randint(0, 4)):
            rule: dict[str, Any] = {"host": chance.choice(hosts), "action": chance.choice(["allow", "allow", "deny"])}
            if chance.random() < 0.3:
                rule |= {"protocol": "tcp", "port": chance.choice([22, "*"])}
            base.append(rule)
        wanted = {key: chance.sample(hosts, chance.randint(0, 3)) for key in ("allow", "deny")}
        rules, whole = parse(narrow(base, wanted)), parse(base)
        for host in asked:
            for port, protocol in ((443, "https"), (80, "http"), (22, "tcp")):
                if allowed(rules, host, port, protocol):
                    assert allowed(whole, host, port, protocol), (base, wanted, host, port)


@pytest.mark.parametrize("wanted", [
    [], {"more": []}, {"allow": "x"}, {"allow": [5]}, {"allow": ["0x7f.1"]}, {"allow": ["127.1"]}, {"allow": ["10.0.0.1/8"]}, {"deny": ["a/b"]},
    {"deny": ["::1/128"]}, {"allow": ["*.10.0.0.1"]}, {"headers": []}, {"headers": {"a.test": []}}, {"headers": {"a.test": {"Host": "b"}}},
    {"headers": {"a.test": {"A": "b\r\nC: d"}}}, {"headers": {"a.test": {"A b": "c"}}}, {"headers": {"a.test": {"A": 5}}},
    {"headers": {"a.test": {"A": "1", "a": "2"}}}, {"headers": {"a.test": {"Content-Length": "5"}}}, {"allow": ["x.test"] * 1001},
])  # fmt: skip
def test_what_is_no_list_of_hosts(wanted: Any) -> None:
    with pytest.raises(Invalid) as refused:
        narrow(ALL, wanted)
    assert "C: d" not in refused.value.message


def test_credentials_in_headers_are_hidden_and_other_words_are_not() -> None:
    secrets = Secrets({})
    secrets.also([("x-env", "production"), ("x-api-key", "hunter2-hunter2"), ("authorization", "Bearer abcdefgh"), ("x-odd", "AKIA0123456789ABCDEFG"), ("x-key", "b")])  # fmt: skip
    said = b'production "hunter2-hunter2" abcdefgh AKIA0123456789ABCDEFG b'
    assert secrets.hide(said) == b'production "LAYER_HEADER" LAYER_HEADER LAYER_HEADER b'
