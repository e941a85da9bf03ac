"""E2B's volumes, with its own client: files that stay, shared by boxes, reached from outside, and that nothing leads out of."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from edges.serving import Server

from livinglayer.errors import LayerError

e2b = pytest.importorskip("e2b")


@pytest.fixture
def api(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The owner's settings of E2B's client."""
    given = {**server.e2b(), "E2B_VOLUME_API_URL": server.url}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given


@pytest.fixture
def volume(api: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Any]:
    """A volume of a test's own."""
    made = e2b.Volume.create(request.node.originalname)
    yield made
    for box in e2b.Sandbox.list().next_items():
        if any(mount["name"] == made.name for mount in getattr(box, "volume_mounts", None) or []):
            e2b.Sandbox.kill(box.sandbox_id)
    e2b.Volume.destroy(made.volume_id)


def ask(url: str, method: str, token: str | None, data: bytes | None = None) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def test_it_is_made_found_and_removed(api: dict[str, str]) -> None:
    made = e2b.Volume.create("vol1")
    assert made.token
    assert [(v.name, v.volume_id) for v in e2b.Volume.list()] == [("vol1", made.volume_id)]
    assert e2b.Volume.get_info(made.volume_id).token == e2b.Volume.connect(made.volume_id).token == made.token
    with pytest.raises(e2b.VolumeException, match="exists already"):
        e2b.Volume.create("vol1")
    with pytest.raises(e2b.VolumeException, match="can't be the name"):
        e2b.Volume.create("../../etc")
    assert e2b.Volume.destroy(made.volume_id)
    assert not e2b.Volume.destroy(made.volume_id)
    assert e2b.Volume.list() == []
    with pytest.raises(e2b.exceptions.VolumeNotFoundException):
        e2b.Volume.get_info(made.volume_id)


def test_its_files_from_outside(volume: Any) -> None:
    assert volume.write_file("/a.txt", "one").size == 3
    assert volume.write_file("/deep/er/b.bin", b"\0\1", mode=0o600, uid=0, gid=0).mode == 0o600
    assert volume.read_file("/a.txt") == "one"
    assert volume.read_file("/deep/er/b.bin", format="bytes") == b"\0\1"
    assert b"".join(volume.read_file("/a.txt", format="stream")) == b"one"
    made = volume.make_dir("/d/e", force=True, mode=0o700)
    assert (made.path, made.type.value, made.mode) == ("/d/e", "directory", 0o700)
    with pytest.raises(e2b.VolumePathNotFoundException if hasattr(e2b, "VolumePathNotFoundException") else Exception):
        volume.make_dir("/no/where")
    assert [(entry.path, entry.type.value) for entry in volume.list("/", depth=2)] == [
        ("/a.txt", "file"), ("/d", "directory"), ("/d/e", "directory"), ("/deep", "directory"), ("/deep/er", "directory"),
    ]  # fmt: skip
    assert [entry.name for entry in volume.list("/deep/er")] == ["b.bin"]
    assert volume.exists("/a.txt") and not volume.exists("/b.txt")
    assert volume.update_metadata("/a.txt", mode=0o640, uid=1000).mode == 0o640
    assert volume.get_info("/a.txt").uid == 1000
    volume.remove("/deep")
    volume.remove("/a.txt")
    assert [entry.path for entry in volume.list("/")] == ["/d"]
    with pytest.raises(e2b.exceptions.NotFoundException):
        volume.read_file("/a.txt")


def test_boxes_share_it_and_it_stays(server: Server, volume: Any) -> None:
    mounts = {"/mnt/data": volume.name}
    first = e2b.Sandbox.create(volume_mounts=mounts)
    second = e2b.Sandbox.create(volume_mounts=mounts)
    first.commands.run("echo from the first > /mnt/data/note && chmod 600 /mnt/data/note")
    assert second.commands.run("cat /mnt/data/note").stdout == "from the first\n"  # its ids are the same in both
    assert volume.read_file("/note") == "from the first\n"
    volume.write_file("/outside", "from outside")
    assert first.commands.run("stat -c '%U' /mnt/data/outside; cat /mnt/data/outside").stdout == "user\nfrom outside"
    with pytest.raises(e2b.VolumeException, match="in use"):
        e2b.Volume.destroy(volume.volume_id)
    first.kill()
    second.kill()
    server.restart()
    third = e2b.Sandbox.create(volume_mounts=mounts)
    assert third.commands.run("cat /mnt/data/note", user="root").stdout == "from the first\n"
    third.kill()


