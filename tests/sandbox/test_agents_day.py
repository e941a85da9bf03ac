"""A coding agent's day in one box: clone, install, test, build, push, serve, snapshot, fork, resume; all of it through the gateway."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.homes import Home, home
from sandbox.registries import (
    Answer,
    Server,
    Trust,
    git_remote,
    make_repository,
    make_tar,
    make_wheel,
    npm_registry,
    python_index,
)

from livinglayer.sandbox import Sandbox

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and namespaces need root")

BACKEND = """
import base64, hashlib, os, pathlib, re, zipfile


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    project = pathlib.Path("pyproject.toml").read_text()
    name, version = (re.search(rf'^{key} = "(.*)"', project, re.M)[1] for key in ("name", "version"))
    info, held = f"{name}-{version}.dist-info", {}
    for path in sorted(pathlib.Path(name).rglob("*.py")):
        held[str(path)] = path.read_bytes()
    held[f"{info}/METADATA"] = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n".encode()
    held[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\\nGenerator: tinybuild\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    digest = lambda data: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    record = "".join(f"{path},sha256={digest(data)},{len(data)}\\n" for path, data in held.items())
    held[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\\n").encode()
    file = f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, file), "w") as archive:
        for path, data in held.items():
            archive.writestr(path, data)
    return file
"""
PYPROJECT = """
[build-system]
requires = ["tinybuild"]
build-backend = "tinybuild"

