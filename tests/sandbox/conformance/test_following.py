"""What servers of boxes need: commands that many follow and feed, and files with owners and attributes, parts and changes."""

import json
import struct
from typing import Any

import pytest

from livinglayer.errors import Conflict, LayerError, NotFound
from livinglayer.sandbox.wire import ERROR, RESULT, STARTED, STDERR, STDOUT

CREATE, MODIFY, MOVED_FROM, MOVED_TO, REMOVE = 0x100, 0x2, 0x40, 0x80, 0x200


def heard(following: Any) -> dict[int, bytes]:
    """All that is said of a command, by kind."""
    found: dict[int, bytes] = {}
    while RESULT not in found and ERROR not in found:
        for kind, payload in following.next():
            found[kind] = found.get(kind, b"") + payload
    return found


@pytest.mark.core
def test_a_command_is_started_and_followed_in_one_request(box: Any) -> None:
    said = heard(box.follow_start(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"]))
    assert (said[STDOUT], said[STDERR], json.loads(said[RESULT])["exit_code"]) == (b"out\n", b"err\n", 3)
    assert struct.unpack("<I", said[STARTED])[0] > 0
    assert len(heard(box.follow_start(["/bin/sh", "-c", "head -c 3000000 /dev/zero"]))[STDOUT]) == 3_000_000
    assert json.loads(heard(box.follow_start(["/no/such/command"]))[ERROR])["of"] == "command"


def test_it_goes_on_when_nobody_follows_and_others_may_follow_and_feed_it(box: Any) -> None:
    first = box.follow_start(["/bin/cat"], stdin=True, notes={"tag": "mine"})
    pid = struct.unpack("<I", first.next()[0][1])[0]
    first.leave()
    (found,) = box.processes()
    assert (found["pid"], found["stdin"], found["pty"], found["notes"]) == (pid, True, False, {"tag": "mine"})
    second = box.follow_process(tag="mine")
    third = box.follow_process(pid)
    into = box.input(pid)
    into.send(b"one ")
    into.send(b"two")
    into.end()
    with pytest.raises(Conflict, match="no terminal"):
        wrong = box.input(pid, terminal=True)
        wrong.send(b"x")
        wrong.end()
    box.input(pid, close=True).end()
    for each in (second, third):
        said = heard(each)
        assert (struct.unpack("<II", said[STARTED]), said[STDOUT]) == ((pid, 0), b"one two")
    assert json.loads(heard(box.follow_process(pid))[RESULT])["exit_code"] == 0  # it ended just now
    with pytest.raises(NotFound, match=f"process with pid {pid} not found"):
        box.signal(9, pid)


def test_a_process_is_signalled_by_its_number(box: Any) -> None:
    following = box.follow_start(["/bin/sh", "-c", "sleep 4711.25 & sleep 4711.25"])
    pid = struct.unpack("<I", following.next()[0][1])[0]
    with pytest.raises(Conflict, match="tty not assigned"):
        box.resize(10, 10, pid)
    box.signal(9, pid, tree=True)
    assert json.loads(heard(following)[RESULT])["exit_code"] == -9
    assert box.run("pgrep -f 'sleep 4711.2[5]' | wc -l").stdout.text.strip() == "0"


def test_users_of_a_box(box: Any, tier: str) -> None:
    assert box.who("user")["home"] == "/home/user"
    if tier != "process":  # which has one
        assert box.who("root") == {"uid": 0, "gid": 0, "name": "root", "home": "/root"}
        with pytest.raises(NotFound):
            box.who("nobody-here")


def test_what_is_made_belongs_to_its_owner(box: Any, tier: str) -> None:
    if tier == "process":
        pytest.skip("it has one user")
    box.files.mkdir("/srv/made/deep", user="root", owner="user")
    writing = box.files.open("/srv/made/other/file", user="root", owner="user")
    writing.send(b"content")
    assert writing.end() == 7
    owners = {entry.path: (entry.owner, entry.group) for entry in box.files.list("/srv", depth=3, user="root")}
    assert owners == dict.fromkeys(
        ("/srv/made", "/srv/made/deep", "/srv/made/other", "/srv/made/other/file"), ("user", "user")
    )
    box.files.move("/srv/made/other/file", "/srv/moved/file", user="root", owner="user")
    assert box.files.stat("/srv/moved", user="root").owner == "user"


def test_attributes_are_replaced(box: Any, spot: str, tier: str) -> None:
    def write(**marks: str) -> None:
        given = {f"user.mine.{name}": value for name, value in marks.items()}
        box.files.open(f"{spot}/marked", attributes=given, prefix="user.mine.").end()

    try:
        write(a="1", b="two words")
    except LayerError as error:
        assert error.details["errno"] == 95, error  # a file system that has none
        pytest.skip(f"tier {tier} keeps no attributes here")
    assert box.files.stat(f"{spot}/marked").attributes == {"user.mine.a": "1", "user.mine.b": "two words"}
    write(b="3")
    assert {entry.name: entry.attributes for entry in box.files.list(spot)}["marked"] == {"user.mine.b": "3"}
    write()
    assert box.files.stat(f"{spot}/marked").attributes == {}


def test_a_part_of_a_file(box: Any, spot: str) -> None:
    box.files.write(f"{spot}/part", bytes(range(256)) * 1000)
    assert b"".join(box.files.pieces(f"{spot}/part", part=(255, 3))) == b"\xff\0\1"
    assert b"".join(box.files.pieces(f"{spot}/part", part=(255_999, 10))) == b"\xff"
    assert b"".join(box.files.pieces(f"{spot}/part", part=(300_000, 10))) == b""
    assert len(b"".join(box.files.pieces(f"{spot}/part"))) == 256_000
    with pytest.raises(NotFound):
        list(box.files.pieces(f"{spot}/nothing"))


def test_where_links_lead(box: Any, spot: str, tier: str) -> None:
    box.files.mkdir(f"{spot}/place")
    box.files.link("place", f"{spot}/link")
    box.files.link("nowhere", f"{spot}/broken")
    broken, link = box.files.stat(f"{spot}/broken"), box.files.stat(f"{spot}/link")
    assert (broken.target, broken.leads, link.target) == ("nowhere", None, "place")
    if tier != "process":
        assert link.leads.endswith("/place") and link.leads_mode & 0o170000 == 0o040000


def test_changes_are_gathered_until_they_are_asked_for(box: Any, spot: str, tier: str) -> None:
    if tier == "gvisor":
        pytest.skip("what a watch tells there is tested with watches")
    name = box.files.gather(spot, recursive=True, notes={"of": "mine"})
    box.run("echo 1 > new; mkdir -p a/b; echo 2 > a/b/c; mv new old; rm old", cwd=spot)
    found = box.files.gathered(name)
    events = [(mask & 0xFFF, path) for mask, path in found["events"]]
    assert (found["path"], found["notes"]) == (spot, {"of": "mine"})
    for wanted in ((CREATE, "new"), (MODIFY, "new"), (CREATE, "a"), (CREATE, "a/b"), (CREATE, "a/b/c"), (MOVED_FROM, "new"), (MOVED_TO, "old"), (REMOVE, "old")):  # fmt: skip
        assert wanted in events, events
    assert box.files.gathered(name)["events"] == []
    box.files.gather_no_more(name)
    with pytest.raises(NotFound, match="not found"):
        box.files.gathered(name)
    with pytest.raises(NotFound):
        box.files.gather(f"{spot}/nothing")