def test_it_is_no_larger_than_its_limit(server: Server, api: dict[str, str]) -> None:
    server.layer.call("volume.create", {"name": "small", "bytes": "8M"})
    volume = e2b.Volume.connect(next(v.volume_id for v in e2b.Volume.list() if v.name == "small"))
    box = e2b.Sandbox.create(volume_mounts={"/mnt/data": "small"})
    with pytest.raises(e2b.CommandExitException, match="uota"):
        box.commands.run("dd if=/dev/zero of=/mnt/data/big bs=1M count=32")
    with pytest.raises(Exception, match="full"):
        volume.write_file("/more", os.urandom(16 << 20))
    assert not volume.exists("/more")  # half a file is none
    box.kill()
    e2b.Volume.destroy(volume.volume_id)


def test_no_path_leads_out_of_it(server: Server, volume: Any) -> None:
    box = e2b.Sandbox.create(volume_mounts={"/mnt/data": volume.name})
    box.commands.run(
        "cd /mnt/data && ln -s /etc/passwd absolute && ln -s ../../../../etc relative && ln -s /proc/self/root magic && "
        "mkfifo pipe && ln -s loop loop && mkdir real && ln -s real inside && ln /mnt/data/absolute hard"
    )
    box.kill()
    url = f"{server.url}/volumecontent/{volume.volume_id}"
    for path in ("/absolute", "/relative/passwd", "/magic/etc/passwd", "/loop", "/pipe", "/hard", "/../../etc/passwd", "/real/../../x",
                 "/inside/../../../etc/passwd", "//../etc/passwd", "/absolute/", "a%00b"):  # fmt: skip
        status, answer = ask(f"{url}/file?path={path}", "GET", volume.token)
        assert status in (400, 404), (path, answer)
    status, _ = ask(f"{url}/file?path=/relative/planted", "PUT", volume.token, b"x")
    assert status in (400, 404)
    volume.write_file("/absolute", "mine")  # the link is replaced, what it named is not touched
    assert volume.read_file("/absolute") == "mine"
    volume.write_file("/inside/file", "x")
    assert volume.read_file("/real/file") == "x"
    volume.remove("/relative")
    volume.remove("/magic")
    assert os.path.exists("/etc/passwd")
    assert volume.get_info("/inside").target == "real"


def test_whoever_has_no_token_of_it_reaches_nothing(server: Server, volume: Any) -> None:
    other = e2b.Volume.create("other")
    url = f"{server.url}/volumecontent/{volume.volume_id}/path?path=/"
    for token in (None, other.token, server.key(), volume.token[:-1], "é"):
        assert ask(url, "GET", token)[0] == 401, token
    assert ask(f"{server.url}/volumecontent/nothing/path?path=/", "GET", volume.token)[0] == 401
    assert ask(url, "GET", volume.token)[0] == 200
    e2b.Volume.destroy(other.volume_id)


def test_a_volume_is_its_principals_own(server: Server, volume: Any) -> None:
    key = server.key("ann")
    with pytest.raises(e2b.VolumeException, match=r"may not call verb:volume\.create"):
        e2b.Volume.create("mine", api_key=key)
    server.layer.grant("ann", "call", "verb:volume.create")
    server.layer.grant("ann", "call", "box:base")
    mine = e2b.Volume.create(volume.name, api_key=key)  # a name is one's own
    assert [v.volume_id for v in e2b.Volume.list(api_key=key)] == [mine.volume_id]
    assert not e2b.Volume.destroy(volume.volume_id, api_key=key)
    with pytest.raises(e2b.exceptions.VolumeNotFoundException):
        e2b.Volume.connect(volume.volume_id, api_key=key)
    with pytest.raises(e2b.SandboxException, match="no volume"):
        e2b.Sandbox.create(volume_mounts={"/mnt/data": volume.volume_id}, api_key=key)
    assert e2b.Volume.destroy(mine.volume_id, api_key=key)


@pytest.mark.parametrize("path", ["relative", "/", "/etc/x", "/proc", "/mnt/../etc", "/usr"])
def test_a_volume_is_mounted_where_it_can_do_no_harm(volume: Any, path: str) -> None:
    with pytest.raises(e2b.SandboxException, match="can't be mounted"):
        e2b.Sandbox.create(volume_mounts={path: volume.name})


def test_odd_requests_are_refused(server: Server, volume: Any) -> None:
    url = f"{server.url}/volumecontent/{volume.volume_id}"
    for method, rest, data in (
        ("GET", "path", None), ("GET", "nothing?path=/", None), ("GET", "dir?path=/&depth=0", None), ("GET", "dir?path=/&depth=x", None),
        ("POST", "dir?path=/d&mode=99999", None), ("POST", "dir?path=/d&uid=70000", None), ("PATCH", "path?path=/", b"{"),
        ("PATCH", "path?path=/", b'{"mode": true}'), ("PATCH", "path?path=/", b"[]"), ("DELETE", "path?path=/", None),
        ("PUT", "file?path=/", b"x"), ("PUT", "file?path=/x&force=perhaps", b"x"), ("GET", "file?path=/", None), ("POST", "path?path=/", b""),
    ):  # fmt: skip
        status, answer = ask(f"{url}/{rest}", method, volume.token, data)
        assert status in (400, 404, 405) and set(answer) == {"code", "message"}, (method, rest, status, answer)
    assert volume.list("/") == []


