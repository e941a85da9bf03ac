"""Envd of a box as the unmodified `e2b` package asks it, and as nobody should."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    TimeoutException,
)
from edges.serving import Server

from livinglayer.sandbox.sandbox import Sandbox as Box

HTTP = httpx.Client(timeout=20)  # one: to make one takes longer than most requests
CREATE, CHMOD, WRITE, REMOVE, RENAME = (
    FilesystemEventType(name) for name in ("create", "chmod", "write", "remove", "rename")
)


@pytest.fixture(scope="module")
def box(server: Server) -> Iterator[Sandbox]:
    box = Sandbox.create(timeout=300, envs={"OF_THE_BOX": "1"}, **options(server))
    yield box
    box.kill()


def options(server: Server) -> dict[str, Any]:
    return {"api_url": server.url, "sandbox_url": server.url, "api_key": server.key()}


def headers(box: Sandbox, **more: str) -> dict[str, str]:
    return {
        "e2b-sandbox-id": box.sandbox_id, "e2b-sandbox-port": "49983", "x-access-token": str(box._envd_access_token),
    } | {name.replace("_", "-"): value for name, value in more.items()}  # fmt: skip


def call(server: Server, box: Sandbox, procedure: str, message: Any = None, **more: Any) -> httpx.Response:
    """One procedure without the client."""
    content = message if isinstance(message, bytes) else json.dumps(message or {}).encode()
    given = headers(box, content_type="application/json") | more.pop("headers", {})
    told = httpx.Headers(given, encoding="latin-1")
    return HTTP.post(f"{server.url}/{procedure}", content=content, headers=told, **more)


def frame(message: Any, flag: int = 0) -> bytes:
    content = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flag, len(content)) + content


def frames(content: bytes) -> list[tuple[int, Any]]:
    found = []
    while content:
        flag, length = struct.unpack(">BI", content[:5])
        found.append((flag, json.loads(content[5 : 5 + length])))
        content = content[5 + length :]
    return found


def stream(server: Server, box: Sandbox, procedure: str, content: bytes, **more: str) -> httpx.Response:
    given = headers(box, content_type="application/connect+json", **more)
    return HTTP.post(f"{server.url}/{procedure}", content=content, headers=given)


def opened(box: Sandbox) -> dict[str, Any]:
    """What is open in a box, as its host knows it."""
    return Box.connect(box.sandbox_id).metrics()


def settled(box: Sandbox) -> dict[str, int]:
    """The same when nothing is under way any more, or what still is after a while."""
    for _ in range(100):
        found = opened(box)
        if not found["open"] and not found["commands"]:
            break
        time.sleep(0.05)
    return {"open": found["open"], "commands": found["commands"]}


# ---- commands ----


def test_a_command_runs(box: Sandbox) -> None:
    seen: list[str] = []
    done = box.commands.run(
        "echo hi; echo no >&2; id -un; pwd; echo $OF_THE_BOX $HOME $USER $LOGNAME", on_stdout=seen.append
    )
    assert done.stdout == "hi\nuser\n/home/user\n1 /home/user user user\n"
    assert (done.stderr, done.exit_code, done.error, "".join(seen)) == ("no\n", 0, None, done.stdout)


def test_a_command_has_a_user_a_directory_and_an_environment(box: Sandbox) -> None:
    done = box.commands.run(
        "id -un; pwd; echo $A $OF_THE_BOX $HOME", user="root", cwd="/tmp", envs={"A": "1", "OF_THE_BOX": "2"}
    )
    assert done.stdout == "root\n/tmp\n1 2 /root\n"
    box.commands.run("mkdir -p ~/sub")
    assert (
        box.commands.run("pwd", cwd="sub").stdout == box.commands.run("pwd", cwd="~/sub").stdout == "/home/user/sub\n"
    )
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody-here'"):
        box.commands.run("true", user="nobody-here")
    with pytest.raises(InvalidArgumentException, match="cwd '/nowhere' does not exist"):
        box.commands.run("true", cwd="/nowhere")


def test_how_a_command_ended_is_told(server: Server, box: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        box.commands.run("echo out; echo err >&2; exit 3")
    assert (failed.value.exit_code, failed.value.error, failed.value.stdout, failed.value.stderr) == (3, "exit status 3", "out\n", "err\n")  # fmt: skip
    answer = stream(server, box, "process.Process/Start", frame({"process": {"cmd": "/bin/bash", "args": ["-c", "exit 3"]}, "stdin": False}))  # fmt: skip
    (_, start), (_, end), (flag, last) = frames(answer.content)
    assert start["event"]["start"]["pid"] > 1
    assert end == {
        "event": {"end": {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}}
    }
    assert (flag, last) == (2, {})
    answer = stream(
        server, box, "process.Process/Start", frame({"process": {"cmd": "/bin/bash", "args": ["-c", "kill -TERM $$"]}})
    )
    assert frames(answer.content)[1][1]["event"]["end"] == {"exitCode": -1, "exited": False, "status": "signal: terminated", "error": "signal: terminated"}  # fmt: skip


def test_commands_are_listed_killed_and_connected_to(server: Server, box: Sandbox) -> None:
    handle = box.commands.run("echo early; sleep 100", background=True, envs={"A": "b"}, cwd="/tmp")
    (found,) = box.commands.list()
    assert (found.pid, found.cmd, found.args, found.envs, found.cwd) == (handle.pid, "/bin/bash", ["-l", "-c", "echo early; sleep 100"], {"A": "b"}, "/tmp")  # fmt: skip
    other = Sandbox.connect(box.sandbox_id, **options(server))
    follower = other.commands.connect(handle.pid)
    assert follower.pid == handle.pid
    assert box.commands.kill(handle.pid) is True
    for each in (handle, follower):
        with pytest.raises(CommandExitException) as killed:
            each.wait()
        assert (killed.value.exit_code, killed.value.error) == (-1, "signal: killed")
    assert box.commands.kill(handle.pid) is False
    with pytest.raises(CommandExitException):  # how it ended is told to who comes late
        box.commands.connect(handle.pid).wait()
    with pytest.raises(NotFoundException):
        box.commands.connect(99999)
    assert box.commands.list() == []


def test_killing_a_command_ends_what_came_of_it(box: Sandbox) -> None:
    handle = box.commands.run("sleep 4711 & sleep 4711", background=True)
    while box.commands.run("pgrep -c sleep || true").stdout != "2\n":
        pass
    handle.kill()
    assert box.commands.run("pgrep -c sleep || true").stdout == "0\n"


def test_a_connected_client_hears_what_comes_from_then_on(box: Sandbox) -> None:
    handle = box.commands.run("echo before; read line; echo after $line", background=True, stdin=True)
    events = iter(handle)
    assert next(events)[0] == "before\n"
    late = box.commands.connect(handle.pid)
    late.send_stdin("word\n")
    assert late.wait().stdout == "after word\n"
    assert handle.wait().stdout == "before\nafter word\n"


def test_input_reaches_a_command(box: Sandbox) -> None:
    handle = box.commands.run("cat", background=True, stdin=True)
    handle.send_stdin("ping")
    box.commands.send_stdin(handle.pid, b"\xc3")
    box.commands.stream_input(handle.pid, [b"\xa9", "a", "b" * 300_000])
    handle.close_stdin()
    assert handle.wait().stdout == "pingéa" + "b" * 300_000
    with pytest.raises(NotFoundException):
        box.commands.send_stdin(handle.pid, "x")
    with pytest.raises(NotFoundException):
        box.commands.stream_input(handle.pid, ["x"])
    deaf = box.commands.run("sleep 100", background=True)
    with pytest.raises(SandboxException, match="not enabled or closed"):
        deaf.send_stdin("x")
    deaf.kill()


def test_a_timeout_ends_the_command(box: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        box.commands.run("echo $$ > /tmp/pid; sleep 100", timeout=0.5)
    for _ in range(100):
        if box.commands.run("kill -0 $(cat /tmp/pid) 2>/dev/null && echo there || echo gone").stdout == "gone\n":
            break
    else:
        pytest.fail("it still runs")


def test_the_end_of_a_deadline_is_told_in_the_stream(server: Server, box: Sandbox) -> None:
    begun = frame({"process": {"cmd": "/bin/sleep", "args": ["100"]}})
    answer = stream(server, box, "process.Process/Start", begun, connect_timeout_ms="300")
    assert frames(answer.content)[-1] == (
        2,
        {"error": {"code": "deadline_exceeded", "message": "context deadline exceeded"}},
    )
    handle = box.commands.run("sleep 100", background=True)
    answer = stream(
        server, box, "process.Process/Connect", frame({"process": {"pid": handle.pid}}), connect_timeout_ms="300"
    )
    assert frames(answer.content)[-1] == (
        2,
        {"error": {"code": "deadline_exceeded", "message": "context deadline exceeded"}},
    )
    late = raw(server, box, "process.Process/StreamInput", b"\0", 100, connect_timeout_ms="300")
    told = b""
    while b"}}" not in told:
        told += late.recv(4096)
    assert b"200 OK" in told and b"context deadline exceeded" in told
    late.close()
    assert [found.pid for found in box.commands.list()] == [handle.pid]  # who only listens ends nothing
    handle.kill()


def test_a_command_outlives_its_client(server: Server, box: Sandbox) -> None:
    handle = box.commands.run("sleep 1.5; echo done > /tmp/outlived", background=True)
    handle.disconnect()
    assert [found.pid for found in box.commands.list()] == [handle.pid]
    assert box.commands.connect(handle.pid).wait().exit_code == 0
    assert box.files.read("/tmp/outlived") == "done\n"


def test_a_stream_shows_that_it_lives(server: Server, box: Sandbox) -> None:
    begun = frame({"process": {"cmd": "/bin/sleep", "args": ["2.5"]}})
    answer = stream(server, box, "process.Process/Start", begun, keepalive_ping_interval="1")
    assert (0, {"event": {"keepalive": {}}}) in frames(answer.content)


def test_a_tag_names_a_process(server: Server, box: Sandbox) -> None:
    begun = frame({"process": {"cmd": "/bin/cat"}, "tag": "mine"})
    with HTTP.stream("POST", f"{server.url}/process.Process/Start", content=begun, headers=headers(box, content_type="application/connect+json")) as answer:  # fmt: skip
        pieces = answer.iter_bytes()
        next(pieces)
        assert call(server, box, "process.Process/List").json()["processes"][0]["tag"] == "mine"
        chosen = {"process": {"tag": "mine"}}
        assert call(server, box, "process.Process/SendInput", chosen | {"input": {"stdin": "aGk="}}).json() == {}
        assert call(server, box, "process.Process/CloseStdin", chosen).json() == {}
        told = frames(b"".join(pieces))
    assert told[0][1] == {"event": {"data": {"stdout": "aGk="}}}
    assert (
        call(server, box, "process.Process/SendSignal", chosen | {"signal": "SIGNAL_SIGTERM"}).json()["code"]
        == "not_found"
    )


def test_terminals(box: Sandbox) -> None:
    seen: list[bytes] = []
    handle = box.pty.create(PtySize(rows=24, cols=80), envs={"A": "of the terminal"}, cwd="/tmp")
    box.pty.resize(handle.pid, PtySize(rows=30, cols=100))
    box.pty.send_stdin(handle.pid, b"stty size; echo $A $TERM $LANG; pwd; tty; exit 4\n")
    with pytest.raises(CommandExitException) as ended:
        handle.wait(on_pty=seen.append)
    assert ended.value.exit_code == 4
    printed = b"".join(seen).decode()
    assert "30 100" in printed and "of the terminal xterm-256color C.UTF-8" in printed and "/dev/pts/" in printed
    plain = box.commands.run("cat", background=True, stdin=True)
    with pytest.raises(SandboxException, match="tty not assigned"):
        box.pty.resize(plain.pid, PtySize(rows=1, cols=1))
    with pytest.raises(SandboxException, match="no terminal"):
        box.pty.send_stdin(plain.pid, b"x")
    plain.kill()
    other = box.pty.create(PtySize(rows=24, cols=80))
    again = box.pty.connect(other.pid)
    box.pty.stream_input(other.pid, [b"echo o", b"ver\n"])
    printed = ""
    for _, _, piece in again:
        printed += (piece or b"").decode()
        if "over\r\n" in printed.replace("echo over", ""):
            break
    with pytest.raises(SandboxException, match="terminal"):
        box.commands.send_stdin(other.pid, "x")
    assert box.pty.kill(other.pid) is True


def test_much_output_comes_whole(box: Sandbox) -> None:
    assert len(box.commands.run("head -c 30000000 /dev/zero | tr '\\0' x").stdout) == 30_000_000


def test_async_clients(server: Server) -> None:
    asyncio.run(asynchronous(server))


async def asynchronous(server: Server) -> None:
    box = await AsyncSandbox.create(timeout=60, **options(server))
    try:
        done = await asyncio.gather(*(box.commands.run(f"echo {number}") for number in range(20)))
        assert [one.stdout for one in done] == [f"{number}\n" for number in range(20)]
        handle = await box.commands.run("cat", background=True, stdin=True)
        await handle.send_stdin("ab")
        await box.commands.close_stdin(handle.pid)
        assert (await handle.wait()).stdout == "ab"
        await box.files.write("a/b.txt", io.BytesIO(b"x" * 200_000))
        size = 0
        async for piece in await box.files.read("a/b.txt", format="stream"):
            size += len(piece)
        assert size == 200_000
        events: list[tuple[str, FilesystemEventType]] = []
        watch = await box.files.watch_dir("a", on_event=lambda event: events.append((event.name, event.type)))
        await box.files.write("a/w.txt", "w")
        await box.files.remove("a/w.txt")
        while len(events) < 4:
            await asyncio.sleep(0.01)
        assert events == [("w.txt", CREATE), ("w.txt", CHMOD), ("w.txt", WRITE), ("w.txt", REMOVE)]
        await watch.stop()  # type: ignore[no-untyped-call]
    finally:
        await box.kill()


# ---- files ----


def test_files_are_written_and_read(box: Sandbox) -> None:
    info = box.files.write("a.txt", "hello é")
    assert (info.path, info.name, info.type, info.metadata) == ("/home/user/a.txt", "a.txt", FileType.FILE, None)
    assert box.files.read("a.txt") == box.files.read("~/a.txt") == box.files.read("/home/user/./a.txt") == "hello é"
    assert box.files.read("a.txt", format="bytes") == "hello é".encode()
    assert b"".join(box.files.read("a.txt", format="stream")) == "hello é".encode()
    box.files.write("c.bin", io.BytesIO(bytes(range(256)) * 4000))
    assert box.files.read("c.bin", format="bytes") == bytes(range(256)) * 4000
    box.files.write("empty", "")
    assert box.files.read("empty") == ""
    with pytest.raises(FileNotFoundException, match="path '/home/user/nope' does not exist"):
        box.files.read("nope")
    with pytest.raises(InvalidArgumentException, match="is a directory"):
        box.files.read("/tmp")
    with pytest.raises(InvalidArgumentException, match="is a directory"):
        box.files.write("/tmp", "x")


def test_packed_files_have_metadata_that_each_upload_replaces(box: Sandbox) -> None:
    info = box.files.write("b.bin", b"x" * 100_000, gzip=True, metadata={"Author": "me", "b": "2"})
    assert info.metadata == {"author": "me", "b": "2"}
    assert box.files.read("b.bin", format="bytes", gzip=True) == b"x" * 100_000
    assert box.files.get_info("b.bin").metadata == {"author": "me", "b": "2"}
    assert "user.e2b.author" in box.commands.run("python3 -c 'import os; print(os.listxattr(\"b.bin\"))'").stdout
    assert box.files.rename("b.bin", "b2.bin").metadata == {"author": "me", "b": "2"}
    box.files.write("b2.bin", "other", metadata={"b": "3"})
    assert box.files.get_info("b2.bin").metadata == {"b": "3"}
    box.files.write("b2.bin", "other")
    assert box.files.get_info("b2.bin").metadata is None
    with pytest.raises(InvalidArgumentException, match="metadata"):
        box.files.write("b3.bin", "x", metadata={"k": "v" * 4096})


def test_several_files_come_at_once(box: Sandbox) -> None:
    done = box.files.write_files([{"path": "d/1.txt", "data": "1"}, {"path": "/tmp/abs/2.txt", "data": b"2"}, {"path": 'd/"q" ü.txt', "data": "3"}])  # fmt: skip
    assert [info.path for info in done][:2] == ["/home/user/d/1.txt", "/tmp/abs/2.txt"]
    assert box.files.read("/tmp/abs/2.txt") == "2"
    assert box.files.read(done[2].path) == "3"
    with pytest.raises(InvalidArgumentException, match="multiple files to the same path"):
        box.files.write_files([{"path": "d/1.txt", "data": "1"}, {"path": "/home/user/d/1.txt", "data": "2"}])


def test_files_belong_to_their_user_wherever_they_are(box: Sandbox) -> None:
    box.files.write("/srv/made/here.txt", "x")
    info = box.files.get_info("/srv/made/here.txt")
    assert (info.owner, info.group, info.mode, info.permissions, info.size) == ("user", "user", 0o644, "-rw-r--r--", 1)
    assert (box.files.get_info("/srv/made").owner, box.files.get_info("/srv").owner) == ("user", "root")
    box.files.write("r.txt", "x", user="root")
    assert box.files.get_info("/root/r.txt").owner == "root"
    assert box.files.make_dir("/srv/dir/sub") is True
    assert box.files.get_info("/srv/dir").owner == "user"
    with pytest.raises(AuthenticationException):
        box.files.read("a", user="nobody-here")
    with pytest.raises(AuthenticationException):
        box.files.list(".", user="nobody-here")


def test_directories(box: Sandbox) -> None:
    assert box.files.make_dir("tree/sub") is True
    assert box.files.make_dir("tree/sub") is False
    box.files.write("tree/sub/f.txt", "12345")
    box.commands.run("cd tree; ln -s sub to_sub; ln -s nowhere broken; chmod 4751 sub/f.txt; mkfifo pipe")
    found = {entry.name: entry for entry in box.files.list("tree")}
    assert (found["sub"].type, found["sub"].permissions, found["sub"].path) == (
        FileType.DIR,
        "drwxr-xr-x",
        "/home/user/tree/sub",
    )
    assert (found["to_sub"].type, found["to_sub"].symlink_target) == (FileType.SYMLINK, "/home/user/tree/sub")
    assert (found["broken"].type, found["broken"].symlink_target) == (FileType.SYMLINK, "/home/user/tree/broken")
    assert "pipe" not in found
    assert [entry.path for entry in box.files.list("tree", depth=2)] == ["/home/user/tree/broken", "/home/user/tree/sub", "/home/user/tree/sub/f.txt", "/home/user/tree/to_sub"]  # fmt: skip
    assert [entry.path for entry in box.files.list("tree/to_sub")] == ["/home/user/tree/to_sub/f.txt"]
    info = box.files.get_info("tree/sub/f.txt")
    assert (info.size, info.permissions, info.mode) == (5, "urwxr-x--x", 0o751)
    assert abs(info.modified_time.timestamp() - time.time()) < 60
    assert (
        box.files.exists("tree/sub/f.txt")
        and not box.files.exists("tree/f.txt")
        and not box.files.exists("tree/sub/f.txt/x")
    )
    moved = box.files.rename("tree/sub/f.txt", "tree/new/g.txt")
    assert (moved.path, moved.type) == ("/home/user/tree/new/g.txt", FileType.FILE)
    with pytest.raises(FileNotFoundException):
        box.files.rename("tree/sub/f.txt", "x")
    with pytest.raises(InvalidArgumentException, match="not a directory"):
        box.files.list("tree/new/g.txt")
    with pytest.raises(FileNotFoundException):
        box.files.list("tree/nowhere")
    with pytest.raises(InvalidArgumentException, match="not a directory"):
        box.files.make_dir("tree/new/g.txt")
    box.files.remove("tree")
    box.files.remove("tree")
    assert not box.files.exists("tree")


def test_watches(box: Sandbox) -> None:
    box.files.make_dir("watched/below")
    watch = box.files.watch_dir("watched", recursive=True, include_entry=True)
    flat = box.files.watch_dir("watched")
    assert watch.get_new_events() == []
    box.files.write("watched/new.txt", "123")
    told = watch.get_new_events()
    assert [(event.name, event.type) for event in told] == [("new.txt", CREATE), ("new.txt", CHMOD), ("new.txt", WRITE)]
    assert told[0].entry is not None and (told[0].entry.size, told[0].entry.path) == (3, "/home/user/watched/new.txt")
    box.commands.run("cd watched; mv new.txt old.txt; chmod 600 old.txt; mkdir -p x/y; echo 1 > below/f; rm old.txt")
    names = [(event.name, event.type) for event in watch.get_new_events()]
    assert names[:6] == [("new.txt", RENAME), ("old.txt", CREATE), ("old.txt", CHMOD), ("x", CREATE), ("x/y", CREATE), ("below/f", CREATE)]  # fmt: skip
    assert names[-1] == ("old.txt", REMOVE)
    assert ("below/f", CREATE) not in [(event.name, event.type) for event in flat.get_new_events()]
    watch.stop()
    flat.stop()
    with pytest.raises(SandboxException):
        watch.get_new_events()
    with pytest.raises(FileNotFoundException):
        box.files.watch_dir("watched/nowhere")
    with pytest.raises(InvalidArgumentException):
        box.files.watch_dir("a.txt")


def test_signed_urls(server: Server, box: Sandbox) -> None:
    box.files.write("signed.txt", "signed")
    url = box.download_url("signed.txt")
    assert url.startswith(f"{server.url}/files?")
    assert HTTP.get(url).text == "signed"
    assert HTTP.get(box.download_url("signed.txt", use_signature_expiration=60)).text == "signed"
    expired = HTTP.get(box.download_url("signed.txt", use_signature_expiration=-10))
    assert (expired.status_code, expired.json()) == (401, {"code": 401, "message": "signature is already expired"})
    assert HTTP.get(url.replace("signed.txt", "a.txt")).json() == {"code": 401, "message": "invalid signature"}
    assert HTTP.get(f"{server.url}/files?path=signed.txt").json() == {
        "code": 401,
        "message": "missing signature query parameter",
    }
    assert HTTP.get(url, headers={"e2b-sandbox-id": box.sandbox_id}).text == "signed"
    host = {"host": f"49983-{box.sandbox_id}.{server.told.get('domain', 'layer.localhost')}"}
    assert HTTP.get(url, headers=host).text == "signed"
    upload = box.upload_url("up.txt", user="root", use_signature_expiration=60)
    assert HTTP.post(upload, files={"file": ("x", b"up")}).json()[0]["path"] == "/root/up.txt"
    assert HTTP.get(upload).status_code == 401
    new = Sandbox.create(timeout=60, **options(server))
    new.files.write("of.txt", "new")
    assert HTTP.get(new.download_url("of.txt")).text == "new"
    new.kill()
    assert HTTP.get(new.download_url("of.txt")).status_code in (401, 502)


def test_parts_of_a_file(server: Server, box: Sandbox) -> None:
    box.files.write("range.txt", "0123456789")

    def get(**more: str) -> httpx.Response:
        return HTTP.get(f"{server.url}/files?path=range.txt", headers=headers(box, **more))

    part = get(range="bytes=2-4")
    assert (part.status_code, part.text, part.headers["content-range"]) == (206, "234", "bytes 2-4/10")
    assert (get(range="bytes=-3").text, get(range="bytes=8-").text, get(range="bytes=0-99").text) == (
        "789",
        "89",
        "0123456789",
    )
    assert (get(range="bytes=20-30").status_code, get(range="bytes=1-2,4-5").text) == (416, "0123456789")
    whole = get()
    assert (whole.headers["content-length"], whole.headers["accept-ranges"]) == ("10", "bytes")
    assert get(if_modified_since=whole.headers["last-modified"]).status_code == 304


def test_a_full_disk_is_told(server: Server) -> None:
    box = Sandbox.create(timeout=60, **options(server))
    try:
        box.commands.run(
            "for size in 8G 4G 2G 1G 512M 256M 128M 64M 32M 16M 8M 4M 2M; do fallocate -l $size f$size; done; true"
        )
        with pytest.raises(NotEnoughSpaceException):
            box.files.write("big", (b"x" * (1 << 20) for _ in range(50)))
    finally:
        box.kill()


# ---- the rest ----


def test_health_environment_and_metrics(server: Server, box: Sandbox) -> None:
    assert box.is_running()
    ask = httpx.Client(base_url=server.url, headers=headers(box))
    assert ask.get("/health").status_code == 204
    assert ask.get("/envs").json()["OF_THE_BOX"] == "1"
    used = ask.get("/metrics").json()
    assert used["cpu_count"] == 1 and used["mem_total"] == 512 << 20 and used["mem_used"] > 0 and used["disk_total"] > 0
    assert ask.post("/init", json={}).status_code == 204
    gone = Sandbox.create(timeout=60, **options(server))
    gone.kill()
    assert not gone.is_running()
    answer = HTTP.get(f"{server.url}/health", headers=headers(gone))
    assert (answer.status_code, "was not found" in answer.json()["message"]) == (502, True)


def test_a_command_is_cut_off_when_its_box_is_killed(server: Server) -> None:
    box = Sandbox.create(timeout=60, **options(server))
    handle = box.commands.run("sleep 100", background=True)
    threading.Timer(0.3, box.kill).start()
    with pytest.raises(SandboxException, match="killed or reached its end of life"):
        handle.wait()


def test_only_who_has_the_token_is_answered(server: Server, box: Sandbox) -> None:
    procedures = (
        "process.Process/List",
        "filesystem.Filesystem/Stat",
        "process.Process/Start",
        "process.Process/Nothing",
    )
    for token in ("", "wrong", "\xe9"):
        given = headers(box) | {"x-access-token": token}
        for procedure in procedures:
            answer = call(server, box, procedure, headers={"x-access-token": token})
            assert (answer.status_code, answer.json()["code"]) == (401, 401)
        for path in ("envs", "metrics", "files?path=a.txt", "nothing"):
            assert HTTP.get(f"{server.url}/{path}", headers=httpx.Headers(given, encoding="latin-1")).status_code == 401
    other = Sandbox.create(timeout=60, **options(server))
    stolen = headers(box) | {"x-access-token": str(other._envd_access_token)}
    assert call(server, box, "process.Process/List", headers=stolen).status_code == 401
    other.kill()


BAD: list[tuple[str, Any, int, str]] = [
    ("process.Process/Nothing", {}, 404, "unimplemented"),
    ("process.Process/List", b"{", 400, "invalid_argument"),
    ("process.Process/List", b"[" * 100_000, 400, "invalid_argument"),
    ("process.Process/List", b"[]", 400, "invalid_argument"),
    ("process.Process/SendInput", {}, 400, "invalid_argument"),
    ("process.Process/SendInput", {"process": {"pid": 1}, "input": {"stdin": "%%%"}}, 400, "invalid_argument"),
    ("process.Process/SendInput", {"process": {"pid": 99999}, "input": {"stdin": ""}}, 404, "not_found"),
    ("process.Process/SendInput", {"process": {"pid": -1}, "input": {}}, 400, "invalid_argument"),
    ("process.Process/SendInput", {"process": "x"}, 400, "invalid_argument"),
    ("process.Process/SendSignal", {"process": {"pid": "7"}, "signal": "SIGNAL_SIGSTOP"}, 400, "invalid_argument"),
    ("process.Process/SendSignal", {"process": {"pid": 99999}, "signal": "SIGNAL_SIGKILL"}, 404, "not_found"),
    ("process.Process/SendSignal", {"process": {"pid": 1.5}, "signal": []}, 400, "invalid_argument"),
    ("process.Process/Update", {"process": {"pid": 99999}, "pty": {"size": {"rows": 1e9}}}, 400, "invalid_argument"),
    ("process.Process/CloseStdin", {"process": {"pid": 99999}}, 404, "not_found"),
    ("filesystem.Filesystem/Stat", {"path": 7}, 400, "invalid_argument"),
    ("filesystem.Filesystem/Stat", {"path": "a\0b"}, 400, "invalid_argument"),
    ("filesystem.Filesystem/Stat", {"path": "x" * 5000}, 400, "invalid_argument"),
    ("filesystem.Filesystem/Stat", {"path": "\ud800"}, 400, "invalid_argument"),
    ("filesystem.Filesystem/Stat", {"path": "~other/x"}, 400, "invalid_argument"),
    ("filesystem.Filesystem/Stat", {"path": "/" + "a/" * 1000}, 404, "not_found"),
    ("filesystem.Filesystem/ListDir", {"path": "/", "depth": "many"}, 400, "invalid_argument"),
    ("filesystem.Filesystem/Remove", {"path": "/"}, 400, "invalid_argument"),
    ("filesystem.Filesystem/MakeDir", {"path": "/"}, 409, "already_exists"),
    ("filesystem.Filesystem/MakeDir", {"path": "/etc/passwd/x"}, 400, "invalid_argument"),
    ("filesystem.Filesystem/Move", {"source": "/etc"}, 400, "invalid_argument"),
    ("filesystem.Filesystem/CreateWatcher", {"path": "/", "recursive": "yes"}, 400, "invalid_argument"),
    ("filesystem.Filesystem/GetWatcherEvents", {"watcherId": "w0"}, 404, "not_found"),
    ("filesystem.Filesystem/GetWatcherEvents", {"watcherId": {}}, 400, "invalid_argument"),
    ("filesystem.Filesystem/RemoveWatcher", {}, 400, "invalid_argument"),
]  # fmt: skip


@pytest.mark.parametrize(("procedure", "message", "status", "code"), BAD)
def test_bad_messages_are_refused(
    server: Server, box: Sandbox, procedure: str, message: Any, status: int, code: str
) -> None:
    answer = call(server, box, procedure, message)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text


START = "process.Process/Start"
BAD_STREAMS: list[tuple[str, bytes, int, str]] = [
    (START, b"", 400, "invalid_argument"),
    (START, b"\0\0", 400, "invalid_argument"),
    (START, struct.pack(">BI", 0, 100) + b"{}", 400, "invalid_argument"),
    (START, struct.pack(">BI", 0, 1 << 31), 413, "resource_exhausted"),
    (START, frame({}, 1), 415, "unimplemented"),
    (START, frame({}, 0x40), 400, "invalid_argument"),
    (START, frame(b"nothing"), 400, "invalid_argument"),
    (START, frame({}, 2), 400, "invalid_argument"),
    (START, frame({}), 400, "invalid_argument"),
    (START, frame({"process": {"cmd": ""}}), 400, "invalid_argument"),
    (START, frame({"process": {"cmd": "a\0b"}}), 400, "invalid_argument"),
    (START, frame({"process": {"cmd": "x", "args": "y"}}), 400, "invalid_argument"),
    (START, frame({"process": {"cmd": "x", "args": [1]}}), 400, "invalid_argument"),
    (START, frame({"process": {"cmd": "x", "envs": {"a": 1}}}), 400, "invalid_argument"),
    (START, frame({"process": {"cmd": "x", "cwd": []}}), 400, "invalid_argument"),
    (START, frame({"process": {"cmd": "x"}, "pty": {"size": {"rows": 70000}}}), 400, "invalid_argument"),
    (START, frame({"process": {"cmd": "x"}, "stdin": "yes"}), 400, "invalid_argument"),
    (START, frame({"process": {"cmd": "x"}, "tag": 1}), 400, "invalid_argument"),
    ("process.Process/Connect", frame({"process": {}}), 400, "invalid_argument"),
    ("process.Process/StreamInput", frame({"data": {"input": {"stdin": ""}}}), 400, "invalid_argument"),
    ("process.Process/StreamInput", frame({"other": 1}), 400, "invalid_argument"),
    ("filesystem.Filesystem/WatchDir", frame({"path": 1}), 400, "invalid_argument"),
]  # fmt: skip


@pytest.mark.parametrize(("procedure", "content", "status", "code"), BAD_STREAMS)
def test_bad_frames_are_refused(
    server: Server, box: Sandbox, procedure: str, content: bytes, status: int, code: str
) -> None:
    answer = stream(server, box, procedure, content)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text


def test_what_a_stream_can_not_do_is_told_in_it(server: Server, box: Sandbox) -> None:
    def told(procedure: str, message: Any) -> str:
        answer = stream(server, box, procedure, frame(message))
        ((flag, last),) = frames(answer.content)
        assert (answer.status_code, flag) == (200, 2)
        return str(last["error"]["code"])

    assert told("process.Process/Connect", {"process": {"pid": 99999}}) == "not_found"
    assert told("process.Process/StreamInput", {"start": {"process": {"pid": 99999}}}) == "not_found"
    assert told(START, {"process": {"cmd": "/no/such/program"}}) == "invalid_argument"
    assert told(START, {"process": {"cmd": "x", "envs": {"a=b": "c"}}}) == "invalid_argument"
    assert told(START, {"process": {"cmd": "x", "args": ["y" * 5_000_000]}}) == "resource_exhausted"


def test_other_ways_to_ask_are_refused(server: Server, box: Sandbox) -> None:
    assert call(server, box, "process.Process/List", headers={"content-type": "application/proto"}).status_code == 415
    assert call(server, box, "process.Process/List", headers={"content-encoding": "gzip"}).status_code == 415
    assert call(server, box, "process.Process/List", headers={"connect-timeout-ms": "soon"}).status_code == 400
    assert HTTP.get(f"{server.url}/process.Process/List", headers=headers(box)).status_code == 405
    assert HTTP.delete(f"{server.url}/files?path=a.txt", headers=headers(box)).status_code == 405
    assert HTTP.get(f"{server.url}/nothing", headers=headers(box)).status_code == 404
    large = call(server, box, "process.Process/List", b" " * (17 << 20))
    assert (large.status_code, large.json()["code"]) == (413, "resource_exhausted")


def test_bad_uploads_are_refused(server: Server, box: Sandbox) -> None:
    def post(content: bytes, type: str, query: str = "?path=bad", **more: str) -> tuple[int, int]:
        answer = HTTP.post(
            f"{server.url}/files{query}", content=content, headers=headers(box, content_type=type, **more)
        )
        return answer.status_code, answer.json()["code"]

    octets, form = "application/octet-stream", "multipart/form-data; boundary=b"
    begun = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    assert post(b"x", "text/plain") == (400, 400)
    assert post(b"x", octets, "") == (400, 400)
    assert post(b"no gzip", octets, content_encoding="gzip") == (400, 400)
    assert post(b"x", octets, content_encoding="br") == (400, 400)
    assert post(b"no form", form) == (400, 400)
    assert post(begun + b"never ends", form) == (400, 400)
    assert post(b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n', form, "") == (400, 400)
    assert post(b"--b\r\nA: " + b"a" * 100_000 + b"\r\n\r\nx\r\n--b--\r\n", form) == (400, 400)
    assert post(begun + b"x\r\n--b--\r\n", "multipart/form-data") == (400, 400)
    assert post(begun + b"x\r\n--b--\r\n", form, "?path=" + "x" * 5000) == (400, 400)
    assert post(begun + b"x\r\n--b--\r\n", form, "?path=a%00b") == (400, 400)
    assert post(b"x", octets, "?path=bad&username=nobody-here") == (401, 401)
    assert post(b"x", octets, "?path=/proc/1/x")[0] in (400, 403, 404)
    assert HTTP.get(f"{server.url}/files?path=/dev/zero", headers=headers(box)).status_code == 400
    assert (
        HTTP.get(f"{server.url}/files?" + "&".join(f"a{n}=1" for n in range(100)), headers=headers(box)).status_code
        == 400
    )
    assert HTTP.get(f"{server.url}/files?path=x&signature=y&signature_expiration=soon").status_code == 400
    assert HTTP.get(f"{server.url}/files?path=x&signature=y&signature_expiration=--5").status_code == 400


# ---- slow clients and those that vanish ----


def raw(
    server: Server, box: Sandbox, procedure: str, content: bytes, length: int | None = None, **more: str
) -> socket.socket:
    """A request by hand."""
    given = headers(
        box,
        content_type="application/connect+json",
        host="127.0.0.1",
        content_length=str(length or len(content)),
        **more,
    )
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    made = socket.create_connection(("127.0.0.1", server.port), 20)
    made.sendall(f"POST /{procedure} HTTP/1.1\r\n{lines}\r\n".encode() + content)
    return made


def test_nothing_is_left_of_clients_that_vanish(server: Server) -> None:
    box = Sandbox.create(timeout=120, **options(server))
    try:
        files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        sleeper = frame({"process": {"cmd": "/bin/sleep", "args": ["3"]}})
        made = [raw(server, box, "filesystem.Filesystem/WatchDir", frame({"path": "."})) for _ in range(5)]
        made += [raw(server, box, START, sleeper) for _ in range(5)]
        made += [raw(server, box, START, sleeper[:9], len(sleeper)) for _ in range(5)]
        made += [raw(server, box, "files?path=half", b"half", 1000) for _ in range(5)]
        made += [
            raw(server, box, "process.Process/StreamInput", frame({"start": {"process": {"pid": 1}}})[:4], 100)
            for _ in range(5)
        ]
        for each in made[:10]:
            assert each.recv(10)
        assert opened(box)["open"] >= 10
        for each in made:
            each.close()
        while opened(box)["open"] > 5:  # the watches are gone, the commands go on to their end
            time.sleep(0.05)
        assert settled(box) == {"open": 0, "commands": 0}
        assert (
            len(os.listdir(f"/proc/{server.process.pid}/fd")) <= files + 20
        )  # ways to the host that wait to be used again
    finally:
        box.kill()


def test_a_client_that_does_not_read_holds_its_command(server: Server, box: Sandbox) -> None:
    def resident() -> int:
        return int(open(f"/proc/{server.process.pid}/statm").read().split()[1]) * 4096

    before = resident()
    flood = raw(
        server,
        box,
        START,
        frame({"process": {"cmd": "/bin/sh", "args": ["-c", "head -c 100000000 /dev/zero; echo done >&2"]}}),
    )
    reads = raw(server, box, "x", b"")
    reads.close()
    time.sleep(2)
    assert resident() - before < 40 << 20
    assert len(box.commands.list()) == 1  # it waits
    size, last, heard, word = 0, b"", False, base64.b64encode(b"done\n")
    while piece := flood.recv(1 << 20):
        size, last = size + len(piece), last[-300:] + piece
        heard |= word in last
        if b'"exitCode"' in last:
            break
    assert size > 133_000_000 and heard
    flood.close()
    assert resident() - before < 60 << 20


def test_a_restart_of_the_server_loses_nothing(server: Server) -> None:
    box = Sandbox.create(timeout=120, **options(server))
    try:
        watch = box.files.watch_dir(".")
        handle = box.commands.run("cat > heard", background=True, stdin=True)
        url = box.download_url("heard")
        server.restart()
        assert [found.pid for found in box.commands.list()] == [handle.pid]
        again = box.commands.connect(handle.pid)
        again.send_stdin("still here")
        again.close_stdin()
        assert again.wait().exit_code == 0
        assert HTTP.get(url).text == "still here"
        assert {event.name for event in watch.get_new_events()} == {"heard"}
        watch.stop()
    finally:
        box.kill()
