"""The host's side of a gateway, and boxes in namespaces of its making."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
ENTER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
fd, resolv, argv = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
if libc.setns(fd, 0x40000000) or libc.unshare(0x20000):
    raise OSError(ctypes.get_errno(), "enter")
libc.mount(None, b"/", None, 16384 | (1 << 18), None)
if libc.mount(resolv.encode(), b"/etc/resolv.conf", None, 4096, None):
    raise OSError(ctypes.get_errno(), "mount")
os.close(fd)
os.execvp(argv[0], argv)
"""


class Gateway:
    """The host's end of a gateway process."""

    def __init__(
        self, state: Path, *options: str, env: dict[str, str] | None = None, hosts: Path | None = None
    ) -> None:
        self.state = state
        self.events: list[dict[str, Any]] = []
        self.raw = b""  # everything the gateway ever said
        self._answers: dict[int, tuple[dict[str, Any], list[int]]] = {}
        self._changed = threading.Condition()
        self._tags = itertools.count(1)
        self.ready: dict[str, Any] | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        self.log = open(state / "gateway.log", "ab")
        start = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)] if hosts else []
        self.process = subprocess.Popen(
            [
                *start,sys.executable, "-W", "default", "-m", "livinglayer.sandbox.egress", str(theirs.fileno()), "--state", str(state), *options],
            pass_fds=[theirs.fileno()], cwd=ROOT, stdout=self.log, stderr=self.log, env=os.environ | (env or {}),
        )  # fmt: skip
        theirs.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait(lambda: self.ready is not None)

    def _read(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.control, 1 << 18, 8)
            except OSError:
                return
            if not data:
                return
            message = json.loads(data)
            with self._changed:
                self.raw += data
                if message.get("event") == "ready":
                    self.ready = message
                elif "event" in message:
                    self.events.append(message)
                else:
                    self._answers[message["tag"]] = (message, fds)
                self._changed.notify_all()

    def wait(self, what: Callable[[], Any], seconds: float = 10) -> Any:
        with self._changed:
            assert self._changed.wait_for(what, seconds), f"not within {seconds} s; events: {self.events[-5:]}"
            return what()

    def ask(self, message: dict[str, Any], fds: list[int] | None = None) -> tuple[dict[str, Any], list[int]]:
        tag = next(self._tags)
        socket.send_fds(self.control, [json.dumps(message | {"tag": tag}).encode()], fds or [])
        self.wait(lambda: tag in self._answers)
        return self._answers.pop(tag)

    def stop(self) -> None:
        self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class Box:
    """A network namespace opened at a gateway; `run` runs a command in it."""

    ids = itertools.count(1)

    def __init__(self, gateway: Gateway, rules: list[Any], **more: Any) -> None:
        self.gateway, self.id = gateway, f"box{next(self.ids)}"
        answer, self.fds = gateway.ask({"do": "network"})
        assert answer["ok"], answer
        self.netns, self.tcp, self.dns, self.channel = self.fds
        self.resolv = gateway.state / "resolv.conf"
        self.resolv.write_text("nameserver 198.18.0.1\n")
        self.open(rules, **more)

    def open(self, rules: list[Any], **more: Any) -> None:
        answer, _ = self.gateway.ask({"do": "open", "box": self.id, "rules": rules} | more, [self.tcp, self.dns])
        assert answer["ok"], answer

    def rules(self, rules: list[Any]) -> None:
        answer, _ = self.gateway.ask({"do": "rules", "box": self.id, "rules": rules})
        assert answer["ok"], answer

    @property
    def env(self) -> dict[str, str]:
        ca = str(self.gateway.state / "egress" / "ca.pem")
        names = ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "CURL_CA_BUNDLE")
        clean = {key: one for key, one in os.environ.items() if "proxy" not in key.lower()}
        return clean | dict.fromkeys(names, ca)

    def popen(self, *argv: str, **more: Any) -> subprocess.Popen[str]:
        env = self.env | more.pop("env", {})
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", ENTER, str(self.netns), str(self.resolv), *argv],
            pass_fds=[self.netns], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
        )  # fmt: skip

    def run(
        self, *argv: str, input: str | None = None, timeout: float = 60, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        with self.popen(*argv, stdin=subprocess.PIPE, **more) as process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def python(self, code: str, **more: Any) -> str:
        """What a piece of Python prints in the box."""
        done = self.run(sys.executable, "-c", code, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def curl(self, *args: str, **more: Any) -> tuple[int, str]:
        """Status and body; status 0 if curl got no response."""
        done = self.run("curl", "-sS", "-m", "15", "-w", "\n%{http_code}", *args, **more)
        body, _, status = done.stdout.rpartition("\n")
        return int(status or 0), body or done.stderr

    def events(self, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Events with these fields, once there are as many."""

        def found() -> list[dict[str, Any]]:
            mine = [event for event in self.gateway.events if event["box"] == self.id]
            return [event for event in mine if all(event[key] == value for key, value in fields.items())]

        self.gateway.wait(lambda: len(found()) >= count)
        return found()

    def close(self) -> dict[str, Any]:
        answer, _ = self.gateway.ask({"do": "close", "box": self.id})
        return answer

    def drop(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.close()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def until(what: Callable[[], Any], seconds: float = 5) -> Any:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return found


def local(host: str, at: int, **more: Any) -> dict[str, Any]:
    """A rule for a host that is a server of these tests."""
    return {"host": host, "resolve": f"127.0.0.1:{at}", "private": True} | more