@pytest.mark.torture
@pytest.mark.parametrize("tier", ["container", "gvisor"])
def test_owners_are_the_same_at_every_tier_that_can(server: Server, volume: Any, tier: str) -> None:
    call = server.layer.call
    call("blueprint.define", {"name": tier, "tier": tier})
    mounts = [{"name": volume.name, "path": "/mnt/data"}]
    boxes = [call("box.open", {"blueprint": name, "volumes": mounts})["box"] for name in (tier, "base")]
    call("box.run", {"box": boxes[0], "command": "echo theirs > /mnt/data/note && chmod 600 /mnt/data/note"})
    seen = call("box.run", {"box": boxes[1], "command": "stat -c %u:%g /mnt/data/note && cat /mnt/data/note"})
    assert seen["stdout"] == "1000:1000\ntheirs\n"
    call(
        "box.run",
        {"box": boxes[1], "command": "echo root > /mnt/data/root && chmod 4755 /mnt/data/root", "user": "root"},
    )
    assert call("box.run", {"box": boxes[0], "command": "stat -c %u /mnt/data/root"})["stdout"] == "0\n"
    for box in boxes:
        call("box.kill", {"box": box})


@pytest.mark.torture
@pytest.mark.parametrize("tier", ["process", "microvm"])
def test_tiers_that_can_not_refuse(server: Server, volume: Any, tier: str) -> None:
    server.layer.call("blueprint.define", {"name": tier, "tier": tier})
    with pytest.raises(LayerError, match="can't show volumes"):
        server.layer.call("box.open", {"blueprint": tier, "volumes": [{"name": volume.name, "path": "/mnt/data"}]})


@pytest.mark.torture
def test_no_race_leads_out_of_it(server: Server, volume: Any) -> None:
    box = e2b.Sandbox.create(volume_mounts={"/mnt/data": volume.name}, timeout=120)
    swap = "cd /mnt/data; while :; do ln -sfn /etc x; rm -f x; mkdir x 2>/dev/null; rm -rf x; ln -sfn ../../../etc x; rm -f x; done"
    for _ in range(2):
        box.commands.run(swap, background=True)
    url = f"{server.url}/volumecontent/{volume.volume_id}"
    secret = open("/etc/passwd", "rb").read()
    for turn in range(400):
        request = urllib.request.Request(
            f"{url}/file?path=/x/passwd", headers={"authorization": f"Bearer {volume.token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.read() != secret
        except urllib.error.HTTPError as error:
            assert error.code in (400, 404, 409)
        for method, rest in (("PUT", "file?path=/x/e2b-planted"), ("POST", "dir?path=/x/e2b-made&force=true"), ("DELETE", "path?path=/x"),
                             ("GET", "dir?path=/&depth=5"), ("PATCH", "path?path=/x/hostname")):  # fmt: skip
            data = b'{"mode": 511}' if method == "PATCH" else b"x" if method == "PUT" else None
            assert ask(f"{url}/{rest}", method, volume.token, data)[0] < 500, (turn, method)
    box.kill()
    assert not os.path.exists("/etc/e2b-planted") and not os.path.exists("/etc/e2b-made")


def test_times_that_no_date_can_tell_and_more_names_than_are_listed(volume: Any) -> None:
    box = e2b.Sandbox.create(volume_mounts={"/data": volume.name})
    box.commands.run(
        "mkdir /data/far; touch /data/far/f; python3 -c 'import os; os.utime(\"/data/far/f\", (2**40, -(2**40)))'"
    )
    (entry,) = volume.list("/far")
    assert (entry.atime.year, entry.mtime.year) == (9999, 1)
    box.commands.run("mkdir /data/many; cd /data/many; seq 10001 | xargs touch")
    with pytest.raises(e2b.exceptions.RateLimitException, match="more than 10000 entries"):
        volume.list("/many")
    volume.remove("/many")
    assert [entry.name for entry in volume.list("/")] == ["far"]


def test_files_in_the_way_of_a_mount_are_no_error_of_the_server(volume: Any) -> None:
    with e2b.Sandbox.create() as box:
        box.commands.run("ln -s /nowhere/at/all /data; touch /file; ln -s /loop /loop", user="root")
        kept = box.create_snapshot()
    for path in ("/data", "/data/below", "/file/below", "/loop"):
        with pytest.raises(e2b.SandboxException, match="400: files of its base are in the way"):
            e2b.Sandbox.create(kept.snapshot_id, volume_mounts={path: volume.name})
    e2b.Sandbox.delete_snapshot(kept.snapshot_id)
