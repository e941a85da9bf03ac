"""What was recorded is answered again, without the network; what was not is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox.egress.boxes import Box, local
from sandbox.egress.servers import Servers

from livinglayer.errors import Corrupt, NotFound
from livinglayer.sandbox.egress.record import EMPTY, Recorder, Replay

MakeBox = Callable[..., Box]


def test_record_then_replay(make_box: MakeBox, servers: Servers, tmp_path: Path) -> None:
    file = str(tmp_path / "recording")
    rules = [local("index.test", servers.https), local("api.test", servers.h2)]

    def act(box: Box) -> list[tuple[int, str]]:
        return [
            box.curl("--http1.1", "https://index.test/a?x=1"),
            box.curl("--http2", "https://api.test/bytes/200000"),
            box.curl("-d", "one", "https://index.test/echo"),
            box.curl("-d", "two", "https://index.test/echo"),
            box.curl("https://index.test/redirect?to=/x"),
            box.curl("https://index.test/stream"),
            box.curl("-I", "https://index.test/head"),
        ]

    first = act(make_box(rules, record=file))
    reached, seen = servers.accepted, len(servers.seen)
    replaying = make_box(rules, replay=file)
    assert act(replaying) == first
    assert (servers.accepted, len(servers.seen)) == (reached, seen)
    assert replaying.events(7, verdict="allow", reason="replayed")
    status, text = replaying.curl("https://index.test/new")
    assert (status, text) == (403, "GET https://index.test/new is not in the recording\n")
    status, text = replaying.curl("https://index.test/a?x=1")
    assert (status, text) == (403, "GET https://index.test/a?x=1 is only 1 times in the recording\n")
    status, text = replaying.curl("-d", "three", "https://index.test/echo")
    assert status == 403 and "with body sha256:" in text
    assert servers.accepted == reached


def test_a_replay_keeps_to_the_rules_and_dials_nothing(make_box: MakeBox, servers: Servers, tmp_path: Path) -> None:
    file = str(tmp_path / "recording")
    make_box([local("index.test", servers.http)], record=file).curl("http://index.test/a")
    box = make_box(
        [local("api.test", servers.ws), local("db.test", servers.echo, protocol="tcp", port=5432)], replay=file
    )
    assert box.curl("http://index.test/a")[0] == 0
    reached = servers.accepted
    assert box.curl("-H", "Connection: Upgrade", "-H", "Upgrade: websocket", "http://api.test/")[0] == 403
    assert (
        box.python(
            "import socket\ntry: print(socket.create_connection(('db.test', 5432)).recv(1))\nexcept ConnectionResetError: print('reset')"
        )
        == "reset"
    )
    assert servers.accepted == reached


def test_what_is_replayed_and_recorded_goes_out_where_the_recording_ends(
    make_box: MakeBox, servers: Servers, tmp_path: Path
) -> None:
    old, new, rules = str(tmp_path / "old"), str(tmp_path / "new"), [local("index.test", servers.http)]
    first = make_box(rules, record=old).curl("-d", "one", "http://index.test/echo")
    reached = len(servers.seen)
    box = make_box(rules, replay=old, record=new)
    assert box.curl("-d", "one", "http://index.test/echo") == first and len(servers.seen) == reached
    second = box.curl("-d", "one", "http://index.test/echo")
    third = box.curl("-d", "two", "http://index.test/echo")
    assert (second[0], third[0], len(servers.seen)) == (200, 200, reached + 2) and "two" in third[1]
    assert [event["reason"] for event in box.events(3, verdict="allow", protocol="http")] == ["replayed", None, None]
    box.drop()
    again = make_box(rules, replay=new)
    assert [again.curl("-d", text, "http://index.test/echo") for text in ("one", "one", "two")] == [
        first,
        second,
        third,
    ]
    assert len(servers.seen) == reached + 2


def test_the_same_request_is_answered_in_order(tmp_path: Path) -> None:
    file, key = tmp_path / "recording", ("GET", "http://a.test/", EMPTY)
    for _ in range(2):  # the second run appends
        recorder = Recorder(file)
        first, second = recorder.begin(), recorder.begin()
        recorder.data(second, b"2")
        recorder.end(second, key, 200, [], [])  # ended first, began second
        recorder.data(first, b"1a")
        recorder.data(first, b"1b")
        recorder.end(first, key, 200, [(b"x", b"\xff")], [])
        cut_off = recorder.begin()
        recorder.data(cut_off, b"x")
        recorder.close()
    file.write_bytes(file.read_bytes() + b'{"id": "half')
    replay = Replay(file)
    assert [b"".join(replay.body(replay.find(key))) for _ in range(4)] == [b"1a1b", b"2", b"1a1b", b"2"]
    with pytest.raises(NotFound, match="only 4 times"):
        replay.find(key)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("line", [b"x\n", b"{}\n", b'{"id": 3}\n', b'{"id": "a-1", "method": "GET"}\n'])
def test_what_is_no_recording_is_corrupt(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "file").write_bytes(line)
    with pytest.raises(Corrupt, match="line 1"):
        Replay(tmp_path / "file")


def test_a_recording_that_is_not_there(make_box: MakeBox, tmp_path: Path) -> None:
    box = make_box([])
    answer, _ = box.gateway.ask(
        {"do": "open", "box": "other", "rules": [], "replay": str(tmp_path / "none")}, [box.tcp, box.dns]
    )
    assert answer["ok"] is False and answer["error"] == "not_found" and json.dumps(answer)
