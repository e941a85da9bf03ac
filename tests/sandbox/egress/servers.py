"""Servers for boxes to reach: HTTP/1.1, HTTPS with HTTP/2, WebSocket echo, plain TCP echo; all on 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gzip
import ipaddress
import json
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    return key, certify("test authority", key, key, None, ca=True)


def certify(
    name: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey, issuer: x509.Name | None, ca: bool = False,
    hosts: tuple[str, ...] = (),
) -> x509.Certificate:  # fmt: skip
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(
        issuer or subject, subject, key.public_key(), x509.random_serial_number(), now - day, now + day
    ).add_extension(x509.BasicConstraints(ca, None), critical=True)
    if hosts:
        alternatives = [x509.IPAddress(ipaddress.ip_address(h)) if h[0].isdigit() else x509.DNSName(h) for h in hosts]
        made = made.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return made.sign(by, hashes.SHA256())


def pem(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> bytes:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


class Servers:
    """All servers in one thread; `seen` has what reached the HTTP ones."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: list[dict[str, Any]] = []
        self.accepted = 0  # connections that reached any server
        self.raw: list[bytes] = []  # bytes as they reached the raw HTTP server
        self.ca = directory / "ca.pem"

    def __enter__(self) -> Servers:
        ca_key, ca = authority()
        self.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = (
            "index.test",
            "api.test",
            "good.test",
            "other.test",
            "db.test",
            "git.test",
            "xn--bcher-kva.test",
            "*.good.test",
            "*.secret.test",
            "93.184.216.34",
        )
        leaf = certify("leaf", key, ca_key, ca.subject, hosts=hosts)
        (self.directory / "leaf.pem").write_bytes(pem(key, leaf))
        stray, bad = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        (self.directory / "bad.pem").write_bytes(pem(bad, certify("bad", bad, stray, ca.subject, hosts=hosts)))
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(5)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()

        def context(file: str, alpn: list[str]) -> ssl.SSLContext:
            made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            made.load_cert_chain(self.directory / file)
            made.set_alpn_protocols(alpn)
            return made

        async def start(handler: Any, tls: ssl.SSLContext | None = None) -> int:
            server = await asyncio.start_server(self._guard(handler), "127.0.0.1", 0, ssl=tls)
            running.append(server)
            return server.sockets[0].getsockname()[1]

        running: list[asyncio.Server] = []
        self.http = await start(self._http1)
        self.https = await start(self._http1, context("leaf.pem", ["http/1.1"]))
        self.h2 = await start(self._http2, context("leaf.pem", ["h2", "http/1.1"]))
        self.untrusted = await start(self._http1, context("bad.pem", ["http/1.1"]))
        self.echo = await start(self._echo)
        self.banner = await start(self._banner)
        import websockets

        async def repeat(connection: Any) -> None:
            with contextlib.suppress(Exception):
                async for message in connection:
                    if message == "headers?":
                        message = json.dumps(dict(connection.request.headers.raw_items()))
                    await connection.send(message)

        ws = await websockets.serve(repeat, "127.0.0.1", 0)
        wss = await websockets.serve(repeat, "127.0.0.1", 0, ssl=context("leaf.pem", ["http/1.1"]))
        self.ws = next(iter(ws.sockets)).getsockname()[1]
        self.wss = next(iter(wss.sockets)).getsockname()[1]
        ready.set()
        await self._end.wait()
        for server in running:
            server.close()

    def _guard(self, handler: Any) -> Any:
        async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.accepted += 1
            tls = writer.get_extra_info("ssl_object")
            try:
                if tls is not None and tls.selected_alpn_protocol() != "h2" and handler == self._http2:
                    await self._http1(reader, writer)
                else:
                    await handler(reader, writer)
            except (OSError, asyncio.IncompleteReadError, ValueError):
                pass
            finally:
                writer.close()

        return guarded

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.raw.append(data)
            writer.write(data)
            await writer.drain()

    async def _banner(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        await writer.drain()
        await self._echo(reader, writer)

    async def _http1(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Small, and stricter than our gateway may count on: one request after the other."""
        while line := await reader.readline():
            method, target, _ = line.decode("latin-1").split(" ", 2)
            headers: list[list[str]] = []
            while (header := (await reader.readline()).decode("latin-1").rstrip("\r\n")) != "":
                name, _, value = header.partition(":")
                headers.append([name.lower(), value.strip()])
            said = dict(headers)  # type: ignore[arg-type]
            if method == "POST" and target.startswith("/early"):
                writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlarge")
                await writer.drain()
                writer.write_eof()
                with contextlib.suppress(TimeoutError):  # as servers do: not every byte, but no reset either
                    async with asyncio.timeout(0.5):
                        while await reader.read(65536):
                            pass
                return
            body = b""
            if said.get("transfer-encoding") == "chunked":
                while size := int(await reader.readline(), 16):
                    body += await reader.readexactly(size)
                    await reader.readline()
                while (await reader.readline()).strip():
                    pass
            elif "content-length" in said:
                body = await reader.readexactly(int(said["content-length"]))
            self.seen.append({"method": method, "target": target, "headers": headers, "body": body, "version": "1.1"})
            status, out, data = self.answer(method, target, headers, body)
            writer.write(f"HTTP/1.1 {status} X\r\n".encode())
            if target.startswith("/stream"):
                writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
                for part in data:
                    writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                    await writer.drain()
                    await asyncio.sleep(0.05)
                writer.write(b"0\r\n\r\n")
            else:
                whole = b"".join(data)
                for name, value in out:
                    writer.write(f"{name}: {value}\r\n".encode())
                writer.write(b"Content-Length: %d\r\n\r\n" % len(whole))
                if method != "HEAD":
                    writer.write(whole)
            await writer.drain()

    async def _http2(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        connection.initiate_connection()
        connection.increment_flow_control_window(1 << 24)
        writer.write(connection.data_to_send())
        open_: dict[int, tuple[list[list[str]], bytearray]] = {}
        waiting: dict[int, bytes] = {}
        duplex: set[int] = set()
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    open_[event.stream_id] = ([list(pair) for pair in event.headers], bytearray())
                    if [":path", "/duplex"] in open_[event.stream_id][0]:  # every chunk comes back at once
                        duplex.add(event.stream_id)
                        connection.send_headers(event.stream_id, [(":status", "200")])
                elif isinstance(event, h2.events.DataReceived) and event.stream_id in duplex:
                    connection.send_data(event.stream_id, event.data)
                elif isinstance(event, h2.events.StreamEnded) and event.stream_id in duplex:
                    connection.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)
                elif isinstance(event, h2.events.DataReceived):
                    open_[event.stream_id][1].extend(event.data)
                    connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamReset):
                    open_.pop(event.stream_id, None)
                    waiting.pop(event.stream_id, None)
                elif isinstance(event, h2.events.StreamEnded):
                    headers, body = open_.pop(event.stream_id)
                    said = dict(headers)  # type: ignore[arg-type]
                    self.seen.append(
                        {
                            "method": said[":method"],
                            "target": said[":path"],
                            "headers": headers,
                            "body": bytes(body),
                            "version": "2",
                        }
                    )
                    status, out, parts = self.answer(said[":method"], said[":path"], headers, bytes(body))
                    connection.send_headers(event.stream_id, [(":status", str(status)), *out])
                    waiting[event.stream_id] = b"".join(parts)
            for ident in list(waiting):
                while waiting[ident] and (room := connection.local_flow_control_window(ident)):
                    size = min(room, connection.max_outbound_frame_size)
                    part, waiting[ident] = waiting[ident][:size], waiting[ident][size:]
                    connection.send_data(ident, part)
                if not waiting[ident]:
                    connection.end_stream(ident)
                    del waiting[ident]
            writer.write(connection.data_to_send())
            await writer.drain()

    def answer(
        self, method: str, target: str, headers: list[list[str]], body: bytes
    ) -> tuple[int, list[tuple[str, str]], list[bytes]]:
        path = target.partition("?")[0]
        said = dict(headers)  # type: ignore[arg-type]
        if path.startswith("/echo"):
            whole = json.dumps({"target": target, "headers": headers, "body": body.decode("latin-1")}).encode()
            out = [("content-type", "application/json"), ("x-echo", said.get("authorization", "none"))]
            if path == "/echo/gzip":
                return 200, [*out, ("content-encoding", "gzip")], [gzip.compress(whole)]
            if path == "/echo/br":
                return 200, [*out, ("content-encoding", "br")], [whole]
            return 200, out, [whole]
        if path == "/stream/split":  # the authorization, a few bytes at a time
            value = ("<" + said.get("authorization", "") + ">").encode()
            return 200, [], [value[i : i + 3] for i in range(0, len(value), 3)]
        if path == "/stream":
            return 200, [], [b"one\n", b"two\n", b"three\n"]
        if path.startswith("/redirect"):
            return 302, [("location", target.partition("?to=")[2])], [b""]
        if path.startswith("/bytes/"):
            return 200, [], [b"x" * int(path.rpartition("/")[2])]
        if path == "/length":
            return 200, [], [str(len(body)).encode()]
        return 200, [("content-type", "text/plain")], [f"{method} {target}".encode()]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