[project]
name = "{name}"
version = "{version}"
"""
PROJECT = {
    "pyproject.toml": PYPROJECT.format(name="greeter", version="0.1"),
    "greeter/__init__.py": "from shout import loud\n\n\ndef greet(name):\n    return loud('hello ' + name)\n",
    "tests/test_greet.py": (
        "import unittest\n\nfrom greeter import greet\n\n\nclass Greets(unittest.TestCase):\n"
        "    def test_loud(self):\n        self.assertEqual(greet('ann'), 'HELLO ANN!')\n"
    ),
    "package.json": json.dumps({"name": "page", "version": "1.0.0", "dependencies": {"pad-left": "^1.0.0"}}),
    "page.js": "const pad = require('pad-left');\nconsole.log('<h1>' + pad('7', 3) + '</h1>');\n",
    ".gitignore": "node_modules\nvenv\ndist\n__pycache__\n",
}
NPM = {
    "pad-left": {
        "package.json": json.dumps(
            {"name": "pad-left", "version": "1.0.2", "main": "index.js", "dependencies": {"zero": "1.0.0"}}
        ),
        "index.js": "module.exports = (text, width) => text.padStart(width, require('zero'));\n",
    },
    "zero": {"package.json": json.dumps({"name": "zero", "version": "1.0.0"}), "index.js": "module.exports = '0';\n"},
}


class World:
    """The servers, and the rules that lead to them."""

    def __init__(self, directory: Path) -> None:
        self.trust = Trust(directory, "git.test", "pypi.test", "npm.test", "decoy.test")
        self.bare = make_repository(directory, "greeter", PROJECT)
        sdist = {"pyproject.toml": PYPROJECT.format(name="shout", version="2.0"), "shout/__init__.py": SHOUT}
        files = dict([make_wheel("tinybuild", "1.0", {"tinybuild.py": BACKEND})])
        files["shout-2.0.tar.gz"] = make_tar(sdist | {"PKG-INFO": PKG_INFO}, "shout-2.0")
        tls = self.trust.context
        self.servers = {
            "git.test": Server(git_remote(directory), tls),
            "pypi.test": Server(python_index(files), tls),
            "npm.test": Server(npm_registry(NPM, "https://npm.test"), tls),
        }
        self.decoy = Server(lambda asked: Answer(b"never"), tls)
        self.rules: list[Any] = [
            {"host": name, "protocol": "https", "resolve": f"127.0.0.1:{server.port}", "private": True}
            for name, server in self.servers.items()
        ]

    def close(self) -> None:
        for server in (*self.servers.values(), self.decoy):
            server.close()


SHOUT = "def loud(text):\n    return text.upper() + '!'\n"
PKG_INFO = "Metadata-Version: 2.1\nName: shout\nVersion: 2.0\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def own(world: World) -> Iterator[Home]:
    with home({"SSL_CERT_FILE": str(world.trust.ca)}) as made:
        yield made


def ok(box: Any, command: str, **more: Any) -> str:
    """Run it in the box; it must go well."""
    done = box.run(command, timeout=240, **more)
    assert done.exit_code == 0, f"{command}: {done.exit_code}\n{done.stdout.text}\n{done.stderr.text}"
    return str(done.stdout.text)


PUSH = "git -c user.name=Agent -c user.email=agent@git.test commit -qam '{message}' && git push -q origin HEAD:{branch}"


def live_through(tier: str, world: World) -> dict[str, float]:
    """The whole day; seconds by what was done."""
    took: dict[str, float] = {}
    clock = time.monotonic()

    def step(name: str) -> None:
        nonlocal clock
        took[name] = round(time.monotonic() - clock, 3)
        clock = time.monotonic()

    asked_before = {name: len(server.asked) for name, server in world.servers.items()}
    branch = f"work-{tier}"
    box = Sandbox.create(tier=tier, memory="1G", disk="1G", pids=512, cpu=2, egress=world.rules)
    step("create")

    ok(box, "git clone -q https://git.test/greeter.git project")
    assert "pyproject.toml" in ok(box, "ls project")
    step("git clone")

    index = "--index-url https://pypi.test/simple --disable-pip-version-check --no-cache-dir"
    ok(box, "python3 -m venv venv", cwd="/home/user/project")
    step("venv")
    ok(box, f"venv/bin/pip install -q {index} shout", cwd="/home/user/project")  # an sdist: built in the box
    step("pip install")

    ok(
        box,
        "npm install --registry https://npm.test --no-audit --no-fund --no-update-notifier",
        cwd="/home/user/project",
    )
    step("npm install")

    tests = "venv/bin/python -m unittest -q tests/test_greet.py"
    done = box.run(tests, cwd="/home/user/project", timeout=60)
    assert done.exit_code == 0 and "OK" in done.stderr.text, done
    box.files.write("/home/user/project/greeter/__init__.py", PROJECT["greeter/__init__.py"].replace("hello", "bye"))
    assert box.run(tests, cwd="/home/user/project", timeout=60).exit_code == 1  # tests that can fail
    ok(box, "git checkout -q greeter", cwd="/home/user/project")
    step("tests")

    ok(box, f"venv/bin/pip wheel -q {index} --no-deps -w dist .", cwd="/home/user/project")
    ok(box, "mkdir -p dist/site && node page.js > dist/site/index.html", cwd="/home/user/project")
    assert "greeter-0.1-py3-none-any.whl" in ok(box, "ls dist", cwd="/home/user/project")
    step("build")

    ok(box, "echo '# greeter' > README.md && git add README.md package-lock.json", cwd="/home/user/project")
    ok(box, PUSH.format(message="a readme", branch=branch), cwd="/home/user/project")
    shown = subprocess.run(
        ["git", "show", f"{branch}:README.md"], cwd=world.bare, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "# greeter\n"
    step("commit and push")

    box.start("python3 -m http.server 8000 --directory dist/site", cwd="/home/user/project")
    for _ in range(100):
        if box.run("python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))'").exit_code == 0:
            break
    address, port = box.expose(8000)
    assert address == "127.0.0.1"
    with urllib.request.urlopen(f"http://{address}:{port}/index.html", timeout=10) as page:
        assert page.read() == b"<h1>007</h1>\n"
    conversation = box.port(8000)
    conversation.send(b"GET /index.html HTTP/1.0\r\n\r\n")
    said = b""
    while part := conversation.receive():
        said += part
    conversation.close()
    assert said.endswith(b"<h1>007</h1>\n")
    step("serve a port")

    snapshot = box.snapshot()
    step("snapshot")
    forks = box.fork(3)
    step("fork ×3")
    for number, fork in enumerate(forks):
        ok(fork, f"echo {number} > number && git add number", cwd="/home/user/project")
    ok(forks[1], PUSH.format(message="from a fork", branch=f"{branch}-fork"), cwd="/home/user/project")
    for number, fork in enumerate(forks):
        assert fork.files.read("/home/user/project/number") == b"%d\n" % number
        assert fork.run(tests, cwd="/home/user/project", timeout=60).exit_code == 0
    assert not box.files.exists("/home/user/project/number")
    step("work in three forks")

    with Sandbox.create(tier=tier, memory="1G", disk="1G", snapshot=snapshot.id) as later:
        assert later.run(tests, cwd="/home/user/project", timeout=60).exit_code == 0
        assert ok(later, "git status --porcelain; git log --oneline | wc -l", cwd="/home/user/project") == "2\n"
        assert later.run("git fetch", cwd="/home/user/project", timeout=60).exit_code != 0  # rules are not files
    step("create from the snapshot")

    kept = box.suspend()["memory"]
    box.resume()
    assert ok(box, "node page.js", cwd="/home/user/project") == "<h1>007</h1>\n"
    served = box.run("curl -fsS -m 5 http://127.0.0.1:8000/index.html", timeout=30)
    assert served.stdout == ("<h1>007</h1>\n" if kept else "")  # with the memory the server is kept as well
    ok(box, "git fetch -q", cwd="/home/user/project")
    step("suspend and resume")

    for host in ("decoy.test", "127.0.0.1", "10.1.2.3"):
        assert box.run(f"curl -fsk -m 5 https://{host}:{world.decoy.port}/", timeout=60).exit_code != 0
    assert world.decoy.accepted == 0
    step("nothing else")

    # Every request that reached a server stands in a trace, and the trace knows of no other that was let out.
    seen = Counter(
        (event["host"], event["method"], event["path"].partition("?")[0])
        for one in (box, *forks)
        for event in one.trace()
        if event["event"] == "network" and event["verdict"] == "allow" and event["method"]
    )
    reached = Counter(
        (name, asked.method, asked.target.partition("?")[0])
        for name, server in world.servers.items()
        for asked in server.asked[asked_before[name] :]
    )
    assert seen == reached and sum(seen.values()) >= 12
    denied = {event["host"] for event in box.trace() if event["event"] == "network" and event["verdict"] == "deny"}
    assert {"decoy.test", "10.1.2.3"} <= denied
    for one in (box, *forks):
        one.kill()
    return took


def test_a_day_in_one_box(own: Home, world: World) -> None:
    took = live_through("namespace", world)
    print("\na day at tier namespace, seconds:", json.dumps(took))


@pytest.mark.torture
@pytest.mark.parametrize("tier", ["container", "gvisor"])
def test_the_same_day_at_other_tiers(own: Home, world: World, tier: str) -> None:
    took = live_through(tier, world)
    print(f"\na day at tier {tier}, seconds:", json.dumps(took))
