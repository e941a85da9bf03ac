"""A server for tests: a real `layer up` on a port of its own, with a layer and the worker's host of boxes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import livinglayer
from livinglayer import Layer


class Server:
    """One `layer up`, and an embedded handle of the owner on the same layer."""

    def __init__(self, location: str, home: Path, environment: Mapping[str, str], *more: str) -> None:
        self.directory, self.more, self.home = location, more, home
        self.environment = {"XDG_CONFIG_HOME": os.environ["XDG_CONFIG_HOME"], **environment}
        self.layer: Layer = livinglayer.open(location, create=True)
        self.port = 0
        self._log = home / "server.log"
        self._keys: dict[tuple[str, str], str] = {}
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "livinglayer.edges.cli.main", "up", "--json", "--dir", self.directory, "--port", str(self.port)]  # fmt: skip
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.more], env=os.environ | self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        self.told: dict[str, Any] = json.loads(line)
        self.url: str = self.told["url"]
        self.port = int(self.url.rpartition(":")[2])
        with urllib.request.urlopen(f"{self.url}/readyz", timeout=30) as answer:
            assert answer.status == 200

    def stop(self) -> None:
        """End it as a person would."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)

    def restart(self) -> None:
        """The same again, on the same port."""
        self.stop()
        self.start()

    @property
    def log(self) -> str:
        """What it complained of."""
        return self._log.read_text(errors="replace")

    def principal(self, name: str, **more: Any) -> str:
        """A principal by its name, made at its first use."""
        if name != "owner" and not self.layer.query("select 1 as n from principal where name = :n", {"n": name}):
            self.layer.principal(name, **more)
        return name

    def token(self, principal: str = "owner", kind: str = "api", **more: Any) -> str:
        """A token of a principal: one and the same unless it is a special one."""
        if more or (principal, kind) not in self._keys:
            given = {"principal": self.principal(principal), "name": "test", "kind": kind, **more}
            made: str = self.layer.call("token.create", given)["token"]
            if more:
                return made
            self._keys[principal, kind] = made
        return self._keys[principal, kind]

    def key(self, principal: str = "owner") -> str:
        """An API key in E2B's format."""
        return self.token(principal, "e2b")

    def e2b(self, principal: str = "owner") -> dict[str, str]:
        """What E2B's clients read from the environment."""
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.key(principal)}

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        self.process.kill()
        self.layer.close()


Serve = Callable[..., Server]
