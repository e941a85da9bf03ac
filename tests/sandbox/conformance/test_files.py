"""Files: the box's own paths, with its user's rights, whatever the box has planted there."""

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox.hosts import Host

from livinglayer.errors import Conflict, Denied, Invalid, LayerError, LimitExceeded, NotFound


@pytest.mark.core
def test_what_is_written_is_read(box: Any, spot: str) -> None:
    path = f"{spot}/new/deep/a"
    data = bytes(range(256)) * 300
    assert box.files.write(path, data) == len(data)
    assert box.files.read(path) == data
    assert box.run(["wc", "-c", "new/deep/a"], cwd=spot).stdout == f"{len(data)} new/deep/a\n"
    assert box.files.write(path, "ü") == 2
    assert box.files.read(path) == "ü".encode()  # shorter than before, and nothing of that left
    box.files.write(path, b"!", append=True)
    box.files.write(path, io.BytesIO(b"?"), append=True)
    assert box.files.read(path) == "ü!?".encode()
    assert box.files.write(f"{spot}/empty", b"") == 0
    assert box.files.read(f"{spot}/empty") == b""


def test_a_large_file(box: Any, spot: str, tier: str) -> None:
    size = 64 if tier in ("process", "namespace", "container") else 24
    block = os.urandom(1 << 20)
    assert box.files.write(f"{spot}/large", block * size) == size << 20
    assert box.run("sha256sum < large", cwd=spot).stdout == box.run("cat large | sha256sum", cwd=spot).stdout
    assert box.files.read(f"{spot}/large") == block * size
    with pytest.raises(LimitExceeded, match="larger than"):
        box.files.read(f"{spot}/large", limit=1000)
    assert box.files.read(f"{spot}/large", limit=size << 20)[:100] == block[:100]
    box.files.remove(f"{spot}/large")


def test_a_large_write_that_is_refused_does_not_hang(box: Any, spot: str) -> None:
    large = bytes(32 << 20)
    box.files.mkdir(f"{spot}/directory")
    with pytest.raises(LayerError):
        box.files.write(f"{spot}/directory", large)
    with pytest.raises(Invalid):
        box.files.write("relative", large)
    with pytest.raises(LayerError):
        box.files.write(f"{spot}/directory", io.BytesIO(large))
    assert box.files.list(f"{spot}/directory") == []


@pytest.mark.core
def test_list_and_stat(box: Any, spot: str) -> None:
    box.files.write(f"{spot}/a", b"xyz", mode=0o640)
    box.files.mkdir(f"{spot}/d/e", mode=0o750)
    box.files.link("a", f"{spot}/l")
    found = {entry.name: entry for entry in box.files.list(spot)}
    assert {name: (entry.type, entry.path) for name, entry in found.items()} == {
        "a": ("file", f"{spot}/a"),
        "d": ("directory", f"{spot}/d"),
        "l": ("link", f"{spot}/l"),
    }
    assert (found["a"].size, found["a"].mode, found["l"].target) == (3, 0o640, "a")
    assert abs(found["a"].mtime - time.time()) < 120
    assert {entry.path for entry in box.files.list(spot, depth=2)} == {
        f"{spot}/{name}" for name in ("a", "d", "d/e", "l")
    }
    assert box.files.stat(f"{spot}/a") == found["a"]
    assert box.files.stat(f"{spot}/d/e").mode == 0o750
    assert box.files.stat("/").type == "directory"
    assert box.files.exists(f"{spot}/l")
    assert not box.files.exists(f"{spot}/nothing")


@pytest.mark.core
def test_move_remove_chmod(box: Any, spot: str) -> None:
    box.files.write(f"{spot}/a", b"1")
    box.files.write(f"{spot}/b", b"2")
    box.files.move(f"{spot}/a", f"{spot}/b")
    assert box.files.read(f"{spot}/b") == b"1"
    box.files.move(f"{spot}/b", f"{spot}/new/c")
    assert box.files.read(f"{spot}/new/c") == b"1"
    box.files.chmod(f"{spot}/new/c", 0)
    assert box.files.stat(f"{spot}/new/c").mode == 0
    box.files.chmod(f"{spot}/new/c", 0o755)  # its owner may, though it can't read it
    assert box.files.stat(f"{spot}/new/c").mode == 0o755
    box.run("mkdir -p t/u/v; touch t/f t/u/v/g; ln -s / t/root; ln -s missing t/nowhere", cwd=spot)
    box.files.remove(f"{spot}/t")
    box.files.remove(f"{spot}/new/c")
    assert [entry.name for entry in box.files.list(spot)] == ["new"]
    assert box.files.exists("/home/user")


def test_a_link_is_removed_and_not_what_it_leads_to(box: Any, spot: str) -> None:
    box.files.write(f"{spot}/kept/a", b"")
    box.files.link(f"{spot}/kept", f"{spot}/l")
    box.files.remove(f"{spot}/l")
    assert box.files.exists(f"{spot}/kept/a")


