"""E2B's templates, with its own client: built in boxes, cached, tagged, started, and told why when they fail."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b.api.client.api.templates import get_default_templates
from e2b.api.client_sync import get_api_client
from e2b.connection_config import ConnectionConfig
from edges.serving import Server
from sandbox.hosts import wait_until
from sandbox.test_images import Registry, needs_skopeo, registry, tar  # noqa: F401
from sandbox.test_images import serve as publish

from livinglayer.errors import LayerError

e2b = pytest.importorskip("e2b")
Template = getattr(e2b, "Template", None)


@pytest.fixture(autouse=True)
def api(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's settings of E2B's client."""
    for name, value in server.e2b().items():
        monkeypatch.setenv(name, value)


def ask(server: Server, method: str, path: str, said: Any = None, key: str | None = None) -> tuple[int, Any]:
    data = None if said is None else said if isinstance(said, bytes) else json.dumps(said).encode()
    headers = {"x-api-key": key or server.key(), "content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers, method=method), timeout=30) as answer:  # fmt: skip
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def test_a_template_is_built_and_opened(server: Server, tmp_path: Path) -> None:
    (tmp_path / "ctx.txt").write_text("hello")
    (tmp_path / "src/deep").mkdir(parents=True)
    (tmp_path / "src/deep/a.py").write_text("print('a')")
    template = (
        Template(file_context_path=str(tmp_path))
        .from_base_image()
        .set_envs({"GREETING": "hi there"})
        .copy("ctx.txt", "/app/")
        .copy("src", "/app/code", mode=0o755)
        .set_workdir("/app")
        .run_cmd('echo "$GREETING from $(whoami) in $PWD" > /tmp/said')
        .run_cmd("echo root > /root/made", user="root")
    )
    lines: list[str] = []
    built = Template.build(template, "my-tpl", cpu_count=1, memory_mb=256, on_build_logs=lambda line: lines.append(line.message))  # fmt: skip
    assert any("COPY ctx.txt /app/" in line for line in lines)
    assert Template.exists("my-tpl")
    box = e2b.Sandbox.create("my-tpl")
    assert box.commands.run("cat /tmp/said").stdout == "hi there from user in /app\n"
    assert box.commands.run("cat /app/ctx.txt; stat -c '%U' /app/ctx.txt; stat -c %a /app/code/deep/a.py").stdout == "hellouser\n755\n"  # fmt: skip
    assert box.commands.run("cat /root/made", user="root").stdout == "root\n"
    assert box.get_info().memory_mb == 256
    assert box.get_info().template_id == built.template_id
    box.kill()
    # A build is an execution: who, what, and what it printed.
    (run,) = server.layer.query("select id, status, arguments from execution where verb = 'template.build'")
    assert run["status"] == "done"
    assert server.layer.query("select count(*) as n from step where execution = :e and kind = 'log'", {"e": run["id"]})[0]["n"] > 3  # fmt: skip
    # The same again is kept from before; what is forced is not.
    again: list[str] = []
    Template.build(template, "my-tpl", on_build_logs=lambda line: again.append(line.message))
    assert sum(line.startswith("CACHED") for line in again) == 5
    forced: list[str] = []
    Template.build(template, "my-tpl", skip_cache=True, on_build_logs=lambda line: forced.append(line.message))
    assert not any(line.startswith("CACHED") for line in forced)
    assert [row["templateID"] for row in ask(server, "GET", "/templates")[1]] == [built.template_id]
    # Another stands on it.
    Template.build(Template().from_template("my-tpl").run_cmd("cat /app/ctx.txt > /tmp/inherited"), "child")
    child = e2b.Sandbox.create("child")
    assert child.commands.run("cat /tmp/inherited /tmp/said").stdout == "hellohi there from user in /app\n"
    child.kill()
    for name in ("child", "my-tpl"):
        assert ask(server, "DELETE", f"/templates/{name}")[0] == 204
        assert not Template.exists(name)
    with pytest.raises(e2b.SandboxException):
        e2b.Sandbox.create("my-tpl")


def test_defaults_are_listed_for_those_who_may_open_them(server: Server) -> None:
    def listed(principal: str) -> dict[str, Any]:
        client = get_api_client(ConnectionConfig(api_key=server.key(principal), api_url=server.url))
        answer = get_default_templates.sync_detailed(client=client)
        assert answer.status_code == 200 and isinstance(answer.parsed, list)
        return {one.template_id: one for one in answer.parsed}

    found = listed("owner")
    assert list(found) == ["base", "code-interpreter-v1"]
    base = found["base"]
    assert (
        base.is_default
        and base.memory_mb == 512
        and base.build_status == "ready"
        and base.created_at <= base.updated_at
    )
    assert listed("zoe") == {}
    server.layer.grant("zoe", "call", "box:base")
    assert list(listed("zoe")) == ["base"]


def test_a_step_that_fails_is_named(server: Server) -> None:
    template = Template().from_base_image().run_cmd("echo fine").run_cmd("echo it broke here >&2; exit 7")
    info = Template.build_in_background(template, "breaks")
    with pytest.raises(e2b.BuildException, match="exit code 7"):
        Template.build(template, "breaks")
    for _ in range(100):
        status = Template.get_build_status(info)
        if status.status.value not in ("building", "waiting"):
            break
        time.sleep(0.1)
    assert (status.status.value, status.reason.step) == ("error", "2")
    assert "it broke here" in [line.message for line in status.log_entries]
    with pytest.raises(e2b.SandboxException, match="no finished build"):
        e2b.Sandbox.create("breaks")
    assert ask(server, "POST", f"/v2/templates/{info.template_id}/builds/{info.build_id}", {"fromImage": "e2bdev/base"})[0] == 409  # fmt: skip


def test_an_image_that_can_not_be_had_is_an_error_of_the_build() -> None:
    with pytest.raises(e2b.BuildException, match=r"python:3\.11.*can't be had"):
        Template.build(Template().from_image("127.0.0.1:1/python:3.11"), "far")
    with pytest.raises(e2b.BuildException, match="no template 'nowhere'"):
        Template.build(Template().from_template("nowhere"), "far")


def test_tags(server: Server) -> None:
    def build(text: str, name: str, **more: Any) -> Any:
        return Template.build(Template().from_base_image().run_cmd(f"echo {text} > /tmp/which"), name, **more)

    def which(name: str) -> str:
        with e2b.Sandbox.create(name) as box:
            return str(box.commands.run("cat /tmp/which").stdout).strip()

    first = build("one", "tagged:v1", tags=["stable"])
    second = build("two", "tagged")
    assert {tag.tag: tag.build_id for tag in Template.get_tags("tagged")} == {"v1": first.build_id, "stable": first.build_id, "default": second.build_id}  # fmt: skip
    assert (which("tagged:v1"), which("tagged"), which(f"{first.template_id}:stable")) == ("one", "two", "one")
    assert Template.assign_tags("tagged:v1", ["production"]).build_id == first.build_id
    assert which("tagged:production") == "one"
    Template.remove_tags("tagged", "production")
    with pytest.raises(e2b.SandboxException, match="production"):
        e2b.Sandbox.create("tagged:production")
    with pytest.raises(e2b.TemplateException):
        Template.assign_tags("tagged:nowhere", ["x"])


def test_a_start_command_runs_in_every_box(server: Server) -> None:
    template = (
        Template().from_base_image().run_cmd("mkdir -p /home/user/www && echo served > /home/user/www/index.html")
        .set_workdir("/home/user/www").set_start_cmd("python3 -m http.server 8123", "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8123\")'")
    )  # fmt: skip
    Template.build(template, "starts")
    with e2b.Sandbox.create("starts") as box:
        assert box.commands.run("python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:8123\").read())'").stdout.startswith("b'served")  # fmt: skip
    never = Template().from_base_image().set_start_cmd("exit 3", "false")
    with pytest.raises(e2b.BuildException, match="exit code 3"):
        Template.build(never, "never")


def test_a_build_that_a_restart_interrupts_is_told(server: Server) -> None:
    info = Template.build_in_background(Template().from_base_image().run_cmd("sleep 300"), "interrupted")
    for _ in range(100):
        if Template.get_build_status(info).log_entries:
            break
        time.sleep(0.05)
    server.restart()
    status = Template.get_build_status(info)
    assert (status.status.value, "stopped during the build" in status.reason.message) == ("error", True)


def test_a_build_that_hangs_is_ended(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYER_BUILD_SECONDS", "1")
    made = server.layer.call("template.create", {"name": "hangs"})
    steps = [{"type": "ENV", "args": ["A", "b"]}, {"type": "RUN", "args": ["echo before; sleep 300"]}]
    given = {"template": "hangs", "build": made["build"], "image": "e2bdev/base", "steps": steps}
    with pytest.raises(LayerError, match=r"step 2: .* longer than 1 seconds"):
        server.layer.call("template.build", given)
    status = ask(server, "GET", f"/templates/hangs/builds/{made['build']}/status")[1]
    assert (status["status"], status["reason"]["step"]) == ("error", "2")
    assert "before" in [line["message"] for line in status["logEntries"]]


@needs_skopeo
def test_an_image_of_a_local_registry(server: Server, registry: tuple[str, type[Registry]]) -> None:  # noqa: F811
    address, handler = registry
    publish(handler, [tar(("marker", b"from the registry"))])
    Template.build(Template().from_image(f"{address}/team/app:1"), "pulled")
    with e2b.Sandbox.create("pulled") as box:
        assert box.files.read("/marker") == "from the registry"
    (row,) = server.layer.query("select environment from blueprint where name = 'pulled'")
    assert row["environment"] == {"FROM": "registry"}
    with pytest.raises(e2b.BuildException, match="can't be had"):
        Template.build(Template().from_image(f"{address}/team/app:missing"), "pulled")


def test_templates_are_their_makers_own(server: Server) -> None:
    Template.build(Template().from_base_image().run_cmd("echo mine > /tmp/whose"), "secretive")
    ann = server.key("ann")
    with pytest.raises(e2b.BuildException, match=r"may not call verb:template\.build"):
        Template.build(Template().from_base_image(), "hers", api_key=ann)
    for what in ("verb:template.build", "box:base"):
        server.layer.grant("ann", "call", what)
    assert not Template.exists("secretive", api_key=ann)
    assert ask(server, "GET", "/templates", key=ann) == (200, [])
    for method, path in (
        ("DELETE", "/templates/secretive"),
        ("GET", "/templates/secretive"),
        ("GET", "/templates/secretive/tags"),
    ):
        assert ask(server, method, path, key=ann)[0] == 404
    with pytest.raises(e2b.SandboxException):
        e2b.Sandbox.create("secretive", api_key=ann)
    with pytest.raises(e2b.BuildException, match="no template 'secretive'"):
        Template.build(Template().from_template("secretive"), "stolen", api_key=ann)
    built = Template.build(Template().from_base_image().run_cmd("echo hers > /tmp/whose"), "secretive", api_key=ann)
    with e2b.Sandbox.create("secretive", api_key=ann) as box:  # the name is her own
        assert box.commands.run("cat /tmp/whose").stdout == "hers\n"
    with e2b.Sandbox.create("secretive") as box:
        assert box.commands.run("cat /tmp/whose").stdout == "mine\n"
    bob = server.key("bob")
    assert not Template.exists(built.template_id, api_key=bob)
    assert ask(server, "PATCH", f"/v2/templates/{built.template_id}", {"public": True}, ann)[0] == 200
    with e2b.Sandbox.create("ann/secretive", api_key=bob) as box:
        assert box.commands.run("cat /tmp/whose").stdout == "hers\n"
    assert ask(server, "DELETE", f"/templates/{built.template_id}", key=bob)[0] == 403
    for key, lines in ((ann, True), (bob, False)):  # to open it is for everybody, what its build printed is hers
        told = ask(server, "GET", f"/templates/{built.template_id}/builds/{built.build_id}/status", key=key)[1]
        assert (told["status"], bool(told["logEntries"])) == ("ready", lines)
        found = ask(server, "GET", f"/templates/{built.template_id}/builds/{built.build_id}/logs", key=key)[1]
        assert bool(found["logs"]) == lines
    denied = {"fromImage": "10.0.0.1:5000/internal:1", "steps": []}
    made = ask(server, "POST", "/v3/templates", {"name": "inside"}, ann)[1]
    ask(server, "POST", f"/v2/templates/{made['templateID']}/builds/{made['buildID']}", denied, ann)
    for _ in range(50):
        status = ask(server, "GET", f"/templates/{made['templateID']}/builds/{made['buildID']}/status", key=ann)[1]
        if status["status"] == "error":
            break
        time.sleep(0.1)
    assert "not for everybody" in status["reason"]["message"]


def packed(*members: tuple[str, bytes | str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_files_are_taken_by_a_link_of_their_own_and_harm_nobody(server: Server) -> None:
    made = ask(server, "POST", "/v3/templates", {"name": "hostile"})[1]
    hashed = "ab" * 32
    status, link = ask(server, "GET", f"/templates/{made['templateID']}/files/{hashed}")
    assert (status, link["present"]) == (201, False)

    def put(url: str, data: bytes) -> int:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, method="PUT"), timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    for wrong in (link["url"].replace(hashed, "cd" * 32), link["url"].replace("until=", "until=9"), link["url"][:-1], link["url"].partition("?")[0]):  # fmt: skip
        assert put(wrong, b"x") == 401
    hostile = packed(
        ("../../../../../../tmp/e2b-escaped", b"x"), ("etc", "/etc"), ("etc/planted", b"x"), ("ok", b"fine")
    )
    assert put(link["url"], hostile) == 200
    assert ask(server, "GET", f"/templates/{made['templateID']}/files/{hashed}") == (201, {"present": True})
    step = {"type": "COPY", "args": ["ok", "/app/ok", "", ""], "filesHash": hashed}
    path = f"/templates/{made['templateID']}/builds/{made['buildID']}"
    assert ask(server, "POST", f"/v2{path}", {"fromImage": "e2bdev/base", "steps": [step]})[0] == 202
    for _ in range(100):
        status, told = ask(server, "GET", f"{path}/status")
        if told["status"] in ("ready", "error"):
            break
        time.sleep(0.1)
    assert not Path("/tmp/e2b-escaped").exists()
    assert not Path("/etc/planted").exists()


def test_uploads_count_while_they_come_in(server: Server) -> None:
    made = ask(server, "POST", "/v3/templates", {"name": "large"})[1]
    links = [ask(server, "GET", f"/templates/{made['templateID']}/files/{n:064x}")[1]["url"] for n in range(6)]
    here = Path(server.environment["LAYER_STATE"], "uploads", server.layer.id, links[0].split("/uploads/")[1].split("/")[0])  # fmt: skip
    here.mkdir(parents=True, exist_ok=True)
    mib, all_ = 1 << 20, 16 << 30
    with open(here / ("ee" * 32), "wb") as file:
        file.truncate(
            all_ - 70 * mib - sum(path.stat().st_size for path in here.iterdir())
        )  # holes: room is left for two
    gate = threading.Barrier(len(links))

    def parts() -> Iterator[bytes]:
        for n in range(32):
            if n == 1:
                gate.wait(30)  # all of them were let in
            yield bytes(mib)

    def put(url: str) -> int:
        try:
            return httpx.put(url, content=parts(), timeout=60).status_code
        except httpx.TransportError:  # refused, and it did not listen
            return 429

    with ThreadPoolExecutor(len(links)) as pool:
        answers = list(pool.map(put, links))
    total = sum(path.stat().st_size for path in here.iterdir())
    assert set(answers) <= {200, 429} and answers.count(200) <= 2 and total <= all_
    (here / ("ee" * 32)).unlink()


def test_uploads_are_counted(server: Server) -> None:
    made = ask(server, "POST", "/v3/templates", {"name": "many"})[1]
    link = ask(server, "GET", f"/templates/{made['templateID']}/files/{'e7' * 32}")[1]["url"]
    here = Path(server.environment["LAYER_STATE"], "uploads", server.layer.id, link.split("/uploads/")[1].split("/")[0])
    here.mkdir(parents=True, exist_ok=True)
    coming = [here / f".{n}.new" for n in range(32)]
    kept = [here / f"{n:064x}" for n in range(100, 10_101)]
    for others, told in ((coming, "32 uploads of yours"), (kept, "more than 10000 archives")):
        for path in others:
            path.touch()
        refused = httpx.put(link, content=b"x")
        assert refused.status_code == 429 and told in refused.text
        for path in others:
            path.unlink()
    assert httpx.put(link, content=b"x").status_code == 200
    assert not list(here.glob(".*"))


def test_builds_that_hang_keep_nobody_else_from_building(server: Server) -> None:
    for who in ("hans", "bob"):
        server.principal(who)
        for resource in ("verb:template.build", "box:base"):
            server.layer.grant(who, "call", resource)

    def begin(who: str, name: str, command: str) -> str:
        status, made = ask(server, "POST", "/v3/templates", {"name": name}, server.key(who))
        assert status == 202, made
        path = f"/templates/{made['templateID']}/builds/{made['buildID']}"
        said = {"fromImage": "e2bdev/base", "steps": [{"type": "RUN", "args": [command]}], "force": True}
        assert ask(server, "POST", f"/v2{path}", said, server.key(who))[0] == 202
        return f"{path}/status"

    def status(path: str, who: str) -> dict[str, Any]:
        return dict(ask(server, "GET", path, None, server.key(who))[1])

    hanging = [begin("hans", f"hang{n}", "sleep 300") for n in range(6)]
    told = [status(path, "hans") for path in hanging]
    assert [one["status"] for one in told] == ["building"] * 4 + ["waiting"] * 2
    assert "waits for its turn" in told[-1]["logEntries"][0]["message"]
    quick = begin("bob", "quick", "true")
    wait_until(lambda: status(quick, "bob")["status"] not in ("waiting", "building"), "it is built", 60)
    assert status(quick, "bob")["status"] == "ready"
    assert status(hanging[-1], "hans")["status"] == "waiting"
    server.restart()
    assert status(hanging[-1], "hans")["status"] == "error"


def test_odd_requests_are_refused(server: Server) -> None:
    for body in ({}, {"name": 5}, {"name": "../x"}, {"name": "UPPER CASE"}, {"name": "a:b:c"}, {"name": "x", "tags": "y"}, {"name": "x", "tags": ["a b"]},
                 {"name": "x", "cpuCount": -1}, {"name": "x", "memoryMB": 1 << 40}, {"name": "x", "memoryMB": True}, {"name": "ann/x"}, b"{", b"[]"):  # fmt: skip
        assert ask(server, "POST", "/v3/templates", body)[0] == 400, body
    assert ask(server, "POST", "/v3/templates", {"name": "base"})[0] == 409
    made = ask(server, "POST", "/v3/templates", {"name": "odd"})[1]
    path = f"/v2/templates/{made['templateID']}/builds/{made['buildID']}"
    for body in (
        {}, {"fromImage": "x", "fromTemplate": "y"}, {"fromImage": 5}, {"fromImage": "e2bdev/base", "steps": 5}, {"fromImage": "e2bdev/base", "steps": [5]},
        {"fromImage": "e2bdev/base", "steps": [{"type": "EVAL", "args": []}]}, {"fromImage": "e2bdev/base", "steps": [{"type": "RUN", "args": []}]},
        {"fromImage": "e2bdev/base", "steps": [{"type": "COPY", "args": ["a", "b"], "filesHash": "../../x"}]},
        {"fromImage": "e2bdev/base", "steps": [{"type": "COPY", "args": ["a", "/b"], "filesHash": "ef" * 32}]},
        {"fromImage": "e2bdev/base", "steps": [{"type": "ENV", "args": ["A"]}]}, {"fromImage": "e2bdev/base", "steps": [{"type": "USER", "args": ["a b"]}]},
        {"fromImage": "e2bdev/base", "fromImageRegistry": {"type": "aws"}},
    ):  # fmt: skip
        status, answer = ask(server, "POST", path, body)
        assert status == 400 and set(answer) == {"code", "message"}, (body, status, answer)
    for method, where in (("GET", "/templates/nothing"), ("GET", "/templates/aliases/nothing"), ("GET", f"/templates/{made['templateID']}/builds/x/status"),
                          ("POST", f"/v2/templates/{made['templateID']}/builds/x"), ("DELETE", "/templates/nothing"), ("GET", "/templates/a/b/c/d")):  # fmt: skip
        assert ask(server, method, where, {} if method == "POST" else None)[0] in (400, 404), where
    assert ask(server, "GET", f"/templates/{made['templateID']}/files/..%2f..%2fetc")[0] in (400, 404)
    assert ask(server, "GET", f"/templates/{made['templateID']}/builds/{made['buildID']}/status?logsOffset=x")[0] == 400


@pytest.mark.torture
def test_a_start_command_goes_on_where_memory_is_kept(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYER_E2B_TIER", "microvm")
    own = serve()
    for name, value in own.e2b().items():
        monkeypatch.setenv(name, value)
    counts = "n=0; while true; do n=$((n+1)); echo $n > /tmp/count; sleep 0.1; done"
    Template.build(Template().from_base_image().set_start_cmd(counts, "[ $(cat /tmp/count) -gt 20 ]"), "counts")
    with e2b.Sandbox.create("counts") as box:
        first, second = box.commands.run("cat /tmp/count; sleep 1; cat /tmp/count").stdout.split()
    assert 20 < int(first) < int(second)  # it did not begin anew
