"""A server for boxes, standard library only: tells what it was asked, in every way HTTP and WebSocket know."""

import base64
import hashlib
import json
import ssl
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

seen, closed, released, left = [], [], threading.Event(), []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def told(self):
        headers = {name.lower(): value for name, value in self.headers.items()}
        return {"method": self.command, "target": self.path, "headers": headers}

    def say(self, content, status=200, type="application/json", headers=()):
        self.send_response(status)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", type)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(content)

    def do_GET(self):
        seen.append(self.path)
        path, _, query = self.path.partition("?")
        if path == "/early":
            self.close_connection = True
            return self.say(b"", 413)
        act = getattr(self, "on_" + path.strip("/"), None)
        if self.headers.get("Upgrade", "").lower() == "websocket" and path != "/ws":
            return self.say(b"", 404)
        if act is not None:
            return act(query)
        self.say(json.dumps(dict(self.told(), body=self.body().decode())).encode())

    do_POST = do_HEAD = do_PUT = do_GET

    def on_digest(self, query):
        self.say(hashlib.sha256(self.body()).hexdigest().encode(), type="text/plain")

    def on_echo(self, query):
        content = self.body() if self.command == "POST" else b"seven b"
        if query == "chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for at in range(0, len(content), 100_000):
                piece = content[at : at + 100_000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        elif query == "close":
            self.close_connection = True
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content)
        else:
            self.say(content)

    def on_cookies(self, query):
        cookies = [
            "a=1; Path=/; Domain=layer.localhost; HttpOnly",
            "b=2; domain=.localhost",
            "layer_session=evil; Path=/",
        ]
        more = [
            ("Clear-Site-Data", '"cookies"'),
            ("Alt-Svc", "h3"),
            ("Connection", "X-Hop"),
            ("X-Hop", "1"),
            ("X-App", "yes"),
        ]
        self.say(b"", headers=[*(("Set-Cookie", cookie) for cookie in cookies), *more])

    def on_status(self, query):
        self.say(b"", int(query))

    def on_events(self, query):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.wfile.write(b"data: 0\n\n")
        released.wait(60)
        self.wfile.write(b"data: 1\n\n")
        self.connection.recv(1)
        left.append(1)

    def on_release(self, query):
        released.set()
        self.say(b"ok")

    def on_left(self, query):
        self.say(str(len(left)).encode())

    def on_seen(self, query):
        self.say(" ".join(seen).encode())

    def on_closed(self, query):
        self.say(" ".join(closed).encode())

    def on_broken(self, query):
        self.close_connection = True
        answers = {
            "nonsense": b"SSH-2.0-OpenSSH\r\n\r\n",
            "both": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
            "status": b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n",
            "half": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        }
        self.wfile.write(answers.get(query, b""))

    def on_ws(self, query):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        if "mine" in self.headers.get("Sec-WebSocket-Protocol", ""):
            self.send_header("Sec-WebSocket-Protocol", "mine")
        self.end_headers()
        self.close_connection = True
        self.frame(1, json.dumps(self.told()).encode())
        self.frame(9, b"ping")
        while True:
            kind, data = self.read_frame()
            if kind == 8:
                closed.append(str(int.from_bytes(data[:2], "big")))
                return self.frame(8, data[:2])
            if kind in (1, 2) and data.startswith(b"close "):
                return self.frame(8, int(data[6:]).to_bytes(2, "big") + b"bye")
            if data == b"parts":
                self.wfile.write(b"\x01\x01a" + b"\x00\x00" * 20_000 + b"\x80\x01b")
                continue
            if kind in (1, 2):  # in two pieces
                self.frame(kind, data[: len(data) // 2], final=False)
                self.frame(0, data[len(data) // 2 :])

    def frame(self, kind, data, final=True):
        size = len(data)
        length = (
            bytes([size])
            if size < 126
            else struct.pack("!BH", 126, size)
            if size < 65536
            else struct.pack("!BQ", 127, size)
        )
        self.wfile.write(bytes([kind | (128 if final else 0)]) + length + data)

    def read_frame(self):
        kind, size = self.rfile.read(2)
        assert size & 128, "a client masks"
        size &= 127
        if size > 125:
            size = int.from_bytes(self.rfile.read(2 if size == 126 else 8), "big")
        mask = self.rfile.read(4)
        data = self.rfile.read(size)
        masked = int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        return kind & 15, masked.to_bytes(size, "big")


port = int(sys.argv[1])
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
if "tls" in sys.argv:
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -subj /CN=x -days 9".split(),
        check=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("cert.pem", "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
print("ready")
server.serve_forever()