@pytest.mark.core
def test_what_can_t_be_done_has_a_name(box: Any, spot: str) -> None:
    files = box.files
    files.write(f"{spot}/a", b"")
    for act in (
        lambda: files.read(f"{spot}/missing"),
        lambda: files.list(f"{spot}/missing"),
        lambda: files.stat(f"{spot}/missing/deep"),
        lambda: files.remove(f"{spot}/missing"),
        lambda: files.move(f"{spot}/missing", f"{spot}/b"),
        lambda: files.chmod(f"{spot}/missing", 0o600),
    ):
        with pytest.raises(NotFound, match="missing"):
            act()
    with pytest.raises(Conflict):
        files.mkdir(spot)
    with pytest.raises(Conflict):
        files.link("x", f"{spot}/a")
    for act in (
        lambda: files.read(spot),
        lambda: files.list(f"{spot}/a"),
        lambda: files.write(f"{spot}/a/b", b""),
        lambda: files.read("relative"),
        lambda: files.read(""),
        lambda: files.read("/a\0b"),
        lambda: files.read("/" + "x" * 5000),
        lambda: files.list(spot, depth=0) if box.files.list(spot, depth=1) is None else files.list(spot, depth=1000),
        lambda: files.remove("/"),
    ):
        with pytest.raises(Invalid):
            act()
    with pytest.raises(LayerError):
        files.write(f"{spot}/{'x' * 300}", b"")


def test_names_of_any_bytes(box: Any, spot: str) -> None:
    expected = {"not\udcffutf8", "new\nline", "'quoted\\\"", " spaces ", "-rf", "ünï", "*", "$HOME"}
    make = "import os, sys\nfor name in sys.stdin.buffer.read().split(b'/'): open(name, 'x')"
    made = box.run(["python3", "-c", make], cwd=spot, stdin=os.fsencode("/".join(expected)))
    assert made.exit_code == 0, made.stderr
    names = {entry.name for entry in box.files.list(spot)}
    assert names == expected
    for name in names:
        box.files.write(f"{spot}/{name}", name.encode("utf-8", "surrogateescape"))
        assert box.files.read(f"{spot}/{name}") == name.encode("utf-8", "surrogateescape")
        box.files.move(f"{spot}/{name}", f"{spot}/moved-{name}")
        assert box.files.stat(f"{spot}/moved-{name}").name == f"moved-{name}"
        box.files.remove(f"{spot}/moved-{name}")
    assert box.files.list(spot) == []


@pytest.mark.core
def test_planted_links_lead_nowhere_but_into_the_box(box: Any, spot: str, here: Host) -> None:
    secret = here.state / "planted-secret"
    secret.write_text("of the host")
    for target in (
        str(secret),
        "/proc/1/root" + str(secret),
        "../" * 30 + str(secret),
        f"/proc/{here.pid}/root{secret}",
    ):
        box.run(["ln", "-sfn", target, "trap"], cwd=spot)
        box.run(["ln", "-sfn", os.path.dirname(target), "traps"], cwd=spot)
        for user in ("user", "root"):
            for path in (
                f"{spot}/trap",
                f"{spot}/traps/planted-secret",
                target if target[0] == "/" else f"{spot}/{target}",
            ):
                with pytest.raises((NotFound, Denied, Invalid)):
                    box.files.read(path, user=user)
        with pytest.raises((NotFound, Denied, Invalid, Conflict)):
            box.files.write(f"{spot}/traps/planted-secret/x", b"")
    assert secret.read_text() == "of the host"
    assert sorted(path.name for path in here.state.glob("planted*")) == ["planted-secret"]


def test_pipes_and_devices_are_not_files(box: Any, spot: str, tier: str) -> None:
    box.run("mkfifo pipe; ln -s pipe to-pipe", cwd=spot)
    assert box.files.stat(f"{spot}/pipe").type == "other"
    for path in (f"{spot}/pipe", f"{spot}/to-pipe"):
        with pytest.raises(Invalid):
            box.files.read(path)
        with pytest.raises(Invalid):
            box.files.write(path, b"x")
    if tier != "process":  # there "/dev" is not in the box's directory
        with pytest.raises(Invalid):
            box.files.read("/dev/zero")
        with pytest.raises(Invalid):
            box.files.write("/dev/null", b"x")
    box.files.remove(f"{spot}/pipe")


