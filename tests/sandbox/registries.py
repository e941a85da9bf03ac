"""What a coding agent needs of the world, on loopback: a git remote, a Python index and an npm registry, over TLS, each request counted."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import os
import ssl
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from sandbox.egress.servers import authority, certify, pem


@dataclass(frozen=True)
class Asked:
    """One request that reached a server."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Answer:
    """What a server says to it."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Respond = Callable[[Asked], Answer]


class Trust:
    """An authority of the test's own, which only the gateway is told to believe."""

    def __init__(self, directory: Path, *hosts: str) -> None:
        ca_key, ca = authority()
        key = ec.generate_private_key(ec.SECP256R1())
        self.ca, leaf = directory / "test-ca.pem", directory / "test-leaf.pem"
        self.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        leaf.write_bytes(pem(key, certify("leaf", key, ca_key, ca.subject, hosts=hosts)))
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(leaf)


class Server:
    """An HTTP(S) server in threads; `asked` has every request, `accepted` every connection."""

    def __init__(self, respond: Respond, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1") -> None:
        self.asked: list[Asked] = []
        self.accepted = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                server.accepted += 1
                super().setup()

            def handle(self) -> None:
                try:
                    super().handle()
                except (OSError, ssl.SSLError):
                    pass

            def _any(self) -> None:
                asked = Asked(
                    self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, self._body()
                )
                server.asked.append(asked)
                answer = respond(asked)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _any

            def _body(self) -> bytes:
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                    return body
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def log_message(self, *_: object) -> None:
                pass

        class Serving(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass

            def finish_request(self, request: Any, client_address: Any) -> None:
                if tls is not None:  # in the thread of the connection, so that nobody waits for another's handshake
                    request.settimeout(20)
                    request = tls.wrap_socket(request, server_side=True)
                super().finish_request(request, client_address)

        self._server = Serving((address, 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def git_remote(root: Path) -> Respond:
    """The repositories below `root`, by git's own smart HTTP program."""

    def respond(asked: Asked) -> Answer:
        path, _, query = asked.target.partition("?")
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": asked.method,
            "CONTENT_TYPE": asked.headers.get("content-type", ""),
            "CONTENT_LENGTH": str(len(asked.body)),
            "HTTP_CONTENT_ENCODING": asked.headers.get("content-encoding", ""),
            "HTTP_GIT_PROTOCOL": asked.headers.get("git-protocol", ""),
            "GIT_PROTOCOL": asked.headers.get("git-protocol", ""),
            "REMOTE_USER": "agent",
            "REMOTE_ADDR": "127.0.0.1",
            "HOME": str(root),
        }
        done = subprocess.run(
            ["git", "http-backend"], input=asked.body, env=environment, capture_output=True, check=True
        )
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        status = int(headers.pop("Status", "200").split()[0])
        return Answer(body, status, headers)

    return respond


def make_repository(root: Path, name: str, files: Mapping[str, str]) -> Path:
    """A bare repository with one commit of these files."""
    work, bare = root / f"{name}.work", root / f"{name}.git"
    for path, text in files.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(text)
    who = ["-c", "user.name=Test", "-c", "user.email=test@git.test", "-c", "init.defaultBranch=main"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", *who, *command], cwd=work, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True)
    subprocess.run(["git", "config", "http.receivepack", "true"], cwd=bare, check=True)
    return bare


def python_index(files: Mapping[str, bytes]) -> Respond:
    """A simple index (PEP 503) of these wheels and sdists."""
    by_name: dict[str, list[str]] = {}
    for name in files:
        by_name.setdefault(name.split("-")[0].replace("_", "-"), []).append(name)

    def respond(asked: Asked) -> Answer:
        path = asked.target.partition("?")[0].strip("/")
        kind, _, name = path.partition("/")
        if kind == "simple" and name in by_name:
            links = "".join(
                f'<a href="/files/{file}#sha256={hashlib.sha256(files[file]).hexdigest()}">{html.escape(file)}</a>'
                for file in by_name[name]
            )
            return Answer(
                f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), 200, {"Content-Type": "text/html"}
            )
        if kind == "files" and name in files:
            return Answer(files[name], 200, {"Content-Type": "application/octet-stream"})
        return Answer(b"no such project", 404)

    return respond


def make_wheel(name: str, version: str, files: Mapping[str, str], requires: tuple[str, ...] = ()) -> tuple[str, bytes]:
    """(file name, content) of a pure wheel."""
    info = f"{name}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {r}\n" for r in requires
    )
    held = dict(files) | {
        f"{info}/METADATA": meta,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text.encode())}\n"
        for path, text in held.items()
    )
    held[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in held.items():
            archive.writestr(path, text)
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()


def make_tar(files: Mapping[str, str], root: str) -> bytes:
    """A gzipped tar of these files below `root`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in files.items():
            info = tarfile.TarInfo(f"{root}/{path}")
            info.size, info.mode = len(text.encode()), 0o644
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def npm_registry(packages: Mapping[str, Mapping[str, str]], url: str) -> Respond:
    """A registry of these packages, each its files with a package.json."""
    tarballs, documents = {}, {}
    for name, files in packages.items():
        package = json.loads(files["package.json"])
        version, file = package["version"], f"{name}-{package['version']}.tgz"
        tarballs[f"/{name}/-/{file}"] = content = make_tar(files, "package")
        dist = {
            "tarball": f"{url}/{name}/-/{file}",
            "shasum": hashlib.sha1(content).hexdigest(),
            "integrity": "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode(),
        }
        documents[f"/{name}"] = {
            "name": name,
            "dist-tags": {"latest": version},
            "versions": {version: package | {"dist": dist}},
        }

    def respond(asked: Asked) -> Answer:
        path = asked.target.partition("?")[0]
        if path in documents:
            return Answer(json.dumps(documents[path]).encode(), 200, {"Content-Type": "application/json"})
        if path in tarballs:
            return Answer(tarballs[path], 200, {"Content-Type": "application/octet-stream"})
        return Answer(b"{}", 404, {"Content-Type": "application/json"})

    return respond