@pytest.mark.core
def test_the_rights_of_the_user_decide(box: Any, spot: str, tier: str) -> None:
    if tier == "process":  # one user
        box.files.write(f"{spot}/a", b"x", mode=0o600, user="root")
        assert box.files.read(f"{spot}/a", user="user") == b"x"
        return
    box.files.write("/root/secret", b"x", mode=0o600, user="root")
    box.files.write(f"{spot}/roots", b"x", mode=0o600, user="root")
    for act in (
        lambda: box.files.read("/root/secret"),
        lambda: box.files.list("/root"),
        lambda: box.files.read(f"{spot}/roots"),
        lambda: box.files.chmod(f"{spot}/roots", 0o666),
        lambda: box.files.write("/etc/planted", b"x"),
        lambda: box.files.write("/etc/passwd", b"x", append=True),
        lambda: box.files.mkdir("/planted"),
        lambda: box.files.move("/etc/passwd", f"{spot}/p"),
        lambda: box.files.remove("/etc/passwd"),
    ):
        with pytest.raises(Denied):
            act()
    assert box.files.read("/root/secret", user="root") == b"x"
    assert box.files.stat(f"{spot}/roots").uid == 0
    box.files.write(f"{spot}/mine", b"")
    assert (box.files.stat(f"{spot}/mine").uid, box.files.stat(f"{spot}/mine").gid) == (1000, 1000)
    with pytest.raises(NotFound, match="nobody-here"):
        box.files.read("/etc/passwd", user="nobody-here")


@pytest.mark.core
def test_changes_are_seen_by_who_watches(box: Any, spot: str) -> None:
    events = box.files.watch(spot, recursive=True)
    assert next(events).type == "ready"

    def wait_for(kind: str, path: str) -> None:
        seen = []
        for event in events:
            seen.append((event.type, event.path))
            if seen[-1] == (kind, path):
                return
        raise AssertionError(seen)

    box.run("touch a", cwd=spot)
    wait_for("create", f"{spot}/a")
    box.run("echo x > a", cwd=spot)
    wait_for("modify", f"{spot}/a")
    box.run("mkdir d", cwd=spot)
    wait_for("create", f"{spot}/d")
    time.sleep(0.3)
    box.files.write(f"{spot}/d/b", b"x")
    wait_for("create", f"{spot}/d/b")
    box.run("rm a", cwd=spot)
    wait_for("remove", f"{spot}/a")
    box.run("mv d e", cwd=spot)
    wait_for("move", f"{spot}/e")
    events.close()
    with pytest.raises(NotFound):
        next(box.files.watch(spot + "/missing"))


def test_trees_go_in_and_come_out(box: Any, spot: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name, content in {"a": b"1", "d/b": b"\0\xff" * 1000, "d/e/c": b""}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    (tree / "run").write_text("#!/bin/sh\necho ran\n")
    (tree / "run").chmod(0o755)
    (tree / "empty").mkdir()
    (tree / "link").symlink_to("d/b")
    (tree / "up").symlink_to("../..")
    assert box.files.upload(tree, f"{spot}/in") == 4
    assert box.run("./run; cat link | wc -c; ls -d empty", cwd=f"{spot}/in").stdout == "ran\n2000\nempty\n"
    back = tmp_path / "back"
    assert box.files.download(f"{spot}/in", back) == 4
    names = sorted(str(path.relative_to(back)) for path in back.rglob("*"))
    assert names == ["a", "d", "d/b", "d/e", "d/e/c", "empty", "link", "run"]  # not "up": it leads out
    assert (back / "link").readlink() == Path("d/b")
    assert (back / "d/b").read_bytes() == b"\0\xff" * 1000
    assert os.access(back / "run", os.X_OK)
    assert box.files.upload(tree / "a", f"{spot}/one") == 1
    assert box.files.download(f"{spot}/one", tmp_path / "one") == 1
    assert (tmp_path / "one").read_bytes() == b"1"
    with pytest.raises(NotFound):
        box.files.upload(tmp_path / "missing", spot)


def test_what_a_box_plants_stays_in_the_directory_it_is_downloaded_to(box: Any, spot: str, tmp_path: Path) -> None:
    box.run("ln -s /etc evil; ln -s ../.. up; ln -s evil chain; mkfifo pipe; ln -s . self; echo ok > fine", cwd=spot)
    target = tmp_path / "out" / "here"
    target.parent.mkdir()
    assert box.files.download(spot, target) == 1
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(tmp_path / "out"), path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_writer_that_leaves_midway_leaves_the_box_well(make: Callable[..., Any], here: Host) -> None:
    box = make()
    code = """
import os, signal
class Source:
    count = 0
    def read(self, size):
        self.count += 1
        if self.count > 3: os.kill(os.getpid(), signal.SIGKILL)
        return b"x" * size
Sandbox.connect(sys.argv[1]).files.write("/home/user/half", Source())
"""
    for _ in range(3):
        here.python(code, box.id)
    assert box.run("ls /proc/1/fd 2>/dev/null | wc -l").exit_code == 0
    box.files.write("/home/user/half", b"whole")
    time.sleep(0.2)
    assert box.files.read("/home/user/half") == b"whole"
